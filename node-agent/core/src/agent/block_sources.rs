//! Sources of a load's blocks: DRAM, a fill in progress, this node's NVMe, peers.
//!
//! All blocks are looked up before the first slot is allocated, and those in DRAM are leased in that pass.
//! Room for one block of a load is thus never made by evicting another. Reads of one load form one batch per
//! device, and fetches one group per peer, each in the order of the load's keys, so that devices and peers
//! can work layer by layer.

use std::time::Duration;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::routing::{self, Candidate, LoadHint};
use reprise_policy::{BlockKey, Layout, NodeId};

use crate::agent::AgentCore;
use crate::agent::fills::{Attached, FillSource};
use crate::agent::loads::{Load, LoadBlock, waiter};
use crate::agent::lookups::Purpose;
use crate::cache::{BlockOrigin, Dram, FrameIndex, LocalCopy, SizeClassId};
use crate::effect::{
    BlockRead, DeviceId, Effect, FetchId, LossReason, PeerBlock, PeerFetch, ReadBatch, ReadClass, Source,
};
use crate::event::{Priority, Replica, Scope};
use crate::limits::LOOKUPS_MAX;
use crate::slab::SlabId;

/// Block of a load without a source yet.
#[derive(Debug)]
pub(crate) struct MissingBlock {
    block: u32,
    /// Known replicas on other nodes.
    replicas: Vec<Replica>,
}

/// Blocks to read, grouped by device.
#[derive(Debug, Default)]
pub(crate) struct Reads {
    by_device: Vec<(DeviceId, Vec<BlockRead>)>,
}

/// Whether the arena may have room for one more block of a size. Trying again after every failure would cost
/// the load's blocks times the arena's regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ArenaSpace {
    Maybe,
    None,
}

impl MissingBlock {
    /// Creates a missing block without known replicas.
    pub(crate) fn anywhere(block: u32) -> MissingBlock {
        MissingBlock { block, replicas: Vec::new() }
    }

    /// Creates a missing block with known replicas.
    pub(crate) fn from(block: u32, replicas: Vec<Replica>) -> MissingBlock {
        MissingBlock { block, replicas }
    }
}

impl Reads {
    pub(crate) fn push(&mut self, device: DeviceId, read: BlockRead) {
        match self.by_device.iter_mut().find(|(other, _)| *other == device) {
            Some((_, reads)) => reads.push(read),
            None => self.by_device.push((device, vec![read])),
        }
    }
}

impl AgentCore {
    /// Attaches the blocks that this node has or is filling; returns the rest.
    pub(crate) fn attach_local(&mut self, id: SlabId, wanted: Vec<MissingBlock>) -> Vec<MissingBlock> {
        let Some(load) = self.loads.get(id) else { return Vec::new() };
        let (mut on_device, mut missing) = (Vec::new(), Vec::new());
        let keys = wanted.iter().map(|wanted| &load.keys[wanted.block as usize]);
        let (size_class, entries) = (load.size_class, self.cache.index.find_all(keys));
        self.cache.touch_chain(entries.iter().flatten().copied());
        // The index does not change in this pass.
        for (wanted, entry) in wanted.into_iter().zip(entries) {
            match self.cache.classify_entry(entry, size_class) {
                LocalCopy::InDram(frame) => self.take_hit(id, wanted.block, frame),
                LocalCopy::Filling(frame) => self.join_fill(id, wanted.block, frame),
                LocalCopy::OnDevice(entry) => on_device.push((wanted.block, entry)),
                LocalCopy::Absent => missing.push(wanted),
            }
        }
        self.read_from_devices(id, &on_device);
        missing
    }

    /// Looks up missing blocks in the directory, if the load's scope allows it.
    pub(crate) fn fetch_remote(&mut self, id: SlabId, missing: Vec<MissingBlock>, otherwise: LossReason) {
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
        self.query_directory(keys, Purpose::Load { load: id, blocks, otherwise }, timeout);
    }

    /// Handles the directory's answer for blocks of a load.
    pub(crate) fn attach_found(
        &mut self,
        id: SlabId,
        blocks: &[u32],
        found: Vec<Vec<Replica>>,
        otherwise: LossReason,
    ) {
        let Some(load) = self.loads.get(id) else { return };
        let answers = found.into_iter().chain(std::iter::repeat_with(Vec::new));
        let unplaced = |wanted: &MissingBlock| load.blocks[wanted.block as usize] == LoadBlock::Unplaced;
        let wanted = blocks.iter().zip(answers).map(|(block, replicas)| MissingBlock::from(*block, replicas));
        let wanted = wanted.filter(unplaced).collect();
        let missing = self.attach_local(id, wanted);
        self.fetch_from_peers(id, missing, otherwise);
        self.publish_progress(id);
    }

