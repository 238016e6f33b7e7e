//! Several members of the control plane over a real etcd: the effects of losing members, and etcd itself.
//!
//! Every loaded byte is compared, and at the end of each test every block is found again.

use std::time::{Duration, Instant};

use reprise_client::{BlockStatus, Scope, Source};
use reprise_e2e::cluster::{SLOTS, load_from_peer, numbers, wait_for_sources};
use reprise_e2e::{
    Cluster, ControlPlane, Engine, Host, LoadParams, Outcome, PATIENCE, Relay, TestEnv, fast_call, wait_until,
};

/// Lifetime of a member's lease without renewals: the minimum that etcd grants.
const LEASE: Duration = Duration::from_secs(2);

/// Starts a cluster whose member `c` reaches etcd through a relay.
fn with_a_member_behind_a_relay() -> (Cluster, Relay) {
    let env = TestEnv::new();
    let etcd = env.etcd();
    let endpoint = etcd.endpoint();
    let relay = Relay::to(&etcd.address());
    let behind = format!("http://{}", relay.address());
    let members = vec![env.member("a", &endpoint), env.member("b", &endpoint), env.member("c", &behind)];
    let cluster = Cluster::of(env, etcd, members).with_agents([&Host::LOOPBACK, &Host::LOOPBACK]);
    (cluster, relay)
}

#[test]
fn a_killed_member_costs_its_slots_for_seconds_and_gets_them_back() {
    let (mut cluster, saver, reader) = Cluster::with_blocks(200);

    cluster.members[0].kill();
    let killed = Instant::now();
    // Keys of the other members are found all the time, and no load hangs.
    fast_call("a load with a dead member", LEASE, || {
        let outcomes = reader.load(&numbers(0..20), &LoadParams::CLUSTER).expect("a load");
        assert!(outcomes.iter().any(|outcome| outcome.is_verified()), "the other members have two thirds");
    });
    wait_for_sources(&reader, &numbers(0..200), PATIENCE);
    println!("all blocks are found again {:?} after the kill", killed.elapsed());
    load_from_peer(&reader, &numbers(0..100));
    cluster.wait_until_complete(2);

    saver.save_durably(&numbers(200..300));
    cluster.members[0].restart();
    cluster.wait_until_complete(3);
    wait_for_sources(&reader, &numbers(0..300), PATIENCE);
    load_from_peer(&reader, &numbers(100..300));
}

#[test]
fn a_paused_member_is_fenced_and_catches_up_when_it_resumes() {
    let (cluster, saver, reader) = Cluster::with_blocks(100);
    cluster.members[1].pause();
    wait_for_sources(&reader, &numbers(0..100), PATIENCE);
    saver.save_durably(&numbers(100..200));
    wait_for_sources(&reader, &numbers(0..200), PATIENCE);
    cluster.members[1].resume();
    cluster.wait_until_complete(3);
    wait_for_sources(&reader, &numbers(0..200), PATIENCE);
    load_from_peer(&reader, &numbers(0..200));
}

#[test]
fn the_directory_matches_the_nodes_again_after_any_member_is_killed_or_paused() {
    let (mut cluster, saver, reader) = Cluster::with_blocks(30);
    let mut saved = 30;
    let mut save = |of: &str| {
        saver.save_durably(&numbers(saved..saved + 10));
        saved += 10;
        wait_for_sources(&reader, &numbers(0..saved), PATIENCE);
        println!("{saved} blocks are found {of}");
        saved
    };
    for member in 0..cluster.members.len() {
        cluster.members[member].kill();
        save("while a member is down");
        cluster.members[member].restart();
        let saved = save("after its restart");
        cluster.assert_complete(3, [&saver, &reader], &numbers(0..saved));

        cluster.members[member].pause();
        save("while a member is paused");
        cluster.members[member].resume();
        let saved = save("after it resumes");
        cluster.assert_complete(3, [&saver, &reader], &numbers(0..saved));
        load_from_peer(&reader, &numbers(saved - 10..saved));
    }
}

