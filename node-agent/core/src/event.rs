//! Inputs of the core: requests of engines and peers, completions of devices, replies of the control plane.

use std::time::Duration;

pub use reprise_policy::block_command::{BlockAction, BlockCommand, BlockSelection};
pub use reprise_policy::peer::{FillError, FillUpdate, PeerEvent};
pub use reprise_policy::prefetch::Lookahead;
use reprise_policy::quota::Quota;
pub use reprise_policy::routing::Replica;
pub use reprise_policy::session::{Priority, Ranks, Scope};
use reprise_policy::slack::WriteSlack;
use reprise_policy::{
    BlockKey, DevicePlace, Layout, NamespaceDigest, NodeId, NodeMode, SessionId, SlotSet, TenantId,
    TenantName, Tick,
};

use crate::cache::ChainPlace;
pub use crate::cache::Renewal;
use crate::effect::{
    CheckId, DeviceId, FillId, LeaseId, LoadId, LookupId, PlaceId, PlaceKind, RegionId, Ticket,
};
use crate::extents::{ExtentHolder, PinId};
use crate::pool::{DeviceError, DevicePool, OpToken, StoredBlock};

/// Number of a request within its session, chosen by the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// One input of [`AgentCore::apply`](crate::AgentCore::apply).
#[derive(Debug)]
pub enum Event {
    /// Reports the result of `Effect::RenewRegion`.
    RegionRenewed {
        /// Region that was to get new memory.
        region: RegionId,
        /// Whether it has it.
        renewal: Renewal,
    },
    /// Names a tenant; its blocks carry the name on devices from now on. Precedes the first session and the
    /// first offer of the tenant. Without this event, the core writes the tenant's blocks without a name.
    TenantNamed {
        /// Number of the tenant on this node.
        tenant: TenantId,
        /// Name of the tenant.
        name: TenantName,
    },
    /// A tenant that must be encrypted no longer has a key. The core removes its blocks, and gives it no slots until
    /// `TenantRestored`. The runtime closes its sessions.
    TenantErased {
        /// Number of the tenant on this node.
        tenant: TenantId,
    },
    /// An erased tenant has a key again.
    TenantRestored {
        /// Number of the tenant on this node.
        tenant: TenantId,
    },
    /// Sets the tenant whose blocks all tenants may copy; `None`: no tenant. In force until the next such event.
    PublicTenant(Option<TenantId>),
    /// An engine opened a session; the runtime has verified its handshake.
    SessionOpened(SessionOpened),
    /// A session ended, and with it its reservations, loads, and leases of the arena. Its extents stay in quarantine
    /// until its I/O has ended.
    SessionClosed {
        /// Session that has ended.
        session: SessionId,
    },
    /// A session sent a request.
    Request {
        /// Session that sent the request.
        session: SessionId,
        /// Number to repeat in the reply.
        request: RequestId,
        /// Operation and its parameters.
        body: Request,
        /// Time of receipt, from which deadlines count. A time in the future counts as now.
        received: Tick,
    },
    /// A pool operation finished ([`Effect::Device`](crate::effect::Effect::Device)).
    DeviceDone {
        /// Device that ran the operation.
        device: DeviceId,
        /// Token of the finished operation.
        token: OpToken,
        /// Success, or the error of the device.
        result: Result<(), DeviceError>,
    },
    /// A device has failed permanently. Results that still arrive for it count as failures.
    DeviceLost {
        /// Device that has failed.
        device: DeviceId,
        /// Reason, for logs and status messages.
        reason: String,
    },
    /// A device was opened under an unused number. The core uses its pool from now on; `Recovered` events
    /// follow.
    DeviceAttached {
        /// Unused number for the device.
        device: DeviceId,
        /// Recovered pool of the device.
        pool: Box<DevicePool>,
    },
    /// Blocks found on an attached device, in batches of any size.
    Recovered {
        /// Device that holds the blocks.
        device: DeviceId,
        /// Blocks found by recovery.
        blocks: Vec<StoredBlock>,
    },
    /// A device was detached: the core removes its blocks. The runtime reports operations in flight until
    /// [`Effect::DeviceReleased`](crate::effect::Effect::DeviceReleased).
    DeviceDetached {
        /// Device to stop using.
        device: DeviceId,
    },
    /// No process can do I/O on the extents of a holder whose session has ended
    /// ([`Effect::AwaitExtents`](crate::effect::Effect::AwaitExtents)).
    ExtentsReleased {
        /// Holder of the extents.
        holder: ExtentHolder,
    },
    /// Sets the share of the pool that the core keeps free ahead of writes.
    PoolFree {
        /// Share in thousandths of the pool.
        permille: u16,
    },
    /// The read of a block made progress ([`Effect::ReadBlocks`](crate::effect::Effect::ReadBlocks)). Fetches from
    /// peers report with [`PeerEvent::Fill`].
    Fill {
        /// Fill that made progress.
        fill: FillId,
        /// Verified layers, or the failure.
        update: FillUpdate,
    },
    /// The directory answered a lookup.
    LookupAnswered {
        /// Lookup that was answered.
        lookup: LookupId,
        /// Replicas of each key of the lookup, in its order, without those of this node.
        found: Vec<Vec<Replica>>,
    },
    /// The directory did not answer in time or is unreachable: all keys of the lookup count as misses.
    LookupFailed {
        /// Lookup that failed.
        lookup: LookupId,
    },
    /// A block was compared with its checksums ([`Effect::CheckBlock`](crate::effect::Effect::CheckBlock)).
    CheckDone {
        /// Check that has finished.
        check: CheckId,
        /// Result of the comparison.
        integrity: Integrity,
    },
    /// The transport reports progress of fetches, serves and offers, or a request of a peer. Unknown numbers and
    /// invalid indices are ignored.
    Peer(PeerEvent),
    /// The control plane answered where to place replicas ([`Effect::Place`](crate::effect::Effect::Place)).
    PlaceAnswered {
        /// Placement query that was answered.
        place: PlaceId,
        /// One answer for each key of the query, in its order; missing ones count as `Unanswered`.
        answers: Vec<Placement>,
    },
    /// The control plane did not answer a placement query in time or is unreachable.
    PlaceFailed {
        /// Placement query that failed.
        place: PlaceId,
    },
    /// A peer offers blocks; the core answers with
    /// [`Effect::AnswerOffer`](crate::effect::Effect::AnswerOffer).
    PeerOffer(PeerOffer),
    /// A peer requests blocks of a tenant. Answered block by block with
    /// [`Effect::ServeHeader`](crate::effect::Effect::ServeHeader) or
    /// [`Effect::ServeAbsent`](crate::effect::Effect::ServeAbsent).
    PeerRequest(PeerRequest),
    /// The control plane set the mode of this node. The mode with the highest revision wins.
    Mode {
        /// Mode of this node.
        mode: NodeMode,
        /// Revision, from 1; increases with every mode.
        revision: u64,
    },
    /// Moves blocks to another node, or (`None`) stops moving. In force until the next such event.
    Move(Option<Move>),
    /// The control plane granted a tenant's quota on this node.
    Budget(Grant),
    /// The control plane requests the inventory of some hash slots.
    InventoryWanted {
        /// Hash slots to announce.
        slots: Box<SlotSet>,
    },
    /// An engine began a computation. Until its next report, or until the report expires, the core defers writes to
    /// the slack of the computation's layers.
    LayerReported {
        /// Session of the engine.
        session: SessionId,
        /// Slack by the profile of the engine's model; `None` if there is no profile.
        slack: Option<WriteSlack>,
    },
    /// Writes all queued blocks to NVMe at once and defers no further write, because the agent is about to stop.
    Flush,
    /// Time passed. Sent at each [`AgentCore::next_deadline`](crate::AgentCore::next_deadline).
    Tick,
}

