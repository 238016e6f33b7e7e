//! Matching and loading from this node: one behaviour at a time.

use std::time::Duration;

use reprise_agent_core::agent::limits::{LOAD_BLOCKS_MAX, MATCH_KEYS_MAX};
use reprise_agent_core::effect::{LoadId, LoadedBlock, LossReason, Reply, Source};
use reprise_agent_core::event::{Event, FillError, LoadRequest, Priority, Request, Scope};
use reprise_policy::{BlockKey, SessionId, TenantId, Tier};

use crate::engine::{Asked, HeldLoad};
use crate::jobs::Job;
use crate::world::{Setup, World, key, keys, large_layout, small_layout};

const LATER: Duration = Duration::from_millis(50);

/// A world with so many durable blocks in DRAM.
fn world(blocks: u64) -> (World, SessionId) {
    let mut world = World::new(Setup::default());
    let session = world.open_session(TenantId::DEFAULT, large_layout());
    world.reserve(session, blocks as u32);
    world.commit(session, &keys(0..blocks), Priority::Normal);
    world.pass(Duration::from_millis(6));
    world.finish_jobs();
    (world, session)
}

/// The same with the blocks on NVMe only.
fn cold_world(blocks: u64) -> (World, SessionId) {
    let (mut world, session) = world(blocks);
    world.request(session, Asked::Other, Request::Trim);
    (world, session)
}

fn load(world: &mut World, session: SessionId, keys: &[BlockKey]) {
    world.load(session, keys, LATER, Scope::Local);
}

/// The newest load that was answered.
fn held(world: &World, session: SessionId) -> (LoadId, &HeldLoad) {
    let Reply::Loaded { load, .. } = world.engines[&session].replies.last().expect("a reply").1 else {
        panic!("the last reply is no answer to a load")
    };
    (load, &world.engines[&session].loads[&load])
}

fn answered(world: &World, session: SessionId) -> bool {
    world.engines[&session].asked.is_empty()
}

/// Brings a read that has so many layers to another number of layers.
fn advance_fill_at(world: &mut World, from: u32, to: u32) {
    let at_layers = |job: &Job| matches!(job, Job::Read { layers, .. } if *layers == from);
    let job = world.jobs.iter().position(at_layers).expect("a read that is so far");
    world.advance_to(job, to);
}

#[test]
fn blocks_in_dram_are_answered_at_once_and_complete() {
    let (mut world, session) = world(4);
    load(&mut world, session, &keys(0..4));
    let (id, held) = held(&world, session);
    assert!(held.blocks.iter().all(|block| matches!(block, LoadedBlock::Ok { source: Source::OwnDram, .. })));
    assert!(world.engines[&session].progress(id).done);
    assert!(world.jobs.is_empty());
    world.read_all();
}

#[test]
fn blocks_on_nvme_are_read_in_one_batch_and_answered_with_the_first_layer() {
    let (mut world, session) = cold_world(3);
    load(&mut world, session, &keys(0..3));
    assert_eq!(world.fills().len(), 3);
    advance_fill_at(&mut world, 0, 1);
    advance_fill_at(&mut world, 0, 2);
    assert!(!answered(&world, session));
    advance_fill_at(&mut world, 0, 3);
    let (id, block) = held(&world, session);
    assert!(matches!(block.blocks[2], LoadedBlock::Ok { source: Source::OwnNvme, .. }));
    assert_eq!(world.engines[&session].progress(id).layers, 1);
    advance_fill_at(&mut world, 1, 4);
    assert_eq!(world.engines[&session].progress(id).layers, 2, "as far as the slowest");
    world.finish_jobs();
    let progress = world.engines[&session].progress(id);
    assert!(progress.layers == 4 && progress.done && progress.failed.is_empty());
    assert!(world.announced.contains(&(key(1), Tier::Dram)));
    assert_eq!(world.core.counters().hit_blocks_own_nvme, 3);
}

#[test]
fn concurrent_loads_of_a_block_share_one_read() {
    let (mut world, session) = cold_world(2);
    let other = world.open_session(TenantId::DEFAULT, large_layout());
    load(&mut world, session, &keys(0..1));
    world.advance_to(0, 2);
    load(&mut world, other, &keys(0..2));
    assert_eq!(world.fills().len(), 2, "one of each block");
    world.finish_jobs();
    assert!(answered(&world, session) && answered(&world, other));
    assert_eq!(world.core.counters().single_flight_joins, 1);
    assert_eq!(world.core.counters().device_fills, 2);
}

