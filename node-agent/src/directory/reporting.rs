//! Reports to the members: usage and load of this node, and usage of its tenants. The replies contain
//! instructions.
//!
//! Each member receives a report about once a second on the link's connection. Heartbeats are separate, and
//! only they determine liveness.
//!
//! [`reprise_agent_core::quota_grants`] selects the reported usage of tenants and the orders to apply.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

use reprise_agent_core::directives::{Directives, NewDirectives, REBALANCER_SLOT, ReplyDirectives};
use reprise_agent_core::event::{Grant, Move};
use reprise_agent_core::quota_grants::{QuotaGrants, ReportNumber, SlotOwner, TenantReport as AgentReport};
use reprise_agent_core::registrar::Granted;
use reprise_agent_core::report_schedule::{REPORT_TIMEOUT, ReportSchedule};
use reprise_agent_core::{NodeUsage, TenantUsage};
use reprise_policy::quota::Quota;
use reprise_policy::tenant::TenantRegistry;
use reprise_policy::{Amounts, DrainProgress, NodeId, TenantName};
use reprise_proto::connection::is_absence;
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{self as wire, ReportReply, ReportRequest, TenantOrder, TenantReport};
use tokio::time::sleep;
use tonic::{Code, Status};

use super::link::{Link, within};
use super::members::Routes;
use super::{DirectoryEvent, Shared};

/// State of this node to report.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct OwnState {
    /// Capacity, usage and load.
    pub(crate) usage: NodeUsage,
    pub(crate) drain: DrainProgress,
    /// All tenants that the core knows.
    pub(crate) tenants: Vec<TenantUsage>,
    /// Tenants with sessions. A change is reported at once, since peers serve this node the blocks of its tenants only.
    pub(crate) session_tenants: BTreeSet<TenantName>,
}

/// State of the reports, shared by the links.
#[derive(Debug, Default)]
pub(super) struct Reporting {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    orders: QuotaGrants,
    directions: Directives,
}

/// Reports to a link's member until the link is closed.
pub(super) async fn report(shared: &Shared, link: &Link) {
    let mut client = PlacementClient::new(link.channel.clone());
    let mut granted = link.granted.subscribe();
    let mut states = shared.own.subscribe();
    let mut urgent = shared.urgent_reports.subscribe();
    let mut schedule = ReportSchedule::default();
    let mut failed = None;
    loop {
        tokio::select! {
            () = sleep(schedule.wait(shared.now())) => {}
            Ok(()) = urgent.changed() => sleep(schedule.wait_urgent(shared.now())).await,
        }
        schedule.open(shared.now());
        // The senders outlive this task: they are owned by the link and by the shared state.
        let Ok(now) = granted.wait_for(Option::is_some).await.map(|granted| *granted) else { return };
        let Ok(state) = states.wait_for(Option::is_some).await.map(|state| state.clone()) else { return };
        let (Some(now), Some(state)) = (schedule.send(now), state) else { continue };
        let routes = shared.routes();
        let (request, number) = request(shared, link, now, (&state, routes.as_deref()));
        match within(REPORT_TIMEOUT, client.report(request)).await {
            Ok(reply) if !reply.fenced && *link.granted.borrow() == Some(now) => {
                failed = None;
                apply_reply(shared, link, (now, number), &reply);
            }
            // Fenced: heartbeats or updates detect that too, and cause a new registration.
            Ok(_) => {}
            Err(status) => log_rejection(link, &mut failed, &status),
        }
    }
}

/// Logs each kind of failure once. Unreachable members are reported elsewhere.
fn log_rejection(link: &Link, failed: &mut Option<Code>, status: &Status) {
    if failed.replace(status.code()) != Some(status.code()) && !is_absence(status) {
        let (code, reason) = (status.code(), status.message());
        tracing::warn!(member = %link.name, ?code, reason, "a report was rejected; retrying");
    }
}

/// Builds a report. Returns it with its number.
fn request(
    shared: &Shared,
    link: &Link,
    granted: Granted,
    (state, routes): (&OwnState, Option<&Routes>),
) -> (ReportRequest, ReportNumber) {
    let names = names(&shared.settings.tenants, &state.tenants);
    let owner = |name: &TenantName| slot_owner(routes, link, name.hash_slot());
    let known = names.iter().zip(&state.tenants).filter_map(|(name, usage)| Some((name.as_ref()?, usage)));
    let mut inner = shared.reporting.inner.lock().unwrap_or_else(PoisonError::into_inner);
    let (number, report) = inner.orders.report(known, &state.usage, owner);
    drop(inner);
    let tenants = report.iter().map(|(name, report)| tenant_report(name, report)).collect();
    let NodeUsage { dram_capacity, dram_used, nvme_capacity, nvme_used, queued_bytes } = state.usage;
    let usage = wire::NodeUsage {
        capacity: Some(wire::Bytes { dram: dram_capacity, nvme: nvme_capacity }),
        used: Some(wire::Bytes { dram: dram_used, nvme: nvme_used }),
        queued_bytes,
    };
    let request = ReportRequest {
        node: u32::from(granted.node.0),
        epoch: granted.epoch.0,
        usage: Some(usage),
        drain: Some(drain_progress(state.drain)),
        tenants,
        // For tenants that are not listed, only this digest shows which owners the report assumed.
        map_digest: routes.map_or(0, Routes::digest),
        session_tenants: state.session_tenants.iter().map(ToString::to_string).collect(),
    };
    (request, number)
}

