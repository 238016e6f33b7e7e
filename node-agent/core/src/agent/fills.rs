//! Fills: blocks on their way into the arena, from a device or a peer.
//!
//! There is one fill per key at a time; loads and serves that want the block attach to it (single flight). Whoever
//! attaches holds a lease on the fill's frame. A fill goes on when nobody waits any more: its slot is being
//! written, and is given back or becomes a resident block only when the device or transport reports the end.
//!
//! When a fill fails, its block is forgotten where it was read from. Loads that were not answered yet try the next
//! place; those that were are told that the block failed, because the engine may have read layers of it already,
//! and another replica may differ in bits (checksums travel with the replica). A failed fill's slot that was
//! named in an answer is an orphan until its readers release it; one that its device did not let go of is retired.
//! A read that the device did not take says nothing about the block, which stays where it is.

use std::collections::BTreeMap;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, NodeId, Tier};

use super::AgentCore;
use super::frames::{FrameIndex, FrameState};
use super::index::Dram;
use super::loads::{LoadBlock, Stage};
use super::lookups::peer_source;
use super::placing::Wanted;
use super::shapes::ShapeId;
use super::slab::SlabId;
use super::writeback::Worth;
use crate::effect::{BlockRead, Change, DeviceId, FillId, LossReason, ServeId, Source};
use crate::event::{FillError, FillUpdate, Replica};
use crate::pool::StoredBlock;

/// A block on its way.
#[derive(Debug)]
pub(super) struct Fill {
    pub(super) frame: FrameIndex,
    pub(super) origin: Origin,
    /// Verified leading layers.
    pub(super) layers: u32,
    pub(super) waiters: Vec<Waiter>,
    /// Tier it comes from, on this node or the peer.
    tier: Tier,
    /// Other replicas, where the directory was asked for them.
    others: Option<Vec<Replica>>,
    verdict: Verdict,
    pub(super) keep: Keep,
}

/// What becomes of the block besides what its waiters do with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    /// It is cached for as long as there is room.
    Cached,
    /// It becomes durable here: a peer was told so ([`super::taking`]).
    Saved,
}

/// Where a block comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    Device(DeviceId),
    Peer(NodeId),
}

/// Who waits for a fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiter {
    Load { load: SlabId, block: u32 },
    Serve { serve: ServeId, block: u32 },
}

/// Where somebody waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WaitPlace {
    /// Slot of the fill.
    pub(super) fill: u32,
    /// Position among its waiters.
    pub(super) position: u32,
}

/// What is thought of a fill's checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Not known, or known and of the right number.
    Plausible,
    /// Of the wrong number: the fill fails when it ends.
    Refused,
}

impl Fill {
    /// What a load's block is that this brings.
    fn source(&self) -> Source {
        match self.origin {
            Origin::Device(_) => Source::OwnNvme,
            Origin::Peer(_) => peer_source(self.tier),
        }
    }
}

impl AgentCore {
    /// Begins a fill with a frame of its own; `None` when there is no room. The caller connects the entry.
    pub(super) fn begin_fill(
        &mut self,
        shape: ShapeId,
        key: BlockKey,
        origin: Origin,
        others: Option<Vec<Replica>>,
    ) -> Option<(FrameIndex, FillId)> {
        debug_assert!(
            self.index.find(&key).is_none_or(|entry| self.index.entry(entry).dram() == Dram::Absent),
            "one fill per key"
        );
        let frame = self.allocate_frame(shape, FrameState::Reserved)?;
        let (layers, waiters, verdict, tier) = (0, Vec::new(), Verdict::Plausible, Tier::Nvme);
        let keep = Keep::Cached;
        let id = self.fills.insert(Fill { frame, origin, layers, waiters, tier, others, verdict, keep });
        self.frames.get_mut(frame).state = FrameState::Filling(id.slot());
        Some((frame, FillId(id.0)))
    }

    /// Begins the read of a stored block; `None` when there is no room.
    pub(super) fn begin_read(&mut self, entry: EntryIndex) -> Option<(DeviceId, FrameIndex, BlockRead)> {
        let state = self.index.entry(entry);
        let (key, shape) = (state.key(), state.shape());
        let stored = state.stored()?;
        // A block that is being read is not evicted from its device.
        self.devices.leave_order(entry);
        let Some((frame, fill)) = self.begin_fill(shape, key, Origin::Device(stored.device), None) else {
            self.enter_nvme_order(entry);
            return None;
        };
        self.devices.read_begun(stored.device);
        self.index.entry_mut(entry).set_dram(Dram::Filling(frame));
        self.frames.get_mut(frame).set_entry(Some(entry));
        let slot = self.frame_slot(frame);
        let StoredBlock { page, generation, header_crc, .. } = self.devices.stored(stored);
        Some((stored.device, frame, BlockRead { fill, key, page, generation, header_crc, slot }))
    }

