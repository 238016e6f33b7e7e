//! Copies and checksums of raw memory: all bytes of the data path pass through here.
//!
//! Cost (measured on a Zen 3 without AVX-512 for uncached 32 KiB objects, as throughput relative to memcpy):
//!
//! * Copy, then checksum each piece while it is in cache: 0.57, because the checksum runs at the speed of a
//!   copy and does not overlap with it.
//! * One pass that loads a line once, stores it and folds it into the checksum: 1.0.
//! * The same with non-temporal stores (the destination's old content is not read): 1.5; copying alone with
//!   such stores: 1.6.
//!
//! `examples/copy_speed.rs` prints these figures for any machine.
//!
//! Two implementations: one pass with `VPCLMULQDQ` on 256-bit registers (x86-64 since Zen 3 and Ice Lake),
//! and pieces with the crc-fast crate elsewhere. A 128-bit version of the first was measured at 0.95 where
//! the 256-bit one reaches 1.5, and is not worth a third path.
//!
//! One pass is also the safe way: the checksum is computed from the register that is stored, so a concurrent
//! change of the source by another process does not matter.
//!
//! All functions take raw addresses, because other processes may write either side at any time. Such a race
//! only makes the read bytes unspecified: every byte is loaded as a plain integer and determines no address,
//! length or branch.

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86_64;

/// The state of a CRC-32/ISCSI before its final inversion; starts with all ones.
pub(crate) type State = u32;

/// State of no bytes.
pub(crate) const EMPTY: State = !0;

/// Copies of at least this length use non-temporal stores. Shorter ones are likely to be read again soon, and
/// are too short to amortize the fence.
const STREAM_BYTES_MIN: usize = 16 << 10;

/// Copies `bytes` bytes from `src` to `dst`.
///
/// # Safety
/// `src` is valid for reading and `dst` for writing `bytes` bytes, and they do not overlap.
pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    if bytes >= STREAM_BYTES_MIN && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: by the contract of this function; the CPU has the feature.
        unsafe { x86_64::copy_around_cache(src, dst, bytes) };
        return;
    }
    // SAFETY: by the contract of this function.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, bytes) };
}

/// Copies `bytes` bytes and returns the checksum state after the copied bytes.
///
/// # Safety
/// As for [`copy`].
pub(crate) unsafe fn copy_checked(state: State, src: *const u8, dst: *mut u8, bytes: usize) -> State {
    #[cfg(target_arch = "x86_64")]
    if has_one_pass() {
        // SAFETY: by the contract of this function; the CPU has the features.
        return unsafe { x86_64::copy_checked(state, src, dst, bytes) };
    }
    // SAFETY: by the contract of this function.
    unsafe { portable::copy_checked(state, src, dst, bytes) }
}

/// Returns the checksum state after `bytes` bytes of memory that other processes may write.
///
/// # Safety
/// `src` is valid for reading `bytes` bytes.
pub(crate) unsafe fn checksum(state: State, src: *const u8, bytes: usize) -> State {
    #[cfg(target_arch = "x86_64")]
    if has_one_pass() {
        // SAFETY: by the contract of this function; the CPU has the features.
        return unsafe { x86_64::checksum(state, src, bytes) };
    }
    // SAFETY: by the contract of this function.
    unsafe { portable::checksum(state, src, bytes) }
}

/// Returns the checksum state after a slice.
pub(crate) fn checksum_slice(state: State, bytes: &[u8]) -> State {
    #[cfg(target_arch = "x86_64")]
    // With AVX-512, crc-fast folds 512 bits at a time and is faster in cache.
    if has_one_pass() && !std::arch::is_x86_feature_detected!("avx512vl") {
        // SAFETY: a slice is valid for reading its length; the CPU has the features.
        return unsafe { x86_64::checksum(state, bytes.as_ptr(), bytes.len()) };
    }
    portable::checksum_slice(state, bytes)
}

/// Describes the implementation for this CPU, for logs.
pub(crate) fn method() -> String {
    #[cfg(target_arch = "x86_64")]
    if has_one_pass() {
        return "x86_64 vpclmulqdq 256-bit, in one pass with the copy".to_owned();
    }
    portable::method()
}

/// Reports whether the CPU supports the one-pass implementation. The standard library caches the answer.
#[cfg(target_arch = "x86_64")]
fn has_one_pass() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("vpclmulqdq")
        && std::arch::is_x86_feature_detected!("pclmulqdq")
        && std::arch::is_x86_feature_detected!("sse4.2")
}

#[cfg(test)]
mod tests;
