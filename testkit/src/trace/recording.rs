//! Reads what `reprise trace record` has written, as requests of a trace.
//!
//! A block's id stands for its key, which identifies the whole prefix. A replay treats each block as one of a trace,
//! independently of its tokens at the recorded engine.

use std::collections::{BTreeSet, HashMap};
use std::io::BufRead;

use anyhow::{Context, ensure};
use reprise_policy::BlockKey;
use reprise_policy::trace::{Line, Operation, Request, Requests, VERSION};

use super::{HASH_IDS_MAX, TraceRequest};

/// Maximum number of tokens of a block: that of a layout.
const BLOCK_TOKENS_MAX: u64 = u16::MAX as u64;

/// A recording of one or several agents.
#[derive(Clone, Debug, Default)]
pub struct Recording {
    /// Requests in the order of their arrival.
    pub requests: Vec<TraceRequest>,
    /// Number of calls by kind: matches, loads, saves.
    pub calls: [u64; 3],
    /// Tenants of the calls.
    pub tenants: BTreeSet<String>,
    /// Number of sessions that made calls.
    pub sessions: usize,
    /// Number of calls that the agents could not pass on in time.
    pub dropped: u64,
    /// Nodes whose recording was cut off.
    pub cut_off: BTreeSet<String>,
    /// Number of recorded nodes.
    pub nodes: usize,
    /// Number of parts of requests whose begin is not in the recording.
    pub unplaced: u64,
    /// Number of requests that were cut after the largest number of blocks of a trace's request.
    pub shortened: u64,
}

/// Returns whether a file with this first line is a recording.
pub fn is_recording(first_line: &str) -> bool {
    matches!(serde_json::from_str(first_line), Ok(Line::Start { .. }))
}

impl Recording {
    /// Reads a recording; `name` is that of the file, for errors.
    ///
    /// # Errors
    /// A line is not one of a recording, the recording has another version, or impossible sizes.
    ///
    /// Engines record a long prompt in parts, which are one request here. A request with more blocks than one of a trace
    /// may have keeps its first ones.
    pub fn read(name: &str, reader: impl BufRead) -> anyhow::Result<Recording> {
        let (mut recording, mut requests) = (Recording::default(), Requests::default());
        let (mut sessions, mut nodes) = (BTreeSet::new(), BTreeSet::new());
        for_each_line(name, reader, |line| {
            match line {
                Line::Start { node, .. } => {
                    recording.cut_off.insert(node.clone());
                    nodes.insert(node);
                }
                Line::End { node, dropped, .. } => {
                    recording.cut_off.remove(&node);
                    recording.dropped += dropped;
                }
                Line::Call(call) => {
                    requests.add(&call);
                    recording.calls[kind(call.operation)] += 1;
                    sessions.insert((call.node, call.session));
                    recording.tenants.insert(call.tenant);
                }
            }
            Ok(())
        })?;
        recording.unplaced = requests.unplaced();
        (recording.sessions, recording.nodes) = (sessions.len(), nodes.len());
        let requests = requests.into_requests();
        let is_long = |request: &&Request| request.prompt.len() > HASH_IDS_MAX;
        recording.shortened = requests.iter().filter(is_long).count() as u64;
        recording.requests = in_hash_ids(&requests).with_context(|| name.to_owned())?;
        Ok(recording)
    }
}

/// Passes on the lines of a recording, without an incomplete last line.
///
/// # Errors
/// A line is not one of a recording, the recording has another version, or an error of `each`.
pub fn for_each_line(
    name: &str,
    mut reader: impl BufRead,
    mut each: impl FnMut(Line) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut has_started = false;
    let mut text = Vec::new();
    for index in 1_u64.. {
        let at = || format!("{name}: line {index}");
        text.clear();
        reader.read_until(b'\n', &mut text).with_context(|| format!("cannot read {}", at()))?;
        if text.is_empty() {
            break;
        }
        let line: Line = match serde_json::from_slice(&text) {
            Ok(line) => line,
            // The writer was killed within a line.
            Err(_) if has_started && text.last() != Some(&b'\n') => break,
            Err(error) => {
                let expected = || format!("{}: expected a line of `reprise trace record`", at());
                return Err(error).with_context(expected);
            }
        };
        if let Line::Start { version, .. } = line {
            ensure!(
                version == VERSION,
                "{}: version {version} of recordings; this program reads version {VERSION}: record again with \
                 agents of this version",
                at()
            );
            has_started = true;
        }
        ensure!(has_started, "{}: expected the start of a recording", at());
        each(line)?;
    }
    ensure!(has_started, "{name}: the recording is empty");
    Ok(())
}

fn kind(operation: Operation) -> usize {
    match operation {
        Operation::Match => 0,
        Operation::Load => 1,
        Operation::Save => 2,
    }
}

