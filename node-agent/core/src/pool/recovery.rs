//! Opening a device: what to read, and what follows from it.
//!
//! [`Recovery`] says which bytes it wants next and is fed them; it reads the superblock, the bank headers, the checkpoint
//! and log of the active bank, and never a block. Nothing is written, so a crash during recovery changes nothing.
//!
//! The device must have been synced before the first read: what a killed process had written and not synced is read like
//! everything else, and is announced as durable from now on.
//!
//! What is read, in order:
//! 1. both copies of the superblock; either will do;
//! 2. both copies of both bank headers; the valid bank of the higher epoch is the active one;
//! 3. its checkpoint, then the whole of its log area.
//!
//! Where the active bank is damaged, the other one helps, because it stays complete until the next change of banks:
//! * a checkpoint page is bad: start over with the other bank's checkpoint and log, then the active bank's;
//! * only one bank has a header: see whether the log of the other one has a complete first group of the following epoch
//!   and a second group behind it. Then it was active and both copies of its header are bad: replay it, too. With
//!   the first group alone it says nothing that the bank with the header does not say.
//!
//! **Torn tail or rot.** Log pages carry the sequence of the first page of their group, and a group is written only after
//! the one before was synced. So a missing page before the last group was durable once: that is a *hole*, counted as
//! lost. A missing page inside or behind the last group may never have been acknowledged: that is a torn tail. Records
//! behind a hole and beside a torn page are applied; [`slots`](super::slots) decides by generation.
//!
//! After any damage, and after a torn append with a valid page behind a missing one or a torn header, the pool writes a new
//! bank before it appends anything.

mod log_scan;
mod opening;
mod owner;
mod report;

use std::collections::VecDeque;
use std::ops::Range;

use reprise_policy::layout::PAGE_BYTES;

use super::StoredBlock;
use super::device::{DevicePool, Recovered};
use super::error::PoolError;
use super::geometry::{Geometry, SEGMENT_ALIGNMENT, SUPERBLOCK_OFFSETS};
use super::journal::{JournalPosition, Repair};
use super::page::{PAGE, is_blank};
use super::record::{
    Area, BankLife, FoundPage, LayoutCache, PageHead, PageOwner, PageRecords, decode_page, life_of,
};
use super::slots::{Restored, Slots};
use super::superblock::{BankHeader, FoundSuperblock, GENERATION_MAX, Superblock};
use log_scan::{LogEnd, LogScan};
use opening::{Bank, FoundHeader, Identity, Trace, foreign_data, identify, is_journal_page, rank_banks};
pub use owner::{OWNER_BYTES, owner};
pub use report::RecoveryReport;

/// Bytes of one read at the most.
pub const READ_BYTES_MAX: usize = 4 << 20;

/// Generations skipped after a recovery, so that no write that was under way at the crash shares one with a later
/// write: far more than the blocks of [`BATCHES_MAX`](super::BATCHES_MAX) batches.
const GENERATION_GAP: u64 = 1 << 20;

/// A device being opened.
#[derive(Debug)]
pub struct Recovery {
    device_bytes: u64,
    stages: VecDeque<Stage>,
    /// Reads before this offset are of one page: a larger one failed.
    careful_until: u64,
    superblocks: Vec<FoundSuperblock>,
    headers: Vec<FoundHeader>,
    journal: Option<JournalReader>,
    report: RecoveryReport,
}

/// What is known once the superblock is.
#[derive(Debug)]
struct JournalReader {
    superblock: Superblock,
    superblock_copies: [bool; 2],
    slots: Slots,
    next_generation: u64,
    layouts: LayoutCache,
    /// The bank whose log goes on, and what its log looks like.
    active: Option<(Bank, Option<LogEnd>)>,
    /// The bank that the active one was begun from, while it has not been read.
    spare: Option<Bank>,
}

/// A run of pages to read, and what for.
#[derive(Clone, Debug)]
struct Stage {
    purpose: Purpose,
    /// Byte offset of page 0 of the area that `pages` counts in.
    area_offset: u64,
    /// Pages still to be read.
    pages: Range<u32>,
}

#[derive(Clone, Debug)]
enum Purpose {
    Superblock,
    /// Both copies of the superblock are blank: is everything?
    Blankness,
    BankHeader {
        bank: usize,
    },
    Checkpoint {
        bank: usize,
        life: BankLife,
    },
    Log {
        bank: usize,
        life: BankLife,
        scan: LogScan,
    },
    /// Was this bank without a header active once, in this epoch?
    Probe {
        bank: usize,
        epoch: u64,
        life: Option<BankLife>,
    },
}

impl Recovery {
    /// Begins to open a device of so many bytes.
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

    /// What to read next: byte offset and length (whole pages, at most [`READ_BYTES_MAX`]). `None` when nothing more is
    /// wanted: call [`Recovery::finish`].
    pub fn next_read(&self) -> Option<(u64, usize)> {
        let stage = self.stages.front()?;
        let offset = stage.offset();
        let bytes =
            if offset < self.careful_until { PAGE } else { (stage.pages.len() * PAGE).min(READ_BYTES_MAX) };
        Some((offset, bytes))
    }

