//! Writes that fail: what the pool says of their blocks, what goes on, and what a later start finds.

use reprise_agent_core::pool::{BatchId, PoolEvent, SUPERBLOCK_OFFSETS, StoredBlock};
use reprise_io::simulated::{Fault, FaultKind};
use reprise_policy::{BlockKey, Layout};

use super::desk::{Desk, layouts, number};
use super::*;

/// The second copy of the superblock; the journal lies between it and the segments.
const JOURNAL: std::ops::Range<u64> = SUPERBLOCK_OFFSETS[1] + PAGE_BYTES..2 << 20;

fn layout() -> Layout {
    layouts()[0]
}

/// Blocks to be written as one batch, each in the place of its number.
fn start(desk: &mut Desk, batch: u64, numbers: std::ops::Range<u64>) {
    let writes = numbers.map(|number| {
        let page = desk.pool.allocate(layout().slot_bytes()).expect("room");
        desk.fill(number as usize, number, layout(), page)
    });
    let writes = writes.collect();
    let ops = desk.pool.write_batch(BatchId(batch), writes);
    desk.submit(ops);
}

/// What became of the one batch, and how often the device was lost.
fn end(events: Vec<PoolEvent>) -> (Vec<StoredBlock>, Vec<u64>, usize) {
    let (mut ends, mut losses) = (Vec::new(), 0);
    for event in events {
        match event {
            PoolEvent::BatchDone { stored, failed, .. } => {
                let mut failed: Vec<u64> = failed.iter().map(|key: &BlockKey| number(key)).collect();
                failed.sort_unstable();
                ends.push((stored, failed));
            }
            PoolEvent::DeviceLost { .. } => losses += 1,
            PoolEvent::SpaceFreed => {}
        }
    }
    assert_eq!(ends.len(), 1, "a batch ends once");
    let (stored, failed) = ends.remove(0);
    (stored, failed, losses)
}

/// A pool with blocks 0 to 3.
fn with_four_blocks() -> (Desk, Vec<StoredBlock>) {
    let mut desk = Desk::blank(1);
    start(&mut desk, 0, 0..4);
    let (stored, failed, losses) = end(desk.settle());
    assert_eq!((stored.len(), failed.len(), losses), (4, 0, 0));
    (desk, stored)
}

/// A later start finds these blocks and no other ones.
fn assert_found(desk: &Desk, stored: &[StoredBlock]) {
    let mut again = Desk::open(desk.device.image(), 2);
    assert_eq!(again.found, stored);
    again.assert_no_slot_leaks();
    again.read_and_compare(stored);
}

#[test]
fn a_place_that_cannot_be_written_costs_its_block_and_the_rest_of_the_batch_is_durable() {
    let (mut desk, mut stored) = with_four_blocks();
    let slot = layout().slot_bytes() + PAGE_BYTES;
    let second = stored[3].page.offset() + 2 * slot;
    desk.device.inject(Fault::at(FaultKind::WriteError, second..second + slot));
    start(&mut desk, 1, 4..8);
    let (more, failed, losses) = end(desk.settle());
    assert_eq!((more.len(), failed, losses), (3, vec![5], 0));
    assert!(desk.holds(5, 5, &layout()), "it is as readable in memory as before");
    assert_eq!((desk.pool.usage().slots_quarantined, desk.losses.len()), (1, 0));
    stored.extend(more);
    start(&mut desk, 2, 8..12);
    let (more, failed, losses) = end(desk.settle());
    assert_eq!((more.len(), failed.len(), losses), (4, 0, 0), "the device goes on");
    stored.extend(more);
    assert_found(&desk, &stored);
    desk.read_and_compare(&stored);
}

#[test]
fn a_device_that_fills_up_makes_nothing_durable_any_more_and_loses_nothing_that_was() {
    let (mut desk, stored) = with_four_blocks();
    start(&mut desk, 1, 4..12);
    // Some of the blocks are written by then.
    desk.turn();
    desk.device.inject(Fault::everywhere(FaultKind::Full));
    let (more, failed, losses) = end(desk.settle());
    assert_eq!((more.len(), failed, losses), (0, (4..12).collect(), 1));
    assert!((4..12).all(|number| desk.holds(number as usize, number, &layout())));
    let [reason] = desk.losses.as_slice() else { panic!("said once: {:?}", desk.losses) };
    assert!(reason.contains("no space") && reason.contains("free space"), "{reason}");
    assert!(!desk.pool.can_start_batch() && desk.pool.allocate(layout().slot_bytes()).is_none());
    assert_found(&desk, &stored);
}

#[test]
fn a_journal_that_cannot_be_written_makes_nothing_durable_any_more_and_what_was_can_be_read() {
    let (mut desk, stored) = with_four_blocks();
    desk.device.inject(Fault::at(FaultKind::WriteError, JOURNAL));
    start(&mut desk, 1, 4..8);
    let (more, failed, losses) = end(desk.settle());
    assert_eq!((more.len(), failed, losses), (0, (4..8).collect(), 1));
    assert!(!desk.pool.can_start_batch());
    // The worker has no part in that: it reads.
    assert_eq!(desk.losses, [""; 0]);
    desk.read_and_compare(&stored);
    // What lies in the journal's torn end is not known, but all before it is.
    let mut again = Desk::open(desk.device.image(), 2);
    assert_eq!(again.found[..4], stored);
    let found = again.found.clone();
    again.read_and_compare(&found);
}
