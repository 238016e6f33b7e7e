//! Deadlines of loads, lookups, serves, reservations, placement queries and offers.
//!
//! A timer is removed when its object ends, so there are never more timers than objects.

use std::collections::BTreeSet;

use reprise_policy::Tick;

use super::slab::SlabId;
use crate::effect::ServeId;

/// Object whose deadline has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Timer {
    /// A load reached its deadline or its maximum hold time.
    Load(SlabId),
    /// The directory did not answer a lookup.
    Lookup(SlabId),
    /// The peer has given up its request.
    Serve(ServeId),
    /// The slots of one `Reserve` call were not committed.
    Reservations(SlabId),
    /// The control plane did not answer a placement query.
    Place(SlabId),
    /// A peer did not answer an offer.
    Offer(SlabId),
}

/// All timers, in the order of time.
#[derive(Debug, Default)]
pub(super) struct Timers {
    due: BTreeSet<(Tick, Timer)>,
}

impl Timers {
    /// Sets a timer for a time.
    pub(super) fn set(&mut self, at: Tick, timer: Timer) {
        self.due.insert((at, timer));
    }

    /// Removes a timer before it is due.
    pub(super) fn clear(&mut self, at: Tick, timer: Timer) {
        self.due.remove(&(at, timer));
    }

    /// Removes and returns the first timer that is due, if any.
    pub(super) fn pop_due(&mut self, now: Tick) -> Option<Timer> {
        let (at, _) = self.due.first()?;
        if *at > now {
            return None;
        }
        self.due.pop_first().map(|(_, timer)| timer)
    }

    /// Time of the first timer.
    pub(super) fn next(&self) -> Option<Tick> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Number of timers that are set.
    pub(super) fn len(&self) -> usize {
        self.due.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_fire_in_order_unless_cleared() {
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
