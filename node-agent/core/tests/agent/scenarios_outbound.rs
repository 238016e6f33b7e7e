//! Scenarios: replication of hot blocks, and draining.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_agent_core::Settings;
use reprise_agent_core::effect::{Diagnostic, LoadedBlock, Offer, Place, PlacementReason, Reply};
use reprise_agent_core::event::{Event, Move, PeerEvent, Placement, Priority, Scope};
use reprise_agent_core::limits::{
    DRAIN_CONFIRM_DELAY, FILTER_BYTES, FRUITLESS_ROUNDS_MAX, OUTBOUND_STEP_ENTRIES, PLACE_KEYS_MAX,
};
use reprise_policy::{BlockKey, DrainProgress, NodeId, NodeMode, Parts, SessionId, TenantId, Tier};

use crate::harness::{Harness, Setup, key, keys, large_layout, layout, small_layout};
use crate::jobs::Job;

pub(crate) const ONE: NodeId = NodeId(1);
const TWO: NodeId = NodeId(2);
pub(crate) const LATER: Duration = Duration::from_millis(50);
/// Longer than any retry delay.
pub(crate) const LONG: Duration = Duration::from_secs(12);
pub(crate) const TENANT: TenantId = TenantId::DEFAULT;

pub(crate) fn harness() -> (Harness, SessionId) {
    harness_of(Setup::default())
}

fn harness_of(setup: Setup) -> (Harness, SessionId) {
    let mut harness = Harness::new(setup);
    let session = harness.open_session(TENANT, large_layout());
    (harness, session)
}

fn with_settings(change: impl FnOnce(&mut Settings)) -> Setup {
    let mut setup = Setup::default();
    change(&mut setup.settings);
    setup
}

/// Saves blocks durably, as many at a time as fit into the arena.
pub(crate) fn save_durably(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    for keys in keys.chunks(8) {
        harness.reserve(session, keys.len() as u32);
        harness.commit(session, keys, Priority::Normal);
        harness.pass(Duration::from_millis(6));
        harness.finish_device_ops();
    }
}

fn drain(harness: &mut Harness) {
    harness.apply(Event::Mode { mode: NodeMode::Draining, revision: 1 });
}

pub(crate) fn move_to(harness: &mut Harness, to: NodeId, blocks: u64) {
    let bytes = blocks * (large_layout().slot_bytes() + 4096);
    harness.apply(Event::Move(Some(Move { to, bytes })));
}

fn progress(harness: &Harness) -> DrainProgress {
    harness.core.drain_progress()
}

/// After a clean walk, gives the same answers to the walk that confirms it.
fn confirm_drained(harness: &mut Harness, blocks: usize) {
    assert!(!progress(harness).drained, "one walk is not enough");
    harness.pass(DRAIN_CONFIRM_DELAY + LATER);
    answer(harness, &vec![Placement::Enough; blocks]);
    assert!(progress(harness).drained);
}

/// Keys and reasons of the open placement queries.
pub(crate) fn queried(harness: &Harness) -> Vec<(PlacementReason, Vec<BlockKey>)> {
    let queried = harness.jobs.iter().filter_map(|job| match job {
        Job::Place { keys, reason, .. } => Some((*reason, keys.clone())),
        _ => None,
    });
    queried.collect()
}

/// Keys of open queries whose answers charge the nodes.
fn charged(harness: &Harness) -> Vec<Vec<BlockKey>> {
    let queried = harness.jobs.iter().filter_map(|job| match job {
        Job::Place { keys, slot_bytes, .. } if *slot_bytes > FILTER_BYTES => Some(keys.clone()),
        _ => None,
    });
    queried.collect()
}

/// Answers the only open query.
pub(crate) fn answer(harness: &mut Harness, answers: &[Placement]) {
    let at = harness.jobs.iter().position(|job| matches!(job, Job::Place { .. })).expect("a question");
    let Job::Place { place, .. } = harness.jobs.swap_remove(at) else { unreachable!("just seen") };
    harness.apply(Event::PlaceAnswered { place, answers: answers.to_vec() });
}

/// Advances the time until a query is sent.
fn wait_for_question(harness: &mut Harness) {
    for _ in 0..200 {
        if queried(harness).is_empty() {
            harness.pass(Duration::from_millis(100));
        }
    }
    assert!(!queried(harness).is_empty(), "no query was sent");
}

