//! Leases: slots for a client to write.

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_policy::admission::AdmissionMode;

use crate::cache::{Cache, LentSlot, SizeClass, SlotRequest, nvme_bytes};
use crate::context::{Caller, Context};
use crate::effect::{DeviceId, LeaseId, Place, Reply};
use crate::extents::{Batch, Extents, Lease};
use crate::limits::{EXTENTS_PER_SESSION_MAX, EXTENTS_PERMILLE, EXTENTS_SESSION_PERMILLE, RESERVE_SLOTS_MAX};
use crate::pool::{PageNumber, StoredBlock};
use crate::slab::SlabId;

/// Lease request with slots whose lend records are not durable yet.
#[derive(Debug)]
pub(super) struct PendingLease {
    pub(super) from: Caller,
    /// Leases with durable records, by the position of their slots in the rotation.
    leases: BTreeMap<usize, (LeaseId, Place)>,
    wanted: u32,
    /// Number of batches without a result.
    open: usize,
    /// Whether the session has ended.
    pub(super) is_answered: bool,
}

/// Slots of one lease request on one device.
#[derive(Debug)]
pub(super) struct LeaseBatch {
    pub(super) lease: SlabId,
    /// Slots with their positions in the request.
    pub(super) slots: Vec<(usize, LentSlot)>,
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
        let slots = cache.allocate_lent((from.size_class, possible), self.gpus.get(&from.session));
        if slots.is_empty() {
            return reply(cx, from, Vec::new(), self.retry_after);
        }
        let mut devices: BTreeMap<DeviceId, Vec<(usize, LentSlot)>> = BTreeMap::new();
        for (position, slot) in slots.into_iter().enumerate() {
            devices.entry(slot.device).or_default().push((position, slot));
        }
        let open = devices.len();
        let pending = PendingLease { from, leases: BTreeMap::new(), wanted: count, open, is_answered: false };
        let lease = self.leasing.insert(pending);
        for (device, slots) in devices {
            let batch = self.next_batch();
            let pages: Vec<PageNumber> = slots.iter().map(|(_, slot)| slot.page).collect();
            cache.lend(cx, from.size_class, (device, batch), &pages);
            self.batches.insert(batch, Batch::Lease(LeaseBatch { lease, slots }));
        }
    }

    /// Leases the slots of a device whose records are durable. The request is answered with the last device.
    pub(super) fn lease_done(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        LeaseBatch { lease: request, slots }: LeaseBatch,
        lent: &[StoredBlock],
    ) {
        let pending = self.leasing.get_mut(request).expect("it waits for the batch");
        pending.open -= 1;
        let (from, is_answered) = (pending.from, pending.is_answered);
        let mut leases = Vec::with_capacity(slots.len());
        let lent: BTreeMap<_, _> = lent.iter().map(|block| (block.page, block)).collect();
        for (position, slot) in slots {
            let block = lent.get(&slot.page);
            let Some(block) = block.filter(|_| !is_answered && cache.can_lend(slot.device)) else {
                cache.return_unwritten(&slot);
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
            leases.push((position, (LeaseId::of_extent(id), place)));
        }
        self.counters.extent_leases += leases.len() as u64;
        self.leasing.get_mut(request).expect("it waits for the batch").leases.extend(leases);
        self.reply_if_leased(cx, request);
    }

    fn reply_if_leased(&mut self, cx: &mut Context, id: SlabId) {
        if self.leasing.get(id).is_none_or(|pending| pending.open > 0) {
            return;
        }
        let PendingLease { from, leases, wanted, is_answered, .. } =
            self.leasing.remove(id).expect("just seen");
        if is_answered {
            return;
        }
        let leases: Vec<(LeaseId, Place)> = leases.into_values().collect();
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
        let mode = cache.admission_mode();
        if mode != AdmissionMode::Always {
            // An extent is written before its commit, and the agent decides about blocks that it has in DRAM.
            let mode = mode.name();
            return Some(Reply::BadRequest(format!(
                "pool.admission is {mode}: save blocks through the arena, so that the agent decides which it writes"
            )));
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
