//! Rules of the policies: the queue of a block, and the queue to evict from.
//!
//! | policy | queues | enters | leaves next |
//! |---|---|---|---|
//! | `lru` | 1 | as newest | oldest |
//! | `priority_lru` | one per class | its class | lowest class |
//! | `lfu` | one per number of uses, to 63 | 0 uses | fewest uses |
//! | `semantic` | unshared, shared | by children and uses | unshared first |
//! | `s3_fifo` | small, main | small; main if evicted recently | small while it has over a tenth of the blocks |
//! | `cost_aware` | half octaves of value | by its value | lowest height |
//!
//! **`semantic`** (CASCADE, eq. 4). A block is shared if it has two children in the tier, so two chains
//! continue from it, or if it was used after its commit. Ancestors of a shared block stay because chains do.
//!
//! **`s3_fifo`** (Yang et al., SOSP 2023). Hits only count uses, up to 3. A block leaves the small queue for the
//! main one if it was used twice; in the main queue, each use is another round.
//!
//! **`cost_aware`** (GreedyDual-Size, Cao and Irani 1997). The loss of an eviction is the time to bring the block
//! back, times the probability of its reuse, divided by the freed bytes. The probability is observed per
//! position, in powers of two, and for all blocks of unknown position together. A block's height is the height of
//! the last victim plus its value; the lowest height is evicted. Values are rounded to half octaves, so heights
//! ascend within a queue, and the minimum is among at most 64 oldest blocks.

use super::ghosts::Ghosts;
use super::lists::{ListKind, Lists, NIL, QUEUES_MAX, Record};
use super::{Block, Class, EntryIndex, EvictionKind, Group};

/// Small queue of S3-FIFO.
const SMALL: u8 = 0;

/// Main queue of S3-FIFO.
const MAIN: u8 = 1;

/// The small queue is evicted from while it has more than one in this many blocks of the group.
const SMALL_SHARE: u32 = 10;

/// Uses in the small queue that move a block to the main one.
const USES_TO_MAIN: u8 = 2;

/// Position buckets: powers of two up to 2^16 blocks, a million tokens of 16-token blocks.
const POSITIONS: usize = 17;

/// Bucket of blocks whose position is not known.
const POSITION_UNKNOWN: usize = POSITIONS;

/// Bits of a position's bucket, and of no bucket, next to a height.
const POSITION_BITS: u32 = 5;

const _: () = assert!(POSITION_UNKNOWN + 1 < 1 << POSITION_BITS, "a bucket fits next to a height");

/// Maximum height: 2^27 victims of the largest value.
const HEIGHT_MAX: u64 = u64::MAX >> POSITION_BITS;

/// Observations of a position after which old ones count half.
const OBSERVATIONS_MAX: u32 = 1 << 16;

/// A policy's own state.
#[derive(Debug)]
pub(super) enum Rule {
    Lru,
    Lfu,
    PriorityLru,
    Semantic,
    S3Fifo(S3Fifo),
    CostAware(CostAware),
}

/// What to do with the oldest block of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Evict,
    /// Moves the block to this queue, as the newest.
    Keep(u8),
}

/// State of S3-FIFO: 4 bytes per block, and the ghosts.
#[derive(Debug, Default)]
pub(super) struct S3Fifo {
    /// Hashes of the keys in the order; 0: none.
    hashes: Vec<u32>,
    ghosts: Ghosts,
    /// The last block that entered, and the one before it.
    last: Option<(EntryIndex, EntryIndex)>,
}

/// State of the cost-aware policy: 8 bytes per block.
#[derive(Debug, Default)]
pub(super) struct CostAware {
    values: Vec<Value>,
    /// Height of the last victim of each group.
    heights: Vec<u64>,
    /// Oldest block of each queue of each group and its height, as far as known. A search for a victim compares all
    /// queues: from here it costs no cache miss for each.
    heads: Vec<Head>,
    reuse: [Reuse; POSITIONS + 1],
}

