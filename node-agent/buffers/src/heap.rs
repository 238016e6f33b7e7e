//! Allocator setting for large allocations.
//!
//! The agent's tables (index, eviction orders, pool slots) are vectors that grow with the number of blocks.
//! If such a vector is a separate mapping, the kernel grows it without a copy (mremap(2)), and freed memory
//! returns to the system. glibc's malloc maps allocations above 128 KiB, until the first of them is freed:
//! then it raises its threshold to that size, up to 32 MiB (mallopt(3), "dynamic mmap threshold"). From then
//! on, every doubling copies, and leaves a hole of the old size in the heap. Measured with a million blocks
//! on a device: 112 bytes a block, while the tables have 89.
//!
//! The price: an allocation of 128 KiB or more costs two system calls and its page faults every time. The
//! data path makes no such allocation.

/// Allocations of at least this size are separate mappings; equals glibc's initial value.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES_MIN: i32 = 128 << 10;

/// Fixes malloc's threshold for mapped allocations. Call it once, first in `main`. No effect with C libraries
/// other than glibc.
pub fn fix_mmap_threshold() {
    #[cfg(target_env = "gnu")]
    crate::sys::set_mapping_threshold(MAPPED_BYTES_MIN);
}
