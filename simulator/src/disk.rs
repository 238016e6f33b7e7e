//! A device that loses, reorders and tears writes that were not synced.
//!
//! Metadata pages are stored as bytes; a block's payload is one number per layer. A completed write is
//! visible to reads and survives the death of the process. It is certain to survive a power loss once a sync
//! that was submitted after its completion has ended. A power loss keeps or drops each page of every other
//! write at random. The death of the process does the same to the writes in flight.

use std::collections::BTreeMap;

use reprise_agent_core::pool::{
    DeviceOpKind, DevicePool, PageNumber, PoolParams, Recovery, RecoveryReport, StoredBlock,
};

use crate::memory::{Tag, rot};
use crate::rng::Rng;

const PAGE: usize = 4096;
/// Of 1000 pages of an interrupted write: those that reach the medium.
const KEPT_PERMILLE: u64 = 500;

/// A simulated device; see the module.
#[derive(Debug)]
pub(crate) struct Disk {
    bytes: u64,
    durable: Image,
    current: Image,
    /// Completed writes that are not synced, numbered in order of completion.
    unsynced: Vec<(u64, DiskWrite)>,
    completed: u64,
    pub(crate) health: Health,
}

/// Condition of the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Health {
    /// Permanently lost: the device must be replaced.
    pub(crate) lost: bool,
    /// Of 1000 operations: those that fail.
    pub(crate) errors_permille: u64,
    /// Factor on the duration of operations.
    pub(crate) slowness: u32,
}

#[derive(Clone, Debug, Default)]
struct Image {
    pages: BTreeMap<u64, Box<[u8]>>,
    /// Payload of the slot whose header is at a page.
    payloads: BTreeMap<u64, Vec<Tag>>,
}

/// The data of one write.
#[derive(Clone, Debug)]
pub(crate) struct DiskWrite {
    pages: Vec<(u64, Box<[u8]>)>,
    payload: Option<(u64, Vec<Tag>)>,
}

impl DiskWrite {
    /// Returns the data that an operation writes, with the payload in memory. `None` for a sync.
    pub(crate) fn of(kind: &DeviceOpKind, payload: &[Tag]) -> Option<DiskWrite> {
        let split = |offset: &u64, bytes: &[u8]| {
            assert!(offset.is_multiple_of(PAGE as u64) && bytes.len().is_multiple_of(PAGE), "whole pages");
            let first = offset / PAGE as u64;
            (first..).zip(bytes.chunks(PAGE).map(Box::from)).collect()
        };
        match kind {
            DeviceOpKind::WritePages { offset, bytes } => {
                Some(DiskWrite { pages: split(offset, bytes), payload: None })
            }
            DeviceOpKind::WriteBlock { offset, header, .. } => {
                let payload = Some((offset / PAGE as u64, payload.to_vec()));
                Some(DiskWrite { pages: split(offset, header), payload })
            }
            DeviceOpKind::WriteHeader { offset, header } => {
                Some(DiskWrite { pages: split(offset, header), payload: None })
            }
            DeviceOpKind::Sync => None,
        }
    }

    /// Returns the payload that a holder of an extent writes behind the header page.
    pub(crate) fn of_holder(page: PageNumber, payload: Vec<Tag>) -> DiskWrite {
        DiskWrite { pages: Vec::new(), payload: Some((page.0, payload)) }
    }

    /// Returns the part that reaches the medium when the write is interrupted.
    pub(crate) fn torn(mut self, rng: &mut Rng) -> DiskWrite {
        self.pages.retain(|_| rng.chance(KEPT_PERMILLE));
        self.payload = self.payload.filter(|_| rng.chance(KEPT_PERMILLE));
        self
    }
}

impl Image {
    fn apply(&mut self, written: &DiskWrite) {
        for (number, page) in &written.pages {
            self.pages.insert(*number, page.clone());
        }
        if let Some((number, payload)) = &written.payload {
            self.payloads.insert(*number, payload.clone());
        }
    }
}

impl Disk {
    /// Creates a formatted device with an empty pool. `identity` distinguishes the devices of one place.
    pub(crate) fn format((bytes, segment_bytes): (u64, u64), index: u8, identity: u64) -> Disk {
        let mut pool_uuid = [index + 1; 16];
        pool_uuid[..8].copy_from_slice(&identity.to_le_bytes());
        let params = PoolParams {
            device_bytes: bytes,
            segment_bytes,
            pool_uuid,
            device_index: index,
            created_unix_us: 1,
        };
        let mut image = Image::default();
        for (offset, bytes) in DevicePool::format(&params).expect("sound parameters") {
            let kind = DeviceOpKind::WritePages { offset, bytes };
            image.apply(&DiskWrite::of(&kind, &[]).expect("a write"));
        }
        let health = Health { slowness: 1, ..Health::default() };
        Disk { bytes, durable: image.clone(), current: image, unsynced: Vec::new(), completed: 0, health }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the state that an agent recovers when it opens the device.
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

    /// Applies a write that has completed, or the part of one that has reached the medium.
    pub(crate) fn complete(&mut self, written: DiskWrite) {
        self.current.apply(&written);
        self.unsynced.push((self.completed, written));
        self.completed += 1;
    }

    /// As [`Disk::complete`], but no sync covers the write. Only injected flaws need this.
    pub(crate) fn complete_outside_of_syncs(&mut self, written: DiskWrite) {
        self.current.apply(&written);
        self.unsynced.push((u64::MAX, written));
    }

    /// As [`Disk::complete`], but the payload gets into the slot that `which` selects. Only injected flaws need this.
    pub(crate) fn complete_misdirected(&mut self, mut written: DiskWrite, which: u64) {
        let count = self.current.payloads.len().max(1) as u64;
        let other = self.current.payloads.keys().nth((which % count) as usize).copied();
        if let (Some((page, _)), Some(other)) = (&mut written.payload, other) {
            *page = other;
        }
        self.complete(written);
    }

    /// Returns the number below which a sync submitted now makes writes durable.
    pub(crate) fn covered(&self) -> u64 {
        self.completed
    }

    /// Applies a sync that has ended.
    pub(crate) fn synced(&mut self, covered: u64) {
        for (_, written) in self.unsynced.extract_if(.., |(number, _)| *number < covered) {
            self.durable.apply(&written);
        }
    }

    /// Handles the death of the process during these writes: completed writes survive.
    pub(crate) fn abandon(&mut self, running: Vec<DiskWrite>, rng: &mut Rng) {
        for written in running {
            self.complete(written.torn(rng));
        }
    }

    /// Handles a power loss during these writes.
    pub(crate) fn power_loss(&mut self, running: Vec<DiskWrite>, rng: &mut Rng) {
        let unsynced = std::mem::take(&mut self.unsynced).into_iter().map(|(_, written)| written);
        for written in unsynced.chain(running) {
            self.durable.apply(&written.torn(rng));
        }
        self.current = self.durable.clone();
    }

    /// Returns header page and payload of the slot at a page.
    pub(crate) fn read(&self, page: PageNumber) -> (Vec<u8>, &[Tag]) {
        let payload = self.current.payloads.get(&page.0).map_or([].as_slice(), |payload| payload);
        (self.read_bytes(page.offset(), PAGE), payload)
    }

    /// Injects a fault: the medium changes the payload of a slot, selected by `which`.
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
