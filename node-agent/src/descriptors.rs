//! Budget of file descriptors: a fixed part, and the maximum connections of each listener.
//!
//! ```text
//!   fixed     regions × 2       writable and read-only
//!             devices × 5       file, the same for clients, ring, eventfd, one more while opening
//!             64                standard streams, runtimes, listeners, hardware scans, and evicted connections that
//!                               are not closed yet
//!             64 (in a cluster) control plane members, API server
//!   sessions  × 6               socket, its copy for reading, a copy during the handshake, the progress page twice,
//!                               its copy on the way to the client
//!             + 58 + pairs      if queue pairs are granted: 8 that wait for their messages, the 32 of the message that is
//!                               read, 17 of calls that wait or run, registers and queue pairs of one grant on the way
//!                               to the client
//!   peers     × 3               one accepted, one opened with its eventfd
//!   admin     × 1
//! ```
//!
//! With the hard limit of 524,288 that container runtimes set, all parts get their maximum: 256 sessions,
//! 1,024 peers in each direction, 64 admin connections. That is about 4,900 descriptors in addition to the
//! arena's, and at most 31,400 more with queue pairs.

use reprise_agent_core::limits::DEVICES_MAX;
use reprise_daemon::descriptors::{self, Part};
use reprise_policy::queue_grants::QueueGrantLimits;

use crate::config::Settings;
use crate::error::{AgentError, ErrorKind};
use crate::session::{CALLS_WAITING_MAX, DESCRIPTORS_PER_PART, DESCRIPTORS_WAITING_MAX, SESSIONS_MAX};

/// Fixed descriptors; see the module.
const REGION_DESCRIPTORS: u64 = 2;
const DEVICE_DESCRIPTORS: u64 = 5;
const RESERVE: u64 = 64;
const CLUSTER_RESERVE: u64 = 64;

/// Descriptors of a session without queue pairs.
const SESSION_DESCRIPTORS: u64 = 6;

/// Descriptors that a session may send, those of its calls that wait or run, and the registers of a grant.
const QUEUE_DESCRIPTORS: u64 =
    (DESCRIPTORS_WAITING_MAX + DESCRIPTORS_PER_PART + CALLS_WAITING_MAX + 2) as u64;

/// Minimum: one engine with 8 processes.
const SESSIONS_MIN: u64 = 8;

/// Maximum: 1,024 connections reach every node of a cluster of 1,000.
const PEERS: Part = Part { each: 3, min: 8, max: 1024 };

/// Probes, scrapers and users need a few connections at a time.
const ADMIN: Part = Part { each: 1, min: 8, max: 64 };

/// Maximum connections of the agent's listeners.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionLimits {
    pub(crate) sessions: usize,
    /// Connections accepted from peers; the same number may be opened to them.
    pub(crate) peers: usize,
    /// Connections to the admin port.
    pub(crate) admin: usize,
}

/// Parameters of the fixed part and of sessions.
#[derive(Clone, Copy, Debug)]
struct Fixed {
    regions: u64,
    devices: u64,
    clustered: bool,
    /// Queue pairs of one grant; 0: none are granted.
    pairs: u64,
}

impl ConnectionLimits {
    /// Computes the limits from the soft limit on open files. In a Kubernetes cluster, devices are claimed
    /// at run time, so the maximum number of devices is assumed, and that sessions get queue pairs.
    ///
    /// # Errors
    /// `ErrorKind::Resource` if the limit on open files is too low; the message contains the required
    /// number.
    pub(crate) fn of(settings: &Settings, in_cluster: bool) -> Result<ConnectionLimits, AgentError> {
        let devices = if in_cluster { DEVICES_MAX } else { settings.pool.devices.len() };
        let QueueGrantLimits { pairs_per_device, pairs_per_session, .. } = settings.session.queue_grants;
        let fixed = Fixed {
            pairs: u64::from(if in_cluster {
                pairs_per_session
            } else {
                pairs_per_device.min(pairs_per_session)
            }),
            regions: settings.arena.bytes.div_ceil(settings.arena.region_bytes),
            devices: devices as u64,
            clustered: in_cluster || settings.controlplane.is_some(),
        };
        let limits = ConnectionLimits::under(descriptors::limit(), fixed)?;
        let ConnectionLimits { sessions, peers, admin } = limits;
        tracing::info!(sessions, peers, admin, "connection limits");
        Ok(limits)
    }

