//! Publishing filled reservations.

use reprise_policy::BlockKey;
use reprise_proto::local;

use crate::durable::Ticket;
use crate::error::ClientError;
use crate::reservation::Reservation;

/// How much a block is worth keeping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// First to be evicted.
    Low,
    /// The default.
    #[default]
    Normal,
    /// Last to be evicted: prefixes that many prompts share.
    High,
}

/// What a commit says of all its blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CommitOptions {
    /// What the blocks are worth.
    pub priority: Priority,
    /// Key of the block before the first one in its chain. With it the agent evicts the new blocks before that one; `None`
    /// where there is no such block.
    pub parent: Option<BlockKey>,
}

/// What became of one committed block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitStatus {
    /// Readable on the node from now on.
    Committed,
    /// There was such a block already; the slot was given back.
    Duplicate,
    /// The agent does not know the lease.
    NoLease,
    /// Key or checksums did not fit the layout; the slot was given back.
    BadItem,
}

/// Answer to a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommitOutcome {
    /// What to wait for with [`Client::wait_durable`](crate::Client::wait_durable).
    pub ticket: Ticket,
    /// Per block, in order.
    pub statuses: Vec<CommitStatus>,
}

impl Priority {
    fn to_wire(self) -> u32 {
        match self {
            Priority::Normal => 0,
            Priority::High => 1,
            Priority::Low => 2,
        }
    }
}

impl CommitStatus {
    /// Whether this commit put the block there.
    pub fn is_committed(self) -> bool {
        self == CommitStatus::Committed
    }

    fn from_wire(number: i32) -> Option<CommitStatus> {
        match local::CommitStatus::try_from(number).ok()? {
            local::CommitStatus::Committed => Some(CommitStatus::Committed),
            local::CommitStatus::Duplicate => Some(CommitStatus::Duplicate),
            local::CommitStatus::NoLease => Some(CommitStatus::NoLease),
            local::CommitStatus::BadItem => Some(CommitStatus::BadItem),
            local::CommitStatus::CommitUnspecified => None,
        }
    }
}

/// The message for filled reservations.
///
/// # Errors
/// `BadRequest` when one is not filled.
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
    Ok(local::Commit { items, priority: options.priority.to_wire(), parent })
}

/// Reads the agent's answer about `blocks` blocks.
pub(crate) fn commit_outcome(
    committed: &local::Committed,
    blocks: usize,
) -> Result<CommitOutcome, ClientError> {
    let statuses: Option<Vec<CommitStatus>> =
        committed.statuses.iter().map(|number| CommitStatus::from_wire(*number)).collect();
    match statuses {
        Some(statuses) if statuses.len() == blocks => {
            Ok(CommitOutcome { ticket: Ticket(committed.ticket), statuses })
        }
        _ => Err(ClientError::Protocol(format!("statuses of a commit of {blocks} blocks"))),
    }
}
