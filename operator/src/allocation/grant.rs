//! Who gets how many queue pairs of which controllers of one node. Pure: of the same facts comes the same decision.
//!
//! Who wants something is served in this order: `Guaranteed`, `Burstable`, `BestEffort`; of one class the oldest first, then by name. Whoever
//! fits gets what it asks for, whole, so that no room stays empty for somebody who does not fit.
//!
//! * `TrustedShared`: so many pairs of each controller of the pool that nobody has for himself. Nothing is taken back for it.
//! * `ExclusiveController`: so many pairs of one controller that nobody else has anything of; of several the one that lends the fewest.
//! * A `Guaranteed` one that finds none takes a controller back: that which the fewest `Burstable` ones have to leave, then the fewest of
//!   `BestEffort`. They give back all that they have, since a grant is whole. Where an agent has something of them, the controller is kept
//!   for the one that waits, until it has let go of it.

use reprise_crds::fields::Percent;
use reprise_crds::queues::{QueueIsolation, QueueQos};

/// A controller of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lender {
    /// Its serial number.
    pub serial: String,
    /// The pool that it belongs to.
    pub pool: String,
    /// Queue pairs of it that may be lent, all grants together.
    pub budget: u32,
}

/// Queue pairs of one controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    /// Serial number of the controller.
    pub serial: String,
    /// How many.
    pub pairs: u32,
}

/// An allocation of the node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claimant {
    /// `namespace/name`.
    pub name: String,
    /// When it was made, in seconds.
    pub made: i64,
    /// The pool whose controllers it is about.
    pub pool: String,
    /// Queue pairs that it asks for, of each controller.
    pub pairs: u32,
    /// Who gives way.
    pub qos: QueueQos,
    /// Who else may use its controllers.
    pub isolation: QueueIsolation,
    /// What it has.
    pub has: Hold,
}

/// What an allocation has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Hold {
    /// Nothing, and is given nothing.
    Nothing,
    /// Nothing yet.
    Wants,
    /// A grant.
    Stands {
        /// What was granted.
        shares: Vec<Share>,
        /// Whether its agent has something of it.
        queues: Queues,
    },
    /// A grant that ends, and whose room is not free yet.
    Ends(Vec<Share>),
}

/// Whether an agent has something of a grant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queues {
    /// It has, or may have.
    Kept,
    /// It has nothing.
    None,
}

/// What becomes of an allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It has what it had.
    Stays,
    /// It gets this.
    Granted(Vec<Share>),
    /// Its grant ends, since this one needs a controller.
    TakenBack {
        /// Name of the other.
        by: String,
    },
    /// It does not fit.
    Waits(Wait),
}

/// Why an allocation waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The pool has no controller on the node.
    NoController,
    /// No controller lends so many, whoever else has some of it.
    TooMany {
        /// What could be asked for.
        most: u32,
    },
    /// These controllers have too little left.
    Short(Vec<Full>),
    /// A controller is being given back for it.
    Coming(Full),
}

/// A controller, and who has some of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Full {
    /// Its serial number.
    pub serial: String,
    /// Queue pairs that may be lent.
    pub budget: u32,
    /// Names, and how many each has.
    pub holders: Vec<(String, u32)>,
}

/// Queue pairs of a controller that may be lent.
pub fn budget(pairs: u32, percent: Percent) -> u32 {
    u32::try_from(u64::from(pairs) * u64::from(percent.0) / 100).unwrap_or(u32::MAX)
}

/// Decides; one verdict for each claimant, in their order.
pub fn decide(lenders: &[Lender], claimants: &[Claimant]) -> Vec<Verdict> {
    let mut book = Book::open(lenders, claimants);
    let mut waiting: Vec<usize> =
        (0..claimants.len()).filter(|who| claimants[*who].has == Hold::Wants).collect();
    waiting.sort_by_cached_key(|who| claimants[*who].rank());
    // Once more after each grant: who takes a small controller for himself takes it out of the way of others.
    loop {
        for who in &waiting {
            book.verdicts[*who] = book.serve(*who);
        }
        let before = waiting.len();
        waiting.retain(|who| !matches!(book.verdicts[*who], Verdict::Granted(_)));
        if waiting.len() == before {
            return book.verdicts;
        }
    }
}

impl Claimant {
    fn rank(&self) -> (QueueQos, i64, String) {
        (self.qos, self.made, self.name.clone())
    }

