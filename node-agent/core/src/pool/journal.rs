//! Journal: makes records durable in groups of pages, and bounds the log by switching banks.
//!
//! **Appending.** Records are queued. One group at a time is written behind the log and synced; its records
//! are *committed* only then, and only then is the next group written. A later group on the device therefore
//! proves that every earlier one was durable. Pages are padded, and never rewritten.
//!
//! **Switching banks.** When the log is half full, all stored blocks are copied into the other bank:
//! ```text
//! Copy        checkpoint pages, a few writes at a time, while appends continue in the old log;
//!             records committed meanwhile are collected (the tail)
//! Drain       no new group; wait for the group in flight
//! Body        tail pages at the beginning of the new log; then one sync for checkpoint and tail
//! Header      both copies of the new header; then one sync
//!             the new bank is active, and appends continue in it
//! ```
//! The checkpoint is not a snapshot of one point in time: each slot is copied in its state at that moment.
//! This is sound because the tail or the log behind it contains every change since the copy began, and
//! because replaying records is idempotent ([`slots`](super::slots)). Until the new header is durable, the
//! old bank is complete; at that moment both banks are equivalent.
//!
//! If recovery found damage, a bank switch writes a whole new bank before anything is appended.
//!
//! Out of scope: retries. After a failed write or sync of the journal, the contents of the device are
//! unknown.

use std::collections::VecDeque;

use reprise_policy::layout::PAGE_BYTES;

use super::BatchId;
use super::geometry::GROUP_PAGES_MAX;
use super::geometry::SUPERBLOCK_OFFSETS;
use super::page::PAGE;
use super::record::{
    Area, BankIncarnation, PageHead, PageOwner, RECORDS_PER_PAGE, Record, RecordKind, encode_group,
    encode_page, group_pages,
};
use super::slots::{SlotPlace, Slots};
use super::superblock::{BankHeader, Superblock};

/// Pages of one checkpoint write: 128 KiB, 2,016 records, about 100 µs to encode.
const CHUNK_PAGES: u32 = 32;

/// Maximum checkpoint writes in flight: enough to keep a device busy, 512 KiB of memory.
const CHUNKS_IN_FLIGHT_MAX: u32 = 4;

/// Maximum records of one append.
const GROUP_RECORDS_MAX: usize = GROUP_PAGES_MAX as usize * RECORDS_PER_PAGE;

/// Record that is queued for the log.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueuedRecord {
    /// Record to write.
    pub(super) record: Record,
    /// Batch that waits for it, if any.
    pub(super) batch: Option<BatchId>,
}

/// Write that the journal requests.
#[derive(Debug)]
pub(super) struct JournalWrite {
    /// Purpose of the write.
    pub(super) part: JournalPart,
    /// Byte offset on the device.
    pub(super) offset: u64,
    /// Data of whole pages.
    pub(super) bytes: Vec<u8>,
}

/// Purpose of a journal write or sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JournalPart {
    /// Append of the group in flight.
    Group,
    /// Switch to the other bank.
    BankSwitch,
}

/// Next actions that the journal requests.
#[derive(Debug, Default)]
pub(super) struct JournalActions {
    /// Writes to start now.
    pub(super) writes: Vec<JournalWrite>,
    /// Parts that wait for the next sync.
    pub(super) syncs: Vec<JournalPart>,
}

/// Position at which the journal continues after formatting or recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct JournalPosition {
    /// Index of the active bank.
    pub(super) bank: usize,
    /// Incarnation of the active bank.
    pub(super) incarnation: BankIncarnation,
    /// First log page that may be written.
    pub(super) log_next: u32,
    /// Repair to complete before the first append.
    pub(super) repair: Option<Repair>,
}

/// Damage that recovery found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Repair {
    /// Superblock copies to rewrite.
    pub(super) superblock_copies: [bool; 2],
}

/// Writer of the journal.
#[derive(Debug)]
pub(super) struct Journal {
    superblock: Superblock,
    position: JournalPosition,
    queue: VecDeque<QueuedRecord>,
    group: Vec<QueuedRecord>,
    switch: Option<BankSwitch>,
    /// Number of bank switches since the pool was opened.
    checkpoints: u64,
    /// Number of records committed since the pool was opened.
    records: u64,
}

#[derive(Debug)]
struct BankSwitch {
    bank: usize,
    /// Blocks with the generation at which this incarnation began, or a later one, are not copied: they are
    /// in the tail or behind it, if they are stored at all.
    owner: PageOwner,
    phase: SwitchPhase,
    cursor: SlotPlace,
    copied: CopyProgress,
    pages: u32,
    records: u64,
    writes_in_flight: u32,
    tail: Vec<Record>,
    tail_pages: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SwitchPhase {
    Copy,
    Drain,
    Body,
    BodySync,
    Header,
    HeaderSync,
}

/// Progress of the checkpoint copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyProgress {
    Partial,
    Complete,
}

