//! Which profiles the nodes of a cluster take, where more are selected than a node has room for.
//!
//! First those that a node of the cluster should have already, then the oldest, then by name: the first [`PROFILES_MAX`] have a place. So a
//! profile that is made later, or that is selected only now because of a label, waits for a place and takes nobody's, however old it is. A
//! place is free when its profile goes, is selected no more, or is on no node of the cluster and an older one waits.
//!
//! Invariant: nodes, files and the profile's own status go by one order. It is that of what was decided; of a profile that nobody has looked
//! at since the process began, that of the specs of `CacheNode`s.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::ResourceExt;
use reprise_crds::{CacheNode, KVCacheCluster, SlackProfile};

use super::PROFILES_MAX;
use crate::cluster::dereference::is_of;
use crate::context::Context;
use crate::names::ClusterNames;
use crate::selection::selects;

/// Profiles that a cluster selects, those with a place first. One that goes is selected no more.
pub fn selected(cluster: &KVCacheCluster, context: &Context) -> Vec<Arc<SlackProfile>> {
    let selected = context.world.profiles.state_filter(|profile| is_selected(cluster, profile));
    // As long as there is room for all, it is all the same who is in use.
    let used =
        if selected.len() > PROFILES_MAX { in_use(cluster, &selected, context) } else { BTreeSet::new() };
    in_order(selected, &used)
}

/// Whether a cluster selects a profile.
pub fn is_selected(cluster: &KVCacheCluster, profile: &SlackProfile) -> bool {
    let labels = || cluster.spec.slack_profiles.as_ref().is_some_and(|all| selects(all, profile.labels()));
    profile.metadata.deletion_timestamp.is_none() && cluster.namespace() == profile.namespace() && labels()
}

/// Names of those that a node of the cluster should have.
fn in_use(cluster: &KVCacheCluster, selected: &[Arc<SlackProfile>], context: &Context) -> BTreeSet<String> {
    let (names, plan) = (ClusterNames::of(cluster), context.world.plan());
    let key = names.key();
    let is_theirs =
        |node: &String| plan.nodes.get(node).is_some_and(|own| own.cluster.as_deref() == Some(key.as_str()));
    let specs = context.world.cache_nodes.state_filter(|node| is_of(node, &names));
    let claimed = claimed(&specs);
    let is_used = |profile: &&Arc<SlackProfile>| match context.decisions.of(profile) {
        Some(decided) => decided.nodes.keys().any(is_theirs),
        None => claimed.contains(&profile.name_any()),
    };
    selected.iter().filter(is_used).map(|profile| profile.name_any()).collect()
}

/// Names of profiles in the specs of nodes.
fn claimed(nodes: &[Arc<CacheNode>]) -> BTreeSet<String> {
    nodes.iter().flat_map(|node| &node.spec.profiles).map(|claim| claim.name.to_string()).collect()
}

fn in_order(mut profiles: Vec<Arc<SlackProfile>>, used: &BTreeSet<String>) -> Vec<Arc<SlackProfile>> {
    profiles.sort_by_cached_key(|profile| {
        let (name, made) = (profile.name_any(), profile.metadata.creation_timestamp.as_ref());
        (!used.contains(&name), made.map(|time| time.0), name)
    });
    profiles
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn profile(name: &str, second: u32) -> Arc<SlackProfile> {
        let made = format!("2026-01-01T00:00:{second:02}Z");
        let whole = json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "SlackProfile",
            "metadata": { "name": name, "namespace": "n", "uid": name, "creationTimestamp": made },
            "spec": { "subject": { "model": "m", "gpuProduct": "g", "engineVersion": "e" }, "windows": [] },
        });
        Arc::new(serde_json::from_value(whole).expect("a profile"))
    }

    #[test]
    fn profiles_in_use_keep_their_places_then_older_ones_come_whatever_they_are_called() {
        let names = |used: &[&str]| {
            let used = used.iter().map(|name| (*name).to_owned()).collect();
            let all = vec![profile("a", 3), profile("b", 2), profile("c", 2), profile("d", 1)];
            in_order(all, &used).iter().map(|profile| profile.name_any()).collect::<Vec<_>>()
        };
        assert_eq!(names(&[]), ["d", "b", "c", "a"]);
        assert_eq!(names(&["a"]), ["a", "d", "b", "c"], "older ones that nobody has come after it");
        assert_eq!(names(&["a", "c"]), ["c", "a", "d", "b"]);
    }

    #[test]
    fn what_stands_in_a_spec_is_in_use() {
        let claim = json!({ "name": "p", "digest": format!("sha256:{}", "0f".repeat(32)) });
        let node = |profiles: Value| {
            let spec = json!({ "nodeName": "n1", "profiles": profiles });
            Arc::new(CacheNode::new("n1", serde_json::from_value(spec).expect("a spec")))
        };
        assert_eq!(claimed(&[node(json!([])), node(json!([claim]))]), BTreeSet::from(["p".to_owned()]));
        assert!(claimed(&[node(json!([]))]).is_empty());
    }
}
