//! Inputs of the keys that a process has derived last.
//!
//! An engine derives keys right before it matches, loads or saves them. Two generations bound the memory: when the newer one
//! is full, it replaces the older one. A forgotten input only means that a block of the public tenant is not found.

use std::collections::HashMap;

use reprise_policy::{BlockKey, KeyInputs, NamespaceDigest};

use crate::client::{Client, Session};

/// Maximum keys of a generation: four prompts of 8,192 blocks. Both generations take about 10 MB.
const GENERATION_KEYS_MAX: usize = 32_768;

/// Inputs of recently derived keys, by key.
#[derive(Debug, Default)]
pub(crate) struct RecentInputs {
    newer: HashMap<BlockKey, Input>,
    older: HashMap<BlockKey, Input>,
}

/// What a key derives from, without the tenant.
#[derive(Clone, Debug)]
struct Input {
    stated: NamespaceDigest,
    packed: Box<[u8]>,
}

impl RecentInputs {
    /// Remembers the inputs of keys in a namespace without the tenant.
    pub(crate) fn insert(&mut self, stated: &NamespaceDigest, keys: &[BlockKey], inputs: &KeyInputs) {
        for (key, packed) in keys.iter().zip(inputs.packed().chunks_exact(inputs.input_bytes())) {
            if self.newer.len() >= GENERATION_KEYS_MAX {
                self.older = std::mem::take(&mut self.newer);
            }
            if !self.newer.contains_key(key) {
                self.newer.insert(*key, Input { stated: *stated, packed: packed.into() });
            }
        }
    }

    /// Returns the inputs of the leading keys that are remembered; `None` without any. Key `i` is that of rank `i` modulo
    /// the ranks, and all keys of a rank have one namespace.
    pub(crate) fn find(&self, keys: &[BlockKey], ranks: usize) -> Option<KeyInputs> {
        let (mut packed, mut namespaces, mut input_bytes) = (Vec::new(), Vec::new(), 0);
        for (at, key) in keys.iter().enumerate() {
            let Some(input) = self.newer.get(key).or_else(|| self.older.get(key)) else { break };
            let is_other_rank = at >= ranks && namespaces[at % ranks] != input.stated;
            if is_other_rank || (at > 0 && input.packed.len() != input_bytes) {
                break;
            }
            if at < ranks {
                namespaces.push(input.stated);
            }
            input_bytes = input.packed.len();
            packed.extend_from_slice(&input.packed);
        }
        // With inputs of fewer keys than ranks, the namespaces are still those of the leading ranks.
        KeyInputs::unpack(packed, input_bytes).map(|inputs| inputs.with_namespaces(namespaces))
    }
}

impl Client {
    /// Returns the tenant whose blocks this session may read in addition to its own; `None` if no tenant is public.
    pub fn public_tenant(&self) -> Option<&str> {
        let session = self.session();
        session.has_public_tenant().then_some(session.welcome.public_tenant.as_str())
    }
}

impl Session {
    /// Returns the inputs of the leading keys that were derived recently. Keys of several ranks follow each other.
    pub(crate) fn recent_inputs(&self, keys: &[BlockKey], ranks: usize) -> Option<KeyInputs> {
        self.learned_salt.as_ref().filter(|_| self.has_public_tenant())?.inputs_of(keys, ranks)
    }

    /// Whether the session may read blocks of another tenant.
    pub(crate) fn has_public_tenant(&self) -> bool {
        !self.welcome.public_tenant.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use reprise_policy::TenantSalt;
    use reprise_policy::key::KeyPart;

    use super::*;

    fn derive(recent: &mut RecentInputs, stated: u8, numbers: std::ops::Range<u32>) -> Vec<BlockKey> {
        let stated = NamespaceDigest([stated; 32]);
        let hashes: Vec<[u8; 4]> = numbers.map(u32::to_be_bytes).collect();
        let hashes = || hashes.iter().map(|hash| &hash[..]);
        let part = KeyPart::default();
        let keys: Vec<BlockKey> = hashes().map(|hash| BlockKey::derive(&stated, hash, part)).collect();
        recent.insert(&stated, &keys, &KeyInputs::of(hashes(), part).expect("equal lengths"));
        keys
    }

    #[test]
    fn leading_keys_have_the_inputs_that_they_were_derived_from() {
        let mut recent = RecentInputs::default();
        let keys = derive(&mut recent, 1, 0..3);
        let salt = TenantSalt::new([7; 32]);
        let expected = derive(&mut RecentInputs::default(), 1, 0..3).len();
        let found = recent.find(&keys, 1).expect("remembered");
        assert_eq!((found.len(), found.namespaces()), (expected, &[NamespaceDigest([1; 32])][..]));
        let again = KeyInputs::unpack(found.packed().to_vec(), 12).expect("12 bytes each");
        let session = NamespaceDigest([1; 32]);
        assert_eq!(found.keys(&NamespaceDigest([9; 32]), &salt), again.keys(&session, &salt));
        let unknown = [keys[0], BlockKey([0; 16]), keys[1]];
        assert_eq!(recent.find(&unknown, 1).map(|inputs| inputs.len()), Some(1));
        assert_eq!(recent.find(&unknown[1..], 1), None);
    }

    #[test]
    fn keys_of_several_ranks_keep_their_namespaces() {
        let mut recent = RecentInputs::default();
        let [first, second] = [1, 2].map(|stated| derive(&mut recent, stated, 0..2));
        let keys = [first[0], second[0], first[1], second[1]];
        let found = recent.find(&keys, 2).expect("remembered");
        assert_eq!(found.len(), 4);
        assert_eq!(found.namespaces(), [NamespaceDigest([1; 32]), NamespaceDigest([2; 32])]);
        let mixed = [first[0], second[0], second[1]];
        assert_eq!(recent.find(&mixed, 2).map(|inputs| inputs.len()), Some(2), "another rank's key");
    }

    #[test]
    fn old_inputs_are_forgotten_first() {
        let mut recent = RecentInputs::default();
        let max = GENERATION_KEYS_MAX as u32;
        let keys = derive(&mut recent, 1, 0..3 * max);
        assert!(recent.newer.len() + recent.older.len() <= 2 * GENERATION_KEYS_MAX);
        assert_eq!(recent.find(&keys[..1], 1), None);
        assert!(recent.find(&keys[keys.len() - 1..], 1).is_some());
    }
}
