//! What is known of nodes for choosing among them: what they are for, what they have free, how busy they are, who is near,
//! and who gives blocks to whom.
//!
//! Pure: the caller has expired silent nodes, and says what time it is. Deliberately absent: the choice of a target
//! ([`reprise_policy::placement`]) and of pairs ([`crate::rebalance`]).

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_policy::placement::PlacementNode;
use reprise_policy::routing::{Domain, LoadHint, Peer, PeerTable};
use reprise_policy::{NodeId, NodeMode, Tick};

use crate::members::{MemberState, Members};
use crate::rebalance::{self, Fill, Move};

/// Who moves blocks to whom is decided so often: as often as nodes report what is in use.
pub const MOVES_EVERY: Duration = Duration::from_secs(1);

/// A node's mode and the revision of the store that set it; of two the one with the higher revision holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SetMode {
    /// The mode.
    pub mode: NodeMode,
    /// 0: never set.
    pub revision: u64,
}

/// What each node is for, by its name. Nodes that are not named are active.
#[derive(Clone, Debug, Default)]
pub struct Modes(BTreeMap<String, SetMode>);

impl Modes {
    /// What a node is for.
    pub fn of(&self, name: &str) -> SetMode {
        self.0.get(name).copied().unwrap_or_default()
    }

    /// The store says what a node is for. Returns the mode before; `None`: this is older than what is known, or the same,
    /// and changes nothing.
    pub fn set(&mut self, name: &str, set: SetMode) -> Option<NodeMode> {
        let before = self.of(name);
        if set.revision <= before.revision {
            return None;
        }
        self.0.insert(name.to_owned(), set);
        Some(before.mode)
    }
}

/// Numbers for the failure domains of one table.
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

/// Load and failure domain of all nodes, as look-ups want to know them.
pub fn peers(members: &Members) -> PeerTable {
    let mut domains = Domains::default();
    let peer = |record: &crate::NodeRecord, domain| {
        (record.node, Peer { domain, load: load(members, record.node).class() })
    };
    let table = members.iter().map(|(record, _)| {
        let domain = domains.number(&record.details.failure_domain);
        peer(record, domain)
    });
    table.collect()
}

/// The living nodes that serve others, as placement wants to know them.
pub fn placement_nodes(members: &Members, modes: &Modes) -> Vec<PlacementNode> {
    let mut domains = Domains::default();
    let mut nodes = Vec::new();
    for (record, state) in members.iter() {
        if state != MemberState::Alive || record.details.peer_address.is_empty() {
            continue;
        }
        let report = members.report_of(record.node).copied().unwrap_or_default();
        nodes.push(PlacementNode {
            node: record.node,
            mode: modes.of(&record.name).mode,
            domain: domains.number(&record.details.failure_domain),
            capacity: report.capacity.nvme,
            used: report.used.nvme.saturating_add(members.placed_on(record.node)),
            load: load(members, record.node),
        });
    }
    nodes
}

/// Bytes wanted of a node.
pub fn load(members: &Members, node: NodeId) -> LoadHint {
    LoadHint(members.report_of(node).map_or(0, |report| report.queued_bytes))
}

/// Moves between nodes, and when they were decided.
#[derive(Debug, Default)]
pub struct MovesRound {
    at: Option<Tick>,
    moves: Vec<Move>,
}

impl MovesRound {
    /// What a node is to move; decides anew, by what there is now, when the last round is over.
    pub fn move_of(
        &mut self,
        now: Tick,
        node: NodeId,
        nodes: impl FnOnce() -> Vec<PlacementNode>,
    ) -> Option<Move> {
        if self.at.is_none_or(|at| now.since(at) >= MOVES_EVERY) {
            let fill = |node: PlacementNode| Fill {
                node: node.node,
                mode: node.mode,
                capacity: node.capacity,
                used: node.used,
            };
            let fills: Vec<Fill> = nodes().into_iter().map(fill).collect();
            *self = MovesRound { at: Some(now), moves: rebalance::moves(&fills) };
        }
        self.moves.iter().find(|told| told.from == node).copied()
    }
}

#[cfg(test)]
mod tests {
    use reprise_policy::Epoch;

    use super::*;
    use crate::{Amounts, MemberSettings, NodeDetails, NodeRecord, NodeReport};

    fn members(nodes: &[(u16, u64)]) -> Members {
        let second = Duration::from_secs(1);
        let mut members = Members::new(MemberSettings { dead_after: second, forget_after: second });
        for (node, used) in nodes {
            let details = NodeDetails { peer_address: "a:1".to_owned(), ..NodeDetails::default() };
            let (number, epoch) = (NodeId(*node), Epoch(1));
            let record = NodeRecord { node: number, name: format!("n{node}"), epoch, details, revision: 1 };
            members.register(Tick(0), record).expect("the first");
            let report = NodeReport {
                capacity: Amounts::both(1000),
                used: Amounts::both(*used),
                ..NodeReport::default()
            };
            assert!(members.report(number, epoch, report));
        }
        members
    }

    #[test]
    fn of_two_modes_the_one_of_the_higher_revision_holds() {
        let mut modes = Modes::default();
        let set = |mode, revision| SetMode { mode, revision };
        assert_eq!(modes.set("a", set(NodeMode::Draining, 7)), Some(NodeMode::Active));
        assert_eq!(modes.set("a", set(NodeMode::Active, 7)), None);
        assert_eq!(modes.set("a", set(NodeMode::Cordoned, 8)), Some(NodeMode::Draining));
        assert_eq!(modes.of("a"), set(NodeMode::Cordoned, 8));
        assert_eq!(modes.of("b"), SetMode::default());
    }

    #[test]
    fn what_was_placed_on_a_node_counts_as_used_until_it_reports_and_its_mode_is_that_of_its_name() {
        let mut members = members(&[(1, 100), (2, 300)]);
        members.place(NodeId(1), 50);
        let mut modes = Modes::default();
        modes.set("n2", SetMode { mode: NodeMode::Cordoned, revision: 1 });
        let nodes = placement_nodes(&members, &modes);
        let seen: Vec<_> = nodes.iter().map(|node| (node.node.0, node.used, node.mode)).collect();
        assert_eq!(seen, [(1, 150, NodeMode::Active), (2, 300, NodeMode::Cordoned)]);
    }

    #[test]
    fn moves_are_decided_once_a_round() {
        let (mut round, modes) = (MovesRound::default(), Modes::default());
        let (full, even) = (members(&[(1, 900), (2, 100)]), members(&[(1, 500), (2, 500)]));
        let told = |round: &mut MovesRound, now, members: &Members| {
            round.move_of(Tick(now), NodeId(1), || placement_nodes(members, &modes)).map(|told| told.bytes)
        };
        assert_eq!(told(&mut round, 0, &full), Some(400));
        assert_eq!(told(&mut round, 999_999, &even), Some(400));
        assert_eq!(told(&mut round, 1_000_000, &even), None);
    }
}
