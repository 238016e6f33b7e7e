//! The controller of allocations.

use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::Controller;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::{CacheNode, GPUQueueAllocation};

use crate::framework::change::{OwnPart, WatchedKind};
use crate::reconcile::stores::Stores;

impl WatchedKind for GPUQueueAllocation {
    const OWN_PART: Option<OwnPart> = Some(OwnPart::Status);
}

/// The reconcile of one allocation decides about all allocations of its node. So one is enough after a change of the
/// `CacheNode`, and after a deletion, which may release queues for the others.
pub fn controller(stores: &Arc<Stores>) -> Controller<GPUQueueAllocation> {
    let feeds = &stores.feeds;
    let [of_nodes, of_others] = [stores, stores].map(Arc::clone);
    let others = feeds.allocations.spec_changes();
    let nodes = feeds.cache_nodes.changes();
    Controller::for_shared_stream(feeds.allocations.foreign_changes(), stores.allocations.clone())
        .watches_shared_stream(others, move |allocation: Arc<GPUQueueAllocation>| {
            any_of(&of_others, allocation.spec.node_name.as_str())
        })
        .watches_shared_stream(nodes, move |node: Arc<CacheNode>| any_of(&of_nodes, &node.name_any()))
        .reconcile_all_on(feeds.everything.subscribe())
        .reconcile_all_on(feeds.node_labels.subscribe())
}

/// Returns one allocation of a node.
fn any_of(stores: &Stores, node: &str) -> Option<ObjectRef<GPUQueueAllocation>> {
    let of_node = |allocation: &GPUQueueAllocation| allocation.spec.node_name.as_str() == node;
    stores.allocations.find(of_node).map(|allocation| ObjectRef::from_obj(&*allocation))
}
