//! Intrusive lists of blocks, in one slab.
//!
//! A block is in at most one list, which is one of its group. A record has 24 bytes: links, the chain, and the
//! list. Every operation is O(1); memory is allocated only for the largest index so far, and for the first
//! block of a group.
//!
//! ```text
//! lists of a group:  queue 0 … queue 63 of the policy │ waiting │ last resort
//! in each list:      oldest ⇄ … ⇄ newest
//! ```

use super::{EntryIndex, Group};

/// End marker of a list, and the parent of a block without one. Indices are smaller.
pub(super) const NIL: u32 = u32::MAX;

/// Maximum number of queues of a policy: the queues that are not empty are bits of one word.
pub(super) const QUEUES_MAX: usize = 64;

/// State of one block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Record {
    older: u32,
    newer: u32,
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

/// Ends of one list; both `NIL` if it is empty.
#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
    len: u32,
}

/// Records of all blocks, and the lists of all groups.
#[derive(Debug)]
pub(super) struct Lists {
    records: Vec<Record>,
    lists: Vec<List>,
    /// For each group, the queues that are not empty.
    occupied: Vec<u64>,
    queues: usize,
}

const _: () = assert!(size_of::<Record>() == 24, "memory per block is part of the design");

const NEW: Record = Record {
    older: NIL,
    newer: NIL,
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
        Lists { records: Vec::new(), lists: Vec::new(), occupied: Vec::new(), queues }
    }

    /// Bytes of the slab's records in use, without those of lists.
    pub(super) fn record_bytes(&self) -> usize {
        self.records.len() * size_of::<Record>()
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
            self.lists.resize(groups * (self.queues + 2), List { oldest: NIL, newest: NIL, len: 0 });
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
        let oldest = self.lists.get(self.at(group, list, queue))?.oldest;
        (oldest != NIL).then_some(EntryIndex(oldest))
    }

    /// Block after another one in its queue, if that is in a queue.
    pub(super) fn newer(&self, entry: EntryIndex) -> Option<EntryIndex> {
        let Record { newer, state, .. } = *self.record(entry);
        (newer != NIL && state.list() == Some(ListKind::Queue)).then_some(EntryIndex(newer))
    }

    /// Adds a block that is in no list to an end of one of its group's lists.
    pub(super) fn push(&mut self, entry: EntryIndex, kind: ListKind, end: End) {
        let Record { group, queue, state, .. } = *self.record(entry);
        debug_assert!(state.list().is_none(), "a block is in one list");
        let at = self.at(Group(group), kind, queue);
        let list = &mut self.lists[at];
        list.len += 1;
        let (older, newer) = match end {
            End::Newest => (std::mem::replace(&mut list.newest, entry.0), NIL),
            End::Oldest => (NIL, std::mem::replace(&mut list.oldest, entry.0)),
        };
        if older == NIL && newer == NIL {
            (list.oldest, list.newest) = (entry.0, entry.0);
        }
        self.tie(entry, kind, (older, newer));
        if kind == ListKind::Queue {
            self.occupied[usize::from(group)] |= 1 << queue;
        }
    }

    /// Adds a block that is in no list on the older side of a block in a queue of the same group.
    pub(super) fn push_before(&mut self, entry: EntryIndex, successor: EntryIndex) {
        let Record { group, queue, older, .. } = *self.record(successor);
        self.record_mut(entry).queue = queue;
        let at = self.at(Group(group), ListKind::Queue, queue);
        self.lists[at].len += 1;
        if older == NIL {
            self.lists[at].oldest = entry.0;
        }
        self.tie(entry, ListKind::Queue, (older, successor.0));
    }

    /// Sets the links of a block and of its neighbours.
    fn tie(&mut self, entry: EntryIndex, kind: ListKind, (older, newer): (u32, u32)) {
        if older != NIL {
            self.records[older as usize].newer = entry.0;
        }
        if newer != NIL {
            self.records[newer as usize].older = entry.0;
        }
        let record = self.record_mut(entry);
        (record.older, record.newer) = (older, newer);
        record.state.set_list(Some(kind));
    }

    /// Removes a block from its list; does nothing if it is in none.
    pub(super) fn unlink(&mut self, entry: EntryIndex) {
        let Record { older, newer, group, queue, state, .. } = *self.record(entry);
        let Some(kind) = state.list() else { return };
        let at = self.at(Group(group), kind, queue);
        let list = &mut self.lists[at];
        list.len -= 1;
        if older == NIL {
            list.oldest = newer;
        }
        if newer == NIL {
            list.newest = older;
        }
        let is_empty = list.oldest == NIL;
        if older != NIL {
            self.records[older as usize].newer = newer;
        }
        if newer != NIL {
            self.records[newer as usize].older = older;
        }
        if is_empty && kind == ListKind::Queue {
            self.occupied[usize::from(group)] &= !(1 << queue);
        }
        self.record_mut(entry).state.set_list(None);
    }

    /// Iterates the blocks of a group, list by list: those behind a block, or all.
    pub(super) fn iter_from(
        &self,
        group: Group,
        behind: Option<EntryIndex>,
    ) -> impl Iterator<Item = EntryIndex> {
        let first = usize::from(group.0) * (self.queues + 2);
        let lists = self.lists.get(first..first + self.queues + 2).unwrap_or(&[]);
        let here = behind.and_then(|entry| self.get(entry));
        let (at, next) = match here.map(|record| (record, record.state.list())) {
            Some((record, Some(kind))) if record.group == group.0 => {
                (self.at(group, kind, record.queue) - first, record.newer)
            }
            Some(_) => (lists.len(), NIL),
            None if behind.is_some() => (lists.len(), NIL),
            None => (0, lists.first().map_or(NIL, |list| list.oldest)),
        };
        let starts = lists.iter().skip(at + 1).map(|list| list.oldest);
        let linked = |entry: &u32| Some(self.records[*entry as usize].newer).filter(|newer| *newer != NIL);
        std::iter::once(next)
            .chain(starts)
            .filter(|start| *start != NIL)
            .flat_map(move |start| std::iter::successors(Some(start), linked))
            .map(EntryIndex)
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
