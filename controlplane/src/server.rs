//! Start, background tasks and shutdown of a control-plane member.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use reprise_controlplane_core::{AssignedSlots, LivenessSettings, agent_calls, member_parts};
use reprise_controlplane_store::{
    EmbeddedStore, EtcdSettings, EtcdStore, MemoryStore, Store, StoreError, TimeToLive,
};
use reprise_daemon::certificates::Certificates;
use reprise_daemon::connections::ConnectionLimit;
use reprise_daemon::guard::Guard;
use reprise_daemon::http;
use reprise_daemon::rejected_connections::Listener;
use reprise_daemon::scrapers::Scrapers;
use reprise_identity::limits::{CONNECTION_AGE_MAX, CONNECTION_GRACE, Validity};
use reprise_identity::{Role, Security};
use reprise_policy::Amounts;
use reprise_policy::shards::MemberName;
use reprise_proto::controlplane::directory_server::DirectoryServer;
use reprise_proto::controlplane::events_server::EventsServer;
use reprise_proto::controlplane::membership_server::MembershipServer;
use reprise_proto::controlplane::placement_server::PlacementServer;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tonic::transport::Server;
use tonic::transport::server::Router;

use crate::admin::{self, Admin};
use crate::admission::Admission;
use crate::answers::Answers;
use crate::background::Background;
use crate::cluster::Cluster;
use crate::config::{Config, EventsConfig, StoreConfig};
use crate::descriptors::ConnectionLimits;
use crate::directory::DirectoryService;
use crate::events::service::EventsService;
use crate::events::{Events, Publisher};
use crate::former_protocol::FormerProtocol;
use crate::grpc_server::caller::Authorised;
use crate::grpc_server::{self, GrpcServerError};
use crate::identity::Identity;
use crate::membership::MembershipService;
use crate::metrics::Metrics;
use crate::modes;
use crate::placement::{PlacementParts, PlacementService};
use crate::registry::{self, NODES_MAX, Registry, RegistryError};
use crate::shards::Shards;
use crate::store_keys::Family;
use crate::store_watch;
use crate::tenants::Tenants;

/// Longest message; 8,192 keys with their operations take 136 KiB.
pub(crate) const MESSAGE_BYTES_MAX: usize = 256 << 10;
/// HTTP/2 windows: large enough for a full batch of keys or replies without waiting for a window update.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 8 << 20;
/// Maximum number of concurrent calls on one connection.
pub(crate) const STREAMS_MAX: u32 = 1024;
/// HTTP/2 keep-alive: a peer that vanished without closing is detected within the sum of both.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEP_ALIVE_ANSWER: Duration = Duration::from_secs(5);
/// Interval between sweeps of the directory, and between checks whether a sweep is needed.
const SWEEP_EVERY: Duration = Duration::from_millis(20);
/// Time to wait for etcd at start, so that etcd and members may start together. After it the start fails.
const STORE_WITHIN: Duration = Duration::from_secs(15);
/// Pause between attempts to open the store.
const STORE_PAUSE: Duration = Duration::from_millis(500);
/// Interval at which the files of the connection to etcd are compared with those in use.
const STORE_FILES_CHECKED_EVERY: Duration = Duration::from_secs(2);
/// Failed attempts in a row to use changed files after which a warning is logged. The first failure may come from files
/// that are being replaced.
const STORE_FILES_FAILURES: u32 = 2;
/// Time for running calls to finish at shutdown; streams end at once.
const SHUTDOWN_WAIT: Duration = Duration::from_secs(2);

/// A running control-plane member.
#[derive(Debug)]
pub struct ControlPlane {
    /// Listen address of the gRPC services.
    pub grpc: SocketAddr,
    /// Listen address of the admin endpoint.
    pub admin: SocketAddr,
    /// Publisher of KV events, if configured.
    pub publisher: Option<Publisher>,
    cluster: Arc<Cluster>,
    admin_state: Arc<Admin>,
    stop: watch::Sender<bool>,
    grpc_task: JoinHandle<Result<(), GrpcServerError>>,
    admin_task: JoinHandle<()>,
    shards: Arc<Shards>,
    background: Background,
    /// Keeps this member registered; deletes the registration when `stop` is set.
    registration: JoinHandle<()>,
    /// Reason for which the store rejects this process, once it does.
    store_lost: watch::Receiver<Option<String>>,
}

