//! Of which slots a node has announced its inventory, and of which slots some node has not.

use reprise_policy::SlotSet;
use reprise_policy::key::HASH_SLOTS;

/// What one node has announced; a kilobyte a node.
#[derive(Debug)]
pub(super) struct Announced {
    /// Slots whose inventory it has begun: its changes there are taken.
    begun: SlotSet,
    /// Those of them whose inventory is whole.
    whole: SlotSet,
}

/// For each slot the nodes whose inventory of it is not whole.
#[derive(Debug)]
pub(super) struct Awaited {
    nodes: Box<[u16]>,
}

/// Whether every node has announced what it has in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Completeness {
    Whole,
    Partial,
}

impl Announced {
    /// A node that has announced nothing, and is awaited in every slot.
    pub(super) fn nothing(awaited: &mut Awaited) -> Box<Announced> {
        awaited.more(&SlotSet::ALL);
        Box::new(Announced { begun: SlotSet::EMPTY, whole: SlotSet::EMPTY })
    }

    pub(super) fn begun(&self) -> &SlotSet {
        &self.begun
    }

    /// The inventory of slots begins.
    pub(super) fn begin(&mut self, slots: &SlotSet, awaited: &mut Awaited) {
        awaited.more(&self.whole.and(slots));
        self.whole = self.whole.without(slots);
        self.begun = self.begun.or(slots);
    }

    /// The inventory of slots is whole, where it has begun.
    pub(super) fn end(&mut self, slots: &SlotSet, awaited: &mut Awaited) {
        let ended = slots.and(&self.begun).without(&self.whole);
        awaited.less(&ended);
        self.whole = self.whole.or(&ended);
    }

    /// What was announced in slots is gone.
    pub(super) fn lose(&mut self, slots: &SlotSet, awaited: &mut Awaited) {
        awaited.more(&self.whole.and(slots));
        self.whole = self.whole.without(slots);
        self.begun = self.begun.without(slots);
    }

    /// The node is awaited no more.
    pub(super) fn leave(self: Box<Announced>, awaited: &mut Awaited) {
        awaited.less(&SlotSet::ALL.without(&self.whole));
    }
}

impl Awaited {
    #[inline]
    pub(super) fn is_partial(&self, slot: u16) -> bool {
        self.nodes[usize::from(slot)] > 0
    }

    #[inline]
    pub(super) fn completeness(&self, slot: u16) -> Completeness {
        if self.is_partial(slot) { Completeness::Partial } else { Completeness::Whole }
    }

    /// Checks the counts, for tests.
    pub(super) fn audit<'a>(
        &self,
        announced: impl Iterator<Item = &'a Announced>,
        owned: &SlotSet,
    ) -> Result<(), String> {
        let mut counted = vec![0; usize::from(HASH_SLOTS)];
        for announced in announced {
            if !announced.whole.without(&announced.begun).is_empty() {
                return Err(format!("whole and not begun: {announced:?}"));
            }
            if !announced.begun.without(owned).is_empty() {
                return Err(format!("begun and not owned: {announced:?}"));
            }
            for slot in SlotSet::ALL.without(&announced.whole).iter() {
                counted[usize::from(slot)] += 1;
            }
        }
        if *counted == *self.nodes { Ok(()) } else { Err("nodes awaited by slot are miscounted".to_owned()) }
    }

    fn more(&mut self, slots: &SlotSet) {
        slots.iter().for_each(|slot| self.nodes[usize::from(slot)] += 1);
    }

    fn less(&mut self, slots: &SlotSet) {
        slots.iter().for_each(|slot| self.nodes[usize::from(slot)] -= 1);
    }
}

impl Default for Awaited {
    fn default() -> Awaited {
        Awaited { nodes: vec![0; usize::from(HASH_SLOTS)].into() }
    }
}
