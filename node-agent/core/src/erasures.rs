//! Erased tenants: their encryption keys are gone, so all copies of their blocks are removed from this node.
//!
//! ```text
//!  (known) ──key gone──▶ walking over the index ──no slot in use──▶ at rest ──key──▶ (known)
//!                          ▲  └──some in use: again later──┘             │
//!                          └────────── a device was attached ────────────┘
//! ```
//!
//! An erased tenant gets no slots and is not written, so copies that are in use now are its last ones, except those of
//! a device that is attached later. A walk visits a bounded number of places of the index at a time.
//!
//! Out of scope: the bytes of freed slots. Those on devices are encrypted; memory is replaced before another tenant
//! gets it.

use std::collections::BTreeMap;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, TenantId, Tick};

use crate::cache::{Cache, SizeClassId, TenantIndex};
use crate::limits::{ERASE_INTERVAL, ERASE_RETRY_INTERVAL, ERASE_STEP_ENTRIES};

/// Erased tenants, and the walk over their blocks.
#[derive(Debug, Default)]
pub(crate) struct Erasures {
    tenants: BTreeMap<TenantIndex, Progress>,
    /// Place of the index at which the walk continues.
    from: usize,
    /// Time of the next step; `None` at rest.
    next_at: Option<Tick>,
}

/// What happened to the blocks of one tenant.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    removed_blocks: u64,
    is_reported: bool,
}

/// A tenant without blocks on this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Erased {
    pub(crate) tenant: TenantId,
    pub(crate) blocks: u64,
}

impl Erasures {
    /// Begins to remove the blocks of a tenant.
    pub(crate) fn begin(&mut self, cache: &mut Cache, now: Tick, tenant: TenantId) {
        let Some(index) = cache.register_tenant(tenant) else { return };
        cache.set_erased(index, true);
        self.tenants.insert(index, Progress::default());
        self.restart(now);
    }

    /// Ends the erasure of a tenant, which has a key again.
    pub(crate) fn end(&mut self, cache: &mut Cache, tenant: TenantId) {
        let Some(index) = cache.register_tenant(tenant) else { return };
        cache.set_erased(index, false);
        self.tenants.remove(&index);
    }

    /// Begins another walk if erased tenants have slots. Without erased tenants, this is one comparison.
    pub(crate) fn watch(&mut self, cache: &Cache, now: Tick) {
        if self.tenants.is_empty() || self.next_at.is_some() {
            return;
        }
        if self.tenants.keys().any(|index| used_bytes(cache, *index) > 0) {
            self.restart(now);
        }
    }

    /// Time of the next step.
    pub(crate) fn first_due(&self) -> Option<Tick> {
        self.next_at
    }

    /// Returns the blocks to remove in this step, which [`Erasures::removed`] follows for each.
    pub(crate) fn step(&mut self, cache: &Cache) -> Vec<(BlockKey, SizeClassId)> {
        let first = EntryIndex(u32::try_from(self.from).unwrap_or(u32::MAX));
        self.from += ERASE_STEP_ENTRIES;
        let mut blocks = Vec::new();
        for (_, entry) in cache.entries_from(first, ERASE_STEP_ENTRIES) {
            if self.tenants.contains_key(&cache.tenant_of(entry.size_class())) {
                blocks.push((entry.key(), entry.size_class()));
            }
        }
        blocks
    }

    /// Counts a block that is no longer on this node.
    pub(crate) fn removed(&mut self, tenant: TenantIndex) {
        if let Some(progress) = self.tenants.get_mut(&tenant) {
            progress.removed_blocks += 1;
        }
    }

    /// Ends a step. Returns the tenants that have no slot for the first time.
    pub(crate) fn end_step(&mut self, cache: &Cache, now: Tick) -> Vec<Erased> {
        if self.from < cache.entry_places() {
            self.next_at = Some(now.after(ERASE_INTERVAL));
            return Vec::new();
        }
        let mut erased = Vec::new();
        let mut is_left = false;
        for (index, progress) in &mut self.tenants {
            let is_erased = used_bytes(cache, *index) == 0;
            is_left |= !is_erased;
            if is_erased && !std::mem::replace(&mut progress.is_reported, true) {
                let tenant = cache.tenant_usage(*index).tenant;
                erased.push(Erased { tenant, blocks: progress.removed_blocks });
            }
        }
        self.from = 0;
        self.next_at = is_left.then(|| now.after(ERASE_RETRY_INTERVAL));
        erased
    }

    /// Checks that the cache knows the erased tenants, and that each of their blocks will be found.
    pub(crate) fn audit(&self, cache: &Cache) -> Result<(), String> {
        for index in cache.tenants() {
            let is_known = self.tenants.contains_key(&index);
            ensure!(is_known == cache.is_erased(index), "{index:?} is erased for one owner only");
        }
        for index in self.tenants.keys().filter(|index| used_bytes(cache, **index) > 0) {
            ensure!(self.next_at.is_some(), "{index:?} is erased and has slots, and no walk is due");
        }
        Ok(())
    }

    fn restart(&mut self, now: Tick) {
        (self.from, self.next_at) = (0, Some(now));
    }
}

/// Bytes of slots that a tenant uses on this node.
fn used_bytes(cache: &Cache, index: TenantIndex) -> u64 {
    cache.dram_usage(index).used + cache.nvme_usage(index).used
}
