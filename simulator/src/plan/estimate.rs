//! Times, costs and wear of a configuration, by closed formulas.
//!
//! ```text
//! c    = computing the prompt's tokens that are not cached
//! l    = latency + the slowest of: cached bytes over the link, those on SSDs, at peers and in the cold store
//! t    = max(c + l / layers, l + c / layers)                     layers are loaded while earlier ones are computed
//! S    = t + outputs · decode step of a full batch · m           time of a node for a request
//! m    = tokens of the request / tokens of the accelerators' memory, at least 1 / batch
//! TTFT = t + λ · E[S²] / (2 · (1 − λ · E[S])) + b                Pollaczek and Khinchine, for each node and window
//! b    = work of earlier windows that is not done yet            as of a fluid
//! ```
//!
//! Blocks in HBM are cached without a load. Estimates that select candidates know none; after a replay, its hits of all
//! tiers give the load that the nodes bear ([`Estimator::utilisation`]).
//!
//! The load of a window is that of the trace in it, so the estimate has the queues of the busiest hours.
//!
//! Cached blocks are loaded only if that is faster than computing them, tier by tier, as `LoadPolicy` decides. A node is
//! overloaded if it is busy for more than [`BUSY_MAX`] of the time.

use reprise_policy::admission::AdmissionMode;

use super::cold::ColdTraffic;
use super::configuration::Configuration;
use super::curves::Curves;
use super::load::{Load, Shape};
use super::machine::Machine;

/// Requests of a decode step, if their KV cache fits.
pub(super) const BATCH_MAX: u64 = 64;

/// Part of the time that a node can be busy: behind it, queues grow with every burst.
pub const BUSY_MAX: f64 = 0.85;

/// Part of a channel's bandwidth that a plan uses at most.
const CHANNEL_MAX: f64 = 0.85;

/// Part of the time that a node is busy at most in the formula for the wait: more work is a backlog.
const STEADY_MAX: f64 = 0.95;

/// Seconds of a day.
const DAY: f64 = 86_400.0;

/// Reason why a configuration is not usable.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Unusable {
    /// SSDs reach their rated writes before their planned life.
    Wear,
    /// Reads and writes exceed the bandwidth of the SSDs.
    SsdBandwidth,
    /// Reads and writes exceed the bandwidth of the cold store.
    ColdBandwidth,
}

/// Results of a configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Estimate {
    /// Price of the cluster. That of a cold store is an upper bound until a replay has its traffic.
    pub usd_per_hour: f64,
    /// Hits in any tier, of all references.
    pub hit_ratio: f64,
    /// Hits in DRAM.
    pub dram_ratio: f64,
    /// Hits on SSDs.
    pub ssd_ratio: f64,
    /// Hits in the cold store.
    pub cold_ratio: f64,
    /// Part of the time that a node is busy.
    pub busy: f64,
    /// The same in the busiest window of the load; above 1, a backlog grows.
    pub busy_peak: f64,
    /// Part of the load that the cluster serves.
    pub served: f64,
    /// Requests a second of which nodes are always busy.
    pub requests_per_second_max: f64,
    /// Mean time to the first token in seconds, with the wait; `None` if nodes are overloaded.
    pub ttft_mean: Option<f64>,
    /// Mean time of a prompt alone, in seconds.
    pub alone_mean: f64,
    /// Price of a million tokens, of prompts and outputs, at the load of the trace.
    pub usd_per_million_tokens: f64,
    /// Bytes written to each SSD a day.
    pub ssd_bytes_per_day: Option<f64>,
    /// Years until an SSD has its rated writes.
    pub ssd_years: Option<f64>,
    /// Reason why the configuration is not usable.
    pub unusable: Option<Unusable>,
}

/// Load of the nodes of a configuration.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Utilisation {
    /// Part of the time that a node is busy.
    pub busy: f64,
    /// The same in the busiest window of the load; above 1, a backlog grows.
    pub busy_peak: f64,
    /// Part of the load that the cluster serves.
    pub served: f64,
}

