//! Executes the core's effects without blocking:
//!
//! | effect | how | on failure |
//! |---|---|---|
//! | replies, notices | written to the socket, else the session's queue | the session is closed |
//! | progress | stores to shared memory, futex wake | cannot fail |
//! | release of a device | passed to the reconciler, which ends its thread | cannot fail |
//! | descriptors of devices | with the reply that names an extent of them | the session is closed |
//! | end of a client's own I/O | polled ([`extents`]) | polled again |
//! | device operations, reads | bounded queue, above the core's maximum in flight | reported as rejected |
//! | copies of public blocks | the reader's queue of the copying thread | reported as refused |
//! | checks of blocks in DRAM | the checker's queue | reported as not verified |
//! | new memory of a region | the thread for regions, after all devices released the old one ([`regions`]) | reported as failed |
//! | lookups, announcements | the directory client's queues | the client reports or re-announces |
//! | fetches, serves | the transport's queues | the fill is reported as lost |
//! | placement requests, offers to peers | queues of the directory client, of the transport | reported as failed |
//!
//! Immediate failures become events ([`Executor::pop_feedback`]); the executor never calls into the core.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crossbeam_channel::Sender;
use reprise_agent_core::effect::{
    DeviceId, Diagnostic, Effect, FillId, LoadId, PlaceKind, ProgressEntry, ProgressUpdate, QuotaResource,
    Reply,
};
use reprise_agent_core::event::{Event, FillError, FillUpdate, Integrity, PeerEvent, Request, RequestId};
use reprise_agent_core::pool::DeviceError;
use reprise_buffers::ProgressWriter;
use reprise_policy::tenant::TenantRegistry;
use reprise_policy::{NamespaceDigest, SessionId, TenantId, TenantName};
use reprise_transport::{CompositeTransport, Transport};

use crate::block_copier::BlockCopier;
use crate::checker::Checker;
use crate::device::{Command, Device, DeviceInfo, UnsentCommand, read_error};
use crate::directory::{DirectoryClient, OwnState, PlacementRequest};
use crate::encryption::EncryptionKeys;
use crate::metrics::{BlockPath, Metrics, Phase};
use crate::public_tenant::PublicTenant;
use crate::queue_grants::QueueGrantService;
use crate::region_renewer::RegionRenewer;
use crate::session::{Peer, Session};
use extents::SharedDevices;
use peers::{OfferedTenants, PendingFetch};
use regions::RenewedRegions;

mod extents;
mod peers;
mod regions;

/// Executes effects on devices, sessions, peers and the directory.
pub(crate) struct Executor {
    parts: ExecutorParts,
    /// Devices, indexed by their number.
    devices: Vec<Option<DeviceEntry>>,
    sessions: HashMap<SessionId, SessionEntry>,
    feedback: VecDeque<Event>,
    /// Blocks being fetched, with start time and layers; bounded by the core's fills in flight.
    fetches: HashMap<FillId, PendingFetch>,
    extents: SharedDevices,
    regions: RenewedRegions,
    offered: OfferedTenants,
    /// Tenants that were logged as unnamed; bounded by the core's tenants.
    unnamed: BTreeSet<TenantId>,
    /// Tenants whose names the core has; bounded by the registry.
    named: BTreeSet<TenantId>,
}

/// Dependencies of an executor.
pub(crate) struct ExecutorParts {
    pub(crate) devices: Vec<Device>,
    /// Receives devices that the core has released.
    pub(crate) released: Sender<ReleasedDevice>,
    pub(crate) directory: Arc<DirectoryClient>,
    /// Whether the agent has a control plane.
    pub(crate) deployment: Deployment,
    /// Whether all blocks of this node are known: only after the devices of the first spec were attempted.
    pub(crate) complete: Arc<AtomicBool>,
    pub(crate) peers: Option<Arc<CompositeTransport>>,
    /// Names and numbers of tenants, shared with the sessions.
    pub(crate) tenants: Arc<Mutex<TenantRegistry>>,
    /// Tenant whose blocks all agents may fetch.
    pub(crate) public_tenant: PublicTenant,
    pub(crate) checker: Checker,
    pub(crate) block_copier: BlockCopier,
    pub(crate) region_renewer: RegionRenewer,
    /// Encryption keys of tenants.
    pub(crate) keys: EncryptionKeys,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) queue_grants: Arc<QueueGrantService>,
}

