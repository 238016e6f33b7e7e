//! Calls of agents, silence of nodes, and node records: the order in which the parts of a member change.
//!
//! The parts are the node table, the directory and the ledgers. Each has its own lock in the process, and no two
//! are locked at once ([`MemberParts`]). The node table decides; directory and ledgers follow. A registration is an
//! exception: the directory knows it first, so that a heartbeat of a registered node always finds its inventory.
//!
//! A removed node leaves no state, even if a registration is in flight. A registration that was committed before
//! the removal and arrives after it is rejected ([`NodeTable::register`]). The node's number is never reused, so an
//! agent that still uses it must register again and gets a new number.
//!
//! Pure: the caller locks, logs, counts, and notifies watchers.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use reprise_policy::peer::PeerEndpoint;
use reprise_policy::{Epoch, NodeId, Tick};

use crate::live_nodes::LiveNodes;
use crate::node_table::{
    HeartbeatResult, LivenessEvent, NodeLiveness, NodeRecord, NodeTable, RegistrationError,
};
use crate::record_watch::{RecordChange, RecordUpdate};

/// Time for known nodes to register after the start of a member; agents retry at least once a second. Then the member
/// stops waiting for the inventories of the others.
pub const EXPECTED_FOR: Duration = Duration::from_secs(10);
/// Shortest time between two expiries; bounds the work.
const EXPIRY_WAIT_MIN: Duration = Duration::from_millis(1);

/// Access to the parts of a member; see the module.
pub trait MemberParts {
    /// Locks the node table, changes it, and delivers the events while it is still locked.
    fn nodes<R>(&mut self, act: impl FnOnce(&mut NodeTable) -> (R, Vec<NodeEvent>)) -> R;

    /// Begins an empty inventory of a registration in the directory.
    fn begin_inventory(&mut self, node: NodeId, epoch: Epoch);

    /// Drops the inventory of a registration from the directory, unless a newer one has replaced it.
    fn end_inventory(&mut self, node: NodeId, epoch: Epoch, end: NodeEnd);

    /// Waits for inventories of these nodes.
    fn expect_nodes(&mut self, nodes: &[NodeId]);

    /// Stops waiting for inventories of these nodes.
    fn stop_expecting(&mut self, nodes: &[NodeId]);

    /// Adds a registered node to the ledgers.
    fn register_grants(&mut self, node: NodeId, epoch: Epoch);

    /// Removes a node from the ledgers.
    fn forget_grants(&mut self, node: NodeId);
}

/// Why an inventory ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeEnd {
    /// The node was silent; the directory still waits for its next inventory.
    Silent,
    /// The node was removed; the directory stops waiting for it.
    Removed,
}

/// A change of the node table, for logs and watchers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeEvent {
    /// A node has registered with this member. `replaced` has the peer endpoints of a live registration before.
    Registered { node: NodeId, replaced: Option<Vec<PeerEndpoint>> },
    /// A dead node has sent a heartbeat.
    Returned(NodeId),
    /// A node is silent: it is no longer offered to others.
    Died(NodeId),
    /// A node was silent for long: it must register again.
    Forgotten(NodeId, Epoch),
    /// The store has new details of a node.
    Learned(NodeId),
    /// The node was removed from the store.
    Removed(NodeRecord),
}

/// Applies a registration that the store has committed: the node is alive, with an empty inventory.
///
/// # Errors
/// A newer registration was applied first, or the node was forgotten.
pub fn register(
    parts: &mut impl MemberParts,
    now: Tick,
    record: NodeRecord,
) -> Result<(), RegistrationError> {
    let (node, epoch) = (record.node, record.epoch);
    parts.begin_inventory(node, epoch);
    let registered = parts.nodes(|nodes| {
        let live = nodes.get(node).filter(|(_, state)| *state == NodeLiveness::Alive);
        let replaced = live.map(|(known, _)| known.details.peer_endpoints.clone());
        let registered = nodes.register(now, record);
        let event = registered.is_ok().then_some(NodeEvent::Registered { node, replaced });
        (registered, event.into_iter().collect())
    });
    if let Err(refused) = registered {
        // Undo the registration in the directory, which was first.
        if let RegistrationError::Forgotten(_) = refused {
            parts.end_inventory(node, epoch, NodeEnd::Removed);
        }
        return Err(refused);
    }
    parts.register_grants(node, epoch);
    // The node may have been removed meanwhile, after which the ledgers must not keep it.
    if parts.nodes(|nodes| (nodes.get(node).is_none(), Vec::new())) {
        parts.forget_grants(node);
    }
    Ok(())
}

