//! Publishes a decision to the reconcilers of nodes and clusters, which write it.

use std::collections::BTreeSet;

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::{KVCacheCluster, SlackProfile};

use super::build::Rollout;
use super::content::Revision;
use super::decisions::ProfileDecision;
use crate::reconcile::context::Context;
use crate::reconcile::stores::Stores;

/// Replaces the decision on a profile and enqueues the nodes and clusters that it affects.
pub async fn apply(
    profile: &SlackProfile,
    revision: Option<Revision>,
    decision: &Rollout,
    context: &Context,
) {
    let stores = &context.stores;
    let uid = profile.uid().unwrap_or_default();
    let decided = ProfileDecision { uid, revision, nodes: decision.nodes.clone() };
    let change = context.decisions.replace(profile, decided, || nodes_with(profile, stores));
    if change.clusters {
        let namespace = profile.namespace().unwrap_or_default();
        let of_namespace =
            |cluster: &KVCacheCluster| cluster.namespace().is_some_and(|other| other == namespace);
        for cluster in stores.clusters.state_filter(of_namespace) {
            stores.feeds.clusters.request(cluster).await;
        }
        context.decisions.remove_deleted(stores);
    }
    if !change.nodes.is_empty() {
        tracing::debug!(
            profile = profile.name_any(),
            nodes = change.nodes.len(),
            "decided the revision of nodes"
        );
    }
    for node in change.nodes.iter().filter_map(|name| stores.nodes.get(&ObjectRef::new(name))) {
        stores.feeds.nodes.request(node).await;
    }
}

/// Returns the nodes whose spec has the profile.
fn nodes_with(profile: &SlackProfile, stores: &Stores) -> BTreeSet<String> {
    let (name, namespace) = (profile.name_any(), profile.namespace().unwrap_or_default());
    let has = stores.cache_nodes.state_filter(|node| {
        let of_namespace =
            |cluster: &reprise_crds::fields::ClusterRef| cluster.namespace.as_str() == namespace;
        node.spec.cluster_ref.as_ref().is_some_and(of_namespace)
            && node.spec.profiles.iter().any(|claim| claim.name.as_str() == name)
    });
    has.iter().map(|node| node.name_any()).collect()
}
