//! Namespaces: one digest over everything that makes two KV blocks of a tenant incomparable.

use sha2::{Digest, Sha256};

use crate::layout::Layout;

/// Version of the digest's encoding. It is part of the digest, so a change of the encoding separates caches.
const ENCODING: &[u8] = b"reprise-namespace-v2";

/// SHA-256 of a [`NamespaceSpec`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NamespaceDigest(pub [u8; 32]);

/// Inputs of a namespace. Two engines of one tenant share blocks exactly if all inputs are equal; the tenant is added by
/// [`NamespaceDigest::of_tenant`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceSpec {
    /// Model name in the engine's notation.
    pub model: String,
    /// Revision or digest of the weights.
    pub revision: String,
    /// Layout on one rank (includes dtype, tokens per block and parallel geometry).
    pub layout: Layout,
    /// Hash algorithm of the engine's prefix chain, for example `sha256_cbor`.
    pub hash_algorithm: String,
    /// Seed of the prefix chain.
    pub hash_seed: String,
    /// Name and KV format of the engine, for example `vllm:LBHNC`.
    pub engine_format: String,
}

impl NamespaceSpec {
    /// Computes the digest. Each field is preceded by its length, so that different specs have different
    /// encodings.
    pub fn digest(&self) -> NamespaceDigest {
        let mut digest = Sha256::new();
        let layout = self.layout.encode();
        let fields: [&[u8]; 7] = [
            ENCODING,
            self.model.as_bytes(),
            self.revision.as_bytes(),
            &layout,
            self.hash_algorithm.as_bytes(),
            self.hash_seed.as_bytes(),
            self.engine_format.as_bytes(),
        ];
        for field in fields {
            digest.update((field.len() as u64).to_be_bytes());
            digest.update(field);
        }
        NamespaceDigest(digest.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::LayoutSpec;

    fn layout(layers: u16) -> Layout {
        let spec = LayoutSpec { layers, kv_heads: 1, head_dim: 64, ..LayoutSpec::LLAMA_3_8B };
        spec.validate().expect("valid")
    }

    fn spec() -> NamespaceSpec {
        NamespaceSpec {
            model: "m".into(),
            revision: "r".into(),
            layout: layout(2),
            hash_algorithm: "sha256_cbor".into(),
            hash_seed: "s".into(),
            engine_format: "reference".into(),
        }
    }

    #[test]
    fn every_field_separates_namespaces() {
        let base = spec().digest();
        assert_eq!(base, spec().digest());
        let other = |change: fn(&mut NamespaceSpec)| {
            let mut changed = spec();
            change(&mut changed);
            changed.digest()
        };
        assert_ne!(base, other(|s| s.model.push('x')));
        assert_ne!(base, other(|s| s.revision.push('x')));
        assert_ne!(base, other(|s| s.layout = layout(3)));
        assert_ne!(base, other(|s| s.hash_algorithm.push('x')));
        assert_ne!(base, other(|s| s.hash_seed.push('x')));
        assert_ne!(base, other(|s| s.engine_format.push('x')));
    }

    #[test]
    fn moving_a_byte_between_fields_separates_namespaces() {
        let moved = NamespaceSpec { model: String::new(), revision: "mr".into(), ..spec() };
        assert_ne!(spec().digest(), moved.digest());
    }
}
