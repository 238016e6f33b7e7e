//! The last spec of the node, kept on the node's disk: what an agent starts from while the API server is away.
//!
//! One file, replaced whole: written beside, synced, renamed. A file that cannot be read is as none.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The file in the state directory.
const FILE: &str = "cachenode.json";

/// A spec has 200 KiB at its bounds, most of it grants of queue pairs.
const BYTES_MAX: u64 = 1 << 20;

/// A spec as it was read last.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct KeptSpec {
    /// The node. A disk may have moved.
    pub node: String,
    /// Generation of the spec.
    pub generation: i64,
    /// The spec, with fields that this version does not know.
    pub spec: Value,
}

/// Where the spec is kept.
#[derive(Clone, Debug)]
pub struct StateDirectory {
    path: PathBuf,
    node: String,
}

impl StateDirectory {
    /// A directory of an agent's own.
    pub fn new(path: &Path, node: &str) -> StateDirectory {
        StateDirectory { path: path.to_owned(), node: node.to_owned() }
    }

    /// What was kept of this node; `None` when nothing was.
    ///
    /// # Errors
    /// It is there and cannot be used, in words.
    pub fn load(&self) -> Result<Option<KeptSpec>, String> {
        let path = self.path.join(FILE);
        let failed = |why: String| Err(format!("{}: {why}", path.display()));
        match fs::metadata(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return failed(error.to_string()),
            Ok(found) if found.len() > BYTES_MAX => return failed("too large for a spec".to_owned()),
            Ok(_) => {}
        }
        let text = match fs::read(&path) {
            Ok(text) => text,
            Err(error) => return failed(error.to_string()),
        };
        match serde_json::from_slice::<KeptSpec>(&text) {
            Ok(kept) if kept.node == self.node => Ok(Some(kept)),
            Ok(kept) => failed(format!("it is of node '{}', and this is '{}'", kept.node, self.node)),
            Err(error) => failed(error.to_string()),
        }
    }

    /// Keeps a spec.
    ///
    /// # Errors
    /// The disk's.
    pub fn save(&self, generation: i64, spec: &Value) -> io::Result<()> {
        let kept = KeptSpec { node: self.node.clone(), generation, spec: spec.clone() };
        let text = serde_json::to_vec(&kept)?;
        fs::create_dir_all(&self.path)?;
        let beside = self.path.join(format!("{FILE}.new"));
        let mut file = File::create(&beside)?;
        file.write_all(&text)?;
        file.sync_all()?;
        fs::rename(&beside, self.path.join(FILE))?;
        File::open(&self.path)?.sync_all()
    }

    /// Keeps nothing any more.
    ///
    /// # Errors
    /// The disk's.
    pub fn forget(&self) -> io::Result<()> {
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
    fn what_was_kept_comes_back_with_fields_that_nobody_knows_until_it_is_forgotten() {
        let folder = tempfile::tempdir().expect("a folder");
        let state = StateDirectory::new(&folder.path().join("state"), "n");
        assert_eq!(state.load(), Ok(None));
        let spec = json!({ "nodeName": "n", "later": [1, 2] });
        for generation in [1, 2] {
            state.save(generation, &spec).expect("a disk with room");
        }
        let kept = state.load().expect("readable").expect("there");
        assert_eq!((kept.generation, kept.spec), (2, spec));
        for _ in 0..2 {
            state.forget().expect("a disk that works");
            assert_eq!(state.load(), Ok(None));
        }
    }

    #[test]
    fn a_file_that_cannot_be_used_is_named_with_what_is_wrong() {
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
