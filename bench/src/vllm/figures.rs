//! Figures from samples: medians, ratios per repetition, spreads, and whether goals are met.

use std::collections::BTreeSet;

use super::samples::{Leg, Percentiles, Samples, System};
use reprise_testkit::bench::report::{Figure, Paired, Spread, Target, median};

/// Minimum number of pairs for the goal of the overhead of misses.
const PAIRS_MIN: usize = 20;

/// Goal for the connector's cost for a prompt that is not cached.
const MISS_OVERHEAD_MAX: f64 = 0.01;

/// Goal relative to Mooncake's time on the same host.
const DRAM_RATIO_MAX: f64 = 1.0;

/// Goal relative to Mooncake's time over TCP.
const PEER_RATIO_MAX: f64 = 0.5;

/// Goal relative to Reprise's own time from DRAM.
const NVME_RATIO_MAX: f64 = 2.0;

/// Goal relative to the device's time for the bytes.
const DEVICE_RATIO_MAX: f64 = 1.2;

/// Goal for the wait of the scheduler's process in a step with a request of 1,024 blocks.
const SCHEDULER_P99_MS_MAX: f64 = 1.0;

impl Samples {
    pub(super) fn figures(&self) -> Vec<Figure> {
        let mut figures: Vec<Figure> =
            self.times.keys().filter_map(|(system, leg)| self.time(*system, *leg)).collect();
        figures.extend(self.found.iter().filter(|((_, leg), _)| Leg::EXTERNAL.contains(leg)).map(
            |((system, leg), found)| {
                let name = format!("vllm.{}.{}.found", system.name(), leg.name());
                let target = if *system == System::Reprise { Target::AtLeast(1.0) } else { Target::None };
                of_samples(name, found, "share of blocks", target)
            },
        ));
        let overheads = [
            ("miss_overhead", &self.misses),
            ("back_to_back_ttft_overhead", &self.back_to_back_first),
            ("back_to_back_overhead", &self.back_to_back_last),
        ];
        figures.extend(overheads.into_iter().filter_map(|(name, ratios)| overhead(name, ratios)));
        for (call, of_rounds) in &self.scheduler {
            figures.extend(scheduler_figures(call, of_rounds));
        }
        for (name, of_systems) in [("memory_held", &self.held), ("memory_peak", &self.held_peak)] {
            figures.extend(of_systems.iter().map(|(system, held)| {
                let mib: Vec<f64> = held.iter().map(|bytes| *bytes as f64 / f64::from(1 << 20)).collect();
                of_samples(format!("vllm.{}.{name}", system.name()), &mib, "MiB", Target::None)
            }));
        }
        figures.extend(self.turns.iter().map(|(system, seconds)| {
            of_samples(format!("vllm.{}.turn", system.name()), seconds, "s", Target::None)
        }));
        figures.extend(self.starts.iter().map(|(system, starts)| {
            let name = format!("vllm.{}.engine_starts", system.name());
            Figure::absolute(name, f64::from(*starts), "engines", Target::None)
        }));
        let systems: BTreeSet<System> = self.answers.iter().map(|(system, _, _)| *system).collect();
        figures.extend(systems.into_iter().map(|system| self.same_answers(system)));
        figures
    }

    /// Returns the time of a leg and its spread.
    fn time(&self, system: System, leg: Leg) -> Option<Figure> {
        let times: Vec<f64> = self.times.get(&(system, leg))?.values().copied().collect();
        Some(Figure { spread: Spread::of(&times), ..self.median_time(system, leg)? })
    }

