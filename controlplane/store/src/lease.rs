//! Leases of a store: facts that hold only as long as somebody keeps saying so.

use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use crate::error::StoreError;

/// No lease lives shorter without being kept alive: stores count whole seconds, as etcd does.
pub const TIME_TO_LIVE_MIN: Duration = Duration::from_secs(1);
/// No lease lives longer without being kept alive. What shall outlive a day of silence is a fact of its own, and is
/// put without a lease.
pub const TIME_TO_LIVE_MAX: Duration = Duration::from_secs(24 * 3600);

/// Names a lease; given out by the store, never twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(NonZeroU64);

/// How long a lease lives after its grant and after each keep-alive: whole seconds from [`TIME_TO_LIVE_MIN`] to
/// [`TIME_TO_LIVE_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TimeToLive(Duration);

/// A lease, as it was granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Its name.
    pub id: LeaseId,
    /// Its time to live: as asked for or longer.
    pub time_to_live: TimeToLive,
}

impl LeaseId {
    /// 0 is no lease.
    pub(crate) fn new(number: u64) -> Option<LeaseId> {
        NonZeroU64::new(number).map(LeaseId)
    }

    pub(crate) fn number(self) -> u64 {
        self.0.get()
    }
}

impl TimeToLive {
    /// A time to live; a part of a second counts as a whole one.
    ///
    /// # Errors
    /// `Invalid` beyond the limits.
    pub fn new(duration: Duration) -> Result<TimeToLive, StoreError> {
        if !(TIME_TO_LIVE_MIN..=TIME_TO_LIVE_MAX).contains(&duration) {
            return Err(StoreError::Invalid(format!(
                "a lease with a time to live of {duration:?}: {TIME_TO_LIVE_MIN:?} to {TIME_TO_LIVE_MAX:?}"
            )));
        }
        Ok(TimeToLive::of_seconds(duration.as_secs() + u64::from(duration.subsec_nanos() > 0)))
    }

    /// What a store has granted, which may be beyond what we ask for.
    pub(crate) fn of_seconds(seconds: u64) -> TimeToLive {
        TimeToLive(Duration::from_secs(seconds))
    }

    /// As a duration.
    pub fn duration(self) -> Duration {
        self.0
    }

    pub(crate) fn seconds(self) -> u64 {
        self.0.as_secs()
    }
}

impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

impl fmt::Display for TimeToLive {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_to_live_is_whole_seconds_within_its_limits() {
        let whole =
            |milliseconds| TimeToLive::new(Duration::from_millis(milliseconds)).map(TimeToLive::seconds);
        assert_eq!(whole(1000).expect("the least"), 1);
        assert_eq!(whole(1001).expect("rounded up"), 2);
        assert_eq!(TimeToLive::new(TIME_TO_LIVE_MAX).expect("the most").duration(), TIME_TO_LIVE_MAX);
        for refused in
            [Duration::ZERO, Duration::from_millis(999), TIME_TO_LIVE_MAX + Duration::from_nanos(1)]
        {
            let told = TimeToLive::new(refused).expect_err("beyond the limits").to_string();
            assert!(told.contains("1s to 86400s"), "{told}");
        }
    }
}
