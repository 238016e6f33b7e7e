//! Sketch of the times between two uses of a block.
//!
//! Classes grow by a quarter of a power of two, so a quantile is at most 25 % too long. Counts are halved now and
//! then: the sketch follows the load.

use std::time::Duration;

/// Classes within a power of two.
const PARTS: u32 = 4;

/// Classes: times up to 2^48 µs, which is nine years.
const CLASSES: usize = 48 * PARTS as usize;

/// Observed uses at which all counts are halved: the last 32,768 to 65,536 uses count.
const HALVED_AT: u32 = 1 << 16;

/// Observed times, by class.
#[derive(Clone, Debug)]
pub struct IdleTimes {
    classes: [u32; CLASSES],
    count: u32,
}

impl Default for IdleTimes {
    fn default() -> IdleTimes {
        IdleTimes { classes: [0; CLASSES], count: 0 }
    }
}

impl IdleTimes {
    /// Records the time since the previous use of a block.
    pub fn observe(&mut self, idle: Duration) {
        self.classes[class_of(idle)] += 1;
        self.count += 1;
        if self.count >= HALVED_AT {
            self.classes.iter_mut().for_each(|class| *class /= 2);
            self.count = self.classes.iter().sum();
        }
    }

    /// Number of observed uses that count.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Time below which at least this share of the observed times is, in thousandths; `None` without any.
    pub fn quantile(&self, permille: u32) -> Option<Duration> {
        let wanted = (u64::from(self.count) * u64::from(permille)).div_ceil(1000);
        let mut below = 0;
        let at = self.classes.iter().position(|class| {
            below += u64::from(*class);
            below >= wanted.max(1)
        })?;
        Some(end_of(at))
    }
}

fn class_of(idle: Duration) -> usize {
    let micros = u64::try_from(idle.as_micros()).unwrap_or(u64::MAX).max(1);
    let power = micros.ilog2();
    let part = if power < 2 { 0 } else { (micros >> (power - 2)) & u64::from(PARTS - 1) };
    ((power * PARTS) as usize + part as usize).min(CLASSES - 1)
}

/// First time behind a class.
fn end_of(class: usize) -> Duration {
    let (power, part) = (class as u32 / PARTS, class as u32 % PARTS);
    let micros = if power < 2 { 2 << power } else { u64::from(PARTS + part + 1) << (power - 2) };
    Duration::from_micros(micros)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_is_below_the_end_of_its_class() {
        let times = (0..47).flat_map(|power| [1_u64 << power, (1 << power) + 1, (1 << power) * 5 / 3]);
        for micros in times {
            let class = class_of(Duration::from_micros(micros));
            assert!(Duration::from_micros(micros) < end_of(class), "{micros} µs in class {class}");
            assert!(micros < 4 || end_of(class).as_micros() as u64 <= micros / 4 * 5 + 5, "{micros} µs");
        }
        assert_eq!(class_of(Duration::MAX), CLASSES - 1);
    }

    #[test]
    fn old_observations_lose_weight() {
        let mut observed = IdleTimes::default();
        (0..100_000).for_each(|_| observed.observe(Duration::from_secs(1)));
        (0..400_000).for_each(|_| observed.observe(Duration::from_millis(1)));
        assert!(observed.quantile(900).is_some_and(|idle| idle < Duration::from_millis(2)));
        assert!(IdleTimes::default().quantile(500).is_none());
    }
}
