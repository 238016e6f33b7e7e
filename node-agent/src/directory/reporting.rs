//! Reports to the members: how full this node is, how busy, and what its tenants hold. The answers say what it is to do.
//!
//! Each member is told about once a second, on the link's connection; heartbeats are apart, and judge life alone.
//!
//! A tenant's budget is kept by the owner of the tenant's hash slot. Every report names all tenants, those of other owners by
//! name only, so that who has become the owner does not take a node for heard that has told its former one. An order is
//! taken when it answers the newest report of its tenant: what a former owner had ordered and this node hears late is
//! dropped, because the new owner has been told what was held before.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use reprise_agent_core::agent::{NodeUsage, TenantUsage};
use reprise_agent_core::directions::{Directions, REBALANCER_SLOT};
use reprise_agent_core::event::{Grant, Move};
use reprise_policy::quota::Quota;
use reprise_policy::tenant::TenantRegistry;
use reprise_policy::{DrainProgress, NodeId, TenantName};
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
    /// Number of the last report, over all members.
    last: u64,
    /// The newest report that said what a tenant holds.
    newest: BTreeMap<TenantName, u64>,
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
    let is_away = matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Cancelled);
    if failed.replace(status.code()) != Some(status.code()) && !is_away {
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
) -> (ReportRequest, u64) {
    let names = names(&shared.settings.tenants, &state.tenants);
    let is_owner = |name: &TenantName| routes.is_some_and(|routes| routes.owns(link, name.hash_slot()));
    let mut inner = shared.reporting.inner.lock().unwrap_or_else(PoisonError::into_inner);
    inner.last += 1;
    let number = inner.last;
    let mut tenants = Vec::new();
    for (name, usage) in names.into_iter().zip(&state.tenants) {
        let Some(name) = name.filter(|_| is_worth_telling(usage)) else { continue };
        if is_owner(&name) {
            tenants.push(tenant_report(&name, usage, &state.usage));
            inner.newest.insert(name, number);
        } else {
            tenants.push(TenantReport {
                tenant: name.to_string(),
                elsewhere: true,
                ..TenantReport::default()
            });
        }
    }
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

fn is_worth_telling(usage: &TenantUsage) -> bool {
    let counts = &usage.counts;
    usage.grant.is_some()
        || usage.dram.used + usage.nvme.used > 0
        || counts.dram_limited_bytes + counts.nvme_limited_bytes > 0
}

fn tenant_report(name: &TenantName, usage: &TenantUsage, node: &NodeUsage) -> TenantReport {
    let limit = match usage.grant {
        Some(grant) => wire::Bytes { dram: grant.dram.limit(), nvme: grant.nvme.limit() },
        None => wire::Bytes {
            dram: usage.dram.quota.limit().min(node.dram_capacity),
            nvme: usage.nvme.quota.limit().min(node.nvme_capacity),
        },
    };
    TenantReport {
        tenant: name.to_string(),
        version: usage.grant.map_or(0, |grant| grant.version),
        limit: Some(limit),
        used: Some(wire::Bytes { dram: usage.dram.used, nvme: usage.nvme.used }),
        limited: Some(wire::Bytes {
            dram: usage.counts.dram_limited_bytes,
            nvme: usage.counts.nvme_limited_bytes,
        }),
        elsewhere: false,
    }
}

/// Takes the answer to a report.
fn take(shared: &Shared, link: &Link, (granted, number): (Granted, u64), reply: &ReportReply) {
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
fn take_order(shared: &Shared, link: &Link, number: u64, order: &TenantOrder) -> Option<Grant> {
    let name: TenantName = order.tenant.parse().ok()?;
    let is_newest = {
        let inner = shared.reporting.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let owns = |routes: &Arc<Routes>| routes.owns(link, name.hash_slot());
        let is_owner = || shared.routes.borrow().as_ref().is_some_and(owns);
        inner.newest.get(&name).map_or_else(is_owner, |newest| *newest == number)
    };
    if !is_newest {
        return None;
    }
    let mut registry = shared.settings.tenants.lock().unwrap_or_else(PoisonError::into_inner);
    let tenant = registry.enter(&name, None).inspect_err(|error| {
        tracing::warn!(tenant = %name, %error, "a budget cannot be kept on this node");
    });
    let (dram, nvme) = quotas(order)?;
    Some(Grant { tenant: tenant.ok()?, version: order.version, dram, nvme })
}

/// Of an order; without a limit there is none.
fn quotas(order: &TenantOrder) -> Option<(Quota, Quota)> {
    let reserved = order.reserved.unwrap_or_default();
    let limit = order.limit.unwrap_or(wire::Bytes { dram: u64::MAX, nvme: u64::MAX });
    Some((Quota::new(reserved.dram, limit.dram).ok()?, Quota::new(reserved.nvme, limit.nvme).ok()?))
}
