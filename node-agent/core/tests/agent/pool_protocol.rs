//! The order of operations of a pool in use, and its behavior when the device fails.

use crate::pool_harness::disk::Disk;
use crate::pool_harness::offsets::checkpoint_page;
use crate::pool_harness::{Harness, batch, block_write, formatted, layout, params, recover};
use reprise_agent_core::pool::{
    BATCHES_MAX, DeviceError, DeviceOp, DeviceOpKind, DevicePool, OpToken, PageNumber, PoolError, PoolEvent,
    PoolParams,
};
use reprise_policy::{BlockKey, ContentId, Layout, LayoutSpec};

const DEVICE_BYTES: u64 = 16 << 20;

fn open(disk: &Disk) -> DevicePool {
    recover(disk).expect("opens").0
}

fn fresh() -> DevicePool {
    open(&formatted(&params(DEVICE_BYTES)))
}

fn key(number: u8) -> BlockKey {
    BlockKey([number; 16])
}

/// Starts a batch of blocks of one layout, with consecutive keys from `first`.
fn start(
    pool: &mut DevicePool,
    name: u64,
    first: u8,
    count: u8,
    layout: Layout,
) -> (Vec<PageNumber>, Vec<DeviceOp>) {
    let keys = first..first + count;
    let pages: Vec<PageNumber> =
        keys.clone().map(|_| pool.allocate(layout.slot_bytes()).expect("room")).collect();
    let blocks = keys.zip(&pages).map(|(number, page)| block_write(key(number), layout, *page)).collect();
    let ops = pool.write_batch(batch(name), blocks);
    (pages, ops)
}

fn kinds(ops: &[DeviceOp]) -> Vec<&'static str> {
    let kind = |op: &DeviceOp| match op.kind {
        DeviceOpKind::WritePages { .. } => "pages",
        DeviceOpKind::WriteBlock { .. } => "block",
        DeviceOpKind::WriteHeader { .. } => "header",
        DeviceOpKind::Sync => "sync",
    };
    ops.iter().map(kind).collect()
}

/// Reports operations done until the pool issues none; returns all events.
fn run_to_completion(pool: &mut DevicePool, mut ops: Vec<DeviceOp>) -> Vec<PoolEvent> {
    let mut all = Vec::new();
    while let Some(op) = ops.pop() {
        let (more, events) = pool.done(op.token, Ok(()));
        ops.extend(more);
        all.extend(events);
    }
    all
}

fn done(pool: &mut DevicePool, token: OpToken) -> (Vec<&'static str>, Vec<DeviceOp>, Vec<PoolEvent>) {
    let (ops, events) = pool.done(token, Ok(()));
    (kinds(&ops), ops, events)
}

#[test]
fn blocks_are_synced_before_their_records_and_records_before_the_report() {
    let mut pool = fresh();
    let (pages, ops) = start(&mut pool, 7, 1, 2, layout(3));
    assert_eq!(kinds(&ops), ["block", "block"]);
    assert_eq!(done(&mut pool, ops[0].token).0, [""; 0]);
    let (next, sync, events) = done(&mut pool, ops[1].token);
    assert_eq!((next, events.len()), (vec!["sync"], 0));
    let (next, journal, events) = done(&mut pool, sync[0].token);
    assert_eq!((next, events.len()), (vec!["pages"], 0));
    let (next, sync, events) = done(&mut pool, journal[0].token);
    assert_eq!((next, events.len()), (vec!["sync"], 0));
    assert_eq!(pool.usage().blocks_stored, 0);
    let (next, _, events) = done(&mut pool, sync[0].token);
    assert!(next.is_empty());
    let [PoolEvent::BatchDone { batch: name, stored, failed }] = events.as_slice() else {
        panic!("{events:?}")
    };
    assert_eq!((*name, failed.len()), (batch(7), 0));
    assert_eq!(stored.iter().map(|block| block.page).collect::<Vec<_>>(), pages);
    assert_eq!(pool.usage().blocks_stored, 2);
}

#[test]
fn an_empty_batch_is_reported_after_a_sync() {
    let mut pool = fresh();
    let ops = pool.write_batch(batch(1), Vec::new());
    assert_eq!(kinds(&ops), ["sync"]);
    let events = run_to_completion(&mut pool, ops);
    assert_eq!(events, [PoolEvent::BatchDone { batch: batch(1), stored: vec![], failed: vec![] }]);
}

