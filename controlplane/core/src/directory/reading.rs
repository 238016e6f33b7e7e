//! Reading the whole directory in parts, with changes in between.
//!
//! A [`Cursor`] goes through the hash slots in order and through the entries of a slot in the order of their hash, so a part
//! is a range of (slot, hash) whatever moves in the tables meanwhile: every key that there is throughout is read exactly
//! once, and a key that comes or goes meanwhile is read as it is when the cursor passes its place.

use reprise_policy::key::HASH_SLOTS;
use reprise_policy::placement::Holding;
use reprise_policy::{BlockKey, NodeId, Tier};

use super::{CONSIDERED_MAX, Directory, Entry};

/// How far a reading has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cursor {
    slot: u16,
    hash: u64,
}

/// A replica that was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HeldReplica {
    /// Who holds it.
    pub node: NodeId,
    /// The block.
    pub key: BlockKey,
    /// Where it lies there.
    pub tier: Tier,
}

impl Cursor {
    /// Whether everything has been read.
    pub fn is_at_end(self) -> bool {
        self.slot == HASH_SLOTS
    }
}

impl Directory {
    /// Replicas of a key in current inventories, whether their nodes live or not: all of nodes that have it durably, and of
    /// others the first [`CONSIDERED_MAX`]; `None` when its slot is not owned.
    pub fn holdings(&self, key: &BlockKey) -> Option<impl Iterator<Item = Holding>> {
        let current = |entry: &&Entry| entry.generation == self.nodes[usize::from(entry.node.0)].generation;
        let mut passing = 0;
        let counts = move |entry: &&Entry| {
            passing += usize::from(!entry.tiers.contains(Tier::Nvme));
            entry.tiers.contains(Tier::Nvme) || passing <= CONSIDERED_MAX
        };
        self.owned.contains(key.hash_slot()).then(|| {
            self.slot(key).of_key(key).filter(current).filter(counts).flat_map(|entry| {
                let tiers = [Tier::Dram, Tier::Nvme].into_iter().filter(|tier| entry.tiers.contains(*tier));
                tiers.map(|tier| Holding { node: entry.node, tier })
            })
        })
    }

    /// Adds the replicas of current inventories, in slots that are owned, from the cursor on to `read`, looking at `entries_max` entries and those that
    /// share the last one's hash, and moves the cursor. Nodes need not live to be read.
    pub fn read(&self, cursor: &mut Cursor, entries_max: usize, read: &mut Vec<HeldReplica>) {
        let mut looked_at = 0;
        while !cursor.is_at_end() {
            if !self.owned.contains(cursor.slot) {
                *cursor = Cursor { slot: cursor.slot + 1, hash: 0 };
                continue;
            }
            for entry in self.slots[usize::from(cursor.slot)].starting_at(cursor.hash) {
                let hash = entry.key.table_hash();
                if looked_at >= entries_max.max(1) && hash != cursor.hash {
                    cursor.hash = hash;
                    return;
                }
                cursor.hash = hash;
                looked_at += 1;
                if entry.generation == self.nodes[usize::from(entry.node.0)].generation {
                    let tiers =
                        [Tier::Dram, Tier::Nvme].into_iter().filter(|tier| entry.tiers.contains(*tier));
                    read.extend(tiers.map(|tier| HeldReplica { node: entry.node, key: entry.key, tier }));
                }
            }
            *cursor = Cursor { slot: cursor.slot + 1, hash: 0 };
        }
    }
}
