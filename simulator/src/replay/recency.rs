//! Least recently used chains, the last block first, as a model without block-by-block work; and the same with
//! knowledge of the blocks that no later request uses.
//!
//! The second is a bound that explains others: its distance to the first is what knowing the ends of conversations is
//! worth, and its distance to OPT is what knowing the order of the next uses is worth. The first has the same hits as
//! the agent's `lru`, which a test checks.
//!
//! Kept blocks are pieces: consecutive depths with the same last and the same next use.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::opt::{NEVER, OptCounts, next_uses};
use super::trace::Trace;

/// What the order of eviction knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Knowledge {
    /// The requests so far.
    Past,
    /// Also whether a later request uses a block, but not when.
    Ends,
}

/// Depths from `first` on, before `end`.
#[derive(Clone, Copy, Debug)]
struct Piece {
    first: u32,
    end: u32,
    /// Request whose prompt has the blocks next; `None`: none.
    next: Option<u32>,
}

/// Pieces that are kept, in two orders.
#[derive(Debug, Default)]
struct Pieces {
    /// By last use, and the piece behind before the one in front.
    by_use: BTreeMap<(u32, Reverse<u32>), Piece>,
    /// By next use: places in the order of uses.
    by_next: BTreeMap<u32, Vec<(u32, Reverse<u32>)>>,
    total: u64,
}

/// Serves all requests of a trace on one node with one tier of this many blocks.
pub fn replay_recency(trace: &Trace, capacity: u64, knowledge: Knowledge) -> OptCounts {
    let uses = next_uses(trace);
    let mut counts = OptCounts::default();
    let mut kept = Pieces::default();
    for (at, request) in (0_u32..).zip(trace.requests()) {
        let blocks = trace.len_of(request) as u64;
        counts.requests += 1;
        counts.references += blocks;
        counts.hits += kept.take(at);
        // The blocks of the request are in use; those that do not fit are not kept.
        let in_use = blocks.min(capacity);
        kept.evict(capacity - in_use);
        let mut first = 0;
        for run in uses.of(at) {
            let end = u32::try_from(in_use).unwrap_or(u32::MAX).min(run.end);
            let next = (run.next != NEVER).then_some(run.next);
            if first < end && (next.is_some() || knowledge == Knowledge::Past) {
                kept.add(at, Piece { first, end, next });
            }
            first = run.end;
        }
    }
    counts
}

impl Pieces {
    fn add(&mut self, used: u32, piece: Piece) {
        let place = (used, Reverse(piece.first));
        self.total += u64::from(piece.end - piece.first);
        self.by_use.insert(place, piece);
        if let Some(next) = piece.next {
            self.by_next.entry(next).or_default().push(place);
        }
    }

    /// Removes the pieces of a request; returns the length of its leading run.
    fn take(&mut self, request: u32) -> u64 {
        let places = self.by_next.remove(&request).unwrap_or_default();
        let mut pieces: Vec<Piece> = places.iter().filter_map(|place| self.by_use.remove(place)).collect();
        pieces.sort_unstable_by_key(|piece| piece.first);
        let mut run = 0;
        for piece in pieces {
            self.total -= u64::from(piece.end - piece.first);
            if piece.first == run {
                run = piece.end;
            }
        }
        u64::from(run)
    }

    fn evict(&mut self, capacity: u64) {
        while self.total > capacity {
            let Some(mut oldest) = self.by_use.first_entry() else { return };
            let piece = oldest.get_mut();
            let blocks = u64::from(piece.end - piece.first).min(self.total - capacity);
            piece.end -= u32::try_from(blocks).expect("a part of a piece");
            self.total -= blocks;
            if piece.first == piece.end {
                oldest.remove();
            }
        }
    }
}
