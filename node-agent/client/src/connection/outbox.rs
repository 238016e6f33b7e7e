//! Queue of requests that are sent to the agent.
//!
//! Any thread appends whole frames to the queue; the thread that holds the writer's lock writes for all.
//! Frames therefore never interleave, small frames of several threads share a system call, and a `drop` never
//! waits behind a large request of another thread.
//!
//! Leases and pins that are released one by one, as when thousands of handles are dropped, share messages of
//! their kind:
//!
//! ```text
//! release ──► gathered ──► no release message is unanswered: the writer sends one, at once
//!                      ──► one is unanswered: sent with its answer, or ahead of the next request, if that is earlier
//! ```
//!
//! The agent's speed determines the batch size, without a timer. A request that follows a `drop` finds the
//! slot free, because gathered numbers are sent before it.
//!
//! A thread that must not wait ([`WriteMode::Once`]) writes the bytes that the socket accepts now and leaves
//! the rest in the queue. The rest is sent with the next request or after the next answer. An answer is
//! certain to come: a frame that is sent like this (at most 131 KiB, a match of 8,192 keys) fits into an
//! empty socket (208 KiB by default), so bytes remain only while unanswered requests fill the socket.

use std::io::{self, ErrorKind, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use reprise_buffers::{BufferError, try_send_with_fds};
use reprise_proto::local::{self, FRAME_BYTES_MAX, KEYS_PER_CALL_MAX, Request, request};

use crate::error::ClientError;
use crate::wire::append_frame;

/// Longest uninterrupted wait for room in the socket, in [`WriteMode::Until`].
pub(super) const WRITE_SLICE: Duration = Duration::from_millis(5);

/// Queue limit in bytes: two frames of maximum length and a margin for small ones.
const QUEUE_BYTES_MAX: usize = 2 * FRAME_BYTES_MAX + (1 << 20);

/// Maximum number of queued descriptors: the agent keeps as many that no message has named yet.
const DESCRIPTORS_QUEUED_MAX: usize = 8;

/// Pause between two attempts to send descriptors to a full socket.
const DESCRIPTORS_PAUSE: Duration = Duration::from_millis(1);

/// How long a flush tries to write.
#[derive(Clone, Copy, Debug)]
pub(super) enum WriteMode {
    /// Until everything is written; an error if this instant passes first.
    Until(Instant),
    /// Writes the bytes that the socket accepts without waiting. The rest stays queued for the next flush;
    /// the reader thread flushes after each answer.
    Once,
}

/// Frames that are not in the socket yet.
#[derive(Debug)]
pub(super) struct Outbox {
    next_request: AtomicU64,
    queue: Mutex<Queue>,
    writer: Mutex<Writer>,
    /// Set by a thread that finds the writer's lock taken: the holder must check the queue again before it
    /// returns.
    recheck: AtomicBool,
}

/// What a session releases one by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Releasable {
    /// Leases of slots and extents.
    Leases,
    /// Pins of extents.
    Pins,
}

/// Requests and numbers to release that wait for the writer, in the order of their calls.
#[derive(Debug, Default)]
struct Queue {
    bytes: Vec<u8>,
    /// Descriptors that requests in `bytes` name, in their order.
    descriptors: Vec<OwnedFd>,
    leases: Gathered,
    pins: Gathered,
}

/// Numbers of one kind to release.
#[derive(Debug, Default)]
struct Gathered {
    /// Those that are in no frame yet: at most those that the agent has granted.
    numbers: Vec<u64>,
    /// Number of the latest release message while it is unanswered.
    unanswered: Option<u64>,
}

/// Bytes that were taken from the queue; `written` of them are in the socket.
#[derive(Debug, Default)]
struct Writer {
    bytes: Vec<u8>,
    written: usize,
    /// Descriptors that are sent with the next byte: with or before the requests that name them.
    descriptors: Vec<OwnedFd>,
}

/// Result of a write: everything is written, or the socket is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WriteResult {
    Yes,
    SocketFull,
}

