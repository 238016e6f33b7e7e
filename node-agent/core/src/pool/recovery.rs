//! Recovery: opens a device by reading its metadata.
//!
//! [`Recovery`] requests the bytes that it needs next, and the caller feeds them to it. It reads the
//! superblock, the bank headers, and the checkpoint and log of the active bank, but never a block. It writes
//! nothing, so a crash during recovery changes nothing.
//!
//! The device must be synced before the first read. Bytes that a killed process wrote without a sync are read
//! like all others, and are reported as durable from then on.
//!
//! Order of reads:
//! 1. both copies of the superblock; one valid copy is sufficient;
//! 2. both copies of both bank headers; the valid bank with the higher epoch is the active one;
//! 3. the checkpoint of the active bank, then its whole log area.
//!
//! If the active bank is damaged, the other one helps, because it remains complete until the next bank
//! switch:
//! * If a checkpoint page is damaged, recovery restarts with the other bank's checkpoint and log, followed by
//!   those of the active bank.
//! * If only one bank has a valid header, recovery probes the log of the other one. If that log has a
//!   complete first group of the following epoch and a second group behind it, the bank was active and both
//!   copies of its header are damaged: its log is replayed too. The first group alone contains nothing that
//!   the bank with the header does not contain.
//!
//! **Torn tail or corruption.** A log page contains the sequence of the first page of its group, and a group
//! is written only after the previous one was synced. A missing page before the last group was therefore
//! durable once: it is a *hole*, and counts as lost. A missing page inside or behind the last group may never
//! have been acknowledged: it is a torn tail. Records behind a hole and next to a torn page are applied;
//! [`slots`](super::slots) resolves conflicts by generation.
//!
//! The pool writes a new bank before it appends anything if recovery found damage, a torn header, or a torn
//! append with a valid page behind a missing one.

mod identity;
mod log_scan;
mod owner;
mod report;

use std::collections::VecDeque;
use std::ops::Range;

use reprise_policy::layout::PAGE_BYTES;

use super::StoredBlock;
use super::device::{DevicePool, RecoveredState};
use super::error::PoolError;
use super::geometry::{Geometry, SEGMENT_ALIGNMENT, SUPERBLOCK_OFFSETS};
use super::journal::{JournalPosition, Repair};
use super::page::{PAGE, is_blank};
use super::record::{
    Area, BankIncarnation, FoundPage, LayoutCache, PageHead, PageOwner, PageRecords, decode_page,
    incarnation_of,
};
use super::slots::{Restored, Slots};
use super::superblock::{BankHeader, FoundSuperblock, GENERATION_MAX, Superblock};
use identity::{Bank, FoundHeader, Identity, LogTrace, foreign_data, identify, is_journal_page, rank_banks};
use log_scan::{LogEnd, LogScan};
pub use owner::{OWNER_BYTES, owner};
pub use report::RecoveryReport;

/// Maximum bytes of one read.
pub const READ_BYTES_MAX: usize = 4 << 20;

/// Generations skipped after a recovery, so that no write in flight at the crash shares its generation with a
/// later one: far more than the blocks of [`BATCHES_MAX`](super::BATCHES_MAX) batches.
const GENERATION_GAP: u64 = 1 << 20;

/// State machine that opens a device.
#[derive(Debug)]
pub struct Recovery {
    device_bytes: u64,
    stages: VecDeque<Stage>,
    /// Offset below which reads have one page, because a larger read failed.
    careful_until: u64,
    superblocks: Vec<FoundSuperblock>,
    headers: Vec<FoundHeader>,
    journal: Option<JournalReader>,
    report: RecoveryReport,
}

/// State after the superblock was read.
#[derive(Debug)]
struct JournalReader {
    superblock: Superblock,
    superblock_copies: [bool; 2],
    slots: Slots,
    next_generation: u64,
    layouts: LayoutCache,
    /// Bank whose log continues, and the end of its log once it was read.
    active: Option<(Bank, Option<LogEnd>)>,
    /// Previous bank, until it is needed and read.
    spare: Option<Bank>,
}

/// Run of pages to read for one purpose.
#[derive(Clone, Debug)]
struct Stage {
    purpose: Purpose,
    /// Byte offset of page 0 of the area that `pages` refers to.
    area_offset: u64,
    /// Pages that are still to be read.
    pages: Range<u32>,
}

