//! The nodes of the cluster as last reported by the control plane, and which of them this node can reach.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use reprise_policy::peer::{PeerEndpoint, TCP};
use reprise_policy::{Epoch, NodeId, TenantName};
use reprise_proto::controlplane::NodeInfo;

/// A node of the cluster, possibly this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PeerNode {
    /// Number of the node.
    pub(crate) node: NodeId,
    /// Name of the node.
    pub(crate) name: String,
    /// Endpoints of its peer transport, one for each protocol; none without a peer transport.
    pub(crate) peer_endpoints: Arc<[PeerEndpoint]>,
    /// `host:port` of its admin port.
    pub(crate) admin_address: String,
    /// Failure domain: its nodes fail together.
    pub(crate) failure_domain: String,
    /// Epoch of its registration.
    pub(crate) epoch: Epoch,
    /// Whether its heartbeats arrive.
    pub(crate) alive: bool,
    /// Tenants that it acts for; `None` if the member has no report of it.
    tenants: Option<Arc<BTreeSet<TenantName>>>,
}

/// All nodes by number.
#[derive(Debug)]
pub(super) struct NodeMap {
    nodes: BTreeMap<NodeId, PeerNode>,
    /// Protocols of this node.
    protocols: BTreeSet<String>,
    /// Nodes that have no protocol in common with this one, each logged once.
    incompatible: BTreeSet<NodeId>,
}

impl NodeMap {
    /// Returns an empty list for a node with these endpoints.
    pub(super) fn new(own: &[PeerEndpoint]) -> NodeMap {
        let protocols = own.iter().map(|endpoint| endpoint.protocol.clone()).collect();
        NodeMap { nodes: BTreeMap::new(), protocols, incompatible: BTreeSet::new() }
    }

    /// Returns the endpoints of a node; `None` for a node that this one cannot reach. Addresses of TCP name the node, so
    /// that no other agent can take its place.
    pub(super) fn peer_endpoints(&self, node: NodeId) -> Option<Arc<[PeerEndpoint]>> {
        let node = self.nodes.get(&node).filter(|node| self.has_common_protocol(node))?;
        let named = |endpoint: &PeerEndpoint| match endpoint.protocol.as_str() {
            TCP => PeerEndpoint::tcp(format!("{}@{}", node.name, endpoint.address)),
            _ => endpoint.clone(),
        };
        Some(node.peer_endpoints.iter().map(named).collect())
    }

    /// Returns whether this node can reach another one.
    pub(super) fn is_reachable(&self, node: NodeId) -> bool {
        self.nodes.get(&node).is_some_and(|node| self.has_common_protocol(node))
    }

    fn has_common_protocol(&self, node: &PeerNode) -> bool {
        node.peer_endpoints.iter().any(|endpoint| self.protocols.contains(&endpoint.protocol))
    }

    /// Logs once that a node and this one cannot exchange blocks.
    fn check_protocols(&mut self, number: NodeId) {
        let Some(node) = self.nodes.get(&number) else { return };
        let is_incompatible = !node.peer_endpoints.is_empty() && !self.has_common_protocol(node);
        if !is_incompatible || self.protocols.is_empty() {
            self.incompatible.remove(&number);
            return;
        }
        let theirs =
            node.peer_endpoints.iter().map(|endpoint| endpoint.protocol.as_str()).collect::<Vec<_>>();
        let own = self.protocols.iter().map(String::as_str).collect::<Vec<_>>();
        if self.incompatible.insert(number) {
            tracing::warn!(
                node = number.0,
                name = node.name,
                theirs = theirs.join(", "),
                own = own.join(", "),
                "no peer protocol in common with a node: its blocks count as missing. Run releases with a common protocol"
            );
        }
    }

    /// Reports whether a node acts for a tenant, according to the control plane.
    pub(super) fn acts_for(&self, name: &str, tenant: &TenantName) -> bool {
        let node = self.nodes.values().find(|node| node.name == name);
        node.and_then(|node| node.tenants.as_ref()).is_some_and(|tenants| tenants.contains(tenant))
    }

    pub(super) fn node_of(&self, name: &str) -> Option<NodeId> {
        self.nodes.values().find(|node| node.name == name).map(|node| node.node)
    }

    pub(super) fn list(&self) -> Vec<PeerNode> {
        self.nodes.values().cloned().collect()
    }

    /// A member that has no report of the node yet does not change the tenants that are known.
    fn with_known_tenants(&self, mut node: PeerNode) -> PeerNode {
        let known = self.nodes.get(&node.node).filter(|known| known.name == node.name);
        node.tenants = node.tenants.or_else(|| known?.tenants.clone());
        node
    }

    /// Replaces the whole list.
    pub(super) fn replace(&mut self, nodes: Vec<NodeInfo>) {
        let listed =
            nodes.into_iter().filter_map(from_wire).map(|node| (node.node, self.with_known_tenants(node)));
        self.nodes = listed.collect();
        for node in self.nodes.keys().copied().collect::<Vec<_>>() {
            self.check_protocols(node);
        }
    }

