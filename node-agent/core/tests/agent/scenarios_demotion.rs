//! Scenarios: demotion of blocks that are in DRAM only, before DRAM evicts them.

use std::time::Duration;

use reprise_agent_core::event::{Event, Priority, Scope};
use reprise_agent_core::{Counters, Settings};
use reprise_policy::admission::budget::DailyBudget;
use reprise_policy::{BlockKey, SessionId, TenantId, Tier};

use crate::harness::{Harness, Setup, keys, large_layout};

const SECOND: Duration = Duration::from_secs(1);

/// Bytes of a slot on a device, header page included.
const SLOT_BYTES: u64 = 64 << 10;

/// An arena of 16 slots: cold blocks are demoted with less than 2.4 slots of room, warm ones with less than half a
/// slot. The budget admits half of the 64 slots of the device after 15 minutes, and nothing in the first 436 s.
fn harness(settings: Settings) -> (Harness, SessionId) {
    let mut harness = Harness::new(Setup { settings, ..Setup::default() });
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    (harness, session)
}

fn with_budget() -> (Harness, SessionId) {
    let budget = DailyBudget { bytes: 6400 * SLOT_BYTES, burst: 64 * SLOT_BYTES };
    harness(Settings { daily_write_budget: Some(budget), ..Setup::default().settings })
}

