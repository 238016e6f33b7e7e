//! Samples of all repetitions; [`super::figures`] evaluates them.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::engine::Answer;
use super::unmeasured::UnmeasuredLeg;
use reprise_testkit::bench::process_memory::ProcessMemory;
use reprise_testkit::bench::report::median;

/// Cache that engines use in addition to their own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum System {
    /// No cache: prompts are computed.
    Recompute,
    Reprise,
    /// vLLM's example connector, with one file per layer and prompt.
    Example,
    /// Mooncake with its memory in the engine's process.
    MooncakeSameHost,
    /// Mooncake with its memory in another process, over TCP.
    MooncakeTcp,
    /// LMCache's server in its own process.
    Lmcache,
}

/// Source of a prompt's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Leg {
    /// None: the prompt is not cached.
    Cold,
    /// The engine's own cache.
    OwnCache,
    /// The cache, with all prompts where they were saved.
    Hit,
    /// The node's NVMe.
    Nvme,
    /// Another node's DRAM.
    Peer,
    /// The cache, after a restart of engine and store.
    Restart,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Samples {
    /// Current repetition.
    pub(super) round: usize,
    /// Milliseconds to the first token: the median of the prompts of each repetition, by its number.
    #[serde(with = "pairs")]
    pub(super) times: BTreeMap<(System, Leg), BTreeMap<usize, f64>>,
    /// Share of the blocks from the expected source, of each repetition.
    #[serde(with = "pairs")]
    pub(super) found: BTreeMap<(System, Leg), Vec<f64>>,
    /// Ratio of the times of a miss with and without the connector, per pair.
    pub(super) misses: Vec<f64>,
    /// The same for back-to-back prompts, to the first and to the last token.
    pub(super) back_to_back_first: Vec<f64>,
    pub(super) back_to_back_last: Vec<f64>,
    /// Memory of engine and store of one node in bytes, of each repetition, and its peak since the warm-up.
    pub(super) held: BTreeMap<System, Vec<u64>>,
    pub(super) held_peak: BTreeMap<System, Vec<u64>>,
    /// Number of engine starts in all repetitions.
    pub(super) starts: BTreeMap<System, u32>,
    /// Seconds of a system's measurement, of each repetition.
    pub(super) turns: BTreeMap<System, Vec<f64>>,
    /// Answers of engines without a connector; computed and cached answers may differ because of floating
    /// point.
    pub(super) expected: BTreeMap<u64, BTreeSet<Vec<u32>>>,
    pub(super) answers: Vec<(System, u64, Vec<u32>)>,
    /// Errors of systems that were not measured completely, from the last such repetition.
    pub(super) failures: BTreeMap<System, String>,
    /// Time of the device for the bytes of a prompt, in milliseconds.
    pub(super) device_ms: Vec<f64>,
    /// Percentiles of the scheduler's calls and of a step's sum, of each repetition.
    pub(super) scheduler: BTreeMap<String, Vec<Percentiles>>,
}

/// 50th and 99th percentile of a call's times, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Percentiles {
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
}

/// Serializes maps whose keys are not strings as lists of pairs.
mod pairs {
    use std::collections::BTreeMap;

    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<K: Serialize, V: Serialize, S: Serializer>(
        map: &BTreeMap<K, V>,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(map)
    }

    pub(super) fn deserialize<'de, K, V, D>(deserializer: D) -> Result<BTreeMap<K, V>, D::Error>
    where
        K: Deserialize<'de> + Ord,
        V: Deserialize<'de>,
        D: Deserializer<'de>,
    {
        Ok(Vec::<(K, V)>::deserialize(deserializer)?.into_iter().collect())
    }
}

impl System {
    /// Returns the name in figures.
    pub(super) fn name(self) -> &'static str {
        match self {
            System::Recompute => "recompute",
            System::Reprise => "reprise",
            System::Example => "example",
            System::MooncakeSameHost => "mooncake_same_host",
            System::MooncakeTcp => "mooncake_tcp",
            System::Lmcache => "lmcache",
        }
    }

    /// Returns the displayed name.
    pub(super) fn words(self) -> &'static str {
        match self {
            System::Recompute => "recompute",
            System::Reprise => "Reprise",
            System::Example => "example connector",
            System::MooncakeSameHost => "Mooncake, same host",
            System::MooncakeTcp => "Mooncake over TCP",
            System::Lmcache => "LMCache multi-process",
        }
    }
}

