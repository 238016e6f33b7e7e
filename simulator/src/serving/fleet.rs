//! A trace on a cluster with time: serving engines over the tiers of the replay.
//!
//! ```text
//!  trace ─▶ node of the session: waiting ─▶ admitted ─▶ load ─▶ prefill in chunks ─▶ decode ─▶ finished
//!                                              │          │            │
//!               tiers of all nodes, directory ─┘          │            └─▶ save: link, DRAM, NVMe
//!               (crate::replay, production policies)      └─▶ link, DRAM, NVMe, network, peer's DRAM and NVMe
//! ```
//!
//! Each node has a [`Server`] with its channels and its queue of events. The nodes share the directory and one order of
//! time: a heap has the next event of each node, and events of equal time are in the order of the nodes. So equal inputs
//! give equal results.
//!
//! **Steps are jumped over.** While a batch only decodes, all its steps until the next end of a request, arrival or load
//! are one event: their times are sums of a series ([`run`]). The work for a step does not grow with the batch.
//!
//! **Memory.** A request has 16 bytes of results. One that is admitted has its blocks in use, 4 bytes each and per tier.
//!
//! A cold store is the tier of the design, with bandwidth and latency of its profile: agents have none yet.
//!
//! Deliberately absent: blocks of the engine (memory of the accelerators is counted in tokens), saves of generated tokens,
//! and the time until a block that is being saved or loaded is readable for other requests.

mod admission;
mod hbm;
mod loads;
mod lookahead;
mod run;
mod server;
#[cfg(test)]
mod tests;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use reprise_policy::prefetch::Plan;
use reprise_policy::recompute::WaitBound;
use reprise_policy::session::Source as LoadSource;

use super::channel::Totals;
use super::costs::Costs;
use super::events::{Nanos, SECOND, nanos};
use super::fabric::{ChannelKind, FLOPS_PER_UNIT};
use super::profiles::{Hardware, Model};
use super::statistics::percentile;
use crate::replay::{Cluster, Counts, NodeSettings, Source, Trace};
use server::{Event, Server};

/// Largest number of requests that an engine runs at the same time: vLLM's default.
pub const BATCH_MAX: usize = 256;

/// Largest number of tokens in a step: vLLM's default for accelerators with at least 70 GB, here for all of them.
pub const STEP_TOKENS_MAX: u32 = 8_192;

/// Limit of the wait for loads, as the adapters of the engines configure it.
pub const WAIT_BOUND: WaitBound = WaitBound {
    cap: Duration::from_secs(1),
    base: Duration::from_millis(50),
    per_token: Duration::from_micros(100),
};

/// Cluster, engines and policies of a run.
#[derive(Clone, Debug)]
pub struct FleetSetup {
    /// Number of nodes; at least 1.
    pub nodes: u16,
    /// Hardware of each node.
    pub hardware: Hardware,
    /// Model of all engines.
    pub model: Model,
    /// Accelerators of each node, with tensor parallelism.
    pub accelerators: u32,
    /// DRAM, NVMe and the policies of each node.
    pub tiers: NodeSettings,
    /// Bound of the choice between load and computation; `None`: load all found blocks.
    pub load_policy: Option<WaitBound>,
    /// Whether blocks of waiting requests are read from NVMe into DRAM ahead of their loads.
    pub reads_ahead: bool,
    /// Whether the memory of accelerators keeps blocks of finished requests.
    pub has_hbm_cache: bool,
    /// Whether a cold store behind all nodes keeps the blocks that leave them. Each node has its own channel to it.
    pub has_cold_store: bool,
    /// Factor of the times between arrivals: 0.5 doubles the rate.
    pub time_scale: f64,
    /// Largest number of requests that an engine runs at the same time.
    pub batch_max: usize,
    /// Largest number of tokens in a step.
    pub step_tokens_max: u32,
}

