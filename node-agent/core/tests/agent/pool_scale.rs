//! A million blocks: the memory that they use and the CPU time that opening their pool takes.
//!
//! The test uses only metadata: payloads are never created and headers are dropped. It prints its
//! measurements, taken with a debug build and optimised dependencies (`--nocapture`).

use crate::pool_harness::disk::Disk;
use crate::pool_harness::{batch, block_write, layout, params, recover};
use reprise_agent_core::effect::{ArenaSlot, RegionId};
use reprise_agent_core::pool::{
    BlockWrite, DeviceOp, DeviceOpKind, DevicePool, PoolParams, SEGMENT_BYTES_DEFAULT, StoredBlock,
};
use reprise_policy::{BlockKey, ContentId, Layout, TenantId};

const BLOCKS: u64 = 1_000_000;
const BATCH: u64 = 4_000;

/// The most CPU time that opening may take.
const SECONDS_MAX: f64 = 2.0;

/// The most memory that the pool may use per stored block.
const BYTES_PER_BLOCK_MAX: u64 = 44;

fn params_of_a_million() -> PoolParams {
    // 2 MiB blocks: 31 slots of 2 MiB + 4 KiB in a segment of 64 MiB; 2 TiB of slots.
    let device_bytes = BLOCKS.div_ceil(31) * SEGMENT_BYTES_DEFAULT + (9 << 30);
    PoolParams { device_bytes, segment_bytes: SEGMENT_BYTES_DEFAULT, ..params(0) }
}

fn key(number: u64) -> BlockKey {
    let mut key = [7; 16];
    key[..8].copy_from_slice(&number.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
    key[8..].copy_from_slice(&number.to_le_bytes());
    BlockKey(key)
}

fn execute(pool: &mut DevicePool, disk: &mut Disk, mut ops: Vec<DeviceOp>) {
    while let Some(op) = ops.pop() {
        if let DeviceOpKind::WritePages { offset, bytes } = &op.kind {
            disk.write_durably(*offset, bytes);
        }
        ops.extend(pool.done(op.token, Ok(())).0);
    }
}

fn fill_pool(pool: &mut DevicePool, disk: &mut Disk, layout: Layout) {
    for first in (0..BLOCKS).step_by(usize::try_from(BATCH).expect("small")) {
        let blocks = (first..first + BATCH).map(|number| {
            let page = pool.allocate(layout.slot_bytes()).expect("room");
            let slot = ArenaSlot { region: RegionId(0), offset: 0, bytes: layout.slot_bytes() };
            let checksums = vec![0; layout.objects() as usize].into();
            let content = ContentId::UNKNOWN;
            let tenant = TenantId(number as u16 % 4);
            BlockWrite {
                key: key(number),
                tenant,
                tenant_name: None,
                layout,
                content,
                priority: 1,
                checksums,
                slot,
                page,
            }
        });
        let blocks = blocks.collect();
        let ops = pool.write_batch(batch(first), blocks);
        execute(pool, disk, ops);
    }
}

/// CPU time of this thread, in seconds. Unlike elapsed time, it does not depend on other processes.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").expect("procfs");
    let nanoseconds = text.split_whitespace().next().expect("the time on a processor comes first");
    nanoseconds.parse::<f64>().expect("a number") / 1e9
}

fn timed_recovery(disk: &Disk) -> (DevicePool, Vec<StoredBlock>, f64) {
    let begun = cpu_seconds();
    let (pool, stored, report) = recover(disk).expect("opens");
    assert!(report.is_clean(), "{report:?}");
    (pool, stored, cpu_seconds() - begun)
}

/// The fastest of three recoveries, since other processes also use the caches.
fn fastest_recovery(disk: &Disk) -> f64 {
    (0..3).map(|_| timed_recovery(disk).2).fold(f64::MAX, f64::min)
}