#[test]
fn batches_overlap_and_share_syncs_and_journal_pages_up_to_a_limit() {
    let mut pool = fresh();
    let ops: Vec<DeviceOp> = (0..BATCHES_MAX as u64)
        .map(|name| start(&mut pool, name, 1 + name as u8, 1, layout(3)).1.remove(0))
        .collect();
    assert!(!pool.can_start_batch());
    let (_, first_sync, _) = done(&mut pool, ops[0].token);
    // The other batches finish while the sync of the first one runs. That sync does not cover them; one
    // further sync covers them all.
    for op in &ops[1..] {
        assert_eq!(done(&mut pool, op.token).0, [""; 0]);
    }
    let (next, more, _) = done(&mut pool, first_sync[0].token);
    assert_eq!(next, ["pages", "sync"]);
    let (_, _, _) = done(&mut pool, more[0].token);
    let (next, more, events) = done(&mut pool, more[1].token);
    assert_eq!((next, events.len()), (vec!["sync"], 0));
    let (next, more, events) = done(&mut pool, more[0].token);
    assert_eq!((next, events.len()), (vec!["pages"], 1), "the others' records share a page");
    assert!(pool.can_start_batch());
    let events = run_to_completion(&mut pool, more);
    assert_eq!(events.len(), BATCHES_MAX - 1);
}

#[test]
fn a_freed_slot_is_allocated_only_after_its_free_record_is_durable() {
    let mut pool = fresh();
    let large = layout(300);
    let (pages, ops) = start(&mut pool, 1, 1, 1, large);
    run_to_completion(&mut pool, ops);
    let slots = pool.allocatable(large.slot_bytes());
    for _ in 0..slots {
        pool.allocate(large.slot_bytes()).expect("allocatable");
    }
    assert_eq!(pool.allocate(large.slot_bytes()), None);
    pool.free(pages[0]);
    assert_eq!(pool.usage().blocks_stored, 0);
    assert_eq!(pool.allocate(large.slot_bytes()), None);
    assert_eq!(pool.usage().pending_frees_bytes, 301 * 4096);
    let ops = pool.flush_frees();
    assert_eq!(kinds(&ops), ["pages"]);
    let (next, sync, _) = done(&mut pool, ops[0].token);
    assert_eq!((next, pool.allocate(large.slot_bytes())), (vec!["sync"], None));
    let (_, _, events) = done(&mut pool, sync[0].token);
    assert_eq!(events, [PoolEvent::SpaceFreed]);
    assert_eq!(pool.usage().pending_frees_bytes, 0);
    assert_eq!(pool.allocate(large.slot_bytes()), Some(pages[0]));
}

#[test]
fn frees_share_the_journal_pages_of_a_batch() {
    let mut pool = fresh();
    let (pages, ops) = start(&mut pool, 1, 1, 1, layout(3));
    run_to_completion(&mut pool, ops);
    pool.free(pages[0]);
    let (_, ops) = start(&mut pool, 2, 2, 1, layout(3));
    let records = pool.usage().journal_records;
    let events = run_to_completion(&mut pool, ops);
    assert!(events.contains(&PoolEvent::SpaceFreed) && events.len() == 2, "{events:?}");
    assert_eq!(pool.usage().journal_records, records + 2);
    assert_eq!(pool.usage().journal_bytes_used, 2 * 4096);
}

#[test]
fn flushing_nothing_does_nothing() {
    let mut pool = fresh();
    assert!(pool.flush_frees().is_empty());
}

