//! Model of the demo: Llama-3-8B's shape, scaled down by an explicit factor.
//!
//! Llama-3-8B has 32 layers and 8 KV heads of 128 in bf16, 128 KiB per token, so one trace block of 512
//! tokens has 64 MiB and the conversation trace 11 TiB. The scale divides tokens and heads but not layers,
//! parts, head dimension and dtype, so the number of blocks, objects and operations stays that of the trace.

use anyhow::{Context, bail};
use reprise_policy::{Dtype, Layout, LayoutSpec, Parts};

use crate::trace::TOKENS_PER_HASH_ID;

/// KV heads of Llama-3-8B.
const KV_HEADS: u32 = 8;

/// Default scale: 64 MiB / 1024 = 64 KiB per block; 64 objects of 1 KiB.
pub const SCALE_DEFAULT: u32 = 1024;

/// Scales that divide tokens (512) and heads (8) evenly: powers of two up to 512 × 8.
const SCALE_MAX: u32 = 4096;

/// Returns the layout of a trace block with 1/`scale` of Llama-3-8B's bytes.
///
/// # Errors
/// `scale` is not a power of two from 1 to 4096, or a block is too large for a slot.
pub fn llama_3_8b_scaled(scale: u32) -> anyhow::Result<Layout> {
    if !scale.is_power_of_two() || scale > SCALE_MAX {
        bail!("invalid --scale {scale}: expected a power of two from 1 to {SCALE_MAX}");
    }
    let heads_divisor = scale.min(KV_HEADS);
    let tokens = TOKENS_PER_HASH_ID as u32 / (scale / heads_divisor);
    LayoutSpec {
        layers: 32,
        parts: Parts::KeyValue,
        kv_heads: u16::try_from(KV_HEADS / heads_divisor).expect("at most 8"),
        head_dim: 128,
        dtype: Dtype::Bf16,
        tokens_per_block: u16::try_from(tokens).expect("at most 512"),
        tp_rank: 0,
        tp_size: 1,
    }
    .validate()
    .with_context(|| format!("--scale {scale}"))
}

/// Returns lower-case hexadecimal digits.
pub fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string cannot fail");
        text
    })
}

/// Reads a layout from the hexadecimal digits of its encoding, the argument of the engine process.
pub fn layout_from_hex(text: &str) -> anyhow::Result<Layout> {
    let mut encoded = [0; 16];
    if text.len() != 32 || !text.is_ascii() {
        bail!("invalid layout: expected 32 hexadecimal digits");
    }
    for (index, byte) in encoded.iter_mut().enumerate() {
        *byte =
            u8::from_str_radix(&text[index * 2..index * 2 + 2], 16).context("expected hexadecimal digits")?;
    }
    Layout::decode(&encoded).context("invalid layout")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_scale_gives_64_kib_blocks_of_64_objects() {
        let layout = llama_3_8b_scaled(SCALE_DEFAULT).expect("valid");
        assert_eq!((layout.block_bytes(), layout.objects(), layout.object_bytes()), (64 << 10, 64, 1024));
    }

    #[test]
    fn powers_of_two_scale_exactly_and_other_scales_are_rejected() {
        for scale in [1, 2, 8, 64, 4096] {
            let layout = llama_3_8b_scaled(scale).expect("valid");
            assert_eq!(layout.block_bytes() * u64::from(scale), 64 << 20);
        }
        assert!(llama_3_8b_scaled(3).is_err());
        assert!(llama_3_8b_scaled(8192).is_err());
    }

    #[test]
    fn layout_round_trips_through_the_command_line() {
        let layout = llama_3_8b_scaled(64).expect("valid");
        assert_eq!(layout_from_hex(&hex(&layout.encode())).expect("reads"), layout);
        assert!(layout_from_hex("zz").is_err());
    }
}
