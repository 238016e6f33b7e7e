//! Block key → replicas, for all nodes of the cluster.
//!
//! Invariants:
//! * A lookup answers replicas of the current inventory of live nodes only, never the asking node's own.
//! * A node's inventory is replaced, or the node forgotten, in O(1): entries carry the number (generation) of the
//!   inventory they belong to, and those of an older one are invisible at once. [`Directory::sweep`] removes them
//!   little by little.
//! * Updates of a registration are applied in sequence, each change once. What comes twice is skipped; after a gap
//!   nothing is applied until the node announces its whole inventory.
//! * An older registration (epoch) changes nothing.
//!
//! Whether a node lives is not kept here: the caller passes [`LiveNodes`]. A dead node's replicas stay, unanswered,
//! until it is forgotten, so that a node that was only out of reach need not announce everything again.
//!
//! Cost: 24 bytes an entry plus slack (`directory/table.rs`), one entry for each key and node whatever its tiers;
//! a change and a lookup are O(1) in the size of the directory.
//!
//! Deliberately absent: locks, time, the choice among replicas.

mod changes;
mod reading;
mod table;

use std::ops::Range;

use reprise_policy::key::HASH_SLOTS;
use reprise_policy::{BlockKey, Epoch, NodeId, Tier};

use crate::live::LiveNodes;
pub use changes::{BadChanges, Changes, Operation};
pub use reading::{Cursor, HeldReplica};
use table::{Entry, KeyCount, Table, Tiers};

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
    /// By node number.
    nodes: Vec<Node>,
    keys: u64,
    /// Entries of older inventories, still in the tables.
    stale: u64,
    /// Hash slot that the next sweep begins with.
    sweep_next: usize,
    updates: u64,
}

/// A replica as a lookup answers it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Replica {
    /// Who holds it.
    pub node: NodeId,
    /// Where it lies there.
    pub tier: Tier,
}

/// Answers of a lookup; reused between lookups it does not allocate.
#[derive(Clone, Debug, Default)]
pub struct Found {
    offsets: Vec<u32>,
    replicas: Vec<Replica>,
    /// Inventory number that is visible to the asker, by node; 0 for none.
    visible: Vec<u32>,
}

/// Some changes of one node.
#[derive(Clone, Copy, Debug)]
pub struct Update<'a> {
    /// Whose.
    pub node: NodeId,
    /// Its registration.
    pub epoch: Epoch,
    /// Number of the first change within the registration.
    pub sequence: u64,
    /// What they are to what was announced before.
    pub begin: Begin,
    /// The changes, in order.
    pub changes: Changes<'a>,
}

/// Whether an update continues or replaces what the node has announced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Begin {
    /// More of the same.
    Continue,
    /// A whole inventory begins: everything announced before is gone.
    Inventory,
}

/// What became of an update.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Updated {
    /// It belongs to a registration that is not the current one.
    Fenced,
    /// `applied` are the indices of its changes that were applied: all, a tail (the rest was there already), or none.
    /// `expected` is the sequence number of the next change; the sender has a gap when it is not the end of its update.
    Expecting {
        /// Sequence number of the next change.
        expected: u64,
        /// Indices of the changes applied.
        applied: Range<usize>,
    },
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
#[derive(Clone, Copy, Debug, Default)]
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
}

impl Default for Directory {
    fn default() -> Directory {
        Directory::new()
    }
}

impl Directory {
    /// An empty directory.
    pub fn new() -> Directory {
        Directory {
            slots: std::iter::repeat_with(Table::default).take(usize::from(HASH_SLOTS)).collect(),
            nodes: Vec::new(),
            keys: 0,
            stale: 0,
            sweep_next: 0,
            updates: 0,
        }
    }

