//! Devices that fill up, fail or rot: one behaviour at a time.

use std::time::Duration;

use reprise_agent_core::agent::Settings;
use reprise_agent_core::effect::{DeviceId, LoadedBlock, LossReason, Report};
use reprise_agent_core::event::{Event, FillError, Priority, Request, Scope};
use reprise_agent_core::pool::DeviceOpKind;
use reprise_policy::{BlockKey, Parts, SessionId, TenantId, Tier};

use crate::engine::Asked;
use crate::jobs::Job;
use crate::world::{Faults, Setup, World, key, keys, large_layout, layout};

fn with(setup: Setup) -> (World, SessionId) {
    let mut world = World::new(setup);
    let session = world.open_session(TenantId::DEFAULT, large_layout());
    (world, session)
}

fn save_durably(world: &mut World, session: SessionId, keys: &[BlockKey]) {
    world.reserve(session, keys.len() as u32);
    world.commit(session, keys, Priority::Normal);
    world.pass(Duration::from_millis(6));
    world.finish_jobs();
}

fn trim(world: &mut World, session: SessionId) {
    world.request(session, Asked::Other, Request::Trim);
}

fn on_nvme(world: &World, key: BlockKey) -> bool {
    world.announced.contains(&(key, Tier::Nvme))
}

#[test]
fn room_is_made_on_devices_before_it_is_needed() {
    let settings = Settings { pool_free_permille: 250, ..Setup::default().settings };
    let (mut world, session) = with(Setup { disks: vec![8 << 20], settings, ..Setup::default() });
    for start in (0..200).step_by(4) {
        save_durably(&mut world, session, &keys(start..start + 4));
        let counters = world.core.counters();
        assert!(counters.pool_free_bytes * 4 >= counters.pool_capacity_bytes, "a quarter stays free");
    }
    let notices = &world.engines[&session].notices;
    assert!(notices.iter().all(|(_, durable, _)| *durable == 4), "nothing was lost for want of room");
    assert!(!on_nvme(&world, key(0)) && on_nvme(&world, key(199)), "the oldest went");
}

#[test]
fn a_block_is_not_evicted_from_its_device_while_it_is_read() {
    let settings = Settings { pool_free_permille: 500, ..Setup::default().settings };
    let (mut world, session) = with(Setup { disks: vec![8 << 20], settings, ..Setup::default() });
    save_durably(&mut world, session, &keys(0..4));
    trim(&mut world, session);
    world.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    for start in (100..200).step_by(4) {
        world.reserve(session, 4);
        world.commit(session, &keys(start..start + 4), Priority::Normal);
        world.pass(Duration::from_millis(1));
        world.finish_device_ops();
    }
    assert!(!on_nvme(&world, key(1)), "its neighbours went");
    assert!(on_nvme(&world, key(0)));
    world.finish_jobs();
    world.read_all();
    assert!(world.announced.contains(&(key(0), Tier::Dram)));
}

#[test]
fn a_block_larger_than_every_segment_is_lost_at_once_and_evicts_nothing() {
    let slot = 4 << 20;
    let (mut world, session) = with(Setup { region_bytes: slot, ..Setup::default() });
    save_durably(&mut world, session, &keys(0..4));
    let huge = layout(32, Parts::KeyValue, 2048);
    assert_eq!(huge.slot_bytes(), slot);
    let other = world.open_session(TenantId::DEFAULT, huge);
    world.reserve(other, 1);
    world.commit(other, &keys(500..501), Priority::Normal);
    assert_eq!(world.engines[&other].notices[0].2, keys(500..501));
    assert_eq!(world.core.counters().nvme_evictions, 0);
}

/// 32 large blocks fill a segment of 2 MiB.
const SEGMENT_BLOCKS: u64 = 32;