/// An open or lost device.
struct DeviceEntry {
    device: Device,
    /// Why the device is lost, if it is.
    lost: Option<String>,
    /// Why the device rejects writes, if so.
    read_only: Option<String>,
}

/// A released device. The receiver stops it and may reuse its number.
pub(crate) struct ReleasedDevice {
    pub(crate) id: DeviceId,
    pub(crate) device: Device,
}

/// A device for the status page and the reconciler.
#[derive(Clone, Debug)]
pub(crate) struct DeviceView {
    pub(crate) id: DeviceId,
    pub(crate) info: DeviceInfo,
    /// Commands that its thread has not received yet.
    pub(crate) waiting: usize,
    /// Why the device is lost, if it is.
    pub(crate) lost: Option<String>,
    /// Why the device rejects writes, if so.
    pub(crate) read_only: Option<String>,
}

/// Whether this agent belongs to a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Deployment {
    Clustered,
    StandAlone,
}

/// A session for the status page.
#[derive(Clone, Debug)]
pub(crate) struct SessionView {
    pub(crate) id: SessionId,
    pub(crate) peer: Peer,
    pub(crate) namespace: NamespaceDigest,
    pub(crate) in_flight: usize,
    /// Backend that it states.
    pub(crate) backend: BlockPath,
}

/// A session and its latency measurements.
struct SessionEntry {
    session: Arc<Session>,
    /// Namespace from its greeting.
    namespace: NamespaceDigest,
    progress: ProgressWriter,
    /// Requests without a reply, bounded by the session's limit.
    pending: HashMap<RequestId, (Phase, TimedSpan)>,
    /// Loads with missing blocks, by progress entry.
    loading: HashMap<ProgressEntry, TimedSpan>,
    /// Receipt time of the request that is being applied.
    current: Option<Instant>,
}

/// Start time of an operation, and its tracing span.
struct TimedSpan {
    since: Instant,
    _span: tracing::Span,
}

impl Executor {
    /// Reports the node's state to the control plane. Until all its blocks are known, the node is not
    /// reported as drained, and tenants are reported without their grants, as their usage is incomplete.
    pub(crate) fn report_state(&self, mut state: OwnState) {
        if !self.parts.complete.load(Ordering::Acquire) {
            state.drain.drained = false;
            state.tenants.iter_mut().for_each(|tenant| tenant.grant = None);
        }
        if self.parts.deployment == Deployment::Clustered {
            self.parts.directory.set_own_state(state);
        }
    }

    pub(crate) fn new(mut parts: ExecutorParts) -> Executor {
        let (sessions, feedback, fetches) = (HashMap::new(), VecDeque::new(), HashMap::new());
        let entry = |device| Some(DeviceEntry { device, lost: None, read_only: None });
        let devices = std::mem::take(&mut parts.devices).into_iter().map(entry).collect();
        let (unnamed, named) = (BTreeSet::new(), BTreeSet::new());
        let (extents, offered) = (SharedDevices::default(), OfferedTenants::default());
        let regions = RenewedRegions::default();
        let executor = Executor {
            parts,
            devices,
            sessions,
            feedback,
            fetches,
            extents,
            regions,
            offered,
            unnamed,
            named,
        };
        executor.lend_all_queues();
        executor
    }

    /// Adds a device under a free number.
    pub(crate) fn add_device(&mut self, DeviceId(id): DeviceId, device: Device) {
        let at = usize::from(id);
        if self.devices.len() <= at {
            self.devices.resize_with(at + 1, || None);
        }
        self.lend_queues(DeviceId(id), &device);
        self.regions.update_device(&device);
        self.devices[at] = Some(DeviceEntry { device, lost: None, read_only: None });
    }

    fn entry(&self, id: DeviceId) -> Option<&DeviceEntry> {
        self.devices.get(usize::from(id.0))?.as_ref()
    }

    /// Handles the release of a device by the core.
    fn remove_device(&mut self, id: DeviceId) {
        if let Some(DeviceEntry { device, .. }) =
            self.devices.get_mut(usize::from(id.0)).and_then(Option::take)
        {
            self.extents.device_released(id);
            self.parts.queue_grants.device_released(id);
            self.parts.metrics.device_closed(id, device.info());
            // If the agent is stopping, the receiver is gone and the device ends with its channel.
            let _ = self.parts.released.try_send(ReleasedDevice { id, device });
        }
    }

