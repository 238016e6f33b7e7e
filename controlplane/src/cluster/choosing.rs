//! What is known of nodes for choosing among them: what they are for, what they have free, how busy they are, who is near.

use std::collections::BTreeMap;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use reprise_controlplane_core::rebalance::{self, Fill};
use reprise_controlplane_core::{MemberState, Members, NodeRecord};
use reprise_policy::placement::PlacementNode;
use reprise_policy::routing::{Domain, LoadHint, Peer, PeerTable};
use reprise_policy::{Epoch, NodeId, NodeMode, Tick};
use reprise_proto::controlplane::{self as wire, ReportReply};

use super::Cluster;
use crate::modes::SetMode;

/// The table for look-ups is made anew at most so often, whatever the number of reports: 1,000 nodes take 0.1 ms.
const PEERS_EVERY: Duration = Duration::from_millis(250);
/// Who moves blocks to whom is decided so often: as often as nodes report what is in use.
const MOVES_EVERY: Duration = Duration::from_secs(1);

/// What each node is for, by its name. Nodes that are not named are active.
pub(super) type Modes = BTreeMap<String, SetMode>;

/// Moves between nodes, and when they were decided.
#[derive(Debug, Default)]
pub(super) struct MovesRound {
    at: Option<Tick>,
    moves: Vec<rebalance::Move>,
}

/// The table for look-ups, and when it was made.
#[derive(Debug, Default)]
pub(super) struct PeersKept {
    made: Option<Tick>,
    table: Arc<PeerTable>,
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

impl Cluster {
    /// Load and failure domain of nodes, a quarter of a second old at the most when nodes report.
    pub fn peers(&self) -> Arc<PeerTable> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner).table.clone()
    }

    /// A node has reported: what look-ups go by is made anew, unless it was just now.
    pub(super) fn refresh_peers(&self, members: &Members) {
        let now = self.now();
        let mut kept = self.peers.write().unwrap_or_else(PoisonError::into_inner);
        if kept.made.is_some_and(|made| now.since(made) < PEERS_EVERY) {
            return;
        }
        let mut domains = Domains::default();
        let peer = |record: &NodeRecord, domain| {
            (record.node, Peer { domain, load: load(members, record.node).class() })
        };
        let table = members.iter().map(|(record, _)| {
            let domain = domains.number(&record.details.failure_domain);
            peer(record, domain)
        });
        let table = table.collect();
        *kept = PeersKept { made: Some(now), table: Arc::new(table) };
    }

    /// The living nodes that serve others, as placement wants to know them.
    pub fn placement_nodes(&self) -> Vec<PlacementNode> {
        self.expire();
        let members = self.members();
        let modes = self.modes();
        let mut domains = Domains::default();
        let mut nodes = Vec::new();
        for (record, state) in members.iter() {
            if state != MemberState::Alive || record.details.peer_address.is_empty() {
                continue;
            }
            let report = members.report_of(record.node).copied().unwrap_or_default();
            nodes.push(PlacementNode {
                node: record.node,
                mode: modes.get(&record.name).map(|set| set.mode).unwrap_or_default(),
                domain: domains.number(&record.details.failure_domain),
                capacity: report.capacity.nvme,
                used: report.used.nvme.saturating_add(members.placed_on(record.node)),
                load: load(&members, record.node),
            });
        }
        nodes
    }

    /// So many bytes were placed on nodes: they have less room until they report again.
    pub fn placed(&self, charges: impl Iterator<Item = (NodeId, u64)>) {
        let mut members = self.members();
        charges.for_each(|(node, bytes)| members.place(node, bytes));
    }

    /// Whether this is the current registration of a node.
    pub fn is_registered(&self, node: NodeId, epoch: Epoch) -> bool {
        let members = self.members();
        let known = members.get(node).filter(|(_, state)| *state != MemberState::Absent);
        known.is_some_and(|(record, _)| record.epoch == epoch)
    }

    /// Bytes wanted of a node.
    pub fn load_of(&self, node: NodeId) -> LoadHint {
        load(&self.members(), node)
    }

    /// Name and mode of a node.
    pub fn name_and_mode(&self, node: NodeId) -> Option<(String, NodeMode)> {
        let members = self.members();
        let (record, _) = members.get(node)?;
        Some((record.name.clone(), self.mode_of(&record.name).mode))
    }

    /// The names of all nodes.
    pub fn names(&self) -> Vec<String> {
        self.members().iter().map(|(record, _)| record.name.clone()).collect()
    }

    /// What a node is for, from the store; what is older than what is known changes nothing.
    pub fn set_mode(&self, name: &str, set: SetMode) {
        let members = self.members();
        let mut modes = self.modes();
        let before = modes.get(name).copied().unwrap_or_default();
        if set.revision <= before.revision {
            return;
        }
        modes.insert(name.to_owned(), set);
        drop(modes);
        if set.mode != before.mode
            && let Some((record, state)) = members.iter().find(|(record, _)| record.name == name)
        {
            tracing::info!(node = record.node.0, name, mode = ?set.mode, before = ?before.mode, "mode of a node");
            self.tell_node(&members, record, state);
        }
    }

    /// The store has a record of a node, which may have registered with another member.
    pub fn learn(&self, record: NodeRecord) {
        let mut members = self.members();
        let node = record.node;
        if members.learn(record) {
            let (record, state) = members.get(node).expect("it was just learned of");
            self.tell_node(&members, record, state);
        }
    }

    /// What a node is to be, in answer to its report.
    pub fn directions(&self, node: NodeId) -> ReportReply {
        let mut members = self.members();
        let Some((record, _)) = members.get(node) else { return ReportReply::default() };
        let set = self.mode_of(&record.name);
        members.tell_mode(node, set.revision.0);
        ReportReply {
            mode: wire_mode(set.mode).into(),
            mode_revision: set.revision.0,
            ..ReportReply::default()
        }
    }

    /// What a node is to move. For the one member that decides this.
    pub fn move_of(&self, node: NodeId) -> Option<wire::Move> {
        let mut round = self.moves.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.now();
        if round.at.is_none_or(|at| now.since(at) >= MOVES_EVERY) {
            *round = MovesRound { at: Some(now), moves: rebalance::moves(&self.fills()) };
        }
        let of_node = round.moves.iter().find(|told| told.from == node)?;
        Some(wire::Move { to: u32::from(of_node.to.0), bytes: of_node.bytes })
    }

    fn fills(&self) -> Vec<Fill> {
        let nodes = self.placement_nodes().into_iter();
        nodes
            .map(|node| Fill { node: node.node, mode: node.mode, capacity: node.capacity, used: node.used })
            .collect()
    }

    pub(super) fn modes(&self) -> MutexGuard<'_, Modes> {
        self.modes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn mode_of(&self, name: &str) -> SetMode {
        self.modes().get(name).copied().unwrap_or_default()
    }
}

fn load(members: &Members, node: NodeId) -> LoadHint {
    LoadHint(members.report_of(node).map_or(0, |report| report.queued_bytes))
}

/// A mode on the wire.
pub(crate) fn wire_mode(mode: NodeMode) -> wire::NodeMode {
    match mode {
        NodeMode::Active => wire::NodeMode::Active,
        NodeMode::Cordoned => wire::NodeMode::Cordoned,
        NodeMode::Draining => wire::NodeMode::Draining,
    }
}
