//! Block key → replicas, for all nodes of the cluster, in the hash slots that one member owns.
//!
//! Invariants:
//! * A lookup answers replicas of the current inventory of live nodes only, never the asking node's own; of keys in
//!   slots that are not owned it says so.
//! * A node's inventory is replaced, or the node forgotten, in O(1): entries carry the number (generation) of the
//!   inventory they belong to, and those of an older one are invisible at once. [`Directory::sweep`] removes them
//!   little by little, like those of slots that are not owned any more.
//! * Updates of a registration are applied in sequence, each change once. What comes twice is skipped; after a gap
//!   nothing is applied until the node starts over.
//! * An older registration (epoch) changes nothing.
//! * Changes of a node in a slot are taken from the moment at which the node begins its inventory of the slot, until
//!   the slot is lost. So whoever regains a slot knows nothing in it, and asks ([`Directory::standing`]).
//! * A slot is partial until every node that is registered, or [expected](Directory::expect), has announced its whole
//!   inventory of it.
//!
//! Whether a node lives is not kept here: the caller passes [`LiveNodes`]. A dead node's replicas stay, unanswered,
//! until it is forgotten, so that a node that was only out of reach need not announce everything again.
//!
//! Cost: 24 bytes an entry plus slack (`directory/table.rs`), one entry for each key and node whatever its tiers;
//! a change and a lookup are O(1) in the size of the directory.
//!
//! Deliberately absent: locks, time, and what decides which replica arrives first (policy).

mod announced;
mod changes;
mod found;
mod ownership;
mod reading;
mod table;
mod update;

use reprise_policy::key::HASH_SLOTS;
use reprise_policy::routing::{Domain, PeerTable};
use reprise_policy::{BlockKey, Epoch, NodeId, SlotSet, Tier};

use crate::live::LiveNodes;
use announced::{Announced, Awaited};
pub use changes::{BadChanges, Changes, Operation};
pub use found::{Asker, CONSIDERED_MAX, Found, Replica};
pub use ownership::Standing;
pub use reading::{Cursor, HeldReplica};
use table::{Entry, Table};
pub use update::{Opening, Update, Updated, Voided};

/// Replicas answered for one key at the most. A lookup of 8,192 keys then stays below 8,192 × 16 × 4 bytes = 512 KiB;
/// a block that more nodes hold is hot enough that any 16 of them will do.
pub const REPLICAS_PER_KEY_MAX: usize = 16;
/// Keys whose places are fetched from memory together: enough to keep a core's 10 to 16 line-fill buffers busy.
const LOOKUP_GROUP: usize = 16;

/// See the module.
#[derive(Debug)]
pub struct Directory {
    /// One table for each hash slot.
    slots: Box<[Table]>,
    owned: SlotSet,
    /// Higher whenever `owned` is another.
    version: u64,
    /// Not owned any more, and not swept yet.
    lost: SlotSet,
    awaited: Awaited,
    /// By node number.
    nodes: Vec<Node>,
    keys: u64,
    /// Entries of older inventories, still in the tables.
    stale: u64,
    /// Hash slot that the next sweep begins with.
    sweep_next: usize,
    updates: u64,
}

/// How large the directory is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DirectorySize {
    /// Distinct keys, including those that only a sweep has yet to remove.
    pub keys: u64,
    /// Replicas of current inventories.
    pub replicas: u64,
    /// Entries of older inventories that a sweep has yet to remove.
    pub stale_entries: u64,
    /// Heap memory of tables and nodes, in bytes.
    pub bytes: u64,
    /// Changes applied since the start.
    pub updates: u64,
    /// Registered nodes, by number.
    pub nodes: Vec<NodeReplicas>,
    /// Slots owned.
    pub slots_owned: usize,
    /// Of those, slots of which some node has not announced its whole inventory.
    pub slots_partial: usize,
}

/// What one node holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NodeReplicas {
    /// The node.
    pub node: NodeId,
    /// Blocks in its DRAM.
    pub dram: u64,
    /// Blocks on its NVMe.
    pub nvme: u64,
}

/// What the directory knows of a node.
#[derive(Debug, Default)]
struct Node {
    /// The newest registration seen; `Epoch(0)` for none.
    epoch: Epoch,
    /// Whether updates of that registration are taken.
    registered: bool,
    /// Number of its current inventory, from 1. 32 bits: a new one every second lasts 136 years.
    generation: u32,
    /// Sequence number of the next change.
    expected: u64,
    /// Entries of the current inventory, and how many blocks they say are in which tier.
    entries: u64,
    dram: u64,
    nvme: u64,
    /// Of a node that is awaited: what it has announced.
    announced: Option<Box<Announced>>,
}

impl Default for Directory {
    fn default() -> Directory {
        Directory::new()
    }
}

impl Directory {
    /// An empty directory that owns no slot.
    pub fn new() -> Directory {
        Directory {
            slots: std::iter::repeat_with(Table::default).take(usize::from(HASH_SLOTS)).collect(),
            owned: SlotSet::EMPTY,
            version: 0,
            lost: SlotSet::EMPTY,
            awaited: Awaited::default(),
            nodes: Vec::new(),
            keys: 0,
            stale: 0,
            sweep_next: 0,
            updates: 0,
        }
    }

