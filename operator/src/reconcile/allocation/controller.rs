//! The controller of allocations.

use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::Controller;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::{CacheNode, GPUQueueAllocation, SlackProfile};

use crate::framework::change::{OwnPart, WatchedKind};
use crate::reconcile::stores::Stores;

impl WatchedKind for GPUQueueAllocation {
    const OWN_PART: OwnPart = OwnPart::Status;
}

/// An allocation is also reconciled after changes of its profile. The reconcile of one allocation decides about all
/// allocations of its node. So one is enough after a change of the `CacheNode`, and after a deletion, which may release
/// queues for the others.
pub fn controller(stores: &Arc<Stores>) -> Controller<GPUQueueAllocation> {
    let feeds = &stores.feeds;
    let [of_nodes, of_others, of_profiles] = [stores, stores, stores].map(Arc::clone);
    let (own, others) = (feeds.allocations.changes(), feeds.allocations.spec_changes());
    let nodes = feeds.cache_nodes.changes();
    let profiles = feeds.profiles.changes();
    Controller::for_shared_stream(feeds.allocations.foreign_changes(), stores.allocations.clone())
        // The reconcile that sees the end of a grant in the status schedules it.
        .watches_shared_stream(own, |allocation: Arc<GPUQueueAllocation>| {
            let ends = allocation.status.as_ref().is_some_and(|status| status.expires_at.is_some());
            ends.then(|| ObjectRef::from_obj(&*allocation))
        })
        .watches_shared_stream(others, move |allocation: Arc<GPUQueueAllocation>| {
            any_of(&of_others, allocation.spec.node_name.as_str())
        })
        .watches_shared_stream(nodes, move |node: Arc<CacheNode>| any_of(&of_nodes, &node.name_any()))
        .watches_shared_stream(profiles, move |profile| naming(&of_profiles, &profile))
        .reconcile_all_on(feeds.everything.subscribe())
        .reconcile_all_on(feeds.node_labels.subscribe())
}

/// Returns one allocation of a node.
fn any_of(stores: &Stores, node: &str) -> Option<ObjectRef<GPUQueueAllocation>> {
    let of_node = |allocation: &GPUQueueAllocation| allocation.spec.node_name.as_str() == node;
    stores.allocations.find(of_node).map(|allocation| ObjectRef::from_obj(&*allocation))
}

/// Returns the allocations that name a profile. Its status decides whether they are refused.
fn naming(stores: &Stores, profile: &SlackProfile) -> Vec<ObjectRef<GPUQueueAllocation>> {
    let (namespace, name) = (profile.namespace(), profile.name_any());
    let names_it = |allocation: &GPUQueueAllocation| {
        let named = allocation.spec.slack_profile_ref.as_ref();
        allocation.namespace() == namespace && named.is_some_and(|named| named.name.as_str() == name)
    };
    let allocations = stores.allocations.state_filter(names_it);
    allocations.iter().map(|allocation| ObjectRef::from_obj(&**allocation)).collect()
}
