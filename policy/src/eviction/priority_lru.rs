//! Priority classes, least recently used first within each.
//!
//! One doubly linked list per class, threaded through a vector that is indexed by entry: 8 bytes of links and one
//! byte of class an entry, no allocation per operation, every operation O(1).
//!
//! ```text
//! class 0:  oldest ⇄ … ⇄ newest      victims come from the left end of the first list that is not empty
//! class 1:  oldest ⇄ … ⇄ newest
//! class 2:  oldest ⇄ … ⇄ newest
//! ```
//!
//! Invariant: an entry's class byte is [`ABSENT`] exactly when it is in no list.

use super::{EntryIndex, EvictionPolicy};

/// Classes: low (goes first), normal, high.
pub const CLASSES: usize = 3;

/// End of a list. Entry indices stay below it.
const NIL: u32 = u32::MAX;

/// Class byte of an entry that is in no list.
const ABSENT: u8 = u8::MAX;

/// The policy; see the module.
#[derive(Debug)]
pub struct PriorityLru {
    links: Vec<Link>,
    classes: Vec<u8>,
    lists: [List; CLASSES],
    len: usize,
}

/// An entry's neighbours in its list.
#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
}

/// The ends of one class's list; both `NIL` when it is empty.
#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
}

const _: () = assert!(size_of::<Link>() == 8, "memory per entry is part of the design");

impl PriorityLru {
    /// An empty policy.
    pub fn new() -> PriorityLru {
        PriorityLru {
            links: Vec::new(),
            classes: Vec::new(),
            lists: [List { oldest: NIL, newest: NIL }; CLASSES],
            len: 0,
        }
    }

    /// The class an entry is in, if it is in any.
    fn class_of(&self, entry: EntryIndex) -> Option<u8> {
        self.classes.get(entry.0 as usize).copied().filter(|class| *class != ABSENT)
    }

    /// Makes room for an entry's links.
    fn grow_to(&mut self, entry: EntryIndex) {
        let wanted = entry.0 as usize + 1;
        if self.links.len() < wanted {
            self.links.resize(wanted, Link { older: NIL, newer: NIL });
            self.classes.resize(wanted, ABSENT);
        }
    }

    /// Appends an entry that is in no list at the newest end of a class's list.
    fn link_newest(&mut self, entry: EntryIndex, class: u8) {
        let list = &mut self.lists[usize::from(class)];
        let older = list.newest;
        list.newest = entry.0;
        if older == NIL {
            list.oldest = entry.0;
        } else {
            self.links[older as usize].newer = entry.0;
        }
        self.links[entry.0 as usize] = Link { older, newer: NIL };
    }

    /// Puts an entry that is in no list at the oldest end of a class's list.
    fn link_oldest(&mut self, entry: EntryIndex, class: u8) {
        let list = &mut self.lists[usize::from(class)];
        let newer = list.oldest;
        list.oldest = entry.0;
        if newer == NIL {
            list.newest = entry.0;
        } else {
            self.links[newer as usize].older = entry.0;
        }
        self.links[entry.0 as usize] = Link { older: NIL, newer };
    }

    /// Makes an entry one that is in no list yet; returns the class it belongs to.
    fn enter(&mut self, entry: EntryIndex, class: u8) -> u8 {
        assert!(entry.0 != NIL, "entry index {NIL} is reserved");
        self.remove(entry);
        self.grow_to(entry);
        let class = class.min(CLASSES as u8 - 1);
        self.classes[entry.0 as usize] = class;
        self.len += 1;
        class
    }

    /// Takes an entry out of the list of the class it is in.
    fn unlink(&mut self, entry: EntryIndex, class: u8) {
        let Link { older, newer } = self.links[entry.0 as usize];
        let list = &mut self.lists[usize::from(class)];
        if older == NIL {
            list.oldest = newer;
        } else {
            self.links[older as usize].newer = newer;
        }
        if newer == NIL {
            list.newest = older;
        } else {
            self.links[newer as usize].older = older;
        }
    }
}

impl Default for PriorityLru {
    fn default() -> Self {
        PriorityLru::new()
    }
}

impl EvictionPolicy for PriorityLru {
    fn insert(&mut self, entry: EntryIndex, class: u8) {
        let class = self.enter(entry, class);
        self.link_newest(entry, class);
    }

    fn put_back(&mut self, entry: EntryIndex, class: u8) {
        let class = self.enter(entry, class);
        self.link_oldest(entry, class);
    }

    fn touch(&mut self, entry: EntryIndex) {
        if let Some(class) = self.class_of(entry) {
            self.unlink(entry, class);
            self.link_newest(entry, class);
        }
    }

