//! The agent's client of the control plane: registration, heartbeats, announcements, lookups, the node list.
//!
//! Nothing of local work waits for the control plane: every method returns at once, answers arrive as
//! [`DirectoryEvent`]s through the sink. Two threads do the work, each with a runtime and connections of its own:
//!
//! ```text
//!  agent core ── announce, inventory, lookup ──►  queues  ──►  link thread ──── gRPC ───┐
//!       ▲                                                        │    ▲                 ├─ members of the
//!       └────────────── sink(DirectoryEvent) ────────────────────┘    │ beats           │  control plane
//!                                                                heartbeat thread ──────┘
//! ```
//!
//! * The members of the control plane share the directory by hash slots. One of them tells which there are (`members.rs`);
//!   each has a link of its own (`link.rs`): a registration, heartbeats, and a queue of the changes in its slots. A
//!   lookup goes to the owners of its keys (`asking.rs`), and so does a question where replicas go (`placing.rs`).
//! * The heartbeat thread does nothing but beat and never calls the sink, so neither a long update nor a sink that
//!   blocks can cost this node its life in the cluster. All events come from the link thread, in order.
//! * The order of announcements to a member is kept. Each batch carries its sequence number, so that a batch sent again
//!   after a lost answer is not applied twice; what cannot be sent in order any more (queue full, gap, new registration)
//!   is dropped whole and replaced by an inventory ([`DirectoryEvent::InventoryWanted`]), never lost silently.
//! * Between `InventoryWanted` and the next [`DirectoryClient::inventory`] changes in its slots are not queued: the
//!   inventory is taken later and contains them.
//! * Without a control plane ([`DirectorySettings::endpoints`] empty) lookups fail at once and announcements vanish.
//!
//! Deliberately absent: the choice among replicas (the core's), retries of lookups (a failed one is a miss), TLS.

mod asking;
mod heartbeat;
mod link;
mod lookups;
mod members;
mod nodes;
mod placing;
mod reporting;
#[cfg(test)]
mod tests;
mod wire;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use reprise_agent_core::effect::{LookupId, PlaceId, ReplicaChange};
use reprise_agent_core::event::{Grant, Move, Placement, Replica};
use reprise_policy::tenant::TenantRegistry;
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tier};
use reprise_proto::controlplane::NodeMode;
use tokio::sync::{Notify, mpsc, watch};
use tonic::transport::Endpoint;

use link::Link;
use lookups::{Lookup, LookupQueue};
use members::{Links, Routes};
use nodes::NodeMap;
pub(crate) use nodes::PeerNode;
pub(crate) use placing::PlaceQuestion;
pub(crate) use reporting::OwnState;
use reporting::Reporting;

/// Announcements waiting for one member, in changes. 2^20 × 18 bytes = 18 MiB: a minute of a busy node
/// (64 write-backs of 64 MiB a second in 2 MiB blocks are 4,096 changes a second, with evictions twice that).
pub(crate) const CHANGES_QUEUED_MAX: usize = 1 << 20;
/// Time that [`DirectoryClient::shutdown`] gives the threads to end.
const SHUTDOWN_WAIT: Duration = Duration::from_secs(1);

/// What the client needs to know.
#[derive(Clone, Debug)]
pub(crate) struct DirectorySettings {
    /// Members of the control plane to begin with, `http://host:port` each; none: stand-alone.
    pub(crate) endpoints: Vec<String>,
    /// What this node says about itself.
    pub(crate) registration: Registration,
    /// Time for one attempt to connect.
    pub(crate) connect_timeout: Duration,
    /// Time for one registration, announcement batch or node list.
    pub(crate) call_timeout: Duration,
    /// Bound of a member's announcement queue, in changes; [`CHANGES_QUEUED_MAX`] unless tested.
    pub(crate) changes_queued_max: usize,
    /// Bound of the lookups queued or under way, more fail at once; the core's `LOOKUPS_MAX` unless tested.
    pub(crate) lookups_max: usize,
    /// Names and numbers of tenants.
    pub(crate) tenants: Arc<Mutex<TenantRegistry>>,
}

