//! Incremental scan of the whole directory, with changes in between.
//!
//! A [`Cursor`] visits the hash slots in order, and the entries of a slot in hash order. So a part is a range
//! of (slot, hash), even if entries move in the tables. A key that exists throughout is read exactly once. A
//! key that changes meanwhile is read as it is when the cursor passes.

use reprise_policy::key::HASH_SLOTS;
use reprise_policy::placement::ReplicaLocation;
use reprise_policy::{BlockKey, NodeId, Tier};

use super::{CONSIDERED_MAX, Directory, Entry};

/// Position of a scan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cursor {
    slot: u16,
    hash: u64,
}

/// A replica found by a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ReplicaEntry {
    /// Node that holds the replica.
    pub node: NodeId,
    /// Key of the block.
    pub key: BlockKey,
    /// Tier of the replica on the node.
    pub tier: Tier,
}

impl Cursor {
    /// Whether the scan is complete.
    pub fn is_at_end(self) -> bool {
        self.slot == HASH_SLOTS
    }
}

impl Directory {
    /// Replicas of a key in current inventories of live and dead nodes; `None` if its slot is not owned.
    /// Includes all nodes with a durable replica, and the first [`CONSIDERED_MAX`] others.
    pub fn holders(&self, key: &BlockKey) -> Option<impl Iterator<Item = ReplicaLocation>> {
        let current = |entry: &&Entry| entry.generation == self.nodes[usize::from(entry.node.0)].generation;
        let mut passing = 0;
        let counts = move |entry: &&Entry| {
            passing += usize::from(!entry.tiers.contains(Tier::Nvme));
            entry.tiers.contains(Tier::Nvme) || passing <= CONSIDERED_MAX
        };
        self.owned.contains(key.hash_slot()).then(|| {
            self.slot(key).of_key(key).filter(current).filter(counts).flat_map(|entry| {
                let tiers = [Tier::Dram, Tier::Nvme].into_iter().filter(|tier| entry.tiers.contains(*tier));
                tiers.map(|tier| ReplicaLocation { node: entry.node, tier })
            })
        })
    }

    /// Appends replicas of current inventories of live and dead nodes in owned slots to `read`, from the
    /// cursor on, and moves the cursor. Visits `entries_max` entries, and further ones with the hash of the
    /// last.
    pub fn read(&self, cursor: &mut Cursor, entries_max: usize, read: &mut Vec<ReplicaEntry>) {
        let mut visited = 0;
        while !cursor.is_at_end() {
            if !self.owned.contains(cursor.slot) {
                *cursor = Cursor { slot: cursor.slot + 1, hash: 0 };
                continue;
            }
            for entry in self.slots[usize::from(cursor.slot)].starting_at(cursor.hash) {
                let hash = entry.key.table_hash();
                if visited >= entries_max.max(1) && hash != cursor.hash {
                    cursor.hash = hash;
                    return;
                }
                cursor.hash = hash;
                visited += 1;
                if entry.generation == self.nodes[usize::from(entry.node.0)].generation {
                    let tiers =
                        [Tier::Dram, Tier::Nvme].into_iter().filter(|tier| entry.tiers.contains(*tier));
                    read.extend(tiers.map(|tier| ReplicaEntry { node: entry.node, key: entry.key, tier }));
                }
            }
            *cursor = Cursor { slot: cursor.slot + 1, hash: 0 };
        }
    }
}
