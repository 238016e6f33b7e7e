//! Configurations that are compared, their sizes and their prices.

use reprise_policy::admission::AdmissionMode;
use reprise_policy::eviction::EvictionKind;

use super::curves::POLICIES;
use super::machine::{Machine, SsdClass};
use crate::serving::profiles::GB;

/// Numbers of nodes. Larger steps at larger numbers keep the relative step below a half.
const NODES: [u32; 22] = [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64, 96, 128, 192, 256];

/// DRAM of a node for blocks, in GB.
const DRAM_GB: [u64; 8] = [0, 32, 64, 128, 256, 512, 1_024, 2_048];

/// Numbers of SSDs in a node: a server has at most eight bays for each CPU socket.
const SSDS: [u32; 5] = [0, 1, 2, 4, 8];

/// SSDs of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ssds {
    /// Index of the class in [`Machine::ssds`].
    pub class: usize,
    /// Number of drives.
    pub count: u32,
}

/// Hardware and policy of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Configuration {
    /// Number of nodes.
    pub nodes: u32,
    /// DRAM for blocks in each node, in GB; 0: no cache.
    pub dram_gb: u64,
    /// SSDs of each node.
    pub ssds: Option<Ssds>,
    /// Whether a cold store keeps the blocks that leave the nodes.
    pub cold: bool,
    /// Policy of eviction.
    pub policy: EvictionKind,
    /// Admission to the SSDs.
    pub admission: AdmissionMode,
}

impl Configuration {
    /// All configurations whose nodes cost at most so much an hour, in a fixed order.
    ///
    /// Those with a cold store are last, so that the others are preferred where both are equal.
    pub fn all(machine: &Machine, usd_per_hour: f64) -> Vec<Configuration> {
        let mut all = Vec::new();
        let hardware: Vec<Configuration> =
            NODES.into_iter().flat_map(|nodes| Configuration::of_nodes(machine, nodes)).collect();
        for one in hardware {
            if one.usd_per_hour(machine) > usd_per_hour {
                continue;
            }
            all.extend(one.with_policies());
        }
        all.sort_by_key(|one| one.cold);
        all
    }

    /// The configuration without a cache, on some nodes.
    pub fn without_cache(nodes: u32) -> Configuration {
        let (policy, admission) = (EvictionKind::Lru, AdmissionMode::Always);
        Configuration { nodes, dram_gb: 0, ssds: None, cold: false, policy, admission }
    }

    fn of_nodes(machine: &Machine, nodes: u32) -> Vec<Configuration> {
        let plain = Configuration::without_cache(nodes);
        let mut all = vec![plain];
        // Blocks pass through DRAM, so there is no SSD and no cold store without it.
        for dram_gb in DRAM_GB.into_iter().filter(|gb| *gb > 0) {
            let sizes = SSDS.into_iter().flat_map(|count| {
                let classes = if count == 0 { 0..1 } else { 0..machine.ssds.len() };
                classes.map(move |class| (count > 0).then_some(Ssds { class, count }))
            });
            for ssds in sizes {
                all.extend([false, true].map(|cold| Configuration { dram_gb, ssds, cold, ..plain }));
            }
        }
        all
    }

    fn with_policies(self) -> Vec<Configuration> {
        if self.dram_gb == 0 {
            return vec![self];
        }
        let admissions: &[AdmissionMode] = match self.ssds {
            Some(_) => &[AdmissionMode::Always, AdmissionMode::SecondUse],
            None => &[AdmissionMode::Always],
        };
        POLICIES
            .into_iter()
            .flat_map(|policy| admissions.iter().map(move |admission| (policy, *admission)))
            .map(|(policy, admission)| Configuration { policy, admission, ..self })
            .collect()
    }

    /// Bytes of SSDs in a node.
    pub fn ssd_bytes(&self, machine: &Machine) -> u64 {
        self.ssds.map_or(0, |ssds| machine.ssds[ssds.class].bytes * u64::from(ssds.count))
    }

