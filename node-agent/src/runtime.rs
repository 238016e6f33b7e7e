//! Assembles an agent and shuts it down.
//!
//! Start order: memory, devices (their journals), core, ports, directory client, the core's thread,
//! sessions; ready. Each step needs the previous ones. A failing step ends the process with a remedy.
//!
//! Shutdown: stop accepting sessions and requests, write blocks that are not durable yet for up to
//! [`FLUSH_PATIENCE`], then stop the core and its dependencies. All devices together get
//! [`DEVICES_PATIENCE`]. A `kill -9` instead loses no block that was announced as durable.

mod stopping;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};
use reprise_agent_core::effect::{DeviceId, RegionId};
use reprise_agent_core::event::Event;
use reprise_agent_core::limits::{DEVICES_MAX, LOOKUPS_MAX};
use reprise_agent_core::{AgentCore, Settings as CoreSettings};
use reprise_buffers::{Arena, ArenaConfig, BufferError, HugePolicy};
use reprise_daemon::certificates::Certificates;
use reprise_daemon::guard::Guard;
use reprise_daemon::scrapers::Scrapers;
use reprise_identity::{Role, Security};
use reprise_policy::peer::{PeerEndpoint, TCP};
use reprise_policy::tenant::TenantRegistry;
use reprise_policy::{NodeMode, TenantId, TenantName};
use reprise_transport::{CompositeTransport, TcpSettings, TcpTransport, Transport};
use serde::Serialize;

use crate::admin::{AdminContext, AdminPort, AdminServer, ArenaInfo};
use crate::bindings::BindingsFile;
use crate::block_copier::BlockCopier;
use crate::checker::Checker;
use crate::config::{ArenaSettings, HugePages, PeerSettings, Settings};
use crate::core_loop::{Clock, CoreLoop, Inbox, Input, Liveness};
use crate::descriptors::ConnectionLimits;
use crate::device::{self, Device, DeviceContext};
use crate::directory::{
    CHANGES_QUEUED_MAX, DirectoryClient, DirectoryEvent, DirectorySettings, DirectorySink, Registration,
};
use crate::encryption::KeyReader;
use crate::error::{AgentError, ErrorKind};
use crate::executor::{Deployment, Executor, ExecutorParts, ReleasedDevice};
use crate::in_cluster::{ClusterNode, ClusterSettings};
use crate::metrics::Metrics;
use crate::modes::Modes;
use crate::peer;
use crate::public_tenant::PublicTenant;
use crate::queue_grants::QueueGrantService;
use crate::recorder::Recorder;
use crate::region_renewer::RegionRenewer;
use crate::session::{Identity, SessionContext, SessionServer, SessionServerSettings, TenantSalts, own_uid};
use crate::slack::ActiveProfiles;

/// Time limit for writing blocks at shutdown: two batches of 64 MiB to the slowest usable disk (50 MB/s).
const FLUSH_PATIENCE: Duration = Duration::from_secs(5);

/// Time limit for all devices to complete operations in flight. Together with [`FLUSH_PATIENCE`] this is
/// two thirds of the 30 s after which Kubernetes kills the pod. Blocks not written by then were not
/// announced as durable.
const DEVICES_PATIENCE: Duration = Duration::from_secs(15);

/// Time limit for connecting to the control plane.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(1);

/// Time limit for calls to the control plane other than lookups.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);

pub(crate) struct Runtime {
    inbox: Inbox,
    sessions: SessionServer,
    session_context: Arc<SessionContext>,
    core: JoinHandle<Executor>,
    directory: Arc<DirectoryClient>,
    peers: Option<Arc<CompositeTransport>>,
    admin: AdminServer,
    admin_context: Arc<AdminContext>,
    cluster: Option<ClusterNode>,
    /// Ends with the agent.
    _key_reader: KeyReader,
    ready: Ready,
}

/// Addresses of a ready agent, printed as one line.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Ready {
    ready: bool,
    admin: String,
    socket: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    peer: Option<String>,
}