/// What a node says about itself when it registers. Nothing in it changes while the agent runs: what does is in its reports.
#[derive(Clone, Debug, Default)]
pub(crate) struct Registration {
    /// Unique in the cluster; the node's number follows it.
    pub(crate) name: String,
    /// `host:port` of this agent's peer transport, as others reach it.
    pub(crate) peer_address: String,
    /// `host:port` of this agent's admin endpoint.
    pub(crate) admin_address: String,
    /// Nodes of one domain fail together (rack, zone).
    pub(crate) failure_domain: String,
    /// Version of this agent.
    pub(crate) version: String,
}

/// What the client tells the agent, in order, from one thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DirectoryEvent {
    /// A member of the control plane knows this node by this number, until the next such event of that member.
    Registered { member: String, node: NodeId, epoch: Epoch },
    /// A member knows nothing of this node in these slots: call [`DirectoryClient::inventory`] with them.
    InventoryWanted { slots: Box<SlotSet> },
    /// Replicas of each key of the lookup, in the order of its keys. Never this node's own. Of keys whose owner did not
    /// answer in time there are none.
    Found { lookup: LookupId, found: Vec<Vec<Replica>> },
    /// The lookup got no answer in its time, or cannot be sent.
    LookupFailed { lookup: LookupId },
    /// Where further replicas of each key of the question go, in the order of its keys.
    Placed { place: PlaceId, answers: Vec<Placement> },
    /// Nobody has answered the question in its time.
    PlaceFailed { place: PlaceId },
    /// What a tenant may hold on this node from now on.
    Budget(Grant),
    /// The mode that this node is to be in; each has a higher number than any before.
    Mode { mode: NodeMode, number: u64 },
    /// So many bytes of blocks are to go to another node; `None`: nothing any more.
    Move(Option<Move>),
    /// The control plane answers: at least one of its members.
    Connected,
    /// The control plane is gone or has forgotten this node; the client keeps trying.
    Disconnected,
}

/// Receives the client's events, on the client's link thread. It may block; heartbeats go on meanwhile.
pub(crate) type DirectorySink = Arc<dyn Fn(DirectoryEvent) + Send + Sync>;

/// How the client is doing; counters are totals since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DirectoryStatus {
    /// No control plane is configured.
    pub(crate) stand_alone: bool,
    /// A member of the control plane answers and knows this node.
    pub(crate) connected: bool,
    /// Members of the control plane, and those of them that answer and know this node.
    pub(crate) members: u64,
    pub(crate) members_connected: u64,
    /// Of the map of slots; 0 before the first.
    pub(crate) map_epoch: u64,
    /// This node's number and newest registration.
    pub(crate) registered: Option<(NodeId, Epoch)>,
    /// Changes (or inventory entries) waiting to be sent.
    pub(crate) changes_queued: u64,
    /// Changes the directory has applied.
    pub(crate) changes_announced: u64,
    /// Changes not queued, or dropped from the queue, because an inventory replaces them.
    pub(crate) changes_superseded: u64,
    /// Inventories asked for.
    pub(crate) inventories_wanted: u64,
    /// Registrations made.
    pub(crate) registrations: u64,
    /// Lookups answered.
    pub(crate) lookups_answered: u64,
    /// Lookups failed.
    pub(crate) lookups_failed: u64,
    /// Keys that a member did not own any more, and that were asked for again or given up.
    pub(crate) lookup_keys_redirected: u64,
    /// Keys that nobody answered in time.
    pub(crate) lookup_keys_unanswered: u64,
    /// Keys answered by a member that does not know every node's inventory of their slot yet.
    pub(crate) lookup_keys_partial: u64,
    /// Heartbeats without an answer.
    pub(crate) beats_failed: u64,
}

/// Why the client could not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DirectoryError {
    /// The endpoint is not an address.
    #[error(
        "control plane address '{endpoint}' is not of the form http://host:port: correct controlplane.address"
    )]
    Endpoint { endpoint: String, source: tonic::transport::Error },
    /// The system gave no thread or no runtime.
    #[error("cannot start the {what} of the control plane client")]
    Start { what: &'static str, source: std::io::Error },
}