    fn shares(&self) -> &[Share] {
        match &self.has {
            Hold::Nothing | Hold::Wants => &[],
            Hold::Stands { shares, .. } | Hold::Ends(shares) => shares,
        }
    }
}

/// What was decided so far. Controllers and claimants are meant by their places in the lists.
struct Book<'a> {
    claimants: &'a [Claimant],
    /// In the order of their serial numbers.
    desks: Vec<Desk<'a>>,
    verdicts: Vec<Verdict>,
}

/// A controller.
struct Desk<'a> {
    lender: &'a Lender,
    /// Who has how many of it.
    holders: Vec<(usize, u32)>,
    /// Who waits until it is given back, and has it then.
    kept: Option<usize>,
}

/// What it would take to have a controller; less is better, the first fields before the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Cost {
    /// `Burstable` ones that would have to leave it.
    burstable: usize,
    /// And those of `BestEffort`.
    best_effort: usize,
    /// Holders whose queues are to be destroyed first, where somebody has to leave.
    late: usize,
    /// Queue pairs that it lends.
    budget: u32,
}

impl Desk<'_> {
    fn left(&self) -> u32 {
        let held = self.holders.iter().map(|(_, pairs)| *pairs).fold(0, u32::saturating_add);
        self.lender.budget.saturating_sub(held)
    }
}

