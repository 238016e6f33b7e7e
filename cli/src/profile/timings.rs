//! Timings of an engine as JSON lines, the input of `reprise profile --timings`.
//!
//! ```text
//! {"kind":"table","stepTokens":32,"iocbBytes":1048576}
//! {"kind":"kernel","direction":"Read","iocbs":4,"micros":160,"sms":4}
//! {"kind":"kernel","direction":"Write","iocbs":4,"micros":330,"sms":4}
//! {"kind":"layer","phase":"Prefill","inputTokens":512,"prefixTokens":8192,"layerMicros":900,"slackMicros":220,"freeSms":8}
//! ```
//!
//! Times are microseconds. Repeated lines of one kernel or layer are joined: medians of times, the fewest free SMs and
//! the most occupied ones. A layer stands for lengths from its own up to the next measured ones, so each
//! phase needs a line for all pairs of its input and prefix lengths.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context, bail, ensure};
use reprise_policy::slack::content::TOKENS_MAX;
use reprise_policy::slack::measure::median;
use reprise_policy::slack::{KernelTime, Measurement, Phase, Window};
use serde::Deserialize;

/// One line of a file.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase", deny_unknown_fields)]
enum Line {
    Table {
        step_tokens: u32,
        iocb_bytes: u32,
    },
    Kernel {
        direction: Name,
        iocbs: u32,
        micros: u32,
        sms: u32,
    },
    Layer {
        phase: Phase,
        input_tokens: u32,
        prefix_tokens: u32,
        layer_micros: u32,
        slack_micros: u32,
        free_sms: u32,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
enum Name {
    Read,
    Write,
}

/// Measurements of one layer: layer and slack in microseconds, free SMs.
#[derive(Default)]
struct LayerLines {
    layer: Vec<f64>,
    slack: Vec<f64>,
    free_sms: Option<u32>,
}

/// Returns the measurement of a file.
///
/// # Errors
/// A line is invalid, the table is missing or repeated, or a pair of lengths has no line.
pub(super) fn parse(text: &str) -> anyhow::Result<Measurement> {
    let mut table = None;
    let mut kernels: BTreeMap<(Name, u32), (Vec<f64>, u32)> = BTreeMap::new();
    let mut layers: BTreeMap<(Phase, u32, u32), LayerLines> = BTreeMap::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let line: Line = serde_json::from_str(line)
            .with_context(|| format!("line {}: expected a table, kernel or layer", number + 1))?;
        match line {
            Line::Table { step_tokens, iocb_bytes } => {
                ensure!(table.is_none(), "line {}: a second table: keep one", number + 1);
                table = Some((step_tokens, iocb_bytes));
            }
            Line::Kernel { direction, iocbs, micros, sms } => {
                let (times, most) = kernels.entry((direction, iocbs)).or_default();
                times.push(f64::from(micros));
                *most = (*most).max(sms);
            }
            Line::Layer { phase, input_tokens, prefix_tokens, layer_micros, slack_micros, free_sms } => {
                let lines = layers.entry((phase, input_tokens, prefix_tokens)).or_default();
                lines.layer.push(f64::from(layer_micros));
                lines.slack.push(f64::from(slack_micros));
                lines.free_sms = Some(lines.free_sms.map_or(free_sms, |least| least.min(free_sms)));
            }
        }
    }
    let Some((step_tokens, iocb_bytes)) = table else {
        bail!(r#"no table: add a line {{"kind":"table","stepTokens":32,"iocbBytes":1048576}}"#);
    };
    let rows = |of: Name| {
        let kernels = kernels.iter().filter(|((direction, _), _)| *direction == of);
        let row = |((_, iocbs), (times, sms)): (&(Name, u32), &(Vec<f64>, u32))| KernelTime {
            iocbs: *iocbs,
            micros: median(times.clone()).round() as u32,
            sms: *sms,
        };
        kernels.map(row).collect()
    };
    let mut windows = Vec::new();
    for phase in Phase::ALL {
        windows.extend(of_phase(phase, &layers)?);
    }
    Ok(Measurement { step_tokens, iocb_bytes, windows, reads: rows(Name::Read), writes: rows(Name::Write) })
}

/// Returns the windows of a phase.
fn of_phase(phase: Phase, layers: &BTreeMap<(Phase, u32, u32), LayerLines>) -> anyhow::Result<Vec<Window>> {
    let own = || layers.keys().filter(|(of, ..)| *of == phase);
    let inputs: BTreeSet<u32> = own().map(|(_, input, _)| *input).collect();
    let prefixes: BTreeSet<u32> = own().map(|(.., prefix)| *prefix).collect();
    let end = |points: &BTreeSet<u32>, at: u32| points.range(at + 1..).next().copied().unwrap_or(TOKENS_MAX);
    let mut windows = Vec::new();
    for min_input_tokens in inputs.iter().copied() {
        for min_prefix_tokens in prefixes.iter().copied() {
            let Some(lines) = layers.get(&(phase, min_input_tokens, min_prefix_tokens)) else {
                bail!(
                    "no layer of {phase} with {min_input_tokens} input and {min_prefix_tokens} prefix tokens: measure it"
                );
            };
            let whole = |values: &[f64]| median(values.to_vec()).round() as u32;
            windows.push(Window {
                phase,
                min_input_tokens,
                max_input_tokens: end(&inputs, min_input_tokens),
                min_prefix_tokens,
                max_prefix_tokens: end(&prefixes, min_prefix_tokens),
                layer_micros: whole(&lines.layer),
                slack_micros: whole(&lines.slack),
                free_sms: lines.free_sms.unwrap_or_default(),
            });
        }
    }
    Ok(windows)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = r#"{"kind":"table","stepTokens":32,"iocbBytes":65536}"#;

    fn layer(input: u32, prefix: u32, slack: u32) -> String {
        let tokens = format!(r#""inputTokens":{input},"prefixTokens":{prefix}"#);
        format!(
            r#"{{"kind":"layer","phase":"Prefill",{tokens},"layerMicros":900,"slackMicros":{slack},"freeSms":8}}"#
        )
    }

    #[test]
    fn layers_stand_for_lengths_up_to_the_next_measured_ones() {
        let kernel = |direction: &str, micros: u32| {
            format!(r#"{{"kind":"kernel","direction":"{direction}","iocbs":1,"micros":{micros},"sms":2}}"#)
        };
        let lines = [
            TABLE.to_owned(),
            kernel("Read", 10),
            kernel("Read", 30),
            kernel("Read", 20),
            kernel("Write", 40),
            layer(0, 0, 100),
            layer(0, 64, 200),
            layer(64, 0, 300),
            layer(64, 64, 400),
        ];
        let mut measurement = parse(&lines.join("\n")).expect("valid timings");
        assert_eq!(measurement.reads, [KernelTime { iocbs: 1, micros: 20, sms: 2 }]);
        measurement.validate().expect("a valid measurement");
        let found = |input, prefix| {
            let window = measurement.windows.iter().find(|window| window.contains(input, prefix));
            window.map(|window| window.slack_micros)
        };
        assert_eq!(
            [found(63, 63), found(63, 64), found(99, 1), found(1 << 20, 64)],
            [100, 200, 300, 400].map(Some)
        );
    }

    #[test]
    fn rejects_invalid_files_with_line_and_remedy() {
        for (lines, words) in [
            (vec![], "no table: add a line"),
            (vec![TABLE.to_owned(), TABLE.to_owned()], "line 2: a second table"),
            (vec![r#"{"kind":"table","stepTokens":32}"#.to_owned()], "line 1: expected a table"),
            (
                vec![TABLE.to_owned(), layer(0, 64, 1), layer(64, 0, 1)],
                "no layer of Prefill with 0 input and 0 prefix",
            ),
        ] {
            let error = format!("{:#}", parse(&lines.join("\n")).expect_err(words));
            assert!(error.contains(words), "{error}");
        }
    }
}
