//! The journal: records become durable in groups of pages, and the log is kept short by changing banks.
//!
//! **Appending.** Records queue up. One group at a time is written behind the log and synced; only then are its records
//! *committed* and the next group is written. So a later group on the device proves that every earlier one was durable.
//! Pages are padded, never rewritten.
//!
//! **Changing banks.** When the log is half full, everything stored is copied into the other bank:
//! ```text
//! Copy        checkpoint pages, a few writes at a time, while appends go on in the old log;
//!             records committed meanwhile are remembered (the tail)
//! Drain       no new group; wait for the one in flight
//! Body        tail pages at the beginning of the new log; then one sync for checkpoint and tail
//! Header      both copies of the new header; then one sync
//!             the new bank is active, appends go on in it
//! ```
//! The checkpoint is not a snapshot of one instant: a slot is copied as it is when the copy comes by. That is sound
//! because every change since the copy began is in the tail or behind it, and replay of records is idempotent
//! ([`slots`](super::slots)). Until the new header is durable the old bank is complete; both banks say the same then.
//!
//! After a recovery that found damage, nothing is appended before a change of banks has written a whole new bank.
//!
//! Deliberately absent: retries. After a failed write or sync of the journal nobody knows what the device holds.

use std::collections::VecDeque;

use reprise_policy::layout::PAGE_BYTES;

use super::BatchId;
use super::geometry::GROUP_PAGES_MAX;
use super::geometry::SUPERBLOCK_OFFSETS;
use super::page::PAGE;
use super::record::{
    Area, BankLife, PageHead, PageOwner, RECORDS_PER_PAGE, Record, encode_group, encode_page, group_pages,
};
use super::slots::{SlotPlace, Slots};
use super::superblock::{BankHeader, Superblock};

/// Pages of one checkpoint write: 128 KiB, 2,016 records, about 100 µs to encode.
const CHUNK_PAGES: u32 = 32;

/// Checkpoint writes in flight: enough to keep a device busy, 512 KiB of memory.
const CHUNKS_IN_FLIGHT_MAX: u32 = 4;

/// Records of one append at the most.
const GROUP_RECORDS_MAX: usize = GROUP_PAGES_MAX as usize * RECORDS_PER_PAGE;

/// A record on its way into the log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queued {
    /// The record.
    pub(super) record: Record,
    /// The batch that waits for it.
    pub(super) batch: Option<BatchId>,
}

/// What the journal wants written.
#[derive(Debug)]
pub(super) struct JournalWrite {
    /// Whether it is part of the group in flight or of the change of banks.
    pub(super) part: JournalPart,
    /// Byte offset on the device.
    pub(super) offset: u64,
    /// Whole pages.
    pub(super) bytes: Vec<u8>,
}

/// What a write or sync of the journal is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JournalPart {
    /// The group in flight.
    Group,
    /// The change of banks.
    Flip,
}

/// What the journal wants done next.
#[derive(Debug, Default)]
pub(super) struct JournalWants {
    /// Writes to start.
    pub(super) writes: Vec<JournalWrite>,
    /// Parts that wait for a sync from now on.
    pub(super) syncs: Vec<JournalPart>,
}

/// Where appending goes on after formatting or recovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct JournalPosition {
    /// The active bank.
    pub(super) bank: usize,
    /// Its life.
    pub(super) life: BankLife,
    /// First log page that may be written.
    pub(super) log_next: u32,
    /// What has to be made good first.
    pub(super) repair: Option<Repair>,
}

/// Damage that recovery has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Repair {
    /// Copies of the superblock to write again.
    pub(super) superblock_copies: [bool; 2],
}

/// The writer.
#[derive(Debug)]
pub(super) struct Journal {
    superblock: Superblock,
    position: JournalPosition,
    queue: VecDeque<Queued>,
    group: Vec<Queued>,
    flip: Option<Flip>,
    /// Bank changes since the pool was opened.
    checkpoints: u64,
    /// Records committed since the pool was opened.
    records: u64,
}

#[derive(Debug)]
struct Flip {
    bank: usize,
    /// Blocks of the generation in which this life was begun, and later ones, are in the tail or behind it, if they are
    /// stored at all.
    owner: PageOwner,
    phase: FlipPhase,
    cursor: SlotPlace,
    copied: Copied,
    pages: u32,
    records: u64,
    writes_in_flight: u32,
    tail: Vec<Record>,
    tail_pages: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FlipPhase {
    Copy,
    Drain,
    Body,
    BodySync,
    Header,
    HeaderSync,
}

/// How far the copy has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copied {
    Partly,
    Wholly,
}

