//! Results of requests and checks of the reference engine.

use reprise_client::Source;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct HitCounts {
    /// The node's own DRAM.
    pub(crate) own_dram: u64,
    /// The node's own NVMe.
    pub(crate) own_nvme: u64,
    /// A peer's DRAM.
    pub(crate) peer_dram: u64,
    /// A peer's NVMe.
    pub(crate) peer_nvme: u64,
}

/// Results of one request. Times are in microseconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct RequestOutcome {
    /// Full blocks of the prompt.
    pub(crate) blocks: u64,
    /// Blocks loaded and verified, by source.
    pub(crate) hits: HitCounts,
    /// Matched blocks that could not be loaded and were recomputed.
    pub(crate) lost: u64,
    /// Blocks saved by this request.
    pub(crate) saved: u64,
    /// Blocks that already existed when they were committed.
    pub(crate) duplicates: u64,
    /// Blocks not saved because the arena was full.
    pub(crate) unsaved: u64,
    /// Failed calls; their blocks were computed.
    pub(crate) errors: u64,
    /// Bytes loaded into the engine's memory and used.
    pub(crate) bytes_loaded: u64,
    /// Loaded bytes that were compared with the keyed function.
    pub(crate) bytes_verified: u64,
    /// 8-byte words that differed from the keyed function.
    pub(crate) mismatches: u64,
    /// Bytes saved.
    pub(crate) bytes_saved: u64,
    /// Duration of the match call.
    pub(crate) match_us: u64,
    /// Time from the load call until layer 0 of all blocks was in the engine's memory; 0 without a load.
    pub(crate) first_layer_us: u64,
    /// Time from the load call until all layers were in the engine's memory.
    pub(crate) load_us: u64,
    /// Duration of reserve, fill and commit.
    pub(crate) save_us: u64,
}

/// Result of a check of all durable blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct DurableCheck {
    /// Distinct blocks reported as durable and not missed in an earlier check.
    pub(crate) announced: u64,
    /// Checked blocks that the node still has with correct bytes.
    pub(crate) present: u64,
    /// Checked blocks that the node reports as missing.
    pub(crate) missed: u64,
    /// Checked blocks that the node has but could not load, or whose bytes are wrong.
    pub(crate) failed: u64,
    /// Bytes compared.
    pub(crate) bytes_verified: u64,
    /// Words that differed.
    pub(crate) mismatches: u64,
}

impl HitCounts {
    pub(crate) fn add(&mut self, source: Source) {
        match source {
            Source::OwnDram => self.own_dram += 1,
            Source::OwnNvme => self.own_nvme += 1,
            Source::PeerDram => self.peer_dram += 1,
            Source::PeerNvme => self.peer_nvme += 1,
        }
    }

    pub(crate) fn merge(&mut self, other: &HitCounts) {
        self.own_dram += other.own_dram;
        self.own_nvme += other.own_nvme;
        self.peer_dram += other.peer_dram;
        self.peer_nvme += other.peer_nvme;
    }

    /// Returns the names of the tiers that served no block.
    pub(crate) fn tiers_without_hits(&self) -> Vec<&'static str> {
        [
            ("own_dram", self.own_dram),
            ("own_nvme", self.own_nvme),
            ("peer_dram", self.peer_dram),
            ("peer_nvme", self.peer_nvme),
        ]
        .into_iter()
        .filter_map(|(tier, hits)| (hits == 0).then_some(tier))
        .collect()
    }

    pub(crate) fn total(&self) -> u64 {
        self.own_dram + self.own_nvme + self.peer_dram + self.peer_nvme
    }
}