/// Height of a block, and the bucket of its position; 0 stands for a block that was never inserted. The queue of the
/// block has the increment.
#[derive(Clone, Copy, Debug, Default)]
struct Value(u64);

/// Height of a block that is or was the oldest of its queue.
#[derive(Clone, Copy, Debug)]
struct Head {
    entry: u32,
    height: u64,
}

/// Observed reuse at a position.
#[derive(Clone, Copy, Debug, Default)]
struct Reuse {
    blocks: u32,
    reused: u32,
}

impl Rule {
    pub(super) fn new(kind: EvictionKind) -> Rule {
        match kind {
            EvictionKind::Lru => Rule::Lru,
            EvictionKind::Lfu => Rule::Lfu,
            EvictionKind::PriorityLru => Rule::PriorityLru,
            EvictionKind::Semantic => Rule::Semantic,
            EvictionKind::S3Fifo => Rule::S3Fifo(S3Fifo::default()),
            EvictionKind::CostAware => Rule::CostAware(CostAware::default()),
        }
    }

    /// Number of queues of a group.
    pub(super) fn queues(&self) -> usize {
        match self {
            Rule::Lru => 1,
            Rule::PriorityLru => 4,
            Rule::Semantic | Rule::S3Fifo(_) => 2,
            Rule::Lfu | Rule::CostAware(_) => QUEUES_MAX,
        }
    }

    /// Whether a block in use keeps its place, because the order is not one of recency.
    pub(super) fn keeps_place_in_use(&self) -> bool {
        matches!(self, Rule::S3Fifo(_))
    }

    /// Whether the order is one of recency within a queue.
    pub(super) fn is_by_recency(&self) -> bool {
        matches!(self, Rule::Lru | Rule::Lfu | Rule::PriorityLru | Rule::Semantic)
    }

    /// What the policy alone knows of a block, as a number: reading it ahead brings it into the processor's cache.
    pub(super) fn value(&self, entry: EntryIndex) -> u64 {
        let at = entry.0 as usize;
        match self {
            Rule::Lru | Rule::Lfu | Rule::PriorityLru | Rule::Semantic => 0,
            Rule::S3Fifo(rule) => rule.hashes.get(at).map_or(0, |hash| u64::from(*hash)),
            Rule::CostAware(rule) => rule.values.get(at).map_or(0, |value| value.0),
        }
    }

    /// Whether a block may move before its parent in their queue of a group; adapts it to its place there.
    pub(super) fn settles_before(
        &mut self,
        entry: EntryIndex,
        parent: EntryIndex,
        (group, queue): (Group, u8),
    ) -> bool {
        match self {
            Rule::Lru | Rule::Lfu | Rule::PriorityLru | Rule::Semantic => true,
            // Blocks that enter at the same time, as those of a commit do, may enter in any order.
            Rule::S3Fifo(rule) => rule.last == Some((entry, parent)),
            Rule::CostAware(rule) => rule.lower_to(entry, parent, (group, queue)),
        }
    }

    /// Returns the queue that a block enters as the newest.
    pub(super) fn queue_on_insert(
        &mut self,
        entry: EntryIndex,
        record: &Record,
        block: &Block,
        len: usize,
    ) -> u8 {
        match self {
            Rule::Lru => 0,
            Rule::Lfu => record.queue,
            Rule::PriorityLru => block.class as u8,
            Rule::Semantic => shared_queue(record),
            Rule::S3Fifo(rule) => rule.queue_on_insert(entry, record, block, len),
            Rule::CostAware(rule) => rule.queue_on_insert(entry, block),
        }
    }

    /// Returns the queue that a block enters as the newest because it was touched; `None` if it keeps its place.
    pub(super) fn queue_on_touch(&mut self, entry: EntryIndex, record: &Record, group: Group) -> Option<u8> {
        match self {
            Rule::Lru | Rule::Lfu | Rule::PriorityLru => Some(record.queue),
            Rule::Semantic => Some(shared_queue(record)),
            Rule::S3Fifo(_) => None,
            Rule::CostAware(rule) => {
                rule.raise(entry, group, record.queue);
                Some(record.queue)
            }
        }
    }