/// The client; see the module.
pub(crate) struct DirectoryClient {
    shared: Arc<Shared>,
    places: mpsc::Sender<PlaceQuestion>,
    /// Every thread holds the sending half and drops it as it ends.
    ended: Mutex<Receiver<()>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// What methods, link thread and heartbeat thread share. No lock is held across a call of the sink or an await.
struct Shared {
    settings: DirectorySettings,
    sink: DirectorySink,
    /// To all members, also to those that left the map a moment ago.
    links: watch::Sender<Links>,
    /// The map; `None` before the first.
    routes: watch::Sender<Option<Arc<Routes>>>,
    lookups: Mutex<LookupQueue>,
    lookups_changed: Notify,
    /// What to report; `None` before the core has said.
    own: watch::Sender<Option<Arc<OwnState>>>,
    reporting: Reporting,
    nodes: RwLock<NodeMap>,
    connected: watch::Sender<bool>,
    shutdown: watch::Sender<bool>,
    counters: Counters,
}

#[derive(Default)]
struct Counters {
    changes_announced: AtomicU64,
    inventories_wanted: AtomicU64,
    registrations: AtomicU64,
    lookups_answered: AtomicU64,
    lookups_failed: AtomicU64,
    lookup_keys_redirected: AtomicU64,
    lookup_keys_unanswered: AtomicU64,
    lookup_keys_partial: AtomicU64,
    beats_failed: AtomicU64,
}

impl DirectoryClient {
    /// Starts the client's threads. Errors are of the configuration or of this machine; an absent control plane is none.
    pub(crate) fn start(
        settings: DirectorySettings,
        sink: DirectorySink,
    ) -> Result<DirectoryClient, DirectoryError> {
        for endpoint in &settings.endpoints {
            parse_endpoint(endpoint, &settings)?;
        }
        let stand_alone = settings.endpoints.is_empty();
        let shared = Arc::new(Shared::new(settings, sink));
        let (alive, ended) = sync_channel(0);
        let (places, asked) = mpsc::channel(placing::PLACES_QUEUED_MAX);
        let mut threads = Vec::with_capacity(2);
        if !stand_alone {
            let (shared, alive) = (shared.clone(), alive.clone());
            threads.push(spawn("heartbeat", alive, move |runtime| heartbeat::run(&runtime, &shared))?);
        }
        let link = shared.clone();
        threads.push(spawn("directory", alive, move |runtime| members::run(&runtime, &link, asked))?);
        Ok(DirectoryClient { shared, places, ended: Mutex::new(ended), threads: Mutex::new(threads) })
    }

    /// Tells the directory what changed here, in order. See the module for when changes are superseded.
    pub(crate) fn announce(&self, changes: &[ReplicaChange]) {
        self.shared.links().for_each(|link| link.tell(|outbox| outbox.announce(changes)));
    }

    /// Tells the directory all that is here in some slots, replacing what it knows and what is still queued of them.
    pub(crate) fn inventory(&self, slots: &SlotSet, replicas: &[(BlockKey, Tier)]) {
        self.shared.links().for_each(|link| link.tell(|outbox| outbox.inventory(slots, replicas)));
    }

    /// Asks for replicas on other nodes; ends in exactly one `Found` or `LookupFailed`, unless the client is shut
    /// down before. `timeout` counts from now.
    pub(crate) fn lookup(&self, lookup: LookupId, keys: Vec<BlockKey>, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        self.shared.lookups().push(Lookup { id: lookup, keys, deadline });
        self.shared.lookups_changed.notify_one();
    }

    /// Asks where further replicas of blocks go; ends in exactly one `Placed` or `PlaceFailed`, unless the client is shut
    /// down before.
    ///
    /// # Errors
    /// The question that was not taken because too many wait: no event comes.
    pub(crate) fn place(&self, question: PlaceQuestion) -> Result<(), PlaceId> {
        let place = question.place;
        self.places.try_send(question).map_err(|_| place)
    }

    /// The node of a name, if the control plane has named it.
    pub(crate) fn node_of(&self, name: &str) -> Option<NodeId> {
        self.shared.nodes.read().unwrap_or_else(PoisonError::into_inner).node_of(name)
    }

    /// Tells the members how this node is, with their next report.
    pub(crate) fn set_own_state(&self, state: OwnState) {
        self.shared.own.send_replace(Some(Arc::new(state)));
    }

    /// Where a node's peer transport listens, `host:port`; `None` for a node the control plane has not named.
    pub(crate) fn peer_address(&self, node: NodeId) -> Option<String> {
        self.shared.nodes.read().unwrap_or_else(PoisonError::into_inner).peer_address(node)
    }

    /// All nodes the control plane has named, by number. The last known list while disconnected.
    pub(crate) fn nodes(&self) -> Vec<PeerNode> {
        self.shared.nodes.read().unwrap_or_else(PoisonError::into_inner).list()
    }

