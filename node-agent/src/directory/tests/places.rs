//! Questions where blocks go, and what comes of the answers.

use reprise_agent_core::effect::PlaceReason;
use reprise_proto::controlplane::{MemberInfo, MemberList, PlaceReply};

use super::fake::State;
use super::*;

fn reply(targets: &[u16]) -> PlaceReply {
    let targets: Vec<u8> = targets.iter().flat_map(|target| target.to_le_bytes()).collect();
    PlaceReply { targets: targets.into(), ..PlaceReply::default() }
}

fn ask(agent: &Agent, keys: std::ops::Range<u32>) {
    let question = PlaceQuestion {
        place: PlaceId(5),
        keys: keys.map(key).collect(),
        slot_bytes: 8192,
        reason: PlaceReason::Drain,
        deadline: Instant::now() + LOOKUP_TIMEOUT,
    };
    agent.client.place(question).expect("there is room");
}

fn placed(answers: &[Placement]) -> DirectoryEvent {
    DirectoryEvent::Placed { place: PlaceId(5), answers: answers.to_vec() }
}

/// A member that knows node 2 and answers so.
fn member(place_reply: Option<PlaceReply>) -> Fake {
    let nodes = vec![info(2, 1, "b:1")];
    Fake::start_with(0, State { nodes, place_reply, ..State::default() })
}

fn connected(fake: &Fake) -> Agent {
    let agent = Agent::start(settings(fake.endpoint()));
    agent.wait_for(&everything_wanted());
    agent
}

#[test]
fn the_owner_of_the_keys_says_where_they_go() {
    let fake = member(Some(reply(&[0, 2, 0xffff, 9])));
    let agent = connected(&fake);
    ask(&agent, 0..4);
    let unknown = Placement::Unanswered;
    agent.wait_for(&placed(&[Placement::Enough, Placement::To(NodeId(2)), Placement::Nowhere, unknown]));
    let request = fake.read(|state| state.places[0].clone());
    assert_eq!((request.holder, request.epoch, request.slot_bytes, request.reason), (1, 1, 8192, 2));
    assert_eq!(request.keys.len(), 4 * BlockKey::SIZE);
}

#[test]
fn what_nobody_answers_has_failed() {
    let fake = member(None);
    let agent = connected(&fake);
    ask(&agent, 0..2);
    agent.wait_for(&DirectoryEvent::PlaceFailed { place: PlaceId(5) });
    let garbage = member(Some(reply(&[0])));
    let agent = connected(&garbage);
    ask(&agent, 0..2);
    agent.wait_for(&DirectoryEvent::PlaceFailed { place: PlaceId(5) });
}

#[test]
fn without_a_control_plane_nobody_answers() {
    let agent = Agent::start(DirectorySettings { endpoints: Vec::new(), ..settings(String::new()) });
    ask(&agent, 0..1);
    agent.wait_for(&DirectoryEvent::PlaceFailed { place: PlaceId(5) });
}

#[test]
fn a_stale_registration_is_renewed_and_the_question_has_failed() {
    let fake = member(Some(PlaceReply { fenced: true, ..PlaceReply::default() }));
    let agent = connected(&fake);
    ask(&agent, 0..1);
    agent.wait_for(&DirectoryEvent::PlaceFailed { place: PlaceId(5) });
    agent.wait_for(&registered(2));
}

#[test]
fn keys_of_another_members_slots_are_asked_there() {
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
    // The next map is known where it is asked for, and has not been told yet.
    first.write(|state| state.members = Some(list(2, vec![of("b", &second)])));
    ask(&agent, 0..2);
    let event = agent.wait_for_placed();
    let both = [Placement::To(NodeId(2)); 2];
    // The link to the new owner may not be up in time.
    assert!([placed(&both), placed(&[Placement::Unanswered; 2])].contains(&event), "{event:?}");
}
