//! Two agents and a control plane: blocks come from a peer's DRAM and NVMe, byte-exact; a peer that dies or stalls costs
//! misses, never a hang.

use std::time::{Duration, Instant};

use rand::RngExt;
use reprise_client::{BlockStatus, Scope, Source};
use reprise_e2e::content::large;
use reprise_e2e::control_plane::Store;
use reprise_e2e::seed::{say, seeded};
use reprise_e2e::{Agent, AgentConfig, ControlPlane, Engine, Loading, Outcome, PATIENCE, World, wait_until};
use reprise_policy::ByteSize;

/// The bound: a dead node's replicas stop being answered.
const FORGOTTEN_WITHIN: Duration = Duration::from_secs(2);

/// Silence after which a peer is lost.
const STALL_TIMEOUT: Duration = Duration::from_secs(1);

/// What a busy machine adds to any bound.
const SLACK: Duration = Duration::from_secs(2);

/// A control plane and two agents that know each other.
struct Pair {
    first: Agent,
    second: Agent,
    plane: ControlPlane,
    world: World,
}

fn config(node: &str, plane: &ControlPlane) -> AgentConfig {
    AgentConfig {
        arena: ByteSize(96 << 20),
        region: ByteSize(32 << 20),
        pool: Some(ByteSize(160 << 20)),
        stall_timeout: STALL_TIMEOUT,
        control_plane: vec![plane.address().to_owned()],
        ..AgentConfig::named(node)
    }
}

fn pair() -> Pair {
    let world = World::new();
    let plane = world.control_plane(Store::Embedded);
    let first = world.agent(&config("first", &plane));
    let second = world.agent(&config("second", &plane));
    for node in ["first", "second"] {
        wait_until("both agents are known", PATIENCE, || plane.offers(node)?.then_some(()));
    }
    Pair { first, second, plane, world }
}

/// What a peer does when it is killed in the middle of a load.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Peer {
    /// It was stopped before it was asked: the load is sure to wait for it.
    Stopped,
    /// It sends.
    Streaming,
}

/// Waits until an engine finds all blocks where they should be.
fn wait_for_sources(engine: &Engine, numbers: &[u64], source: Source) {
    wait_until("the directory knows all blocks", PATIENCE, || {
        let sources = engine.matches(numbers, Scope::Cluster);
        (sources == vec![source; numbers.len()]).then_some(())
    });
}

fn numbers(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

/// Blocks that came are right already; those that did not must say why.
fn assert_missing_or_right(outcomes: &[Outcome]) {
    let fine = |outcome: &Outcome| {
        matches!(
            outcome,
            Outcome::Right(_)
                | Outcome::Missing(BlockStatus::Miss | BlockStatus::Failed | BlockStatus::Deadline)
        )
    };
    assert!(outcomes.iter().all(fine), "{outcomes:?}");
}

fn right(outcomes: &[Outcome]) -> usize {
    outcomes.iter().filter(|outcome| outcome.is_right()).count()
}

#[test]
fn blocks_of_a_peer_come_from_its_dram_and_after_a_trim_from_its_nvme() {
    let Pair { first, second, plane: _plane, world: _world } = pair();
    let (saver, reader) = (first.engine(large()), second.engine(large()));
    let in_dram = numbers(0..24);
    saver.save_durably(&in_dram);
    wait_for_sources(&reader, &in_dram, Source::PeerDram);
    assert_eq!(reader.load_all(&in_dram, &Loading::CLUSTER), vec![Source::PeerDram; 24]);
    assert_eq!(first.admin().counter("serve_blocks_dram"), 24);
    assert_eq!(second.admin().counter("peer_fills"), 24);
    // They are this node's now, too.
    assert_eq!(reader.load_all(&in_dram, &Loading::LOCAL), vec![Source::OwnDram; 24]);

    let on_nvme = numbers(100..124);
    saver.save_durably(&on_nvme);
    saver.trim();
    wait_for_sources(&reader, &on_nvme, Source::PeerNvme);
    assert_eq!(reader.load_all(&on_nvme, &Loading::CLUSTER), vec![Source::PeerNvme; 24]);
    assert_eq!(first.admin().counter("serve_blocks_nvme"), 24);

    // A prompt whose blocks lie everywhere: own NVMe, own DRAM, the peer, nobody.
    let own = numbers(200..204);
    reader.save_durably(&own);
    reader.trim();
    saver.save_durably(&numbers(300..304));
    wait_for_sources(&reader, &numbers(300..304), Source::PeerDram);
    let everywhere = [numbers(200..204), numbers(300..304), numbers(100..104), numbers(900..902)].concat();
    let outcomes = reader.load(&everywhere, &Loading::CLUSTER).expect("a load");
    assert_eq!(right(&outcomes[..12]), 12, "{outcomes:?}");
    assert_eq!(outcomes[12..], [Outcome::Missing(BlockStatus::Miss); 2]);
}

#[test]
fn concurrent_loads_of_a_peers_blocks_fetch_each_once() {
    let Pair { first, second, plane: _plane, world: _world } = pair();
    let blocks = numbers(0..32);
    first.engine(large()).save_durably(&blocks);
    wait_for_sources(&second.engine(large()), &blocks, Source::PeerDram);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| second.engine(large()).load_all(&blocks, &Loading::CLUSTER));
        }
    });
    let counters = second.admin().counters();
    assert_eq!(
        (counters.get("peer_fills"), counters.get("peer_fill_bytes")),
        (32, 32 * large().block_bytes())
    );
    assert_eq!(first.admin().counter("serve_bytes"), 32 * large().block_bytes());
}

