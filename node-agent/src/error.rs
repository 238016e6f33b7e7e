//! Why an agent cannot start or go on: kind, context, source.
//!
//! The kind decides the exit code, the context says what to do; errors of single blocks, sessions or peers never
//! come here, they are answered and counted where they happen.

use std::error::Error;
use std::fmt;

/// What has to be put right.
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

/// The agent's error.
#[derive(Debug)]
pub(crate) struct AgentError {
    kind: ErrorKind,
    context: String,
    source: Option<Box<dyn Error + Send + Sync>>,
}

impl AgentError {
    /// An error without an underlying one.
    pub(crate) fn new(kind: ErrorKind, context: impl Into<String>) -> AgentError {
        AgentError { kind, context: context.into(), source: None }
    }

    /// The same error with what caused it.
    pub(crate) fn because(mut self, source: impl Into<Box<dyn Error + Send + Sync>>) -> AgentError {
        self.source = Some(source.into());
        self
    }

    /// The underlying error, if it is of this type.
    pub(crate) fn cause<T: Error + 'static>(&self) -> Option<&T> {
        self.source.as_ref()?.downcast_ref()
    }

    /// What has to be put right.
    #[cfg(test)]
    pub(crate) fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// The process exit code: 1 configuration, 2 device, 3 resource, 70 internal (`EX_SOFTWARE`).
    pub(crate) fn exit_code(&self) -> u8 {
        match self.kind {
            ErrorKind::Config => 1,
            ErrorKind::Device => 2,
            ErrorKind::Resource => 3,
            ErrorKind::Internal => 70,
        }
    }

    /// Context and all causes in one line.
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
    fn the_chain_names_every_cause() {
        let root = std::io::Error::other("no space");
        let error = AgentError::new(ErrorKind::Device, "cannot open pool").because(root);
        assert_eq!(error.chain(), "cannot open pool: no space");
        assert_eq!((error.kind(), error.exit_code()), (ErrorKind::Device, 2));
    }
}
