//! Recovery of a pool from a device with damaged and forged metadata.
//!
//! Laws: recovery ends, and either refuses the device with a reason or returns a consistent pool whose blocks lie on the
//! device. The pool can then be repaired.

use std::collections::BTreeSet;

use reprise_agent_core::pool::{DeviceOpKind, Recovery};
use reprise_fuzz::Unstructured;

use crate::pool_damage::{harness_with_history, seal};
use crate::pool_harness::PAGE;
use crate::pool_harness::disk::Disk;
use crate::pool_harness::offsets::{DATA, DEVICE_BYTES};

/// Most changes of an input.
const CHANGES_MAX: usize = 12;

/// Most reads of a recovery: each page of the metadata a few times, if all of them are unreadable.
const READS_MAX: usize = 4 * (DATA / PAGE) as usize;

/// Most operations of a repair: a bank switch, page by page.
const OPERATIONS_MAX: usize = 1000;

pub(super) fn seeds() -> Vec<Vec<u8>> {
    (0..8_u8)
        .map(|seed| (0..48_u8).map(|at| at.wrapping_mul(59).wrapping_add(seed.wrapping_mul(37))).collect())
        .collect()
}

pub(super) fn run() -> impl Fn(&[u8]) {
    // One with a previous bank, and one whose second bank was never used.
    let disks = [2, 0].map(|switches| harness_with_history(7, switches).disk);
    let pages = disks.each_ref().map(|disk| disk.written_before(DATA));
    move |input| {
        let mut choices = Unstructured::new(input);
        let which = usize::from(choices.arbitrary().unwrap_or(false));
        let mut disk = disks[which].clone();
        for _ in 0..CHANGES_MAX {
            if choices.is_empty() || change(&mut disk, &pages[which], &mut choices).is_none() {
                break;
            }
        }
        recover(&disk);
    }
}

/// Changes a page of the metadata; `None` without further bytes.
fn change(disk: &mut Disk, written: &[u64], choices: &mut Unstructured<'_>) -> Option<()> {
    let offset = some_page(written, choices)?;
    let mut page = disk.read(offset, 4096).unwrap_or_else(|| vec![0; 4096]);
    match choices.int_in_range(0..=7_u8).ok()? {
        0 => {
            disk.make_unreadable(offset);
            return Some(());
        }
        1 => page.fill(0),
        2 => page = disk.read(some_page(written, choices)?, 4096).unwrap_or(page),
        3 => {
            let from = choices.choose_index(page.len()).ok()?;
            page[from..].fill(choices.arbitrary().ok()?);
        }
        _ => {
            // Fields of headers and records begin at multiples of two.
            let at = 2 * if choices.arbitrary().ok()? {
                choices.int_in_range(0..=63).ok()?
            } else {
                choices.int_in_range(0..=2046).ok()?
            };
            let field: [u8; 8] = if choices.arbitrary().ok()? {
                choices.arbitrary().ok()?
            } else {
                u64::from(choices.arbitrary::<u8>().ok()?).to_le_bytes()
            };
            let bytes = *choices.choose(&[1, 2, 4, 8]).ok()?;
            page[at..(at + bytes).min(4096)].copy_from_slice(&field[..bytes.min(4096 - at)]);
        }
    }
    if choices.ratio(3, 4_u8).ok()? {
        seal(&mut page);
    }
    disk.write_durably(offset, &page);
    Some(())
}

/// A page that the pool has written, or any of the metadata.
fn some_page(written: &[u64], choices: &mut Unstructured<'_>) -> Option<u64> {
    if choices.ratio(7, 8_u8).ok()? {
        choices.choose(written).ok().copied()
    } else {
        Some(choices.int_in_range(0..=DATA / PAGE - 1).ok()? * PAGE)
    }
}

fn recover(disk: &Disk) {
    let mut recovery = Recovery::new(disk.bytes());
    let mut reads = 0;
    while let Some((offset, bytes)) = recovery.next_read() {
        reads += 1;
        assert!(reads <= READS_MAX, "recovery reads without end");
        let fed = match disk.read(offset, bytes) {
            Some(read) => recovery.feed(&read),
            None => recovery.feed_unreadable(),
        };
        if let Err(error) = fed {
            assert!(!error.to_string().is_empty());
            return;
        }
    }
    let Ok((mut pool, stored, report)) = recovery.finish() else { return };
    pool.audit().expect("consistent");
    assert_eq!(report.blocks_stored, stored.len() as u64);
    let mut pages = BTreeSet::new();
    for block in &stored {
        let end = block.page.offset() + PAGE + block.layout.slot_bytes();
        assert!(block.page.offset() >= DATA && end <= DEVICE_BYTES, "a block outside of the segments");
        assert!(pages.insert(block.page), "two blocks in one slot");
    }
    // Repairs what recovery has found.
    let (mut waiting, mut done) = (pool.flush_frees(), 0);
    while let Some(op) = waiting.pop() {
        done += 1;
        assert!(done <= OPERATIONS_MAX, "a repair without end");
        if let DeviceOpKind::WritePages { offset, bytes } = &op.kind {
            assert!(offset + bytes.len() as u64 <= DATA, "a write of metadata into the segments");
        }
        waiting.extend(pool.done(op.token, Ok(())).0);
    }
    pool.audit().expect("consistent");
}
