//! One device of the pool: format, slots, journal, recovery — as a state machine over page writes and syncs.
//!
//! The runtime executes [`DeviceOp`]s against a file or block device and reports each; reads of blocks do not
//! pass through here (they are [`ReadBatch`](crate::effect::ReadBatch)es). `docs/FORMAT.md` describes the bytes.
//!
//! Life of a write batch: blocks into their slots → sync → records into the journal → sync →
//! [`PoolEvent::BatchDone`]. Up to [`BATCHES_MAX`] batches are in flight; while one syncs, another's blocks are written,
//! and batches that are ready together share syncs and journal pages.
//!
//! Invariants:
//! * a record is written only after the bytes it speaks of were synced; a block is reported durable only after its record was;
//! * a freed slot is handed out only after its free record is durable;
//! * after a failed write or sync of the journal, nothing is reported durable any more.
//!
//! Deliberately absent: reads, retries, and knowledge of keys. The same key may lie in several slots (after a crash
//! between the commit of a new copy and the free of an old one): the core frees all but one.

mod batch;
mod device;
mod error;
mod geometry;
pub mod header;
mod journal;
mod layouts;
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
pub use recovery::{OWNER_BYTES, READ_BYTES_MAX, Recovery, RecoveryReport, owner};
pub use superblock::FORMAT_VERSION;

/// Number of a 4 KiB page on a device: 16 TiB at the most.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PageNumber(pub u32);

impl PageNumber {
    /// Byte offset of the page on its device.
    pub fn offset(self) -> u64 {
        u64::from(self.0) * PAGE_BYTES
    }
}

/// Names a device operation until it is reported done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OpToken(pub u64);

/// Names a batch of block writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BatchId(pub u64);

/// How a device operation failed, as far as decisions depend on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// This place of the medium is bad: the slot is quarantined.
    #[error("media error")]
    Media,
    /// The device did not take a write of a block, for want of memory or room in a queue: the slot is as good as before.
    /// Whoever gets this for the journal or a sync has lost the device all the same: its order cannot be kept.
    #[error("not taken")]
    Refused,
    /// The device is gone, read-only, full or otherwise beyond use.
    #[error("device lost")]
    Lost,
}

/// One operation on the device. Offsets and lengths are multiples of 4096.
#[derive(Clone, Debug)]
pub struct DeviceOp {
    /// Reported back.
    pub token: OpToken,
    /// What to do.
    pub kind: DeviceOpKind,
}

/// Kinds of [`DeviceOp`]. Operations may run and complete in any order.
#[derive(Clone, Debug)]
pub enum DeviceOpKind {
    /// Write these bytes at this byte offset (journal, checkpoint, superblock).
    WritePages {
        /// Byte offset on the device.
        offset: u64,
        /// Whole pages.
        bytes: Vec<u8>,
    },
    /// Write a header page and, right behind it, a slot's payload: one contiguous write.
    WriteBlock {
        /// Byte offset of the header page on the device.
        offset: u64,
        /// The header page, 4096 bytes.
        header: Box<[u8]>,
        /// The payload in the arena.
        slot: ArenaSlot,
    },
    /// Make everything whose completion was reported before durable (fdatasync).
    Sync,
}

/// A block to write into a pool slot.
#[derive(Clone, Debug)]
pub struct BlockWrite {
    /// Its key.
    pub key: BlockKey,
    /// Whose it is.
    pub tenant: TenantId,
    /// The tenant's name, if it is known: kept in the header page.
    pub tenant_name: Option<TenantName>,
    /// Its geometry.
    pub layout: Layout,
    /// Content id, or unknown.
    pub content: ContentId,
    /// Priority class, kept in the journal.
    pub priority: u8,
    /// CRC32C of each object.
    pub checksums: Box<[u32]>,
    /// Where its payload is.
    pub slot: ArenaSlot,
    /// Where it goes; from `DevicePool::allocate`.
    pub page: PageNumber,
}

/// A block that recovery found in the journal, or that a batch made durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoredBlock {
    /// Its key.
    pub key: BlockKey,
    /// Whose it is.
    pub tenant: TenantId,
    /// Its geometry.
    pub layout: Layout,
    /// Its header page.
    pub page: PageNumber,
    /// The header's generation.
    pub generation: Generation,
    /// CRC32C of the header page.
    pub header_crc: u32,
    /// Priority class.
    pub priority: u8,
}

/// What the pool tells the core after an operation was reported done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolEvent {
    /// A batch is durable. `stored` are its blocks that are; `failed` the keys whose write failed (their slots are
    /// quarantined).
    BatchDone {
        /// Which.
        batch: BatchId,
        /// Durable blocks.
        stored: Vec<StoredBlock>,
        /// Blocks that are not.
        failed: Vec<BlockKey>,
    },
    /// Freed slots have become allocatable.
    SpaceFreed,
    /// The device is lost: nothing on it can be read or written any more.
    DeviceLost {
        /// For the log.
        reason: String,
    },
}
