//! Python class for the answers to commands on blocks.

use pyo3::prelude::*;
use reprise_client::{BlockCounts, BlockReport, RetentionUsage};

/// Numbers of blocks that a command has changed, and the retention pins of the tenant.
#[pyclass(frozen, get_all, module = "reprise")]
#[derive(Debug)]
pub(crate) struct BlocksReport {
    /// Blocks on this node: affected, unchanged and refused ones.
    found: u64,
    /// Blocks that were changed.
    affected: u64,
    /// Blocks that had the requested state.
    unchanged: u64,
    /// Blocks that were not changed: over a limit, in use, or pinned.
    refused: u64,
    /// Keys without a block on this node.
    absent: u64,
    /// Refused blocks that a limit does not admit.
    over_limit: u64,
    /// Refused blocks that are in use, or whose only copy is in DRAM.
    in_use: u64,
    /// Refused blocks with a retention pin.
    pinned: u64,
    /// Slot bytes of the changed copies.
    bytes: u64,
    /// Blocks that the tenant pins.
    pinned_blocks: u64,
    /// Bytes in DRAM that pins of the tenant keep.
    pinned_dram_bytes: u64,
    /// Bytes on NVMe that pins of the tenant keep.
    pinned_nvme_bytes: u64,
}

impl From<BlockReport> for BlocksReport {
    fn from(report: BlockReport) -> BlocksReport {
        let BlockReport { counts, retention, .. } = report;
        let (found, refused) = (counts.found(), counts.refused());
        let BlockCounts { affected, unchanged, absent, over_limit, in_use, pinned, bytes } = counts;
        let RetentionUsage { blocks, dram_bytes, nvme_bytes, .. } = retention;
        BlocksReport {
            found,
            affected,
            unchanged,
            refused,
            absent,
            over_limit,
            in_use,
            pinned,
            bytes,
            pinned_blocks: blocks,
            pinned_dram_bytes: dram_bytes,
            pinned_nvme_bytes: nvme_bytes,
        }
    }
}
