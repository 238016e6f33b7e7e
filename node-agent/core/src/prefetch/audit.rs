//! Checks of the prefetches' invariants, for tests.

use crate::cache::{Cache, FrameIndex};
use crate::prefetch::pass::reserve;
use crate::prefetch::requests::Wanted;
use crate::prefetch::staged::BlockState;
use crate::prefetch::{Prefetch, waiter};
use crate::settings::PrefetchSettings;
use crate::waiter::{KnownWait, WaiterId};

impl Prefetch {
    /// Checks the invariants within the prefetches. Costs time in proportion to their whole state.
    pub(crate) fn audit(&self, cache: &Cache, settings: &PrefetchSettings) -> Result<(), String> {
        let (mut bytes, mut timers) = (0, 0);
        for (id, block) in self.staged.iter() {
            ensure!(block.state != BlockState::Requested, "{id:?} waits for a fill that was not routed");
            ensure!(self.staged.find(&block.key, block.size_class) == Some(id), "{id:?} cannot be found");
            if block.state != BlockState::Failed {
                bytes += block.slot_bytes;
            }
            let all = self.sessions.values().flat_map(|hinted| hinted.requests.values());
            let listed =
                all.flat_map(|wanted| &wanted.blocks).filter(|listed| listed.staged == Some(id)).count();
            ensure!(listed == block.holders as usize, "{id:?}: {listed} of {} holders", block.holders);
        }
        ensure!(self.staged.keys() == self.staged.iter().count(), "staged blocks and keys disagree");
        ensure!(bytes == self.staged.bytes(), "{bytes} bytes staged, {} counted", self.staged.bytes());
        let reserve = reserve(cache, settings);
        ensure!(bytes <= reserve, "{bytes} bytes staged exceed the reserve of {reserve}");
        for (session, hinted) in &self.sessions {
            let (keys, counted) = (hinted.requests.values().map(Wanted::keys).sum::<usize>(), hinted.keys);
            ensure!(keys == counted, "{session:?}: {keys} keys, {counted} counted");
            ensure!(keys <= settings.session_keys, "{session:?}: {keys} keys exceed the limit");
            timers += hinted.requests.values().filter(|wanted| wanted.due.is_some()).count();
        }
        ensure!(timers == self.timers.len(), "{timers} requests with timers, {} timers", self.timers.len());
        ensure!(self.outcomes.is_empty(), "{} outcomes were not routed", self.outcomes.len());
        Ok(())
    }

    /// Frames on which prefetches hold leases.
    pub(crate) fn leases(&self) -> impl Iterator<Item = FrameIndex> {
        self.staged.iter().filter_map(|(_, block)| match &block.state {
            BlockState::Reading { lease, .. } | BlockState::Ready { lease } => Some(lease.frame()),
            BlockState::Requested | BlockState::Failed => None,
        })
    }

    /// Blocks that wait for fills, with the state of the fill as this owner knows it.
    pub(crate) fn waits(&self) -> impl Iterator<Item = (WaiterId, KnownWait)> {
        self.staged.iter().filter_map(|(id, block)| match &block.state {
            BlockState::Reading { lease, wait, layers } => {
                let known = KnownWait { wait: *wait, frame: lease.frame(), layers: *layers };
                Some((waiter(id), known))
            }
            _ => None,
        })
    }
}
