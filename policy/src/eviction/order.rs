//! One eviction order: the lists of a policy, and the chains of blocks.
//!
//! ```text
//!           insert, attach                due, children in the tier
//! (absent) ───────────────▶ queue ──────────────────────────────▶ waiting ⇄ last resort
//!    ▲                       │  ▲                                     │
//!    │ victim, then detach   │  └────────── last child detached ──────┘
//!    └───────────────────────┘
//! ```
//!
//! **Chains.** A block that is due while it has children in the tier waits outside the queues. When its last
//! child leaves the tier, it is the next victim of its queue. So each step of a search for a victim either
//! evicts or defers a block, and a block is deferred at most once for each insertion or touch: the cost of
//! evictions is O(evicted), amortised over insertions and touches.
//!
//! **Work of one search.** A search defers or keeps at most [`PASSED_PER_SEARCH_MAX`] blocks. Then it takes, of these:
//!
//! 1. the oldest block of the first queue whose oldest block is evictable and has no children,
//! 2. the first block that this search kept,
//! 3. the block that has waited longest, children in use first. Its descendants stay without it.
//!
//! The blocks that were deferred or kept have their new place, so the next search continues behind them. Blocks in use
//! that keep their place in a queue are at most [`PLACES_IN_USE_MAX`] in a group; others lose it.
//!
//! If the queues are empty, all evictable blocks have descendants in use. Waiting for these might never end
//! (clients may pin blocks for long), so a block without an evictable child is evicted: it is on the list of
//! the last resort. A child in another group does not delay a group that has no other victim.
//!
//! Invariants: a block is in a list exactly if it is evictable, except in queues that keep the place of blocks
//! in use; [`EvictionOrder::victim`] returns evictable blocks only. A chain has no cycle: the caller links a
//! block only to one of a lower position.

use super::generations::Generations;
use super::lists::{End, ListKind, Lists, NIL, QUEUES_MAX, State};
use super::rules::{Rule, Verdict};
use super::{Block, Chains, Class, EntryIndex, EvictionPolicy, Group};

#[cfg(test)]
mod generation_tests;
#[cfg(test)]
mod run_tests;
#[cfg(test)]
mod tests;

/// Maximum number of blocks that one search for a victim defers or keeps: about 100 µs if each is a cache miss.
const PASSED_PER_SEARCH_MAX: usize = 1024;

/// Maximum number of blocks in use that keep their place in the queues of a group.
const PLACES_IN_USE_MAX: u32 = 1024;

/// Maximum number of blocks that one search for a victim examines: those that it passes, those in use, the oldest of
/// each queue, and its victim.
pub const STEPS_PER_SEARCH_MAX: u64 =
    PASSED_PER_SEARCH_MAX as u64 + PLACES_IN_USE_MAX as u64 + QUEUES_MAX as u64 + 1;

/// Eviction order of one tier.
#[derive(Debug)]
pub struct EvictionOrder {
    lists: Lists,
    rule: Rule,
    chains: Chains,
    generations: Generations,
    evictable: usize,
    /// For each group, the number of blocks in use that keep their place in a queue.
    places_in_use: Vec<u32>,
    steps: u64,
}

impl EvictionOrder {
    /// Creates an empty order.
    pub fn new(policy: EvictionPolicy) -> EvictionOrder {
        EvictionOrder::with_generations(policy, u16::MAX)
    }

    /// Creates an empty order in which an index is exhausted after this number of reuses.
    fn with_generations(policy: EvictionPolicy, last: u16) -> EvictionOrder {
        let rule = Rule::new(policy.kind);
        EvictionOrder {
            lists: Lists::new(rule.queues()),
            rule,
            chains: policy.chains,
            generations: Generations::new(last),
            evictable: 0,
            places_in_use: Vec::new(),
            steps: 0,
        }
    }

    /// Number of evictable blocks, over all groups.
    pub fn len(&self) -> usize {
        self.evictable
    }

    /// Whether no block is evictable.
    pub fn is_empty(&self) -> bool {
        self.evictable == 0
    }

