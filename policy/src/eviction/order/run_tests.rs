//! Blocks that are touched together: the same order as one touch after the other, and bounded memory.

use proptest::prelude::*;

use super::*;
use crate::eviction::{Class, EvictionKind};

/// Number of blocks in the order.
const BLOCKS: u32 = 120;

#[derive(Clone, Debug)]
enum Call {
    /// Touches consecutive blocks, the last one first, as a match does.
    Touch {
        from: u32,
        count: u32,
    },
    Use(u32),
    Remove(u32),
    Insert(u32),
    Evict,
}

fn call() -> impl Strategy<Value = Call> {
    prop_oneof![
        4 => (0..BLOCKS, 1..60_u32).prop_map(|(from, count)| Call::Touch { from, count }),
        1 => (0..BLOCKS).prop_map(Call::Use),
        1 => (0..BLOCKS).prop_map(Call::Remove),
        2 => (0..BLOCKS).prop_map(Call::Insert),
        1 => Just(Call::Evict),
    ]
}

fn insert(order: &mut EvictionOrder, entry: u32) {
    let class = [Class::Evictable, Class::Recent][usize::from(entry % 40 < 10)];
    let block = Block {
        class,
        key_hash: u64::from(entry) + 1,
        bytes: 1 << 20,
        position: Some(entry),
        ..Block::default()
    };
    if !entry.is_multiple_of(40) {
        order.link(EntryIndex(entry), EntryIndex(entry - 1));
    }
    order.attach(EntryIndex(entry), Group((entry / 80) as u16));
    order.insert(EntryIndex(entry), &Block { group: Group((entry / 80) as u16), ..block });
}

/// Executes calls; returns all victims, those of the emptied order included.
fn victims(kind: EvictionKind, calls: &[Call], is_together: bool) -> Vec<u32> {
    let mut order = EvictionOrder::new(kind.into());
    (0..BLOCKS).for_each(|entry| insert(&mut order, entry));
    let mut victims = Vec::new();
    let mut evict = |order: &mut EvictionOrder, group| {
        let victim = order.victim(Group(group))?;
        order.forget(victim);
        victims.push(victim.0);
        Some(())
    };
    for call in calls {
        match *call {
            Call::Touch { from, count } => {
                let run: Vec<EntryIndex> = (from..BLOCKS.min(from + count)).rev().map(EntryIndex).collect();
                if is_together {
                    order.touch_run(&run);
                } else {
                    run.iter().for_each(|entry| order.touch(*entry));
                }
            }
            Call::Use(entry) => order.used(EntryIndex(entry)),
            Call::Remove(entry) => order.remove(EntryIndex(entry)),
            Call::Insert(entry) if !order.contains(EntryIndex(entry)) => insert(&mut order, entry),
            Call::Insert(_) => {}
            Call::Evict => drop(evict(&mut order, 0)),
        }
    }
    for group in 0..2 {
        while evict(&mut order, group).is_some() {}
    }
    victims
}

proptest! {
    #[test]
    fn blocks_touched_together_are_evicted_as_if_touched_one_by_one(
        calls in proptest::collection::vec(call(), 1..60),
    ) {
        for kind in EvictionKind::ALL {
            prop_assert_eq!(victims(kind, &calls, true), victims(kind, &calls, false), "{:?}", kind);
        }
    }
}

#[test]
fn whole_chunks_move_without_their_records() {
    let mut order = EvictionOrder::new(EvictionKind::Lru.into());
    (0..BLOCKS).for_each(|entry| insert(&mut order, entry));
    let run: Vec<EntryIndex> = (0..40).map(EntryIndex).collect();
    // 14 blocks are in a chunk.
    let moved: Vec<usize> = [0, 14, 28, 29].map(|from| order.lists.renew(&run[from..])).into();
    assert_eq!(moved, [14, 14, 0, 0], "the third chunk continues behind the run");
}

#[test]
fn memory_stays_bounded_when_parts_of_runs_are_in_use() {
    let mut order = EvictionOrder::new(EvictionKind::Lru.into());
    (0..BLOCKS).for_each(|entry| insert(&mut order, entry));
    let all: Vec<EntryIndex> = (0..BLOCKS).rev().map(EntryIndex).collect();
    let before = order.bytes();
    for round in 0..500_u32 {
        for entry in (0..BLOCKS).filter(|entry| !(entry + round).is_multiple_of(9)) {
            order.remove(EntryIndex(entry));
        }
        order.touch_run(&all);
        (0..BLOCKS)
            .filter(|entry| !(entry + round).is_multiple_of(9))
            .for_each(|entry| insert(&mut order, entry));
    }
    assert!(order.bytes() <= 2 * before, "{} bytes, at first {before}", order.bytes());
}

#[test]
fn single_blocks_between_touches_of_a_run_share_chunks() {
    let mut order = EvictionOrder::new(EvictionPolicy { kind: EvictionKind::Lru, chains: Chains::Ignored });
    let add = |order: &mut EvictionOrder, entry: u32| {
        order.attach(EntryIndex(entry), Group(0));
        order.insert(EntryIndex(entry), &Block::default());
    };
    let run: Vec<EntryIndex> = (0..28).map(EntryIndex).collect();
    (0..28).for_each(|entry| add(&mut order, entry));
    for entry in 28..1_028 {
        add(&mut order, entry);
        order.touch_run(&run);
    }
    let singles = order.following(Group(0), None, 1_000);
    assert!(singles.iter().map(|entry| entry.0).eq(28..1_028), "the run is the newest");
    // A record has 20 bytes, a chunk 64 for 7 blocks or more.
    assert!(order.bytes() < 1_028 * 20 + (1_028 / 6) * 64, "{} bytes", order.bytes());
}
