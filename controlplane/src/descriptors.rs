//! The member's file descriptors: what it needs whatever happens, and how many connections each listener may have.
//!
//! ```text
//!   fixed     96                standard streams, listeners, store, other members, and connections that are closed to
//!                               make room but not gone
//!             workers × 4       a front's runtime
//!   gRPC      × 1               an agent has one for heartbeats and watches, one for look-ups, and opens a third now and then
//!   events    × 1               subscribers, and as many connections for replays
//!   admin     × 1
//! ```

use reprise_daemon::descriptors::{self, Part, TooFewDescriptors};

use crate::config::EventsConfig;
use crate::registry::NODES_MAX;

/// See the module.
const RESERVE: u64 = 96;
const WORKER_DESCRIPTORS: u64 = 4;
const CONNECTIONS_PER_NODE: u64 = 3;

/// Probes, scrapers and people: a handful at a time.
const ADMIN: Part = Part { each: 1, min: 8, max: 64 };

/// Connections that the member's listeners may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionLimits {
    pub(crate) grpc: usize,
    pub(crate) admin: usize,
    /// Of subscribers; of those who ask for replays as many.
    pub(crate) events: usize,
}

impl ConnectionLimits {
    /// The limits of a member with so many workers, under the soft limit on open files.
    ///
    /// # Errors
    /// The limit is too low.
    pub(crate) fn of(workers: usize, events: &EventsConfig) -> Result<ConnectionLimits, TooFewDescriptors> {
        let limits = ConnectionLimits::under(descriptors::limit(), workers, events)?;
        let ConnectionLimits { grpc, admin, events } = limits;
        tracing::info!(grpc, admin, events, "limits of connections");
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
            .map(|units| usize::try_from(units).expect("fewer than there are memory addresses"));
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
    fn every_listener_has_its_maximum_under_the_limit_of_a_container() {
        let limits = ConnectionLimits::under(524_288, 16, &publishing()).expect("enough");
        assert_eq!(limits, ConnectionLimits { grpc: 3 * NODES_MAX, admin: 64, events: 64 });
    }

    #[test]
    fn all_connections_fit_under_a_small_limit() {
        for events in [publishing(), EventsConfig::default()] {
            let sockets = if events.publish.is_some() { 2 } else { 0 };
            let ConnectionLimits { grpc, admin, events } =
                ConnectionLimits::under(256, 2, &events).expect("enough for a small cluster");
            assert!(96 + 8 + grpc + admin + sockets * events <= 256);
            assert!(grpc >= 32 && admin >= 8);
        }
    }

    #[test]
    fn a_limit_that_is_too_low_is_refused_with_the_number_needed() {
        let refused = ConnectionLimits::under(100, 2, &EventsConfig::default()).expect_err("too few");
        assert_eq!(refused, TooFewDescriptors { limit: 100, needed: 96 + 8 + 32 + 8 });
    }
}