/// The peer transport and its addresses.
struct PeerPort {
    peers: Arc<CompositeTransport>,
    listening: String,
    advertised: PeerEndpoint,
}

impl Runtime {
    /// Starts an agent, which is serving on return.
    ///
    /// # Errors
    /// The missing resource, its kind, and the remedy.
    pub(crate) fn start(settings: Settings, cluster: Option<ClusterSettings>) -> Result<Runtime, AgentError> {
        // First, because a startup probe waits for the response.
        let admin = AdminPort::bind(settings.admin)?;
        let security = open_security(&settings)?;
        let certificates = Certificates::start(&security, &settings.tls).map_err(|error| {
            AgentError::new(ErrorKind::Resource, "cannot spawn the certificates thread").with_source(error)
        })?;
        let guard = Guard::new(security.clone(), scrapers(&settings, cluster.as_ref())?);
        let arena = arena_config(&settings.arena);
        // Before the descriptors: an arena that exceeds the memory needs a different remedy.
        Arena::check(&arena).map_err(arena_error)?;
        let limits = ConnectionLimits::of(&settings, cluster.is_some())?;
        let clock = Clock::start();
        let tenants = Arc::new(Mutex::new(settings.tenant_registry()));
        let bindings = cluster.as_ref().map(ClusterSettings::bindings).transpose()?.flatten();
        let public = match &bindings {
            Some(bindings) => bindings.current().public().cloned(),
            None => settings.public_tenant.clone(),
        };
        let public_tenant = PublicTenant::new(public);
        let (inbox, inputs) = Inbox::new();
        let arena = Arc::new(allocate_arena(&arena)?);
        let mut metrics = Metrics::new(&settings.node.name, arena.coverage());
        metrics.register_certificates(&certificates);
        let metrics = Arc::new(metrics);
        let keys = settings.encryption_keys();
        let first_keys = keys.read_first()?;
        let context = DeviceContext {
            inbox: inbox.clone(),
            arena: arena.clone(),
            keys: keys.clone(),
            bandwidth: settings.bandwidth_weights(),
            clock,
            metrics: metrics.clone(),
        };
        let opened = device::open_all(&settings.pool, &context)?;
        let mut devices = Vec::with_capacity(opened.len());
        let mut pools = Vec::with_capacity(opened.len());
        for (index, opened) in (0u8..).zip(opened) {
            restore_tenant_names(&tenants, &opened.names);
            metrics.device_opened(DeviceId(index), opened.device.info());
            devices.push(opened.device);
            pools.push((opened.pool, opened.stored));
        }
        let regions: Vec<(RegionId, u64)> =
            arena.regions().iter().map(|region| (RegionId(region.id()), region.bytes())).collect();
        let core = AgentCore::new(core_settings(&settings), pools, &regions);
        let port = settings
            .peers
            .as_ref()
            .map(|peers| listen_for_peers((&settings, peers, &security), limits.peers, &inbox, &arena))
            .transpose()?;
        let modes = Arc::new(Mutex::new(Modes::default()));
        let reached_at = |listening: SocketAddr| match &cluster {
            Some(cluster) => cluster.reached_at(listening),
            None => listening,
        };
        let registration = Registration {
            name: settings.node.name.clone(),
            peer_endpoints: port.iter().map(|port| port.advertised.clone()).collect(),
            admin_address: reached_at(admin.address()).to_string(),
            failure_domain: match &cluster {
                Some(cluster) => cluster.failure_domain(&settings),
                None => settings.node.failure_domain.clone(),
            },
            version: env!("CARGO_PKG_VERSION").to_owned(),
        };
        let endpoints = OwnEndpoints {
            peer: port.as_ref().map(|port| port.advertised.address.clone()),
            admin: registration.admin_address.clone(),
            socket_directory: settings.session.socket.parent().unwrap_or(Path::new("/")).to_owned(),
        };
        let sink = directory_sink(inbox.clone(), modes.clone());
        let directory =
            Arc::new(start_directory((&settings, &security), registration, sink, tenants.clone())?);
        let deployment =
            if settings.controlplane.is_some() { Deployment::Clustered } else { Deployment::StandAlone };
        let peers = port.as_ref().map(|port| port.peers.clone());
        let (releases, released) = bounded(DEVICES_MAX);
        let complete = Arc::new(AtomicBool::new(cluster.is_none()));
        let queue_limits = settings.session.queue_grants;
        let queue_grants = Arc::new(match &cluster {
            Some(_) => QueueGrantService::of_allocations(queue_limits),
            None => QueueGrantService::new(queue_limits),
        });
        // The first input of the core: sessions start later.
        let _ = inbox.send(Input::Event(public_tenant_event(&public_tenant, &tenants)));
        let parts = ExecutorParts {
            devices,
            released: releases,
            directory: directory.clone(),
            deployment,
            complete: complete.clone(),
            peers: peers.clone(),
            tenants: tenants.clone(),
            public_tenant: public_tenant.clone(),
            checker: Checker::start(arena.clone(), inbox.clone())?,
            block_copier: BlockCopier::start(arena.clone(), inbox.clone(), settings.bandwidth_weights())?,
            region_renewer: RegionRenewer::start(arena.clone(), inbox.clone())?,
            keys: keys.clone(),
            metrics: metrics.clone(),
            queue_grants: queue_grants.clone(),
        };
        let liveness = Liveness::new(clock);
        let core_loop = CoreLoop::new(core, (clock, liveness.clone()), inputs, Executor::new(parts));
        let core = std::thread::Builder::new()
            .name("core".to_owned())
            .spawn(move || core_loop.run())
            .map_err(|error| {
                AgentError::new(ErrorKind::Resource, "cannot spawn the core thread").with_source(error)
            })?;
        let key_reader = KeyReader::start(keys.clone(), first_keys, inbox.clone())?;
        let identity = cluster
            .as_ref()
            .zip(bindings.clone())
            .map(|(cluster, bindings)| Identity::new(bindings, cluster.token_review()));
        let slack = ActiveProfiles::from_files(&settings.slack_profiles)?;
        let recorder = Arc::new(Recorder::new(settings.node.name.clone()));
        let session_context = Arc::new(SessionContext {
            inbox: inbox.clone(),
            arena: arena.clone(),
            node: settings.node.name.clone(),
            root: "/".into(),
            identity,
            users: settings.session.users.clone().with_privileged([0, own_uid()?]),
            salts: TenantSalts::within(settings.session.salts.clone()),
            keys,
            public_tenant: public_tenant.clone(),
            tenants: tenants.clone(),
            draining: AtomicBool::new(false),
            rejected: metrics.rejected().clone(),
            slack: slack.clone(),
            queue_grants: queue_grants.clone(),
            recorder: recorder.clone(),
        });
        let server = SessionServerSettings {
            session: settings.session.clone(),
            sessions_max: limits.sessions,
            context: session_context.clone(),
        };
        let sessions = SessionServer::start(server)?;
        let admin_context = Arc::new(AdminContext {
            inbox: inbox.clone(),
            liveness,
            metrics,
            directory: directory.clone(),
            peers: peers.clone(),
            arena: ArenaInfo {
                bytes: settings.arena.bytes,
                regions: arena.regions().len(),
                page_kind: arena.coverage().to_string(),
            },
            ready: AtomicBool::new(cluster.is_none()),
            tenants,
            public_tenant,
            slack,
            queue_grants,
            recorder,
            certificates,
            settings,
            guard,
            connections_max: limits.admin,
        });
        let admin = admin.serve(admin_context.clone())?;
        let parts = ClusterParts {
            context,
            modes,
            complete,
            bindings,
            endpoints,
            released,
            admin: admin_context.clone(),
        };
        let cluster = cluster.map(|cluster| ClusterNode::start(cluster, parts)).transpose()?;
        let ready = Ready {
            ready: true,
            admin: admin.address().to_string(),
            socket: admin_context.settings.session.socket.clone(),
            peer: port.map(|port| port.listening),
        };
        Ok(Runtime {
            inbox,
            sessions,
            session_context,
            core,
            directory,
            peers,
            admin,
            admin_context,
            cluster,
            _key_reader: key_reader,
            ready,
        })
    }

