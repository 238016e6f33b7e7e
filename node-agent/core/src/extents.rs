//! Extents: leases and pins of pool slots for clients that read and write devices themselves.
//!
//! ```text
//! lease   allocate slots, lend records durable ──▶ reply; the client writes the payloads
//! commit  header page ──▶ sync ──▶ store record durable ──▶ the block is findable, reply
//! pin     the durable block leaves the eviction order ──▶ reply; the client reads and verifies it
//! ```
//!
//! A commit has one result for each block, and nothing is visible before the block is durable. Of two commits
//! of the same key, the first durable one wins; the slot of the other is freed.
//!
//! **Quarantine.** A session may end while its process still writes. Its leases and pins therefore stay until
//! [`Event::ExtentsReleased`](crate::event::Event::ExtentsReleased), which the runtime sends when no process
//! can do I/O for the session. Leases that an earlier process of the agent granted are kept in the
//! same way, by device.
//!
//! **Devices.** Consecutive slots of a lease are of consecutive devices. A session that states the place of its GPU
//! gets slots of the devices near it, as long as they have space.
//!
//! Limits: each session and all of them together hold at most a share of the devices, and leased slots count
//! as their tenant's usage. Leases do not expire, because a slot cannot be taken from a living process.
//!
//! Out of scope: payloads, and the proof that a process has ended its I/O.

mod commits;
mod holders;
mod leases;
mod messages;
mod pins;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_policy::{DevicePlace, SessionId};

use crate::cache::{Cache, LentSlot, Stored};
use crate::context::{Caller, Context};
use crate::counters::{Counters, ExtentCounters};
use crate::effect::{Effect, LeaseId, Reply};
use crate::pool::{BatchId, StoredBlock};
use crate::settings::Settings;
use crate::slab::{Slab, SlabId};
use commits::{CommitBatch, PendingCommit};
use leases::{LeaseBatch, PendingLease};
use pins::HeldPin;

pub use messages::{ExtentHolder, PinId, PinRefusal, PinnedBlock};

/// Bit of the batch ids of this owner; other batches number from 1.
const BATCH_BIT: u64 = 1 << 63;

/// Leases and pins of all sessions.
#[derive(Debug)]
pub(crate) struct Extents {
    holders: BTreeMap<SessionId, Holder>,
    leases: Slab<Lease>,
    pins: Slab<HeldPin>,
    /// GPUs of open sessions, as far as they state a place.
    gpus: BTreeMap<SessionId, DevicePlace>,
    leasing: Slab<PendingLease>,
    commits: Slab<PendingCommit>,
    batches: BTreeMap<BatchId, Batch>,
    batches_started: u64,
    /// Bytes of all leases and pins.
    held_bytes: u64,
    retry_after: Duration,
    counters: ExtentCounters,
}

/// Leases and pins of one session.
#[derive(Debug, Default)]
struct Holder {
    leases: BTreeSet<SlabId>,
    pins: BTreeSet<SlabId>,
    /// Bytes of its leases and pins, header pages included.
    bytes: u64,
    state: HolderState,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum HolderState {
    #[default]
    Open,
    /// The session has ended, but its process may still do I/O.
    Quarantined,
}

/// Slot that a client writes.
#[derive(Debug)]
struct Lease {
    session: SessionId,
    slot: LentSlot,
}

/// Batch of one device.
#[derive(Debug)]
enum Batch {
    Lease(LeaseBatch),
    Commit(CommitBatch),
}

impl Extents {
    /// Creates an owner without leases.
    pub(crate) fn new(settings: &Settings) -> Extents {
        Extents {
            holders: BTreeMap::new(),
            leases: Slab::new(),
            pins: Slab::new(),
            gpus: BTreeMap::new(),
            leasing: Slab::new(),
            commits: Slab::new(),
            batches: BTreeMap::new(),
            batches_started: 0,
            held_bytes: 0,
            retry_after: settings.retry_after,
            counters: ExtentCounters::default(),
        }
    }

    /// Notes the place of a new session's GPU.
    pub(crate) fn open(&mut self, session: SessionId, gpu: &DevicePlace) {
        self.gpus.insert(session, gpu.clone());
    }

    /// Returns leased slots of a session; leases of the arena are ignored.
    pub(crate) fn abort(&mut self, cache: &mut Cache, session: SessionId, leases: &[LeaseId]) {
        for lease in leases.iter().filter_map(|lease| lease.extent()) {
            if let Some(lease) = self.take_lease(session, lease) {
                cache.return_unwritten(&lease.slot);
            }
        }
    }

    /// Ends pins of a session.
    pub(crate) fn unpin(&mut self, cache: &mut Cache, cx: &mut Context, from: Caller, pins: &[PinId]) {
        for pin in pins {
            self.end_pin(cache, from.session, SlabId(pin.0));
        }
        cx.reply(from, Reply::Unpinned);
    }

