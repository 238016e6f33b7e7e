//! The time of day, read here and nowhere else: it stands in conditions, leases and certificates, which people and Kubernetes read.
//! What waits goes by monotonic time.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, Time};
use k8s_openapi::jiff::{SignedDuration, Timestamp};

/// Now, in whole seconds, as conditions have it.
pub fn now() -> Time {
    let seconds = Timestamp::now().as_second();
    Time(Timestamp::from_second(seconds).expect("the present is within the range of times"))
}

/// Now, in microseconds, as leases have it.
pub fn now_micro() -> MicroTime {
    let micros = Timestamp::now().as_microsecond();
    MicroTime(Timestamp::from_microsecond(micros).expect("the present is within the range of times"))
}

/// How long ago it was. Nothing for the future.
pub fn since(time: &Time) -> std::time::Duration {
    let passed: SignedDuration = Timestamp::now().duration_since(time.0);
    passed.try_into().unwrap_or_default()
}

/// How long it is until then. Nothing for the past.
pub fn until(time: &Time) -> std::time::Duration {
    let left: SignedDuration = time.0.duration_since(Timestamp::now());
    left.try_into().unwrap_or_default()
}

/// How long after the first the second is. Nothing if it is before.
pub fn between(first: &Time, second: &Time) -> std::time::Duration {
    second.0.duration_since(first.0).try_into().unwrap_or_default()
}
