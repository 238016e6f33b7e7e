//! Report format of all benchmarks: a figure, its reference, its target, and whether the target is met.
//!
//! A ratio is meaningful only if both sides ran in the same minutes on the same machine. So [`paired`]
//! alternates between reference and subject and takes the median of the ratios of the pairs.

use serde::Serialize;

use crate::output::{Audience, Table};

/// One figure of a report, with its reference and target.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// Name of the figure, for example `store.cold_load_2mib`.
    pub name: String,
    /// Median of the repetitions, in `unit`.
    pub value: f64,
    /// Unit of the values.
    pub unit: &'static str,
    /// Description of the reference; `null` for an absolute figure.
    pub reference: Option<String>,
    /// Median of the reference, in `unit`.
    pub reference_value: Option<f64>,
    /// Median of value / reference over the pairs.
    pub ratio: Option<f64>,
    /// Text of the target.
    pub target: Option<String>,
    /// Whether the target was met; `null` without a target.
    pub met: Option<bool>,
    /// Range of the samples behind the median, in benchmarks that report it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub spread: Option<Spread>,
}

/// Range of samples, in the unit of their figure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Spread {
    /// Number of samples.
    pub samples: usize,
    pub min: f64,
    pub max: f64,
}

/// Target of a figure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Target {
    /// Lower bound of the ratio to the reference.
    RatioAtLeast(f64),
    /// Upper bound of the ratio to the reference.
    RatioAtMost(f64),
    /// Upper bound of the value.
    AtMost(f64),
    /// Lower bound of the value.
    AtLeast(f64),
    /// No target: the figure is for information.
    None,
}

/// Medians of alternating repetitions of a reference and a subject.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Paired {
    /// Median of the reference.
    pub reference: f64,
    /// Median of the subject.
    pub subject: f64,
    /// Median of subject / reference over the pairs.
    pub ratio: f64,
}

impl Figure {
    /// Creates a figure with an absolute target, or none.
    pub fn absolute(name: impl Into<String>, value: f64, unit: &'static str, target: Target) -> Figure {
        let met = match target {
            Target::AtMost(limit) => Some(value <= limit),
            Target::AtLeast(limit) => Some(value >= limit),
            Target::RatioAtLeast(_) | Target::RatioAtMost(_) | Target::None => None,
        };
        Figure {
            name: name.into(),
            value,
            unit,
            reference: None,
            reference_value: None,
            ratio: None,
            target: target.words(unit),
            met,
            spread: None,
        }
    }

    /// Creates a figure that is compared with a reference from the same run.
    pub fn relative(
        name: impl Into<String>,
        paired: Paired,
        unit: &'static str,
        against: (impl Into<String>, Target),
    ) -> Figure {
        let (reference, target) = against;
        let met = match target {
            Target::RatioAtLeast(least) => Some(paired.ratio >= least),
            Target::RatioAtMost(most) => Some(paired.ratio <= most),
            Target::AtMost(limit) => Some(paired.subject <= limit),
            Target::AtLeast(limit) => Some(paired.subject >= limit),
            Target::None => None,
        };
        Figure {
            name: name.into(),
            value: paired.subject,
            unit,
            reference: Some(reference.into()),
            reference_value: Some(paired.reference),
            ratio: Some(paired.ratio),
            target: target.words(unit),
            met,
            spread: None,
        }
    }
}

impl Spread {
    /// Returns the range of the samples; `None` without samples.
    pub fn of(samples: &[f64]) -> Option<Spread> {
        let min = samples.iter().copied().min_by(f64::total_cmp)?;
        let max = samples.iter().copied().max_by(f64::total_cmp)?;
        Some(Spread { samples: samples.len(), min, max })
    }
}

impl Target {
    fn words(self, unit: &str) -> Option<String> {
        match self {
            Target::RatioAtLeast(least) => Some(format!("ratio >= {least}")),
            Target::RatioAtMost(most) => Some(format!("ratio <= {most}")),
            Target::AtMost(limit) => Some(format!("<= {limit} {unit}")),
            Target::AtLeast(limit) => Some(format!(">= {limit} {unit}")),
            Target::None => None,
        }
    }
}

