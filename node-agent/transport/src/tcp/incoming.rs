//! A connection that a peer opened to fetch from this node: the thread that reads its requests, and the state
//! shared with the writing thread ([`super::writer`]) and with the core's `serve_*` calls.
//!
//! The reading thread owns the connection: it greets, starts the writing thread, reads until the end, waits
//! for the writing thread, and only then reports open requests as aborted. A request is therefore reported
//! before its end, and no thread reads arena memory for a request that was reported as ended.

use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use reprise_policy::peer::{PeerEvent, PeerOffer, PeerOfferId, PeerRequest, ServeId};

use super::close::{Close, Ending, REFUSED};
use super::frames::{Boundary, FrameReader};
use super::socket::{Readiness, Socket, wait};
use super::{AcceptedGuard, Common};
use super::{handshake, writer};
use crate::api::TransportEvent;
use crate::counters::add;
use crate::limits::REQUEST_DEADLINE_MAX;
use crate::outbound::{InvalidCall, Outbound};
use crate::wire::{BlocksBody, Hello, Kind, ProtocolError};

/// Maximum size of one receive in bytes: the largest request takes nine of them.
const READ_BYTES: usize = 16 << 10;

/// Stall timeouts in which a whole frame must arrive, however steadily its bytes do.
const STALLS_PER_FRAME: u32 = 4;

/// A connection whose requester has greeted.
pub(super) struct Incoming {
    pub(super) common: Arc<Common>,
    pub(super) socket: Arc<Socket>,
    /// Lock order: after `state`, where both are taken.
    registered: AcceptedGuard,
    /// A frame is sent at least this often while a request is open.
    pub(super) alive_every: Duration,
    /// The requester's name, from its greeting.
    node: String,
    /// Time zero of the deadlines of requests.
    born: Instant,
    /// Age from which on the connection takes no request.
    age_max: Duration,
    state: Mutex<State>,
    /// Wakes the writing thread.
    pub(super) changed: Condvar,
}

/// State shared by the threads of a connection.
pub(super) struct State {
    pub(super) outbound: Outbound,
    pub(super) over: bool,
    /// Registered as busy, so that the connection is not closed for another one.
    busy: bool,
    /// Since when it is not busy. Frames other than requests do not count.
    idle_since: Instant,
}

/// A connection that counts against the limit and has not greeted.
pub(super) struct PendingHandshake {
    registered: AcceptedGuard,
    socket: Arc<Socket>,
    address: SocketAddr,
}

/// A connection after both greetings.
struct Greeted {
    hello: Hello,
    reader: FrameReader,
    /// Age from which on the connection takes no request.
    age_max: Duration,
}

/// Registers an accepted connection; `None` when it was closed at once.
pub(super) fn enter(
    common: &Arc<Common>,
    stream: TcpStream,
    address: SocketAddr,
) -> Option<PendingHandshake> {
    let socket = match Socket::accepted(stream, &common.settings.socket_options()) {
        Ok(socket) => Arc::new(socket),
        Err(error) => {
            tracing::warn!(peer = %address.ip(), port = address.port(), %error, "cannot configure a peer connection");
            return None;
        }
    };
    let registered = common.register_incoming(&socket, address)?;
    Some(PendingHandshake { registered, socket, address })
}

/// Body of the reading thread.
pub(super) fn run(common: &Arc<Common>, PendingHandshake { registered, socket, address }: PendingHandshake) {
    // Log the peer without the port, which differs for each connection: one peer is then one subject in the
    // log. After the handshake, the peer is the identity in its certificate.
    let (ip, port) = (address.ip().to_string(), address.port());
    let mut peer = ip.clone();
    let close = match greet(&registered, &socket, &mut peer) {
        Ok(greeted) => {
            tracing::debug!(peer, port, node = greeted.hello.node_name, "peer connected");
            for peer in [&ip, &peer] {
                tracing::info!(
                    recovered = REFUSED,
                    direction = "incoming",
                    peer,
                    "peer connection accepted again"
                );
            }
            add(&common.counters.connections_accepted, 1);
            serve((registered, socket), greeted, (&peer, port));
            return;
        }
        Err(close) => close,
    };
    Ending { direction: "incoming", peer: &peer, port: Some(port), open: 0 }.report(&close, &common.counters);
}