    /// Whether a block is evictable.
    pub fn contains(&self, entry: EntryIndex) -> bool {
        self.lists.get(entry).is_some_and(|record| record.state.has(State::EVICTABLE))
    }

    /// Number of blocks that searches for victims have examined.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Bytes of memory for blocks, without spare capacity.
    pub fn bytes(&self) -> usize {
        self.lists.bytes() + self.rule.bytes()
    }

    /// Makes a block evictable, as the newest of its queue. The block must not be evictable.
    pub fn insert(&mut self, entry: EntryIndex, block: &Block) {
        self.remove(entry);
        self.lists.grow_to(entry);
        let len = self.lists.places();
        let queue = self.rule.queue_on_insert(entry, self.lists.record(entry), block, len);
        let kept = self.end_place_in_use(entry);
        if !kept || self.lists.group(entry) != block.group {
            self.lists.unlink(entry);
            self.lists.set_group(entry, block.group);
            self.push(entry, queue, End::Newest);
        }
        self.set_evictable(entry);
    }

    /// Moves a block before its parent if both are in the same queue: it is due first, and the parent need not
    /// wait for it. Otherwise the block becomes the newest of its queue, under policies by recency.
    pub fn settle(&mut self, entry: EntryIndex) {
        if !self.contains(entry) {
            return;
        }
        if self.rule.is_by_recency() {
            self.touch(entry);
        }
        let Some(parent) = self.parent(entry) else { return };
        let (own, other) = (self.lists.record(entry), self.lists.record(parent));
        let is_same = self.lists.group(entry) == self.lists.group(parent) && own.queue == other.queue;
        let are_queued = [own, other].iter().all(|record| record.state.list() == Some(ListKind::Queue));
        let place = (self.lists.group(entry), own.queue);
        if is_same && are_queued && self.rule.settles_before(entry, parent, place) {
            self.lists.unlink(entry);
            self.lists.push_before(entry, parent);
        }
    }

    /// Makes an evictable block, or the last victim of its queue, the next victim of its queue.
    pub fn put_first(&mut self, entry: EntryIndex) {
        if !self.contains(entry) {
            self.end_place_in_use(entry);
            self.set_evictable(entry);
        }
        self.lists.unlink(entry);
        self.rule.put_first(entry, (self.lists.group(entry), self.lists.record(entry).queue));
        self.lists.push(entry, ListKind::Queue, End::Oldest);
    }

    /// Marks a block as most recently used, if it is evictable.
    pub fn touch(&mut self, entry: EntryIndex) {
        if !self.contains(entry) {
            return;
        }
        let group = self.lists.group(entry);
        if let Some(queue) = self.rule.queue_on_touch(entry, self.lists.record(entry), group) {
            self.lists.unlink(entry);
            self.push(entry, queue, End::Newest);
        }
    }

    /// Marks blocks as most recently used, one after the other. Blocks that follow each other in a queue move together.
    pub fn touch_run(&mut self, entries: &[EntryIndex]) {
        let moves_together = self.rule.keeps_queue_on_touch();
        let mut rest = entries;
        while let Some(first) = rest.first() {
            let moved = if moves_together { self.lists.renew(rest) } else { 0 };
            if moved == 0 {
                self.touch(*first);
            }
            rest = &rest[moved.max(1)..];
        }
    }

    /// Moves an evictable block to a class under a policy with classes: before its parent if that is in the class, else
    /// as the newest. A block that is not evictable enters its class at its insertion.
    pub fn reclass(&mut self, entry: EntryIndex, class: Class) {
        if !self.contains(entry) {
            return;
        }
        let queue = self.rule.queue_of_class(class).filter(|queue| *queue != self.lists.record(entry).queue);
        if let Some(queue) = queue {
            self.lists.unlink(entry);
            self.push(entry, queue, End::Newest);
            self.settle(entry);
        }
    }

    /// Class of an evictable block under a policy with classes.
    pub fn class(&self, entry: EntryIndex) -> Option<Class> {
        let queue = self.contains(entry).then(|| self.lists.record(entry).queue)?;
        let classes = [Class::Evictable, Class::Idle, Class::Recent, Class::Active];
        classes.into_iter().find(|class| self.rule.queue_of_class(*class) == Some(queue))
    }

