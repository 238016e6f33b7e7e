//! What hosts say to each other.

use std::sync::Arc;
use std::time::Duration;

use reprise_agent_core::effect::{FetchId, OfferId, PlaceReason};
use reprise_agent_core::event::{Move, Placement, Replica};
use reprise_agent_core::outbox::{Answer, Batch};
use reprise_controlplane_core::{NodeReport, Order, Said, SetMode, Standing};
use reprise_policy::{BlockKey, Epoch, Layout, NodeId, TenantId, Tier};

use crate::memory::Tag;
use crate::store::{Change, Condition, Entry, Key, LeaseId, Prefix, Refused, Revision, Write};

/// A call, unique in the process that makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CallId(pub(crate) u64);

/// A message on a connection.
#[derive(Clone, Debug)]
pub(crate) enum Message {
    Call { call: CallId, request: Request },
    Reply { call: CallId, reply: Reply },
    Ask { call: CallId, question: Question },
    Told { call: CallId, told: Told },
    Peer(PeerMessage),
}

/// What an agent wants of a member.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Register {
        name: usize,
    },
    Beat {
        node: NodeId,
        epoch: Epoch,
    },
    Slots {
        node: NodeId,
        epoch: Epoch,
    },
    Update(Arc<Batch>),
    Lookup {
        keys: Vec<BlockKey>,
        asking: Option<NodeId>,
    },
    Place(Arc<PlaceQuestion>),
    Report(Box<NodeSays>),
    /// The list of members.
    Members,
    /// The lists of members and nodes, and every later one.
    Watch,
}

/// A report of a node.
#[derive(Clone, Debug)]
pub(crate) struct NodeSays {
    pub(crate) node: NodeId,
    pub(crate) epoch: Epoch,
    pub(crate) report: NodeReport,
    /// Of every tenant.
    pub(crate) said: Vec<Said>,
    /// Of the map by which it was said whose tenants are.
    pub(crate) map_digest: u64,
}

/// What a member answers to a report.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeIsTold {
    pub(crate) orders: Vec<Order>,
    pub(crate) direction: Option<Direction>,
}

/// What a member answers.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Registered {
        node: NodeId,
        epoch: Epoch,
    },
    Beaten {
        known: bool,
        version: u64,
    },
    Standing(Option<Box<Standing>>),
    Updated {
        answer: Answer,
        version: u64,
    },
    Found(Answered),
    /// `None`: a newer registration is known.
    Placed(Option<Box<PlaceAnswer>>),
    Members(Arc<MemberList>),
    Nodes(Arc<[NodeInfo]>),
    /// `None`: it is not the registration that is known.
    Reported(Option<NodeIsTold>),
    Unavailable,
}

/// What a member knows of keys.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answered {
    pub(crate) found: Vec<Vec<Replica>>,
    /// Indices of keys that are others'.
    pub(crate) elsewhere: Vec<u32>,
    /// Keys of which some node has not announced what it has.
    pub(crate) partial: usize,
    pub(crate) map_epoch: Epoch,
}

/// Where do further durable replicas of blocks go?
#[derive(Clone, Debug)]
pub(crate) struct PlaceQuestion {
    pub(crate) holder: NodeId,
    pub(crate) epoch: Epoch,
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) slot_bytes: u64,
    pub(crate) reason: PlaceReason,
}

/// Where they go, as far as a member can say.
#[derive(Clone, Debug)]
pub(crate) struct PlaceAnswer {
    pub(crate) answers: Vec<Placement>,
    /// Indices of keys that are others'.
    pub(crate) elsewhere: Vec<u32>,
    pub(crate) map_epoch: Epoch,
}

/// What a node is to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Direction {
    pub(crate) set: SetMode,
    pub(crate) given: Option<Move>,
}

/// The members of the control plane, as one of them knows them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemberList {
    pub(crate) epoch: Epoch,
    /// Names and incarnations, in order.
    pub(crate) members: Vec<(usize, Revision)>,
    pub(crate) answering: usize,
    /// It is sure of its own place.
    pub(crate) registered: bool,
}

/// A node: its number, and the machine that an address means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeInfo {
    pub(crate) node: NodeId,
    pub(crate) host: usize,
}

/// What a member wants of the store.
#[derive(Clone, Debug)]
pub(crate) enum Question {
    Get(Vec<Key>),
    Range(Prefix),
    Transact { conditions: Vec<Condition>, writes: Vec<Write> },
    Delete { conditions: Vec<Condition>, key: Key },
    Watch { prefix: Prefix, from: Revision },
    Grant(Duration),
    KeepAlive(LeaseId),
    Revoke(LeaseId),
}

/// What the store answers.
#[derive(Clone, Debug)]
pub(crate) enum Told {
    Entries(Vec<Option<Entry>>),
    Range { revision: Revision, entries: Vec<(Key, Entry)> },
    Transacted(Result<Revision, Refused>),
    Watching,
    Compacted,
    Changes { revision: Revision, changes: Vec<Change> },
    Granted(LeaseId),
    Kept { lives: bool },
    Revoked,
}

