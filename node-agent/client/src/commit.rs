//! Publishing filled reservations.

use reprise_policy::BlockKey;
use reprise_policy::session::{CommitStatus, Priority, Ticket};
use reprise_proto::local;

use crate::error::ClientError;
use crate::reservation::Reservation;

/// Properties of all blocks of a commit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommitOptions {
    /// Eviction priority of the blocks.
    pub priority: Priority,
    /// Key of the block that precedes the first one in its chain. The agent evicts the new blocks before that
    /// block. `None` if the first block has no predecessor, or the caller does not know it.
    pub parent: Option<BlockKey>,
    /// Number of blocks before the first one in its chain: `Some(0)` for the first block of a chain. `None` if the
    /// caller does not know it: the agent then derives it from the parent's, if it knows that.
    pub position: Option<u32>,
}

/// Place of the first of some consecutive blocks in their chain. The default is an unknown place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChainPlace {
    /// As [`CommitOptions::parent`].
    pub parent: Option<BlockKey>,
    /// As [`CommitOptions::position`].
    pub position: Option<u32>,
}

impl CommitOptions {
    /// Options for the rest of a chain after `before` of its blocks, the last of which is `last`.
    pub fn after(self, before: usize, last: Option<BlockKey>) -> CommitOptions {
        let before = u32::try_from(before).unwrap_or(u32::MAX);
        let position = self.position.map(|position| position.saturating_add(before));
        CommitOptions { parent: last.or(self.parent), position, ..self }
    }
}

/// Answer to a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommitOutcome {
    /// Ticket of the commit, for [`Client::wait_durable`](crate::Client::wait_durable).
    pub ticket: Ticket,
    /// Result for each block, in the order of the call.
    pub statuses: Vec<CommitStatus>,
}

/// Returns the number of a priority in the session protocol.
pub(crate) fn priority_number(priority: Priority) -> u32 {
    match priority {
        Priority::Normal => 0,
        Priority::High => 1,
        Priority::Low => 2,
    }
}

fn commit_status(number: i32) -> Option<CommitStatus> {
    match local::CommitStatus::try_from(number).ok()? {
        local::CommitStatus::Committed => Some(CommitStatus::Committed),
        local::CommitStatus::Duplicate => Some(CommitStatus::Duplicate),
        local::CommitStatus::NoLease => Some(CommitStatus::NoLease),
        local::CommitStatus::BadItem => Some(CommitStatus::BadItem),
        // The others are of extents.
        local::CommitStatus::Durable | local::CommitStatus::Failed => None,
        local::CommitStatus::CommitUnspecified => None,
    }
}

/// Builds the request for filled reservations.
///
/// # Errors
/// `BadRequest` when a reservation is not filled.
pub(crate) fn commit_message(
    items: &[(Reservation, BlockKey)],
    options: CommitOptions,
) -> Result<local::Commit, ClientError> {
    let items = items
        .iter()
        .map(|(reservation, key)| {
            Ok(local::CommitItem {
                lease: reservation.lease(),
                key: bytes::Bytes::copy_from_slice(&key.0),
                checksums: reservation.packed_checksums()?,
            })
        })
        .collect::<Result<Vec<_>, ClientError>>()?;
    let parent = options.parent.map(|key| bytes::Bytes::copy_from_slice(&key.0)).unwrap_or_default();
    let CommitOptions { priority, position, .. } = options;
    Ok(local::Commit { items, priority: priority_number(priority), parent, position })
}

/// Decodes the agent's answer to a commit of `blocks` blocks.
pub(crate) fn commit_outcome(
    committed: &local::Committed,
    blocks: usize,
) -> Result<CommitOutcome, ClientError> {
    let statuses: Option<Vec<CommitStatus>> =
        committed.statuses.iter().map(|number| commit_status(*number)).collect();
    match statuses {
        Some(statuses) if statuses.len() == blocks => {
            Ok(CommitOutcome { ticket: Ticket(committed.ticket), statuses })
        }
        _ => Err(ClientError::Protocol(format!("invalid statuses for a commit of {blocks} blocks"))),
    }
}
