//! Blocks that were damaged in DRAM: one behaviour at a time.

use std::time::Duration;

use reprise_agent_core::effect::{CommitStatus, LoadId, LoadedBlock, LossReason, Reply, Report, Source};
use reprise_agent_core::event::{Priority, Scope};
use reprise_policy::{BlockKey, SessionId, TenantId, Tier};

use crate::jobs::Job;
use crate::world::{Setup, World, key, keys, large_layout};

fn world(setup: Setup) -> (World, SessionId) {
    let mut world = World::new(setup);
    let session = world.open_session(TenantId::DEFAULT, large_layout());
    (world, session)
}

fn save(world: &mut World, session: SessionId, keys: &[BlockKey]) {
    world.reserve(session, keys.len() as u32);
    world.commit(session, keys, Priority::Normal);
}

fn save_durably(world: &mut World, session: SessionId, keys: &[BlockKey]) {
    save(world, session, keys);
    world.pass(Duration::from_millis(6));
    world.finish_jobs();
}

/// Loads blocks, all of which are there or not at once; the load is held.
fn load(world: &mut World, session: SessionId, keys: &[BlockKey]) -> (LoadId, Vec<LoadedBlock>) {
    world.load(session, keys, Duration::ZERO, Scope::Local);
    match &world.engines[&session].replies.last().expect("a reply").1 {
        Reply::Loaded { load, blocks, .. } => (*load, blocks.clone()),
        other => panic!("not an answer to a load: {other:?}"),
    }
}

/// Something that maps the region writes into the slot of a loaded block, past its engine's eyes.
fn scribble(world: &mut World, block: &LoadedBlock) {
    let LoadedBlock::Ok { slot, .. } = block else { panic!("a block that is there, not {block:?}") };
    world.memory.write(*slot, &large_layout(), 0..1, u64::MAX >> 20);
}

/// A load of blocks in DRAM, the first of which has been damaged since. The engine has stopped looking at it.
fn damaged_load(world: &mut World, session: SessionId, keys: &[BlockKey]) -> LoadId {
    let (held, blocks) = load(world, session, keys);
    scribble(world, &blocks[0]);
    world.engines.get_mut(&session).expect("open").give_up_on(held, 0);
    held
}

fn checks(world: &World) -> usize {
    world.jobs.iter().filter(|job| matches!(job, Job::Check(_))).count()
}

fn source(blocks: &[LoadedBlock], block: usize) -> Option<Source> {
    match &blocks[block] {
        LoadedBlock::Ok { source, .. } => Some(*source),
        LoadedBlock::Lost(_) => None,
    }
}

fn last_statuses(world: &World, session: SessionId) -> Vec<CommitStatus> {
    match &world.engines[&session].replies.last().expect("a reply").1 {
        Reply::Committed { statuses, .. } => statuses.clone(),
        other => panic!("not an answer to a commit: {other:?}"),
    }
}

#[test]
fn a_damaged_block_is_dropped_from_dram_and_found_on_nvme_again() {
    let (mut world, session) = world(Setup::default());
    save_durably(&mut world, session, &keys(0..2));
    let held = damaged_load(&mut world, session, &keys(0..2));
    world.suspect(session, held, vec![0]);
    world.finish_jobs();
    assert!(matches!(world.reports[..], [Report::CorruptMemory { key, .. }] if key == self::key(0)));
    assert!(
        !world.announced.contains(&(key(0), Tier::Dram)) && world.announced.contains(&(key(0), Tier::Nvme))
    );

    world.load(session, &keys(0..2), Duration::ZERO, Scope::Local);
    world.finish_jobs();
    let (again, blocks) = load(&mut world, session, &keys(0..2));
    assert_eq!((source(&blocks, 0), source(&blocks, 1)), (Some(Source::OwnDram), Some(Source::OwnDram)));
    let counters = world.core.counters();
    assert_eq!((counters.suspect_blocks, counters.dram_corrupt_blocks, counters.device_fills), (1, 1, 1));
    world.read_all();
    world.release(session, held);
    world.release(session, again);
}

#[test]
fn a_slot_that_was_found_damaged_is_nobody_elses_while_the_engine_holds_it() {
    let (mut world, session) = world(Setup::default());
    save_durably(&mut world, session, &keys(0..1));
    let held = damaged_load(&mut world, session, &keys(0..1));
    world.suspect(session, held, vec![0]);
    world.finish_jobs();
    assert_eq!(world.core.counters().arena_used_bytes, large_layout().slot_bytes());
    world.release(session, held);
    assert_eq!(world.core.counters().arena_used_bytes, 0);
}

