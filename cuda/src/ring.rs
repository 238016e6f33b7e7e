//! Rings in the manner of io_uring: a GPU, or a thread in its place, drives NVMe queue pairs.
//!
//! ```text
//!   get_iocb ─▶ fill contexts ─▶ issue_io ─▶ warp of the queue: commands, one doorbell ─▶ controller
//!   wait_cqe ◀─ statuses, index ◀─────────── warp: phase bits, contexts ◀──────────────── controller
//! ```
//!
//! An entry is a batch of up to 2,048 transfers (contexts). Batches go to a queue by number, and are taken in order. They
//! end in any order. Both directions are lock-free: each has one writer, which stores an index and then a count.
//!
//! A batch that has not ended by its deadline is reported as timed out. Its commands may still write memory until
//! [`Ring::reclaim`] has aborted them, or has deleted the queue pair and created it again.
//!
//! The source that drives queues is `native/ring.h`, for GPUs and for the host. [`HostRunner`] runs it in threads.
//!
//! Not included: extents of blocks, checks of the data.

mod bench;
mod completion;
mod gpu;
mod host;
mod iocb;
mod layout;
mod memory;
mod queue;
mod reclaim;
mod verify;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use reprise_buffers::BufferError;
use reprise_nvme::NvmeError;
use reprise_nvme::spec;

pub use bench::{BenchSettings, RingFigures, measure};
pub use completion::{ContextStatus, Cqe};
pub(crate) use gpu::connect_gpu;
pub use gpu::{GpuRunner, measure_on_gpu};
pub use host::HostRunner;
pub use iocb::Iocb;
use layout::Layout;
pub use layout::{BATCH_BYTES, CONTEXT_BYTES, CONTEXTS_MAX};
pub use memory::{Keep, RingMemory, WorkMemory};
pub use queue::{Doorbells, OwnedQueue, QueueShape, RingQueue};
pub use reclaim::Reclaimed;
pub use verify::{Verified, verify, verify_on_gpu};

/// Maximum number of batches of a ring.
pub const DEPTH_MAX: usize = 64;

/// Time in which a claim of a queue is retried.
const CLAIM_LIMIT: Duration = Duration::from_millis(20);

/// An operation of a ring that failed.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// The caller has asked for something invalid.
    #[error("invalid ring: {0}")]
    Invalid(String),
    /// Memory could not be allocated.
    #[error("memory of a ring: {0}")]
    Memory(#[from] BufferError),
    /// The driver of the controller has failed.
    #[error("queue pair of a ring: {0}")]
    Nvme(#[from] NvmeError),
    /// The GPU cannot be used.
    #[error(transparent)]
    Gpu(#[from] crate::gpu::GpuError),
    /// A thread could not be started.
    #[error("cannot start a thread of a ring: {0}")]
    Thread(#[from] std::io::Error),
    /// A queue has not stopped in time.
    #[error("queue {queue} of a ring has not stopped within {limit:?}: end the process that drives it")]
    Stuck {
        /// Index of the queue in the ring.
        queue: usize,
        /// Time that was waited.
        limit: Duration,
    },
}

/// Size of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingSettings {
    /// Number of batches, a power of two from 2 to [`DEPTH_MAX`].
    pub depth: usize,
    /// Number of queue pairs, 1 to 1,024.
    pub queues: usize,
    /// Maximum number of entries of a queue pair, 2 to 4,096.
    pub entries_max: usize,
}

impl RingSettings {
    /// Returns the sizes of the memory that CPU and processor share, and of that of the processor, in bytes.
    ///
    /// # Errors
    /// `Invalid` for a value outside its range.
    pub fn memory_bytes(&self) -> Result<(usize, usize), RingError> {
        let layout = Layout::new(self)?;
        Ok((layout.shared_bytes, layout.work_bytes))
    }
}

/// Direction of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    /// From memory to the device.
    Write,
    /// From the device to memory.
    Read,
}

/// What all transfers of a batch have in common.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BatchSettings {
    /// Direction.
    pub operation: Operation,
    /// Namespace of the controller.
    pub namespace: u32,
    /// Limit, from when the ring takes the batch; `None` for no limit. A batch without a limit that loses a completion
    /// never ends.
    pub timeout: Option<Duration>,
    /// Number of the caller, which the completion has too.
    pub token: u64,
}

