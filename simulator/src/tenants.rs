//! Limits of tenants on a node: grants of the control plane, in any order, and the check that they hold.
//!
//! The bound is that of `node-agent/core/src/quota.rs`: a tenant stays within its limit. Memory above
//! the limit, after a lower grant or a start, is released gradually; until then the tenant gets no further
//! memory.
//!
//! In most simulations grants come from members (`reports.rs`). In some the simulation generates random
//! grants that bypass the members, so that they arrive in any order.

use std::collections::BTreeMap;

use reprise_agent_core::AgentCore;
use reprise_agent_core::event::{Event, Grant};
use reprise_policy::{Quota, TenantId, TenantName};

use crate::environment::Environment;
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

/// Sends a random grant to a random node; later grants may arrive earlier.
pub(crate) fn send_grant(simulation: &mut Simulation) {
    let Simulation { env, nodes, grants, .. } = simulation;
    if env.calm {
        return;
    }
    let delay = env.rng.millis(GRANT_EVERY_MS);
    env.after(delay, Action::Grant);
    let node = env.rng.below(nodes.len());
    let tenant = TenantId(env.rng.below(usize::from(env.setup.tenants)) as u16);
    let slot = large_layout().slot_bytes();
    let limit = |count: usize| if count > 30 { u64::MAX } else { slot * (2 + count as u64) };
    let quota = |count: usize| Quota::new(0, limit(count)).expect("nothing is reserved");
    let (dram, nvme) = (quota(env.rng.below(40)), quota(env.rng.below(40)));
    *grants += 1;
    let grant = Grant { tenant, version: *grants, dram, nvme };
    if nodes[node].process.is_some() {
        let delay = env.rng.micros(GRANT_DELAY_US);
        env.later(node, delay, AgentStep::Event(Event::Budget(grant)));
    }
}

impl TenantAudit {
    /// Records a grant that has arrived; returns the grant that the agent applies.
    pub(crate) fn grant_arrives(&mut self, env: &mut Environment, grant: Grant) -> Grant {
        let in_order_of_arrival = env.setup.variant == Variant::GrantsInOrderOfArrival;
        env.count("grants");
        self.arrived += 1;
        let newest = self.granted.entry(grant.tenant).or_insert(grant);
        if grant.version > newest.version {
            *newest = grant;
        }
        if in_order_of_arrival { Grant { version: self.arrived, ..grant } } else { grant }
    }

    /// Checks that no tenant grows above its limit.
    pub(crate) fn check(&mut self, env: &Environment, node: usize, core: &AgentCore) {
        let configured = &env.setup.settings.tenants;
        for usage in core.tenant_usage() {
            let tenant = usage.tenant;
            let quotas = configured.iter().find(|quotas| quotas.tenant == tenant);
            let configured = quotas.map_or([u64::MAX; 2], |of| [of.dram.limit(), of.nvme.limit()]);
            let grant = self.granted.get(&tenant);
            let granted = grant.map_or([u64::MAX; 2], |grant| [grant.dram.limit(), grant.nvme.limit()]);
            let used = [usage.dram.used, usage.nvme.used];
            let before = self.used.insert(tenant, used).unwrap_or(used);
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
}
