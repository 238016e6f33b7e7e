//! Draining: a walk over all durable blocks, until each of them is elsewhere as well.
//!
//! The walk goes in the order of the index, in which a block keeps its place for as long as it is here. (The order of
//! eviction changes under a walk's feet: a block that is read moves to its end, and a walk would miss or meet for ever what
//! is in use.) What is saved meanwhile may be behind the walk, so another walk follows. A node is drained after two walks in
//! a row, some seconds apart ([`DRAINED_APART`]), in which every block had enough replicas when it was first asked about, when
//! nothing was saved since the first began and nothing waits to be saved. One walk does not do: its answers may be older than
//! the news that the node with the other replica drains as well. It walks again from time to time: replicas elsewhere may
//! be lost.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, DrainProgress, NodeMode, Tick};

use super::super::AgentCore;
use super::super::limits::{
    DRAINED_APART, GIVING_STEP_ENTRIES, GIVING_STEP_EVERY, PLACE_KEYS_MAX, WALK_AGAIN, WALK_AGAIN_DRAINED,
    WALK_AGAIN_NOWHERE,
};
use super::super::shapes::ShapeId;
use super::Giving;
use crate::effect::PlaceReason;

/// State of the draining.
#[derive(Debug, Default)]
pub(super) struct Drain {
    stage: DrainStage,
    walked: u64,
    nowhere: u64,
    /// Blocks that have become durable since the node drains.
    saves: u64,
    /// Since then no walk has found a block that is short of a replica.
    clean: Option<Clean>,
    drained: bool,
}

/// Walks without a block that is short of a replica.
#[derive(Clone, Copy, Debug)]
struct Clean {
    /// Saves at the beginning of the first.
    saves: u64,
    /// A walk that begins from then on can confirm the first.
    confirmed_from: Tick,
}

#[derive(Debug, Default)]
enum DrainStage {
    /// The node is not to be drained.
    #[default]
    Off,
    /// The next walk begins then.
    Resting { until: Tick },
    /// Under way.
    Walking(Walk),
}

#[derive(Debug)]
struct Walk {
    began: Tick,
    /// Where the index is looked at next.
    cursor: EntryIndex,
    /// Not before then.
    step_at: Tick,
    /// Found, and not in a batch yet.
    found: VecDeque<(ShapeId, Vec<BlockKey>)>,
    at_end: bool,
    /// No block was short of a replica.
    clean: bool,
    saves_before: u64,
}

/// What a walk has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WalkFound {
    /// Every block had enough replicas when it was first asked about, and nothing was saved meanwhile.
    AllEnough,
    Unfinished,
}

impl Drain {
    /// What a new mode begins with.
    pub(super) fn of_mode(mode: NodeMode, now: Tick) -> Drain {
        let stage = match mode {
            NodeMode::Draining => DrainStage::Resting { until: now },
            NodeMode::Active | NodeMode::Cordoned => DrainStage::Off,
        };
        Drain { stage, ..Drain::default() }
    }

    /// Whether the node is not to be drained.
    pub(super) fn is_off(&self) -> bool {
        matches!(self.stage, DrainStage::Off)
    }

    /// A block of the walk has not enough replicas.
    pub(super) fn note_unfinished(&mut self) {
        if let DrainStage::Walking(walk) = &mut self.stage {
            walk.clean = false;
        }
    }

    /// Whether all that has become durable was seen elsewhere.
    fn is_drained(&self) -> bool {
        self.drained && self.clean.is_some_and(|clean| clean.saves == self.saves)
    }

    /// A walk is over; returns for how long the next one waits.
    fn conclude(&mut self, began: Tick, found: WalkFound, now: Tick) -> Duration {
        let saves = self.saves;
        let known = self.clean.filter(|clean| found == WalkFound::AllEnough && clean.saves == saves);
        self.drained = known.is_some_and(|clean| self.drained || clean.confirmed_from <= began);
        let first = Clean { saves, confirmed_from: now.after(DRAINED_APART) };
        self.clean = known.or((found == WalkFound::AllEnough).then_some(first));
        match (self.clean, self.nowhere) {
            (Some(_), _) if self.drained => WALK_AGAIN_DRAINED,
            (Some(clean), _) => clean.confirmed_from.since(now),
            (None, 0) => WALK_AGAIN,
            (None, _) => WALK_AGAIN_NOWHERE,
        }
    }

    fn begin_walk(&mut self, now: Tick) {
        (self.walked, self.nowhere) = (0, 0);
        self.stage = DrainStage::Walking(Walk {
            began: now,
            cursor: EntryIndex(0),
            step_at: now,
            found: VecDeque::new(),
            at_end: false,
            clean: true,
            saves_before: self.saves,
        });
    }
}

