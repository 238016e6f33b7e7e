//! Choice of a configuration by replays with time.
//!
//! ```text
//! shortlist by estimate ─▶ replay ─▶ best ─▶ its changes within the budget ─▶ replay ─▶ best … no better change
//!                                                                                        │
//!                          plan, its changes, the best of other kinds: all samples ◀─────┘
//! ```
//!
//! All configurations serve the same samples of the trace: the same sessions with the same times. So the best one is the
//! cheapest within the tolerance of the shortest *replayed* mean TTFT. If the [`Goal`] has a TTFT, it is the cheapest one
//! with this TTFT, or the one with the shortest TTFT if none has it. The search has two samples of each configuration, and
//! the last comparison has all. The shortest TTFT of the search is part of the last comparison, so its bound is that of all
//! replays. No replayed change within the budget has a shorter TTFT by more than the tolerance, unless the limits of the
//! search were reached. A configuration that is much slower than the best one has one sample.
//!
//! Without a TTFT that is met, configurations beyond the budget are replayed too: the cheapest one with the TTFT is
//! the budget that is enough. A number of nodes is found by bisection.

use super::budget::{Budget, HOURS_PER_MONTH};
use super::choice::{Evaluated, FAMILIES, Goal, Plan, Reached, Rejected, Shortlist, Step, is_better, steps};
use super::configuration::Configuration;
use super::estimate::Estimator;
use super::timed::Timed;

/// Samples of each configuration in the search.
const SEARCH_SAMPLES: usize = 2;

/// A configuration gets more than one sample if its TTFT is at most this multiple of the shortest one.
const CONTENDER_MAX: f64 = 2.0;

/// Configurations that are replayed in the search: with a second for each sample, less than a minute on a core.
const CONFIGURATIONS_MAX: usize = 24;

/// Times that the last comparison moves to another configuration at most.
const MOVES_MAX: usize = 3;

/// Replay of a sample of the trace on a configuration.
pub type Run = (Configuration, usize);

/// Plan with the results of its replays.
#[derive(Clone, Debug, PartialEq)]
pub struct Replayed {
    /// The plan.
    pub plan: Plan,
    /// Results of the plan.
    pub chosen: Timed,
    /// Results of its changes, in their order.
    pub steps: Vec<Timed>,
    /// Results of its alternatives, in their order.
    pub alternatives: Vec<Timed>,
}

/// Configuration with its replays.
#[derive(Debug)]
struct Trial {
    one: Evaluated,
    /// Whether its SSDs and its cold store bear the load by estimate.
    is_usable: bool,
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
    let chosen = search.settle(few);
    search.finish(chosen, shortlist)
}

