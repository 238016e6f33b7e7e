//! Checks between owners, for tests: leases, waits, fills, space and accounts.
//!
//! Each owner checks its own state. Here, what two owners know of the same thing is compared.

use std::collections::{BTreeMap, BTreeSet};

use reprise_policy::SessionId;

use crate::cache::{Cache, FrameState, SizeClassId};
use crate::extents::Extents;
use crate::load::Loads;
use crate::prefetch::Prefetch;
use crate::replicate::Replicate;
use crate::retention::Retention;
use crate::save::Save;
use crate::serve::Serves;
use crate::transfer::Transfer;
use crate::waiter::{KnownWait, WaiterId};

/// The owners whose state is compared.
pub(crate) struct Owners<'a> {
    pub(crate) sessions: &'a BTreeMap<SessionId, SizeClassId>,
    pub(crate) cache: &'a Cache,
    pub(crate) transfer: &'a Transfer,
    pub(crate) load: &'a Loads,
    pub(crate) save: &'a Save,
    pub(crate) serve: &'a Serves,
    pub(crate) extents: &'a Extents,
    pub(crate) replicate: &'a Replicate,
    pub(crate) prefetch: &'a Prefetch,
    pub(crate) retention: &'a Retention,
}

/// Checks that the owners agree. Costs time in proportion to their whole state.
pub(crate) fn compare(owners: &Owners) -> Result<(), String> {
    let Owners { sessions, cache, transfer, load, save, serve, extents, replicate, prefetch, retention } =
        owners;
    ensure!(save.sessions().eq(sessions.keys().copied()), "sessions of saves are not as opened");
    ensure!(load.sessions().eq(sessions.keys().copied()), "sessions of loads are not as opened");
    compare_fills(cache, transfer)?;
    compare_waits(transfer, load, (serve, prefetch))?;
    retention.audit_frames(cache)?;
    let ahead = prefetch.leases().chain(cache.retained_frames());
    cache.audit_leases(load.leases().chain(serve.leases()).chain(ahead).chain(transfer.import_frames()))?;
    let pinned: BTreeSet<_> =
        extents.pinned().chain(transfer.pinned()).map(|stored| (stored.device, stored.page)).collect();
    ensure!(pinned.iter().copied().eq(cache.pinned_slots()), "pinned slots: not those of pins and imports");
    cache.audit_accounts(save.being_written(), extents.lent())?;
    cache.audit_size_classes(sessions.len() + replicate.waiting_pulls().count())?;
    let frames = transfer.retained().chain(save.unsaved_frames());
    let size_classes = frames.map(|frame| cache.frame(frame).size_class);
    cache.audit_pending_space(size_classes.chain(replicate.waiting_pulls()))
}

/// Checks that frames and fills refer to each other.
fn compare_fills(cache: &Cache, transfer: &Transfer) -> Result<(), String> {
    let mut fills: BTreeMap<_, _> = transfer.frames().collect();
    for (index, frame) in cache.frames() {
        if let FrameState::Filling(fill) = frame.state {
            ensure!(fills.remove(&fill) == Some(index), "{index:?} and its fill disagree");
        }
    }
    ensure!(fills.is_empty(), "fills without a frame: {fills:?}");
    Ok(())
}

/// Checks that the waits of fills and the waiting blocks of other owners refer to each other.
fn compare_waits(
    transfer: &Transfer,
    load: &Loads,
    (serve, prefetch): (&Serves, &Prefetch),
) -> Result<(), String> {
    let mut waits: BTreeMap<WaiterId, KnownWait> = transfer.waits().collect();
    for (waiter, own) in load.waits().chain(prefetch.waits()) {
        let known = waits.remove(&waiter);
        ensure!(known == Some(own), "{waiter:?} waits as {own:?}, its fill knows {known:?}");
    }
    for (waiter, own) in serve.waits() {
        let known = waits.remove(&waiter).map(|known| (known.wait, known.frame));
        ensure!(known == Some(own), "{waiter:?} waits as {own:?}, its fill knows {known:?}");
    }
    ensure!(waits.is_empty(), "waits without a block: {waits:?}");
    Ok(())
}