    /// Returns the addresses of the agent.
    pub(crate) fn ready(&self) -> &Ready {
        &self.ready
    }

    /// Stops within a bounded time; see the module.
    pub(crate) fn stop(mut self) {
        // Devices keep their state from here on, and the final status is written concurrently.
        let cluster = self.cluster.take().map(ClusterNode::begin_stop);
        self.admin_context.ready.store(false, Ordering::Release);
        self.session_context.draining.store(true, Ordering::Release);
        self.sessions.stop_accepting();
        let (durable, is_durable) = bounded(1);
        // The core runs until `Input::Stop` below.
        let _ = self.inbox.send(Input::Flush(durable));
        if is_durable.recv_timeout(FLUSH_PATIENCE).is_err() {
            tracing::warn!(
                "some blocks did not become durable within {FLUSH_PATIENCE:?} and are lost; none was announced as durable"
            );
        }
        let _ = self.inbox.send(Input::Stop);
        // A panic of the core would have aborted the process.
        let executor = self.core.join();
        if let Some(peers) = &self.peers {
            peers.shutdown();
        }
        self.directory.shutdown();
        if let Ok(executor) = executor {
            let left = stopping::stop_all(executor.into_devices(), Device::stop, DEVICES_PATIENCE);
            if left > 0 {
                tracing::warn!(
                    devices = left,
                    "device operations did not complete within {DEVICES_PATIENCE:?}; stopping without waiting for them"
                );
            }
        }
        self.admin.stop();
        if let Some(cluster) = cluster {
            cluster.join();
        }
    }
}

