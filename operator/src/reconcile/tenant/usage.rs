//! Usage of tenants, and whether it exceeds their budgets.
//!
//! Usage changes with every block, and statuses are stored in etcd. The stored values therefore stay until
//! they differ by more than a 64th for at least a minute ([`CHANGE_INTERVAL`]), or by less for
//! [`REFRESH_INTERVAL`]. Equal values are never written again. A change of the spec is handled at once. The
//! status contains the time of the values, so this holds across restarts of the operator.
//!
//! Values that may be too small are not reported: the stored ones stay, and condition `UsageKnown` gives the
//! reason.

use std::time::Duration;

use futures_util::future::join_all;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use reprise_crds::fields::Quantity;
use reprise_crds::status::{Condition, ConditionStatus, ConditionType as Type, Finding, Reason, find};
use reprise_crds::tenant::TenantUsage;
use reprise_crds::{CacheTenant, CacheTenantStatus};

use super::budget;
use crate::framework::clock;
use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;
use crate::reconcile::control_plane::{
    MeasuredUsage, POLL_INTERVAL, RETRY_INTERVAL, TierBytes, UsageUnknown,
};
use crate::reconcile::membership::applies_to;
use crate::reconcile::names::ClusterNames;

/// Interval between writes of values that differ by more than [`SMALLEST_CHANGE`], or of `OverQuota`.
const CHANGE_INTERVAL: Duration = Duration::from_secs(60);
/// Interval between writes of values that differ by less.
const REFRESH_INTERVAL: Duration = Duration::from_secs(300);
/// Divisor of the significance threshold: smaller changes can wait. Budgets are not rebalanced for less
/// either.
const SMALLEST_CHANGE: u64 = 64;
/// Values are rounded up to this number of bytes.
const UNIT: u64 = 1 << 20;
/// Maximum number of units, since a quantity has 12 digits: 950 PiB.
const UNITS_MAX: u64 = 999_999_999_999;

/// Usage of a tenant in one cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsageMeasurement {
    /// `namespace/name` of the cluster.
    pub cluster: String,
    /// The usage, or why it is unknown.
    pub usage: Result<MeasuredUsage, UsageUnknown>,
}

/// The usage part of a tenant's status.
#[derive(Clone, Debug, PartialEq)]
pub struct UsageReport {
    /// Usage values for the status.
    pub usage: Option<TenantUsage>,
    /// Conditions about the usage.
    pub findings: Vec<Finding>,
    /// Delay until the next measurement.
    pub next: Duration,
}

/// Reads the usage from the control planes of all the tenant's clusters that are not being deleted.
pub async fn measure(tenant: &CacheTenant, context: &Context) -> Vec<UsageMeasurement> {
    let clusters = context.stores.clusters.state();
    let stays = clusters.iter().filter(|cluster| cluster.metadata.deletion_timestamp.is_none());
    let mut names: Vec<ClusterNames> = stays.map(|cluster| ClusterNames::of(cluster)).collect();
    names.retain(|names| applies_to(tenant, names));
    names.sort_by_key(ClusterNames::key);
    let name = tenant.name_any();
    let measured = names.iter().map(|names| {
        let name = &name;
        async move {
            let others = context.stores.tenants.state_filter(|other| applies_to(other, names));
            let mut others: Vec<String> = others.iter().map(|other| other.name_any()).collect();
            others.sort_unstable();
            let held = context.control_planes.usage(names, name, &others, &context.metrics).await;
            UsageMeasurement { cluster: names.key(), usage: held }
        }
    });
    join_all(measured).await
}

/// Computes the usage part of the status.
pub fn evaluate(
    tenant: &CacheTenant,
    measurements: &[UsageMeasurement],
    refused: Option<&Refusal>,
    now: &Time,
) -> UsageReport {
    let before = tenant.status.as_ref();
    let stored = before.and_then(|before| before.usage.clone());
    let over = over_quota(tenant, measurements, refused);
    if let Some(unknown) = unknown(measurements) {
        // The client backs off from an unreachable control plane anyway.
        let is_unheard =
            measurements.iter().any(|one| matches!(one.usage, Err(UsageUnknown::NodesUnreported(_))));
        let next = if is_unheard { RETRY_INTERVAL } else { POLL_INTERVAL };
        let findings = std::iter::once(unknown).chain(over).collect();
        return UsageReport { usage: stored, findings, next };
    }
    let held = || measurements.iter().filter_map(|one| one.usage.as_ref().ok());
    let mut findings = vec![known(measurements, held().map(|held| held.away).sum())];
    let fresh = figures(held(), now);
    let paced = write_decision(before, tenant.metadata.generation, (&fresh, over.as_ref()), now);
    let (usage, over, next) = match paced {
        WriteDecision::Fresh => (fresh, over, CHANGE_INTERVAL),
        WriteDecision::Stored { usage, over: was, next } => (usage, was.or(over), next),
    };
    findings.extend(over);
    UsageReport { usage: Some(usage), findings, next }
}

