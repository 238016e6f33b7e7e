//! What the services share: members and directory behind locks of their own, and the news for watchers.
//!
//! Rules of the locks:
//! * The members' lock is held for map accesses only; the directory's, for one part of a batch.
//! * None is held across an await, nor members' and directory's at once.
//! * The locks of modes and of the table for look-ups ([`choosing`]) are taken inside of the members', and take none
//!   themselves; that of the moves is taken outside of them.
//! * The ledgers' lock ([`crate::ledgers`]) is taken inside of no other, because it is held for long, and takes none itself. The same
//!   is so of the holdings' ([`crate::holdings`]).
//! * The lock of the event log ([`crate::events`]) is taken inside of the directory's, and takes none itself.
//! * News is sent under the lock that the change was made under, so that watchers see changes in their order.

pub(crate) mod choosing;
mod info;
mod records;

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::{Duration, Instant};

use reprise_controlplane_core::{
    Amounts, Beat, Directory, KnownNode, LiveNodes, MemberEvent, MemberSettings, MemberState, Members, Modes,
    MovesRound, NodeRecord, NodeReport, NotRegistered, Scope, Standing,
};
use reprise_policy::{Epoch, NodeId, SlotSet, Tick};
use reprise_proto::controlplane::{NodeChange, NodeInfo};
use tokio::sync::broadcast;
use tonic::Status;

use crate::events::Events;
use crate::holdings::Holdings;
use crate::ledgers::Ledgers;
use crate::metrics::{BeatResult, Metrics, WatchLabels, WatchOf};
use choosing::PeersKept;

/// Node changes a watcher may lag behind. A restart of 1,000 nodes makes two each.
const NODE_NEWS_MAX: usize = 4096;
/// Places of the directory's tables that one sweep looks at: about 0.3 ms under the lock. Ten million entries are
/// swept in 200 sweeps.
const SWEEP_PLACES: usize = 1 << 16;
/// Time for nodes that the store knows to register with a member that has started: they try at least once a second.
pub(crate) const EXPECTED_FOR: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Debug)]
pub struct Cluster {
    start: Instant,
    members: Mutex<Members>,
    directory: RwLock<Directory>,
    /// Of the directory's slots; apart, so that heartbeats take no lock for it.
    slots_version: AtomicU64,
    /// Of the map by which those were given to this member.
    slots_epoch: AtomicU64,
    modes: Mutex<Modes>,
    /// Load and failure domain of nodes, for look-ups.
    peers: RwLock<PeersKept>,
    /// Who gives blocks to whom, while this member decides it.
    moves: Mutex<MovesRound>,
    node_news: broadcast::Sender<News<NodeChange>>,
    watchers: AtomicUsize,
    watchers_max: usize,
    /// The changes of the directory.
    pub events: Events,
    /// Of the tenants whose slot is this member's.
    pub ledgers: Ledgers,
    /// Of the same tenants, and of those without a budget.
    pub holdings: Holdings,
    /// All metrics of the process.
    pub metrics: Metrics,
}

/// What a watch stream gets.
#[derive(Clone, Debug)]
pub enum News<T> {
    /// A change.
    Change(T),
    /// The member is going away; the stream ends.
    Closing,
}

/// Counts an open watch stream while it lives.
#[derive(Debug)]
pub struct WatcherSeat {
    cluster: Arc<Cluster>,
    of: WatchOf,
}

impl Cluster {
    /// No members, an empty directory.
    pub fn new(settings: MemberSettings, watchers_max: usize, events: Events, metrics: Metrics) -> Cluster {
        Cluster {
            start: Instant::now(),
            members: Mutex::new(Members::new(settings)),
            directory: RwLock::new(Directory::new()),
            slots_version: AtomicU64::new(0),
            slots_epoch: AtomicU64::new(0),
            modes: Mutex::default(),
            peers: RwLock::default(),
            moves: Mutex::default(),
            node_news: broadcast::Sender::new(NODE_NEWS_MAX),
            watchers: AtomicUsize::new(0),
            watchers_max,
            events,
            ledgers: Ledgers::default(),
            holdings: Holdings::default(),
            metrics,
        }
    }

    /// Microseconds since the start of the process.
    pub fn now(&self) -> Tick {
        Tick(0).after(self.start.elapsed())
    }

    /// The directory, to read. Each change of it is whole, so a poisoned lock is as good as any.
    pub fn directory(&self) -> RwLockReadGuard<'_, Directory> {
        self.directory.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The directory, to change.
    pub fn directory_mut(&self) -> RwLockWriteGuard<'_, Directory> {
        self.directory.write().unwrap_or_else(PoisonError::into_inner)
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those that have not registered are waited for no longer.
    pub fn give_up_absent(&self) {
        let absent: Vec<NodeId> = {
            let members = self.members();
            let absent = members.iter().filter(|(_, state)| *state == MemberState::Absent);
            absent.map(|(record, _)| record.node).collect()
        };
        let mut directory = self.directory_mut();
        absent.into_iter().for_each(|node| directory.give_up(node));
    }

