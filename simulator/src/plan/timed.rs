//! Replays of one configuration with time, with its nodes and tiers.
//!
//! Samples differ in the starts of sessions and in their nodes, and are the same for all configurations. So two
//! configurations are compared in pairs: [`Timed::difference`] has the interval of the mean difference.
//!
//! Sessions with ids of their own share no block, and stay on a node. So `m` of `n` nodes with the part `m / n` of the
//! sessions are replayed as they are: memory, tiers, steps and arrivals have their real sizes ([`Part`]). The part is as
//! large as the limit of references allows, and has some tens of sessions. If it is still too large, or blocks are shared,
//! the replay ends after the first requests of the trace.
//!
//! Nodes share the bandwidth of a cold store equally. Its bytes are those of the replayed part, and in proportion for all.

use std::borrow::Cow;

use reprise_policy::admission::AdmissionMode;
use reprise_policy::eviction::{Chains, EvictionPolicy};

use super::cold::ColdTraffic;
use super::configuration::Configuration;
use super::estimate::{Estimator, Hits, Utilisation};
use super::load::Load;
use crate::replay::{NodeSettings, Trace};
use crate::serving::fleet::{BATCH_MAX, FleetResults, FleetSetup, STEP_TOKENS_MAX, WAIT_BOUND, replay_timed};
use crate::serving::statistics::mean;

/// Sessions of a replay with time at least, if the trace has so many.
const SESSIONS_MIN: f64 = 32.0;

/// Quantiles of 97.5 % of Student's distribution with 1 to 10 degrees of freedom.
const STUDENT: [f64; 10] = [12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228];

/// Mean with the interval that contains it with a confidence of 95 %.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mean {
    /// Mean of the samples.
    pub mean: f64,
    /// Half of the width of the interval; infinite with one sample.
    pub half_width: f64,
}

/// Part of a trace that is replayed with time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Part {
    /// Nodes that are replayed.
    pub nodes: u32,
    /// Nodes of the configuration.
    pub of_nodes: u32,
    /// Sessions that are replayed.
    pub sessions: u32,
    /// Requests that are replayed.
    pub requests: u64,
    /// References to blocks that are replayed.
    pub references: u64,
    /// Part of the time of the trace that is replayed, from its begin on.
    pub of_time: f64,
}

/// Results of a replay with time, or means of several.
#[derive(Clone, Debug, PartialEq)]
pub struct Timed {
    /// Hits in any tier, of all references.
    pub hit_ratio: f64,
    /// Hits in the memory of accelerators.
    pub hbm_ratio: f64,
    /// Hits in DRAM, of the node and of peers.
    pub dram_ratio: f64,
    /// Hits on SSDs, of the node and of peers.
    pub ssd_ratio: f64,
    /// Hits in the cold store.
    pub cold_ratio: f64,
    /// Load of the nodes: closed formulas with the hits of the replay.
    pub utilisation: Utilisation,
    /// Bytes of the cold store, if there is one.
    pub cold: Option<ColdTraffic>,
    /// Times to the first token in seconds of all samples, ascending.
    pub ttft_seconds: Vec<f64>,
    /// Mean time to the first token of each sample, in their order.
    pub ttft_means: Vec<f64>,
    /// Median time of an output token in seconds.
    pub tpot_seconds: f64,
    /// Bytes written a day to each SSD of the node that writes most.
    pub ssd_bytes_per_day: Option<f64>,
    /// Years until these SSDs have their rated writes.
    pub ssd_years: Option<f64>,
    /// Part of the trace that was replayed.
    pub part: Part,
}