    /// Returns the median of a leg, compared with the goal's reference if it was measured, else with the
    /// recompute.
    fn median_time(&self, system: System, leg: Leg) -> Option<Figure> {
        let name = format!("vllm.{}.{}", system.name(), leg.name());
        if system == System::Recompute {
            return Some(Figure::absolute(name, self.median_of((system, leg))?, "ms", Target::None));
        }
        let own = (system, leg);
        if own == (System::Reprise, Leg::Nvme) {
            return self.nvme(name);
        }
        let (reference, target) = match own {
            (System::Reprise, Leg::Hit) => {
                ((System::MooncakeSameHost, Leg::Hit), Target::RatioAtMost(DRAM_RATIO_MAX))
            }
            (System::Reprise, Leg::Peer) => {
                ((System::MooncakeTcp, Leg::Hit), Target::RatioAtMost(PEER_RATIO_MAX))
            }
            _ => ((System::Recompute, Leg::Cold), Target::None),
        };
        let against = |reference, target| {
            let (system, _): (System, Leg) = reference;
            let paired = self.paired(own, reference)?;
            Some(Figure::relative(name.clone(), paired, "ms", (system.words(), target)))
        };
        against(reference, target).or_else(|| against((System::Recompute, Leg::Cold), Target::None))
    }

    /// Returns the figure of loads from NVMe; the goal is twice the own time from DRAM, or the device's time.
    fn nvme(&self, name: String) -> Option<Figure> {
        let paired = self.paired((System::Reprise, Leg::Nvme), (System::Reprise, Leg::Hit))?;
        let device = median(self.device_ms.clone());
        let mut figure =
            Figure::relative(name, paired, "ms", ("Reprise's own DRAM", Target::RatioAtMost(NVME_RATIO_MAX)));
        let on_floor = paired.subject <= device * DEVICE_RATIO_MAX;
        figure.met = Some(paired.ratio <= NVME_RATIO_MAX || on_floor);
        figure.target = Some(format!(
            "ratio <= {NVME_RATIO_MAX}, or <= {DEVICE_RATIO_MAX} x {device:.1} ms, the device's own time"
        ));
        Some(figure)
    }

    /// Returns the medians of two legs, and the median of their ratios per repetition.
    fn paired(&self, subject: (System, Leg), reference: (System, Leg)) -> Option<Paired> {
        let references = self.times.get(&reference)?;
        let both =
            self.times.get(&subject)?.iter().filter_map(|(round, time)| Some((time, references.get(round)?)));
        let ratios: Vec<f64> = both.map(|(subject, reference)| subject / reference).collect();
        Some(Paired {
            reference: self.median_of(reference)?,
            subject: self.median_of(subject)?,
            ratio: median(ratios),
        })
    }

    fn median_of(&self, of: (System, Leg)) -> Option<f64> {
        Some(median(self.times.get(&of)?.values().copied().collect()))
    }

    /// Returns the share of answers equal to those of an engine without a connector.
    fn same_answers(&self, system: System) -> Figure {
        let answers: Vec<_> = self.answers.iter().filter(|(of, _, _)| *of == system).collect();
        let same = answers.iter().filter(|(_, seed, tokens)| {
            self.expected.get(seed).is_some_and(|expected| expected.contains(tokens))
        });
        let share = same.count() as f64 / answers.len() as f64;
        let target = if system == System::Reprise { Target::AtLeast(1.0) } else { Target::None };
        Figure::absolute(format!("vllm.{}.same_answers", system.name()), share, "share of answers", target)
    }
}

/// Returns the connector's cost for prompts that are not cached: the ratio of the times with and without it,
/// per pair.
fn overhead(name: &str, ratios: &[f64]) -> Option<Figure> {
    if ratios.is_empty() {
        return None;
    }
    let overhead = median(ratios.to_vec()) - 1.0;
    let (low, high) = confidence(ratios.to_vec());
    let name = format!("vllm.reprise.{name}");
    let mut figure = Figure::absolute(name, overhead * 100.0, "%", Target::None);
    figure.target = Some(format!(
        "<= 1 %, or within noise over at least {PAIRS_MIN} pairs; of {} pairs 95 % of {:.1} to {:.1} %",
        ratios.len(),
        (low - 1.0) * 100.0,
        (high - 1.0) * 100.0
    ));
    let enough = ratios.len() >= PAIRS_MIN;
    figure.met = enough.then_some(overhead <= MISS_OVERHEAD_MAX || low <= 1.0);
    let percent: Vec<f64> = ratios.iter().map(|ratio| (ratio - 1.0) * 100.0).collect();
    figure.spread = Spread::of(&percent);
    Some(figure)
}

