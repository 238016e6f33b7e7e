//! Health of open devices against the limits of their pools: read latency and wear.
//!
//! A device over a limit is reported in the status of the `CacheNode`. The agent continues to use it.

mod latency;
mod wear;

pub(super) use latency::LatencyMonitor;
pub(super) use wear::{Amplification, DevicePath, WearLimits, WearMonitor};
