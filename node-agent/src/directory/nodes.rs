//! The nodes of the cluster as last reported by the control plane.

use std::collections::BTreeMap;

use reprise_policy::{Epoch, NodeId};
use reprise_proto::controlplane::NodeInfo;

/// A node of the cluster, possibly this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerNode {
    /// Number of the node.
    pub(crate) node: NodeId,
    /// Name of the node.
    pub(crate) name: String,
    /// `host:port` of its peer transport; empty without one.
    pub(crate) peer_address: String,
    /// `host:port` of its admin port.
    pub(crate) admin_address: String,
    /// Failure domain: its nodes fail together.
    pub(crate) failure_domain: String,
    /// Epoch of its registration.
    pub(crate) epoch: Epoch,
    /// Whether its heartbeats arrive.
    pub(crate) alive: bool,
}

/// All nodes by number.
#[derive(Debug, Default)]
pub(super) struct NodeMap {
    nodes: BTreeMap<NodeId, PeerNode>,
}

impl NodeMap {
    pub(super) fn peer_address(&self, node: NodeId) -> Option<String> {
        let address = &self.nodes.get(&node)?.peer_address;
        (!address.is_empty()).then(|| address.clone())
    }

    pub(super) fn has_address(&self, node: NodeId) -> bool {
        self.nodes.get(&node).is_some_and(|node| !node.peer_address.is_empty())
    }

    pub(super) fn node_of(&self, name: &str) -> Option<NodeId> {
        self.nodes.values().find(|node| node.name == name).map(|node| node.node)
    }

    pub(super) fn list(&self) -> Vec<PeerNode> {
        self.nodes.values().cloned().collect()
    }

    /// Replaces the whole list.
    pub(super) fn replace(&mut self, nodes: Vec<NodeInfo>) {
        self.nodes = nodes.into_iter().filter_map(from_wire).map(|node| (node.node, node)).collect();
    }

    /// Applies a change from the watch. A change with an older epoch than the known one is ignored, except
    /// for a removal: it is final for any epoch, since node numbers are not reused.
    pub(super) fn change(&mut self, node: NodeInfo, kind: NodeChangeKind) {
        let Some(node) = from_wire(node) else { return };
        let known = self.nodes.get(&node.node).filter(|known| known.name == node.name);
        match kind {
            NodeChangeKind::Updated if known.is_some_and(|known| known.epoch > node.epoch) => {}
            NodeChangeKind::Updated => drop(self.nodes.insert(node.node, node)),
            NodeChangeKind::Removed if known.is_some() => drop(self.nodes.remove(&node.node)),
            NodeChangeKind::Removed => {}
        }
    }
}

/// Type of a change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NodeChangeKind {
    /// The node is registered.
    Updated,
    /// The node was removed.
    Removed,
}

/// Returns `None` if the number does not fit; replicas cannot refer to such a node either.
fn from_wire(node: NodeInfo) -> Option<PeerNode> {
    Some(PeerNode {
        node: NodeId(u16::try_from(node.node).ok()?),
        name: node.name,
        peer_address: node.peer_address,
        admin_address: node.admin_address,
        failure_domain: node.failure_domain,
        epoch: Epoch(node.epoch),
        alive: node.alive,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(node: u32, epoch: u64, peer_address: &str) -> NodeInfo {
        NodeInfo {
            node,
            epoch,
            name: format!("n{node}"),
            peer_address: peer_address.to_owned(),
            alive: true,
            ..NodeInfo::default()
        }
    }

    #[test]
    fn change_of_an_older_registration_is_ignored() {
        let mut map = NodeMap::default();
        map.replace(vec![info(1, 5, "new:1")]);
        map.change(info(1, 4, "old:1"), NodeChangeKind::Updated);
        assert_eq!(map.peer_address(NodeId(1)).as_deref(), Some("new:1"));
        map.change(info(1, 6, "newest:1"), NodeChangeKind::Updated);
        assert_eq!(map.peer_address(NodeId(1)).as_deref(), Some("newest:1"));
    }

    #[test]
    fn removed_nodes_and_invalid_numbers_have_no_address() {
        let mut map = NodeMap::default();
        map.replace(vec![info(1, 1, "a:1"), info(70_000, 1, "b:1")]);
        assert_eq!(map.list().len(), 1);
        map.change(info(2, 1, ""), NodeChangeKind::Updated);
        assert_eq!(map.peer_address(NodeId(2)), None, "it has no peer transport");
        map.change(info(1, 1, "a:1"), NodeChangeKind::Removed);
        assert_eq!(map.peer_address(NodeId(1)), None);
    }

    #[test]
    fn removal_is_final_for_any_epoch_and_ignored_for_another_name() {
        let mut map = NodeMap::default();
        map.replace(vec![info(1, 5, "a:1"), info(2, 5, "b:1")]);
        map.change(info(1, 4, "a:1"), NodeChangeKind::Removed);
        assert_eq!(map.node_of("n1"), None);
        map.change(NodeInfo { name: "other".to_owned(), ..info(2, 6, "b:1") }, NodeChangeKind::Removed);
        assert_eq!(map.node_of("n2"), Some(NodeId(2)));
    }
}
