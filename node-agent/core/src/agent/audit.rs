//! Full check of the core's invariants between events, for tests.

use crate::agent::AgentCore;
use crate::agent::fills::{FillSource, Retention};
use crate::agent::loads::{LoadBlock, Stage};
use crate::agent::serves::ServeBlock;
use crate::cache::{FrameIndex, FrameState};
use crate::effect::ServeId;
use crate::slab::SlabId;
use crate::waiter::WaiterOwner;

impl AgentCore {
    /// Checks every invariant of the core. Costs time in proportion to the whole state.
    ///
    /// # Errors
    /// A description of the first violated invariant.
    pub fn audit(&self) -> Result<(), String> {
        self.cache.audit()?;
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

    /// Checks that fills, loads and serves refer to each other, and that the progress of each load matches
    /// its blocks.
    fn audit_waiters(&self) -> Result<(), String> {
        let is_filling = |state| matches!(state, FrameState::Filling(_));
        let filling = self.cache.frames().filter(|(_, frame)| is_filling(frame.state)).count();
        ensure!(filling == self.fills.len(), "{filling} frames are filled by {} fills", self.fills.len());
        let mut waits = 0;
        for (id, fill) in self.fills.iter() {
            let state = self.cache.frame(fill.frame).state;
            ensure!(state == FrameState::Filling(id.slot()), "{id:?} fills a frame that is {state:?}");
            for (wait, waiter) in self.waits.of(&fill.waiters) {
                waits += 1;
                let (object, at) = (waiter.object, waiter.block as usize);
                let block = match waiter.owner {
                    WaiterOwner::Load => {
                        self.loads.get(SlabId(object)).and_then(|load| match &load.blocks[at] {
                            LoadBlock::Waiting { lease, wait, layers, .. } => {
                                Some((lease.frame(), *wait, Some(u32::from(*layers))))
                            }
                            _ => None,
                        })
                    }
                    WaiterOwner::Serve => {
                        self.serves.get(&ServeId(object)).and_then(|serve| match &serve.blocks[at] {
                            ServeBlock::Waiting { lease, wait, .. } => Some((lease.frame(), *wait, None)),
                            _ => None,
                        })
                    }
                };
                let is_known = block.is_some_and(|(frame, known, layers)| {
                    (frame, known) == (fill.frame, wait) && layers.is_none_or(|layers| layers == fill.layers)
                });
                ensure!(is_known, "{waiter:?} does not refer to {wait:?} of {id:?}");
            }
        }
        ensure!(waits == self.waits.len(), "{waits} waits of fills, {} in the table", self.waits.len());
        let of_loads = self.loads.iter().flat_map(|(_, load)| &load.blocks);
        let of_loads = of_loads.filter(|block| matches!(block, LoadBlock::Waiting { .. })).count();
        let of_serves = self.serves.values().flat_map(|serve| &serve.blocks);
        let of_serves = of_serves.filter(|block| matches!(block, ServeBlock::Waiting { .. })).count();
        let blocks = of_loads + of_serves;
        ensure!(waits == blocks, "{blocks} blocks wait, {waits} waits");
        let bytes_from_peers: u64 = self
            .fills
            .iter()
            .filter(|(_, fill)| matches!(fill.origin, FillSource::Peer(_)))
            .map(|(_, fill)| self.cache.frame_slot(fill.frame).bytes)
            .sum();
        ensure!(
            bytes_from_peers == self.peers.queued_bytes(),
            "{bytes_from_peers} bytes requested from peers, not as counted"
        );
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
        let retained = self.fills.iter().filter(|(_, fill)| fill.keep == Retention::Saved);
        let retained: Vec<FrameIndex> = retained.map(|(_, fill)| fill.frame).collect();
        let bytes: u64 = retained.iter().map(|frame| self.cache.frame_slot(*frame).bytes).sum();
        let counted = self.retained_bytes;
        ensure!(bytes == counted, "{bytes} bytes of replicas are fetched, {counted} counted");
        let frames = retained.into_iter().chain(self.save.unsaved_frames());
        let size_classes = frames.map(|frame| self.cache.frame(frame).size_class);
        self.cache.audit_pending_space(size_classes.chain(self.replicate.waiting_pulls()))
    }
}
