//! Asking the control plane where blocks go, and what its answers mean for a batch.
//!
//! A control plane charges a node for every block that it names it for, so a question about where blocks go covers what
//! could be offered now. Two kinds of blocks would make that slow or dear: those that have enough replicas already, which are
//! most in many walks, and those that a peer has taken and not announced yet. A batch with more blocks than could be
//! offered, or with taken ones, is therefore sifted first: one question about all of it, for which nobody is charged
//! ([`SIFT_BYTES`]) and whose answers lead to no offer. What is left and was not taken is asked about at once.
//!
//! What is left of a batch after a round joins another one of its kind that waits, so that few blocks do not keep the place
//! of many.

use std::collections::BTreeMap;

use reprise_policy::{BlockKey, NodeId, Tick};

use super::super::AgentCore;
use super::super::limits::{
    FRUITLESS_ROUNDS_MAX, LOOKUP_GRACE, PARKED_AFTER_ROUNDS, PLACE_AGAIN, PLACE_HELD, PLACE_KEYS_MAX,
    PLACE_TIMEOUT, SIFT_BYTES,
};
use super::super::shapes::ShapeId;
use super::super::slab::SlabId;
use super::super::tenants::nvme_bytes;
use super::super::timers::Timer;
use super::moves::Dropped;
use super::{Batch, Given, Stage, Taken};
use crate::effect::{Effect, PlaceId, PlaceReason};
use crate::event::Placement;

/// A question to the control plane.
#[derive(Debug)]
pub(in crate::agent) struct Ask {
    pub(in crate::agent) batch: SlabId,
    kind: Question,
    /// So many of the batch's first blocks are asked about.
    blocks: usize,
    /// Slot bytes of those that would have to be offered.
    fresh_bytes: u64,
    expires: Tick,
}

/// What a question is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Question {
    /// Which blocks have enough replicas.
    Sift,
    /// Where blocks go.
    Place,
}

/// The blocks of a question after its answer.
#[derive(Debug, Default)]
struct Sorted {
    kept: Vec<Given>,
    offers: BTreeMap<NodeId, Vec<BlockKey>>,
    /// Blocks that somebody has said something about.
    answered: u64,
    /// Blocks that are through.
    ended: u64,
    /// Blocks whose target wants to be left in peace.
    resting: u64,
}

impl AgentCore {
    /// Asks about every batch whose time has come.
    pub(super) fn ask_due(&mut self) {
        let due = self.giving.batches.iter().filter(|(_, batch)| batch.is_due(self.now));
        let mut due: Vec<(u32, SlabId)> = due.map(|(id, batch)| (batch.fruitless, id)).collect();
        // Those that get further first, as long as there is bandwidth.
        due.sort_unstable();
        for (_, id) in due {
            self.leave_out_gone(id);
            let Some(batch) = self.giving.batches.get_mut(id) else { continue };
            if batch.fruitless >= FRUITLESS_ROUNDS_MAX {
                let (reason, blocks) = (batch.reason, batch.blocks.len() as u64);
                self.giving.batches.remove(id);
                self.count_nowhere(reason, blocks);
            } else if self.bandwidth.wait(self.now).is_zero() {
                self.ask_or_hold(id);
            }
        }
    }

    /// Takes blocks out of a batch that are not here any more.
    fn leave_out_gone(&mut self, id: SlabId) {
        let Some(batch) = self.giving.batches.get_mut(id) else { return };
        let (shape, reason, blocks) = (batch.shape, batch.reason, std::mem::take(&mut batch.blocks));
        let before = blocks.len();
        let kept: Vec<Given> =
            blocks.into_iter().filter(|block| self.is_givable(&block.key, shape)).collect();
        self.count_walked(reason, (before - kept.len()) as u64);
        self.keep_blocks(id, kept);
    }

    /// These blocks of a batch are left; without any it ends.
    pub(super) fn keep_blocks(&mut self, id: SlabId, kept: Vec<Given>) {
        if kept.is_empty() {
            self.giving.batches.remove(id);
        } else if let Some(batch) = self.giving.batches.get_mut(id) {
            batch.blocks = kept;
        }
    }

