//! HTTP server for admin ports that idle and slow clients cannot block.
//!
//! A server has at most `connections_max` connections. When full, it closes its longest-idle connection for a
//! new one, so that probes are answered despite any number of idle connections. A connection is closed if it
//! does not send a complete request header within [`REQUEST_WITHIN`], for its first and every later request.
//! A connection whose client does not read the response counts as idle.
//!
//! With certificates, the [`Guard`] decides which pages a client sees. Handshakes run in the task of their connection,
//! so a slow one delays no other, and connections without a finished handshake are the first to be closed. One client
//! has at most a share of the connections; each holds at most 16 KiB of a request, and no body.
//!
//! A request protects its connection from being closed while it is answered, if the client may see the page. Probes never
//! do: all clients may send them, and some wait for a minute. So a new probe is answered, however many connections others have opened.
//!
//! A connection is replaced after a day, and before its client's certificate has ended: a running request is answered
//! first.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use reprise_identity::limits::{CONNECTION_GRACE, Client};
use reprise_identity::tls::TlsError;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::connections::{ConnectionLimit, Permit};
use crate::guard::{Accepted, Caller, Guard, is_probe};
use crate::rejected_connections::Reason;

/// Time limit for a request header, and between two requests. Scrapers keep connections for intervals of up
/// to a minute.
pub const REQUEST_WITHIN: Duration = Duration::from_secs(65);

/// Length of the accept queue. A client whose connection does not fit retries after a second, which is the
/// whole timeout of a probe.
const BACKLOG: i32 = 4096;

/// Maximum size of a request header, and of the buffers of a connection, in bytes.
const BUFFER_BYTES: usize = 16 << 10;

/// Longest path in the log.
const PAGE_CHARS_LOGGED: usize = 80;

/// Addresses of a request's connection, in the request's extensions.
#[derive(Clone, Copy, Debug)]
pub struct ClientAddress {
    /// Address of the client.
    pub client: SocketAddr,
    /// Address of the server that the client has connected to.
    pub server: SocketAddr,
}

impl ClientAddress {
    /// Returns whether the client runs in the network namespace of the server. The client of a proxy on the node is the
    /// proxy.
    pub fn is_local(&self) -> bool {
        let client = self.client.ip().to_canonical();
        client.is_loopback() || client == self.server.ip().to_canonical()
    }
}

/// Serves pages until `stop` completes, then until the running requests are answered.
pub async fn serve(
    listener: TcpListener,
    (pages, guard): (Router, Guard),
    limit: ConnectionLimit,
    stop: impl Future<Output = ()>,
) {
    if let Err(error) = rustix::net::listen(&listener, BACKLOG) {
        tracing::warn!(%error, "cannot enlarge the accept queue");
    }
    let (stopping, is_stopping) = watch::channel(false);
    let mut connections = JoinSet::new();
    let mut stop = std::pin::pin!(stop);
    loop {
        tokio::select! {
            (stream, permit) = limit.accept(&listener) => {
                while connections.try_join_next().is_some() {}
                let site = (pages.clone(), guard.clone());
                connections.spawn(serve_connection(stream, site, permit, is_stopping.clone()));
            }
            () = &mut stop => break,
        }
    }
    drop(listener);
    stopping.send_replace(true);
    while connections.join_next().await.is_some() {}
}

