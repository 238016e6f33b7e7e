//! The handshake of TLS on both sides of a connection, and the identity that the other side must have.
//!
//! Without TLS, the name in the greeting is not verified.

use std::io;
use std::time::{Duration, Instant};

use reprise_identity::blocking::{Channel, Wire};
use reprise_identity::limits::VerifiedIdentity;
use reprise_identity::tls::HANDSHAKE_WITHIN;
use reprise_identity::{Expected, Identity, Role, Security};

use super::close::Close;
use super::frames::{Boundary, FrameReader};
use super::socket::Socket;
use crate::wire::Hello;

/// A connection whose greetings may begin.
pub(super) struct Secured {
    pub(super) reader: FrameReader,
    /// Identity in the certificate of the other side, which is an agent; `None` without TLS.
    pub(super) client: Option<VerifiedIdentity>,
}

/// Time limit of handshake and greeting.
pub(super) fn limit(security: &Security, stall_timeout: Duration) -> Duration {
    match security {
        Security::Plain => stall_timeout,
        Security::Tls(_) => stall_timeout.min(HANDSHAKE_WITHIN),
    }
}

/// Accepts a connection of another agent. Receives up to `read_bytes` at a time; calls `wait` when the socket has no
/// data.
pub(super) fn accept(
    security: &Security,
    (socket, read_bytes): (&Socket, usize),
    wait: impl FnMut(Boundary) -> Result<(), Close>,
) -> Result<Secured, Close> {
    match security {
        Security::Plain => Ok(Secured { reader: FrameReader::new(read_bytes), client: None }),
        Security::Tls(tls) => {
            let mut wire = SocketWire { socket, wait, received: false };
            Secured::new((socket, read_bytes), tls.accept_blocking(&mut wire)?)
        }
    }
}

/// Connects to another agent: to that of `node`, if it is known.
pub(super) fn dial(
    security: &Security,
    node: Option<&str>,
    (socket, read_bytes): (&Socket, usize),
    wait: impl FnMut(Boundary) -> Result<(), Close>,
) -> Result<Secured, Close> {
    match security {
        Security::Plain => Ok(Secured { reader: FrameReader::new(read_bytes), client: None }),
        Security::Tls(tls) => {
            let expected =
                node.map_or(Expected::AnyAgent, |node| Expected::Role(Role::Agent(node.to_owned())));
            let mut wire = SocketWire { socket, wait, received: false };
            Secured::new((socket, read_bytes), tls.dial_blocking(&mut wire, expected)?)
        }
    }
}

/// Returns an error once it is later than `until`.
pub(super) fn check_time(until: Instant) -> Result<(), Close> {
    if Instant::now() < until {
        return Ok(());
    }
    Err(Close::Stalled("the peer sent no handshake within the stall timeout"))
}

impl Secured {
    fn new((socket, read_bytes): (&Socket, usize), channel: Channel) -> Result<Secured, Close> {
        let Channel { identity, validity, sealer, opener, plain, unopened } = channel;
        check_role(&identity)?;
        socket.encrypt(sealer);
        let reader = FrameReader::encrypted(read_bytes, opener, (&plain, &unopened));
        Ok(Secured { reader, client: Some(VerifiedIdentity { identity, validity }) })
    }

    /// Checks that the other side greets with the name of its certificate.
    pub(super) fn check(&self, hello: &Hello) -> Result<(), Close> {
        let node = self.client.as_ref().and_then(|client| client.identity.role.node());
        match node {
            Some(node) if node != hello.node_name => Err(Close::Refused(format!(
                "the certificate is of node {node}, and the greeting of node {:?}",
                hello.node_name
            ))),
            _ => Ok(()),
        }
    }
}

/// Refuses others than agents: they have nothing to do on the ports of peers.
fn check_role(identity: &Identity) -> Result<(), Close> {
    match identity.role {
        Role::Agent(_) => Ok(()),
        Role::Member | Role::Etcd | Role::Operator | Role::Admin | Role::Console => {
            Err(Close::Refused(format!("the certificate is of {identity}, and not of an agent")))
        }
    }
}

/// A socket as the stream below a handshake.
struct SocketWire<'a, W> {
    socket: &'a Socket,
    wait: W,
    /// Whether a byte has arrived.
    received: bool,
}

impl<W: FnMut(Boundary) -> Result<(), Close>> Wire for SocketWire<'_, W> {
    type Error = Close;

    fn receive(&mut self, into: &mut [u8]) -> Result<usize, Close> {
        loop {
            // Also while bytes arrive: one at a time would keep the thread otherwise.
            (self.wait)(Boundary::InsideFrame)?;
            match self.socket.receive(into) {
                // Probes of the port end without a byte.
                Ok(0) if !self.received => return Err(Close::Remote(Boundary::BetweenFrames)),
                Ok(bytes) => {
                    self.received = true;
                    return Ok(bytes);
                }
                Err(error)
                    if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
                Err(error) => return Err(Close::io(error)),
            }
        }
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), Close> {
        self.socket.send_all(bytes).map_err(Close::io)
    }
}
