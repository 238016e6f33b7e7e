//! Quotas of tenants: reservations, limits, and the selection of the tenant to evict from.
//!
//! ```text
//!          reserved            shared on demand                    limit
//! 0 ──────────┤─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┤
//!  never evicted for others      evicted from the tenant          the tenant evicts only
//!                                furthest over its reservation    its own blocks
//! ```
//!
//! All functions concern one resource (the DRAM or the NVMe of one node), in bytes. Decisions are functions
//! of each tenant's usage; the caller evicts, in the order of its policy, and counts.
//!
//! Properties, each with a property test:
//!
//! * No tenant exceeds its limit.
//! * Reserved bytes are never evicted for another tenant.
//! * A tenant below its limit gets space as long as any tenant, including itself, holds unreserved bytes.
//! * Reservations that were checked ([`check_reservations`]) are met in full.
//!
//! A block is evicted as a whole. A tenant that exceeds its reservation by less than one of its blocks is
//! therefore not evicted from, so a reservation is met to within one block of each other tenant.
//!
//! Shared space is distributed by bytes over the reservation: the tenant with most of them is evicted from
//! first, and a request counts as usage of the requesting tenant. Tenants that all request more therefore end
//! with equal shares of the unreserved space.
//!
//! Out of scope: weights, time (an idle tenant has no claim on space that it did not use), and clusters
//! (`controlplane` divides a tenant's budget among nodes).

use std::cmp::Reverse;

use crate::units::ByteSize;

/// Reservation and limit of a tenant, in bytes of one resource.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    reserved: u64,
    limit: u64,
}

/// Usage and quota of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuotaUsage {
    /// Quota of the tenant.
    pub quota: Quota,
    /// Bytes that the tenant uses.
    pub used: u64,
}

/// Reason why quotas are rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    /// A tenant's reservation exceeds its limit.
    #[error(
        "{} are reserved, which is more than the limit of {}: raise the limit or lower the reservation",
        ByteSize(*.reserved), ByteSize(*.limit)
    )]
    AboveLimit {
        /// Reserved bytes of the tenant.
        reserved: u64,
        /// Limit of the tenant in bytes.
        limit: u64,
    },
    /// The reservations of all tenants exceed the capacity.
    #[error(
        "{} are reserved by all tenants together, {} more than the capacity of {}: lower reservations by that amount, or \
        add capacity",
        ByteSize(*.reserved), ByteSize(.reserved - .capacity), ByteSize(*.capacity)
    )]
    AboveCapacity {
        /// Reserved bytes of all tenants.
        reserved: u64,
        /// Capacity in bytes.
        capacity: u64,
    },
}

/// Tenant to evict from when a tenant requests space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EvictFrom {
    /// No eviction is needed: enough space is free.
    Free,
    /// The requesting tenant, if it holds blocks: its limit is reached, or it is furthest over its
    /// reservation.
    Requester,
    /// Another tenant, which is over its reservation.
    Other {
        /// Index of the tenant in the list of usages.
        tenant: usize,
        /// Maximum bytes to evict from it; the rest is reserved.
        bytes_max: u64,
    },
    /// The request exceeds the tenant's limit and can never be met.
    Impossible,
}

/// Request of a tenant for more space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceRequest {
    /// Index of the tenant in the list of usages.
    pub tenant: usize,
    /// Requested bytes.
    pub bytes: u64,
}

/// Tenant to evict from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Victim {
    /// Index of the tenant in the list of usages.
    pub tenant: usize,
    /// Maximum bytes to evict from it.
    pub bytes_max: u64,
}

impl Quota {
    /// No reservation and no limit.
    pub const UNLIMITED: Quota = Quota { reserved: 0, limit: u64::MAX };

    /// Creates a quota in bytes.
    ///
    /// # Errors
    /// [`QuotaError::AboveLimit`] if the reservation exceeds the limit.
    pub fn new(reserved: u64, limit: u64) -> Result<Quota, QuotaError> {
        if reserved > limit {
            return Err(QuotaError::AboveLimit { reserved, limit });
        }
        Ok(Quota { reserved, limit })
    }

    /// Bytes that other tenants never get.
    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Maximum number of bytes allowed.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Combines two quotas: the lower limit and, within that limit, the higher reservation.
    pub fn with(self, other: Quota) -> Quota {
        let limit = self.limit.min(other.limit);
        Quota { reserved: self.reserved.max(other.reserved).min(limit), limit }
    }

    /// Scales the reservation down in proportion if the capacity no longer holds all reservations.
    /// `reserved_by_all` is the sum of all reservations.
    pub fn scaled(self, capacity: u64, reserved_by_all: u64) -> Quota {
        if reserved_by_all <= capacity {
            return self;
        }
        let share = u128::from(self.reserved) * u128::from(capacity) / u128::from(reserved_by_all);
        Quota { reserved: u64::try_from(share).expect("at most the reservation"), ..self }
    }
}

