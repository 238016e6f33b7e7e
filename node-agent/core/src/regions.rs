//! Sets of arena regions.

use std::collections::BTreeMap;

/// Regions whose memory a session has received, by position in the arena, with the generation of the memory.
#[derive(Debug, Default)]
pub(crate) struct RegionSet {
    generations: BTreeMap<u16, u32>,
}

impl RegionSet {
    /// Adds the memory of a region, which replaces an earlier one; returns whether it is new.
    pub(crate) fn insert(&mut self, region: u16, generation: u32) -> bool {
        self.generations.insert(region, generation) != Some(generation)
    }

    /// Iterates the regions with their generations.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u16, u32)> {
        self.generations.iter().map(|(region, generation)| (*region, *generation))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_a_region_is_new_to_a_set_once() {
        let mut set = RegionSet::default();
        assert!(set.insert(3, 0) && !set.insert(3, 0));
        assert!(set.insert(3000, 7) && !set.insert(3000, 7));
        assert!(set.insert(3, 1) && !set.insert(3, 1), "the region has new memory");
        assert_eq!(set.iter().collect::<Vec<_>>(), [(3, 1), (3000, 7)]);
    }
}
