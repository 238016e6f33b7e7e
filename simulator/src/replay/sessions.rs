//! Reader of agentic traces: one session in each file.
//!
//! A session has `block_size` (tokens), `hash_id_scope` (`local` or `global`) and `requests` with `t` (seconds since the
//! start of the session), `in` and `out` (tokens) and `hash_ids`, one for each full block of the prompt. An entry with
//! `requests` of its own is a sub-agent: it shares the session's ids, and its times count from its own `t`.
//!
//! Think times are part of `t`: the recorded client waited for its answers. They are not used apart from it.

use std::io::Read;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::error::{Problem, TraceError};
use super::trace::{IdScope, TraceBuilder, TraceRequest};

/// Maximum bytes of a session.
const SESSION_BYTES_MAX: u64 = 256 << 20;

/// Description of the format, for errors.
const EXPECTED: &str = "a session with block_size, hash_id_scope and requests with t, in, out and hash_ids";

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Scope {
    Local,
    Global,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "fields that are known and not used are not unknown fields")]
struct Session {
    #[serde(default)]
    block_size: Option<u64>,
    #[serde(default)]
    hash_id_scope: Option<Scope>,
    requests: Vec<Entry>,
    id: Option<IgnoredAny>,
    models: Option<IgnoredAny>,
    tool_tokens: Option<IgnoredAny>,
    system_tokens: Option<IgnoredAny>,
    totals: Option<IgnoredAny>,
}

/// Request, or sub-agent with requests.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "fields that are known and not used are not unknown fields")]
struct Entry {
    t: f64,
    #[serde(default, rename = "in")]
    input: u64,
    #[serde(default, rename = "out")]
    output: u64,
    #[serde(default)]
    hash_ids: Option<Vec<u64>>,
    #[serde(default)]
    requests: Option<Vec<Entry>>,
    #[serde(rename = "type")]
    kind: Option<IgnoredAny>,
    model: Option<IgnoredAny>,
    input_types: Option<IgnoredAny>,
    output_types: Option<IgnoredAny>,
    stop: Option<IgnoredAny>,
    think_time: Option<IgnoredAny>,
    api_time: Option<IgnoredAny>,
    ttft: Option<IgnoredAny>,
    agent_id: Option<IgnoredAny>,
    subagent_type: Option<IgnoredAny>,
    duration_ms: Option<IgnoredAny>,
    total_tokens: Option<IgnoredAny>,
    tool_use_count: Option<IgnoredAny>,
    status: Option<IgnoredAny>,
    models: Option<IgnoredAny>,
    tool_tokens: Option<IgnoredAny>,
    system_tokens: Option<IgnoredAny>,
}

/// Adds a session to a builder; `name` is that of its file.
///
/// # Errors
/// The session is not one of the format, or a request is not possible.
pub fn read_session(name: &str, reader: impl Read, builder: &mut TraceBuilder) -> Result<(), TraceError> {
    let mut text = Vec::new();
    let read = reader.take(SESSION_BYTES_MAX + 1).read_to_end(&mut text);
    read.map_err(|error| TraceError::new(name, Problem::Unreadable(error.to_string())))?;
    if text.len() as u64 > SESSION_BYTES_MAX {
        return Err(TraceError::new(name, Problem::TooLong { bytes_max: SESSION_BYTES_MAX }));
    }
    let malformed =
        |message: String| TraceError::new(name, Problem::Malformed { message, expected: EXPECTED });
    let session: Session = serde_json::from_slice(&text).map_err(|error| malformed(error.to_string()))?;
    let Some(block_tokens) = session.block_size.or(builder.options().block_tokens) else {
        return Err(TraceError::new(name, Problem::NoBlockSize { fits: None }));
    };
    let scope = match session.hash_id_scope {
        Some(Scope::Local) => IdScope::Session,
        Some(Scope::Global) => IdScope::Trace,
        None => builder.options().scope,
    };
    let number = builder.begin_session(scope);
    let place = Reading { name, block_tokens, session: number };
    place.add_all(&session.requests, ("", 0), builder)?;
    builder.end_session();
    Ok(())
}

/// Facts of the session that is read.
struct Reading<'a> {
    name: &'a str,
    block_tokens: u64,
    session: u32,
}

impl Reading<'_> {
    /// Adds requests and those of their sub-agents; `parent` is the sub-agent's place and start.
    fn add_all(
        &self,
        entries: &[Entry],
        parent: (&str, u64),
        builder: &mut TraceBuilder,
    ) -> Result<(), TraceError> {
        let (within, start_ms) = parent;
        let mut before_ms = 0;
        for (number, entry) in (1..).zip(entries) {
            let at = || format!("{}: {within}request {number}", self.name);
            let refuse = |problem| TraceError::new(at(), problem);
            if !(entry.t.is_finite() && entry.t >= 0.0) {
                return Err(refuse(Problem::InvalidTime(entry.t.to_string())));
            }
            let ms = (entry.t * 1000.0).round() as u64;
            if ms < before_ms && !builder.options().sort {
                return Err(refuse(Problem::Unsorted { ms, before_ms }));
            }
            before_ms = ms;
            match (&entry.requests, &entry.hash_ids) {
                (Some(requests), None) => {
                    let within = format!("{within}sub-agent {number}, ");
                    self.add_all(requests, (&within, start_ms.saturating_add(ms)), builder)?;
                }
                (None, Some(hash_ids)) => {
                    let request = TraceRequest {
                        at_ms: start_ms.saturating_add(ms),
                        session: Some(self.session),
                        input_tokens: entry.input,
                        output_tokens: entry.output,
                        block_tokens: Some(self.block_tokens),
                        hash_ids,
                    };
                    builder.add(&at(), &request)?;
                }
                _ => {
                    let message = "either hash_ids or requests are needed".to_owned();
                    return Err(refuse(Problem::Malformed { message, expected: EXPECTED }));
                }
            }
        }
        Ok(())
    }
}
