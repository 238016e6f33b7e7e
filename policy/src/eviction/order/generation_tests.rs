//! Links to parents whose index was reused, also more often than a generation counts.

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

use super::*;
use crate::eviction::EvictionKind;

const ENTRIES: u32 = 200;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Call {
    Link { child: u32, parent: u32 },
    Attach(u32),
    Insert(u32),
    Remove(u32),
    Detach(u32),
    Forget(u32),
    Evict,
}

/// Order of which indices are soon exhausted, and the true parents.
struct Reused {
    order: EvictionOrder,
    parents: Vec<Option<u32>>,
}

impl Reused {
    fn forget(&mut self, entry: u32) {
        self.order.forget(EntryIndex(entry));
        self.parents[entry as usize] = None;
        self.parents.iter_mut().filter(|parent| **parent == Some(entry)).for_each(|parent| *parent = None);
    }

    fn apply(&mut self, call: Call) {
        match call {
            Call::Link { child, parent } if parent < child => {
                self.order.link(EntryIndex(child), EntryIndex(parent));
                let linked = self.order.parent(EntryIndex(child)) == Some(EntryIndex(parent));
                if self.parents[child as usize].is_none() && linked {
                    self.parents[child as usize] = Some(parent);
                }
            }
            Call::Link { .. } => {}
            Call::Attach(entry) => self.order.attach(EntryIndex(entry), Group(0)),
            Call::Insert(entry) => {
                self.order.attach(EntryIndex(entry), Group(0));
                self.order.insert(EntryIndex(entry), &Block::default());
            }
            Call::Remove(entry) => self.order.remove(EntryIndex(entry)),
            Call::Detach(entry) => self.order.detach(EntryIndex(entry)),
            Call::Forget(entry) => self.forget(entry),
            Call::Evict => {
                if let Some(EntryIndex(victim)) = self.order.victim(Group(0)) {
                    self.forget(victim);
                }
            }
        }
    }

    /// Compares the links and the counts of children with the true parents.
    fn check(&self) -> Result<(), String> {
        let mut children = vec![0; ENTRIES as usize];
        for (child, parent) in (0..).zip(&self.parents) {
            let found = self.order.parent(EntryIndex(child)).map(|entry| entry.0);
            if found != *parent {
                return Err(format!("{child} is linked to {found:?}, not {parent:?}"));
            }
            if let Some(parent) = parent
                && self.order.lists.record(EntryIndex(child)).state.has(State::ATTACHED)
            {
                children[*parent as usize] += 1;
            }
        }
        for (entry, children) in (0..).zip(children) {
            let record = self.order.lists.record(EntryIndex(entry));
            if record.children != children || record.evictable_children > record.children {
                return Err(format!("{entry} has {children} children, not {record:?}"));
            }
        }
        Ok(())
    }
}

fn call() -> impl Strategy<Value = Call> {
    // Few parents, so that their indices are reused often.
    let parent = || prop_oneof![4 => 0..4u32, 1 => 0..ENTRIES];
    prop_oneof![
        4 => (0..ENTRIES, parent()).prop_map(|(child, parent)| Call::Link { child, parent }),
        2 => (0..ENTRIES).prop_map(Call::Attach),
        3 => (0..ENTRIES).prop_map(Call::Insert),
        1 => (0..ENTRIES).prop_map(Call::Remove),
        1 => (0..ENTRIES).prop_map(Call::Detach),
        3 => parent().prop_map(Call::Forget),
        1 => Just(Call::Evict),
    ]
}

#[test]
fn link_never_leads_to_another_block_however_often_indices_are_reused() {
    for kind in [EvictionKind::Lru, EvictionKind::Semantic, EvictionKind::S3Fifo] {
        let config = Config { cases: 60, failure_persistence: None, ..Config::default() };
        let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
        let outcome =
            TestRunner::new_with_rng(config, rng).run(&prop::collection::vec(call(), 0..600), |calls| {
                let order = EvictionOrder::with_generations(kind.into(), 3);
                let mut reused = Reused { order, parents: vec![None; ENTRIES as usize] };
                reused.order.lists.grow_to(EntryIndex(ENTRIES - 1));
                for call in calls {
                    reused.apply(call);
                    reused.check().map_err(TestCaseError::fail)?;
                }
                Ok(())
            });
        assert_eq!(outcome, Ok(()), "{kind:?}");
    }
}

#[test]
fn child_of_a_block_that_is_gone_has_no_parent_after_65536_reuses() {
    let mut order = EvictionOrder::new(EvictionKind::Lru.into());
    let [parent, child] = [0, 1].map(EntryIndex);
    order.link(child, parent);
    order.attach(child, Group(0));
    for reuse in 0..=u32::from(u16::MAX) {
        order.forget(parent);
        assert_eq!(order.parent(child), None, "after {reuse} reuses");
    }
    // The new block at the index has no children, so none may leave it.
    order.attach(parent, Group(0));
    order.detach(child);
    assert_eq!(order.lists.record(parent).children, 0);
}

#[test]
fn exhausted_index_may_have_children_again_once_old_links_are_gone() {
    let mut order = EvictionOrder::with_generations(EvictionKind::Lru.into(), 2);
    let [parent, old, new] = [0, 1, 999].map(EntryIndex);
    order.lists.grow_to(new);
    order.link(old, parent);
    (0..2).for_each(|_| order.forget(parent));
    order.link(new, parent);
    assert_eq!(order.parent(new), None, "no generation is left");
    (0..1000 / 64).for_each(|_| order.forget(EntryIndex(500)));
    order.link(new, parent);
    assert_eq!((order.parent(new), order.parent(old)), (Some(parent), None));
}
