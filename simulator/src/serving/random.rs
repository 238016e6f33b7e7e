//! Random numbers of a run, and the distributions that workloads draw from.

use crate::rng::Rng;

/// Random numbers that depend only on a seed.
#[derive(Clone, Debug)]
pub struct Random(Rng);

impl Random {
    /// Creates the numbers of a seed.
    pub fn new(seed: u64) -> Random {
        Random(Rng::new(seed))
    }

    /// A number below a bound above zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0.next() % bound
    }

    /// Uniform number in (0, 1].
    pub fn uniform(&mut self) -> f64 {
        ((self.0.next() >> 11) + 1) as f64 / (1_u64 << 53) as f64
    }

    /// Exponential number with a mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.uniform().ln()
    }

    /// Standard normal number (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        let (radius, angle) = ((-2.0 * self.uniform().ln()).sqrt(), std::f64::consts::TAU * self.uniform());
        radius * angle.cos()
    }

    /// Log-normal number with a median, and with the standard deviation of its logarithm.
    pub fn log_normal(&mut self, median: f64, sigma: f64) -> f64 {
        median * (sigma * self.normal()).exp()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_of_the_distributions_are_those_of_their_definitions() {
        let mut random = Random::new(42);
        let mean = |draw: &mut dyn FnMut() -> f64| (0..100_000).map(|_| draw()).sum::<f64>() / 100_000.0;
        assert!((mean(&mut || random.uniform()) - 0.5).abs() < 0.005);
        assert!((mean(&mut || random.exponential(3.0)) - 3.0).abs() < 0.05);
        assert!(mean(&mut || random.normal()).abs() < 0.02);
        assert!((mean(&mut || random.normal().powi(2)) - 1.0).abs() < 0.02);
        let expected = 100.0 * (0.5_f64 * 0.25).exp();
        assert!((mean(&mut || random.log_normal(100.0, 0.5)) / expected - 1.0).abs() < 0.02);
    }
}