    /// Returns the next event that an effect caused immediately.
    pub(crate) fn pop_feedback(&mut self) -> Option<Event> {
        self.feedback.pop_front()
    }

    pub(crate) fn session_opened(
        &mut self,
        session: Arc<Session>,
        namespace: NamespaceDigest,
        progress: ProgressWriter,
    ) {
        let (id, pending, loading) = (session.id(), HashMap::new(), HashMap::new());
        let connected = SessionEntry { session, namespace, progress, pending, loading, current: None };
        self.sessions.insert(id, connected);
    }

    pub(crate) fn session_closed(&mut self, session: SessionId) {
        self.sessions.remove(&session);
        self.extents.session_closed(session);
    }

    pub(crate) fn close_sessions(&mut self) {
        for (_, connected) in self.sessions.drain() {
            connected.session.close();
        }
    }

    /// Ends the sessions of a tenant whose encryption keys are gone.
    pub(crate) fn end_sessions_of(&self, tenant: &TenantName) {
        let sessions = self.sessions.values().map(|connected| &connected.session);
        for session in sessions.filter(|session| session.peer().tenant == *tenant) {
            session.end(&format!("the encryption keys of tenant '{tenant}' were removed from this node"));
        }
    }

    /// Returns the number of a tenant; `None` if another tenant has it on this node.
    pub(crate) fn tenant_number(&self, name: &TenantName) -> Option<TenantId> {
        lock(&self.parts.tenants).number_of(name)
    }

    /// Records the receipt of a request, for its latency. Returns its span, to be entered while it is
    /// applied.
    pub(crate) fn request_received(
        &mut self,
        session: SessionId,
        request: RequestId,
        body: &Request,
        at: Instant,
    ) -> tracing::Span {
        let phase = match body {
            Request::Match { .. } => Phase::Match,
            Request::Reserve { kind: PlaceKind::Arena, .. } => Phase::Reserve,
            Request::Commit(commit) if commit.kind() == Some(PlaceKind::Arena) => Phase::Commit,
            Request::Load(_) => Phase::LoadFirstLayer,
            // Of extents: they wait for devices.
            Request::Reserve { .. } | Request::Commit(_) => Phase::Other,
            Request::Abort { .. }
            | Request::AwaitDurable { .. }
            | Request::Release { .. }
            | Request::Suspect { .. }
            | Request::Pin { .. }
            | Request::Unpin { .. }
            | Request::Lookahead(_)
            | Request::Manage(_)
            | Request::Trim
            | Request::Stats => Phase::Other,
        };
        let span = tracing::debug_span!("request", session = session.0, request = request.0, ?phase);
        if let Some(connected) = self.sessions.get_mut(&session) {
            connected.pending.insert(request, (phase, TimedSpan { since: at, _span: span.clone() }));
            connected.current = Some(at);
        }
        span
    }

