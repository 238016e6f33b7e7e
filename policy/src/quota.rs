//! Quotas of tenants: what each is sure of, what each may have at the most, and who gives way when room is wanted.
//!
//! ```text
//!          reserved            shared by who needs it              limit
//! 0 ──────────┤─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ─ ┤
//!  nobody else's room, ever      the tenant furthest over gives way    the tenant gives way to itself
//! ```
//!
//! Everything here is about one kind of room (the DRAM or the NVMe of one node), in bytes. The decisions are functions of
//! what each tenant holds; the caller evicts, in the order of its policy, and counts.
//!
//! Laws, each with a property test: nobody holds more than its limit; nobody's reserved bytes are evicted for somebody else;
//! who is below its limit gets room as long as anybody, itself included, holds any that is not reserved; reservations that
//! were checked ([`check_reservations`]) are met in full. A block is evicted whole, so a tenant that is over its reservation
//! by less than one of its blocks does not give way: a reservation is good to within one block of each other tenant.
//!
//! Shared room goes by bytes over the reservation: the tenant with most of it gives way first, and the one that wants counts
//! with what it wants. So tenants that all want more end with equal shares of what is not reserved.
//!
//! Deliberately absent: weights, time (a tenant that was idle has no claim on what it did not use), and clusters
//! (`controlplane` splits a tenant's budget among nodes).

use std::cmp::Reverse;

use crate::units::ByteSize;

/// What a tenant is sure of and may have at the most, in bytes of one kind of room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    reserved: u64,
    limit: u64,
}

/// What a tenant holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// What it may hold.
    pub quota: Quota,
    /// Bytes that it holds.
    pub used: u64,
}

/// Why quotas are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    /// A tenant is sure of more than it may have.
    #[error(
        "{} are reserved, which is more than the limit of {}: raise the limit or lower the reservation",
        ByteSize(*.reserved), ByteSize(*.limit)
    )]
    AboveLimit {
        /// Bytes.
        reserved: u64,
        /// Bytes.
        limit: u64,
    },
    /// More is promised than there is.
    #[error(
        "{} are reserved by all tenants together, {} more than the {} that there are: lower reservations by so much, or \
         add capacity",
        ByteSize(*.reserved), ByteSize(.reserved - .capacity), ByteSize(*.capacity)
    )]
    AboveCapacity {
        /// Bytes, of all tenants.
        reserved: u64,
        /// Bytes.
        capacity: u64,
    },
}

/// Who gives way when a tenant wants room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GiveWay {
    /// Nobody: take it.
    Nobody,
    /// The tenant itself, if it can: its limit is reached, or it is the one furthest over its reservation.
    Itself,
    /// Another one, which is over its reservation.
    Other {
        /// Its place among the holdings.
        tenant: usize,
        /// So many bytes of it at the most: the rest is reserved.
        bytes_max: u64,
    },
    /// Its limit is below what it wants: never.
    Never,
}

/// A tenant wants more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Want {
    /// Its place among the holdings.
    pub tenant: usize,
    /// How much more.
    pub bytes: u64,
}

/// A tenant that gives way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Giver {
    /// Its place among the holdings.
    pub tenant: usize,
    /// So many bytes of it at the most.
    pub bytes_max: u64,
}

impl Quota {
    /// Nothing reserved, no limit.
    pub const UNLIMITED: Quota = Quota { reserved: 0, limit: u64::MAX };

    /// A quota of so many bytes.
    ///
    /// # Errors
    /// [`QuotaError::AboveLimit`].
    pub fn new(reserved: u64, limit: u64) -> Result<Quota, QuotaError> {
        if reserved > limit {
            return Err(QuotaError::AboveLimit { reserved, limit });
        }
        Ok(Quota { reserved, limit })
    }

    /// Bytes that nobody else gets.
    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Bytes at the most.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// What holds under both: the lower limit, and the higher reservation as far as that limit allows.
    pub fn with(self, other: Quota) -> Quota {
        let limit = self.limit.min(other.limit);
        Quota { reserved: self.reserved.max(other.reserved).min(limit), limit }
    }

    /// The same with its share of a capacity that does not hold all reservations any more: every tenant loses in
    /// proportion. `reserved_by_all` is the sum of the reservations.
    pub fn scaled(self, capacity: u64, reserved_by_all: u64) -> Quota {
        if reserved_by_all <= capacity {
            return self;
        }
        let share = u128::from(self.reserved) * u128::from(capacity) / u128::from(reserved_by_all);
        Quota { reserved: u64::try_from(share).expect("at most the reservation"), ..self }
    }
}

impl Holding {
    /// Bytes that others may take from it.
    pub fn over(&self) -> u64 {
        self.used.saturating_sub(self.quota.reserved)
    }

    /// Bytes that it may still get.
    pub fn room(&self) -> u64 {
        self.quota.limit.saturating_sub(self.used)
    }

