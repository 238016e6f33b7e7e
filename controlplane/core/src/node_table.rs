//! The nodes of the cluster: records, current registrations and liveness by heartbeats.
//!
//! ```text
//!            register                  no heartbeat for dead_after      no heartbeat for forget_after
//!   Absent ───────────► Alive ─────────────────────────────► Dead ─────────────────────────────────► Absent
//!                        ▲  ▲                                 │
//!                        │  └─────────── heartbeat ───────────┘
//!                        └── register, from any state, with a newer epoch
//! ```
//!
//! * `Alive` nodes are offered to others ([`NodeTable::live`]). `Dead` nodes are not, but keep their
//!   registration and their inventory in the directory. So a pause or a broken link requires no new
//!   inventory.
//! * A node without a peer endpoint is never offered, but can be alive and look up replicas.
//! * Heartbeats and registrations of older epochs have no effect.
//! * `Absent` nodes are known by name and number (from the store) and must register.
//! * A node registers with every member, each time under a higher epoch. A store record of a registration
//!   with another member ([`NodeTable::learn`]) updates the node's addresses. It proves neither liveness nor
//!   a registration here; only the node's own heartbeats and registrations do.
//! * A node whose record was deleted from the store ([`NodeTable::apply_deletion`],
//!   [`NodeTable::retain_listed`]) is removed in any state. Its number is never reused, so messages with it
//!   are rejected. A registration committed before the deletion may arrive later. It is recognized by its
//!   record's revision: all records up to the revision set by [`NodeTable::set_followed_revision`] are known.
//!
//! Heartbeats are O(1). [`NodeTable::expire`] is O(1) before the next deadline, and O(nodes) at a deadline.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use reprise_policy::peer::PeerEndpoint;
use reprise_policy::{DrainProgress, Epoch, NodeId, TenantName, Tick};

use crate::ledgers::{KnownNode, Presence};
use crate::live_nodes::LiveNodes;
use crate::node_report::NodeReport;

/// Time limits for heartbeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LivenessSettings {
    /// Silence after which a node is dead and no longer offered.
    pub dead_after: Duration,
    /// Silence after which a node must register again; at least `dead_after`.
    pub forget_after: Duration,
}

/// Properties of a node that are constant during a registration. Reports contain the others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeDetails {
    /// Endpoints of the peer transport, one for each protocol; none if the node serves no peers.
    pub peer_endpoints: Vec<PeerEndpoint>,
    /// `host:port` of the admin endpoint.
    pub admin_address: String,
    /// Failure domain, whose nodes may fail together.
    pub failure_domain: String,
    /// Version of the agent.
    pub version: String,
}

/// A node as stored in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRecord {
    /// Permanent number of the node.
    pub node: NodeId,
    /// Unique name of the node.
    pub name: String,
    /// Epoch of the newest registration.
    pub epoch: Epoch,
    /// Details sent with that registration.
    pub details: NodeDetails,
    /// Store revision of this record.
    pub revision: u64,
}

/// Liveness of a node; see the diagram in the module documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NodeLiveness {
    /// Heartbeats arrive in time.
    Alive,
    /// No heartbeat for `dead_after`.
    Dead,
    /// Not registered here; must register.
    Absent,
}

/// Result of a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeartbeatResult {
    /// The node is registered and alive.
    Known,
    /// The node was dead and is offered again.
    Returned,
    /// Not the current registration: the node must register.
    Unknown,
}

/// A change caused by missing heartbeats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LivenessEvent {
    /// Dead: no longer offered to others.
    Died(NodeId),
    /// The registration has ended; the directory may drop its inventory.
    Forgotten(NodeId, Epoch),
}

/// Reasons to reject a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegistrationError {
    /// The node has a newer registration.
    #[error("registration {offered:?} of node {node} is older than {current:?}")]
    Stale {
        /// Node of the registration.
        node: NodeId,
        /// Rejected epoch.
        offered: Epoch,
        /// Current epoch.
        current: Epoch,
    },
    /// The node's record was deleted from the store.
    #[error("node {0} was forgotten while it registered: register again")]
    Forgotten(NodeId),
}