#[test]
fn a_key_may_be_in_a_load_and_in_a_match_twice() {
    let (mut world, session) = cold_world(2);
    let twice = [key(0), key(1), key(0)];
    world.match_keys(session, &twice, Scope::Local);
    let Reply::Matched { sources } = &world.engines[&session].replies.last().expect("a reply").1 else {
        panic!("no match")
    };
    assert_eq!(*sources, [Source::OwnNvme; 3]);
    load(&mut world, session, &twice);
    assert_eq!(world.fills().len(), 2);
    world.finish_jobs();
    let (id, held) = held(&world, session);
    assert!(held.blocks.iter().all(|block| matches!(block, LoadedBlock::Ok { .. })));
    assert_eq!(world.core.counters().read_leases, 3);
    world.release(session, id);
    assert_eq!(world.core.counters().read_leases, 0);
}

#[test]
fn a_block_that_is_nowhere_is_a_miss_and_holds_nobody_up() {
    let (mut world, session) = world(2);
    load(&mut world, session, &[key(0), key(90), key(1)]);
    let (id, held) = held(&world, session);
    assert!(matches!(held.blocks[1], LoadedBlock::Lost(LossReason::Miss)));
    assert!(world.engines[&session].progress(id).done);
    world.read_all();
}

#[test]
fn a_load_of_nothing_but_misses_is_answered_and_done() {
    let (mut world, session) = world(0);
    load(&mut world, session, &keys(5..7));
    let (id, _) = held(&world, session);
    assert!(world.engines[&session].progress(id).done);
    load(&mut world, session, &[]);
    let (id, held) = held(&world, session);
    assert!(held.blocks.is_empty() && world.engines[&session].progress(id).done);
}

#[test]
fn a_load_never_evicts_what_it_has_found() {
    let (mut world, session) = world(16);
    world.reserve(session, 4);
    world.commit(session, &keys(16..20), Priority::Normal);
    world.finish_jobs();
    let dram = (0..20).filter(|number| world.announced.contains(&(key(*number), Tier::Dram))).count();
    assert_eq!(dram, 16);
    // Four are on NVMe only: the tail of what was saved before.
    load(&mut world, session, &keys(0..20));
    world.finish_jobs();
    let (_, held) = held(&world, session);
    let lost = |block: &&LoadedBlock| matches!(block, LoadedBlock::Lost(LossReason::NoSpace));
    assert_eq!(held.blocks.iter().filter(lost).count(), 4, "there is room for 16");
    assert!(held.blocks[12..16].iter().all(|block| lost(&block)));
}

#[test]
fn released_room_serves_the_next_load() {
    let (mut world, session) = cold_world(16);
    load(&mut world, session, &keys(0..16));
    world.finish_jobs();
    let (id, _) = held(&world, session);
    world.release(session, id);
    load(&mut world, session, &keys(0..16));
    assert!(answered(&world, session));
    assert_eq!(world.core.counters().hit_blocks_own_dram, 16);
}

#[test]
fn at_the_deadline_a_load_is_answered_with_what_it_has_and_its_reads_go_on() {
    let (mut world, session) = cold_world(3);
    world.load(session, &keys(0..2), Duration::from_millis(10), Scope::Local);
    let job = world.fills()[0];
    world.advance_to(job, 4);
    assert!(!answered(&world, session));
    world.pass(Duration::from_millis(10));
    let (id, block) = held(&world, session);
    let late = |block: &&LoadedBlock| matches!(block, LoadedBlock::Lost(LossReason::Deadline));
    assert_eq!(block.blocks.iter().filter(late).count(), 1);
    assert!(world.engines[&session].progress(id).done);
    world.finish_jobs();
    assert!(
        world.announced.contains(&(key(0), Tier::Dram)) && world.announced.contains(&(key(1), Tier::Dram))
    );
    load(&mut world, session, &keys(0..2));
    assert!(answered(&world, session), "the late block is resident by now");
}

