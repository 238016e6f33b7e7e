//! Priority classes, least recently used first within each class.
//!
//! One doubly linked list per group and class, in a vector indexed by entry: 8 bytes of links and two bytes
//! of list number per entry. Every operation is O(1) and allocates only for the first entry of a group.
//!
//! ```text
//! in each group
//! class 0:  oldest ⇄ … ⇄ newest      victims are taken from the left end of the first non-empty list
//! class 1:  oldest ⇄ … ⇄ newest
//! class 2:  oldest ⇄ … ⇄ newest
//! ```
//!
//! Invariant: an entry's list number is [`ABSENT`] exactly if it is in no list.

use super::{EntryIndex, EvictionPolicy, Group, Rank};

/// Number of classes: low (evicted first), normal, high.
pub const CLASSES: usize = 3;

/// End marker of a list. Entry indices are smaller.
const NIL: u32 = u32::MAX;

/// List number of an entry that is in no list.
const ABSENT: u16 = u16::MAX;

/// Maximum number of groups: list numbers have 16 bits.
pub const GROUPS_MAX: usize = ABSENT as usize / CLASSES;

const NO_ENTRIES: List = List { oldest: NIL, newest: NIL };

/// Priority classes with one list per group and class.
#[derive(Debug)]
pub struct PriorityLru {
    links: Vec<Link>,
    /// List number of each entry: the group's first list, plus the class.
    list_of: Vec<u16>,
    lists: Vec<List>,
    len: usize,
}

/// Neighbours of an entry in its list.
#[derive(Clone, Copy, Debug)]
struct Link {
    older: u32,
    newer: u32,
}

/// Ends of one list; both `NIL` if it is empty.
#[derive(Clone, Copy, Debug)]
struct List {
    oldest: u32,
    newest: u32,
}

const _: () = assert!(size_of::<Link>() == 8, "memory per entry is part of the design");

impl PriorityLru {
    /// Creates an empty policy.
    pub fn new() -> PriorityLru {
        PriorityLru { links: Vec::new(), list_of: Vec::new(), lists: Vec::new(), len: 0 }
    }

    /// Returns the list of an entry, if it is in one.
    fn list_of(&self, entry: EntryIndex) -> Option<u16> {
        self.list_of.get(entry.0 as usize).copied().filter(|list| *list != ABSENT)
    }

    /// Grows the vectors to include an entry.
    fn grow_to(&mut self, entry: EntryIndex) {
        let wanted = entry.0 as usize + 1;
        if self.links.len() < wanted {
            self.links.resize(wanted, Link { older: NIL, newer: NIL });
            self.list_of.resize(wanted, ABSENT);
        }
    }

    /// Appends an entry that is in no list at the newest end of a list.
    fn link_newest(&mut self, entry: EntryIndex, list: u16) {
        let list = &mut self.lists[usize::from(list)];
        let older = list.newest;
        list.newest = entry.0;
        if older == NIL {
            list.oldest = entry.0;
        } else {
            self.links[older as usize].newer = entry.0;
        }
        self.links[entry.0 as usize] = Link { older, newer: NIL };
    }

    /// Inserts an entry that is in no list at the oldest end of a list.
    fn link_oldest(&mut self, entry: EntryIndex, list: u16) {
        let list = &mut self.lists[usize::from(list)];
        let newer = list.oldest;
        list.oldest = entry.0;
        if newer == NIL {
            list.newest = entry.0;
        } else {
            self.links[newer as usize].older = entry.0;
        }
        self.links[entry.0 as usize] = Link { older: NIL, newer };
    }

    /// Inserts an entry that is in no list on the older side of one that is in `list`.
    fn link_before(&mut self, entry: EntryIndex, list: u16, successor: EntryIndex) {
        let older = std::mem::replace(&mut self.links[successor.0 as usize].older, entry.0);
        if older == NIL {
            self.lists[usize::from(list)].oldest = entry.0;
        } else {
            self.links[older as usize].newer = entry.0;
        }
        self.links[entry.0 as usize] = Link { older, newer: successor.0 };
    }

    /// Assigns an entry to a list; the caller links it.
    fn enter(&mut self, entry: EntryIndex, rank: Rank) -> u16 {
        assert!(entry.0 != NIL, "entry index {NIL} is reserved");
        let group = usize::from(rank.group.0);
        assert!(group < GROUPS_MAX, "list numbers have 16 bits: at most {GROUPS_MAX} groups");
        self.remove(entry);
        self.grow_to(entry);
        if self.lists.len() < (group + 1) * CLASSES {
            self.lists.resize((group + 1) * CLASSES, NO_ENTRIES);
        }
        let list = (group * CLASSES + usize::from(rank.class).min(CLASSES - 1)) as u16;
        self.list_of[entry.0 as usize] = list;
        self.len += 1;
        list
    }