impl QuotaUsage {
    /// Bytes above the reservation, which may be evicted for other tenants.
    pub fn over(&self) -> u64 {
        self.used.saturating_sub(self.quota.reserved)
    }

    /// Bytes below the limit, which the tenant may still get.
    pub fn room(&self) -> u64 {
        self.quota.limit.saturating_sub(self.used)
    }

    /// Bytes above the limit, after it was lowered.
    pub fn excess(&self) -> u64 {
        self.used.saturating_sub(self.quota.limit)
    }
}

/// Checks that reservations can be met: each is rounded up to whole units (regions of memory), and their sum
/// must not exceed the capacity. Returns the remaining capacity.
///
/// # Errors
/// [`QuotaError::AboveCapacity`] with the sum of the reservations.
pub fn check_reservations(
    capacity: u64,
    unit: u64,
    quotas: impl IntoIterator<Item = Quota>,
) -> Result<u64, QuotaError> {
    let whole = |quota: Quota| quota.reserved.div_ceil(unit).saturating_mul(unit);
    let reserved = quotas.into_iter().map(whole).fold(0, u64::saturating_add);
    capacity.checked_sub(reserved).ok_or(QuotaError::AboveCapacity { reserved, capacity })
}

/// Selects the tenant to evict from when the tenant at `requester` requests `bytes` more and `free` bytes are
/// free. O(tenants).
pub fn evict_from(usages: &[QuotaUsage], requester: usize, bytes: u64, free: u64) -> EvictFrom {
    let own = &usages[requester];
    if own.quota.limit < bytes {
        return EvictFrom::Impossible;
    }
    if own.room() < bytes {
        return EvictFrom::Requester;
    }
    if free >= bytes {
        return EvictFrom::Free;
    }
    match victims(usages, Some(SpaceRequest { tenant: requester, bytes })).first() {
        Some(Victim { tenant, bytes_max }) if *tenant != requester => {
            EvictFrom::Other { tenant: *tenant, bytes_max: *bytes_max }
        }
        _ => EvictFrom::Requester,
    }
}

