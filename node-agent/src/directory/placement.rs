//! Placement requests for further replicas: each key is sent to the owner of its slot, like lookups
//! ([`OwnerQuery`]). Keys without a response are reported as unanswered.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use reprise_agent_core::effect::{PlaceId, PlacementReason};
use reprise_agent_core::event::Placement;
use reprise_agent_core::owner_query::{OwnerQuery, PartAnswer};
use reprise_policy::{BlockKey, Epoch, NodeId};
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{PlaceReply, PlaceRequest};
use tokio::sync::mpsc;
use tonic::Status;

use super::link::Link;
use super::owner_query::Sending;
use super::{DirectoryEvent, Shared, owner_query, wire};

/// Capacity of the request queue; the core has fewer requests in flight.
pub(super) const PLACES_QUEUED_MAX: usize = 64;

/// Wire value: there are enough replicas.
const ENOUGH: u16 = 0;

/// Wire value: no node has capacity.
const NOWHERE: u16 = u16::MAX;

/// A placement request for several keys.
#[derive(Debug)]
pub(crate) struct PlacementRequest {
    pub(crate) place: PlaceId,
    pub(crate) keys: Vec<BlockKey>,
    /// Bytes that each block occupies on a device.
    pub(crate) slot_bytes: u64,
    pub(crate) reason: PlacementReason,
    /// When the request fails with `PlacementFailed`.
    pub(crate) deadline: Instant,
}

/// Executes requests as they arrive. Each ends at its deadline; the core bounds their number.
pub(super) async fn place(shared: &Arc<Shared>, mut questions: mpsc::Receiver<PlacementRequest>) {
    while let Some(question) = questions.recv().await {
        let shared = shared.clone();
        tokio::spawn(async move {
            let place = question.place;
            shared.emit(match query(&shared, question).await {
                Some(answers) => DirectoryEvent::PlacementCompleted { place, answers },
                None => DirectoryEvent::PlacementFailed { place },
            });
        });
    }
    // The client was dropped; shutdown ends this task.
    std::future::pending::<()>().await;
}

/// Queries the owners of all keys; `None` if none of them responded.
async fn query(shared: &Arc<Shared>, question: PlacementRequest) -> Option<Vec<Placement>> {
    let mut query = OwnerQuery::new(question.keys, Placement::Unanswered);
    let (slot_bytes, reason) = (question.slot_bytes, question.reason);
    let sending = Sending {
        deadline: question.deadline,
        can_ask: |link: &Arc<Link>| link.is_up() && link.granted.borrow().is_some(),
        send: |link, keys| send_query(link, keys, (slot_bytes, reason)),
        failure: "a placement request failed",
    };
    owner_query::run(shared, &mut query, sending).await;
    let nodes = shared.nodes.read().unwrap_or_else(PoisonError::into_inner);
    query.finish(|node| nodes.is_reachable(node))
}

async fn send_query(
    link: Arc<Link>,
    keys: Vec<BlockKey>,
    request: (u64, PlacementReason),
) -> Result<PartAnswer<Placement>, Status> {
    let granted = *link.granted.borrow();
    let granted = granted.ok_or_else(|| Status::unavailable("the registration has just ended"))?;
    let request = request_of((granted.node, granted.epoch), request, &keys);
    let reply = PlacementClient::new(link.channel.clone()).place(request).await?.into_inner();
    if reply.fenced {
        link.fence(granted.epoch);
        return Err(Status::aborted("a newer registration has replaced this one"));
    }
    unpack(&reply, keys.len()).ok_or_else(|| Status::internal("the reply does not match the requested keys"))
}

/// Decodes the reply for this number of keys; `None` if it is invalid.
fn unpack(reply: &PlaceReply, keys: usize) -> Option<PartAnswer<Placement>> {
    let (targets, rest) = reply.targets.as_chunks::<2>();
    if targets.len() != keys || !rest.is_empty() {
        return None;
    }
    let answer = |target: &[u8; 2]| match u16::from_le_bytes(*target) {
        ENOUGH => Placement::Enough,
        NOWHERE => Placement::NoCapacity,
        node => Placement::To(NodeId(node)),
    };
    Some(PartAnswer {
        answers: targets.iter().map(answer).collect(),
        elsewhere: reply.elsewhere.clone(),
        map_epoch: Epoch(reply.map_epoch),
    })
}

/// Encodes a request for some keys.
pub(super) fn request_of(
    (node, epoch): (NodeId, Epoch),
    (slot_bytes, reason): (u64, PlacementReason),
    keys: &[BlockKey],
) -> PlaceRequest {
    use reprise_proto::controlplane::PlaceReason as Wire;
    let (reason, to) = match reason {
        PlacementReason::Hot => (Wire::Hot, 0),
        PlacementReason::Drain => (Wire::Drain, 0),
        PlacementReason::Move(to) => (Wire::Move, u32::from(to.0)),
    };
    PlaceRequest {
        holder: u32::from(node.0),
        epoch: epoch.0,
        keys: wire::pack(keys),
        slot_bytes,
        reason: reason.into(),
        to,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(targets: &[u16]) -> PlaceReply {
        let targets = targets.iter().flat_map(|target| target.to_le_bytes()).collect::<Vec<u8>>();
        PlaceReply { targets: targets.into(), elsewhere: vec![1], map_epoch: 7, ..PlaceReply::default() }
    }

    #[test]
    fn reply_contains_a_node_or_enough_or_no_capacity() {
        let part = unpack(&reply(&[0, 5, 0xffff]), 3).expect("it fits");
        assert_eq!(part.answers, [Placement::Enough, Placement::To(NodeId(5)), Placement::NoCapacity]);
        assert_eq!((part.elsewhere, part.map_epoch), (vec![1], Epoch(7)));
        assert!(unpack(&reply(&[0, 5]), 3).is_none());
    }

    #[test]
    fn request_contains_holder_reason_and_target_of_a_move() {
        let keys = [BlockKey([3; 16])];
        let own = (NodeId(4), Epoch(9));
        let request = request_of(own, (8192, PlacementReason::Move(NodeId(6))), &keys);
        assert_eq!((request.holder, request.epoch, request.reason, request.to), (4, 9, 3, 6));
        assert_eq!((request.keys.as_ref(), request.slot_bytes), ([3; 16].as_slice(), 8192));
        assert_eq!(request_of(own, (8192, PlacementReason::Hot), &keys).reason, 1);
        assert_eq!(request_of(own, (8192, PlacementReason::Drain), &keys).reason, 2);
    }
}
