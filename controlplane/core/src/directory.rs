//! The directory of one member: block key → replicas of all nodes, for the hash slots that the member owns.
//!
//! Invariants:
//! * A lookup returns replicas of the current inventories of live nodes only, except the requester's own.
//!   Keys in slots that are not owned are marked.
//! * Replacing a node's inventory, or forgetting the node, is O(1). Entries carry the number (generation) of
//!   their inventory, and entries of older generations are invisible at once. [`Directory::sweep`] removes
//!   them in steps, like the entries of lost slots.
//! * Updates of a registration are applied in sequence, each change once. Repeated changes are skipped; after
//!   a gap nothing is applied until the node starts over.
//! * Updates of an older registration (epoch) have no effect.
//! * Changes of a node in a slot are accepted from the start of its inventory of the slot until the slot is
//!   lost. So a member that regains a slot knows nothing in it, and requests inventories
//!   ([`Directory::slot_status`]).
//! * A slot is partial until every registered or [expected](Directory::expect_node) node has announced its
//!   complete inventory of the slot.
//!
//! The caller tracks liveness and passes [`LiveNodes`]. A dead node's replicas are kept but not returned
//! until the node is forgotten, so that a node that was only unreachable need not announce its inventory
//! again.
//!
//! Cost: 24 bytes per entry plus slack (`directory/table.rs`), with one entry per key and node for all tiers.
//! A change and a lookup are O(1) in the size of the directory.
//!
//! Locks and time are the caller's; the order of replicas is policy ([`reprise_policy::routing`]).

mod changes;
mod inventory_progress;
mod lookup;
mod ownership;
mod scan;
mod table;
mod update;

use reprise_policy::key::HASH_SLOTS;
use reprise_policy::routing::{Domain, PeerTable};
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tier};

use crate::live_nodes::LiveNodes;
pub use changes::{Changes, InvalidChanges, Operation};
use inventory_progress::{IncompleteInventories, InventoryProgress};
pub use lookup::{CONSIDERED_MAX, LookupResult, Requester};
pub use ownership::SlotStatus;
pub use scan::{Cursor, ReplicaEntry};
use table::{Entry, Table};
pub use update::{Invalidation, Opening, Update, UpdateOutcome};

/// Maximum number of replicas returned for a key. A lookup of 8,192 keys then returns at most 8,192 × 16 × 4
/// bytes = 512 KiB. If more nodes hold a block, any 16 of them suffice.
pub const REPLICAS_PER_KEY_MAX: usize = 16;
/// Keys whose table places are prefetched together; enough to occupy a core's 10 to 16 line-fill buffers.
const LOOKUP_GROUP: usize = 16;

/// The replica directory of one member.
#[derive(Debug)]
pub struct Directory {
    /// One table for each hash slot.
    slots: Box<[Table]>,
    owned: SlotSet,
    /// Version of `owned`; increases with every change.
    version: u64,
    /// Slots that are no longer owned and not swept yet.
    lost: SlotSet,
    incomplete: IncompleteInventories,
    /// State of each node, indexed by node number.
    nodes: Vec<Node>,
    keys: u64,
    /// Entries of older inventories that are still in the tables.
    stale: u64,
    /// Hash slot at which the next sweep starts.
    sweep_next: usize,
    updates: u64,
}

/// Size of the directory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirectorySize {
    /// Distinct keys, including those that are not swept yet.
    pub keys: u64,
    /// Replicas of current inventories.
    pub replicas: u64,
    /// Entries of older inventories that are not swept yet.
    pub stale_entries: u64,
    /// Heap memory of tables and nodes, in bytes.
    pub bytes: u64,
    /// Changes applied since the start.
    pub updates: u64,
    /// Registered nodes, ordered by number.
    pub nodes: Vec<NodeReplicas>,
    /// Number of owned slots.
    pub slots_owned: usize,
    /// Number of owned slots with an incomplete inventory of some node.
    pub slots_partial: usize,
}

/// Number of blocks on one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeReplicas {
    /// Node of the counts.
    pub node: NodeId,
    /// Number of blocks in DRAM.
    pub dram: u64,
    /// Number of blocks on NVMe.
    pub nvme: u64,
}

/// State of a node.
#[derive(Debug, Default)]
struct Node {
    /// Newest known registration; `Epoch(0)` if none.
    epoch: Epoch,
    /// Whether updates of this registration are accepted.
    registered: bool,
    /// Generation of the current inventory, from 1. 32 bits last 136 years at one per second.
    generation: u32,
    /// Expected sequence number of the next change.
    expected: u64,
    /// Entries of the current generation, and their blocks by tier.
    entries: u64,
    dram: u64,
    nvme: u64,
    /// Announced slots, if the node is registered or expected.
    progress: Option<Box<InventoryProgress>>,
}

