//! Options and results of requests in a session between an agent and its clients; both sides use these types.
//!
//! The messages around them differ. An agent gets lists of any length with the time of their receipt, and answers
//! with places. A client adds its sessions, open files and mapped memory.

mod backend;

use crate::Tier;
use crate::slack::Computation;

pub use backend::TransferBackend;

/// Number of a commit within its session; the durable notice names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket(pub u64);

/// Maximum bytes of a model's name in a report.
pub const MODEL_BYTES_MAX: usize = 253;

/// Computation that an engine begins, and its measurement of the one that it reported before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerReport {
    /// Model name, as in the subject of its profile; 1 to [`MODEL_BYTES_MAX`] bytes.
    pub model: String,
    /// Computation that begins; `None` if the engine computes nothing.
    pub computation: Option<Computation>,
    /// Measured microseconds of one layer of the computation before; `None` if they were not measured.
    pub previous_layer_micros: Option<u32>,
}

/// Prediction and budget of a slack profile for a computation. All 0 without a profile.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerGuidance {
    /// Microseconds of one layer without I/O; 0 if they were not measured.
    pub layer_micros: u32,
    /// Usable microseconds of slack in each layer; 0 outside of all windows.
    pub slack_micros: u32,
    /// Multiprocessors that I/O may use at the same time.
    pub io_sms: u32,
    /// IOCBs of the largest read kernel that fits the slack.
    pub read_iocbs: u32,
    /// IOCBs of the largest write kernel that fits the slack.
    pub write_iocbs: u32,
}

/// Nodes to search for blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Scope {
    /// This node only; the agent sends no network request.
    Local,
    /// This node, then its peers.
    #[default]
    Cluster,
}

/// Ranks of a tensor-parallel group whose parts of each block are matched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ranks {
    /// The session's own rank: one key for each block.
    #[default]
    Own,
    /// All ranks of the session's layout: `tp_size` consecutive keys for each block, in the order of the ranks. A block
    /// is available only if the parts of all ranks are.
    All,
}

/// Location where a block was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Source {
    /// DRAM of this node.
    OwnDram = 1,
    /// NVMe of this node.
    OwnNvme = 2,
    /// DRAM of a peer.
    PeerDram = 3,
    /// NVMe of a peer.
    PeerNvme = 4,
}

impl Source {
    /// All sources, in order of expected latency.
    pub const ALL: [Source; 4] = [Source::OwnDram, Source::OwnNvme, Source::PeerDram, Source::PeerNvme];

    /// Returns the source of a block that comes from a tier of a peer.
    pub fn of_peer(tier: Tier) -> Source {
        match tier {
            Tier::Dram => Source::PeerDram,
            Tier::Nvme => Source::PeerNvme,
        }
    }

    /// Returns the source with a number; `None` for an unknown number.
    pub fn from_number(number: u32) -> Option<Source> {
        Source::ALL.into_iter().find(|source| *source as u32 == number)
    }
}

/// Eviction priority of a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Priority {
    /// Evicted before all others.
    Low = 0,
    /// Default of commits without a priority.
    #[default]
    Normal = 1,
    /// Evicted last, for prefixes that many prompts share.
    High = 2,
}

/// Result for one item of a commit. In every case, the lease has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CommitStatus {
    /// The block is readable on the node from now on.
    Committed,
    /// The node had the block already, and it may not be durable yet; the slot was released.
    Duplicate,
    /// The lease does not exist.
    NoLease,
    /// Key or checksums do not fit the layout; the slot was released.
    BadItem,
    /// The block of an extent is durable, and readable on the node.
    Durable,
    /// The device could not make the block of an extent durable; the slot was released.
    Failed,
}

impl CommitStatus {
    /// Reports whether this commit stored the block.
    pub fn is_committed(self) -> bool {
        self == CommitStatus::Committed
    }
}
