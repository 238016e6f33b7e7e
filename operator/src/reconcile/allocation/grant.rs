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
//!   grant. If an agent still holds queue pairs, the controller is reserved for the preempting allocation
//!   until the agent has released them.

use reprise_crds::fields::Percent;
use reprise_crds::queues::{QueueIsolation, QueueQos};

/// A controller whose queue pairs can be granted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LendableController {
    /// Serial number of the controller.
    pub serial: String,
    /// Name of its pool.
    pub pool: String,
    /// Queue pairs that all grants together may use.
    pub budget: u32,
}

/// Queue pairs of one controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Serial number of the controller.
    pub serial: String,
    /// Number of queue pairs.
    pub pairs: u32,
}

/// An allocation as an input to the decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimant {
    /// Name of the allocation as `namespace/name`.
    pub name: String,
    /// Creation time in seconds since the epoch.
    pub made: i64,
    /// Name of the requested pool.
    pub pool: String,
    /// Requested queue pairs per controller.
    pub pairs: u32,
    /// Class, which determines order and preemption.
    pub qos: QueueQos,
    /// Whether it shares controllers.
    pub isolation: QueueIsolation,
    /// Its current grant, if there is one.
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
    Granted {
        /// The granted queue pairs.
        shares: Vec<Share>,
        /// Whether the agent holds queue pairs of it.
        queues: QueueState,
    },
    /// An ending grant whose queue pairs are not free yet.
    Ending(Vec<Share>),
}

/// Whether an agent holds queue pairs of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueState {
    /// It does, or may.
    InUse,
    /// It holds no queue pairs.
    None,
}

/// The decision on one allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Its grant stays as it is.
    Unchanged,
    /// It gets this grant.
    Granted(Vec<Share>),
    /// Its grant ends in favor of another allocation.
    Preempted {
        /// Name of the other allocation.
        by: String,
    },
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
    /// Serial number of the controller.
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
    let mut waiting: Vec<usize> =
        (0..claimants.len()).filter(|index| claimants[*index].state == ClaimState::Pending).collect();
    waiting.sort_by_cached_key(|index| claimants[*index].rank());
    // Repeat after each grant: an exclusive grant on a small controller no longer limits shared requests.
    loop {
        for index in &waiting {
            ledger.verdicts[*index] = ledger.decide(*index);
        }
        let before = waiting.len();
        waiting.retain(|index| !matches!(ledger.verdicts[*index], Verdict::Granted(_)));
        if waiting.len() == before {
            return ledger.verdicts;
        }
    }
}

impl Claimant {
    fn rank(&self) -> (QueueQos, i64, String) {
        (self.qos, self.made, self.name.clone())
    }

    fn shares(&self) -> &[Share] {
        match &self.state {
            ClaimState::Inactive | ClaimState::Pending => &[],
            ClaimState::Granted { shares, .. } | ClaimState::Ending(shares) => shares,
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
    /// Claimant that gets the controller once it is released.
    reserved_for: Option<usize>,
}

/// Cost of making a controller available. Fields are compared in order; less is better.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    /// `Burstable` holders to preempt.
    burstable: usize,
    /// `BestEffort` holders to preempt.
    best_effort: usize,
    /// Holders whose queue pairs the agent must release first; counted only if there are holders to preempt.
    pending_release: usize,
    /// Queue pairs of the controller's budget.
    budget: u32,
}

impl ControllerState<'_> {
    fn free_pairs(&self) -> u32 {
        let held = self.holders.iter().map(|(_, pairs)| *pairs).fold(0, u32::saturating_add);
        self.lender.budget.saturating_sub(held)
    }
}