    /// A node registered: its inventory is empty until it announces one. Nothing happens when `epoch` is not newer
    /// than what is known. O(1).
    pub fn register(&mut self, node: NodeId, epoch: Epoch) {
        let index = usize::from(node.0);
        if self.nodes.len() <= index {
            self.nodes.resize(index + 1, Node::default());
        }
        if self.nodes[index].epoch < epoch {
            self.begin_inventory(node);
            let state = &mut self.nodes[index];
            (state.epoch, state.registered, state.expected) = (epoch, true, 0);
        }
    }

    /// A node is gone for good, or must register again: all it announced is invisible from now on and further updates
    /// of this registration are fenced. Nothing happens when `epoch` is not the current one. O(1).
    pub fn forget(&mut self, node: NodeId, epoch: Epoch) {
        if self.registered(node, epoch).is_some() {
            self.begin_inventory(node);
            self.nodes[usize::from(node.0)].registered = false;
        }
    }

    /// Applies changes of a node. Long updates are better applied in parts, with consecutive sequence numbers and
    /// `Begin::Inventory` on the first part only.
    pub fn update(&mut self, update: &Update<'_>) -> Updated {
        let Some(node) = self.registered(update.node, update.epoch) else { return Updated::Fenced };
        let expected = node.expected;
        if update.begin == Begin::Inventory {
            if update.sequence < expected {
                // Sent twice: what came after it must not be forgotten.
                return Updated::Expecting { expected, applied: 0..0 };
            }
            self.begin_inventory(update.node);
            self.nodes[usize::from(update.node.0)].expected = update.sequence;
        } else if update.sequence > expected {
            return Updated::Expecting { expected, applied: 0..0 };
        }
        let count = update.changes.len();
        let known = self.nodes[usize::from(update.node.0)].expected.saturating_sub(update.sequence);
        let first = usize::try_from(known).map_or(count, |known| known.min(count));
        for (key, operation) in update.changes.range(first..count).iter() {
            match operation {
                Operation::Announce(tier) => self.announce(update.node, key, tier),
                Operation::Withdraw(tier) => self.withdraw(update.node, key, tier),
            }
        }
        self.updates += (count - first) as u64;
        let node = &mut self.nodes[usize::from(update.node.0)];
        node.expected += (count - first) as u64;
        Updated::Expecting { expected: node.expected, applied: first..count }
    }

    /// Finds the replicas of keys on live nodes other than `asking`, at most [`REPLICAS_PER_KEY_MAX`] a key, into
    /// `found`. Hot: no allocation once `found` has grown.
    pub fn lookup(&self, keys: &[BlockKey], live: &LiveNodes, asking: Option<NodeId>, found: &mut Found) {
        found.clear();
        found.visible.extend(self.nodes.iter().enumerate().map(|(number, node)| {
            let id = NodeId(u16::try_from(number).expect("node numbers have 16 bits"));
            if live.contains(id) && asking != Some(id) { node.generation } else { 0 }
        }));
        for group in keys.chunks(LOOKUP_GROUP) {
            // All places of the group are asked for before the first is looked at: the waits for memory overlap.
            let touched = group.iter().fold(0, |all, key| all ^ self.slot(key).touch(key));
            std::hint::black_box(touched);
            for key in group {
                found.collect(self.slot(key).of_key(key));
            }
        }
    }

    /// Removes entries of older inventories, looking at `places_max` places of the tables or a little more. Returns
    /// whether there is more to do.
    pub fn sweep(&mut self, places_max: usize) -> bool {
        let mut looked_at = 0;
        while self.stale > 0 && looked_at < places_max {
            let nodes = &self.nodes;
            let slot = &mut self.slots[self.sweep_next];
            looked_at += 1 + slot.bytes() / size_of::<Entry>();
            let gone = slot.retain(|entry| entry.generation == nodes[usize::from(entry.node.0)].generation);
            self.stale -= gone.entries as u64;
            self.keys -= gone.keys as u64;
            self.sweep_next = (self.sweep_next + 1) % self.slots.len();
        }
        self.stale > 0
    }

    /// Entries of older inventories that a sweep has yet to remove.
    pub fn stale_entries(&self) -> u64 {
        self.stale
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
        Ok(())
    }