/// Measurements of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FleetResults {
    /// Hits, evictions and writes in blocks, of all nodes.
    pub counts: Counts,
    /// Nanoseconds from arrival to first token, in the order of the first tokens.
    pub ttft_ns: Vec<u64>,
    /// Nanoseconds for each token behind the first one, of requests with at least two, in the order of their ends.
    pub tpot_ns: Vec<u64>,
    /// Nanoseconds from the first arrival to the last event.
    pub elapsed_ns: u64,
    /// Tokens of the prompts of finished requests.
    pub tokens_in: u64,
    /// Generated tokens.
    pub tokens_out: u64,
    /// Totals of the channels of all nodes, in the order of [`ChannelKind::ALL`].
    pub totals: [Totals; 9],
    /// Blocks that were written to NVMe by the node that wrote most.
    pub nvme_written_max: u64,
    /// Blocks that were found, but computed because that was expected to be faster.
    pub computed_hits: u64,
    /// Blocks that were read from NVMe into DRAM for waiting requests.
    pub read_ahead: u64,
    /// Loads that ended at the limit of their wait.
    pub stopped_loads: u64,
    /// Requests that are larger than the memory of the accelerators, and were not served.
    pub refused: u64,
    /// Requests that left a batch for lack of memory.
    pub preemptions: u64,
    /// Nodes of the run.
    pub nodes: u16,
    /// Steps of all engines.
    pub steps: u64,
    /// Events of the queues: steps that were jumped over are not among them.
    pub events: u64,
}

/// What all nodes have in common.
#[derive(Debug)]
struct Common<'a> {
    setup: &'a FleetSetup,
    trace: &'a Trace,
    costs: Costs,
    block_tokens: u64,
    block_bytes: u64,
}

/// Lists that calls reuse.
#[derive(Debug, Default)]
struct Scratch {
    chain: Vec<u32>,
    run: Vec<Source>,
    sources: Vec<LoadSource>,
}

#[derive(Debug)]
struct Fleet<'a> {
    common: Common<'a>,
    cluster: Cluster,
    servers: Vec<Server>,
    results: FleetResults,
    scratch: Scratch,
    plan: Plan,
    /// Next event of nodes; an entry is valid if it is the one that the node notes.
    order: BinaryHeap<Reverse<(Nanos, usize)>>,
    noted: Vec<Option<Nanos>>,
    now: Nanos,
    work: run::Totalled,
}

/// Serves a trace on a cluster.
pub fn replay_timed(setup: &FleetSetup, trace: &Trace) -> FleetResults {
    let mut fleet = Fleet::new(setup, trace);
    let begin_ms = trace.requests().first().map_or(0, |request| request.at_ms);
    for (number, request) in (0..).zip(trace.requests()) {
        let millis = (request.at_ms - begin_ms) as f64 * setup.time_scale;
        let at = Nanos((millis * 1e6).round() as u64);
        fleet.run_until(at);
        fleet.arrive(number, at);
    }
    fleet.run_until(Nanos(u64::MAX));
    fleet.finish()
}

impl FleetSetup {
    /// Tokens of KV cache that the memory of a node's accelerators holds: 90 % of it (vLLM's default), without the
    /// weights.
    pub fn hbm_tokens(&self) -> u64 {
        let usable = self.hardware.hbm_bytes / 10 * 9 * u64::from(self.accelerators);
        usable.saturating_sub(self.model.weight_bytes()) / self.model.kv_bytes_per_token().max(1)
    }

    /// Price of an hour of all nodes, with the DRAM of the tiers, and with all NVMe of the hardware if a tier is on it.
    pub fn usd_per_hour(&self) -> f64 {
        let dram = self.tiers.dram_blocks.saturating_mul(self.tiers.block_bytes);
        let nvme = if self.tiers.nvme_blocks > 0 { self.hardware.nvme_bytes } else { 0 };
        f64::from(self.nodes.max(1)) * self.hardware.usd_per_node_hour(self.accelerators, dram, nvme)
    }
}

impl FleetResults {
    /// Totals of a channel, of all nodes.
    pub fn channel(&self, kind: ChannelKind) -> Totals {
        self.totals[kind as usize]
    }

    /// Share of the time in which a channel was busy, mean of the nodes.
    pub fn utilisation(&self, kind: ChannelKind) -> f64 {
        let available = self.elapsed_ns as f64 * f64::from(self.nodes.max(1));
        if available > 0.0 { self.channel(kind).busy as f64 / available } else { 0.0 }
    }

