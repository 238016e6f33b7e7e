//! Tells control planes what a tenant may have in their clusters.
//!
//! Budgets are the resources', as modes are: a control plane that has another one for a tenant with a `budget` is told again. A budget that
//! no object of this name ever had is somebody's own, and said rather than removed. Before the first control plane is told, the tenant gets a
//! finalizer; it is given up when none has a budget of it any more.
//!
//! A tenant that is purged has a second one. Once it is deleted its budget is nothing, which nodes meet by eviction; the second finalizer is given
//! up when every node of its clusters has said that it holds nothing, and the budget is taken back only then. Its clusters are those that its spec
//! names then; of these, ones that go themselves are not asked, which is said ([`unasked`]); one whose deletion waits for engines is. A tenant with
//! that policy owns its budget also where it has none: one that somebody else has set is removed.

use std::sync::Arc;

use futures_util::future::join_all;
use kube::ResourceExt;
use reprise_crds::fields::ClusterRef;
use reprise_crds::tenant::{Quota, Quotas, TenantDeletion};
use reprise_crds::{CacheTenant, KVCacheCluster};

use crate::cluster::dereference::knows;
use crate::context::Context;
use crate::control_plane::{Budget, LOOK_AGAIN, LOOK_SOON, Room, Unmet};
use crate::in_use;
use crate::names::{BUDGET_FINALIZER, ClusterNames, PURGE_FINALIZER};
use crate::plan::Refusal;

/// What the control plane of one cluster has of the tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settled {
    /// `namespace/name` of the cluster.
    pub cluster: String,
    /// What became of it.
    pub outcome: Outcome,
    /// By how much reservations of all budgets exceed what the cluster's living nodes have.
    pub overcommitted: Room,
}

/// What became of a budget at one control plane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It has what is wanted.
    Kept,
    /// It has, which is nothing, and on these nodes something may be left.
    Held(String),
    /// It could not be asked or told.
    Untold(String),
    /// It refuses, in words for people.
    Refused(String),
    /// It has one that this object never had.
    Foreign,
    /// Nothing is changed of a cluster that is paused.
    Paused,
}

/// What a tenant's object wants of every control plane that knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Wanted {
    budget: Option<Budget>,
    /// Whether the blocks are to go.
    purged: bool,
    /// Whether control planes may have a budget of this object's.
    ours: bool,
    /// Whether the cluster is paused.
    paused: bool,
}

/// What a control plane is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Nothing,
    Set(Budget),
    Remove,
    Foreign,
}

/// The budget that a tenant's spec has, if it has one.
pub fn wanted(tenant: &CacheTenant) -> Option<Budget> {
    let Quotas { dram, ssd } = &tenant.spec.budget;
    // Sums that cannot be read are refused before.
    let reserved = |quota: &Quota| quota.reserved.bytes().unwrap_or_default();
    let limit =
        |quota: &Quota| quota.limit.as_ref().map_or(u64::MAX, |limit| limit.bytes().unwrap_or_default());
    let budget = Budget {
        reserved: Room { dram: reserved(dram), ssd: reserved(ssd) },
        limit: Room { dram: limit(dram), ssd: limit(ssd) },
    };
    let nothing = Budget { reserved: Room::default(), limit: Room { dram: u64::MAX, ssd: u64::MAX } };
    (budget != nothing).then_some(budget)
}

/// Whether control planes may have a budget of this object's.
pub fn is_ours(tenant: &CacheTenant) -> bool {
    tenant.finalizers().iter().any(|finalizer| finalizer == BUDGET_FINALIZER)
}

/// Whether the tenant's blocks go before it does, as its spec says.
pub fn wants_purge(tenant: &CacheTenant) -> bool {
    tenant.spec.deletion_policy == TenantDeletion::Purge
}

/// Whether it does not go before they have gone.
pub fn has_purge(tenant: &CacheTenant) -> bool {
    tenant.finalizers().iter().any(|finalizer| finalizer == PURGE_FINALIZER)
}

/// Whether they go now.
pub fn is_purging(tenant: &CacheTenant) -> bool {
    tenant.metadata.deletion_timestamp.is_some() && has_purge(tenant)
}

/// Whether they have gone.
pub fn is_purged(tenant: &CacheTenant, settled: &[Settled]) -> bool {
    is_purging(tenant) && settled.iter().all(|settled| settled.outcome == Outcome::Kept)
}

/// The clusters whose nodes were asked for the tenant's blocks: at others its budget was looked at, and nothing else.
pub fn asked(tenant: &CacheTenant, settled: &[Settled]) -> Vec<String> {
    fn is_it(named: &ClusterRef, key: &str) -> bool {
        key.split_once('/') == Some((named.namespace.as_str(), named.name.as_str()))
    }
    let named = &tenant.spec.clusters;
    let is_named = |key: &&String| named.is_empty() || named.iter().any(|named| is_it(named, key));
    settled.iter().map(|settled| &settled.cluster).filter(is_named).cloned().collect()
}

/// The clusters of a tenant that are not asked, since they go themselves; by `namespace/name`.
pub fn unasked(tenant: &CacheTenant, context: &Context) -> Vec<String> {
    unasked_of(tenant, &context.world.clusters.state())
}

