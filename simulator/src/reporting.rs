//! Reports of an agent to the members: how full its node is, how busy, and what its tenants hold, about once a second to each;
//! and the orders that come back. What is said of tenants and which orders are taken is the production code.
//!
//! As `node-agent/src/directory/reporting.rs`. What is reported is what the core last said of itself, which
//! `node-agent/src/core_loop.rs` has it do once a second: a report is up to two seconds old when it arrives.

use std::time::Duration;

use reprise_agent_core::agent::{AgentCore, NodeUsage, TenantUsage};
use reprise_agent_core::event::Grant;
use reprise_agent_core::orders::{self, Owner, ReportNumber};
use reprise_controlplane_core::{Amounts, NodeReport, Order, Said, TenantReport};
use reprise_policy::placement::DrainProgress;
use reprise_policy::{Epoch, Quota, TenantName, Tick};

use crate::client::Routes;
use crate::link::{LinkCall, LinkId};
use crate::messages::{NodeIsTold, NodeSays, Request};
use crate::network::Host;
use crate::setup::Variant;
use crate::tenants::{tenant_name, tenant_of_name};
use crate::world::{Local, World};

/// As `core_loop.rs`: pause between two looks of a core at itself.
const TELL_EVERY: Duration = Duration::from_secs(1);
/// Pause between two reports to a member, and the time for the answer to one.
const REPORT_EVERY: Duration = Duration::from_secs(1);
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);
/// An order is in the core's inbox so long, in microseconds.
const INBOX_US_MAX: u64 = 20_000;

/// What a core last said of itself.
#[derive(Clone, Debug, Default)]
pub(crate) struct OwnState {
    pub(crate) usage: NodeUsage,
    pub(crate) drain: DrainProgress,
    pub(crate) tenants: Vec<TenantUsage>,
}

/// Where a link is between two reports.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Reporting {
    /// When the last one was due.
    due: Tick,
    /// It was due while the node was not registered.
    waits: bool,
}

impl OwnState {
    pub(crate) fn of(core: &AgentCore) -> OwnState {
        let tenants = core.tenant_usage().collect();
        OwnState { usage: core.node_usage(), drain: core.drain_progress(), tenants }
    }

    /// As a member is told.
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

impl World {
    /// The core says how it is, and does so again.
    pub(crate) fn tell_state(&mut self, node: usize) {
        let process = self.process(node);
        process.told = OwnState::of(&process.core);
        self.later(node, TELL_EVERY, Local::TellState);
    }

    /// Time for a report over a link.
    pub(crate) fn report_due(&mut self, node: usize, id: LinkId) {
        let now = self.time(Host::Node(node));
        let Some(link) = self.client(node).links.get_mut(&id) else { return };
        link.reporting = Reporting { due: now, waits: true };
        self.report_if_due(node, id);
    }

    /// Reports, if that is due and the node is registered.
    pub(crate) fn report_if_due(&mut self, node: usize, id: LinkId) {
        let Some(link) = self.client(node).links.get_mut(&id) else { return };
        let Some(granted) = link.granted.filter(|_| link.reporting.waits) else { return };
        link.reporting.waits = false;
        let report = self.process(node).told.report();
        let (number, said) = self.say_tenants(node, id);
        let map_digest = self.client(node).routes.as_ref().map_or(0, Routes::digest);
        let says = NodeSays { node: granted.node, epoch: granted.epoch, report, said, map_digest };
        let of = LinkCall::Report { epoch: granted.epoch, number };
        self.call_member(node, id, of, (Request::Report(Box::new(says)), REPORT_TIMEOUT));
    }

    /// What a report over a link says of tenants, and its number.
    fn say_tenants(&mut self, node: usize, id: LinkId) -> (ReportNumber, Vec<Said>) {
        let variant = self.setup.variant;
        let process = self.process(node);
        let routes = process.client.routes.clone();
        let owner = |tenant: &TenantName| match variant {
            Variant::ElsewhereHeard => Owner::ThisMember,
            _ => owner(routes.as_ref(), id, tenant),
        };
        let names: Vec<TenantName> =
            process.told.tenants.iter().map(|usage| tenant_name(usage.tenant)).collect();
        let tenants = names.iter().zip(&process.told.tenants);
        let (number, told) = process.orders.report(tenants, &process.told.usage, owner);
        (number, told.into_iter().map(|(tenant, held)| said(tenant, held)).collect())
    }

    /// A member has answered a report of a registration; `None`: it is not the member's current one.
    pub(crate) fn reported(
        &mut self,
        node: usize,
        id: LinkId,
        (epoch, number): (Epoch, ReportNumber),
        told: Option<NodeIsTold>,
    ) {
        let granted = self.client(node).links.get(&id).and_then(|link| link.granted);
        // Where it is fenced, beats or updates say so as well, and register again.
        if let Some(NodeIsTold { orders, direction }) = told
            && granted.is_some_and(|granted| granted.epoch == epoch)
        {
            self.count("reports");
            orders.iter().for_each(|order| self.take_order(node, id, number, order));
            if let Some(direction) = direction {
                self.directed(node, (id, epoch), direction);
            }
        }
        self.report_over(node, id);
    }

    fn take_order(&mut self, node: usize, id: LinkId, number: ReportNumber, order: &Order) {
        let quota = |of: fn(&Amounts) -> u64| Quota::new(of(&order.reserved), of(&order.limit)).ok();
        let (Some(dram), Some(nvme)) = (quota(|amounts| amounts.dram), quota(|amounts| amounts.nvme)) else {
            return;
        };
        let grant = Grant { tenant: tenant_of_name(&order.tenant), version: order.version, dram, nvme };
        let process = self.process(node);
        let owner = owner(process.client.routes.as_ref(), id, &order.tenant);
        if process.orders.take((number, owner), &order.tenant, &grant) {
            self.count("orders");
            let delay = self.rng.micros(10..INBOX_US_MAX);
            self.later(node, delay, Local::Order { epoch: order.epoch, grant });
        } else {
            self.count("orders of former owners");
        }
    }

    /// A report has come to its end, with or without an answer.
    pub(crate) fn report_over(&mut self, node: usize, id: LinkId) {
        let now = self.time(Host::Node(node));
        let Some(link) = self.client(node).links.get(&id) else { return };
        let wait = link.reporting.due.after(REPORT_EVERY).since(now);
        self.later(node, wait, Local::Report(id));
    }
}

/// Whether a link's member has a tenant's slot, as far as the agent knows.
fn owner(routes: Option<&Routes>, id: LinkId, tenant: &TenantName) -> Owner {
    let owns = routes.is_some_and(|routes| routes.owns(id, tenant.hash_slot()));
    if owns { Owner::ThisMember } else { Owner::Another }
}

/// What is said of a tenant, on its way to a member.
fn said(tenant: TenantName, said: orders::Said) -> Said {
    let amounts = |orders::Bytes { dram, nvme }| Amounts { dram, nvme };
    match said {
        orders::Said::Elsewhere => Said::Elsewhere(tenant),
        orders::Said::Here(held) => {
            let (limit, used, limited) = (amounts(held.limit), amounts(held.used), amounts(held.limited));
            Said::Here(TenantReport { tenant, version: held.version, limit, used, limited })
        }
    }
}
