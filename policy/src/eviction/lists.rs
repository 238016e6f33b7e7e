//! Lists of blocks, in one slab.
//!
//! A block is in at most one list, which is one of its group. A record has 20 bytes: the chunk of the list
//! ([`super::chunks`]), the chain, and the list. Every operation is O(1): it moves at most [`CHUNK_BLOCKS`] blocks between
//! chunks. Memory is allocated only for the largest index so far, for chunks, and for the first block of a group.
//!
//! ```text
//! lists of a group:  queue 0 … queue 63 of the policy │ waiting │ last resort
//! in each list:      [oldest …] ⇄ [ … ] ⇄ [ … newest]
//! ```
//!
//! A chunk that has few blocks left joins a neighbour, so two adjacent chunks have at least [`JOINED_MAX`] blocks in
//! common, unless one of them lost its neighbour since.

use super::chunks::{CHUNK_BLOCKS, Chunk, Chunks, Ends};
use super::{EntryIndex, Group};

/// End marker of a list, and the parent of a block without one. Indices are smaller.
pub(super) const NIL: u32 = u32::MAX;

/// Maximum number of queues of a policy: the queues that are not empty are bits of one word.
pub(super) const QUEUES_MAX: usize = 64;

/// A chunk with at most this number of blocks joins a neighbour, if the chunk then has at most [`JOINED_MAX`].
const JOINING_MAX: usize = 6;

/// Maximum number of blocks of a joined chunk, so that there is room for others.
const JOINED_MAX: usize = 12;

/// The second chunk of a queue is read ahead when the first one has at most this number of blocks: before both join.
const AHEAD: usize = JOINING_MAX + 1;

const EMPTY: List = List { ends: Ends { oldest: NIL, newest: NIL }, len: 0, ahead: NIL };

/// State of one block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    /// Chunk of the list that the block is in.
    chunk: u32,
    pub(super) parent: u32,
    /// Children in the tier; a block that would be one more has no parent.
    pub(super) children: u16,
    /// Those of `children` that are evictable and of the same group.
    pub(super) evictable_children: u16,
    /// Number of times that the index was reused ([`super::generations`]).
    pub(super) generation: u16,
    /// Generation of the parent when it was linked: another one means that the parent is gone.
    pub(super) parent_generation: u16,
    group: u16,
    /// Queue of the policy: where the block is, or returns to.
    pub(super) queue: u8,
    pub(super) state: State,
}

/// Flags and the number of uses, in one byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct State(u8);

/// Which list of its group a block is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListKind {
    /// The queue in the record.
    Queue,
    /// The block was due, and has evictable descendants.
    Waiting,
    /// The block was due, and all its children in the tier are in use.
    LastResort,
}

/// End of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Oldest,
    Newest,
}

/// Ends and length of one list.
#[derive(Clone, Copy, Debug)]
struct List {
    ends: Ends,
    /// Number of blocks.
    len: u32,
    /// Chunk that [`Lists::ahead`] returned last.
    ahead: u32,
}

/// Records of all blocks, and the lists of all groups.
#[derive(Debug)]
pub(super) struct Lists {
    records: Vec<Record>,
    chunks: Chunks,
    lists: Vec<List>,
    /// For each group, the queues that are not empty.
    occupied: Vec<u64>,
    queues: usize,
}

const _: () = assert!(size_of::<Record>() == 20, "memory per block is part of the design");

const NEW: Record = Record {
    chunk: NIL,
    parent: NIL,
    children: 0,
    evictable_children: 0,
    generation: 0,
    parent_generation: 0,
    group: 0,
    queue: 0,
    state: State(0),
};

impl State {
    const USES: u8 = 0b0000_0011;
    const LIST: u8 = 0b0000_1100;
    /// Whether the block is in the tier.
    pub(super) const ATTACHED: u8 = 0b0001_0000;
    /// Whether the block may be evicted.
    pub(super) const EVICTABLE: u8 = 0b0010_0000;
    /// Whether the block was the last victim taken from its queue.
    pub(super) const TAKEN: u8 = 0b0100_0000;
    /// Whether the block counts as an evictable child of its parent.
    pub(super) const COUNTED: u8 = 0b1000_0000;

    pub(super) fn has(self, flag: u8) -> bool {
        self.0 & flag != 0
    }

    pub(super) fn set(&mut self, flag: u8) {
        self.0 |= flag;
    }