impl ControlPlane {
    /// Opens the store, binds both addresses and starts to serve. Errors name the setting to change.
    pub async fn start(config: Config) -> anyhow::Result<ControlPlane> {
        config.check()?;
        let admin = bind("admin", config.admin).await?;
        let store = open_store(config.store.clone()).await?;
        ControlPlane::start_listening(store, config, admin).await
    }

    /// Starts on an open store, which several members of one process can share.
    pub async fn start_with_store(store: Arc<dyn Store>, config: Config) -> anyhow::Result<ControlPlane> {
        let admin = bind("admin", config.admin).await?;
        ControlPlane::start_listening(store, config, admin).await
    }

    /// Starts with a bound admin port. Requests to it wait until the start is complete, start-up probes
    /// included.
    async fn start_listening(
        store: Arc<dyn Store>,
        config: Config,
        admin_listener: TcpListener,
    ) -> anyhow::Result<ControlPlane> {
        let identity = Identity::load_or_create(store.as_ref())
            .await
            .context("cannot read the identity of the store")?;
        let listeners: Vec<SocketAddr> =
            [config.listen, config.admin].into_iter().chain(config.events.addresses()).collect();
        let security = config.tls.open(&Role::Member, &listeners).context("cannot use [tls]")?;
        let certificates =
            Certificates::start(&security, &config.tls).context("cannot spawn the certificates thread")?;
        let registry = Registry::new(store.clone(), identity.clone());
        let (known, known_at) = registry.nodes().await.context("cannot read the node records")?;
        let (metrics, mut metric_registry) = Metrics::new();
        certificates.register(&mut metric_registry);
        let settings = LivenessSettings {
            dead_after: config.membership.dead_after.0,
            forget_after: config.membership.forget_after.0,
        };
        let history = usize::try_from(config.events.history.0).context("events.history")?;
        let events = Events::new(history);
        let cluster = Arc::new(Cluster::new(settings, config.limits.watchers, events, metrics));
        cluster.restore(known, known_at);
        // Load modes before serving, so that a cordoned or draining node is not chosen right after the start.
        let modes = store.range(Family::Modes.prefix().as_bytes(), NODES_MAX).await;
        let modes = modes.context("cannot read the modes of nodes")?;
        cluster.apply_modes(modes::RECORDS.listing(&modes));

        let workers = tokio::runtime::Handle::current().metrics().num_workers();
        let limits = ConnectionLimits::of(workers, &config.events)?;
        let grpc_listener = bind("listen", config.listen).await?;
        let (grpc, admin) = (grpc_listener.local_addr()?, admin_listener.local_addr()?);
        let mut background = Background::default();
        let events = EventsConfig { subscribers: limits.events, ..config.events.clone() };
        let publisher = Publisher::start(cluster.clone(), (&events, &security), &mut background).await?;
        let shards = Arc::new(shards(&config, (store.clone(), identity.clone()), grpc)?);
        if let StoreConfig::Embedded { .. } = config.store {
            shards.delete_former_members().await.context("cannot delete former members from the store")?;
        }
        let admin_state = Admin::new((cluster.clone(), shards.clone()), metric_registry, certificates);
        let stop = watch::Sender::new(false);
        let admission = Admission::new(workers, config.limits.calls_at_once);
        let store_lost = watch::Sender::new(None);
        let lost = store_lost.subscribe();
        let tenants = Arc::new(Tenants::new(store.clone(), identity.clone()));
        let directory = Arc::new(DirectoryService::new(cluster.clone(), shards.clone(), admission));
        let noticing = watch_store_identity(store.clone(), identity.clone(), store_lost.clone());
        background.spawn_finite("identity of the store", noticing);
        let placement = PlacementService::new(PlacementParts {
            cluster: cluster.clone(),
            shards: shards.clone(),
            tenants: tenants.clone(),
            directory: directory.clone(),
            store: store.clone(),
            identity: identity.clone(),
            security: security.clone(),
        });
        let membership = MembershipService::new(
            cluster.clone(),
            registry,
            shards.clone(),
            (&config.membership, security.clone()),
            store_lost,
        );
        let services = Services {
            membership: MembershipServer::new(membership),
            placement: PlacementServer::new(placement),
            directory: DirectoryServer::from_arc(directory),
            events: EventsServer::new(EventsService::new(cluster.clone())),
        };
        let age_max = connection_age_max(&security);
        let routers = (0..workers).map(|_| router(&services, age_max)).collect();
        let rejected = cluster.metrics.rejected.clone();
        let limit = ConnectionLimit::of(&security, Listener::Grpc, limits.grpc, rejected);
        let accepted = (grpc_listener, limit);
        let stopped = stop.subscribe();
        let secured = security.clone();
        let grpc_task =
            tokio::spawn(async move { grpc_server::serve(accepted, &secured, routers, stopped).await });
        // Set before the admin server runs: a start-up probe may already wait on the port.
        admin_state.set_ready();
        let routes = admin::router(admin_state.clone());
        let stopped = wait(stop.subscribe());
        let guard = Guard::new(security, scrapers(&config)?);
        let limit = guard.limit(limits.admin, cluster.metrics.rejected.clone());
        let admin_task = tokio::spawn(http::serve(admin_listener, (routes, guard), limit, stopped));
        background.spawn_permanent("node expiry", expire_nodes(cluster.clone(), settings.dead_after));
        background.spawn_permanent("directory sweeps", sweep_directory(cluster.clone()));
        background.spawn_permanent("members", follow_members(shards.clone()));
        background.spawn_permanent("slots", follow_slots(cluster.clone(), shards.clone()));
        background.spawn_finite("absent nodes", stop_expecting_absent(cluster.clone()));
        background.spawn_permanent("budgets", follow_tenants(tenants.clone()));
        background.spawn_permanent("nodes", follow_nodes(store.clone(), cluster.clone()));
        background.spawn_permanent("modes", follow_modes(store, cluster.clone()));
        background.spawn_permanent("ledgers", rebalance_ledgers(cluster.clone(), shards.clone(), tenants));
        let registration = tokio::spawn(keep_registered(shards.clone(), stop.subscribe()));
        Ok(ControlPlane {
            grpc,
            admin,
            publisher,
            cluster,
            admin_state,
            stop,
            grpc_task,
            admin_task,
            shards,
            background,
            registration,
            store_lost: lost,
        })
    }

