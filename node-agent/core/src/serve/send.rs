//! What a peer receives: headers, objects, and notices about absent blocks.

use std::ops::Range;

use reprise_policy::{Layout, Tier};

use crate::cache::{Cache, FrameIndex};
use crate::context::Context;
use crate::effect::{Effect, ServeId, ServeObjects};
use crate::limits::{SERVE_PIECES_MAX, SERVE_ROUND_BYTES};
use crate::serve::Serves;

impl Serves {
    pub(super) fn send_header(
        cache: &Cache,
        cx: &mut Context,
        (serve, block): (ServeId, u32),
        frame: FrameIndex,
        tier: Tier,
    ) {
        let checksums = cache.checksums(frame).into();
        cx.emit(Effect::ServeHeader { serve, block, tier, checksums });
    }

    pub(super) fn send_objects(
        &mut self,
        cache: &Cache,
        cx: &mut Context,
        (serve, block): (ServeId, u32),
        (frame, layers): (FrameIndex, Range<u32>),
    ) {
        let layout = &cache.size_class(cache.frame(frame).size_class).layout;
        let offset = u64::from(layers.start) * layout.layer_bytes();
        let bytes = u64::from(layers.end - layers.start) * layout.layer_bytes();
        let last = layers.end == layout.layers();
        let slot = cache.frame_slot(frame);
        self.counters.serve_bytes += bytes;
        cx.emit(Effect::ServeObjects(ServeObjects { serve, block, slot, offset, bytes, last }));
    }

    pub(super) fn send_absent(&mut self, cx: &mut Context, serve: ServeId, block: u32) {
        self.counters.serve_blocks_absent += 1;
        cx.emit(Effect::ServeAbsent { serve, block });
    }
}

/// Number of layers in one round over `blocks` blocks. If there are few blocks, a round sends about
/// [`SERVE_ROUND_BYTES`] over all of them. Otherwise it sends as many layers as needed to stay near
/// [`SERVE_PIECES_MAX`] pieces.
pub(super) fn round_layers(layout: &Layout, blocks: u64) -> u32 {
    let layer_bytes = layout.layer_bytes();
    let worthwhile = SERVE_ROUND_BYTES.div_ceil(layer_bytes * blocks.max(1));
    let bounded = (blocks * u64::from(layout.layers())).div_ceil(SERVE_PIECES_MAX);
    worthwhile.max(bounded).clamp(1, u64::from(layout.layers())) as u32
}

#[cfg(test)]
mod tests {
    use reprise_policy::{Dtype, LayoutSpec, Parts};

    use super::*;

    #[test]
    fn rounds_have_a_minimum_size_and_a_bounded_number() {
        let layout = LayoutSpec {
            layers: 32,
            parts: Parts::KeyValue,
            kv_heads: 8,
            head_dim: 128,
            dtype: Dtype::Bf16,
            tokens_per_block: 16,
            tp_rank: 0,
            tp_size: 1,
        };
        let layout = layout.validate().expect("valid");
        assert_eq!(layout.layer_bytes(), 64 << 10);
        assert_eq!(round_layers(&layout, 1), 16, "1 MiB of one block");
        assert_eq!(round_layers(&layout, 16), 1, "one layer of 16 blocks is 1 MiB");
        assert_eq!(round_layers(&layout, 8192), 16, "16,384 pieces");
    }
}