    /// Quarantines what an ended session holds. Its commits continue, without a reply.
    pub(crate) fn close(&mut self, cx: &mut Context, session: SessionId) {
        self.gpus.remove(&session);
        for id in self.leasing.iter().map(|(id, _)| id).collect::<Vec<_>>() {
            let pending = self.leasing.get_mut(id).expect("just listed");
            pending.is_answered |= pending.from.session == session;
        }
        let commits: Vec<SlabId> = self.commits.iter().map(|(id, _)| id).collect();
        for id in commits {
            let commit = self.commits.get_mut(id).expect("just listed");
            commit.is_answered |= commit.from.session == session;
        }
        let Some(holder) = self.holders.get_mut(&session) else { return };
        holder.state = HolderState::Quarantined;
        cx.emit(Effect::AwaitExtents { holder: ExtentHolder::Session(session) });
    }

    /// Frees what a holder left behind: no process can do I/O for it.
    pub(crate) fn released(&mut self, cache: &mut Cache, holder: ExtentHolder) {
        let session = match holder {
            ExtentHolder::Session(session) => session,
            ExtentHolder::Earlier(device) => return cache.earlier_leases_ended(device),
        };
        let Some(holder) = self.holders.get(&session) else { return };
        if holder.state == HolderState::Open {
            return;
        }
        for lease in holder.leases.clone() {
            let lease = self.take_lease(session, lease).expect("listed leases live");
            cache.return_lent(&lease.slot);
        }
        for pin in self.holders.get(&session).map(|holder| holder.pins.clone()).unwrap_or_default() {
            self.end_pin(cache, session, pin);
        }
    }

    /// Whether a batch belongs to this owner.
    pub(crate) fn owns(batch: BatchId) -> bool {
        batch.0 & BATCH_BIT != 0
    }

    /// Handles the end of a batch.
    pub(crate) fn batch_done(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        id: BatchId,
        stored: &[StoredBlock],
    ) {
        match self.batches.remove(&id) {
            Some(Batch::Lease(batch)) => self.lease_done(cache, cx, batch, stored),
            Some(Batch::Commit(batch)) => self.commit_done(cache, cx, batch, stored),
            None => {}
        }
    }

    /// Sets the owner's counters and gauges.
    pub(crate) fn set_counters(&self, cache: &Cache, all: &mut Counters) {
        self.counters.copy_to(all);
        let in_quarantine = |holder: &&Holder| holder.state == HolderState::Quarantined;
        let quarantined = self.holders.values().filter(in_quarantine).map(|holder| holder.leases.len());
        let earlier = cache.earlier_leases();
        all.extents_leased = self.lent().count() as u64 + earlier;
        all.extents_quarantined = quarantined.sum::<usize>() as u64 + earlier;
        all.extents_pinned = self.pins.len() as u64;
    }

    /// Slots that are charged to tenants and hold no findable block.
    pub(crate) fn lent(&self) -> impl Iterator<Item = &LentSlot> {
        self.leases.iter().map(|(_, lease)| &lease.slot).chain(self.batches.values().flat_map(Batch::slots))
    }

    /// Checks that leases and pins belong to holders, and that no slot is lent twice.
    pub(crate) fn audit(&self) -> Result<(), String> {
        let (mut leases, mut pins, mut bytes) = (0, 0, 0);
        for (session, holder) in &self.holders {
            let own = |lease: &SlabId| self.leases.get(*lease).is_some_and(|lease| lease.session == *session);
            ensure!(holder.leases.iter().all(own), "session {session}: a lease of another session");
            let own = |pin: &SlabId| self.pins.get(*pin).is_some_and(|pin| pin.session == *session);
            ensure!(holder.pins.iter().all(own), "session {session}: a pin of another session");
            ensure!(!holder.is_empty(), "session {session} holds nothing and is kept");
            (leases, pins) = (leases + holder.leases.len(), pins + holder.pins.len());
            bytes += holder.bytes;
        }
        ensure!(leases == self.leases.len(), "leases without a session");
        ensure!(pins == self.pins.len(), "pins without a session");
        ensure!(bytes == self.held_bytes, "{bytes} bytes held, {} counted", self.held_bytes);
        let mut places = BTreeSet::new();
        // Without commits: the pool may have freed the slot of a failed item before the batch ends.
        let in_lease = self.batches.values().filter_map(|batch| match batch {
            Batch::Lease(batch) => Some(batch.slots.iter().map(|(_, slot)| slot)),
            Batch::Commit(_) => None,
        });
        for slot in self.leases.iter().map(|(_, lease)| &lease.slot).chain(in_lease.flatten()) {
            ensure!(places.insert((slot.device, slot.page)), "{slot:?} is lent twice");
        }
        Ok(())
    }

    /// Slots that sessions have pinned.
    pub(crate) fn pinned(&self) -> impl Iterator<Item = Stored> {
        self.pins.iter().map(|(_, pin)| pin.stored)
    }
}