#[derive(Clone, Debug)]
enum Purpose {
    Superblock,
    /// Check whether the whole beginning is blank, because both superblock copies are.
    Blankness,
    BankHeader {
        bank: usize,
    },
    Checkpoint {
        bank: usize,
        incarnation: BankIncarnation,
    },
    Log {
        bank: usize,
        incarnation: BankIncarnation,
        scan: LogScan,
    },
    /// Probe whether a bank without a header was active in this epoch.
    Probe {
        bank: usize,
        epoch: u64,
        incarnation: Option<BankIncarnation>,
    },
}

impl Recovery {
    /// Starts to open a device of this size.
    pub fn new(device_bytes: u64) -> Recovery {
        let fits = |offset: &u64| offset + PAGE_BYTES <= device_bytes;
        let copies = SUPERBLOCK_OFFSETS.into_iter().filter(fits);
        Recovery {
            device_bytes,
            stages: copies.map(|offset| Stage::new(Purpose::Superblock, offset, 1)).collect(),
            careful_until: 0,
            superblocks: Vec::with_capacity(SUPERBLOCK_OFFSETS.len()),
            headers: Vec::with_capacity(2 * SUPERBLOCK_OFFSETS.len()),
            journal: None,
            report: RecoveryReport::default(),
        }
    }

    /// Next range to read: byte offset and length, in whole pages and at most [`READ_BYTES_MAX`]. `None` when
    /// all data was read: call [`Recovery::finish`].
    pub fn next_read(&self) -> Option<(u64, usize)> {
        let stage = self.stages.front()?;
        let offset = stage.offset();
        let bytes =
            if offset < self.careful_until { PAGE } else { (stage.pages.len() * PAGE).min(READ_BYTES_MAX) };
        Some((offset, bytes))
    }

