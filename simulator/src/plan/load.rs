//! Load of a trace: rates, lengths and intervals between uses.

use super::PlanError;
use crate::replay::Trace;

/// References that are replayed for each size and policy; beyond it, sessions are sampled.
const REFERENCES_MAX: u64 = 2_500_000;

/// References of each replay with time; beyond it, nodes are sampled with their sessions.
const TIMED_REFERENCES_MAX: u64 = 4_000_000;

/// Seconds for which a cold store keeps a block at least.
const COLD_SECONDS_MIN: f64 = 86_400.0;

/// Requests for which times are estimated.
const REQUESTS_MAX: usize = 4_000;

/// Prompt and output of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Prompt in tokens.
    pub input: u32,
    /// Output in tokens.
    pub output: u32,
}

/// Limits of replays, in references to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// References of a replay for a size and a policy: only traces of sessions with own ids can be sampled.
    pub references: u64,
    /// References of a replay with time. Samples with few sessions may have twice as many.
    pub timed_references: u64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { references: REFERENCES_MAX, timed_references: TIMED_REFERENCES_MAX }
    }
}

/// Load that a plan is made for.
#[derive(Clone, Debug)]
pub struct Load {
    whole: Trace,
    sample: Option<Trace>,
    /// Limits of replays.
    pub limits: Limits,
    /// Part of the references that replays without time have.
    pub share: f64,
    /// Number of requests of the whole trace.
    pub requests: u64,
    /// Blocks of the prompts of the whole trace.
    pub references: u64,
    /// Distinct blocks of the whole trace.
    pub distinct: u64,
    /// Sessions of the whole trace.
    pub sessions: u32,
    /// Sessions that replays without time have.
    pub sessions_replayed: u32,
    /// Milliseconds between the first and the last arrival.
    pub span_ms: u64,
    /// Requests a second, in the time in which the middle 90 % arrive.
    pub requests_per_second: f64,
    /// Blocks of prompts a second.
    pub references_per_second: f64,
    /// Mean tokens of a prompt and of an output.
    pub tokens_mean: (f64, f64),
    /// Median tokens of a request, prompt and output.
    pub tokens_median: u64,
    /// Longest request in tokens.
    pub tokens_max: u64,
    /// Requests for which times are estimated: every `stride`-th one that is replayed.
    pub shapes: Vec<Shape>,
    /// Distance of the requests in `shapes`.
    pub stride: usize,
    /// Seed of samples.
    pub seed: u64,
    /// Number of uses of blocks at most `2^n` ms after the use before.
    pub reuse_intervals: [u64; 48],
}

impl Load {
    /// Measures the load of a trace; large traces of sessions are sampled by a seed.
    pub fn new(trace: Trace, limits: Limits, seed: u64) -> Result<Load, PlanError> {
        let all = trace.requests();
        let requests = all.len();
        let references = trace.references();
        if references == 0 {
            return Err(PlanError::NoBlocks(trace.block_tokens()));
        }
        let at = |share: f64| all[((requests - 1) as f64 * share) as usize].at_ms;
        let (middle, span) = (at(0.95) - at(0.05), trace.span_ms());
        if span == 0 {
            return Err(PlanError::NoDuration { requests, at_ms: at(0.0) });
        }
        // A few requests have no middle: their whole span counts.
        let seconds = if middle > 0 { middle as f64 / 900.0 } else { span as f64 / 1_000.0 };
        let requests_per_second = requests as f64 / seconds;
        let mut lengths: Vec<u64> = all.iter().map(|one| one.input_tokens + one.output_tokens).collect();
        lengths.sort_unstable();
        let sum = |tokens: fn(&crate::replay::Request) -> u64| all.iter().map(tokens).sum::<u64>() as f64;
        let tokens_mean =
            (sum(|one| one.input_tokens) / requests as f64, sum(|one| one.output_tokens) / requests as f64);
        let reuse_intervals = trace.reuse_intervals();
        let (distinct, sessions) = (trace.distinct(), trace.sessions());
        let is_sampled = trace.has_session_ids() && references > limits.references;
        let sample = is_sampled.then(|| trace.sampled(limits.references as f64 / references as f64, seed));
        let whole = trace;
        let trace = sample.as_ref().unwrap_or(&whole);
        let stride = trace.requests().len().div_ceil(REQUESTS_MAX).max(1);
        let token = |tokens: u64| u32::try_from(tokens).unwrap_or(u32::MAX);
        let shapes = trace.requests().iter().step_by(stride).map(|request| Shape {
            input: token(request.input_tokens).max(1),
            output: token(request.output_tokens),
        });
        Ok(Load {
            share: trace.references() as f64 / references as f64,
            requests: requests as u64,
            references,
            distinct,
            sessions,
            sessions_replayed: trace.sessions_used(),
            span_ms: span,
            limits,
            seed,
            requests_per_second,
            references_per_second: requests_per_second * references as f64 / requests as f64,
            tokens_mean,
            tokens_median: lengths[requests / 2].max(1),
            tokens_max: lengths[requests - 1],
            shapes: shapes.collect(),
            stride,
            reuse_intervals,
            whole,
            sample,
        })
    }

    /// Trace that is replayed without time: the whole one, or a sample of its sessions.
    pub fn trace(&self) -> &Trace {
        self.sample.as_ref().unwrap_or(&self.whole)
    }

    /// The whole trace, without a sample.
    pub fn whole(&self) -> &Trace {
        &self.whole
    }

    /// Tokens of a block.
    pub fn block_tokens(&self) -> u64 {
        self.whole.block_tokens()
    }

    /// Tokens of an engine's memory that requests need at least: the least one, and how many need more than `tokens`.
    ///
    /// A request needs whole blocks for its prompt, and a block in reserve, as in the replay with time.
    pub fn memory_tokens(&self, tokens: u64) -> (u64, u64) {
        let needs = self.whole.requests().iter().map(|request| {
            let in_blocks = self.whole.len_of(request) as u64 * self.block_tokens();
            let own = request.input_tokens.saturating_add(request.output_tokens);
            in_blocks.max(own).saturating_add(self.block_tokens())
        });
        let least = needs.clone().min().unwrap_or(0);
        (least, needs.filter(|need| *need > tokens).count() as u64)
    }

    /// Seconds for which a cold store keeps a block: as long as the trace, whose blocks all stay in it, or a day.
    pub fn cold_seconds(&self) -> f64 {
        (self.span_ms as f64 / 1_000.0).max(COLD_SECONDS_MIN)
    }

    /// Blocks of a cold store: all new ones of its time, at the rate of the trace.
    pub fn cold_blocks(&self) -> f64 {
        self.references_per_second * self.distinct as f64 / self.references as f64 * self.cold_seconds()
    }

    /// Part of the repeated uses that come at most so many seconds after the use before.
    pub fn reused_within(&self, seconds: f64) -> f64 {
        let all: u64 = self.reuse_intervals.iter().sum();
        let ms = seconds * 1_000.0;
        let mut within = 0.0;
        for (power, count) in self.reuse_intervals.iter().enumerate() {
            let (low, high) =
                (if power == 0 { 0.0 } else { 2_f64.powi(power as i32 - 1) }, 2_f64.powi(power as i32));
            within += *count as f64 * ((ms - low) / (high - low)).clamp(0.0, 1.0);
        }
        if all == 0 { 0.0 } else { within / all as f64 }
    }
}
