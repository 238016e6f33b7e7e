//! Keys that were refused once, for the mode `second_use`.
//!
//! A table without lists: a key has one place, which holds a fingerprint of the last key there. A collision
//! forgets the older key, which costs a block one more use before it is admitted. Two keys of one place with equal
//! fingerprints (1 in 2^32) admit a block one use too early.

/// Places: with blocks of 2 MiB, the keys of 2 TiB of refused writes. 4 MiB of memory.
const PLACES: usize = 1 << 20;

/// Table of refused keys.
#[derive(Debug)]
pub(super) struct SeenKeys {
    fingerprints: Vec<u32>,
}

impl SeenKeys {
    pub(super) fn new() -> SeenKeys {
        SeenKeys { fingerprints: vec![0; PLACES] }
    }

    /// Creates a table that remembers nothing and needs no memory.
    pub(super) fn disabled() -> SeenKeys {
        SeenKeys { fingerprints: Vec::new() }
    }

    /// Remembers a refused key.
    pub(super) fn add(&mut self, key_hash: u64) {
        let (at, fingerprint) = place(key_hash);
        if let Some(place) = self.fingerprints.get_mut(at) {
            *place = fingerprint;
        }
    }

    /// Whether a key is remembered; forgets it.
    pub(super) fn take(&mut self, key_hash: u64) -> bool {
        let (at, fingerprint) = place(key_hash);
        let Some(place) = self.fingerprints.get_mut(at).filter(|place| **place == fingerprint) else {
            return false;
        };
        *place = 0;
        true
    }
}

/// Place and fingerprint of a key. A fingerprint of 0 stands for an empty place.
fn place(key_hash: u64) -> (usize, u32) {
    let mixed = key_hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((mixed >> 44) as usize % PLACES, (mixed as u32) | 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remembers_most_keys_until_others_take_their_places() {
        let mut seen = SeenKeys::new();
        (0..100_000).for_each(|key| seen.add(key));
        let kept = (0..100_000).filter(|key| seen.take(*key)).count();
        assert!(kept > 90_000, "{kept} of 100,000 in 1,048,576 places");
        assert!(!seen.take(1), "a key returns once");
    }
}
