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
    /// Outcome at the control plane.
    pub outcome: BudgetOutcome,
    /// Bytes by which the reservations of all budgets exceed the capacity of living nodes.
    pub overcommitted: TierBytes,
}

/// Outcome of setting a budget.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BudgetOutcome {
    /// The control plane has the desired budget.
    Applied,
    /// The zero budget is set, but these nodes may still hold blocks.
    BlocksRemain(String),
    /// The control plane could not be reached.
    Unreachable(String),
    /// The control plane rejects the budget.
    Rejected(String),
    /// The control plane has a budget that another client set.
    Foreign,
    /// The cluster is paused, so its control plane is not changed.
    Paused,
}

/// Returns the budget of a tenant's spec, if it has one.
pub fn desired(tenant: &CacheTenant) -> Option<Budget> {
    let Quotas { dram, ssd } = &tenant.spec.budget;
    // Quantities that cannot be parsed were rejected during validation.
    let reserved = |quota: &Quota| quota.reserved.bytes().unwrap_or_default();
    let limit =
        |quota: &Quota| quota.limit.as_ref().map_or(u64::MAX, |limit| limit.bytes().unwrap_or_default());
    let budget = Budget {
        reserved: TierBytes { dram: reserved(dram), ssd: reserved(ssd) },
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
    is_purging(tenant) && results.iter().all(|result| result.outcome == BudgetOutcome::Applied)
}

/// Whether the tenant no longer needs its budget, and no control plane has one.
pub fn is_withdrawn(tenant: &CacheTenant, refused: Option<&Refusal>, results: &[BudgetResult]) -> bool {
    let ends = match tenant.metadata.deletion_timestamp {
        Some(_) => !is_purging(tenant),
        None => refused.is_none() && desired(tenant).is_none() && !wants_purge(tenant),
    };
    ends && results.iter().all(|result| result.outcome == BudgetOutcome::Applied)
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
    let state = context.control_planes.state(names).await;
    let overcommitted = state.as_ref().map(|state| state.overcommitted).unwrap_or_default();
    let outcome = match state {
        Err(message) => BudgetOutcome::Unreachable(message),
        Ok(state) => match (budget, state.budgets.get(&name)) {
            (budget, has) if budget.as_ref() == has => BudgetOutcome::Applied,
            (None, _) if !owned => BudgetOutcome::Foreign,
            _ if cluster.spec.paused => BudgetOutcome::Paused,
            _ => after_call(tenant, names, context.control_planes.set_budget(names, &name, budget).await),
        },
    };
    if budget.is_none() && !owned && outcome != BudgetOutcome::Foreign {
        return None;
    }
    let is_set = purging && is_known && outcome == BudgetOutcome::Applied;
    let outcome = if is_set { after_purge(&name, cluster, names, context).await } else { outcome };
    Some(BudgetResult { cluster: names.key(), is_member: *is_member, outcome, overcommitted })
}

fn after_call(tenant: &CacheTenant, names: &ClusterNames, called: Result<(), CallError>) -> BudgetOutcome {
    match called {
        Ok(()) => {
            let (tenant, cluster) = (tenant.name_any(), names.key());
            tracing::info!(tenant, cluster, "set the budget of a tenant at the control plane");
            BudgetOutcome::Applied
        }
        Err(CallError::Unavailable(message)) => BudgetOutcome::Unreachable(message),
        Err(CallError::Rejected(message) | CallError::NotFound(message)) => BudgetOutcome::Rejected(message),
    }
}

/// Returns the outcome of a zero budget: whether nodes of the cluster may still hold blocks of the tenant.
async fn after_purge(
    tenant: &str,
    cluster: &KVCacheCluster,
    names: &ClusterNames,
    context: &Context,
) -> BudgetOutcome {
    let assignment = context.stores.assignment();
    let nodes = assignment.cluster(cluster).map(|own| own.nodes.as_slice()).unwrap_or_default();
    match context.control_planes.holders(names, tenant, nodes).await {
        Ok(None) => BudgetOutcome::Applied,
        Ok(Some(message)) => BudgetOutcome::BlocksRemain(message),
        Err(error) => BudgetOutcome::Unreachable(error.to_string()),
    }
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "objects are made where they are passed")]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn tenant(spec: Value, finalizers: &[&str], is_deleting: bool) -> CacheTenant {
        let deleted = is_deleting.then_some("2026-01-01T00:00:00Z");
        let metadata = json!({ "name": "t", "finalizers": finalizers, "deletionTimestamp": deleted });
        serde_json::from_value(json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant", "metadata": metadata, "spec": spec,
        }))
        .expect("a tenant")
    }

    fn at(outcome: BudgetOutcome) -> BudgetResult {
        let overcommitted = TierBytes::default();
        BudgetResult { cluster: "n/c".to_owned(), is_member: true, outcome, overcommitted }
    }

    #[test]
    fn spec_with_limits_or_reservations_has_a_budget() {
        let of = |budget: Value| desired(&tenant(json!({ "budget": budget }), &[], false));
        assert_eq!(of(json!({})), None);
        assert_eq!(of(json!({ "ssd": { "reserved": "0Mi" } })), None);
        let some = of(json!({ "ssd": { "reserved": "1Ki", "limit": "1Mi" } })).expect("a budget");
        assert_eq!(some.reserved, TierBytes { dram: 0, ssd: 1024 });
        assert_eq!(some.limit, TierBytes { dram: u64::MAX, ssd: 1 << 20 });
    }

    #[test]
    fn finalizers_stay_until_budgets_are_removed_and_no_node_holds_blocks() {
        let limited = || json!({ "budget": { "ssd": { "limit": "1Mi" } } });
        let purge = || json!({ "deletionPolicy": "Purge" });
        let both = [BUDGET_FINALIZER, PURGE_FINALIZER];
        let refused = Refusal::new(reprise_crds::status::Reason::Unsupported, "no");
        let applied = || at(BudgetOutcome::Applied);
        let unreachable = || at(BudgetOutcome::Unreachable(String::new()));
        let held = || at(BudgetOutcome::BlocksRemain("n1 is absent".to_owned()));
        for (tenant, refused, results, withdrawn, purged) in [
            (tenant(limited(), &[], false), None, vec![applied()], false, false),
            (tenant(json!({}), &[], false), None, vec![applied()], true, false),
            // A rejected spec changes nothing.
            (tenant(json!({}), &[], false), Some(&refused), vec![], false, false),
            (tenant(limited(), &both[..1], true), None, vec![applied()], true, false),
            (tenant(limited(), &both[..1], true), None, vec![], true, false),
            (tenant(limited(), &both[..1], true), Some(&refused), vec![], true, false),
            (tenant(limited(), &both[..1], true), None, vec![applied(), unreachable()], false, false),
            // The purge starts with the deletion, and the zero budget stays until it is complete.
            (tenant(purge(), &both, false), None, vec![applied()], false, false),
            (tenant(purge(), &both, true), None, vec![applied(), held()], false, false),
            (tenant(purge(), &both, true), None, vec![unreachable()], false, false),
            (tenant(purge(), &both, true), None, vec![applied()], false, true),
            (tenant(purge(), &both[..1], true), None, vec![applied()], true, false),
        ] {
            let is = (is_withdrawn(&tenant, refused, &results), is_purged(&tenant, &results));
            assert_eq!(is, (withdrawn, purged), "{:?} {refused:?} {results:?}", tenant.metadata);
        }
    }
}
