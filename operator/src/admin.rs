//! The admin port: `/metrics`, `/healthz`, `/readyz`. Not authenticated; nothing here changes anything.
//!
//! A replica that waits for the lease is healthy and ready: it is ready to take over. Before the API server has answered once, none is
//! ready. One whose queues do not go on is not healthy ([`crate::progress`]).

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use reprise_proto::exposition::Format;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::context::Context;

/// What the pages are about.
#[derive(Clone)]
struct Pages {
    context: Arc<Context>,
    ready: watch::Receiver<bool>,
}

/// Serves for ever.
///
/// # Errors
/// The port was taken away.
pub async fn serve(
    listener: TcpListener,
    context: Arc<Context>,
    ready: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let pages = Router::new()
        .route("/metrics", get(metrics))
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .with_state(Pages { context, ready });
    axum::serve(listener, pages).await
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
            tracing::error!(what, "the operator does not go on, and says so to the kubelet, which ends it");
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

#[cfg(test)]
mod tests;
