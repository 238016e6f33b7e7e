//! Limits of tenants on a node: grants of the control plane, in any order, and the check that they hold.
//!
//! The bound is that of `node-agent/core/src/quota.rs`: a tenant stays within its limit. Memory above
//! the limit, after a lower grant or a start, is released gradually; until then the tenant gets no further
//! memory.
//!
//! In most simulations grants come from members (`reports.rs`). In some the simulation generates random
//! grants that bypass the members, so that they arrive in any order.

use std::collections::BTreeMap;

use reprise_agent_core::event::{Event, Grant};
use reprise_agent_core::limits::LOOKUPS_MAX;
use reprise_policy::{Epoch, Quota, TenantId, TenantName};

use crate::budgets;
use crate::setup::{Variant, large_layout};
use crate::simulation::{Action, AgentStep, Simulation};

/// Interval between two grants, in milliseconds.
const GRANT_EVERY_MS: std::ops::Range<u64> = 50..1500;
/// Delay of a grant, in microseconds. It may exceed the interval, so that grants arrive in any order.
const GRANT_DELAY_US: std::ops::Range<u64> = 100..3_000_000;
const _: () = assert!(GRANT_EVERY_MS.end * 1000 < GRANT_DELAY_US.end);

/// Newest grants and usage per tenant, for the checks of one agent process.
#[derive(Debug, Default)]
pub(crate) struct TenantAudit {
    /// The newest grant that has arrived.
    granted: BTreeMap<TenantId, Grant>,
    /// Bytes of DRAM and NVMe after the last event.
    used: BTreeMap<TenantId, [u64; 2]>,
    /// Number of grants that have arrived.
    arrived: u64,
}

/// Returns the name of a tenant.
pub(crate) fn tenant_name(tenant: TenantId) -> TenantName {
    match tenant {
        TenantId::DEFAULT => TenantName::default_tenant(),
        TenantId(number) => format!("t{number}").parse().expect("a generated tenant name is valid"),
    }
}

/// Returns the tenant with this name.
pub(crate) fn tenant_of_name(name: &TenantName) -> TenantId {
    let number = name.as_str().strip_prefix('t').and_then(|number| number.parse().ok());
    number.map_or(TenantId::DEFAULT, TenantId)
}

impl Simulation {
    /// Sends a random grant to a random node; later grants may arrive earlier.
    pub(crate) fn send_grant(&mut self) {
        if self.env.calm {
            return;
        }
        let delay = self.env.rng.millis(GRANT_EVERY_MS);
        self.env.after(delay, Action::Grant);
        let node = self.env.rng.below(self.nodes.len());
        let tenant = TenantId(self.env.rng.below(usize::from(self.env.setup.tenants)) as u16);
        let slot = large_layout().slot_bytes();
        let limit = |count: usize| if count > 30 { u64::MAX } else { slot * (2 + count as u64) };
        let quota = |count: usize| Quota::new(0, limit(count)).expect("nothing is reserved");
        let (dram, nvme) = (quota(self.env.rng.below(40)), quota(self.env.rng.below(40)));
        self.grants += 1;
        let grant = Grant { tenant, version: self.grants, dram, nvme };
        if self.nodes[node].process.is_some() {
            let delay = self.env.rng.micros(GRANT_DELAY_US);
            self.env.later(node, delay, AgentStep::Event(Event::Budget(grant)));
        }
    }

    /// Applies a grant to the core.
    pub(crate) fn apply_grant(&mut self, node: usize, grant: Grant) {
        let grant = self.grant_arrives(node, grant);
        self.apply(node, Event::Budget(grant));
    }

    /// Applies a member's grant; `epoch` is the epoch of the agent's registration.
    pub(crate) fn apply_ledger_grant(&mut self, node: usize, epoch: Epoch, grant: Grant) {
        let tenant = grant.tenant;
        let before = self.grant_of(node, tenant);
        self.apply_grant(node, grant);
        if before != self.grant_of(node, tenant) {
            budgets::audit_order(self, (node, tenant), epoch, before);
        }
    }

    /// Returns the last grant of a node's core for a tenant.
    pub(crate) fn grant_of(&self, node: usize, tenant: TenantId) -> Option<Grant> {
        let core = &self.nodes[node].process.as_ref()?.core;
        core.tenant_usage().find(|usage| usage.tenant == tenant)?.grant
    }

    /// Records a grant that has arrived; returns the grant that the agent applies.
    fn grant_arrives(&mut self, node: usize, grant: Grant) -> Grant {
        let in_order_of_arrival = self.env.setup.variant == Variant::GrantsInOrderOfArrival;
        self.env.count("grants");
        let process = self.process(node);
        process.names.insert(grant.tenant);
        process.placed.granted = true;
        let tenants = &mut self.process(node).tenants;
        tenants.arrived += 1;
        let newest = tenants.granted.entry(grant.tenant).or_insert(grant);
        if grant.version > newest.version {
            *newest = grant;
        }
        if in_order_of_arrival { Grant { version: tenants.arrived, ..grant } } else { grant }
    }

    /// Checks that no tenant grows above its limit.
    pub(crate) fn audit_tenants(&mut self, node: usize) {
        let configured = &self.env.setup.settings.tenants;
        let process = self.nodes[node].process.as_mut().expect("the agent runs");
        for usage in process.core.tenant_usage() {
            let tenant = usage.tenant;
            let quotas = configured.iter().find(|quotas| quotas.tenant == tenant);
            let configured = quotas.map_or([u64::MAX; 2], |of| [of.dram.limit(), of.nvme.limit()]);
            let grant = process.tenants.granted.get(&tenant);
            let granted = grant.map_or([u64::MAX; 2], |grant| [grant.dram.limit(), grant.nvme.limit()]);
            let used = [usage.dram.used, usage.nvme.used];
            let before = process.tenants.used.insert(tenant, used).unwrap_or(used);
            for kind in 0..2 {
                let limit = configured[kind].min(granted[kind]);
                assert!(
                    used[kind] <= limit.max(before[kind]),
                    "node {node}: {tenant:?} takes {} bytes over its limit of {limit}",
                    used[kind] - limit
                );
            }
        }
    }

    /// Checks the bounds of the queues of changes for members, and of the concurrent lookups.
    pub(crate) fn audit_queues(&mut self, node: usize) {
        let limit = self.env.setup.changes_queued_max;
        let process = self.nodes[node].process.as_mut().expect("the agent runs");
        process.inventory_max = process.inventory_max.max(process.inventory.len());
        // At most `limit` changes are in a batch in flight while the queue fills again to `limit`.
        // Inventories of different slots are taken at different times, so their sum may exceed the largest
        // inventory: two are allowed. The constant is a margin.
        let bound = limit.saturating_mul(2).saturating_add(2 * process.inventory_max).saturating_add(8);
        for link in process.client.links.values() {
            let queued = link.announcer.outbox().queued();
            assert!(queued <= bound, "node {node}: {queued} queued changes exceed the bound of {bound}");
        }
        let lookups = process.client.lookups.len();
        assert!(lookups <= LOOKUPS_MAX, "node {node}: {lookups} concurrent lookups");
    }
}
