//! Fairness between tenants, on top of any policy.
//!
//! A tenant is a group of the order. The quotas select the tenant ([`quota::victims`]): the one furthest over its
//! reservation first, and never bytes that are reserved, except for their own tenant. The policy selects the
//! block. Costs O(tenants) per victim, independent of the number of blocks.

use super::{EntryIndex, EvictionOrder, Group};
use crate::quota::{self, QuotaUsage, SpaceRequest, Victim};

/// Removes and returns the next victim for a request or, without one, ahead of requests. `usages` has one
/// element for each tenant, by group number. `bytes_of` returns the bytes of a block. A block that is larger than
/// what may be evicted from its tenant remains its tenant's next victim.
pub fn take_victim(
    order: &mut EvictionOrder,
    usages: &[QuotaUsage],
    request: Option<SpaceRequest>,
    bytes_of: impl Fn(EntryIndex) -> u64,
) -> Option<EntryIndex> {
    for Victim { tenant, bytes_max } in quota::victims(usages, request) {
        let group = Group(u16::try_from(tenant).expect("groups have 16 bits"));
        let Some(entry) = order.victim(group) else { continue };
        if bytes_of(entry) <= bytes_max {
            return Some(entry);
        }
        order.put_first(entry);
    }
    None
}
