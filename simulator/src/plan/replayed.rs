//! Replay of one configuration with its nodes and tiers.

use reprise_policy::eviction::{Chains, EvictionPolicy};

use super::configuration::Configuration;
use super::estimate::Estimator;
use crate::replay::{Cluster, NodeSettings};

/// Result of a replay with nodes and tiers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Replayed {
    /// Hits in DRAM and on SSDs, of all references.
    pub hit_ratio: f64,
    /// Hits in DRAM, of the node and of peers.
    pub dram_ratio: f64,
    /// Hits on SSDs, of the node and of peers.
    pub ssd_ratio: f64,
    /// Hits at peers, which cross the network.
    pub peer_ratio: f64,
    /// Bytes written a day to each SSD of the node that writes most.
    pub ssd_bytes_per_day: Option<f64>,
    /// Years until these SSDs have their rated writes.
    pub ssd_years: Option<f64>,
}

/// Replays the trace on a configuration without its cold store.
pub fn replayed(estimator: &Estimator<'_>, configuration: &Configuration) -> Option<Replayed> {
    let nodes = u16::try_from(configuration.nodes).ok().filter(|_| configuration.dram_gb > 0)?;
    let load = estimator.load;
    let blocks = |bytes: f64| ((bytes * load.share / estimator.block_bytes) as u64).max(1);
    let nvme_bytes = configuration.ssd_bytes(estimator.machine);
    let settings = NodeSettings {
        policy: EvictionPolicy { kind: configuration.policy, chains: Chains::DescendantsFirst },
        dram_blocks: blocks(configuration.dram_gb as f64 * 1e9),
        nvme_blocks: if nvme_bytes > 0 { blocks(nvme_bytes as f64) } else { 0 },
        admission: configuration.admission,
        block_bytes: estimator.block_bytes as u64,
        block_tokens: load.block_tokens(),
        tenants: 1,
    };
    let replay = Cluster::new(nodes, settings).replay(&load.trace);
    let counts = replay.counts;
    let of = |blocks: u64| blocks as f64 / counts.references.max(1) as f64;
    let drives = configuration.drives(estimator.machine);
    // Writes of the replayed share take the place of those of all references.
    let per_day = |written: u64| of(written) * load.references_per_second * estimator.block_bytes * 86_400.0;
    let ssd_bytes_per_day = drives.map(|(_, count)| per_day(replay.nvme_written_max) / f64::from(count));
    let ssd_years = drives
        .zip(ssd_bytes_per_day)
        .map(|((class, _), bytes)| class.rated_bytes() / (bytes * 365.0).max(1.0));
    Some(Replayed {
        hit_ratio: of(counts.hits()),
        dram_ratio: of(counts.hits_dram + counts.hits_peer_dram),
        ssd_ratio: of(counts.hits_nvme + counts.hits_peer_nvme),
        peer_ratio: of(counts.hits_peer_dram + counts.hits_peer_nvme),
        ssd_bytes_per_day,
        ssd_years,
    })
}
