//! One call for each layer: from blocks to transfers.
//!
//! Hot path: no allocation but that of the caller's lists, no division for each object. Work is in proportion to the
//! objects of the layer.

use reprise_nvme::spec::SglDescriptor;

use crate::store::MappingTable;

/// Where a block is: its extent, and its place in KV memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockPlace {
    /// Index of the device among those of the caller.
    pub device: usize,
    /// Offset of the payload on the device in bytes, a multiple of 4,096.
    pub payload: u64,
    /// Number of the block in KV memory.
    pub slot: usize,
}

/// A transfer of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Planned {
    /// Address of the memory for the controller.
    pub address: u64,
    /// Offset on the device in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u32,
    /// Index of the block in the call, for its status.
    pub block: u32,
}

/// Work of planning since its counters were created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PlanCounters {
    /// Calls of [`plan_layer`].
    pub calls: u64,
    /// Transfers that the calls have planned.
    pub transfers: u64,
    /// Bytes of descriptors, places and transfers that the calls have read or written. The data is not among them.
    pub touched_bytes: u64,
}

/// Transfers of one device.
#[derive(Debug)]
pub struct DevicePlan<'a> {
    /// Descriptors of the KV memory, with addresses for the controller of the device.
    pub table: &'a MappingTable,
    /// Maximum bytes of a transfer.
    pub transfer_max: u64,
    /// Planned transfers.
    pub planned: Vec<Planned>,
}

/// Plans all transfers of one layer of some blocks, and appends them to the lists of their devices. Objects that are
/// adjacent in memory become one transfer.
///
/// Panics if a block or the layer is outside of the table, or for a block of another device.
pub fn plan_layer(
    (blocks, layer): (&[BlockPlace], usize),
    devices: &mut [DevicePlan<'_>],
    counters: &mut PlanCounters,
) {
    let (mut transfers, mut objects_read) = (0, 0);
    for (index, block) in (0..).zip(blocks) {
        let DevicePlan { table, transfer_max, planned: list } = &mut devices[block.device];
        let geometry = table.geometry();
        let objects = layer * geometry.parts..(layer + 1) * geometry.parts;
        objects_read += objects.len();
        let mut next: Option<Planned> = None;
        let mut offset = block.payload + (objects.start * geometry.object_bytes) as u64;
        for object in objects {
            let SglDescriptor { address, bytes, .. } =
                SglDescriptor::of_words(table.descriptor(object, block.slot));
            match &mut next {
                // Objects of a layer are adjacent in the extent.
                Some(planned)
                    if planned.address + u64::from(planned.bytes) == address
                        && u64::from(planned.bytes) + u64::from(bytes) <= *transfer_max =>
                {
                    planned.bytes += bytes;
                }
                _ => {
                    transfers += u64::from(next.is_some());
                    list.extend(next.take());
                    next = Some(Planned { address, offset, bytes, block: index });
                }
            }
            offset += u64::from(bytes);
        }
        transfers += u64::from(next.is_some());
        list.extend(next);
    }
    let read = size_of_val(blocks) + objects_read * SglDescriptor::BYTES;
    counters.calls += 1;
    counters.transfers += transfers;
    counters.touched_bytes += read as u64 + transfers * size_of::<Planned>() as u64;
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::store::{KvGeometry, KvOrder};

    const BASE: u64 = 1 << 24;

    fn table(order: KvOrder) -> MappingTable {
        let geometry = KvGeometry { layers: 4, parts: 2, blocks: 16, object_bytes: 4096, order };
        MappingTable::build(geometry, BASE).expect("whole pages")
    }

    fn places(slots: &[usize]) -> Vec<BlockPlace> {
        let place = |(index, slot): (usize, &usize)| BlockPlace {
            device: index % 2,
            payload: 4096 + index as u64 * (1 << 20),
            slot: *slot,
        };
        slots.iter().enumerate().map(place).collect()
    }

    fn plan(order: KvOrder, blocks: &[BlockPlace], transfer_max: u64) -> (Vec<Vec<Planned>>, PlanCounters) {
        let (table, mut counters) = (table(order), PlanCounters::default());
        let device = || DevicePlan { table: &table, transfer_max, planned: Vec::new() };
        let mut devices = [device(), device()];
        for layer in 0..4 {
            plan_layer((blocks, layer), &mut devices, &mut counters);
        }
        (devices.map(|device| device.planned).into(), counters)
    }

    #[test]
    fn adjacent_objects_of_a_layer_are_one_transfer() {
        let blocks = places(&[3, 9]);
        let (devices, counters) = plan(KvOrder::LayerBlockPart, &blocks, 1 << 20);
        assert_eq!(devices[0].len(), 4, "one for each layer");
        assert!(devices.iter().flatten().all(|planned| planned.bytes == 8192));
        assert_eq!(counters.calls, 4);
        let (devices, _) = plan(KvOrder::LayerBlockPart, &blocks, 4096);
        assert_eq!(devices[0].len(), 8, "a transfer has at most this length");
        let (devices, _) = plan(KvOrder::LayerPartBlock, &blocks, 1 << 20);
        assert_eq!(devices[0].len(), 8, "key and value are apart");
    }

    #[test]
    fn work_grows_with_blocks_and_layers_only() {
        let touched = |count: usize| {
            let slots: Vec<usize> = (0..count).collect();
            let (_, counters) = plan(KvOrder::LayerPartBlock, &places(&slots), 1 << 20);
            assert_eq!(counters.calls, 4, "one for each layer, for any number of blocks");
            counters.touched_bytes
        };
        assert_eq!(touched(16), 2 * touched(8));
        assert!(touched(1) / 8 < 128, "less than 128 bytes for each object");
    }

    proptest! {
        /// Every byte of every object has exactly one transfer, between its places in memory and in the extent.
        #[test]
        fn transfers_cover_every_object_once(
            slots in proptest::collection::btree_set(0..16usize, 1..16),
            order in 0..3u8,
            pages in 1..4u64,
        ) {
            let order = [KvOrder::LayerPartBlock, KvOrder::LayerBlockPart, KvOrder::BlockLayerPart][usize::from(order)];
            let slots: Vec<usize> = slots.into_iter().collect();
            let blocks = places(&slots);
            let (devices, counters) = plan(order, &blocks, pages * 4096);
            let geometry = *table(order).geometry();
            let mut covered = BTreeMap::new();
            for (device, planned) in devices.iter().enumerate().flat_map(|(device, all)| all.iter().map(move |one| (device, one))) {
                prop_assert!(u64::from(planned.bytes) <= pages * 4096);
                for page in 0..u64::from(planned.bytes) / 4096 {
                    let key = (device, planned.offset + page * 4096);
                    prop_assert_eq!(covered.insert(key, planned.address + page * 4096), None);
                }
            }
            let mut expected = BTreeMap::new();
            for block in &blocks {
                for object in 0..geometry.objects() {
                    let offset = block.payload + object as u64 * 4096;
                    expected.insert((block.device, offset), BASE + geometry.offset(object, block.slot));
                }
            }
            prop_assert_eq!(covered, expected);
            let transfers = devices.iter().map(|all| all.len() as u64).sum::<u64>();
            prop_assert_eq!(counters.transfers, transfers);
        }
    }
}
