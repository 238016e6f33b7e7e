//! The event loop: handles changes of the object, new facts, due status writes and the stop request, one at
//! a time.

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::Timestamp;
use kube::api::{Api, DynamicObject};
use kube::core::ApiResource;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, Resource, ResourceExt};
use reprise_crds::status::Condition;
use reprise_crds::{CacheNode, CacheNodeStatus};
use serde_json::{Value, json};
use tokio::sync::{oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_stream::StreamExt;

use crate::connect::{Access, ConnectError};
use crate::desired::Desired;
use crate::facts::{Facts, Phase};
use crate::persisted::StateDirectory;
use crate::status::{Identity, status, without_amounts};
use crate::status_conflict::{self, StatusConflict};
use crate::write_pacer::{StatusChange, WritePacer};

/// Time limit of a write; a slower server counts as unreachable.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Time limit for the final status when the agent stops.
const LAST_WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Pause between two attempts to write the final status.
const LAST_WRITE_AGAIN: Duration = Duration::from_millis(250);

/// HTTP status codes that waiting does not change: bad request, missing credentials or permissions, invalid
/// object. Other errors mean that the server is not ready or busy, or that the object does not exist yet.
const REFUSALS: [u16; 4] = [400, 401, 403, 422];

/// HTTP status code of a missing object.
const NOT_FOUND: u16 = 404;

/// Settings of the event loop.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// Name of the node.
    pub node: String,
    /// Version of the agent.
    pub version: String,
    /// Name of the agent's pod, if known.
    pub pod: Option<String>,
    /// `namespace/name` of the agent's cluster, if known: objects of other clusters are ignored.
    pub cluster: Option<String>,
    /// How to connect to the API server.
    pub access: Access,
    /// Where the last spec is persisted.
    pub state: StateDirectory,
    /// Average interval between writes of a changed status. Changes of state may be written earlier, in
    /// bursts.
    pub status_every: Duration,
}

/// The event loop for one node's object.
pub struct NodeWatch {
    settings: NodeSettings,
    identity: Identity,
    api: Api<DynamicObject>,
    pacer: WritePacer,
    /// Delivers the desired state to the agent.
    deliver: Box<dyn FnMut(Desired) + Send>,
    /// Generation and spec delivered last; without a spec if it was the persisted one.
    delivered: Option<(i64, Option<Value>)>,
    /// Number of deliveries so far.
    deliveries: u64,
    last: Option<Desired>,
    object: Option<WatchedObject>,
    /// The status written last.
    written: Option<CacheNodeStatus>,
    /// Conditions of the object when it was first read, for their transition times.
    initial_conditions: Vec<Condition>,
    server: ServerState,
    /// The last rejection of a write that was logged.
    last_rejection: Option<String>,
    /// The last conflict with other writers of the status.
    conflict: StatusConflict,
    /// The other cluster that owns the node.
    other_owner: Option<String>,
}

/// The object that the agent follows.
#[derive(Clone, Debug)]
struct WatchedObject {
    uid: Option<String>,
    /// Sequence number of the first delivery for this object.
    first_sequence: u64,
    /// Generation at which the first status of this process was accepted. Before that, the status may be
    /// from another process, so no queue pairs are reserved, nor by an earlier spec.
    accepted_at: Option<i64>,
}

/// The result of a status write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteOutcome {
    Accepted,
    Rejected,
    /// The write may succeed later.
    Retry,
}

/// Whether the API server responds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ServerState {
    Unknown,
    Reachable,
    Unreachable,
}

impl NodeWatch {
    /// Prepares the loop and delivers the persisted spec. `deliver` must not block.
    ///
    /// # Errors
    /// The configuration for the API server is invalid; retrying does not help.
    pub async fn new(
        settings: NodeSettings,
        deliver: impl FnMut(Desired) + Send + 'static,
    ) -> Result<NodeWatch, ConnectError> {
        let client: Client = settings.access.client().await?;
        let resource = ApiResource::erase::<CacheNode>(&());
        let identity =
            Identity { version: settings.version.clone(), pod: settings.pod.clone(), started_at: now() };
        let mut this = NodeWatch {
            api: Api::all_with(client, &resource),
            pacer: WritePacer::new(settings.status_every),
            identity,
            settings,
            deliver: Box::new(deliver),
            delivered: None,
            deliveries: 0,
            last: None,
            object: None,
            written: None,
            initial_conditions: Vec::new(),
            server: ServerState::Unknown,
            last_rejection: None,
            conflict: StatusConflict::default(),
            other_owner: None,
        };
        this.deliver_persisted();
        Ok(this)
    }