#[test]
fn a_media_error_loses_one_block_and_its_slot_and_the_rest_of_the_batch_is_stored() {
    let disk = formatted(&params(DEVICE_BYTES));
    let mut harness = Harness::on(disk, 1);
    let pages: Vec<PageNumber> = (0..3).map(|_| harness.allocate(layout(3))).collect();
    let keys = harness.write(&pages, layout(3));
    let bad = pages[1].offset();
    let fail = |kind: &DeviceOpKind| match kind {
        DeviceOpKind::WriteBlock { offset, .. } if *offset == bad => Err(DeviceError::Media),
        _ => Ok(()),
    };
    while harness.step_with(|_, kind| fail(kind)) {}
    let [PoolEvent::BatchDone { stored, failed, .. }] = harness.events.as_slice() else {
        panic!("{:?}", harness.events)
    };
    assert_eq!((stored.len(), failed.as_slice()), (2, [keys[1]].as_slice()));
    assert_eq!((harness.pool.usage().slots_quarantined, harness.pool.usage().blocks_stored), (1, 2));
    let report = harness.lose_power();
    assert_eq!((report.slots_quarantined, report.blocks_stored), (1, 2));
    let layout = layout(3);
    let slots = harness.pool.allocatable(layout.slot_bytes());
    let all: Vec<PageNumber> =
        (0..slots).map(|_| harness.pool.allocate(layout.slot_bytes()).expect("room")).collect();
    assert!(!all.contains(&pages[1]), "a quarantined slot is never used again");
}

#[test]
fn a_refused_write_loses_its_block_and_leaves_the_slot_free() {
    let disk = formatted(&params(DEVICE_BYTES));
    let mut harness = Harness::on(disk, 1);
    let before = harness.pool.allocatable(layout(3).slot_bytes());
    let pages: Vec<PageNumber> = (0..3).map(|_| harness.allocate(layout(3))).collect();
    let keys = harness.write(&pages, layout(3));
    let refused = pages[1].offset();
    let refuse = |kind: &DeviceOpKind| match kind {
        DeviceOpKind::WriteBlock { offset, .. } if *offset == refused => Err(DeviceError::Refused),
        _ => Ok(()),
    };
    while harness.step_with(|_, kind| refuse(kind)) {}
    let [PoolEvent::BatchDone { stored, failed, .. }] = harness.events.as_slice() else {
        panic!("{:?}", harness.events)
    };
    assert_eq!((stored.len(), failed.as_slice()), (2, [keys[1]].as_slice()));
    assert_eq!(harness.pool.usage().slots_quarantined, 0);
    assert_eq!(harness.pool.allocatable(layout(3).slot_bytes()), before - 2);
    harness.pool.audit().expect("consistent");
}

#[test]
fn a_damaged_block_can_be_quarantined_while_it_is_being_freed() {
    let mut pool = fresh();
    let (pages, ops) = start(&mut pool, 1, 1, 2, layout(3));
    run_to_completion(&mut pool, ops);
    pool.free(pages[0]);
    pool.quarantine(pages[0]);
    pool.quarantine(pages[1]);
    pool.quarantine(pages[1]);
    pool.free(pages[1]);
    let ops = pool.flush_frees();
    assert_eq!(run_to_completion(&mut pool, ops), []);
    let usage = pool.usage();
    assert_eq!((usage.slots_quarantined, usage.blocks_stored, usage.pending_frees_bytes), (2, 0, 0));
    pool.audit().expect("consistent");
}

/// Runs two batches, of which the first one meets an error. Returns the pool and all events.
fn stopped_by(
    make_unreadable: impl Fn(&DeviceOpKind) -> bool,
    error: DeviceError,
) -> (DevicePool, Vec<PoolEvent>) {
    let mut pool = fresh();
    let (_, mut ops) = start(&mut pool, 1, 1, 2, layout(3));
    let (_, second) = start(&mut pool, 2, 11, 1, layout(3));
    let mut all = Vec::new();
    while let Some(op) = ops.pop() {
        let result = if make_unreadable(&op.kind) { Err(error) } else { Ok(()) };
        let (more, events) = pool.done(op.token, result);
        all.extend(events);
        if !all.is_empty() {
            assert!(more.is_empty(), "a lost device gets no further operations: {more:?}");
        }
        ops.extend(more);
    }
    let is_lost = matches!(all.first(), Some(PoolEvent::DeviceLost { .. }));
    let is_read_only = matches!(all.first(), Some(PoolEvent::WritesStopped { .. }));
    assert_eq!((is_lost, is_read_only), (error == DeviceError::Lost, error != DeviceError::Lost), "{all:?}");
    assert_eq!(all.len(), 2, "the batch that is still being written is not reported: {all:?}");
    let (more, events) = pool.done(second[0].token, Ok(()));
    assert!(more.is_empty());
    all.extend(events);
    (pool, all)
}

