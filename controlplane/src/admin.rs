//! The admin endpoint: metrics, health, and state as JSON. With certificates, only probes are open
//! ([`reprise_daemon::guard`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::registry::Registry;
use reprise_daemon::certificates::{CertificateStatus, Certificates};
use reprise_daemon::exposition::Format;
use reprise_proto::controlplane::{NodeInfo, NodeMode};
use serde::Serialize;

use crate::cluster::Cluster;
use crate::metrics;
use crate::shards::Shards;

const JSON_TYPE: &str = "application/json";

/// Shared state of the HTTP handlers.
#[derive(Debug)]
pub struct Admin {
    cluster: Arc<Cluster>,
    shards: Arc<Shards>,
    registry: Registry,
    certificates: Certificates,
    /// Whether the services accept calls: set after the start, cleared at shutdown.
    ready: AtomicBool,
}

/// A node in the reply of `/nodes`.
#[derive(Debug, Serialize)]
struct NodeView {
    node: u32,
    name: String,
    alive: bool,
    mode: &'static str,
    epoch: u64,
    peer_endpoints: Vec<PeerEndpoint>,
    admin_address: String,
    /// Capacities of the node's last report to this member; `null` before the first one.
    dram_bytes: Option<u64>,
    nvme_bytes: Option<u64>,
    failure_domain: String,
    version: String,
}

/// One way to reach the peer transport of a node.
#[derive(Debug, Serialize)]
struct PeerEndpoint {
    protocol: String,
    address: String,
}

impl From<reprise_proto::controlplane::PeerEndpoint> for PeerEndpoint {
    fn from(endpoint: reprise_proto::controlplane::PeerEndpoint) -> PeerEndpoint {
        PeerEndpoint { protocol: endpoint.protocol, address: endpoint.address }
    }
}

/// State of the process in the reply of `/status`.
#[derive(Debug, Serialize)]
struct StatusView {
    version: &'static str,
    ready: bool,
    /// Certificates in use; `null` on plain connections.
    tls: Option<CertificateStatus>,
}

/// Counters of the directory in the reply of `/directory`.
#[derive(Debug, Serialize)]
struct DirectoryView {
    keys: u64,
    replicas: u64,
    stale_entries: u64,
    bytes: u64,
    updates: u64,
    lookups: u64,
    slots_owned: usize,
    slots_partial: usize,
    nodes: Vec<NodeReplicasView>,
}

#[derive(Debug, Serialize)]
struct NodeReplicasView {
    node: u16,
    dram: u64,
    nvme: u64,
}

impl Admin {
    /// Creates the state; `/readyz` fails until [`Admin::set_ready`].
    pub fn new(
        (cluster, shards): (Arc<Cluster>, Arc<Shards>),
        registry: Registry,
        certificates: Certificates,
    ) -> Arc<Admin> {
        Arc::new(Admin { cluster, shards, registry, certificates, ready: AtomicBool::new(false) })
    }

    /// Makes `/readyz` succeed: the services accept calls.
    pub fn set_ready(&self) {
        self.ready.store(true, Ordering::Relaxed);
    }

    /// Makes `/readyz` fail: the member shuts down.
    pub fn set_closing(&self) {
        self.ready.store(false, Ordering::Relaxed);
    }
}

/// Routes of the admin endpoint.
pub fn router(admin: Arc<Admin>) -> Router {
    Router::new()
        .route("/metrics", get(serve_metrics))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readiness))
        .route("/status", get(status))
        .route("/nodes", get(nodes))
        .route("/directory", get(directory))
        .with_state(admin)
}

async fn serve_metrics(State(admin): State<Arc<Admin>>, headers: HeaderMap) -> impl IntoResponse {
    admin.cluster.refresh_metrics();
    admin.cluster.metrics.set_members(&admin.shards);
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let format = Format::negotiate(accept);
    ([(header::CONTENT_TYPE, format.content_type())], format.render(metrics::text(&admin.registry)))
}

async fn readiness(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    if admin.ready.load(Ordering::Relaxed) {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "unavailable\n")
    }
}

async fn status(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    json(&StatusView {
        version: env!("CARGO_PKG_VERSION"),
        ready: admin.ready.load(Ordering::Relaxed),
        tls: admin.certificates.status(),
    })
}

async fn nodes(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    admin.cluster.expire();
    let nodes = admin.cluster.nodes().into_iter().map(node_view);
    json(&nodes.collect::<Vec<_>>())
}

fn node_view(node: NodeInfo) -> NodeView {
    let capacity = node.usage.and_then(|usage| usage.capacity);
    NodeView {
        mode: mode(node.mode()),
        node: node.node,
        name: node.name,
        alive: node.alive,
        epoch: node.epoch,
        peer_endpoints: node.peer_endpoints.into_iter().map(PeerEndpoint::from).collect(),
        admin_address: node.admin_address,
        dram_bytes: capacity.map(|capacity| capacity.dram),
        nvme_bytes: capacity.map(|capacity| capacity.nvme),
        failure_domain: node.failure_domain,
        version: node.version,
    }
}

/// Name of a node's mode in JSON.
fn mode(mode: NodeMode) -> &'static str {
    match mode {
        NodeMode::Unspecified => "unknown",
        NodeMode::Active => "active",
        NodeMode::Cordoned => "cordoned",
        NodeMode::Draining => "draining",
    }
}

async fn directory(State(admin): State<Arc<Admin>>) -> impl IntoResponse {
    let size = admin.cluster.directory().size();
    let nodes = size.nodes.iter();
    json(&DirectoryView {
        keys: size.keys,
        replicas: size.replicas,
        stale_entries: size.stale_entries,
        bytes: size.bytes,
        updates: size.updates,
        lookups: admin.cluster.metrics.lookup_keys.get(),
        slots_owned: size.slots_owned,
        slots_partial: size.slots_partial,
        nodes: nodes
            .map(|node| NodeReplicasView { node: node.node.0, dram: node.dram, nvme: node.nvme })
            .collect(),
    })
}

fn json<T: Serialize>(value: &T) -> impl IntoResponse + use<T> {
    let mut text = serde_json::to_string(value).expect("structs of strings and numbers are always JSON");
    text.push('\n');
    ([(header::CONTENT_TYPE, JSON_TYPE)], text)
}
