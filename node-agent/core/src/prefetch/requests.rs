//! Requests that sessions have listed, and the blocks left to read for each.
//!
//! ```text
//!  Listed ──missing in a hint──▶ Left ──used by loads, or after a grace──▶ (removed)
//!    │ ╲──cancelled──────────────────────────────────────────────────────▶ (removed)
//!    └──staged too long──▶ Expired ──missing in a hint──▶ (removed)
//! ```

use std::collections::{BTreeMap, VecDeque};

use reprise_policy::prefetch::{Candidate, IterationTime, LookaheadWindow};
use reprise_policy::{BlockKey, Tick};

use crate::cache::SizeClassId;
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
    /// Keys left to read, of all requests.
    pub(super) pending_keys: usize,
}

/// A request that will run.
#[derive(Debug)]
pub(super) struct Wanted {
    pub(super) iterations: u32,
    pub(super) confidence: u16,
    pub(super) phase: Phase,
    /// Blocks left to read.
    pub(super) pending: Vec<Pending>,
    /// Blocks that were read ahead for it.
    pub(super) blocks: Vec<SlabId>,
    /// Number of leading blocks that are known to be complete.
    pub(super) complete: usize,
    /// Whether all its blocks were on this node.
    pub(super) known: bool,
    /// Time of its timer.
    pub(super) due: Option<Tick>,
    /// Number of the last hint that listed it.
    pub(super) hint: u64,
}

/// Blocks on one device, in the order of their chain.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) device: DeviceId,
    /// Bytes of the largest slot.
    pub(super) slot_bytes: u64,
    pub(super) keys: VecDeque<(BlockKey, SizeClassId)>,
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
            complete: 0,
            known: true,
            due: None,
            hint,
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
                self.pending.push(Pending { device, slot_bytes, keys: VecDeque::from([block]) });
            }
        }
    }

    /// Number of blocks left to read.
    pub(super) fn pending_keys(&self) -> usize {
        self.pending.iter().map(|pending| pending.keys.len()).sum()
    }

    /// Whether all blocks are in DRAM. Costs a step for each block that became complete since the last call.
    pub(super) fn is_ready(&mut self, staged: &Staged) -> bool {
        if !self.known || self.phase != Phase::Listed || self.pending.iter().any(|left| !left.keys.is_empty())
        {
            return false;
        }
        while let Some(id) = self.blocks.get(self.complete) {
            if staged.progress(*id) != Progress::Complete {
                return false;
            }
            self.complete += 1;
        }
        true
    }

    /// Whether a block of it is staged.
    pub(super) fn holds_any(&self, staged: &Staged) -> bool {
        self.blocks.iter().any(|id| staged.contains(*id))
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
