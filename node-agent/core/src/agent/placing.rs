//! Placing the blocks of a load: DRAM, a fill already under way, own NVMe, peers.
//!
//! All blocks are looked up before the first slot is allocated, and those in DRAM are leased in that pass: making
//! room for one block of a load never evicts another. Reads of one load go out as one batch per device, fetches
//! as one group per peer, each in the order of the load's keys, so that devices and peers can work layer by layer.

use std::time::Duration;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::routing::{self, Candidate, LoadHint};
use reprise_policy::{BlockKey, Layout, NodeId};

use super::AgentCore;
use super::describe::BlockOrigin;
use super::fills::{Origin, Waiter};
use super::frames::FrameIndex;
use super::index::Dram;
use super::limits::LOOKUPS_MAX;
use super::loads::{Load, LoadBlock};
use super::lookups::Purpose;
use super::shapes::ShapeId;
use super::slab::SlabId;
use crate::effect::{
    BlockRead, DeviceId, Effect, FetchId, LossReason, PeerBlock, PeerFetch, ReadBatch, Source,
};
use crate::event::{Priority, Replica, Scope};

/// An unplaced block of a load.
#[derive(Debug)]
pub(super) struct Wanted {
    block: u32,
    /// Replicas elsewhere, as far as is known.
    replicas: Vec<Replica>,
}

/// Blocks to read, by device.
#[derive(Debug, Default)]
pub(super) struct Reads {
    by_device: Vec<(DeviceId, Vec<BlockRead>)>,
}

/// Whether the arena may have room for one more block of a size. Looking again after every block that found none would
/// make a load as expensive as its blocks times the arena's regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ArenaRoom {
    Maybe,
    None,
}

/// What the index says of a wanted block.
enum Here {
    InDram(FrameIndex),
    OnItsWay(FrameIndex),
    OnDevice(EntryIndex),
    No,
}

impl Wanted {
    /// Nothing is known about replicas.
    pub(super) fn anywhere(block: u32) -> Wanted {
        Wanted { block, replicas: Vec::new() }
    }

    /// Replicas are known.
    pub(super) fn from(block: u32, replicas: Vec<Replica>) -> Wanted {
        Wanted { block, replicas }
    }
}

impl Reads {
    pub(super) fn push(&mut self, device: DeviceId, read: BlockRead) {
        match self.by_device.iter_mut().find(|(other, _)| *other == device) {
            Some((_, reads)) => reads.push(read),
            None => self.by_device.push((device, vec![read])),
        }
    }
}

impl AgentCore {
    /// Places what this node has or is getting; returns the rest.
    pub(super) fn place_here(&mut self, id: SlabId, wanted: Vec<Wanted>) -> Vec<Wanted> {
        let Some(load) = self.loads.get(id) else { return Vec::new() };
        let (mut on_device, mut missing) = (Vec::new(), Vec::new());
        let keys = wanted.iter().map(|wanted| &load.keys[wanted.block as usize]);
        let (shape, entries) = (load.shape, self.index.find_all(keys));
        self.touch_chain(entries.iter().flatten().copied());
        // Nothing enters or leaves the index in this pass.
        for (wanted, entry) in wanted.into_iter().zip(entries) {
            match self.here(entry, shape) {
                Here::InDram(frame) => self.take_hit(id, wanted.block, frame),
                Here::OnItsWay(frame) => self.join_fill(id, wanted.block, frame),
                Here::OnDevice(entry) => on_device.push((wanted.block, entry)),
                Here::No => missing.push(wanted),
            }
        }
        self.read_from_devices(id, &on_device);
        missing
    }

    /// Asks the directory for blocks that are not here, if the load may look elsewhere.
    pub(super) fn ask_elsewhere(&mut self, id: SlabId, missing: Vec<Wanted>, otherwise: LossReason) {
        if missing.is_empty() {
            return;
        }
        let Some(load) = self.loads.get(id) else { return };
        if load.scope == Scope::Local || self.lookups.len() >= LOOKUPS_MAX {
            for wanted in missing {
                self.lose_block(id, wanted.block, otherwise);
            }
            return;
        }
        let keys = missing.iter().map(|wanted| load.keys[wanted.block as usize]).collect();
        let blocks = missing.iter().map(|wanted| wanted.block).collect();
        let timeout = self.settings.lookup_timeout.min(load.deadline.since(self.now));
        self.ask_directory(keys, Purpose::Load { load: id, blocks, otherwise }, timeout);
    }

