//! The controller of clusters, and the changes of clusters on which other objects depend.

use std::future::ready;
use std::sync::Arc;

use futures_util::StreamExt;
use kube::runtime::Controller;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::{CacheNode, KVCacheCluster};
use serde_json::{Value, json};

use crate::framework::change::{OwnPart, WatchedKind};
use crate::reconcile::membership::is_frozen;
use crate::reconcile::stores::Stores;

impl WatchedKind for KVCacheCluster {
    const OWN_PART: Option<OwnPart> = Some(OwnPart::Status);

    /// Nodes wait until the spec is accepted. Tenants stop applying to a cluster that is being
    /// deleted.
    fn dependencies(&self) -> Value {
        json!(self.status.as_ref().map(|_| (is_frozen(self), self.metadata.deletion_timestamp.is_some())))
    }
}

/// A cluster is also reconciled after changes of its children, its `CacheNode`s and its Secrets
/// ([`crate::reconcile::secrets`]).
pub fn controller(stores: &Arc<Stores>) -> Controller<KVCacheCluster> {
    let feeds = &stores.feeds;
    let [children_of, nodes_of] = [stores, stores].map(Arc::clone);
    // kube needs one type of objects, and children are of several kinds.
    let of_children =
        feeds.children.changes().filter_map(move |child| ready(children_of.cluster_of_child(&child)));
    Controller::for_shared_stream(feeds.clusters.foreign_changes(), stores.clusters.clone())
        .watches_shared_stream(of_children, |cluster: Arc<KVCacheCluster>| [ObjectRef::from_obj(&*cluster)])
        .watches_shared_stream(feeds.cache_nodes.changes(), move |node: Arc<CacheNode>| {
            nodes_of.cluster_of_node(&node).map(|cluster| ObjectRef::from_obj(&*cluster))
        })
        .reconcile_all_on(feeds.everything.subscribe())
        .reconcile_all_on(feeds.node_labels.subscribe())
        .reconcile_all_on(feeds.all_clusters.subscribe())
}