impl Journal {
    /// A writer that goes on at `position`.
    pub(super) fn new(superblock: &Superblock, position: JournalPosition) -> Journal {
        Journal {
            superblock: *superblock,
            position,
            queue: VecDeque::new(),
            group: Vec::new(),
            flip: None,
            checkpoints: 0,
            records: 0,
        }
    }

    /// Queues a record.
    pub(super) fn push(&mut self, record: Record, batch: Option<BatchId>) {
        self.queue.push_back(Queued { record, batch });
    }

    /// Starts whatever can be started.
    pub(super) fn advance(&mut self, slots: &Slots, next_generation: u64, wants: &mut JournalWants) {
        if self.flip.is_none() && self.flip_is_due() {
            self.begin_flip(next_generation);
        }
        self.advance_flip(slots, next_generation, wants);
        if self.may_append() {
            self.begin_group(next_generation, wants);
        }
    }

    /// The group in flight is durable: its records are committed.
    pub(super) fn group_synced(&mut self) -> Vec<Queued> {
        let group = std::mem::take(&mut self.group);
        self.records += group.len() as u64;
        if let Some(flip) = &mut self.flip {
            flip.tail.extend(group.iter().map(|queued| queued.record));
        }
        group
    }

    /// A write of the change of banks was done.
    pub(super) fn flip_written(&mut self) {
        let flip = self.flip.as_mut().expect("a flip lasts until its last write is done");
        flip.writes_in_flight -= 1;
    }

    /// A sync that the change of banks waited for was done.
    pub(super) fn flip_synced(&mut self, next_generation: u64, wants: &mut JournalWants) {
        let flip = self.flip.as_mut().expect("a flip lasts until its last sync is done");
        match flip.phase {
            FlipPhase::BodySync => {
                let header = BankHeader {
                    life: flip.owner.life,
                    next_generation,
                    checkpoint_records: flip.records,
                    checkpoint_pages: flip.pages,
                };
                let page = header.encode(&self.superblock, flip.bank);
                for offset in self.superblock.geometry.header_offsets(flip.bank) {
                    flip.write(offset, page.clone(), wants);
                }
                flip.phase = FlipPhase::Header;
            }
            FlipPhase::HeaderSync => {
                self.position = JournalPosition {
                    bank: flip.bank,
                    life: flip.owner.life,
                    log_next: flip.tail_pages,
                    repair: None,
                };
                self.flip = None;
                self.checkpoints += 1;
            }
            phase => unreachable!("no sync was wanted in {phase:?}"),
        }
    }

    /// Bank changes since the pool was opened.
    pub(super) fn checkpoints(&self) -> u64 {
        self.checkpoints
    }

    /// Records committed since the pool was opened.
    pub(super) fn records(&self) -> u64 {
        self.records
    }

    /// Bytes of the log in use.
    pub(super) fn log_bytes_used(&self) -> u64 {
        u64::from(self.position.log_next) * PAGE_BYTES
    }

    /// Drops everything that has not been written: the device is lost.
    pub(super) fn abandon(&mut self) {
        self.queue.clear();
        self.group.clear();
        self.flip = None;
    }

    fn flip_is_due(&self) -> bool {
        self.position.repair.is_some() || self.position.log_next >= self.superblock.geometry.log_pages / 2
    }

    fn begin_flip(&mut self, next_generation: u64) {
        let life = BankLife { epoch: self.position.life.epoch + 1, begun: next_generation };
        self.flip = Some(Flip {
            bank: 1 - self.position.bank,
            owner: PageOwner { pool_uuid: self.superblock.pool_uuid, life, area: Area::Checkpoint },
            phase: FlipPhase::Copy,
            cursor: Slots::FIRST_PLACE,
            copied: Copied::Partly,
            pages: 0,
            records: 0,
            writes_in_flight: 0,
            tail: Vec::new(),
            tail_pages: 0,
        });
    }

