//! The Events service: one stream for each reader, made as fast as it reads.

use std::sync::Arc;

use reprise_controlplane_core::{LogId, Position, Reason, ReplicaChange, Run, Told};
use reprise_policy::BlockKey;
use reprise_proto::controlplane::events_server::Events;
use reprise_proto::controlplane::snapshot_begins::Reason as ReasonSent;
use reprise_proto::controlplane::{
    Cleared, Current, FollowReply, FollowRequest, Position as PositionSent, ReplicaChanges, SnapshotBegins,
    follow_reply,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

use super::{PART_CHANGES, Reading};
use crate::cluster::{Cluster, WatcherSeat};
use crate::metrics::{WatchLabels, WatchOf};

/// Messages that are ready before they are sent: the next, while gRPC sends one.
const READY_MESSAGES: usize = 1;
/// Bytes of a node number in a message.
const NODE_BYTES: usize = 2;

/// See the module.
#[derive(Debug)]
pub struct EventsService {
    cluster: Arc<Cluster>,
}

impl EventsService {
    /// A service over the shared state.
    pub fn new(cluster: Arc<Cluster>) -> EventsService {
        EventsService { cluster }
    }
}

#[tonic::async_trait]
impl Events for EventsService {
    type FollowStream = ReceiverStream<Result<FollowReply, Status>>;

    async fn follow(&self, request: Request<FollowRequest>) -> Result<Response<Self::FollowStream>, Status> {
        let seat = self.cluster.take_seat(WatchOf::directory)?;
        let from = request.into_inner().from;
        let from = from.map(|from| Position { log: LogId(from.log), next: from.next });
        let (sender, messages) = mpsc::channel(READY_MESSAGES);
        let reading = Reading::new(self.cluster.clone(), from, PART_CHANGES);
        tokio::spawn(tell(self.cluster.clone(), reading, sender, seat));
        Ok(Response::new(ReceiverStream::new(messages)))
    }
}

/// Tells one reader until it goes away, or this member does.
async fn tell(
    cluster: Arc<Cluster>,
    mut reading: Reading,
    sender: mpsc::Sender<Result<FollowReply, Status>>,
    seat: WatcherSeat,
) {
    loop {
        // Before anything is read: who does not read costs one message, and reads the log again when it does.
        let Ok(place) = sender.reserve().await else { break };
        let told = tokio::select! {
            told = reading.next() => told,
            () = sender.closed() => break,
        };
        let Some(told) = told else {
            place.send(Err(Status::unavailable("the control plane is shutting down")));
            break;
        };
        if told == Told::SnapshotBegins(Reason::Behind) {
            cluster.metrics.watch_missed.get_or_create(&WatchLabels { of: WatchOf::directory }).inc();
        }
        place.send(Ok(message(&told)));
    }
    drop(seat);
}

fn message(told: &Told) -> FollowReply {
    use follow_reply::Event;
    let (position, event) = match told {
        Told::SnapshotBegins(reason) => {
            let reason = match reason {
                Reason::Start => ReasonSent::Start,
                Reason::OtherLog => ReasonSent::OtherLog,
                Reason::Behind => ReasonSent::Behind,
            };
            (None, Event::Snapshot(SnapshotBegins { reason: reason.into() }))
        }
        Told::Run { run: Run::Changes(changes), position } => (*position, Event::Changes(packed(changes))),
        Told::Run { run: Run::Cleared { node, slots }, position } => {
            let node = node.map_or(0, |node| u32::from(node.0));
            (
                *position,
                Event::Cleared(Cleared { node, slots: slots.iter().copied().map(u32::from).collect() }),
            )
        }
        Told::Current(position) => (Some(*position), Event::Current(Current {})),
    };
    let position = position.map(|Position { log, next }| PositionSent { log: log.0, next });
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
