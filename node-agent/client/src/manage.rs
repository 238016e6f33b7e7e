//! Commands on blocks of this node: retention pins, prefetch, demotion and deletion.
//!
//! All of them are advice or administration: an engine that sends none gets the same answers to its loads. An engine that
//! must not wait between two iterations starts a command, and polls its answer in a later iteration or never.

use std::sync::Arc;
use std::time::Duration;

use reprise_policy::BlockKey;
use reprise_policy::block_command::{
    BlockAction, BlockCommand, BlockCounts, BlockReport, BlockSelection, RetentionUsage,
};
use reprise_policy::session::Ranks;
use reprise_proto::local::manage_blocks::Selection;
use reprise_proto::local::{self, KEYS_PER_CALL_MAX, request, response};

use crate::client::{Client, Session, check_count};
use crate::connection::PendingCall;
use crate::error::ClientError;

const CALL: &str = "manage blocks";

/// A sent command. It may be dropped at any time.
#[derive(Debug)]
pub struct PendingBlocks {
    session: Arc<Session>,
    sent: PendingCall,
}

impl PendingBlocks {
    /// Returns the answer if it arrives within `patience`. `None`: poll again.
    ///
    /// # Errors
    /// As [`Client::manage_blocks`], without `Busy`.
    pub fn poll(&mut self, patience: Duration) -> Result<Option<BlockReport>, ClientError> {
        let Some(answer) = self.sent.poll(patience)? else { return Ok(None) };
        let response::Body::BlocksManaged(managed) = answer else {
            return Err(self.session.broken(ClientError::unexpected(CALL)));
        };
        Ok(Some(report(&managed)))
    }
}

impl Client {
    /// Sends one command, and returns without waiting for the answer or for room in the socket.
    ///
    /// # Errors
    /// `BadRequest` (an invalid number of keys), `Busy`, `AgentLost`.
    pub fn start_manage_blocks(&self, command: &BlockCommand) -> Result<PendingBlocks, ClientError> {
        if let BlockSelection::Keys(keys) = &command.selection {
            check_count(CALL, keys.len())?;
        }
        let body = request::Body::ManageBlocks(message(command));
        let timeout = self.session().call_timeout();
        let sent = self.session().connection().try_begin(CALL, body, timeout)?;
        Ok(PendingBlocks { session: Arc::clone(self.session()), sent })
    }

    /// Executes one command. Selections of more than 8,192 keys, and whole namespaces, take several
    /// ([`Client::manage_all`]).
    ///
    /// # Errors
    /// `BadRequest` (an invalid time or number of keys, an unknown session, an ambiguous namespace), `Busy`, `Timeout`,
    /// `AgentLost`.
    pub fn manage_blocks(&self, command: &BlockCommand) -> Result<BlockReport, ClientError> {
        if let BlockSelection::Keys(keys) = &command.selection {
            check_count(CALL, keys.len())?;
        }
        let body = request::Body::ManageBlocks(message(command));
        let response::Body::BlocksManaged(managed) = self.session().call(CALL, body)? else {
            return Err(self.session().broken(ClientError::unexpected(CALL)));
        };
        Ok(report(&managed))
    }

    /// Executes a command for all selected blocks, in as many steps as it takes, and adds up the numbers.
    ///
    /// # Errors
    /// As [`Client::manage_blocks`]. Earlier steps have taken effect then.
    pub fn manage_all(&self, command: &BlockCommand) -> Result<BlockReport, ClientError> {
        let BlockCommand { action, selection, ranks } = command;
        let mut total = BlockReport::default();
        let mut add = |selection| -> Result<Option<u64>, ClientError> {
            let step = self.manage_blocks(&BlockCommand { action: *action, selection, ranks: *ranks })?;
            total.counts.add(&step.counts);
            total.retention = step.retention;
            Ok(step.next)
        };
        match selection {
            BlockSelection::Keys(keys) if keys.len() > KEYS_PER_CALL_MAX => {
                let parts = match ranks {
                    Ranks::Own => 1,
                    Ranks::All => usize::from(self.layout().spec().tp_size).max(1),
                };
                // Whole blocks of all ranks.
                for keys in keys.chunks(KEYS_PER_CALL_MAX / parts * parts) {
                    add(BlockSelection::Keys(keys.to_vec()))?;
                }
            }
            BlockSelection::Namespace { from } => {
                let mut from = Some(*from);
                while let Some(at) = from {
                    from = add(BlockSelection::Namespace { from: at })?;
                }
            }
            BlockSelection::Keys(_) | BlockSelection::Listed(_) => {
                add(selection.clone())?;
            }
        }
        Ok(total)
    }