impl Giving {
    /// How far the draining is, as far as this knows: blocks that are not durable yet are not looked at.
    pub(in crate::agent) fn progress(&self) -> DrainProgress {
        DrainProgress {
            drained: self.drain.is_drained(),
            walked_blocks: self.drain.walked,
            durable_blocks: 0,
            moved_bytes: self.given_bytes,
            nowhere_blocks: self.drain.nowhere,
        }
    }
}

impl AgentCore {
    /// How far the draining of this node is; of a node that is not to be drained, what it has given away.
    pub fn drain_progress(&self) -> DrainProgress {
        let progress = self.giving.progress();
        let drained = progress.drained && self.writeback.unsaved.len() == 0;
        DrainProgress { drained, durable_blocks: self.index.stored_blocks(), ..progress }
    }

    /// How far this node is used.
    pub fn mode(&self) -> NodeMode {
        self.giving.mode()
    }

    /// A block has become durable.
    pub(in crate::agent) fn note_saved(&mut self) {
        let soon = self.now.after(WALK_AGAIN);
        let drain = &mut self.giving.drain;
        drain.saves += 1;
        if let DrainStage::Resting { until } = &mut drain.stage {
            *until = soon.min(*until);
        }
    }

    /// Blocks of a batch are through.
    pub(super) fn count_walked(&mut self, reason: PlaceReason, blocks: u64) {
        if reason == PlaceReason::Drain {
            self.giving.drain.walked += blocks;
        }
    }

    /// No node has room for blocks of a batch, or none takes them.
    pub(super) fn count_nowhere(&mut self, reason: PlaceReason, blocks: u64) {
        self.counters.place_keys_nowhere += blocks;
        self.count_walked(reason, blocks);
        if reason == PlaceReason::Drain {
            self.giving.drain.nowhere += blocks;
            self.giving.drain.note_unfinished();
        }
    }

    /// Begins batches with what the walk finds next, as many as there may be.
    pub(super) fn walk_on(&mut self) {
        if matches!(self.giving.drain.stage, DrainStage::Resting { until } if until <= self.now) {
            self.giving.drain.begin_walk(self.now);
        }
        let room = self.giving.room_for(|reason| reason == PlaceReason::Drain);
        let DrainStage::Walking(walk) = &self.giving.drain.stage else { return };
        if room > 0 && walk.found.is_empty() && !walk.at_end && walk.step_at <= self.now {
            self.look_for_durable();
        }
        for _ in 0..room {
            let DrainStage::Walking(walk) = &mut self.giving.drain.stage else { return };
            let Some((shape, keys)) = walk.found.pop_front() else { return };
            self.giving.begin(PlaceReason::Drain, shape, keys, self.now);
        }
    }

    /// Looks at the next entries of the index.
    fn look_for_durable(&mut self) {
        let DrainStage::Walking(walk) = &mut self.giving.drain.stage else { return };
        let mut shapes: BTreeMap<ShapeId, Vec<BlockKey>> = BTreeMap::new();
        for (_, entry) in self.index.iter_from(walk.cursor, GIVING_STEP_ENTRIES) {
            if entry.stored().is_some() {
                shapes.entry(entry.shape()).or_default().push(entry.key());
            }
        }
        walk.cursor = EntryIndex(walk.cursor.0.saturating_add(GIVING_STEP_ENTRIES as u32));
        walk.at_end = walk.cursor.0 as usize >= self.index.places();
        walk.step_at = self.now.after(GIVING_STEP_EVERY);
        for (shape, keys) in shapes {
            walk.found.extend(keys.chunks(PLACE_KEYS_MAX).map(|keys| (shape, keys.to_vec())));
        }
    }

    /// Draws the conclusion of a walk that has looked at everything.
    pub(super) fn end_walk_if_over(&mut self) {
        let open = self.giving.count(|reason| reason == PlaceReason::Drain);
        let drain = &mut self.giving.drain;
        let DrainStage::Walking(walk) = &drain.stage else { return };
        if !walk.at_end || !walk.found.is_empty() || open > 0 {
            return;
        }
        let all_enough = walk.clean && walk.saves_before == drain.saves;
        let found = if all_enough { WalkFound::AllEnough } else { WalkFound::Unfinished };
        let rest = drain.conclude(walk.began, found, self.now);
        drain.stage = DrainStage::Resting { until: self.now.after(rest) };
    }

    /// When the walk goes on though nothing happens.
    pub(super) fn next_walk(&self) -> Option<Tick> {
        match &self.giving.drain.stage {
            DrainStage::Off => None,
            DrainStage::Resting { until } => Some(*until),
            // With all batches taken, the end of one is an event.
            DrainStage::Walking(walk) => {
                let room = self.giving.room_for(|reason| reason == PlaceReason::Drain);
                (room > 0 && !walk.at_end).then_some(walk.step_at)
            }
        }
    }
}
