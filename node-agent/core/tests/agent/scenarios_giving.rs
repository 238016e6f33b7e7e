//! Blocks given to other nodes because they are hot or this one is to leave: one behaviour at a time.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_agent_core::agent::Settings;
use reprise_agent_core::agent::limits::{
    DRAINED_APART, FRUITLESS_ROUNDS_MAX, GIVING_STEP_ENTRIES, PLACE_KEYS_MAX, SIFT_BYTES,
};
use reprise_agent_core::effect::{LoadedBlock, Offer, PlaceReason, Reply, Report};
use reprise_agent_core::event::{Event, Move, Placement, Priority, Scope};
use reprise_policy::{BlockKey, DrainProgress, NodeId, NodeMode, Parts, SessionId, TenantId, Tier};

use crate::jobs::Job;
use crate::world::{Setup, World, key, keys, large_layout, layout, small_layout};

pub(crate) const ONE: NodeId = NodeId(1);
const TWO: NodeId = NodeId(2);
pub(crate) const LATER: Duration = Duration::from_millis(50);
/// Longer than anything that is asked again waits.
pub(crate) const LONG: Duration = Duration::from_secs(12);
pub(crate) const TENANT: TenantId = TenantId::DEFAULT;

pub(crate) fn world() -> (World, SessionId) {
    world_of(Setup::default())
}

fn world_of(setup: Setup) -> (World, SessionId) {
    let mut world = World::new(setup);
    let session = world.open_session(TENANT, large_layout());
    (world, session)
}

fn with_settings(change: impl FnOnce(&mut Settings)) -> Setup {
    let mut setup = Setup::default();
    change(&mut setup.settings);
    setup
}

/// As many as fit the arena at a time.
pub(crate) fn save_durably(world: &mut World, session: SessionId, keys: &[BlockKey]) {
    for keys in keys.chunks(8) {
        world.reserve(session, keys.len() as u32);
        world.commit(session, keys, Priority::Normal);
        world.pass(Duration::from_millis(6));
        world.finish_device_ops();
    }
}

fn drain(world: &mut World) {
    world.apply(Event::Mode { mode: NodeMode::Draining, revision: 1 });
}

pub(crate) fn move_to(world: &mut World, to: NodeId, blocks: u64) {
    let bytes = blocks * (large_layout().slot_bytes() + 4096);
    world.apply(Event::Move(Some(Move { to, bytes })));
}

fn progress(world: &World) -> DrainProgress {
    world.core.drain_progress()
}

/// After a walk in which all was enough: the same answers to the walk that confirms it.
fn confirm_drained(world: &mut World, blocks: usize) {
    assert!(!progress(world).drained, "one walk is not enough");
    world.pass(DRAINED_APART + LATER);
    answer(world, &vec![Placement::Enough; blocks]);
    assert!(progress(world).drained);
}

/// Keys of the questions that wait for an answer, and why they were asked.
pub(crate) fn asked(world: &World) -> Vec<(PlaceReason, Vec<BlockKey>)> {
    let asked = world.jobs.iter().filter_map(|job| match job {
        Job::Place { keys, reason, .. } => Some((*reason, keys.clone())),
        _ => None,
    });
    asked.collect()
}

/// Keys of the questions whose answers cost the nodes that they name room.
fn charged(world: &World) -> Vec<Vec<BlockKey>> {
    let asked = world.jobs.iter().filter_map(|job| match job {
        Job::Place { keys, slot_bytes, .. } if *slot_bytes > SIFT_BYTES => Some(keys.clone()),
        _ => None,
    });
    asked.collect()
}

/// Answers the only question that waits.
pub(crate) fn answer(world: &mut World, answers: &[Placement]) {
    let at = world.jobs.iter().position(|job| matches!(job, Job::Place { .. })).expect("a question");
    let Job::Place { place, .. } = world.jobs.swap_remove(at) else { unreachable!("just seen") };
    world.apply(Event::Placed { place, answers: answers.to_vec() });
}

/// Lets time pass until something is asked.
fn wait_for_question(world: &mut World) {
    for _ in 0..200 {
        if asked(world).is_empty() {
            world.pass(Duration::from_millis(100));
        }
    }
    assert!(!asked(world).is_empty(), "nothing is asked");
}

