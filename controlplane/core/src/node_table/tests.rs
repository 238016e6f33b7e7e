//! Unit tests of the node table: heartbeats, registrations, silence, reports and store records.

use proptest::prelude::*;

use super::*;

const SETTINGS: LivenessSettings =
    LivenessSettings { dead_after: Duration::from_micros(15), forget_after: Duration::from_micros(60) };

fn record(node: u16, epoch: u64) -> NodeRecord {
    NodeRecord {
        node: NodeId(node),
        name: format!("n{node}"),
        epoch: Epoch(epoch),
        details: NodeDetails { peer_endpoints: vec![PeerEndpoint::tcp("host:1")], ..NodeDetails::default() },
        revision: 0,
    }
}

/// A record with a store revision.
fn record_of(node: u16, epoch: u64, revision: u64) -> NodeRecord {
    NodeRecord { revision, ..record(node, epoch) }
}

fn numbers(records: Vec<NodeRecord>) -> Vec<u16> {
    records.into_iter().map(|record| record.node.0).collect()
}

fn state(table: &NodeTable, node: u16) -> NodeLiveness {
    table.get(NodeId(node)).expect("an entry").1
}

#[test]
fn a_silent_node_dies_and_must_register_again() {
    let mut table = NodeTable::new(SETTINGS);
    table.register(Tick(100), record(1, 1)).expect("newer");
    assert!(table.expire(Tick(114)).is_empty());
    assert!(table.live().contains(NodeId(1)));
    assert_eq!(table.expire(Tick(115)), [LivenessEvent::Died(NodeId(1))]);
    assert!(!table.live().contains(NodeId(1)));
    assert_eq!(table.next_deadline(), Some(Tick(160)));
    assert_eq!(table.expire(Tick(160)), [LivenessEvent::Forgotten(NodeId(1), Epoch(1))]);
    assert_eq!(table.heartbeat(Tick(161), NodeId(1), Epoch(1)), HeartbeatResult::Unknown);
    assert_eq!(table.next_deadline(), None);
    table.register(Tick(162), record(1, 2)).expect("newer");
    assert_eq!(table.heartbeat(Tick(163), NodeId(1), Epoch(2)), HeartbeatResult::Known);
}

#[test]
fn a_heartbeat_revives_a_dead_node() {
    let mut table = NodeTable::new(SETTINGS);
    table.register(Tick(0), record(1, 1)).expect("newer");
    assert_eq!(table.expire(Tick(20)).len(), 1);
    assert_eq!(table.heartbeat(Tick(30), NodeId(1), Epoch(1)), HeartbeatResult::Returned);
    assert!(table.live().contains(NodeId(1)));
    assert_eq!(
        table.expire(Tick(45)),
        [LivenessEvent::Died(NodeId(1))],
        "silence counts from the last heartbeat"
    );
}

#[test]
fn a_node_without_peer_endpoint_is_alive_but_not_offered() {
    let mut table = NodeTable::new(SETTINGS);
    table.register(Tick(0), record(1, 1)).expect("newer");
    let silent = NodeRecord { details: NodeDetails::default(), ..record(1, 2) };
    table.register(Tick(1), silent).expect("newer");
    assert_eq!((state(&table, 1), table.live().contains(NodeId(1))), (NodeLiveness::Alive, false));
    table.expire(Tick(20));
    assert_eq!(table.heartbeat(Tick(21), NodeId(1), Epoch(2)), HeartbeatResult::Returned);
    assert!(!table.live().contains(NodeId(1)));
}

#[test]
fn rejects_heartbeats_and_registrations_of_older_epochs() {
    let mut table = NodeTable::new(SETTINGS);
    table.register(Tick(0), record(1, 5)).expect("newer");
    assert_eq!(table.heartbeat(Tick(1), NodeId(1), Epoch(4)), HeartbeatResult::Unknown);
    assert_eq!(table.heartbeat(Tick(1), NodeId(2), Epoch(5)), HeartbeatResult::Unknown);
    let refused = table.register(Tick(1), record(1, 5)).expect_err("not newer");
    let stale = RegistrationError::Stale { node: NodeId(1), offered: Epoch(5), current: Epoch(5) };
    assert_eq!(refused, stale);
    table.register(Tick(1), record(1, 6)).expect("newer");
}

#[test]
fn a_restored_node_is_known_but_absent() {
    let mut table = NodeTable::new(SETTINGS);
    table.restore(record(3, 7));
    assert_eq!(state(&table, 3), NodeLiveness::Absent);
    assert_eq!(table.heartbeat(Tick(1), NodeId(3), Epoch(7)), HeartbeatResult::Unknown);
    assert!(table.register(Tick(1), record(3, 7)).is_err(), "its epoch is in use");
    assert_eq!(table.live().count(), 0);
}

