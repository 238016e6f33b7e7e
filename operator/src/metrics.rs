//! Every metric of the operator: names, help, labels. Labels are words of enums or kinds, so their number is bounded.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::{Registry, Unit};
use reprise_daemon::rejected::{Listener, RejectedConnections};

use crate::requests::ApiRequests;

/// Prefix of every name.
const PREFIX: &str = "reprise_operator";
/// First bucket of reconciles, 2⁻¹¹ s; 16 doublings reach 16 s, and one of them is the second that p99 has.
const RECONCILE_FIRST_SECONDS: f64 = 1.0 / 2048.0;
const RECONCILE_BUCKETS: u16 = 16;

/// Labels of what is counted by kind.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct KindLabels {
    /// Kind of the object.
    pub kind: &'static str,
}

/// Labels of reconciles.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReconcileLabels {
    /// Kind of the object.
    pub kind: &'static str,
    /// `done` or `failed`.
    pub result: &'static str,
}

/// Labels of writes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct WriteLabels {
    /// Kind of the object.
    pub kind: &'static str,
    /// What was written.
    pub what: &'static str,
}

/// Labels of calls to control planes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct CallLabels {
    /// What was called.
    pub call: &'static str,
    /// `done`, `refused` or `absent`.
    pub result: &'static str,
}

/// Calls to control planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// What it knows of nodes and tenants.
    List,
    /// What tenants hold.
    ListHoldings,
    /// The mode of a node.
    SetNode,
    /// The budget of a tenant.
    SetTenant,
    /// The end of one.
    RemoveTenant,
}

impl Call {
    fn as_str(self) -> &'static str {
        match self {
            Call::List => "list",
            Call::ListHoldings => "list_holdings",
            Call::SetNode => "set_node",
            Call::SetTenant => "set_tenant",
            Call::RemoveTenant => "remove_tenant",
        }
    }
}

/// What is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Write {
    /// An object, made or changed.
    Apply,
    /// Its status.
    Status,
    /// Its finalizers.
    Finalizers,
    /// It was deleted.
    Delete,
    /// An event about it.
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

/// Handles of all metrics.
#[derive(Debug)]
pub struct Metrics {
    registry: Mutex<Registry>,
    requests: ApiRequests,
    reconciles: Family<ReconcileLabels, Counter>,
    reconcile_time: Family<KindLabels, Histogram, fn() -> Histogram>,
    writes: Family<WriteLabels, Counter>,
    conflicts: Family<KindLabels, Counter>,
    put_backs: Family<KindLabels, Counter>,
    calls: Family<CallLabels, Counter>,
    /// Connections to the admin port that were not served.
    pub rejected: RejectedConnections,
    /// 1 while this process holds the lease.
    pub leader: Gauge,
}

impl Metrics {
    /// All of them, at nothing but what was asked of the API server already.
    pub fn new(requests: ApiRequests) -> Metrics {
        let histogram: fn() -> Histogram =
            || Histogram::new(exponential_buckets(RECONCILE_FIRST_SECONDS, 2.0, RECONCILE_BUCKETS));
        let mut registry = Registry::with_prefix(PREFIX);
        let rejected = RejectedConnections::register(&mut registry, &[Listener::Admin]);
        let metrics = Metrics {
            registry: Mutex::default(),
            requests,
            reconciles: Family::default(),
            reconcile_time: Family::new_with_constructor(histogram),
            writes: Family::default(),
            conflicts: Family::default(),
            put_backs: Family::default(),
            calls: Family::default(),
            rejected,
            leader: Gauge::default(),
        };
        metrics.register(registry);
        metrics
    }

    fn register(&self, mut registry: Registry) {
        let build = Info::new(vec![("version", env!("CARGO_PKG_VERSION"))]);
        registry.register("build", "Version of the operator", build);
        registry.register("reconciles", "Reconciles that ended, by kind and result", self.reconciles.clone());
        let help = "Time of a reconcile";
        registry.register_with_unit("reconcile", help, Unit::Seconds, self.reconcile_time.clone());
        let help = "Requests to the API server by the code of the answer, or none when nobody answered; each try counts";
        registry.register("api_requests", help, self.requests.0.clone());
        let help =
            "Writes that the API server has taken, by kind of the object; a converged cluster gets none";
        registry.register("writes", help, self.writes.clone());
        let help = "Fields or objects of ours that somebody else owns, each time that they were met";
        registry.register("conflicts", help, self.conflicts.clone());
        let help = "Objects of which somebody else had written fields that are the operator's or an agent's alone, each time that they were put back";
        registry.register("put_backs", help, self.put_backs.clone());
        let help = "Calls to the control planes of clusters, by what became of them";
        registry.register("control_plane_calls", help, self.calls.clone());
        registry.register(
            "leader",
            "1 while this process holds the lease and reconciles",
            self.leader.clone(),
        );
        *self.registry.lock().unwrap_or_else(PoisonError::into_inner) = registry;
    }

    /// A reconcile of a kind has ended.
    pub fn reconciled(&self, kind: &'static str, result: &'static str, took: Duration) {
        self.reconciles.get_or_create(&ReconcileLabels { kind, result }).inc();
        self.reconcile_time.get_or_create(&KindLabels { kind }).observe(took.as_secs_f64());
    }

    /// Something was written.
    pub fn wrote(&self, kind: &'static str, what: Write) {
        self.writes.get_or_create(&WriteLabels { kind, what: what.as_str() }).inc();
    }

    /// Somebody else owns what we want to write.
    pub fn conflicted(&self, kind: &'static str) {
        self.conflicts.get_or_create(&KindLabels { kind }).inc();
    }

    /// What somebody else had written was put back.
    pub fn put_back(&self, kind: &'static str) {
        self.put_backs.get_or_create(&KindLabels { kind }).inc();
    }

    /// A control plane was called.
    pub fn called(&self, call: Call, result: &'static str) {
        self.calls.get_or_create(&CallLabels { call: call.as_str(), result }).inc();
    }

    /// As scrapers read them.
    ///
    /// # Panics
    /// Never: a text takes everything.
    pub fn text(&self) -> String {
        let mut text = String::new();
        encode(&mut text, &self.registry.lock().unwrap_or_else(PoisonError::into_inner))
            .expect("a text takes everything");
        text
    }
}