/// The only offer that waits, taken out.
pub(crate) fn offered(world: &mut World) -> Offer {
    let at = world.jobs.iter().position(|job| matches!(job, Job::Offer(_))).expect("an offer");
    let Job::Offer(offer) = world.jobs.swap_remove(at) else { unreachable!("just seen") };
    offer
}

pub(crate) fn take(world: &mut World, offer: &Offer, taken: &[u32], retry_after: Duration) {
    world.apply(Event::OfferAnswered { offer: offer.offer, taken: taken.to_vec(), retry_after });
}

/// A peer reads a block so often.
fn read_by_peer(world: &mut World, key: BlockKey, times: u32) {
    for _ in 0..times {
        let serve = world.peer_request(&[key], large_layout(), LATER);
        while world.serves.contains_key(&serve) {
            world.send(serve, 0);
        }
    }
}

fn is_durable_here(world: &World, key: BlockKey) -> bool {
    world.announced.contains(&(key, Tier::Nvme))
}

// ---- hot blocks ------------------------------------------------------------------------------------------------

#[test]
fn a_block_that_peers_keep_reading_is_offered_to_the_node_that_the_control_plane_names() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..2));
    read_by_peer(&mut world, key(0), 3);
    assert!(asked(&world).is_empty(), "not hot yet");
    read_by_peer(&mut world, key(0), 1);
    assert_eq!(asked(&world), [(PlaceReason::Hot, vec![key(0)])]);
    answer(&mut world, &[Placement::To(TWO)]);
    let offer = offered(&mut world);
    assert_eq!((offer.node, &offer.keys, offer.layout), (TWO, &vec![key(0)], large_layout()));
    take(&mut world, &offer, &[0], Duration::ZERO);
    read_by_peer(&mut world, key(0), 8);
    world.pass(LONG);
    assert!(world.jobs.is_empty(), "it is asked about once in a window");
    assert_eq!(world.core.counters().hot_blocks_given, 1);
    assert!(is_durable_here(&world, key(0)), "both replicas stay");
}

#[test]
fn a_block_that_is_not_durable_is_never_hot() {
    let (mut world, session) = world();
    world.reserve(session, 1);
    world.commit(session, &keys(0..1), Priority::Normal);
    read_by_peer(&mut world, key(0), 9);
    assert!(asked(&world).is_empty());
}

#[test]
fn a_hot_block_with_enough_replicas_is_left_alone() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..1));
    read_by_peer(&mut world, key(0), 4);
    answer(&mut world, &[Placement::Enough]);
    world.pass(LONG);
    assert!(world.jobs.is_empty());
}

// ---- draining --------------------------------------------------------------------------------------------------

#[test]
fn a_draining_node_gives_all_it_has_and_says_so() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..20));
    drain(&mut world);
    assert!(!progress(&world).drained);
    for _ in 0..9 {
        world.finish_jobs();
        world.pass(Duration::from_secs(2));
    }
    let DrainProgress { drained, walked_blocks, durable_blocks, moved_bytes, nowhere_blocks } =
        progress(&world);
    assert!(drained);
    assert_eq!((walked_blocks, durable_blocks, nowhere_blocks), (20, 20, 0));
    assert_eq!(moved_bytes, 20 * (large_layout().slot_bytes() + 4096));
    assert!((0..20).all(|number| is_durable_here(&world, key(number))), "it keeps its copies");
}

#[test]
fn what_was_taken_is_asked_about_until_it_is_durable_elsewhere() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..2));
    drain(&mut world);
    answer(&mut world, &[Placement::To(ONE), Placement::Enough]);
    let offer = offered(&mut world);
    assert_eq!(offer.keys, [key(0)]);
    take(&mut world, &offer, &[0], Duration::from_secs(3));
    world.pass(Duration::from_millis(2900));
    assert!(asked(&world).is_empty(), "the peer wants to be left in peace for a while");
    world.pass(Duration::from_millis(200));
    assert_eq!(asked(&world), [(PlaceReason::Drain, vec![key(0)])]);
    answer(&mut world, &[Placement::Enough]);
    assert_eq!((progress(&world).walked_blocks, progress(&world).drained), (2, false));
    world.pass(Duration::from_secs(2));
    assert_eq!(asked(&world), [(PlaceReason::Drain, keys(0..2))], "a second walk makes sure");
    answer(&mut world, &[Placement::Enough; 2]);
    confirm_drained(&mut world, 2);
}

