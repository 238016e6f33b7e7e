//! Scenarios: matches and loads from this node.

use std::time::Duration;

use reprise_agent_core::effect::{LoadId, LoadedBlock, LossReason, Reply, Source};
use reprise_agent_core::event::{Event, FillError, LoadRequest, Priority, Ranks, Request, Scope};
use reprise_agent_core::limits::{LOAD_BLOCKS_MAX, MATCH_KEYS_MAX};
use reprise_policy::{BlockKey, SessionId, TenantId, Tier};

use crate::engine::{HeldLoad, RequestKind};
use crate::harness::{Harness, Setup, key, keys, large_layout, small_layout};
use crate::jobs::Job;

const LATER: Duration = Duration::from_millis(50);

/// Harness with `blocks` durable blocks in DRAM.
fn harness(blocks: u64) -> (Harness, SessionId) {
    let mut harness = Harness::new(Setup::default());
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    harness.reserve(session, blocks as u32);
    harness.commit(session, &keys(0..blocks), Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
    (harness, session)
}

/// Harness with `blocks` blocks on NVMe only.
fn cold_harness(blocks: u64) -> (Harness, SessionId) {
    let (mut harness, session) = harness(blocks);
    harness.request(session, RequestKind::Other, Request::Trim);
    (harness, session)
}

fn load(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.load(session, keys, LATER, Scope::Local);
}

/// Newest load that was answered.
fn held(harness: &Harness, session: SessionId) -> (LoadId, &HeldLoad) {
    let Reply::Loaded { load, .. } = harness.engines[&session].replies.last().expect("a reply").1 else {
        panic!("the last reply does not belong to a load")
    };
    (load, &harness.engines[&session].loads[&load])
}

fn answered(harness: &Harness, session: SessionId) -> bool {
    harness.engines[&session].requests_open.is_empty()
}

/// Advances a read with `from` layers to `to` layers.
fn advance_fill_at(harness: &mut Harness, from: u32, to: u32) {
    let at_layers = |job: &Job| matches!(job, Job::Read { layers, .. } if *layers == from);
    let job = harness.jobs.iter().position(at_layers).expect("a read with that many layers");
    harness.advance_to(job, to);
}

#[test]
fn load_of_blocks_in_dram_is_answered_at_once_and_complete() {
    let (mut harness, session) = harness(4);
    load(&mut harness, session, &keys(0..4));
    let (id, held) = held(&harness, session);
    assert!(held.blocks.iter().all(|block| matches!(block, LoadedBlock::Ok { source: Source::OwnDram, .. })));
    assert!(harness.engines[&session].progress(id).done);
    assert!(harness.jobs.is_empty());
    harness.read_all();
}

#[test]
fn load_from_nvme_reads_one_batch_and_is_answered_with_the_first_layer() {
    let (mut harness, session) = cold_harness(3);
    load(&mut harness, session, &keys(0..3));
    assert_eq!(harness.fills().len(), 3);
    advance_fill_at(&mut harness, 0, 1);
    advance_fill_at(&mut harness, 0, 2);
    assert!(!answered(&harness, session));
    advance_fill_at(&mut harness, 0, 3);
    let (id, block) = held(&harness, session);
    assert!(matches!(block.blocks[2], LoadedBlock::Ok { source: Source::OwnNvme, .. }));
    assert_eq!(harness.engines[&session].progress(id).layers, 1);
    advance_fill_at(&mut harness, 1, 4);
    assert_eq!(harness.engines[&session].progress(id).layers, 2, "the progress of the slowest block");
    harness.finish_jobs();
    let progress = harness.engines[&session].progress(id);
    assert!(progress.layers == 4 && progress.done && progress.failed.is_empty());
    assert!(harness.announced.contains(&(key(1), Tier::Dram)));
    assert_eq!(harness.core.counters().hit_blocks_own_nvme, 3);
}

#[test]
fn concurrent_loads_of_a_block_share_one_read() {
    let (mut harness, session) = cold_harness(2);
    let other = harness.open_session(TenantId::DEFAULT, large_layout());
    load(&mut harness, session, &keys(0..1));
    harness.advance_to(0, 2);
    load(&mut harness, other, &keys(0..2));
    assert_eq!(harness.fills().len(), 2, "one read per block");
    harness.finish_jobs();
    assert!(answered(&harness, session) && answered(&harness, other));
    assert_eq!(harness.core.counters().single_flight_joins, 1);
    assert_eq!(harness.core.counters().device_fills, 2);
}

#[test]
fn key_may_occur_twice_in_a_load_and_a_match() {
    let (mut harness, session) = cold_harness(2);
    let twice = [key(0), key(1), key(0)];
    harness.match_keys(session, &twice, Scope::Local);
    let Reply::Matched { sources } = &harness.engines[&session].replies.last().expect("a reply").1 else {
        panic!("no match")
    };
    assert_eq!(*sources, [Source::OwnNvme; 3]);
    load(&mut harness, session, &twice);
    assert_eq!(harness.fills().len(), 2);
    harness.finish_jobs();
    let (id, held) = held(&harness, session);
    assert!(held.blocks.iter().all(|block| matches!(block, LoadedBlock::Ok { .. })));
    assert_eq!(harness.core.counters().read_leases, 3);
    harness.release(session, id);
    assert_eq!(harness.core.counters().read_leases, 0);
}

#[test]
fn missing_block_is_a_miss_and_does_not_delay_others() {
    let (mut harness, session) = harness(2);
    load(&mut harness, session, &[key(0), key(90), key(1)]);
    let (id, held) = held(&harness, session);
    assert!(matches!(held.blocks[1], LoadedBlock::Lost(LossReason::Miss)));
    assert!(harness.engines[&session].progress(id).done);
    harness.read_all();
}

#[test]
fn load_of_only_misses_is_answered_and_done() {
    let (mut harness, session) = harness(0);
    load(&mut harness, session, &keys(5..7));
    let (id, _) = held(&harness, session);
    assert!(harness.engines[&session].progress(id).done);
    load(&mut harness, session, &[]);
    let (id, held) = held(&harness, session);
    assert!(held.blocks.is_empty() && harness.engines[&session].progress(id).done);
}

#[test]
fn load_never_evicts_blocks_that_it_found() {
    let (mut harness, session) = harness(16);
    harness.reserve(session, 4);
    harness.commit(session, &keys(16..20), Priority::Normal);
    harness.finish_jobs();
    let dram = (0..20).filter(|number| harness.announced.contains(&(key(*number), Tier::Dram))).count();
    assert_eq!(dram, 16);
    // Four blocks are on NVMe only: the tail of those saved before.
    load(&mut harness, session, &keys(0..20));
    harness.finish_jobs();
    let (_, held) = held(&harness, session);
    let lost = |block: &&LoadedBlock| matches!(block, LoadedBlock::Lost(LossReason::NoSpace));
    assert_eq!(held.blocks.iter().filter(lost).count(), 4, "the arena has room for 16");
    assert!(held.blocks[12..16].iter().all(|block| lost(&block)));
}

#[test]
fn next_load_uses_released_slots() {
    let (mut harness, session) = cold_harness(16);
    load(&mut harness, session, &keys(0..16));
    harness.finish_jobs();
    let (id, _) = held(&harness, session);
    harness.release(session, id);
    load(&mut harness, session, &keys(0..16));
    assert!(answered(&harness, session));
    assert_eq!(harness.core.counters().hit_blocks_own_dram, 16);
}

#[test]
fn load_is_answered_at_its_deadline_and_its_reads_continue() {
    let (mut harness, session) = cold_harness(3);
    harness.load(session, &keys(0..2), Duration::from_millis(10), Scope::Local);
    let job = harness.fills()[0];
    harness.advance_to(job, 4);
    assert!(!answered(&harness, session));
    harness.pass(Duration::from_millis(10));
    let (id, block) = held(&harness, session);
    let late = |block: &&LoadedBlock| matches!(block, LoadedBlock::Lost(LossReason::Deadline));
    assert_eq!(block.blocks.iter().filter(late).count(), 1);
    assert!(harness.engines[&session].progress(id).done);
    harness.finish_jobs();
    assert!(
        harness.announced.contains(&(key(0), Tier::Dram))
            && harness.announced.contains(&(key(1), Tier::Dram))
    );
    load(&mut harness, session, &keys(0..2));
    assert!(answered(&harness, session), "the late block is resident by now");
}

#[test]
fn late_block_after_the_answer_fails_and_keeps_its_slot_until_release() {
    let (mut harness, session) = cold_harness(1);
    harness.load(session, &keys(0..1), Duration::from_millis(10), Scope::Local);
    harness.advance_to(0, 2);
    let (id, _) = held(&harness, session);
    harness.pass(Duration::from_millis(10));
    let progress = harness.engines[&session].progress(id);
    assert!(progress.failed.contains(&0) && progress.done);
    assert_eq!(harness.core.counters().read_leases, 1);
    harness.finish_jobs();
    harness.release(session, id);
    assert_eq!(harness.core.counters().read_leases, 0);
    assert!(harness.announced.contains(&(key(0), Tier::Dram)));
}

#[test]
fn failed_read_after_the_answer_fails_the_block_and_keeps_its_slot_until_release() {
    let (mut harness, session) = cold_harness(2);
    load(&mut harness, session, &keys(0..2));
    advance_fill_at(&mut harness, 0, 2);
    advance_fill_at(&mut harness, 0, 2);
    let (id, _) = held(&harness, session);
    let job = harness.fills()[0];
    harness.fail(job, FillError::Device);
    let progress = harness.engines[&session].progress(id);
    assert_eq!((progress.failed.len(), progress.layers), (1, 2));
    harness.finish_jobs();
    let progress = harness.engines[&session].progress(id);
    assert!(progress.done && progress.layers == 4);
    assert_eq!(harness.core.counters().arena_used_bytes, 2 * large_layout().slot_bytes());
    harness.reserve(session, 16);
    assert_eq!(
        harness.engines[&session].reserved.len(),
        14,
        "the failed slot is not reused while it is read"
    );
    harness.release(session, id);
    harness.reserve(session, 2);
    assert_eq!(harness.engines[&session].reserved.len(), 16);
}

#[test]
fn session_holds_at_most_one_load_per_progress_entry() {
    let (mut harness, session) = harness(1);
    for _ in 0..64 {
        load(&mut harness, session, &keys(0..1));
    }
    assert_eq!(harness.engines[&session].loads.len(), 64);
    load(&mut harness, session, &keys(0..1));
    assert!(matches!(harness.engines[&session].replies.last().expect("a reply").1, Reply::Busy { .. }));
    let first = *harness.engines[&session].loads.keys().next().expect("a load");
    harness.release(session, first);
    load(&mut harness, session, &keys(0..1));
    assert_eq!(harness.engines[&session].loads.len(), 64);
}

#[test]
fn only_the_holder_can_release_a_load_and_only_once() {
    let (mut harness, session) = harness(1);
    load(&mut harness, session, &keys(0..1));
    let (id, _) = held(&harness, session);
    let other = harness.open_session(TenantId::DEFAULT, large_layout());
    harness.request(other, RequestKind::Other, Request::Release { load: id });
    assert!(matches!(harness.engines[&other].replies[0].1, Reply::BadRequest(_)));
    assert_eq!(harness.core.counters().read_leases, 1);
    harness.release(session, id);
    harness.request(session, RequestKind::Other, Request::Release { load: id });
    assert!(matches!(harness.engines[&session].replies.last().expect("a reply").1, Reply::BadRequest(_)));
}

#[test]
fn closing_a_session_ends_its_loads_but_not_its_reads() {
    let (mut harness, session) = cold_harness(2);
    load(&mut harness, session, &keys(0..2));
    harness.advance_to(0, 2);
    harness.close_session(session);
    assert_eq!((harness.core.counters().read_leases, harness.core.counters().fills_in_flight), (0, 2));
    assert_eq!(harness.core.next_deadline(), None, "no deadline remains");
    harness.finish_jobs();
    assert_eq!(harness.core.counters().dram_blocks, 2);
}

#[test]
fn block_of_another_layout_is_missing() {
    let (mut harness, _) = harness(2);
    let small = harness.open_session(TenantId::DEFAULT, small_layout());
    harness.match_keys(small, &keys(0..2), Scope::Local);
    load(&mut harness, small, &keys(0..2));
    let (_, held) = held(&harness, small);
    assert!(held.blocks.iter().all(|block| matches!(block, LoadedBlock::Lost(LossReason::Miss))));
    let Reply::Matched { sources } = &harness.engines[&small].replies[0].1 else { panic!("no match") };
    assert!(sources.is_empty());
}

#[test]
fn rejects_calls_beyond_a_limit_with_the_limit() {
    let (mut harness, session) = harness(0);
    let many = vec![key(0); MATCH_KEYS_MAX + 1];
    let body = Request::Match {
        keys: many.clone(),
        ranks: Ranks::Own,
        position: Some(0),
        scope: Scope::Local,
        public: None,
    };
    harness.request(session, RequestKind::Other, body);
    let keys = many[..LOAD_BLOCKS_MAX + 1].to_vec();
    let wanted = LoadRequest { keys, deadline: LATER, read_bytes: 0, scope: Scope::Local, public: None };
    harness.request(session, RequestKind::Other, Request::Load(wanted));
    for (_, reply) in harness.engines[&session].replies.iter().rev().take(2) {
        assert!(matches!(reply, Reply::BadRequest(text) if text.contains("at most")), "{reply:?}");
    }
}

#[test]
fn ignores_late_update_of_an_ended_fill() {
    use reprise_agent_core::event::FillUpdate;
    let (mut harness, session) = cold_harness(1);
    load(&mut harness, session, &keys(0..1));
    let Job::Read { read, .. } = &harness.jobs[0] else { panic!("a read") };
    let fill = read.fill;
    harness.finish_jobs();
    let before = harness.core.counters().clone();
    harness.apply(Event::Fill { fill, update: FillUpdate::Failed(FillError::Device) });
    assert_eq!(harness.core.counters(), before);
}

#[test]
fn fill_with_wrong_number_of_checksums_fails_at_its_end() {
    use reprise_agent_core::event::FillUpdate;
    let (mut harness, session) = cold_harness(1);
    load(&mut harness, session, &keys(0..1));
    let Job::Read { read, .. } = harness.jobs.remove(0) else { panic!("a read") };
    let update = |layers| FillUpdate::Layers { layers, checksums: Some(Box::new([1])), tier: Tier::Nvme };
    harness.apply(Event::Fill { fill: read.fill, update: update(2) });
    assert!(!answered(&harness, session));
    harness.apply(Event::Fill { fill: read.fill, update: update(4) });
    let (_, held) = held(&harness, session);
    assert!(matches!(held.blocks[0], LoadedBlock::Lost(LossReason::Failed)));
}

#[test]
fn deadline_counts_from_the_receipt_of_the_load() {
    let (mut harness, session) = cold_harness(1);
    let received = harness.now;
    harness.pass(Duration::from_millis(8));
    let request = harness.engines.get_mut(&session).expect("open").add_request(RequestKind::Other);
    let deadline = Duration::from_millis(10);
    let wanted = LoadRequest { keys: keys(0..1), deadline, read_bytes: 0, scope: Scope::Local, public: None };
    harness.apply(Event::Request { session, request, body: Request::Load(wanted), received });
    harness.pass(Duration::from_millis(1));
    assert!(!answered(&harness, session));
    harness.pass(Duration::from_millis(1));
    assert!(
        answered(&harness, session),
        "eight of its ten milliseconds had passed when the core processed it"
    );
    assert_eq!(harness.core.counters().deadline_blocks, 1);
}

#[test]
fn load_without_room_is_answered_for_all_its_blocks() {
    let (mut harness, session) = cold_harness(8);
    harness.reserve(session, 14);
    load(&mut harness, session, &[key(0), key(1), key(2), key(3), key(0)]);
    harness.finish_jobs();
    let (_, held) = held(&harness, session);
    let lost = |block: &LoadedBlock| matches!(block, LoadedBlock::Lost(LossReason::NoSpace));
    assert_eq!(held.blocks.iter().map(lost).collect::<Vec<_>>(), [false, false, true, true, false]);
}

#[test]
fn load_held_too_long_fails_and_releases_its_slots() {
    let (mut harness, session) = harness(2);
    load(&mut harness, session, &[key(0), key(90), key(1)]);
    let (id, _) = held(&harness, session);
    harness.pass(Duration::from_secs(599));
    assert_eq!(harness.core.counters().read_leases, 2);
    harness.pass(Duration::from_secs(1));
    let progress = harness.engines[&session].progress(id);
    assert_eq!(progress.failed.iter().copied().collect::<Vec<_>>(), [0, 2]);
    assert_eq!((harness.core.counters().read_leases, harness.core.counters().expired_loads), (0, 1));
    harness.reserve(session, 16);
    assert_eq!(harness.engines[&session].reserved.len(), 16, "other sessions may use the slots");
    harness.release(session, id);
    assert_eq!(
        harness.core.next_deadline().map(|tick| tick.since(harness.now)),
        Some(Duration::from_secs(60))
    );
}