/// Estimates configurations for a load.
#[derive(Debug)]
pub struct Estimator<'a> {
    /// Node and model.
    pub machine: &'a Machine,
    /// Load of the trace.
    pub load: &'a Load,
    /// Hits by policy and capacity.
    pub curves: &'a Curves,
    /// Years that SSDs must last.
    pub years: f64,
    /// Bytes of a block.
    pub block_bytes: f64,
    compute: Vec<f64>,
    /// Seconds of a node for the output of each request.
    decode: Vec<f64>,
}

/// Load of the nodes in a window.
#[derive(Clone, Copy, Debug, Default)]
struct Window {
    requests: f64,
    /// Sum of the times of a node for the requests, and of their squares.
    seconds: f64,
    squares: f64,
}

/// Blocks of a request by tier, or their part of all references, from the fastest on.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Hits {
    pub(super) hbm: f64,
    pub(super) dram: f64,
    pub(super) ssd: f64,
    pub(super) cold: f64,
}

impl Hits {
    fn all(self) -> f64 {
        self.hbm + self.dram + self.ssd + self.cold
    }

    fn times(self, factor: f64) -> Hits {
        let Hits { hbm, dram, ssd, cold } = self;
        Hits { hbm: hbm * factor, dram: dram * factor, ssd: ssd * factor, cold: cold * factor }
    }
}

/// Rates of the paths of a configuration, in bytes a second.
#[derive(Clone, Copy, Debug)]
struct Paths {
    link: f64,
    ssd: f64,
    cold: f64,
    network: f64,
    /// Part of the hits that peers have.
    peers: f64,
}