impl Journal {
    /// Creates a writer that continues at `position`.
    pub(super) fn new(superblock: &Superblock, position: JournalPosition) -> Journal {
        Journal {
            superblock: *superblock,
            position,
            queue: VecDeque::new(),
            group: Vec::new(),
            switch: None,
            checkpoints: 0,
            records: 0,
        }
    }

    /// Superblock copies that the next bank switch rewrites.
    pub(super) fn superblock_repairs(&self) -> [bool; 2] {
        self.position.repair.map_or([false; 2], |repair| repair.superblock_copies)
    }

    /// Replaces the superblock after growth, before the first append.
    pub(super) fn set_superblock(&mut self, superblock: &Superblock) {
        self.superblock = *superblock;
    }

    /// Queues a record for the log.
    pub(super) fn push(&mut self, record: Record, batch: Option<BatchId>) {
        self.queue.push_back(QueuedRecord { record, batch });
    }

    /// Requests all writes that are possible now.
    pub(super) fn advance(&mut self, slots: &Slots, next_generation: u64, actions: &mut JournalActions) {
        if self.switch.is_none() && self.switch_is_due() {
            self.begin_switch(next_generation);
        }
        self.advance_switch(slots, next_generation, actions);
        if self.may_append() {
            self.begin_group(next_generation, actions);
        }
    }

    /// Commits the records of the group in flight, after its sync.
    pub(super) fn group_synced(&mut self) -> Vec<QueuedRecord> {
        let group = std::mem::take(&mut self.group);
        self.records += group.len() as u64;
        if let Some(switch) = &mut self.switch {
            switch.tail.extend(group.iter().map(|queued| queued.record));
        }
        group
    }

    /// Handles the end of a write of the bank switch.
    pub(super) fn switch_written(&mut self) {
        let switch = self.switch.as_mut().expect("a switch lasts until its last write has ended");
        switch.writes_in_flight -= 1;
    }

    /// Handles the end of a sync of the bank switch.
    pub(super) fn switch_synced(&mut self, next_generation: u64, actions: &mut JournalActions) {
        let switch = self.switch.as_mut().expect("a switch lasts until its last sync has ended");
        match switch.phase {
            SwitchPhase::BodySync => {
                let header = BankHeader {
                    incarnation: switch.owner.incarnation,
                    next_generation,
                    checkpoint_records: switch.records,
                    checkpoint_pages: switch.pages,
                };
                let page = header.encode(&self.superblock, switch.bank);
                for offset in self.superblock.geometry.header_offsets(switch.bank) {
                    switch.write(offset, page.clone(), actions);
                }
                switch.phase = SwitchPhase::Header;
            }
            SwitchPhase::HeaderSync => {
                self.position = JournalPosition {
                    bank: switch.bank,
                    incarnation: switch.owner.incarnation,
                    log_next: switch.tail_pages,
                    repair: None,
                };
                self.switch = None;
                self.checkpoints += 1;
            }
            phase => unreachable!("no sync was requested in {phase:?}"),
        }
    }

    /// Number of bank switches since the pool was opened.
    pub(super) fn checkpoints(&self) -> u64 {
        self.checkpoints
    }

    /// Number of records committed since the pool was opened.
    pub(super) fn records(&self) -> u64 {
        self.records
    }

    /// Bytes of the log in use.
    pub(super) fn log_bytes_used(&self) -> u64 {
        u64::from(self.position.log_next) * PAGE_BYTES
    }

    /// Drops everything that was not written, because the device is lost.
    pub(super) fn abandon(&mut self) {
        self.queue.clear();
        self.group.clear();
        self.switch = None;
    }

    fn switch_is_due(&self) -> bool {
        self.position.repair.is_some() || self.position.log_next >= self.superblock.geometry.log_pages / 2
    }

    fn begin_switch(&mut self, next_generation: u64) {
        let incarnation =
            BankIncarnation { epoch: self.position.incarnation.epoch + 1, begun: next_generation };
        self.switch = Some(BankSwitch {
            bank: 1 - self.position.bank,
            owner: PageOwner { pool_uuid: self.superblock.pool_uuid, incarnation, area: Area::Checkpoint },
            phase: SwitchPhase::Copy,
            cursor: Slots::FIRST_PLACE,
            copied: CopyProgress::Partial,
            pages: 0,
            records: 0,
            writes_in_flight: 0,
            tail: Vec::new(),
            tail_pages: 0,
        });
    }

