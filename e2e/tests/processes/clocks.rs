//! Clocks that are wrong: the time of day set forwards and back under load, and monotonic clocks that differ between processes and
//! between the lives of one.
//!
//! Nothing may follow from either: no fence, no lease lost, no miss, and in the end the directory is what the nodes have, key by key.
//!
//! The time of day of etcd cannot be set without the machine's, as it asks the kernel itself; its leases go by its monotonic clock, which is
//! another one here.

use std::collections::BTreeMap;

use reprise_client::Scope;
use reprise_e2e::cli::reprise;
use reprise_e2e::clock::{MonotonicClock, WallClock};
use reprise_e2e::cluster::{load_from_peer, numbers, wait_for_sources};
use reprise_e2e::host::{Network, in_own_namespace};
use reprise_e2e::{Cluster, Engine, Host, Loading, PATIENCE, World, wait_until};

/// The members, and then the nodes.
const MEMBERS: [&str; 3] = ["a", "b", "c"];
const NODES: [&str; 2] = ["first", "second"];

/// An hour, in seconds; a wrong time zone is some of them.
const HOUR: i64 = 3600;

/// A day, in seconds.
const DAY: u64 = 86_400;

/// Blocks that are saved, and loaded by the other node, after every change of a clock.
const ROUND: u64 = 10;

/// A lease that is lost since the machine was busy for two seconds is not lost again and again.
const ATTEMPTS: usize = 3;

/// The test that needs namespaces.
const MONOTONIC: &str = "clocks::monotonic_clocks_may_differ_and_begin_anew_with_every_start";

/// Who is registered with what: the members' incarnations and the epoch of their map, and the nodes' epochs with the member that is asked.
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

/// Saves some more blocks on the first node, and loads them from the other one; how many there are now.
fn serve(saver: &Engine, reader: &Engine, saved: u64) -> u64 {
    let fresh = numbers(saved..saved + ROUND);
    saver.save_durably(&fresh);
    wait_for_sources(reader, &fresh, PATIENCE);
    load_from_peer(reader, &fresh);
    assert_eq!(saver.load_all(&fresh, &Loading::LOCAL).len() as u64, ROUND, "its own blocks");
    saved + ROUND
}

#[test]
fn a_time_of_day_that_is_set_under_load_changes_nothing() {
    let world = World::new();
    let clocks: BTreeMap<&str, WallClock> = MEMBERS
        .into_iter()
        .chain(NODES)
        .map(|process| (process, WallClock::new(world.folder(), process)))
        .collect();
    let etcd = world.etcd();
    let endpoint = etcd.endpoint();
    let members =
        MEMBERS.map(|name| world.member_with(clocks[name].start(), name, &endpoint)).into_iter().collect();
    let cluster = Cluster::of(world, etcd, members)
        .with_started(NODES.map(|name| (&Host::LOOPBACK, clocks[name].start())));
    let (cluster, saver, reader) = cluster.hold(ROUND);
    let mut before = registrations(&cluster);
    let mut saved = ROUND;

    // One after the other, so that each time one differs from all others; then all back, at once.
    for seconds in [HOUR, -HOUR, 100 * 365 * 24 * HOUR] {
        for (process, clock) in &clocks {
            let changed = (0..ATTEMPTS).all(|_| {
                clock.set(0);
                before = registrations(&cluster);
                let told = clock.told();
                clock.set(seconds);
                saved = serve(&saver, &reader, saved);
                // Its pages have a date.
                wait_until("a process to be told the time that was set", PATIENCE, || {
                    registrations(&cluster);
                    (clock.told() > told).then_some(())
                });
                registrations(&cluster) != before
            });
            assert!(
                !changed,
                "{process} has another time of day, by {seconds} s, and it matters: {before:?}"
            );
        }
    }
    clocks.values().for_each(|clock| clock.set(0));
    saved = serve(&saver, &reader, saved);
    cluster.assert_complete(3, [&saver, &reader], &numbers(0..saved));
}

#[test]
fn monotonic_clocks_may_differ_and_begin_anew_with_every_start() {
    if !in_own_namespace(MONOTONIC) {
        return;
    }
    // Loopback, in the test's own namespace.
    let _network = Network::new();
    let world = World::new();
    let ahead = |days: u64| MonotonicClock::ahead(world.folder(), days * DAY);
    // Each life of a process has a clock that the life before knew nothing of; the second ones of some are far behind the first ones.
    let [etcds, members, nodes] = [vec![30, 2], vec![0, 400, 7, 90, 1, 5000], vec![3, 200, 1000, 0]]
        .map(|days| days.into_iter().map(ahead).collect::<Vec<MonotonicClock>>());
    let etcd = world.etcd_with(&etcds[0].start());
    let endpoint = etcd.endpoint();
    let begun = MEMBERS.iter().zip(&members);
    let begun = begun.map(|(name, clock)| world.member_with(clock.start(), name, &endpoint)).collect();
    let cluster = Cluster::of(world, etcd, begun)
        .with_started([0, 1].map(|node: usize| (&Host::LOOPBACK, nodes[node].start())));
    // One that is back sooner than its silence is noticed.
    cluster.world.allow("registered from another address while alive");
    let (mut cluster, mut saver, mut reader) = cluster.hold(ROUND);
    let mut saved = serve(&saver, &reader, ROUND);

    for (member, clock) in members[3..].iter().enumerate() {
        cluster.members[member].kill();
        cluster.members[member].set_start(clock.start());
        cluster.members[member].restart();
        cluster.wait_until_whole(3);
        saved = serve(&saver, &reader, saved);
    }
    cluster.etcd.kill();
    cluster.etcd.set_start(etcds[1].start());
    cluster.etcd.restart();
    cluster.wait_until_whole(3);
    saved = serve(&saver, &reader, saved);
    for (node, clock) in nodes[2..].iter().enumerate() {
        cluster.agents[node].kill();
        cluster.agents[node].set_start(clock.start());
        cluster.agents[node].start();
        (saver, reader) = cluster.engines();
        cluster.wait_until_whole(3);
        let durable = saver.matches(&numbers(0..saved), Scope::Local).len() as u64;
        assert_eq!(durable, saved, "what was durable is there under any clock");
        saved = serve(&saver, &reader, saved);
    }
    cluster.assert_complete(3, [&saver, &reader], &numbers(0..saved));
}
