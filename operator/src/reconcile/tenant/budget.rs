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
//! selects. Clusters that are being deleted are skipped, and this is reported ([`skipped_clusters`]); a
//! cluster whose deletion waits for engines is included. A tenant with this policy owns its budget even
//! without limits: a budget that another client set is removed.

use std::sync::Arc;

use futures_util::future::join_all;
use kube::ResourceExt;
use reprise_crds::fields::ClusterRef;
use reprise_crds::tenant::{Quota, Quotas, TenantDeletion};
use reprise_crds::{CacheTenant, KVCacheCluster};

use crate::framework::refusal::Refusal;
use crate::reconcile::context::Context;
use crate::reconcile::control_plane::{Budget, CallError, POLL_INTERVAL, RETRY_INTERVAL, TierBytes};
use crate::reconcile::membership::applies_to;
use crate::reconcile::names::{BUDGET_FINALIZER, ClusterNames, PURGE_FINALIZER};

/// Result of setting the budget at one control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BudgetResult {
    /// `namespace/name` of the cluster.
    pub cluster: String,
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

/// The desired budget of a tenant in one cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct DesiredBudget {
    budget: Option<Budget>,
    /// Whether the tenant's blocks are purged.
    purged: bool,
    /// Whether the object may have set a budget before.
    owned: bool,
    /// Whether the cluster is paused.
    paused: bool,
}

/// The next action at a control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    Set(Budget),
    Remove,
    Foreign,
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
    tenant.finalizers().iter().any(|finalizer| finalizer == BUDGET_FINALIZER)
}

/// Whether the spec requests a purge on deletion.
pub fn wants_purge(tenant: &CacheTenant) -> bool {
    tenant.spec.deletion_policy == TenantDeletion::Purge
}

/// Whether the tenant has the purge finalizer.
pub fn has_purge(tenant: &CacheTenant) -> bool {
    tenant.finalizers().iter().any(|finalizer| finalizer == PURGE_FINALIZER)
}

/// Whether the tenant is being purged.
pub fn is_purging(tenant: &CacheTenant) -> bool {
    tenant.metadata.deletion_timestamp.is_some() && has_purge(tenant)
}

/// Whether the purge is complete.
pub fn is_purged(tenant: &CacheTenant, results: &[BudgetResult]) -> bool {
    is_purging(tenant) && results.iter().all(|result| result.outcome == BudgetOutcome::Applied)
}

/// Returns the clusters whose nodes were checked for blocks. At other clusters only a budget was removed.
pub fn purged_clusters(tenant: &CacheTenant, results: &[BudgetResult]) -> Vec<String> {
    fn is_it(named: &ClusterRef, key: &str) -> bool {
        key.split_once('/') == Some((named.namespace.as_str(), named.name.as_str()))
    }
    let named = &tenant.spec.clusters;
    let is_named = |key: &&String| named.is_empty() || named.iter().any(|named| is_it(named, key));
    results.iter().map(|result| &result.cluster).filter(is_named).cloned().collect()
}

/// Returns the tenant's clusters that the purge skips because they are being deleted, as `namespace/name`.
pub fn skipped_clusters(tenant: &CacheTenant, context: &Context) -> Vec<String> {
    skipped_among(tenant, &context.stores.clusters.state())
}

fn skipped_among(tenant: &CacheTenant, clusters: &[Arc<KVCacheCluster>]) -> Vec<String> {
    let deleted = clusters.iter().filter(|cluster| cluster.metadata.deletion_timestamp.is_some());
    let names = deleted.map(|cluster| ClusterNames::of(cluster)).filter(|names| applies_to(tenant, names));
    let mut keys: Vec<String> = names.map(|names| names.key()).collect();
    keys.sort();
    keys
}

/// Whether the tenant no longer needs its budget, and no control plane has one.
pub fn is_withdrawn(tenant: &CacheTenant, refused: Option<&Refusal>, results: &[BudgetResult]) -> bool {
    let ends = match tenant.metadata.deletion_timestamp {
        Some(_) => !is_purging(tenant),
        None => refused.is_none() && desired(tenant).is_none() && !wants_purge(tenant),
    };
    ends && results.iter().all(|result| result.outcome == BudgetOutcome::Applied)
}