/// One transfer between memory and device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transfer {
    /// Address of the memory for the controller, a multiple of 4.
    pub address: u64,
    /// First logical block.
    pub block: u64,
    /// Length in bytes, a multiple of the size of a block.
    pub bytes: u32,
    /// CRC32C of the data. The ring does not check it.
    pub checksum: u32,
}

/// A batch that was issued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket {
    batch: usize,
    /// Number of the use of the batch.
    use_number: u64,
}

/// State of a batch.
#[derive(Clone, Copy, Debug)]
struct BatchState {
    use_number: u64,
    contexts: usize,
    token: u64,
    /// Queue, while the batch is issued.
    queue: Option<usize>,
}

/// State of a queue.
#[derive(Debug)]
struct QueueState {
    queue: Option<RingQueue>,
    issued: u32,
    completed: u32,
    epoch: u32,
    /// Identifiers that were given up, and of which the abort was requested.
    aborted: usize,
}

/// Counters of a queue since the creation of the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QueueCounters {
    /// Commands that were submitted.
    pub commands: u64,
    /// Stores to the tail doorbell.
    pub doorbells: u64,
    /// Checks for up to 32 completions.
    pub polls: u64,
    /// Completions that were taken.
    pub ended: u64,
}

/// Memory of a ring, which its processor uses too.
#[derive(Debug)]
struct Shared {
    memory: RingMemory,
    /// The address of it is in the header.
    work: WorkMemory,
    layout: Layout,
    /// A thread of the host is there for the queue. One flag for each queue.
    attached: Vec<AtomicBool>,
    /// Queue pairs: their memory and doorbells stay valid while a processor uses them. One is replaced only while the
    /// CPU has claimed the queue.
    pairs: Mutex<Vec<Option<RingQueue>>>,
}

/// States of a queue; see `Shared::claim`.
const PARKED: u32 = 0;
const DRIVEN: u32 = 1;
const CONFIGURED: u32 = 2;

impl Shared {
    fn state(&self, queue: usize) -> &AtomicU32 {
        self.memory.word(self.layout.queue(queue) + layout::queue::STATE)
    }

    /// Claims a parked queue for its processor, which parks it when it ends, or for the CPU; false if it is claimed.
    fn claim(&self, queue: usize, state: u32) -> bool {
        self.state(queue).compare_exchange(PARKED, state, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn request(&self, queue: usize, request: Request) {
        let at = self.layout.queue(queue) + layout::queue::REQUEST;
        self.memory.word(at).store(request as u32, Ordering::Release);
    }

    fn requested(&self, queue: usize) -> u32 {
        self.memory.load(self.layout.queue(queue) + layout::queue::REQUEST)
    }
}

/// A ring; see the module. One thread uses it.
#[derive(Debug)]
pub struct Ring {
    shared: Arc<Shared>,
    batches: Vec<BatchState>,
    free: Vec<usize>,
    queues: Vec<QueueState>,
    /// Queue at which the next check for completions starts.
    next: usize,
}

/// Request of the CPU to the processor of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Request {
    /// It takes batches until another request.
    Run = 0,
    /// It ends when no batch is left.
    Drain = 1,
    /// It ends at once. Batches in flight end as [`ContextStatus::Parked`].
    Park = 2,
}

impl Ring {
    /// Creates a ring for the host build, in memory of this process.
    ///
    /// # Errors
    /// `Invalid` for a value outside its range; `Memory`.
    pub fn on_host(settings: &RingSettings) -> Result<Ring, RingError> {
        let (shared, work) = settings.memory_bytes()?;
        Ring::new(settings, RingMemory::allocate(shared)?, WorkMemory::allocate(work)?)
    }

