//! Outputs of the core: the actions that the runtime executes.
//!
//! The runtime executes effects in order. They own their data, so that the runtime can pass them to other
//! threads. How effects are executed is out of scope.

use std::time::Duration;

mod place;

pub use place::{LeaseId, Place, PlaceKind};
pub use reprise_policy::block_command::{BlockCounts, BlockReport, RetentionUsage};
pub use reprise_policy::peer::{FetchBlock, FetchId, FillId, OfferId, PeerOfferId, ServeId, ServeObjects};
pub use reprise_policy::placement::PlacementReason;
pub use reprise_policy::prefetch::LookaheadReport;
pub use reprise_policy::session::{CommitStatus, Source, Ticket};
pub use reprise_policy::{ArenaSlot, RegionId};
use reprise_policy::{BlockKey, Generation, Layout, NodeId, SessionId, SlotSet, TenantId, Tier};

use reprise_policy::quota::QuotaError;

use crate::event::RequestId;
use crate::extents::{ExtentHolder, PinnedBlock};
use crate::pool::{DeviceOp, PageNumber};

/// Number of a device of this node's pool; devices opened at the start have the order of the configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub u8);

/// Number of a load, in progress or complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LoadId(pub u64);

/// Number of a check of a block in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CheckId(pub u64);

/// Number of a lookup in the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LookupId(pub u64);

/// Number of a placement query to the control plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlaceId(pub u64);

/// Index of an entry in a session's progress page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProgressEntry(pub u16);

/// Access of a session to a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Read loaded blocks only.
    ReadOnly,
    /// Read loaded blocks and write reserved slots.
    ReadWrite,
}

/// Right of a session to map the memory of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionGrant {
    /// Region to map.
    pub region: RegionId,
    /// Number of memory files that the region has had before: memory of another generation is of another tenant.
    pub generation: u32,
    /// Access to the memory.
    pub access: Access,
}

