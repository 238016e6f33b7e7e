//! Requests that sessions have listed, and the blocks left to read for each.
//!
//! ```text
//!  Listed ──missing in a hint──▶ Left ──used by loads, or after a grace──▶ (removed)
//!    │ ╲──cancelled──────────────────────────────────────────────────────▶ (removed)
//!    └──staged too long──▶ Expired ──missing in a hint──▶ (removed)
//! ```

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use reprise_policy::prefetch::{Candidate, IterationTime, LookaheadWindow};
use reprise_policy::{BlockKey, Tick};

use crate::cache::{AheadCopy, Cache, SizeClassId};
use crate::effect::DeviceId;
use crate::prefetch::staged::{Progress, Staged};
use crate::slab::SlabId;

/// What a session has hinted.
#[derive(Debug, Default)]
pub(super) struct Hinted {
    pub(super) iteration: IterationTime,
    pub(super) window: LookaheadWindow,
    pub(super) requests: BTreeMap<u64, Wanted>,
    /// Number of hints so far.
    pub(super) hints: u64,
    /// Keys of all requests: left to read, staged, or in DRAM.
    pub(super) keys: usize,
}

/// A request that will run.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) iterations: u32,
    pub(super) confidence: u16,
    pub(super) phase: Phase,
    /// Blocks left to read.
    pub(super) pending: Vec<Pending>,
    /// Blocks that were read ahead for it, or were in DRAM.
    pub(super) blocks: Vec<ListedBlock>,
    /// Whether all its blocks were on this node.
    pub(super) known: bool,
    /// Time of its timer.
    pub(super) due: Option<Tick>,
    /// Number of the last hint that listed it.
    pub(super) hint: u64,
    /// Number of leading elements of `blocks` that are readable, if only a part of them is examined in each hint.
    examined: usize,
    /// Whether all blocks were readable when they were last examined.
    was_ready: bool,
}

/// Blocks on one device, in the order of their chain.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) device: DeviceId,
    /// Bytes of the largest slot.
    pub(super) slot_bytes: u64,
    pub(super) keys: VecDeque<(BlockKey, SizeClassId)>,
    /// Number of blocks that were removed from the front.
    pub(super) taken: u32,
    pub(super) counted: CountedBlocks,
}

/// Blocks of one device that were counted as waiting, by cause. A block is counted once for each cause.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct CountedBlocks {
    pub(super) unstaged: Positions,
    pub(super) deferred: Positions,
    pub(super) late: Positions,
}

/// Range of positions in a chain.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Positions {
    from: u32,
    to: u32,
}

/// A block that is staged, or was in DRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ListedBlock {
    pub(super) key: BlockKey,
    pub(super) class: SizeClassId,
    /// Its entry while it is staged. Without one, nothing keeps it in DRAM.
    pub(super) staged: Option<SlabId>,
}

/// State of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// In the last hint.
    Listed,
    /// It has begun: its load is expected.
    Left,
    /// Its blocks were staged for too long.
    Expired,
}

impl Wanted {
    /// Creates a request without blocks.
    pub(super) fn new(iterations: u32, confidence: u16, hint: u64) -> Wanted {
        Wanted {
            iterations,
            confidence,
            phase: Phase::Listed,
            pending: Vec::new(),
            blocks: Vec::new(),
            known: true,
            due: None,
            hint,
            examined: 0,
            was_ready: false,
        }
    }

    /// Adds a block to read.
    pub(super) fn push(&mut self, device: DeviceId, slot_bytes: u64, block: (BlockKey, SizeClassId)) {
        match self.pending.iter_mut().find(|pending| pending.device == device) {
            Some(pending) => {
                pending.slot_bytes = pending.slot_bytes.max(slot_bytes);
                pending.keys.push_back(block);
            }
            None => {
                let (keys, counted) = (VecDeque::from([block]), CountedBlocks::default());
                self.pending.push(Pending { device, slot_bytes, keys, taken: 0, counted });
            }
        }
    }

    /// Number of blocks left to read.
    pub(super) fn pending_keys(&self) -> usize {
        self.pending.iter().map(|pending| pending.keys.len()).sum()
    }

