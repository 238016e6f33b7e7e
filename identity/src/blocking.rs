//! Accept and dial for threads that wait by themselves, with the verifiers of [`Tls`].
//!
//! The caller provides the waits ([`Wire`]), so that each has its time limit and can be ended from outside. After the
//! handshake, the two directions belong to different threads ([`Sealer`], [`Opener`]).

use std::io;
use std::sync::Arc;

use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, EncodeTlsData, UnbufferedStatus};
use rustls::{Error, InvalidMessage};

use crate::credentials::verified_identity_of;
use crate::limits::{Validity, VerifiedIdentity};
use crate::name::Identity;
use crate::records::{Opener, Schedule, Sealer, split};
use crate::tls::{Accepting, Claim, ClientCertificate, Expected, Tls, TlsError};

/// Maximum number of received bytes that wait for the rest of a handshake message: a chain of certificates.
const WAITING_BYTES_MAX: usize = 64 << 10;

/// Maximum number of bytes that a side sends in its handshake.
const HANDSHAKE_BYTES_MAX: usize = 128 << 10;

/// Size of one receive of the handshake.
const RECEIVE_BYTES: usize = 4 << 10;

/// Stream below a handshake. Both methods wait, at most as long as the handshake may take.
pub trait Wire {
    /// Errors of both methods.
    type Error: From<TlsError>;

    /// Receives at least one byte; 0 at the end of the stream.
    ///
    /// # Errors
    /// The time is over, or the stream has failed.
    fn receive(&mut self, into: &mut [u8]) -> Result<usize, Self::Error>;

    /// Sends all of the bytes.
    ///
    /// # Errors
    /// The time is over, or the stream has failed.
    fn send(&mut self, bytes: &[u8]) -> Result<(), Self::Error>;
}

/// Connection after its handshake.
#[derive(Debug)]
pub struct Channel {
    /// Identity of the other side.
    pub identity: Identity,
    /// Validity of its certificate.
    pub validity: Validity,
    /// Encrypts the bytes that this side sends.
    pub sealer: Sealer,
    /// Decrypts the records of the other side, from `unopened` on.
    pub opener: Opener,
    /// Decrypted bytes that arrived with the handshake.
    pub plain: Vec<u8>,
    /// Records that arrived with the handshake and were not decrypted, the last one perhaps in part.
    pub unopened: Vec<u8>,
}

impl Tls {
    /// Accepts a connection over a stream.
    ///
    /// # Errors
    /// The client has no valid certificate of this cluster, or the stream fails.
    pub fn accept_blocking<W: Wire>(&self, wire: &mut W) -> Result<Channel, W::Error> {
        let Accepting { mut config, claim } = self.accepting(ClientCertificate::Required);
        config.enable_secret_extraction = true;
        let connection = UnbufferedServerConnection::new(Arc::new(config));
        let mut connection = connection.map_err(handshake)?;
        let received = shake_hands(&mut connection, wire, &claim)?;
        let VerifiedIdentity { identity, validity } = other_side(connection.peer_certificates())?;
        let (secrets, kept) = connection.dangerous_into_kernel_connection().map_err(handshake)?;
        let (sealer, opener) = split(secrets, Schedule::Server(kept)).map_err(handshake)?;
        Ok(Channel { identity, validity, sealer, opener, plain: received.plain, unopened: received.waiting })
    }

    /// Connects over a stream to a server of the expected role.
    ///
    /// # Errors
    /// The server has another role or no valid certificate of this cluster, or the stream fails.
    pub fn dial_blocking<W: Wire>(&self, wire: &mut W, expected: Expected) -> Result<Channel, W::Error> {
        let mut config = self.client_config(expected);
        config.enable_secret_extraction = true;
        // The name is not verified: the identity is.
        let name = ServerName::try_from("reprise").expect("a valid name");
        let mut connection = UnbufferedClientConnection::new(Arc::new(config), name).map_err(handshake)?;
        let received = shake_hands(&mut connection, wire, &Claim::default())?;
        let VerifiedIdentity { identity, validity } = other_side(connection.peer_certificates())?;
        let (secrets, kept) = connection.dangerous_into_kernel_connection().map_err(handshake)?;
        let (sealer, opener) = split(secrets, Schedule::Client(kept)).map_err(handshake)?;
        Ok(Channel { identity, validity, sealer, opener, plain: received.plain, unopened: received.waiting })
    }
}

fn handshake(error: Error) -> TlsError {
    TlsError::Handshake(io::Error::new(io::ErrorKind::InvalidData, error))
}

