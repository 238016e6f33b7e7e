//! Time and the queue of events of the timed world.
//!
//! Time is a number of nanoseconds since the start of a run, so sums are exact and runs are reproducible. Events of
//! equal time are returned in the order of their insertion.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Nanoseconds in a second.
pub(crate) const SECOND: u64 = 1_000_000_000;

/// Nanoseconds since the start of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Nanos(pub u64);

impl Nanos {
    /// Returns the time after a number of nanoseconds.
    pub fn after(self, nanos: u64) -> Nanos {
        Nanos(self.0.saturating_add(nanos))
    }

    /// Nanoseconds since an earlier time; zero if it is in the future.
    pub fn since(self, earlier: Nanos) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// Converts seconds to nanoseconds, to the nearest; negative times and no numbers are zero.
pub fn nanos(seconds: f64) -> u64 {
    // A cast of a float saturates.
    (seconds * SECOND as f64).round() as u64
}

/// Converts nanoseconds to seconds.
pub fn seconds(nanos: u64) -> f64 {
    nanos as f64 / SECOND as f64
}

/// Queue of events by time, then by insertion.
#[derive(Debug)]
pub struct EventQueue<E> {
    heap: BinaryHeap<Reverse<Entry<E>>>,
    inserted: u64,
    taken: u64,
}

#[derive(Debug)]
struct Entry<E> {
    at: Nanos,
    number: u64,
    event: E,
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}

impl<E> Eq for Entry<E> {}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

impl<E> Default for EventQueue<E> {
    fn default() -> EventQueue<E> {
        EventQueue { heap: BinaryHeap::new(), inserted: 0, taken: 0 }
    }
}

impl<E> EventQueue<E> {
    /// Adds an event at a time.
    pub fn push(&mut self, at: Nanos, event: E) {
        self.heap.push(Reverse(Entry { at, number: self.inserted, event }));
        self.inserted += 1;
    }

    /// Removes and returns the next event.
    pub fn pop(&mut self) -> Option<(Nanos, E)> {
        let Reverse(entry) = self.heap.pop()?;
        self.taken += 1;
        Some((entry.at, entry.event))
    }

    /// Time of the next event.
    pub fn next_at(&self) -> Option<Nanos> {
        self.heap.peek().map(|Reverse(entry)| entry.at)
    }

    /// Number of events that were returned.
    pub fn taken(&self) -> u64 {
        self.taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_equal_time_are_returned_in_insertion_order() {
        let mut queue = EventQueue::default();
        for (at, name) in [(5, "c"), (3, "a"), (5, "d"), (3, "b")] {
            queue.push(Nanos(at), name);
        }
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|(at, name)| (at.0, name)).collect();
        assert_eq!(order, [(3, "a"), (3, "b"), (5, "c"), (5, "d")]);
        assert_eq!(queue.taken(), 4);
    }

    #[test]
    fn seconds_round_to_the_nearest_nanosecond() {
        assert_eq!([nanos(1.5), nanos(4e-10), nanos(-1.0), nanos(f64::NAN)], [1_500_000_000, 0, 0, 0]);
        assert!((seconds(nanos(0.123_456_789)) - 0.123_456_789).abs() < 1e-12);
    }
}