fn drain_progress(drain: DrainProgress) -> wire::DrainProgress {
    let DrainProgress { drained, walked_blocks, durable_blocks, moved_bytes, nowhere_blocks } = drain;
    wire::DrainProgress { drained, walked_blocks, durable_blocks, moved_bytes, nowhere_blocks }
}

fn names(registry: &Mutex<TenantRegistry>, tenants: &[TenantUsage]) -> Vec<Option<TenantName>> {
    let registry = registry.lock().unwrap_or_else(PoisonError::into_inner);
    tenants.iter().map(|usage| registry.name(usage.tenant).cloned()).collect()
}

fn tenant_report(name: &TenantName, report: &AgentReport) -> TenantReport {
    let tenant = name.to_string();
    let AgentReport::Full(held) = report else {
        return TenantReport { tenant, elsewhere: true, ..TenantReport::default() };
    };
    let bytes = |Amounts { dram, nvme }| Some(wire::Bytes { dram, nvme });
    let (limit, used, limited) = (bytes(held.limit), bytes(held.used), bytes(held.limited));
    let blocks = Some(wire::Blocks { dram: held.blocks.dram, nvme: held.blocks.nvme });
    TenantReport { tenant, version: held.version, limit, used, limited, elsewhere: false, blocks }
}

/// Applies the reply to a report.
fn apply_reply(
    shared: &Shared,
    link: &Link,
    (granted, number): (Granted, ReportNumber),
    reply: &ReportReply,
) {
    for order in &reply.orders {
        if let Some(grant) = grant_of_order(shared, link, number, order) {
            shared.emit(DirectoryEvent::Budget(grant));
        }
    }
    let order = reply.r#move.and_then(|given| {
        let to = NodeId(u16::try_from(given.to).ok()?);
        Some(Move { to, bytes: given.bytes })
    });
    let states_mode = reply.mode() != wire::NodeMode::Unspecified;
    let received = ReplyDirectives {
        mode_revision: states_mode.then_some(reply.mode_revision),
        order,
        from: owner(shared, link, REBALANCER_SLOT),
    };
    let NewDirectives { mode_number, order } = {
        let mut inner = shared.reporting.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.directions.receive(granted.epoch, received)
    };
    if let Some(number) = mode_number {
        shared.emit(DirectoryEvent::Mode { mode: reply.mode(), number });
    }
    if let Some(order) = order {
        shared.emit(DirectoryEvent::Move(order));
    }
}

/// Returns whether a link's member owns a hash slot.
fn owner(shared: &Shared, link: &Link, slot: u16) -> SlotOwner {
    slot_owner(shared.routes().as_deref(), link, slot)
}

fn slot_owner(routes: Option<&Routes>, link: &Link, slot: u16) -> SlotOwner {
    let owner = routes.and_then(|routes| routes.owner(slot));
    if owner.is_some_and(|owner| **owner == *link) { SlotOwner::ThisMember } else { SlotOwner::Another }
}

/// Returns the grant of an order, unless the order is invalid or from a former owner.
fn grant_of_order(shared: &Shared, link: &Link, number: ReportNumber, order: &TenantOrder) -> Option<Grant> {
    let name: TenantName = order.tenant.parse().ok()?;
    let (dram, nvme) = quotas(order)?;
    let owner = owner(shared, link, name.hash_slot());
    let orders = || shared.reporting.inner.lock().unwrap_or_else(PoisonError::into_inner);
    if !orders().orders.accepts((number, owner), &name) {
        return None;
    }
    let mut registry = shared.settings.tenants.lock().unwrap_or_else(PoisonError::into_inner);
    let tenant = registry.enter(&name, None).inspect_err(|error| {
        tracing::warn!(tenant = %name, %error, "cannot apply a tenant's budget on this node");
    });
    drop(registry);
    let grant = Grant { tenant: tenant.ok()?, version: order.version, dram, nvme };
    orders().orders.accept((number, owner), &name, &grant).then_some(grant)
}

/// Returns the quotas of an order; `None` without a limit.
fn quotas(order: &TenantOrder) -> Option<(Quota, Quota)> {
    let reserved = order.reserved.unwrap_or_default();
    let limit = order.limit.unwrap_or(wire::Bytes { dram: u64::MAX, nvme: u64::MAX });
    Some((Quota::new(reserved.dram, limit.dram).ok()?, Quota::new(reserved.nvme, limit.nvme).ok()?))
}