/// A pool that is full of large blocks, and a session of another slot size with this many slots to fill.
fn full_of_another_size(wide_slots: u32) -> (World, SessionId, SessionId) {
    let (mut world, session) = with(Setup { disks: vec![8 << 20], ..Setup::default() });
    for start in (0..200).step_by(4) {
        save_durably(&mut world, session, &keys(start..start + 4));
    }
    let wide = layout(4, Parts::KeyValue, 480);
    assert_eq!(wide.slot_bytes(), 2 * large_layout().slot_bytes());
    let other = world.open_session(TenantId::DEFAULT, wide);
    world.reserve(other, wide_slots);
    (world, session, other)
}

#[test]
fn another_slot_size_costs_a_full_pool_one_segment_of_its_coldest_blocks() {
    let (mut world, _, other) = full_of_another_size(2);
    let before = world.core.counters().nvme_evictions;
    let stored: Vec<u64> = (0..200).filter(|number| on_nvme(&world, key(*number))).collect();
    world.commit(other, &keys(500..502), Priority::Normal);
    world.pass(Duration::from_millis(6));
    world.finish_jobs();
    assert_eq!(world.engines[&other].notices[0].1, 2);
    let evicted = world.core.counters().nvme_evictions - before;
    assert!(evicted <= SEGMENT_BLOCKS, "{evicted} blocks went for two");
    assert!(!on_nvme(&world, key(stored[0])), "the coldest block's segment");
}

#[test]
fn blocks_of_a_size_that_has_slots_pass_those_that_wait_for_a_segment() {
    let (mut world, session, other) = full_of_another_size(2);
    world.reserve(session, 2);
    world.commit(other, &keys(500..502), Priority::Normal);
    world.commit(session, &keys(300..302), Priority::Normal);
    world.pass(Duration::from_millis(6));
    let writes = |job: &&Job| match job {
        Job::Device { op, .. } => matches!(op.kind, DeviceOpKind::WriteBlock { .. }),
        _ => false,
    };
    assert_eq!(world.jobs.iter().filter(writes).count(), 2, "the first size goes on");
    assert!(world.engines[&other].notices.is_empty());
    world.finish_jobs();
    assert_eq!(world.engines[&session].notices.last().expect("a notice").1, 2);
    assert_eq!(world.engines[&other].notices[0].1, 2);
}

#[test]
fn a_stream_of_one_size_does_not_starve_another() {
    let (mut world, session, other) = full_of_another_size(2);
    world.commit(other, &keys(500..502), Priority::Normal);
    let mut next = 300;
    while world.engines[&other].notices.is_empty() {
        world.reserve(session, 2);
        world.commit(session, &keys(next..next + 2), Priority::Normal);
        world.pass(Duration::from_millis(2));
        // Something of the first size is always under way.
        for _ in 0..world.jobs.len().min(6) {
            world.advance(0);
        }
        next += 2;
        assert!(next < 400, "fifty commits later nothing is durable");
    }
    world.finish_jobs();
    assert_eq!(world.engines[&other].notices[0].1, 2);
    assert!(world.core.counters().nvme_evictions < 200, "no more than the stream and a segment or two");
}

#[test]
fn a_segment_with_a_block_that_is_read_is_not_emptied() {
    let (mut world, session, other) = full_of_another_size(2);
    trim(&mut world, session);
    // Blocks that were saved together lie in one segment, the coldest whole group in the one that goes next.
    let is_whole = |first: &u64| (*first..*first + 4).all(|number| on_nvme(&world, key(number)));
    let read = (0..200).step_by(4).find(is_whole).expect("a full pool");
    world.load(session, &keys(read..read + 1), Duration::ZERO, Scope::Local);
    world.commit(other, &keys(500..502), Priority::Normal);
    world.pass(Duration::from_millis(6));
    assert!((read..read + 4).all(|number| on_nvme(&world, key(number))));
    world.finish_jobs();
    world.read_all();
    assert_eq!(world.engines[&other].notices[0].1, 2);
}