    /// Records latencies from events on their way to the core.
    pub(crate) fn record_latencies(&mut self, event: &Event) {
        if let Event::Peer(PeerEvent::Fill { fill, update }) = event
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

    /// Returns the tenants that have sessions.
    pub(crate) fn session_tenants(&self) -> BTreeSet<TenantName> {
        self.sessions.values().map(|connected| connected.session.peer().tenant.clone()).collect()
    }

    pub(crate) fn session_views(&self) -> Vec<SessionView> {
        let view = |connected: &SessionEntry| SessionView {
            id: connected.session.id(),
            peer: connected.session.peer().clone(),
            namespace: connected.namespace,
            in_flight: connected.session.in_flight(),
            backend: connected.session.backend(),
        };
        let mut views: Vec<SessionView> = self.sessions.values().map(view).collect();
        views.sort_unstable_by_key(|view| view.id);
        views
    }

    /// Returns the devices by number.
    pub(crate) fn device_views(&self) -> Vec<DeviceView> {
        let view = |(id, entry): (u8, &Option<DeviceEntry>)| {
            let DeviceEntry { device, lost, read_only } = entry.as_ref()?;
            let (info, waiting, lost) = (device.info().clone(), device.waiting(), lost.clone());
            Some(DeviceView { id: DeviceId(id), info, waiting, lost, read_only: read_only.clone() })
        };
        (0..).zip(&self.devices).filter_map(view).collect()
    }

    /// Returns the path or address of a device.
    pub(crate) fn device_path(&self, id: DeviceId) -> Option<String> {
        self.entry(id).map(|entry| entry.device.info().description.to_string())
    }

    /// Returns all devices, to be stopped.
    pub(crate) fn into_devices(self) -> Vec<Device> {
        self.devices.into_iter().flatten().map(|entry| entry.device).collect()
    }

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
                if let Err(UnsentCommand { why, .. }) = self.command(device, Command::Op(op)) {
                    self.feedback.push_back(Event::DeviceDone { device, token, result: Err(why) });
                }
            }
            Effect::ReadBlocks { device, batch } => {
                let sent = self.command(device, Command::Read(batch));
                if let Err(UnsentCommand { command: Command::Read(batch), why }) = sent {
                    let ended = batch.blocks.iter().map(|block| failed(block.fill, read_error(why)));
                    self.feedback.extend(ended);
                }
            }
            Effect::PromoteReads { device, fills } => drop(self.command(device, Command::Promote(fills))),
            Effect::DeviceReleased { device } => self.remove_device(device),
            Effect::RenewRegion { region } => self.renew_region(region),
            Effect::AwaitExtents { holder } => self.extents.await_end(holder),
            Effect::CopyBlocks(batch) => {
                if let Err(fills) = self.parts.block_copier.submit(batch) {
                    self.feedback.extend(fills.into_iter().map(|fill| failed(fill, FillError::Refused)));
                }
            }
            Effect::CheckBlock(check) => {
                let id = check.check;
                if self.parts.checker.submit(check).is_err() {
                    self.feedback.push_back(Event::CheckDone { check: id, integrity: Integrity::Unknown });
                }
            }
            Effect::Lookup { lookup, keys, timeout } => match self.parts.deployment {
                Deployment::Clustered => self.parts.directory.lookup(lookup, keys, timeout),
                Deployment::StandAlone => self.feedback.push_back(Event::LookupFailed { lookup }),
            },
            Effect::Announce { changes } => self.parts.directory.announce(&changes),
            Effect::Inventory { slots, replicas } => self.parts.directory.inventory(&slots, &replicas),
            Effect::PeerFetch { node, request } => self.fetch(node, request),
            Effect::Place { place, keys, slot_bytes, reason, timeout } => {
                let deadline = Instant::now() + timeout;
                self.place(PlacementRequest { place, keys, slot_bytes, reason, deadline });
            }
            Effect::Offer { node, offer } => self.offer(node, offer),
            Effect::AnswerOffer { offer, taken, retry_after } => {
                self.with_peers(|peers| peers.answer_offer(offer, &taken, retry_after));
            }
            Effect::ServeHeader { serve, block, tier, checksums } => {
                self.with_peers(|peers| peers.serve_header(serve, block, tier, &checksums));
            }
            Effect::ServeObjects(objects) => self.with_peers(|peers| peers.serve_objects(&objects)),
            Effect::ServeAbsent { serve, block } => self.with_peers(|peers| peers.serve_absent(serve, block)),
            Effect::Diagnostic(report) => self.report(&report),
        }
    }

    fn reply(&mut self, session: SessionId, request: RequestId, reply: Reply) {
        if !self.sessions.contains_key(&session) {
            return;
        }
        let grants = self.grant_devices(session, &reply);
        let Some(connected) = self.sessions.get_mut(&session) else { return };
        if let Some((path, direction, blocks)) = connected.session.moved_blocks(&reply) {
            self.parts.metrics.blocks_moved(path, direction, blocks);
        }
        match grants {
            Some(grants) => connected.session.reply(request, reply, grants),
            // Its end returns the extents.
            None => connected.session.close(),
        }
        if let Some((phase, pending)) = connected.pending.remove(&request) {
            self.parts.metrics.phase(phase, pending.since.elapsed());
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
                connected.loading.insert(entry, TimedSpan { since, _span });
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

    fn command(&self, device: DeviceId, command: Command) -> Result<(), UnsentCommand> {
        match self.entry(device) {
            Some(entry) => entry.device.submit(command),
            None => Err(UnsentCommand { command, why: DeviceError::Lost }),
        }
    }

    /// Logs a diagnostic for the operator.
    fn report(&mut self, report: &Diagnostic) {
        match report {
            Diagnostic::CorruptBlock { device, page, key } => {
                tracing::error!(device = device.0, page = page.0, %key, "dropped a stored block that failed verification");
            }
            Diagnostic::CorruptMemory { slot, key } => {
                tracing::error!(
                    region = slot.region.0,
                    offset = slot.offset,
                    %key,
                    "dropped a block in DRAM that does not match its checksums: it was committed with wrong checksums, a process that maps the arena wrote to it, or the memory is faulty"
                );
            }
            Diagnostic::Unstorable { block_bytes, payload_bytes_max } => {
                tracing::warn!(
                    block_bytes,
                    payload_bytes_max,
                    "blocks of this layout do not fit a segment of the pool and never become durable; format the pool with a larger pool.segment_bytes"
                );
            }
            Diagnostic::Overcommitted { resource, error } => {
                let room = match resource {
                    QuotaResource::Dram => "memory",
                    QuotaResource::Nvme => "devices",
                };
                tracing::warn!(room, %error, "reservations of tenants exceed the capacity; those on devices are reduced proportionally");
            }
            Diagnostic::OffersRefused { layouts } => {
                tracing::warn!(
                    layouts,
                    "rejecting offers of blocks with new layouts: the layout table of this node is full except for entries reserved for local engines"
                );
            }
            Diagnostic::TenantErased { tenant, blocks } => {
                let name = lock(&self.parts.tenants).name(*tenant).cloned();
                let tenant = name.map_or_else(|| tenant.0.to_string(), |name| name.to_string());
                tracing::info!(tenant, blocks, "no block of a tenant without encryption keys is left");
            }
            Diagnostic::WritesStopped { device, reason } => self.stop_writes(*device, reason),
            Diagnostic::DeviceLost { device, reason } => {
                self.parts.metrics.device_lost(*device);
                self.parts.queue_grants.revoke_device(*device, "the device is lost");
                let mut path = String::new();
                if let Some(entry) = self.devices.get_mut(usize::from(device.0)).and_then(Option::as_mut) {
                    entry.lost = Some(reason.clone());
                    path = entry.device.info().description.to_string();
                }
                tracing::error!(
                    device = device.0,
                    path,
                    reason,
                    "device lost; continuing without its blocks. Restart the agent when the device is restored"
                );
            }
        }
    }

    /// Reports that a device rejects writes.
    fn stop_writes(&mut self, device: DeviceId, reason: &str) {
        self.parts.metrics.device_read_only(device);
        let Some(entry) = self.devices.get_mut(usize::from(device.0)).and_then(Option::as_mut) else {
            return;
        };
        let info = entry.device.info();
        let reason = info.write_error.get().cloned().unwrap_or_else(|| reason.to_owned());
        tracing::error!(
            device = device.0,
            path = %info.description,
            reason,
            "the device rejects writes; its blocks are still read. Restart the agent after the remedy"
        );
        entry.read_only = Some(reason);
    }

    fn place(&mut self, question: PlacementRequest) {
        let place = question.place;
        let pending = match self.parts.deployment {
            Deployment::Clustered => self.parts.directory.place(question),
            Deployment::StandAlone => Err(place),
        };
        if let Err(place) = pending {
            self.feedback.push_back(Event::PlaceFailed { place });
        }
    }

    /// Returns the name of a tenant if the core does not have it yet. The name of the default tenant is
    /// predefined.
    pub(crate) fn new_tenant_name(&mut self, tenant: TenantId) -> Option<TenantName> {
        if tenant == TenantId::DEFAULT || self.named.contains(&tenant) {
            return None;
        }
        let name = lock(&self.parts.tenants).name(tenant).cloned()?;
        self.named.insert(tenant);
        Some(name)
    }
}

fn lock(registry: &Mutex<TenantRegistry>) -> MutexGuard<'_, TenantRegistry> {
    registry.lock().unwrap_or_else(PoisonError::into_inner)
}

fn failed(fill: FillId, error: FillError) -> Event {
    Event::Fill { fill, update: FillUpdate::Failed(error) }
}
