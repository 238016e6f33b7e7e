//! The admin port: `/metrics`, `/healthz`, `/readyz`, `/startz`. It is read-only. Only probes are open
//! ([`reprise_daemon::guard`]); metrics need TLS ([`certificate`]) and a bearer token ([`scrapers`]). Idle clients cannot
//! block probes ([`reprise_daemon::http`]).
//!
//! * `/healthz` succeeds while the process answers. A reconcile that waits too long is aborted
//!   ([`crate::framework::controller`]), and one that panics ends the process.
//! * `/readyz` succeeds once the stores are filled, which requires answers from the API server. A replica
//!   that waits for the lease is ready: it can take over.
//! * `/startz`, for the startup probe, waits until the replica is ready, so that no probe fails during a
//!   normal start.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use reprise_daemon::connections::ConnectionLimit;
use reprise_daemon::descriptors::{Part, TooFewDescriptors, divide, limit};
use reprise_daemon::exposition::Format;
use reprise_daemon::guard::Guard;
use reprise_daemon::http;
use reprise_daemon::rejected_connections::RejectedConnections;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::reconcile::context::Context;

pub mod certificate;
pub mod scrapers;

/// Longest wait of `/startz`. Then it answers although the replica is not ready, and readiness probes report
/// that.
const STARTS_WITHIN: Duration = Duration::from_secs(50);

/// State shared by the request handlers.
#[derive(Clone)]
struct Pages {
    context: Arc<Context>,
    ready: watch::Receiver<bool>,
}

/// File descriptors reserved for other uses: standard streams, the API server, control planes and etcd
/// clusters.
const RESERVE: u64 = 128;

/// Connections to the admin port. Probes, scrapers and people need only a few.
const CONNECTIONS: Part = Part { each: 1, min: 8, max: 64 };

/// Returns the connection limit of the admin port, derived from the limit on open files.
///
/// # Errors
/// The limit on open files is too low.
pub fn connection_limit(
    guard: &Guard,
    rejected: &RejectedConnections,
) -> Result<ConnectionLimit, TooFewDescriptors> {
    let [max] = divide(limit(), RESERVE, [CONNECTIONS])?;
    let max = usize::try_from(max).expect("at most 64");
    Ok(guard.limit(max, rejected.clone()))
}

/// Serves the admin port until the task is aborted.
pub async fn serve(
    listener: TcpListener,
    (guard, limit): (Guard, ConnectionLimit),
    context: Arc<Context>,
    ready: watch::Receiver<bool>,
) {
    let pages = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .route("/startz", get(startz))
        .with_state(Pages { context, ready });
    http::serve(listener, (pages, guard), limit, std::future::pending()).await;
}

async fn metrics(State(pages): State<Pages>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok());
    let format = Format::negotiate(accept);
    ([(header::CONTENT_TYPE, format.content_type())], format.render(pages.context.metrics.text()))
        .into_response()
}

async fn healthz() -> &'static str {
    "ok\n"
}

async fn readyz(State(pages): State<Pages>) -> Response {
    if *pages.ready.borrow() {
        (StatusCode::OK, "ok\n").into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "starting\n").into_response()
    }
}

async fn startz(State(mut pages): State<Pages>) -> &'static str {
    // An error means a timeout or a process that is ending: answer with the health in both cases.
    let _ = tokio::time::timeout(STARTS_WITHIN, pages.ready.wait_for(|ready| *ready)).await;
    healthz().await
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;
    use crate::reconcile::context::tests::context;

    #[tokio::test(start_paused = true)]
    async fn startz_waits_until_the_replica_is_ready() {
        let (ready, is_ready) = watch::channel(false);
        let pages = Pages { context: context().await, ready: is_ready };
        let started = tokio::spawn(startz(State(pages.clone())));
        tokio::time::sleep(STARTS_WITHIN / 2).await;
        assert!(!started.is_finished(), "the replica is not ready yet");
        assert_eq!(readyz(State(pages.clone())).await.status(), StatusCode::SERVICE_UNAVAILABLE);
        ready.send(true).expect("the page holds a receiver");
        assert_eq!(started.await.expect("no panic"), "ok\n");
        let begun = Instant::now();
        assert_eq!(startz(State(pages)).await, "ok\n");
        assert_eq!(begun.elapsed(), Duration::ZERO, "it answers at once");
    }
}
