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
    /// `Invalid` if a queue has none, or is driven, or if memory of the ring is that of another processor; `Thread`.
    pub fn start(ring: &Ring, queues: impl IntoIterator<Item = usize>) -> Result<HostRunner, RingError> {
        let shared = Arc::clone(&ring.shared);
        let ending = Arc::new(AtomicBool::new(false));
        let mut runner = HostRunner { shared, queues: Vec::new(), ending, threads: Vec::new() };
        if !runner.shared.memory.is_host() || !runner.shared.work.is_host() {
            return Err(RingError::Invalid(
                "memory of another processor: threads need a ring of `Ring::on_host`".to_owned(),
            ));
        }
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
        // `shared` has its `RingQueue`, which is replaced only while the CPU has claimed the queue. Other threads access
        // the memory as atomic words only.
        unsafe { reprise_ring_run(base, queue as u32) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ring::{Doorbells, QueueShape, RingMemory, RingQueue, RingSettings, WorkMemory};
    use reprise_nvme::DataFormat;

    #[test]
    fn threads_refuse_a_ring_in_memory_of_another_processor() {
        let settings = RingSettings { depth: 2, queues: 1, entries_max: 2 };
        let (shared, work) = settings.memory_bytes().expect("valid");
        let host = || RingMemory::allocate(shared).expect("memory");
        let others = || {
            let memory = host();
            let (span, keep) = (memory.span().clone(), Arc::new(memory));
            // SAFETY: no processor runs the ring, so nothing accesses this address.
            let of_memory = unsafe { RingMemory::of_processor(span, 1 << 40, keep.clone()) };
            // SAFETY: as above.
            let of_work = unsafe { WorkMemory::of_processor(1 << 41, work, keep) };
            (of_memory.expect("whole pages"), of_work)
        };
        let allocated = || WorkMemory::allocate(work).expect("memory");
        for (memory, work) in [(others().0, allocated()), (host(), others().1), others()] {
            let ring = Ring::new(&settings, memory, work).expect("valid");
            let refused = HostRunner::start(&ring, [0]).expect_err("not this process");
            assert!(refused.to_string().contains("memory of another processor"), "{refused}");
        }
        let mut ring = Ring::new(&settings, host(), allocated()).expect("valid");
        let shape =
            QueueShape { id: 1, entries: 2, format: DataFormat::Sgl, transfer_max: 4096, block_bytes: 512 };
        let memory = others().0;
        let doorbells = Doorbells::mapped(memory.span(), 0, 4).expect("inside");
        let pair = RingQueue::new(shape, memory, 0, doorbells).expect("valid");
        let refused = ring.init_queue(0, pair).expect_err("another processor");
        assert!(refused.to_string().contains("of another processor than the ring"), "{refused}");
        let refused = HostRunner::start(&ring, [0]).expect_err("no queue pair");
        assert!(refused.to_string().contains("without a queue pair"), "{refused}");
    }
}
