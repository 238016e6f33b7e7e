//! Expected time of an iteration, and the number of iterations to look ahead.

use std::time::Duration;

/// Iterations that the moving average covers (TierKV §3.4).
pub const ITERATION_WINDOW: i128 = 16;

/// Smallest window: the iterations in which an engine itself fetches blocks from DRAM.
pub const WINDOW_MIN: u32 = 4;

/// Largest window: a request that runs later is too uncertain to hold memory for.
pub const WINDOW_MAX: u32 = 64;

/// Share of wasted bytes, in thousandths, above which the window shrinks.
const WASTE_PERMILLE_MAX: u64 = 50;

/// Bytes after which old outcomes count half.
const OUTCOMES_BYTES: u64 = 1 << 30;

/// Exponential moving average of the times of iterations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IterationTime {
    nanos: Option<i128>,
}

/// Window of lookahead, K_ssd: what the transfers take, widened by missed windows and narrowed by waste.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LookaheadWindow {
    needed: u32,
    extra: u32,
    used_bytes: u64,
    wasted_bytes: u64,
}

impl IterationTime {
    /// Adds the time of an iteration, with the weight 2 / (16 + 1).
    pub fn add(&mut self, iteration: Duration) {
        let nanos = i128::try_from(iteration.as_nanos()).unwrap_or(i128::MAX);
        self.nanos = Some(match self.nanos {
            None => nanos,
            Some(mean) => mean + 2 * (nanos - mean) / (ITERATION_WINDOW + 1),
        });
    }

    /// Expected time of the next iteration; `None` before the first one.
    pub fn expected(&self) -> Option<Duration> {
        self.nanos.map(|nanos| Duration::from_nanos(u64::try_from(nanos).unwrap_or(0)))
    }
}

impl LookaheadWindow {
    /// Iterations to look ahead.
    pub fn iterations(&self) -> u32 {
        self.needed.saturating_add(self.extra).clamp(WINDOW_MIN, WINDOW_MAX)
    }

    /// Sets how long the transfers of all known requests take: the window covers them, and one iteration more.
    pub fn cover(&mut self, transfer: Duration, iteration: Duration) {
        let iterations = transfer.as_nanos().div_ceil(iteration.as_nanos().max(1));
        self.needed = u32::try_from(iterations).unwrap_or(WINDOW_MAX).saturating_add(1).min(WINDOW_MAX);
    }

    /// Widens the window: a request ran before its blocks were read.
    pub fn missed(&mut self) {
        self.extra = (2 * self.extra + 1).min(WINDOW_MAX);
    }

    /// Counts bytes that a load used.
    pub fn used(&mut self, bytes: u64) {
        self.used_bytes = self.used_bytes.saturating_add(bytes);
        self.age();
    }

    /// Counts bytes that no load used, and narrows the window if they are too many.
    pub fn wasted(&mut self, bytes: u64) {
        self.wasted_bytes = self.wasted_bytes.saturating_add(bytes);
        self.age();
        let all = u128::from(self.used_bytes) + u128::from(self.wasted_bytes);
        if u128::from(self.wasted_bytes) * 1000 > all * u128::from(WASTE_PERMILLE_MAX) {
            self.extra /= 2;
        }
    }

    fn age(&mut self) {
        if self.used_bytes.saturating_add(self.wasted_bytes) > OUTCOMES_BYTES {
            self.used_bytes /= 2;
            self.wasted_bytes /= 2;
        }
    }
}
