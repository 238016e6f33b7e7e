//! Executes the core's effects. Nothing here blocks:
//!
//! | effect | how | when that fails |
//! |---|---|---|
//! | replies, notices | straight to the socket, else the session's queue | the session is closed |
//! | progress | stores to shared memory, futex wake | cannot |
//! | letting go of a device | its thread is ended by whoever opened it | cannot |
//! | device operations, reads | bounded queue, larger than what the core has under way | reported as not taken |
//! | checks of blocks in DRAM | the checker's queue | reported as not looked at |
//! | look-ups, announcements | the directory client's queues | it reports or re-announces |
//! | fetches, serves | the transport's queues | the fill is reported as lost |
//! | questions of placement | the directory client's queue | reported as not answered |
//! | offers to peers | the transport's queues | reported as failed |
//!
//! What fails at once comes back as an event ([`Executor::take_feedback`]), never as a call into the core.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crossbeam_channel::Sender;
use reprise_agent_core::agent::limits::OFFER_RETRY_MAX;
use reprise_agent_core::effect::{
    DeviceId, Effect, FillId, LoadId, Offer, PeerFetch, PeerOfferId, ProgressEntry, ProgressUpdate, Reply,
    Report, Room,
};
use reprise_agent_core::event::{Event, FillError, FillUpdate, Integrity, PeerOffer, Request, RequestId};
use reprise_agent_core::pool::DeviceError;
use reprise_buffers::ProgressWriter;
use reprise_policy::tenant::TenantRegistry;
use reprise_policy::{NamespaceDigest, SessionId, TenantId, TenantName};
use reprise_transport::IncomingOffer;

use crate::checker::Checker;
use crate::device::{Command, Device, DeviceInfo, Unsent, read_error};
use crate::directory::{DirectoryClient, OwnState, PlaceQuestion};
use crate::metrics::{Metrics, Phase};
use crate::peer::Peers;
use crate::session::{Peer, Session};

/// What effects act on.
pub(crate) struct Executor {
    parts: ExecutorParts,
    /// By number.
    devices: Vec<Option<Held>>,
    sessions: HashMap<SessionId, Connected>,
    feedback: VecDeque<Event>,
    /// Blocks being fetched: since when, and how many layers they have. As many as the core has fills under way.
    fetches: HashMap<FillId, Fetching>,
    /// Tenants that were said to have no name; as many as the core has tenants.
    unnamed: BTreeSet<TenantId>,
    /// Tenants whose names the core knows; as many as the registry has.
    named: BTreeSet<TenantId>,
}

/// What an executor is made of.
pub(crate) struct ExecutorParts {
    pub(crate) devices: Vec<Device>,
    /// Takes devices that the core has let go of.
    pub(crate) released: Sender<Released>,
    pub(crate) directory: Arc<DirectoryClient>,
    /// Whether there is a control plane to ask.
    pub(crate) clustered: Clustered,
    /// Whether all blocks of this node are known: not before the devices of its first spec were tried.
    pub(crate) complete: Arc<AtomicBool>,
    pub(crate) peers: Option<Peers>,
    /// Names and numbers of tenants; also those of sessions.
    pub(crate) tenants: Arc<Mutex<TenantRegistry>>,
    pub(crate) checker: Checker,
    pub(crate) metrics: Arc<Metrics>,
}

/// A device that is open, or lost.
struct Held {
    device: Device,
    /// Why it is lost.
    lost: Option<String>,
}

/// A device that was closed; whoever gets it stops it, and may give its number to another.
pub(crate) struct Released {
    pub(crate) id: DeviceId,
    pub(crate) device: Device,
}

/// A device, for people and for whoever looks after devices.
#[derive(Clone, Debug)]
pub(crate) struct DeviceView {
    pub(crate) id: DeviceId,
    pub(crate) info: DeviceInfo,
    /// Commands that its thread has not taken yet.
    pub(crate) waiting: usize,
    /// Why it is lost.
    pub(crate) lost: Option<String>,
}

/// Whether this agent is part of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Clustered {
    Yes,
    StandAlone,
}

/// A session, for people.
#[derive(Clone, Debug)]
pub(crate) struct SessionView {
    pub(crate) id: SessionId,
    pub(crate) peer: Peer,
    pub(crate) namespace: NamespaceDigest,
    pub(crate) in_flight: usize,
}

