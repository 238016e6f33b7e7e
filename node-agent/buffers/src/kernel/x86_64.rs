//! One pass over memory with 256-bit registers: load, store, fold into the checksum.
//!
//! The checksum is folded as in Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ
//! Instruction" (Intel, 2009), for reflected bit order. Four registers hold eight 128-bit remainders; each
//! step advances them by the 1,024 bits of a step and adds the next bytes:
//!
//! ```text
//!  bytes  0..32   32..64   64..96   96..128 │ 128..160 …
//!         r0      r1       r2       r3      │ r0 = r0.low · x^(1024+64) + r0.high · x^1024 + bytes 128..160, …
//! ```
//!
//! At the end the eight are folded into one, whose 16 bytes go through the CPU's CRC32 instruction, as does
//! the rest of the input. Four registers suffice: a step has 8 multiplications and the latency of one chain
//! is shorter.

use std::arch::x86_64::{
    __m128i, __m256i, _MM_HINT_T0, _mm_clmulepi64_si128, _mm_crc32_u8, _mm_crc32_u64, _mm_cvtsi32_si128,
    _mm_extract_epi64, _mm_prefetch, _mm_set_epi64x, _mm_sfence, _mm_xor_si128, _mm256_broadcastsi128_si256,
    _mm256_castsi256_si128, _mm256_clmulepi64_epi128, _mm256_extracti128_si256, _mm256_loadu_si256,
    _mm256_storeu_si256, _mm256_stream_si256, _mm256_xor_si256, _mm256_zextsi128_si256,
};

use super::{STREAM_BYTES_MIN, State};

/// Size of a register in bytes.
const REGISTER: usize = 32;

/// Size of a step in bytes: four registers, two cache lines.
const STEP: usize = 4 * REGISTER;

/// Size of a cache line in bytes: non-temporal stores should fill whole lines.
const LINE: usize = 64;

/// Prefetch distance in bytes. 1–8 KiB made no difference; no prefetch cost 15 %.
const AHEAD: usize = 2 << 10;

// Destinations of [`pass`]. An enum cannot be a const parameter.
const NO_COPY: u8 = 0;
const CACHE: u8 = 1;
const AROUND_CACHE: u8 = 2;

/// The polynomial of CRC-32/ISCSI without its highest term.
const POLYNOMIAL: u64 = 0x1EDC_6F41;

/// Multipliers for the low and the high half of a 128-bit remainder.
#[derive(Clone, Copy)]
struct Multipliers {
    low: u32,
    high: u32,
}

/// Advances by one step.
const BY_STEP: Multipliers = multipliers(8 * STEP as u32);
/// Advances by one register.
const BY_REGISTER: Multipliers = multipliers(8 * REGISTER as u32);
/// Advances by half a register.
const BY_HALF: Multipliers = multipliers(4 * REGISTER as u32);

/// Multipliers that advance a remainder by `bits`. In reflected order the low half has the higher powers. The
/// offsets are 64 bits (of the half) minus 32 (of the width) minus 1 (a product of reflected numbers comes
/// out one bit lower).
const fn multipliers(bits: u32) -> Multipliers {
    Multipliers { low: power(bits + 31), high: power(bits - 33) }
}

/// Computes x^exponent modulo the polynomial, reflected.
const fn power(exponent: u32) -> u32 {
    let mut value: u64 = 1;
    let mut done = 0;
    while done < exponent {
        value <<= 1;
        if value >> 32 != 0 {
            value ^= POLYNOMIAL | 1 << 32;
        }
        done += 1;
    }
    (value as u32).reverse_bits()
}

// Other implementations list the multipliers for 64 bytes: github.com/corsix/fast-crc32, crc32c v4s3x3.
const _: () = assert!(multipliers(512).low == 0x740e_ef02 && multipliers(512).high == 0x9e4a_ddf8);

/// See [`super::copy`].
///
/// # Safety
/// As for [`super::copy`]; the CPU has AVX.
#[target_feature(enable = "avx")]
pub(super) unsafe fn copy_around_cache(src: *const u8, dst: *mut u8, bytes: usize) {
    let head = to_line(dst).min(bytes);
    let body = (bytes - head) / STEP * STEP;
    // SAFETY: head ≤ bytes.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, head) };
    for offset in (head..head + body).step_by(REGISTER) {
        // SAFETY: the register lies in the body, which is a part of the source.
        let value = unsafe { load(src.wrapping_add(offset)) };
        // SAFETY: the register lies in the body, which is a part of the destination; `head` made it aligned.
        unsafe { store::<AROUND_CACHE>(dst.wrapping_add(offset), value) };
    }
    _mm_sfence();
    let done = head + body;
    // SAFETY: the rest of both.
    unsafe { std::ptr::copy_nonoverlapping(src.wrapping_add(done), dst.wrapping_add(done), bytes - done) };
}

