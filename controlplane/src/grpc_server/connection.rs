//! A gRPC connection that is closed unless it is used: it must send a preface and a first call in time.
//!
//! ```text
//!   accepted ──preface──► greeted ──first HEADERS frame──► calling
//!      │ GREETED_WITHIN       │ CALLED_WITHIN                 kept until it ends
//!      └───────► closed ◄─────┘ also when another connection needs room
//! ```
//!
//! After its first call a connection stays open: agents keep one idle for hours. HTTP/2 pings of the server
//! detect vanished peers.
//!
//! Until the first call, received (and decrypted) bytes are scanned for the preface (RFC 9113 §3.4) and for frame headers
//! (§4.1).

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use reprise_daemon::connections::Permit;
use reprise_daemon::rejected_connections::Reason;
use reprise_identity::{Identity, Stream};
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
/// Size of a frame header, RFC 9113 §4.1: length (24 bits), type, flags, stream.
const FRAME_HEADER_BYTES: usize = 9;
/// Type of a HEADERS frame, RFC 9113 §6.2.
const HEADERS: u8 = 1;

/// A connection with its permit and, until the first call, its time limit.
pub(super) struct Connection {
    stream: Stream,
    permit: Permit,
    caller: Caller,
    /// Time limit and scanner; `None` after the first call.
    unused: Option<UnusedTimeout>,
}

/// State of a connection without a call.
struct UnusedTimeout {
    scan: FrameScanner,
    deadline: Pin<Box<Sleep>>,
    closed: Pin<Box<OwnedNotified>>,
}

/// Scanner position in the bytes of a client.
#[derive(Debug, Default)]
struct FrameScanner {
    preface: usize,
    header: [u8; FRAME_HEADER_BYTES],
    header_bytes: usize,
    /// Remaining payload bytes of the current frame; `usize::MAX` after invalid data.
    payload: usize,
}

/// Progress that the scanned bytes show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ScanResult {
    Nothing,
    Preface,
    Call,
    NotHttp2,
}

impl Connection {
    /// Wraps a stream after its handshake; must run on the runtime that serves the connection.
    pub(super) fn new(stream: Stream, identity: Option<Identity>, permit: Permit) -> Connection {
        let address = stream.socket().peer_addr().ok();
        let caller = Caller::new(address, identity, permit.limit().clone());
        let deadline = Box::pin(sleep(GREETED_WITHIN));
        let unused = UnusedTimeout {
            scan: FrameScanner::default(),
            deadline,
            closed: Box::pin(permit.closed_owned()),
        };
        Connection { stream, permit, caller, unused: Some(unused) }
    }

    /// Scans received bytes. Fails for a first call on a connection that was closed to make room.
    fn scan(&mut self, bytes: &[u8]) -> io::Result<()> {
        let Some(unused) = &mut self.unused else { return Ok(()) };
        match unused.scan.feed(bytes) {
            ScanResult::Nothing => {}
            ScanResult::Preface => unused.deadline.as_mut().reset(Instant::now() + CALLED_WITHIN),
            ScanResult::Call => {
                if !self.permit.set_busy() {
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
                self.unused = None;
            }
            // The server replies with an error and closes the connection.
            ScanResult::NotHttp2 => {
                self.permit.limit().count(Reason::Protocol);
                unused.scan.payload = usize::MAX;
            }
        }
        Ok(())
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

impl FrameScanner {
    /// Scans bytes and returns the furthest progress.
    fn feed(&mut self, mut bytes: &[u8]) -> ScanResult {
        let mut result = ScanResult::Nothing;
        if self.payload == usize::MAX {
            return result;
        }
        if self.preface < PREFACE.len() {
            let length = bytes.len().min(PREFACE.len() - self.preface);
            let (preface, rest) = bytes.split_at(length);
            if preface != &PREFACE[self.preface..self.preface + length] {
                return ScanResult::NotHttp2;
            }
            self.preface += length;
            bytes = rest;
            if self.preface == PREFACE.len() {
                result = ScanResult::Preface;
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
                    return ScanResult::Call;
                }
                self.payload = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
                self.header_bytes = 0;
            }
        }
        result
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
            return Poll::Ready(self.scan(&buffer.filled()[before..]));
        }
        let Some(unused) = &mut self.unused else { return Poll::Pending };
        if let Some(reason) = ready!(unused.poll_expiry(context)) {
            self.permit.limit().count(reason);
        }
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
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
    fn detects_an_invalid_preface() {
        for garbage in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0; 40], b"PRI * HTTP/2.1"] {
            assert_eq!(FrameScanner::default().feed(garbage), ScanResult::NotHttp2);
        }
    }

    proptest! {
        #[test]
        fn detects_the_first_call_for_any_split_of_the_bytes(
            cuts in prop::collection::vec(1usize..20, 1..100),
        ) {
            let (greeting, call) = (greeting(), call());
            let bytes = [greeting.as_slice(), &call].concat();
            let (mut scan, mut at, mut greeted) = (FrameScanner::default(), 0, false);
            for cut in cuts.into_iter().chain(std::iter::repeat(7)) {
                let end = (at + cut).min(bytes.len());
                let result = scan.feed(&bytes[at..end]);
                at = end;
                greeted |= result == ScanResult::Preface;
                if result == ScanResult::Call {
                    break;
                }
                prop_assert!(result != ScanResult::NotHttp2);
                prop_assert!(at < greeting.len() + FRAME_HEADER_BYTES, "the call was not detected");
            }
            prop_assert!(at >= greeting.len() + FRAME_HEADER_BYTES);
            prop_assert!(greeted || at >= PREFACE.len());
        }
    }
}