/// A session and what is being measured of it.
struct Connected {
    session: Arc<Session>,
    /// What it compares with, as it said in its greeting.
    namespace: NamespaceDigest,
    progress: ProgressWriter,
    /// Requests without an answer; bounded by the session's own limit.
    asked: HashMap<RequestId, (Phase, Timed)>,
    /// Loads whose blocks are not all there, by progress entry.
    loading: HashMap<ProgressEntry, Timed>,
    /// When the request that is being applied had been received.
    current: Option<Instant>,
}

/// Something that is being waited for: since when, and its span, which ends with it.
struct Timed {
    since: Instant,
    _span: tracing::Span,
}

struct Fetching {
    since: Instant,
    layers: u32,
    /// Shared by the blocks of one fetch.
    _span: tracing::Span,
}

impl Executor {
    /// Tells the control plane how this node is. One that does not know its blocks yet is not drained, and what it says of tenants is not
    /// what is left of them under their orders.
    pub(crate) fn tell_state(&self, mut state: OwnState) {
        if !self.parts.complete.load(Ordering::Acquire) {
            state.drain.drained = false;
            state.tenants.iter_mut().for_each(|tenant| tenant.grant = None);
        }
        if self.parts.clustered == Clustered::Yes {
            self.parts.directory.set_own_state(state);
        }
    }

    pub(crate) fn new(mut parts: ExecutorParts) -> Executor {
        let (sessions, feedback, fetches) = (HashMap::new(), VecDeque::new(), HashMap::new());
        let held = |device| Some(Held { device, lost: None });
        let devices = std::mem::take(&mut parts.devices).into_iter().map(held).collect();
        let (unnamed, named) = (BTreeSet::new(), BTreeSet::new());
        Executor { parts, devices, sessions, feedback, fetches, unnamed, named }
    }

    /// Takes a device; its number is free.
    pub(crate) fn hold_device(&mut self, DeviceId(id): DeviceId, device: Device) {
        let at = usize::from(id);
        if self.devices.len() <= at {
            self.devices.resize_with(at + 1, || None);
        }
        self.devices[at] = Some(Held { device, lost: None });
    }

    /// Has a device give up.
    pub(crate) fn close_device(&self, id: DeviceId) {
        if let Some(held) = self.held(id) {
            held.device.close();
        }
    }

    fn held(&self, id: DeviceId) -> Option<&Held> {
        self.devices.get(usize::from(id.0))?.as_ref()
    }

    /// The core has let go of a device.
    fn release(&mut self, id: DeviceId) {
        if let Some(Held { device, .. }) = self.devices.get_mut(usize::from(id.0)).and_then(Option::take) {
            self.parts.metrics.device_closed(id, device.info());
            // Nobody takes it when the agent stops: the device ends with its channel.
            let _ = self.parts.released.try_send(Released { id, device });
        }
    }

    /// An event that an effect has brought at once.
    pub(crate) fn take_feedback(&mut self) -> Option<Event> {
        self.feedback.pop_front()
    }

    pub(crate) fn session_opened(
        &mut self,
        session: Arc<Session>,
        namespace: NamespaceDigest,
        progress: ProgressWriter,
    ) {
        let (id, asked, loading) = (session.id(), HashMap::new(), HashMap::new());
        let connected = Connected { session, namespace, progress, asked, loading, current: None };
        self.sessions.insert(id, connected);
    }

    pub(crate) fn session_closed(&mut self, session: SessionId) {
        self.sessions.remove(&session);
    }

    /// Ends all sessions.
    pub(crate) fn close_sessions(&mut self) {
        for (_, connected) in self.sessions.drain() {
            connected.session.close();
        }
    }

    /// Notes when a request came, for the latency of its answer; gives its span, to be entered while it is applied.
    pub(crate) fn request_received(
        &mut self,
        session: SessionId,
        request: RequestId,
        body: &Request,
        at: Instant,
    ) -> tracing::Span {
        let phase = match body {
            Request::Match { .. } => Phase::Match,
            Request::Reserve { .. } => Phase::Reserve,
            Request::Commit(_) => Phase::Commit,
            Request::Load(_) => Phase::LoadFirstLayer,
            Request::Abort { .. }
            | Request::Release { .. }
            | Request::Suspect { .. }
            | Request::Trim
            | Request::Stats => Phase::Other,
        };
        let span = tracing::debug_span!("request", session = session.0, request = request.0, ?phase);
        if let Some(connected) = self.sessions.get_mut(&session) {
            connected.asked.insert(request, (phase, Timed { since: at, _span: span.clone() }));
            connected.current = Some(at);
        }
        span
    }

