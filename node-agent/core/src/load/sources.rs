//! Sources of a load's blocks: DRAM, a fill in progress, this node's NVMe, peers.
//!
//! All blocks are looked up before the first slot is allocated, and those in DRAM are leased in that pass.
//! Room for one block of a load is thus never made by evicting another. Blocks that are not on this node are
//! looked up in the directory once the fills of the others were started.
//!
//! Loads that were not answered when a fill failed try the next source. Loads that were answered report the
//! block as failed: the engine may have read some layers already, and another replica may differ in bits,
//! because checksums belong to a replica.

use crate::cache::{Cache, LocalBlock, LocalCopy};
use crate::context::Context;
use crate::effect::{LossReason, ReadClass, Source};
use crate::event::{FillError, Replica, Scope};
use crate::limits::LOOKUPS_MAX;
use crate::load::lookups::Purpose;
use crate::load::table::LoadBlock;
use crate::load::{LoadOutcome, Loads};
use crate::slab::SlabId;
use crate::waiter::{Failed, FillRequest, Joins, RemoteBlocks, WaiterOwner};

/// Blocks of a load whose fills failed before the load was answered.
#[derive(Debug)]
pub(super) struct Retry {
    pub(super) failed: Failed,
    pub(super) blocks: Vec<u32>,
}

/// Blocks of a load that are not in DRAM.
#[derive(Debug, Default)]
struct Search {
    /// Blocks that this node has or is filling.
    local: Vec<(u32, LocalBlock)>,
    /// Other blocks, in the order of the load.
    absent: Vec<u32>,
}

impl Loads {
    /// Finds sources for blocks, first on this node, then in the directory.
    pub(super) fn place(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        id: SlabId,
        (blocks, otherwise): (&[u32], LossReason),
    ) {
        let Search { local, absent } = self.search(cache, id, blocks);
        let Some(load) = self.loads.get_mut(id) else { return };
        load.absent = (absent, otherwise);
        if local.is_empty() {
            self.look_up_absent(cx, id);
            return self.publish(cache, cx, id);
        }
        self.request(cache, id, local, None);
    }

    /// Looks up the blocks in the directory that are not on this node, if the load's scope allows it.
    pub(super) fn look_up_absent(&mut self, cx: &mut Context, id: SlabId) {
        let Some(load) = self.loads.get_mut(id) else { return };
        let (blocks, otherwise) = (std::mem::take(&mut load.absent.0), load.absent.1);
        if blocks.is_empty() {
            return;
        }
        if load.scope == Scope::Local || self.lookups.len() >= LOOKUPS_MAX {
            for block in blocks {
                self.lose(cx, id, block, otherwise);
            }
            return;
        }
        let keys = blocks.iter().map(|block| load.keys[*block as usize]).collect();
        let timeout = cx.settings.lookup_timeout.min(load.deadline.since(cx.now));
        self.query_directory(cx, keys, Purpose::Load { load: id, blocks, otherwise }, timeout);
    }

    /// Handles the directory's answer for blocks of a load.
    pub(super) fn attach_found(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        id: SlabId,
        (blocks, found, otherwise): (&[u32], Vec<Vec<Replica>>, LossReason),
    ) {
        let Some(load) = self.loads.get(id) else { return };
        let answers = found.into_iter().chain(std::iter::repeat_with(Vec::new));
        let unplaced = |(block, _): &(u32, _)| load.blocks[*block as usize] == LoadBlock::Unplaced;
        let (blocks, replicas) = blocks.iter().copied().zip(answers).filter(unplaced).unzip();
        self.place_with_replicas(cache, cx, id, (blocks, replicas, otherwise));
    }

    /// Tries the next source for blocks whose fill failed before their load was answered.
    pub(super) fn retry(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        id: SlabId,
        Retry { failed, blocks }: Retry,
    ) {
        let otherwise = match failed.error {
            FillError::Absent => LossReason::Miss,
            FillError::Refused => {
                // The block is still stored here: a retry would send the same read to the device at once.
                for block in blocks {
                    self.lose(cx, id, block, LossReason::Failed);
                }
                return self.publish(cache, cx, id);
            }
            _ => LossReason::Failed,
        };
        match failed.others {
            None => self.place(cache, cx, id, (&blocks, otherwise)),
            Some(others) => {
                let replicas = vec![others; blocks.len()];
                self.place_with_replicas(cache, cx, id, (blocks, replicas, otherwise));
            }
        }
    }

    /// Finds sources for blocks, first on this node, then at the peers that have replicas.
    fn place_with_replicas(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        id: SlabId,
        (blocks, replicas, otherwise): (Vec<u32>, Vec<Vec<Replica>>, LossReason),
    ) {
        let Search { local, absent } = self.search(cache, id, &blocks);
        if local.is_empty() && absent.is_empty() {
            return self.publish(cache, cx, id);
        }
        let Some(load) = self.loads.get(id) else { return };
        // Other loads may join these fills, so one short deadline must not cut the fetch short.
        let deadline = load.deadline.since(cx.now).max(cx.settings.load_deadline_default);
        let mut absent = absent.into_iter().peekable();
        let of_absent = |(block, replicas): (u32, Vec<Replica>)| {
            absent.next_if_eq(&block).map(|block| (block, load.keys[block as usize], replicas))
        };
        let blocks = blocks.into_iter().zip(replicas).filter_map(of_absent).collect();
        let remote = RemoteBlocks { size_class: load.caller.size_class, deadline, otherwise, blocks };
        self.request(cache, id, local, Some(remote));
    }

    /// Leases the blocks in DRAM; returns the others.
    fn search(&mut self, cache: &mut Cache, id: SlabId, blocks: &[u32]) -> Search {
        let Some(load) = self.loads.get_mut(id) else { return Search::default() };
        let layout = cache.size_class(load.caller.size_class).layout;
        let (mut search, mut hits, mut at) = (Search::default(), 0, blocks.iter().copied());
        let keys = blocks.iter().map(|block| &load.keys[*block as usize]);
        cache.acquire(keys, load.caller.size_class, |copy| {
            let Some(block) = at.next() else { return };
            match copy {
                LocalCopy::InDram(lease) => {
                    load.blocks[block as usize] = LoadBlock::Ready { lease, source: Source::OwnDram };
                    load.progress.advance(0, layout.layers());
                    hits += 1;
                }
                LocalCopy::Elsewhere(found) => search.local.push((block, found)),
                LocalCopy::Absent => search.absent.push(block),
            }
        });
        self.counters.hit(Source::OwnDram, hits, hits * layout.block_bytes());
        search
    }

    /// Requests the fills of blocks.
    fn request(
        &mut self,
        cache: &Cache,
        id: SlabId,
        local: Vec<(u32, LocalBlock)>,
        remote: Option<RemoteBlocks>,
    ) {
        let Some(load) = self.loads.get(id) else { return };
        self.outcomes.push(LoadOutcome::Fetch(FillRequest {
            object: (WaiterOwner::Load, id.0),
            layout: cache.size_class(load.caller.size_class).layout,
            read_bytes: load.read_bytes,
            class: ReadClass::Awaited,
            joins: Joins::All,
            local,
            remote,
        }));
    }
}
