//! Draining: repeated walks over all durable blocks, until each has a replica elsewhere.
//!
//! A walk follows the order of the index, in which a block keeps its place. (In the eviction order, a block
//! that is read moves to the end, so a walk could miss it or meet it repeatedly.) Blocks saved during a walk
//! may lie behind it, so another walk follows.
//!
//! A node is drained after two consecutive clean walks, at least [`DRAIN_CONFIRM_DELAY`] apart. In a clean
//! walk, every block had enough replicas when first queried. No block may have been saved since the first of
//! them began, and none may wait to be saved. One walk is not sufficient: its answers may be older than the
//! news that the node with the other replica drains too. Walks continue afterwards, because replicas
//! elsewhere may be lost.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, DrainProgress, NodeMode, Tick};

use crate::cache::{Cache, SizeClassId};
use crate::effect::PlacementReason;
use crate::limits::{
    DRAIN_CONFIRM_DELAY, OUTBOUND_STEP_ENTRIES, OUTBOUND_STEP_INTERVAL, PLACE_KEYS_MAX, WALK_INTERVAL,
    WALK_INTERVAL_DRAINED, WALK_INTERVAL_NO_CAPACITY,
};
use crate::replicate::Replicate;
use crate::replicate::outbound::Outbound;

/// State of draining this node.
#[derive(Debug, Default)]
pub(crate) struct Drain {
    stage: DrainStage,
    walked: u64,
    unplaced: u64,
    /// Number of blocks that became durable since draining began.
    saves: u64,
    /// First of the consecutive clean walks.
    clean: Option<CleanWalk>,
    drained: bool,
}

/// Clean walk: no block lacked a replica.
#[derive(Clone, Copy, Debug)]
struct CleanWalk {
    /// Value of `saves` at the beginning of the walk.
    saves: u64,
    /// Earliest start of a walk that confirms this one.
    confirmed_from: Tick,
}

#[derive(Debug, Default)]
enum DrainStage {
    /// The node is not draining.
    #[default]
    Off,
    /// The next walk begins at this time.
    Waiting { until: Tick },
    /// A walk is in progress.
    Walking(Walk),
}

#[derive(Debug)]
struct Walk {
    began: Tick,
    /// Index entry at which the walk continues.
    cursor: EntryIndex,
    /// Earliest time of the next step.
    step_at: Tick,
    /// Blocks that were found and are in no batch yet.
    found: VecDeque<(SizeClassId, Vec<BlockKey>)>,
    at_end: bool,
    /// Whether no block so far lacked a replica.
    clean: bool,
    saves_before: u64,
}

/// Result of a walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WalkResult {
    /// Every block had enough replicas when first queried, and none was saved meanwhile.
    AllEnough,
    Unfinished,
}

impl Drain {
    /// Creates the state for a new mode.
    pub(crate) fn of_mode(mode: NodeMode, now: Tick) -> Drain {
        let stage = match mode {
            NodeMode::Draining => DrainStage::Waiting { until: now },
            NodeMode::Active | NodeMode::Cordoned => DrainStage::Off,
        };
        Drain { stage, ..Drain::default() }
    }

    /// Whether the node is not draining.
    pub(crate) fn is_off(&self) -> bool {
        matches!(self.stage, DrainStage::Off)
    }

    /// Records that a block of the walk lacks a replica.
    pub(crate) fn note_unfinished(&mut self) {
        if let DrainStage::Walking(walk) = &mut self.stage {
            walk.clean = false;
        }
    }

    /// Whether every block that became durable was seen on another node.
    fn is_drained(&self) -> bool {
        self.drained && self.clean.is_some_and(|clean| clean.saves == self.saves)
    }

    /// Evaluates a completed walk; returns the delay before the next one.
    fn conclude(&mut self, began: Tick, found: WalkResult, now: Tick) -> Duration {
        let saves = self.saves;
        let known = self.clean.filter(|clean| found == WalkResult::AllEnough && clean.saves == saves);
        self.drained = known.is_some_and(|clean| self.drained || clean.confirmed_from <= began);
        let first = CleanWalk { saves, confirmed_from: now.after(DRAIN_CONFIRM_DELAY) };
        self.clean = known.or((found == WalkResult::AllEnough).then_some(first));
        match (self.clean, self.unplaced) {
            (Some(_), _) if self.drained => WALK_INTERVAL_DRAINED,
            (Some(clean), _) => clean.confirmed_from.since(now),
            (None, 0) => WALK_INTERVAL,
            (None, _) => WALK_INTERVAL_NO_CAPACITY,
        }
    }

