//! Doorbells that other processes ring in memory, and a thread that forwards them to the controller.
//!
//! Registers of a VFIO device are mapped by its descriptor only, which also resets and reconfigures it, and keeps it open
//! after the agent has ended. So that descriptor stays in this process. Another process gets a page of words, a line of 64
//! bytes for each of its queue pairs:
//!
//! ```text
//! client: entries ─▶ store tail ──┐               ┌─▶ MMIO store ─▶ controller
//!                     (page)      └─▶ this thread ┘   if the value lies in the queue
//! ```
//!
//! * A word has a reader and one writer, the client. The thread never waits for a client.
//! * A value outside of the queue is not forwarded. Doorbells of other queues, and other registers, are out of reach.
//! * A value that the client overwrites before the thread has seen it is not forwarded: the later one stands for both. A
//!   correct client cannot return to the last forwarded value in between, because a queue of N entries has at most N − 1
//!   that the controller has not seen.
//! * After [`Relay::remove`] has returned, no doorbell of the queue pair is forwarded: its number may have another owner.
//!
//! The thread polls while doorbells arrive and for [`SPIN`] afterwards, then sleeps for [`NAP`] at a time. Without queue
//! pairs it waits. A doorbell is thus found within about 100 µs, or at once under load.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use reprise_buffers::{BufferError, Span};

use crate::backing::Backing;
use crate::error::NvmeError;

/// Bytes of a queue pair in a page of words: a cache line, so that two queue pairs do not share one.
pub(crate) const LINE_BYTES: usize = 64;
/// Offset of the completion queue's word in a line; that of the submission queue is the first.
pub(crate) const COMPLETION_AT: usize = 4;

/// Time for which the thread polls without a sleep after a doorbell: several times the latency of a flash read.
const SPIN: Duration = Duration::from_micros(500);
/// Length of a sleep while there are queue pairs.
const NAP: Duration = Duration::from_micros(50);
/// Changes that wait for the thread; it takes them in each pass.
const CHANGES_MAX: usize = 64;

/// A queue pair whose doorbells are forwarded.
#[derive(Debug)]
pub(crate) struct RelayedQueue {
    /// Number of both queues.
    pub(crate) id: u16,
    /// Entries of each queue.
    pub(crate) entries: u32,
    /// The line of the queue pair in memory that the client writes; zeroed.
    pub(crate) line: Span,
    /// Offsets of the doorbells in the controller's registers: submission queue, completion queue.
    pub(crate) registers: [usize; 2],
}

#[derive(Debug)]
enum Change {
    Add(RelayedQueue),
    Remove { id: u16, done: SyncSender<()> },
}

/// The thread; see the module. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Relay {
    changes: Option<SyncSender<Change>>,
    thread: Option<JoinHandle<()>>,
}

impl Relay {
    /// Starts the thread of a controller.
    ///
    /// # Errors
    /// `Memory` if the thread cannot be started.
    pub(crate) fn start<B: Backing>(backing: &Arc<B>) -> Result<Relay, NvmeError> {
        let backing = Arc::clone(backing);
        let (changes, received) = sync_channel(CHANGES_MAX);
        let thread = std::thread::Builder::new().name("nvme-doorbells".to_owned());
        let thread = thread.spawn(move || run(&*backing, &received)).map_err(|source| {
            NvmeError::Memory(BufferError::System { what: "start a thread for doorbells".into(), source })
        })?;
        Ok(Relay { changes: Some(changes), thread: Some(thread) })
    }

    /// Forwards the doorbells of a queue pair from now on.
    pub(crate) fn add(&self, queue: RelayedQueue) {
        // The thread ends only after the sender.
        let sent = self.changes.as_ref().map(|changes| changes.send(Change::Add(queue)));
        debug_assert!(matches!(sent, Some(Ok(()))), "the thread of doorbells has ended");
    }

    /// Forwards no doorbell of a queue pair from the return on. A queue pair that was not added is ignored.
    pub(crate) fn remove(&self, id: u16) {
        let (done, ended) = sync_channel(1);
        let sent = self.changes.as_ref().map(|changes| changes.send(Change::Remove { id, done }));
        debug_assert!(matches!(sent, Some(Ok(()))), "the thread of doorbells has ended");
        // An error means that the thread has ended, which forwards nothing either.
        let _ = ended.recv();
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.changes = None;
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
    }
}

/// The two doorbells of a queue pair as the thread has them.
struct Forwarded {
    queue: RelayedQueue,
    /// Last values that were seen: completion queue, submission queue.
    seen: [u32; 2],
    has_warned: bool,
}

impl Forwarded {
    /// Forwards the words that have changed; returns whether one was forwarded.
    fn pass<B: Backing>(&mut self, backing: &B) -> bool {
        let [submission, completion] = self.queue.registers;
        // The head first: the controller then has room for completions of the commands behind the tail.
        let head = self.word(backing, 0, (COMPLETION_AT, completion));
        let tail = self.word(backing, 1, (0, submission));
        head || tail
    }

    fn word<B: Backing>(&mut self, backing: &B, index: usize, (at, register): (usize, usize)) -> bool {
        // Entries that the client has written before are visible to the controller before the doorbell: stores of memory
        // that was acquired come before a later store to a register (`Backing::write`).
        let value = self.queue.line.atomic_u32(at).load(Ordering::Acquire);
        if value == self.seen[index] {
            return false;
        }
        self.seen[index] = value;
        let is_valid = value < self.queue.entries;
        if is_valid {
            backing.write(register, value);
        } else if !self.has_warned {
            self.has_warned = true;
            tracing::warn!(
                queue = self.queue.id,
                value,
                entries = self.queue.entries,
                "a client has rung a doorbell with a value outside of its queue, which is not forwarded"
            );
        }
        is_valid
    }
}

fn run<B: Backing>(backing: &B, changes: &Receiver<Change>) {
    let mut queues: Vec<Forwarded> = Vec::new();
    let mut rung_at = Instant::now();
    loop {
        let change = match () {
            () if queues.is_empty() => changes.recv().map_err(|_| RecvTimeoutError::Disconnected),
            () if rung_at.elapsed() < SPIN => changes.try_recv().map_err(|error| match error {
                TryRecvError::Empty => RecvTimeoutError::Timeout,
                TryRecvError::Disconnected => RecvTimeoutError::Disconnected,
            }),
            () => changes.recv_timeout(NAP),
        };
        match change {
            Ok(Change::Add(queue)) => queues.push(Forwarded { queue, seen: [0; 2], has_warned: false }),
            Ok(Change::Remove { id, done }) => {
                queues.retain(|one| one.queue.id != id);
                // The caller waits, or its thread has panicked.
                let _ = done.send(());
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        let mut rung = false;
        for queue in &mut queues {
            rung |= queue.pass(backing);
        }
        if rung {
            rung_at = Instant::now();
        } else {
            std::thread::yield_now();
        }
    }
}
