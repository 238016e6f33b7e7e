//! Publishes a decision to the reconcilers of nodes and clusters, which write it.

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::{CacheNode, SlackProfile};

use super::decisions::ProfileDecision;
use crate::reconcile::context::Context;

/// Replaces the decision on a profile, and enqueues the clusters and nodes that differ from it.
pub async fn apply(profile: &SlackProfile, decision: ProfileDecision, context: &Context) {
    let (stores, nodes) = (&context.stores, decision.nodes.clone());
    if context.decisions.replace(profile, decision, stores) {
        for cluster in stores.clusters.state_filter(|cluster| cluster.namespace() == profile.namespace()) {
            stores.feeds.clusters.request(cluster).await;
        }
    }
    let (name, namespace) = (profile.name_any(), profile.namespace().unwrap_or_default());
    let differs = |node: &CacheNode| {
        let cluster = node.spec.cluster_ref.as_ref();
        let claim = node.spec.profiles.iter().find(|claim| claim.name.as_str() == name);
        cluster.is_some_and(|cluster| cluster.namespace.as_str() == namespace)
            && claim.map(|claim| claim.digest.as_str()) != nodes.get(&node.name_any()).map(String::as_str)
    };
    for node in stores.cache_nodes.state_filter(differs) {
        if let Some(node) = stores.nodes.get(&ObjectRef::new(&node.name_any())) {
            stores.feeds.nodes.request(node).await;
        }
    }
}
