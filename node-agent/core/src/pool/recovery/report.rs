//! What was found while opening a device.

/// What was found while opening a device. Counts of damage are zero after a clean shutdown, a kill or a power loss,
/// except for [`torn_pages`](RecoveryReport::torn_pages).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RecoveryReport {
    /// Epoch of the bank that was active.
    pub bank_epoch: u64,
    /// Records read from checkpoints.
    pub checkpoint_records: u64,
    /// Pages read from logs.
    pub log_pages: u64,
    /// Records read from logs.
    pub log_records: u64,
    /// Blocks stored.
    pub blocks_stored: u64,
    /// Slots that are never used again.
    pub slots_quarantined: u64,
    /// Pages of the last append, or copies of a header that made its bank active, that were not written whole: never
    /// acknowledged (or rotten since; that cannot be told apart).
    pub torn_pages: u64,
    /// Log pages that were durable once and cannot be read any more. Each recorded up to 63 stores and frees: those
    /// blocks are lost, those freed may be back until a read finds their slots reused.
    pub journal_holes: u64,
    /// Checkpoint pages that cannot be read; up to 63 blocks each are lost, unless the other bank had them.
    pub checkpoint_pages_bad: u64,
    /// Copies of the superblock that are damaged.
    pub superblock_copies_bad: u64,
    /// Copies of the superblock of the format before this one: one of them is written again, and no agent of then opens the
    /// pool any more. No damage.
    pub superblock_copies_older: u64,
    /// Copies of the active bank's header that were durable once and are damaged.
    pub bank_headers_bad: u64,
    /// Pages that the device could not read.
    pub unreadable_pages: u64,
    /// Intact records that make no sense to this version.
    pub records_rejected: u64,
    /// Whether the other bank was needed to replace what is damaged in the active one.
    pub other_bank_used: bool,
    /// Whether the pool writes a whole new bank before anything else because of what was found.
    pub repair_due: bool,
}

impl RecoveryReport {
    /// Whether no damage was found. A torn last append is none.
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
