//! Load of a trace: rates, lengths and intervals between uses.

use std::borrow::Cow;

use super::PlanError;
use super::machine::Machine;
use crate::replay::{Request, Trace};

/// References that are replayed for each size and policy; beyond it, sessions are sampled.
const REFERENCES_MAX: u64 = 1_000_000;

/// References of each replay with time; beyond it, blocks are joined, and then nodes are sampled with their sessions.
const TIMED_REFERENCES_MAX: u64 = 4_000_000;

/// Replays of each compared configuration that are averaged. An interval needs several.
const SAMPLES: u32 = 4;

/// Tokens of a joined block at most.
const JOINED_TOKENS_MAX: u64 = 1_024;

/// Joined blocks of a prompt of mean length at least: the rest behind the last block is never cached.
const JOINED_BLOCKS_MIN: u64 = 32;

/// Windows in which the load changes, at least and at most.
const WINDOWS: (u64, u64) = (16, 1_024);

/// Milliseconds of a window, unless there would be too few or too many.
const WINDOW_MS: u64 = 3_600_000;

/// Requests for which times are estimated.
const REQUESTS_MAX: usize = 4_000;

/// Prompt and output of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Prompt in tokens.
    pub input: u32,
    /// Output in tokens.
    pub output: u32,
    /// Window of [`Load::window_seconds`] in which the request arrives.
    pub window: u32,
}

/// Trace as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Number of requests.
    pub requests: u64,
    /// Tokens of all prompts and outputs.
    pub tokens: u64,
    /// Blocks of all prompts.
    pub references: u64,
    /// Distinct blocks.
    pub distinct: u64,
    /// Tokens of a block.
    pub block_tokens: u64,
}

/// Requests that no node serves. They are not part of the load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Refused {
    /// Requests that are longer than the context of the model.
    pub beyond_context: u64,
    /// Further requests whose KV cache exceeds the memory of a node's accelerators.
    pub beyond_memory: u64,
    /// Tokens of both, prompts and outputs.
    pub tokens: u64,
}

/// Seed of a plan, and the random starts of sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Randomness {
    /// Seed of starts, placements and samples of sessions.
    pub seed: u64,
    /// Milliseconds within which sessions start, if the times of a trace count from these starts.
    pub spread_ms: u64,
}

/// Limits of replays, in references to blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// References of a replay for a size and a policy: only traces of sessions with own ids can be sampled.
    pub references: u64,
    /// References of a replay with time. Samples with few sessions may have twice as many.
    pub timed_references: u64,
    /// Replays with time of each configuration, with other starts and placements of sessions; at least 1.
    pub samples: u32,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { references: REFERENCES_MAX, timed_references: TIMED_REFERENCES_MAX, samples: SAMPLES }
    }
}

/// Load that a plan is made for.
#[derive(Clone, Debug)]
pub struct Load {
    /// The trace with different starts and placements of its sessions. The first one has those of the seed itself.
    samples: Vec<Trace>,
    /// Part of the sessions of the first one.
    part: Option<Trace>,
    /// The trace before blocks were joined. All other counts of blocks are of joined ones.
    pub recorded: Recorded,
    /// Requests of the recorded trace that no node serves. All other figures are without them.
    pub refused: Refused,
    /// Limits of replays.
    pub limits: Limits,
    /// Part of the references that replays without time have.
    pub share: f64,
    /// Number of served requests of the whole trace.
    pub requests: u64,
    /// Blocks of the prompts of the whole trace.
    pub references: u64,
    /// Distinct blocks of the whole trace.
    pub distinct: u64,
    /// Sessions of the whole trace that have served requests.
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
    /// Requests for which times are estimated: every `stride`-th one that is replayed.
    pub shapes: Vec<Shape>,
    /// Distance of the requests in `shapes`.
    pub stride: usize,
    /// Seed of samples.
    pub seed: u64,
    /// Whether samples have other starts of sessions.
    pub has_random_starts: bool,
    /// Seconds of each window in which the load is taken as constant; the last one may be longer than its requests.
    pub window_seconds: f64,
    /// Number of uses of blocks at most `2^n` ms after the use before.
    pub reuse_intervals: [u64; 48],
}

