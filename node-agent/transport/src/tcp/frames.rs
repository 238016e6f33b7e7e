//! Reading frames from a socket through one buffer.
//!
//! A receive reads all available bytes, up to the buffer's size, regardless of frame boundaries: few system
//! calls for frames of any size. Payload is then copied from the buffer, which stays in the second-level
//! cache, to its destination, and checksummed in the same pass. Receiving straight into the destination and
//! checksumming it there was measured to be slower: the kernel's copy then misses the cache on every line,
//! and the checksum is a separate pass.
//!
//! With TLS, the buffer receives encrypted records, and each is decrypted in its place when its turn comes:
//!
//! ```text
//! | free | plain bytes, start..end | tag | unopened records, next..filled | free |
//! ```
//!
//! The plain bytes that are left of one record when the next is opened are at most a part of a greeting or of a frame
//! header. They move to its front.

use std::io;

use reprise_identity::records::{Opened, Opener, RECORD_BYTES_MAX, RECORD_HEADER_BYTES};

use super::close::Close;
use super::socket::Socket;
use crate::wire::{FRAME_HEADER_BYTES, FrameHeader, HELLO_BYTES, ProtocolError};

/// Smallest buffer of records: the begin of a record moves to the front when the rest is received.
const RECORDS_BYTES_MIN: usize = HELLO_BYTES + 2 * RECORD_BYTES_MAX;

/// Maximum number of records of a greeting: our senders need one.
const GREETING_RECORDS_MAX: usize = 4;

/// Reads the frames of one connection.
pub(super) struct FrameReader {
    buffer: Box<[u8]>,
    /// Plain bytes that were not read.
    start: usize,
    end: usize,
    /// Received bytes that were not decrypted; none without TLS.
    next: usize,
    filled: usize,
    opener: Option<Opener>,
    /// Number of records so far, until the greeting is read: then `None`.
    greeting_records: Option<usize>,
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
        assert!(buffer_bytes >= HELLO_BYTES, "a greeting must fit the buffer");
        let buffer = vec![0; buffer_bytes].into_boxed_slice();
        FrameReader { buffer, start: 0, end: 0, next: 0, filled: 0, opener: None, greeting_records: Some(0) }
    }

    /// Creates a reader of encrypted records, whose buffer has at least `buffer_bytes`. Some may have arrived with the
    /// handshake.
    pub(super) fn encrypted(
        buffer_bytes: usize,
        opener: Opener,
        (plain, unopened): (&[u8], &[u8]),
    ) -> FrameReader {
        let end = plain.len();
        let filled = end + unopened.len();
        let mut buffer = vec![0; buffer_bytes.max(RECORDS_BYTES_MIN).max(filled)].into_boxed_slice();
        buffer[..end].copy_from_slice(plain);
        buffer[end..filled].copy_from_slice(unopened);
        let opener = Some(opener);
        FrameReader { buffer, start: 0, end, next: end, filled, opener, greeting_records: Some(0) }
    }

    /// Reports whether a whole frame header, or the next record, is buffered.
    pub(super) fn has_more(&self) -> bool {
        self.end - self.start >= FRAME_HEADER_BYTES || self.has_record()
    }

    fn has_record(&self) -> bool {
        let received = &self.buffer[self.next..self.filled];
        self.opener.is_some()
            && matches!(Opener::record_bytes(received), Ok(Some(bytes)) if bytes <= received.len())
    }

    /// Reads the greeting of the other side, which is in its first records, before any change of the key.
    pub(super) fn greeting(
        &mut self,
        socket: &Socket,
        wait: impl FnMut(Boundary) -> Result<(), Close>,
    ) -> Result<[u8; HELLO_BYTES], Close> {
        let greeting = *self.fixed(socket, wait)?;
        self.greeting_records = None;
        Ok(greeting)
    }

    /// Reads the next frame's header; calls `wait` when the socket has no data.
    pub(super) fn header(
        &mut self,
        socket: &Socket,
        wait: impl FnMut(Boundary) -> Result<(), Close>,
    ) -> Result<FrameHeader, Close> {
        Ok(FrameHeader::decode(self.fixed(socket, wait)?)?)
    }

    /// Reads a fixed number of bytes.
    fn fixed<const BYTES: usize>(
        &mut self,
        socket: &Socket,
        mut wait: impl FnMut(Boundary) -> Result<(), Close>,
    ) -> Result<&[u8; BYTES], Close> {
        while self.end - self.start < BYTES {
            let empty = self.start == self.end;
            let boundary = if empty { Boundary::BetweenFrames } else { Boundary::InsideFrame };
            self.receive(socket, boundary, &mut wait)?;
        }
        let from = self.start;
        self.start += BYTES;
        Ok(self.buffer[from..].first_chunk().expect("that many bytes are buffered"))
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

    /// Decrypts the next record, or receives once, behind the buffered bytes.
    fn receive(
        &mut self,
        socket: &Socket,
        boundary: Boundary,
        wait: &mut impl FnMut(Boundary) -> Result<(), Close>,
    ) -> Result<(), Close> {
        if self.open_next(boundary)? {
            return Ok(());
        }
        // A part of a record is not the end of the stream, or a pause, between two frames.
        let boundary = if self.next < self.filled { Boundary::InsideFrame } else { boundary };
        self.move_to_front();
        match socket.receive(&mut self.buffer[self.filled..]) {
            // The end needs no notice: the boundaries of frames show whether bytes are missing.
            Ok(0) => Err(Close::Remote(boundary)),
            Ok(bytes) => {
                self.filled += bytes;
                if self.opener.is_none() {
                    (self.end, self.next) = (self.filled, self.filled);
                }
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => wait(boundary),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            Err(error) => Err(Close::io(error)),
        }
    }

    /// Decrypts the next record, if it has arrived, behind the plain bytes.
    fn open_next(&mut self, boundary: Boundary) -> Result<bool, Close> {
        let Some(opener) = &mut self.opener else { return Ok(false) };
        let received = &mut self.buffer[self.next..self.filled];
        let Some(bytes) = Opener::record_bytes(received)?.filter(|bytes| *bytes <= received.len()) else {
            return Ok(false);
        };
        let opened = opener.open(&mut received[..bytes])?;
        if let Some(records) = &mut self.greeting_records {
            *records += 1;
            if *records > GREETING_RECORDS_MAX || opened == Opened::NextKey {
                return Err(ProtocolError::Record("a greeting in too many records".to_owned()).into());
            }
        }
        match opened {
            Opened::Data(count) => {
                let begin = self.next + RECORD_HEADER_BYTES;
                let left = self.end - self.start;
                self.buffer.copy_within(self.start..self.end, begin - left);
                (self.start, self.end) = (begin - left, begin + count);
            }
            Opened::NextKey => {}
            Opened::Closed => return Err(Close::Remote(boundary)),
        }
        self.next += bytes;
        Ok(true)
    }

    /// Moves the buffered bytes to the front: at most an incomplete header, and an incomplete record.
    fn move_to_front(&mut self) {
        let (plain, unopened) = (self.end - self.start, self.filled - self.next);
        self.buffer.copy_within(self.start..self.end, 0);
        self.buffer.copy_within(self.next..self.filled, plain);
        (self.start, self.end, self.next, self.filled) = (0, plain, plain, plain + unopened);
    }
}
