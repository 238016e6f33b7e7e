//! Frames of the session protocol: a little-endian u32 length, then one message.
//!
//! Reading uses a buffer that takes a whole match request (128 KiB of keys) in one system call if the
//! socket has it. Descriptors from a client wait, in order, for the messages that name them.
//!
//! Writing: a [`Frame`] carries descriptors, of which a unix socket passes at most [`DESCRIPTORS_PER_PART`]
//! per call. All groups except the last are sent with one byte each, the last one with the rest of the
//! frame.

use std::collections::VecDeque;
use std::io::{self, BufReader, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use prost::Message;
use reprise_agent_core::effect::Access;
use reprise_buffers::{BufferError, Region, recv_with_fds};
use reprise_proto::local::{self, FRAME_BYTES_MAX};

/// Size of a frame's length prefix.
const LENGTH_BYTES: usize = 4;

/// Size of a match request for 8,192 keys.
const READ_BUFFER_BYTES: usize = 160 << 10;

/// Maximum number of descriptors in one `sendmsg`, as in `reprise_buffers`.
pub(crate) const DESCRIPTORS_PER_PART: usize = 32;

/// Maximum number of descriptors that wait for their message: a client sends one with each.
pub(crate) const DESCRIPTORS_WAITING_MAX: usize = 8;

/// Reads frames from a session's socket.
pub(super) struct FrameReader {
    socket: BufReader<Socket>,
    limits: Limits,
}

/// A socket, and the descriptors that came with its bytes.
struct Socket {
    stream: UnixStream,
    descriptors: VecDeque<OwnedFd>,
    incoming: Incoming,
}

/// What happens to descriptors from the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    /// The connection fails.
    Refused,
    /// They are closed, because no message can use them.
    Closed,
    /// They wait for their messages.
    Kept,
}

/// Limits of a reader.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// Maximum size of a message in bytes.
    pub(super) message_bytes: usize,
    /// Deadline for the complete message; `None`: no deadline.
    pub(super) until: Option<Instant>,
    pub(super) incoming: Incoming,
}

/// Why there is no next frame.
#[derive(Debug)]
pub(super) enum FrameError {
    /// Its length exceeds the reader's limit.
    TooLong(usize),
    /// The socket failed or timed out, or the stream ended within a frame.
    Io(io::Error),
}

/// A descriptor that a frame passes to the client.
pub(super) enum Descriptor {
    /// A region of the arena.
    Region(Arc<Region>, Access),
    /// The progress page, read-only.
    Progress(OwnedFd),
    /// Registers of a controller, or queues, which the session writes.
    Memory(OwnedFd),
    /// A device that the session reads and writes itself.
    Device(OwnedFd),
}

pub(super) struct Frame {
    bytes: Vec<u8>,
    descriptors: Vec<Descriptor>,
    bytes_sent: usize,
    descriptors_sent: usize,
}

impl FrameReader {
    pub(super) fn new(socket: UnixStream, limits: Limits) -> FrameReader {
        let socket = Socket { stream: socket, descriptors: VecDeque::new(), incoming: limits.incoming };
        FrameReader { socket: BufReader::with_capacity(READ_BUFFER_BYTES, socket), limits }
    }

    /// Takes the oldest descriptor that no message has named yet.
    pub(super) fn take_descriptor(&mut self) -> Option<OwnedFd> {
        self.socket.get_mut().descriptors.pop_front()
    }

    /// Changes the limits from the next message on.
    pub(super) fn set_limits(&mut self, limits: Limits) -> io::Result<()> {
        self.limits = limits;
        self.socket.get_mut().incoming = limits.incoming;
        self.socket.get_ref().stream.set_read_timeout(None)
    }

