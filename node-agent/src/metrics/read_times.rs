//! Read latencies of one device, in buckets that are narrow enough to estimate quantiles.
//!
//! The metrics' histogram is for graphs: its buckets are 78 % wide and it cannot be read. These buckets are
//! 1/16 of a power of two wide (6 %) and cover 1 µs to 134 s: 384 counters, 1.5 KiB per device. Recording
//! is one atomic addition without a lock (hot path: once per read). Counters only grow and wrap; for an
//! interval, subtract two snapshots.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// Buckets per power of two, as a power of two.
const STEP_BITS: u32 = 4;
const STEPS: usize = 1 << STEP_BITS;

/// Maximum number of bits of a time: 2^27 µs are 134 s.
const TIME_BITS: u32 = 27;

/// Below the first power of two, a bucket is one microsecond wide.
const BUCKETS: usize = (TIME_BITS - STEP_BITS + 1) as usize * STEPS;

/// Latency counters of one device.
#[derive(Debug)]
pub(crate) struct ReadTimes {
    counts: [AtomicU32; BUCKETS],
}

/// A range of times, bounds included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimeRange {
    pub(crate) at_least: Duration,
    pub(crate) at_most: Duration,
}

impl Default for ReadTimes {
    fn default() -> ReadTimes {
        ReadTimes { counts: std::array::from_fn(|_| AtomicU32::new(0)) }
    }
}

impl ReadTimes {
    pub(crate) fn record(&self, took: Duration) {
        let micros = u64::try_from(took.as_micros()).unwrap_or(u64::MAX);
        self.counts[bucket(micros)].fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the counters by bucket.
    pub(crate) fn counts(&self) -> Vec<u32> {
        self.counts.iter().map(|count| count.load(Ordering::Relaxed)).collect()
    }
}

/// Returns the total count and the bucket of the p99; `None` without counts.
pub(crate) fn p99(mut counts: impl Iterator<Item = u32> + Clone) -> Option<(u64, TimeRange)> {
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

fn between(index: usize) -> TimeRange {
    let (doubling, step) = (index / STEPS, (index % STEPS) as u64);
    let micros = |from: u64, to: u64| TimeRange {
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
    fn every_time_is_in_its_bucket_and_buckets_are_contiguous() {
        let mut next = 0;
        for index in 0..BUCKETS {
            let TimeRange { at_least, at_most } = between(index);
            assert_eq!(at_least, Duration::from_micros(next), "bucket {index}");
            let micros = |time: Duration| u64::try_from(time.as_micros()).expect("seconds");
            assert_eq!((bucket(micros(at_least)), bucket(micros(at_most))), (index, index));
            assert!(micros(at_most) - micros(at_least) <= micros(at_least) / 16, "bucket {index}");
            next = micros(at_most) + 1;
        }
        assert_eq!(next, 1 << TIME_BITS);
        assert_eq!(bucket(u64::MAX), BUCKETS - 1, "longer times are in the last bucket");
    }

    #[test]
    fn p99_of_a_hundred_times_is_the_second_largest() {
        let times = ReadTimes::default();
        assert_eq!(p99(times.counts().into_iter()), None);
        for _ in 0..99 {
            times.record(Duration::from_micros(100));
        }
        times.record(Duration::from_secs(1));
        let (all, at) = p99(times.counts().into_iter()).expect("there are some");
        assert_eq!(all, 100);
        assert!(at.at_least <= Duration::from_micros(100) && at.at_most >= Duration::from_micros(100));
        times.record(Duration::from_secs(1));
        let (_, at) = p99(times.counts().into_iter()).expect("there are some");
        assert!(at.at_least > Duration::from_millis(900) && at.at_most >= Duration::from_secs(1), "{at:?}");
    }
}
