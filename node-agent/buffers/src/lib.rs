//! Memory of Reprise: arena regions in huge pages, spans of shared memory, checksummed copies, progress pages,
//! and passing descriptors between processes.
//!
//! Everything that one process maps and another may write at the same time is reached through [`Span`]: a
//! pointer, a length and the mapping that keeps them valid, never a `&[u8]`. Data leaves such memory by being
//! copied, and whoever needs it verified checks the copy ([`Span::copy_out_checked`]), so there is no moment
//! between check and use in which another process could change it.
//!
//! Invariants:
//! * Memory of a span stays mapped until the last clone of the span is gone (an I/O operation in flight holds one).
//! * A memfd made here never changes its size: an engine that holds the descriptor cannot make the agent fault.
//! * A descriptor handed out for reading cannot be mapped for writing.
//! * What is said about page sizes was measured on the mapping, not concluded from what was asked for.
//!
//! Deliberately absent: which slot belongs to whom (`reprise-agent-core`), I/O (`reprise-io`), CUDA or RDMA
//! registration, NUMA placement, and swap: nodes that serve inference run without it.
//!
//! Needs Linux 5.14 (`MADV_POPULATE_WRITE`); transparent huge pages need 6.1 (`MADV_COLLAPSE`).

mod arena;
mod checksum;
mod descriptors;
mod error;
mod kernel;
mod mapped;
mod meminfo;
mod memory;
mod page_buffer;
mod page_kind;
mod progress;
mod shared;
mod socket;
mod span;
mod sys;

pub use arena::{Arena, ArenaConfig, HugePolicy, REGION_BYTES_MAX, REGIONS_MAX, Region};
pub use checksum::{Crc32c, PIECE_BYTES, checksum_method, copy_checked, crc32c};
pub use descriptors::{
    DESCRIPTORS_MAX, PeerCredentials, peer_credentials, recv_with_fds, send_with_fds, try_send_with_fds,
};
pub use error::BufferError;
pub use mapped::MappedRegion;
pub use memory::Access;
pub use page_buffer::{PageBuffer, PageBufferPool};
pub use page_kind::{PageCoverage, PageKind};
pub use progress::{
    PROGRESS_BLOCKS_MAX, PROGRESS_BYTES, PROGRESS_ENTRIES, PROGRESS_ENTRY_BYTES, ProgressReader,
    ProgressWriter, WaitOutcome,
};
pub use shared::{FutexOutcome, SharedMemory};
pub use socket::{GATHER_MAX, Gather};
pub use span::Span;

/// Bytes of an ordinary page: the unit of offsets and lengths in I/O.
pub const PAGE_BYTES: usize = 4 << 10;

/// Bytes of a huge page on x86-64 and on aarch64 with 4 KiB granules.
pub const HUGE_PAGE_BYTES: usize = 2 << 20;
