//! Request traces in the format that Mooncake published: one JSON object a line with `timestamp` (ms),
//! `input_length` and `output_length` (tokens) and `hash_ids`, one id per 512 tokens of the prompt. Ids are
//! prefix-chained: equal ids mean equal prefixes. The trace holds no text, so token ids are derived from the
//! hash ids ([`TraceRequest::block_tokens`]): equal hash ids give equal tokens.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

/// Tokens of the prompt that one hash id of the trace stands for.
pub(crate) const TOKENS_PER_HASH_ID: usize = 512;

/// Vocabulary that derived token ids are drawn from (Llama 3's size).
const VOCABULARY: u64 = 128_256;

/// A sample of the conversation trace, for checkouts without the whole one: its first 400 requests.
const SAMPLE: &str = include_str!("../data/conversation_sample.jsonl");

/// Where the whole trace lies beside a checkout, relative to the working directory.
const BESIDE_THE_CHECKOUT: &str = "../shared/data/conversation_trace.jsonl";

/// Longest request accepted, in hash ids (4 million tokens).
const HASH_IDS_MAX: usize = 8192;

/// One request of a trace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TraceRequest {
    /// Arrival, milliseconds from the start of the trace.
    pub(crate) timestamp: u64,
    /// Prompt length in tokens.
    pub(crate) input_length: u64,
    /// Output length in tokens.
    pub(crate) output_length: u64,
    /// One id per 512 tokens of the prompt; the last may stand for fewer.
    pub(crate) hash_ids: Vec<u64>,
}

/// A trace and where it came from.
#[derive(Clone, Debug)]
pub(crate) struct Trace {
    /// For people.
    pub(crate) name: String,
    /// The requests, in order.
    pub(crate) requests: Vec<TraceRequest>,
}

impl TraceRequest {
    /// Full blocks of the prompt: a last hash id that stands for fewer than 512 tokens is not cached, as
    /// engines hash full blocks only.
    pub(crate) fn full_blocks(&self) -> &[u64] {
        let full = usize::try_from(self.input_length).unwrap_or(usize::MAX) / TOKENS_PER_HASH_ID;
        &self.hash_ids[..self.hash_ids.len().min(full)]
    }

    /// The token ids of one block, derived from its hash id.
    pub(crate) fn block_tokens(hash_id: u64, tokens: &mut [u32; TOKENS_PER_HASH_ID]) {
        for (index, token) in tokens.iter_mut().enumerate() {
            let word = crate::kv_function::mix(hash_id.wrapping_mul(0x1_0001).wrapping_add(index as u64));
            *token = u32::try_from(word % VOCABULARY).expect("below the vocabulary's size");
        }
    }
}

impl Trace {
    /// Reads `file`; without one, the trace beside the checkout when it is there, else the sample.
    pub(crate) fn open(file: Option<&Path>) -> anyhow::Result<Trace> {
        let path = match file {
            Some(path) => path.to_owned(),
            None if Path::new(BESIDE_THE_CHECKOUT).exists() => PathBuf::from(BESIDE_THE_CHECKOUT),
            None => {
                return Trace::parse("conversation sample (first requests)".to_owned(), SAMPLE.as_bytes());
            }
        };
        let reader = std::fs::File::open(&path)
            .with_context(|| format!("cannot open the trace {}", path.display()))?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Trace::parse(name, BufReader::new(reader))
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
                    "{name}: line {} is not a request; expected an object with timestamp, input_length, \
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
            bail!("{name}: the trace holds no request");
        }
        Ok(Trace { name, requests })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sample_in_the_tree_reads_and_shares_prefixes() {
        let trace = Trace::parse("sample".into(), SAMPLE.as_bytes()).expect("reads");
        assert!(trace.requests.len() >= 400);
        let first = trace.requests[0].hash_ids[0];
        assert!(
            trace.requests.iter().filter(|request| request.hash_ids.first() == Some(&first)).count() > 10
        );
    }

    #[test]
    fn a_partial_last_block_is_not_cached() {
        let request =
            TraceRequest { timestamp: 0, input_length: 1100, output_length: 1, hash_ids: vec![4, 5, 6] };
        assert_eq!(request.full_blocks(), [4, 5]);
    }

    #[test]
    fn a_bad_line_is_named() {
        let text = "{\"timestamp\":0,\"input_length\":1,\"output_length\":1,\"hash_ids\":[]}\nnonsense\n";
        let error = Trace::parse("t".into(), text.as_bytes()).expect_err("bad");
        assert!(format!("{error:#}").contains("line 2"), "{error:#}");
    }

    #[test]
    fn equal_hash_ids_give_equal_tokens_and_others_do_not() {
        let (mut a, mut b) = ([0; TOKENS_PER_HASH_ID], [0; TOKENS_PER_HASH_ID]);
        TraceRequest::block_tokens(7, &mut a);
        TraceRequest::block_tokens(7, &mut b);
        assert_eq!(a, b);
        TraceRequest::block_tokens(8, &mut b);
        assert_ne!(a, b);
    }
}
