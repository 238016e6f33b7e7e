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
pub(crate) struct BlockHasher(u64);

/// Map with block numbers as keys.
pub(crate) type BlockMap<V> = HashMap<u32, V, BuildHasherDefault<BlockHasher>>;

/// Tier of one node.
#[derive(Debug)]
pub(crate) struct TierSlots {
    pub(crate) order: EvictionOrder,
    by_block: BlockMap<EntryIndex>,
    slots: Vec<Slot>,
    free: Vec<EntryIndex>,
    capacity: u64,
    /// Number of blocks of each tenant.
    usages: Vec<QuotaUsage>,
}

/// Block of a slot.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub(crate) block: u32,
    /// Block before it in its chain, or [`NO_BLOCK`](super::trace::NO_BLOCK).
    pub(crate) parent: u32,
    /// Number of blocks before it in its chain.
    pub(crate) depth: u32,
    pub(crate) tenant: u16,
    /// Number of requests that use the block: it is evictable without any.
    pub(crate) holders: u16,
    /// Whether a request used the block after it entered.
    pub(crate) is_reused: bool,
    /// Whether an engine of this node saved the block.
    pub(crate) is_saved: bool,
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
    pub(crate) fn new(policy: EvictionPolicy, capacity: u64, tenants: u16) -> TierSlots {
        TierSlots {
            order: EvictionOrder::new(policy),
            by_block: BlockMap::default(),
            slots: Vec::new(),
            free: Vec::new(),
            capacity: capacity.min(u64::from(u32::MAX)),
            usages: vec![QuotaUsage { quota: Quota::UNLIMITED, used: 0 }; usize::from(tenants.max(1))],
        }
    }

    pub(crate) fn find(&self, block: u32) -> Option<EntryIndex> {
        self.by_block.get(&block).copied()
    }

    pub(crate) fn slot(&self, entry: EntryIndex) -> &Slot {
        &self.slots[entry.0 as usize]
    }

    pub(crate) fn slot_mut(&mut self, entry: EntryIndex) -> &mut Slot {
        &mut self.slots[entry.0 as usize]
    }

    /// Number of blocks in the tier.
    pub(crate) fn len(&self) -> u64 {
        self.slots.len() as u64 - self.free.len() as u64
    }

    /// Number of slots without a block.
    pub(crate) fn free(&self) -> u64 {
        self.capacity.saturating_sub(self.len())
    }

    /// Returns the next victim if the tier is full; its block is then no longer in the tier. `Err` if no block is
    /// evictable.
    pub(crate) fn make_room(&mut self, tenant: u16) -> Result<Option<Slot>, Full> {
        if self.len() < self.capacity {
            return Ok(None);
        }
        let victim = if self.usages.len() == 1 {
            self.order.victim(Group(0))
        } else {
            let request = SpaceRequest { tenant: usize::from(tenant), bytes: 1 };
            fair::take_victim(&mut self.order, &self.usages, Some(request), |_| 1)
        };
        Ok(Some(self.remove(victim.ok_or(Full)?)))
    }

    /// Removes a block from the tier.
    pub(crate) fn remove(&mut self, entry: EntryIndex) -> Slot {
        self.order.forget(entry);
        let slot = self.slots[entry.0 as usize];
        self.by_block.remove(&slot.block);
        self.usages[usize::from(slot.tenant)].used -= 1;
        self.free.push(entry);
        slot
    }

    /// Changes the number of slots. Blocks beyond it stay until room is made.
    pub(crate) fn set_capacity(&mut self, capacity: u64) {
        self.capacity = capacity.min(u64::from(u32::MAX));
    }

    /// Puts a block into a free slot. It is not evictable yet.
    pub(crate) fn place(&mut self, slot: Slot) -> EntryIndex {
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

    /// Takes a block into use: it is not evictable.
    pub(crate) fn hold(&mut self, entry: EntryIndex) {
        self.order.remove(entry);
        let holders = &mut self.slot_mut(entry).holders;
        *holders = holders.checked_add(1).expect("a node runs fewer requests at the same time");
    }

    /// Ends one use of a block; returns whether it was the last one, so that the caller makes the block evictable.
    pub(crate) fn end_hold(&mut self, entry: EntryIndex) -> bool {
        let holders = &mut self.slot_mut(entry).holders;
        *holders = holders.checked_sub(1).expect("each use ends once");
        *holders == 0
    }

    /// Learns the parent of a block, if it is in the tier and the block has none.
    pub(crate) fn link(&mut self, entry: EntryIndex) {
        if self.order.parent(entry).is_some() {
            return;
        }
        if let Some(parent) = self.find(self.slot(entry).parent) {
            self.order.link(entry, parent);
        }
    }

    /// Makes a block evictable, as the newest of its queue.
    pub(crate) fn release(&mut self, entry: EntryIndex, facts: &Block) {
        let group = Group(self.slot(entry).tenant);
        self.order.insert(entry, &Block { group, ..*facts });
    }
}

/// No block of a full tier is evictable.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Full;