#[test]
fn what_is_late_after_the_answer_is_reported_and_its_slot_kept_until_release() {
    let (mut world, session) = cold_world(1);
    world.load(session, &keys(0..1), Duration::from_millis(10), Scope::Local);
    world.advance_to(0, 2);
    let (id, _) = held(&world, session);
    world.pass(Duration::from_millis(10));
    let progress = world.engines[&session].progress(id);
    assert!(progress.failed.contains(&0) && progress.done);
    assert_eq!(world.core.counters().read_leases, 1);
    world.finish_jobs();
    world.release(session, id);
    assert_eq!(world.core.counters().read_leases, 0);
    assert!(world.announced.contains(&(key(0), Tier::Dram)));
}

#[test]
fn a_read_that_fails_after_the_answer_fails_the_block_and_keeps_its_slot_until_release() {
    let (mut world, session) = cold_world(2);
    load(&mut world, session, &keys(0..2));
    advance_fill_at(&mut world, 0, 2);
    advance_fill_at(&mut world, 0, 2);
    let (id, _) = held(&world, session);
    let job = world.fills()[0];
    world.fail(job, FillError::Device);
    let progress = world.engines[&session].progress(id);
    assert_eq!((progress.failed.len(), progress.layers), (1, 2));
    world.finish_jobs();
    let progress = world.engines[&session].progress(id);
    assert!(progress.done && progress.layers == 4);
    assert_eq!(world.core.counters().arena_used_bytes, 2 * large_layout().slot_bytes());
    world.reserve(session, 16);
    assert_eq!(world.engines[&session].reserved.len(), 14, "the failed slot is not reused while it is read");
    world.release(session, id);
    world.reserve(session, 2);
    assert_eq!(world.engines[&session].reserved.len(), 16);
}

#[test]
fn a_session_holds_as_many_loads_as_its_progress_page_has_entries() {
    let (mut world, session) = world(1);
    for _ in 0..64 {
        load(&mut world, session, &keys(0..1));
    }
    assert_eq!(world.engines[&session].loads.len(), 64);
    load(&mut world, session, &keys(0..1));
    assert!(matches!(world.engines[&session].replies.last().expect("a reply").1, Reply::Busy { .. }));
    let first = *world.engines[&session].loads.keys().next().expect("a load");
    world.release(session, first);
    load(&mut world, session, &keys(0..1));
    assert_eq!(world.engines[&session].loads.len(), 64);
}

#[test]
fn only_the_holder_of_a_load_releases_it_and_only_once() {
    let (mut world, session) = world(1);
    load(&mut world, session, &keys(0..1));
    let (id, _) = held(&world, session);
    let other = world.open_session(TenantId::DEFAULT, large_layout());
    world.request(other, Asked::Other, Request::Release { load: id });
    assert!(matches!(world.engines[&other].replies[0].1, Reply::BadRequest(_)));
    assert_eq!(world.core.counters().read_leases, 1);
    world.release(session, id);
    world.request(session, Asked::Other, Request::Release { load: id });
    assert!(matches!(world.engines[&session].replies.last().expect("a reply").1, Reply::BadRequest(_)));
}

#[test]
fn the_death_of_a_session_ends_its_loads_and_not_its_reads() {
    let (mut world, session) = cold_world(2);
    load(&mut world, session, &keys(0..2));
    world.advance_to(0, 2);
    world.close_session(session);
    assert_eq!((world.core.counters().read_leases, world.core.counters().fills_in_flight), (0, 2));
    assert_eq!(world.core.next_deadline(), None, "nobody waits any more");
    world.finish_jobs();
    assert_eq!(world.core.counters().dram_blocks, 2);
}

#[test]
fn a_block_of_another_layout_is_not_there() {
    let (mut world, _) = world(2);
    let small = world.open_session(TenantId::DEFAULT, small_layout());
    world.match_keys(small, &keys(0..2), Scope::Local);
    load(&mut world, small, &keys(0..2));
    let (_, held) = held(&world, small);
    assert!(held.blocks.iter().all(|block| matches!(block, LoadedBlock::Lost(LossReason::Miss))));
    let Reply::Matched { sources } = &world.engines[&small].replies[0].1 else { panic!("no match") };
    assert!(sources.is_empty());
}

