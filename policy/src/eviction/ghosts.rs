//! Keys that were evicted recently, for S3-FIFO.
//!
//! A table of buckets, each of which is one cache line with the fingerprints of the last [`BUCKET_GHOSTS`] keys that
//! were evicted there, newest first. A key counts as evicted recently for about as many evictions as the order has
//! blocks: the number of fingerprints of a bucket that count follows from the number of blocks. Buckets fill unevenly,
//! so some keys count for a fifth longer or shorter.
//!
//! A key is found wrongly if another one has its bucket and its fingerprint: 1 in 200 keys with 10 million blocks. Such
//! a block is promoted early, nothing else.
//!
//! Evicted keys wait in a short list, from which they enter the table together: their cache misses overlap.

/// Fingerprints of a bucket: 64 bytes.
const BUCKET_GHOSTS: usize = 32;

/// Buckets of the smallest table; a power of two.
const BUCKETS_MIN: usize = 2;

/// Keys that enter the table together.
const PENDING_MAX: usize = 16;

/// Table of recently evicted keys: 2 to 4 bytes per block.
#[derive(Debug, Default)]
pub(super) struct Ghosts {
    /// Their number is 0 or a power of two.
    buckets: Vec<Bucket>,
    /// The last evicted keys, which are not in the table yet; 0: none.
    pending: [u32; PENDING_MAX],
    pending_count: usize,
}

/// Fingerprints, newest first; 0: none.
#[derive(Clone, Copy, Debug, Default)]
#[repr(align(64))]
struct Bucket([u16; BUCKET_GHOSTS]);

impl Ghosts {
    /// Records an eviction from an order with this number of blocks. A key hash is not 0.
    pub(super) fn add(&mut self, key_hash: u32, blocks: usize) {
        self.pending[self.pending_count] = key_hash;
        self.pending_count += 1;
        if self.pending_count == PENDING_MAX {
            self.enter_pending(blocks);
        }
    }

    /// Whether a key was evicted recently from an order with this number of blocks; forgets it.
    pub(super) fn take(&mut self, key_hash: u32, blocks: usize) -> bool {
        if let Some(pending) = self.pending.iter_mut().find(|pending| **pending == key_hash) {
            *pending = 0;
            return true;
        }
        if self.buckets.is_empty() {
            return false;
        }
        let counting = blocks.div_ceil(self.buckets.len()).min(BUCKET_GHOSTS);
        let bucket = self.bucket(key_hash);
        let Bucket(ghosts) = &mut self.buckets[bucket];
        let found = ghosts[..counting].iter_mut().find(|ghost| **ghost == fingerprint(key_hash));
        found.map(|ghost| *ghost = 0).is_some()
    }

    /// Bytes of the table.
    pub(super) fn bytes(&self) -> usize {
        self.buckets.len() * size_of::<Bucket>()
    }

    fn enter_pending(&mut self, blocks: usize) {
        let wanted = blocks.div_ceil(BUCKET_GHOSTS).next_power_of_two().max(BUCKETS_MIN);
        if self.buckets.len() < wanted {
            self.grow(wanted);
        }
        self.pending_count = 0;
        for key_hash in std::mem::take(&mut self.pending).into_iter().filter(|key_hash| *key_hash != 0) {
            let bucket = self.bucket(key_hash);
            let Bucket(ghosts) = &mut self.buckets[bucket];
            ghosts.copy_within(..BUCKET_GHOSTS - 1, 1);
            ghosts[0] = fingerprint(key_hash);
        }
    }

    /// Grows the table. Which of the new buckets a fingerprint belongs to is not known, so each of them has it.
    fn grow(&mut self, wanted: usize) {
        let old = std::mem::take(&mut self.buckets);
        let copies = wanted / old.len().max(1);
        self.buckets = match old.is_empty() {
            true => vec![Bucket::default(); wanted],
            false => old.iter().flat_map(|bucket| std::iter::repeat_n(*bucket, copies)).collect(),
        };
    }

    /// Bucket of a key.
    fn bucket(&self, key_hash: u32) -> usize {
        // Fibonacci hashing takes the high bits: callers may pass hashes with few random low bits.
        (key_hash.wrapping_mul(0x9e37_79b1) >> (u32::BITS - self.buckets.len().ilog2())) as usize
    }
}

/// Fingerprint of a key in its bucket; not 0.
fn fingerprint(key_hash: u32) -> u16 {
    ((key_hash ^ key_hash >> 16) as u16).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Evicts these keys; the hashes of neighbours are not alike.
    fn evict(ghosts: &mut Ghosts, keys: std::ops::Range<u32>, blocks: usize) {
        keys.for_each(|key| ghosts.add(hash(key), blocks));
    }

    fn hash(key: u32) -> u32 {
        (key + 1).wrapping_mul(0x85eb_ca6b)
    }

    fn returning(ghosts: &mut Ghosts, keys: std::ops::Range<u32>, blocks: usize) -> usize {
        keys.filter(|key| ghosts.take(hash(*key), blocks)).count()
    }

    #[test]
    fn remembers_an_eviction_for_about_as_many_evictions_as_there_are_blocks() {
        for blocks in [1000, 1500, 10_000] {
            let keys = blocks as u32;
            let mut ghosts = Ghosts::default();
            assert_eq!(returning(&mut ghosts, 0..1000, blocks), 0);
            evict(&mut ghosts, 0..3 * keys, blocks);
            let late = returning(&mut ghosts, 3 * keys - keys / 2..3 * keys, blocks);
            assert!(late >= blocks / 2 * 99 / 100, "{late} of the last {}", blocks / 2);
            let early = returning(&mut ghosts, 0..keys, blocks);
            assert!(early <= blocks / 50, "{early} of {blocks}, evicted long ago");
        }
    }

    #[test]
    fn ghost_returns_once() {
        let mut ghosts = Ghosts::default();
        evict(&mut ghosts, 0..PENDING_MAX as u32 + 3, 1000);
        for key in [0, PENDING_MAX as u32 + 1] {
            assert!(ghosts.take(hash(key), 1000));
            assert!(!ghosts.take(hash(key), 1000));
        }
    }

    #[test]
    fn keys_that_were_not_evicted_are_rarely_found() {
        let mut ghosts = Ghosts::default();
        evict(&mut ghosts, 0..100_000, 100_000);
        let found = returning(&mut ghosts, 1_000_000..1_100_000, 100_000);
        assert!(found < 1000, "{found} of 100,000");
    }

    #[test]
    fn growing_keeps_recent_ghosts() {
        let mut ghosts = Ghosts::default();
        evict(&mut ghosts, 0..32, 64);
        evict(&mut ghosts, 32..48, 4096);
        assert_eq!(returning(&mut ghosts, 0..48, 4096), 48);
        assert_eq!(ghosts.bytes(), 4096 * 2);
    }
}
