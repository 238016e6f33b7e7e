//! Usage of tenants, and whether it exceeds their budgets.
//!
//! Usage changes with every block, and statuses are stored in etcd. Usage is therefore measured once a minute
//! ([`crate::reconcile::control_plane`]), and the stored values stay until they differ by more than a 64th, or
//! `OverQuota` changes. The status contains the time of the values, so equal values are never written again.
//!
//! Values that may be too small are not reported: the stored ones stay, and condition `UsageKnown` gives the
//! reason.

use futures_util::future::join_all;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use reprise_crds::CacheTenant;
use reprise_crds::fields::Quantity;
use reprise_crds::status::{ConditionType as Type, Finding, Reason, find};
use reprise_crds::tenant::TenantUsage;

use super::dereference::TenantClusters;
use super::{NO_CLUSTER, budget};
use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;
use crate::reconcile::control_plane::{MeasuredUsage, TierBytes, UsageResult};
use crate::reconcile::membership::applies_to;

/// Divisor of the significance threshold: smaller changes are not written. Budgets are not rebalanced for
/// less either.
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
    pub usage: UsageResult,
}

/// Reads the usage from the control planes of all the tenant's clusters that are not being deleted.
pub async fn measure(
    tenant: &CacheTenant,
    clusters: &TenantClusters,
    context: &Context,
) -> Vec<UsageMeasurement> {
    let name = &tenant.name_any();
    let measured = clusters.members().map(|one| async move {
        let others = context.stores.tenants.state_filter(|other| applies_to(other, &one.names));
        let mut others: Vec<String> = others.iter().map(|other| other.name_any()).collect();
        others.sort_unstable();
        let usage = context.control_planes.usage(&one.names, name, &others).await;
        UsageMeasurement { cluster: one.names.key(), usage }
    });
    join_all(measured).await
}

/// Computes the usage values of the status, and the conditions about them.
pub fn evaluate(
    tenant: &CacheTenant,
    measurements: &[UsageMeasurement],
    refused: Option<&Refusal>,
    now: &Time,
) -> (Option<TenantUsage>, Vec<Finding>) {
    let before = tenant.status.as_ref();
    let stored = before.and_then(|before| before.usage.clone());
    let over = over_quota(tenant, measurements, refused);
    if let Some(unknown) = unknown(measurements) {
        return (stored, std::iter::once(unknown).chain(over).collect());
    }
    let fresh = figures(measurements, now);
    // Values and condition come from one measurement.
    let was_over = before.and_then(|before| find(&before.conditions, Type::OverQuota));
    let is_same = was_over.map(|was| was.status) == over.as_ref().map(|over| over.status);
    let kept = stored.filter(|stored| is_same && is_close(stored, &fresh));
    let findings = std::iter::once(known(measurements)).chain(over).collect();
    (Some(kept.unwrap_or(fresh)), findings)
}

/// Whether the values of two measurements differ by at most a 64th.
fn is_close(before: &TenantUsage, fresh: &TenantUsage) -> bool {
    // Unparsable values of other writers count as zero.
    let bytes = |quantity: &Quantity| quantity.bytes().unwrap_or_default();
    let blocks = |blocks: Option<i64>| blocks.map(|blocks| u64::try_from(blocks).unwrap_or_default());
    let values = |usage: &TenantUsage| {
        [
            Some(bytes(&usage.dram)),
            Some(bytes(&usage.ssd)),
            blocks(usage.dram_blocks),
            blocks(usage.ssd_blocks),
        ]
    };
    values(before).into_iter().zip(values(fresh)).all(|pair| match pair {
        (Some(a), Some(b)) => a.abs_diff(b) <= a.max(b) / SMALLEST_CHANGE,
        (a, b) => a == b,
    })
}

/// Returns the sums of the measurements that succeeded.
fn figures(measurements: &[UsageMeasurement], now: &Time) -> TenantUsage {
    let mut sum = MeasuredUsage { blocks: Some(TierBytes::default()), ..MeasuredUsage::default() };
    let plus = |a: TierBytes, b: TierBytes| TierBytes {
        dram: a.dram.saturating_add(b.dram),
        ssd: a.ssd.saturating_add(b.ssd),
    };
    for held in measurements.iter().filter_map(|one| one.usage.as_ref().ok()) {
        sum.used = plus(sum.used, held.used);
        // The total is unknown if one cluster does not report its blocks.
        sum.blocks = sum.blocks.zip(held.blocks).map(|(a, b)| plus(a, b));
    }
    let quantity = |bytes: u64| Quantity::of_bytes(bytes.div_ceil(UNIT).min(UNITS_MAX) * UNIT);
    let count = |blocks: u64| i64::try_from(blocks).unwrap_or(i64::MAX);
    TenantUsage {
        dram: quantity(sum.used.dram),
        ssd: quantity(sum.used.ssd),
        dram_blocks: sum.blocks.map(|blocks| count(blocks.dram)),
        ssd_blocks: sum.blocks.map(|blocks| count(blocks.ssd)),
        observed_time: now.clone(),
    }
}

fn known(measurements: &[UsageMeasurement]) -> Finding {
    let clusters: Vec<&str> = measurements.iter().map(|one| one.cluster.as_str()).collect();
    let clusters = clusters.join(", ");
    let away: u32 = measurements.iter().filter_map(|one| Some(one.usage.as_ref().ok()?.away)).sum();
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
        return Some(Finding::unknown(kind, Reason::ReferenceNotFound, NO_CLUSTER));
    }
    measurements.iter().find_map(|one| {
        let Refusal { reason, message } = one.usage.as_ref().err()?;
        let remedy = match reason {
            Reason::NotReported => {
                "Agents report it within seconds after they register; if this persists, check the agents of these nodes"
            }
            _ => "The operator retries; if this persists, check the pods of the control plane",
        };
        let message = format!("the usage in {} is unknown: {message}. {remedy}", one.cluster);
        Some(Finding::unknown(kind, *reason, message))
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
