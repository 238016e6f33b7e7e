//! Regions of the arena that are reserved for tenants.
//!
//! A region with a tenant's data never passes to another tenant. A reservation is therefore met only by
//! unused regions that are kept back: as many as the tenant still lacks. A tenant whose reservation is met
//! gets a further region only if more unused regions remain than are owed to other tenants.

use std::collections::BTreeMap;

use reprise_policy::TenantId;

use crate::cache::arena::Arena;

/// Reserved and owned regions of all tenants.
#[derive(Debug, Default)]
pub(crate) struct Reservations {
    tenants: BTreeMap<TenantId, Share>,
}

/// Regions of one tenant.
#[derive(Clone, Copy, Debug, Default)]
struct Share {
    reserved: u64,
    owned: u64,
}

impl Share {
    fn owed(&self) -> u64 {
        self.reserved.saturating_sub(self.owned)
    }
}

impl Arena {
    /// Bytes of the regions that a tenant owns, and of those that no tenant has used yet: all regions count as equally
    /// large.
    pub(crate) fn obtainable_bytes(&self, tenant: TenantId) -> u64 {
        let owned = self.reservations.tenants.get(&tenant).map_or(0, |share| share.owned);
        let regions = self.regions.len() as u64;
        (self.bytes() / regions.max(1)).saturating_mul(owned + self.fresh).min(self.bytes())
    }
}

impl Reservations {
    /// Sets the number of regions reserved for a tenant, including those that it owns.
    pub(super) fn reserve(&mut self, tenant: TenantId, regions: u64) {
        self.tenants.entry(tenant).or_default().reserved = regions;
    }

    /// Counts one more region that a tenant owns.
    pub(super) fn own(&mut self, tenant: TenantId) {
        self.tenants.entry(tenant).or_default().owned += 1;
    }

    /// Whether a tenant owns a region, or can get one of the `fresh` unused regions under its reservation.
    pub(super) fn has_own(&self, tenant: TenantId, fresh: u64) -> bool {
        let can_get = |share: &Share| share.owed() > 0 && fresh > 0;
        self.tenants.get(&tenant).is_some_and(|share| share.owned > 0 || can_get(share))
    }

    /// Number of unused, unreserved regions that would remain if a tenant without a reservation took one.
    /// O(tenants).
    pub(super) fn left_after_one(&self, fresh: u64) -> u64 {
        fresh.saturating_sub(1 + self.owed())
    }

    fn owed(&self) -> u64 {
        self.tenants.values().map(Share::owed).sum()
    }

    /// Whether a tenant may take one of the `fresh` unused regions. O(tenants).
    pub(super) fn may_own(&self, tenant: TenantId, fresh: u64) -> bool {
        if self.tenants.get(&tenant).is_some_and(|share| share.owed() > 0) {
            return true;
        }
        fresh > self.owed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_regions_owed_to_other_tenants() {
        let mut reservations = Reservations::default();
        reservations.reserve(TenantId(1), 2);
        assert!(reservations.may_own(TenantId(2), 3));
        assert!(!reservations.may_own(TenantId(2), 2));
        assert!(reservations.may_own(TenantId(1), 2));
        reservations.own(TenantId(1));
        assert!(reservations.may_own(TenantId(2), 2));
        reservations.own(TenantId(1));
        assert!(reservations.may_own(TenantId(2), 1) && reservations.may_own(TenantId(1), 1));
        assert!(!reservations.may_own(TenantId(2), 0));
    }
}