#[test]
fn a_peer_killed_in_the_middle_of_a_load_costs_misses_within_the_deadline() {
    const ROUNDS: usize = 8;
    let Pair { mut first, second, plane, world } = pair();
    world.allow("peer connection lost");
    world.allow("cannot ask a peer for blocks");
    world.allow("node is silent");
    // A node that comes back under another address.
    world.allow("registration");
    world.allow("another address");
    let mut rng = seeded("peer killed");
    let mut came = Vec::new();
    for round in 0..ROUNDS as u64 {
        let blocks = numbers(round * 100..round * 100 + 40);
        let saver = first.engine(large());
        saver.save_durably(&blocks);
        if round % 2 == 0 {
            saver.trim();
        }
        let source = if round % 2 == 0 { Source::PeerNvme } else { Source::PeerDram };
        let reader = second.engine(large());
        wait_for_sources(&reader, &blocks, source);
        drop(saver);
        let peer = if round / 2 % 2 == 0 { Peer::Stopped } else { Peer::Streaming };
        if peer == Peer::Stopped {
            first.freeze();
        }
        let deadline = Duration::from_secs(5);
        let load = {
            let blocks = blocks.clone();
            std::thread::spawn(move || reader.timed_load(&blocks, &Loading::CLUSTER.within(deadline)))
        };
        // The fetch is under way, unless all has come already. From a stopped peer nothing comes.
        wait_until("blocks on their way", PATIENCE, || {
            (load.is_finished() || second.admin().counter("fills_in_flight") > 0).then_some(())
        });
        if peer == Peer::Streaming {
            // Not synchronisation: 40 MiB take some tens of milliseconds, and the kill comes in any of them.
            std::thread::sleep(Duration::from_micros(rng.random_range(0..20_000)));
        }
        first.kill();
        let (outcomes, took) = load.join().expect("blocks that come are right");
        assert_missing_or_right(&outcomes);
        if peer == Peer::Stopped {
            assert_eq!(right(&outcomes), 0, "a kill before the first byte");
        }
        came.push((right(&outcomes), took));
        assert!(took < deadline, "the death of a peer is noticed before the deadline, not after {took:?}");
        first.start();
        wait_until("the first agent is back", PATIENCE, || plane.offers("first")?.then_some(()));
        // What it had made durable is there again, for the peer too.
        let reader = second.engine(large());
        wait_until("all blocks again", PATIENCE, || {
            let outcomes = reader.load(&blocks, &Loading::CLUSTER).expect("a load");
            (right(&outcomes) == blocks.len()).then_some(())
        });
        second.admin().wait_quiet(PATIENCE);
    }
    say(&format!("blocks of 40 that came before the peer was killed: {came:?}"));
    let inside = came.iter().filter(|(right, _)| *right < 40).count();
    assert!(inside >= ROUNDS / 2, "only {inside} of {ROUNDS} kills fell into a load");
}

