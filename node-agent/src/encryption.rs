//! Keys of tenants whose blocks are encrypted on devices, in the files of a folder.
//!
//! A file has the name of its tenant, and a key of 64 hexadecimal digits in each line. The first key encrypts, the others
//! decrypt what was written before they were replaced. Keys are in memory only.
//!
//! A tenant that must be encrypted stays so while its file is missing or unusable: nothing of it is written then.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use reprise_agent_core::pool::header::encryption::TenantKey;
use reprise_policy::TenantName;

use crate::error::{AgentError, ErrorKind};
use crate::secret_file::{self, SecretError};

/// Maximum number of keys of a tenant: the first one, and former ones.
const KEYS_MAX: usize = 16;

/// Time between two readings of the folder.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// Keys of all encrypted tenants; clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct EncryptionKeys {
    folder: Option<PathBuf>,
    /// Tenants that the configuration declares.
    required: Arc<BTreeSet<TenantName>>,
    current: Arc<RwLock<HashMap<TenantName, Arc<[TenantKey]>>>>,
}

/// What a reading of the folder has changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct KeyChanges {
    /// Tenants that have no key any more: their blocks must be dropped.
    pub(crate) erased: Vec<TenantName>,
    /// Files that cannot be used, with the remedy.
    pub(crate) unusable: Vec<(TenantName, SecretError)>,
}

impl EncryptionKeys {
    /// Uses the keys in this folder; `required` are tenants that must have one.
    pub(crate) fn within(folder: Option<PathBuf>, required: BTreeSet<TenantName>) -> EncryptionKeys {
        EncryptionKeys { folder, required: Arc::new(required), current: Arc::default() }
    }

    /// Returns the keys of a tenant, the one that encrypts first; empty if it must be encrypted and has none. `None`: the
    /// tenant is not encrypted.
    pub(crate) fn of(&self, tenant: &TenantName) -> Option<Arc<[TenantKey]>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner);
        current.get(tenant).cloned().or_else(|| self.required.contains(tenant).then(|| Arc::from([])))
    }

    /// Reads the folder again. A tenant whose file cannot be used keeps its keys.
    pub(crate) fn read(&self) -> KeyChanges {
        let Some(folder) = &self.folder else { return KeyChanges::default() };
        let mut changes = KeyChanges::default();
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        let mut names = tenants_in(folder);
        names.extend(current.keys().cloned());
        for tenant in names {
            match secret_file::read(&folder.join(tenant.as_str()), KEYS_MAX) {
                Ok(secrets) => {
                    current.insert(tenant, secrets.iter().map(TenantKey::new).collect());
                }
                Err(SecretError::Missing) => {
                    // The entry stays: a tenant that was encrypted is never written in plaintext.
                    let before = current.insert(tenant.clone(), Arc::from([]));
                    if before.is_some_and(|keys| !keys.is_empty()) {
                        changes.erased.push(tenant);
                    }
                }
                Err(error) => changes.unusable.push((tenant, error)),
            }
        }
        changes
    }
}

/// Returns the tenants with a file in a folder.
fn tenants_in(folder: &Path) -> BTreeSet<TenantName> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// Thread that reads the keys once a second, and ends when it is dropped.
#[derive(Debug)]
pub(crate) struct KeyReader {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl KeyReader {
    /// Reads the keys for the first time, and starts the thread. `erased` receives tenants that lost their last key.
    ///
    /// # Errors
    /// A file cannot be used, or no thread can be started.
    pub(crate) fn start(
        keys: EncryptionKeys,
        erased: impl Fn(TenantName) + Send + 'static,
    ) -> Result<KeyReader, AgentError> {
        if let Some((tenant, error)) = keys.read().unusable.first() {
            let what = format!("cannot use the encryption keys of tenant '{tenant}': {error}");
            return Err(AgentError::new(ErrorKind::Config, what));
        }
        let (stop, stopped) = bounded::<()>(0);
        let body = move || {
            let mut reported = Vec::new();
            while stopped.recv_timeout(READ_INTERVAL) == Err(RecvTimeoutError::Timeout) {
                let KeyChanges { erased: gone, unusable } = keys.read();
                for tenant in gone {
                    tracing::warn!(%tenant, "the last encryption key of a tenant is gone: dropping its blocks");
                    erased(tenant);
                }
                if unusable != reported {
                    for (tenant, error) in &unusable {
                        tracing::warn!(%tenant, %error, "keeping the former encryption keys of a tenant");
                    }
                    reported = unusable;
                }
            }
        };
        let thread = std::thread::Builder::new().name("encryption-keys".to_owned()).spawn(body);
        let thread = thread.map_err(|error| {
            AgentError::new(ErrorKind::Resource, "cannot spawn the thread of encryption keys")
                .with_source(error)
        })?;
        Ok(KeyReader { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for KeyReader {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}