fn unasked_of(tenant: &CacheTenant, clusters: &[Arc<KVCacheCluster>]) -> Vec<String> {
    let goes = clusters.iter().filter(|cluster| in_use::goes(&***cluster));
    let names = goes.map(|cluster| ClusterNames::of(cluster)).filter(|names| knows(tenant, names));
    let mut keys: Vec<String> = names.map(|names| names.key()).collect();
    keys.sort();
    keys
}

/// Whether nothing of the tenant's is left at control planes that it must not leave there.
pub fn is_undone(tenant: &CacheTenant, refused: Option<&Refusal>, settled: &[Settled]) -> bool {
    let ends = match tenant.metadata.deletion_timestamp {
        Some(_) => !is_purging(tenant),
        None => refused.is_none() && wanted(tenant).is_none() && !wants_purge(tenant),
    };
    ends && settled.iter().all(|settled| settled.outcome == Outcome::Kept)
}

/// How soon control planes are looked at again.
pub fn next(settled: &[Settled]) -> Option<std::time::Duration> {
    let untold = |settled: &Settled| matches!(settled.outcome, Outcome::Untold(_) | Outcome::Held(_));
    let untold = settled.iter().any(untold);
    if untold { Some(LOOK_SOON) } else { (!settled.is_empty()).then_some(LOOK_AGAIN) }
}

/// Makes the control planes of all clusters have what the tenant's object says. A refused object changes nothing.
pub async fn settle(tenant: &CacheTenant, refused: Option<&Refusal>, context: &Context) -> Vec<Settled> {
    let goes = tenant.metadata.deletion_timestamp.is_some();
    if refused.is_some() && !goes {
        return Vec::new();
    }
    let (ours, purged) = (is_ours(tenant), is_purging(tenant));
    let mut clusters = context.world.clusters.state();
    clusters.sort_by_key(|cluster| ClusterNames::of(cluster).key());
    let of_cluster = |cluster: &KVCacheCluster| {
        let names = ClusterNames::of(cluster);
        let known = (!goes || purged) && knows(tenant, &names);
        let is_there = !in_use::goes(cluster);
        let budget = if purged { Some(Budget::NOTHING) } else { wanted(tenant) };
        let budget = budget.filter(|_| known);
        let wanted = Wanted { budget, purged: purged && known, ours, paused: cluster.spec.paused };
        (is_there && (known || ours)).then_some((names, wanted))
    };
    let asked = clusters.iter().filter_map(|cluster| of_cluster(cluster.as_ref()));
    let name = tenant.name_any();
    let settled = join_all(asked.map(|(names, wanted)| {
        let name = &name;
        async move {
            let settled = settle_at(&names, name, wanted, context).await?;
            let is_told = wanted.purged && settled.outcome == Outcome::Kept;
            Some(if is_told { look_for_blocks(settled, &names, name, context).await } else { settled })
        }
    }));
    settled.await.into_iter().flatten().collect()
}

/// Whether the nodes of a cluster hold something still of a tenant that may have nothing there.
async fn look_for_blocks(settled: Settled, names: &ClusterNames, tenant: &str, context: &Context) -> Settled {
    let plan = context.world.plan();
    let nodes = plan.clusters.get(&names.key()).map(|cluster| cluster.nodes.as_slice()).unwrap_or_default();
    let outcome = match context.control_planes.holders(names, tenant, nodes, &context.metrics).await {
        Ok(None) => Outcome::Kept,
        Ok(Some(words)) => Outcome::Held(words),
        Err(unmet) => Outcome::Untold(unmet.words().to_owned()),
    };
    Settled { outcome, ..settled }
}

/// Nothing to say of: a control plane that is away and is to be told nothing.
async fn settle_at(names: &ClusterNames, tenant: &str, wanted: Wanted, context: &Context) -> Option<Settled> {
    let (planes, metrics) = (&context.control_planes, &context.metrics);
    let matters = wanted.budget.is_some() || wanted.ours;
    let look = planes.look(names, metrics).await;
    let overcommitted = look.as_ref().map(|known| known.overcommitted).unwrap_or_default();
    let step = match &look {
        Ok(known) => step(wanted, known.budgets.get(tenant)),
        Err(_) if !matters => return None,
        Err(words) => {
            let outcome = Outcome::Untold(words.clone());
            return Some(Settled { cluster: names.key(), outcome, overcommitted });
        }
    };
    let told = match step {
        Step::Nothing => Ok(()),
        Step::Set(_) | Step::Remove if wanted.paused => {
            return Some(settled(names, Outcome::Paused, overcommitted));
        }
        Step::Set(budget) => planes.set_budget(names, tenant, budget, metrics).await,
        Step::Remove => planes.remove_budget(names, tenant, metrics).await,
        Step::Foreign => return Some(settled(names, Outcome::Foreign, overcommitted)),
    };
    if told.is_ok() && step != Step::Nothing {
        tracing::info!(tenant, cluster = names.key(), "the control plane is told the budget of a tenant");
    }
    let outcome = match told {
        Ok(()) => Outcome::Kept,
        Err(Unmet::Absent(words)) => Outcome::Untold(words),
        Err(Unmet::Refused(words) | Unmet::Unknown(words)) => Outcome::Refused(words),
    };
    (matters || outcome != Outcome::Kept).then(|| settled(names, outcome, overcommitted))
}

