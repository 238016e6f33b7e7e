//! Reports of an agent to the members: fill level, load and tenants of its node, about once a second to each;
//! and the grants in the answers. Their schedule, the reported tenant data and the choice of accepted grants
//! are production code.
//!
//! A report contains the core's last state, which the simulation takes once a second, less often than agents do.
//! So a report is up to two seconds old when it arrives.

use std::time::Duration;

use reprise_agent_core::event::Grant;
use reprise_agent_core::quota_grants::{self, ReportNumber, SlotOwner};
use reprise_agent_core::report_schedule::REPORT_TIMEOUT;
use reprise_agent_core::{AgentCore, NodeUsage, TenantUsage};
use reprise_controlplane_core::{NodeReport, QuotaGrant, ReportedTenant, TenantReport};
use reprise_policy::placement::DrainProgress;
use reprise_policy::{Amounts, Epoch, Quota, TenantName};

use crate::client::Routes;
use crate::link::{Link, LinkCall, LinkId};
use crate::messages::{NodeReportBody, NodeReportReply, Request};
use crate::network::Host;
use crate::setup::Variant;
use crate::simulation::{AgentStep, Simulation};
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

impl Simulation {
    /// Stores the core's state, and schedules the next time.
    pub(crate) fn report_state(&mut self, node: usize) {
        let process = self.process(node);
        process.state = StateSnapshot::of(&process.core);
        self.env.later(node, STATE_EVERY, AgentStep::ReportState);
    }

    /// Handles the due time of a report.
    pub(crate) fn report_due(&mut self, node: usize, id: LinkId) {
        let now = self.env.time(Host::Node(node));
        let Some(link) = self.client(node).links.get_mut(&id) else { return };
        link.reporting.open(now);
        self.report_if_due(node, id);
    }

    /// Reports if a report is due and the node is registered.
    pub(crate) fn report_if_due(&mut self, node: usize, id: LinkId) {
        let Some(link) = self.client(node).links.get_mut(&id) else { return };
        let Some(granted) = link.reporting.send(link.granted()) else { return };
        let report = self.process(node).state.report();
        let (number, tenants) = self.tenant_report(node, id);
        let map_digest = self.client(node).members.routes().map_or(0, |routes| routes.digest());
        let body = NodeReportBody { node: granted.node, epoch: granted.epoch, report, tenants, map_digest };
        let of = LinkCall::Report { epoch: granted.epoch, number };
        self.call_member(node, id, of, (Request::Report(Box::new(body)), REPORT_TIMEOUT));
    }

    /// Creates the tenant part of a report over a link, and its number.
    fn tenant_report(&mut self, node: usize, id: LinkId) -> (ReportNumber, Vec<ReportedTenant>) {
        let variant = self.env.setup.variant;
        let process = self.process(node);
        let routes = process.client.members.routes().cloned();
        let owner = |tenant: &TenantName| match variant {
            Variant::ReportToOtherOwnerCounts => SlotOwner::ThisMember,
            _ => owner(routes.as_deref(), id, tenant.hash_slot()),
        };
        let names: Vec<TenantName> =
            process.state.tenants.iter().map(|usage| tenant_name(usage.tenant)).collect();
        let tenants = names.iter().zip(&process.state.tenants);
        let (number, tenants) = process.grants.report(tenants, &process.state.usage, owner);
        (number, tenants.into_iter().map(|(tenant, held)| reported_tenant(tenant, held)).collect())
    }

    /// Handles a member's answer to a report of a registration; `None`: it is not the member's current one.
    pub(crate) fn reported(
        &mut self,
        node: usize,
        id: LinkId,
        (epoch, number): (Epoch, ReportNumber),
        reply: Option<NodeReportReply>,
    ) {
        let granted = self.client(node).links.get(&id).and_then(Link::granted);
        // After fencing, heartbeats or updates detect the same, and register again.
        if let Some(NodeReportReply { grants, direction }) = reply
            && granted.is_some_and(|granted| granted.epoch == epoch)
        {
            self.env.count("reports");
            grants.iter().for_each(|order| self.take_grant(node, id, number, order));
            if let Some(direction) = direction {
                self.directed(node, (id, epoch), direction);
            }
        }
        self.report_over(node, id);
    }

    fn take_grant(&mut self, node: usize, id: LinkId, number: ReportNumber, order: &QuotaGrant) {
        let quota = |of: fn(&Amounts) -> u64| Quota::new(of(&order.reserved), of(&order.limit)).ok();
        let (Some(dram), Some(nvme)) = (quota(|amounts| amounts.dram), quota(|amounts| amounts.nvme)) else {
            return;
        };
        let grant = Grant { tenant: tenant_of_name(&order.tenant), version: order.version, dram, nvme };
        let process = self.process(node);
        let owner =
            owner(process.client.members.routes().map(|routes| &**routes), id, order.tenant.hash_slot());
        if process.grants.accept((number, owner), &order.tenant, &grant) {
            self.env.count("orders");
            let delay = self.env.rng.micros(10..INBOX_US_MAX);
            self.env.later(node, delay, AgentStep::Order { epoch: order.epoch, grant });
        } else {
            self.env.count("orders of former owners");
        }
    }

    /// Ends a report, with or without an answer.
    pub(crate) fn report_over(&mut self, node: usize, id: LinkId) {
        let now = self.env.time(Host::Node(node));
        let Some(link) = self.client(node).links.get(&id) else { return };
        let wait = link.reporting.wait(now);
        self.env.later(node, wait, AgentStep::Report(id));
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