    /// Removes an entry from its list.
    fn unlink(&mut self, entry: EntryIndex, list: u16) {
        let Link { older, newer } = self.links[entry.0 as usize];
        let list = &mut self.lists[usize::from(list)];
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
    fn insert(&mut self, entry: EntryIndex, rank: Rank) {
        let list = self.enter(entry, rank);
        self.link_newest(entry, list);
    }

    fn insert_oldest(&mut self, entry: EntryIndex, rank: Rank) {
        let list = self.enter(entry, rank);
        self.link_oldest(entry, list);
    }

    fn insert_before(&mut self, entry: EntryIndex, rank: Rank, successor: EntryIndex) {
        let list = self.enter(entry, rank);
        if successor != entry && self.list_of(successor) == Some(list) {
            self.link_before(entry, list, successor);
        } else {
            self.link_newest(entry, list);
        }
    }

    fn touch(&mut self, entry: EntryIndex) {
        if let Some(list) = self.list_of(entry) {
            self.unlink(entry, list);
            self.link_newest(entry, list);
        }
    }

    fn remove(&mut self, entry: EntryIndex) {
        if let Some(list) = self.list_of(entry) {
            self.unlink(entry, list);
            self.list_of[entry.0 as usize] = ABSENT;
            self.len -= 1;
        }
    }

    fn victim(&mut self, group: Group) -> Option<EntryIndex> {
        let lists = self.lists.chunks_exact(CLASSES).nth(usize::from(group.0))?;
        let oldest = lists.iter().map(|list| list.oldest).find(|oldest| *oldest != NIL)?;
        let entry = EntryIndex(oldest);
        self.remove(entry);
        Some(entry)
    }

    fn following(&self, group: Group, behind: Option<EntryIndex>, count: usize) -> Vec<EntryIndex> {
        let first = usize::from(group.0) * CLASSES;
        let lists = self.lists.get(first..first + CLASSES).unwrap_or(&[]);
        let (class, next) = match behind.map(|entry| (entry, self.list_of(entry).map(usize::from))) {
            None => (0, lists.first().map_or(NIL, |list| list.oldest)),
            Some((entry, Some(list))) if (first..first + CLASSES).contains(&list) => {
                (list - first, self.links[entry.0 as usize].newer)
            }
            Some(_) => return Vec::new(),
        };
        let starts = lists.iter().skip(class + 1).map(|list| list.oldest);
        let linked = |entry: &u32| Some(self.links[*entry as usize].newer).filter(|newer| *newer != NIL);
        std::iter::once(next)
            .chain(starts)
            .filter(|start| *start != NIL)
            .flat_map(|start| std::iter::successors(Some(start), linked))
            .take(count)
            .map(EntryIndex)
            .collect()
    }

    fn len(&self) -> usize {
        self.len
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GROUPS: usize = 3;

    /// The same orders as plain vectors, one per group and class, oldest first.
    #[derive(Debug, Default)]
    struct NaiveModel {
        lists: [[Vec<u32>; CLASSES]; GROUPS],
    }

    impl NaiveModel {
        fn list(&mut self, rank: Rank) -> &mut Vec<u32> {
            &mut self.lists[usize::from(rank.group.0)][usize::from(rank.class).min(CLASSES - 1)]
        }

        fn insert(&mut self, entry: u32, rank: Rank) {
            self.remove(entry);
            self.list(rank).push(entry);
        }

        fn insert_oldest(&mut self, entry: u32, rank: Rank) {
            self.remove(entry);
            self.list(rank).insert(0, entry);
        }

        fn insert_before(&mut self, entry: u32, rank: Rank, successor: u32) {
            self.remove(entry);
            let list = self.list(rank);
            let at = list.iter().position(|other| *other == successor).unwrap_or(list.len());
            list.insert(at, entry);
        }

        fn touch(&mut self, entry: u32) {
            if let Some(list) = self.lists.iter_mut().flatten().find(|entries| entries.contains(&entry)) {
                list.retain(|other| *other != entry);
                list.push(entry);
            }
        }

        fn remove(&mut self, entry: u32) {
            self.lists.iter_mut().flatten().for_each(|entries| entries.retain(|other| *other != entry));
        }

        fn victim(&mut self, group: Group) -> Option<u32> {
            let lists = &mut self.lists[usize::from(group.0)];
            lists.iter_mut().find(|entries| !entries.is_empty()).map(|entries| entries.remove(0))
        }

        fn order(&self, group: Group) -> Vec<u32> {
            self.lists[usize::from(group.0)].concat()
        }

        fn len(&self) -> usize {
            self.lists.iter().flatten().map(Vec::len).sum()
        }
    }

    #[derive(Clone, Debug)]
    enum Operation {
        Insert(u32, Rank),
        PutBack(u32, Rank),
        InsertBefore(u32, Rank, u32),
        Touch(u32),
        Remove(u32),
        Victim(Group),
    }

    fn group() -> impl Strategy<Value = Group> {
        (0..GROUPS as u16).prop_map(Group)
    }

    fn rank() -> impl Strategy<Value = Rank> {
        (group(), 0..5u8).prop_map(|(group, class)| Rank { group, class })
    }

    fn operation() -> impl Strategy<Value = Operation> {
        prop_oneof![
            (0..24u32, rank()).prop_map(|(entry, rank)| Operation::Insert(entry, rank)),
            (0..24u32, rank()).prop_map(|(entry, rank)| Operation::PutBack(entry, rank)),
            (0..24u32, rank(), 0..30u32)
                .prop_map(|(entry, rank, successor)| Operation::InsertBefore(entry, rank, successor)),
            (0..30u32).prop_map(Operation::Touch),
            (0..30u32).prop_map(Operation::Remove),
            group().prop_map(Operation::Victim),
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
                    Operation::Insert(entry, rank) => {
                        policy.insert(EntryIndex(entry), rank);
                        model.insert(entry, rank);
                    }
                    Operation::PutBack(entry, rank) => {
                        policy.insert_oldest(EntryIndex(entry), rank);
                        model.insert_oldest(entry, rank);
                    }
                    Operation::InsertBefore(entry, rank, successor) => {
                        policy.insert_before(EntryIndex(entry), rank, EntryIndex(successor));
                        model.insert_before(entry, rank, successor);
                    }
                    Operation::Touch(entry) => {
                        policy.touch(EntryIndex(entry));
                        model.touch(entry);
                    }
                    Operation::Remove(entry) => {
                        policy.remove(EntryIndex(entry));
                        model.remove(entry);
                    }
                    Operation::Victim(group) => {
                        prop_assert_eq!(policy.victim(group).map(|entry| entry.0), model.victim(group));
                    }
                }
                prop_assert_eq!(policy.len(), model.len());
            }
            for group in (0..GROUPS as u16).map(Group) {
                let order = model.order(group);
                prop_assert_eq!(numbers(policy.following(group, None, 100)), order.clone());
                for (at, entry) in order.iter().enumerate() {
                    let behind = numbers(policy.following(group, Some(EntryIndex(*entry)), 3));
                    prop_assert_eq!(behind, order[at + 1..].iter().copied().take(3).collect::<Vec<u32>>());
                    let other = Group(group.0 + 1);
                    prop_assert_eq!(policy.following(other, Some(EntryIndex(*entry)), 3), []);
                }
                while let Some(expected) = model.victim(group) {
                    prop_assert_eq!(policy.victim(group), Some(EntryIndex(expected)));
                }
                prop_assert_eq!(policy.victim(group), None);
            }
            prop_assert!(policy.is_empty());
        }
    }

