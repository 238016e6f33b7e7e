//! Usage of tenants, and whether it exceeds their budgets.
//!
//! Usage changes with every block, and statuses are stored in etcd. Usage is therefore measured once a minute
//! ([`crate::reconcile::control_plane`]), and the stored values stay until they differ by more than a 64th. Values that
//! may be too small are not reported: the stored ones stay, and condition `UsageKnown` gives the reason.

use futures_util::future::join_all;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use reprise_crds::CacheTenant;
use reprise_crds::fields::Quantity;
use reprise_crds::status::{ConditionStatus, ConditionType as Type, Finding, Reason};
use reprise_crds::tenant::TenantUsage;

use super::dereference::TenantClusters;
use super::{NO_CLUSTER, budget};
use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;
use crate::reconcile::control_plane::{Budget, TierBytes, UsageResult};
use crate::reconcile::membership::applies_to;

/// Divisor of the significance threshold: smaller changes are not written.
const SMALLEST_CHANGE: u64 = 64;
/// Values are rounded up to this number of bytes.
const UNIT: u64 = 1 << 20;

/// Usage of a tenant in one cluster.
#[derive(Clone, Debug)]
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
    let stored = tenant.status.as_ref().and_then(|status| status.usage.clone());
    let over = over_quota(tenant, measurements, refused);
    let known = known(measurements);
    let is_known = known.status == ConditionStatus::True;
    let fresh = is_known.then(|| figures(measurements, now));
    let is_kept = |stored: &TenantUsage| fresh.as_ref().is_none_or(|fresh| is_close(stored, fresh));
    let usage = stored.filter(is_kept).or(fresh);
    (usage, std::iter::once(known).chain(over).collect())
}

/// Whether the values of two measurements differ by at most a 64th.
fn is_close(before: &TenantUsage, fresh: &TenantUsage) -> bool {
    let bytes = |quantity: &Quantity| quantity.bytes().ok();
    let blocks = |blocks: Option<i64>| blocks.map(|blocks| u64::try_from(blocks).unwrap_or_default());
    let values = |usage: &TenantUsage| {
        [bytes(&usage.dram), bytes(&usage.ssd), blocks(usage.dram_blocks), blocks(usage.ssd_blocks)]
    };
    values(before).into_iter().zip(values(fresh)).all(|pair| match pair {
        (Some(a), Some(b)) => a.abs_diff(b) <= a.max(b) / SMALLEST_CHANGE,
        (a, b) => a == b,
    })
}

/// Returns the sums of the measurements that succeeded.
fn figures(measurements: &[UsageMeasurement], now: &Time) -> TenantUsage {
    let (mut used, mut blocks) = (TierBytes::default(), Some(TierBytes::default()));
    let plus = |a: TierBytes, b: TierBytes| TierBytes {
        dram: a.dram.saturating_add(b.dram),
        ssd: a.ssd.saturating_add(b.ssd),
    };
    for held in measurements.iter().filter_map(|one| one.usage.as_ref().ok()) {
        used = plus(used, held.used);
        // The total is unknown if one cluster does not report its blocks.
        blocks = blocks.zip(held.blocks).map(|(a, b)| plus(a, b));
    }
    let quantity = |bytes: u64| Quantity::of_bytes(bytes.div_ceil(UNIT).saturating_mul(UNIT));
    let count = |blocks: u64| i64::try_from(blocks).unwrap_or(i64::MAX);
    TenantUsage {
        dram: quantity(used.dram),
        ssd: quantity(used.ssd),
        dram_blocks: blocks.map(|blocks| count(blocks.dram)),
        ssd_blocks: blocks.map(|blocks| count(blocks.ssd)),
        observed_time: now.clone(),
    }
}