#[test]
fn a_failed_write_is_tried_in_another_slot() {
    let faults = Faults { write_media: 1000, ..Faults::default() };
    let (mut world, session) = with(Setup { faults, ..Setup::default() });
    world.reserve(session, 1);
    world.commit(session, &keys(0..1), Priority::Normal);
    world.pass(Duration::from_millis(6));
    world.advance(0);
    world.faults.write_media = 0;
    world.finish_jobs();
    assert_eq!(world.engines[&session].notices[0].1, 1);
    assert_eq!(world.core.counters().pool_quarantined_slots, 1);
}

#[test]
fn a_block_whose_writes_keep_failing_is_lost_and_stays_cached() {
    let faults = Faults { write_media: 1000, ..Faults::default() };
    let (mut world, session) = with(Setup { faults, ..Setup::default() });
    save_durably(&mut world, session, &keys(0..1));
    assert_eq!(world.engines[&session].notices[0].2, keys(0..1));
    assert!(world.announced.contains(&(key(0), Tier::Dram)));
    assert_eq!(world.core.counters().write_failures, 3);
}

#[test]
fn a_rotten_block_is_reported_withdrawn_and_never_read_again() {
    let (mut world, session) = with(Setup::default());
    save_durably(&mut world, session, &keys(0..2));
    trim(&mut world, session);
    world.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    let Job::Read { read, .. } = &world.jobs[0] else { panic!("a read") };
    let page = read.page;
    world.disks[0].rot(page);
    world.finish_jobs();
    let (_, held) = world.engines[&session].loads.iter().next().expect("answered");
    assert!(matches!(held.blocks[0], LoadedBlock::Lost(LossReason::Failed)));
    assert_eq!(world.reports, [Report::CorruptBlock { device: DeviceId(0), page, key: key(0) }]);
    assert!(!on_nvme(&world, key(0)) && on_nvme(&world, key(1)));
    let mut world = world.crash();
    let session = world.open_session(TenantId::DEFAULT, large_layout());
    world.load(session, &keys(0..2), Duration::ZERO, Scope::Local);
    world.finish_jobs();
    let (_, held) = world.engines[&session].loads.iter().next().expect("answered");
    assert!(matches!(held.blocks[0], LoadedBlock::Lost(LossReason::Miss)), "also after a restart");
    assert!(matches!(held.blocks[1], LoadedBlock::Ok { .. }));
}

#[test]
fn blocks_whose_checksums_were_wrong_from_the_beginning_use_up_no_slot() {
    let (mut world, session) = with(Setup::default());
    for start in (0..400).step_by(4) {
        save_durably(&mut world, session, &keys(start..start + 4));
        trim(&mut world, session);
        world.load(session, &keys(start..start + 4), Duration::ZERO, Scope::Local);
        while let Some(job) = world.fills().first().copied() {
            world.fail(job, FillError::Corrupt);
        }
        let load = *world.engines[&session].loads.keys().next().expect("answered");
        world.release(session, load);
    }
    world.finish_jobs();
    let counters = world.core.counters();
    assert_eq!((counters.corrupt_blocks, counters.pool_quarantined_slots), (400, 0));
    assert_eq!((counters.pool_used_bytes, counters.devices_lost), (0, 0), "the pool is as it was");
    let notices = &world.engines[&session].notices;
    assert!(notices.iter().all(|(_, durable, _)| *durable == 4));
}

#[test]
fn a_slot_that_the_device_cannot_read_is_never_used_again() {
    let (mut world, session) = with(Setup::default());
    save_durably(&mut world, session, &keys(0..1));
    trim(&mut world, session);
    world.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    world.fail(0, FillError::Device);
    world.finish_jobs();
    assert_eq!(world.core.counters().pool_quarantined_slots, 1);
    assert_eq!(world.crash().core.counters().pool_quarantined_slots, 1);
}