impl Timed {
    /// Replays a sample of the trace with time on a configuration.
    pub fn new(estimator: &Estimator<'_>, configuration: &Configuration, sample: usize) -> Timed {
        let load = estimator.load;
        let (part, trace) = Part::new(load, configuration.nodes, sample);
        let results = replay_timed(&setup(estimator, configuration, part.nodes), &trace);
        let counts = results.counts;
        let of = |blocks: u64| blocks as f64 / counts.references.max(1) as f64;
        let mut ttft_seconds: Vec<f64> = results.ttft_ns.iter().map(|ns| *ns as f64 * 1e-9).collect();
        ttft_seconds.sort_by(f64::total_cmp);
        let drives = configuration.drives(estimator.machine);
        let ssd_bytes_per_day = drives.map(|(_, count)| {
            // Replayed nodes have their part of the load.
            let written = of(results.nvme_written_max) * f64::from(part.nodes) / f64::from(part.of_nodes);
            written * load.references_per_second * estimator.block_bytes * 86_400.0 / f64::from(count)
        });
        let years = |(class, _): (&super::SsdClass, u32)| {
            ssd_bytes_per_day.map(|bytes| class.rated_bytes() / (bytes * 365.0).max(1.0))
        };
        let hits = Hits {
            hbm: of(counts.hits_hbm),
            dram: of(counts.hits_dram + counts.hits_peer_dram),
            ssd: of(counts.hits_nvme + counts.hits_peer_nvme),
            cold: of(counts.hits_cold),
        };
        let bytes = |blocks: u64, references: f64| of(blocks) * references * estimator.block_bytes;
        let per_day = load.references_per_second * 86_400.0;
        let cold = ColdTraffic {
            stored_bytes: bytes(counts.cold_written, load.references as f64),
            written_bytes_per_day: bytes(counts.cold_written, per_day),
            read_bytes_per_day: bytes(counts.hits_cold, per_day),
        };
        Timed {
            hit_ratio: of(counts.hits()),
            hbm_ratio: hits.hbm,
            dram_ratio: hits.dram,
            ssd_ratio: hits.ssd,
            cold_ratio: hits.cold,
            utilisation: estimator.utilisation(configuration, hits),
            cold: configuration.cold.then_some(cold),
            ttft_means: vec![mean(&ttft_seconds)],
            ttft_seconds,
            tpot_seconds: FleetResults::percentile(&results.tpot_ns, 0.5) as f64 * 1e-9,
            ssd_bytes_per_day,
            ssd_years: drives.and_then(years),
            part,
        }
    }

    /// Joins the results of samples of one configuration; `None` without a sample.
    pub fn joined(samples: &[Timed]) -> Option<Timed> {
        let mean_of = |of: fn(&Timed) -> f64| mean(&samples.iter().map(of).collect::<Vec<_>>());
        let mut ttft_seconds: Vec<f64> =
            samples.iter().flat_map(|one| one.ttft_seconds.iter().copied()).collect();
        ttft_seconds.sort_by(f64::total_cmp);
        let first = samples.first()?;
        Some(Timed {
            hit_ratio: mean_of(|one| one.hit_ratio),
            hbm_ratio: mean_of(|one| one.hbm_ratio),
            dram_ratio: mean_of(|one| one.dram_ratio),
            ssd_ratio: mean_of(|one| one.ssd_ratio),
            cold_ratio: mean_of(|one| one.cold_ratio),
            utilisation: Utilisation {
                busy: mean_of(|one| one.utilisation.busy),
                busy_peak: mean_of(|one| one.utilisation.busy_peak),
                served: mean_of(|one| one.utilisation.served),
            },
            cold: ColdTraffic::mean(&samples.iter().filter_map(|one| one.cold).collect::<Vec<_>>()),
            ttft_seconds,
            ttft_means: samples.iter().flat_map(|one| one.ttft_means.iter().copied()).collect(),
            tpot_seconds: mean_of(|one| one.tpot_seconds),
            ssd_bytes_per_day: first
                .ssd_bytes_per_day
                .map(|_| mean_of(|one| one.ssd_bytes_per_day.unwrap_or(0.0))),
            ssd_years: Timed::years_of(samples),
            part: first.part,
        })
    }

    /// Years until SSDs have their rated writes, from the mean writes of samples; `None` without SSDs.
    pub fn years_of(samples: &[Timed]) -> Option<f64> {
        // Writes are the reciprocal of the years.
        let writes: Option<Vec<f64>> =
            samples.iter().map(|one| one.ssd_years.map(|years| 1.0 / years)).collect();
        writes.filter(|writes| !writes.is_empty()).map(|writes| 1.0 / mean(&writes))
    }

    /// Price of an hour of a configuration: its nodes, and the cold store with the traffic of the replay.
    pub fn usd_per_hour(&self, estimator: &Estimator<'_>, configuration: &Configuration) -> f64 {
        let cold = self.cold.map_or(0.0, |cold| cold.usd_per_hour(estimator.machine, estimator.load));
        configuration.usd_per_hour(estimator.machine) + cold
    }

    /// Price of a million tokens of a configuration.
    pub fn usd_per_million_tokens(&self, estimator: &Estimator<'_>, configuration: &Configuration) -> f64 {
        let usd_per_hour = self.usd_per_hour(estimator, configuration);
        estimator.usd_per_million_tokens(usd_per_hour, self.utilisation.served)
    }

    /// Mean time to the first token in seconds: the mean of the samples.
    pub fn ttft_mean(&self) -> f64 {
        mean(&self.ttft_means)
    }

    /// Mean time to the first token in seconds with its interval.
    pub fn ttft_interval(&self) -> Mean {
        Mean::new(&self.ttft_means)
    }

