//! What the core wants done.
//!
//! Effects are executed in order. They own what they carry, so that the runtime can hand them to other threads.
//! Deliberately absent: anything of how they are executed.

use std::time::Duration;

use reprise_policy::{BlockKey, Generation, Layout, NodeId, SessionId, SlotSet, TenantId, Tier};

use reprise_policy::quota::QuotaError;

use crate::event::RequestId;
use crate::pool::{DeviceOp, PageNumber};

/// A device of this node's pool: in configuration order where all are opened at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct DeviceId(pub u8);

/// A region of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId(pub u16);

/// A reserved slot that is being filled by an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LeaseId(pub u64);

/// A load in progress or held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LoadId(pub u64);

/// A block on its way into an arena slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FillId(pub u64);

/// A check of a block in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CheckId(pub u64);

/// A question to the directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LookupId(pub u64);

/// A group of blocks wanted from one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FetchId(pub u64);

/// A group of blocks that one peer wants from us.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServeId(pub u64);

/// A question to the control plane where blocks go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PlaceId(pub u64);

/// Blocks that this node offers to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OfferId(pub u64);

/// Blocks that a peer offers to this node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerOfferId(pub u64);

/// Counts the commits of a session; a durable notice names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// Index of an entry in a session's progress page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProgressEntry(pub u16);

/// A slot in the arena: region, offset and length in bytes (multiples of 4096).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ArenaSlot {
    /// The region.
    pub region: RegionId,
    /// Byte offset in the region.
    pub offset: u64,
    /// Payload bytes, padded to whole pages.
    pub bytes: u64,
}

/// Where a block was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Source {
    /// This node's DRAM.
    OwnDram = 1,
    /// This node's NVMe.
    OwnNvme = 2,
    /// A peer's DRAM.
    PeerDram = 3,
    /// A peer's NVMe.
    PeerNvme = 4,
}

/// What a session may do with a region's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Load from it.
    ReadOnly,
    /// Fill reserved slots in it.
    ReadWrite,
}

/// One thing to do.
#[derive(Debug)]
pub enum Effect {
    /// Answer a request.
    Reply {
        /// Who asked.
        session: SessionId,
        /// From the request.
        request: RequestId,
        /// The answer.
        reply: Reply,
    },
    /// Tell a session that a ticket's blocks have come to their end.
    Durable {
        /// Whose ticket.
        session: SessionId,
        /// From `Reply::Committed`.
        ticket: Ticket,
        /// Items whose block is durable.
        durable: u32,
        /// Keys that are not and will not be.
        lost: Vec<BlockKey>,
    },
    /// Write a session's progress page.
    Progress {
        /// Whose page.
        session: SessionId,
        /// Which entry of it.
        entry: ProgressEntry,
        /// What to write.
        update: ProgressUpdate,
    },
    /// Do a pool operation; report with `Event::DeviceDone`.
    Device {
        /// The device.
        device: DeviceId,
        /// The operation.
        op: DeviceOp,
    },
    /// Read and verify blocks; report with `Event::Fill`.
    ReadBlocks {
        /// The device.
        device: DeviceId,
        /// The blocks.
        batch: ReadBatch,
    },
    /// Nothing of a detached device is under way any more: it can be closed, and its number given to another.
    DeviceReleased {
        /// The device.
        device: DeviceId,
    },
    /// Compare a block in the arena with its checksums; report with `Event::Checked`.
    CheckBlock(BlockCheck),
    /// Ask the directory for replicas on other nodes; report with `Found` or `LookupFailed`.
    Lookup {
        /// Repeated in the answer.
        lookup: LookupId,
        /// What is looked for.
        keys: Vec<BlockKey>,
        /// Report `LookupFailed` after this time.
        timeout: Duration,
    },
    /// Tell the directory what changed here, in order.
    Announce {
        /// The changes.
        changes: Vec<ReplicaChange>,
    },
    /// Tell the directory all that is here in some hash slots, replacing what it knows of them.
    Inventory {
        /// The slots.
        slots: Box<SlotSet>,
        /// Every replica of this node in them.
        replicas: Vec<(BlockKey, Tier)>,
    },
    /// Get blocks from a peer, verified; report with `Event::Fill`.
    PeerFetch(PeerFetch),
    /// Send a peer the header of a block: its checksums and where it came from.
    ServeHeader {
        /// The peer's request.
        serve: ServeId,
        /// Index of the block in it.
        block: u32,
        /// Where the block lay on this node.
        tier: Tier,
        /// CRC32C of each object.
        checksums: Box<[u32]>,
    },
    /// Send a peer objects of a block, after its header. `last` with the block's last object.
    ServeObjects(ServeObjects),
    /// Tell a peer that it will not get a block (the rest of it, when its header was sent already). If the
    /// header was sent, the block's lease still ends with `ServeDone` or `ServeAborted`.
    ServeAbsent {
        /// The peer's request.
        serve: ServeId,
        /// Index of the block in it.
        block: u32,
    },
    /// Ask the control plane where further durable replicas go; report with `Placed` or `PlaceFailed`.
    Place {
        /// Repeated in the answer.
        place: PlaceId,
        /// Durable blocks of this node, of one size.
        keys: Vec<BlockKey>,
        /// Bytes that each takes on a device, header page included: what its target is charged for. 1 where the answer is not
        /// acted on.
        slot_bytes: u64,
        /// Why.
        reason: PlaceReason,
        /// Report `PlaceFailed` after this time.
        timeout: Duration,
    },
    /// Offer blocks to a peer; report with `OfferAnswered` or `OfferFailed`.
    Offer(Offer),
    /// Tell a peer which of the blocks that it offers are taken.
    AnswerOffer {
        /// The peer's offer.
        offer: PeerOfferId,
        /// Indices of the keys that are taken, ascending.
        taken: Vec<u32>,
        /// When to offer the others again.
        retry_after: Duration,
    },
    /// Something an operator should know; the runtime logs it once.
    Report(Report),
}