#[test]
fn a_lost_device_takes_its_blocks_along_but_not_their_copies_in_memory() {
    let (mut world, session) = with(Setup { disks: vec![8 << 20, 8 << 20], ..Setup::default() });
    save_durably(&mut world, session, &keys(0..8));
    let before = world.core.counters().nvme_blocks;
    world.faults.device_lost = 1000;
    world.reserve(session, 1);
    world.commit(session, &keys(8..9), Priority::Normal);
    world.pass(Duration::from_millis(6));
    world.advance(0);
    world.faults.device_lost = 0;
    assert!(matches!(world.reports[..], [Report::DeviceLost { .. }]));
    world.finish_jobs();
    let counters = world.core.counters();
    assert_eq!((before, counters.nvme_blocks, counters.dram_blocks), (8, 5, 9));
    assert_eq!(world.engines[&session].notices.last().expect("a notice").1, 1, "the other device takes over");
}

#[test]
fn a_device_that_reads_nothing_any_more_is_given_up() {
    let (mut world, session) = with(Setup::default());
    for start in (0..20).step_by(4) {
        save_durably(&mut world, session, &keys(start..start + 4));
    }
    trim(&mut world, session);
    world.load(session, &keys(0..16), Duration::ZERO, Scope::Local);
    while let Some(job) = world.fills().first().copied() {
        world.fail(job, FillError::Device);
    }
    assert!(matches!(&world.reports[..], [Report::DeviceLost { reason, .. }] if reason.contains("16 reads")));
    assert_eq!(world.core.counters().nvme_blocks, 0);
    save_durably(&mut world, session, &keys(100..101));
    assert_eq!(world.engines[&session].notices.last().expect("a notice").2, keys(100..101));
}

#[test]
fn a_device_that_the_runtime_has_lost_is_reported_once_with_its_reason() {
    let (mut world, session) = with(Setup::default());
    save_durably(&mut world, session, &keys(0..2));
    trim(&mut world, session);
    world.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    let reason = "the cable".to_owned();
    world.apply(Event::DeviceLost { device: DeviceId(0), reason: reason.clone() });
    assert!(!on_nvme(&world, key(0)) && !on_nvme(&world, key(1)));
    let job = world.fills()[0];
    world.fail(job, FillError::Device);
    world.apply(Event::DeviceLost { device: DeviceId(0), reason: "again".to_owned() });
    assert_eq!(world.reports, [Report::DeviceLost { device: DeviceId(0), reason }]);
    assert_eq!(world.core.counters().pool_quarantined_slots, 0);
}

#[test]
fn a_read_that_the_device_does_not_take_costs_neither_the_block_nor_its_slot() {
    let (mut world, session) = with(Setup::default());
    save_durably(&mut world, session, &keys(0..1));
    trim(&mut world, session);
    world.load(session, &keys(0..1), Duration::from_secs(1), Scope::Cluster);
    let job = world.fills()[0];
    world.fail(job, FillError::Refused);
    let (_, held) = world.engines[&session].loads.iter().next().expect("answered");
    assert!(matches!(held.blocks[0], LoadedBlock::Lost(LossReason::Failed)), "it is not asked again at once");
    let counters = world.core.counters();
    assert_eq!((counters.fill_refused, counters.pool_quarantined_slots, counters.nvme_blocks), (1, 0, 1));
    assert_eq!(counters.lookups, 0, "nor by way of the directory");
    world.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    world.finish_jobs();
    assert_eq!(world.core.counters().hit_blocks_own_nvme, 1);
}

#[test]
fn a_write_that_the_device_does_not_take_is_tried_again_and_costs_no_slot() {
    let faults = Faults { refused: 1000, ..Faults::default() };
    let (mut world, session) = with(Setup { faults, ..Setup::default() });
    world.reserve(session, 1);
    world.commit(session, &keys(0..1), Priority::Normal);
    world.pass(Duration::from_millis(6));
    world.advance(0);
    world.faults.refused = 0;
    world.finish_jobs();
    assert_eq!(world.engines[&session].notices[0].1, 1);
    assert_eq!(world.core.counters().pool_quarantined_slots, 0);
}