#[test]
fn after_a_failed_sync_or_journal_write_nothing_is_reported_durable() {
    let is_sync = |kind: &DeviceOpKind| matches!(kind, DeviceOpKind::Sync);
    let is_pages = |kind: &DeviceOpKind| matches!(kind, DeviceOpKind::WritePages { .. });
    let is_block = |kind: &DeviceOpKind| matches!(kind, DeviceOpKind::WriteBlock { .. });
    let runs = [
        stopped_by(is_sync, DeviceError::Media),
        stopped_by(is_sync, DeviceError::Lost),
        stopped_by(is_sync, DeviceError::Refused),
        stopped_by(is_pages, DeviceError::Refused),
        stopped_by(is_pages, DeviceError::Media),
        stopped_by(is_pages, DeviceError::Unwritable),
        stopped_by(is_sync, DeviceError::Unwritable),
        stopped_by(is_block, DeviceError::Unwritable),
        stopped_by(is_block, DeviceError::Lost),
    ];
    for (mut pool, events) in runs {
        let failed: Vec<&PoolEvent> = events[1..].iter().collect();
        let expected = [(1, vec![key(1), key(2)]), (2, vec![key(11)])];
        for (name, keys) in expected {
            let report = PoolEvent::BatchDone { batch: batch(name), stored: vec![], failed: keys };
            assert!(failed.contains(&&report), "{events:?}");
        }
        assert!(!pool.can_start_batch() && pool.flush_frees().is_empty());
        assert_eq!(pool.allocate(layout(3).slot_bytes()), None);
        assert!(!pool.is_writable() && pool.allocatable(layout(3).slot_bytes()) == 0);
        pool.audit().expect("consistent");
    }
}

#[test]
fn blocks_can_be_freed_and_quarantined_after_writing_has_ended_without_any_operation() {
    let mut pool = fresh();
    let (pages, ops) = start(&mut pool, 1, 1, 3, layout(3));
    run_to_completion(&mut pool, ops);
    let (_, ops) = start(&mut pool, 2, 11, 1, layout(3));
    let (more, events) = pool.done(ops[0].token, Err(DeviceError::Unwritable));
    assert!(more.is_empty() && matches!(events[0], PoolEvent::WritesStopped { .. }), "{events:?}");
    pool.free(pages[0]);
    pool.quarantine(pages[1]);
    assert!(pool.flush_frees().is_empty());
    assert!(pool.stored(pages[0]).is_none() && pool.stored(pages[2]).is_some());
    pool.audit().expect("consistent");
}

#[test]
fn an_empty_segment_is_released_and_can_take_another_slot_size() {
    let mut pool = fresh();
    let whole = pool.usage();
    let (pages, ops) = start(&mut pool, 1, 1, 1, layout(3));
    run_to_completion(&mut pool, ops);
    let large = layout(511);
    assert_eq!(pool.payload_bytes_max(), large.slot_bytes());
    let before = pool.allocatable(large.slot_bytes());
    pool.free(pages[0]);
    let ops = pool.flush_frees();
    run_to_completion(&mut pool, ops);
    assert_eq!(pool.allocatable(large.slot_bytes()), before + 1);
    assert_eq!(pool.usage().slot_bytes_free, whole.slot_bytes_free);
    assert_eq!(pool.allocate(large.slot_bytes()), Some(pages[0]));
    assert_eq!(pool.allocate(large.slot_bytes() + 1), None, "a slot lies in one segment");
    assert_eq!(pool.allocatable(u64::MAX), 0);
}

#[test]
fn a_batch_larger_than_a_journal_append_takes_several() {
    let mut harness = Harness::on(formatted(&params(DEVICE_BYTES)), 5);
    let pages: Vec<PageNumber> = (0..1500).map(|_| harness.allocate(layout(1))).collect();
    harness.write(&pages, layout(1));
    harness.run_to_completion();
    let [PoolEvent::BatchDone { stored, .. }] = harness.events.as_slice() else {
        panic!("{:?}", harness.events)
    };
    assert_eq!(stored.len(), 1500);
    assert_eq!(harness.lose_power().blocks_stored, 1500);
}

