//! An engine's own KV memory in vLLM's layout: one allocation per layer, indexed by physical block
//! (`[blocks][parts][object]`). The blocks of a request are scattered: a block table maps its logical blocks
//! to physical ones, which are allocated in a shuffled order.

use anyhow::Context;
use reprise_buffers::{PAGE_BYTES, PageBuffer};
use reprise_policy::Layout;

use crate::kv_function::mix;

/// A physical block of the paged memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhysicalBlock(usize);

impl PhysicalBlock {
    /// Returns the number of the block in its memory.
    pub fn index(self) -> usize {
        self.0
    }
}

/// Physical blocks that no request uses.
#[derive(Debug)]
pub struct FreeBlocks(Vec<PhysicalBlock>);

impl FreeBlocks {
    /// Creates `count` free blocks in a shuffled order, always the same.
    pub fn new(count: usize) -> FreeBlocks {
        FreeBlocks(shuffled(count))
    }

    /// Allocates `count` blocks; `None` if there are fewer.
    pub fn allocate(&mut self, count: usize) -> Option<Vec<PhysicalBlock>> {
        let at = self.0.len().checked_sub(count)?;
        Some(self.0.split_off(at))
    }

    /// Returns blocks of a request to the free blocks.
    pub fn release(&mut self, blocks: Vec<PhysicalBlock>) {
        self.0.extend(blocks);
    }
}

/// Paged KV memory of one engine.
#[derive(Debug)]
pub struct PagedKv {
    layers: Vec<PageBuffer>,
    free: FreeBlocks,
    parts: usize,
    object_bytes: usize,
}

impl PagedKv {
    /// Allocates and touches memory for `blocks` blocks of `layout`.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn new(layout: &Layout, blocks: usize) -> anyhow::Result<PagedKv> {
        let parts = layout.parts() as usize;
        let object_bytes = usize::try_from(layout.object_bytes()).expect("objects fit in memory");
        let layer_bytes = (blocks * parts * object_bytes).next_multiple_of(PAGE_BYTES);
        // Page-aligned like memory of engines, and written, so that a load does not include the first touch.
        let layer = |_| {
            let mut layer = PageBuffer::new(layer_bytes).context("memory of the engine")?;
            layer.fill(0xa5);
            Ok(layer)
        };
        let layers = (0..layout.layers()).map(layer).collect::<anyhow::Result<_>>()?;
        Ok(PagedKv { layers, free: FreeBlocks::new(blocks), parts, object_bytes })
    }

    /// Allocates `count` blocks; `None` if there are fewer.
    pub fn allocate(&mut self, count: usize) -> Option<Vec<PhysicalBlock>> {
        self.free.allocate(count)
    }

    /// Returns blocks of a request to the free blocks.
    pub fn release(&mut self, blocks: Vec<PhysicalBlock>) {
        self.free.release(blocks);
    }

    /// Returns an object of a block; `object` is layer × parts + part.
    pub fn object(&self, block: PhysicalBlock, object: usize) -> &[u8] {
        let at = self.offset(block, object);
        &self.layers[object / self.parts][at..at + self.object_bytes]
    }

    /// Returns a writable object of a block.
    pub fn object_mut(&mut self, block: PhysicalBlock, object: usize) -> &mut [u8] {
        let at = self.offset(block, object);
        &mut self.layers[object / self.parts][at..at + self.object_bytes]
    }

    /// Returns the writable objects of a block in payload order.
    pub fn block_mut(&mut self, block: PhysicalBlock) -> Vec<&mut [u8]> {
        let (at, bytes) = (self.offset(block, 0), self.parts * self.object_bytes);
        let object_bytes = self.object_bytes;
        self.layers.iter_mut().flat_map(|layer| layer[at..at + bytes].chunks_mut(object_bytes)).collect()
    }

    fn offset(&self, block: PhysicalBlock, object: usize) -> usize {
        (block.0 * self.parts + object % self.parts) * self.object_bytes
    }
}

/// Returns the numbers below `count` in a fixed shuffled order (Fisher–Yates with a counter-based generator).
fn shuffled(count: usize) -> Vec<PhysicalBlock> {
    let mut order: Vec<PhysicalBlock> = (0..count).map(PhysicalBlock).collect();
    for index in (1..count).rev() {
        let other = usize::try_from(mix(index as u64) % (index as u64 + 1)).expect("below a usize");
        order.swap(index, other);
    }
    order
}

#[cfg(test)]
mod tests {
    use reprise_policy::LayoutSpec;

    use super::*;

    #[test]
    fn objects_of_different_blocks_layers_and_parts_do_not_overlap() {
        let spec =
            LayoutSpec { layers: 3, kv_heads: 1, head_dim: 8, tokens_per_block: 1, ..LayoutSpec::LLAMA_3_8B };
        let layout = spec.validate().expect("valid");
        let mut kv = PagedKv::new(&layout, 4).expect("a little memory");
        let blocks = kv.allocate(4).expect("four blocks");
        assert_eq!(kv.allocate(1), None);
        for (number, block) in blocks.iter().enumerate() {
            for object in 0..6 {
                kv.object_mut(*block, object).fill(u8::try_from(number * 6 + object).expect("small"));
            }
        }
        for (number, block) in blocks.iter().enumerate() {
            for object in 0..6 {
                let expected = u8::try_from(number * 6 + object).expect("small");
                assert!(kv.object(*block, object).iter().all(|byte| *byte == expected));
            }
        }
        let first: Vec<u8> = kv.block_mut(blocks[1]).iter().map(|object| object[0]).collect();
        assert_eq!(first, [6, 7, 8, 9, 10, 11], "the objects of a block, in order");
        kv.release(blocks);
        assert!(kv.allocate(4).is_some());
    }
}