/// Exchanges greetings, after the handshake of TLS. A peer of another version gets an answer, so that it can report
/// this version.
fn greet(registered: &AcceptedGuard, socket: &Arc<Socket>, peer: &mut String) -> Result<Greeted, Close> {
    let common = &registered.common;
    let security = &common.settings.security;
    let deadline = Instant::now() + handshake::limit(security, common.settings.stall_timeout);
    let mut wait_for_peer = |_| {
        handshake::check_time(deadline)?;
        let left = deadline.saturating_duration_since(Instant::now());
        wait(Some((socket, Readiness::Readable)), None, Some(left)).map_err(Close::io)?;
        Ok(())
    };
    let mut secured = handshake::accept(security, (socket, READ_BYTES), &mut wait_for_peer)?;
    let mut age_max = common.settings.age_max * 2;
    if let Some(client) = &secured.client {
        *peer = client.identity.to_string();
        registered.set_identity(&client.identity).map_err(Close::Local)?;
        age_max = age_max.min(client.validity.closed_after());
    }
    let hello = Hello::decode(&secured.reader.greeting(socket, &mut wait_for_peer)?);
    handshake::check_time(deadline)?;
    if let Ok(hello) = &hello {
        secured.check(hello)?;
        // Before the answer: a peer that has received it must not be the first to be closed.
        registered.set_idle(socket);
    }
    if matches!(hello, Ok(_) | Err(ProtocolError::Version { .. })) {
        socket.send_all(&common.hello().encode()).map_err(Close::io)?;
    }
    Ok(Greeted { hello: hello?, reader: secured.reader, age_max })
}

/// Serves a greeted connection until it ends.
fn serve(
    (registered, socket): (AcceptedGuard, Arc<Socket>),
    Greeted { hello, reader, age_max }: Greeted,
    (peer, port): (&str, u16),
) {
    let common = Arc::clone(&registered.common);
    let born = Instant::now();
    let outbound = Outbound::new(hello.credit_bytes, common.settings.weights.clone());
    let incoming = Arc::new(Incoming {
        common: Arc::clone(&common),
        socket,
        registered,
        alive_every: (hello.stall_timeout / writer::ALIVE_PER_STALL_TIMEOUT).max(writer::ALIVE_EVERY_MIN),
        node: hello.node_name,
        born,
        age_max,
        state: Mutex::new(State { outbound, over: false, busy: false, idle_since: born }),
        changed: Condvar::new(),
    });
    let writing = Arc::clone(&incoming);
    let writer = std::thread::Builder::new().name("peer-write".into()).spawn(move || writer::run(&writing));
    let writer = match writer {
        Ok(writer) => writer,
        Err(error) => {
            tracing::error!(peer, port, %error, "cannot spawn a thread to serve a peer");
            return;
        }
    };
    let Err(read_close) = incoming.read(reader);
    incoming.end();
    let write_close = writer.join().unwrap_or(Some(Close::Local("the writing thread panicked")));
    let aborted = incoming.lock().outbound.abort_all();
    common.unroute_offers(&incoming);
    let close = Close::first(read_close, write_close);
    Ending { direction: "incoming", peer, port: Some(port), open: aborted.len() }
        .report(&close, &common.counters);
    for serve in aborted {
        incoming.report_aborted(serve);
    }
}

enum Never {}

impl Incoming {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the age of the connection.
    pub(super) fn now(&self) -> Duration {
        self.born.elapsed()
    }

    /// Converts an age of the connection to an instant.
    pub(super) fn instant(&self, age: Duration) -> Instant {
        self.born + age
    }

    /// Applies a call of the core. The caller logs an error.
    pub(super) fn apply(
        &self,
        call: impl FnOnce(&mut Outbound) -> Result<(), InvalidCall>,
    ) -> Result<(), InvalidCall> {
        let result = call(&mut self.lock().outbound);
        self.changed.notify_one();
        if result == Err(InvalidCall::Queue) {
            self.end();
        }
        result
    }

    /// Makes both threads end.
    pub(super) fn end(&self) {
        self.lock().over = true;
        self.socket.shutdown();
        self.changed.notify_one();
    }

    fn set_busy(&self, state: &mut State) {
        if !std::mem::replace(&mut state.busy, true) {
            self.registered.set_busy();
        }
    }

    /// Marks the connection as idle: no request is open and no frame is being sent.
    pub(super) fn set_idle(&self, state: &mut State) {
        if std::mem::take(&mut state.busy) {
            state.idle_since = Instant::now();
            self.registered.set_idle(&self.socket);
        }
    }

    pub(super) fn report_aborted(&self, serve: u64) {
        add(&self.common.counters.serves_aborted, 1);
        self.common.unroute(serve);
        (self.common.sink)(PeerEvent::ServeAborted { serve: ServeId(serve) }.into());
    }

