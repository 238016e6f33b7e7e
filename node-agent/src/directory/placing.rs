//! Questions where further replicas of blocks go: each key's question goes to the member that owns its slot, as look-ups do
//! ([`super::asking`]), and what nobody answers is said to be unanswered.

use std::sync::{Arc, PoisonError};
use std::time::Instant;

use reprise_agent_core::effect::{PlaceId, PlaceReason};
use reprise_agent_core::event::Placement;
use reprise_policy::{BlockKey, Epoch, NodeId};
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{PlaceReply, PlaceRequest};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout_at;
use tonic::Status;

use super::link::Link;
use super::members::{Routes, learn};
use super::{DirectoryEvent, Shared, wire};

/// Questions that wait to be sent: the core has fewer than these under way.
pub(super) const PLACES_QUEUED_MAX: usize = 64;

/// Members asked about one key at the most, as of look-ups.
const ATTEMPTS: usize = 2;

/// On the wire: there are enough replicas.
const ENOUGH: u16 = 0;

/// On the wire: no node has room.
const NOWHERE: u16 = u16::MAX;

/// One question.
#[derive(Debug)]
pub(crate) struct PlaceQuestion {
    pub(crate) place: PlaceId,
    pub(crate) keys: Vec<BlockKey>,
    /// Bytes that each block takes on a device.
    pub(crate) slot_bytes: u64,
    pub(crate) reason: PlaceReason,
    /// `PlaceFailed` then.
    pub(crate) deadline: Instant,
}

/// Asks as questions come. Each ends at its deadline, and the core bounds how many there are.
pub(super) async fn place(shared: &Arc<Shared>, mut questions: mpsc::Receiver<PlaceQuestion>) {
    while let Some(question) = questions.recv().await {
        let shared = shared.clone();
        tokio::spawn(async move {
            let place = question.place;
            shared.emit(match ask(&shared, question).await {
                Some(answers) => DirectoryEvent::Placed { place, answers },
                None => DirectoryEvent::PlaceFailed { place },
            });
        });
    }
    // The client is gone; shutdown ends this.
    std::future::pending::<()>().await;
}

/// Asks the owners of all keys; `None` when none of them answered.
async fn ask(shared: &Arc<Shared>, question: PlaceQuestion) -> Option<Vec<Placement>> {
    let question = Arc::new(question);
    let mut answers = vec![Placement::Unanswered; question.keys.len()];
    let mut open: Vec<u32> = (0..).take(question.keys.len()).collect();
    let mut answered = false;
    for _ in 0..ATTEMPTS {
        let Some(routes) = shared.routes.borrow().clone() else { break };
        let (mut newer, mut left) = (None, Vec::new());
        for Answer { link, places, outcome } in ask_owners(&routes, &question, open).await {
            let Ok(part) = outcome else { continue };
            answered = true;
            left.extend(part.elsewhere.iter().filter_map(|at| places.get(*at as usize)));
            if !part.elsewhere.is_empty() && part.map_epoch > routes.epoch() {
                newer = Some(link);
            }
            for (place, answer) in places.iter().zip(part.answers) {
                answers[*place as usize] = answer;
            }
        }
        // What a member said of keys that are not its own is nothing.
        left.iter().for_each(|place| answers[*place as usize] = Placement::Unanswered);
        open = left;
        let Some(link) = newer.filter(|_| !open.is_empty()) else { break };
        let home = format!("http://{}", link.address);
        let learned = timeout_at(question.deadline.into(), learn(shared, link.channel.clone(), &home)).await;
        if !matches!(learned, Ok(Ok(()))) {
            break;
        }
    }
    leave_out_unreachable(shared, &mut answers);
    answered.then_some(answers)
}

/// A node whose address is not known (yet) can be offered nothing.
fn leave_out_unreachable(shared: &Shared, answers: &mut [Placement]) {
    let nodes = shared.nodes.read().unwrap_or_else(PoisonError::into_inner);
    for answer in answers {
        if matches!(answer, Placement::To(node) if !nodes.has_address(*node)) {
            *answer = Placement::Unanswered;
        }
    }
}

/// One member's part of a question.
struct Answer {
    link: Arc<Link>,
    /// Of its keys among those of the question.
    places: Vec<u32>,
    outcome: Result<Part, Status>,
}

/// What a member answered.
struct Part {
    answers: Vec<Placement>,
    /// Indices of keys that are not its own.
    elsewhere: Vec<u32>,
    map_epoch: Epoch,
}

