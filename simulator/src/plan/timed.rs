//! Replay of one configuration with time, with its nodes and tiers.
//!
//! A sample of a share `f` of the sessions keeps the load of each node: `n` nodes become `m = round(f · n)`, at least one,
//! and arrivals and sizes of tiers are scaled by `f · n / m`.

use reprise_policy::admission::AdmissionMode;
use reprise_policy::eviction::{Chains, EvictionPolicy};

use super::configuration::Configuration;
use super::estimate::Estimator;
use crate::replay::NodeSettings;
use crate::serving::fleet::{BATCH_MAX, FleetResults, FleetSetup, STEP_TOKENS_MAX, WAIT_BOUND, replay_timed};

/// Results of a replay with time.
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
    /// Times to the first token in seconds, ascending.
    pub ttft_seconds: Vec<f64>,
    /// Median time of an output token in seconds.
    pub tpot_seconds: f64,
    /// Bytes written a day to each SSD of the node that writes most.
    pub ssd_bytes_per_day: Option<f64>,
    /// Years until these SSDs have their rated writes.
    pub ssd_years: Option<f64>,
    /// Requests that exceed the memory of a node's accelerators.
    pub refused: u64,
    /// Nodes that were simulated.
    pub nodes: u16,
}

impl Timed {
    /// Replays the trace with time on a configuration, without its cold store.
    pub fn new(estimator: &Estimator<'_>, configuration: &Configuration) -> Timed {
        let load = estimator.load;
        let setup = setup(estimator, configuration);
        let results = replay_timed(&setup, &load.trace);
        let counts = results.counts;
        let of = |blocks: u64| blocks as f64 / counts.references.max(1) as f64;
        let mut ttft_seconds: Vec<f64> = results.ttft_ns.iter().map(|ns| *ns as f64 * 1e-9).collect();
        ttft_seconds.sort_by(f64::total_cmp);
        let drives = configuration.drives(estimator.machine);
        let ssd_bytes_per_day = drives.map(|(_, count)| {
            // The node that writes most serves its part of the load, and scaled tiers stand for whole ones.
            let part = of(results.nvme_written_max) * f64::from(setup.nodes) / f64::from(configuration.nodes);
            part * load.references_per_second * estimator.block_bytes * 86_400.0 / f64::from(count)
        });
        let years = |(class, _): (&super::SsdClass, u32)| {
            ssd_bytes_per_day.map(|bytes| class.rated_bytes() / (bytes * 365.0).max(1.0))
        };
        Timed {
            hit_ratio: of(counts.hits()),
            hbm_ratio: of(counts.hits_hbm),
            dram_ratio: of(counts.hits_dram + counts.hits_peer_dram),
            ssd_ratio: of(counts.hits_nvme + counts.hits_peer_nvme),
            ttft_seconds,
            tpot_seconds: FleetResults::percentile(&results.tpot_ns, 0.5) as f64 * 1e-9,
            ssd_bytes_per_day,
            ssd_years: drives.and_then(years),
            refused: results.refused,
            nodes: setup.nodes,
        }
    }

    /// Mean time to the first token in seconds.
    pub fn ttft_mean(&self) -> f64 {
        crate::serving::statistics::mean(&self.ttft_seconds)
    }

    /// Time to the first token below which a share of the requests lies.
    pub fn ttft(&self, share: f64) -> f64 {
        let Some(last) = self.ttft_seconds.len().checked_sub(1) else { return 0.0 };
        self.ttft_seconds[(share * last as f64).round() as usize]
    }
}

/// Setup of the simulated nodes.
fn setup(estimator: &Estimator<'_>, configuration: &Configuration) -> FleetSetup {
    let (machine, load) = (estimator.machine, estimator.load);
    let whole = f64::from(configuration.nodes) * load.share;
    let nodes = whole.round().max(1.0);
    let scale = whole / nodes;
    let blocks = |bytes: f64| (bytes * scale / estimator.block_bytes) as u64;
    let mut hardware = machine.hardware.clone();
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
        nodes: nodes as u16,
        hardware,
        model: machine.model.clone(),
        accelerators: machine.accelerators,
        tiers,
        load_policy: Some(WAIT_BOUND),
        reads_ahead: true,
        has_hbm_cache: true,
        time_scale: scale,
        batch_max: BATCH_MAX,
        step_tokens_max: STEP_TOKENS_MAX,
    }
}