/// Returns the figures of one of the scheduler's calls, or of the sum of a step's calls.
fn scheduler_figures(call: &str, of_rounds: &[Percentiles]) -> [Figure; 2] {
    let figure = |percentile: &str, value: fn(&Percentiles) -> f64, target| {
        let name = format!("vllm.reprise.scheduler_1024_blocks.{call}.{percentile}");
        let values: Vec<f64> = of_rounds.iter().map(value).collect();
        of_samples(name, &values, "ms", target)
    };
    [
        figure("p50", |times| times.p50_ms, Target::None),
        figure("p99", |times| times.p99_ms, Target::AtMost(SCHEDULER_P99_MS_MAX)),
    ]
}

/// Returns the median of samples and its spread.
fn of_samples(name: String, samples: &[f64], unit: &'static str, target: Target) -> Figure {
    let figure = Figure::absolute(name, median(samples.to_vec()), unit, target);
    Figure { spread: Spread::of(samples), ..figure }
}

/// Returns the 95 % confidence interval of the median: order statistics by the normal approximation of the
/// binomial distribution.
fn confidence(mut values: Vec<f64>) -> (f64, f64) {
    values.sort_by(f64::total_cmp);
    let count = values.len() as f64;
    let reach = 1.96 * count.sqrt() / 2.0;
    let last = values.len() - 1;
    let low = ((count / 2.0 - reach).floor().max(0.0) as usize).min(last);
    let high = ((count / 2.0 + reach).ceil() as usize).min(last);
    (values[low], values[high])
}

#[cfg(test)]
mod tests {
    use super::super::engine::Answer;
    use super::*;
    use reprise_testkit::bench::process_memory::ProcessMemory;

    fn answer(ttft_ms: f64, tokens: &[u32]) -> Answer {
        Answer { ttft_ms, ttlt_ms: 2.0 * ttft_ms, tokens: tokens.to_vec(), cached: 0 }
    }

    fn times(samples: &mut Samples, of: (System, Leg), times: &[f64]) {
        for (round, time) in times.iter().enumerate() {
            samples.begin(round);
            samples.answered(of, &[1], &[answer(*time, &[7])], 1.0);
        }
    }

    fn figure(samples: &Samples, name: &str) -> Figure {
        let figures = samples.figures();
        let found = figures.iter().find(|figure| figure.name == name);
        found.unwrap_or_else(|| panic!("{name} is not among {figures:?}")).clone()
    }

    #[test]
    fn repetition_counts_with_its_median_and_ratios_are_per_repetition() {
        let mut samples = Samples::default();
        times(&mut samples, (System::MooncakeSameHost, Leg::Hit), &[10.0, 20.0]);
        samples.begin(2);
        let prompts = [answer(9.0, &[1]), answer(1.0, &[1]), answer(4.0, &[1])];
        samples.answered((System::MooncakeSameHost, Leg::Hit), &[1, 2, 3], &prompts, 1.0);
        times(&mut samples, (System::Reprise, Leg::Hit), &[10.0, 30.0, 2.0]);
        let dram = figure(&samples, "vllm.reprise.dram");
        assert_eq!((dram.value, dram.reference_value, dram.ratio), (10.0, Some(10.0), Some(1.0)));
        assert_eq!((dram.met, dram.reference.as_deref()), (Some(true), Some("Mooncake, same host")));
    }

    #[test]
    fn repetition_missing_for_a_peer_is_not_part_of_the_ratio() {
        let mut samples = Samples::default();
        samples.begin(1);
        samples.answered((System::MooncakeTcp, Leg::Hit), &[1], &[answer(100.0, &[7])], 1.0);
        times(&mut samples, (System::Reprise, Leg::Peer), &[90.0, 20.0]);
        assert_eq!(figure(&samples, "vllm.reprise.peer").ratio, Some(0.2));
    }

