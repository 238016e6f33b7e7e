//! Finds devices whose reads take longer than their pools allow.
//!
//! ```text
//!   fast ── 100 reads within a minute, and their p99 above the limit ──► slow
//!   slow ── p99 at or below 4/5 of the limit, no reads, or no limit ──► fast
//! ```
//!
//! Between the two thresholds the verdict does not change, so a device near its limit does not alternate. A
//! slow device with fewer than 100 reads is judged by the reads that it has. A slow device is reported and
//! stays in use.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use reprise_agent_core::effect::DeviceId;

use crate::metrics::{ReadTimes, TimeRange, p99};

/// Length of the window of reads.
const WINDOW: Duration = Duration::from_secs(60);

/// Step of the window: seven snapshots of 1.5 KiB for each device.
const STEP: Duration = Duration::from_secs(10);

/// Minimum number of reads for a p99.
const READS_MIN: u64 = 100;

/// The reported p99 changes only if it is off by a quarter, because each change causes a status write.
const REPORT_TOLERANCE_DIVISOR: u32 = 4;

/// Read latencies of all devices with a limit.
#[derive(Debug, Default)]
pub(in super::super) struct LatencyMonitor {
    devices: BTreeMap<DeviceId, Watched>,
}

/// Read latency of a device with a limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct LatencyReading {
    /// p99 of the reads of the last minute, in microseconds; `None` without reads.
    pub(in super::super) p99_micros: Option<u32>,
    /// Why the device is slow, if it is.
    pub(in super::super) slow: Option<String>,
}

#[derive(Debug)]
struct Watched {
    times: Arc<ReadTimes>,
    /// Counters at the steps of the window, oldest first.
    seen: VecDeque<(Instant, Vec<u32>)>,
    reported_p99: Option<u32>,
    verdict: Verdict,
    allowed: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Fast,
    Slow,
}

impl LatencyMonitor {
    /// Updates the verdicts of the open devices with their latency limits; other devices are dropped.
    /// `times` returns a device's counters.
    pub(in super::super) fn update(
        &mut self,
        now: Instant,
        open: &BTreeMap<DeviceId, Duration>,
        times: impl Fn(DeviceId) -> Option<Arc<ReadTimes>>,
    ) {
        self.devices.retain(|id, _| open.contains_key(id));
        for (id, allowed) in open {
            let Some(times) = times(*id) else { continue };
            let new = |times: Arc<ReadTimes>| Watched {
                times,
                seen: VecDeque::new(),
                reported_p99: None,
                verdict: Verdict::Fast,
                allowed: *allowed,
            };
            let watched = self.devices.entry(*id).or_insert_with(|| new(Arc::clone(&times)));
            // The device number was reassigned.
            if !Arc::ptr_eq(&watched.times, &times) {
                *watched = new(times);
            }
            watched.update(now, *allowed);
        }
    }

    /// Returns the latency of a device, if its pool has a limit.
    pub(in super::super) fn of(&self, id: DeviceId) -> Option<LatencyReading> {
        let watched = self.devices.get(&id)?;
        let slow = (watched.verdict == Verdict::Slow).then(|| {
            let millis = watched.reported_p99.unwrap_or_default().div_ceil(1000);
            let allowed = watched.allowed.as_millis();
            format!("the p99 of reads in the last minute is about {millis} ms; its pool allows {allowed} ms")
        });
        Some(LatencyReading { p99_micros: watched.reported_p99, slow })
    }
}

impl Watched {
    fn update(&mut self, now: Instant, allowed: Duration) {
        let counts = self.times.counts();
        if self.seen.back().is_none_or(|(when, _)| now.duration_since(*when) >= STEP) {
            self.seen.push_back((now, counts.clone()));
        }
        while self.seen.get(1).is_some_and(|(when, _)| now.duration_since(*when) >= WINDOW) {
            self.seen.pop_front();
        }
        let before = self.seen.front().map(|(_, counts)| counts.as_slice()).unwrap_or_default();
        let of_window = counts.iter().zip(before).map(|(now, before)| now.wrapping_sub(*before));
        let found = p99(of_window);
        let verdict = judge(self.verdict, found, allowed);
        let p99 = found.map(|(_, at)| u32::try_from(at.at_most.as_micros()).unwrap_or(u32::MAX));
        let is_near = match (self.reported_p99, p99) {
            (Some(reported_p99), Some(p99)) => {
                reported_p99.abs_diff(p99) <= reported_p99 / REPORT_TOLERANCE_DIVISOR
            }
            (reported_p99, p99) => reported_p99 == p99,
        };
        if !is_near || verdict != self.verdict {
            self.reported_p99 = p99;
        }
        (self.verdict, self.allowed) = (verdict, allowed);
    }
}

