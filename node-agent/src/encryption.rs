//! Keys of tenants whose blocks are encrypted on devices, in the files of a folder.
//!
//! A file has the name of its tenant, and a key of 64 hexadecimal digits in each line. The first key encrypts, the others
//! decrypt blocks that were written before they were replaced. Keys are in memory only.
//!
//! A tenant that must be encrypted stays so while its file is missing or unusable: nothing of it is written then. When the
//! file of a tenant is removed, all copies of its blocks on this node are dropped, and its sessions end.
//!
//! A reading in which a tenant lost keys takes effect only if the next reading agrees: a file can be missing while the
//! kubelet replaces the folder, and incomplete while it is written.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{RecvTimeoutError, Sender, bounded};
use reprise_agent_core::pool::header::encryption::{KeyId, TenantKey};
use reprise_policy::TenantName;

use crate::core_loop::{Inbox, Input};
use crate::error::{AgentError, ErrorKind};
use crate::secret_file::{self, SecretError};
use crate::session::TenantSalts;

/// Maximum number of keys of a tenant: the first one, and former ones.
const KEYS_MAX: usize = 16;

/// Time between two readings of the folder.
const READ_INTERVAL: Duration = Duration::from_secs(1);

/// Keys of all encrypted tenants; clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct EncryptionKeys {
    folder: Option<PathBuf>,
    /// Tenants that the configuration declares, or the files of their salts.
    required: Arc<RwLock<BTreeSet<TenantName>>>,
    salts: TenantSalts,
    current: Arc<RwLock<HashMap<TenantName, Arc<[TenantKey]>>>>,
    readings: Arc<Mutex<Readings>>,
}

/// What former readings of the folder have shown.
#[derive(Debug, Default)]
struct Readings {
    /// Keys of tenants that lost some in the last reading, which the next one must confirm.
    unconfirmed: HashMap<TenantName, Vec<KeyId>>,
    /// Tenants that must be encrypted and have no key, as two readings agree.
    erased: BTreeSet<TenantName>,
    /// Tenants that have had no key since their salts declared the encryption.
    awaited: BTreeSet<TenantName>,
}

/// Whether a node knows if a tenant must be encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Declaration {
    Known,
    /// The tenant's salt is not on this node.
    Unknown,
}

/// What a reading of the folder has changed.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct KeyChanges {
    /// Tenants that must be encrypted and no longer have a key: their blocks must be dropped.
    pub(crate) erased: Vec<TenantName>,
    /// Tenants that must be encrypted, as their salts declare since the start, and have had no key yet.
    pub(crate) awaited: Vec<TenantName>,
    /// Tenants without a key that have one again.
    pub(crate) restored: Vec<TenantName>,
    /// What cannot be used, with the remedy; keys stay as they were.
    pub(crate) unusable: Vec<String>,
}

impl EncryptionKeys {
    /// Uses the keys in this folder; `required` are tenants that must have one, besides those whose salts declare it.
    pub(crate) fn within(
        folder: Option<PathBuf>,
        required: BTreeSet<TenantName>,
        salts: TenantSalts,
    ) -> EncryptionKeys {
        let required = Arc::new(RwLock::new(required));
        EncryptionKeys { folder, required, salts, ..EncryptionKeys::default() }
    }

    /// Returns the keys of a tenant, the one that encrypts first; empty if it must be encrypted and has none. `None`: the
    /// tenant is not encrypted.
    pub(crate) fn of(&self, tenant: &TenantName) -> Option<Arc<[TenantKey]>> {
        let current = self.current.read().unwrap_or_else(PoisonError::into_inner).get(tenant).cloned();
        current.or_else(|| self.is_required(tenant).then(|| Arc::from([])))
    }

    fn is_required(&self, tenant: &TenantName) -> bool {
        self.required.read().unwrap_or_else(PoisonError::into_inner).contains(tenant)
    }

    /// Learns from a tenant's salt whether the tenant must be encrypted. Precedes each session and each offer of blocks:
    /// nothing of a tenant is written before.
    pub(crate) fn learn(&self, tenant: &TenantName) -> Declaration {
        if self.is_required(tenant) {
            return Declaration::Known;
        }
        match self.salts.requires_encryption(tenant) {
            Some(true) => {
                self.required.write().unwrap_or_else(PoisonError::into_inner).insert(tenant.clone());
                Declaration::Known
            }
            Some(false) => Declaration::Known,
            None => Declaration::Unknown,
        }
    }

