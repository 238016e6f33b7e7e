//! Candidates of a plan by estimate, and the effect of changes to a configuration.
//!
//! The best of some candidates is the cheapest one within [`TOLERANCE`] of the shortest mean TTFT. With a [`Goal`], it is
//! the cheapest one with the TTFT of the goal, or the one with the shortest TTFT if none has it. If no configuration serves
//! the load, it is the one that serves most of it. [`super::search`] replays the candidates of the [`Shortlist`] with time,
//! and chooses.
//!
//! A larger budget adds configurations and removes none. The bound of the tolerance therefore never rises, and neither
//! does the estimated TTFT of the best one.

use super::PlanError;
use super::budget::{Budget, HOURS_PER_MONTH};
use super::configuration::Configuration;
use super::curves::POLICIES;
use super::estimate::{Estimate, Estimator, Unusable};

/// Part by which the mean TTFT of a plan may exceed the shortest one.
pub(super) const TOLERANCE: f64 = 0.1;

/// Part of the load by which the most is exceeded at most, if no configuration serves all.
const SERVED_TOLERANCE: f64 = 1e-9;

/// Numbers of nodes whose best configurations are candidates.
const NODE_COUNTS_MAX: usize = 6;

/// Configuration with its estimate.
#[derive(Clone, Debug, PartialEq)]
pub struct Evaluated {
    /// The configuration.
    pub configuration: Configuration,
    /// Its results by estimate.
    pub estimate: Estimate,
}

/// Configurations that are the best ones by estimate.
#[derive(Clone, Debug, PartialEq)]
pub struct Shortlist {
    /// The best one of all.
    pub best: Evaluated,
    /// Those that are replayed with time: the best ones of their kinds and of their numbers of nodes.
    pub candidates: Vec<Evaluated>,
    /// Configurations that are not usable.
    pub rejected: Rejected,
    /// Number of configurations within the budget.
    pub compared: usize,
}

/// Numbers of configurations that are not usable.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rejected {
    /// Those whose SSDs wear out before their planned life.
    pub wear: usize,
    /// Those whose SSDs are too slow.
    pub ssd_bandwidth: usize,
    /// Those whose cold store is too slow.
    pub cold_bandwidth: usize,
    /// The best one of those that wear out, if it is better than the plan by estimate.
    pub worn: Option<Evaluated>,
}

/// A change of the plan.
#[derive(Clone, Debug, PartialEq)]
pub struct Step {
    /// Name of the change.
    pub name: &'static str,
    /// The changed configuration.
    pub changed: Evaluated,
    /// Additional price in USD a month; negative: saved.
    pub usd_per_month: f64,
}

/// Recommended configuration with its alternatives.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// The recommended configuration.
    pub chosen: Evaluated,
    /// The best configurations of the same budget with less kinds of hardware.
    pub alternatives: Vec<(&'static str, Evaluated)>,
    /// Changes of the recommended configuration.
    pub steps: Vec<Step>,
    /// Configurations that are not usable.
    pub rejected: Rejected,
    /// Number of configurations within the budget.
    pub compared: usize,
    /// Number of configurations that were replayed with time.
    pub replayed: usize,
    /// Result for the TTFT that the goal asks for, if it asks for one.
    pub reached: Option<Reached>,
}

/// TTFT of a plan next to the one that was asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Reached {
    /// Mean TTFT that was asked for, in seconds.
    pub goal_seconds: f64,
    /// Mean TTFT of the plan in its replays, in seconds: the shortest one of all replays if the goal is not met.
    pub ttft_seconds: f64,
    /// The cheapest replayed configuration beyond the budget that meets the goal, and its mean TTFT, if the plan does not.
    pub beyond_budget: Option<(Evaluated, f64)>,
}

impl Reached {
    /// Whether the plan has the TTFT.
    pub fn is_met(&self) -> bool {
        self.ttft_seconds <= self.goal_seconds
    }
}

/// Whether a plan may have a cold store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ColdStore {
    /// It is an alternative only.
    Compared,
    /// The plan may recommend it.
    Allowed,
}

/// What a plan aims at.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Goal {
    /// Whether the plan may have a cold store.
    pub cold: ColdStore,
    /// Mean TTFT in seconds that is short enough; `None`: nearly the shortest one.
    pub ttft_seconds: Option<f64>,
}

impl Goal {
    /// Largest mean TTFT of a plan, if the shortest one is known.
    pub(super) fn bound(&self, shortest: f64) -> f64 {
        match self.ttft_seconds {
            None => shortest * (1.0 + TOLERANCE),
            Some(goal) => goal.max(shortest),
        }
    }

