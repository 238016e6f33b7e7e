//! The one form in which every benchmark reports: a figure, what it is held against, and whether it is enough.
//!
//! Ratios only mean something when both sides ran in the same minutes on the same machine, so [`paired`] runs
//! reference and subject in turn and takes the median of the ratios pair by pair.

use serde::Serialize;

use crate::output::{Audience, Table};

/// One figure.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Figure {
    /// What was measured, for example `store.cold_load_2mib`.
    pub(crate) name: String,
    /// The median of the repetitions.
    pub(crate) value: f64,
    /// Its unit.
    pub(crate) unit: &'static str,
    /// What it is held against; none for an absolute limit.
    pub(crate) reference: Option<String>,
    /// The reference's median, in the same unit.
    pub(crate) reference_value: Option<f64>,
    /// Median of value / reference, pair by pair.
    pub(crate) ratio: Option<f64>,
    /// The target, in words.
    pub(crate) target: Option<String>,
    /// Whether the target was met; none without a target.
    pub(crate) met: Option<bool>,
    /// The samples that the value is the median of, where they are told.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) spread: Option<Spread>,
}

/// How far samples lie apart, in the unit of their figure.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(crate) struct Spread {
    /// How many there are.
    pub(crate) samples: usize,
    pub(crate) min: f64,
    pub(crate) max: f64,
}

/// What is enough.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Target {
    /// The ratio to the reference is at least this.
    RatioAtLeast(f64),
    /// The ratio to the reference is at most this.
    RatioAtMost(f64),
    /// The value is at most this.
    AtMost(f64),
    /// The value is at least this.
    AtLeast(f64),
    /// For information.
    None,
}

/// Medians of repetitions of a reference and a subject that ran in turn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Paired {
    /// Median of the reference.
    pub(crate) reference: f64,
    /// Median of the subject.
    pub(crate) subject: f64,
    /// Median of subject / reference, pair by pair.
    pub(crate) ratio: f64,
}

impl Figure {
    /// A figure held against a limit, or none.
    pub(crate) fn absolute(
        name: impl Into<String>,
        value: f64,
        unit: &'static str,
        target: Target,
    ) -> Figure {
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

    /// A figure held against a reference that ran beside it.
    pub(crate) fn relative(
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
    /// Of samples; none of none.
    pub(crate) fn of(samples: &[f64]) -> Option<Spread> {
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

/// Runs reference and subject in turn, once for each of `rounds` after one uncounted round.
///
/// # Errors
/// The first error of either.
pub(crate) fn paired(
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

/// The median; of an even number, the mean of the middle two. NaN of nothing.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        length if length % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

/// Prints figures: a table for people, a line each for programs.
pub(crate) fn print(audience: Audience, figures: &[Figure]) {
    let number =
        |value: f64| if value.abs() >= 1000.0 { format!("{value:.0}") } else { format!("{value:.3}") };
    // Only some benchmarks tell how far their samples lie apart.
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
    audience.say(table.render());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ratio_is_the_median_over_pairs_and_decides() {
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
    fn the_json_form_has_every_field() {
        let figure = Figure::absolute("match.8192", 0.5, "ms", Target::AtMost(1.0));
        let json = serde_json::to_value(&figure).expect("encodes");
        for field in ["name", "value", "unit", "reference", "reference_value", "ratio", "target", "met"] {
            assert!(json.get(field).is_some(), "{field}");
        }
        assert_eq!(json["met"], true);
        assert!(json.get("spread").is_none(), "it is told where it is known");
    }

    #[test]
    fn a_spread_has_the_least_and_the_most_of_its_samples() {
        let spread = Spread::of(&[3.0, 1.0, 2.0]).expect("three samples");
        assert_eq!((spread.samples, spread.min, spread.max), (3, 1.0, 3.0));
        assert_eq!(Spread::of(&[]), None);
        let mut figure = Figure::absolute("x", 2.0, "ms", Target::None);
        figure.spread = Some(spread);
        let json = serde_json::to_value(&figure).expect("encodes");
        assert_eq!(json["spread"], serde_json::json!({ "samples": 3, "min": 1.0, "max": 3.0 }));
    }
}
