//! Why a connection ends, and the one log line about it.

use std::io;

use super::frames::Boundary;
use crate::counters::{Counters, add};
use crate::wire::ProtocolError;

/// A peer cannot be reached, or its connection breaks: logged as one condition that ends with the next greeting.
pub(super) const CONNECTION_LOST: &str = "peer_connection_lost";

/// Reason of a connection's end.
#[derive(Debug)]
pub(super) enum Close {
    /// This side no longer needs it: idle, or the transport shuts down.
    Ours(&'static str),
    /// The other side closed.
    Ended(Boundary),
    /// No progress for the stall timeout.
    Stalled(&'static str),
    /// The other side broke the protocol.
    Protocol(ProtocolError),
    /// The operating system reports it broken.
    Io(io::Error),
}

/// Which connection ended; for the log.
pub(super) struct Ending<'a> {
    pub(super) direction: &'static str,
    pub(super) peer: &'a str,
    /// Where `peer` does not name it.
    pub(super) port: Option<u16>,
    /// Fetches or serves that ended with it.
    pub(super) open: usize,
}

impl From<ProtocolError> for Close {
    fn from(error: ProtocolError) -> Close {
        Close::Protocol(error)
    }
}

impl Close {
    /// A connection that the kernel gave up for lack of acknowledgements (TCP_USER_TIMEOUT), or a send that made no
    /// progress, is a stall; the rest is a loss.
    pub(super) fn io(error: io::Error) -> Close {
        match error.kind() {
            io::ErrorKind::TimedOut => Close::Stalled("it takes no data"),
            _ => Close::Io(error),
        }
    }

    /// Of the reasons of a connection's two threads the one that came first: the other saw its consequence, an end of
    /// the stream or a broken pipe.
    pub(super) fn first(reading: Close, writing: Option<Close>) -> Close {
        match (reading, writing) {
            (reading, None) => reading,
            (reading @ (Close::Stalled(_) | Close::Protocol(_)), Some(Close::Io(_))) => reading,
            (_, Some(writing)) => writing,
        }
    }
}

impl Ending<'_> {
    /// Counts and logs the end: once per connection, and only here.
    pub(super) fn report(&self, close: &Close, counters: &Counters) {
        let Ending { direction, peer, port, open } = *self;
        match close {
            Close::Ours(reason) => {
                tracing::debug!(direction, peer, port, open, reason, "peer connection closed");
            }
            Close::Ended(Boundary::BetweenFrames) if open == 0 => {
                tracing::debug!(direction, peer, port, "peer connection closed by the peer");
            }
            Close::Ended(_) => {
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
                    "peer connection lost: the peer stalls"
                );
            }
            Close::Protocol(error) => {
                add(&counters.protocol_errors, 1);
                tracing::warn!(direction, peer, port, open, %error, "peer connection closed: protocol error");
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