    /// Looks at events on their way into the core, for what they say about latencies.
    pub(crate) fn observe(&mut self, event: &Event) {
        if let Event::Fill { fill, update } = event
            && !self.fetches.is_empty()
        {
            let over = match update {
                FillUpdate::Failed(_) => true,
                FillUpdate::Layers { layers, .. } => {
                    self.fetches.get(fill).is_some_and(|fetching| *layers >= fetching.layers)
                }
            };
            if over && let Some(fetching) = self.fetches.remove(fill) {
                self.parts.metrics.phase(Phase::PeerFetch, fetching.since.elapsed());
            }
        }
    }

    pub(crate) fn session_views(&self) -> Vec<SessionView> {
        let view = |connected: &Connected| SessionView {
            id: connected.session.id(),
            peer: connected.session.peer().clone(),
            namespace: connected.namespace,
            in_flight: connected.session.in_flight(),
        };
        let mut views: Vec<SessionView> = self.sessions.values().map(view).collect();
        views.sort_unstable_by_key(|view| view.id);
        views
    }

    /// The devices, by number.
    pub(crate) fn device_views(&self) -> Vec<DeviceView> {
        let view = |(id, held): (u8, &Option<Held>)| {
            let Held { device, lost } = held.as_ref()?;
            let (info, waiting, lost) = (device.info().clone(), device.waiting(), lost.clone());
            Some(DeviceView { id: DeviceId(id), info, waiting, lost })
        };
        (0..).zip(&self.devices).filter_map(view).collect()
    }

    /// Where a device is.
    pub(crate) fn device_path(&self, id: DeviceId) -> Option<PathBuf> {
        self.held(id).map(|held| held.device.info().path.clone())
    }

    /// The devices, to be stopped.
    pub(crate) fn into_devices(self) -> Vec<Device> {
        self.devices.into_iter().flatten().map(|held| held.device).collect()
    }

    /// Does one thing.
    pub(crate) fn execute(&mut self, effect: Effect) {
        match effect {
            Effect::Reply { session, request, reply } => self.reply(session, request, reply),
            Effect::Durable { session, ticket, durable, lost } => {
                if let Some(connected) = self.sessions.get(&session) {
                    connected.session.durable(ticket, durable, &lost);
                }
            }
            Effect::Progress { session, entry, update } => self.progress(session, entry, &update),
            Effect::Device { device, op } => {
                let token = op.token;
                if let Err(Unsent { why, .. }) = self.command(device, Command::Op(op)) {
                    self.feedback.push_back(Event::DeviceDone { device, token, result: Err(why) });
                }
            }
            Effect::ReadBlocks { device, batch } => {
                let sent = self.command(device, Command::Read(batch));
                if let Err(Unsent { command: Command::Read(batch), why }) = sent {
                    let fills = batch.blocks.iter().map(|block| block.fill);
                    self.feedback.extend(fills.map(|fill| failed(fill, read_error(why))));
                }
            }
            Effect::DeviceReleased { device } => self.release(device),
            Effect::CheckBlock(check) => {
                let id = check.check;
                if self.parts.checker.submit(check).is_err() {
                    let integrity = Integrity::Unknown;
                    self.feedback.push_back(Event::Checked { check: id, integrity });
                }
            }
            Effect::Lookup { lookup, keys, timeout } => match self.parts.clustered {
                Clustered::Yes => self.parts.directory.lookup(lookup, keys, timeout),
                Clustered::StandAlone => self.feedback.push_back(Event::LookupFailed { lookup }),
            },
            Effect::Announce { changes } => self.parts.directory.announce(&changes),
            Effect::Inventory { slots, replicas } => self.parts.directory.inventory(&slots, &replicas),
            Effect::PeerFetch(fetch) => self.fetch(&fetch),
            Effect::Place { place, keys, slot_bytes, reason, timeout } => {
                let deadline = Instant::now() + timeout;
                self.place(PlaceQuestion { place, keys, slot_bytes, reason, deadline });
            }
            Effect::Offer(offer) => self.offer(offer),
            Effect::AnswerOffer { offer, taken, retry_after } => {
                self.with_peers(|peers| peers.answer_offer(offer, &taken, retry_after));
            }
            Effect::ServeHeader { serve, block, tier, checksums } => {
                self.with_peers(|peers| peers.serve_header(serve, block, tier, &checksums));
            }
            Effect::ServeObjects(objects) => self.with_peers(|peers| peers.serve_objects(&objects)),
            Effect::ServeAbsent { serve, block } => self.with_peers(|peers| peers.serve_absent(serve, block)),
            Effect::Report(report) => self.report(&report),
        }
    }

