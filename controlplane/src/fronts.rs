//! The threads that serve gRPC. Each has connections and a runtime of its own, and does all that its connections ask for.
//!
//! ```text
//! accepting task ──(peer's address)──▶ front 0: epoll ─ HTTP/2 ─ directory ─ HTTP/2 ─ write
//!                                 └──▶ front 1: the same
//! ```
//!
//! A look-up of one key takes a microsecond in the directory; what it costs is wake-ups, of 30 to 50 µs each on a virtual machine. On
//! threads that share their tasks each event wakes a second thread, which looks for work to take over and finds none, and on
//! few processors keeps the caller from hearing its answer. Here a call wakes one thread, once.
//!
//! Which front has a connection follows from the peer's address and port, not from a turn: an agent opens a connection for
//! heartbeats and another one for look-ups, always in that order. What may keep a front busy is cut into parts
//! ([`crate::turns`]), so a heartbeat behind one waits for less than a millisecond.
//!
//! How many connections there may be, and which are closed, is for [`connection`] and the limit that [`serve`] is given.
//!
//! Deliberately absent: moving a connection to a front that has less to do.

mod connection;

use reprise_daemon::connections::{ConnectionLimit, Permit};
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

/// Connections that wait for their front to take them; further ones wait in the listener's queue.
const HANDED_OVER_MAX: usize = 64;

/// Why gRPC is served no more.
#[derive(Debug, thiserror::Error)]
pub enum FrontError {
    /// No thread, or no runtime for it.
    #[error("a thread for gRPC cannot be started: {0}")]
    Start(#[source] io::Error),
    /// The server has ended by itself.
    #[error(transparent)]
    Serve(#[from] tonic::transport::Error),
    /// The thread is gone without a word.
    #[error("a thread that serves gRPC has panicked, which is a bug: please report it")]
    Panicked,
}

/// Connections on their way to a front.
type HandOver = mpsc::Sender<(std::net::TcpStream, Permit)>;

/// How a front ends.
struct Ending {
    ended: oneshot::Receiver<Result<(), FrontError>>,
    /// Dropped, it cuts what the front still serves.
    _cut: oneshot::Sender<()>,
}

/// What a front needs.
struct Duties {
    router: Router,
    connections: mpsc::Receiver<(std::net::TcpStream, Permit)>,
    stop: watch::Receiver<bool>,
    cut: oneshot::Receiver<()>,
}

/// Serves on as many fronts as there are routers until told to stop, and then until the last call under way has ended. Dropped earlier, it
/// cuts all connections.
///
/// # Errors
/// A front could not be started, or one has ended by itself: the others are cut.
pub async fn serve(
    (listener, limit): (TcpListener, ConnectionLimit),
    routers: Vec<Router>,
    mut stop: watch::Receiver<bool>,
) -> Result<(), FrontError> {
    let start = |(number, router)| start(number, router, stop.clone());
    let started = routers.into_iter().enumerate().map(start).collect::<Result<Vec<_>, FrontError>>()?;
    let (fronts, mut endings): (Vec<HandOver>, Vec<Ending>) = started.into_iter().unzip();
    tokio::select! {
        () = accept(&listener, &limit, &fronts) => {}
        // The sender going away means the same.
        _ = stop.wait_for(|stop| *stop) => {}
        ended = first_end(&mut endings) => return ended,
    }
    drop((listener, fronts));
    for ending in &mut endings {
        (&mut ending.ended).await.unwrap_or(Err(FrontError::Panicked))?;
    }
    Ok(())
}

/// Hands connections to their fronts, until one takes none any more.
async fn accept(listener: &TcpListener, limit: &ConnectionLimit, fronts: &[HandOver]) {
    loop {
        let (stream, permit) = limit.accept(listener).await;
        // Both fail for a connection that has ended already.
        let Ok(peer) = stream.peer_addr() else { continue };
        let Ok(stream) = stream.into_std() else { continue };
        if fronts[place(peer, fronts.len())].send((stream, permit)).await.is_err() {
            return;
        }
    }
}

/// Which of so many fronts has the connections of this peer.
fn place(peer: SocketAddr, fronts: usize) -> usize {
    let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(peer);
    usize::try_from(hash % fronts as u64).expect("less than the number of fronts")
}

/// How the first of them ends. None should.
async fn first_end(endings: &mut [Ending]) -> Result<(), FrontError> {
    poll_fn(|context| {
        let ready = endings.iter_mut().find_map(|ending| match Pin::new(&mut ending.ended).poll(context) {
            Poll::Ready(ended) => Some(ended.unwrap_or(Err(FrontError::Panicked))),
            Poll::Pending => None,
        });
        ready.map_or(Poll::Pending, Poll::Ready)
    })
    .await
}

/// Starts a front.
fn start(
    number: usize,
    router: Router,
    stop: watch::Receiver<bool>,
) -> Result<(HandOver, Ending), FrontError> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(FrontError::Start)?;
    let (hand_over, connections) = mpsc::channel(HANDED_OVER_MAX);
    let (tell, ended) = oneshot::channel();
    let (keep, cut) = oneshot::channel();
    let duties = Duties { router, connections, stop, cut };
    let thread = std::thread::Builder::new().name(format!("grpc-{number}"));
    let serve = move || {
        let served = runtime.block_on(duties.serve());
        // Before it is told: whoever waits for the end may close what the calls use.
        drop(runtime);
        // Nobody waits when the member was cut short.
        let _ = tell.send(served);
    };
    thread.spawn(serve).map_err(FrontError::Start)?;
    Ok((hand_over, Ending { ended, _cut: keep }))
}

impl Duties {
    async fn serve(self) -> Result<(), FrontError> {
        let Duties { router, connections, mut stop, cut } = self;
        // A connection that has ended already fails here, and must not end the others.
        let incoming = ReceiverStream::new(connections).filter_map(|(stream, permit)| {
            stream.set_nodelay(true).ok()?;
            let stream = TcpStream::from_std(stream).ok()?;
            Some(Ok::<_, io::Error>(Connection::new(stream, permit)))
        });
        let stopped = async move {
            // The sender going away means the same.
            let _ = stop.wait_for(|stop| *stop).await;
        };
        tokio::select! {
            served = router.serve_with_incoming_shutdown(incoming, stopped) => Ok(served?),
            _ = cut => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connections_of_one_peer_are_spread_whatever_the_order_of_their_ports() {
        let mut counts = [0; 4];
        for port in (40_000..48_000).step_by(2) {
            counts[place(SocketAddr::from(([127, 0, 0, 1], port)), 4)] += 1;
        }
        assert!(counts.iter().all(|count| (900..1100).contains(count)), "{counts:?}");
    }
}