    /// Whether a tenant must be encrypted and has no key.
    pub(crate) fn are_missing(&self, tenant: &TenantName) -> bool {
        self.of(tenant).is_some_and(|keys| keys.is_empty())
    }

    /// Whether the keys of a tenant are gone, so that its blocks must be dropped. Unlike with
    /// [`are_missing`](Self::are_missing), two readings agree.
    pub(crate) fn is_erased(&self, tenant: &TenantName) -> bool {
        self.readings().erased.contains(tenant)
    }

    fn readings(&self) -> MutexGuard<'_, Readings> {
        self.readings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads the folder for the first time. A tenant without a key is erased by the next reading.
    ///
    /// # Errors
    /// A file cannot be used.
    pub(crate) fn read_first(&self) -> Result<KeyChanges, AgentError> {
        for tenant in self.salts.tenants() {
            self.learn(&tenant);
        }
        let changes = self.read();
        if let Some(error) = changes.unusable.first() {
            return Err(AgentError::new(ErrorKind::Config, error.clone()));
        }
        // Their blocks may be on devices, unlike those of a tenant that is declared later.
        let awaited = std::mem::take(&mut self.readings().awaited);
        for tenant in awaited {
            tracing::warn!(%tenant, "a tenant that must be encrypted has no key: refusing its sessions");
        }
        Ok(changes)
    }

    /// Reads the folder again. A tenant whose file cannot be used keeps its keys.
    pub(crate) fn read(&self) -> KeyChanges {
        let mut changes = KeyChanges::default();
        let Some(folder) = &self.folder else { return changes };
        let mut names = match tenants_in(folder) {
            Ok(names) => names,
            // A folder that is gone, for example of a file system that is not mounted, must not erase all tenants.
            Err(error) => {
                let what =
                    format!("cannot read the folder encryption.keys = '{}': {error}", folder.display());
                changes.unusable.push(what);
                self.readings().unconfirmed.clear();
                return changes;
            }
        };
        names.extend(self.required.read().unwrap_or_else(PoisonError::into_inner).iter().cloned());
        names.extend(self.current.read().unwrap_or_else(PoisonError::into_inner).keys().cloned());
        // Before the lock, for which devices would wait.
        let files: Vec<_> = names
            .into_iter()
            .map(|tenant| (secret_file::read(&folder.join(tenant.as_str()), KEYS_MAX), tenant))
            .collect();
        let mut readings = self.readings();
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        for (file, tenant) in files {
            let keys: Arc<[TenantKey]> = match file {
                Ok(secrets) => secrets.iter().map(TenantKey::new).collect(),
                Err(SecretError::Missing) => Arc::from([]),
                Err(error) => {
                    let what = format!("cannot use the encryption keys of tenant '{tenant}': {error}");
                    changes.unusable.push(what);
                    readings.unconfirmed.remove(&tenant);
                    continue;
                }
            };
            let before = current.get(&tenant).cloned();
            if before.is_none() && keys.is_empty() {
                // The entry stays: a tenant that was encrypted is never written in plaintext.
                current.insert(tenant.clone(), Arc::from([]));
                readings.awaited.insert(tenant.clone());
            }
            if !readings.confirm(&tenant, before.as_deref().unwrap_or_default(), &keys) {
                continue;
            }
            let is_empty = keys.is_empty();
            current.insert(tenant.clone(), keys);
            if !is_empty {
                readings.awaited.remove(&tenant);
                if readings.erased.remove(&tenant) {
                    changes.restored.push(tenant);
                }
            } else if readings.erased.insert(tenant.clone()) {
                let is_awaited = readings.awaited.remove(&tenant);
                let list = if is_awaited { &mut changes.awaited } else { &mut changes.erased };
                list.push(tenant);
            }
        }
        changes
    }
}

impl Readings {
    /// Whether a reading takes effect: it lost no key of those `before`, or the reading before has the same keys.
    fn confirm(&mut self, tenant: &TenantName, before: &[TenantKey], keys: &[TenantKey]) -> bool {
        let ids: Vec<KeyId> = keys.iter().map(TenantKey::id).collect();
        let has_lost = if ids.is_empty() {
            !self.erased.contains(tenant)
        } else {
            before.iter().any(|key| !ids.contains(&key.id()))
        };
        let former = self.unconfirmed.remove(tenant);
        let is_confirmed = !has_lost || former.as_ref() == Some(&ids);
        if !is_confirmed {
            self.unconfirmed.insert(tenant.clone(), ids);
        }
        is_confirmed
    }
}