impl<'a> Estimator<'a> {
    /// Creates an estimator; SSDs must last some years.
    pub fn new(machine: &'a Machine, load: &'a Load, curves: &'a Curves, years: f64) -> Estimator<'a> {
        let block_bytes = (machine.model.kv_bytes_per_token() * load.block_tokens()) as f64;
        let batch = batch(machine, load.tokens_median);
        let context = u32::try_from(load.tokens_median).unwrap_or(u32::MAX);
        let decode = machine.costs.decode(context);
        let step = machine.costs.seconds((0..batch).fold(machine.costs.weights(), |work, _| work + decode));
        let memory = machine.memory_tokens().max(1) as f64;
        let decode = |shape: &Shape| {
            let part = (f64::from(shape.input) + f64::from(shape.output)) / memory;
            f64::from(shape.output) * step * part.clamp(1.0 / BATCH_MAX as f64, 1.0)
        };
        let compute = load.shapes.iter().map(|shape| prefill(machine, shape, 0.0)).collect();
        let decode = load.shapes.iter().map(decode).collect();
        Estimator { machine, load, curves, years, block_bytes, compute, decode }
    }

    /// Estimates the results of a configuration.
    pub fn estimate(&self, configuration: &Configuration) -> Estimate {
        let times = self.times(configuration);
        let alone_mean = times.iter().sum::<f64>() / times.len().max(1) as f64;
        let (Utilisation { busy, busy_peak, served }, wait, busy_mean) =
            self.load_of(&times, configuration.nodes);
        let ratios = self.ratios(configuration);
        let bytes_per_day = self.load.references_per_second * self.block_bytes * served * DAY;
        let cold = ColdTraffic {
            // All blocks of the trace leave the nodes at most.
            stored_bytes: self.load.distinct as f64 * self.block_bytes,
            written_bytes_per_day: bytes_per_day * (1.0 - ratios.all()),
            read_bytes_per_day: bytes_per_day * ratios.cold,
        };
        let cold_usd = if configuration.cold { cold.usd_per_hour(self.machine, self.load) } else { 0.0 };
        let usd_per_hour = configuration.usd_per_hour(self.machine) + cold_usd;
        let mut estimate = Estimate {
            usd_per_hour,
            hit_ratio: ratios.all(),
            dram_ratio: ratios.dram,
            ssd_ratio: ratios.ssd,
            cold_ratio: ratios.cold,
            busy,
            busy_peak,
            served,
            requests_per_second_max: f64::from(configuration.nodes) / busy_mean,
            ttft_mean: (busy <= BUSY_MAX).then_some(alone_mean + wait),
            alone_mean,
            usd_per_million_tokens: self.usd_per_million_tokens(usd_per_hour, served),
            ssd_bytes_per_day: None,
            ssd_years: None,
            unusable: None,
        };
        self.wear(configuration, &mut estimate);
        estimate
    }

    /// Load of the nodes if requests have these hits in all, by tier as parts of the references: those of a replay.
    ///
    /// Which requests hit is between the replay without time for the capacity of the configuration, and the one for an
    /// unlimited cache.
    pub(super) fn utilisation(&self, configuration: &Configuration, replayed: Hits) -> Utilisation {
        let (policy, blocks) = (configuration.policy, Some(self.capacities(configuration).1));
        let (mut limited, mut unlimited) = (Vec::new(), Vec::new());
        self.curves.hits(policy, blocks, &mut limited);
        self.curves.hits(policy, None, &mut unlimited);
        let (least, most) = (self.curves.ratio(policy, blocks), self.curves.unlimited_ratio());
        let all = replayed.all();
        let blocks_of = |at: usize| {
            let (low, high) = (f64::from(limited[at]), f64::from(unlimited[at]));
            match all < least {
                true => low * all / least,
                false if most > least => low + (high - low) * ((all - least) / (most - least)).min(1.0),
                false => low,
            }
        };
        let paths = self.paths(configuration);
        let of_hit = if all > 0.0 { replayed.times(1.0 / all) } else { Hits::default() };
        let time = |at: usize| self.time(at, of_hit.times(blocks_of(at)), &paths);
        let times: Vec<f64> = (0..self.load.shapes.len()).map(time).collect();
        self.load_of(&times, configuration.nodes).0
    }

    /// Price of a million tokens at the load of the trace, of which a part is served.
    pub(super) fn usd_per_million_tokens(&self, usd_per_hour: f64, served: f64) -> f64 {
        let (input, output) = self.load.tokens_mean;
        usd_per_hour / (self.load.requests_per_second * served * (input + output) * 3_600.0) * 1e6
    }

    /// Load of some nodes, the mean wait, and the mean time of a node for a request, from the times of the prompts.
    fn load_of(&self, times: &[f64], nodes: u32) -> (Utilisation, f64, f64) {
        let work: f64 = times.iter().zip(&self.decode).map(|(time, decode)| time + decode).sum();
        let busy_mean = work / times.len().max(1) as f64;
        let busy = self.load.requests_per_second / f64::from(nodes) * busy_mean;
        let (wait, busy_peak) = self.wait(times, f64::from(nodes));
        (Utilisation { busy, busy_peak, served: (BUSY_MAX / busy).min(1.0) }, wait, busy_mean)
    }

    /// Mean wait of requests, and the largest part of a window in which nodes are busy.
    fn wait(&self, times: &[f64], nodes: f64) -> (f64, f64) {
        let shapes = &self.load.shapes;
        let last = shapes.iter().map(|shape| shape.window).max().unwrap_or(0);
        let mut windows = vec![Window::default(); last as usize + 1];
        // Each request stands for so many on a node.
        let weight = self.load.requests as f64 / shapes.len().max(1) as f64 / nodes;
        for ((shape, time), decode) in shapes.iter().zip(times).zip(&self.decode) {
            let (window, seconds) = (&mut windows[shape.window as usize], time + decode);
            window.requests += weight;
            window.seconds += weight * seconds;
            window.squares += weight * seconds * seconds;
        }
        let length = self.load.window_seconds;
        let (mut backlog, mut waits, mut requests, mut peak) = (0.0, 0.0, 0.0, 0.0_f64);
        for window in windows {
            let busy = window.seconds / length;
            let before = backlog;
            backlog = f64::max(before + window.seconds - length, 0.0);
            let steady = window.squares / length / (2.0 * (1.0 - busy.min(STEADY_MAX)));
            waits += window.requests * (steady + f64::midpoint(before, backlog));
            requests += window.requests;
            peak = peak.max(busy);
        }
        (if requests > 0.0 { waits / requests } else { 0.0 }, peak)
    }

    /// Price of a million tokens at the largest load that nodes bear ([`BUSY_MAX`]); `None` if SSDs or the cold store
    /// do not bear it.
    pub fn usd_per_million_tokens_max(&self, configuration: &Configuration) -> Option<f64> {
        let mut estimate = self.estimate(configuration);
        let requests_per_second = estimate.requests_per_second_max * BUSY_MAX;
        estimate.served = requests_per_second / self.load.requests_per_second;
        estimate.unusable = None;
        self.wear(configuration, &mut estimate);
        let (input, output) = self.load.tokens_mean;
        let tokens_per_hour = requests_per_second * (input + output) * 3_600.0;
        estimate.unusable.is_none().then(|| estimate.usd_per_hour / tokens_per_hour * 1e6)
    }

    /// Hits by tier, of all references.
    fn ratios(&self, configuration: &Configuration) -> Hits {
        if configuration.dram_gb == 0 {
            return Hits::default();
        }
        let (dram, all, second_use) = self.capacities(configuration);
        let dram_ratio = self.curves.ratio(configuration.policy, Some(dram));
        let ssd = (self.curves.ratio(configuration.policy, Some(all)) - dram_ratio).max(0.0) * second_use;
        let cold = if configuration.cold {
            (self.curves.unlimited_ratio() - dram_ratio - ssd).max(0.0)
        } else {
            0.0
        };
        Hits { hbm: 0.0, dram: dram_ratio, ssd, cold }
    }

    /// Blocks of DRAM and of the largest tier of a cluster, and the part of the SSD's hits that admission leaves.
    fn capacities(&self, configuration: &Configuration) -> (f64, f64, f64) {
        let nodes = f64::from(configuration.nodes);
        let dram = configuration.dram_gb as f64 * 1e9 / self.block_bytes * nodes;
        let ssd = configuration.ssd_bytes(self.machine) as f64 / self.block_bytes * nodes;
        let second_use = match configuration.admission {
            AdmissionMode::Always => 1.0,
            _ => self.curves.second_use(dram).1,
        };
        (dram, dram.max(ssd), second_use)
    }

    /// Seconds of each request's prompt alone.
    fn times(&self, configuration: &Configuration) -> Vec<f64> {
        if configuration.dram_gb == 0 {
            return self.compute.clone();
        }
        let (dram, all, second_use) = self.capacities(configuration);
        let (mut in_dram, mut in_any, mut unlimited) = (Vec::new(), Vec::new(), Vec::new());
        self.curves.hits(configuration.policy, Some(dram), &mut in_dram);
        self.curves.hits(configuration.policy, Some(all), &mut in_any);
        self.curves.hits(configuration.policy, None, &mut unlimited);
        let paths = self.paths(configuration);
        let hits_of = |at: usize| {
            let dram = f64::from(in_dram[at]);
            let ssd = (f64::from(in_any[at]) - dram).max(0.0) * second_use;
            let cold =
                if configuration.cold { (f64::from(unlimited[at]) - dram - ssd).max(0.0) } else { 0.0 };
            Hits { hbm: 0.0, dram, ssd, cold }
        };
        (0..self.load.shapes.len()).map(|at| self.time(at, hits_of(at), &paths)).collect()
    }

    fn paths(&self, configuration: &Configuration) -> Paths {
        let hardware = &self.machine.hardware;
        let ssd = configuration
            .drives(self.machine)
            .map_or(1.0, |(class, count)| class.read.bytes_per_second as f64 * f64::from(count));
        let nodes = f64::from(configuration.nodes);
        Paths {
            link: self.machine.link_bytes_per_second(),
            ssd,
            cold: hardware.cold.bytes_per_second as f64,
            network: hardware.network.bytes_per_second as f64,
            // A session stays on its node, with its blocks; other requests are divided at random.
            peers: if self.load.has_session_ids() { 0.0 } else { (nodes - 1.0) / nodes },
        }
    }

    /// Shortest time of a prompt: with all tiers, or without the slower ones.
    fn time(&self, at: usize, hits: Hits, paths: &Paths) -> f64 {
        let in_hbm = hits.hbm * self.load.block_tokens() as f64;
        let mut best = match hits.hbm > 0.0 {
            true => prefill(self.machine, &self.load.shapes[at], in_hbm),
            false => self.compute[at],
        };
        let mut of = Hits { hbm: hits.hbm, ..Hits::default() };
        for (tier, blocks) in [hits.dram, hits.ssd, hits.cold].into_iter().enumerate() {
            if blocks <= 0.0 {
                continue;
            }
            match tier {
                0 => of.dram = blocks,
                1 => of.ssd = blocks,
                _ => of.cold = blocks,
            }
            best = best.min(self.loaded(at, of, paths));
        }
        best
    }

    fn loaded(&self, at: usize, hits: Hits, paths: &Paths) -> f64 {
        let hardware = &self.machine.hardware;
        let cached = hits.dram + hits.ssd + hits.cold;
        let tokens = hits.all() * self.load.block_tokens() as f64;
        let compute = prefill(self.machine, &self.load.shapes[at], tokens);
        let bytes = |blocks: f64| blocks * self.block_bytes;
        let latency = |blocks: f64, nanos: u64| if blocks > 0.0 { nanos as f64 * 1e-9 } else { 0.0 };
        let peers = bytes(hits.dram + hits.ssd) * paths.peers;
        let load = latency(cached, hardware.link.latency_nanos)
            + latency(hits.ssd, hardware.nvme_read.latency_nanos)
            + latency(hits.cold, hardware.cold.latency_nanos)
            + latency(peers, hardware.network.latency_nanos)
            + (bytes(cached) / paths.link)
                .max(bytes(hits.ssd) / paths.ssd)
                .max(bytes(hits.cold) / paths.cold)
                .max(peers / paths.network);
        layerwise(compute, load, self.machine.model.layers)
    }

    /// Fills in the writes of SSDs, and whether SSDs and cold store bear the load.
    fn wear(&self, configuration: &Configuration, estimate: &mut Estimate) {
        let bytes_per_second = self.load.references_per_second * self.block_bytes * estimate.served;
        let computed = bytes_per_second * (1.0 - estimate.hit_ratio);
        if configuration.cold {
            let moved = computed + bytes_per_second * estimate.cold_ratio;
            if moved > CHANNEL_MAX * self.machine.hardware.cold.bytes_per_second as f64 {
                estimate.unusable = Some(Unusable::ColdBandwidth);
            }
        }
        let Some((class, count)) = configuration.drives(self.machine) else { return };
        let drives = f64::from(count * configuration.nodes);
        let (dram, _, _) = self.capacities(configuration);
        let admitted = match configuration.admission {
            AdmissionMode::Always => 1.0,
            _ => self.curves.second_use(dram).0,
        };
        let written = computed * admitted / drives;
        let read = bytes_per_second * estimate.ssd_ratio / drives;
        let years = class.rated_bytes() / (written * DAY * 365.0).max(1.0);
        estimate.ssd_bytes_per_day = Some(written * DAY);
        estimate.ssd_years = Some(years);
        let busy = written / class.write.bytes_per_second as f64 + read / class.read.bytes_per_second as f64;
        if busy > CHANNEL_MAX {
            estimate.unusable = Some(Unusable::SsdBandwidth);
        } else if years < self.years {
            estimate.unusable = Some(Unusable::Wear);
        }
    }
}

/// Requests of a decode step: those whose KV cache fits in the memory of a node's accelerators.
pub(super) fn batch(machine: &Machine, tokens: u64) -> u64 {
    (machine.kv_bytes / (tokens * machine.model.kv_bytes_per_token()).max(1)).clamp(1, BATCH_MAX)
}

/// Seconds of a prompt of which the first tokens are cached; at least one token is computed.
pub(super) fn prefill(machine: &Machine, shape: &Shape, cached: f64) -> f64 {
    let cached = (cached as u32).min(shape.input - 1);
    let costs = &machine.costs;
    costs.seconds(costs.weights() + costs.prefill(shape.input - cached, cached))
}

/// Seconds until all layers are computed, if each is computed when it is loaded and the one before is computed.
///
/// Both take the same time for each layer, so the slower one is complete and the other one shows once.
pub(super) fn layerwise(compute: f64, load: f64, layers: u16) -> f64 {
    let layers = f64::from(layers.max(1));
    (compute + load / layers).max(load + compute / layers)
}