    /// Fetches each block from its best replica; blocks without a replica are lost.
    pub(crate) fn fetch_from_peers(&mut self, id: SlabId, missing: Vec<MissingBlock>, otherwise: LossReason) {
        let mut groups: Vec<(NodeId, Vec<PeerBlock>)> = Vec::new();
        let mut room = ArenaSpace::Maybe;
        for MissingBlock { block, replicas } in missing {
            // An earlier block with the same key may have started the fill.
            if let LocalCopy::Filling(frame) = self.local_copy(id, block) {
                self.join_fill(id, block, frame);
                continue;
            }
            let Some((node, others)) = self.choose_peer(replicas) else {
                self.lose_block(id, block, otherwise);
                continue;
            };
            let begun = match room {
                ArenaSpace::Maybe => self.begin_fetch(id, block, node, others),
                ArenaSpace::None => Err(LossReason::NoSpace),
            };
            let peer_block = match begun {
                Ok(peer_block) => peer_block,
                Err(reason) => {
                    if reason == LossReason::NoSpace {
                        room = ArenaSpace::None;
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
        let Some(Load { size_class, deadline, .. }) = self.loads.get(id) else { return };
        let layout = self.cache.sizes.get(*size_class).layout;
        // Other loads may join these fills, so one short deadline must not cut the fetch short.
        let deadline = deadline.since(self.now).max(self.settings.load_deadline_default);
        for (node, blocks) in groups {
            self.emit_fetch(node, layout, blocks, deadline);
        }
    }

    fn local_copy(&self, id: SlabId, block: u32) -> LocalCopy {
        let Some(load) = self.loads.get(id) else { return LocalCopy::Absent };
        self.cache.classify_entry(self.cache.index.find(&load.keys[block as usize]), load.size_class)
    }

    /// Attaches a block that is in DRAM.
    fn take_hit(&mut self, id: SlabId, block: u32, frame: FrameIndex) {
        let layout = &self.cache.sizes.get(self.cache.frames.get(frame).size_class).layout;
        let (layers, bytes) = (layout.layers(), layout.block_bytes());
        let Some(load) = self.loads.get_mut(id) else { return };
        let lease = self.cache.lease(frame);
        load.blocks[block as usize] = LoadBlock::Ready { lease, source: Source::OwnDram };
        load.progress.advance(0, layers);
        self.counters.hit(Source::OwnDram, bytes);
    }

    /// Attaches a block to a fill in progress.
    fn join_fill(&mut self, id: SlabId, block: u32, frame: FrameIndex) {
        self.counters.single_flight_joins += 1;
        self.attach(frame, id, block);
    }

    fn attach(&mut self, frame: FrameIndex, id: SlabId, block: u32) {
        let Attached { lease, wait, source, layers } = self.attach_waiter(frame, waiter(id, block));
        let load = self.loads.get_mut(id).expect("the caller has seen it");
        load.blocks[block as usize] = LoadBlock::Waiting { lease, wait, source, layers };
        if layers > 0 {
            load.progress.advance(0, u32::from(layers));
        }
    }

    /// Starts reads of stored blocks, one batch per device. The blocks stay in the index meanwhile.
    fn read_from_devices(&mut self, id: SlabId, blocks: &[(u32, EntryIndex)]) {
        let (mut reads, mut room) = (Reads::default(), ArenaSpace::Maybe);
        for (block, entry) in blocks {
            // A duplicate within the load joins the fill of the first one.
            if let Dram::Filling(frame) = self.cache.index.entry(*entry).dram() {
                self.join_fill(id, *block, frame);
                continue;
            }
            let begun = if room == ArenaSpace::Maybe { self.begin_read(*entry) } else { None };
            let Some((device, frame, read)) = begun else {
                room = ArenaSpace::None;
                self.lose_block(id, *block, LossReason::NoSpace);
                continue;
            };
            self.attach(frame, id, *block);
            reads.push(device, read);
        }
        let Some(Load { size_class, read_bytes, .. }) = self.loads.get(id) else { return };
        let (layout, read_bytes) = (self.cache.sizes.get(*size_class).layout, *read_bytes);
        self.emit_reads(reads, layout, read_bytes);
    }

    /// Sends reads to the devices' workers.
    pub(crate) fn emit_reads(&mut self, reads: Reads, layout: Layout, read_bytes: u64) {
        for (device, blocks) in reads.by_device {
            let batch = ReadBatch { class: ReadClass::Awaited, blocks, layout, read_bytes };
            self.emit(Effect::ReadBlocks { device, batch });
        }
    }

    /// Selects the peer to fetch a block from; returns it and the remaining replicas. The load of a peer is
    /// what the directory last reported plus what this node has requested since.
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

    /// Starts the fetch of a block that a load waits for.
    fn begin_fetch(
        &mut self,
        id: SlabId,
        block: u32,
        node: NodeId,
        others: Vec<Replica>,
    ) -> Result<PeerBlock, LossReason> {
        let load = self.loads.get(id).ok_or(LossReason::Miss)?;
        let (key, size_class) = (load.keys[block as usize], load.size_class);
        let (frame, peer_block) =
            self.begin_peer_fill((key, size_class), node, Some(others), BlockOrigin::Loaded)?;
        self.attach(frame, id, block);
        Ok(peer_block)
    }

    /// Starts the fetch of a block that is not on this node.
    pub(crate) fn begin_peer_fill(
        &mut self,
        (key, size_class): (BlockKey, SizeClassId),
        node: NodeId,
        others: Option<Vec<Replica>>,
        origin: BlockOrigin,
    ) -> Result<(FrameIndex, PeerBlock), LossReason> {
        if self.cache.index.find(&key).is_some() {
            // The block is here under another tenant or layout: it counts as missing, because a key can exist
            // only once.
            return Err(LossReason::Miss);
        }
        let begun = self.begin_fill(size_class, key, FillSource::Peer(node), others);
        let (frame, fill) = begun.ok_or(LossReason::NoSpace)?;
        let entry = self.cache.insert_entry(key, size_class, Priority::Normal, origin);
        self.cache.index.entry_mut(entry).set_dram(Dram::Filling(frame));
        self.cache.frames.get_mut(frame).set_entry(Some(entry));
        let slot = self.cache.frame_slot(frame);
        self.peers.enqueue(node, slot.bytes);
        Ok((frame, PeerBlock { fill, key, slot }))
    }

    /// Requests blocks from a peer.
    pub(crate) fn emit_fetch(
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
