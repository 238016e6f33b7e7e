//! Regions of the arena that are kept for tenants.
//!
//! A tenant is owed the regions of its reservation, one region while it has a session, and a region that another
//! tenant has given up for it. Unused regions are kept back: as many as tenants are owed. A tenant gets a further region
//! only if more unused regions remain than the others are owed. A tenant without its guaranteed regions need only leave
//! those that were given up for another one in the same situation.

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
pub(super) struct Share {
    reserved: u64,
    pub(super) owned: u64,
    pub(super) sessions: u32,
    /// Regions that other tenants give up for this one, until they have new memory.
    pub(super) incoming: u64,
    /// Whether an unused region was given up for this tenant.
    pub(super) has_arrival: bool,
}

impl Share {
    /// Regions that no other tenant may take.
    pub(super) fn guaranteed(&self) -> u64 {
        self.reserved.max(u64::from(self.sessions > 0))
    }

    fn missing(&self) -> u64 {
        self.guaranteed().saturating_sub(self.owned)
    }

    fn owed(&self) -> u64 {
        self.missing().max(u64::from(self.has_arrival))
    }

    /// Regions that a tenant without any cannot get: reserved ones, and the guaranteed ones that exist.
    pub(super) fn unobtainable(&self) -> u64 {
        self.guaranteed().min(self.owned + self.incoming).max(self.reserved)
    }
}

impl Arena {
    /// Bytes of the regions that a tenant owns, and of those that no tenant has used yet: all regions count as equally
    /// large.
    pub(crate) fn obtainable_bytes(&self, tenant: TenantId) -> u64 {
        let owned = self.reservations.of(tenant).owned;
        let regions = self.regions.len() as u64;
        (self.bytes() / regions.max(1)).saturating_mul(owned + self.fresh).min(self.bytes())
    }
}

impl Reservations {
    /// Sets the number of regions reserved for a tenant, including those that it owns.
    pub(super) fn reserve(&mut self, tenant: TenantId, regions: u64) {
        self.share(tenant).reserved = regions;
    }

    /// Counts one more region that a tenant owns.
    pub(super) fn own(&mut self, tenant: TenantId) {
        let share = self.share(tenant);
        share.owned += 1;
        share.has_arrival = false;
    }

    /// Returns the regions of a tenant.
    pub(super) fn of(&self, tenant: TenantId) -> Share {
        self.tenants.get(&tenant).copied().unwrap_or_default()
    }

    pub(super) fn share(&mut self, tenant: TenantId) -> &mut Share {
        self.tenants.entry(tenant).or_default()
    }

    /// Iterates the regions of all tenants.
    pub(super) fn iter(&self) -> impl Iterator<Item = (TenantId, Share)> {
        self.tenants.iter().map(|(tenant, share)| (*tenant, *share))
    }

    /// Whether a tenant owns a region, or can get one of the `fresh` unused regions under its reservation.
    pub(super) fn has_own(&self, tenant: TenantId, fresh: u64) -> bool {
        let share = self.of(tenant);
        share.owned > 0 || (share.owed() > 0 && fresh > 0)
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
        let lacks_guaranteed = self.of(tenant).missing() > 0;
        let kept = |share: &Share| match lacks_guaranteed {
            true => share.missing().min(u64::from(share.has_arrival)),
            false => share.owed(),
        };
        let others = self.tenants.iter().filter(|(other, _)| **other != tenant);
        fresh > others.map(|(_, share)| kept(share)).sum()
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

    #[test]
    fn keeps_a_region_for_each_tenant_with_a_session_and_for_the_successor() {
        let mut reservations = Reservations::default();
        reservations.share(TenantId(1)).sessions = 1;
        assert!(!reservations.may_own(TenantId(2), 1) && reservations.may_own(TenantId(1), 1));
        reservations.own(TenantId(1));
        assert!(reservations.may_own(TenantId(2), 1));
        *reservations.share(TenantId(3)) = Share { sessions: 1, has_arrival: true, ..Share::default() };
        reservations.share(TenantId(2)).sessions = 1;
        assert!(!reservations.may_own(TenantId(2), 1), "the region was given up for another tenant");
        assert!(reservations.may_own(TenantId(3), 1) && reservations.may_own(TenantId(2), 2));
        assert!(!reservations.may_own(TenantId(1), 2), "both other tenants have none");
        reservations.own(TenantId(3));
        assert!(reservations.may_own(TenantId(2), 1) && !reservations.may_own(TenantId(1), 1));
        reservations.share(TenantId(3)).has_arrival = true;
        assert!(reservations.may_own(TenantId(2), 1), "a first region precedes a further one");
        assert!(!reservations.may_own(TenantId(3), 1) && reservations.may_own(TenantId(3), 2));
    }
}
