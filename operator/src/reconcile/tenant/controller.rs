//! The controller of tenants.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Namespace;
use kube::runtime::Controller;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::{CacheNode, CacheTenant};

use super::pods;
use crate::framework::change::{OwnPart, WatchedKind};
use crate::reconcile::stores::Stores;

impl WatchedKind for CacheTenant {
    const OWN_PART: Option<OwnPart> = Some(OwnPart::Status);
}

impl WatchedKind for Namespace {}

/// Tenants that select pods are also reconciled after changes of namespaces and of the specs, profiles and tenants of
/// `CacheNode`s.
pub fn controller(stores: &Arc<Stores>) -> Controller<CacheTenant> {
    let feeds = &stores.feeds;
    let (of_nodes, of_namespaces) = (Arc::clone(stores), Arc::clone(stores));
    let nodes = feeds.cache_nodes.spec_changes();
    let namespaces = feeds.namespaces.spec_changes();
    Controller::for_shared_stream(feeds.tenants.foreign_changes(), stores.tenants.clone())
        .watches_shared_stream(nodes, move |node: Arc<CacheNode>| {
            if node.spec.cluster_ref.is_some() { selecting_pods(&of_nodes) } else { Vec::new() }
        })
        .watches_shared_stream(namespaces, move |_: Arc<Namespace>| selecting_pods(&of_namespaces))
        .reconcile_all_on(feeds.everything.subscribe())
}

fn selecting_pods(stores: &Stores) -> Vec<ObjectRef<CacheTenant>> {
    let tenants = stores.tenants.state_filter(pods::selects_pods);
    tenants.iter().map(|tenant| ObjectRef::from_obj(&**tenant)).collect()
}
