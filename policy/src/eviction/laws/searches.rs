//! Work of one search for a victim, in orders of thousands of blocks that make searches long.

use std::collections::BTreeSet;

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use crate::eviction::{
    Block, Chains, Class, EntryIndex, EvictionKind, EvictionOrder, EvictionPolicy, Group,
    STEPS_PER_SEARCH_MAX,
};

const GROUP: Group = Group(0);

/// Searches up to this number of steps find a victim in the policy's order.
const SHORT_SEARCH: u64 = 1024;

/// Change of many blocks at once. A share selects every n-th block.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Change {
    /// Adds blocks of a class, each behind the block that is this number of blocks before it, if any.
    Save {
        count: usize,
        class: u8,
        behind: usize,
    },
    Use {
        share: usize,
        times: u8,
    },
    Pin {
        share: usize,
    },
    Unpin {
        share: usize,
    },
    Evict {
        count: usize,
    },
}

#[derive(Clone, Copy, Debug)]
struct Known {
    parent: Option<usize>,
    class: Class,
    is_here: bool,
    is_pinned: bool,
    /// Children that are in the order and not pinned.
    evictable_children: usize,
}

struct Searches {
    order: EvictionOrder,
    policy: EvictionPolicy,
    blocks: Vec<Known>,
    longest: u64,
}

impl Searches {
    fn new(policy: EvictionPolicy) -> Searches {
        Searches { order: EvictionOrder::new(policy), policy, blocks: Vec::new(), longest: 0 }
    }

    fn apply(&mut self, change: Change) -> Result<(), String> {
        match change {
            Change::Save { count, class, behind } => (0..count).for_each(|_| self.save(class, behind)),
            Change::Use { share, times } => {
                for at in (0..self.blocks.len()).step_by(share) {
                    (0..times).for_each(|_| self.order.used(entry(at)));
                }
            }
            Change::Pin { share } => (0..self.blocks.len()).step_by(share).for_each(|at| self.pin(at)),
            Change::Unpin { share } => (0..self.blocks.len()).step_by(share).for_each(|at| self.unpin(at)),
            Change::Evict { count } => {
                for _ in 0..count {
                    self.evict()?;
                }
            }
        }
        Ok(())
    }

    fn save(&mut self, class: u8, behind: usize) {
        let at = self.blocks.len();
        let parent = at.checked_sub(behind).filter(|parent| behind > 0 && self.blocks[*parent].is_here);
        let class = [Class::Evictable, Class::Idle, Class::Recent, Class::Active][usize::from(class)];
        self.blocks.push(Known { parent, class, is_here: true, is_pinned: true, evictable_children: 0 });
        if let Some(parent) = parent {
            self.order.link(entry(at), entry(parent));
        }
        self.order.attach(entry(at), GROUP);
        self.unpin(at);
        self.order.settle(entry(at));
    }

    fn pin(&mut self, at: usize) {
        let block = &mut self.blocks[at];
        if block.is_here && !std::mem::replace(&mut block.is_pinned, true) {
            self.order.remove(entry(at));
            self.count_child(at, |children| *children -= 1);
        }
    }

    fn unpin(&mut self, at: usize) {
        let block = &mut self.blocks[at];
        if block.is_here && std::mem::replace(&mut block.is_pinned, false) {
            let (class, key_hash) = (block.class, at as u64 + 1);
            let (bytes, restore_ns) = (1 << 20, 1_000_000);
            let block = Block { group: GROUP, class, key_hash, bytes, position: Some(0), restore_ns };
            self.order.insert(entry(at), &block);
            self.count_child(at, |children| *children += 1);
        }
    }

    fn count_child(&mut self, at: usize, count: impl Fn(&mut usize)) {
        if let Some(parent) = self.blocks[at].parent {
            count(&mut self.blocks[parent].evictable_children);
        }
    }

    fn evict(&mut self) -> Result<Option<usize>, String> {
        let before = self.order.steps();
        let victim = self.order.victim(GROUP);
        let steps = self.order.steps() - before;
        self.longest = self.longest.max(steps);
        if steps > STEPS_PER_SEARCH_MAX {
            return Err(format!("{steps} steps for one victim, of at most {STEPS_PER_SEARCH_MAX}"));
        }
        let Some(EntryIndex(victim)) = victim else {
            let left = self.blocks.iter().any(|block| block.is_here && !block.is_pinned);
            return if left { Err("no victim, although a block is evictable".to_owned()) } else { Ok(None) };
        };
        let victim = victim as usize;
        let Known { is_here, is_pinned, evictable_children, .. } = self.blocks[victim];
        if !is_here || is_pinned {
            return Err(format!("block {victim} is evicted while it is in use or gone"));
        }
        let is_ordered = self.policy.chains == Chains::DescendantsFirst && steps < SHORT_SEARCH;
        if is_ordered && evictable_children > 0 {
            return Err(format!("block {victim} is evicted before its descendants after {steps} steps"));
        }
        self.order.forget(entry(victim));
        self.count_child(victim, |children| *children -= 1);
        self.blocks[victim].is_here = false;
        for block in self.blocks.iter_mut().filter(|block| block.parent == Some(victim)) {
            block.parent = None;
        }
        Ok(Some(victim))
    }

