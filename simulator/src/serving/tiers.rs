//! Places of KV blocks in HBM, DRAM and NVMe, with the production eviction order in each tier.
//!
//! A block is in one tier at a time (TierKV §3.3). The victims of HBM go to DRAM, those of DRAM to NVMe; a victim of NVMe
//! is lost and must be computed again. The order of the victims is that of [`EvictionOrder`]: nothing in this
//! module chooses between blocks.

use reprise_policy::eviction::{Block, EntryIndex, EvictionOrder, EvictionPolicy, Group};

/// Number of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// Tier of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    /// Memory of the accelerator (T0).
    Hbm,
    /// Host or CXL memory (T1).
    Dram,
    /// SSD of the node (T2).
    Nvme,
    /// The block is in no tier.
    Lost,
}

/// Blocks that moved down.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demoted {
    /// Blocks from HBM to DRAM.
    pub to_dram: u64,
    /// Blocks from DRAM to NVMe.
    pub to_nvme: u64,
    /// Blocks that left the last tier.
    pub lost: u64,
}

/// All blocks of a node.
#[derive(Debug)]
pub struct Tiers {
    orders: [EvictionOrder; 3],
    capacity: [u64; 3],
    used: [u64; 3],
    places: Vec<Place>,
    /// Blocks that no request holds in use.
    is_pinned: Vec<bool>,
    free: Vec<BlockId>,
    /// Largest number of blocks in each tier.
    pub used_max: [u64; 3],
    /// Blocks demoted so far.
    pub demoted: Demoted,
}

impl Tiers {
    /// Creates empty tiers with capacities in blocks.
    pub fn new(policy: EvictionPolicy, capacity: [u64; 3]) -> Tiers {
        Tiers {
            orders: std::array::from_fn(|_| EvictionOrder::new(policy)),
            capacity,
            used: [0; 3],
            places: Vec::new(),
            is_pinned: Vec::new(),
            free: Vec::new(),
            used_max: [0; 3],
            demoted: Demoted::default(),
        }
    }

    /// Tier of a block.
    pub fn place(&self, block: BlockId) -> Place {
        self.places[block.0 as usize]
    }

    /// Number of blocks in a tier.
    pub fn used(&self, place: Place) -> u64 {
        self.used.get(place as usize).copied().unwrap_or(0)
    }

    /// Blocks that HBM can take without the eviction of blocks in use.
    pub fn reclaimable(&self) -> u64 {
        self.capacity[0] - self.used[0] + self.orders[0].len() as u64
    }

    /// Evicts until HBM has room for some blocks. Returns the moved blocks, or `None` if blocks in use leave no room.
    pub fn make_room(&mut self, blocks: u64) -> Option<Demoted> {
        if self.reclaimable() < blocks {
            return None;
        }
        let before = self.demoted;
        while self.capacity[0] - self.used[0] < blocks {
            self.evict(Place::Hbm);
        }
        let now = self.demoted;
        Some(Demoted {
            to_dram: now.to_dram - before.to_dram,
            to_nvme: now.to_nvme - before.to_nvme,
            lost: now.lost - before.lost,
        })
    }

    /// Adds a block in HBM, in use. The caller made room.
    pub fn create(&mut self) -> BlockId {
        let block = self.free.pop().unwrap_or_else(|| {
            self.places.push(Place::Lost);
            self.is_pinned.push(false);
            BlockId(self.places.len() as u32 - 1)
        });
        self.enter(block, Place::Hbm);
        self.is_pinned[block.0 as usize] = true;
        block
    }

    /// Marks a block as in use: it is not evicted.
    pub fn pin(&mut self, block: BlockId) {
        self.is_pinned[block.0 as usize] = true;
        if let Some(order) = self.orders.get_mut(self.places[block.0 as usize] as usize) {
            order.remove(EntryIndex(block.0));
        }
    }

    /// Ends a use of a block, which is then the most recently used one.
    pub fn unpin(&mut self, block: BlockId) {
        self.is_pinned[block.0 as usize] = false;
        self.offer(block);
    }

    /// Counts a use of a block, for policies by frequency.
    pub fn used_again(&mut self, block: BlockId) {
        if let Some(order) = self.orders.get_mut(self.places[block.0 as usize] as usize) {
            order.used(EntryIndex(block.0));
        }
    }

    /// Moves a block up. The caller made room in HBM.
    pub fn promote(&mut self, block: BlockId, to: Place) {
        self.leave(block);
        self.enter(block, to);
        if !self.is_pinned[block.0 as usize] {
            self.offer(block);
        }
    }

