//! The controller of nodes, and the parts of a `CacheNode` on which other objects depend.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::runtime::Controller;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::{CacheNode, GPUQueueAllocation};
use serde_json::{Value, json};

use crate::framework::change::{OwnPart, WatchedKind};
use crate::reconcile::names::AGENT_READY;
use crate::reconcile::stores::Stores;

impl WatchedKind for Node {
    const OWN_PART: Option<OwnPart> = Some(OwnPart::Condition(AGENT_READY));
}

impl WatchedKind for CacheNode {
    /// The agent writes the rest of the status.
    const OWN_PART: Option<OwnPart> = Some(OwnPart::Condition("ModeApplied"));

    /// Profiles depend on the GPUs of nodes and on the revisions that nodes report. Tenants depend on the
    /// applied tenants.
    fn dependencies(&self) -> Value {
        let status = self.status.as_ref();
        json!(status.map(|status| {
            let applied = status.applied.as_ref();
            (&status.gpus, applied.map(|applied| (&applied.profiles, &applied.tenants_digest)))
        }))
    }
}

/// A node is also reconciled after changes of its `CacheNode`, except the operator's own condition, and of its
/// allocations, because the `CacheNode` contains the grants.
pub fn controller(stores: &Arc<Stores>) -> Controller<Node> {
    let feeds = &stores.feeds;
    Controller::for_shared_stream(feeds.nodes.foreign_changes(), stores.nodes.clone())
        .watches_shared_stream(feeds.cache_nodes.foreign_changes(), |node: Arc<CacheNode>| {
            [ObjectRef::new(&node.name_any())]
        })
        .watches_shared_stream(feeds.allocations.changes(), |allocation: Arc<GPUQueueAllocation>| {
            [ObjectRef::new(allocation.spec.node_name.as_str())]
        })
        .reconcile_all_on(feeds.everything.subscribe())
}
