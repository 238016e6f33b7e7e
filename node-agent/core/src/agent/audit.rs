//! Full check of the core's invariants between events, for tests.

use std::collections::BTreeMap;

use reprise_policy::TenantId;

use crate::agent::AgentCore;
use crate::agent::fills::{FillSource, Retention};
use crate::agent::loads::{LoadBlock, Stage};
use crate::agent::serves::ServeBlock;
use crate::cache::{CopyState, FrameIndex, FrameState, PendingSpace, SizeClass, nvme_bytes};
use crate::effect::ServeId;
use crate::slab::SlabId;
use crate::waiter::WaiterOwner;

/// Slots and bytes of a tenant in one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct SlotUsage {
    slots: u64,
    bytes: u64,
}

impl AgentCore {
    /// Checks every invariant of the core. Costs time in proportion to the whole state.
    ///
    /// # Errors
    /// A description of the first violated invariant.
    pub fn audit(&self) -> Result<(), String> {
        self.cache.audit()?;
        self.audit_leases()?;
        self.audit_waiters()?;
        self.audit_tenants()?;
        self.quota.audit(&self.cache)?;
        self.audit_sessions()?;
        self.replicate.audit()?;
        self.audit_pending_space()?;
        self.save.audit(&self.cache)
    }

    /// Checks that every lease belongs to a block of a load, a block of a serve, or a check.
    fn audit_leases(&self) -> Result<(), String> {
        let mut held: BTreeMap<FrameIndex, u32> = BTreeMap::new();
        for (_, load) in self.loads.iter() {
            for block in &load.blocks {
                let lease = match block {
                    LoadBlock::Waiting { lease, .. }
                    | LoadBlock::Ready { lease, .. }
                    | LoadBlock::Held { lease } => lease,
                    LoadBlock::Unplaced | LoadBlock::Lost(_) => continue,
                };
                *held.entry(lease.frame()).or_default() += 1;
            }
        }
        let mut serving = 0;
        for block in self.serves.values().flat_map(|serve| &serve.blocks) {
            let frame = match block {
                ServeBlock::Due | ServeBlock::Ended => continue,
                ServeBlock::Sending { lease } | ServeBlock::Waiting { lease, .. } => lease.frame(),
            };
            serving += self.cache.frame_slot(frame).bytes;
            *held.entry(frame).or_default() += 1;
        }
        let counted = self.serve_share.leased_bytes;
        ensure!(serving == counted, "{serving} bytes leased to serves, {counted} counted");
        for (id, lease) in self.cache.checks.iter() {
            *held.entry(lease.frame()).or_default() += 1;
            let checked = self.cache.frames.get(lease.frame()).copy_state == CopyState::Checking;
            ensure!(checked, "{id:?} checks a frame that is not being checked");
        }
        let total: u64 = held.values().map(|leases| u64::from(*leases)).sum();
        ensure!(total == self.cache.frames.read_leases(), "{total} leases held, not as counted");
        for (index, frame) in self.cache.frames.iter() {
            let holders = held.remove(&index).unwrap_or(0);
            ensure!(holders == frame.leases, "{index:?}: {} leases, {holders} holders", frame.leases);
        }
        ensure!(held.is_empty(), "leases on free slots: {held:?}");
        Ok(())
    }

    /// Checks that fills, loads and serves refer to each other, and that the progress of each load matches
    /// its blocks.
    fn audit_waiters(&self) -> Result<(), String> {
        let is_filling = |state| matches!(state, FrameState::Filling(_));
        let filling = self.cache.frames.iter().filter(|(_, frame)| is_filling(frame.state)).count();
        ensure!(filling == self.fills.len(), "{filling} frames are filled by {} fills", self.fills.len());
        let mut waits = 0;
        for (id, fill) in self.fills.iter() {
            let state = self.cache.frames.get(fill.frame).state;
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
            let mut ready = self.cache.sizes.get(load.size_class).layout.layers();
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

    /// Checks that every tenant's usage is counted correctly and within its limit.
    fn audit_tenants(&self) -> Result<(), String> {
        let mut held: BTreeMap<TenantId, [SlotUsage; 2]> = BTreeMap::new();
        let mut count = |tenant: TenantId, room: usize, bytes: u64| {
            let SlotUsage { slots, bytes: all } = &mut held.entry(tenant).or_default()[room];
            (*slots, *all) = (*slots + 1, *all + bytes);
        };
        for (_, frame) in self.cache.frames.iter() {
            let size_class = self.cache.sizes.get(frame.size_class);
            count(size_class.tenant, 0, size_class.slot_bytes);
        }
        for (_, entry) in self.cache.index.iter().filter(|(_, entry)| entry.stored().is_some()) {
            let size_class = self.cache.sizes.get(entry.size_class());
            count(size_class.tenant, 1, nvme_bytes(size_class.slot_bytes));
        }
        for frame in self.save.being_written() {
            let size_class = self.cache.sizes.get(self.cache.frames.get(frame).size_class);
            count(size_class.tenant, 1, nvme_bytes(size_class.slot_bytes));
        }
        for usage in self.tenant_usage() {
            let dram = SlotUsage { slots: usage.blocks.dram, bytes: usage.dram.used };
            let nvme = SlotUsage { slots: usage.blocks.nvme, bytes: usage.nvme.used };
            let (tenant, used) = (usage.tenant, [dram, nvme]);
            let counted = held.remove(&tenant).unwrap_or_default();
            ensure!(used == counted, "{tenant:?} holds {counted:?}, but {used:?} are counted");
        }
        ensure!(held.is_empty(), "bytes of unknown tenants: {held:?}");
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
        let uses: u64 = self.cache.sizes.uses().sum();
        let holders = self.sessions.len()
            + self.cache.index.len()
            + self.cache.frames.iter().count()
            + self.replicate.waiting_pulls().count();
        ensure!(uses == holders as u64, "size classes: {uses} uses, {holders} holders");
        Ok(())
    }

    /// Checks that the pending space is that of accepted blocks, their fetches, and unsaved blocks.
    fn audit_pending_space(&self) -> Result<(), String> {
        let retained = self.fills.iter().filter(|(_, fill)| fill.keep == Retention::Saved);
        let retained: Vec<FrameIndex> = retained.map(|(_, fill)| fill.frame).collect();
        let bytes: u64 = retained.iter().map(|frame| self.cache.frame_slot(*frame).bytes).sum();
        let counted = self.retained_bytes;
        ensure!(bytes == counted, "{bytes} bytes of replicas are fetched, {counted} counted");
        let frames = retained.into_iter().chain(self.save.unsaved_frames());
        let size_classes = frames.map(|frame| self.cache.frames.get(frame).size_class);
        let mut pending = PendingSpace::default();
        for size_class in size_classes.chain(self.replicate.waiting_pulls()) {
            let SizeClass { slot_bytes, tenant_index, .. } = *self.cache.sizes.get(size_class);
            pending.add(tenant_index, slot_bytes);
        }
        let counted = &self.cache.pending_space;
        ensure!(pending == *counted, "{pending:?} pending, {counted:?} counted");
        Ok(())
    }
}