/// The nodes of the cluster.
#[derive(Debug)]
pub struct NodeTable {
    settings: LivenessSettings,
    nodes: BTreeMap<NodeId, NodeEntry>,
    /// Live nodes to offer. Copied on write, because lookups keep the set that they started with.
    live: Arc<LiveNodes>,
    /// Lower bound of the next deadline; heartbeats only postpone deadlines.
    next_change: Option<Tick>,
    /// Store revision up to which all records are known.
    followed: Option<u64>,
}

#[derive(Debug)]
struct NodeEntry {
    record: NodeRecord,
    /// Newest registration granted by this member, or in the store at its start.
    fence: Epoch,
    /// Registration that `record.details` belong to.
    details_of: Epoch,
    state: NodeLiveness,
    /// Time of the last heartbeat or registration; unused while absent.
    last_heartbeat: Tick,
    /// Last report in the current registration.
    report: Option<NodeReport>,
    /// Tenants of the last report.
    tenants: Option<Arc<BTreeSet<TenantName>>>,
    /// Bytes placed on the node since its last report.
    placed: u64,
    /// Revision of the mode last sent to the node, and of the mode it knew at its last report.
    sent_mode: u64,
    reported_mode: u64,
}

impl NodeTable {
    /// Creates an empty table.
    pub fn new(settings: LivenessSettings) -> NodeTable {
        NodeTable {
            settings,
            nodes: BTreeMap::new(),
            live: Arc::default(),
            next_change: None,
            followed: None,
        }
    }

    /// Adds a node from the store as absent.
    pub fn restore(&mut self, record: NodeRecord) {
        let fence = record.epoch;
        self.nodes.insert(record.node, NodeEntry::new(record, fence, (NodeLiveness::Absent, Tick(0))));
    }

    /// Applies a store record, of a registration with any member. Returns whether details changed.
    pub fn learn(&mut self, record: NodeRecord) -> bool {
        if self.is_gone(&record) {
            return false;
        }
        let Some(known) = self.nodes.get_mut(&record.node) else {
            self.nodes.insert(record.node, NodeEntry::new(record, Epoch(0), (NodeLiveness::Absent, Tick(0))));
            return true;
        };
        known.record.revision = known.record.revision.max(record.revision);
        if known.details_of >= record.epoch {
            return false;
        }
        known.details_of = record.epoch;
        let changed = known.record.details != record.details;
        known.record.details = record.details;
        if known.state == NodeLiveness::Absent {
            known.record.epoch = record.epoch;
        } else if known.state == NodeLiveness::Alive && changed {
            known.offer(&mut self.live);
        }
        changed
    }

    /// Registers a node; it is alive from now on.
    ///
    /// # Errors
    /// A newer registration was applied first, or the node was forgotten.
    pub fn register(&mut self, now: Tick, mut record: NodeRecord) -> Result<(), RegistrationError> {
        let (node, offered) = (record.node, record.epoch);
        if self.is_gone(&record) {
            return Err(RegistrationError::Forgotten(node));
        }
        if let Some(known) = self.nodes.get(&node) {
            if known.fence >= offered {
                return Err(RegistrationError::Stale { node, offered, current: known.fence });
            }
            record.revision = record.revision.max(known.record.revision);
        }
        let entry = NodeEntry::new(record, offered, (NodeLiveness::Alive, now));
        entry.offer(&mut self.live);
        self.nodes.insert(node, entry);
        self.expect_change(now.after(self.settings.dead_after));
        Ok(())
    }

    /// Removes the node whose record of this name was deleted at `revision`; returns it. A later registration
    /// under the name is another node and stays.
    pub fn apply_deletion(&mut self, name: &str, revision: u64) -> Vec<NodeRecord> {
        self.remove(|record| record.name == name && record.revision < revision)
    }

    /// Removes nodes that are not in a listing of the store at `revision`; returns them. Later registrations
    /// stay.
    pub fn retain_listed(
        &mut self,
        is_there: impl Fn(&NodeRecord) -> bool,
        revision: u64,
    ) -> Vec<NodeRecord> {
        self.remove(|record| record.revision <= revision && !is_there(record))
    }

