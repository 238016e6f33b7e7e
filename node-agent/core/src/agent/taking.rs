//! Taking blocks that peers offer, so that there are replicas of them on this node.
//!
//! ```text
//!  PeerOffer ──▶ taken? ──here already──▶ saved, if it is not durable
//!                  │ waiting ──room──▶ a fetch without a session ──whole──▶ saved ──▶ announced as durable
//!                  └─▶ AnswerOffer: which, and when to offer the others again
//! ```
//!
//! What is taken costs no other block its place on a device: it is refused when there is no room beyond what is kept free,
//! and given up when the room went while it came. Bytes are bounded by the bandwidth when blocks are taken, and by
//! [`PULL_BYTES_MAX`] and a share of the arena while they are fetched and written. A promise is no debt: what does not come
//! about is offered again. A fetched block that nobody here reads is the first to go from DRAM once it is saved, so that it
//! displaces nothing that is used. Otherwise it is an ordinary one from the beginning of its fetch on: loads wait for it with the
//! others, and a commit of the same block wins.

mod coming;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use reprise_policy::{BlockKey, NodeId, NodeMode, Tick};

use super::AgentCore;
use super::describe::BlockOrigin;
use super::fills::{Fill, Keep, Origin};
use super::frames::{FrameIndex, FrameState};
use super::index::Dram;
use super::limits::{
    OFFER_RETRY_MAX, PLACE_AGAIN, PLACE_KEYS_MAX, PULL_AGAIN, PULL_ARENA_PERMILLE, PULL_BYTES_MAX,
    PULL_PATIENCE, PULLS_WAITING_MAX, SHAPES_OF_OFFERS_MAX,
};
use super::shapes::{Shape, ShapeId};
use super::tenants::nvme_bytes;
use super::tickets::TicketList;
use super::writeback::{Cause, Worth};
use crate::effect::{Effect, LossReason, PeerBlock, Report};
use crate::event::PeerOffer;
use coming::Coming;

/// What is being taken; see the module.
#[derive(Debug, Default)]
pub(super) struct Taking {
    waiting: VecDeque<Pull>,
    /// The same keys.
    keys: BTreeSet<BlockKey>,
    /// What will want room on the devices.
    pub(super) coming: Coming,
    /// Slot bytes of blocks that are being fetched or written.
    in_flight_bytes: u64,
    /// The arena had no room: not before then.
    again: Option<Tick>,
    /// The operator knows that offers of further layouts are refused.
    told_of_layouts: bool,
}

/// A taken block that is not being fetched yet. It holds its shape.
#[derive(Clone, Copy, Debug)]
struct Pull {
    key: BlockKey,
    shape: ShapeId,
    from: NodeId,
    since: Tick,
}

/// What an offered block is to this node.
enum Standing {
    /// Durable here, or about to be.
    Kept,
    /// In DRAM only.
    InDram(FrameIndex),
    /// A fetch for a load brings it: slot of the fill.
    OnItsWay(u32),
    /// Under another tenant or layout.
    Foreign,
    Unknown,
}

/// What became of a taken block whose turn it was.
enum PullStart {
    /// It is being fetched.
    Fetched(PeerBlock),
    /// The arena has no room for its shape now.
    NoRoom,
    /// It is here, comes for somebody else, or cannot be here.
    Needless,
    /// It waited for too long, or there is no room on the devices.
    Dropped,
}

/// Blocks that may still be taken of one offer.
struct Room {
    blocks: u64,
}

impl Taking {
    /// Taken blocks that are not being fetched yet.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Slot bytes of blocks that are being fetched or written.
    pub(super) fn in_flight_bytes(&self) -> u64 {
        self.in_flight_bytes
    }

    /// When there is more to do though nothing happens.
    pub(super) fn wake(&self) -> Option<Tick> {
        let first = self.waiting.front()?;
        Some(self.again.unwrap_or(first.since.after(PULL_PATIENCE)))
    }
}