    /// Runs until the agent stops, then writes the final status.
    pub async fn run(mut self, mut facts: watch::Receiver<Option<Facts>>, mut stop: oneshot::Receiver<()>) {
        let only_this = watcher::Config::default().fields(&format!("metadata.name={}", self.settings.node));
        let events = watcher(self.api.clone(), only_this).default_backoff();
        let mut events = std::pin::pin!(events);
        let mut is_listed = false;
        let mut facts_end = false;
        loop {
            let next = self.next_write(facts.borrow().as_ref());
            tokio::select! {
                // Polled in order: the stop request has priority over a continuous stream of events.
                biased;
                // A dropped sender also means that the agent has ended.
                _ = &mut stop => {
                    let last = facts.borrow().clone().filter(|last| self.is_of_object(last));
                    if let Some(last) = last {
                        self.write_final_status(&Facts { phase: Phase::Stopping, ..last }).await;
                    }
                    return;
                }
                event = events.next() => match event {
                    Some(Ok(watcher::Event::Init)) => is_listed = false,
                    Some(Ok(watcher::Event::InitApply(object) | watcher::Event::Apply(object))) => {
                        is_listed = true;
                        self.on_object(&object);
                    }
                    Some(Ok(watcher::Event::InitDone)) => {
                        self.on_reachable();
                        if !is_listed {
                            tracing::info!(node = self.settings.node, "no CacheNode exists for this node; keeping the current state");
                            self.on_deleted();
                        }
                    }
                    Some(Ok(watcher::Event::Delete(_))) => {
                        tracing::warn!(node = self.settings.node, "the CacheNode of this node was deleted; keeping the current state");
                        self.on_deleted();
                    }
                    Some(Err(error)) => self.on_unreachable(&error),
                    None => unreachable!("the watch restarts forever"),
                },
                changed = facts.changed(), if !facts_end => facts_end = changed.is_err(),
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {
                    let current = facts.borrow().clone();
                    if let Some(current) = current {
                        self.write(&current, WRITE_TIMEOUT).await;
                    }
                }
            }
        }
    }

    /// Returns when to write the status; `None` without an object, or without facts for it.
    fn next_write(&self, facts: Option<&Facts>) -> Option<Instant> {
        let facts = facts.filter(|facts| self.is_of_object(facts))?;
        let change = match &self.written {
            Some(written) => {
                let conflict = self.conflict.condition(Instant::now());
                let next = status(&self.identity, facts, conflict, &written.conditions, &now());
                let next = CacheNodeStatus { last_updated: written.last_updated.clone(), ..next };
                match next == *written {
                    true => StatusChange::None,
                    false if without_amounts(&next) == without_amounts(written) => StatusChange::Amounts,
                    false => StatusChange::State,
                }
            }
            None => StatusChange::State,
        };
        Some(self.pacer.due(change, Instant::now()))
    }

    /// Returns whether the facts were collected for the current object.
    fn is_of_object(&self, facts: &Facts) -> bool {
        self.delivered.is_some()
            && self.object.as_ref().is_some_and(|object| facts.sequence >= object.first_sequence)
    }

    fn deliver(&mut self, desired: Desired) {
        self.deliveries += 1;
        let mut desired = Desired { sequence: self.deliveries, ..desired };
        (self.deliver)(desired.clone());
        if desired.queues.is_none() {
            // The previous grants stay in effect.
            desired.queues = self.last.take().and_then(|last| last.queues);
        }
        self.last = Some(desired);
    }

