//! What hosts say to each other.

use std::sync::Arc;

use reprise_agent_core::effect::FetchId;
use reprise_agent_core::event::Replica;
use reprise_agent_core::outbox::{Answer, Batch};
use reprise_controlplane_core::Standing;
use reprise_policy::{BlockKey, Epoch, Layout, NodeId, Tier};

use crate::memory::Tag;

/// A call of an agent to the control plane, unique in its process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CallId(pub(crate) u64);

/// A message on a connection.
#[derive(Clone, Debug)]
pub(crate) enum Message {
    Call { call: CallId, request: Request },
    Reply { call: CallId, reply: Reply },
    Peer(PeerMessage),
}

/// What an agent wants of the control plane.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Register { name: usize },
    Beat { node: NodeId, epoch: Epoch },
    Slots { node: NodeId, epoch: Epoch },
    Update(Arc<Batch>),
    Lookup { keys: Vec<BlockKey>, asking: Option<NodeId> },
}

/// What the control plane answers.
#[derive(Clone, Debug)]
pub(crate) enum Reply {
    Registered { node: NodeId, epoch: Epoch },
    Beaten { known: bool, version: u64 },
    Standing(Option<Box<Standing>>),
    Updated { answer: Answer, version: u64 },
    Found(Vec<Vec<Replica>>),
}

/// What two agents say to each other; the fetch was named by the one that asks.
#[derive(Clone, Debug)]
pub(crate) enum PeerMessage {
    Fetch { fetch: FetchId, keys: Vec<BlockKey>, layout: Layout, deadline: std::time::Duration },
    Cancel { fetch: FetchId },
    Header { fetch: FetchId, block: u32, tier: Tier, checksums: Box<[u32]> },
    Layers { fetch: FetchId, block: u32, first: u32, tags: Vec<Tag> },
    Absent { fetch: FetchId, block: u32 },
}

impl Message {
    /// For the digest of the trace.
    pub(crate) fn code(&self) -> u64 {
        match self {
            Message::Call { call, request } => {
                let kind = match request {
                    Request::Register { .. } => 1,
                    Request::Beat { .. } => 2,
                    Request::Update(batch) => 3 + (batch.sequence << 8),
                    Request::Slots { .. } => 5,
                    Request::Lookup { keys, .. } => 4 + ((keys.len() as u64) << 8),
                };
                kind + (call.0 << 32)
            }
            Message::Reply { call, reply } => {
                let kind = match reply {
                    Reply::Registered { epoch, .. } => 11 + (epoch.0 << 8),
                    Reply::Beaten { known, .. } => 12 + (u64::from(*known) << 8),
                    Reply::Standing(None) => 16,
                    Reply::Standing(Some(standing)) => 17 + ((standing.wanted.len() as u64) << 8),
                    Reply::Updated { answer: Answer::Fenced, .. } => 13,
                    Reply::Updated { answer: Answer::Expecting(expected), .. } => 14 + (expected << 8),
                    Reply::Found(found) => 15 + ((found.iter().flatten().count() as u64) << 8),
                };
                kind + (call.0 << 32)
            }
            Message::Peer(message) => match message {
                PeerMessage::Fetch { fetch, .. } => 21 + (fetch.0 << 8),
                PeerMessage::Cancel { fetch } => 22 + (fetch.0 << 8),
                PeerMessage::Header { fetch, block, .. } => 23 + (fetch.0 << 8) + (u64::from(*block) << 32),
                PeerMessage::Layers { fetch, first, tags, .. } => {
                    24 + (fetch.0 << 8) + (u64::from(*first) << 32) + (tags[0] << 40)
                }
                PeerMessage::Absent { fetch, block } => 25 + (fetch.0 << 8) + (u64::from(*block) << 32),
            },
        }
    }
}