    fn read(self: &Arc<Self>, mut reader: FrameReader) -> Result<Never, Close> {
        let socket = Arc::clone(&self.socket);
        loop {
            // Here as well, because a peer that sends without a pause never makes the thread wait.
            self.silence_left()?;
            let mut begun = None;
            let header = reader.header(&socket, |boundary| self.wait(boundary, &mut begun))?;
            match header.kind {
                Kind::Request => {
                    let body = reader.body(&socket, &header, |boundary| self.wait(boundary, &mut begun))?;
                    self.request(header.stream, BlocksBody::decode(&body)?)?;
                }
                Kind::Offer => {
                    let body = reader.body(&socket, &header, |boundary| self.wait(boundary, &mut begun))?;
                    self.offer(header.stream, BlocksBody::decode(&body)?)?;
                }
                Kind::Credit => {
                    self.lock().outbound.add_credit(header.stream)?;
                    self.changed.notify_one();
                }
                Kind::Cancel => {
                    self.lock().outbound.cancel(header.stream);
                    self.changed.notify_one();
                }
                Kind::BlockHeader | Kind::Data | Kind::Absent | Kind::Alive | Kind::OfferAnswer => {
                    return Err(ProtocolError::Malformed("frame of a server from a requester").into());
                }
            }
        }
    }

    /// Requesters open another connection long before.
    fn check_age(&self) -> Result<(), Close> {
        if self.now() < self.age_max {
            return Ok(());
        }
        Err(Close::Local("the connection is too old for another request"))
    }

    /// Time for which the requester may be silent between two frames. Returns an error when it has made no request for
    /// too long, also if it has sent other frames, or when the connection is idle and too old.
    fn silence_left(&self) -> Result<Duration, Close> {
        let limit = self.common.settings.idle_timeout * 2;
        let state = self.lock();
        if state.busy {
            return Ok(limit);
        }
        let idle = state.idle_since.elapsed();
        drop(state);
        self.check_age()?;
        if idle >= limit {
            return Err(Close::Local("the requester is idle"));
        }
        Ok((limit - idle).min(self.age_max.saturating_sub(self.now())))
    }

    fn request(self: &Arc<Self>, stream: u64, mut body: BlocksBody) -> Result<(), Close> {
        self.check_age()?;
        body.deadline = body.deadline.min(REQUEST_DEADLINE_MAX);
        // A requester that respects its deadline has cancelled by then, or its cancellation is stuck.
        let until = self.now() + body.deadline + self.common.settings.stall_timeout;
        let serve = self.common.route(self);
        let mut state = self.lock();
        let opened = state.outbound.open((serve, stream), &body, until);
        self.set_busy(&mut state);
        drop(state);
        if let Err(error) = opened {
            self.common.unroute(serve);
            return Err(error.into());
        }
        // From now on the peer expects frames from this side.
        self.changed.notify_one();
        add(&self.common.counters.requests, 1);
        let BlocksBody { layout, deadline, tenant, keys } = body;
        let request = PeerRequest { serve: ServeId(serve), tenant, layout, keys, deadline };
        (self.common.sink)(TransportEvent::Request { from: self.node.clone(), request });
        Ok(())
    }

    fn offer(self: &Arc<Self>, stream: u64, mut body: BlocksBody) -> Result<(), Close> {
        self.check_age()?;
        body.deadline = body.deadline.min(REQUEST_DEADLINE_MAX);
        let until = self.now() + body.deadline + self.common.settings.stall_timeout;
        let offer = self.common.route_offer(self);
        let mut state = self.lock();
        state.outbound.open_offer((offer, stream), &body, until)?;
        self.set_busy(&mut state);
        drop(state);
        self.changed.notify_one();
        add(&self.common.counters.offers_received, 1);
        let BlocksBody { layout, tenant, keys, .. } = body;
        let from = self.node.clone();
        let offer = PeerOffer { offer: PeerOfferId(offer), from, tenant, layout, keys };
        (self.common.sink)(TransportEvent::Offer(offer));
        Ok(())
    }

    /// Waits for the requester. Between frames it may be silent for as long as it keeps idle connections. `begun` is the
    /// time of the first wait inside the current frame.
    fn wait(&self, boundary: Boundary, begun: &mut Option<Instant>) -> Result<(), Close> {
        let incomplete = Close::Stalled("the peer sent an incomplete frame");
        let limit = match boundary {
            Boundary::BetweenFrames => self.silence_left()?,
            Boundary::InsideFrame => {
                let stall = self.common.settings.stall_timeout;
                let since = begun.get_or_insert_with(Instant::now).elapsed();
                let left = (stall * STALLS_PER_FRAME).saturating_sub(since);
                if left.is_zero() {
                    return Err(incomplete);
                }
                left.min(stall)
            }
        };
        let ready = wait(Some((&self.socket, Readiness::Readable)), None, Some(limit)).map_err(Close::io)?;
        match boundary {
            Boundary::InsideFrame if !ready.socket => Err(incomplete),
            // Between frames, the next wait checks whether the requester is idle.
            _ => Ok(()),
        }
    }
}
