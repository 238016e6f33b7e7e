//! File descriptors of a member: fixed use, and the maximum number of connections of each listener.
//!
//! ```text
//!   fixed     96                standard streams, listeners, store, other members, and connections that are
//!                               closed to make room but still open
//!             workers × 4       runtime of a gRPC thread
//!   gRPC      × 1               per agent one for heartbeats and watches, one for lookups, sometimes a third
//!   events    × 1               subscribers, and as many connections for replays
//!   admin     × 1
//! ```

use reprise_daemon::descriptors::{self, Part, TooFewDescriptors};

use crate::config::EventsConfig;
use crate::registry::NODES_MAX;

/// Fixed use; see the module documentation.
const RESERVE: u64 = 96;
const WORKER_DESCRIPTORS: u64 = 4;
const CONNECTIONS_PER_NODE: u64 = 3;

/// Admin connections: a few probes, scrapers and people at a time.
const ADMIN: Part = Part { each: 1, min: 8, max: 64 };

/// Maximum number of connections of each listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionLimits {
    pub(crate) grpc: usize,
    pub(crate) admin: usize,
    /// Subscribers; replay connections have the same limit.
    pub(crate) events: usize,
}

impl ConnectionLimits {
    /// Divides the soft limit on open files of a member with `workers` gRPC threads.
    ///
    /// # Errors
    /// The limit is too low for the minimum of each listener.
    pub(crate) fn of(workers: usize, events: &EventsConfig) -> Result<ConnectionLimits, TooFewDescriptors> {
        let limits = ConnectionLimits::under(descriptors::limit(), workers, events)?;
        let ConnectionLimits { grpc, admin, events } = limits;
        tracing::info!(grpc, admin, events, "connection limits");
        Ok(limits)
    }

    fn under(
        limit: u64,
        workers: usize,
        events: &EventsConfig,
    ) -> Result<ConnectionLimits, TooFewDescriptors> {
        let fixed = RESERVE + workers as u64 * WORKER_DESCRIPTORS;
        let sockets = u64::from(events.publish.is_some()) + u64::from(events.replay.is_some());
        let subscribers = events.subscribers as u64;
        let parts = [
            Part { each: 1, min: 32, max: CONNECTIONS_PER_NODE * NODES_MAX as u64 },
            ADMIN,
            Part { each: sockets, min: subscribers.min(4), max: subscribers },
        ];
        let [grpc, admin, events] = descriptors::divide(limit, fixed, parts)?
            .map(|units| usize::try_from(units).expect("descriptor counts fit in usize"));
        Ok(ConnectionLimits { grpc, admin, events })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn publishing() -> EventsConfig {
        let loopback = Some("127.0.0.1:0".parse().expect("an address"));
        EventsConfig { publish: loopback, replay: loopback, ..EventsConfig::default() }
    }

    #[test]
    fn a_container_limit_gives_every_listener_its_maximum() {
        let limits = ConnectionLimits::under(524_288, 16, &publishing()).expect("enough");
        assert_eq!(limits, ConnectionLimits { grpc: 3 * NODES_MAX, admin: 64, events: 64 });
    }

    #[test]
    fn connection_limits_fit_within_a_small_descriptor_limit() {
        for events in [publishing(), EventsConfig::default()] {
            let sockets = if events.publish.is_some() { 2 } else { 0 };
            let ConnectionLimits { grpc, admin, events } =
                ConnectionLimits::under(256, 2, &events).expect("enough for a small cluster");
            assert!(96 + 8 + grpc + admin + sockets * events <= 256);
            assert!(grpc >= 32 && admin >= 8);
        }
    }

    #[test]
    fn rejects_a_too_low_limit_and_reports_the_required_one() {
        let refused = ConnectionLimits::under(100, 2, &EventsConfig::default()).expect_err("too few");
        assert_eq!(refused, TooFewDescriptors { limit: 100, needed: 96 + 8 + 32 + 8 });
    }
}
