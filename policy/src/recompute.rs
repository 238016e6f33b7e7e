//! Load or recompute: how many leading blocks of a request are loaded, and how long the request waits for them.
//!
//! A load takes the time of the loads before it, and then T = ℓ + n·S/β for each source of its blocks. Computing
//! n tokens behind a prefix takes n·(α + γ·(prefix + n/2)): attention grows with the context. All four rates are
//! measured. Loading a prefix of L blocks and computing the rest takes
//!
//! ```text
//! total(L) = load(L) + compute(L, end)        load(0) = 0
//! ```
//!
//! and the policy chooses the L with the smallest total, the largest of several. The computation behind the chain is
//! the same for every L.
//!
//! **Bound.** A prediction can be wrong, so the wait has a limit too. A load ends as soon as it has taken
//! `min(cap, base + per_token · tokens)` longer than computing the blocks that have arrived:
//!
//! ```text
//! stop at t when  t > bound + compute(arrived)   ⇒   t + compute(rest) ≤ bound + compute(all)
//! ```
//!
//! So a hit is never slower than recomputing by more than the bound, even if its load fails. A load that makes
//! progress may take longer than the bound.
//!
//! **Unknown rates.** Without measurements of the computation, or of one of the sources, everything is loaded. Without
//! those of the computation, the wait has no limit. A measurement of a source is valid for [`RATE_LIFETIME`]; afterwards
//! one load measures it again, so that a source that was slow once is used again.
//!
//! Out of scope: the effect on other requests, which a computation delays and a load does not.

mod line_fit;
mod rates;
#[cfg(test)]
mod tests;

use std::time::Duration;

use crate::prefetch::IterationTime;
use crate::session::Source;
use crate::time::Tick;
use rates::{ComputeRate, SourceRate, duration};

pub use rates::{RATE_LIFETIME, STEP_TIME_MAX, STEP_TOKENS_MIN};

/// Limit of the wait of a request beyond the time of a computation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitBound {
    /// Largest bound.
    pub cap: Duration,
    /// Bound of a load of no tokens.
    pub base: Duration,
    /// Addition for each token of the load.
    pub per_token: Duration,
}

/// Size of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize {
    /// Tokens of a block.
    pub tokens: u32,
    /// Bytes of a block that one load moves.
    pub bytes: u64,
}

/// Measured step of an engine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Computed tokens of prompts; 0 if the step computed none.
    pub tokens: u64,
    /// Mean number of tokens before each of them.
    pub context: f64,
    /// Time of the step.
    pub seconds: f64,
}

/// Number of blocks of each source, in the order of [`Source::ALL`].
pub type SourceCounts = [u32; 4];

/// Measured load that has ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EndedLoad {
    /// Blocks of the load.
    pub requested: SourceCounts,
    /// Blocks that it has loaded.
    pub loaded: SourceCounts,
    /// Time that it ran, without the wait for earlier loads.
    pub seconds: f64,
}

/// Blocks of a request that could be loaded.
#[derive(Clone, Copy, Debug)]
pub struct Chain<'a> {
    /// Source of each block.
    pub sources: &'a [Source],
    /// Tokens before the first block.
    pub prefix_tokens: u64,
    /// Whether other requests compute: a load then also waits for the end of a step.
    pub is_computing: bool,
}

/// Reason of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A rate is unknown: all blocks are loaded.
    Unmeasured,
    /// Loading all blocks is cheapest.
    Load,
    /// Loading some leading blocks and computing the others is cheapest.
    Part,
    /// Computing all blocks is cheapest.
    Compute,
}

/// Limit of the wait for a load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WaitLimit {
    /// Limit while no block has arrived.
    pub bound: Duration,
    /// Addition for each leading block that has arrived: the time of its computation.
    pub per_block: Duration,
}

/// Decision about the blocks of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Number of leading blocks to load.
    pub blocks: u32,
    /// Sources of these blocks.
    pub requested: SourceCounts,
    /// Reason of the decision.
    pub reason: Reason,
    /// Expected time of the load, without the wait for earlier ones; zero if it is unknown.
    pub load_time: Duration,
    /// Expected time of computing all blocks; zero if it is unknown.
    pub compute_time: Duration,
    /// Limit of the wait; `None`: unlimited.
    pub limit: Option<WaitLimit>,
}

/// Time of one source in a load.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// Index of the source in [`SourceCounts`].
    source: usize,
    bytes: f64,
    seconds: f64,
}

/// Measured rates of one engine, and its decisions.
#[derive(Clone, Debug)]
pub struct LoadPolicy {
    bound: WaitBound,
    block: BlockSize,
    compute: ComputeRate,
    iteration: IterationTime,
    sources: [SourceRate; 4],
    /// Loads that have not ended.
    running: u32,
    /// Expected end of these loads.
    busy_until: Tick,
    ignored: u64,
}

