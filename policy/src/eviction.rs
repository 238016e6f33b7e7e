//! Eviction: the order in which blocks of a tier are evicted.
//!
//! [`EvictionOrder`] orders blocks; it knows neither payloads nor thresholds. The caller identifies blocks by
//! their index in its own slab, and takes victims until enough bytes are free. A block in use must not be
//! evictable: the caller calls [`EvictionOrder::remove`] when a block is leased, and
//! [`EvictionOrder::insert`] when the last lease ends.
//!
//! A policy decides over the facts of a [`Block`] and over what the order counts itself:
//!
//! | fact | from |
//! |---|---|
//! | key, bytes, position in the chain, class, cost to bring back | [`Block`], at each insertion |
//! | children in the tier, parent | [`EvictionOrder::link`], [`EvictionOrder::attach`] |
//! | references | [`EvictionOrder::used`]: one for each use after the first commit |
//!
//! The policies are [`EvictionKind`]. Each is a small number of lists with a rule for the list of a block and
//! for the next list to evict from ([`rules`]). Fairness between tenants is independent of the policy: a
//! tenant is a [`Group`], and [`fair`] selects the group.
//!
//! The order follows the sequence of calls alone, so a replay returns the same victims.

use serde::{Deserialize, Serialize};

mod chunks;
pub mod fair;
mod generations;
mod ghosts;
#[cfg(test)]
mod laws;
pub mod listed;
mod lists;
mod order;
pub mod restore_cost;
mod rules;

pub use order::{EvictionOrder, STEPS_PER_SEARCH_MAX};

/// Index of a block in the caller's slab.
///
/// The memory of an order grows with the largest index, so indices should be dense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EntryIndex(pub u32);

/// Blocks that compete with each other. An order keeps the lists of each group apart. A caller with several
/// kinds of space (slot sizes, tenants) thus pays memory for a block once. Group numbers should be dense.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Group(pub u16);

/// Classes of [`EvictionKind::PriorityLru`], in the order of eviction. A block has the class of its commit, or that of
/// the requests that list it ([`listed`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Class {
    /// Evicted first: no request is expected to need the block.
    Evictable,
    /// Belongs to a preempted request.
    Idle,
    /// Belongs to a finished request; another one may have the same prefix.
    #[default]
    Recent,
    /// Evicted last: belongs to a running request, or to a prefix that many requests need.
    Active,
}

/// Facts of a block at its insertion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Block {
    /// Group in which the block competes.
    pub group: Group,
    /// Priority class within the group.
    pub class: Class,
    /// Hash of the key: recognises a block that was evicted recently.
    pub key_hash: u64,
    /// Bytes that the eviction of the block frees.
    pub bytes: u64,
    /// Number of blocks before it in its chain; `None` if its chain is not known.
    pub position: Option<u32>,
    /// Time in nanoseconds until an engine has the block again after its eviction.
    pub restore_ns: u64,
}

/// Policies available in the configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EvictionKind {
    /// Least recently used first.
    Lru,
    /// Least frequently used first, and among those the least recently used.
    Lfu,
    /// Classes in ascending order, least recently used first within a class.
    #[default]
    PriorityLru,
    /// Blocks that one request used first; shared prefixes and blocks that were used again last.
    Semantic,
    /// Two queues: new blocks leave early unless they are used; recently evicted ones enter the main queue.
    S3Fifo,
    /// Blocks first whose loss costs least time per freed byte, by the probability of reuse at their position.
    CostAware,
}

/// Whether a block waits for the eviction of its descendants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Chains {
    /// A block is evicted after its descendants in the tier. If all evictable blocks have descendants in use,
    /// one without an evictable child is evicted.
    #[default]
    DescendantsFirst,
    /// The policy alone decides.
    Ignored,
}

/// Policy of a tier: `{ kind = "lru", chains = "descendants_first" }`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EvictionPolicy {
    /// Order of blocks that could be evicted.
    pub kind: EvictionKind,
    /// Treatment of chains.
    #[serde(default)]
    pub chains: Chains,
}

impl EvictionKind {
    /// All policies, in the order of their documentation.
    pub const ALL: [EvictionKind; 6] = [
        EvictionKind::Lru,
        EvictionKind::Lfu,
        EvictionKind::PriorityLru,
        EvictionKind::Semantic,
        EvictionKind::S3Fifo,
        EvictionKind::CostAware,
    ];

    /// Name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            EvictionKind::Lru => "lru",
            EvictionKind::Lfu => "lfu",
            EvictionKind::PriorityLru => "priority_lru",
            EvictionKind::Semantic => "semantic",
            EvictionKind::S3Fifo => "s3_fifo",
            EvictionKind::CostAware => "cost_aware",
        }
    }
}

impl From<EvictionKind> for EvictionPolicy {
    fn from(kind: EvictionKind) -> EvictionPolicy {
        EvictionPolicy { kind, chains: Chains::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, Deserialize)]
    struct Section {
        eviction: EvictionPolicy,
    }

    fn parse(text: &str) -> Result<EvictionPolicy, String> {
        toml::from_str::<Section>(text).map(|section| section.eviction).map_err(|error| error.to_string())
    }

    #[test]
    fn reads_every_policy_by_its_name() {
        for kind in EvictionKind::ALL {
            let policy = parse(&format!("eviction = {{ kind = '{}' }}", kind.name()));
            assert_eq!(policy, Ok(EvictionPolicy::from(kind)));
        }
        let policy = parse("eviction = { kind = 'lru', chains = 'ignored' }");
        assert_eq!(policy, Ok(EvictionPolicy { kind: EvictionKind::Lru, chains: Chains::Ignored }));
    }

    #[test]
    fn error_for_an_unknown_policy_lists_all_names() {
        let error = parse("eviction = { kind = 'random' }").expect_err("unknown policy");
        assert!(EvictionKind::ALL.iter().all(|kind| error.contains(kind.name())), "{error}");
        assert!(error.contains("random"), "{error}");
        assert!(parse("eviction = { kind = 'lru', chains = 'never' }").is_err());
        assert!(parse("eviction = { kind = 'lru', chain = 'ignored' }").is_err());
    }
}
