//! Demotion from DRAM to NVMe, before DRAM is full.
//!
//! Blocks that admission did not write at their commit exist in DRAM only, so their eviction loses them. Demotion
//! writes those that are worth it while there is still room:
//!
//! ```text
//!   room before a block is evicted:   more than 15 % of DRAM │ 3 to 15 %           │ less than 3 %
//!   pressure:                         none                   │ staged: cold blocks │ emergency: warm ones too, at once
//! ```
//!
//! * The room before a block is the free space, plus the space of its predecessors in the order of eviction. A full
//!   DRAM is the normal state of a cache, so its use does not show pressure.
//! * A block is **warm** until it was idle for τ, then **cold** (TierKV §3.3). τ is the 90th percentile of the
//!   observed times between two uses of a block: nine of ten uses come before a block is cold.
//! * A block that no second request has used is unshared. If the operator enables it, the DRAM copy of an unshared
//!   block is the next victim as soon as the block is on NVMe, under pressure (CASCADE, Algorithm 1: unshared
//!   victims skip DRAM).
//!
//! A hit on NVMe fills a DRAM slot, which promotes the block. Pinned blocks are leased, and never candidates.
//!
//! Out of scope: a tier behind NVMe.

use std::time::Duration;

mod idle_times;

pub use idle_times::IdleTimes;

use crate::admission::Reuse;

/// Thousandths of DRAM as room before a block below which the block is demoted if it is cold.
const STAGED_PERMILLE: u128 = 150;

/// Thousandths of DRAM as room before a block below which the block is demoted if it is warm, too: 3 % of 64 GiB are
/// 2 GiB, which a device writes in 0.6 s.
const EMERGENCY_PERMILLE: u128 = 30;

/// Threshold τ before enough uses were observed: a chat turn.
const TAU_DEFAULT: Duration = Duration::from_secs(30);

/// Uses that must be observed before τ follows them.
const OBSERVED_MIN: u32 = 64;

/// Percentile of the observed idle times that is τ, in thousandths.
const TAU_PERMILLE: u32 = 900;

/// How close a block in DRAM is to its eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pressure {
    /// Nothing is demoted.
    None,
    /// Cold blocks are demoted in batches.
    Staged,
    /// Warm blocks are demoted too, and their writes do not wait.
    Emergency,
}

/// Idle time of a block against τ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Temperature {
    /// Another use is likely.
    Warm,
    /// Idle for τ or longer.
    Cold,
}

/// Returns the pressure on a block with `room_bytes` bytes before its eviction, in a DRAM of `capacity_bytes` bytes.
pub fn pressure(room_bytes: u64, capacity_bytes: u64) -> Pressure {
    let (room, capacity) = (u128::from(room_bytes) * 1000, u128::from(capacity_bytes));
    if room < capacity * EMERGENCY_PERMILLE {
        Pressure::Emergency
    } else if room < capacity * STAGED_PERMILLE {
        Pressure::Staged
    } else {
        Pressure::None
    }
}

/// Bytes of room beyond which no block is under pressure.
pub fn room_watched(capacity_bytes: u64) -> u64 {
    u64::try_from(u128::from(capacity_bytes) * STAGED_PERMILLE / 1000).unwrap_or(u64::MAX)
}

/// Returns τ for the observed idle times.
pub fn threshold(observed: &IdleTimes) -> Duration {
    if observed.count() < OBSERVED_MIN {
        return TAU_DEFAULT;
    }
    observed.quantile(TAU_PERMILLE).unwrap_or(TAU_DEFAULT)
}

/// Temperature of a block that was idle for some time.
pub fn temperature(idle: Duration, tau: Duration) -> Temperature {
    if idle >= tau { Temperature::Cold } else { Temperature::Warm }
}

/// Whether a block that is in DRAM only is demoted now, if admission accepts it.
pub fn is_due(pressure: Pressure, temperature: Temperature) -> bool {
    match pressure {
        Pressure::None => false,
        Pressure::Staged => temperature == Temperature::Cold,
        Pressure::Emergency => true,
    }
}

/// Whether the DRAM copy of a block that just became durable is evicted first.
pub fn skips_dram(pressure: Pressure, reuse: Reuse) -> bool {
    pressure >= Pressure::Staged && reuse == Reuse::None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pressure_rises_as_the_room_before_a_block_shrinks() {
        use Pressure::{Emergency, None, Staged};
        let of = |room| pressure(room, 1000);
        assert_eq!(
            [of(1000), of(150), of(149), of(30), of(29), of(0)],
            [None, None, Staged, Staged, Emergency, Emergency]
        );
        assert_eq!((pressure(0, 0), room_watched(1000)), (None, 150));
        assert_eq!(pressure(u64::MAX, u64::MAX), None);
    }

    #[test]
    fn threshold_follows_the_observed_idle_times() {
        let mut observed = IdleTimes::default();
        assert_eq!(threshold(&observed), TAU_DEFAULT);
        (0..1000).for_each(|_| observed.observe(Duration::from_millis(100)));
        let short = threshold(&observed);
        (0..1000).for_each(|_| observed.observe(Duration::from_millis(500)));
        let long = threshold(&observed);
        assert!(short >= Duration::from_millis(100) && short < Duration::from_millis(125), "{short:?}");
        assert!(long >= Duration::from_millis(500) && long < Duration::from_millis(625), "{long:?}");
    }

    proptest! {
        #[test]
        fn threshold_is_proportional_to_the_idle_times(
            gaps in prop::collection::vec(1_000_u64..10_000_000, 64..300), factor in 2_u64..50,
        ) {
            let of = |factor: u64| {
                let mut observed = IdleTimes::default();
                gaps.iter().for_each(|gap| observed.observe(Duration::from_micros(gap * factor)));
                threshold(&observed).as_secs_f64()
            };
            let ratio = of(factor) / of(1) / factor as f64;
            // A class of the sketch is 19 to 25 % wide.
            prop_assert!((0.79..1.26).contains(&ratio), "{ratio}");
        }

        #[test]
        fn nine_of_ten_uses_come_before_a_block_is_cold(
            gaps in prop::collection::vec(1_000_u64..10_000_000, 64..300),
        ) {
            let mut observed = IdleTimes::default();
            gaps.iter().for_each(|gap| observed.observe(Duration::from_micros(*gap)));
            let tau = threshold(&observed);
            let is_warm = |gap: &&u64| temperature(Duration::from_micros(**gap), tau) == Temperature::Warm;
            let warm = gaps.iter().filter(is_warm).count();
            prop_assert!(warm * 10 >= gaps.len() * 9, "{warm} of {}", gaps.len());
        }

        #[test]
        fn more_pressure_never_demotes_less(idle: u32, tau: u32) {
            let temperature = temperature(Duration::from_millis(idle.into()), Duration::from_millis(tau.into()));
            let due = [Pressure::None, Pressure::Staged, Pressure::Emergency]
                .map(|pressure| is_due(pressure, temperature));
            prop_assert!(!due[0] && due[1] <= due[2]);
        }
    }
}
