//! The receiving thread of a connection that this node opened: connects, greets, then writes payload to its
//! destination and reports verified layers.
//!
//! It waits in one place ([`Receiver::wait_until`]), for the socket or for a command of the sending thread,
//! which handles timeouts.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use super::close::{CONNECTION_LOST, Close, Ending, REFUSED};
use super::frames::FrameReader;
use super::handshake;
use super::outgoing::Outgoing;
use super::socket::{Readiness, Socket, wait};
use crate::api::TransportEvent;
use crate::counters::add;
use crate::inbound::Inbound;
use crate::wire::{FrameHeader, Hello, Kind, OfferAnswerBody, ProtocolError, decode_block_header};

/// Size of one receive and checksum step in bytes: half of a second-level cache of 512 KiB.
const PIECE_BYTES: usize = 256 << 10;

/// Verified layers are reported after at most this much payload: one event per 160 µs at 6.3 GB/s.
const REPORT_BYTES: u64 = 1 << 20;

/// Maximum number of addresses of one name that are tried.
const ADDRESSES_MAX: usize = 8;

/// State of the receiving thread.
struct Receiver<'a> {
    connection: &'a Arc<Outgoing>,
    inbound: Inbound,
    /// Consumed payload bytes whose credit was not returned.
    consumed: u64,
}

/// Body of the receiving thread.
pub(super) fn run(connection: &Arc<Outgoing>) {
    let mut receiver = Receiver { connection, inbound: Inbound::new(), consumed: 0 };
    let Err(close) = receiver.live();
    // A command also ends the socket, and the thread may see the end of the socket first.
    let close = match (close, connection.take_commands().close) {
        (Close::Remote(_) | Close::Io(_), Some(ordered)) => ordered,
        (close, _) => close,
    };
    // From here on `begin` fails, so the inbox has all requests that must fail.
    for (stream, begun) in connection.finish_receiving() {
        receiver.inbound.begin_stream(stream, begun);
    }
    let open = receiver.inbound.open_streams();
    Ending { direction: "outgoing", peer: &connection.peer, port: None, open }
        .report(&close, &connection.common.counters);
    receiver.inbound.expire_all(&connection.common.counters);
    receiver.emit();
}

enum Never {}

