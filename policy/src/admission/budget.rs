//! Daily write budget of a device.
//!
//! A token bucket: tokens are bytes. With a budget of D bytes and a burst of B bytes, the bucket holds at most B and
//! gains D − B a day. Any window of 24 hours thus admits at most
//!
//! ```text
//!   B (full at its start) + (D − B) × 24 h ÷ 24 h = D
//! ```
//!
//! and a load that never pauses uses D − B: 99 % of the budget with the default burst of D ÷ 100.
//!
//! **Restarts.** A bucket starts empty. Before a restart, an agent writes at most B and its gain; after it, at most
//! its gain. So the bound holds over any number of restarts without a record of them. A restart costs at most B.
//!
//! **Other bytes.** Journal pages and headers are charged too, but never refused: they make the level
//! negative, and blocks wait until it is positive again. A journal group of 63 blocks has 4 KiB, so this overdraft is
//! below 0.01 %, and one checkpoint (64 bytes a block) at most. A block larger than the burst needs a full bucket.

use std::time::Duration;

use crate::Tick;

/// Microseconds of a day.
const DAY_MICROS: i128 = 86_400_000_000;

/// Part of a budget that is its default burst: a budget is used to 99 %.
const BURST_DIVISOR: u64 = 100;

/// Limits of a device's writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DailyBudget {
    /// Bytes that may be written in any 24 hours; above zero.
    pub bytes: u64,
    /// Bytes that may be written at once, at most half of `bytes`.
    pub burst: u64,
}

impl DailyBudget {
    /// Budget with the default burst.
    pub fn new(bytes: u64) -> DailyBudget {
        DailyBudget { bytes, burst: (bytes / BURST_DIVISOR).max(1) }
    }
}

/// Bytes that a device may still write.
#[derive(Clone, Debug)]
pub struct WriteBudget {
    limits: DailyBudget,
    /// Level of the bucket in bytes × microseconds of a day, which makes refills exact.
    level: i128,
    refilled: Tick,
}

impl WriteBudget {
    /// Creates an empty bucket.
    pub fn new(limits: DailyBudget, now: Tick) -> WriteBudget {
        WriteBudget { limits, level: 0, refilled: now }
    }

    /// Whether a write of `bytes` bytes is within the budget.
    pub fn admits(&self, now: Tick, bytes: u64) -> bool {
        let level = self.level_at(now);
        level >= scaled(bytes).min(scaled(self.limits.burst))
    }

    /// Charges bytes that are written.
    pub fn charge(&mut self, now: Tick, bytes: u64) {
        self.level = self.level_at(now) - scaled(bytes);
        self.refilled = self.refilled.max(now);
    }

    /// Bytes that may be written now; zero after an overdraft.
    pub fn left(&self, now: Tick) -> u64 {
        u64::try_from(self.level_at(now).max(0) / DAY_MICROS).unwrap_or(u64::MAX)
    }

    /// Limits of the bucket.
    pub fn limits(&self) -> DailyBudget {
        self.limits
    }

    /// Time until a write of `bytes` bytes is within the budget, if nothing else is written.
    pub fn wait(&self, now: Tick, bytes: u64) -> Duration {
        let missing = scaled(bytes.min(self.limits.burst)) - self.level_at(now);
        let per_micro = i128::from(self.limits.bytes - self.limits.burst).max(1);
        let micros = (missing.max(0) + per_micro - 1) / per_micro;
        Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
    }

    fn level_at(&self, now: Tick) -> i128 {
        let passed = i128::from(now.0.saturating_sub(self.refilled.0));
        let gained = passed * i128::from(self.limits.bytes - self.limits.burst);
        (self.level + gained).min(scaled(self.limits.burst))
    }
}

fn scaled(bytes: u64) -> i128 {
    i128::from(bytes) * DAY_MICROS
}
