//! Waits: which waiters are attached to which fill.
//!
//! The waits of a fill form a doubly linked list in one table. Attaching and detaching are O(1), because a
//! block may have as many waiters as all loads have blocks, and neither changes the number of another wait.
//! Waiters are reported to in the order in which they attached.
//!
//! The table never shrinks: it keeps the memory of the largest number of blocks that waited at once.

use crate::waiter::{WaitId, WaiterId};

/// Value that stands for no wait and for no fill.
const NONE: u32 = u32::MAX;

/// Table of all waits.
#[derive(Debug)]
pub(crate) struct Waits {
    waits: Vec<Wait>,
    /// First vacant entry; each refers to the next one.
    vacant: u32,
}

/// Waits of one fill.
#[derive(Debug)]
pub(crate) struct WaitList {
    first: u32,
    last: u32,
}

/// One waiter of one fill.
#[derive(Clone, Copy, Debug)]
struct Wait {
    waiter: WaiterId,
    /// Slot of the fill; [`NONE`] in a vacant entry.
    fill: u32,
    previous: u32,
    next: u32,
}

const _: () = assert!(size_of::<Wait>() == 32, "memory per waiting block is part of the design");

impl WaitList {
    /// A list without waits.
    pub(crate) const EMPTY: WaitList = WaitList { first: NONE, last: NONE };
}

impl Waits {
    /// Creates an empty table.
    pub(crate) fn new() -> Waits {
        Waits { waits: Vec::new(), vacant: NONE }
    }

    /// Appends a waiter to the list of a fill.
    pub(crate) fn push(&mut self, list: &mut WaitList, fill: u32, waiter: WaiterId) -> WaitId {
        let wait = Wait { waiter, fill, previous: list.last, next: NONE };
        let at = if self.vacant == NONE {
            self.waits.push(wait);
            self.waits.len() as u32 - 1
        } else {
            let at = self.vacant;
            self.vacant = self.waits[at as usize].next;
            self.waits[at as usize] = wait;
            at
        };
        match list.last {
            NONE => list.first = at,
            last => self.waits[last as usize].next = at,
        }
        list.last = at;
        WaitId(at)
    }

    /// Returns the slot of the fill that a waiter waits for, unless this wait has ended.
    pub(crate) fn fill_of(&self, wait: WaitId, waiter: WaiterId) -> Option<u32> {
        let known = self.waits.get(wait.0 as usize)?;
        (known.fill != NONE && known.waiter == waiter).then_some(known.fill)
    }

    /// Removes a wait from the list of its fill.
    pub(crate) fn remove(&mut self, list: &mut WaitList, WaitId(at): WaitId) {
        let Wait { previous, next, .. } = self.waits[at as usize];
        match previous {
            NONE => list.first = next,
            previous => self.waits[previous as usize].next = next,
        }
        match next {
            NONE => list.last = previous,
            next => self.waits[next as usize].previous = previous,
        }
        self.vacate(at);
    }

    /// Iterates the waiters of a fill, in the order in which they attached.
    pub(crate) fn of<'a>(&'a self, list: &WaitList) -> impl Iterator<Item = WaiterId> + use<'a> {
        self.numbered(list).map(|(_, waiter)| waiter)
    }

    /// Iterates the waits of a fill with their waiters.
    pub(crate) fn numbered<'a>(
        &'a self,
        list: &WaitList,
    ) -> impl Iterator<Item = (WaitId, WaiterId)> + use<'a> {
        let mut at = list.first;
        std::iter::from_fn(move || {
            let wait = self.waits.get(at as usize)?;
            let id = WaitId(std::mem::replace(&mut at, wait.next));
            Some((id, wait.waiter))
        })
    }

    /// Ends all waits of a fill.
    pub(crate) fn clear(&mut self, list: &mut WaitList) {
        let mut at = list.first;
        while at != NONE {
            let next = self.waits[at as usize].next;
            self.vacate(at);
            at = next;
        }
        *list = WaitList::EMPTY;
    }

    /// Number of waits in the table.
    pub(crate) fn len(&self) -> usize {
        self.waits.iter().filter(|wait| wait.fill != NONE).count()
    }

    fn vacate(&mut self, at: u32) {
        let wait = &mut self.waits[at as usize];
        (wait.fill, wait.next) = (NONE, self.vacant);
        self.vacant = at;
    }
}

#[cfg(test)]
mod tests {
    use crate::waiter::WaiterOwner;

    use super::*;

    fn waiter(object: u64) -> WaiterId {
        WaiterId { object, block: 0, owner: WaiterOwner::Load }
    }

    fn objects(waits: &Waits, list: &WaitList) -> Vec<u64> {
        waits.of(list).map(|waiter| waiter.object).collect()
    }

    #[test]
    fn waiters_keep_the_order_in_which_they_attached() {
        let (mut waits, mut list) = (Waits::new(), WaitList::EMPTY);
        let ids: Vec<WaitId> = (1..=4).map(|object| waits.push(&mut list, 7, waiter(object))).collect();
        waits.remove(&mut list, ids[1]);
        assert_eq!(objects(&waits, &list), [1, 3, 4]);
        waits.remove(&mut list, ids[0]);
        waits.remove(&mut list, ids[3]);
        assert_eq!(objects(&waits, &list), [3]);
        waits.remove(&mut list, ids[2]);
        assert_eq!(objects(&waits, &list), []);
        waits.push(&mut list, 7, waiter(5));
        assert_eq!((objects(&waits, &list), waits.len()), (vec![5], 1));
    }

    #[test]
    fn detaching_leaves_the_numbers_of_other_waits() {
        let (mut waits, mut list, mut other) = (Waits::new(), WaitList::EMPTY, WaitList::EMPTY);
        let first = waits.push(&mut list, 1, waiter(1));
        let second = waits.push(&mut other, 2, waiter(2));
        waits.remove(&mut list, first);
        assert_eq!(waits.fill_of(second, waiter(2)), Some(2));
        assert_eq!(waits.fill_of(first, waiter(1)), None, "the wait has ended");
    }

    #[test]
    fn an_ended_wait_does_not_find_its_successor() {
        let (mut waits, mut list) = (Waits::new(), WaitList::EMPTY);
        let first = waits.push(&mut list, 1, waiter(1));
        waits.clear(&mut list);
        let reused = waits.push(&mut list, 2, waiter(2));
        assert_eq!(first, reused);
        assert_eq!(waits.fill_of(first, waiter(1)), None);
        assert_eq!(waits.fill_of(reused, waiter(2)), Some(2));
    }

    #[test]
    fn memory_of_ended_waits_is_reused() {
        let (mut waits, mut list) = (Waits::new(), WaitList::EMPTY);
        for round in 0..3 {
            for object in 0..10 {
                waits.push(&mut list, round, waiter(object));
            }
            waits.clear(&mut list);
        }
        assert_eq!((waits.len(), waits.waits.len()), (0, 10));
    }
}
