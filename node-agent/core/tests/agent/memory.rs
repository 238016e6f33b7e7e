//! Simulated arena memory: one number per layer of each slot that was ever written.

use std::collections::BTreeMap;

use reprise_agent_core::effect::{ArenaSlot, RegionId};
use reprise_policy::Layout;

use crate::rng::mix;

/// Content of a committed block; unique per commit.
pub(crate) type Tag = u64;

/// Contents of all slots, by address.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    slots: BTreeMap<(u16, u64), Slot>,
    /// Slots that a lost device may still write to.
    stranded: Vec<ArenaSlot>,
}

#[derive(Debug)]
struct Slot {
    bytes: u64,
    layers: Vec<Tag>,
}

impl Memory {
    /// Writes some layers of a slot.
    pub(crate) fn write(&mut self, slot: ArenaSlot, layout: &Layout, layers: std::ops::Range<u32>, tag: Tag) {
        assert!(
            !self.stranded.iter().any(|other| overlap(*other, slot)),
            "{slot:?} may be written to by a device"
        );
        let end = slot.offset + slot.bytes;
        self.slots.retain(|(region, offset), other| {
            let same = *offset == slot.offset && other.bytes == slot.bytes;
            *region != slot.region.0 || same || *offset >= end || offset + other.bytes <= slot.offset
        });
        let place = self
            .slots
            .entry((slot.region.0, slot.offset))
            .or_insert_with(|| Slot { bytes: slot.bytes, layers: Vec::new() });
        place.layers.resize(layout.layers() as usize, 0);
        place.layers[layers.start as usize..layers.end as usize].fill(tag);
    }

    /// Replaces the memory of a region by an empty one.
    pub(crate) fn renew(&mut self, region: RegionId) {
        assert!(!self.stranded.iter().any(|slot| slot.region == region), "a device may write to {region:?}");
        self.slots.retain(|(of, _), _| *of != region.0);
    }

    /// Marks a slot as writable by a lost device at any time.
    pub(crate) fn strand(&mut self, slot: ArenaSlot) {
        self.stranded.push(slot);
    }

    /// Current layers of a slot.
    pub(crate) fn layers(&self, slot: ArenaSlot) -> &[Tag] {
        self.slots.get(&(slot.region.0, slot.offset)).map_or(&[], |slot| &slot.layers)
    }

    /// Returns the content of leading layers, if all of them match the checksums and are equal.
    pub(crate) fn verify(
        &self,
        slot: ArenaSlot,
        layout: &Layout,
        checksums: &[u32],
        layers: u32,
    ) -> Option<Tag> {
        assert_eq!(checksums.len(), layout.objects() as usize, "a checksum per object");
        let found = self.layers(slot).get(..layers as usize)?;
        let first = *found.first()?;
        let expected = self::checksums(first, layout);
        let objects = (layers * layout.parts()) as usize;
        let right = found.iter().all(|tag| *tag == first) && expected[..objects] == checksums[..objects];
        right.then_some(first)
    }
}

/// Checksums of the objects of a block with this content.
pub(crate) fn checksums(tag: Tag, layout: &Layout) -> Box<[u32]> {
    (0..u64::from(layout.objects())).map(|object| mix(tag << 16 | object) as u32).collect()
}

/// Whether two slots overlap.
pub(crate) fn overlap(a: ArenaSlot, b: ArenaSlot) -> bool {
    a.region == b.region && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes
}