    /// A node registered: its inventory is empty until it announces one. Nothing happens when `epoch` is not newer
    /// than what is known. O(slots). Returns whether something happened.
    pub fn register(&mut self, node: NodeId, epoch: Epoch) -> bool {
        let index = self.place(node);
        let newer = self.nodes[index].epoch < epoch;
        if newer {
            self.begin_anew(node);
            let state = &mut self.nodes[index];
            (state.epoch, state.registered, state.expected) = (epoch, true, 0);
            if state.announced.is_none() {
                state.announced = Some(Announced::nothing(&mut self.awaited));
            }
        }
        newer
    }

    /// A node is gone for good, or must register again: all it announced is invisible from now on and further updates
    /// of this registration are fenced. Nothing happens when `epoch` is not the current one. O(slots). Returns whether
    /// something happened.
    pub fn forget(&mut self, node: NodeId, epoch: Epoch) -> bool {
        let current = self.registered(node, epoch).is_some();
        if current {
            self.begin_anew(node);
            let state = &mut self.nodes[usize::from(node.0)];
            state.registered = false;
            if let Some(announced) = state.announced.take() {
                announced.leave(&mut self.awaited);
            }
        }
        current
    }

    /// [`Directory::lookup_by`] of a node of which nothing is known, like of all others.
    pub fn lookup(&self, keys: &[BlockKey], live: &LiveNodes, asking: Option<NodeId>, found: &mut Found) {
        self.lookup_by(Asker { node: asking, peers: &PeerTable::default() }, keys, live, found);
    }

    /// Finds the replicas of keys on live nodes other than the one that asks, those that arrive there soonest first, at most
    /// [`REPLICAS_PER_KEY_MAX`] a key, into `found`, which also says which keys are in slots of others and how many in
    /// partial ones. Hot: no allocation once `found` has grown.
    pub fn lookup_by(&self, asker: Asker<'_>, keys: &[BlockKey], live: &LiveNodes, found: &mut Found) {
        let Asker { node: asking, peers } = asker;
        let order = (peers, asking.map_or(Domain::default(), |node| peers.of(node).domain));
        found.begin(self.nodes.iter().enumerate().map(|(number, node)| {
            let id = NodeId(u16::try_from(number).expect("node numbers have 16 bits"));
            if live.contains(id) && asking != Some(id) { node.generation } else { 0 }
        }));
        for group in keys.chunks(LOOKUP_GROUP) {
            // All places of the group are asked for before the first is looked at: the waits for memory overlap.
            let touched = group.iter().fold(0, |all, key| all ^ self.slot(key).touch(key));
            std::hint::black_box(touched);
            for key in group {
                let slot = key.hash_slot();
                if self.owned.contains(slot) {
                    found.collect(key, self.slot(key).of_key(key), self.awaited.completeness(slot), order);
                } else {
                    found.skip();
                }
            }
        }
    }

    /// Removes entries of older inventories and of slots that are not owned any more, looking at `places_max` places of
    /// the tables or a little more. Returns whether there is more to do.
    pub fn sweep(&mut self, places_max: usize) -> bool {
        let mut looked_at = 0;
        while looked_at < places_max
            && let Some(slot) = self.lost.iter().next()
        {
            looked_at += 1 + self.slots[usize::from(slot)].bytes() / size_of::<Entry>();
            self.clear(slot);
            self.lost.remove(slot);
        }
        while self.stale > 0 && looked_at < places_max {
            let nodes = &self.nodes;
            let slot = &mut self.slots[self.sweep_next];
            looked_at += 1 + slot.bytes() / size_of::<Entry>();
            let gone = slot.retain(|entry| entry.generation == nodes[usize::from(entry.node.0)].generation);
            self.stale -= gone.entries as u64;
            self.keys -= gone.keys as u64;
            self.sweep_next = (self.sweep_next + 1) % self.slots.len();
        }
        self.has_to_sweep()
    }

    /// Whether a sweep has anything to remove.
    pub fn has_to_sweep(&self) -> bool {
        self.stale > 0 || !self.lost.is_empty()
    }

    /// How large the directory is. O(slots + nodes).
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
            slots_partial: self.owned.iter().filter(|slot| self.awaited.is_partial(*slot)).count(),
        }
    }

    /// Checks the counts against the tables, for tests. O(entries).
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
        let announced = self.nodes.iter().filter_map(|node| node.announced.as_deref());
        self.awaited.audit(announced, &self.owned)
    }

    fn place(&mut self, node: NodeId) -> usize {
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

    /// Makes all entries of the node stale; it has announced nothing.
    fn begin_anew(&mut self, node: NodeId) {
        let state = &mut self.nodes[usize::from(node.0)];
        self.stale += state.entries;
        state.generation += 1;
        (state.entries, state.dram, state.nvme) = (0, 0, 0);
        if let Some(announced) = state.announced.as_mut() {
            announced.lose(&SlotSet::ALL, &mut self.awaited);
        }
    }

    /// Forgets all that is known of a slot.
    fn clear(&mut self, slot: u16) {
        self.remove(slot, |_| true);
    }

    /// Removes entries of a slot.
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
