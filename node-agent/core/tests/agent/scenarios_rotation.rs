//! Scenarios: consecutive blocks get consecutive devices, by free space and near the GPU of the session.

use std::time::Duration;

use reprise_agent_core::Settings;
use reprise_agent_core::effect::{CommitStatus, DeviceId};
use reprise_agent_core::event::{Event, Priority};
use reprise_policy::{DevicePlace, SessionId, TenantId};

use crate::extent_client::position;
use crate::harness::{Harness, Setup, key, keys, large_layout};
use crate::rng::for_seeds;

/// Bytes of a large block on a device.
const BLOCK_BYTES: u64 = 64 << 10;

/// Harness with disks of these sizes, and as many regions as no test fills.
fn setup(disks: &[u64]) -> Setup {
    let slot = large_layout().slot_bytes();
    let settings = Settings { writeback_bytes: 64 * slot, ..Setup::default().settings };
    Setup { disks: disks.to_vec(), regions: 32, settings, ..Setup::default() }
}

/// Number of blocks on each device, lent slots included.
fn blocks(harness: &Harness) -> Vec<u64> {
    let mut usage: Vec<_> = harness.core.device_usage().collect();
    usage.sort_by_key(|(device, _)| *device);
    usage.into_iter().map(|(_, usage)| usage.slot_bytes_used / BLOCK_BYTES).collect()
}

