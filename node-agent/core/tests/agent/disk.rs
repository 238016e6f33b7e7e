//! Simulated device that loses unsynced writes.
//!
//! Metadata pages are kept as bytes, and the payload of a block as one number per layer. Reads see a write
//! from its completion on. A write certainly survives a crash if a sync that was submitted after its
//! completion has ended. At a crash, each page of every other write, completed or not, is kept or dropped at
//! random.

use std::collections::BTreeMap;

use reprise_agent_core::pool::{
    DeviceOpKind, DevicePool, PageNumber, PoolParams, Recovery, RecoveryReport, StoredBlock,
};

use crate::memory::Tag;
use crate::rng::Rng;

const PAGE: usize = 4096;

/// Durable image, and completed writes that are not synced.
#[derive(Debug)]
pub(crate) struct Disk {
    bytes: u64,
    durable: Image,
    current: Image,
    /// Completed, unsynced writes, numbered in order of completion.
    unsynced: Vec<(u64, DiskWrite)>,
    completed: u64,
    /// Whether payloads may differ from their checksums, because a test damages memory or device.
    pub(crate) may_differ: bool,
}

#[derive(Clone, Debug, Default)]
struct Image {
    pages: BTreeMap<u64, Box<[u8]>>,
    /// Payload of the slot whose header is at a page.
    payloads: BTreeMap<u64, Vec<Tag>>,
}

/// Content of a write operation.
#[derive(Clone, Debug)]
pub(crate) struct DiskWrite {
    first_page: u64,
    pages: Vec<Box<[u8]>>,
    payload: Option<Vec<Tag>>,
}

impl DiskWrite {
    /// Content of an operation; the payload is read from memory.
    pub(crate) fn of(kind: &DeviceOpKind, payload: &[Tag]) -> Option<DiskWrite> {
        let split = |bytes: &[u8]| bytes.chunks(PAGE).map(Box::from).collect();
        match kind {
            DeviceOpKind::WritePages { offset, bytes } => {
                assert!(offset % PAGE as u64 == 0 && bytes.len() % PAGE == 0, "whole pages");
                Some(DiskWrite { first_page: offset / PAGE as u64, pages: split(bytes), payload: None })
            }
            DeviceOpKind::WriteBlock { offset, header, .. } => Some(DiskWrite {
                first_page: offset / PAGE as u64,
                pages: split(header),
                payload: Some(payload.to_vec()),
            }),
            DeviceOpKind::WriteHeader { offset, header } => {
                let first_page = offset / PAGE as u64;
                Some(DiskWrite { first_page, pages: split(header), payload: None })
            }
            DeviceOpKind::Sync => None,
        }
    }
}

impl DiskWrite {
    /// Payload that a client writes behind the header page of a slot.
    pub(crate) fn of_client(page: PageNumber, payload: Vec<Tag>) -> DiskWrite {
        DiskWrite { first_page: page.0, pages: Vec::new(), payload: Some(payload) }
    }
}

impl Image {
    fn apply(&mut self, written: &DiskWrite, keep: impl FnMut(usize) -> bool) {
        let mut keep = keep;
        for (at, page) in written.pages.iter().enumerate() {
            if keep(at) {
                self.pages.insert(written.first_page + at as u64, page.clone());
            }
        }
        if let Some(payload) = written.payload.as_ref().filter(|_| keep(written.pages.len())) {
            self.payloads.insert(written.first_page, payload.clone());
        }
    }

    fn page(&self, page: u64) -> Box<[u8]> {
        self.pages.get(&page).cloned().unwrap_or_else(|| vec![0; PAGE].into_boxed_slice())
    }
}

impl Disk {
    /// Formats a device; returns it with its empty pool.
    pub(crate) fn format(bytes: u64, index: u8) -> (Disk, DevicePool) {
        let params = PoolParams {
            device_bytes: bytes,
            segment_bytes: 2 << 20,
            pool_uuid: [index + 1; 16],
            device_index: index,
            created_unix_us: 1,
        };
        let mut image = Image::default();
        for (offset, bytes) in DevicePool::format(&params).expect("valid parameters") {
            let kind = DeviceOpKind::WritePages { offset, bytes };
            image.apply(&DiskWrite::of(&kind, &[]).expect("a write"), |_| true);
        }
        let disk = Disk {
            bytes,
            durable: image.clone(),
            current: image,
            unsynced: Vec::new(),
            completed: 0,
            may_differ: true,
        };
        let (pool, stored, _) = disk.recover();
        assert!(stored.is_empty());
        (disk, pool)
    }

    /// Recovers the pool from the durable image.
    pub(crate) fn recover(&self) -> (DevicePool, Vec<StoredBlock>, RecoveryReport) {
        let mut recovery = Recovery::new(self.bytes);
        while let Some((offset, bytes)) = recovery.next_read() {
            let first = offset / PAGE as u64;
            let pages = (0..bytes.div_ceil(PAGE) as u64).flat_map(|page| self.durable.page(first + page));
            let read: Vec<u8> = pages.take(bytes).collect();
            recovery.feed(&read).expect("the pool is valid");
        }
        recovery.finish().expect("the pool is valid")
    }

    /// Completes a write successfully.
    pub(crate) fn complete(&mut self, written: DiskWrite) {
        self.current.apply(&written, |_| true);
        self.unsynced.push((self.completed, written));
        self.completed += 1;
    }

    /// Number below which a sync submitted now makes writes durable.
    pub(crate) fn covered(&self) -> u64 {
        self.completed
    }

    /// Makes the writes below a number durable.
    pub(crate) fn synced(&mut self, covered: u64) {
        for (_, written) in self.unsynced.extract_if(.., |(number, _)| *number < covered) {
            self.durable.apply(&written, |_| true);
        }
    }

    /// Simulates a power loss while these writes are in flight.
    pub(crate) fn crash(&mut self, running: Vec<DiskWrite>, rng: &mut Rng) {
        let unsynced = std::mem::take(&mut self.unsynced).into_iter().map(|(_, written)| written);
        for written in unsynced.chain(running) {
            self.durable.apply(&written, |_| rng.chance(500));
        }
        self.current = self.durable.clone();
    }

    /// Simulates a kill of the agent: completed writes stay, and those in flight end at random. The next agent
    /// syncs the device before it reads it.
    pub(crate) fn kill(&mut self, running: Vec<DiskWrite>, rng: &mut Rng) {
        for written in running {
            self.current.apply(&written, |_| rng.chance(500));
        }
        self.unsynced.clear();
        self.durable = self.current.clone();
    }

    /// Header page and payload of the slot at a page.
    pub(crate) fn read(&self, page: PageNumber) -> (Box<[u8]>, Vec<Tag>) {
        let page = page.0;
        (self.current.page(page), self.current.payloads.get(&page).cloned().unwrap_or_default())
    }

    /// Damages the payload of the slot at a page.
    pub(crate) fn rot(&mut self, page: PageNumber) {
        self.may_differ = true;
        for image in [&mut self.current, &mut self.durable] {
            if let Some(payload) = image.payloads.get_mut(&page.0) {
                payload.iter_mut().for_each(|tag| *tag ^= 1 << 40);
            }
        }
    }
}
