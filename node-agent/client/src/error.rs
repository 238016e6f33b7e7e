//! Errors of the client. Each message names the remedy.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use reprise_buffers::BufferError;
use reprise_proto::local::{Failure, FailureKind};

use crate::load::BlockStatus;

/// Linux's error code when a stream socket connects to a socket of another type.
const EPROTOTYPE: i32 = 91;

/// Error of a call, by remedy.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// No process listens at the socket.
    #[error("no agent at {}: start reprise-agent on this node, or correct the socket path", .socket.display())]
    AgentAbsent {
        /// Path of the socket.
        socket: PathBuf,
        /// Error of the system.
        source: io::Error,
    },
    /// This process may not open the socket, or a folder of its path.
    #[error(
        "{user} may not open the agent's socket {}: {file}; run the engine as a user with access, \
         or change session.mode and session.allow_uids in the agent's configuration",
        .socket.display()
    )]
    Forbidden {
        /// Path of the socket.
        socket: PathBuf,
        /// User and group of this process.
        user: String,
        /// Mode, owner and group of the socket's file.
        file: String,
        /// Error of the system.
        source: io::Error,
    },
    /// The session has ended. Blocks that were not reported durable may be lost; connect again.
    #[error(
        "the session with the agent has ended ({reason}): treat calls in flight as misses and connect again"
    )]
    AgentLost {
        /// Reason of the end.
        reason: String,
    },
    /// No answer in time. The session continues; the leases or load of a late answer are released.
    #[error("no answer to '{call}' after {after:?}: treat it as a miss; a longer deadline may help")]
    Timeout {
        /// Name of the call.
        call: &'static str,
        /// Time that the call waited.
        after: Duration,
    },
    /// The agent answers, but a load makes no progress: another node or a device hangs. Missing blocks are
    /// misses; the agent is not suspected.
    #[error(
        "no progress for {after:?} although the agent answers (another node or a device hangs): recompute missing blocks"
    )]
    Stalled {
        /// Time without any progress.
        after: Duration,
    },
    /// The limit of a wait has passed: computing the missing blocks is faster. The agent is not suspected.
    #[error("computing is faster: {reason}; recompute missing blocks")]
    LimitReached {
        /// What arrived within which limit.
        reason: String,
        /// Time in which the agent gave no sign of life.
        unanswered: Duration,
    },
    /// The call is invalid: fix it.
    #[error("invalid call: {0}")]
    BadRequest(String),
    /// Client and agent are incompatible: update the older one.
    #[error("client and agent do not speak the same protocol: {0}")]
    Version(String),
    /// A limit is reached, or there is no room: release loads, commit or drop reservations, then try again.
    #[error("busy: {0}; release loads and reservations, then try again")]
    Busy(String),
    /// The agent has a bug: report it, with the agent's log.
    #[error("internal error of the agent: {0}; please report it with the agent's log")]
    Internal(String),
    /// The agent violated the protocol; the session has ended. Report it.
    #[error("the agent violated the protocol: {0}; please report it")]
    Protocol(String),
    /// Memory that the agent granted could not be mapped or reached.
    #[error("cannot {context}: shared memory error")]
    Memory {
        /// The operation that failed.
        context: &'static str,
        /// Error of the operation.
        source: BufferError,
    },
}