#[test]
fn a_slot_that_a_lost_device_did_not_let_go_of_is_never_used_again() {
    let (mut world, session) = with(Setup::default());
    save_durably(&mut world, session, &keys(0..1));
    trim(&mut world, session);
    world.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    let Job::Read { read, .. } = &world.jobs[0] else { panic!("a read") };
    let slot = read.slot;
    world.memory.strand(slot);
    world.fail(0, FillError::Stranded);
    assert_eq!(world.core.counters().arena_lost_bytes, slot.bytes);
    // Every other slot of the arena is taken.
    let reserved =
        |world: &World| world.engines[&session].reserved.iter().map(|(_, slot)| *slot).collect::<Vec<_>>();
    let mut before = None;
    while before != Some(reserved(&world).len()) {
        before = Some(reserved(&world).len());
        world.reserve(session, 8);
    }
    assert!(!reserved(&world).is_empty() && !reserved(&world).contains(&slot));
    let counters = world.core.counters();
    assert_eq!(counters.reserved_bytes + counters.arena_lost_bytes, counters.arena_used_bytes);
    world.core.audit().expect("consistent");
}

#[test]
fn trim_drops_only_what_is_durable_and_not_read() {
    let (mut world, session) = with(Setup::default());
    save_durably(&mut world, session, &keys(0..4));
    world.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    world.reserve(session, 1);
    world.commit(session, &keys(4..5), Priority::Normal);
    trim(&mut world, session);
    let resident: Vec<u64> =
        (0..5).filter(|number| world.announced.contains(&(key(*number), Tier::Dram))).collect();
    assert_eq!(resident, [0, 4]);
    assert_eq!(world.core.counters().nvme_blocks, 4);
}

#[test]
fn of_two_copies_that_a_restart_finds_one_is_kept() {
    let setup = Setup { disks: vec![8 << 20, 8 << 20], ..Setup::default() };
    let (mut world, session) = with(setup);
    for start in (0..40).step_by(4) {
        save_durably(&mut world, session, &keys(start..start + 4));
    }
    trim(&mut world, session);
    // The first device seems lost, and its blocks are saved again on the second.
    let is_first = |job: &Job| matches!(job, Job::Read { device, .. } if device.0 == 0);
    for start in (0..40).step_by(8) {
        world.load(session, &keys(start..start + 8), Duration::ZERO, Scope::Local);
        while let Some(job) = world.jobs.iter().position(is_first) {
            world.fail(job, FillError::Device);
        }
        world.finish_device_ops();
    }
    assert!(matches!(world.reports[..], [Report::DeviceLost { device: DeviceId(0), .. }]));
    world.finish_jobs();
    for load in world.engines[&session].loads.keys().copied().collect::<Vec<_>>() {
        world.release(session, load);
    }
    for start in (0..40).step_by(4) {
        save_durably(&mut world, session, &keys(start..start + 4));
    }
    assert!(keys(0..40).into_iter().all(|key| on_nvme(&world, key)));
    let stored_before = world.core.counters().nvme_blocks;
    assert_eq!(stored_before, 40);
    world.lost_devices.clear();
    let mut world = world.crash();
    assert_eq!(world.core.counters().nvme_blocks, 40);
    world.finish_jobs();
    let used = world.core.counters().pool_used_bytes;
    assert_eq!(used, 40 * (large_layout().slot_bytes() + 4096), "the other copies' slots are free again");
    assert_eq!(world.core.counters().pool_pending_free_bytes, 0);
}

#[test]
fn the_core_can_move_to_another_thread() {
    fn is_send<T: Send>() {}
    is_send::<reprise_agent_core::agent::AgentCore>();
}