    #[test]
    fn without_the_peer_of_a_goal_the_reference_is_the_recompute_and_the_goal_is_not_judged() {
        let mut samples = Samples::default();
        times(&mut samples, (System::Recompute, Leg::Cold), &[100.0]);
        times(&mut samples, (System::Reprise, Leg::Peer), &[25.0]);
        let peer = figure(&samples, "vllm.reprise.peer");
        assert_eq!((peer.ratio, peer.met, peer.reference.as_deref()), (Some(0.25), None, Some("recompute")));
    }

    #[test]
    fn goal_of_loads_from_a_peer_is_half_of_mooncakes_time_over_tcp() {
        let mut samples = Samples::default();
        times(&mut samples, (System::MooncakeTcp, Leg::Hit), &[100.0]);
        times(&mut samples, (System::Reprise, Leg::Peer), &[51.0]);
        assert_eq!(figure(&samples, "vllm.reprise.peer").met, Some(false));
    }

    #[test]
    fn goal_of_nvme_is_twice_dram_or_the_time_of_the_device() {
        let met = |nvme: f64, device: f64| {
            let mut samples = Samples { device_ms: vec![device], ..Samples::default() };
            times(&mut samples, (System::Reprise, Leg::Hit), &[30.0]);
            times(&mut samples, (System::Reprise, Leg::Nvme), &[nvme]);
            figure(&samples, "vllm.reprise.nvme").met
        };
        assert_eq!(met(60.0, 10.0), Some(true));
        assert_eq!(met(61.0, 10.0), Some(false));
        assert_eq!(met(120.0, 100.0), Some(true));
    }

    #[test]
    fn overhead_of_misses_is_judged_with_enough_pairs_and_their_noise() {
        let met = |ratios: &[f64]| {
            let mut samples = Samples::default();
            for ratio in ratios {
                samples.missed(&[1], &[answer(100.0, &[7])], &[answer(100.0 * ratio, &[7])]);
            }
            figure(&samples, "vllm.reprise.miss_overhead").met
        };
        assert_eq!(met(&[1.005; 19]), None);
        assert_eq!(met(&[1.005; 20]), Some(true));
        assert_eq!(met(&[1.02; 20]), Some(false));
        // A median of 2 % within the noise.
        assert_eq!(met(&[[0.9; 9].as_slice(), &[1.02; 4], &[1.1; 9]].concat()), Some(true));
    }

    #[test]
    fn answers_are_compared_with_an_engine_without_a_connector_computed_or_cached() {
        let mut samples = Samples::default();
        samples.answered((System::Recompute, Leg::Cold), &[1], &[answer(1.0, &[7])], 1.0);
        samples.answered((System::Recompute, Leg::OwnCache), &[1], &[answer(1.0, &[8])], 1.0);
        for tokens in [[7], [8], [9], [7]] {
            samples.answered((System::Reprise, Leg::Hit), &[1], &[answer(1.0, &tokens)], 1.0);
        }
        let same = figure(&samples, "vllm.reprise.same_answers");
        assert_eq!((same.value, same.met), (0.75, Some(false)));
    }

    #[test]
    fn share_of_found_blocks_is_a_figure_and_a_goal_of_reprise() {
        let mut samples = Samples::default();
        samples.answered((System::Reprise, Leg::Nvme), &[1], &[answer(1.0, &[7])], 0.5);
        samples.answered((System::Example, Leg::Hit), &[1], &[answer(1.0, &[7])], 0.0);
        assert_eq!(figure(&samples, "vllm.reprise.nvme.found").met, Some(false));
        assert_eq!(figure(&samples, "vllm.example.dram.found").met, None);
    }

    #[test]
    fn confidence_interval_contains_the_median_and_most_of_few_values() {
        let (low, high) = confidence((1..=20).map(f64::from).collect());
        assert_eq!((low, high), (6.0, 16.0));
        assert_eq!(confidence(vec![3.0]), (3.0, 3.0));
    }

