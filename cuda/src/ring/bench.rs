//! Measures how many contexts a ring drives through the emulated controller.

use std::time::{Duration, Instant};

use reprise_buffers::PAGE_BYTES;
use reprise_nvme::emulated::{EmulatedController, Emulation, Storage};
use reprise_nvme::{Backing, Controller, DmaMapping, DriverSettings};

use crate::ring::{
    BatchSettings, CONTEXTS_MAX, HostRunner, Operation, OwnedQueue, QueueShape, Ring, RingError, RingMemory,
    RingSettings, Transfer,
};

/// Size of the emulated namespace.
const NAMESPACE_BYTES: usize = 64 << 20;
/// Size of the memory that is read into.
const DATA_BYTES: usize = 16 << 20;
/// Size of a logical block.
pub(super) const BLOCK_BYTES: u32 = 512;
/// Time without a completion after which the measurement fails.
const STALL: Duration = Duration::from_secs(10);

/// Parameters of one measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BenchSettings {
    /// Size of a context in bytes, a multiple of 512 up to 1 MiB.
    pub context_bytes: u32,
    /// Number of queue pairs.
    pub queues: usize,
    /// Number of entries of a queue pair.
    pub entries: u32,
    /// Number of threads of the emulated controller.
    pub controller_threads: usize,
    /// Commands have SGLs instead of PRP entries.
    pub sgl: bool,
    /// Duration of the measurement.
    pub duration: Duration,
}

impl Default for BenchSettings {
    /// Contexts of 512 bytes, one queue pair of 1,024 entries, one thread, SGLs, 1 s.
    fn default() -> BenchSettings {
        BenchSettings {
            context_bytes: 512,
            queues: 1,
            entries: 1024,
            controller_threads: 1,
            sgl: true,
            duration: Duration::from_secs(1),
        }
    }
}

/// Result of a measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RingFigures {
    /// Contexts that have ended, all of them with success.
    pub contexts: u64,
    /// Time in which they have ended.
    pub elapsed: Duration,
    /// Doorbells of submission queues.
    pub doorbells: u64,
    /// Checks for completions.
    pub polls: u64,
    /// Memory of descriptions in bytes.
    pub descriptor_bytes: usize,
}

impl RingFigures {
    /// Returns the number of contexts per second.
    pub fn contexts_per_second(&self) -> f64 {
        self.contexts as f64 / self.elapsed.as_secs_f64()
    }
}

/// An emulated controller, and memory for queues and data.
pub(super) struct Rig {
    pub(super) controller: Controller<EmulatedController>,
    pub(super) owned: Vec<OwnedQueue<EmulatedController>>,
    pub(super) data: DmaMapping,
    pub(super) memory: RingMemory,
}

impl Rig {
    /// Starts the controller, and creates queue pairs in memory that a function allocates.
    pub(super) fn start(
        settings: &BenchSettings,
        mut allocate: impl FnMut(usize) -> Result<RingMemory, RingError>,
    ) -> Result<Rig, RingError> {
        let emulation = Emulation {
            sgl: settings.sgl,
            threads: settings.controller_threads,
            ..Emulation::of(Storage::memory(NAMESPACE_BYTES))
        };
        let driver = DriverSettings { queue_pairs: settings.queues as u16, ..DriverSettings::default() };
        let mut controller = Controller::start(EmulatedController::start(emulation)?, driver)?;
        let memory = RingMemory::allocate(DATA_BYTES)?;
        let data = controller.backing().map(memory.span())?;
        let bytes = QueueShape::memory_bytes(settings.entries, controller.data_format());
        let mut owned = Vec::new();
        for _ in 0..settings.queues {
            let memory = allocate(bytes.next_multiple_of(PAGE_BYTES))?;
            owned.push(OwnedQueue::create(&mut controller, memory, settings.entries, BLOCK_BYTES)?);
        }
        Ok(Rig { controller, owned, data, memory })
    }

