//! Hints of engines about what runs next; agents and clients use these types.

use std::time::Duration;

use crate::BlockKey;
use crate::session::Ranks;

/// Version of the hints that agents accept.
pub const HINT_VERSION: u32 = 2;

/// Longest time of an iteration; a longer one is ignored.
pub const ITERATION_MAX: Duration = Duration::from_secs(60);

/// What an engine will run, sent once for each iteration. Advice: an agent may ignore any part of it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lookahead {
    /// Version of the hint; [`HINT_VERSION`].
    pub version: u32,
    /// Measured time of the last iteration. Zero, or a time above [`ITERATION_MAX`], is ignored and counted.
    pub iteration: Duration,
    /// All requests that wait. One of the list before that is missing has begun: its load is expected.
    pub requests: Vec<LookaheadRequest>,
    /// Requests that were preempted or have finished: nothing is read for them any longer.
    pub cancelled: Vec<u64>,
    /// All requests that have begun and not finished. One of the list before that is missing has finished. `None`: as
    /// in the hint before.
    pub begun: Option<Vec<BegunRequest>>,
    /// Ranks whose parts the keys are.
    pub ranks: Ranks,
}

/// A request that waits.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LookaheadRequest {
    /// Number of the request, unique in its session.
    pub request: u64,
    /// Iterations until it is expected to run; at least 1.
    pub iterations: u32,
    /// Probability that it runs then, in thousandths; 1 to 1,000.
    pub confidence: u16,
    /// Keys of the blocks that it will load, in order. Empty: those of an earlier hint.
    pub keys: Vec<BlockKey>,
}

/// A request that has begun and not finished. Its blocks have the eviction class of its state.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BegunRequest {
    /// Number of the request, unique among those that have begun in its session.
    pub request: u64,
    /// Whether it computes.
    pub state: RequestState,
    /// Number of its keys in earlier hints that stay listed.
    pub first: u32,
    /// Keys of its blocks from that number on, in order; they replace those of earlier hints. Empty: no change.
    pub keys: Vec<BlockKey>,
}

/// State of a request that has begun.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RequestState {
    /// The engine computes it.
    #[default]
    Running,
    /// It waits to run again.
    Preempted,
}

/// Answer to a hint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LookaheadReport {
    /// Iterations that the agent looks ahead.
    pub window: u32,
    /// Parts of the hint that the agent ignored.
    pub ignored: u32,
    /// Listed requests whose blocks are all in DRAM, in the order of the list.
    pub ready: Vec<u64>,
}
