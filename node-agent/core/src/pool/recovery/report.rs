//! Findings of opening a device.

/// Findings of opening a device. The counts of damage are zero after a clean shutdown, a kill or a power
/// loss, except for [`torn_pages`](RecoveryReport::torn_pages).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Epoch of the active bank.
    pub bank_epoch: u64,
    /// Number of records read from checkpoints.
    pub checkpoint_records: u64,
    /// Number of pages read from logs.
    pub log_pages: u64,
    /// Number of records read from logs.
    pub log_records: u64,
    /// Number of stored blocks.
    pub blocks_stored: u64,
    /// Number of slots that are never used again.
    pub slots_quarantined: u64,
    /// Number of incomplete pages of the last append, or of the header that made the bank active: never
    /// acknowledged, or corrupted since, which cannot be distinguished.
    pub torn_pages: u64,
    /// Number of unreadable log pages that were durable once. Each recorded up to 63 stores and frees. The
    /// stored blocks are lost; the freed ones may reappear until a read finds their slots reused.
    pub journal_holes: u64,
    /// Number of unreadable checkpoint pages; up to 63 blocks each are lost, unless the other bank has them.
    pub checkpoint_pages_bad: u64,
    /// Number of damaged superblock copies.
    pub superblock_copies_bad: u64,
    /// Number of superblock copies with the size before an interrupted growth. Not damage.
    pub superblock_copies_outdated: u64,
    /// Number of damaged header copies of the active bank that were durable once.
    pub bank_headers_bad: u64,
    /// Number of pages that the device could not read.
    pub unreadable_pages: u64,
    /// Number of intact records that are invalid in this version.
    pub records_rejected: u64,
    /// Whether the other bank replaced damaged parts of the active one.
    pub other_bank_used: bool,
    /// Whether the pool must write a whole new bank before anything else.
    pub repair_due: bool,
}

impl RecoveryReport {
    /// Whether no damage was found. A torn last append is not damage.
    pub fn is_clean(&self) -> bool {
        let damage = self.journal_holes
            + self.checkpoint_pages_bad
            + self.superblock_copies_bad
            + self.bank_headers_bad
            + self.unreadable_pages
            + self.records_rejected;
        damage == 0 && !self.other_bank_used
    }
}
