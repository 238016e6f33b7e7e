//! Measurements of copies, staged loads and their effect on computation.
//!
//! Each measurement alternates between its reference and Reprise in one process and reports the median of the ratios.
//! Without a GPU, [`host_copies`] measures the host build.

mod copies;
mod index;
mod slowdown;
mod staged;

pub use copies::{device_copies, host_copies};
pub use index::{host_index_times, index_times};
pub use slowdown::slowdown;
pub use staged::staged_load;

/// One measured figure of a benchmark.
#[derive(Clone, Debug, PartialEq)]
pub struct Measurement {
    /// Name of the measured quantity.
    pub name: String,
    /// Value in `unit`.
    pub value: f64,
    /// Unit of the value: `GB/s`, `ratio`, `ms`, `ns`, `%`.
    pub unit: &'static str,
    /// Bound of the value, where there is a goal.
    pub goal: Option<Goal>,
    /// Sizes, number of repetitions, and reductions for want of memory.
    pub detail: String,
}

/// Bound of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// At least this value.
    AtLeast(f64),
    /// At most this value.
    AtMost(f64),
}

impl Measurement {
    fn new(
        name: impl Into<String>,
        value: f64,
        unit: &'static str,
        detail: impl Into<String>,
    ) -> Measurement {
        Measurement { name: name.into(), value, unit, goal: None, detail: detail.into() }
    }

    fn with_goal(mut self, goal: Goal) -> Measurement {
        self.goal = Some(goal);
        self
    }

    /// Reports whether the value meets its goal; `None` without a goal.
    pub fn is_met(&self) -> Option<bool> {
        self.goal.map(|goal| match goal {
            Goal::AtLeast(bound) => self.value >= bound,
            Goal::AtMost(bound) => self.value <= bound,
        })
    }
}

/// Returns the median; 0 of no values.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        count if count.is_multiple_of(2) => f64::midpoint(values[middle - 1], values[middle]),
        _ => values[middle],
    }
}

/// Pseudo-random numbers of a seed (SplitMix64), for orders of blocks and contents.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// Returns the next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        value ^ (value >> 31)
    }

    /// Returns a number below `bound`, which is at least 1.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.draw() % bound
    }

    /// Returns the numbers below `count` in a random order.
    pub fn permutation(&mut self, count: u32) -> Vec<u32> {
        let mut order: Vec<u32> = (0..count).collect();
        for index in (1..order.len()).rev() {
            order.swap(index, self.below(index as u64 + 1) as usize);
        }
        order
    }

    /// Fills memory with the next numbers.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            let word = self.draw().to_ne_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_bound_values() {
        let measured = |value, goal| Measurement::new("x", value, "ratio", "").with_goal(goal).is_met();
        assert_eq!(measured(0.9, Goal::AtLeast(0.9)), Some(true));
        assert_eq!(measured(0.8, Goal::AtLeast(0.9)), Some(false));
        assert_eq!(measured(2.1, Goal::AtMost(2.0)), Some(false));
        assert_eq!(Measurement::new("x", 1.0, "ms", "").is_met(), None);
    }

    #[test]
    fn the_median_of_an_even_count_is_the_mean_of_the_middle() {
        assert_eq!(median(vec![4.0, 1.0, 3.0, 2.0]), 2.5);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
    }

    #[test]
    fn a_permutation_has_each_number_once() {
        let mut order = Random(1).permutation(100);
        assert_ne!(order, (0..100).collect::<Vec<u32>>());
        order.sort_unstable();
        assert_eq!(order, (0..100).collect::<Vec<u32>>());
    }
}