/// Returns the delay until control planes are checked again.
pub fn next_check(results: &[BudgetResult]) -> Option<std::time::Duration> {
    let is_pending = |result: &BudgetResult| {
        matches!(result.outcome, BudgetOutcome::Unreachable(_) | BudgetOutcome::BlocksRemain(_))
    };
    let is_pending = results.iter().any(is_pending);
    if is_pending { Some(RETRY_INTERVAL) } else { (!results.is_empty()).then_some(POLL_INTERVAL) }
}

/// Sets the tenant's budget at the control planes of all clusters. A rejected object changes nothing.
pub async fn sync(tenant: &CacheTenant, refused: Option<&Refusal>, context: &Context) -> Vec<BudgetResult> {
    let is_deleting = tenant.metadata.deletion_timestamp.is_some();
    if refused.is_some() && !is_deleting {
        return Vec::new();
    }
    let (owned, purged) = (owns_budgets(tenant), is_purging(tenant));
    let mut clusters = context.stores.clusters.state();
    clusters.sort_by_key(|cluster| ClusterNames::of(cluster).key());
    let of_cluster = |cluster: &KVCacheCluster| {
        let names = ClusterNames::of(cluster);
        let known = (!is_deleting || purged) && applies_to(tenant, &names);
        // The control plane of a deleted cluster is deleted with it.
        let is_there = cluster.metadata.deletion_timestamp.is_none();
        let budget = if purged { Some(Budget::ZERO) } else { desired(tenant) };
        let budget = budget.filter(|_| known);
        let wanted = DesiredBudget { budget, purged: purged && known, owned, paused: cluster.spec.paused };
        (is_there && (known || owned)).then_some((names, wanted))
    };
    let asked = clusters.iter().filter_map(|cluster| of_cluster(cluster.as_ref()));
    let name = tenant.name_any();
    let results = join_all(asked.map(|(names, wanted)| {
        let name = &name;
        async move {
            let result = sync_cluster(&names, name, wanted, context).await?;
            let is_set = wanted.purged && result.outcome == BudgetOutcome::Applied;
            Some(if is_set { check_remaining_blocks(result, &names, name, context).await } else { result })
        }
    }));
    results.await.into_iter().flatten().collect()
}

/// Replaces the outcome if nodes of the cluster may still hold blocks of a purged tenant.
async fn check_remaining_blocks(
    result: BudgetResult,
    names: &ClusterNames,
    tenant: &str,
    context: &Context,
) -> BudgetResult {
    let assignment = context.stores.assignment();
    let nodes =
        assignment.clusters.get(&names.key()).map(|cluster| cluster.nodes.as_slice()).unwrap_or_default();
    let outcome = match context.control_planes.holders(names, tenant, nodes, &context.metrics).await {
        Ok(None) => BudgetOutcome::Applied,
        Ok(Some(message)) => BudgetOutcome::BlocksRemain(message),
        Err(error) => BudgetOutcome::Unreachable(error.message().to_owned()),
    };
    BudgetResult { outcome, ..result }
}

/// Sets the budget at one cluster. Returns `None` if the control plane is unreachable and there is no budget
/// to set.
async fn sync_cluster(
    names: &ClusterNames,
    tenant: &str,
    wanted: DesiredBudget,
    context: &Context,
) -> Option<BudgetResult> {
    let (control_planes, metrics) = (&context.control_planes, &context.metrics);
    let has_work = wanted.budget.is_some() || wanted.owned;
    let state = control_planes.state(names, metrics).await;
    let overcommitted = state.as_ref().map(|known| known.overcommitted).unwrap_or_default();
    let step = match &state {
        Ok(known) => step(wanted, known.budgets.get(tenant)),
        Err(_) if !has_work => return None,
        Err(message) => {
            let outcome = BudgetOutcome::Unreachable(message.clone());
            return Some(BudgetResult { cluster: names.key(), outcome, overcommitted });
        }
    };
    let called = match step {
        Step::Nothing => Ok(()),
        Step::Set(_) | Step::Remove if wanted.paused => {
            return Some(budget_result(names, BudgetOutcome::Paused, overcommitted));
        }
        Step::Set(budget) => control_planes.set_budget(names, tenant, budget, metrics).await,
        Step::Remove => control_planes.remove_budget(names, tenant, metrics).await,
        Step::Foreign => return Some(budget_result(names, BudgetOutcome::Foreign, overcommitted)),
    };
    if called.is_ok() && step != Step::Nothing {
        tracing::info!(tenant, cluster = names.key(), "set the budget of a tenant at the control plane");
    }
    let outcome = match called {
        Ok(()) => BudgetOutcome::Applied,
        Err(CallError::Unavailable(message)) => BudgetOutcome::Unreachable(message),
        Err(CallError::Rejected(message) | CallError::NotFound(message)) => BudgetOutcome::Rejected(message),
    };
    (has_work || outcome != BudgetOutcome::Applied).then(|| budget_result(names, outcome, overcommitted))
}

