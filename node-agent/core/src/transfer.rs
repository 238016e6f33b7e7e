//! Transfers: blocks that are being read from a device or fetched from a peer into the arena.
//!
//! A key has at most one fill at a time; all that need the block wait for it (single flight). Each waiter
//! receives a lease on the fill's slot. A fill continues without waiters, because the device or transport
//! writes to its slot. Only their completion makes the slot free or the block readable.
//!
//! Waiters are opaque ids ([`WaiterId`]). What happens to a fill leaves as a [`TransferOutcome`] for each
//! waiter, in the order in which they attached.
//!
//! After a failure, the block is removed from its source. The slot of a failed fill becomes an orphan until
//! its readers release it. A slot that its device has not released is retired. A read that the device did not
//! start leaves the block in place.
//!
//! An import fills a slot from a block of a public tenant. Its source stays leased or pinned until the fill ends.

use std::collections::BTreeMap;

use reprise_policy::{NodeId, Tick, Tier};

use crate::cache::{Cache, EvictionPosition, Fill as Filling, FrameIndex, Lease, SizeClass, SizeClassId};
use crate::context::Context;
use crate::counters::{Counters, TransferCounters};
use crate::effect::{DeviceId, FetchBlock, FillId, LossReason, ReadClass, Source};
use crate::event::{FillError, FillUpdate};
use crate::slab::{Slab, SlabId};
use crate::transfer::device_reads::ReadEnd;
pub(crate) use crate::transfer::device_reads::{DeviceRate, DeviceReads};
use crate::transfer::imports::ImportSource;
use crate::transfer::peers::Peers;
use crate::transfer::waits::{WaitList, Waits};
use crate::waiter::{Advanced, Attached, Failed, Replicas, WaitId, WaiterId, WaiterOwner};

mod audit;
mod device_reads;
mod fetch;
mod imports;
mod peers;
mod waits;

/// All fills, and what waits for them.
#[derive(Debug)]
pub(crate) struct Transfer {
    fills: Slab<Fill>,
    waits: Waits,
    peers: Peers,
    /// Number of fetches started.
    fetches: u64,
    /// Fetches of accepted blocks that were not sent yet.
    pulls: BTreeMap<(NodeId, SizeClassId), Vec<FetchBlock>>,
    /// Slot bytes of the fills whose blocks will be saved.
    retained_bytes: u64,
    /// Number of fills that read from devices.
    device_reads: usize,
    /// Bytes that devices read, and their busy time.
    reads: DeviceReads,
    /// Reads ahead that something awaits since the request that is being handled.
    promoted: Vec<(DeviceId, FillId)>,
    outcomes: Vec<TransferOutcome>,
    counters: TransferCounters,
}

/// What happened to a fill, for another owner.
#[derive(Debug)]
pub(crate) enum TransferOutcome {
    /// A waiter was attached.
    Attached(WaiterId, Attached),
    /// The block of a waiter cannot be filled.
    Refused(WaiterId, LossReason),
    /// Every block of a request was attached or refused.
    Started { owner: WaiterOwner, object: u64 },
    /// Layers of a waiter's block were verified.
    Advanced(WaiterId, Advanced),
    /// The fill of a waiter's block failed.
    Failed(WaiterId, Failed),
    /// A block that must be saved is complete.
    Retained { frame: FrameIndex, position: EvictionPosition },
}

/// Fill of one block.
#[derive(Debug)]
struct Fill {
    lease: Lease<Filling>,
    origin: FillSource,
    /// Rank of its read at the device.
    class: ReadClass,
    /// Number of leading layers that are verified.
    layers: u16,
    waiters: WaitList,
    /// Tier of the source, on this node or on the peer.
    tier: Tier,
    /// Other replicas; `None` if the directory was not asked.
    others: Option<Replicas>,
    /// Block of a public tenant that is copied; `None` for the tenant's own block.
    import: Option<ImportSource>,
    verdict: Verdict,
    keep: Retention,
}

/// What happens to a block after its fill, apart from its waiters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Retention {
    /// Cached until it is evicted.
    Cached,
    /// Made durable, because an offer of it was accepted.
    Saved,
}

/// Source of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FillSource {
    Device(DeviceId),
    Peer(NodeId),
    /// Another slot of the arena.
    Arena,
}

/// State of a fill's checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// Unknown, or known and of the right number.
    Plausible,
    /// Of the wrong number: the fill fails when it ends.
    Invalid,
}

impl FillSource {
    fn device(self) -> Option<DeviceId> {
        match self {
            FillSource::Device(device) => Some(device),
            FillSource::Peer(_) | FillSource::Arena => None,
        }
    }
}

