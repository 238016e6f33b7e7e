//! Start, background tasks and shutdown of a control-plane member.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use reprise_controlplane_core::{Amounts, MemberSettings, OwnPlace};
use reprise_controlplane_store::{
    EmbeddedStore, EtcdSettings, EtcdStore, KeyValue, MemoryStore, Store, StoreError, TimeToLive,
};
use reprise_daemon::connections::ConnectionLimit;
use reprise_daemon::http;
use reprise_daemon::rejected::Listener;
use reprise_policy::Epoch;
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
use crate::background::Background;
use crate::cluster::{Cluster, EXPECTED_FOR};
use crate::config::{Config, EventsConfig, StoreConfig};
use crate::descriptors::ConnectionLimits;
use crate::directory::DirectoryService;
use crate::events::service::EventsService;
use crate::events::{Events, Publisher};
use crate::followed;
use crate::fronts::{self, FrontError};
use crate::identity::Identity;
use crate::keys::Family;
use crate::membership::MembershipService;
use crate::metrics::Metrics;
use crate::modes;
use crate::placement::{PlacementParts, PlacementService};
use crate::registry::{NODES_MAX, Registry, RegistryError};
use crate::shards::Shards;
use crate::tenants::Tenants;
use crate::turns::Turns;

/// A message at the most: 8,192 keys with operations are 136 KiB.
pub(crate) const MESSAGE_BYTES_MAX: usize = 256 << 10;
/// HTTP/2 windows: a whole batch of keys and of answers without a wait for the other side.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 8 << 20;
/// Calls at once on one connection.
pub(crate) const STREAMS_MAX: u32 = 1024;
/// A connection whose other end is gone without a word is noticed within both.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEP_ALIVE_ANSWER: Duration = Duration::from_secs(5);
/// Pause between two sweeps while there is something to sweep; and between two looks while there is not.
const SWEEP_EVERY: Duration = Duration::from_millis(20);
/// Never expire in a tighter loop than this.
const EXPIRE_MIN: Duration = Duration::from_millis(1);
/// Pause between two looks at the ledgers.
const REBALANCE_EVERY: Duration = Duration::from_secs(1);
/// An etcd that is started together with its members answers by then. Later a start ends, and says what is missing.
const STORE_WITHIN: Duration = Duration::from_secs(15);
/// Pause between two attempts to open it.
const STORE_PAUSE: Duration = Duration::from_millis(500);
/// Time for calls under way at shutdown; streams are told to end.
const SHUTDOWN_WAIT: Duration = Duration::from_secs(2);

/// A running member.
#[derive(Debug)]
pub struct ControlPlane {
    /// Where the gRPC services listen.
    pub grpc: SocketAddr,
    /// Where the admin endpoint listens.
    pub admin: SocketAddr,
    /// What publishes KV events, if something does.
    pub publisher: Option<Publisher>,
    cluster: Arc<Cluster>,
    admin_state: Arc<Admin>,
    stop: watch::Sender<bool>,
    grpc_task: JoinHandle<Result<(), FrontError>>,
    admin_task: JoinHandle<()>,
    shards: Arc<Shards>,
    background: Background,
    /// Gives the registration back when told to stop.
    registration: JoinHandle<()>,
    /// Why the store takes no more writes.
    store_lost: watch::Receiver<Option<String>>,
}

impl ControlPlane {
    /// Opens the store, binds both addresses, serves. Errors say what to change.
    pub async fn start(config: Config) -> anyhow::Result<ControlPlane> {
        config.check()?;
        let admin = bind("admin", config.admin).await?;
        let store = open_store(config.store.clone()).await?;
        ControlPlane::start_with(store, config, admin).await
    }

    /// The same on a store that is open: several members of one process can share it.
    pub async fn start_on(store: Arc<dyn Store>, config: Config) -> anyhow::Result<ControlPlane> {
        let admin = bind("admin", config.admin).await?;
        ControlPlane::start_with(store, config, admin).await
    }

