//! The engine's side of the session with its node's agent.
//!
//! [`Client`] is blocking and thread-safe; [`asynchronous::AsyncClient`] is the same for tokio. A session
//! consists of one unix socket (`docs/PROTOCOL.md`), one reader thread that distributes the answers, and
//! mappings of the arena regions that the agent granted.
//!
//! ```text
//! save:  reserve → fill (copy and checksum) → commit → wait_durable
//! load:  match_keys → load → wait_layer → copy (and verify) → drop
//! own I/O: lease_extents → write → commit_extents, and pin_extents → read (and verify) → drop
//! own queues: register_memory → request_queues → commands → return_queues
//! ```
//!
//! Cost of the hot path: a block of 2 MiB in DRAM costs its copy (100–120 µs) plus the checksum of each 16
//! KiB piece while the piece is in cache. A call costs one `send`, one wake-up of the reader thread and one
//! of the caller. A load allocates nothing per object; per block it keeps a span and a slice of the answer.
//!
//! Invariants:
//!
//! * No byte counts as loaded before it was checked against the checksum that came by the socket, unless the
//!   caller disables that.
//! * Every call ends by answer, deadline or death of the agent.
//! * A dropped reservation, load, extent or pin is released.
//!
//! Layers above it for engines: [`paged`] saves from and loads to their memory, [`transfers`] does so on
//! background threads, and [`keeper`] reconnects sessions.
//!
//! Not included: retries of failed calls (the caller knows whether a miss is cheaper), reconnection of a
//! [`Client`] (a new agent process is a new session), and GPU support.

#![forbid(unsafe_code)]

/// Compiles the example of the project's README.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
struct ReadmeExample;

pub mod asynchronous;
mod backend;
pub mod client;
pub mod commit;
mod connection;
mod deadline;
pub mod durable;
pub mod error;
pub mod extents;
pub mod keeper;
pub mod layers;
pub mod learned_salt;
pub mod load;
pub mod lookahead;
mod manage;
pub mod matching;
pub mod paged;
pub mod path;
pub mod queues;
mod recent_inputs;
mod regions;
pub mod reservation;
mod token;
pub mod transfers;
mod window;
mod wire;

pub use client::{Client, ConnectOptions};
pub use commit::{ChainPlace, CommitOptions, CommitOutcome};
pub use durable::DurableOutcome;
pub use error::{ClientError, CopyError};
pub use extents::{ExtentStatus, LeasedExtent, PinOutcome, PinnedExtent};
pub use keeper::{KeeperStatus, SessionKeeper};
pub use layers::PendingReport;
pub use learned_salt::LearnedSalt;
pub use load::{BlockStatus, LayerReady, Load, LoadRequest, LoadedBlock, PendingLoad, Verify};
pub use lookahead::PendingLookahead;
pub use manage::PendingBlocks;
pub use matching::{MatchOptions, PendingMatch};
pub use paged::{
    LoadOptions, LoadedBlocks, PagedMemory, PhysicalBlock, SaveOptions, SaveStatus, SavedBlocks,
};
pub use queues::{PendingMemory, QueueGrant, RegisteredMemory};
pub use reprise_policy::block_command::{
    BlockAction, BlockCommand, BlockCounts, BlockReport, BlockSelection, RetentionUsage,
};
pub use reprise_policy::session::{CommitStatus, Priority, Scope, Source, Ticket, TransferBackend};
pub use reservation::Reservation;
pub use transfers::{FinishedTransfer, Outcome, SaveChain, TransferId, TransferOptions, Transfers};
