//! Facts that help to use the tiers: capacity in sequences, decoding from tiers, break-even intervals, bubbles.
//!
//! **Break-even.** Keeping a block for a second costs the price of its bytes. A use of the block saves the difference
//! of two access costs. So a block belongs on the dearer tier if it is used again within
//!
//! ```text
//! interval = (access cost on the cheaper tier − on the dearer tier) / (bytes · difference of prices a byte and second)
//! ```
//!
//! as in the five-minute rule (Gray and Putzolu 1987). Here an access costs the time of the accelerators that wait for
//! the block, and the time of the device. Recomputing is the cheapest tier: it keeps nothing, and costs most.

use super::configuration::Configuration;
use super::estimate::{Estimator, batch, layerwise, prefill};
use super::load::Shape;
use super::machine::SsdClass;
use crate::serving::profiles::GB;

/// Steps between two fetches of an offloaded block of a decoding request: one for each block of 16 tokens.
const STEPS_PER_FETCH: f64 = 16.0;

/// Shares of offloaded blocks.
const SHARES: [f64; 5] = [0.05, 0.2, 0.5, 0.8, 1.0];

/// Hit rates of the bubble curve, in percent.
const HITS: [f64; 14] = [0.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 87.5, 90.0, 93.75, 97.0, 99.0];

/// Sequences of median length that a tier of a node holds.
#[derive(Clone, Debug, PartialEq)]
pub struct TierSequences {
    /// Name of the tier.
    pub tier: String,
    /// Bytes for KV cache.
    pub bytes: u64,
    /// Number of sequences.
    pub sequences: u64,
}

/// Decode step with a share of the KV cache outside HBM.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodeOverhead {
    /// Tier from which blocks are fetched.
    pub tier: String,
    /// Share of the KV cache of running requests on the tier.
    pub share: f64,
    /// Additional time of a step, if each block is fetched once in 16 steps, as a part of the step.
    pub fetched_once: f64,
    /// The same, if all blocks are fetched for each step.
    pub fetched_always: f64,
}

/// Interval between uses below which a tier is cheaper than the next one.
#[derive(Clone, Debug, PartialEq)]
pub struct Interval {
    /// The dearer tier.
    pub tier: String,
    /// The cheaper one.
    pub instead_of: String,
    /// Break-even interval in seconds; infinite if the tier is always cheaper, zero if never.
    pub seconds: f64,
    /// Part of the repeated uses in the trace that come within the interval.
    pub of_reuse: f64,
}

/// Layer-wise load of a prompt of median length.
#[derive(Clone, Debug, PartialEq)]
pub struct Bubble {
    /// Part of the prompt that is cached, in percent.
    pub hit_percent: f64,
    /// Milliseconds of computation.
    pub compute_ms: f64,
    /// Milliseconds that the accelerators wait, for each tier of [`Guidance::bubble_tiers`].
    pub bubble_ms: Vec<f64>,
}

/// Facts about the tiers of a configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Guidance {
    /// Tokens of a sequence: the median of prompt and output.
    pub tokens: u64,
    /// Requests of a decode step.
    pub batch: u64,
    /// Milliseconds of a decode step with all blocks in HBM.
    pub step_ms: f64,
    /// Capacity by tier.
    pub sequences: Vec<TierSequences>,
    /// Decode overhead by tier and share.
    pub decode: Vec<DecodeOverhead>,
    /// Break-even intervals, from the fastest tier on.
    pub intervals: Vec<Interval>,
    /// Tiers of the bubble curve.
    pub bubble_tiers: Vec<String>,
    /// Bubble curve.
    pub bubbles: Vec<Bubble>,
}

/// Tier that a block can be kept on or fetched from.
#[derive(Clone, Debug)]
struct Tier {
    name: String,
    bytes_per_second: f64,
    latency: f64,
    usd_per_byte_second: f64,
    /// Price of a second of the device that an access occupies.
    usd_per_device_second: f64,
}

impl Guidance {
    /// Facts about a configuration. Without SSDs, those of the first class are shown as one that could be bought.
    pub fn new(estimator: &Estimator<'_>, chosen: &Configuration) -> Guidance {
        let (machine, load) = (estimator.machine, estimator.load);
        let tokens = load.tokens_median;
        let (class, count) =
            chosen.drives(machine).map_or((machine.ssds.first(), 1), |(class, count)| (Some(class), count));
        let tiers = tiers(estimator, class.map(|class| (class, count)));
        let batch = batch(machine, tokens);
        let decode = machine.costs.decode(u32::try_from(tokens).unwrap_or(u32::MAX));
        let step = machine.costs.seconds((0..batch).fold(machine.costs.weights(), |work, _| work + decode));
        Guidance {
            tokens,
            batch,
            step_ms: step * 1e3,
            sequences: sequences(estimator, chosen),
            decode: decode_overheads(estimator, &tiers, batch, step),
            intervals: intervals(estimator, &tiers),
            bubble_tiers: tiers.iter().map(|tier| tier.name.clone()).collect(),
            bubbles: HITS.iter().map(|percent| bubble(estimator, &tiers, *percent)).collect(),
        }
    }
}

