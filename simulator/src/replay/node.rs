//! One node: its tiers, and the sequence of calls for a request.
//!
//! With chains, in the sequence of the agent (`node-agent/core`):
//!
//! 1. The request's blocks in DRAM are in use: the use is counted, and they leave the order. A block that is read into
//!    DRAM enters it without a use.
//! 2. Blocks on NVMe or at peers are read into DRAM, and new ones get slots. Each may evict a block that is not in use.
//!    Without a victim, the rest of the prompt is not kept.
//! 3. Blocks that were found become evictable from the last to the first, new ones before their parents.
//! 4. Admission decides which new blocks are written to NVMe.
//!
//! The replay without time does all steps at once ([`Node::serve`]). With time, steps 1 and 2 of the found blocks are the
//! begin of a request ([`Node::begin`]), and the others its end ([`Node::complete`]).
//!
//! With [`Chains::Ignored`], each block is used or inserted in prompt order, and may evict any other one.

use reprise_policy::NodeId;
use reprise_policy::admission::AdmissionMode;
use reprise_policy::eviction::restore_cost::{RestoreFrom, restore_ns};
use reprise_policy::eviction::{Block, Chains, Class, EntryIndex, EvictionPolicy};

use super::admitted::{NvmeTier, Occasion};
use super::tier::{Full, Slot, TierSlots};
use super::trace::NO_BLOCK;
use crate::rng::mix;

use std::ops::Range;

/// Settings of a node, the same for all.
#[derive(Clone, Copy, Debug)]
pub struct NodeSettings {
    /// Policy of both tiers.
    pub policy: EvictionPolicy,
    /// DRAM in blocks.
    pub dram_blocks: u64,
    /// NVMe in blocks; 0: none.
    pub nvme_blocks: u64,
    /// Admission to NVMe.
    pub admission: AdmissionMode,
    /// Bytes of a block.
    pub block_bytes: u64,
    /// Tokens of a block.
    pub block_tokens: u64,
    /// Number of tenants that share the node, without reservations; at least 1.
    pub tenants: u16,
}

/// Results of a replay, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Number of requests.
    pub requests: u64,
    /// Blocks of the prompts.
    pub references: u64,
    /// Hits in the memory of the accelerator; 0 without time.
    pub hits_hbm: u64,
    /// Hits in the node's own DRAM.
    pub hits_dram: u64,
    /// Hits on the node's own NVMe.
    pub hits_nvme: u64,
    /// Hits in the DRAM of other nodes.
    pub hits_peer_dram: u64,
    /// Hits on the NVMe of other nodes.
    pub hits_peer_nvme: u64,
    /// Hits in the cold store behind all nodes.
    pub hits_cold: u64,
    /// Blocks evicted from DRAM.
    pub dram_evictions: u64,
    /// Blocks evicted from NVMe.
    pub nvme_evictions: u64,
    /// Blocks written to NVMe.
    pub nvme_written: u64,
    /// Blocks that the cold store got when the last node evicted them.
    pub cold_written: u64,
    /// Blocks that were not kept in DRAM: all others were in use.
    pub unkept: u64,
    /// Blocks that were not written to NVMe, because no block there was evictable.
    pub unsaved_nvme: u64,
}

/// Source of a block that a request hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    Dram(EntryIndex),
    Nvme(EntryIndex),
    PeerDram(NodeId),
    PeerNvme(NodeId),
    Cold,
}

/// Request at a node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Arrived<'a> {
    pub(crate) chain: &'a [u32],
    pub(crate) tenant: u16,
}

/// Leading run of a request's blocks that are present.
#[derive(Clone, Debug)]
pub(crate) struct Matched<'a> {
    /// Source of each block of the run.
    pub(crate) run: &'a [Source],
    /// Leading blocks that are in the memory of the accelerator too, and beyond the run.
    pub(crate) in_hbm: usize,
    /// Blocks of the run that are loaded.
    pub(crate) loaded: Range<usize>,
}

/// Blocks of a request that are in use at a node.
#[derive(Debug, Default)]
pub(crate) struct InUse {
    found: Vec<EntryIndex>,
    new: Vec<EntryIndex>,
    /// Whether DRAM had no room, so that the rest of the prompt is not kept.
    is_cut: bool,
}

/// Node with its tiers.
#[derive(Debug)]
pub(super) struct Node {
    settings: NodeSettings,
    dram: TierSlots,
    nvme: Option<NvmeTier>,
    pub(super) counts: Counts,
    /// Blocks of the request without time, kept for the memory of its lists.
    in_use: InUse,
    /// Blocks that entered a tier or may have left the node since they were last taken.
    pub(super) changed: Vec<u32>,
    is_tracked: bool,
}

