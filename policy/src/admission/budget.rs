//! Daily write budget of a device.
//!
//! A token bucket: tokens are bytes. A block of any size is admitted while the level is above zero, so blocks of
//! all sizes share a budget as they are offered: a rule that waits for the size of a block would never admit large
//! blocks next to small ones. The level thus becomes negative, by less than the largest block O. With a budget of D bytes
//! and a burst of B bytes, the bucket holds at most C = B − O (at least B ÷ 2) and gains D − C − O a day. Any window of
//! 24 hours thus admits at most
//!
//! ```text
//!   C (full at its start) + O (overdraft at its end) + (D − C − O) × 24 h ÷ 24 h = D
//! ```
//!
//! and a load that never pauses uses D − C − O: D − B, which is 99 % of the budget with the default burst of D ÷ 100,
//! if the largest block is at most B ÷ 2.
//!
//! **Restarts.** A bucket starts at −O. Before a restart, an agent writes at most C + O and its gain; after it, at most
//! its gain. So the bound holds over any number of restarts without a record of them. A restart costs at most C + O.
//!
//! **Other bytes.** Journal pages and headers are charged too, but never refused: they make the level
//! negative, and blocks wait until it is positive again. A journal group of 63 blocks has 4 KiB, so this overdraft is
//! below 0.01 %, and one checkpoint (64 bytes a block) at most. O is at most D ÷ 4; a larger block waits for what
//! exceeds it, or a full bucket.

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

/// Part of a budget that a block may overdraw at most.
const OVERDRAFT_DIVISOR: u64 = 4;

/// Bytes that a device may still write.
#[derive(Clone, Debug)]
pub struct WriteBudget {
    limits: DailyBudget,
    /// Bytes by which an admitted block may make the level negative.
    overdraft: u64,
    /// Highest level.
    capacity: u64,
    /// Level of the bucket in bytes × microseconds of a day, which makes refills exact.
    level: i128,
    refilled: Tick,
}

impl WriteBudget {
    /// Creates a bucket without tokens, for blocks of at most `block_bytes_max` bytes.
    pub fn new(limits: DailyBudget, block_bytes_max: u64, now: Tick) -> WriteBudget {
        let DailyBudget { bytes, burst } = limits;
        let overdraft = block_bytes_max.min(bytes / OVERDRAFT_DIVISOR);
        let capacity = burst.saturating_sub(overdraft).max(burst / 2).max(1);
        WriteBudget { limits, overdraft, capacity, level: -scaled(overdraft), refilled: now }
    }

    /// Whether a write of `bytes` bytes is within the budget.
    pub fn admits(&self, now: Tick, bytes: u64) -> bool {
        self.level_at(now) > self.level_below(bytes)
    }

    /// Charges bytes that are written.
    pub fn charge(&mut self, now: Tick, bytes: u64) {
        self.level = self.level_at(now) - scaled(bytes);
        self.refilled = self.refilled.max(now);
    }

    /// Returns charged bytes that will not be written. Their charge never raises the level above that without it.
    pub fn refund(&mut self, now: Tick, bytes: u64) {
        self.level = (self.level_at(now) + scaled(bytes)).min(scaled(self.capacity));
        self.refilled = self.refilled.max(now);
    }

    /// Bytes that may be written now; zero after an overdraft.
    pub fn left(&self, now: Tick) -> u64 {
        u64::try_from(self.level_at(now).max(0) / DAY_MICROS).unwrap_or(u64::MAX)
    }

    /// Part of the bucket's capacity that is left, in thousandths.
    pub fn left_permille(&self, now: Tick) -> u16 {
        let permille = u128::from(self.left(now)) * 1000 / u128::from(self.capacity);
        u16::try_from(permille.min(1000)).unwrap_or(1000)
    }

    /// Limits of the bucket.
    pub fn limits(&self) -> DailyBudget {
        self.limits
    }

    /// Time until a write of `bytes` bytes is within the budget, if nothing else is written.
    pub fn wait(&self, now: Tick, bytes: u64) -> Duration {
        let missing = self.level_below(bytes) + 1 - self.level_at(now);
        let per_micro = self.gain().max(1);
        let micros = (missing.max(0) + per_micro - 1) / per_micro;
        Duration::from_micros(u64::try_from(micros).unwrap_or(u64::MAX))
    }

    /// Level above which a write is admitted: zero for all blocks that the overdraft covers.
    fn level_below(&self, bytes: u64) -> i128 {
        scaled(bytes.saturating_sub(self.overdraft).min(self.capacity - 1))
    }

    /// Bytes gained in a day, which is the scaled gain of a microsecond.
    fn gain(&self) -> i128 {
        i128::from(self.limits.bytes.saturating_sub(self.capacity + self.overdraft))
    }

    fn level_at(&self, now: Tick) -> i128 {
        let passed = i128::from(now.0.saturating_sub(self.refilled.0));
        (self.level + passed * self.gain()).min(scaled(self.capacity))
    }
}

fn scaled(bytes: u64) -> i128 {
    i128::from(bytes) * DAY_MICROS
}