    /// Ends all streams, waits up to two seconds for running calls, and stops.
    pub async fn shutdown(mut self) {
        self.admin_state.set_closing();
        self.cluster.close();
        self.shards.close();
        self.stop.send_replace(true);
        self.background.abort_all();
        let (mut grpc_task, mut admin_task) = (self.grpc_task, self.admin_task);
        let mut registration = self.registration;
        let all = async {
            // The task has logged its errors.
            let _ = (&mut registration).await;
            let served = (&mut grpc_task).await;
            if let Ok(Err(error)) = served {
                tracing::error!(%error, "the gRPC server ended with an error");
            }
            let _ = (&mut admin_task).await;
        };
        if timeout(SHUTDOWN_WAIT, all).await.is_err() {
            tracing::warn!("closing connections that are still open at shutdown");
            grpc_task.abort();
            admin_task.abort();
            registration.abort();
        }
    }

    /// Returns when the member cannot continue: a server or a task ended by itself ([`crate::background`]),
    /// or the store rejects this process. A new process opens the store again; meanwhile agents work with the
    /// blocks that they hold.
    pub async fn failed(&mut self) -> anyhow::Error {
        let lost =
            async |lost: &mut watch::Receiver<Option<String>>| match lost.wait_for(Option::is_some).await {
                Ok(reason) => reason.clone().unwrap_or_default(),
                // The services, which hold the sender, are gone. Another branch reports the cause.
                Err(_) => std::future::pending().await,
            };
        tokio::select! {
            reason = lost(&mut self.store_lost) => {
                anyhow::anyhow!("the store rejects this process until it restarts: {reason}")
            }
            ended = &mut self.grpc_task => anyhow::anyhow!("the gRPC server ended: {ended:?}"),
            ended = &mut self.admin_task => anyhow::anyhow!("the admin server ended: {ended:?}"),
            ended = &mut self.registration => anyhow::anyhow!("the registration ended: {ended:?}"),
            ended = self.background.next_failure() => anyhow::Error::new(ended).context("this member cannot continue"),
        }
    }
}

