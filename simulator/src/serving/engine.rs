//! An engine with continuous batching on simulated hardware.
//!
//! ```text
//!  arrivals ─▶ admitted (KV ≤ limit) ─▶ rotation ─▶ batch ─▶ step ─▶ finished
//!                                         ▲                    │
//!                                         └── end of a turn ───┘      preempted: back to the head of the rotation
//! ```
//!
//! A step decodes one token for each request of the batch and computes chunks of prompts with the rest of its token
//! budget. It begins when all blocks of its requests are in HBM, and occupies the compute and the HBM channel. With
//! more admitted requests than the batch holds, each runs for a turn of some steps, so the requests of the next
//! steps are known: that is the lookahead of the prefetch policy.
//!
//! The production policies decide: [`EvictionOrder`](reprise_policy::eviction::EvictionOrder) selects victims
//! ([`super::tiers`]), [`reprise_policy::prefetch`] plans reads ahead, [`reprise_policy::recompute`] decides whether a
//! cached prefix is loaded.
//!
//! Left out: swaps of requests during their prefill by priority, and faults (see the crate's other world).

#[cfg(test)]
mod tests;

use std::collections::VecDeque;

use reprise_policy::eviction::EvictionPolicy;
use reprise_policy::prefetch::{IterationTime, Plan};
use reprise_policy::recompute::LoadPolicy;

use super::channel::Totals;
use super::costs::Costs;
use super::events::{EventQueue, Nanos, SECOND};
use super::fabric::{ChannelKind, Event, Fabric};
use super::profiles::{Hardware, Model};
use super::random::Random;
use super::tiers::{BlockId, Demoted, Place, Tiers};
use super::workload::Request;

/// Output from which on a request is always part of a population; shorter ones are in proportion to their outputs.
const POPULATION_OUTPUT_MAX: u64 = 1_024;

/// Effect of a preemption, for lack of HBM, on the KV cache of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preemption {
    /// Its blocks become victims of eviction and are loaded again.
    Swap,
    /// Its blocks are dropped and computed again.
    Recompute,
}

/// Time at which an arrived request is admitted, and the load of its cached prefix begins.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admission {
    /// Its arrival, also during a step.
    #[default]
    AtOnce,
    /// The end of the step that runs, as in engines whose scheduler runs between steps.
    BetweenSteps,
}

/// Time of transfers between tiers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfers {
    /// They occupy shared channels.
    Timed,
    /// They take no time: TierKV's Oracle.
    Free,
}

/// Time at which the cached prefix of a request is loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefixLoading {
    /// Before the request enters the rotation, while steps of other requests run.
    #[default]
    Ahead,
    /// In its first step, which computes nothing meanwhile: the engine waits for the CPU that moves the blocks.
    Blocking,
    /// In its first step, layer by layer, while earlier layers are computed.
    LayerWise,
}

/// Parameters of a run.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Node of the engine.
    pub hardware: Hardware,
    /// Model of the engine.
    pub model: Model,
    /// Accelerators with tensor parallelism.
    pub accelerators: u32,
    /// Tokens of a block.
    pub tokens_per_block: u32,
    /// Blocks of HBM, DRAM and NVMe.
    pub capacity: [u64; 3],
    /// Largest KV cache of all admitted requests, in blocks.
    pub admitted_blocks_max: u64,
    /// Largest number of requests in a step.
    pub batch_max: usize,
    /// Largest number of tokens in a step.
    pub step_tokens_max: u32,
    /// Steps of a turn; `None`: a request runs until it ends.
    pub turn: Option<u32>,
    /// Order of eviction in all tiers.
    pub eviction: EvictionPolicy,
    /// Window K of the prefetch policy, and the one for NVMe; `None`: reactive.
    pub lookahead: Option<(u32, u32)>,
    /// Time that transfers take.
    pub transfers: Transfers,
    /// Effect of a preemption.
    pub preemption: Preemption,
    /// Load or recompute for cached prefixes; `None`: load all.
    pub load_policy: Option<LoadPolicy>,
    /// Standard deviation of a step's work, relative.
    pub noise: f64,
    /// Seed of the noise and of the initial population.
    pub seed: u64,
}

impl Setup {
    /// Blocks of HBM that the model leaves: 90 % of the memory (vLLM's default), without the weights.
    pub fn hbm_blocks(hardware: &Hardware, model: &Model, accelerators: u32, tokens_per_block: u32) -> u64 {
        let usable = hardware.hbm_bytes / 10 * 9 * u64::from(accelerators);
        usable.saturating_sub(model.weight_bytes())
            / (model.kv_bytes_per_token() * u64::from(tokens_per_block))
    }
}