fn tiers(estimator: &Estimator<'_>, ssds: Option<(&SsdClass, u32)>) -> Vec<Tier> {
    let hardware = &estimator.machine.hardware;
    let link = estimator.machine.link_bytes_per_second();
    let seconds = |nanos: u64| nanos as f64 * 1e-9;
    let per_byte_second = |usd_per_gb_hour: f64| usd_per_gb_hour / GB / 3_600.0;
    let mut tiers = vec![Tier {
        name: "DRAM".to_owned(),
        bytes_per_second: link,
        latency: seconds(hardware.link.latency_nanos),
        usd_per_byte_second: per_byte_second(hardware.dram_usd_per_gb_hour),
        usd_per_device_second: 0.0,
    }];
    tiers.extend(ssds.map(|(class, count)| Tier {
        name: format!("{count} × {} SSD", class.name),
        bytes_per_second: (class.read.bytes_per_second as f64 * f64::from(count)).min(link),
        latency: seconds(class.read.latency_nanos),
        usd_per_byte_second: per_byte_second(class.usd_per_gb_hour),
        usd_per_device_second: per_byte_second(class.usd_per_gb_hour) * class.bytes as f64 * f64::from(count),
    }));
    tiers.push(Tier {
        name: "cold store".to_owned(),
        bytes_per_second: (hardware.cold.bytes_per_second as f64).min(link),
        latency: seconds(hardware.cold.latency_nanos),
        usd_per_byte_second: per_byte_second(hardware.cold_usd_per_gb_hour),
        usd_per_device_second: 0.0,
    });
    tiers
}

fn sequences(estimator: &Estimator<'_>, chosen: &Configuration) -> Vec<TierSequences> {
    let machine = estimator.machine;
    let per_sequence = (estimator.load.tokens_median * machine.model.kv_bytes_per_token()).max(1);
    let tier = |tier: String, bytes: u64| TierSequences { tier, bytes, sequences: bytes / per_sequence };
    let mut all =
        vec![tier("HBM".to_owned(), machine.kv_bytes), tier("DRAM".to_owned(), chosen.dram_gb * GB as u64)];
    all.extend(
        chosen.drives(machine).map(|(class, count)| {
            tier(format!("{count} × {} SSD", class.name), class.bytes * u64::from(count))
        }),
    );
    all
}

fn decode_overheads(estimator: &Estimator<'_>, tiers: &[Tier], batch: u64, step: f64) -> Vec<DecodeOverhead> {
    let bytes = (batch * estimator.load.tokens_median * estimator.machine.model.kv_bytes_per_token()) as f64;
    let mut all = Vec::new();
    for tier in tiers.iter().take(tiers.len() - 1) {
        for share in SHARES {
            let transfer = bytes * share / tier.bytes_per_second;
            // Transfers run while the step computes, so only the longer one shows.
            let exposed = |transfer: f64| (transfer - step).max(0.0) / step;
            all.push(DecodeOverhead {
                tier: tier.name.clone(),
                share,
                fetched_once: exposed(transfer / STEPS_PER_FETCH),
                fetched_always: exposed(transfer),
            });
        }
    }
    all
}

/// Break-even intervals between neighbouring tiers, and between each of them and recomputation.
fn intervals(estimator: &Estimator<'_>, tiers: &[Tier]) -> Vec<Interval> {
    let (machine, load) = (estimator.machine, estimator.load);
    let bytes = estimator.block_bytes;
    let access = |tier: &Tier| {
        let seconds = tier.latency / blocks_of_median(estimator) + bytes / tier.bytes_per_second;
        seconds * (machine.usd_per_second() + tier.usd_per_device_second)
    };
    // A block in the middle of a median prompt.
    let context = (load.tokens_median / 2) as u32;
    let tokens = u32::try_from(load.block_tokens()).unwrap_or(u32::MAX);
    let compute = machine.costs.seconds(machine.costs.prefill(tokens, context)) * machine.usd_per_second();
    let interval = |tier: &Tier, instead_of: &str, cheaper: (f64, f64)| {
        let (saved, price) = (cheaper.0 - access(tier), tier.usd_per_byte_second - cheaper.1);
        let seconds = match (saved > 0.0, price > 0.0) {
            (true, true) => saved / (bytes * price),
            (true, false) => f64::INFINITY,
            (false, _) => 0.0,
        };
        Interval {
            tier: tier.name.clone(),
            instead_of: instead_of.to_owned(),
            seconds,
            of_reuse: load.reused_within(seconds),
        }
    };
    let pairs = tiers
        .windows(2)
        .map(|pair| interval(&pair[0], &pair[1].name, (access(&pair[1]), pair[1].usd_per_byte_second)));
    let computed = tiers.iter().map(|tier| interval(tier, "computing again", (compute, 0.0)));
    pairs.chain(computed).collect()
}

/// Blocks of a request of median length, which share the latency of a load.
fn blocks_of_median(estimator: &Estimator<'_>) -> f64 {
    (estimator.load.tokens_median as f64 / estimator.load.block_tokens() as f64).max(1.0)
}

fn bubble(estimator: &Estimator<'_>, tiers: &[Tier], hit_percent: f64) -> Bubble {
    let machine = estimator.machine;
    let input = u32::try_from(estimator.load.tokens_median).unwrap_or(u32::MAX).max(2);
    let cached = (f64::from(input) * hit_percent / 100.0).floor();
    let compute = prefill(machine, &Shape { input, output: 0, window: 0 }, cached);
    let bytes = cached * machine.model.kv_bytes_per_token() as f64;
    let wait = |tier: &Tier| {
        let load = if bytes > 0.0 { tier.latency + bytes / tier.bytes_per_second } else { 0.0 };
        (layerwise(compute, load, machine.model.layers) - compute) * 1e3
    };
    Bubble { hit_percent, compute_ms: compute * 1e3, bubble_ms: tiers.iter().map(wait).collect() }
}
