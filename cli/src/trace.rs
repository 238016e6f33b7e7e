//! `reprise trace`: records what engines ask of agents, removes names from a recording, and describes it.
//!
//! A recording has block keys, sizes and times, and no text. `reprise replay --trace` and `reprise demo --trace`
//! replay it.

mod record;

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use reprise_policy::trace::Names;
use reprise_testkit::output::{Audience, Table};
use reprise_testkit::trace::recording::{self, Recording};
use reprise_testkit::trace::{Trace, TraceRequest};
use serde::Serialize;

use crate::config::Config;

/// Arguments of `reprise trace`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct TraceArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Action {
    /// Record the calls of all engines of agents for some time.
    Record(record::RecordArgs),
    /// Replace keys, tenants and nodes of a recording by numbers.
    ///
    /// Equal keys stay equal, so the result can be replayed. Times count from the first call.
    Anonymise {
        /// Read this recording.
        recording: PathBuf,
        /// Write the result to this new file.
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Describe a recording, or a trace in Mooncake's format.
    Info {
        /// Read this file.
        trace: PathBuf,
    },
}

/// Description of a trace.
#[derive(Debug, Serialize)]
struct Info {
    requests: usize,
    seconds: f64,
    /// Blocks of the prompts.
    blocks: u64,
    distinct_blocks: usize,
    /// Share of the blocks that occurred before in the trace.
    reuse: f64,
    prompt_tokens_p50: u64,
    prompt_tokens_max: u64,
    output_tokens: u64,
    /// `null` for a trace that is not a recording.
    recording: Option<RecordingInfo>,
}

#[derive(Debug, Serialize)]
struct RecordingInfo {
    nodes: usize,
    sessions: usize,
    tenants: usize,
    matches: u64,
    loads: u64,
    saves: u64,
    /// Calls that the recording lost.
    dropped: u64,
    /// Parts of prompts whose begin is not in the recording.
    parts_without_begin: u64,
    /// Prompts that were cut after the largest number of blocks.
    shortened_prompts: u64,
    /// Nodes whose recording was cut off.
    cut_off: BTreeSet<String>,
}

/// Runs the command `reprise trace`.
pub(crate) fn command(args: &TraceArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    match &args.action {
        Action::Record(args) => record::command(args, config, audience),
        Action::Anonymise { recording, out } => anonymise(recording, out, audience),
        Action::Info { trace } => info(trace, audience),
    }
}

/// Creates a file that does not exist yet.
fn create(path: &Path) -> anyhow::Result<BufWriter<File>> {
    let file = File::create_new(path)
        .with_context(|| format!("cannot create {}: choose a new file", path.display()))?;
    Ok(BufWriter::new(file))
}

fn open(path: &Path) -> anyhow::Result<BufReader<File>> {
    Ok(BufReader::new(File::open(path).with_context(|| format!("cannot open {}", path.display()))?))
}

fn anonymise(from: &Path, to: &Path, audience: Audience) -> anyhow::Result<()> {
    let reader = open(from)?;
    let mut writer = create(to)?;
    let (mut names, mut lines) = (Names::default(), 0_u64);
    let written = recording::for_each_line(&from.display().to_string(), reader, |line| {
        serde_json::to_writer(&mut writer, &names.replace(line))?;
        writer.write_all(b"\n")?;
        lines += 1;
        Ok(())
    });
    let written = written.and_then(|()| writer.flush().context("writing"));
    if let Err(error) = written {
        // What exists of the result still has no names, but is incomplete.
        let _ = std::fs::remove_file(to);
        return Err(error);
    }
    audience.print_line(format!("{lines} lines written to {}", to.display()));
    audience.emit(&serde_json::json!({ "lines": lines }));
    Ok(())
}

fn info(path: &Path, audience: Audience) -> anyhow::Result<()> {
    let mut first = String::new();
    open(path)?.read_line(&mut first).with_context(|| format!("cannot read {}", path.display()))?;
    let (requests, recording) = if recording::is_recording(&first) {
        let mut recording = Recording::read(&path.display().to_string(), open(path)?)?;
        (std::mem::take(&mut recording.requests), Some(RecordingInfo::new(recording)))
    } else {
        (Trace::open(Some(path))?.requests, None)
    };
    let info = Info::new(&requests, recording);
    audience.print_line(info.table().render());
    audience.emit(&info);
    Ok(())
}

