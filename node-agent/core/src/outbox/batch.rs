//! Batches, and how inventories and changes are cut into them.

use std::collections::VecDeque;

use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tier};

use crate::effect::{Change, ReplicaChange};

/// Changes in one message: 8,192 × 17 bytes = 136 KiB, about 2 ms of the directory's time.
pub const BATCH_CHANGES_MAX: usize = 8192;

/// Bit of an operation byte that says "withdrawn".
const WITHDRAWN: u8 = 0x80;

/// Changes to be sent together, and again and again until they are answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Whose.
    pub node: NodeId,
    /// Under which registration.
    pub epoch: Epoch,
    /// Its first number within the registration.
    pub sequence: u64,
    /// What of the node's inventory begins with it.
    pub opening: Opening,
    /// 16 bytes for each change.
    pub keys: Vec<u8>,
    /// One byte for each change: the tier, with 0x80 when the replica is withdrawn.
    pub operations: Vec<u8>,
    /// Slots whose inventory is whole after it.
    pub ends: SlotSet,
}

/// What a batch is to what was announced before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opening {
    /// More of the same.
    Nothing,
    /// The inventory of these slots begins: what was announced there before is gone.
    Slots(SlotSet),
    /// Everything announced before is gone, in all slots; the inventory of these slots begins.
    Anew(SlotSet),
}

/// What a batch will have, before it has a number.
#[derive(Debug)]
pub(super) struct Part {
    opening: Opening,
    keys: Vec<u8>,
    operations: Vec<u8>,
    ends: SlotSet,
}

/// The inventory of some slots, and how much of it is in batches.
#[derive(Debug)]
pub(super) struct Inventory {
    slots: SlotSet,
    replicas: Vec<(BlockKey, Tier)>,
    sent: usize,
    /// Its opening is in a batch.
    opened: bool,
}

impl Batch {
    pub(super) fn of(part: Part, (node, epoch): (NodeId, Epoch), sequence: u64) -> Batch {
        let Part { opening, keys, operations, ends } = part;
        Batch { node, epoch, sequence, opening, keys, operations, ends }
    }

    /// How many changes it has.
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Whether it has none: an inventory of nothing.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// How many sequence numbers it takes.
    pub fn numbers(&self) -> u64 {
        self.operations.len() as u64 + u64::from(self.opening != Opening::Nothing)
    }
}

impl Inventory {
    /// What of the replicas is in the slots.
    pub(super) fn of(slots: SlotSet, replicas: &[(BlockKey, Tier)]) -> Inventory {
        let replicas = replicas.iter().filter(|(key, _)| slots.has_key(key)).copied().collect();
        Inventory { slots, replicas, sent: 0, opened: false }
    }

    /// Replicas, and an opening, that are in no batch.
    pub(super) fn left(&self) -> usize {
        self.replicas.len() - self.sent + usize::from(!self.opened)
    }

    /// The next part; the first one opens.
    pub(super) fn next_part(&mut self, open: impl FnOnce(SlotSet) -> Opening) -> Part {
        let opened = std::mem::replace(&mut self.opened, true);
        let opening = if opened { Opening::Nothing } else { open(self.slots.clone()) };
        let last = self.replicas.len().min(self.sent + BATCH_CHANGES_MAX);
        let part = &self.replicas[self.sent..last];
        let keys = part.iter().flat_map(|(key, _)| key.0).collect();
        let operations = part.iter().map(|(_, tier)| operation(*tier, Change::Added)).collect();
        self.sent = last;
        let ends = if self.left() == 0 { self.slots.clone() } else { SlotSet::EMPTY };
        Part { opening, keys, operations, ends }
    }
}

/// Takes the next changes out of their queue.
pub(super) fn changes_of(queue: &mut VecDeque<ReplicaChange>) -> Part {
    let count = queue.len().min(BATCH_CHANGES_MAX);
    let mut keys = Vec::with_capacity(count * BlockKey::SIZE);
    let mut operations = Vec::with_capacity(count);
    for change in queue.drain(..count) {
        keys.extend_from_slice(&change.key.0);
        operations.push(operation(change.tier, change.change));
    }
    Part { opening: Opening::Nothing, keys, operations, ends: SlotSet::EMPTY }
}

/// A change as the directory's operation byte.
fn operation(tier: Tier, change: Change) -> u8 {
    match change {
        Change::Added => tier as u8,
        Change::Removed => tier as u8 | WITHDRAWN,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_is_the_tier_and_a_bit_for_withdrawal() {
        assert_eq!(operation(Tier::Nvme, Change::Added), 2);
        assert_eq!(operation(Tier::Dram, Change::Removed), 0x81);
    }
}
