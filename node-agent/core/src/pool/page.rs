//! Pages of metadata: 4 KiB that end with the CRC32C of all bytes before it.
//!
//! Superblock, bank header, checkpoint page, log page and slot header are such pages. A page is intact if its
//! last four bytes are the checksum of the others. Each codec checks the other fields (magic, pool, epoch,
//! place) itself. All numbers are little-endian.
//!
//! Fields are read and written at named offsets; bytes are never cast to structs.

use reprise_policy::layout::PAGE_BYTES;

/// Bytes of a page.
pub(super) const PAGE: usize = PAGE_BYTES as usize;

/// Offset of a page's checksum: its last four bytes.
pub(super) const CRC_AT: usize = PAGE - 4;

pub(super) fn crc32c(bytes: &[u8]) -> u32 {
    let wide = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes);
    u32::try_from(wide).expect("a 32-bit checksum fits 32 bits")
}

/// Computes a page's checksum, stores it in the page, and returns it.
///
/// # Panics
/// If `page` does not have [`PAGE`] bytes.
pub(super) fn seal(page: &mut [u8]) -> u32 {
    assert_eq!(page.len(), PAGE, "metadata is written in whole pages");
    let crc = crc32c(&page[..CRC_AT]);
    put(page, CRC_AT, &crc.to_le_bytes());
    crc
}

/// Returns the checksum of an intact page; `None` if the page is not intact or has the wrong size.
pub(super) fn intact(page: &[u8]) -> Option<u32> {
    if page.len() != PAGE {
        return None;
    }
    let stored = u32_at(page, CRC_AT);
    (crc32c(&page[..CRC_AT]) == stored).then_some(stored)
}

/// Whether all bytes are zero: never written, or trimmed.
pub(super) fn is_blank(bytes: &[u8]) -> bool {
    bytes.iter().all(|byte| *byte == 0)
}

/// Copies `field` to offset `at`.
pub(super) fn put(page: &mut [u8], at: usize, field: &[u8]) {
    page[at..at + field.len()].copy_from_slice(field);
}

/// Returns the `N` bytes at offset `at`.
pub(super) fn bytes_at<const N: usize>(page: &[u8], at: usize) -> [u8; N] {
    let mut field = [0; N];
    field.copy_from_slice(&page[at..at + N]);
    field
}

/// Returns the 16-bit number at offset `at`.
pub(super) fn u16_at(page: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes_at(page, at))
}

/// Returns the 32-bit number at offset `at`.
pub(super) fn u32_at(page: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes_at(page, at))
}

/// Returns the 64-bit number at offset `at`.
pub(super) fn u64_at(page: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes_at(page, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc32c_matches_its_published_check_value() {
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
    }

    #[test]
    fn only_a_sealed_page_is_intact() {
        let mut page = vec![0; PAGE];
        assert!(is_blank(&page));
        assert_eq!(intact(&page), None);
        let crc = seal(&mut page);
        assert_eq!(intact(&page), Some(crc));
        assert_eq!(intact(&page[..PAGE - 1]), None);
        page[17] ^= 1;
        assert_eq!(intact(&page), None);
    }
}
