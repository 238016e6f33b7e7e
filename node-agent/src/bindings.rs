//! Mapping of pods to tenants, from a file that the operator writes and the kubelet delivers.
//!
//! It is read before the first session, so no session can use a tenant that is reserved for other pods. The
//! reconciler thread re-reads it periodically; an invalid file leaves the previous mapping in effect.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use reprise_policy::identity::PodBindings;

use crate::config::digest;
use crate::error::{AgentError, ErrorKind};

/// Maximum size of a ConfigMap.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// The mapping file and its current content; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct BindingsFile {
    path: PathBuf,
    current: Arc<Mutex<Current>>,
}

#[derive(Clone, Debug, Default)]
struct Current {
    bindings: Arc<PodBindings>,
    digest: String,
    /// The last error that was logged.
    logged_error: Option<String>,
}

impl BindingsFile {
    /// Reads the file for the first time.
    ///
    /// # Errors
    /// `ErrorKind::Config`: the file does not exist or is invalid.
    pub(crate) fn read(path: PathBuf) -> Result<BindingsFile, AgentError> {
        let (bindings, digest) = read(&path).map_err(|why| {
            let what =
                format!("invalid TENANTS_FILE '{}' (mapping of pods to tenants): {why}", path.display());
            AgentError::new(ErrorKind::Config, what)
        })?;
        let current = Current { bindings: Arc::new(bindings), digest, logged_error: None };
        Ok(BindingsFile { path, current: Arc::new(Mutex::new(current)) })
    }

    /// Returns the mapping in effect.
    pub(crate) fn current(&self) -> Arc<PodBindings> {
        self.locked().bindings.clone()
    }

    /// Returns the digest of the file in effect.
    pub(crate) fn digest(&self) -> String {
        self.locked().digest.clone()
    }

    /// Re-reads the file; an invalid one leaves the previous mapping in effect.
    pub(crate) fn refresh(&self) {
        let read = read(&self.path);
        let mut current = self.locked();
        match read {
            Ok((_, digest)) if digest == current.digest => current.logged_error = None,
            Ok((bindings, digest)) => {
                tracing::info!(
                    digest,
                    bindings = bindings.count(),
                    "the mapping of pods to tenants has changed"
                );
                *current = Current { bindings: Arc::new(bindings), digest, logged_error: None };
            }
            Err(why) if current.logged_error.as_ref() != Some(&why) => {
                tracing::warn!(path = %self.path.display(), why, "invalid mapping of pods to tenants; keeping the previous one");
                current.logged_error = Some(why);
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
        .map_err(|error| format!("cannot read the file: {error}"))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(format!("the file exceeds {FILE_BYTES_MAX} bytes"));
    }
    let bindings = serde_json::from_slice(&bytes)
        .map_err(|error| format!("this version of the agent cannot parse the file: {error}"))?;
    Ok((bindings, digest(&bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHAT: &str = r#"{"tenants":["a"],"namespaces":{"chat":"a"},"serviceAccounts":{}}"#;
    const NO_TENANTS: &str = r#"{"tenants":[],"namespaces":{},"serviceAccounts":{}}"#;

    #[test]
    fn changed_file_is_applied_and_invalid_file_is_ignored() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("tenants.json");
        let error = BindingsFile::read(path.clone()).expect_err("the file is missing").chain();
        assert!(error.contains("TENANTS_FILE") && error.contains("cannot read"), "{error}");
        std::fs::write(&path, CHAT).expect("written");
        let file = BindingsFile::read(path.clone()).expect("reads");
        let is_bound = |file: &BindingsFile| file.current().is_bound(&"a".parse().expect("a name"));
        assert!(is_bound(&file));
        assert_eq!(file.digest(), digest(CHAT.as_bytes()));
        for wrong in ["{", r#"{"tenants":["A"]}"#, &" ".repeat(FILE_BYTES_MAX as usize + 1)] {
            std::fs::write(&path, wrong).expect("written");
            file.refresh();
            assert!(is_bound(&file) && file.digest() == digest(CHAT.as_bytes()));
        }
        std::fs::write(&path, NO_TENANTS).expect("written");
        file.refresh();
        assert!(!is_bound(&file) && file.digest() == digest(NO_TENANTS.as_bytes()));
    }
}
