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
//! * A memfd made here never changes its size: no access inside a mapping lies beyond the end of its file.
//! * A descriptor handed out for reading cannot be mapped for writing.
//! * What is said about page sizes was measured on the mapping, not concluded from what was asked for.
//!
//! **What an engine with a writable descriptor can do to the agent.** It can punch holes (`fallocate(2)`,
//! `FALLOC_FL_PUNCH_HOLE`), committed blocks included: the seals that would forbid it, `F_SEAL_WRITE` and
//! `F_SEAL_FUTURE_WRITE`, also forbid the writable mapping that it needs (fcntl(2)).
//! * Ordinary memory, transparent huge pages included: the agent's next access finds zeros in new pages. Checksums catch
//!   it like any other scribbling. Pages that io_uring had registered stay pinned and are no longer those of the mapping, so
//!   what a device reads into them fails verification until the agent restarts.
//! * Pages of the hugetlb pool: the hole gives page and reservation back, and the next access faults with SIGBUS when
//!   the pool has no other page. Such an engine can end the agent, though not read or forge a block: what was
//!   durable is there after the restart, every load in between is a miss. Where engines are not trusted that far, leave
//!   `vm.nr_hugepages` at 0 on the node: regions are then transparent huge pages.
//!
//! Catching the SIGBUS instead was rejected: every copy and checksum would have to be able to fail half-way, for
//! an attacker who gains nothing but a restart.
//!
//! Deliberately absent: which slot belongs to whom (`reprise-agent-core`), I/O (`reprise-io`), CUDA or RDMA
//! registration, NUMA placement, and swap: nodes that serve inference run without it.
//!
//! Needs Linux 5.14 (`MADV_POPULATE_WRITE`); transparent huge pages need 6.1 (`MADV_COLLAPSE`).

mod arena;
mod checksum;
mod descriptors;
mod error;
mod heap;
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
pub use heap::keep_large_allocations_apart;
pub use mapped::MappedRegion;
pub use meminfo::Meminfo;
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