#[test]
fn a_peer_without_room_does_not_hold_up_what_others_take() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..2));
    drain(&mut world);
    answer(&mut world, &[Placement::To(ONE), Placement::To(TWO)]);
    let (first, second) = (offered(&mut world), offered(&mut world));
    take(&mut world, &first, &[], Duration::from_secs(9));
    take(&mut world, &second, &[0], Duration::ZERO);
    world.pass(Duration::from_millis(1100));
    assert_eq!(asked(&world), [(PlaceReason::Drain, keys(0..2))]);
}

#[test]
fn a_peer_without_room_is_left_in_peace_for_as_long_as_it_wished_whoever_else_answers() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..2));
    drain(&mut world);
    answer(&mut world, &[Placement::To(ONE), Placement::To(TWO)]);
    let (first, second) = (offered(&mut world), offered(&mut world));
    take(&mut world, &first, &[], Duration::from_secs(9));
    take(&mut world, &second, &[0], Duration::ZERO);
    let rounds = 2 * FRUITLESS_ROUNDS_MAX;
    for _ in 0..rounds {
        world.pass(Duration::from_millis(8900) / rounds);
        while let Some((_, keys)) = asked(&world).first().cloned() {
            let first = |wanted: &BlockKey| *wanted == key(0);
            let answers =
                keys.iter().map(|key| if first(key) { Placement::To(ONE) } else { Placement::Enough });
            answer(&mut world, &answers.collect::<Vec<_>>());
        }
        assert!(!world.jobs.iter().any(|job| matches!(job, Job::Offer(_))), "it has said when");
    }
    world.pass(Duration::from_millis(1100));
    answer(&mut world, &[Placement::To(ONE)]);
    assert_eq!(offered(&mut world).node, ONE);
    assert_eq!(progress(&world).nowhere_blocks, 0);
}

#[test]
fn what_is_saved_while_a_node_drains_is_given_as_well() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..2));
    drain(&mut world);
    answer(&mut world, &[Placement::Enough; 2]);
    confirm_drained(&mut world, 2);
    world.reserve(session, 1);
    world.commit(session, &[key(7)], Priority::Normal);
    assert!(!progress(&world).drained, "a block waits to be saved");
    world.pass(Duration::from_millis(6));
    world.finish_device_ops();
    assert!(!progress(&world).drained, "a block was saved since");
    world.pass(Duration::from_secs(2));
    answer(&mut world, &[Placement::Enough; 3]);
    confirm_drained(&mut world, 3);
}

#[test]
fn a_drained_node_looks_again_and_notices_that_a_replica_was_lost() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..1));
    drain(&mut world);
    answer(&mut world, &[Placement::Enough]);
    confirm_drained(&mut world, 1);
    world.pass(Duration::from_secs(61));
    assert!(progress(&world).drained, "for as long as nothing else is known");
    answer(&mut world, &[Placement::Nowhere]);
    assert_eq!((progress(&world).drained, progress(&world).nowhere_blocks), (false, 1));
}

#[test]
fn a_node_is_not_drained_when_the_second_walk_finds_that_the_other_replica_is_to_leave_too() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..1));
    drain(&mut world);
    answer(&mut world, &[Placement::Enough]);
    world.pass(DRAINED_APART - LATER);
    assert!(asked(&world).is_empty() && !progress(&world).drained);
    world.pass(2 * LATER);
    answer(&mut world, &[Placement::To(TWO)]);
    assert!(!progress(&world).drained);
    let offer = offered(&mut world);
    take(&mut world, &offer, &[0], Duration::ZERO);
    for _ in 0..2 {
        wait_for_question(&mut world);
        answer(&mut world, &[Placement::Enough]);
    }
    confirm_drained(&mut world, 1);
}

