//! Errors of a profile's predictions, as quantiles over recent layers.
//!
//! Each error is the difference between the measured and the predicted duration, in hundredths of the
//! prediction. Errors are counted in one bucket per hundredth, in two generations: a full generation replaces
//! the one before, so that a corrected machine stops counting as drifted.
//!
//! Memory: 8 KiB for each profile, for any number of layers.

/// Largest counted error in hundredths; larger errors count as this one.
pub const ERROR_PERCENT_MAX: u32 = 1_000;
/// Layers of a generation.
const GENERATION: u32 = 4_096;
/// Minimum layers for a quantile.
pub const SAMPLES_MIN: u32 = 100;

const BUCKETS: usize = ERROR_PERCENT_MAX as usize + 1;

/// Errors of recent predictions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PredictionErrors {
    current: Generation,
    previous: Generation,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Generation {
    counts: Box<[u32; BUCKETS]>,
    total: u32,
}

impl Default for Generation {
    fn default() -> Generation {
        Generation { counts: Box::new([0; BUCKETS]), total: 0 }
    }
}

/// Quantiles of the prediction error of a profile, in percent of the prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PredictionError {
    /// Median of the error.
    pub p50_percent: u32,
    /// 99th percentile of the error.
    pub p99_percent: u32,
}

/// Error of one prediction in hundredths of the prediction, rounded up, at most [`ERROR_PERCENT_MAX`]. A
/// prediction of 0 µs counts as 1 µs.
pub fn error_percent(predicted_micros: u32, measured_micros: u32) -> u32 {
    let difference = u64::from(predicted_micros.abs_diff(measured_micros));
    let percent = (difference * 100).div_ceil(u64::from(predicted_micros.max(1)));
    u32::try_from(percent).unwrap_or(u32::MAX).min(ERROR_PERCENT_MAX)
}

impl PredictionErrors {
    /// Counts the error of one layer.
    pub fn record(&mut self, predicted_micros: u32, measured_micros: u32) {
        if self.current.total >= GENERATION {
            self.previous = std::mem::take(&mut self.current);
        }
        let bucket = error_percent(predicted_micros, measured_micros) as usize;
        self.current.counts[bucket] += 1;
        self.current.total += 1;
    }

    /// Number of counted layers.
    pub fn samples(&self) -> u32 {
        self.current.total + self.previous.total
    }

    /// Smallest error in hundredths that `percent` percent of the layers do not exceed; `None` below
    /// [`SAMPLES_MIN`] layers.
    pub fn quantile(&self, percent: u8) -> Option<u32> {
        let samples = self.samples();
        if samples < SAMPLES_MIN {
            return None;
        }
        let rank = (u64::from(samples) * u64::from(percent)).div_ceil(100).max(1);
        let mut seen = 0_u64;
        let counts = self.current.counts.iter().zip(self.previous.counts.iter());
        let at = counts.map(|(current, previous)| u64::from(current + previous)).position(|count| {
            seen += count;
            seen >= rank
        });
        at.and_then(|bucket| u32::try_from(bucket).ok())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn error_is_relative_to_the_prediction_and_bounded() {
        for (predicted, measured, expected) in [
            (100, 100, 0),
            (100, 130, 30),
            (100, 70, 30),
            (1000, 1001, 1),
            (0, 0, 0),
            (0, 3, 300),
            (1, u32::MAX, ERROR_PERCENT_MAX),
            (u32::MAX, 0, 100),
        ] {
            assert_eq!(error_percent(predicted, measured), expected, "{predicted} {measured}");
        }
    }

    #[test]
    fn quantiles_need_a_hundred_layers_and_follow_a_change() {
        let mut errors = PredictionErrors::default();
        for _ in 0..SAMPLES_MIN - 1 {
            errors.record(100, 110);
        }
        assert_eq!(errors.quantile(99), None);
        errors.record(100, 150);
        assert_eq!(
            (errors.quantile(50), errors.quantile(99), errors.quantile(100)),
            (Some(10), Some(10), Some(50))
        );
        for _ in 0..SAMPLES_MIN {
            errors.record(100, 150);
        }
        assert_eq!(errors.quantile(99), Some(50));
        // Two generations later, only the new errors count.
        for _ in 0..2 * GENERATION {
            errors.record(100, 103);
        }
        assert_eq!(errors.quantile(100), Some(3));
        assert!(errors.samples() <= 2 * GENERATION);
    }

    proptest! {
        #[test]
        fn quantile_is_that_of_the_sorted_errors(
            measured in proptest::collection::vec(0_u32..2_000, 100..400),
            percent in 1_u8..=100,
        ) {
            let mut errors = PredictionErrors::default();
            for micros in &measured {
                errors.record(100, *micros);
            }
            let mut sorted: Vec<u32> = measured.iter().map(|micros| error_percent(100, *micros)).collect();
            sorted.sort_unstable();
            let rank = (sorted.len() * usize::from(percent)).div_ceil(100).max(1);
            prop_assert_eq!(errors.quantile(percent), Some(sorted[rank - 1]));
        }
    }
}