fn save(harness: &mut Harness, session: SessionId, first: u64, count: u64) {
    harness.reserve(session, count as u32);
    harness.commit(session, &keys(first..first + count), Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
}

/// Leases extents; returns their devices, in the order of the leases.
fn lease(harness: &mut Harness, session: SessionId, count: u32) -> Vec<u8> {
    let before = harness.engines[&session].extents.leased.len();
    harness.lease_extents(session, count);
    harness.finish_jobs();
    let leased = &harness.engines[&session].extents.leased[before..];
    leased.iter().map(|extent| position(&extent.place).0.0).collect()
}

fn place(root: &str, numa_node: u32) -> DevicePlace {
    DevicePlace { root: Some(root.to_owned()), numa_node: Some(numa_node) }
}

/// The model is a counter: however commits and leases are divided, the devices differ by at most one block.
#[test]
fn equal_devices_differ_by_at_most_one_block_after_any_commits() {
    for_seeds(40, |seed| {
        let devices = 2 + (seed % 4) as usize;
        let mut harness = Harness::new(Setup { seed, ..setup(&vec![32 << 20; devices]) });
        let session = harness.open_session(TenantId::DEFAULT, large_layout());
        let mut total = 0;
        while total < 100 {
            let count = 1 + harness.rng.below(7) as u64;
            if harness.rng.chance(500) {
                save(&mut harness, session, total, count);
            } else {
                let devices = lease(&mut harness, session, count as u32);
                assert_eq!(devices.len() as u64, count);
                harness.write_extents(session, &keys(total..total + count));
                harness.finish_jobs();
                harness.commit_extents(session, Priority::Normal);
                harness.finish_jobs();
            }
            total += count;
            let blocks = blocks(&harness);
            assert_eq!(blocks.iter().sum::<u64>(), total);
            let (least, most) = (blocks.iter().min(), blocks.iter().max());
            assert!(most.zip(least).is_some_and(|(most, least)| most - least <= 1), "{blocks:?}");
        }
        let statuses = &harness.engines[&session].extents.statuses;
        assert!(statuses.iter().all(|(_, status)| *status == CommitStatus::Durable), "{statuses:?}");
    });
}

#[test]
fn leases_are_answered_in_the_order_of_the_devices() {
    let mut harness = Harness::new(setup(&[16 << 20; 3]));
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    assert_eq!(lease(&mut harness, session, 4), [0, 1, 2, 0]);
    assert_eq!(lease(&mut harness, session, 4), [1, 2, 0, 1], "the next lease continues");
}

#[test]
fn smaller_device_gets_fewer_blocks_and_does_not_overflow() {
    let mut harness = Harness::new(setup(&[32 << 20, 16 << 20]));
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    for first in (0..120).step_by(6) {
        save(&mut harness, session, first, 6);
    }
    let on = blocks(&harness);
    assert_eq!(on.iter().sum::<u64>(), 120);
    let ratio = on[0] as f64 / on[1] as f64;
    let free: Vec<u64> = harness.core.device_usage().map(|(_, usage)| usage.capacity_bytes).collect();
    let sizes = free[0] as f64 / free[1] as f64;
    assert!((ratio / sizes - 1.0).abs() < 0.2, "{on:?} on devices of {free:?} bytes");
    assert_eq!(harness.core.counters().nvme_evictions, 0);
}

#[test]
fn device_that_only_is_read_or_is_gone_gets_no_turn() {
    let mut harness = Harness::new(setup(&[16 << 20; 3]));
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    harness.apply(Event::DeviceLost { device: DeviceId(1), reason: "unplugged".to_owned() });
    assert_eq!(lease(&mut harness, session, 4), [0, 2, 0, 2]);
    save(&mut harness, session, 0, 4);
    assert_eq!(blocks(&harness), [4, 4], "of the devices that are left");
}

#[test]
fn leases_prefer_devices_near_the_gpu_and_alternate_among_them() {
    let places =
        vec![place("pci0000:d7", 1), place("pci0000:3a", 0), place("pci0000:5d", 0), place("pci0000:3a", 0)];
    let mut harness = Harness::new(Setup { places, ..setup(&[16 << 20; 5]) });
    let near =
        |harness: &mut Harness, gpu| harness.open_session_near(TenantId::DEFAULT, large_layout(), Some(gpu));
    let same_root = near(&mut harness, place("pci0000:3a", 0));
    assert_eq!(lease(&mut harness, same_root, 4), [1, 3, 1, 3]);
    let same_node = near(&mut harness, DevicePlace { root: None, numa_node: Some(0) });
    assert_eq!(lease(&mut harness, same_node, 6), [2, 1, 3, 2, 1, 3]);
    let elsewhere = near(&mut harness, place("pci0000:00", 7));
    let mut all = lease(&mut harness, elsewhere, 5);
    all.sort_unstable();
    assert_eq!(all, [0, 1, 2, 3, 4], "no device is near it");
    let without_gpu = harness.open_session(TenantId::DEFAULT, large_layout());
    let mut all = lease(&mut harness, without_gpu, 5);
    all.sort_unstable();
    assert_eq!(all, [0, 1, 2, 3, 4], "a session without a GPU");
}

#[test]
fn devices_behind_the_nearest_follow_when_those_are_full() {
    let places = vec![place("pci0000:d7", 1), place("pci0000:3a", 0)];
    let mut harness = Harness::new(Setup { places, ..setup(&[32 << 20, 4 << 20]) });
    let gpu = Some(place("pci0000:3a", 0));
    let session = harness.open_session_near(TenantId::DEFAULT, large_layout(), gpu);
    let capacity = harness.core.device_usage().map(|(_, usage)| usage.capacity_bytes / BLOCK_BYTES).min();
    let capacity = capacity.expect("two devices") as usize;
    let devices = lease(&mut harness, session, capacity as u32 + 2);
    assert_eq!(devices[..capacity], vec![1; capacity], "the near device first");
    assert_eq!(devices[capacity..], [0, 0]);
    assert_eq!(lease(&mut harness, session, 1), [0], "the near device is full");
}

#[test]
fn blocks_of_the_arena_use_all_devices_also_for_a_session_with_a_gpu() {
    let places = vec![place("pci0000:d7", 1), place("pci0000:3a", 0)];
    let mut harness = Harness::new(Setup { places, ..setup(&[16 << 20; 2]) });
    let gpu = Some(place("pci0000:3a", 0));
    let session = harness.open_session_near(TenantId::DEFAULT, large_layout(), gpu);
    save(&mut harness, session, 0, 8);
    assert_eq!(blocks(&harness), [4, 4]);
    assert!(harness.committed.contains(&key(7)));
}