#[test]
fn a_drain_waits_for_a_control_plane_that_does_not_answer() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..1));
    drain(&mut world);
    for _ in 0..2 * FRUITLESS_ROUNDS_MAX {
        wait_for_question(&mut world);
        world.jobs.clear();
    }
    assert_eq!(progress(&world).nowhere_blocks, 0, "nobody has said so");
    for answers in [&[][..], &[Placement::Enough], &[Placement::Enough]] {
        wait_for_question(&mut world);
        answer(&mut world, answers);
    }
    confirm_drained(&mut world, 1);
}

#[test]
fn blocks_that_no_peer_takes_do_not_hold_up_the_walk() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..1));
    drain(&mut world);
    for _ in 0..FRUITLESS_ROUNDS_MAX {
        answer(&mut world, &[Placement::To(ONE)]);
        let offer = offered(&mut world);
        take(&mut world, &offer, &[], Duration::ZERO);
        world.pass(Duration::from_millis(1100));
    }
    assert_eq!((progress(&world).nowhere_blocks, progress(&world).drained), (1, false));
    wait_for_question(&mut world);
}

#[test]
fn batches_that_nobody_takes_leave_their_places_to_others() {
    let mut world = World::new(Setup { regions: 8, ..Setup::default() });
    for layers in 1..=6 {
        let session = world.open_session(TENANT, layout(layers, Parts::Latent, 64));
        save_durably(&mut world, session, &[key(u64::from(layers))]);
    }
    drain(&mut world);
    let mut seen = BTreeSet::new();
    for _ in 0..FRUITLESS_ROUNDS_MAX / 2 {
        while let Some((_, keys)) = asked(&world).first().cloned() {
            seen.extend(keys);
            answer(&mut world, &[Placement::To(ONE)]);
            let offer = offered(&mut world);
            take(&mut world, &offer, &[], Duration::ZERO);
        }
        world.pass(Duration::from_millis(1100));
    }
    assert_eq!((seen.len(), progress(&world).walked_blocks), (6, 0), "each of a shape of its own");
}

#[test]
fn a_node_that_is_taken_back_stops_giving() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..1));
    drain(&mut world);
    world.apply(Event::Mode { mode: NodeMode::Active, revision: 2 });
    answer(&mut world, &[Placement::To(ONE)]);
    world.pass(LONG);
    assert!(world.jobs.is_empty());
    assert_eq!(world.core.next_deadline(), None);
}

#[test]
fn of_two_modes_that_with_the_higher_revision_holds() {
    let (mut world, _) = world();
    world.apply(Event::Mode { mode: NodeMode::Cordoned, revision: 5 });
    world.apply(Event::Mode { mode: NodeMode::Draining, revision: 4 });
    world.apply(Event::Mode { mode: NodeMode::Draining, revision: 5 });
    assert_eq!(world.core.mode(), NodeMode::Cordoned);
}

/// With so many durable blocks of the small layout.
fn world_with_small_blocks(count: usize) -> (World, Vec<BlockKey>) {
    let settings = Settings { writeback_bytes: 8 << 20, ..Setup::default().settings };
    let setup = Setup { disks: vec![128 << 20], region_bytes: 2 << 20, settings, ..Setup::default() };
    let mut world = World::new(setup);
    let session = world.open_session(TENANT, small_layout());
    let blocks: Vec<BlockKey> = (0..count as u64).map(|number| key(1_000_000 + number)).collect();
    for keys in blocks.chunks(800) {
        world.reserve(session, 800);
        world.commit(session, keys, Priority::Normal);
        world.pass(Duration::from_millis(6));
        world.finish_device_ops();
    }
    assert_eq!(progress(&world).durable_blocks, count as u64);
    (world, blocks)
}

#[test]
fn a_walk_over_many_blocks_asks_for_bounded_batches_of_one_shape() {
    const BLOCKS: usize = GIVING_STEP_ENTRIES + 200;
    let (mut world, _) = world_with_small_blocks(BLOCKS);
    drain(&mut world);
    let mut seen = 0;
    while seen < BLOCKS {
        let open = asked(&world);
        assert!((1..=4).contains(&open.len()), "{} questions", open.len());
        for (_, keys) in open {
            assert!(keys.len() <= PLACE_KEYS_MAX);
            seen += keys.len();
            answer(&mut world, &vec![Placement::Enough; keys.len()]);
        }
        world.pass(Duration::from_millis(2));
    }
    assert_eq!(seen, BLOCKS);
}

