//! The controller of nodes, and the parts of a `CacheNode` on which other objects depend.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::runtime::Controller;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::status::{Condition, ConditionType};
use reprise_crds::{CacheNode, GPUQueueAllocation};

use crate::framework::change::{Change, DigestParts, WatchedKind, rest};
use crate::framework::own_writes::Digest;
use crate::reconcile::names::AGENT_READY;
use crate::reconcile::stores::Stores;

impl WatchedKind for Node {
    /// The operator writes one condition.
    fn parts(&self) -> Option<DigestParts> {
        let mut status = self.status.clone().unwrap_or_default();
        let conditions = status.conditions.get_or_insert_default();
        let own = conditions.extract_if(.., |condition| condition.type_ == AGENT_READY).next();
        let rest = (rest(&self.metadata), &self.spec, status);
        Some(DigestParts { own: Digest::of(&own), rest: Digest::of(&rest) })
    }
}

impl WatchedKind for CacheNode {
    /// Profiles depend on the GPUs of nodes and on the revisions that nodes report. Tenants depend on the
    /// applied tenants.
    fn dependencies(&self) -> Option<Digest> {
        let status = self.status.as_ref()?;
        let applied = status.applied.as_ref().map(|applied| (&applied.profiles, &applied.tenants_digest));
        Some(Digest::of(&(&status.gpus, applied)))
    }

    /// The operator writes one condition, the agent writes the rest of the status.
    fn parts(&self) -> Option<DigestParts> {
        let mut status = self.status.clone().unwrap_or_default();
        let is_own = |condition: &mut Condition| condition.kind == ConditionType::ModeApplied.as_str();
        let own = status.conditions.extract_if(.., is_own).next();
        let rest = (rest(&self.metadata), status);
        Some(DigestParts { own: Digest::of(&own), rest: Digest::of(&rest) })
    }
}

/// A node is also reconciled after changes of its `CacheNode`, except the operator's own condition, and of its
/// allocations, because the `CacheNode` contains the grants.
pub fn controller(stores: &Arc<Stores>) -> Controller<Node> {
    let feeds = &stores.feeds;
    let cache_nodes = feeds.cache_nodes.changes(Change::is_foreign);
    let allocations = feeds.allocations.changes(Change::is_any);
    Controller::for_shared_stream(feeds.nodes.changes(Change::is_foreign), stores.nodes.clone())
        .watches_shared_stream(cache_nodes, |node: Arc<CacheNode>| [ObjectRef::new(&node.name_any())])
        .watches_shared_stream(allocations, |allocation: Arc<GPUQueueAllocation>| {
            [ObjectRef::new(allocation.spec.node_name.as_str())]
        })
        .reconcile_all_on(feeds.everything.subscribe())
}
