//! Placement requests and the handling of their replies.

use reprise_agent_core::effect::PlacementReason;
use reprise_proto::controlplane::{MemberInfo, MemberList, PlaceReply};

use super::fake::State;
use super::*;

fn reply(targets: &[u16]) -> PlaceReply {
    let targets: Vec<u8> = targets.iter().flat_map(|target| target.to_le_bytes()).collect();
    PlaceReply { targets: targets.into(), ..PlaceReply::default() }
}

fn query(agent: &Agent, keys: std::ops::Range<u32>) {
    let question = PlacementRequest {
        place: PlaceId(5),
        keys: keys.map(key).collect(),
        slot_bytes: 8192,
        reason: PlacementReason::Drain,
        deadline: Instant::now() + LOOKUP_TIMEOUT,
    };
    agent.client.place(question).expect("there is room");
}

fn placed(answers: &[Placement]) -> DirectoryEvent {
    DirectoryEvent::PlacementCompleted { place: PlaceId(5), answers: answers.to_vec() }
}

/// Starts a member that knows node 2 and sends this reply.
fn member(place_reply: Option<PlaceReply>) -> Fake {
    let nodes = vec![info(2, 1, "b:1")];
    Fake::start_with(0, State { nodes, place_reply, ..State::default() })
}

fn connected(fake: &Fake) -> Agent {
    let agent = Agent::start(settings(fake.endpoint()));
    agent.wait_for(&all_slots_requested());
    agent
}

#[test]
fn owner_of_the_keys_returns_their_targets() {
    let fake = member(Some(reply(&[0, 2, 0xffff, 9])));
    let agent = connected(&fake);
    query(&agent, 0..4);
    let unknown = Placement::Unanswered;
    agent.wait_for(&placed(&[Placement::Enough, Placement::To(NodeId(2)), Placement::NoCapacity, unknown]));
    let request = fake.read(|state| state.requests[0].clone());
    assert_eq!((request.holder, request.epoch, request.slot_bytes, request.reason), (1, 1, 8192, 2));
    assert_eq!(request.keys.len(), 4 * BlockKey::SIZE);
}

#[test]
fn request_without_a_reply_fails() {
    let fake = member(None);
    let agent = connected(&fake);
    query(&agent, 0..2);
    agent.wait_for(&DirectoryEvent::PlacementFailed { place: PlaceId(5) });
    let garbage = member(Some(reply(&[0])));
    let agent = connected(&garbage);
    query(&agent, 0..2);
    agent.wait_for(&DirectoryEvent::PlacementFailed { place: PlaceId(5) });
}

#[test]
fn request_without_a_control_plane_fails() {
    let agent = Agent::start(DirectorySettings { endpoints: Vec::new(), ..settings(String::new()) });
    query(&agent, 0..1);
    agent.wait_for(&DirectoryEvent::PlacementFailed { place: PlaceId(5) });
}

#[test]
fn stale_registration_is_renewed_and_the_request_fails() {
    let fake = member(Some(PlaceReply { fenced: true, ..PlaceReply::default() }));
    let agent = connected(&fake);
    query(&agent, 0..1);
    agent.wait_for(&DirectoryEvent::PlacementFailed { place: PlaceId(5) });
    agent.wait_for(&registered(2));
}

#[test]
fn keys_in_slots_of_another_member_are_redirected() {
    let old = PlaceReply { elsewhere: vec![0, 1], map_epoch: 2, ..reply(&[0, 0]) };
    let (first, second) = (member(Some(old)), member(Some(reply(&[2, 2]))));
    let of = |name: &str, fake: &Fake| MemberInfo {
        name: name.to_owned(),
        address: fake.endpoint().trim_start_matches("http://").to_owned(),
        ..MemberInfo::default()
    };
    let list = |epoch, members| MemberList { epoch, members, answering: "a".to_owned(), registered: true };
    second.write(|state| state.name = "b");
    first.write(|state| state.members = Some(list(1, vec![of("a", &first)])));
    let agent = connected(&first);
    // The next map is available on request, but has not been announced yet.
    first.write(|state| state.members = Some(list(2, vec![of("b", &second)])));
    query(&agent, 0..2);
    let event = agent.wait_for_placement();
    let both = [Placement::To(NodeId(2)); 2];
    // The link to the new owner may not be up in time.
    assert!([placed(&both), placed(&[Placement::Unanswered; 2])].contains(&event), "{event:?}");
}
