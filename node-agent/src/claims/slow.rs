//! Which devices take longer for reads than their pools allow.
//!
//! ```text
//!   quick ── 100 reads of a minute, the 99th of 100 longer than allowed ──► slow
//!   slow ── the 99th of 100 is 4/5 of what is allowed at the most, or no reads, or nothing is said ──► quick
//! ```
//!
//! A device between the two stays what it is, so one that is about as slow as allowed does not come and go. A slow device that is read
//! from less than before is judged by the reads that there are. It is told of, and used all the same.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use reprise_agent_core::effect::DeviceId;

use crate::metrics::{Between, ReadTimes, p99};

/// Reads are looked at over so long.
const WINDOW: Duration = Duration::from_secs(60);

/// The window moves in such steps: seven snapshots of 1.5 KiB a device.
const STEP: Duration = Duration::from_secs(10);

/// So many reads tell the slowest of a hundred.
const READS_MIN: u64 = 100;

/// What is told stays as it is until the truth is a quarter away: a status that differs is written.
const TOLD_WITHIN: u32 = 4;

/// All devices.
#[derive(Debug, Default)]
pub(super) struct Slow {
    devices: BTreeMap<DeviceId, Watched>,
}

/// What is told of a device whose pool allows only so much.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reading {
    /// Time below which 99 of 100 reads of the last minute were; `None`: there were none.
    pub(super) p99_micros: Option<u32>,
    /// That it is slow, in words.
    pub(super) slow: Option<String>,
}

#[derive(Debug)]
struct Watched {
    times: Arc<ReadTimes>,
    /// Counters at the steps of the window, the oldest first.
    seen: VecDeque<(Instant, Vec<u32>)>,
    told: Option<u32>,
    pace: Pace,
    allowed: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    Quick,
    Slow,
}

impl Slow {
    /// Looks at the devices that are open and of which a pool allows so much; others are forgotten. `times` has their counters.
    pub(super) fn look(
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
                told: None,
                pace: Pace::Quick,
                allowed: *allowed,
            };
            let watched = self.devices.entry(*id).or_insert_with(|| new(Arc::clone(&times)));
            // The number was given to another device.
            if !Arc::ptr_eq(&watched.times, &times) {
                *watched = new(times);
            }
            watched.look(now, *allowed);
        }
    }

    /// What is told of a device, if its pool allows only so much.
    pub(super) fn of(&self, id: DeviceId) -> Option<Reading> {
        let watched = self.devices.get(&id)?;
        let slow = (watched.pace == Pace::Slow).then(|| {
            let millis = watched.told.unwrap_or_default().div_ceil(1000);
            let allowed = watched.allowed.as_millis();
            format!("99 of 100 reads of the last minute took up to about {millis} ms, and its pool allows {allowed} ms")
        });
        Some(Reading { p99_micros: watched.told, slow })
    }
}

impl Watched {
    fn look(&mut self, now: Instant, allowed: Duration) {
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
        let pace = judge(self.pace, found, allowed);
        let p99 = found.map(|(_, at)| u32::try_from(at.at_most.as_micros()).unwrap_or(u32::MAX));
        let is_near = match (self.told, p99) {
            (Some(told), Some(p99)) => told.abs_diff(p99) <= told / TOLD_WITHIN,
            (told, p99) => told == p99,
        };
        if !is_near || pace != self.pace {
            self.told = p99;
        }
        (self.pace, self.allowed) = (pace, allowed);
    }
}

fn judge(was: Pace, found: Option<(u64, Between)>, allowed: Duration) -> Pace {
    let Some((reads, at)) = found else { return Pace::Quick };
    let is_slow = match was {
        Pace::Quick => reads >= READS_MIN && at.at_least > allowed,
        Pace::Slow => at.at_most > allowed * 4 / 5,
    };
    if is_slow { Pace::Slow } else { Pace::Quick }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOWED: Duration = Duration::from_millis(50);
    const ID: DeviceId = DeviceId(3);

    /// One device, and a clock that only the test moves.
    struct Lab {
        times: Arc<ReadTimes>,
        slow: Slow,
        now: Instant,
    }

    impl Lab {
        fn new() -> Lab {
            let mut lab =
                Lab { times: Arc::new(ReadTimes::default()), slow: Slow::default(), now: Instant::now() };
            lab.look();
            lab
        }

        fn look(&mut self) -> Reading {
            let (open, times) = (BTreeMap::from([(ID, ALLOWED)]), Arc::clone(&self.times));
            self.slow.look(self.now, &open, |_| Some(Arc::clone(&times)));
            self.slow.of(ID).expect("its pool allows only so much")
        }

        /// So many reads, then so long without one.
        fn reads(&mut self, count: usize, millis: u64, then: Duration) -> Reading {
            for _ in 0..count {
                self.times.note(Duration::from_millis(millis));
            }
            let reading = self.look();
            for _ in 0..then.as_secs() {
                self.now += Duration::from_secs(1);
                self.look();
            }
            reading
        }
    }

    #[test]
    fn a_device_is_slow_by_a_hundred_reads_and_until_it_is_clearly_quicker() {
        let mut lab = Lab::new();
        assert_eq!(lab.look(), Reading { p99_micros: None, slow: None });
        assert_eq!(lab.reads(99, 80, Duration::ZERO).slow, None, "too few to tell");
        let said = lab.reads(1, 80, WINDOW + STEP);
        let words = said.slow.expect("it is slow");
        assert!(words.contains("allows 50 ms") && words.contains("about 8"), "{words}");
        assert!(said.p99_micros.is_some_and(|micros| (80_000..86_000).contains(&micros)));

        assert!(lab.look().slow.is_none(), "nothing is read from it any more");
        lab.reads(100, 80, WINDOW + STEP);
        // It is quick again by now, and this is not above.
        assert_eq!(lab.reads(100, 45, Duration::ZERO).slow, None);
    }

    #[test]
    fn between_the_two_bounds_a_device_stays_what_it_is() {
        let mut lab = Lab::new();
        lab.reads(100, 80, Duration::from_secs(55));
        // The slow reads leave the window while these are in it.
        lab.reads(200, 45, Duration::from_secs(20));
        assert!(lab.look().slow.is_some(), "slow enough to stay slow");
        lab.reads(20_000, 30, Duration::ZERO);
        assert_eq!(lab.look().slow, None, "clearly quicker");
    }

    #[test]
    fn what_is_told_changes_when_it_is_a_quarter_off() {
        let mut lab = Lab::new();
        let told = lab.reads(100, 10, Duration::ZERO).p99_micros;
        assert_eq!(lab.reads(1000, 11, Duration::ZERO).p99_micros, told);
        assert!(lab.reads(100_000, 20, Duration::ZERO).p99_micros > told);
    }

    #[test]
    fn another_device_under_the_same_number_begins_anew_and_closed_ones_are_forgotten() {
        let mut lab = Lab::new();
        assert!(lab.reads(100, 80, Duration::ZERO).slow.is_some());
        lab.times = Arc::new(ReadTimes::default());
        assert_eq!(lab.look(), Reading { p99_micros: None, slow: None });
        lab.slow.look(lab.now, &BTreeMap::new(), |_| None);
        assert_eq!(lab.slow.of(ID), None);
    }
}
