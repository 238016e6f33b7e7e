//! CRC32C (CRC-32/ISCSI) and copying with it.
//!
//! Arithmetic: a piece is copied, then checked while it is still in the first- or second-level cache, so that the
//! bytes cross the memory bus once. `examples/copy_speed.rs` measures the best size of a piece.

use crc_fast::{CrcAlgorithm, Digest};

/// Bytes that are copied before their checksum is taken: small enough to stay in a 32 KiB first-level cache
/// together with their source, large enough to make the cost of a call vanish.
pub const PIECE_BYTES: usize = 16 << 10;

/// CRC32C over bytes that arrive in pieces.
pub(crate) struct Checksum(Digest);

impl Checksum {
    pub(crate) fn new() -> Checksum {
        Checksum(Digest::new(CrcAlgorithm::Crc32Iscsi))
    }

    /// Goes on where a checksum of the bytes before ended.
    pub(crate) fn resume(crc: u32) -> Checksum {
        // CRC-32/ISCSI inverts its register at the end (xorout 0xffffffff): inverting again gives the register.
        Checksum(Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(!crc)))
    }

    pub(crate) fn update(&mut self, piece: &[u8]) {
        self.0.update(piece);
    }

    pub(crate) fn value(&self) -> u32 {
        // The digest computes all widths in 64 bits; a 32-bit CRC fills the low half.
        self.0.finalize() as u32
    }
}

/// CRC32C of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

/// Copies `src` to `dst` and gives the CRC32C of it. Panics when the lengths differ, as `copy_from_slice` does.
pub fn copy_checked(src: &[u8], dst: &mut [u8]) -> u32 {
    assert_eq!(src.len(), dst.len(), "copy_checked: source and destination must be of one length");
    let mut checksum = Checksum::new();
    for (from, to) in src.chunks(PIECE_BYTES).zip(dst.chunks_mut(PIECE_BYTES)) {
        to.copy_from_slice(from);
        checksum.update(to);
    }
    checksum.value()
}

/// How checksums are computed on this CPU, for people (`x86_64-avx512-vpclmulqdq`, `software-fallback-tables`, …).
pub fn checksum_method() -> String {
    crc_fast::get_calculator_target(CrcAlgorithm::Crc32Iscsi)
}
