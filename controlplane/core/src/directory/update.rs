//! Sequenced changes of one node.
//!
//! Updates may be late, repeated or lost. An update is accepted from the expected sequence number on. One
//! that opens inventories uses a number for that, so that a late copy of it is recognized even if it has no
//! changes.

use std::ops::Range;

use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tier};

use super::changes::Operation;
use super::table::{Entry, KeyCountChange, Tiers};
use super::{Changes, Directory, Node};

/// An update: changes of one node.
#[derive(Clone, Copy, Debug)]
pub struct Update<'a> {
    /// Node of the changes.
    pub node: NodeId,
    /// Registration of the node.
    pub epoch: Epoch,
    /// Number of the first change within the registration. An update that [opens](Opening) inventories uses
    /// one number for that, before its changes.
    pub sequence: u64,
    /// Inventories that start with this update.
    pub opening: Opening<'a>,
    /// The changes, in order.
    pub changes: Changes<'a>,
    /// Slots whose inventory is complete after this update.
    pub ends: &'a SlotSet,
}

/// Relation of an update to earlier announcements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening<'a> {
    /// Continues the inventories.
    Nothing,
    /// Starts the inventories of these slots; earlier announcements in them are invalid.
    Slots(&'a SlotSet),
    /// Starts the inventories of these slots; earlier announcements in all slots are invalid. Also used after
    /// a gap.
    Reset(&'a SlotSet),
}

/// Outcome of an update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UpdateOutcome {
    /// The registration is not current.
    Fenced,
    /// The update was applied, in part, or not at all. `applied` is a tail (earlier changes were known
    /// already), all, or empty. If `expected` is not the end of the update, changes before it are missing.
    Expecting {
        /// Expected sequence number of the next change.
        expected: u64,
        /// Indices of the applied changes.
        applied: Range<usize>,
        /// Earlier announcements that are invalid now.
        invalidated: Invalidation,
    },
}

/// Announcements that the opening of an update has invalidated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Invalidation {
    /// No announcements: no opening, an opening known already, or none existed.
    Nothing,
    /// The node's announcements in these slots.
    Slots(Box<SlotSet>),
    /// All announcements of the node.
    Node,
}

impl Directory {
    /// Applies changes of a node. Split long updates into parts with consecutive sequence numbers, with the
    /// opening in the first and the ends in the last part.
    pub fn update(&mut self, update: &Update<'_>) -> UpdateOutcome {
        let Some(node) = self.registered(update.node, update.epoch) else { return UpdateOutcome::Fenced };
        let (index, expected) = (usize::from(update.node.0), node.expected);
        let reset = matches!(update.opening, Opening::Reset(_));
        // A repeated reset must not discard later changes; a number beyond the expected one shows a gap.
        if (reset && update.sequence < expected) || (!reset && update.sequence > expected) {
            return UpdateOutcome::Expecting { expected, applied: 0..0, invalidated: Invalidation::Nothing };
        }
        let mut invalidated = Invalidation::Nothing;
        if reset {
            invalidated = Invalidation::Node;
            self.discard_inventory(update.node);
            self.nodes[index].expected = update.sequence;
        }
        let mut known = self.nodes[index].expected - update.sequence;
        match update.opening {
            Opening::Nothing => {}
            Opening::Slots(slots) | Opening::Reset(slots) if known == 0 => {
                let restarted = self.begin_slots(update.node, slots);
                if !reset && !restarted.is_empty() {
                    invalidated = Invalidation::Slots(Box::new(restarted));
                }
                self.nodes[index].expected += 1;
            }
            Opening::Slots(_) | Opening::Reset(_) => known -= 1,
        }
        let count = update.changes.len();
        let first = usize::try_from(known).map_or(count, |known| known.min(count));
        self.apply_accepted(update.node, update.changes.range(first..count));
        let node = &mut self.nodes[index];
        let before = node.expected;
        node.expected += (count - first) as u64;
        if (before > expected || node.expected > before)
            && let Some(progress) = node.progress.as_mut()
        {
            progress.end(update.ends, &mut self.incomplete);
        }
        UpdateOutcome::Expecting { expected: node.expected, applied: first..count, invalidated }
    }

    /// Changes in slots for which the node has begun its inventory.
    pub fn accepted_changes<'a>(
        &'a self,
        node: NodeId,
        changes: Changes<'a>,
    ) -> impl Iterator<Item = (BlockKey, Operation)> + 'a {
        changes.iter().filter(move |(key, _)| self.accepts(node, key))
    }

    /// Whether changes of the node in the key's slot are accepted.
    pub fn accepts(&self, node: NodeId, key: &BlockKey) -> bool {
        let progress = self.nodes.get(usize::from(node.0)).and_then(|node| node.progress.as_ref());
        progress.is_some_and(|progress| progress.begun().has_key(key))
    }

    /// Applies the changes in slots for which the node has begun its inventory.
    fn apply_accepted(&mut self, node: NodeId, changes: Changes<'_>) {
        let Some(progress) = self.nodes[usize::from(node.0)].progress.take() else { return };
        for (key, operation) in changes.iter().filter(|(key, _)| progress.begun().has_key(key)) {
            self.updates += 1;
            match operation {
                Operation::Announce(tier) => self.announce(node, key, tier),
                Operation::Withdraw(tier) => self.withdraw(node, key, tier),
            }
        }
        self.nodes[usize::from(node.0)].progress = Some(progress);
    }

    /// Starts the inventories of slots without entries. Returns the slots that had been begun before.
    fn begin_slots(&mut self, node: NodeId, slots: &SlotSet) -> SlotSet {
        let Some(mut progress) = self.nodes[usize::from(node.0)].progress.take() else {
            return SlotSet::EMPTY;
        };
        let slots = slots.and(&self.owned);
        let restarted = slots.and(progress.begun());
        for slot in restarted.iter() {
            self.remove(slot, |entry| entry.node == node);
        }
        progress.begin(&slots, &mut self.incomplete);
        self.nodes[usize::from(node.0)].progress = Some(progress);
        restarted
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
                self.keys += u64::from(count == KeyCountChange::Changed);
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
        self.keys -= u64::from(count == KeyCountChange::Changed);
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
