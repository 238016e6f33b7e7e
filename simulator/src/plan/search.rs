//! Choice of a configuration by replays with time.
//!
//! ```text
//! shortlist by estimate ─▶ replay ─▶ best ─▶ its changes within the budget ─▶ replay ─▶ best … no better change
//!                                                                                        │
//!                          plan, its changes, the best of other kinds: all samples ◀─────┘
//! ```
//!
//! All configurations serve the same samples of the trace: the same sessions with the same times. So the best one is the
//! cheapest within [`TOLERANCE`] of the shortest *replayed* mean TTFT, or with the TTFT of the goal. The search has two
//! samples of each configuration, and the last comparison has all. No replayed change within the budget has a shorter
//! TTFT by more than the tolerance, unless the limits of the search were reached. A configuration that is much slower
//! than the best one has one sample in the search.
//!
//! Deliberately absent: configurations with a cold store, which the world with time does not have.

use super::budget::Budget;
use super::choice::{
    Evaluated, FAMILIES, Goal, Plan, Rejected, Shortlist, Step, TOLERANCE, is_better, steps,
};
use super::configuration::Configuration;
use super::estimate::Estimator;
use super::timed::Timed;

/// Samples of each configuration in the search.
const SEARCH_SAMPLES: usize = 2;

/// A configuration gets more than one sample if its TTFT is at most this multiple of the shortest one.
const CONTENDER_MAX: f64 = 3.0;

/// Configurations that are replayed in the search: with two seconds for each sample, less than two minutes on a core.
const CONFIGURATIONS_MAX: usize = 24;

/// Times that the last comparison moves to another configuration at most.
const MOVES_MAX: usize = 3;

/// Replay of a sample of the trace on a configuration.
pub type Run = (Configuration, usize);

/// Plan with the results of its replays; configurations with a cold store have none.
#[derive(Clone, Debug, PartialEq)]
pub struct Replayed {
    /// The plan.
    pub plan: Plan,
    /// Results of the plan.
    pub chosen: Option<Timed>,
    /// Results of its changes, in their order.
    pub steps: Vec<Option<Timed>>,
    /// Results of its alternatives, in their order.
    pub alternatives: Vec<Option<Timed>>,
}

/// Configuration with its replays.
#[derive(Debug)]
struct Trial {
    one: Evaluated,
    /// Whether the configuration is usable and within the budget.
    is_eligible: bool,
    samples: Vec<Timed>,
}

struct Search<'a, F> {
    estimator: &'a Estimator<'a>,
    budget: Budget,
    goal: Goal,
    run: F,
    trials: Vec<Trial>,
}

/// Chooses a configuration. The function `run` makes replays, whose results are in their order.
pub fn choose<F>(
    estimator: &Estimator<'_>,
    (budget, goal): (Budget, Goal),
    shortlist: Shortlist,
    run: F,
) -> Replayed
where
    F: Fn(&[Run]) -> Vec<Timed>,
{
    let mut search = Search { estimator, budget, goal, run, trials: Vec::new() };
    let few = search.samples().min(SEARCH_SAMPLES);
    let first: Vec<Configuration> = shortlist.candidates.iter().map(|one| one.configuration).collect();
    search.screen(&first, few);
    search.climb(few);
    let found = search.settle(few);
    // Only estimates compare cold stores.
    let chosen = if shortlist.best.configuration.cold { shortlist.best.clone() } else { found };
    search.finish(chosen, shortlist)
}

