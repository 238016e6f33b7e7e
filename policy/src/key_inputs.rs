//! Inputs of block keys, from which other tenants' keys of the same blocks derive.
//!
//! A reader of a public tenant does not know that tenant's namespace. It sends the other inputs of the keys, and the agent,
//! which knows the salt of that tenant, derives the keys.

use sha2::{Digest, Sha256};

use crate::content::first_16;
use crate::key::{BlockKey, KeyPart};
use crate::namespace::NamespaceDigest;
use crate::salt::TenantSalt;

/// Inputs of keys of consecutive blocks, all of one length: group and rank (4 bytes each, big endian), then the engine's hash.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyInputs {
    packed: Vec<u8>,
    input_bytes: usize,
    /// Namespaces without the tenant, if keys of several ranks follow each other: input `i` has the one at `i` modulo their
    /// number. Empty: all have that of the session.
    namespaces: Vec<NamespaceDigest>,
}

impl KeyInputs {
    /// Bytes of an input before the engine's hash.
    const PART_BYTES: usize = 8;

    /// Maximum bytes of one input: a part, and a hash of 64 bytes.
    pub const INPUT_BYTES_MAX: usize = KeyInputs::PART_BYTES + 64;

    /// Creates the inputs of blocks with these hashes; `None` if the lengths differ, or are 0 or above 64 bytes.
    pub fn of<'a>(hashes: impl IntoIterator<Item = &'a [u8]>, part: KeyPart) -> Option<KeyInputs> {
        let (mut packed, mut input_bytes) = (Vec::new(), 0);
        for hash in hashes {
            let bytes = KeyInputs::PART_BYTES + hash.len();
            if input_bytes != 0 && bytes != input_bytes {
                return None;
            }
            input_bytes = bytes;
            packed.extend_from_slice(&part.group.to_be_bytes());
            packed.extend_from_slice(&part.shard.to_be_bytes());
            packed.extend_from_slice(hash);
        }
        KeyInputs::unpack(packed, input_bytes)
    }

    /// Uses packed inputs of this length each, without separators; `None` if the lengths do not fit.
    pub fn unpack(packed: Vec<u8>, input_bytes: usize) -> Option<KeyInputs> {
        let is_valid = (KeyInputs::PART_BYTES + 1..=KeyInputs::INPUT_BYTES_MAX).contains(&input_bytes)
            && packed.len().is_multiple_of(input_bytes);
        is_valid.then_some(KeyInputs { packed, input_bytes, namespaces: Vec::new() })
    }

    /// Sets the namespaces of ranks, without the tenant, whose keys follow each other.
    pub fn with_namespaces(self, namespaces: Vec<NamespaceDigest>) -> KeyInputs {
        KeyInputs { namespaces, ..self }
    }

    /// Returns the namespaces of ranks; none if all keys have that of the session.
    pub fn namespaces(&self) -> &[NamespaceDigest] {
        &self.namespaces
    }

    /// Returns all inputs without separators.
    pub fn packed(&self) -> &[u8] {
        &self.packed
    }

    /// Returns all inputs without separators, without a copy.
    pub fn into_packed(self) -> Vec<u8> {
        self.packed
    }

    /// Bytes of one input.
    pub fn input_bytes(&self) -> usize {
        self.input_bytes
    }

    /// Number of inputs, one for each key.
    pub fn len(&self) -> usize {
        self.packed.len() / self.input_bytes
    }

    /// Whether there are no inputs.
    pub fn is_empty(&self) -> bool {
        self.packed.is_empty()
    }

    /// Returns the inputs at these indices, in their order, with the same namespaces of ranks.
    pub fn select(&self, indices: impl Iterator<Item = usize>) -> KeyInputs {
        let mut packed = Vec::with_capacity(self.packed.len());
        for index in indices {
            packed.extend_from_slice(&self.packed[index * self.input_bytes..][..self.input_bytes]);
        }
        KeyInputs { packed, input_bytes: self.input_bytes, namespaces: self.namespaces.clone() }
    }

    /// Derives the keys of a tenant with this salt. `stated` is the namespace of the session, without the tenant.
    pub fn keys(&self, stated: &NamespaceDigest, salt: &TenantSalt) -> Box<[BlockKey]> {
        let stated = if self.namespaces.is_empty() { std::slice::from_ref(stated) } else { &self.namespaces };
        let namespaces: Vec<NamespaceDigest> =
            stated.iter().map(|namespace| namespace.of_tenant(Some(salt))).collect();
        let inputs = self.packed.chunks_exact(self.input_bytes);
        inputs.zip(namespaces.iter().cycle()).map(|(input, namespace)| key_of(namespace, input)).collect()
    }
}

/// Derives a key from a namespace and the rest of its inputs.
fn key_of(namespace: &NamespaceDigest, input: &[u8]) -> BlockKey {
    let mut digest = Sha256::new();
    digest.update(namespace.0);
    digest.update(input);
    BlockKey(first_16(&digest.finalize()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_from_inputs_are_those_that_sessions_of_the_tenant_derive() {
        let (stated, part) = (NamespaceDigest([3; 32]), KeyPart { group: 2, shard: 1 });
        let salt = TenantSalt::new([9; 32]);
        let hashes: Vec<[u8; 32]> = (0..4).map(|number| [number; 32]).collect();
        let inputs = KeyInputs::of(hashes.iter().map(|hash| &hash[..]), part).expect("equal lengths");
        let derive = |stated: &NamespaceDigest, at: usize| {
            BlockKey::derive(&stated.of_tenant(Some(&salt)), &hashes[at], part)
        };
        let derived: Vec<BlockKey> = (0..4).map(|at| derive(&stated, at)).collect();
        assert_eq!((inputs.len(), inputs.input_bytes()), (4, 40));
        assert_eq!(&inputs.keys(&stated, &salt)[..], &derived[..]);
        let read = KeyInputs::unpack(inputs.packed().to_vec(), inputs.input_bytes());
        assert_eq!(read.as_ref(), Some(&inputs));
        let selected = inputs.select([3, 0].into_iter());
        assert_eq!(&selected.keys(&stated, &salt)[..], &[derived[3], derived[0]]);
        assert_ne!(inputs.keys(&stated, &TenantSalt::new([8; 32])), inputs.keys(&stated, &salt));
        let ranks = vec![NamespaceDigest([4; 32]), NamespaceDigest([5; 32])];
        let of_ranks: Vec<BlockKey> = (0..4).map(|at| derive(&ranks[at % 2], at)).collect();
        assert_eq!(&inputs.with_namespaces(ranks).keys(&stated, &salt)[..], &of_ranks[..]);
    }

    #[test]
    fn lengths_that_do_not_fit_are_rejected() {
        let part = KeyPart::default();
        assert_eq!(KeyInputs::of([&[1_u8; 32][..], &[1; 31]], part), None);
        assert_eq!(KeyInputs::of([&[][..]], part), None);
        assert_eq!(KeyInputs::of([&[1_u8; 65][..]], part), None);
        assert!(KeyInputs::of([&[1_u8; 64][..]], part).is_some());
        for (bytes, input_bytes) in [(80, 0), (80, 8), (81, 40), (146, 73)] {
            assert_eq!(KeyInputs::unpack(vec![0; bytes], input_bytes), None, "{bytes} {input_bytes}");
        }
        assert_eq!(KeyInputs::unpack(Vec::new(), 40).map(|inputs| inputs.is_empty()), Some(true));
    }
}