/// Applies a heartbeat of a registration.
pub fn heartbeat(parts: &mut impl MemberParts, now: Tick, node: NodeId, epoch: Epoch) -> HeartbeatResult {
    parts.nodes(|nodes| {
        let result = nodes.heartbeat(now, node, epoch);
        let event = (result == HeartbeatResult::Returned).then_some(NodeEvent::Returned(node));
        (result, event.into_iter().collect())
    })
}

/// Applies all deadlines up to `now`; returns the time of the next one.
pub fn expire(parts: &mut impl MemberParts, now: Tick) -> Option<Tick> {
    let (forgotten, next) = parts.nodes(|nodes| {
        let expired = nodes.expire(now);
        let forgotten: Vec<(NodeId, Epoch)> = expired
            .iter()
            .filter_map(|event| match event {
                LivenessEvent::Forgotten(node, epoch) => Some((*node, *epoch)),
                LivenessEvent::Died(_) => None,
            })
            .collect();
        let events = expired.into_iter().map(|event| match event {
            LivenessEvent::Died(node) => NodeEvent::Died(node),
            LivenessEvent::Forgotten(node, epoch) => NodeEvent::Forgotten(node, epoch),
        });
        ((forgotten, nodes.next_deadline()), events.collect())
    });
    for (node, epoch) in forgotten {
        parts.end_inventory(node, epoch, NodeEnd::Silent);
        parts.forget_grants(node);
    }
    next
}

/// Time until the next expiry. `next` is the time until the next deadline, `dead_after` the silence after which a node is
/// no longer offered: a node that registers meanwhile expires no sooner.
pub fn expiry_wait(next: Option<Duration>, dead_after: Duration) -> Duration {
    next.map_or(dead_after, |next| next.min(dead_after)).max(EXPIRY_WAIT_MIN)
}

/// Returns the nodes to offer to others. Expires first, so a dead node is never among them.
pub fn live_nodes(parts: &mut impl MemberParts, now: Tick) -> Arc<LiveNodes> {
    expire(parts, now);
    parts.nodes(|nodes| (nodes.live(), Vec::new()))
}

/// Restores the nodes that the store has at `revision`: absent, and expected to register.
pub fn restore(parts: &mut impl MemberParts, records: Vec<NodeRecord>, revision: u64) {
    let numbers: Vec<NodeId> = records.iter().map(|record| record.node).collect();
    parts.expect_nodes(&numbers);
    parts.nodes(|nodes| {
        records.into_iter().for_each(|record| nodes.restore(record));
        nodes.set_followed_revision(revision);
        ((), Vec::new())
    });
}

/// Stops waiting for inventories of nodes that have not registered.
pub fn stop_expecting_absent(parts: &mut impl MemberParts) {
    let absent = parts.nodes(|nodes| {
        let absent = nodes.iter().filter(|(_, state)| *state == NodeLiveness::Absent);
        (absent.map(|(record, _)| record.node).collect::<Vec<_>>(), Vec::new())
    });
    parts.stop_expecting(&absent);
}

/// Applies a listing or changes of the node records, up to a revision.
pub fn apply_records(parts: &mut impl MemberParts, revision: u64, update: RecordUpdate<String, NodeRecord>) {
    match update {
        RecordUpdate::All(records) => {
            let mut there: BTreeMap<String, Option<NodeId>> = BTreeMap::new();
            for (name, record) in records {
                there.insert(name, record.as_ref().map(|record| record.node));
                record.into_iter().for_each(|record| learn(parts, record));
            }
            // An unreadable record keeps the known node of that name: it does not prove a removal.
            let is_there = |record: &NodeRecord| {
                let listed = there.get(&record.name);
                listed.is_some_and(|node| node.is_none_or(|node| node == record.node))
            };
            remove(parts, |nodes| nodes.retain_listed(is_there, revision));
        }
        RecordUpdate::Changes(changes) => changes.into_iter().for_each(|change| match change {
            RecordChange::Put(_, record) => record.into_iter().for_each(|record| learn(parts, record)),
            RecordChange::Deleted(name, revision) => apply_deletion(parts, &name, revision),
        }),
    }
    parts.nodes(|nodes| (nodes.set_followed_revision(revision), Vec::new()));
}