    /// How the client is doing.
    pub(crate) fn status(&self) -> DirectoryStatus {
        self.shared.status()
    }

    /// Ends the threads; lookups under way get no event any more. Waits at the most one second, for a sink that
    /// blocks. Called again it does nothing; dropping the client calls it.
    pub(crate) fn shutdown(&self) {
        self.shared.shutdown.send_replace(true);
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        if threads.is_empty() {
            return;
        }
        // Nothing is ever sent: the channel disconnects when the last thread has ended.
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(SHUTDOWN_WAIT) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("control plane client did not end in time; its threads end with the process");
            return;
        }
        for thread in threads {
            if thread.join().is_err() {
                tracing::error!("a thread of the control plane client panicked");
            }
        }
    }
}

impl Drop for DirectoryClient {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Shared {
    fn new(settings: DirectorySettings, sink: DirectorySink) -> Shared {
        Shared {
            links: watch::Sender::new(Links::default()),
            routes: watch::Sender::new(None),
            lookups: Mutex::new(LookupQueue::new(settings.lookups_max)),
            lookups_changed: Notify::new(),
            own: watch::Sender::new(None),
            reporting: Reporting::default(),
            nodes: RwLock::new(NodeMap::default()),
            connected: watch::Sender::new(false),
            shutdown: watch::Sender::new(false),
            counters: Counters::default(),
            settings,
            sink,
        }
    }

    /// The links to all members.
    fn links(&self) -> impl Iterator<Item = Arc<Link>> + use<> {
        let links = self.links.borrow().clone();
        links.into_iter()
    }

    fn lookups(&self) -> MutexGuard<'_, LookupQueue> {
        self.lookups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn emit(&self, event: DirectoryEvent) {
        (self.sink)(event);
    }

    /// A link has come up or gone down: says so when it was the first or the last.
    fn links_changed(&self) {
        let up = self.links().any(|link| link.is_up());
        if self.connected.send_if_modified(|connected| std::mem::replace(connected, up) != up) {
            self.emit(if up { DirectoryEvent::Connected } else { DirectoryEvent::Disconnected });
        }
    }

    fn status(&self) -> DirectoryStatus {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let mut status = DirectoryStatus {
            stand_alone: self.settings.endpoints.is_empty(),
            connected: *self.connected.borrow(),
            changes_announced: count(&self.counters.changes_announced),
            inventories_wanted: count(&self.counters.inventories_wanted),
            registrations: count(&self.counters.registrations),
            lookups_answered: count(&self.counters.lookups_answered),
            lookups_failed: count(&self.counters.lookups_failed),
            lookup_keys_redirected: count(&self.counters.lookup_keys_redirected),
            lookup_keys_unanswered: count(&self.counters.lookup_keys_unanswered),
            lookup_keys_partial: count(&self.counters.lookup_keys_partial),
            beats_failed: count(&self.counters.beats_failed),
            ..DirectoryStatus::default()
        };
        if let Some(routes) = &*self.routes.borrow() {
            status.members = routes.links().len() as u64;
            status.map_epoch = routes.epoch().0;
            status.members_connected = routes.links().iter().filter(|link| link.is_up()).count() as u64;
        }
        for link in self.links() {
            link.add_to(&mut status);
        }
        status.changes_superseded += self.links.borrow().superseded();
        status
    }
}

fn parse_endpoint(text: &str, settings: &DirectorySettings) -> Result<Endpoint, DirectoryError> {
    Endpoint::from_shared(text.to_owned())
        .map(|endpoint| endpoint.connect_timeout(settings.connect_timeout).tcp_nodelay(true))
        .map_err(|source| DirectoryError::Endpoint { endpoint: text.to_owned(), source })
}

/// Starts a named thread with a runtime of its own.
fn spawn(
    what: &'static str,
    alive: SyncSender<()>,
    body: impl FnOnce(tokio::runtime::Runtime) + Send + 'static,
) -> Result<JoinHandle<()>, DirectoryError> {
    let refuse = |source| DirectoryError::Start { what, source };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(refuse)?;
    std::thread::Builder::new()
        .name(format!("reprise-{what}"))
        .spawn(move || {
            body(runtime);
            drop(alive);
        })
        .map_err(refuse)
}
