//! Devices that are closed and opened while the agent works: one behaviour at a time.

use std::time::Duration;

use reprise_agent_core::effect::DeviceId;
use reprise_agent_core::event::{Event, Priority, Request, Scope};
use reprise_policy::{BlockKey, SessionId, TenantId, Tier};

use crate::engine::Asked;
use crate::jobs::Job;
use crate::world::{Setup, World, keys, large_layout};

const FIRST: DeviceId = DeviceId(0);
const SECOND: DeviceId = DeviceId(1);

fn with_disks(disks: usize) -> (World, SessionId) {
    let mut world = World::new(Setup { disks: vec![16 << 20; disks], ..Setup::default() });
    let session = world.open_session(TenantId::DEFAULT, large_layout());
    (world, session)
}

fn commit(world: &mut World, session: SessionId, keys: &[BlockKey]) {
    world.reserve(session, keys.len() as u32);
    world.commit(session, keys, Priority::Normal);
}

fn save_durably(world: &mut World, session: SessionId, keys: &[BlockKey]) {
    commit(world, session, keys);
    world.pass(Duration::from_millis(6));
    world.finish_jobs();
}

fn trim(world: &mut World, session: SessionId) {
    world.request(session, Asked::Other, Request::Trim);
}

fn stored(world: &World, keys: &[BlockKey]) -> usize {
    keys.iter().filter(|key| world.announced.contains(&(**key, Tier::Nvme))).count()
}

fn in_memory(world: &World, keys: &[BlockKey]) -> usize {
    keys.iter().filter(|key| world.announced.contains(&(**key, Tier::Dram))).count()
}

#[test]
fn a_device_that_is_closed_takes_its_blocks_along_and_brings_them_back() {
    let (mut world, session) = with_disks(1);
    let saved = keys(0..8);
    save_durably(&mut world, session, &saved);
    trim(&mut world, session);
    world.detach(FIRST);
    assert_eq!((stored(&world, &saved), world.released.contains(&FIRST)), (0, true));
    assert_eq!(world.core.counters().devices_lost, 0, "nobody has lost it");
    assert_eq!(world.core.counters().pool_capacity_bytes, 0);
    world.attach(FIRST);
    assert_eq!(stored(&world, &saved), 8);
    world.load(session, &saved, Duration::ZERO, Scope::Local);
    world.finish_jobs();
    world.read_all();
    assert_eq!(in_memory(&world, &saved), 8);
}

#[test]
fn copies_in_memory_survive_a_closed_device_and_are_durable_again_when_it_is_back() {
    let (mut world, session) = with_disks(1);
    let saved = keys(0..8);
    save_durably(&mut world, session, &saved);
    world.detach(FIRST);
    assert_eq!((stored(&world, &saved), in_memory(&world, &saved)), (0, 8));
    world.attach(FIRST);
    assert_eq!((stored(&world, &saved), in_memory(&world, &saved)), (8, 8));
    let before = world.core.counters().writeback_batches;
    world.pass(Duration::from_secs(1));
    world.finish_jobs();
    assert_eq!(world.core.counters().writeback_batches, before, "what is there is not written again");
}

#[test]
fn a_number_is_free_when_the_last_operation_of_its_device_has_ended() {
    let (mut world, session) = with_disks(1);
    let saved = keys(0..4);
    save_durably(&mut world, session, &saved);
    trim(&mut world, session);
    world.load(session, &saved[..1], Duration::from_secs(1), Scope::Local);
    commit(&mut world, session, &keys(100..104));
    world.pass(Duration::from_millis(6));
    assert!(world.jobs.iter().any(|job| matches!(job, Job::Read { .. })));
    assert!(world.jobs.iter().any(|job| matches!(job, Job::Device { .. })));
    world.detach(FIRST);
    assert!(world.released.is_empty(), "it still reads and writes");
    world.finish_device_ops();
    assert!(world.released.is_empty(), "it still reads");
    world.finish_jobs();
    assert!(world.released.contains(&FIRST));
    let notices = &world.engines[&session].notices;
    assert_eq!(notices.last().expect("the save has ended").1, 0, "nothing is durable without a device");
    assert_eq!(in_memory(&world, &keys(100..104)), 4, "what was to be written is still there");
}

#[test]
fn what_a_closed_device_was_writing_is_written_to_another() {
    let (mut world, session) = with_disks(2);
    let saved = keys(0..4);
    commit(&mut world, session, &saved);
    world.pass(Duration::from_millis(6));
    world.detach(FIRST);
    world.finish_jobs();
    world.pass(Duration::from_secs(1));
    world.finish_jobs();
    assert_eq!(stored(&world, &saved), 4);
    for key in &saved {
        assert_eq!(world.core.describe(key).expect("it is here").nvme, Some(SECOND));
    }
}

#[test]
fn of_two_copies_on_two_devices_the_one_that_comes_later_is_ended() {
    let (mut world, session) = with_disks(2);
    world.detach(SECOND);
    let saved = keys(0..4);
    save_durably(&mut world, session, &saved);
    world.detach(FIRST);
    world.attach(SECOND);
    trim(&mut world, session);
    save_durably(&mut world, session, &saved);
    assert_eq!(world.core.describe(&saved[0]).expect("it is here").nvme, Some(SECOND));
    world.attach(FIRST);
    world.finish_jobs();
    assert_eq!(world.core.describe(&saved[0]).expect("it is here").nvme, Some(SECOND));
    let used = 4 * (large_layout().slot_bytes() + 4096);
    assert_eq!(world.core.counters().pool_used_bytes, used, "each block once");
}

#[test]
fn a_lost_device_is_released_like_any_other_and_may_be_replaced() {
    let (mut world, session) = with_disks(1);
    save_durably(&mut world, session, &keys(0..4));
    world.apply(Event::DeviceLost { device: FIRST, reason: "pulled".to_owned() });
    world.detach(FIRST);
    assert!(world.released.contains(&FIRST));
    world.attach(FIRST);
    assert_eq!(stored(&world, &keys(0..4)), 4);
    assert_eq!(world.core.counters().devices_lost, 1);
}

#[test]
fn another_share_that_is_kept_free_takes_effect_at_once() {
    let (mut world, session) = with_disks(1);
    for start in (0..240).step_by(4) {
        save_durably(&mut world, session, &keys(start..start + 4));
    }
    let free = |world: &World| {
        let counters = world.core.counters();
        1000 * counters.pool_free_bytes / counters.pool_capacity_bytes
    };
    let before = free(&world);
    world.apply(Event::PoolFree { permille: 600 });
    world.finish_jobs();
    assert!(before < 500 && free(&world) >= 600, "{before} thousandths were free, now {}", free(&world));
}
