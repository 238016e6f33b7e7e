//! Salt of a tenant as its sessions learn it, for engines that compute keys before and between sessions.
//!
//! Before the first session, keys of a tenant with isolation derive from a random secret of this process. Nothing is
//! stored under them, because storing needs a session. The tenant `default` has no salt.
//!
//! While a tenant is public, the inputs of the keys that were derived last are remembered: matches and loads of these keys
//! send them ([`KeyInputs`]), so that the agent finds the same blocks of the public tenant.

use std::fs::File;
use std::io::{self, Read as _};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use reprise_policy::key::KeyPart;
use reprise_policy::{BlockKey, KeyInputs, NamespaceDigest, TenantName, TenantSalt};

use crate::error::ClientError;
use crate::recent_inputs::RecentInputs;

/// Salt of a tenant; clones share it.
#[derive(Clone, Debug)]
pub struct LearnedSalt {
    tenant: TenantName,
    salt: Arc<RwLock<Option<TenantSalt>>>,
    /// Inputs of recent keys; `None` while no tenant is public.
    recent: Arc<Mutex<Option<RecentInputs>>>,
}

impl LearnedSalt {
    /// Creates the salt of a tenant, which no session has learned yet.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub fn unknown(tenant: TenantName) -> io::Result<LearnedSalt> {
        let salt = if tenant == TenantName::default_tenant() { None } else { Some(random()?) };
        Ok(LearnedSalt { tenant, salt: Arc::new(RwLock::new(salt)), recent: Arc::default() })
    }

    /// Returns the tenant of the salt.
    pub fn tenant(&self) -> &TenantName {
        &self.tenant
    }

    /// Returns the namespace of the tenant's blocks, from the one that its engine states.
    pub fn namespace(&self, stated: &NamespaceDigest) -> NamespaceDigest {
        stated.of_tenant(self.salt.read().unwrap_or_else(PoisonError::into_inner).as_ref())
    }

    /// Derives the keys of blocks with these hashes, and remembers their inputs while a tenant is public. `stated` is the
    /// namespace that the engine states.
    pub fn derive<'a>(
        &self,
        stated: &NamespaceDigest,
        hashes: impl Iterator<Item = &'a [u8]> + Clone,
        part: KeyPart,
    ) -> Vec<BlockKey> {
        let namespace = self.namespace(stated);
        let keys: Vec<BlockKey> =
            hashes.clone().map(|hash| BlockKey::derive(&namespace, hash, part)).collect();
        if let Some(recent) = &mut *self.recent()
            && let Some(inputs) = KeyInputs::of(hashes, part)
        {
            recent.insert(stated, &keys, &inputs);
        }
        keys
    }

    /// Returns the remembered inputs of the leading keys; keys of several ranks follow each other.
    pub(crate) fn inputs_of(&self, keys: &[BlockKey], ranks: usize) -> Option<KeyInputs> {
        self.recent().as_ref()?.find(keys, ranks)
    }

    /// Keeps the salt that a session has received, and whether it may read blocks of a public tenant.
    pub(crate) fn set(&self, salt: Option<TenantSalt>, has_public_tenant: bool) {
        *self.salt.write().unwrap_or_else(PoisonError::into_inner) = salt;
        let mut recent = self.recent();
        *recent = recent.take().or_else(|| Some(RecentInputs::default())).filter(|_| has_public_tenant);
    }

    fn recent(&self) -> MutexGuard<'_, Option<RecentInputs>> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the salt of a welcome; every tenant except the default one has a salt.
pub(crate) fn salt_of(tenant: &TenantName, bytes: &[u8]) -> Result<Option<TenantSalt>, ClientError> {
    match (bytes.try_into(), *tenant == TenantName::default_tenant()) {
        (Ok(secret), false) => Ok(Some(TenantSalt::new(secret))),
        (Err(_), true) if bytes.is_empty() => Ok(None),
        _ => {
            let what = format!("invalid salt of {} bytes for tenant '{tenant}'", bytes.len());
            Err(ClientError::Protocol(what))
        }
    }
}

/// Returns a new random salt.
///
/// # Errors
/// The system has no random bytes.
pub fn random() -> io::Result<TenantSalt> {
    let mut secret = [0; TenantSalt::SIZE];
    File::open("/dev/urandom")?.read_exact(&mut secret)?;
    Ok(TenantSalt::new(secret))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_before_the_first_session_are_unique_to_the_process_except_for_the_default_tenant() {
        let stated = NamespaceDigest([1; 32]);
        let of = |name: &str| LearnedSalt::unknown(name.parse().expect("a name")).expect("random bytes");
        assert_eq!(of("default").namespace(&stated), stated);
        let (first, second) = (of("a"), of("a"));
        assert_ne!(first.namespace(&stated), stated);
        assert_ne!(first.namespace(&stated), second.namespace(&stated));
        let salt = TenantSalt::new([3; 32]);
        first.set(Some(salt.clone()), false);
        assert_eq!(first.clone().namespace(&stated), stated.of_tenant(Some(&salt)));
    }

    #[test]
    fn inputs_are_remembered_while_a_tenant_is_public() {
        let (stated, part) = (NamespaceDigest([1; 32]), KeyPart::default());
        let learned = LearnedSalt::unknown("a".parse().expect("a name")).expect("random bytes");
        let salt = TenantSalt::new([3; 32]);
        let hashes = [[1_u8; 32], [2; 32]];
        let derive = || learned.derive(&stated, hashes.iter().map(|hash| &hash[..]), part);
        learned.set(Some(salt.clone()), false);
        assert_eq!(learned.inputs_of(&derive(), 1), None);
        learned.set(Some(salt.clone()), true);
        let keys = derive();
        let inputs = learned.inputs_of(&keys, 1).expect("remembered");
        assert_eq!(&inputs.keys(&stated, &salt)[..], &keys[..]);
        learned.set(Some(salt), true);
        assert!(learned.inputs_of(&keys, 1).is_some(), "also by the next session");
        learned.set(None, false);
        assert_eq!(learned.inputs_of(&keys, 1), None);
    }
}
