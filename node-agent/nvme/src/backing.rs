//! What a driver needs of a controller and of the machine: registers, and memory that the controller accesses.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use reprise_buffers::{Region, Span};

use crate::error::NvmeError;
use crate::spec::PAGE_BYTES;

/// Memory that the controller reads and writes, at a fixed address. It is zeroed at first.
///
/// Dropping it ends the access of the controller first, and then releases the memory: an access afterwards fails in the
/// IOMMU. A controller that does not stop therefore never writes to memory that has another use.
///
/// Memory may lie in this machine's memory, in a buffer of the controller, or in a BAR of another device.
pub trait DmaMemory: Send + Sync + Sized {
    /// Returns the address for the controller; a multiple of 4,096.
    fn address(&self) -> u64;

    /// Returns the size in bytes.
    fn bytes(&self) -> usize;

    /// Returns the aligned word of 8 bytes at an offset. Panics outside of the memory.
    fn word(&self, offset: usize) -> &AtomicU64;

    /// Returns the aligned word of 4 bytes at an offset. Panics outside of the memory.
    fn half_word(&self, offset: usize) -> &AtomicU32;

    /// Returns a part of the memory. The access of the controller to the whole ends when the memory and all parts of it
    /// are dropped.
    ///
    /// # Errors
    /// `Invalid` if the part is not inside, or if its offset is not a multiple of 4,096.
    fn part(&self, offset: usize, bytes: usize) -> Result<Self, NvmeError>;
}

/// Checks the range of a part of memory.
pub(crate) fn check_part(whole: usize, offset: usize, bytes: usize) -> Result<(), NvmeError> {
    let inside = offset.checked_add(bytes).is_some_and(|end| end <= whole);
    if inside && bytes > 0 && offset.is_multiple_of(PAGE_BYTES) {
        return Ok(());
    }
    Err(NvmeError::Invalid(format!(
        "{bytes} bytes at {offset} of a memory of {whole}: use a larger BAR or buffer, or fewer entries"
    )))
}

/// A controller as a driver sees it: a VFIO device, or the emulated controller.
pub trait Backing: Send + Sync + 'static {
    /// Memory of queues and of descriptions of data.
    type Memory: DmaMemory;

    /// Returns the size of the registers in bytes, doorbells included.
    fn register_bytes(&self) -> usize;

    /// Reads a register of BAR 0. All ones if the controller is gone.
    fn read(&self, offset: usize) -> u32;

    /// Writes a register of BAR 0. All earlier stores to DMA memory are visible to the controller before.
    fn write(&self, offset: usize, value: u32);

    /// Allocates memory that the controller may access until it is dropped.
    ///
    /// # Errors
    /// `Memory` if the machine has too little of it, or its limit of locked memory is too low.
    fn allocate(&self, bytes: usize) -> Result<Self::Memory, NvmeError>;

    /// Makes an arena region accessible for the controller until the result is dropped.
    ///
    /// # Errors
    /// As [`map`](Self::map).
    fn map_region(&self, region: &Region) -> Result<DmaMapping, NvmeError> {
        self.map(&region.span(0, region.bytes())?)
    }

    /// Maps a part of a BAR of the controller: its memory buffer. It gets an address that no other memory has, which
    /// the driver sets in the controller ([`Controller::memory_buffer`](crate::Controller::memory_buffer)).
    ///
    /// # Errors
    /// `Unsupported` if the backing has no such BAR.
    fn map_own_bar(&self, bar: u8, offset: u64, bytes: u64) -> Result<Self::Memory, NvmeError>;

    /// Makes memory accessible for the controller until the result is dropped: memory of queues that another
    /// processor drives, or of an engine. The span is whole pages.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate); `Unsupported` if the backing maps nothing but its own memory.
    fn map(&self, span: &Span) -> Result<DmaMapping, NvmeError> {
        Err(NvmeError::Unsupported(format!("its backing cannot map {} bytes of other memory", span.len())))
    }

    /// Returns the address of a register in this process, for processors that store to it without
    /// [`write`](Self::write): the doorbells of a raw queue pair. Valid while the backing lives. `None` if the
    /// registers are not mapped.
    fn register_address(&self, offset: usize) -> Option<NonNull<u32>> {
        let _ = offset;
        None
    }

    /// Returns the file behind the registers, for another process that maps them; `None` if the registers are not a file.
    fn register_file(&self) -> Option<RegisterFile<'_>> {
        None
    }
}

/// Registers as a part of a file.
#[derive(Clone, Copy, Debug)]
pub struct RegisterFile<'a> {
    /// The file.
    pub file: BorrowedFd<'a>,
    /// Offset of register 0 in the file, in bytes.
    pub offset: u64,
    /// Size of the registers in bytes.
    pub bytes: usize,
}

/// Memory of others that the controller may access. Dropping it ends the access before it returns.
pub struct DmaMapping {
    address: u64,
    bytes: u64,
    _release: Box<dyn Send + Sync>,
}

impl DmaMapping {
    /// Creates a mapping; dropping `release` ends it.
    pub fn new(address: u64, bytes: u64, release: Box<dyn Send + Sync>) -> DmaMapping {
        DmaMapping { address, bytes, _release: release }
    }

    /// Returns the address of the first byte for the controller.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl std::fmt::Debug for DmaMapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DmaMapping({:#x}, {} bytes)", self.address, self.bytes)
    }
}

/// Reads a register of 8 bytes, low half first (Base 2.0, 3.1.3).
pub(crate) fn read_u64(backing: &impl Backing, offset: usize) -> u64 {
    u64::from(backing.read(offset)) | u64::from(backing.read(offset + 4)) << 32
}

/// Writes a register of 8 bytes, low half first.
pub(crate) fn write_u64(backing: &impl Backing, offset: usize, value: u64) {
    backing.write(offset, value as u32);
    backing.write(offset + 4, (value >> 32) as u32);
}
