//! Errors of the client. Each says what the caller should do.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use reprise_buffers::BufferError;
use reprise_proto::local::{Failure, FailureKind};

use crate::load::BlockStatus;

/// Linux's code for a socket of another type than the one that connects.
const EPROTOTYPE: i32 = 91;

/// Why a call did not do what was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// Nobody listens at the socket.
    #[error("no agent at {}: start reprise-agent on this node, or correct the socket path", .socket.display())]
    AgentAbsent {
        /// Where it was looked for.
        socket: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The socket is there, or may be, and this process may not open it.
    #[error(
        "{user} may not open the agent's socket {}: {file}; run the engine as a user whom mode, owner or group admit, \
         or change session.mode in the agent's configuration, and add the user to session.allow_uids there",
        .socket.display()
    )]
    Forbidden {
        /// Where the agent is.
        socket: PathBuf,
        /// Who this process is.
        user: String,
        /// Whom the socket's file admits.
        file: String,
        /// What the system said.
        source: io::Error,
    },
    /// The session is over. Everything that was not announced durable may be gone; connect again.
    #[error(
        "the session with the agent has ended ({reason}): treat what is in flight as missed and connect again"
    )]
    AgentLost {
        /// How it ended.
        reason: String,
    },
    /// No answer in time. The session goes on; an answer that comes later is given back.
    #[error("'{call}' had no answer after {after:?}: treat it as missed; a longer deadline may help")]
    Timeout {
        /// What was asked.
        call: &'static str,
        /// How long it was waited for.
        after: Duration,
    },
    /// The agent is there, and nothing comes: another node that it waits for, or a device, hangs. What is missing is
    /// missed; the agent itself is not suspected.
    #[error(
        "nothing came for {after:?} although the agent answers (another node or a device hangs): recompute what is missing"
    )]
    Stalled {
        /// How long it was waited for.
        after: Duration,
    },
    /// The call was wrong: fix it.
    #[error("wrong call: {0}")]
    BadRequest(String),
    /// Client and agent do not fit together: update the older one.
    #[error("client and agent do not speak the same protocol: {0}")]
    Version(String),
    /// Too much at once, or no room: release loads, commit or drop reservations, then try again.
    #[error("busy: {0}; release what is held and try again")]
    Busy(String),
    /// The agent has a fault: report it, with the agent's log.
    #[error("the agent reports a fault of its own: {0}; please report it with the agent's log")]
    Internal(String),
    /// The agent sent what the protocol does not allow; the session is over. Report it.
    #[error("the agent broke the protocol: {0}; please report it")]
    Protocol(String),
    /// Memory that the agent granted could not be mapped or reached.
    #[error("shared memory: {context}")]
    Memory {
        /// What was tried.
        context: &'static str,
        /// What went wrong.
        source: BufferError,
    },
}

/// Why an object was not copied. In every case the destination holds nothing usable: treat the block as missed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CopyError {
    /// The bytes that were copied are not those that were committed.
    #[error("object {object} of block {block} does not match its checksum: recompute the block")]
    Corrupt {
        /// Index within the load.
        block: usize,
        /// Index within the block.
        object: u32,
    },
    /// The load did not bring this block.
    #[error("block {block} is not available ({status:?}): recompute it")]
    Unavailable {
        /// Index within the load.
        block: usize,
        /// What became of it.
        status: BlockStatus,
    },
    /// The object's layer is still in flight.
    #[error("layer {layer} is not ready yet ({ready} are): call wait_layer first")]
    NotReady {
        /// Layer that was asked for.
        layer: u32,
        /// Leading layers that are ready.
        ready: u32,
    },
    /// Block or object number outside the load.
    #[error("there is no object {object} of block {block} in this load")]
    OutOfRange {
        /// Index within the load.
        block: usize,
        /// Index within the block.
        object: u32,
    },
    /// A destination of the wrong length, or too many or few of them.
    #[error("the destination has {found} {unit}, the layout says {expected}")]
    WrongSize {
        /// What is counted.
        unit: &'static str,
        /// What the layout says.
        expected: u64,
        /// What was given.
        found: u64,
    },
}

impl ClientError {
    /// Which error it is, in a word: the name of its variant.
    pub fn kind(&self) -> &'static str {
        match self {
            ClientError::AgentAbsent { .. } => "AgentAbsent",
            ClientError::Forbidden { .. } => "Forbidden",
            ClientError::AgentLost { .. } => "AgentLost",
            ClientError::Timeout { .. } => "Timeout",
            ClientError::Stalled { .. } => "Stalled",
            ClientError::BadRequest(_) => "BadRequest",
            ClientError::Version(_) => "Version",
            ClientError::Busy(_) => "Busy",
            ClientError::Internal(_) => "Internal",
            ClientError::Protocol(_) => "Protocol",
            ClientError::Memory { .. } => "Memory",
        }
    }

    /// Whether it is the agent's, or the system's, last word on a configuration: trying again brings it again.
    pub fn is_refusal(&self) -> bool {
        matches!(self, ClientError::Forbidden { .. } | ClientError::BadRequest(_) | ClientError::Version(_))
    }

    /// Somebody listens who does not greet as agents do.
    pub(crate) fn stranger(said: &str) -> ClientError {
        ClientError::Version(format!(
            "what listens at the socket does not greet as an agent of Reprise does ({said}); correct the socket path, or update the older one"
        ))
    }

    /// A socket to which the system does not connect.
    pub(crate) fn unreachable(socket: &Path, source: io::Error) -> ClientError {
        // Of datagrams, or of packets.
        if source.raw_os_error() == Some(EPROTOTYPE) {
            return ClientError::stranger("its socket is of another type");
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
            Err(_) => "a folder of its path is closed to this user (chmod o+x opens one)".to_owned(),
        };
        ClientError::Forbidden { socket, user, file, source }
    }

    /// A refusal of the agent, in its words.
    pub(crate) fn refused(failure: Failure) -> ClientError {
        match failure.kind() {
            FailureKind::BadRequest => ClientError::BadRequest(failure.message),
            FailureKind::Version => ClientError::Version(failure.message),
            FailureKind::Busy => ClientError::Busy(failure.message),
            FailureKind::Internal => ClientError::Internal(failure.message),
            FailureKind::FailureUnspecified => {
                ClientError::Protocol(format!("a failure without a kind: {}", failure.message))
            }
        }
    }

    /// An answer of another kind than the call asks for.
    pub(crate) fn unexpected(call: &'static str) -> ClientError {
        ClientError::Protocol(format!("the answer to '{call}' is of another kind"))
    }
}