    fn deliver_persisted(&mut self) {
        match self.settings.state.load() {
            Ok(Some(persisted)) if self.other_cluster(&persisted.spec).is_none() => {
                tracing::info!(generation = persisted.generation, "starting from the persisted spec");
                self.delivered = Some((persisted.generation, None));
                self.deliver(Desired::read(persisted.generation, &persisted.spec).without_destruction());
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(error, "cannot use the persisted spec; waiting for the API server"),
        }
    }

    /// Handles the current version of the object.
    fn on_object(&mut self, object: &DynamicObject) {
        self.on_reachable();
        let other_owner = self.other_cluster(&object.data["spec"]);
        if other_owner != self.other_owner {
            if let (Some(other_owner), Some(own)) = (&other_owner, &self.settings.cluster) {
                tracing::warn!(
                    node = self.settings.node,
                    "KVCacheCluster {other_owner} owns this node, but the agent belongs to {own}: ignoring its CacheNode and keeping the current state. Set \
                     agents.nodeSelector of both clusters so that they do not overlap"
                );
            }
            self.other_owner = other_owner;
            if self.other_owner.is_some() {
                self.on_other_cluster();
            }
        }
        if self.other_owner.is_some() {
            return;
        }
        let uid = object.uid();
        if self.object.as_ref().is_none_or(|followed| followed.uid != uid) {
            self.object = Some(WatchedObject { uid, first_sequence: self.deliveries + 1, accepted_at: None });
            (self.delivered, self.written) = (None, None);
            self.initial_conditions.clear();
        }
        if self.initial_conditions.is_empty() {
            let conditions = object.data["status"]["conditions"].clone();
            self.initial_conditions = serde_json::from_value(conditions).unwrap_or_default();
        }
        let spec = &object.data["spec"];
        let generation = object.meta().generation.unwrap_or(0);
        if self
            .delivered
            .as_ref()
            .is_some_and(|(delivered, known)| *delivered == generation && known.as_ref() == Some(spec))
        {
            return;
        }
        tracing::info!(generation, "the spec of this node's CacheNode has changed");
        self.delivered = Some((generation, Some(spec.clone())));
        if let Err(error) = self.settings.state.save(generation, spec) {
            tracing::warn!(%error, "cannot persist the spec on this node: the agent could not restart without the API server");
        }
        self.deliver_spec();
    }

    /// Delivers the current spec.
    fn deliver_spec(&mut self) {
        let Some((generation, Some(spec))) = &self.delivered else { return };
        let mut desired = Desired::read(*generation, spec);
        let accepted_at = self.object.as_ref().and_then(|object| object.accepted_at);
        if accepted_at.is_none_or(|at| *generation < at) {
            desired.queues = None;
        }
        self.deliver(desired);
    }

    /// Releases reservations for GPUs; everything else stays as delivered.
    fn release_queues(&mut self) {
        let keeps = |last: &&Desired| last.queues.as_ref().is_some_and(|queues| !queues.is_empty());
        if let Some(last) = self.last.as_ref().filter(keeps) {
            let last = Desired { queues: Some(Vec::new()), ..last.clone() };
            self.deliver(last);
        }
    }

    /// Handles an object of another cluster: it is neither followed nor written, and reservations for GPUs
    /// are released. A persisted spec of the other cluster's agent in the same directory is not removed.
    fn on_other_cluster(&mut self) {
        self.release_queues();
        (self.delivered, self.written, self.object) = (None, None, None);
        self.initial_conditions.clear();
        if let Ok(Some(persisted)) = self.settings.state.load()
            && self.other_cluster(&persisted.spec).is_none()
        {
            self.remove_persisted();
        }
    }

    /// Returns the cluster of a spec, if it is not the agent's.
    fn other_cluster(&self, spec: &Value) -> Option<String> {
        let own = self.settings.cluster.as_ref()?;
        let named = &spec["clusterRef"];
        let named = format!("{}/{}", named["namespace"].as_str()?, named["name"].as_str()?);
        (named != *own).then_some(named)
    }

    /// Handles the absence of the object: the status is not written, and the persisted spec is removed. A
    /// re-created object is always delivered.
    fn on_deleted(&mut self) {
        (self.delivered, self.written, self.object) = (None, None, None);
        self.initial_conditions.clear();
        self.remove_persisted();
    }

    fn remove_persisted(&self) {
        if let Err(error) = self.settings.state.remove() {
            tracing::warn!(%error, "cannot remove the persisted spec of this node: a restarted agent would apply it");
        }
    }

    fn on_reachable(&mut self) {
        if self.server == ServerState::Unreachable {
            tracing::info!(condition = "api_server_answers", "the API server is reachable again");
        }
        self.server = ServerState::Reachable;
    }

    fn on_unreachable(&mut self, error: &watcher::Error) {
        if std::mem::replace(&mut self.server, ServerState::Unreachable) != ServerState::Unreachable {
            let error: &dyn std::error::Error = error;
            tracing::warn!(
                error = chain(error),
                "cannot watch the CacheNode of this node; keeping the current state"
            );
        }
    }

    /// Writes the final status. The operator waits for it, so transient errors are retried within the time
    /// limit.
    async fn write_final_status(&mut self, last: &Facts) {
        let until = Instant::now() + LAST_WRITE_TIMEOUT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if self.write(last, left).await != WriteOutcome::Retry || left <= LAST_WRITE_AGAIN {
                return;
            }
            sleep(LAST_WRITE_AGAIN).await;
        }
    }