impl<'a> Ledger<'a> {
    fn new(lenders: &'a [LendableController], claimants: &'a [Claimant]) -> Ledger<'a> {
        let holders = |lender: &LendableController| -> Vec<(usize, u32)> {
            let has = |claimant: &Claimant| {
                let share = claimant.shares().iter().find(|share| share.serial == lender.serial);
                share.map(|share| share.pairs)
            };
            let all = claimants.iter().enumerate();
            all.filter_map(|(index, claimant)| Some((index, has(claimant)?))).collect()
        };
        let mut controllers: Vec<ControllerState<'a>> = lenders
            .iter()
            .map(|lender| ControllerState { lender, holders: holders(lender), reserved_for: None })
            .collect();
        controllers.sort_by(|a, b| a.lender.serial.cmp(&b.lender.serial));
        Ledger { claimants, controllers, verdicts: vec![Verdict::Unchanged; claimants.len()] }
    }

    fn decide(&mut self, index: usize) -> Verdict {
        for controller in
            self.controllers.iter_mut().filter(|controller| controller.reserved_for == Some(index))
        {
            // A reservation of the previous round is decided again.
            controller.reserved_for = None;
        }
        match self.claimants[index].isolation {
            QueueIsolation::TrustedShared => self.grant_shared(index),
            QueueIsolation::ExclusiveController => self.grant_exclusive(index),
        }
    }

    /// Grants the requested pairs of every controller of the pool that is not exclusive.
    fn grant_shared(&mut self, index: usize) -> Verdict {
        let claimants = self.claimants;
        let wanted = &claimants[index];
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
        let short: Vec<usize> = shareable
            .iter()
            .copied()
            .filter(|at| self.controllers[*at].free_pairs() < wanted.pairs)
            .collect();
        if !short.is_empty() {
            return Verdict::Waiting(WaitReason::NotEnoughFree(self.usages(&short)));
        }
        self.grant(index, &shareable)
    }

    /// Grants the requested pairs of one unused controller.
    fn grant_exclusive(&mut self, index: usize) -> Verdict {
        let claimants = self.claimants;
        let wanted = &claimants[index];
        let all = self.of_pool(&wanted.pool);
        let Some(most) = all.iter().map(|at| self.controllers[*at].lender.budget).max() else {
            return Verdict::Waiting(WaitReason::NoController);
        };
        if most < wanted.pairs {
            return Verdict::Waiting(WaitReason::ExceedsController { most });
        }
        let fits = |at: &usize| self.controllers[*at].lender.budget >= wanted.pairs;
        let fitting: Vec<usize> = all.iter().copied().filter(fits).collect();
        if let Some(at) = self.smallest_free(&fitting) {
            return self.grant(index, &[at]);
        }
        let costs = fitting.iter().copied().filter_map(|at| Some((self.cost(at)?, at)));
        match costs.min() {
            Some((_, at)) if wanted.qos == QueueQos::Guaranteed => {
                self.preempt_controller(index, at, &fitting)
            }
            _ => Verdict::Waiting(WaitReason::NotEnoughFree(self.usages(&fitting))),
        }
    }

    /// Returns the unused controller with the smallest budget.
    fn smallest_free(&self, of: &[usize]) -> Option<usize> {
        let is_free = |at: &usize| {
            self.controllers[*at].holders.is_empty() && self.controllers[*at].reserved_for.is_none()
        };
        of.iter().copied().filter(is_free).min_by_key(|at| self.controllers[*at].lender.budget)
    }

    fn of_pool(&self, pool: &str) -> Vec<usize> {
        (0..self.controllers.len()).filter(|at| self.controllers[*at].lender.pool == pool).collect()
    }

    /// Whether a controller is held or reserved by an exclusive allocation.
    fn is_exclusive(&self, at: usize) -> bool {
        let controller = &self.controllers[at];
        let wants_exclusive =
            |index: usize| self.claimants[index].isolation == QueueIsolation::ExclusiveController;
        controller.reserved_for.is_some()
            || controller.holders.iter().any(|(index, _)| wants_exclusive(*index))
    }

    fn grant(&mut self, index: usize, of: &[usize]) -> Verdict {
        let pairs = self.claimants[index].pairs;
        let mut shares = Vec::new();
        for at in of {
            let controller = &mut self.controllers[*at];
            controller.holders.push((index, pairs));
            shares.push(Share { serial: controller.lender.serial.clone(), pairs });
        }
        Verdict::Granted(shares)
    }

    /// Returns the cost of making a controller available; `None` if a guaranteed holder or a reservation
    /// prevents it.
    fn cost(&self, at: usize) -> Option<Cost> {
        let controller = &self.controllers[at];
        if controller.reserved_for.is_some() {
            return None;
        }
        let mut cost = Cost { budget: controller.lender.budget, ..Cost::default() };
        for index in controller.holders.iter().map(|(index, _)| *index) {
            let has_queues =
                matches!(self.claimants[index].state, ClaimState::Granted { queues: QueueState::InUse, .. });
            if self.is_releasing(index) {
                cost.pending_release += 1;
                continue;
            }
            cost.pending_release += usize::from(has_queues);
            match self.claimants[index].qos {
                QueueQos::Guaranteed => return None,
                QueueQos::Burstable => cost.burstable += 1,
                QueueQos::BestEffort => cost.best_effort += 1,
            }
        }
        if cost.burstable + cost.best_effort == 0 {
            // Nothing to preempt: ignore pending releases, so that the claimant chooses the same controller
            // in every pass and leaves larger ones to others.
            cost.pending_release = 0;
        }
        Some(cost)
    }

    fn is_releasing(&self, index: usize) -> bool {
        let is_taken = matches!(self.verdicts[index], Verdict::Preempted { .. });
        is_taken || matches!(self.claimants[index].state, ClaimState::Ending(_))
    }

    /// Preempts all holders of a controller, then grants or reserves it.
    fn preempt_controller(&mut self, index: usize, at: usize, fitting: &[usize]) -> Verdict {
        let holders = self.controllers[at].holders.iter().map(|(holder, _)| *holder);
        let leaving: Vec<usize> = holders.filter(|holder| !self.is_releasing(*holder)).collect();
        for holder in leaving {
            self.preempt(holder, index);
        }
        if let Some(free) = self.smallest_free(fitting) {
            return self.grant(index, &[free]);
        }
        self.controllers[at].reserved_for = Some(index);
        Verdict::Waiting(WaitReason::Preempting(self.usage(at)))
    }

    /// Queue pairs of a grant that no agent holds are free immediately.
    fn preempt(&mut self, holder: usize, by: usize) {
        self.verdicts[holder] = Verdict::Preempted { by: self.claimants[by].name.clone() };
        if !matches!(self.claimants[holder].state, ClaimState::Granted { queues: QueueState::InUse, .. }) {
            for controller in &mut self.controllers {
                controller.holders.retain(|(index, _)| *index != holder);
            }
        }
    }

    fn usages(&self, of: &[usize]) -> Vec<ControllerUsage> {
        of.iter().map(|at| self.usage(*at)).collect()
    }

    fn usage(&self, at: usize) -> ControllerUsage {
        let controller = &self.controllers[at];
        let holders =
            controller.holders.iter().map(|(index, pairs)| (self.claimants[*index].name.clone(), *pairs));
        let mut holders: Vec<(String, u32)> = holders.collect();
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