/// Removes an open offer; returns its receiver and the offer.
pub(crate) fn offered_to(harness: &mut Harness) -> (NodeId, Offer) {
    let at = harness.jobs.iter().position(|job| matches!(job, Job::Offer { .. })).expect("an offer");
    let Job::Offer { node, offer } = harness.jobs.swap_remove(at) else { unreachable!("just seen") };
    (node, offer)
}

/// Removes and returns an open offer.
pub(crate) fn offered(harness: &mut Harness) -> Offer {
    offered_to(harness).1
}

pub(crate) fn take(harness: &mut Harness, offer: &Offer, taken: &[u32], retry_after: Duration) {
    harness.apply(Event::Peer(PeerEvent::OfferAnswered {
        offer: offer.offer,
        taken: taken.to_vec(),
        retry_after,
    }));
}

/// Reads a block as a peer, `times` times.
fn read_by_peer(harness: &mut Harness, key: BlockKey, times: u32) {
    for _ in 0..times {
        let serve = harness.peer_request(&[key], large_layout(), LATER);
        while harness.serves.contains_key(&serve) {
            harness.send(serve, 0);
        }
    }
}

fn is_durable_here(harness: &Harness, key: BlockKey) -> bool {
    harness.announced.contains(&(key, Tier::Nvme))
}

// ---- hot blocks ------------------------------------------------------------------------------------------------

#[test]
fn hot_block_is_offered_to_the_node_chosen_by_the_control_plane() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..2));
    read_by_peer(&mut harness, key(0), 3);
    assert!(queried(&harness).is_empty(), "not hot yet");
    read_by_peer(&mut harness, key(0), 1);
    assert_eq!(queried(&harness), [(PlacementReason::Hot, vec![key(0)])]);
    answer(&mut harness, &[Placement::To(TWO)]);
    let (node, offer) = offered_to(&mut harness);
    assert_eq!((node, &offer.keys, offer.layout), (TWO, &vec![key(0)], large_layout()));
    take(&mut harness, &offer, &[0], Duration::ZERO);
    read_by_peer(&mut harness, key(0), 8);
    harness.pass(LONG);
    assert!(harness.jobs.is_empty(), "one query per window");
    assert_eq!(harness.core.counters().hot_blocks_given, 1);
    assert!(is_durable_here(&harness, key(0)), "both replicas remain");
}

#[test]
fn unsaved_block_is_never_hot() {
    let (mut harness, session) = harness();
    harness.reserve(session, 1);
    harness.commit(session, &keys(0..1), Priority::Normal);
    read_by_peer(&mut harness, key(0), 9);
    assert!(queried(&harness).is_empty());
}

#[test]
fn hot_block_with_enough_replicas_is_not_offered() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..1));
    read_by_peer(&mut harness, key(0), 4);
    answer(&mut harness, &[Placement::Enough]);
    harness.pass(LONG);
    assert!(harness.jobs.is_empty());
}

// ---- draining --------------------------------------------------------------------------------------------------

#[test]
fn draining_node_replicates_all_blocks_and_reports_it() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..20));
    drain(&mut harness);
    assert!(!progress(&harness).drained);
    for _ in 0..9 {
        harness.finish_jobs();
        harness.pass(Duration::from_secs(2));
    }
    let DrainProgress { drained, walked_blocks, durable_blocks, moved_bytes, nowhere_blocks } =
        progress(&harness);
    assert!(drained);
    assert_eq!((walked_blocks, durable_blocks, nowhere_blocks), (20, 20, 0));
    assert_eq!(moved_bytes, 20 * (large_layout().slot_bytes() + 4096));
    assert!((0..20).all(|number| is_durable_here(&harness, key(number))), "the node keeps its copies");
}

