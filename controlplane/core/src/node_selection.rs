//! Inputs for choosing among nodes: mode, free space, load and failure domain; and the moves between nodes.
//!
//! Pure: the caller expires silent nodes and passes the time. The choice of a target is in
//! [`reprise_policy::placement`], the pairing of nodes for moves in [`crate::rebalance`].

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_policy::placement::PlacementNode;
use reprise_policy::routing::{Domain, LoadHint, Peer, PeerTable};
use reprise_policy::{NodeId, NodeMode, Tick};

use crate::node_table::{NodeLiveness, NodeTable};
use crate::rebalance::{self, Move, PoolFill};

/// Interval at which moves are decided, equal to the interval of node reports.
pub const MOVE_INTERVAL: Duration = Duration::from_secs(1);

/// A node's mode with its store revision; higher revisions replace lower ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModeRecord {
    /// Mode of the node.
    pub mode: NodeMode,
    /// Store revision of the mode; 0 if never set.
    pub revision: u64,
}

/// Modes by node name; nodes without a record are active.
#[derive(Clone, Debug, Default)]
pub struct Modes(BTreeMap<String, ModeRecord>);

impl Modes {
    /// Mode of a node.
    pub fn of(&self, name: &str) -> ModeRecord {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// Applies a mode from the store. Returns the previous mode, or `None` if the revision is not newer.
    pub fn set(&mut self, name: &str, set: ModeRecord) -> Option<NodeMode> {
        let before = self.of(name);
        if set.revision <= before.revision {
            return None;
        }
        self.0.insert(name.to_owned(), set);
        Some(before.mode)
    }
}

/// Numbers assigned to the failure domains of one table.
#[derive(Debug, Default)]
struct Domains<'a>(BTreeMap<&'a str, Domain>);

impl<'a> Domains<'a> {
    fn number(&mut self, name: &'a str) -> Domain {
        if name.is_empty() {
            return Domain::default();
        }
        let next = Domain(u16::try_from(self.0.len() + 1).expect("fewer domains than nodes"));
        *self.0.entry(name).or_insert(next)
    }
}

/// Load and failure domain of all nodes, for lookups.
pub fn peers(table: &NodeTable) -> PeerTable {
    let mut domains = Domains::default();
    let peer = |record: &crate::NodeRecord, domain| {
        (record.node, Peer { domain, load: load(table, record.node).class() })
    };
    let peers = table.iter().map(|(record, _)| {
        let domain = domains.number(&record.details.failure_domain);
        peer(record, domain)
    });
    peers.collect()
}

/// Live nodes that serve peers, as input for placement.
pub fn placement_nodes(table: &NodeTable, modes: &Modes) -> Vec<PlacementNode> {
    let mut domains = Domains::default();
    let mut nodes = Vec::new();
    for (record, state) in table.iter() {
        if state != NodeLiveness::Alive || record.details.peer_endpoints.is_empty() {
            continue;
        }
        let report = table.report_of(record.node).copied().unwrap_or_default();
        nodes.push(PlacementNode {
            node: record.node,
            mode: modes.of(&record.name).mode,
            domain: domains.number(&record.details.failure_domain),
            capacity: report.capacity.nvme,
            used: report.used.nvme.saturating_add(table.placed_on(record.node)),
            load: load(table, record.node),
        });
    }
    nodes
}

/// Returns the mode for the answer to a node's report, and records that it was sent; `None` for an unknown node.
pub fn send_mode(table: &mut NodeTable, modes: &Modes, node: NodeId) -> Option<ModeRecord> {
    let set = modes.of(&table.get(node)?.0.name);
    table.record_sent_mode(node, set.revision);
    Some(set)
}

/// Bytes queued on a node, as a load hint.
pub fn load(table: &NodeTable, node: NodeId) -> LoadHint {
    LoadHint(table.report_of(node).map_or(0, |report| report.queued_bytes))
}

