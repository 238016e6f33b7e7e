//! The files of the repository. The list comes from git, so untracked files are not checked.

use std::fs;
use std::path::Path;
use std::process::Command;

/// Tracked files of a source tree, read once.
pub(crate) struct Tree {
    files: Vec<File>,
}

/// A tracked file that exists.
pub(crate) struct File {
    /// Path from the root, with `/`.
    pub(crate) path: String,
    pub(crate) bytes: u64,
    /// Content; empty if it is not UTF-8.
    pub(crate) text: String,
}

impl Tree {
    /// Reads the tree of this checkout. Several checkouts may share one target folder, so its path comes from
    /// cargo's environment at run time.
    ///
    /// # Panics
    /// If this is not a checkout of this repository.
    pub(crate) fn read() -> Tree {
        let manifest = std::env::var_os("CARGO_MANIFEST_DIR").expect("run it as `cargo xtask`");
        let root = Path::new(&manifest).parent().expect("the crate is in the repository").to_owned();
        let output = Command::new("git").arg("ls-files").current_dir(&root).output().expect("git runs");
        assert!(output.status.success(), "git ls-files failed: the checks need a git checkout");
        let names = String::from_utf8(output.stdout).expect("file names are UTF-8");
        let files: Vec<File> = names.lines().filter_map(|name| File::read(&root, name)).collect();
        let tree = Tree { files };
        assert!(tree.file("Cargo.toml").is_some(), "the list of files is not that of this repository");
        tree
    }

    /// Creates a tree from paths and texts, for tests.
    #[cfg(test)]
    pub(crate) fn of(files: &[(&str, &str)]) -> Tree {
        let files = files.iter().map(|(path, text)| File {
            path: (*path).to_owned(),
            bytes: text.len() as u64,
            text: (*text).to_owned(),
        });
        Tree { files: files.collect() }
    }

    pub(crate) fn files(&self) -> impl Iterator<Item = &File> {
        self.files.iter()
    }

    pub(crate) fn file(&self, path: &str) -> Option<&File> {
        self.files.iter().find(|file| file.path == path)
    }

    /// Files with one of these endings of their names.
    pub(crate) fn ending(&self, kind: &str) -> impl Iterator<Item = &File> {
        self.files.iter().filter(move |file| file.path.ends_with(kind))
    }

    /// Source files of Rust.
    pub(crate) fn rust(&self) -> impl Iterator<Item = &File> {
        self.ending(".rs")
    }
}

impl File {
    fn read(root: &Path, name: &str) -> Option<File> {
        let path = root.join(name);
        let bytes = fs::metadata(&path).ok().filter(fs::Metadata::is_file)?.len();
        let text = fs::read(&path).ok().and_then(|bytes| String::from_utf8(bytes).ok()).unwrap_or_default();
        Some(File { path: name.to_owned(), bytes, text })
    }
}
