//! `reprise sim reproduce`: runs the experiments of papers on the timed world and compares the figures.
//!
//! The output depends on nothing but the names and the traces, byte by byte. Times of this machine are logged only.

mod traces;

use std::path::PathBuf;
use std::time::Instant;

use anyhow::Context;
use reprise_simulator::serving::reproduce::{
    CASCADE, NAMES, Relation, Report, reproduce, reproduce_cascade, rounded,
};
use reprise_testkit::output::{Audience, Table};
use serde::Serialize;

/// Name that selects all papers.
const ALL: &str = "all";

#[derive(Clone, Debug, clap::Args)]
pub(super) struct ReproduceArgs {
    /// Reproduce this paper: tierkv, tutti, vllm, cascade, or all.
    name: String,
    /// Replay conversation_trace.jsonl and agentic_traces.tar.xz of this folder for cascade.
    ///
    /// The default is `../shared/data` if it has both, otherwise the built-in samples. The report names the traces.
    #[arg(long, value_name = "FOLDER")]
    traces: Option<PathBuf>,
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
        /// `null` if the paper leaves the figure empty.
        published: Option<f64>,
        ours: f64,
        deviation_percent: Option<f64>,
        #[serde(skip_serializing_if = "Option::is_none")]
        interval_95: Option<[f64; 2]>,
    },
    /// A claim of the paper's text.
    Claim { paper: &'a str, place: &'a str, claim: &'a str, ours: &'a str, confirmed: bool },
    /// A parameter that the paper leaves open.
    Choice { paper: &'a str, parameter: &'a str, value: &'a str, reason: &'a str },
    /// A contradiction in the paper.
    Position { paper: &'a str, contradiction: &'a str, side: &'a str },
    /// A figure that the model does not reach, with the reason.
    Limit { paper: &'a str, text: &'a str },
    /// Last line of the output.
    Summary { papers: usize, figures: usize, published: usize, within_10_percent: usize, events: u64 },
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
    let (mut figures, mut published, mut within, mut events) = (0, 0, 0, 0);
    for name in &names {
        let began = Instant::now();
        let report = run(name, args, audience)?;
        let seconds = began.elapsed().as_secs_f64();
        tracing::info!(paper = *name, events = report.events, seconds, "reproduction done");
        figures += report.figures.len();
        published += report.figures.iter().filter(|figure| figure.published.is_some()).count();
        within +=
            report.figures.iter().filter(|figure| is_within_10_percent(figure.deviation_percent())).count();
        events += report.events;
        audience.print_line(text(&report));
        lines(&report).iter().for_each(|line| audience.emit(line));
    }
    let papers = names.len();
    audience.print_line(format!(
        "{papers} papers, {figures} figures, {published} of them published, {within} within 10 %, {events} events"
    ));
    audience.emit(&Line::Summary { papers, figures, published, within_10_percent: within, events });
    Ok(())
}

/// Runs a reproduction of the list.
fn run(name: &str, args: &ReproduceArgs, audience: Audience) -> anyhow::Result<Report> {
    if name == CASCADE {
        return Ok(reproduce_cascade(&traces::read(args.traces.as_deref(), audience)?));
    }
    reproduce(name).with_context(|| format!("the reproduction {name} has no report"))
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
        published: figure.published.map(rounded),
        ours: rounded(figure.ours),
        deviation_percent: figure.deviation_percent().map(rounded),
        interval_95: figure.interval.map(|interval| [rounded(interval.low), rounded(interval.high)]),
    });
    let claims = report.claims.iter().map(|claim| Line::Claim {
        paper,
        place: claim.place,
        claim: claim.claim,
        ours: &claim.ours,
        confirmed: claim.is_confirmed,
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
    figures.chain(claims).chain(choices).chain(positions).chain(limits).collect()
}

fn text(report: &Report) -> String {
    let mut table = Table::new(&["place", "quantity", "published", "ours", "unit", "deviation"]);
    for figure in &report.figures {
        let published = match (figure.published, figure.relation) {
            (None, _) => "none".to_owned(),
            (Some(published), Relation::Equal) => rounded(published).to_string(),
            (Some(published), relation) => format!("{} {}", sign(relation), rounded(published)),
        };
        let deviation =
            figure.deviation_percent().map_or("-".to_owned(), |percent| format!("{percent:+.1} %"));
        let cells = [&figure.place, &figure.quantity, &published, &rounded(figure.ours).to_string()];
        let cells = cells.into_iter().cloned().chain([figure.unit.to_owned(), deviation]);
        table.row(cells.collect());
    }
    let mut text = format!("{}\n\n{}\n", report.title, table.render());
    if report.figures.iter().any(|figure| figure.published.is_none()) {
        text += "\npublished: none (the paper leaves the figure empty)\n";
    }
    let mut section = |title: &str, items: Vec<String>| {
        if !items.is_empty() {
            text += &format!("\n{title}:\n");
            items.iter().for_each(|item| text += &format!("  * {item}\n"));
        }
    };
    let claims = report.claims.iter();
    section(
        "Claims of the paper's text",
        claims
            .map(|claim| {
                let verdict = if claim.is_confirmed { "confirmed" } else { "not confirmed" };
                format!("{}: {} {verdict}: {}", claim.place, claim.claim, claim.ours)
            })
            .collect(),
    );
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
    fn cascade_on_the_samples_names_its_traces_and_prints_empty_figures_as_none() {
        let traces = traces::samples(Audience::Program).expect("the samples are valid");
        let report = reproduce_cascade(&traces);
        let text = text(&report);
        for words in ["conversation_sample.jsonl", "published: none", "Deduplication", "confirmed"] {
            assert!(text.contains(words), "{words} in {text}");
        }
        let encoded: Vec<String> =
            lines(&report).iter().map(|line| serde_json::to_string(line).expect("encodes")).collect();
        assert!(encoded.iter().any(|line| line.contains(r#""published":null"#)));
        assert!(encoded.iter().any(|line| line.contains(r#""kind":"claim""#)));
    }

    #[test]
    fn folder_without_traces_is_refused_with_their_sources() {
        let folder = std::env::temp_dir().join("reprise-folder-that-does-not-exist");
        let args = ReproduceArgs { name: CASCADE.to_owned(), traces: Some(folder) };
        let error = format!("{:#}", command(&args, Audience::Program).expect_err("absent"));
        for words in ["conversation_trace.jsonl", "kvcache-ai/Mooncake", "leave out --traces"] {
            assert!(error.contains(words), "{words} in {error}");
        }
    }

    #[test]
    fn unknown_name_is_an_error_that_lists_the_known_ones() {
        let args = ReproduceArgs { name: "sutti".to_owned(), traces: None };
        let error = command(&args, Audience::Program).expect_err("unknown").to_string();
        assert!(NAMES.iter().all(|name| error.contains(name)) && error.contains("'sutti'"), "{error}");
    }
}
