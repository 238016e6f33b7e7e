//! Sets budgets of tenants at the control planes of their clusters.
//!
//! Budgets come from resources, like modes: a different budget at a control plane is replaced. A budget that
//! no object of this name ever set belongs to another client; it is reported, not removed. The tenant gets a
//! finalizer before the first budget is set. It is removed when no control plane has a budget of the tenant.
//!
//! A tenant with deletion policy `Purge` has a second finalizer, and owns its budget even without limits. When it is
//! deleted its budget becomes zero, so nodes evict its blocks. The second finalizer is removed once every node of the
//! clusters that the spec selects has reported that it holds nothing; the zero budget is removed afterwards. Clusters
//! that are being deleted are skipped and reported ([`TenantClusters::released`]).

use futures_util::future::join_all;
use kube::ResourceExt;
use reprise_crds::fields::Quantity;
use reprise_crds::status::{ConditionType, Finding, Reason};
use reprise_crds::tenant::{Quota, Quotas, TenantDeletion};
use reprise_crds::{CacheTenant, KVCacheCluster};

use super::NO_CLUSTER;
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
    /// Whether the control plane has the desired budget. With reason `Releasing` it has the zero budget, but nodes may
    /// still hold blocks; with reason `OverCapacity` it rejects the budget.
    pub outcome: Result<(), Refusal>,
    /// Bytes by which the reservations of all budgets exceed the capacity of living nodes.
    pub overcommitted: TierBytes,
}

