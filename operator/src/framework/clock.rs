//! The clock, which tests control.
//!
//! Monotonic time is that of the tokio runtime. Wall-clock time is read only here; in tests it follows the runtime, which
//! pauses and advances, and never advances without a runtime.

#![allow(clippy::disallowed_methods, reason = "the only module that reads the wall clock")]

use std::time::{Duration, SystemTime};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use k8s_openapi::jiff::Timestamp;

#[cfg(not(test))]
fn timestamp() -> Timestamp {
    Timestamp::now()
}

#[cfg(test)]
fn timestamp() -> Timestamp {
    use std::sync::LazyLock;

    use tokio::runtime::Handle;
    use tokio::time::Instant;

    /// A whole second, so that times in objects are exact.
    static START: LazyLock<(Timestamp, std::time::Instant)> = LazyLock::new(|| {
        let start = Timestamp::from_second(Timestamp::now().as_second()).expect("within the range of times");
        (start, std::time::Instant::now())
    });
    let (start, begun) = *START;
    if Handle::try_current().is_err() {
        return start;
    }
    // A paused clock may have stopped before `begun`.
    let now = Instant::now().into_std();
    start + now.saturating_duration_since(begun) - begun.saturating_duration_since(now)
}

/// Returns the current time in whole seconds, the precision of conditions.
pub fn now() -> Time {
    Time(Timestamp::from_second(timestamp().as_second()).expect("the present is within the range of times"))
}

/// Returns the current time in microseconds, the precision of leases.
pub fn now_micro() -> MicroTime {
    let micros = timestamp().as_microsecond();
    MicroTime(Timestamp::from_microsecond(micros).expect("the present is within the range of times"))
}

/// Returns the current time, for the validity of certificates.
pub fn system_time() -> SystemTime {
    timestamp().into()
}

/// Returns the time passed since `time`; zero if it is in the future.
pub fn since(time: &Time) -> Duration {
    timestamp().duration_since(time.0).try_into().unwrap_or_default()
}

/// Returns the time left until `time`; zero if it is in the past.
pub fn until(time: &Time) -> Duration {
    time.0.duration_since(timestamp()).try_into().unwrap_or_default()
}

/// Returns the time from `first` to `second`; zero if `second` is earlier.
pub fn between(first: &Time, second: &Time) -> Duration {
    second.0.duration_since(first.0).try_into().unwrap_or_default()
}