    /// Makes room for a block in DRAM that comes from NVMe.
    pub fn make_room_in_dram(&mut self) -> bool {
        while self.used[1] >= self.capacity[1] {
            if self.orders[1].is_empty() {
                return false;
            }
            self.evict(Place::Dram);
        }
        true
    }

    /// Removes a block, whose number may be used again.
    pub fn remove(&mut self, block: BlockId) {
        self.leave(block);
        self.places[block.0 as usize] = Place::Lost;
        self.is_pinned[block.0 as usize] = false;
        self.free.push(block);
    }

    fn evict(&mut self, from: Place) {
        let order = &mut self.orders[from as usize];
        let EntryIndex(index) =
            order.victim(Group::default()).expect("the caller checked that a block is evictable");
        let block = BlockId(index);
        match from {
            Place::Hbm => self.demote(block, Place::Dram),
            Place::Dram => self.demote(block, Place::Nvme),
            Place::Nvme | Place::Lost => self.demote(block, Place::Lost),
        }
    }

    fn demote(&mut self, block: BlockId, to: Place) {
        self.leave(block);
        match to {
            Place::Dram => self.demoted.to_dram += 1,
            Place::Nvme => self.demoted.to_nvme += 1,
            Place::Hbm | Place::Lost => self.demoted.lost += 1,
        }
        let index = to as usize;
        if to == Place::Lost || self.capacity[index] == 0 {
            self.places[block.0 as usize] = Place::Lost;
            return;
        }
        if self.used[index] >= self.capacity[index] {
            self.evict(to);
        }
        self.enter(block, to);
        self.offer(block);
    }

    fn offer(&mut self, block: BlockId) {
        let place = self.places[block.0 as usize];
        if let Some(order) = self.orders.get_mut(place as usize) {
            let facts = Block { key_hash: u64::from(block.0), bytes: 1, ..Block::default() };
            order.insert(EntryIndex(block.0), &facts);
        }
    }

    fn enter(&mut self, block: BlockId, place: Place) {
        let index = place as usize;
        self.places[block.0 as usize] = place;
        self.used[index] += 1;
        self.used_max[index] = self.used_max[index].max(self.used[index]);
        self.orders[index].attach(EntryIndex(block.0), Group::default());
    }

    fn leave(&mut self, block: BlockId) {
        let place = self.places[block.0 as usize];
        if place != Place::Lost {
            self.used[place as usize] -= 1;
            self.orders[place as usize].forget(EntryIndex(block.0));
        }
    }
}

#[cfg(test)]
mod tests {
    use reprise_policy::eviction::{Chains, EvictionKind};

    use super::*;

    fn lru(capacity: [u64; 3]) -> Tiers {
        Tiers::new(EvictionPolicy { kind: EvictionKind::Lru, chains: Chains::Ignored }, capacity)
    }

    #[test]
    fn victims_move_down_one_tier_at_a_time_in_the_order_of_the_production_policy() {
        let mut tiers = lru([2, 2, 2]);
        let mut blocks = Vec::new();
        for _ in 0..6 {
            tiers.make_room(1).expect("unpinned blocks leave room");
            let block = tiers.create();
            tiers.unpin(block);
            blocks.push(block);
        }
        let places: Vec<Place> = blocks.iter().map(|block| tiers.place(*block)).collect();
        use Place::{Dram, Hbm, Nvme};
        assert_eq!(places, [Nvme, Nvme, Dram, Dram, Hbm, Hbm]);
        tiers.make_room(1).expect("room");
        assert_eq!((tiers.place(blocks[0]), tiers.place(blocks[4])), (Place::Lost, Dram));
        assert_eq!(tiers.demoted, Demoted { to_dram: 5, to_nvme: 3, lost: 1 });
    }

    #[test]
    fn blocks_in_use_are_never_evicted() {
        let mut tiers = lru([2, 4, 0]);
        let (first, second) = (tiers.create(), tiers.create());
        assert_eq!(tiers.make_room(1), None);
        tiers.unpin(second);
        assert_eq!(tiers.make_room(1).map(|demoted| demoted.to_dram), Some(1));
        assert_eq!((tiers.place(first), tiers.place(second)), (Place::Hbm, Place::Dram));
        tiers.pin(second);
        tiers.promote(second, Place::Hbm);
        assert_eq!((tiers.place(second), tiers.used(Place::Dram)), (Place::Hbm, 0));
        assert_eq!(tiers.make_room(1), None);
    }
}
