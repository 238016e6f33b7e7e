//! What may happen to a cluster: each fault is seen where it must be, nowhere else, and heals.

use std::fs;
use std::time::{Duration, Instant};

use reprise_e2e::kubernetes::Cluster;
use reprise_e2e::seed::say;
use reprise_e2e::wait_until;

use crate::pods::{PORT, Server, ready_servers, servers};

/// From silence to a node that is not ready: 8 s, and what a busy machine adds.
const SEEN_WITHIN: Duration = Duration::from_secs(60);

/// From the end of a fault to what was before.
const HEALS_WITHIN: Duration = Duration::from_secs(120);

/// From a start of the API server to kubelets that have found it: they look for it with pauses of their own, of up to 51 s and then up to 60 s.
const FOUND_WITHIN: Duration = Duration::from_secs(300);

/// For how long the API server is away.
const AWAY: Duration = Duration::from_secs(30);

/// Between two looks that start a process.
const PAUSE: Duration = Duration::from_millis(200);

pub(crate) fn a_paused_kubelet(cluster: &mut Cluster) {
    let [_, second] = servers(cluster);
    cluster.node(1).pause_kubelet();
    wait_for(cluster, 1, Says::NotReady);
    assert!(cluster.is_ready(&cluster.nodes()[0]), "the other node is");
    assert_eq!(second.ask("/"), Ok(second.introduction()), "its pods go on");
    cluster.node(1).resume_kubelet();
    wait_for(cluster, 1, Says::Ready);
    servers(cluster);
}

pub(crate) fn a_cut_link(cluster: &mut Cluster) {
    let [first, second] = servers(cluster);
    cluster.cut_link(1);
    let to_second = format!("{}:{PORT}", second.address);
    first.via(&to_second).expect_err("nothing arrives there");
    second.ask("/").expect_err("not from here either");
    wait_for(cluster, 1, Says::NotReady);
    let inside = cluster.nodes()[1].command("/usr/bin/env").arg("true").status();
    assert!(inside.expect("nsenter is there").success(), "it runs all the same");
    cluster.heal_link(1);
    wait_for(cluster, 1, Says::Ready);
    wait_until("the pods to reach each other again", HEALS_WITHIN, || first.via(&to_second).ok());
    servers(cluster);
}

/// What a killed node had.
pub(crate) struct Killed {
    index: usize,
    pod: Server,
}

/// A file that a node keeps over a restart.
const FILE: &str = "var/lib/kept";

/// Kills a node, which is seen.
pub(crate) fn kill_node(cluster: &mut Cluster, index: usize) -> Killed {
    let name = cluster.nodes()[index].name().to_owned();
    let pod = servers(cluster).into_iter().find(|server| server.node == name).expect("one on each node");
    fs::write(cluster.nodes()[index].root().join(FILE), "as it was").expect("its disk takes files");
    (0..cluster.nodes().len()).for_each(|node| wait_for(cluster, node, Says::Ready));
    cluster.node(index).kill();
    pod.ask("/").expect_err("its pods went with it");
    wait_for(cluster, index, Says::NotReady);
    let mut others = cluster.nodes().iter().filter(|node| node.name() != name);
    assert!(others.all(|node| cluster.is_ready(node)), "the other node is");
    Killed { index, pod }
}

/// Starts it again, as after a power cut.
pub(crate) fn restart_node(cluster: &mut Cluster, killed: &Killed) {
    let Killed { index, pod } = killed;
    cluster.node(*index).restart();
    wait_for(cluster, *index, Says::Ready);
    let kept = fs::read_to_string(cluster.nodes()[*index].root().join(FILE));
    assert_eq!(kept.expect("its disk is what it was"), "as it was");
    // What it ran before is started again, under the same name.
    wait_until("its pod to serve again", HEALS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let again = ready_servers(cluster).into_iter().find(|server| server.node == pod.node)?;
        again.ask("/").ok()
    });
}

/// Takes the API server away for a time: pods reach each other as before.
pub(crate) fn without_api_server(cluster: &mut Cluster, [first, second]: &[Server; 2]) {
    cluster.stop_api_server();
    assert!(cluster.try_kubectl(&["get", "nodes"]).is_err(), "nobody answers");
    let back = Instant::now() + AWAY;
    while Instant::now() < back {
        assert_eq!(first.via(&format!("{}:{PORT}", second.address)), Ok(second.introduction()));
        let said = second.via("server:80").expect("services and their names are as they were");
        assert!([first.introduction(), second.introduction()].contains(&said), "{said}");
        std::thread::sleep(PAUSE);
    }
    let back = Instant::now();
    cluster.start_api_server();
    let serves = back.elapsed();
    for index in 0..cluster.nodes().len() {
        wait_within(cluster, index, Says::Ready, FOUND_WITHIN);
    }
    say(&format!(
        "the API server served {serves:.1?} after it was started, and nodes were ready after {:.1?}",
        back.elapsed()
    ));
}

/// Everybody has found it again: a pod that is gone is replaced, and the service leads to the new one.
pub(crate) fn a_pod_is_replaced(cluster: &Cluster, [first, second]: &[Server; 2]) {
    let started = Instant::now();
    cluster.kubectl(&["delete", "pod", &second.name, "--wait=false"]);
    wait_until("the service to lead to a new pod", HEALS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let new = ready_servers(cluster).into_iter().find(|server| server.node == second.node)?;
        let said = first.via("server:80");
        (new.name != second.name && said == Ok(new.introduction())).then_some(())
    });
    say(&format!("a pod was replaced within {:.1?}", started.elapsed()));
}

/// What the cluster says of a node.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Says {
    Ready,
    NotReady,
}

pub(crate) fn wait_for(cluster: &Cluster, index: usize, says: Says) {
    wait_within(cluster, index, says, if says == Says::Ready { HEALS_WITHIN } else { SEEN_WITHIN });
}

fn wait_within(cluster: &Cluster, index: usize, says: Says, within: Duration) {
    let node = &cluster.nodes()[index];
    wait_until(&format!("{} to be {says:?}", node.name()), within, || {
        std::thread::sleep(PAUSE);
        (cluster.is_ready(node) == (says == Says::Ready)).then_some(())
    });
}
