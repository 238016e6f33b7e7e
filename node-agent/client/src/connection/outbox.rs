//! Requests on their way into the socket.
//!
//! Any thread appends whole frames to a queue; whoever gets the writer's lock writes for all. So frames never
//! interleave, small frames of several threads share a system call, and a `drop` never waits behind somebody
//! else's large request.
//!
//! Leases that are given back one by one, as when thousands of reservations are dropped, share messages:
//!
//! ```text
//! give_back ──► gathered ──► no such message is unanswered: the writer sends one, at once
//!                        ──► one is: with its answer, or ahead of the next request, whichever comes first
//! ```
//!
//! So the agent's own pace makes the batches, without a timer, and a request that follows a `drop` finds the slot
//! given back: leases that were gathered go out before it.
//!
//! Who may not wait writes what the socket takes now and leaves the rest here. It goes with what is sent next, or with the
//! next answer: where something is left, requests that the agent has not answered fill the socket, because a frame that
//! is sent like this (131 KiB at the most, a match of 8,192 keys) fits into a socket that is empty (208 KiB by default).

use std::io::{self, ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use reprise_buffers::{BufferError, try_send_with_fds};
use reprise_proto::local::{self, FRAME_BYTES_MAX, KEYS_PER_CALL_MAX, Request, request};

use crate::error::ClientError;
use crate::wire::append_frame;

/// Longest uninterrupted wait for room in the socket, of who waits for it.
pub(super) const WRITE_SLICE: Duration = Duration::from_millis(5);

/// Bytes that may wait for the agent to read: two frames of the greatest length and a margin for small ones.
const QUEUE_BYTES_MAX: usize = 2 * FRAME_BYTES_MAX + (1 << 20);

/// How long to try.
#[derive(Clone, Copy, Debug)]
pub(super) enum Patience {
    /// Until everything is written or this instant has come; then it is an error.
    Until(Instant),
    /// As far as the socket takes it now, without any wait; the rest stays for the next flush. The reader thread flushes
    /// after each answer.
    Once,
}

/// Frames that are not in the socket yet.
#[derive(Debug)]
pub(super) struct Outbox {
    next_request: AtomicU64,
    queue: Mutex<Queue>,
    writer: Mutex<Writer>,
    /// Somebody had something to write while another thread wrote: that one looks again before it goes.
    passed_on: AtomicBool,
}

/// What waits for the writer, in the order in which it was asked for.
#[derive(Debug, Default)]
struct Queue {
    /// Whole frames.
    bytes: Vec<u8>,
    /// Leases to give back that are in no frame yet: at most those that the agent has granted.
    leases: Vec<u64>,
    /// The latest message that gives back leases, while it has no answer.
    unanswered: Option<u64>,
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
    pub(super) fn new() -> Outbox {
        Outbox {
            next_request: AtomicU64::new(1),
            queue: Mutex::default(),
            writer: Mutex::default(),
            passed_on: AtomicBool::new(false),
        }
    }

    /// A number for a request, unique in its session.
    pub(super) fn next_id(&self) -> u64 {
        self.next_request.fetch_add(1, Ordering::Relaxed)
    }

    /// Queues one request as a frame, behind the leases that were given back before it.
    ///
    /// # Errors
    /// `BadRequest` when it is longer than a frame may be, `Busy` when the agent has not read for too long.
    pub(super) fn push(&self, request: &Request) -> Result<(), ClientError> {
        let mut queue = self.lock_queue();
        if queue.is_full() {
            return Err(ClientError::Busy("the agent does not read its socket".into()));
        }
        self.queue_leases(&mut queue);
        append_frame(request, &mut queue.bytes)
    }

    /// Gathers leases to give back; a flush sends them, now or with what it finds later.
    pub(super) fn give_back(&self, leases: impl IntoIterator<Item = u64>) {
        self.lock_queue().leases.extend(leases);
    }

    /// A request that nobody waits for was answered: if it was the one that gave back leases, the next flush may send
    /// those that were gathered meanwhile.
    pub(super) fn answered(&self, id: u64) {
        let mut queue = self.lock_queue();
        queue.unanswered.take_if(|unanswered| *unanswered == id);
    }

    /// Moves what may be sent now into `bytes`, which is empty.
    fn take(&self, bytes: &mut Vec<u8>) {
        let mut queue = self.lock_queue();
        if queue.unanswered.is_none() {
            self.queue_leases(&mut queue);
        }
        std::mem::swap(bytes, &mut queue.bytes);
    }

    /// Turns the gathered leases into messages of as many as one may name. They stay gathered while the queue is full.
    fn queue_leases(&self, queue: &mut Queue) {
        while !queue.leases.is_empty() && !queue.is_full() {
            let rest = queue.leases.len().saturating_sub(KEYS_PER_CALL_MAX);
            let leases = queue.leases.split_off(rest);
            let id = self.next_id();
            let abort = Request { id, body: Some(request::Body::Abort(local::Abort { leases })) };
            append_frame(&abort, &mut queue.bytes).expect("8,192 numbers are far below the limit of a frame");
            queue.unanswered = Some(id);
        }
    }

    /// Writes what is queued. Returns at once when another thread is writing: it writes this too.
    ///
    /// # Errors
    /// What the socket says; `TimedOut` when patience ran out.
    pub(super) fn flush(&self, socket: &UnixStream, patience: Patience) -> io::Result<()> {
        loop {
            let Some(mut writer) = self.writer() else { return Ok(()) };
            let drained = self.drain(&mut writer, socket, patience)?;
            drop(writer);
            // Somebody may have queued, or found room in the socket, after the last look and met the lock.
            let is_passed_on = self.passed_on.swap(false, Ordering::SeqCst);
            let is_done = match drained {
                Drained::Yes => !self.lock_queue().may_send(),
                Drained::SocketFull => !is_passed_on,
            };
            if is_done {
                return Ok(());
            }
        }
    }

    /// The writer's lock; `None`: another thread has it, and knows that there is more.
    fn writer(&self) -> Option<MutexGuard<'_, Writer>> {
        self.try_writer().or_else(|| {
            self.passed_on.store(true, Ordering::SeqCst);
            // It may have gone before it was told.
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

    fn drain(&self, writer: &mut Writer, socket: &UnixStream, patience: Patience) -> io::Result<Drained> {
        loop {
            if writer.written == writer.bytes.len() {
                writer.bytes.clear();
                writer.written = 0;
                self.take(&mut writer.bytes);
                if writer.bytes.is_empty() {
                    return Ok(Drained::Yes);
                }
            }
            let rest = &writer.bytes[writer.written..];
            match patience {
                Patience::Once => match send_now(socket, rest)? {
                    Some(count) => writer.written += count,
                    None => return Ok(Drained::SocketFull),
                },
                Patience::Until(deadline) => match send_within_slice(socket, rest)? {
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

/// Writes what the socket takes without waiting; `None`: nothing.
fn send_now(socket: &UnixStream, bytes: &[u8]) -> io::Result<Option<usize>> {
    try_send_with_fds(socket.as_fd(), bytes, &[]).map_err(|error| match error {
        BufferError::System { source, .. } => source,
        other => io::Error::other(other),
    })
}

/// Writes what the socket takes within [`WRITE_SLICE`], which is its timeout; `None`: nothing.
fn send_within_slice(mut socket: &UnixStream, bytes: &[u8]) -> io::Result<Option<usize>> {
    match socket.write(bytes) {
        Ok(count) => Ok(Some(count)),
        Err(error) if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) => Ok(None),
        Err(error) => Err(error),
    }
}

impl Queue {
    /// Whether a flush would find something.
    fn may_send(&self) -> bool {
        !self.bytes.is_empty() || (self.unanswered.is_none() && !self.leases.is_empty())
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

    /// Nothing in these tests takes as long, unless it waits for what does not come.
    const LONG: Duration = Duration::from_secs(60);

    const STATS: request::Body = request::Body::Stats(local::Stats {});

    fn push_stats(outbox: &Outbox) {
        outbox.push(&Request { id: outbox.next_id(), body: Some(STATS) }).expect("there is room");
    }

    /// Takes what is queued: of each message its number, and the leases that it gives back.
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
            _ => (request.id, None),
        }
    }

    #[test]
    fn leases_that_are_given_back_one_by_one_share_a_message_while_one_is_unanswered() {
        let outbox = Outbox::new();
        outbox.give_back([0]);
        assert_eq!(take(&outbox), [(1, Some(vec![0]))], "the first goes at once");
        (1..5000).for_each(|lease| outbox.give_back([lease]));
        outbox.answered(99);
        assert_eq!(take(&outbox), [], "the answer to something else");
        outbox.answered(1);
        assert_eq!(take(&outbox), [(2, Some((1..5000).collect()))], "the rest goes with one message");
        outbox.give_back([7]);
        assert!(!outbox.lock_queue().may_send(), "the second is unanswered");
        outbox.answered(2);
        assert!(outbox.lock_queue().may_send());
        assert_eq!(take(&outbox), [(3, Some(vec![7]))]);
    }

    #[test]
    fn no_message_gives_back_more_leases_than_a_call_may_name() {
        let outbox = Outbox::new();
        let leases = 2 * KEYS_PER_CALL_MAX as u64 + 5;
        outbox.give_back(0..leases);
        let messages: Vec<Vec<u64>> = take(&outbox).into_iter().filter_map(|(_, leases)| leases).collect();
        assert!(messages.iter().all(|leases| leases.len() <= KEYS_PER_CALL_MAX));
        let mut given: Vec<u64> = messages.concat();
        given.sort_unstable();
        assert_eq!((messages.len(), given), (3, (0..leases).collect()));
        outbox.give_back([leases]);
        outbox.answered(1);
        assert_eq!(take(&outbox), [], "the last of them is unanswered");
        outbox.answered(3);
        assert_eq!(take(&outbox), [(4, Some(vec![leases]))]);
    }

    #[test]
    fn a_request_goes_out_behind_the_leases_that_were_given_back_before_it() {
        let outbox = Outbox::new();
        outbox.give_back([1]);
        assert_eq!(take(&outbox), [(1, Some(vec![1]))]);
        outbox.give_back([2]);
        outbox.give_back([3]);
        push_stats(&outbox);
        assert_eq!(take(&outbox), [(3, Some(vec![2, 3])), (2, None)]);
    }

    /// Two ends of a socket; writing to the first gives up after a time that no test takes.
    fn sockets() -> (UnixStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("sockets");
        ours.set_write_timeout(Some(LONG)).expect("a timeout");
        (ours, theirs)
    }

    /// Reads what the other end has until it has sent so many bytes.
    fn read_exactly(mut socket: &UnixStream, bytes: usize) {
        let mut taken = vec![0; bytes];
        socket.read_exact(&mut taken).expect("they were sent");
    }

    #[test]
    fn who_may_not_wait_does_not_wait_for_room_in_the_socket_and_the_rest_goes_later() {
        let (ours, theirs) = sockets();
        let outbox = Outbox::new();
        let bytes = 8 << 20;
        outbox.lock_queue().bytes = vec![7; bytes];
        let started = Instant::now();
        for _ in 0..100 {
            outbox.flush(&ours, Patience::Once).expect("the socket is whole");
        }
        assert!(started.elapsed() < LONG / 2, "none of them waits for the other end");
        let written = outbox.writer.lock().expect("nobody panics").written;
        assert!(written < bytes, "the socket is full");
        read_exactly(&theirs, written);
        outbox.flush(&ours, Patience::Once).expect("the socket is whole");
        let later = outbox.writer.lock().expect("nobody panics").written;
        assert!(later > written, "there is room again");
    }

    #[test]
    fn the_largest_match_fits_into_an_empty_socket() {
        let (ours, _theirs) = sockets();
        let outbox = Outbox::new();
        let keys = Bytes::from(vec![1; 16 * KEYS_PER_CALL_MAX]);
        let ask = request::Body::Match(local::Match { keys, local_only: false });
        outbox.push(&Request { id: 1, body: Some(ask) }).expect("there is room");
        outbox.flush(&ours, Patience::Once).expect("the socket is whole");
        assert!(outbox.writer.lock().expect("nobody panics").bytes.is_empty(), "all was written");
    }

    #[test]
    fn what_is_passed_on_to_a_writer_that_found_the_socket_full_is_written() {
        let (ours, theirs) = sockets();
        let outbox = Outbox::new();
        outbox.lock_queue().bytes = vec![7; 1 << 20];
        let writer = outbox.writer.try_lock().expect("nobody writes");
        outbox.flush(&ours, Patience::Once).expect("it is left to the writer");
        drop(writer);
        assert!(outbox.passed_on.load(Ordering::SeqCst));
        outbox.flush(&ours, Patience::Once).expect("the socket is whole");
        assert!(!outbox.passed_on.load(Ordering::SeqCst), "it has looked again");
        drop(theirs);
    }

    #[test]
    fn leases_stay_gathered_while_the_agent_does_not_read() {
        let outbox = Outbox::new();
        outbox.lock_queue().bytes = vec![0; QUEUE_BYTES_MAX + 1];
        outbox.give_back([1, 2]);
        assert!(outbox.push(&Request { id: 1, body: Some(STATS) }).is_err(), "the queue is full");
        outbox.take(&mut Vec::new());
        assert_eq!(take(&outbox), [(1, Some(vec![1, 2]))], "the agent reads again");
    }
}