/// Components that the Kubernetes side of an agent shares with the rest of it.
pub(crate) struct ClusterParts {
    pub(crate) context: DeviceContext,
    pub(crate) modes: Arc<Mutex<Modes>>,
    /// Set once every device of the first spec was attempted; see `ExecutorParts`.
    pub(crate) complete: Arc<AtomicBool>,
    pub(crate) bindings: Option<BindingsFile>,
    pub(crate) endpoints: OwnEndpoints,
    pub(crate) released: Receiver<ReleasedDevice>,
    pub(crate) admin: Arc<AdminContext>,
}

/// Addresses of the agent.
#[derive(Clone, Debug)]
pub(crate) struct OwnEndpoints {
    /// Address for other agents.
    pub(crate) peer: Option<String>,
    /// For metrics, health and status.
    pub(crate) admin: String,
    /// Directory of the session socket.
    pub(crate) socket_directory: PathBuf,
}

/// Returns the event that declares the current public tenant.
pub(crate) fn public_tenant_event(public: &PublicTenant, tenants: &Mutex<TenantRegistry>) -> Event {
    let tenants = tenants.lock().unwrap_or_else(PoisonError::into_inner);
    Event::PublicTenant(public.current().and_then(|name| tenants.number_of(&name)))
}

/// Registers tenant names recovered with blocks.
pub(crate) fn restore_tenant_names(tenants: &Mutex<TenantRegistry>, names: &BTreeMap<TenantId, TenantName>) {
    let mut tenants = tenants.lock().unwrap_or_else(PoisonError::into_inner);
    for (number, name) in names {
        if let Err(error) = tenants.recall(name, *number) {
            tracing::warn!(tenant = %name, number = number.0, %error, "cannot register a recovered tenant name: blocks of this tenant cannot be copied to other nodes");
        }
    }
}

