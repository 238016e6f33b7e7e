//! Messages between hosts.

use std::sync::Arc;
use std::time::Duration;

use reprise_agent_core::effect::{FetchId, Offer, OfferId, PlacementReason};
use reprise_agent_core::event::{Move, Placement, Replica};
use reprise_agent_core::outbox::{Answer, Batch};
use reprise_controlplane_core::{ModeRecord, NodeReport, QuotaGrant, ReportedTenant, SlotStatus};
use reprise_policy::{BlockKey, Epoch, Layout, NodeId, TenantId, Tier};

use crate::memory::Tag;
use crate::store::{Change, Condition, Entry, Key, LeaseId, Prefix, Revision, TransactionError, Write};

/// Identifies a call within the calling process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CallId(pub(crate) u64);

/// A message on a connection.
#[derive(Clone, Debug)]
pub(crate) enum Message {
    Call { call: CallId, request: Request },
    Reply { call: CallId, reply: Reply },
    StoreRequest { call: CallId, request: StoreRequest },
    StoreReply { call: CallId, reply: StoreReply },
    Peer(PeerMessage),
}

/// A request of an agent to a member.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Register {
        name: usize,
        domain: String,
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
        requester: Option<NodeId>,
    },
    Place(Arc<PlacementRequest>),
    Report(Box<NodeReportBody>),
    /// Requests the list of members.
    Members,
    /// Requests the lists of members and nodes, and all later changes.
    Watch,
}

/// Body of a node's report.
#[derive(Clone, Debug)]
pub(crate) struct NodeReportBody {
    pub(crate) node: NodeId,
    pub(crate) epoch: Epoch,
    pub(crate) report: NodeReport,
    /// Reports of all tenants.
    pub(crate) tenants: Vec<ReportedTenant>,
    /// Digest of the map from which the owners of tenants were derived.
    pub(crate) map_digest: u64,
}

/// A member's answer to a report.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeReportReply {
    pub(crate) grants: Vec<QuotaGrant>,
    pub(crate) direction: Option<Direction>,
}

/// A member's answer to a request.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Registered {
        node: NodeId,
        epoch: Epoch,
    },
    Heartbeat {
        known: bool,
        version: u64,
    },
    SlotStatus(Option<Box<SlotStatus>>),
    Updated {
        answer: Answer,
        version: u64,
    },
    Found(LookupAnswer),
    /// `None`: the member knows a newer registration.
    Placed(Option<Box<PlacementAnswer>>),
    Members(Arc<MemberListReply>),
    Nodes(Arc<[NodeInfo]>),
    /// `None`: the member does not know the registration.
    Reported(Option<NodeReportReply>),
    Unavailable,
}

/// Replicas of keys in a member's directory.
#[derive(Clone, Debug, Default)]
pub(crate) struct LookupAnswer {
    pub(crate) found: Vec<Vec<Replica>>,
    /// Indices of keys that belong to other members.
    pub(crate) elsewhere: Vec<u32>,
    /// Number of keys for which some node has not completed its inventory.
    pub(crate) partial: usize,
    pub(crate) map_epoch: Epoch,
}

/// Requests the targets of further durable replicas.
#[derive(Clone, Debug)]
pub(crate) struct PlacementRequest {
    pub(crate) holder: NodeId,
    pub(crate) epoch: Epoch,
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) slot_bytes: u64,
    pub(crate) reason: PlacementReason,
}

/// Targets of replicas, as far as the member knows them.
#[derive(Clone, Debug)]
pub(crate) struct PlacementAnswer {
    pub(crate) answers: Vec<Placement>,
    /// Indices of keys that belong to other members.
    pub(crate) elsewhere: Vec<u32>,
    pub(crate) map_epoch: Epoch,
}

/// Instructions for a node.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Direction {
    pub(crate) set: ModeRecord,
    pub(crate) given: Option<Move>,
}

/// The members of the control plane, as known to one of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MemberListReply {
    pub(crate) epoch: Epoch,
    /// Names and incarnations, in order.
    pub(crate) members: Vec<(usize, Revision)>,
    pub(crate) answering: usize,
    /// The answering member is sure of its own place.
    pub(crate) registered: bool,
}

/// Number of a node, and the host of its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NodeInfo {
    pub(crate) node: NodeId,
    pub(crate) host: usize,
}

/// A member's request to the store.
#[derive(Clone, Debug)]
pub(crate) enum StoreRequest {
    Get(Vec<Key>),
    Range(Prefix),
    Transact { conditions: Vec<Condition>, writes: Vec<Write> },
    Delete { conditions: Vec<Condition>, key: Key },
    Watch { prefix: Prefix, from: Revision },
    Grant(Duration),
    KeepAlive(LeaseId),
    Revoke(LeaseId),
}

