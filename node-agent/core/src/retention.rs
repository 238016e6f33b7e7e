//! Retention pins: blocks whose copies are kept from eviction for a limited time, on request.
//!
//! ```text
//!  command ──▶ Pinned ──unpin, or expired──▶ (evictable again)
//!                │ the copy is lost, deleted, or its region or segment is needed
//!                └────▶ pins nothing, until it expires
//! ```
//!
//! A retention pin belongs to a tenant: it outlives the session that set it, and ends with its time. It keeps the copies
//! that the block has when it is pinned. It is advice: pins of extents and leases of loads are rights, and have other
//! owners.
//!
//! Invariants:
//! * A tenant has at most `retention_blocks_max` pins.
//! * A new pin keeps the pinned bytes of its tenant within `retention_permille` of what the tenant can have in the tier:
//!   its limit, or the capacity. So eviction finds other victims of the tenant.
//! * On devices, pinned bytes beyond the reservations of their tenants stay within the same share of the unreserved
//!   capacity. So pins never take what other tenants have reserved.
//! * If quotas or capacity shrink, the pins that expire last end, until the rest fits.
//!
//! Memory: about 200 bytes for each pin.
//!
//! Out of scope: pins in the journal. After a restart, nothing is pinned.

use std::collections::{BTreeMap, BTreeSet};

use reprise_policy::block_command::RetentionUsage;
use reprise_policy::{BlockKey, Tick};

use crate::cache::{Allowance, BlockChange, Cache, FrameIndex, LostRetention, SizeClassId, TenantIndex};
use crate::context::Context;
use crate::counters::{Counters, RetentionCounters};
use crate::settings::Settings;
use crate::timers::Timers;

/// Retention pins of all tenants.
#[derive(Debug, Default)]
pub(crate) struct Retention {
    pins: BTreeMap<BlockKey, RetentionPin>,
    by_tenant: BTreeMap<TenantIndex, PinnedDram>,
    timers: Timers<BlockKey>,
    counters: RetentionCounters,
}

/// Pin of one block.
#[derive(Debug)]
struct RetentionPin {
    size_class: SizeClassId,
    tenant: TenantIndex,
    expires: Tick,
    /// Frame of the copy in DRAM, whose lease the cache holds.
    dram: Option<FrameIndex>,
}

/// Pins of a tenant, and their bytes in DRAM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct PinnedDram {
    blocks: u64,
    bytes: u64,
}

impl Retention {
    /// Pins a block, or gives the pin of a block a new time.
    pub(crate) fn pin(
        &mut self,
        cache: &mut Cache,
        cx: &Context,
        (key, size_class): (BlockKey, SizeClassId),
        (expires, allowance): (Tick, &mut Allowance),
    ) -> BlockChange {
        let tenant = cache.tenant_of(size_class);
        // The copies may have changed since the last pin.
        let ended = match self.pins.get(&key) {
            Some(pin) if pin.tenant == tenant => self.end(cache, &key),
            Some(_) => return BlockChange::Absent,
            None => Allowance::default(),
        };
        allowance.dram += ended.dram;
        allowance.nvme += ended.nvme;
        if self.of_tenant(tenant).blocks >= u64::from(cx.settings.retention_blocks_max) {
            self.counters.retention_refused_blocks += 1;
            return BlockChange::OverLimit;
        }
        let copies = match cache.retain_copies(&key, size_class, *allowance) {
            Ok(copies) => copies,
            Err(refusal) => {
                self.counters.retention_refused_blocks += u64::from(refusal == BlockChange::OverLimit);
                return refusal;
            }
        };
        let dram_bytes = if copies.dram.is_some() { cache.slot_bytes(size_class) } else { 0 };
        allowance.dram -= dram_bytes;
        allowance.nvme -= copies.nvme_bytes;
        let of_tenant = self.by_tenant.entry(tenant).or_default();
        of_tenant.blocks += 1;
        of_tenant.bytes += dram_bytes;
        self.timers.set(expires, key);
        self.pins.insert(key, RetentionPin { size_class, tenant, expires, dram: copies.dram });
        self.counters.retention_pinned_blocks_total += 1;
        BlockChange::Done(dram_bytes + copies.nvme_bytes)
    }

