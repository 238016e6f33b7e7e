//! One device of the pool: format, slots, journal and recovery, as a state machine over page writes and
//! syncs.
//!
//! The runtime executes [`DeviceOp`]s on a file or block device and reports their results. Reads of blocks
//! bypass this module (they are [`ReadBatch`](crate::effect::ReadBatch)es). `docs/FORMAT.md` specifies the
//! on-disk format.
//!
//! A write batch proceeds as follows: blocks into their slots → sync → records into the journal → sync →
//! [`PoolEvent::BatchDone`]. At most [`BATCHES_MAX`] batches are in flight. While one syncs, blocks of
//! another are written. Batches that are ready at the same time share syncs and journal pages.
//!
//! Invariants:
//! * A record is written only after the bytes that it refers to were synced. A block is reported durable only
//!   after its record was synced.
//! * A freed slot is allocated again only after its free record is durable.
//! * After a failed write or sync of the journal, no further block is reported durable. Durable blocks can
//!   still be read, unless the device is lost.
//!
//! Slots can be lent to another process, which writes the payloads itself ([`DevicePool::lend`]): lend record →
//! sync → the other process writes → header page → sync → store record → sync.
//!
//! Out of scope: reads, retries, and uniqueness of keys. After a crash between the commit of a new copy and
//! the free of an old one, a key may be in several slots; the core frees all but one.

mod batch;
mod device;
mod error;
#[cfg(test)]
mod fuzz;
mod geometry;
mod growth;
pub mod header;
mod journal;
mod layouts;
mod lend;
mod operations;
mod page;
mod record;
mod recovery;
mod slots;
mod superblock;

use reprise_policy::layout::PAGE_BYTES;
use reprise_policy::{BlockKey, ContentId, Generation, Layout, TenantId, TenantName};

use crate::effect::ArenaSlot;

pub use batch::BATCHES_MAX;
pub use device::{DevicePool, PoolUsage};
pub use error::PoolError;
pub use geometry::{
    DEVICE_BYTES_MAX, PoolParams, SEGMENT_ALIGNMENT, SEGMENT_BYTES_DEFAULT, SEGMENT_BYTES_MAX,
    SUPERBLOCK_OFFSETS,
};
pub use growth::Growth;
pub use lend::ExtentCommit;
pub use recovery::{OWNER_BYTES, READ_BYTES_MAX, Recovery, RecoveryReport, owner};
pub use superblock::FORMAT_VERSION;

/// Bits of a page number: 128 TiB in pages of 4 KiB. The largest drives have 123 TB. Records have 36 bits for
/// it, and the agent's index has 35.
pub const PAGE_NUMBER_BITS: u32 = 35;

/// Number of a 4 KiB page on a device, below 2^[`PAGE_NUMBER_BITS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageNumber(pub u64);

impl PageNumber {
    /// Byte offset of the page on its device.
    pub fn offset(self) -> u64 {
        self.0 * PAGE_BYTES
    }
}

/// Identifier of a device operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpToken(pub u64);

/// Identifier of a batch of block writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BatchId(pub u64);

/// Reason why a device operation failed, as far as decisions depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The medium is damaged at the slot, which is therefore quarantined.
    #[error("media error")]
    Media,
    /// The device did not start a block write, for want of memory or queue entries: the slot is unaffected.
    /// For the journal or a sync, this ends writing, because the order of writes can no longer be guaranteed.
    #[error("the device did not start the operation")]
    Refused,
    /// The device rejects writes: it is full or read-only, or too many writes failed. Reads are not
    /// affected.
    #[error("the device rejects writes")]
    Unwritable,
    /// The device is gone or otherwise unusable.
    #[error("device lost")]
    Lost,
}

/// Operation on the device. Offsets and lengths are multiples of 4096.
#[derive(Clone, Debug)]
pub struct DeviceOp {
    /// Identifier to return with the result.
    pub token: OpToken,
    /// Kind of the operation and its parameters.
    pub kind: DeviceOpKind,
}

/// Kinds of [`DeviceOp`]. Operations may run and complete in any order.
#[derive(Clone, Debug)]
pub enum DeviceOpKind {
    /// Writes pages of the journal, a checkpoint or the superblock.
    WritePages {
        /// Byte offset on the device.
        offset: u64,
        /// Data of whole pages.
        bytes: Vec<u8>,
    },
    /// Writes a header page and, directly behind it, a slot's payload, as one contiguous write.
    WriteBlock {
        /// Tenant of the block, whose share of the device the write takes.
        tenant: TenantId,
        /// Byte offset of the header page on the device.
        offset: u64,
        /// Header page of 4096 bytes.
        header: Box<[u8]>,
        /// Arena slot of the payload.
        slot: ArenaSlot,
    },
    /// Writes the header page of a slot whose payload another process has written.
    WriteHeader {
        /// Byte offset of the header page on the device.
        offset: u64,
        /// Header page of 4096 bytes.
        header: Box<[u8]>,
    },
    /// Makes all operations durable whose completion was reported before (fdatasync).
    Sync,
}

impl DeviceOpKind {
    /// Tenant whose share of the device the operation takes; `None` for those of the pool.
    pub fn tenant(&self) -> Option<TenantId> {
        match self {
            DeviceOpKind::WriteBlock { tenant, .. } => Some(*tenant),
            DeviceOpKind::WritePages { .. } | DeviceOpKind::WriteHeader { .. } | DeviceOpKind::Sync => None,
        }
    }
}

/// Block to write into a pool slot.
#[derive(Clone, Debug)]
pub struct BlockWrite {
    /// Key of the block.
    pub key: BlockKey,
    /// Tenant of the block.
    pub tenant: TenantId,
    /// Name of the tenant, if known; stored in the header page.
    pub tenant_name: Option<TenantName>,
    /// Layout of the block.
    pub layout: Layout,
    /// Content id of the block, or unknown.
    pub content: ContentId,
    /// Priority class; stored in the journal.
    pub priority: u8,
    /// CRC32C of each object.
    pub checksums: Box<[u32]>,
    /// Arena slot of the payload.
    pub slot: ArenaSlot,
    /// Header page of the slot, from `DevicePool::allocate`.
    pub page: PageNumber,
}

/// Block that recovery found in the journal, or that a batch made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// Key of the block.
    pub key: BlockKey,
    /// Tenant of the block.
    pub tenant: TenantId,
    /// Layout of the block.
    pub layout: Layout,
    /// Page number of the header page.
    pub page: PageNumber,
    /// Generation in the header page.
    pub generation: Generation,
    /// CRC32C of the header page.
    pub header_crc: u32,
    /// Priority class of the block.
    pub priority: u8,
}

/// Event of the pool after an operation was reported done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolEvent {
    /// A batch is durable. The slots of blocks whose write failed are quarantined.
    BatchDone {
        /// Batch that has ended.
        batch: BatchId,
        /// Blocks that are durable.
        stored: Vec<StoredBlock>,
        /// Keys of blocks whose write failed.
        failed: Vec<BlockKey>,
    },
    /// Freed slots can be allocated again.
    SpaceFreed,
    /// No further block is written or freed, but durable blocks can still be read. Opening the pool again
    /// ends this state.
    WritesStopped {
        /// Reason, for logs and status messages.
        reason: String,
    },
    /// The device is lost: it can no longer be read or written.
    DeviceLost {
        /// Reason, for logs and status messages.
        reason: String,
    },
}
