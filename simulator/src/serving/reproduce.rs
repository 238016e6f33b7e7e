//! Reproductions: the experiments of papers on the timed world, next to the published figures.
//!
//! A report has figures (published, ours, deviation), claims of the paper's text without a figure, choices for parameters
//! that the paper leaves open, positions on statements of the paper that contradict each other, and limits: figures that
//! this model cannot reach, and why. No constant of the model is fitted to a published figure.

mod cascade;
mod cascade_traces;
mod tierkv;
mod tierkv_closed;
mod tutti;
mod tutti_datasets;
mod tutti_rates;
mod vllm;

pub use cascade::report as reproduce_cascade;
pub use cascade_traces::{NamedTrace, Traces};

use super::statistics::{Interval95, bootstrap_median, median};

/// Relation between a figure and its published value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    /// The paper states a value.
    Equal,
    /// The paper states a lower bound.
    AtLeast,
    /// The paper states an upper bound.
    AtMost,
}

/// A published figure and ours.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Place in the paper.
    pub place: String,
    /// Quantity that the figure measures.
    pub quantity: String,
    /// Unit of both values.
    pub unit: &'static str,
    /// Value that the paper states; `None` if the paper leaves the figure empty.
    pub published: Option<f64>,
    /// Relation of the published value.
    pub relation: Relation,
    /// Our value: the median over the seeds, if there are several.
    pub ours: f64,
    /// 95 % bootstrap interval over the seeds.
    pub interval: Option<Interval95>,
}

/// A claim of the paper's text that has no figure, and whether our figures agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// Place in the paper.
    pub place: &'static str,
    /// Statement of the paper.
    pub claim: &'static str,
    /// Our figures for it.
    pub ours: String,
    /// Whether our figures agree.
    pub is_confirmed: bool,
}

/// Value of a parameter that the paper leaves open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Name of the parameter.
    pub parameter: &'static str,
    /// Value that the model uses.
    pub value: String,
    /// Reason for the choice.
    pub reason: &'static str,
}

/// Statements of a paper that contradict each other, and the one that the model follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Statements that contradict each other.
    pub contradiction: &'static str,
    /// The side that the model takes, and why.
    pub side: &'static str,
}

/// Report on a paper.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Name of the reproduction.
    pub name: &'static str,
    /// Title of the paper.
    pub title: &'static str,
    /// Figures in the order of the paper.
    pub figures: Vec<Figure>,
    /// Claims of the paper's text.
    pub claims: Vec<Claim>,
    /// Choices for open parameters.
    pub choices: Vec<Choice>,
    /// Positions on the paper's contradictions.
    pub positions: Vec<Position>,
    /// Figures that the model cannot reach, and the reason.
    pub limits: Vec<String>,
    /// Events that were simulated.
    pub events: u64,
}

/// Name of the reproduction that replays traces: [`reproduce_cascade`].
pub const CASCADE: &str = "cascade";

/// Names of all reproductions.
pub const NAMES: [&str; 4] = ["tierkv", "tutti", "vllm", CASCADE];

/// Runs a reproduction that needs no trace; `None` for an unknown name and for [`CASCADE`].
pub fn reproduce(name: &str) -> Option<Report> {
    match name {
        "tierkv" => Some(tierkv::report()),
        "tutti" => Some(tutti::report()),
        "vllm" => Some(vllm::report()),
        _ => None,
    }
}

impl Figure {
    /// A figure with a stated value.
    pub(super) fn new(
        place: &str,
        quantity: impl Into<String>,
        unit: &'static str,
        values: (f64, f64),
    ) -> Figure {
        let (published, ours) = values;
        Figure { published: Some(published), ..Figure::unpublished(place, quantity, unit, ours) }
    }

    /// A figure that the paper leaves empty.
    pub(super) fn unpublished(
        place: &str,
        quantity: impl Into<String>,
        unit: &'static str,
        ours: f64,
    ) -> Figure {
        let (place, quantity) = (place.to_owned(), quantity.into());
        Figure { place, quantity, unit, published: None, relation: Relation::Equal, ours, interval: None }
    }

    /// A figure with one value for each seed.
    pub(super) fn of_seeds(
        place: &str,
        quantity: impl Into<String>,
        unit: &'static str,
        (published, seeds): (f64, &[f64]),
    ) -> Figure {
        let figure = Figure::new(place, quantity, unit, (published, median(seeds)));
        Figure { interval: Some(bootstrap_median(seeds)), ..figure }
    }

    /// The figure as a bound.
    pub(super) fn bound(self, relation: Relation) -> Figure {
        Figure { relation, ..self }
    }

    /// Deviation from the published value in percent; `None` without one, or if it is zero and ours is not. Zero if a
    /// bound holds.
    pub fn deviation_percent(&self) -> Option<f64> {
        let published = self.published?;
        let holds = match self.relation {
            Relation::Equal => self.ours == published,
            Relation::AtLeast => self.ours >= published,
            Relation::AtMost => self.ours <= published,
        };
        if holds {
            return Some(0.0);
        }
        (published != 0.0).then(|| (self.ours / published - 1.0) * 100.0)
    }
}

/// Values below this are zero in reports, among them probabilities that no sample of this size can show.
const ZERO_BELOW: f64 = 1e-9;

/// Rounds to four significant digits, so that output does not depend on the last bits of sums.
pub fn rounded(value: f64) -> f64 {
    if value.abs() < ZERO_BELOW || !value.is_finite() {
        return 0.0;
    }
    let digits = 3 - value.abs().log10().floor() as i32;
    let text = if digits >= 0 {
        format!("{value:.*}", digits as usize)
    } else {
        let unit = 10_f64.powi(-digits);
        format!("{}", (value / unit).round() * unit)
    };
    text.parse().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deviation_is_relative_to_the_published_value() {
        let figure = |published, ours| Figure::new("table 1", "time", "ms", (published, ours));
        assert_eq!(figure(2.0, 3.0).deviation_percent(), Some(50.0));
        assert_eq!(
            [figure(0.0, 1.0).deviation_percent(), figure(0.0, 0.0).deviation_percent()],
            [None, Some(0.0)]
        );
        assert_eq!(Figure::unpublished("table 3", "hit rate", "%", 4.0).deviation_percent(), None);
        assert_eq!(figure(80.0, 99.0).bound(Relation::AtLeast).deviation_percent(), Some(0.0));
        assert_eq!(figure(80.0, 40.0).bound(Relation::AtLeast).deviation_percent(), Some(-50.0));
        assert_eq!(
            figure(0.001, 0.5).bound(Relation::AtMost).deviation_percent().map(f64::round),
            Some(49_900.0)
        );
    }

    #[test]
    fn numbers_have_four_significant_digits() {
        assert_eq!(
            [1.234_56, 123_456.0, 0.000_123_456, -98.765, 0.0, f64::NAN].map(rounded),
            [1.235, 123_500.0, 0.000_123_5, -98.77, 0.0, 0.0]
        );
    }

    #[test]
    fn closed_forms_give_equal_reports_and_name_a_reason_for_each_choice() {
        let report = reproduce("vllm").expect("known");
        assert_eq!(reproduce("vllm"), Some(report.clone()));
        assert!(report.figures.len() >= 20, "{}", report.figures.len());
        assert!(report.choices.iter().all(|choice| !choice.reason.is_empty()));
        assert_eq!(reproduce("unknown"), None);
    }
}
