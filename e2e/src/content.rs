//! Blocks whose every byte can be checked: the content is a function of the block's key and the object's
//! index.
//!
//! No copy is needed: the expected value of any byte follows from the block's number ([`kv_function`]). Two objects
//! differ in nearly every word, and so do neighbouring words of a block.

use reprise_policy::key::KeyPart;
use reprise_policy::{BlockKey, Dtype, Layout, LayoutSpec, NamespaceDigest, Parts};
use reprise_testkit::kv_function::{self, ObjectPlace};

/// The namespace of all blocks that the tests save.
pub const NAMESPACE: NamespaceDigest = NamespaceDigest([0x5e; 32]);

/// Returns a layout of 4 layers of 2 objects of 4 KiB: 32 KiB a block, 36 KiB a device slot, 58 slots in 2
/// MiB.
pub fn small() -> Layout {
    layout_of(4, 1)
}

/// Returns a layout of 16 layers of 2 objects of 32 KiB: 1 MiB a block.
pub fn large() -> Layout {
    layout_of(16, 8)
}

/// Returns a layout with objects of `kv_heads × 4 KiB`: 16 tokens, heads of 128 elements of 2 bytes.
pub fn layout_of(layers: u16, kv_heads: u16) -> Layout {
    let spec = LayoutSpec {
        layers,
        parts: Parts::KeyValue,
        kv_heads,
        head_dim: 128,
        dtype: Dtype::Bf16,
        tokens_per_block: 16,
        tp_rank: 0,
        tp_size: 1,
    };
    spec.validate().expect("dimensions are positive and the block is small")
}

/// Returns the bytes of a block on a device: its header page and its payload.
pub fn device_slot_bytes(layout: &Layout) -> u64 {
    layout.slot_bytes() + reprise_policy::layout::PAGE_BYTES
}

/// Returns the key of a block.
pub fn key(number: u64) -> BlockKey {
    BlockKey::derive(&NAMESPACE, &number.to_le_bytes(), KeyPart::default())
}

/// Returns the keys of blocks, in order.
pub fn keys(numbers: &[u64]) -> Vec<BlockKey> {
    numbers.iter().copied().map(key).collect()
}

/// Writes the bytes of one object. The length must be a multiple of 8.
pub fn write_object(key: &BlockKey, object: u32, into: &mut [u8]) {
    assert!(into.len().is_multiple_of(8), "objects are whole words");
    kv_function::fill(&key.0, place(object), into);
}

/// Returns the offset of the first wrong word of an object, or `None` if all words are right.
pub fn first_difference(key: &BlockKey, object: u32, bytes: &[u8]) -> Option<usize> {
    assert!(bytes.len().is_multiple_of(8), "objects are whole words");
    kv_function::first_difference(&key.0, place(object), bytes)
}

/// Content depends on an object's index alone, so that no layout is needed to check it.
fn place(object: u32) -> ObjectPlace {
    ObjectPlace { layer: 0, part: object }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detects_a_flipped_bit_in_an_object() {
        let mut object = vec![0; 4096];
        write_object(&key(7), 3, &mut object);
        assert_eq!(first_difference(&key(7), 3, &object), None);
        object[1001] ^= 0x10;
        assert_eq!(first_difference(&key(7), 3, &object), Some(1000));
    }

    #[test]
    fn content_differs_between_blocks_and_between_objects() {
        let mut object = vec![0; 64];
        write_object(&key(7), 3, &mut object);
        assert_eq!(first_difference(&key(8), 3, &object), Some(0));
        assert_eq!(first_difference(&key(7), 2, &object), Some(0));
    }
}