#[test]
fn a_peer_that_stalls_costs_misses_within_its_timeout_and_is_used_again_when_it_goes_on() {
    let Pair { first, second, plane, world } = pair();
    world.allow("peer connection lost");
    world.allow("cannot ask a peer for blocks");
    world.allow("node is silent");
    world.allow("registration lost");
    world.allow("control plane is gone");
    let blocks = numbers(0..30);
    first.engine(large()).save_durably(&blocks);
    let reader = second.engine(large());
    reader.save_durably(&[500, 501]);
    wait_for_sources(&reader, &blocks, Source::PeerDram);
    // A connection that has been used, and one that has not: both stall.
    for (used, cold) in [(false, 0..10), (true, 10..20)] {
        if used {
            reader.load_all(&blocks[..10], &Loading::CLUSTER);
        }
        first.freeze();
        let deadline = Duration::from_secs(4);
        let wanted = [vec![500], blocks[cold.clone()].to_vec(), vec![501]].concat();
        let (outcomes, took) = reader.timed_load(&wanted, &Loading::CLUSTER.within(deadline));
        assert!(outcomes[0].is_right() && outcomes[11].is_right(), "own blocks come: {outcomes:?}");
        assert_eq!(right(&outcomes[1..11]), 0, "nothing comes from a stopped process");
        assert_missing_or_right(&outcomes);
        assert!(
            took < STALL_TIMEOUT + SLACK,
            "a stalled peer is given up after its timeout, not after {took:?}"
        );
        first.thaw();
        wait_until("the first agent is back", PATIENCE, || plane.offers("first")?.then_some(()));
        wait_until("blocks of a peer that goes on", PATIENCE, || {
            let outcomes = reader.load(&blocks[cold.clone()], &Loading::CLUSTER).expect("a load");
            (right(&outcomes) == cold.len()).then_some(())
        });
    }
    // A load with less patience than the transport ends by its own deadline.
    first.freeze();
    let short = Duration::from_millis(150);
    let (outcomes, took) = reader.timed_load(&blocks[20..], &Loading::CLUSTER.within(short));
    assert_eq!(right(&outcomes), 0);
    assert!(took < short + Duration::from_millis(700), "a deadline of {short:?} passed after {took:?}");
    first.thaw();
}

#[test]
fn a_dead_node_is_not_offered_after_two_seconds_and_others_are() {
    let Pair { mut first, second, plane, world } = pair();
    world.allow("peer connection lost");
    world.require("node is silent");
    let blocks = numbers(0..8);
    first.engine(large()).save_durably(&blocks);
    let reader = second.engine(large());
    wait_for_sources(&reader, &blocks, Source::PeerDram);
    first.kill();
    let killed = Instant::now();
    wait_until("a dead node's blocks are not offered", PATIENCE, || {
        reader.matches(&blocks, Scope::Cluster).is_empty().then_some(())
    });
    let took = killed.elapsed();
    assert!(took <= FORGOTTEN_WITHIN, "a dead node was offered for {took:?}");
    assert_eq!(plane.offers("first"), Some(false));
    assert_eq!(plane.offers("second"), Some(true));
    let (outcomes, took) = reader.timed_load(&blocks, &Loading::CLUSTER);
    assert_eq!(outcomes, vec![Outcome::Missing(BlockStatus::Miss); 8]);
    assert!(took < SLACK, "a miss is found in {took:?}");
    first.start();
    wait_for_sources(&reader, &blocks, Source::PeerNvme);
    assert_eq!(reader.load_all(&blocks, &Loading::CLUSTER), vec![Source::PeerNvme; 8]);
}

#[test]
fn bytes_that_a_peer_has_damaged_in_its_memory_are_not_taken_over() {
    let Pair { first, second, plane: _plane, world } = pair();
    world.allow("peer connection");
    world.allow("verif");
    let scribbler = first.engine(large());
    let blocks = numbers(0..3);
    let mut reserved = scribbler.reserve(3).expect("slots");
    let spans: Vec<_> = reserved.iter().map(|reservation| reservation.span().clone()).collect();
    for (reservation, number) in reserved.iter_mut().zip(&blocks) {
        scribbler.fill(reservation, &reprise_e2e::content::key(*number)).expect("filled");
    }
    let items = reserved.into_iter().zip(reprise_e2e::content::keys(&blocks)).collect();
    let committed =
        scribbler.client().commit(items, reprise_client::CommitOptions::default()).expect("committed");
    scribbler.client().wait_durable(committed.ticket, PATIENCE).expect("a notice");
    let reader = second.engine(large());
    wait_for_sources(&reader, &blocks, Source::PeerDram);
    spans[1].slice(500_000, 1).and_then(|byte| byte.copy_in(&[0xa5])).expect("the mapping is writable");
    let outcomes = reader.load(&blocks, &Loading::CLUSTER.within(Duration::from_secs(5))).expect("a load");
    assert!(!outcomes[1].is_right(), "{outcomes:?}");
    assert_ne!(outcomes[1], Outcome::Detected, "found by the agent, before the engine could see it");
    assert!(second.admin().counter("fill_corrupt") >= 1);
    // From the peer's disk it is right.
    scribbler.trim();
    wait_for_sources(&reader, &blocks[1..2], Source::PeerNvme);
    wait_until("the undamaged copy", PATIENCE, || {
        let outcomes = reader.load(&blocks, &Loading::CLUSTER).expect("a load");
        (right(&outcomes) == 3).then_some(())
    });
}
