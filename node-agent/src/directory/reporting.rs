//! Reports to the members: how full this node is, how busy, and what its tenants hold. The answers say what it is to do.
//!
//! Each member is told about once a second, on the link's connection; heartbeats are apart, and judge life alone.
//!
//! What is said of tenants, and which orders are taken, is decided in [`reprise_agent_core::orders`].

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use reprise_agent_core::agent::{NodeUsage, TenantUsage};
use reprise_agent_core::directions::{Directions, REBALANCER_SLOT};
use reprise_agent_core::event::{Grant, Move};
use reprise_agent_core::orders::{Bytes, Orders, Owner, ReportNumber, Said};
use reprise_policy::quota::Quota;
use reprise_policy::tenant::TenantRegistry;
use reprise_policy::{DrainProgress, NodeId, TenantName};
use reprise_proto::connection::is_absence;
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{self as wire, ReportReply, ReportRequest, TenantOrder, TenantReport};
use tokio::time::{MissedTickBehavior, interval};
use tonic::{Code, Status};

use super::link::{Granted, Link, within};
use super::members::Routes;
use super::{DirectoryEvent, Shared};

/// Pause between two reports to a member.
const REPORT_EVERY: Duration = Duration::from_secs(1);
/// Time for the answer to a report: well below the two seconds in which a tenant's budget can get another owner.
const REPORT_TIMEOUT: Duration = Duration::from_secs(1);

/// What a node reports of itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct OwnState {
    /// Room and load.
    pub(crate) usage: NodeUsage,
    /// How far its draining is.
    pub(crate) drain: DrainProgress,
    /// Every tenant that the core knows.
    pub(crate) tenants: Vec<TenantUsage>,
}

/// What links share about reports.
#[derive(Debug, Default)]
pub(super) struct Reporting {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    orders: Orders,
    directions: Directions,
}