#[test]
fn a_node_registered_with_another_member_is_known_but_absent() {
    let mut table = NodeTable::new(SETTINGS);
    assert!(table.learn(record(3, 7)));
    assert!(!table.learn(record(3, 7)), "the record is known");
    assert_eq!(state(&table, 3), NodeLiveness::Absent);
    assert_eq!(table.heartbeat(Tick(1), NodeId(3), Epoch(7)), HeartbeatResult::Unknown);
    assert_eq!(table.live().count(), 0);
    // This member's registration was committed before that one, but arrives later.
    table.register(Tick(1), record(3, 6)).expect("the first one here");
    assert_eq!(table.heartbeat(Tick(2), NodeId(3), Epoch(6)), HeartbeatResult::Known);
}

#[test]
fn store_records_change_the_address_of_a_live_node_but_not_its_registration() {
    let mut table = NodeTable::new(SETTINGS);
    table.register(Tick(0), record(1, 4)).expect("newer");
    let at = |address: &str| NodeDetails {
        peer_endpoints: vec![PeerEndpoint::tcp(address)],
        ..NodeDetails::default()
    };
    assert!(!table.learn(NodeRecord { details: at("old:1"), ..record(1, 3) }), "an older record");
    assert!(table.learn(NodeRecord { details: at("new:1"), ..record(1, 6) }));
    assert!(!table.learn(NodeRecord { details: at("between:1"), ..record(1, 5) }));
    let (known, state) = table.get(NodeId(1)).expect("an entry");
    assert_eq!((&known.details, known.epoch), (&at("new:1"), Epoch(4)));
    assert_eq!(state, NodeLiveness::Alive);
    assert_eq!(table.heartbeat(Tick(1), NodeId(1), Epoch(4)), HeartbeatResult::Known);
    assert!(table.learn(NodeRecord { details: NodeDetails::default(), ..record(1, 7) }));
    assert!(!table.live().contains(NodeId(1)), "it no longer has a peer endpoint");
}

#[test]
fn removes_a_node_with_deleted_record_and_rejects_its_number() {
    let mut table = NodeTable::new(SETTINGS);
    table.register(Tick(0), record_of(1, 4, 10)).expect("newer");
    table.register(Tick(0), record_of(2, 1, 11)).expect("newer");
    assert_eq!(numbers(table.apply_deletion("n1", 10)), [0; 0], "a revision does not delete its own puts");
    assert_eq!(numbers(table.apply_deletion("n1", 12)), [1]);
    assert_eq!(table.heartbeat(Tick(1), NodeId(1), Epoch(4)), HeartbeatResult::Unknown);
    assert!(!table.report(NodeId(1), Epoch(4), NodeReport::default()));
    assert!(!table.is_registered(NodeId(1), Epoch(4)) && !table.live().contains(NodeId(1)));
    assert_eq!(table.iter().map(|(record, _)| record.node.0).collect::<Vec<_>>(), [2]);
    assert_eq!(table.expire(Tick(60)).len(), 2, "the other node dies and must register again");
    assert_eq!(numbers(table.apply_deletion("n1", 13)), [0; 0]);
}

#[test]
fn rejects_a_late_registration_committed_before_the_deletion() {
    let mut table = NodeTable::new(SETTINGS);
    table.register(Tick(0), record_of(1, 4, 10)).expect("newer");
    assert_eq!(numbers(table.apply_deletion("n1", 12)), [1]);
    table.set_followed_revision(12);
    let refused = table.register(Tick(1), record_of(1, 5, 11)).expect_err("deleted meanwhile");
    assert_eq!(refused, RegistrationError::Forgotten(NodeId(1)));
    assert!(!table.learn(record_of(1, 5, 11)) && table.get(NodeId(1)).is_none());
    // The name returns under another number. Later reports of its first deletion must not affect it.
    let again = NodeRecord { name: "n1".to_owned(), ..record_of(7, 1, 14) };
    table.register(Tick(2), again).expect("a new node");
    assert_eq!(numbers(table.apply_deletion("n1", 12)), [0; 0]);
    assert_eq!(table.heartbeat(Tick(3), NodeId(7), Epoch(1)), HeartbeatResult::Known);
    table.set_followed_revision(14);
    table.register(Tick(4), record_of(7, 2, 13)).expect("a known node has a record");
    assert_eq!(numbers(table.apply_deletion("n7", 14)), [0; 0], "at the revision of the newest known record");
}

#[test]
fn removes_unlisted_nodes_except_later_registrations() {
    let mut table = NodeTable::new(SETTINGS);
    table.restore(record_of(1, 1, 5));
    table.restore(record_of(2, 1, 6));
    table.set_followed_revision(6);
    assert!(table.learn(record_of(3, 1, 7)));
    table.register(Tick(0), record_of(4, 1, 9)).expect("newer");
    assert!(!table.learn(record_of(2, 2, 9)), "the same details");
    let gone = table.retain_listed(|record| record.node == NodeId(1), 8);
    assert_eq!(numbers(gone), [3], "nodes 2 and 4 have records of revision 9");
    assert_eq!(table.iter().map(|(record, _)| record.node.0).collect::<Vec<_>>(), [1, 2, 4]);
}

