//! Results of requests and checks of the reference engine.

use reprise_client::Source;
use serde::{Deserialize, Serialize};

/// Numbers of loaded blocks by source.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HitCounts {
    /// The node's own DRAM.
    pub own_dram: u64,
    /// The node's own NVMe.
    pub own_nvme: u64,
    /// A peer's DRAM.
    pub peer_dram: u64,
    /// A peer's NVMe.
    pub peer_nvme: u64,
}

/// Work of rings for an engine with rings, and the blocks that they could not move. All zero for other engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RingTraffic {
    /// Blocks that rings have read from extents of the node and that match their checksums.
    pub blocks_loaded: u64,
    /// Blocks that rings have written to extents and that are durable.
    pub blocks_saved: u64,
    /// Blocks on devices of the node that rings could not read, and that the arena loaded.
    pub loads_by_arena: u64,
    /// Blocks that were saved through the arena, because no extent was free.
    pub saves_by_arena: u64,
    /// Batches of the rings.
    pub batches: u64,
    /// Contexts of the batches.
    pub contexts: u64,
    /// Bytes that rings have read, header pages included.
    pub bytes_read: u64,
    /// Bytes that rings have written.
    pub bytes_written: u64,
}

impl RingTraffic {
    /// Adds the traffic of another request.
    pub fn merge(&mut self, other: &RingTraffic) {
        self.blocks_loaded += other.blocks_loaded;
        self.blocks_saved += other.blocks_saved;
        self.loads_by_arena += other.loads_by_arena;
        self.saves_by_arena += other.saves_by_arena;
        self.batches += other.batches;
        self.contexts += other.contexts;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
    }
}

/// Results of one request. Times are in microseconds.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct RequestOutcome {
    /// Full blocks of the prompt.
    pub blocks: u64,
    /// Blocks loaded and verified, by source.
    pub hits: HitCounts,
    /// Matched blocks that could not be loaded and were recomputed.
    pub lost: u64,
    /// Blocks saved by this request.
    pub saved: u64,
    /// Blocks that already existed when they were committed.
    pub duplicates: u64,
    /// Blocks not saved because the arena was full.
    pub unsaved: u64,
    /// Failed calls; their blocks were computed.
    pub errors: u64,
    /// Bytes loaded into the engine's memory and used.
    pub bytes_loaded: u64,
    /// Loaded bytes that were compared with the keyed function.
    pub bytes_verified: u64,
    /// 8-byte words that differed from the keyed function.
    pub mismatches: u64,
    /// Bytes saved.
    pub bytes_saved: u64,
    /// Duration of the match call.
    pub match_us: u64,
    /// Time from the load call until layer 0 of all blocks was in the engine's memory; 0 without a load.
    pub first_layer_us: u64,
    /// Time from the load call until all layers were in the engine's memory.
    pub load_us: u64,
    /// Duration of reserve, fill and commit; with rings, until the blocks are durable.
    pub save_us: u64,
    /// Work of rings.
    pub rings: RingTraffic,
}

impl RequestOutcome {
    /// Adds the results of another request, its times too.
    pub fn merge(&mut self, other: &RequestOutcome) {
        self.blocks += other.blocks;
        self.hits.merge(&other.hits);
        self.lost += other.lost;
        self.saved += other.saved;
        self.duplicates += other.duplicates;
        self.unsaved += other.unsaved;
        self.errors += other.errors;
        self.bytes_loaded += other.bytes_loaded;
        self.bytes_verified += other.bytes_verified;
        self.mismatches += other.mismatches;
        self.bytes_saved += other.bytes_saved;
        self.match_us += other.match_us;
        self.first_layer_us += other.first_layer_us;
        self.load_us += other.load_us;
        self.save_us += other.save_us;
        self.rings.merge(&other.rings);
    }
}

/// Result of a check of all durable blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DurableCheck {
    /// Distinct blocks reported as durable and not missed in an earlier check.
    pub announced: u64,
    /// Checked blocks that the node still has with correct bytes.
    pub present: u64,
    /// Checked blocks that the node reports as missing.
    pub missed: u64,
    /// Checked blocks that the node has but could not load, or whose bytes are wrong.
    pub failed: u64,
    /// Bytes compared.
    pub bytes_verified: u64,
    /// Words that differed.
    pub mismatches: u64,
    /// Work of rings.
    pub rings: RingTraffic,
}

impl HitCounts {
    /// Counts one block of this source.
    pub fn add(&mut self, source: Source) {
        match source {
            Source::OwnDram => self.own_dram += 1,
            Source::OwnNvme => self.own_nvme += 1,
            Source::PeerDram => self.peer_dram += 1,
            Source::PeerNvme => self.peer_nvme += 1,
        }
    }

    /// Adds the counts of another request.
    pub fn merge(&mut self, other: &HitCounts) {
        self.own_dram += other.own_dram;
        self.own_nvme += other.own_nvme;
        self.peer_dram += other.peer_dram;
        self.peer_nvme += other.peer_nvme;
    }

    /// Returns the names of the tiers that served no block.
    pub fn tiers_without_hits(&self) -> Vec<&'static str> {
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

    /// Returns the number of blocks of all sources.
    pub fn total(&self) -> u64 {
        self.own_dram + self.own_nvme + self.peer_dram + self.peer_nvme
    }
}
