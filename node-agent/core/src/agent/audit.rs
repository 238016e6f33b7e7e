//! Full check of the core's invariants between events, for tests.

use std::collections::BTreeMap;

use crate::agent::loads::{LoadBlock, Stage};
use crate::agent::serves::ServeBlock;
use crate::agent::{AgentCore, loads, serves};
use crate::cache::FrameState;
use crate::transfer::KnownWait;
use crate::waiter::WaiterId;

impl AgentCore {
    /// Checks every invariant of the core. Costs time in proportion to the whole state.
    ///
    /// # Errors
    /// A description of the first violated invariant.
    pub fn audit(&self) -> Result<(), String> {
        self.cache.audit()?;
        self.transfer.audit(&self.cache)?;
        self.audit_leases()?;
        self.audit_waiters()?;
        self.cache.audit_accounts(self.save.being_written())?;
        self.quota.audit(&self.cache)?;
        self.audit_sessions()?;
        self.replicate.audit()?;
        self.audit_pending_space()?;
        self.save.audit(&self.cache)
    }

    /// Checks that every lease belongs to a block of a load, a block of a serve, or a check.
    fn audit_leases(&self) -> Result<(), String> {
        let mut held = Vec::new();
        for (_, load) in self.loads.iter() {
            for block in &load.blocks {
                let lease = match block {
                    LoadBlock::Waiting { lease, .. }
                    | LoadBlock::Ready { lease, .. }
                    | LoadBlock::Held { lease } => lease,
                    LoadBlock::Unplaced | LoadBlock::Lost(_) => continue,
                };
                held.push(lease.frame());
            }
        }
        let mut serving = 0;
        for block in self.serves.values().flat_map(|serve| &serve.blocks) {
            let frame = match block {
                ServeBlock::Due | ServeBlock::Ended => continue,
                ServeBlock::Sending { lease } | ServeBlock::Waiting { lease, .. } => lease.frame(),
            };
            serving += self.cache.frame_slot(frame).bytes;
            held.push(frame);
        }
        let counted = self.serve_share.leased_bytes;
        ensure!(serving == counted, "{serving} bytes leased to serves, {counted} counted");
        self.cache.audit_leases(held.into_iter())
    }

    /// Checks that the waits of fills and the waiting blocks of loads and serves refer to each other, and that
    /// the progress of each load matches its blocks.
    fn audit_waiters(&self) -> Result<(), String> {
        let is_filling = |state| matches!(state, FrameState::Filling(_));
        let filling = self.cache.frames().filter(|(_, frame)| is_filling(frame.state)).count();
        let fills = self.transfer.frames().count();
        ensure!(filling == fills, "{filling} frames are filled by {fills} fills");
        let mut waits: BTreeMap<WaiterId, KnownWait> = self.transfer.waits().collect();
        for (id, load) in self.loads.iter() {
            for (at, block) in (0..).zip(&load.blocks) {
                let LoadBlock::Waiting { lease, wait, layers, .. } = block else { continue };
                let known = waits.remove(&loads::waiter(id, at));
                let own = KnownWait { wait: *wait, frame: lease.frame(), layers: *layers };
                ensure!(known == Some(own), "{id:?}: block {at} waits as {own:?}, its fill knows {known:?}");
            }
        }
        for (id, serve) in &self.serves {
            for (at, block) in (0..).zip(&serve.blocks) {
                let ServeBlock::Waiting { lease, wait, .. } = block else { continue };
                let known = waits.remove(&serves::waiter(*id, at));
                let fits = known.is_some_and(|known| (known.wait, known.frame) == (*wait, lease.frame()));
                ensure!(fits, "{id:?}: block {at} waits, its fill knows {known:?}");
            }
        }
        ensure!(waits.is_empty(), "waits without a block: {waits:?}");
        for (id, load) in self.loads.iter() {
            let mut pending = 0;
            let mut ready = self.cache.size_class(load.size_class).layout.layers();
            for (at, block) in (0..).zip(&load.blocks) {
                match block {
                    LoadBlock::Unplaced => {
                        (pending, ready) = (pending + 1, 0);
                        ensure!(
                            load.stage == Stage::Placing,
                            "{id:?} is answered although block {at} is unplaced"
                        );
                    }
                    LoadBlock::Waiting { layers, .. } => {
                        (pending, ready) = (pending + 1, ready.min(u32::from(*layers)));
                    }
                    LoadBlock::Ready { .. } | LoadBlock::Held { .. } | LoadBlock::Lost(_) => {}
                }
            }
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

    fn audit_sessions(&self) -> Result<(), String> {
        let mut loads = 0;
        for (id, session) in &self.sessions {
            for load in session.loads() {
                let own = self.loads.get(load).is_some_and(|load| load.session == *id);
                ensure!(own, "session {id}: {load:?} belongs to another session");
                loads += 1;
            }
        }
        ensure!(
            self.save.sessions().eq(self.sessions.keys().copied()),
            "sessions of saves are not as opened"
        );
        ensure!(loads == self.loads.len(), "loads without a session");
        let timed_loads = self.loads.iter().filter(|(_, load)| load.stage != Stage::Expired).count();
        let timers = timed_loads + self.lookups.len();
        ensure!(self.timers.len() >= timers, "something waits without a deadline");
        ensure!(self.timers.len() <= timers + self.serves.len(), "timers without an owner");
        self.cache.audit_size_classes(self.sessions.len() + self.replicate.waiting_pulls().count())
    }

    /// Checks that the pending space is that of accepted blocks, their fetches, and unsaved blocks.
    fn audit_pending_space(&self) -> Result<(), String> {
        let frames = self.transfer.retained().chain(self.save.unsaved_frames());
        let size_classes = frames.map(|frame| self.cache.frame(frame).size_class);
        self.cache.audit_pending_space(size_classes.chain(self.replicate.waiting_pulls()))
    }
}
