//! One tier of a node: slots, and the production eviction order over them.
//!
//! Blocks of a tier have one size, so a tier of a node is a number of slots. Slots of evicted blocks are reused, as the
//! agent reuses its frames.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use reprise_policy::eviction::{Block, EntryIndex, EvictionOrder, EvictionPolicy, Group, fair};
use reprise_policy::quota::{Quota, QuotaUsage, SpaceRequest};

use crate::rng::mix;

/// Hasher of block numbers.
#[derive(Debug, Default)]
pub(super) struct BlockHasher(u64);

/// Map with block numbers as keys.
pub(super) type BlockMap<V> = HashMap<u32, V, BuildHasherDefault<BlockHasher>>;

/// Tier of one node.
#[derive(Debug)]
pub(super) struct TierSlots {
    pub(super) order: EvictionOrder,
    by_block: BlockMap<EntryIndex>,
    slots: Vec<Slot>,
    free: Vec<EntryIndex>,
    capacity: u64,
    /// Number of blocks of each tenant.
    usages: Vec<QuotaUsage>,
}

/// Block of a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    pub(super) block: u32,
    /// Block before it in its chain, or [`NO_BLOCK`](super::trace::NO_BLOCK).
    pub(super) parent: u32,
    /// Number of blocks before it in its chain.
    pub(super) depth: u32,
    pub(super) tenant: u16,
    /// Whether a request used the block after it entered.
    pub(super) is_reused: bool,
    /// Whether an engine of this node saved the block.
    pub(super) is_saved: bool,
}

impl Hasher for BlockHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = mix(self.0 ^ u64::from(*byte));
        }
    }

    fn write_u32(&mut self, number: u32) {
        self.0 = mix(u64::from(number) + 1);
    }
}

impl TierSlots {
    /// Creates an empty tier with this number of slots.
    pub(super) fn new(policy: EvictionPolicy, capacity: u64, tenants: u16) -> TierSlots {
        TierSlots {
            order: EvictionOrder::new(policy),
            by_block: BlockMap::default(),
            slots: Vec::new(),
            free: Vec::new(),
            capacity: capacity.min(u64::from(u32::MAX)),
            usages: vec![QuotaUsage { quota: Quota::UNLIMITED, used: 0 }; usize::from(tenants.max(1))],
        }
    }

    pub(super) fn find(&self, block: u32) -> Option<EntryIndex> {
        self.by_block.get(&block).copied()
    }

    pub(super) fn slot(&self, entry: EntryIndex) -> &Slot {
        &self.slots[entry.0 as usize]
    }

    pub(super) fn slot_mut(&mut self, entry: EntryIndex) -> &mut Slot {
        &mut self.slots[entry.0 as usize]
    }

    /// Number of blocks in the tier.
    pub(super) fn len(&self) -> u64 {
        self.slots.len() as u64 - self.free.len() as u64
    }

    /// Returns the next victim if the tier is full; its block is then no longer in the tier. `Err` if no block is
    /// evictable.
    pub(super) fn make_room(&mut self, tenant: u16) -> Result<Option<Slot>, Full> {
        if self.len() < self.capacity {
            return Ok(None);
        }
        let victim = if self.usages.len() == 1 {
            self.order.victim(Group(0))
        } else {
            let request = SpaceRequest { tenant: usize::from(tenant), bytes: 1 };
            fair::take_victim(&mut self.order, &self.usages, Some(request), |_| 1)
        };
        let victim = victim.ok_or(Full)?;
        self.order.forget(victim);
        let slot = self.slots[victim.0 as usize];
        self.by_block.remove(&slot.block);
        self.usages[usize::from(slot.tenant)].used -= 1;
        self.free.push(victim);
        Ok(Some(slot))
    }

    /// Puts a block into a free slot. It is not evictable yet.
    pub(super) fn place(&mut self, slot: Slot) -> EntryIndex {
        let entry = match self.free.pop() {
            Some(entry) => {
                self.slots[entry.0 as usize] = slot;
                entry
            }
            None => {
                self.slots.push(slot);
                EntryIndex(u32::try_from(self.slots.len() - 1).expect("the capacity has 32 bits"))
            }
        };
        self.by_block.insert(slot.block, entry);
        self.usages[usize::from(slot.tenant)].used += 1;
        self.order.attach(entry, Group(slot.tenant));
        self.link(entry);
        entry
    }

    /// Learns the parent of a block, if it is in the tier and the block has none.
    pub(super) fn link(&mut self, entry: EntryIndex) {
        if self.order.parent(entry).is_some() {
            return;
        }
        if let Some(parent) = self.find(self.slot(entry).parent) {
            self.order.link(entry, parent);
        }
    }

    /// Makes a block evictable, as the newest of its queue.
    pub(super) fn release(&mut self, entry: EntryIndex, facts: &Block) {
        let group = Group(self.slot(entry).tenant);
        self.order.insert(entry, &Block { group, ..*facts });
    }
}

/// No block of a full tier is evictable.
#[derive(Clone, Copy, Debug)]
pub(super) struct Full;
