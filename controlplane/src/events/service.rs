//! The Events service: one stream for each reader, produced at the reader's pace.

use std::sync::Arc;

use reprise_controlplane_core::{FollowerMessage, LogId, Position, ReplicaChange, Run, SnapshotReason};
use reprise_policy::BlockKey;
use reprise_proto::controlplane::events_server::Events;
use reprise_proto::controlplane::snapshot_begins::Reason as WireReason;
use reprise_proto::controlplane::{
    Cleared, Current, FollowReply, FollowRequest, Position as WirePosition, ReplicaChanges, SnapshotBegins,
    follow_reply,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::{ChangeReader, PART_CHANGES};
use crate::cluster::{Cluster, WatcherPermit};
use crate::metrics::{WatchLabels, WatchOf};

/// Messages prepared ahead: one, while gRPC sends the previous one.
const READY_MESSAGES: usize = 1;
/// Bytes of a node number in a message.
const NODE_BYTES: usize = 2;

/// The Events service of one member.
#[derive(Debug)]
pub struct EventsService {
    cluster: Arc<Cluster>,
}

impl EventsService {
    /// Creates the service over the shared state.
    pub fn new(cluster: Arc<Cluster>) -> EventsService {
        EventsService { cluster }
    }
}

#[tonic::async_trait]
impl Events for EventsService {
    type FollowStream = ReceiverStream<Result<FollowReply, Status>>;

    async fn follow(&self, request: Request<FollowRequest>) -> Result<Response<Self::FollowStream>, Status> {
        let permit = self.cluster.acquire_watcher(WatchOf::directory)?;
        let from = request.into_inner().from;
        let from = from.map(|from| Position { log: LogId(from.log), next: from.next });
        let (sender, messages) = mpsc::channel(READY_MESSAGES);
        let reader = ChangeReader::new(self.cluster.clone(), from, PART_CHANGES);
        tokio::spawn(send_messages(self.cluster.clone(), reader, sender, permit));
        Ok(Response::new(ReceiverStream::new(messages)))
    }
}

/// Sends messages to one reader until the client disconnects or this member shuts down.
async fn send_messages(
    cluster: Arc<Cluster>,
    mut reader: ChangeReader,
    sender: mpsc::Sender<Result<FollowReply, Status>>,
    permit: WatcherPermit,
) {
    loop {
        // Reserve first: a client that does not read costs one message, and the log is read only when it
        // reads.
        let Ok(slot) = sender.reserve().await else { break };
        let item = tokio::select! {
            item = reader.next() => item,
            () = sender.closed() => break,
        };
        let Some(item) = item else {
            slot.send(Err(Status::unavailable("the control plane is shutting down")));
            break;
        };
        if item == FollowerMessage::SnapshotBegins(SnapshotReason::Behind) {
            cluster.metrics.watch_missed.get_or_create(&WatchLabels { of: WatchOf::directory }).inc();
        }
        slot.send(Ok(message(&item)));
    }
    drop(permit);
}

fn message(item: &FollowerMessage) -> FollowReply {
    use follow_reply::Event;
    let (position, event) = match item {
        FollowerMessage::SnapshotBegins(reason) => {
            let reason = match reason {
                SnapshotReason::Start => WireReason::Start,
                SnapshotReason::OtherLog => WireReason::OtherLog,
                SnapshotReason::Behind => WireReason::Behind,
            };
            (None, Event::Snapshot(SnapshotBegins { reason: reason.into() }))
        }
        FollowerMessage::Run { run: Run::Changes(changes), position } => {
            (*position, Event::Changes(packed(changes)))
        }
        FollowerMessage::Run { run: Run::Cleared { node, slots }, position } => {
            let node = node.map_or(0, |node| u32::from(node.0));
            (
                *position,
                Event::Cleared(Cleared { node, slots: slots.iter().copied().map(u32::from).collect() }),
            )
        }
        FollowerMessage::Current(position) => (Some(*position), Event::Current(Current {})),
    };
    let position = position.map(|Position { log, next }| WirePosition { log: log.0, next });
    FollowReply { position, event: Some(event) }
}

fn packed(changes: &[ReplicaChange]) -> ReplicaChanges {
    let mut keys = Vec::with_capacity(changes.len() * BlockKey::SIZE);
    let mut nodes = Vec::with_capacity(changes.len() * NODE_BYTES);
    let mut operations = Vec::with_capacity(changes.len());
    for change in changes {
        keys.extend_from_slice(&change.key.0);
        nodes.extend_from_slice(&change.node.0.to_le_bytes());
        operations.push(change.operation.wire());
    }
    ReplicaChanges { keys: keys.into(), nodes: nodes.into(), operations: operations.into() }
}