    /// Takes what was read.
    ///
    /// # Errors
    /// [`PoolError::WrongRead`] when it is not as long as [`Recovery::next_read`] said; any other when the device
    /// cannot be opened.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), PoolError> {
        let (offset, expected) = self.next_read().unwrap_or_default();
        if bytes.len() != expected || expected == 0 {
            return Err(PoolError::WrongRead { expected, found: bytes.len() });
        }
        for (page, at) in bytes.chunks_exact(PAGE).zip((offset..).step_by(PAGE)) {
            // What is wanted may change with every page; the rest of the read is of no use then.
            if self.next_read().is_none_or(|(wanted, _)| wanted != at) {
                break;
            }
            self.feed_page(Some(page))?;
        }
        Ok(())
    }

    /// Says that the read failed. A long one is asked for again page by page; a page that cannot be read counts as damaged.
    ///
    /// # Errors
    /// As [`Recovery::feed`].
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

    /// The pool, its stored blocks in the order of the device, and what was found on the way. The same key may occur
    /// more than once: free all but one.
    ///
    /// # Errors
    /// [`PoolError::Unfinished`] while something is still to be read, [`PoolError::NotFormatted`] when there is no pool.
    pub fn finish(self) -> Result<(DevicePool, Vec<StoredBlock>, RecoveryReport), PoolError> {
        if !self.stages.is_empty() {
            return Err(PoolError::Unfinished);
        }
        let Some(reader) = self.journal else { return Err(PoolError::NotFormatted) };
        if reader.next_generation >= GENERATION_MAX / 2 {
            return Err(PoolError::Corrupt { what: "its generations have run out".to_owned() });
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
            Purpose::BankHeader { bank } => self.take_header(*bank, page),
            Purpose::Checkpoint { bank, life } => {
                let (bank, life) = (*bank, *life);
                if self.take_checkpoint_page(page, life, sequence) == Usable::No && self.start_over(bank) {
                    return Ok(());
                }
            }
            Purpose::Log { life, scan, .. } => self.take_log_page(page, *life, sequence, scan),
            Purpose::Probe { epoch, life, .. } => {
                let found = page.map(life_of).filter(|found| found.epoch == *epoch);
                let Some(known) = life.or(found) else { return Ok(()) };
                *life = Some(known);
                match self.probe(page, known, sequence) {
                    Some(head) if sequence == 0 => stage.pages.end = u32::from(head.group_pages) + 1,
                    Some(head) if stage.pages.is_empty() && head.group_first != sequence => return Ok(()),
                    Some(_) => {}
                    None => return Ok(()),
                }
            }
        }
        if stage.pages.is_empty() {
            self.stage_done(stage.purpose)
        } else {
            self.stages.push_front(stage);
            Ok(())
        }
    }

    fn stage_done(&mut self, purpose: Purpose) -> Result<(), PoolError> {
        match purpose {
            Purpose::Superblock if self.stages.is_empty() => self.superblock_known(),
            Purpose::BankHeader { .. } if self.stages.is_empty() => self.banks_known(),
            Purpose::Superblock
            | Purpose::BankHeader { .. }
            | Purpose::Blankness
            | Purpose::Checkpoint { .. } => Ok(()),
            Purpose::Log { bank, scan, .. } => {
                self.log_done(bank, scan);
                Ok(())
            }
            Purpose::Probe { bank, life, .. } => {
                self.other_was_active(bank, life.expect("a probe that found nothing ends early"));
                Ok(())
            }
        }
    }

    fn superblock_known(&mut self) -> Result<(), PoolError> {
        let (superblock, copies) = match identify(&self.superblocks)? {
            Identity::Blank => {
                let bytes = SEGMENT_ALIGNMENT.min(self.device_bytes - self.device_bytes % PAGE_BYTES);
                let pages = u32::try_from(bytes / PAGE_BYTES).expect("2 MiB at the most");
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
        self.report.superblock_copies_older = copies.older;
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

    fn take_header(&mut self, bank: usize, page: Option<&[u8]>) {
        let superblock = self.reader().superblock;
        let header = page.and_then(|page| BankHeader::decode(page, &superblock, bank));
        let trace = if page.is_some_and(is_blank) { Trace::Blank } else { Trace::Written };
        self.headers.push(FoundHeader { bank, header, trace });
    }

    fn banks_known(&mut self) -> Result<(), PoolError> {
        let banks = rank_banks(&self.headers)?;
        let (active, other) = (banks[0], banks.get(1).copied());
        self.report.bank_epoch = active.header.life.epoch;
        let geometry = self.reader().superblock.geometry;
        self.stages.extend(Stage::bank(&geometry, &active));
        if other.is_none() {
            let (bank, epoch) = (1 - active.index, active.header.life.epoch + 1);
            let probe = Purpose::Probe { bank, epoch, life: None };
            self.stages.push_back(Stage::new(probe, geometry.log_offset(bank, 0), 1));
        }
        let reader = self.reader_mut();
        reader.active = Some((active, None));
        reader.spare = other.filter(|other| other.header.life.epoch + 1 == active.header.life.epoch);
        let known = banks.iter().map(|bank| bank.header.next_generation).max();
        reader.next_generation = known.unwrap_or_default();
        Ok(())
    }

    fn take_checkpoint_page(&mut self, page: Option<&[u8]>, life: BankLife, sequence: u32) -> Usable {
        let owner = self.owner(life, Area::Checkpoint);
        match page.map(|page| decode_page(page, &owner, sequence)) {
            Some(FoundPage::Page(head, records)) => {
                self.report.checkpoint_records += self.take_records(head.next_generation, records);
                Usable::Yes
            }
            Some(FoundPage::Damaged | FoundPage::Absent) | None => {
                self.report.checkpoint_pages_bad += 1;
                Usable::No
            }
        }
    }

    fn take_log_page(&mut self, page: Option<&[u8]>, life: BankLife, sequence: u32, scan: &mut LogScan) {
        let owner = self.owner(life, Area::Log);
        match page.map(|page| decode_page(page, &owner, sequence)) {
            Some(FoundPage::Page(head, records)) => {
                scan.valid(&head);
                self.report.log_pages += 1;
                self.report.log_records += self.take_records(head.next_generation, records);
            }
            Some(FoundPage::Absent) => scan.missing(sequence, 0),
            Some(FoundPage::Damaged) | None => scan.missing(sequence, 1),
        }
    }

    fn take_records(&mut self, next_generation: u64, records: PageRecords<'_>) -> u64 {
        let reader = self.journal.as_mut().expect("records are read after the superblock");
        reader.saw_generation(next_generation);
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

    /// A checkpoint page of this bank is bad: begins again with the other bank, if that can help.
    fn start_over(&mut self, bank: usize) -> bool {
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

    fn log_done(&mut self, bank: usize, scan: LogScan) {
        let end = scan.finish();
        self.report.journal_holes += end.holes;
        let active = self.reader_mut().active.as_mut().expect("logs are read after the headers");
        if active.0.index != bank {
            // The bank before the active one ended with a durable append: its last group cannot be torn.
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

    /// Looks at a page of the log of a bank without a header; `None` when it does not show that the bank was active.
    fn probe(&self, page: Option<&[u8]>, life: BankLife, sequence: u32) -> Option<PageHead> {
        let owner = self.owner(life, Area::Log);
        let FoundPage::Page(head, _) = decode_page(page?, &owner, sequence) else { return None };
        (u32::from(head.group_pages) < self.reader().superblock.geometry.log_pages).then_some(head)
    }

    fn other_was_active(&mut self, bank: usize, life: BankLife) {
        let geometry = self.reader().superblock.geometry;
        self.report.bank_epoch = life.epoch;
        self.report.other_bank_used = true;
        let header = BankHeader { life, next_generation: 0, checkpoint_records: 0, checkpoint_pages: 0 };
        self.reader_mut().active = Some((Bank { index: bank, header, copies_bad: 2 }, None));
        self.stages.push_back(Stage::log(&geometry, bank, life));
    }

    fn owner(&self, life: BankLife, area: Area) -> PageOwner {
        PageOwner { pool_uuid: self.reader().superblock.pool_uuid, life, area }
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
    fn saw_generation(&mut self, next: u64) {
        self.next_generation = self.next_generation.max(next.min(GENERATION_MAX));
    }

    fn finish(mut self, mut report: RecoveryReport) -> (DevicePool, Vec<StoredBlock>, RecoveryReport) {
        let (active, log) = self.active.expect("the headers are read before anything is finished");
        let log = log.expect("the active log is read before anything is finished");
        let stored = self.slots.finish_restore();
        report.blocks_stored = stored.len() as u64;
        report.slots_quarantined = self.slots.tally().quarantined_slots;
        report.repair_due = !report.is_clean()
            || report.superblock_copies_older > 0
            || log.torn_inside > 0
            || active.copies_bad > 0;
        let repair = report.repair_due.then_some(Repair { superblock_copies: self.superblock_copies });
        let position =
            JournalPosition { bank: active.index, life: active.header.life, log_next: log.next, repair };
        let recovered = Recovered {
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

    /// Checkpoint and log of a bank.
    fn bank(geometry: &Geometry, bank: &Bank) -> Vec<Stage> {
        let (index, life, pages) = (bank.index, bank.header.life, bank.header.checkpoint_pages);
        let checkpoint = Stage::new(
            Purpose::Checkpoint { bank: index, life },
            geometry.checkpoint_offset(index, 0),
            pages,
        );
        let stages = [checkpoint, Stage::log(geometry, index, life)];
        stages.into_iter().filter(|stage| !stage.pages.is_empty()).collect()
    }

    fn log(geometry: &Geometry, bank: usize, life: BankLife) -> Stage {
        let purpose = Purpose::Log { bank, life, scan: LogScan::default() };
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