    /// Processes the bytes that were read.
    ///
    /// # Errors
    /// [`PoolError::WrongRead`] if the length is not the one that [`Recovery::next_read`] returned; other
    /// errors if the device cannot be opened.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), PoolError> {
        let (offset, expected) = self.next_read().unwrap_or_default();
        if bytes.len() != expected || expected == 0 {
            return Err(PoolError::WrongRead { expected, found: bytes.len() });
        }
        for (page, at) in bytes.chunks_exact(PAGE).zip((offset..).step_by(PAGE)) {
            // Each page may change the next range; the rest of the read is then useless.
            if self.next_read().is_none_or(|(wanted, _)| wanted != at) {
                break;
            }
            self.feed_page(Some(page))?;
        }
        Ok(())
    }

    /// Reports that the read failed. A long read is requested again page by page; a page that cannot be read
    /// counts as damaged.
    ///
    /// # Errors
    /// The errors of [`Recovery::feed`].
    pub fn feed_unreadable(&mut self) -> Result<(), PoolError> {
        match self.next_read() {
            None => Err(PoolError::WrongRead { expected: 0, found: 0 }),
            Some((offset, bytes)) if bytes > PAGE => {
                self.careful_until = offset + bytes as u64;
                Ok(())
            }
            Some(_) => {
                self.report.unreadable_pages += 1;
                self.feed_page(None)
            }
        }
    }

    /// Returns the pool, its stored blocks in device order, and a report. A key may occur more than once:
    /// free all copies but one.
    ///
    /// # Errors
    /// [`PoolError::Unfinished`] while data is still to be read, and [`PoolError::NotFormatted`] if there is
    /// no pool.
    pub fn finish(self) -> Result<(DevicePool, Vec<StoredBlock>, RecoveryReport), PoolError> {
        if !self.stages.is_empty() {
            return Err(PoolError::Unfinished);
        }
        let Some(reader) = self.journal else { return Err(PoolError::NotFormatted) };
        if reader.next_generation >= GENERATION_MAX / 2 {
            return Err(PoolError::Corrupt { what: "its generations are exhausted".to_owned() });
        }
        Ok(reader.finish(self.report))
    }

    fn feed_page(&mut self, page: Option<&[u8]>) -> Result<(), PoolError> {
        let Some(mut stage) = self.stages.pop_front() else { return Err(PoolError::Unfinished) };
        let sequence = stage.pages.start;
        stage.pages.start += 1;
        match &mut stage.purpose {
            Purpose::Superblock => {
                self.superblocks.push(page.map_or(Ok(FoundSuperblock::Damaged), Superblock::decode)?);
            }
            Purpose::Blankness => check_blankness(page)?,
            Purpose::BankHeader { bank } => self.add_header(*bank, page),
            Purpose::Checkpoint { bank, incarnation } => {
                let (bank, incarnation) = (*bank, *incarnation);
                if self.add_checkpoint_page(page, incarnation, sequence) == Usable::No
                    && self.restart_with_other_bank(bank)
                {
                    return Ok(());
                }
            }
            Purpose::Log { incarnation, scan, .. } => self.add_log_page(page, *incarnation, sequence, scan),
            Purpose::Probe { epoch, incarnation, .. } => {
                let found = page.map(incarnation_of).filter(|found| found.epoch == *epoch);
                let Some(known) = incarnation.or(found) else { return Ok(()) };
                *incarnation = Some(known);
                match self.probe(page, known, sequence) {
                    Some(head) if sequence == 0 => stage.pages.end = u32::from(head.group_pages) + 1,
                    Some(head) if stage.pages.is_empty() && head.group_first != sequence => return Ok(()),
                    Some(_) => {}
                    None => return Ok(()),
                }
            }
        }
        if stage.pages.is_empty() {
            self.stage_read(stage.purpose)
        } else {
            self.stages.push_front(stage);
            Ok(())
        }
    }

    fn stage_read(&mut self, purpose: Purpose) -> Result<(), PoolError> {
        match purpose {
            Purpose::Superblock if self.stages.is_empty() => self.superblocks_read(),
            Purpose::BankHeader { .. } if self.stages.is_empty() => self.headers_read(),
            Purpose::Superblock
            | Purpose::BankHeader { .. }
            | Purpose::Blankness
            | Purpose::Checkpoint { .. } => Ok(()),
            Purpose::Log { bank, scan, .. } => {
                self.log_read(bank, scan);
                Ok(())
            }
            Purpose::Probe { bank, incarnation, .. } => {
                self.activate_other_bank(bank, incarnation.expect("a probe that found nothing ends early"));
                Ok(())
            }
        }
    }

    fn superblocks_read(&mut self) -> Result<(), PoolError> {
        let (superblock, copies) = match identify(&self.superblocks)? {
            Identity::Blank => {
                let bytes = SEGMENT_ALIGNMENT.min(self.device_bytes - self.device_bytes % PAGE_BYTES);
                let pages = u32::try_from(bytes / PAGE_BYTES).expect("at most 2 MiB");
                self.stages.push_back(Stage::new(Purpose::Blankness, 0, pages));
                return Ok(());
            }
            Identity::Pool(superblock, copies) => (superblock, copies),
        };
        let geometry = &superblock.geometry;
        if self.device_bytes < geometry.device_bytes {
            return Err(PoolError::WrongSize { recorded: geometry.device_bytes, found: self.device_bytes });
        }
        for bank in 0..2 {
            for offset in geometry.header_offsets(bank) {
                self.stages.push_back(Stage::new(Purpose::BankHeader { bank }, offset, 1));
            }
        }
        self.report.superblock_copies_bad = copies.bad;
        self.report.superblock_copies_outdated = copies.outdated;
        self.journal = Some(JournalReader {
            superblock,
            superblock_copies: copies.rewritten,
            slots: Slots::new(geometry),
            next_generation: 0,
            layouts: LayoutCache::default(),
            active: None,
            spare: None,
        });
        Ok(())
    }

    fn add_header(&mut self, bank: usize, page: Option<&[u8]>) {
        let superblock = self.reader().superblock;
        let header = page.and_then(|page| BankHeader::decode(page, &superblock, bank));
        let trace = if page.is_some_and(is_blank) { LogTrace::Blank } else { LogTrace::Written };
        self.headers.push(FoundHeader { bank, header, trace });
    }

    fn headers_read(&mut self) -> Result<(), PoolError> {
        let banks = rank_banks(&self.headers)?;
        let (active, other) = (banks[0], banks.get(1).copied());
        self.report.bank_epoch = active.header.incarnation.epoch;
        let geometry = self.reader().superblock.geometry;
        self.stages.extend(Stage::bank(&geometry, &active));
        if other.is_none() {
            let (bank, epoch) = (1 - active.index, active.header.incarnation.epoch + 1);
            let probe = Purpose::Probe { bank, epoch, incarnation: None };
            self.stages.push_back(Stage::new(probe, geometry.log_offset(bank, 0), 1));
        }
        let reader = self.reader_mut();
        reader.active = Some((active, None));
        reader.spare =
            other.filter(|other| other.header.incarnation.epoch + 1 == active.header.incarnation.epoch);
        let known = banks.iter().map(|bank| bank.header.next_generation).max();
        reader.next_generation = known.unwrap_or_default();
        Ok(())
    }

    fn add_checkpoint_page(
        &mut self,
        page: Option<&[u8]>,
        incarnation: BankIncarnation,
        sequence: u32,
    ) -> Usable {
        let owner = self.owner(incarnation, Area::Checkpoint);
        match page.map(|page| decode_page(page, &owner, sequence)) {
            Some(FoundPage::Page(head, records)) => {
                self.report.checkpoint_records += self.restore_records(head.next_generation, records);
                Usable::Yes
            }
            Some(FoundPage::Damaged | FoundPage::Absent) | None => {
                self.report.checkpoint_pages_bad += 1;
                Usable::No
            }
        }
    }

    fn add_log_page(
        &mut self,
        page: Option<&[u8]>,
        incarnation: BankIncarnation,
        sequence: u32,
        scan: &mut LogScan,
    ) {
        let owner = self.owner(incarnation, Area::Log);
        match page.map(|page| decode_page(page, &owner, sequence)) {
            Some(FoundPage::Page(head, records)) => {
                scan.valid(&head);
                self.report.log_pages += 1;
                self.report.log_records += self.restore_records(head.next_generation, records);
            }
            Some(FoundPage::Absent) => scan.missing(sequence, 0),
            Some(FoundPage::Damaged) | None => scan.missing(sequence, 1),
        }
    }

    fn restore_records(&mut self, next_generation: u64, records: PageRecords<'_>) -> u64 {
        let reader = self.journal.as_mut().expect("records are read after the superblock");
        reader.raise_generation(next_generation);
        let (mut read, mut rejected) = (0, 0);
        for record in records.iter(&mut reader.layouts) {
            read += 1;
            let restored = record.map(|record| {
                reader.next_generation = reader.next_generation.max(record.generation + 1);
                reader.slots.restore(&record)
            });
            rejected += u64::from(matches!(restored, None | Some(Restored::Rejected)));
        }
        self.report.records_rejected += rejected;
        read
    }

    /// Restarts with the other bank after a damaged checkpoint page; `false` if that cannot help.
    fn restart_with_other_bank(&mut self, bank: usize) -> bool {
        let reader = self.journal.as_mut().expect("checkpoints are read after the superblock");
        let Some((active, _)) = reader.active.filter(|(active, _)| active.index == bank) else {
            return false;
        };
        let Some(spare) = reader.spare.take() else { return false };
        let geometry = reader.superblock.geometry;
        reader.slots = Slots::new(&geometry);
        self.stages =
            Stage::bank(&geometry, &spare).into_iter().chain(Stage::bank(&geometry, &active)).collect();
        self.report.other_bank_used = true;
        (self.report.checkpoint_records, self.report.checkpoint_pages_bad) = (0, 0);
        true
    }

    fn log_read(&mut self, bank: usize, scan: LogScan) {
        let end = scan.finish();
        self.report.journal_holes += end.holes;
        let active = self.reader_mut().active.as_mut().expect("logs are read after the headers");
        if active.0.index != bank {
            // The previous bank ended with a durable append, so its last group cannot be torn.
            self.report.journal_holes += end.torn;
            return;
        }
        active.1 = Some(end);
        let copies_bad = active.0.copies_bad;
        self.report.torn_pages = end.torn;
        if end.was_active {
            self.report.bank_headers_bad += copies_bad;
        } else {
            self.report.torn_pages += copies_bad;
        }
    }

    /// Checks a page of the log of a bank without a header; `None` if it does not prove that the bank was
    /// active.
    fn probe(&self, page: Option<&[u8]>, incarnation: BankIncarnation, sequence: u32) -> Option<PageHead> {
        let owner = self.owner(incarnation, Area::Log);
        let FoundPage::Page(head, _) = decode_page(page?, &owner, sequence) else { return None };
        (u32::from(head.group_pages) < self.reader().superblock.geometry.log_pages).then_some(head)
    }

    fn activate_other_bank(&mut self, bank: usize, incarnation: BankIncarnation) {
        let geometry = self.reader().superblock.geometry;
        self.report.bank_epoch = incarnation.epoch;
        self.report.other_bank_used = true;
        let header =
            BankHeader { incarnation, next_generation: 0, checkpoint_records: 0, checkpoint_pages: 0 };
        self.reader_mut().active = Some((Bank { index: bank, header, copies_bad: 2 }, None));
        self.stages.push_back(Stage::log(&geometry, bank, incarnation));
    }

    fn owner(&self, incarnation: BankIncarnation, area: Area) -> PageOwner {
        PageOwner { pool_uuid: self.reader().superblock.pool_uuid, incarnation, area }
    }

    fn reader(&self) -> &JournalReader {
        self.journal.as_ref().expect("the journal is read after the superblock")
    }

    fn reader_mut(&mut self) -> &mut JournalReader {
        self.journal.as_mut().expect("the journal is read after the superblock")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Usable {
    Yes,
    No,
}

impl JournalReader {
    fn raise_generation(&mut self, next: u64) {
        self.next_generation = self.next_generation.max(next.min(GENERATION_MAX));
    }

    fn finish(mut self, mut report: RecoveryReport) -> (DevicePool, Vec<StoredBlock>, RecoveryReport) {
        let (active, log) = self.active.expect("the headers are read before anything is finished");
        let log = log.expect("the active log is read before anything is finished");
        let stored = self.slots.finish_restore();
        report.blocks_stored = stored.len() as u64;
        report.slots_quarantined = self.slots.tally().quarantined_slots;
        report.repair_due = !report.is_clean()
            || report.superblock_copies_outdated > 0
            || log.torn_inside > 0
            || active.copies_bad > 0;
        let repair = report.repair_due.then_some(Repair { superblock_copies: self.superblock_copies });
        let position = JournalPosition {
            bank: active.index,
            incarnation: active.header.incarnation,
            log_next: log.next,
            repair,
        };
        let recovered = RecoveredState {
            superblock: self.superblock,
            slots: self.slots,
            position,
            next_generation: self.next_generation + GENERATION_GAP,
        };
        (DevicePool::resume(recovered), stored, report)
    }
}

impl Stage {
    fn new(purpose: Purpose, area_offset: u64, pages: u32) -> Stage {
        Stage { purpose, area_offset, pages: 0..pages }
    }

    /// Returns the reads for the checkpoint and log of a bank.
    fn bank(geometry: &Geometry, bank: &Bank) -> Vec<Stage> {
        let (index, incarnation, pages) = (bank.index, bank.header.incarnation, bank.header.checkpoint_pages);
        let checkpoint = Stage::new(
            Purpose::Checkpoint { bank: index, incarnation },
            geometry.checkpoint_offset(index, 0),
            pages,
        );
        let stages = [checkpoint, Stage::log(geometry, index, incarnation)];
        stages.into_iter().filter(|stage| !stage.pages.is_empty()).collect()
    }

    fn log(geometry: &Geometry, bank: usize, incarnation: BankIncarnation) -> Stage {
        let purpose = Purpose::Log { bank, incarnation, scan: LogScan::default() };
        Stage::new(purpose, geometry.log_offset(bank, 0), geometry.log_pages)
    }

    /// Byte offset of the next page to read.
    fn offset(&self) -> u64 {
        self.area_offset + u64::from(self.pages.start) * PAGE_BYTES
    }
}

fn check_blankness(page: Option<&[u8]>) -> Result<(), PoolError> {
    match page {
        Some(page) if is_blank(page) || is_journal_page(page) => Ok(()),
        Some(page) => Err(foreign_data(page)),
        None => Err(PoolError::Corrupt { what: "the beginning of the device cannot be read".to_owned() }),
    }
}
