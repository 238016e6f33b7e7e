//! An NVMe controller in this process, for tests and for machines without one.
//!
//! It has registers, an address space, and a thread that acts as the controller: it reads entries and
//! lists from memory, moves data, and writes completions with phase bits. [`Emulation`] configures
//! its features and its [`Fault`]s.
//!
//! Not emulated: interrupts, several controllers of a subsystem, arbitration classes, end-to-end protection.

mod faults;
mod machine;
mod memory;
mod storage;
mod transfer;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;

use reprise_buffers::{Region, SharedMemory};

pub use faults::{Fault, FaultRule, Selection};
pub use memory::EmulatedMemory;
pub use storage::Storage;

use crate::backing::Backing;
use crate::error::NvmeError;
use crate::spec::offset;
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
}

impl Emulation {
    /// Returns a controller with one namespace, 64 queue pairs of 4,096 entries, SGLs, transfers of 1 MiB, blocks of
    /// 512 bytes, and without faults.
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
    registers: SharedMemory,
    space: AddressSpace,
    /// Event that was not reported yet; 0 for none.
    event: AtomicU32,
    /// The thread waits for a write.
    asleep: AtomicBool,
    ending: AtomicBool,
}

/// An emulated controller: the driver's side of it. Its thread ends when it is dropped.
#[derive(Debug)]
pub struct EmulatedController {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Machine>>,
}

impl EmulatedController {
    /// Starts a controller.
    ///
    /// # Errors
    /// `Memory` if its registers cannot be allocated or its thread not be started; `Invalid` for a setting outside
    /// its range.
    pub fn start(emulation: Emulation) -> Result<EmulatedController, NvmeError> {
        let queues = (1..QUEUES_MAX as u16).contains(&emulation.queue_pairs);
        let entries = (2..=65_536).contains(&emulation.entries_max);
        if !queues || !entries || !(9..=12).contains(&emulation.block_power) {
            let text = "1 to 1,023 queue pairs of 2 to 65,536 entries, blocks of 2⁹ to 2¹² bytes";
            return Err(NvmeError::Invalid(text.into()));
        }
        let shared = Arc::new(Shared {
            registers: SharedMemory::create(REGISTER_BYTES)?,
            space: AddressSpace::default(),
            event: AtomicU32::new(0),
            asleep: AtomicBool::new(false),
            ending: AtomicBool::new(false),
        });
        let machine = Machine::new(Arc::clone(&shared), emulation);
        let thread = std::thread::Builder::new().name("emulated-nvme".into());
        let thread = thread
            .spawn(move || machine.run())
            .map_err(|error| NvmeError::Invalid(format!("the thread cannot be started: {error}")))?;
        Ok(EmulatedController { shared, thread: Some(thread) })
    }

    /// Reports an asynchronous event to the driver with the next command that it runs, if one was requested.
    pub fn raise_event(&self, event: u32) {
        self.shared.event.store(event, Ordering::SeqCst);
    }

    /// Ends the controller; returns its counters, and the contents of its namespaces.
    pub fn stop(mut self) -> (EmulationCounters, Vec<Storage>) {
        let machine = self.end().expect("the thread runs until now");
        machine.into_parts()
    }

    fn end(&mut self) -> Option<Machine> {
        let thread = self.thread.take()?;
        self.shared.ending.store(true, Ordering::SeqCst);
        thread.thread().unpark();
        match thread.join() {
            Ok(machine) => Some(machine),
            Err(cause) => std::panic::resume_unwind(cause),
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
        // Sequentially consistent, as the loads of the thread before it sleeps: one side sees the other.
        self.shared.registers.atomic_u32(offset).store(value, Ordering::SeqCst);
        if let Some(thread) = &self.thread
            && self.shared.asleep.load(Ordering::SeqCst)
        {
            thread.thread().unpark();
        }
    }

    fn allocate(&self, bytes: usize) -> Result<EmulatedMemory, NvmeError> {
        self.shared.space.allocate(bytes)
    }

    fn map_region(&self, region: &Region) -> Result<u64, NvmeError> {
        Ok(self.shared.space.map(region.span(0, region.bytes())?))
    }

    fn map_own_bar(&self, bar: u8, _offset: u64, _bytes: u64) -> Result<EmulatedMemory, NvmeError> {
        Err(NvmeError::Unsupported(format!("BAR {bar} of an emulated controller has no memory")))
    }
}