#[test]
fn all_members_killed_at_once_are_rebuilt_from_the_agents() {
    let (mut cluster, saver, reader) = Cluster::with_blocks(100);
    cluster.members.iter_mut().for_each(ControlPlane::kill);
    // Local hits continue; blocks of other nodes are misses, without delay.
    assert_eq!(saver.load_all(&numbers(0..100), &LoadParams::CLUSTER), vec![Source::OwnDram; 100]);
    let (outcomes, took) = reader.timed_load(&numbers(0..10), &LoadParams::CLUSTER);
    assert_eq!(outcomes, vec![Outcome::Missing(BlockStatus::Miss); 10]);
    assert!(took < LEASE, "a miss without a control plane took {took:?}");
    cluster.members.iter_mut().for_each(ControlPlane::restart);
    cluster.wait_until_complete(3);
    wait_for_sources(&reader, &numbers(0..100), PATIENCE);
    load_from_peer(&reader, &numbers(0..100));
}

#[test]
fn a_silent_agent_is_not_offered_until_it_resumes() {
    let (cluster, _saver, reader) = Cluster::with_blocks(50);
    cluster.agents[0].freeze();
    cluster.wait_until_not_offered("first");
    assert!(reader.matches(&numbers(0..50), Scope::Cluster).is_empty());
    cluster.agents[0].thaw();
    cluster.wait_until_complete(3);
    wait_for_sources(&reader, &numbers(0..50), PATIENCE);
    load_from_peer(&reader, &numbers(0..50));
}

#[test]
fn hits_continue_without_etcd_and_everything_else_resumes_with_it() {
    let (mut cluster, saver, reader) = Cluster::with_blocks(100);
    cluster.etcd.kill();
    load_from_peer(&reader, &numbers(0..50));
    // The members' leases expire: from then on, no member may answer for its slots.
    wait_until("no member answers for its slots", PATIENCE, || {
        reader.matches(&numbers(50..100), Scope::Cluster).is_empty().then_some(())
    });
    assert_eq!(reader.load_all(&numbers(0..50), &LoadParams::CLUSTER), vec![Source::OwnDram; 50]);
    saver.save_durably(&numbers(100..150));
    cluster.etcd.restart();
    cluster.wait_until_complete(3);
    wait_for_sources(&reader, &numbers(0..150), PATIENCE);
    load_from_peer(&reader, &numbers(0..150));
}

#[test]
fn members_wait_for_a_paused_etcd() {
    let (cluster, saver, reader) = Cluster::with_blocks(50);
    cluster.etcd.pause();
    wait_until("no member answers for its slots", PATIENCE, || {
        reader.matches(&numbers(0..50), Scope::Cluster).is_empty().then_some(())
    });
    saver.save_durably(&numbers(50..100));
    assert_eq!(saver.load_all(&numbers(0..100), &LoadParams::CLUSTER), vec![Source::OwnDram; 100]);
    cluster.etcd.resume();
    cluster.wait_until_complete(3);
    wait_for_sources(&reader, &numbers(0..100), PATIENCE);
    load_from_peer(&reader, &numbers(0..100));
}

/// Checks that every member exits, and that restarted members rebuild the directory. The first node's hits
/// continue.
fn assert_members_restart_from_scratch(
    cluster: &mut Cluster,
    (saver, reader): (&Engine, &Engine),
    saved: u64,
) {
    for member in &mut cluster.members {
        member.wait_for_end();
        assert_eq!(saver.load_all(&numbers(0..20), &LoadParams::CLUSTER), vec![Source::OwnDram; 20]);
        member.restart();
    }
    cluster.assert_complete(3, [saver, reader], &numbers(0..saved));
    wait_for_sources(reader, &numbers(0..saved), PATIENCE);
    load_from_peer(reader, &numbers(0..saved));
    // Node numbers are assigned again, each to one node.
    let nodes = cluster.members[0].admin().json("/nodes");
    let mut assigned: Vec<u64> = nodes
        .as_array()
        .expect("a list")
        .iter()
        .map(|node| node["node"].as_u64().expect("a number"))
        .collect();
    assigned.sort_unstable();
    assert_eq!(assigned, [1, 2]);
}

#[test]
fn members_exit_when_etcd_was_emptied_and_restart_from_scratch() {
    let (mut cluster, saver, reader) = Cluster::with_blocks(100);
    cluster.env.require("the store was emptied, replaced or restored");
    cluster.etcd.kill();
    cluster.etcd.wipe();
    cluster.etcd.restart();
    assert_members_restart_from_scratch(&mut cluster, (&saver, &reader), 100);
}