impl Counts {
    /// Blocks that requests hit, in any tier.
    pub fn hits(&self) -> u64 {
        let own = self.hits_hbm + self.hits_dram + self.hits_nvme;
        own + self.hits_peer_dram + self.hits_peer_nvme + self.hits_cold
    }

    /// Adds the counts of another node.
    pub fn merge(&mut self, other: &Counts) {
        self.requests += other.requests;
        self.references += other.references;
        self.hits_hbm += other.hits_hbm;
        self.hits_dram += other.hits_dram;
        self.hits_nvme += other.hits_nvme;
        self.hits_peer_dram += other.hits_peer_dram;
        self.hits_peer_nvme += other.hits_peer_nvme;
        self.hits_cold += other.hits_cold;
        self.dram_evictions += other.dram_evictions;
        self.nvme_evictions += other.nvme_evictions;
        self.nvme_written += other.nvme_written;
        self.cold_written += other.cold_written;
        self.unkept += other.unkept;
        self.unsaved_nvme += other.unsaved_nvme;
    }
}

impl NodeSettings {
    /// Facts of a block for an eviction order, without its group.
    pub(super) fn facts(&self, slot: &Slot, from: RestoreFrom) -> Block {
        Block {
            class: Class::default(),
            key_hash: slot.key_hash(),
            bytes: self.block_bytes,
            position: Some(slot.depth),
            restore_ns: restore_ns(from, self.block_bytes, self.block_tokens),
            ..Block::default()
        }
    }
}

impl Slot {
    /// Hash of the block's key.
    pub(crate) fn key_hash(&self) -> u64 {
        mix(u64::from(self.block) + 1)
    }
}

impl Node {
    /// Creates an empty node; `is_tracked` if the caller takes the changed blocks.
    pub(super) fn new(settings: NodeSettings, is_tracked: bool) -> Node {
        let tier = |blocks| TierSlots::new(settings.policy, blocks, settings.tenants);
        let nvme =
            (settings.nvme_blocks > 0).then(|| NvmeTier::new(tier(settings.nvme_blocks), settings.admission));
        Node {
            settings,
            dram: tier(settings.dram_blocks),
            nvme,
            counts: Counts::default(),
            in_use: InUse::default(),
            changed: Vec::new(),
            is_tracked,
        }
    }

    /// Lists changed blocks from now on.
    pub(super) fn track(&mut self) {
        self.is_tracked = true;
    }

    /// Finds a block in the node's own tiers.
    pub(super) fn find(&self, block: u32) -> Option<Source> {
        let on_nvme = || self.nvme.as_ref()?.slots.find(block).map(Source::Nvme);
        self.dram.find(block).map(Source::Dram).or_else(on_nvme)
    }

    /// Counts a read of a block by another node as a use. A block on NVMe is read into DRAM for that, and stays there.
    pub(super) fn read_by_peer(&mut self, block: u32) {
        match self.find(block) {
            Some(Source::Dram(entry)) => {
                self.dram.order.used(entry);
                self.dram.order.touch(entry);
            }
            Some(Source::Nvme(entry)) => {
                let slots = &mut self.nvme.as_mut().expect("the block is there").slots;
                slots.order.used(entry);
                slots.order.touch(entry);
                let slot = *slots.slot(entry);
                self.stage_for_peer(slot);
            }
            _ => {}
        }
    }

    fn stage_for_peer(&mut self, slot: Slot) {
        if self.make_room(slot.tenant).is_err() {
            return;
        }
        self.changed.push(slot.block);
        let entry = self.dram.place(Slot { holders: 1, is_saved: false, ..slot });
        if self.dram.end_hold(entry) {
            let block = self.in_dram(entry);
            self.dram.release(entry, &block);
        }
    }

    /// Serves a request that hits this run of its blocks, at once.
    pub(super) fn serve(&mut self, request: Arrived<'_>, run: &[Source]) {
        let mut in_use = std::mem::take(&mut self.in_use);
        let matched = Matched { run, in_hbm: 0, loaded: 0..run.len() };
        self.count(request, &matched);
        self.begin(request, &matched, &mut in_use);
        self.complete(request, run.len(), &mut in_use);
        self.in_use = in_use;
    }

