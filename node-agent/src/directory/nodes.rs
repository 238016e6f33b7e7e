//! The nodes of the cluster as the control plane last named them.

use std::collections::BTreeMap;

use reprise_policy::{Epoch, NodeId};
use reprise_proto::controlplane::NodeInfo;

/// A node of the cluster (this one too).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerNode {
    /// Its number.
    pub(crate) node: NodeId,
    /// Its name.
    pub(crate) name: String,
    /// `host:port` of its peer transport; empty when it serves nobody.
    pub(crate) peer_address: String,
    /// `host:port` of its admin endpoint.
    pub(crate) admin_address: String,
    /// Nodes of one domain fail together.
    pub(crate) failure_domain: String,
    /// Its registration.
    pub(crate) epoch: Epoch,
    /// Its heartbeats arrive.
    pub(crate) alive: bool,
}

/// Node number → node.
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

    /// Applies one change of the watch. An older registration than the known one is from the past; that a node left the list is
    /// final, whichever registration it is said of, since its number is given to no other.
    pub(super) fn change(&mut self, node: NodeInfo, presence: Presence) {
        let Some(node) = from_wire(node) else { return };
        let known = self.nodes.get(&node.node).filter(|known| known.name == node.name);
        match presence {
            Presence::Here if known.is_some_and(|known| known.epoch > node.epoch) => {}
            Presence::Here => drop(self.nodes.insert(node.node, node)),
            Presence::Removed if known.is_some() => drop(self.nodes.remove(&node.node)),
            Presence::Removed => {}
        }
    }
}

/// Whether a change names a node or takes it off the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    /// It is (still) on the list.
    Here,
    /// It left the list.
    Removed,
}

/// `None` when the number does not fit: such a node cannot be named in a replica either.
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
    fn a_change_from_an_older_registration_does_not_undo_a_newer_one() {
        let mut map = NodeMap::default();
        map.replace(vec![info(1, 5, "new:1")]);
        map.change(info(1, 4, "old:1"), Presence::Here);
        assert_eq!(map.peer_address(NodeId(1)).as_deref(), Some("new:1"));
        map.change(info(1, 6, "newest:1"), Presence::Here);
        assert_eq!(map.peer_address(NodeId(1)).as_deref(), Some("newest:1"));
    }

    #[test]
    fn a_removed_node_and_one_with_an_impossible_number_have_no_address() {
        let mut map = NodeMap::default();
        map.replace(vec![info(1, 1, "a:1"), info(70_000, 1, "b:1")]);
        assert_eq!(map.list().len(), 1);
        map.change(info(2, 1, ""), Presence::Here);
        assert_eq!(map.peer_address(NodeId(2)), None, "it serves nobody");
        map.change(info(1, 1, "a:1"), Presence::Removed);
        assert_eq!(map.peer_address(NodeId(1)), None);
    }

    #[test]
    fn a_removal_is_final_whichever_registration_it_names_and_of_another_name_is_none() {
        let mut map = NodeMap::default();
        map.replace(vec![info(1, 5, "a:1"), info(2, 5, "b:1")]);
        map.change(info(1, 4, "a:1"), Presence::Removed);
        assert_eq!(map.node_of("n1"), None);
        map.change(NodeInfo { name: "other".to_owned(), ..info(2, 6, "b:1") }, Presence::Removed);
        assert_eq!(map.node_of("n2"), Some(NodeId(2)));
    }
}
