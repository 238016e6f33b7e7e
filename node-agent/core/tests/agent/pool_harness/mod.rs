//! A small test harness for the pool: a disk that can lose power, a pool on that disk, and a model of the
//! pool's guarantees.
//!
//! The disk executes operations in any order and keeps unsynced writes in a volatile cache. On power loss
//! it applies any part of that cache, in any order, sector by sector. The model tracks the permitted outcomes
//! of every block ever written.
//!
//! All choices derive from a seed, which a failing test prints.
#![allow(dead_code, reason = "each test file uses its own part of the harness")]

pub(crate) mod clients;
pub(crate) mod disk;
pub(crate) mod model;
pub(crate) mod offsets;
pub(crate) mod random;

use std::collections::{BTreeMap, BTreeSet};

use reprise_agent_core::effect::{ArenaSlot, RegionId};
use reprise_agent_core::pool::{
    BatchId, BlockWrite, DeviceError, DeviceOp, DeviceOpKind, DevicePool, PageNumber, PoolError, PoolEvent,
    PoolParams, Recovery, RecoveryReport, StoredBlock,
};
use reprise_policy::{BlockKey, ContentId, Dtype, Layout, LayoutSpec, Parts, TenantId};

use clients::Survivors;
use disk::Disk;
use model::Model;
use random::Random;

/// Bytes of a page.
pub(crate) const PAGE: u64 = 4096;

/// A layout whose payload has this number of pages.
pub(crate) fn layout(pages: u16) -> Layout {
    let spec = LayoutSpec {
        layers: 2,
        parts: Parts::KeyValue,
        kv_heads: 1,
        head_dim: 64,
        dtype: Dtype::Bf16,
        tokens_per_block: 8 * pages,
        tp_rank: 0,
        tp_size: 1,
    };
    let layout = spec.validate().expect("valid");
    assert_eq!(layout.slot_bytes(), u64::from(pages) * PAGE);
    layout
}

/// Parameters of a small pool.
pub(crate) fn params(device_bytes: u64) -> PoolParams {
    PoolParams {
        device_bytes,
        segment_bytes: 2 << 20,
        pool_uuid: *b"pool-under-test!",
        device_index: 3,
        created_unix_us: 1_700_000_000_000_000,
    }
}

/// A block's payload: every sector contains the block's key and the sector's position in the payload.
pub(crate) fn payload(key: &BlockKey, bytes: u64) -> Vec<u8> {
    let mut out = vec![0; usize::try_from(bytes).expect("small")];
    for (sector, place) in out.chunks_exact_mut(512).enumerate() {
        place[..16].copy_from_slice(&key.0);
        place[16..24].copy_from_slice(&(sector as u64).to_le_bytes());
    }
    out
}

/// Checksums that are unique to this block. They are not computed from the payload.
pub(crate) fn checksums(key: &BlockKey, layout: &Layout) -> Box<[u32]> {
    let base = u32::from_le_bytes([key.0[0], key.0[1], key.0[2], key.0[3]]);
    (0..layout.objects()).map(|object| base.wrapping_mul(31).wrapping_add(object)).collect()
}

/// The tenant that owns the block: one of three.
pub(crate) fn tenant_of(key: &BlockKey) -> TenantId {
    TenantId(u16::from(key.0[0] % 3) * 0x0102)
}

/// A block to write.
pub(crate) fn block_write(key: BlockKey, layout: Layout, page: PageNumber) -> BlockWrite {
    let slot = ArenaSlot { region: RegionId(0), offset: page.offset(), bytes: layout.slot_bytes() };
    BlockWrite {
        key,
        tenant: tenant_of(&key),
        tenant_name: None,
        layout,
        content: ContentId::UNKNOWN,
        priority: key.0[0] % 3,
        checksums: checksums(&key, &layout),
        slot,
        page,
    }
}

/// Recovers the pool on a disk.
pub(crate) fn recover(disk: &Disk) -> Result<(DevicePool, Vec<StoredBlock>, RecoveryReport), PoolError> {
    let mut recovery = Recovery::new(disk.bytes());
    while let Some((offset, bytes)) = recovery.next_read() {
        match disk.read(offset, bytes) {
            Some(read) => recovery.feed(&read)?,
            None => recovery.feed_unreadable()?,
        }
    }
    recovery.finish()
}

/// A freshly formatted disk.
pub(crate) fn formatted(params: &PoolParams) -> Disk {
    let mut disk = Disk::new(params.device_bytes);
    for (offset, bytes) in DevicePool::format(params).expect("formats") {
        disk.write_durably(offset, &bytes);
    }
    disk
}

