//! Wall-clock time, read only in this module. Conditions, leases and certificates contain it. Timeouts and
//! delays use monotonic time instead.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

/// Returns the current time in whole seconds, the precision of conditions.
pub fn now() -> Time {
    let seconds = Timestamp::now().as_second();
    Time(Timestamp::from_second(seconds).expect("the present is within the range of times"))
}

/// Returns the current time in microseconds, the precision of leases.
pub fn now_micro() -> MicroTime {
    let micros = Timestamp::now().as_microsecond();
    MicroTime(Timestamp::from_microsecond(micros).expect("the present is within the range of times"))
}

/// Returns the time passed since `time`; zero if it is in the future.
pub fn since(time: &Time) -> std::time::Duration {
    let passed: SignedDuration = Timestamp::now().duration_since(time.0);
    passed.try_into().unwrap_or_default()
}

/// Returns the time left until `time`; zero if it is in the past.
pub fn until(time: &Time) -> std::time::Duration {
    let left: SignedDuration = time.0.duration_since(Timestamp::now());
    left.try_into().unwrap_or_default()
}

/// Returns the time from `first` to `second`; zero if `second` is earlier.
pub fn between(first: &Time, second: &Time) -> std::time::Duration {
    second.0.duration_since(first.0).try_into().unwrap_or_default()
}