impl Outbox {
    pub(super) fn new() -> Outbox {
        Outbox {
            next_request: AtomicU64::new(1),
            queue: Mutex::default(),
            writer: Mutex::default(),
            recheck: AtomicBool::new(false),
        }
    }

    /// Returns a request number, unique in the session.
    pub(super) fn next_id(&self) -> u64 {
        self.next_request.fetch_add(1, Ordering::Relaxed)
    }

    /// Queues one request as a frame, behind the numbers that were released before it.
    ///
    /// # Errors
    /// `BadRequest` when the request exceeds the frame limit, `Busy` when the agent has not read for too
    /// long.
    pub(super) fn push(&self, request: &Request) -> Result<(), ClientError> {
        self.push_with(request, None)
    }

    /// Queues a request with the descriptor that it names.
    ///
    /// # Errors
    /// As [`Outbox::push`]; `Busy` while as many descriptors as a message can carry are not sent yet.
    pub(super) fn push_with(
        &self,
        request: &Request,
        descriptor: Option<OwnedFd>,
    ) -> Result<(), ClientError> {
        let mut queue = self.lock_queue();
        if queue.is_full() || queue.descriptors.len() >= DESCRIPTORS_QUEUED_MAX {
            return Err(ClientError::Busy("the agent does not read from its socket".into()));
        }
        for kind in Releasable::ALL {
            self.queue_gathered(&mut queue, kind);
        }
        append_frame(request, &mut queue.bytes)?;
        queue.descriptors.extend(descriptor);
        Ok(())
    }

    /// Gathers leases or pins to release; this flush or a later one sends them.
    pub(super) fn release(&self, kind: Releasable, numbers: impl IntoIterator<Item = u64>) {
        self.lock_queue().gathered(kind).numbers.extend(numbers);
    }

    /// Notes the answer to a request that has no waiting caller. If it answers the latest release message of a
    /// kind, the next flush may send the numbers that were gathered since.
    pub(super) fn answered(&self, id: u64) {
        let mut queue = self.lock_queue();
        for kind in Releasable::ALL {
            queue.gathered(kind).unanswered.take_if(|unanswered| *unanswered == id);
        }
    }

    /// Moves the bytes that may be sent now into `bytes`, which must be empty.
    fn take(&self, bytes: &mut Vec<u8>) -> Vec<OwnedFd> {
        let mut queue = self.lock_queue();
        for kind in Releasable::ALL {
            if queue.gathered(kind).unanswered.is_none() {
                self.queue_gathered(&mut queue, kind);
            }
        }
        std::mem::swap(bytes, &mut queue.bytes);
        std::mem::take(&mut queue.descriptors)
    }

    /// Turns the gathered numbers of a kind into messages of at most [`KEYS_PER_CALL_MAX`] numbers. They stay
    /// gathered while the queue is full.
    fn queue_gathered(&self, queue: &mut Queue, kind: Releasable) {
        while !queue.gathered(kind).numbers.is_empty() && !queue.is_full() {
            let id = self.next_id();
            let gathered = queue.gathered(kind);
            let rest = gathered.numbers.len().saturating_sub(KEYS_PER_CALL_MAX);
            let body = kind.message(gathered.numbers.split_off(rest));
            gathered.unanswered = Some(id);
            append_frame(&Request { id, body: Some(body) }, &mut queue.bytes)
                .expect("8,192 numbers are far below the limit of a frame");
        }
    }

    /// Writes the queued bytes. Returns at once if another thread is writing, which then writes these bytes
    /// too.
    ///
    /// # Errors
    /// The socket's error; `TimedOut` when the deadline of [`WriteMode::Until`] passes.
    pub(super) fn flush(&self, socket: &UnixStream, patience: WriteMode) -> io::Result<()> {
        loop {
            let Some(mut writer) = self.writer() else { return Ok(()) };
            let drained = self.drain(&mut writer, socket, patience)?;
            drop(writer);
            // Between the last check of the queue and the release of the lock, another thread may have queued
            // bytes, or found room in the socket, and failed to take the lock.
            let is_recheck = self.recheck.swap(false, Ordering::SeqCst);
            let is_done = match drained {
                WriteResult::Yes => !self.lock_queue().may_send(),
                WriteResult::SocketFull => !is_recheck,
            };
            if is_done {
                return Ok(());
            }
        }
    }