/// Action for the runtime.
#[derive(Debug)]
pub enum Effect {
    /// Answers a request.
    Reply {
        /// Session that sent the request.
        session: SessionId,
        /// Number of the request.
        request: RequestId,
        /// Answer to the request.
        reply: Reply,
    },
    /// Notifies a session that all blocks of a commit are durable or lost.
    Durable {
        /// Session that sent the commit.
        session: SessionId,
        /// Ticket from `Reply::Committed`.
        ticket: Ticket,
        /// Number of durable blocks.
        durable: u32,
        /// Keys of blocks that will not become durable.
        lost: Vec<BlockKey>,
    },
    /// Updates a session's progress page.
    Progress {
        /// Session that owns the page.
        session: SessionId,
        /// Entry to update.
        entry: ProgressEntry,
        /// New state of the entry.
        update: ProgressUpdate,
    },
    /// Executes a pool operation; the result is `Event::DeviceDone`.
    Device {
        /// Device that runs the operation.
        device: DeviceId,
        /// Operation of the pool.
        op: DeviceOp,
    },
    /// Reads and verifies blocks; the results are `Event::Fill`.
    ReadBlocks {
        /// Device that holds the blocks.
        device: DeviceId,
        /// Blocks to read.
        batch: ReadBatch,
    },
    /// Raises reads of the class `Prefetch` to `Awaited`: a load or a peer waits for their remaining pieces. Fills
    /// that have ended are ignored.
    PromoteReads {
        /// Device that reads the blocks.
        device: DeviceId,
        /// Fills of the blocks.
        fills: Vec<FillId>,
    },
    /// A detached device has no operations left in flight: it can be closed and its number reused.
    DeviceReleased {
        /// Device to close.
        device: DeviceId,
    },
    /// Replaces the memory of a region, which has no blocks, by a new, zeroed memory file; the result is
    /// `Event::RegionRenewed`. The old memory must not be used for anything that another tenant may see.
    RenewRegion {
        /// Region to renew.
        region: RegionId,
    },
    /// Waits until no process can do I/O on the extents of a holder; the result is `Event::ExtentsReleased`.
    AwaitExtents {
        /// Holder whose session has ended.
        holder: ExtentHolder,
    },
    /// Copies blocks within the arena, from a public tenant to another one; the results are `Event::Fill`.
    CopyBlocks(CopyBatch),
    /// Compares a block in the arena with its checksums; the result is `Event::CheckDone`.
    CheckBlock(BlockCheck),
    /// Asks the directory for replicas on other nodes; the result is `LookupAnswered` or `LookupFailed`.
    Lookup {
        /// Number to repeat in the result.
        lookup: LookupId,
        /// Keys to look up.
        keys: Vec<BlockKey>,
        /// Time after which to send `LookupFailed`.
        timeout: Duration,
    },
    /// Announces changes of this node's replicas to the directory, in order.
    Announce {
        /// Added and removed replicas.
        changes: Vec<ReplicaChange>,
    },
    /// Announces all replicas in some hash slots, replacing the directory's entries for them.
    Inventory {
        /// Hash slots of the inventory.
        slots: Box<SlotSet>,
        /// All replicas of this node in the slots.
        replicas: Vec<(BlockKey, Tier)>,
    },
    /// Fetches and verifies blocks of a peer; the results are `PeerEvent::Fill`.
    PeerFetch {
        /// Node to fetch from.
        node: NodeId,
        /// Keys, fills and destinations.
        request: FetchRequest,
    },
    /// Sends a peer the header of a block: its checksums and its tier.
    ServeHeader {
        /// Request of the peer.
        serve: ServeId,
        /// Index of the block in the request.
        block: u32,
        /// Tier of the block on this node.
        tier: Tier,
        /// CRC32C of each object.
        checksums: Box<[u32]>,
    },
    /// Sends a peer objects of a block, after its header.
    ServeObjects(ServeObjects),
    /// Notifies a peer that it will not receive a block, or the rest of a block whose header was sent. In the
    /// latter case the block's lease still ends with `ServeDone` or `ServeAborted`.
    ServeAbsent {
        /// Request of the peer.
        serve: ServeId,
        /// Index of the block in the request.
        block: u32,
    },
    /// Asks the control plane where to place further durable replicas; the result is `PlaceAnswered` or
    /// `PlaceFailed`.
    Place {
        /// Number to repeat in the result.
        place: PlaceId,
        /// Keys of durable blocks of this node, all of one size.
        keys: Vec<BlockKey>,
        /// Bytes of one block on a device, header page included, that the control plane charges to the
        /// target. 1 if the answer is used only as a filter.
        slot_bytes: u64,
        /// Reason for the replicas.
        reason: PlacementReason,
        /// Time after which to send `PlaceFailed`.
        timeout: Duration,
    },
    /// Offers blocks to a peer; the result is `OfferAnswered` or `OfferFailed`.
    Offer {
        /// Node that receives the offer.
        node: NodeId,
        /// Offered blocks.
        offer: Offer,
    },
    /// Answers a peer's offer.
    AnswerOffer {
        /// Offer of the peer.
        offer: PeerOfferId,
        /// Indices of the accepted keys, ascending.
        taken: Vec<u32>,
        /// Time until the peer may offer the other keys again.
        retry_after: Duration,
    },
    /// Reports a problem to the operator; the runtime logs it once.
    Diagnostic(Diagnostic),
}

/// Request for blocks of a peer, with the number of their tenant.
pub type FetchRequest = reprise_policy::peer::FetchRequest<TenantId>;

/// Offer of blocks to a peer, with the number of the tenant on this node.
pub type Offer = reprise_policy::peer::Offer<TenantId>;