impl Load {
    /// Measures the load of a trace for nodes. Blocks of large traces are joined, and sessions are sampled by the seed.
    pub fn new(
        trace: &Trace,
        machine: &Machine,
        limits: Limits,
        random: Randomness,
    ) -> Result<Load, PlanError> {
        let recorded = Recorded {
            requests: trace.requests().len() as u64,
            tokens: trace.requests().iter().map(tokens_of).sum(),
            references: trace.references(),
            distinct: trace.distinct(),
            block_tokens: trace.block_tokens(),
        };
        if recorded.references == 0 {
            return Err(PlanError::NoBlocks(trace.block_tokens()));
        }
        let has_random_starts = trace.has_session_times();
        let (trace, refused) = served(trace, machine, limits)?;
        if trace.references() == 0 {
            return Err(PlanError::NoBlocks(trace.block_tokens()));
        }
        let requests = trace.requests().len();
        let samples = samples(&trace, limits, random);
        let first = &samples[0];
        let (references, span) = (first.references(), first.span_ms());
        let at = |share: f64| first.requests()[((requests - 1) as f64 * share) as usize].at_ms;
        let middle = at(0.95) - at(0.05);
        if span == 0 {
            return Err(PlanError::NoDuration { requests, at_ms: at(0.0) });
        }
        // A few requests have no middle: their whole span counts.
        let seconds = if middle > 0 { middle as f64 / 900.0 } else { span as f64 / 1_000.0 };
        let requests_per_second = requests as f64 / seconds;
        let mut lengths: Vec<u64> = first.requests().iter().map(tokens_of).collect();
        lengths.sort_unstable();
        let is_sampled = first.has_session_ids() && references > limits.references;
        let part =
            is_sampled.then(|| first.sampled(limits.references as f64 / references as f64, random.seed));
        let replayed = part.as_ref().unwrap_or(first);
        let stride = replayed.requests().len().div_ceil(REQUESTS_MAX).max(1);
        let window_ms = WINDOW_MS.min(span / WINDOWS.0).max(span / WINDOWS.1).max(1);
        Ok(Load {
            share: replayed.references() as f64 / references as f64,
            requests: requests as u64,
            references,
            distinct: first.distinct(),
            sessions: first.sessions_used(),
            sessions_replayed: replayed.sessions_used(),
            span_ms: span,
            limits,
            seed: random.seed,
            has_random_starts,
            window_seconds: window_ms as f64 / 1_000.0,
            requests_per_second,
            references_per_second: requests_per_second * references as f64 / requests as f64,
            tokens_mean: tokens_mean(first),
            tokens_median: lengths[requests / 2].max(1),
            shapes: shapes(replayed, stride, (at(0.0), window_ms)),
            stride,
            reuse_intervals: first.reuse_intervals(),
            recorded,
            refused,
            part,
            samples,
        })
    }

    /// Trace that is replayed without time: the whole one, or a sample of its sessions.
    pub fn trace(&self) -> &Trace {
        self.part.as_ref().unwrap_or(&self.samples[0])
    }

    /// All sessions with the starts and placements of a sample.
    pub fn sample(&self, sample: usize) -> &Trace {
        &self.samples[sample]
    }

    /// Whether sessions share no blocks, so that they can be sampled.
    pub fn has_session_ids(&self) -> bool {
        self.samples[0].has_session_ids()
    }

