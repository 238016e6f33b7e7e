//! Node records from the store: those at the start, registrations with other members, and removals.
//!
//! A removed node leaves no state in this member, even if a registration is in flight. A registration that
//! was committed before the removal and arrives after it is rejected ([`NodeTable::register`]). The node's
//! number is never reused, so an agent that still uses it must register again and gets a new number.
//!
//! Every change of a node is applied in the order node table (which decides), directory, ledgers, one lock at
//! a time.

use std::collections::BTreeMap;

use reprise_controlplane_core::{
    NodeLiveness, NodeRecord, NodeTable, RecordChange, RecordUpdate, RegistrationError, Scope,
};
use reprise_controlplane_store::Revision;
use reprise_policy::{Epoch, NodeId};

use super::Cluster;

impl Cluster {
    /// Restores the nodes that the store has at `revision`: absent, and expected to register.
    pub fn restore(&self, records: Vec<NodeRecord>, revision: Revision) {
        let mut directory = self.directory_mut();
        records.iter().for_each(|record| directory.expect_node(record.node));
        drop(directory);
        let mut table = self.table();
        records.into_iter().for_each(|record| table.restore(record));
        table.set_followed_revision(revision.0);
    }

    /// Applies a listing or changes of the node records, up to a revision.
    pub fn apply_store_update(&self, revision: Revision, update: RecordUpdate<String, NodeRecord>) {
        match update {
            RecordUpdate::All(records) => self.apply_listing(records, revision),
            RecordUpdate::Changes(changes) => changes.into_iter().for_each(|change| match change {
                RecordChange::Put(_, record) => record.into_iter().for_each(|record| self.apply_put(record)),
                RecordChange::Deleted(name, revision) => self.node_deleted(&name, Revision(revision)),
            }),
        }
        self.table().set_followed_revision(revision.0);
    }

    /// Removes the node of a name whose record the store deleted at `revision`.
    pub fn node_deleted(&self, name: &str, revision: Revision) {
        self.remove_nodes(|table| table.apply_deletion(name, revision.0));
    }

    /// Liveness of a node now.
    pub fn liveness_of(&self, node: NodeId) -> Option<NodeLiveness> {
        self.expire();
        self.table().get(node).map(|(_, state)| state)
    }

    /// Undoes the registration in the directory, which was registered first, unless a newer one replaced it.
    pub(super) fn registration_rejected(&self, node: NodeId, epoch: Epoch, refused: RegistrationError) {
        if let RegistrationError::Forgotten(_) = refused {
            self.invalidate_node(node, epoch);
        }
    }

    fn apply_listing(&self, records: Vec<(String, Option<NodeRecord>)>, revision: Revision) {
        let mut there: BTreeMap<String, Option<NodeId>> = BTreeMap::new();
        for (name, record) in records {
            there.insert(name, record.as_ref().map(|record| record.node));
            record.into_iter().for_each(|record| self.apply_put(record));
        }
        // An unreadable record keeps the known node of that name: it does not prove a removal.
        let is_there = |record: &NodeRecord| {
            there.get(&record.name).is_some_and(|node| node.is_none_or(|node| node == record.node))
        };
        self.remove_nodes(|table| table.retain_listed(is_there, revision.0));
    }

    /// Applies a record, which may be of a registration with another member.
    fn apply_put(&self, record: NodeRecord) {
        let node = record.node;
        let mut table = self.table();
        if table.learn(record) {
            let (record, state) = table.get(node).expect("learn added it");
            self.notify_node_changed(&table, record, state);
        }
    }

    /// Removes nodes from the node table, the directory and the ledgers.
    fn remove_nodes(&self, remove: impl FnOnce(&mut NodeTable) -> Vec<NodeRecord>) {
        let mut table = self.table();
        let gone = remove(&mut table);
        for record in &gone {
            tracing::info!(node = record.node.0, name = record.name, "node removed");
            self.notify_node_removed(&table, record);
        }
        drop(table);
        for NodeRecord { node, epoch, .. } in gone {
            self.invalidate_node(node, epoch);
            self.ledgers.forget(node);
        }
    }

    /// Drops a registration's inventory from the directory, and stops waiting for a node without one.
    fn invalidate_node(&self, node: NodeId, epoch: Epoch) {
        let mut directory = self.directory_mut();
        if directory.forget(node, epoch) {
            self.events.record_clearing(Scope::node(node));
        }
        directory.stop_expecting(node);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use reprise_controlplane_core::{LivenessSettings, NodeDetails};
    use reprise_policy::SlotSet;

    use super::*;
    use crate::cluster::WatchEvent as Sent;
    use crate::events::Events;
    use crate::metrics::Metrics;

    fn cluster() -> Cluster {
        let second = Duration::from_secs(1);
        let settings = LivenessSettings { dead_after: second, forget_after: 60 * second };
        let cluster = Cluster::new(settings, 8, Events::new(1 << 16), Metrics::new().0);
        cluster.set_owned_slots(&SlotSet::ALL, Epoch(1));
        cluster
    }

    fn record(node: u16, epoch: u64, revision: u64) -> NodeRecord {
        let details = NodeDetails { peer_address: "host:1".to_owned(), ..NodeDetails::default() };
        NodeRecord { node: NodeId(node), name: format!("n{node}"), epoch: Epoch(epoch), details, revision }
    }

    fn apply_empty_listing(cluster: &Cluster, revision: u64) {
        cluster.apply_store_update(Revision(revision), RecordUpdate::All(Vec::new()));
    }

    #[test]
    fn removed_node_leaves_no_state_and_watchers_are_notified() {
        let cluster = cluster();
        cluster.restore(vec![record(1, 1, 5)], Revision(5));
        cluster.register(record(2, 1, 7)).expect("newer");
        assert_eq!(cluster.directory().size().slots_partial, SlotSet::ALL.len(), "both are expected");
        let (_, mut news) = cluster.watch_nodes();
        apply_empty_listing(&cluster, 8);
        assert!(cluster.nodes().is_empty());
        for number in [1, 2] {
            let Ok(Sent::Change(change)) = news.try_recv() else { panic!("one change for each node") };
            assert_eq!((change.node.expect("a node").node, change.removed), (number, true));
        }
        let size = cluster.directory().size();
        assert_eq!((size.slots_partial, size.nodes.len()), (0, 0), "no node is expected");
        assert_eq!(cluster.slot_status(NodeId(2), Epoch(1)), None);
        assert!(!cluster.heartbeat(NodeId(2), Epoch(1)));
    }

    #[test]
    fn rejects_a_registration_older_than_the_removal_and_keeps_no_state() {
        let cluster = cluster();
        cluster.register(record(1, 1, 5)).expect("newer");
        // The registration at revision 6 arrives after the removal at revision 7.
        apply_empty_listing(&cluster, 7);
        let refused = cluster.register(record(1, 2, 6)).expect_err("forgotten");
        assert_eq!(refused, RegistrationError::Forgotten(NodeId(1)));
        let size = cluster.directory().size();
        assert_eq!((size.slots_partial, size.nodes.len()), (0, 0));
        assert_eq!(cluster.slot_status(NodeId(1), Epoch(2)), None);
        cluster.register(record(2, 1, 8)).expect("registered after the removal");
        assert!(cluster.heartbeat(NodeId(2), Epoch(1)));
    }
}
