//! Failing writes: results reported for their blocks, behaviour afterwards, and content at the next start.

use reprise_agent_core::pool::{BatchId, PoolEvent, SUPERBLOCK_OFFSETS, StoredBlock};
use reprise_io::simulated::{Fault, FaultKind};
use reprise_policy::{BlockKey, Layout};

use super::test_bench::{TestBench, layouts, number};
use super::*;

/// The range between the second superblock and the segments.
const JOURNAL: std::ops::Range<u64> = SUPERBLOCK_OFFSETS[1] + PAGE_BYTES..2 << 20;

fn layout() -> Layout {
    layouts()[0]
}

/// Writes blocks as one batch, each from the slot of its number.
fn start(bench: &mut TestBench, batch: u64, numbers: std::ops::Range<u64>) {
    let writes = numbers.map(|number| {
        let page = bench.pool.allocate(layout().slot_bytes()).expect("room");
        bench.fill(number as usize, number, layout(), page)
    });
    let writes = writes.collect();
    let ops = bench.pool.write_batch(BatchId(batch), writes);
    bench.submit(ops);
}

/// Returns the result of the single batch, and how often an end of writing was reported.
fn end(events: Vec<PoolEvent>) -> (Vec<StoredBlock>, Vec<u64>, usize) {
    let (mut ends, mut stops) = (Vec::new(), 0);
    for event in events {
        match event {
            PoolEvent::BatchDone { stored, failed, .. } => {
                let mut failed: Vec<u64> = failed.iter().map(|key: &BlockKey| number(key)).collect();
                failed.sort_unstable();
                ends.push((stored, failed));
            }
            PoolEvent::WritesStopped { .. } => stops += 1,
            PoolEvent::DeviceLost { reason } => panic!("the device is not lost: {reason}"),
            PoolEvent::SpaceFreed => {}
        }
    }
    assert_eq!(ends.len(), 1, "a batch ends once");
    let (stored, failed) = ends.remove(0);
    (stored, failed, stops)
}

/// Returns a pool with blocks 0 to 3.
fn with_four_blocks() -> (TestBench, Vec<StoredBlock>) {
    let mut bench = TestBench::blank(1);
    start(&mut bench, 0, 0..4);
    let (stored, failed, stops) = end(bench.run_until_idle());
    assert_eq!((stored.len(), failed.len(), stops), (4, 0, 0));
    (bench, stored)
}

/// Asserts that the next start finds exactly these blocks.
fn assert_found(bench: &TestBench, stored: &[StoredBlock]) {
    let mut again: TestBench = TestBench::open(bench.device.image(), 2);
    assert_eq!(again.found, stored);
    again.assert_no_slot_leaks();
    again.read_and_compare(stored);
}

#[test]
fn failed_write_loses_its_block_and_the_rest_of_the_batch_is_durable() {
    let (mut bench, mut stored) = with_four_blocks();
    let slot = layout().slot_bytes() + PAGE_BYTES;
    let second = stored[3].page.offset() + 2 * slot;
    bench.device.inject(Fault::at(FaultKind::WriteError, second..second + slot));
    start(&mut bench, 1, 4..8);
    let (more, failed, stops) = end(bench.run_until_idle());
    assert_eq!((more.len(), failed, stops), (3, vec![5], 0));
    assert!(bench.holds(5, 5, &layout()), "it is still readable in memory");
    assert_eq!((bench.pool.usage().slots_quarantined, bench.losses.len()), (1, 0));
    stored.extend(more);
    start(&mut bench, 2, 8..12);
    let (more, failed, stops) = end(bench.run_until_idle());
    assert_eq!((more.len(), failed.len(), stops), (4, 0, 0), "the device continues");
    stored.extend(more);
    assert_found(&bench, &stored);
    bench.read_and_compare(&stored);
}

#[test]
fn full_device_rejects_writes_and_loses_no_durable_block() {
    let (mut bench, stored) = with_four_blocks();
    start(&mut bench, 1, 4..12);
    // Some of the blocks are written by then.
    bench.run_once();
    bench.device.inject(Fault::everywhere(FaultKind::Full));
    let (more, failed, stops) = end(bench.run_until_idle());
    assert_eq!((more.len(), failed, stops), (0, (4..12).collect(), 1));
    assert!((4..12).all(|number| bench.holds(number as usize, number, &layout())));
    assert_eq!(bench.losses, [""; 0]);
    let reason = bench.write_error().expect("writing has ended");
    assert!(reason.contains("no space") && reason.contains("free space"), "{reason}");
    bench.read_and_compare(&stored);
    assert!(!bench.pool.can_start_batch() && bench.pool.allocate(layout().slot_bytes()).is_none());
    // Only stored blocks have slots, also after a removal that cannot become durable.
    let slot = layout().slot_bytes() + PAGE_BYTES;
    bench.pool.free(stored[0].page);
    let usage = bench.pool.usage();
    assert_eq!((usage.slot_bytes_used, usage.pending_frees_bytes), (3 * slot, 0));
    assert_eq!(bench.pool.audit(), Ok(()));
    assert_found(&bench, &stored);
}

#[test]
fn with_a_failed_journal_nothing_becomes_durable_and_durable_blocks_are_readable() {
    let (mut bench, stored) = with_four_blocks();
    bench.device.inject(Fault::at(FaultKind::WriteError, JOURNAL));
    start(&mut bench, 1, 4..8);
    let (more, failed, stops) = end(bench.run_until_idle());
    assert_eq!((more.len(), failed, stops), (0, (4..8).collect(), 1));
    assert!(!bench.pool.can_start_batch());
    // The worker is not affected and continues to read.
    assert_eq!(bench.losses, [""; 0]);
    bench.read_and_compare(&stored);
    // The torn end of the journal is undefined, but everything before it is intact.
    let mut again: TestBench = TestBench::open(bench.device.image(), 2);
    assert_eq!(again.found[..4], stored);
    let found = again.found.clone();
    again.read_and_compare(&found);
}