    fn advance_flip(&mut self, slots: &Slots, next_generation: u64, wants: &mut JournalWants) {
        let Some(flip) = &mut self.flip else { return };
        if flip.phase == FlipPhase::Copy {
            flip.copy(slots, &self.superblock, next_generation, wants);
        }
        if flip.phase == FlipPhase::Drain && self.group.is_empty() {
            flip.write_tail(&self.superblock, next_generation, wants);
            let copies = self.position.repair.map_or([false; 2], |repair| repair.superblock_copies);
            for (offset, _) in SUPERBLOCK_OFFSETS.into_iter().zip(copies).filter(|(_, bad)| *bad) {
                flip.write(offset, self.superblock.encode(), wants);
            }
            flip.phase = FlipPhase::Body;
        }
        let next = match flip.phase {
            FlipPhase::Body => FlipPhase::BodySync,
            FlipPhase::Header => FlipPhase::HeaderSync,
            _ => return,
        };
        if flip.writes_in_flight == 0 {
            flip.phase = next;
            wants.syncs.push(JournalPart::Flip);
        }
    }

    fn may_append(&self) -> bool {
        let open = match &self.flip {
            None => true,
            Some(flip) => flip.phase == FlipPhase::Copy && self.position.repair.is_none(),
        };
        open && self.group.is_empty() && !self.queue.is_empty()
    }

    fn begin_group(&mut self, next_generation: u64, wants: &mut JournalWants) {
        let room = self.superblock.geometry.log_pages - self.position.log_next;
        let records = (room as usize * RECORDS_PER_PAGE).min(GROUP_RECORDS_MAX).min(self.queue.len());
        if records == 0 {
            return;
        }
        self.group.extend(self.queue.drain(..records));
        let records: Vec<Record> = self.group.iter().map(|queued| queued.record).collect();
        let owner =
            PageOwner { pool_uuid: self.superblock.pool_uuid, life: self.position.life, area: Area::Log };
        let first = self.position.log_next;
        self.position.log_next += group_pages(records.len());
        wants.writes.push(JournalWrite {
            part: JournalPart::Group,
            offset: self.superblock.geometry.log_offset(self.position.bank, first),
            bytes: encode_group(&owner, first, next_generation, &records),
        });
    }
}

impl Flip {
    /// Starts checkpoint writes; goes on to the next phase when all are done.
    fn copy(
        &mut self,
        slots: &Slots,
        superblock: &Superblock,
        next_generation: u64,
        wants: &mut JournalWants,
    ) {
        while self.copied == Copied::Partly && self.writes_in_flight < CHUNKS_IN_FLIGHT_MAX {
            let first = self.pages;
            let bytes = self.next_chunk(slots, next_generation);
            if !bytes.is_empty() {
                assert!(
                    self.pages <= superblock.geometry.checkpoint_pages,
                    "entries are bounded by what fits"
                );
                self.write(superblock.geometry.checkpoint_offset(self.bank, first), bytes, wants);
            }
        }
        if self.copied == Copied::Wholly && self.writes_in_flight == 0 {
            self.phase = FlipPhase::Drain;
        }
    }

    fn next_chunk(&mut self, slots: &Slots, next_generation: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut records = Vec::with_capacity(RECORDS_PER_PAGE);
        for _ in 0..CHUNK_PAGES {
            records.clear();
            while records.len() < RECORDS_PER_PAGE {
                let Some((place, next)) = slots.next_place(self.cursor) else {
                    self.copied = Copied::Wholly;
                    break;
                };
                self.cursor = next;
                records.extend(
                    slots.record_at(place).filter(|record| record.generation < self.owner.life.begun),
                );
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

    /// Starts the writes of the first group of the new log: at least one page, which marks the log as begun.
    fn write_tail(&mut self, superblock: &Superblock, next_generation: u64, wants: &mut JournalWants) {
        let owner = PageOwner { area: Area::Log, ..self.owner };
        let bytes = encode_group(&owner, 0, next_generation, &self.tail);
        self.tail_pages = group_pages(self.tail.len());
        self.tail = Vec::new();
        let mut offset = superblock.geometry.log_offset(self.bank, 0);
        for chunk in bytes.chunks(CHUNK_PAGES as usize * PAGE) {
            self.write(offset, chunk.to_vec(), wants);
            offset += chunk.len() as u64;
        }
    }

    fn write(&mut self, offset: u64, bytes: Vec<u8>, wants: &mut JournalWants) {
        self.writes_in_flight += 1;
        wants.writes.push(JournalWrite { part: JournalPart::Flip, offset, bytes });
    }
}