#[test]
fn accepted_blocks_are_queried_until_durable_elsewhere() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..2));
    drain(&mut harness);
    answer(&mut harness, &[Placement::To(ONE), Placement::Enough]);
    let offer = offered(&mut harness);
    assert_eq!(offer.keys, [key(0)]);
    take(&mut harness, &offer, &[0], Duration::from_secs(3));
    harness.pass(Duration::from_millis(2900));
    assert!(queried(&harness).is_empty(), "the peer requested a delay");
    harness.pass(Duration::from_millis(200));
    assert_eq!(queried(&harness), [(PlacementReason::Drain, vec![key(0)])]);
    answer(&mut harness, &[Placement::Enough]);
    assert_eq!((progress(&harness).walked_blocks, progress(&harness).drained), (2, false));
    harness.pass(Duration::from_secs(2));
    assert_eq!(queried(&harness), [(PlacementReason::Drain, keys(0..2))], "a second walk confirms");
    answer(&mut harness, &[Placement::Enough; 2]);
    confirm_drained(&mut harness, 2);
}

#[test]
fn full_peer_does_not_delay_other_peers() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..2));
    drain(&mut harness);
    answer(&mut harness, &[Placement::To(ONE), Placement::To(TWO)]);
    let (first, second) = (offered(&mut harness), offered(&mut harness));
    take(&mut harness, &first, &[], Duration::from_secs(9));
    take(&mut harness, &second, &[0], Duration::ZERO);
    harness.pass(Duration::from_millis(1100));
    assert_eq!(queried(&harness), [(PlacementReason::Drain, keys(0..2))]);
}

#[test]
fn full_peer_gets_no_offers_for_its_requested_delay() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..2));
    drain(&mut harness);
    answer(&mut harness, &[Placement::To(ONE), Placement::To(TWO)]);
    let (first, second) = (offered(&mut harness), offered(&mut harness));
    take(&mut harness, &first, &[], Duration::from_secs(9));
    take(&mut harness, &second, &[0], Duration::ZERO);
    let rounds = 2 * FRUITLESS_ROUNDS_MAX;
    for _ in 0..rounds {
        harness.pass(Duration::from_millis(8900) / rounds);
        while let Some((_, keys)) = queried(&harness).first().cloned() {
            let first = |wanted: &BlockKey| *wanted == key(0);
            let answers =
                keys.iter().map(|key| if first(key) { Placement::To(ONE) } else { Placement::Enough });
            answer(&mut harness, &answers.collect::<Vec<_>>());
        }
        assert!(!harness.jobs.iter().any(|job| matches!(job, Job::Offer { .. })), "the delay has not passed");
    }
    harness.pass(Duration::from_millis(1100));
    answer(&mut harness, &[Placement::To(ONE)]);
    assert_eq!(offered_to(&mut harness).0, ONE);
    assert_eq!(progress(&harness).nowhere_blocks, 0);
}

#[test]
fn blocks_saved_while_draining_are_replicated_too() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..2));
    drain(&mut harness);
    answer(&mut harness, &[Placement::Enough; 2]);
    confirm_drained(&mut harness, 2);
    harness.reserve(session, 1);
    harness.commit(session, &[key(7)], Priority::Normal);
    assert!(!progress(&harness).drained, "a block waits to be saved");
    harness.pass(Duration::from_millis(6));
    harness.finish_device_ops();
    assert!(!progress(&harness).drained, "a block was saved since the walk");
    harness.pass(Duration::from_secs(2));
    answer(&mut harness, &[Placement::Enough; 3]);
    confirm_drained(&mut harness, 3);
}

#[test]
fn drained_node_detects_a_lost_replica() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..1));
    drain(&mut harness);
    answer(&mut harness, &[Placement::Enough]);
    confirm_drained(&mut harness, 1);
    harness.pass(Duration::from_secs(61));
    assert!(progress(&harness).drained, "no lost replica is known");
    answer(&mut harness, &[Placement::NoCapacity]);
    assert_eq!((progress(&harness).drained, progress(&harness).nowhere_blocks), (false, 1));
}

#[test]
fn node_is_not_drained_if_the_second_walk_finds_the_other_replica_draining() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..1));
    drain(&mut harness);
    answer(&mut harness, &[Placement::Enough]);
    harness.pass(DRAIN_CONFIRM_DELAY - LATER);
    assert!(queried(&harness).is_empty() && !progress(&harness).drained);
    harness.pass(2 * LATER);
    answer(&mut harness, &[Placement::To(TWO)]);
    assert!(!progress(&harness).drained);
    let offer = offered(&mut harness);
    take(&mut harness, &offer, &[0], Duration::ZERO);
    for _ in 0..2 {
        wait_for_question(&mut harness);
        answer(&mut harness, &[Placement::Enough]);
    }
    confirm_drained(&mut harness, 1);
}

