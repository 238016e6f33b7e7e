//! Ids of what waits for a fill, requests for fills, and reports about them.
//!
//! The owner of fills reports to these ids without reading them. The core passes a report to the owner that
//! the id names, which alone knows the object.

use std::time::Duration;

use reprise_policy::{BlockKey, Layout, TenantId};

use crate::cache::{FrameIndex, Lease, LocalBlock, PublicCopy, Read, SizeClassId};
use crate::effect::{LossReason, ReadClass, Source};
use crate::event::{FillError, Replica};

/// Party that waits for the fill of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct WaiterId {
    /// Number of the object whose block waits.
    pub(crate) object: u64,
    /// Index of the block in the object.
    pub(crate) block: u32,
    /// Owner of the object.
    pub(crate) owner: WaiterOwner,
}

/// Owner of an object whose blocks wait for fills.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum WaiterOwner {
    /// A load of an engine.
    Load,
    /// A request of a peer.
    Serve,
    /// Blocks that are read ahead of their load.
    Prefetch,
}

impl WaiterOwner {
    /// Whether an engine or a peer waits for the owner's blocks.
    pub(crate) fn awaits(self) -> bool {
        match self {
            WaiterOwner::Load | WaiterOwner::Serve => true,
            WaiterOwner::Prefetch => false,
        }
    }
}

/// Number of a wait: one waiter of one fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WaitId(pub(crate) u32);

/// Blocks of one object that are not in DRAM. Blocks that this node has or is filling come first, so that all
/// reads start before the first fetch.
#[derive(Debug)]
pub(crate) struct FillRequest {
    /// Owner and number of the object.
    pub(crate) object: (WaiterOwner, u64),
    /// Layout of the blocks.
    pub(crate) layout: Layout,
    /// Bytes of one read of a device.
    pub(crate) read_bytes: u64,
    /// Rank of the reads at their devices.
    pub(crate) class: ReadClass,
    /// Fills of others that the object may wait for.
    pub(crate) joins: Joins,
    /// Blocks that this node has or is filling.
    pub(crate) local: Vec<(u32, LocalBlock)>,
    /// Blocks that a public tenant has on this node.
    pub(crate) imports: Option<LocalImports>,
    /// Blocks to fetch from peers.
    pub(crate) remote: Option<RemoteBlocks>,
}

/// Blocks to copy from those of a public tenant on this node.
#[derive(Debug)]
pub(crate) struct LocalImports {
    /// Size class of the copies.
    pub(crate) size_class: SizeClassId,
    pub(crate) blocks: Vec<Import>,
}

/// Block to copy from one of a public tenant.
#[derive(Debug)]
pub(crate) struct Import {
    /// Index of the block in its object.
    pub(crate) block: u32,
    /// Key of the copy.
    pub(crate) key: BlockKey,
    /// Block to copy.
    pub(crate) copy: PublicCopy,
}

/// Replicas of a block on other nodes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Replicas {
    /// Under the block's own key.
    pub(crate) own: Vec<Replica>,
    /// Under the key of the same block of a public tenant.
    pub(crate) public: Vec<Replica>,
}

/// Fills in progress that an object may wait for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Joins {
    /// All fills.
    All,
    /// Reads of devices and copies within the arena.
    Local,
}

/// Blocks to fetch from peers.
#[derive(Debug)]
pub(crate) struct RemoteBlocks {
    pub(crate) size_class: SizeClassId,
    /// Time for the fetches.
    pub(crate) deadline: Duration,
    /// Reason to report for blocks without a replica.
    pub(crate) otherwise: LossReason,
    /// Public tenant of the blocks' public keys, if there are any.
    pub(crate) public: Option<TenantId>,
    pub(crate) blocks: Vec<RemoteBlock>,
}

/// Block to fetch from a peer.
#[derive(Debug)]
pub(crate) struct RemoteBlock {
    /// Index of the block in its object.
    pub(crate) block: u32,
    pub(crate) key: BlockKey,
    /// Key of the same block of the public tenant.
    pub(crate) public_key: Option<BlockKey>,
    pub(crate) replicas: Replicas,
}

/// A waiter was attached to a fill.
#[derive(Debug)]
pub(crate) struct Attached {
    /// Lease on the slot of the fill.
    pub(crate) lease: Lease<Read>,
    pub(crate) wait: WaitId,
    pub(crate) source: Source,
    /// Verified layers of the fill so far.
    pub(crate) layers: u16,
    /// Whether the fill had started before.
    pub(crate) joined: bool,
}

/// Layers of a fill were verified. The wait has ended once the block is whole.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Advanced {
    /// Verified layers before.
    pub(crate) from: u16,
    /// Verified layers now.
    pub(crate) to: u16,
    pub(crate) source: Source,
    /// Whether all layers are verified.
    pub(crate) is_whole: bool,
}

/// A fill failed, and with it the wait.
#[derive(Clone, Debug)]
pub(crate) struct Failed {
    pub(crate) error: FillError,
    /// Other replicas of the block; `None` if the directory was not asked.
    pub(crate) others: Option<Replicas>,
}

/// Wait of a block, for the audit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KnownWait {
    pub(crate) wait: WaitId,
    /// Frame of the fill.
    pub(crate) frame: FrameIndex,
    /// Verified layers of the fill.
    pub(crate) layers: u16,
}

const _: () = assert!(size_of::<WaiterId>() == 16, "every waiting block has one");
