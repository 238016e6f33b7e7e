//! Arena space that is leased to serves, of each tenant.
//!
//! A tenant may use the whole share of the serves while the others leave it. A tenant that uses less than its part, by
//! weight, may start blocks also when the share is used up: else, requests of slow peers for one tenant would hold it.
//! All tenants together lease at most twice the share, and beyond the share at most half of the arena ([`Space`]).

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

/// Arena space of serves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Space {
    /// Bytes that one tenant may lease while the others leave them.
    share: u64,
    /// Bytes that all tenants may lease together.
    most: u64,
}

impl Space {
    /// Space with this share of an arena.
    pub(super) const fn new(share: u64, arena: u64) -> Space {
        let beyond = if share > arena / 2 { share } else { arena / 2 };
        let most = if 2 * share < beyond { 2 * share } else { beyond };
        Space { share, most }
    }
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

    /// Returns the number of blocks with slots of this size that a tenant may lease in addition. A tenant without a lease
    /// may start one, also if its part is smaller: else, other tenants would pass it until its deadline.
    pub(super) fn blocks(&self, tenant: TenantId, slot_bytes: u64, space: Space) -> u64 {
        let blocks = self.room(tenant, space) / slot_bytes;
        let fits = self.total + slot_bytes <= space.most;
        let may_start_one = self.total == 0 || (fits && !self.by_tenant.contains_key(&tenant));
        blocks.max(u64::from(may_start_one))
    }

    /// Returns the bytes that a tenant may lease in addition.
    fn room(&self, tenant: TenantId, Space { share, most }: Space) -> u64 {
        let own_weight = u64::from(self.weights.of(&tenant));
        let leased = self.by_tenant.get(&tenant).copied();
        let weight = if leased.is_some() { self.weight } else { self.weight + own_weight };
        let part = u128::from(share) * u128::from(own_weight) / u128::from(weight);
        let part = u64::try_from(part).expect("a part of the share");
        let own = part.saturating_sub(leased.unwrap_or(0));
        let free = share.saturating_sub(self.total);
        free.max(own.min(most.saturating_sub(self.total)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: Space = Space::new(800, 3200);
    const SHARE: u64 = 800;
    const A: TenantId = TenantId(1);
    const B: TenantId = TenantId(2);

    fn leased() -> Leased {
        Leased::new([(B, 3)].into_iter().collect())
    }

    #[test]
    fn tenant_alone_gets_the_whole_share() {
        let mut leased = leased();
        assert_eq!(leased.room(A, SPACE), SHARE);
        leased.begin(A, 500);
        assert_eq!(leased.room(A, SPACE), 300);
        leased.begin(A, 300);
        assert_eq!(leased.room(A, SPACE), 0);
    }

    #[test]
    fn tenant_gets_its_part_although_another_one_has_the_share() {
        let mut leased = leased();
        leased.begin(A, SHARE);
        assert_eq!(leased.room(B, SPACE), 600, "three quarters");
        leased.begin(B, 600);
        assert_eq!([A, B].map(|tenant| leased.room(tenant, SPACE)), [0, 0]);
        leased.end(A, 700);
        assert_eq!(
            [A, B].map(|tenant| leased.room(tenant, SPACE)),
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
            let room = leased.room(tenant, SPACE);
            if room > 0 {
                leased.begin(tenant, room);
            }
            assert!(leased.total() <= 2 * SHARE, "{} bytes", leased.total());
        }
        assert!(leased.total() > SHARE);
    }

    #[test]
    fn tenant_whose_part_is_smaller_than_a_block_starts_one_block() {
        let (a, b, slot) = (TenantId(1), TenantId(2), 100);
        let mut leased = Leased::new([(b, 1000)].into_iter().collect());
        leased.begin(b, SHARE);
        assert!(leased.room(a, SPACE) < slot, "a thousandth of the space");
        assert_eq!(leased.blocks(a, slot, SPACE), 1);
        leased.begin(a, slot);
        assert_eq!(leased.blocks(a, slot, SPACE), 0, "it has one");
        leased.end(a, slot);
        assert_eq!(leased.blocks(a, SHARE + slot, SPACE), 0, "beyond twice the share");
        leased.end(b, SHARE);
        assert_eq!(leased.blocks(a, 2 * SHARE + slot, SPACE), 1, "nothing else is leased");
    }

    #[test]
    fn tenants_together_lease_at_most_half_of_the_arena_or_the_share() {
        let most = |share| Space::new(share, 1000).most;
        assert_eq!([100, 250, 400, 500, 800, 1000].map(most), [200, 500, 500, 500, 800, 1000]);
    }
}
