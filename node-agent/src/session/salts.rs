//! Isolation salts of tenants, in the files of a folder.
//!
//! A file has the name of its tenant and 64 hexadecimal digits. With the word `encrypted` behind them, the blocks of the
//! tenant must be encrypted on devices: the word arrives with the salt, so no block is written before. A file is read by each greeting, so that a new tenant needs
//! no restart: in a cluster, the kubelet updates the folder from a Secret. A session of a tenant without a salt is
//! refused, because keys without a secret can be guessed. The tenant `default` has no salt.

use std::path::PathBuf;

use reprise_policy::{TenantName, TenantSalt};

use crate::secret_file::{self, SecretError};

/// Word in the file of a tenant whose blocks must be encrypted on devices.
const ENCRYPTED: &str = "encrypted";

/// Salts of the tenants of this node.
#[derive(Clone, Debug, Default)]
pub(crate) struct TenantSalts {
    folder: Option<PathBuf>,
}

/// Reason why a tenant has no usable salt on this node, with the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum SaltError {
    /// The salt may arrive later, without a restart of the agent.
    Missing(String),
    /// The configuration or the file must be corrected.
    Unusable(String),
}

impl TenantSalts {
    /// Reads salts from this folder; `None`: only the default tenant has sessions.
    pub(crate) fn within(folder: Option<PathBuf>) -> TenantSalts {
        TenantSalts { folder }
    }

    /// Whether the salt of a tenant declares that its blocks must be encrypted; `None` if the salt cannot be read. Without
    /// a folder, nothing is declared.
    pub(crate) fn requires_encryption(&self, tenant: &TenantName) -> Option<bool> {
        let Some(folder) = &self.folder else { return Some(false) };
        let path = folder.join(tenant.as_str());
        secret_file::read_marked(&path, 1, Some(ENCRYPTED)).ok().map(|(_, is_encrypted)| is_encrypted)
    }

    /// Returns the tenants with a file in the folder.
    pub(crate) fn tenants(&self) -> Vec<TenantName> {
        let entries =
            self.folder.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    }

    /// Returns the salt of a tenant; `None` for the default tenant.
    ///
    /// # Errors
    /// [`SaltError`].
    pub(super) fn of(&self, tenant: &TenantName) -> Result<Option<TenantSalt>, SaltError> {
        if *tenant == TenantName::default_tenant() {
            return Ok(None);
        }
        let Some(folder) = &self.folder else {
            return Err(SaltError::Unusable(format!(
                "tenant '{tenant}' needs an isolation salt, and this agent has none: set session.salts in the agent's \
                 configuration to a folder, and create the salt there with `reprise tenant create-salt {tenant} \
                 --folder DIR` on one node; all nodes need a copy"
            )));
        };
        let path = folder.join(tenant.as_str());
        let read = secret_file::read_marked(&path, 1, Some(ENCRYPTED));
        read.map(|(secrets, _)| Some(TenantSalt::new(secrets[0]))).map_err(|error| match error {
            SecretError::Missing => SaltError::Missing(format!(
                "this node has no isolation salt of tenant '{tenant}' ({}): create it with `reprise tenant create-salt \
                 {tenant} --folder {}` if no node has it, or copy the file from another node; in Kubernetes, create the \
                 CacheTenant '{tenant}'",
                path.display(),
                folder.display()
            )),
            SecretError::Unusable(words) => SaltError::Unusable(format!(
                "cannot use the isolation salt of tenant '{tenant}' ({}): {words}",
                path.display()
            )),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    use super::*;

    fn tenant(name: &str) -> TenantName {
        name.parse().expect("a name")
    }

    fn write(path: &Path, text: &str, mode: u32) {
        fs::write(path, text).expect("written");
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("set");
    }

    #[test]
    fn salt_is_read_from_the_file_of_its_tenant_whenever_a_session_needs_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let salts = TenantSalts::within(Some(folder.path().to_owned()));
        let SaltError::Missing(words) = salts.of(&tenant("a")).expect_err("no file yet") else {
            panic!("the file may arrive later")
        };
        assert!(words.contains("reprise tenant create-salt a --folder"), "{words}");
        let first = TenantSalt::new([1; 32]);
        write(&folder.path().join("a"), &format!("{}\n", first.to_hex()), 0o600);
        assert_eq!(salts.of(&tenant("a")), Ok(Some(first)));
        assert_eq!(salts.of(&tenant("default")), Ok(None));
    }

    #[test]
    fn unusable_files_are_refused_with_the_remedy_and_without_their_content() {
        let folder = tempfile::tempdir().expect("a folder");
        let salts = TenantSalts::within(Some(folder.path().to_owned()));
        let salt = TenantSalt::new([1; 32]).to_hex();
        for (text, mode, wanted) in [
            (salt.as_str(), 0o604, "chmod 600"),
            (salt.as_str(), 0o620, "chmod 600"),
            (&salt[2..], 0o600, "64 hexadecimal digits"),
            (&salt.repeat(9), 0o600, "64 hexadecimal digits"),
        ] {
            write(&folder.path().join("a"), text, mode);
            let SaltError::Unusable(words) = salts.of(&tenant("a")).expect_err("refused") else {
                panic!("it does not change by itself")
            };
            assert!(words.contains(wanted) && !words.contains("0101"), "{words}");
        }
        fs::create_dir(folder.path().join("b")).expect("created");
        assert!(matches!(salts.of(&tenant("b")), Err(SaltError::Unusable(_))));
        let SaltError::Unusable(words) = TenantSalts::default().of(&tenant("a")).expect_err("refused") else {
            panic!("a folder needs a restart")
        };
        assert!(words.contains("session.salts"), "{words}");
    }
}
