//! The last spec of the node, persisted on its disk, so that an agent can start while the API server is
//! unreachable.
//!
//! One file, replaced atomically: written under a temporary name, synced, renamed. An unreadable file is
//! ignored.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// File name in the state directory.
const FILE: &str = "cachenode.json";

/// Maximum size of the file. A spec at its schema limits has 200 KiB, most of it queue grants.
const BYTES_MAX: u64 = 1 << 20;

/// The spec as last read from the API server.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PersistedSpec {
    /// Name of the node: the disk may have moved from another one.
    pub node: String,
    /// Generation of the spec.
    pub generation: i64,
    /// The spec, including fields unknown to this version.
    pub spec: Value,
}

/// The agent's state directory, which holds the persisted spec.
#[derive(Clone, Debug)]
pub struct StateDirectory {
    path: PathBuf,
    node: String,
}

impl StateDirectory {
    /// Uses a state directory for a node.
    pub fn new(path: &Path, node: &str) -> StateDirectory {
        StateDirectory { path: path.to_owned(), node: node.to_owned() }
    }

    /// Reads the persisted spec of this node; `None` if the file does not exist.
    ///
    /// # Errors
    /// The file cannot be read or parsed, is too large, or belongs to another node.
    pub fn load(&self) -> Result<Option<PersistedSpec>, String> {
        let path = self.path.join(FILE);
        let failed = |why: String| Err(format!("{}: {why}", path.display()));
        match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return failed(error.to_string()),
            Ok(found) if found.len() > BYTES_MAX => {
                return failed("the file exceeds the maximum size of a spec".to_owned());
            }
            Ok(_) => {}
        }
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) => return failed(error.to_string()),
        };
        match serde_json::from_slice::<PersistedSpec>(&text) {
            Ok(persisted) if persisted.node == self.node => Ok(Some(persisted)),
            Ok(persisted) => {
                failed(format!("the file belongs to node '{}', not to '{}'", persisted.node, self.node))
            }
            Err(error) => failed(error.to_string()),
        }
    }

    /// Persists a spec.
    ///
    /// # Errors
    /// Writing or syncing failed.
    pub fn save(&self, generation: i64, spec: &Value) -> io::Result<()> {
        let persisted = PersistedSpec { node: self.node.clone(), generation, spec: spec.clone() };
        let text = serde_json::to_vec(&persisted)?;
        fs::create_dir_all(&self.path)?;
        let temporary = self.path.join(format!("{FILE}.new"));
        let mut file = File::create(&temporary)?;
        file.write_all(&text)?;
        file.sync_all()?;
        // Synced before the rename, so that a crash leaves either the old or the new file.
        fs::rename(&temporary, self.path.join(FILE))?;
        // The rename is durable only after a sync of the directory.
        File::open(&self.path)?.sync_all()
    }

    /// Removes the persisted spec.
    ///
    /// # Errors
    /// Removing or syncing failed.
    pub fn remove(&self) -> io::Result<()> {
        match fs::remove_file(self.path.join(FILE)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            removed => removed.and_then(|()| File::open(&self.path)?.sync_all()),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn spec_is_persisted_with_unknown_fields_until_it_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = StateDirectory::new(&folder.path().join("state"), "n");
        assert_eq!(state.load(), Ok(None));
        let spec = json!({ "nodeName": "n", "later": [1, 2] });
        for generation in [1, 2] {
            state.save(generation, &spec).expect("the spec is saved");
        }
        let persisted = state.load().expect("readable").expect("a persisted spec");
        assert_eq!((persisted.generation, persisted.spec), (2, spec));
        for _ in 0..2 {
            state.remove().expect("the file is removed");
            assert_eq!(state.load(), Ok(None));
        }
    }

    #[test]
    fn error_of_an_unusable_file_names_the_file_and_the_cause() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = StateDirectory::new(folder.path(), "n");
        let path = folder.path().join(FILE);
        let other = json!({ "node": "m", "generation": 1, "spec": {} }).to_string();
        for (text, words) in [("{\"node\":", "EOF"), ("17", "invalid type"), (other.as_str(), "'m'")] {
            fs::write(&path, text).expect("written");
            let error = state.load().expect_err("unusable");
            assert!(error.contains(words) && error.contains(FILE), "{error}");
        }
    }
}