/// What two agents say to each other; the fetch was named by the one that asks.
#[derive(Clone, Debug)]
pub(crate) enum PeerMessage {
    Fetch { fetch: FetchId, keys: Vec<BlockKey>, layout: Layout, deadline: Duration },
    Cancel { fetch: FetchId },
    Header { fetch: FetchId, block: u32, tier: Tier, checksums: Box<[u32]> },
    Layers { fetch: FetchId, block: u32, first: u32, tags: Vec<Tag> },
    Absent { fetch: FetchId, block: u32 },
    Offer { offer: OfferId, blocks: Box<OfferedBlocks> },
    OfferAnswer { offer: OfferId, taken: Vec<u32>, retry_after: Duration },
}

/// Blocks that an agent offers to another.
#[derive(Clone, Debug)]
pub(crate) struct OfferedBlocks {
    /// Names and numbers of tenants are the same everywhere.
    pub(crate) tenant: TenantId,
    pub(crate) layout: Layout,
    pub(crate) keys: Vec<BlockKey>,
}

impl Message {
    /// For the digest of the trace.
    pub(crate) fn code(&self) -> u64 {
        match self {
            Message::Call { call, request } => (call.0 << 32).wrapping_add(request.code()),
            Message::Reply { call, reply } => (call.0 << 32).wrapping_add(reply.code()),
            Message::Ask { call, question } => (call.0 << 32).wrapping_add(question.code()),
            Message::Told { call, told } => (call.0 << 32).wrapping_add(told.code()),
            Message::Peer(message) => message.code(),
        }
    }
}

impl Request {
    fn code(&self) -> u64 {
        match self {
            Request::Register { .. } => 1,
            Request::Beat { .. } => 2,
            Request::Update(batch) => 3 + (batch.sequence << 8),
            Request::Lookup { keys, .. } => 4 + ((keys.len() as u64) << 8),
            Request::Slots { .. } => 5,
            Request::Members => 6,
            Request::Watch => 7,
            Request::Place(question) => 9 + ((question.keys.len() as u64) << 8),
            Request::Report(says) => 8 + (says.report.used.nvme << 8),
        }
    }
}

impl Reply {
    fn code(&self) -> u64 {
        match self {
            Reply::Registered { epoch, .. } => 11 + (epoch.0 << 8),
            Reply::Beaten { known, .. } => 12 + (u64::from(*known) << 8),
            Reply::Updated { answer: Answer::Fenced, .. } => 13,
            Reply::Updated { answer: Answer::Expecting(expected), .. } => 14 + (expected << 8),
            Reply::Found(answered) => 15 + ((answered.found.iter().flatten().count() as u64) << 8),
            Reply::Standing(None) => 16,
            Reply::Standing(Some(standing)) => 17 + ((standing.wanted.len() as u64) << 8),
            Reply::Members(list) => 18 + (list.epoch.0 << 8),
            Reply::Nodes(nodes) => 19 + ((nodes.len() as u64) << 8),
            Reply::Unavailable => 20,
            Reply::Placed(answer) => {
                let keys = answer.as_ref().map_or(0, |answer| answer.answers.len() as u64 + 1);
                52 + (keys << 8)
            }
            Reply::Reported(None) => 51 + (1 << 8),
            Reply::Reported(Some(NodeIsTold { orders, direction })) => {
                let bytes = direction.and_then(|direction| direction.given).map_or(0, |given| given.bytes);
                51 + ((orders.len() as u64) << 16) + (bytes << 24)
            }
        }
    }
}

impl Question {
    fn code(&self) -> u64 {
        match self {
            Question::Get(keys) => 31 + ((keys.len() as u64) << 8),
            Question::Range(_) => 32,
            Question::Transact { writes, .. } => 33 + ((writes.len() as u64) << 8),
            Question::Watch { from, .. } => 34 + (from << 8),
            Question::Grant(_) => 35,
            Question::KeepAlive(lease) => 36 + (lease.0 << 8),
            Question::Delete { conditions, .. } => 38 + ((conditions.len() as u64) << 8),
            Question::Revoke(lease) => 37 + (lease.0 << 8),
        }
    }
}

impl Told {
    fn code(&self) -> u64 {
        match self {
            Told::Entries(_) => 41,
            Told::Range { revision, entries } => 42 + (revision << 8) + ((entries.len() as u64) << 24),
            Told::Transacted(Ok(revision)) => 43 + (revision << 8),
            Told::Transacted(Err(_)) => 44,
            Told::Watching => 45,
            Told::Compacted => 46,
            Told::Changes { revision, .. } => 47 + (revision << 8),
            Told::Granted(lease) => 48 + (lease.0 << 8),
            Told::Kept { lives } => 49 + (u64::from(*lives) << 8),
            Told::Revoked => 50,
        }
    }
}

impl PeerMessage {
    fn code(&self) -> u64 {
        match self {
            PeerMessage::Fetch { fetch, .. } => 21 + (fetch.0 << 8),
            PeerMessage::Cancel { fetch } => 22 + (fetch.0 << 8),
            PeerMessage::Header { fetch, block, .. } => 23 + (fetch.0 << 8) + (u64::from(*block) << 32),
            PeerMessage::Layers { fetch, first, tags, .. } => {
                24 + (fetch.0 << 8) + (u64::from(*first) << 32) + (tags[0] << 40)
            }
            PeerMessage::Absent { fetch, block } => 25 + (fetch.0 << 8) + (u64::from(*block) << 32),
            PeerMessage::Offer { offer, .. } => 26 + (offer.0 << 8),
            PeerMessage::OfferAnswer { offer, taken, .. } => {
                27 + (offer.0 << 8) + ((taken.len() as u64) << 40)
            }
        }
    }
}