    /// Asks about a batch, unless open questions of others cover all that could be offered now.
    fn ask_or_hold(&mut self, id: SlabId) {
        let others: u64 = self.giving.asks.iter().map(|(_, ask)| ask.fresh_bytes).sum();
        let available = self.bandwidth.available(self.now).saturating_sub(others);
        let Some(batch) = self.giving.batches.get_mut(id) else { return };
        if available == 0 && others > 0 {
            batch.stage = Stage::Due(self.now.after(PLACE_HELD));
        } else {
            batch.fruitless += u32::from(!batch.sifted);
            self.ask(id, available);
        }
    }

    /// Sifts a batch, or asks where blocks go that nobody has taken: as many as could be offered now, one at the least.
    fn ask(&mut self, id: SlabId, available: u64) {
        let now = self.now;
        let Some(batch) = self.giving.batches.get_mut(id) else { return };
        let slot_bytes = self.shapes.get(batch.shape).slot_bytes;
        let coming = batch.blocks.iter().filter(|block| block.is_coming(now)).count();
        let fresh = batch.blocks.len() - coming;
        let offered = usize::try_from((available / slot_bytes).max(1)).unwrap_or(usize::MAX).min(fresh);
        let is_sifted = std::mem::take(&mut batch.sifted) || batch.reason == PlaceReason::Hot;
        let (kind, blocks, fresh_bytes, bytes) = if fresh == 0 || (!is_sifted && offered < batch.blocks.len())
        {
            (Question::Sift, batch.blocks.len(), 0, SIFT_BYTES)
        } else {
            (Question::Place, offered, offered as u64 * slot_bytes, nvme_bytes(slot_bytes))
        };
        if kind == Question::Place && coming > 0 {
            batch.blocks.sort_by_key(|block| block.is_coming(now));
        }
        let keys: Vec<BlockKey> = batch.blocks[..blocks].iter().map(|block| block.key).collect();
        let reason = batch.reason;
        let expires = now.after(PLACE_TIMEOUT).after(LOOKUP_GRACE);
        let ask = self.giving.asks.insert(Ask { batch: id, kind, blocks, fresh_bytes, expires });
        batch.stage = Stage::Asking(ask);
        self.timers.set(expires, Timer::Place(ask));
        self.counters.places += 1;
        self.counters.place_keys += keys.len() as u64;
        let (place, timeout) = (PlaceId(ask.0), PLACE_TIMEOUT);
        self.emit(Effect::Place { place, keys, slot_bytes: bytes, reason, timeout });
    }

    /// The control plane will not answer: everything is asked again.
    pub(in crate::agent) fn place_failed(&mut self, id: SlabId) {
        if self.giving.asks.get(id).is_some() {
            self.counters.place_failures += 1;
            self.placed(id, &[]);
        }
    }

    /// The control plane has answered for a batch.
    pub(in crate::agent) fn placed(&mut self, id: SlabId, answers: &[Placement]) {
        let Some(ask) = self.giving.asks.remove(id) else { return };
        self.timers.clear(ask.expires, Timer::Place(id));
        let Some(batch) = self.giving.batches.get_mut(ask.batch) else { return };
        let (reason, shape, mut blocks) = (batch.reason, batch.shape, std::mem::take(&mut batch.blocks));
        let unasked = blocks.split_off(ask.blocks.min(blocks.len()));
        let sorted = self.sort_answers((ask.kind, reason, shape), blocks, answers);
        let Sorted { kept, offers, answered, ended, resting } = sorted;
        if !kept.is_empty() && reason == PlaceReason::Drain {
            self.giving.drain.note_unfinished();
        }
        let open = offers.into_iter().map(|(node, keys)| self.offer(ask.batch, node, keys)).sum();
        let now = self.now;
        let is_fresh = |block: &Given| !block.is_coming(now);
        let want_a_place = ask.kind == Question::Sift && answered > 0 && kept.iter().any(is_fresh);
        let others_turn = kept.is_empty() && answered > 0 && unasked.iter().any(is_fresh);
        if let Some(batch) = self.giving.batches.get_mut(ask.batch) {
            batch.stage = match open {
                0 if want_a_place || others_turn => Stage::Due(now),
                0 => Stage::Due(now.after(PLACE_AGAIN)),
                open => Stage::Offering { open, again: None },
            };
            batch.sifted = want_a_place;
            if ended > 0 || answered == 0 {
                batch.fruitless = 0;
            } else if open == 0 && resting > 0 {
                // Nobody was asked to take them.
                batch.fruitless = batch.fruitless.saturating_sub(1);
            }
            batch.unasked = unasked.len();
        }
        self.keep_blocks(ask.batch, unasked.into_iter().chain(kept).collect());
        self.end_round(ask.batch);
    }