    /// Keeps the copies of blocks on this node from eviction for a time, within the share of the tenant. Blocks with a
    /// retention pin get the new time.
    ///
    /// # Errors
    /// As [`Client::manage_blocks`].
    pub fn pin_blocks(&self, keys: &[BlockKey], ttl: Duration) -> Result<BlockReport, ClientError> {
        self.manage_keys(BlockAction::Pin { ttl }, keys)
    }

    /// Ends the retention pins of blocks.
    ///
    /// # Errors
    /// As [`Client::manage_blocks`].
    pub fn unpin_blocks(&self, keys: &[BlockKey]) -> Result<BlockReport, ClientError> {
        self.manage_keys(BlockAction::Unpin, keys)
    }

    /// Starts to read blocks from devices of this node into DRAM, behind all other reads. [`Client::prefetch`] also
    /// fetches them from peers, with the rank of loads, and waits for them.
    ///
    /// # Errors
    /// As [`Client::manage_blocks`].
    pub fn start_prefetch(&self, keys: &[BlockKey]) -> Result<BlockReport, ClientError> {
        self.manage_keys(BlockAction::Prefetch, keys)
    }

    /// Drops copies in DRAM of blocks that are on a device of this node.
    ///
    /// # Errors
    /// As [`Client::manage_blocks`].
    pub fn demote_blocks(&self, keys: &[BlockKey]) -> Result<BlockReport, ClientError> {
        self.manage_keys(BlockAction::Demote, keys)
    }

    /// Removes blocks from this node. Copies of other nodes remain.
    ///
    /// # Errors
    /// As [`Client::manage_blocks`].
    pub fn delete_blocks(&self, keys: &[BlockKey]) -> Result<BlockReport, ClientError> {
        self.manage_keys(BlockAction::Delete, keys)
    }

    fn manage_keys(&self, action: BlockAction, keys: &[BlockKey]) -> Result<BlockReport, ClientError> {
        let selection = BlockSelection::Keys(keys.to_vec());
        self.manage_all(&BlockCommand { action, selection, ranks: Ranks::Own })
    }
}

fn message(command: &BlockCommand) -> local::ManageBlocks {
    let (action, ttl) = match command.action {
        BlockAction::Pin { ttl } => (local::BlockAction::Pin, ttl),
        BlockAction::Unpin => (local::BlockAction::Unpin, Duration::ZERO),
        BlockAction::Prefetch => (local::BlockAction::Prefetch, Duration::ZERO),
        BlockAction::Demote => (local::BlockAction::Demote, Duration::ZERO),
        BlockAction::Delete => (local::BlockAction::Delete, Duration::ZERO),
    };
    let selection = match &command.selection {
        BlockSelection::Keys(keys) => Selection::Keys(BlockKey::pack(keys).into()),
        BlockSelection::Listed(session) => Selection::Listed(session.0),
        BlockSelection::Namespace { from } => Selection::NamespaceFrom(*from),
    };
    local::ManageBlocks {
        action: action.into(),
        ttl_us: u64::try_from(ttl.as_micros()).unwrap_or(u64::MAX),
        all_ranks: command.ranks == Ranks::All,
        selection: Some(selection),
    }
}

fn report(managed: &local::BlocksManaged) -> BlockReport {
    let local::BlocksManaged {
        affected,
        unchanged,
        absent,
        over_limit,
        in_use,
        pinned,
        bytes,
        next,
        retention,
    } = *managed;
    let held = retention.unwrap_or_default();
    BlockReport {
        counts: BlockCounts { affected, unchanged, absent, over_limit, in_use, pinned, bytes },
        next: (next > 0).then_some(next),
        retention: RetentionUsage {
            blocks: held.blocks,
            blocks_max: held.blocks_max,
            dram_bytes: held.dram_bytes,
            dram_bytes_max: held.dram_bytes_max,
            nvme_bytes: held.nvme_bytes,
            nvme_bytes_max: held.nvme_bytes_max,
        },
    }
}