impl Default for Directory {
    fn default() -> Directory {
        Directory::new()
    }
}

impl Directory {
    /// Creates an empty directory that owns no slot.
    pub fn new() -> Directory {
        Directory {
            slots: std::iter::repeat_with(Table::default).take(usize::from(HASH_SLOTS)).collect(),
            owned: SlotSet::EMPTY,
            version: 0,
            lost: SlotSet::EMPTY,
            incomplete: IncompleteInventories::default(),
            nodes: Vec::new(),
            keys: 0,
            stale: 0,
            sweep_next: 0,
            updates: 0,
        }
    }

    /// Registers a node with an empty inventory. No effect unless `epoch` is newer than the known one;
    /// returns whether it was. O(slots).
    pub fn register(&mut self, node: NodeId, epoch: Epoch) -> bool {
        let index = self.node_index(node);
        let newer = self.nodes[index].epoch < epoch;
        if newer {
            self.discard_inventory(node);
            let state = &mut self.nodes[index];
            (state.epoch, state.registered, state.expected) = (epoch, true, 0);
            if state.progress.is_none() {
                state.progress = Some(InventoryProgress::none_announced(&mut self.incomplete));
            }
        }
        newer
    }

    /// Ends a node's registration: its replicas become invisible, and further updates of the registration are
    /// fenced. No effect unless `epoch` is current; returns whether it was. O(slots).
    pub fn forget(&mut self, node: NodeId, epoch: Epoch) -> bool {
        let current = self.registered(node, epoch).is_some();
        if current {
            self.discard_inventory(node);
            let state = &mut self.nodes[usize::from(node.0)];
            state.registered = false;
            if let Some(progress) = state.progress.take() {
                progress.remove(&mut self.incomplete);
            }
        }
        current
    }

    /// Like [`Directory::lookup_for`], for a requester without known load and failure domains.
    pub fn lookup(
        &self,
        keys: &[BlockKey],
        live: &LiveNodes,
        asking: Option<NodeId>,
        found: &mut LookupResult,
    ) {
        self.lookup_for(Requester { node: asking, peers: &PeerTable::default() }, keys, live, found);
    }

    /// Looks up replicas of keys on live nodes other than the requester. At most [`REPLICAS_PER_KEY_MAX`] per
    /// key, soonest to arrive first, are stored into `found`, with the keys in slots of other members and the
    /// number of keys in partial slots. Hot path: allocates only while `found` grows.
    pub fn lookup_for(
        &self,
        asker: Requester<'_>,
        keys: &[BlockKey],
        live: &LiveNodes,
        found: &mut LookupResult,
    ) {
        let Requester { node: asking, peers } = asker;
        let order = (peers, asking.map_or(Domain::default(), |node| peers.of(node).domain));
        found.begin(self.nodes.iter().enumerate().map(|(number, node)| {
            let id = NodeId(u16::try_from(number).expect("node numbers have 16 bits"));
            if live.contains(id) && asking != Some(id) { node.generation } else { 0 }
        }));
        for group in keys.chunks(LOOKUP_GROUP) {
            // Touch all places of the group before reading the first, so that the cache misses overlap.
            let touched = group.iter().fold(0, |all, key| all ^ self.slot(key).touch(key));
            std::hint::black_box(touched);
            for key in group {
                let slot = key.hash_slot();
                if self.owned.contains(slot) {
                    found.collect(key, self.slot(key).of_key(key), self.incomplete.completeness(slot), order);
                } else {
                    found.skip();
                }
            }
        }
    }

    /// Removes entries of older inventories and of lost slots, visiting about `places_max` places of the
    /// tables. Returns whether entries remain to be removed.
    pub fn sweep(&mut self, places_max: usize) -> bool {
        let mut visited = 0;
        while visited < places_max
            && let Some(slot) = self.lost.iter().next()
        {
            visited += 1 + self.slots[usize::from(slot)].bytes() / size_of::<Entry>();
            self.clear(slot);
            self.lost.remove(slot);
        }
        while self.stale > 0 && visited < places_max {
            let nodes = &self.nodes;
            let slot = &mut self.slots[self.sweep_next];
            visited += 1 + slot.bytes() / size_of::<Entry>();
            let gone = slot.retain(|entry| entry.generation == nodes[usize::from(entry.node.0)].generation);
            self.stale -= gone.entries as u64;
            self.keys -= gone.keys as u64;
            self.sweep_next = (self.sweep_next + 1) % self.slots.len();
        }
        self.needs_sweep()
    }