    /// Bytes that it has beyond its limit, since that was lowered.
    pub fn excess(&self) -> u64 {
        self.used.saturating_sub(self.quota.limit)
    }
}

/// Whether reservations can be kept: each is rounded up to whole units (regions of memory), and the sum must not exceed
/// the capacity. Returns what is left.
///
/// # Errors
/// [`QuotaError::AboveCapacity`] says by how much.
pub fn check_reservations(
    capacity: u64,
    unit: u64,
    quotas: impl IntoIterator<Item = Quota>,
) -> Result<u64, QuotaError> {
    let whole = |quota: Quota| quota.reserved.div_ceil(unit).saturating_mul(unit);
    let reserved = quotas.into_iter().map(whole).fold(0, u64::saturating_add);
    capacity.checked_sub(reserved).ok_or(QuotaError::AboveCapacity { reserved, capacity })
}

/// Who gives way when the tenant at `wanting` wants `bytes` more and `free` bytes are nobody's. O(tenants).
pub fn who_gives_way(holdings: &[Holding], wanting: usize, bytes: u64, free: u64) -> GiveWay {
    let own = &holdings[wanting];
    if own.quota.limit < bytes {
        return GiveWay::Never;
    }
    if own.room() < bytes {
        return GiveWay::Itself;
    }
    if free >= bytes {
        return GiveWay::Nobody;
    }
    match givers(holdings, Some(Want { tenant: wanting, bytes })).first() {
        Some(Giver { tenant, bytes_max }) if *tenant != wanting => {
            GiveWay::Other { tenant: *tenant, bytes_max: *bytes_max }
        }
        _ => GiveWay::Itself,
    }
}

