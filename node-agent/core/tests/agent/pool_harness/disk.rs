//! A disk that loses its unsynced writes on power loss.
//!
//! A sync covers exactly the writes that were reported done before it began, which is the weakest
//! guarantee of a real disk. On power loss every sector of every other write, reported done or not, is either
//! kept or lost, in any order.

use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;

use super::PAGE;
use super::random::Random;

/// Bytes that a disk writes atomically.
const SECTOR: usize = 512;

/// Possible outcomes of an unsynced write: nothing, everything, a prefix, any pages, any sectors.
const OUTCOMES: u64 = 5;

#[derive(Clone, Debug)]
pub(crate) struct Disk {
    bytes: u64,
    pages: BTreeMap<u64, Rc<[u8]>>,
    /// Writes that are not durable, in the order in which they began.
    volatile: Vec<Write>,
    /// For each sync in flight, the writes that it covers.
    syncs: BTreeMap<u64, BTreeSet<u64>>,
    unreadable: BTreeSet<u64>,
}

#[derive(Clone, Debug)]
struct Write {
    token: u64,
    offset: u64,
    bytes: Rc<[u8]>,
    reported: bool,
}

impl Disk {
    pub(crate) fn new(bytes: u64) -> Disk {
        Disk {
            bytes,
            pages: BTreeMap::new(),
            volatile: Vec::new(),
            syncs: BTreeMap::new(),
            unreadable: BTreeSet::new(),
        }
    }

    /// The size of the disk.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Changes the size of the disk.
    pub(crate) fn resize(&mut self, bytes: u64) {
        self.bytes = bytes;
    }

    /// The durable bytes at an offset; `None` if one of the pages is unreadable.
    pub(crate) fn read(&self, offset: u64, bytes: usize) -> Option<Vec<u8>> {
        assert!(
            offset.is_multiple_of(PAGE) && offset + bytes as u64 <= self.bytes,
            "a read lies within the disk"
        );
        let mut out = Vec::with_capacity(bytes);
        for page in (offset / PAGE..).take(bytes / 4096) {
            if self.unreadable.contains(&page) {
                return None;
            }
            match self.pages.get(&page) {
                Some(content) => out.extend_from_slice(content),
                None => out.resize(out.len() + 4096, 0),
            }
        }
        Some(out)
    }

    /// Writes durably, without the pool.
    pub(crate) fn write_durably(&mut self, offset: u64, bytes: &[u8]) {
        self.apply(offset, bytes, |_| true);
    }

    pub(crate) fn flip_bit(&mut self, offset: u64, bit: u8) {
        let page_offset = offset - offset % PAGE;
        let mut page = self.read(page_offset, 4096).expect("readable");
        page[usize::try_from(offset % PAGE).expect("small")] ^= 1 << bit;
        self.write_durably(page_offset, &page);
    }

    /// Makes a page unreadable.
    pub(crate) fn make_unreadable(&mut self, offset: u64) {
        self.unreadable.insert(offset / PAGE);
    }

    /// Byte offsets of all non-empty pages before `end`.
    pub(crate) fn written_before(&self, end: u64) -> Vec<u64> {
        let pages = self.pages.range(..end / PAGE);
        pages.filter(|(_, page)| page.iter().any(|byte| *byte != 0)).map(|(page, _)| page * PAGE).collect()
    }

    /// The disk got a write.
    pub(crate) fn write_begun(&mut self, token: u64, offset: u64, bytes: Vec<u8>) {
        assert!(
            offset.is_multiple_of(PAGE) && (bytes.len() as u64).is_multiple_of(PAGE) && !bytes.is_empty()
        );
        assert!(offset + bytes.len() as u64 <= self.bytes, "a write lies within the disk");
        self.volatile.push(Write { token, offset, bytes: bytes.into(), reported: false });
    }

    /// A write is reported done. It is not durable yet.
    pub(crate) fn write_done(&mut self, token: u64) {
        let write = self.volatile.iter_mut().find(|write| write.token == token);
        write.expect("a write is reported done once").reported = true;
    }

