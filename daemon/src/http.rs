//! An HTTP server for admin ports that idle and slow clients cannot block.
//!
//! At most `connections_max` connections; a full server closes its longest-idle connection for a new one, so that a probe is
//! answered while any number of idle connections is held open. A connection that sends no complete request header within
//! [`REQUEST_WITHIN`], its first one or the next one, is closed. A response that its client does not read leaves the
//! connection idle.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::response::Response;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::connections::{ConnectionLimit, Permit};
use crate::rejected::Reason;

/// Time for a request header, and between two requests. Scrapers keep a connection for intervals of up to a minute.
pub const REQUEST_WITHIN: Duration = Duration::from_secs(65);

/// Connections that the kernel keeps until they are accepted. One beyond them is tried again by its client after a second,
/// which is a probe's whole patience.
const BACKLOG: i32 = 4096;

/// Bytes of a request header and of the buffers of one connection.
const BUFFER_BYTES: usize = 16 << 10;

/// Serves pages until `stop` is done, then until the last request under way has its answer.
pub async fn serve(
    listener: TcpListener,
    pages: Router,
    limit: ConnectionLimit,
    stop: impl Future<Output = ()>,
) {
    if let Err(error) = rustix::net::listen(&listener, BACKLOG) {
        tracing::warn!(%error, "cannot enlarge the queue of connections");
    }
    let (stopping, is_stopping) = watch::channel(false);
    let mut connections = JoinSet::new();
    let mut stop = std::pin::pin!(stop);
    loop {
        tokio::select! {
            (stream, permit) = limit.accept(&listener) => {
                while connections.try_join_next().is_some() {}
                connections.spawn(serve_connection(stream, pages.clone(), permit, is_stopping.clone()));
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
    pages: Router,
    permit: Permit,
    mut stopping: watch::Receiver<bool>,
) {
    let permit = Arc::new(permit);
    let pages = TowerToHyperService::new(pages);
    let service = service_fn(|request: Request<Incoming>| {
        let (permit, answer) = (Arc::clone(&permit), hyper::service::Service::call(&pages, request));
        async move {
            permit.set_busy();
            let answer: Result<Response, Infallible> = answer.await;
            permit.set_idle();
            answer
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(REQUEST_WITHIN)
        .max_buf_size(BUFFER_BYTES)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = std::pin::pin!(connection);
    let stopped = async {
        // The sender going away means the same.
        let _ = stopping.wait_for(|stopping| *stopping).await;
    };
    let served = tokio::select! {
        served = &mut connection => served,
        () = permit.closed() => return,
        () = stopped => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = served {
        let listener = permit.limit().listener().as_str();
        tracing::debug!(listener, %error, "an HTTP connection has failed");
        if error.is_timeout() {
            permit.limit().count(Reason::Timeout);
        } else if error.is_parse() {
            permit.limit().count(Reason::Protocol);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use axum::routing::get;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::rejected::{Listener, RejectedConnections};

    const CONNECTIONS_MAX: usize = 4;

    async fn server(pages: Router) -> (SocketAddr, RejectedConnections) {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let rejected = RejectedConnections::default();
        let limit = ConnectionLimit::new(Listener::Admin, CONNECTIONS_MAX, rejected.clone());
        tokio::spawn(serve(listener, pages, limit, std::future::pending()));
        (address, rejected)
    }

    fn health() -> Router {
        Router::new().route("/healthz", get(async || "ok\n"))
    }

    async fn ask(stream: &mut TcpStream) -> String {
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n").await.expect("it is open");
        let mut answer = vec![0; 1024];
        let length = stream.read(&mut answer).await.expect("it is open");
        String::from_utf8_lossy(&answer[..length]).into_owned()
    }

    #[tokio::test]
    async fn a_probe_is_answered_while_idle_connections_fill_the_server() {
        let (address, rejected) = server(health()).await;
        let mut idle = Vec::new();
        for _ in 0..50 {
            idle.push(TcpStream::connect(address).await.expect("it listens"));
        }
        let mut probe = TcpStream::connect(address).await.expect("it listens");
        assert!(ask(&mut probe).await.contains("200 OK"));
        assert_eq!(rejected.get(Listener::Admin, Reason::Idle), 51 - CONNECTIONS_MAX as u64);
        // The oldest one was closed.
        assert_eq!(idle[0].read(&mut [0]).await.unwrap_or(0), 0);
    }

    #[tokio::test]
    async fn a_connection_that_was_used_outlives_idle_ones_that_were_not() {
        let (address, _) = server(health()).await;
        let mut used = TcpStream::connect(address).await.expect("it listens");
        assert!(ask(&mut used).await.contains("200 OK"));
        for _ in 0..20 {
            let mut idle = TcpStream::connect(address).await.expect("it listens");
            idle.write_all(b"GET /heal").await.expect("it is open");
        }
        assert!(ask(&mut used).await.contains("200 OK"));
    }

    #[tokio::test]
    async fn a_new_connection_is_refused_while_every_connection_has_a_request_under_way() {
        let (release, _) = watch::channel(false);
        let page = {
            let release = release.clone();
            async move || {
                let _ = release.subscribe().wait_for(|released| *released).await;
                "ok\n"
            }
        };
        let (address, rejected) = server(Router::new().route("/healthz", get(page))).await;
        let mut busy = Vec::new();
        for _ in 0..CONNECTIONS_MAX {
            let mut stream = TcpStream::connect(address).await.expect("it listens");
            busy.push(tokio::spawn(async move { ask(&mut stream).await }));
        }
        // Refused for sure only once all requests are under way: an earlier one closes an idle connection.
        while release.receiver_count() < CONNECTIONS_MAX {
            tokio::task::yield_now().await;
        }
        let mut refused = TcpStream::connect(address).await.expect("it listens");
        assert_eq!(refused.read(&mut [0]).await.unwrap_or(0), 0);
        assert_eq!(rejected.get(Listener::Admin, Reason::Full), 1);
        release.send_replace(true);
        for answered in busy {
            assert!(answered.await.expect("it ends").contains("200 OK"));
        }
        let mut again = TcpStream::connect(address).await.expect("it listens");
        assert!(ask(&mut again).await.contains("200 OK"));
    }

    #[tokio::test]
    async fn garbage_is_counted() {
        let (address, rejected) = server(health()).await;
        for _ in 0..3 {
            let mut stream = TcpStream::connect(address).await.expect("it listens");
            stream.write_all(b"\x00\x01\x02\xff\r\n\r\n").await.expect("it is open");
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer).await;
        }
        assert_eq!(rejected.get(Listener::Admin, Reason::Protocol), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_without_a_request_is_closed_in_time() {
        let (address, rejected) = server(health()).await;
        let mut idle = TcpStream::connect(address).await.expect("it listens");
        idle.write_all(b"GET /heal").await.expect("it is open");
        assert_eq!(idle.read(&mut [0; 512]).await.unwrap_or(0), 0);
        assert_eq!(rejected.get(Listener::Admin, Reason::Timeout), 1);
    }
}
