//! Geometry of one model's KV cache on one rank.
//!
//! The payload of a block consists of its objects in *layer-major* order: object index = layer × parts +
//! part. A load that reads a prefix of the payload thus has complete first layers, which per-layer progress
//! requires. An object contains `tokens_per_block × kv_heads × head_dim` elements of `dtype`. Example:
//! Llama-3-8B has 32 layers, 8 KV heads of 128, bf16 and 16 tokens per block: 32 KiB per object, 64 objects,
//! 2 MiB per block.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::content::first_16;

/// Alignment of everything that a device transfers: offsets, lengths, memory.
pub const PAGE_BYTES: u64 = 4096;

/// Maximum objects of one block: their checksums must fit into the 4 KiB header page of a slot.
pub const OBJECTS_MAX: u32 = 960;

/// Maximum payload bytes of one block.
pub const BLOCK_BYTES_MAX: u64 = 128 << 20;

/// Element type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Dtype {
    /// bfloat16, 2 bytes.
    Bf16 = 1,
    /// IEEE half precision, 2 bytes.
    Fp16 = 2,
    /// IEEE single precision, 4 bytes.
    Fp32 = 3,
    /// 8-bit float (e4m3 or e5m2), 1 byte.
    Fp8 = 4,
    /// 8-bit integer, 1 byte.
    Int8 = 5,
}

impl Dtype {
    /// Size of one element in bytes.
    pub fn bytes(self) -> u64 {
        match self {
            Dtype::Bf16 | Dtype::Fp16 => 2,
            Dtype::Fp32 => 4,
            Dtype::Fp8 | Dtype::Int8 => 1,
        }
    }

    /// Returns the type with a number read from a wire or disk, if it is valid.
    pub fn from_wire(number: u8) -> Option<Dtype> {
        [Dtype::Bf16, Dtype::Fp16, Dtype::Fp32, Dtype::Fp8, Dtype::Int8]
            .into_iter()
            .find(|dtype| *dtype as u8 == number)
    }
}

/// Parts of one layer of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Parts {
    /// One latent (multi-head latent attention).
    Latent = 1,
    /// Keys and values separately.
    KeyValue = 2,
}

impl Parts {
    /// Returns the parts with a number read from a wire or disk, if it is valid.
    pub fn from_wire(number: u8) -> Option<Parts> {
        match number {
            1 => Some(Parts::Latent),
            2 => Some(Parts::KeyValue),
            _ => None,
        }
    }
}

/// Layout parameters before their validation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayoutSpec {
    /// Number of layers on this rank.
    pub layers: u16,
    /// Parts of each layer.
    pub parts: Parts,
    /// Number of KV heads on this rank (1 for a latent).
    pub kv_heads: u16,
    /// Number of elements per head and token.
    pub head_dim: u16,
    /// Type of the elements.
    pub dtype: Dtype,
    /// Number of tokens per block.
    pub tokens_per_block: u16,
    /// This rank within its tensor-parallel group, `0..tp_size`.
    pub tp_rank: u16,
    /// Number of ranks of the tensor-parallel group.
    pub tp_size: u16,
}

/// Reason why a [`LayoutSpec`] is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// A dimension is zero.
    #[error("layout: '{0}' must be at least 1")]
    Zero(&'static str),
    /// The rank is outside its group.
    #[error("layout: tp_rank must be below tp_size")]
    Rank,
    /// The block has more objects than a slot's header page has room for checksums.
    #[error("layout: {0} objects (layers × parts) exceed the limit of {OBJECTS_MAX}")]
    Objects(u32),
    /// The block exceeds [`BLOCK_BYTES_MAX`].
    #[error(
        "layout: a block of {0} bytes exceeds the limit of {BLOCK_BYTES_MAX}; use fewer tokens per block"
    )]
    BlockBytes(u64),
}

/// Validated layout, from which all sizes derive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Layout {
    spec: LayoutSpec,
}

/// First 16 bytes of SHA-256 over a layout's canonical encoding: equal digests mean interchangeable payloads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LayoutDigest(pub [u8; 16]);

impl LayoutSpec {
    /// Llama-3-8B in bf16 on one rank, with 16 tokens per block: 2 MiB.
    pub const LLAMA_3_8B: LayoutSpec = LayoutSpec {
        layers: 32,
        parts: Parts::KeyValue,
        kv_heads: 8,
        head_dim: 128,
        dtype: Dtype::Bf16,
        tokens_per_block: 16,
        tp_rank: 0,
        tp_size: 1,
    };

    /// Validates the dimensions.
    ///
    /// # Errors
    /// [`LayoutError`] with the field and the limit.
    pub fn validate(self) -> Result<Layout, LayoutError> {
        let dimensions = [
            ("layers", self.layers),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("tokens_per_block", self.tokens_per_block),
            ("tp_size", self.tp_size),
        ];
        if let Some((name, _)) = dimensions.into_iter().find(|(_, value)| *value == 0) {
            return Err(LayoutError::Zero(name));
        }
        if self.tp_rank >= self.tp_size {
            return Err(LayoutError::Rank);
        }
        let layout = Layout { spec: self };
        if layout.objects() > OBJECTS_MAX {
            return Err(LayoutError::Objects(layout.objects()));
        }
        if layout.block_bytes() > BLOCK_BYTES_MAX {
            return Err(LayoutError::BlockBytes(layout.block_bytes()));
        }
        Ok(layout)
    }
}

