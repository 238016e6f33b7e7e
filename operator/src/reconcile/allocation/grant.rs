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

/// A controller whose queue pairs can be granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LendableController {
    pub serial: String,
    pub pool: String,
    /// Queue pairs that all grants together may use.
    pub budget: u32,
}

/// Queue pairs by serial number of the controller.
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
}

/// The grant of an allocation before the decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClaimState {
    /// No grant, and none is requested.
    Inactive,
    /// No grant yet; one is requested.
    Pending,
    /// A grant that is not ending.
    Granted(Shares),
    /// An ending grant whose queue pairs are not free yet.
    Ending(Shares),
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
    /// It does not fit.
    Waiting(WaitReason),
}

/// Why an allocation waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WaitReason {
    /// The pool has no controller on the node.
    NoController,
    /// The request exceeds the budget of every controller, even an unused one.
    ExceedsController {
        /// The largest request that can be granted.
        most: u32,
    },
    /// These controllers have too few free queue pairs.
    NotEnoughFree(Vec<ControllerUsage>),
    /// A controller is being released for it.
    Preempting(ControllerUsage),
}

/// A controller with its holders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerUsage {
    pub serial: String,
    /// Queue pairs that all grants together may use.
    pub budget: u32,
    /// Names of holders, with their queue pairs.
    pub holders: Vec<(String, u32)>,
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
    pending.sort_by_key(|index| claimants[*index].rank());
    for index in pending {
        ledger.verdicts[index] = match claimants[index].isolation {
            QueueIsolation::TrustedShared => ledger.grant_shared(index),
            QueueIsolation::ExclusiveController => ledger.grant_exclusive(index),
        };
    }
    ledger.verdicts
}

impl Claimant {
    fn rank(&self) -> (QueueQos, i64, &str) {
        (self.qos, self.made, &self.name)
    }

    fn shares(&self) -> &[(String, u32)] {
        match &self.state {
            ClaimState::Inactive | ClaimState::Pending => &[],
            ClaimState::Granted(shares) | ClaimState::Ending(shares) => shares,
        }
    }
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

impl ControllerState<'_> {
    fn free_pairs(&self) -> u32 {
        let held = self.holders.iter().map(|(_, pairs)| *pairs).fold(0, u32::saturating_add);
        self.lender.budget.saturating_sub(held)
    }

    fn is_unused(&self) -> bool {
        self.holders.is_empty() && !self.is_reserved
    }
}