/// Reason for which an object was not copied. The destination is then unusable: treat the block as a miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// The copied bytes differ from the committed ones.
    #[error("object {object} of block {block} does not match its checksum: recompute the block")]
    Corrupt {
        /// Index within the load.
        block: usize,
        /// Index within the block.
        object: u32,
    },
    /// The load did not place this block.
    #[error("block {block} is not available ({status:?}): recompute it")]
    Unavailable {
        /// Index within the load.
        block: usize,
        /// Status of the block.
        status: BlockStatus,
    },
    /// The object's layer is still in flight.
    #[error("layer {layer} is not ready yet ({ready} layers are): call wait_layer first")]
    NotReady {
        /// Number of the requested layer.
        layer: u32,
        /// Number of leading layers that are ready.
        ready: u32,
    },
    /// Block or object number outside the load.
    #[error("invalid object {object} of block {block}: not part of this load")]
    OutOfRange {
        /// Index within the load.
        block: usize,
        /// Index within the block.
        object: u32,
    },
    /// A destination has the wrong length, or their number is wrong.
    #[error("invalid destination of {found} {unit}: the layout requires {expected}")]
    WrongSize {
        /// Unit of the numbers: bytes or objects.
        unit: &'static str,
        /// Size that the layout requires.
        expected: u64,
        /// Size of the destination.
        found: u64,
    },
}

impl ClientError {
    /// Returns the name of the error's variant.
    pub fn kind(&self) -> &'static str {
        match self {
            ClientError::AgentAbsent { .. } => "AgentAbsent",
            ClientError::Forbidden { .. } => "Forbidden",
            ClientError::AgentLost { .. } => "AgentLost",
            ClientError::Timeout { .. } => "Timeout",
            ClientError::Stalled { .. } => "Stalled",
            ClientError::LimitReached { .. } => "LimitReached",
            ClientError::BadRequest(_) => "BadRequest",
            ClientError::Version(_) => "Version",
            ClientError::Busy(_) => "Busy",
            ClientError::Internal(_) => "Internal",
            ClientError::Protocol(_) => "Protocol",
            ClientError::Memory { .. } => "Memory",
        }
    }

    /// Reports whether a retry with the same configuration would fail again.
    pub fn is_refusal(&self) -> bool {
        matches!(self, ClientError::Forbidden { .. } | ClientError::BadRequest(_) | ClientError::Version(_))
    }

    /// Error for a listener that does not greet like an agent.
    pub(crate) fn not_an_agent(reason: &str) -> ClientError {
        ClientError::Version(format!(
            "the listener at the socket does not greet as an agent of Reprise does ({reason}); correct the socket path, or update the older one"
        ))
    }

    /// Error for a failed connect(2).
    pub(crate) fn unreachable(socket: &Path, source: io::Error) -> ClientError {
        if source.raw_os_error() == Some(EPROTOTYPE) {
            return ClientError::not_an_agent("it is a datagram or packet socket, not a stream socket");
        }
        let socket = socket.to_owned();
        if source.kind() != io::ErrorKind::PermissionDenied {
            return ClientError::AgentAbsent { socket, source };
        }
        // `/proc/self` belongs to the user that this process runs as.
        let user = fs::metadata("/proc/self").map_or_else(
            |_| "this user".to_owned(),
            |own| format!("user {} (group {})", own.uid(), own.gid()),
        );
        let file = match fs::metadata(&socket) {
            Ok(file) => format!(
                "it has mode {:04o}, owner {} and group {}",
                file.mode() & 0o777,
                file.uid(),
                file.gid()
            ),
            Err(_) => "a folder of its path is not accessible to this user (chmod o+x opens it)".to_owned(),
        };
        ClientError::Forbidden { socket, user, file, source }
    }

    /// Error for a failure that the agent sent, with its message.
    pub(crate) fn refused(failure: Failure) -> ClientError {
        match failure.kind() {
            FailureKind::BadRequest => ClientError::BadRequest(failure.message),
            FailureKind::Version => ClientError::Version(failure.message),
            FailureKind::Busy => ClientError::Busy(failure.message),
            FailureKind::Internal => ClientError::Internal(failure.message),
            FailureKind::FailureUnspecified => {
                ClientError::Protocol(format!("failure without a kind: {}", failure.message))
            }
        }
    }

    /// Error for an answer whose kind does not match the call.
    pub(crate) fn unexpected(call: &'static str) -> ClientError {
        ClientError::Protocol(format!("the answer to '{call}' has the wrong kind"))
    }
}
