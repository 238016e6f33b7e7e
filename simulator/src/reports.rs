//! Reports of an agent to the members: fill level, load and tenants of its node, about once a second to each;
//! and the grants in the answers. Their schedule, the reported tenant data and the choice of accepted grants
//! are production code.
//!
//! A report contains the core's last state, which the simulation takes once a second, less often than agents do.
//! So a report is up to two seconds old when it arrives.
//!
//! The outputs are carried out in the order of `node-agent/src/directory/reporting.rs`.

use std::time::Duration;

use reprise_agent_core::event::Grant;
use reprise_agent_core::quota_grants::{self, QuotaGrants, ReportNumber, SlotOwner};
use reprise_agent_core::report_schedule::REPORT_TIMEOUT;
use reprise_agent_core::{AgentCore, NodeUsage, TenantUsage};
use reprise_controlplane_core::{NodeReport, QuotaGrant, ReportedTenant, TenantReport};
use reprise_policy::placement::DrainProgress;
use reprise_policy::{Amounts, Quota, TenantName};

use crate::calls::Purpose;
use crate::environment::Environment;
use crate::link::{LinkCall, LinkId};
use crate::links::{Links, Routes};
use crate::messages::{NodeReportBody, Request};
use crate::network::Host;
use crate::setup::Variant;
use crate::simulation::AgentStep;
use crate::tenants::{tenant_name, tenant_of_name};

/// Interval at which the core reports its state; longer than in agents, so that reports are older.
const STATE_EVERY: Duration = Duration::from_secs(1);
/// Maximum time of a grant in the core's inbox, in microseconds.
const INBOX_US_MAX: u64 = 20_000;

/// Latest state that a core has reported.
#[derive(Clone, Debug, Default)]
pub(crate) struct StateSnapshot {
    pub(crate) usage: NodeUsage,
    pub(crate) drain: DrainProgress,
    pub(crate) tenants: Vec<TenantUsage>,
}

impl StateSnapshot {
    pub(crate) fn of(core: &AgentCore) -> StateSnapshot {
        let tenants = core.tenant_usage().collect();
        StateSnapshot { usage: core.node_usage(), drain: core.drain_progress(), tenants }
    }

    /// Converts the state to a report for members.
    pub(crate) fn report(&self) -> NodeReport {
        let NodeUsage { dram_capacity, dram_used, nvme_capacity, nvme_used, queued_bytes } = self.usage;
        NodeReport {
            capacity: Amounts { dram: dram_capacity, nvme: nvme_capacity },
            used: Amounts { dram: dram_used, nvme: nvme_used },
            queued_bytes,
            drain: self.drain,
        }
    }
}

/// What an agent reports, and the grants that it accepts.
#[derive(Debug)]
pub(crate) struct Reports {
    node: usize,
    /// Latest state that the core has reported.
    state: StateSnapshot,
    grants: QuotaGrants,
}

impl Reports {
    pub(crate) fn new(node: usize) -> Reports {
        Reports { node, state: StateSnapshot::default(), grants: QuotaGrants::default() }
    }

    /// Stores the core's state, and schedules the next time.
    pub(crate) fn take_state(&mut self, env: &mut Environment, core: &AgentCore) {
        self.state = StateSnapshot::of(core);
        env.later(self.node, STATE_EVERY, AgentStep::ReportState);
    }

    /// Handles the due time of a report.
    pub(crate) fn due(&mut self, env: &mut Environment, links: &mut Links, id: LinkId) {
        let now = env.time(Host::Node(self.node));
        let Some((link, _)) = links.link(id) else { return };
        link.reporting.open(now);
        self.send_if_due(env, links, id);
    }

    /// Reports if a report is due and the node is registered.
    pub(crate) fn send_if_due(&mut self, env: &mut Environment, links: &mut Links, id: LinkId) {
        let Some((link, _)) = links.link(id) else { return };
        let Some(granted) = link.reporting.send(link.granted()) else { return };
        let report = self.state.report();
        let (number, tenants) = self.tenant_report(env, links, id);
        let map_digest = links.routes().map_or(0, Routes::digest);
        let body = NodeReportBody { node: granted.node, epoch: granted.epoch, report, tenants, map_digest };
        let of = Purpose::Link(id, LinkCall::Report { epoch: granted.epoch, number });
        links.call(env, (id, of), Request::Report(Box::new(body)), REPORT_TIMEOUT);
    }

    /// Creates the tenant part of a report over a link, and its number.
    fn tenant_report(
        &mut self,
        env: &Environment,
        links: &Links,
        id: LinkId,
    ) -> (ReportNumber, Vec<ReportedTenant>) {
        let owner = |tenant: &TenantName| match env.setup.variant {
            Variant::ReportToOtherOwnerCounts => SlotOwner::ThisMember,
            _ => owner(links.routes(), id, tenant.hash_slot()),
        };
        let names: Vec<TenantName> =
            self.state.tenants.iter().map(|usage| tenant_name(usage.tenant)).collect();
        let tenants = names.iter().zip(&self.state.tenants);
        let (number, tenants) = self.grants.report(tenants, &self.state.usage, owner);
        (number, tenants.into_iter().map(|(tenant, held)| reported_tenant(tenant, held)).collect())
    }

    /// Handles the grants in a member's answer to a report.
    pub(crate) fn take_grants(
        &mut self,
        env: &mut Environment,
        links: &Links,
        (id, number): (LinkId, ReportNumber),
        grants: &[QuotaGrant],
    ) {
        env.count("reports");
        for order in grants {
            let quota = |of: fn(&Amounts) -> u64| Quota::new(of(&order.reserved), of(&order.limit)).ok();
            let (Some(dram), Some(nvme)) = (quota(|amounts| amounts.dram), quota(|amounts| amounts.nvme))
            else {
                continue;
            };
            let grant = Grant { tenant: tenant_of_name(&order.tenant), version: order.version, dram, nvme };
            let owner = owner(links.routes(), id, order.tenant.hash_slot());
            if self.grants.accept((number, owner), &order.tenant, &grant) {
                env.count("orders");
                let delay = env.rng.micros(10..INBOX_US_MAX);
                env.later(self.node, delay, AgentStep::Order { epoch: order.epoch, grant });
            } else {
                env.count("orders of former owners");
            }
        }
    }

    /// Ends a report, with or without an answer.
    pub(crate) fn over(&self, env: &mut Environment, links: &Links, id: LinkId) {
        let now = env.time(Host::Node(self.node));
        let Some(link) = links.links.get(&id) else { return };
        env.later(self.node, link.reporting.wait(now), AgentStep::Report(id));
    }
}

/// Reports whether a link's member has a slot, as far as the agent knows.
pub(crate) fn owner(routes: Option<&Routes>, id: LinkId, slot: u16) -> SlotOwner {
    let owns = routes.and_then(|routes| routes.owner(slot)) == Some(&id);
    if owns { SlotOwner::ThisMember } else { SlotOwner::Another }
}

/// Converts a tenant's report to its message.
fn reported_tenant(tenant: TenantName, report: quota_grants::TenantReport) -> ReportedTenant {
    match report {
        quota_grants::TenantReport::NameOnly => ReportedTenant::Elsewhere(tenant),
        quota_grants::TenantReport::Full(held) => {
            let quota_grants::GrantUsage { version, limit, used, limited, .. } = held;
            ReportedTenant::Owned(TenantReport { tenant, version, limit, used, limited })
        }
    }
}
