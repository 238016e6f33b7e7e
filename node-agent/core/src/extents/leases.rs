//! Leases: slots for a client to write.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::cache::{Cache, LentSlot, SizeClass, SlotRequest, nvme_bytes};
use crate::context::{Caller, Context};
use crate::effect::{LeaseId, Place, Reply};
use crate::extents::{Batch, Extents, Lease};
use crate::limits::{EXTENTS_PER_SESSION_MAX, EXTENTS_PERMILLE, EXTENTS_SESSION_PERMILLE, RESERVE_SLOTS_MAX};
use crate::pool::StoredBlock;

/// Slots whose lend records are not durable yet.
#[derive(Debug)]
pub(super) struct PendingLease {
    pub(super) from: Caller,
    pub(super) slots: Vec<LentSlot>,
    wanted: u32,
    /// Whether the session has ended.
    pub(super) is_answered: bool,
}

impl Extents {
    /// Leases up to `count` slots, as far as the shares allow.
    pub(crate) fn lease(&mut self, cache: &mut Cache, cx: &mut Context, from: Caller, count: u32) {
        if let Some(refusal) = self.reject_lease(cache, from) {
            return cx.reply(from, refusal);
        }
        let (bytes, of_session) = cache.extent_share(from.size_class, EXTENTS_SESSION_PERMILLE);
        let (_, of_all) = cache.extent_share(from.size_class, EXTENTS_PERMILLE);
        let held = self.holders.get(&from.session).map_or(0, |holder| holder.leases.len());
        let held = held + self.slots_in_flight(from.session);
        let in_share = self.bytes_left(from.session, of_session, of_all) / bytes;
        let in_number = EXTENTS_PER_SESSION_MAX.saturating_sub(held) as u64;
        let possible = in_share.min(in_number).min(u64::from(count.min(RESERVE_SLOTS_MAX))) as u32;
        if possible == 0 {
            let message =
                "the session or all sessions hold their share of leased and pinned extents: commit, \
                           return or unpin some"
                    .to_owned();
            return cx.reply(from, Reply::Busy { message, retry_after: self.retry_after });
        }
        let batch = self.next_batch();
        match cache.lend(cx, (from.size_class, possible), batch) {
            Some(slots) => {
                let pending = PendingLease { from, slots, wanted: count, is_answered: false };
                self.batches.insert(batch, Batch::Lease(pending));
            }
            None => {
                reply(cx, from, Vec::new(), self.retry_after);
            }
        }
    }

    /// Answers a lease request whose records are durable.
    pub(super) fn lease_done(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        pending: PendingLease,
        lent: &[StoredBlock],
    ) {
        let PendingLease { from, slots, wanted, is_answered } = pending;
        let mut leases = Vec::with_capacity(slots.len());
        let lent: BTreeMap<_, _> = lent.iter().map(|block| (block.page, block)).collect();
        for slot in slots {
            let block = lent.get(&slot.page);
            let Some(block) = block.filter(|_| !is_answered && cache.can_lend(slot.device)) else {
                cache.return_lent(&slot);
                continue;
            };
            let place = cache.place_of_lent(&slot, block.generation);
            let bytes = nvme_bytes(slot.slot_bytes);
            let id = self.leases.insert(Lease { session: from.session, slot });
            self.change_holder(from.session, |holder| {
                holder.leases.insert(id);
                holder.bytes += bytes;
            });
            self.held_bytes += bytes;
            leases.push((LeaseId::of_extent(id), place));
        }
        self.counters.extent_leases += leases.len() as u64;
        if is_answered {
            return;
        }
        let is_complete = leases.len() >= wanted as usize;
        let retry_after = if is_complete { Duration::ZERO } else { self.retry_after };
        reply(cx, from, leases, retry_after);
    }

    /// Returns an error if the session can never get a lease.
    fn reject_lease(&self, cache: &Cache, from: Caller) -> Option<Reply> {
        if !cache.any_lender() {
            return Some(Reply::BadRequest(
                "no device of this node lends extents: set session.extents in the agent's configuration and \
                 use pool files on a file system with direct I/O"
                    .to_owned(),
            ));
        }
        let SizeClass { tenant_index: tenant, slot_bytes, .. } = *cache.size_class(from.size_class);
        if !cache.may_be_saved(SlotRequest { tenant, slot_bytes }) {
            return Some(Reply::BadRequest(format!(
                "a block of this layout has {slot_bytes} bytes: it exceeds the segments of the devices or the \
                 tenant's nvme.limit"
            )));
        }
        let (bytes, share) = cache.extent_share(from.size_class, EXTENTS_SESSION_PERMILLE);
        (bytes > share).then(|| {
            Reply::BadRequest(format!(
                "a slot of this layout has {bytes} bytes, but a session may hold at most {share} bytes of \
                 extents: enlarge the pool or use fewer tokens per block"
            ))
        })
    }
}

fn reply(cx: &mut Context, to: Caller, leases: Vec<(LeaseId, Place)>, retry_after: Duration) {
    cx.reply(to, Reply::Reserved { regions: Vec::new(), leases, retry_after });
}
