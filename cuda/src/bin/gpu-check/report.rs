//! The report of a run: a Markdown section for docs/BENCHMARKS.md, and the same as JSON.

use std::fmt;
use std::fmt::Write as _;
use std::fs;
use std::io;

use serde_json::{Value, json};

use crate::Options;

/// How a step ended.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Outcome {
    Passed,
    Failed(String),
    Skipped(String),
}

/// A step that ran.
#[derive(Clone, Debug)]
pub(crate) struct StepReport {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    pub(crate) seconds: f64,
    pub(crate) lines: Vec<Value>,
}

impl fmt::Display for Outcome {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Outcome::Passed => formatter.write_str("passed"),
            Outcome::Failed(reason) => write!(formatter, "FAILED: {reason}"),
            Outcome::Skipped(reason) => write!(formatter, "skipped: {reason}"),
        }
    }
}

/// Returns a line of a step as text.
pub(crate) fn line_text(line: &Value) -> String {
    let text = |key: &str| line[key].as_str().unwrap_or_default();
    match line["value"].as_f64() {
        Some(value) => {
            let goal = match line["met"].as_bool() {
                Some(true) => format!(", goal {}: met", text("goal")),
                Some(false) => format!(", goal {}: MISSED", text("goal")),
                None => String::new(),
            };
            format!("{}: {} {}{goal} ({})", text("name"), number(value), text("unit"), text("detail"))
        }
        None => format!("{}: {}", text("name"), text("detail")),
    }
}

/// Writes both files of the report.
pub(crate) fn write(options: &Options, device: &Value, steps: &[StepReport]) -> io::Result<()> {
    fs::create_dir_all(&options.out)?;
    let list: Vec<Value> = steps
        .iter()
        .map(|step| {
            json!({
                "step": step.name,
                "outcome": step.outcome.to_string(),
                "seconds": step.seconds,
                "figures": step.lines,
            })
        })
        .collect();
    let report = json!({"date": options.date, "commit": options.commit, "device": device, "steps": list});
    fs::write(options.out.join("gpu-check.json"), format!("{report:#}\n"))?;
    fs::write(options.out.join("gpu-check.md"), markdown(options, device, steps))
}

fn markdown(options: &Options, device: &Value, steps: &[StepReport]) -> String {
    let mut text = String::from("## GPU\n\n");
    let name = device["name"].as_str().unwrap_or("no GPU");
    let driver = device["driver"].as_str().unwrap_or("none");
    let _ = writeln!(text, "{}, commit {}. {name}, driver {driver}.\n", options.date, options.commit);
    text.push_str("```sh\nmake gpu-check\n```\n\n| step | result | seconds |\n|---|---|---|\n");
    for step in steps {
        let _ =
            writeln!(text, "| {} | {} | {:.1} |", step.name, cell(&step.outcome.to_string()), step.seconds);
    }
    text.push_str("\n| figure | value | goal | how |\n|---|---|---|---|\n");
    for line in steps.iter().flat_map(|step| &step.lines).filter(|line| line["value"].is_number()) {
        let field = |key: &str| cell(line[key].as_str().unwrap_or_default());
        let goal = match line["met"].as_bool() {
            Some(true) => format!("{}, met", field("goal")),
            Some(false) => format!("{}, **missed**", field("goal")),
            None => String::new(),
        };
        let value = number(line["value"].as_f64().unwrap_or_default());
        let _ = writeln!(
            text,
            "| {} | {value} {} | {goal} | {} |",
            field("name"),
            field("unit"),
            field("detail")
        );
    }
    text
}

/// Shortens a text to what fits a table of the documentation.
fn cell(text: &str) -> String {
    text.replace('|', "/").replace('\n', " ").chars().take(160).collect()
}

/// Formats a value with three significant digits or more.
fn number(value: f64) -> String {
    match value.abs() {
        size if size >= 100.0 => format!("{value:.0}"),
        size if size >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}
