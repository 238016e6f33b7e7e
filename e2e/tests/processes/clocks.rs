//! Wrong clocks: wall clocks that jump under load, and monotonic clocks that differ between processes and
//! between the starts of one process.
//!
//! Neither may have any effect: no fencing, no lost lease, no miss, and in the end the directory matches the
//! nodes.
//!
//! The wall clock of etcd cannot be changed without changing the machine's, since etcd calls the kernel
//! directly. Its leases use its monotonic clock, which is changed here.

use std::collections::BTreeMap;

use reprise_client::Scope;
use reprise_e2e::cli::reprise;
use reprise_e2e::clock::{MonotonicClock, WallClock};
use reprise_e2e::cluster::{load_from_peer, numbers, wait_for_sources};
use reprise_e2e::host::{Network, run_in_own_namespace};
use reprise_e2e::{Cluster, Engine, Host, LoadParams, PATIENCE, TestEnv, wait_until};

/// Names of the members, and then of the nodes.
const MEMBERS: [&str; 3] = ["a", "b", "c"];
const NODES: [&str; 2] = ["first", "second"];

/// An hour in seconds, the unit of a wrong time zone.
const HOUR: i64 = 3600;

/// A day in seconds.
const DAY: u64 = 86_400;

/// Blocks that are saved, and loaded by the other node, after each change of a clock.
const ROUND: u64 = 10;

/// Attempts for each change: on a busy machine, a lease may be lost once by chance.
const ATTEMPTS: usize = 3;

/// Name of the test that runs in its own namespaces.
const MONOTONIC: &str = "processes::clocks::monotonic_clocks_may_differ_between_processes_and_starts";

/// Returns the registrations: the members' incarnations, the epoch of their map, and the nodes' epochs at the
/// first member.
fn registrations(cluster: &Cluster) -> BTreeMap<String, u64> {
    let status = reprise(&cluster.members[0], &["status"]).remove(0);
    let of = |list: &str, number: &str| -> Vec<(String, u64)> {
        let named = status[list].as_array().expect("a list").iter();
        let pair = |one: &serde_json::Value| {
            (one["name"].as_str().expect("a name").to_owned(), one[number].as_u64().expect("a number"))
        };
        named.map(pair).collect()
    };
    let epoch = status["members_epoch"].as_u64().expect("a number");
    let all = [of("members", "incarnation"), of("nodes", "epoch"), vec![("the map".to_owned(), epoch)]];
    let all: BTreeMap<String, u64> = all.into_iter().flatten().collect();
    assert_eq!(all.len(), MEMBERS.len() + NODES.len() + 1, "{status}");
    all
}

/// Saves further blocks on the first node, and loads them on the other one. Returns the new number of blocks.
fn serve(saver: &Engine, reader: &Engine, saved: u64) -> u64 {
    let fresh = numbers(saved..saved + ROUND);
    saver.save_durably(&fresh);
    wait_for_sources(reader, &fresh, PATIENCE);
    load_from_peer(reader, &fresh);
    assert_eq!(saver.load_all(&fresh, &LoadParams::LOCAL).len() as u64, ROUND, "blocks of its own node");
    saved + ROUND
}

#[test]
fn changes_of_the_wall_clock_under_load_have_no_effect() {
    let env = TestEnv::new();
    let clocks: BTreeMap<&str, WallClock> = MEMBERS
        .into_iter()
        .chain(NODES)
        .map(|process| (process, WallClock::new(env.folder(), process)))
        .collect();
    let etcd = env.etcd();
    let endpoint = etcd.endpoint();
    let members =
        MEMBERS.map(|name| env.member_with(clocks[name].start(), name, &endpoint)).into_iter().collect();
    let cluster = Cluster::of(env, etcd, members)
        .with_launch_options(NODES.map(|name| (&Host::LOOPBACK, clocks[name].start())));
    let (cluster, saver, reader) = cluster.save_blocks(ROUND);
    let mut before = registrations(&cluster);
    let mut saved = ROUND;

    // One process after the other, so that one clock differs from all others; then all jump back at once.
    for seconds in [HOUR, -HOUR, 100 * 365 * 24 * HOUR] {
        for (process, clock) in &clocks {
            let changed = (0..ATTEMPTS).all(|_| {
                clock.set(0);
                before = registrations(&cluster);
                let reads = clock.altered_reads();
                clock.set(seconds);
                saved = serve(&saver, &reader, saved);
                // Responses with a date make the process read its clock.
                wait_until("the process to read the changed clock", PATIENCE, || {
                    registrations(&cluster);
                    (clock.altered_reads() > reads).then_some(())
                });
                registrations(&cluster) != before
            });
            assert!(
                !changed,
                "a wall clock of {process} that is off by {seconds} s changed registrations: {before:?}"
            );
        }
    }
    clocks.values().for_each(|clock| clock.set(0));
    saved = serve(&saver, &reader, saved);
    cluster.assert_complete(3, [&saver, &reader], &numbers(0..saved));
}

#[test]
fn monotonic_clocks_may_differ_between_processes_and_starts() {
    if !run_in_own_namespace(MONOTONIC) {
        return;
    }
    // The loopback interface of the test's own namespace.
    let _network = Network::new();
    let env = TestEnv::new();
    let ahead = |days: u64| MonotonicClock::ahead(env.folder(), days * DAY);
    // Each start of a process gets a different clock. Some of the second clocks are far behind the first
    // ones.
    let [etcds, members, nodes] = [vec![30, 2], vec![0, 400, 7, 90, 1, 5000], vec![3, 200, 1000, 0]]
        .map(|days| days.into_iter().map(ahead).collect::<Vec<MonotonicClock>>());
    let etcd = env.etcd_with(&etcds[0].start());
    let endpoint = etcd.endpoint();
    let started = MEMBERS.iter().zip(&members);
    let started = started.map(|(name, clock)| env.member_with(clock.start(), name, &endpoint)).collect();
    let cluster = Cluster::of(env, etcd, started)
        .with_launch_options([0, 1].map(|node: usize| (&Host::LOOPBACK, nodes[node].start())));
    // A node may restart before its silence is noticed.
    cluster.env.allow("live node registered from another address");
    let (mut cluster, mut saver, mut reader) = cluster.save_blocks(ROUND);
    let mut saved = serve(&saver, &reader, ROUND);

    for (member, clock) in members[3..].iter().enumerate() {
        cluster.members[member].kill();
        cluster.members[member].set_launch_options(clock.start());
        cluster.members[member].restart();
        cluster.wait_until_complete(3);
        saved = serve(&saver, &reader, saved);
    }
    cluster.etcd.kill();
    cluster.etcd.set_launch_options(etcds[1].start());
    cluster.etcd.restart();
    cluster.wait_until_complete(3);
    saved = serve(&saver, &reader, saved);
    for (node, clock) in nodes[2..].iter().enumerate() {
        cluster.agents[node].kill();
        cluster.agents[node].set_launch_options(clock.start());
        cluster.agents[node].start();
        (saver, reader) = cluster.engines();
        cluster.wait_until_complete(3);
        let durable = saver.matches(&numbers(0..saved), Scope::Local).len() as u64;
        assert_eq!(durable, saved, "durable blocks survive any clock");
        saved = serve(&saver, &reader, saved);
    }
    cluster.assert_complete(3, [&saver, &reader], &numbers(0..saved));
}