    /// Evicts everything that is not pinned, and checks that nothing is left.
    fn drain(&mut self) -> Result<(), String> {
        while self.evict()?.is_some() {}
        if self.order.is_empty() { Ok(()) } else { Err(format!("{} blocks are left", self.order.len())) }
    }
}

fn entry(at: usize) -> EntryIndex {
    EntryIndex(at as u32)
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        4 => (1000..3000usize, 0..4u8, prop_oneof![Just(0usize), Just(1), 2..3000usize])
            .prop_map(|(count, class, behind)| Change::Save { count, class, behind }),
        3 => (1..4usize, 1..4u8).prop_map(|(share, times)| Change::Use { share, times }),
        2 => (1..4usize).prop_map(|share| Change::Pin { share }),
        1 => (1..4usize).prop_map(|share| Change::Unpin { share }),
        3 => (1..200usize).prop_map(|count| Change::Evict { count }),
    ]
}

#[test]
fn one_search_examines_a_limited_number_of_blocks_and_takes_none_in_use() {
    for kind in EvictionKind::ALL {
        for chains in [Chains::DescendantsFirst, Chains::Ignored] {
            let config = Config { cases: 12, failure_persistence: None, ..Config::default() };
            let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
            let changes = prop::collection::vec(change(), 1..8);
            let outcome = TestRunner::new_with_rng(config, rng).run(&changes, |changes| {
                let mut searches = Searches::new(EvictionPolicy { kind, chains });
                let all = changes.into_iter().try_for_each(|change| searches.apply(change));
                all.and_then(|()| searches.evict().map(drop)).map_err(TestCaseError::fail)
            });
            assert_eq!(outcome, Ok(()), "{kind:?} {chains:?}");
        }
    }
}

/// Runs changes, then evicts all that is evictable; returns the steps of the longest search.
fn longest_search(kind: EvictionKind, changes: &[Change]) -> u64 {
    let mut searches = Searches::new(kind.into());
    for change in changes {
        searches.apply(*change).unwrap_or_else(|error| panic!("{kind:?}: {error}"));
    }
    searches.drain().unwrap_or_else(|error| panic!("{kind:?}: {error}"));
    searches.longest
}

#[test]
fn search_in_a_hot_queue_of_s3_fifo_ends() {
    let hot = [Change::Save { count: 4000, class: 2, behind: 0 }, Change::Use { share: 1, times: 3 }];
    let longest = longest_search(EvictionKind::S3Fifo, &hot);
    assert!(longest > SHORT_SEARCH, "{longest} steps: the limit was not reached");
}

#[test]
fn search_among_parents_of_a_low_class_takes_a_child_of_a_high_class() {
    let mut searches = Searches::new(EvictionKind::PriorityLru.into());
    for class in [0, 3] {
        let behind = usize::from(class > 0) * 4000;
        searches.apply(Change::Save { count: 4000, class, behind }).expect("no search");
    }
    assert_eq!(searches.evict(), Ok(Some(4000)), "the oldest block without children");
    searches.drain().expect("all are evictable");
    assert!(searches.longest > SHORT_SEARCH, "{} steps: the limit was not reached", searches.longest);
}

#[test]
fn blocks_in_use_keep_their_place_up_to_a_limit() {
    let pinned = [
        Change::Save { count: 4000, class: 2, behind: 0 },
        Change::Pin { share: 1 },
        Change::Save { count: 1, class: 2, behind: 0 },
    ];
    let longest = longest_search(EvictionKind::S3Fifo, &pinned);
    assert!((SHORT_SEARCH..=STEPS_PER_SEARCH_MAX).contains(&longest), "{longest} steps");
    let mut searches = Searches::new(EvictionKind::S3Fifo.into());
    for change in pinned {
        searches.apply(change).expect("no search");
    }
    searches.apply(Change::Unpin { share: 1 }).expect("no search");
    let victims: BTreeSet<usize> = (0..1024).filter_map(|_| searches.evict().expect("a victim")).collect();
    assert_eq!(victims, (0..1024).collect(), "those that kept their place leave first");
}