/// Asks each owner of the keys at these places, all at once.
async fn ask_owners(routes: &Routes, question: &Arc<PlaceQuestion>, places: Vec<u32>) -> Vec<Answer> {
    let mut by_owner: Vec<Vec<u32>> = vec![Vec::new(); routes.links().len()];
    for place in places {
        if let Some(owner) = routes.owner(&question.keys[place as usize]) {
            by_owner[owner].push(place);
        }
    }
    let mut asked = JoinSet::new();
    for (link, places) in routes.links().iter().cloned().zip(by_owner) {
        if !places.is_empty() {
            asked.spawn(ask_one(link, question.clone(), places));
        }
    }
    asked.join_all().await
}

async fn ask_one(link: Arc<Link>, question: Arc<PlaceQuestion>, places: Vec<u32>) -> Answer {
    let late = |_| Err(Status::deadline_exceeded("no answer in time"));
    let asked = timeout_at(question.deadline.into(), ask_for(&link, &question, &places)).await;
    let outcome = asked.unwrap_or_else(late);
    if let Err(status) = &outcome {
        let (code, reason) = (status.code(), status.message());
        tracing::debug!(member = %link.name, keys = places.len(), ?code, reason, "nobody says where blocks go");
    }
    Answer { link, places, outcome }
}

async fn ask_for(link: &Link, question: &PlaceQuestion, places: &[u32]) -> Result<Part, Status> {
    let granted = *link.granted.borrow();
    let Some(granted) = granted.filter(|_| link.is_up()) else {
        return Err(Status::unavailable("the member does not answer beats"));
    };
    let keys: Vec<BlockKey> = places.iter().map(|place| question.keys[*place as usize]).collect();
    let request = request_of((granted.node, granted.epoch), question, &keys);
    let reply = PlacementClient::new(link.channel.clone()).place(request).await?.into_inner();
    if reply.fenced {
        link.fence(granted.epoch);
        return Err(Status::aborted("a newer registration has taken this one's place"));
    }
    unpack(&reply, keys.len()).ok_or_else(|| Status::internal("the reply does not fit the keys asked"))
}

/// Reads an answer for so many keys; `None` when it is none.
fn unpack(reply: &PlaceReply, keys: usize) -> Option<Part> {
    let (targets, rest) = reply.targets.as_chunks::<2>();
    if targets.len() != keys || !rest.is_empty() {
        return None;
    }
    let answer = |target: &[u8; 2]| match u16::from_le_bytes(*target) {
        ENOUGH => Placement::Enough,
        NOWHERE => Placement::Nowhere,
        node => Placement::To(NodeId(node)),
    };
    Some(Part {
        answers: targets.iter().map(answer).collect(),
        elsewhere: reply.elsewhere.clone(),
        map_epoch: Epoch(reply.map_epoch),
    })
}

/// The request for keys of a question.
pub(super) fn request_of(
    (node, epoch): (NodeId, Epoch),
    question: &PlaceQuestion,
    keys: &[BlockKey],
) -> PlaceRequest {
    use reprise_proto::controlplane::PlaceReason as Wire;
    let (reason, to) = match question.reason {
        PlaceReason::Hot => (Wire::Hot, 0),
        PlaceReason::Drain => (Wire::Drain, 0),
        PlaceReason::Move(to) => (Wire::Move, u32::from(to.0)),
    };
    PlaceRequest {
        holder: u32::from(node.0),
        epoch: epoch.0,
        keys: wire::pack(keys),
        slot_bytes: question.slot_bytes,
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
    fn an_answer_names_a_node_or_that_there_are_enough_or_that_there_is_no_room() {
        let part = unpack(&reply(&[0, 5, 0xffff]), 3).expect("it fits");
        assert_eq!(part.answers, [Placement::Enough, Placement::To(NodeId(5)), Placement::Nowhere]);
        assert_eq!((part.elsewhere, part.map_epoch), (vec![1], Epoch(7)));
        assert!(unpack(&reply(&[0, 5]), 3).is_none());
    }

    #[test]
    fn a_request_names_holder_reason_and_the_node_of_a_move() {
        let question = |reason| PlaceQuestion {
            place: PlaceId(1),
            keys: Vec::new(),
            slot_bytes: 8192,
            reason,
            deadline: Instant::now(),
        };
        let keys = [BlockKey([3; 16])];
        let own = (NodeId(4), Epoch(9));
        let request = request_of(own, &question(PlaceReason::Move(NodeId(6))), &keys);
        assert_eq!((request.holder, request.epoch, request.reason, request.to), (4, 9, 3, 6));
        assert_eq!((request.keys.as_ref(), request.slot_bytes), ([3; 16].as_slice(), 8192));
        assert_eq!(request_of(own, &question(PlaceReason::Hot), &keys).reason, 1);
        assert_eq!(request_of(own, &question(PlaceReason::Drain), &keys).reason, 2);
    }
}
