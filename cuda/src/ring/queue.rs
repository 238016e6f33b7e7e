//! A queue pair as a ring drives it, and its owner.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use reprise_buffers::{PAGE_BYTES, Span};
use reprise_nvme::spec::{CQE_BYTES, SQE_BYTES};
use reprise_nvme::{Backing, Controller, DataFormat, DmaMapping, NvmeError, QueueAddresses, RawQueuePair};

use crate::ring::memory::Keep;
use crate::ring::{RingError, RingMemory};

/// Geometry of a queue pair and limits of its commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueShape {
    /// Number of the queue at its controller.
    pub id: u16,
    /// Number of entries, 2 to 4,096; one stays empty.
    pub entries: u32,
    /// How commands describe their memory.
    pub format: DataFormat,
    /// Maximum size of one command in bytes, a multiple of 4,096. Longer transfers are split.
    pub transfer_max: u32,
    /// Size of a logical block in bytes, a power of two from 512 to 4,096.
    pub block_bytes: u32,
}

impl QueueShape {
    /// Returns the size of the memory of a queue pair in bytes: submissions, completions, and for PRP a page of list for
    /// each slot. Each part is whole pages.
    pub fn memory_bytes(entries: u32, format: DataFormat) -> usize {
        let queues = QueueShape::lists_offset(entries);
        match format {
            DataFormat::Sgl => queues,
            DataFormat::Prp => queues + (entries as usize - 1) * PAGE_BYTES,
        }
    }

    /// Returns the offset of the completion queue in the memory of a queue pair.
    pub fn completions_offset(entries: u32) -> usize {
        (entries as usize * SQE_BYTES).next_multiple_of(PAGE_BYTES)
    }

    fn lists_offset(entries: u32) -> usize {
        let completions = (entries as usize * CQE_BYTES).next_multiple_of(PAGE_BYTES);
        QueueShape::completions_offset(entries) + completions
    }

    pub(super) fn check(&self) -> Result<(), RingError> {
        let valid = (2..=4096).contains(&self.entries)
            && self.transfer_max > 0
            && (self.transfer_max as usize).is_multiple_of(PAGE_BYTES)
            && u64::from(self.transfer_max) <= DataFormat::BYTES_MAX
            && self.block_bytes.is_power_of_two()
            && (512..=4096).contains(&self.block_bytes);
        if valid { Ok(()) } else { Err(RingError::Invalid(format!("a queue pair of {self:?}"))) }
    }
}

/// Doorbells as the ring's processor stores to them.
#[derive(Clone, Debug)]
pub struct Doorbells {
    pub(super) submission: u64,
    pub(super) completion: u64,
    /// Addresses of registers that the processor reaches; `None` if the backing knows.
    registers: Option<Range<u64>>,
    _keep: Arc<dyn Keep>,
}

impl Doorbells {
    /// Uses the registers of a controller, mapped by this process: `registers` starts with register 0.
    ///
    /// # Errors
    /// `Invalid` if a doorbell lies outside.
    pub fn mapped(registers: &Span, submission: usize, completion: usize) -> Result<Doorbells, RingError> {
        let address = |offset: usize| match registers.slice(offset, 4) {
            Ok(word) if word.is_writable() && offset.is_multiple_of(4) => Ok(word.as_ptr().addr() as u64),
            _ => Err(RingError::Invalid(format!("a doorbell at {offset} of {} bytes", registers.len()))),
        };
        let (submission, completion) = (address(submission)?, address(completion)?);
        let start = registers.as_ptr().addr() as u64;
        let range = start..start + registers.len() as u64;
        Ok(Doorbells { submission, completion, registers: Some(range), _keep: Arc::new(registers.clone()) })
    }

    /// Uses addresses of doorbells for the ring's processor, as long as `keep` lives. `registers` are the addresses at
    /// which it reaches doorbells of the controller.
    ///
    /// # Safety
    /// The processor that runs the ring may store words of 4 bytes to both, and to multiples of 4 in `registers`.
    pub unsafe fn of_processor(
        (submission, completion): (u64, u64),
        registers: Range<u64>,
        keep: Arc<dyn Keep>,
    ) -> Doorbells {
        Doorbells { submission, completion, registers: Some(registers), _keep: keep }
    }

    /// Returns the doorbells at a distance in bytes: those of another queue of the controller.
    ///
    /// # Errors
    /// `Invalid` if one lies outside of the registers that the processor reaches.
    pub(super) fn moved(&self, by: i64) -> Result<Doorbells, RingError> {
        let moved = |address: u64| {
            let to = address.checked_add_signed(by).filter(|to| by % 4 == 0 && to.checked_add(4).is_some());
            to.filter(|to| {
                self.registers.as_ref().is_none_or(|all| all.start <= *to && *to + 4 <= all.end)
            })
            .ok_or_else(|| RingError::Invalid(format!("a doorbell {by} bytes from {address:#x}, outside of the registers that the processor reaches")))
        };
        let (submission, completion) = (moved(self.submission)?, moved(self.completion)?);
        Ok(Doorbells {
            submission,
            completion,
            registers: self.registers.clone(),
            _keep: Arc::clone(&self._keep),
        })
    }
}

