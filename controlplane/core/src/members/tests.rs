//! Members: beats, registrations, silence, reports, and what the store says of other members' registrations.

use proptest::prelude::*;

use super::*;

const SETTINGS: MemberSettings =
    MemberSettings { dead_after: Duration::from_micros(15), forget_after: Duration::from_micros(60) };

fn record(node: u16, epoch: u64) -> NodeRecord {
    NodeRecord {
        node: NodeId(node),
        name: format!("n{node}"),
        epoch: Epoch(epoch),
        details: NodeDetails { peer_address: "host:1".to_owned(), ..NodeDetails::default() },
        revision: 0,
    }
}

/// The same, put by a revision of the store.
fn record_of(node: u16, epoch: u64, revision: u64) -> NodeRecord {
    NodeRecord { revision, ..record(node, epoch) }
}

fn numbers(records: Vec<NodeRecord>) -> Vec<u16> {
    records.into_iter().map(|record| record.node.0).collect()
}

fn state(members: &Members, node: u16) -> MemberState {
    members.get(NodeId(node)).expect("a member").1
}

#[test]
fn a_silent_node_dies_is_forgotten_and_must_register_again() {
    let mut members = Members::new(SETTINGS);
    members.register(Tick(100), record(1, 1)).expect("newer");
    assert!(members.expire(Tick(114)).is_empty());
    assert!(members.live().contains(NodeId(1)));
    assert_eq!(members.expire(Tick(115)), [MemberEvent::Died(NodeId(1))]);
    assert!(!members.live().contains(NodeId(1)));
    assert_eq!(members.next_deadline(), Some(Tick(160)));
    assert_eq!(members.expire(Tick(160)), [MemberEvent::Forgotten(NodeId(1), Epoch(1))]);
    assert_eq!(members.beat(Tick(161), NodeId(1), Epoch(1)), Beat::Unknown);
    assert_eq!(members.next_deadline(), None);
    members.register(Tick(162), record(1, 2)).expect("newer");
    assert_eq!(members.beat(Tick(163), NodeId(1), Epoch(2)), Beat::Known);
}

#[test]
fn a_dead_node_that_beats_again_is_offered_again() {
    let mut members = Members::new(SETTINGS);
    members.register(Tick(0), record(1, 1)).expect("newer");
    assert_eq!(members.expire(Tick(20)).len(), 1);
    assert_eq!(members.beat(Tick(30), NodeId(1), Epoch(1)), Beat::Returned);
    assert!(members.live().contains(NodeId(1)));
    assert_eq!(members.expire(Tick(45)), [MemberEvent::Died(NodeId(1))], "silence counts from the last beat");
}

#[test]
fn a_node_that_serves_nobody_lives_but_is_not_offered() {
    let mut members = Members::new(SETTINGS);
    members.register(Tick(0), record(1, 1)).expect("newer");
    let silent = NodeRecord { details: NodeDetails::default(), ..record(1, 2) };
    members.register(Tick(1), silent).expect("newer");
    assert_eq!((state(&members, 1), members.live().contains(NodeId(1))), (MemberState::Alive, false));
    members.expire(Tick(20));
    assert_eq!(members.beat(Tick(21), NodeId(1), Epoch(2)), Beat::Returned);
    assert!(!members.live().contains(NodeId(1)));
}

#[test]
fn an_older_registration_neither_beats_nor_registers() {
    let mut members = Members::new(SETTINGS);
    members.register(Tick(0), record(1, 5)).expect("newer");
    assert_eq!(members.beat(Tick(1), NodeId(1), Epoch(4)), Beat::Unknown);
    assert_eq!(members.beat(Tick(1), NodeId(2), Epoch(5)), Beat::Unknown);
    let refused = members.register(Tick(1), record(1, 5)).expect_err("not newer");
    let stale = NotRegistered::Stale { node: NodeId(1), offered: Epoch(5), current: Epoch(5) };
    assert_eq!(refused, stale);
    members.register(Tick(1), record(1, 6)).expect("newer");
}

#[test]
fn a_restored_node_is_known_but_absent() {
    let mut members = Members::new(SETTINGS);
    members.restore(record(3, 7));
    assert_eq!(state(&members, 3), MemberState::Absent);
    assert_eq!(members.beat(Tick(1), NodeId(3), Epoch(7)), Beat::Unknown);
    assert!(members.register(Tick(1), record(3, 7)).is_err(), "its epoch was used");
    assert_eq!(members.live().count(), 0);
}

