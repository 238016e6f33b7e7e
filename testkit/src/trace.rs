//! Request traces in Mooncake's published format: one JSON object per line with `timestamp` (ms),
//! `input_length` and `output_length` (tokens) and `hash_ids`, one id per 512 tokens of the prompt. Ids are
//! prefix-chained: equal ids mean equal prefixes. The trace has no text, so token ids are derived from the
//! hash ids ([`TraceRequest::block_tokens`]): equal hash ids give equal tokens.
//!
//! Recordings of agents are read as such traces too ([`recording`]).

pub mod recording;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use recording::Recording;

/// Tokens of the prompt per hash id of the trace.
pub const TOKENS_PER_HASH_ID: usize = 512;

/// Size of the vocabulary of derived token ids (that of Llama 3).
const VOCABULARY: u64 = 128_256;

/// Sample of the conversation trace for checkouts without the complete one: its first 400 requests.
const SAMPLE: &str = include_str!("../data/conversation_sample.jsonl");

/// Path of the complete trace next to a checkout, relative to the working directory.
const COMPLETE_TRACE: &str = "../shared/data/conversation_trace.jsonl";

/// Maximum hash ids per request (4 million tokens).
const HASH_IDS_MAX: usize = 8192;

/// Request of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TraceRequest {
    /// Arrival in milliseconds since the start of the trace.
    pub timestamp: u64,
    /// Prompt length in tokens.
    pub input_length: u64,
    /// Output length in tokens.
    pub output_length: u64,
    /// One id per block of the prompt; the last one may cover fewer tokens.
    pub hash_ids: Vec<u64>,
    /// Tokens of a block: 512 in Mooncake's traces, that of the engine in recordings.
    #[serde(default = "mooncake_tokens")]
    pub block_tokens: u64,
}

/// A trace and its source.
#[derive(Clone, Debug)]
pub struct Trace {
    /// Displayed name.
    pub name: String,
    /// Requests in order.
    pub requests: Vec<TraceRequest>,
}

impl TraceRequest {
    /// Returns the full blocks of the prompt: a last hash id of fewer tokens is not cached, because engines only hash
    /// full blocks.
    pub fn full_blocks(&self) -> &[u64] {
        let full = self.input_length / self.block_tokens.max(1);
        let full = usize::try_from(full).unwrap_or(usize::MAX);
        &self.hash_ids[..self.hash_ids.len().min(full)]
    }

    /// Returns the token ids of a block, derived from its hash id.
    pub fn block_tokens(hash_id: u64, tokens: &mut [u32; TOKENS_PER_HASH_ID]) {
        for (index, token) in tokens.iter_mut().enumerate() {
            let word = crate::kv_function::mix(hash_id.wrapping_mul(0x1_0001).wrapping_add(index as u64));
            *token = u32::try_from(word % VOCABULARY).expect("below the vocabulary's size");
        }
    }
}

fn mooncake_tokens() -> u64 {
    TOKENS_PER_HASH_ID as u64
}

impl Trace {
    /// Reads `file`; without a file, the trace next to the checkout if it exists, or the sample.
    pub fn open(file: Option<&Path>) -> anyhow::Result<Trace> {
        let path = match file {
            Some(path) => path.to_owned(),
            None if Path::new(COMPLETE_TRACE).exists() => PathBuf::from(COMPLETE_TRACE),
            None => {
                return Trace::parse("the built-in sample".to_owned(), SAMPLE.as_bytes());
            }
        };
        let file = std::fs::File::open(&path)
            .with_context(|| format!("cannot open the trace {}", path.display()))?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Trace::read(name, BufReader::new(file))
    }

    /// Reads a trace or a recording.
    fn read(name: String, mut reader: impl BufRead) -> anyhow::Result<Trace> {
        let mut first = String::new();
        reader.read_line(&mut first).with_context(|| format!("cannot read {name}"))?;
        let is_recording = recording::is_recording(&first);
        let reader = first.as_bytes().chain(reader);
        if !is_recording {
            return Trace::parse(name, reader);
        }
        let requests = Recording::read(&name, reader)?.requests;
        if requests.is_empty() {
            bail!("{name}: the recording has no requests");
        }
        Ok(Trace { name, requests })
    }

    fn parse(name: String, reader: impl BufRead) -> anyhow::Result<Trace> {
        let mut requests = Vec::new();
        for (index, line) in reader.lines().enumerate() {
            let line = line.with_context(|| format!("{name}: cannot read line {}", index + 1))?;
            if line.trim().is_empty() {
                continue;
            }
            let request: TraceRequest = serde_json::from_str(&line).with_context(|| {
                format!(
                    "{name}: invalid request on line {}: expected an object with timestamp, input_length, \
                     output_length and hash_ids",
                    index + 1
                )
            })?;
            if request.hash_ids.len() > HASH_IDS_MAX {
                bail!("{name}: line {} has more than {HASH_IDS_MAX} hash ids", index + 1);
            }
            requests.push(request);
        }
        if requests.is_empty() {
            bail!("{name}: the trace has no requests");
        }
        Ok(Trace { name, requests })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sample_is_readable_and_shares_prefixes() {
        let trace = Trace::parse("sample".into(), SAMPLE.as_bytes()).expect("reads");
        assert!(trace.requests.len() >= 400);
        let first = trace.requests[0].hash_ids[0];
        assert!(
            trace.requests.iter().filter(|request| request.hash_ids.first() == Some(&first)).count() > 10
        );
    }

    #[test]
    fn partial_last_block_is_not_cached() {
        let request = TraceRequest {
            timestamp: 0,
            input_length: 1100,
            output_length: 1,
            hash_ids: vec![4, 5, 6],
            block_tokens: 512,
        };
        assert_eq!(request.full_blocks(), [4, 5]);
    }

    #[test]
    fn error_has_the_number_of_the_invalid_line() {
        let text = "{\"timestamp\":0,\"input_length\":1,\"output_length\":1,\"hash_ids\":[]}\nnonsense\n";
        let error = Trace::parse("t".into(), text.as_bytes()).expect_err("bad");
        assert!(format!("{error:#}").contains("line 2"), "{error:#}");
    }

    #[test]
    fn only_equal_hash_ids_give_equal_tokens() {
        let (mut a, mut b) = ([0; TOKENS_PER_HASH_ID], [0; TOKENS_PER_HASH_ID]);
        TraceRequest::block_tokens(7, &mut a);
        TraceRequest::block_tokens(7, &mut b);
        assert_eq!(a, b);
        TraceRequest::block_tokens(8, &mut b);
        assert_ne!(a, b);
    }
}