    /// Whether a touched block becomes the newest of the queue that it is in, and nothing else changes.
    pub(super) fn keeps_queue_on_touch(&self) -> bool {
        matches!(self, Rule::Lru | Rule::Lfu | Rule::PriorityLru)
    }

    /// Returns the queue of a class; `None` if the policy has no classes.
    pub(super) fn queue_of_class(&self, class: Class) -> Option<u8> {
        matches!(self, Rule::PriorityLru).then_some(class as u8)
    }

    /// Counts a use; returns the queue that the block moves to, if it moves.
    pub(super) fn queue_on_use(&mut self, entry: EntryIndex, record: &mut Record) -> Option<u8> {
        let uses = record.state.uses();
        record.state.set_uses(uses.saturating_add(1));
        match self {
            Rule::Lru | Rule::PriorityLru | Rule::S3Fifo(_) => None,
            Rule::Lfu => Some((record.queue + 1).min(QUEUES_MAX as u8 - 1)),
            Rule::Semantic => Some(shared_queue(record)),
            Rule::CostAware(rule) => {
                if uses == 0 {
                    rule.count_reuse(entry);
                }
                None
            }
        }
    }

    /// Returns the queue to evict from next; `None` if all queues of the group are empty.
    pub(super) fn next_queue(&mut self, lists: &Lists, group: Group) -> Option<u8> {
        let occupied = lists.occupied(group);
        let first = (occupied != 0).then(|| occupied.trailing_zeros() as u8)?;
        match self {
            Rule::Lru | Rule::Lfu | Rule::PriorityLru | Rule::Semantic => Some(first),
            Rule::S3Fifo(_) => {
                let [small, main] = [SMALL, MAIN].map(|queue| lists.queue_len(group, queue));
                Some(if main == 0 || small > (small + main) / SMALL_SHARE { SMALL } else { MAIN })
            }
            Rule::CostAware(rule) => rule.lowest(lists, group, occupied),
        }
    }

    /// Decides about the oldest block of a queue.
    pub(super) fn verdict(&mut self, record: &mut Record) -> Verdict {
        let uses = record.state.uses();
        match self {
            Rule::S3Fifo(_) if record.queue == SMALL && uses >= USES_TO_MAIN => {
                record.state.set_uses(0);
                Verdict::Keep(MAIN)
            }
            Rule::S3Fifo(_) if record.queue == MAIN && uses > 0 => {
                record.state.set_uses(uses - 1);
                Verdict::Keep(MAIN)
            }
            _ => Verdict::Evict,
        }
    }

    /// Returns the queue that a block enters which was due while it was in use.
    pub(super) fn queue_after_use(&self) -> u8 {
        MAIN
    }

    /// Records that a block is taken as a victim, and its successor in its queue of a group.
    pub(super) fn taken(&mut self, entry: EntryIndex, (group, queue): (Group, u8), next: Option<EntryIndex>) {
        if let Rule::CostAware(rule) = self {
            let height = rule.height(entry);
            let last = rule.height_mut(group);
            *last = height.max(*last);
            if let Some(next) = next {
                *rule.head_mut(group, queue) = Head { entry: next.0, height: rule.height(next) };
            }
        }
    }

    /// Lowers a block that becomes the next victim of its queue of a group.
    pub(super) fn put_first(&mut self, entry: EntryIndex, (group, queue): (Group, u8)) {
        if let Rule::CostAware(rule) = self {
            let height = *rule.height_mut(group);
            rule.set_height(entry, (group, queue), height);
        }
    }