    fn reply(&mut self, session: SessionId, request: RequestId, reply: Reply) {
        let Some(connected) = self.sessions.get_mut(&session) else { return };
        connected.session.reply(request, reply);
        if let Some((phase, asked)) = connected.asked.remove(&request) {
            self.parts.metrics.phase(phase, asked.since.elapsed());
        }
    }

    fn progress(&mut self, session: SessionId, entry: ProgressEntry, update: &ProgressUpdate) {
        let Some(connected) = self.sessions.get_mut(&session) else { return };
        let page = &connected.progress;
        match update {
            ProgressUpdate::Begin { load: LoadId(load) } => {
                page.begin(entry.0, *load);
                let since = connected.current.unwrap_or_else(Instant::now);
                let _span = tracing::debug_span!("load", session = session.0, load);
                connected.loading.insert(entry, Timed { since, _span });
            }
            ProgressUpdate::Layers { layers } => page.set_layers(entry.0, *layers),
            ProgressUpdate::BlockFailed { block } => page.fail_block(entry.0, *block as usize),
            ProgressUpdate::Done => {
                page.done(entry.0);
                if let Some(loading) = connected.loading.remove(&entry) {
                    self.parts.metrics.phase(Phase::LoadTotal, loading.since.elapsed());
                }
            }
        }
    }

    fn command(&self, device: DeviceId, command: Command) -> Result<(), Unsent> {
        match self.held(device) {
            Some(held) => held.device.submit(command),
            None => Err(Unsent { command, why: DeviceError::Lost }),
        }
    }

    /// The only place that tells an operator.
    fn report(&mut self, report: &Report) {
        match report {
            Report::CorruptBlock { device, page, key } => {
                tracing::error!(device = device.0, page = page.0, %key, "a stored block did not verify; it was dropped");
            }
            Report::CorruptMemory { slot, key } => {
                tracing::error!(
                    region = slot.region.0,
                    offset = slot.offset,
                    %key,
                    "a block in DRAM no longer matched its checksums; it was dropped. It was committed with wrong checksums, a process that maps the arena has written to it since, or the memory fails"
                );
            }
            Report::Unstorable { block_bytes, payload_bytes_max } => {
                tracing::warn!(
                    block_bytes,
                    payload_bytes_max,
                    "blocks of this layout fit no segment of the pool and are never durable; format the pool with a larger pool.segment_bytes"
                );
            }
            Report::Overcommitted { room, error } => {
                let room = match room {
                    Room::Dram => "memory",
                    Room::Nvme => "devices",
                };
                tracing::warn!(room, %error, "tenants are promised more than there is; reservations of devices shrink in proportion");
            }
            Report::OffersRefused { layouts } => {
                tracing::warn!(
                    layouts,
                    "peers offer blocks of further layouts, and this node has blocks of so many that it takes no other: what is left of its table is for its own engines"
                );
            }
            Report::DeviceLost { device, reason } => {
                self.parts.metrics.device_lost(*device);
                let mut path = PathBuf::new();
                if let Some(held) = self.devices.get_mut(usize::from(device.0)).and_then(Option::as_mut) {
                    held.lost = Some(reason.clone());
                    path.clone_from(&held.device.info().path);
                }
                tracing::error!(
                    device = device.0,
                    path = %path.display(),
                    reason,
                    "device lost; the agent goes on without it and its blocks, restart it when the device is back"
                );
            }
        }
    }