#[test]
fn drain_waits_for_an_unreachable_control_plane() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..1));
    drain(&mut harness);
    for _ in 0..2 * FRUITLESS_ROUNDS_MAX {
        wait_for_question(&mut harness);
        harness.jobs.clear();
    }
    assert_eq!(progress(&harness).nowhere_blocks, 0, "no answer has stated that");
    for answers in [&[][..], &[Placement::Enough], &[Placement::Enough]] {
        wait_for_question(&mut harness);
        answer(&mut harness, answers);
    }
    confirm_drained(&mut harness, 1);
}

#[test]
fn blocks_rejected_by_all_peers_do_not_block_the_walk() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..1));
    drain(&mut harness);
    for _ in 0..FRUITLESS_ROUNDS_MAX {
        answer(&mut harness, &[Placement::To(ONE)]);
        let offer = offered(&mut harness);
        take(&mut harness, &offer, &[], Duration::ZERO);
        harness.pass(Duration::from_millis(1100));
    }
    assert_eq!((progress(&harness).nowhere_blocks, progress(&harness).drained), (1, false));
    wait_for_question(&mut harness);
}

#[test]
fn rejected_batches_are_parked() {
    let mut harness = Harness::new(Setup { regions: 8, ..Setup::default() });
    for layers in 1..=6 {
        let session = harness.open_session(TENANT, layout(layers, Parts::Latent, 64));
        save_durably(&mut harness, session, &[key(u64::from(layers))]);
    }
    drain(&mut harness);
    let mut seen = BTreeSet::new();
    for _ in 0..FRUITLESS_ROUNDS_MAX / 2 {
        while let Some((_, keys)) = queried(&harness).first().cloned() {
            seen.extend(keys);
            answer(&mut harness, &[Placement::To(ONE)]);
            let offer = offered(&mut harness);
            take(&mut harness, &offer, &[], Duration::ZERO);
        }
        harness.pass(Duration::from_millis(1100));
    }
    assert_eq!((seen.len(), progress(&harness).walked_blocks), (6, 0), "each with a different size class");
}

#[test]
fn reactivated_node_stops_draining() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..1));
    drain(&mut harness);
    harness.apply(Event::Mode { mode: NodeMode::Active, revision: 2 });
    answer(&mut harness, &[Placement::To(ONE)]);
    harness.pass(LONG);
    assert!(harness.jobs.is_empty());
    assert_eq!(harness.core.next_deadline(), None);
}

#[test]
fn mode_with_the_higher_revision_wins() {
    let (mut harness, _) = harness();
    harness.apply(Event::Mode { mode: NodeMode::Cordoned, revision: 5 });
    harness.apply(Event::Mode { mode: NodeMode::Draining, revision: 4 });
    harness.apply(Event::Mode { mode: NodeMode::Draining, revision: 5 });
    assert_eq!(harness.core.mode(), NodeMode::Cordoned);
}

/// Harness with `count` durable blocks of the small layout.
fn harness_with_small_blocks(count: usize) -> (Harness, Vec<BlockKey>) {
    let settings = Settings { writeback_bytes: 8 << 20, ..Setup::default().settings };
    let setup = Setup { disks: vec![128 << 20], region_bytes: 2 << 20, settings, ..Setup::default() };
    let mut harness = Harness::new(setup);
    let session = harness.open_session(TENANT, small_layout());
    let blocks: Vec<BlockKey> = (0..count as u64).map(|number| key(1_000_000 + number)).collect();
    for keys in blocks.chunks(800) {
        harness.reserve(session, 800);
        harness.commit(session, keys, Priority::Normal);
        harness.pass(Duration::from_millis(6));
        harness.finish_device_ops();
    }
    assert_eq!(progress(&harness).durable_blocks, count as u64);
    (harness, blocks)
}

#[test]
fn walk_sends_bounded_batches_of_one_size_class() {
    const BLOCKS: usize = OUTBOUND_STEP_ENTRIES + 200;
    let (mut harness, _) = harness_with_small_blocks(BLOCKS);
    drain(&mut harness);
    let mut seen = 0;
    while seen < BLOCKS {
        let open = queried(&harness);
        assert!((1..=4).contains(&open.len()), "{} queries", open.len());
        for (_, keys) in open {
            assert!(keys.len() <= PLACE_KEYS_MAX);
            seen += keys.len();
            answer(&mut harness, &vec![Placement::Enough; keys.len()]);
        }
        harness.pass(Duration::from_millis(2));
    }
    assert_eq!(seen, BLOCKS);
}