impl<'a> Book<'a> {
    fn open(lenders: &'a [Lender], claimants: &'a [Claimant]) -> Book<'a> {
        let holders = |lender: &Lender| -> Vec<(usize, u32)> {
            let has = |claimant: &Claimant| {
                let share = claimant.shares().iter().find(|share| share.serial == lender.serial);
                share.map(|share| share.pairs)
            };
            let all = claimants.iter().enumerate();
            all.filter_map(|(who, claimant)| Some((who, has(claimant)?))).collect()
        };
        let mut desks: Vec<Desk<'a>> =
            lenders.iter().map(|lender| Desk { lender, holders: holders(lender), kept: None }).collect();
        desks.sort_by(|a, b| a.lender.serial.cmp(&b.lender.serial));
        Book { claimants, desks, verdicts: vec![Verdict::Stays; claimants.len()] }
    }

    fn serve(&mut self, who: usize) -> Verdict {
        for desk in self.desks.iter_mut().filter(|desk| desk.kept == Some(who)) {
            desk.kept = None;
        }
        match self.claimants[who].isolation {
            QueueIsolation::TrustedShared => self.share(who),
            QueueIsolation::ExclusiveController => self.own(who),
        }
    }

    /// Pairs of each controller that nobody has for himself.
    fn share(&mut self, who: usize) -> Verdict {
        let claimants = self.claimants;
        let wanted = &claimants[who];
        let all = self.of_pool(&wanted.pool);
        if all.is_empty() {
            return Verdict::Waits(Wait::NoController);
        }
        let open: Vec<usize> = all.iter().copied().filter(|at| !self.is_somebodys(*at)).collect();
        let Some(most) = open.iter().map(|at| self.desks[*at].lender.budget).min() else {
            return Verdict::Waits(Wait::Short(self.full(&all)));
        };
        if most < wanted.pairs {
            return Verdict::Waits(Wait::TooMany { most });
        }
        let short: Vec<usize> =
            open.iter().copied().filter(|at| self.desks[*at].left() < wanted.pairs).collect();
        if !short.is_empty() {
            return Verdict::Waits(Wait::Short(self.full(&short)));
        }
        self.lend(who, &open)
    }

    /// Pairs of one controller that nobody else has anything of.
    fn own(&mut self, who: usize) -> Verdict {
        let claimants = self.claimants;
        let wanted = &claimants[who];
        let all = self.of_pool(&wanted.pool);
        let Some(most) = all.iter().map(|at| self.desks[*at].lender.budget).max() else {
            return Verdict::Waits(Wait::NoController);
        };
        if most < wanted.pairs {
            return Verdict::Waits(Wait::TooMany { most });
        }
        let lends = |at: &usize| self.desks[*at].lender.budget >= wanted.pairs;
        let fitting: Vec<usize> = all.iter().copied().filter(lends).collect();
        if let Some(at) = self.free(&fitting) {
            return self.lend(who, &[at]);
        }
        let costs = fitting.iter().copied().filter_map(|at| Some((self.cost(at)?, at)));
        match costs.min() {
            Some((_, at)) if wanted.qos == QueueQos::Guaranteed => self.take(who, at, &fitting),
            _ => Verdict::Waits(Wait::Short(self.full(&fitting))),
        }
    }

    /// Of controllers that nobody has anything of, the one that lends the fewest.
    fn free(&self, of: &[usize]) -> Option<usize> {
        let is_free = |at: &usize| self.desks[*at].holders.is_empty() && self.desks[*at].kept.is_none();
        of.iter().copied().filter(is_free).min_by_key(|at| self.desks[*at].lender.budget)
    }

    fn of_pool(&self, pool: &str) -> Vec<usize> {
        (0..self.desks.len()).filter(|at| self.desks[*at].lender.pool == pool).collect()
    }

    /// Whether somebody has the controller for himself, or waits for it so.
    fn is_somebodys(&self, at: usize) -> bool {
        let desk = &self.desks[at];
        let is_exclusive = |who: usize| self.claimants[who].isolation == QueueIsolation::ExclusiveController;
        desk.kept.is_some() || desk.holders.iter().any(|(who, _)| is_exclusive(*who))
    }

    fn lend(&mut self, who: usize, of: &[usize]) -> Verdict {
        let pairs = self.claimants[who].pairs;
        let mut shares = Vec::new();
        for at in of {
            let desk = &mut self.desks[*at];
            desk.holders.push((who, pairs));
            shares.push(Share { serial: desk.lender.serial.clone(), pairs });
        }
        Verdict::Granted(shares)
    }

    /// What it would take to have a controller; nothing where somebody stays who cannot be made to leave.
    fn cost(&self, at: usize) -> Option<Cost> {
        let desk = &self.desks[at];
        if desk.kept.is_some() {
            return None;
        }
        let mut cost = Cost { budget: desk.lender.budget, ..Cost::default() };
        for who in desk.holders.iter().map(|(who, _)| *who) {
            let has_queues = matches!(self.claimants[who].has, Hold::Stands { queues: Queues::Kept, .. });
            if self.is_leaving(who) {
                cost.late += 1;
                continue;
            }
            cost.late += usize::from(has_queues);
            match self.claimants[who].qos {
                QueueQos::Guaranteed => return None,
                QueueQos::Burstable => cost.burstable += 1,
                QueueQos::BestEffort => cost.best_effort += 1,
            }
        }
        if cost.burstable + cost.best_effort == 0 {
            // Who waits for one of several such controllers takes the same one each time, and leaves those that lend more to others.
            cost.late = 0;
        }
        Some(cost)
    }

    fn is_leaving(&self, who: usize) -> bool {
        let is_taken = matches!(self.verdicts[who], Verdict::TakenBack { .. });
        is_taken || matches!(self.claimants[who].has, Hold::Ends(_))
    }

    /// Makes everybody leave a controller, for somebody who has it then or waits for it.
    fn take(&mut self, who: usize, at: usize, fitting: &[usize]) -> Verdict {
        let holders = self.desks[at].holders.iter().map(|(holder, _)| *holder);
        let leaving: Vec<usize> = holders.filter(|holder| !self.is_leaving(*holder)).collect();
        for holder in leaving {
            self.take_back(holder, who);
        }
        if let Some(free) = self.free(fitting) {
            return self.lend(who, &[free]);
        }
        self.desks[at].kept = Some(who);
        Verdict::Waits(Wait::Coming(self.look(at)))
    }

    /// Of a grant without queues the room is free at once.
    fn take_back(&mut self, holder: usize, by: usize) {
        self.verdicts[holder] = Verdict::TakenBack { by: self.claimants[by].name.clone() };
        if !matches!(self.claimants[holder].has, Hold::Stands { queues: Queues::Kept, .. }) {
            for desk in &mut self.desks {
                desk.holders.retain(|(who, _)| *who != holder);
            }
        }
    }

    fn full(&self, of: &[usize]) -> Vec<Full> {
        of.iter().map(|at| self.look(*at)).collect()
    }

    fn look(&self, at: usize) -> Full {
        let desk = &self.desks[at];
        let holders = desk.holders.iter().map(|(who, pairs)| (self.claimants[*who].name.clone(), *pairs));
        let mut holders: Vec<(String, u32)> = holders.collect();
        holders.sort();
        Full { serial: desk.lender.serial.clone(), budget: desk.lender.budget, holders }
    }
}

#[cfg(test)]
mod tests;
