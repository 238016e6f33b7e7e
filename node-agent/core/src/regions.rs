//! Sets of arena regions.

/// Set of regions, by position in the arena.
#[derive(Debug, Default)]
pub(crate) struct RegionSet {
    words: Vec<u64>,
}

impl RegionSet {
    /// Adds a region; returns whether it is new.
    pub(crate) fn insert(&mut self, region: u16) -> bool {
        let (word, bit) = (usize::from(region / 64), 1 << (region % 64));
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        let before = self.words[word];
        self.words[word] |= bit;
        before & bit == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn region_is_new_to_a_set_once() {
        let mut set = RegionSet::default();
        assert!(set.insert(3));
        assert!(!set.insert(3));
        assert!(set.insert(3000));
        assert!(!set.insert(3000));
        assert!(set.insert(2));
    }
}