    /// Whether a plan may be this configuration.
    pub(super) fn permits(&self, configuration: &Configuration) -> bool {
        self.cold == ColdStore::Allowed || !configuration.cold
    }
}

/// Estimates all configurations within a budget, and returns the best ones.
pub fn shortlist(estimator: &Estimator<'_>, budget: Budget, goal: Goal) -> Result<Shortlist, PlanError> {
    let all = Configuration::all(estimator.machine, budget.usd_per_hour);
    let evaluate = |configuration| Evaluated { estimate: estimator.estimate(&configuration), configuration };
    let mut all: Vec<Evaluated> = all.into_iter().map(evaluate).collect();
    // A cold store is not part of the price of the nodes.
    all.retain(|one| one.estimate.usd_per_hour <= budget.usd_per_hour);
    let compared = all.len();
    let (usable, refused): (Vec<Evaluated>, Vec<Evaluated>) =
        all.into_iter().partition(|one| one.estimate.unusable.is_none());
    let is_eligible = |one: &&Evaluated| goal.permits(&one.configuration);
    let found =
        best(usable.iter().filter(is_eligible), goal).ok_or_else(|| too_small(estimator, budget))?.clone();
    let count = |reason| refused.iter().filter(|one| one.estimate.unusable == Some(reason)).count();
    let is_worn = |one: &&Evaluated| one.estimate.unusable == Some(Unusable::Wear);
    Ok(Shortlist {
        candidates: candidates(&usable, &found, goal),
        rejected: Rejected {
            wear: count(Unusable::Wear),
            ssd_bandwidth: count(Unusable::SsdBandwidth),
            cold_bandwidth: count(Unusable::ColdBandwidth),
            worn: best(refused.iter().filter(is_eligible).filter(is_worn), goal).cloned(),
        },
        compared,
        best: found,
    })
}

fn too_small(estimator: &Estimator<'_>, budget: Budget) -> PlanError {
    let least = Configuration::without_cache(1);
    let needed = least.usd_per_hour(estimator.machine) * HOURS_PER_MONTH;
    PlanError::BudgetTooSmall {
        budget: budget.usd_per_month(),
        least: estimator.machine.title(),
        needed,
        rounded: needed.ceil() as u64,
    }
}

fn shortest<'a>(candidates: impl Iterator<Item = &'a Evaluated>) -> Option<f64> {
    candidates.filter_map(|one| one.estimate.ttft_mean).min_by(f64::total_cmp)
}

/// Cheapest of the candidates whose mean TTFT is within the tolerance, or which serve most of the load.
fn best<'a>(candidates: impl Iterator<Item = &'a Evaluated> + Clone, goal: Goal) -> Option<&'a Evaluated> {
    let cheapest = |one: &&Evaluated, other: &&Evaluated| {
        let (one, other) = (&one.estimate, &other.estimate);
        let by_ttft = one.ttft_mean.unwrap_or(f64::MAX).total_cmp(&other.ttft_mean.unwrap_or(f64::MAX));
        one.usd_per_hour.total_cmp(&other.usd_per_hour).then(by_ttft)
    };
    if let Some(shortest) = shortest(candidates.clone()) {
        let bound = goal.bound(shortest);
        let is_within = |one: &&Evaluated| one.estimate.ttft_mean.is_some_and(|ttft| ttft <= bound);
        return candidates.filter(is_within).min_by(cheapest);
    }
    let most = candidates.clone().map(|one| one.estimate.served).max_by(f64::total_cmp)?;
    candidates.filter(|one| one.estimate.served >= most - SERVED_TOLERANCE).min_by(cheapest)
}

/// Whether a configuration serves more, or has a shorter TTFT, or is cheaper with the same TTFT.
pub(super) fn is_better(one: &Evaluated, other: &Evaluated) -> bool {
    match (one.estimate.ttft_mean, other.estimate.ttft_mean) {
        (Some(one), Some(other)) => one < other,
        (one, other) => one.is_some() && other.is_none(),
    }
}

/// Kinds of hardware: names, and their configurations.
pub(super) const FAMILIES: [Family; 4] = [
    ("no cache", |one| one.dram_gb == 0 && !one.cold),
    ("DRAM", |one| one.dram_gb > 0 && one.ssds.is_none() && !one.cold),
    ("DRAM, SSD", |one| one.ssds.is_some() && !one.cold),
    ("with a cold store", |one| one.cold),
];

