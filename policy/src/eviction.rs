//! Eviction: the order in which entries of a tier are evicted.
//!
//! A policy only orders entries; it knows neither bytes nor blocks. The caller identifies entries by their
//! index in its own slab, and takes victims until enough bytes are free. Leased or pinned entries must not be
//! in the policy: the caller removes an entry when it is leased, and inserts it again when the last lease
//! ends. The policy therefore needs no check for entries in use, and the cost of a victim does not depend on
//! leases.
//!
//! Invariants: an entry is in a policy at most once, in one group; [`EvictionPolicy::victim`] returns exactly
//! the entries in the policy. Out of scope: thresholds and amounts (the caller's budget) and time. The order
//! follows the sequence of calls, so a replay returns the same victims.

use std::fmt::Debug;

use serde::{Deserialize, Serialize};

pub mod priority_lru;

pub use priority_lru::PriorityLru;

/// Index of an entry in the caller's slab.
///
/// The memory of a policy grows with the largest index, so indices should be dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EntryIndex(pub u32);

/// Entries that compete with each other. A policy keeps one order per group. A caller with several kinds of
/// space (slot sizes) thus pays memory for an entry once, not once for each kind. Group numbers should be
/// dense.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group(pub u16);

/// Group and class of an entry. Class 0 is evicted first; a class above the policy's highest counts as the
/// highest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Rank {
    /// Group in which the entry competes.
    pub group: Group,
    /// Priority class within the group.
    pub class: u8,
}

/// Eviction orders, one for each group. All operations are expected to be O(1).
pub trait EvictionPolicy: Send + Debug {
    /// Inserts an entry as most recently used; inserting it again moves it there.
    fn insert(&mut self, entry: EntryIndex, rank: Rank);

    /// Inserts an entry as the next victim of its group and class, for a victim that cannot be evicted after
    /// all. An entry that is already in the policy moves.
    fn insert_oldest(&mut self, entry: EntryIndex, rank: Rank);

    /// Inserts an entry immediately before `successor`: a block is useless without its prefix `successor`, so
    /// it is evicted first. An entry that is already in the policy moves. If `successor` is not in the
    /// policy, or in another group or class, this is [`EvictionPolicy::insert`].
    fn insert_before(&mut self, entry: EntryIndex, rank: Rank, successor: EntryIndex);

    /// Marks an entry as most recently used, if it is in the policy.
    fn touch(&mut self, entry: EntryIndex);

    /// Removes an entry, if it is in the policy.
    fn remove(&mut self, entry: EntryIndex);

    /// Removes and returns the next victim of a group, if any.
    fn victim(&mut self, group: Group) -> Option<EntryIndex>;

    /// Returns at most `count` entries of a group in eviction order, starting after `behind` or, without it,
    /// at the next victim. Empty if `behind` is not in the group. Costs time in proportion to `count`.
    fn following(&self, group: Group, behind: Option<EntryIndex>, count: usize) -> Vec<EntryIndex>;

    /// Number of entries, over all groups.
    fn len(&self) -> usize;

    /// Whether the policy has no entries.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Policies available in the configuration, with their parameters: `{ kind = "priority_lru" }`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum EvictionKind {
    /// Classes in ascending order, least recently used first within a class.
    #[default]
    PriorityLru,
}

impl Rank {
    /// Rank in a class of the default group, for callers with one group.
    pub fn of_class(class: u8) -> Rank {
        Rank { group: Group::default(), class }
    }
}

impl EvictionKind {
    /// Creates an empty policy of this kind.
    pub fn build(&self) -> Box<dyn EvictionPolicy> {
        match self {
            EvictionKind::PriorityLru => Box::new(PriorityLru::new()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Section {
        eviction: EvictionKind,
    }

    #[test]
    fn reads_policy_from_configuration_and_rejects_unknown_policies() {
        let section: Section = toml::from_str("eviction = { kind = 'priority_lru' }").expect("a policy");
        assert_eq!(section.eviction, EvictionKind::default());
        let error = toml::from_str::<Section>("eviction = { kind = 'random' }").expect_err("unknown policy");
        assert!(error.to_string().contains("priority_lru"), "{error}");
    }

    #[test]
    fn new_policy_is_empty() {
        let mut policy = EvictionKind::default().build();
        assert!(policy.is_empty());
        assert_eq!(policy.victim(Group(0)), None);
    }
}