/// The gRPC services; every gRPC thread serves the same instances.
struct Services {
    membership: MembershipServer<MembershipService>,
    placement: PlacementServer<PlacementService>,
    directory: DirectoryServer<DirectoryService>,
    events: EventsServer<EventsService>,
}

/// Age at which a connection is replaced, so that clients with certificates of the same validity never keep one until its
/// end. The client opens another one; calls in progress have the grace to end, and streams are opened again.
fn connection_age_max(security: &Security) -> Duration {
    match security {
        Security::Plain => CONNECTION_AGE_MAX,
        Security::Tls(tls) => Validity::from(&*tls.credentials()).replaced_within(),
    }
}

fn router(services: &Services, age_max: Duration) -> Router {
    Server::builder()
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(STREAMS_MAX)
        .http2_keepalive_interval(Some(KEEP_ALIVE_EVERY))
        .http2_keepalive_timeout(Some(KEEP_ALIVE_ANSWER))
        .max_connection_age(age_max)
        .max_connection_age_grace(CONNECTION_GRACE)
        .add_service(Authorised(services.membership.clone().max_decoding_message_size(MESSAGE_BYTES_MAX)))
        .add_service(Authorised(services.directory.clone().max_decoding_message_size(MESSAGE_BYTES_MAX)))
        .add_service(Authorised(services.placement.clone().max_decoding_message_size(MESSAGE_BYTES_MAX)))
        .add_service(Authorised(services.events.clone().max_decoding_message_size(MESSAGE_BYTES_MAX)))
        .add_service(FormerProtocol::<0>)
        .add_service(FormerProtocol::<1>)
        .add_service(FormerProtocol::<2>)
        .add_service(FormerProtocol::<3>)
}

