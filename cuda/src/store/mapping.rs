//! The table of descriptors over the engine's KV memory, built once when it is registered.

use reprise_nvme::spec::{PAGE_BYTES, SglDescriptor};

use crate::copy::KvLayout;
use crate::gpu::GpuError;

/// Order of objects in KV memory, the last one fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvOrder {
    /// Layer, part, block: a tensor for each key and value cache.
    LayerPartBlock,
    /// Layer, block, part: key and value of a block are adjacent.
    LayerBlockPart,
    /// Block, layer, part: all objects of a block are adjacent, in the order of an extent.
    BlockLayerPart,
}

/// Geometry of KV memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvGeometry {
    /// Number of layers.
    pub layers: usize,
    /// Objects of a block in a layer: 2, or 1 with latent attention.
    pub parts: usize,
    /// Number of blocks in the memory.
    pub blocks: usize,
    /// Bytes of an object.
    pub object_bytes: usize,
    /// Order of objects.
    pub order: KvOrder,
}

impl KvGeometry {
    /// Returns the number of objects of a block.
    pub fn objects(&self) -> usize {
        self.layers * self.parts
    }

    /// Returns the size of the memory in bytes.
    pub fn bytes(&self) -> u64 {
        (self.objects() * self.blocks) as u64 * self.object_bytes as u64
    }

    /// Returns the offset of an object in the memory; `object` is layer × parts + part.
    ///
    /// Panics unless object and block are inside.
    pub fn offset(&self, object: usize, block: usize) -> u64 {
        assert!(object < self.objects() && block < self.blocks, "object {object} of block {block}");
        let (layer, part) = (object / self.parts, object % self.parts);
        let index = match self.order {
            KvOrder::LayerPartBlock => object * self.blocks + block,
            KvOrder::LayerBlockPart => (layer * self.blocks + block) * self.parts + part,
            KvOrder::BlockLayerPart => block * self.objects() + object,
        };
        index as u64 * self.object_bytes as u64
    }

    /// Returns the layout of one layer for copy kernels: its slots have the objects of that layer only.
    ///
    /// # Errors
    /// Sizes that kernels do not accept; see [`KvLayout::new`].
    ///
    /// Panics unless the layer is inside.
    pub fn layer_layout(&self, layer: usize) -> Result<KvLayout, GpuError> {
        let objects = layer * self.parts..(layer + 1) * self.parts;
        let step = match self.order {
            KvOrder::LayerPartBlock => 1,
            KvOrder::LayerBlockPart => self.parts,
            KvOrder::BlockLayerPart => self.objects(),
        };
        let too_many = |_| GpuError::Invalid(format!("{self:?} has more blocks or bytes than kernels count"));
        let blocks = u32::try_from(self.blocks).map_err(too_many)?;
        let object_bytes = u32::try_from(self.object_bytes).map_err(too_many)?;
        let offsets = objects.map(|object| self.offset(object, 0)).collect();
        KvLayout::new(offsets, step as u64 * self.object_bytes as u64, blocks, object_bytes)
    }
}

/// Memory for descriptions of KV memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescriptorMemory {
    /// This table: an SGL descriptor of 16 bytes for each object.
    pub sgl: u64,
    /// A PRP list for each object, each in its own page: the paper compares with this.
    pub prp_list_each: u64,
    /// PRP entries without a page for each list: 8 bytes for each page of KV memory.
    pub prp_entries: u64,
}

/// Descriptors of all objects of KV memory.
#[derive(Clone, Debug)]
pub struct MappingTable {
    geometry: KvGeometry,
    /// By object, then by block: a layer of a table is contiguous.
    descriptors: Vec<[u64; 2]>,
}

impl MappingTable {
    /// Describes KV memory that starts at `address` for the controller.
    ///
    /// # Errors
    /// A text if an object is not whole pages, or a descriptor cannot have its length.
    pub fn build(geometry: KvGeometry, address: u64) -> Result<MappingTable, String> {
        let bytes = u32::try_from(geometry.object_bytes).unwrap_or(0);
        if bytes == 0
            || !geometry.object_bytes.is_multiple_of(PAGE_BYTES)
            || !address.is_multiple_of(PAGE_BYTES as u64)
        {
            return Err(format!(
                "objects of {} bytes at {address:#x}: rings need objects of whole pages of {PAGE_BYTES} bytes; use more \
                 tokens per block",
                geometry.object_bytes
            ));
        }
        let all =
            (0..geometry.objects()).flat_map(|object| (0..geometry.blocks).map(move |block| (object, block)));
        let describe =
            |(object, block)| SglDescriptor::data(address + geometry.offset(object, block), bytes).words();
        Ok(MappingTable { geometry, descriptors: all.map(describe).collect() })
    }