/// Replies to a [`Request`](crate::event::Request).
#[derive(Clone, Debug)]
pub enum Reply {
    /// The request is invalid; the text states the remedy.
    BadRequest(String),
    /// Too many requests or resources; retry later.
    Busy {
        /// Name of the exhausted resource.
        message: String,
        /// Time to wait before a retry.
        retry_after: Duration,
    },
    /// Reserved slots, possibly fewer than requested.
    Reserved {
        /// Regions that the session has not received with this access before.
        regions: Vec<RegionGrant>,
        /// Leases and places of the slots, all of the requested kind.
        leases: Vec<(LeaseId, Place)>,
        /// Time to wait before requesting the rest; zero if no slot is missing.
        retry_after: Duration,
    },
    /// Result of a commit. For extents, sent when each block is durable or has failed.
    Committed {
        /// Ticket that the durable notice will name; `None` if all statuses are final.
        ticket: Option<Ticket>,
        /// One status per item, in order.
        statuses: Vec<CommitStatus>,
    },
    /// Reservations were released.
    Aborted,
    /// The writes of a commit are no longer deferred.
    DurableAwaited,
    /// Result of a match.
    Matched {
        /// Source of each leading block that is available.
        sources: Vec<Source>,
    },
    /// Blocks of a load, in the order of its keys. The progress entry shows layers that arrive later.
    Loaded {
        /// Identifier for `Request::Release`.
        load: LoadId,
        /// Entry that shows the load's progress.
        entry: ProgressEntry,
        /// Regions that the session has not received with this access before.
        regions: Vec<RegionGrant>,
        /// One result per key.
        blocks: Vec<LoadedBlock>,
    },
    /// The load was released.
    Released,
    /// The report of suspect blocks was accepted.
    Suspected,
    /// A hint was applied.
    LookaheadAccepted(LookaheadReport),
    /// Result of a command on blocks.
    Managed(BlockReport),
    /// Clean DRAM copies were dropped.
    Trimmed {
        /// Number of dropped copies.
        blocks: u64,
    },
    /// Result of a pin.
    Pinned {
        /// One result per key, in order.
        blocks: Vec<PinnedBlock>,
    },
    /// Pins have ended.
    Unpinned,
    /// Counters by name, in the order of `Counters::fields`.
    Stats(Vec<(&'static str, u64)>),
}

/// Result for one block of a load.
#[derive(Clone, Debug)]
pub enum LoadedBlock {
    /// Readable at `place` as far as the progress entry shows.
    Ok {
        /// Location where the block was found.
        source: Source,
        /// Place that remains readable until `Release`: a slot of the arena, since pins last longer than loads.
        place: Place,
        /// CRC32C of each object.
        checksums: Box<[u32]>,
    },
    /// The block is not available.
    Lost(LossReason),
}

/// Reason why a block of a load is not available.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossReason {
    /// No reachable node has the block.
    Miss,
    /// The block could not be read or failed verification.
    Failed,
    /// All slots of the arena are leased.
    NoSpace,
    /// The load's deadline passed.
    Deadline,
}

/// Update of a progress entry. The runtime writes `failed` bits before `layers`, with release ordering, and
/// then wakes waiters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProgressUpdate {
    /// Assigns the entry to a load: zero the entry, then set the load's id.
    Begin {
        /// Load that owns the entry.
        load: LoadId,
    },
    /// Number of leading layers verified in all blocks that have not failed.
    Layers {
        /// Number of leading layers.
        layers: u32,
    },
    /// A block failed after the reply was sent, or is no longer readable.
    BlockFailed {
        /// Index of the block within the load.
        block: u32,
    },
    /// All blocks are verified or failed. Sent again if the load exceeds its maximum hold time and its blocks
    /// are revoked.
    Done,
}

/// Rank of reads at their device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReadClass {
    /// A load or a peer waits for the blocks.
    Awaited,
    /// Nothing waits for the blocks yet: other reads come first.
    Prefetch,
}

/// Blocks to read from one device.
///
/// The worker reads in layer-major order: the first pieces of all blocks, then the second pieces, and so on.
/// A piece is `read_bytes` rounded to whole objects that end at a multiple of 4096. The worker reads the
/// header page together with the first piece.
#[derive(Clone, Debug)]
pub struct ReadBatch {
    /// Tenant of all blocks, whose share of the device the reads take.
    pub tenant: TenantId,
    /// Rank of the reads at the device.
    pub class: ReadClass,
    /// Blocks to read.
    pub blocks: Vec<BlockRead>,
    /// Layout of all blocks.
    pub layout: Layout,
    /// Maximum bytes of one read.
    pub read_bytes: u64,
}