    /// The same with an admin port that listens already. It is served when the start is over: until then a start-up probe waits for its answer.
    async fn start_with(
        store: Arc<dyn Store>,
        config: Config,
        admin_listener: TcpListener,
    ) -> anyhow::Result<ControlPlane> {
        let identity = Identity::of(store.as_ref()).await.context("cannot read the identity of the store")?;
        let registry = Registry::new(store.clone(), identity.clone());
        let (known, known_at) = registry.nodes().await.context("cannot read the node records")?;
        let (metrics, metric_registry) = Metrics::new();
        let settings = MemberSettings {
            dead_after: config.membership.dead_after.0,
            forget_after: config.membership.forget_after.0,
        };
        let history = usize::try_from(config.events.history.0).context("events.history")?;
        let events = Events::new(history);
        let cluster = Arc::new(Cluster::new(settings, config.limits.watchers, events, metrics));
        cluster.restore(known, known_at);
        // Before anybody is served: a node that is to leave is chosen for nothing, also just after the start.
        let modes = store.range(Family::Modes.prefix().as_bytes(), NODES_MAX).await;
        let modes = modes.context("cannot read the modes of nodes")?;
        modes.entries.iter().for_each(|entry| learn_mode(&cluster, entry));

        let workers = tokio::runtime::Handle::current().metrics().num_workers();
        let limits = ConnectionLimits::of(workers, &config.events)?;
        let grpc_listener = bind("listen", config.listen).await?;
        let (grpc, admin) = (grpc_listener.local_addr()?, admin_listener.local_addr()?);
        let mut background = Background::default();
        let events = EventsConfig { subscribers: limits.events, ..config.events.clone() };
        let publisher = Publisher::start(cluster.clone(), &events, &mut background).await?;
        let shards = Arc::new(shards(&config, (store.clone(), identity.clone()), grpc)?);
        if let StoreConfig::Embedded { .. } = config.store {
            shards.forget_former().await.context("cannot tidy the store")?;
        }
        let admin_state = Admin::new(cluster.clone(), shards.clone(), metric_registry);
        let stop = watch::Sender::new(false);
        let turns = Turns::new(workers, config.limits.calls_at_once);
        let store_lost = watch::Sender::new(None);
        let lost = store_lost.subscribe();
        let tenants = Arc::new(Tenants::new(store.clone(), identity.clone()));
        let directory = Arc::new(DirectoryService::new(cluster.clone(), shards.clone(), turns));
        let noticing = notice_other_store(store.clone(), identity.clone(), store_lost.clone());
        background.until_done("identity of the store", noticing);
        let placement = PlacementService::new(PlacementParts {
            cluster: cluster.clone(),
            shards: shards.clone(),
            tenants: tenants.clone(),
            directory: directory.clone(),
            store: store.clone(),
            identity: identity.clone(),
        });
        let membership =
            MembershipService::new(cluster.clone(), registry, shards.clone(), &config.membership, store_lost);
        let services = Services {
            membership: MembershipServer::new(membership),
            placement: PlacementServer::new(placement),
            directory: DirectoryServer::from_arc(directory),
            events: EventsServer::new(EventsService::new(cluster.clone())),
        };
        let routers = (0..workers).map(|_| router(&services)).collect();
        let limit = |listener, max| ConnectionLimit::new(listener, max, cluster.metrics.rejected.clone());
        let accepted = (grpc_listener, limit(Listener::Grpc, limits.grpc));
        let grpc_task = tokio::spawn(fronts::serve(accepted, routers, stop.subscribe()));
        // Before the first page is served: a start-up probe may wait for it.
        admin_state.set_ready();
        let routes = admin::router(admin_state.clone());
        let stopped = wait(stop.subscribe());
        let limit = limit(Listener::Admin, limits.admin);
        let admin_task = tokio::spawn(http::serve(admin_listener, routes, limit, stopped));
        background.for_ever("death of nodes", expire_for_ever(cluster.clone(), settings.dead_after));
        background.for_ever("sweeps", sweep_for_ever(cluster.clone()));
        background.for_ever("members", follow_for_ever(shards.clone()));
        background.for_ever("slots", own_for_ever(cluster.clone(), shards.clone()));
        background.until_done("absent nodes", give_up_absent(cluster.clone()));
        background.for_ever("budgets", follow_tenants(tenants.clone()));
        background.for_ever("nodes", follow_nodes(store.clone(), cluster.clone()));
        background.for_ever("modes", follow_modes(store, cluster.clone()));
        background.for_ever("ledgers", keep_ledgers(cluster.clone(), shards.clone(), tenants));
        let registration = tokio::spawn(hold(shards.clone(), stop.subscribe()));
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

    /// Ends all streams, lets calls under way finish within two seconds, and stops.
    pub async fn shutdown(mut self) {
        self.admin_state.set_closing();
        self.cluster.close();
        self.shards.close();
        self.stop.send_replace(true);
        self.background.end();
        let (mut grpc_task, mut admin_task) = (self.grpc_task, self.admin_task);
        let mut registration = self.registration;
        let all = async {
            // It has said what went wrong.
            let _ = (&mut registration).await;
            let served = (&mut grpc_task).await;
            if let Ok(Err(error)) = served {
                tracing::error!(%error, "the gRPC server ended with an error");
            }
            let _ = (&mut admin_task).await;
        };
        if timeout(SHUTDOWN_WAIT, all).await.is_err() {
            tracing::warn!("connections were still open at shutdown and are cut");
            grpc_task.abort();
            admin_task.abort();
            registration.abort();
        }
    }

    /// Returns when the member cannot go on: a server or a task has ended by itself ([`crate::background`]), or the store
    /// takes no more writes. A new process opens the store again; agents go on meanwhile with what they hold.
    pub async fn failed(&mut self) -> anyhow::Error {
        let lost =
            async |lost: &mut watch::Receiver<Option<String>>| match lost.wait_for(Option::is_some).await {
                Ok(reason) => reason.clone().unwrap_or_default(),
                // The services are gone, and with them the one who would tell.
                Err(_) => std::future::pending().await,
            };
        tokio::select! {
            reason = lost(&mut self.store_lost) => {
                anyhow::anyhow!("the store serves this process no more until it is started again: {reason}")
            }
            ended = &mut self.grpc_task => anyhow::anyhow!("the gRPC server ended: {ended:?}"),
            ended = &mut self.admin_task => anyhow::anyhow!("the admin server ended: {ended:?}"),
            ended = &mut self.registration => anyhow::anyhow!("the registration ended: {ended:?}"),
            ended = self.background.ended() => anyhow::Error::new(ended).context("this member cannot go on"),
        }
    }
}

/// The gRPC services; every front serves the same ones.
struct Services {
    membership: MembershipServer<MembershipService>,
    placement: PlacementServer<PlacementService>,
    directory: DirectoryServer<DirectoryService>,
    events: EventsServer<EventsService>,
}

fn router(services: &Services) -> Router {
    Server::builder()
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(STREAMS_MAX)
        .http2_keepalive_interval(Some(KEEP_ALIVE_EVERY))
        .http2_keepalive_timeout(Some(KEEP_ALIVE_ANSWER))
        .add_service(services.membership.clone().max_decoding_message_size(MESSAGE_BYTES_MAX))
        .add_service(services.directory.clone().max_decoding_message_size(MESSAGE_BYTES_MAX))
        .add_service(services.placement.clone().max_decoding_message_size(MESSAGE_BYTES_MAX))
        .add_service(services.events.clone().max_decoding_message_size(MESSAGE_BYTES_MAX))
}

async fn wait(mut stop: watch::Receiver<bool>) {
    // The sender going away means the same.
    let _ = stop.wait_for(|stop| *stop).await;
}

async fn bind(field: &'static str, address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}: change '{field}' or free it"))
}

async fn open_store(config: StoreConfig) -> anyhow::Result<Arc<dyn Store>> {
    match config {
        StoreConfig::Memory {} => Ok(Arc::new(MemoryStore::new())),
        StoreConfig::Embedded { path } => {
            let opened = tokio::task::spawn_blocking(move || EmbeddedStore::open(&path)).await?;
            Ok(Arc::new(opened.context("cannot open the store")?))
        }
        StoreConfig::Etcd(etcd) => {
            Ok(Arc::new(open_etcd(&etcd.settings()?).await.context("cannot open the store")?))
        }
    }
}

/// Waits for an etcd that does not answer yet.
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

/// This member as the configuration names it; `grpc` is where it listens.
fn shards(config: &Config, store: (Arc<dyn Store>, Identity), grpc: SocketAddr) -> anyhow::Result<Shards> {
    let address = config.member.advertise.clone().unwrap_or_else(|| grpc.to_string());
    let name = MemberName::new(config.member.name.as_ref().unwrap_or(&address)).context("member.name")?;
    let time_to_live = TimeToLive::new(config.member.time_to_live.0).context("member.time_to_live")?;
    Ok(Shards::new(store, name, address, time_to_live))
}

async fn follow_for_ever(shards: Arc<Shards>) {
    shards.follow().await;
}

/// Keeps the directory's slots those of this member.
async fn own_for_ever(cluster: Arc<Cluster>, shards: Arc<Shards>) {
    let mut news = shards.watch();
    loop {
        // The epoch first: slots of a later map under it are put right when the news of that map is taken.
        let epoch = shards.view().map_or(Epoch(0), |view| view.map.epoch());
        cluster.own(&shards.kept(&cluster.owned()), epoch);
        if news.changed().await.is_err() {
            return;
        }
    }
}

/// Learns of nodes that register with other members, and of those that were forgotten.
async fn follow_nodes(store: Arc<dyn Store>, cluster: Arc<Cluster>) {
    followed::follow(&store, Family::Nodes, NODES_MAX, |news| cluster.take_records(news)).await;
}

fn learn_mode(cluster: &Cluster, entry: &KeyValue) {
    match modes::read(entry) {
        Ok((name, set)) => cluster.set_mode(name, set),
        Err(error) => tracing::error!(%error, "a node's mode is passed over"),
    }
}

/// Learns what nodes are for from now on.
async fn follow_modes(store: Arc<dyn Store>, cluster: Arc<Cluster>) {
    let take = |entry: &KeyValue| learn_mode(&cluster, entry);
    followed::follow(&store, Family::Modes, NODES_MAX, |news| news.entries().for_each(take)).await;
}

async fn follow_tenants(tenants: Arc<Tenants>) {
    tenants.follow().await;
}

/// Keeps the ledgers of tenants in line with the map, the budgets and the nodes, and moves their bytes.
async fn keep_ledgers(cluster: Arc<Cluster>, shards: Arc<Shards>, tenants: Arc<Tenants>) {
    let mut ticks = interval(REBALANCE_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut overcommitted = Amounts::default();
    loop {
        ticks.tick().await;
        let certain = shards.certain_map().and_then(|view| Some((shards.incarnation(&view)?, view)));
        match (certain, tenants.budgets()) {
            (Some((incarnation, view)), Some(budgets)) => {
                let nodes = cluster.known_nodes();
                let place = OwnPlace { map: &view.map, name: shards.name(), incarnation };
                cluster.ledgers.rebalance(cluster.now(), &place, &budgets, &nodes);
            }
            (None, _) | (_, None) => cluster.ledgers.end(),
        }
        // While a node has not reported, what is known stays: an agent that restarts changes nothing.
        let Some(capacity) = cluster.capacity_known() else { continue };
        let now = tenants.overcommitted(capacity);
        cluster.metrics.set_overcommitted(now);
        if now != overcommitted && now != Amounts::default() {
            tracing::warn!(
                dram_bytes = now.dram,
                nvme_bytes = now.nvme,
                "tenants are promised more than the living nodes have: lower reservations by so much, or add nodes"
            );
        }
        overcommitted = now;
    }
}

/// Says so when the store is another than at the start.
async fn notice_other_store(store: Arc<dyn Store>, identity: Identity, lost: watch::Sender<Option<String>>) {
    identity.lost(&store).await;
    let reason = RegistryError::OtherStore.to_string();
    lost.send_if_modified(|lost| lost.is_none().then(|| *lost = Some(reason)).is_some());
}

/// Nodes that have been away since before the start are not waited for much longer than those that are here need.
async fn give_up_absent(cluster: Arc<Cluster>) {
    sleep(EXPECTED_FOR).await;
    cluster.give_up_absent();
}

async fn hold(shards: Arc<Shards>, stop: watch::Receiver<bool>) {
    shards.hold(stop).await;
}

/// Finds dead nodes at the instant they die.
async fn expire_for_ever(cluster: Arc<Cluster>, dead_after: Duration) {
    loop {
        let next = cluster.expire().unwrap_or(dead_after);
        // A registration meanwhile dies no sooner than `dead_after` from now.
        sleep(next.min(dead_after).max(EXPIRE_MIN)).await;
    }
}

/// Removes what inventories have replaced, little by little.
async fn sweep_for_ever(cluster: Arc<Cluster>) {
    let mut ticks = interval(SWEEP_EVERY);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if cluster.directory().has_to_sweep() {
            cluster.sweep();
        }
    }
}