    /// Counts a use of a block, evictable or not.
    pub fn used(&mut self, entry: EntryIndex) {
        if self.lists.get(entry).is_none() {
            return;
        }
        if let Some(queue) = self.rule.queue_on_use(entry, self.lists.record_mut(entry)) {
            let is_listed = self.lists.record(entry).state.list().is_some();
            self.lists.unlink(entry);
            self.lists.record_mut(entry).queue = queue;
            if is_listed {
                self.lists.push(entry, ListKind::Queue, End::Newest);
            }
        }
    }

    /// Makes a block not evictable, because it is in use; does nothing if it is not evictable.
    pub fn remove(&mut self, entry: EntryIndex) {
        if !self.contains(entry) {
            return;
        }
        self.clear_evictable(entry);
        let is_queued = self.lists.record(entry).state.list() == Some(ListKind::Queue);
        if !(is_queued && self.rule.keeps_place_in_use() && self.begin_place_in_use(entry)) {
            self.lists.unlink(entry);
        }
    }

    /// Sets the parent of a block. The parent must have a lower position in its chain. A block keeps its first
    /// parent until [`EvictionOrder::forget`]. Does nothing if the parent's index is exhausted ([`super::generations`]).
    pub fn link(&mut self, entry: EntryIndex, parent: EntryIndex) {
        self.lists.grow_to(EntryIndex(entry.0.max(parent.0)));
        let may_be = self.generations.may_have_children(&self.lists, parent);
        if entry == parent || !may_be || self.parent(entry).is_some() {
            return;
        }
        let generation = self.lists.record(parent).generation;
        let record = self.lists.record_mut(entry);
        (record.parent, record.parent_generation) = (parent.0, generation);
        // Left from a parent that was forgotten.
        record.state.clear(State::COUNTED);
        if record.state.has(State::ATTACHED) {
            self.add_child(entry);
        }
    }

    /// Parent of a block, if it is known and was not forgotten.
    pub fn parent(&self, entry: EntryIndex) -> Option<EntryIndex> {
        let record = self.lists.get(entry).filter(|record| record.parent != NIL)?;
        let parent = EntryIndex(record.parent);
        (self.lists.record(parent).generation == record.parent_generation).then_some(parent)
    }

    /// Records that a block is in the tier, and not evictable yet: its parent waits for it.
    pub fn attach(&mut self, entry: EntryIndex, group: Group) {
        self.lists.grow_to(entry);
        let state = &mut self.lists.record_mut(entry).state;
        if state.has(State::ATTACHED) {
            return;
        }
        state.set(State::ATTACHED);
        if state.list().is_none() {
            self.lists.set_group(entry, group);
        }
        self.add_child(entry);
    }

    /// Records that a block is no longer in the tier.
    pub fn detach(&mut self, entry: EntryIndex) {
        if self.lists.get(entry).is_none() {
            return;
        }
        self.remove(entry);
        self.end_place_in_use(entry);
        self.lists.unlink(entry);
        let record = self.lists.record_mut(entry);
        let is_evicted = record.state.has(State::TAKEN);
        let was_attached = record.state.has(State::ATTACHED);
        record.state.clear(State::ATTACHED | State::TAKEN);
        record.state.set_uses(0);
        record.queue = 0;
        let len = self.lists.places();
        self.rule.forget(entry, is_evicted, len);
        if let Some(parent) = self.parent(entry).filter(|_| was_attached) {
            self.remove_child(parent);
        }
    }

    /// Detaches a block and forgets its chain, because its index may be reused. Children that are still in the
    /// tier have no parent any longer.
    pub fn forget(&mut self, entry: EntryIndex) {
        if self.lists.get(entry).is_none() {
            return;
        }
        self.detach(entry);
        let record = self.lists.record_mut(entry);
        (record.parent, record.children, record.evictable_children) = (NIL, 0, 0);
        self.generations.end(&mut self.lists, entry);
    }

