//! What nodes say of themselves about once a second: how full they are, how busy, and how far a drain has come.

use reprise_policy::DrainProgress;

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
