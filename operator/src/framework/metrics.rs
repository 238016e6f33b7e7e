//! All metrics of the operator: names, help, labels. Label values come from enums, constants and kinds, so their number
//! is bounded.

use std::time::Duration;

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use reprise_daemon::rejected_connections::{Listener, RejectedConnections};

use crate::framework::api_client::ApiRequests;

/// Prefix of all metric names.
const PREFIX: &str = "reprise_operator";
/// Upper bound of the first reconcile bucket, 2⁻¹¹ s. 15 doublings reach 16 s and include 1 s, the target of
/// the p99.
const RECONCILE_FIRST_SECONDS: f64 = 1.0 / 2048.0;
const RECONCILE_BUCKETS: u16 = 16;

/// Names and values of labels.
pub type Labels<const N: usize> = [(&'static str, &'static str); N];

/// Kinds of writes to the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    Apply,
    Status,
    Finalizers,
    Delete,
    Event,
}

impl Write {
    fn as_str(self) -> &'static str {
        match self {
            Write::Apply => "apply",
            Write::Status => "status",
            Write::Finalizers => "finalizers",
            Write::Delete => "delete",
            Write::Event => "event",
        }
    }
}

fn counters<const N: usize>(registry: &mut Registry, name: &str, help: &str) -> Family<Labels<N>, Counter> {
    let counters = Family::default();
    registry.register(name, help, counters.clone());
    counters
}

/// Handles of all metrics.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    reconciles: Family<Labels<2>, Counter>,
    reconcile_time: Family<Labels<1>, Histogram, fn() -> Histogram>,
    writes: Family<Labels<2>, Counter>,
    conflicts: Family<Labels<1>, Counter>,
    put_backs: Family<Labels<1>, Counter>,
    /// Calls to control planes, by call and result: `done`, `refused` or `absent`.
    pub calls: Family<Labels<2>, Counter>,
    pub rejected: RejectedConnections,
    /// 1 while this process holds the lease.
    pub leader: Gauge,
}

impl Metrics {
    /// Registers all metrics. All start at zero, except requests that the API client has counted already.
    pub fn new(requests: ApiRequests) -> Metrics {
        let mut registry = Registry::with_prefix(PREFIX);
        let rejected = RejectedConnections::register(&mut registry, &[Listener::Admin]);
        let build = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "Version of the operator", build);
        let reconciles = counters(&mut registry, "reconciles", "Reconciles that ended, by kind and result");
        let histogram: fn() -> Histogram =
            || Histogram::new(exponential_buckets(RECONCILE_FIRST_SECONDS, 2.0, RECONCILE_BUCKETS));
        let reconcile_time = Family::new_with_constructor(histogram);
        let help = "Duration of a reconcile, by kind";
        registry.register_with_unit("reconcile", help, Unit::Seconds, reconcile_time.clone());
        let help =
            "Requests to the API server, including retries, by HTTP status code, or none without an answer";
        registry.register("api_requests", help, requests.0);
        let help =
            "Writes that the API server accepted, by kind of the object; a converged cluster receives none";
        let writes = counters(&mut registry, "writes", help);
        let help = "Children that were refused because another writer owns the object or its fields, by kind of the object";
        let conflicts = counters(&mut registry, "conflicts", help);
        let help = "Objects restored because another writer changed fields of the operator, by kind";
        let put_backs = counters(&mut registry, "put_backs", help);
        let help = "Calls to control planes, by call and result";
        let calls = counters(&mut registry, "control_plane_calls", help);
        let leader = Gauge::default();
        let help = "1 while this process holds the lease and reconciles";
        registry.register("leader", help, leader.clone());
        Metrics {
            registry,
            reconciles,
            reconcile_time,
            writes,
            conflicts,
            put_backs,
            calls,
            rejected,
            leader,
        }
    }

    /// Records that a reconcile ended as `done` or `failed`, with its duration.
    pub fn record_reconcile(&self, kind: &'static str, result: &'static str, took: Duration) {
        self.reconciles.get_or_create(&[("kind", kind), ("result", result)]).inc();
        self.reconcile_time.get_or_create(&[("kind", kind)]).observe(took.as_secs_f64());
    }

    /// Records an accepted write.
    pub fn record_write(&self, kind: &'static str, what: Write) {
        self.writes.get_or_create(&[("kind", kind), ("what", what.as_str())]).inc();
    }

    /// Records that another writer owns fields or an object that the operator wants to write.
    pub fn record_conflict(&self, kind: &'static str) {
        self.conflicts.get_or_create(&[("kind", kind)]).inc();
    }

    /// Records that the operator restored fields that another writer had changed.
    pub fn record_restore(&self, kind: &'static str) {
        self.put_backs.get_or_create(&[("kind", kind)]).inc();
    }

    /// Encodes all metrics in the OpenMetrics text format.
    ///
    /// # Panics
    /// Never: writing to a `String` does not fail.
    pub fn text(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry).expect("writing to a String does not fail");
        text
    }
}
