//! vLLM-compatible prefix hashes, algorithm `sha256_cbor`.
//!
//! A block's hash is SHA-256 over the canonical CBOR of `(parent hash, (token ids…), extra keys or null)`.
//! The parent of the first block is the hash of a seed. A router, a planner or our reference engine thus
//! computes the same bytes as an engine that runs with `--prefix-caching-hash-algo sha256_cbor`.
//!
//! Cost: a block of 16 tokens encodes to about 120 bytes, two to three compressions of SHA-256. The encoding
//! uses one buffer that is reused along the chain, so a prompt of 8,192 blocks needs no allocation per block.
//!
//! The CBOR is written by hand (RFC 8949 §4.2.1: shortest heads, definite lengths): only four types are
//! needed, and a general encoder would build a value tree per block. Out of scope: the pickle-based `sha256`,
//! which is not reproducible for multimodal keys, and any use of these hashes as keys (see
//! [`crate::key::BlockKey`]).

use std::num::NonZeroU16;
use std::slice::ChunksExact;

use sha2::{Digest, Sha256};

pub mod extra;

pub use extra::{ExtraKey, MultimodalItem, PromptExtras};

/// Seed that vLLM uses when `PYTHONHASHSEED` is not set.
pub const DEFAULT_SEED: &str = "vllm-none-hash";

/// Hash of a block, or of the seed.
pub type PrefixHash = [u8; 32];

/// CBOR major types in use (RFC 8949 §3.1), in the upper three bits of a head.
const UNSIGNED: u8 = 0 << 5;
const NEGATIVE: u8 = 1 << 5;
const BYTES: u8 = 2 << 5;
const TEXT: u8 = 3 << 5;
const ARRAY: u8 = 4 << 5;

/// Encoding of CBOR `null`.
const NULL: u8 = 0xf6;

/// Parent of a prompt's first block: SHA-256 of the canonical CBOR of the seed string.
pub fn none_hash(seed: &str) -> PrefixHash {
    let mut encoding = Encoding::default();
    encoding.text(seed);
    encoding.digest()
}

/// Hash of one full block of `tokens` after `parent`. `extra` is empty for plain text.
pub fn block_hash(parent: &PrefixHash, tokens: &[u32], extra: &[ExtraKey<'_>]) -> PrefixHash {
    let mut encoding = Encoding::default();
    encoding.block(parent, tokens, extra);
    encoding.digest()
}

/// Iterator over the hashes of a prompt's full blocks; a partial last block has no hash.
#[derive(Debug)]
pub struct PrefixChain<'a> {
    parent: PrefixHash,
    blocks: ChunksExact<'a, u32>,
    block: usize,
    tokens_per_block: usize,
    extras: &'a PromptExtras,
    keys: Vec<ExtraKey<'a>>,
    encoding: Encoding,
}

impl<'a> PrefixChain<'a> {
    /// Creates the chain of `tokens`, starting at `none_hash`. `extras` apply to the whole prompt.
    pub fn new(
        none_hash: PrefixHash,
        tokens: &'a [u32],
        tokens_per_block: NonZeroU16,
        extras: &'a PromptExtras,
    ) -> PrefixChain<'a> {
        let tokens_per_block = usize::from(tokens_per_block.get());
        PrefixChain {
            parent: none_hash,
            blocks: tokens.chunks_exact(tokens_per_block),
            block: 0,
            tokens_per_block,
            extras,
            keys: Vec::new(),
            encoding: Encoding::default(),
        }
    }
}

impl Iterator for PrefixChain<'_> {
    type Item = PrefixHash;

    fn next(&mut self) -> Option<PrefixHash> {
        let tokens = self.blocks.next()?;
        self.extras.keys_of_block(self.block, self.tokens_per_block, &mut self.keys);
        self.encoding.block(&self.parent, tokens, &self.keys);
        self.parent = self.encoding.digest();
        self.block += 1;
        Some(self.parent)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.blocks.size_hint()
    }
}

impl ExactSizeIterator for PrefixChain<'_> {}

/// Buffer for canonical CBOR, reused for each block.
#[derive(Debug, Default)]
struct Encoding {
    bytes: Vec<u8>,
}

