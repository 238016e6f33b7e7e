//! The agent's client of the control plane: registration, heartbeats, announcements, lookups, node list.
//!
//! Local work never waits for the control plane: methods return immediately, and results arrive as
//! [`DirectoryEvent`]s through the sink. Two threads do the work, each with its own runtime and
//! connections:
//!
//! ```text
//!  agent core ── announce, inventory, lookup ──►  queues  ──►  link thread ──── gRPC ───┐
//!       ▲                                                        │    ▲                 ├─ members of the
//!       └────────────── sink(DirectoryEvent) ────────────────────┘    │ beats           │  control plane
//!                                                                heartbeat thread ──────┘
//! ```
//!
//! * The members of the control plane share the directory by hash slots. One of them provides the member
//!   list (`members.rs`). Each member has a link (`link.rs`): a registration, heartbeats, and a queue of
//!   the changes in its slots. Lookups (`lookup.rs`) and placement requests (`placement.rs`) are sent to
//!   the owners of the keys.
//! * The heartbeat thread only sends heartbeats and never calls the sink. A long update or a blocking sink
//!   therefore cannot make this node appear dead. All events come from the link thread, in order.
//! * Announcements to a member keep their order. Each batch has a sequence number, so a batch that is
//!   repeated after a lost reply is not applied twice. After a full queue, a gap or a new registration the
//!   queue is dropped and replaced by an inventory ([`DirectoryEvent::InventoryRequested`]); changes are
//!   never lost silently.
//! * Between `InventoryRequested` and the next [`DirectoryClient::inventory`], changes in the requested
//!   slots are not queued: the inventory is taken later and contains them.
//! * Without a control plane ([`DirectorySettings::endpoints`] empty), lookups fail immediately and
//!   announcements are dropped.
//!
//! Out of scope: choosing among replicas (the core does that), retrying lookups (a failed one is a miss).

mod heartbeat;
mod link;
mod lookup;
mod lookup_queue;
mod members;
mod nodes;
mod owner_query;
mod placement;
mod reporting;
mod strangers;
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
use reprise_identity::Security;
use reprise_policy::peer::PeerEndpoint;
use reprise_policy::tenant::TenantRegistry;
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, TenantName, Tick, Tier};
use reprise_proto::controlplane::NodeMode;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, watch};
use tonic::transport::Endpoint;

use link::Link;
use lookup_queue::{Lookup, LookupQueue};
use members::{Members, Routes};
use nodes::NodeMap;
pub(crate) use nodes::PeerNode;
pub(crate) use placement::PlacementRequest;
pub(crate) use reporting::OwnState;
use reporting::Reporting;
pub(crate) use strangers::StrangerRequest;

/// Maximum number of announcements queued for one member. 2^20 × 18 bytes = 18 MiB: a minute of a busy node
/// (64 write-backs of 64 MiB a second in 2 MiB blocks are 4,096 changes a second, with evictions twice
/// that).
pub(crate) const CHANGES_QUEUED_MAX: usize = 1 << 20;
/// Time limit for the threads to end in [`DirectoryClient::shutdown`].
const SHUTDOWN_WAIT: Duration = Duration::from_secs(1);

/// Settings of the client.
#[derive(Clone, Debug)]
pub(crate) struct DirectorySettings {
    /// Initial members of the control plane, `http://host:port` each; empty: stand-alone.
    pub(crate) endpoints: Vec<String>,
    /// Registration of this node.
    pub(crate) registration: Registration,
    /// Time limit of an attempt to connect.
    pub(crate) connect_timeout: Duration,
    /// Time limit of a registration, an announcement batch or a node list.
    pub(crate) call_timeout: Duration,
    /// Maximum length of a member's announcement queue, in changes; [`CHANGES_QUEUED_MAX`] except in tests.
    pub(crate) changes_queued_max: usize,
    /// Maximum number of lookups queued or in flight, beyond which they fail; the core's `LOOKUPS_MAX`
    /// except in tests.
    pub(crate) lookups_max: usize,
    /// Names and numbers of tenants.
    pub(crate) tenants: Arc<Mutex<TenantRegistry>>,
    /// Certificates of the agent.
    pub(crate) security: Security,
}

