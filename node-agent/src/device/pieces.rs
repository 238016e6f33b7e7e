//! Splits a block into device reads.
//!
//! ```text
//!  slot on the device   | header |  o0  o1  o2 | o3  o4  o5 | o6  o7  pad |
//!  pieces               |<------- piece 0 ---->|<- piece 1 ->|<- piece 2 ->|
//! ```
//!
//! A piece is the longest run of whole objects within `read_bytes` that ends on a page boundary, but at
//! least the shortest such run. The last piece includes the padding. The header page is read with piece 0,
//! which follows it directly. Pure arithmetic; offsets are relative to the payload.

use std::ops::Range;

use reprise_agent_core::pool::header::encryption::Groups;
use reprise_policy::Layout;
use reprise_policy::layout::PAGE_BYTES;

/// The pieces of a block of one layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PieceMap {
    layout: Layout,
    objects_per_piece: u32,
}

impl PieceMap {
    /// Uses pieces of at most `read_bytes`, if the layout allows it.
    pub(super) fn new(layout: Layout, read_bytes: u64) -> PieceMap {
        let objects = layout.objects();
        // The smallest number of objects that fills whole pages; a power of two, at most `PAGE_BYTES`.
        let shift = layout.object_bytes().trailing_zeros().min(PAGE_BYTES.trailing_zeros());
        let unit = u32::try_from(PAGE_BYTES >> shift).expect("at most 4096");
        // Both are powers of two. A piece has whole groups, so that it is decrypted and verified on arrival.
        let unit = unit.max(Groups::of(&layout).map_or(1, Groups::per_group));
        let fitting = u32::try_from(read_bytes / layout.object_bytes()).unwrap_or(u32::MAX);
        let objects_per_piece = (fitting / unit * unit).max(unit).min(objects);
        PieceMap { layout, objects_per_piece }
    }

    /// Returns the number of pieces, at least one.
    pub(super) fn count(&self) -> u32 {
        self.layout.objects().div_ceil(self.objects_per_piece)
    }

    /// Returns the objects of a piece.
    pub(super) fn objects(&self, piece: u32) -> Range<u32> {
        let first = piece * self.objects_per_piece;
        first..(first + self.objects_per_piece).min(self.layout.objects())
    }

    /// Returns the byte range of a piece within the payload.
    pub(super) fn bytes(&self, piece: u32) -> Range<u64> {
        let objects = self.objects(piece);
        let start = self.object_offset(objects.start);
        let end = if objects.end == self.layout.objects() {
            self.layout.slot_bytes()
        } else {
            self.object_offset(objects.end)
        };
        start..end
    }

    /// Returns the bytes to read for a piece; the first one includes the header.
    pub(super) fn read_bytes(&self, piece: u32) -> u64 {
        let range = self.bytes(piece);
        range.end - range.start + if piece == 0 { PAGE_BYTES } else { 0 }
    }

    /// Returns the offset of an object within the payload.
    pub(super) fn object_offset(&self, object: u32) -> u64 {
        u64::from(object) * self.layout.object_bytes()
    }

    /// Returns the number of whole layers in the first `pieces` pieces.
    pub(super) fn layers(&self, pieces: u32) -> u32 {
        let objects = (pieces.saturating_mul(self.objects_per_piece)).min(self.layout.objects());
        objects / self.layout.parts()
    }

    /// Returns the layout of the block.
    pub(super) fn layout(&self) -> &Layout {
        &self.layout
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use reprise_policy::{LayoutSpec, Parts};

    use super::*;

    fn layout(layers: u16, parts: Parts, elements: (u16, u16, u16)) -> Layout {
        let (kv_heads, head_dim, tokens_per_block) = elements;
        let spec =
            LayoutSpec { layers, parts, kv_heads, head_dim, tokens_per_block, ..LayoutSpec::LLAMA_3_8B };
        spec.validate().expect("a valid layout")
    }

    #[test]
    fn llama_blocks_are_read_in_four_pieces_of_512_kib() {
        let map = PieceMap::new(layout(32, Parts::KeyValue, (8, 128, 16)), 512 << 10);
        assert_eq!((map.count(), map.objects(1), map.bytes(3)), (4, 16..32, (1536 << 10)..(2048 << 10)));
        assert_eq!((map.layers(1), map.layers(4)), (8, 32));
    }

    #[test]
    fn objects_with_half_pages_are_read_in_pairs_and_the_last_piece_with_its_padding() {
        // 61 objects of 18,432 bytes (4.5 pages): an even number per piece, and one in the last piece.
        let map = PieceMap::new(layout(61, Parts::Latent, (1, 576, 16)), 100 << 10);
        assert_eq!((map.objects(0), map.count()), (0..4, 16));
        assert_eq!(map.bytes(15), (60 * 18_432)..1_126_400);
    }

    proptest! {
        #[test]
        fn pieces_cover_every_byte_of_the_slot_once_in_whole_pages(
            layers in 1u16..100, latent: bool, kv_heads in 1u16..5, head_dim in 1u16..600, tokens in 1u16..33,
            read_bytes in 1u64..(8 << 20),
        ) {
            let parts = if latent { Parts::Latent } else { Parts::KeyValue };
            let layout = layout(layers, parts, (kv_heads, head_dim, tokens));
            let map = PieceMap::new(layout, read_bytes);
            let (mut bytes, mut objects) = (0, 0);
            for piece in 0..map.count() {
                prop_assert_eq!((map.bytes(piece).start, map.objects(piece).start), (bytes, objects));
                (bytes, objects) = (map.bytes(piece).end, map.objects(piece).end);
                prop_assert!(bytes.is_multiple_of(PAGE_BYTES) && !map.objects(piece).is_empty());
                prop_assert_eq!(map.layers(piece + 1), objects / layout.parts());
            }
            prop_assert_eq!((bytes, objects), (layout.slot_bytes(), layout.objects()));
            prop_assert_eq!(map.layers(map.count()), layout.layers());
        }
    }
}
