//! Rank sum test: whether two samples come from the same distribution (H. B. Mann, D. R. Whitney, 1947).

/// Standard score of the rank sum at the two-sided p-value of 0.01.
pub const Z_AT_P_001: f64 = 2.576;

/// Returns the standard score of the first sample's rank sum, by the normal approximation with the correction for ties:
/// positive if its values tend to be larger. The samples need about 20 values each.
///
/// # Panics
/// If a sample is empty, or if all values are equal.
pub fn standard_score(first: &[u64], second: &[u64]) -> f64 {
    let mut all: Vec<(u64, bool)> =
        first.iter().map(|value| (*value, true)).chain(second.iter().map(|value| (*value, false))).collect();
    all.sort_unstable();
    let (mut rank_sum, mut tied, mut below) = (0.0, 0.0, 0);
    for group in all.chunk_by(|one, other| one.0 == other.0) {
        let size = group.len() as f64;
        let mean_rank = f64::from(below) + (size + 1.0) / 2.0;
        rank_sum += mean_rank * group.iter().filter(|(_, is_first)| *is_first).count() as f64;
        tied += size.powi(3) - size;
        below += u32::try_from(group.len()).expect("a sample has less than 2^31 values");
    }
    let (one, other) = (first.len() as f64, second.len() as f64);
    let count = one + other;
    let variance = one * other / 12.0 * (count + 1.0 - tied / (count * (count - 1.0)));
    assert!(variance > 0.0, "two samples with different values");
    (rank_sum - one * (count + 1.0) / 2.0) / variance.sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_have_their_mean_rank_and_lower_the_variance() {
        // U is 3, its mean 10 and, with three tied values, its variance 20 / 12 × (10 - 24 / 72) = 16.11.
        let score = standard_score(&[1, 2, 2, 5], &[2, 3, 6, 7, 8]);
        assert!((score + 1.744).abs() < 0.001, "{score}");
        assert_eq!(standard_score(&[1, 4], &[2, 3]), 0.0);
    }

    #[test]
    fn a_shift_of_a_twentieth_of_the_spread_is_found_in_10_000_values() {
        // Every value of 1000 equally likely ones, and the same values 50 later.
        let values = |shift: u64| (0..10_000).map(|at| at * 7919 % 1000 + shift).collect::<Vec<u64>>();
        assert!(standard_score(&values(0), &values(0)).abs() < 0.001);
        assert!(standard_score(&values(50), &values(0)) > Z_AT_P_001);
    }
}
