//! What happens to an agent: requests of engines, completions of devices, peers and the directory.

use std::time::Duration;

use reprise_policy::quota::Quota;
use reprise_policy::routing::LoadClass;
use reprise_policy::{
    BlockKey, Layout, NamespaceDigest, NodeId, NodeMode, SessionId, SlotSet, TenantId, TenantName, Tick, Tier,
};

use crate::effect::{
    CheckId, DeviceId, FillId, LeaseId, LoadId, LookupId, OfferId, PeerOfferId, PlaceId, ServeId,
};
use crate::pool::{DeviceError, DevicePool, OpToken, StoredBlock};

/// Names one request within its session; chosen by the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// One thing that happened.
#[derive(Debug)]
pub enum Event {
    /// A tenant's name, which its blocks carry on devices from now on. Comes before the first session and the first offer of
    /// the tenant; a core that is never told writes blocks without it.
    TenantNamed {
        /// The number that its blocks have on this node.
        tenant: TenantId,
        /// Its name.
        name: TenantName,
    },
    /// An engine opened a session (its greeting was checked by the runtime).
    SessionOpened(SessionOpened),
    /// A session ended: all its leases, reservations and loads end with it.
    SessionClosed {
        /// Which.
        session: SessionId,
    },
    /// A request of a session.
    Request {
        /// Who asks.
        session: SessionId,
        /// Repeated in the reply.
        request: RequestId,
        /// What is wanted.
        body: Request,
        /// When it came: deadlines count from here. An instant to come counts as now.
        received: Tick,
    },
    /// A pool operation finished ([`Effect::Device`](crate::effect::Effect::Device)).
    DeviceDone {
        /// The device.
        device: DeviceId,
        /// The operation's token.
        token: OpToken,
        /// How it ended.
        result: Result<(), DeviceError>,
    },
    /// A device is beyond use: whatever is still reported of it has failed.
    DeviceLost {
        /// The device.
        device: DeviceId,
        /// Why, for people.
        reason: String,
    },
    /// A device has been opened under a number that no device has: its pool is used from now on. What was found there follows.
    DeviceAttached {
        /// Its number.
        device: DeviceId,
        /// Its pool.
        pool: Box<DevicePool>,
    },
    /// Blocks that were found on an attached device, in pieces of any size.
    Recovered {
        /// The device.
        device: DeviceId,
        /// The blocks.
        blocks: Vec<StoredBlock>,
    },
    /// A device is not wanted any more: its blocks are forgotten. The runtime goes on reporting what it has under way, until
    /// [`Effect::DeviceReleased`](crate::effect::Effect::DeviceReleased).
    DeviceDetached {
        /// The device.
        device: DeviceId,
    },
    /// Another share of the pool, in thousandths, is to be kept free ahead of writes.
    PoolFree {
        /// The share.
        permille: u16,
    },
    /// A fill got further ([`Effect::ReadBlocks`](crate::effect::Effect::ReadBlocks) or `PeerFetch`).
    Fill {
        /// Which.
        fill: FillId,
        /// How far.
        update: FillUpdate,
    },
    /// The directory answered.
    Found {
        /// The question.
        lookup: LookupId,
        /// Replicas of each key of the question, in its order; none of this node.
        found: Vec<Vec<Replica>>,
    },
    /// The directory did not answer in time or cannot be reached: whatever was looked up is a miss.
    LookupFailed {
        /// The question.
        lookup: LookupId,
    },
    /// A block was compared with its checksums ([`Effect::CheckBlock`](crate::effect::Effect::CheckBlock)).
    Checked {
        /// Which check.
        check: CheckId,
        /// What was found.
        integrity: Integrity,
    },
    /// A peer asks for blocks.
    PeerRequest(PeerRequest),
    /// All objects of one block that a peer asked for were handed to the transport's socket, or dropped with
    /// the connection: the block's lease ends.
    ServeDone {
        /// The peer's request.
        serve: ServeId,
        /// Index of the block in it.
        block: u32,
    },
    /// The connection of a serve is gone; nothing more of it will be sent.
    ServeAborted {
        /// The peer's request.
        serve: ServeId,
    },
    /// The control plane has said where further replicas of blocks go ([`Effect::Place`](crate::effect::Effect::Place)).
    Placed {
        /// The question.
        place: PlaceId,
        /// One for each key of the question, in its order; of what is missing nobody has said anything.
        answers: Vec<Placement>,
    },
    /// The control plane did not answer in time or cannot be reached.
    PlaceFailed {
        /// The question.
        place: PlaceId,
    },
    /// A peer has answered an offer ([`Effect::Offer`](crate::effect::Effect::Offer)).
    OfferAnswered {
        /// The offer.
        offer: OfferId,
        /// Indices of the keys that it takes; unknown ones are passed over.
        taken: Vec<u32>,
        /// When to offer the others again.
        retry_after: Duration,
    },
    /// The peer cannot be reached or did not answer in time.
    OfferFailed {
        /// The offer.
        offer: OfferId,
    },
    /// A peer offers blocks: answer with [`Effect::AnswerOffer`](crate::effect::Effect::AnswerOffer).
    PeerOffer(PeerOffer),
    /// The control plane has said what this node is for. Of two modes that with the higher revision holds.
    Mode {
        /// The mode.
        mode: NodeMode,
        /// Grows with every mode, from 1.
        revision: u64,
    },
    /// Blocks are to move to another node, or (`None`) not any more. Holds until the next such event.
    Move(Option<Move>),
    /// The control plane has granted a tenant's budget on this node.
    Budget(Grant),
    /// The control plane asks for everything in some hash slots: announce the inventory of these.
    InventoryWanted {
        /// The slots.
        slots: Box<SlotSet>,
    },
    /// Blocks that wait for company on their way to NVMe are to be written now: the agent is about to stop.
    Flush,
    /// Time passed; sent whenever the instant of [`AgentCore::next_deadline`](crate::agent::AgentCore) is reached.
    Tick,
}