    /// Removes and returns the next victim of a group, if any. Until it is detached, its parent waits for it.
    /// Examines at most [`STEPS_PER_SEARCH_MAX`] blocks.
    pub fn victim(&mut self, group: Group) -> Option<EntryIndex> {
        let (mut passed, mut kept) = (0, None);
        while passed < PASSED_PER_SEARCH_MAX
            && let Some(queue) = self.rule.next_queue(&self.lists, group)
        {
            self.steps += 1;
            let entry = self.lists.oldest(group, ListKind::Queue, queue).expect("the queue is occupied");
            if !self.contains(entry) {
                self.leave_in_use(entry);
                continue;
            }
            passed += 1;
            if self.waits_for_children(entry) {
                self.defer(entry);
            } else if let Verdict::Keep(queue) = self.rule.verdict(self.lists.record_mut(entry)) {
                self.lists.unlink(entry);
                self.push(entry, queue, End::Newest);
                kept = kept.or(Some(entry));
            } else {
                self.take(entry, group);
                self.read_ahead(group, queue);
                return Some(entry);
            }
            self.read_ahead(group, queue);
        }
        // Empty queues kept no block, so this is then the last resort. Blocks that wait for evictable blocks of other
        // groups only are last of all.
        let queued = self.oldest_without_children(group).or(kept);
        let lists = [ListKind::LastResort, ListKind::Waiting];
        let outside = || lists.into_iter().find_map(|list| self.lists.oldest(group, list, 0));
        let entry = queued.or_else(outside)?;
        self.steps += 1;
        Some(self.take(entry, group))
    }

    /// Returns at most `count` evictable blocks of a group, list by list and the oldest first, starting after
    /// `behind` or, without it, at the first. Empty if `behind` is not in the group. This is the order of
    /// eviction as far as lists determine it. Costs time in proportion to `count`.
    pub fn following(&self, group: Group, behind: Option<EntryIndex>, count: usize) -> Vec<EntryIndex> {
        self.lists.iter_from(group, behind).filter(|entry| self.contains(*entry)).take(count).collect()
    }

    /// Reads what the next searches in a queue will need, so that the cache misses of several blocks overlap. Reading
    /// one block at a time, as a search does, a search would wait for each of them.
    fn read_ahead(&mut self, group: Group, queue: u8) {
        let Some(chunk) = self.lists.ahead(group, queue) else { return };
        let mut read = 0;
        for entry in chunk.blocks().iter().copied().map(EntryIndex) {
            read ^= u64::from(self.lists.record(entry).children) ^ self.rule.value(entry);
        }
        // The compiler must not omit the reads because nothing depends on their values.
        std::hint::black_box(read);
    }

    /// Returns the first evictable block without children among the oldest ones of the group's queues.
    fn oldest_without_children(&mut self, group: Group) -> Option<EntryIndex> {
        let mut queues = self.lists.occupied(group);
        while queues != 0 {
            let queue = queues.trailing_zeros() as u8;
            queues &= queues - 1;
            self.steps += 1;
            let oldest = self.lists.oldest(group, ListKind::Queue, queue);
            let entry = oldest.filter(|entry| self.contains(*entry) && !self.waits_for_children(*entry));
            if entry.is_some() {
                return entry;
            }
        }
        None
    }

    /// Whether a block that is due waits for its children.
    fn waits_for_children(&self, entry: EntryIndex) -> bool {
        self.chains == Chains::DescendantsFirst && self.lists.record(entry).children > 0
    }

    fn take(&mut self, entry: EntryIndex, group: Group) -> EntryIndex {
        self.rule.taken(entry, (group, self.lists.record(entry).queue), self.lists.newer(entry));
        self.clear_evictable(entry);
        self.lists.unlink(entry);
        self.lists.record_mut(entry).state.set(State::TAKEN);
        entry
    }

    /// Removes a block that is due and in use from its queue, which it leaves for another one.
    fn leave_in_use(&mut self, entry: EntryIndex) {
        self.end_place_in_use(entry);
        self.lists.unlink(entry);
        self.lists.record_mut(entry).queue = self.rule.queue_after_use();
    }

