//! Decides how many queue pairs of which controllers each allocation of a node gets. Pure and deterministic.
//!
//! Pending allocations are served by class (`Guaranteed`, `Burstable`, `BestEffort`), then by age, then by
//! name. Each one that fits gets its whole request, so an allocation that does not fit holds no pairs back.
//!
//! * `TrustedShared`: the requested pairs of every controller of the pool that is not exclusive. It preempts
//!   nothing.
//! * `ExclusiveController`: the requested pairs of one unused controller; among several the one with the
//!   smallest budget.
//! * A `Guaranteed` allocation that finds no unused controller preempts the holders of one: the controller
//!   with the fewest `Burstable` holders, then with the fewest `BestEffort` holders. Holders lose their whole
//!   grant. The controller is reserved for the preempting allocation until the queue pairs are free.
//!
//! Each write that follows from a decision is followed by another decision ([`super::build::Pass`]). So a decision
//! frees no pairs by itself: it sees them as free once the end of the grant is written.

use reprise_crds::fields::Percent;
use reprise_crds::queues::{QueueIsolation, QueueQos};
use reprise_crds::status::Reason;

use crate::framework::refusal::{Refusal, list};

/// A controller whose queue pairs can be granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LendableController {
    pub serial: String,
    pub pool: String,
    /// Queue pairs that all grants together may use.
    pub budget: u32,
}

/// Queue pairs, by serial number of the controller or by name of the holder.
pub type Shares = Vec<(String, u32)>;

/// An allocation as an input to the decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimant {
    /// Name of the allocation as `namespace/name`.
    pub name: String,
    /// Creation time in seconds since the epoch.
    pub made: i64,
    pub pool: String,
    /// Requested queue pairs per controller.
    pub pairs: u32,
    /// Class, which determines order and preemption.
    pub qos: QueueQos,
    pub isolation: QueueIsolation,
    pub state: ClaimState,
    /// Queue pairs of its grant, by controller.
    pub shares: Shares,
}

/// The state of an allocation before the decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClaimState {
    /// No grant, and none is requested.
    Inactive,
    /// No grant yet; one is requested.
    Pending,
    /// A grant that is not ending.
    Granted,
    /// An ending grant whose queue pairs are not free yet.
    Ending,
}

/// The decision on one allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Its grant stays as it is.
    Unchanged,
    /// It gets the requested pairs of each of these controllers.
    Granted(Vec<String>),
    /// Its grant ends in favor of another allocation.
    Preempted { by: String },
    /// It does not fit, for this reason.
    Waiting(Refusal),
}

/// Returns the queue pairs of a controller that may be granted: `percent` of `pairs`, rounded down.
pub fn budget(pairs: u32, percent: Percent) -> u32 {
    u32::try_from(u64::from(pairs) * u64::from(percent.0) / 100).unwrap_or(u32::MAX)
}

/// Returns one verdict per claimant, in the same order.
pub fn decide(lenders: &[LendableController], claimants: &[Claimant]) -> Vec<Verdict> {
    let mut ledger = Ledger::new(lenders, claimants);
    let mut pending: Vec<usize> =
        (0..claimants.len()).filter(|index| claimants[*index].state == ClaimState::Pending).collect();
    pending.sort_by_key(|index| {
        let Claimant { qos, made, name, .. } = &claimants[*index];
        (*qos, *made, name)
    });
    for index in pending {
        let verdict = match claimants[index].isolation {
            QueueIsolation::TrustedShared => ledger.grant_shared(index),
            QueueIsolation::ExclusiveController => ledger.grant_exclusive(index),
        };
        ledger.verdicts[index] = verdict.unwrap_or_else(Verdict::Waiting);
    }
    ledger.verdicts
}

/// Describes a controller: its serial number, budget and holders with their queue pairs.
pub fn describe(controller: &LendableController, holders: &[(String, u32)]) -> String {
    let names = list(holders.iter().map(|(name, pairs)| format!("{name} {pairs}")));
    let names = if names.is_empty() { "no allocation" } else { &names };
    format!("{} (budget {}; held by {names})", controller.serial, controller.budget)
}