    fn advance_switch(&mut self, slots: &Slots, next_generation: u64, actions: &mut JournalActions) {
        let copies = self.superblock_repairs();
        let Some(switch) = &mut self.switch else { return };
        if switch.phase == SwitchPhase::Copy {
            switch.copy(slots, &self.superblock, next_generation, actions);
        }
        if switch.phase == SwitchPhase::Drain && self.group.is_empty() {
            switch.write_tail(&self.superblock, next_generation, actions);
            for (offset, _) in SUPERBLOCK_OFFSETS.into_iter().zip(copies).filter(|(_, bad)| *bad) {
                switch.write(offset, self.superblock.encode(), actions);
            }
            switch.phase = SwitchPhase::Body;
        }
        let next = match switch.phase {
            SwitchPhase::Body => SwitchPhase::BodySync,
            SwitchPhase::Header => SwitchPhase::HeaderSync,
            _ => return,
        };
        if switch.writes_in_flight == 0 {
            switch.phase = next;
            actions.syncs.push(JournalPart::BankSwitch);
        }
    }

    fn may_append(&self) -> bool {
        let open = match &self.switch {
            None => true,
            Some(switch) => switch.phase == SwitchPhase::Copy && self.position.repair.is_none(),
        };
        open && self.group.is_empty() && !self.queue.is_empty()
    }

    fn begin_group(&mut self, next_generation: u64, actions: &mut JournalActions) {
        let room = self.superblock.geometry.log_pages - self.position.log_next;
        let records = (room as usize * RECORDS_PER_PAGE).min(GROUP_RECORDS_MAX).min(self.queue.len());
        if records == 0 {
            return;
        }
        self.group.extend(self.queue.drain(..records));
        let records: Vec<Record> = self.group.iter().map(|queued| queued.record).collect();
        let owner = PageOwner {
            pool_uuid: self.superblock.pool_uuid,
            incarnation: self.position.incarnation,
            area: Area::Log,
        };
        let first = self.position.log_next;
        self.position.log_next += group_pages(records.len());
        actions.writes.push(JournalWrite {
            part: JournalPart::Group,
            offset: self.superblock.geometry.log_offset(self.position.bank, first),
            bytes: encode_group(&owner, first, next_generation, &records),
        });
    }
}

impl BankSwitch {
    /// Requests checkpoint writes; enters the next phase when all have ended.
    fn copy(
        &mut self,
        slots: &Slots,
        superblock: &Superblock,
        next_generation: u64,
        actions: &mut JournalActions,
    ) {
        while self.copied == CopyProgress::Partial && self.writes_in_flight < CHUNKS_IN_FLIGHT_MAX {
            let first = self.pages;
            let bytes = self.next_chunk(slots, next_generation);
            if !bytes.is_empty() {
                assert!(
                    self.pages <= superblock.geometry.checkpoint_pages,
                    "entries are bounded by the checkpoint area"
                );
                self.write(superblock.geometry.checkpoint_offset(self.bank, first), bytes, actions);
            }
        }
        if self.copied == CopyProgress::Complete && self.writes_in_flight == 0 {
            self.phase = SwitchPhase::Drain;
        }
    }

    fn next_chunk(&mut self, slots: &Slots, next_generation: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut records = Vec::with_capacity(RECORDS_PER_PAGE);
        for _ in 0..CHUNK_PAGES {
            records.clear();
            while records.len() < RECORDS_PER_PAGE {
                let Some((place, next)) = slots.next_place(self.cursor) else {
                    self.copied = CopyProgress::Complete;
                    break;
                };
                self.cursor = next;
                // A newer record follows in the log, except that of a slot that was withdrawn meanwhile: its record of a
                // block is dropped, and that of the lend may not be written yet.
                let begun = self.owner.incarnation.begun;
                let is_kept = |record: &Record| record.generation < begun || record.kind == RecordKind::Lend;
                records.extend(slots.record_at(place).filter(is_kept));
            }
            if records.is_empty() {
                break;
            }
            let start = bytes.len();
            bytes.resize(start + PAGE, 0);
            let head = PageHead { sequence: self.pages, group_first: 0, group_pages: 0, next_generation };
            encode_page(&mut bytes[start..], &self.owner, &head, &records);
            self.pages += 1;
            self.records += records.len() as u64;
        }
        bytes
    }

    /// Requests the writes of the first group of the new log. It has at least one page, which marks the log
    /// as started.
    fn write_tail(&mut self, superblock: &Superblock, next_generation: u64, actions: &mut JournalActions) {
        let owner = PageOwner { area: Area::Log, ..self.owner };
        let bytes = encode_group(&owner, 0, next_generation, &self.tail);
        self.tail_pages = group_pages(self.tail.len());
        self.tail = Vec::new();
        let mut offset = superblock.geometry.log_offset(self.bank, 0);
        for chunk in bytes.chunks(CHUNK_PAGES as usize * PAGE) {
            self.write(offset, chunk.to_vec(), actions);
            offset += chunk.len() as u64;
        }
    }

    fn write(&mut self, offset: u64, bytes: Vec<u8>, actions: &mut JournalActions) {
        self.writes_in_flight += 1;
        actions.writes.push(JournalWrite { part: JournalPart::BankSwitch, offset, bytes });
    }
}