    /// Forgets a block, whose index may be reused. An evicted one may return to S3-FIFO's main queue.
    pub(super) fn forget(&mut self, entry: EntryIndex, is_evicted: bool, len: usize) {
        match self {
            Rule::Lru | Rule::Lfu | Rule::PriorityLru | Rule::Semantic => {}
            Rule::S3Fifo(S3Fifo { hashes, ghosts, .. }) => {
                let hash = hashes.get_mut(entry.0 as usize).map_or(0, std::mem::take);
                if is_evicted && hash != 0 {
                    ghosts.add(hash, len);
                }
            }
            Rule::CostAware(rule) => {
                if let Some(value) = rule.values.get_mut(entry.0 as usize) {
                    *value = Value::default();
                }
            }
        }
    }

    /// Bytes of memory in addition to records and lists.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Rule::Lru | Rule::Lfu | Rule::PriorityLru | Rule::Semantic => 0,
            Rule::S3Fifo(rule) => rule.hashes.len() * size_of::<u32>() + rule.ghosts.bytes(),
            Rule::CostAware(rule) => rule.values.len() * size_of::<Value>(),
        }
    }
}

/// Queue of the semantic policy.
fn shared_queue(record: &Record) -> u8 {
    u8::from(record.children > 1 || record.state.uses() > 0)
}

impl S3Fifo {
    fn queue_on_insert(&mut self, entry: EntryIndex, record: &Record, block: &Block, len: usize) -> u8 {
        let at = entry.0 as usize;
        if self.hashes.len() <= at {
            self.hashes.resize(at + 1, 0);
        }
        // 0 stands for no block.
        let hash = ((block.key_hash ^ block.key_hash >> 32) as u32).max(1);
        if std::mem::replace(&mut self.hashes[at], hash) == hash {
            return record.queue;
        }
        self.last = Some((entry, self.last.map_or(entry, |(last, _)| last)));
        if self.ghosts.take(hash, len) { MAIN } else { SMALL }
    }
}

impl CostAware {
    fn queue_on_insert(&mut self, entry: EntryIndex, block: &Block) -> u8 {
        let at = entry.0 as usize;
        if self.values.len() <= at {
            self.values.resize(at + 1, Value::default());
        }
        let position = block.position.map_or(POSITION_UNKNOWN, bucket);
        if self.values[at].position().is_none() {
            self.reuse[position].observe();
        }
        let probability = self.reuse[position].per_1024();
        let value = block.restore_ns.saturating_mul(probability) / (block.bytes >> 10).max(1);
        let queue = half_octave(u32::try_from(value).unwrap_or(u32::MAX));
        self.values[at] = Value::new(0, position);
        self.raise(entry, block.group, queue);
        queue
    }

    /// Raises a block to the height of a new one of its queue.
    fn raise(&mut self, entry: EntryIndex, group: Group, queue: u8) {
        let height = self.height_mut(group).saturating_add(u64::from(increment(queue)));
        self.set_height(entry, (group, queue), height.min(HEIGHT_MAX));
    }

    /// Lowers a block to the height of another one in its queue; returns whether the heights then ascend.
    fn lower_to(&mut self, entry: EntryIndex, other: EntryIndex, place: (Group, u8)) -> bool {
        let [own, height] = [entry, other].map(|entry| self.height(entry));
        if own >= height {
            self.set_height(entry, place, height);
        }
        own >= height
    }

    fn height(&self, entry: EntryIndex) -> u64 {
        self.values[entry.0 as usize].height()
    }

    /// Sets the height of a block; the facts known of the head of its queue are then no longer valid for it.
    fn set_height(&mut self, entry: EntryIndex, (group, queue): (Group, u8), height: u64) {
        let value = &mut self.values[entry.0 as usize];
        *value = value.with_height(height);
        let head = self.head_mut(group, queue);
        if head.entry == entry.0 {
            head.entry = NIL;
        }
    }

    fn head_mut(&mut self, group: Group, queue: u8) -> &mut Head {
        let at = usize::from(group.0) * QUEUES_MAX + usize::from(queue);
        if self.heads.len() <= at {
            self.heads.resize((usize::from(group.0) + 1) * QUEUES_MAX, Head { entry: NIL, height: 0 });
        }
        &mut self.heads[at]
    }

