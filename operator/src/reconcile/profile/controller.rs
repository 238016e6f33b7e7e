//! The controller of profiles.

use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::Controller;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::{CacheNode, SlackProfile};

use crate::framework::change::{OwnPart, WatchedKind};
use crate::reconcile::stores::Stores;

impl WatchedKind for SlackProfile {
    const OWN_PART: Option<OwnPart> = Some(OwnPart::Status);
}

/// A profile is also reconciled after changes of the specs, GPUs and applied profiles of the `CacheNode`s whose cluster
/// is in its namespace.
pub fn controller(stores: &Arc<Stores>) -> Controller<SlackProfile> {
    let (feeds, of_nodes) = (&stores.feeds, Arc::clone(stores));
    let nodes = feeds.cache_nodes.spec_changes();
    Controller::for_shared_stream(feeds.profiles.foreign_changes(), stores.profiles.clone())
        .watches_shared_stream(nodes, move |node| profiles_of(&node, &of_nodes))
        .reconcile_all_on(feeds.everything.subscribe())
        .reconcile_all_on(feeds.node_labels.subscribe())
}

fn profiles_of(node: &CacheNode, stores: &Stores) -> Vec<ObjectRef<SlackProfile>> {
    let Some(cluster) = &node.spec.cluster_ref else { return Vec::new() };
    let namespace = cluster.namespace.as_str();
    let is_there = |profile: &SlackProfile| profile.namespace().is_some_and(|other| other == namespace);
    stores.profiles.state_filter(is_there).iter().map(|profile| ObjectRef::from_obj(&**profile)).collect()
}
