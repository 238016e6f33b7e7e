//! An NVMe controller in this process, for tests and for machines without one.
//!
//! It has registers, an address space, and threads that act as the controller: they read entries and
//! lists from memory, move data, and write completions with phase bits. [`Emulation`] configures
//! its features, its threads and its [`Fault`]s.
//!
//! Its registers are a file that other processes can map. A doorbell that is written there wakes no thread: a thread
//! without work then finds it within 100 µs.
//!
//! Not emulated: interrupts, several controllers of a subsystem, arbitration classes, end-to-end protection.

mod admin;
mod burst;
mod faults;
mod machine;
mod memory;
mod queues;
mod storage;
mod transfer;

use std::any::Any;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;

use reprise_buffers::{Arena, ArenaConfig, HugePolicy, Region, Span};

pub use faults::{Fault, FaultRule, Selection};
pub use memory::EmulatedMemory;
pub use storage::Storage;

use crate::backing::{Backing, DmaMapping, RegisterFile};
use crate::error::NvmeError;
use crate::spec::{PAGE_BYTES, offset};
use machine::Machine;
use memory::AddressSpace;

/// Number of queues with doorbells, the admin queue included.
const QUEUES_MAX: usize = 1024;
/// Size of BAR 0: properties, and doorbells at a stride of 4 bytes.
const REGISTER_BYTES: usize = offset::DOORBELLS + 2 * QUEUES_MAX * 4;

/// Features and faults of an emulated controller.
#[derive(Debug)]
pub struct Emulation {
    /// Serial number.
    pub serial: String,
    /// Number of I/O queue pairs that it grants at most.
    pub queue_pairs: u16,
    /// Maximum number of entries of an I/O queue, 2 to 65,536.
    pub entries_max: u32,
    /// It accepts SGLs for I/O commands.
    pub sgl: bool,
    /// It has the command Write Zeroes.
    pub write_zeroes: bool,
    /// Maximum size of a transfer in bytes, a power of two of at least 4,096; `None` if unlimited.
    pub transfer_max: Option<u64>,
    /// Size of a logical block as a power of two.
    pub block_power: u8,
    /// Contents of the namespaces 1, 2 and so on.
    pub namespaces: Vec<Storage>,
    /// Faults, and the commands that they harm.
    pub faults: Vec<FaultRule>,
    /// Number of threads, 1 to 64. The queues are divided among them.
    pub threads: usize,
}

impl Emulation {
    /// Returns a controller with one namespace, 64 queue pairs of 4,096 entries, SGLs, transfers of 1 MiB, blocks of
    /// 512 bytes, one thread, and without faults.
    pub fn of(storage: Storage) -> Emulation {
        Emulation {
            serial: "EMULATED0".into(),
            queue_pairs: 64,
            entries_max: 4096,
            sgl: true,
            write_zeroes: true,
            transfer_max: Some(1 << 20),
            block_power: 9,
            namespaces: vec![storage],
            faults: Vec::new(),
            threads: 1,
        }
    }
}

/// Counters of an emulated controller.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EmulationCounters {
    /// Commands that it has taken from I/O queues.
    pub commands: u64,
    /// Faults that it has made, in the order of [`Emulation::faults`].
    pub faults: Vec<u64>,
    /// Accesses outside of mapped memory.
    pub bad_addresses: u64,
    /// Shutdowns that were requested and have ended.
    pub shutdowns: u64,
}

/// Parts that driver and controller share.
#[derive(Debug)]
struct Shared {
    registers: Span,
    space: AddressSpace,
    /// Event that was not reported yet; 0 for none.
    event: AtomicU32,
    /// A command of an I/O queue has run since the event was raised.
    event_is_due: AtomicBool,
    /// The threads that wait for a write.
    asleep: Vec<AtomicBool>,
    /// Registers may be written directly.
    direct: AtomicBool,
    ending: AtomicBool,
}

/// Maximum number of threads.
const THREADS_MAX: usize = 64;

/// An emulated controller: the driver's side of it. Its threads end when it is dropped.
#[derive(Debug)]
pub struct EmulatedController {
    shared: Arc<Shared>,
    registers: Arc<Region>,
    machine: Option<Arc<Machine>>,
    threads: Vec<JoinHandle<()>>,
    /// Dropped last: the right to use the contents of the namespaces.
    lock: Option<Box<dyn Any + Send + Sync>>,
}