#[test]
fn without_bandwidth_nothing_is_given_and_nothing_taken() {
    let (mut world, session) = world_of(with_settings(|settings| settings.placement_bandwidth = 0));
    save_durably(&mut world, session, &keys(0..1));
    read_by_peer(&mut world, key(0), 9);
    drain(&mut world);
    move_to(&mut world, ONE, 1);
    world.pass(LONG);
    assert!(world.jobs.is_empty());
    world.apply(Event::Mode { mode: NodeMode::Active, revision: 2 });
    assert_eq!(world.peer_offer(ONE, TENANT, large_layout(), &[key(9)]).0, []);
}

#[test]
fn blocks_are_offered_no_faster_than_the_bandwidth_allows() {
    let slot = large_layout().slot_bytes();
    let (mut world, session) = world_of(with_settings(|settings| settings.placement_bandwidth = 2 * slot));
    save_durably(&mut world, session, &keys(0..8));
    drain(&mut world);
    let ask_twice = |world: &mut World| (0..2).for_each(|_| answer(world, &[Placement::To(ONE); 8]));
    ask_twice(&mut world);
    let offer = offered(&mut world);
    assert_eq!(offer.keys.len(), 2, "a second's worth");
    take(&mut world, &offer, &[0, 1], Duration::ZERO);
    world.pass(Duration::from_millis(1010));
    ask_twice(&mut world);
    let offer = offered(&mut world);
    take(&mut world, &offer, &[], Duration::ZERO);
    world.pass(Duration::from_millis(1010));
    ask_twice(&mut world);
    assert_eq!(offered(&mut world).keys.len(), 2, "what was not taken costs nothing");
}

#[test]
fn a_question_that_costs_room_covers_what_can_be_offered_now_and_nothing_that_is_on_its_way() {
    let slot = large_layout().slot_bytes();
    let (mut world, session) = world_of(with_settings(|settings| settings.placement_bandwidth = 2 * slot));
    save_durably(&mut world, session, &keys(0..8));
    drain(&mut world);
    assert_eq!((asked(&world), charged(&world)), (vec![(PlaceReason::Drain, keys(0..8))], vec![]));
    answer(&mut world, &[Placement::To(ONE); 8]);
    assert_eq!(charged(&world), [keys(0..2)], "what was only sifted is asked about at once");
    answer(&mut world, &[Placement::To(ONE); 2]);
    let offer = offered(&mut world);
    take(&mut world, &offer, &[0, 1], Duration::ZERO);
    world.pass(Duration::from_millis(1010));
    let (_, sifted) = asked(&world).remove(0);
    assert_eq!((sifted.len(), charged(&world).len()), (8, 0), "all of them, and nobody pays");
    answer(&mut world, &[Placement::To(ONE); 8]);
    assert_eq!(charged(&world), [keys(2..4)], "the others were taken just now");
    answer(&mut world, &[Placement::To(ONE); 2]);
    assert_eq!(offered(&mut world).keys, keys(2..4));
    assert!(!world.jobs.iter().any(|job| matches!(job, Job::Offer(_))));
}

#[test]
fn what_was_taken_and_does_not_come_about_is_offered_again_after_a_while() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..1));
    drain(&mut world);
    answer(&mut world, &[Placement::To(ONE)]);
    let offer = offered(&mut world);
    take(&mut world, &offer, &[0], Duration::ZERO);
    for _ in 0..9 {
        world.pass(Duration::from_millis(1010));
        answer(&mut world, &[Placement::To(ONE)]);
        assert!(!world.jobs.iter().any(|job| matches!(job, Job::Offer(_))), "the peer is at it");
    }
    world.pass(Duration::from_millis(1010));
    answer(&mut world, &[Placement::To(TWO)]);
    assert_eq!(offered(&mut world).node, TWO);
}

