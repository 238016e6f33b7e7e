//! Error type of the agent's start and shutdown: kind, context, source.
//!
//! The kind determines the exit code, the context states what failed and the remedy. Errors of single
//! blocks, sessions or peers are handled and counted locally and never use this type.

use std::error::Error;
use std::fmt;

/// What the operator has to fix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorKind {
    /// The configuration or the command line.
    Config,
    /// A device of the pool.
    Device,
    /// Memory, sockets, ports, threads.
    Resource,
    /// A bug: report it.
    Internal,
}

/// An error that prevents the agent from starting or continuing.
#[derive(Debug)]
pub(crate) struct AgentError {
    kind: ErrorKind,
    context: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl AgentError {
    /// Creates an error without a source.
    pub(crate) fn new(kind: ErrorKind, context: impl Into<String>) -> AgentError {
        AgentError { kind, context: context.into(), source: None }
    }

    /// Adds the underlying error.
    pub(crate) fn with_source(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> AgentError {
        self.source = Some(source.into());
        self
    }

    /// Returns the underlying error if it has this type.
    pub(crate) fn cause<T: Error + 'static>(&self) -> Option<&T> {
        self.source.as_ref()?.downcast_ref()
    }

    /// Returns what the operator has to fix.
    #[cfg(test)]
    pub(crate) fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the exit code: 1 configuration, 2 device, 3 resource, 70 internal (`EX_SOFTWARE`).
    pub(crate) fn exit_code(&self) -> u8 {
        match self.kind {
            ErrorKind::Config => 1,
            ErrorKind::Device => 2,
            ErrorKind::Resource => 3,
            ErrorKind::Internal => 70,
        }
    }

    /// Formats the context and all sources in one line.
    pub(crate) fn chain(&self) -> String {
        let mut text = self.context.clone();
        let mut cause = self.source();
        while let Some(error) = cause {
            text.push_str(": ");
            text.push_str(&error.to_string());
            cause = error.source();
        }
        text
    }
}

impl fmt::Display for AgentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.context)
    }
}

impl Error for AgentError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.source.as_ref().map(|source| source.as_ref() as &(dyn Error + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chain_contains_every_source() {
        let root = std::io::Error::other("no space");
        let error = AgentError::new(ErrorKind::Device, "cannot open pool").with_source(root);
        assert_eq!(error.chain(), "cannot open pool: no space");
        assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Device, 2));
    }
}