#[test]
fn zero_bandwidth_disables_replication() {
    let (mut harness, session) = harness_of(with_settings(|settings| settings.placement_bandwidth = 0));
    save_durably(&mut harness, session, &keys(0..1));
    read_by_peer(&mut harness, key(0), 9);
    drain(&mut harness);
    move_to(&mut harness, ONE, 1);
    harness.pass(LONG);
    assert!(harness.jobs.is_empty());
    harness.apply(Event::Mode { mode: NodeMode::Active, revision: 2 });
    assert_eq!(harness.peer_offer(ONE, TENANT, large_layout(), &[key(9)]).0, []);
}

#[test]
fn offers_are_limited_by_the_bandwidth() {
    let slot = large_layout().slot_bytes();
    let (mut harness, session) =
        harness_of(with_settings(|settings| settings.placement_bandwidth = 2 * slot));
    save_durably(&mut harness, session, &keys(0..8));
    drain(&mut harness);
    let answer_twice = |harness: &mut Harness| (0..2).for_each(|_| answer(harness, &[Placement::To(ONE); 8]));
    answer_twice(&mut harness);
    let offer = offered(&mut harness);
    assert_eq!(offer.keys.len(), 2, "one second of bandwidth");
    take(&mut harness, &offer, &[0, 1], Duration::ZERO);
    harness.pass(Duration::from_millis(1010));
    answer_twice(&mut harness);
    let offer = offered(&mut harness);
    take(&mut harness, &offer, &[], Duration::ZERO);
    harness.pass(Duration::from_millis(1010));
    answer_twice(&mut harness);
    assert_eq!(offered(&mut harness).keys.len(), 2, "rejected blocks cost no bandwidth");
}

#[test]
fn placement_query_covers_only_blocks_that_can_be_offered_now() {
    let slot = large_layout().slot_bytes();
    let (mut harness, session) =
        harness_of(with_settings(|settings| settings.placement_bandwidth = 2 * slot));
    save_durably(&mut harness, session, &keys(0..8));
    drain(&mut harness);
    assert_eq!((queried(&harness), charged(&harness)), (vec![(PlacementReason::Drain, keys(0..8))], vec![]));
    answer(&mut harness, &[Placement::To(ONE); 8]);
    assert_eq!(charged(&harness), [keys(0..2)], "filtered blocks are queried for placement at once");
    answer(&mut harness, &[Placement::To(ONE); 2]);
    let offer = offered(&mut harness);
    take(&mut harness, &offer, &[0, 1], Duration::ZERO);
    harness.pass(Duration::from_millis(1010));
    let (_, filtered) = queried(&harness).remove(0);
    assert_eq!((filtered.len(), charged(&harness).len()), (8, 0), "all blocks, without a charge");
    answer(&mut harness, &[Placement::To(ONE); 8]);
    assert_eq!(charged(&harness), [keys(2..4)], "the others were accepted recently");
    answer(&mut harness, &[Placement::To(ONE); 2]);
    assert_eq!(offered(&mut harness).keys, keys(2..4));
    assert!(!harness.jobs.iter().any(|job| matches!(job, Job::Offer { .. })));
}

#[test]
fn accepted_block_that_is_never_stored_is_offered_again() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..1));
    drain(&mut harness);
    answer(&mut harness, &[Placement::To(ONE)]);
    let offer = offered(&mut harness);
    take(&mut harness, &offer, &[0], Duration::ZERO);
    for _ in 0..9 {
        harness.pass(Duration::from_millis(1010));
        answer(&mut harness, &[Placement::To(ONE)]);
        assert!(
            !harness.jobs.iter().any(|job| matches!(job, Job::Offer { .. })),
            "the peer may still be storing it"
        );
    }
    harness.pass(Duration::from_millis(1010));
    answer(&mut harness, &[Placement::To(TWO)]);
    assert_eq!(offered_to(&mut harness).0, TWO);
}

