//! Batches of changes, and the splitting of inventories and queued changes into batches.

use std::collections::VecDeque;

use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tier};

use crate::effect::{Change, ReplicaChange};

/// Maximum changes in one message: 8,192 × 17 bytes = 136 KiB, about 2 ms of the directory's time.
pub const BATCH_CHANGES_MAX: usize = 8192;

/// Bit of an operation byte that marks a withdrawn replica.
const WITHDRAWN: u8 = 0x80;

/// Changes that are sent together, unchanged until they are answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Batch {
    /// Node that announces the changes.
    pub node: NodeId,
    /// Registration under which the batch is sent.
    pub epoch: Epoch,
    /// First sequence number, within the registration.
    pub sequence: u64,
    /// Inventories that start with this batch.
    pub opening: Opening,
    /// Keys of the changes, 16 bytes each.
    pub keys: Vec<u8>,
    /// One byte for each change: the tier, plus 0x80 if the replica is withdrawn.
    pub operations: Vec<u8>,
    /// Slots whose inventory is complete after this batch.
    pub ends: SlotSet,
}

/// Relation of a batch to earlier announcements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Opening {
    /// Continues the earlier announcements.
    Nothing,
    /// Starts the inventory of these slots, replacing earlier announcements there.
    Slots(SlotSet),
    /// Starts the inventory of these slots, replacing all earlier announcements in all slots.
    Reset(SlotSet),
}

/// Content of a batch before it has a sequence number.
#[derive(Debug)]
pub(super) struct Part {
    opening: Opening,
    keys: Vec<u8>,
    operations: Vec<u8>,
    ends: SlotSet,
}

/// Inventory of some slots, and the part of it that is already in batches.
#[derive(Debug)]
pub(super) struct Inventory {
    slots: SlotSet,
    replicas: Vec<(BlockKey, Tier)>,
    sent: usize,
    /// Whether a batch with its opening exists.
    opened: bool,
}

impl Batch {
    pub(super) fn of(part: Part, (node, epoch): (NodeId, Epoch), sequence: u64) -> Batch {
        let Part { opening, keys, operations, ends } = part;
        Batch { node, epoch, sequence, opening, keys, operations, ends }
    }

    /// Number of changes in the batch.
    pub fn len(&self) -> usize {
        self.operations.len()
    }

    /// Whether the batch has no changes, as for an empty inventory.
    pub fn is_empty(&self) -> bool {
        self.operations.is_empty()
    }

    /// Number of sequence numbers that the batch uses.
    pub fn numbers(&self) -> u64 {
        self.operations.len() as u64 + u64::from(self.opening != Opening::Nothing)
    }
}

impl Inventory {
    /// Creates an inventory of those replicas that lie in the slots.
    pub(super) fn of(slots: SlotSet, replicas: &[(BlockKey, Tier)]) -> Inventory {
        let replicas = replicas.iter().filter(|(key, _)| slots.has_key(key)).copied().collect();
        Inventory { slots, replicas, sent: 0, opened: false }
    }

    /// Number of replicas and openings that are not in a batch yet.
    pub(super) fn remaining(&self) -> usize {
        self.replicas.len() - self.sent + usize::from(!self.opened)
    }

    /// Returns the next part; the first part contains the opening.
    pub(super) fn next_part(&mut self, open: impl FnOnce(SlotSet) -> Opening) -> Part {
        let opened = std::mem::replace(&mut self.opened, true);
        let opening = if opened { Opening::Nothing } else { open(self.slots.clone()) };
        let last = self.replicas.len().min(self.sent + BATCH_CHANGES_MAX);
        let part = &self.replicas[self.sent..last];
        let keys = part.iter().flat_map(|(key, _)| key.0).collect();
        let operations = part.iter().map(|(_, tier)| operation(*tier, Change::Added)).collect();
        self.sent = last;
        let ends = if self.remaining() == 0 { self.slots.clone() } else { SlotSet::EMPTY };
        Part { opening, keys, operations, ends }
    }
}

/// Removes the next changes from the queue.
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

/// Returns the directory's operation byte for a change.
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
    fn operation_byte_is_tier_plus_withdrawal_bit() {
        assert_eq!(operation(Tier::Nvme, Change::Added), 2);
        assert_eq!(operation(Tier::Dram, Change::Removed), 0x81);
    }
}