impl Receiver<'_> {
    fn live(&mut self) -> Result<Never, Close> {
        let socket = Arc::new(self.connect()?);
        let mut reader = self.greet(&socket)?;
        add(&self.connection.common.counters.connections_opened, 1);
        self.connection.opened(&socket);
        loop {
            self.frame(&socket, &mut reader)?;
        }
    }

    fn connect(&mut self) -> Result<Socket, Close> {
        let addresses = self.resolve()?;
        // The time to connect starts after the name is resolved.
        self.connection.note_progress();
        let socket = self.connect_to_any(&addresses)?;
        self.connection.note_progress();
        Ok(socket)
    }

    /// Connects to the first of several addresses that accepts. Each but the last gets its share of the stall
    /// timeout; the last gets the rest, which the sending thread enforces.
    fn connect_to_any(&mut self, addresses: &[SocketAddr]) -> Result<Socket, Close> {
        let count = u32::try_from(addresses.len()).expect("at most ADDRESSES_MAX");
        let share = self.connection.common.settings.stall_timeout / count.max(1);
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the peer's name has no address");
        for (index, address) in addresses.iter().enumerate() {
            let patience = (index + 1 < addresses.len()).then_some(share);
            match self.connect_to(address, patience)? {
                Ok(socket) => return Ok(socket),
                Err(error) => {
                    tracing::debug!(peer = self.connection.peer, %address, %error, "cannot connect");
                    last = error;
                }
            }
        }
        Err(Close::io(last))
    }

    /// Connects to one address; the inner error means that the next one may be tried.
    fn connect_to(
        &mut self,
        address: &SocketAddr,
        patience: Option<Duration>,
    ) -> Result<io::Result<Socket>, Close> {
        let options = self.connection.common.settings.socket_options();
        let socket = match Socket::connect(address, &options) {
            Ok(socket) => socket,
            Err(error) => return Ok(Err(error)),
        };
        let until = patience.map(|patience| Instant::now() + patience);
        while !self.wait_until(Some((&socket, Readiness::Writable)), until)? {
            if until.is_some_and(|until| until <= Instant::now()) {
                return Ok(Err(io::ErrorKind::TimedOut.into()));
            }
        }
        Ok(socket.finish_connect().map(|()| socket))
    }

    /// Resolves the addresses of the peer. A host name is resolved on a separate thread, because the system's
    /// resolver has no timeout. That thread ends by itself, and only holds the connection's wake-up
    /// descriptor.
    fn resolve(&mut self) -> Result<Vec<SocketAddr>, Close> {
        if let Ok(address) = self.connection.address().parse() {
            return Ok(vec![address]);
        }
        let (answer, answered) = mpsc::sync_channel(1);
        let (peer, wake) = (self.connection.address().to_owned(), Arc::clone(&self.connection.wake));
        std::thread::Builder::new()
            .name("peer-resolve".into())
            .spawn(move || {
                let found = peer.to_socket_addrs().map(|found| found.take(ADDRESSES_MAX).collect());
                // The receiver is gone if the connection was closed.
                let _ = answer.send(found);
                wake.wake();
            })
            .map_err(Close::io)?;
        loop {
            match answered.try_recv() {
                Ok(found) => return found.map_err(Close::io),
                Err(mpsc::TryRecvError::Disconnected) => return Err(Close::Local("the look-up panicked")),
                Err(mpsc::TryRecvError::Empty) => self.wait(None).map(|_| ())?,
            }
        }
    }

    /// Exchanges greetings, after the handshake of TLS.
    fn greet(&mut self, socket: &Socket) -> Result<FrameReader, Close> {
        let connection = self.connection;
        let settings = &connection.common.settings;
        let deadline = Instant::now() + handshake::limit(&settings.security, settings.stall_timeout);
        let mut wait_for_peer = |_| {
            handshake::check_time(deadline)?;
            self.wait_until(Some((socket, Readiness::Readable)), Some(deadline)).map(|_| ())
        };
        let place = (socket, PIECE_BYTES);
        let mut secured = handshake::dial(&settings.security, connection.node(), place, &mut wait_for_peer)?;
        socket.send_all(&connection.common.hello().encode()).map_err(Close::io)?;
        let hello = Hello::decode(&secured.reader.greeting(socket, &mut wait_for_peer)?)?;
        secured.check(&hello)?;
        self.connection.limit_age(secured.client.as_ref());
        self.connection.note_progress();
        let peer = &self.connection.peer;
        tracing::debug!(peer, node = hello.node_name, "connected to peer");
        tracing::info!(
            recovered = CONNECTION_LOST,
            direction = "outgoing",
            peer,
            "connected to the peer again"
        );
        tracing::info!(recovered = REFUSED, direction = "outgoing", peer, "the peer is accepted again");
        Ok(secured.reader)
    }

    /// Receives and handles one frame.
    fn frame(&mut self, socket: &Socket, reader: &mut FrameReader) -> Result<(), Close> {
        self.execute_pending_commands()?;
        if !reader.has_more() || self.inbound.unreported_bytes() >= REPORT_BYTES {
            self.inbound.flush();
            self.emit();
        }
        let header = reader.header(socket, |_| self.wait_readable(socket))?;
        self.connection.note_progress();
        if !self.inbound.is_open(header.stream) {
            self.take_inbox();
        }
        match header.kind {
            Kind::Data => return self.data(socket, reader, &header),
            Kind::Alive => {}
            Kind::Absent => {
                self.inbound.absent(header.stream, header.block, &self.connection.common.counters)?;
            }
            Kind::BlockHeader => {
                let body = reader.body(socket, &header, |_| self.wait_readable(socket))?;
                let (tier, checksums) = decode_block_header(&body)?;
                self.inbound.block_header((header.stream, header.block), tier, checksums)?;
            }
            Kind::OfferAnswer => {
                let body = reader.body(socket, &header, |_| self.wait_readable(socket))?;
                self.inbound.offer_answer(header.stream, OfferAnswerBody::decode(&body)?)?;
            }
            Kind::Request | Kind::Credit | Kind::Cancel | Kind::Offer => {
                return Err(ProtocolError::Malformed("frame of a requester from a server").into());
            }
        }
        Ok(())
    }

    fn data(&mut self, socket: &Socket, reader: &mut FrameReader, header: &FrameHeader) -> Result<(), Close> {
        self.inbound.begin(
            (header.stream, header.block),
            u64::from(header.argument),
            u64::from(header.length),
        )?;
        let connection = self.connection;
        while self.inbound.rest() > 0 {
            let rest = usize::try_from(self.inbound.rest()).expect("a frame is at most 8 MiB");
            let bytes = reader.payload(socket, rest, |_| self.wait_readable(socket))?;
            self.inbound.deliver(bytes, &connection.common.counters);
            let bytes = bytes.len() as u64;
            self.consumed(bytes);
            self.execute_pending_commands()?;
        }
        Ok(())
    }

    fn consumed(&mut self, bytes: u64) {
        self.connection.note_progress();
        if self.inbound.unreported_bytes() >= REPORT_BYTES {
            self.inbound.flush();
        }
        self.emit();
        self.consumed += bytes;
        if self.consumed >= self.connection.credit_portion() {
            self.connection.give_credit(std::mem::take(&mut self.consumed));
        }
    }

    fn wait_readable(&mut self, socket: &Socket) -> Result<(), Close> {
        self.wait(Some((socket, Readiness::Readable))).map(|_| ())
    }

    /// Waits for the socket or a command; returns whether the socket is ready.
    fn wait(&mut self, socket: Option<(&Socket, Readiness)>) -> Result<bool, Close> {
        self.wait_until(socket, None)
    }

    fn wait_until(
        &mut self,
        socket: Option<(&Socket, Readiness)>,
        until: Option<Instant>,
    ) -> Result<bool, Close> {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let ready = wait(socket, Some(&self.connection.wake), left).map_err(Close::io)?;
        if ready.woken {
            self.execute_commands()?;
        }
        Ok(ready.socket)
    }

    /// Commands are executed while data flows, too: otherwise a fetch behind a long one would outlive its
    /// deadline.
    fn execute_pending_commands(&mut self) -> Result<(), Close> {
        if self.connection.has_commands() { self.execute_commands() } else { Ok(()) }
    }

    /// Executes the commands of the sending thread or `close`.
    fn execute_commands(&mut self) -> Result<(), Close> {
        let orders = self.connection.take_commands();
        if !orders.expired.is_empty() {
            self.take_inbox();
            for stream in orders.expired {
                self.inbound.expire(stream, &self.connection.common.counters);
            }
            self.emit();
        }
        orders.close.map_or(Ok(()), Err)
    }

    fn take_inbox(&mut self) {
        for (stream, begun) in self.connection.take_inbox() {
            self.inbound.begin_stream(stream, begun);
        }
    }

    /// Accounts for ended streams, then delivers the events.
    fn emit(&mut self) {
        let ended = self.inbound.take_ended();
        if ended.blocks > 0 {
            self.connection.account(&ended);
        }
        let events = self.inbound.take_events();
        if events.len() == 0 {
            return;
        }
        self.connection.suspend_stall_clock();
        for event in events {
            (self.connection.common.sink)(TransportEvent::Peer(event));
        }
        self.connection.note_progress();
    }
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use reprise_buffers::{Arena, ArenaConfig, HugePolicy};

    use super::super::{TcpSettings, TcpTransport};
    use super::*;

    fn loopback() -> SocketAddr {
        SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
    }

    #[test]
    fn tries_every_address_of_a_peer_until_one_accepts() {
        let memory = ArenaConfig { bytes: 4096, region_bytes: 4096, huge: HugePolicy::Never };
        let arena = Arc::new(Arena::new(&memory).expect("memory for a test"));
        let transport = TcpTransport::bind(TcpSettings::new(loopback(), "node"), arena, Arc::new(|_| {}));
        let transport = transport.expect("listening on loopback works");
        let connection = Outgoing::new("peer", &transport.common).expect("a descriptor");
        let mut receiver = Receiver { connection: &connection, inbound: Inbound::new(), consumed: 0 };
        let gone =
            TcpListener::bind(loopback()).and_then(|listener| listener.local_addr()).expect("a free port");
        let here = transport.local_address();
        assert!(receiver.connect_to_any(&[gone, here]).is_ok());
        assert!(receiver.connect_to_any(&[here, gone]).is_ok());
        assert!(matches!(receiver.connect_to_any(&[gone, gone]), Err(Close::Io(_))));
        assert!(matches!(receiver.connect_to_any(&[]), Err(Close::Io(_))));
    }
}
