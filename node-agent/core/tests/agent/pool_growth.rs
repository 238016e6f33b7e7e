//! Pools that grow with their devices, and devices larger than 16 TiB.

use crate::pool_harness::disk::Disk;
use crate::pool_harness::offsets::DEVICE_BYTES;
use crate::pool_harness::{Harness, PAGE, batch, block_write, formatted, layout, params, recover};
use reprise_agent_core::pool::{
    DeviceOp, DeviceOpKind, DevicePool, Growth, PageNumber, PoolError, PoolParams, SUPERBLOCK_OFFSETS,
};
use reprise_policy::{BlockKey, Dtype, Layout, LayoutSpec, Parts};

const GROWN_BYTES: u64 = 3 * DEVICE_BYTES;

fn key(number: u64) -> BlockKey {
    BlockKey(u128::from(number).to_le_bytes())
}

/// Executes operations durably, until none is left.
fn execute(pool: &mut DevicePool, disk: &mut Disk, mut ops: Vec<DeviceOp>) {
    while let Some(op) = ops.pop() {
        match &op.kind {
            DeviceOpKind::WritePages { offset, bytes } => disk.write_durably(*offset, bytes),
            DeviceOpKind::WriteBlock { offset, header, .. }
            | DeviceOpKind::WriteHeader { offset, header } => disk.write_durably(*offset, header),
            DeviceOpKind::Sync => {}
        }
        ops.extend(pool.done(op.token, Ok(())).0);
    }
}

/// Writes blocks until no slot is left; returns the number of blocks.
fn fill(pool: &mut DevicePool, disk: &mut Disk, first: u64) -> u64 {
    let mut number = first;
    loop {
        let pages: Vec<PageNumber> = (0..200).map_while(|_| pool.allocate(layout(15).slot_bytes())).collect();
        if pages.is_empty() {
            return number - first;
        }
        let blocks = (number..).zip(&pages).map(|(number, page)| block_write(key(number), layout(15), *page));
        let ops = pool.write_batch(batch(number), blocks.collect());
        number += pages.len() as u64;
        execute(pool, disk, ops);
    }
}

fn apply(pool: &mut DevicePool, disk: &mut Disk, growth: &Growth) {
    growth.writes.iter().for_each(|(offset, bytes)| disk.write_durably(*offset, bytes));
    pool.apply_growth(growth);
}

/// A full pool on a device that has become larger.
fn full_on_larger_device() -> (DevicePool, Disk, u64) {
    let mut disk = formatted(&params(DEVICE_BYTES));
    let (mut pool, _, _) = recover(&disk).expect("opens");
    let blocks = fill(&mut pool, &mut disk, 0);
    disk.resize(GROWN_BYTES);
    let (pool, stored, _) = recover(&disk).expect("opens");
    assert_eq!((stored.len() as u64, blocks), (blocks, 5 * 32), "five segments of 32 slots");
    (pool, disk, blocks)
}

#[test]
fn a_grown_pool_keeps_its_blocks_and_stores_more() {
    let (mut pool, mut disk, before) = full_on_larger_device();
    let growth = pool.plan_growth(GROWN_BYTES).expect("the device is larger");
    assert_eq!((growth.bytes_before, growth.bytes_after), (DEVICE_BYTES, GROWN_BYTES));
    apply(&mut pool, &mut disk, &growth);
    pool.audit().expect("consistent");
    let more = fill(&mut pool, &mut disk, before);
    assert_eq!(more, 12 * 32, "12 segments were appended");
    pool.audit().expect("consistent");
    let (again, stored, report) = recover(&disk).expect("opens");
    assert!(report.is_clean() && !report.repair_due, "{report:?}");
    assert_eq!((stored.len() as u64, again.device_bytes()), (before + more, GROWN_BYTES));
    assert!(again.plan_growth(GROWN_BYTES).is_none(), "it has grown");
    assert!((0..before + more).all(|number| stored.iter().any(|block| block.key == key(number))));
}

#[test]
fn growth_below_a_segment_changes_nothing_and_a_smaller_device_is_refused_afterwards() {
    let (mut pool, mut disk, _) = full_on_larger_device();
    for bytes in [0, DEVICE_BYTES - PAGE, DEVICE_BYTES, DEVICE_BYTES + (2 << 20) - PAGE] {
        assert!(pool.plan_growth(bytes).is_none(), "{bytes}");
    }
    let growth = pool.plan_growth(GROWN_BYTES + 511).expect("the device is larger");
    apply(&mut pool, &mut disk, &growth);
    disk.resize(GROWN_BYTES - PAGE);
    let error = recover(&disk).expect_err("smaller than the pool");
    assert_eq!(error, PoolError::WrongSize { recorded: GROWN_BYTES, found: GROWN_BYTES - PAGE });
}