impl RecordingInfo {
    fn new(recording: Recording) -> RecordingInfo {
        let [matches, loads, saves] = recording.calls;
        RecordingInfo {
            nodes: recording.nodes,
            sessions: recording.sessions,
            tenants: recording.tenants.len(),
            matches,
            loads,
            saves,
            dropped: recording.dropped,
            parts_without_begin: recording.unplaced,
            shortened_prompts: recording.shortened,
            cut_off: recording.cut_off,
        }
    }
}

impl Info {
    fn new(requests: &[TraceRequest], recording: Option<RecordingInfo>) -> Info {
        let mut distinct: BTreeSet<u64> = BTreeSet::new();
        let mut blocks = 0;
        for request in requests {
            blocks += request.hash_ids.len() as u64;
            distinct.extend(&request.hash_ids);
        }
        let mut tokens: Vec<u64> = requests.iter().map(|request| request.input_length).collect();
        tokens.sort_unstable();
        let (first, last) = (requests.first(), requests.last());
        let millis =
            last.zip(first).map_or(0, |(last, first)| last.timestamp.saturating_sub(first.timestamp));
        Info {
            requests: requests.len(),
            seconds: millis as f64 / 1e3,
            blocks,
            distinct_blocks: distinct.len(),
            reuse: if blocks == 0 { 0.0 } else { 1.0 - distinct.len() as f64 / blocks as f64 },
            prompt_tokens_p50: tokens.get(tokens.len() / 2).copied().unwrap_or(0),
            prompt_tokens_max: tokens.last().copied().unwrap_or(0),
            output_tokens: requests.iter().map(|request| request.output_length).sum(),
            recording,
        }
    }

    fn table(&self) -> Table {
        let mut table = Table::new(&["trace", ""]);
        let mut row = |name: &str, value: String| table.row(vec![name.to_owned(), value]);
        row("requests", self.requests.to_string());
        row("duration", format!("{:.1} s", self.seconds));
        row("blocks", self.blocks.to_string());
        row("distinct blocks", self.distinct_blocks.to_string());
        row("reused blocks", format!("{:.1} %", 100.0 * self.reuse));
        row("prompt tokens, median", self.prompt_tokens_p50.to_string());
        row("prompt tokens, maximum", self.prompt_tokens_max.to_string());
        row("output tokens", self.output_tokens.to_string());
        if let Some(recording) = &self.recording {
            row("nodes", recording.nodes.to_string());
            row("sessions", recording.sessions.to_string());
            row("tenants", recording.tenants.to_string());
            row("matches", recording.matches.to_string());
            row("loads", recording.loads.to_string());
            row("saves", recording.saves.to_string());
            row("lost calls", recording.dropped.to_string());
            row("parts without a begin", recording.parts_without_begin.to_string());
            row("shortened prompts", recording.shortened_prompts.to_string());
            for node in &recording.cut_off {
                row("cut off", node.clone());
            }
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn info_counts_reuse_and_an_empty_trace_has_none() {
        let request = |timestamp, hash_ids: &[u64]| TraceRequest {
            timestamp,
            input_length: 512 * hash_ids.len() as u64,
            output_length: 7,
            hash_ids: hash_ids.to_vec(),
            block_tokens: 512,
        };
        let info = Info::new(&[request(500, &[1, 2]), request(2500, &[1, 3])], None);
        assert_eq!((info.requests, info.blocks, info.distinct_blocks), (2, 4, 3));
        assert!((info.seconds - 2.0).abs() < 1e-9 && (info.reuse - 0.25).abs() < 1e-9);
        assert_eq!((info.prompt_tokens_p50, info.output_tokens), (1024, 14));
        let empty = Info::new(&[], None);
        assert_eq!((empty.blocks, empty.prompt_tokens_max), (0, 0));
    }

    #[test]
    fn existing_files_are_not_overwritten() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("trace.jsonl");
        std::fs::write(&path, "kept").expect("writable");
        assert!(format!("{:#}", create(&path).expect_err("exists")).contains("choose a new file"));
        assert_eq!(std::fs::read_to_string(&path).expect("readable"), "kept");
        let from = directory.path().join("absent");
        assert!(anonymise(&from, &directory.path().join("out"), Audience::Program).is_err());
        assert!(!directory.path().join("out").exists());
    }
}
