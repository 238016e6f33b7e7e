//! Isolation salts: one secret of 32 random bytes for each tenant.
//!
//! The namespace of a tenant's session is a digest over its salt and the namespace that its engine states. Keys of
//! blocks derive from that digest, so only holders of the salt can compute them. All nodes of a cluster need the same
//! salt of a tenant, because replicas are found by key. The tenant `default` has no salt.
//!
//! Out of scope: storage and distribution of salts.

use std::fmt;

use sha2::{Digest, Sha256};

use crate::namespace::NamespaceDigest;

/// Version of the digest's encoding. It is part of the digest, so a change of the encoding separates caches.
const ENCODING: &[u8] = b"reprise-tenant-namespace-v1";

/// Secret of one tenant. Its debug form hides it.
#[derive(Clone, PartialEq, Eq)]
pub struct TenantSalt([u8; TenantSalt::SIZE]);

impl TenantSalt {
    /// Number of random bytes of a salt.
    pub const SIZE: usize = 32;

    /// Uses these bytes, which must be random.
    pub fn new(bytes: [u8; TenantSalt::SIZE]) -> TenantSalt {
        TenantSalt(bytes)
    }

    /// Returns the secret bytes of the salt.
    pub fn secret(&self) -> &[u8; TenantSalt::SIZE] {
        &self.0
    }

    /// Returns the secret as 64 hexadecimal digits, the form of its file.
    pub fn to_hex(&self) -> String {
        self.0.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Parses the content of a salt's file: 64 hexadecimal digits, and white space around them.
    pub fn from_hex(text: &str) -> Option<TenantSalt> {
        let digits = text.trim().as_bytes();
        if digits.len() != 2 * TenantSalt::SIZE {
            return None;
        }
        let digit = |byte: u8| char::from(byte).to_digit(16);
        let mut secret = [0; TenantSalt::SIZE];
        for (byte, pair) in secret.iter_mut().zip(digits.as_chunks::<2>().0) {
            *byte = u8::try_from(digit(pair[0])? << 4 | digit(pair[1])?).ok()?;
        }
        Some(TenantSalt(secret))
    }
}

impl fmt::Debug for TenantSalt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TenantSalt(secret)")
    }
}

impl NamespaceDigest {
    /// Returns the namespace of a tenant's blocks, from the one that an engine states. Without a salt, both are equal.
    pub fn of_tenant(&self, salt: Option<&TenantSalt>) -> NamespaceDigest {
        let Some(TenantSalt(secret)) = salt else { return *self };
        let mut digest = Sha256::new();
        for field in [ENCODING, secret, &self.0] {
            digest.update((field.len() as u64).to_be_bytes());
            digest.update(field);
        }
        NamespaceDigest(digest.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_salt_separates_namespaces_and_the_default_tenant_keeps_its_own() {
        let stated = NamespaceDigest([1; 32]);
        let [first, second] = [2, 3].map(|byte| TenantSalt::new([byte; 32]));
        assert_eq!(stated.of_tenant(None), stated);
        assert_eq!(stated.of_tenant(Some(&first)), stated.of_tenant(Some(&first.clone())));
        assert_ne!(stated.of_tenant(Some(&first)), stated.of_tenant(Some(&second)));
        assert_ne!(stated.of_tenant(Some(&first)), stated);
        assert_ne!(stated.of_tenant(Some(&first)), NamespaceDigest([4; 32]).of_tenant(Some(&first)));
    }

    #[test]
    fn namespace_of_a_tenant_has_its_golden_digest() {
        // Computed by Python's hashlib over the length-prefixed fields.
        let digest = NamespaceDigest([1; 32]).of_tenant(Some(&TenantSalt::new([2; 32])));
        let hex: String = digest.0.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "52a7e05e5ec28c2a0383173951008b9cfda15c8d360edb17e8b2dedbe6d362e4");
    }

    #[test]
    fn file_form_is_64_hexadecimal_digits() {
        let salt = TenantSalt::new(std::array::from_fn(|at| at as u8 * 7));
        assert_eq!(TenantSalt::from_hex(&format!("{}\n", salt.to_hex())), Some(salt.clone()));
        for wrong in ["", "team-a", &salt.to_hex()[1..], &"g".repeat(64), &"é".repeat(32)] {
            assert_eq!(TenantSalt::from_hex(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn debug_form_hides_the_secret() {
        assert_eq!(format!("{:?}", TenantSalt::new([7; 32])), "TenantSalt(secret)");
    }
}
