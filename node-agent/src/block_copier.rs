//! The thread that copies blocks of a public tenant within the arena, for other tenants.
//!
//! Each object passes a private buffer, where it is verified: no process can change it between copy and check. A block of
//! 2 MiB takes about 0.4 ms, too long for the core's thread.
//!
//! A tenant may import a block again, after its copy was evicted or under another key. Batches therefore wait in a queue
//! for each tenant, and the next block is of the tenant that is due by weight. The source of a waiting copy stays leased,
//! so the batches of a tenant are limited.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use reprise_agent_core::effect::{BlockCopy, CopyBatch, FillId};
use reprise_agent_core::event::{Event, FillError, FillUpdate};
use reprise_buffers::{Arena, BufferError};
use reprise_policy::fair_order::Weights;
use reprise_policy::fair_queue::FairQueue;
use reprise_policy::{Layout, TenantId, Tier};

use crate::core_loop::{Inbox, Input};
use crate::error::{AgentError, ErrorKind};

/// Maximum batches of a tenant in the queue, each of one load. A batch beyond it is rejected, and its blocks count as
/// missing. The slots of the arena limit the batches of all tenants, because each block has one.
const TENANT_BATCHES_MAX: usize = 256;

/// Handle of the thread, which ends when the handle is dropped.
pub(crate) struct BlockCopier {
    shared: Arc<Shared>,
}

struct Shared {
    queue: Mutex<CopyQueue>,
    changed: Condvar,
}

/// Blocks to copy, in queues of their tenants.
struct CopyQueue {
    batches: FairQueue<TenantId, WaitingBatch>,
    /// Number of batches of each tenant that has some.
    lengths: BTreeMap<TenantId, usize>,
    is_closed: bool,
}

/// Rest of a batch: at least one block.
struct WaitingBatch {
    tenant: TenantId,
    layout: Layout,
    blocks: std::vec::IntoIter<BlockCopy>,
}

impl CopyQueue {
    fn new(weights: Weights<TenantId>) -> CopyQueue {
        CopyQueue { batches: FairQueue::new(weights), lengths: BTreeMap::new(), is_closed: false }
    }

    /// Appends a batch.
    ///
    /// # Errors
    /// The fills of a batch beyond the limit of its tenant.
    fn push(&mut self, batch: CopyBatch) -> Result<(), Vec<FillId>> {
        let CopyBatch { tenant, layout, blocks } = batch;
        if blocks.is_empty() {
            return Ok(());
        }
        let length = self.lengths.entry(tenant).or_default();
        if *length >= TENANT_BATCHES_MAX {
            return Err(blocks.iter().map(|block| block.fill).collect());
        }
        *length += 1;
        self.batches.push(&tenant, WaitingBatch { tenant, layout, blocks: blocks.into_iter() });
        Ok(())
    }

    /// Removes the next block, of the tenant that is due.
    fn pop(&mut self) -> Option<(Layout, BlockCopy)> {
        let WaitingBatch { tenant, layout, blocks } = self.batches.front_mut()?;
        let block = blocks.next()?;
        let (tenant, layout, is_last) = (*tenant, *layout, blocks.as_slice().is_empty());
        if is_last {
            self.batches.pop(|_| layout.block_bytes());
            self.batch_ended(tenant);
        } else {
            self.batches.charge(layout.block_bytes());
        }
        Some((layout, block))
    }

