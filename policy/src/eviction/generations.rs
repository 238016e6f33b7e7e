//! Generations of reused indices: a link to a parent that is gone never becomes a link to another block.
//!
//! A link to a parent has the generation of its index. A generation has 16 bits and does not wrap: an index whose
//! generations are used up is **exhausted**, and its block gets no children. Meanwhile, each [`Generations::end`]
//! examines some records and removes old links to the index that has been exhausted for longest. Once all records
//! were examined, no link to it exists, and its generations start again. So nothing happens at all until an index was
//! reused 65,535 times, and then the work of one call is bounded.

use std::collections::VecDeque;

use super::EntryIndex;
use super::lists::{Lists, NIL};

/// Records that one call examines: 1.5 KiB in sequence, a pass over 10 million records in 160,000 evictions.
const EXAMINED_PER_CALL: usize = 64;

/// Exhausted indices, and the progress of the removal of links to the first of them.
#[derive(Debug)]
pub(super) struct Generations {
    /// The last generation: that of an exhausted index.
    last: u16,
    exhausted: VecDeque<EntryIndex>,
    /// Number of records without a link to the first exhausted index.
    examined: usize,
}

impl Generations {
    /// Creates the state of an order in which no index is exhausted; `last` is at least 1.
    pub(super) fn new(last: u16) -> Generations {
        Generations { last, exhausted: VecDeque::new(), examined: 0 }
    }

    /// Whether the block at an index may have children.
    pub(super) fn may_have_children(&self, lists: &Lists, entry: EntryIndex) -> bool {
        lists.record(entry).generation < self.last
    }

    /// Ends the generation of an index: links to it are links to a block that is gone.
    pub(super) fn end(&mut self, lists: &mut Lists, entry: EntryIndex) {
        let generation = &mut lists.record_mut(entry).generation;
        if *generation < self.last {
            *generation += 1;
            if *generation == self.last {
                self.exhausted.push_back(entry);
            }
        }
        self.remove_links(lists);
    }

    fn remove_links(&mut self, lists: &mut Lists) {
        let Some(exhausted) = self.exhausted.front().copied() else { return };
        for record in lists.records_from(self.examined).take(EXAMINED_PER_CALL) {
            if record.parent == exhausted.0 {
                record.parent = NIL;
            }
        }
        self.examined += EXAMINED_PER_CALL;
        if self.examined >= lists.places() {
            lists.record_mut(exhausted).generation = 0;
            self.exhausted.pop_front();
            self.examined = 0;
        }
    }
}
