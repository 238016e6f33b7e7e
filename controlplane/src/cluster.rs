//! State that the services share: the node table and the directory, each behind its own lock, and the watch
//! events.
//!
//! Locking rules:
//! * [`member_parts`] states in which order a call changes the parts, one lock at a time.
//! * The node table's lock is held for map accesses only; the directory's lock for one part of a batch.
//! * No lock is held across an await. The node table's and the directory's lock are never held together.
//! * The locks of the modes and of the peer table ([`node_selection`]) nest inside the node table's lock. The
//!   lock of the rebalance round is taken before the node table's lock.
//! * The locks of the ledgers ([`crate::ledgers`]) and of the tenant usage ([`crate::tenant_usage`]) are
//!   taken alone, because they are held for long.
//! * The lock of the change log ([`crate::events`]) nests inside the directory's lock.
//! * A watch event is sent under the lock that guarded the change, so that watchers see changes in order.

mod info;
pub(crate) mod node_selection;
mod parts;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use reprise_controlplane_core::member_parts::EXPECTED_FOR;
use reprise_controlplane_core::{
    Directory, HeartbeatResult, KnownNode, LiveNodes, LivenessSettings, Modes, NodeLiveness, NodeRecord,
    NodeReport, NodeTable, RebalanceRound, RegistrationError, Scope, SlotStatus, member_parts,
};
use reprise_policy::{Amounts, Epoch, NodeId, SlotSet, TenantName, Tick};
use reprise_proto::controlplane::{NodeChange, NodeInfo};
use tokio::sync::broadcast;
use tonic::Status;

use crate::events::Events;
use crate::ledgers::Ledgers;
use crate::metrics::{HeartbeatOutcome, Metrics, WatchLabels, WatchOf};
use crate::tenant_usage::UsageTable;
use node_selection::CachedPeers;

/// Node changes by which a watcher may lag. A restart of 1,000 nodes makes 2,000 changes.
const NODE_EVENTS_MAX: usize = 4096;
/// Table places that one sweep visits: about 0.3 ms under the lock. 200 sweeps cover ten million entries.
const SWEEP_PLACES: usize = 1 << 16;

/// Shared state of the services of one member.
#[derive(Debug)]
pub struct Cluster {
    start: Instant,
    table: Mutex<NodeTable>,
    directory: RwLock<Directory>,
    /// Version of the directory's slots; atomic, so that heartbeats do not take the directory's lock.
    slots_version: AtomicU64,
    /// Epoch of the shard map that assigned the slots.
    slots_epoch: AtomicU64,
    modes: Mutex<Modes>,
    /// Load and failure domain of each node, for lookups.
    peers: RwLock<CachedPeers>,
    /// Current moves of blocks between nodes, if this member decides them.
    moves: Mutex<RebalanceRound>,
    node_events: broadcast::Sender<WatchEvent<NodeChange>>,
    watchers: AtomicUsize,
    watchers_max: usize,
    /// Log of the directory's changes.
    pub events: Events,
    /// Budget ledgers of the tenants in this member's slots.
    pub ledgers: Ledgers,
    /// Usage of the tenants in this member's slots, with and without a budget.
    pub tenant_usage: UsageTable,
    /// All metrics of the process.
    pub metrics: Metrics,
}

/// An item of a watch stream.
#[derive(Clone, Debug)]
pub enum WatchEvent<T> {
    /// A change of the watched objects.
    Change(T),
    /// The member shuts down; the stream ends.
    Closing,
}

/// Counts one open watch stream; released on drop.
#[derive(Debug)]
pub struct WatcherPermit {
    cluster: Arc<Cluster>,
    of: WatchOf,
}

impl Cluster {
    /// State without nodes and with an empty directory that owns no slot.
    pub fn new(settings: LivenessSettings, watchers_max: usize, events: Events, metrics: Metrics) -> Cluster {
        Cluster {
            start: Instant::now(),
            table: Mutex::new(NodeTable::new(settings)),
            directory: RwLock::new(Directory::new()),
            slots_version: AtomicU64::new(0),
            slots_epoch: AtomicU64::new(0),
            modes: Mutex::default(),
            peers: RwLock::default(),
            moves: Mutex::default(),
            node_events: broadcast::Sender::new(NODE_EVENTS_MAX),
            watchers: AtomicUsize::new(0),
            watchers_max,
            events,
            ledgers: Ledgers::default(),
            tenant_usage: UsageTable::default(),
            metrics,
        }
    }