    pub(super) fn clear(&mut self, flag: u8) {
        self.0 &= !flag;
    }

    /// Number of uses, at most 3.
    pub(super) fn uses(self) -> u8 {
        self.0 & State::USES
    }

    pub(super) fn set_uses(&mut self, uses: u8) {
        self.0 = (self.0 & !State::USES) | uses.min(State::USES);
    }

    /// List of the block; `None` if it is in no list.
    pub(super) fn list(self) -> Option<ListKind> {
        match (self.0 & State::LIST) >> 2 {
            0 => None,
            1 => Some(ListKind::Queue),
            2 => Some(ListKind::Waiting),
            _ => Some(ListKind::LastResort),
        }
    }

    fn set_list(&mut self, list: Option<ListKind>) {
        let bits = match list {
            None => 0,
            Some(ListKind::Queue) => 1,
            Some(ListKind::Waiting) => 2,
            Some(ListKind::LastResort) => 3,
        };
        self.0 = (self.0 & !State::LIST) | bits << 2;
    }
}

impl Lists {
    /// Creates empty lists for a policy with this number of queues.
    pub(super) fn new(queues: usize) -> Lists {
        assert!((1..=QUEUES_MAX).contains(&queues), "a policy has 1 to {QUEUES_MAX} queues");
        Lists { records: Vec::new(), chunks: Chunks::new(), lists: Vec::new(), occupied: Vec::new(), queues }
    }

    /// Bytes of records and chunks, without spare capacity.
    pub(super) fn bytes(&self) -> usize {
        self.records.len() * size_of::<Record>() + self.chunks.bytes()
    }

    /// Number of records, used or not.
    pub(super) fn places(&self) -> usize {
        self.records.len()
    }

    /// Grows the slab to include a block.
    pub(super) fn grow_to(&mut self, entry: EntryIndex) {
        assert!(entry.0 != NIL, "entry index {NIL} is reserved");
        let wanted = entry.0 as usize + 1;
        if self.records.len() < wanted {
            self.records.resize(wanted, NEW);
        }
    }

    pub(super) fn get(&self, entry: EntryIndex) -> Option<&Record> {
        self.records.get(entry.0 as usize)
    }

    pub(super) fn record(&self, entry: EntryIndex) -> &Record {
        &self.records[entry.0 as usize]
    }

    pub(super) fn record_mut(&mut self, entry: EntryIndex) -> &mut Record {
        &mut self.records[entry.0 as usize]
    }

    /// Iterates the records, starting at an index.
    pub(super) fn records_from(&mut self, first: usize) -> impl Iterator<Item = &mut Record> {
        self.records.iter_mut().skip(first)
    }

    /// Group of a block that was inserted once.
    pub(super) fn group(&self, entry: EntryIndex) -> Group {
        Group(self.record(entry).group)
    }

    /// Sets the group of a block that is in no list.
    pub(super) fn set_group(&mut self, entry: EntryIndex, group: Group) {
        debug_assert!(self.record(entry).state.list().is_none(), "the block moves to other lists");
        let groups = usize::from(group.0) + 1;
        if self.occupied.len() < groups {
            self.occupied.resize(groups, 0);
            self.lists.resize(groups * (self.queues + 2), EMPTY);
        }
        self.record_mut(entry).group = group.0;
    }

    /// Queues of a group that are not empty, as bits.
    pub(super) fn occupied(&self, group: Group) -> u64 {
        self.occupied.get(usize::from(group.0)).copied().unwrap_or(0)
    }

    /// Number of blocks in a queue.
    pub(super) fn queue_len(&self, group: Group, queue: u8) -> u32 {
        self.lists.get(self.at(group, ListKind::Queue, queue)).map_or(0, |list| list.len)
    }

    /// Oldest block of a list.
    pub(super) fn oldest(&self, group: Group, list: ListKind, queue: u8) -> Option<EntryIndex> {
        let chunk = self.lists.get(self.at(group, list, queue))?.ends.oldest;
        (chunk != NIL).then(|| EntryIndex(self.chunks.get(chunk).oldest()))
    }

    /// Block after another one in its queue, if that is in a queue.
    pub(super) fn newer(&self, entry: EntryIndex) -> Option<EntryIndex> {
        let record = self.record(entry);
        if record.state.list() != Some(ListKind::Queue) {
            return None;
        }
        let chunk = self.chunks.get(record.chunk);
        let first_of_next = || (chunk.newer != NIL).then(|| self.chunks.get(chunk.newer).oldest());
        chunk.after(chunk.place(entry.0)).or_else(first_of_next).map(EntryIndex)
    }

