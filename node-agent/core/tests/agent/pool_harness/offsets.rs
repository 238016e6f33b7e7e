//! Offsets on a device of 12 MiB with segments of 2 MiB.
//!
//! 1,536 entries need 25 checkpoint pages; the log has its minimum length of 64 pages. One test compares
//! these offsets with a real device.

use super::PAGE;

/// Bytes of the device.
pub(crate) const DEVICE_BYTES: u64 = 12 << 20;

/// First byte of the first of the five segments.
pub(crate) const DATA: u64 = 2 << 20;

const CHECKPOINT_PAGES: u64 = 25;
const LOG_PAGES: u64 = 64;

/// Bytes of a bank.
pub(crate) const BANK_BYTES: u64 = (2 + CHECKPOINT_PAGES + LOG_PAGES) * PAGE;

const BANKS: [u64; 2] = [(1 << 20) + PAGE, (1 << 20) + PAGE + BANK_BYTES];

/// Whether a byte offset lies in a bank.
pub(crate) fn is_in_bank(bank: usize, offset: u64) -> bool {
    (BANKS[bank]..BANKS[bank] + BANK_BYTES).contains(&offset)
}

/// Byte offsets of the copies of a bank's header.
pub(crate) fn bank_headers(bank: usize) -> [u64; 2] {
    [BANKS[bank], BANKS[bank] + BANK_BYTES - PAGE]
}

/// Byte offset of a checkpoint page.
pub(crate) fn checkpoint_page(bank: usize, page: u64) -> u64 {
    BANKS[bank] + (1 + page) * PAGE
}

/// Byte offset of a log page.
pub(crate) fn log_page(bank: usize, page: u64) -> u64 {
    checkpoint_page(bank, CHECKPOINT_PAGES + page)
}
