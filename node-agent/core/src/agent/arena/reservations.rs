//! Regions of the arena that are kept for tenants.
//!
//! A region that has held a tenant's data never goes to another one, so a tenant is sure of memory only while regions
//! that nobody has had yet are kept for it: as many as its reservation needs beyond those it has. Whoever has all that it is
//! sure of gets one only when more are left than are owed to others.

use std::collections::BTreeMap;

use reprise_policy::TenantId;

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Reservations {
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

impl Reservations {
    /// Keeps so many regions for a tenant, those it has included.
    pub(super) fn reserve(&mut self, tenant: TenantId, regions: u64) {
        self.tenants.entry(tenant).or_default().reserved = regions;
    }

    /// A tenant has one region more.
    pub(super) fn own(&mut self, tenant: TenantId) {
        self.tenants.entry(tenant).or_default().owned += 1;
    }

    /// Whether a tenant has a region, or one is kept for it of so many that nobody has had.
    pub(super) fn has_own(&self, tenant: TenantId, fresh: u64) -> bool {
        let can_get = |share: &Share| share.owed() > 0 && fresh > 0;
        self.tenants.get(&tenant).is_some_and(|share| share.owned > 0 || can_get(share))
    }

    /// Of so many regions that nobody has had, how many nobody is sure of once somebody without a claim has taken one.
    /// O(tenants).
    pub(super) fn left_after_one(&self, fresh: u64) -> u64 {
        fresh.saturating_sub(1 + self.owed())
    }

    fn owed(&self) -> u64 {
        self.tenants.values().map(Share::owed).sum()
    }

    /// Whether a tenant may have one of so many regions that nobody has had. O(tenants).
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
    fn what_is_owed_to_others_is_not_given_away() {
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
