//! Connections of subscribers (to PUB) and of replay clients (to ROUTER), one task each.
//!
//! Each subscriber reads the publisher's buffer at its own position, so nothing is queued for it except 64
//! KiB of output and the kernel's buffer. A subscriber that accepts no data for [`STALLED_AFTER`] is
//! disconnected; TCP keep-alive detects a vanished machine.
//!
//! Each of the two sockets has at most `events.subscribers` connections. A full socket closes its
//! longest-idle connection for a new one. Idle are connections without a greeting, without a subscription, or
//! without a running replay. An idle connection is closed after [`SILENT_MAX`]; ZeroMQ reconnects when its
//! user has something to send.
//!
//! ZeroMQ's protocol has no TLS. With certificates, it is spoken inside our TLS, to readers that may follow events;
//! `reprise events proxy` gives routers a plain socket on loopback. One reader has at most half of a socket's
//! connections.
//!
//! A connection ends after a day, and before its reader's certificate has ended: between two batches or replays, so
//! ZeroMQ connects again, and a router misses at most batches that it can have replayed.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use reprise_daemon::connections::{ConnectionLimit, Permit};
use reprise_daemon::rejected_connections::Reason;
use reprise_identity::access::{Call, authorise};
use reprise_identity::limits::{CONNECTION_AGE_MAX, Client, VerifiedIdentity};
use reprise_identity::tls::TlsError;
use reprise_identity::{Security, Stream};
use rustix::net::sockopt;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::publisher::{Batch, Hub};
use super::replay;
use super::zmtp::{self, PeerMessage, Role, ZmtpError};

/// Time limit for the greeting of a new connection.
const GREETED_WITHIN: Duration = Duration::from_secs(5);
/// Time after which a connection that accepts no data is closed.
const STALLED_AFTER: Duration = Duration::from_secs(10);
/// Time limit for one replay, including the wait for other replays: 48 MiB of buffer, or a snapshot.
const REPLAY_WITHIN: Duration = Duration::from_secs(120);
/// TCP keep-alive: silence before the first probe, interval between probes, and their number.
const KEEP_ALIVE_AFTER: Duration = Duration::from_secs(30);
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(10);
const KEEP_ALIVE_COUNT: u32 = 3;
/// Silence after which an idle connection is closed. Routers request replays only after missing batches,
/// which is rare.
const SILENT_MAX: Duration = Duration::from_secs(600);
/// Size of the output buffer, in bytes.
const WRITE_BYTES: usize = 64 << 10;
/// Received messages queued per connection; when it is full, reading stops.
const RECEIVED_MAX: usize = 8;
/// Maximum number of subscriptions per subscriber; there is only one topic.
const SUBSCRIPTIONS_MAX: usize = 64;

/// End of a connection that is replaced.
const TOO_OLD: ZmtpError = ZmtpError::Peer("has an old connection, and opens another one");

/// Buffered output of a connection.
#[derive(Debug)]
pub(super) struct PeerWriter<W> {
    write: W,
    pending: Vec<u8>,
}

/// Topic prefixes that a subscriber has subscribed to.
#[derive(Debug, Default)]
struct Subscriptions(Vec<Vec<u8>>);

/// Accepts connections until it is dropped, which ends them.
pub(super) async fn serve(
    (listener, security): (TcpListener, Security),
    role: Role,
    hub: Arc<Hub>,
    limit: ConnectionLimit,
) {
    let mut connections = JoinSet::new();
    loop {
        let (stream, permit) = limit.accept(&listener).await;
        while connections.try_join_next().is_some() {}
        let (hub, security) = (hub.clone(), security.clone());
        connections.spawn(async move {
            tokio::select! {
                ended = serve_connection((stream, &security), role, &hub, &permit) => {
                    let Err(error) = ended;
                    tracing::debug!(?role, %error, "KV event connection closed");
                }
                () = permit.closed() => {}
            }
        });
    }
}