/// Reports to a link's member for as long as the link lives.
pub(super) async fn report(shared: &Shared, link: &Link) {
    let mut client = PlacementClient::new(link.channel.clone());
    let mut granted = link.granted.subscribe();
    let mut states = shared.own.subscribe();
    let mut ticks = interval(REPORT_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut failed = None;
    loop {
        ticks.tick().await;
        // Neither sender can be gone: they live in the link and in what all links share.
        let Ok(now) = granted.wait_for(Option::is_some).await.map(|granted| *granted) else { return };
        let Some(now) = now else { continue };
        let Ok(state) = states.wait_for(Option::is_some).await.map(|state| state.clone()) else { return };
        let Some(state) = state else { continue };
        let routes = shared.routes.borrow().clone();
        let (request, number) = request(shared, link, now, (&state, routes.as_deref()));
        match within(REPORT_TIMEOUT, client.report(request)).await {
            Ok(reply) if !reply.fenced && *link.granted.borrow() == Some(now) => {
                failed = None;
                take(shared, link, (now, number), &reply);
            }
            // Beats or updates say so as well, and register again.
            Ok(_) => {}
            Err(status) => complain(link, &mut failed, &status),
        }
    }
}

/// Once per kind of failure. That a member is away is said by others.
fn complain(link: &Link, failed: &mut Option<Code>, status: &Status) {
    if failed.replace(status.code()) != Some(status.code()) && !is_absence(status) {
        let (code, reason) = (status.code(), status.message());
        tracing::warn!(member = %link.name, ?code, reason, "a report was not taken; it is repeated");
    }
}

/// What to say now, and the number of the report.
fn request(
    shared: &Shared,
    link: &Link,
    granted: Granted,
    (state, routes): (&OwnState, Option<&Routes>),
) -> (ReportRequest, ReportNumber) {
    let names = names(&shared.settings.tenants, &state.tenants);
    let owner = |name: &TenantName| {
        let owns = routes.is_some_and(|routes| routes.owns(link, name.hash_slot()));
        if owns { Owner::ThisMember } else { Owner::Another }
    };
    let known = names.iter().zip(&state.tenants).filter_map(|(name, usage)| Some((name.as_ref()?, usage)));
    let mut inner = shared.reporting.inner.lock().unwrap_or_else(PoisonError::into_inner);
    let (number, said) = inner.orders.report(known, &state.usage, owner);
    drop(inner);
    let tenants = said.iter().map(|(name, said)| tenant_report(name, said)).collect();
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
        // Of a tenant that is not named nothing else says by which owners this report was made.
        map_digest: routes.map_or(0, Routes::digest),
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

fn tenant_report(name: &TenantName, said: &Said) -> TenantReport {
    let tenant = name.to_string();
    let Said::Here(held) = said else {
        return TenantReport { tenant, elsewhere: true, ..TenantReport::default() };
    };
    let bytes = |Bytes { dram, nvme }| Some(wire::Bytes { dram, nvme });
    let (limit, used, limited) = (bytes(held.limit), bytes(held.used), bytes(held.limited));
    let blocks = Some(wire::Blocks { dram: held.blocks.dram, nvme: held.blocks.nvme });
    TenantReport { tenant, version: held.version, limit, used, limited, elsewhere: false, blocks }
}

/// Takes the answer to a report.
fn take(shared: &Shared, link: &Link, (granted, number): (Granted, ReportNumber), reply: &ReportReply) {
    for order in &reply.orders {
        if let Some(grant) = take_order(shared, link, number, order) {
            shared.emit(DirectoryEvent::Budget(grant));
        }
    }
    let is_rebalancer =
        shared.routes.borrow().as_ref().is_some_and(|routes| routes.owns(link, REBALANCER_SLOT));
    let given = reply.r#move.and_then(|given| {
        let to = NodeId(u16::try_from(given.to).ok()?);
        Some(Move { to, bytes: given.bytes })
    });
    let (mode, is_news) = {
        let mut inner = shared.reporting.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let says_a_mode = reply.mode() != wire::NodeMode::Unspecified;
        let number =
            says_a_mode.then(|| inner.directions.number_mode(granted.epoch, reply.mode_revision)).flatten();
        (number, is_rebalancer && inner.directions.is_news(given))
    };
    if let Some(number) = mode {
        shared.emit(DirectoryEvent::Mode { mode: reply.mode(), number });
    }
    if is_news {
        shared.emit(DirectoryEvent::Move(given));
    }
}

/// The grant that an order makes, unless the order is a former owner's or makes no sense.
fn take_order(shared: &Shared, link: &Link, number: ReportNumber, order: &TenantOrder) -> Option<Grant> {
    let name: TenantName = order.tenant.parse().ok()?;
    let (dram, nvme) = quotas(order)?;
    let owns = |routes: &Arc<Routes>| routes.owns(link, name.hash_slot());
    let owner =
        if shared.routes.borrow().as_ref().is_some_and(owns) { Owner::ThisMember } else { Owner::Another };
    let orders = || shared.reporting.inner.lock().unwrap_or_else(PoisonError::into_inner);
    if !orders().orders.takes((number, owner), &name) {
        return None;
    }
    let mut registry = shared.settings.tenants.lock().unwrap_or_else(PoisonError::into_inner);
    let tenant = registry.enter(&name, None).inspect_err(|error| {
        tracing::warn!(tenant = %name, %error, "a budget cannot be kept on this node");
    });
    drop(registry);
    let grant = Grant { tenant: tenant.ok()?, version: order.version, dram, nvme };
    orders().orders.take((number, owner), &name, &grant).then_some(grant)
}

/// Of an order; without a limit there is none.
fn quotas(order: &TenantOrder) -> Option<(Quota, Quota)> {
    let reserved = order.reserved.unwrap_or_default();
    let limit = order.limit.unwrap_or(wire::Bytes { dram: u64::MAX, nvme: u64::MAX });
    Some((Quota::new(reserved.dram, limit.dram).ok()?, Quota::new(reserved.nvme, limit.nvme).ok()?))
}
