//! The loop: one thing at a time happens (the object changed, there are new facts, a write is due, the agent leaves), and is acted on.

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
use crate::contested::{self, Contested};
use crate::desired::Desired;
use crate::facts::{Facts, Phase};
use crate::kept::StateDirectory;
use crate::pace::{News, Pace};
use crate::status::{Identity, status, without_amounts};

/// One write; a server that takes longer is away.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// What a leaving agent gives its last status.
const LAST_WRITE_TIMEOUT: Duration = Duration::from_secs(5);

/// Between two tries of it.
const LAST_WRITE_AGAIN: Duration = Duration::from_millis(250);

/// Answers that say that the status or its writer is wrong, as waiting does not change: a bad request, no identity, no right, no valid
/// object. Others are of a server that is not ready, is busy, or has no object yet.
const REFUSALS: [u16; 4] = [400, 401, 403, 422];

/// HTTP's code for what is not there.
const NOT_FOUND: u16 = 404;

/// What the loop needs to know.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// The node.
    pub node: String,
    /// The agent's version.
    pub version: String,
    /// The agent's pod, where it is known.
    pub pod: Option<String>,
    /// `namespace/name` of the cluster whose agent it is, where it is known: an object of another one is not followed.
    pub cluster: Option<String>,
    /// How the API server is reached.
    pub access: Access,
    /// Where the last spec is kept.
    pub state: StateDirectory,
    /// Statuses that have changed are written so far apart over time: amounts at the least, and what others act on at once while there was little.
    pub status_every: Duration,
}

/// The loop over one node's object.
pub struct NodeWatch {
    settings: NodeSettings,
    identity: Identity,
    api: Api<DynamicObject>,
    pace: Pace,
    /// What the agent is told.
    tell: Box<dyn FnMut(Desired) + Send>,
    /// Generation and spec that it was told last; no spec of the server's, if it is the kept one.
    told: Option<(i64, Option<Value>)>,
    /// How often it was told something.
    tellings: u64,
    /// What it was told last.
    last: Option<Desired>,
    /// The object that is followed.
    object: Option<Followed>,
    /// The status that was written last.
    written: Option<CacheNodeStatus>,
    /// Conditions of the object when it was read, for their times.
    found: Vec<Condition>,
    server: Server,
    /// Why a write was refused, as it was logged.
    refused: Option<String>,
    /// Who else writes the status.
    contested: Contested,
    /// The other cluster that has the node.
    other: Option<String>,
}

/// The object that is followed.
#[derive(Clone, Debug)]
struct Followed {
    uid: Option<String>,
    /// The first telling that is of it.
    since: u64,
    /// Its generation when a status of this process was taken into it first. Before that what it says may be another process's, so nothing is kept for
    /// GPUs, nor by a spec of before.
    known_at: Option<i64>,
}

/// What became of a status that was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Taken,
    Refused,
    /// It may be taken another time.
    Later,
}

/// What is thought of the API server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Server {
    Unknown,
    Answers,
    Away,
}

impl NodeWatch {
    /// Prepares the loop, and tells the agent what was kept on disk. `tell` must not block.
    ///
    /// # Errors
    /// There is no way to the API server, which waiting does not change.
    pub async fn new(
        settings: NodeSettings,
        tell: impl FnMut(Desired) + Send + 'static,
    ) -> Result<NodeWatch, ConnectError> {
        let client: Client = settings.access.client().await?;
        let resource = ApiResource::erase::<CacheNode>(&());
        let identity =
            Identity { version: settings.version.clone(), pod: settings.pod.clone(), started_at: now() };
        let mut this = NodeWatch {
            api: Api::all_with(client, &resource),
            pace: Pace::new(settings.status_every),
            identity,
            settings,
            tell: Box::new(tell),
            told: None,
            tellings: 0,
            last: None,
            object: None,
            written: None,
            found: Vec::new(),
            server: Server::Unknown,
            refused: None,
            contested: Contested::default(),
            other: None,
        };
        this.tell_kept();
        Ok(this)
    }