/// Why a further replica is wanted; decides how many are enough.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PlaceReason {
    /// Peers keep reading it: two durable replicas on nodes that stay.
    Hot,
    /// This node is to leave: one on another node that stays.
    Drain,
    /// It is to move: one on this node.
    Move(NodeId),
}

/// Blocks offered to a peer.
#[derive(Clone, Debug)]
pub struct Offer {
    /// Repeated in the answer.
    pub offer: OfferId,
    /// Whom they are offered to.
    pub node: NodeId,
    /// Whose they are, by its number on this node.
    pub tenant: TenantId,
    /// Geometry of all of them.
    pub layout: Layout,
    /// Which blocks.
    pub keys: Vec<BlockKey>,
    /// Report `OfferFailed` after this time.
    pub deadline: Duration,
}

/// Answers to [`Request`](crate::event::Request).
#[derive(Clone, Debug)]
pub enum Reply {
    /// The call was wrong; the text says what to do.
    BadRequest(String),
    /// Too much at once; try again.
    Busy {
        /// What there is too much of.
        message: String,
        /// When to try again.
        retry_after: Duration,
    },
    /// Reserved slots, possibly fewer than asked. `regions` are those that the session has not seen with
    /// this access yet.
    Reserved {
        /// Regions to grant with this reply.
        regions: Vec<(RegionId, Access)>,
        /// The slots.
        leases: Vec<(LeaseId, ArenaSlot)>,
        /// When to ask for the rest; zero when all were given.
        retry_after: Duration,
    },
    /// Per item of the commit, in order.
    Committed {
        /// Named by the durable notice to come.
        ticket: Ticket,
        /// One per item.
        statuses: Vec<CommitStatus>,
    },
    /// Slots given back.
    Aborted,
    /// Source of each leading block.
    Matched {
        /// As many as there are leading blocks available.
        sources: Vec<Source>,
    },
    /// A load's blocks, in order of its keys. Layers may still be in flight: see the progress entry.
    Loaded {
        /// For `Release`.
        load: LoadId,
        /// Where its progress is published.
        entry: ProgressEntry,
        /// Regions to grant with this reply.
        regions: Vec<(RegionId, Access)>,
        /// One per key.
        blocks: Vec<LoadedBlock>,
    },
    /// Load released.
    Released,
    /// Suspicion noted.
    Suspected,
    /// DRAM copies dropped.
    Trimmed {
        /// How many.
        blocks: u64,
    },
    /// Counters by name, in the order of `Counters::fields`.
    Stats(Vec<(&'static str, u64)>),
}

/// What became of one committed item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitStatus {
    /// Readable on the node from now on.
    Committed,
    /// There was such a block already; the slot was given back.
    Duplicate,
    /// No such lease.
    NoLease,
    /// Key or checksums of the wrong length; the slot was given back.
    BadItem,
}

/// One block of a load.
#[derive(Clone, Debug)]
pub enum LoadedBlock {
    /// Readable in `slot` as far as the progress entry says.
    Ok {
        /// Where it was found.
        source: Source,
        /// Where it is readable until `Release`.
        slot: ArenaSlot,
        /// CRC32C of each object.
        checksums: Box<[u32]>,
    },
    /// Not to be had.
    Lost(LossReason),
}

/// Why a block of a load is not to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LossReason {
    /// Nobody has it.
    Miss,
    /// It could not be read or did not verify.
    Failed,
    /// The arena is full of leased blocks.
    NoSpace,
    /// The deadline passed.
    Deadline,
}