/// Converts keys to ids, and times to milliseconds since the first.
fn in_hash_ids(requests: &[Request]) -> anyhow::Result<Vec<TraceRequest>> {
    let mut ids = HashMap::new();
    let first = requests.first().map_or(0, |request| request.micros);
    requests
        .iter()
        .map(|request| {
            let block_tokens = request.block_tokens;
            let prompt = &request.prompt[..request.prompt.len().min(HASH_IDS_MAX)];
            ensure!(
                (1..=BLOCK_TOKENS_MAX).contains(&block_tokens),
                "invalid blocks of {block_tokens} tokens: expected 1 to {BLOCK_TOKENS_MAX}"
            );
            let mut id = |key: &BlockKey| {
                let next = ids.len() as u64;
                *ids.entry(*key).or_insert(next)
            };
            Ok(TraceRequest {
                timestamp: (request.micros - first) / 1000,
                input_length: prompt.len() as u64 * block_tokens,
                output_length: request.output_blocks.saturating_mul(block_tokens),
                hash_ids: prompt.iter().map(&mut id).collect(),
                block_tokens,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use reprise_policy::trace::Call;

    use super::*;

    fn lines(block_tokens: u64, prompts: &[&[u8]]) -> String {
        let mut lines = vec![Line::Start { version: VERSION, node: "n".to_owned() }];
        lines.extend(prompts.iter().zip(0..).map(|(prompt, at)| {
            Line::Call(Call {
                operation: Operation::Match,
                micros: 5_000_000 + at * 250_000,
                node: "n".to_owned(),
                session: 1,
                tenant: "default".to_owned(),
                block_tokens,
                block_bytes: 4096,
                position: Some(0),
                parent: None,
                keys: prompt.iter().map(|number| BlockKey([*number; 16])).collect(),
            })
        }));
        lines.iter().map(|line| serde_json::to_string(line).expect("encodes") + "\n").collect()
    }

    fn read(text: &str) -> anyhow::Result<Recording> {
        Recording::read("file", text.as_bytes())
    }

    #[test]
    fn equal_keys_have_equal_ids_in_every_block_size() {
        for block_tokens in [16, 1024] {
            let recording = read(&lines(block_tokens, &[&[1, 2, 5], &[1, 6]])).expect("reads");
            let ids: Vec<_> = recording.requests.iter().map(TraceRequest::full_blocks).collect();
            assert_eq!(ids, [&[0, 1, 2][..], &[0, 3]]);
            assert_eq!(recording.requests[0].input_length, 3 * block_tokens);
            assert_eq!(recording.requests[1].timestamp, 250);
        }
    }

    #[test]
    fn impossible_sizes_versions_and_lines_are_refused_with_the_reason() {
        let other = lines(16, &[]).replace("\"version\":1", "\"version\":9");
        for (text, words) in [
            (lines(0, &[&[1]]), "invalid blocks of 0 tokens"),
            (lines(1 << 54, &[&[1]]), "expected 1 to 65535"),
            (other, "version 9 of recordings"),
            (lines(16, &[]) + "{}\n", "line 2: expected a line"),
            (String::new(), "is empty"),
        ] {
            let error = format!("{:#}", read(&text).expect_err(words));
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn prompt_that_is_longer_than_a_request_keeps_its_first_blocks() {
        let key = |number: u32| {
            let mut key = [0; 16];
            key[..4].copy_from_slice(&number.to_le_bytes());
            BlockKey(key)
        };
        // Engines ask for at most so many blocks at a time.
        let part = |position: u32, keys: std::ops::Range<u32>| {
            Line::Call(Call {
                operation: Operation::Match,
                micros: 5_000_000,
                node: "n".to_owned(),
                session: 1,
                tenant: "default".to_owned(),
                block_tokens: 16,
                block_bytes: 4096,
                position: Some(position),
                parent: None,
                keys: keys.map(key).collect(),
            })
        };
        let max = u32::try_from(HASH_IDS_MAX).expect("few blocks");
        let start = Line::Start { version: VERSION, node: "n".to_owned() };
        let lines = [start, part(0, 0..max), part(max, max..max + 9), part(0, 0..1)];
        let text: String =
            lines.iter().map(|line| serde_json::to_string(line).expect("encodes") + "\n").collect();
        let recording = read(&text).expect("reads");
        assert_eq!((recording.requests.len(), recording.shortened, recording.unplaced), (2, 1, 0));
        let [long, short] = &recording.requests[..] else { panic!("two requests") };
        assert_eq!((long.hash_ids.len(), long.input_length), (HASH_IDS_MAX, 16 * u64::from(max)));
        assert_eq!(short.hash_ids, [0]);
    }

    #[test]
    fn a_recording_without_its_end_is_cut_off() {
        let text = lines(16, &[&[1]]);
        assert_eq!(read(&text).expect("reads").cut_off.len(), 1);
        let torn = read(&text[..text.len() - 5]).expect("reads");
        assert_eq!((torn.cut_off.len(), torn.calls), (1, [0, 0, 0]));
        let end = Line::End { node: "n".to_owned(), calls: 1, dropped: 4 };
        let whole = text + &serde_json::to_string(&end).expect("encodes");
        let recording = read(&whole).expect("reads");
        assert!(recording.cut_off.is_empty());
        assert_eq!((recording.dropped, recording.calls), (4, [1, 0, 0]));
    }
}