    /// Returns the next message; `None` if the client has closed the session between two frames.
    pub(super) fn next_frame(&mut self) -> Result<Option<Bytes>, FrameError> {
        let mut length = [0; LENGTH_BYTES];
        match self.fill(&mut length)? {
            0 => return Ok(None),
            LENGTH_BYTES => {}
            _ => return Err(FrameError::Io(io::ErrorKind::UnexpectedEof.into())),
        }
        let length = u32::from_le_bytes(length) as usize;
        if length > self.limits.message_bytes {
            return Err(FrameError::TooLong(length));
        }
        let mut message = vec![0; length];
        if self.fill(&mut message)? < length {
            return Err(FrameError::Io(io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(Some(Bytes::from(message)))
    }

    /// Fills `into` up to the end of the stream; returns the number of bytes.
    fn fill(&mut self, into: &mut [u8]) -> Result<usize, FrameError> {
        let mut filled = 0;
        while filled < into.len() {
            match self.read(&mut into[filled..]) {
                Ok(0) => break,
                Ok(read) => filled += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(FrameError::Io(error)),
            }
        }
        Ok(filled)
    }

    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if let Some(until) = self.limits.until {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            self.socket.get_ref().stream.set_read_timeout(Some(left))?;
        }
        self.socket.read(into)
    }
}

impl Read for Socket {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let mut descriptors = Vec::new();
        let received = recv_with_fds(self.stream.as_fd(), into, &mut descriptors);
        let received = received.map_err(|error| match error {
            BufferError::System { source, .. } => source,
            other => io::Error::other(other),
        })?;
        match self.incoming {
            Incoming::Refused if !descriptors.is_empty() => {
                return Err(io::Error::other("a descriptor came with it"));
            }
            Incoming::Refused | Incoming::Closed => return Ok(received),
            Incoming::Kept => self.descriptors.extend(descriptors),
        }
        if self.descriptors.len() > DESCRIPTORS_WAITING_MAX {
            let text =
                format!("more than {DESCRIPTORS_WAITING_MAX} descriptors without a message that names them");
            return Err(io::Error::other(text));
        }
        Ok(received)
    }
}

impl Limits {
    /// Limits after the handshake.
    pub(super) const SESSION: Limits =
        Limits { message_bytes: FRAME_BYTES_MAX, until: None, incoming: Incoming::Kept };
}

impl AsFd for Descriptor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Descriptor::Region(region, Access::ReadOnly) => region.readonly_fd(),
            Descriptor::Region(region, Access::ReadWrite) => region.writable_fd(),
            Descriptor::Progress(descriptor)
            | Descriptor::Memory(descriptor)
            | Descriptor::Device(descriptor) => descriptor.as_fd(),
        }
    }
}

impl Frame {
    /// Encodes a response with `descriptors`, in the order in which the message references them.
    pub(super) fn new(response: &local::Response, descriptors: Vec<Descriptor>) -> Frame {
        let length = response.encoded_len();
        let mut bytes = Vec::with_capacity(LENGTH_BYTES + length);
        let prefix = u32::try_from(length).expect("responses do not exceed FRAME_BYTES_MAX");
        bytes.extend_from_slice(&prefix.to_le_bytes());
        response.encode(&mut bytes).expect("a Vec grows as needed");
        Frame { bytes, descriptors, bytes_sent: 0, descriptors_sent: 0 }
    }

    /// Whether the frame passes queue pairs to the client.
    pub(super) fn is_grant(&self) -> bool {
        self.descriptors.iter().any(|descriptor| matches!(descriptor, Descriptor::Memory(_)))
    }

    /// Returns the size of the frame in bytes.
    pub(super) fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Returns whether the frame has been sent completely.
    pub(super) fn is_sent(&self) -> bool {
        self.bytes_sent == self.bytes.len()
    }

    /// Returns the part to send in the next call.
    pub(super) fn next_part(&self) -> (&[u8], Vec<BorrowedFd<'_>>) {
        let waiting = &self.descriptors[self.descriptors_sent..];
        let bytes = &self.bytes[self.bytes_sent..];
        if waiting.len() > DESCRIPTORS_PER_PART {
            // A frame has enough bytes for all groups: each region in it takes several.
            return (&bytes[..1], waiting[..DESCRIPTORS_PER_PART].iter().map(AsFd::as_fd).collect());
        }
        (bytes, waiting.iter().map(AsFd::as_fd).collect())
    }