    /// Creates a ring in memory of the caller: [`RingSettings::memory_bytes`] states the sizes.
    ///
    /// # Errors
    /// `Invalid` for a value outside its range, or memory that is too small.
    pub fn new(settings: &RingSettings, memory: RingMemory, work: WorkMemory) -> Result<Ring, RingError> {
        let layout = Layout::new(settings)?;
        if memory.bytes() < layout.shared_bytes || work.bytes() < layout.work_bytes {
            return Err(RingError::Invalid(format!(
                "memory of {} and {} bytes: expected {} and {}",
                memory.bytes(),
                work.bytes(),
                layout.shared_bytes,
                layout.work_bytes
            )));
        }
        memory.zero(0, layout.results_at);
        for (index, value) in [layout::MAGIC, layout::VERSION, layout.depth as u32, layout.queues as u32]
            .into_iter()
            .enumerate()
        {
            memory.set(4 * index, value);
        }
        memory.set_double(layout::header::WORK, work.address());
        let offsets = [layout.queue(0), layout.batches_at, layout.statuses_at, layout.results_at];
        for (index, offset) in offsets.into_iter().enumerate() {
            memory.set_double(layout::header::OFFSETS + 8 * index, offset as u64);
        }
        memory.set_double(layout::header::PROGRESS, layout.progress_at as u64);
        for queue in 0..layout.queues {
            memory.set(layout.queue(queue) + layout::queue::REQUEST, Request::Park as u32);
        }
        let queue = || QueueState { queue: None, issued: 0, completed: 0, epoch: 0, aborted: 0 };
        let batch = BatchState { use_number: 0, contexts: 0, token: 0, queue: None };
        let attached = (0..layout.queues).map(|_| AtomicBool::new(false)).collect();
        let pairs = Mutex::new((0..layout.queues).map(|_| None).collect());
        Ok(Ring {
            batches: vec![batch; layout.depth],
            free: (0..layout.depth).rev().collect(),
            queues: (0..layout.queues).map(|_| queue()).collect(),
            shared: Arc::new(Shared { memory, work, layout, attached, pairs }),
            next: 0,
        })
    }

    /// Gives a queue of the ring a queue pair, whose entries are all free: at first, or after the queue pair was created
    /// again.
    ///
    /// # Errors
    /// `Invalid` if a processor drives the queue, for more entries than the ring has room for, or for memory of another
    /// processor than the ring's.
    pub fn init_queue(&mut self, index: usize, queue: RingQueue) -> Result<(), RingError> {
        let layout = self.shared.layout;
        let entries = queue.shape.entries as usize;
        if index >= layout.queues || entries > layout.entries_max {
            return Err(RingError::Invalid(format!(
                "queue {index} with {entries} entries: the ring has {} queues of up to {} entries",
                layout.queues, layout.entries_max
            )));
        }
        if queue.memory.is_host() != self.shared.memory.is_host() {
            return Err(RingError::Invalid(format!(
                "queue {index} in memory of another processor than the ring"
            )));
        }
        // A thread that reads the request claims the queue for a moment.
        let start = Instant::now();
        while !self.shared.claim(index, CONFIGURED) {
            if start.elapsed() >= CLAIM_LIMIT {
                return Err(RingError::Invalid(format!("queue {index} is driven: park it first")));
            }
            std::thread::yield_now();
        }
        self.configure(index, &queue);
        self.shared.pairs.lock().unwrap_or_else(PoisonError::into_inner)[index] = Some(queue.clone());
        self.queues[index].queue = Some(queue);
        self.shared.state(index).store(PARKED, Ordering::Release);
        Ok(())
    }

    /// Writes the constants of a queue.
    fn configure(&mut self, index: usize, queue: &RingQueue) {
        let Shared { memory, layout, .. } = &*self.shared;
        let entries = queue.shape.entries as usize;
        let at = layout.queue(index);
        let base = queue.memory.processor_address();
        let (lists, lists_controller) = queue.lists();
        let addresses = [
            base,
            base + QueueShape::completions_offset(queue.shape.entries) as u64,
            queue.doorbells.submission,
            queue.doorbells.completion,
            lists,
            lists_controller,
        ];
        for (word, address) in addresses.into_iter().enumerate() {
            memory.set_double(at + layout::queue::ADDRESSES + 8 * word, address);
        }
        let state = &mut self.queues[index];
        state.epoch += 1;
        state.aborted = 0;
        let shape = queue.shape;
        let sgl = u32::from(shape.format == reprise_nvme::DataFormat::Sgl);
        let words = [
            entries as u32,
            shape.id.into(),
            shape.block_bytes.ilog2(),
            shape.transfer_max,
            sgl,
            state.epoch,
        ];
        for (word, value) in words.into_iter().enumerate() {
            memory.set(at + layout::queue::ENTRIES + 4 * word, value);
        }
        memory.set_double(at + layout::queue::SLOTS, layout.slots(index) as u64);
        memory.set_double(at + layout::queue::SLOTS + 8, layout.free(index) as u64);
        memory.set(at + layout::queue::FREE_MASK, entries.next_power_of_two() as u32 - 1);
        memory.set_double(at + layout::queue::ISSUED_OFFSET, layout.issued(index) as u64);
        memory.set_double(at + layout::queue::COMPLETED_OFFSET, layout.completed(index) as u64);
        memory.set_double(at + layout::queue::GIVEN_UP_OFFSET, layout.given_up(index) as u64);
        for field in [layout::queue::GIVEN_UP, layout::queue::BROKEN, layout::queue::GIVEN_UP_COUNT] {
            memory.set(at + field, 0);
        }
    }

