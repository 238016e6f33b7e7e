//! The plain engine: `preadv`, `pwritev` and `fdatasync` on a few threads.
//!
//! For kernels, containers and sandboxes without io_uring. Threads share one queue, which holds no more than
//! the engine's capacity. Dropping the engine lets the threads finish the queue, then joins them.

use std::collections::VecDeque;
use std::os::fd::AsFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::device::DeviceFile;
use crate::engine::{CloseOutcome, EngineKind, IoEngine, Wait};
use crate::error::{Call, IoError};
use crate::op::{Completion, Op, Submission};
use crate::sys;
use crate::transfer::{IoVecs, Step, Transfer};
use crate::waker::{Doorbell, Waker};

/// Number of threads of one engine: about 4 requests of 2 MiB in flight saturate a virtual or NVMe disk, and
/// more threads cost more context switches.
const THREADS_MAX: usize = 4;

/// The plain engine; see the module.
pub(crate) struct PlainEngine {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    bell: Doorbell,
    capacity: usize,
    in_flight: usize,
    /// Completions of operations that [`Bounds::check`](crate::op::Bounds::check) rejected, for the next
    /// reap.
    refused: Vec<Completion>,
}

struct Shared {
    file: DeviceFile,
    state: Mutex<State>,
    work: Condvar,
    waker: Waker,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Transfer>,
    ended: Vec<Completion>,
    closing: Closing,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Closing {
    #[default]
    Open,
    /// Threads end when the queue is empty.
    Draining,
}

impl PlainEngine {
    /// # Errors
    /// `Unavailable` when the process is out of descriptors or threads.
    pub(crate) fn new(file: DeviceFile, capacity: usize) -> Result<PlainEngine, IoError> {
        let bell = Doorbell::new()?;
        let state = Mutex::new(State::default());
        let shared = Arc::new(Shared { file, state, work: Condvar::new(), waker: bell.waker() });
        let (threads, refused) = (Vec::new(), Vec::new());
        let mut engine = PlainEngine { shared, threads, bell, capacity, in_flight: 0, refused };
        for index in 0..THREADS_MAX.min(capacity) {
            let shared = Arc::clone(&engine.shared);
            let thread = std::thread::Builder::new().name(format!("reprise-io-{index}"));
            // On failure, dropping the engine ends the threads that were started.
            let thread = thread
                .spawn(move || shared.serve())
                .map_err(|error| IoError::from_call(Call::Open, "spawning an I/O thread", error))?;
            engine.threads.push(thread);
        }
        Ok(engine)
    }

    fn take(&mut self, out: &mut Vec<Completion>) -> bool {
        let before = out.len();
        out.append(&mut self.refused);
        out.append(&mut self.shared.lock().ended);
        self.in_flight -= out.len() - before;
        out.len() > before
    }
}

impl IoEngine for PlainEngine {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn submit(&mut self, submission: Submission) -> Result<(), Submission> {
        if self.in_flight == self.capacity {
            return Err(submission);
        }
        self.in_flight += 1;
        if let Err(error) = self.shared.file.bounds().check(&submission.op) {
            let Submission { token, op } = submission;
            self.refused.push(Completion { token, op, result: Err(error) });
            return Ok(());
        }
        self.shared.lock().queue.push_back(Transfer::new(submission));
        self.shared.work.notify_one();
        Ok(())
    }

    fn reap(&mut self, wait: Wait, out: &mut Vec<Completion>) -> Result<(), IoError> {
        let Wait::Until(limit) = wait else {
            self.take(out);
            return Ok(());
        };
        let start = Instant::now();
        loop {
            // Consume the wake before taking completions: a later wake is then seen by the next iteration or
            // the next reap.
            let rung = self.bell.answer();
            let elapsed = start.elapsed();
            if self.take(out) || rung || elapsed >= limit {
                return Ok(());
            }
            self.bell.sleep(limit - elapsed);
        }
    }

    fn waker(&self) -> Waker {
        self.bell.waker()
    }

    fn close(self: Box<Self>) -> CloseOutcome {
        // The drop joins the threads, so a running call ends before.
        drop(self);
        CloseOutcome::Drained
    }

    fn kind(&self) -> EngineKind {
        EngineKind::Plain
    }
}

impl Drop for PlainEngine {
    fn drop(&mut self) {
        self.shared.lock().closing = Closing::Draining;
        self.shared.work.notify_all();
        for thread in self.threads.drain(..) {
            if thread.join().is_err() {
                tracing::error!(path = %self.shared.file.path().display(), "an I/O thread panicked");
            }
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // No code inside the lock can panic half-way, so the queues are always consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Body of one thread.
    fn serve(&self) {
        let mut iovecs = IoVecs::default();
        while let Some(mut transfer) = self.next() {
            let result = self.run(&mut transfer, &mut iovecs);
            self.lock().ended.push(transfer.complete(result));
            self.waker.wake();
        }
    }

    fn next(&self) -> Option<Transfer> {
        let idle = |state: &mut State| state.queue.is_empty() && state.closing == Closing::Open;
        let state = self.work.wait_while(self.lock(), idle);
        state.unwrap_or_else(PoisonError::into_inner).queue.pop_front()
    }

    fn run(&self, transfer: &mut Transfer, iovecs: &mut IoVecs) -> Result<(), IoError> {
        let fd = self.file.as_fd();
        loop {
            transfer.rest(iovecs);
            let offset = transfer.rest_offset();
            let result = match transfer.op() {
                // SAFETY: the iovecs are the spans of `transfer`, which keeps them mapped; Bounds::check saw
                // that they are writable.
                Op::Read { .. } => unsafe { sys::preadv(fd, iovecs.as_slice(), offset) },
                // SAFETY: the iovecs are the spans of `transfer`, which keeps them mapped; all spans are
                // readable.
                Op::Write { .. } => unsafe { sys::pwritev(fd, iovecs.as_slice(), offset) },
                Op::Sync => self.file.file().sync_data().map(|()| 0),
            };
            if let Step::Ended(result) = transfer.advance(result) {
                return result;
            }
        }
    }
}