    /// Applies a change from the watch. A change with an older epoch than the known one is ignored, except
    /// for a removal: it is final for any epoch, since node numbers are not reused.
    pub(super) fn change(&mut self, node: NodeInfo, kind: NodeChangeKind) {
        let Some(node) = from_wire(node) else { return };
        let number = node.node;
        let known = self.nodes.get(&node.node).filter(|known| known.name == node.name);
        match kind {
            NodeChangeKind::Updated if known.is_some_and(|known| known.epoch > node.epoch) => {}
            NodeChangeKind::Updated => {
                let node = self.with_known_tenants(node);
                self.nodes.insert(node.node, node);
            }
            NodeChangeKind::Removed if known.is_some() => drop(self.nodes.remove(&node.node)),
            NodeChangeKind::Removed => {}
        }
        self.check_protocols(number);
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
        peer_endpoints: node
            .peer_endpoints
            .into_iter()
            .map(|endpoint| PeerEndpoint { protocol: endpoint.protocol, address: endpoint.address })
            .collect(),
        admin_address: node.admin_address,
        failure_domain: node.failure_domain,
        epoch: Epoch(node.epoch),
        alive: node.alive,
        // A member checks the names of reports.
        tenants: node
            .tenants
            .map(|tenants| Arc::new(tenants.names.iter().filter_map(|name| name.parse().ok()).collect())),
    })
}

#[cfg(test)]
mod tests {
    use reprise_proto::controlplane::PeerEndpoint as WireEndpoint;

    use super::*;

    fn map() -> NodeMap {
        NodeMap::new(&[PeerEndpoint::tcp("own:1")])
    }

    fn address(map: &NodeMap, node: u16) -> Option<String> {
        Some(map.peer_endpoints(NodeId(node))?[0].address.clone())
    }

    fn info(node: u32, epoch: u64, address: &str) -> NodeInfo {
        NodeInfo {
            node,
            epoch,
            name: format!("n{node}"),
            peer_endpoints: vec![WireEndpoint::tcp(address)],
            alive: true,
            ..NodeInfo::default()
        }
    }

    #[test]
    fn change_of_an_older_registration_is_ignored() {
        let mut map = map();
        map.replace(vec![info(1, 5, "new:1")]);
        map.change(info(1, 4, "old:1"), NodeChangeKind::Updated);
        assert_eq!(address(&map, 1).as_deref(), Some("n1@new:1"));
        map.change(info(1, 6, "newest:1"), NodeChangeKind::Updated);
        assert_eq!(address(&map, 1).as_deref(), Some("n1@newest:1"));
    }

    #[test]
    fn removed_nodes_and_invalid_numbers_have_no_address() {
        let mut map = map();
        map.replace(vec![info(1, 1, "a:1"), info(70_000, 1, "b:1")]);
        assert_eq!(map.list().len(), 1);
        map.change(NodeInfo { peer_endpoints: Vec::new(), ..info(2, 1, "") }, NodeChangeKind::Updated);
        assert_eq!(address(&map, 2), None, "it has no peer transport");
        map.change(info(1, 1, "a:1"), NodeChangeKind::Removed);
        assert_eq!(address(&map, 1), None);
    }

    #[test]
    fn removal_is_final_for_any_epoch_and_ignored_for_another_name() {
        let mut map = map();
        map.replace(vec![info(1, 5, "a:1"), info(2, 5, "b:1")]);
        map.change(info(1, 4, "a:1"), NodeChangeKind::Removed);
        assert_eq!(map.node_of("n1"), None);
        map.change(NodeInfo { name: "other".to_owned(), ..info(2, 6, "b:1") }, NodeChangeKind::Removed);
        assert_eq!(map.node_of("n2"), Some(NodeId(2)));
    }

    #[test]
    fn node_is_reachable_if_it_has_a_protocol_in_common() {
        let at =
            |protocol: &str| WireEndpoint { protocol: protocol.to_owned(), address: format!("{protocol}!x") };
        let node = |number, protocols: &[&str]| NodeInfo {
            peer_endpoints: protocols.iter().map(|protocol| at(protocol)).collect(),
            ..info(number, 1, "")
        };
        let mut map = map();
        map.replace(vec![node(1, &["rdma-2", "tcp"]), node(2, &["rdma-2"]), node(3, &[])]);
        let reachable = |map: &NodeMap| [1, 2, 3].map(|number| map.is_reachable(NodeId(number)));
        assert_eq!(reachable(&map), [true, false, false]);
        assert_eq!(map.peer_endpoints(NodeId(1)).expect("reachable").len(), 2, "unknown ones are kept");
        assert_eq!(map.peer_endpoints(NodeId(2)), None);
        assert_eq!(map.incompatible, BTreeSet::from([NodeId(2)]), "a node without endpoints serves no peers");
        map.change(node(2, &["tcp"]), NodeChangeKind::Updated);
        map.change(node(3, &["shm"]), NodeChangeKind::Updated);
        assert_eq!(reachable(&map), [true, true, false]);
        assert_eq!(map.incompatible, BTreeSet::from([NodeId(3)]));
        let mut alone = NodeMap::new(&[]);
        alone.replace(vec![node(1, &["tcp"])]);
        assert!(!alone.is_reachable(NodeId(1)) && alone.incompatible.is_empty(), "it has no peer transport");
    }
}
