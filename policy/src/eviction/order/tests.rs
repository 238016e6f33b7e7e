//! Behaviour of each policy, block by block.

use super::*;
use crate::eviction::{Class, EvictionKind};

fn order(kind: EvictionKind) -> EvictionOrder {
    EvictionOrder::new(kind.into())
}

fn block(key: u64) -> Block {
    Block { key_hash: key, bytes: 1 << 20, restore_ns: 1_000_000, ..Block::default() }
}

/// Adds blocks without chains.
fn add(order: &mut EvictionOrder, entries: std::ops::Range<u32>) {
    for entry in entries {
        order.attach(EntryIndex(entry), Group(0));
        order.insert(EntryIndex(entry), &block(u64::from(entry) + 1));
    }
}

/// Adds blocks of which each is the parent of the next one.
fn add_chain(order: &mut EvictionOrder, entries: std::ops::Range<u32>) {
    for entry in entries.clone() {
        if entry > entries.start {
            order.link(EntryIndex(entry), EntryIndex(entry - 1));
        }
        order.attach(EntryIndex(entry), Group(0));
        let position = entry - entries.start;
        order.insert(EntryIndex(entry), &Block { position: Some(position), ..block(u64::from(entry) + 1) });
    }
}

fn evict(order: &mut EvictionOrder, count: usize) -> Vec<u32> {
    let victims = std::iter::from_fn(|| {
        let victim = order.victim(Group(0))?;
        order.forget(victim);
        Some(victim.0)
    });
    victims.take(count).collect()
}

#[test]
fn evicts_a_chain_from_its_tail_under_every_policy() {
    for kind in EvictionKind::ALL {
        let mut order = order(kind);
        add_chain(&mut order, 0..6);
        assert_eq!(evict(&mut order, 6), [5, 4, 3, 2, 1, 0], "{kind:?}");
        assert!(order.is_empty());
    }
}

#[test]
fn evicts_in_order_of_insertion_when_chains_are_ignored() {
    let policy = EvictionPolicy { kind: EvictionKind::Lru, chains: Chains::Ignored };
    let mut order = EvictionOrder::new(policy);
    add_chain(&mut order, 0..4);
    assert_eq!(evict(&mut order, 4), [0, 1, 2, 3]);
}

#[test]
fn settled_block_is_listed_before_its_parent() {
    let mut order = order(EvictionKind::PriorityLru);
    add_chain(&mut order, 0..3);
    (1..3).for_each(|entry| order.settle(EntryIndex(entry)));
    add(&mut order, 3..4);
    let listed: Vec<u32> = order.following(Group(0), None, 9).into_iter().map(|entry| entry.0).collect();
    assert_eq!(listed, [2, 1, 0, 3]);
    assert_eq!(order.following(Group(0), Some(EntryIndex(1)), 1), [EntryIndex(0)]);
    assert_eq!(order.following(Group(1), Some(EntryIndex(1)), 1), []);
    assert_eq!(evict(&mut order, 4), [2, 1, 0, 3]);
}

#[test]
fn block_whose_descendants_are_in_use_is_evicted_only_as_last_resort() {
    let mut order = order(EvictionKind::Lru);
    add_chain(&mut order, 0..4);
    add(&mut order, 4..5);
    order.remove(EntryIndex(3));
    assert_eq!(evict(&mut order, 9), [4, 2, 1, 0]);
    order.insert(EntryIndex(3), &block(4));
    assert_eq!(evict(&mut order, 9), [3]);
}

#[test]
fn touched_block_is_evicted_last() {
    for kind in [EvictionKind::Lru, EvictionKind::Lfu, EvictionKind::PriorityLru, EvictionKind::Semantic] {
        let mut order = order(kind);
        add(&mut order, 0..3);
        order.touch(EntryIndex(0));
        assert_eq!(evict(&mut order, 3), [1, 2, 0], "{kind:?}");
    }
}

#[test]
fn lfu_evicts_least_used_block_first() {
    let mut order = order(EvictionKind::Lfu);
    add(&mut order, 0..3);
    for entry in [0, 0, 2] {
        order.used(EntryIndex(entry));
    }
    assert_eq!(evict(&mut order, 3), [1, 2, 0]);
}

#[test]
fn priority_lru_evicts_lowest_class_first_regardless_of_recency() {
    let mut order = order(EvictionKind::PriorityLru);
    for (entry, class) in (0..).zip([Class::Active, Class::Recent, Class::Idle, Class::Evictable]) {
        order.insert(EntryIndex(entry), &Block { class, ..Block::default() });
    }
    order.touch(EntryIndex(3));
    assert_eq!(evict(&mut order, 4), [3, 2, 1, 0]);
}

#[test]
fn semantic_evicts_shared_prefixes_and_used_blocks_last() {
    let mut order = order(EvictionKind::Semantic);
    // Two chains continue from block 0.
    add(&mut order, 0..1);
    for entry in 1..3 {
        order.link(EntryIndex(entry), EntryIndex(0));
    }
    add(&mut order, 1..3);
    add(&mut order, 3..6);
    order.used(EntryIndex(3));
    assert_eq!(evict(&mut order, 6), [1, 2, 4, 5, 0, 3]);
}