/// Removes the node of a name whose record the store deleted at `revision`.
pub fn apply_deletion(parts: &mut impl MemberParts, name: &str, revision: u64) {
    remove(parts, |nodes| nodes.apply_deletion(name, revision));
}

/// Applies a record, which may be of a registration with another member.
fn learn(parts: &mut impl MemberParts, record: NodeRecord) {
    let node = record.node;
    parts.nodes(|nodes| {
        let event = nodes.learn(record).then_some(NodeEvent::Learned(node));
        ((), event.into_iter().collect())
    });
}

fn remove(parts: &mut impl MemberParts, remove: impl FnOnce(&mut NodeTable) -> Vec<NodeRecord>) {
    let gone = parts.nodes(|nodes| {
        let gone = remove(nodes);
        (gone.clone(), gone.into_iter().map(NodeEvent::Removed).collect())
    });
    for NodeRecord { node, epoch, .. } in gone {
        parts.end_inventory(node, epoch, NodeEnd::Removed);
        parts.forget_grants(node);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::node_table::{LivenessSettings, NodeDetails};

    const DEAD_AFTER: Duration = Duration::from_secs(1);

    /// Parts that record every access except those of the node table.
    struct Parts {
        nodes: NodeTable,
        calls: Vec<String>,
        events: Vec<NodeEvent>,
    }

    impl MemberParts for Parts {
        fn nodes<R>(&mut self, act: impl FnOnce(&mut NodeTable) -> (R, Vec<NodeEvent>)) -> R {
            let (result, events) = act(&mut self.nodes);
            self.events.extend(events);
            result
        }

        fn begin_inventory(&mut self, node: NodeId, epoch: Epoch) {
            self.calls.push(format!("begin {node} {}", epoch.0));
        }

        fn end_inventory(&mut self, node: NodeId, epoch: Epoch, end: NodeEnd) {
            self.calls.push(format!("end {node} {} {end:?}", epoch.0));
        }

        fn expect_nodes(&mut self, nodes: &[NodeId]) {
            self.calls.push(format!("expect {}", nodes.len()));
        }

        fn stop_expecting(&mut self, nodes: &[NodeId]) {
            self.calls.push(format!("stop {}", nodes.len()));
        }

        fn register_grants(&mut self, node: NodeId, epoch: Epoch) {
            self.calls.push(format!("grants {node} {}", epoch.0));
        }

        fn forget_grants(&mut self, node: NodeId) {
            self.calls.push(format!("forget {node}"));
        }
    }

    impl Parts {
        fn new() -> Parts {
            let settings = LivenessSettings { dead_after: DEAD_AFTER, forget_after: 3 * DEAD_AFTER };
            Parts { nodes: NodeTable::new(settings), calls: Vec::new(), events: Vec::new() }
        }

        /// Takes the recorded calls and events.
        fn taken(&mut self) -> (String, Vec<NodeEvent>) {
            (std::mem::take(&mut self.calls).join(", "), std::mem::take(&mut self.events))
        }
    }

    fn record(node: u16, epoch: u64, revision: u64) -> NodeRecord {
        let peer_endpoints = vec![PeerEndpoint::tcp(format!("host{epoch}:1"))];
        let details = NodeDetails { peer_endpoints, ..NodeDetails::default() };
        NodeRecord { node: NodeId(node), name: format!("n{node}"), epoch: Epoch(epoch), details, revision }
    }

    fn at(seconds: u64) -> Tick {
        Tick(0).after(Duration::from_secs(seconds))
    }

    #[test]
    fn registration_reaches_directory_nodes_and_ledgers_in_this_order() {
        let (mut parts, node) = (Parts::new(), NodeId(1));
        assert_eq!(register(&mut parts, at(0), record(1, 4, 5)), Ok(()));
        let registered = |replaced| vec![NodeEvent::Registered { node, replaced }];
        assert_eq!(parts.taken(), (format!("begin {node} 4, grants {node} 4"), registered(None)));
        assert_eq!(register(&mut parts, at(0), record(1, 5, 6)), Ok(()));
        assert_eq!(parts.taken().1, registered(Some(vec![PeerEndpoint::tcp("host4:1")])));
        register(&mut parts, at(0), record(1, 5, 6)).expect_err("stale");
        let unchanged = (format!("begin {node} 5"), Vec::new());
        assert_eq!(parts.taken(), unchanged, "the directory keeps the newer registration by itself");
    }

    #[test]
    fn silent_node_is_first_not_offered_and_then_loses_inventory_and_grants() {
        let (mut parts, node) = (Parts::new(), NodeId(1));
        register(&mut parts, at(0), record(1, 4, 5)).expect("the first");
        parts.taken();
        assert_eq!(expire(&mut parts, at(1)), Some(at(3)));
        assert_eq!(parts.taken(), (String::new(), vec![NodeEvent::Died(node)]));
        assert_eq!(heartbeat(&mut parts, at(2), node, Epoch(4)), HeartbeatResult::Returned);
        assert_eq!(parts.taken().1, [NodeEvent::Returned(node)]);
        assert_eq!(expire(&mut parts, at(9)), None);
        let events = vec![NodeEvent::Died(node), NodeEvent::Forgotten(node, Epoch(4))];
        assert_eq!(parts.taken(), (format!("end {node} 4 Silent, forget {node}"), events));
        assert_eq!(heartbeat(&mut parts, at(9), node, Epoch(4)), HeartbeatResult::Unknown);
    }

    #[test]
    fn next_expiry_comes_in_time_for_a_node_that_registers_now() {
        let milliseconds = Duration::from_millis;
        assert_eq!(expiry_wait(None, DEAD_AFTER), DEAD_AFTER);
        assert_eq!(expiry_wait(Some(milliseconds(300)), DEAD_AFTER), milliseconds(300));
        assert_eq!(expiry_wait(Some(2 * DEAD_AFTER), DEAD_AFTER), DEAD_AFTER);
        assert_eq!(expiry_wait(Some(Duration::ZERO), DEAD_AFTER), EXPIRY_WAIT_MIN);
    }

    #[test]
    fn silent_node_is_not_offered_even_if_it_has_not_expired_yet() {
        let (mut parts, node) = (Parts::new(), NodeId(1));
        register(&mut parts, at(0), record(1, 4, 5)).expect("the first");
        assert!(live_nodes(&mut parts, at(0)).contains(node));
        assert!(!live_nodes(&mut parts, at(1)).contains(node));
    }

    #[test]
    fn removed_node_leaves_no_state_even_if_its_registration_arrives_later() {
        let (mut parts, node) = (Parts::new(), NodeId(1));
        restore(&mut parts, vec![record(1, 4, 5), record(2, 4, 5)], 5);
        stop_expecting_absent(&mut parts);
        assert_eq!(parts.taken().0, "expect 2, stop 2");
        let other = ("n2".to_owned(), None);
        apply_records(&mut parts, 7, RecordUpdate::All(vec![other]));
        let (calls, events) = parts.taken();
        assert_eq!(calls, format!("end {node} 4 Removed, forget {node}"), "n2 is unreadable and stays");
        assert_eq!(events, [NodeEvent::Removed(record(1, 4, 5))]);
        register(&mut parts, at(0), record(1, 5, 6)).expect_err("it was forgotten");
        assert_eq!(parts.taken().0, format!("begin {node} 5, end {node} 5 Removed"));
        let deleted = RecordChange::Deleted("n2".to_owned(), 8);
        let put = RecordChange::Put("n3".to_owned(), Some(record(3, 1, 8)));
        apply_records(&mut parts, 8, RecordUpdate::Changes(vec![deleted, put]));
        let events = [NodeEvent::Removed(record(2, 4, 5)), NodeEvent::Learned(NodeId(3))];
        assert_eq!(parts.taken().1, events);
    }
}
