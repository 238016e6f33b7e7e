//! Reading frames from a socket: headers and bodies through a small buffer, payload straight into its destination.
//!
//! The receive that takes the last bytes of a payload also takes what comes behind it into the buffer, so a
//! stream of large frames costs one system call per piece and none for the headers.

use std::io;

use reprise_buffers::Span;

use super::close::Close;
use super::socket::Socket;
use crate::wire::{FRAME_HEADER_BYTES, FrameHeader};

/// Room for what comes behind a payload: a block header of 64 checksums with its frame header, an absence or two
/// and the next data header. More would mean copying more payload out of it.
const BUFFER_BYTES: usize = 512;

const _: () = assert!(BUFFER_BYTES >= 2 * FRAME_HEADER_BYTES);

/// Reads one connection.
pub(super) struct FrameReader {
    buffer: [u8; BUFFER_BYTES],
    start: usize,
    end: usize,
}

/// What one attempt to read gave.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    /// This many bytes.
    Bytes(usize),
    /// Nothing is there: wait, then try again.
    WouldBlock,
}

impl FrameReader {
    pub(super) fn new() -> FrameReader {
        FrameReader { buffer: [0; BUFFER_BYTES], start: 0, end: 0 }
    }

    /// Bytes that were received and not consumed.
    pub(super) fn buffered(&self) -> usize {
        self.end - self.start
    }

    /// Whether a whole frame header is there without asking the socket.
    pub(super) fn has_header(&self) -> bool {
        self.buffered() >= FRAME_HEADER_BYTES
    }

    /// The next frame's header; `wait` is called when the socket has nothing.
    pub(super) fn header(
        &mut self,
        socket: &Socket,
        mut wait: impl FnMut(Boundary) -> Result<(), Close>,
    ) -> Result<FrameHeader, Close> {
        while !self.has_header() {
            let boundary = if self.buffered() == 0 { Boundary::BetweenFrames } else { Boundary::InsideFrame };
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
            match progress(socket.receive(&mut self.buffer[self.end..]), boundary)? {
                Progress::Bytes(bytes) => self.end += bytes,
                Progress::WouldBlock => wait(boundary)?,
            }
        }
        let bytes = self.buffer[self.start..].first_chunk::<FRAME_HEADER_BYTES>().expect("has_header");
        let header = FrameHeader::decode(bytes)?;
        self.start += FRAME_HEADER_BYTES;
        Ok(header)
    }

    /// The body of a frame, checked. Its length was checked with the header.
    pub(super) fn body(
        &mut self,
        socket: &Socket,
        header: &FrameHeader,
        mut wait: impl FnMut(Boundary) -> Result<(), Close>,
    ) -> Result<Vec<u8>, Close> {
        let mut body = vec![0; header.length as usize];
        let mut filled = self.take(&mut body);
        while filled < body.len() {
            match progress(socket.receive(&mut body[filled..]), Boundary::InsideFrame)? {
                Progress::Bytes(bytes) => filled += bytes,
                Progress::WouldBlock => wait(Boundary::InsideFrame)?,
            }
        }
        header.check_body(&body)?;
        Ok(body)
    }

    /// Receives payload into `into`, at most `bytes` of it. `last`: the payload ends there, so what comes behind it
    /// is taken into the buffer.
    pub(super) fn payload(&mut self, socket: &Socket, into: &Span, last: bool) -> Result<Progress, Close> {
        if self.buffered() > 0 {
            let bytes = self.buffered().min(into.len());
            let destination = into.slice(0, bytes).expect("not longer than the span");
            destination
                .copy_in(&self.buffer[self.start..self.start + bytes])
                .expect("fetch found the destination writable");
            self.start += bytes;
            return Ok(Progress::Bytes(bytes));
        }
        self.start = 0;
        self.end = 0;
        let tail: &mut [u8] = if last { &mut self.buffer } else { &mut [] };
        let received = progress(socket.receive_into(into, tail), Boundary::InsideFrame)?;
        let Progress::Bytes(bytes) = received else { return Ok(received) };
        self.end = bytes.saturating_sub(into.len());
        Ok(Progress::Bytes(bytes.min(into.len())))
    }

    /// Receives payload that nobody wants, at most as much as `scratch` holds.
    pub(super) fn skip(&mut self, socket: &Socket, scratch: &mut [u8]) -> Result<Progress, Close> {
        let bytes = self.take(scratch);
        if bytes > 0 {
            return Ok(Progress::Bytes(bytes));
        }
        progress(socket.receive(scratch), Boundary::InsideFrame)
    }

    fn take(&mut self, into: &mut [u8]) -> usize {
        let bytes = self.buffered().min(into.len());
        into[..bytes].copy_from_slice(&self.buffer[self.start..self.start + bytes]);
        self.start += bytes;
        bytes
    }
}

/// Where in the stream of frames a reader waits or the stream ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Boundary {
    /// Nothing of the next frame has come: the end of the stream is a farewell.
    BetweenFrames,
    /// A frame has begun: the end of the stream is a loss, silence is a stall.
    InsideFrame,
}

fn progress(received: io::Result<usize>, boundary: Boundary) -> Result<Progress, Close> {
    match received {
        Ok(0) => Err(Close::Ended(boundary)),
        Ok(bytes) => Ok(Progress::Bytes(bytes)),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(Progress::WouldBlock),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(Progress::WouldBlock),
        Err(error) => Err(Close::Io(error)),
    }
}