#[test]
fn s3_fifo_evicts_new_blocks_before_blocks_that_were_used_twice() {
    let mut order = order(EvictionKind::S3Fifo);
    add(&mut order, 0..20);
    for entry in [0, 0, 1, 1] {
        order.used(EntryIndex(entry));
    }
    assert_eq!(evict(&mut order, 3), [2, 3, 4], "blocks 0 and 1 are in the main queue now");
    order.touch(EntryIndex(5));
    assert_eq!(evict(&mut order, 1), [5], "a touch does not change the order");
}

#[test]
fn s3_fifo_admits_a_recently_evicted_block_to_the_main_queue() {
    let mut order = order(EvictionKind::S3Fifo);
    add(&mut order, 0..20);
    assert_eq!(evict(&mut order, 2), [0, 1]);
    order.insert(EntryIndex(0), &block(1));
    order.insert(EntryIndex(1), &block(1000));
    let remaining = evict(&mut order, 19);
    assert_eq!(remaining.last(), Some(&1), "{remaining:?}: of the two blocks, only one returned");
    assert_eq!(evict(&mut order, 1), [0]);
}

#[test]
fn s3_fifo_keeps_the_place_of_a_block_in_use() {
    let mut order = order(EvictionKind::S3Fifo);
    add(&mut order, 0..20);
    order.remove(EntryIndex(0));
    order.insert(EntryIndex(0), &block(1));
    order.remove(EntryIndex(1));
    assert_eq!(evict(&mut order, 2), [0, 2]);
    order.insert(EntryIndex(1), &block(2));
    assert_eq!(order.len(), 18);
    assert_eq!(evict(&mut order, 20).len(), 18);
}

#[test]
fn cost_aware_evicts_block_with_least_loss_per_byte_first() {
    let mut order = order(EvictionKind::CostAware);
    let cheap = Block { restore_ns: 100_000, ..block(1) };
    let large = Block { bytes: 32 << 20, ..block(2) };
    for (entry, block) in [(0, block(3)), (1, large), (2, cheap)] {
        order.insert(EntryIndex(entry), &block);
    }
    assert_eq!(evict(&mut order, 3), [1, 2, 0]);
}

#[test]
fn cost_aware_learns_that_beginnings_are_reused() {
    let mut order = order(EvictionKind::CostAware);
    let at = |position, key| Block { position: Some(position), ..block(key) };
    for round in 0..200 {
        order.insert(EntryIndex(0), &at(0, round));
        order.insert(EntryIndex(1), &at(1000, round));
        order.used(EntryIndex(0));
        order.forget(EntryIndex(0));
        order.forget(EntryIndex(1));
    }
    order.insert(EntryIndex(0), &at(0, 1));
    order.insert(EntryIndex(1), &at(1000, 2));
    assert_eq!(evict(&mut order, 2), [1, 0]);
}

#[test]
fn put_first_makes_a_block_the_next_victim_under_every_policy() {
    for kind in EvictionKind::ALL {
        let mut order = order(kind);
        add(&mut order, 0..12);
        order.put_first(EntryIndex(7));
        let victim = order.victim(Group(0));
        assert_eq!(victim, Some(EntryIndex(7)), "{kind:?}");
        order.put_first(EntryIndex(7));
        assert_eq!((order.victim(Group(0)), order.len()), (victim, 11), "{kind:?}");
    }
}

#[test]
fn reused_index_does_not_inherit_children() {
    let mut order = order(EvictionKind::Lru);
    add_chain(&mut order, 0..2);
    order.forget(EntryIndex(0));
    add(&mut order, 0..1);
    add(&mut order, 2..3);
    assert_eq!(order.parent(EntryIndex(1)), None);
    order.touch(EntryIndex(1));
    assert_eq!(evict(&mut order, 3), [0, 2, 1]);
}

#[test]
fn block_waits_for_at_most_as_many_children_as_it_counts() {
    let mut order = order(EvictionKind::Lru);
    let children = u32::from(u16::MAX) + 10;
    add(&mut order, 0..1);
    (1..=children).for_each(|child| order.link(EntryIndex(child), EntryIndex(0)));
    add(&mut order, 1..children + 1);
    assert_eq!(order.parent(EntryIndex(1)), Some(EntryIndex(0)));
    assert_eq!(order.parent(EntryIndex(children)), None, "one child too many has no parent");
    let victims = evict(&mut order, children as usize + 1);
    assert_eq!(victims.iter().position(|victim| *victim == 0), Some(usize::from(u16::MAX)));
}

#[test]
fn block_has_20_bytes_and_its_place_in_a_chunk_and_the_policies_add_at_most_8() {
    for (kind, bytes) in [(EvictionKind::Lru, 0), (EvictionKind::S3Fifo, 4), (EvictionKind::CostAware, 8)] {
        let mut order = order(kind);
        add(&mut order, 0..64);
        assert_eq!(order.rule.bytes(), 64 * bytes, "{kind:?}, before any ghost");
        // Five chunks of 14 blocks, if all blocks are in one list.
        let least = 64 * (20 + bytes) + 5 * 64;
        assert!(order.bytes() == least || kind == EvictionKind::CostAware, "{kind:?}: {}", order.bytes());
    }
}
