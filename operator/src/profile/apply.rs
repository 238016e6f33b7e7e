//! Leaves what was decided to those who write it: the reconcilers of nodes and clusters.

use std::collections::BTreeSet;

use kube::ResourceExt;
use reprise_crds::SlackProfile;

use super::build::Wave;
use super::content::Revision;
use super::decisions::Decided;
use crate::context::Context;
use crate::world::World;

/// Makes it what is wanted of nodes, and has those looked at for which it is news.
pub async fn apply(profile: &SlackProfile, revision: Option<Revision>, wave: &Wave, context: &Context) {
    let world = &context.world;
    let uid = profile.uid().unwrap_or_default();
    let decided = Decided { uid, revision, nodes: wave.nodes.clone() };
    let news = context.decisions.decide(profile, decided, || having(profile, world));
    if news.clusters {
        let namespace = profile.namespace().unwrap_or_default();
        context.triggers.clusters_in(world, &namespace).await;
        context.decisions.forget_gone(world);
    }
    if !news.nodes.is_empty() {
        tracing::debug!(
            profile = profile.name_any(),
            nodes = news.nodes.len(),
            "what nodes should have was decided"
        );
    }
    context.triggers.nodes_named(world, &news.nodes).await;
}

/// Nodes whose spec has the profile, wherever that came from.
fn having(profile: &SlackProfile, world: &World) -> BTreeSet<String> {
    let (name, namespace) = (profile.name_any(), profile.namespace().unwrap_or_default());
    let has = world.cache_nodes.state_filter(|node| {
        let of_namespace =
            |cluster: &reprise_crds::fields::ClusterRef| cluster.namespace.as_str() == namespace;
        node.spec.cluster_ref.as_ref().is_some_and(of_namespace)
            && node.spec.profiles.iter().any(|claim| claim.name.as_str() == name)
    });
    has.iter().map(|node| node.name_any()).collect()
}
