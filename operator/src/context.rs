//! What every reconcile is given.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kube::runtime::events::{Recorder, Reporter};
use kube::{Api, Client};

use crate::allocation::apply::Turns;
use crate::backoff::Backoff;
use crate::cluster::store::StoreLooks;
use crate::cluster::volumes::ClassLooks;
use crate::control_plane::ControlPlanes;
use crate::finalizers::Refusals;
use crate::in_use::Rests;
use crate::lease::Holding;
use crate::metrics::Metrics;
use crate::names::OPERATOR;
use crate::profile::decisions::Decisions;
use crate::profile::source::Looks;
use crate::progress::Progress;
use crate::put_back::Disputes;
use crate::requests::ApiRequests;
use crate::settings::Settings;
use crate::watch::Triggers;
use crate::world::World;

/// A status whose numbers changed, and whose conditions did not, is written so often at the most.
pub const STATUS_EVERY: Duration = Duration::from_secs(10);

/// Client, stores, settings, and what is remembered between reconciles. Nothing here decides what is wanted: a process that has
/// forgotten all of it makes the same objects.
pub struct Context {
    /// The API server.
    pub client: Client,
    /// What is known.
    pub world: Arc<World>,
    /// Where reconciles are asked for.
    pub triggers: Arc<Triggers>,
    /// What the process was started with.
    pub settings: Settings,
    /// What is counted.
    pub metrics: Metrics,
    /// Events on objects.
    pub recorder: Recorder,
    /// Whether the queues go on.
    pub progress: Progress,
    /// Failures in a row.
    pub backoff: Backoff,
    /// What stores of others said when they were last asked.
    pub store_looks: StoreLooks,
    /// The storage classes that there are.
    pub class_looks: ClassLooks,
    /// The control planes of clusters.
    pub control_planes: ControlPlanes,
    /// How long nothing has been heard of sessions.
    pub rests: Rests,
    /// Finalizers that may not be changed.
    pub refusals: Refusals,
    /// Whether this replica is the one that works.
    pub(crate) holding: Holding,
    /// Whose turn it is to lend queues of a node.
    pub(crate) turns: Turns,
    /// ConfigMaps with windows, as they were when they were last looked at.
    pub profile_looks: Looks,
    /// Which node should have which revision of a profile.
    pub decisions: Decisions,
    /// What the API server made of a child: its digest and the version that came of it, by `kind/namespace/name`. The server writes some values
    /// in another way than they were sent, and such a child would look different for ever. Of a `CacheNode` the digest of its spec and its generation.
    normalised: Mutex<HashMap<String, (String, String)>>,
    /// Who else writes what is ours.
    pub(crate) disputes: Disputes,
    status_written: Mutex<HashMap<String, Instant>>,
}

impl Context {
    /// A context without memories.
    pub fn new(
        (client, requests): (Client, ApiRequests),
        world: Arc<World>,
        triggers: Arc<Triggers>,
        settings: Settings,
    ) -> Context {
        let reporter =
            Reporter { controller: OPERATOR.to_owned(), instance: Some(settings.identity.clone()) };
        let leases = Api::namespaced(client.clone(), &settings.namespace);
        Context {
            holding: Holding::new(leases, settings.identity.clone()),
            recorder: Recorder::new(client.clone(), reporter),
            control_planes: ControlPlanes::new(settings.control_planes.clone()),
            client,
            world,
            triggers,
            settings,
            metrics: Metrics::new(requests),
            progress: Progress::default(),
            backoff: Backoff::default(),
            store_looks: StoreLooks::default(),
            class_looks: ClassLooks::default(),
            rests: Rests::default(),
            refusals: Refusals::default(),
            turns: Turns::default(),
            profile_looks: Looks::default(),
            decisions: Decisions::default(),
            normalised: Mutex::default(),
            disputes: Disputes::default(),
            status_written: Mutex::default(),
        }
    }

    /// What the API server made of an object that was applied last: the digest of what was applied, and the version or generation that came of it.
    pub(crate) fn remembered(&self, key: &str) -> Option<(String, String)> {
        self.normalised.lock().unwrap_or_else(PoisonError::into_inner).get(key).cloned()
    }

    /// It made this of it.
    pub(crate) fn remember(&self, key: String, digest: String, version: String) {
        self.normalised.lock().unwrap_or_else(PoisonError::into_inner).insert(key, (digest, version));
    }

    /// How long a status that is not urgent has to wait; nothing when it may be written now.
    pub(crate) fn status_waits(&self, key: &str) -> Option<Duration> {
        let written = self.status_written.lock().unwrap_or_else(PoisonError::into_inner);
        let passed = written.get(key).map(Instant::elapsed)?;
        STATUS_EVERY.checked_sub(passed).filter(|rest| !rest.is_zero())
    }

    /// A status has been written.
    pub(crate) fn status_was_written(&self, key: &str) {
        self.status_written
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(key.to_owned(), Instant::now());
    }
}
