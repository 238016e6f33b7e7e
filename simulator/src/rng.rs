//! Reproducible randomness: splitmix64.

use std::time::Duration;

/// A generator; the same seed produces the same numbers.
#[derive(Clone, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Rng {
        Rng(mix(seed ^ 0x5eed_5eed))
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Returns true with a probability of `permille` in 1000.
    pub(crate) fn chance(&mut self, permille: u64) -> bool {
        self.next() % 1000 < permille
    }

    /// Returns a random element.
    pub(crate) fn one_of<T: Copy>(&mut self, some: &[T]) -> T {
        some[self.below(some.len())]
    }

    /// Returns a duration in the range, in microseconds.
    pub(crate) fn micros(&mut self, range: std::ops::Range<u64>) -> Duration {
        Duration::from_micros(range.start + self.next() % (range.end - range.start))
    }

    /// Returns a duration in the range, in milliseconds.
    pub(crate) fn millis(&mut self, range: std::ops::Range<u64>) -> Duration {
        self.micros(range.start * 1000..range.end * 1000)
    }
}

/// Scrambles the bits of a number.
pub(crate) fn mix(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
