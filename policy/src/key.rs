//! Block keys, which identify blocks on a node and across the cluster.

use std::borrow::Cow;
use std::fmt;

use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use sha2::{Digest, Sha256};

use crate::content::first_16;
use crate::namespace::NamespaceDigest;

/// Number of hash slots of the keys; the directory is sharded by them (DESIGN §7).
pub const HASH_SLOTS: u16 = 4096;

/// Key of a block: 16 bytes of SHA-256 over namespace, the engine's prefix-chained block hash (opaque bytes),
/// KV cache group and shard. Equal keys mean equal prefixes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(pub [u8; 16]);

impl BlockKey {
    /// Size of a key on every wire and on disk, in bytes.
    pub const SIZE: usize = 16;

    /// Derives the key of one block.
    ///
    /// `engine_hash` is the block's hash in the engine's prefix chain (32 bytes for vLLM's SHA-256). `group`
    /// is the KV cache group, `shard` the rank that holds this slice of the block.
    pub fn derive(namespace: &NamespaceDigest, engine_hash: &[u8], part: KeyPart) -> BlockKey {
        let mut digest = Sha256::new();
        digest.update(namespace.0);
        digest.update(part.group.to_be_bytes());
        digest.update(part.shard.to_be_bytes());
        digest.update(engine_hash);
        BlockKey(first_16(&digest.finalize()))
    }

    /// Parses the display form of a key: 32 hexadecimal digits.
    pub fn from_hex(text: &str) -> Option<BlockKey> {
        let (pairs, rest) = text.as_bytes().as_chunks::<2>();
        let pairs: [[u8; 2]; BlockKey::SIZE] = pairs.try_into().ok().filter(|_| rest.is_empty())?;
        let mut key = BlockKey([0; BlockKey::SIZE]);
        for (byte, [high, low]) in key.0.iter_mut().zip(pairs) {
            let digit = |digit: u8| char::from(digit).to_digit(16);
            *byte = ((digit(high)? << 4) | digit(low)?) as u8;
        }
        Some(key)
    }

    /// Hash slot of the key, `0..HASH_SLOTS`: its first 12 bits. Keys are uniform, so slots are too.
    pub fn hash_slot(&self) -> u16 {
        u16::from_be_bytes([self.0[0], self.0[1]]) >> 4
    }

    /// 64 uniform bits of the key, independent of its hash slot, for hash tables.
    pub fn table_hash(&self) -> u64 {
        u64::from_le_bytes([
            self.0[8], self.0[9], self.0[10], self.0[11], self.0[12], self.0[13], self.0[14], self.0[15],
        ])
    }

    /// Splits packed keys (16 bytes each, without separators).
    ///
    /// Returns `None` if the length is not a multiple of 16.
    pub fn unpack(packed: &[u8]) -> Option<Vec<BlockKey>> {
        let (keys, rest) = packed.as_chunks::<{ BlockKey::SIZE }>();
        rest.is_empty().then(|| keys.iter().map(|key| BlockKey(*key)).collect())
    }

    /// Packs keys into the format of [`BlockKey::unpack`].
    pub fn pack(keys: &[BlockKey]) -> Vec<u8> {
        let mut packed = Vec::with_capacity(keys.len() * BlockKey::SIZE);
        for key in keys {
            packed.extend_from_slice(&key.0);
        }
        packed
    }
}

impl fmt::Debug for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The display form.
impl Serialize for BlockKey {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for BlockKey {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<BlockKey, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        BlockKey::from_hex(&text).ok_or_else(|| {
            D::Error::custom(format!("invalid block key '{text}': expected 32 hexadecimal digits"))
        })
    }
}

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Slice of an engine's block that a key identifies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyPart {
    /// KV cache group of the engine (0 if it has one group).
    pub group: u32,
    /// Rank that holds this slice of the block (tensor-parallel rank; 0 for a single rank).
    pub shard: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::namespace::NamespaceDigest;

    #[test]
    fn every_input_changes_the_key() {
        let namespace = NamespaceDigest([1; 32]);
        let base = BlockKey::derive(&namespace, b"hash", KeyPart::default());
        assert_eq!(base, BlockKey::derive(&namespace, b"hash", KeyPart::default()));
        assert_ne!(base, BlockKey::derive(&NamespaceDigest([2; 32]), b"hash", KeyPart::default()));
        assert_ne!(base, BlockKey::derive(&namespace, b"hasi", KeyPart::default()));
        assert_ne!(base, BlockKey::derive(&namespace, b"hash", KeyPart { group: 1, shard: 0 }));
        assert_ne!(base, BlockKey::derive(&namespace, b"hash", KeyPart { group: 0, shard: 1 }));
    }

    #[test]
    fn unpacks_packed_keys_and_rejects_partial_keys() {
        let keys = [BlockKey([7; 16]), BlockKey([9; 16])];
        let packed = BlockKey::pack(&keys);
        assert_eq!(BlockKey::unpack(&packed).as_deref(), Some(keys.as_slice()));
        assert_eq!(BlockKey::unpack(&packed[..31]), None);
    }

    #[test]
    fn parses_displayed_keys_and_rejects_other_text() {
        let key = BlockKey([0xf1; 16]);
        assert_eq!(BlockKey::from_hex(&key.to_string()), Some(key));
        assert_eq!(BlockKey::from_hex(&key.to_string().to_uppercase()), Some(key));
        for text in [
            "",
            "f1",
            "+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1+1",
            "ä111111111111111111111111111111",
            &"f1".repeat(17),
        ] {
            assert_eq!(BlockKey::from_hex(text), None, "{text}");
        }
        assert_eq!(BlockKey::from_hex(&key.to_string()[..31]), None);
    }
}