impl Room {
    /// Takes the place of one block.
    fn take(&mut self) -> bool {
        let any = self.blocks > 0;
        self.blocks = self.blocks.saturating_sub(1);
        any
    }
}

impl AgentCore {
    /// A peer offers blocks.
    pub(super) fn peer_offer(&mut self, offered: &PeerOffer) {
        self.counters.incoming_offers += 1;
        self.counters.incoming_offer_keys += offered.keys.len() as u64;
        let (taken, retry_after) = match self.shape_of_offer(offered) {
            Some(shape) => self.take_offered(offered, shape),
            None => (Vec::new(), OFFER_RETRY_MAX),
        };
        self.counters.incoming_offer_keys_taken += taken.len() as u64;
        self.emit(Effect::AnswerOffer { offer: offered.offer, taken, retry_after });
    }

    /// The shape of offered blocks, if this node takes any of them at all.
    fn shape_of_offer(&mut self, offered: &PeerOffer) -> Option<ShapeId> {
        let takes = self.giving.mode() == NodeMode::Active && !self.bandwidth.is_none();
        let takes = takes && self.arena.may_take_unasked(offered.tenant);
        if !takes || offered.keys.len() > PLACE_KEYS_MAX {
            return None;
        }
        let slot_bytes = offered.layout.slot_bytes();
        if slot_bytes > self.arena.region_bytes_max() || !self.devices.can_hold(slot_bytes) {
            return None;
        }
        let known = self.shapes.find(offered.tenant, offered.layout);
        if known.is_none() && self.shapes.in_use() >= SHAPES_OF_OFFERS_MAX {
            if !std::mem::replace(&mut self.taking.told_of_layouts, true) {
                self.emit(Effect::Report(Report::OffersRefused { layouts: SHAPES_OF_OFFERS_MAX }));
            }
            return None;
        }
        self.intern(offered.tenant, offered.layout)
    }

    /// Takes what there is room for; returns which, and when to offer the rest again.
    fn take_offered(&mut self, offered: &PeerOffer, shape: ShapeId) -> (Vec<u32>, Duration) {
        let mut room = self.room_without_eviction(shape);
        let (mut taken, mut retry_after) = (Vec::new(), Duration::MAX);
        for (at, key) in (0..).zip(&offered.keys) {
            match self.take_one((*key, shape), offered.from, &mut room) {
                Ok(()) => taken.push(at),
                Err(wait) => retry_after = retry_after.min(wait),
            }
        }
        let all = taken.len() == offered.keys.len();
        (taken, if all { Duration::ZERO } else { retry_after })
    }

    /// Takes a block, or says when to offer it again.
    fn take_one(
        &mut self,
        (key, shape): (BlockKey, ShapeId),
        from: NodeId,
        room: &mut Room,
    ) -> Result<(), Duration> {
        match self.standing(&key, shape) {
            Standing::Kept => return Ok(()),
            Standing::Foreign => return Err(OFFER_RETRY_MAX),
            _ if self.taking.keys.contains(&key) => return Ok(()),
            _ if !room.take() => return Err(OFFER_RETRY_MAX),
            Standing::InDram(frame) => {
                self.save_taken(frame, Worth::Used);
                return Ok(());
            }
            Standing::OnItsWay(fill) => {
                self.keep_fill(fill);
                return Ok(());
            }
            Standing::Unknown => {}
        }
        if self.taking.waiting.len() >= PULLS_WAITING_MAX {
            return Err(PLACE_AGAIN);
        }
        let Shape { slot_bytes, tenant_index, .. } = *self.shapes.get(shape);
        if self.bandwidth.take(slot_bytes, self.now).is_err() {
            return Err(self.bandwidth.wait(self.now));
        }
        self.shapes.hold(shape);
        self.taking.keys.insert(key);
        self.taking.coming.enter(tenant_index, slot_bytes);
        self.taking.waiting.push_back(Pull { key, shape, from, since: self.now });
        Ok(())
    }

