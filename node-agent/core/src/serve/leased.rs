//! Arena space that is leased to serves, of each tenant.
//!
//! A tenant may use the whole share of the serves while the others leave it. A tenant that uses less than its part, by
//! weight, may start blocks also when the share is used up: else, requests of slow peers for one tenant would hold it.
//! All tenants together lease at most twice the share.

use std::collections::BTreeMap;

use reprise_policy::TenantId;
use reprise_policy::fair_order::Weights;

/// Slot bytes of blocks; a slot counts once for each lease.
#[derive(Debug)]
pub(super) struct Leased {
    weights: Weights<TenantId>,
    total: u64,
    /// Bytes of each tenant with leases.
    by_tenant: BTreeMap<TenantId, u64>,
    /// Sum of the weights of these tenants.
    weight: u64,
}

impl Leased {
    pub(super) fn new(weights: Weights<TenantId>) -> Leased {
        Leased { weights, total: 0, by_tenant: BTreeMap::new(), weight: 0 }
    }

    /// Bytes of all tenants.
    pub(super) fn total(&self) -> u64 {
        self.total
    }

    /// Counts a new lease of a slot.
    pub(super) fn begin(&mut self, tenant: TenantId, bytes: u64) {
        self.total += bytes;
        let leased = self.by_tenant.entry(tenant).or_insert_with(|| {
            self.weight += u64::from(self.weights.of(&tenant));
            0
        });
        *leased += bytes;
    }

    /// Counts the end of a lease.
    pub(super) fn end(&mut self, tenant: TenantId, bytes: u64) {
        self.total -= bytes;
        let leased = self.by_tenant.get_mut(&tenant).expect("a lease was counted");
        *leased -= bytes;
        if *leased == 0 {
            self.by_tenant.remove(&tenant);
            self.weight -= u64::from(self.weights.of(&tenant));
        }
    }

    /// Returns the bytes that a tenant may lease in addition; `share` is the space of all serves.
    pub(super) fn room(&self, tenant: TenantId, share: u64) -> u64 {
        let own_weight = u64::from(self.weights.of(&tenant));
        let leased = self.by_tenant.get(&tenant).copied();
        let weight = if leased.is_some() { self.weight } else { self.weight + own_weight };
        let part = u128::from(share) * u128::from(own_weight) / u128::from(weight);
        let part = u64::try_from(part).expect("a part of the share");
        let own = part.saturating_sub(leased.unwrap_or(0));
        let free = share.saturating_sub(self.total);
        free.max(own.min((2 * share).saturating_sub(self.total)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARE: u64 = 800;
    const A: TenantId = TenantId(1);
    const B: TenantId = TenantId(2);

    fn leased() -> Leased {
        Leased::new([(B, 3)].into_iter().collect())
    }

    #[test]
    fn tenant_alone_gets_the_whole_share() {
        let mut leased = leased();
        assert_eq!(leased.room(A, SHARE), SHARE);
        leased.begin(A, 500);
        assert_eq!(leased.room(A, SHARE), 300);
        leased.begin(A, 300);
        assert_eq!(leased.room(A, SHARE), 0);
    }

    #[test]
    fn tenant_gets_its_part_although_another_one_has_the_share() {
        let mut leased = leased();
        leased.begin(A, SHARE);
        assert_eq!(leased.room(B, SHARE), 600, "three quarters");
        leased.begin(B, 600);
        assert_eq!([A, B].map(|tenant| leased.room(tenant, SHARE)), [0, 0]);
        leased.end(A, 700);
        assert_eq!(
            [A, B].map(|tenant| leased.room(tenant, SHARE)),
            [100, 100],
            "the free space, or its own part"
        );
        leased.end(A, 100);
        leased.end(B, 600);
        assert_eq!((leased.total(), leased.weight, leased.by_tenant.len()), (0, 0, 0));
    }

    #[test]
    fn all_tenants_together_lease_at_most_twice_the_share() {
        let mut leased = Leased::new(Weights::default());
        for tenant in 0..1000 {
            let tenant = TenantId(tenant);
            let room = leased.room(tenant, SHARE);
            if room > 0 {
                leased.begin(tenant, room);
            }
            assert!(leased.total() <= 2 * SHARE, "{} bytes", leased.total());
        }
        assert!(leased.total() > SHARE);
    }
}