/// Who gives way to a want, or to room that is made ahead of need, first the one furthest over its reservation: whoever comes
/// next does when nothing of those before can go. O(tenants).
pub fn givers(holdings: &[Holding], want: Option<Want>) -> Vec<Giver> {
    let mut givers: Vec<(u64, bool, Giver)> = Vec::new();
    for (tenant, holding) in holdings.iter().enumerate() {
        let own = want.filter(|want| want.tenant == tenant);
        let over = match own {
            Some(want) => (holding.used + want.bytes).saturating_sub(holding.quota.reserved),
            None => holding.over(),
        };
        // What is reserved goes for its own tenant only.
        let bytes_max = if own.is_some() { holding.used } else { over };
        if bytes_max > 0 {
            givers.push((over, own.is_some(), Giver { tenant, bytes_max }));
        }
    }
    givers.sort_by_key(|(over, own, giver)| (Reverse(*over), *own, giver.tenant));
    givers.into_iter().map(|(_, _, giver)| giver).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn quota(reserved: u64, limit: u64) -> Quota {
        Quota::new(reserved, limit).expect("reserved within the limit")
    }

    fn holding(reserved: u64, limit: u64, used: u64) -> Holding {
        Holding { quota: quota(reserved, limit), used }
    }

    #[test]
    fn a_reservation_above_its_limit_or_above_the_capacity_is_refused_with_what_to_do() {
        let error = Quota::new(3 << 20, 2 << 20).expect_err("above").to_string();
        assert!(
            error.contains("3MiB") && error.contains("2MiB") && error.contains("raise the limit"),
            "{error}"
        );
        let both = [quota(3 << 20, 9 << 20), quota(2 << 20, 9 << 20)];
        assert_eq!(check_reservations(6 << 20, 1, both), Ok(1 << 20));
        let error = check_reservations(4 << 20, 1, both).expect_err("too much").to_string();
        assert!(error.contains("1MiB more than the 4MiB") && error.contains("lower reservations"), "{error}");
        assert!(check_reservations(6 << 20, 2 << 20, both).is_ok(), "4 MiB and 2 MiB in whole units");
        assert!(check_reservations(6 << 20, 4 << 20, both).is_err(), "two units of 4 MiB");
    }

    #[test]
    fn who_is_at_its_limit_gives_way_to_itself_even_when_there_is_room() {
        let holdings = [holding(0, 10, 10), holding(0, 99, 50)];
        assert_eq!(who_gives_way(&holdings, 0, 1, 100), GiveWay::Itself);
        assert_eq!(who_gives_way(&holdings, 0, 11, 100), GiveWay::Never);
        assert_eq!(who_gives_way(&holdings, 1, 1, 100), GiveWay::Nobody);
    }

    #[test]
    fn who_is_furthest_over_its_reservation_gives_way_first() {
        let holdings = [holding(10, 99, 30), holding(40, 99, 50), holding(50, 99, 20)];
        let other = |tenant, bytes_max| GiveWay::Other { tenant, bytes_max };
        assert_eq!(who_gives_way(&holdings, 2, 1, 0), other(0, 20));
        assert_eq!(who_gives_way(&holdings, 1, 1, 0), other(0, 20));
        assert_eq!(who_gives_way(&holdings, 0, 1, 0), GiveWay::Itself);
        let order = |want| givers(&holdings, want).iter().map(|giver| giver.tenant).collect::<Vec<_>>();
        assert_eq!(order(None), [0, 1], "what is reserved is not made room of ahead of need");
        assert_eq!(order(Some(Want { tenant: 2, bytes: 1 })), [0, 1, 2], "its own goes last");
        assert_eq!(order(Some(Want { tenant: 1, bytes: 11 })), [1, 0], "it counts with what it wants");
    }

    #[test]
    fn a_capacity_that_shrank_takes_from_every_reservation_in_proportion() {
        assert_eq!(quota(30, 99).scaled(50, 100), quota(15, 99));
        assert_eq!(quota(30, 99).scaled(100, 100), quota(30, 99));
    }

    #[test]
    fn of_two_quotas_the_lower_limit_holds_and_the_higher_reservation_below_it() {
        assert_eq!(quota(30, 99).with(quota(0, 20)), quota(20, 20));
        assert_eq!(quota(0, 50).with(quota(10, u64::MAX)), quota(10, 50));
        assert_eq!(quota(5, 50).with(quota(60, 70)), quota(50, 50));
    }

    /// A store of blocks of one byte, every one of which can go.
    #[derive(Debug)]
    struct Store {
        capacity: u64,
        holdings: Vec<Holding>,
    }

    impl Store {
        fn free(&self) -> u64 {
            self.capacity - self.holdings.iter().map(|holding| holding.used).sum::<u64>()
        }

        /// One tenant wants one byte; whether it gets it.
        fn want(&mut self, wanting: usize) -> bool {
            let before = self.holdings.clone();
            match who_gives_way(&self.holdings, wanting, 1, self.free()) {
                GiveWay::Never => return false,
                GiveWay::Nobody => {}
                GiveWay::Itself if self.holdings[wanting].used == 0 => return false,
                GiveWay::Itself => self.holdings[wanting].used -= 1,
                GiveWay::Other { tenant, bytes_max } => {
                    assert!(tenant != wanting && bytes_max >= 1);
                    self.holdings[tenant].used -= 1;
                    assert!(
                        self.holdings[tenant].used >= before[tenant].quota.reserved,
                        "reserved bytes are not evicted for another"
                    );
                }
            }
            self.holdings[wanting].used += 1;
            true
        }
    }

    fn stores() -> impl Strategy<Value = Store> {
        (10u64..200, prop::collection::vec((0u64..60, 0u64..120), 1..5)).prop_map(|(capacity, tenants)| {
            let mut left = capacity;
            let holding = |(reserved, more): (u64, u64)| {
                let reserved = reserved.min(left);
                left -= reserved;
                holding(reserved, reserved + more, 0)
            };
            Store { capacity, holdings: tenants.into_iter().map(holding).collect() }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn limits_and_reservations_hold_and_no_room_is_left_that_somebody_may_have(
            mut store in stores(), wants in prop::collection::vec(0usize..5, 0..600)
        ) {
            for want in wants {
                let wanting = want % store.holdings.len();
                let before = store.holdings[wanting];
                let unreserved = store.holdings.iter().any(|holding| holding.over() > 0);
                let possible = before.used < before.quota.reserved() || before.used > 0 || store.free() > 0 || unreserved;
                let got = store.want(wanting);
                prop_assert_eq!(got, before.quota.limit() > 0 && possible, "no room is left unused");
                for holding in &store.holdings {
                    prop_assert!(holding.used <= holding.quota.limit());
                }
                // Within the reservation, and below the limit while there is room, a want is growth.
                if before.used < before.quota.reserved() {
                    prop_assert_eq!(store.holdings[wanting].used, before.used + 1);
                }
                prop_assert!(store.holdings.iter().map(|holding| holding.used).sum::<u64>() <= store.capacity);
            }
        }

        #[test]
        fn tenants_that_all_want_more_get_their_reservations_and_equal_shares_of_the_rest(
            mut store in stores()
        ) {
            for round in 0..2 * store.capacity {
                for wanting in 0..store.holdings.len() {
                    store.want((wanting + round as usize) % store.holdings.len());
                }
            }
            let limits: u64 = store.holdings.iter().map(|holding| holding.quota.limit()).sum();
            let used: u64 = store.holdings.iter().map(|holding| holding.used).sum();
            prop_assert_eq!(used, limits.min(store.capacity), "no room is left");
            let below: Vec<&Holding> = store.holdings.iter().filter(|holding| holding.room() > 0).collect();
            for one in &below {
                prop_assert!(one.used >= one.quota.reserved());
                for other in &below {
                    prop_assert!(one.over().abs_diff(other.over()) <= 1, "{:?} {:?}", one, other);
                }
            }
        }
    }
}