impl<'a> Ledger<'a> {
    fn new(lenders: &'a [LendableController], claimants: &'a [Claimant]) -> Ledger<'a> {
        let holders = |lender: &LendableController| -> Vec<(usize, u32)> {
            let of_it = |claimant: &Claimant| {
                let mut shares = claimant.shares().iter();
                shares.find(|(serial, _)| *serial == lender.serial).map(|(_, pairs)| *pairs)
            };
            let all = claimants.iter().enumerate();
            all.filter_map(|(index, claimant)| Some((index, of_it(claimant)?))).collect()
        };
        let mut controllers: Vec<ControllerState<'a>> = lenders
            .iter()
            .map(|lender| ControllerState { lender, holders: holders(lender), is_reserved: false })
            .collect();
        controllers.sort_by(|a, b| a.lender.serial.cmp(&b.lender.serial));
        Ledger { claimants, controllers, verdicts: vec![Verdict::Unchanged; claimants.len()] }
    }

    /// Grants the requested pairs of every controller of the pool that is not exclusive.
    fn grant_shared(&mut self, index: usize) -> Verdict {
        let wanted = &self.claimants[index];
        let all = self.of_pool(&wanted.pool);
        if all.is_empty() {
            return Verdict::Waiting(WaitReason::NoController);
        }
        let shareable: Vec<usize> = all.iter().copied().filter(|at| !self.is_exclusive(*at)).collect();
        // Every controller grants the same number of pairs, so the smallest budget is the limit.
        let Some(most) = shareable.iter().map(|at| self.controllers[*at].lender.budget).min() else {
            return Verdict::Waiting(WaitReason::NotEnoughFree(self.usages(&all)));
        };
        if most < wanted.pairs {
            return Verdict::Waiting(WaitReason::ExceedsController { most });
        }
        let is_short = |at: &usize| self.controllers[*at].free_pairs() < wanted.pairs;
        let short: Vec<usize> = shareable.iter().copied().filter(is_short).collect();
        if !short.is_empty() {
            return Verdict::Waiting(WaitReason::NotEnoughFree(self.usages(&short)));
        }
        self.grant(index, &shareable)
    }

    /// Grants the requested pairs of one unused controller, or preempts the holders of one.
    fn grant_exclusive(&mut self, index: usize) -> Verdict {
        let wanted = &self.claimants[index];
        let all = self.of_pool(&wanted.pool);
        let budget = |at: &usize| self.controllers[*at].lender.budget;
        let Some(most) = all.iter().map(budget).max() else {
            return Verdict::Waiting(WaitReason::NoController);
        };
        if most < wanted.pairs {
            return Verdict::Waiting(WaitReason::ExceedsController { most });
        }
        let fitting: Vec<usize> = all.iter().copied().filter(|at| budget(at) >= wanted.pairs).collect();
        let unused = fitting.iter().copied().filter(|at| self.controllers[*at].is_unused());
        if let Some(at) = unused.min_by_key(budget) {
            return self.grant(index, &[at]);
        }
        let costs = fitting.iter().copied().filter_map(|at| Some((self.cost(at)?, at)));
        match costs.min() {
            Some((_, at)) if wanted.qos == QueueQos::Guaranteed => self.preempt(index, at),
            _ => Verdict::Waiting(WaitReason::NotEnoughFree(self.usages(&fitting))),
        }
    }

    fn of_pool(&self, pool: &str) -> Vec<usize> {
        (0..self.controllers.len()).filter(|at| self.controllers[*at].lender.pool == pool).collect()
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
        if controller.is_reserved {
            return None;
        }
        let (mut burstable, mut best_effort) = (0, 0);
        for (index, _) in controller.holders.iter().filter(|(index, _)| !self.is_ending(*index)) {
            match self.claimants[*index].qos {
                QueueQos::Guaranteed => return None,
                QueueQos::Burstable => burstable += 1,
                QueueQos::BestEffort => best_effort += 1,
            }
        }
        Some((burstable, best_effort, controller.lender.budget))
    }

    fn is_ending(&self, index: usize) -> bool {
        let is_preempted = matches!(self.verdicts[index], Verdict::Preempted { .. });
        is_preempted || matches!(self.claimants[index].state, ClaimState::Ending(_))
    }

    /// Preempts all holders of a controller, and reserves it.
    fn preempt(&mut self, index: usize, at: usize) -> Verdict {
        for holder in self.controllers[at].holders.iter().map(|(holder, _)| *holder) {
            if !self.is_ending(holder) {
                self.verdicts[holder] = Verdict::Preempted { by: self.claimants[index].name.clone() };
            }
        }
        self.controllers[at].is_reserved = true;
        Verdict::Waiting(WaitReason::Preempting(self.usage(at)))
    }

    fn usages(&self, of: &[usize]) -> Vec<ControllerUsage> {
        of.iter().map(|at| self.usage(*at)).collect()
    }

    fn usage(&self, at: usize) -> ControllerUsage {
        let controller = &self.controllers[at];
        let holder = |(index, pairs): &(usize, u32)| (self.claimants[*index].name.clone(), *pairs);
        let mut holders: Vec<(String, u32)> = controller.holders.iter().map(holder).collect();
        holders.sort();
        ControllerUsage {
            serial: controller.lender.serial.clone(),
            budget: controller.lender.budget,
            holders,
        }
    }
}

#[cfg(test)]
mod tests;
