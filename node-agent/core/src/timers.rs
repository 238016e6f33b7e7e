//! Deadlines of one owner's objects.
//!
//! A timer is removed when its object ends, so there are never more timers than objects.

use std::collections::BTreeSet;

use reprise_policy::Tick;

/// All timers, in the order of time.
#[derive(Debug)]
pub(crate) struct Timers<K> {
    due: BTreeSet<(Tick, K)>,
}

impl<K> Default for Timers<K> {
    fn default() -> Self {
        Timers { due: BTreeSet::new() }
    }
}

impl<K: Ord> Timers<K> {
    /// Sets a timer for a time.
    pub(crate) fn set(&mut self, at: Tick, timer: K) {
        self.due.insert((at, timer));
    }

    /// Removes a timer before it is due.
    pub(crate) fn clear(&mut self, at: Tick, timer: K) {
        self.due.remove(&(at, timer));
    }

    /// Removes and returns the first timer that is due, if any.
    pub(crate) fn pop_due(&mut self, now: Tick) -> Option<K> {
        let (at, _) = self.due.first()?;
        if *at > now {
            return None;
        }
        self.due.pop_first().map(|(_, timer)| timer)
    }

    /// Time of the first timer.
    pub(crate) fn next(&self) -> Option<Tick> {
        self.due.first().map(|(at, _)| *at)
    }

    /// Number of timers that are set.
    pub(crate) fn len(&self) -> usize {
        self.due.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timers_fire_in_order_unless_cleared() {
        let mut timers = Timers::default();
        timers.set(Tick(20), 2);
        timers.set(Tick(10), 1);
        timers.set(Tick(15), 3);
        timers.clear(Tick(15), 3);
        assert_eq!(timers.next(), Some(Tick(10)));
        assert_eq!(timers.pop_due(Tick(9)), None);
        assert_eq!(timers.pop_due(Tick(25)), Some(1));
        assert_eq!(timers.pop_due(Tick(25)), Some(2));
        assert_eq!((timers.pop_due(Tick(25)), timers.len()), (None, 0));
    }
}
