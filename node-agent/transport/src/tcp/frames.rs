//! Reading frames from a socket through one buffer.
//!
//! A receive takes whatever is there, up to the buffer's size, whatever frames it is made of: few system calls for
//! frames of any size. Payload is then copied out of the buffer, which stays in the second-level cache, to its
//! destination, and checksummed in that same pass. Receiving straight into the destination and checksumming it
//! there was measured to be slower: the kernel's copy then misses the cache on every line, and the checksum is a
//! pass of its own.

use std::io;

use super::close::Close;
use super::socket::Socket;
use crate::wire::{FRAME_HEADER_BYTES, FrameHeader};

/// Reads one connection.
pub(super) struct FrameReader {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

/// Where in the stream of frames a reader waits or the stream ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Boundary {
    /// Nothing of the next frame has come: the end of the stream is a farewell.
    BetweenFrames,
    /// A frame has begun: the end of the stream is a loss, silence is a stall.
    InsideFrame,
}

impl FrameReader {
    /// A reader that receives at most `buffer_bytes` at a time.
    pub(super) fn new(buffer_bytes: usize) -> FrameReader {
        assert!(buffer_bytes >= FRAME_HEADER_BYTES, "a header must fit the buffer");
        FrameReader { buffer: vec![0; buffer_bytes].into_boxed_slice(), start: 0, end: 0 }
    }

    /// Whether a whole frame header is there without asking the socket.
    pub(super) fn has_header(&self) -> bool {
        self.end - self.start >= FRAME_HEADER_BYTES
    }

    /// The next frame's header; `wait` is called when the socket has nothing.
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

    /// The body of a frame, checked. Its length was checked with the header.
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

    /// The next bytes inside of a frame, at least one and at most `limit`.
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

    /// One attempt to receive behind what is buffered.
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
            Ok(0) => Err(Close::Ended(boundary)),
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