    /// Takes the writer's lock. `None` if another thread holds it; that thread then checks the queue again.
    fn writer(&self) -> Option<MutexGuard<'_, Writer>> {
        self.try_writer().or_else(|| {
            self.recheck.store(true, Ordering::SeqCst);
            // The holder may have released the lock before it could see the flag.
            self.try_writer()
        })
    }

    fn try_writer(&self) -> Option<MutexGuard<'_, Writer>> {
        match self.writer.try_lock() {
            Ok(writer) => Some(writer),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn drain(
        &self,
        writer: &mut Writer,
        socket: &UnixStream,
        patience: WriteMode,
    ) -> io::Result<WriteResult> {
        loop {
            if writer.written == writer.bytes.len() {
                writer.bytes.clear();
                writer.written = 0;
                writer.descriptors = self.take(&mut writer.bytes);
                if writer.bytes.is_empty() {
                    return Ok(WriteResult::Yes);
                }
            }
            if !writer.descriptors.is_empty() {
                match (send_descriptors(socket, writer)?, patience) {
                    (true, _) => {}
                    (false, WriteMode::Once) => return Ok(WriteResult::SocketFull),
                    (false, WriteMode::Until(deadline)) if Instant::now() >= deadline => {
                        return Err(ErrorKind::TimedOut.into());
                    }
                    (false, WriteMode::Until(_)) => std::thread::sleep(DESCRIPTORS_PAUSE),
                }
                continue;
            }
            let rest = &writer.bytes[writer.written..];
            match patience {
                WriteMode::Once => match send_now(socket, rest)? {
                    Some(count) => writer.written += count,
                    None => return Ok(WriteResult::SocketFull),
                },
                WriteMode::Until(deadline) => match send_within_slice(socket, rest)? {
                    Some(count) => writer.written += count,
                    None if Instant::now() >= deadline => return Err(ErrorKind::TimedOut.into()),
                    None => {}
                },
            }
        }
    }

    fn lock_queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Writes the bytes that the socket accepts without waiting; `None` if it accepts none.
fn send_now(socket: &UnixStream, bytes: &[u8]) -> io::Result<Option<usize>> {
    try_send_with_fds(socket.as_fd(), bytes, &[]).map_err(|error| match error {
        BufferError::System { source, .. } => source,
        other => io::Error::other(other),
    })
}

/// Writes the bytes that the socket accepts without waiting, with all descriptors; returns false if it accepts none.
fn send_descriptors(socket: &UnixStream, writer: &mut Writer) -> io::Result<bool> {
    let descriptors: Vec<_> = writer.descriptors.iter().map(AsFd::as_fd).collect();
    match try_send_with_fds(socket.as_fd(), &writer.bytes[writer.written..], &descriptors) {
        Ok(Some(count)) => {
            writer.written += count;
            writer.descriptors.clear();
            Ok(true)
        }
        Ok(None) => Ok(false),
        Err(BufferError::System { source, .. }) => Err(source),
        Err(other) => Err(io::Error::other(other)),
    }
}

/// Writes the bytes that the socket accepts within [`WRITE_SLICE`], its timeout; `None` if it accepts none.
fn send_within_slice(mut socket: &UnixStream, bytes: &[u8]) -> io::Result<Option<usize>> {
    match socket.write(bytes) {
        Ok(count) => Ok(Some(count)),
        Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Releasable {
    const ALL: [Releasable; 2] = [Releasable::Leases, Releasable::Pins];

    fn message(self, numbers: Vec<u64>) -> request::Body {
        match self {
            Releasable::Leases => request::Body::Abort(local::Abort { leases: numbers }),
            Releasable::Pins => request::Body::Unpin(local::Unpin { pins: numbers }),
        }
    }
}

impl Gathered {
    fn may_send(&self) -> bool {
        self.unanswered.is_none() && !self.numbers.is_empty()
    }
}

impl Queue {
    /// Reports whether a flush would find bytes to send.
    fn may_send(&self) -> bool {
        !self.bytes.is_empty() || self.leases.may_send() || self.pins.may_send()
    }

    fn gathered(&mut self, kind: Releasable) -> &mut Gathered {
        match kind {
            Releasable::Leases => &mut self.leases,
            Releasable::Pins => &mut self.pins,
        }
    }

    fn is_full(&self) -> bool {
        self.bytes.len() > QUEUE_BYTES_MAX
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use prost::Message;

    use std::io::Read;

    use super::*;
    use crate::wire::FrameReader;

    /// Longer than any of these tests runs, unless it waits for an event that does not come.
    const LONG: Duration = Duration::from_secs(60);

    const STATS: request::Body = request::Body::Stats(local::Stats {});

    fn push_stats(outbox: &Outbox) {
        outbox.push(&Request { id: outbox.next_id(), body: Some(STATS) }).expect("there is room");
    }

    /// Takes the queued messages: the number of each, and the leases that it releases.
    fn take(outbox: &Outbox) -> Vec<(u64, Option<Vec<u64>>)> {
        let mut bytes = Vec::new();
        outbox.take(&mut bytes);
        let mut frames = FrameReader::new();
        let mut messages = Vec::new();
        let mut rest = bytes.as_slice();
        loop {
            while let Some(frame) = frames.next_frame().expect("well-formed") {
                messages.push(message(frame));
            }
            if rest.is_empty() {
                return messages;
            }
            let space = frames.space();
            let count = space.len().min(rest.len());
            space[..count].copy_from_slice(&rest[..count]);
            frames.received(count);
            rest = &rest[count..];
        }
    }

    fn message(frame: Bytes) -> (u64, Option<Vec<u64>>) {
        let request = Request::decode(frame).expect("a request");
        match request.body.expect("a known kind") {
            request::Body::Abort(abort) => (request.id, Some(abort.leases)),
            request::Body::Unpin(unpin) => (request.id, Some(unpin.pins)),
            _ => (request.id, None),
        }
    }

    #[test]
    fn leases_released_one_by_one_share_a_message_while_one_is_unanswered() {
        let outbox = Outbox::new();
        outbox.release(Releasable::Leases, [0]);
        assert_eq!(take(&outbox), [(1, Some(vec![0]))], "the first is sent at once");
        (1..5000).for_each(|lease| outbox.release(Releasable::Leases, [lease]));
        outbox.answered(99);
        assert_eq!(take(&outbox), [], "the answer belongs to another request");
        outbox.answered(1);
        assert_eq!(take(&outbox), [(2, Some((1..5000).collect()))], "one message carries the rest");
        outbox.release(Releasable::Leases, [7]);
        assert!(!outbox.lock_queue().may_send(), "the second message is unanswered");
        outbox.answered(2);
        assert!(outbox.lock_queue().may_send());
        assert_eq!(take(&outbox), [(3, Some(vec![7]))]);
    }

    #[test]
    fn pins_and_leases_share_messages_of_their_own_kind() {
        let outbox = Outbox::new();
        outbox.release(Releasable::Pins, [0]);
        assert_eq!(take(&outbox), [(1, Some(vec![0]))], "the first is sent at once");
        (1..5000).for_each(|pin| outbox.release(Releasable::Pins, [pin]));
        outbox.release(Releasable::Leases, [7]);
        assert_eq!(take(&outbox), [(2, Some(vec![7]))], "leases do not wait for the answer about pins");
        outbox.answered(1);
        assert_eq!(take(&outbox), [(3, Some((1..5000).collect()))], "one message carries the rest");
    }

    #[test]
    fn release_messages_respect_the_limit_of_keys_per_call() {
        let outbox = Outbox::new();
        let leases = 2 * KEYS_PER_CALL_MAX as u64 + 5;
        outbox.release(Releasable::Leases, 0..leases);
        let messages: Vec<Vec<u64>> = take(&outbox).into_iter().filter_map(|(_, leases)| leases).collect();
        assert!(messages.iter().all(|leases| leases.len() <= KEYS_PER_CALL_MAX));
        let mut given: Vec<u64> = messages.concat();
        given.sort_unstable();
        assert_eq!((messages.len(), given), (3, (0..leases).collect()));
        outbox.release(Releasable::Leases, [leases]);
        outbox.answered(1);
        assert_eq!(take(&outbox), [], "the last message is unanswered");
        outbox.answered(3);
        assert_eq!(take(&outbox), [(4, Some(vec![leases]))]);
    }

    #[test]
    fn sends_released_leases_ahead_of_a_later_request() {
        let outbox = Outbox::new();
        outbox.release(Releasable::Leases, [1]);
        assert_eq!(take(&outbox), [(1, Some(vec![1]))]);
        outbox.release(Releasable::Leases, [2]);
        outbox.release(Releasable::Leases, [3]);
        push_stats(&outbox);
        assert_eq!(take(&outbox), [(3, Some(vec![2, 3])), (2, None)]);
    }

    /// Creates a socket pair; a write to the first end times out after [`LONG`].
    fn sockets() -> (UnixStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        ours.set_write_timeout(Some(LONG)).expect("a timeout");
        (ours, theirs)
    }

    /// Reads exactly `bytes` bytes from the other end.
    fn read_exactly(mut socket: &UnixStream, bytes: usize) {
        let mut taken = vec![0; bytes];
        socket.read_exact(&mut taken).expect("the bytes were sent");
    }

    #[test]
    fn write_mode_once_does_not_wait_for_room_and_leaves_the_rest_queued() {
        let (ours, theirs) = sockets();
        let outbox = Outbox::new();
        let bytes = 8 << 20;
        outbox.lock_queue().bytes = vec![7; bytes];
        let started = Instant::now();
        for _ in 0..100 {
            outbox.flush(&ours, WriteMode::Once).expect("the socket works");
        }
        assert!(started.elapsed() < LONG / 2, "no flush waits for the other end");
        let written = outbox.writer.lock().expect("no thread panics").written;
        assert!(written < bytes, "the socket is full");
        read_exactly(&theirs, written);
        outbox.flush(&ours, WriteMode::Once).expect("the socket works");
        let later = outbox.writer.lock().expect("no thread panics").written;
        assert!(later > written, "the socket has room again");
    }

    #[test]
    fn the_largest_match_fits_into_an_empty_socket() {
        let (ours, _theirs) = sockets();
        let outbox = Outbox::new();
        let keys = Bytes::from(vec![1; 16 * KEYS_PER_CALL_MAX]);
        let ask = request::Body::Match(local::Match { keys, ..local::Match::default() });
        outbox.push(&Request { id: 1, body: Some(ask) }).expect("there is room");
        outbox.flush(&ours, WriteMode::Once).expect("the socket works");
        assert!(
            outbox.writer.lock().expect("no thread panics").bytes.is_empty(),
            "the whole frame was written"
        );
    }

    #[test]
    fn a_flush_that_finds_the_lock_taken_makes_the_writer_check_again() {
        let (ours, theirs) = sockets();
        let outbox = Outbox::new();
        outbox.lock_queue().bytes = vec![7; 1 << 20];
        let writer = outbox.writer.try_lock().expect("no thread writes");
        outbox.flush(&ours, WriteMode::Once).expect("the lock holder writes");
        drop(writer);
        assert!(outbox.recheck.load(Ordering::SeqCst));
        outbox.flush(&ours, WriteMode::Once).expect("the socket works");
        assert!(!outbox.recheck.load(Ordering::SeqCst), "the queue was checked again");
        drop(theirs);
    }

    #[test]
    fn leases_stay_gathered_while_the_agent_does_not_read() {
        let outbox = Outbox::new();
        outbox.lock_queue().bytes = vec![0; QUEUE_BYTES_MAX + 1];
        outbox.release(Releasable::Leases, [1, 2]);
        assert!(outbox.push(&Request { id: 1, body: Some(STATS) }).is_err(), "the queue is full");
        outbox.take(&mut Vec::new());
        assert_eq!(take(&outbox), [(1, Some(vec![1, 2]))], "the agent reads again");
    }
}