    fn slot(&self, key: &BlockKey) -> &Table {
        &self.slots[usize::from(key.hash_slot())]
    }

    fn registered(&self, node: NodeId, epoch: Epoch) -> Option<&Node> {
        self.nodes.get(usize::from(node.0)).filter(|node| node.registered && node.epoch == epoch)
    }

    /// Makes all entries of the node stale.
    fn begin_inventory(&mut self, node: NodeId) {
        let state = &mut self.nodes[usize::from(node.0)];
        self.stale += state.entries;
        *state = Node { generation: state.generation + 1, entries: 0, dram: 0, nvme: 0, ..*state };
    }

    fn announce(&mut self, node: NodeId, key: BlockKey, tier: Tier) {
        let slot = &mut self.slots[usize::from(key.hash_slot())];
        let state = &mut self.nodes[usize::from(node.0)];
        let generation = state.generation;
        match slot.entry_mut(&key, node) {
            Some(entry) if entry.generation == generation => {
                if entry.tiers.contains(tier) {
                    return;
                }
                entry.tiers = entry.tiers.with(tier);
            }
            Some(entry) => {
                (entry.generation, entry.tiers) = (generation, Tiers::NONE.with(tier));
                self.stale -= 1;
                state.entries += 1;
            }
            None => {
                let count = slot.insert(Entry { key, generation, node, tiers: Tiers::NONE.with(tier) });
                self.keys += u64::from(count == KeyCount::Changed);
                state.entries += 1;
            }
        }
        *state.in_tier(tier) += 1;
    }

    fn withdraw(&mut self, node: NodeId, key: BlockKey, tier: Tier) {
        let slot = &mut self.slots[usize::from(key.hash_slot())];
        let state = &mut self.nodes[usize::from(node.0)];
        let Some(entry) = slot.entry_mut(&key, node) else { return };
        if entry.generation != state.generation {
            self.stale -= 1;
        } else if !entry.tiers.contains(tier) {
            return;
        } else {
            *state.in_tier(tier) -= 1;
            let left = entry.tiers.without(tier);
            if !left.is_empty() {
                entry.tiers = left;
                return;
            }
            state.entries -= 1;
        }
        let (_, count) = slot.remove(&key, node).expect("the entry was just found");
        self.keys -= u64::from(count == KeyCount::Changed);
    }
}

impl Node {
    fn in_tier(&mut self, tier: Tier) -> &mut u64 {
        match tier {
            Tier::Dram => &mut self.dram,
            Tier::Nvme => &mut self.nvme,
        }
    }
}

impl Found {
    /// Keys answered.
    pub fn keys(&self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// Replicas of the key at `index` of the lookup.
    pub fn of(&self, index: usize) -> &[Replica] {
        &self.replicas[self.offsets[index] as usize..self.offsets[index + 1] as usize]
    }

    /// All replicas, key after key.
    pub fn replicas(&self) -> &[Replica] {
        &self.replicas
    }

    /// Where each key's replicas begin in [`Found::replicas`], and the end: one more than there are keys.
    pub fn offsets(&self) -> &[u32] {
        &self.offsets
    }

    fn clear(&mut self) {
        self.offsets.clear();
        self.replicas.clear();
        self.visible.clear();
        self.offsets.push(0);
    }

    /// Adds the answer for the next key.
    #[inline]
    fn collect<'a>(&mut self, entries: impl Iterator<Item = &'a Entry>) {
        let first = self.replicas.len();
        for entry in entries {
            if entry.generation != self.visible[usize::from(entry.node.0)] {
                continue;
            }
            for tier in [Tier::Dram, Tier::Nvme] {
                if entry.tiers.contains(tier) && self.replicas.len() - first < REPLICAS_PER_KEY_MAX {
                    self.replicas.push(Replica { node: entry.node, tier });
                }
            }
        }
        // 8,192 keys × 16 replicas are far from 32 bits.
        self.offsets.push(self.replicas.len() as u32);
    }
}
