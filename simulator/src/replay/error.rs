//! Errors of traces: each names the place and the remedy.

use std::fmt;

/// Reason why a trace is refused, and its place.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {problem}")]
pub struct TraceError {
    /// Line of a file, or request of a session.
    pub at: String,
    /// Reason and remedy.
    pub problem: Problem,
}

/// Reason why a trace is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    /// The file cannot be read.
    Unreadable(String),
    /// The text is not an object of the format, or has a field that the format does not have.
    Malformed {
        /// Message of the parser.
        message: String,
        /// Name of the format.
        expected: &'static str,
    },
    /// A line or a session is longer than any plausible one.
    TooLong {
        /// Maximum number of bytes.
        bytes_max: u64,
    },
    /// A time is lower than the one before it.
    Unsorted {
        /// Time in milliseconds.
        ms: u64,
        /// Time of the request before it.
        before_ms: u64,
    },
    /// A time is negative or not a number.
    InvalidTime(String),
    /// The blocks do not cover the prompt.
    Gap {
        /// Tokens of the prompt.
        tokens: u64,
        /// Number of blocks in the trace.
        blocks: u64,
        /// Number of blocks that cover the prompt.
        expected: u64,
        /// Tokens of a block.
        block_tokens: u64,
    },
    /// The trace does not state the size of its blocks, and 512 tokens do not fit.
    NoBlockSize {
        /// A size that fits this request, if there is one.
        fits: Option<u64>,
    },
    /// A size of blocks is not possible, or not that of the requests before.
    BlockSize {
        /// Tokens of a block.
        block_tokens: u64,
        /// Size of the blocks before, if there are any.
        before: Option<u64>,
    },
    /// One id stands for blocks after different prefixes.
    ReusedId {
        /// The id.
        id: u64,
        /// Place where the id occurred first.
        first: String,
    },
    /// Ids are those of sessions, but the request has no session.
    NoSession,
    /// The trace has more blocks than indices.
    TooLarge,
    /// The trace has no requests.
    Empty,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::Unreadable(message) => write!(f, "cannot read the trace: {message}"),
            Problem::Malformed { message, expected } if message.contains("unknown field") => {
                write!(f, "{}: remove the field, or convert the trace to {expected}", in_the_line(message))
            }
            Problem::Malformed { message, expected } => {
                write!(f, "{}: expected {expected}; correct or remove it", in_the_line(message))
            }
            Problem::TooLong { bytes_max } => {
                write!(f, "more than {bytes_max} bytes: divide the trace into requests or sessions")
            }
            Problem::Unsorted { ms, before_ms } => write!(
                f,
                "the time {ms} ms is before {before_ms} ms of the request before: sort the trace by time, or pass \
                 --sort"
            ),
            Problem::InvalidTime(text) => {
                write!(f, "invalid time {text}: expected a number of seconds of at least 0")
            }
            Problem::Gap { tokens, blocks, expected, block_tokens } => write!(
                f,
                "gap in the prompt: {blocks} blocks of {block_tokens} tokens for {tokens} tokens, expected {expected}: \
                 remove the request or record it again, or pass --allow-gaps to replay the blocks that are there"
            ),
            Problem::NoBlockSize { fits: Some(tokens) } => write!(
                f,
                "the trace has no block size, and blocks of 512 tokens do not fit this prompt: pass --block-tokens \
                 {tokens} if that is the size, or --allow-gaps if blocks are missing"
            ),
            Problem::NoBlockSize { fits: None } => {
                write!(f, "the trace has no block size: pass --block-tokens with the tokens of a block")
            }
            Problem::BlockSize { block_tokens, before: None } => {
                write!(f, "invalid blocks of {block_tokens} tokens: expected 1 to 65535")
            }
            Problem::BlockSize { block_tokens, before: Some(before) } => write!(
                f,
                "blocks of {block_tokens} tokens after blocks of {before} tokens: divide the trace by block size"
            ),
            Problem::ReusedId { id, first } => write!(
                f,
                "hash id {id} has another block before it than at {first}, so it stands for two prefixes: if each \
                 session counts its own ids, give each request a `session` and pass --local-ids; otherwise renumber"
            ),
            Problem::NoSession => {
                write!(f, "no `session`, which --local-ids needs: add the field, or leave out --local-ids")
            }
            Problem::TooLarge => write!(f, "more than 4 billion distinct blocks: divide the trace"),
            Problem::Empty => write!(f, "the trace has no requests: pass a file with at least one"),
        }
    }
}

