//! A stream without a GPU: a thread runs its work in order, and waits for words as the front end of a GPU does.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::words::{Signal, Words};
use crate::gpu::GpuError;
use crate::store::backoff::Backoff;

/// Work that a stream has at most before enqueueing waits; a GPU has a limit of that order, too.
const WORK_MAX: usize = 4096;

/// A stream of this process. Clones refer to the same stream; its thread ends when the last one is dropped and all work
/// has ended.
#[derive(Clone)]
pub struct HostStream {
    work: SyncSender<Work>,
    faults: Arc<Faults>,
}

/// Queries that fail in place of those of a driver.
#[derive(Debug, Default)]
struct Faults {
    left: AtomicU32,
    code: AtomicU32,
}

/// A point in the stream, which its thread reaches.
#[derive(Clone, Debug)]
pub(super) struct Mark {
    is_reached: Arc<AtomicBool>,
    faults: Arc<Faults>,
}

enum Work {
    Run(Box<dyn FnOnce() + Send>),
    Wait { words: Arc<Words>, word: usize, value: u32 },
}

impl HostStream {
    /// Starts the thread.
    ///
    /// # Errors
    /// The thread could not be started.
    pub fn start() -> std::io::Result<HostStream> {
        let (work, taken) = sync_channel(WORK_MAX);
        std::thread::Builder::new().name("host-stream".to_owned()).spawn(move || run(&taken))?;
        Ok(HostStream { work, faults: Arc::default() })
    }

    /// Lets the next `queries` queries of points of this stream fail with a result of a driver, such as 900 while a graph
    /// is captured, or 700 after a kernel has failed.
    pub fn fail_queries(&self, queries: u32, code: u32) {
        self.faults.code.store(code, Ordering::Release);
        self.faults.left.store(queries, Ordering::Release);
    }

    /// Returns how many queries are left that fail.
    pub fn failing_queries(&self) -> u32 {
        self.faults.left.load(Ordering::Acquire)
    }

    /// Enqueues a function, in place of a kernel.
    pub fn launch(&self, run: impl FnOnce() + Send + 'static) {
        self.enqueue(Work::Run(Box::new(run)));
    }

    /// Waits until all work of the stream has ended.
    pub fn synchronize(&self) {
        let mark = self.mark();
        let mut pause = Backoff::start();
        while !mark.has_passed() {
            pause.wait();
        }
    }

    pub(super) fn mark(&self) -> Mark {
        let mark = Mark { is_reached: Arc::default(), faults: Arc::clone(&self.faults) };
        let reached = Arc::clone(&mark.is_reached);
        self.launch(move || reached.store(true, Ordering::Release));
        mark
    }

    /// Delays later work until the signal is dropped.
    pub(super) fn wait_word(&self, words: &Arc<Words>, signal: &Signal) {
        let (word, value) = signal.target();
        self.enqueue(Work::Wait { words: Arc::clone(words), word, value });
    }

    fn enqueue(&self, work: Work) {
        // The thread ends before the last sender only by a panic of a function, which was reported.
        let _ = self.work.send(work);
    }
}

impl Mark {
    fn has_passed(&self) -> bool {
        self.is_reached.load(Ordering::Acquire)
    }

    /// Reports whether the point has passed, as a query of a driver does.
    pub(super) fn query(&self) -> Result<bool, GpuError> {
        let left = &self.faults.left;
        let take = |left: u32| left.checked_sub(1);
        match left.fetch_update(Ordering::AcqRel, Ordering::Acquire, take) {
            Err(_) => Ok(self.has_passed()),
            Ok(_) => Err(GpuError::Driver {
                call: "query of an emulated stream",
                code: self.faults.code.load(Ordering::Acquire),
                name: "CUDA_ERROR".to_owned(),
                text: "a fault of a test".to_owned(),
            }),
        }
    }
}

impl fmt::Debug for HostStream {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("HostStream").finish_non_exhaustive()
    }
}

fn run(work: &Receiver<Work>) {
    while let Ok(next) = work.recv() {
        match next {
            Work::Run(run) => run(),
            Work::Wait { words, word, value } => {
                let mut pause = Backoff::start();
                while !words.has_reached(word, value) {
                    pause.wait();
                }
            }
        }
    }
}
