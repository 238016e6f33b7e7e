//! Scenarios: blocks that were damaged in DRAM.

use std::time::Duration;

use reprise_agent_core::effect::{
    CommitStatus, Diagnostic, LoadId, LoadedBlock, LossReason, Place, Reply, Source,
};
use reprise_agent_core::event::{Priority, Scope};
use reprise_policy::{BlockKey, SessionId, TenantId, Tier};

use crate::harness::{Harness, Setup, key, keys, large_layout};
use crate::jobs::Job;

fn harness(setup: Setup) -> (Harness, SessionId) {
    let mut harness = Harness::new(setup);
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    (harness, session)
}

fn save(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.reserve(session, keys.len() as u32);
    harness.commit(session, keys, Priority::Normal);
}

fn save_durably(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    save(harness, session, keys);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
}

/// Loads blocks, each of which is available or lost at once; the load is held.
fn load(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) -> (LoadId, Vec<LoadedBlock>) {
    harness.load(session, keys, Duration::ZERO, Scope::Local);
    match &harness.engines[&session].replies.last().expect("a reply").1 {
        Reply::Loaded { load, blocks, .. } => (*load, blocks.clone()),
        other => panic!("not an answer to a load: {other:?}"),
    }
}

/// Overwrites the slot of a loaded block, as another process that maps the region could.
fn scribble(harness: &mut Harness, block: &LoadedBlock) {
    let LoadedBlock::Ok { place: Place::Arena(slot), .. } = block else {
        panic!("a block that is there, not {block:?}")
    };
    harness.memory.write(*slot, &large_layout(), 0..1, u64::MAX >> 20);
}

/// Load of blocks in DRAM, the first of which was damaged afterwards. The engine no longer reads that block.
fn damaged_load(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) -> LoadId {
    let (held, blocks) = load(harness, session, keys);
    scribble(harness, &blocks[0]);
    harness.engines.get_mut(&session).expect("open").ignore_block(held, 0);
    held
}

fn checks(harness: &Harness) -> usize {
    harness.jobs.iter().filter(|job| matches!(job, Job::Check(_))).count()
}

fn source(blocks: &[LoadedBlock], block: usize) -> Option<Source> {
    match &blocks[block] {
        LoadedBlock::Ok { source, .. } => Some(*source),
        LoadedBlock::Lost(_) => None,
    }
}

fn last_statuses(harness: &Harness, session: SessionId) -> Vec<CommitStatus> {
    match &harness.engines[&session].replies.last().expect("a reply").1 {
        Reply::Committed { statuses, .. } => statuses.clone(),
        other => panic!("not an answer to a commit: {other:?}"),
    }
}

#[test]
fn damaged_block_is_dropped_from_dram_and_loaded_from_nvme_again() {
    let (mut harness, session) = harness(Setup::default());
    save_durably(&mut harness, session, &keys(0..2));
    let held = damaged_load(&mut harness, session, &keys(0..2));
    harness.suspect(session, held, vec![0]);
    harness.finish_jobs();
    assert!(matches!(harness.reports[..], [Diagnostic::CorruptMemory { key, .. }] if key == self::key(0)));
    assert!(
        !harness.announced.contains(&(key(0), Tier::Dram))
            && harness.announced.contains(&(key(0), Tier::Nvme))
    );

    harness.load(session, &keys(0..2), Duration::ZERO, Scope::Local);
    harness.finish_jobs();
    let (again, blocks) = load(&mut harness, session, &keys(0..2));
    assert_eq!((source(&blocks, 0), source(&blocks, 1)), (Some(Source::OwnDram), Some(Source::OwnDram)));
    let counters = harness.core.counters();
    assert_eq!((counters.suspect_blocks, counters.dram_corrupt_blocks, counters.device_fills), (1, 1, 1));
    harness.read_all();
    harness.release(session, held);
    harness.release(session, again);
}

#[test]
fn damaged_slot_is_not_reused_while_an_engine_holds_it() {
    let (mut harness, session) = harness(Setup::default());
    save_durably(&mut harness, session, &keys(0..1));
    let held = damaged_load(&mut harness, session, &keys(0..1));
    harness.suspect(session, held, vec![0]);
    harness.finish_jobs();
    assert_eq!(harness.core.counters().arena_used_bytes, large_layout().slot_bytes());
    harness.release(session, held);
    assert_eq!(harness.core.counters().arena_used_bytes, 0);
}

