//! The table of operations in flight: the kernel gets an index and a generation, never a pointer.

use crate::transfer::{IoVecs, Transfer};

/// `user_data` of an operation: generation in the upper half, index in the lower.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotId(u64);

/// A fixed number of slots for operations.
pub(crate) struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

/// One slot. Memory that the kernel refers to lives here, at a fixed address, until the operation is removed.
pub(crate) struct Slot {
    generation: u32,
    pub(crate) transfer: Option<Transfer>,
    /// Memory of the entry in flight; its allocation is reused.
    pub(crate) iovecs: IoVecs,
}

impl SlotId {
    /// Decodes the id of a completion.
    pub(crate) fn from_user_data(user_data: u64) -> SlotId {
        SlotId(user_data)
    }

    /// Encodes the id for a submission.
    pub(crate) fn user_data(self) -> u64 {
        self.0
    }

    fn new(generation: u32, index: u32) -> SlotId {
        SlotId(u64::from(generation) << 32 | u64::from(index))
    }

    fn index(self) -> usize {
        (self.0 & u64::from(u32::MAX)) as usize
    }

    fn generation(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

impl Slots {
    /// Creates a table for `capacity` operations, at most 2^31.
    pub(crate) fn new(capacity: usize) -> Slots {
        let slot = || Slot { generation: 0, transfer: None, iovecs: IoVecs::default() };
        let count = u32::try_from(capacity).expect("queue depths are limited to QUEUE_DEPTH_MAX");
        Slots { slots: (0..capacity).map(|_| slot()).collect(), free: (0..count).rev().collect() }
    }

    /// Returns the number of operations in flight.
    pub(crate) fn in_use(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Inserts an operation; returns it when the table is full.
    pub(crate) fn insert(&mut self, transfer: Transfer) -> Result<SlotId, Transfer> {
        let Some(index) = self.free.pop() else { return Err(transfer) };
        let slot = &mut self.slots[index as usize];
        slot.transfer = Some(transfer);
        Ok(SlotId::new(slot.generation, index))
    }

    /// Returns the slot of an operation in flight; `None` for an outdated id.
    pub(crate) fn get(&mut self, id: SlotId) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(id.index())?;
        (slot.generation == id.generation() && slot.transfer.is_some()).then_some(slot)
    }

    /// Removes an operation; its id becomes invalid.
    pub(crate) fn remove(&mut self, id: SlotId) -> Option<Transfer> {
        let slot = self.get(id)?;
        slot.generation = slot.generation.wrapping_add(1);
        let transfer = slot.transfer.take();
        self.free.push(id.index() as u32);
        transfer
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::op::{Op, Submission, Token};

    fn sync() -> Transfer {
        Transfer::new(Submission { token: Token(1), op: Op::Sync })
    }

    #[test]
    fn a_full_table_returns_the_operation() {
        let mut slots = Slots::new(1);
        let id = slots.insert(sync()).expect("one place");
        assert!(slots.insert(sync()).is_err());
        assert!(slots.remove(id).is_some());
        assert_eq!(slots.in_use(), 0);
    }

    #[test]
    fn an_id_is_invalid_after_its_operation() {
        let mut slots = Slots::new(1);
        let first = slots.insert(sync()).expect("one place");
        slots.remove(first).expect("it is there");
        let second = slots.insert(sync()).expect("one place");
        assert_ne!(first, second);
        assert!(slots.get(first).is_none() && slots.remove(first).is_none());
        assert!(slots.get(SlotId::from_user_data(u64::MAX - 1)).is_none());
        assert!(slots.get(second).is_some());
    }
}
