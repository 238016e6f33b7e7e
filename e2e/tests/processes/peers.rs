//! Two agents and a control plane: blocks are loaded byte-exact from a peer's DRAM and NVMe. A peer that dies
//! or stalls costs misses, but never a hang.

use std::time::{Duration, Instant};

use rand::RngExt;
use reprise_client::{BlockStatus, Scope, Source};
use reprise_e2e::content::large;
use reprise_e2e::control_plane::Store;
use reprise_e2e::seed::{print_line, seeded};
use reprise_e2e::{
    Agent, AgentConfig, ControlPlane, Engine, LoadParams, Outcome, PATIENCE, TestEnv, fast_call, wait_until,
};
use reprise_policy::ByteSize;

/// Bound until a dead node's replicas are no longer returned.
const FORGOTTEN_WITHIN: Duration = Duration::from_secs(2);

/// Maximum number of attempts to see that.
const DEATHS_MAX: usize = 5;
/// Number of loads, one of which must end by its deadline.
const LOADS_MAX: usize = 10;

/// Silence after which a peer counts as lost.
const STALL_TIMEOUT: Duration = Duration::from_secs(1);

/// Time that a busy machine adds to any bound.
const SLACK: Duration = Duration::from_secs(2);

/// A control plane and two registered agents.
struct Pair {
    first: Agent,
    second: Agent,
    plane: ControlPlane,
    env: TestEnv,
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
    let env = TestEnv::new();
    let plane = env.control_plane(Store::Embedded);
    let first = env.agent(&config("first", &plane));
    let second = env.agent(&config("second", &plane));
    for node in ["first", "second"] {
        wait_until("both agents are known", PATIENCE, || plane.offers(node)?.then_some(()));
    }
    Pair { first, second, plane, env }
}

/// State of a peer that is killed during a load.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Peer {
    /// Stopped before the load, so that the load waits for it.
    Stopped,
    /// Running, so that it sends blocks.
    Streaming,
}

/// Waits until an engine finds all blocks at this source.
fn wait_for_sources(engine: &Engine, numbers: &[u64], source: Source) {
    wait_until("the directory has all blocks", PATIENCE, || {
        let sources = engine.matches(numbers, Scope::Cluster);
        (sources == vec![source; numbers.len()]).then_some(())
    });
}