    /// Ends the pin of a block of a size class.
    pub(crate) fn unpin(
        &mut self,
        cache: &mut Cache,
        key: &BlockKey,
        size_class: SizeClassId,
    ) -> BlockChange {
        match self.pins.get(key) {
            Some(pin) if pin.size_class == size_class => {
                let ended = self.end(cache, key);
                BlockChange::Done(ended.dram + ended.nvme)
            }
            _ if cache.local_source(key, size_class).is_some() => BlockChange::Unneeded,
            _ => BlockChange::Absent,
        }
    }

    /// Whether a block has a pin.
    pub(crate) fn is_pinned(&self, key: &BlockKey) -> bool {
        self.pins.contains_key(key)
    }

    /// Pins of a tenant, and their limits.
    pub(crate) fn usage(&self, cache: &Cache, settings: &Settings, tenant: TenantIndex) -> RetentionUsage {
        let (held, share) = (self.of_tenant(tenant), share(cache, settings, tenant));
        RetentionUsage {
            blocks: held.blocks,
            blocks_max: u64::from(settings.retention_blocks_max),
            dram_bytes: held.bytes,
            dram_bytes_max: share.dram,
            nvme_bytes: cache.retained_nvme_bytes(tenant),
            nvme_bytes_max: share.nvme,
        }
    }

    /// Time of the first expiry.
    pub(crate) fn first_due(&self) -> Option<Tick> {
        self.timers.next()
    }

    /// Ends the first pin that has expired.
    pub(crate) fn fire_timer(&mut self, cache: &mut Cache, now: Tick) {
        if let Some(key) = self.timers.pop_due(now) {
            self.counters.retention_expired_blocks += 1;
            self.end(cache, &key);
        }
    }

    /// Ends pins of tenants that no longer fit their shares, those that expire last first.
    pub(crate) fn enforce(&mut self, cache: &mut Cache, settings: &Settings) {
        for tenant in self.by_tenant.keys().copied().collect::<Vec<_>>() {
            if fits(cache, settings, tenant, self.of_tenant(tenant)) {
                continue;
            }
            let of_tenant = self.pins.iter().filter(|(_, pin)| pin.tenant == tenant);
            let mut last: Vec<(Tick, BlockKey)> = of_tenant.map(|(key, pin)| (pin.expires, *key)).collect();
            last.sort_unstable();
            while let Some((_, key)) = last.pop()
                && !fits(cache, settings, tenant, self.of_tenant(tenant))
            {
                self.counters.retention_revoked_blocks += 1;
                self.end(cache, &key);
            }
        }
    }

    /// Removes the copy in DRAM from the pin of a block: its slot was needed, or the copy was damaged or replaced.
    /// The pin ends unless it keeps a copy on a device.
    pub(crate) fn lost_dram(&mut self, cache: &mut Cache, LostRetention { key, frame }: LostRetention) {
        let Some(pin) = self.pins.get_mut(&key).filter(|pin| pin.dram == Some(frame)) else { return };
        if !cache.is_retained_on_device(&key) {
            self.end(cache, &key);
            return;
        }
        pin.dram = None;
        let (tenant, bytes) = (pin.tenant, cache.slot_bytes(pin.size_class));
        if let Some(held) = self.by_tenant.get_mut(&tenant) {
            held.bytes -= bytes;
        }
    }

    /// Sets the counters and gauges of retention pins.
    pub(crate) fn set_counters(&self, cache: &Cache, all: &mut Counters) {
        self.counters.copy_to(all);
        all.retention_pinned_blocks = self.pins.len() as u64;
        all.retention_dram_bytes = self.by_tenant.values().map(|held| held.bytes).sum();
        all.retention_nvme_bytes = cache.retained_bytes();
        all.retention_broken_blocks = cache.broken_retentions();
    }

    /// Ends the pin of a block; returns the bytes of the copies that it kept.
    fn end(&mut self, cache: &mut Cache, key: &BlockKey) -> Allowance {
        let Some(RetentionPin { size_class, tenant, expires, dram }) = self.pins.remove(key) else {
            return Allowance::default();
        };
        self.timers.clear(expires, *key);
        let dram_bytes = if dram.is_some() { cache.slot_bytes(size_class) } else { 0 };
        let before = cache.retained_nvme_bytes(tenant);
        cache.end_retention(key, dram);
        if let Some(held) = self.by_tenant.get_mut(&tenant) {
            held.blocks -= 1;
            held.bytes -= dram_bytes;
            if held.blocks == 0 {
                self.by_tenant.remove(&tenant);
            }
        }
        Allowance { dram: dram_bytes, nvme: before - cache.retained_nvme_bytes(tenant) }
    }