fn other_side(certificates: Option<&[CertificateDer<'static>]>) -> Result<VerifiedIdentity, TlsError> {
    let certificate =
        certificates.and_then(<[_]>::first).ok_or_else(|| handshake(Error::NoCertificatesPresented))?;
    Ok(verified_identity_of(certificate)?)
}

/// Side of a handshake.
trait Handshaking {
    type Data;

    fn process<'c, 'i>(&'c mut self, received: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data>;
}

impl Handshaking for UnbufferedClientConnection {
    type Data = ClientConnectionData;

    fn process<'c, 'i>(&'c mut self, received: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(received)
    }
}

impl Handshaking for UnbufferedServerConnection {
    type Data = ServerConnectionData;

    fn process<'c, 'i>(&'c mut self, received: &'i mut [u8]) -> UnbufferedStatus<'c, 'i, Self::Data> {
        self.process_tls_records(received)
    }
}

/// Received bytes that do not belong to the handshake, or not yet.
#[derive(Default)]
struct Received {
    plain: Vec<u8>,
    waiting: Vec<u8>,
}

/// Next action of a handshake.
enum Step {
    Continue,
    Send,
    Receive,
    Done,
}

fn shake_hands<C: Handshaking, W: Wire>(
    connection: &mut C,
    wire: &mut W,
    claim: &Claim,
) -> Result<Received, W::Error> {
    let mut received = Received::default();
    let (mut outgoing, mut total) = (Vec::new(), 0);
    loop {
        let UnbufferedStatus { discard, state } = connection.process(&mut received.waiting);
        let step = state.and_then(|state| step(state, &mut outgoing, &mut received.plain));
        let step = match step {
            Ok(step) => step,
            Err(error) => {
                send_alert(connection, &mut received.waiting, wire);
                return Err(claim.explain(handshake(error)).into());
            }
        };
        received.waiting.drain(..discard);
        match step {
            Step::Continue => {}
            Step::Send => wire.send(&std::mem::take(&mut outgoing))?,
            Step::Done => return Ok(received),
            Step::Receive => {
                let mut bytes = [0; RECEIVE_BYTES];
                let count = wire.receive(&mut bytes)?;
                if count == 0 {
                    let ended =
                        io::Error::new(io::ErrorKind::UnexpectedEof, "the other side closed the connection");
                    return Err(TlsError::Handshake(ended).into());
                }
                total += count;
                if received.waiting.len() + count > WAITING_BYTES_MAX || total > HANDSHAKE_BYTES_MAX {
                    return Err(
                        handshake(Error::InvalidMessage(InvalidMessage::HandshakePayloadTooLarge)).into()
                    );
                }
                received.waiting.extend_from_slice(&bytes[..count]);
            }
        }
    }
}

fn step<Data>(
    state: ConnectionState<'_, '_, Data>,
    outgoing: &mut Vec<u8>,
    plain: &mut Vec<u8>,
) -> Result<Step, Error> {
    match state {
        ConnectionState::EncodeTlsData(mut data) => {
            encode(&mut data, outgoing)?;
            Ok(Step::Continue)
        }
        ConnectionState::TransmitTlsData(data) => {
            data.done();
            Ok(Step::Send)
        }
        // The first bytes after the handshake may arrive with its last message.
        ConnectionState::ReadTraffic(mut traffic) => {
            while let Some(record) = traffic.next_record() {
                plain.extend_from_slice(record?.payload);
            }
            Ok(Step::Continue)
        }
        ConnectionState::BlockedHandshake => Ok(Step::Receive),
        ConnectionState::WriteTraffic(_) => Ok(Step::Done),
        _ => Err(Error::General("the other side ended the handshake".to_owned())),
    }
}

/// Appends a part of the handshake to the bytes to send.
fn encode<Data>(data: &mut EncodeTlsData<'_, Data>, outgoing: &mut Vec<u8>) -> Result<(), Error> {
    let start = outgoing.len();
    let mut bytes = 0;
    loop {
        outgoing.resize(start + bytes, 0);
        match data.encode(&mut outgoing[start..]) {
            Ok(written) => {
                outgoing.truncate(start + written);
                return Ok(());
            }
            // The first attempt only asks for the size.
            Err(EncodeError::InsufficientSize(needed)) => bytes = needed.required_size,
            Err(EncodeError::AlreadyEncoded) => return Err(Error::General("encoded twice".to_owned())),
        }
    }
}

/// Sends the other side the reason of a failed handshake, if it still listens. `waiting` are the bytes that the failed
/// step has seen: rustls refers to them, and it returns its alert before it reads them again.
fn send_alert<C: Handshaking, W: Wire>(connection: &mut C, waiting: &mut [u8], wire: &mut W) {
    let mut outgoing = Vec::new();
    if let UnbufferedStatus { state: Ok(state @ ConnectionState::EncodeTlsData(_)), .. } =
        connection.process(waiting)
        && step(state, &mut outgoing, &mut Vec::new()).is_ok()
    {
        // The handshake has failed in any case.
        drop(wire.send(&outgoing));
    }
}

#[cfg(test)]
mod tests;