#[test]
fn copy_of_a_failed_replication_is_checked_and_dropped_if_damaged() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..1));
    harness.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    let Reply::Loaded { load, blocks, .. } =
        harness.engines[&session].replies.last().expect("a reply").1.clone()
    else {
        panic!("not an answer to a load")
    };
    let LoadedBlock::Ok { place: Place::Arena(slot), .. } = blocks[0] else { panic!("the block is in DRAM") };
    harness.memory.write(slot, &large_layout(), 0..1, u64::MAX >> 20);
    harness.engines.get_mut(&session).expect("open").ignore_block(load, 0);
    drain(&mut harness);
    answer(&mut harness, &[Placement::To(ONE)]);
    let offer = offered(&mut harness);
    take(&mut harness, &offer, &[0], Duration::ZERO);
    for _ in 0..10 {
        assert!(
            !harness.jobs.iter().any(|job| matches!(job, Job::Check(_))),
            "the peer may still be storing it"
        );
        harness.pass(Duration::from_millis(1010));
        answer(&mut harness, &[Placement::To(ONE)]);
    }
    assert!(harness.jobs.iter().any(|job| matches!(job, Job::Check(_))), "the block was not stored");
    harness.finish_jobs();
    assert!(matches!(harness.reports[..], [Diagnostic::CorruptMemory { key, .. }] if key == self::key(0)));
    assert!(!harness.announced.contains(&(key(0), Tier::Dram)) && is_durable_here(&harness, key(0)));
}

#[test]
fn walk_does_not_wait_for_blocks_with_enough_replicas() {
    let slot = large_layout().slot_bytes();
    let (mut harness, session) =
        harness_of(with_settings(|settings| settings.placement_bandwidth = 2 * slot));
    save_durably(&mut harness, session, &keys(0..8));
    drain(&mut harness);
    answer(&mut harness, &[Placement::Enough; 8]);
    assert_eq!(progress(&harness).walked_blocks, 8);
}

#[test]
fn few_blocks_without_a_replica_do_not_slow_the_walk() {
    const BLOCKS: usize = OUTBOUND_STEP_ENTRIES + 2 * PLACE_KEYS_MAX;
    let (mut harness, blocks) = harness_with_small_blocks(BLOCKS);
    drain(&mut harness);
    let (mut seen, began) = (BTreeSet::new(), harness.now);
    while seen.len() < blocks.len() {
        while let Some((_, keys)) = queried(&harness).first().cloned() {
            let short = |key: &BlockKey| blocks.iter().step_by(500).any(|short| short == key);
            let answers =
                keys.iter().map(|key| if short(key) { Placement::To(ONE) } else { Placement::Enough });
            answer(&mut harness, &answers.collect::<Vec<_>>());
            seen.extend(keys);
        }
        while harness.jobs.iter().any(|job| matches!(job, Job::Offer { .. })) {
            let offer = offered(&mut harness);
            let all: Vec<u32> = (0..offer.keys.len() as u32).collect();
            take(&mut harness, &offer, &all, Duration::ZERO);
        }
        harness.pass(Duration::from_millis(2));
    }
    let elapsed = harness.now.since(began);
    assert!(elapsed < Duration::from_millis(500), "{elapsed:?}");
    assert_eq!(progress(&harness).walked_blocks, (BLOCKS - BLOCKS.div_ceil(500)) as u64);
}

#[test]
fn each_of_many_hot_blocks_is_queried_once() {
    let slot = large_layout().slot_bytes();
    let (mut harness, session) =
        harness_of(with_settings(|settings| settings.placement_bandwidth = 2 * slot));
    save_durably(&mut harness, session, &keys(0..7));
    for key in keys(0..7) {
        read_by_peer(&mut harness, key, 4);
    }
    let mut seen = Vec::new();
    for _ in 0..8 {
        while let Some((reason, keys)) = queried(&harness).first().cloned() {
            assert!(reason == PlacementReason::Hot && keys.len() <= 2, "{} blocks", keys.len());
            answer(&mut harness, &[Placement::To(ONE); 2]);
            let offer = offered(&mut harness);
            take(&mut harness, &offer, &[0, 1], Duration::ZERO);
            seen.extend(keys);
        }
        harness.pass(Duration::from_millis(1010));
    }
    seen.sort();
    let mut all = keys(0..7);
    all.sort();
    assert_eq!(seen, all);
    assert_eq!(harness.core.counters().hot_blocks_given, 7);
}