#[test]
fn a_node_that_registered_with_another_member_is_known_by_its_address_and_absent() {
    let mut members = Members::new(SETTINGS);
    assert!(members.learn(record(3, 7)));
    assert!(!members.learn(record(3, 7)), "the store says so twice");
    assert_eq!(state(&members, 3), MemberState::Absent);
    assert_eq!(members.beat(Tick(1), NodeId(3), Epoch(7)), Beat::Unknown);
    assert_eq!(members.live().count(), 0);
    // Its registration with this member was in the store before that one, and is heard of behind it.
    members.register(Tick(1), record(3, 6)).expect("this member's first");
    assert_eq!(members.beat(Tick(2), NodeId(3), Epoch(6)), Beat::Known);
}

#[test]
fn what_the_store_says_of_a_living_node_moves_its_address_and_leaves_its_registration() {
    let mut members = Members::new(SETTINGS);
    members.register(Tick(0), record(1, 4)).expect("newer");
    let at = |address: &str| NodeDetails { peer_address: address.to_owned(), ..NodeDetails::default() };
    assert!(!members.learn(NodeRecord { details: at("old:1"), ..record(1, 3) }), "from the past");
    assert!(members.learn(NodeRecord { details: at("new:1"), ..record(1, 6) }));
    assert!(!members.learn(NodeRecord { details: at("between:1"), ..record(1, 5) }));
    let (known, state) = members.get(NodeId(1)).expect("a member");
    assert_eq!((known.details.peer_address.as_str(), known.epoch), ("new:1", Epoch(4)));
    assert_eq!(state, MemberState::Alive);
    assert_eq!(members.beat(Tick(1), NodeId(1), Epoch(4)), Beat::Known);
    assert!(members.learn(NodeRecord { details: NodeDetails::default(), ..record(1, 7) }));
    assert!(!members.live().contains(NodeId(1)), "it serves nobody any more");
}

#[test]
fn a_node_whose_record_is_deleted_is_none_and_nothing_of_its_number_is_believed() {
    let mut members = Members::new(SETTINGS);
    members.register(Tick(0), record_of(1, 4, 10)).expect("newer");
    members.register(Tick(0), record_of(2, 1, 11)).expect("newer");
    assert_eq!(numbers(members.deleted("n1", 10)), [0; 0], "what a revision puts it does not delete");
    assert_eq!(numbers(members.deleted("n1", 12)), [1]);
    assert_eq!(members.beat(Tick(1), NodeId(1), Epoch(4)), Beat::Unknown);
    assert!(!members.report(NodeId(1), Epoch(4), NodeReport::default()));
    assert!(!members.is_registered(NodeId(1), Epoch(4)) && !members.live().contains(NodeId(1)));
    assert_eq!(members.iter().map(|(record, _)| record.node.0).collect::<Vec<_>>(), [2]);
    assert_eq!(members.expire(Tick(60)).len(), 2, "of the other, which dies and must register again");
    assert_eq!(numbers(members.deleted("n1", 13)), [0; 0]);
}

#[test]
fn a_registration_that_was_in_the_store_before_its_record_was_deleted_and_comes_late_is_refused() {
    let mut members = Members::new(SETTINGS);
    members.register(Tick(0), record_of(1, 4, 10)).expect("newer");
    assert_eq!(numbers(members.deleted("n1", 12)), [1]);
    members.followed(12);
    let refused = members.register(Tick(1), record_of(1, 5, 11)).expect_err("deleted since");
    assert_eq!(refused, NotRegistered::Forgotten(NodeId(1)));
    assert!(!members.learn(record_of(1, 5, 11)) && members.get(NodeId(1)).is_none());
    // The name comes back under another number, whatever is heard of its end after that.
    let again = NodeRecord { name: "n1".to_owned(), ..record_of(7, 1, 14) };
    members.register(Tick(2), again).expect("a new node");
    assert_eq!(numbers(members.deleted("n1", 12)), [0; 0]);
    assert_eq!(members.beat(Tick(3), NodeId(7), Epoch(1)), Beat::Known);
    members.followed(14);
    members.register(Tick(4), record_of(7, 2, 13)).expect("it is known, so its record is there");
    assert_eq!(numbers(members.deleted("n7", 14)), [0; 0], "of the newest record that is known");
}

#[test]
fn who_is_not_among_all_records_is_gone_unless_it_has_registered_since() {
    let mut members = Members::new(SETTINGS);
    members.restore(record_of(1, 1, 5));
    members.restore(record_of(2, 1, 6));
    members.followed(6);
    assert!(members.learn(record_of(3, 1, 7)));
    members.register(Tick(0), record_of(4, 1, 9)).expect("newer");
    assert!(!members.learn(record_of(2, 2, 9)), "the same details");
    let gone = members.only(|record| record.node == NodeId(1), 8);
    assert_eq!(numbers(gone), [3], "the second and the fourth have records of the ninth revision");
    assert_eq!(members.iter().map(|(record, _)| record.node.0).collect::<Vec<_>>(), [1, 2, 4]);
}

