//! Progress of inventories: the slots that each node has announced, and the number of incomplete nodes per
//! slot.

use reprise_policy::SlotSet;
use reprise_policy::key::HASH_SLOTS;

/// Slots that a node has announced; one kilobyte per node.
#[derive(Debug)]
pub(super) struct InventoryProgress {
    /// Slots whose inventory has begun; changes there are accepted.
    begun: SlotSet,
    /// Subset of `begun` whose inventory is complete.
    whole: SlotSet,
}

/// Number of nodes with an incomplete inventory, for each slot.
#[derive(Debug)]
pub(super) struct IncompleteInventories {
    nodes: Box<[u16]>,
}

/// Whether every node has announced its complete inventory of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Completeness {
    Whole,
    Partial,
}

impl InventoryProgress {
    /// Adds a node that has announced nothing, and is incomplete in every slot.
    pub(super) fn none_announced(incomplete: &mut IncompleteInventories) -> Box<InventoryProgress> {
        incomplete.increment(&SlotSet::ALL);
        Box::new(InventoryProgress { begun: SlotSet::EMPTY, whole: SlotSet::EMPTY })
    }

    pub(super) fn begun(&self) -> &SlotSet {
        &self.begun
    }

    /// Marks inventories of slots as begun.
    pub(super) fn begin(&mut self, slots: &SlotSet, incomplete: &mut IncompleteInventories) {
        incomplete.increment(&self.whole.and(slots));
        self.whole = self.whole.without(slots);
        self.begun = self.begun.or(slots);
    }

    /// Marks inventories of slots as complete, where they have begun.
    pub(super) fn end(&mut self, slots: &SlotSet, incomplete: &mut IncompleteInventories) {
        let ended = slots.and(&self.begun).without(&self.whole);
        incomplete.decrement(&ended);
        self.whole = self.whole.or(&ended);
    }

    /// Discards the announcements in slots.
    pub(super) fn discard(&mut self, slots: &SlotSet, incomplete: &mut IncompleteInventories) {
        incomplete.increment(&self.whole.and(slots));
        self.whole = self.whole.without(slots);
        self.begun = self.begun.without(slots);
    }

    /// Removes the node from the counts.
    pub(super) fn remove(self: Box<InventoryProgress>, incomplete: &mut IncompleteInventories) {
        incomplete.decrement(&SlotSet::ALL.without(&self.whole));
    }
}

impl IncompleteInventories {
    #[inline]
    pub(super) fn is_partial(&self, slot: u16) -> bool {
        self.nodes[usize::from(slot)] > 0
    }

    #[inline]
    pub(super) fn completeness(&self, slot: u16) -> Completeness {
        if self.is_partial(slot) { Completeness::Partial } else { Completeness::Whole }
    }

    /// Checks the counters; for tests.
    pub(super) fn audit<'a>(
        &self,
        progress: impl Iterator<Item = &'a InventoryProgress>,
        owned: &SlotSet,
    ) -> Result<(), String> {
        let mut counted = vec![0; usize::from(HASH_SLOTS)];
        for progress in progress {
            if !progress.whole.without(&progress.begun).is_empty() {
                return Err(format!("complete but not begun: {progress:?}"));
            }
            if !progress.begun.without(owned).is_empty() {
                return Err(format!("begun but not owned: {progress:?}"));
            }
            for slot in SlotSet::ALL.without(&progress.whole).iter() {
                counted[usize::from(slot)] += 1;
            }
        }
        if *counted == *self.nodes {
            Ok(())
        } else {
            Err("wrong counts of incomplete nodes by slot".to_owned())
        }
    }

    fn increment(&mut self, slots: &SlotSet) {
        slots.iter().for_each(|slot| self.nodes[usize::from(slot)] += 1);
    }

    fn decrement(&mut self, slots: &SlotSet) {
        slots.iter().for_each(|slot| self.nodes[usize::from(slot)] -= 1);
    }
}

impl Default for IncompleteInventories {
    fn default() -> IncompleteInventories {
        IncompleteInventories { nodes: vec![0; usize::from(HASH_SLOTS)].into() }
    }
}
