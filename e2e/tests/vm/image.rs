//! The initial file system of a virtual machine: a cpio archive in the format newc, which the kernel unpacks.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Modes of entries (stat(2)).
const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;

/// Files by their paths, without the leading slash.
#[derive(Clone, Debug)]
pub(crate) struct Image {
    files: BTreeMap<String, (u32, Vec<u8>)>,
}

impl Image {
    /// Creates an image with an init and empty folders for mounts.
    pub(crate) fn new(init: &Path) -> io::Result<Image> {
        let mut image = Image { files: BTreeMap::new() };
        for folder in ["proc", "sys", "dev", "tmp"] {
            image.add_folder(folder);
        }
        image.add("init", fs::read(init)?);
        Ok(image)
    }

    fn add_folder(&mut self, path: &str) {
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.add_folder(parent);
        }
        self.files.entry(path.to_owned()).or_insert((FOLDER, Vec::new()));
    }

    fn add(&mut self, path: &str, contents: Vec<u8>) {
        if let Some((parent, _)) = path.rsplit_once('/') {
            self.add_folder(parent);
        }
        self.files.insert(path.to_owned(), (PROGRAM, contents));
    }

    pub(crate) fn add_busybox(&mut self, packages: &Path) -> io::Result<()> {
        let path = ["bin/busybox", "usr/bin/busybox"].map(|path| packages.join(path));
        let path = path.iter().find(|path| path.exists()).ok_or_else(|| missing("busybox"))?;
        self.add("bin/busybox", fs::read(path)?);
        Ok(())
    }

    /// Adds a program of this machine under a name, without debug information, and its libraries at their places.
    pub(crate) fn add_program(&mut self, name: &str, program: &Path, scratch: &Path) -> io::Result<()> {
        let stripped = scratch.join(name);
        let status = Command::new("objcopy").arg("--strip-debug").arg(program).arg(&stripped).status()?;
        if !status.success() {
            return Err(io::Error::other(format!("objcopy cannot read {}", program.display())));
        }
        self.add(&format!("bin/{name}"), fs::read(stripped)?);
        let output = Command::new("ldd").arg(program).output()?;
        for word in String::from_utf8_lossy(&output.stdout).split_whitespace() {
            if let Some(path) = word.strip_prefix('/') {
                self.add(path, fs::read(word)?);
            }
        }
        Ok(())
    }

    /// Adds kernel modules with those that they depend on, and their order.
    pub(crate) fn add_modules(&mut self, packages: &Path, names: &[&str]) -> io::Result<()> {
        let mut found = BTreeMap::new();
        for folder in ["lib/modules", "usr/lib/modules"] {
            find_modules(&packages.join(folder), &mut found)?;
        }
        let (mut order, mut seen) = (Vec::new(), BTreeSet::new());
        for name in names {
            self.add_module(&canonical(name), &found, &mut seen, &mut order)?;
        }
        self.add("modules/order", format!("{}\n", order.join("\n")).into_bytes());
        Ok(())
    }

    fn add_module(
        &mut self,
        name: &str,
        found: &BTreeMap<String, PathBuf>,
        seen: &mut BTreeSet<String>,
        order: &mut Vec<String>,
    ) -> io::Result<()> {
        if !seen.insert(name.to_owned()) {
            return Ok(());
        }
        let path = found.get(name).ok_or_else(|| missing(&format!("kernel module {name}")))?;
        let contents = fs::read(path)?;
        for other in dependencies(&contents) {
            self.add_module(&canonical(&other), found, seen, order)?;
        }
        order.push(name.to_owned());
        self.add(&format!("modules/{name}.ko"), contents);
        Ok(())
    }

    /// Adds the script that init runs.
    pub(crate) fn with_script(mut self, script: &str) -> Image {
        self.add("tests.sh", script.as_bytes().to_vec());
        self
    }

    /// Size of all files.
    pub(crate) fn bytes(&self) -> usize {
        self.files.values().map(|(_, contents)| contents.len()).sum()
    }

    /// Writes the archive to a file.
    pub(crate) fn write(&self, path: &Path) -> io::Result<()> {
        let mut archive = Vec::new();
        for (inode, (name, (mode, contents))) in (1..).zip(&self.files) {
            append(&mut archive, inode, name, *mode, contents);
        }
        append(&mut archive, 0, "TRAILER!!!", 0, &[]);
        fs::write(path, archive)
    }
}

/// Appends an entry: a header of 13 hexadecimal fields, name and contents, each padded to 4 bytes (the kernel's
/// Documentation/driver-api/early-userspace/buffer-format.rst).
fn append(archive: &mut Vec<u8>, inode: usize, name: &str, mode: u32, contents: &[u8]) {
    let links = 1;
    let fields = [inode, mode as usize, 0, 0, links, 0, contents.len(), 0, 0, 0, 0, name.len() + 1, 0]
        .map(|field| format!("{field:08x}"));
    archive.extend_from_slice(format!("070701{}{name}\0", fields.concat()).as_bytes());
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend_from_slice(contents);
    archive.resize(archive.len().next_multiple_of(4), 0);
}

fn missing(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::NotFound, format!("{what} is missing in the packages"))
}

/// Names of modules have underscores, names of their files may have hyphens.
fn canonical(name: &str) -> String {
    name.replace('-', "_")
}

fn find_modules(folder: &Path, found: &mut BTreeMap<String, PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(folder).into_iter().flatten() {
        let path = entry?.path();
        if path.is_dir() {
            find_modules(&path, found)?;
        } else if path.extension().is_some_and(|extension| extension == "ko") {
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            found.insert(canonical(&name), path.clone());
        }
    }
    Ok(())
}

/// Reads the modules that a module needs from its section .modinfo: texts that end with 0.
fn dependencies(module: &[u8]) -> Vec<String> {
    const KEY: &[u8] = b"\0depends=";
    let Some(at) = module.windows(KEY.len()).position(|window| window == KEY) else { return Vec::new() };
    let text = module[at + KEY.len()..].split(|byte| *byte == 0).next().unwrap_or_default();
    let text = String::from_utf8_lossy(text);
    text.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}
