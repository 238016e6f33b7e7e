//! Quotas: grants of the control plane, and tenants above their limits.
//!
//! The quota of a tenant is the configured one, combined with its last grant, if any. A grant takes effect
//! with its event. Usage above a lowered limit is evicted a few blocks at a time; until then, the tenant gets
//! no new slots. Grants do not expire: a node that is disconnected from the control plane keeps them.
//!
//! The cache charges tenants for their slots, because its evictions depend on the charges.

use std::collections::{BTreeMap, BTreeSet};

use reprise_policy::Tick;

use crate::cache::{Cache, TenantIndex, TenantUsage, Unmet};
use crate::context::Context;
use crate::effect::{Diagnostic, Effect, QuotaResource};
use crate::event::Grant;
use crate::limits::{SHRINK_EVICTIONS_PER_APPLY, SHRINK_INTERVAL};

/// Grants, and tenants whose usage must shrink.
#[derive(Debug, Default)]
pub(crate) struct Quotas {
    grants: BTreeMap<TenantIndex, Grant>,
    /// Tenants that may exceed their limits; every event checks only these.
    shrinking: BTreeSet<TenantIndex>,
    /// Time of the next evictions, if more are possible.
    shrink_at: Option<Tick>,
}

impl Quotas {
    /// Applies the configured quotas to the blocks that recovery found.
    pub(crate) fn start(&mut self, cache: &mut Cache, cx: &mut Context) {
        self.recheck(cache);
        self.update(cache, cx);
        self.shrink(cache, cx);
    }

    /// Makes the next event check the limits of all tenants, after blocks were added from a device.
    pub(crate) fn recheck(&mut self, cache: &Cache) {
        self.shrinking.extend(cache.tenants());
    }

    /// Applies a grant, unless it is older than the last one.
    pub(crate) fn apply(&mut self, cache: &mut Cache, cx: &mut Context, grant: Grant) {
        let Some(index) = cache.register_tenant(grant.tenant) else { return };
        if self.grants.get(&index).is_some_and(|known| grant.version <= known.version) {
            return;
        }
        self.grants.insert(index, grant);
        cache.set_granted(index, grant.dram, grant.nvme);
        self.shrinking.insert(index);
        self.update(cache, cx);
    }

    /// Updates everything derived from quotas and device capacity, and reports reservations that cannot be
    /// met.
    pub(crate) fn update(&mut self, cache: &mut Cache, cx: &mut Context) {
        let Unmet { nvme, dram } = cache.apply_reservations();
        for (resource, error) in [(QuotaResource::Nvme, nvme), (QuotaResource::Dram, dram)] {
            if let Some(error) = error {
                cx.emit(Effect::Diagnostic(Diagnostic::Overcommitted { resource, error }));
            }
        }
    }

    /// Evicts blocks of tenants above their lowered limits, a bounded number per event.
    pub(crate) fn shrink(&mut self, cache: &mut Cache, cx: &mut Context) {
        if self.shrinking.is_empty() {
            return;
        }
        let mut left = SHRINK_EVICTIONS_PER_APPLY;
        for index in self.shrinking.clone() {
            while left > 0 && cache.dram_usage(index).excess() > 0 && cache.evict_dram_of(index) {
                left -= 1;
            }
            while left > 0 && cache.nvme_usage(index).excess() > 0 && cache.evict_nvme_of(index) {
                left -= 1;
            }
            let (dram, nvme) = (cache.dram_usage(index).excess(), cache.nvme_usage(index).excess());
            if dram > 0 {
                cache.report_full();
            }
            if dram + nvme == 0 {
                self.shrinking.remove(&index);
            }
        }
        // Blocks that are in use are evicted after their read or write has ended, which is an event.
        self.shrink_at = (left == 0).then(|| cx.now.after(SHRINK_INTERVAL));
    }

    /// Time of the next evictions if no event arrives before.
    pub(crate) fn next_deadline(&self) -> Option<Tick> {
        self.shrink_at
    }

    /// Usage and quotas of each tenant: configured tenants first, then others in order of appearance.
    pub(crate) fn usage(&self, cache: &Cache) -> impl Iterator<Item = (TenantIndex, TenantUsage)> {
        cache.tenants().map(|index| {
            let grant = self.grants.get(&index).copied();
            (index, TenantUsage { grant, ..cache.tenant_usage(index) })
        })
    }

    /// Checks that every tenant above its limits is known as such.
    pub(crate) fn audit(&self, cache: &Cache) -> Result<(), String> {
        for index in cache.tenants() {
            let usage = cache.tenant_usage(index);
            let excess = usage.dram.excess() + usage.nvme.excess();
            if excess > 0 && !self.shrinking.contains(&index) {
                return Err(format!("a tenant is above its limits and does not shrink: {usage:?}"));
            }
        }
        Ok(())
    }
}
