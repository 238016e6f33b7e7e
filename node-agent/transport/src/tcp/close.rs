//! Reasons for the end of a connection, and the one log line about it.

use std::io;

use reprise_identity::records::RecordError;
use reprise_identity::tls::TlsError;

use super::frames::Boundary;
use crate::counters::{Counters, add};
use crate::wire::ProtocolError;

/// Log condition of an unreachable peer or a broken connection; it ends with the next greeting.
pub(super) const CONNECTION_LOST: &str = "peer_connection_lost";

/// Log condition of a peer whose certificate is refused, or that refuses this node's; it ends with the next greeting.
pub(super) const REFUSED: &str = "peer_refused";

/// Reason for the end of a connection.
#[derive(Debug)]
pub(super) enum Close {
    /// This side no longer needs it: it is idle, or the transport shuts down.
    Local(&'static str),
    /// The other side closed the connection.
    Remote(Boundary),
    /// No progress for the stall timeout.
    Stalled(&'static str),
    /// The other side violated the protocol.
    Protocol(ProtocolError),
    /// One side has refused the certificate of the other one, or speaks no TLS.
    Refused(String),
    /// The operating system reported an error.
    Io(io::Error),
}

/// Description of the ended connection, for the log.
pub(super) struct Ending<'a> {
    pub(super) direction: &'static str,
    pub(super) peer: &'a str,
    /// Port, if `peer` does not contain it.
    pub(super) port: Option<u16>,
    /// Number of fetches or serves that ended with the connection.
    pub(super) open: usize,
}

impl From<ProtocolError> for Close {
    fn from(error: ProtocolError) -> Close {
        Close::Protocol(error)
    }
}

impl From<TlsError> for Close {
    fn from(error: TlsError) -> Close {
        Close::Refused(error.to_string())
    }
}

impl From<RecordError> for Close {
    fn from(error: RecordError) -> Close {
        match error {
            // A server learns of the client's certificate after the client's handshake.
            RecordError::Alert(_) => Close::Refused(error.to_string()),
            RecordError::Malformed(_) | RecordError::Tls(_) => {
                Close::Protocol(ProtocolError::Record(error.to_string()))
            }
        }
    }
}

impl Close {
    /// Classifies a system error. A connection that the kernel ended for lack of acknowledgements
    /// (TCP_USER_TIMEOUT), or a send without progress, is a stall; other errors are a loss.
    pub(super) fn io(error: io::Error) -> Close {
        match error.kind() {
            io::ErrorKind::TimedOut => Close::Stalled("the peer accepts no data"),
            _ => Close::Io(error),
        }
    }

    /// Selects the earlier of the reasons of a connection's two threads: the later one is a consequence, such
    /// as an end of the stream or a broken pipe.
    pub(super) fn first(reading: Close, writing: Option<Close>) -> Close {
        match (reading, writing) {
            (reading, None) => reading,
            (reading @ (Close::Stalled(_) | Close::Protocol(_) | Close::Refused(_)), Some(Close::Io(_))) => {
                reading
            }
            (_, Some(writing)) => writing,
        }
    }
}

impl Ending<'_> {
    /// Counts and logs the end: once per connection, and only here.
    pub(super) fn report(&self, close: &Close, counters: &Counters) {
        let Ending { direction, peer, port, open } = *self;
        match close {
            Close::Local(reason) => {
                tracing::debug!(direction, peer, port, open, reason, "peer connection closed");
            }
            Close::Remote(Boundary::BetweenFrames) if open == 0 => {
                tracing::debug!(direction, peer, port, "peer connection closed by the peer");
            }
            Close::Remote(_) => {
                tracing::warn!(
                    condition = CONNECTION_LOST,
                    direction,
                    peer,
                    port,
                    open,
                    "peer connection lost: the peer closed it"
                );
            }
            Close::Stalled(what) => {
                add(&counters.stalls, 1);
                tracing::warn!(
                    condition = CONNECTION_LOST,
                    direction,
                    peer,
                    port,
                    open,
                    what,
                    "peer connection lost: the peer stalled"
                );
            }
            Close::Protocol(error) => {
                add(&counters.protocol_errors, 1);
                tracing::warn!(direction, peer, port, open, %error, "peer connection closed: protocol error");
            }
            Close::Refused(reason) => {
                add(&counters.handshakes_refused, 1);
                tracing::warn!(
                    condition = REFUSED,
                    direction,
                    peer,
                    port,
                    open,
                    reason,
                    "peer connection refused: `reprise certs` issues certificates, and shows whose they are"
                );
            }
            Close::Io(error) => {
                tracing::warn!(
                    condition = CONNECTION_LOST,
                    direction,
                    peer,
                    port,
                    open,
                    %error,
                    "peer connection lost"
                );
            }
        }
    }
}