impl Layout {
    /// Returns the dimensions of the layout.
    pub fn spec(&self) -> &LayoutSpec {
        &self.spec
    }

    /// Number of layers of a block.
    pub fn layers(&self) -> u32 {
        u32::from(self.spec.layers)
    }

    /// Number of objects of one layer of a block: 1 or 2.
    pub fn parts(&self) -> u32 {
        self.spec.parts as u32
    }

    /// Number of tokens of a block.
    pub fn tokens(&self) -> u64 {
        u64::from(self.spec.tokens_per_block)
    }

    /// Number of objects of a block: layers × parts.
    pub fn objects(&self) -> u32 {
        self.layers() * self.parts()
    }

    /// Size of one object in bytes.
    pub fn object_bytes(&self) -> u64 {
        u64::from(self.spec.tokens_per_block)
            * u64::from(self.spec.kv_heads)
            * u64::from(self.spec.head_dim)
            * self.spec.dtype.bytes()
    }

    /// Size of one layer of a block in bytes.
    pub fn layer_bytes(&self) -> u64 {
        self.object_bytes() * u64::from(self.parts())
    }

    /// Size of a block's payload in bytes.
    pub fn block_bytes(&self) -> u64 {
        self.object_bytes() * u64::from(self.objects())
    }

    /// Size of the payload rounded up to whole pages: the space of a slot in the arena and, behind the header
    /// page, on a device. The padding is zero.
    pub fn slot_bytes(&self) -> u64 {
        self.block_bytes().next_multiple_of(PAGE_BYTES)
    }

    /// Computes the digest of the layout.
    pub fn digest(&self) -> LayoutDigest {
        LayoutDigest(first_16(&Sha256::digest(self.encode())))
    }

    /// Canonical 16-byte encoding, as stored on disk and sent to peers (little-endian).
    pub fn encode(&self) -> [u8; 16] {
        let spec = &self.spec;
        let mut out = [0; 16];
        out[0..2].copy_from_slice(&spec.layers.to_le_bytes());
        out[2] = spec.parts as u8;
        out[3] = spec.dtype as u8;
        out[4..6].copy_from_slice(&spec.kv_heads.to_le_bytes());
        out[6..8].copy_from_slice(&spec.head_dim.to_le_bytes());
        out[8..10].copy_from_slice(&spec.tokens_per_block.to_le_bytes());
        out[10..12].copy_from_slice(&spec.tp_rank.to_le_bytes());
        out[12..14].copy_from_slice(&spec.tp_size.to_le_bytes());
        out
    }

    /// Parses the encoding of [`Layout::encode`]; `None` if the layout is invalid.
    pub fn decode(bytes: &[u8; 16]) -> Option<Layout> {
        let field = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        if bytes[14..] != [0, 0] {
            return None;
        }
        LayoutSpec {
            layers: field(0),
            parts: Parts::from_wire(bytes[2])?,
            dtype: Dtype::from_wire(bytes[3])?,
            kv_heads: field(4),
            head_dim: field(6),
            tokens_per_block: field(8),
            tp_rank: field(10),
            tp_size: field(12),
        }
        .validate()
        .ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_3_8b_has_32_kib_objects_and_2_mib_blocks() {
        let layout = LayoutSpec::LLAMA_3_8B.validate().expect("valid");
        assert_eq!((layout.object_bytes(), layout.objects(), layout.block_bytes()), (32 << 10, 64, 2 << 20));
        assert_eq!(layout.slot_bytes(), 2 << 20);
    }

    #[test]
    fn latent_has_one_part_and_slot_of_whole_pages() {
        let spec = LayoutSpec {
            layers: 61,
            parts: Parts::Latent,
            kv_heads: 1,
            head_dim: 576,
            ..LayoutSpec::LLAMA_3_8B
        };
        let layout = spec.validate().expect("valid");
        assert_eq!((layout.objects(), layout.object_bytes()), (61, 18_432));
        assert_eq!(layout.block_bytes(), 1_124_352);
        assert_eq!(layout.slot_bytes(), 1_126_400);
    }

    #[test]
    fn rejects_invalid_dimensions_by_name() {
        assert_eq!(
            LayoutSpec { layers: 0, ..LayoutSpec::LLAMA_3_8B }.validate(),
            Err(LayoutError::Zero("layers"))
        );
        assert_eq!(LayoutSpec { tp_rank: 1, ..LayoutSpec::LLAMA_3_8B }.validate(), Err(LayoutError::Rank));
        assert_eq!(
            LayoutSpec { layers: 481, ..LayoutSpec::LLAMA_3_8B }.validate(),
            Err(LayoutError::Objects(962))
        );
        let large = LayoutSpec { layers: 480, tokens_per_block: 256, ..LayoutSpec::LLAMA_3_8B };
        assert!(matches!(large.validate(), Err(LayoutError::BlockBytes(_))));
    }

    #[test]
    fn encoding_round_trips_and_every_field_changes_the_digest() {
        let layout = LayoutSpec::LLAMA_3_8B.validate().expect("valid");
        assert_eq!(Layout::decode(&layout.encode()), Some(layout));
        let sharded = LayoutSpec { tp_size: 2, ..LayoutSpec::LLAMA_3_8B }.validate().expect("valid");
        assert_ne!(layout.digest(), sharded.digest());
        let mut bad = layout.encode();
        bad[2] = 3;
        assert_eq!(Layout::decode(&bad), None);
    }
}
