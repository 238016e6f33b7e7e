//! A way of blocks between an engine's memory and its node besides the arena.

use std::fmt;
use std::time::Duration;

use reprise_policy::BlockKey;

use crate::client::Client;
use crate::error::ClientError;
use crate::paged::{LoadOptions, PagedMemory, PhysicalBlock, SaveOptions, SaveStatus};

/// Least time of a load by a path: transfers that a path gives up can cost a device its queue pairs. Blocks of loads with
/// less time take the arena.
pub const LOAD_TIME_MIN: Duration = Duration::from_millis(50);

/// Moves the blocks of [`Transfers`](crate::Transfers) that it reaches; the arena moves the others. Loads and saves run
/// at the same time, in one thread each.
///
/// An error ends the transfer: the session has ended, or the agent does not answer, by the limit of the wait
/// ([`ClientError::LimitReached`]) or at all.
pub trait BlockPath: fmt::Debug + Send + Sync {
    /// Loads blocks; returns which of them are in the memory, verified. The contents of the others are unspecified.
    ///
    /// # Errors
    /// See the trait.
    fn load(
        &self,
        client: &Client,
        blocks: &[(BlockKey, PhysicalBlock)],
        memory: &dyn PagedMemory,
        options: &LoadOptions,
    ) -> Result<Vec<bool>, ClientError>;

    /// Saves leading blocks of a chain after `options.parent`; returns their statuses, each `Committed` or `Duplicate`.
    ///
    /// # Errors
    /// See the trait.
    fn save(
        &self,
        client: &Client,
        blocks: &[(BlockKey, PhysicalBlock)],
        memory: &dyn PagedMemory,
        options: &SaveOptions,
    ) -> Result<Vec<SaveStatus>, ClientError>;
}