/// State of the decision. Controllers and claimants are identified by their index.
struct Ledger<'a> {
    claimants: &'a [Claimant],
    /// Sorted by serial number.
    controllers: Vec<ControllerState<'a>>,
    verdicts: Vec<Verdict>,
}

/// A controller during the decision.
struct ControllerState<'a> {
    lender: &'a LendableController,
    /// Indexes of claimants, with their queue pairs.
    holders: Vec<(usize, u32)>,
    /// Whether a claimant gets the controller once it is released.
    is_reserved: bool,
}

impl<'a> Ledger<'a> {
    fn new(lenders: &'a [LendableController], claimants: &'a [Claimant]) -> Ledger<'a> {
        let state = |lender: &'a LendableController| {
            let of_it = |(index, claimant): (usize, &Claimant)| {
                let mut shares = claimant.shares.iter();
                shares.find(|(serial, _)| *serial == lender.serial).map(|(_, pairs)| (index, *pairs))
            };
            let holders = claimants.iter().enumerate().filter_map(of_it).collect();
            ControllerState { lender, holders, is_reserved: false }
        };
        let mut controllers: Vec<ControllerState<'a>> = lenders.iter().map(state).collect();
        controllers.sort_by_key(|controller| &controller.lender.serial);
        Ledger { claimants, controllers, verdicts: vec![Verdict::Unchanged; claimants.len()] }
    }

    /// Grants the requested pairs of every controller of the pool that is not exclusive.
    fn grant_shared(&mut self, index: usize) -> Result<Verdict, Refusal> {
        let wanted = self.claimants[index].pairs;
        let all = self.of_pool(&self.claimants[index].pool)?;
        let shareable: Vec<usize> = all.iter().copied().filter(|at| !self.is_exclusive(*at)).collect();
        // Every controller grants the same number of pairs, so the smallest budget is the limit.
        let Some(most) = shareable.iter().map(|at| self.budget(*at)).min() else {
            return Err(self.too_few_free(&all));
        };
        exceeds(wanted, most)?;
        let is_short = |at: &usize| {
            let held = self.controllers[*at].holders.iter().map(|(_, pairs)| *pairs);
            self.budget(*at).saturating_sub(held.fold(0, u32::saturating_add)) < wanted
        };
        let short: Vec<usize> = shareable.iter().copied().filter(is_short).collect();
        if short.is_empty() { Ok(self.grant(index, &shareable)) } else { Err(self.too_few_free(&short)) }
    }

    /// Grants the requested pairs of one unused controller, or preempts the holders of one.
    fn grant_exclusive(&mut self, index: usize) -> Result<Verdict, Refusal> {
        let Claimant { pairs, pool, qos, .. } = &self.claimants[index];
        let all = self.of_pool(pool)?;
        exceeds(*pairs, all.iter().map(|at| self.budget(*at)).max().unwrap_or_default())?;
        let fitting: Vec<usize> = all.into_iter().filter(|at| self.budget(*at) >= *pairs).collect();
        let is_unused = |at: &usize| {
            let controller = &self.controllers[*at];
            controller.holders.is_empty() && !controller.is_reserved
        };
        let unused = fitting.iter().copied().filter(is_unused);
        if let Some(at) = unused.min_by_key(|at| self.budget(*at)) {
            return Ok(self.grant(index, &[at]));
        }
        let costs = fitting.iter().copied().filter_map(|at| Some((self.cost(at)?, at)));
        match costs.min() {
            Some((_, at)) if *qos == QueueQos::Guaranteed => Err(self.preempt(index, at)),
            _ => Err(self.too_few_free(&fitting)),
        }
    }

    /// Returns the controllers of a pool, of which there is at least one.
    fn of_pool(&self, pool: &str) -> Result<Vec<usize>, Refusal> {
        let of_pool = |at: &usize| self.controllers[*at].lender.pool == pool;
        let all: Vec<usize> = (0..self.controllers.len()).filter(of_pool).collect();
        if all.is_empty() {
            let message = "the node has no controller with queue pairs to grant: check status.controllers of its CacheNode";
            return Err(Refusal::new(Reason::NoDevices, message));
        }
        Ok(all)
    }

    fn budget(&self, at: usize) -> u32 {
        self.controllers[at].lender.budget
    }

    /// Whether a controller is held or reserved by an exclusive allocation.
    fn is_exclusive(&self, at: usize) -> bool {
        let controller = &self.controllers[at];
        let is_exclusive =
            |index: usize| self.claimants[index].isolation == QueueIsolation::ExclusiveController;
        controller.is_reserved || controller.holders.iter().any(|(index, _)| is_exclusive(*index))
    }

    fn grant(&mut self, index: usize, of: &[usize]) -> Verdict {
        for at in of {
            self.controllers[*at].holders.push((index, self.claimants[index].pairs));
        }
        Verdict::Granted(of.iter().map(|at| self.controllers[*at].lender.serial.clone()).collect())
    }

    /// Returns the cost of making a controller available: `Burstable` holders to preempt, `BestEffort` holders, and its
    /// budget. `None` if a guaranteed holder or a reservation prevents it.
    fn cost(&self, at: usize) -> Option<(usize, usize, u32)> {
        let controller = &self.controllers[at];
        let holders = controller.holders.iter().filter(|(index, _)| !self.is_ending(*index));
        let classes: Vec<QueueQos> = holders.map(|(index, _)| self.claimants[*index].qos).collect();
        let count = |class| classes.iter().filter(|qos| **qos == class).count();
        let is_available = !controller.is_reserved && count(QueueQos::Guaranteed) == 0;
        is_available.then(|| (count(QueueQos::Burstable), count(QueueQos::BestEffort), self.budget(at)))
    }

    fn is_ending(&self, index: usize) -> bool {
        let is_preempted = matches!(self.verdicts[index], Verdict::Preempted { .. });
        is_preempted || self.claimants[index].state == ClaimState::Ending
    }

    /// Preempts all holders of a controller, and reserves it.
    fn preempt(&mut self, index: usize, at: usize) -> Refusal {
        for holder in self.controllers[at].holders.iter().map(|(holder, _)| *holder) {
            if !self.is_ending(holder) {
                self.verdicts[holder] = Verdict::Preempted { by: self.claimants[index].name.clone() };
            }
        }
        self.controllers[at].is_reserved = true;
        let message = format!(
            "{} is reserved for it until the agent has released the pairs of the previous holders",
            self.describe(at)
        );
        Refusal::new(Reason::Releasing, message)
    }

    fn too_few_free(&self, of: &[usize]) -> Refusal {
        let message = format!(
            "too few are free: {}. The grant follows once enough are free, for example when one of these allocations is \
             deleted",
            list(of.iter().map(|at| self.describe(*at)))
        );
        Refusal::new(Reason::OverBudget, message)
    }

    fn describe(&self, at: usize) -> String {
        let controller = &self.controllers[at];
        let holder = |(index, pairs): &(usize, u32)| (self.claimants[*index].name.clone(), *pairs);
        let mut holders: Shares = controller.holders.iter().map(holder).collect();
        holders.sort();
        describe(controller.lender, &holders)
    }
}

/// Refuses a request above the budget of every controller, even of an unused one.
fn exceeds(wanted: u32, most: u32) -> Result<(), Refusal> {
    if wanted <= most {
        return Ok(());
    }
    let message = format!(
        "at most {most} can be granted per controller: create a GPUQueueAllocation that requests fewer, or raise \
         devices.maxGpuQueuePercent of the pool"
    );
    Err(Refusal::new(Reason::OverBudget, message))
}

#[cfg(test)]
mod tests;