/// Name of a kind of hardware, and which configurations are of the kind.
pub(super) type Family = (&'static str, fn(&Configuration) -> bool);

/// The best configuration of all, of each kind, and of the best numbers of nodes. With a TTFT as the goal, also the best one
/// without: replays may be slower than the estimates.
fn candidates(usable: &[Evaluated], found: &Evaluated, goal: Goal) -> Vec<Evaluated> {
    let eligible = || usable.iter().filter(|one| goal.permits(&one.configuration));
    let mut counts: Vec<u32> = eligible().map(|one| one.configuration.nodes).collect();
    counts.sort_unstable();
    counts.dedup();
    let of_count = |nodes: u32| best(eligible().filter(move |one| one.configuration.nodes == nodes), goal);
    let mut by_nodes: Vec<&Evaluated> = counts.into_iter().filter_map(of_count).collect();
    let rank = |one: &Evaluated| (one.estimate.ttft_mean.unwrap_or(f64::INFINITY), -one.estimate.served);
    by_nodes.sort_by(|one, other| {
        let (one, other) = (rank(one), rank(other));
        one.0.total_cmp(&other.0).then(one.1.total_cmp(&other.1))
    });
    by_nodes.truncate(NODE_COUNTS_MAX);
    let of_kind =
        |(_, is_member): Family| best(usable.iter().filter(move |one| is_member(&one.configuration)), goal);
    let kinds = FAMILIES.into_iter().filter_map(of_kind);
    let mut all: Vec<Evaluated> = Vec::new();
    let fast = best(eligible(), Goal { ttft_seconds: None, ..goal });
    for one in std::iter::once(found).chain(kinds).chain(fast).chain(by_nodes) {
        if !all.contains(one) {
            all.push(one.clone());
        }
    }
    all
}

/// Changes of a configuration by one size of a kind of hardware, or by the policy.
pub(super) fn steps(estimator: &Estimator<'_>, chosen: &Evaluated) -> Vec<Step> {
    let now = chosen.configuration;
    let mut changes: Vec<(&'static str, Configuration)> = Vec::new();
    let mut push =
        |name, changed: Option<Configuration>| changes.extend(changed.map(|changed| (name, changed)));
    push("more DRAM", now.next_dram());
    push("more SSDs", more_ssds(estimator, chosen));
    push("one more node", Some(now.next_node()));
    push("another policy", other_policy(estimator, &now));
    push("a cold store", (!now.cold && now.dram_gb > 0).then_some(Configuration { cold: true, ..now }));
    push("less DRAM", now.less_dram());
    push("fewer SSDs", now.less_ssds());
    push("no cold store", now.cold.then_some(Configuration { cold: false, ..now }));
    push("one node less", (now.nodes > 1).then(|| Configuration { nodes: now.nodes - 1, ..now }));
    let step = |(name, configuration): (&'static str, Configuration)| {
        let changed = Evaluated { estimate: estimator.estimate(&configuration), configuration };
        Step {
            name,
            usd_per_month: (changed.estimate.usd_per_hour - chosen.estimate.usd_per_hour) * HOURS_PER_MONTH,
            changed,
        }
    };
    changes.into_iter().map(step).collect()
}

/// More SSDs that gain most for the price, of all classes and admissions; usable ones first.
pub(super) fn more_ssds(estimator: &Estimator<'_>, chosen: &Evaluated) -> Option<Configuration> {
    let gain = |one: &Estimate| {
        let now = &chosen.estimate;
        let gain = match (now.ttft_mean, one.ttft_mean) {
            (Some(now), Some(then)) => now - then,
            _ => one.served - now.served,
        };
        let usd = one.usd_per_hour - now.usd_per_hour;
        match (gain > 0.0, usd > 0.0) {
            (true, true) => gain / usd,
            (true, false) => f64::INFINITY,
            (false, _) => gain,
        }
    };
    let mut best: Option<((bool, f64), Configuration)> = None;
    for configuration in chosen.configuration.next_ssds(estimator.machine) {
        let estimate = estimator.estimate(&configuration);
        let value = (estimate.unusable.is_none(), gain(&estimate));
        if best.as_ref().is_none_or(|(most, _)| value > *most) {
            best = Some((value, configuration));
        }
    }
    best.map(|(_, configuration)| configuration)
}

/// The other policy with the shortest TTFT on the same hardware.
fn other_policy(estimator: &Estimator<'_>, now: &Configuration) -> Option<Configuration> {
    if now.dram_gb == 0 {
        return None;
    }
    let others = POLICIES.into_iter().filter(|policy| *policy != now.policy);
    let time = |policy| {
        let other = Configuration { policy, ..*now };
        (estimator.estimate(&other).alone_mean, other)
    };
    others.map(time).min_by(|one, other| one.0.total_cmp(&other.0)).map(|(_, other)| other)
}