/// Current moves between nodes, and when they were decided.
#[derive(Debug, Default)]
pub struct RebalanceRound {
    at: Option<Tick>,
    moves: Vec<Move>,
}

impl RebalanceRound {
    /// The move that a node should make. Decides all moves again after [`MOVE_INTERVAL`].
    pub fn move_for(
        &mut self,
        now: Tick,
        node: NodeId,
        nodes: impl FnOnce() -> Vec<PlacementNode>,
    ) -> Option<Move> {
        if self.at.is_none_or(|at| now.since(at) >= MOVE_INTERVAL) {
            let fill = |node: PlacementNode| PoolFill {
                node: node.node,
                mode: node.mode,
                capacity: node.capacity,
                used: node.used,
            };
            let fills: Vec<PoolFill> = nodes().into_iter().map(fill).collect();
            *self = RebalanceRound { at: Some(now), moves: rebalance::moves(&fills) };
        }
        self.moves.iter().find(|planned| planned.from == node).copied()
    }
}

#[cfg(test)]
mod tests {
    use reprise_policy::peer::PeerEndpoint;
    use reprise_policy::{Amounts, Epoch};

    use super::*;
    use crate::{LivenessSettings, NodeDetails, NodeRecord, NodeReport};

    fn table(nodes: &[(u16, u64)]) -> NodeTable {
        let second = Duration::from_secs(1);
        let mut table = NodeTable::new(LivenessSettings { dead_after: second, forget_after: second });
        for (node, used) in nodes {
            let details =
                NodeDetails { peer_endpoints: vec![PeerEndpoint::tcp("a:1")], ..NodeDetails::default() };
            let (number, epoch) = (NodeId(*node), Epoch(1));
            let record = NodeRecord { node: number, name: format!("n{node}"), epoch, details, revision: 1 };
            table.register(Tick(0), record).expect("the first");
            let report = NodeReport {
                capacity: Amounts::both(1000),
                used: Amounts::both(*used),
                ..NodeReport::default()
            };
            assert!(table.report(number, epoch, report));
        }
        table
    }

    #[test]
    fn the_mode_with_the_higher_revision_wins() {
        let mut modes = Modes::default();
        let set = |mode, revision| ModeRecord { mode, revision };
        assert_eq!(modes.set("a", set(NodeMode::Draining, 7)), Some(NodeMode::Active));
        assert_eq!(modes.set("a", set(NodeMode::Active, 7)), None);
        assert_eq!(modes.set("a", set(NodeMode::Cordoned, 8)), Some(NodeMode::Draining));
        assert_eq!(modes.of("a"), set(NodeMode::Cordoned, 8));
        assert_eq!(modes.of("b"), ModeRecord::default());
    }

    #[test]
    fn placed_bytes_count_as_used_until_the_next_report() {
        let mut table = table(&[(1, 100), (2, 300)]);
        table.place(NodeId(1), 50);
        let mut modes = Modes::default();
        modes.set("n2", ModeRecord { mode: NodeMode::Cordoned, revision: 1 });
        let nodes = placement_nodes(&table, &modes);
        let seen: Vec<_> = nodes.iter().map(|node| (node.node.0, node.used, node.mode)).collect();
        assert_eq!(seen, [(1, 150, NodeMode::Active), (2, 300, NodeMode::Cordoned)]);
    }

    #[test]
    fn decides_moves_once_per_interval() {
        let (mut round, modes) = (RebalanceRound::default(), Modes::default());
        let (full, even) = (table(&[(1, 900), (2, 100)]), table(&[(1, 500), (2, 500)]));
        let planned = |round: &mut RebalanceRound, now, table: &NodeTable| {
            round
                .move_for(Tick(now), NodeId(1), || placement_nodes(table, &modes))
                .map(|planned| planned.bytes)
        };
        assert_eq!(planned(&mut round, 0, &full), Some(400));
        assert_eq!(planned(&mut round, 999_999, &even), Some(400));
        assert_eq!(planned(&mut round, 1_000_000, &even), None);
    }
}