    /// Counts a request and its hits: blocks in the memory of the accelerator are hits there.
    pub(super) fn count(&mut self, request: Arrived<'_>, matched: &Matched<'_>) {
        self.counts.requests += 1;
        self.counts.references += request.chain.len() as u64;
        self.counts.hits_hbm += matched.in_hbm as u64;
        for source in matched.run.iter().skip(matched.in_hbm) {
            let count = match source {
                Source::Dram(_) => &mut self.counts.hits_dram,
                Source::Nvme(_) => &mut self.counts.hits_nvme,
                Source::PeerDram(_) => &mut self.counts.hits_peer_dram,
                Source::PeerNvme(_) => &mut self.counts.hits_peer_nvme,
                Source::Cold => &mut self.counts.hits_cold,
            };
            *count += 1;
        }
    }

    /// Takes the blocks that a request hits into use, and makes room in DRAM for those that are loaded from elsewhere.
    pub(super) fn begin(&mut self, request: Arrived<'_>, matched: &Matched<'_>, in_use: &mut InUse) {
        (in_use.is_cut, _) = (false, (in_use.found.clear(), in_use.new.clear()));
        if self.settings.policy.chains == Chains::Ignored {
            return;
        }
        self.use_on_nvme(request, matched.run);
        for source in matched.run {
            if let Source::Dram(entry) = source {
                self.dram.order.used(*entry);
                self.dram.hold(*entry);
            }
        }
        for (at, source) in matched.run.iter().enumerate() {
            if let Source::Dram(entry) = source {
                in_use.found.push(*entry);
            } else if matched.loaded.contains(&at) && !in_use.is_cut {
                match self.make_room(request.tenant) {
                    Ok(()) => in_use.found.push(self.place(request, at, false)),
                    Err(Full) => self.cut(request, at, in_use),
                }
            }
        }
    }

    /// Keeps the blocks of a request behind its run, and makes all its blocks evictable.
    /// Returns the number of blocks that the engine saved.
    pub(super) fn complete(&mut self, request: Arrived<'_>, run: usize, in_use: &mut InUse) -> u64 {
        if self.settings.policy.chains == Chains::Ignored {
            self.use_in_prompt_order(request, run);
            return request.chain.len().saturating_sub(run) as u64;
        }
        self.keep(request, run, in_use);
        let saved = in_use.new.len() as u64;
        self.release(in_use);
        saved
    }

    /// Ends the use of a request's blocks without those behind its run.
    pub(super) fn abandon(&mut self, in_use: &mut InUse) {
        self.release(in_use);
    }

    /// Positions of the leading run's blocks that are on NVMe, and not in DRAM.
    pub(super) fn on_nvme_only(&self, chain: &[u32]) -> Vec<u32> {
        let found = (0..).zip(chain).map_while(|(at, block)| Some((at, self.find(*block)?)));
        found.filter(|(_, source)| matches!(source, Source::Nvme(_))).map(|(at, _)| at).collect()
    }

    /// Number of blocks in DRAM that are evictable, or have not been used yet.
    pub(super) fn evictable_dram(&self) -> u64 {
        self.dram.order.len() as u64 + self.dram.free()
    }

    /// Copies blocks of a request from NVMe into DRAM, as far as they are still there; returns their number.
    pub(super) fn stage(&mut self, request: Arrived<'_>, positions: &[u32]) -> u64 {
        let mut staged = Vec::new();
        for at in positions.iter().map(|at| *at as usize) {
            let is_on_nvme = matches!(self.find(request.chain[at]), Some(Source::Nvme(_)));
            if is_on_nvme && self.make_room(request.tenant).is_ok() {
                staged.push(self.place(request, at, false));
            }
        }
        for entry in staged.iter().rev() {
            self.dram.link(*entry);
            if self.dram.end_hold(*entry) {
                let block = self.in_dram(*entry);
                self.dram.release(*entry, &block);
            }
        }
        staged.len() as u64
    }

    fn cut(&mut self, request: Arrived<'_>, at: usize, in_use: &mut InUse) {
        self.counts.unkept += (request.chain.len() - at) as u64;
        in_use.is_cut = true;
    }

    /// Marks the hits on NVMe as used, from the last to the first.
    fn use_on_nvme(&mut self, request: Arrived<'_>, run: &[Source]) {
        let Some(nvme) = &mut self.nvme else { return };
        for (at, source) in run.iter().enumerate().rev() {
            let entry = match source {
                Source::Nvme(entry) => Some(*entry),
                _ => nvme.slots.find(request.chain[at]),
            };
            let Some(entry) = entry else { continue };
            nvme.slots.link(entry);
            nvme.slots.order.used(entry);
            nvme.slots.order.touch(entry);
        }
    }