/// See [`super::copy_checked`].
///
/// # Safety
/// As for [`super::copy_checked`]; the CPU has the features.
#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
pub(super) unsafe fn copy_checked(state: State, src: *const u8, dst: *mut u8, bytes: usize) -> State {
    if bytes < STREAM_BYTES_MIN {
        // SAFETY: by the contract of this function.
        return unsafe { pass::<CACHE>(state, src, dst, bytes) };
    }
    let head = to_line(dst);
    // SAFETY: the first bytes of both; head < LINE < STREAM_BYTES_MIN ≤ bytes.
    let state = unsafe { word_by_word::<CACHE>(state, src, dst, head) };
    // SAFETY: the rest of both; `head` made the destination aligned.
    let state =
        unsafe { pass::<AROUND_CACHE>(state, src.wrapping_add(head), dst.wrapping_add(head), bytes - head) };
    // Non-temporal stores are not ordered with other stores. Fence, so that a thread that is notified finds
    // the bytes.
    _mm_sfence();
    state
}

/// See [`super::checksum`].
///
/// # Safety
/// As for [`super::checksum`]; the CPU has the features.
#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
pub(super) unsafe fn checksum(state: State, src: *const u8, bytes: usize) -> State {
    // SAFETY: by the contract of this function; no destination is needed.
    unsafe { pass::<NO_COPY>(state, src, std::ptr::null_mut(), bytes) }
}

/// Copies and checksums `bytes` bytes.
///
/// # Safety
/// As for [`super::copy_checked`]; `dst` is not used when `TO` is `NO_COPY`, and aligned to 32 bytes when it
/// is `AROUND_CACHE`.
#[inline]
#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
unsafe fn pass<const TO: u8>(mut state: State, src: *const u8, dst: *mut u8, bytes: usize) -> State {
    let body = bytes / STEP * STEP;
    if body > 0 {
        // SAFETY: the whole steps of source and destination.
        state = unsafe { steps::<TO>(state, src, dst, body) };
    }
    // SAFETY: the rest of both.
    unsafe { word_by_word::<TO>(state, src.wrapping_add(body), dst.wrapping_add(body), bytes - body) }
}

/// [`pass`] over one or more whole steps.
///
/// # Safety
/// As for [`pass`]; `bytes` is a positive multiple of `STEP`.
#[inline]
#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
unsafe fn steps<const TO: u8>(state: State, src: *const u8, dst: *mut u8, bytes: usize) -> State {
    let by_step = _mm256_broadcastsi128_si256(both(BY_STEP));
    // SAFETY: there is a first step.
    let mut remainders = unsafe { move_step::<TO>(src, dst) };
    let before = _mm256_zextsi128_si256(_mm_cvtsi32_si128(state.cast_signed()));
    remainders[0] = _mm256_xor_si256(remainders[0], before);
    for offset in (STEP..bytes).step_by(STEP) {
        // SAFETY: offset + STEP ≤ bytes.
        let next = unsafe { move_step::<TO>(src.wrapping_add(offset), dst.wrapping_add(offset)) };
        for (remainder, next) in remainders.iter_mut().zip(next) {
            *remainder = fold(*remainder, by_step, next);
        }
    }
    finish(remainders)
}

/// Loads a step, stores it and returns it.
///
/// # Safety
/// As for [`pass`], for `STEP` bytes.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn move_step<const TO: u8>(src: *const u8, dst: *mut u8) -> [__m256i; 4] {
    for line in [AHEAD, AHEAD + LINE] {
        // SAFETY: a prefetch is a hint that has no effect on memory and never faults, for any address (Intel
        // SDM, PREFETCHh).
        #[allow(unused_unsafe, reason = "safe in the newest Rust, unsafe in the oldest that we support")]
        unsafe {
            _mm_prefetch::<_MM_HINT_T0>(src.wrapping_add(line).cast());
        };
    }
    let offsets = [0, REGISTER, 2 * REGISTER, 3 * REGISTER];
    // SAFETY: each register lies in the step.
    let values = offsets.map(|offset| unsafe { load(src.wrapping_add(offset)) });
    for (offset, value) in offsets.into_iter().zip(values) {
        // SAFETY: each register lies in the step; aligned if the step is.
        unsafe { store::<TO>(dst.wrapping_add(offset), value) };
    }
    values
}

