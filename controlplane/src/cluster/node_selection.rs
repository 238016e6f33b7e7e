//! Node state for placement and lookups: mode, free space, load and failure domain.

use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use reprise_controlplane_core::{ModeRecord, Modes, NodeTable, RebalanceRound, RecordUpdate, node_selection};
use reprise_policy::routing::{LoadHint, PeerTable};
use reprise_policy::{NodeId, NodeMode, Tick};
use reprise_proto::controlplane as wire;

use super::Cluster;

/// Minimum interval between rebuilds of the peer table, which takes 0.1 ms for 1,000 nodes.
const PEERS_EVERY: Duration = Duration::from_millis(250);

/// The peer table for lookups, and when it was built.
#[derive(Debug, Default)]
pub(super) struct CachedPeers {
    made: Option<Tick>,
    table: Arc<PeerTable>,
}

impl Cluster {
    /// Load and failure domain of each node, at most 250 ms old while nodes report.
    pub fn peers(&self) -> Arc<PeerTable> {
        self.peers.read().unwrap_or_else(PoisonError::into_inner).table.clone()
    }

    /// Rebuilds the peer table after a report, unless it was rebuilt within the last 250 ms.
    pub(super) fn refresh_peers(&self, table: &NodeTable) {
        let now = self.now();
        let mut cached = self.peers.write().unwrap_or_else(PoisonError::into_inner);
        if cached.made.is_some_and(|made| now.since(made) < PEERS_EVERY) {
            return;
        }
        *cached = CachedPeers { made: Some(now), table: Arc::new(node_selection::peers(table)) };
    }

    /// Locks the node table and the modes.
    pub(crate) fn nodes_and_modes<R>(&self, act: impl FnOnce(&mut NodeTable, &Modes) -> R) -> R {
        let mut table = self.table();
        let modes = self.modes();
        act(&mut table, &modes)
    }

    /// Bytes queued on a node, as a load hint.
    pub fn load_of(&self, node: NodeId) -> LoadHint {
        node_selection::load(&self.table(), node)
    }

    /// Name and mode of a node.
    pub fn name_and_mode(&self, node: NodeId) -> Option<(String, NodeMode)> {
        let table = self.table();
        let (record, _) = table.get(node)?;
        Some((record.name.clone(), self.mode_of(&record.name).mode))
    }

    /// Name of a node.
    pub fn name_of(&self, node: NodeId) -> Option<String> {
        self.table().get(node).map(|(record, _)| record.name.clone())
    }

    /// Names of all nodes.
    pub fn names(&self) -> Vec<String> {
        self.table().iter().map(|(record, _)| record.name.clone()).collect()
    }

    /// Applies a mode from the store, unless a newer one is known.
    pub fn set_mode(&self, name: &str, set: ModeRecord) {
        let table = self.table();
        let Some(before) = self.modes().set(name, set) else { return };
        if set.mode != before
            && let Some((record, state)) = table.iter().find(|(record, _)| record.name == name)
        {
            tracing::info!(node = record.node.0, name, mode = ?set.mode, ?before, "node mode changed");
            self.notify_node_changed(&table, record, state);
        }
    }

    /// Applies modes from the store. A mode is never deleted.
    pub fn apply_modes(&self, update: RecordUpdate<String, ModeRecord>) {
        for (name, set) in update.written() {
            self.set_mode(&name, set);
        }
    }

    /// Locks the moves that were decided last. Taken before the node table's lock.
    pub(crate) fn moves(&self) -> MutexGuard<'_, RebalanceRound> {
        self.moves.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn modes(&self) -> MutexGuard<'_, Modes> {
        self.modes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn mode_of(&self, name: &str) -> ModeRecord {
        self.modes().of(name)
    }
}

/// Converts a mode to its wire form.
pub(crate) fn wire_mode(mode: NodeMode) -> wire::NodeMode {
    match mode {
        NodeMode::Active => wire::NodeMode::Active,
        NodeMode::Cordoned => wire::NodeMode::Cordoned,
        NodeMode::Draining => wire::NodeMode::Draining,
    }
}
