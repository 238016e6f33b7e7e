//! Scenarios: devices that are detached and attached at run time.

use std::time::Duration;

use reprise_agent_core::effect::DeviceId;
use reprise_agent_core::event::{Event, Priority, Request, Scope};
use reprise_policy::{BlockKey, SessionId, TenantId, Tier};

use crate::engine::RequestKind;
use crate::harness::{Harness, Setup, keys, large_layout};
use crate::jobs::Job;

const FIRST: DeviceId = DeviceId(0);
const SECOND: DeviceId = DeviceId(1);

fn with_disks(disks: usize) -> (Harness, SessionId) {
    let mut harness = Harness::new(Setup { disks: vec![16 << 20; disks], ..Setup::default() });
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    (harness, session)
}

fn commit(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.reserve(session, keys.len() as u32);
    harness.commit(session, keys, Priority::Normal);
}

fn save_durably(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    commit(harness, session, keys);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
}

fn trim(harness: &mut Harness, session: SessionId) {
    harness.request(session, RequestKind::Other, Request::Trim);
}

fn stored(harness: &Harness, keys: &[BlockKey]) -> usize {
    keys.iter().filter(|key| harness.announced.contains(&(**key, Tier::Nvme))).count()
}

fn in_memory(harness: &Harness, keys: &[BlockKey]) -> usize {
    keys.iter().filter(|key| harness.announced.contains(&(**key, Tier::Dram))).count()
}

#[test]
fn detached_device_removes_its_blocks_and_restores_them_when_attached() {
    let (mut harness, session) = with_disks(1);
    let saved = keys(0..8);
    save_durably(&mut harness, session, &saved);
    trim(&mut harness, session);
    harness.detach(FIRST);
    assert_eq!((stored(&harness, &saved), harness.released.contains(&FIRST)), (0, true));
    assert_eq!(harness.core.counters().devices_lost, 0, "no device was lost");
    assert_eq!(harness.core.counters().pool_capacity_bytes, 0);
    harness.attach(FIRST);
    assert_eq!(stored(&harness, &saved), 8);
    harness.load(session, &saved, Duration::ZERO, Scope::Local);
    harness.finish_jobs();
    harness.read_all();
    assert_eq!(in_memory(&harness, &saved), 8);
}

#[test]
fn dram_copies_survive_a_detached_device_and_are_durable_again_when_it_is_attached() {
    let (mut harness, session) = with_disks(1);
    let saved = keys(0..8);
    save_durably(&mut harness, session, &saved);
    harness.detach(FIRST);
    assert_eq!((stored(&harness, &saved), in_memory(&harness, &saved)), (0, 8));
    harness.attach(FIRST);
    assert_eq!((stored(&harness, &saved), in_memory(&harness, &saved)), (8, 8));
    let before = harness.core.counters().writeback_batches;
    harness.pass(Duration::from_secs(1));
    harness.finish_jobs();
    assert_eq!(harness.core.counters().writeback_batches, before, "stored blocks are not written again");
}

#[test]
fn number_is_released_after_the_last_operation_of_its_device() {
    let (mut harness, session) = with_disks(1);
    let saved = keys(0..4);
    save_durably(&mut harness, session, &saved);
    trim(&mut harness, session);
    // Before the load, because writes wait for reads.
    commit(&mut harness, session, &keys(100..104));
    harness.pass(Duration::from_millis(6));
    harness.load(session, &saved[..1], Duration::from_secs(1), Scope::Local);
    assert!(harness.jobs.iter().any(|job| matches!(job, Job::Read { .. })));
    assert!(harness.jobs.iter().any(|job| matches!(job, Job::Device { .. })));
    harness.detach(FIRST);
    assert!(harness.released.is_empty(), "the device has reads and writes in flight");
    harness.finish_device_ops();
    assert!(harness.released.is_empty(), "the device has reads in flight");
    harness.finish_jobs();
    assert!(harness.released.contains(&FIRST));
    let notices = &harness.engines[&session].notices;
    assert_eq!(notices.last().expect("the save has ended").1, 0, "nothing is durable without a device");
    assert_eq!(in_memory(&harness, &keys(100..104)), 4, "unsaved blocks remain in DRAM");
}

#[test]
fn blocks_in_flight_on_a_detached_device_are_written_to_another() {
    let (mut harness, session) = with_disks(2);
    let saved = keys(0..4);
    commit(&mut harness, session, &saved);
    harness.pass(Duration::from_millis(6));
    harness.detach(FIRST);
    harness.finish_jobs();
    harness.pass(Duration::from_secs(1));
    harness.finish_jobs();
    assert_eq!(stored(&harness, &saved), 4);
    for key in &saved {
        assert_eq!(harness.core.describe(key).expect("the block is here").nvme, Some(SECOND));
    }
}

#[test]
fn second_copy_of_a_block_on_another_device_is_freed() {
    let (mut harness, session) = with_disks(2);
    harness.detach(SECOND);
    let saved = keys(0..4);
    save_durably(&mut harness, session, &saved);
    harness.detach(FIRST);
    harness.attach(SECOND);
    trim(&mut harness, session);
    save_durably(&mut harness, session, &saved);
    assert_eq!(harness.core.describe(&saved[0]).expect("the block is here").nvme, Some(SECOND));
    harness.attach(FIRST);
    harness.finish_jobs();
    assert_eq!(harness.core.describe(&saved[0]).expect("the block is here").nvme, Some(SECOND));
    let used = 4 * (large_layout().slot_bytes() + 4096);
    assert_eq!(harness.core.counters().pool_used_bytes, used, "each block once");
}

#[test]
fn lost_device_can_be_released_and_replaced() {
    let (mut harness, session) = with_disks(1);
    save_durably(&mut harness, session, &keys(0..4));
    harness.apply(Event::DeviceLost { device: FIRST, reason: "pulled".to_owned() });
    harness.detach(FIRST);
    assert!(harness.released.contains(&FIRST));
    harness.attach(FIRST);
    assert_eq!(stored(&harness, &keys(0..4)), 4);
    assert_eq!(harness.core.counters().devices_lost, 1);
}

#[test]
fn changed_free_share_takes_effect_at_once() {
    let (mut harness, session) = with_disks(1);
    for start in (0..240).step_by(4) {
        save_durably(&mut harness, session, &keys(start..start + 4));
    }
    let free = |harness: &Harness| {
        let counters = harness.core.counters();
        1000 * counters.pool_free_bytes / counters.pool_capacity_bytes
    };
    let before = free(&harness);
    harness.apply(Event::PoolFree { permille: 600 });
    harness.finish_jobs();
    assert!(before < 500 && free(&harness) >= 600, "{before} thousandths were free, now {}", free(&harness));
}