fn settled(names: &ClusterNames, outcome: Outcome, overcommitted: Room) -> Settled {
    Settled { cluster: names.key(), outcome, overcommitted }
}

fn step(wanted: Wanted, has: Option<&Budget>) -> Step {
    match (wanted.budget, has) {
        (Some(budget), Some(has)) if budget == *has => Step::Nothing,
        (Some(budget), _) => Step::Set(budget),
        (None, None) => Step::Nothing,
        (None, Some(_)) if wanted.ours => Step::Remove,
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

    fn at(outcome: Outcome) -> Settled {
        Settled { cluster: "n/c".to_owned(), outcome, overcommitted: Room::default() }
    }

    #[test]
    fn a_budget_is_what_the_spec_limits_or_reserves() {
        let of = |budget: Value| wanted(&tenant(budget, json!({})));
        assert_eq!(of(json!({})), None);
        assert_eq!(of(json!({ "ssd": { "reserved": "0Mi" } })), None);
        let some = of(json!({ "ssd": { "reserved": "1Ki", "limit": "1Mi" } })).expect("a budget");
        assert_eq!(some.reserved, Room { dram: 0, ssd: 1024 });
        assert_eq!(some.limit, Room { dram: u64::MAX, ssd: 1 << 20 });
    }

    #[test]
    fn a_control_plane_is_told_what_differs_and_keeps_what_is_somebodys_own() {
        let budget =
            |limit: u64| Budget { reserved: Room::default(), limit: Room { dram: limit, ssd: limit } };
        let wanted = |budget, ours| Wanted { budget, purged: false, ours, paused: false };
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
    fn the_finalizer_goes_when_no_control_plane_has_the_budget_any_more() {
        let limit = json!({ "ssd": { "limit": "1Mi" } });
        let deleted = json!({ "deletionTimestamp": "2026-01-01T00:00:00Z" });
        let (stays, ends, goes) =
            (tenant(limit.clone(), json!({})), tenant(json!({}), json!({})), tenant(limit, deleted));
        let (kept, untold) = (at(Outcome::Kept), at(Outcome::Untold(String::new())));
        assert!(!is_undone(&stays, None, std::slice::from_ref(&kept)));
        assert!(is_undone(&ends, None, std::slice::from_ref(&kept)));
        assert!(is_undone(&goes, None, std::slice::from_ref(&kept)) && is_undone(&goes, None, &[]));
        assert!(!is_undone(&goes, None, &[kept, untold.clone()]));
        let refused = Refusal::new(reprise_crds::status::Reason::Unsupported, "no");
        assert!(!is_undone(&ends, Some(&refused), &[]), "nothing is undone half");
        assert!(is_undone(&goes, Some(&refused), &[]));
        assert_eq!(next(&[]), None);
        assert_eq!(next(&[at(Outcome::Foreign)]), Some(LOOK_AGAIN));
        assert_eq!(next(&[at(Outcome::Kept), untold]), Some(LOOK_SOON));
    }

    #[test]
    fn clusters_that_are_being_deleted_or_not_named_are_not_asked() {
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
        assert_eq!(unasked_of(&purged, &clusters), ["n/also", "n/goes"], "it names none, and has all");
        let named = json!([{ "namespace": "n", "name": "stays" }, { "namespace": "n", "name": "goes" }]);
        purged.spec.clusters = serde_json::from_value(named).expect("references");
        assert_eq!(unasked_of(&purged, &clusters), ["n/goes"]);
        let kept = ["n/other", "n/stays"].map(|key| Settled { cluster: key.to_owned(), ..at(Outcome::Kept) });
        assert_eq!(asked(&purged, &kept), ["n/stays"], "at the other its budget was removed, and no more");
    }

    #[test]
    fn a_tenant_that_is_purged_keeps_its_budget_of_nothing_until_no_node_holds_anything() {
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
        let (kept, held) = (at(Outcome::Kept), at(Outcome::Held("n1 is away".to_owned())));
        let stays = with(json!([BUDGET_FINALIZER, PURGE_FINALIZER]), json!({}));
        assert!(!is_purging(&stays) && !is_purged(&stays, &[]));
        assert!(!is_undone(&stays, None, std::slice::from_ref(&kept)), "it is told what is purged later");
        let goes = with(json!([BUDGET_FINALIZER, PURGE_FINALIZER]), deleted.clone());
        assert!(is_purging(&goes) && !is_undone(&goes, None, std::slice::from_ref(&kept)));
        assert!(
            !is_purged(&goes, &[kept.clone(), held.clone()]) && is_purged(&goes, std::slice::from_ref(&kept))
        );
        let purged = with(json!([BUDGET_FINALIZER]), deleted);
        assert!(!is_purging(&purged) && is_undone(&purged, None, std::slice::from_ref(&kept)));
        assert_eq!(next(&[kept, held]), Some(LOOK_SOON));
    }
}
