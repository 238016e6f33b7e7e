//! `reprise sim reproduce`: runs the experiments of papers on the timed world and compares the figures.
//!
//! The output depends on nothing but the name, byte by byte. Times of this machine are logged only.

use std::time::Instant;

use reprise_simulator::serving::reproduce::{NAMES, Relation, Report, reproduce, rounded};
use reprise_testkit::output::{Audience, Table};
use serde::Serialize;

/// Name that selects all papers.
const ALL: &str = "all";

#[derive(Clone, Debug, clap::Args)]
pub(super) struct ReproduceArgs {
    /// Reproduce this paper: tierkv, tutti, vllm, or all.
    name: String,
}

/// Line of `reprise sim reproduce --json`.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Line<'a> {
    /// A published figure and ours.
    Figure {
        paper: &'a str,
        place: &'a str,
        quantity: &'a str,
        unit: &'a str,
        relation: &'static str,
        published: f64,
        ours: f64,
        deviation_percent: Option<f64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        interval_95: Option<[f64; 2]>,
    },
    /// A parameter that the paper leaves open.
    Choice { paper: &'a str, parameter: &'a str, value: &'a str, reason: &'a str },
    /// A contradiction in the paper.
    Position { paper: &'a str, contradiction: &'a str, side: &'a str },
    /// A figure that the model does not reach, with the reason.
    Limit { paper: &'a str, text: &'a str },
    /// Last line of the output.
    Summary { papers: usize, figures: usize, within_10_percent: usize, events: u64 },
}

pub(super) fn command(args: &ReproduceArgs, audience: Audience) -> anyhow::Result<()> {
    let names: Vec<&str> = match args.name.as_str() {
        ALL => NAMES.to_vec(),
        name => NAMES.into_iter().filter(|known| *known == name).collect(),
    };
    anyhow::ensure!(
        !names.is_empty(),
        "unknown reproduction '{}': use one of {}, or {ALL}",
        args.name,
        NAMES.join(", ")
    );
    let (mut figures, mut within, mut events) = (0, 0, 0);
    for name in &names {
        let began = Instant::now();
        let report = reproduce(name).expect("the name is in the list");
        let seconds = began.elapsed().as_secs_f64();
        tracing::info!(paper = *name, events = report.events, seconds, "reproduction done");
        figures += report.figures.len();
        within +=
            report.figures.iter().filter(|figure| is_within_10_percent(figure.deviation_percent())).count();
        events += report.events;
        audience.print_line(text(&report));
        lines(&report).iter().for_each(|line| audience.emit(line));
    }
    let papers = names.len();
    audience.print_line(format!("{papers} papers, {figures} figures, {within} within 10 %, {events} events"));
    audience.emit(&Line::Summary { papers, figures, within_10_percent: within, events });
    Ok(())
}

fn is_within_10_percent(deviation: Option<f64>) -> bool {
    deviation.is_some_and(|percent| percent.abs() <= 10.0)
}

fn sign(relation: Relation) -> &'static str {
    match relation {
        Relation::Equal => "=",
        Relation::AtLeast => ">=",
        Relation::AtMost => "<=",
    }
}

fn lines(report: &Report) -> Vec<Line<'_>> {
    let paper = report.name;
    let figures = report.figures.iter().map(|figure| Line::Figure {
        paper,
        place: &figure.place,
        quantity: &figure.quantity,
        unit: figure.unit,
        relation: sign(figure.relation),
        published: figure.published,
        ours: rounded(figure.ours),
        deviation_percent: figure.deviation_percent().map(rounded),
        interval_95: figure.interval.map(|interval| [rounded(interval.low), rounded(interval.high)]),
    });
    let choices = report.choices.iter().map(|choice| Line::Choice {
        paper,
        parameter: choice.parameter,
        value: &choice.value,
        reason: choice.reason,
    });
    let positions = report.positions.iter().map(|position| Line::Position {
        paper,
        contradiction: position.contradiction,
        side: position.side,
    });
    let limits = report.limits.iter().map(|text| Line::Limit { paper, text });
    figures.chain(choices).chain(positions).chain(limits).collect()
}

fn text(report: &Report) -> String {
    let mut table = Table::new(&["place", "quantity", "published", "ours", "unit", "deviation"]);
    for figure in &report.figures {
        let published = match figure.relation {
            Relation::Equal => rounded(figure.published).to_string(),
            relation => format!("{} {}", sign(relation), rounded(figure.published)),
        };
        let deviation =
            figure.deviation_percent().map_or("-".to_owned(), |percent| format!("{percent:+.1} %"));
        let cells = [&figure.place, &figure.quantity, &published, &rounded(figure.ours).to_string()];
        let cells = cells.into_iter().cloned().chain([figure.unit.to_owned(), deviation]);
        table.row(cells.collect());
    }
    let mut text = format!("{}\n\n{}\n", report.title, table.render());
    let mut section = |title: &str, items: Vec<String>| {
        if !items.is_empty() {
            text += &format!("\n{title}:\n");
            items.iter().for_each(|item| text += &format!("  * {item}\n"));
        }
    };
    let choices = report.choices.iter();
    section(
        "Open parameters",
        choices.map(|choice| format!("{}: {} ({})", choice.parameter, choice.value, choice.reason)).collect(),
    );
    let positions = report.positions.iter();
    section(
        "Contradictions of the paper, and the side that the model takes",
        positions.map(|position| format!("{} {}", position.contradiction, position.side)).collect(),
    );
    section("Not reached", report.limits.clone());
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_of_a_reproduction_is_equal_byte_by_byte() {
        let output = || {
            let report = reproduce("vllm").expect("known");
            let json: Vec<String> =
                lines(&report).iter().map(|line| serde_json::to_string(line).expect("encodes")).collect();
            (json.join("\n"), text(&report))
        };
        let (json, text) = output();
        assert_eq!((json.clone(), text.clone()), output());
        assert!(
            json.contains(r#""quantity":"blocks in a decode step of 15 ms""#)
                && json.contains(r#""published":274.0"#)
        );
        assert!(text.contains("Not reached") && text.contains("Open parameters"), "{text}");
    }

    #[test]
    fn unknown_name_is_an_error_that_lists_the_known_ones() {
        let args = ReproduceArgs { name: "sutti".to_owned() };
        let error = command(&args, Audience::Program).expect_err("unknown").to_string();
        assert!(NAMES.iter().all(|name| error.contains(name)) && error.contains("'sutti'"), "{error}");
    }
}
