//! Fills: blocks that are being read from a device or fetched from a peer into the arena.
//!
//! A key has at most one fill at a time; loads and serves that need the block attach to it (single flight).
//! Each attached waiter holds a lease on the fill's frame. A fill continues without waiters, because the
//! device or transport writes to its slot. Only their completion makes the slot free or the block resident.
//!
//! After a failure, the block is removed from its source. Loads that were not answered yet try the next
//! source. Loads that were answered report the block as failed: the engine may have read some layers already,
//! and another replica may differ in bits, because checksums belong to a replica. The slot of a failed fill
//! becomes an orphan until its readers release it. A slot that its device has not released is retired. A read
//! that the device did not start leaves the block in place.

use std::collections::BTreeMap;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, NodeId, Tier};

use crate::agent::AgentCore;
use crate::agent::block_sources::MissingBlock;
use crate::agent::loads::{LoadBlock, Stage};
use crate::agent::lookups::peer_source;
use crate::cache::{Dram, EvictionPosition, FrameIndex, FrameState, Lease, Read, SizeClassId};
use crate::effect::{BlockRead, Change, DeviceId, FillId, LossReason, ServeId, Source};
use crate::event::{FillError, FillUpdate, Replica};
use crate::pool::StoredBlock;
use crate::slab::SlabId;
use crate::transfer::WaitList;
use crate::waiter::{WaitId, WaiterId, WaiterOwner};

/// Fill of one block.
#[derive(Debug)]
pub(crate) struct Fill {
    pub(crate) frame: FrameIndex,
    pub(crate) origin: FillSource,
    /// Number of leading layers that are verified.
    pub(crate) layers: u32,
    pub(crate) waiters: WaitList,
    /// Tier of the source, on this node or on the peer.
    tier: Tier,
    /// Other replicas; `None` if the directory was not asked.
    others: Option<Vec<Replica>>,
    verdict: Verdict,
    pub(crate) keep: Retention,
}

/// What happens to a block after its fill, apart from its waiters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retention {
    /// Cached until it is evicted.
    Cached,
    /// Made durable, because an offer of it was accepted ([`crate::replicate`]).
    Saved,
}

/// Source of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FillSource {
    Device(DeviceId),
    Peer(NodeId),
}

/// A waiter that was attached to a fill.
#[derive(Debug)]
pub(crate) struct Attached {
    pub(crate) lease: Lease<Read>,
    pub(crate) wait: WaitId,
    pub(crate) source: Source,
    /// Layers of the fill so far.
    pub(crate) layers: u16,
}

/// State of a fill's checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Unknown, or known and of the right number.
    Plausible,
    /// Of the wrong number: the fill fails when it ends.
    Invalid,
}

impl Fill {
    /// Source to report for the block of a load.
    fn source(&self) -> Source {
        match self.origin {
            FillSource::Device(_) => Source::OwnNvme,
            FillSource::Peer(_) => peer_source(self.tier),
        }
    }
}

impl AgentCore {
    /// Starts a fill with its own frame; `None` if the arena has no room. The caller updates the index entry.
    pub(crate) fn begin_fill(
        &mut self,
        size_class: SizeClassId,
        key: BlockKey,
        origin: FillSource,
        others: Option<Vec<Replica>>,
    ) -> Option<(FrameIndex, FillId)> {
        debug_assert!(
            self.cache
                .index
                .find(&key)
                .is_none_or(|entry| self.cache.index.entry(entry).dram() == Dram::Absent),
            "one fill per key"
        );
        let frame = self.cache.allocate_frame(size_class, FrameState::Reserved)?;
        let (layers, waiters, verdict, tier) = (0, WaitList::EMPTY, Verdict::Plausible, Tier::Nvme);
        let keep = Retention::Cached;
        let id = self.fills.insert(Fill { frame, origin, layers, waiters, tier, others, verdict, keep });
        self.cache.frames.get_mut(frame).state = FrameState::Filling(id.slot());
        Some((frame, FillId(id.0)))
    }

    /// Starts to read a stored block; `None` if the arena has no room.
    pub(crate) fn begin_read(&mut self, entry: EntryIndex) -> Option<(DeviceId, FrameIndex, BlockRead)> {
        let state = self.cache.index.entry(entry);
        let (key, size_class) = (state.key(), state.size_class());
        let stored = state.stored()?;
        // A block that is being read must not be evicted from its device.
        self.cache.devices.remove_evictable(entry);
        let Some((frame, fill)) = self.begin_fill(size_class, key, FillSource::Device(stored.device), None)
        else {
            self.cache.enter_nvme_order(entry);
            return None;
        };
        self.cache.devices.read_begun(stored.device);
        self.cache.index.entry_mut(entry).set_dram(Dram::Filling(frame));
        self.cache.frames.get_mut(frame).set_entry(Some(entry));
        let slot = self.cache.frame_slot(frame);
        let StoredBlock { page, generation, header_crc, .. } = self.cache.devices.stored(stored);
        Some((stored.device, frame, BlockRead { fill, key, page, generation, header_crc, slot }))
    }