    /// Runs until the agent leaves, and writes the last status then.
    pub async fn run(mut self, mut facts: watch::Receiver<Option<Facts>>, mut leave: oneshot::Receiver<()>) {
        let only_this = watcher::Config::default().fields(&format!("metadata.name={}", self.settings.node));
        let events = watcher(self.api.clone(), only_this).default_backoff();
        let mut events = std::pin::pin!(events);
        let mut is_listed = false;
        let mut facts_end = false;
        loop {
            let next = self.next_write(facts.borrow().as_ref());
            tokio::select! {
                biased;
                // Without a word the agent has ended as well.
                _ = &mut leave => {
                    let last = facts.borrow().clone().filter(|last| self.is_of_object(last));
                    if let Some(last) = last {
                        self.say_last(&Facts { phase: Phase::Leaving, ..last }).await;
                    }
                    return;
                }
                event = events.next() => match event {
                    Some(Ok(watcher::Event::Init)) => is_listed = false,
                    Some(Ok(watcher::Event::InitApply(object) | watcher::Event::Apply(object))) => {
                        is_listed = true;
                        self.seen(&object);
                    }
                    Some(Ok(watcher::Event::InitDone)) => {
                        self.answers();
                        if !is_listed {
                            tracing::info!(node = self.settings.node, "there is no CacheNode of this node; the node goes on as it is");
                            self.gone();
                        }
                    }
                    Some(Ok(watcher::Event::Delete(_))) => {
                        tracing::warn!(node = self.settings.node, "this node's CacheNode was deleted; the node goes on as it is");
                        self.gone();
                    }
                    Some(Err(error)) => self.away(&error),
                    None => unreachable!("a watch is begun again for ever"),
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

    /// When the status is to be written; never before there is an object and something to say of it.
    fn next_write(&self, facts: Option<&Facts>) -> Option<Instant> {
        let facts = facts.filter(|facts| self.is_of_object(facts))?;
        let news = match &self.written {
            Some(written) => {
                let contested = self.contested.finding(Instant::now());
                let next = status(&self.identity, facts, contested, &written.conditions, &now());
                let next = CacheNodeStatus { last_updated: written.last_updated.clone(), ..next };
                match next == *written {
                    true => News::None,
                    false if without_amounts(&next) == without_amounts(written) => News::Amounts,
                    false => News::State,
                }
            }
            None => News::State,
        };
        Some(self.pace.due(news, Instant::now()))
    }

    /// Whether facts were found for the object that is followed.
    fn is_of_object(&self, facts: &Facts) -> bool {
        self.told.is_some() && self.object.as_ref().is_some_and(|object| facts.told >= object.since)
    }

    fn tell(&mut self, desired: Desired) {
        self.tellings += 1;
        let mut desired = Desired { told: self.tellings, ..desired };
        (self.tell)(desired.clone());
        if desired.queues.is_none() {
            // As before.
            desired.queues = self.last.take().and_then(|last| last.queues);
        }
        self.last = Some(desired);
    }

    fn tell_kept(&mut self) {
        match self.settings.state.load() {
            Ok(Some(kept)) if self.other_cluster(&kept.spec).is_none() => {
                tracing::info!(
                    generation = kept.generation,
                    "starting from the spec that was kept on this node"
                );
                self.told = Some((kept.generation, None));
                self.tell(Desired::read(kept.generation, &kept.spec).without_destruction());
            }
            Ok(_) => {}
            Err(error) => tracing::warn!(error, "the kept spec cannot be used; waiting for the API server's"),
        }
    }

    /// The object, as it is now.
    fn seen(&mut self, object: &DynamicObject) {
        self.answers();
        let other = self.other_cluster(&object.data["spec"]);
        if other != self.other {
            if let (Some(other), Some(own)) = (&other, &self.settings.cluster) {
                tracing::warn!(
                    node = self.settings.node,
                    "KVCacheCluster {other} has this node, and this is the agent of {own}: it goes on as it is and follows nothing. Set \
                     agents.nodeSelector of both so that no node is selected by both"
                );
            }
            self.other = other;
            if self.other.is_some() {
                self.taken();
            }
        }
        if self.other.is_some() {
            return;
        }
        let uid = object.uid();
        if self.object.as_ref().is_none_or(|followed| followed.uid != uid) {
            self.object = Some(Followed { uid, since: self.tellings + 1, known_at: None });
            (self.told, self.written) = (None, None);
            self.found.clear();
        }
        if self.found.is_empty() {
            let conditions = object.data["status"]["conditions"].clone();
            self.found = serde_json::from_value(conditions).unwrap_or_default();
        }
        let spec = &object.data["spec"];
        let generation = object.meta().generation.unwrap_or(0);
        if self.told.as_ref().is_some_and(|(told, known)| *told == generation && known.as_ref() == Some(spec))
        {
            return;
        }
        tracing::info!(generation, "the spec of this node's CacheNode is new");
        self.told = Some((generation, Some(spec.clone())));
        if let Err(error) = self.settings.state.save(generation, spec) {
            tracing::warn!(%error, "the spec cannot be kept on this node: without the API server the agent could not start again");
        }
        self.tell_spec();
    }

    /// Tells the spec that is followed.
    fn tell_spec(&mut self) {
        let Some((generation, Some(spec))) = &self.told else { return };
        let mut desired = Desired::read(*generation, spec);
        let known_at = self.object.as_ref().and_then(|object| object.known_at);
        if known_at.is_none_or(|at| *generation < at) {
            desired.queues = None;
        }
        self.tell(desired);
    }

    /// What is kept for GPUs is let go of; all else stays as it was told.
    fn let_go_of_queues(&mut self) {
        let keeps = |last: &&Desired| last.queues.as_ref().is_some_and(|queues| !queues.is_empty());
        if let Some(last) = self.last.as_ref().filter(keeps) {
            let last = Desired { queues: Some(Vec::new()), ..last.clone() };
            self.tell(last);
        }
    }

    /// The node is another cluster's: nothing is followed or said of it, and nothing kept for its GPUs. What its agent has kept in the same directory is not ours to forget.
    fn taken(&mut self) {
        self.let_go_of_queues();
        (self.told, self.written, self.object) = (None, None, None);
        self.found.clear();
        if let Ok(Some(kept)) = self.settings.state.load()
            && self.other_cluster(&kept.spec).is_none()
        {
            self.forget();
        }
    }

    /// The cluster that a spec is of, if that is not the agent's.
    fn other_cluster(&self, spec: &Value) -> Option<String> {
        let own = self.settings.cluster.as_ref()?;
        let named = &spec["clusterRef"];
        let named = format!("{}/{}", named["namespace"].as_str()?, named["name"].as_str()?);
        (named != *own).then_some(named)
    }

    /// There is no object of ours: no status to write, and nothing to start from another time. One that is made anew is told in any case.
    fn gone(&mut self) {
        (self.told, self.written, self.object) = (None, None, None);
        self.found.clear();
        self.forget();
    }

    fn forget(&self) {
        if let Err(error) = self.settings.state.forget() {
            tracing::warn!(%error, "the kept spec of this node cannot be removed: the agent would start from it");
        }
    }

    fn answers(&mut self) {
        if self.server == Server::Away {
            tracing::info!(condition = "api_server_answers", "the API server answers again");
        }
        self.server = Server::Answers;
    }

    fn away(&mut self, error: &watcher::Error) {
        if std::mem::replace(&mut self.server, Server::Away) != Server::Away {
            let error: &dyn std::error::Error = error;
            tracing::warn!(
                error = chain(error),
                "this node's CacheNode cannot be watched; the node goes on as it is"
            );
        }
    }

    /// Writes the last status; others wait for what it says, so it is tried until there is no more time.
    async fn say_last(&mut self, last: &Facts) {
        let until = Instant::now() + LAST_WRITE_TIMEOUT;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if self.write(last, left).await != Answer::Later || left <= LAST_WRITE_AGAIN {
                return;
            }
            sleep(LAST_WRITE_AGAIN).await;
        }
    }

    /// Writes a status; one that is not taken is tried again when the next is due.
    async fn write(&mut self, facts: &Facts, patience: Duration) -> Answer {
        self.pace.tried(Instant::now());
        let now = now();
        let known = self.written.as_ref().map_or(&self.found, |written| &written.conditions);
        let contested = self.contested.finding(Instant::now());
        let mut next = status(&self.identity, facts, contested, known, &now);
        next.last_updated = Some(now);
        let resource = ApiResource::erase::<CacheNode>(&());
        let object = json!({
            "apiVersion": resource.api_version,
            "kind": resource.kind,
            "metadata": { "name": self.settings.node },
            "status": next,
        });
        match timeout(patience, contested::apply(&self.api, &self.settings.node, &object)).await {
            Ok(Ok((stored, taken))) => {
                tracing::debug!(version = stored.resource_version(), "status written");
                if let Some(words) = taken {
                    self.contested.by(words, Instant::now());
                }
                if self.refused.take().is_some() {
                    tracing::info!("the status of this node is taken again");
                }
                // Made anew meanwhile, which the watch tells.
                if self.is_followed(&stored) {
                    self.written = Some(next);
                    self.known(stored.metadata.generation.unwrap_or_default());
                }
                return Answer::Taken;
            }
            Ok(Err(kube::Error::Api(answer))) if answer.code == NOT_FOUND => return Answer::Refused,
            Ok(Err(kube::Error::Api(answer))) if REFUSALS.contains(&answer.code) => {
                self.refused(&answer.message);
                return Answer::Refused;
            }
            // The watch says whether the server is away.
            Ok(Err(error)) => tracing::debug!(%error, "the status cannot be written"),
            Err(_) => tracing::debug!("the status was not taken in time"),
        }
        Answer::Later
    }

    fn is_followed(&self, stored: &DynamicObject) -> bool {
        self.object.as_ref().is_some_and(|object| object.uid == stored.uid())
    }

    /// A status of this process was taken: from now on queue pairs are kept, by the spec that is beside it, or a later one.
    fn known(&mut self, generation: i64) {
        let Some(object) = self.object.as_mut().filter(|object| object.known_at.is_none()) else { return };
        object.known_at = Some(generation);
        self.tell_spec();
    }

    /// Says once what the server does not like.
    fn refused(&mut self, message: &str) {
        if self.refused.as_deref() != Some(message) {
            tracing::warn!(
                node = self.settings.node,
                message,
                "the API server refuses the status of this node; the agent goes on. Look at its service account, and whether its pod runs on the node of NODE_NAME"
            );
            self.refused = Some(message.to_owned());
        }
    }
}

/// The time of day, for people and for the operator, which compares it with its own.
fn now() -> Time {
    // Kubernetes keeps whole seconds.
    let seconds = Timestamp::now().as_second();
    Time(Timestamp::from_second(seconds).expect("the time of day is a time"))
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
