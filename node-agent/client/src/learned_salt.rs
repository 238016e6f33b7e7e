//! Salt of a tenant as its sessions learn it, for engines that compute keys before and between sessions.
//!
//! Before the first session, keys of a tenant with isolation derive from a random secret of this process. Nothing is
//! stored under them, because storing needs a session. The tenant `default` has no salt.

use std::fs::File;
use std::io::{self, Read as _};
use std::sync::{Arc, PoisonError, RwLock};

use reprise_policy::{NamespaceDigest, TenantName, TenantSalt};

use crate::error::ClientError;

/// Salt of a tenant; clones share it.
#[derive(Clone, Debug)]
pub struct LearnedSalt {
    tenant: TenantName,
    salt: Arc<RwLock<Option<TenantSalt>>>,
}

impl LearnedSalt {
    /// Creates the salt of a tenant, which no session has learned yet.
    ///
    /// # Errors
    /// The system has no random bytes.
    pub fn unknown(tenant: TenantName) -> io::Result<LearnedSalt> {
        let salt = if tenant == TenantName::default_tenant() { None } else { Some(random()?) };
        Ok(LearnedSalt { tenant, salt: Arc::new(RwLock::new(salt)) })
    }

    /// Returns the tenant of the salt.
    pub fn tenant(&self) -> &TenantName {
        &self.tenant
    }

    /// Returns the namespace of the tenant's blocks, from the one that its engine states.
    pub fn namespace(&self, stated: &NamespaceDigest) -> NamespaceDigest {
        stated.of_tenant(self.salt.read().unwrap_or_else(PoisonError::into_inner).as_ref())
    }

    /// Keeps the salt that a session has received.
    pub(crate) fn set(&self, salt: Option<TenantSalt>) {
        *self.salt.write().unwrap_or_else(PoisonError::into_inner) = salt;
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
        first.set(Some(salt.clone()));
        assert_eq!(first.clone().namespace(&stated), stated.of_tenant(Some(&salt)));
    }
}
