//! Slab: values with ids that are never reused.
//!
//! An id consists of a slot number and the slot's generation. An outdated id, for example of a fill that has
//! ended, therefore finds no value instead of a newer one. All operations are O(1).
//!
//! A slab never shrinks: it keeps the memory of its largest population, which the limits of its owner bound.

/// Id of a value in a [`Slab`]: generation in the upper half, slot number in the lower half. Never zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SlabId(pub(crate) u64);

/// Collection of values with stable ids.
#[derive(Debug)]
pub(crate) struct Slab<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot<T> {
    generation: u32,
    value: Option<T>,
}

impl SlabId {
    /// Slot number: a compact reference to a value that is known to exist.
    pub(crate) fn slot(self) -> u32 {
        (self.0 & u64::from(u32::MAX)) as u32
    }

    fn new(generation: u32, slot: u32) -> SlabId {
        SlabId(u64::from(generation) << 32 | u64::from(slot))
    }
}

impl<T> Default for Slab<T> {
    fn default() -> Self {
        Slab::new()
    }
}

impl<T> Slab<T> {
    /// Creates an empty slab.
    pub(crate) fn new() -> Slab<T> {
        Slab { slots: Vec::new(), free: Vec::new() }
    }

    /// Number of values in the slab.
    pub(crate) fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Id of the value that is added next.
    pub(crate) fn next_id(&self) -> SlabId {
        match self.free.last() {
            Some(slot) => SlabId::new(self.slots[*slot as usize].generation, *slot),
            None => SlabId::new(1, self.slots.len() as u32),
        }
    }

    /// Adds a value and returns its id.
    pub(crate) fn insert(&mut self, value: T) -> SlabId {
        if let Some(slot) = self.free.pop() {
            let place = &mut self.slots[slot as usize];
            place.value = Some(value);
            return SlabId::new(place.generation, slot);
        }
        let slot = u32::try_from(self.slots.len()).expect("populations are limited far below 2^32");
        self.slots.push(Slot { generation: 1, value: Some(value) });
        SlabId::new(1, slot)
    }

    /// Removes a value; its id is invalid from then on.
    pub(crate) fn remove(&mut self, id: SlabId) -> Option<T> {
        let place = self.slots.get_mut(id.slot() as usize)?;
        if SlabId::new(place.generation, id.slot()) != id {
            return None;
        }
        let value = place.value.take()?;
        place.generation = place.generation.wrapping_add(1).max(1);
        self.free.push(id.slot());
        Some(value)
    }

    /// Returns the value of an id.
    pub(crate) fn get(&self, id: SlabId) -> Option<&T> {
        let place = self.slots.get(id.slot() as usize)?;
        place.value.as_ref().filter(|_| SlabId::new(place.generation, id.slot()) == id)
    }

    /// Returns the value of an id, mutably.
    pub(crate) fn get_mut(&mut self, id: SlabId) -> Option<&mut T> {
        let place = self.slots.get_mut(id.slot() as usize)?;
        let generation = place.generation;
        place.value.as_mut().filter(|_| SlabId::new(generation, id.slot()) == id)
    }

    /// Returns the id of the value in a slot.
    pub(crate) fn id_at(&self, slot: u32) -> Option<SlabId> {
        let place = self.slots.get(slot as usize)?;
        place.value.as_ref().map(|_| SlabId::new(place.generation, slot))
    }

    /// Returns the value in a slot.
    pub(crate) fn at(&self, slot: u32) -> Option<&T> {
        self.slots.get(slot as usize)?.value.as_ref()
    }

    /// Returns the value in a slot, mutably.
    pub(crate) fn at_mut(&mut self, slot: u32) -> Option<&mut T> {
        self.slots.get_mut(slot as usize)?.value.as_mut()
    }

    /// Iterates all values with their ids, in the order of slots.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (SlabId, &T)> {
        self.slots.iter().enumerate().filter_map(|(slot, place)| {
            let id = SlabId::new(place.generation, slot as u32);
            place.value.as_ref().map(|value| (id, value))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_finds_only_its_own_value_until_removal() {
        let mut slab = Slab::new();
        let first = slab.insert("first");
        assert_eq!(slab.get(first), Some(&"first"));
        assert_eq!(slab.remove(first), Some("first"));
        let next = slab.next_id();
        let second = slab.insert("second");
        assert_eq!(second, next);
        assert_ne!(slab.next_id().slot(), second.slot());
        assert_eq!(second.slot(), first.slot());
        assert_eq!(slab.get(first), None);
        assert_eq!(slab.remove(first), None);
        assert_eq!(slab.get_mut(second), Some(&mut "second"));
        assert_eq!(slab.id_at(second.slot()), Some(second));
        assert_eq!(slab.len(), 1);
    }

    #[test]
    fn ids_are_never_zero() {
        let mut slab = Slab::new();
        assert_ne!(slab.insert(()), SlabId(0));
    }
}
