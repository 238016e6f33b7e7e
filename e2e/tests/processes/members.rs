//! Several members of the control plane over a real etcd: what the loss of any of them costs, and of etcd itself.
//!
//! Whatever happens, every byte that is loaded is compared, and in the end every block can be found again.

use std::time::{Duration, Instant};

use reprise_client::{BlockStatus, Scope, Source};
use reprise_e2e::cluster::{SLOTS, load_from_peer, load_from_peer_in_time, numbers, wait_for_sources};
use reprise_e2e::{
    Cluster, ControlPlane, Engine, Host, Loading, Outcome, PATIENCE, Relay, World, wait_until,
};

/// A lease of a member lives so long without it: what etcd grants at the least.
const LEASE: Duration = Duration::from_secs(2);

/// Bound on what is a matter of three seconds: another of these tests may have both processors just then.
const FAILOVER_WITHIN: Duration = Duration::from_secs(10);

/// A cluster whose member `c` reaches etcd through a relay.
fn with_a_member_behind_a_relay() -> (Cluster, Relay) {
    let world = World::new();
    let etcd = world.etcd();
    let endpoint = etcd.endpoint();
    let relay = Relay::to(&etcd.address());
    let behind = format!("http://{}", relay.address());
    let members =
        vec![world.member("a", &endpoint), world.member("b", &endpoint), world.member("c", &behind)];
    let cluster = Cluster::of(world, etcd, members).with_agents([&Host::LOOPBACK, &Host::LOOPBACK]);
    (cluster, relay)
}

#[test]
fn a_member_that_is_killed_costs_its_part_for_seconds_and_comes_back_for_it() {
    let (mut cluster, saver, reader) = Cluster::holding(200);

    cluster.members[0].kill();
    let killed = Instant::now();
    // What is known to the others is found all the while, and nothing hangs.
    let (outcomes, took) = reader.timed_load(&numbers(0..20), &Loading::CLUSTER);
    assert!(took < LEASE, "a load beside a dead member took {took:?}");
    assert!(outcomes.iter().any(|outcome| outcome.is_right()), "two thirds are known to others");
    wait_for_sources(&reader, &numbers(0..200), FAILOVER_WITHIN);
    println!("all is found again {:?} after the kill", killed.elapsed());
    load_from_peer(&reader, &numbers(0..100));
    cluster.wait_until_whole(2);

    saver.save_durably(&numbers(200..300));
    cluster.members[0].restart();
    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..300), PATIENCE);
    load_from_peer(&reader, &numbers(100..300));
}

#[test]
fn a_member_that_pauses_is_fenced_and_serves_again_with_what_happened_meanwhile() {
    let (cluster, saver, reader) = Cluster::holding(100);
    cluster.members[1].pause();
    wait_for_sources(&reader, &numbers(0..100), FAILOVER_WITHIN);
    saver.save_durably(&numbers(100..200));
    wait_for_sources(&reader, &numbers(0..200), FAILOVER_WITHIN);
    cluster.members[1].resume();
    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..200), PATIENCE);
    load_from_peer(&reader, &numbers(0..200));
}

#[test]
fn whichever_member_is_killed_or_pauses_the_directory_is_what_the_nodes_have_again() {
    let (mut cluster, saver, reader) = Cluster::holding(30);
    let mut saved = 30;
    let mut save = |of: &str| {
        saver.save_durably(&numbers(saved..saved + 10));
        saved += 10;
        wait_for_sources(&reader, &numbers(0..saved), FAILOVER_WITHIN);
        println!("{saved} blocks are known {of}");
        saved
    };
    for member in 0..cluster.members.len() {
        cluster.members[member].kill();
        save("while a member is dead");
        cluster.members[member].restart();
        let saved = save("when it is back");
        cluster.assert_complete(3, [&saver, &reader], &numbers(0..saved));

        cluster.members[member].pause();
        save("while a member pauses");
        cluster.members[member].resume();
        let saved = save("when it goes on");
        cluster.assert_complete(3, [&saver, &reader], &numbers(0..saved));
        load_from_peer(&reader, &numbers(saved - 10..saved));
    }
}