impl EmulatedController {
    /// Starts a controller.
    ///
    /// # Errors
    /// `Memory` if its registers cannot be allocated or its threads not be started; `Invalid` for a setting outside
    /// its range.
    pub fn start(emulation: Emulation) -> Result<EmulatedController, NvmeError> {
        let queues = (1..QUEUES_MAX as u16).contains(&emulation.queue_pairs);
        let entries = (2..=65_536).contains(&emulation.entries_max);
        if !queues || !entries || !(9..=12).contains(&emulation.block_power) {
            let text = "1 to 1,023 queue pairs of 2 to 65,536 entries, blocks of 2⁹ to 2¹² bytes";
            return Err(NvmeError::Invalid(text.into()));
        }
        let threads = emulation.threads;
        if !(1..=THREADS_MAX).contains(&threads) {
            return Err(NvmeError::Invalid(format!("{threads} threads: expected 1 to {THREADS_MAX}")));
        }
        let bytes = REGISTER_BYTES as u64;
        let arena = Arena::new(&ArenaConfig { bytes, region_bytes: bytes, huge: HugePolicy::Never })?;
        let registers = Arc::clone(&arena.regions()[0]);
        let shared = Arc::new(Shared {
            registers: registers.span(0, bytes)?,
            space: AddressSpace::default(),
            event: AtomicU32::new(0),
            event_is_due: AtomicBool::new(false),
            asleep: (0..threads).map(|_| AtomicBool::new(false)).collect(),
            direct: AtomicBool::new(false),
            ending: AtomicBool::new(false),
        });
        let machine = Arc::new(Machine::new(Arc::clone(&shared), emulation));
        let mut controller = EmulatedController {
            shared,
            registers,
            machine: Some(Arc::clone(&machine)),
            threads: Vec::new(),
            lock: None,
        };
        for index in 0..threads {
            let machine = Arc::clone(&machine);
            let thread = std::thread::Builder::new().name(format!("emulated-nvme-{index}"));
            let thread = thread
                .spawn(move || machine.run(index))
                .map_err(|error| NvmeError::Invalid(format!("the thread cannot be started: {error}")))?;
            controller.threads.push(thread);
        }
        Ok(controller)
    }

    /// Keeps a value until the controller has ended, such as the lock of a namespace's file.
    #[must_use]
    pub fn keeping(mut self, lock: impl Any + Send + Sync) -> EmulatedController {
        self.lock = Some(Box::new(lock));
        self
    }

    /// Reports an asynchronous event to the driver with the next command that it runs, if one was requested.
    pub fn raise_event(&self, event: u32) {
        self.shared.event.store(event, Ordering::SeqCst);
    }

    /// Ends the controller; returns its counters, and the contents of its namespaces.
    pub fn stop(mut self) -> (EmulationCounters, Vec<Storage>) {
        self.end();
        let machine = self.machine.take().expect("it is taken once");
        Arc::into_inner(machine).expect("its threads have ended").into_parts()
    }

    fn end(&mut self) {
        self.shared.ending.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            if let Err(cause) = thread.join() {
                std::panic::resume_unwind(cause);
            }
        }
    }
}

impl Drop for EmulatedController {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.end();
        }
    }
}

impl Backing for EmulatedController {
    type Memory = EmulatedMemory;

    fn register_bytes(&self) -> usize {
        REGISTER_BYTES
    }

    fn read(&self, offset: usize) -> u32 {
        self.shared.registers.atomic_u32(offset).load(Ordering::Acquire)
    }

    fn write(&self, offset: usize, value: u32) {
        // Sequentially consistent, as the loads of a thread before it sleeps: one side sees the other.
        self.shared.registers.atomic_u32(offset).store(value, Ordering::SeqCst);
        // A queue has two doorbells of 4 bytes.
        let thread = match offset.checked_sub(offset::DOORBELLS) {
            Some(distance) => distance / 8 % self.shared.asleep.len(),
            None => 0,
        };
        if let Some(handle) = self.threads.get(thread)
            && self.shared.asleep[thread].load(Ordering::SeqCst)
        {
            handle.thread().unpark();
        }
    }

    fn allocate(&self, bytes: usize) -> Result<EmulatedMemory, NvmeError> {
        self.shared.space.allocate(bytes)
    }

    fn map_own_bar(&self, bar: u8, _offset: u64, _bytes: u64) -> Result<EmulatedMemory, NvmeError> {
        Err(NvmeError::Unsupported(format!("BAR {bar} of an emulated controller has no memory")))
    }

    fn map(&self, span: &Span) -> Result<DmaMapping, NvmeError> {
        let page = PAGE_BYTES as u64;
        if span.is_empty() || !(span.as_ptr().addr() as u64 | span.len() as u64).is_multiple_of(page) {
            return Err(NvmeError::Invalid(format!("{} bytes to map: expected whole pages", span.len())));
        }
        Ok(self.shared.space.map_until_dropped(span.clone()))
    }

    fn register_address(&self, offset: usize) -> Option<NonNull<u32>> {
        self.shared.direct.store(true, Ordering::SeqCst);
        NonNull::new(self.shared.registers.atomic_u32(offset).as_ptr())
    }

    fn register_file(&self) -> Option<RegisterFile<'_>> {
        self.shared.direct.store(true, Ordering::SeqCst);
        let file: BorrowedFd<'_> = self.registers.writable_fd();
        Some(RegisterFile { file, offset: 0, bytes: REGISTER_BYTES })
    }
}
