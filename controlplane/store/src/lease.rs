//! Lease types: ids and times to live.

use std::fmt;
use std::num::NonZeroU64;
use std::time::Duration;

use crate::error::StoreError;

/// Shortest time to live; stores count in whole seconds, like etcd.
pub const TIME_TO_LIVE_MIN: Duration = Duration::from_secs(1);
/// Longest time to live. Entries that should outlive a day without keep-alive need no lease.
pub const TIME_TO_LIVE_MAX: Duration = Duration::from_secs(24 * 3600);

/// Id of a lease; assigned by the store, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(NonZeroU64);

/// Time to live of a lease after its grant and after each keep-alive: whole seconds from [`TIME_TO_LIVE_MIN`]
/// to [`TIME_TO_LIVE_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TimeToLive(Duration);

/// A lease that the store has granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease {
    /// Id of the lease.
    pub id: LeaseId,
    /// Granted time to live, at least the requested one.
    pub time_to_live: TimeToLive,
}

impl LeaseId {
    /// Creates an id; `None` for 0.
    pub(crate) fn new(number: u64) -> Option<LeaseId> {
        NonZeroU64::new(number).map(LeaseId)
    }

    pub(crate) fn number(self) -> u64 {
        self.0.get()
    }
}

impl TimeToLive {
    /// Creates a time to live, rounded up to whole seconds.
    ///
    /// # Errors
    /// `Invalid` outside of the range.
    pub fn new(duration: Duration) -> Result<TimeToLive, StoreError> {
        if !(TIME_TO_LIVE_MIN..=TIME_TO_LIVE_MAX).contains(&duration) {
            return Err(StoreError::Invalid(format!(
                "invalid time to live {duration:?}: expected {TIME_TO_LIVE_MIN:?} to {TIME_TO_LIVE_MAX:?}"
            )));
        }
        Ok(TimeToLive::of_seconds(duration.as_secs() + u64::from(duration.subsec_nanos() > 0)))
    }

    /// A time to live granted by a store, which may exceed the requested range.
    pub(crate) fn of_seconds(seconds: u64) -> TimeToLive {
        TimeToLive(Duration::from_secs(seconds))
    }

    /// The time to live as a duration.
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
    fn rounds_up_to_whole_seconds_and_rejects_out_of_range_values() {
        let whole =
            |milliseconds| TimeToLive::new(Duration::from_millis(milliseconds)).map(TimeToLive::seconds);
        assert_eq!(whole(1000).expect("the minimum"), 1);
        assert_eq!(whole(1001).expect("rounded up"), 2);
        assert_eq!(TimeToLive::new(TIME_TO_LIVE_MAX).expect("the maximum").duration(), TIME_TO_LIVE_MAX);
        for refused in
            [Duration::ZERO, Duration::from_millis(999), TIME_TO_LIVE_MAX + Duration::from_nanos(1)]
        {
            let message = TimeToLive::new(refused).expect_err("beyond the limits").to_string();
            assert!(message.contains("1s to 86400s"), "{message}");
        }
    }
}