    /// SSD class of a node, and the number of drives.
    pub fn drives<'a>(&self, machine: &'a Machine) -> Option<(&'a SsdClass, u32)> {
        self.ssds.map(|ssds| (&machine.ssds[ssds.class], ssds.count))
    }

    /// Price of an hour of the nodes with their DRAM and SSDs. A cold store has its own price
    /// ([`ColdTraffic::usd_per_hour`](super::ColdTraffic::usd_per_hour)).
    pub fn usd_per_hour(&self, machine: &Machine) -> f64 {
        let hardware = &machine.hardware;
        let ssds = self
            .drives(machine)
            .map_or(0.0, |(class, count)| class.bytes as f64 / GB * f64::from(count) * class.usd_per_gb_hour);
        let node = hardware.usd_per_node_hour(machine.accelerators, self.dram_gb * GB as u64, 0) + ssds;
        f64::from(self.nodes) * node
    }

    /// Next larger size of DRAM.
    pub fn next_dram(&self) -> Option<Configuration> {
        let dram_gb = *DRAM_GB.iter().find(|gb| **gb > self.dram_gb)?;
        Some(Configuration { dram_gb, ..*self })
    }

    /// Next smaller size of DRAM that a cache can have.
    pub fn less_dram(&self) -> Option<Configuration> {
        let dram_gb = *DRAM_GB.iter().rev().find(|gb| **gb > 0 && **gb < self.dram_gb)?;
        Some(Configuration { dram_gb, ..*self })
    }

    /// Next larger number of SSDs in a node: of each class with more bytes than now, with each admission.
    pub fn next_ssds(&self, machine: &Machine) -> Vec<Configuration> {
        let now = self.ssds.map_or(0, |ssds| ssds.count);
        let Some(count) = SSDS.into_iter().find(|count| *count > now) else { return Vec::new() };
        let dram_gb = self.dram_gb.max(DRAM_GB[1]);
        let classes = (0..machine.ssds.len()).map(|class| Configuration {
            ssds: Some(Ssds { class, count }),
            dram_gb,
            ..*self
        });
        classes
            .filter(|one| one.ssd_bytes(machine) > self.ssd_bytes(machine))
            .flat_map(|one| {
                [AdmissionMode::Always, AdmissionMode::SecondUse]
                    .map(|admission| Configuration { admission, ..one })
            })
            .collect()
    }

    /// Next smaller number of SSDs in a node.
    pub fn less_ssds(&self) -> Option<Configuration> {
        let Ssds { class, count: now } = self.ssds?;
        let count = *SSDS.iter().rev().find(|count| **count < now)?;
        Some(Configuration { ssds: (count > 0).then_some(Ssds { class, count }), ..*self })
    }

    /// The configuration with one more node.
    pub fn next_node(&self) -> Configuration {
        Configuration { nodes: self.nodes + 1, ..*self }
    }

    /// The configuration with each larger number of nodes.
    pub(super) fn with_more_nodes(self) -> impl Iterator<Item = Configuration> {
        NODES
            .into_iter()
            .filter(move |nodes| *nodes > self.nodes)
            .map(move |nodes| Configuration { nodes, ..self })
    }

    /// Name of the hardware, without the policy.
    pub fn hardware_text(&self, machine: &Machine) -> String {
        let mut text = format!("{} × ({}", self.nodes, machine.title());
        if self.dram_gb > 0 {
            text += &format!(", {} GB DRAM", self.dram_gb);
        }
        if let Some((class, count)) = self.drives(machine) {
            text += &format!(", {count} × {} SSD {:.2} TB", class.name, class.bytes as f64 / 1e12);
        }
        text += ")";
        if self.cold {
            text += " and a cold store";
        }
        if self.dram_gb == 0 {
            text += " without a cache";
        }
        text
    }
}