/// Properties that a node registers with. They are constant while the agent runs, except for the failure
/// domain ([`DirectoryClient::set_failure_domain`]); variable ones are in its reports.
#[derive(Clone, Debug, Default)]
pub(crate) struct Registration {
    /// Unique in the cluster; it determines the node's number.
    pub(crate) name: String,
    /// Endpoints of this agent's peer transport, one for each protocol.
    pub(crate) peer_endpoints: Vec<PeerEndpoint>,
    /// `host:port` of this agent's admin port.
    pub(crate) admin_address: String,
    /// Nodes of a failure domain (rack, zone) fail together.
    pub(crate) failure_domain: String,
    /// Version of this agent.
    pub(crate) version: String,
}

/// Events of the client, in order, from one thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum DirectoryEvent {
    /// A member of the control plane knows this node by this number, until the member's next such event.
    Registered { member: String, node: NodeId, epoch: Epoch },
    /// A member has no inventory of these slots: call [`DirectoryClient::inventory`] with them.
    InventoryRequested { slots: Box<SlotSet> },
    /// Replicas of each key, in the order of the lookup's keys, excluding this node's. A key has no
    /// replicas if its owner did not respond in time.
    LookupCompleted { lookup: LookupId, found: Vec<Vec<Replica>> },
    /// The lookup timed out or could not be sent.
    LookupFailed { lookup: LookupId },
    /// Targets for further replicas of each key, in the order of the request's keys.
    PlacementCompleted { place: PlaceId, answers: Vec<Placement> },
    /// The placement request timed out.
    PlacementFailed { place: PlaceId },
    /// A node that requests blocks acts for their tenant, or still does not.
    StrangerDecided { request: StrangerRequest, acts_for: bool },
    /// A tenant's new limits on this node.
    Budget(Grant),
    /// The node's mode; `number` increases with each event.
    Mode { mode: NodeMode, number: u64 },
    /// Bytes of blocks to move to another node; `None` ends the move.
    Move(Option<Move>),
    /// At least one member of the control plane responds.
    Connected,
    /// No member responds or knows this node; the client keeps retrying.
    Disconnected,
}

/// Receives the client's events on its link thread. It may block; heartbeats continue.
pub(crate) type DirectorySink = Arc<dyn Fn(DirectoryEvent) + Send + Sync>;

/// State of the client; counters are totals since its start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct DirectoryStatus {
    /// Whether no control plane is configured.
    pub(crate) stand_alone: bool,
    /// Whether a member responds and knows this node.
    pub(crate) connected: bool,
    /// Members of the control plane, and those that respond and know this node.
    pub(crate) members: u64,
    pub(crate) members_connected: u64,
    /// Epoch of the shard map; 0 before the first.
    pub(crate) map_epoch: u64,
    /// This node's number and latest registration.
    pub(crate) registered: Option<(NodeId, Epoch)>,
    /// Changes and inventory entries waiting to be sent.
    pub(crate) changes_queued: u64,
    /// Changes that the directory has applied.
    pub(crate) changes_announced: u64,
    /// Changes not queued, or dropped from the queue, because an inventory replaces them.
    pub(crate) changes_superseded: u64,
    /// Inventories requested by members.
    pub(crate) inventories_wanted: u64,
    pub(crate) registrations: u64,
    pub(crate) lookups_answered: u64,
    pub(crate) lookups_failed: u64,
    /// Keys that a member no longer owned, and that were sent to another member or given up.
    pub(crate) lookup_keys_redirected: u64,
    /// Keys without a response in time.
    pub(crate) lookup_keys_unanswered: u64,
    /// Keys answered by a member that lacks some node's inventory of the slot.
    pub(crate) lookup_keys_partial: u64,
    /// Heartbeats without a response.
    pub(crate) beats_failed: u64,
}

/// Why the client cannot start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DirectoryError {
    /// An endpoint is not a valid address.
    #[error("invalid controlplane.address '{endpoint}': expected http://host:port")]
    Endpoint { endpoint: String, source: tonic::transport::Error },
    /// A thread or runtime cannot be created.
    #[error("cannot start the {what} of the control plane client")]
    Start { what: &'static str, source: std::io::Error },
}

/// The control plane client; see the module.
pub(crate) struct DirectoryClient {
    shared: Arc<Shared>,
    placements: mpsc::Sender<PlacementRequest>,
    strangers: mpsc::Sender<StrangerRequest>,
    /// Every thread holds the sender and drops it when it ends.
    ended: Mutex<Receiver<()>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
}

/// Queues of the link thread.
struct Queues {
    placements: mpsc::Receiver<PlacementRequest>,
    strangers: mpsc::Receiver<StrangerRequest>,
}