/// Quota of a tenant on this node, in force until the next grant. Combined with the configured quota: the
/// lower limit and, within that limit, the higher reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Grant {
    /// Tenant that the grant is for.
    pub tenant: TenantId,
    /// Version of the grants of this tenant on this node; older versions are ignored.
    pub version: u64,
    /// Quota in the arena.
    pub dram: Quota,
    /// Quota over all devices, header pages included.
    pub nvme: Quota,
}

/// Answer to the question where to place a further durable replica of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The block has enough replicas.
    Enough,
    /// Place a replica on this node.
    To(NodeId),
    /// No suitable node has room now.
    NoCapacity,
    /// The owner of the key has not answered.
    Unanswered,
}

/// Order to move an amount of data to another node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Node to move blocks to.
    pub to: NodeId,
    /// Bytes of slots to move.
    pub bytes: u64,
}

/// Blocks that a peer offers, with the numbers of the peer and of the tenant on this node.
pub type PeerOffer = reprise_policy::peer::PeerOffer<NodeId, TenantId>;

/// Request of a peer, with the number of its tenant.
pub type PeerRequest = reprise_policy::peer::PeerRequest<TenantId>;

/// Parameters of a new session.
#[derive(Clone, Debug)]
pub struct SessionOpened {
    /// Number of the session.
    pub session: SessionId,
    /// Tenant whose blocks the session may access.
    pub tenant: TenantId,
    /// Namespace of the session's keys.
    pub namespace: NamespaceDigest,
    /// Layout of the session's blocks.
    pub layout: Layout,
    /// Place of the session's GPU, if it states one: extents are leased near it.
    pub gpu: Option<DevicePlace>,
}