/// Returns condition `UsageKnown` of a tenant.
fn known(measurements: &[UsageMeasurement]) -> Finding {
    let kind = Type::UsageKnown;
    if measurements.is_empty() {
        return Finding::unknown(kind, Reason::ReferenceNotFound, NO_CLUSTER);
    }
    let mut absent = 0;
    for UsageMeasurement { cluster, usage } in measurements {
        match usage {
            Ok(usage) => absent += usage.away,
            Err(Refusal { reason, message }) => {
                let remedy = match reason {
                    Reason::NotReported => {
                        "Agents report it within seconds after they register; if this persists, check the agents of these nodes"
                    }
                    _ => "The operator retries; if this persists, check the pods of the control plane",
                };
                let message = format!("the usage in {cluster} is unknown: {message}. {remedy}");
                return Finding::unknown(kind, *reason, message);
            }
        }
    }
    let clusters: Vec<&str> = measurements.iter().map(|one| one.cluster.as_str()).collect();
    let clusters = clusters.join(", ");
    let message = match absent {
        0 => format!("all nodes of {clusters} have reported their usage"),
        absent => format!(
            "all present nodes of {clusters} have reported their usage; {absent} are absent and not counted: bring them back or, if they \
             are gone permanently, run reprise forget NODE"
        ),
    };
    Finding::yes(kind, Reason::AsDesired, message)
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
    let Some(Budget { limit, .. }) = budget::desired(tenant) else {
        return Some(Finding::no(kind, Reason::AsDesired, "the tenant has no budget limit"));
    };
    let above = measurements.iter().find_map(|UsageMeasurement { cluster, usage }| {
        match &usage.as_ref().ok()?.used {
            used if used.dram > limit.dram => Some((cluster, "memory", "budget.dram.limit", limit.dram)),
            used if used.ssd > limit.ssd => Some((cluster, "device space", "budget.ssd.limit", limit.ssd)),
            _ => None,
        }
    });
    if let Some((cluster, room, field, limit)) = above {
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
mod tests {
    use reprise_crds::CacheTenantStatus;
    use reprise_crds::status::ConditionStatus::{False, True, Unknown};
    use serde_json::json;

    use super::*;
    use crate::reconcile::control_plane::MeasuredUsage;
    use crate::reconcile::test_objects::object;

    const MIB: u64 = 1 << 20;

    fn at(second: u32) -> Time {
        object(json!(format!("2026-01-01T00:00:{second:02}Z")))
    }

    /// A tenant with at most 100 MiB on devices of each cluster.
    fn limited() -> CacheTenant {
        CacheTenant::new("t", object(json!({ "budget": { "ssd": { "limit": "100Mi" } } })))
    }

    fn holds(cluster: &str, ssd: u64) -> UsageMeasurement {
        let used = TierBytes { dram: MIB, ssd };
        let held = MeasuredUsage { used, blocks: Some(TierBytes { dram: 1, ssd: 3 }), away: 0 };
        UsageMeasurement { cluster: cluster.to_owned(), usage: Ok(held) }
    }

    fn fails() -> UsageMeasurement {
        let usage = Err(Refusal::new(Reason::NotReported, "m-1 does not respond"));
        UsageMeasurement { cluster: "n/c".to_owned(), usage }
    }

    #[test]
    fn sums_clusters_and_rounds_up_to_whole_mib() {
        let all = MeasuredUsage { used: TierBytes { dram: 0, ssd: MIB + 1 }, blocks: None, away: 2 };
        let one = UsageMeasurement { usage: Ok(all), ..holds("n/d", 0) };
        let both = [holds("n/c", 3 * MIB), one];
        let usage = figures(&both, &at(7));
        assert_eq!((usage.dram.as_str(), usage.ssd.as_str()), ("1Mi", "5Mi"));
        assert_eq!((usage.dram_blocks, usage.ssd_blocks), (None, None), "one cluster does not report blocks");
        let Finding { status, message, .. } = known(&both);
        assert_eq!(status, True);
        assert!(message.contains("n/c, n/d") && message.contains("2 are absent"), "{message}");
        let most = figures(&[holds("n/c", u64::MAX)], &at(7)).ssd;
        assert_eq!(most.as_str(), "9999Pi", "the largest amount of the schema");
    }

    #[test]
    fn stored_values_stay_until_they_differ_by_a_64th() {
        let mut tenant = limited();
        for (second, measured, stored, observed, over) in [
            (1, holds("n/c", 98 * MIB), "98Mi", 1, False),
            (2, holds("n/c", 98 * MIB), "98Mi", 1, False),
            (3, holds("n/c", 99 * MIB), "98Mi", 1, False),
            (4, holds("n/c", 90 * MIB), "90Mi", 4, False),
            (5, fails(), "90Mi", 4, Unknown),
            (6, holds("n/c", 101 * MIB), "101Mi", 6, True),
            (7, holds("n/c", 0), "0", 7, False),
        ] {
            let (usage, findings) = evaluate(&tenant, &[measured], None, &at(second));
            tenant.status = Some(CacheTenantStatus { usage: usage.clone(), ..CacheTenantStatus::default() });
            let usage = usage.expect("usage");
            let is = (usage.ssd.as_str(), usage.observed_time, findings[1].status);
            assert_eq!(is, (stored, at(observed), over), "after {second} s");
        }
    }

    #[test]
    fn over_quota_is_evaluated_for_each_cluster_of_an_accepted_tenant() {
        // A cluster above the limit is not offset by another one below it, nor hidden by an unknown one.
        for other in [holds("n/b", 1), fails()] {
            let over =
                over_quota(&limited(), &[other, holds("n/d", 101 * MIB)], None).expect("the condition");
            assert!(over.status == True && over.message.contains("in n/d than budget.ssd.limit"), "{over:?}");
        }
        let refused = Refusal::new(Reason::Unsupported, "no");
        assert_eq!(over_quota(&limited(), &[holds("n/c", 500 * MIB)], Some(&refused)), None);
    }
}
