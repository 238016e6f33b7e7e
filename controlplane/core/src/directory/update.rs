//! One node's changes, applied in sequence.
//!
//! What makes it right whatever comes late, twice or not at all: an update is taken from the number that is expected on;
//! one that opens inventories takes a number for that, so a copy of it that comes late is known, even when it has no
//! changes.

use std::ops::Range;

use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tier};

use super::changes::Operation;
use super::table::{Entry, KeyCount, Tiers};
use super::{Changes, Directory, Node};

/// Some changes of one node.
#[derive(Clone, Copy, Debug)]
pub struct Update<'a> {
    /// Whose.
    pub node: NodeId,
    /// Its registration.
    pub epoch: Epoch,
    /// Number of its first change within the registration; an update that [opens](Opening) anything takes one number
    /// for that, before its changes.
    pub sequence: u64,
    /// What of the node's inventory begins with it.
    pub opening: Opening<'a>,
    /// The changes, in order.
    pub changes: Changes<'a>,
    /// Slots whose inventory is whole after it.
    pub ends: &'a SlotSet,
}

/// What an update is to what the node has announced before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening<'a> {
    /// More of the same.
    Nothing,
    /// The inventory of these slots begins: what the node announced there before is gone.
    Slots(&'a SlotSet),
    /// Everything announced before is gone, in all slots; the inventory of these slots begins. Also after a gap.
    Anew(&'a SlotSet),
}

/// What became of an update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Updated {
    /// It belongs to a registration that is not the current one.
    Fenced,
    /// `applied` are the indices of its changes that were applied: all, a tail (the rest was there already), or none.
    /// `expected` is the sequence number of the next change; the sender has a gap when it is not the end of its update.
    Expecting {
        /// Sequence number of the next change.
        expected: u64,
        /// Indices of the changes applied.
        applied: Range<usize>,
        /// What was announced before and is gone.
        voided: Voided,
    },
}

/// What the opening of an update has made void.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Voided {
    /// Nothing: it opened nothing, was known before, or the node had announced nothing there.
    Nothing,
    /// What the node had announced in these slots.
    Slots(Box<SlotSet>),
    /// What the node had announced.
    Node,
}

impl Directory {
    /// Applies changes of a node. Long updates are better applied in parts, with consecutive sequence numbers, the
    /// opening in the first and the ends in the last.
    pub fn update(&mut self, update: &Update<'_>) -> Updated {
        let Some(node) = self.registered(update.node, update.epoch) else { return Updated::Fenced };
        let (index, expected) = (usize::from(update.node.0), node.expected);
        let anew = matches!(update.opening, Opening::Anew(_));
        // Sent twice: what came after it must not be forgotten. Or something is missing.
        if (anew && update.sequence < expected) || (!anew && update.sequence > expected) {
            return Updated::Expecting { expected, applied: 0..0, voided: Voided::Nothing };
        }
        let mut voided = Voided::Nothing;
        if anew {
            voided = Voided::Node;
            self.begin_anew(update.node);
            self.nodes[index].expected = update.sequence;
        }
        let mut known = self.nodes[index].expected - update.sequence;
        match update.opening {
            Opening::Nothing => {}
            Opening::Slots(slots) | Opening::Anew(slots) if known == 0 => {
                let again = self.begin_slots(update.node, slots);
                if !anew && !again.is_empty() {
                    voided = Voided::Slots(Box::new(again));
                }
                self.nodes[index].expected += 1;
            }
            Opening::Slots(_) | Opening::Anew(_) => known -= 1,
        }
        let count = update.changes.len();
        let first = usize::try_from(known).map_or(count, |known| known.min(count));
        self.take(update.node, update.changes.range(first..count));
        let node = &mut self.nodes[index];
        let before = node.expected;
        node.expected += (count - first) as u64;
        if (before > expected || node.expected > before)
            && let Some(announced) = node.announced.as_mut()
        {
            announced.end(update.ends, &mut self.awaited);
        }
        Updated::Expecting { expected: node.expected, applied: first..count, voided }
    }

