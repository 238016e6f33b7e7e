//! The controller of clusters, and the changes of clusters on which other objects depend.

use std::sync::Arc;

use kube::runtime::Controller;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::KVCacheCluster;

use crate::framework::change::{Change, WatchedKind, status_is_own};
use crate::framework::feed::only_some;
use crate::framework::own_writes::Digest;
use crate::reconcile::membership::is_frozen;
use crate::reconcile::stores::Stores;

impl WatchedKind for KVCacheCluster {
    /// Nodes wait until the spec is accepted. Tenants stop applying to a cluster that is being
    /// deleted.
    fn dependencies(&self) -> Option<Digest> {
        self.status.as_ref()?;
        Some(Digest::of(&(is_frozen(self), self.metadata.deletion_timestamp.is_some())))
    }

    status_is_own!();
}

/// A cluster is also reconciled after changes of its children, its `CacheNode`s and its Secrets
/// ([`crate::reconcile::secrets`]).
pub fn controller(stores: &Arc<Stores>) -> Controller<KVCacheCluster> {
    let feeds = &stores.feeds;
    let (children, nodes) = (Arc::clone(stores), Arc::clone(stores));
    let of_children =
        only_some(feeds.children.changes(Change::is_any), move |child| children.cluster_of_child(child));
    let of_nodes =
        only_some(feeds.cache_nodes.changes(Change::is_any), move |node| nodes.cluster_of_node(node));
    let itself = |cluster: Arc<KVCacheCluster>| [ObjectRef::from_obj(&*cluster)];
    Controller::for_shared_stream(feeds.clusters.changes(Change::is_foreign), stores.clusters.clone())
        .watches_shared_stream(of_children, itself)
        .watches_shared_stream(of_nodes, itself)
        .reconcile_all_on(feeds.everything.subscribe())
        .reconcile_all_on(feeds.node_labels.subscribe())
        .reconcile_all_on(feeds.pod_assignment.subscribe())
        .reconcile_all_on(feeds.all_clusters.subscribe())
}
