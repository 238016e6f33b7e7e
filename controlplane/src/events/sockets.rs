//! Connections of subscribers (to PUB) and of those who ask for a replay (to ROUTER), one task each.
//!
//! A subscriber reads the publisher's buffer at a number of its own, so nothing is queued for it: it has 64 KiB that are being
//! written, and what the kernel holds. One that takes nothing for [`STALLED_AFTER`] is cut; one whose machine is gone is found by
//! TCP's keep-alive. Each of both sockets has at most `events.subscribers` connections. A full one closes its longest-idle
//! connection for a new one: one that has not greeted, has no subscription, or waits for no replay. Such a connection is also
//! closed after [`SILENT_MAX`]. ZeroMQ connects again by itself when its user has something to send.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use reprise_daemon::connections::{ConnectionLimit, Permit};
use reprise_daemon::rejected::Reason;
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use super::publisher::{Batch, Hub};
use super::replay;
use super::zmtp::{self, Received, Role, ZmtpError};

/// Whoever connects says who it is within this time.
const GREETED_WITHIN: Duration = Duration::from_secs(5);
/// A connection that takes no byte for this long is cut.
const STALLED_AFTER: Duration = Duration::from_secs(10);
/// Time for one replay, the wait for its turn included: 48 MiB of buffer, or a snapshot.
const REPLAY_WITHIN: Duration = Duration::from_secs(120);
/// Silence after which TCP asks whether the other machine is there, then the pause between such questions, and their number.
const KEEP_ALIVE_AFTER: Duration = Duration::from_secs(30);
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEP_ALIVE_COUNT: u32 = 3;
/// Silence of a connection that waits for nothing: routers ask for a replay when they have missed something, which is rare.
const SILENT_MAX: Duration = Duration::from_secs(600);
/// Bytes that are written together.
const WRITE_BYTES: usize = 64 << 10;
/// What a peer may have said that was not yet looked at; it waits then.
const RECEIVED_MAX: usize = 8;
/// Subscriptions of one subscriber: there is one topic.
const SUBSCRIPTIONS_MAX: usize = 64;

/// What is on its way to a peer.
#[derive(Debug)]
pub(super) struct Out<W> {
    write: W,
    pending: Vec<u8>,
}

/// What a subscriber wants: messages whose topic begins with one of these.
#[derive(Debug, Default)]
struct Subscriptions(Vec<Vec<u8>>);

/// Accepts connections for ever; they end with it.
pub(super) async fn serve(listener: TcpListener, role: Role, hub: Arc<Hub>, limit: ConnectionLimit) {
    let mut connections = JoinSet::new();
    loop {
        let (stream, permit) = limit.accept(&listener).await;
        while connections.try_join_next().is_some() {}
        let hub = hub.clone();
        connections.spawn(async move {
            tokio::select! {
                ended = talk(stream, role, &hub, &permit) => {
                    let Err(error) = ended;
                    tracing::debug!(?role, %error, "a connection for KV events has ended");
                }
                () = permit.closed() => {}
            }
        });
    }
}

/// Talks to a peer until one of both ends it.
async fn talk(
    mut stream: TcpStream,
    role: Role,
    hub: &Hub,
    permit: &Permit,
) -> Result<Infallible, ZmtpError> {
    keep_alive(&stream)?;
    let greeted = timeout(GREETED_WITHIN, zmtp::greet(&mut stream, role)).await.map_err(|_| {
        permit.limit().count(Reason::Timeout);
        ZmtpError::Peer("it sent no greeting in time")
    })?;
    greeted.inspect_err(|_| permit.limit().count(Reason::Protocol))?;
    permit.set_idle();
    let (read, write) = stream.into_split();
    let (sender, received) = mpsc::channel(RECEIVED_MAX);
    let out = Out { write, pending: Vec::new() };
    tokio::select! {
        ended = listen(BufReader::new(read), sender) => ended,
        ended = async {
            match role {
                Role::Publisher => publish((hub, permit), received, out).await,
                Role::Router => answer((hub, permit), received, out).await,
            }
        } => ended,
    }
}