    fn fetch(&mut self, fetch: &PeerFetch) {
        let address = self.parts.directory.peer_address(fetch.node);
        let asked = match (&self.parts.peers, address) {
            (Some(peers), Some(address)) => peers.fetch(&address, fetch),
            (None, _) => Err("this agent has no peer transport".to_owned()),
            (_, None) => Err("the control plane has not named its address".to_owned()),
        };
        match asked {
            Ok(()) => {
                let (since, layers) = (Instant::now(), fetch.layout.layers());
                let span = tracing::debug_span!(
                    "fetch",
                    fetch = fetch.fetch.0,
                    node = fetch.node.0,
                    blocks = fetch.blocks.len()
                );
                self.fetches.extend(
                    fetch
                        .blocks
                        .iter()
                        .map(|block| (block.fill, Fetching { since, layers, _span: span.clone() })),
                );
            }
            Err(reason) => {
                tracing::warn!(
                    node = fetch.node.0,
                    blocks = fetch.blocks.len(),
                    reason,
                    "cannot ask a peer for blocks"
                );
                self.feedback
                    .extend(fetch.blocks.iter().map(|block| failed(block.fill, FillError::PeerLost)));
            }
        }
    }

    fn place(&mut self, question: PlaceQuestion) {
        let place = question.place;
        let asked = match self.parts.clustered {
            Clustered::Yes => self.parts.directory.place(question),
            Clustered::StandAlone => Err(place),
        };
        if let Err(place) = asked {
            self.feedback.push_back(Event::PlaceFailed { place });
        }
    }

    fn offer(&mut self, offer: Offer) {
        let (id, node, tenant) = (offer.offer, offer.node, offer.tenant);
        let name = lock(&self.parts.tenants).name(tenant).cloned();
        let address = self.parts.directory.peer_address(node);
        let offered = match (&self.parts.peers, address, name) {
            (Some(peers), Some(address), Some(name)) => peers.offer(&address, name, offer),
            (None, _, _) => Err("this agent has no peer transport".to_owned()),
            (_, None, _) => Err("the control plane has not named its address".to_owned()),
            (_, _, None) => {
                self.tell_unnamed(tenant);
                Err("the tenant's name is not known".to_owned())
            }
        };
        if let Err(reason) = offered {
            tracing::debug!(node = node.0, reason, "cannot offer blocks to a peer");
            self.feedback.push_back(Event::OfferFailed { offer: id });
        }
    }

    /// Says once for each tenant that its blocks cannot be given away.
    fn tell_unnamed(&mut self, tenant: TenantId) {
        if self.unnamed.insert(tenant) {
            tracing::warn!(
                number = tenant.0,
                "blocks of a tenant without a name stay on this node; list it under [[tenants]] in the agent's configuration, or let one of its engines connect"
            );
        }
    }

    /// The name of a tenant that the core is to be told: once, and not the default tenant's, which everybody knows.
    pub(crate) fn name_for_core(&mut self, tenant: TenantId) -> Option<TenantName> {
        if tenant == TenantId::DEFAULT || self.named.contains(&tenant) {
            return None;
        }
        let name = lock(&self.parts.tenants).name(tenant).cloned()?;
        self.named.insert(tenant);
        Some(name)
    }

    /// A peer's offer, for the core; answered here when node or tenant have no number on this node.
    pub(crate) fn offered(&mut self, offer: IncomingOffer) -> Option<PeerOffer> {
        let IncomingOffer { offer: id, from, tenant, layout, keys, .. } = offer;
        let offer = PeerOfferId(id);
        let node = self.parts.directory.node_of(&from);
        // Who is no node of the cluster gives no names to this one.
        let tenant = node.map(|from| (from, lock(&self.parts.tenants).enter_offered(&tenant)));
        let reason = match tenant {
            Some((from, Ok(tenant))) => return Some(PeerOffer { offer, from, tenant, layout, keys }),
            Some((_, Err(error))) => error.to_string(),
            None => "the control plane has not named it".to_owned(),
        };
        tracing::debug!(node = from, reason, "an offer of a peer is refused");
        self.with_peers(|peers| peers.answer_offer(offer, &[], OFFER_RETRY_MAX));
        None
    }

    /// Only a peer's request leads to serving, and it came through the transport.
    fn with_peers(&self, serve: impl FnOnce(&Peers)) {
        if let Some(peers) = &self.parts.peers {
            serve(peers);
        }
    }
}

fn lock(registry: &Mutex<TenantRegistry>) -> MutexGuard<'_, TenantRegistry> {
    registry.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(fill: FillId, error: FillError) -> Event {
    Event::Fill { fill, update: FillUpdate::Failed(error) }
}