    /// Tokens of a block that is replayed.
    pub fn block_tokens(&self) -> u64 {
        self.samples[0].block_tokens()
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

/// Number of blocks that are joined, a power of two: as few as the limit allows.
fn joined(trace: &Trace, limits: Limits) -> u32 {
    let (input, _) = tokens_mean(trace);
    let tokens_max = JOINED_TOKENS_MAX.min(input as u64 / JOINED_BLOCKS_MIN);
    let mut factor = 1;
    while trace.references() / factor > limits.timed_references
        && 2 * factor * trace.block_tokens() <= tokens_max
    {
        factor *= 2;
    }
    factor as u32
}

/// The trace with starts and placements of its sessions: of the seed, then others.
fn samples(trace: &Trace, limits: Limits, random: Randomness) -> Vec<Trace> {
    let sample = |number: u32| {
        let seed = random.seed.wrapping_add(u64::from(number) << 32);
        let mut sample = trace.clone();
        if sample.has_session_times() {
            sample = sample.started_at_random(random.spread_ms, seed);
        }
        if number == 0 { sample } else { sample.placed(seed) }
    };
    (0..limits.samples.max(1)).map(sample).collect()
}

/// Tokens of a request, prompt and output.
fn tokens_of(request: &Request) -> u64 {
    request.input_tokens.saturating_add(request.output_tokens)
}

/// Tokens of an engine's memory that a request needs: whole blocks for its prompt, and a block in reserve, as in the
/// replay with time.
fn need(trace: &Trace, request: &Request) -> u64 {
    let in_blocks = trace.len_of(request) as u64 * trace.block_tokens();
    in_blocks.max(tokens_of(request)).saturating_add(trace.block_tokens())
}

/// Requests that a node serves, with blocks that are joined as far as the limit asks for, and the others.
///
/// Engines refuse a request that is longer than the context of their model, or that their memory cannot hold.
fn served(trace: &Trace, machine: &Machine, limits: Limits) -> Result<(Trace, Refused), PlanError> {
    let (context, memory) = (u64::from(machine.model.context), machine.memory_tokens());
    let is_short = |request: &Request| tokens_of(request) <= context;
    let all = trace.requests();
    let mut refused = Refused {
        beyond_context: all.iter().filter(|request| !is_short(request)).count() as u64,
        ..Refused::default()
    };
    let mut kept = Cow::Borrowed(trace);
    if all.iter().any(|request| !is_short(request) || need(trace, request) > memory) {
        kept = Cow::Owned(trace.filtered(|request| is_short(request) && need(trace, request) <= memory));
    }
    let joined = kept.coarsened(joined(&kept, limits));
    // A joined block in reserve is larger.
    let is_large = |request: &Request| need(&joined, request) > memory;
    let kept = match joined.requests().iter().any(is_large) {
        true => joined.filtered(|request| !is_large(request)),
        false => joined,
    };
    refused.beyond_memory = (all.len() - kept.requests().len()) as u64 - refused.beyond_context;
    let tokens = |trace: &Trace| trace.requests().iter().map(tokens_of).sum::<u64>();
    refused.tokens = tokens(trace) - tokens(&kept);
    if kept.requests().is_empty() {
        return Err(PlanError::AllRefused {
            requests: all.len() as u64,
            tokens: all.iter().map(tokens_of).min().unwrap_or(0),
            context,
            node: machine.title(),
            memory_tokens: memory,
            model: machine.model.title.clone(),
        });
    }
    Ok((kept, refused))
}

/// Mean tokens of a prompt and of an output.
fn tokens_mean(trace: &Trace) -> (f64, f64) {
    let requests = trace.requests();
    let mean = |tokens: fn(&Request) -> u64| {
        requests.iter().map(tokens).sum::<u64>() as f64 / requests.len().max(1) as f64
    };
    (mean(|one| one.input_tokens), mean(|one| one.output_tokens))
}

/// Every `stride`-th request, with its window since a begin.
fn shapes(trace: &Trace, stride: usize, (begin_ms, window_ms): (u64, u64)) -> Vec<Shape> {
    let token = |tokens: u64| u32::try_from(tokens).unwrap_or(u32::MAX);
    let shape = |request: &Request| Shape {
        input: token(request.input_tokens).max(1),
        output: token(request.output_tokens),
        window: token((request.at_ms - begin_ms) / window_ms),
    };
    trace.requests().iter().step_by(stride).map(shape).collect()
}
