//! The contents of an arena: one number per layer of each slot that was written.

use std::collections::BTreeMap;
use std::ops::Range;

use reprise_agent_core::effect::{ArenaSlot, RegionId};
use reprise_policy::Layout;

use crate::rng::mix;

/// Content of a committed block: a unique number per commit.
pub(crate) type Tag = u64;

/// Bit of a tag that marks damage by a memory fault.
const DAMAGE: Tag = 1 << 40;
/// Bit of a tag that marks damage by a medium fault: no reader may ever get such content.
const ROT: Tag = 1 << 41;

/// Contents of an arena; see the module.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    slots: BTreeMap<(u16, u64), Slot>,
    /// Slots that a lost device may write to.
    stranded: Vec<ArenaSlot>,
}

#[derive(Debug)]
struct Slot {
    bytes: u64,
    layers: Vec<Tag>,
}

impl Memory {
    /// Writes some layers of a slot, and keeps the others.
    pub(crate) fn write(&mut self, slot: ArenaSlot, layers_all: u32, layers: Range<u32>, tags: &[Tag]) {
        let stranded = self.stranded.iter().any(|other| overlap(*other, slot));
        assert!(!stranded, "{slot:?} was used again although a lost device may write to it");
        // Slots in memory do not overlap, so their ends have the order of their offsets.
        let region = slot.region.0;
        let before_end = self.slots.range((region, 0)..(region, slot.offset + slot.bytes)).rev();
        let overlapping = before_end.take_while(|((_, offset), other)| offset + other.bytes > slot.offset);
        let same = |offset: u64, bytes: u64| (offset, bytes) == (slot.offset, slot.bytes);
        let gone = overlapping.filter(|((_, offset), other)| !same(*offset, other.bytes));
        let gone: Vec<(u16, u64)> = gone.map(|(place, _)| *place).collect();
        gone.iter().for_each(|place| drop(self.slots.remove(place)));
        let empty = || Slot { bytes: slot.bytes, layers: Vec::new() };
        let place = self.slots.entry((region, slot.offset)).or_insert_with(empty);
        place.layers.resize(layers_all as usize, 0);
        place.layers[layers.start as usize..layers.end as usize].copy_from_slice(tags);
    }

    /// Replaces the memory of a region by an empty one.
    pub(crate) fn renew(&mut self, region: RegionId) {
        assert!(!self.stranded.iter().any(|slot| slot.region == region), "a device may write to {region:?}");
        self.slots.retain(|(of, _), _| *of != region.0);
    }

    /// Records that a device may write to a slot at any time.
    pub(crate) fn strand(&mut self, slot: ArenaSlot) {
        self.stranded.push(slot);
    }

    /// Returns the current layers of a slot.
    pub(crate) fn layers(&self, slot: ArenaSlot) -> &[Tag] {
        self.slots.get(&(slot.region.0, slot.offset)).map_or(&[], |slot| &slot.layers)
    }

    /// Injects a fault: bits of a slot flip. `which` selects the slot.
    pub(crate) fn damage(&mut self, which: u64) {
        let count = self.slots.len().max(1) as u64;
        if let Some(slot) = self.slots.values_mut().nth((which % count) as usize) {
            change(&mut slot.layers, which >> 32, DAMAGE);
        }
    }
}

/// Injects a medium fault: changes one layer of stored content.
pub(crate) fn rot(layers: &mut [Tag], which: u64) {
    change(layers, which, ROT);
}

fn change(layers: &mut [Tag], which: u64, bit: Tag) {
    let count = layers.len() as u64;
    if let Some(layer) = layers.get_mut((which % count.max(1)) as usize) {
        *layer |= bit;
    }
}

/// Reports whether layers in memory are wrong because of a memory fault. Checks detect all other damage
/// before it reaches memory.
pub(crate) fn is_damaged(layers: &[Tag]) -> bool {
    layers.iter().any(|tag| tag & DAMAGE != 0)
}

/// Reports whether layers on a medium are wrong because of a fault of the medium, or of the memory that they
/// were written from.
pub(crate) fn is_rotten(layers: &[Tag]) -> bool {
    layers.iter().any(|tag| tag & (DAMAGE | ROT) != 0)
}

/// Returns the content of layers that start at layer `first`, if every layer matches the block's checksums
/// and all agree.
pub(crate) fn verified(layers: &[Tag], first: u32, layout: &Layout, checksums: &[u32]) -> Option<Tag> {
    let tag = *layers.first()?;
    let parts = layout.parts() as usize;
    let objects = first as usize * parts..(first as usize + layers.len()) * parts;
    let expected = self::checksums(tag, layout);
    let right = expected.get(objects.clone())? == checksums.get(objects)?;
    (right && layers.iter().all(|other| *other == tag)).then_some(tag)
}

/// Returns the checksums of the objects of a block with this content.
pub(crate) fn checksums(tag: Tag, layout: &Layout) -> Box<[u32]> {
    (0..u64::from(layout.objects())).map(|object| mix(tag << 16 | object) as u32).collect()
}

/// Reports whether two slots overlap.
pub(crate) fn overlap(a: ArenaSlot, b: ArenaSlot) -> bool {
    a.region == b.region && a.offset < b.offset + b.bytes && b.offset < a.offset + a.bytes
}