    /// Those changes of a node that are in slots of which it has begun its inventory.
    pub fn taken<'a>(
        &'a self,
        node: NodeId,
        changes: Changes<'a>,
    ) -> impl Iterator<Item = (BlockKey, Operation)> + 'a {
        changes.iter().filter(move |(key, _)| self.takes(node, key))
    }

    /// Whether changes of the node in the key's slot are taken.
    pub fn takes(&self, node: NodeId, key: &BlockKey) -> bool {
        let announced = self.nodes.get(usize::from(node.0)).and_then(|node| node.announced.as_ref());
        announced.is_some_and(|announced| announced.begun().has_key(key))
    }

    /// Applies changes in slots of which the node has begun its inventory.
    fn take(&mut self, node: NodeId, changes: Changes<'_>) {
        let Some(announced) = self.nodes[usize::from(node.0)].announced.take() else { return };
        for (key, operation) in changes.iter().filter(|(key, _)| announced.begun().has_key(key)) {
            self.updates += 1;
            match operation {
                Operation::Announce(tier) => self.announce(node, key, tier),
                Operation::Withdraw(tier) => self.withdraw(node, key, tier),
            }
        }
        self.nodes[usize::from(node.0)].announced = Some(announced);
    }

    /// The node's inventory of slots begins: nothing is known of it there. Returns those that it had begun before.
    fn begin_slots(&mut self, node: NodeId, slots: &SlotSet) -> SlotSet {
        let Some(mut announced) = self.nodes[usize::from(node.0)].announced.take() else {
            return SlotSet::EMPTY;
        };
        let slots = slots.and(&self.owned);
        let again = slots.and(announced.begun());
        for slot in again.iter() {
            self.remove(slot, |entry| entry.node == node);
        }
        announced.begin(&slots, &mut self.awaited);
        self.nodes[usize::from(node.0)].announced = Some(announced);
        again
    }

    fn announce(&mut self, node: NodeId, key: BlockKey, tier: Tier) {
        let slot = &mut self.slots[usize::from(key.hash_slot())];
        let state = &mut self.nodes[usize::from(node.0)];
        let generation = state.generation;
        match slot.entry_mut(&key, node) {
            Some(entry) if entry.generation == generation => {
                if entry.tiers.contains(tier) {
                    return;
                }
                entry.tiers = entry.tiers.with(tier);
            }
            Some(entry) => {
                (entry.generation, entry.tiers) = (generation, Tiers::NONE.with(tier));
                self.stale -= 1;
                state.entries += 1;
            }
            None => {
                let count = slot.insert(Entry { key, generation, node, tiers: Tiers::NONE.with(tier) });
                self.keys += u64::from(count == KeyCount::Changed);
                state.entries += 1;
            }
        }
        *state.in_tier(tier) += 1;
    }

    fn withdraw(&mut self, node: NodeId, key: BlockKey, tier: Tier) {
        let slot = &mut self.slots[usize::from(key.hash_slot())];
        let state = &mut self.nodes[usize::from(node.0)];
        let Some(entry) = slot.entry_mut(&key, node) else { return };
        if entry.generation != state.generation {
            self.stale -= 1;
        } else if !entry.tiers.contains(tier) {
            return;
        } else {
            *state.in_tier(tier) -= 1;
            let left = entry.tiers.without(tier);
            if !left.is_empty() {
                entry.tiers = left;
                return;
            }
            state.entries -= 1;
        }
        let (_, count) = slot.remove(&key, node).expect("the entry was just found");
        self.keys -= u64::from(count == KeyCount::Changed);
    }
}

impl Node {
    fn in_tier(&mut self, tier: Tier) -> &mut u64 {
        match tier {
            Tier::Dram => &mut self.dram,
            Tier::Nvme => &mut self.nvme,
        }
    }
}