    /// What answers mean for each block.
    fn sort_answers(
        &mut self,
        (kind, reason, shape): (Question, PlaceReason, ShapeId),
        blocks: Vec<Given>,
        answers: &[Placement],
    ) -> Sorted {
        let mut sorted = Sorted::default();
        let answers = answers.iter().copied().chain(std::iter::repeat(Placement::Unanswered));
        for (block, answer) in blocks.into_iter().zip(answers) {
            sorted.answered += u64::from(answer != Placement::Unanswered);
            match answer {
                Placement::Enough => match self.finish(reason, shape, block) {
                    Dropped::NotNow => sorted.kept.push(block),
                    Dropped::Done => sorted.ended += 1,
                },
                Placement::To(_) if kind == Question::Sift => sorted.kept.push(block),
                Placement::To(node) if self.giving.is_resting(node, shape, self.now) => {
                    sorted.resting += 1;
                    sorted.kept.push(block);
                }
                Placement::To(node) => {
                    if block.taken != Taken::No {
                        self.doubt_own_copy(&block.key);
                    }
                    sorted.offers.entry(node).or_default().push(block.key);
                    sorted.kept.push(block);
                }
                Placement::Nowhere => {
                    self.count_nowhere(reason, 1);
                    sorted.ended += 1;
                }
                Placement::Unanswered if reason == PlaceReason::Hot => {}
                Placement::Unanswered => sorted.kept.push(block),
            }
        }
        sorted
    }

    /// A block has enough replicas.
    fn finish(&mut self, reason: PlaceReason, shape: ShapeId, block: Given) -> Dropped {
        let bytes = nvme_bytes(self.shapes.get(shape).slot_bytes);
        if let PlaceReason::Move(to) = reason {
            let dropped = self.drop_moved(&block.key, shape, to);
            if dropped == Dropped::NotNow {
                return dropped;
            }
        }
        self.count_walked(reason, 1);
        if block.taken != Taken::No {
            self.giving.given_bytes += bytes;
        }
        Dropped::Done
    }

    /// Draws the conclusion of a round. Hot blocks are asked about once: if they stay hot, they are again in the next window.
    pub(super) fn end_round(&mut self, id: SlabId) {
        let Some(batch) = self.giving.batches.get_mut(id) else { return };
        if !matches!(batch.stage, Stage::Due(_)) {
            return;
        }
        if batch.reason == PlaceReason::Hot {
            let mut left = std::mem::take(&mut batch.blocks);
            left.truncate(batch.unasked);
            self.keep_blocks(id, left);
        } else if !batch.sifted {
            self.join_waiting(id);
        }
    }

    /// Adds what is left of a batch to another one of its kind that waits as well.
    fn join_waiting(&mut self, id: SlabId) {
        let is_parked = |batch: &Batch| batch.fruitless >= PARKED_AFTER_ROUNDS;
        let Some(batch) = self.giving.batches.get(id).filter(|batch| !is_parked(batch)) else { return };
        let Stage::Due(due) = batch.stage else { return };
        let (reason, shape, count) = (batch.reason, batch.shape, batch.blocks.len());
        let others = self.giving.batches.iter().filter(|(other, _)| *other != id);
        let joined = others.filter_map(|(other, batch)| match batch.stage {
            Stage::Due(at) if (batch.reason, batch.shape, batch.sifted) == (reason, shape, false) => {
                let fits = batch.blocks.len() + count <= PLACE_KEYS_MAX;
                (fits && !is_parked(batch)).then_some((other, at))
            }
            _ => None,
        });
        let Some((other, at)) = joined.min_by_key(|(other, _)| *other) else { return };
        let Some(batch) = self.giving.batches.remove(id) else { return };
        if let Some(other) = self.giving.batches.get_mut(other) {
            other.blocks.extend(batch.blocks);
            other.fruitless = other.fruitless.min(batch.fruitless);
            other.stage = Stage::Due(at.min(due));
        }
    }
}