    fn count_reuse(&mut self, entry: EntryIndex) {
        if let Some(position) = self.values.get(entry.0 as usize).and_then(|value| value.position()) {
            self.reuse[position].reused += 1;
        }
    }

    fn height_mut(&mut self, group: Group) -> &mut u64 {
        let at = usize::from(group.0);
        if self.heights.len() <= at {
            self.heights.resize(at + 1, 0);
        }
        &mut self.heights[at]
    }

    /// Returns the queue whose oldest block has the lowest height.
    fn lowest(&mut self, lists: &Lists, group: Group, occupied: u64) -> Option<u8> {
        let mut lowest: Option<(u64, u8)> = None;
        let mut rest = occupied;
        while rest != 0 {
            let queue = rest.trailing_zeros() as u8;
            rest &= rest - 1;
            let oldest = lists.oldest(group, ListKind::Queue, queue).expect("the queue is occupied");
            let head = *self.head_mut(group, queue);
            let height = if head.entry == oldest.0 {
                debug_assert_eq!(head.height, self.height(oldest), "queue {queue}");
                head.height
            } else {
                let height = self.height(oldest);
                *self.head_mut(group, queue) = Head { entry: oldest.0, height };
                height
            };
            if lowest.is_none_or(|(other, _)| height < other) {
                lowest = Some((height, queue));
            }
        }
        lowest.map(|(_, queue)| queue)
    }
}

impl Value {
    fn new(height: u64, position: usize) -> Value {
        Value(height << POSITION_BITS | (position as u64 + 1))
    }

    fn height(self) -> u64 {
        self.0 >> POSITION_BITS
    }

    fn with_height(self, height: u64) -> Value {
        Value(height << POSITION_BITS | self.0 & ((1 << POSITION_BITS) - 1))
    }

    /// Bucket of the position; `None` if the block was never inserted.
    fn position(self) -> Option<usize> {
        ((self.0 & ((1 << POSITION_BITS) - 1)) as usize).checked_sub(1)
    }
}

impl Reuse {
    fn observe(&mut self) {
        if self.blocks >= OBSERVATIONS_MAX {
            (self.blocks, self.reused) = (self.blocks / 2, self.reused / 2);
        }
        self.blocks += 1;
    }

    /// Probability of reuse, in 1024ths; one half without observations.
    fn per_1024(self) -> u64 {
        (u64::from(self.reused.min(self.blocks)) + 1) * 1024 / (u64::from(self.blocks) + 2)
    }
}

/// Bucket of a known position.
fn bucket(position: u32) -> usize {
    (position.saturating_add(1).ilog2() as usize).min(POSITIONS - 1)
}

/// Returns the queue of a value.
fn half_octave(value: u32) -> u8 {
    let octave = value.max(1).ilog2();
    let half = (1u32 << octave) + (1u32 << octave) / 2;
    (2 * octave + u32::from(octave > 0 && value >= half)) as u8
}

/// Lower bound of the values of a queue, at least 1: what a block is higher than the last victim when it enters.
fn increment(queue: u8) -> u32 {
    let floor = 1u32 << (queue / 2);
    if queue.is_multiple_of(2) { floor } else { floor + floor / 2 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_a_queue_have_one_increment_which_identifies_the_queue() {
        for value in [0, 1, 2, 3, 4, 5, 6, 7, 1000, 175_000, u32::MAX] {
            let queue = half_octave(value);
            assert!(usize::from(queue) < QUEUES_MAX && increment(queue) <= value.max(1));
            assert_eq!(half_octave(increment(queue)), queue, "of {value}");
        }
    }

    #[test]
    fn probability_of_reuse_follows_observations() {
        let mut reuse = Reuse::default();
        assert_eq!(reuse.per_1024(), 512);
        (0..100_000).for_each(|_| reuse.observe());
        assert!(reuse.per_1024() < 10);
        reuse.reused = reuse.blocks;
        assert!(reuse.per_1024() > 1000);
    }
}
