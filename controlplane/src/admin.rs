//! The admin endpoint: metrics, health, and the state as JSON for people and scripts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use prometheus_client::registry::Registry;
use reprise_daemon::exposition::Format;
use reprise_proto::controlplane::{NodeInfo, NodeMode};
use serde::Serialize;

use crate::cluster::Cluster;
use crate::metrics;
use crate::shards::Shards;

const JSON_TYPE: &str = "application/json";

/// What the handlers need.
#[derive(Debug)]
pub struct Admin {
    cluster: Arc<Cluster>,
    shards: Arc<Shards>,
    registry: Registry,
    /// The services are up, and not on their way down.
    ready: AtomicBool,
}

/// A node, as `/nodes` shows it.
#[derive(Debug, Serialize)]
struct NodeView {
    node: u32,
    name: String,
    alive: bool,
    mode: &'static str,
    epoch: u64,
    peer_address: String,
    admin_address: String,
    /// Capacities as the node last reported them; `null`: it has not reported to this member yet.
    dram_bytes: Option<u64>,
    nvme_bytes: Option<u64>,
    failure_domain: String,
    version: String,
}

/// The counts of the directory, as `/directory` shows them.
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
    /// Not ready yet.
    pub fn new(cluster: Arc<Cluster>, shards: Arc<Shards>, registry: Registry) -> Arc<Admin> {
        Arc::new(Admin { cluster, shards, registry, ready: AtomicBool::new(false) })
    }

    /// The services answer from now on.
    pub fn set_ready(&self) {
        self.ready.store(true, Ordering::Relaxed);
    }

    /// The services go away.
    pub fn set_closing(&self) {
        self.ready.store(false, Ordering::Relaxed);
    }
}

/// The routes.
pub fn router(admin: Arc<Admin>) -> Router {
    Router::new()
        .route("/metrics", get(serve_metrics))
        .route("/healthz", get(async || "ok\n"))
        .route("/readyz", get(readiness))
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
        (StatusCode::SERVICE_UNAVAILABLE, "starting or shutting down\n")
    }
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
        peer_address: node.peer_address,
        admin_address: node.admin_address,
        dram_bytes: capacity.map(|capacity| capacity.dram),
        nvme_bytes: capacity.map(|capacity| capacity.nvme),
        failure_domain: node.failure_domain,
        version: node.version,
    }
}

/// What a node is for, in a word.
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
