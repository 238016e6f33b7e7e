//! A gRPC connection that is closed unless it is used: it must send a preface and a permitted call in time.
//!
//! ```text
//!   accepted ──preface──► greeted ──first permitted call──► calling
//!      │ GREETED_WITHIN       │ CALLED_WITHIN                  kept until it ends
//!      └───────► closed ◄─────┘ also when another connection needs room
//! ```
//!
//! After its first permitted call ([`Caller::has_called`]) a connection stays open: agents keep one idle for hours. HTTP/2
//! pings of the server detect vanished peers. Calls that the caller's role may not make keep no connection. No connection
//! outlives the certificate of its client.
//!
//! Received (and decrypted) bytes are compared with the preface (RFC 9113 §3.4).

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use reprise_daemon::connections::Permit;
use reprise_daemon::rejected_connections::Reason;
use reprise_identity::Stream;
use reprise_identity::limits::VerifiedIdentity;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::sync::futures::OwnedNotified;
use tokio::time::{Instant, Sleep, sleep};
use tonic::transport::server::Connected;

use super::caller::Caller;

/// Time limit for the preface, which clients send on connecting.
const GREETED_WITHIN: Duration = Duration::from_secs(5);
/// Time limit for the first call. Clients connect to make a call; the margin is for those that connect ahead.
const CALLED_WITHIN: Duration = Duration::from_secs(60);

/// Connection preface, RFC 9113 §3.4.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// A connection with its caller, which has its permit, and its time limits.
pub(super) struct Connection {
    stream: Stream,
    caller: Caller,
    /// Time limit and preface; `None` after the first permitted call.
    unused: Option<UnusedTimeout>,
    /// End of the client's certificate; `None` without one.
    certificate_end: Option<Pin<Box<Sleep>>>,
}

/// State of a connection without a permitted call.
struct UnusedTimeout {
    preface: Preface,
    deadline: Pin<Box<Sleep>>,
    closed: Pin<Box<OwnedNotified>>,
}

/// Progress in the first bytes of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Preface {
    /// So many bytes of it have arrived.
    Partial(usize),
    Complete,
    /// The bytes differ from it.
    Invalid,
}

impl Connection {
    /// Wraps a stream after its handshake; must run on the runtime that serves the connection.
    pub(super) fn new(stream: Stream, client: Option<VerifiedIdentity>, permit: Permit) -> Connection {
        let address = stream.socket().peer_addr().ok();
        let deadline = Box::pin(sleep(GREETED_WITHIN));
        let closed = Box::pin(permit.closed_owned());
        let unused = UnusedTimeout { preface: Preface::Partial(0), deadline, closed };
        let ends_within = client.as_ref().map(|client| client.validity.closed_after());
        let certificate_end = ends_within.map(|left| Box::pin(sleep(left)));
        let caller = Caller::new(address, client.map(|client| client.identity), permit);
        Connection { stream, caller, unused: Some(unused), certificate_end }
    }

    /// Returns ready when the connection must be closed.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.caller.has_called() {
            self.unused = None;
        }
        if let Some(unused) = &mut self.unused
            && let Poll::Ready(reason) = unused.poll_expiry(context)
        {
            if let Some(reason) = reason {
                self.caller.limit().count(reason);
            }
            return Poll::Ready(());
        }
        if let Some(end) = &mut self.certificate_end
            && end.as_mut().poll(context).is_ready()
        {
            self.caller.log_end_of_certificate();
            return Poll::Ready(());
        }
        Poll::Pending
    }

    /// Compares received bytes with the preface.
    fn scan(&mut self, bytes: &[u8]) {
        let Some(unused) = &mut self.unused else { return };
        let before = unused.preface;
        unused.preface = before.after(bytes);
        match unused.preface {
            Preface::Complete if before != Preface::Complete => {
                unused.deadline.as_mut().reset(Instant::now() + CALLED_WITHIN);
            }
            // The server replies with an error and closes the connection.
            Preface::Invalid if before != Preface::Invalid => self.caller.limit().count(Reason::Protocol),
            _ => {}
        }
    }
}

impl UnusedTimeout {
    /// Ready when the connection must be closed; with a reason if it timed out.
    fn poll_expiry(&mut self, context: &mut Context<'_>) -> Poll<Option<Reason>> {
        if self.closed.as_mut().poll(context).is_ready() {
            return Poll::Ready(None);
        }
        self.deadline.as_mut().poll(context).map(|()| Some(Reason::Timeout))
    }
}

impl Preface {
    /// State after further bytes.
    fn after(self, bytes: &[u8]) -> Preface {
        let Preface::Partial(count) = self else { return self };
        let rest = &PREFACE[count..];
        let length = bytes.len().min(rest.len());
        if bytes[..length] != rest[..length] {
            Preface::Invalid
        } else if length == rest.len() {
            Preface::Complete
        } else {
            Preface::Partial(count + length)
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // First, so that a client that sends without a pause is closed as well.
        if self.poll_end(context).is_ready() {
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if let Poll::Ready(Ok(())) = read {
            self.scan(&buffer.filled()[before..]);
        }
        read
    }
}

reprise_identity::write_to_stream!(Connection);

impl Connected for Connection {
    type ConnectInfo = Caller;

    fn connect_info(&self) -> Caller {
        self.caller.clone()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn detects_an_invalid_preface() {
        for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 40], b"PRI * HTTP/2.1"] {
            assert_eq!(Preface::Partial(0).after(garbage), Preface::Invalid);
        }
    }

    proptest! {
        #[test]
        fn detects_the_preface_for_any_split_of_the_bytes(cuts in prop::collection::vec(1usize..20, 1..40)) {
            let bytes = [PREFACE, &[0, 0, 6, 4, 0]].concat();
            let (mut preface, mut at) = (Preface::Partial(0), 0);
            for cut in cuts.into_iter().chain(std::iter::repeat(7)) {
                let end = (at + cut).min(bytes.len());
                preface = preface.after(&bytes[at..end]);
                at = end;
                let expected = if at < PREFACE.len() { Preface::Partial(at) } else { Preface::Complete };
                prop_assert_eq!(preface, expected);
                if at == bytes.len() {
                    break;
                }
            }
        }
    }
}