async fn wait(mut stop: watch::Receiver<bool>) {
    // An error means that the sender is gone, which also means stop.
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn bind(field: &'static str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}: change '{field}' or free it"))
}

/// Tokens of scrapers that have no client certificate.
fn scrapers(config: &Config) -> anyhow::Result<Scrapers> {
    match &config.admin_token_file {
        None => Ok(Scrapers::none()),
        Some(path) => Scrapers::of_file(path).map_err(anyhow::Error::msg).context("admin_token_file"),
    }
}

async fn open_store(config: StoreConfig) -> anyhow::Result<Arc<dyn Store>> {
    match config {
        StoreConfig::Memory {} => Ok(Arc::new(MemoryStore::new())),
        StoreConfig::Embedded { path } => {
            let opened = tokio::task::spawn_blocking(move || EmbeddedStore::open(&path)).await?;
            Ok(Arc::new(opened.context("cannot open the store")?))
        }
        StoreConfig::Etcd(etcd) => {
            let store = open_etcd(&etcd.settings()?).await.context("cannot open the store")?;
            tokio::spawn(follow_files(store.clone()));
            Ok(Arc::new(store))
        }
    }
}

/// Connects to etcd again after changes of the files of its certificates or password.
async fn follow_files(store: EtcdStore) {
    let mut failures: u32 = 0;
    loop {
        sleep(STORE_FILES_CHECKED_EVERY).await;
        match store.use_changed_files().await {
            Ok(is_changed) => {
                if is_changed {
                    tracing::info!("use new files for the connection to etcd");
                }
                failures = 0;
            }
            Err(error) => {
                failures = failures.saturating_add(1);
                if failures == STORE_FILES_FAILURES {
                    tracing::warn!(%error, "cannot use new files for the connection to etcd; retrying");
                }
            }
        }
    }
}

/// Connects to etcd, and retries while etcd does not answer.
async fn open_etcd(settings: &EtcdSettings) -> Result<EtcdStore, StoreError> {
    let give_up = Instant::now() + STORE_WITHIN;
    loop {
        match EtcdStore::connect(settings).await {
            Err(StoreError::Unavailable { reason }) if Instant::now() < give_up => {
                tracing::info!(condition = "waiting_for_etcd", reason, "etcd does not answer yet");
                sleep(STORE_PAUSE).await;
            }
            outcome => return outcome,
        }
    }
}

/// This member's place among the members; `grpc` is its listen address.
fn shards(config: &Config, store: (Arc<dyn Store>, Identity), grpc: SocketAddr) -> anyhow::Result<Shards> {
    let address = config.member.advertise.clone().unwrap_or_else(|| grpc.to_string());
    let name = MemberName::new(config.member.name.as_ref().unwrap_or(&address)).context("member.name")?;
    let time_to_live = TimeToLive::new(config.member.time_to_live.0).context("member.time_to_live")?;
    Ok(Shards::new(store, name, address, time_to_live))
}

async fn follow_members(shards: Arc<Shards>) {
    shards.follow().await;
}

/// Keeps the directory's slots equal to the slots of this member.
async fn follow_slots(cluster: Arc<Cluster>, shards: Arc<Shards>) {
    let mut news = shards.watch();
    loop {
        let AssignedSlots { slots, epoch } = shards.assigned_slots(&cluster.owned());
        cluster.set_owned_slots(&slots, epoch);
        if news.changed().await.is_err() {
            return;
        }
    }
}

/// Applies registrations with other members, and removals of nodes.
async fn follow_nodes(store: Arc<dyn Store>, cluster: Arc<Cluster>) {
    store_watch::follow(&store, registry::RECORDS, |revision, update| {
        cluster.apply_store_update(revision, update);
    })
    .await;
}

/// Applies mode changes from the store.
async fn follow_modes(store: Arc<dyn Store>, cluster: Arc<Cluster>) {
    store_watch::follow(&store, modes::RECORDS, |_, update| cluster.apply_modes(update)).await;
}

async fn follow_tenants(tenants: Arc<Tenants>) {
    tenants.follow().await;
}

/// Keeps the ledgers consistent with map, budgets and nodes, and rebalances their grants.
async fn rebalance_ledgers(cluster: Arc<Cluster>, shards: Arc<Shards>, tenants: Arc<Tenants>) {
    let mut ticks = interval(agent_calls::LEDGER_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut overcommitted = Amounts::default();
    loop {
        ticks.tick().await;
        agent_calls::update_ledgers(&mut Answers::new(&cluster, &shards, &tenants), cluster.now());
        // Keep the last value while a node has not reported, so that an agent's restart does not log a
        // warning.
        let Some(capacity) = cluster.capacity_known() else { continue };
        let now = tenants.overcommitted(capacity);
        cluster.metrics.set_overcommitted(now);
        if now != overcommitted && now != Amounts::default() {
            tracing::warn!(
                dram_bytes = now.dram,
                nvme_bytes = now.nvme,
                "tenant reservations exceed the capacity of live nodes: lower them by these amounts, or add nodes"
            );
        }
        overcommitted = now;
    }
}

/// Reports when the store has been replaced or restored since the start.
async fn watch_store_identity(
    store: Arc<dyn Store>,
    identity: Identity,
    lost: watch::Sender<Option<String>>,
) {
    identity.wait_until_replaced(&store).await;
    let reason = RegistryError::OtherStore.to_string();
    lost.send_if_modified(|lost| lost.is_none().then(|| *lost = Some(reason)).is_some());
}

/// Stops waiting for nodes that have not registered since the start.
async fn stop_expecting_absent(cluster: Arc<Cluster>) {
    sleep(member_parts::EXPECTED_FOR).await;
    cluster.stop_expecting_absent();
}

async fn keep_registered(shards: Arc<Shards>, stop: watch::Receiver<bool>) {
    shards.keep_registered(stop).await;
}

/// Expires silent nodes at their deadlines.
async fn expire_nodes(cluster: Arc<Cluster>, dead_after: Duration) {
    loop {
        sleep(member_parts::expiry_wait(cluster.expire(), dead_after)).await;
    }
}

/// Sweeps entries of replaced inventories out of the directory, in small steps.
async fn sweep_directory(cluster: Arc<Cluster>) {
    let mut ticks = interval(SWEEP_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if cluster.directory().needs_sweep() {
            cluster.sweep();
        }
    }
}
