//! Requests on their way into the socket.
//!
//! Any thread appends whole frames to a queue; whoever gets the writer's lock writes for all. So frames never
//! interleave, small frames of several threads share a system call, and a `drop` never waits behind somebody
//! else's large request.

use std::io::{self, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use reprise_proto::local::{FRAME_BYTES_MAX, Request};

use crate::error::ClientError;
use crate::wire::append_frame;

/// Longest uninterrupted wait for room in the socket; also the longest that a `drop` may take.
pub(super) const WRITE_SLICE: Duration = Duration::from_millis(5);

/// Bytes that may wait for the agent to read: two frames of the greatest length and a margin for small ones.
const QUEUE_BYTES_MAX: usize = 2 * FRAME_BYTES_MAX + (1 << 20);

/// How long to try.
#[derive(Clone, Copy, Debug)]
pub(super) enum Patience {
    /// Until everything is written or this instant has come; then it is an error.
    Until(Instant),
    /// As far as the socket takes it now; the rest stays for the next flush. The reader thread flushes after
    /// each answer, and a socket is only full when unanswered requests are in it.
    Once,
}

/// Frames that are not in the socket yet.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    queue: Mutex<Vec<u8>>,
    writer: Mutex<Writer>,
}

/// Bytes that were taken from the queue; `written` of them are in the socket.
#[derive(Debug, Default)]
struct Writer {
    bytes: Vec<u8>,
    written: usize,
}

/// Whether all was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Drained {
    Yes,
    SocketFull,
}

impl Outbox {
    /// Queues one request as a frame.
    ///
    /// # Errors
    /// `BadRequest` when it is longer than a frame may be, `Busy` when the agent has not read for too long.
    pub(super) fn push(&self, request: &Request) -> Result<(), ClientError> {
        let mut queue = self.lock_queue();
        if queue.len() > QUEUE_BYTES_MAX {
            return Err(ClientError::Busy("the agent does not read its socket".into()));
        }
        append_frame(request, &mut queue)
    }

    /// Writes what is queued. Returns at once when another thread is writing: it writes this too.
    ///
    /// # Errors
    /// What the socket says; `TimedOut` when patience ran out.
    pub(super) fn flush(&self, socket: &UnixStream, patience: Patience) -> io::Result<()> {
        loop {
            let mut writer = match self.writer.try_lock() {
                Ok(writer) => writer,
                Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
                Err(TryLockError::WouldBlock) => return Ok(()),
            };
            let drained = self.drain(&mut writer, socket, patience)?;
            drop(writer);
            // Somebody may have queued after the last look and found the lock taken.
            if drained == Drained::SocketFull || self.lock_queue().is_empty() {
                return Ok(());
            }
        }
    }

    fn drain(&self, writer: &mut Writer, socket: &UnixStream, patience: Patience) -> io::Result<Drained> {
        let mut socket = socket;
        loop {
            if writer.written == writer.bytes.len() {
                writer.bytes.clear();
                writer.written = 0;
                std::mem::swap(&mut writer.bytes, &mut self.lock_queue());
                if writer.bytes.is_empty() {
                    return Ok(Drained::Yes);
                }
            }
            match socket.write(&writer.bytes[writer.written..]) {
                Ok(count) => writer.written += count,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => match patience {
                    Patience::Once => return Ok(Drained::SocketFull),
                    Patience::Until(deadline) if Instant::now() >= deadline => {
                        return Err(ErrorKind::TimedOut.into());
                    }
                    Patience::Until(_) => {}
                },
                Err(error) => return Err(error),
            }
        }
    }

    fn lock_queue(&self) -> MutexGuard<'_, Vec<u8>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
