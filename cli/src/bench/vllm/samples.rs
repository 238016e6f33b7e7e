//! What was measured, repetition by repetition. What it says is in [`super::figures`].

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::super::report::median;
use super::super::resident::Held;
use super::absent::Absence;
use super::engine::Answer;

/// What engines keep their KV in besides their own memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum System {
    /// Nothing: prompts are computed.
    Recompute,
    Reprise,
    /// vLLM's example, a file a layer and prompt.
    Example,
    /// Mooncake with its memory in the engine's process.
    MooncakeSameHost,
    /// Mooncake with its memory in another process, over TCP.
    MooncakeTcp,
    /// LMCache's server in a process of its own.
    Lmcache,
}

/// Where a prompt's KV comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) enum Leg {
    /// Nowhere.
    Cold,
    /// The engine's own cache.
    OwnCache,
    /// The system, with everything where it was put.
    Hit,
    /// The node's NVMe.
    Nvme,
    /// Another node's DRAM.
    Peer,
    /// The system, after engine and store were started anew.
    Restart,
}

/// Everything that was measured.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Samples {
    /// The repetition that is measured.
    pub(super) round: usize,
    /// Milliseconds to the first token: the median of the prompts of each repetition, by its number.
    #[serde(with = "pairs")]
    pub(super) times: BTreeMap<(System, Leg), BTreeMap<usize, f64>>,
    /// Share of the blocks that came from where they were to come from, of each repetition.
    #[serde(with = "pairs")]
    pub(super) found: BTreeMap<(System, Leg), Vec<f64>>,
    /// Time of a miss with the connector over that without it, pair by pair.
    pub(super) misses: Vec<f64>,
    /// The same of prompts right behind others, to the first and to the last token.
    pub(super) back_to_back_first: Vec<f64>,
    pub(super) back_to_back_last: Vec<f64>,
    /// What engine and store of one node hold, in bytes, of each repetition; and the most that they have held since the warm-up.
    pub(super) held: BTreeMap<System, Vec<u64>>,
    pub(super) held_peak: BTreeMap<System, Vec<u64>>,
    /// Engines that were started, in all repetitions.
    pub(super) starts: BTreeMap<System, u32>,
    /// Seconds that a system's measurement took, of each repetition.
    pub(super) turns: BTreeMap<System, Vec<f64>>,
    /// What engines without a connector say, which may be one thing computed and another from their own cache: floating point.
    pub(super) expected: BTreeMap<u64, BTreeSet<Vec<u32>>>,
    pub(super) said: Vec<(System, u64, Vec<u32>)>,
    /// Why systems were not measured, or not to their end, in the words of the last repetition in which it was so.
    pub(super) failures: BTreeMap<System, String>,
    /// What the device takes for the bytes of a prompt, in milliseconds.
    pub(super) device_ms: Vec<f64>,
    /// Of what vLLM's scheduler waits for, by its calls and the sum of a step's: percentiles of each repetition.
    pub(super) scheduler: BTreeMap<String, Vec<Percentiles>>,
}

/// The middle and the slowest hundredth of a call's times, in milliseconds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Percentiles {
    pub(super) p50_ms: f64,
    pub(super) p99_ms: f64,
}

/// Maps whose keys are no texts, as JSON has them: lists of pairs.
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
    /// In names of figures.
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

    /// For people.
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
    /// Those in which a prompt's KV comes from outside the engine.
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
    /// From now on it is this repetition's.
    pub(super) fn begin(&mut self, round: usize) {
        self.round = round;
    }

    /// Notes answers to prompts; `found` is the share of their blocks that came from where they were to come from.
    pub(super) fn answered(&mut self, of: (System, Leg), seeds: &[u64], answers: &[Answer], found: f64) {
        let times = answers.iter().map(|answer| answer.ttft_ms).collect();
        self.times.entry(of).or_default().insert(self.round, median(times));
        self.found.entry(of).or_default().push(found);
        for (seed, answer) in seeds.iter().zip(answers) {
            match of.0 {
                System::Recompute => {
                    self.expected.entry(*seed).or_default().insert(answer.tokens.clone());
                }
                system => self.said.push((system, *seed, answer.tokens.clone())),
            }
        }
    }

    /// Notes prompts that neither had, one after the other.
    pub(super) fn missed(&mut self, seeds: &[u64], without: &[Answer], with: &[Answer]) {
        for ((seed, without), with) in seeds.iter().zip(without).zip(with) {
            self.misses.push(with.ttft_ms / without.ttft_ms);
            self.compared(*seed, without, with);
        }
    }

    /// Notes prompts that neither had, each right behind another one, of which something may still be saved.
    pub(super) fn back_to_back(&mut self, seeds: &[u64], without: &[Answer], with: &[Answer]) {
        for ((seed, without), with) in seeds.iter().zip(without).zip(with) {
            self.back_to_back_first.push(with.ttft_ms / without.ttft_ms);
            self.back_to_back_last.push(with.ttlt_ms / without.ttlt_ms);
            self.compared(*seed, without, with);
        }
    }

    /// Notes what an engine says of a prompt without and with the connector.
    fn compared(&mut self, seed: u64, without: &Answer, with: &Answer) {
        self.expected.entry(seed).or_default().insert(without.tokens.clone());
        self.said.push((System::Reprise, seed, with.tokens.clone()));
    }

    /// Notes memory that is held.
    pub(super) fn held(&mut self, system: System, held: Held) {
        self.held.entry(system).or_default().push(held.now);
        self.held_peak.entry(system).or_default().push(held.peak);
    }

    /// Notes engines that are started.
    pub(super) fn started(&mut self, system: System, engines: u32) {
        *self.starts.entry(system).or_default() += engines;
    }

    /// Notes the seconds that a system's measurement took.
    pub(super) fn took(&mut self, system: System, seconds: f64) {
        self.turns.entry(system).or_default().push(seconds);
    }

    /// Notes that a system was not measured to its end.
    pub(super) fn failed(&mut self, system: System, error: String) {
        self.failures.insert(system, error);
    }

    /// What there is no time for, of these systems, and why.
    pub(super) fn absences(&self, systems: &[System]) -> Vec<Absence> {
        let legs = systems.iter().flat_map(|system| Leg::EXTERNAL.map(|leg| (*system, leg)));
        legs.filter(|of| !self.times.contains_key(of))
            .map(|(system, leg)| {
                let why = system.lacks(leg).map(str::to_owned);
                let why = why.or_else(|| self.failures.get(&system).cloned()).unwrap_or_default();
                Absence::new(system, leg, why)
            })
            .collect()
    }
}