/// Alternates between reference and subject, once per round, after one warm-up round that is not counted.
///
/// # Errors
/// The first error of reference or subject.
pub fn paired(
    rounds: impl Iterator<Item = usize>,
    mut reference: impl FnMut() -> anyhow::Result<f64>,
    mut subject: impl FnMut() -> anyhow::Result<f64>,
) -> anyhow::Result<Paired> {
    reference()?;
    subject()?;
    let (mut references, mut subjects, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in rounds {
        let (of_reference, of_subject) = (reference()?, subject()?);
        references.push(of_reference);
        subjects.push(of_subject);
        ratios.push(of_subject / of_reference);
    }
    Ok(Paired { reference: median(references), subject: median(subjects), ratio: median(ratios) })
}

/// Returns the median: for an even number the mean of the middle two, NaN for an empty list.
pub fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

/// Prints figures as a table, or one JSON object per line.
pub fn print(audience: Audience, figures: &[Figure]) {
    let number =
        |value: f64| if value.abs() >= 1000.0 { format!("{value:.0}") } else { format!("{value:.3}") };
    // Only some benchmarks report the range of their samples.
    let spread = figures.iter().any(|figure| figure.spread.is_some());
    let mut heading = vec!["figure", "value"];
    heading.extend(spread.then_some("min to max (samples)"));
    heading.extend(["unit", "reference", "ratio", "target", "met"]);
    let mut table = Table::new(&heading);
    for figure in figures {
        audience.emit(figure);
        let reference = match (&figure.reference, figure.reference_value) {
            (Some(name), Some(value)) => format!("{} ({name})", number(value)),
            _ => String::new(),
        };
        let mut cells = vec![figure.name.clone(), number(figure.value)];
        if spread {
            let words = |of: Spread| format!("{} to {} ({})", number(of.min), number(of.max), of.samples);
            cells.push(figure.spread.map(words).unwrap_or_default());
        }
        cells.extend([
            figure.unit.to_owned(),
            reference,
            figure.ratio.map(|ratio| format!("{ratio:.3}")).unwrap_or_default(),
            figure.target.clone().unwrap_or_default(),
            figure.met.map(|met| if met { "yes" } else { "NO" }.to_owned()).unwrap_or_default(),
        ]);
        table.row(cells);
    }
    audience.print_line(table.render());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_ratio_over_pairs_decides_the_target() {
        let mut speeds = [9.0, 10.0, 10.0, 20.0].into_iter();
        let mut others = [9.0, 9.0, 8.0, 19.0].into_iter();
        let paired = paired(0..3, || Ok(speeds.next().expect("four")), || Ok(others.next().expect("four")))
            .expect("runs");
        assert_eq!((paired.reference, paired.subject), (10.0, 9.0));
        assert!((paired.ratio - 0.9).abs() < 1e-9);
        let figure = Figure::relative("x", paired, "GB/s", ("bare loop", Target::RatioAtLeast(0.95)));
        assert_eq!((figure.met, figure.target.as_deref()), (Some(false), Some("ratio >= 0.95")));
    }

    #[test]
    fn json_output_has_every_field() {
        let figure = Figure::absolute("match.8192", 0.5, "ms", Target::AtMost(1.0));
        let json = serde_json::to_value(&figure).expect("encodes");
        for field in ["name", "value", "unit", "reference", "reference_value", "ratio", "target", "met"] {
            assert!(json.get(field).is_some(), "{field}");
        }
        assert_eq!(json["met"], true);
        assert!(json.get("spread").is_none(), "a figure without samples has no spread");
    }

    #[test]
    fn spread_has_the_minimum_and_maximum_of_its_samples() {
        let spread = Spread::of(&[3.0, 1.0, 2.0]).expect("three samples");
        assert_eq!((spread.samples, spread.min, spread.max), (3, 1.0, 3.0));
        assert_eq!(Spread::of(&[]), None);
        let mut figure = Figure::absolute("x", 2.0, "ms", Target::None);
        figure.spread = Some(spread);
        let json = serde_json::to_value(&figure).expect("encodes");
        assert_eq!(json["spread"], serde_json::json!({ "samples": 3, "min": 1.0, "max": 3.0 }));
    }
}
