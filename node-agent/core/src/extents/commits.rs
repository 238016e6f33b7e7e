//! Commits of leased slots.

use std::collections::BTreeMap;

use reprise_policy::BlockKey;

use crate::cache::{Cache, ChainPlace, LentSlot, SizeClass};
use crate::context::{Caller, Context};
use crate::effect::{CommitStatus, DeviceId, Reply};
use crate::event::{CommitItem, CommitRequest, Priority};
use crate::extents::{Batch, Extents};
use crate::limits::{COMMIT_ITEMS_MAX, EXTENT_COMMITS_MAX};
use crate::pool::{ExtentCommit, StoredBlock};
use crate::slab::SlabId;

/// Commit with blocks that are neither durable nor failed.
#[derive(Debug)]
pub(super) struct PendingCommit {
    pub(super) from: Caller,
    statuses: Vec<CommitStatus>,
    /// Number of batches without a result.
    open: usize,
    /// Whether the session has ended.
    pub(super) is_answered: bool,
}

/// Blocks of one commit on one device.
#[derive(Debug)]
pub(super) struct CommitBatch {
    pub(super) commit: SlabId,
    device: DeviceId,
    pub(super) items: Vec<CommittedItem>,
}

#[derive(Debug)]
pub(super) struct CommittedItem {
    /// Index in the commit.
    position: usize,
    pub(super) slot: LentSlot,
    place: ChainPlace,
}

impl Extents {
    /// Starts to make the blocks of a commit durable.
    pub(crate) fn commit(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        from: Caller,
        request: &CommitRequest,
    ) {
        let items = &request.items;
        if items.len() > COMMIT_ITEMS_MAX {
            let text = format!("{} items in one commit: send at most {COMMIT_ITEMS_MAX}", items.len());
            return cx.reply(from, Reply::BadRequest(text));
        }
        let in_flight = self.commit_items_in_flight();
        if in_flight + items.len() > EXTENT_COMMITS_MAX {
            let message = format!("{in_flight} extents are being committed, of at most {EXTENT_COMMITS_MAX}");
            return cx.reply(from, Reply::Busy { message, retry_after: self.retry_after });
        }
        let mut statuses = vec![CommitStatus::Failed; items.len()];
        let mut devices: BTreeMap<DeviceId, (Vec<ExtentCommit>, Vec<CommittedItem>)> = BTreeMap::new();
        for ((position, item), place) in items.iter().enumerate().zip(request.chain()) {
            match self.check_item(cache, from, item, (request.priority, place)) {
                Ok((slot, block)) => {
                    let (blocks, of_device) = devices.entry(slot.device).or_default();
                    blocks.push(block);
                    of_device.push(CommittedItem { position, slot, place });
                }
                Err(status) => statuses[position] = status,
            }
        }
        let open = devices.len();
        let commit = self.commits.insert(PendingCommit { from, statuses, open, is_answered: false });
        for (device, (blocks, items)) in devices {
            let batch = self.next_batch();
            cache.commit_lent(cx, (device, batch), blocks);
            self.batches.insert(batch, Batch::Commit(CommitBatch { commit, device, items }));
        }
        self.reply_if_ended(cx, commit);
    }

    /// Handles the end of a commit's batch.
    pub(super) fn commit_done(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        batch: CommitBatch,
        stored: &[StoredBlock],
    ) {
        let CommitBatch { commit, device, items } = batch;
        let is_usable = cache.is_usable(device);
        let stored: BTreeMap<_, _> = stored.iter().map(|block| (block.page, block)).collect();
        for CommittedItem { position, slot, place } in items {
            // A stored block is charged again with its index entry. The pool has freed or quarantined the
            // slot of a failed one.
            cache.end_lease(&slot);
            let block = stored.get(&slot.page).filter(|_| is_usable);
            let status = match block {
                Some(block) => cache.extent_stored(device, block, place),
                None => CommitStatus::Failed,
            };
            self.counters.extent_commits += u64::from(status == CommitStatus::Durable);
            self.commits.get_mut(commit).expect("it waits for the batch").statuses[position] = status;
        }
        self.commits.get_mut(commit).expect("it waits for the batch").open -= 1;
        self.reply_if_ended(cx, commit);
    }

    /// Number of blocks that are being made durable.
    fn commit_items_in_flight(&self) -> usize {
        let of_commits = self.batches.values().filter_map(|batch| match batch {
            Batch::Commit(batch) => Some(batch.items.len()),
            Batch::Lease(_) => None,
        });
        of_commits.sum()
    }

    fn reply_if_ended(&mut self, cx: &mut Context, id: SlabId) {
        if self.commits.get(id).is_none_or(|commit| commit.open > 0) {
            return;
        }
        let PendingCommit { from, statuses, is_answered, .. } = self.commits.remove(id).expect("just seen");
        if !is_answered {
            cx.reply(from, Reply::Committed { ticket: None, statuses });
        }
    }

    /// Ends the lease of an item; returns the block to make durable, or the status of an item that is not
    /// committed.
    fn check_item(
        &mut self,
        cache: &mut Cache,
        from: Caller,
        item: &CommitItem,
        (priority, place): (Priority, ChainPlace),
    ) -> Result<(LentSlot, ExtentCommit), CommitStatus> {
        let lease = item.lease.extent().and_then(|lease| self.take_lease(from.session, lease));
        let lease = lease.ok_or(CommitStatus::NoLease)?;
        let slot = lease.slot;
        let status = match item.key {
            Some(key) if item.checksums.len() == cache.objects(from.size_class) => {
                match cache.existing_block(&key, from.size_class, (priority, place)) {
                    None if cache.can_lend(slot.device) => {
                        return Ok((slot, block_of(cache, from, item, (key, priority), &slot)));
                    }
                    None => CommitStatus::Failed,
                    Some(status) => status,
                }
            }
            _ => CommitStatus::BadItem,
        };
        cache.return_lent(&slot);
        Err(status)
    }
}

fn block_of(
    cache: &Cache,
    from: Caller,
    item: &CommitItem,
    (key, priority): (BlockKey, Priority),
    slot: &LentSlot,
) -> ExtentCommit {
    let SizeClass { tenant, tenant_index, layout, .. } = *cache.size_class(from.size_class);
    ExtentCommit {
        key,
        tenant,
        tenant_name: cache.tenant_name(tenant_index),
        layout,
        priority: priority as u8,
        checksums: item.checksums.clone(),
        page: slot.page,
    }
}