    /// Writes a status. After a failure, the next attempt follows when the next write is due.
    async fn write(&mut self, facts: &Facts, patience: Duration) -> WriteOutcome {
        self.pacer.attempted(Instant::now());
        let now = now();
        let previous = self.written.as_ref().map_or(&self.initial_conditions, |written| &written.conditions);
        let conflict = self.conflict.condition(Instant::now());
        let mut next = status(&self.identity, facts, conflict, previous, &now);
        next.last_updated = Some(now);
        let resource = ApiResource::erase::<CacheNode>(&());
        let object = json!({
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": { "name": self.settings.node },
            "status": next,
        });
        match timeout(patience, status_conflict::apply(&self.api, &self.settings.node, &object)).await {
            Ok(Ok((stored, conflict))) => {
                tracing::debug!(version = stored.resource_version(), "status written");
                if let Some(words) = conflict {
                    self.conflict.record(words, Instant::now());
                }
                if self.last_rejection.take().is_some() {
                    tracing::info!("the API server accepts the status of this node again");
                }
                // If the object was re-created meanwhile, the watch reports it.
                if self.is_current(&stored) {
                    self.written = Some(next);
                    self.confirm_object(stored.metadata.generation.unwrap_or_default());
                }
                return WriteOutcome::Accepted;
            }
            Ok(Err(kube::Error::Api(answer))) if answer.code == NOT_FOUND => return WriteOutcome::Rejected,
            Ok(Err(kube::Error::Api(answer))) if REFUSALS.contains(&answer.code) => {
                self.log_rejection(&answer.message);
                return WriteOutcome::Rejected;
            }
            // The watch reports whether the server is reachable.
            Ok(Err(error)) => tracing::debug!(%error, "cannot write the status"),
            Err(_) => tracing::debug!("timed out writing the status"),
        }
        WriteOutcome::Retry
    }

    fn is_current(&self, stored: &DynamicObject) -> bool {
        self.object.as_ref().is_some_and(|object| object.uid == stored.uid())
    }

    /// Records that a status of this process was accepted. From now on queue pairs are reserved, by this
    /// generation of the spec or a later one.
    fn confirm_object(&mut self, generation: i64) {
        let Some(object) = self.object.as_mut().filter(|object| object.accepted_at.is_none()) else { return };
        object.accepted_at = Some(generation);
        self.deliver_spec();
    }

    /// Logs a rejected write, once per message.
    fn log_rejection(&mut self, message: &str) {
        if self.last_rejection.as_deref() != Some(message) {
            tracing::warn!(
                node = self.settings.node,
                message,
                "the API server rejects the status of this node. Check the agent's service account, and that its pod runs on the node in NODE_NAME"
            );
            self.last_rejection = Some(message.to_owned());
        }
    }
}

/// Returns the wall-clock time, which the operator compares with its own.
fn now() -> Time {
    // Kubernetes timestamps have whole seconds.
    let seconds = Timestamp::now().as_second();
    Time(Timestamp::from_second(seconds).expect("the current time is a valid timestamp"))
}

fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text.push_str(": ");
        text.push_str(&error.to_string());
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests;
