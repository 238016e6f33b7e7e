//! What is known of nodes for choosing among them: what they are for, what they have free, how busy they are, who is near.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use reprise_controlplane_core::{Members, Modes, SetMode, choosing};
use reprise_policy::placement::PlacementNode;
use reprise_policy::routing::{LoadHint, PeerTable};
use reprise_policy::{Epoch, NodeId, NodeMode, Tick};
use reprise_proto::controlplane::{self as wire, ReportReply};

use super::Cluster;

/// The table for look-ups is made anew at most so often, whatever the number of reports: 1,000 nodes take 0.1 ms.
const PEERS_EVERY: Duration = Duration::from_millis(250);

/// The table for look-ups, and when it was made.
#[derive(Debug, Default)]
pub(super) struct PeersKept {
    made: Option<Tick>,
    table: Arc<PeerTable>,
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
        *kept = PeersKept { made: Some(now), table: Arc::new(choosing::peers(members)) };
    }

    /// The living nodes that serve others, as placement wants to know them.
    pub fn placement_nodes(&self) -> Vec<PlacementNode> {
        self.expire();
        let members = self.members();
        let modes = self.modes();
        choosing::placement_nodes(&members, &modes)
    }

    /// So many bytes were placed on nodes: they have less room until they report again.
    pub fn placed(&self, charges: impl Iterator<Item = (NodeId, u64)>) {
        let mut members = self.members();
        charges.for_each(|(node, bytes)| members.place(node, bytes));
    }

    /// Whether this is the current registration of a node.
    pub fn is_registered(&self, node: NodeId, epoch: Epoch) -> bool {
        self.members().is_registered(node, epoch)
    }

    /// Bytes wanted of a node.
    pub fn load_of(&self, node: NodeId) -> LoadHint {
        choosing::load(&self.members(), node)
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
        let Some(before) = self.modes().set(name, set) else { return };
        if set.mode != before
            && let Some((record, state)) = members.iter().find(|(record, _)| record.name == name)
        {
            tracing::info!(node = record.node.0, name, mode = ?set.mode, ?before, "mode of a node");
            self.tell_node(&members, record, state);
        }
    }

    /// What a node is to be, in answer to its report.
    pub fn directions(&self, node: NodeId) -> ReportReply {
        let mut members = self.members();
        let Some((record, _)) = members.get(node) else { return ReportReply::default() };
        let set = self.mode_of(&record.name);
        members.tell_mode(node, set.revision);
        ReportReply {
            mode: wire_mode(set.mode).into(),
            mode_revision: set.revision,
            ..ReportReply::default()
        }
    }

    /// What a node is to move. For the one member that decides this.
    pub fn move_of(&self, node: NodeId) -> Option<wire::Move> {
        let mut round = self.moves.lock().unwrap_or_else(PoisonError::into_inner);
        let told = round.move_of(self.now(), node, || self.placement_nodes())?;
        Some(wire::Move { to: u32::from(told.to.0), bytes: told.bytes })
    }

    pub(super) fn modes(&self) -> MutexGuard<'_, Modes> {
        self.modes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn mode_of(&self, name: &str) -> SetMode {
        self.modes().of(name)
    }
}

/// A mode on the wire.
pub(crate) fn wire_mode(mode: NodeMode) -> wire::NodeMode {
    match mode {
        NodeMode::Active => wire::NodeMode::Active,
        NodeMode::Cordoned => wire::NodeMode::Cordoned,
        NodeMode::Draining => wire::NodeMode::Draining,
    }
}
