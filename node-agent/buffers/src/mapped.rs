//! Mappings of memory that two processes share: of a region that the agent granted, or of memory that an engine
//! registered.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use reprise_policy::ByteSize;

use crate::error::BufferError;
use crate::meminfo::check_available;
use crate::memory::{Access, Advice, Memory};
use crate::page_kind::{PageCoverage, measure};
use crate::span::Span;
use crate::sys;

/// A region mapped by a process other than the agent. Clones share the mapping; it ends with the last clone
/// and the last span.
#[derive(Clone, Debug)]
pub struct MappedRegion {
    memory: Arc<Memory>,
}

impl MappedRegion {
    /// Maps `bytes` bytes of a received descriptor and touches every page. The address is a multiple of 2
    /// MiB, so that huge pages stay huge. The descriptor is closed: the mapping does not need it.
    ///
    /// Errors: the file is shorter than `bytes`, or the descriptor does not allow `access`.
    pub fn map(fd: OwnedFd, bytes: u64, access: Access) -> Result<MappedRegion, BufferError> {
        let there = sys::file_bytes(fd.as_fd())
            .map_err(|source| BufferError::system("read the size of a received region", source))?;
        if bytes == 0 || there < bytes {
            return Err(BufferError::Invalid(format!(
                "invalid descriptor for a region of {}: the file has {}, client and agent disagree",
                ByteSize(bytes),
                ByteSize(there)
            )));
        }
        let failed = |source| BufferError::system(format!("map a region of {}", ByteSize(bytes)), source);
        let length = usize::try_from(bytes).map_err(|_| {
            BufferError::Invalid(format!("invalid region of {}: too large for this process", ByteSize(bytes)))
        })?;
        let memory = Memory::map(fd.as_fd(), length, access).map_err(failed)?;
        drop(fd); // the mapping does not need it
        // Best effort: an old kernel then writes larger core dumps.
        let _ = memory.advise(0, length, Advice::DontDump);
        let populate = match access {
            Access::ReadOnly => Advice::PopulateRead,
            Access::ReadWrite => Advice::PopulateWrite,
        };
        memory.advise(0, length, populate).map_err(failed)?;
        Ok(MappedRegion { memory: Arc::new(memory) })
    }

    /// Maps the first `bytes` bytes of a BAR: a file of sysfs. Its pages are not memory of this machine, so none is
    /// touched.
    ///
    /// Errors: the file is shorter than `bytes`, or cannot be mapped.
    pub fn of_bar(fd: BorrowedFd<'_>, bytes: u64) -> Result<MappedRegion, BufferError> {
        let failed = |source| BufferError::system(format!("map {} of a BAR", ByteSize(bytes)), source);
        let there = sys::file_bytes(fd).map_err(failed)?;
        let length = usize::try_from(bytes).unwrap_or(usize::MAX);
        if bytes == 0 || there < bytes {
            return Err(BufferError::Invalid(format!(
                "a BAR of {} where {} are needed: enable large BARs (Resizable BAR, Above 4G Decoding) in the firmware",
                ByteSize(there),
                ByteSize(bytes)
            )));
        }
        let memory = Memory::map(fd, length, Access::ReadWrite).map_err(failed)?;
        Ok(MappedRegion { memory: Arc::new(memory) })
    }

    /// Allocates `bytes` zero bytes that can be registered with an agent, and touches every page; returns their
    /// descriptor too. The file is sealed against changes of its size.
    ///
    /// Errors: more than the memory of machine and control group, whose limit would end the process otherwise.
    pub fn allocate(bytes: u64) -> Result<(MappedRegion, OwnedFd), BufferError> {
        check_available(bytes)?;
        let failed = |source| BufferError::system(format!("allocate {}", ByteSize(bytes)), source);
        let fd = sys::sealed_memfd(c"reprise-engine", bytes, 0).map_err(failed)?;
        let copy = fd.try_clone().map_err(failed)?;
        Ok((MappedRegion::map(copy, bytes, Access::ReadWrite)?, fd))
    }

    /// Maps memory that another process has created, which may be malicious: the file must be sealed against
    /// shrinking.
    ///
    /// Errors: the file is shorter than `bytes`, is not sealed or not allocated as a whole, has pages of the hugetlb pool,
    /// or cannot be mapped for writing.
    pub fn map_sealed(fd: OwnedFd, bytes: u64) -> Result<MappedRegion, BufferError> {
        sys::check_sealed(fd.as_fd(), bytes)?;
        MappedRegion::map(fd, bytes, Access::ReadWrite)
    }

    /// Returns the region's size in bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }

    /// Returns this process's access to the region.
    pub fn access(&self) -> Access {
        self.memory.access()
    }

    /// Measures the page sizes of this mapping.
    pub fn coverage(&self) -> PageCoverage {
        let start = self.memory.as_ptr().addr();
        let addresses = start..start + self.memory.bytes();
        measure(std::slice::from_ref(&addresses))[0]
    }

    /// Returns `bytes` bytes from `offset`; an error if the range lies outside.
    pub fn span(&self, offset: u64, bytes: u64) -> Result<Span, BufferError> {
        Span::of(&self.memory, offset, bytes)
    }
}