    /// Records that all store records and deletions up to this revision were applied.
    pub fn set_followed_revision(&mut self, revision: u64) {
        self.followed = self.followed.max(Some(revision));
    }

    fn remove(&mut self, is_gone: impl Fn(&NodeRecord) -> bool) -> Vec<NodeRecord> {
        let records = self.nodes.values().map(|entry| &entry.record);
        let gone: Vec<NodeRecord> = records.filter(|record| is_gone(record)).cloned().collect();
        for NodeRecord { node, .. } in &gone {
            self.nodes.remove(node);
            Arc::make_mut(&mut self.live).remove(*node);
        }
        gone
    }

    /// Whether a record was deleted after it was read.
    fn is_gone(&self, record: &NodeRecord) -> bool {
        let is_known = self.followed.is_some_and(|followed| record.revision <= followed);
        is_known && !self.nodes.contains_key(&record.node)
    }

    /// Applies a heartbeat of a registration.
    pub fn heartbeat(&mut self, now: Tick, node: NodeId, epoch: Epoch) -> HeartbeatResult {
        let Some(entry) = self.nodes.get_mut(&node).filter(|entry| entry.record.epoch == epoch) else {
            return HeartbeatResult::Unknown;
        };
        match entry.state {
            NodeLiveness::Absent => HeartbeatResult::Unknown,
            NodeLiveness::Alive => {
                entry.last_heartbeat = now;
                HeartbeatResult::Known
            }
            NodeLiveness::Dead => {
                (entry.state, entry.last_heartbeat) = (NodeLiveness::Alive, now);
                entry.offer(&mut self.live);
                self.expect_change(now.after(self.settings.dead_after));
                HeartbeatResult::Returned
            }
        }
    }

    /// Stores a node's report; `false` if it is not of the current registration. Does not count as a
    /// heartbeat.
    pub fn report(&mut self, node: NodeId, epoch: Epoch, report: NodeReport) -> bool {
        let entry = self.nodes.get_mut(&node).filter(|entry| entry.record.epoch == epoch);
        let Some(entry) = entry.filter(|entry| entry.state != NodeLiveness::Absent) else { return false };
        (entry.report, entry.placed, entry.reported_mode) = (Some(report), 0, entry.sent_mode);
        true
    }

    /// Stores the tenants that a node acts for; returns whether they have changed. Does nothing if the report is not of
    /// the current registration.
    pub fn set_tenants(&mut self, node: NodeId, epoch: Epoch, tenants: BTreeSet<TenantName>) -> bool {
        let entry = self.nodes.get_mut(&node).filter(|entry| entry.record.epoch == epoch);
        let Some(entry) = entry.filter(|entry| entry.tenants.as_deref() != Some(&tenants)) else {
            return false;
        };
        entry.tenants = Some(Arc::new(tenants));
        true
    }

    /// Tenants that a node acts for, from its last report to this member.
    pub fn tenants_of(&self, node: NodeId) -> Option<&Arc<BTreeSet<TenantName>>> {
        self.nodes.get(&node)?.tenants.as_ref()
    }

    /// Records that a mode of this store revision was sent to a node.
    pub fn record_sent_mode(&mut self, node: NodeId, revision: u64) {
        if let Some(entry) = self.nodes.get_mut(&node) {
            entry.sent_mode = revision;
        }
    }

    /// Drain progress of a node; `None` until it has reported with knowledge of the mode of this revision.
    pub fn drain_of(&self, node: NodeId, revision: u64) -> Option<DrainProgress> {
        let entry = self.nodes.get(&node).filter(|entry| entry.reported_mode == revision)?;
        entry.report.as_ref().map(|report| report.drain)
    }

    /// Adds placed bytes to a node's usage until its next report.
    pub fn place(&mut self, node: NodeId, bytes: u64) {
        if let Some(entry) = self.nodes.get_mut(&node) {
            entry.placed = entry.placed.saturating_add(bytes);
        }
    }

