//! Faults of a cluster: each has an effect in the right place only, and heals.

use std::fs;
use std::time::{Duration, Instant};

use reprise_e2e::kubernetes::Cluster;
use reprise_e2e::seed::print_line;
use reprise_e2e::wait_until;

use crate::pods::{PORT, Server, ready_servers, servers};

/// Bound from silence until the node is not ready: 8 s, and the delays of a busy machine.
const SEEN_WITHIN: Duration = Duration::from_secs(60);

/// Bound from the end of a fault until everything works again.
const HEALS_WITHIN: Duration = Duration::from_secs(120);

/// Bound from the start of the API server until kubelets have reconnected. Their backoff is up to 51 s, and
/// then up to 60 s.
const FOUND_WITHIN: Duration = Duration::from_secs(300);

/// Time for which the API server is down.
const OUTAGE: Duration = Duration::from_secs(30);

/// Interval between polls that each start a process.
const PAUSE: Duration = Duration::from_millis(200);

pub(crate) fn a_paused_kubelet(cluster: &mut Cluster) {
    let [_, second] = servers(cluster);
    cluster.node(1).pause_kubelet();
    wait_for(cluster, 1, Readiness::NotReady);
    assert!(cluster.is_ready(&cluster.nodes()[0]), "the other node is ready");
    assert_eq!(second.get("/"), Ok(second.introduction()), "pods of the node still respond");
    cluster.node(1).resume_kubelet();
    wait_for(cluster, 1, Readiness::Ready);
    servers(cluster);
}

pub(crate) fn a_cut_link(cluster: &mut Cluster) {
    let [first, second] = servers(cluster);
    cluster.cut_link(1);
    let to_second = format!("{}:{PORT}", second.address);
    first.via(&to_second).expect_err("the second node cannot be reached");
    second.get("/").expect_err("the second node cannot be reached from the hub");
    wait_for(cluster, 1, Readiness::NotReady);
    let inside = cluster.nodes()[1].command("/usr/bin/env").arg("true").status();
    assert!(inside.expect("nsenter can be run").success(), "the isolated node still runs");
    cluster.heal_link(1);
    wait_for(cluster, 1, Readiness::Ready);
    wait_until("the pods to reach each other again", HEALS_WITHIN, || first.via(&to_second).ok());
    servers(cluster);
}

/// A killed node, and its server pod.
pub(crate) struct KilledNode {
    index: usize,
    pod: Server,
}

/// A file on a node's disk, which must survive a restart.
const FILE: &str = "var/lib/kept";

/// Kills a node, and waits until it is not ready.
pub(crate) fn kill_node(cluster: &mut Cluster, index: usize) -> KilledNode {
    let name = cluster.nodes()[index].name().to_owned();
    let pod = servers(cluster).into_iter().find(|server| server.node == name).expect("a server on each node");
    fs::write(cluster.nodes()[index].root().join(FILE), "as it was").expect("the node's disk is writable");
    (0..cluster.nodes().len()).for_each(|node| wait_for(cluster, node, Readiness::Ready));
    cluster.node(index).kill();
    pod.get("/").expect_err("the node's pods end with it");
    wait_for(cluster, index, Readiness::NotReady);
    let mut others = cluster.nodes().iter().filter(|node| node.name() != name);
    assert!(others.all(|node| cluster.is_ready(node)), "the other node is ready");
    KilledNode { index, pod }
}

/// Starts the killed node again, as after a power failure.
pub(crate) fn restart_node(cluster: &mut Cluster, killed: &KilledNode) {
    let KilledNode { index, pod } = killed;
    cluster.node(*index).restart();
    wait_for(cluster, *index, Readiness::Ready);
    let kept = fs::read_to_string(cluster.nodes()[*index].root().join(FILE));
    assert_eq!(kept.expect("the disk survives"), "as it was");
    // The pod is started again with the same name.
    wait_until("the node's pod to serve again", HEALS_WITHIN, || {
        let again = ready_servers(cluster).into_iter().find(|server| server.node == pod.node)?;
        again.get("/").ok()
    });
}

/// Stops the API server for a time, in which pods must still reach each other.
pub(crate) fn without_api_server(cluster: &mut Cluster, [first, second]: &[Server; 2]) {
    cluster.stop_api_server();
    assert!(cluster.try_kubectl(&["get", "nodes"]).is_err(), "the API server is down");
    let end = Instant::now() + OUTAGE;
    while Instant::now() < end {
        assert_eq!(first.via(&format!("{}:{PORT}", second.address)), Ok(second.introduction()));
        let response = second.via("server:80").expect("services and DNS still work");
        assert!([first.introduction(), second.introduction()].contains(&response), "{response}");
        std::thread::sleep(PAUSE);
    }
    let started = Instant::now();
    cluster.start_api_server();
    let serves = started.elapsed();
    for index in 0..cluster.nodes().len() {
        wait_within(cluster, index, Readiness::Ready, FOUND_WITHIN);
    }
    print_line(&format!(
        "the API server served {serves:.1?} after it was started, and nodes were ready after {:.1?}",
        started.elapsed()
    ));
}

/// Checks that all controllers work: a deleted pod is replaced, and its service routes to the new one.
pub(crate) fn a_pod_is_replaced(cluster: &Cluster, [first, second]: &[Server; 2]) {
    let started = Instant::now();
    cluster.kubectl(&["delete", "pod", &second.name, "--wait=false"]);
    wait_until("the service to route to a new pod", HEALS_WITHIN, || {
        let new = ready_servers(cluster).into_iter().find(|server| server.node == second.node)?;
        let response = first.via("server:80");
        (new.name != second.name && response == Ok(new.introduction())).then_some(())
    });
    print_line(&format!("a pod was replaced within {:.1?}", started.elapsed()));
}

/// Readiness of a node, according to the API server.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Readiness {
    Ready,
    NotReady,
}

pub(crate) fn wait_for(cluster: &Cluster, index: usize, readiness: Readiness) {
    wait_within(
        cluster,
        index,
        readiness,
        if readiness == Readiness::Ready { HEALS_WITHIN } else { SEEN_WITHIN },
    );
}

fn wait_within(cluster: &Cluster, index: usize, readiness: Readiness, within: Duration) {
    let node = &cluster.nodes()[index];
    wait_until(&format!("{} to be {readiness:?}", node.name()), within, || {
        (cluster.is_ready(node) == (readiness == Readiness::Ready)).then_some(())
    });
}
