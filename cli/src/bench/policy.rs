//! Cost of evictions, and memory per block, for every eviction policy.
//!
//! The orders of the agent run without payloads, on one thread. Conversations of [`CHAIN_BLOCKS`] blocks come and
//! go; at each step, the order evicts as many blocks as a new conversation needs. Between steps, an older
//! conversation is used again. The new blocks get the indices of the evicted ones, as in the agent's index. The
//! indices are in random order at first, so the blocks of a conversation lie apart in memory.
//!
//! Only evictions are in the measured time: from the search for a victim to the end of its record. Insertions and
//! uses are reported separately, because evictions are amortised over them.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use reprise_policy::eviction::restore_cost::{RestoreFrom, restore_ns};
use reprise_policy::eviction::{Block, Class, EntryIndex, EvictionKind, EvictionOrder, Group};
use reprise_testkit::bench::Settings;
use reprise_testkit::bench::report::{Figure, Target, median};

/// Blocks of a conversation: 1,024 tokens of 16-token blocks.
const CHAIN_BLOCKS: usize = 64;

/// Bytes of memory for a block in this benchmark, while it runs.
pub(super) const BYTES_PER_BLOCK: u64 = 96;

/// Upper bound of the time of an eviction.
const EVICTION_NS_MAX: f64 = 300.0;

/// One order, and the conversations in it.
struct Churn {
    order: EvictionOrder,
    /// Key of the block at each index; 0: none.
    keys: Vec<u64>,
    /// Blocks of recent conversations, in chain order; only those that are not evicted yet are used again.
    recent: Vec<[(u32, u64); CHAIN_BLOCKS]>,
    free: Vec<u32>,
    next_key: u64,
    random: u64,
    spent: Spent,
}

/// Time of each kind of call.
#[derive(Clone, Copy, Debug, Default)]
struct Spent {
    evictions: Duration,
    insertions: Duration,
    uses: Duration,
    blocks: u64,
    used: u64,
}

pub(super) fn run(entries: usize, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
    ensure!(
        entries >= 16 * CHAIN_BLOCKS,
        "invalid --entries {entries}: expected at least {}",
        16 * CHAIN_BLOCKS
    );
    let mut figures = Vec::new();
    for kind in EvictionKind::ALL {
        let mut churn = Churn::new(kind, entries)?;
        churn.turn_over(entries)?;
        let (mut evictions, mut insertions, mut uses) = (Vec::new(), Vec::new(), Vec::new());
        for _ in settings.rounds(kind.name()) {
            churn.spent = Spent::default();
            churn.turn_over(entries / 10)?;
            let Spent { evictions: evicting, insertions: inserting, uses: using, blocks, used } = churn.spent;
            let per = |spent: Duration, count: u64| spent.as_secs_f64() * 1e9 / count.max(1) as f64;
            evictions.push(per(evicting, blocks));
            insertions.push(per(inserting, blocks));
            uses.push(per(using, used));
        }
        let name = |what: &str| format!("policy.{}_{what}_{entries}_entries", kind.name());
        let bytes = churn.order.bytes() as f64 / entries as f64;
        figures.extend([
            Figure::absolute(name("eviction"), median(evictions), "ns", Target::AtMost(EVICTION_NS_MAX)),
            Figure::absolute(name("insertion"), median(insertions), "ns", Target::None),
            Figure::absolute(name("use"), median(uses), "ns", Target::None),
            Figure::absolute(name("bytes"), bytes, "bytes", Target::None),
        ]);
    }
    Ok(figures)
}

impl Churn {
    /// Fills an order with conversations of this policy.
    fn new(kind: EvictionKind, entries: usize) -> anyhow::Result<Churn> {
        let mut churn = Churn {
            order: EvictionOrder::new(kind.into()),
            keys: vec![0; entries],
            recent: Vec::new(),
            free: (0..u32::try_from(entries).context("--entries has more than 32 bits")?).rev().collect(),
            next_key: 1,
            random: 0x9e37_79b9_7f4a_7c15,
            spent: Spent::default(),
        };
        // Neighbours in a chain are as far apart as after a long time of evictions.
        for at in (1..entries).rev() {
            let other = churn.below(at + 1);
            churn.free.swap(at, other);
        }
        while churn.free.len() >= CHAIN_BLOCKS {
            churn.save();
        }
        Ok(churn)
    }

    /// Evicts this number of blocks, in steps of a conversation.
    fn turn_over(&mut self, blocks: usize) -> anyhow::Result<()> {
        for _ in 0..blocks / CHAIN_BLOCKS {
            let mut victims = [0; CHAIN_BLOCKS];
            let started = Instant::now();
            for place in &mut victims {
                let victim = self.order.victim(Group(0)).context("the order has no victim")?;
                self.order.forget(victim);
                *place = victim.0;
            }
            self.spent.evictions += started.elapsed();
            victims.iter().for_each(|victim| self.keys[*victim as usize] = 0);
            self.free.extend(victims);
            self.use_again();
            self.save();
        }
        Ok(())
    }

    /// Adds a new conversation to the order.
    fn save(&mut self) {
        let key = self.next_key;
        let blocks: [(u32, u64); CHAIN_BLOCKS] =
            std::array::from_fn(|at| (self.free.pop().expect("as many were evicted"), key + at as u64));
        self.next_key += CHAIN_BLOCKS as u64;
        let class = [Class::Evictable, Class::Recent, Class::Active][self.below(3)];
        let started = Instant::now();
        for (position, (entry, key_hash)) in (0..).zip(blocks) {
            let entry = EntryIndex(entry);
            if position > 0 {
                self.order.link(entry, EntryIndex(blocks[position as usize - 1].0));
            }
            self.order.attach(entry, Group(0));
            let bytes = 2 << 20;
            let restore_ns = restore_ns(RestoreFrom::Recompute, bytes, 16);
            let block =
                Block { group: Group(0), class, key_hash, bytes, position: Some(position), restore_ns };
            self.order.insert(entry, &block);
            self.order.settle(entry);
        }
        self.spent.insertions += started.elapsed();
        self.spent.blocks += CHAIN_BLOCKS as u64;
        for (entry, key) in blocks {
            self.keys[entry as usize] = key;
        }
        // A quarter of the conversations in the order may be used again.
        if self.recent.len() < self.keys.len() / CHAIN_BLOCKS / 4 {
            self.recent.push(blocks);
        } else {
            let at = self.below(self.recent.len());
            self.recent[at] = blocks;
        }
    }

    /// Uses the remaining part of a conversation again, from its end as the agent does.
    fn use_again(&mut self) {
        let at = self.below(self.recent.len());
        let conversation = self.recent[at];
        let here = conversation.iter().take_while(|(entry, key)| self.keys[*entry as usize] == *key).count();
        let started = Instant::now();
        for (entry, _) in conversation[..here].iter().rev() {
            self.order.used(EntryIndex(*entry));
            self.order.touch(EntryIndex(*entry));
        }
        self.spent.uses += started.elapsed();
        self.spent.used += here as u64;
    }

    /// Returns a number below a bound, from a linear congruential generator.
    fn below(&mut self, bound: usize) -> usize {
        self.random =
            self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 33) as usize % bound
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_keeps_its_size_while_conversations_come_and_go() {
        for kind in EvictionKind::ALL {
            let mut churn = Churn::new(kind, 4096).expect("a number of entries");
            churn.turn_over(8192).expect("victims");
            assert_eq!(churn.order.len(), 4096, "{kind:?}");
            assert_eq!(churn.spent.blocks, 4096 + 8192);
            assert!(churn.spent.used > 0, "{kind:?}: no conversation was used again");
        }
    }
}