    /// Takes the blocks behind the run into use: those in DRAM, and new ones in free slots.
    fn keep(&mut self, request: Arrived<'_>, run: usize, in_use: &mut InUse) {
        for at in run..request.chain.len() {
            if in_use.is_cut {
                return;
            }
            // A block behind the run may be present, or may have been evicted for one of this request.
            if let Some(entry) = self.dram.find(request.chain[at]) {
                self.dram.order.used(entry);
                self.dram.hold(entry);
                in_use.found.push(entry);
            } else if self.make_room(request.tenant).is_ok() {
                let entry = self.place(request, at, true);
                in_use.new.push(entry);
            } else {
                self.cut(request, at, in_use);
            }
        }
    }

    /// Makes blocks evictable again, unless other requests use them, and offers the new ones to NVMe before.
    fn release(&mut self, in_use: &mut InUse) {
        for entry in in_use.found.drain(..).rev() {
            self.dram.link(entry);
            if self.dram.end_hold(entry) {
                let block = self.in_dram(entry);
                self.dram.release(entry, &block);
            }
            self.note_use(entry);
        }
        for entry in in_use.new.drain(..) {
            self.offer_saved(*self.dram.slot(entry), Occasion::Commit);
            if self.dram.end_hold(entry) {
                let block = self.in_dram(entry);
                self.dram.release(entry, &block);
                self.dram.order.settle(entry);
            }
        }
    }

    /// Uses or inserts all blocks of a request, one after the other.
    fn use_in_prompt_order(&mut self, request: Arrived<'_>, run: usize) {
        for at in 0..request.chain.len() {
            let on_nvme = self.nvme.as_ref().and_then(|nvme| nvme.slots.find(request.chain[at]));
            if let (Some(entry), Some(nvme)) = (on_nvme, &mut self.nvme) {
                nvme.slots.order.used(entry);
                nvme.slots.order.touch(entry);
            }
            if let Some(entry) = self.dram.find(request.chain[at]) {
                self.dram.order.touch(entry);
                self.dram.order.used(entry);
                self.note_use(entry);
            } else if self.make_room(request.tenant).is_ok() {
                let entry = self.place(request, at, at >= run);
                self.offer_saved(*self.dram.slot(entry), Occasion::Commit);
                self.dram.end_hold(entry);
                let block = self.in_dram(entry);
                self.dram.release(entry, &block);
            } else {
                self.counts.unkept += 1;
            }
        }
    }

    /// Reports a use of a block in DRAM to admission, which may write the block because of it.
    fn note_use(&mut self, entry: EntryIndex) {
        let Some(nvme) = &mut self.nvme else { return };
        let slot = self.dram.slot_mut(entry);
        if !std::mem::replace(&mut slot.is_reused, true) {
            nvme.reused(*slot);
        }
        let slot = *slot;
        self.offer_saved(slot, Occasion::Use);
    }

    /// Offers a block in DRAM to NVMe. Blocks that were read from elsewhere have their copy there.
    fn offer_saved(&mut self, slot: Slot, occasion: Occasion) {
        let Some(nvme) = self.nvme.as_mut().filter(|_| slot.is_saved) else { return };
        let evicted = nvme.offer(slot, &self.settings, occasion, &mut self.counts);
        if self.is_tracked {
            self.changed.push(slot.block);
            self.changed.extend(evicted);
        }
    }

    /// Frees a slot of DRAM if all are used.
    fn make_room(&mut self, tenant: u16) -> Result<(), Full> {
        let Some(victim) = self.dram.make_room(tenant)? else { return Ok(()) };
        self.counts.dram_evictions += 1;
        if self.is_tracked {
            self.changed.push(victim.block);
        }
        self.offer_saved(victim, Occasion::Eviction);
        Ok(())
    }

    fn place(&mut self, request: Arrived<'_>, at: usize, is_saved: bool) -> EntryIndex {
        let block = request.chain[at];
        if self.is_tracked {
            self.changed.push(block);
        }
        let parent = at.checked_sub(1).map_or(NO_BLOCK, |before| request.chain[before]);
        let (depth, tenant) = (at as u32, request.tenant);
        self.dram.place(Slot { block, parent, depth, tenant, holders: 1, is_reused: false, is_saved })
    }

    /// Facts of a block in DRAM for its eviction order.
    fn in_dram(&self, entry: EntryIndex) -> Block {
        let slot = self.dram.slot(entry);
        let stored = self.nvme.as_ref().is_some_and(|nvme| nvme.slots.find(slot.block).is_some());
        self.settings.facts(slot, if stored { RestoreFrom::Device } else { RestoreFrom::Recompute })
    }
}
