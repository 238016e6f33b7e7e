//! The metric of connections that were not served, by listener and reason. Both are enums, so the labels are bounded.

use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// A port or socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Listener {
    /// Metrics, health and state over HTTP.
    Admin,
    /// The control plane's services.
    Grpc,
    /// Batches of KV events (ZeroMQ PUB).
    Events,
    /// Replays of KV events (ZeroMQ ROUTER).
    Replay,
    /// Engines, over the unix socket.
    Sessions,
}

/// Why a connection was closed without service.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// It was the longest-idle one, and another one needed room.
    Idle,
    /// All connections were in use when it came.
    Full,
    /// It sent no greeting, or no request, in time.
    Timeout,
    /// What it sent is not the protocol.
    Protocol,
    /// It may not use the service.
    Refused,
    /// The system could not accept or serve it.
    System,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    listener: Listener,
    reason: Reason,
}

/// The counters; clones are the same ones.
#[derive(Clone, Debug, Default)]
pub struct RejectedConnections(Family<Labels, Counter>);

impl RejectedConnections {
    /// The counters of these listeners, at zero from the first scrape on.
    pub fn register(registry: &mut Registry, listeners: &[Listener]) -> RejectedConnections {
        let rejected = RejectedConnections::default();
        for listener in listeners {
            for reason in Reason::ALL {
                drop(rejected.0.get_or_create(&Labels { listener: *listener, reason }));
            }
        }
        let help = "Connections that were closed without service, by listener and reason";
        registry.register("connections_rejected", help, rejected.0.clone());
        rejected
    }

    /// Counts a connection.
    pub fn count(&self, listener: Listener, reason: Reason) {
        self.0.get_or_create(&Labels { listener, reason }).inc();
    }

    /// How many were counted.
    pub fn get(&self, listener: Listener, reason: Reason) -> u64 {
        self.0.get_or_create(&Labels { listener, reason }).get()
    }
}

impl Listener {
    /// Its label, also in the log.
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
    const ALL: [Reason; 6] =
        [Reason::Idle, Reason::Full, Reason::Timeout, Reason::Protocol, Reason::Refused, Reason::System];

    /// Its label, also in the log.
    pub fn as_str(self) -> &'static str {
        match self {
            Reason::Idle => "idle",
            Reason::Full => "full",
            Reason::Timeout => "timeout",
            Reason::Protocol => "protocol",
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