/// Reads the certificates of this agent.
fn open_security(settings: &Settings) -> Result<Security, AgentError> {
    let role = Role::Agent(settings.node.name.clone());
    let peers = settings.peers.as_ref().map(|peers| peers.listen);
    let listeners: Vec<SocketAddr> = [settings.admin].into_iter().chain(peers).collect();
    let opened = settings.tls.open(&role, &listeners);
    opened.map_err(|error| AgentError::new(ErrorKind::Config, "cannot use [tls]").with_source(error))
}

/// Returns the tokens that may read metrics: that of a file, or in a cluster those that the API server accepts.
fn scrapers(settings: &Settings, cluster: Option<&ClusterSettings>) -> Result<Scrapers, AgentError> {
    match (&settings.admin_token_file, cluster) {
        (Some(path), _) => Scrapers::of_file(path)
            .map_err(|error| AgentError::new(ErrorKind::Config, format!("admin.token_file: {error}"))),
        (None, Some(cluster)) => Ok(Scrapers::reviewed(cluster.scraper_review())),
        (None, None) => Ok(Scrapers::none()),
    }
}

fn arena_config(settings: &ArenaSettings) -> ArenaConfig {
    let huge = match settings.huge_pages {
        HugePages::Prefer => HugePolicy::Prefer,
        HugePages::Never => HugePolicy::Never,
    };
    ArenaConfig { bytes: settings.bytes, region_bytes: settings.region_bytes, huge }
}

fn allocate_arena(config: &ArenaConfig) -> Result<Arena, AgentError> {
    let arena = Arena::new(config).map_err(arena_error)?;
    tracing::info!(bytes = config.bytes, regions = arena.regions().len(), pages = %arena.coverage(), "arena ready");
    Ok(arena)
}

fn arena_error(error: BufferError) -> AgentError {
    AgentError::new(ErrorKind::Resource, "cannot allocate arena.bytes").with_source(error)
}

fn core_settings(settings: &Settings) -> CoreSettings {
    let cache = &settings.cache;
    CoreSettings {
        writeback_delay: settings.writeback_delay,
        writeback_bytes: settings.writeback_bytes,
        slack_delay: settings.slack_delay,
        load_deadline_default: settings.load_deadline,
        lookup_timeout: settings.lookup_timeout,
        read_bytes_default: settings.read_bytes,
        pool_free_permille: cache.pool_free_permille,
        arena_unsaved_permille: cache.arena_unsaved_permille,
        arena_session_permille: cache.arena_session_permille,
        arena_serves_permille: cache.arena_serves_permille,
        reservation_timeout: settings.reservation,
        load_hold_timeout: settings.load_hold,
        dram_eviction: cache.eviction,
        nvme_eviction: settings.pool.eviction,
        admission: settings.pool.admission,
        daily_write_budget: settings.pool.daily_write_budget,
        skip_dram: cache.skip_dram,
        placement_bandwidth: settings.placement.bandwidth,
        hot_reads: settings.placement.hot_reads,
        hot_window: settings.placement.hot_window,
        tenants: settings.tenants.iter().map(|tenant| tenant.quotas).collect(),
        bandwidth: settings.bandwidth_weights(),
        prefetch: settings.prefetch,
        retention_permille: settings.retention.permille,
        retention_blocks_max: settings.retention.blocks_per_tenant,
        retention_ttl_max: settings.retention.ttl_max,
        ..CoreSettings::default()
    }
}