    fn standing(&self, key: &BlockKey, shape: ShapeId) -> Standing {
        let Some(entry) = self.index.find(key) else { return Standing::Unknown };
        let state = self.index.entry(entry);
        let kept = state.stored().is_some();
        match state.dram() {
            _ if state.shape() != shape => Standing::Foreign,
            _ if kept => Standing::Kept,
            Dram::Resident(frame) => match self.frames.get(frame).state {
                FrameState::Unsaved(_) => Standing::Kept,
                _ => Standing::InDram(frame),
            },
            Dram::Filling(frame) => match self.frames.get(frame).state {
                FrameState::Filling(fill) => Standing::OnItsWay(fill),
                _ => Standing::Foreign,
            },
            Dram::Absent => Standing::Unknown,
        }
    }

    /// How many blocks of a shape the devices, their journals and the tenant have room for beyond what is kept free and
    /// what is on its way there; none when its tenant may not have the memory to fetch a single one. A segment that is given to a size
    /// loses the bytes at its end: they count as used before.
    fn room_without_eviction(&self, shape: ShapeId) -> Room {
        let Shape { slot_bytes, tenant_index, .. } = *self.shapes.get(shape);
        if self.tenants.dram(tenant_index).quota.limit() < slot_bytes {
            return Room { blocks: 0 };
        }
        let bytes = nvme_bytes(slot_bytes);
        let usage = self.devices.usage();
        let kept_free = |of: u64| of * u64::from(self.settings.pool_free_permille) / 1000;
        let coming = &self.taking.coming;
        let ends = |(bytes, blocks)| self.devices.ends_of_segments(bytes, blocks);
        let owed = kept_free(usage.capacity_bytes) + coming.bytes() + coming.sizes().map(ends).sum::<u64>();
        let free = usage.slot_bytes_free.saturating_sub(owed);
        let free = free.saturating_sub(ends((bytes, free / bytes)));
        let of_tenant = self.tenants.nvme(tenant_index).room().saturating_sub(coming.bytes_of(tenant_index));
        let entries = usage.entries_free.saturating_sub(kept_free(usage.entries_max) + coming.blocks());
        let slots = self.devices.slots_free(slot_bytes).saturating_sub(coming.blocks());
        let blocks = (free / bytes).min(of_tenant / bytes).min(entries).min(slots);
        Room { blocks }
    }

    /// A fetch for a load brings a block that is to become durable here.
    fn keep_fill(&mut self, slot: u32) {
        let Some(fill) = self.fills.at_mut(slot) else { return };
        let is_read = matches!(fill.origin, Origin::Device(_));
        if !is_read && std::mem::replace(&mut fill.keep, Keep::Saved) == Keep::Cached {
            let frame = fill.frame;
            let Shape { slot_bytes, tenant_index, .. } = *self.shapes.get(self.frames.get(frame).shape);
            self.taking.in_flight_bytes += slot_bytes;
            self.taking.coming.enter(tenant_index, slot_bytes);
        }
    }

    /// A fill has ended.
    pub(super) fn leave_taking(&mut self, fill: &Fill) {
        if fill.keep == Keep::Saved {
            let Shape { slot_bytes, tenant_index, .. } = *self.shapes.get(self.frames.get(fill.frame).shape);
            self.taking.coming.leave(tenant_index, slot_bytes);
            self.leave_taking_frame(fill.frame);
        }
    }

    /// A block that was taken is neither fetched nor written any more.
    pub(super) fn leave_taking_frame(&mut self, frame: FrameIndex) {
        self.taking.in_flight_bytes -= self.frame_slot(frame).bytes;
    }

