//! An engine's own KV memory, laid out as vLLM lays it out: per layer one allocation, indexed by physical
//! block (`[blocks][parts][object]`). The blocks of a request are scattered: a block table maps its
//! logical blocks to physical ones, which are handed out in a shuffled order.

use reprise_policy::Layout;

use crate::kv_function::mix;

/// A physical block of the paged memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PhysicalBlock(usize);

/// Paged KV memory of one engine.
#[derive(Debug)]
pub(crate) struct PagedKv {
    layers: Vec<Vec<u8>>,
    free: Vec<PhysicalBlock>,
    parts: usize,
    object_bytes: usize,
}

impl PagedKv {
    /// Memory for `blocks` blocks of `layout`, touched.
    pub(crate) fn new(layout: &Layout, blocks: usize) -> PagedKv {
        let parts = layout.parts() as usize;
        let object_bytes = usize::try_from(layout.object_bytes()).expect("objects fit in memory");
        // Written, not only reserved: the first touch of memory must not be measured as part of a load.
        let layers = (0..layout.layers()).map(|_| vec![0xa5; blocks * parts * object_bytes]).collect();
        PagedKv { layers, free: shuffled(blocks), parts, object_bytes }
    }

    /// Takes `count` blocks; `None` when there are not as many.
    pub(crate) fn allocate(&mut self, count: usize) -> Option<Vec<PhysicalBlock>> {
        let at = self.free.len().checked_sub(count)?;
        Some(self.free.split_off(at))
    }

    /// Gives blocks back.
    pub(crate) fn release(&mut self, blocks: Vec<PhysicalBlock>) {
        self.free.extend(blocks);
    }

    /// One object of a block. `object` = layer × parts + part.
    pub(crate) fn object(&self, block: PhysicalBlock, object: usize) -> &[u8] {
        let at = self.offset(block, object);
        &self.layers[object / self.parts][at..at + self.object_bytes]
    }

    /// One object of a block, to write.
    pub(crate) fn object_mut(&mut self, block: PhysicalBlock, object: usize) -> &mut [u8] {
        let at = self.offset(block, object);
        &mut self.layers[object / self.parts][at..at + self.object_bytes]
    }

    fn offset(&self, block: PhysicalBlock, object: usize) -> usize {
        (block.0 * self.parts + object % self.parts) * self.object_bytes
    }
}

/// The numbers below `count` in a fixed shuffled order (Fisher–Yates with a counter-based generator).
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
    use reprise_policy::{Dtype, LayoutSpec, Parts};

    use super::*;

    #[test]
    fn objects_of_different_blocks_layers_and_parts_do_not_overlap() {
        let spec = LayoutSpec {
            layers: 3,
            parts: Parts::KeyValue,
            kv_heads: 1,
            head_dim: 8,
            dtype: Dtype::Bf16,
            tokens_per_block: 1,
            tp_rank: 0,
            tp_size: 1,
        };
        let layout = spec.validate().expect("valid");
        let mut kv = PagedKv::new(&layout, 4);
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
        kv.release(blocks);
        assert!(kv.allocate(4).is_some());
    }
}
