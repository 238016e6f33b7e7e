//! Sets budgets of tenants at the control planes of their clusters.
//!
//! Budgets come from resources, like modes: a different budget at a control plane is replaced. A budget that
//! no object of this name ever set belongs to another client; it is reported, not removed. The tenant gets a
//! finalizer before the first budget is set. The finalizer is removed when no control plane has a budget of
//! it any longer.
//!
//! A tenant with deletion policy `Purge` has a second finalizer. When it is deleted its budget becomes zero,
//! so nodes evict its blocks. The second finalizer is removed once every node of its clusters has reported
//! that it holds nothing; the zero budget is removed afterwards. The purge covers the clusters that the spec
//! selects. Clusters that are being deleted are skipped, and this is reported
//! ([`super::dereference::TenantClusters::released`]). A tenant with this policy owns its budget even without
//! limits: a budget that another client set is removed.

use futures_util::future::join_all;
use kube::ResourceExt;
use reprise_crds::fields::Quantity;
use reprise_crds::status::Reason;
use reprise_crds::tenant::{Quota, Quotas, TenantDeletion};
use reprise_crds::{CacheTenant, KVCacheCluster};

use super::dereference::{TenantCluster, TenantClusters};
use crate::framework::finalizers;
use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;
use crate::reconcile::control_plane::{Budget, CallError, TierBytes};
use crate::reconcile::names::{BUDGET_FINALIZER, ClusterNames, PURGE_FINALIZER};

/// Result of setting the budget at one control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetResult {
    /// `namespace/name` of the cluster.
    pub cluster: String,
    /// Whether the tenant applies to the cluster. At other clusters, a budget is only removed.
    pub is_member: bool,
    /// Whether the control plane has the desired budget. With reason `Releasing` it has the zero budget, but nodes may
    /// still hold blocks; with reason `OverCapacity` it rejects the budget.
    pub outcome: Result<(), Refusal>,
    /// Bytes by which the reservations of all budgets exceed the capacity of living nodes.
    pub overcommitted: TierBytes,
}

/// Returns the budget of a tenant's spec, if it has one.
pub fn desired(tenant: &CacheTenant) -> Option<Budget> {
    let Quotas { dram, ssd } = &tenant.spec.budget;
    // The schema permits only quantities, which may exceed 64 bits.
    let bytes = |quantity: &Quantity| quantity.bytes().unwrap_or(u64::MAX);
    let limit = |quota: &Quota| quota.limit.as_ref().map_or(u64::MAX, bytes);
    let budget = Budget {
        reserved: TierBytes { dram: bytes(&dram.reserved), ssd: bytes(&ssd.reserved) },
        limit: TierBytes { dram: limit(dram), ssd: limit(ssd) },
    };
    let nothing =
        Budget { reserved: TierBytes::default(), limit: TierBytes { dram: u64::MAX, ssd: u64::MAX } };
    (budget != nothing).then_some(budget)
}

/// Whether control planes may have a budget of this object: it has the budget finalizer.
pub fn owns_budgets(tenant: &CacheTenant) -> bool {
    finalizers::has(tenant, BUDGET_FINALIZER)
}

/// Whether the spec requests a purge on deletion.
pub fn wants_purge(tenant: &CacheTenant) -> bool {
    tenant.spec.deletion_policy == TenantDeletion::Purge
}

/// Whether the tenant has the purge finalizer.
pub fn has_purge(tenant: &CacheTenant) -> bool {
    finalizers::has(tenant, PURGE_FINALIZER)
}

/// Whether the tenant is being purged.
pub fn is_purging(tenant: &CacheTenant) -> bool {
    tenant.metadata.deletion_timestamp.is_some() && has_purge(tenant)
}

/// Whether the purge is complete.
pub fn is_purged(tenant: &CacheTenant, results: &[BudgetResult]) -> bool {
    is_purging(tenant) && results.iter().all(|result| result.outcome.is_ok())
}