    /// From now on the directory has exactly these slots, by the map of an epoch.
    pub fn own(&self, slots: &SlotSet, epoch: Epoch) {
        let mut directory = self.directory_mut();
        self.slots_epoch.store(epoch.0, Ordering::Release);
        if directory.owned() == slots {
            return;
        }
        let lost = directory.owned().without(slots);
        directory.own(slots);
        self.slots_version.store(directory.version(), Ordering::Relaxed);
        tracing::info!(slots = slots.len(), lost = lost.len(), "slots of this member");
        lost.iter().for_each(|slot| self.events.cleared(Scope::slot(slot)));
    }

    /// The slots that the directory has.
    pub fn owned(&self) -> SlotSet {
        self.directory().owned().clone()
    }

    /// Higher whenever the directory has other slots.
    pub fn slots_version(&self) -> u64 {
        self.slots_version.load(Ordering::Relaxed)
    }

    /// Epoch of the map by which the directory has its slots.
    pub fn slots_epoch(&self) -> Epoch {
        Epoch(self.slots_epoch.load(Ordering::Acquire))
    }

    /// What a registered node has to announce; `None`: it must register again.
    pub fn standing(&self, node: NodeId, epoch: Epoch) -> Option<Standing> {
        self.directory().standing(node, epoch)
    }

    /// A node's new registration is in the store: from now on it is alive, with an empty inventory.
    ///
    /// # Errors
    /// A newer one has come first, or the node was forgotten.
    pub fn registered(&self, record: NodeRecord) -> Result<(), NotRegistered> {
        let (node, epoch) = (record.node, record.epoch);
        let mut directory = self.directory_mut();
        if directory.register(node, epoch) {
            self.events.cleared(Scope::node(node));
        }
        drop(directory);
        let mut members = self.members();
        let before = members.get(node).map(|(known, state)| (known.details.peer_address.clone(), state));
        if let Err(refused) = members.register(self.now(), record) {
            drop(members);
            self.unregistered(node, epoch, refused);
            return Err(refused);
        }
        let (record, state) = members.get(node).expect("it was just registered");
        if let Some((address, MemberState::Alive)) = before
            && address != record.details.peer_address
        {
            tracing::warn!(
                node = node.0,
                name = record.name,
                was = address,
                now = record.details.peer_address,
                "a node registered from another address while alive: do two agents have one name?"
            );
        }
        tracing::info!(node = node.0, name = record.name, epoch = epoch.0, "node registered");
        self.metrics.registrations.inc();
        self.tell_node(&members, record, state);
        drop(members);
        self.ledgers.register(node, epoch);
        // Gone for good in between: the ledgers were told of that first.
        if self.members().get(node).is_none() {
            self.ledgers.forget(node);
        }
        Ok(())
    }

    /// A heartbeat; whether the registration is known.
    pub fn beat(&self, node: NodeId, epoch: Epoch) -> bool {
        let mut members = self.members();
        let beat = members.beat(self.now(), node, epoch);
        if beat == Beat::Returned {
            let (record, state) = members.get(node).expect("only members beat");
            tracing::info!(condition = "node_back", node = node.0, name = record.name, "node is back");
            self.tell_node(&members, record, state);
        }
        drop(members);
        self.metrics.beat(match beat {
            Beat::Known => BeatResult::known,
            Beat::Returned => BeatResult::returned,
            Beat::Unknown => BeatResult::unknown,
        });
        beat != Beat::Unknown
    }

    /// Finds nodes that have been silent too long; returns the time until the next can be.
    pub fn expire(&self) -> Option<Duration> {
        let now = self.now();
        let (forgotten, next) = {
            let mut members = self.members();
            (self.expire_members(&mut members, now), members.next_deadline())
        };
        for (node, epoch) in forgotten {
            let mut directory = self.directory_mut();
            if directory.forget(node, epoch) {
                self.events.cleared(Scope::node(node));
            }
            drop(directory);
            self.ledgers.forget(node);
        }
        next.map(|next| next.since(now))
    }

    /// The nodes to offer, as of now: a dead node is never among them, however late the expiry task runs.
    pub fn live(&self) -> Arc<LiveNodes> {
        self.expire();
        self.members().live()
    }