async fn serve_connection(
    stream: TcpStream,
    (pages, guard): (Router, Guard),
    permit: Permit,
    mut stopping: watch::Receiver<bool>,
) {
    let address = stream.peer_addr().ok().zip(stream.local_addr().ok());
    let address = address.map(|(client, server)| ClientAddress { client, server });
    let accepted = tokio::select! {
        accepted = guard.accept(stream) => accepted,
        () = permit.closed() => return,
        _ = stopping.wait_for(|stopping| *stopping) => return,
    };
    let Accepted { stream, caller, age_max } = match accepted {
        Ok(accepted) => accepted,
        Err(error) => return log_refused(&permit, address, &error),
    };
    if let Caller::Identity(identity) = &caller
        && !permit.set_identity(identity)
    {
        return;
    }
    let permit = Arc::new(permit);
    let pages = TowerToHyperService::new(pages);
    let service = service_fn(|mut request: Request<Incoming>| {
        if let Some(address) = address {
            request.extensions_mut().insert(address);
        }
        request.extensions_mut().insert(caller.clone());
        let (permit, pages, guard, caller) = (Arc::clone(&permit), &pages, &guard, &caller);
        async move {
            if let Some(refused) = guard.refuse(caller, &request).await {
                permit.limit().count(Reason::Refused);
                log_request(address, caller, request.uri().path(), refused.status());
                return Ok::<Response, Infallible>(refused);
            }
            let path = request.uri().path();
            let is_kept = caller.keeps_connection(path);
            if is_kept && !is_probe(path) {
                permit.set_busy();
            }
            let answer = hyper::service::Service::call(pages, request).await;
            if is_kept {
                permit.set_idle();
            }
            answer
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(caller.request_within())
        .max_buf_size(BUFFER_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let stopped = async {
        // An error means that the sender is gone, which also means stop.
        let _ = stopping.wait_for(|stopping| *stopping).await;
    };
    let served = tokio::select! {
        served = &mut connection => served,
        () = permit.closed() => return,
        () = sleep(age_max) => {
            if caller.is_unknown() {
                return permit.limit().count(Reason::Timeout);
            }
            connection.as_mut().graceful_shutdown();
            tokio::select! {
                served = connection => served,
                () = permit.closed() => return,
                () = sleep(CONNECTION_GRACE) => return permit.limit().count(Reason::Timeout),
            }
        }
        () = stopped => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = served {
        let listener = permit.limit().listener().as_str();
        tracing::debug!(listener, %error, "HTTP connection failed");
        if error.is_timeout() {
            permit.limit().count(Reason::Timeout);
        } else if error.is_parse() {
            permit.limit().count(Reason::Protocol);
        }
    }
}

/// Logs and counts a connection without a valid handshake.
fn log_refused(permit: &Permit, address: Option<ClientAddress>, error: &TlsError) {
    let listener = permit.limit().listener().as_str();
    let client = address.map(|address| tracing::field::display(Client::at(address.client.ip())));
    let reason = if matches!(error, TlsError::Timeout) { Reason::Timeout } else { Reason::Refused };
    permit.limit().count(reason);
    let condition = error.kind();
    tracing::warn!(condition, listener, client, %error, "refused a connection");
}

/// Logs a refused request.
fn log_request(address: Option<ClientAddress>, caller: &Caller, page: &str, status: StatusCode) {
    let client = client(address, caller).map(tracing::field::display);
    let (socket, status) = (address.map(|address| tracing::field::display(address.client)), status.as_u16());
    let page: String = page.chars().take(PAGE_CHARS_LOGGED).collect();
    tracing::warn!(listener = "admin", client, socket, %caller, page, status, "refused a request");
}

/// Subject of log lines: the identity of a client, or its address.
pub(crate) fn client(address: Option<ClientAddress>, caller: &Caller) -> Option<Client> {
    match caller {
        Caller::Identity(identity) => Some(Client::Identity(identity.clone())),
        Caller::Unchecked | Caller::Plain | Caller::Anonymous => {
            address.map(|address| Client::at(address.client.ip()))
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use reprise_identity::limits::CONNECTION_AGE_MAX;

    use super::*;
    use crate::rejected_connections::{Listener, RejectedConnections};

    const CONNECTIONS_MAX: usize = 4;

    async fn server(pages: Router) -> (SocketAddr, RejectedConnections) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let rejected = RejectedConnections::default();
        let limit = ConnectionLimit::new(Listener::Admin, CONNECTIONS_MAX, rejected.clone());
        tokio::spawn(serve(listener, (pages, Guard::plain()), limit, std::future::pending()));
        (address, rejected)
    }

    fn health() -> Router {
        Router::new().route("/healthz", get(async || "ok\n"))
    }

    async fn ask(stream: &mut TcpStream) -> String {
        ask_for(stream, "/healthz").await
    }

    async fn ask_for(stream: &mut TcpStream, page: &str) -> String {
        let request = format!("GET {page} HTTP/1.1\r\nHost: a\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("open");
        let mut answer = vec![0; 1024];
        let length = stream.read(&mut answer).await.expect("open");
        String::from_utf8_lossy(&answer[..length]).into_owned()
    }

    #[tokio::test]
    async fn answers_a_probe_while_idle_connections_fill_the_server() {
        let (address, rejected) = server(health()).await;
        let mut idle = Vec::new();
        for _ in 0..50 {
            idle.push(TcpStream::connect(address).await.expect("listening"));
        }
        let mut probe = TcpStream::connect(address).await.expect("listening");
        assert!(ask(&mut probe).await.contains("200 OK"));
        assert_eq!(rejected.get(Listener::Admin, Reason::Idle), 51 - CONNECTIONS_MAX as u64);
        // The longest-idle connection was closed.
        assert_eq!(idle[0].read(&mut [0]).await.unwrap_or(0), 0);
    }

    #[tokio::test]
    async fn a_used_connection_outlives_idle_unused_ones() {
        let (address, _) = server(health()).await;
        let mut used = TcpStream::connect(address).await.expect("listening");
        assert!(ask(&mut used).await.contains("200 OK"));
        for _ in 0..20 {
            let mut idle = TcpStream::connect(address).await.expect("listening");
            idle.write_all(b"GET /heal").await.expect("open");
        }
        assert!(ask(&mut used).await.contains("200 OK"));
    }

    #[tokio::test]
    async fn rejects_a_connection_while_all_others_are_busy() {
        let (release, _) = watch::channel(false);
        let page = {
            let release = release.clone();
            async move || {
                let _ = release.subscribe().wait_for(|released| *released).await;
                "ok\n"
            }
        };
        let (address, rejected) = server(health().route("/page", get(page))).await;
        let mut busy = Vec::new();
        for _ in 0..CONNECTIONS_MAX {
            let mut stream = TcpStream::connect(address).await.expect("listening");
            busy.push(tokio::spawn(async move { ask_for(&mut stream, "/page").await }));
        }
        // All requests must be running: otherwise the new connection would replace an idle one.
        while release.receiver_count() < CONNECTIONS_MAX {
            tokio::task::yield_now().await;
        }
        let mut refused = TcpStream::connect(address).await.expect("listening");
        assert_eq!(refused.read(&mut [0]).await.unwrap_or(0), 0);
        assert_eq!(rejected.get(Listener::Admin, Reason::Full), 1);
        release.send_replace(true);
        for answered in busy {
            assert!(answered.await.expect("completed").contains("200 OK"));
        }
        let mut again = TcpStream::connect(address).await.expect("listening");
        assert!(ask(&mut again).await.contains("200 OK"));
    }

    #[tokio::test]
    async fn answers_a_probe_while_waiting_probes_fill_the_server() {
        let (waits, _) = watch::channel(());
        let page = {
            let waits = waits.clone();
            async move || {
                let _ = waits.subscribe().changed().await;
                "ok\n"
            }
        };
        let (address, _) = server(health().route("/startz", get(page))).await;
        let mut waiting = Vec::new();
        for _ in 0..2 * CONNECTIONS_MAX {
            let mut stream = TcpStream::connect(address).await.expect("listening");
            waiting.push(tokio::spawn(async move { ask_for(&mut stream, "/startz").await }));
            while waits.receiver_count() < waiting.len().min(CONNECTIONS_MAX) {
                tokio::task::yield_now().await;
            }
        }
        let mut probe = TcpStream::connect(address).await.expect("listening");
        assert!(ask(&mut probe).await.contains("200 OK"));
        waiting.iter().for_each(tokio::task::JoinHandle::abort);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_is_replaced_after_a_day_behind_its_running_request() {
        let page = async || {
            sleep(CONNECTION_GRACE / 2).await;
            "ok\n"
        };
        let (address, _) = server(health().route("/page", get(page))).await;
        let begun = tokio::time::Instant::now();
        let mut used = TcpStream::connect(address).await.expect("listening");
        // Scrapes keep it open until shortly before.
        let last = CONNECTION_AGE_MAX - CONNECTION_GRACE / 4;
        while begun.elapsed() < last {
            assert!(ask(&mut used).await.contains("200 OK"));
            tokio::time::advance((last - begun.elapsed()).min(CONNECTION_GRACE)).await;
        }
        assert!(ask_for(&mut used, "/page").await.contains("200 OK"), "answered after a day");
        assert!(begun.elapsed() >= CONNECTION_AGE_MAX);
        assert_eq!(used.read(&mut [0]).await.unwrap_or(0), 0);
    }

    #[tokio::test]
    async fn counts_invalid_requests() {
        let (address, rejected) = server(health()).await;
        for _ in 0..3 {
            let mut stream = TcpStream::connect(address).await.expect("listening");
            stream.write_all(b"\x00\x01\x02\xff\r\n\r\n").await.expect("open");
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
        }
        assert_eq!(rejected.get(Listener::Admin, Reason::Protocol), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn closes_a_connection_without_a_request_after_the_time_limit() {
        let (address, rejected) = server(health()).await;
        let mut idle = TcpStream::connect(address).await.expect("listening");
        idle.write_all(b"GET /heal").await.expect("open");
        assert_eq!(idle.read(&mut [0; 512]).await.unwrap_or(0), 0);
        assert_eq!(rejected.get(Listener::Admin, Reason::Timeout), 1);
    }
}