    /// Bytes placed on a node since its last report.
    pub fn placed_on(&self, node: NodeId) -> u64 {
        self.nodes.get(&node).map_or(0, |entry| entry.placed)
    }

    /// Last report of a node in its current registration.
    pub fn report_of(&self, node: NodeId) -> Option<&NodeReport> {
        self.nodes.get(&node)?.report.as_ref()
    }

    /// Applies all deadlines up to `now`. A node that was silent for long enough dies and is forgotten in one
    /// call.
    pub fn expire(&mut self, now: Tick) -> Vec<LivenessEvent> {
        if self.next_change.is_none_or(|next| now < next) {
            return Vec::new();
        }
        let LivenessSettings { dead_after, forget_after } = self.settings;
        let mut events = Vec::new();
        let mut next_change: Option<Tick> = None;
        for (node, entry) in &mut self.nodes {
            let silence = now.since(entry.last_heartbeat);
            if entry.state == NodeLiveness::Alive && silence >= dead_after {
                entry.state = NodeLiveness::Dead;
                Arc::make_mut(&mut self.live).remove(*node);
                events.push(LivenessEvent::Died(*node));
            }
            if entry.state == NodeLiveness::Dead && silence >= forget_after {
                entry.state = NodeLiveness::Absent;
                events.push(LivenessEvent::Forgotten(*node, entry.record.epoch));
            }
            let change = match entry.state {
                NodeLiveness::Alive => entry.last_heartbeat.after(dead_after),
                NodeLiveness::Dead => entry.last_heartbeat.after(forget_after),
                NodeLiveness::Absent => continue,
            };
            next_change = Some(next_change.map_or(change, |next| next.min(change)));
        }
        self.next_change = next_change;
        events
    }

    /// Earliest time at which [`NodeTable::expire`] may have an effect.
    pub fn next_deadline(&self) -> Option<Tick> {
        self.next_change
    }

    /// Nodes to offer, as of the last call of `expire`.
    pub fn live(&self) -> Arc<LiveNodes> {
        self.live.clone()
    }

    /// Record and liveness of a node.
    pub fn get(&self, node: NodeId) -> Option<(&NodeRecord, NodeLiveness)> {
        self.nodes.get(&node).map(|entry| (&entry.record, entry.state))
    }

    /// Returns whether this is the current registration of a node.
    pub fn is_registered(&self, node: NodeId, epoch: Epoch) -> bool {
        let known = self.get(node).filter(|(_, state)| *state != NodeLiveness::Absent);
        known.is_some_and(|(record, _)| record.epoch == epoch)
    }

    /// All nodes, ordered by number.
    pub fn iter(&self) -> impl Iterator<Item = (&NodeRecord, NodeLiveness)> {
        self.nodes.values().map(|entry| (&entry.record, entry.state))
    }

    /// All nodes with epoch and presence, for ledgers.
    pub fn known_nodes(&self) -> impl Iterator<Item = KnownNode> {
        let presence =
            |state| if state == NodeLiveness::Absent { Presence::Absent } else { Presence::Registered };
        self.iter().map(move |(record, state)| (record.node, record.epoch, presence(state)))
    }

    fn expect_change(&mut self, at: Tick) {
        self.next_change = Some(self.next_change.map_or(at, |next| next.min(at)));
    }
}

impl NodeEntry {
    fn new(record: NodeRecord, fence: Epoch, (state, last_heartbeat): (NodeLiveness, Tick)) -> NodeEntry {
        let details_of = record.epoch;
        NodeEntry {
            record,
            fence,
            details_of,
            state,
            last_heartbeat,
            report: None,
            tenants: None,
            placed: 0,
            sent_mode: 0,
            reported_mode: 0,
        }
    }

    /// Adds the node to the offered ones, unless it serves no peers.
    fn offer(&self, live: &mut Arc<LiveNodes>) {
        let live = Arc::make_mut(live);
        if self.record.details.peer_endpoints.is_empty() {
            live.remove(self.record.node);
        } else {
            live.insert(self.record.node);
        }
    }
}

#[cfg(test)]
mod tests;
