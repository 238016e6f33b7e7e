//! Shared memory of Reprise: arena regions in huge pages, spans, checksummed copies, progress pages, and
//! descriptor passing.
//!
//! Memory that one process maps and another may write at the same time is only reached through [`Span`]: a
//! pointer, a length and the mapping that keeps them valid, never a `&[u8]`. Data leaves such memory by a
//! copy, and verification checks the copy ([`Span::copy_out_checked`]). No other process can therefore change
//! the data between check and use.
//!
//! Invariants:
//! * The memory of a span stays mapped until its last clone is dropped (an I/O operation in flight holds
//!   one).
//! * A memfd created here never changes its size: no access inside a mapping lies beyond the end of its file.
//! * A descriptor granted for reading cannot be mapped for writing.
//! * Reported page sizes are measured on the mapping, not derived from the request.
//!
//! **Effects of an engine with a writable descriptor on the agent.** The engine can punch holes
//! (`fallocate(2)`, `FALLOC_FL_PUNCH_HOLE`), also into committed blocks. The seals that would prevent this,
//! `F_SEAL_WRITE` and `F_SEAL_FUTURE_WRITE`, also prevent the required writable mapping (fcntl(2)).
//!
//! * Ordinary memory, including transparent huge pages: the agent's next access finds zeros in new pages.
//!   Checksums detect it like any other corruption. Pages that io_uring has registered stay pinned and no
//!   longer belong to the mapping, so data that a device reads into them fails verification until the agent
//!   restarts.
//! * Pages of the hugetlb pool: the hole releases page and reservation, and the next access faults with
//!   SIGBUS when the pool has no free page. Such an engine can terminate the agent, but cannot read or forge
//!   a block. Durable blocks exist after the restart; every load in between is a miss. Where engines are not
//!   trusted that far, leave `vm.nr_hugepages` at 0 on the node: regions are then transparent huge pages.
//!
//! Catching the SIGBUS was rejected: every copy and checksum would have to handle a failure half-way, while
//! an attacker gains only a restart.
//!
//! Not included: assignment of slots (`reprise-agent-core`), I/O (`reprise-io`), CUDA or RDMA registration,
//! NUMA placement, and swap: nodes that serve inference run without it.
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
pub use heap::fix_mmap_threshold;
pub use mapped::MappedRegion;
pub use meminfo::{Meminfo, check_available};
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