    /// Records that `bytes` (at least one) of the last part were sent; descriptors are sent with the first
    /// byte.
    pub(super) fn advance(&mut self, bytes: usize) {
        if bytes > 0 {
            self.descriptors_sent = self.descriptors.len().min(self.descriptors_sent + DESCRIPTORS_PER_PART);
            self.bytes_sent += bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;
    use std::time::Duration;

    use reprise_buffers::{MappedRegion, send_with_fds};

    use super::*;

    fn pipe(bytes: &[u8]) -> FrameReader {
        let (mut client, agent) = UnixStream::pair().expect("a socket pair");
        client.write_all(bytes).expect("fits the socket buffer");
        FrameReader::new(agent, Limits::SESSION)
    }

    #[test]
    fn frames_are_read_as_written_until_a_clean_end() {
        let mut frames = pipe(b"\x03\0\0\0abc\0\0\0\0");
        assert_eq!(frames.next_frame().expect("a frame").as_deref(), Some(b"abc".as_slice()));
        assert_eq!(frames.next_frame().expect("a frame").as_deref(), Some(b"".as_slice()));
        assert!(frames.next_frame().expect("a clean end").is_none());
    }

    #[test]
    fn truncated_frame_is_an_error() {
        for cut in 1..7 {
            let error = pipe(&b"\x03\0\0\0abc"[..cut]).next_frame().expect_err("cut short");
            assert!(matches!(error, FrameError::Io(error) if error.kind() == io::ErrorKind::UnexpectedEof));
        }
    }

    #[test]
    fn descriptors_wait_in_order_for_their_messages() {
        let (client, agent) = UnixStream::pair().expect("a socket pair");
        let files: Vec<_> =
            (1..=3u64).map(|bytes| MappedRegion::allocate(bytes << 12).expect("memory").1).collect();
        let mut frames = FrameReader::new(agent, Limits::SESSION);
        for file in &files {
            send_with_fds(client.as_fd(), b"\x01\0\0\0x", &[file.as_fd()]).expect("sent");
        }
        assert!(frames.take_descriptor().is_none(), "nothing was read");
        for bytes in 1..=3u64 {
            assert_eq!(frames.next_frame().expect("a frame").as_deref(), Some(b"x".as_slice()));
            let file = File::from(frames.take_descriptor().expect("it came with or before the message"));
            assert_eq!(file.metadata().expect("readable").len(), bytes << 12);
        }
        assert!(frames.take_descriptor().is_none());
    }

    #[test]
    fn client_that_sends_descriptors_without_messages_is_rejected() {
        let (client, agent) = UnixStream::pair().expect("a socket pair");
        let file = MappedRegion::allocate(4096).expect("memory").1;
        for _ in 0..=DESCRIPTORS_WAITING_MAX {
            send_with_fds(client.as_fd(), b"\x01\0\0\0x", &[file.as_fd()]).expect("sent");
        }
        let mut frames = FrameReader::new(agent, Limits::SESSION);
        let failed = std::iter::repeat_with(|| frames.next_frame()).find_map(Result::err).expect("too many");
        assert!(
            matches!(&failed, FrameError::Io(error) if error.to_string().contains("descriptors")),
            "{failed:?}"
        );
    }

    #[test]
    fn descriptors_that_no_message_may_name_are_closed_or_refused() {
        let file = MappedRegion::allocate(4096).expect("memory").1;
        let read = |incoming| {
            let (client, agent) = UnixStream::pair().expect("a socket pair");
            let mut frames = FrameReader::new(agent, Limits { incoming, ..Limits::SESSION });
            for _ in 0..=DESCRIPTORS_WAITING_MAX {
                send_with_fds(client.as_fd(), b"\x01\0\0\0x", &[file.as_fd()]).expect("sent");
            }
            let read = (0..=DESCRIPTORS_WAITING_MAX).try_for_each(|_| frames.next_frame().map(drop));
            assert!(frames.take_descriptor().is_none());
            read
        };
        read(Incoming::Closed).expect("messages are read");
        let failed = read(Incoming::Refused).expect_err("refused");
        assert!(
            matches!(&failed, FrameError::Io(error) if error.to_string().contains("descriptor")),
            "{failed:?}"
        );
    }

    #[test]
    fn too_large_length_is_rejected_before_allocation() {
        let error = pipe(&u32::MAX.to_le_bytes()).next_frame().expect_err("too long");
        assert!(matches!(error, FrameError::TooLong(_)));
    }

    #[test]
    fn slow_message_is_rejected_at_its_deadline() {
        let (mut client, agent) = UnixStream::pair().expect("a socket pair");
        let until = Instant::now() + Duration::from_millis(200);
        let limits = Limits { message_bytes: 1000, until: Some(until), incoming: Incoming::Refused };
        let mut frames = FrameReader::new(agent, limits);
        let dribbling = std::thread::spawn(move || {
            client.write_all(&1000u32.to_le_bytes()).expect("sent");
            // The client sends every byte long before the deadline, but all of them would take 20 s.
            while client.write_all(b"x").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let error = frames.next_frame().expect_err("too slow");
        assert!(matches!(error, FrameError::Io(error)
            if matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)));
        let late = Instant::now().saturating_duration_since(until);
        assert!(late < Duration::from_secs(2), "{late:?} late");
        drop(frames);
        dribbling.join().expect("the client notices");
    }

    #[test]
    fn descriptors_beyond_one_call_are_sent_in_groups_with_one_byte_each() {
        let (a, _b) = UnixStream::pair().expect("a socket pair");
        let page = || Descriptor::Progress(a.as_fd().try_clone_to_owned().expect("a descriptor"));
        let released = local::response::Body::Released(local::Released {});
        let response = local::Response { id: 1 << 60, body: Some(released) };
        let mut frame = Frame::new(&response, (0..70).map(|_| page()).collect());
        let mut groups = Vec::new();
        while !frame.is_sent() {
            let (bytes, descriptors) = frame.next_part();
            groups.push((bytes.len(), descriptors.len()));
            let bytes = bytes.len();
            frame.advance(bytes);
        }
        let rest = frame.len() - 2;
        assert_eq!(groups, [(1, 32), (1, 32), (rest, 6)]);
    }
}
