//! Reader of traces with one request in each line, in Mooncake's published format.
//!
//! Fields: `timestamp` (ms), `input_length` and `output_length` (tokens), `hash_ids`, and optionally `block_tokens` and
//! `session`, a number.

use std::io::{BufRead, Read};

use serde::Deserialize;

use super::error::{Problem, TraceError};
use super::trace::{TraceBuilder, TraceRequest};

/// Maximum bytes of a line: over a million ids.
const LINE_BYTES_MAX: u64 = 16 << 20;

/// Description of the format, for errors.
const EXPECTED: &str =
    "an object with timestamp, input_length, output_length, hash_ids and optionally block_tokens and session";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    timestamp: u64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
    #[serde(default)]
    block_tokens: Option<u64>,
    #[serde(default)]
    session: Option<u32>,
}

/// Adds all lines of a trace to a builder. Empty lines are skipped.
///
/// # Errors
/// The first line that is not a request, or not possible.
pub fn read_lines(mut reader: impl BufRead, builder: &mut TraceBuilder) -> Result<(), TraceError> {
    let mut text = Vec::new();
    for number in 1_u64.. {
        let at = format!("line {number}");
        text.clear();
        let read = reader.by_ref().take(LINE_BYTES_MAX + 1).read_until(b'\n', &mut text);
        read.map_err(|error| TraceError::new(at.as_str(), Problem::Unreadable(error.to_string())))?;
        if text.is_empty() {
            break;
        }
        if text.len() as u64 > LINE_BYTES_MAX {
            return Err(TraceError::new(at, Problem::TooLong { bytes_max: LINE_BYTES_MAX }));
        }
        if text.trim_ascii().is_empty() {
            continue;
        }
        let line: Line = serde_json::from_slice(&text).map_err(|error| {
            TraceError::new(
                at.as_str(),
                Problem::Malformed { message: error.to_string(), expected: EXPECTED },
            )
        })?;
        let request = TraceRequest {
            at_ms: line.timestamp,
            session: line.session,
            input_tokens: line.input_length,
            output_tokens: line.output_length,
            block_tokens: line.block_tokens,
            hash_ids: &line.hash_ids,
        };
        builder.add(&at, &request)?;
    }
    Ok(())
}