    /// Number of its blocks that are left to read, staged, or were in DRAM.
    pub(super) fn keys(&self) -> usize {
        self.pending_keys() + self.blocks.len()
    }

    /// Whether all blocks are readable in DRAM. Blocks that were evicted meanwhile are left to read again. Takes a
    /// step for each block.
    ///
    /// If there are more blocks than steps, it examines the next ones with half of the steps, so that the requests
    /// behind this one are examined too. Then the request is ready once each block was readable when it was last
    /// examined: those that nothing keeps in DRAM may be gone since then, at most for as many hints as a round takes.
    pub(super) fn is_ready(&mut self, cache: &Cache, staged: &Staged, steps: &mut usize) -> bool {
        if !self.known || self.phase != Phase::Listed || self.pending_keys() > 0 {
            self.forget_readiness();
            return false;
        }
        let is_whole = self.blocks.len() <= *steps;
        let part = if is_whole { self.blocks.len() } else { *steps / 2 };
        *steps -= part;
        let first = if is_whole { 0 } else { self.examined };
        let end = (first + part).min(self.blocks.len());
        let is_readable = self.are_readable(cache, staged, first..end);
        match is_readable {
            true if end == self.blocks.len() => (self.examined, self.was_ready) = (0, true),
            true => self.examined = end,
            false => self.forget_readiness(),
        }
        self.was_ready
    }

    fn forget_readiness(&mut self) {
        (self.examined, self.was_ready) = (0, false);
    }

    /// Whether these of the blocks are readable in DRAM; evicted ones are left to read again.
    fn are_readable(&mut self, cache: &Cache, staged: &Staged, examined: Range<usize>) -> bool {
        let (mut ready, mut at, mut end) = (true, examined.start, examined.end);
        while at < end {
            let ListedBlock { key, class, staged: entry } = self.blocks[at];
            match entry.map_or(Progress::Ended, |id| staged.progress(id)) {
                Progress::Complete => {}
                Progress::Reading | Progress::Failed => ready = false,
                Progress::Ended => match cache.ahead_copy(&key, class) {
                    AheadCopy::InDram => {}
                    AheadCopy::Filling => ready = false,
                    AheadCopy::OnDevice(device, _) => {
                        ready = false;
                        self.blocks.swap_remove(at);
                        end = end.min(self.blocks.len());
                        self.push(device, cache.size_class(class).slot_bytes, (key, class));
                        continue;
                    }
                    AheadCopy::Absent => {
                        (ready, self.known) = (false, false);
                    }
                },
            }
            at += 1;
        }
        ready
    }

    /// Whether a block of it is staged.
    pub(super) fn holds_any(&self, staged: &Staged) -> bool {
        self.blocks.iter().filter_map(|block| block.staged).any(|id| staged.contains(id))
    }
}

impl Positions {
    /// Extends the range by another one; returns the number of positions that were added.
    pub(super) fn add(&mut self, from: u32, count: u32) -> u64 {
        if count == 0 {
            return 0;
        }
        let before = self.to - self.from;
        let range =
            if before == 0 { from..from + count } else { self.from.min(from)..self.to.max(from + count) };
        (self.from, self.to) = (range.start, range.end);
        u64::from(self.to - self.from - before)
    }
}

impl Hinted {
    /// Returns the candidates of a pass, and for each the request and the index of its [`Pending`].
    pub(super) fn candidates(&self) -> (Vec<Candidate>, Vec<(u64, usize)>) {
        let (mut candidates, mut of) = (Vec::new(), Vec::new());
        for (request, wanted) in self.requests.iter().filter(|(_, wanted)| wanted.phase == Phase::Listed) {
            for (at, pending) in wanted.pending.iter().enumerate().filter(|(_, left)| !left.keys.is_empty()) {
                candidates.push(Candidate {
                    iterations: wanted.iterations,
                    confidence: wanted.confidence,
                    channel: pending.device.0,
                    // At most the keys of a hint.
                    blocks: pending.keys.len() as u32,
                    block_bytes: pending.slot_bytes,
                });
                of.push((*request, at));
            }
        }
        (candidates, of)
    }
}
