//! The controller of pools, and the changes of pools on which other objects depend.

use std::collections::BTreeSet;
use std::sync::Arc;

use kube::runtime::Controller;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::{CacheNode, SSDPool};
use serde_json::{Value, json};

use crate::framework::change::{OwnPart, WatchedKind};
use crate::reconcile::pool::guard::has_guard;
use crate::reconcile::stores::Stores;

impl WatchedKind for SSDPool {
    const OWN_PART: Option<OwnPart> = Some(OwnPart::Status);

    /// A pool is wiped once engines no longer block its deletion. Before a deletion nothing depends on that.
    fn dependencies(&self) -> Value {
        json!(self.metadata.deletion_timestamp.as_ref().map(|_| has_guard(self)))
    }
}

/// A pool is also reconciled after changes of the `CacheNode`s with its claims or devices.
pub fn controller(stores: &Arc<Stores>) -> Controller<SSDPool> {
    let feeds = &stores.feeds;
    Controller::for_shared_stream(feeds.pools.foreign_changes(), stores.pools.clone())
        .watches_shared_stream(feeds.cache_nodes.changes(), |node| pools_of(&node))
        .reconcile_all_on(feeds.everything.subscribe())
        .reconcile_all_on(feeds.node_labels.subscribe())
}

fn pools_of(node: &CacheNode) -> Vec<ObjectRef<SSDPool>> {
    let claimed = node.spec.claims.iter().map(|claim| &claim.pool);
    let devices = node.status.iter().flat_map(|status| &status.devices).map(|device| &device.pool);
    let pools: BTreeSet<&str> = claimed.chain(devices).map(|pool| pool.as_str()).collect();
    pools.into_iter().map(ObjectRef::new).collect()
}