#[test]
fn a_million_blocks_fit_the_memory_budget_and_open_with_less_than_two_seconds_of_cpu_time() {
    let params = params_of_a_million();
    let mut disk = Disk::new(params.device_bytes);
    for (offset, bytes) in DevicePool::format(&params).expect("formats") {
        disk.write_durably(offset, &bytes);
    }
    let (mut pool, _, _) = recover(&disk).expect("opens");
    fill_pool(&mut pool, &mut disk, layout(512));
    let usage = pool.usage();
    let per_block = usage.memory_bytes / BLOCKS;
    assert_eq!(usage.blocks_stored, BLOCKS);
    assert!(per_block <= BYTES_PER_BLOCK_MAX, "{per_block} bytes per block");
    let (_, stored, _) = timed_recovery(&disk);
    assert_eq!(stored.len() as u64, BLOCKS);
    let from_log = fastest_recovery(&disk);

    // Append one free at a time until the bank switch: the checkpoint then contains nearly all blocks.
    let mut freed = 0;
    for block in &stored {
        pool.free(block.page);
        let ops = pool.flush_frees();
        execute(&mut pool, &mut disk, ops);
        freed += 1;
        if pool.usage().checkpoints > 0 {
            break;
        }
    }
    assert_eq!(timed_recovery(&disk).1.len() as u64, BLOCKS - freed);
    let from_checkpoint = fastest_recovery(&disk);
    println!(
        "{BLOCKS} blocks: {per_block} bytes each, opened in {from_log:.3} s from the log, {from_checkpoint:.3} s from a checkpoint"
    );
    assert!(
        from_log < SECONDS_MAX && from_checkpoint < SECONDS_MAX,
        "{from_log:.3} s, {from_checkpoint:.3} s"
    );
}

#[test]
fn a_checkpoint_of_a_full_pool_fits_its_area_while_blocks_move_during_the_copy() {
    // 1 GiB: 65,536 entries, but twice as many slots of 8 KiB.
    let params = params(1 << 30);
    let mut disk = Disk::new(params.device_bytes);
    for (offset, bytes) in DevicePool::format(&params).expect("formats") {
        disk.write_durably(offset, &bytes);
    }
    let (mut pool, _, _) = recover(&disk).expect("opens");
    let entries = pool.allocatable(4096);
    assert_eq!(entries, 65_536);
    let mut pages = Vec::new();
    let mut name = 0;
    let mut write = |pool: &mut DevicePool, count: u64, layout: Layout| {
        let pages: Vec<_> = (0..count).map(|_| pool.allocate(layout.slot_bytes()).expect("room")).collect();
        let mut blocks = Vec::with_capacity(pages.len());
        for page in &pages {
            name += 1;
            blocks.push(block_write(key(name), layout, *page));
        }
        (pool.write_batch(batch(name), blocks), pages)
    };
    while pages.len() < 65_536 {
        let (ops, more) = write(&mut pool, 1024, layout(1));
        pages.extend(more);
        execute(&mut pool, &mut disk, ops);
    }
    assert_eq!(pool.allocatable(4096), 0, "the pool is full");
    // Free one block at a time until the bank switch; then hold the checkpoint back after its first
    // writes.
    let first_bank_switch = pool.usage().checkpoints;
    let mut held = Vec::new();
    let mut freed = pages.split_off(pages.len() - 8000);
    while held.is_empty() {
        pool.free(freed.pop().expect("the log is shorter than this"));
        let ops = pool.flush_frees();
        held = execute_without_checkpoint(&mut pool, &mut disk, ops);
    }
    assert_eq!(pool.usage().checkpoints, first_bank_switch);
    // Blocks that the copy has passed are freed and stored again in slots of another size, which the copy
    // has not passed yet.
    pages[..7000].iter().for_each(|page| pool.free(*page));
    let ops = pool.flush_frees();
    assert!(execute_without_checkpoint(&mut pool, &mut disk, ops).is_empty());
    let (ops, _) = write(&mut pool, 7000, layout(2));
    assert!(execute_without_checkpoint(&mut pool, &mut disk, ops).is_empty());
    let stored = pool.usage().blocks_stored;
    execute(&mut pool, &mut disk, held);
    assert_eq!(pool.usage().checkpoints, first_bank_switch + 1);
    assert_eq!(timed_recovery(&disk).1.len() as u64, stored);
}

/// Like `execute`, but leaves checkpoint pages unwritten and returns those operations.
fn execute_without_checkpoint(
    pool: &mut DevicePool,
    disk: &mut Disk,
    mut ops: Vec<DeviceOp>,
) -> Vec<DeviceOp> {
    let mut held = Vec::new();
    while let Some(op) = ops.pop() {
        if let DeviceOpKind::WritePages { offset, bytes } = &op.kind {
            if bytes.starts_with(b"RPCP") {
                held.push(op);
                continue;
            }
            disk.write_durably(*offset, bytes);
        }
        ops.extend(pool.done(op.token, Ok(())).0);
    }
    held
}
