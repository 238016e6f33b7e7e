//! Settings of the TCP transport and their checks.

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::Duration;

use reprise_identity::Security;
use reprise_identity::limits::CONNECTION_AGE_MAX;
use reprise_policy::TenantName;
use reprise_policy::fair_order::Weights;

use super::socket::{SocketOptions, set_congestion};
use crate::error::TransportError;
use crate::limits::{CREDIT_BYTES_MAX, CREDIT_BYTES_MIN, NODE_NAME_BYTES_MAX};

/// Shortest stall timeout: below it, scheduling delays of a loaded machine would count as stalls.
const STALL_TIMEOUT_MIN: Duration = Duration::from_millis(50);

/// Longest stall timeout: it is sent in 32 bits of milliseconds.
const STALL_TIMEOUT_MAX: Duration = Duration::from_secs(3600);

/// Longest idle timeout: instants that far ahead are still representable, and longer means practically
/// unlimited.
const IDLE_TIMEOUT_MAX: Duration = Duration::from_secs(24 * 3600);

/// Congestion control of connections.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Congestion {
    /// The default of the system.
    #[default]
    System,
    /// By name (`cubic`, `reno`, `bbr`, `dctcp`); the kernel must have and allow it.
    Named(String),
}

/// Settings of a [`TcpTransport`](super::TcpTransport).
#[derive(Clone, Debug)]
pub struct TcpSettings {
    /// Address on which peers connect; port 0 selects a free one.
    pub listen: SocketAddr,
    /// This node's name in its greetings: 1 to 64 bytes.
    pub node_name: String,
    /// Payload bytes that one peer may have in flight towards this node.
    pub credit_bytes: u64,
    /// A peer that makes no progress for this time is lost. Memory of its requests is held for this long
    /// beyond their deadlines.
    pub stall_timeout: Duration,
    /// A connection without a fetch for this time is closed.
    pub idle_timeout: Duration,
    /// A connection that is older takes no new request, and ends when it is idle: certificates are checked again by the
    /// next one. Certificates that end earlier shorten it. A server closes an idle connection of twice this age, or whose
    /// client's certificate has ended.
    pub age_max: Duration,
    /// Maximum number of opened connections, and of accepted connections.
    pub connections_max: usize,
    /// Maximum number of connections to one peer; a further one is only opened when the existing ones are
    /// busy.
    pub connections_per_peer: usize,
    /// Size of each socket buffer in bytes; `None` uses the kernel's default.
    pub socket_buffer_bytes: Option<usize>,
    /// Congestion control of all connections.
    pub congestion: Congestion,
    /// Weights of tenants in shares of each connection that a peer opened.
    pub weights: Weights<TenantName>,
    /// Whether connections use TLS, and the certificates.
    pub security: Security,
}

impl TcpSettings {
    /// Creates settings with defaults for everything except address and name: without TLS.
    ///
    /// 64 MiB of credit is 10 ms of a 6 GB/s stream: enough for several round trips and disk reads. 1,024
    /// connections reach every node of a cluster of 1,000.
    pub fn new(listen: SocketAddr, node_name: impl Into<String>) -> TcpSettings {
        TcpSettings {
            listen,
            node_name: node_name.into(),
            credit_bytes: 64 << 20,
            stall_timeout: Duration::from_secs(2),
            idle_timeout: Duration::from_secs(60),
            age_max: CONNECTION_AGE_MAX,
            connections_max: 1024,
            connections_per_peer: 1,
            socket_buffer_bytes: None,
            congestion: Congestion::System,
            weights: Weights::default(),
            security: Security::Plain,
        }
    }

    pub(super) fn validate(&self) -> Result<(), TransportError> {
        let checks = [
            (
                (1..=NODE_NAME_BYTES_MAX).contains(&self.node_name.len()),
                format!("invalid node name: expected 1 to {NODE_NAME_BYTES_MAX} bytes"),
            ),
            (
                (CREDIT_BYTES_MIN..=CREDIT_BYTES_MAX).contains(&self.credit_bytes),
                format!("invalid credit: expected {CREDIT_BYTES_MIN} to {CREDIT_BYTES_MAX} bytes"),
            ),
            (
                (STALL_TIMEOUT_MIN..=STALL_TIMEOUT_MAX).contains(&self.stall_timeout),
                format!("invalid stall timeout: expected {STALL_TIMEOUT_MIN:?} to {STALL_TIMEOUT_MAX:?}"),
            ),
            (
                !self.idle_timeout.is_zero() && self.idle_timeout <= IDLE_TIMEOUT_MAX,
                format!("invalid idle timeout: expected more than zero and at most {IDLE_TIMEOUT_MAX:?}"),
            ),
            (self.connections_max > 0, "invalid connection limit: expected at least one".to_owned()),
            (
                self.connections_per_peer > 0,
                "invalid connection limit per peer: expected at least one".to_owned(),
            ),
        ];
        match checks.into_iter().find(|(holds, _)| !holds) {
            Some((_, text)) => Err(TransportError::invalid(text)),
            None => Ok(()),
        }
    }

    pub(super) fn socket_options(&self) -> SocketOptions {
        SocketOptions {
            buffer_bytes: self.socket_buffer_bytes,
            congestion: match &self.congestion {
                Congestion::System => None,
                Congestion::Named(name) => Some(name.clone()),
            },
            stall_timeout: self.stall_timeout,
        }
    }
}

/// Sets the configured congestion control of a socket.
pub(crate) fn name_congestion(socket: impl AsFd, congestion: &Congestion) -> io::Result<()> {
    match congestion {
        Congestion::System => Ok(()),
        Congestion::Named(name) => set_congestion(socket.as_fd(), name),
    }
}
