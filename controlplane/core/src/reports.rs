//! What nodes say of themselves about once a second: how full they are, how busy, and how far a drain has come.

use crate::budgets::Amounts;

/// One node's words; true a second ago.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeReport {
    /// What there is.
    pub capacity: Amounts,
    /// What is in use.
    pub used: Amounts,
    /// Bytes that others want of the node and have not got yet.
    pub queued_bytes: u64,
    /// How far it has come in giving away what only it has.
    pub drain: DrainProgress,
}

/// How far a draining node has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainProgress {
    /// Every durable block is somewhere else as well.
    pub drained: bool,
    /// Blocks looked at in this walk.
    pub walked_blocks: u64,
    /// Durable blocks that it has.
    pub durable_blocks: u64,
    /// Bytes given away since the agent's start, for any reason.
    pub moved_bytes: u64,
    /// Blocks that no node has room for, in this walk.
    pub nowhere_blocks: u64,
}
