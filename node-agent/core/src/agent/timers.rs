//! Deadlines of loads, lookups, serves, reservations, questions of placement and offers.
//!
//! Every timer is removed when what it guards ends, so there are never more than there are guarded things.

use std::collections::BTreeSet;

use reprise_policy::Tick;

use super::slab::SlabId;
use crate::effect::ServeId;

/// What is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// A load's deadline.
    Load(SlabId),
    /// The directory has not answered.
    Lookup(SlabId),
    /// A peer has given up by now.
    Serve(ServeId),
    /// Slots that one call reserved were not committed.
    Reservations(SlabId),
    /// The control plane has not said where blocks go.
    Place(SlabId),
    /// A peer has not answered an offer.
    Offer(SlabId),
}

/// Timers in order of time.
#[derive(Debug, Default)]
pub(super) struct Timers {
    due: BTreeSet<(Tick, Timer)>,
}

impl Timers {
    /// Sets a timer.
    pub(super) fn set(&mut self, at: Tick, timer: Timer) {
        self.due.insert((at, timer));
    }

    /// Takes a timer back.
    pub(super) fn clear(&mut self, at: Tick, timer: Timer) {
        self.due.remove(&(at, timer));
    }

    /// Takes the first timer that is due, if any is.
    pub(super) fn pop_due(&mut self, now: Tick) -> Option<Timer> {
        let (at, _) = self.due.first()?;
        if *at > now {
            return None;
        }
        self.due.pop_first().map(|(_, timer)| timer)
    }

    /// The instant of the first timer.
    pub(super) fn next(&self) -> Option<Tick> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Timers that are set.
    pub(super) fn len(&self) -> usize {
        self.due.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_come_due_in_order_and_cleared_ones_never() {
        let mut timers = Timers::default();
        timers.set(Tick(20), Timer::Serve(ServeId(2)));
        timers.set(Tick(10), Timer::Serve(ServeId(1)));
        timers.set(Tick(15), Timer::Load(SlabId(1)));
        timers.clear(Tick(15), Timer::Load(SlabId(1)));
        assert_eq!(timers.next(), Some(Tick(10)));
        assert_eq!(timers.pop_due(Tick(9)), None);
        assert_eq!(timers.pop_due(Tick(25)), Some(Timer::Serve(ServeId(1))));
        assert_eq!(timers.pop_due(Tick(25)), Some(Timer::Serve(ServeId(2))));
        assert_eq!((timers.pop_due(Tick(25)), timers.len()), (None, 0));
    }
}