#[test]
fn calls_beyond_the_limits_are_refused_with_the_limit() {
    let (mut world, session) = world(0);
    let many = vec![key(0); MATCH_KEYS_MAX + 1];
    let body = Request::Match { keys: many.clone(), scope: Scope::Local };
    world.request(session, Asked::Other, body);
    let keys = many[..LOAD_BLOCKS_MAX + 1].to_vec();
    let wanted = LoadRequest { keys, deadline: LATER, read_bytes: 0, scope: Scope::Local };
    world.request(session, Asked::Other, Request::Load(wanted));
    for (_, reply) in world.engines[&session].replies.iter().rev().take(2) {
        assert!(matches!(reply, Reply::BadRequest(text) if text.contains("at most")), "{reply:?}");
    }
}

#[test]
fn a_late_report_on_a_fill_that_has_ended_changes_nothing() {
    use reprise_agent_core::event::FillUpdate;
    let (mut world, session) = cold_world(1);
    load(&mut world, session, &keys(0..1));
    let Job::Read { read, .. } = &world.jobs[0] else { panic!("a read") };
    let fill = read.fill;
    world.finish_jobs();
    let before = world.core.counters().clone();
    world.apply(Event::Fill { fill, update: FillUpdate::Failed(FillError::Device) });
    assert_eq!(*world.core.counters(), before);
}

#[test]
fn a_fill_with_checksums_of_the_wrong_number_fails_when_it_has_ended() {
    use reprise_agent_core::event::FillUpdate;
    let (mut world, session) = cold_world(1);
    load(&mut world, session, &keys(0..1));
    let Job::Read { read, .. } = world.jobs.remove(0) else { panic!("a read") };
    let update = |layers| FillUpdate::Layers { layers, checksums: Some(Box::new([1])), tier: Tier::Nvme };
    world.apply(Event::Fill { fill: read.fill, update: update(2) });
    assert!(!answered(&world, session));
    world.apply(Event::Fill { fill: read.fill, update: update(4) });
    let (_, held) = held(&world, session);
    assert!(matches!(held.blocks[0], LoadedBlock::Lost(LossReason::Failed)));
}

#[test]
fn a_deadline_counts_from_the_receipt_of_the_load() {
    let (mut world, session) = cold_world(1);
    let received = world.now;
    world.pass(Duration::from_millis(8));
    let request = world.engines.get_mut(&session).expect("open").ask(Asked::Other);
    let deadline = Duration::from_millis(10);
    let wanted = LoadRequest { keys: keys(0..1), deadline, read_bytes: 0, scope: Scope::Local };
    world.apply(Event::Request { session, request, body: Request::Load(wanted), received });
    world.pass(Duration::from_millis(1));
    assert!(!answered(&world, session));
    world.pass(Duration::from_millis(1));
    assert!(answered(&world, session), "eight of its ten milliseconds were over when the core got to it");
    assert_eq!(world.core.counters().deadline_blocks, 1);
}

#[test]
fn a_load_without_room_is_answered_for_all_its_blocks() {
    let (mut world, session) = cold_world(8);
    world.reserve(session, 14);
    load(&mut world, session, &[key(0), key(1), key(2), key(3), key(0)]);
    world.finish_jobs();
    let (_, held) = held(&world, session);
    let lost = |block: &LoadedBlock| matches!(block, LoadedBlock::Lost(LossReason::NoSpace));
    assert_eq!(held.blocks.iter().map(lost).collect::<Vec<_>>(), [false, false, true, true, false]);
}

#[test]
fn a_load_that_is_held_too_long_fails_and_gives_its_slots_back() {
    let (mut world, session) = world(2);
    load(&mut world, session, &[key(0), key(90), key(1)]);
    let (id, _) = held(&world, session);
    world.pass(Duration::from_secs(599));
    assert_eq!(world.core.counters().read_leases, 2);
    world.pass(Duration::from_secs(1));
    let progress = world.engines[&session].progress(id);
    assert_eq!(progress.failed.iter().copied().collect::<Vec<_>>(), [0, 2]);
    assert_eq!((world.core.counters().read_leases, world.core.counters().expired_loads), (0, 1));
    world.reserve(session, 16);
    assert_eq!(world.engines[&session].reserved.len(), 16, "the slots are others' now");
    world.release(session, id);
    assert_eq!(world.core.next_deadline().map(|tick| tick.since(world.now)), Some(Duration::from_secs(60)));
}
