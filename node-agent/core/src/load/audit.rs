//! Checks of the loads' invariants, for tests.

use reprise_policy::SessionId;

use crate::cache::{Cache, FrameIndex};
use crate::load::Loads;
use crate::load::table::{LoadBlock, Stage, waiter};
use crate::waiter::{KnownWait, WaiterId};

impl Loads {
    /// Checks the invariants within the loads. Costs time in proportion to their whole state.
    pub(crate) fn audit(&self, cache: &Cache) -> Result<(), String> {
        let mut listed = 0;
        for (id, session) in &self.sessions {
            for load in session.loads() {
                let own = self.loads.get(load).is_some_and(|load| load.caller.session == *id);
                ensure!(own, "session {id}: {load:?} belongs to another session");
                listed += 1;
            }
        }
        ensure!(listed == self.loads.len(), "loads without a session");
        let timed = self.loads.iter().filter(|(_, load)| load.stage != Stage::Expired).count();
        let timers = timed + self.lookups.len();
        ensure!(self.timers.len() == timers, "{timers} loads and lookups, {} timers", self.timers.len());
        ensure!(self.outcomes.is_empty() && self.retries.is_empty(), "outcomes were not routed");
        self.audit_progress(cache)
    }

    /// Checks that the progress of each load matches its blocks.
    fn audit_progress(&self, cache: &Cache) -> Result<(), String> {
        for (id, load) in self.loads.iter() {
            let mut pending = 0;
            let mut ready = cache.size_class(load.caller.size_class).layout.layers();
            for (at, block) in (0..).zip(&load.blocks) {
                match block {
                    LoadBlock::Unplaced => {
                        (pending, ready) = (pending + 1, 0);
                        let placing = load.stage == Stage::Placing;
                        ensure!(placing, "{id:?} is answered although block {at} is unplaced");
                    }
                    LoadBlock::Waiting { layers, .. } => {
                        (pending, ready) = (pending + 1, ready.min(u32::from(*layers)));
                    }
                    LoadBlock::Ready { .. } | LoadBlock::Held { .. } | LoadBlock::Lost(_) => {}
                }
            }
            ensure!(load.absent.0.is_empty(), "{id:?}: blocks wait for the start of fills");
            let progress = (load.progress.pending(), load.progress.ready());
            ensure!(progress == (pending, ready), "{id:?}: {progress:?} should be {:?}", (pending, ready));
            let stage = match (pending, ready) {
                (0, _) if load.stage == Stage::Expired => Stage::Expired,
                (0, _) => Stage::Complete,
                (_, 0) => Stage::Placing,
                (_, layers) => Stage::Answered { layers },
            };
            ensure!(load.stage == stage, "{id:?} is {:?} and should be {stage:?}", load.stage);
        }
        Ok(())
    }

    /// Sessions that are open, in the order of their numbers.
    pub(crate) fn sessions(&self) -> impl Iterator<Item = SessionId> {
        self.sessions.keys().copied()
    }

    /// Frames on which loads hold leases, once for each lease.
    pub(crate) fn leases(&self) -> impl Iterator<Item = FrameIndex> {
        let blocks = self.loads.iter().flat_map(|(_, load)| &load.blocks);
        blocks.filter_map(|block| match block {
            LoadBlock::Waiting { lease, .. } | LoadBlock::Ready { lease, .. } | LoadBlock::Held { lease } => {
                Some(lease.frame())
            }
            LoadBlock::Unplaced | LoadBlock::Lost(_) => None,
        })
    }

    /// Blocks that wait for fills, with the state of the fill as the load knows it.
    pub(crate) fn waits(&self) -> impl Iterator<Item = (WaiterId, KnownWait)> {
        self.loads.iter().flat_map(|(id, load)| {
            (0..).zip(&load.blocks).filter_map(move |(at, block)| match block {
                LoadBlock::Waiting { lease, wait, layers, .. } => {
                    let (wait, frame, layers) = (*wait, lease.frame(), *layers);
                    Some((waiter(id, at), KnownWait { wait, frame, layers }))
                }
                _ => None,
            })
        })
    }
}