    /// The directory has answered for blocks of a load.
    pub(super) fn place_found(
        &mut self,
        id: SlabId,
        blocks: &[u32],
        found: Vec<Vec<Replica>>,
        otherwise: LossReason,
    ) {
        let Some(load) = self.loads.get(id) else { return };
        let answers = found.into_iter().chain(std::iter::repeat_with(Vec::new));
        let unplaced = |wanted: &Wanted| load.blocks[wanted.block as usize] == LoadBlock::Unplaced;
        let wanted = blocks.iter().zip(answers).map(|(block, replicas)| Wanted::from(*block, replicas));
        let wanted = wanted.filter(unplaced).collect();
        let missing = self.place_here(id, wanted);
        self.fetch_from_peers(id, missing, otherwise);
        self.settle_load(id);
    }

    /// Fetches blocks from the best of their replicas; those without one are lost.
    pub(super) fn fetch_from_peers(&mut self, id: SlabId, missing: Vec<Wanted>, otherwise: LossReason) {
        let mut groups: Vec<(NodeId, Vec<PeerBlock>)> = Vec::new();
        let mut room = ArenaRoom::Maybe;
        for Wanted { block, replicas } in missing {
            // An earlier one of the same key may have begun the fill by now.
            if let Here::OnItsWay(frame) = self.look_here(id, block) {
                self.join_fill(id, block, frame);
                continue;
            }
            let Some((node, others)) = self.choose_peer(replicas) else {
                self.lose_block(id, block, otherwise);
                continue;
            };
            let begun = match room {
                ArenaRoom::Maybe => self.begin_fetch(id, block, node, others),
                ArenaRoom::None => Err(LossReason::NoSpace),
            };
            let peer_block = match begun {
                Ok(peer_block) => peer_block,
                Err(reason) => {
                    if reason == LossReason::NoSpace {
                        room = ArenaRoom::None;
                    }
                    self.lose_block(id, block, reason);
                    continue;
                }
            };
            match groups.iter_mut().find(|(peer, _)| *peer == node) {
                Some((_, blocks)) => blocks.push(peer_block),
                None => groups.push((node, vec![peer_block])),
            }
        }
        let Some(Load { shape, deadline, .. }) = self.loads.get(id) else { return };
        let layout = self.shapes.get(*shape).layout;
        // Others may wait for the same blocks by then, so a fetch is not cut short by one impatient load.
        let deadline = deadline.since(self.now).max(self.settings.load_deadline_default);
        for (node, blocks) in groups {
            self.emit_fetch(node, layout, blocks, deadline);
        }
    }

    fn look_here(&self, id: SlabId, block: u32) -> Here {
        let Some(load) = self.loads.get(id) else { return Here::No };
        self.here(self.index.find(&load.keys[block as usize]), load.shape)
    }

    /// What an entry means for a load of a shape.
    fn here(&self, entry: Option<EntryIndex>, shape: ShapeId) -> Here {
        let Some(index) = entry else { return Here::No };
        let entry = self.index.entry(index);
        match entry.dram() {
            _ if entry.shape() != shape => Here::No,
            Dram::Resident(frame) => Here::InDram(frame),
            Dram::Filling(frame) => Here::OnItsWay(frame),
            Dram::Absent => Here::OnDevice(index),
        }
    }

    /// A block is in DRAM.
    fn take_hit(&mut self, id: SlabId, block: u32, frame: FrameIndex) {
        self.lease(frame);
        let layout = &self.shapes.get(self.frames.get(frame).shape).layout;
        let (layers, bytes) = (layout.layers(), layout.block_bytes());
        let Some(load) = self.loads.get_mut(id) else { return };
        load.blocks[block as usize] = LoadBlock::Ready { frame, source: Source::OwnDram };
        load.progress.advance(0, layers);
        self.counters.hit(Source::OwnDram, bytes);
    }

    /// A block is on its way already.
    fn join_fill(&mut self, id: SlabId, block: u32, frame: FrameIndex) {
        self.counters.single_flight_joins += 1;
        self.attach(frame, id, block);
    }

    fn attach(&mut self, frame: FrameIndex, id: SlabId, block: u32) {
        let (place, layers) = self.enter_fill(frame, Waiter::Load { load: id, block });
        self.lease(frame);
        let Some(load) = self.loads.get_mut(id) else { return };
        load.blocks[block as usize] = LoadBlock::Waiting(place);
        if layers > 0 {
            load.progress.advance(0, layers);
        }
    }