    fn batch_ended(&mut self, tenant: TenantId) {
        if let Some(length) = self.lengths.get_mut(&tenant) {
            *length -= 1;
            if *length == 0 {
                self.lengths.remove(&tenant);
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, CopyQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a block to copy; `None` after the end of the handle.
    fn next_block(&self) -> Option<(Layout, BlockCopy)> {
        let mut queue = self.lock();
        loop {
            if queue.is_closed {
                return None;
            }
            if let Some(next) = queue.pop() {
                return Some(next);
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl BlockCopier {
    /// Starts the thread, with the weights of tenants.
    ///
    /// # Errors
    /// The thread cannot be spawned.
    pub(crate) fn start(
        arena: Arc<Arena>,
        inbox: Inbox,
        weights: Weights<TenantId>,
    ) -> Result<BlockCopier, AgentError> {
        let shared = Arc::new(Shared { queue: Mutex::new(CopyQueue::new(weights)), changed: Condvar::new() });
        let of_thread = shared.clone();
        std::thread::Builder::new()
            .name("block-copier".to_owned())
            .spawn(move || run(&arena, &inbox, &of_thread))
            .map_err(|error| {
                AgentError::new(ErrorKind::Resource, "cannot spawn the thread that copies blocks")
                    .with_source(error)
            })?;
        Ok(BlockCopier { shared })
    }

    /// Queues copies; their results are sent as events.
    ///
    /// # Errors
    /// The fills of a batch that was not queued.
    pub(crate) fn submit(&self, batch: CopyBatch) -> Result<(), Vec<FillId>> {
        self.shared.lock().push(batch)?;
        self.shared.changed.notify_one();
        Ok(())
    }
}

impl Drop for BlockCopier {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_one();
    }
}

fn run(arena: &Arena, inbox: &Inbox, shared: &Shared) {
    let mut buffer = Vec::new();
    while let Some((layout, block)) = shared.next_block() {
        let update = match copy(arena, &layout, &block, &mut buffer) {
            Ok(true) => FillUpdate::Layers { layers: layout.layers(), checksums: None, tier: Tier::Dram },
            Ok(false) => FillUpdate::Failed(FillError::Corrupt),
            // A slot is outside the arena, so nothing was copied.
            Err(_) => FillUpdate::Failed(FillError::Refused),
        };
        if inbox.send(Input::Event(Event::Fill { fill: block.fill, update })).is_err() {
            return;
        }
    }
}

/// Copies a block; `false` if an object does not match its checksum.
fn copy(
    arena: &Arena,
    layout: &Layout,
    block: &BlockCopy,
    buffer: &mut Vec<u8>,
) -> Result<bool, BufferError> {
    let object_bytes = layout.object_bytes();
    buffer.resize(usize::try_from(object_bytes).expect("a block is at most 128 MiB"), 0);
    for (object, checksum) in (0..).zip(&block.checksums) {
        let offset = object * object_bytes;
        let from = arena.span(block.from.region.0, block.from.offset + offset, object_bytes)?;
        let into = arena.span(block.into.region.0, block.into.offset + offset, object_bytes)?;
        if from.copy_out_checked(buffer) != *checksum {
            return Ok(false);
        }
        into.copy_in(buffer)?;
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use reprise_agent_core::effect::{ArenaSlot, RegionId};
    use reprise_buffers::{ArenaConfig, HugePolicy};
    use reprise_policy::{Dtype, LayoutSpec, Parts};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    /// Returns a layout with four objects of 4 KiB.
    fn layout() -> Layout {
        let (layers, parts, kv_heads, head_dim) = (2, Parts::KeyValue, 1, 128);
        let (dtype, tokens_per_block, tp_rank, tp_size) = (Dtype::Bf16, 16, 0, 1);
        LayoutSpec { layers, parts, kv_heads, head_dim, dtype, tokens_per_block, tp_rank, tp_size }
            .validate()
            .expect("a valid layout")
    }

    fn slot(region: u16, offset: u64) -> ArenaSlot {
        ArenaSlot { region: RegionId(region), offset, bytes: layout().slot_bytes() }
    }

    #[test]
    fn block_is_copied_between_regions_and_a_damaged_one_is_reported() {
        let region_bytes = 2 << 20;
        let config = ArenaConfig { bytes: 2 * region_bytes, region_bytes, huge: HugePolicy::Never };
        let arena = Arc::new(Arena::new(&config).expect("4 MiB"));
        let object = |region, number: u64| arena.span(region, 65536 + number * 4096, 4096).expect("inside");
        for number in 0..4 {
            object(0, number).copy_in(&[number as u8 + 1; 4096]).expect("as long as the span");
        }
        let checksums: Box<[u32]> = (0..4).map(|number| object(0, number).crc32c()).collect();
        let (inbox, events) = Inbox::new();
        let copier = BlockCopier::start(arena.clone(), inbox, Weights::default()).expect("a thread");
        let result = |from: ArenaSlot, id| {
            let block =
                BlockCopy { fill: FillId(id), from, into: slot(1, 65536), checksums: checksums.clone() };
            let batch = CopyBatch { tenant: TenantId(1), layout: layout(), blocks: vec![block] };
            copier.submit(batch).expect("room");
            match events.recv_timeout(PATIENCE).expect("an event") {
                Input::Event(Event::Fill { fill, update }) if fill == FillId(id) => update,
                _ => panic!("expected the result of the copy"),
            }
        };
        let whole = FillUpdate::Layers { layers: 2, checksums: None, tier: Tier::Dram };
        assert_eq!(result(slot(0, 65536), 1), whole);
        let copied: Vec<u32> = (0..4).map(|number| object(1, number).crc32c()).collect();
        assert_eq!(copied, checksums.to_vec());
        arena.span(0, 65536 + 4 * 4096 - 1, 1).and_then(|byte| byte.copy_in(&[0])).expect("inside");
        assert_eq!(result(slot(0, 65536), 2), FillUpdate::Failed(FillError::Corrupt));
        assert_eq!(result(slot(0, 2 << 20), 3), FillUpdate::Failed(FillError::Refused));
    }

    /// Returns a batch of blocks, which are numbered from `fill`.
    fn batch(tenant: TenantId, fill: u64, blocks: u64) -> CopyBatch {
        let block = |fill| {
            let (from, into) = (slot(0, 65536), slot(1, 65536));
            BlockCopy { fill: FillId(fill), from, into, checksums: Box::default() }
        };
        CopyBatch { tenant, layout: layout(), blocks: (fill..fill + blocks).map(block).collect() }
    }

    #[test]
    fn tenant_with_many_batches_delays_another_one_by_one_block() {
        let (flooding, other) = (TenantId(1), TenantId(2));
        for served_before in [0, 1, 57] {
            let mut queue = CopyQueue::new(Weights::default());
            for number in 0..100 {
                queue.push(batch(flooding, number * 10, 10)).expect("room");
            }
            (0..served_before).for_each(|_| drop(queue.pop().expect("a block")));
            queue.push(batch(other, 5000, 1)).expect("room");
            let fills: Vec<FillId> = (0..2).map(|_| queue.pop().expect("a block").1.fill).collect();
            assert!(fills.contains(&FillId(5000)), "{fills:?} after {served_before} blocks");
            let rest: Vec<FillId> = std::iter::from_fn(|| queue.pop()).map(|(_, block)| block.fill).collect();
            assert_eq!(rest.len(), 1000 - served_before - 1);
            assert!(rest.is_sorted(), "blocks of a tenant are copied in order");
        }
    }

    #[test]
    fn full_queue_of_a_tenant_rejects_its_batches_only() {
        let (flooding, other) = (TenantId(1), TenantId(2));
        let mut queue = CopyQueue::new(Weights::default());
        for number in 0..TENANT_BATCHES_MAX as u64 {
            queue.push(batch(flooding, number, 1)).expect("room");
        }
        assert_eq!(queue.push(batch(flooding, 5000, 2)), Err(vec![FillId(5000), FillId(5001)]));
        queue.push(batch(other, 6000, 1)).expect("room");
        assert_eq!(queue.pop().expect("a block").1.fill, FillId(0));
        queue.push(batch(flooding, 7000, 1)).expect("a batch has ended");
        while queue.pop().is_some() {}
        assert!(queue.lengths.is_empty());
    }
}