    fn under(limit: u64, fixed: Fixed) -> Result<ConnectionLimits, AgentError> {
        let Fixed { regions, devices, clustered, pairs } = fixed;
        let queues = if pairs > 0 { QUEUE_DESCRIPTORS + pairs } else { 0 };
        let each = SESSION_DESCRIPTORS + queues;
        let sessions = Part { each, min: SESSIONS_MIN, max: SESSIONS_MAX as u64 };
        let reserve = RESERVE + if clustered { CLUSTER_RESERVE } else { 0 };
        let sum = regions * REGION_DESCRIPTORS + devices * DEVICE_DESCRIPTORS + reserve;
        let [sessions, peers, admin] =
            descriptors::divide(limit, sum, [sessions, PEERS, ADMIN]).map_err(|too_few| {
                let plural = |count: u64| if count == 1 { "" } else { "s" };
                let context = format!(
                    "too few file descriptors for {regions} arena region{} (raise arena.region_bytes to \
                     reduce their number) and {devices} device{}",
                    plural(regions),
                    plural(devices)
                );
                AgentError::new(ErrorKind::Resource, context).with_source(too_few)
            })?;
        let units = |units: u64| usize::try_from(units).expect("at most a thousand");
        Ok(ConnectionLimits { sessions: units(sessions), peers: units(peers), admin: units(admin) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SMALL: Fixed = Fixed { regions: 2, devices: 1, clustered: false, pairs: 0 };

    #[test]
    fn every_listener_gets_its_maximum_under_the_limit_of_a_container() {
        let fixed = Fixed { regions: 1024, devices: 32, clustered: true, pairs: 64 };
        let limits = ConnectionLimits::under(524_288, fixed).expect("enough");
        assert_eq!(limits, ConnectionLimits { sessions: SESSIONS_MAX, peers: 1024, admin: 64 });
    }

    #[test]
    fn all_connections_fit_under_a_small_limit() {
        let ConnectionLimits { sessions, peers, admin } =
            ConnectionLimits::under(256, SMALL).expect("enough for a small agent");
        assert!(2 * 2 + 4 + 64 + 6 * sessions + 3 * peers + admin <= 256);
        assert!(sessions >= 8 && peers >= 8 && admin >= 8);
    }

    #[test]
    fn sessions_with_queue_pairs_need_more() {
        // 2×2 + 1×5 + 64 + 8×(6 + 58 + 16) + 8×3 + 8
        let fixed = Fixed { pairs: 16, ..SMALL };
        let error = ConnectionLimits::under(744, fixed).expect_err("one too few");
        assert!(error.chain().contains("at least 745"), "{}", error.chain());
        assert_eq!(ConnectionLimits::under(745, fixed).expect("enough").sessions, 8);
    }

    #[test]
    fn too_low_limit_is_rejected_with_the_required_number_and_the_remedy() {
        // 2×2 + 1×5 + 64 + 8×6 + 8×3 + 8
        let error = ConnectionLimits::under(152, SMALL).expect_err("one too few");
        assert_eq!(error.kind(), ErrorKind::Resource);
        let text = error.chain();
        for word in
            ["2 arena regions", "arena.region_bytes", "is 152", "at least 153", "LimitNOFILE=", "ulimit -Hn"]
        {
            assert!(text.contains(word), "missing {word} in {text}");
        }
        assert!(ConnectionLimits::under(153, SMALL).is_ok());
    }
}