    /// Returns the second chunk of a queue, once, when the first one has few blocks left.
    pub(super) fn ahead(&mut self, group: Group, queue: u8) -> Option<Chunk> {
        let at = self.at(group, ListKind::Queue, queue);
        let list = self.lists.get_mut(at).filter(|list| list.ends.oldest != list.ends.newest)?;
        let first = self.chunks.get(list.ends.oldest);
        if list.ahead == first.newer || first.len() > AHEAD {
            return None;
        }
        list.ahead = first.newer;
        Some(*self.chunks.get(first.newer))
    }

    /// Adds a block that is in no list to an end of one of its group's lists.
    pub(super) fn push(&mut self, entry: EntryIndex, kind: ListKind, end: End) {
        let Record { group, queue, state, .. } = *self.record(entry);
        debug_assert!(state.list().is_none(), "a block is in one list");
        let at = self.at(Group(group), kind, queue);
        let List { ends, len, .. } = &mut self.lists[at];
        *len += 1;
        let last = match end {
            End::Oldest => ends.oldest,
            End::Newest => ends.newest,
        };
        let chunk = match end {
            _ if last != NIL && !self.chunks.get(last).is_full() => last,
            End::Oldest => self.chunks.add(ends, (NIL, last)),
            End::Newest => self.chunks.add(ends, (last, NIL)),
        };
        let blocks = self.chunks.get_mut(chunk);
        let place = if end == End::Oldest { 0 } else { blocks.len() };
        blocks.insert(place, entry.0);
        self.enter(entry, kind, chunk);
        if kind == ListKind::Queue {
            self.occupied[usize::from(group)] |= 1 << queue;
        }
    }

    /// Makes a chunk the newest of its queue if it begins with the first of these blocks, and the others follow; returns
    /// the number of blocks that moved. Small chunks do not move, because they would not join their new neighbours.
    pub(super) fn renew(&mut self, entries: &[EntryIndex]) -> usize {
        let Some(record) = entries.first().and_then(|first| self.get(*first)) else { return 0 };
        if record.state.list() != Some(ListKind::Queue) {
            return 0;
        }
        let Record { chunk, group, queue, .. } = *record;
        let blocks = self.chunks.get(chunk).blocks();
        let moved = blocks.len();
        let is_whole = moved > JOINING_MAX
            && entries
                .get(..moved)
                .is_some_and(|run| run.iter().zip(blocks).all(|(entry, block)| entry.0 == *block));
        if !is_whole {
            return 0;
        }
        let at = self.at(Group(group), ListKind::Queue, queue);
        let Chunk { older, newer, .. } = *self.chunks.get(chunk);
        self.chunks.renew(&mut self.lists[at].ends, chunk);
        // The neighbours on both sides may have grown too small for their own chunks while this one was between them.
        let is_small = |other: u32| other != NIL && self.chunks.get(other).len() <= JOINING_MAX;
        if let Some(small) = [older, newer].into_iter().find(|other| is_small(*other)) {
            self.join(at, small);
        }
        moved
    }

    /// Adds a block that is in no list on the older side of a block in a queue of the same group.
    pub(super) fn push_before(&mut self, entry: EntryIndex, successor: EntryIndex) {
        let Record { group, queue, chunk, .. } = *self.record(successor);
        self.record_mut(entry).queue = queue;
        let at = self.at(Group(group), ListKind::Queue, queue);
        self.lists[at].len += 1;
        let place = self.chunks.get(chunk).place(successor.0);
        let (chunk, place) = match self.chunks.get(chunk).is_full() {
            true => self.make_room(at, chunk, place),
            false => (chunk, place),
        };
        self.chunks.get_mut(chunk).insert(place, entry.0);
        self.enter(entry, ListKind::Queue, chunk);
    }

    /// Returns the chunk and the place for a block that enters before a place in a chunk that is full.
    fn make_room(&mut self, at: usize, chunk: u32, place: usize) -> (u32, usize) {
        let ends = &mut self.lists[at].ends;
        if place > 0 {
            // The block begins the later part: the blocks of a chain that enter one before the other fill that.
            let later = self.chunks.split(ends, chunk, place);
            self.adopt(later, 0..CHUNK_BLOCKS - place);
            return (later, 0);
        }
        let older = self.chunks.get(chunk).older;
        if older != NIL && !self.chunks.get(older).is_full() {
            return (older, self.chunks.get(older).len());
        }
        (self.chunks.add(ends, (older, chunk)), 0)
    }

