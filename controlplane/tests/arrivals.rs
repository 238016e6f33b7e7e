//! Many nodes that register for the first time at once, through several members over a real etcd: all get a number of their own.

#[path = "../store/tests/etcd_server/mod.rs"]
mod etcd_server;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reprise_controlplane::identity::Identity;
use reprise_controlplane::registry::Registry;
use reprise_controlplane_core::NodeDetails;
use reprise_controlplane_store::{EtcdStore, Store};
use tokio::task::JoinSet;

/// A rack or two that is switched on.
const NODES: u16 = 300;
const MEMBERS: usize = 3;

/// A first registration is four calls of etcd, 300 of them one after the other some seconds on a busy machine; members lose to each
/// other now and then.
const ALL_WITHIN: Duration = Duration::from_secs(30);

/// What a member registers nodes with.
async fn registry(server: &etcd_server::Server) -> Registry {
    let store = EtcdStore::connect(&server.settings("arrivals/")).await.expect("connected");
    let store: Arc<dyn Store> = Arc::new(store);
    let identity = Identity::of(store.as_ref()).await.expect("it has one");
    Registry::new(store, identity)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_of_new_nodes_that_come_at_once_all_get_numbers_of_their_own() {
    let directory = tempfile::tempdir().expect("a directory");
    let server = etcd_server::Server::start(directory.path());
    let mut members = Vec::new();
    for _ in 0..MEMBERS {
        members.push(registry(&server).await);
    }
    let started = Instant::now();
    let mut arriving = JoinSet::new();
    for (node, member) in (0..NODES).zip(members.iter().cycle()) {
        let member = member.clone();
        arriving.spawn(async move { member.register(&format!("n{node}"), NodeDetails::default()).await });
    }
    let mut numbers = BTreeSet::new();
    while let Some(registered) = arriving.join_next().await {
        let record = registered.expect("no panic").expect("nobody is sent away");
        assert!(numbers.insert(record.node.0), "{record:?} has a number that another has");
    }
    let took = started.elapsed();
    println!("{NODES} new nodes through {MEMBERS} members in {took:?}");
    assert!(took < ALL_WITHIN, "{took:?}");
    assert_eq!(numbers, (1..=NODES).collect());
}
