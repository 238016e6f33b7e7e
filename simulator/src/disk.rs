//! A device that loses, reorders and tears what was not synced.
//!
//! Pages of metadata are kept whole; a block's payload is one number per layer. A write is seen by reads from its
//! completion on, survives the death of the process from then on, and survives power loss for certain when a sync that
//! was submitted after its completion has ended. At power loss each page of every other write is kept or dropped by
//! chance; at the death of the process, each page of the writes that were running.

use std::collections::BTreeMap;

use reprise_agent_core::pool::{
    DeviceOpKind, DevicePool, PageNumber, PoolParams, Recovery, RecoveryReport, StoredBlock,
};

use crate::memory::{Tag, rot};
use crate::rng::Rng;

const PAGE: usize = 4096;
/// Of 1000 pages of a write that was cut off: those that are on the medium.
const KEPT_PERMILLE: u64 = 500;

/// See the module.
#[derive(Debug)]
pub(crate) struct Disk {
    bytes: u64,
    durable: Image,
    current: Image,
    /// Completed, not synced; numbered in order of completion.
    unsynced: Vec<(u64, Written)>,
    completed: u64,
    pub(crate) health: Health,
}

/// How the device behaves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Health {
    /// Gone for good: it must be replaced.
    pub(crate) lost: bool,
    /// Of 1000 operations: those that fail.
    pub(crate) errors_permille: u64,
    /// Operations take so many times as long.
    pub(crate) slowness: u32,
}

#[derive(Clone, Debug, Default)]
struct Image {
    pages: BTreeMap<u64, Box<[u8]>>,
    /// Payload of the slot whose header is at a page.
    payloads: BTreeMap<u64, Vec<Tag>>,
}

/// Something written.
#[derive(Clone, Debug)]
pub(crate) struct Written {
    pages: Vec<(u64, Box<[u8]>)>,
    payload: Option<(u64, Vec<Tag>)>,
}

impl Written {
    /// What an operation writes; the payload as it is in memory. `None` for a sync.
    pub(crate) fn of(kind: &DeviceOpKind, payload: &[Tag]) -> Option<Written> {
        let split = |offset: &u64, bytes: &[u8]| {
            assert!(offset.is_multiple_of(PAGE as u64) && bytes.len().is_multiple_of(PAGE), "whole pages");
            let first = offset / PAGE as u64;
            (first..).zip(bytes.chunks(PAGE).map(Box::from)).collect()
        };
        match kind {
            DeviceOpKind::WritePages { offset, bytes } => {
                Some(Written { pages: split(offset, bytes), payload: None })
            }
            DeviceOpKind::WriteBlock { offset, header, .. } => {
                let payload = Some((offset / PAGE as u64, payload.to_vec()));
                Some(Written { pages: split(offset, header), payload })
            }
            DeviceOpKind::Sync => None,
        }
    }

    /// What of it reaches the medium when it is cut off.
    pub(crate) fn torn(mut self, rng: &mut Rng) -> Written {
        self.pages.retain(|_| rng.chance(KEPT_PERMILLE));
        self.payload = self.payload.filter(|_| rng.chance(KEPT_PERMILLE));
        self
    }
}

impl Image {
    fn apply(&mut self, written: &Written) {
        for (number, page) in &written.pages {
            self.pages.insert(*number, page.clone());
        }
        if let Some((number, payload)) = &written.payload {
            self.payloads.insert(*number, payload.clone());
        }
    }
}

impl Disk {
    /// A formatted device with an empty pool. `identity` tells devices of one place from each other.
    pub(crate) fn format(bytes: u64, index: u8, identity: u64) -> Disk {
        let mut pool_uuid = [index + 1; 16];
        pool_uuid[..8].copy_from_slice(&identity.to_le_bytes());
        let (device_bytes, segment_bytes) = (bytes, 2 << 20);
        let params =
            PoolParams { device_bytes, segment_bytes, pool_uuid, device_index: index, created_unix_us: 1 };
        let mut image = Image::default();
        for (offset, bytes) in DevicePool::format(&params).expect("sound parameters") {
            let kind = DeviceOpKind::WritePages { offset, bytes };
            image.apply(&Written::of(&kind, &[]).expect("a write"));
        }
        let health = Health { slowness: 1, ..Health::default() };
        Disk { bytes, durable: image.clone(), current: image, unsynced: Vec::new(), completed: 0, health }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What an agent finds that opens the device.
    pub(crate) fn recover(&self) -> (DevicePool, Vec<StoredBlock>, RecoveryReport) {
        let mut recovery = Recovery::new(self.bytes);
        while let Some((offset, bytes)) = recovery.next_read() {
            recovery.feed(&self.read_bytes(offset, bytes)).expect("the pool is sound");
        }
        recovery.finish().expect("the pool is sound")
    }

    fn read_bytes(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let first = offset / PAGE as u64;
        let mut read = vec![0; bytes.next_multiple_of(PAGE)];
        let end = first + (read.len() / PAGE) as u64;
        for (number, page) in self.current.pages.range(first..end) {
            let at = (number - first) as usize * PAGE;
            read[at..at + PAGE].copy_from_slice(page);
        }
        read.truncate(bytes);
        read
    }

    /// A write has ended well, or part of one has reached the medium.
    pub(crate) fn complete(&mut self, written: Written) {
        self.current.apply(&written);
        self.unsynced.push((self.completed, written));
        self.completed += 1;
    }

    /// A sync submitted now makes the writes below this number durable.
    pub(crate) fn covered(&self) -> u64 {
        self.completed
    }

    /// A sync has ended.
    pub(crate) fn synced(&mut self, covered: u64) {
        for (_, written) in self.unsynced.extract_if(.., |(number, _)| *number < covered) {
            self.durable.apply(&written);
        }
    }

    /// The process that used the device died while these writes were under way: what was completed stays.
    pub(crate) fn abandon(&mut self, running: Vec<Written>, rng: &mut Rng) {
        for written in running {
            self.complete(written.torn(rng));
        }
    }

    /// Power fails while these writes are under way.
    pub(crate) fn power_loss(&mut self, running: Vec<Written>, rng: &mut Rng) {
        let unsynced = std::mem::take(&mut self.unsynced).into_iter().map(|(_, written)| written);
        for written in unsynced.chain(running) {
            self.durable.apply(&written.torn(rng));
        }
        self.current = self.durable.clone();
    }

    /// Header page and payload of the slot at a page.
    pub(crate) fn read(&self, page: PageNumber) -> (Vec<u8>, &[Tag]) {
        let payload = self.current.payloads.get(&u64::from(page.0)).map_or([].as_slice(), |payload| payload);
        (self.read_bytes(page.offset(), PAGE), payload)
    }

    /// A fault: the medium changes the payload of a slot. `which` chooses it.
    pub(crate) fn rot(&mut self, which: u64) {
        let count = self.current.payloads.len().max(1) as u64;
        let Some(page) = self.current.payloads.keys().nth((which % count) as usize).copied() else { return };
        for image in [&mut self.current, &mut self.durable] {
            if let Some(payload) = image.payloads.get_mut(&page) {
                rot(payload, which >> 32);
            }
        }
    }
}
