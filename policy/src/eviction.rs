//! Eviction: which entry goes next when a tier needs room.
//!
//! A policy only orders entries; it knows neither bytes nor blocks. The caller names entries by the index they
//! have in its own slab, takes victims until enough bytes are free, and keeps leased or pinned entries out:
//! it removes an entry when it is leased and inserts it again when the last lease ends. So "never evict what
//! somebody reads" needs no check here, and finding a victim costs the same whatever is leased.
//!
//! Invariants: an entry is in a policy at most once, in one group; [`EvictionPolicy::victim`] returns every entry that
//! is in and nothing else. Deliberately absent: thresholds and amounts (the caller's budget) and time (order is by
//! sequence of calls, so a replay gives the same victims).

use std::fmt::Debug;

use serde::{Deserialize, Serialize};

pub mod priority_lru;

pub use priority_lru::PriorityLru;

/// Index of an entry in the slab of whoever uses the policy.
///
/// Memory of a policy grows with the largest index it has seen, so indices should be dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EntryIndex(pub u32);

/// Entries that compete with each other for going last. A policy keeps an order for each group, so that callers with
/// several kinds of room (slot sizes) pay for an entry once and not once for each kind. Groups should be dense.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group(pub u16);

/// Where an entry stands: its group, and its worth in it. Class 0 goes first; a class above the policy's highest counts
/// as the highest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Standing {
    /// With whom it competes.
    pub group: Group,
    /// What it is worth among those.
    pub class: u8,
}

/// Orders of eviction, one for each group. All operations are expected to be O(1).
pub trait EvictionPolicy: Send + Debug {
    /// Makes an entry evictable, as the one used last. An entry that is in already moves.
    fn insert(&mut self, entry: EntryIndex, standing: Standing);

    /// Makes an entry evictable, as the one of its group and class that goes next: for a victim that cannot go after
    /// all. An entry that is in already moves.
    fn put_back(&mut self, entry: EntryIndex, standing: Standing);

    /// Makes an entry evictable, as the one that goes immediately before `successor`: a block whose prefix is
    /// `successor` is useless once that is gone, so it goes first. An entry that is in already moves. Where `successor`
    /// is not in, or in another group or class, this is [`EvictionPolicy::insert`].
    fn insert_before(&mut self, entry: EntryIndex, standing: Standing, successor: EntryIndex);

    /// Notes a use of an entry; nothing happens when it is not in.
    fn touch(&mut self, entry: EntryIndex);

    /// Takes an entry out; nothing happens when it is not in.
    fn remove(&mut self, entry: EntryIndex);

    /// Takes out the entry of a group that should go next, if there is any.
    fn victim(&mut self, group: Group) -> Option<EntryIndex>;

    /// At most `count` entries of a group in the order in which they should go, behind one of them, or (`None`) from the
    /// first on; none when that one is not in the group any more. Costs time in proportion to `count`.
    fn following(&self, group: Group, behind: Option<EntryIndex>, count: usize) -> Vec<EntryIndex>;

    /// Entries that are in, of all groups.
    fn len(&self) -> usize;

    /// Whether no entry is in.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The policies that configuration can name, with their parameters: `{ kind = "priority_lru" }`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum EvictionKind {
    /// Classes in ascending order, least recently used first within a class.
    #[default]
    PriorityLru,
}

impl Standing {
    /// A class of the only group that a caller has.
    pub fn of_class(class: u8) -> Standing {
        Standing { group: Group::default(), class }
    }
}

impl EvictionKind {
    /// An empty policy of this kind.
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
    fn configuration_names_a_policy_and_an_unknown_one_is_refused() {
        let section: Section = toml::from_str("eviction = { kind = 'priority_lru' }").expect("a policy");
        assert_eq!(section.eviction, EvictionKind::default());
        let error = toml::from_str::<Section>("eviction = { kind = 'random' }").expect_err("no such policy");
        assert!(error.to_string().contains("priority_lru"), "{error}");
    }

    #[test]
    fn a_built_policy_is_empty() {
        let mut policy = EvictionKind::default().build();
        assert!(policy.is_empty());
        assert_eq!(policy.victim(Group(0)), None);
    }
}