    /// Starts reads of blocks that are on devices, one batch per device. Stored blocks stay in the index meanwhile.
    fn read_from_devices(&mut self, id: SlabId, blocks: &[(u32, EntryIndex)]) {
        let (mut reads, mut room) = (Reads::default(), ArenaRoom::Maybe);
        for (block, entry) in blocks {
            // A duplicate within the load finds the fill of the first.
            if let Dram::Filling(frame) = self.index.entry(*entry).dram() {
                self.join_fill(id, *block, frame);
                continue;
            }
            let begun = if room == ArenaRoom::Maybe { self.begin_read(*entry) } else { None };
            let Some((device, frame, read)) = begun else {
                room = ArenaRoom::None;
                self.lose_block(id, *block, LossReason::NoSpace);
                continue;
            };
            self.attach(frame, id, *block);
            reads.push(device, read);
        }
        let Some(Load { shape, read_bytes, .. }) = self.loads.get(id) else { return };
        let (layout, read_bytes) = (self.shapes.get(*shape).layout, *read_bytes);
        self.emit_reads(reads, layout, read_bytes);
    }

    /// Hands reads to the devices' workers.
    pub(super) fn emit_reads(&mut self, reads: Reads, layout: Layout, read_bytes: u64) {
        for (device, blocks) in reads.by_device {
            self.emit(Effect::ReadBlocks { device, batch: ReadBatch { blocks, layout, read_bytes } });
        }
    }

    /// The peer to fetch a block from, and the replicas that remain if it fails. A peer's load is what all want of it, as
    /// the directory last heard, and what this node wants of it now.
    fn choose_peer(&self, mut replicas: Vec<Replica>) -> Option<(NodeId, Vec<Replica>)> {
        let candidate = |replica: &Replica| Candidate {
            node: replica.node,
            tier: replica.tier,
            load: LoadHint(replica.load.hint().0.saturating_add(self.peers.queued(replica.node).0)),
        };
        let candidates: Vec<Candidate> = replicas.iter().map(candidate).collect();
        let suspect = |node| self.peers.is_suspect(node, self.now);
        let Candidate { node, .. } =
            routing::soonest(&candidates, suspect).or_else(|| routing::soonest(&candidates, |_| false))?;
        replicas.retain(|replica| replica.node != node);
        Some((node, replicas))
    }

    /// Begins the fetch of a block that a load waits for.
    fn begin_fetch(
        &mut self,
        id: SlabId,
        block: u32,
        node: NodeId,
        others: Vec<Replica>,
    ) -> Result<PeerBlock, LossReason> {
        let load = self.loads.get(id).ok_or(LossReason::Miss)?;
        let (key, shape) = (load.keys[block as usize], load.shape);
        let (frame, peer_block) =
            self.begin_peer_fill((key, shape), node, Some(others), BlockOrigin::Loaded)?;
        self.attach(frame, id, block);
        Ok(peer_block)
    }

    /// Begins the fetch of a block that is not here.
    pub(super) fn begin_peer_fill(
        &mut self,
        (key, shape): (BlockKey, ShapeId),
        node: NodeId,
        others: Option<Vec<Replica>>,
        why: BlockOrigin,
    ) -> Result<(FrameIndex, PeerBlock), LossReason> {
        if self.index.find(&key).is_some() {
            // Under another tenant or layout: as if it were not there, and there cannot be two.
            return Err(LossReason::Miss);
        }
        let begun = self.begin_fill(shape, key, Origin::Peer(node), others);
        let (frame, fill) = begun.ok_or(LossReason::NoSpace)?;
        let entry = self.insert_entry(key, shape, Priority::Normal, why);
        self.index.entry_mut(entry).set_dram(Dram::Filling(frame));
        self.frames.get_mut(frame).set_entry(Some(entry));
        let slot = self.frame_slot(frame);
        self.peers.enqueue(node, slot.bytes);
        Ok((frame, PeerBlock { fill, key, slot }))
    }

    /// Asks a peer for blocks.
    pub(super) fn emit_fetch(
        &mut self,
        node: NodeId,
        layout: Layout,
        blocks: Vec<PeerBlock>,
        deadline: Duration,
    ) {
        self.fetches += 1;
        let fetch = FetchId(self.fetches);
        self.emit(Effect::PeerFetch(PeerFetch { fetch, node, layout, blocks, deadline }));
    }
}