impl Fill {
    fn new(lease: Lease<Filling>, origin: FillSource, others: Option<Replicas>) -> Fill {
        Fill {
            lease,
            origin,
            class: ReadClass::Awaited,
            layers: 0,
            waiters: WaitList::EMPTY,
            tier: Tier::Nvme,
            others,
            import: None,
            verdict: Verdict::Plausible,
            keep: Retention::Cached,
        }
    }

    /// Source to report to waiters.
    fn source(&self) -> Source {
        match self.origin {
            FillSource::Device(_) => Source::OwnNvme,
            FillSource::Peer(_) => Source::of_peer(self.tier),
            FillSource::Arena => Source::OwnDram,
        }
    }

    /// Whether the block is read from its own copy on a device.
    fn is_read_back(&self) -> bool {
        self.origin.device().is_some() && self.import.is_none()
    }
}

impl Transfer {
    /// Creates the state without fills.
    pub(crate) fn new() -> Transfer {
        Transfer {
            fills: Slab::new(),
            waits: Waits::new(),
            peers: Peers::default(),
            fetches: 0,
            pulls: BTreeMap::new(),
            retained_bytes: 0,
            device_reads: 0,
            reads: DeviceReads::default(),
            promoted: Vec::new(),
            outcomes: Vec::new(),
            counters: TransferCounters::default(),
        }
    }

    /// Whether there is anything to route.
    pub(crate) fn has_outcomes(&self) -> bool {
        !self.outcomes.is_empty()
    }

    /// Returns what happened since the last call, in order.
    pub(crate) fn take_outcomes(&mut self) -> Vec<TransferOutcome> {
        std::mem::take(&mut self.outcomes)
    }

    /// Takes back the list of [`Transfer::take_outcomes`], whose memory the next outcomes use.
    pub(crate) fn reuse(&mut self, outcomes: Vec<TransferOutcome>) {
        debug_assert!(outcomes.is_empty(), "all outcomes are routed");
        if self.outcomes.is_empty() {
            self.outcomes = outcomes;
        }
    }

    /// Slot bytes of the fills whose blocks will be saved.
    pub(crate) fn retained_bytes(&self) -> u64 {
        self.retained_bytes
    }

    /// Number of blocks that are being read from devices.
    pub(crate) fn device_reads(&self) -> usize {
        self.device_reads
    }

    /// What each device reads.
    pub(crate) fn reads(&self) -> &DeviceReads {
        &self.reads
    }

    /// Sets the counters and gauges of fills.
    pub(crate) fn set_counters(&self, all: &mut Counters) {
        self.counters.copy_to(all);
        all.fills_in_flight = self.fills.len() as u64;
    }

    /// Handles progress or failure of a fill.
    pub(crate) fn update(&mut self, cache: &mut Cache, cx: &mut Context, id: SlabId, update: FillUpdate) {
        match update {
            FillUpdate::Layers { layers, checksums, tier } => {
                let Some(fill) = self.fills.get_mut(id) else { return };
                fill.tier = tier;
                if let Some(checksums) = checksums {
                    fill.set_checksums(cache, &checksums);
                }
                self.advance(cache, cx, id, layers);
            }
            FillUpdate::Failed(error) => self.fail(cache, cx, id, error),
        }
    }

    /// Marks a fetch so that its block becomes durable here.
    pub(crate) fn retain(&mut self, cache: &mut Cache, slot: u32) {
        let Some(fill) = self.fills.at_mut(slot) else { return };
        if !fill.is_read_back() && std::mem::replace(&mut fill.keep, Retention::Saved) == Retention::Cached {
            let size_class = cache.frame(fill.lease.frame()).size_class;
            self.retained_bytes += cache.slot_bytes(size_class);
            cache.add_pending(size_class);
        }
    }

    /// Detaches a waiter, whose owner keeps or releases the lease.
    pub(crate) fn detach(&mut self, wait: WaitId, waiter: WaiterId) {
        let Some(slot) = self.waits.fill_of(wait, waiter) else { return };
        let fill = self.fills.at_mut(slot).expect("a wait that has not ended has a fill");
        self.waits.remove(&mut fill.waiters, wait);
    }

    /// Records that leading layers of a fill are verified.
    fn advance(&mut self, cache: &mut Cache, cx: &mut Context, id: SlabId, layers: u32) {
        let Some(fill) = self.fills.get_mut(id) else { return };
        let all = cache.size_class_of(&fill.lease).layout.layers();
        let has_checksums = cache.frame(fill.lease.frame()).has_checksums();
        if fill.verdict == Verdict::Invalid || !has_checksums {
            if layers >= all {
                self.fail(cache, cx, id, FillError::Corrupt);
            }
            return;
        }
        let (from, to) = (fill.layers, layers.min(all) as u16);
        if to <= from {
            return;
        }
        fill.layers = to;
        let is_whole = u32::from(to) == all;
        let advanced = Advanced { from, to, source: fill.source(), is_whole };
        let reports = self.waits.of(&fill.waiters).map(|waiter| TransferOutcome::Advanced(waiter, advanced));
        self.outcomes.extend(reports);
        if is_whole {
            self.complete(cache, cx.now, id);
        }
    }