/// Whether the tenant no longer needs its budget, and no control plane has one.
pub fn is_withdrawn(tenant: &CacheTenant, refused: Option<&Refusal>, results: &[BudgetResult]) -> bool {
    let ends = match tenant.metadata.deletion_timestamp {
        Some(_) => !is_purging(tenant),
        None => refused.is_none() && desired(tenant).is_none() && !wants_purge(tenant),
    };
    ends && results.iter().all(|result| result.outcome.is_ok())
}

/// Sets the tenant's budget at the control planes of all clusters. A rejected object changes nothing.
pub async fn sync(
    tenant: &CacheTenant,
    refused: Option<&Refusal>,
    clusters: &TenantClusters,
    context: &Context,
) -> Vec<BudgetResult> {
    if refused.is_some() && tenant.metadata.deletion_timestamp.is_none() {
        return Vec::new();
    }
    let results = clusters.present.iter().map(|cluster| sync_cluster(tenant, cluster, context));
    join_all(results).await.into_iter().flatten().collect()
}

/// Sets the budget at one cluster. Returns `None` if there is no budget to set, and no foreign one.
async fn sync_cluster(
    tenant: &CacheTenant,
    TenantCluster { cluster, names, is_member }: &TenantCluster,
    context: &Context,
) -> Option<BudgetResult> {
    let (owned, purging, name) = (owns_budgets(tenant), is_purging(tenant), tenant.name_any());
    let is_known = *is_member && (purging || tenant.metadata.deletion_timestamp.is_none());
    if !is_known && !owned {
        return None;
    }
    let budget = if purging { Some(Budget::default()) } else { desired(tenant) };
    let budget = budget.filter(|_| is_known);
    let (control_planes, key) = (&context.control_planes, names.key());
    let state = control_planes.state(names).await;
    let present = state.as_ref().ok().and_then(|state| state.budgets.get(&name));
    if budget.is_none() && !owned && present.is_none() {
        return None;
    }
    let outcome = match &state {
        Err(message) => Err(refusal(&key, CallError::Unavailable(message.clone()))),
        Ok(_) if budget.as_ref() == present => Ok(()),
        Ok(_) if budget.is_none() && !owned => {
            let message = format!(
                "the control plane of {key} has a budget for the tenant that another client set: add it to spec.budget, or remove it \
                 with reprise tenant remove"
            );
            Err(Refusal::new(Reason::Conflict, message))
        }
        Ok(_) if cluster.spec.paused => {
            let message = format!(
                "the control plane of {key} has another budget, and KVCacheCluster {key} is paused: set paused to false"
            );
            Err(Refusal::new(Reason::Paused, message))
        }
        Ok(_) => {
            let called = control_planes.set_budget(names, &name, budget).await;
            if called.is_ok() {
                tracing::info!(
                    tenant = name,
                    cluster = key,
                    "set the budget of a tenant at the control plane"
                );
            }
            called.map_err(|error| refusal(&key, error))
        }
    };
    let outcome = match outcome {
        Ok(()) if purging && is_known => has_no_blocks(&name, cluster, names, context).await,
        outcome => outcome,
    };
    let overcommitted = state.map(|state| state.overcommitted).unwrap_or_default();
    Some(BudgetResult { cluster: key, is_member: *is_member, outcome, overcommitted })
}

/// Returns reason and message of a failed call.
fn refusal(cluster: &str, error: CallError) -> Refusal {
    match error {
        CallError::Unavailable(message) => Refusal::new(
            Reason::ControlPlaneUnreachable,
            format!("the control plane of {cluster} does not respond; retrying: {message}"),
        ),
        CallError::Rejected(message) | CallError::NotFound(message) => Refusal::new(
            Reason::OverCapacity,
            format!("the control plane of {cluster} rejects the budget: {message}"),
        ),
    }
}