/// A pool in use on a disk.
pub(crate) struct Harness {
    /// The pool.
    pub(crate) pool: DevicePool,
    /// Its disk.
    pub(crate) disk: Disk,
    /// The permitted outcomes of every block.
    pub(crate) model: Model,
    /// Stored blocks that clients read.
    pub(crate) pins: BTreeSet<PageNumber>,
    /// Pinned blocks that were removed.
    pub(crate) withdrawn: BTreeMap<PageNumber, StoredBlock>,
    /// The source of all random choices.
    pub(crate) random: Random,
    /// Operations that the disk has not reported done.
    pub(crate) in_flight: Vec<DeviceOp>,
    /// Events that no test has read yet.
    pub(crate) events: Vec<PoolEvent>,
    /// Operations executed since the harness was created.
    pub(crate) executed: u64,
}

impl Harness {
    pub(crate) fn new(params: &PoolParams, seed: u64) -> Harness {
        Harness::on(formatted(params), seed)
    }

    /// An empty pool on a formatted disk.
    pub(crate) fn on(disk: Disk, seed: u64) -> Harness {
        let (pool, stored, report) = recover(&disk).expect("a formatted disk opens");
        assert!(stored.is_empty() && report.is_clean(), "{report:?}");
        Harness {
            pool,
            disk,
            model: Model::default(),
            pins: BTreeSet::new(),
            withdrawn: BTreeMap::new(),
            random: Random::new(seed),
            in_flight: Vec::new(),
            events: Vec::new(),
            executed: 0,
        }
    }

    /// Starts a batch of up to `count` new blocks; returns how many found a slot.
    pub(crate) fn start_batch(&mut self, count: u64, layouts: &[Layout]) -> usize {
        let mut blocks = Vec::new();
        for _ in 0..count {
            let layout = layouts[self.random.index(layouts.len())];
            let before = self.pool.allocatable(layout.slot_bytes());
            let Some(page) = self.pool.allocate(layout.slot_bytes()) else {
                assert_eq!(before, 0, "allocate refused though {before} slots were allocatable");
                continue;
            };
            assert!(before > 0, "allocate gave a slot though none was allocatable");
            self.model.allocated(page, &layout);
            let key = self.model.new_key();
            blocks.push(block_write(key, layout, page));
        }
        let batch = self.model.begin_batch(&blocks);
        let started = blocks.len();
        let ops = self.pool.write_batch(batch, blocks);
        self.take(ops);
        started
    }

    pub(crate) fn allocate(&mut self, layout: Layout) -> PageNumber {
        let page = self.pool.allocate(layout.slot_bytes()).expect("room");
        self.model.allocated(page, &layout);
        page
    }

    /// Writes new blocks to these slots as one batch; returns their keys.
    pub(crate) fn write(&mut self, pages: &[PageNumber], layout: Layout) -> Vec<BlockKey> {
        self.write_with(pages, layout, ContentId::UNKNOWN)
    }

    /// Like [`Harness::write`], with a content id.
    pub(crate) fn write_with(
        &mut self,
        pages: &[PageNumber],
        layout: Layout,
        content: ContentId,
    ) -> Vec<BlockKey> {
        let blocks: Vec<BlockWrite> = pages
            .iter()
            .map(|page| BlockWrite { content, ..block_write(self.model.new_key(), layout, *page) })
            .collect();
        let keys = blocks.iter().map(|block| block.key).collect();
        let batch = self.model.begin_batch(&blocks);
        let ops = self.pool.write_batch(batch, blocks);
        self.take(ops);
        keys
    }

    /// Frees one stored block, if any exists.
    pub(crate) fn free_one(&mut self) {
        if let Some(page) = self.model.pick_stored(&mut self.random) {
            if self.pins.contains(&page) {
                return self.withdraw(page);
            }
            self.model.free_requested(page);
            self.pool.free(page);
        }
    }

    /// Quarantines one stored block, if any exists.
    pub(crate) fn quarantine_one(&mut self) {
        if let Some(page) = self.model.pick_stored(&mut self.random) {
            self.pins.remove(&page);
            self.model.quarantine_requested(page);
            self.pool.quarantine(page);
        }
    }

    /// Journals removals without a batch.
    pub(crate) fn flush(&mut self) {
        let ops = self.pool.flush_frees();
        self.take(ops);
    }

    /// Makes the disk execute and report one random operation. Returns false if none is in flight.
    pub(crate) fn step(&mut self) -> bool {
        self.step_with(|_, _| Ok(()))
    }