    fn complete(&mut self, cache: &mut Cache, now: Tick, id: SlabId) {
        let Some(mut fill) = self.fills.remove(id) else { return };
        self.waits.clear(&mut fill.waiters);
        self.end_retention(cache, &fill);
        let SizeClass { layout, slot_bytes, .. } = cache.size_class_of(&fill.lease);
        let bytes = layout.block_bytes();
        match fill.origin {
            FillSource::Device(device) => {
                self.device_reads -= 1;
                self.reads.end(device, *slot_bytes, now, ReadEnd::Complete);
                self.counters.device_fills += 1;
                self.counters.device_fill_bytes += bytes;
            }
            FillSource::Peer(node) => {
                self.peers.dequeue(node, *slot_bytes);
                self.counters.peer_fills += 1;
                self.counters.peer_fill_bytes += bytes;
            }
            FillSource::Arena => {}
        }
        if let Some(source) = fill.import {
            self.counters.imported_blocks += 1;
            self.counters.imported_bytes += bytes;
            if let ImportSource::Local(copy) = source {
                cache.release_public(copy);
            }
        }
        let finished = cache.finish_fill(fill.lease, fill.origin.device());
        if let (Retention::Saved, Some((frame, position))) = (fill.keep, finished) {
            self.counters.pulled_blocks += 1;
            self.counters.pulled_bytes += bytes;
            self.outcomes.push(TransferOutcome::Retained { frame, position });
        }
    }

    fn fail(&mut self, cache: &mut Cache, cx: &mut Context, id: SlabId, error: FillError) {
        let Some(mut fill) = self.fills.remove(id) else { return };
        let error = match (fill.origin, error) {
            (FillSource::Device(_), FillError::PeerLost) => FillError::Device,
            (_, error) => error,
        };
        self.count_failure(error);
        match fill.origin {
            FillSource::Device(device) => {
                self.device_reads -= 1;
                let slot_bytes = cache.size_class_of(&fill.lease).slot_bytes;
                self.reads.end(device, slot_bytes, cx.now, ReadEnd::Failed);
            }
            FillSource::Peer(node) => {
                self.peers.dequeue(node, cache.size_class_of(&fill.lease).slot_bytes);
                if error == FillError::PeerLost {
                    self.peers.suspect(node, cx.now);
                }
            }
            FillSource::Arena => {}
        }
        self.end_retention(cache, &fill);
        let failed = Failed { error, others: fill.others };
        let reports =
            self.waits.of(&fill.waiters).map(|waiter| TransferOutcome::Failed(waiter, failed.clone()));
        self.outcomes.extend(reports);
        self.waits.clear(&mut fill.waiters);
        cache.fail_fill(cx, fill.lease, fill.origin.device(), error);
        if let Some(ImportSource::Local(copy)) = fill.import {
            cache.public_copy_failed(cx, &copy, error);
            cache.release_public(copy);
        }
    }

    fn count_failure(&mut self, error: FillError) {
        match error {
            FillError::Device | FillError::Stranded => self.counters.fill_device_errors += 1,
            FillError::Refused => self.counters.fill_refused += 1,
            FillError::Corrupt => self.counters.fill_corrupt += 1,
            FillError::Absent => self.counters.fill_absent += 1,
            FillError::PeerLost => self.counters.fill_peer_lost += 1,
        }
    }

    /// Releases the pending space of a fill that has ended.
    fn end_retention(&mut self, cache: &mut Cache, fill: &Fill) {
        if fill.keep == Retention::Saved {
            let size_class = cache.frame(fill.lease.frame()).size_class;
            self.retained_bytes -= cache.slot_bytes(size_class);
            cache.remove_pending(size_class);
        }
    }
}

impl Fill {
    /// Sets the checksums of the block, unless they are known.
    fn set_checksums(&mut self, cache: &mut Cache, checksums: &[u32]) {
        let frame = self.lease.frame();
        if cache.frame(frame).has_checksums() {
            return;
        }
        if checksums.len() == cache.size_class_of(&self.lease).layout.objects() as usize {
            cache.set_checksums(frame, checksums);
        } else {
            self.verdict = Verdict::Invalid;
        }
    }
}