/// Message of the JSON parser, which counts lines within the text of one request: only the column is true in the file.
fn in_the_line(message: &str) -> String {
    message.replace(" at line 1 column ", " at column ")
}

impl TraceError {
    /// Creates an error at a place.
    pub(super) fn new(at: impl Into<String>, problem: Problem) -> TraceError {
        TraceError { at: at.into(), problem }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{ReadOptions, TraceBuilder, read_lines, read_session};

    const REQUEST: &str =
        r#"{"timestamp": 10, "input_length": 1024, "output_length": 1, "hash_ids": [0, 1]}"#;

    fn refused_line(line: &str) -> String {
        let text = format!("{REQUEST}\n{line}\n");
        let mut builder = TraceBuilder::new(ReadOptions::default());
        read_lines(text.as_bytes(), &mut builder).expect_err(line).to_string()
    }

    #[test]
    fn invalid_lines_are_refused_with_the_line_and_the_remedy() {
        for (from, to, words) in [
            ("[0, 1]", "[0]", &["line 2: gap in the prompt", "expected 2", "--allow-gaps"][..]),
            ("10,", "9,", &["line 2: the time 9 ms is before 10 ms", "--sort"]),
            ("{", r#"{"colour": 3, "#, &["line 2: unknown field `colour`", "remove the field"]),
            ("[0, 1]", "[2, 1]", &["line 2: hash id 1", "than at line 1", "--local-ids", "renumber"]),
            ("10,", "-1,", &["line 2: invalid value", "at column", "correct or remove it"]),
            ("{", "", &["line 2: ", "expected an object with timestamp"]),
            (r#""input_length": 1024, "#, "", &["line 2: missing field `input_length`"]),
        ] {
            let error = refused_line(&REQUEST.replacen(from, to, 1));
            assert!(words.iter().all(|word| error.contains(word)), "{words:?} in {error}");
            assert!(!error.contains("line 1 column"), "the parser's line is not that of the file: {error}");
        }
    }

    #[test]
    fn absent_block_size_is_refused_with_a_size_that_fits() {
        let line = r#"{"timestamp": 0, "input_length": 64, "output_length": 1, "hash_ids": [0, 1, 2, 3]}"#;
        let mut builder = TraceBuilder::new(ReadOptions::default());
        let error = read_lines(line.as_bytes(), &mut builder).expect_err("no size").to_string();
        assert!(
            ["line 1", "--block-tokens 16", "--allow-gaps"].iter().all(|word| error.contains(word)),
            "{error}"
        );
    }

    #[test]
    fn invalid_sessions_are_refused_with_the_request_and_the_remedy() {
        let session = |size: &str, requests: &str| {
            let text = format!(r#"{{{size}"hash_id_scope": "local", "requests": [{requests}]}}"#);
            let mut builder = TraceBuilder::new(ReadOptions::default());
            read_session("one.json", text.as_bytes(), &mut builder).expect_err("refused").to_string()
        };
        let (size, one) = (r#""block_size": 64, "#, r#"{"t": 5, "in": 64, "out": 1, "hash_ids": [1]}"#);
        for (error, words) in [
            (session("", one), &["one.json: the trace has no block size", "--block-tokens"][..]),
            (
                session(size, &format!("{one}, {}", one.replace('5', "1"))),
                &["request 2: the time 1000 ms", "--sort"],
            ),
            (session(size, &one.replace(": 64", ": 640")), &["request 1: gap", "--allow-gaps"]),
            (
                session(size, &one.replace("\"out\"", "\"hue\"")),
                &["one.json: unknown field `hue`", "remove the field"],
            ),
            (session(size, &one.replace(": 5", ": -5")), &["request 1: invalid time -5"]),
        ] {
            assert!(words.iter().all(|word| error.contains(word)), "{words:?} in {error}");
        }
    }
}
