//! Reading frames from a socket through one buffer.
//!
//! A receive reads all available bytes, up to the buffer's size, regardless of frame boundaries: few system
//! calls for frames of any size. Payload is then copied from the buffer, which stays in the second-level
//! cache, to its destination, and checksummed in the same pass. Receiving straight into the destination and
//! checksumming it there was measured to be slower: the kernel's copy then misses the cache on every line,
//! and the checksum is a separate pass.

use std::io;

use super::close::Close;
use super::socket::Socket;
use crate::wire::{FRAME_HEADER_BYTES, FrameHeader};

/// Reads the frames of one connection.
pub(super) struct FrameReader {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

/// Position in the stream of frames at which a reader waits or the stream ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Boundary {
    /// No byte of the next frame has arrived: the end of the stream is an orderly close.
    BetweenFrames,
    /// A part of a frame has arrived: the end of the stream is a loss, silence is a stall.
    InsideFrame,
}

impl FrameReader {
    /// Creates a reader that receives at most `buffer_bytes` at a time.
    pub(super) fn new(buffer_bytes: usize) -> FrameReader {
        assert!(buffer_bytes >= FRAME_HEADER_BYTES, "a header must fit the buffer");
        FrameReader { buffer: vec![0; buffer_bytes].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Reports whether a whole frame header is buffered.
    pub(super) fn has_header(&self) -> bool {
        self.end - self.start >= FRAME_HEADER_BYTES
    }

    /// Reads the next frame's header; calls `wait` when the socket has no data.
    pub(super) fn header(
        &mut self,
        socket: &Socket,
        mut wait: impl FnMut(Boundary) -> Result<(), Close>,
    ) -> Result<FrameHeader, Close> {
        while !self.has_header() {
            let empty = self.start == self.end;
            self.receive(
                socket,
                if empty { Boundary::BetweenFrames } else { Boundary::InsideFrame },
                &mut wait,
            )?;
        }
        let bytes = self.buffer[self.start..].first_chunk::<FRAME_HEADER_BYTES>().expect("has_header");
        let header = FrameHeader::decode(bytes)?;
        self.start += FRAME_HEADER_BYTES;
        Ok(header)
    }

    /// Reads and checks the body of a frame. Its length was checked with the header.
    pub(super) fn body(
        &mut self,
        socket: &Socket,
        header: &FrameHeader,
        mut wait: impl FnMut(Boundary) -> Result<(), Close>,
    ) -> Result<Vec<u8>, Close> {
        let length = header.length as usize;
        let mut body = Vec::with_capacity(length);
        while body.len() < length {
            body.extend_from_slice(self.payload(socket, length - body.len(), &mut wait)?);
        }
        header.check_body(&body)?;
        Ok(body)
    }

    /// Reads the next bytes inside a frame, at least one and at most `limit`.
    pub(super) fn payload(
        &mut self,
        socket: &Socket,
        limit: usize,
        mut wait: impl FnMut(Boundary) -> Result<(), Close>,
    ) -> Result<&[u8], Close> {
        while self.start == self.end {
            self.receive(socket, Boundary::InsideFrame, &mut wait)?;
        }
        let from = self.start;
        self.start = self.end.min(from + limit);
        Ok(&self.buffer[from..self.start])
    }

    /// Receives once, behind the buffered bytes.
    fn receive(
        &mut self,
        socket: &Socket,
        boundary: Boundary,
        wait: &mut impl FnMut(Boundary) -> Result<(), Close>,
    ) -> Result<(), Close> {
        // At most an incomplete header is moved.
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        match socket.receive(&mut self.buffer[self.end..]) {
            Ok(0) => Err(Close::Remote(boundary)),
            Ok(bytes) => {
                self.end += bytes;
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait(boundary),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(Close::io(error)),
        }
    }
}