/// A change of a progress entry. The runtime writes `failed` bits before `layers`, with release ordering,
/// then wakes waiters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProgressUpdate {
    /// The entry now belongs to this load: zero it, then set the id.
    Begin {
        /// The load.
        load: LoadId,
    },
    /// Leading layers that are verified for every block that has not failed.
    Layers {
        /// How many.
        layers: u32,
    },
    /// A block (index within the load) failed after the reply was sent, or is readable no longer.
    BlockFailed {
        /// Index within the load.
        block: u32,
    },
    /// All blocks are verified or failed. Comes again after failures when a load was held for longer than it may be.
    Done,
}

/// Blocks to read from one device.
///
/// The worker reads in layer-major order across the batch: first pieces of all blocks, then second pieces, …
/// A piece is `read_bytes` rounded to whole objects whose boundary is a multiple of 4096; the header
/// page is read together with the first piece.
#[derive(Clone, Debug)]
pub struct ReadBatch {
    /// What to read.
    pub blocks: Vec<BlockRead>,
    /// Geometry of all of them.
    pub layout: Layout,
    /// Bytes of one read at the most.
    pub read_bytes: u64,
}

/// One block to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockRead {
    /// Reported with every update.
    pub fill: FillId,
    /// The key that the header must carry.
    pub key: BlockKey,
    /// First page (the header) of the slot on the device.
    pub page: PageNumber,
    /// The generation that the header must carry.
    pub generation: Generation,
    /// CRC32C that the header page must have.
    pub header_crc: u32,
    /// Where the payload goes.
    pub slot: ArenaSlot,
}

/// A block in the arena to compare with its checksums.
#[derive(Clone, Debug)]
pub struct BlockCheck {
    /// Repeated in the report.
    pub check: CheckId,
    /// Where its payload is.
    pub slot: ArenaSlot,
    /// Its geometry.
    pub layout: Layout,
    /// CRC32C that each object must have.
    pub checksums: Box<[u32]>,
}

/// Blocks wanted from one peer.
#[derive(Clone, Debug)]
pub struct PeerFetch {
    /// Names the group.
    pub fetch: FetchId,
    /// Whom to ask.
    pub node: NodeId,
    /// Geometry of all of them.
    pub layout: Layout,
    /// Keys, fills and destinations.
    pub blocks: Vec<PeerBlock>,
    /// Give up after this time.
    pub deadline: Duration,
}

/// One block wanted from a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeerBlock {
    /// Reported with every update.
    pub fill: FillId,
    /// Its key.
    pub key: BlockKey,
    /// Where the payload goes.
    pub slot: ArenaSlot,
}

/// Objects to send to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServeObjects {
    /// The peer's request.
    pub serve: ServeId,
    /// Index of the block in it.
    pub block: u32,
    /// Where the block lies.
    pub slot: ArenaSlot,
    /// Byte range of the payload: offset.
    pub offset: u64,
    /// Byte range of the payload: length (whole objects).
    pub bytes: u64,
    /// Whether these are the block's last objects.
    pub last: bool,
}

/// A replica of this node appeared or went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaChange {
    /// The block.
    pub key: BlockKey,
    /// Where on this node.
    pub tier: Tier,
    /// What happened.
    pub change: Change,
}

/// What happened to a replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// It is there.
    Added,
    /// It is gone.
    Removed,
}

/// News for the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Report {
    /// A stored block did not verify and was dropped.
    CorruptBlock {
        /// Where it was stored.
        device: DeviceId,
        /// Its header page; the slot is free again.
        page: PageNumber,
        /// Its key.
        key: BlockKey,
    },
    /// A block in DRAM no longer matched its checksums and is dropped.
    CorruptMemory {
        /// Where it is.
        slot: ArenaSlot,
        /// Its key.
        key: BlockKey,
    },
    /// Blocks of a layout are larger than the segments of every device: they are cached, and never durable. Said once
    /// for each layout.
    Unstorable {
        /// Bytes of one block.
        block_bytes: u64,
        /// Bytes of the largest block that a segment has room for.
        payload_bytes_max: u64,
    },
    /// Tenants were promised more than there is (any more): reservations of NVMe shrink in proportion, those of DRAM are
    /// met in the order in which tenants come.
    Overcommitted {
        /// Of what.
        room: Room,
        /// By how much, and what to do.
        error: QuotaError,
    },
    /// A peer offers blocks of a layout that is new here, and half of the table of tenants' layouts is in use: the other half is
    /// kept for this node's engines, and such offers are refused. Said once.
    OffersRefused {
        /// Layouts of tenants in use.
        layouts: usize,
    },
    /// A device had too many errors and is no longer used.
    DeviceLost {
        /// Which.
        device: DeviceId,
        /// Why.
        reason: String,
    },
}

/// What tenants have quotas of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// The arena.
    Dram,
    /// The devices.
    Nvme,
}