/// Whether measured values are written now.
#[derive(Clone, Debug, PartialEq)]
enum WriteDecision {
    Fresh,
    /// The stored values stay until the next measurement.
    Stored {
        usage: TenantUsage,
        over: Option<Finding>,
        next: Duration,
    },
}

fn write_decision(
    before: Option<&CacheTenantStatus>,
    generation: Option<i64>,
    (fresh, over): (&TenantUsage, Option<&Finding>),
    now: &Time,
) -> WriteDecision {
    let Some((before, usage)) = before.and_then(|before| Some((before, before.usage.as_ref()?))) else {
        return WriteDecision::Fresh;
    };
    let is_answer = generation.unwrap_or_default() != before.observed_generation;
    let was = find(&before.conditions, Type::OverQuota).and_then(finding);
    // A condition that was unknown is updated at once.
    let was_unknown = was.as_ref().is_none_or(|was| was.status == ConditionStatus::Unknown);
    if is_answer || (was_unknown && over.is_some()) {
        return WriteDecision::Fresh;
    }
    let same_words = was.as_ref() == over;
    let change = if same_words { change(usage, fresh) } else { Change::Large };
    let every = match change {
        Change::Small => REFRESH_INTERVAL,
        Change::None | Change::Large => CHANGE_INTERVAL,
    };
    let passed = clock::between(&usage.observed_time, now);
    if change != Change::None && passed >= every {
        return WriteDecision::Fresh;
    }
    // Measure again anyway: the next change may be larger.
    let rest = every.saturating_sub(passed);
    let next = if change == Change::Large { rest.max(Duration::from_secs(1)) } else { CHANGE_INTERVAL };
    WriteDecision::Stored { usage: usage.clone(), over: was, next }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Change {
    None,
    Small,
    Large,
}

/// Compares the values of two measurements, ignoring their times.
fn change(before: &TenantUsage, fresh: &TenantUsage) -> Change {
    // Unparsable values of other writers count as zero.
    let bytes = |quantity: &Quantity| quantity.bytes().unwrap_or_default();
    let blocks = |blocks: Option<i64>| blocks.and_then(|blocks| u64::try_from(blocks).ok());
    let pairs = [
        (Some(bytes(&before.dram)), Some(bytes(&fresh.dram))),
        (Some(bytes(&before.ssd)), Some(bytes(&fresh.ssd))),
        (blocks(before.dram_blocks), blocks(fresh.dram_blocks)),
        (blocks(before.ssd_blocks), blocks(fresh.ssd_blocks)),
    ];
    let of = |pair: (Option<u64>, Option<u64>)| match pair {
        (a, b) if a == b => Change::None,
        (Some(a), Some(b)) if a.abs_diff(b) <= a.max(b) / SMALLEST_CHANGE => Change::Small,
        _ => Change::Large,
    };
    pairs.into_iter().map(of).max().unwrap_or(Change::None)
}

/// Converts a stored condition back to a finding.
fn finding(condition: &Condition) -> Option<Finding> {
    let (reason, _) = Reason::MEANINGS.iter().find(|(reason, _)| reason.as_str() == condition.reason)?;
    Some(Finding {
        kind: Type::OverQuota,
        status: condition.status,
        reason: *reason,
        message: condition.message.clone(),
    })
}

fn figures<'a>(held: impl Iterator<Item = &'a MeasuredUsage>, now: &Time) -> TenantUsage {
    let mut sum = MeasuredUsage { blocks: Some(TierBytes::default()), ..MeasuredUsage::default() };
    let plus = |a: TierBytes, b: TierBytes| TierBytes {
        dram: a.dram.saturating_add(b.dram),
        ssd: a.ssd.saturating_add(b.ssd),
    };
    for held in held {
        sum.used = plus(sum.used, held.used);
        // The total is unknown if one cluster does not report its blocks.
        sum.blocks = sum.blocks.zip(held.blocks).map(|(a, b)| plus(a, b));
    }
    let quantity = |bytes: u64| Quantity::of_bytes(bytes.div_ceil(UNIT).min(UNITS_MAX) * UNIT);
    let blocks =
        |of: fn(TierBytes) -> u64| sum.blocks.map(|blocks| i64::try_from(of(blocks)).unwrap_or(i64::MAX));
    TenantUsage {
        dram: quantity(sum.used.dram),
        ssd: quantity(sum.used.ssd),
        dram_blocks: blocks(|bytes| bytes.dram),
        ssd_blocks: blocks(|bytes| bytes.ssd),
        observed_time: now.clone(),
    }
}