    #[test]
    fn back_to_back_prompts_are_judged_by_first_and_last_token() {
        let mut samples = Samples::default();
        for seed in 0..20 {
            let without = [answer(100.0, &[7])];
            let with = [Answer { ttft_ms: 103.0, ttlt_ms: 201.0, ..answer(0.0, &[7]) }];
            samples.back_to_back(&[seed], &without, &with);
        }
        let first = figure(&samples, "vllm.reprise.back_to_back_ttft_overhead");
        let last = figure(&samples, "vllm.reprise.back_to_back_overhead");
        assert_eq!((first.met, last.met), (Some(false), Some(true)));
        assert!((first.value - 3.0).abs() < 1e-9 && (last.value - 0.5).abs() < 1e-9);
        assert_eq!(figure(&samples, "vllm.reprise.same_answers").value, 1.0);
    }

    #[test]
    fn scheduler_calls_are_judged_by_their_99th_percentile() {
        let rounds = [0.9, 1.2, 1.1].map(|p99_ms| Percentiles { p50_ms: 0.2, p99_ms });
        let scheduler = [("load.step".to_owned(), rounds.to_vec())].into();
        let samples = Samples { scheduler, ..Samples::default() };
        let p50 = figure(&samples, "vllm.reprise.scheduler_1024_blocks.load.step.p50");
        let p99 = figure(&samples, "vllm.reprise.scheduler_1024_blocks.load.step.p99");
        assert_eq!((p50.value, p50.met), (0.2, None));
        assert_eq!((p99.value, p99.met), (1.1, Some(false)));
    }

    #[test]
    fn missing_legs_of_a_peer_are_reported_with_the_reason() {
        let mut samples = Samples::default();
        times(&mut samples, (System::MooncakeTcp, Leg::Hit), &[100.0]);
        samples.failed(System::Lmcache, "no such port".to_owned());
        let unmeasured_legs = samples.unmeasured_legs(&[System::MooncakeTcp, System::Lmcache]);
        let why = |name: &str| {
            unmeasured_legs.iter().find(|absence| absence.name == name).map(|absence| absence.why.as_str())
        };
        assert_eq!(why("vllm.mooncake_tcp.dram"), None);
        assert_eq!(why("vllm.mooncake_tcp.restart"), System::MooncakeTcp.lacks(Leg::Restart));
        assert_eq!(why("vllm.lmcache.nvme"), Some("no such port"));
        assert_eq!(why("vllm.lmcache.peer"), System::Lmcache.lacks(Leg::Peer));
    }

    #[test]
    fn memory_and_times_have_their_spread() {
        let mut samples = Samples::default();
        for gib in [2, 3, 1] {
            samples.held(System::Lmcache, ProcessMemory { now: gib << 30, peak: (gib + 1) << 30 });
            samples.started(System::Lmcache, 2);
        }
        times(&mut samples, (System::Recompute, Leg::Cold), &[400.0; 3]);
        times(&mut samples, (System::MooncakeTcp, Leg::Hit), &[100.0, 140.0, 90.0]);
        let held = figure(&samples, "vllm.lmcache.memory_held");
        let spread = Spread { samples: 3, min: 1024.0, max: 3072.0 };
        assert_eq!((held.value, held.unit, held.spread), (2048.0, "MiB", Some(spread)));
        let peak = figure(&samples, "vllm.lmcache.memory_peak");
        assert_eq!((peak.value, peak.spread.map(|spread| spread.max)), (3072.0, Some(4096.0)));
        assert_eq!(figure(&samples, "vllm.lmcache.engine_starts").value, 6.0);
        let dram = figure(&samples, "vllm.mooncake_tcp.dram");
        assert_eq!((dram.value, dram.spread), (100.0, Some(Spread { samples: 3, min: 90.0, max: 140.0 })));
    }
}