    /// Microseconds since the start of the process.
    pub fn now(&self) -> Tick {
        Tick(0).after(self.start.elapsed())
    }

    /// Locks the directory for reading. A poisoned lock is usable, because a panic cannot leave a change half
    /// applied.
    pub fn directory(&self) -> RwLockReadGuard<'_, Directory> {
        self.directory.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the directory for writing.
    pub fn directory_mut(&self) -> RwLockWriteGuard<'_, Directory> {
        self.directory.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn table(&self) -> MutexGuard<'_, NodeTable> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stops waiting for inventories of nodes that have not registered.
    pub fn stop_expecting_absent(&self) {
        member_parts::stop_expecting_absent(&mut &*self);
    }

    /// Sets the slots that the directory owns, as assigned by the map of `epoch`.
    pub fn set_owned_slots(&self, slots: &SlotSet, epoch: Epoch) {
        let mut directory = self.directory_mut();
        self.slots_epoch.store(epoch.0, Ordering::Release);
        if directory.owned() == slots {
            return;
        }
        let lost = directory.owned().without(slots);
        directory.set_owned_slots(slots);
        self.slots_version.store(directory.version(), Ordering::Relaxed);
        tracing::info!(slots = slots.len(), lost = lost.len(), "owned slots changed");
        lost.iter().for_each(|slot| self.events.record_clearing(Scope::slot(slot)));
    }

    /// Slots that the directory owns.
    pub fn owned(&self) -> SlotSet {
        self.directory().owned().clone()
    }

    /// Version of the owned slots; increases with every change.
    pub fn slots_version(&self) -> u64 {
        self.slots_version.load(Ordering::Relaxed)
    }

    /// Epoch of the map that assigned the owned slots.
    pub fn slots_epoch(&self) -> Epoch {
        Epoch(self.slots_epoch.load(Ordering::Acquire))
    }

    /// Slots that a registered node must announce; `None` if it must register again.
    pub fn slot_status(&self, node: NodeId, epoch: Epoch) -> Option<SlotStatus> {
        self.directory().slot_status(node, epoch)
    }

    /// Applies a registration that the store has committed: the node is alive, with an empty inventory.
    ///
    /// # Errors
    /// A newer registration was applied first, or the node was forgotten.
    pub fn register(&self, record: NodeRecord) -> Result<(), RegistrationError> {
        member_parts::register(&mut &*self, self.now(), record)
    }

    /// Records a heartbeat; returns whether the registration is current.
    pub fn heartbeat(&self, node: NodeId, epoch: Epoch) -> bool {
        let result = member_parts::heartbeat(&mut &*self, self.now(), node, epoch);
        self.metrics.count_heartbeat(match result {
            HeartbeatResult::Known => HeartbeatOutcome::known,
            HeartbeatResult::Returned => HeartbeatOutcome::returned,
            HeartbeatResult::Unknown => HeartbeatOutcome::unknown,
        });
        result != HeartbeatResult::Unknown
    }

    /// Expires silent nodes; returns the time until the next deadline.
    pub fn expire(&self) -> Option<Duration> {
        let now = self.now();
        member_parts::expire(&mut &*self, now).map(|next| next.since(now))
    }

    /// Nodes to offer to others.
    pub fn live(&self) -> Arc<LiveNodes> {
        let now = self.now();
        member_parts::live_nodes(&mut &*self, now)
    }

    /// Sweeps one step of the directory; returns whether entries remain to be swept.
    pub fn sweep(&self) -> bool {
        self.directory_mut().sweep(SWEEP_PLACES)
    }

    /// Stores a node's report; `false` if the node must register again.
    pub fn report(&self, node: NodeId, epoch: Epoch, report: NodeReport) -> bool {
        let mut table = self.table();
        let known = table.report(node, epoch, report);
        if known {
            self.refresh_peers(&table);
        }
        known
    }

