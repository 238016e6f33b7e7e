//! Medians, percentiles, bootstrap intervals and the Wilcoxon signed-rank test.

use super::random::Random;

/// Resamples of a bootstrap interval.
const RESAMPLES: usize = 2_000;

/// Seed of the resamples: an interval depends on its values only.
const RESAMPLE_SEED: u64 = 42;

/// Interval that contains a statistic with a confidence of 95 %.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval95 {
    /// Lower end of the interval.
    pub low: f64,
    /// Upper end of the interval.
    pub high: f64,
}

/// Result of a two-sided Wilcoxon signed-rank test.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SignedRank {
    /// Smaller sum of ranks.
    pub w: f64,
    /// Probability of such a sum if both distributions are equal, by the normal approximation.
    pub p: f64,
    /// Number of pairs that differ.
    pub pairs: usize,
}

/// Arithmetic mean; zero without values.
pub fn mean(values: &[f64]) -> f64 {
    if values.is_empty() { 0.0 } else { values.iter().sum::<f64>() / values.len() as f64 }
}

/// Value below which a share of the values lies, between 0 and 1, by linear interpolation; zero without values.
pub fn quantile(values: &[f64], share: f64) -> f64 {
    let mut values = values.to_vec();
    let Some(last) = values.len().checked_sub(1) else { return 0.0 };
    let place = share.clamp(0.0, 1.0) * last as f64;
    let (_, below, behind) = values.select_nth_unstable_by(place as usize, f64::total_cmp);
    let above = behind.iter().copied().min_by(f64::total_cmp).unwrap_or(*below);
    *below + (above - *below) * place.fract()
}

/// [`quantile`] of whole numbers, such as times in nanoseconds: the definition of all percentiles of results.
pub fn percentile(values: &[u64], share: f64) -> f64 {
    let values: Vec<f64> = values.iter().map(|value| *value as f64).collect();
    quantile(&values, share)
}

/// Median; zero without values.
pub fn median(values: &[f64]) -> f64 {
    quantile(values, 0.5)
}

/// Bootstrap interval of the median.
pub fn bootstrap_median(values: &[f64]) -> Interval95 {
    let mut random = Random::new(RESAMPLE_SEED);
    if values.is_empty() {
        return Interval95 { low: 0.0, high: 0.0 };
    }
    let mut resample = || {
        let drawn: Vec<f64> =
            values.iter().map(|_| values[random.below(values.len() as u64) as usize]).collect();
        median(&drawn)
    };
    let medians: Vec<f64> = (0..RESAMPLES).map(|_| resample()).collect();
    Interval95 { low: quantile(&medians, 0.025), high: quantile(&medians, 0.975) }
}

/// Tests whether paired values differ. Equal pairs are left out; tied differences share their mean rank.
pub fn signed_rank(first: &[f64], second: &[f64]) -> SignedRank {
    let mut differences: Vec<f64> =
        first.iter().zip(second).map(|(first, second)| first - second).filter(|by| *by != 0.0).collect();
    differences.sort_by(|one, other| one.abs().total_cmp(&other.abs()));
    let pairs = differences.len();
    if pairs == 0 {
        return SignedRank { w: 0.0, p: 1.0, pairs };
    }
    let (mut positive, mut ties, mut begin) = (0.0, 0.0, 0);
    while begin < pairs {
        let tied = differences[begin..].iter().take_while(|by| by.abs() == differences[begin].abs()).count();
        // Ranks begin + 1 to begin + tied.
        let rank = begin as f64 + (tied as f64 + 1.0) / 2.0;
        positive += rank * differences[begin..begin + tied].iter().filter(|by| **by > 0.0).count() as f64;
        ties += (tied as f64).powi(3) - tied as f64;
        begin += tied;
    }
    let n = pairs as f64;
    let all = n * (n + 1.0) / 2.0;
    let w = positive.min(all - positive);
    let variance = n * (n + 1.0) * (2.0 * n + 1.0) / 24.0 - ties / 48.0;
    let z = if variance > 0.0 { (w - all / 2.0) / variance.sqrt() } else { 0.0 };
    SignedRank { w, p: (2.0 * normal_tail(-z)).min(1.0), pairs }
}

/// Probability that a standard normal number exceeds z ≥ 0 (Abramowitz and Stegun 26.2.17, error below 8·10⁻⁸).
fn normal_tail(z: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * z);
    let factors = [0.319_381_530, -0.356_563_782, 1.781_477_937, -1.821_255_978, 1.330_274_429];
    let sum = factors.iter().rev().fold(0.0, |sum, factor| (sum + factor) * t);
    (-z * z / 2.0).exp() / std::f64::consts::TAU.sqrt() * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_interpolate() {
        assert_eq!([median(&[3.0, 1.0, 2.0]), median(&[4.0, 1.0, 2.0, 3.0]), median(&[])], [2.0, 2.5, 0.0]);
        assert_eq!(quantile(&[0.0, 10.0], 0.95), 9.5);
        let descending: Vec<u64> = (0..=200).rev().collect();
        assert_eq!(
            [0.0, 0.5, 0.99, 1.0].map(|share| percentile(&descending, share)),
            [0.0, 100.0, 198.0, 200.0]
        );
        assert_eq!([percentile(&[4, 1], 0.25), percentile(&[], 0.5)], [1.75, 0.0]);
        let interval = bootstrap_median(&[1.0, 2.0, 3.0, 4.0, 5.0]);
        assert_eq!((interval.low, interval.high), (1.0, 5.0));
    }

    #[test]
    fn signed_rank_agrees_with_a_published_example() {
        // Wilcoxon (1945), table I: pairs of Darwin's maize, differences with W = 24 of 15 pairs.
        let differences =
            [49.0, -67.0, 8.0, 16.0, 6.0, 23.0, 28.0, 41.0, 14.0, 29.0, 56.0, 24.0, 75.0, 60.0, -48.0];
        let test = signed_rank(&differences, &[0.0; 15]);
        assert_eq!((test.w, test.pairs), (24.0, 15));
        assert!((0.03..0.05).contains(&test.p), "{}", test.p);
    }

    #[test]
    fn equal_samples_do_not_differ_and_a_dominated_one_has_no_rank() {
        assert_eq!(signed_rank(&[1.0; 9], &[1.0; 9]), SignedRank { w: 0.0, p: 1.0, pairs: 0 });
        let high: Vec<f64> = (0..100).map(|at| 5.0 + f64::from(at)).collect();
        let test = signed_rank(&high, &[1.0; 100]);
        assert_eq!(test.w, 0.0);
        assert!(test.p < 0.001, "{}", test.p);
    }
}
