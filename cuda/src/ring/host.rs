//! Threads that drive the queues of a ring on the host: the same source as on a GPU.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::ring::{DRIVEN, PARKED, Request, Ring, RingError, Shared};

unsafe extern "C" {
    /// Drives a queue until a request ends it.
    fn reprise_ring_run(shared: *mut u8, queue: u32);
}

/// Pause of a thread whose queue is parked.
const PARKED_PAUSE: Duration = Duration::from_micros(100);

/// A thread for each of some queues. Dropping it parks them.
#[derive(Debug)]
pub struct HostRunner {
    shared: Arc<Shared>,
    queues: Vec<usize>,
    ending: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl HostRunner {
    /// Starts the threads of queues that have a queue pair.
    ///
    /// # Errors
    /// `Invalid` if a queue has none, or is driven; `Thread`.
    pub fn start(ring: &Ring, queues: impl IntoIterator<Item = usize>) -> Result<HostRunner, RingError> {
        let shared = Arc::clone(&ring.shared);
        let ending = Arc::new(AtomicBool::new(false));
        let mut runner = HostRunner { shared, queues: Vec::new(), ending, threads: Vec::new() };
        for queue in queues {
            if ring.queues.get(queue).is_none_or(|state| state.queue.is_none()) {
                return Err(RingError::Invalid(format!("queue {queue} without a queue pair")));
            }
            if runner.shared.attached[queue].swap(true, Ordering::AcqRel) {
                return Err(RingError::Invalid(format!("queue {queue} has a thread already")));
            }
            runner.queues.push(queue);
            runner.shared.request(queue, Request::Run);
            let (shared, ending) = (Arc::clone(&runner.shared), Arc::clone(&runner.ending));
            let thread = std::thread::Builder::new().name(format!("ring-{queue}"));
            runner.threads.push(thread.spawn(move || drive(&shared, queue, &ending))?);
        }
        Ok(runner)
    }
}

impl Drop for HostRunner {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::Release);
        for queue in &self.queues {
            self.shared.request(*queue, Request::Park);
        }
        for thread in self.threads.drain(..) {
            // A panic of the thread was reported when it happened.
            let _ = thread.join();
        }
        for queue in &self.queues {
            self.shared.attached[*queue].store(false, Ordering::Release);
        }
    }
}

fn drive(shared: &Shared, queue: usize, ending: &AtomicBool) {
    let base = shared.memory.processor_address() as *mut u8;
    loop {
        let is_parked = || shared.requested(queue) == Request::Park as u32;
        if is_parked() || !shared.claim(queue, DRIVEN) {
            if ending.load(Ordering::Acquire) {
                return;
            }
            std::thread::sleep(PARKED_PAUSE);
            continue;
        }
        // The request may have changed before the claim, and the queue with it.
        if is_parked() {
            shared.state(queue).store(PARKED, Ordering::Release);
            continue;
        }
        // SAFETY: `Ring::new` has written the header, and `init_queue` the queue with addresses that stay valid while
        // the ring has its `RingQueue`: it is replaced only while the queue is claimed by the CPU. Other threads access
        // the memory as atomic words only.
        unsafe { reprise_ring_run(base, queue as u32) };
    }
}