#[test]
fn all_members_killed_at_once_know_everything_again_from_the_agents() {
    let (mut cluster, saver, reader) = Cluster::holding(100);
    cluster.members.iter_mut().for_each(ControlPlane::kill);
    // Local hits go on; what is elsewhere is a miss, and soon.
    assert_eq!(saver.load_all(&numbers(0..100), &Loading::CLUSTER), vec![Source::OwnDram; 100]);
    let (outcomes, took) = reader.timed_load(&numbers(0..10), &Loading::CLUSTER);
    assert_eq!(outcomes, vec![Outcome::Missing(BlockStatus::Miss); 10]);
    assert!(took < LEASE, "a miss without a control plane took {took:?}");
    cluster.members.iter_mut().for_each(ControlPlane::restart);
    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..100), PATIENCE);
    load_from_peer(&reader, &numbers(0..100));
}

#[test]
fn an_agent_that_is_silent_is_not_offered_and_serves_again_when_it_goes_on() {
    let (cluster, _saver, reader) = Cluster::holding(50);
    cluster.agents[0].freeze();
    cluster.wait_until_not_offered("first");
    assert!(reader.matches(&numbers(0..50), Scope::Cluster).is_empty());
    cluster.agents[0].thaw();
    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..50), PATIENCE);
    load_from_peer(&reader, &numbers(0..50));
}

#[test]
fn without_etcd_hits_go_on_and_when_it_is_back_so_does_everything_else() {
    let (mut cluster, saver, reader) = Cluster::holding(100);
    cluster.etcd.kill();
    load_from_peer(&reader, &numbers(0..50));
    // The members' leases run out: from then on none of them is sure of anything.
    wait_until("nobody is sure of its slots", PATIENCE, || {
        reader.matches(&numbers(50..100), Scope::Cluster).is_empty().then_some(())
    });
    assert_eq!(reader.load_all(&numbers(0..50), &Loading::CLUSTER), vec![Source::OwnDram; 50]);
    saver.save_durably(&numbers(100..150));
    cluster.etcd.restart();
    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..150), PATIENCE);
    load_from_peer(&reader, &numbers(0..150));
}

#[test]
fn an_etcd_that_pauses_is_waited_for() {
    let (cluster, saver, reader) = Cluster::holding(50);
    cluster.etcd.pause();
    wait_until("nobody is sure of its slots", PATIENCE, || {
        reader.matches(&numbers(0..50), Scope::Cluster).is_empty().then_some(())
    });
    saver.save_durably(&numbers(50..100));
    assert_eq!(saver.load_all(&numbers(0..100), &Loading::CLUSTER), vec![Source::OwnDram; 100]);
    cluster.etcd.resume();
    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..100), PATIENCE);
    load_from_peer(&reader, &numbers(0..100));
}

/// Every member ends by itself, and its next process begins anew; hits of the first node's blocks go on meanwhile.
fn assert_members_begin_anew(cluster: &mut Cluster, (saver, reader): (&Engine, &Engine), saved: u64) {
    for member in &mut cluster.members {
        member.wait_for_end();
        assert_eq!(saver.load_all(&numbers(0..20), &Loading::CLUSTER), vec![Source::OwnDram; 20]);
        member.restart();
    }
    cluster.assert_complete(3, [saver, reader], &numbers(0..saved));
    wait_for_sources(reader, &numbers(0..saved), PATIENCE);
    load_from_peer_in_time(reader, &numbers(0..saved));
    // Numbers are given out anew, each to one node.
    let nodes = cluster.members[0].admin().json("/nodes");
    let mut given: Vec<u64> = nodes
        .as_array()
        .expect("a list")
        .iter()
        .map(|node| node["node"].as_u64().expect("a number"))
        .collect();
    given.sort_unstable();
    assert_eq!(given, [1, 2]);
}

