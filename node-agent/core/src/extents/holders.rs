//! Leases and pins of sessions, and their batches in flight.

use reprise_policy::SessionId;

use crate::cache::{LentSlot, nvme_bytes};
use crate::extents::commits::CommittedItem;
use crate::extents::{BATCH_BIT, Batch, Extents, Holder, Lease};
use crate::pool::BatchId;
use crate::slab::SlabId;

impl Extents {
    pub(super) fn next_batch(&mut self) -> BatchId {
        self.batches_started += 1;
        BatchId(BATCH_BIT | self.batches_started)
    }

    /// Removes a lease of a session; the caller owns its slot.
    pub(super) fn take_lease(&mut self, session: SessionId, id: SlabId) -> Option<Lease> {
        self.leases.get(id).filter(|lease| lease.session == session)?;
        let lease = self.leases.remove(id)?;
        let bytes = nvme_bytes(lease.slot.slot_bytes);
        self.change_holder(session, |holder| {
            holder.leases.remove(&id);
            holder.bytes -= bytes;
        });
        self.held_bytes -= bytes;
        Some(lease)
    }

    /// Changes a session's holder, which exists exactly while it holds something.
    pub(super) fn change_holder(&mut self, session: SessionId, change: impl FnOnce(&mut Holder)) {
        let holder = self.holders.entry(session).or_default();
        change(holder);
        if holder.is_empty() {
            self.holders.remove(&session);
        }
    }

    /// Bytes that a session may still get, given the shares of one session and of all.
    pub(super) fn bytes_left(&self, session: SessionId, of_session: u64, of_all: u64) -> u64 {
        let held = self.holders.get(&session).map_or(0, |holder| holder.bytes);
        let (mut own, mut all) = (held, self.held_bytes);
        for batch in self.batches.values() {
            let bytes = batch.bytes();
            own += if self.session_of(batch) == session { bytes } else { 0 };
            all += bytes;
        }
        of_session.saturating_sub(own).min(of_all.saturating_sub(all))
    }

    /// Number of a session's slots that are being leased or committed.
    pub(super) fn slots_in_flight(&self, session: SessionId) -> usize {
        let own = self.batches.values().filter(|batch| self.session_of(batch) == session);
        own.map(Batch::len).sum()
    }

    fn session_of(&self, batch: &Batch) -> SessionId {
        match batch {
            Batch::Lease(batch) => {
                self.leasing.get(batch.lease).expect("it waits for the batch").from.session
            }
            Batch::Commit(batch) => {
                self.commits.get(batch.commit).expect("it waits for the batch").from.session
            }
        }
    }
}

impl Batch {
    /// Slots that are being lent or committed.
    pub(super) fn slots(&self) -> impl Iterator<Item = &LentSlot> {
        let (lent, committed): (&[(usize, LentSlot)], &[CommittedItem]) = match self {
            Batch::Lease(batch) => (&batch.slots, &[]),
            Batch::Commit(batch) => (&[], &batch.items),
        };
        lent.iter().map(|(_, slot)| slot).chain(committed.iter().map(|item| &item.slot))
    }

    fn len(&self) -> usize {
        match self {
            Batch::Lease(batch) => batch.slots.len(),
            Batch::Commit(batch) => batch.items.len(),
        }
    }

    /// Bytes of its slots, which have one size.
    fn bytes(&self) -> u64 {
        self.slots().next().map_or(0, |slot| nvme_bytes(slot.slot_bytes) * self.len() as u64)
    }
}

impl Holder {
    pub(super) fn is_empty(&self) -> bool {
        self.leases.is_empty() && self.pins.is_empty()
    }
}