    /// Sets the list of a block.
    fn enter(&mut self, entry: EntryIndex, kind: ListKind, chunk: u32) {
        let record = self.record_mut(entry);
        record.chunk = chunk;
        record.state.set_list(Some(kind));
    }

    /// Sets the chunk of blocks that moved to these places of it.
    fn adopt(&mut self, chunk: u32, places: std::ops::Range<usize>) {
        for block in &self.chunks.get(chunk).blocks()[places] {
            self.records[*block as usize].chunk = chunk;
        }
    }

    /// Removes a block from its list; does nothing if it is in none.
    pub(super) fn unlink(&mut self, entry: EntryIndex) {
        let Record { chunk, group, queue, state, .. } = *self.record(entry);
        let Some(kind) = state.list() else { return };
        let at = self.at(Group(group), kind, queue);
        self.lists[at].len -= 1;
        let blocks = self.chunks.get_mut(chunk);
        blocks.remove(blocks.place(entry.0));
        match blocks.len() {
            0 => self.chunks.remove(&mut self.lists[at].ends, chunk),
            1..=JOINING_MAX => self.join(at, chunk),
            _ => {}
        }
        if self.lists[at].len == 0 && kind == ListKind::Queue {
            self.occupied[usize::from(group)] &= !(1 << queue);
        }
        self.record_mut(entry).state.set_list(None);
    }

    /// Moves the blocks of a chunk to a neighbour, if they have room there.
    fn join(&mut self, at: usize, chunk: u32) {
        let small = *self.chunks.get(chunk);
        let has_room =
            |other: u32| other != NIL && self.chunks.get(other).len() + small.blocks().len() <= JOINED_MAX;
        let (other, first) = match small {
            _ if has_room(small.newer) => (small.newer, 0),
            _ if has_room(small.older) => (small.older, self.chunks.get(small.older).len()),
            _ => return,
        };
        let places = first..first + small.blocks().len();
        for (place, block) in places.clone().zip(small.blocks()) {
            self.chunks.get_mut(other).insert(place, *block);
        }
        self.adopt(other, places);
        self.chunks.remove(&mut self.lists[at].ends, chunk);
    }

    /// Iterates the blocks of a group, list by list: those behind a block, or all.
    pub(super) fn iter_from(
        &self,
        group: Group,
        behind: Option<EntryIndex>,
    ) -> impl Iterator<Item = EntryIndex> {
        let first = usize::from(group.0) * (self.queues + 2);
        let lists = self.lists.get(first..first + self.queues + 2).unwrap_or(&[]);
        let here = behind.and_then(|entry| Some((entry, self.get(entry)?)));
        // The first list, the chunk in it, and the number of blocks to skip there.
        let (at, chunk, skipped) = match here.map(|(entry, record)| (entry, record, record.state.list())) {
            Some((entry, record, Some(kind))) if record.group == group.0 => {
                let place = self.chunks.get(record.chunk).place(entry.0);
                (self.at(group, kind, record.queue) - first, record.chunk, place + 1)
            }
            None if behind.is_none() => (0, lists.first().map_or(NIL, |list| list.ends.oldest), 0),
            _ => (lists.len(), NIL, 0),
        };
        let starts = lists.iter().skip(at + 1).map(|list| list.ends.oldest);
        let linked = |chunk: &u32| Some(self.chunks.get(*chunk).newer).filter(|newer| *newer != NIL);
        std::iter::once(chunk)
            .chain(starts)
            .filter(|start| *start != NIL)
            .flat_map(move |start| std::iter::successors(Some(start), linked))
            .flat_map(|chunk| self.chunks.get(chunk).blocks())
            .skip(skipped)
            .map(|block| EntryIndex(*block))
    }

    fn at(&self, group: Group, kind: ListKind, queue: u8) -> usize {
        let list = match kind {
            ListKind::Queue => usize::from(queue),
            ListKind::Waiting => self.queues,
            ListKind::LastResort => self.queues + 1,
        };
        usize::from(group.0) * (self.queues + 2) + list
    }
}

#[cfg(test)]
mod tests;