    /// Returns the number of queues.
    pub fn queues(&self) -> usize {
        self.queues.len()
    }

    /// Returns the number of batches that can be filled now.
    pub fn free_iocbs(&self) -> usize {
        self.free.len()
    }

    /// Returns the size of the memory of descriptions in bytes: of the ring, and lists of its queues.
    pub fn descriptor_bytes(&self) -> DescriptorBytes {
        let lists = |queue: &RingQueue| match queue.shape.format {
            reprise_nvme::DataFormat::Sgl => 0,
            reprise_nvme::DataFormat::Prp => (queue.shape.entries as usize - 1) * reprise_buffers::PAGE_BYTES,
        };
        let Shared { layout, .. } = &*self.shared;
        DescriptorBytes {
            contexts: layout.depth * BATCH_BYTES,
            lists: self.queues.iter().filter_map(|state| state.queue.as_ref()).map(lists).sum(),
            statuses: layout.depth * CONTEXTS_MAX * 4,
            work: layout.work_bytes,
        }
    }

    /// Returns an empty batch; `None` while all are in use.
    pub fn get_iocb(&mut self, settings: &BatchSettings) -> Option<Iocb<'_>> {
        let batch = self.free.pop()?;
        let Shared { memory, layout, .. } = &*self.shared;
        let at = layout.batch(batch);
        let operation = match settings.operation {
            Operation::Write => spec::WRITE,
            Operation::Read => spec::READ,
        };
        memory.set(at + 4, operation.into());
        memory.set(at + 8, settings.namespace);
        memory.set(at + layout::batch::CANCEL, 0);
        let timeout = settings.timeout.map_or(0, |limit| limit.as_nanos().clamp(1, u64::MAX.into()) as u64);
        memory.set_double(at + layout::batch::TIMEOUT, timeout);
        memory.set_double(at + layout::batch::TOKEN, settings.token);
        self.batches[batch].token = settings.token;
        Some(Iocb { ring: self, batch, contexts: 0, is_issued: false })
    }

    /// Requests the cancellation of a batch: contexts that have no command yet end as cancelled. The batch ends as usual.
    /// A batch that has ended is not harmed.
    pub fn cancel(&mut self, ticket: Ticket) {
        let state = &self.batches[ticket.batch];
        if state.use_number == ticket.use_number && state.queue.is_some() {
            let Shared { memory, layout, .. } = &*self.shared;
            let at = layout.batch(ticket.batch) + layout::batch::CANCEL;
            memory.word(at).store(1, Ordering::Release);
        }
    }

    /// Returns the number of commands of a queue that were given up and have not ended.
    pub fn given_up(&self, queue: usize) -> u32 {
        self.queue_word(queue, layout::queue::GIVEN_UP)
    }

    /// Reports whether the controller of a queue has violated the specification.
    pub fn is_broken(&self, queue: usize) -> bool {
        self.queue_word(queue, layout::queue::BROKEN) != 0
    }

    /// Returns the counters of a queue. They are exact when the queue has nothing to do.
    pub fn counters(&self, queue: usize) -> QueueCounters {
        let Shared { memory, layout, .. } = &*self.shared;
        let at = layout.queue(queue) + layout::queue::COMMANDS;
        let [commands, doorbells, polls, ended] =
            [0, 8, 16, 24].map(|offset| memory.double(at + offset).load(Ordering::Relaxed));
        QueueCounters { commands, doorbells, polls, ended }
    }

    fn queue_word(&self, queue: usize, field: usize) -> u32 {
        let Shared { memory, layout, .. } = &*self.shared;
        memory.load(layout.queue(queue) + field)
    }
}

/// Memory of descriptions of a ring, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorBytes {
    /// Batches with their contexts.
    pub contexts: usize,
    /// Pages of PRP lists of all queues; 0 with SGLs.
    pub lists: usize,
    /// Statuses of contexts.
    pub statuses: usize,
    /// State that only the ring's processor accesses.
    pub work: usize,
}

impl DescriptorBytes {
    /// Returns the sum of all parts.
    pub fn total(&self) -> usize {
        self.contexts + self.lists + self.statuses + self.work
    }
}