    fn remove(&mut self, entry: EntryIndex) {
        if let Some(class) = self.class_of(entry) {
            self.unlink(entry, class);
            self.classes[entry.0 as usize] = ABSENT;
            self.len -= 1;
        }
    }

    fn victim(&mut self) -> Option<EntryIndex> {
        let oldest = self.lists.iter().map(|list| list.oldest).find(|oldest| *oldest != NIL)?;
        let entry = EntryIndex(oldest);
        self.remove(entry);
        Some(entry)
    }

    fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The same order, kept the obvious way: a vector per class, oldest first.
    #[derive(Debug, Default)]
    struct NaiveModel {
        classes: [Vec<u32>; CLASSES],
    }

    impl NaiveModel {
        fn insert(&mut self, entry: u32, class: u8) {
            self.remove(entry);
            self.classes[usize::from(class).min(CLASSES - 1)].push(entry);
        }

        fn put_back(&mut self, entry: u32, class: u8) {
            self.remove(entry);
            self.classes[usize::from(class).min(CLASSES - 1)].insert(0, entry);
        }

        fn touch(&mut self, entry: u32) {
            let class = self.classes.iter().position(|entries| entries.contains(&entry));
            if let Some(class) = class {
                self.insert(entry, class as u8);
            }
        }

        fn remove(&mut self, entry: u32) {
            self.classes.iter_mut().for_each(|entries| entries.retain(|other| *other != entry));
        }

        fn victim(&mut self) -> Option<u32> {
            self.classes.iter_mut().find(|entries| !entries.is_empty()).map(|entries| entries.remove(0))
        }
    }

    #[derive(Clone, Debug)]
    enum Operation {
        Insert(u32, u8),
        PutBack(u32, u8),
        Touch(u32),
        Remove(u32),
        Victim,
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            (0..24u32, 0..5u8).prop_map(|(entry, class)| Operation::Insert(entry, class)),
            (0..24u32, 0..5u8).prop_map(|(entry, class)| Operation::PutBack(entry, class)),
            (0..30u32).prop_map(Operation::Touch),
            (0..30u32).prop_map(Operation::Remove),
            Just(Operation::Victim),
        ]
    }

    proptest! {
        #[test]
        fn any_sequence_of_calls_gives_the_victims_of_the_naive_model(
            operations in prop::collection::vec(operation(), 0..400)
        ) {
            let (mut policy, mut model) = (PriorityLru::new(), NaiveModel::default());
            for operation in operations {
                match operation {
                    Operation::Insert(entry, class) => {
                        policy.insert(EntryIndex(entry), class);
                        model.insert(entry, class);
                    }
                    Operation::PutBack(entry, class) => {
                        policy.put_back(EntryIndex(entry), class);
                        model.put_back(entry, class);
                    }
                    Operation::Touch(entry) => {
                        policy.touch(EntryIndex(entry));
                        model.touch(entry);
                    }
                    Operation::Remove(entry) => {
                        policy.remove(EntryIndex(entry));
                        model.remove(entry);
                    }
                    Operation::Victim => {
                        prop_assert_eq!(policy.victim().map(|entry| entry.0), model.victim());
                    }
                }
                prop_assert_eq!(policy.len(), model.classes.iter().map(Vec::len).sum::<usize>());
            }
            while let Some(expected) = model.victim() {
                prop_assert_eq!(policy.victim(), Some(EntryIndex(expected)));
            }
            prop_assert!(policy.is_empty());
            prop_assert_eq!(policy.victim(), None);
        }
    }

    #[test]
    fn a_low_class_goes_before_a_high_one_however_recently_it_was_used() {
        let mut policy = PriorityLru::new();
        policy.insert(EntryIndex(0), 2);
        policy.insert(EntryIndex(1), 1);
        policy.insert(EntryIndex(2), 0);
        policy.touch(EntryIndex(2));
        let order: Vec<u32> = std::iter::from_fn(|| policy.victim()).map(|entry| entry.0).collect();
        assert_eq!(order, [2, 1, 0]);
    }

    #[test]
    fn a_touched_entry_outlives_the_rest_of_its_class() {
        let mut policy = PriorityLru::new();
        (0..3).for_each(|entry| policy.insert(EntryIndex(entry), 1));
        policy.touch(EntryIndex(0));
        let order: Vec<u32> = std::iter::from_fn(|| policy.victim()).map(|entry| entry.0).collect();
        assert_eq!(order, [1, 2, 0]);
    }
}
