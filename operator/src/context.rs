//! State shared by all reconciles.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kube::runtime::events::{Recorder, Reporter};
use kube::{Api, Client};

use crate::allocation::apply::NodeLocks;
use crate::api_client::ApiRequests;
use crate::authority::Authorities;
use crate::backoff::Backoff;
use crate::cluster::external_etcd::EtcdChecks;
use crate::cluster::volumes::StorageClassCache;
use crate::control_plane::ControlPlanes;
use crate::deletion_guard::Quiescence;
use crate::field_ownership::restore::OtherWriters;
use crate::finalizers::ForbiddenWrites;
use crate::lease::LeaseCheck;
use crate::metrics::Metrics;
use crate::names::OPERATOR;
use crate::profile::decisions::ProfileDecisions;
use crate::profile::source::SourceCache;
use crate::settings::Settings;
use crate::stores::Stores;
use crate::watch::Triggers;
use crate::watchdog::Watchdog;

/// Shortest interval between two writes of a status whose counts changed but whose conditions did not.
pub const STATUS_WRITE_INTERVAL: Duration = Duration::from_secs(10);

/// Client, stores, settings, and memory between reconciles. The memory never affects the desired objects: a
/// process without it builds the same ones.
pub struct Context {
    /// Client of the API server.
    pub client: Client,
    /// Objects as the watches last reported them.
    pub stores: Arc<Stores>,
    /// Senders of reconcile requests.
    pub triggers: Arc<Triggers>,
    /// Settings from the command line.
    pub settings: Settings,
    /// Metrics of this process.
    pub metrics: Metrics,
    /// Publisher of events on objects.
    pub recorder: Recorder,
    /// Progress of the queues, for the liveness probe.
    pub watchdog: Watchdog,
    /// Consecutive failures of reconciles.
    pub backoff: Backoff,
    /// Last check results of external etcd stores.
    pub store_checks: EtcdChecks,
    /// Storage classes of the Kubernetes cluster.
    pub storage_classes: StorageClassCache,
    /// Authorities of the clusters' certificates.
    pub authorities: Authorities,
    /// Connections to the control planes of clusters.
    pub control_planes: ControlPlanes,
    /// Time since the last report of engine sessions, by object.
    pub quiescence: Quiescence,
    /// Writes that the API server recently rejected as forbidden.
    pub forbidden_writes: ForbiddenWrites,
    /// Check whether this replica holds the lease.
    pub(crate) lease: LeaseCheck,
    /// Locks that serialise grants of GPU queues on a node.
    pub(crate) node_locks: NodeLocks,
    /// Cached ConfigMaps with profile windows.
    pub profile_sources: SourceCache,
    /// Profile revision chosen for each node.
    pub decisions: ProfileDecisions,
    /// Digest of the last applied body and the resulting version, by `kind/namespace/name`. The API server
    /// rewrites some values, so a comparison with the stored object would always differ. For a `CacheNode`:
    /// digest of its spec and its generation.
    normalised: Mutex<HashMap<String, (String, String)>>,
    /// Conflicts with other writers of exclusively owned fields.
    pub(crate) other_writers: OtherWriters,
    status_written: Mutex<HashMap<String, Instant>>,
}

impl Context {
    /// Creates a context with empty memory.
    pub fn new(
        (client, requests): (Client, ApiRequests),
        stores: Arc<Stores>,
        triggers: Arc<Triggers>,
        settings: Settings,
    ) -> Context {
        let reporter =
            Reporter { controller: OPERATOR.to_owned(), instance: Some(settings.identity.clone()) };
        let leases = Api::namespaced(client.clone(), &settings.namespace);
        Context {
            lease: LeaseCheck::new(leases, settings.identity.clone()),
            recorder: Recorder::new(client.clone(), reporter),
            authorities: Authorities::default(),
            control_planes: ControlPlanes::new(settings.control_planes.clone()),
            client,
            stores,
            triggers,
            settings,
            metrics: Metrics::new(requests),
            watchdog: Watchdog::default(),
            backoff: Backoff::default(),
            store_checks: EtcdChecks::default(),
            storage_classes: StorageClassCache::default(),
            quiescence: Quiescence::default(),
            forbidden_writes: ForbiddenWrites::default(),
            node_locks: NodeLocks::default(),
            profile_sources: SourceCache::default(),
            decisions: ProfileDecisions::default(),
            normalised: Mutex::default(),
            other_writers: OtherWriters::default(),
            status_written: Mutex::default(),
        }
    }

    /// Returns the digest that was applied last to an object, and the resulting version or generation.
    pub(crate) fn last_applied(&self, key: &str) -> Option<(String, String)> {
        self.normalised.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// Records the digest that was applied to an object, and the resulting version or generation.
    pub(crate) fn record_applied(&self, key: String, digest: String, version: String) {
        self.normalised.lock().unwrap_or_else(PoisonError::into_inner).insert(key, (digest, version));
    }

    /// Returns how long a non-urgent status write must wait, or `None` if it may be written now.
    pub(crate) fn status_write_delay(&self, key: &str) -> Option<Duration> {
        let written = self.status_written.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = written.get(key).map(Instant::elapsed)?;
        STATUS_WRITE_INTERVAL.checked_sub(passed).filter(|rest| !rest.is_zero())
    }

    /// Records that a status was written now.
    pub(crate) fn record_status_write(&self, key: &str) {
        self.status_written
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(key.to_owned(), Instant::now());
    }
}
