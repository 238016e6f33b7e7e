//! Cache: the blocks of this node, their copies in the arena and on devices, and the space of tenants.
//!
//! The cache names no other owner. It stores opaque numbers for them: the fill of a frame, and the record of
//! an unsaved block. Consequences for other owners are collected in [`CacheOutcomes`], which the core routes.
//!
//! Files call only files before them in this order: tables (`index`, `arena`, `frames`, `checksums`, `sizes`,
//! `accounts`, `devices`, `pending_space`), `blocks`, `lease`, `order`, `listed`, `evict`, `operations`, `space`,
//! `tiering`, `allocate`, `acquire`, then the others.

use reprise_policy::fair_order::Weights;
use reprise_policy::key::HASH_SLOTS;
use reprise_policy::{BlockKey, SlotSet, TenantId, Tick, Tier};

use crate::context::Context;
use crate::counters::{CacheCounters, Counters};
use crate::effect::{DeviceId, Effect, RegionId, ReplicaChange};
use crate::pool::{BatchId, DevicePool, PoolUsage, StoredBlock};
use crate::settings::Settings;
use crate::slab::Slab;

mod accounts;
mod acquire;
mod ahead;
mod allocate;
mod arena;
mod attachment;
mod audit;
mod blocks;
mod check;
mod checksums;
mod describe;
mod devices;
mod evict;
mod extents;
mod fill;
mod frames;
mod imports;
mod index;
mod lease;
mod listed;
mod operations;
mod order;
mod pending_space;
mod pins;
mod publish;
mod readers;
mod renewal;
mod retained;
mod rotation;
mod sizes;
mod space;
mod tiering;

use accounts::Accounts;
pub(crate) use accounts::{TenantIndex, Unmet, nvme_bytes};
pub(crate) use acquire::{LocalBlock, LocalCopy, OfferedBlock};
pub(crate) use ahead::AheadCopy;
use arena::Arena;
pub use arena::Renewal;
use devices::Devices;
pub(crate) use extents::LentSlot;
use frames::Frames;
pub(crate) use frames::{EvictionPosition, FrameIndex, FrameState};
pub(crate) use imports::{ImportStart, PublicCopy};
use index::Index;
pub(crate) use index::{Dram, Stored};
pub(crate) use lease::{Fill, Lease, Read, Save, Write};
use listed::Listed;
pub(crate) use order::ChainPlace;
use pending_space::PendingSpace;
pub(crate) use publish::{CommitTarget, Durability};
use retained::Retained;
pub(crate) use retained::{Allowance, Change as BlockChange, LostRetention};
use sizes::SizeClasses;
pub(crate) use sizes::{RankClasses, SizeClass, SizeClassId};
pub(crate) use space::SpaceState;
use tiering::Tiering;

pub use accounts::{TenantBlocks, TenantCounts, TenantQuotas, TenantUsage};
pub use describe::{BlockDescription, BlockOrigin, DramCopy};

/// Blocks of this node, and the space that they use.
#[derive(Debug)]
pub(crate) struct Cache {
    sizes: SizeClasses,
    accounts: Accounts,
    arena: Arena,
    frames: Frames,
    index: Index,
    devices: Devices,
    /// Admission to the devices, and demotion from the arena.
    tiering: Tiering,
    /// Time of the current event.
    now: Tick,
    /// Time from which regions may be taken again after a failed renewal.
    renewals_from: Tick,
    /// Frames of retiring regions that became clean with the current event.
    leaving: Vec<FrameIndex>,
    /// Leases on frames whose contents are being checked.
    checks: Slab<Lease<Read>>,
    /// Space on the devices that accepted and unsaved blocks will need.
    pending_space: PendingSpace,
    /// Copies that retention pins keep.
    retained: Retained,
    /// Blocks of requests that have begun.
    listed: Listed,
    /// Share of the pool, in thousandths, that eviction keeps free ahead of writes.
    pool_free_permille: u16,
    /// Number of blocks that are readable in DRAM.
    resident_blocks: u64,
    /// Replica changes that were not announced yet.
    changes: Vec<ReplicaChange>,
    outcomes: CacheOutcomes,
    counters: CacheCounters,
}

/// Consequences for other owners, merged until the core routes them.
#[derive(Debug, Default)]
pub(crate) struct CacheOutcomes {
    /// An allocation found the arena full, or a tenant exceeds its memory: saved blocks could be evicted.
    pub(crate) arena_full: bool,
    /// Capacity or the free target changed, and with it what reservations get.
    pub(crate) capacity_changed: bool,
    /// Blocks were found on a device; their tenants may exceed their limits.
    pub(crate) recovered: bool,
    /// Regions get no new blocks, because other tenants need them.
    pub(crate) regions_retired: bool,
    /// Number of blocks that became durable.
    pub(crate) stored: u64,
    /// Write batches that ended, in order.
    pub(crate) batches: Vec<DoneBatch>,
    /// Frames of blocks that are in DRAM only and were used again, which may admit them to a device.
    pub(crate) used_again: Vec<FrameIndex>,
    /// Copies in DRAM that retention pins no longer keep.
    pub(crate) lost_retentions: Vec<LostRetention>,
}