impl Leg {
    /// Legs in which a prompt's KV comes from outside the engine.
    pub(super) const EXTERNAL: [Leg; 4] = [Leg::Hit, Leg::Nvme, Leg::Peer, Leg::Restart];

    pub(super) fn name(self) -> &'static str {
        match self {
            Leg::Cold => "cold",
            Leg::OwnCache => "own_cache",
            Leg::Hit => "dram",
            Leg::Nvme => "nvme",
            Leg::Peer => "peer",
            Leg::Restart => "restart",
        }
    }
}

impl Samples {
    pub(super) fn begin(&mut self, round: usize) {
        self.round = round;
    }

    /// Records answers to prompts; `found` is the share of their blocks from the expected source.
    pub(super) fn answered(&mut self, of: (System, Leg), seeds: &[u64], answers: &[Answer], found: f64) {
        let times = answers.iter().map(|answer| answer.ttft_ms).collect();
        self.times.entry(of).or_default().insert(self.round, median(times));
        self.found.entry(of).or_default().push(found);
        for (seed, answer) in seeds.iter().zip(answers) {
            match of.0 {
                System::Recompute => {
                    self.expected.entry(*seed).or_default().insert(answer.tokens.clone());
                }
                system => self.answers.push((system, *seed, answer.tokens.clone())),
            }
        }
    }

    /// Records uncached prompts, one after another.
    pub(super) fn missed(&mut self, seeds: &[u64], without: &[Answer], with: &[Answer]) {
        for ((seed, without), with) in seeds.iter().zip(without).zip(with) {
            self.misses.push(with.ttft_ms / without.ttft_ms);
            self.compared(*seed, without, with);
        }
    }

    /// Records uncached back-to-back prompts, during which the previous prompt may still be saved.
    pub(super) fn back_to_back(&mut self, seeds: &[u64], without: &[Answer], with: &[Answer]) {
        for ((seed, without), with) in seeds.iter().zip(without).zip(with) {
            self.back_to_back_first.push(with.ttft_ms / without.ttft_ms);
            self.back_to_back_last.push(with.ttlt_ms / without.ttlt_ms);
            self.compared(*seed, without, with);
        }
    }

    /// Records the answers to a prompt without and with the connector.
    fn compared(&mut self, seed: u64, without: &Answer, with: &Answer) {
        self.expected.entry(seed).or_default().insert(without.tokens.clone());
        self.answers.push((System::Reprise, seed, with.tokens.clone()));
    }

    pub(super) fn held(&mut self, system: System, held: ProcessMemory) {
        self.held.entry(system).or_default().push(held.now);
        self.held_peak.entry(system).or_default().push(held.peak);
    }

    /// Records starts of engines.
    pub(super) fn started(&mut self, system: System, engines: u32) {
        *self.starts.entry(system).or_default() += engines;
    }

    /// Records the seconds of a system's measurement.
    pub(super) fn took(&mut self, system: System, seconds: f64) {
        self.turns.entry(system).or_default().push(seconds);
    }

    /// Records that the measurement of a system failed.
    pub(super) fn failed(&mut self, system: System, error: String) {
        self.failures.insert(system, error);
    }

    /// Returns the unmeasured legs of these systems, with the reason.
    pub(super) fn unmeasured_legs(&self, systems: &[System]) -> Vec<UnmeasuredLeg> {
        let legs = systems.iter().flat_map(|system| Leg::EXTERNAL.map(|leg| (*system, leg)));
        legs.filter(|of| !self.times.contains_key(of))
            .map(|(system, leg)| {
                let why = system.lacks(leg).map(str::to_owned);
                let why = why.or_else(|| self.failures.get(&system).cloned()).unwrap_or_default();
                UnmeasuredLeg::new(system, leg, why)
            })
            .collect()
    }
}