fn judge(was: Verdict, found: Option<(u64, TimeRange)>, allowed: Duration) -> Verdict {
    let Some((reads, at)) = found else { return Verdict::Fast };
    let is_slow = match was {
        Verdict::Fast => reads >= READS_MIN && at.at_least > allowed,
        Verdict::Slow => at.at_most > allowed * 4 / 5,
    };
    if is_slow { Verdict::Slow } else { Verdict::Fast }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOWED: Duration = Duration::from_millis(50);
    const ID: DeviceId = DeviceId(3);

    /// One device, and a clock that the test advances.
    struct Fixture {
        times: Arc<ReadTimes>,
        monitor: LatencyMonitor,
        now: Instant,
    }

    impl Fixture {
        fn new() -> Fixture {
            let mut fixture = Fixture {
                times: Arc::new(ReadTimes::default()),
                monitor: LatencyMonitor::default(),
                now: Instant::now(),
            };
            fixture.update();
            fixture
        }

        fn update(&mut self) -> LatencyReading {
            let (open, times) = (BTreeMap::from([(ID, ALLOWED)]), Arc::clone(&self.times));
            self.monitor.update(self.now, &open, |_| Some(Arc::clone(&times)));
            self.monitor.of(ID).expect("its pool has a limit")
        }

        /// Records `count` reads of `millis` ms, then advances the clock by `then` without reads.
        fn reads(&mut self, count: usize, millis: u64, then: Duration) -> LatencyReading {
            for _ in 0..count {
                self.times.record(Duration::from_millis(millis));
            }
            let reading = self.update();
            for _ in 0..then.as_secs() {
                self.now += Duration::from_secs(1);
                self.update();
            }
            reading
        }
    }

    #[test]
    fn device_is_slow_after_100_slow_reads_until_it_is_clearly_faster() {
        let mut fixture = Fixture::new();
        assert_eq!(fixture.update(), LatencyReading { p99_micros: None, slow: None });
        assert_eq!(fixture.reads(99, 80, Duration::ZERO).slow, None, "too few reads");
        let reading = fixture.reads(1, 80, WINDOW + STEP);
        let words = reading.slow.expect("it is slow");
        assert!(words.contains("allows 50 ms") && words.contains("about 8"), "{words}");
        assert!(reading.p99_micros.is_some_and(|micros| (80_000..86_000).contains(&micros)));

        assert!(fixture.update().slow.is_none(), "there are no reads");
        fixture.reads(100, 80, WINDOW + STEP);
        // The device is fast again by now, and 45 ms is below the limit.
        assert_eq!(fixture.reads(100, 45, Duration::ZERO).slow, None);
    }

    #[test]
    fn verdict_does_not_change_between_the_two_thresholds() {
        let mut fixture = Fixture::new();
        fixture.reads(100, 80, Duration::from_secs(55));
        // The slow reads leave the window during this time.
        fixture.reads(200, 45, Duration::from_secs(20));
        assert!(fixture.update().slow.is_some(), "slow enough to stay slow");
        fixture.reads(20_000, 30, Duration::ZERO);
        assert_eq!(fixture.update().slow, None, "clearly faster");
    }

    #[test]
    fn reported_p99_changes_when_it_is_off_by_a_quarter() {
        let mut fixture = Fixture::new();
        let reported_p99 = fixture.reads(100, 10, Duration::ZERO).p99_micros;
        assert_eq!(fixture.reads(1000, 11, Duration::ZERO).p99_micros, reported_p99);
        assert!(fixture.reads(100_000, 20, Duration::ZERO).p99_micros > reported_p99);
    }

    #[test]
    fn reassigned_number_starts_again_and_closed_devices_are_dropped() {
        let mut fixture = Fixture::new();
        assert!(fixture.reads(100, 80, Duration::ZERO).slow.is_some());
        fixture.times = Arc::new(ReadTimes::default());
        assert_eq!(fixture.update(), LatencyReading { p99_micros: None, slow: None });
        fixture.monitor.update(fixture.now, &BTreeMap::new(), |_| None);
        assert_eq!(fixture.monitor.of(ID), None);
    }
}
