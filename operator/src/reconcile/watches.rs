//! Watches: fill the stores, pass changes to the controllers, and signal changes that affect all objects of a kind.
//!
//! | changed | reconciled |
//! |---|---|
//! | spec of a cluster, pool, tenant or profile; acceptance of a cluster | everything: the assignment may have changed |
//! | name or labels of a node | the node, all clusters, pools, profiles and allocations |
//! | name or labels of a namespace | all clusters and tenants, if tenants select pods |
//! | spec of a `CacheNode` of a frozen cluster, which keeps the node | everything |
//! | other changes | the objects that the controllers name, for example [`crate::reconcile::cluster::controller`] |
//!
//! After a watch was lost and its objects were listed again, everything is reconciled, because deletions may have been
//! missed.

use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;

use kube::Client;
use kube::api::Api;
use kube::runtime::reflector::store::Writer;
use kube::runtime::watcher;
use serde::de::DeserializeOwned;
use tokio::task::JoinSet;

use crate::framework::change::{Change, WatchedKind};
use crate::framework::child::ChildKind;
use crate::framework::child_stores::KindAccess;
use crate::framework::feed::{self, Feed};
use crate::framework::labels::{MANAGED_BY, OPERATOR};
use crate::reconcile::membership::is_frozen;
use crate::reconcile::stores::{Stores, Writers};
use crate::reconcile::tenant::pods;

/// Starts all watches. They end when the set is dropped.
pub fn start(client: &Client, stores: &Arc<Stores>, writers: Writers) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    let feeds = &stores.feeds;
    let watches = Watches { client, stores };
    let all = || (&(), watcher::Config::default(), None);
    tasks.spawn(watches.of(all(), writers.clusters, &feeds.clusters, reconcile_on_spec_change));
    tasks.spawn(watches.of(all(), writers.pools, &feeds.pools, reconcile_on_spec_change));
    tasks.spawn(watches.of(all(), writers.tenants, &feeds.tenants, reconcile_on_spec_change));
    tasks.spawn(watches.of(all(), writers.profiles, &feeds.profiles, reconcile_on_spec_change));
    tasks.spawn(watches.of(all(), writers.allocations, &feeds.allocations, |_, _, _| {}));
    tasks.spawn(watches.of(all(), writers.nodes, &feeds.nodes, |stores, _, change| {
        if change == Change::Spec {
            stores.invalidate_assignment();
            stores.feeds.node_labels.send();
        }
    }));
    tasks.spawn(watches.of(all(), writers.namespaces, &feeds.namespaces, |stores, _, change| {
        if change == Change::Spec && stores.tenants.find(pods::selects_pods).is_some() {
            stores.feeds.all_clusters.send();
        }
    }));
    tasks.spawn(watches.of(all(), writers.cache_nodes, &feeds.cache_nodes, |stores, cache_node, change| {
        if change == Change::Spec
            && stores.cluster_of_node(cache_node).is_some_and(|cluster| is_frozen(&cluster))
        {
            stores.reconcile_everything();
        }
    }));
    for (kind, writer) in writers.children {
        let ours = watcher::Config::default().labels(&format!("{MANAGED_BY}={OPERATOR}"));
        let optional = Some(kind).filter(|kind| kind.is_optional());
        let watched = (&kind.resource(), ours, optional);
        tasks.spawn(watches.of(watched, writer, &feeds.children, |_, _, _| {}));
    }
    tasks
}

/// Reconciles everything after a change that may affect the assignment.
fn reconcile_on_spec_change<K>(stores: &Stores, _: &K, change: Change) {
    if change == Change::Spec {
        stores.reconcile_everything();
    }
}

/// Client and stores of all watches.
struct Watches<'a> {
    client: &'a Client,
    stores: &'a Arc<Stores>,
}

impl Watches<'_> {
    /// Returns the watch of the objects of a kind. `on_change` runs before the controllers receive a change.
    fn of<K, F>(
        &self,
        (kind, config, optional): (&K::DynamicType, watcher::Config, Option<ChildKind>),
        writer: Writer<K>,
        feed: &Arc<Feed<K>>,
        on_change: F,
    ) -> impl Future<Output = ()> + Send + 'static + use<K, F>
    where
        K: WatchedKind + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
        K::DynamicType: Clone + Eq + Hash + Send + Sync,
        F: Fn(&Stores, &K, Change) + Send + 'static,
    {
        let watched = (Api::all_with(self.client.clone(), kind), config, optional.is_some());
        let (stores, listed) = (Arc::clone(self.stores), Arc::clone(self.stores));
        let on_list = move |access| {
            if let Some(kind) = optional {
                listed.children.set_access(kind, access);
            }
            if access == KindAccess::Usable {
                listed.reconcile_everything();
            }
        };
        let on_change = move |object: &K, change| on_change(&stores, object, change);
        let feed = (Arc::clone(feed), Arc::clone(&self.stores.own_writes));
        feed::watch(watched, writer, feed, on_change, on_list)
    }
}