    /// The disk got a sync.
    pub(crate) fn sync_begun(&mut self, token: u64) {
        let covered = self.volatile.iter().filter(|write| write.reported).map(|write| write.token).collect();
        self.syncs.insert(token, covered);
    }

    /// A sync is reported done.
    pub(crate) fn sync_done(&mut self, token: u64) {
        let covered = self.syncs.remove(&token).expect("a sync is reported done once");
        let volatile = std::mem::take(&mut self.volatile);
        for write in volatile {
            if covered.contains(&write.token) {
                self.apply(write.offset, &write.bytes, |_| true);
            } else {
                self.volatile.push(write);
            }
        }
    }

    /// Power is lost: any part of the writes that were not durable is kept.
    pub(crate) fn lose_power(&mut self, random: &mut Random) {
        self.crash(random, |random, _| random.below(OUTCOMES));
    }

    /// Power is lost, and of the writes that were not durable exactly these pages are kept.
    pub(crate) fn keep_volatile(&mut self, keeps: impl Fn(u64) -> bool) {
        for write in std::mem::take(&mut self.volatile) {
            self.apply(write.offset, &write.bytes, |sector| {
                keeps(write.offset + (sector * SECTOR) as u64 / PAGE * PAGE)
            });
        }
        self.syncs.clear();
    }

    /// Power is lost, and no write that was not durable is kept.
    pub(crate) fn drop_volatile(&mut self) {
        self.volatile.clear();
        self.syncs.clear();
    }

    /// The writing process is killed: reported writes are kept, and any part of the others.
    pub(crate) fn kill(&mut self, random: &mut Random) {
        self.crash(random, |random, write| if write.reported { 1 } else { random.below(OUTCOMES) });
    }

    /// Whether this disk and `other`, a clone of an earlier state, have the same durable bytes.
    pub(crate) fn same_bytes(&self, other: &Disk) -> bool {
        let mut pairs = self.pages.iter().zip(&other.pages);
        self.pages.len() == other.pages.len()
            && pairs.all(|((number, page), (other, same))| number == other && Rc::ptr_eq(page, same))
    }

    fn crash(&mut self, random: &mut Random, mut outcome: impl FnMut(&mut Random, &Write) -> u64) {
        let mut writes = std::mem::take(&mut self.volatile);
        random.shuffle(&mut writes);
        self.syncs.clear();
        for write in writes {
            match outcome(random, &write) {
                0 => {}
                1 => self.apply(write.offset, &write.bytes, |_| true),
                2 => {
                    let kept = random.index(write.bytes.len() / SECTOR + 1);
                    self.apply(write.offset, &write.bytes, |sector| sector < kept);
                }
                3 => {
                    let pages: Vec<bool> =
                        (0..write.bytes.len() / 4096).map(|_| random.chance(1, 2)).collect();
                    self.apply(write.offset, &write.bytes, |sector| pages[sector * SECTOR / 4096]);
                }
                _ => self.apply(write.offset, &write.bytes, |_| random.chance(1, 2)),
            }
        }
    }

    fn apply(&mut self, offset: u64, bytes: &[u8], mut survives: impl FnMut(usize) -> bool) {
        let per_page = 4096 / SECTOR;
        for (number, new) in bytes.chunks_exact(4096).enumerate() {
            let kept: u32 =
                (0..per_page).map(|sector| u32::from(survives(number * per_page + sector)) << sector).sum();
            let page = offset / PAGE + number as u64;
            if kept == (1 << per_page) - 1 {
                self.pages.insert(page, new.into());
            } else if kept != 0 {
                let mut content = self.pages.get(&page).map_or_else(|| vec![0; 4096], |old| old.to_vec());
                for sector in (0..per_page).filter(|sector| kept >> sector & 1 == 1) {
                    let range = sector * SECTOR..(sector + 1) * SECTOR;
                    content[range.clone()].copy_from_slice(&new[range]);
                }
                self.pages.insert(page, content.into());
            }
        }
    }
}