/// Checks after a zero budget that no node of the cluster may still hold blocks of the tenant.
async fn has_no_blocks(
    tenant: &str,
    cluster: &KVCacheCluster,
    names: &ClusterNames,
    context: &Context,
) -> Result<(), Refusal> {
    let assignment = context.stores.assignment();
    let nodes = assignment.cluster(cluster).map(|own| own.nodes.as_slice()).unwrap_or_default();
    match context.control_planes.holders(names, tenant, nodes).await {
        Ok(None) => Ok(()),
        Ok(Some(nodes)) => Err(Refusal::new(
            Reason::Releasing,
            format!("nodes of {} may still hold blocks of the tenant: {nodes}", names.key()),
        )),
        Err(error) => Err(refusal(&names.key(), CallError::Unavailable(error.to_string()))),
    }
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "objects are made where they are passed")]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::reconcile::test_objects::resource;

    fn tenant(spec: Value, finalizers: &[&str], is_deleting: bool) -> CacheTenant {
        let deleted = is_deleting.then_some("2026-01-01T00:00:00Z");
        let metadata = json!({ "name": "t", "finalizers": finalizers, "deletionTimestamp": deleted });
        resource(metadata, json!({ "spec": spec }))
    }

    #[test]
    fn spec_with_limits_or_reservations_has_a_budget() {
        let of = |budget: Value| desired(&tenant(json!({ "budget": budget }), &[], false));
        assert_eq!(of(json!({})), None);
        assert_eq!(of(json!({ "ssd": { "reserved": "0Mi" } })), None);
        assert_eq!(of(json!({ "ssd": { "limit": "99999999999Ei" } })), None, "above 64 bits");
        let some = of(json!({ "ssd": { "reserved": "1Ki", "limit": "1Mi" } })).expect("a budget");
        assert_eq!(some.reserved, TierBytes { dram: 0, ssd: 1024 });
        assert_eq!(some.limit, TierBytes { dram: u64::MAX, ssd: 1 << 20 });
    }

    #[test]
    fn finalizers_stay_until_budgets_are_removed_and_no_node_holds_blocks() {
        let limited = || json!({ "budget": { "ssd": { "limit": "1Mi" } } });
        let purge = || json!({ "deletionPolicy": "Purge" });
        let both = [BUDGET_FINALIZER, PURGE_FINALIZER];
        let refused = Refusal::new(Reason::Unsupported, "no");
        let (applied, failed) = (Ok(()), Err(Refusal::new(Reason::Releasing, "n1 is absent")));
        for (tenant, refused, outcomes, withdrawn, purged) in [
            (tenant(limited(), &[], false), None, vec![&applied], false, false),
            (tenant(json!({}), &[], false), None, vec![&applied], true, false),
            // A rejected spec changes nothing.
            (tenant(json!({}), &[], false), Some(&refused), vec![], false, false),
            (tenant(limited(), &both[..1], true), None, vec![&applied], true, false),
            (tenant(limited(), &both[..1], true), None, vec![], true, false),
            (tenant(limited(), &both[..1], true), Some(&refused), vec![], true, false),
            (tenant(limited(), &both[..1], true), None, vec![&applied, &failed], false, false),
            // The purge starts with the deletion, and the zero budget stays until it is complete.
            (tenant(purge(), &both, false), None, vec![&applied], false, false),
            (tenant(purge(), &both, true), None, vec![&applied, &failed], false, false),
            (tenant(purge(), &both, true), None, vec![&applied], false, true),
            (tenant(purge(), &both[..1], true), None, vec![&applied], true, false),
        ] {
            let result = |outcome: &Result<(), Refusal>| BudgetResult {
                cluster: "n/c".to_owned(),
                is_member: true,
                outcome: outcome.clone(),
                overcommitted: TierBytes::default(),
            };
            let results: Vec<BudgetResult> = outcomes.into_iter().map(result).collect();
            let is = (is_withdrawn(&tenant, refused, &results), is_purged(&tenant, &results));
            assert_eq!(is, (withdrawn, purged), "{:?} {refused:?} {results:?}", tenant.metadata);
        }
    }
}