    /// Counts a block in use that keeps its place in a queue; `false` if as many do as may.
    fn begin_place_in_use(&mut self, entry: EntryIndex) -> bool {
        let group = usize::from(self.lists.group(entry).0);
        if self.places_in_use.len() <= group {
            self.places_in_use.resize(group + 1, 0);
        }
        let places = &mut self.places_in_use[group];
        let may_keep = *places < PLACES_IN_USE_MAX;
        *places += u32::from(may_keep);
        may_keep
    }

    /// Ends the count of a block in use that kept its place; returns whether it did.
    fn end_place_in_use(&mut self, entry: EntryIndex) -> bool {
        let kept = !self.contains(entry) && self.lists.record(entry).state.list().is_some();
        if kept {
            self.places_in_use[usize::from(self.lists.group(entry).0)] -= 1;
        }
        kept
    }

    /// Moves a block that is due to the lists outside the queues.
    fn defer(&mut self, entry: EntryIndex) {
        self.lists.unlink(entry);
        let list = self.list_outside(entry);
        self.lists.push(entry, list, End::Newest);
    }

    fn list_outside(&self, entry: EntryIndex) -> ListKind {
        match self.lists.record(entry).evictable_children {
            0 => ListKind::LastResort,
            _ => ListKind::Waiting,
        }
    }

    fn push(&mut self, entry: EntryIndex, queue: u8, end: End) {
        self.lists.record_mut(entry).queue = queue;
        self.lists.push(entry, ListKind::Queue, end);
    }

    fn set_evictable(&mut self, entry: EntryIndex) {
        self.evictable += 1;
        let state = &mut self.lists.record_mut(entry).state;
        state.set(State::EVICTABLE);
        state.clear(State::TAKEN);
        if state.has(State::ATTACHED) {
            self.count_evictable(entry);
        }
    }

    fn clear_evictable(&mut self, entry: EntryIndex) {
        self.evictable -= 1;
        let state = &mut self.lists.record_mut(entry).state;
        state.clear(State::EVICTABLE);
        if !state.has(State::COUNTED) {
            return;
        }
        state.clear(State::COUNTED);
        if let Some(parent) = self.parent(entry) {
            self.lists.record_mut(parent).evictable_children -= 1;
            self.sort_outside(parent);
        }
    }

    /// Counts an evictable block as a child that its parent waits for.
    fn count_evictable(&mut self, entry: EntryIndex) {
        let Some(parent) = self.parent(entry) else { return };
        if self.lists.group(parent) == self.lists.group(entry) {
            self.lists.record_mut(entry).state.set(State::COUNTED);
            self.lists.record_mut(parent).evictable_children += 1;
            self.sort_outside(parent);
        }
    }

    /// Counts a block in the tier as a child of its parent.
    fn add_child(&mut self, entry: EntryIndex) {
        let Some(parent) = self.parent(entry) else { return };
        let record = self.lists.record_mut(parent);
        let Some(children) = record.children.checked_add(1) else {
            self.lists.record_mut(entry).parent = NIL;
            return;
        };
        record.children = children;
        let branches = children == 2;
        if self.contains(entry) {
            self.count_evictable(entry);
        }
        if branches && matches!(self.rule, Rule::Semantic) {
            self.touch(parent);
        }
    }

    /// Counts one child less, which is not evictable. A block that waited for it is the next victim.
    fn remove_child(&mut self, parent: EntryIndex) {
        let record = self.lists.record_mut(parent);
        record.children -= 1;
        let is_outside = matches!(record.state.list(), Some(ListKind::Waiting | ListKind::LastResort));
        if is_outside && record.children == 0 {
            self.lists.unlink(parent);
            self.lists.push(parent, ListKind::Queue, End::Oldest);
        }
    }

    /// Moves a block outside the queues to the list that its children require.
    fn sort_outside(&mut self, entry: EntryIndex) {
        let list = self.lists.record(entry).state.list();
        let wanted = self.list_outside(entry);
        if matches!(list, Some(ListKind::Waiting | ListKind::LastResort)) && list != Some(wanted) {
            self.lists.unlink(entry);
            self.lists.push(entry, wanted, End::Newest);
        }
    }
}