/// One block to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRead {
    /// Fill that every update names.
    pub fill: FillId,
    /// Key that the header must contain.
    pub key: BlockKey,
    /// First page (the header) of the slot on the device.
    pub page: PageNumber,
    /// Generation that the header must contain.
    pub generation: Generation,
    /// CRC32C that the header page must have.
    pub header_crc: u32,
    /// Arena slot for the payload.
    pub slot: ArenaSlot,
}

/// Blocks of one layout to copy within the arena.
#[derive(Clone, Debug)]
pub struct CopyBatch {
    /// Tenant for which the blocks are copied.
    pub tenant: TenantId,
    /// Layout of all blocks.
    pub layout: Layout,
    /// Blocks to copy.
    pub blocks: Vec<BlockCopy>,
}

/// Block to copy to another slot of the arena.
#[derive(Clone, Debug)]
pub struct BlockCopy {
    /// Fill to report progress for.
    pub fill: FillId,
    /// Slot to read. Another process may write to it.
    pub from: ArenaSlot,
    /// Slot to write.
    pub into: ArenaSlot,
    /// CRC32C that each object must have. The copied bytes are verified, not those of either slot.
    pub checksums: Box<[u32]>,
}

/// Block in the arena to compare with its checksums.
#[derive(Clone, Debug)]
pub struct BlockCheck {
    /// Number to repeat in the result.
    pub check: CheckId,
    /// Arena slot of the payload.
    pub slot: ArenaSlot,
    /// Layout of the block.
    pub layout: Layout,
    /// CRC32C that each object must have.
    pub checksums: Box<[u32]>,
}

/// Change of this node's replicas.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaChange {
    /// Key of the block.
    pub key: BlockKey,
    /// Tier of the replica on this node.
    pub tier: Tier,
    /// Whether the replica was added or removed.
    pub change: Change,
}

/// Kind of change of a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The replica was added.
    Added,
    /// The replica was removed.
    Removed,
}

/// Problem to report to the operator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Diagnostic {
    /// A stored block failed verification and was dropped.
    CorruptBlock {
        /// Device that stored the block.
        device: DeviceId,
        /// Header page of the block; the slot is free again.
        page: PageNumber,
        /// Key of the block.
        key: BlockKey,
    },
    /// A block in DRAM no longer matches its checksums; its copy is dropped.
    CorruptMemory {
        /// Arena slot of the block.
        slot: ArenaSlot,
        /// Key of the block.
        key: BlockKey,
    },
    /// Blocks of a layout are larger than the segments of every device: they are cached but never durable.
    /// Reported once for each layout.
    Unstorable {
        /// Bytes of one block.
        block_bytes: u64,
        /// Maximum bytes of a block that fits into a segment.
        payload_bytes_max: u64,
    },
    /// Reservations of tenants exceed the capacity. NVMe reservations shrink in proportion; DRAM reservations
    /// are met in the order in which tenants request memory.
    Overcommitted {
        /// Resource that is overcommitted.
        resource: QuotaResource,
        /// Missing amount, and the remedy.
        error: QuotaError,
    },
    /// Rejected a peer's offer of blocks with a new layout because half of the table of layouts is in use.
    /// The other half is kept for this node's engines. Reported once.
    OffersRefused {
        /// Number of layouts in use, over all tenants.
        layouts: usize,
    },
    /// No block of an erased tenant is left on this node.
    TenantErased {
        /// Tenant whose keys are gone.
        tenant: TenantId,
        /// Number of blocks that were removed.
        blocks: u64,
    },
    /// A device can no longer be written. Its blocks are still read.
    WritesStopped {
        /// Device that rejects writes.
        device: DeviceId,
        /// Reason, for logs and status messages.
        reason: String,
    },
    /// A device had too many errors and is no longer used.
    DeviceLost {
        /// Device that has failed.
        device: DeviceId,
        /// Reason, for logs and status messages.
        reason: String,
    },
}

/// Resource that tenants have quotas of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QuotaResource {
    /// Memory of the arena.
    Dram,
    /// Space on the devices.
    Nvme,
}
