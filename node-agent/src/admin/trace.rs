//! `/trace/<seconds>`: the calls of sessions from now on, as lines of [`reprise_policy::trace`].
//!
//! The lines have the keys of all tenants' blocks. So traces are recorded only if the configuration allows it
//! (`admin.trace`), for admins (their certificates). An agent without certificates records for clients of the node
//! itself. Every process in the node's network namespace is such a client, and behind a proxy also the proxy's clients.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use reprise_daemon::guard::Caller;
use reprise_daemon::http::ClientAddress;
use reprise_policy::trace::{Line, VERSION};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;

use super::AdminContext;
use crate::recorder::{RECORDINGS_MAX, Recorder, Recording};

/// Longest recording: a day.
const SECONDS_MAX: u64 = 86_400;

/// A client that reads nothing for this long has no place among the recordings.
const READS_WITHIN: Duration = Duration::from_secs(30);

/// Lines that wait for the socket.
const LINES_QUEUED_MAX: usize = 16;

pub(super) async fn page(
    State(context): State<Arc<AdminContext>>,
    (client, caller): (Option<Extension<ClientAddress>>, Option<Extension<Caller>>),
    Path(seconds): Path<u64>,
) -> Response {
    if !context.settings.admin_trace {
        let text = "this agent records no traces, because they have keys, tenants, sizes and times of all tenants' blocks: \
                    set admin.trace = true in its configuration while you record\n";
        return (StatusCode::FORBIDDEN, text).into_response();
    }
    let is_admin = caller.is_some_and(|Extension(caller)| caller.is_admin());
    if !is_admin && !client.is_some_and(|Extension(address)| address.is_local()) {
        let text = "a trace has the keys of all tenants' blocks: use a certificate of an admin, or connect from \
                    the node itself\n";
        return (StatusCode::FORBIDDEN, text).into_response();
    }
    if !(1..=SECONDS_MAX).contains(&seconds) {
        let text = format!("invalid seconds {seconds}: expected 1 to {SECONDS_MAX}\n");
        return (StatusCode::BAD_REQUEST, text).into_response();
    }
    let Some(recording) = context.recorder.start() else {
        let text = format!("{RECORDINGS_MAX} traces are being recorded already: end one of them\n");
        return (StatusCode::TOO_MANY_REQUESTS, text).into_response();
    };
    let end = Instant::now() + Duration::from_secs(seconds);
    let (lines, body) = mpsc::channel(LINES_QUEUED_MAX);
    tokio::spawn(write(Arc::clone(&context.recorder), recording, end, lines));
    let body = Body::from_stream(ReceiverStream::new(body).map(Ok::<Bytes, Infallible>));
    ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}

/// Writes the lines of a recording until `end`, or until its reader is gone.
async fn write(recorder: Arc<Recorder>, mut recording: Recording, end: Instant, lines: mpsc::Sender<Bytes>) {
    let node = || recorder.node().to_owned();
    if lines.send(encode(&Line::Start { version: VERSION, node: node() })).await.is_err() {
        return;
    }
    let mut calls = 0;
    // Calls that are queued at the end belong to the recording.
    let mut left = usize::MAX;
    while left > 0 {
        let call = tokio::select! {
            biased;
            () = lines.closed() => return,
            () = sleep_until(end), if left == usize::MAX => {
                left = recording.calls.len();
                continue;
            }
            call = recording.calls.recv() => call,
        };
        let Some(call) = call else { break };
        left -= usize::from(left != usize::MAX);
        let line = encode(&Line::Call(Arc::unwrap_or_clone(call)));
        if lines.send_timeout(line, READS_WITHIN).await.is_err() {
            return;
        }
        calls += 1;
    }
    let last = Line::End { node: node(), calls, dropped: recording.dropped() };
    // The reader may be gone.
    let _ = lines.send_timeout(encode(&last), READS_WITHIN).await;
}

fn encode(line: &Line) -> Bytes {
    let mut text = serde_json::to_vec(line).expect("our own types encode as JSON");
    text.push(b'\n');
    text.into()
}