    /// Stores the tenants that a node acts for. Watchers of nodes learn of a change.
    pub fn set_tenants(&self, node: NodeId, epoch: Epoch, tenants: BTreeSet<TenantName>) {
        let mut table = self.table();
        if !table.set_tenants(node, epoch, tenants) {
            return;
        }
        if let Some((record, state)) = table.iter().find(|(record, _)| record.node == node) {
            self.notify_node_changed(&table, record, state);
        }
    }

    /// Sum of the capacities that live nodes have reported.
    pub fn capacity(&self) -> Amounts {
        let table = self.table();
        let living = table.iter().filter(|(_, state)| *state == NodeLiveness::Alive);
        let reports = living.filter_map(|(record, _)| table.report_of(record.node));
        reports.fold(Amounts::default(), |sum, report| Amounts {
            dram: sum.dram.saturating_add(report.capacity.dram),
            nvme: sum.nvme.saturating_add(report.capacity.nvme),
        })
    }

    /// Sum of the capacities; `None` while a live node has not reported, or while this member waits for the
    /// first registration after its start.
    pub fn capacity_known(&self) -> Option<Amounts> {
        let is_known = {
            let table = self.table();
            let mut living = table.iter().filter(|(_, state)| *state == NodeLiveness::Alive).peekable();
            let is_settled = self.time_to_settle().is_zero() || living.peek().is_some();
            is_settled && living.all(|(record, _)| table.report_of(record.node).is_some())
        };
        is_known.then(|| self.capacity())
    }

    /// Time left for live nodes to register with this member after its start.
    pub fn time_to_settle(&self) -> Duration {
        EXPECTED_FOR.saturating_sub(self.start.elapsed())
    }

    /// All nodes with epoch and presence, for ledgers and tenant usage.
    pub fn known_nodes(&self) -> Vec<KnownNode> {
        self.table().known_nodes().collect()
    }

    /// All nodes, ordered by number.
    pub fn nodes(&self) -> Vec<NodeInfo> {
        self.infos(&self.table())
    }

    /// The current nodes, and a receiver of every later change without a gap.
    pub fn watch_nodes(&self) -> (Vec<NodeInfo>, broadcast::Receiver<WatchEvent<NodeChange>>) {
        let table = self.table();
        let nodes = self.infos(&table);
        (nodes, self.node_events.subscribe())
    }

    /// Acquires a permit for a watch stream; fails at the limit.
    pub fn acquire_watcher(self: &Arc<Cluster>, of: WatchOf) -> Result<WatcherPermit, Status> {
        if self.watchers.fetch_add(1, Ordering::Relaxed) >= self.watchers_max {
            self.watchers.fetch_sub(1, Ordering::Relaxed);
            return Err(Status::resource_exhausted(format!(
                "{} watch streams are open already: raise limits.watchers or close some",
                self.watchers_max
            )));
        }
        self.metrics.watchers.get_or_create(&WatchLabels { of }).inc();
        Ok(WatcherPermit { cluster: self.clone(), of })
    }

    /// Ends all watch streams.
    pub fn close(&self) {
        let _ = self.node_events.send(WatchEvent::Closing);
        self.events.close();
    }

    /// Updates the metrics that are computed on each scrape.
    pub fn refresh_metrics(&self) {
        let size = self.directory().size();
        let table = self.table();
        self.metrics.set_sizes(table.iter().map(|(_, state)| state), &size);
        self.metrics.set_modes(table.iter().map(|(record, _)| self.mode_of(&record.name).mode));
    }

    fn notify_node_changed(&self, table: &NodeTable, record: &NodeRecord, state: NodeLiveness) {
        let change = NodeChange { node: Some(self.info(table, record, state)), removed: false };
        let _ = self.node_events.send(WatchEvent::Change(change));
    }

    fn notify_node_removed(&self, table: &NodeTable, record: &NodeRecord) {
        let node = self.info(table, record, NodeLiveness::Absent);
        let _ = self.node_events.send(WatchEvent::Change(NodeChange { node: Some(node), removed: true }));
    }
}

impl Drop for WatcherPermit {
    fn drop(&mut self) {
        self.cluster.watchers.fetch_sub(1, Ordering::Relaxed);
        self.cluster.metrics.watchers.get_or_create(&WatchLabels { of: self.of }).dec();
    }
}
