//! The controller of tenants.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Namespace;
use kube::runtime::Controller;
use reprise_crds::CacheTenant;

use crate::framework::change::{Change, WatchedKind, status_is_own};
use crate::reconcile::stores::Stores;

impl WatchedKind for CacheTenant {
    status_is_own!();
}

impl WatchedKind for Namespace {}

/// Tenants are also reconciled after changes of namespaces that may belong to a tenant. Reports of nodes are read every
/// [`super::POLL_INTERVAL`].
pub fn controller(stores: &Arc<Stores>) -> Controller<CacheTenant> {
    let feeds = &stores.feeds;
    Controller::for_shared_stream(feeds.tenants.changes(Change::is_foreign), stores.tenants.clone())
        .reconcile_all_on(feeds.pod_assignment.subscribe())
        .reconcile_all_on(feeds.everything.subscribe())
}
