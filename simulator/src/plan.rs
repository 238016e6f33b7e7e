//! Capacity planner: which hardware and policy to buy for a trace, why, and what the next dollar buys.
//!
//! ```text
//! trace ─▶ Curves: hits of each policy by capacity ─┐
//! model, hardware ─▶ Machine: times, prices, SSDs ──┼─▶ Estimate of each Configuration ─▶ Shortlist ─▶ replays ─▶ Plan
//! budget ───────────────────────────────────────────┘                         guidance: tiers, bubbles, decoding
//! ```
//!
//! The hits come from replays of the trace through the production eviction orders ([`crate::replay`]). Times come from the
//! closed formulas of [`crate::serving::costs`] and the profiles. So thousands of configurations take seconds, and equal
//! inputs give equal plans.
//!
//! Simplifications of the search: nodes share one cache of their summed size, blocks in DRAM are on NVMe too, and the HBM
//! of accelerators keeps nothing between requests. So estimates select candidates only. These and their neighbours are
//! replayed with time, with their nodes and tiers ([`Timed`]), and the replays decide ([`choose`]). The load that a plan
//! serves, the price of a token and the traffic of a cold store are those of its replays too.

mod budget;
mod choice;
mod cold;
mod configuration;
mod curves;
mod estimate;
mod guidance;
mod load;
mod machine;
mod search;
#[cfg(test)]
mod tests;
mod timed;

pub use budget::{Budget, HOURS_PER_MONTH, HOURS_PER_YEAR};
pub use choice::{ColdStore, Evaluated, Goal, Plan, Reached, Rejected, Shortlist, Step, shortlist};
pub use cold::ColdTraffic;
pub use configuration::{Configuration, Ssds};
pub use curves::{Curves, Point};
pub use estimate::{BUSY_MAX, Estimate, Estimator, Utilisation};
pub use guidance::{Bubble, DecodeOverhead, Guidance, Interval, TierSequences};
pub use load::{Limits, Load, Randomness, Recorded, Refused};
pub use machine::{Machine, SsdClass};
pub use search::{Replayed, Run, choose};
pub use timed::{Mean, Part, Timed};

/// Reason why no plan is made; the message names the remedy.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum PlanError {
    /// Profile of hardware or model.
    #[error("{0}")]
    Profile(#[from] crate::serving::profiles::ProfileError),
    /// The weights exceed the memory of a node.
    #[error(
        "{model} does not fit: {weights_gb:.0} GB of weights and some KV cache need more than the {memory_gb:.0} GB of \
         {accelerators} × {hardware}: pass --hardware with more memory, or a smaller --model"
    )]
    ModelTooLarge {
        /// Name of the model.
        model: String,
        /// Name of the accelerator.
        hardware: String,
        /// Weights in GB.
        weights_gb: f64,
        /// Memory of the largest node in GB.
        memory_gb: f64,
        /// Accelerators of the largest node.
        accelerators: u32,
    },
    /// The budget does not buy a node.
    #[error(
        "a budget of {budget:.2} USD a month buys nothing: the least node, {least}, costs {needed:.2} USD a month; pass \
         --budget {rounded} or more, or cheaper --hardware"
    )]
    BudgetTooSmall {
        /// Budget in USD a month.
        budget: f64,
        /// Description of the least node.
        least: String,
        /// Its price in USD a month.
        needed: f64,
        /// Its price, rounded up.
        rounded: u64,
    },
    /// The amount is not one.
    #[error(
        "invalid budget \"{0}\": expected USD a month as 50000, or an amount with /hour, /month, /year or /3years \
         (spread over three years)"
    )]
    InvalidBudget(String),
    /// All requests arrive at the same time.
    #[error(
        "the trace has no duration: all {requests} requests arrive at {at_ms} ms, so there is no load to plan for; record \
         a trace with arrival times"
    )]
    NoDuration {
        /// Number of requests.
        requests: usize,
        /// Their time.
        at_ms: u64,
    },
    /// No request has a full block.
    #[error(
        "the trace has no blocks: no prompt is as long as a block of {0} tokens, so nothing can be cached"
    )]
    NoBlocks(u64),
    /// No request fits into the context of the model and the memory of a node's accelerators.
    #[error(
        "no request is served: the shortest of {requests} has {tokens} tokens, but {model} has a context of {context}, and \
         {node} has memory for {memory_tokens} next to it; pass --hardware with more memory, or another --model"
    )]
    AllRefused {
        /// Number of requests.
        requests: u64,
        /// Tokens of the shortest request.
        tokens: u64,
        /// Tokens of the model's context.
        context: u64,
        /// Description of the node.
        node: String,
        /// Tokens for which the node has memory.
        memory_tokens: u64,
        /// Title of the model.
        model: String,
    },
}
