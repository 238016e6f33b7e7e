//! A gRPC connection that must be of use: one that does not greet or calls nothing is closed.
//!
//! ```text
//!   accepted ──preface──► greeted ──first HEADERS frame──► calling
//!      │ GREETED_WITHIN       │ CALLED_WITHIN                 kept until it ends
//!      └───────► closed ◄─────┘ also when another connection needs room
//! ```
//!
//! A connection that has called stays: agents are silent on one for hours. A peer that is gone is found by HTTP/2 pings,
//! which the server sends.
//!
//! The bytes of a client are scanned for what RFC 9113 §3.4 (preface) and §4.1 (frame header) say, until its first call.

use std::future::Future;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use reprise_daemon::connections::Permit;
use reprise_daemon::rejected::Reason;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::futures::OwnedNotified;
use tokio::time::{Instant, Sleep, sleep};
use tonic::transport::server::{Connected, TcpConnectInfo};

/// A client sends its preface as soon as it has connected.
const GREETED_WITHIN: Duration = Duration::from_secs(5);
/// A client connects when it has something to ask; this is for one that connects ahead.
const CALLED_WITHIN: Duration = Duration::from_secs(60);

/// RFC 9113 §3.4.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// RFC 9113 §4.1: length (24 bits), type, flags, stream.
const FRAME_HEADER_BYTES: usize = 9;
/// RFC 9113 §6.2.
const HEADERS: u8 = 1;

/// See the module.
pub(super) struct Connection {
    stream: TcpStream,
    permit: Permit,
    /// Until the first call.
    trial: Option<Trial>,
}

/// What ends a connection that has not called.
struct Trial {
    scan: Scan,
    deadline: Pin<Box<Sleep>>,
    closed: Pin<Box<OwnedNotified>>,
}

/// How far a client's bytes were read.
#[derive(Debug, Default)]
struct Scan {
    preface: usize,
    header: [u8; FRAME_HEADER_BYTES],
    header_bytes: usize,
    /// Rest of the current frame.
    payload: usize,
}

/// What a client's bytes have shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Nothing,
    Preface,
    Call,
    NotHttp2,
}

impl Connection {
    /// Call it on the runtime that serves the connection.
    pub(super) fn new(stream: TcpStream, permit: Permit) -> Connection {
        let deadline = Box::pin(sleep(GREETED_WITHIN));
        let trial = Trial { scan: Scan::default(), deadline, closed: Box::pin(permit.closed_owned()) };
        Connection { stream, permit, trial: Some(trial) }
    }

    /// Fails for a call on a connection that was closed to make room.
    fn note(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(trial) = &mut self.trial else { return Ok(()) };
        match trial.scan.feed(bytes) {
            Seen::Nothing => {}
            Seen::Preface => trial.deadline.as_mut().reset(Instant::now() + CALLED_WITHIN),
            Seen::Call => {
                if !self.permit.set_busy() {
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
                self.trial = None;
            }
            // The server answers it, and closes.
            Seen::NotHttp2 => {
                self.permit.limit().count(Reason::Protocol);
                trial.scan.payload = usize::MAX;
            }
        }
        Ok(())
    }
}

impl Trial {
    /// Ready when the connection is to be closed.
    fn poll_end(&mut self, context: &mut Context<'_>) -> Poll<Option<Reason>> {
        if self.closed.as_mut().poll(context).is_ready() {
            return Poll::Ready(None);
        }
        self.deadline.as_mut().poll(context).map(|()| Some(Reason::Timeout))
    }
}

impl Scan {
    /// The furthest that these bytes show.
    fn feed(&mut self, mut bytes: &[u8]) -> Seen {
        let mut seen = Seen::Nothing;
        if self.payload == usize::MAX {
            return seen;
        }
        if self.preface < PREFACE.len() {
            let length = bytes.len().min(PREFACE.len() - self.preface);
            let (preface, rest) = bytes.split_at(length);
            if preface != &PREFACE[self.preface..self.preface + length] {
                return Seen::NotHttp2;
            }
            self.preface += length;
            bytes = rest;
            if self.preface == PREFACE.len() {
                seen = Seen::Preface;
            }
        }
        while !bytes.is_empty() {
            let skipped = self.payload.min(bytes.len());
            self.payload -= skipped;
            bytes = &bytes[skipped..];
            let length = bytes.len().min(FRAME_HEADER_BYTES - self.header_bytes);
            let (header, rest) = bytes.split_at(length);
            self.header[self.header_bytes..self.header_bytes + length].copy_from_slice(header);
            self.header_bytes += length;
            bytes = rest;
            if self.header_bytes == FRAME_HEADER_BYTES {
                let [high, middle, low, kind, ..] = self.header;
                if kind == HEADERS {
                    return Seen::Call;
                }
                self.payload = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
                self.header_bytes = 0;
            }
        }
        seen
    }
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        if let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(context, buffer) {
            read?;
            return Poll::Ready(self.note(&buffer.filled()[before..]));
        }
        let Some(trial) = &mut self.trial else { return Poll::Pending };
        if let Some(reason) = ready!(trial.poll_end(context)) {
            self.permit.limit().count(reason);
        }
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Preface, SETTINGS with one entry, WINDOW_UPDATE, SETTINGS acknowledged, PING acknowledged.
    fn greeting() -> Vec<u8> {
        let mut bytes = PREFACE.to_vec();
        bytes.extend([0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 3, 0, 0, 1, 0]);
        bytes.extend([0, 0, 4, 8, 0, 0, 0, 0, 0, 0, 0x7f, 0xff, 0xff]);
        bytes.extend([0, 0, 0, 4, 1, 0, 0, 0, 0]);
        bytes.extend([0, 0, 8, 6, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1]);
        bytes
    }

    fn call() -> Vec<u8> {
        vec![0, 0, 3, HEADERS, 4, 0, 0, 0, 1, 0x82, 0x86, 0x84]
    }

    #[test]
    fn garbage_is_no_preface() {
        for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 40], b"PRI * HTTP/2.1"] {
            assert_eq!(Scan::default().feed(garbage), Seen::NotHttp2);
        }
    }

    proptest! {
        #[test]
        fn the_first_call_is_seen_at_its_frame_however_the_bytes_are_cut(
            cuts in prop::collection::vec(1usize..20, 1..100),
        ) {
            let (greeting, call) = (greeting(), call());
            let bytes = [greeting.as_slice(), &call].concat();
            let (mut scan, mut at, mut greeted) = (Scan::default(), 0, false);
            for cut in cuts.into_iter().chain(std::iter::repeat(7)) {
                let end = (at + cut).min(bytes.len());
                let seen = scan.feed(&bytes[at..end]);
                at = end;
                greeted |= seen == Seen::Preface;
                if seen == Seen::Call {
                    break;
                }
                prop_assert!(seen != Seen::NotHttp2);
                prop_assert!(at < greeting.len() + FRAME_HEADER_BYTES, "the call was not seen");
            }
            prop_assert!(at >= greeting.len() + FRAME_HEADER_BYTES);
            prop_assert!(greeted || at >= PREFACE.len());
        }
    }
}