fn save(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.reserve(session, keys.len() as u32);
    harness.commit(session, keys, Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
}

fn load(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.load(session, keys, SECOND, Scope::Local);
    harness.finish_jobs();
    let held: Vec<_> = harness.engines[&session].loads.keys().copied().collect();
    held.into_iter().for_each(|load| harness.release(session, load));
}

/// Lets the core act after some time, and completes its operations.
fn settle(harness: &mut Harness, time: Duration) {
    harness.pass(time);
    harness.apply(Event::Tick);
    harness.pass(Duration::from_millis(20));
    harness.finish_jobs();
}

fn stored(harness: &Harness, keys: &[BlockKey]) -> usize {
    keys.iter().filter(|key| harness.announced.contains(&(**key, Tier::Nvme))).count()
}

fn in_memory(harness: &Harness, keys: &[BlockKey]) -> usize {
    keys.iter().filter(|key| harness.announced.contains(&(**key, Tier::Dram))).count()
}

fn counters(harness: &Harness) -> Counters {
    harness.core.counters()
}

#[test]
fn cold_blocks_are_demoted_before_dram_is_full_and_then_evicted_without_loss() {
    let (mut harness, session) = with_budget();
    let saved = keys(0..14);
    save(&mut harness, session, &saved);
    assert_eq!((stored(&harness, &saved), in_memory(&harness, &saved)), (0, 14), "no budget yet");
    settle(&mut harness, 20 * SECOND);
    assert_eq!(stored(&harness, &saved), 0, "idle for less than 30 s: warm");
    settle(&mut harness, 900 * SECOND);
    // Two slots are free. A block has room for 2 slots before it, the next for 3, which is above 15 %.
    assert_eq!((stored(&harness, &saved), in_memory(&harness, &saved)), (1, 14));
    let all = counters(&harness);
    assert_eq!((all.demoted_blocks, all.demoted_emergency_blocks, all.dram_dropped_blocks), (1, 0, 0));
    assert_eq!(all.idle_threshold_micros, 30_000_000);
    // The demoted block is the next victim.
    let demoted: Vec<BlockKey> =
        saved.iter().filter(|key| stored(&harness, &[**key]) == 1).copied().collect();
    harness.reserve(session, 3);
    assert_eq!((in_memory(&harness, &demoted), stored(&harness, &demoted)), (0, 1));
    assert_eq!(counters(&harness).dram_dropped_blocks, 0);
}

#[test]
fn blocks_without_pressure_stay_in_dram_only() {
    let (mut harness, session) = with_budget();
    let saved = keys(0..13);
    save(&mut harness, session, &saved);
    settle(&mut harness, 900 * SECOND);
    assert_eq!(
        (stored(&harness, &saved), in_memory(&harness, &saved)),
        (0, 13),
        "three of 16 slots are free"
    );
}

#[test]
fn warm_block_is_demoted_when_it_is_the_next_victim() {
    let (mut harness, session) = with_budget();
    let saved = keys(0..16);
    // A bucket starts with the overdraft of 32 blocks, of which it gains 31.97.
    harness.pass(436 * SECOND);
    save(&mut harness, session, &saved);
    assert_eq!(stored(&harness, &saved), 0, "no budget yet");
    // Long enough for the budget of one block, and too short for a block to be cold.
    settle(&mut harness, 20 * SECOND);
    let all = counters(&harness);
    assert_eq!((all.demoted_blocks, all.demoted_emergency_blocks), (0, 1), "the next one has a slot of room");
    assert_eq!(stored(&harness, &saved), 1);
    harness.reserve(session, 1);
    assert_eq!((in_memory(&harness, &saved), stored(&harness, &saved)), (15, 1));
    assert_eq!(counters(&harness).dram_dropped_blocks, 0);
    harness.reserve(session, 1);
    assert_eq!(counters(&harness).dram_dropped_blocks, 1, "without a budget, an eviction loses the block");
}

#[test]
fn demotions_are_limited_by_the_budget_that_is_left() {
    let (mut harness, session) = with_budget();
    let saved = keys(0..16);
    harness.pass(380 * SECOND);
    save(&mut harness, session, &saved);
    let refused = counters(&harness).admission_budget_blocks;
    assert_eq!((stored(&harness, &saved), refused), (0, 16), "no budget yet");
    // Three blocks are cold and have less than 2.4 slots of room, but the budget admits one.
    settle(&mut harness, 65 * SECOND);
    let all = counters(&harness);
    assert_eq!((all.demoted_blocks, all.demoted_emergency_blocks, stored(&harness, &saved)), (1, 0, 1));
    assert_eq!(all.admission_budget_blocks, refused, "no demotion was refused");
    harness.reserve(session, 1);
    assert_eq!((in_memory(&harness, &saved), counters(&harness).dram_dropped_blocks), (15, 0));
}

#[test]
fn block_whose_demotion_fails_is_not_the_next_victim() {
    for write_media in [0, 1000] {
        let (mut harness, session) = with_budget();
        let saved = keys(0..14);
        // Chains of one block: the first one is the next victim.
        saved.chunks(1).for_each(|key| save(&mut harness, session, key));
        harness.pass(900 * SECOND);
        harness.faults.write_media = write_media;
        settle(&mut harness, SECOND);
        let durable = stored(&harness, &saved[..1]);
        assert_eq!(durable, if write_media == 0 { 1 } else { 0 });
        assert_eq!(counters(&harness).demoted_blocks, durable as u64, "counted once it is durable");
        // Two slots are free; the third one is that of the next victim.
        harness.reserve(session, 3);
        assert_eq!(in_memory(&harness, &saved[..1]), 1 - durable, "the only copy stays");
        assert_eq!(in_memory(&harness, &saved), 13);
    }
}

#[test]
fn threshold_follows_the_times_between_uses() {
    let (mut harness, session) = with_budget();
    save(&mut harness, session, &keys(0..14));
    for _ in 0..10 {
        harness.pass(2 * SECOND);
        load(&mut harness, session, &keys(0..14));
    }
    let tau = counters(&harness).idle_threshold_micros;
    assert!((2_000_000..2_600_000).contains(&tau), "{tau} µs for uses every 2 s");
}

#[test]
fn loaded_block_is_promoted_to_dram_again() {
    let (mut harness, session) = with_budget();
    save(&mut harness, session, &keys(0..14));
    settle(&mut harness, 900 * SECOND);
    let demoted: Vec<BlockKey> =
        keys(0..14).into_iter().filter(|key| stored(&harness, &[*key]) == 1).collect();
    harness.reserve(session, 3);
    assert_eq!(in_memory(&harness, &demoted), 0);
    load(&mut harness, session, &demoted);
    assert_eq!((in_memory(&harness, &demoted), stored(&harness, &demoted)), (demoted.len(), demoted.len()));
}

#[test]
fn unshared_blocks_skip_dram_under_pressure_if_enabled() {
    for skip_dram in [false, true] {
        let (mut harness, session) = harness(Settings { skip_dram, ..Setup::default().settings });
        let (old, new) = (keys(0..12), keys(20..23));
        save(&mut harness, session, &old);
        load(&mut harness, session, &old);
        save(&mut harness, session, &new);
        assert_eq!((stored(&harness, &new), in_memory(&harness, &new)), (3, 3));
        assert_eq!(counters(&harness).skipped_dram_blocks, if skip_dram { 3 } else { 0 });
        // One slot is free; the second evicts a block.
        harness.reserve(session, 2);
        let left = if skip_dram { (2, 12) } else { (3, 11) };
        assert_eq!((in_memory(&harness, &new), in_memory(&harness, &old)), left, "skip_dram = {skip_dram}");
    }
}