/// Measurements of a finished request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// Number of the request in the order of arrivals.
    pub number: u32,
    /// Nanoseconds from the begin of its first step to its first token.
    pub service_ttft: u64,
    /// Nanoseconds from its arrival to its first token.
    pub ttft: u64,
    /// Nanoseconds of the steps that decoded its tokens, in sum.
    pub decode: u64,
    /// Tokens that these steps decoded.
    pub decoded: u32,
    /// Time of its end.
    pub end: Nanos,
}

/// Measurements of a run after its warm-up.
#[derive(Clone, Debug, Default)]
pub struct Results {
    /// Finished requests, in the order of their ends.
    pub outcomes: Vec<Outcome>,
    /// Nanoseconds from the first step of each request to its first token, in the order of these tokens.
    pub service_ttfts: Vec<u64>,
    /// Nanoseconds of each step, the wait for its blocks included.
    pub steps: Vec<u64>,
    /// Nanoseconds that were measured.
    pub elapsed: u64,
    /// Number of generated tokens.
    pub tokens: u64,
    /// Blocks that were prefetched and arrived before their step.
    pub prefetch_hits: u64,
    /// Blocks that a step waited for.
    pub waited_blocks: u64,
    /// Preemptions for lack of HBM.
    pub preemptions: u64,
    /// Largest number of blocks in HBM, DRAM and NVMe.
    pub used_max: [u64; 3],
    /// Totals of the channels, in the order of [`ChannelKind::ALL`], from the start of the run.
    pub totals: [Totals; 9],
    /// Events of the whole run.
    pub events: u64,
}

/// Purpose of a job on channels.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    /// The step that runs.
    Step,
    /// Blocks of a group into HBM.
    Load(u32),
    /// First hop of a group, from NVMe; the second one follows.
    Stage(u32),
    /// First hop of a group of blocks to DRAM, ahead of time.
    StageAhead(u32),
    /// Cached prefix of a request.
    Prefix(u32),
    /// Cached prefix that the step waits for.
    BlockingPrefix,
    /// Bytes that move down.
    Demotion,
}

/// Blocks of one request that move together.
#[derive(Clone, Debug)]
pub(super) struct LoadGroup {
    pub(super) request: u32,
    pub(super) blocks: Vec<BlockId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Arrived, but not admitted.
    Arrived,
    /// Waits in the rotation.
    Waiting,
    /// Runs in the batch.
    Running,
    /// Has generated all tokens.
    Done,
}

/// State of a request.
#[derive(Clone, Debug)]
pub(super) struct Live {
    pub(super) spec: Request,
    pub(super) phase: Phase,
    pub(super) blocks: Vec<BlockId>,
    /// Tokens whose KV cache exists.
    pub(super) computed: u32,
    /// Number of generated tokens.
    pub(super) produced: u32,
    pub(super) turn_left: u32,
    /// Number of blocks in flight.
    pub(super) in_flight: u32,
    /// Blocks that were prefetched since the last turn.
    pub(super) prefetched: u32,
    /// Whether its blocks in HBM are pinned for its next turn.
    pub(super) is_held: bool,
    pub(super) first_step: Option<Nanos>,
    pub(super) first_token: Option<Nanos>,
    pub(super) decode: u64,
    pub(super) decoded: u32,
    /// Begin of the load of its cached prefix.
    pub(super) load_began: Nanos,
    /// Bytes of its cached prefix that its first step loads.
    pub(super) prefix_bytes: u64,
}

/// The engine, its tiers and its channels.
#[derive(Debug)]
pub struct Engine {
    pub(super) setup: Setup,
    pub(super) costs: Costs,
    pub(super) block_bytes: u64,
    pub(super) now: Nanos,
    pub(super) events: EventQueue<Event>,
    pub(super) fabric: Fabric<Purpose>,
    pub(super) tiers: Tiers,
    pub(super) requests: Vec<Live>,
    pub(super) arrived: VecDeque<u32>,
    pub(super) rotation: VecDeque<u32>,
    pub(super) batch: Vec<u32>,
    pub(super) admitted_blocks: u64,
    pub(super) groups: Vec<Option<LoadGroup>>,
    pub(super) is_loading: Vec<bool>,
    /// Tokens of each request of the batch in the step that runs.
    pub(super) scheduled: Vec<(u32, u32)>,
    pub(super) step_began: Option<Nanos>,
    /// Blocks that the next step waits for.
    pub(super) pending: u32,
    pub(super) is_computing: bool,
    pub(super) iteration: IterationTime,
    pub(super) plan: Plan,
    pub(super) random: Random,
    pub(super) results: Results,
    pub(super) prefix_loading: PrefixLoading,
    measured_from: Option<Nanos>,
    admission: Admission,
}