    /// Returns the transfer with a number: places and memory follow each other, and start again at the end.
    fn transfer(&self, number: u64, bytes: u32) -> Transfer {
        let size = u64::from(bytes);
        let of = |all: usize| number * size % (all as u64 / size * size);
        let block = of(NAMESPACE_BYTES) / u64::from(BLOCK_BYTES);
        Transfer { address: self.data.address() + of(DATA_BYTES), block, bytes, checksum: 0 }
    }

    /// Keeps all batches of a ring in flight for a time, on its queues in turns.
    pub(super) fn drive(&self, ring: &mut Ring, settings: &BenchSettings) -> Result<RingFigures, RingError> {
        let batch =
            BatchSettings { operation: Operation::Read, namespace: 1, timeout: Some(STALL), token: 0 };
        let queues = self.owned.len();
        let (mut number, mut issued, mut contexts, mut in_flight) = (0, 0, 0, 0_usize);
        let start = Instant::now();
        loop {
            let is_over = start.elapsed() >= settings.duration;
            while !is_over && let Some(mut iocb) = ring.get_iocb(&batch) {
                for _ in 0..CONTEXTS_MAX {
                    iocb.push(&self.transfer(number, settings.context_bytes));
                    number += 1;
                }
                iocb.issue_io(issued % queues)?;
                issued += 1;
                in_flight += 1;
            }
            if in_flight == 0 {
                break;
            }
            let cqe = ring.wait_cqe(STALL);
            match cqe {
                Some(cqe) if cqe.failed == 0 => contexts += cqe.contexts as u64,
                other => return Err(RingError::Invalid(format!("a batch has not ended well: {other:?}"))),
            }
            in_flight -= 1;
        }
        let elapsed = start.elapsed();
        let counters: Vec<_> = (0..queues).map(|queue| ring.counters(queue)).collect();
        Ok(RingFigures {
            contexts,
            elapsed,
            doorbells: counters.iter().map(|one| one.doorbells).sum(),
            polls: counters.iter().map(|one| one.polls).sum(),
            descriptor_bytes: ring.descriptor_bytes().total(),
        })
    }

    /// Deletes the queue pairs; no ring may drive them.
    pub(super) fn stop(mut self) -> Result<(), RingError> {
        for queue in &mut self.owned {
            queue.delete(&mut self.controller)?;
        }
        Ok(())
    }
}

/// Returns the settings of a ring for a measurement: at most 8 batches in flight for each queue.
pub(super) fn ring_settings(settings: &BenchSettings) -> RingSettings {
    let depth = (8 * settings.queues).next_power_of_two().clamp(8, crate::ring::DEPTH_MAX);
    RingSettings { depth, queues: settings.queues, entries_max: settings.entries as usize }
}

/// Checks the size of contexts of a measurement.
pub(super) fn check(settings: &BenchSettings) -> Result<(), RingError> {
    let bytes = settings.context_bytes;
    if bytes.is_multiple_of(BLOCK_BYTES) && (BLOCK_BYTES..=1 << 20).contains(&bytes) {
        return Ok(());
    }
    Err(RingError::Invalid(format!("contexts of {bytes} bytes: expected a multiple of 512 up to 1 MiB")))
}

/// Measures the host build: reads from an emulated controller in this process, with a thread for each queue pair. All
/// threads inherit the affinity of the calling thread.
///
/// # Errors
/// `Invalid` for a setting outside its range or a transfer that fails; `Memory`, `Nvme`.
pub fn measure(settings: &BenchSettings) -> Result<RingFigures, RingError> {
    check(settings)?;
    let rig = Rig::start(settings, RingMemory::allocate)?;
    let mut ring = Ring::on_host(&ring_settings(settings))?;
    for (index, queue) in rig.owned.iter().enumerate() {
        ring.init_queue(index, queue.for_host()?)?;
    }
    let runner = HostRunner::start(&ring, 0..settings.queues)?;
    let figures = rig.drive(&mut ring, settings);
    drop(runner);
    rig.stop()?;
    figures
}
