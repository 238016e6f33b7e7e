//! Slots that are lent to another process.
//!
//! The process writes and reads payloads itself; the pool writes header pages and records. A slot is offered
//! only after its lend record is durable in the journal. If the agent is killed meanwhile, the next recovery
//! therefore finds every slot that a living process may still write to. Such slots stay lent until the agent
//! has proof that no process can write to them ([`DevicePool::end_earlier_leases`]).

use reprise_policy::{BlockKey, ContentId, DevicePlace, Layout, TenantId, TenantName};

use super::batch::{Batch, BatchProgress, Payloads};
use super::device::DevicePool;
use super::header::{HeaderFields, encode_header};
use super::layouts::TenantLayout;
use super::operations::{Purpose, Waiter};
use super::slots::short;
use super::{BatchId, DeviceOp, DeviceOpKind, PageNumber};

/// Whether slots of the device are lent, and those of earlier processes of the agent.
#[derive(Debug, Default)]
pub(super) struct Lending {
    allowed: bool,
    /// Place of the device in the machine, if it has one.
    place: Option<DevicePlace>,
    /// Lent slots that recovery found.
    earlier: Vec<PageNumber>,
}

impl Lending {
    /// Slots of leases that an earlier process of the agent granted.
    pub(super) fn of_earlier(earlier: Vec<PageNumber>) -> Lending {
        Lending { earlier, ..Lending::default() }
    }
}

/// Block whose payload is in a lent slot.
#[derive(Clone, Debug)]
pub struct ExtentCommit {
    /// Key of the block.
    pub key: BlockKey,
    /// Tenant of the block.
    pub tenant: TenantId,
    /// Name of the tenant, if known; stored in the header page.
    pub tenant_name: Option<TenantName>,
    /// Layout of the block.
    pub layout: Layout,
    /// Priority class; stored in the journal.
    pub priority: u8,
    /// CRC32C of each object.
    pub checksums: Box<[u32]>,
    /// Header page of the lent slot.
    pub page: PageNumber,
}

impl DevicePool {
    /// Allows slots of this device to be lent. The caller ensures that it can prove the end of another
    /// process's I/O.
    pub fn allow_lending(&mut self) {
        self.lending.allowed = true;
    }

    /// Sets the place of the device in the machine. Slots for a GPU are lent of devices near it.
    pub fn set_place(&mut self, place: Option<DevicePlace>) {
        self.lending.place = place;
    }

    /// Returns the place of the device in the machine, if it has one.
    pub fn place(&self) -> Option<&DevicePlace> {
        self.lending.place.as_ref()
    }

    /// Whether other processes may read and write slots of this device.
    pub fn allows_lending(&self) -> bool {
        self.lending.allowed
    }

    /// Whether slots of this device may be lent now.
    pub fn can_lend(&self) -> bool {
        self.lending.allowed && self.is_writable()
    }

    /// Lends allocated slots. They are reported as `stored` in one
    /// [`PoolEvent::BatchDone`](super::PoolEvent::BatchDone), with a key of zeroes, when their records are
    /// durable; only then may another process write to them. After a
    /// failure, [`DevicePool::return_lent`] frees the others.
    ///
    /// # Panics
    /// If the device rejects writes, the batch id is in use, or a slot is not reserved.
    pub fn lend(
        &mut self,
        batch: BatchId,
        (tenant, layout): (TenantId, Layout),
        pages: &[PageNumber],
    ) -> Vec<DeviceOp> {
        let mut pending = self.new_batch(batch, pages.len());
        for page in pages {
            // Without an entry for the layout, the slot stays reserved until the caller returns it.
            let Some(index) = self.slots.acquire_layout(&TenantLayout { tenant, layout }) else { continue };
            let generation = self.next_generation;
            self.next_generation += 1;
            let record = self.slots.lend(*page, index, generation);
            self.journal.push(record, Some(batch));
            pending.slot_lent(*page, record.key);
        }
        if pending.begin_records().is_empty() {
            // Without a record, the batch ends with the next sync.
            self.gate.wait(Waiter::Batch(batch));
        }
        self.batches.push(pending);
        let mut ops = Vec::new();
        self.pump(&mut ops);
        ops
    }

    /// Commits blocks whose payloads are in lent slots: writes their header pages and makes them durable,
    /// reported as one [`PoolEvent::BatchDone`](super::PoolEvent::BatchDone). The slots are no longer lent.
    ///
    /// # Panics
    /// If the device rejects writes, the batch id is in use, a slot is not lent, or a block does not have one
    /// checksum per object.
    pub fn commit_lent(&mut self, batch: BatchId, blocks: Vec<ExtentCommit>) -> Vec<DeviceOp> {
        let mut pending = self.new_batch(batch, blocks.len());
        let mut ops = Vec::with_capacity(blocks.len() + 1);
        for block in blocks {
            let generation = self.slots.lent_generation(block.page).expect("the slot is lent");
            let (header, header_crc) = encode_header(&HeaderFields {
                pool_uuid: self.superblock.pool_uuid,
                page: block.page,
                key: block.key,
                content: ContentId::UNKNOWN,
                layout: block.layout,
                generation: short(generation),
                tenant: block.tenant_name.as_ref(),
                checksums: &block.checksums,
            });
            self.slots.begin_commit(block.page, (block.key, header_crc, block.priority));
            pending.block_started(block.page, block.key);
            let token = self.operations.begin(Purpose::Block { batch, page: block.page });
            let kind = DeviceOpKind::WriteHeader { offset: block.page.offset(), header };
            ops.push(DeviceOp { token, kind });
        }
        if pending.writes() == BatchProgress::Complete {
            self.gate.wait(Waiter::Batch(batch));
        }
        self.batches.push(pending);
        self.pump(&mut ops);
        ops
    }

    /// Frees a slot that was passed to [`DevicePool::lend`] and was not committed. No process may be able to
    /// write to it.
    pub fn return_lent(&mut self, page: PageNumber) {
        if self.slots.is_reserved(page) {
            self.slots.release(page);
        } else if self.slots.lent_generation(page).is_some() {
            self.free(page);
        }
    }

    /// Removes a stored block whose slot another process still reads. From the next durable records on, the
    /// slot counts as lent, so that no restart finds the block again or reuses the slot too early;
    /// [`DevicePool::return_lent`] frees it. Does nothing if the slot is quarantined.
    ///
    /// # Panics
    /// If the slot does not hold a stored block.
    pub fn withdraw(&mut self, page: PageNumber) {
        let record = self.slots.withdraw(page, self.next_generation);
        self.next_generation += 1;
        self.push_removal(record);
    }

    /// Slots that an earlier process of the agent lent and that may still be accessed, in device order.
    pub fn earlier_leases(&self) -> &[PageNumber] {
        &self.lending.earlier
    }

    /// Frees the slots that an earlier process of the agent lent. No process may be able to access them.
    pub fn end_earlier_leases(&mut self) {
        for page in std::mem::take(&mut self.lending.earlier) {
            self.free(page);
        }
    }

    /// Forgets these slots, because the device is no longer used.
    pub fn forget_earlier_leases(&mut self) {
        self.lending.earlier.clear();
    }

    fn new_batch(&mut self, batch: BatchId, blocks: usize) -> Batch {
        assert!(self.is_writable(), "the caller has checked");
        assert!(self.batches.iter().all(|other| other.id() != batch), "a batch id names one batch");
        Batch::new(batch, Payloads::Lent, blocks)
    }
}
