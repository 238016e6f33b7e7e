//! A client's mapping of a region that the agent handed it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use reprise_policy::ByteSize;

use crate::error::BufferError;
use crate::memory::{Access, Advice, Memory};
use crate::page_kind::{PageCoverage, measure};
use crate::span::Span;
use crate::sys;

/// A region as mapped by another process than the agent. Clones share the mapping; it goes with the last clone and
/// the last span.
#[derive(Clone, Debug)]
pub struct MappedRegion {
    memory: Arc<Memory>,
}

impl MappedRegion {
    /// Maps `bytes` bytes of a received descriptor, touching every page, at a multiple of 2 MiB so that huge pages
    /// stay huge. The descriptor is closed: the mapping lives without it.
    ///
    /// Errors: the file is shorter than `bytes`, or `access` is more than the descriptor allows.
    pub fn map(fd: OwnedFd, bytes: u64, access: Access) -> Result<MappedRegion, BufferError> {
        let there = sys::file_bytes(fd.as_fd())
            .map_err(|source| BufferError::system("asking for the size of a received region", source))?;
        if bytes == 0 || there < bytes {
            return Err(BufferError::Invalid(format!(
                "the descriptor of a region of {} is one of {}: client and agent disagree",
                ByteSize(bytes),
                ByteSize(there)
            )));
        }
        let failed = |source| BufferError::system(format!("mapping a region of {}", ByteSize(bytes)), source);
        let length = usize::try_from(bytes)
            .map_err(|_| BufferError::Invalid(format!("a region of {} cannot be mapped", ByteSize(bytes))))?;
        let memory = Memory::map(fd.as_fd(), length, access).map_err(failed)?;
        drop(fd); // the mapping lives without it
        // Only a wish: an old kernel then writes larger core dumps.
        let _ = memory.advise(0, length, Advice::DontDump);
        let populate = match access {
            Access::ReadOnly => Advice::PopulateRead,
            Access::ReadWrite => Advice::PopulateWrite,
        };
        memory.advise(0, length, populate).map_err(failed)?;
        Ok(MappedRegion { memory: Arc::new(memory) })
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }

    /// What this process may do with it.
    pub fn access(&self) -> Access {
        self.memory.access()
    }

    /// How much of this mapping is in which pages, measured now.
    pub fn coverage(&self) -> PageCoverage {
        let start = self.memory.as_ptr().addr();
        let addresses = start..start + self.memory.bytes();
        measure(std::slice::from_ref(&addresses))[0]
    }

    /// `bytes` bytes from `offset`; an error when they do not lie inside.
    pub fn span(&self, offset: u64, bytes: u64) -> Result<Span, BufferError> {
        Span::of(&self.memory, offset, bytes)
    }
}
