//! How long the reads of one device took, counted in steps that are narrow enough to tell a quantile by.
//!
//! The histogram of the metrics is for graphs: its steps are 78 % wide, and it cannot be read back. These are 1/16 of a doubling wide (6 %),
//! from 1 µs to 134 s: 384 counters, 1.5 KiB a device. Counting is one addition without a lock (hot path: once for each read).
//! Counters only grow, and wrap; who wants a time between two moments subtracts.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Steps of a doubling, as a power of two.
const STEP_BITS: u32 = 4;
const STEPS: usize = 1 << STEP_BITS;

/// Times have so many bits at the most: 2^27 µs are 134 s.
const TIME_BITS: u32 = 27;

/// Below the first doubling a step is one microsecond.
const BUCKETS: usize = (TIME_BITS - STEP_BITS + 1) as usize * STEPS;

/// Counters of one device.
#[derive(Debug)]
pub(crate) struct ReadTimes {
    counts: [AtomicU32; BUCKETS],
}

/// Between which times something lies: both are meant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Between {
    pub(crate) at_least: Duration,
    pub(crate) at_most: Duration,
}

impl Default for ReadTimes {
    fn default() -> ReadTimes {
        ReadTimes { counts: std::array::from_fn(|_| AtomicU32::new(0)) }
    }
}

impl ReadTimes {
    /// Counts one.
    pub(crate) fn note(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.counts[bucket(micros)].fetch_add(1, Ordering::Relaxed);
    }

    /// What has been counted so far, by step.
    pub(crate) fn counts(&self) -> Vec<u32> {
        self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect()
    }
}

/// How many there are, and where the 99th of 100 of them is, by their steps. `None`: there are none.
pub(crate) fn p99(mut counts: impl Iterator<Item = u32> + Clone) -> Option<(u64, Between)> {
    let all: u64 = counts.clone().map(u64::from).sum();
    let rank = (all * 99).div_ceil(100);
    let mut seen = 0;
    let at = counts.position(|count| {
        seen += u64::from(count);
        seen >= rank && all > 0
    });
    at.map(|index| (all, between(index)))
}

fn bucket(micros: u64) -> usize {
    if micros < STEPS as u64 {
        return usize::try_from(micros).unwrap_or(BUCKETS - 1);
    }
    let top = micros.ilog2();
    let step = usize::try_from((micros >> (top - STEP_BITS)) & (STEPS as u64 - 1)).unwrap_or(STEPS - 1);
    ((top - STEP_BITS + 1) as usize * STEPS + step).min(BUCKETS - 1)
}

fn between(index: usize) -> Between {
    let (doubling, step) = (index / STEPS, (index % STEPS) as u64);
    let micros = |from: u64, to: u64| Between {
        at_least: Duration::from_micros(from),
        at_most: Duration::from_micros(to),
    };
    match doubling {
        0 => micros(step, step),
        doubling => {
            let first = STEPS as u64 + step;
            micros(first << (doubling - 1), ((first + 1) << (doubling - 1)) - 1)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_lies_in_its_step_and_steps_follow_each_other() {
        let mut next = 0;
        for index in 0..BUCKETS {
            let Between { at_least, at_most } = between(index);
            assert_eq!(at_least, Duration::from_micros(next), "step {index}");
            let micros = |time: Duration| u64::try_from(time.as_micros()).expect("seconds");
            assert_eq!((bucket(micros(at_least)), bucket(micros(at_most))), (index, index));
            assert!(micros(at_most) - micros(at_least) <= micros(at_least) / 16, "step {index}");
            next = micros(at_most) + 1;
        }
        assert_eq!(next, 1 << TIME_BITS);
        assert_eq!(bucket(u64::MAX), BUCKETS - 1, "longer ones are in the last");
    }

    #[test]
    fn of_a_hundred_times_the_last_but_one_counts() {
        let times = ReadTimes::default();
        assert_eq!(p99(times.counts().into_iter()), None);
        for _ in 0..99 {
            times.note(Duration::from_micros(100));
        }
        times.note(Duration::from_secs(1));
        let (all, at) = p99(times.counts().into_iter()).expect("there are some");
        assert_eq!(all, 100);
        assert!(at.at_least <= Duration::from_micros(100) && at.at_most >= Duration::from_micros(100));
        times.note(Duration::from_secs(1));
        let (_, at) = p99(times.counts().into_iter()).expect("there are some");
        assert!(at.at_least > Duration::from_millis(900) && at.at_most >= Duration::from_secs(1), "{at:?}");
    }
}