#[test]
fn members_whose_etcd_was_emptied_end_and_their_next_processes_begin_anew() {
    let (mut cluster, saver, reader) = Cluster::holding(100);
    cluster.world.require("the store was emptied or replaced");
    cluster.etcd.kill();
    cluster.etcd.wipe();
    cluster.etcd.restart();
    assert_members_begin_anew(&mut cluster, (&saver, &reader), 100);
}

#[test]
fn members_whose_etcd_loses_its_files_while_it_runs_begin_anew_when_it_starts_from_nothing() {
    let (mut cluster, saver, reader) = Cluster::holding(100);
    cluster.world.require("the store was emptied or replaced");
    cluster.etcd.lose_files();
    // It goes on with the files that it has open, or has ended.
    saver.save_durably(&numbers(100..120));
    assert_eq!(saver.load_all(&numbers(0..120), &Loading::CLUSTER), vec![Source::OwnDram; 120]);
    cluster.etcd.kill();
    assert_eq!(saver.load_all(&numbers(0..120), &Loading::CLUSTER), vec![Source::OwnDram; 120]);
    cluster.etcd.restart();
    assert_members_begin_anew(&mut cluster, (&saver, &reader), 120);
}

#[test]
fn a_member_that_cannot_reach_etcd_answers_for_nothing_and_the_others_take_over() {
    let (cluster, relay) = with_a_member_behind_a_relay();
    let (cluster, saver, reader) = cluster.hold(100);
    relay.cut();
    // Its own lease runs out on its own clock; the others have its slots as soon as etcd has seen that too.
    wait_until("the others have all slots", FAILOVER_WITHIN, || {
        let owned: Vec<u64> = cluster.parts().iter().map(|part| part.owned).collect();
        (owned.len() >= 2 && owned[..2].iter().sum::<u64>() == SLOTS).then_some(())
    });
    wait_for_sources(&reader, &numbers(0..100), FAILOVER_WITHIN);
    load_from_peer(&reader, &numbers(0..100));
    saver.save_durably(&numbers(100..150));
    relay.mend();
    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..150), PATIENCE);
}

#[test]
fn an_etcd_that_answers_late_delays_nothing_but_changes_of_members() {
    let world = World::new();
    let etcd = world.etcd();
    let relay = Relay::to(&etcd.address());
    let behind = format!("http://{}", relay.address());
    let members = ["a", "b", "c"].map(|name| world.member(name, &behind)).into();
    let cluster = Cluster::of(world, etcd, members).with_agents([&Host::LOOPBACK, &Host::LOOPBACK]);
    let (mut cluster, saver, reader) = cluster.hold(50);
    // Every answer takes 600 ms: longer than the pause between two renewals of a lease, shorter than its life.
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
    cluster.wait_until_whole(3);
    relay.delay(Duration::ZERO);
    cluster.wait_until_whole(3);
}

#[test]
fn a_member_that_missed_changes_which_etcd_has_compacted_reads_everything_again() {
    let (cluster, relay) = with_a_member_behind_a_relay();
    let (mut cluster, saver, reader) = cluster.hold(100);
    relay.cut();
    // Members come and go behind its back, and etcd forgets that they have.
    cluster.members[1].kill();
    wait_until("one member has all slots", PATIENCE, || {
        (cluster.parts().iter().map(|part| part.owned).max() == Some(SLOTS)).then_some(())
    });
    cluster.members[1].restart();
    saver.save_durably(&numbers(100..150));
    cluster.etcd.compact();
    relay.mend();
    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..150), PATIENCE);
    load_from_peer(&reader, &numbers(0..150));
    // What it follows now is what happens now.
    cluster.members[0].kill();
    cluster.wait_until_whole(2);
    cluster.members[0].restart();
    cluster.wait_until_whole(3);
}