impl Engine {
    /// Creates an engine that will receive requests.
    pub fn new(setup: Setup, requests: &[Request]) -> Engine {
        let mut events = EventQueue::default();
        for (number, request) in (0..).zip(requests) {
            events.push(request.arrival, Event::Arrival(number));
        }
        Engine {
            costs: Costs::new(&setup.hardware, &setup.model, setup.accelerators),
            block_bytes: setup.model.kv_bytes_per_token() * u64::from(setup.tokens_per_block),
            fabric: Fabric::new(&setup.hardware, setup.accelerators),
            tiers: Tiers::new(setup.eviction, setup.capacity),
            random: Random::new(setup.seed ^ 0x1f2e),
            setup,
            now: Nanos(0),
            events,
            requests: requests.iter().map(|spec| Live::new(*spec)).collect(),
            arrived: VecDeque::new(),
            rotation: VecDeque::new(),
            batch: Vec::new(),
            admitted_blocks: 0,
            groups: Vec::new(),
            is_loading: Vec::new(),
            scheduled: Vec::new(),
            step_began: None,
            pending: 0,
            is_computing: false,
            iteration: IterationTime::default(),
            plan: Plan::default(),
            results: Results::default(),
            prefix_loading: PrefixLoading::default(),
            measured_from: None,
            admission: Admission::default(),
        }
    }

    /// Sets when requests are admitted.
    pub fn admitting(self, admission: Admission) -> Engine {
        Engine { admission, ..self }
    }

    /// Returns the engine with another time of loads.
    #[must_use]
    pub fn with_prefix_loading(self, prefix_loading: PrefixLoading) -> Engine {
        Engine { prefix_loading, ..self }
    }

    /// Fills the rotation with requests in the state of a system that has run for long, until the admission limit is
    /// reached. The other requests arrive from now on.
    ///
    /// In a rotation, a request is present in proportion to its output, and its progress is uniform. One in its first
    /// turn has computed nothing yet.
    pub fn populate(&mut self) {
        let mut waiting = Vec::new();
        while let Some((at, event)) = self.events.pop() {
            let Event::Arrival(number) = event else { continue };
            let live = &self.requests[number as usize];
            let (needed, output) = (self.blocks_at_most(live), u64::from(live.spec.output));
            if !waiting.is_empty() || self.admitted_blocks + needed > self.setup.admitted_blocks_max {
                waiting.push((at, number));
            } else if self.random.below(POPULATION_OUTPUT_MAX) < output {
                self.admitted_blocks += needed;
                self.put_into_rotation(number);
            }
        }
        let begin = waiting.first().map_or(Nanos(0), |(at, _)| *at);
        for (at, number) in waiting {
            let at = Nanos(at.since(begin));
            self.requests[number as usize].spec.arrival = at;
            self.events.push(at, Event::Arrival(number));
        }
        self.tiers.demoted = Demoted::default();
    }

    fn put_into_rotation(&mut self, number: u32) {
        let Request { prompt, output, .. } = self.requests[number as usize].spec;
        let turn = self.setup.turn.unwrap_or(1);
        let progress = self.random.below(u64::from(output)) as u32;
        self.rotation.push_back(number);
        let live = &mut self.requests[number as usize];
        (live.phase, live.turn_left) = (Phase::Waiting, 1 + progress % turn);
        if progress < turn {
            return;
        }
        let computed = prompt + progress - 1;
        (live.computed, live.produced, live.first_token) = (computed, progress, Some(self.now));
        for _ in 0..computed.div_ceil(self.setup.tokens_per_block) {
            self.tiers.make_room(1).expect("no block is in use");
            let block = self.tiers.create();
            self.tiers.unpin(block);
            self.requests[number as usize].blocks.push(block);
        }
    }

    /// Runs until all requests have ended, or for a number of steps, of which the first ones are not measured.
    pub fn run(mut self, steps: u64, warm_up: u64) -> Results {
        let (mut ended, mut done) = (Vec::new(), 0_u64);
        self.measured_from = (warm_up == 0).then_some(self.now);
        self.try_step();
        while done < steps
            && let Some((at, event)) = self.events.pop()
        {
            self.now = at;
            match event {
                Event::Arrival(number) => {
                    self.arrived.push_back(number);
                    // The end of the step that runs admits it otherwise.
                    if self.admission == Admission::AtOnce || self.step_began.is_none() {
                        self.admit();
                        self.try_step();
                    }
                }
                Event::Channel { kind, stamp } => {
                    self.fabric.due(&mut self.events, at, (kind, stamp), &mut ended);
                }
            }
            for purpose in ended.drain(..) {
                done += u64::from(self.job_ended(purpose));
                if done >= warm_up && self.measured_from.is_none() {
                    self.begin_measurement();
                }
            }
        }
        self.results.elapsed = self.now.since(self.measured_from.unwrap_or_default());
        self.results.used_max = self.tiers.used_max;
        self.results.totals = self.fabric.totals();
        self.results.events = self.events.taken();
        self.results
    }