fn listen_for_peers(
    (settings, peers, security): (&Settings, &PeerSettings, &Security),
    connections_max: usize,
    inbox: &Inbox,
    arena: &Arc<Arena>,
) -> Result<PeerPort, AgentError> {
    if let Security::Tls(_) = security {
        tracing::info!(records = reprise_transport::record_layer(), "connections to peers use TLS 1.3");
    }
    let tcp = TcpSettings {
        credit_bytes: peers.credit_bytes,
        stall_timeout: peers.stall_timeout,
        connections_max,
        security: security.clone(),
        weights: settings.bandwidth_weights_by_name(),
        ..TcpSettings::new(peers.listen, settings.node.name.clone())
    };
    let mut transports = CompositeTransport::builder(peer::sink(inbox.clone()));
    let bind = |sink| TcpTransport::bind(tcp, arena.clone(), sink).map(Arc::new);
    let tcp = transports.add(TCP, bind).map_err(|error| {
        let context =
            format!("cannot listen on peers.listen = '{}'; choose another port, or 0 for any", peers.listen);
        AgentError::new(ErrorKind::Resource, context).with_source(error)
    })?;
    let listening = tcp.local_address().to_string();
    let advertised = PeerEndpoint::tcp(peers.advertise.clone().unwrap_or_else(|| listening.clone()));
    Ok(PeerPort { peers: Arc::new(transports.build()), listening, advertised })
}

fn start_directory(
    (settings, security): (&Settings, &Security),
    registration: Registration,
    sink: DirectorySink,
    tenants: Arc<Mutex<TenantRegistry>>,
) -> Result<DirectoryClient, AgentError> {
    let directory = DirectorySettings {
        endpoints: settings.controlplane.as_ref().map(|plane| plane.endpoints.clone()).unwrap_or_default(),
        registration,
        connect_timeout: CONNECT_TIMEOUT,
        call_timeout: CALL_TIMEOUT,
        changes_queued_max: CHANGES_QUEUED_MAX,
        lookups_max: LOOKUPS_MAX,
        tenants,
        security: security.clone(),
    };
    DirectoryClient::start(directory, sink).map_err(|error| {
        AgentError::new(ErrorKind::Resource, "cannot start the control plane client").with_source(error)
    })
}

/// Converts a mode of the protocol; `None` if this agent does not know it.
fn mode_of(mode: reprise_proto::controlplane::NodeMode) -> Option<NodeMode> {
    use reprise_proto::controlplane::NodeMode as Wire;
    match mode {
        Wire::Unspecified => None,
        Wire::Active => Some(NodeMode::Active),
        Wire::Cordoned => Some(NodeMode::Cordoned),
        Wire::Draining => Some(NodeMode::Draining),
    }
}

/// Returns a sink that passes the directory's events to the core and logs changes that matter to operators.
fn directory_sink(inbox: Inbox, modes: Arc<Mutex<Modes>>) -> DirectorySink {
    Arc::new(move |event| {
        let event = match event {
            DirectoryEvent::InventoryRequested { slots } => Event::InventoryWanted { slots },
            DirectoryEvent::LookupCompleted { lookup, found } => Event::LookupAnswered { lookup, found },
            DirectoryEvent::Budget(grant) => Event::Budget(grant),
            DirectoryEvent::Mode { mode, number } => match mode_of(mode) {
                Some(mode) => match modes
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .set_by_control_plane(mode, number)
                {
                    Some(event) => event,
                    None => return,
                },
                None => return,
            },
            DirectoryEvent::Move(order) => Event::Move(order),
            DirectoryEvent::LookupFailed { lookup } => Event::LookupFailed { lookup },
            DirectoryEvent::PlacementCompleted { place, answers } => Event::PlaceAnswered { place, answers },
            DirectoryEvent::PlacementFailed { place } => Event::PlaceFailed { place },
            DirectoryEvent::StrangerDecided { request, acts_for } => {
                let _ = inbox.send(Input::StrangerDecided { request, acts_for });
                return;
            }
            DirectoryEvent::Registered { member, node, epoch } => {
                tracing::info!(member, node = node.0, epoch = epoch.0, "registered with the control plane");
                return;
            }
            DirectoryEvent::Connected => {
                tracing::info!(condition = "control_plane_answers", "the control plane is reachable");
                return;
            }
            DirectoryEvent::Disconnected => {
                tracing::warn!("the control plane is unreachable; local hits continue, retrying");
                return;
            }
        };
        // Fails only if the core has stopped.
        let _ = inbox.send(Input::Event(event));
    })
}