#[test]
fn members_restart_from_scratch_when_etcd_loses_its_files_and_restarts() {
    let (mut cluster, saver, reader) = Cluster::with_blocks(100);
    cluster.env.require("the store was emptied, replaced or restored");
    cluster.etcd.lose_files();
    // etcd continues with its open files, or has exited.
    saver.save_durably(&numbers(100..120));
    assert_eq!(saver.load_all(&numbers(0..120), &LoadParams::CLUSTER), vec![Source::OwnDram; 120]);
    cluster.etcd.kill();
    assert_eq!(saver.load_all(&numbers(0..120), &LoadParams::CLUSTER), vec![Source::OwnDram; 120]);
    cluster.etcd.restart();
    assert_members_restart_from_scratch(&mut cluster, (&saver, &reader), 120);
}

#[test]
fn the_others_take_over_from_a_member_that_cannot_reach_etcd() {
    let (cluster, relay) = with_a_member_behind_a_relay();
    let (cluster, saver, reader) = cluster.save_blocks(100);
    relay.cut();
    // The member's own lease expires by its own clock. The others get its slots when it has expired in etcd
    // too.
    wait_until("the others have all slots", PATIENCE, || {
        let owned: Vec<u64> = cluster.parts().iter().map(|part| part.owned).collect();
        (owned.len() >= 2 && owned[..2].iter().sum::<u64>() == SLOTS).then_some(())
    });
    wait_for_sources(&reader, &numbers(0..100), PATIENCE);
    load_from_peer(&reader, &numbers(0..100));
    saver.save_durably(&numbers(100..150));
    relay.heal();
    cluster.wait_until_complete(3);
    wait_for_sources(&reader, &numbers(0..150), PATIENCE);
}

#[test]
fn a_slow_etcd_delays_only_changes_of_members() {
    let env = TestEnv::new();
    let etcd = env.etcd();
    let relay = Relay::to(&etcd.address());
    let behind = format!("http://{}", relay.address());
    let members = ["a", "b", "c"].map(|name| env.member(name, &behind)).into();
    let cluster = Cluster::of(env, etcd, members).with_agents([&Host::LOOPBACK, &Host::LOOPBACK]);
    let (mut cluster, saver, reader) = cluster.save_blocks(50);
    // Each response takes 600 ms: longer than the interval of lease renewals, and shorter than a lease.
    relay.delay(Duration::from_millis(300));
    let slow_since = Instant::now();
    let mut from = 50;
    while slow_since.elapsed() < 2 * LEASE {
        if from < 200 {
            saver.save_durably(&numbers(from..from + 10));
            from += 10;
        }
        wait_for_sources(&reader, &numbers(0..from), PATIENCE);
        reader.trim();
        load_from_peer(&reader, &numbers(from - 10..from));
    }
    cluster.members[0].kill();
    wait_for_sources(&reader, &numbers(0..from), PATIENCE);
    cluster.members[0].restart();
    cluster.wait_until_complete(3);
    relay.delay(Duration::ZERO);
    cluster.wait_until_complete(3);
}

#[test]
fn a_member_that_missed_compacted_changes_reads_everything_again() {
    let (cluster, relay) = with_a_member_behind_a_relay();
    let (mut cluster, saver, reader) = cluster.save_blocks(100);
    relay.cut();
    // Members leave and return while this one is cut off, and etcd compacts these changes.
    cluster.members[1].kill();
    wait_until("one member has all slots", PATIENCE, || {
        (cluster.parts().iter().map(|part| part.owned).max() == Some(SLOTS)).then_some(())
    });
    cluster.members[1].restart();
    saver.save_durably(&numbers(100..150));
    cluster.etcd.compact();
    relay.heal();
    cluster.wait_until_complete(3);
    wait_for_sources(&reader, &numbers(0..150), PATIENCE);
    load_from_peer(&reader, &numbers(0..150));
    // The member now receives new changes.
    cluster.members[0].kill();
    cluster.wait_until_complete(2);
    cluster.members[0].restart();
    cluster.wait_until_complete(3);
}