#[test]
fn a_report_belongs_to_one_registration() {
    let mut table = NodeTable::new(SETTINGS);
    table.register(Tick(0), record(1, 1)).expect("newer");
    let report = NodeReport { queued_bytes: 7, ..NodeReport::default() };
    assert!(!table.report(NodeId(1), Epoch(2), report));
    assert!(table.report(NodeId(1), Epoch(1), report));
    assert_eq!(table.report_of(NodeId(1)), Some(&report));
    table.register(Tick(1), record(1, 2)).expect("newer");
    assert_eq!(table.report_of(NodeId(1)), None);
    table.expire(Tick(100));
    assert!(!table.report(NodeId(1), Epoch(2), report), "it must register again");
}

#[test]
fn tenants_of_a_node_are_those_of_the_last_report_of_its_registration() {
    let mut table = NodeTable::new(SETTINGS);
    table.register(Tick(0), record(1, 1)).expect("newer");
    let tenants = |names: &[&str]| names.iter().map(|name| name.parse().expect("a name")).collect();
    assert_eq!(table.tenants_of(NodeId(1)), None);
    assert!(table.set_tenants(NodeId(1), Epoch(1), tenants(&["x", "y"])));
    assert!(!table.set_tenants(NodeId(1), Epoch(1), tenants(&["x", "y"])), "nothing has changed");
    assert!(!table.set_tenants(NodeId(1), Epoch(2), tenants(&[])), "another registration");
    assert_eq!(table.tenants_of(NodeId(1)).map(|set| set.len()), Some(2));
    assert!(table.set_tenants(NodeId(1), Epoch(1), tenants(&["y"])));
    assert_eq!(table.tenants_of(NodeId(1)).map(|set| set.len()), Some(1));
}

#[test]
fn placed_bytes_count_until_the_next_report() {
    let mut table = NodeTable::new(SETTINGS);
    table.register(Tick(0), record(1, 1)).expect("newer");
    table.place(NodeId(1), 5);
    table.place(NodeId(1), 6);
    table.place(NodeId(2), 6);
    assert_eq!([1, 2].map(|node| table.placed_on(NodeId(node))), [11, 0]);
    assert!(table.report(NodeId(1), Epoch(1), NodeReport::default()));
    assert_eq!(table.placed_on(NodeId(1)), 0);
}

#[test]
fn drain_progress_is_available_after_a_report_that_knows_the_mode() {
    let mut table = NodeTable::new(SETTINGS);
    table.register(Tick(0), record(1, 1)).expect("newer");
    let drain = DrainProgress { drained: true, ..DrainProgress::default() };
    let report = |table: &mut NodeTable| {
        table.report(NodeId(1), Epoch(1), NodeReport { drain, ..NodeReport::default() })
    };
    assert!(report(&mut table));
    table.record_sent_mode(NodeId(1), 9);
    assert_eq!(table.drain_of(NodeId(1), 9), None, "that report was of an earlier drain");
    assert!(report(&mut table));
    assert_eq!(table.drain_of(NodeId(1), 9), Some(drain));
    assert_eq!(table.drain_of(NodeId(1), 10), None);
}

#[test]
fn a_lookup_keeps_the_live_set_it_started_with() {
    let mut table = NodeTable::new(SETTINGS);
    table.register(Tick(0), record(1, 1)).expect("newer");
    let before = table.live();
    table.expire(Tick(15));
    assert!(before.contains(NodeId(1)) && !table.live().contains(NodeId(1)));
}

proptest! {
    /// A node is alive exactly if its last accepted heartbeat or registration is more recent than
    /// `dead_after`.
    #[test]
    fn a_node_is_live_exactly_while_its_last_heartbeat_is_recent(
        steps in prop::collection::vec((0u8..4, 1u16..4, 0u64..20), 1..200),
    ) {
        let mut table = NodeTable::new(SETTINGS);
        let mut last: BTreeMap<u16, (u64, u64)> = BTreeMap::new(); // node → epoch, last heartbeat
        let mut now = 0;
        for (operation, node, wait) in steps {
            now += wait;
            for event in table.expire(Tick(now)) {
                if let LivenessEvent::Forgotten(gone, epoch) = event {
                    prop_assert!(now - last[&gone.0].1 >= 60);
                    prop_assert_eq!(epoch, Epoch(last[&gone.0].0));
                }
            }
            let epoch = last.get(&node).map_or(0, |known| known.0);
            if operation == 0 {
                prop_assert!(table.register(Tick(now), record(node, epoch + 1)).is_ok());
                last.insert(node, (epoch + 1, now));
            } else {
                let result = table.heartbeat(Tick(now), NodeId(node), Epoch(epoch));
                let silence = last.get(&node).map(|known| now - known.1);
                prop_assert_eq!(result, match silence {
                    Some(0..15) => HeartbeatResult::Known,
                    Some(15..60) => HeartbeatResult::Returned,
                    _ => HeartbeatResult::Unknown,
                });
                if result != HeartbeatResult::Unknown {
                    last.insert(node, (epoch, now));
                }
            }
            for (node, (_, sign)) in &last {
                prop_assert_eq!(table.live().contains(NodeId(*node)), now - sign < 15);
            }
            prop_assert!(table.next_deadline().is_none_or(|next| next > Tick(now)));
        }
    }
}
