//! Checks of the transfers' invariants, for tests.

use crate::cache::{Cache, FrameIndex, FrameState, PublicCopy, Stored};
use crate::transfer::{Fill, FillSource, Retention, Transfer};
use crate::waiter::{KnownWait, WaiterId};

impl Transfer {
    /// Checks the invariants within the transfers. Costs time in proportion to their whole state.
    pub(crate) fn audit(&self, cache: &Cache) -> Result<(), String> {
        let (mut waits, mut retained, mut requested) = (0, 0, 0);
        for (id, fill) in self.fills.iter() {
            let state = cache.frame(fill.lease.frame()).state;
            ensure!(state == FrameState::Filling(id.slot()), "{id:?} fills a frame that is {state:?}");
            let slot_bytes = cache.size_class_of(&fill.lease).slot_bytes;
            if matches!(fill.origin, FillSource::Peer(_)) {
                requested += slot_bytes;
            }
            if fill.keep == Retention::Saved {
                retained += slot_bytes;
            }
            waits += self.waits.of(&fill.waiters).count();
        }
        ensure!(waits == self.waits.len(), "{waits} waits of fills, {} in the table", self.waits.len());
        let counted = self.peers.queued_bytes();
        ensure!(requested == counted, "{requested} bytes requested from peers, {counted} counted");
        let counted = self.retained_bytes;
        ensure!(retained == counted, "{retained} bytes of fills will be saved, {counted} counted");
        let reads = self.fills.iter().filter(|(_, fill)| fill.origin.device().is_some()).count();
        ensure!(
            reads == self.device_reads,
            "{reads} blocks are read from devices, {} counted",
            self.device_reads
        );
        let slot_bytes = |fill: &Fill| cache.size_class_of(&fill.lease).slot_bytes;
        let reading = self.fills.iter().filter(|(_, fill)| fill.origin.device().is_some());
        let (reading, counted) =
            (reading.map(|(_, fill)| slot_bytes(fill)).sum::<u64>(), self.reads.in_flight_bytes());
        ensure!(reading == counted, "{reading} bytes are read from devices, {counted} counted");
        ensure!(self.pulls.is_empty(), "fetches were started and not sent");
        ensure!(self.outcomes.is_empty(), "{} outcomes were not routed", self.outcomes.len());
        Ok(())
    }

    /// Frames of all fills, by the slot of the fill.
    pub(crate) fn frames(&self) -> impl Iterator<Item = (u32, FrameIndex)> {
        self.fills.iter().map(|(id, fill)| (id.slot(), fill.lease.frame()))
    }

    /// Frames of the fills whose blocks will be saved.
    pub(crate) fn retained(&self) -> impl Iterator<Item = FrameIndex> {
        let retained = self.fills.iter().filter(|(_, fill)| fill.keep == Retention::Saved);
        retained.map(|(_, fill)| fill.lease.frame())
    }

    /// Frames that imports read.
    pub(crate) fn import_frames(&self) -> impl Iterator<Item = FrameIndex> {
        self.imports().filter_map(PublicCopy::frame)
    }

    /// Slots of devices that imports have pinned.
    pub(crate) fn pinned(&self) -> impl Iterator<Item = Stored> {
        self.imports().filter_map(PublicCopy::stored)
    }

    fn imports(&self) -> impl Iterator<Item = &PublicCopy> {
        self.fills.iter().filter_map(|(_, fill)| fill.import.as_ref()?.local())
    }

    /// All waits, with the state of their fills.
    pub(crate) fn waits(&self) -> impl Iterator<Item = (WaiterId, KnownWait)> {
        self.fills.iter().flat_map(|(_, fill)| {
            let (frame, layers) = (fill.lease.frame(), fill.layers);
            let of_fill = self.waits.numbered(&fill.waiters);
            of_fill.map(move |(wait, waiter)| (waiter, KnownWait { wait, frame, layers }))
        })
    }
}
