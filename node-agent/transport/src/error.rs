//! The error of this crate: kind (remedy), context (operation), source (the system's error).

use std::fmt;
use std::io;

/// Kind of a [`TransportError`], by remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// A limit is reached: try again later, or treat the blocks as misses.
    Busy,
    /// Fix the call or the configuration.
    Invalid,
    /// The peer and this node have no protocol in common: use releases that have one.
    NoProtocol,
    /// The transport was shut down.
    Closed,
    /// The operating system reported an error; see the source.
    Os,
}

/// Error of a call. Failures of connections are reported as events, not as errors of calls.
#[derive(Debug, thiserror::Error)]
pub struct TransportError {
    kind: ErrorKind,
    context: String,
    #[source]
    source: Option<io::Error>,
}

impl TransportError {
    /// Returns the kind of the error.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    pub(crate) fn busy(context: impl Into<String>) -> TransportError {
        TransportError { kind: ErrorKind::Busy, context: context.into(), source: None }
    }

    pub(crate) fn invalid(context: impl Into<String>) -> TransportError {
        TransportError { kind: ErrorKind::Invalid, context: context.into(), source: None }
    }

    pub(crate) fn no_protocol(context: impl Into<String>) -> TransportError {
        TransportError { kind: ErrorKind::NoProtocol, context: context.into(), source: None }
    }

    pub(crate) fn closed() -> TransportError {
        TransportError {
            kind: ErrorKind::Closed,
            context: "the transport was shut down".into(),
            source: None,
        }
    }

    pub(crate) fn os(context: impl Into<String>, source: io::Error) -> TransportError {
        TransportError { kind: ErrorKind::Os, context: context.into(), source: Some(source) }
    }
}

impl fmt::Display for TransportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "transport: {}", self.context)?;
        match &self.source {
            Some(source) => write!(f, ": {source}"),
            None => Ok(()),
        }
    }
}