/// # Safety
/// `at` is valid for reading a register.
#[inline]
#[target_feature(enable = "avx")]
unsafe fn load(at: *const u8) -> __m256i {
    // SAFETY: by the contract of this function; no alignment needed.
    unsafe { _mm256_loadu_si256(at.cast()) }
}

/// # Safety
/// `at` is valid for writing a register unless `TO` is `NO_COPY`, and aligned if it is `AROUND_CACHE`. In
/// that case the caller must fence before it notifies other threads.
#[inline]
#[target_feature(enable = "avx")]
unsafe fn store<const TO: u8>(at: *mut u8, value: __m256i) {
    match TO {
        // SAFETY: by the contract of this function; no alignment needed.
        CACHE => unsafe { _mm256_storeu_si256(at.cast(), value) },
        // SAFETY: by the contract of this function.
        AROUND_CACHE => unsafe { _mm256_stream_si256(at.cast(), value) },
        _ => {}
    }
}

/// Advances two remainders and adds the next bytes.
#[inline]
#[target_feature(enable = "avx2,vpclmulqdq")]
fn fold(remainder: __m256i, by: __m256i, next: __m256i) -> __m256i {
    let low = _mm256_clmulepi64_epi128::<0x00>(remainder, by);
    let high = _mm256_clmulepi64_epi128::<0x11>(remainder, by);
    _mm256_xor_si256(_mm256_xor_si256(low, high), next)
}

/// Folds eight remainders into one, and that into the state.
#[inline]
#[target_feature(enable = "avx2,vpclmulqdq,pclmulqdq,sse4.2")]
fn finish(remainders: [__m256i; 4]) -> State {
    let by_register = _mm256_broadcastsi128_si256(both(BY_REGISTER));
    let [first, rest @ ..] = remainders;
    let folded = rest.into_iter().fold(first, |folded, next| fold(folded, by_register, next));
    let by_half = both(BY_HALF);
    let half = _mm256_castsi256_si128(folded);
    let low = _mm_clmulepi64_si128::<0x00>(half, by_half);
    let high = _mm_clmulepi64_si128::<0x11>(half, by_half);
    let last = _mm_xor_si128(_mm_xor_si128(low, high), _mm256_extracti128_si256::<1>(folded));
    let state = _mm_crc32_u64(0, _mm_extract_epi64::<0>(last).cast_unsigned());
    // The instruction returns 32 bits in a 64-bit register.
    _mm_crc32_u64(state, _mm_extract_epi64::<1>(last).cast_unsigned()) as State
}

#[inline]
#[target_feature(enable = "sse2")]
fn both(multipliers: Multipliers) -> __m128i {
    _mm_set_epi64x(i64::from(multipliers.high), i64::from(multipliers.low))
}

/// [`pass`] without vectors, for input shorter than a step.
///
/// # Safety
/// As for [`pass`], but for the alignment.
#[inline]
#[target_feature(enable = "sse4.2")]
unsafe fn word_by_word<const TO: u8>(state: State, src: *const u8, dst: *mut u8, bytes: usize) -> State {
    const WORD: usize = size_of::<u64>();
    let words = bytes / WORD * WORD;
    let mut state = u64::from(state);
    for offset in (0..words).step_by(WORD) {
        // SAFETY: the word lies in the source.
        let word = unsafe { src.wrapping_add(offset).cast::<u64>().read_unaligned() };
        if TO != NO_COPY {
            // SAFETY: the word lies in the destination.
            unsafe { dst.wrapping_add(offset).cast::<u64>().write_unaligned(word) };
        }
        state = _mm_crc32_u64(state, word);
    }
    let mut state = state as State; // the instruction returns 32 bits in a 64-bit register
    for offset in words..bytes {
        // SAFETY: the byte lies in the source.
        let byte = unsafe { src.wrapping_add(offset).read() };
        if TO != NO_COPY {
            // SAFETY: the byte lies in the destination.
            unsafe { dst.wrapping_add(offset).write(byte) };
        }
        state = _mm_crc32_u8(state, byte);
    }
    state
}

/// Number of bytes from `dst` to the next start of a cache line.
fn to_line(dst: *mut u8) -> usize {
    dst.addr().next_multiple_of(LINE) - dst.addr()
}