#[test]
fn capacity_of_a_pool_is_limited_by_its_checkpoint() {
    let mut harness = Harness::on(formatted(&params(DEVICE_BYTES)), 6);
    let one = layout(1);
    let slots = harness.pool.allocatable(one.slot_bytes());
    assert_eq!(slots, 7 * 256, "seven segments of 256 slots");
    let pages: Vec<PageNumber> = (0..slots).map(|_| harness.allocate(one)).collect();
    assert_eq!(harness.pool.allocate(one.slot_bytes()), None);
    for some in pages.chunks(300) {
        harness.write(some, one);
        harness.run_to_completion();
    }
    // Enough churn for a bank switch while the pool is full.
    while harness.pool.usage().checkpoints < 3 {
        harness.free_one();
        harness.flush();
        harness.run_to_completion();
        let page = harness.allocate(one);
        harness.write(&[page], one);
        harness.run_to_completion();
    }
    assert_eq!(harness.lose_power().blocks_stored, slots);
}

#[test]
fn too_many_layouts_are_refused_block_by_block() {
    let spec = *layout(1).spec();
    let many: Vec<Layout> = (1..=1030u16)
        .map(|rank| LayoutSpec { tp_rank: rank, tp_size: 2000, ..spec }.validate().expect("valid"))
        .collect();
    let mut pool = fresh();
    let blocks = many.iter().enumerate().map(|(number, layout)| {
        let page = pool.allocate(layout.slot_bytes()).expect("room");
        let mut key = [0; 16];
        key[..8].copy_from_slice(&(number as u64).to_le_bytes());
        block_write(BlockKey(key), *layout, page)
    });
    let blocks: Vec<_> = blocks.collect();
    let ops = pool.write_batch(batch(1), blocks);
    let events = run_to_completion(&mut pool, ops);
    let [PoolEvent::BatchDone { stored, failed, .. }] = events.as_slice() else { panic!("{events:?}") };
    assert_eq!((stored.len(), failed.len()), (1024, 6));
    assert_eq!(pool.usage().slots_quarantined, 0);
    pool.audit().expect("consistent");
}

/// Saves blocks until this number of checkpoints was written since the pool was opened. Two checkpoints
/// return to the bank that was active at the start.
fn write_checkpoints(harness: &mut Harness, wanted: u64) {
    while harness.pool.usage().checkpoints < wanted {
        harness.start_batch(1, &[layout(1)]);
        harness.run_to_completion();
    }
}

/// Whether an entry of the first bank's checkpoint has this content id.
fn is_in_checkpoint(harness: &Harness, content: &ContentId) -> bool {
    let page = harness.disk.read(checkpoint_page(0, 0), 4096).expect("readable");
    page.windows(content.0.len()).any(|bytes| bytes == content.0)
}

#[test]
fn a_known_content_id_survives_checkpoints_and_recoveries_and_is_removed_with_its_block() {
    let mut harness = Harness::on(formatted(&params(DEVICE_BYTES)), 8);
    let page = harness.allocate(layout(1));
    let content = ContentId([9; 16]);
    harness.write_with(&[page], layout(1), content);
    harness.run_to_completion();
    for _ in 0..2 {
        harness.lose_power();
        write_checkpoints(&mut harness, 2);
        assert!(is_in_checkpoint(&harness, &content));
    }
    harness.model.free_requested(page);
    harness.pool.free(page);
    write_checkpoints(&mut harness, 4);
    assert!(!is_in_checkpoint(&harness, &content));
}

#[test]
fn unusable_devices_are_refused_with_a_message() {
    let small = PoolParams { device_bytes: 3 << 20, ..params(0) };
    let error = DevicePool::format(&small).expect_err("too small");
    let PoolError::TooSmall { needed, found } = error else { panic!("{error}") };
    assert_eq!(found, 3 << 20);
    DevicePool::format(&params(needed)).expect("a device of the reported size is large enough");
    for segment_bytes in [0, 1 << 20, 3 << 20, (4 << 30) + (2 << 20)] {
        let bad = PoolParams { segment_bytes, ..params(64 << 30) };
        assert!(matches!(DevicePool::format(&bad), Err(PoolError::BadParams { .. })), "{segment_bytes}");
    }
    let huge = PoolParams { device_bytes: (128 << 40) + 4096, ..params(0) };
    assert!(matches!(DevicePool::format(&huge), Err(PoolError::BadParams { .. })));
    let largest = PoolParams { device_bytes: 128 << 40, segment_bytes: 64 << 20, ..params(0) };
    assert_eq!(DevicePool::format(&largest).map(|pages| pages.len()), Ok(6));
}