/// Returns the tenants with a file in a folder.
fn tenants_in(folder: &Path) -> io::Result<BTreeSet<TenantName>> {
    let mut names = BTreeSet::new();
    for entry in std::fs::read_dir(folder)? {
        // Others are not of tenants, such as the links of a mounted Secret.
        names.extend(entry?.file_name().to_str().and_then(|name| name.parse::<TenantName>().ok()));
    }
    Ok(names)
}

/// Thread that reads the keys once a second, and ends when it is dropped.
#[derive(Debug)]
pub(crate) struct KeyReader {
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl KeyReader {
    /// Starts the thread, which notifies the core of tenants that lost their last key, or have one again. `first` is the
    /// result of [`EncryptionKeys::read_first`].
    ///
    /// # Errors
    /// No thread can be started.
    pub(crate) fn start(
        keys: EncryptionKeys,
        first: KeyChanges,
        inbox: Inbox,
    ) -> Result<KeyReader, AgentError> {
        let (stop, stopped) = bounded::<()>(0);
        let body = move || {
            let mut reported = Vec::new();
            let mut changes = first;
            while report(&changes, &inbox) {
                if changes.unusable != reported {
                    for error in &changes.unusable {
                        tracing::warn!(error, "keeping the former encryption keys");
                    }
                    reported = changes.unusable;
                }
                if stopped.recv_timeout(READ_INTERVAL) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                changes = keys.read();
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

/// Notifies the core of changes; `false` if it has stopped.
fn report(changes: &KeyChanges, inbox: &Inbox) -> bool {
    for tenant in &changes.erased {
        tracing::warn!(%tenant, "a tenant that must be encrypted has no key: dropping its blocks");
    }
    for tenant in changes.erased.iter().chain(&changes.awaited) {
        if inbox.send(Input::TenantErased(tenant.clone())).is_err() {
            return false;
        }
    }
    for tenant in &changes.restored {
        tracing::info!(%tenant, "a tenant has an encryption key again");
        if inbox.send(Input::TenantRestored(tenant.clone())).is_err() {
            return false;
        }
    }
    true
}

impl Drop for KeyReader {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn name(text: &str) -> TenantName {
        text.parse().expect("a name")
    }

    /// Writes a file with keys, each made of one digit.
    fn write(folder: &Path, tenant: &str, digits: &[&str]) {
        let path = folder.join(tenant);
        let lines: Vec<String> = digits.iter().map(|digit| digit.repeat(64)).collect();
        fs::write(&path, lines.join("\n")).expect("writable");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("ours");
    }

    fn keys_of(keys: &EncryptionKeys, tenant: &str) -> Option<usize> {
        keys.of(&name(tenant)).map(|keys| keys.len())
    }

    #[test]
    fn first_line_encrypts_and_changes_are_found_without_a_restart() {
        let folder = tempfile::tempdir().expect("a directory");
        write(folder.path(), "team-a", &["1"]);
        let keys =
            EncryptionKeys::within(Some(folder.path().to_owned()), BTreeSet::new(), TenantSalts::default());
        assert_eq!(keys.read_first().expect("usable"), KeyChanges::default());
        let first = |keys: &EncryptionKeys| keys.of(&name("team-a")).expect("encrypted")[0].id();
        let before = first(&keys);
        write(folder.path(), "team-a", &["2", "1"]);
        assert_eq!(keys.read(), KeyChanges::default());
        assert_ne!(first(&keys), before);
        assert_eq!((keys_of(&keys, "team-a"), keys_of(&keys, "team-b")), (Some(2), None));
    }

    #[test]
    fn tenant_stays_encrypted_without_a_key_and_each_change_is_reported_once() {
        let folder = tempfile::tempdir().expect("a directory");
        write(folder.path(), "team-a", &["1"]);
        let required = BTreeSet::from([name("team-b")]);
        let keys = EncryptionKeys::within(Some(folder.path().to_owned()), required, TenantSalts::default());
        let erased = |tenant: &str| KeyChanges { erased: vec![name(tenant)], ..KeyChanges::default() };
        assert_eq!(keys.read_first().expect("usable"), KeyChanges::default());
        assert!(keys.are_missing(&name("team-b")) && !keys.is_erased(&name("team-b")), "refused at once");
        assert_eq!(keys.read(), erased("team-b"));
        fs::remove_file(folder.path().join("team-a")).expect("exists");
        assert_eq!((keys.read(), keys_of(&keys, "team-a")), (KeyChanges::default(), Some(1)));
        assert_eq!(keys.read(), erased("team-a"));
        assert_eq!(keys.read(), KeyChanges::default());
        assert!(keys.is_erased(&name("team-a")) && keys.is_erased(&name("team-b")));
        assert!(keys.are_missing(&name("team-a")) && keys.are_missing(&name("team-b")));
        write(folder.path(), "team-a", &["3"]);
        let restored = KeyChanges { restored: vec![name("team-a")], ..KeyChanges::default() };
        assert_eq!((keys.read(), keys.read()), (restored, KeyChanges::default()));
        assert!(!keys.is_erased(&name("team-a")));
    }

    #[test]
    fn lost_keys_take_effect_only_if_two_consecutive_readings_agree() {
        let folder = tempfile::tempdir().expect("a directory");
        write(folder.path(), "team-a", &["1"]);
        let required = BTreeSet::from([name("team-b")]);
        let keys = EncryptionKeys::within(Some(folder.path().to_owned()), required, TenantSalts::default());
        keys.read_first().expect("usable");
        write(folder.path(), "team-b", &["5"]);
        assert_eq!((keys.read(), keys_of(&keys, "team-b")), (KeyChanges::default(), Some(1)));
        let (path, away) = (folder.path().join("team-a"), folder.path().with_extension("away"));
        for _ in 0..2 {
            fs::rename(&path, &away).expect("exists");
            assert_eq!(keys.read(), KeyChanges::default());
            fs::rename(&away, &path).expect("exists");
            assert_eq!((keys.read(), keys_of(&keys, "team-a")), (KeyChanges::default(), Some(1)));
        }
        // The file of a rotation, of which the first line has been written.
        write(folder.path(), "team-a", &["2"]);
        let ids =
            || keys.of(&name("team-a")).expect("encrypted").iter().map(TenantKey::id).collect::<Vec<_>>();
        let before = ids();
        assert_eq!((keys.read(), ids()), (KeyChanges::default(), before.clone()));
        write(folder.path(), "team-a", &["2", "1"]);
        assert_eq!((keys.read(), ids().len()), (KeyChanges::default(), 2));
        assert_eq!(ids()[1..], before);
        write(folder.path(), "team-a", &["2"]);
        assert_eq!((keys.read(), keys_of(&keys, "team-a")), (KeyChanges::default(), Some(2)));
        write(folder.path(), "team-a", &["3"]);
        assert_eq!((keys.read(), keys_of(&keys, "team-a")), (KeyChanges::default(), Some(2)), "not the same");
        assert_eq!((keys.read(), keys_of(&keys, "team-a")), (KeyChanges::default(), Some(1)));
    }

    #[test]
    fn unusable_file_is_refused_at_start_and_keeps_the_former_keys_later() {
        let folder = tempfile::tempdir().expect("a directory");
        write(folder.path(), "team-a", &["1"]);
        let keys =
            EncryptionKeys::within(Some(folder.path().to_owned()), BTreeSet::new(), TenantSalts::default());
        keys.read_first().expect("usable");
        write(folder.path(), "team-a", &["1", "x"]);
        let changes = keys.read();
        assert_eq!((changes.erased.len(), changes.unusable.len()), (0, 1));
        assert_eq!(keys_of(&keys, "team-a"), Some(1));
        fs::rename(folder.path(), folder.path().with_extension("away")).expect("ours");
        let changes = keys.read();
        assert_eq!(
            (changes.erased.len(), changes.unusable.len()),
            (0, 1),
            "a folder that is away erases nothing"
        );
        fs::rename(folder.path().with_extension("away"), folder.path()).expect("ours");
        let error =
            EncryptionKeys::within(Some(folder.path().to_owned()), BTreeSet::new(), TenantSalts::default())
                .read_first()
                .expect_err("no key")
                .chain();
        assert!(error.contains("team-a") && error.contains("64 hexadecimal digits"), "{error}");
    }
}
