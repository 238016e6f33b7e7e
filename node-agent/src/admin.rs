//! The admin port: `/metrics`, `/healthz`, `/readyz`, `/startz`, `/status`, `/blocks/<key>`,
//! `/slack/<profile>/<phase>/<input>/<prefix>`, `/trace/<seconds>`.
//!
//! One thread with its own runtime, so a slow scraper does not affect the data path; idle clients cannot
//! exhaust the bounded connections ([`reprise_daemon::http`]). `/healthz` fails if the core's thread has
//! not completed a pass for too long ([`Liveness`]); a busy core is healthy. Pages with core state query
//! the core and fail if it does not respond within [`CORE_PATIENCE`]. With certificates, only probes are open
//! ([`reprise_daemon::guard`]); no page changes state.

mod block;
mod slack;
mod status;
#[cfg(test)]
mod tests;
mod trace;

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use reprise_daemon::certificates::Certificates;
use reprise_daemon::exposition::Format;
use reprise_policy::slack::Computation;
use reprise_policy::tenant::TenantRegistry;
use reprise_policy::{BlockKey, TenantId};
use reprise_transport::{CompositeTransport, Transport};

use axum::Router;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use crossbeam_channel::{Sender, bounded};
use reprise_daemon::guard::Guard;
use reprise_daemon::http;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::config::Settings;
use crate::core_loop::{Inbox, Input, Liveness};
use crate::directory::DirectoryClient;
use crate::error::{AgentError, ErrorKind};
use crate::metrics::{CORE, Metrics, PEER, QUEUE_GRANTS, TenantRows, describe};
use crate::public_tenant::PublicTenant;
use crate::queue_grants::QueueGrantService;
use crate::recorder::Recorder;
use crate::slack::ActiveProfiles;

/// Time limit for the core's response: microseconds, or at most 0.4 s behind a full inbox.
const CORE_PATIENCE: Duration = Duration::from_secs(1);

/// `/startz` responds after this time even if the agent is not ready; from then on failing readiness probes
/// report it.
const STARTS_WITHIN: Duration = Duration::from_secs(60);

/// Interval at which `/startz` checks whether the agent is ready.
const CHECK_EVERY: Duration = Duration::from_millis(20);

/// Response body if the core does not respond.
const NO_RESPONSE: &str = "the core does not respond\n";

/// Dependencies of the admin pages.
pub(crate) struct AdminContext {
    pub(crate) inbox: Inbox,
    pub(crate) liveness: Liveness,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) directory: Arc<DirectoryClient>,
    pub(crate) peers: Option<Arc<CompositeTransport>>,
    pub(crate) arena: ArenaInfo,
    pub(crate) settings: Settings,
    /// Which clients see which pages.
    pub(crate) guard: Guard,
    /// Maximum number of connections.
    pub(crate) connections_max: usize,
    pub(crate) tenants: Arc<Mutex<TenantRegistry>>,
    pub(crate) public_tenant: PublicTenant,
    pub(crate) slack: ActiveProfiles,
    pub(crate) queue_grants: Arc<QueueGrantService>,
    pub(crate) recorder: Arc<Recorder>,
    pub(crate) certificates: Certificates,
    /// Set while the agent serves.
    pub(crate) ready: AtomicBool,
}

/// Description of the arena for the status page.
#[derive(Clone, Debug)]
pub(crate) struct ArenaInfo {
    pub(crate) bytes: u64,
    pub(crate) regions: usize,
    pub(crate) page_kind: String,
}

/// The running admin server.
pub(crate) struct AdminServer {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

/// A bound port that is not served yet, so its number can be announced early.
pub(crate) struct AdminPort {
    listener: std::net::TcpListener,
    address: SocketAddr,
}

impl AdminPort {
    /// Binds the port.
    ///
    /// # Errors
    /// `ErrorKind::Resource`: the port is in use, or the address is not local.
    pub(crate) fn bind(address: SocketAddr) -> Result<AdminPort, AgentError> {
        let bound = std::net::TcpListener::bind(address).and_then(|listener| {
            listener.set_nonblocking(true)?;
            let address = listener.local_addr()?;
            Ok(AdminPort { listener, address })
        });
        bound.map_err(|error| {
            let context =
                format!("cannot listen on admin.listen = '{address}'; choose another port, or 0 for any");
            AgentError::new(ErrorKind::Resource, context).with_source(error)
        })
    }