    /// Like [`Harness::step`]; `outcome` determines the result of the operation.
    pub(crate) fn step_with(
        &mut self,
        outcome: impl FnOnce(&mut Random, &DeviceOpKind) -> Result<(), DeviceError>,
    ) -> bool {
        if self.in_flight.is_empty() {
            return false;
        }
        let op = self.in_flight.swap_remove(self.random.index(self.in_flight.len()));
        let result = outcome(&mut self.random, &op.kind);
        self.report(&op, result);
        true
    }

    /// Makes the disk execute the operations that match, until none in flight does.
    pub(crate) fn run_matching(&mut self, fits: impl Fn(&DeviceOpKind) -> bool) {
        while let Some(index) = self.in_flight.iter().position(|op| fits(&op.kind)) {
            let op = self.in_flight.swap_remove(index);
            self.report(&op, Ok(()));
        }
    }

    fn report(&mut self, op: &DeviceOp, result: Result<(), DeviceError>) {
        match (&op.kind, result) {
            (DeviceOpKind::Sync, Ok(())) => self.disk.sync_done(op.token.0),
            (_, Ok(())) => self.disk.write_done(op.token.0),
            (_, Err(_)) => {}
        }
        self.executed += 1;
        let (ops, events) = self.pool.done(op.token, result);
        for event in &events {
            self.model.event(event);
        }
        if self.pool.usage().pending_frees_bytes == 0 {
            self.model.frees_are_durable();
        }
        self.events.extend(events);
        self.take(ops);
    }

    /// Executes until nothing is in flight.
    pub(crate) fn run_to_completion(&mut self) {
        while self.step() {}
    }

    /// Power is lost. The recovered pool is compared with the model and replaces the pool of the harness.
    pub(crate) fn lose_power(&mut self) -> RecoveryReport {
        self.disk.lose_power(&mut self.random);
        self.reopen(Survivors::Nothing)
    }

    /// Power is lost, and of the unsynced writes exactly these pages survive.
    pub(crate) fn lose_power_and_keep(&mut self, keeps: impl Fn(u64) -> bool) -> RecoveryReport {
        self.disk.keep_volatile(keeps);
        self.reopen(Survivors::Nothing)
    }

    /// Power is lost, and no unsynced write survives.
    pub(crate) fn lose_power_and_all_volatile_writes(&mut self) -> RecoveryReport {
        self.disk.drop_volatile();
        self.reopen(Survivors::Nothing)
    }

    /// The agent is killed: everything that was written is kept, and any part of the writes in flight. Clients
    /// continue to write.
    pub(crate) fn kill(&mut self) -> RecoveryReport {
        self.disk.kill(&mut self.random);
        self.reopen(Survivors::Clients)
    }

    fn reopen(&mut self, survivors: Survivors) -> RecoveryReport {
        self.in_flight.clear();
        self.pins.clear();
        self.withdrawn.clear();
        self.events.clear();
        let before = self.disk.clone();
        let (pool, stored, report) = recover(&self.disk).expect("a pool survives a crash");
        assert!(self.disk.same_bytes(&before), "recovery writes nothing");
        assert!(report.is_clean(), "a crash is not reported as damage: {report:?}");
        self.model.check_recovered(&stored, pool.earlier_leases(), &self.disk);
        self.model.crashed(&stored, pool.earlier_leases(), survivors);
        self.pool = pool;
        self.check_usage();
        report
    }

    /// Checks the pool's own invariants, and its usage figures against the model.
    pub(crate) fn check_usage(&self) {
        self.pool.audit().expect("the slots are consistent");
        let usage = self.pool.usage();
        let sum = usage.slot_bytes_used
            + usage.slot_bytes_free
            + usage.pending_frees_bytes
            + usage.slot_bytes_quarantined
            + usage.slack_bytes;
        assert_eq!(sum, usage.capacity_bytes, "{usage:?}");
        self.model.check_usage(&usage);
    }

    fn take(&mut self, ops: Vec<DeviceOp>) {
        for op in &ops {
            match &op.kind {
                DeviceOpKind::Sync => self.disk.sync_begun(op.token.0),
                DeviceOpKind::WritePages { offset, bytes } => {
                    self.disk.write_begun(op.token.0, *offset, bytes.clone());
                }
                DeviceOpKind::WriteHeader { offset, header } => {
                    self.disk.write_begun(op.token.0, *offset, header.to_vec());
                }
                DeviceOpKind::WriteBlock { offset, header, slot, .. } => {
                    let key = self.model.key_being_written(*offset);
                    let mut bytes = header.to_vec();
                    bytes.extend(payload(&key, slot.bytes));
                    self.disk.write_begun(op.token.0, *offset, bytes);
                }
            }
        }
        self.in_flight.extend(ops);
    }
}

/// A batch id with this number, for a test that does not let the model number its batches.
pub(crate) fn batch(number: u64) -> BatchId {
    BatchId(number)
}
