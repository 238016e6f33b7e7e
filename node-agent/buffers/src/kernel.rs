//! Copying and checksumming of raw memory: the bytes of the data path go through here.
//!
//! Arithmetic (measured on a Zen 3 without AVX-512, 32 KiB objects out of caches, relative to memcpy): copy, then
//! checksum each piece while it is in cache: 0.57, because the checksum runs at the speed of a copy and nothing
//! overlaps. One pass that loads a line once, stores it and folds it into the checksum: 1.0. The same with stores
//! that go around the cache (the destination's old content need not be read): 1.5; copying alone with such stores:
//! 1.6. `examples/copy_speed.rs` prints these figures for any machine.
//!
//! Two implementations: one pass with `VPCLMULQDQ` on 256-bit registers (x86-64 since Zen 3 and Ice Lake), and pieces
//! with the crc-fast crate elsewhere. A 128-bit version of the first was measured at 0.95 where the 256-bit one
//! reaches 1.5, and is not worth a third path.
//!
//! Why one pass is also the safe way: what is checksummed is the very register that is stored, so it does not matter
//! whether another process changes the source meanwhile.
//!
//! All functions take raw addresses, because either side may be memory that other processes write at any time. Such a
//! race makes the bytes read unspecified and nothing else: every byte is loaded as a plain integer and decides about
//! no address, length or branch.

mod portable;
#[cfg(target_arch = "x86_64")]
mod x86_64;

/// The state of a CRC-32/ISCSI before its final inversion; starts with all ones.
pub(crate) type State = u32;

/// State of no bytes.
pub(crate) const EMPTY: State = !0;

/// Copies from this length on go around the cache. Shorter ones are likely to be read again at once, and are too
/// short for the fence at the end to be cheap.
const STREAM_BYTES_MIN: usize = 16 << 10;

/// Copies `bytes` bytes.
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

/// Copies `bytes` bytes and gives the state of the checksum after what was copied.
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

/// Gives the state of the checksum after `bytes` bytes of memory that others may write.
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

/// Gives the state of the checksum after a slice.
pub(crate) fn checksum_slice(state: State, bytes: &[u8]) -> State {
    #[cfg(target_arch = "x86_64")]
    // With AVX-512, crc-fast folds 512 bits at a time and is faster in cache.
    if has_one_pass() && !std::arch::is_x86_feature_detected!("avx512vl") {
        // SAFETY: a slice is valid for reading its length; the CPU has the features.
        return unsafe { x86_64::checksum(state, bytes.as_ptr(), bytes.len()) };
    }
    portable::checksum_slice(state, bytes)
}

/// Which implementation runs on this CPU, for people.
pub(crate) fn method() -> String {
    #[cfg(target_arch = "x86_64")]
    if has_one_pass() {
        return "x86_64 vpclmulqdq 256-bit, in one pass with the copy".to_owned();
    }
    portable::method()
}

/// Whether the CPU has what the one-pass implementation needs. The answer is cached by the standard library.
#[cfg(target_arch = "x86_64")]
fn has_one_pass() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("vpclmulqdq")
        && std::arch::is_x86_feature_detected!("pclmulqdq")
        && std::arch::is_x86_feature_detected!("sse4.2")
}

#[cfg(test)]
mod tests;