#[test]
fn a_copy_in_dram_that_was_taken_in_vain_is_looked_at_and_a_damaged_one_is_dropped() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..1));
    world.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    let Reply::Loaded { load, blocks, .. } =
        world.engines[&session].replies.last().expect("a reply").1.clone()
    else {
        panic!("not an answer to a load")
    };
    let LoadedBlock::Ok { slot, .. } = blocks[0] else { panic!("it is in DRAM") };
    world.memory.write(slot, &large_layout(), 0..1, u64::MAX >> 20);
    world.engines.get_mut(&session).expect("open").give_up_on(load, 0);
    drain(&mut world);
    answer(&mut world, &[Placement::To(ONE)]);
    let offer = offered(&mut world);
    take(&mut world, &offer, &[0], Duration::ZERO);
    for _ in 0..10 {
        assert!(!world.jobs.iter().any(|job| matches!(job, Job::Check(_))), "the peer is at it");
        world.pass(Duration::from_millis(1010));
        answer(&mut world, &[Placement::To(ONE)]);
    }
    assert!(world.jobs.iter().any(|job| matches!(job, Job::Check(_))), "nothing has come of it");
    world.finish_jobs();
    assert!(matches!(world.reports[..], [Report::CorruptMemory { key, .. }] if key == self::key(0)));
    assert!(!world.announced.contains(&(key(0), Tier::Dram)) && is_durable_here(&world, key(0)));
}

#[test]
fn blocks_with_enough_replicas_are_walked_over_without_a_wait() {
    let slot = large_layout().slot_bytes();
    let (mut world, session) = world_of(with_settings(|settings| settings.placement_bandwidth = 2 * slot));
    save_durably(&mut world, session, &keys(0..8));
    drain(&mut world);
    answer(&mut world, &[Placement::Enough; 8]);
    assert_eq!(progress(&world).walked_blocks, 8);
}

#[test]
fn few_blocks_that_are_short_of_a_replica_do_not_slow_the_walk_over_many_that_are_not() {
    const BLOCKS: usize = GIVING_STEP_ENTRIES + 2 * PLACE_KEYS_MAX;
    let (mut world, blocks) = world_with_small_blocks(BLOCKS);
    drain(&mut world);
    let (mut seen, began) = (BTreeSet::new(), world.now);
    while seen.len() < blocks.len() {
        while let Some((_, keys)) = asked(&world).first().cloned() {
            let short = |key: &BlockKey| blocks.iter().step_by(500).any(|short| short == key);
            let answers =
                keys.iter().map(|key| if short(key) { Placement::To(ONE) } else { Placement::Enough });
            answer(&mut world, &answers.collect::<Vec<_>>());
            seen.extend(keys);
        }
        while world.jobs.iter().any(|job| matches!(job, Job::Offer(_))) {
            let offer = offered(&mut world);
            let all: Vec<u32> = (0..offer.keys.len() as u32).collect();
            take(&mut world, &offer, &all, Duration::ZERO);
        }
        world.pass(Duration::from_millis(2));
    }
    let took = world.now.since(began);
    assert!(took < Duration::from_millis(500), "{took:?}");
    assert_eq!(progress(&world).walked_blocks, (BLOCKS - BLOCKS.div_ceil(500)) as u64);
}

#[test]
fn each_of_many_hot_blocks_is_asked_about_once() {
    let slot = large_layout().slot_bytes();
    let (mut world, session) = world_of(with_settings(|settings| settings.placement_bandwidth = 2 * slot));
    save_durably(&mut world, session, &keys(0..7));
    for key in keys(0..7) {
        read_by_peer(&mut world, key, 4);
    }
    let mut seen = Vec::new();
    for _ in 0..8 {
        while let Some((reason, keys)) = asked(&world).first().cloned() {
            assert!(reason == PlaceReason::Hot && keys.len() <= 2, "{} blocks", keys.len());
            answer(&mut world, &[Placement::To(ONE); 2]);
            let offer = offered(&mut world);
            take(&mut world, &offer, &[0, 1], Duration::ZERO);
            seen.extend(keys);
        }
        world.pass(Duration::from_millis(1010));
    }
    seen.sort();
    let mut all = keys(0..7);
    all.sort();
    assert_eq!(seen, all);
    assert_eq!(world.core.counters().hot_blocks_given, 7);
}