/// A queue pair for a ring: memory, doorbells and shape.
#[derive(Clone, Debug)]
pub struct RingQueue {
    pub(super) shape: QueueShape,
    pub(super) memory: RingMemory,
    /// Address of the memory for the controller.
    pub(super) controller: u64,
    pub(super) doorbells: Doorbells,
}

impl RingQueue {
    /// Describes a queue pair whose memory has [`QueueShape::memory_bytes`] bytes, and starts at `controller` for the
    /// controller.
    ///
    /// # Errors
    /// `Invalid` for a shape outside its range or memory that is too small.
    pub fn new(
        shape: QueueShape,
        memory: RingMemory,
        controller: u64,
        doorbells: Doorbells,
    ) -> Result<RingQueue, RingError> {
        shape.check()?;
        let needed = QueueShape::memory_bytes(shape.entries, shape.format);
        if memory.bytes() < needed {
            return Err(RingError::Invalid(format!(
                "memory of {} bytes for a queue pair: expected {needed}",
                memory.bytes()
            )));
        }
        Ok(RingQueue { shape, memory, controller, doorbells })
    }

    /// Returns the shape of the queue pair.
    pub fn shape(&self) -> QueueShape {
        self.shape
    }

    pub(super) fn lists(&self) -> (u64, u64) {
        let at = QueueShape::lists_offset(self.shape.entries) as u64;
        match self.shape.format {
            DataFormat::Sgl => (0, 0),
            DataFormat::Prp => (self.memory.processor_address() + at, self.controller + at),
        }
    }
}

/// A queue pair that this process has created. The owner of the controller keeps it; a ring drives it. It must be
/// [deleted](Self::delete) before the controller is dropped, or its number stays in use.
#[derive(Debug)]
pub struct OwnedQueue<B: Backing> {
    pair: Pair,
    /// Offsets of the doorbells in BAR 0.
    doorbells: (usize, usize),
    shape: QueueShape,
    memory: RingMemory,
    mapping: DmaMapping,
    backing: Arc<B>,
}

/// State of a queue pair at its controller.
#[derive(Debug)]
enum Pair {
    /// It exists.
    Live(RawQueuePair),
    /// It does not exist.
    Deleted,
    /// Its deletion was not confirmed: only a reset ends it.
    Unknown,
}

/// Registers of a backing stay mapped while it lives.
struct KeepBacking<B: Backing>(#[allow(dead_code, reason = "kept for its drop")] Arc<B>);

impl<B: Backing> std::fmt::Debug for KeepBacking<B> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("KeepBacking")
    }
}

impl<B: Backing> OwnedQueue<B> {
    /// Creates a queue pair in memory of the caller, for blocks of `block_bytes` bytes.
    ///
    /// # Errors
    /// `Nvme` if the memory cannot be mapped or the controller rejects the queue pair; `Invalid` for memory that is too
    /// small or a shape outside its range.
    pub fn create(
        controller: &mut Controller<B>,
        memory: RingMemory,
        entries: u32,
        block_bytes: u32,
    ) -> Result<OwnedQueue<B>, RingError> {
        let format = controller.data_format();
        let needed = QueueShape::memory_bytes(entries.max(2), format);
        if memory.bytes() < needed {
            return Err(RingError::Invalid(format!(
                "memory of {} bytes for {entries} entries: expected {needed}",
                memory.bytes()
            )));
        }
        let transfer_max = controller.transfer_max() as u32;
        let shape = QueueShape { id: 0, entries, format, transfer_max, block_bytes };
        shape.check()?;
        let backing = Arc::clone(controller.backing());
        let mapping = backing.map(memory.span())?;
        let raw = create(controller, &memory, &mapping, entries)?;
        let shape = QueueShape { id: raw.id(), ..shape };
        let doorbells = (raw.submission_doorbell(), raw.completion_doorbell());
        Ok(OwnedQueue { pair: Pair::Live(raw), doorbells, shape, memory, mapping, backing })
    }

    /// Returns the shape of the queue pair.
    pub fn shape(&self) -> QueueShape {
        self.shape
    }

    /// Returns the offsets of the tail doorbell of the submissions and the head doorbell of the completions in BAR 0.
    pub fn doorbell_offsets(&self) -> (usize, usize) {
        self.doorbells
    }

    /// Returns the address of the memory for the controller.
    pub fn controller_address(&self) -> u64 {
        self.mapping.address()
    }

