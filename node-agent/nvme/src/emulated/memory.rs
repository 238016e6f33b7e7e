//! The address space of an emulated controller, as an IOMMU provides it to a real one.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};

use reprise_buffers::{SharedMemory, Span, check_available};

use crate::backing::{DmaMapping, DmaMemory, check_part};
use crate::error::NvmeError;
use crate::spec::PAGE_BYTES;

/// First address; lower ones are never mapped.
const FIRST: u64 = 0x1000_0000;
/// Distance of two mappings at least, so that an overrun does not reach the next one.
const GAP: u64 = 1 << 21;

/// Memory that is mapped at an address.
#[derive(Clone, Debug)]
pub(super) enum Mapping {
    /// Memory of queues and lists.
    Words(Arc<SharedMemory>),
    /// Memory of data.
    Span(Span),
}

impl Mapping {
    fn bytes(&self) -> u64 {
        match self {
            Mapping::Words(memory) => memory.len() as u64,
            Mapping::Span(span) => span.len() as u64,
        }
    }

    /// Returns a word at an offset that was resolved.
    pub(super) fn half_word(&self, at: usize) -> &AtomicU32 {
        match self {
            Mapping::Words(memory) => memory.atomic_u32(at),
            Mapping::Span(span) => span.atomic_u32(at),
        }
    }

    /// Returns a double word at an offset that was resolved.
    pub(super) fn word(&self, at: usize) -> &AtomicU64 {
        match self {
            Mapping::Words(memory) => memory.atomic_u64(at),
            Mapping::Span(span) => span.atomic_u64(at),
        }
    }

    /// Reports whether queues can lie here: it is written as words.
    pub(super) fn is_writable(&self) -> bool {
        match self {
            Mapping::Words(_) => true,
            Mapping::Span(span) => span.is_writable(),
        }
    }
}

/// Ends a mapping when it is dropped.
struct Unmap {
    address: u64,
    state: Arc<RwLock<Mappings>>,
}

impl Drop for Unmap {
    fn drop(&mut self) {
        self.state.write().unwrap_or_else(PoisonError::into_inner).remove(&self.address);
    }
}

/// The mappings by address.
pub(super) type Mappings = BTreeMap<u64, Mapping>;

/// All mappings of a controller.
#[derive(Debug, Default)]
pub(super) struct AddressSpace {
    state: Arc<RwLock<Mappings>>,
    /// Address of the next mapping, as an offset from [`FIRST`].
    next: AtomicU64,
}

impl AddressSpace {
    /// Allocates memory that is mapped until it is dropped.
    pub(super) fn allocate(&self, bytes: usize) -> Result<EmulatedMemory, NvmeError> {
        check_available(bytes as u64)?;
        let memory = Arc::new(SharedMemory::create(bytes.next_multiple_of(PAGE_BYTES))?);
        let address = self.add(Mapping::Words(Arc::clone(&memory)));
        let bytes = memory.len();
        let block = Arc::new(Block { memory, address, state: Arc::clone(&self.state) });
        Ok(EmulatedMemory { block, offset: 0, bytes })
    }

    /// Maps a span until the result is dropped.
    pub(super) fn map_until_dropped(&self, span: Span) -> DmaMapping {
        let bytes = span.len() as u64;
        let address = self.add(Mapping::Span(span));
        DmaMapping::new(address, bytes, Box::new(Unmap { address, state: Arc::clone(&self.state) }))
    }

    fn add(&self, mapping: Mapping) -> u64 {
        let distance = mapping.bytes().next_multiple_of(GAP) + GAP;
        let address = FIRST + self.next.fetch_add(distance, Ordering::Relaxed);
        self.state.write().unwrap_or_else(PoisonError::into_inner).insert(address, mapping);
        address
    }

    pub(super) fn read(&self) -> RwLockReadGuard<'_, Mappings> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the mapping of a range, and the offset in it; `None` if a part of the range is not mapped.
pub(super) fn resolve(mappings: &Mappings, address: u64, bytes: u64) -> Option<(&Mapping, usize)> {
    let (base, mapping) = mappings.range(..=address).next_back()?;
    let offset = address - base;
    let end = offset.checked_add(bytes)?;
    (end <= mapping.bytes()).then_some((mapping, offset as usize))
}

/// Reads whole words; false if they are not mapped or not aligned.
pub(super) fn read_words(mappings: &Mappings, address: u64, into: &mut [u64]) -> bool {
    let bytes = size_of_val(into) as u64;
    if !address.is_multiple_of(8) {
        return false;
    }
    match resolve(mappings, address, bytes) {
        Some((memory, at)) if memory.is_writable() => {
            for (index, word) in into.iter_mut().enumerate() {
                *word = u64::from_le(memory.word(at + 8 * index).load(Ordering::Relaxed));
            }
            true
        }
        // A list in memory that this process may only read.
        Some((Mapping::Span(span), at)) => {
            let mut copy = vec![0; bytes as usize];
            if span.read_at(at, &mut copy).is_err() {
                return false;
            }
            for (word, bytes) in into.iter_mut().zip(copy.chunks_exact(8)) {
                *word = crate::spec::le!(bytes, 0, u64);
            }
            true
        }
        _ => false,
    }
}

/// Memory that an emulated controller accesses.
#[derive(Debug)]
pub struct EmulatedMemory {
    block: Arc<Block>,
    offset: usize,
    bytes: usize,
}

/// Mapped memory, which parts share.
#[derive(Debug)]
struct Block {
    memory: Arc<SharedMemory>,
    address: u64,
    state: Arc<RwLock<Mappings>>,
}

impl EmulatedMemory {
    /// Returns the offset in the block of a word at an offset of this memory.
    fn at(&self, offset: usize, size: usize) -> usize {
        assert!(offset + size <= self.bytes, "a word at {offset} of {}", self.bytes);
        self.offset + offset
    }
}

impl DmaMemory for EmulatedMemory {
    fn address(&self) -> u64 {
        self.block.address + self.offset as u64
    }

    fn bytes(&self) -> usize {
        self.bytes
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        self.block.memory.atomic_u64(self.at(offset, 8))
    }

    fn half_word(&self, offset: usize) -> &AtomicU32 {
        self.block.memory.atomic_u32(self.at(offset, 4))
    }

    fn part(&self, offset: usize, bytes: usize) -> Result<EmulatedMemory, NvmeError> {
        check_part(self.bytes, offset, bytes)?;
        Ok(EmulatedMemory { block: Arc::clone(&self.block), offset: self.offset + offset, bytes })
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.state.write().unwrap_or_else(PoisonError::into_inner).remove(&self.address);
    }
}
