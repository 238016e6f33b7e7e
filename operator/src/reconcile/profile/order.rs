//! Selects the profiles that the nodes of a cluster get if more are selected than a node can hold.
//!
//! Profiles that a node of the cluster should already have come first, then the oldest, then by name; the
//! first [`PROFILES_MAX`] apply. A profile that is created later, or selected later because of a label,
//! therefore waits and displaces no other, regardless of its age. It follows when another profile is deleted,
//! is no longer selected, or is on no node of the cluster and younger.
//!
//! Invariant: nodes, files and the status of the profile use the same order. It is based on the decisions;
//! before the first decision of this process on a profile, on the specs of `CacheNode`s.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::ResourceExt;
use reprise_crds::{KVCacheCluster, SlackProfile};

use super::PROFILES_MAX;
use crate::reconcile::context::Context;
use crate::reconcile::membership::belongs_to;
use crate::reconcile::names::ClusterNames;
use crate::reconcile::selection::selects;

/// Returns the profiles that a cluster selects, in order of precedence, without those being deleted.
pub fn selected(cluster: &KVCacheCluster, context: &Context) -> Vec<Arc<SlackProfile>> {
    let mut selected = context.stores.profiles.state_filter(|profile| is_selected(cluster, profile));
    // While all fit, the assigned ones do not matter.
    let used =
        if selected.len() > PROFILES_MAX { assigned(cluster, &selected, context) } else { BTreeSet::new() };
    sort(&mut selected, &used);
    selected
}

/// Whether a cluster selects a profile.
pub fn is_selected(cluster: &KVCacheCluster, profile: &SlackProfile) -> bool {
    let labels = || cluster.spec.slack_profiles.as_ref().is_some_and(|all| selects(all, profile.labels()));
    profile.metadata.deletion_timestamp.is_none() && cluster.namespace() == profile.namespace() && labels()
}

/// Returns the names of profiles that a node of the cluster should have.
fn assigned(cluster: &KVCacheCluster, selected: &[Arc<SlackProfile>], context: &Context) -> BTreeSet<String> {
    let (names, assignment) = (ClusterNames::of(cluster), context.stores.assignment());
    let key = names.key();
    let is_theirs = |node: &String| {
        assignment.nodes.get(node).is_some_and(|own| own.cluster.as_deref() == Some(key.as_str()))
    };
    let specs = context.stores.cache_nodes.state_filter(|node| belongs_to(node, &names));
    let claims = specs.iter().flat_map(|node| &node.spec.profiles);
    let claimed: BTreeSet<&str> = claims.map(|claim| claim.name.as_str()).collect();
    let is_used = |profile: &&Arc<SlackProfile>| match context.decisions.of(profile) {
        Some(decided) => decided.nodes.keys().any(is_theirs),
        None => claimed.contains(profile.name_any().as_str()),
    };
    selected.iter().filter(is_used).map(|profile| profile.name_any()).collect()
}

fn sort(profiles: &mut [Arc<SlackProfile>], used: &BTreeSet<String>) {
    profiles.sort_by_cached_key(|profile| {
        let (name, made) = (profile.name_any(), profile.metadata.creation_timestamp.as_ref());
        (!used.contains(&name), made.map(|time| time.0), name)
    });
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn assigned_profiles_come_first_then_older_ones_regardless_of_name() {
        let profile = |(name, second): (&str, u32)| -> Arc<SlackProfile> {
            let subject = json!({ "model": "m", "gpuProduct": "g", "engineVersion": "e" });
            let whole = json!({
                "apiVersion": "reprise.dev/v1alpha1", "kind": "SlackProfile", "spec": { "subject": subject },
                "metadata": { "name": name, "creationTimestamp": format!("2026-01-01T00:00:{second:02}Z") },
            });
            Arc::new(serde_json::from_value(whole).expect("a profile"))
        };
        for (used, order) in [
            (vec![], "d b c a"),
            // Unassigned older ones come after the assigned one.
            (vec!["a"], "a d b c"),
            (vec!["a", "c"], "c a d b"),
        ] {
            let used = used.into_iter().map(str::to_owned).collect();
            let mut all: Vec<Arc<SlackProfile>> =
                [("a", 3), ("b", 2), ("c", 2), ("d", 1)].map(profile).into();
            sort(&mut all, &used);
            let names: Vec<String> = all.iter().map(|profile| profile.name_any()).collect();
            assert_eq!(names.join(" "), order, "{used:?}");
        }
    }
}