    fn begin_walk(&mut self, now: Tick) {
        (self.walked, self.unplaced) = (0, 0);
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

impl Outbound {
    /// Progress of draining, without blocks that are not durable yet.
    pub(crate) fn progress(&self) -> DrainProgress {
        DrainProgress {
            drained: self.drain.is_drained(),
            walked_blocks: self.drain.walked,
            durable_blocks: 0,
            moved_bytes: self.replicated_bytes,
            nowhere_blocks: self.drain.unplaced,
        }
    }
}

impl Replicate {
    /// Records that blocks became durable.
    pub(crate) fn note_saved(&mut self, now: Tick, blocks: u64) {
        let soon = now.after(WALK_INTERVAL);
        let drain = &mut self.outbound.drain;
        drain.saves += blocks;
        if let DrainStage::Waiting { until } = &mut drain.stage {
            *until = soon.min(*until);
        }
    }

    /// Counts blocks of a batch that are complete.
    pub(crate) fn count_walked(&mut self, reason: PlacementReason, blocks: u64) {
        if reason == PlacementReason::Drain {
            self.outbound.drain.walked += blocks;
        }
    }

    /// Counts blocks of a batch for which no node has capacity, or which no node accepts.
    pub(crate) fn count_unplaced(&mut self, reason: PlacementReason, blocks: u64) {
        self.counters.place_keys_nowhere += blocks;
        self.count_walked(reason, blocks);
        if reason == PlacementReason::Drain {
            self.outbound.drain.unplaced += blocks;
            self.outbound.drain.note_unfinished();
        }
    }

    /// Creates batches of the next blocks of the walk, as many as allowed.
    pub(crate) fn advance_walk(&mut self, cache: &Cache, now: Tick) {
        if matches!(self.outbound.drain.stage, DrainStage::Waiting { until } if until <= now) {
            self.outbound.drain.begin_walk(now);
        }
        let room = self.outbound.room_for(|reason| reason == PlacementReason::Drain);
        let DrainStage::Walking(walk) = &self.outbound.drain.stage else { return };
        if room > 0 && walk.found.is_empty() && !walk.at_end && walk.step_at <= now {
            self.collect_durable(cache, now);
        }
        for _ in 0..room {
            let DrainStage::Walking(walk) = &mut self.outbound.drain.stage else { return };
            let Some((size_class, keys)) = walk.found.pop_front() else { return };
            self.outbound.begin_batch(PlacementReason::Drain, size_class, keys, now);
        }
    }

    /// Scans the next entries of the index.
    fn collect_durable(&mut self, cache: &Cache, now: Tick) {
        let DrainStage::Walking(walk) = &mut self.outbound.drain.stage else { return };
        let mut size_classes: BTreeMap<SizeClassId, Vec<BlockKey>> = BTreeMap::new();
        for (_, entry) in cache.entries_from(walk.cursor, OUTBOUND_STEP_ENTRIES) {
            if entry.stored().is_some() {
                size_classes.entry(entry.size_class()).or_default().push(entry.key());
            }
        }
        walk.cursor = EntryIndex(walk.cursor.0.saturating_add(OUTBOUND_STEP_ENTRIES as u32));
        walk.at_end = walk.cursor.0 as usize >= cache.entry_places();
        walk.step_at = now.after(OUTBOUND_STEP_INTERVAL);
        for (size_class, keys) in size_classes {
            walk.found.extend(keys.chunks(PLACE_KEYS_MAX).map(|keys| (size_class, keys.to_vec())));
        }
    }

    /// Ends a walk that has covered all blocks.
    pub(crate) fn end_walk_if_complete(&mut self, now: Tick) {
        let open = self.outbound.count(|reason| reason == PlacementReason::Drain);
        let drain = &mut self.outbound.drain;
        let DrainStage::Walking(walk) = &drain.stage else { return };
        if !walk.at_end || !walk.found.is_empty() || open > 0 {
            return;
        }
        let all_enough = walk.clean && walk.saves_before == drain.saves;
        let found = if all_enough { WalkResult::AllEnough } else { WalkResult::Unfinished };
        let rest = drain.conclude(walk.began, found, now);
        drain.stage = DrainStage::Waiting { until: now.after(rest) };
    }

    /// Time at which the walk continues if no event arrives before.
    pub(crate) fn next_walk(&self) -> Option<Tick> {
        match &self.outbound.drain.stage {
            DrainStage::Off => None,
            DrainStage::Waiting { until } => Some(*until),
            // If all batches are in use, the end of one is an event.
            DrainStage::Walking(walk) => {
                let room = self.outbound.room_for(|reason| reason == PlacementReason::Drain);
                (room > 0 && !walk.at_end).then_some(walk.step_at)
            }
        }
    }
}