impl Encoding {
    /// Returns the SHA-256 of the buffer and clears it.
    fn digest(&mut self) -> PrefixHash {
        let digest = Sha256::digest(&self.bytes);
        self.bytes.clear();
        digest.into()
    }

    /// Writes the triple that is hashed for a block.
    fn block(&mut self, parent: &PrefixHash, tokens: &[u32], extra: &[ExtraKey<'_>]) {
        self.head(ARRAY, 3);
        self.byte_string(parent);
        self.head(ARRAY, tokens.len() as u64);
        for token in tokens {
            self.head(UNSIGNED, u64::from(*token));
        }
        if extra.is_empty() {
            self.bytes.push(NULL);
            return;
        }
        self.head(ARRAY, extra.len() as u64);
        for key in extra {
            self.extra_key(key);
        }
    }

    /// Writes one extra key: a tuple that begins with its tag.
    fn extra_key(&mut self, key: &ExtraKey<'_>) {
        let fields = match key {
            ExtraKey::Lora { .. } | ExtraKey::Multimodal { .. } => 3,
            ExtraKey::CacheSalt(_) | ExtraKey::PromptEmbeds(_) => 2,
        };
        self.head(ARRAY, fields);
        match key {
            ExtraKey::Lora { name, path } => {
                self.text("lora");
                self.text(name);
                self.text(path);
            }
            ExtraKey::Multimodal { identifier, offset } => {
                self.text("mm");
                self.text(identifier);
                self.integer(*offset);
            }
            ExtraKey::CacheSalt(salt) => {
                self.text("cache_salt");
                self.text(salt);
            }
            ExtraKey::PromptEmbeds(sha256) => {
                self.text("prompt_embeds");
                self.byte_string(sha256.as_slice());
            }
        }
    }

    fn text(&mut self, text: &str) {
        self.head(TEXT, text.len() as u64);
        self.bytes.extend_from_slice(text.as_bytes());
    }

    fn byte_string(&mut self, bytes: &[u8]) {
        self.head(BYTES, bytes.len() as u64);
        self.bytes.extend_from_slice(bytes);
    }

    /// Writes a signed integer: a negative n is stored as −1 − n.
    fn integer(&mut self, value: i64) {
        match u64::try_from(value) {
            Ok(value) => self.head(UNSIGNED, value),
            Err(_) => self.head(NEGATIVE, !value as u64),
        }
    }

    /// Writes a head in its shortest form.
    fn head(&mut self, major: u8, value: u64) {
        match value {
            0..24 => self.bytes.push(major | value as u8),
            24..0x100 => self.bytes.extend_from_slice(&[major | 24, value as u8]),
            0x100..0x1_0000 => {
                self.bytes.push(major | 25);
                self.bytes.extend_from_slice(&(value as u16).to_be_bytes());
            }
            0x1_0000..0x1_0000_0000 => {
                self.bytes.push(major | 26);
                self.bytes.extend_from_slice(&(value as u32).to_be_bytes());
            }
            _ => {
                self.bytes.push(major | 27);
                self.bytes.extend_from_slice(&value.to_be_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIXTEEN: NonZeroU16 = NonZeroU16::new(16).expect("not zero");

    fn hex(hash: &PrefixHash) -> String {
        hash.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn tokens(from: u32, to: u32) -> Vec<u32> {
        (from..=to).collect()
    }

    #[test]
    fn default_seed_yields_the_golden_chain_of_vllm() {
        let none = none_hash(DEFAULT_SEED);
        assert_eq!(hex(&none), "9bd96a485ad84efdafb72ee48a1d7a69bcead0f8f0433173941b276b9581eef0");
        let first = block_hash(&none, &tokens(1, 16), &[]);
        assert_eq!(hex(&first), "cd7c51bc5a8fc8643f383a2b9e01522fba7473c669e9270c7b0bf7bf7fd01682");
        let second = block_hash(&first, &tokens(17, 32), &[]);
        assert_eq!(hex(&second), "2533ea50426b36e9e4d68296cac6bce8cf602e46957d0fe40b368b33d87bf3bf");
    }

    #[test]
    fn seed_zero_yields_its_golden_chain() {
        let none = none_hash("0");
        assert_eq!(hex(&none), "4e1195df020de59e0d65a33a4279f1183e7ae4e5d980e309f8b55adff2e61c3e");
        let first = block_hash(&none, &tokens(1, 16), &[]);
        assert_eq!(hex(&first), "202da172482d928bbc42ab25b0151e2b895f13f41002e27b2ceabcfae6d332ea");
    }

    #[test]
    fn salt_and_adapter_yield_their_golden_hashes() {
        let none = none_hash(DEFAULT_SEED);
        let salted = block_hash(&none, &tokens(1, 16), &[ExtraKey::CacheSalt("tenantA")]);
        assert_eq!(hex(&salted), "dddfd72aeffc19b852fec642c24c970df52f2e6c7f45efcd9a297df87e71152b");
        let adapted = block_hash(&none, &tokens(1, 16), &[ExtraKey::Lora { name: "ad", path: "/p" }]);
        assert_eq!(hex(&adapted), "e89ddaae68015baabf67b3b049b3f6aa63803245055a565a50de8399e25cd488");
    }

    #[test]
    fn the_low_64_bits_are_the_integer_of_the_event_stream() {
        let first = block_hash(&none_hash(DEFAULT_SEED), &tokens(1, 16), &[]);
        let low = u64::from_be_bytes(first[24..].try_into().expect("8 bytes"));
        assert_eq!(low, 8_866_452_693_264_111_234);
    }

    #[test]
    fn chain_hashes_full_blocks_only() {
        let prompt = tokens(1, 40);
        let extras = PromptExtras::default();
        let none = none_hash(DEFAULT_SEED);
        let mut chain = PrefixChain::new(none, &prompt, SIXTEEN, &extras);
        assert_eq!(chain.len(), 2);
        let first = chain.next().expect("a full block");
        assert_eq!(first, block_hash(&none, &prompt[..16], &[]));
        assert_eq!(chain.next(), Some(block_hash(&first, &prompt[16..32], &[])));
        assert_eq!(chain.next(), None);
    }

    #[test]
    fn salt_changes_every_block_although_only_the_first_contains_it() {
        let prompt = tokens(1, 32);
        let extras = PromptExtras { cache_salt: Some("tenantA".into()), ..PromptExtras::default() };
        let none = none_hash(DEFAULT_SEED);
        let hashes: Vec<PrefixHash> = PrefixChain::new(none, &prompt, SIXTEEN, &extras).collect();
        assert_eq!(hashes[0], block_hash(&none, &prompt[..16], &[ExtraKey::CacheSalt("tenantA")]));
        assert_eq!(hashes[1], block_hash(&hashes[0], &prompt[16..], &[]));
    }

    #[test]
    fn heads_are_the_shortest_of_rfc_8949_appendix_a() {
        let cases: [(i64, &[u8]); 12] = [
            (0, &[0x00]),
            (23, &[0x17]),
            (24, &[0x18, 0x18]),
            (255, &[0x18, 0xff]),
            (1000, &[0x19, 0x03, 0xe8]),
            (65_535, &[0x19, 0xff, 0xff]),
            (1_000_000, &[0x1a, 0x00, 0x0f, 0x42, 0x40]),
            (1_000_000_000_000, &[0x1b, 0x00, 0x00, 0x00, 0xe8, 0xd4, 0xa5, 0x10, 0x00]),
            (-1, &[0x20]),
            (-10, &[0x29]),
            (-100, &[0x38, 0x63]),
            (-1000, &[0x39, 0x03, 0xe7]),
        ];
        for (value, expected) in cases {
            let mut encoding = Encoding::default();
            encoding.integer(value);
            assert_eq!(encoding.bytes, expected, "{value}");
        }
    }

    #[test]
    fn multimodal_keys_and_prompt_embeddings_are_tagged_tuples() {
        let mut encoding = Encoding::default();
        encoding.extra_key(&ExtraKey::Multimodal { identifier: "i", offset: -2 });
        assert_eq!(encoding.bytes, [0x83, 0x62, b'm', b'm', 0x61, b'i', 0x21]);
        encoding.bytes.clear();
        encoding.extra_key(&ExtraKey::PromptEmbeds(&[7; 32]));
        assert_eq!(encoding.bytes[..2], [0x82, 0x6d]);
        assert_eq!(&encoding.bytes[2..15], b"prompt_embeds");
        assert_eq!(encoding.bytes[15..], [[0x58, 32].as_slice(), &[7; 32]].concat());
    }
}