/// Serves a connection until either side ends it.
async fn serve_connection(
    (stream, security): (TcpStream, &Security),
    role: Role,
    hub: &Hub,
    permit: &Permit,
) -> Result<Infallible, ZmtpError> {
    keep_alive(&stream)?;
    let (mut stream, age_max) = identify(stream, security, permit).await?;
    let end = Instant::now() + age_max;
    let greeted = timeout(GREETED_WITHIN, zmtp::greet(&mut stream, role)).await.map_err(|_| {
        permit.limit().count(Reason::Timeout);
        ZmtpError::Peer("sent no greeting in time")
    })?;
    greeted.inspect_err(|_| permit.limit().count(Reason::Protocol))?;
    permit.set_idle();
    let (read, write) = tokio::io::split(stream);
    let (sender, received) = mpsc::channel(RECEIVED_MAX);
    let out = PeerWriter { write, pending: Vec::new() };
    tokio::select! {
        ended = listen(BufReader::new(read), sender) => ended,
        ended = async {
            match role {
                Role::Publisher => publish((hub, permit), received, out, end).await,
                Role::Router => answer((hub, permit), received, out, end).await,
            }
        } => ended,
    }
}

/// Completes the handshake of a reader, and checks whether it may follow events. Returns the age at which the
/// connection is replaced.
async fn identify(
    stream: TcpStream,
    security: &Security,
    permit: &Permit,
) -> Result<(Stream, Duration), ZmtpError> {
    let listener = permit.limit().listener().as_str();
    let address = stream.peer_addr().ok();
    let refuse = |reason| permit.limit().count(reason);
    match security.accept(stream).await {
        Ok((stream, None)) => Ok((stream, CONNECTION_AGE_MAX)),
        Ok((stream, Some(VerifiedIdentity { identity, validity }))) => {
            if let Err(refusal) = authorise(Some(&identity), Call::SubscribeEvents) {
                refuse(Reason::Refused);
                tracing::warn!(listener, client = %identity, %refusal, "refused a reader of events");
                return Err(ZmtpError::Peer("may not follow events"));
            }
            if permit.set_identity(&identity) {
                Ok((stream, validity.replaced_after()))
            } else {
                Err(ZmtpError::Peer("has its share of the connections"))
            }
        }
        Err(error) => {
            refuse(if matches!(error, TlsError::Timeout) { Reason::Timeout } else { Reason::Refused });
            let client = address.map(|address| tracing::field::display(Client::at(address.ip())));
            let condition = error.kind();
            tracing::warn!(condition, listener, client, %error, "refused a connection");
            Err(ZmtpError::Peer("has no valid certificate"))
        }
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
    sender: mpsc::Sender<PeerMessage>,
) -> Result<Infallible, ZmtpError> {
    loop {
        let received = zmtp::receive(&mut read).await?;
        if sender.send(received).await.is_err() {
            // The receiving side has ended and reports the reason.
            std::future::pending::<()>().await;
        }
    }
}

/// Sends batches to a subscriber, starting with the next one after it subscribes.
async fn publish<W: AsyncWrite + Unpin>(
    (hub, permit): (&Hub, &Permit),
    mut received: mpsc::Receiver<PeerMessage>,
    mut out: PeerWriter<W>,
    end: Instant,
) -> Result<Infallible, ZmtpError> {
    let mut subscriptions = Subscriptions::default();
    let mut published = hub.published();
    let mut next = 0;
    loop {
        let wanted = subscriptions.matches(&hub.topic);
        tokio::select! {
            request = received.recv() => match request {
                Some(PeerMessage::Message(frames)) => subscriptions.take(&frames)?,
                Some(PeerMessage::Command(body)) => out.pong(&body).await?,
                None => return Err(ZmtpError::Peer("disconnected")),
            },
            _ = published.changed(), if wanted => {
                next = send_published((hub, end), next, &mut out).await?;
            }
            () = sleep(SILENT_MAX), if !wanted => return Err(ZmtpError::Peer("has no subscription")),
            () = sleep_until(end) => return Err(TOO_OLD),
        }
        match (wanted, subscriptions.matches(&hub.topic)) {
            (false, true) => {
                permit.set_busy();
            }
            (true, false) => permit.set_idle(),
            _ => {}
        }
        if !wanted && subscriptions.matches(&hub.topic) {
            published.mark_unchanged();
            next = hub.buffered().end;
        }
    }
}

/// Sends all published batches from `next` on; returns the number of the first unpublished one.
async fn send_published<W: AsyncWrite + Unpin>(
    (hub, end): (&Hub, Instant),
    mut next: u64,
    out: &mut PeerWriter<W>,
) -> Result<u64, ZmtpError> {
    loop {
        // A slow subscriber may never reach the last batch.
        if Instant::now() >= end {
            return Err(TOO_OLD);
        }
        match hub.batch(next) {
            Batch::Available(payload) => {
                out.message(&[hub.topic.as_bytes(), &next.to_be_bytes(), &payload]).await?;
                next += 1;
            }
            Batch::Evicted { oldest } => {
                hub.cluster.metrics.event_batches_skipped.inc_by(oldest - next);
                next = oldest;
            }
            Batch::Pending => {
                out.flush().await?;
                return Ok(next);
            }
        }
    }
}

/// Serves replay requests, one after another.
async fn answer<W: AsyncWrite + Unpin>(
    (hub, permit): (&Hub, &Permit),
    mut received: mpsc::Receiver<PeerMessage>,
    mut out: PeerWriter<W>,
    end: Instant,
) -> Result<Infallible, ZmtpError> {
    loop {
        let request = tokio::select! {
            request = timeout(SILENT_MAX, received.recv()) => request,
            () = sleep_until(end) => return Err(TOO_OLD),
        };
        match request.map_err(|_| ZmtpError::Peer("requested no replay"))? {
            Some(PeerMessage::Message(frames)) => {
                let start = start(&frames).ok_or(ZmtpError::Peer(
                    "sent an invalid replay request: expected an empty frame and 8 bytes, big endian",
                ))?;
                // Replays are serialized. The time limit keeps a slow reader from blocking the others.
                permit.set_busy();
                let answered = timeout(REPLAY_WITHIN, replay::send_replay(hub, start, &mut out)).await;
                permit.set_idle();
                answered.map_err(|_| ZmtpError::Peer("reads a replay too slowly"))??;
            }
            Some(PeerMessage::Command(body)) => out.pong(&body).await?,
            None => return Err(ZmtpError::Peer("disconnected")),
        }
    }
}

/// First number of a replay request; `None` if the request is malformed.
fn start(frames: &[Vec<u8>]) -> Option<u64> {
    let [delimiter, number] = frames else { return None };
    let number: [u8; 8] = number.as_slice().try_into().ok()?;
    delimiter.is_empty().then(|| u64::from_be_bytes(number))
}

impl<W: AsyncWrite + Unpin> PeerWriter<W> {
    /// Buffers a message, and writes the buffer when it is full.
    pub(super) async fn message(&mut self, frames: &[&[u8]]) -> Result<(), ZmtpError> {
        zmtp::message(frames, &mut self.pending);
        if self.pending.len() >= WRITE_BYTES { self.flush().await } else { Ok(()) }
    }

    pub(super) async fn flush(&mut self) -> Result<(), ZmtpError> {
        let mut rest = self.pending.as_slice();
        while !rest.is_empty() {
            let written = timeout(STALLED_AFTER, self.write.write(rest)).await;
            let written = written.map_err(|_| ZmtpError::Peer("accepts no data"))??;
            rest = &rest[written..];
        }
        // TLS keeps a part of a record that the socket had no room for.
        let flushed = timeout(STALLED_AFTER, self.write.flush()).await;
        flushed.map_err(|_| ZmtpError::Peer("accepts no data"))??;
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
    fn matches(&self, topic: &str) -> bool {
        self.0.iter().any(|prefix| topic.as_bytes().starts_with(prefix))
    }

    /// Applies a subscribe or unsubscribe message, RFC 29 §"PUB and SUB".
    fn take(&mut self, frames: &[Vec<u8>]) -> Result<(), ZmtpError> {
        let [frame] = frames else { return Err(ZmtpError::Peer("sent an invalid message to a publisher")) };
        match frame.split_first() {
            Some((1, prefix)) if self.0.len() < SUBSCRIPTIONS_MAX => self.0.push(prefix.to_vec()),
            Some((1, _)) => return Err(ZmtpError::Peer("has too many subscriptions")),
            Some((0, prefix)) => {
                if let Some(index) = self.0.iter().position(|known| known == prefix) {
                    self.0.swap_remove(index);
                }
            }
            _ => return Err(ZmtpError::Peer("sent an invalid message to a publisher")),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use reprise_daemon::rejected_connections::RejectedConnections;

    use super::*;
    use crate::config::EventsConfig;
    use crate::events::publisher::tests::cluster;

    fn hub() -> Hub {
        Hub::new(cluster(), &EventsConfig::default())
    }

    /// An end that no test reaches.
    fn late() -> Instant {
        Instant::now() + CONNECTION_AGE_MAX
    }

    fn out() -> PeerWriter<tokio::io::Sink> {
        PeerWriter { write: tokio::io::sink(), pending: Vec::new() }
    }

    fn permit() -> Permit {
        let limit = ConnectionLimit::new(Role::Router.listener(), 1, RejectedConnections::default());
        limit.admit().expect("there is room")
    }

    /// A message from a peer with these frames.
    fn request(frames: &[&[u8]]) -> PeerMessage {
        PeerMessage::Message(frames.iter().map(|frame| frame.to_vec()).collect())
    }

    #[tokio::test(start_paused = true)]
    async fn closes_a_replay_connection_some_time_after_its_last_request() {
        let (hub, permit, began) = (hub(), permit(), Instant::now());
        let (sender, received) = mpsc::channel(1);
        let replay = request(&[b"", &0u64.to_be_bytes()]);
        let asking = async {
            sleep(SILENT_MAX - Duration::from_secs(1)).await;
            sender.send(replay).await.expect("the receiver exists");
            std::future::pending::<()>().await;
        };
        let ended = tokio::select! {
            ended = answer((&hub, &permit), received, out(), late()) => ended,
            () = asking => unreachable!("pending forever"),
        };
        assert!(matches!(ended, Err(ZmtpError::Peer("requested no replay"))), "{ended:?}");
        assert!(began.elapsed() >= 2 * SILENT_MAX - Duration::from_secs(1), "{:?}", began.elapsed());
    }

    #[tokio::test(start_paused = true)]
    async fn closes_a_connection_without_subscription_but_not_a_silent_subscriber() {
        let (hub, permit) = (hub(), permit());
        let (_sender, received) = mpsc::channel(1);
        let ended = publish((&hub, &permit), received, out(), late()).await;
        assert!(matches!(ended, Err(ZmtpError::Peer("has no subscription"))), "{ended:?}");
        let (sender, received) = mpsc::channel(1);
        sender.send(request(&[b"\x01"])).await.expect("there is room");
        let ended = timeout(10 * SILENT_MAX, publish((&hub, &permit), received, out(), late())).await;
        assert!(ended.is_err(), "{ended:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn old_connections_end_between_batches_and_behind_replays() {
        let (hub, permit, began) = (hub(), permit(), Instant::now());
        let end = began + CONNECTION_AGE_MAX;
        let (subscriber, received) = mpsc::channel(1);
        subscriber.send(request(&[b"\x01"])).await.expect("there is room");
        let ended = publish((&hub, &permit), received, out(), end).await;
        assert!(matches!(ended, Err(ZmtpError::Peer(reason)) if reason.contains("old")), "{ended:?}");
        assert!(began.elapsed() >= CONNECTION_AGE_MAX && began.elapsed() < CONNECTION_AGE_MAX + SILENT_MAX);
        let (router, received) = mpsc::channel(1);
        let (began, end) = (Instant::now(), Instant::now() + SILENT_MAX / 2);
        router.send(request(&[b"", &0u64.to_be_bytes()])).await.expect("there is room");
        let ended = answer((&hub, &permit), received, out(), end).await;
        assert!(matches!(ended, Err(ZmtpError::Peer(reason)) if reason.contains("old")), "{ended:?}");
        assert!(began.elapsed() >= SILENT_MAX / 2 && began.elapsed() < SILENT_MAX);
    }
}