    /// Whether a sweep has entries to remove.
    pub fn needs_sweep(&self) -> bool {
        self.stale > 0 || !self.lost.is_empty()
    }

    /// Computes the size. O(slots + nodes).
    pub fn size(&self) -> DirectorySize {
        let tables: usize = self.slots.iter().map(Table::bytes).sum();
        let fixed = size_of_val(&*self.slots) + self.nodes.capacity() * size_of::<Node>();
        let nodes: Vec<NodeReplicas> = self
            .nodes
            .iter()
            .enumerate()
            .filter(|(_, node)| node.registered)
            .map(|(number, node)| NodeReplicas {
                node: NodeId(u16::try_from(number).expect("node numbers have 16 bits")),
                dram: node.dram,
                nvme: node.nvme,
            })
            .collect();
        DirectorySize {
            keys: self.keys,
            replicas: nodes.iter().map(|node| node.dram + node.nvme).sum(),
            stale_entries: self.stale,
            bytes: (tables + fixed) as u64,
            updates: self.updates,
            nodes,
            slots_owned: self.owned.len(),
            slots_partial: self.owned.iter().filter(|slot| self.incomplete.is_partial(*slot)).count(),
        }
    }

    /// Checks the counters against the tables; for tests. O(entries).
    pub fn audit(&self) -> Result<(), String> {
        let mut counted = vec![(0, 0, 0); self.nodes.len()];
        let (mut stale, mut entries) = (0, 0);
        for entry in self.slots.iter().flat_map(Table::iter) {
            entries += 1;
            let number = usize::from(entry.node.0);
            if entry.generation != self.nodes[number].generation {
                stale += 1;
                continue;
            }
            let counts = &mut counted[number];
            counts.0 += 1;
            counts.1 += u64::from(entry.tiers.contains(Tier::Dram));
            counts.2 += u64::from(entry.tiers.contains(Tier::Nvme));
        }
        let kept: Vec<_> = self.nodes.iter().map(|node| (node.entries, node.dram, node.nvme)).collect();
        if counted != kept {
            return Err(format!("entries, DRAM and NVMe by node are {counted:?}, counted as {kept:?}"));
        }
        if stale != self.stale || self.keys > entries {
            return Err(format!(
                "{entries} entries, {stale} stale; counted as {} keys, {} stale",
                self.keys, self.stale
            ));
        }
        for (slot, table) in (0..).zip(&self.slots) {
            let known = self.owned.contains(slot) || self.lost.contains(slot);
            if !known && table.iter().next().is_some() {
                return Err(format!("entries in slot {slot}, which was never owned or is swept"));
            }
        }
        let progress = self.nodes.iter().filter_map(|node| node.progress.as_deref());
        self.incomplete.audit(progress, &self.owned)
    }

    fn node_index(&mut self, node: NodeId) -> usize {
        let index = usize::from(node.0);
        if self.nodes.len() <= index {
            self.nodes.resize_with(index + 1, Node::default);
        }
        index
    }

    fn slot(&self, key: &BlockKey) -> &Table {
        &self.slots[usize::from(key.hash_slot())]
    }

    fn registered(&self, node: NodeId, epoch: Epoch) -> Option<&Node> {
        self.nodes.get(usize::from(node.0)).filter(|node| node.registered && node.epoch == epoch)
    }

    /// Makes all entries of the node stale and discards its announcements.
    fn discard_inventory(&mut self, node: NodeId) {
        let state = &mut self.nodes[usize::from(node.0)];
        self.stale += state.entries;
        state.generation += 1;
        (state.entries, state.dram, state.nvme) = (0, 0, 0);
        if let Some(progress) = state.progress.as_mut() {
            progress.discard(&SlotSet::ALL, &mut self.incomplete);
        }
    }

    /// Removes all entries of a slot.
    fn clear(&mut self, slot: u16) {
        self.remove(slot, |_| true);
    }

    /// Removes the entries of a slot that `unwanted` selects.
    fn remove(&mut self, slot: u16, unwanted: impl Fn(&Entry) -> bool) {
        let table = &mut self.slots[usize::from(slot)];
        for entry in table.iter().filter(|entry| unwanted(entry)) {
            let node = &mut self.nodes[usize::from(entry.node.0)];
            if entry.generation == node.generation {
                node.entries -= 1;
                node.dram -= u64::from(entry.tiers.contains(Tier::Dram));
                node.nvme -= u64::from(entry.tiers.contains(Tier::Nvme));
            } else {
                self.stale -= 1;
            }
        }
        self.keys -= table.retain(|entry| !unwanted(entry)).keys as u64;
    }
}