    fn numbers(entries: Vec<EntryIndex>) -> Vec<u32> {
        entries.into_iter().map(|entry| entry.0).collect()
    }

    fn victims(policy: &mut PriorityLru) -> Vec<u32> {
        std::iter::from_fn(|| policy.victim(Group(0))).map(|entry| entry.0).collect()
    }

    #[test]
    fn evicts_low_class_before_high_class_regardless_of_recency() {
        let mut policy = PriorityLru::new();
        (0..3).for_each(|entry| policy.insert(EntryIndex(entry), Rank::of_class(2 - entry as u8)));
        policy.touch(EntryIndex(2));
        assert_eq!(victims(&mut policy), [2, 1, 0]);
    }

    #[test]
    fn touched_entry_is_evicted_last_in_its_class() {
        let mut policy = PriorityLru::new();
        (0..3).for_each(|entry| policy.insert(EntryIndex(entry), Rank::of_class(1)));
        policy.touch(EntryIndex(0));
        assert_eq!(victims(&mut policy), [1, 2, 0]);
    }

    #[test]
    fn evicts_entry_inserted_before_its_prefix_first() {
        let mut policy = PriorityLru::new();
        let rank = Rank::of_class(1);
        policy.insert(EntryIndex(0), rank);
        policy.insert(EntryIndex(9), rank);
        policy.insert_before(EntryIndex(1), rank, EntryIndex(0));
        policy.insert_before(EntryIndex(2), rank, EntryIndex(1));
        assert_eq!(victims(&mut policy), [2, 1, 0, 9]);
    }

    #[test]
    fn insert_before_entry_of_another_list_inserts_as_newest() {
        let mut policy = PriorityLru::new();
        policy.insert(EntryIndex(0), Rank::of_class(2));
        policy.insert(EntryIndex(1), Rank::of_class(1));
        policy.insert_before(EntryIndex(2), Rank::of_class(1), EntryIndex(0));
        policy.insert_before(EntryIndex(3), Rank::of_class(1), EntryIndex(77));
        assert_eq!(victims(&mut policy), [1, 2, 3, 0]);
    }

    #[test]
    fn victim_of_a_group_never_comes_from_another_group() {
        let mut policy = PriorityLru::new();
        policy.insert(EntryIndex(0), Rank { group: Group(7), class: 0 });
        assert_eq!((policy.victim(Group(6)), policy.victim(Group(8)), policy.len()), (None, None, 1));
        assert_eq!(policy.victim(Group(7)), Some(EntryIndex(0)));
    }
}
