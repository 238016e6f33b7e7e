//! What every reconcile uses: the client, metrics, events, children, and memory between reconciles.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kube::runtime::events::{Recorder, Reporter};
use kube::{Api, Client};
use tokio::time::Instant;

use crate::framework::api_client::ApiRequests;
use crate::framework::backoff::Backoff;
use crate::framework::change::OwnWrites;
use crate::framework::child_stores::ChildStores;
use crate::framework::field_ownership::restore::OtherWriters;
use crate::framework::labels::OPERATOR;
use crate::framework::lease::LeaseCheck;
use crate::framework::metrics::Metrics;

/// Shortest interval between two writes of a status whose counts changed but whose conditions did not.
pub const STATUS_WRITE_INTERVAL: Duration = Duration::from_secs(10);

/// Client, children, metrics, and memory between reconciles. The memory never affects the desired objects: a
/// process without it builds the same ones.
pub struct Services {
    pub client: Client,
    /// Children as the watches last reported them.
    pub children: Arc<ChildStores>,
    pub metrics: Metrics,
    pub recorder: Recorder,
    pub backoff: Backoff,
    pub(crate) lease: LeaseCheck,
    pub(crate) own_writes: Arc<OwnWrites>,
    pub(crate) other_writers: OtherWriters,
    /// Digest of the last applied body and the resulting version, by `kind/namespace/name`. The API server
    /// rewrites some values, so a comparison with the stored object would always differ. For a `CacheNode`:
    /// digest of its spec, and its UID and generation.
    normalised: Mutex<HashMap<String, (String, String)>>,
    status_written: Mutex<HashMap<String, Instant>>,
}

impl Services {
    /// Creates services with empty memory. `identity` is the name of the pod, in the lease and in events; `namespace` that of
    /// the lease.
    pub fn new(
        (client, requests): (Client, ApiRequests),
        (identity, namespace): (&str, &str),
        children: Arc<ChildStores>,
        own_writes: Arc<OwnWrites>,
    ) -> Services {
        let reporter = Reporter { controller: OPERATOR.to_owned(), instance: Some(identity.to_owned()) };
        let leases = Api::namespaced(client.clone(), namespace);
        Services {
            lease: LeaseCheck::new(leases, identity),
            recorder: Recorder::new(client.clone(), reporter),
            client,
            children,
            metrics: Metrics::new(requests),
            backoff: Backoff::default(),
            own_writes,
            other_writers: OtherWriters::default(),
            normalised: Mutex::default(),
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
