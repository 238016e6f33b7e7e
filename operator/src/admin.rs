//! The admin port: `/metrics`, `/healthz`, `/readyz`, `/startz`. Not authenticated; nothing here changes anything. Idle clients cannot
//! stop probes ([`reprise_daemon::http`]).
//!
//! A replica that waits for the lease is healthy and ready: it is ready to take over. Before the API server has answered once, none is
//! ready. One whose queues do not go on is not healthy ([`crate::progress`]).
//!
//! `/startz` is for the start-up probe: it answers once the replica is ready, and no probe fails during a normal start.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use reprise_daemon::connections::ConnectionLimit;
use reprise_daemon::descriptors::{Part, TooFewDescriptors, divide, limit};
use reprise_daemon::exposition::Format;
use reprise_daemon::http;
use reprise_daemon::rejected::{Listener, RejectedConnections};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, watch};

use crate::context::Context;

/// `/startz` answers after this time even if the replica is not ready: from then on failing readiness probes report it.
const STARTS_WITHIN: Duration = Duration::from_secs(50);

/// Callers of `/startz` that may wait at a time: the kubelet is one.
static WAITING: Semaphore = Semaphore::const_new(4);

/// What the pages are about.
#[derive(Clone)]
struct Pages {
    context: Arc<Context>,
    ready: watch::Receiver<bool>,
}

/// Descriptors beside those of the admin port: standard streams, the API server, members of control planes, etcds.
const RESERVE: u64 = 128;

/// Probes, scrapers and people: a handful at a time.
const CONNECTIONS: Part = Part { each: 1, min: 8, max: 64 };

/// The bound of the port under the limit on open files.
///
/// # Errors
/// The limit is too low.
pub fn connection_limit(rejected: &RejectedConnections) -> Result<ConnectionLimit, TooFewDescriptors> {
    let [max] = divide(limit(), RESERVE, [CONNECTIONS])?;
    let max = usize::try_from(max).expect("a few");
    Ok(ConnectionLimit::new(Listener::Admin, max, rejected.clone()))
}

/// Serves for ever.
pub async fn serve(
    listener: TcpListener,
    limit: ConnectionLimit,
    context: Arc<Context>,
    ready: watch::Receiver<bool>,
) {
    let pages = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/startz", get(startz))
        .with_state(Pages { context, ready });
    http::serve(listener, pages, limit, std::future::pending()).await;
}

async fn metrics(State(pages): State<Pages>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let format = Format::negotiate(accept);
    ([(header::CONTENT_TYPE, format.content_type())], format.render(pages.context.metrics.text()))
        .into_response()
}

async fn healthz(State(pages): State<Pages>) -> Response {
    match pages.context.progress.stuck(Instant::now()) {
        None => (StatusCode::OK, "ok\n").into_response(),
        Some(what) => {
            tracing::error!(
                what,
                "reconciliation is stuck; failing /healthz so that the kubelet restarts the operator"
            );
            (StatusCode::SERVICE_UNAVAILABLE, format!("{what}\n")).into_response()
        }
    }
}

async fn readyz(State(pages): State<Pages>) -> Response {
    if *pages.ready.borrow() {
        (StatusCode::OK, "ok\n").into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "the API server has not answered yet\n").into_response()
    }
}

async fn startz(State(pages): State<Pages>) -> Response {
    // Callers that wait keep their connection: with more of them, probes would find none.
    let Ok(_waits) = WAITING.try_acquire() else {
        return (StatusCode::SERVICE_UNAVAILABLE, "too many wait for the start\n").into_response();
    };
    let mut ready = pages.ready.clone();
    // Fails when it takes too long or the process ends: health is the answer then.
    let _ = tokio::time::timeout(STARTS_WITHIN, ready.wait_for(|ready| *ready)).await;
    healthz(State(pages)).await
}

#[cfg(test)]
mod tests;
