//! Memory of rings and queues: as this process accesses it, and as the ring's processor does.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use reprise_buffers::{Arena, ArenaConfig, HugePolicy, PAGE_BYTES, Span};

use crate::ring::RingError;

/// Memory that this process and the ring's processor access. Clones share it.
#[derive(Clone, Debug)]
pub struct RingMemory {
    span: Span,
    processor: u64,
    /// What keeps the address of another processor valid, besides the span; `None` for this process.
    keep: Option<Arc<dyn Keep>>,
}

/// Memory that only the ring's processor accesses.
#[derive(Clone, Debug)]
pub struct WorkMemory {
    address: u64,
    bytes: usize,
    /// This process reaches it at the same address.
    is_host: bool,
    _keep: Arc<dyn Keep>,
}

/// Anything that memory depends on.
pub trait Keep: Any + Send + Sync + std::fmt::Debug {}

impl<T: Any + Send + Sync + std::fmt::Debug> Keep for T {}

impl RingMemory {
    /// Allocates zeroed memory for the host build, of at least `bytes` bytes.
    ///
    /// # Errors
    /// `Memory` if the machine has too little.
    pub fn allocate(bytes: usize) -> Result<RingMemory, RingError> {
        let bytes = bytes.next_multiple_of(PAGE_BYTES) as u64;
        let arena = Arena::new(&ArenaConfig { bytes, region_bytes: bytes, huge: HugePolicy::Never })?;
        RingMemory::host(arena.span(0, 0, bytes)?)
    }

    /// Uses memory of this process for the host build.
    ///
    /// # Errors
    /// `Invalid` unless the span is writable whole pages.
    pub fn host(span: Span) -> Result<RingMemory, RingError> {
        let processor = span.as_ptr().addr() as u64;
        check(&span)?;
        Ok(RingMemory { span, processor, keep: None })
    }

    /// Uses memory that another processor accesses at `processor`, as long as `keep` lives.
    ///
    /// # Errors
    /// `Invalid` unless the span is writable whole pages.
    ///
    /// # Safety
    /// The processor that runs the ring must reach the bytes of the span from `processor` on.
    pub unsafe fn of_processor(
        span: Span,
        processor: u64,
        keep: Arc<dyn Keep>,
    ) -> Result<RingMemory, RingError> {
        check(&span)?;
        Ok(RingMemory { span, processor, keep: Some(keep) })
    }

    /// Returns the memory as a span.
    pub fn span(&self) -> &Span {
        &self.span
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.span.len()
    }

    /// Returns the address for the ring's processor.
    pub fn processor_address(&self) -> u64 {
        self.processor
    }

    /// Reports whether threads of this process can be the ring's processor.
    pub(super) fn is_host(&self) -> bool {
        self.keep.is_none()
    }

    /// Fills a range of whole double words with zeros.
    pub(super) fn zero(&self, offset: usize, bytes: usize) {
        for at in (offset..offset + bytes).step_by(8) {
            self.double(at).store(0, Ordering::Relaxed);
        }
    }

    pub(super) fn word(&self, offset: usize) -> &AtomicU32 {
        self.span.atomic_u32(offset)
    }

    pub(super) fn double(&self, offset: usize) -> &AtomicU64 {
        self.span.atomic_u64(offset)
    }

    pub(super) fn load(&self, offset: usize) -> u32 {
        self.word(offset).load(Ordering::Acquire)
    }

    pub(super) fn set(&self, offset: usize, value: u32) {
        self.word(offset).store(value, Ordering::Relaxed);
    }

    pub(super) fn set_double(&self, offset: usize, value: u64) {
        self.double(offset).store(value, Ordering::Relaxed);
    }
}

impl WorkMemory {
    /// Allocates memory for the host build.
    ///
    /// # Errors
    /// `Memory` if the machine has too little.
    pub fn allocate(bytes: usize) -> Result<WorkMemory, RingError> {
        let memory = RingMemory::allocate(bytes)?;
        Ok(WorkMemory {
            address: memory.processor,
            bytes: memory.bytes(),
            is_host: true,
            _keep: Arc::new(memory),
        })
    }

    /// Uses memory of another processor, as long as `keep` lives.
    ///
    /// # Safety
    /// The processor that runs the ring must reach `bytes` bytes from `address`, a multiple of 128, and no other
    /// software uses them.
    pub unsafe fn of_processor(address: u64, bytes: usize, keep: Arc<dyn Keep>) -> WorkMemory {
        WorkMemory { address, bytes, is_host: false, _keep: keep }
    }

    /// Returns the size in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// Reports whether threads of this process can be the ring's processor.
    pub(super) fn is_host(&self) -> bool {
        self.is_host
    }
}

fn check(span: &Span) -> Result<(), RingError> {
    let whole = span.as_ptr().addr().is_multiple_of(PAGE_BYTES) && span.len().is_multiple_of(PAGE_BYTES);
    if whole && span.is_writable() && !span.is_empty() {
        return Ok(());
    }
    Err(RingError::Invalid(format!("memory of {} bytes: expected whole writable pages", span.len())))
}