fn numbers(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

/// Checks that each block is right or missing with an expected status.
fn assert_missing_or_right(outcomes: &[Outcome]) {
    let is_expected = |outcome: &Outcome| {
        matches!(
            outcome,
            Outcome::Verified(_)
                | Outcome::Missing(BlockStatus::Miss | BlockStatus::Failed | BlockStatus::Deadline)
        )
    };
    assert!(outcomes.iter().all(is_expected), "{outcomes:?}");
}

fn verified(outcomes: &[Outcome]) -> usize {
    outcomes.iter().filter(|outcome| outcome.is_verified()).count()
}

#[test]
fn blocks_of_a_peer_are_loaded_from_its_dram_or_nvme() {
    let Pair { first, second, plane: _plane, env: _world } = pair();
    let (saver, reader) = (first.engine(large()), second.engine(large()));
    let in_dram = numbers(0..24);
    saver.save_durably(&in_dram);
    wait_for_sources(&reader, &in_dram, Source::PeerDram);
    assert_eq!(reader.load_all(&in_dram, &LoadParams::CLUSTER), vec![Source::PeerDram; 24]);
    assert_eq!(first.admin().counter("serve_blocks_dram"), 24);
    assert_eq!(second.admin().counter("peer_fills"), 24);
    // The loaded blocks are now also on this node.
    assert_eq!(reader.load_all(&in_dram, &LoadParams::LOCAL), vec![Source::OwnDram; 24]);

    let on_nvme = numbers(100..124);
    saver.save_durably(&on_nvme);
    saver.trim();
    wait_for_sources(&reader, &on_nvme, Source::PeerNvme);
    assert_eq!(reader.load_all(&on_nvme, &LoadParams::CLUSTER), vec![Source::PeerNvme; 24]);
    assert_eq!(first.admin().counter("serve_blocks_nvme"), 24);

    // A prompt with blocks from all sources: own NVMe, the peer's DRAM and NVMe, and two missing ones.
    let own = numbers(200..204);
    reader.save_durably(&own);
    reader.trim();
    saver.save_durably(&numbers(300..304));
    wait_for_sources(&reader, &numbers(300..304), Source::PeerDram);
    let everywhere = [numbers(200..204), numbers(300..304), numbers(100..104), numbers(900..902)].concat();
    let outcomes = reader.load(&everywhere, &LoadParams::CLUSTER).expect("a load");
    assert_eq!(verified(&outcomes[..12]), 12, "{outcomes:?}");
    assert_eq!(outcomes[12..], [Outcome::Missing(BlockStatus::Miss); 2]);
}

#[test]
fn concurrent_loads_fetch_each_block_of_a_peer_once() {
    let Pair { first, second, plane: _plane, env: _world } = pair();
    let blocks = numbers(0..32);
    first.engine(large()).save_durably(&blocks);
    wait_for_sources(&second.engine(large()), &blocks, Source::PeerDram);
    std::thread::scope(|scope| {
        for _ in 0..6 {
            scope.spawn(|| second.engine(large()).load_all(&blocks, &LoadParams::CLUSTER));
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
    let Pair { mut first, second, plane, env } = pair();
    env.allow("peer connection lost");
    env.allow("cannot fetch blocks from a peer");
    env.allow("node is silent");
    // A restarted node has another address.
    env.allow("registration");
    env.allow("another address");
    let mut rng = seeded("peer killed");
    let mut arrived = Vec::new();
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
            std::thread::spawn(move || reader.timed_load(&blocks, &LoadParams::CLUSTER.within(deadline)))
        };
        // The fetch is in flight, unless all blocks have arrived already. A stopped peer sends nothing.
        wait_until("blocks on their way", PATIENCE, || {
            (load.is_finished() || second.admin().counter("fills_in_flight") > 0).then_some(())
        });
        if peer == Peer::Streaming {
            // Not a synchronisation: 40 MiB take some tens of milliseconds, and the kill comes at a random
            // moment of them.
            std::thread::sleep(Duration::from_micros(rng.random_range(0..20_000)));
        }
        first.kill();
        let (outcomes, took) = load.join().expect("loaded blocks are right");
        assert_missing_or_right(&outcomes);
        if peer == Peer::Stopped {
            assert_eq!(verified(&outcomes), 0, "a stopped peer sends no block");
        }
        arrived.push((verified(&outcomes), took));
        assert!(took < deadline, "the load took {took:?} after the death of the peer");
        first.start();
        wait_until("the first agent is back", PATIENCE, || plane.offers("first")?.then_some(()));
        // The peer's durable blocks can be loaded again.
        let reader = second.engine(large());
        wait_until("all blocks again", PATIENCE, || {
            let outcomes = reader.load(&blocks, &LoadParams::CLUSTER).expect("a load");
            (verified(&outcomes) == blocks.len()).then_some(())
        });
        second.admin().wait_quiet(PATIENCE);
    }
    print_line(&format!("blocks of 40 that arrived before the peer was killed: {arrived:?}"));
    let inside = arrived.iter().filter(|(verified, _)| *verified < 40).count();
    assert!(inside >= ROUNDS / 2, "only {inside} of {ROUNDS} kills hit during a load");
}

#[test]
fn a_stalled_peer_costs_misses_within_its_timeout_and_is_used_again_afterwards() {
    let Pair { first, second, plane, env } = pair();
    env.allow("peer connection lost");
    env.allow("cannot fetch blocks from a peer");
    env.allow("node is silent");
    env.allow("control plane is unreachable");
    let blocks = numbers(0..30);
    first.engine(large()).save_durably(&blocks);
    let reader = second.engine(large());
    reader.save_durably(&[500, 501]);
    wait_for_sources(&reader, &blocks, Source::PeerDram);
    // A new connection stalls, and then one that was used before.
    for (used, cold) in [(false, 0..10), (true, 10..20)] {
        if used {
            reader.load_all(&blocks[..10], &LoadParams::CLUSTER);
        }
        first.freeze();
        let deadline = Duration::from_secs(4);
        let requested = [vec![500], blocks[cold.clone()].to_vec(), vec![501]].concat();
        let (outcomes, took) = reader.timed_load(&requested, &LoadParams::CLUSTER.within(deadline));
        assert!(
            outcomes[0].is_verified() && outcomes[11].is_verified(),
            "blocks of this node are loaded: {outcomes:?}"
        );
        assert_eq!(verified(&outcomes[1..11]), 0, "a stopped peer sends no block");
        assert_missing_or_right(&outcomes);
        assert!(took < STALL_TIMEOUT + SLACK, "the load with a stalled peer took {took:?}");
        first.thaw();
        wait_until("the first agent is back", PATIENCE, || plane.offers("first")?.then_some(()));
        wait_until("blocks of the resumed peer", PATIENCE, || {
            let outcomes = reader.load(&blocks[cold.clone()], &LoadParams::CLUSTER).expect("a load");
            (verified(&outcomes) == cold.len()).then_some(())
        });
    }
    // A deadline shorter than the peer's timeout ends the load.
    let short = Duration::from_millis(150);
    let mut took = Vec::new();
    // A busy machine delays some loads. Each one has a peer that stalls and is still offered.
    while took.last().is_none_or(|took| *took > short + Duration::from_millis(700)) {
        assert!(took.len() < LOADS_MAX, "loads with a deadline of {short:?} took {took:?}");
        wait_until("the first agent is offered", PATIENCE, || plane.offers("first")?.then_some(()));
        first.freeze();
        let begun = Instant::now();
        let outcomes = reader.load(&blocks[20..], &LoadParams::CLUSTER.within(short)).expect("a load");
        took.push(begun.elapsed());
        first.thaw();
        assert_eq!(verified(&outcomes), 0);
    }
}

#[test]
fn a_dead_node_is_no_longer_offered_after_two_seconds() {
    let Pair { mut first, second, plane, env } = pair();
    env.allow("peer connection lost");
    env.require("node is silent");
    let blocks = numbers(0..8);
    first.engine(large()).save_durably(&blocks);
    let reader = second.engine(large());
    wait_for_sources(&reader, &blocks, Source::PeerDram);
    // A busy machine can delay the control plane, so one of several deaths must be noticed in time.
    let mut offered_for = Vec::new();
    while offered_for.last().is_none_or(|took| *took > FORGOTTEN_WITHIN) {
        assert!(offered_for.len() < DEATHS_MAX, "a dead node was offered for {offered_for:?}");
        if !offered_for.is_empty() {
            first.start();
            wait_for_sources(&reader, &blocks, Source::PeerNvme);
        }
        first.kill();
        let killed = Instant::now();
        wait_until("a dead node's blocks are not offered", PATIENCE, || {
            reader.matches(&blocks, Scope::Cluster).is_empty().then_some(())
        });
        offered_for.push(killed.elapsed());
    }
    assert_eq!(plane.offers("first"), Some(false));
    assert_eq!(plane.offers("second"), Some(true));
    fast_call("a miss", SLACK, || {
        let outcomes = reader.load(&blocks, &LoadParams::CLUSTER).expect("a load");
        assert_eq!(outcomes, vec![Outcome::Missing(BlockStatus::Miss); 8]);
    });
    first.start();
    wait_for_sources(&reader, &blocks, Source::PeerNvme);
    assert_eq!(reader.load_all(&blocks, &LoadParams::CLUSTER), vec![Source::PeerNvme; 8]);
}

#[test]
fn corrupt_blocks_from_a_peers_memory_are_rejected() {
    let Pair { first, second, plane: _plane, env } = pair();
    env.allow("peer connection");
    env.allow("verif");
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
    scribbler.client().wait_durable(committed.ticket, PATIENCE).expect("a durability notice");
    let reader = second.engine(large());
    wait_for_sources(&reader, &blocks, Source::PeerDram);
    spans[1].slice(500_000, 1).and_then(|byte| byte.copy_in(&[0xa5])).expect("the mapping is writable");
    let outcomes = reader.load(&blocks, &LoadParams::CLUSTER.within(Duration::from_secs(5))).expect("a load");
    assert!(!outcomes[1].is_verified(), "{outcomes:?}");
    assert_ne!(outcomes[1], Outcome::Corrupt, "the agent detects the corruption before the engine does");
    assert!(second.admin().counter("fill_corrupt") >= 1);
    // The copy on the peer's disk is right.
    scribbler.trim();
    wait_for_sources(&reader, &blocks[1..2], Source::PeerNvme);
    wait_until("the undamaged copy", PATIENCE, || {
        let outcomes = reader.load(&blocks, &LoadParams::CLUSTER).expect("a load");
        (verified(&outcomes) == 3).then_some(())
    });
}