/// What the control plane lets a tenant hold on this node, until the next grant. Of this and the configuration the lower
/// limit holds, and the higher reservation below it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Whose.
    pub tenant: TenantId,
    /// Grows with every grant to this node for this tenant; older ones are passed over.
    pub version: u64,
    /// Of the arena.
    pub dram: Quota,
    /// Of all devices together, header pages included.
    pub nvme: Quota,
}

/// Where a further durable replica of a block goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// There are enough.
    Enough,
    /// To this node.
    To(NodeId),
    /// No node has room for it now.
    Nowhere,
    /// Whoever knows has not answered.
    Unanswered,
}

/// So many bytes of blocks are to move to another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Where to.
    pub to: NodeId,
    /// Slot bytes.
    pub bytes: u64,
}

/// Blocks that a peer offers. What is taken is fetched from it, and written to this node's devices.
#[derive(Clone, Debug)]
pub struct PeerOffer {
    /// Repeated in the answer.
    pub offer: PeerOfferId,
    /// Who has the blocks.
    pub from: NodeId,
    /// Whose blocks they are, by its number on this node.
    pub tenant: TenantId,
    /// Geometry of all of them.
    pub layout: Layout,
    /// Which blocks.
    pub keys: Vec<BlockKey>,
}

/// A new session.
#[derive(Clone, Debug)]
pub struct SessionOpened {
    /// Its id.
    pub session: SessionId,
    /// Whose blocks it may see.
    pub tenant: TenantId,
    /// What it compares with.
    pub namespace: NamespaceDigest,
    /// Geometry of its blocks.
    pub layout: Layout,
}

/// A call of an engine.
#[derive(Clone, Debug)]
pub enum Request {
    /// Wants `count` slots to fill.
    Reserve {
        /// How many; fewer may be given.
        count: u32,
    },
    /// Publishes filled slots.
    Commit(CommitRequest),
    /// Gives slots back unused.
    Abort {
        /// The reservations; unknown ones are passed over.
        leases: Vec<LeaseId>,
    },
    /// How many leading keys are available, and where.
    Match {
        /// The whole chain, in order.
        keys: Vec<BlockKey>,
        /// Where to look.
        scope: Scope,
    },
    /// Wants blocks readable in the arena.
    Load(LoadRequest),
    /// Done with a load: its slots may be evicted again.
    Release {
        /// From `Reply::Loaded`.
        load: LoadId,
    },
    /// Verified copies of blocks of a load did not match: the agent should look at these blocks.
    Suspect {
        /// From `Reply::Loaded`.
        load: LoadId,
        /// Indices within the load; unknown ones, and those that are not complete, are passed over.
        blocks: Vec<u32>,
    },
    /// Drop clean DRAM copies of blocks that are on NVMe.
    Trim,
    /// Wants the counters.
    Stats,
}

