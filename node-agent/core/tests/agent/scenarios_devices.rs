//! Scenarios: devices that become full, fail or return corrupt data.

use std::time::Duration;

use reprise_agent_core::Settings;
use reprise_agent_core::effect::{DeviceId, Diagnostic, LoadedBlock, LossReason};
use reprise_agent_core::event::{Event, FillError, Priority, Request, Scope};
use reprise_agent_core::pool::DeviceOpKind;
use reprise_policy::{BlockKey, Parts, SessionId, TenantId, Tier};

use crate::engine::RequestKind;
use crate::harness::{Faults, Harness, Setup, key, keys, large_layout, layout};
use crate::jobs::Job;

fn with(setup: Setup) -> (Harness, SessionId) {
    let mut harness = Harness::new(setup);
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    (harness, session)
}

fn save_durably(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.reserve(session, keys.len() as u32);
    harness.commit(session, keys, Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
}

fn trim(harness: &mut Harness, session: SessionId) {
    harness.request(session, RequestKind::Other, Request::Trim);
}

fn on_nvme(harness: &Harness, key: BlockKey) -> bool {
    harness.announced.contains(&(key, Tier::Nvme))
}

#[test]
fn evicts_from_devices_ahead_of_writes() {
    let settings = Settings { pool_free_permille: 250, ..Setup::default().settings };
    let (mut harness, session) = with(Setup { disks: vec![8 << 20], settings, ..Setup::default() });
    for start in (0..200).step_by(4) {
        save_durably(&mut harness, session, &keys(start..start + 4));
        let counters = harness.core.counters();
        assert!(counters.pool_free_bytes * 4 >= counters.pool_capacity_bytes, "a quarter stays free");
    }
    let notices = &harness.engines[&session].notices;
    assert!(notices.iter().all(|(_, durable, _)| *durable == 4), "no block was lost for lack of space");
    assert!(!on_nvme(&harness, key(0)) && on_nvme(&harness, key(199)), "the oldest blocks were evicted");
}

#[test]
fn block_being_read_is_not_evicted_from_its_device() {
    let settings = Settings { pool_free_permille: 500, ..Setup::default().settings };
    let (mut harness, session) = with(Setup { disks: vec![8 << 20], settings, ..Setup::default() });
    save_durably(&mut harness, session, &keys(0..4));
    trim(&mut harness, session);
    harness.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    for start in (100..200).step_by(4) {
        harness.reserve(session, 4);
        harness.commit(session, &keys(start..start + 4), Priority::Normal);
        harness.pass(Duration::from_millis(1));
        harness.finish_device_ops();
    }
    assert!(!on_nvme(&harness, key(1)), "its neighbours were evicted");
    assert!(on_nvme(&harness, key(0)));
    harness.finish_jobs();
    harness.read_all();
    assert!(harness.announced.contains(&(key(0), Tier::Dram)));
}

#[test]
fn block_larger_than_every_segment_is_lost_at_once_without_evictions() {
    let slot = 4 << 20;
    let (mut harness, session) = with(Setup { region_bytes: slot, ..Setup::default() });
    save_durably(&mut harness, session, &keys(0..4));
    let huge = layout(32, Parts::KeyValue, 2048);
    assert_eq!(huge.slot_bytes(), slot);
    let other = harness.open_session(TenantId::DEFAULT, huge);
    harness.reserve(other, 1);
    harness.commit(other, &keys(500..501), Priority::Normal);
    assert_eq!(harness.engines[&other].notices[0].2, keys(500..501));
    assert_eq!(harness.core.counters().nvme_evictions, 0);
}

/// Number of large blocks that fill a segment of 2 MiB.
const SEGMENT_BLOCKS: u64 = 32;

/// Pool full of large blocks, and a session of another slot size with this many slots.
fn full_of_another_size(wide_slots: u32) -> (Harness, SessionId, SessionId) {
    let (mut harness, session) = with(Setup { disks: vec![8 << 20], ..Setup::default() });
    for start in (0..200).step_by(4) {
        save_durably(&mut harness, session, &keys(start..start + 4));
    }
    let wide = layout(4, Parts::KeyValue, 480);
    assert_eq!(wide.slot_bytes(), 2 * large_layout().slot_bytes());
    let other = harness.open_session(TenantId::DEFAULT, wide);
    harness.reserve(other, wide_slots);
    (harness, session, other)
}

#[test]
fn new_slot_size_evicts_one_segment_of_coldest_blocks_from_a_full_pool() {
    let (mut harness, _, other) = full_of_another_size(2);
    let before = harness.core.counters().nvme_evictions;
    let stored: Vec<u64> = (0..200).filter(|number| on_nvme(&harness, key(*number))).collect();
    harness.commit(other, &keys(500..502), Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
    assert_eq!(harness.engines[&other].notices[0].1, 2);
    let evicted = harness.core.counters().nvme_evictions - before;
    assert!(evicted <= SEGMENT_BLOCKS, "{evicted} blocks were evicted for two");
    assert!(!on_nvme(&harness, key(stored[0])), "the coldest block's segment");
}

#[test]
fn blocks_with_free_slots_are_not_delayed_by_those_waiting_for_a_segment() {
    let (mut harness, session, other) = full_of_another_size(2);
    harness.reserve(session, 2);
    harness.commit(other, &keys(500..502), Priority::Normal);
    harness.commit(session, &keys(300..302), Priority::Normal);
    harness.pass(Duration::from_millis(6));
    let writes = |job: &&Job| match job {
        Job::Device { op, .. } => matches!(op.kind, DeviceOpKind::WriteBlock { .. }),
        _ => false,
    };
    assert_eq!(harness.jobs.iter().filter(writes).count(), 2, "the first size continues");
    assert!(harness.engines[&other].notices.is_empty());
    harness.finish_jobs();
    assert_eq!(harness.engines[&session].notices.last().expect("a notice").1, 2);
    assert_eq!(harness.engines[&other].notices[0].1, 2);
}

#[test]
fn stream_of_one_size_does_not_starve_another() {
    let (mut harness, session, other) = full_of_another_size(2);
    harness.commit(other, &keys(500..502), Priority::Normal);
    let mut next = 300;
    while harness.engines[&other].notices.is_empty() {
        harness.reserve(session, 2);
        harness.commit(session, &keys(next..next + 2), Priority::Normal);
        harness.pass(Duration::from_millis(2));
        // A write of the first size is always in flight.
        for _ in 0..harness.jobs.len().min(6) {
            harness.advance(0);
        }
        next += 2;
        assert!(next < 400, "no block is durable after fifty commits");
    }
    harness.finish_jobs();
    assert_eq!(harness.engines[&other].notices[0].1, 2);
    assert!(harness.core.counters().nvme_evictions < 200, "at most the stream and two segments");
}

#[test]
fn segment_with_a_block_being_read_is_not_emptied() {
    let (mut harness, session, other) = full_of_another_size(2);
    trim(&mut harness, session);
    // Blocks saved together are in one segment; the coldest complete group is in the next victim's segment.
    let is_whole = |first: &u64| (*first..*first + 4).all(|number| on_nvme(&harness, key(number)));
    let read = (0..200).step_by(4).find(is_whole).expect("a full pool");
    harness.load(session, &keys(read..read + 1), Duration::ZERO, Scope::Local);
    harness.commit(other, &keys(500..502), Priority::Normal);
    harness.pass(Duration::from_millis(6));
    assert!((read..read + 4).all(|number| on_nvme(&harness, key(number))));
    harness.finish_jobs();
    harness.read_all();
    assert_eq!(harness.engines[&other].notices[0].1, 2);
}

#[test]
fn failed_write_is_retried_in_another_slot() {
    let faults = Faults { write_media: 1000, ..Faults::default() };
    let (mut harness, session) = with(Setup { faults, ..Setup::default() });
    harness.reserve(session, 1);
    harness.commit(session, &keys(0..1), Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.advance(0);
    harness.faults.write_media = 0;
    harness.finish_jobs();
    assert_eq!(harness.engines[&session].notices[0].1, 1);
    assert_eq!(harness.core.counters().pool_quarantined_slots, 1);
}

#[test]
fn block_with_repeated_write_failures_is_lost_and_remains_cached() {
    let faults = Faults { write_media: 1000, ..Faults::default() };
    let (mut harness, session) = with(Setup { faults, ..Setup::default() });
    save_durably(&mut harness, session, &keys(0..1));
    assert_eq!(harness.engines[&session].notices[0].2, keys(0..1));
    assert!(harness.announced.contains(&(key(0), Tier::Dram)));
    assert_eq!(harness.core.counters().write_failures, 3);
}

#[test]
fn corrupt_block_is_reported_withdrawn_and_never_read_again() {
    let (mut harness, session) = with(Setup::default());
    save_durably(&mut harness, session, &keys(0..2));
    trim(&mut harness, session);
    harness.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    let Job::Read { read, .. } = &harness.jobs[0] else { panic!("a read") };
    let page = read.page;
    harness.disks[0].rot(page);
    harness.finish_jobs();
    let (_, held) = harness.engines[&session].loads.iter().next().expect("answered");
    assert!(matches!(held.blocks[0], LoadedBlock::Lost(LossReason::Failed)));
    assert_eq!(harness.reports, [Diagnostic::CorruptBlock { device: DeviceId(0), page, key: key(0) }]);
    assert!(!on_nvme(&harness, key(0)) && on_nvme(&harness, key(1)));
    let mut harness = harness.crash();
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    harness.load(session, &keys(0..2), Duration::ZERO, Scope::Local);
    harness.finish_jobs();
    let (_, held) = harness.engines[&session].loads.iter().next().expect("answered");
    assert!(matches!(held.blocks[0], LoadedBlock::Lost(LossReason::Miss)), "also after a restart");
    assert!(matches!(held.blocks[1], LoadedBlock::Ok { .. }));
}

#[test]
fn blocks_committed_with_wrong_checksums_use_up_no_slots() {
    let (mut harness, session) = with(Setup::default());
    for start in (0..400).step_by(4) {
        save_durably(&mut harness, session, &keys(start..start + 4));
        trim(&mut harness, session);
        harness.load(session, &keys(start..start + 4), Duration::ZERO, Scope::Local);
        while let Some(job) = harness.fills().first().copied() {
            harness.fail(job, FillError::Corrupt);
        }
        let load = *harness.engines[&session].loads.keys().next().expect("answered");
        harness.release(session, load);
    }
    harness.finish_jobs();
    let counters = harness.core.counters();
    assert_eq!((counters.corrupt_blocks, counters.pool_quarantined_slots), (400, 0));
    assert_eq!((counters.pool_used_bytes, counters.devices_lost), (0, 0), "the pool is empty");
    let notices = &harness.engines[&session].notices;
    assert!(notices.iter().all(|(_, durable, _)| *durable == 4));
}

#[test]
fn unreadable_slot_is_never_used_again() {
    let (mut harness, session) = with(Setup::default());
    save_durably(&mut harness, session, &keys(0..1));
    trim(&mut harness, session);
    harness.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    harness.fail(0, FillError::Device);
    harness.finish_jobs();
    assert_eq!(harness.core.counters().pool_quarantined_slots, 1);
    assert_eq!(harness.crash().core.counters().pool_quarantined_slots, 1);
}

#[test]
fn lost_device_removes_its_blocks_but_not_their_dram_copies() {
    let (mut harness, session) = with(Setup { disks: vec![8 << 20, 8 << 20], ..Setup::default() });
    save_durably(&mut harness, session, &keys(0..8));
    let before = harness.core.counters().nvme_blocks;
    harness.faults.device_lost = 1000;
    harness.reserve(session, 1);
    harness.commit(session, &keys(8..9), Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.advance(0);
    harness.faults.device_lost = 0;
    assert!(matches!(harness.reports[..], [Diagnostic::DeviceLost { .. }]));
    harness.finish_jobs();
    let counters = harness.core.counters();
    assert_eq!((before, counters.nvme_blocks, counters.dram_blocks), (8, 5, 9));
    assert_eq!(
        harness.engines[&session].notices.last().expect("a notice").1,
        1,
        "the other device takes over"
    );
}

#[test]
fn device_that_accepts_no_writes_keeps_serving_its_blocks_and_saves_go_elsewhere() {
    let (mut harness, session) = with(Setup { disks: vec![8 << 20, 8 << 20], ..Setup::default() });
    save_durably(&mut harness, session, &keys(0..8));
    harness.read_only_devices.insert(DeviceId(0));
    save_durably(&mut harness, session, &keys(8..24));
    let notice = harness.engines[&session].notices.last().expect("a notice").clone();
    assert!(notice.2.is_empty(), "the other device takes over: {notice:?}");
    assert!(matches!(harness.reports[..], [Diagnostic::WritesStopped { device: DeviceId(0), .. }]));
    assert_eq!((harness.core.counters().devices_lost, harness.core.counters().nvme_blocks), (0, 24));
    trim(&mut harness, session);
    harness.load(session, &keys(0..8), Duration::ZERO, Scope::Local);
    harness.finish_jobs();
    assert_eq!(harness.core.counters().dram_blocks, 8, "every block is read from its device");
}

#[test]
fn blocks_on_a_device_that_accepts_no_writes_are_not_evicted_for_space_on_another() {
    let (mut harness, session) = with(Setup { disks: vec![8 << 20, 8 << 20], ..Setup::default() });
    save_durably(&mut harness, session, &keys(0..8));
    let on_the_first = |harness: &Harness| {
        let (_, usage) = harness.core.device_usage().next().expect("two devices");
        usage.blocks_stored
    };
    let before = on_the_first(&harness);
    assert!(before > 0);
    harness.read_only_devices.insert(DeviceId(0));
    for start in (100..300).step_by(4) {
        save_durably(&mut harness, session, &keys(start..start + 4));
        let lost = &harness.engines[&session].notices.last().expect("a notice").2;
        assert!(lost.is_empty(), "the other device has evictable blocks: {lost:?}");
    }
    assert!(harness.core.counters().nvme_evictions > 0, "the other device is full");
    assert_eq!(on_the_first(&harness), before);
    // Those on the first device, and on the other one those that have descendants on the first.
    let kept = (0..8).take_while(|number| on_nvme(&harness, key(*number))).count();
    let stored = (0..8).filter(|number| on_nvme(&harness, key(*number))).count();
    assert!(kept == stored && kept as u64 > before, "{kept} leading blocks of {stored} are kept");
    let usage = harness.core.node_usage();
    assert!(usage.nvme_capacity - usage.nvme_used < 8 << 20, "its free space is not offered: {usage:?}");
}

#[test]
fn without_a_writable_device_saves_end_as_lost_and_no_block_is_evicted_for_them() {
    let (mut harness, session) = with(Setup::default());
    save_durably(&mut harness, session, &keys(0..8));
    harness.read_only_devices.insert(DeviceId(0));
    for start in (100..160).step_by(4) {
        save_durably(&mut harness, session, &keys(start..start + 4));
        let mut lost = harness.engines[&session].notices.last().expect("a notice").2.clone();
        let mut saved = keys(start..start + 4);
        lost.sort_unstable();
        saved.sort_unstable();
        assert_eq!(lost, saved);
    }
    assert_eq!(harness.core.counters().nvme_blocks, 8);
    assert!((0..8).all(|number| on_nvme(&harness, key(number))));
    assert_eq!(harness.core.counters().nvme_evictions, 0);
}

#[test]
fn device_with_consecutive_read_failures_is_lost() {
    let (mut harness, session) = with(Setup::default());
    for start in (0..20).step_by(4) {
        save_durably(&mut harness, session, &keys(start..start + 4));
    }
    trim(&mut harness, session);
    harness.load(session, &keys(0..16), Duration::ZERO, Scope::Local);
    while let Some(job) = harness.fills().first().copied() {
        harness.fail(job, FillError::Device);
    }
    assert!(
        matches!(&harness.reports[..], [Diagnostic::DeviceLost { reason, .. }] if reason.contains("16 consecutive reads"))
    );
    assert_eq!(harness.core.counters().nvme_blocks, 0);
    save_durably(&mut harness, session, &keys(100..101));
    assert_eq!(harness.engines[&session].notices.last().expect("a notice").2, keys(100..101));
}

#[test]
fn device_lost_by_the_runtime_is_reported_once_with_its_reason() {
    let (mut harness, session) = with(Setup::default());
    save_durably(&mut harness, session, &keys(0..2));
    trim(&mut harness, session);
    harness.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    let reason = "the cable".to_owned();
    harness.apply(Event::DeviceLost { device: DeviceId(0), reason: reason.clone() });
    assert!(!on_nvme(&harness, key(0)) && !on_nvme(&harness, key(1)));
    let job = harness.fills()[0];
    harness.fail(job, FillError::Device);
    harness.apply(Event::DeviceLost { device: DeviceId(0), reason: "again".to_owned() });
    assert_eq!(harness.reports, [Diagnostic::DeviceLost { device: DeviceId(0), reason }]);
    assert_eq!(harness.core.counters().pool_quarantined_slots, 0);
}

#[test]
fn refused_read_costs_neither_the_block_nor_its_slot() {
    let (mut harness, session) = with(Setup::default());
    save_durably(&mut harness, session, &keys(0..1));
    trim(&mut harness, session);
    harness.load(session, &keys(0..1), Duration::from_secs(1), Scope::Cluster);
    let job = harness.fills()[0];
    harness.fail(job, FillError::Refused);
    let (_, held) = harness.engines[&session].loads.iter().next().expect("answered");
    assert!(
        matches!(held.blocks[0], LoadedBlock::Lost(LossReason::Failed)),
        "the read is not repeated at once"
    );
    let counters = harness.core.counters();
    assert_eq!((counters.fill_refused, counters.pool_quarantined_slots, counters.nvme_blocks), (1, 0, 1));
    assert_eq!(counters.lookups, 0, "no lookup is sent either");
    harness.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    harness.finish_jobs();
    assert_eq!(harness.core.counters().hit_blocks_own_nvme, 1);
}

#[test]
fn refused_write_is_retried_and_costs_no_slot() {
    let faults = Faults { refused: 1000, ..Faults::default() };
    let (mut harness, session) = with(Setup { faults, ..Setup::default() });
    harness.reserve(session, 1);
    harness.commit(session, &keys(0..1), Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.advance(0);
    harness.faults.refused = 0;
    harness.finish_jobs();
    assert_eq!(harness.engines[&session].notices[0].1, 1);
    assert_eq!(harness.core.counters().pool_quarantined_slots, 0);
}

#[test]
fn slot_stranded_by_a_lost_device_is_never_used_again() {
    let (mut harness, session) = with(Setup::default());
    save_durably(&mut harness, session, &keys(0..1));
    trim(&mut harness, session);
    harness.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    let Job::Read { read, .. } = &harness.jobs[0] else { panic!("a read") };
    let slot = read.slot;
    harness.memory.strand(slot);
    harness.fail(0, FillError::Stranded);
    assert_eq!(harness.core.counters().arena_lost_bytes, slot.bytes);
    // All other slots of the arena are in use.
    let reserved = |harness: &Harness| {
        harness.engines[&session].reserved.iter().map(|(_, slot)| *slot).collect::<Vec<_>>()
    };
    let mut before = None;
    while before != Some(reserved(&harness).len()) {
        before = Some(reserved(&harness).len());
        harness.reserve(session, 8);
    }
    assert!(!reserved(&harness).is_empty() && !reserved(&harness).contains(&slot));
    let counters = harness.core.counters();
    assert_eq!(counters.reserved_bytes + counters.arena_lost_bytes, counters.arena_used_bytes);
    harness.core.audit().expect("consistent");
}

#[test]
fn trim_drops_only_durable_unleased_blocks() {
    let (mut harness, session) = with(Setup::default());
    save_durably(&mut harness, session, &keys(0..4));
    harness.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    harness.reserve(session, 1);
    harness.commit(session, &keys(4..5), Priority::Normal);
    trim(&mut harness, session);
    let resident: Vec<u64> =
        (0..5).filter(|number| harness.announced.contains(&(key(*number), Tier::Dram))).collect();
    assert_eq!(resident, [0, 4]);
    assert_eq!(harness.core.counters().nvme_blocks, 4);
}

#[test]
fn restart_keeps_one_of_two_copies() {
    // The arena has space for all loads: the reads of the other device do not end.
    let setup = Setup { disks: vec![8 << 20, 8 << 20], regions: 16, ..Setup::default() };
    let (mut harness, session) = with(setup);
    for start in (0..40).step_by(4) {
        save_durably(&mut harness, session, &keys(start..start + 4));
    }
    trim(&mut harness, session);
    // The first device seems lost, so its blocks are saved again on the second.
    let is_first = |job: &Job| matches!(job, Job::Read { device, .. } if device.0 == 0);
    for start in (0..40).step_by(8) {
        harness.load(session, &keys(start..start + 8), Duration::ZERO, Scope::Local);
        while let Some(job) = harness.jobs.iter().position(is_first) {
            harness.fail(job, FillError::Device);
        }
        harness.finish_device_ops();
    }
    assert!(matches!(harness.reports[..], [Diagnostic::DeviceLost { device: DeviceId(0), .. }]));
    harness.finish_jobs();
    for load in harness.engines[&session].loads.keys().copied().collect::<Vec<_>>() {
        harness.release(session, load);
    }
    for start in (0..40).step_by(4) {
        save_durably(&mut harness, session, &keys(start..start + 4));
    }
    assert!(keys(0..40).into_iter().all(|key| on_nvme(&harness, key)));
    let stored_before = harness.core.counters().nvme_blocks;
    assert_eq!(stored_before, 40);
    harness.lost_devices.clear();
    let mut harness = harness.crash();
    assert_eq!(harness.core.counters().nvme_blocks, 40);
    harness.finish_jobs();
    let used = harness.core.counters().pool_used_bytes;
    assert_eq!(used, 40 * (large_layout().slot_bytes() + 4096), "the other copies' slots are free again");
    assert_eq!(harness.core.counters().pool_pending_free_bytes, 0);
}

#[test]
fn core_can_move_to_another_thread() {
    fn is_send<T: Send>() {}
    is_send::<reprise_agent_core::AgentCore>();
}