/// Returns the budget of a tenant's spec, if it has one.
pub fn desired(tenant: &CacheTenant) -> Option<Budget> {
    let Quotas { dram, ssd } = &tenant.spec.budget;
    // The schema permits only quantities.
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

/// Whether the tenant is being purged.
pub fn is_purging(tenant: &CacheTenant) -> bool {
    tenant.metadata.deletion_timestamp.is_some() && finalizers::has(tenant, PURGE_FINALIZER)
}

/// Whether the purge is complete.
pub fn is_purged(tenant: &CacheTenant, results: &[BudgetResult]) -> bool {
    is_purging(tenant) && results.iter().all(|result| result.outcome.is_ok())
}

/// Whether the spec requests a budget, or a purge on deletion.
pub fn needs_finalizer(tenant: &CacheTenant) -> bool {
    desired(tenant).is_some() || tenant.spec.deletion_policy == TenantDeletion::Purge
}

/// Whether the tenant no longer needs its budget, and no control plane has one.
pub fn is_withdrawn(tenant: &CacheTenant, refused: Option<&Refusal>, results: &[BudgetResult]) -> bool {
    let ends = match tenant.metadata.deletion_timestamp {
        Some(_) => !is_purging(tenant),
        None => refused.is_none() && !needs_finalizer(tenant),
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
    let (purging, name) = (is_purging(tenant), tenant.name_any());
    // Without the finalizer, no object of this name has set a budget.
    let owned = finalizers::has(tenant, BUDGET_FINALIZER);
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
    Some(BudgetResult { cluster: key, outcome, overcommitted })
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

fn failures(results: &[BudgetResult]) -> impl Iterator<Item = &Refusal> {
    results.iter().filter_map(|result| result.outcome.as_ref().err())
}

/// Returns condition `BudgetApplied`; `None` if there is no budget to apply.
pub fn applied(tenant: &CacheTenant, results: &[BudgetResult], refused: Option<&Refusal>) -> Option<Finding> {
    let kind = ConditionType::BudgetApplied;
    let wanted = desired(tenant);
    if let Some(refused) = refused {
        let message = "the spec is not accepted, so control planes keep their budgets";
        return wanted.is_some().then(|| Finding::no(kind, refused.reason, message));
    }
    if let Some(failure) = failures(results).find(|failure| failure.reason != Reason::Releasing) {
        return Some(Finding::no(kind, failure.reason, &failure.message));
    }
    wanted?;
    if results.is_empty() {
        return Some(Finding::no(kind, Reason::ReferenceNotFound, NO_CLUSTER));
    }
    let clusters: Vec<&str> = results.iter().map(|result| result.cluster.as_str()).collect();
    let message = format!("the control planes of {} have the budget", clusters.join(", "));
    Some(Finding::yes(kind, Reason::AsDesired, message))
}

/// Returns condition `DeletionBlocked` while the tenant is being deleted and a control plane still has its
/// budget.
pub fn blocked(tenant: &CacheTenant, results: &[BudgetResult]) -> Option<Finding> {
    tenant.metadata.deletion_timestamp.as_ref()?;
    let failure = failures(results).next()?;
    let (kept, finalizer) = match is_purging(tenant) {
        true => ("blocks", PURGE_FINALIZER),
        false => ("budget", BUDGET_FINALIZER),
    };
    let message = format!(
        "{}. The operator retries; to keep the {kept} of the tenant, remove finalizer {finalizer}",
        failure.message
    );
    Some(Finding::yes(ConditionType::DeletionBlocked, Reason::Releasing, message))
}

/// Returns the result of a purge, for the clusters that were checked and those that were skipped because they are being
/// deleted.
pub fn purged(checked: &[String], skipped: &[String]) -> Finding {
    let done = match checked.is_empty() {
        true => "the tenant applies to no remaining KVCacheCluster, so no nodes were checked for its blocks"
            .to_owned(),
        false => format!("no node of {} holds blocks of the tenant", checked.join(", ")),
    };
    let kind = ConditionType::DeletionBlocked;
    if skipped.is_empty() {
        return Finding::no(kind, Reason::AsDesired, done);
    }
    let message = format!(
        "{done}; skipped because they are being deleted: {}. Blocks on retained devices of their nodes return with a new \
         KVCacheCluster there: purge the tenant again then",
        skipped.join(", ")
    );
    // Users must act on it, so it must not be published as a success.
    Finding::unknown(kind, Reason::Releasing, message)
}

/// Returns condition `QuotaFeasible` if budget reservations do not fit the control planes' capacity.
pub fn infeasible(results: &[BudgetResult]) -> Option<Finding> {
    let rejected = failures(results).find(|failure| failure.reason == Reason::OverCapacity);
    let lost = || {
        let lost = results.iter().find(|result| result.overcommitted != TierBytes::default())?;
        let TierBytes { dram, ssd } = lost.overcommitted;
        Some(format!(
            "the reservations of all budgets exceed the capacity of living nodes of {} by {} of memory and {} on devices: lower \
             budget.dram.reserved or budget.ssd.reserved of some tenants, or add nodes",
            lost.cluster,
            Quantity::of_bytes(dram),
            Quantity::of_bytes(ssd),
        ))
    };
    let message = rejected.map(|failure| failure.message.clone()).or_else(lost)?;
    Some(Finding::no(ConditionType::QuotaFeasible, Reason::OverCapacity, message))
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "objects are made where they are passed")]
mod tests {
    use reprise_crds::status::ConditionStatus;
    use serde_json::{Value, json};

    use super::*;
    use crate::reconcile::test_objects::resource;

    fn tenant(spec: Value, finalizers: &[&str], is_deleting: bool) -> CacheTenant {
        let deleted = is_deleting.then_some("2026-01-01T00:00:00Z");
        let metadata = json!({ "name": "t", "finalizers": finalizers, "deletionTimestamp": deleted });
        resource(metadata, json!({ "spec": spec }))
    }

    fn result(outcome: Result<(), Refusal>) -> BudgetResult {
        BudgetResult { cluster: "n/c".to_owned(), outcome, overcommitted: TierBytes::default() }
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
            let results: Vec<BudgetResult> =
                outcomes.into_iter().map(|outcome| result(outcome.clone())).collect();
            let is = (is_withdrawn(&tenant, refused, &results), is_purged(&tenant, &results));
            assert_eq!(is, (withdrawn, purged), "{:?} {refused:?} {results:?}", tenant.metadata);
        }
    }

    #[test]
    fn reservations_above_the_capacity_of_living_nodes_are_not_feasible() {
        let at = |ssd| BudgetResult { overcommitted: TierBytes { dram: 0, ssd }, ..result(Ok(())) };
        assert_eq!(infeasible(&[at(0)]), None);
        let message = infeasible(&[at(0), at(1 << 30)]).expect("the condition").message;
        assert!(message.contains("n/c by 0 of memory and 1Gi on devices"), "{message}");
    }

    #[test]
    fn completed_purge_names_checked_and_skipped_clusters() {
        let skipped = ["n/d".to_owned(), "n/e".to_owned()];
        let again = "skipped because they are being deleted: n/d, n/e. ";
        let checked = ["n/c".to_owned()];
        for (checked, skipped, status, words) in [
            (&checked[..], &[][..], ConditionStatus::False, ["no node of n/c holds blocks of the tenant"; 2]),
            (&checked[..], &skipped[..], ConditionStatus::Unknown, ["no node of n/c holds", again]),
            (&[][..], &skipped[..], ConditionStatus::Unknown, ["no remaining KVCacheCluster", again]),
        ] {
            let found = purged(checked, skipped);
            assert_eq!(found.status, status, "{found:?}");
            assert!(words.iter().all(|words| found.message.contains(words)), "{found:?}");
        }
    }
}