    /// Returns the queue pair for a ring of the host build in this process.
    ///
    /// # Errors
    /// `Invalid` if the registers of the backing are not mapped.
    pub fn for_host(&self) -> Result<RingQueue, RingError> {
        let address = |offset: usize| {
            let register: Option<NonNull<u32>> = self.backing.register_address(offset);
            register.map(|register| register.addr().get() as u64).ok_or_else(|| {
                RingError::Invalid("registers that are not mapped: use the driver's own queue pairs".into())
            })
        };
        let (submission, completion) = (address(self.doorbells.0)?, address(self.doorbells.1)?);
        let keep = Arc::new(KeepBacking(Arc::clone(&self.backing)));
        // `Backing::register_address` returns addresses of registers that stay valid while the backing lives, and
        // doorbells may be written at any time. `recreate` asks it about moved ones.
        let doorbells = Doorbells { submission, completion, registers: None, _keep: keep };
        self.with_doorbells(doorbells)
    }

    /// Returns the queue pair for a ring whose processor has its own addresses of the doorbells.
    ///
    /// # Errors
    /// As [`RingQueue::new`].
    pub fn with_doorbells(&self, doorbells: Doorbells) -> Result<RingQueue, RingError> {
        RingQueue::new(self.shape, self.memory.clone(), self.mapping.address(), doorbells)
    }

    /// Deletes the queue pair and creates it again in the same memory. No ring may drive it meanwhile. Its number may
    /// change. Afterwards the controller no longer accesses memory of the commands that it had.
    ///
    /// # Errors
    /// If the controller does not confirm, it may still access the queue pair and memory of its commands: both stay mapped
    /// while this value lives, and must live until a reset. If only the creation fails, another call tries it again.
    pub fn recreate(&mut self, controller: &mut Controller<B>) -> Result<(), RingError> {
        self.end(controller)?;
        let raw = create(controller, &self.memory, &self.mapping, self.shape.entries)?;
        self.shape.id = raw.id();
        self.doorbells = (raw.submission_doorbell(), raw.completion_doorbell());
        self.pair = Pair::Live(raw);
        let is_mapped = |offset: usize| self.backing.register_address(offset).is_some();
        if is_mapped(0) && !(is_mapped(self.doorbells.0) && is_mapped(self.doorbells.1)) {
            return Err(outside(self.doorbells));
        }
        Ok(())
    }

    /// Deletes the queue pair, and returns its memory. No ring may drive it.
    ///
    /// # Errors
    /// If the controller does not confirm: as [`recreate`](Self::recreate).
    pub fn delete(&mut self, controller: &mut Controller<B>) -> Result<RingMemory, RingError> {
        self.end(controller)?;
        Ok(self.memory.clone())
    }

    fn end(&mut self, controller: &mut Controller<B>) -> Result<(), RingError> {
        match std::mem::replace(&mut self.pair, Pair::Unknown) {
            Pair::Live(raw) => controller.delete_raw_queue_pair(raw)?,
            Pair::Deleted => {}
            Pair::Unknown => {
                return Err(RingError::Invalid(format!(
                    "queue pair {} whose end the controller has not confirmed: reset the controller first",
                    self.shape.id
                )));
            }
        }
        self.pair = Pair::Deleted;
        Ok(())
    }
}

fn outside(offsets: (usize, usize)) -> RingError {
    RingError::Invalid(format!("doorbells at {offsets:?} outside of the mapped registers"))
}

fn create<B: Backing>(
    controller: &mut Controller<B>,
    memory: &RingMemory,
    mapping: &DmaMapping,
    entries: u32,
) -> Result<RawQueuePair, NvmeError> {
    let offset = QueueShape::completions_offset(entries);
    // The first pass of the controller sets phase bits, so all of them must be 0.
    memory.zero(offset, entries as usize * CQE_BYTES);
    std::sync::atomic::fence(Ordering::Release);
    let submissions = mapping.address();
    controller.create_raw_queue_pair(
        entries,
        QueueAddresses { submissions, completions: submissions + offset as u64 },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doorbells_move_inside_of_the_registers_only() {
        let memory = RingMemory::allocate(2 * PAGE_BYTES).expect("two pages");
        let doorbells = Doorbells::mapped(memory.span(), 4096, 4100).expect("inside");
        let last = doorbells.moved(4088).expect("the last words");
        assert_eq!(last.completion + 4, memory.processor_address() + 2 * PAGE_BYTES as u64);
        assert_eq!(doorbells.moved(-4096).expect("the first words").submission, memory.processor_address());
        for by in [4092, 4096, -4100, 2, i64::MAX, i64::MIN] {
            let error = doorbells.moved(by).expect_err("outside");
            assert!(error.to_string().contains("outside of the registers"), "{by}: {error}");
        }
    }
}