fn known(measurements: &[UsageMeasurement], away: u32) -> Finding {
    let clusters: Vec<&str> = measurements.iter().map(|one| one.cluster.as_str()).collect();
    let clusters = clusters.join(", ");
    let message = match away {
        0 => format!("all nodes of {clusters} have reported their usage"),
        away => format!(
            "all present nodes of {clusters} have reported their usage; {away} are absent and not counted: bring them back or, if they are \
             gone permanently, run reprise forget NODE"
        ),
    };
    Finding::yes(Type::UsageKnown, Reason::AsDesired, message)
}

/// Returns why the usage is unknown, if it is.
fn unknown(measurements: &[UsageMeasurement]) -> Option<Finding> {
    let kind = Type::UsageKnown;
    if measurements.is_empty() {
        let message = "the tenant applies to no KVCacheCluster: create one, or correct spec.clusters";
        return Some(Finding::unknown(kind, Reason::ReferenceNotFound, message));
    }
    measurements.iter().find_map(|one| {
        let cluster = &one.cluster;
        let (reason, message) = match one.usage.as_ref().err()? {
            UsageUnknown::MembersUnavailable(message) => (
                Reason::ControlPlaneUnreachable,
                format!(
                    "the usage in {cluster} is unknown: {message}. The operator retries; if this persists, check the pods of the control plane"
                ),
            ),
            UsageUnknown::NodesUnreported(message) => (
                Reason::NotReported,
                format!(
                    "the usage in {cluster} is unknown: {message}. Agents report it within seconds after they register; if this persists, check \
                     the agents of these nodes"
                ),
            ),
        };
        Some(Finding::unknown(kind, reason, message))
    })
}

/// Returns condition `OverQuota`: whether the tenant exceeds its budget in a cluster. The message changes
/// only with the spec and the clusters. `None` for a rejected tenant, whose budget at control planes may
/// differ, and for a deleted one.
fn over_quota(
    tenant: &CacheTenant,
    measurements: &[UsageMeasurement],
    refused: Option<&Refusal>,
) -> Option<Finding> {
    let kind = Type::OverQuota;
    if refused.is_some() || tenant.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let Some(budget) = budget::desired(tenant) else {
        return Some(Finding::no(kind, Reason::AsDesired, "the tenant has no budget limit"));
    };
    type Of = fn(&TierBytes) -> u64;
    let kinds: [(&str, &str, Of); 2] = [
        ("memory", "budget.dram.limit", |bytes| bytes.dram),
        ("device space", "budget.ssd.limit", |bytes| bytes.ssd),
    ];
    let exceeds = |one: &UsageMeasurement| {
        let used = &one.usage.as_ref().ok()?.used;
        let (room, field, of) = kinds.iter().find(|(.., of)| of(used) > of(&budget.limit))?;
        Some((one.cluster.clone(), *room, *field, of(&budget.limit)))
    };
    if let Some((cluster, room, field, limit)) = measurements.iter().find_map(exceeds) {
        let message = format!(
            "the tenant uses more {room} in {cluster} than {field} ({}) allows. Nodes evict the excess within seconds, and blocks \
             being read once they are released: if this persists, check BudgetApplied and the agents, or raise {field}",
            Quantity::of_bytes(limit)
        );
        return Some(Finding::yes(kind, Reason::AboveLimit, message));
    }
    if measurements.is_empty() || measurements.iter().any(|one| one.usage.is_err()) {
        let message = "the usage is unknown: see condition UsageKnown";
        return Some(Finding::unknown(kind, Reason::NotReported, message));
    }
    Some(Finding::no(kind, Reason::AsDesired, "the usage is within the budget"))
}

#[cfg(test)]
mod tests;