impl<F: Fn(&[Run]) -> Vec<Timed>> Search<'_, F> {
    fn samples(&self) -> usize {
        self.estimator.load.limits.samples.max(1) as usize
    }

    /// Replays configurations, until each has some samples.
    fn replay(&mut self, configurations: &[Configuration], samples: usize) {
        let mut runs: Vec<Run> = Vec::new();
        for configuration in configurations {
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
            self.trials[at].price(self.estimator);
        }
    }

    /// Replays a sample of configurations, and some samples of those that can be the best one.
    fn screen(&mut self, configurations: &[Configuration], samples: usize) {
        self.replay(configurations, 1);
        let contenders: Vec<Configuration> =
            self.contenders().into_iter().filter(|one| self.is_permitted(one)).collect();
        self.replay(&contenders, samples);
    }

    /// Configurations whose first sample is at most a multiple of the shortest one that a plan may have.
    fn contenders(&self) -> Vec<Configuration> {
        let first = |trial: &Trial| trial.samples.first().map_or(f64::INFINITY, Timed::ttft_mean);
        let eligible = self.trials.iter().filter(|trial| self.is_eligible(trial));
        let Some(shortest) = eligible.map(first).min_by(f64::total_cmp) else { return Vec::new() };
        let bound = (shortest * CONTENDER_MAX).max(self.goal.ttft_seconds.unwrap_or(0.0));
        let contenders = self.trials.iter().filter(|trial| first(trial) <= bound);
        contenders.map(|trial| trial.one.configuration).collect()
    }

    fn is_permitted(&self, configuration: &Configuration) -> bool {
        self.goal.permits(configuration)
    }

    /// Whether a plan may be the configuration of a trial, as far as SSDs bear the replayed load.
    fn is_eligible(&self, trial: &Trial) -> bool {
        self.is_affordable(trial) && self.is_permitted(&trial.one.configuration)
    }

    fn is_affordable(&self, trial: &Trial) -> bool {
        trial.is_usable && trial.one.estimate.usd_per_hour <= self.budget.usd_per_hour
    }

    /// Place of a configuration, which may be new.
    fn add(&mut self, configuration: Configuration) -> usize {
        if let Some(at) = self.find(&configuration) {
            return at;
        }
        let estimate = self.estimator.estimate(&configuration);
        let is_usable = estimate.unusable.is_none();
        let one = Evaluated { configuration, estimate };
        self.trials.push(Trial { one, is_usable, samples: Vec::new() });
        self.trials.len() - 1
    }

    fn find(&self, configuration: &Configuration) -> Option<usize> {
        self.trials.iter().position(|trial| trial.one.configuration == *configuration)
    }

    /// The best configuration that a plan may be, of those that have some samples; only these are compared.
    fn best(&self, samples: usize) -> Option<usize> {
        self.best_of(samples, |one| self.is_permitted(one))
    }

    fn best_of(&self, samples: usize, is_member: impl Fn(&Configuration) -> bool) -> Option<usize> {
        let compared = self.compared(samples, is_member);
        let shortest = compared.iter().map(|(_, mean, _)| *mean).min_by(f64::total_cmp)?;
        let bound = self.goal.bound(shortest);
        let within = compared.into_iter().filter(|(_, mean, _)| *mean <= bound);
        let cheapest = within.min_by(|one, other| one.2.total_cmp(&other.2).then(one.1.total_cmp(&other.1)));
        cheapest.map(|(at, _, _)| at)
    }

    /// The configuration with the shortest TTFT that a plan may be.
    fn shortest(&self, samples: usize) -> Option<usize> {
        let by_ttft = |one: &(usize, f64, f64), other: &(usize, f64, f64)| one.1.total_cmp(&other.1);
        let compared = self.compared(samples, |one| self.is_permitted(one));
        compared.into_iter().min_by(by_ttft).map(|(at, _, _)| at)
    }

    /// Places, mean TTFT and prices of the configurations within the budget that have some samples.
    fn compared(&self, samples: usize, is_member: impl Fn(&Configuration) -> bool) -> Vec<(usize, f64, f64)> {
        let mut compared = Vec::new();
        for (at, trial) in self.trials.iter().enumerate() {
            if let Some(mean) = self.mean(trial, samples)
                && self.is_affordable(trial)
                && is_member(&trial.one.configuration)
            {
                compared.push((at, mean, trial.one.estimate.usd_per_hour));
            }
        }
        compared
    }

    /// Mean TTFT of some samples; `None` if the trial has fewer, or if its SSDs wear out.
    fn mean(&self, trial: &Trial, samples: usize) -> Option<f64> {
        let some = trial.samples.get(..samples)?;
        let is_worn = Timed::years_of(some).is_some_and(|life| life < self.estimator.years);
        (!is_worn).then(|| some.iter().map(Timed::ttft_mean).sum::<f64>() / samples.max(1) as f64)
    }

    /// Replays the changes of the best configuration, until no change within the budget is better.
    ///
    /// Changes of the one with the shortest TTFT are replayed too: several small gains can exceed the tolerance.
    fn climb(&mut self, samples: usize) {
        while let Some(best) = self.best(samples) {
            let shortest = self.shortest(samples).filter(|_| self.goal.ttft_seconds.is_none());
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
            let is_permitted = self.is_permitted(&configuration);
            if !is_known && is_permitted && is_affordable && estimate.unusable.is_none() {
                fresh.push(configuration);
            }
        }
        let searched = self.trials.iter().filter(|trial| self.is_permitted(&trial.one.configuration)).count();
        fresh.truncate(CONFIGURATIONS_MAX.saturating_sub(searched));
        fresh
    }

    /// Changes of a configuration, the one without a cache, and trades of nodes for DRAM or SSDs.
    fn moves(&self, one: &Evaluated) -> Vec<Configuration> {
        let now = one.configuration;
        let mut all: Vec<Configuration> =
            steps(self.estimator, one).into_iter().map(|step| step.changed.configuration).collect();
        if now.dram_gb > 0 {
            all.push(Configuration::without_cache(now.nodes));
        }
        let less = Configuration { nodes: now.nodes - 1, ..now };
        if less.nodes > 0 {
            all.extend(less.next_dram());
            all.extend(less.next_ssds(self.estimator.machine));
        }
        all.extend(now.next_node().less_dram());
        all.extend(now.next_node().less_ssds());
        all
    }

    /// The best configuration with all samples: of the best one of the search, its changes, the one with the shortest TTFT,
    /// and the best of each kind.
    fn settle(&mut self, few: usize) -> Evaluated {
        let all = self.samples();
        let mut at = self.best(few).expect("nodes without a cache are always usable");
        let contenders = self.contenders();
        let kinds = FAMILIES.into_iter().filter_map(|(_, is_member)| self.best_of(1, is_member));
        let mut compared: Vec<Configuration> = kinds.map(|at| self.trials[at].one.configuration).collect();
        compared.retain(|one| contenders.contains(one));
        // Without the shortest TTFT, the bound would be that of slower ones.
        let kept = [Some(at), self.shortest(few)].into_iter().flatten();
        compared.extend(kept.map(|at| self.trials[at].one.configuration));
        self.replay(&compared, all);
        for _ in 0..MOVES_MAX {
            let changes = steps(self.estimator, &self.trials[at].one);
            let changes: Vec<Configuration> =
                changes.into_iter().map(|step| step.changed.configuration).collect();
            self.replay(&changes, all);
            match self.best(all) {
                Some(best) if best != at => at = best,
                _ => break,
            }
        }
        self.trials[at].one.clone()
    }

    /// TTFT of the plan next to that of the goal. If it is longer, larger budgets are tried.
    fn reached(&mut self, chosen: &Configuration) -> Option<Reached> {
        let goal_seconds = self.goal.ttft_seconds?;
        let all = self.samples();
        let at = self.find(chosen).expect("the plan was replayed");
        let ttft_seconds = self.mean(&self.trials[at], all).unwrap_or(f64::INFINITY);
        let mut reached = Reached { goal_seconds, ttft_seconds, beyond_budget: None };
        if reached.is_met() {
            return Some(reached);
        }
        // More nodes shorten the TTFT: the least number that is enough is found by bisection.
        let larger: Vec<Configuration> = chosen.with_more_nodes().collect();
        let (mut low, mut high) = (0, larger.len());
        while low < high {
            let middle = low.midpoint(high);
            let one = larger[middle];
            self.replay(&[one], all);
            let at = self.add(one);
            match self.mean(&self.trials[at], all).is_some_and(|ttft| ttft <= goal_seconds) {
                true => high = middle,
                false => low = middle + 1,
            }
        }
        let beyond = self.trials.iter().filter(|trial| trial.is_usable);
        let beyond = beyond.filter(|trial| self.is_permitted(&trial.one.configuration));
        let meeting = beyond.filter_map(|trial| {
            let ttft = self.mean(trial, all).filter(|ttft| *ttft <= goal_seconds)?;
            Some((trial.one.clone(), ttft))
        });
        let price = |one: &Evaluated| one.estimate.usd_per_hour;
        reached.beyond_budget = meeting.min_by(|one, other| price(&one.0).total_cmp(&price(&other.0)));
        Some(reached)
    }

    /// Replays everything that is shown with the plan.
    fn finish(mut self, chosen: Evaluated, shortlist: Shortlist) -> Replayed {
        let all = self.samples();
        let mut changes = steps(self.estimator, &chosen);
        let mut shown: Vec<Configuration> = changes.iter().map(|step| step.changed.configuration).collect();
        shown.push(chosen.configuration);
        self.replay(&shown, all);
        let reached = self.reached(&chosen.configuration);
        let mut alternatives: Vec<(&'static str, usize)> = Vec::new();
        for (name, is_member) in FAMILIES {
            // The best one of a kind that is much slower than others has fewer samples.
            let best = self.best_of(all, is_member).or_else(|| self.best_of(1, is_member));
            alternatives.extend(best.filter(|_| !is_member(&chosen.configuration)).map(|at| (name, at)));
        }
        let trial = |configuration: &Configuration| {
            let at = self.find(configuration).expect("everything that is shown was replayed");
            &self.trials[at]
        };
        let results = |trial: &Trial| Timed::joined(&trial.samples).expect("it has samples");
        // Replays have the price of a cold store.
        for Step { changed, usd_per_month, .. } in &mut changes {
            let usd_per_hour = trial(&changed.configuration).one.estimate.usd_per_hour;
            changed.estimate.usd_per_hour = usd_per_hour;
            *usd_per_month = (usd_per_hour - chosen.estimate.usd_per_hour) * HOURS_PER_MONTH;
        }
        let Rejected { worn, .. } = shortlist.rejected;
        let rejected = Rejected { worn: worn.filter(|worn| is_better(worn, &chosen)), ..shortlist.rejected };
        Replayed {
            chosen: results(trial(&chosen.configuration)),
            steps: changes.iter().map(|step| results(trial(&step.changed.configuration))).collect(),
            alternatives: alternatives.iter().map(|(_, at)| results(&self.trials[*at])).collect(),
            plan: Plan {
                alternatives: alternatives
                    .iter()
                    .map(|(name, at)| (*name, self.trials[*at].one.clone()))
                    .collect(),
                steps: changes,
                rejected,
                compared: shortlist.compared,
                replayed: self.trials.iter().filter(|trial| !trial.samples.is_empty()).count(),
                reached,
                chosen,
            },
        }
    }
}

impl Trial {
    /// Sets the price from the traffic of the replays.
    fn price(&mut self, estimator: &Estimator<'_>) {
        let configuration = &self.one.configuration;
        if !configuration.cold {
            return;
        }
        if let Some(timed) = Timed::joined(&self.samples) {
            self.one.estimate.usd_per_hour = timed.usd_per_hour(estimator, configuration);
        }
    }
}