/// Returns the tenants to evict from for a request, or ahead of requests, in order: first the one furthest
/// over its reservation. The next one is used if the previous ones have no evictable block. O(tenants).
pub fn victims(usages: &[QuotaUsage], request: Option<SpaceRequest>) -> Vec<Victim> {
    let mut victims: Vec<(u64, bool, Victim)> = Vec::new();
    for (tenant, usage) in usages.iter().enumerate() {
        let own = request.filter(|request| request.tenant == tenant);
        let over = match own {
            Some(request) => (usage.used + request.bytes).saturating_sub(usage.quota.reserved),
            None => usage.over(),
        };
        // Reserved bytes are evicted for their own tenant only.
        let bytes_max = if own.is_some() { usage.used } else { over };
        if bytes_max > 0 {
            victims.push((over, own.is_some(), Victim { tenant, bytes_max }));
        }
    }
    victims.sort_by_key(|(over, own, victim)| (Reverse(*over), *own, victim.tenant));
    victims.into_iter().map(|(_, _, victim)| victim).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn quota(reserved: u64, limit: u64) -> Quota {
        Quota::new(reserved, limit).expect("reserved within the limit")
    }

    fn usage(reserved: u64, limit: u64, used: u64) -> QuotaUsage {
        QuotaUsage { quota: quota(reserved, limit), used }
    }

    #[test]
    fn rejects_reservation_above_limit_or_capacity_with_a_remedy() {
        let error = Quota::new(3 << 20, 2 << 20).expect_err("above").to_string();
        assert!(
            error.contains("3MiB") && error.contains("2MiB") && error.contains("raise the limit"),
            "{error}"
        );
        let both = [quota(3 << 20, 9 << 20), quota(2 << 20, 9 << 20)];
        assert_eq!(check_reservations(6 << 20, 1, both), Ok(1 << 20));
        let error = check_reservations(4 << 20, 1, both).expect_err("too much").to_string();
        assert!(
            error.contains("1MiB more than the capacity of 4MiB") && error.contains("lower reservations"),
            "{error}"
        );
        assert!(check_reservations(6 << 20, 2 << 20, both).is_ok(), "4 MiB and 2 MiB in whole units");
        assert!(check_reservations(6 << 20, 4 << 20, both).is_err(), "two units of 4 MiB");
    }

    #[test]
    fn tenant_at_its_limit_evicts_its_own_blocks_even_if_space_is_free() {
        let usages = [usage(0, 10, 10), usage(0, 99, 50)];
        assert_eq!(evict_from(&usages, 0, 1, 100), EvictFrom::Requester);
        assert_eq!(evict_from(&usages, 0, 11, 100), EvictFrom::Impossible);
        assert_eq!(evict_from(&usages, 1, 1, 100), EvictFrom::Free);
    }

    #[test]
    fn evicts_first_from_tenant_furthest_over_its_reservation() {
        let usages = [usage(10, 99, 30), usage(40, 99, 50), usage(50, 99, 20)];
        let other = |tenant, bytes_max| EvictFrom::Other { tenant, bytes_max };
        assert_eq!(evict_from(&usages, 2, 1, 0), other(0, 20));
        assert_eq!(evict_from(&usages, 1, 1, 0), other(0, 20));
        assert_eq!(evict_from(&usages, 0, 1, 0), EvictFrom::Requester);
        let order =
            |request| victims(&usages, request).iter().map(|victim| victim.tenant).collect::<Vec<_>>();
        assert_eq!(order(None), [0, 1], "reserved bytes are not evicted ahead of requests");
        assert_eq!(
            order(Some(SpaceRequest { tenant: 2, bytes: 1 })),
            [0, 1, 2],
            "the requester's own blocks are last"
        );
        assert_eq!(order(Some(SpaceRequest { tenant: 1, bytes: 11 })), [1, 0], "the request counts as usage");
    }

    #[test]
    fn shrunk_capacity_scales_all_reservations_in_proportion() {
        assert_eq!(quota(30, 99).scaled(50, 100), quota(15, 99));
        assert_eq!(quota(30, 99).scaled(100, 100), quota(30, 99));
    }

    #[test]
    fn combines_quotas_to_lower_limit_and_higher_reservation_within_it() {
        assert_eq!(quota(30, 99).with(quota(0, 20)), quota(20, 20));
        assert_eq!(quota(0, 50).with(quota(10, u64::MAX)), quota(10, 50));
        assert_eq!(quota(5, 50).with(quota(60, 70)), quota(50, 50));
    }

    /// A store of evictable blocks of one byte.
    #[derive(Debug)]
    struct Store {
        capacity: u64,
        usages: Vec<QuotaUsage>,
    }

    impl Store {
        fn free(&self) -> u64 {
            self.capacity - self.usages.iter().map(|usage| usage.used).sum::<u64>()
        }

        /// Handles a request of one tenant for one byte; returns whether it gets it.
        fn request(&mut self, requester: usize) -> bool {
            let before = self.usages.clone();
            match evict_from(&self.usages, requester, 1, self.free()) {
                EvictFrom::Impossible => return false,
                EvictFrom::Free => {}
                EvictFrom::Requester if self.usages[requester].used == 0 => return false,
                EvictFrom::Requester => self.usages[requester].used -= 1,
                EvictFrom::Other { tenant, bytes_max } => {
                    assert!(tenant != requester && bytes_max >= 1);
                    self.usages[tenant].used -= 1;
                    assert!(
                        self.usages[tenant].used >= before[tenant].quota.reserved,
                        "reserved bytes are not evicted for another"
                    );
                }
            }
            self.usages[requester].used += 1;
            true
        }
    }

    fn stores() -> impl Strategy<Value = Store> {
        (10u64..200, prop::collection::vec((0u64..60, 0u64..120), 1..5)).prop_map(|(capacity, tenants)| {
            let mut left = capacity;
            let usage = |(reserved, more): (u64, u64)| {
                let reserved = reserved.min(left);
                left -= reserved;
                usage(reserved, reserved + more, 0)
            };
            Store { capacity, usages: tenants.into_iter().map(usage).collect() }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn limits_and_reservations_hold_and_no_usable_space_remains(
            mut store in stores(), wants in prop::collection::vec(0usize..5, 0..600)
        ) {
            for request in wants {
                let requester = request % store.usages.len();
                let before = store.usages[requester];
                let unreserved = store.usages.iter().any(|usage| usage.over() > 0);
                let possible = before.used < before.quota.reserved() || before.used > 0 || store.free() > 0 || unreserved;
                let got = store.request(requester);
                prop_assert_eq!(got, before.quota.limit() > 0 && possible, "no space remains unused");
                for usage in &store.usages {
                    prop_assert!(usage.used <= usage.quota.limit());
                }
                // Within the reservation, and below the limit while space is free, a request is growth.
                if before.used < before.quota.reserved() {
                    prop_assert_eq!(store.usages[requester].used, before.used + 1);
                }
                prop_assert!(store.usages.iter().map(|usage| usage.used).sum::<u64>() <= store.capacity);
            }
        }

        #[test]
        fn tenants_that_all_want_more_get_their_reservations_and_equal_shares_of_the_rest(
            mut store in stores()
        ) {
            for round in 0..2 * store.capacity {
                for requester in 0..store.usages.len() {
                    store.request((requester + round as usize) % store.usages.len());
                }
            }
            let limits: u64 = store.usages.iter().map(|usage| usage.quota.limit()).sum();
            let used: u64 = store.usages.iter().map(|usage| usage.used).sum();
            prop_assert_eq!(used, limits.min(store.capacity), "no space is left");
            let below: Vec<&QuotaUsage> = store.usages.iter().filter(|usage| usage.room() > 0).collect();
            for one in &below {
                prop_assert!(one.used >= one.quota.reserved());
                for other in &below {
                    prop_assert!(one.over().abs_diff(other.over()) <= 1, "{:?} {:?}", one, other);
                }
            }
        }
    }
}