fn keep_alive(stream: &TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, KEEP_ALIVE_AFTER)?;
    sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE_EVERY)?;
    Ok(sockopt::set_tcp_keepcnt(stream, KEEP_ALIVE_COUNT)?)
}

async fn listen<R: AsyncRead + Unpin>(
    mut read: R,
    sender: mpsc::Sender<Received>,
) -> Result<Infallible, ZmtpError> {
    loop {
        let received = zmtp::receive(&mut read).await?;
        if sender.send(received).await.is_err() {
            // The other half has ended, and says why.
            std::future::pending::<()>().await;
        }
    }
}

/// Sends batches to a subscriber, from the next one on.
async fn publish<W: AsyncWrite + Unpin>(
    (hub, permit): (&Hub, &Permit),
    mut received: mpsc::Receiver<Received>,
    mut out: Out<W>,
) -> Result<Infallible, ZmtpError> {
    let mut subscriptions = Subscriptions::default();
    let mut published = hub.published();
    let mut next = 0;
    loop {
        let wanted = subscriptions.want(&hub.topic);
        tokio::select! {
            said = received.recv() => match said {
                Some(Received::Message(frames)) => subscriptions.take(&frames)?,
                Some(Received::Command(body)) => out.pong(&body).await?,
                None => return Err(ZmtpError::Peer("it is gone")),
            },
            _ = published.changed(), if wanted => {
                next = send_published(hub, next, &mut out).await?;
            }
            () = sleep(SILENT_MAX), if !wanted => return Err(ZmtpError::Peer("it subscribes to nothing")),
        }
        match (wanted, subscriptions.want(&hub.topic)) {
            (false, true) => {
                permit.set_busy();
            }
            (true, false) => permit.set_idle(),
            _ => {}
        }
        if !wanted && subscriptions.want(&hub.topic) {
            published.mark_unchanged();
            next = hub.kept().end;
        }
    }
}

/// Sends all batches from `next` on that there are; the number of the first that is not.
async fn send_published<W: AsyncWrite + Unpin>(
    hub: &Hub,
    mut next: u64,
    out: &mut Out<W>,
) -> Result<u64, ZmtpError> {
    loop {
        match hub.batch(next) {
            Batch::There(payload) => {
                out.message(&[hub.topic.as_bytes(), &next.to_be_bytes(), &payload]).await?;
                next += 1;
            }
            Batch::Gone { oldest } => {
                hub.cluster.metrics.event_batches_skipped.inc_by(oldest - next);
                next = oldest;
            }
            Batch::NotYet => {
                out.flush().await?;
                return Ok(next);
            }
        }
    }
}

/// Answers replays, one after the other.
async fn answer<W: AsyncWrite + Unpin>(
    (hub, permit): (&Hub, &Permit),
    mut received: mpsc::Receiver<Received>,
    mut out: Out<W>,
) -> Result<Infallible, ZmtpError> {
    loop {
        let said = timeout(SILENT_MAX, received.recv()).await;
        match said.map_err(|_| ZmtpError::Peer("it asks for nothing"))? {
            Some(Received::Message(frames)) => {
                let start = start(&frames).ok_or(ZmtpError::Peer(
                    "a replay is asked for by an empty frame and 8 bytes, big endian",
                ))?;
                // Replays wait for each other: one that is read too slowly must not keep the others waiting.
                permit.set_busy();
                let answered = timeout(REPLAY_WITHIN, replay::answer(hub, start, &mut out)).await;
                permit.set_idle();
                answered.map_err(|_| ZmtpError::Peer("it reads a replay too slowly"))??;
            }
            Some(Received::Command(body)) => out.pong(&body).await?,
            None => return Err(ZmtpError::Peer("it is gone")),
        }
    }
}

/// The number that a replay is to begin with.
fn start(frames: &[Vec<u8>]) -> Option<u64> {
    let [delimiter, number] = frames else { return None };
    let number: [u8; 8] = number.as_slice().try_into().ok()?;
    delimiter.is_empty().then(|| u64::from_be_bytes(number))
}

