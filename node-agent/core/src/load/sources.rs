//! Sources of a load's blocks: DRAM, a fill in progress, this node's NVMe, peers.
//!
//! All blocks are looked up before the first slot is allocated, and those in DRAM are leased in that pass.
//! Room for one block of a load is thus never made by evicting another. Blocks that are not on this node are
//! looked up in the directory once the fills of the others were started.
//!
//! A block that is not here may be copied from the same block of a public tenant: from this node, or from a peer that the
//! directory names for the public key. The sources of all copies are leased before the first slot is allocated too.
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
use crate::waiter::{
    Failed, FillRequest, Import, Joins, LocalImports, RemoteBlock, RemoteBlocks, Replicas, WaiterOwner,
};

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
    /// Blocks that a public tenant has on this node.
    imports: Vec<Import>,
    /// Other blocks, in the order of the load.
    absent: Vec<u32>,
}

/// Blocks with the answers of the directory, and the reason to report without a replica.
type Answered = (Vec<u32>, Vec<Replicas>, LossReason);

impl Search {
    /// Whether no fill is needed.
    fn is_complete(&self) -> bool {
        self.local.is_empty() && self.imports.is_empty()
    }
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
        let mut search = self.search(cache, id, blocks);
        self.search_public(cache, id, &mut search);
        let Some(load) = self.loads.get_mut(id) else { return };
        load.absent = (std::mem::take(&mut search.absent), otherwise);
        if search.is_complete() {
            self.look_up_absent(cx, id);
            return self.publish(cache, cx, id);
        }
        self.request(cache, id, search, None);
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
        let own = blocks.iter().map(|block| load.keys[*block as usize]);
        let public = load.public_of(self.public_tenant).map_or(&[][..], |public| &public.keys[..]);
        // Blocks are in the order of the load, so those with a public key come first.
        let keys = own.chain(blocks.iter().map_while(|block| public.get(*block as usize).copied())).collect();
        let timeout = cx.settings.lookup_timeout.min(load.deadline.since(cx.now));
        self.query_directory(cx, keys, Purpose::Load { load: id, blocks, otherwise }, timeout);
    }

    /// Handles the directory's answer for blocks of a load.
    pub(super) fn attach_found(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        id: SlabId,
        (blocks, mut found, otherwise): (Vec<u32>, Vec<Vec<Replica>>, LossReason),
    ) {
        let Some(load) = self.loads.get(id) else { return };
        let public = found.split_off(blocks.len().min(found.len()));
        let mut answers = found.into_iter();
        let mut public = public.into_iter();
        let replicas = |block: &u32| {
            let (own, public) = (answers.next().unwrap_or_default(), public.next().unwrap_or_default());
            (*block, Replicas { own, public })
        };
        let unplaced = |(block, _): &(u32, _)| load.blocks[*block as usize] == LoadBlock::Unplaced;
        let (blocks, replicas) = blocks.iter().map(replicas).filter(unplaced).unzip();
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
        (blocks, replicas, otherwise): Answered,
    ) {
        let mut search = self.search(cache, id, &blocks);
        if search.is_complete() && search.absent.is_empty() {
            return self.publish(cache, cx, id);
        }
        let Some(load) = self.loads.get(id) else { return };
        // Other loads may join these fills, so one short deadline must not cut the fetch short.
        let deadline = load.deadline.since(cx.now).max(cx.settings.load_deadline_default);
        let public = load.public_of(self.public_tenant);
        let mut absent = std::mem::take(&mut search.absent).into_iter().peekable();
        let of_absent = |(block, replicas): (u32, Replicas)| {
            let block = absent.next_if_eq(&block)?;
            let public_key = public.and_then(|public| public.keys.get(block as usize)).copied();
            Some(RemoteBlock { block, key: load.keys[block as usize], public_key, replicas })
        };
        let blocks = blocks.into_iter().zip(replicas).filter_map(of_absent).collect();
        let public = public.map(|public| public.tenant);
        let size_class = load.caller.size_class;
        let remote = RemoteBlocks { size_class, deadline, otherwise, public, blocks };
        self.request(cache, id, search, Some(remote));
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

    /// Acquires the absent blocks that a public tenant has on this node.
    fn search_public(&self, cache: &mut Cache, id: SlabId, search: &mut Search) {
        let Some(load) = self.loads.get(id) else { return };
        let Some(public) = load.public_of(self.public_tenant) else { return };
        let layout = cache.size_class(load.caller.size_class).layout;
        let keys = search.absent.iter().map_while(|block| public.keys.get(*block as usize).copied());
        let mut copies = cache.acquire_public(keys, (public.tenant, &layout)).into_iter();
        for block in std::mem::take(&mut search.absent) {
            match copies.next().flatten() {
                Some(copy) => {
                    search.imports.push(Import { block, key: load.keys[block as usize], copy });
                }
                None => search.absent.push(block),
            }
        }
    }

    /// Requests the fills of blocks.
    fn request(&mut self, cache: &Cache, id: SlabId, search: Search, remote: Option<RemoteBlocks>) {
        let Some(load) = self.loads.get(id) else { return };
        let Search { local, imports, .. } = search;
        let size_class = load.caller.size_class;
        self.outcomes.push(LoadOutcome::Fetch(FillRequest {
            object: (WaiterOwner::Load, id.0),
            layout: cache.size_class(load.caller.size_class).layout,
            read_bytes: load.read_bytes,
            class: ReadClass::Awaited,
            joins: Joins::All,
            local,
            imports: Some(LocalImports { size_class, blocks: imports }),
            remote,
        }));
    }
}