    /// Somebody waits for the fill of a frame; returns where, and the fill's layers. The caller takes the lease.
    pub(super) fn enter_fill(&mut self, frame: FrameIndex, waiter: Waiter) -> (WaitPlace, u32) {
        let FrameState::Filling(slot) = self.frames.get(frame).state else {
            unreachable!("the caller has seen that the frame is being filled")
        };
        let fill = self.fills.at_mut(slot).expect("a frame that is being filled has a fill");
        let position = fill.waiters.len() as u32;
        fill.waiters.push(waiter);
        (WaitPlace { fill: slot, position }, fill.layers)
    }

    /// Somebody no longer waits; returns the fill's frame (whose lease is the caller's) and layers. The last waiter takes
    /// the place: O(1), because one block may have as many waiters as all loads have blocks.
    pub(super) fn leave_fill(&mut self, place: WaitPlace) -> (FrameIndex, u32) {
        let fill = self.fills.at_mut(place.fill).expect("a waiting block has a fill");
        fill.waiters.swap_remove(place.position as usize);
        let (frame, layers) = (fill.frame, fill.layers);
        if let Some(moved) = fill.waiters.get(place.position as usize).copied() {
            self.move_waiter(moved, place);
        }
        (frame, layers)
    }

    /// Tells a waiter its place among those of its fill.
    fn move_waiter(&mut self, waiter: Waiter, place: WaitPlace) {
        match waiter {
            Waiter::Load { load, block } => {
                let load = self.loads.get_mut(load).expect("a load leaves its fills before it ends");
                load.blocks[block as usize] = LoadBlock::Waiting(place);
            }
            Waiter::Serve { serve, block } => self.move_serve_block(serve, block, place),
        }
    }

    /// Frame and source of what a fill brings.
    pub(super) fn fill_place(&self, slot: u32) -> (FrameIndex, Source) {
        let fill = self.fills.at(slot).expect("a waiting block has a fill");
        (fill.frame, fill.source())
    }

    /// A device or the transport reports on a fill.
    pub(super) fn fill_update(&mut self, id: SlabId, update: FillUpdate) {
        match update {
            FillUpdate::Layers { layers, checksums, tier } => self.fill_layers(id, layers, checksums, tier),
            FillUpdate::Failed(error) => self.fail_fill(id, error),
        }
    }

    fn fill_layers(&mut self, id: SlabId, layers: u32, checksums: Option<Box<[u32]>>, tier: Tier) {
        let Some(fill) = self.fills.get_mut(id) else { return };
        fill.tier = tier;
        let frame = fill.frame;
        let state = self.frames.get(frame);
        let layout = self.shapes.get(state.shape).layout;
        if let Some(checksums) = checksums.filter(|_| !state.has_checksums()) {
            if checksums.len() == layout.objects() as usize {
                self.set_checksums(frame, &checksums);
            } else {
                fill.verdict = Verdict::Refused;
            }
        }
        let Some(fill) = self.fills.get_mut(id) else { return };
        let known = fill.verdict == Verdict::Plausible && self.frames.get(frame).has_checksums();
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
        let waiters = std::mem::take(&mut fill.waiters);
        let layout = self.shapes.get(self.frames.get(frame).shape).layout;
        let complete = to == layout.layers();
        for waiter in &waiters {
            match *waiter {
                Waiter::Load { load: load_id, block } => {
                    let Some(load) = self.loads.get_mut(load_id) else { continue };
                    load.progress.advance(from, to);
                    if complete {
                        load.blocks[block as usize] = LoadBlock::Ready { frame, source };
                        self.counters.hit(source, layout.block_bytes());
                    }
                    self.settle_load(load_id);
                }
                Waiter::Serve { serve, block } => self.stream_layers(serve, block, frame, from..to),
            }
        }
        if let Some(fill) = self.fills.get_mut(id).filter(|_| !complete) {
            fill.waiters = waiters;
        }
    }