#[test]
fn a_crash_at_any_write_of_a_growth_loses_no_block_and_the_growth_completes_later() {
    let (pool, disk, blocks) = full_on_larger_device();
    let growth = pool.plan_growth(GROWN_BYTES).expect("the device is larger");
    for (writes, torn) in [(0, true), (1, false), (1, true), (2, false)] {
        let mut disk = disk.clone();
        for (offset, bytes) in &growth.writes[..writes] {
            disk.write_durably(*offset, bytes);
        }
        if torn {
            let (offset, bytes) = &growth.writes[writes];
            let mut page = disk.read(*offset, 4096).expect("readable");
            // The size is new and the checksum is old.
            page[..512].copy_from_slice(&bytes[..512]);
            disk.write_durably(*offset, &page);
        }
        let (mut pool, stored, report) = recover(&disk).expect("opens");
        assert_eq!(stored.len() as u64, blocks, "after {writes} writes");
        assert_eq!(report.superblock_copies_bad, u64::from(torn), "after {writes} writes");
        assert_eq!(report.superblock_copies_outdated, u64::from(writes == 1 && !torn));
        assert_eq!(pool.plan_growth(GROWN_BYTES).is_some(), writes == 0, "after {writes} writes");
        if let Some(growth) = pool.plan_growth(GROWN_BYTES) {
            let first = growth.writes[0].0;
            assert_eq!(first, SUPERBLOCK_OFFSETS[0], "the torn copy is written first");
            apply(&mut pool, &mut disk, &growth);
        }
        let repairs = pool.flush_frees();
        execute(&mut pool, &mut disk, repairs);
        fill(&mut pool, &mut disk, 1000);
        let (_, stored, report) = recover(&disk).expect("opens");
        assert!(report.is_clean() && !report.repair_due, "after {writes} writes: {report:?}");
        assert_eq!(stored.len() as u64, 17 * 32);
    }
}

#[test]
fn a_grown_pool_survives_random_crashes() {
    for seed in 0..40 {
        let mut harness = Harness::new(&params(DEVICE_BYTES), seed);
        let layouts = [layout(15), layout(100)];
        harness.start_batch(20, &layouts);
        harness.run_to_completion();
        harness.disk.resize(GROWN_BYTES);
        harness.lose_power();
        let growth = harness.pool.plan_growth(GROWN_BYTES).expect("the device is larger");
        apply(&mut harness.pool, &mut harness.disk, &growth);
        for _ in 0..6 {
            harness.start_batch(60, &layouts);
            for _ in 0..seed {
                harness.step();
            }
            harness.lose_power();
        }
        harness.pool.audit().expect("consistent");
        assert_eq!(harness.pool.device_bytes(), GROWN_BYTES);
    }
}

/// The layout of a block of 128 MiB, so that few slots fill a device.
fn largest_layout() -> Layout {
    let spec = LayoutSpec {
        layers: 32,
        parts: Parts::KeyValue,
        kv_heads: 8,
        head_dim: 128,
        dtype: Dtype::Bf16,
        tokens_per_block: 1024,
        tp_rank: 0,
        tp_size: 1,
    };
    spec.validate().expect("valid")
}

/// Formats a sparse device and writes one block into its last slot.
fn write_to_the_end(device_bytes: u64) -> (Disk, PageNumber) {
    let segment_bytes = 4 << 30;
    let large = PoolParams { segment_bytes, ..params(device_bytes) };
    let mut disk = formatted(&large);
    let (mut pool, _, _) = recover(&disk).expect("opens");
    let wide = largest_layout();
    let mut last = None;
    while let Some(page) = pool.allocate(wide.slot_bytes()) {
        last = Some(page);
    }
    let page = last.expect("there is room");
    let ops = pool.write_batch(batch(1), vec![block_write(key(7), wide, page)]);
    execute(&mut pool, &mut disk, ops);
    assert_eq!(pool.stored(page).map(|block| block.key), Some(key(7)));
    (disk, page)
}

#[test]
fn blocks_behind_16_tib_are_found_again_on_devices_of_20_tb_and_of_the_largest_size() {
    for device_bytes in [20_000_000_000_000, 128 << 40] {
        let (disk, page) = write_to_the_end(device_bytes);
        assert!(page.offset() > 16 << 40 && page.offset() > device_bytes - (16 << 30), "{page:?}");
        let (pool, stored, report) = recover(&disk).expect("opens");
        assert!(report.is_clean(), "{report:?}");
        assert_eq!(stored.iter().map(|block| (block.key, block.page)).collect::<Vec<_>>(), [(key(7), page)]);
        let header = disk.read(page.offset(), 4096).expect("written");
        let header = reprise_agent_core::pool::header::read_header(&header).expect("intact").0;
        assert_eq!(header.page, page);
        pool.audit().expect("consistent");
    }
    let error = DevicePool::format(&params((128 << 40) + PAGE)).expect_err("too large");
    assert!(error.to_string().contains("128 TiB"), "{error}");
}
