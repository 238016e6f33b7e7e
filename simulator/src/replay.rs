//! Replay of traces through the production eviction policies, without time.
//!
//! ```text
//! lines, sessions ──▶ TraceBuilder ──▶ Trace ──▶ Cluster: nodes with the tiers DRAM and NVMe ──▶ Counts
//!                                          └───▶ opt: the bound that knows the future
//! ```
//!
//! A [`Trace`] is compact: blocks are a forest, in which a block has the block before it as its parent, and a request
//! is the last block of its prompt. It takes 8 bytes for each distinct block and 32 for each request, however often
//! requests repeat a prefix. While it is read, its ids take about 40 bytes each, and readers hold one line ([`jsonl`])
//! or one session ([`sessions`]). Ids of a session are forgotten at its end.
//!
//! A request hits the leading run of its blocks that are present. Then all its blocks are used or inserted.
//! The eviction orders are those of the agent ([`reprise_policy::eviction`]), called in the agent's sequence.
//!
//! Out of scope: time. Requests are served in the order of their arrival and do not overlap, a block is readable at
//! once, and writes cost nothing. The order of a replay depends on the trace and the seed alone.

mod admitted;
mod cluster;
mod error;
mod jsonl;
mod node;
mod opt;
mod recency;
mod sessions;
#[cfg(test)]
mod tests;
mod tier;
mod trace;

pub use cluster::{Cluster, Replay, Sharing};
pub use error::{Problem, TraceError};
pub use jsonl::read_lines;
pub use node::{Counts, NodeSettings};
pub(crate) use node::{InUse, Matched, Source};
pub use opt::{OptCounts, replay_opt};
pub use recency::{Knowledge, replay_recency};
pub use sessions::read_session;
pub(crate) use tier::{Slot, TierSlots};
pub(crate) use trace::NO_BLOCK;
pub use trace::{IdScope, ReadOptions, Request, Trace, TraceBuilder, TraceRequest};