    /// Sees to it that a block in DRAM becomes durable.
    pub(super) fn save_taken(&mut self, frame: FrameIndex, worth: Worth) {
        let lane = self.lane_of(frame, Cause::Taken);
        if self.frames.get(frame).state == FrameState::Clean && self.may_be_saved(lane) {
            let entry = self.frames.get(frame).entry().expect("a clean frame can be found");
            self.index.entry_mut(entry).set_origin(BlockOrigin::Placed);
            self.taking.in_flight_bytes += lane.slot_bytes;
            self.queue_save((lane, worth), frame, TicketList::default(), None);
        } else if worth == Worth::Unasked {
            self.evict_first(frame);
        }
    }

    /// Begins the fetches that there is room for, the oldest first. What finds no room in the arena does not hold up blocks
    /// of other shapes behind it.
    pub(super) fn begin_pulls(&mut self) {
        if self.taking.waiting.is_empty() || self.taking.again.is_some_and(|again| again > self.now) {
            return;
        }
        self.taking.again = None;
        let mut groups: BTreeMap<(NodeId, ShapeId), Vec<PeerBlock>> = BTreeMap::new();
        let (mut passed, mut stalled) = (Vec::new(), BTreeSet::new());
        while let Some(pull) = self.taking.waiting.front().copied() {
            let late = pull.since.after(PULL_PATIENCE) <= self.now;
            let begun = if late || self.giving.mode() != NodeMode::Active {
                PullStart::Dropped
            } else if stalled.contains(&pull.shape) {
                PullStart::NoRoom
            } else if !self.may_pull(pull.shape) {
                break;
            } else {
                self.begin_pull(&pull)
            };
            self.taking.waiting.pop_front();
            match begun {
                PullStart::Fetched(block) => {
                    groups.entry((pull.from, pull.shape)).or_default().push(block);
                    self.forget_pull(&pull);
                }
                PullStart::NoRoom => {
                    stalled.insert(pull.shape);
                    passed.push(pull);
                }
                PullStart::Needless => self.forget_unfetched(&pull),
                PullStart::Dropped => {
                    self.counters.pulls_dropped += 1;
                    self.forget_unfetched(&pull);
                }
            }
        }
        if !passed.is_empty() {
            self.taking.again = Some(self.now.after(PULL_AGAIN));
        }
        passed.into_iter().rev().for_each(|pull| self.taking.waiting.push_front(pull));
        for ((node, shape), blocks) in groups {
            let layout = self.shapes.get(shape).layout;
            self.emit_fetch(node, layout, blocks, self.settings.load_deadline_default);
        }
    }

    /// Slot bytes that may be fetched and written at once.
    fn pull_bytes_max(&self) -> u64 {
        PULL_BYTES_MAX.min(self.share_of_arena(PULL_ARENA_PERMILLE))
    }

    /// Slot bytes of blocks that are not durable yet, for the share of the arena that saves of engines may take. Taken blocks
    /// have a share of their own; what they hold beyond it counts, since nothing unsaved can make room.
    pub(super) fn unsaved_bytes_of_engines(&self) -> u64 {
        self.writeback.unsaved_bytes() - self.writeback.taken_bytes().min(self.pull_bytes_max())
    }

    /// Whether one more block of a shape may be fetched beside those that are.
    fn may_pull(&self, shape: ShapeId) -> bool {
        let bytes_max = self.pull_bytes_max();
        let taken = self.taking.in_flight_bytes;
        taken == 0 || taken + self.shapes.get(shape).slot_bytes <= bytes_max
    }

    /// Begins the fetch of a block, unless it has come here meanwhile.
    fn begin_pull(&mut self, pull: &Pull) -> PullStart {
        match self.standing(&pull.key, pull.shape) {
            Standing::Unknown => {}
            Standing::InDram(frame) => {
                self.save_taken(frame, Worth::Used);
                return PullStart::Needless;
            }
            Standing::OnItsWay(fill) => {
                self.keep_fill(fill);
                return PullStart::Needless;
            }
            Standing::Kept | Standing::Foreign => return PullStart::Needless,
        }
        if !self.has_room_still(pull.shape) {
            return PullStart::Dropped;
        }
        match self.begin_peer_fill((pull.key, pull.shape), pull.from, None, BlockOrigin::Placed) {
            Ok((frame, block)) => {
                if let FrameState::Filling(fill) = self.frames.get(frame).state {
                    self.keep_fill(fill);
                }
                PullStart::Fetched(block)
            }
            Err(LossReason::NoSpace) => PullStart::NoRoom,
            Err(_) => PullStart::Needless,
        }
    }

