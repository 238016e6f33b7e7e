//! gRPC server with one single-threaded runtime per processor. A thread serves all calls of its connections.
//!
//! ```text
//! accepting task ──(peer's address)──▶ thread 0: TLS handshake ─ HTTP/2 ─ caller ─ directory ─ HTTP/2 ─ write
//!                                 └──▶ thread 1: the same
//! ```
//!
//! A lookup of one key takes a microsecond in the directory. Its cost is thread wake-ups, 30 to 50 µs each on
//! a virtual machine. In a work-stealing runtime each event wakes a second thread that searches for work;
//! with few processors this delays the reply. Here a call wakes one thread, once.
//!
//! The thread of a connection is a hash of the peer's address and port. Round-robin would be unbalanced,
//! because each agent opens a connection for heartbeats and one for lookups, always in that order. Long work
//! is split into parts ([`crate::admission`]), so a heartbeat behind it waits for less than a millisecond.
//!
//! [`connection`] and the limit passed to [`serve`] decide how many connections exist and which are closed.
//! Connections never move to another thread.
//!
//! Each handshake is a task on the connection's thread, so a client that stalls delays no other. It takes
//! 0.3 ms of the thread and at most [`HANDSHAKE_WITHIN`]. Its connection counts against the share of its address, and then
//! of its identity: a flood of handshakes closes its own longest-waiting connections first.
//!
//! [`HANDSHAKE_WITHIN`]: reprise_identity::tls::HANDSHAKE_WITHIN

pub(crate) mod caller;
mod connection;

use reprise_daemon::connections::{ConnectionLimit, Permit};
use reprise_daemon::rejected_connections::Reason;
use reprise_identity::Security;
use reprise_identity::limits::Client;
use reprise_identity::tls::TlsError;
use std::future::poll_fn;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::Poll;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_stream::StreamExt;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::server::Router;

use connection::Connection;

/// Accepted connections queued for a thread; further ones wait in the listener's queue.
const QUEUED_CONNECTIONS_MAX: usize = 64;