    fn of_tenant(&self, tenant: TenantIndex) -> PinnedDram {
        self.by_tenant.get(&tenant).copied().unwrap_or_default()
    }

    /// Bytes that a tenant may still pin.
    pub(crate) fn allowance(&self, cache: &Cache, settings: &Settings, tenant: TenantIndex) -> Allowance {
        let share = share(cache, settings, tenant);
        let nvme = cache.retained_nvme_bytes(tenant);
        let reserved_left = cache.nvme_usage(tenant).quota.reserved().saturating_sub(nvme);
        Allowance {
            dram: share.dram.saturating_sub(self.of_tenant(tenant).bytes),
            nvme: share.nvme.saturating_sub(nvme).min(reserved_left + unreserved_left(cache, settings)),
        }
    }

    /// Checks the invariants within the pins. Costs time in proportion to their number.
    pub(crate) fn audit(&self, cache: &Cache, settings: &Settings) -> Result<(), String> {
        let mut by_tenant: BTreeMap<TenantIndex, PinnedDram> = BTreeMap::new();
        for pin in self.pins.values() {
            let held = by_tenant.entry(pin.tenant).or_default();
            held.blocks += 1;
            held.bytes += if pin.dram.is_some() { cache.slot_bytes(pin.size_class) } else { 0 };
        }
        ensure!(by_tenant == self.by_tenant, "{by_tenant:?} pinned, {:?} counted", self.by_tenant);
        ensure!(
            self.timers.len() == self.pins.len(),
            "{} pins, {} timers",
            self.pins.len(),
            self.timers.len()
        );
        for (tenant, held) in &by_tenant {
            ensure!(fits(cache, settings, *tenant, *held), "{tenant:?} pins more than its share: {held:?}");
        }
        cache.audit_retained(self.pins.keys().copied())
    }

    /// Checks that pins and the cache agree on the frames that pins keep.
    pub(crate) fn audit_frames(&self, cache: &Cache) -> Result<(), String> {
        let lost = cache.lost_retentions();
        let is_known = |(key, frame): &(BlockKey, FrameIndex)| {
            !lost.iter().any(|lost| lost.key == *key && lost.frame == *frame)
        };
        let pinned = self.pins.iter().filter_map(|(key, pin)| Some((*key, pin.dram?)));
        let kept: BTreeSet<FrameIndex> = pinned.filter(is_known).map(|(_, frame)| frame).collect();
        let retained: BTreeSet<FrameIndex> = cache.retained_frames().collect();
        ensure!(kept == retained, "pins keep the frames {kept:?}, the cache {retained:?}");
        Ok(())
    }
}

/// Bytes that a tenant may pin in each tier.
fn share(cache: &Cache, settings: &Settings, tenant: TenantIndex) -> Allowance {
    let Allowance { dram, nvme } = cache.obtainable_bytes(tenant);
    Allowance { dram: part(dram, settings), nvme: part(nvme, settings) }
}

/// Bytes on devices that pins may still use beyond reservations.
fn unreserved_left(cache: &Cache, settings: &Settings) -> u64 {
    part(cache.unreserved_nvme_bytes(), settings).saturating_sub(cache.retained_beyond_reservations())
}

/// Whether the pins of a tenant are within its shares, and those of all tenants within the unreserved capacity. Regions
/// that other tenants have taken since do not count.
fn fits(cache: &Cache, settings: &Settings, tenant: TenantIndex, held: PinnedDram) -> bool {
    let (share, nvme) = (share(cache, settings, tenant), cache.retained_nvme_bytes(tenant));
    let dram = cache.dram_usage(tenant).quota.limit().min(cache.arena_bytes());
    let is_reserved = nvme <= cache.nvme_usage(tenant).quota.reserved();
    let beyond = cache.retained_beyond_reservations();
    held.bytes <= part(dram, settings)
        && nvme <= share.nvme
        && (is_reserved || beyond <= part(cache.unreserved_nvme_bytes(), settings))
}

fn part(bytes: u64, settings: &Settings) -> u64 {
    let part = u128::from(bytes) * u128::from(settings.retention_permille) / 1000;
    u64::try_from(part).unwrap_or(u64::MAX)
}