    /// Returns the bound address.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Starts serving.
    ///
    /// # Errors
    /// `ErrorKind::Resource`: a thread or runtime cannot be created.
    pub(crate) fn serve(self, context: Arc<AdminContext>) -> Result<AdminServer, AgentError> {
        let failed =
            |error| AgentError::new(ErrorKind::Resource, "cannot start the admin server").with_source(error);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let (stop, stopped) = oneshot::channel();
        let AdminPort { listener, address } = self;
        let rejected = context.metrics.rejected().clone();
        let guard = context.guard.clone();
        let limit = guard.limit(context.connections_max, rejected);
        let router = Router::new()
            .route("/metrics", get(metrics))
            .route("/healthz", get(healthz))
            .route("/readyz", get(readyz))
            .route("/startz", get(startz))
            .route("/status", get(status_page))
            .route("/blocks/{key}", get(block_page))
            .route("/slack/{profile}/{phase}/{input}/{prefix}", get(slack_page))
            .route("/trace/{seconds}", get(trace::page))
            .with_state(context);
        let listener = {
            let _entered = runtime.enter();
            TcpListener::from_std(listener).map_err(failed)?
        };
        let body = move || {
            runtime.block_on(async {
                tokio::select! {
                    () = http::serve(listener, (router, guard), limit, std::future::pending()) => {}
                    // Open connections end with the runtime, as the agent is about to exit.
                    _ = stopped => {}
                }
            });
            runtime.shutdown_background();
        };
        let thread = std::thread::Builder::new().name("admin".to_owned()).spawn(body).map_err(failed)?;
        Ok(AdminServer { address, stop: Some(stop), thread: Some(thread) })
    }
}

impl AdminServer {
    /// Returns the bound address.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn stop(mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Queries the core's thread; `None` if it does not respond in time.
async fn ask<T: Send + 'static>(
    context: &AdminContext,
    question: impl FnOnce(Sender<T>) -> Input + Send + 'static,
) -> Option<T> {
    let inbox = context.inbox.clone();
    // The channels block, so the wait runs outside the runtime's thread.
    let waited = tokio::task::spawn_blocking(move || {
        let until = Instant::now() + CORE_PATIENCE;
        let (answer, answered) = bounded(1);
        inbox.send_within(question(answer), CORE_PATIENCE).ok()?;
        answered.recv_deadline(until).ok()
    });
    waited.await.ok().flatten()
}

/// Returns a tenant's name. A tenant known only from blocks on devices has a number only.
fn tenant_name(context: &AdminContext, tenant: TenantId) -> String {
    let tenants = context.tenants.lock().expect("no panic while the registry is locked");
    tenants.name(tenant).map_or_else(|| format!("number.{}", tenant.0), ToString::to_string)
}

fn unavailable(text: &'static str) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
}

async fn metrics(State(context): State<Arc<AdminContext>>, headers: HeaderMap) -> Response {
    let Some(view) = ask(&context, Input::Inspect).await else { return unavailable(NO_RESPONSE) };
    let mut numbers = describe("", CORE, view.counters.fields());
    if let Some(peers) = &context.peers {
        numbers.extend(describe("peer_", PEER, peers.stats().fields()));
    }
    numbers.extend(status::directory_numbers(&context.directory.status()));
    numbers.extend(describe("", QUEUE_GRANTS, context.queue_grants.counters().fields()));
    context.metrics.session_backends(view.sessions.iter().map(|session| session.backend));
    let tenants = TenantRows::new(&view.tenants, |tenant| tenant_name(&context, tenant));
    match context.metrics.render(numbers, tenants, view.inbox_waiting) {
        Ok(text) => {
            let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
            let format = Format::negotiate(accept);
            ([(header::CONTENT_TYPE, format.content_type())], format.render(text)).into_response()
        }
        Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, "cannot encode the metrics\n").into_response(),
    }
}

async fn healthz(State(context): State<Arc<AdminContext>>) -> Response {
    if context.liveness.is_alive() { "ok\n".into_response() } else { unavailable("stuck\n") }
}

async fn readyz(State(context): State<Arc<AdminContext>>) -> Response {
    if context.ready.load(Ordering::Acquire) { "ready\n".into_response() } else { unavailable("starting\n") }
}

/// Responds once the agent is ready, so the kubelet's probe does not fail during a normal start.
async fn startz(State(context): State<Arc<AdminContext>>) -> Response {
    let begun = Instant::now();
    while !context.ready.load(Ordering::Acquire) && begun.elapsed() < STARTS_WITHIN {
        tokio::time::sleep(CHECK_EVERY).await;
    }
    healthz(State(context)).await
}

async fn status_page(State(context): State<Arc<AdminContext>>) -> Response {
    let Some(view) = ask(&context, Input::Inspect).await else { return unavailable(NO_RESPONSE) };
    json(&status::Status::new(&context, &view))
}

async fn block_page(State(context): State<Arc<AdminContext>>, Path(key): Path<String>) -> Response {
    let Some(key) = BlockKey::from_hex(&key) else {
        return (StatusCode::BAD_REQUEST, "invalid block key: expected 32 hexadecimal digits\n")
            .into_response();
    };
    let answered = ask(&context, move |answer| Input::Describe { key, answer }).await;
    match answered {
        None => unavailable(NO_RESPONSE),
        Some(None) => {
            let text = format!("block {key} is not on node {}\n", context.settings.node.name);
            (StatusCode::NOT_FOUND, text).into_response()
        }
        Some(Some(described)) => json(&block::Block::new(&context, key, described)),
    }
}

async fn slack_page(
    State(context): State<Arc<AdminContext>>,
    Path((profile, phase, input_tokens, prefix_tokens)): Path<(String, String, u32, u32)>,
) -> Response {
    let Some(phase) = slack::phase(&phase) else {
        return (StatusCode::BAD_REQUEST, "invalid phase: expected Prefill or Decode\n").into_response();
    };
    match context.slack.get(&profile) {
        Some(found) => {
            let computation = Computation { phase, input_tokens, prefix_tokens };
            json(&slack::Page::new(&profile, &found, computation))
        }
        None => {
            let text = format!("profile {profile} is not active on node {}\n", context.settings.node.name);
            (StatusCode::NOT_FOUND, text).into_response()
        }
    }
}

fn json(page: &impl Serialize) -> Response {
    match serde_json::to_string_pretty(page) {
        Ok(text) => ([(header::CONTENT_TYPE, "application/json")], text + "\n").into_response(),
        Err(_) => (StatusCode::INTERNAL_SERVER_ERROR, "cannot encode the page\n").into_response(),
    }
}
