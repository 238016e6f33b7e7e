//! Which pods are which tenant's, as the operator writes it into a file that the kubelet brings.
//!
//! It is read once before the first session, since nobody may be a tenant that is kept for others; and again from time to time by the
//! thread of the claims. What cannot be read then leaves what was read before in effect.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use reprise_policy::identity::PodBindings;

use crate::config::digest;
use crate::error::{AgentError, ErrorKind};

/// What a ConfigMap holds.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// See the module. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct BindingsFile {
    path: PathBuf,
    current: Arc<Mutex<Current>>,
}

#[derive(Clone, Debug, Default)]
struct Current {
    bindings: Arc<PodBindings>,
    digest: String,
    /// Why the file could not be read, as it was said.
    said: Option<String>,
}

impl BindingsFile {
    /// Reads it for the first time.
    ///
    /// # Errors
    /// `ErrorKind::Config`: it is not there, or cannot be used.
    pub(crate) fn read(path: PathBuf) -> Result<BindingsFile, AgentError> {
        let (bindings, digest) = read(&path).map_err(|why| {
            let what = format!("TENANTS_FILE '{}' says which pods are which tenant's: {why}", path.display());
            AgentError::new(ErrorKind::Config, what)
        })?;
        let current = Current { bindings: Arc::new(bindings), digest, said: None };
        Ok(BindingsFile { path, current: Arc::new(Mutex::new(current)) })
    }

    /// What is in effect.
    pub(crate) fn current(&self) -> Arc<PodBindings> {
        self.locked().bindings.clone()
    }

    /// Digest of the file that is in effect.
    pub(crate) fn digest(&self) -> String {
        self.locked().digest.clone()
    }

    /// Takes over what the file says by now.
    pub(crate) fn look(&self) {
        let read = read(&self.path);
        let mut current = self.locked();
        match read {
            Ok((_, digest)) if digest == current.digest => current.said = None,
            Ok((bindings, digest)) => {
                tracing::info!(digest, bindings = bindings.count(), "which pods are which tenant's is new");
                *current = Current { bindings: Arc::new(bindings), digest, said: None };
            }
            Err(why) if current.said.as_ref() != Some(&why) => {
                tracing::warn!(path = %self.path.display(), why, "which pods are which tenant's stays as it was");
                current.said = Some(why);
            }
            Err(_) => {}
        }
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn read(path: &Path) -> Result<(PodBindings, String), String> {
    let mut bytes = Vec::new();
    File::open(path)
        .and_then(|file| file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes))
        .map_err(|error| format!("it cannot be read: {error}"))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(format!("it has more than {FILE_BYTES_MAX} bytes"));
    }
    let bindings = serde_json::from_slice(&bytes)
        .map_err(|error| format!("this version of the agent cannot read it: {error}"))?;
    Ok((bindings, digest(&bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHAT: &str = r#"{"tenants":["a"],"namespaces":{"chat":"a"},"serviceAccounts":{}}"#;
    const NOBODY: &str = r#"{"tenants":[],"namespaces":{},"serviceAccounts":{}}"#;

    #[test]
    fn what_the_file_says_is_taken_over_and_what_cannot_be_read_changes_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tenants.json");
        let error = BindingsFile::read(path.clone()).expect_err("it is not there").chain();
        assert!(error.contains("TENANTS_FILE") && error.contains("cannot be read"), "{error}");
        std::fs::write(&path, CHAT).expect("written");
        let file = BindingsFile::read(path.clone()).expect("reads");
        let is_bound = |file: &BindingsFile| file.current().is_bound(&"a".parse().expect("a name"));
        assert!(is_bound(&file));
        assert_eq!(file.digest(), digest(CHAT.as_bytes()));
        for wrong in ["{", r#"{"tenants":["A"]}"#, &" ".repeat(FILE_BYTES_MAX as usize + 1)] {
            std::fs::write(&path, wrong).expect("written");
            file.look();
            assert!(is_bound(&file) && file.digest() == digest(CHAT.as_bytes()));
        }
        std::fs::write(&path, NOBODY).expect("written");
        file.look();
        assert!(!is_bound(&file) && file.digest() == digest(NOBODY.as_bytes()));
    }
}
