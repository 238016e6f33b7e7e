//! The error of this crate.

use std::time::Duration;

use reprise_buffers::BufferError;

use crate::spec::Status;
use crate::vfio::FunctionError;

/// An operation on a controller that failed.
#[derive(Debug, thiserror::Error)]
pub enum NvmeError {
    /// The function no longer answers: it was removed, or its driver has released it.
    #[error("the controller is gone: its registers read as all ones")]
    Gone,
    /// The controller reports that it has failed. Only a reset helps.
    #[error("the controller reports a fatal error: reset it")]
    Fatal,
    /// A change of state or a command has not ended in time.
    #[error("{what} has not ended within {limit:?}: reset the controller")]
    Timeout {
        /// The operation.
        what: &'static str,
        /// Its deadline.
        limit: Duration,
    },
    /// The engine of the controller has ended, and the controller was shut down with it.
    #[error("the controller was shut down: open its device again")]
    Closed,
    /// The controller has rejected a command.
    #[error("the controller rejects {what}: {status}")]
    Refused {
        /// The command.
        what: &'static str,
        /// Its status.
        status: Status,
    },
    /// The controller lacks what this driver requires.
    #[error("this controller cannot be used: {0}")]
    Unsupported(String),
    /// The controller has violated the specification. Nothing that it reports can be trusted: reset it.
    #[error("the controller violates the specification: {0}")]
    Violation(String),
    /// The caller has asked for something invalid.
    #[error("invalid request: {0}")]
    Invalid(String),
    /// All queue pairs that the controller has granted are in use.
    #[error(
        "no queue pair is free: the controller has granted {granted}, one of them to the agent; request fewer, or wait \
         until others are returned"
    )]
    NoQueue {
        /// Number of granted pairs.
        granted: u16,
    },
    /// Memory for the controller could not be allocated or mapped.
    #[error("memory for the controller: {0}")]
    Memory(#[from] BufferError),
    /// The PCI function cannot be used, or not for this purpose; with the remedy.
    #[error("{0}")]
    Function(#[from] FunctionError),
}