/// State shared by the methods, the link thread and the heartbeat thread. No lock is held across a call of
/// the sink or an await.
struct Shared {
    /// Time zero of the state machines.
    start: Instant,
    settings: DirectorySettings,
    sink: DirectorySink,
    /// Members of the control plane with their links, and the shard map.
    members: watch::Sender<Members>,
    lookups: Mutex<LookupQueue>,
    lookups_changed: Notify,
    /// State to report; `None` before the core's first report.
    own: watch::Sender<Option<Arc<OwnState>>>,
    reporting: Reporting,
    /// A report must be sent before its time.
    urgent_reports: watch::Sender<()>,
    nodes: RwLock<NodeMap>,
    /// Increases with each change of `nodes`.
    nodes_version: watch::Sender<u64>,
    connected: watch::Sender<bool>,
    /// Failure domain of the node, for its next registration.
    failure_domain: watch::Sender<String>,
    shutdown: watch::Sender<bool>,
    counters: Counters,
}

#[derive(Default)]
struct Counters {
    changes_announced: AtomicU64,
    /// Superseded changes of closed links.
    changes_superseded_before: AtomicU64,
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
    /// Starts the client's threads. Errors concern the configuration or this machine; an unreachable
    /// control plane is not an error.
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
        let (placements, placing) = mpsc::channel(placement::PLACES_QUEUED_MAX);
        let (strangers, waiting) = mpsc::channel(strangers::WAITING_MAX);
        let queues = Queues { placements: placing, strangers: waiting };
        let mut threads = Vec::with_capacity(2);
        if !stand_alone {
            let (shared, alive) = (shared.clone(), alive.clone());
            threads.push(spawn("heartbeat", alive, move |runtime| heartbeat::run(&runtime, &shared))?);
        }
        let link = shared.clone();
        threads.push(spawn("directory", alive, move |runtime| members::run(&runtime, &link, queues))?);
        Ok(DirectoryClient {
            shared,
            placements,
            strangers,
            ended: Mutex::new(ended),
            threads: Mutex::new(threads),
        })
    }

    /// Announces changes on this node, in order. The module describes when changes are superseded.
    pub(crate) fn announce(&self, changes: &[ReplicaChange]) {
        self.shared.links().for_each(|link| link.update_outbox(|outbox| outbox.announce(changes)));
    }

    /// Announces all replicas in some slots. This replaces the directory's content and the queued changes
    /// of these slots.
    pub(crate) fn inventory(&self, slots: &SlotSet, replicas: &[(BlockKey, Tier)]) {
        self.shared.links().for_each(|link| link.update_outbox(|outbox| outbox.inventory(slots, replicas)));
    }

    /// Looks up replicas on other nodes. Unless the client is shut down first, exactly one
    /// `LookupCompleted` or `LookupFailed` follows. `timeout` starts now.
    pub(crate) fn lookup(&self, lookup: LookupId, keys: Vec<BlockKey>, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        self.shared.lookups().push(Lookup { id: lookup, keys, deadline });
        self.shared.lookups_changed.notify_one();
    }

    /// Requests targets for further replicas. Unless the client is shut down first, exactly one
    /// `PlacementCompleted` or `PlacementFailed` follows.
    ///
    /// # Errors
    /// Returns the id of the request if too many are queued; no event follows.
    pub(crate) fn place(&self, question: PlacementRequest) -> Result<(), PlaceId> {
        let place = question.place;
        self.placements.try_send(question).map_err(|_| place)
    }

    /// Reports whether a node acts for a tenant, according to the control plane.
    pub(crate) fn acts_for(&self, node: &str, tenant: &TenantName) -> bool {
        self.shared.nodes.read().unwrap_or_else(PoisonError::into_inner).acts_for(node, tenant)
    }

    /// Waits for the control plane to report that a node acts for the tenant of its request; one
    /// `StrangerDecided` follows, unless the client is shut down first.
    ///
    /// # Errors
    /// Returns the request if too many wait; no event follows.
    pub(crate) fn await_tenant(&self, request: StrangerRequest) -> Result<(), StrangerRequest> {
        self.strangers.try_send(request).map_err(TrySendError::into_inner)
    }

    /// Returns the node with this name, if it is known.
    pub(crate) fn node_of(&self, name: &str) -> Option<NodeId> {
        self.shared.nodes.read().unwrap_or_else(PoisonError::into_inner).node_of(name)
    }

    /// Sets the node's state for the next report to each member, which is sent at once if the tenants of sessions have
    /// changed.
    pub(crate) fn set_own_state(&self, state: OwnState) {
        let is_urgent = self
            .shared
            .own
            .borrow()
            .as_ref()
            .is_none_or(|before| before.session_tenants != state.session_tenants);
        self.shared.own.send_replace(Some(Arc::new(state)));
        if is_urgent {
            self.shared.urgent_reports.send_replace(());
        }
    }

    /// Sets the node's failure domain, empty if unknown. After a change the node registers again with each
    /// member, which then requests an inventory.
    pub(crate) fn set_failure_domain(&self, domain: &str) {
        self.shared.failure_domain.send_if_modified(|current| {
            let changes = current.as_str() != domain;
            if changes {
                domain.clone_into(current);
            }
            changes
        });
    }

    /// Returns the node's failure domain, empty if unknown.
    pub(crate) fn failure_domain(&self) -> String {
        self.shared.failure_domain.borrow().clone()
    }

    /// Returns the endpoints of a node's peer transport; `None` for a node that this one cannot reach.
    pub(crate) fn peer_endpoints(&self, node: NodeId) -> Option<Arc<[PeerEndpoint]>> {
        self.shared.nodes.read().unwrap_or_else(PoisonError::into_inner).peer_endpoints(node)
    }

    /// Returns all known nodes by number; while disconnected, the last known list.
    pub(crate) fn nodes(&self) -> Vec<PeerNode> {
        self.shared.nodes.read().unwrap_or_else(PoisonError::into_inner).list()
    }

    /// Returns the state of the client.
    pub(crate) fn status(&self) -> DirectoryStatus {
        self.shared.status()
    }

    /// Ends the threads; lookups in flight get no event. Waits at most one second for a blocking sink.
    /// Repeated calls do nothing; dropping the client calls it.
    pub(crate) fn shutdown(&self) {
        self.shared.shutdown.send_replace(true);
        let threads = std::mem::take(&mut *self.threads.lock().unwrap_or_else(PoisonError::into_inner));
        if threads.is_empty() {
            return;
        }
        // No value is ever sent: the channel disconnects when the last thread has ended.
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(SHUTDOWN_WAIT) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!("the control plane client did not end in time; its threads end with the process");
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
            start: Instant::now(),
            members: watch::Sender::new(Members::default()),
            lookups: Mutex::new(LookupQueue::new(settings.lookups_max)),
            lookups_changed: Notify::new(),
            own: watch::Sender::new(None),
            reporting: Reporting::default(),
            urgent_reports: watch::Sender::new(()),
            nodes_version: watch::Sender::new(0),
            nodes: RwLock::new(NodeMap::new(&settings.registration.peer_endpoints)),
            connected: watch::Sender::new(false),
            failure_domain: watch::Sender::new(settings.registration.failure_domain.clone()),
            shutdown: watch::Sender::new(false),
            counters: Counters::default(),
            settings,
            sink,
        }
    }

    /// Returns the time, for the state machines.
    fn now(&self) -> Tick {
        Tick(0).after(self.start.elapsed())
    }

    /// Returns the links to all members.
    fn links(&self) -> impl Iterator<Item = Arc<Link>> + use<> {
        let links: Vec<Arc<Link>> = self.members.borrow().links().cloned().collect();
        links.into_iter()
    }

    /// Returns the shard map with its links; `None` before the first.
    fn routes(&self) -> Option<Arc<Routes>> {
        self.members.borrow().routes().cloned()
    }

    fn lookups(&self) -> MutexGuard<'_, LookupQueue> {
        self.lookups.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn emit(&self, event: DirectoryEvent) {
        (self.sink)(event);
    }

    /// Emits an event if the first link has come up or the last one has gone down.
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
        if let Some(routes) = self.routes() {
            status.members = routes.links().len() as u64;
            status.map_epoch = routes.epoch().0;
            status.members_connected = routes.links().iter().filter(|link| link.is_up()).count() as u64;
        }
        for link in self.links() {
            link.add_to(&mut status);
        }
        status.changes_superseded += count(&self.counters.changes_superseded_before);
        status
    }
}

fn parse_endpoint(text: &str, settings: &DirectorySettings) -> Result<Endpoint, DirectoryError> {
    Endpoint::from_shared(text.to_owned())
        .map(|endpoint| endpoint.connect_timeout(settings.connect_timeout).tcp_nodelay(true))
        .map_err(|source| DirectoryError::Endpoint { endpoint: text.to_owned(), source })
}

/// Starts a named thread with its own runtime.
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
