//! Reads pages in Prometheus' text format.

/// Buckets of a histogram: upper bounds, and cumulative counts.
pub type Buckets = Vec<(f64, f64)>;

/// Returns the samples of a metric, each with its labels in braces, or with no labels.
pub fn samples<'a>(page: &'a str, metric: &'a str) -> impl Iterator<Item = (&'a str, f64)> {
    page.lines().filter_map(move |line| {
        let (labels, value) = line.strip_prefix(metric)?.rsplit_once(' ')?;
        (labels.is_empty() || labels.starts_with('{')).then_some(())?;
        Some((labels, value.parse().ok()?))
    })
}

/// Returns the sum of all samples of a metric; 0 without samples.
pub fn total(page: &str, metric: &str) -> f64 {
    // The sum of no floats is -0.
    samples(page, metric).fold(0.0, |sum, (_, value)| sum + value)
}

/// Returns the value of a label.
pub fn label<'a>(labels: &'a str, name: &str) -> Option<&'a str> {
    labels.split_once(&format!("{name}=\""))?.1.split('"').next()
}

/// Adds the count of one sample to the buckets of a histogram, by its label `le`.
pub fn add_bucket(buckets: &mut Buckets, labels: &str, count: f64) {
    let bound = match label(labels, "le") {
        Some("+Inf") => f64::INFINITY,
        Some(number) => number.parse().unwrap_or(f64::NAN),
        None => f64::NAN,
    };
    match buckets.iter_mut().find(|(known, _)| *known == bound) {
        Some((_, sum)) => *sum += count,
        None => buckets.push((bound, count)),
    }
}

/// Returns the upper bound of the bucket that contains this quantile; `None` without counts.
pub fn quantile(mut buckets: Buckets, share: f64) -> Option<f64> {
    buckets.sort_by(|one, other| one.0.total_cmp(&other.0));
    let all = buckets.last()?.1;
    let holds = buckets.iter().find(|(_, below)| *below >= share * all);
    holds.filter(|_| all > 0.0).map(|(bound, _)| *bound)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_the_bound_of_its_bucket_over_all_kinds() {
        let page = "\
            seconds_sum{kind=\"a\"} 1.0\n\
            seconds_bucket{le=\"0.5\",kind=\"a\"} 98\n\
            seconds_bucket{le=\"1.0\",kind=\"a\"} 98\n\
            seconds_bucket{le=\"+Inf\",kind=\"a\"} 98\n\
            seconds_bucket{le=\"0.5\",kind=\"b\"} 0\n\
            seconds_bucket{le=\"1.0\",kind=\"b\"} 2\n\
            seconds_bucket{le=\"+Inf\",kind=\"b\"} 2\n";
        let mut buckets = Buckets::new();
        samples(page, "seconds_bucket").for_each(|(labels, count)| add_bucket(&mut buckets, labels, count));
        assert_eq!(quantile(buckets.clone(), 0.98), Some(0.5));
        assert_eq!(quantile(buckets, 0.99), Some(1.0));
        assert_eq!(quantile(Buckets::new(), 0.99), None);
        assert_eq!(quantile(vec![(f64::INFINITY, 0.0)], 0.99), None);
    }

    #[test]
    fn samples_of_other_metrics_are_not_taken() {
        let page = "a_total{x=\"1\"} 2\na_total_more 5\na_total 3\n";
        assert_eq!(total(page, "a_total"), 5.0);
        assert_eq!(samples(page, "a_total").next().and_then(|(labels, _)| label(labels, "x")), Some("1"));
    }
}
