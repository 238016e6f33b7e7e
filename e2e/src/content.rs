//! Blocks whose every byte can be checked: the content is a function of the block's key and the object's
//! index.
//!
//! No copy is needed: the expected value of any byte follows from the block's number ([`reprise_testkit::kv_function`]). Two objects
//! differ in nearly every word, and so do neighbouring words of a block.

use reprise_policy::key::KeyPart;
use reprise_policy::{BlockKey, Layout, LayoutSpec, NamespaceDigest};

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
    let spec = LayoutSpec { layers, kv_heads, head_dim: 128, tokens_per_block: 16, ..LayoutSpec::LLAMA_3_8B };
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