#[test]
fn an_intact_block_stays_however_often_it_is_suspected_and_is_checked_once_at_a_time() {
    let (mut world, session) = world(Setup::default());
    save_durably(&mut world, session, &keys(0..2));
    let (held, _) = load(&mut world, session, &keys(0..2));
    for _ in 0..3 {
        world.suspect(session, held, vec![1, 1, 7]);
    }
    assert_eq!(checks(&world), 1);
    world.finish_jobs();
    let (_, blocks) = load(&mut world, session, &keys(0..2));
    assert_eq!(source(&blocks, 1), Some(Source::OwnDram));
    assert!(world.reports.is_empty());
    assert_eq!(world.core.counters().suspect_blocks, 6, "block 7 is none of the load's");
    world.suspect(session, held, vec![1]);
    assert_eq!(checks(&world), 1, "an older verdict says nothing of now");
    world.finish_jobs();
}

#[test]
fn a_block_that_is_not_saved_yet_is_dropped_when_its_write_has_ended() {
    let (mut world, session) = world(Setup::default());
    save(&mut world, session, &keys(0..1));
    let held = damaged_load(&mut world, session, &keys(0..1));
    world.suspect(session, held, vec![0]);
    assert_eq!(checks(&world), 1);
    world.advance(0);
    assert!(world.announced.contains(&(key(0), Tier::Dram)), "the write is still to come");
    world.release(session, held);
    world.pass(Duration::from_millis(6));
    world.finish_jobs();
    assert!(!world.announced.contains(&(key(0), Tier::Dram)));
    assert_eq!(world.core.counters().arena_used_bytes, 0);
    // What was written is what was in memory: reading it finds that out, and nobody is given it.
    world.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    world.finish_jobs();
    let (_, blocks) = load(&mut world, session, &keys(0..1));
    assert!(matches!(blocks[0], LoadedBlock::Lost(LossReason::Miss | LossReason::Failed)), "{blocks:?}");
    assert!(world.announced.is_empty());
}

#[test]
fn a_block_that_was_computed_anew_takes_the_place_of_the_doubted_one_at_once() {
    let (mut world, session) = world(Setup { disks: Vec::new(), ..Setup::default() });
    save(&mut world, session, &keys(0..1));
    let held = damaged_load(&mut world, session, &keys(0..1));
    world.suspect(session, held, vec![0]);
    save(&mut world, session, &keys(0..1));
    assert_eq!(last_statuses(&world, session), [CommitStatus::Committed]);
    let (again, blocks) = load(&mut world, session, &keys(0..1));
    assert_eq!(source(&blocks, 0), Some(Source::OwnDram));
    world.finish_jobs();
    assert!(world.announced.contains(&(key(0), Tier::Dram)), "the verdict is on the old copy");
    world.release(session, held);
    world.release(session, again);
    assert_eq!(world.core.counters().arena_used_bytes, large_layout().slot_bytes());
}

#[test]
fn a_doubted_copy_makes_way_for_the_one_on_nvme_when_the_block_is_committed_again() {
    let (mut world, session) = world(Setup::default());
    save_durably(&mut world, session, &keys(0..1));
    let held = damaged_load(&mut world, session, &keys(0..1));
    world.suspect(session, held, vec![0]);
    save(&mut world, session, &keys(0..1));
    assert_eq!(last_statuses(&world, session), [CommitStatus::Duplicate]);
    assert!(!world.announced.contains(&(key(0), Tier::Dram)));
    world.finish_jobs();
    world.release(session, held);
}

#[test]
fn suspicion_of_a_load_that_is_not_the_sessions_is_refused_with_words() {
    let (mut world, session) = world(Setup::default());
    save_durably(&mut world, session, &keys(0..1));
    let (held, _) = load(&mut world, session, &keys(0..1));
    let other = world.open_session(TenantId::DEFAULT, large_layout());
    world.suspect(other, held, vec![0]);
    let reply = &world.engines[&other].replies.last().expect("a reply").1;
    assert!(matches!(reply, Reply::BadRequest(text) if text.contains("holds no load")), "{reply:?}");
    assert_eq!(checks(&world), 0);
}