/// Reasons for which the gRPC server ends.
#[derive(Debug, thiserror::Error)]
pub enum GrpcServerError {
    /// A thread or its runtime cannot be started.
    #[error("cannot start a gRPC thread: {0}")]
    Start(#[source] io::Error),
    /// A server returned an error.
    #[error(transparent)]
    Serve(#[from] tonic::transport::Error),
    /// A thread panicked; the panic hook has logged the message.
    #[error("a gRPC thread panicked: this is a bug, please report it")]
    Panicked,
}

/// An accepted connection before its handshake.
type Accepted = (std::net::TcpStream, Permit);

/// Queue of accepted connections of one thread.
type ConnectionSender = mpsc::Sender<Accepted>;

/// Handle of a gRPC thread.
struct ServingThread {
    ended: oneshot::Receiver<Result<(), GrpcServerError>>,
    /// Closes the thread's connections when dropped.
    _cut: oneshot::Sender<()>,
}

/// Inputs of a gRPC thread.
struct ThreadState {
    router: Router,
    connections: mpsc::Receiver<Accepted>,
    security: Security,
    stop: watch::Receiver<bool>,
    cut: oneshot::Receiver<()>,
}

/// Serves on one thread per router. After `stop`, waits until the running calls have ended. Dropping the
/// future closes all connections.
///
/// # Errors
/// A thread cannot be started, or one ended by itself; the others are stopped.
pub async fn serve(
    (listener, limit): (TcpListener, ConnectionLimit),
    security: &Security,
    routers: Vec<Router>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), GrpcServerError> {
    let start = |(number, router)| start((number, security.clone()), router, stop.clone());
    let started = routers.into_iter().enumerate().map(start).collect::<Result<Vec<_>, GrpcServerError>>()?;
    let (senders, mut threads): (Vec<ConnectionSender>, Vec<ServingThread>) = started.into_iter().unzip();
    tokio::select! {
        () = accept(&listener, &limit, &senders) => {}
        // An error means that the sender is gone, which also means stop.
        _ = stop.wait_for(|stop| *stop) => {}
        ended = first_exit(&mut threads) => return ended,
    }
    drop((listener, senders));
    for thread in &mut threads {
        (&mut thread.ended).await.unwrap_or(Err(GrpcServerError::Panicked))?;
    }
    Ok(())
}

/// Passes accepted connections to their threads; returns when a thread has ended.
async fn accept(listener: &TcpListener, limit: &ConnectionLimit, senders: &[ConnectionSender]) {
    loop {
        let (stream, permit) = limit.accept(listener).await;
        // Both calls fail for a connection that the peer has already closed.
        let Ok(peer) = stream.peer_addr() else { continue };
        let Ok(stream) = stream.into_std() else { continue };
        if senders[thread_of(peer, senders.len())].send((stream, permit)).await.is_err() {
            return;
        }
    }
}

/// Index of the thread that serves connections of this peer.
fn thread_of(peer: SocketAddr, threads: usize) -> usize {
    let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(peer);
    usize::try_from(hash % threads as u64).expect("below the number of threads")
}

/// Waits for the first thread to end; while running, none does.
async fn first_exit(threads: &mut [ServingThread]) -> Result<(), GrpcServerError> {
    poll_fn(|context| {
        let ready = threads.iter_mut().find_map(|thread| match Pin::new(&mut thread.ended).poll(context) {
            Poll::Ready(ended) => Some(ended.unwrap_or(Err(GrpcServerError::Panicked))),
            Poll::Pending => None,
        });
        ready.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

/// Starts a gRPC thread.
fn start(
    (number, security): (usize, Security),
    router: Router,
    stop: watch::Receiver<bool>,
) -> Result<(ConnectionSender, ServingThread), GrpcServerError> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(GrpcServerError::Start)?;
    let (hand_over, connections) = mpsc::channel(QUEUED_CONNECTIONS_MAX);
    let (report, ended) = oneshot::channel();
    let (keep, cut) = oneshot::channel();
    let duties = ThreadState { router, connections, security, stop, cut };
    let thread = std::thread::Builder::new().name(format!("grpc-{number}"));
    let serve = move || {
        let served = runtime.block_on(duties.serve());
        // Drop the runtime before reporting the end: the caller may then close resources that calls use.
        drop(runtime);
        // The receiver is gone if `serve` was dropped.
        let _ = report.send(served);
    };
    thread.spawn(serve).map_err(GrpcServerError::Start)?;
    Ok((hand_over, ServingThread { ended, _cut: keep }))
}

impl ThreadState {
    async fn serve(self) -> Result<(), GrpcServerError> {
        let ThreadState { router, connections, security, mut stop, cut } = self;
        let (established, incoming) = mpsc::channel(QUEUED_CONNECTIONS_MAX);
        tokio::spawn(establish_all(connections, security, established));
        let incoming = ReceiverStream::new(incoming).map(Ok::<_, io::Error>);
        let stopped = async move {
            // An error means that the sender is gone, which also means stop.
            let _ = stop.wait_for(|stop| *stop).await;
        };
        tokio::select! {
            served = router.serve_with_incoming_shutdown(incoming, stopped) => Ok(served?),
            _ = cut => Ok(()),
        }
    }
}

/// Starts the handshakes of a thread; ends when the accepting task has ended.
async fn establish_all(
    mut connections: mpsc::Receiver<Accepted>,
    security: Security,
    established: mpsc::Sender<Connection>,
) {
    while let Some((stream, permit)) = connections.recv().await {
        // Both calls fail for a connection that the peer has already closed.
        let stream = stream.set_nodelay(true).and_then(|()| TcpStream::from_std(stream));
        if let Ok(stream) = stream {
            tokio::spawn(establish(security.clone(), (stream, permit), established.clone()));
        }
    }
}

/// Completes the handshake of a connection, and passes it to the server.
async fn establish(
    security: Security,
    (stream, permit): (TcpStream, Permit),
    established: mpsc::Sender<Connection>,
) {
    let address = stream.peer_addr();
    let accepted = tokio::select! {
        accepted = security.accept(stream) => accepted,
        // Closed to make room for another one, which the limit has counted.
        () = permit.closed() => return,
    };
    match accepted {
        // It uses its whole share, which the limit has counted.
        Ok((_, Some(client))) if !permit.set_identity(&client.identity) => {}
        // Fails only if the thread ends.
        Ok((stream, client)) => {
            let _ = established.send(Connection::new(stream, client, permit)).await;
        }
        Err(error) => {
            let reason = if let TlsError::Timeout = error { Reason::Timeout } else { Reason::Certificate };
            permit.limit().count(reason);
            let client = address.ok().map(|address| tracing::field::display(Client::at(address.ip())));
            let (condition, listener) = (error.kind(), permit.limit().listener().as_str());
            tracing::warn!(condition, listener, client, %error, "closed a connection without a valid certificate");
        }
    }
}

#[cfg(test)]
mod tests {
    use reprise_daemon::rejected_connections::{Listener, RejectedConnections};
    use reprise_identity::authority::{Authority, CERTIFICATE_VALID};
    use reprise_identity::{Identity, Role, Tls};
    use tokio::io::AsyncWriteExt;

    use super::*;

    fn security() -> Security {
        let authority = Authority::create("test").expect("a valid name");
        let member = Identity::new("test", Role::Member).expect("a valid name");
        let issued = authority.issue(&member, CERTIFICATE_VALID).expect("a valid period");
        Security::Tls(Tls::new(issued.into_credentials(authority.certificate()).expect("valid files")))
    }

    #[tokio::test]
    async fn counts_connections_without_a_certificate_and_does_not_serve_them() {
        let rejected = RejectedConnections::default();
        let limit = ConnectionLimit::new(Listener::Grpc, 4, rejected.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("bound");
        let mut client = TcpStream::connect(address).await.expect("listening");
        client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("connected");
        let accepted = limit.accept(&listener).await;
        let (established, mut incoming) = mpsc::channel(1);
        establish(security(), accepted, established).await;
        assert!(incoming.recv().await.is_none(), "the server has no connection");
        assert_eq!(rejected.get(Listener::Grpc, Reason::Certificate), 1);
    }

    #[test]
    fn spreads_the_connections_of_one_peer_over_threads() {
        let mut counts = [0; 4];
        for port in (40_000..48_000).step_by(2) {
            counts[thread_of(SocketAddr::from(([127, 0, 0, 1], port)), 4)] += 1;
        }
        assert!(counts.iter().all(|count| (900..1100).contains(count)), "{counts:?}");
    }
}