impl<W: AsyncWrite + Unpin> Out<W> {
    /// Sends a message, at once or with those that follow.
    pub(super) async fn message(&mut self, frames: &[&[u8]]) -> Result<(), ZmtpError> {
        zmtp::message(frames, &mut self.pending);
        if self.pending.len() >= WRITE_BYTES { self.flush().await } else { Ok(()) }
    }

    /// Sends what was not yet sent.
    pub(super) async fn flush(&mut self) -> Result<(), ZmtpError> {
        let mut rest = self.pending.as_slice();
        while !rest.is_empty() {
            let written = timeout(STALLED_AFTER, self.write.write(rest)).await;
            let written = written.map_err(|_| ZmtpError::Peer("it takes nothing"))??;
            rest = &rest[written..];
        }
        self.pending.clear();
        Ok(())
    }

    async fn pong(&mut self, command: &[u8]) -> Result<(), ZmtpError> {
        if let Some(pong) = zmtp::pong(command) {
            self.pending.extend(pong);
            self.flush().await?;
        }
        Ok(())
    }
}

impl Subscriptions {
    fn want(&self, topic: &str) -> bool {
        self.0.iter().any(|prefix| topic.as_bytes().starts_with(prefix))
    }

    /// A subscription, or the end of one, RFC 29 §"PUB and SUB".
    fn take(&mut self, frames: &[Vec<u8>]) -> Result<(), ZmtpError> {
        let [frame] = frames else { return Err(ZmtpError::Peer("it sends messages to a publisher")) };
        match frame.split_first() {
            Some((1, prefix)) if self.0.len() < SUBSCRIPTIONS_MAX => self.0.push(prefix.to_vec()),
            Some((1, _)) => return Err(ZmtpError::Peer("it has too many subscriptions")),
            Some((0, prefix)) => {
                if let Some(index) = self.0.iter().position(|known| known == prefix) {
                    self.0.swap_remove(index);
                }
            }
            _ => return Err(ZmtpError::Peer("it sends messages to a publisher")),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use reprise_daemon::rejected::RejectedConnections;

    use super::*;
    use crate::config::EventsConfig;
    use crate::events::publisher::tests::cluster;

    fn hub() -> Hub {
        Hub::new(cluster(), &EventsConfig::default())
    }

    fn out() -> Out<tokio::io::Sink> {
        Out { write: tokio::io::sink(), pending: Vec::new() }
    }

    async fn permit() -> Permit {
        let limit = ConnectionLimit::new(Role::Router.listener(), 1, RejectedConnections::default());
        limit.admit().await.expect("there is room")
    }

    /// What a peer says: a message of one frame for each.
    fn said(frames: &[&[u8]]) -> Received {
        Received::Message(frames.iter().map(|frame| frame.to_vec()).collect())
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_asks_for_no_replay_is_let_go_some_time_after_the_last_one() {
        let (hub, permit, began) = (hub(), permit().await, Instant::now());
        let (sender, received) = mpsc::channel(1);
        let replay = said(&[b"", &0u64.to_be_bytes()]);
        let asking = async {
            sleep(SILENT_MAX - Duration::from_secs(1)).await;
            sender.send(replay).await.expect("it is listened to");
            std::future::pending::<()>().await;
        };
        let ended = tokio::select! {
            ended = answer((&hub, &permit), received, out()) => ended,
            () = asking => unreachable!("it waits"),
        };
        assert!(matches!(ended, Err(ZmtpError::Peer("it asks for nothing"))), "{ended:?}");
        assert!(began.elapsed() >= 2 * SILENT_MAX - Duration::from_secs(1), "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn a_subscriber_without_a_subscription_is_let_go_and_one_with_it_may_be_silent() {
        let (hub, permit) = (hub(), permit().await);
        let (_sender, received) = mpsc::channel(1);
        let ended = publish((&hub, &permit), received, out()).await;
        assert!(matches!(ended, Err(ZmtpError::Peer("it subscribes to nothing"))), "{ended:?}");
        let (sender, received) = mpsc::channel(1);
        sender.send(said(&[b"\x01"])).await.expect("there is room");
        let ended = timeout(10 * SILENT_MAX, publish((&hub, &permit), received, out())).await;
        assert!(ended.is_err(), "{ended:?}");
    }
}