impl WaitBound {
    /// Bound of a load: `min(cap, base + per_token · tokens)`.
    pub fn of_tokens(&self, tokens: u64) -> Duration {
        let nanos = self.per_token.as_nanos().saturating_mul(u128::from(tokens));
        let grown = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
        self.base.saturating_add(grown).min(self.cap)
    }
}

impl WaitLimit {
    /// Time after the submission at which a load ends of which some leading blocks have arrived.
    pub fn after(&self, leading: usize) -> Duration {
        let blocks = u32::try_from(leading).unwrap_or(u32::MAX);
        self.bound.saturating_add(self.per_block.saturating_mul(blocks))
    }
}

impl LoadPolicy {
    /// Creates the policy of an engine, without measurements.
    pub fn new(bound: WaitBound, block: BlockSize) -> LoadPolicy {
        LoadPolicy {
            bound,
            block,
            compute: ComputeRate::default(),
            iteration: IterationTime::default(),
            sources: [SourceRate::default(); 4],
            running: 0,
            busy_until: Tick::default(),
            ignored: 0,
        }
    }

    /// Number of measurements that were ignored, because they are impossible.
    pub fn ignored(&self) -> u64 {
        self.ignored
    }

    /// Expected time of computing tokens behind a prefix; `None` before the first measurement.
    pub fn compute_time(&self, prefix_tokens: u64, tokens: u64) -> Option<Duration> {
        self.compute.seconds(prefix_tokens, tokens).map(duration)
    }

    /// Adds a measured step. Returns whether it counts; an impossible one is counted as ignored.
    pub fn observe_step(&mut self, step: &Step) -> bool {
        let is_valid = step.seconds.is_finite()
            && step.seconds > 0.0
            && step.seconds <= STEP_TIME_MAX.as_secs_f64()
            && step.context.is_finite()
            && step.context >= 0.0;
        if !is_valid {
            self.ignored += 1;
            return false;
        }
        self.iteration.add(duration(step.seconds));
        self.compute.add(step);
        true
    }

    /// Drops the measurements of the computation, if no others will follow: everything is loaded, without a limit.
    pub fn forget_steps(&mut self) {
        (self.compute, self.iteration) = (ComputeRate::default(), IterationTime::default());
    }

    /// Adds a load that has ended. Returns whether it counts; an impossible one is counted as ignored.
    ///
    /// If blocks are missing, the sources that brought none took the time beyond that of the others. A load whose time
    /// cannot be divided in this way does not count.
    pub fn observe_load(&mut self, load: &EndedLoad, now: Tick) -> bool {
        // A block may come from another source than the one that the match has found.
        let is_possible = sum(&load.requested) > 0 && sum(&load.loaded) <= sum(&load.requested);
        if !load.seconds.is_finite() || load.seconds <= 0.0 || !is_possible {
            self.ignored += 1;
            return false;
        }
        let samples = self.samples(load);
        for Sample { source, bytes, seconds } in &samples {
            self.sources[*source].add(*bytes, *seconds, now);
        }
        !samples.is_empty()
    }

    /// Divides the time of a load among its sources.
    fn samples(&self, load: &EndedLoad) -> Vec<Sample> {
        let delivered: Vec<usize> = (0..4).filter(|at| load.loaded[*at] > 0).collect();
        // Blocks may come from other sources than the match has found, so only missing blocks show a failure.
        let has_missing = sum(&load.loaded) < sum(&load.requested);
        let has_failed = |at: &usize| has_missing && load.requested[*at] > 0 && load.loaded[*at] == 0;
        let failed: Vec<usize> = (0..4).filter(has_failed).collect();
        if failed.is_empty() {
            return self.divided(&load.loaded, &delivered, load.seconds);
        }
        let Some(others) = self.expected(&load.loaded, &delivered) else { return Vec::new() };
        let beyond = load.seconds - others;
        if beyond <= 0.0 {
            return self.divided(&load.loaded, &delivered, load.seconds);
        }
        // An early failure does not show how long the blocks take. A load that ends at its limit has run for about the bound,
        // less the wait for earlier loads.
        let tokens = sum(&load.requested) * u64::from(self.block.tokens);
        let half_bound = self.bound.of_tokens(tokens).as_secs_f64() / 2.0;
        match beyond > self.expected(&load.requested, &failed).unwrap_or(half_bound) {
            true => self.divided(&load.requested, &failed, beyond),
            false => Vec::new(),
        }
    }

    /// Expected time of blocks of these sources; `None` if one of them was not measured.
    fn expected(&self, blocks: &SourceCounts, sources: &[usize]) -> Option<f64> {
        sources.iter().map(|at| self.sources[*at].seconds(self.bytes(blocks[*at]))).sum()
    }

    /// Divides time among sources as expected, or by bytes.
    fn divided(&self, blocks: &SourceCounts, sources: &[usize], seconds: f64) -> Vec<Sample> {
        let total = self.expected(blocks, sources).filter(|total| *total > 0.0);
        let all_bytes: f64 = sources.iter().map(|at| self.bytes(blocks[*at])).sum();
        let sample = |source: &usize| {
            let bytes = self.bytes(blocks[*source]);
            let known = total.zip(self.sources[*source].seconds(bytes));
            let share = known.map_or(bytes / all_bytes, |(total, own)| own / total);
            Sample { source: *source, bytes, seconds: seconds * share }
        };
        sources.iter().map(sample).collect()
    }