/// The store's answer to a request.
#[derive(Clone, Debug)]
pub(crate) enum StoreReply {
    Entries(Vec<Option<Entry>>),
    Range { revision: Revision, entries: Vec<(Key, Entry)> },
    Transacted(Result<Revision, TransactionError>),
    Watching,
    Compacted { revision: Revision },
    Changes { revision: Revision, changes: Vec<Change> },
    Granted(LeaseId),
    Kept { lives: bool },
    Revoked,
}

/// A message between two agents; the requesting agent numbers the fetch. Names and numbers of tenants are the same
/// on all nodes.
#[derive(Clone, Debug)]
pub(crate) enum PeerMessage {
    Fetch { fetch: FetchId, tenant: TenantId, keys: Vec<BlockKey>, layout: Layout, deadline: Duration },
    Cancel { fetch: FetchId },
    Header { fetch: FetchId, block: u32, tier: Tier, checksums: Box<[u32]> },
    Layers { fetch: FetchId, block: u32, first: u32, tags: Vec<Tag> },
    Absent { fetch: FetchId, block: u32 },
    Offer(Box<Offer>),
    OfferAnswer { offer: OfferId, taken: Vec<u32>, retry_after: Duration },
}

impl Message {
    /// Returns a number for the digest of the trace.
    pub(crate) fn code(&self) -> u64 {
        match self {
            Message::Call { call, request } => (call.0 << 32).wrapping_add(request.code()),
            Message::Reply { call, reply } => (call.0 << 32).wrapping_add(reply.code()),
            Message::StoreRequest { call, request } => (call.0 << 32).wrapping_add(request.code()),
            Message::StoreReply { call, reply } => (call.0 << 32).wrapping_add(reply.code()),
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
            Request::Place(request) => 9 + ((request.keys.len() as u64) << 8),
            Request::Report(body) => 8 + (body.report.used.nvme << 8),
        }
    }
}

impl Reply {
    fn code(&self) -> u64 {
        match self {
            Reply::Registered { epoch, .. } => 11 + (epoch.0 << 8),
            Reply::Heartbeat { known, .. } => 12 + (u64::from(*known) << 8),
            Reply::Updated { answer: Answer::Fenced, .. } => 13,
            Reply::Updated { answer: Answer::Expecting(expected), .. } => 14 + (expected << 8),
            Reply::Found(answered) => 15 + ((answered.found.iter().flatten().count() as u64) << 8),
            Reply::SlotStatus(None) => 16,
            Reply::SlotStatus(Some(status)) => 17 + ((status.wanted.len() as u64) << 8),
            Reply::Members(list) => 18 + (list.epoch.0 << 8),
            Reply::Nodes(nodes) => 19 + ((nodes.len() as u64) << 8),
            Reply::Unavailable => 20,
            Reply::Placed(answer) => {
                let keys = answer.as_ref().map_or(0, |answer| answer.answers.len() as u64 + 1);
                52 + (keys << 8)
            }
            Reply::Reported(None) => 51 + (1 << 8),
            Reply::Reported(Some(NodeReportReply { grants, direction })) => {
                let bytes = direction.and_then(|direction| direction.given).map_or(0, |given| given.bytes);
                51 + ((grants.len() as u64) << 16) + (bytes << 24)
            }
        }
    }
}

impl StoreRequest {
    fn code(&self) -> u64 {
        match self {
            StoreRequest::Get(keys) => 31 + ((keys.len() as u64) << 8),
            StoreRequest::Range(_) => 32,
            StoreRequest::Transact { writes, .. } => 33 + ((writes.len() as u64) << 8),
            StoreRequest::Watch { from, .. } => 34 + (from << 8),
            StoreRequest::Grant(_) => 35,
            StoreRequest::KeepAlive(lease) => 36 + (lease.0 << 8),
            StoreRequest::Delete { conditions, .. } => 38 + ((conditions.len() as u64) << 8),
            StoreRequest::Revoke(lease) => 37 + (lease.0 << 8),
        }
    }
}

impl StoreReply {
    fn code(&self) -> u64 {
        match self {
            StoreReply::Entries(_) => 41,
            StoreReply::Range { revision, entries } => 42 + (revision << 8) + ((entries.len() as u64) << 24),
            StoreReply::Transacted(Ok(revision)) => 43 + (revision << 8),
            StoreReply::Transacted(Err(_)) => 44,
            StoreReply::Watching => 45,
            StoreReply::Compacted { .. } => 46,
            StoreReply::Changes { revision, .. } => 47 + (revision << 8),
            StoreReply::Granted(lease) => 48 + (lease.0 << 8),
            StoreReply::Kept { lives } => 49 + (u64::from(*lives) << 8),
            StoreReply::Revoked => 50,
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
            PeerMessage::Offer(offer) => 26 + (offer.offer.0 << 8),
            PeerMessage::OfferAnswer { offer, taken, .. } => {
                27 + (offer.0 << 8) + ((taken.len() as u64) << 40)
            }
        }
    }
}
