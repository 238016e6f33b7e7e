//! Keys that were evicted recently, for S3-FIFO.
//!
//! A table without lists: a key has one place, which holds the hash of the last key there and the number of
//! evictions at that time. A key counts as evicted recently for as many evictions as the order has blocks. A
//! collision forgets the older key, which costs a block its early promotion and nothing else. With as many places
//! as blocks, rounded up to a power of two, 63 to 79 % of the keys are remembered.

/// Places of the smallest table.
const PLACES_MIN: usize = 64;

/// Table of recently evicted keys: 8 bytes per place.
#[derive(Debug, Default)]
pub(super) struct Ghosts {
    places: Vec<Ghost>,
    /// Number of evictions, modulo 2^32; 0 stands for a place that was never used.
    evictions: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Ghost {
    hash: u32,
    at: u32,
}

impl Ghosts {
    /// Records an eviction from an order with this number of blocks.
    pub(super) fn add(&mut self, key_hash: u32, blocks: usize) {
        if self.places.len() < blocks.max(PLACES_MIN) {
            self.grow(blocks.max(PLACES_MIN).next_power_of_two());
        }
        self.evictions = self.evictions.wrapping_add(1).max(1);
        let at = self.place(key_hash);
        self.places[at] = Ghost { hash: key_hash, at: self.evictions };
    }

    /// Whether a key was among the last `blocks` evictions; forgets it.
    pub(super) fn take(&mut self, key_hash: u32, blocks: usize) -> bool {
        if self.places.is_empty() {
            return false;
        }
        let at = self.place(key_hash);
        let ghost = self.places[at];
        let is_here = ghost.at != 0 && ghost.hash == key_hash;
        let is_recent = (self.evictions.wrapping_sub(ghost.at) as usize) < blocks.max(PLACES_MIN);
        if is_here {
            self.places[at] = Ghost::default();
        }
        is_here && is_recent
    }

    /// Bytes of the table.
    pub(super) fn bytes(&self) -> usize {
        self.places.len() * size_of::<Ghost>()
    }

    fn grow(&mut self, places: usize) {
        let old = std::mem::replace(&mut self.places, vec![Ghost::default(); places]);
        for ghost in old.into_iter().filter(|ghost| ghost.at != 0) {
            let at = self.place(ghost.hash);
            self.places[at] = ghost;
        }
    }

    /// Place of a key. The number of places is a power of two.
    fn place(&self, key_hash: u32) -> usize {
        // Fibonacci hashing takes the high bits: callers may pass hashes with few random low bits.
        (key_hash.wrapping_mul(0x9e37_79b1) >> (u32::BITS - self.places.len().ilog2())) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_an_eviction_for_as_many_evictions_as_there_are_blocks() {
        let mut ghosts = Ghosts::default();
        assert!(!ghosts.take(7, 1000));
        ghosts.add(7, 1000);
        (0..998).for_each(|other| ghosts.add(1_000_000 + other, 1000));
        ghosts.add(8, 1000);
        assert!(ghosts.take(8, 1000));
        assert!(!ghosts.take(8, 1000), "a ghost returns once");
        ghosts.add(9, 1000);
        (0..1000).for_each(|_| ghosts.add(9 ^ 1, 1000));
        assert!(!ghosts.take(9, 1000), "too many evictions ago");
    }

    #[test]
    fn growing_keeps_recent_ghosts() {
        let mut ghosts = Ghosts::default();
        (0..32).for_each(|key| ghosts.add(key, 64));
        ghosts.add(1000, 4096);
        let kept = (0..32).filter(|key| ghosts.take(*key, 4096)).count();
        assert!(kept >= 24, "{kept} of 32 remembered");
        assert_eq!(ghosts.bytes(), 4096 * 8);
    }
}