    /// Mean time to the first token less that of another configuration, from the samples that both have.
    pub fn difference(&self, other: &Timed) -> Mean {
        let pairs = self.ttft_means.iter().zip(&other.ttft_means);
        Mean::new(&pairs.map(|(one, other)| one - other).collect::<Vec<_>>())
    }

    /// Time to the first token below which a share of the requests lies.
    pub fn ttft(&self, share: f64) -> f64 {
        let Some(last) = self.ttft_seconds.len().checked_sub(1) else { return 0.0 };
        self.ttft_seconds[(share * last as f64).round() as usize]
    }
}

impl Mean {
    /// Mean of some samples.
    pub fn new(samples: &[f64]) -> Mean {
        let (count, mean) = (samples.len() as f64, mean(samples));
        let Some(freedom) = samples.len().checked_sub(2) else {
            return Mean { mean, half_width: f64::INFINITY };
        };
        let squares: f64 = samples.iter().map(|sample| (sample - mean).powi(2)).sum();
        let quantile = STUDENT[freedom.min(STUDENT.len() - 1)];
        Mean { mean, half_width: quantile * (squares / (count - 1.0) / count).sqrt() }
    }

    /// Whether the interval has values of one sign only: the samples do not differ by chance.
    pub fn is_clear(&self) -> bool {
        self.mean.abs() > self.half_width
    }
}

impl Part {
    /// Selects the part of a load for some nodes, and returns it with its trace.
    pub fn new(load: &Load, of_nodes: u32, sample: usize) -> (Part, Cow<'_, Trace>) {
        let (whole, limit) = (load.sample(sample), load.limits.timed_references);
        let all = f64::from(of_nodes);
        let nodes = if whole.has_session_ids() && load.references > limit {
            let affordable = (all * limit as f64 / load.references as f64).floor();
            let least = (all * SESSIONS_MIN / f64::from(load.sessions.max(1))).ceil();
            affordable.max(least).clamp(1.0, all)
        } else {
            all
        };
        let mut trace = Cow::Borrowed(whole);
        if nodes < all {
            trace = Cow::Owned(whole.sampled(nodes / all, load.seed.wrapping_add(sample as u64)));
        }
        let span = trace.span_ms();
        // A little more than the limit is better than a part of the time.
        if trace.references() > limit.saturating_mul(2) {
            trace = Cow::Owned(trace.begin(limit.saturating_mul(2)));
        }
        let part = Part {
            nodes: nodes as u32,
            of_nodes,
            sessions: trace.sessions_used(),
            requests: trace.requests().len() as u64,
            references: trace.references(),
            of_time: if span > 0 { trace.span_ms() as f64 / span as f64 } else { 1.0 },
        };
        (part, trace)
    }

    /// Whether the whole trace is replayed, on all nodes.
    pub fn is_whole(&self) -> bool {
        self.nodes == self.of_nodes && self.of_time >= 1.0
    }
}

/// Setup of the replayed nodes.
fn setup(estimator: &Estimator<'_>, configuration: &Configuration, nodes: u32) -> FleetSetup {
    let (machine, load) = (estimator.machine, estimator.load);
    let blocks = |bytes: f64| (bytes / estimator.block_bytes) as u64;
    let mut hardware = machine.hardware.clone();
    let cold = &mut hardware.cold.bytes_per_second;
    *cold = (*cold / u64::from(configuration.nodes)).max(1);
    if let Some((class, count)) = configuration.drives(machine) {
        (hardware.nvme_read, hardware.nvme_write) = (class.read, class.write);
        hardware.nvme_read.bytes_per_second *= u64::from(count);
        hardware.nvme_write.bytes_per_second *= u64::from(count);
    }
    let tiers = NodeSettings {
        policy: EvictionPolicy { kind: configuration.policy, chains: Chains::DescendantsFirst },
        // A node without a cache has room for a block, which holds no prompt of several.
        dram_blocks: blocks(configuration.dram_gb as f64 * 1e9).max(1),
        nvme_blocks: blocks(configuration.ssd_bytes(machine) as f64),
        admission: if configuration.ssds.is_some() { configuration.admission } else { AdmissionMode::Always },
        block_bytes: estimator.block_bytes as u64,
        block_tokens: load.block_tokens(),
        tenants: 1,
    };
    FleetSetup {
        nodes: u16::try_from(nodes).unwrap_or(u16::MAX),
        hardware,
        model: machine.model.clone(),
        accelerators: machine.accelerators,
        tiers,
        load_policy: Some(WAIT_BOUND),
        reads_ahead: true,
        has_hbm_cache: true,
        has_cold_store: configuration.cold,
        time_scale: 1.0,
        batch_max: BATCH_MAX,
        step_tokens_max: STEP_TOKENS_MAX,
    }
}