    /// Whether there is room for a pull of a shape beside all others, on the devices and in its tenant's memory. What was
    /// seen when it was taken may have gone to engines and to other pulls.
    fn has_room_still(&mut self, shape: ShapeId) -> bool {
        let Shape { slot_bytes, tenant, tenant_index, .. } = *self.shapes.get(shape);
        self.taking.coming.leave(tenant_index, slot_bytes);
        let has_room = self.room_without_eviction(shape).take();
        self.taking.coming.enter(tenant_index, slot_bytes);
        has_room && self.arena.may_take_unasked(tenant)
    }

    /// A pull that no longer waits comes to nothing: the bytes that were taken for it are not moved.
    fn forget_unfetched(&mut self, pull: &Pull) {
        self.bandwidth.give_back(self.shapes.get(pull.shape).slot_bytes);
        self.forget_pull(pull);
    }

    /// A pull no longer waits.
    fn forget_pull(&mut self, pull: &Pull) {
        self.taking.keys.remove(&pull.key);
        let Shape { slot_bytes, tenant_index, .. } = *self.shapes.get(pull.shape);
        self.taking.coming.leave(tenant_index, slot_bytes);
        self.shapes.release(pull.shape);
    }

    /// What is being taken is counted, and a block waits once; for the audit.
    pub(super) fn audit_taking(&self) -> Result<(), String> {
        let Taking { waiting, keys, in_flight_bytes, .. } = &self.taking;
        let same = waiting.iter().all(|pull| keys.contains(&pull.key)) && waiting.len() == keys.len();
        if !same {
            return Err(format!("{} pulls wait, {} keys", waiting.len(), keys.len()));
        }
        let fills =
            self.fills.iter().filter(|(_, fill)| fill.keep == Keep::Saved).map(|(_, fill)| fill.frame);
        let unsaved = self.writeback.unsaved.iter().filter(|(_, block)| block.cause == Cause::Taken);
        let frames = fills.chain(unsaved.map(|(_, block)| block.frame));
        let sum: u64 = frames.map(|frame| self.frame_slot(frame).bytes).sum();
        let unsaved = self.writeback.unsaved.iter().filter(|(_, block)| block.cause == Cause::Taken);
        let unsaved: u64 = unsaved.map(|(_, block)| self.frame_slot(block.frame).bytes).sum();
        if unsaved != self.writeback.taken_bytes() {
            return Err(format!(
                "{unsaved} unsaved bytes of taken blocks, {} counted",
                self.writeback.taken_bytes()
            ));
        }
        if sum != *in_flight_bytes {
            return Err(format!("{sum} bytes of taken blocks in flight, {in_flight_bytes} counted"));
        }
        self.audit_coming()
    }

    fn audit_coming(&self) -> Result<(), String> {
        let saved = self.fills.iter().filter(|(_, fill)| fill.keep == Keep::Saved);
        let frames = saved.map(|(_, fill)| fill.frame);
        let frames = frames.chain(self.writeback.unsaved.iter().map(|(_, block)| block.frame));
        let shapes = frames.map(|frame| self.frames.get(frame).shape);
        let mut coming = Coming::default();
        for shape in shapes.chain(self.taking.waiting.iter().map(|pull| pull.shape)) {
            let Shape { slot_bytes, tenant_index, .. } = *self.shapes.get(shape);
            coming.enter(tenant_index, slot_bytes);
        }
        if coming != self.taking.coming {
            return Err(format!("{coming:?} come, {:?} counted", self.taking.coming));
        }
        Ok(())
    }
}
