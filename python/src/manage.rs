//! Python classes for commands on blocks: their answers, and commands that are started without waiting.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use reprise_client::{
    BlockAction, BlockCommand, BlockCounts, BlockReport, BlockSelection, ClientError, RetentionUsage,
};
use reprise_policy::session::Ranks;

use crate::arguments::{Keys, seconds};
use crate::error::exception;
use crate::session::{Session, log_debug};

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

/// Sent command on blocks. It may be dropped at any time.
#[pyclass(frozen, module = "reprise")]
#[derive(Debug)]
pub(crate) struct PendingBlocks {
    pending: Mutex<reprise_client::PendingBlocks>,
}

#[pymethods]
impl PendingBlocks {
    /// Returns the agent's answer, or None if it is still pending. Does not wait.
    ///
    /// Raises:
    ///     BadRequest: the agent does not allow the time, or the keys do not match the ranks. Timeout, AgentLost.
    fn poll(&self) -> PyResult<Option<BlocksReport>> {
        let polled = self.pending.lock().unwrap_or_else(PoisonError::into_inner).poll(Duration::ZERO);
        Ok(polled.map_err(|error| exception(&error))?.map(BlocksReport::from))
    }
}

/// Returns the action of this name; only pins have a time.
fn action(name: &str, ttl: Option<f64>) -> PyResult<BlockAction> {
    Ok(match (name, ttl) {
        ("pin", Some(ttl)) => BlockAction::Pin { ttl: seconds("ttl", ttl)? },
        ("unpin", None) => BlockAction::Unpin,
        ("prefetch", None) => BlockAction::Prefetch,
        ("demote", None) => BlockAction::Demote,
        ("delete", None) => BlockAction::Delete,
        _ => {
            return Err(PyValueError::new_err(format!(
                "invalid action {name:?} with ttl {ttl:?}: expected \"pin\" with a time, or \"unpin\", \"prefetch\", \
                 \"demote\" or \"delete\" without"
            )));
        }
    })
}

impl Session {
    /// Sends a command to an agent that answers; `None` without one.
    pub(crate) fn send_command(
        &self,
        py: Python<'_>,
        name: &str,
        Keys(keys): Keys,
        (ttl, all_ranks): (Option<f64>, bool),
    ) -> PyResult<Option<PendingBlocks>> {
        let command = BlockCommand {
            action: action(name, ttl)?,
            selection: BlockSelection::Keys(keys),
            ranks: if all_ranks { Ranks::All } else { Ranks::Own },
        };
        let Some(client) = self.keeper().and_then(|keeper| keeper.responsive()) else {
            return Ok(None);
        };
        match client.start_manage_blocks(&command) {
            Ok(pending) => Ok(Some(PendingBlocks { pending: Mutex::new(pending) })),
            Err(error @ ClientError::BadRequest(_)) => Err(exception(&error)),
            Err(error) => {
                log_debug(py, &error);
                Ok(None)
            }
        }
    }
}