/// Write batch that ended, with the blocks that are durable.
#[derive(Debug)]
pub(crate) struct DoneBatch {
    pub(crate) batch: BatchId,
    pub(crate) stored: Vec<StoredBlock>,
}

/// Space for one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotRequest {
    /// Tenant of the block.
    pub(crate) tenant: TenantIndex,
    /// Bytes of its slot.
    pub(crate) slot_bytes: u64,
}

impl CacheOutcomes {
    /// Whether there is nothing to route.
    pub(crate) fn is_empty(&self) -> bool {
        let flags = self.arena_full || self.capacity_changed || self.recovered || self.regions_retired;
        let lists = [self.used_again.is_empty(), self.lost_retentions.is_empty(), self.batches.is_empty()];
        !flags && self.stored == 0 && lists == [true; 3]
    }
}

impl Cache {
    /// Creates an empty cache over devices and regions.
    pub(crate) fn new(settings: &Settings, pools: Vec<DevicePool>, regions: &[(RegionId, u64)]) -> Cache {
        Cache {
            sizes: SizeClasses::default(),
            accounts: Accounts::new(&settings.tenants),
            arena: Arena::new(regions, settings.dram_eviction),
            frames: Frames::default(),
            index: Index::new(),
            devices: Devices::new(pools, settings),
            tiering: Tiering::new(settings),
            now: Tick(0),
            renewals_from: Tick(0),
            leaving: Vec::new(),
            checks: Slab::new(),
            pending_space: PendingSpace::default(),
            retained: Retained::default(),
            listed: Listed::default(),
            pool_free_permille: settings.pool_free_permille,
            resident_blocks: 0,
            changes: Vec::new(),
            outcomes: CacheOutcomes::default(),
            counters: CacheCounters::default(),
        }
    }

    /// Weights of the configured tenants, by index.
    pub(crate) fn weights(&self, weights: &Weights<TenantId>) -> Weights<TenantIndex> {
        self.accounts.weights(weights)
    }

    /// Forgets the changes and outcomes of adding recovered blocks. Replaces the list of changes, because
    /// every recovered block has made it grow.
    pub(crate) fn forget_recovery(&mut self) {
        self.changes = Vec::new();
        self.outcomes = CacheOutcomes::default();
    }

    /// Returns the consequences for other owners; `None` without any.
    pub(crate) fn take_outcomes(&mut self) -> Option<CacheOutcomes> {
        (!self.outcomes.is_empty()).then(|| std::mem::take(&mut self.outcomes))
    }

    /// Requests that saved blocks become evictable soon.
    pub(crate) fn report_full(&mut self) {
        self.outcomes.arena_full = true;
    }

    /// Announces the replica changes since the last announcement.
    pub(crate) fn announce(&mut self, cx: &mut Context) {
        if !self.changes.is_empty() {
            self.counters.announced_changes += self.changes.len() as u64;
            cx.emit(Effect::Announce { changes: std::mem::take(&mut self.changes) });
        }
    }

    /// Returns all replicas of blocks in these hash slots.
    pub(crate) fn inventory(&self, slots: &SlotSet) -> Vec<(BlockKey, Tier)> {
        let blocks = (self.resident_blocks + self.index.stored_blocks()) as usize;
        let mut replicas = Vec::with_capacity(blocks * slots.len() / usize::from(HASH_SLOTS));
        for (_, entry) in self.index.iter().filter(|(_, entry)| slots.has_key(&entry.key())) {
            if matches!(entry.dram(), Dram::Resident(_)) {
                replicas.push((entry.key(), Tier::Dram));
            }
            if entry.stored().is_some() {
                replicas.push((entry.key(), Tier::Nvme));
            }
        }
        replicas
    }

    /// Sets the cache's counters and gauges.
    pub(crate) fn set_counters(&self, all: &mut Counters) {
        self.counters.copy_to(all);
        all.arena_bytes = self.arena.bytes();
        all.arena_used_bytes = self.arena.used_bytes();
        all.arena_free_bytes = self.arena.bytes() - self.arena.used_bytes();
        all.read_leases = self.frames.read_leases();
        all.dram_blocks = self.resident_blocks;
        all.nvme_blocks = self.index.stored_blocks();
        let usage = self.devices.usage();
        all.pool_capacity_bytes = usage.capacity_bytes;
        all.pool_used_bytes = usage.slot_bytes_used;
        all.pool_free_bytes = usage.slot_bytes_free;
        all.pool_pending_free_bytes = usage.pending_frees_bytes;
        all.pool_quarantined_slots = usage.slots_quarantined;
        all.journal_used_bytes = usage.journal_bytes_used;
        all.journal_capacity_bytes = usage.journal_bytes_capacity;
        all.journal_checkpoints = usage.checkpoints;
        all.journal_records = usage.journal_records;
        self.set_tiering_counters(all);
    }

    /// Bytes of the arena and of its slots in use, and usage of the pools as the control plane counts it.
    pub(crate) fn usage(&self) -> (u64, u64, PoolUsage) {
        (self.arena.bytes(), self.arena.used_bytes(), self.devices.reported_usage())
    }

    /// Usage of each usable device.
    pub(crate) fn device_usage(&self) -> impl Iterator<Item = (DeviceId, PoolUsage)> {
        self.devices.usages()
    }
}
