//! Checks of the serves' invariants, for tests.

use crate::cache::{Cache, FrameIndex};
use crate::serve::Serves;
use crate::serve::table::{ServeBlock, waiter};
use crate::waiter::{WaitId, WaiterId};

impl Serves {
    /// Checks the invariants within the serves. Costs time in proportion to their whole state.
    pub(crate) fn audit(&self, cache: &Cache) -> Result<(), String> {
        let leased: u64 = self.leases().map(|frame| cache.frame_slot(frame).bytes).sum();
        let counted = self.leased.total();
        ensure!(leased == counted, "{leased} bytes leased to serves, {counted} counted");
        // A request whose deadline has passed has no timer: its last blocks are being sent.
        let (serves, timers) = (self.serves.len(), self.timers.len());
        ensure!(timers <= serves, "{timers} timers of {serves} serves");
        ensure!(self.serves.values().all(|serve| serve.in_dram.is_empty()), "blocks in DRAM were not sent");
        ensure!(self.outcomes.is_empty(), "outcomes of serves were not routed");
        Ok(())
    }

    /// Frames on which serves hold leases, once for each lease.
    pub(crate) fn leases(&self) -> impl Iterator<Item = FrameIndex> {
        let blocks = self.serves.values().flat_map(|serve| &serve.blocks);
        blocks.filter_map(|block| block.lease().map(|lease| lease.frame()))
    }

    /// Blocks that wait for reads, with the frames of these.
    pub(crate) fn waits(&self) -> impl Iterator<Item = (WaiterId, (WaitId, FrameIndex))> {
        self.serves.iter().flat_map(|(id, serve)| {
            (0..).zip(&serve.blocks).filter_map(|(at, block)| match block {
                ServeBlock::Waiting { lease, wait, .. } => Some((waiter(*id, at), (*wait, lease.frame()))),
                _ => None,
            })
        })
    }
}
