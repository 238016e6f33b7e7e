//! Settings for replicas of this node's blocks on other nodes, and of their blocks here.

use std::time::Duration;

use reprise_policy::{ByteSize, Interval};
use serde::Deserialize;

use super::defaults;
use super::settings::{refuse, size, within};
use crate::error::AgentError;

/// Maximum of `hot_reads`, far below the range of the 32-bit counters.
const HOT_READS_MAX: u32 = 1_000_000;

/// Settings for replicas, as written.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct PlacementSection {
    pub(crate) bandwidth: ByteSize,
    pub(crate) hot_reads: u32,
    pub(crate) hot_window: Interval,
}

/// Validated settings for replicas.
#[derive(Clone, Debug)]
pub(crate) struct PlacementSettings {
    /// Bytes per second; 0: no copies.
    pub(crate) bandwidth: u64,
    pub(crate) hot_reads: u32,
    pub(crate) hot_window: Duration,
}

impl Default for PlacementSection {
    fn default() -> Self {
        PlacementSection {
            bandwidth: defaults::PLACEMENT_BANDWIDTH,
            hot_reads: defaults::HOT_READS,
            hot_window: defaults::HOT_WINDOW,
        }
    }
}

impl PlacementSection {
    pub(super) fn validate(&self) -> Result<PlacementSettings, AgentError> {
        let PlacementSection { bandwidth, hot_reads, hot_window } = self;
        if bandwidth.0 > 0 {
            size("placement.bandwidth", bandwidth.0, (1 << 20, 1 << 40, 1))?;
        }
        if !(1..=HOT_READS_MAX).contains(hot_reads) {
            let allowed = format!("1 to {HOT_READS_MAX}");
            return Err(refuse("placement.hot_reads", &hot_reads.to_string(), &allowed));
        }
        let allowed = Duration::from_secs(1)..=Duration::from_secs(86_400);
        within("placement.hot_window", hot_window.0, allowed)?;
        let (bandwidth, hot_reads, hot_window) = (bandwidth.0, *hot_reads, hot_window.0);
        Ok(PlacementSettings { bandwidth, hot_reads, hot_window })
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;

    #[test]
    fn bandwidth_is_zero_or_at_least_one_mebibyte_per_second() {
        let text = "[placement]\nbandwidth = '0B'\nhot_reads = 10\nhot_window = '5m'";
        let settings = Config::parse(text).expect("parses").validate().expect("valid").placement;
        assert_eq!((settings.bandwidth, settings.hot_reads, settings.hot_window.as_secs()), (0, 10, 300));
        for (text, words) in [
            ("bandwidth = '1kB'", ["placement.bandwidth", "1000", "1MiB"]),
            ("hot_reads = 0", ["placement.hot_reads", "0", "1 to"]),
            ("hot_window = '1ms'", ["placement.hot_window", "1ms", "1s"]),
        ] {
            let parsed = Config::parse(&format!("[placement]\n{text}")).expect("parses");
            let error = parsed.validate().expect_err("refused").chain();
            assert!(words.iter().all(|word| error.contains(word)), "{text:?} gave: {error}");
        }
    }
}