    /// Attaches a waiter to the fill of a frame.
    pub(crate) fn attach_waiter(&mut self, frame: FrameIndex, waiter: WaiterId) -> Attached {
        let FrameState::Filling(slot) = self.cache.frames.get(frame).state else {
            unreachable!("the caller has seen that the frame is being filled")
        };
        let fill = self.fills.at_mut(slot).expect("a frame that is being filled has a fill");
        let wait = self.waits.push(&mut fill.waiters, slot, waiter);
        let (source, layers) = (fill.source(), fill.layers as u16);
        Attached { lease: self.cache.lease(frame), wait, source, layers }
    }

    /// Detaches a waiter. The caller releases the lease.
    pub(crate) fn detach_waiter(&mut self, wait: WaitId, waiter: WaiterId) {
        let Some(slot) = self.waits.fill_of(wait, waiter) else { return };
        let fill = self.fills.at_mut(slot).expect("a waiting block has a fill");
        self.waits.remove(&mut fill.waiters, wait);
    }

    /// Handles progress or failure of a fill.
    pub(crate) fn fill_update(&mut self, id: SlabId, update: FillUpdate) {
        match update {
            FillUpdate::Layers { layers, checksums, tier } => self.fill_layers(id, layers, checksums, tier),
            FillUpdate::Failed(error) => self.fail_fill(id, error),
        }
    }

    fn fill_layers(&mut self, id: SlabId, layers: u32, checksums: Option<Box<[u32]>>, tier: Tier) {
        let Some(fill) = self.fills.get_mut(id) else { return };
        fill.tier = tier;
        let frame = fill.frame;
        let state = self.cache.frames.get(frame);
        let layout = self.cache.sizes.get(state.size_class).layout;
        if let Some(checksums) = checksums.filter(|_| !state.has_checksums()) {
            if checksums.len() == layout.objects() as usize {
                self.cache.set_checksums(frame, &checksums);
            } else {
                fill.verdict = Verdict::Invalid;
            }
        }
        let Some(fill) = self.fills.get_mut(id) else { return };
        let known = fill.verdict == Verdict::Plausible && self.cache.frames.get(frame).has_checksums();
        if !known {
            if layers >= layout.layers() {
                self.fail_fill(id, FillError::Corrupt);
            }
            return;
        }
        let (from, to) = (fill.layers, layers.min(layout.layers()));
        if to > from {
            fill.layers = to;
            self.advance_waiters(id, from, to);
            if to == layout.layers() {
                self.complete_fill(id);
            }
        }
    }

    fn advance_waiters(&mut self, id: SlabId, from: u32, to: u32) {
        let Some(fill) = self.fills.get_mut(id) else { return };
        let (frame, source) = (fill.frame, fill.source());
        let waiters: Vec<WaiterId> = self.waits.of(&fill.waiters).map(|(_, waiter)| waiter).collect();
        let layout = self.cache.sizes.get(self.cache.frames.get(frame).size_class).layout;
        let is_whole = to == layout.layers();
        if is_whole {
            self.waits.clear(&mut fill.waiters);
        }
        for WaiterId { object, block, owner } in waiters {
            match owner {
                WaiterOwner::Load => {
                    let id = SlabId(object);
                    let Some(load) = self.loads.get_mut(id) else { continue };
                    load.advance(block, (from, to), source, is_whole);
                    if is_whole {
                        self.counters.hit(source, layout.block_bytes());
                    }
                    self.publish_progress(id);
                }
                WaiterOwner::Serve => self.stream_layers(ServeId(object), block, from..to),
            }
        }
    }

    /// Completes a verified fill. Its waiters were notified before.
    fn complete_fill(&mut self, id: SlabId) {
        let Some(fill) = self.fills.remove(id) else { return };
        let frame = self.cache.frames.get(fill.frame);
        let size_class = self.cache.sizes.get(frame.size_class);
        let (bytes, slot_bytes) = (size_class.layout.block_bytes(), size_class.slot_bytes);
        match fill.origin {
            FillSource::Device(device) => {
                self.cache.devices.read_succeeded(device);
                self.cache.devices.read_ended(device);
                self.counters.device_fills += 1;
                self.counters.device_fill_bytes += bytes;
            }
            FillSource::Peer(node) => {
                self.peers.dequeue(node, slot_bytes);
                self.counters.peer_fills += 1;
                self.counters.peer_fill_bytes += bytes;
            }
        }
        let entry = frame.entry();
        self.release_pending(&fill);
        // Without an entry: a commit replaced the fill, so this copy is not findable.
        let Some(entry) = entry else {
            return self.cache.set_frame_state(fill.frame, FrameState::Orphan);
        };
        self.cache.index.entry_mut(entry).set_dram(Dram::Resident(fill.frame));
        self.cache.resident_blocks += 1;
        self.cache.set_frame_state(fill.frame, FrameState::Clean);
        if self.cache.index.entry(entry).stored().is_some() {
            self.cache.enter_nvme_order(entry);
        }
        self.cache.replica_changed(entry, Tier::Dram, Change::Added);
        if fill.keep == Retention::Saved {
            self.counters.pulled_blocks += 1;
            self.counters.pulled_bytes += bytes;
            let is_read = self.cache.frames.get(fill.frame).leases > 0;
            let position = if is_read { EvictionPosition::Last } else { EvictionPosition::First };
            self.save.save_replica(&mut self.cache, self.now, fill.frame, position);
        }
    }

