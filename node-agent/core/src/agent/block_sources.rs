//! Sources of a load's blocks: DRAM, a fill in progress, this node's NVMe, peers.
//!
//! All blocks are looked up before the first slot is allocated, and those in DRAM are leased in that pass.
//! Room for one block of a load is thus never made by evicting another.
//!
//! Loads that were not answered when a fill failed try the next source. Loads that were answered report the
//! block as failed: the engine may have read some layers already, and another replica may differ in bits,
//! because checksums belong to a replica.

use crate::agent::AgentCore;
use crate::agent::loads::{Load, LoadBlock, Stage};
use crate::agent::lookups::Purpose;
use crate::cache::{FrameIndex, LocalCopy};
use crate::effect::{LossReason, Source};
use crate::event::{FillError, Replica, Scope};
use crate::limits::LOOKUPS_MAX;
use crate::slab::SlabId;
use crate::waiter::{
    Advanced, Attached, Failed, FillRequest, Joins, LocalBlock, RemoteBlocks, WaiterId, WaiterOwner,
};

/// Block of a load without a source yet.
#[derive(Debug)]
pub(crate) struct MissingBlock {
    block: u32,
    /// Known replicas on other nodes.
    replicas: Vec<Replica>,
}

/// Blocks of a load whose fills failed before the load was answered.
#[derive(Debug)]
pub(crate) struct Retry {
    failed: Failed,
    blocks: Vec<u32>,
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

impl AgentCore {
    /// Attaches the blocks that this node has or is filling; returns the rest.
    pub(crate) fn attach_local(&mut self, id: SlabId, wanted: Vec<MissingBlock>) -> Vec<MissingBlock> {
        let Some(load) = self.loads.get(id) else { return Vec::new() };
        let (mut local, mut missing) = (Vec::new(), Vec::new());
        let keys = wanted.iter().map(|wanted| &load.keys[wanted.block as usize]);
        let (size_class, entries) = (load.size_class, self.cache.index.find_all(keys));
        self.cache.touch_chain(entries.iter().flatten().copied());
        // The index does not change in this pass.
        for (wanted, entry) in wanted.into_iter().zip(entries) {
            match self.cache.classify_entry(entry, size_class) {
                LocalCopy::InDram(frame) => self.take_hit(id, wanted.block, frame),
                LocalCopy::Filling(fill) => local.push((wanted.block, LocalBlock::Filling(fill))),
                LocalCopy::OnDevice(entry) => local.push((wanted.block, LocalBlock::Stored(entry))),
                LocalCopy::Absent => missing.push(wanted),
            }
        }
        if !local.is_empty() {
            self.fill_blocks(id, local, None);
        }
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
        let Some(Load { size_class, deadline, keys, .. }) = self.loads.get(id) else { return };
        // Other loads may join these fills, so one short deadline must not cut the fetch short.
        let deadline = deadline.since(self.now).max(self.settings.load_deadline_default);
        let with_key = |MissingBlock { block, replicas }| (block, keys[block as usize], replicas);
        let blocks = missing.into_iter().map(with_key).collect();
        let remote = RemoteBlocks { size_class: *size_class, deadline, otherwise, blocks };
        self.fill_blocks(id, Vec::new(), Some(remote));
    }

    /// Starts or joins the fills of blocks.
    fn fill_blocks(&mut self, id: SlabId, local: Vec<(u32, LocalBlock)>, remote: Option<RemoteBlocks>) {
        let Some(Load { size_class, read_bytes, .. }) = self.loads.get(id) else { return };
        let (layout, read_bytes) = (self.cache.sizes.get(*size_class).layout, *read_bytes);
        let object = (WaiterOwner::Load, id.0);
        let request = FillRequest { object, layout, read_bytes, joins: Joins::All, local, remote };
        self.transfer.begin(&mut self.cache, context!(self), request);
        self.route();
    }

    /// Attaches a block to its fill.
    pub(crate) fn load_attached(&mut self, waiter: WaiterId, attached: Attached) {
        let Attached { lease, wait, source, layers, joined } = attached;
        self.counters.single_flight_joins += u64::from(joined);
        let load = self.loads.get_mut(SlabId(waiter.object)).expect("the load has requested the fill");
        load.blocks[waiter.block as usize] = LoadBlock::Waiting { lease, wait, source, layers };
        if layers > 0 {
            load.progress.advance(0, u32::from(layers));
        }
    }

    /// Handles verified layers of a block.
    pub(crate) fn load_advanced(&mut self, waiter: WaiterId, advanced: Advanced) {
        let (id, Advanced { from, to, source, is_whole }) = (SlabId(waiter.object), advanced);
        let Some(load) = self.loads.get_mut(id) else { return };
        load.advance(waiter.block, (u32::from(from), u32::from(to)), source, is_whole);
        if is_whole {
            let bytes = self.cache.sizes.get(load.size_class).layout.block_bytes();
            self.counters.hit(source, bytes);
        }
        self.publish_progress(id);
    }

    /// Handles the failure of a block's fill.
    pub(crate) fn load_failed(&mut self, waiter: WaiterId, failed: Failed) {
        let (id, block) = (SlabId(waiter.object), waiter.block);
        let Some(load) = self.loads.get_mut(id) else { return };
        let Some((lease, layers)) = load.detach(block) else { return };
        if load.stage == Stage::Placing {
            load.progress.restart(layers);
            self.cache.release(lease);
            let retry = self.retries.entry(id).or_insert_with(|| Retry { failed, blocks: Vec::new() });
            return retry.blocks.push(block);
        }
        self.counters.failed_blocks += 1;
        self.fail_block(id, block, layers, LoadBlock::Held { lease });
        self.publish_progress(id);
    }

    /// Tries the next source for blocks whose fill failed before their load was answered.
    pub(crate) fn retry_other_source(&mut self, load: SlabId, Retry { failed, blocks }: Retry) {
        let Failed { error, others } = failed;
        if error == FillError::Refused {
            // The block is still stored here: a retry would send the same read to the device at once.
            for block in blocks {
                self.lose_block(load, block, LossReason::Failed);
            }
            return self.publish_progress(load);
        }
        let replicas = others.clone().unwrap_or_default();
        let wanted = blocks.iter().map(|block| MissingBlock::from(*block, replicas.clone())).collect();
        let missing = self.attach_local(load, wanted);
        let absent = error == FillError::Absent;
        let otherwise = if absent { LossReason::Miss } else { LossReason::Failed };
        match others {
            None => self.fetch_remote(load, missing, otherwise),
            Some(_) => self.fetch_from_peers(load, missing, otherwise),
        }
        self.publish_progress(load);
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
}
