//! Copies in pieces through a private buffer, with the crc-fast crate: for every CPU.
//!
//! The crate needs slices, and memory that other processes write must not be behind one. The buffer stays in
//! the first-level cache, so the additional copy costs little compared with the memory traffic.

use crc_fast::{CrcAlgorithm, Digest};

use super::State;
use crate::checksum::PIECE_BYTES;

/// See [`super::copy_checked`].
///
/// # Safety
/// As for [`super::copy_checked`].
pub(super) unsafe fn copy_checked(mut state: State, src: *const u8, dst: *mut u8, bytes: usize) -> State {
    let mut buffer = [0u8; PIECE_BYTES];
    for offset in (0..bytes).step_by(PIECE_BYTES) {
        let piece = &mut buffer[..PIECE_BYTES.min(bytes - offset)];
        // SAFETY: the piece lies inside the source; the buffer is ours.
        unsafe { std::ptr::copy_nonoverlapping(src.wrapping_add(offset), piece.as_mut_ptr(), piece.len()) };
        state = checksum_slice(state, piece);
        // SAFETY: the piece lies inside the destination; the buffer is ours.
        unsafe { std::ptr::copy_nonoverlapping(piece.as_ptr(), dst.wrapping_add(offset), piece.len()) };
    }
    state
}

/// See [`super::checksum`].
///
/// # Safety
/// `src` is valid for reading `bytes` bytes.
pub(super) unsafe fn checksum(mut state: State, src: *const u8, bytes: usize) -> State {
    let mut buffer = [0u8; PIECE_BYTES];
    for offset in (0..bytes).step_by(PIECE_BYTES) {
        let piece = &mut buffer[..PIECE_BYTES.min(bytes - offset)];
        // SAFETY: the piece lies inside the source; the buffer is ours.
        unsafe { std::ptr::copy_nonoverlapping(src.wrapping_add(offset), piece.as_mut_ptr(), piece.len()) };
        state = checksum_slice(state, piece);
    }
    state
}

/// Implements [`super::checksum_slice`] with crc-fast.
pub(super) fn checksum_slice(state: State, bytes: &[u8]) -> State {
    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(state));
    digest.update(bytes);
    // The digest computes all widths in 64 bits; a 32-bit CRC fills the low half.
    digest.get_state() as State
}

pub(super) fn method() -> String {
    format!("{}, after the copy in pieces", crc_fast::get_calculator_target(CrcAlgorithm::Crc32Iscsi))
}