#[test]
fn intact_block_survives_repeated_reports_and_has_one_check_at_a_time() {
    let (mut harness, session) = harness(Setup::default());
    save_durably(&mut harness, session, &keys(0..2));
    let (held, _) = load(&mut harness, session, &keys(0..2));
    for _ in 0..3 {
        harness.suspect(session, held, vec![1, 1, 7]);
    }
    assert_eq!(checks(&harness), 1);
    harness.finish_jobs();
    let (_, blocks) = load(&mut harness, session, &keys(0..2));
    assert_eq!(source(&blocks, 1), Some(Source::OwnDram));
    assert!(harness.reports.is_empty());
    assert_eq!(harness.core.counters().suspect_blocks, 6, "the load has no block 7");
    harness.suspect(session, held, vec![1]);
    assert_eq!(checks(&harness), 1, "an earlier check does not count");
    harness.finish_jobs();
}

#[test]
fn damaged_unsaved_block_is_dropped_after_its_write() {
    let (mut harness, session) = harness(Setup::default());
    save(&mut harness, session, &keys(0..1));
    let held = damaged_load(&mut harness, session, &keys(0..1));
    harness.suspect(session, held, vec![0]);
    assert_eq!(checks(&harness), 1);
    harness.advance(0);
    assert!(harness.announced.contains(&(key(0), Tier::Dram)), "the write is pending");
    harness.release(session, held);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
    assert!(!harness.announced.contains(&(key(0), Tier::Dram)));
    assert_eq!(harness.core.counters().arena_used_bytes, 0);
    // The damaged content was written; the next read detects that, and no engine receives it.
    harness.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    harness.finish_jobs();
    let (_, blocks) = load(&mut harness, session, &keys(0..1));
    assert!(matches!(blocks[0], LoadedBlock::Lost(LossReason::Miss | LossReason::Failed)), "{blocks:?}");
    assert!(harness.announced.is_empty());
}

#[test]
fn commit_replaces_a_suspect_copy_at_once() {
    let (mut harness, session) = harness(Setup { disks: Vec::new(), ..Setup::default() });
    save(&mut harness, session, &keys(0..1));
    let held = damaged_load(&mut harness, session, &keys(0..1));
    harness.suspect(session, held, vec![0]);
    save(&mut harness, session, &keys(0..1));
    assert_eq!(last_statuses(&harness, session), [CommitStatus::Committed]);
    let (again, blocks) = load(&mut harness, session, &keys(0..1));
    assert_eq!(source(&blocks, 0), Some(Source::OwnDram));
    harness.finish_jobs();
    assert!(harness.announced.contains(&(key(0), Tier::Dram)), "the result applies to the old copy");
    harness.release(session, held);
    harness.release(session, again);
    assert_eq!(harness.core.counters().arena_used_bytes, large_layout().slot_bytes());
}

#[test]
fn duplicate_commit_drops_a_suspect_copy_in_favour_of_nvme() {
    let (mut harness, session) = harness(Setup::default());
    save_durably(&mut harness, session, &keys(0..1));
    let held = damaged_load(&mut harness, session, &keys(0..1));
    harness.suspect(session, held, vec![0]);
    save(&mut harness, session, &keys(0..1));
    assert_eq!(last_statuses(&harness, session), [CommitStatus::Duplicate]);
    assert!(!harness.announced.contains(&(key(0), Tier::Dram)));
    harness.finish_jobs();
    harness.release(session, held);
}

#[test]
fn rejects_suspect_report_for_a_load_of_another_session() {
    let (mut harness, session) = harness(Setup::default());
    save_durably(&mut harness, session, &keys(0..1));
    let (held, _) = load(&mut harness, session, &keys(0..1));
    let other = harness.open_session(TenantId::DEFAULT, large_layout());
    harness.suspect(other, held, vec![0]);
    let reply = &harness.engines[&other].replies.last().expect("a reply").1;
    assert!(matches!(reply, Reply::BadRequest(text) if text.contains("holds no load")), "{reply:?}");
    assert_eq!(checks(&harness), 0);
}
