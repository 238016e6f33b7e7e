//! Reads what `reprise trace record` has written, as requests of a trace.
//!
//! A trace has an id for each 512 tokens. The id stands for the key of the block that ends there, which identifies
//! the whole prefix. Blocks of engines are smaller or larger, but one must divide the other.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io::BufRead;

use anyhow::{Context, bail, ensure};
use reprise_policy::BlockKey;
use reprise_policy::trace::{Line, Operation, Request, Requests, VERSION};

use super::{TOKENS_PER_HASH_ID, TraceRequest};

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
}

/// Returns whether a file with this first line is a recording.
pub fn is_recording(first_line: &str) -> bool {
    matches!(serde_json::from_str(first_line), Ok(Line::Start { .. }))
}

impl Recording {
    /// Reads a recording; `name` is that of the file, for errors.
    ///
    /// # Errors
    /// A line is not one of a recording, the recording has another version, or block sizes that do not fit 512 tokens.
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
        recording.requests = in_hash_ids(&requests.into_requests()).with_context(|| name.to_owned())?;
        Ok(recording)
    }
}

/// Passes on the lines of a recording.
///
/// # Errors
/// A line is not one of a recording, the recording has another version, or an error of `each`.
pub fn for_each_line(
    name: &str,
    reader: impl BufRead,
    mut each: impl FnMut(Line) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut has_started = false;
    for (index, line) in reader.lines().enumerate() {
        let at = || format!("{name}: line {}", index + 1);
        let line = line.with_context(|| format!("cannot read {}", at()))?;
        let line: Line = serde_json::from_str(&line)
            .with_context(|| format!("{}: expected a line of `reprise trace record`", at()))?;
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

/// Converts requests to ids of 512 tokens, and times to milliseconds since the first.
fn in_hash_ids(requests: &[Request]) -> anyhow::Result<Vec<TraceRequest>> {
    let mut ids = HashMap::new();
    let first = requests.first().map_or(0, |request| request.micros);
    let mut checked = BTreeMap::new();
    requests
        .iter()
        .map(|request| {
            let tokens = request.block_tokens;
            checked
                .entry(tokens)
                .or_insert_with(|| fits(tokens))
                .as_ref()
                .map_err(|error| anyhow::anyhow!("{error}"))?;
            Ok(TraceRequest {
                timestamp: (request.micros - first) / 1000,
                input_length: request.prompt.len() as u64 * tokens,
                output_length: request.output_blocks * tokens,
                hash_ids: hash_ids(&mut ids, &request.prompt, tokens),
            })
        })
        .collect()
}

fn fits(block_tokens: u64) -> anyhow::Result<()> {
    let id_tokens = TOKENS_PER_HASH_ID as u64;
    if block_tokens == 0
        || !(id_tokens.is_multiple_of(block_tokens) || block_tokens.is_multiple_of(id_tokens))
    {
        bail!(
            "blocks of {block_tokens} tokens do not fit the {id_tokens} tokens of an id of a trace: one must divide \
             the other"
        );
    }
    Ok(())
}

fn hash_ids(ids: &mut HashMap<(BlockKey, u64), u64>, prompt: &[BlockKey], block_tokens: u64) -> Vec<u64> {
    let id_tokens = TOKENS_PER_HASH_ID as u64;
    let tokens = prompt.len() as u64 * block_tokens;
    (0..tokens.div_ceil(id_tokens))
        .map(|index| {
            let end = ((index + 1) * id_tokens).min(tokens);
            let block = usize::try_from((end - 1) / block_tokens).expect("an index of the prompt");
            let within = (end - 1) % block_tokens / id_tokens;
            let next = ids.len() as u64;
            *ids.entry((prompt[block], within)).or_insert(next)
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
                position: None,
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
    fn equal_prefixes_have_equal_ids_in_every_block_size() {
        let recording = read(&lines(256, &[&[1, 2, 3, 4, 5], &[1, 2, 6, 7]])).expect("reads");
        let ids: Vec<_> = recording.requests.iter().map(|request| request.hash_ids.clone()).collect();
        assert_eq!(ids, [vec![0, 1, 2], vec![0, 3]]);
        assert_eq!(recording.requests[0].input_length, 1280);
        assert_eq!(recording.requests[0].full_blocks(), [0, 1]);
        assert_eq!(recording.requests[1].timestamp, 250);
        let recording = read(&lines(1024, &[&[1, 2], &[1]])).expect("reads");
        let ids: Vec<_> = recording.requests.iter().map(|request| request.hash_ids.clone()).collect();
        assert_eq!(ids, [vec![0, 1, 2, 3], vec![0, 1]]);
    }

    #[test]
    fn other_block_sizes_versions_and_lines_are_refused_with_the_reason() {
        let other = lines(16, &[]).replace("\"version\":1", "\"version\":9");
        for (text, words) in [
            (lines(768, &[&[1]]), "blocks of 768 tokens"),
            (other, "version 9 of recordings"),
            (lines(16, &[]) + "{}\n", "line 2: expected a line"),
            (String::new(), "is empty"),
        ] {
            let error = format!("{:#}", read(&text).expect_err(words));
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_recording_without_its_end_is_cut_off() {
        let text = lines(16, &[&[1]]);
        assert_eq!(read(&text).expect("reads").cut_off.len(), 1);
        let end = Line::End { node: "n".to_owned(), calls: 1, dropped: 4 };
        let whole = text + &serde_json::to_string(&end).expect("encodes");
        let recording = read(&whole).expect("reads");
        assert!(recording.cut_off.is_empty());
        assert_eq!((recording.dropped, recording.calls), (4, [1, 0, 0]));
    }
}