    fn fail_fill(&mut self, id: SlabId, error: FillError) {
        let Some(mut fill) = self.fills.remove(id) else { return };
        let error = self.count_failure(&fill, error);
        self.release_pending(&fill);
        let entry = self.cache.frames.get(fill.frame).entry();
        if let Some(entry) = entry {
            self.cache.frames.get_mut(fill.frame).set_entry(None);
            self.cache.index.entry_mut(entry).set_dram(Dram::Absent);
            match fill.origin {
                FillSource::Device(_) if error == FillError::Refused => self.cache.keep_evictable(entry),
                FillSource::Device(_) => self.cache.drop_stored(context!(self), entry, error),
                FillSource::Peer(_) => {}
            }
            self.cache.remove_if_absent(entry);
        }
        if error == FillError::Stranded {
            self.cache.counters.arena_lost_bytes += self.cache.frame_slot(fill.frame).bytes;
            self.cache.set_frame_state(fill.frame, FrameState::Retired);
        } else {
            self.cache.set_frame_state(fill.frame, FrameState::Orphan);
        }
        let mut retries: BTreeMap<SlabId, Vec<u32>> = BTreeMap::new();
        let waiters: Vec<WaiterId> = self.waits.of(&fill.waiters).map(|(_, waiter)| waiter).collect();
        self.waits.clear(&mut fill.waiters);
        for WaiterId { object, block, owner } in waiters {
            match owner {
                WaiterOwner::Load if self.detach_failed(SlabId(object), block) => {
                    retries.entry(SlabId(object)).or_default().push(block);
                }
                WaiterOwner::Load => self.publish_progress(SlabId(object)),
                WaiterOwner::Serve => self.serve_failed(ServeId(object), block),
            }
        }
        for (load, blocks) in retries {
            self.retry_other_source(&fill, error, load, &blocks);
        }
    }

    /// Counts a failed fill and returns its error, with errors of peers mapped to device errors for reads.
    fn count_failure(&mut self, fill: &Fill, error: FillError) -> FillError {
        let slot_bytes = self.cache.frame_slot(fill.frame).bytes;
        let error = match (fill.origin, error) {
            (FillSource::Device(_), FillError::Absent | FillError::PeerLost) => FillError::Device,
            (_, error) => error,
        };
        match error {
            FillError::Device | FillError::Stranded => self.counters.fill_device_errors += 1,
            FillError::Refused => self.counters.fill_refused += 1,
            FillError::Corrupt => self.counters.fill_corrupt += 1,
            FillError::Absent => self.counters.fill_absent += 1,
            FillError::PeerLost => self.counters.fill_peer_lost += 1,
        }
        match fill.origin {
            FillSource::Device(device) => self.cache.devices.read_ended(device),
            FillSource::Peer(node) => {
                self.peers.dequeue(node, slot_bytes);
                if error == FillError::PeerLost {
                    self.peers.suspect(node, self.now);
                }
            }
        }
        error
    }

    /// Detaches a load's block from a failed fill; returns whether to try another source.
    fn detach_failed(&mut self, id: SlabId, block: u32) -> bool {
        let Some(load) = self.loads.get_mut(id) else { return false };
        let Some((lease, layers)) = load.detach(block) else { return false };
        if load.stage == Stage::Placing {
            load.progress.restart(layers);
            self.cache.release(lease);
            return true;
        }
        self.counters.failed_blocks += 1;
        self.fail_block(id, block, layers, LoadBlock::Held { lease });
        false
    }

    /// Tries the next source for blocks whose fill failed before their load was answered.
    fn retry_other_source(&mut self, fill: &Fill, error: FillError, load: SlabId, blocks: &[u32]) {
        if error == FillError::Refused {
            // The block is still stored here: a retry would send the same read to the device at once.
            for block in blocks {
                self.lose_block(load, *block, LossReason::Failed);
            }
            return self.publish_progress(load);
        }
        let others = fill.others.clone().unwrap_or_default();
        let wanted = blocks.iter().map(|block| MissingBlock::from(*block, others.clone())).collect();
        let missing = self.attach_local(load, wanted);
        let absent = error == FillError::Absent;
        let otherwise = if absent { LossReason::Miss } else { LossReason::Failed };
        match fill.others {
            None => self.fetch_remote(load, missing, otherwise),
            Some(_) => self.fetch_from_peers(load, missing, otherwise),
        }
        self.publish_progress(load);
    }
}