    /// Price of a million tokens, prompts and outputs together, at a price of all nodes; `None` without tokens.
    pub fn usd_per_million_tokens(&self, usd_per_hour: f64) -> Option<f64> {
        let tokens = self.tokens_in + self.tokens_out;
        let usd = usd_per_hour * self.elapsed_ns as f64 / (3600.0 * SECOND as f64);
        (tokens > 0).then(|| usd * 1e6 / tokens as f64)
    }

    /// Value below which a share of the times lies, as [`percentile`] defines it, in whole nanoseconds.
    pub fn percentile(nanos: &[u64], share: f64) -> u64 {
        percentile(nanos, share).round() as u64
    }
}

impl<'a> Fleet<'a> {
    fn new(setup: &'a FleetSetup, trace: &'a Trace) -> Fleet<'a> {
        let nodes = usize::from(setup.nodes.max(1));
        let common = Common {
            setup,
            trace,
            costs: Costs::new(&setup.hardware, &setup.model, setup.accelerators),
            block_tokens: setup.tiers.block_tokens,
            block_bytes: setup.tiers.block_bytes,
        };
        let cluster = Cluster::new(setup.nodes, setup.tiers);
        Fleet {
            cluster: if setup.has_cold_store { cluster.with_cold_store() } else { cluster },
            servers: (0..nodes).map(|_| Server::new(setup)).collect(),
            common,
            results: FleetResults { nodes: setup.nodes.max(1), ..FleetResults::default() },
            scratch: Scratch::default(),
            plan: Plan::default(),
            order: BinaryHeap::new(),
            noted: vec![None; nodes],
            now: Nanos(0),
            work: run::Totalled::default(),
        }
    }

    /// Handles all events before a time.
    fn run_until(&mut self, until: Nanos) {
        while let Some(Reverse((at, node))) = self.order.peek().copied() {
            if at >= until {
                return;
            }
            self.order.pop();
            if self.noted[node] != Some(at) {
                continue;
            }
            self.noted[node] = None;
            // Most events of a node are followed by others of the same time: no detour over the heap.
            while self.servers[node].events.next_at() == Some(at) {
                self.handle_next(node);
            }
            self.note(node);
        }
    }

    /// Puts the next event of a node into the order of all nodes.
    fn note(&mut self, node: usize) {
        let Some(next) = self.servers[node].events.next_at() else { return };
        if self.noted[node].is_none_or(|noted| next < noted) {
            self.noted[node] = Some(next);
            self.order.push(Reverse((next, node)));
        }
    }

    fn handle_next(&mut self, node: usize) {
        let Some((at, event)) = self.servers[node].events.pop() else { return };
        self.now = at;
        match event {
            Event::StepEnd(stamp) => {
                if self.servers[node].run.as_ref().is_some_and(|run| run.stamp == stamp) {
                    self.end_run(node);
                }
            }
            Event::WaitLimit { place, number } => self.reach_wait_limit(node, place, number),
            Event::Channel { kind, stamp } => {
                let server = &mut self.servers[node];
                let mut ended = std::mem::take(&mut server.ended);
                server.fabric.due(&mut server.events, at, (kind, stamp), &mut ended);
                for purpose in ended.drain(..) {
                    self.transfer_ended(node, purpose);
                }
                self.servers[node].ended = ended;
            }
        }
    }

    fn finish(mut self) -> FleetResults {
        let replay = self.cluster.results();
        self.results.counts = replay.counts;
        self.results.nvme_written_max = replay.nvme_written_max;
        self.results.elapsed_ns = self.now.0;
        for server in &self.servers {
            self.results.events += server.events.taken();
            for (total, of_node) in self.results.totals.iter_mut().zip(server.fabric.totals()) {
                total.bytes += of_node.bytes;
                total.transfers += of_node.transfers;
                total.busy += of_node.busy;
                total.requested += of_node.requested;
            }
        }
        let costs = &self.common.costs;
        let of_steps = [
            (
                ChannelKind::Compute,
                self.work.flops / FLOPS_PER_UNIT,
                self.work.flops / costs.flops_per_second,
            ),
            (ChannelKind::Hbm, self.work.bytes, self.work.bytes / costs.bytes_per_second),
        ];
        for (kind, amount, busy) in of_steps {
            let (amount, busy) = (amount as u64, nanos(busy));
            let transfers = self.results.steps;
            self.results.totals[kind as usize] = Totals { bytes: amount, requested: amount, transfers, busy };
        }
        self.results
    }
}