fn budget_result(names: &ClusterNames, outcome: BudgetOutcome, overcommitted: TierBytes) -> BudgetResult {
    BudgetResult { cluster: names.key(), outcome, overcommitted }
}

fn step(wanted: DesiredBudget, has: Option<&Budget>) -> Step {
    match (wanted.budget, has) {
        (Some(budget), Some(has)) if budget == *has => Step::Nothing,
        (Some(budget), _) => Step::Set(budget),
        (None, None) => Step::Nothing,
        (None, Some(_)) if wanted.owned => Step::Remove,
        (None, Some(_)) => Step::Foreign,
    }
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "objects are made where they are passed")]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn tenant(budget: Value, metadata: Value) -> CacheTenant {
        let mut whole = json!({ "name": "t" });
        whole.as_object_mut().expect("made above").extend(metadata.as_object().expect("fields").clone());
        serde_json::from_value(json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant", "metadata": whole, "spec": { "budget": budget },
        }))
        .expect("a tenant")
    }

    fn at(outcome: BudgetOutcome) -> BudgetResult {
        BudgetResult { cluster: "n/c".to_owned(), outcome, overcommitted: TierBytes::default() }
    }

    #[test]
    fn spec_with_limits_or_reservations_has_a_budget() {
        let of = |budget: Value| desired(&tenant(budget, json!({})));
        assert_eq!(of(json!({})), None);
        assert_eq!(of(json!({ "ssd": { "reserved": "0Mi" } })), None);
        let some = of(json!({ "ssd": { "reserved": "1Ki", "limit": "1Mi" } })).expect("a budget");
        assert_eq!(some.reserved, TierBytes { dram: 0, ssd: 1024 });
        assert_eq!(some.limit, TierBytes { dram: u64::MAX, ssd: 1 << 20 });
    }

    #[test]
    fn sets_budgets_that_differ_and_keeps_foreign_ones() {
        let budget = |limit: u64| Budget {
            reserved: TierBytes::default(),
            limit: TierBytes { dram: limit, ssd: limit },
        };
        let wanted = |budget, owned| DesiredBudget { budget, purged: false, owned, paused: false };
        for (wanted, has, then) in [
            (wanted(Some(budget(1)), true), None, Step::Set(budget(1))),
            (wanted(Some(budget(1)), true), Some(budget(2)), Step::Set(budget(1))),
            (wanted(Some(budget(1)), true), Some(budget(1)), Step::Nothing),
            (wanted(None, true), Some(budget(1)), Step::Remove),
            (wanted(None, true), None, Step::Nothing),
            (wanted(None, false), Some(budget(1)), Step::Foreign),
            (wanted(None, false), None, Step::Nothing),
        ] {
            assert_eq!(step(wanted, has.as_ref()), then, "{wanted:?} {has:?}");
        }
    }

    #[test]
    fn removes_finalizer_once_no_control_plane_has_the_budget() {
        let limit = json!({ "ssd": { "limit": "1Mi" } });
        let deleted = json!({ "deletionTimestamp": "2026-01-01T00:00:00Z" });
        let (stays, ends, is_deleting) =
            (tenant(limit.clone(), json!({})), tenant(json!({}), json!({})), tenant(limit, deleted));
        let (kept, untold) = (at(BudgetOutcome::Applied), at(BudgetOutcome::Unreachable(String::new())));
        assert!(!is_withdrawn(&stays, None, std::slice::from_ref(&kept)));
        assert!(is_withdrawn(&ends, None, std::slice::from_ref(&kept)));
        assert!(
            is_withdrawn(&is_deleting, None, std::slice::from_ref(&kept))
                && is_withdrawn(&is_deleting, None, &[])
        );
        assert!(!is_withdrawn(&is_deleting, None, &[kept, untold.clone()]));
        let refused = Refusal::new(reprise_crds::status::Reason::Unsupported, "no");
        assert!(!is_withdrawn(&ends, Some(&refused), &[]), "nothing is withdrawn partially");
        assert!(is_withdrawn(&is_deleting, Some(&refused), &[]));
        assert_eq!(next_check(&[]), None);
        assert_eq!(next_check(&[at(BudgetOutcome::Foreign)]), Some(POLL_INTERVAL));
        assert_eq!(next_check(&[at(BudgetOutcome::Applied), untold]), Some(RETRY_INTERVAL));
    }

    #[test]
    fn purge_skips_deleted_and_unselected_clusters() {
        let cluster = |name: &str, deleted: Value| -> Arc<KVCacheCluster> {
            let whole = json!({
                "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster", "spec": {},
                "metadata": { "namespace": "n", "name": name, "deletionTimestamp": deleted },
            });
            Arc::new(serde_json::from_value(whole).expect("a cluster"))
        };
        let then = json!("2026-01-01T00:00:00Z");
        let clusters = [cluster("stays", Value::Null), cluster("goes", then.clone()), cluster("also", then)];
        let mut purged = tenant(json!({}), json!({}));
        assert_eq!(
            skipped_among(&purged, &clusters),
            ["n/also", "n/goes"],
            "without a selection it has all clusters"
        );
        let named = json!([{ "namespace": "n", "name": "stays" }, { "namespace": "n", "name": "goes" }]);
        purged.spec.clusters = serde_json::from_value(named).expect("references");
        assert_eq!(skipped_among(&purged, &clusters), ["n/goes"]);
        let kept = ["n/other", "n/stays"]
            .map(|key| BudgetResult { cluster: key.to_owned(), ..at(BudgetOutcome::Applied) });
        assert_eq!(
            purged_clusters(&purged, &kept),
            ["n/stays"],
            "at the other cluster only the budget was removed"
        );
    }

    #[test]
    fn purged_tenant_keeps_its_zero_budget_until_no_node_holds_blocks() {
        let with = |finalizers: Value, deleted: Value| {
            let mut metadata = json!({ "finalizers": finalizers });
            metadata
                .as_object_mut()
                .expect("made above")
                .extend(deleted.as_object().expect("fields").clone());
            let mut tenant = tenant(json!({}), metadata);
            tenant.spec.deletion_policy = TenantDeletion::Purge;
            tenant
        };
        let deleted = json!({ "deletionTimestamp": "2026-01-01T00:00:00Z" });
        let (kept, held) =
            (at(BudgetOutcome::Applied), at(BudgetOutcome::BlocksRemain("n1 is absent".to_owned())));
        let stays = with(json!([BUDGET_FINALIZER, PURGE_FINALIZER]), json!({}));
        assert!(!is_purging(&stays) && !is_purged(&stays, &[]));
        assert!(!is_withdrawn(&stays, None, std::slice::from_ref(&kept)), "the purge follows later");
        let is_deleting = with(json!([BUDGET_FINALIZER, PURGE_FINALIZER]), deleted.clone());
        assert!(is_purging(&is_deleting) && !is_withdrawn(&is_deleting, None, std::slice::from_ref(&kept)));
        assert!(
            !is_purged(&is_deleting, &[kept.clone(), held.clone()])
                && is_purged(&is_deleting, std::slice::from_ref(&kept))
        );
        let purged = with(json!([BUDGET_FINALIZER]), deleted);
        assert!(!is_purging(&purged) && is_withdrawn(&purged, None, std::slice::from_ref(&kept)));
        assert_eq!(next_check(&[kept, held]), Some(RETRY_INTERVAL));
    }
}