    /// Decides about the blocks of a request.
    pub fn decide(&self, chain: &Chain<'_>, now: Tick) -> Decision {
        let count = u32::try_from(chain.sources.len()).unwrap_or(u32::MAX);
        let compute_all = self.compute_seconds(chain, chain.sources.len());
        let (Some(compute_all), Some(choice)) = (compute_all, self.cheapest(chain, now)) else {
            return self.decision(chain, (count, Reason::Unmeasured), (0.0, compute_all.unwrap_or(0.0)));
        };
        let (blocks, load) = choice;
        let reason = match blocks {
            0 if count > 0 => Reason::Compute,
            _ if blocks < count => Reason::Part,
            _ => Reason::Load,
        };
        self.decision(chain, (blocks, reason), (load, compute_all))
    }

    /// Limit of the wait for a load of blocks behind a prefix; `None` before the computation was measured.
    pub fn limit(&self, prefix_tokens: u64, blocks: u32) -> Option<WaitLimit> {
        let tokens = u64::from(self.block.tokens);
        // The first block has the smallest context, so this is the least time of all.
        let per_block = self.compute_time(prefix_tokens, tokens)?;
        Some(WaitLimit { bound: self.bound.of_tokens(tokens * u64::from(blocks)), per_block })
    }

    /// Counts a load that was submitted. Later loads wait for it.
    pub fn load_started(&mut self, requested: &SourceCounts, now: Tick) {
        let begin = if self.running == 0 { now } else { self.busy_until.max(now) };
        let (mut seconds, block_bytes) = (0.0, self.bytes(1));
        for (rate, count) in self.sources.iter_mut().zip(requested).filter(|(_, count)| **count > 0) {
            seconds += rate.seconds(block_bytes * f64::from(*count)).unwrap_or(0.0);
            rate.exploring(now);
        }
        self.busy_until = begin.after(duration(seconds));
        self.running += 1;
    }

    /// Counts the end of a load that was started, after its measurement, if it has one. Another load measures sources that
    /// this one did not.
    pub fn load_ended(&mut self, requested: &SourceCounts) {
        self.running = self.running.saturating_sub(1);
        for (rate, _) in self.sources.iter_mut().zip(requested).filter(|(_, count)| **count > 0) {
            rate.explored();
        }
    }

    /// Returns the number of blocks with the smallest total, and the time of their load; `None` if a rate is unknown.
    fn cheapest(&self, chain: &Chain<'_>, now: Tick) -> Option<(u32, f64)> {
        let backlog = if self.running == 0 { Duration::ZERO } else { self.busy_until.since(now) };
        let step = self.iteration.expected().filter(|_| chain.is_computing).unwrap_or_default();
        let waits = (backlog + step).as_secs_f64();
        let rates: Vec<Option<(f64, f64)>> = self.sources.iter().map(|rate| rate.line(now)).collect();
        let compute_all = self.compute_seconds(chain, chain.sources.len())?;
        let mut best = (0, 0.0, compute_all);
        let (mut load, mut seen) = (0.0, [false; 4]);
        for (at, source) in chain.sources.iter().enumerate() {
            let index = *source as usize - 1;
            let (latency, per_byte) = rates[index]?;
            if !std::mem::replace(&mut seen[index], true) {
                load += latency;
            }
            load += per_byte * self.bytes(1);
            let total = waits + load + compute_all - self.compute_seconds(chain, at + 1)?;
            if total <= best.2 {
                best = (u32::try_from(at + 1).unwrap_or(u32::MAX), load, total);
            }
        }
        Some((best.0, best.1))
    }

    fn decision(&self, chain: &Chain<'_>, choice: (u32, Reason), times: (f64, f64)) -> Decision {
        let (blocks, reason) = choice;
        let mut requested = SourceCounts::default();
        for source in &chain.sources[..blocks as usize] {
            requested[*source as usize - 1] += 1;
        }
        let limit = self.limit(chain.prefix_tokens, blocks);
        let (load_time, compute_time) = (duration(times.0), duration(times.1));
        Decision { blocks, requested, reason, load_time, compute_time, limit }
    }

    /// Expected time of computing the leading blocks of a chain.
    fn compute_seconds(&self, chain: &Chain<'_>, blocks: usize) -> Option<f64> {
        let tokens = (blocks as u64).saturating_mul(u64::from(self.block.tokens));
        self.compute.seconds(chain.prefix_tokens, tokens)
    }

    fn bytes(&self, blocks: u32) -> f64 {
        self.block.bytes as f64 * f64::from(blocks)
    }
}

fn sum(counts: &SourceCounts) -> u64 {
    counts.iter().map(|count| u64::from(*count)).sum()
}