impl<F: Fn(&[Run]) -> Vec<Timed>> Search<'_, F> {
    fn samples(&self) -> usize {
        self.estimator.load.limits.samples.max(1) as usize
    }

    /// Replays configurations, until each has some samples. Those with a cold store are left out.
    fn replay(&mut self, configurations: &[Configuration], samples: usize) {
        let mut runs: Vec<Run> = Vec::new();
        for configuration in configurations.iter().filter(|one| !one.cold) {
            let at = self.add(*configuration);
            let missing = self.trials[at].samples.len()..samples;
            let missing = missing.map(|sample| (*configuration, sample));
            let missing: Vec<Run> = missing.filter(|run| !runs.contains(run)).collect();
            runs.extend(missing);
        }
        let results = (self.run)(&runs);
        for ((configuration, _), timed) in runs.into_iter().zip(results) {
            let at = self.add(configuration);
            self.trials[at].samples.push(timed);
        }
    }

    /// Replays a sample of configurations, and some samples of those that can be the best one.
    fn screen(&mut self, configurations: &[Configuration], samples: usize) {
        self.replay(configurations, 1);
        let first = |trial: &Trial| trial.samples.first().map_or(f64::INFINITY, Timed::ttft_mean);
        let eligible = self.trials.iter().filter(|trial| trial.is_eligible);
        let Some(shortest) = eligible.map(first).min_by(f64::total_cmp) else { return };
        let bound = (shortest * CONTENDER_MAX).max(self.goal.ttft_seconds);
        let contenders = self.trials.iter().filter(|trial| first(trial) <= bound);
        let contenders: Vec<Configuration> = contenders.map(|trial| trial.one.configuration).collect();
        self.replay(&contenders, samples);
    }

    /// Place of a configuration, which may be new.
    fn add(&mut self, configuration: Configuration) -> usize {
        if let Some(at) = self.find(&configuration) {
            return at;
        }
        let estimate = self.estimator.estimate(&configuration);
        let is_eligible = estimate.unusable.is_none() && estimate.usd_per_hour <= self.budget.usd_per_hour;
        let one = Evaluated { configuration, estimate };
        self.trials.push(Trial { one, is_eligible, samples: Vec::new() });
        self.trials.len() - 1
    }

    fn find(&self, configuration: &Configuration) -> Option<usize> {
        self.trials.iter().position(|trial| trial.one.configuration == *configuration)
    }

    /// The best configuration of those that have some samples; only these are compared.
    fn best(&self, samples: usize, is_member: impl Fn(&Configuration) -> bool) -> Option<usize> {
        let compared = self.compared(samples, is_member);
        let shortest = compared.iter().map(|(_, mean, _)| *mean).min_by(f64::total_cmp)?;
        let bound = (shortest * (1.0 + TOLERANCE)).max(self.goal.ttft_seconds);
        let within = compared.into_iter().filter(|(_, mean, _)| *mean <= bound);
        let cheapest = within.min_by(|one, other| one.2.total_cmp(&other.2).then(one.1.total_cmp(&other.1)));
        cheapest.map(|(at, _, _)| at)
    }

    /// Places, mean TTFT and prices of the configurations that can be chosen and have some samples.
    fn compared(&self, samples: usize, is_member: impl Fn(&Configuration) -> bool) -> Vec<(usize, f64, f64)> {
        let years = self.estimator.years;
        let is_worn = |some: &[Timed]| Timed::years_of(some).is_some_and(|life| life < years);
        let mut compared = Vec::new();
        for (at, Trial { one, is_eligible, samples: all }) in self.trials.iter().enumerate() {
            let Some(some) = all.get(..samples) else { continue };
            if *is_eligible && is_member(&one.configuration) && !is_worn(some) {
                let mean = some.iter().map(Timed::ttft_mean).sum::<f64>() / samples.max(1) as f64;
                compared.push((at, mean, one.estimate.usd_per_hour));
            }
        }
        compared
    }

    /// Replays the changes of the best configuration, until no change within the budget is better.
    ///
    /// Changes of the one with the shortest TTFT are replayed too: several small gains can exceed the tolerance.
    fn climb(&mut self, samples: usize) {
        while let Some(best) = self.best(samples, |_| true) {
            let by_ttft = |one: &(usize, f64, f64), other: &(usize, f64, f64)| one.1.total_cmp(&other.1);
            let shortest = self.compared(samples, |_| true).into_iter().min_by(by_ttft);
            let is_needed = self.goal.ttft_seconds <= 0.0;
            let shortest = shortest.filter(|_| is_needed).map(|(at, _, _)| at);
            let fresh = [Some(best), shortest].into_iter().flatten().map(|at| self.fresh_moves(at));
            let Some(fresh) = fresh.into_iter().find(|fresh| !fresh.is_empty()) else { return };
            self.screen(&fresh, samples);
        }
    }

    /// Changes of a configuration that are usable, within the budget and not replayed yet; none at the limit.
    fn fresh_moves(&self, at: usize) -> Vec<Configuration> {
        let mut fresh: Vec<Configuration> = Vec::new();
        for configuration in self.moves(&self.trials[at].one) {
            let is_known = self.find(&configuration).is_some() || fresh.contains(&configuration);
            let estimate = self.estimator.estimate(&configuration);
            let is_affordable = estimate.usd_per_hour <= self.budget.usd_per_hour;
            if !is_known && !configuration.cold && is_affordable && estimate.unusable.is_none() {
                fresh.push(configuration);
            }
        }
        fresh.truncate(CONFIGURATIONS_MAX.saturating_sub(self.trials.len()));
        fresh
    }

    /// Changes of a configuration, and trades of nodes for DRAM or SSDs.
    fn moves(&self, one: &Evaluated) -> Vec<Configuration> {
        let now = one.configuration;
        let mut all: Vec<Configuration> =
            steps(self.estimator, one).into_iter().map(|step| step.changed.configuration).collect();
        let less = Configuration { nodes: now.nodes - 1, ..now };
        if less.nodes > 0 {
            all.extend(less.next_dram());
            all.extend(less.next_ssds(self.estimator.machine));
        }
        all.extend(now.next_node().less_dram());
        all.extend(now.next_node().less_ssds());
        all
    }

    /// The best configuration with all samples, of the best one of the search, its changes, and the best of each kind.
    fn settle(&mut self, few: usize) -> Evaluated {
        let all = self.samples();
        let kinds = FAMILIES.into_iter().filter_map(|(_, is_member)| self.best(1, is_member));
        let mut compared: Vec<usize> = kinds.collect();
        let mut at = self.best(few, |_| true).expect("nodes without a cache are always usable");
        compared.push(at);
        let of = |search: &Self, at: usize| search.trials[at].one.configuration;
        let configurations: Vec<Configuration> = compared.iter().map(|at| of(self, *at)).collect();
        self.replay(&configurations, all);
        for _ in 0..MOVES_MAX {
            let changes = steps(self.estimator, &self.trials[at].one);
            let changes: Vec<Configuration> =
                changes.into_iter().map(|step| step.changed.configuration).collect();
            self.replay(&changes, all);
            match self.best(all, |_| true) {
                Some(best) if best != at => at = best,
                _ => break,
            }
        }
        self.trials[at].one.clone()
    }

    /// Replays everything that is shown with the plan.
    fn finish(mut self, chosen: Evaluated, shortlist: Shortlist) -> Replayed {
        let all = self.samples();
        let changes = steps(self.estimator, &chosen);
        let mut shown: Vec<Configuration> = changes.iter().map(|step| step.changed.configuration).collect();
        shown.push(chosen.configuration);
        self.replay(&shown, all);
        let mut alternatives: Vec<(&'static str, Evaluated)> = Vec::new();
        for (name, is_member) in FAMILIES {
            let best = self.best(all, is_member).filter(|_| !is_member(&chosen.configuration));
            alternatives.extend(best.map(|at| (name, self.trials[at].one.clone())));
        }
        let cold = shortlist.cold.filter(|_| !chosen.configuration.cold);
        alternatives.extend(cold.map(|one| ("with a cold store", one)));
        let results = |one: &Evaluated| {
            self.find(&one.configuration).and_then(|at| Timed::joined(&self.trials[at].samples))
        };
        let Rejected { worn, .. } = shortlist.rejected;
        let rejected = Rejected { worn: worn.filter(|worn| is_better(worn, &chosen)), ..shortlist.rejected };
        Replayed {
            chosen: results(&chosen),
            steps: changes.iter().map(|Step { changed, .. }| results(changed)).collect(),
            alternatives: alternatives.iter().map(|(_, one)| results(one)).collect(),
            plan: Plan {
                alternatives,
                steps: changes,
                rejected,
                compared: shortlist.compared,
                replayed: self.trials.iter().filter(|trial| !trial.samples.is_empty()).count(),
                refused_requests: shortlist.refused_requests,
                chosen,
            },
        }
    }
}
