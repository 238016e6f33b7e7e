//! How the process's heap treats large allocations.
//!
//! The agent's tables (index, eviction orders, pool slots) are vectors that grow with the number of blocks. Mapped
//! apart, one that doubles is moved by the kernel (mremap(2)) without a copy, and what it leaves goes back to the
//! system. glibc's malloc does that above 128 KiB, until the first such allocation is freed: then it raises its limit to
//! that size, up to 32 MiB (mallopt(3), "dynamic mmap threshold"), and every doubling from then on copies, and leaves
//! a hole of the old size in the heap. Measured with a million blocks on a device: 112 bytes a block, where the
//! tables have 89.
//!
//! The price: an allocation of 128 KiB and more costs two system calls and its page faults every time. Nothing on
//! the data path makes one.

/// From so many bytes on an allocation is a mapping of its own: what glibc starts with.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES_MIN: i32 = 128 << 10;

/// Keeps large allocations apart from the heap, whatever was freed before. Call once, first thing in `main`. With
/// another C library than glibc this does nothing.
pub fn keep_large_allocations_apart() {
    #[cfg(target_env = "gnu")]
    crate::sys::set_mapping_threshold(MAPPED_BYTES_MIN);
}