/// Filled slots to publish.
#[derive(Clone, Debug)]
pub struct CommitRequest {
    /// The slots and what they hold: consecutive blocks of one chain, in its order.
    pub items: Vec<CommitItem>,
    /// How much these blocks are worth keeping.
    pub priority: Priority,
    /// The block before the first item in its chain; `None`: there is none, or the client does not know it.
    pub parent: Option<BlockKey>,
}

/// One block to publish.
#[derive(Clone, Debug)]
pub struct CommitItem {
    /// The reservation.
    pub lease: LeaseId,
    /// The block's key; `None` when the client sent one of a wrong length.
    pub key: Option<BlockKey>,
    /// CRC32C of each object, in order.
    pub checksums: Box<[u32]>,
}

/// How much a block is worth keeping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Priority {
    /// First to go.
    Low = 0,
    /// The default.
    #[default]
    Normal = 1,
    /// Last to go: prefixes that many prompts share.
    High = 2,
}

/// Where to look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// This node only.
    Local,
    /// This node, then its peers.
    Cluster,
}

/// A load of many blocks.
#[derive(Clone, Debug)]
pub struct LoadRequest {
    /// Which, in order.
    pub keys: Vec<BlockKey>,
    /// What is not there so long after the receipt is reported as missed; zero: the default.
    pub deadline: Duration,
    /// Bytes of one device read at the most; rounded to whole objects, at least one.
    pub read_bytes: u64,
    /// Where to look.
    pub scope: Scope,
}

/// How a fill got further.
#[derive(Clone, Debug)]
pub enum FillUpdate {
    /// The block's checksums are known and its first `layers` layers are verified in the slot.
    /// `checksums` comes with the first update.
    Layers {
        /// Leading layers of the block that are verified.
        layers: u32,
        /// CRC32C of each object; with the first update.
        checksums: Option<Box<[u32]>>,
        /// Where the block came from (on the peer, for a fetch).
        tier: Tier,
    },
    /// The block will not come; the slot is no longer touched, unless the error says so. After all layers are
    /// reported ready the device or transport no longer touches the slot either: no further update comes.
    Failed(FillError),
}

/// Why a fill failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FillError {
    /// The device reported an error.
    #[error("device error")]
    Device,
    /// The read was not begun, or could not be for want of memory or room in a queue: the block is as good as before.
    #[error("the device did not take the read")]
    Refused,
    /// The device is lost and did not let go of the slot: it may write to it at any time, so the slot is never used
    /// again.
    #[error("the device is lost and may still write to the slot")]
    Stranded,
    /// Header or object did not match its checksum, key or generation.
    #[error("verification failed")]
    Corrupt,
    /// The peer does not have the block any more.
    #[error("the peer does not have it")]
    Absent,
    /// The peer cannot be reached, stalled or broke the protocol.
    #[error("peer lost")]
    PeerLost,
}

/// What a check found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Integrity {
    /// Every object matches its checksum.
    Intact,
    /// At least one does not.
    Damaged,
    /// The block was not looked at.
    Unknown,
}

/// A replica elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replica {
    /// The node that holds it.
    pub node: NodeId,
    /// Where it lies there.
    pub tier: Tier,
    /// How busy that node is, as the directory last heard.
    pub load: LoadClass,
}

/// A peer wants blocks.
#[derive(Clone, Debug)]
pub struct PeerRequest {
    /// Chosen by the transport, unique on this node.
    pub serve: ServeId,
    /// Which blocks.
    pub keys: Vec<BlockKey>,
    /// The layout that the peer expects; blocks of another layout are reported absent.
    pub layout: Layout,
    /// The peer gives up after this time.
    pub deadline: Duration,
}