/// Request of an engine.
#[derive(Clone, Debug)]
pub enum Request {
    /// Reserves slots to fill.
    Reserve {
        /// Number of slots; the reply may contain fewer.
        count: u32,
        /// Kind of the slots.
        kind: PlaceKind,
    },
    /// Publishes the contents of filled slots.
    Commit(CommitRequest),
    /// Releases reserved slots without publishing them. The client has ended its I/O on extents among them.
    Abort {
        /// Leases of the reservations; unknown ones are ignored.
        leases: Vec<LeaseId>,
    },
    /// Reports that the client waits for the notice of a commit, so that the core does not defer its writes.
    AwaitDurable {
        /// Ticket of the commit; ignored if its notice was sent.
        ticket: Ticket,
    },
    /// Asks how many leading blocks of a chain, or of a later part of one, are available, and where.
    Match {
        /// Keys of consecutive blocks, in order; of all ranks, those of a block follow each other.
        keys: Vec<BlockKey>,
        /// Ranks whose parts the keys are.
        ranks: Ranks,
        /// Number of blocks before the first key in its chain; `None` if the client does not know it.
        position: Option<u32>,
        /// Nodes to search for blocks.
        scope: Scope,
        /// Keys of the same blocks of a public tenant.
        public: Option<PublicKeys>,
    },
    /// Makes blocks readable in the arena.
    Load(LoadRequest),
    /// Releases a load: its slots become evictable again.
    Release {
        /// Identifier from `Reply::Loaded`.
        load: LoadId,
    },
    /// Reports that copies of some blocks of a load failed verification: the agent checks these blocks.
    Suspect {
        /// Identifier from `Reply::Loaded`.
        load: LoadId,
        /// Indices within the load; those that are invalid or not complete are ignored.
        blocks: Vec<u32>,
    },
    /// Pins durable blocks, to read them from their devices.
    Pin {
        /// Keys of the blocks.
        keys: Vec<BlockKey>,
    },
    /// Ends pins. The client has ended its I/O on these slots.
    Unpin {
        /// Pins; unknown ones are ignored.
        pins: Vec<PinId>,
    },
    /// Hints what the engine will run.
    Lookahead(Lookahead),
    /// Changes blocks of this node on request.
    Manage(BlockCommand),
    /// Drops clean DRAM copies of blocks that are on NVMe.
    Trim,
    /// Returns the counters of the node.
    Stats,
}

/// Filled slots to publish.
#[derive(Clone, Debug)]
pub struct CommitRequest {
    /// Slots of one kind and their blocks: consecutive blocks of one chain, in its order.
    pub items: Vec<CommitItem>,
    /// Eviction priority of the blocks.
    pub priority: Priority,
    /// Block before the first item in its chain; `None` if there is no such block or the client does not know
    /// it.
    pub parent: Option<BlockKey>,
    /// Number of blocks before the first item in its chain; `None` if the client does not know it.
    pub position: Option<u32>,
}

impl CommitRequest {
    /// Place of each item in the chain.
    pub(crate) fn chain(&self) -> impl Iterator<Item = ChainPlace> {
        let parents = std::iter::once(self.parent).chain(self.items.iter().map(|item| item.key));
        (0..).zip(parents).map(|(at, parent)| {
            let position = self.position.map(|position| position.saturating_add(at));
            ChainPlace { parent, position }
        })
    }

    /// Kind of all slots; `None` if there are both.
    pub fn kind(&self) -> Option<PlaceKind> {
        let first = self.items.first().map_or(PlaceKind::Arena, |item| item.lease.kind());
        self.items.iter().all(|item| item.lease.kind() == first).then_some(first)
    }
}

/// One block to publish.
#[derive(Clone, Debug)]
pub struct CommitItem {
    /// Lease of the filled slot.
    pub lease: LeaseId,
    /// Key of the block; `None` if the client sent a key of the wrong length.
    pub key: Option<BlockKey>,
    /// CRC32C of each object, in order.
    pub checksums: Box<[u32]>,
}

/// Parameters of a load of several blocks.
#[derive(Clone, Debug)]
pub struct LoadRequest {
    /// Keys of the blocks, in order.
    pub keys: Vec<BlockKey>,
    /// Time from the receipt after which missing blocks are reported as lost; zero selects the default.
    pub deadline: Duration,
    /// Maximum bytes of one device read; rounded to whole objects, at least one object.
    pub read_bytes: u64,
    /// Nodes to search for blocks.
    pub scope: Scope,
    /// Keys of the same blocks of a public tenant.
    pub public: Option<PublicKeys>,
}

/// Keys of the leading blocks of a request in the namespace of a public tenant, in the order of the request. Ignored if the
/// tenant is not the public one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublicKeys {
    /// Tenant whose blocks may be copied.
    pub tenant: TenantId,
    /// Keys of its blocks.
    pub keys: Box<[BlockKey]>,
}

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Integrity {
    /// Every object matches its checksum.
    Intact,
    /// At least one object does not match its checksum.
    Damaged,
    /// The block could not be checked.
    Unknown,
}