    fn begin_measurement(&mut self) {
        self.measured_from = Some(self.now);
        self.results = Results::default();
    }

    /// Handles the end of a job; returns whether it was a step.
    fn job_ended(&mut self, purpose: Purpose) -> bool {
        match purpose {
            Purpose::Step => {
                self.end_step();
                self.admit();
                self.try_step();
                return true;
            }
            Purpose::Load(group) => self.group_arrived(group),
            Purpose::Stage(group) => self.load_into_hbm(group),
            Purpose::StageAhead(group) => self.staged_ahead(group),
            Purpose::Prefix(number) => self.prefix_arrived(number),
            Purpose::BlockingPrefix => self.blocking_prefix_arrived(),
            Purpose::Demotion => {}
        }
        false
    }

    /// Blocks of a request at its end.
    pub(super) fn blocks_at_most(&self, live: &Live) -> u64 {
        u64::from((live.spec.prompt + live.spec.output).div_ceil(self.setup.tokens_per_block))
    }

    /// Admits arrived requests in their order, as long as the limit permits.
    pub(super) fn admit(&mut self) {
        while let Some(number) = self.arrived.front().copied() {
            let needed = self.blocks_at_most(&self.requests[number as usize]);
            let is_first = self.admitted_blocks == 0;
            if !is_first && self.admitted_blocks + needed > self.setup.admitted_blocks_max {
                return;
            }
            if !self.load_prefix(number) {
                return;
            }
            self.admitted_blocks += needed;
            self.arrived.pop_front();
        }
    }

    /// Adds bytes that move down to their channels.
    pub(super) fn write_back(&mut self, demoted: Demoted) {
        if self.setup.transfers == Transfers::Free {
            return;
        }
        if demoted.to_dram > 0 {
            let bytes = demoted.to_dram * self.block_bytes;
            let legs = [(ChannelKind::LinkOut, bytes), (ChannelKind::Dram, bytes), (ChannelKind::Hbm, bytes)];
            self.fabric.start(&mut self.events, self.now, &legs, Purpose::Demotion);
        }
        if demoted.to_nvme > 0 {
            let bytes = demoted.to_nvme * self.block_bytes;
            let legs = [(ChannelKind::NvmeWrite, bytes), (ChannelKind::Dram, bytes)];
            self.fabric.start(&mut self.events, self.now, &legs, Purpose::Demotion);
        }
    }

    pub(super) fn place(&self, block: BlockId) -> Place {
        self.tiers.place(block)
    }
}

impl Live {
    fn new(spec: Request) -> Live {
        Live {
            spec,
            phase: Phase::Arrived,
            blocks: Vec::new(),
            computed: 0,
            produced: 0,
            turn_left: 0,
            in_flight: 0,
            prefetched: 0,
            is_held: false,
            first_step: None,
            first_token: None,
            decode: 0,
            decoded: 0,
            load_began: Nanos(0),
            prefix_bytes: 0,
        }
    }

    /// Tokens that must be computed before the next token is generated.
    pub(super) fn prefill_left(&self) -> u32 {
        // The last generated token has no KV cache yet, and a decode computes it.
        (self.spec.prompt + self.produced.saturating_sub(1)).saturating_sub(self.computed)
    }
}

impl Results {
    /// Milliseconds per generated token behind the first one, of each request that has one.
    pub fn tpot_ms(&self) -> Vec<f64> {
        let decoded = self.outcomes.iter().filter(|outcome| outcome.decoded > 0);
        decoded.map(|outcome| outcome.decode as f64 / f64::from(outcome.decoded) / 1e6).collect()
    }

    /// Milliseconds from the first step of each request to its first token.
    pub fn service_ttft_ms(&self) -> Vec<f64> {
        self.service_ttfts.iter().map(|nanos| *nanos as f64 / 1e6).collect()
    }

    /// Milliseconds from the arrival of each request to its first token.
    pub fn ttft_ms(&self) -> Vec<f64> {
        let arrived = self.outcomes.iter().filter(|outcome| outcome.ttft > 0);
        arrived.map(|outcome| outcome.ttft as f64 / 1e6).collect()
    }

    /// Generated tokens per second.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 * SECOND as f64 / self.elapsed.max(1) as f64
    }

    /// Share of the needed and absent blocks that a prefetch brought in time; zero if no block was absent.
    pub fn prefetch_hit_rate(&self) -> f64 {
        let needed = self.prefetch_hits + self.waited_blocks;
        if needed == 0 { 0.0 } else { self.prefetch_hits as f64 / needed as f64 }
    }

    /// Totals of a channel.
    pub fn channel(&self, kind: ChannelKind) -> Totals {
        self.totals[kind as usize]
    }
}
