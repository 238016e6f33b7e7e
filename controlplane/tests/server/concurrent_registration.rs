//! Concurrent first registrations of many nodes, through several members over a real etcd: all get unique
//! numbers.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reprise_controlplane::identity::Identity;
use reprise_controlplane::registry::Registry;
use reprise_controlplane_core::NodeDetails;
use reprise_controlplane_store::{EtcdSettings, EtcdStore, Store};
use reprise_testkit::etcd::Etcd;
use tokio::task::JoinSet;

/// About one or two racks that are switched on together.
const NODES: u16 = 300;
const MEMBERS: usize = 3;

/// Time limit. A first registration takes four calls to etcd. 300 of them in sequence take some seconds, and
/// members sometimes conflict. A busy machine needs several times as long.
const ALL_WITHIN: Duration = Duration::from_secs(120);

/// The registry of one member.
async fn registry(server: &Etcd) -> Registry {
    let settings = EtcdSettings {
        endpoints: vec![server.endpoint()],
        prefix: "arrivals/".to_owned(),
        user: None,
        tls: None,
    };
    let store = EtcdStore::connect(&settings).await.expect("connected");
    let store: Arc<dyn Store> = Arc::new(store);
    let identity = Identity::load_or_create(store.as_ref()).await.expect("created");
    Registry::new(store, identity)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_registrations_of_new_nodes_get_unique_numbers() {
    let directory = tempfile::tempdir().expect("a directory");
    let server = Etcd::start_in(directory.path());
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
        let record = registered.expect("no panic").expect("no registration fails");
        assert!(numbers.insert(record.node.0), "{record:?} has a number in use");
    }
    let took = started.elapsed();
    println!("{NODES} new nodes through {MEMBERS} members in {took:?}");
    assert!(took < ALL_WITHIN, "{took:?}");
    assert_eq!(numbers, (1..=NODES).collect());
}
