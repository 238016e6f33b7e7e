//! Python classes for the results of saves and loads.

use pyo3::prelude::*;
use reprise_client::{BlockStatus, LoadedBlocks, Outcome, SaveStatus, SavedBlocks, Source};

use crate::error::message;

/// Result of a save.
#[pyclass(frozen, get_all, module = "reprise")]
#[derive(Debug, Default)]
pub(crate) struct Saved {
    /// Status of each block: "committed", "duplicate" or "unsaved".
    statuses: Vec<&'static str>,
    /// Number of blocks that this save has added.
    committed: usize,
    /// Number of blocks that the agent already had.
    duplicates: usize,
    /// Number of blocks that were not saved.
    unsaved: usize,
    /// Tickets for ``wait_durable``.
    tickets: Vec<u64>,
}

/// Result of a load.
#[pyclass(frozen, get_all, module = "reprise")]
#[derive(Debug, Default)]
pub(crate) struct Loaded {
    /// Status of each block: "ok", "miss", "failed", "no_space" or "deadline".
    statuses: Vec<&'static str>,
    /// Whether each block is completely loaded.
    ok: Vec<bool>,
    /// Source of each block (``Source``), or None.
    sources: Vec<Option<u32>>,
    /// Number of leading blocks that are completely loaded.
    leading: usize,
}

/// Durability of a commit's blocks.
#[pyclass(frozen, get_all, module = "reprise")]
#[derive(Debug)]
pub(crate) struct Durable {
    /// Number of blocks that survive ``kill -9`` and power loss.
    durable: u32,
    /// Keys of the blocks that did not become durable.
    lost_keys: Vec<Vec<u8>>,
}

/// Result of a transfer that has ended.
#[pyclass(frozen, get_all, module = "reprise")]
#[derive(Debug)]
pub(crate) struct Finished {
    /// Id that ``Transfers.load`` or ``Transfers.save`` returned.
    id: u64,
    /// Kind of transfer: "load" or "save".
    kind: &'static str,
    /// Seconds from submission to the end.
    seconds: f64,
    /// Seconds that it ran, without the wait for the transfers before it.
    ran: f64,
    /// Error that stopped the transfer early, or None.
    error: Option<String>,
    /// Status of each block, as in ``Saved`` or ``Loaded``.
    statuses: Vec<&'static str>,
    /// Loads only: whether each block is completely loaded.
    ok: Vec<bool>,
    /// Loads only: source of each block (``Source``), or None.
    sources: Vec<Option<u32>>,
    /// Saves only: number of blocks that this save has added.
    committed: usize,
    /// Saves only: number of blocks that the agent already had.
    duplicates: usize,
    /// Saves only: number of blocks that were not saved.
    unsaved: usize,
    /// Saves only: tickets for ``wait_durable``. Blocks in extents are durable and have none.
    tickets: Vec<u64>,
    /// Number of blocks that were loaded from, or saved to, extents.
    by_extents: usize,
}

impl From<&SavedBlocks> for Saved {
    fn from(saved: &SavedBlocks) -> Saved {
        Saved {
            statuses: saved.statuses.iter().map(|status| save_status(*status)).collect(),
            committed: saved.count(SaveStatus::Committed),
            duplicates: saved.count(SaveStatus::Duplicate),
            unsaved: saved.count(SaveStatus::Unsaved),
            tickets: saved.tickets.iter().map(|ticket| ticket.0).collect(),
        }
    }
}

impl From<&LoadedBlocks> for Loaded {
    fn from(loaded: &LoadedBlocks) -> Loaded {
        Loaded {
            statuses: loaded.statuses.iter().map(|status| block_status(*status)).collect(),
            ok: loaded.statuses.iter().map(|status| *status == BlockStatus::Ok).collect(),
            sources: loaded.sources.iter().map(|source| source.map(|source| source as u32)).collect(),
            leading: loaded.leading(),
        }
    }
}

impl From<reprise_client::DurableOutcome> for Durable {
    fn from(outcome: reprise_client::DurableOutcome) -> Durable {
        let lost_keys = outcome.lost_keys.iter().map(|key| key.0.to_vec()).collect();
        Durable { durable: outcome.durable, lost_keys }
    }
}

impl From<&reprise_client::FinishedTransfer> for Finished {
    fn from(finished: &reprise_client::FinishedTransfer) -> Finished {
        let (kind, saved, loaded) = match &finished.outcome {
            Outcome::Saved(saved) => ("save", Saved::from(saved), Loaded::default()),
            Outcome::Loaded(loaded) => ("load", Saved::default(), Loaded::from(loaded)),
        };
        Finished {
            id: finished.id.0,
            kind,
            seconds: finished.elapsed.as_secs_f64(),
            ran: finished.ran.as_secs_f64(),
            error: finished.outcome.stopped_by().map(message),
            statuses: if kind == "save" { saved.statuses } else { loaded.statuses },
            ok: loaded.ok,
            sources: loaded.sources,
            committed: saved.committed,
            duplicates: saved.duplicates,
            unsaved: saved.unsaved,
            tickets: saved.tickets,
            by_extents: finished.by_path,
        }
    }
}

#[pymethods]
impl Saved {
    fn __repr__(&self) -> String {
        format!(
            "Saved(committed={}, duplicates={}, unsaved={})",
            self.committed, self.duplicates, self.unsaved
        )
    }
}

#[pymethods]
impl Loaded {
    fn __repr__(&self) -> String {
        format!("Loaded(leading={}, statuses={:?})", self.leading, self.statuses)
    }
}

#[pymethods]
impl Durable {
    fn __repr__(&self) -> String {
        format!("Durable(durable={}, lost={})", self.durable, self.lost_keys.len())
    }
}

#[pymethods]
impl Finished {
    fn __repr__(&self) -> String {
        format!(
            "Finished(id={}, kind={:?}, statuses={:?}, error={:?})",
            self.id, self.kind, self.statuses, self.error
        )
    }
}

/// Converts sources to the numbers of `reprise.Source`.
pub(crate) fn source_numbers(sources: &[Source]) -> Vec<u32> {
    sources.iter().map(|source| *source as u32).collect()
}

fn save_status(status: SaveStatus) -> &'static str {
    match status {
        SaveStatus::Committed => "committed",
        SaveStatus::Duplicate => "duplicate",
        SaveStatus::Unsaved => "unsaved",
    }
}

fn block_status(status: BlockStatus) -> &'static str {
    match status {
        BlockStatus::Ok => "ok",
        BlockStatus::Miss => "miss",
        BlockStatus::Failed => "failed",
        BlockStatus::NoSpace => "no_space",
        BlockStatus::Deadline => "deadline",
    }
}