    fn expire_members(&self, members: &mut Members, now: Tick) -> Vec<(NodeId, Epoch)> {
        let mut forgotten = Vec::new();
        for event in members.expire(now) {
            match event {
                MemberEvent::Died(node) => {
                    let (record, state) = members.get(node).expect("only members die");
                    tracing::warn!(node = node.0, name = record.name, "node is silent: not offered any more");
                    self.metrics.deaths.inc();
                    self.tell_node(members, record, state);
                }
                MemberEvent::Forgotten(node, epoch) => {
                    tracing::info!(node = node.0, epoch = epoch.0, "node forgotten: it must register again");
                    forgotten.push((node, epoch));
                }
            }
        }
        forgotten
    }

    /// Removes some replaced entries from the directory's tables; whether there are more.
    pub fn sweep(&self) -> bool {
        self.directory_mut().sweep(SWEEP_PLACES)
    }

    /// A node says how it is; `false`: it must register again.
    pub fn report(&self, node: NodeId, epoch: Epoch, report: NodeReport) -> bool {
        let mut members = self.members();
        let known = members.report(node, epoch, report);
        if known {
            self.refresh_peers(&members);
        }
        known
    }

    /// What the living nodes that have reported have together.
    pub fn capacity(&self) -> Amounts {
        let members = self.members();
        let living = members.iter().filter(|(_, state)| *state == MemberState::Alive);
        let reports = living.filter_map(|(record, _)| members.report_of(record.node));
        reports.fold(Amounts::default(), |sum, report| Amounts {
            dram: sum.dram.saturating_add(report.capacity.dram),
            nvme: sum.nvme.saturating_add(report.capacity.nvme),
        })
    }

    /// The same; `None` while a living node has not reported yet, or this member has just started and no node has registered
    /// with it.
    pub fn capacity_known(&self) -> Option<Amounts> {
        let is_known = {
            let members = self.members();
            let mut living = members.iter().filter(|(_, state)| *state == MemberState::Alive).peekable();
            let is_settled = self.settles_in().is_zero() || living.peek().is_some();
            is_settled && living.all(|(record, _)| members.report_of(record.node).is_some())
        };
        is_known.then(|| self.capacity())
    }

    /// Until every node that lives has had time to register with this member since its start.
    pub fn settles_in(&self) -> Duration {
        EXPECTED_FOR.saturating_sub(self.start.elapsed())
    }

    /// All nodes, as ledgers and holdings want to know them.
    pub fn known_nodes(&self) -> Vec<KnownNode> {
        self.members().known().collect()
    }

    /// All nodes, by number.
    pub fn nodes(&self) -> Vec<NodeInfo> {
        self.infos(&self.members())
    }

    /// The nodes now and every change from now on, without a gap in between.
    pub fn watch_nodes(&self) -> (Vec<NodeInfo>, broadcast::Receiver<News<NodeChange>>) {
        let members = self.members();
        let nodes = self.infos(&members);
        (nodes, self.node_news.subscribe())
    }

    /// A place among the watchers; refused when there are too many.
    pub fn take_seat(self: &Arc<Cluster>, of: WatchOf) -> Result<WatcherSeat, Status> {
        if self.watchers.fetch_add(1, Ordering::Relaxed) >= self.watchers_max {
            self.watchers.fetch_sub(1, Ordering::Relaxed);
            return Err(Status::resource_exhausted(format!(
                "{} watch streams are open already: raise limits.watchers or close some",
                self.watchers_max
            )));
        }
        self.metrics.watchers.get_or_create(&WatchLabels { of }).inc();
        Ok(WatcherSeat { cluster: self.clone(), of })
    }

    /// Ends all watch streams.
    pub fn close(&self) {
        let _ = self.node_news.send(News::Closing);
        self.events.close();
    }

    /// Updates the metrics that are counted only when somebody asks.
    pub fn refresh_metrics(&self) {
        let size = self.directory().size();
        let members = self.members();
        self.metrics.set_sizes(members.iter().map(|(_, state)| state), &size);
        self.metrics.set_modes(members.iter().map(|(record, _)| self.mode_of(&record.name).mode));
    }

    fn tell_node(&self, members: &Members, record: &NodeRecord, state: MemberState) {
        let change = NodeChange { node: Some(self.info(members, record, state)), removed: false };
        let _ = self.node_news.send(News::Change(change));
    }

    fn tell_gone(&self, members: &Members, record: &NodeRecord) {
        let node = self.info(members, record, MemberState::Absent);
        let _ = self.node_news.send(News::Change(NodeChange { node: Some(node), removed: true }));
    }
}

impl Drop for WatcherSeat {
    fn drop(&mut self) {
        self.cluster.watchers.fetch_sub(1, Ordering::Relaxed);
        self.cluster.metrics.watchers.get_or_create(&WatchLabels { of: self.of }).dec();
    }
}
