//! The parts of this member behind their locks, for [`member_parts`], with logs, metrics and watch events.

use reprise_controlplane_core::{
    MemberParts, NodeEnd, NodeEvent, NodeLiveness, NodeRecord, NodeTable, RecordUpdate, Scope, member_parts,
};
use reprise_controlplane_store::Revision;
use reprise_policy::{Epoch, NodeId};

use super::Cluster;
use super::info::addresses;

impl MemberParts for &Cluster {
    fn nodes<R>(&mut self, act: impl FnOnce(&mut NodeTable) -> (R, Vec<NodeEvent>)) -> R {
        let mut table = self.table();
        let (result, events) = act(&mut table);
        events.iter().for_each(|event| self.observe(&table, event));
        result
    }

    fn begin_inventory(&mut self, node: NodeId, epoch: Epoch) {
        let mut directory = self.directory_mut();
        if directory.register(node, epoch) {
            self.events.record_clearing(Scope::node(node));
        }
    }

    fn end_inventory(&mut self, node: NodeId, epoch: Epoch, end: NodeEnd) {
        let mut directory = self.directory_mut();
        if directory.forget(node, epoch) {
            self.events.record_clearing(Scope::node(node));
        }
        if end == NodeEnd::Removed {
            directory.stop_expecting(node);
        }
    }

    fn expect_nodes(&mut self, nodes: &[NodeId]) {
        let mut directory = self.directory_mut();
        nodes.iter().for_each(|node| directory.expect_node(*node));
    }

    fn stop_expecting(&mut self, nodes: &[NodeId]) {
        let mut directory = self.directory_mut();
        nodes.iter().for_each(|node| directory.stop_expecting(*node));
    }

    fn register_grants(&mut self, node: NodeId, epoch: Epoch) {
        self.ledgers.register(node, epoch);
    }

    fn forget_grants(&mut self, node: NodeId) {
        self.ledgers.forget(node);
    }
}

impl Cluster {
    /// Restores the nodes that the store has at `revision`: absent, and expected to register.
    pub fn restore(&self, records: Vec<NodeRecord>, revision: Revision) {
        member_parts::restore(&mut &*self, records, revision.0);
    }

    /// Applies a listing or changes of the node records, up to a revision.
    pub fn apply_store_update(&self, revision: Revision, update: RecordUpdate<String, NodeRecord>) {
        member_parts::apply_records(&mut &*self, revision.0, update);
    }

    /// Removes the node of a name whose record the store deleted at `revision`.
    pub fn node_deleted(&self, name: &str, revision: Revision) {
        member_parts::apply_deletion(&mut &*self, name, revision.0);
    }

    /// Liveness of a node now.
    pub fn liveness_of(&self, node: NodeId) -> Option<NodeLiveness> {
        self.expire();
        self.table().get(node).map(|(_, state)| state)
    }

    /// Logs and counts a change, and notifies watchers, while the node table is locked.
    fn observe(&self, table: &NodeTable, event: &NodeEvent) {
        let changed = |node| {
            let (record, state) = table.get(node).expect("events are about known nodes");
            self.notify_node_changed(table, record, state);
            record
        };
        match event {
            NodeEvent::Registered { node, replaced } => {
                let record = changed(*node);
                let (name, endpoints) = (&record.name, &record.details.peer_endpoints);
                if let Some(was) = replaced.as_ref().filter(|was| *was != endpoints) {
                    tracing::warn!(
                        node = node.0,
                        name,
                        was = addresses(was),
                        now = addresses(endpoints),
                        "a live node registered from another address: check whether two agents share its name"
                    );
                }
                tracing::info!(node = node.0, name, epoch = record.epoch.0, "node registered");
                self.metrics.registrations.inc();
            }
            NodeEvent::Returned(node) => {
                let name = &changed(*node).name;
                tracing::info!(condition = "node_back", node = node.0, name, "node is alive again");
            }
            NodeEvent::Died(node) => {
                let name = &changed(*node).name;
                tracing::warn!(node = node.0, name, "node is silent: no longer offered to others");
                self.metrics.deaths.inc();
            }
            NodeEvent::Forgotten(node, epoch) => {
                tracing::info!(node = node.0, epoch = epoch.0, "node forgotten: it must register again");
            }
            NodeEvent::Learned(node) => drop(changed(*node)),
            NodeEvent::Removed(record) => {
                tracing::info!(node = record.node.0, name = record.name, "node removed");
                self.notify_node_removed(table, record);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use reprise_controlplane_core::{LivenessSettings, NodeDetails, RegistrationError};
    use reprise_policy::SlotSet;
    use reprise_policy::peer::PeerEndpoint;

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
        let details =
            NodeDetails { peer_endpoints: vec![PeerEndpoint::tcp("host:1")], ..NodeDetails::default() };
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