    /// Returns the geometry of the memory.
    pub fn geometry(&self) -> &KvGeometry {
        &self.geometry
    }

    /// Returns the descriptor of an object. Panics unless object and block are inside.
    pub fn descriptor(&self, object: usize, block: usize) -> [u64; 2] {
        assert!(block < self.geometry.blocks, "block {block}");
        self.descriptors[object * self.geometry.blocks + block]
    }

    /// Returns the size of the table next to that of the alternatives.
    pub fn memory(&self) -> DescriptorMemory {
        DescriptorMemory::of(&self.geometry)
    }
}

impl DescriptorMemory {
    /// Computes the sizes for a geometry.
    pub fn of(geometry: &KvGeometry) -> DescriptorMemory {
        let objects = (geometry.objects() * geometry.blocks) as u64;
        let page = PAGE_BYTES as u64;
        DescriptorMemory {
            sgl: objects * SglDescriptor::BYTES as u64,
            prp_list_each: objects * page,
            prp_entries: geometry.bytes().div_ceil(page) * 8,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const SMALL: KvGeometry =
        KvGeometry { layers: 3, parts: 2, blocks: 5, object_bytes: 8192, order: KvOrder::LayerPartBlock };

    #[test]
    fn every_object_has_its_own_place_in_each_order() {
        for order in [KvOrder::LayerPartBlock, KvOrder::LayerBlockPart, KvOrder::BlockLayerPart] {
            let geometry = KvGeometry { order, ..SMALL };
            let table = MappingTable::build(geometry, 1 << 20).expect("whole pages");
            let all = (0..6).flat_map(|object| (0..5).map(move |block| (object, block)));
            let descriptors: Vec<SglDescriptor> =
                all.map(|(object, block)| SglDescriptor::of_words(table.descriptor(object, block))).collect();
            let places: BTreeSet<u64> = descriptors.iter().map(|one| one.address).collect();
            let expected: BTreeSet<u64> = (0..30).map(|index| (1 << 20) + index * 8192).collect();
            assert_eq!(places, expected, "{order:?}");
            assert!(descriptors.iter().all(|one| one.bytes == 8192));
        }
    }

    #[test]
    fn orders_place_neighbours_as_their_names_state() {
        let offset = |order, object, block| KvGeometry { order, ..SMALL }.offset(object, block) / 8192;
        assert_eq!(offset(KvOrder::LayerPartBlock, 0, 1), 1, "the next block");
        assert_eq!(offset(KvOrder::LayerBlockPart, 1, 0), 1, "the value of the same block");
        assert_eq!(offset(KvOrder::BlockLayerPart, 2, 0), 2, "the next layer of the same block");
    }

    /// The paper's figures for 60 GB in objects of 64 KB: 15 MB of SGLs, 3.75 GB of PRP lists.
    #[test]
    fn descriptors_of_60_gib_have_the_sizes_of_the_paper() {
        let geometry = KvGeometry {
            layers: 32,
            parts: 2,
            blocks: 15_360,
            object_bytes: 64 << 10,
            order: KvOrder::LayerPartBlock,
        };
        assert_eq!(geometry.bytes(), 60 << 30);
        let memory = DescriptorMemory::of(&geometry);
        assert_eq!(memory.sgl, 15 << 20);
        assert_eq!(memory.prp_list_each, 3840 << 20);
        assert_eq!(memory.prp_entries, 120 << 20);
        let small = MappingTable::build(SMALL, 0).expect("whole pages");
        assert_eq!(
            small.memory().sgl,
            size_of_val(small.descriptors.as_slice()) as u64,
            "what the table has"
        );
    }

    #[test]
    fn objects_that_are_not_whole_pages_are_refused_with_the_remedy() {
        for (object_bytes, address) in [(1024, 0), (0, 0), (4096, 512), (1 << 33, 0)] {
            let refused =
                MappingTable::build(KvGeometry { object_bytes, ..SMALL }, address).expect_err("refused");
            assert!(refused.contains("tokens per block"), "{refused}");
        }
    }
}
