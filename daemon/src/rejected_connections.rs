//! Metric of connections closed without service, by listener and reason. Both labels are enums, so their
//! number is bounded.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// A listening port or socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Listener {
    /// Metrics, health and state over HTTP.
    Admin,
    /// gRPC services of the control plane.
    Grpc,
    /// KV events (ZeroMQ PUB).
    Events,
    /// Replays of KV events (ZeroMQ ROUTER).
    Replay,
    /// Sessions of engines, over the unix socket.
    Sessions,
}

/// Reasons to close a connection without service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// Longest-idle connection, closed to make room for another.
    Idle,
    /// All connections were busy.
    Full,
    /// No greeting or request within the time limit.
    Timeout,
    /// Protocol violation.
    Protocol,
    /// No valid certificate in the TLS handshake.
    Certificate,
    /// Client is not allowed to use the service.
    Refused,
    /// Operating system error on accepting or serving.
    System,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    listener: Listener,
    reason: Reason,
}

/// The counters. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct RejectedConnections(Family<Labels, Counter>);

impl RejectedConnections {
    /// Registers the counters of these listeners, starting at zero.
    pub fn register(registry: &mut Registry, listeners: &[Listener]) -> RejectedConnections {
        let rejected = RejectedConnections::default();
        for listener in listeners {
            for reason in Reason::ALL {
                drop(rejected.0.get_or_create(&Labels { listener: *listener, reason }));
            }
        }
        let help = "Connections that were closed without service, by listener and reason (idle, full, timeout, \
                    protocol, certificate, refused, system)";
        registry.register("connections_rejected", help, rejected.0.clone());
        rejected
    }

    /// Counts a closed connection.
    pub fn count(&self, listener: Listener, reason: Reason) {
        self.0.get_or_create(&Labels { listener, reason }).inc();
    }

    /// Number of connections counted.
    pub fn get(&self, listener: Listener, reason: Reason) -> u64 {
        self.0.get_or_create(&Labels { listener, reason }).get()
    }
}

impl Listener {
    /// Label value, also used in the log.
    pub fn as_str(self) -> &'static str {
        match self {
            Listener::Admin => "admin",
            Listener::Grpc => "grpc",
            Listener::Events => "events",
            Listener::Replay => "replay",
            Listener::Sessions => "sessions",
        }
    }
}

impl Reason {
    const ALL: [Reason; 7] = [
        Reason::Idle,
        Reason::Full,
        Reason::Timeout,
        Reason::Protocol,
        Reason::Certificate,
        Reason::Refused,
        Reason::System,
    ];

    /// Label value, also used in the log.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Idle => "idle",
            Reason::Full => "full",
            Reason::Timeout => "timeout",
            Reason::Protocol => "protocol",
            Reason::Certificate => "certificate",
            Reason::Refused => "refused",
            Reason::System => "system",
        }
    }
}

impl EncodeLabelValue for Listener {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.as_str().encode(encoder)
    }
}

impl EncodeLabelValue for Reason {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), std::fmt::Error> {
        self.as_str().encode(encoder)
    }
}