#[test]
fn a_report_is_of_one_registration() {
    let mut members = Members::new(SETTINGS);
    members.register(Tick(0), record(1, 1)).expect("newer");
    let report = NodeReport { queued_bytes: 7, ..NodeReport::default() };
    assert!(!members.report(NodeId(1), Epoch(2), report));
    assert!(members.report(NodeId(1), Epoch(1), report));
    assert_eq!(members.report_of(NodeId(1)), Some(&report));
    members.register(Tick(1), record(1, 2)).expect("newer");
    assert_eq!(members.report_of(NodeId(1)), None);
    members.expire(Tick(100));
    assert!(!members.report(NodeId(1), Epoch(2), report), "it must register again");
}

#[test]
fn what_was_placed_on_a_node_takes_its_room_until_it_reports() {
    let mut members = Members::new(SETTINGS);
    members.register(Tick(0), record(1, 1)).expect("newer");
    members.place(NodeId(1), 5);
    members.place(NodeId(1), 6);
    members.place(NodeId(2), 6);
    assert_eq!([1, 2].map(|node| members.placed_on(NodeId(node))), [11, 0]);
    assert!(members.report(NodeId(1), Epoch(1), NodeReport::default()));
    assert_eq!(members.placed_on(NodeId(1)), 0);
}

#[test]
fn a_drain_is_told_of_once_the_node_has_reported_in_its_knowledge() {
    let mut members = Members::new(SETTINGS);
    members.register(Tick(0), record(1, 1)).expect("newer");
    let drain = DrainProgress { drained: true, ..DrainProgress::default() };
    let report = |members: &mut Members| {
        members.report(NodeId(1), Epoch(1), NodeReport { drain, ..NodeReport::default() })
    };
    assert!(report(&mut members));
    members.tell_mode(NodeId(1), 9);
    assert_eq!(members.drain_of(NodeId(1), 9), None, "that was of an earlier drain");
    assert!(report(&mut members));
    assert_eq!(members.drain_of(NodeId(1), 9), Some(drain));
    assert_eq!(members.drain_of(NodeId(1), 10), None);
}

#[test]
fn a_lookup_keeps_the_set_of_nodes_it_began_with() {
    let mut members = Members::new(SETTINGS);
    members.register(Tick(0), record(1, 1)).expect("newer");
    let before = members.live();
    members.expire(Tick(15));
    assert!(before.contains(NodeId(1)) && !members.live().contains(NodeId(1)));
}

proptest! {
    /// Against the definition: alive exactly when the last accepted sign of life is younger than `dead_after`.
    #[test]
    fn a_node_is_live_exactly_while_its_last_beat_is_young(
        steps in prop::collection::vec((0u8..4, 1u16..4, 0u64..20), 1..200),
    ) {
        let mut members = Members::new(SETTINGS);
        let mut last: BTreeMap<u16, (u64, u64)> = BTreeMap::new(); // node → epoch, last sign of life
        let mut now = 0;
        for (operation, node, wait) in steps {
            now += wait;
            for event in members.expire(Tick(now)) {
                if let MemberEvent::Forgotten(gone, epoch) = event {
                    prop_assert!(now - last[&gone.0].1 >= 60);
                    prop_assert_eq!(epoch, Epoch(last[&gone.0].0));
                }
            }
            let epoch = last.get(&node).map_or(0, |known| known.0);
            if operation == 0 {
                prop_assert!(members.register(Tick(now), record(node, epoch + 1)).is_ok());
                last.insert(node, (epoch + 1, now));
            } else {
                let beat = members.beat(Tick(now), NodeId(node), Epoch(epoch));
                let silence = last.get(&node).map(|known| now - known.1);
                prop_assert_eq!(beat, match silence {
                    Some(0..15) => Beat::Known,
                    Some(15..60) => Beat::Returned,
                    _ => Beat::Unknown,
                });
                if beat != Beat::Unknown {
                    last.insert(node, (epoch, now));
                }
            }
            for (node, (_, sign)) in &last {
                prop_assert_eq!(members.live().contains(NodeId(*node)), now - sign < 15);
            }
            prop_assert!(members.next_deadline().is_none_or(|next| next > Tick(now)));
        }
    }
}
