//! Belady's policy for one tier: the most hits that any policy can reach, because it knows the requests to come.
//!
//! The blocks of a request are in use while it runs, as with any other policy. After it, OPT keeps those of its blocks
//! and of the blocks before that are used next, as many as fit. Ties are decided for the block nearer to the begin of
//! its chain.
//!
//! **Why this is the maximum.** The time between two uses of a block is an interval. A use hits only if the block was
//! kept for the whole interval, and at each time at most as many intervals are kept as there are slots. Keeping the
//! intervals that end first maximises their number. A block is used whenever a block behind it is, so its next use is
//! not later: the kept blocks have no gaps, and every kept block is in the leading run of its next request.
//!
//! **Representation.** All kept blocks whose next use is request n are on the path of n, at consecutive depths. So the
//! state is one range of depths for each n, and a request costs time in proportion to the number of its different next
//! uses, not of its blocks.

use std::collections::BTreeMap;

use super::trace::Trace;

/// Next use of a block that no later request uses.
pub(super) const NEVER: u32 = u32::MAX;

/// Result of a replay with OPT, in blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OptCounts {
    /// Number of requests.
    pub requests: u64,
    /// Blocks of the prompts.
    pub references: u64,
    /// Blocks that requests hit.
    pub hits: u64,
}

/// Consecutive blocks of a request with the same next use.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// Depth behind the last block.
    pub(super) end: u32,
    pub(super) next: u32,
}

/// Runs of all requests.
#[derive(Debug)]
pub(super) struct NextUses {
    runs: Vec<Run>,
    /// For each request the index of its first run, and the number of all runs.
    starts: Vec<usize>,
}

/// Kept blocks with the same next use: depths from `first` on, before `end`.
#[derive(Clone, Copy, Debug)]
struct Kept {
    first: u32,
    end: u32,
}

/// Serves all requests of a trace on one node with one tier of this many blocks.
pub fn replay_opt(trace: &Trace, capacity: u64) -> OptCounts {
    let uses = next_uses(trace);
    let mut counts = OptCounts::default();
    let mut kept: BTreeMap<u32, Kept> = BTreeMap::new();
    let mut total = 0_u64;
    for (at, request) in (0_u32..).zip(trace.requests()) {
        counts.requests += 1;
        counts.references += trace.len_of(request) as u64;
        if let Some(hit) = kept.remove(&at) {
            debug_assert_eq!(hit.first, 0, "the first block is used next");
            counts.hits += u64::from(hit.end - hit.first);
            total -= u64::from(hit.end - hit.first);
        }
        // The blocks of the request are in use, as those of any policy.
        let in_use = (trace.len_of(request) as u64).min(capacity);
        evict(&mut kept, &mut total, capacity - in_use);
        let mut first = 0;
        for run in uses.of(at) {
            if run.next != NEVER {
                total += u64::from(run.end - first);
                let behind = kept.entry(run.next).or_insert(Kept { first, end: run.end });
                debug_assert!(behind.first == run.end || behind.first == first, "ranges have no gaps");
                behind.first = first;
            }
            first = run.end;
        }
        evict(&mut kept, &mut total, capacity);
    }
    counts
}

/// Removes the blocks that are used last until the others fit.
fn evict(kept: &mut BTreeMap<u32, Kept>, total: &mut u64, capacity: u64) {
    while *total > capacity {
        let Some(mut last) = kept.last_entry() else { return };
        let range = last.get_mut();
        let blocks = u64::from(range.end - range.first).min(*total - capacity);
        *total -= blocks;
        range.end -= u32::try_from(blocks).expect("a part of a range");
        if range.first == range.end {
            last.remove();
        }
    }
}

impl NextUses {
    /// Runs of a request, from the begin of its prompt.
    pub(super) fn of(&self, request: u32) -> &[Run] {
        let at = request as usize;
        &self.runs[self.starts[at]..self.starts[at + 1]]
    }
}

/// Returns the next use of every reference of a trace.
pub(super) fn next_uses(trace: &Trace) -> NextUses {
    let requests = trace.requests();
    let mut next = vec![NEVER; usize::try_from(trace.distinct()).expect("blocks are in memory")];
    let (mut chain, mut runs) = (Vec::new(), Vec::new());
    // Runs are found from the last request to the first; a request's runs are reversed, then all of them.
    let mut lengths = vec![0; requests.len()];
    for (at, request) in requests.iter().enumerate().rev() {
        trace.chain(request, &mut chain);
        let begin = runs.len();
        for (depth, block) in (0_u32..).zip(&chain) {
            let use_after = std::mem::replace(&mut next[*block as usize], at as u32);
            match runs[begin..].last_mut() {
                Some(Run { end, next }) if *next == use_after => *end = depth + 1,
                _ => runs.push(Run { end: depth + 1, next: use_after }),
            }
        }
        runs[begin..].reverse();
        lengths[at] = runs.len() - begin;
    }
    runs.reverse();
    let mut starts = vec![0];
    for length in lengths {
        starts.push(starts.last().copied().unwrap_or(0) + length);
    }
    NextUses { runs, starts }
}