    /// The block is whole and verified. Its waiters know already.
    fn complete_fill(&mut self, id: SlabId) {
        let Some(fill) = self.fills.remove(id) else { return };
        let frame = self.frames.get(fill.frame);
        let shape = self.shapes.get(frame.shape);
        let (bytes, slot_bytes) = (shape.layout.block_bytes(), shape.slot_bytes);
        match fill.origin {
            Origin::Device(device) => {
                self.devices.read_succeeded(device);
                self.devices.read_ended(device);
                self.counters.device_fills += 1;
                self.counters.device_fill_bytes += bytes;
            }
            Origin::Peer(node) => {
                self.peers.dequeue(node, slot_bytes);
                self.counters.peer_fills += 1;
                self.counters.peer_fill_bytes += bytes;
            }
        }
        let entry = frame.entry();
        self.leave_taking(&fill);
        // Without an entry a commit has overtaken the fill: nobody new will find this copy.
        let Some(entry) = entry else {
            return self.set_frame_state(fill.frame, FrameState::Orphan);
        };
        self.index.entry_mut(entry).set_dram(Dram::Resident(fill.frame));
        self.resident_blocks += 1;
        self.set_frame_state(fill.frame, FrameState::Clean);
        if self.index.entry(entry).stored().is_some() {
            self.enter_nvme_order(entry);
        }
        self.replica_changed(entry, Tier::Dram, Change::Added);
        if fill.keep == Keep::Saved {
            self.counters.pulled_blocks += 1;
            self.counters.pulled_bytes += bytes;
            let is_read = self.frames.get(fill.frame).leases > 0;
            self.save_taken(fill.frame, if is_read { Worth::Used } else { Worth::Unasked });
        }
    }

    fn fail_fill(&mut self, id: SlabId, error: FillError) {
        let Some(fill) = self.fills.remove(id) else { return };
        let error = self.count_failure(&fill, error);
        self.leave_taking(&fill);
        let entry = self.frames.get(fill.frame).entry();
        if let Some(entry) = entry {
            self.frames.get_mut(fill.frame).set_entry(None);
            self.index.entry_mut(entry).set_dram(Dram::Absent);
            match fill.origin {
                Origin::Device(_) if error == FillError::Refused => self.stay_stored(entry),
                Origin::Device(_) => self.drop_stored(entry, error),
                Origin::Peer(_) => {}
            }
            self.forget_if_nowhere(entry);
        }
        if error == FillError::Stranded {
            self.counters.arena_lost_bytes += self.frame_slot(fill.frame).bytes;
            self.set_frame_state(fill.frame, FrameState::Retired);
        } else {
            self.set_frame_state(fill.frame, FrameState::Orphan);
        }
        let mut retries: BTreeMap<SlabId, Vec<u32>> = BTreeMap::new();
        for waiter in &fill.waiters {
            match *waiter {
                Waiter::Load { load, block } if self.detach_failed(&fill, load, block) => {
                    retries.entry(load).or_default().push(block);
                }
                Waiter::Load { load, .. } => self.settle_load(load),
                Waiter::Serve { serve, block } => self.serve_failed(serve, block, fill.frame),
            }
        }
        for (load, blocks) in retries {
            self.try_elsewhere(&fill, error, load, &blocks);
        }
    }

    /// Counts a failed fill; returns what it means (a device knows no peers).
    fn count_failure(&mut self, fill: &Fill, error: FillError) -> FillError {
        let slot_bytes = self.frame_slot(fill.frame).bytes;
        let error = match (fill.origin, error) {
            (Origin::Device(_), FillError::Absent | FillError::PeerLost) => FillError::Device,
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
            Origin::Device(device) => self.devices.read_ended(device),
            Origin::Peer(node) => {
                self.peers.dequeue(node, slot_bytes);
                if error == FillError::PeerLost {
                    self.peers.suspect(node, self.now);
                }
            }
        }
        error
    }

    /// Takes a load's block off a failed fill; whether another place may be tried for it.
    fn detach_failed(&mut self, fill: &Fill, id: SlabId, block: u32) -> bool {
        let Some(load) = self.loads.get_mut(id) else { return false };
        if load.stage == Stage::Placing {
            load.blocks[block as usize] = LoadBlock::Unplaced;
            load.progress.restart(fill.layers);
            self.unlease(fill.frame);
            return true;
        }
        self.counters.failed_blocks += 1;
        self.fail_block(id, block, fill.layers, LoadBlock::Held { frame: fill.frame });
        false
    }

    /// Tries the next place for blocks whose fill failed before their load was answered.
    fn try_elsewhere(&mut self, fill: &Fill, error: FillError, load: SlabId, blocks: &[u32]) {
        if error == FillError::Refused {
            // The block is still here: whatever looks for it would ask the device the same again at once.
            for block in blocks {
                self.lose_block(load, *block, LossReason::Failed);
            }
            return self.settle_load(load);
        }
        let others = fill.others.clone().unwrap_or_default();
        let wanted = blocks.iter().map(|block| Wanted::from(*block, others.clone())).collect();
        let missing = self.place_here(load, wanted);
        let absent = error == FillError::Absent;
        let otherwise = if absent { LossReason::Miss } else { LossReason::Failed };
        match fill.others {
            None => self.ask_elsewhere(load, missing, otherwise),
            Some(_) => self.fetch_from_peers(load, missing, otherwise),
        }
        self.settle_load(load);
    }
}
