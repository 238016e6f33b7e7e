//! Files of credentials, replaced so that a reader never sees a part of one.
//!
//! Each file is written under another name in its folder, synchronised and renamed. The three files of a process are three renames, so a
//! reader may see old and new files together for an instant; [`crate::Credentials::parse`] refuses such a mix, and the
//! process keeps the credentials before. The order is chosen so that a mix after a crash is either usable or refused.

use std::fs::{self, File, OpenOptions, Permissions};
use std::io::{self, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use crate::credentials::{AUTHORITIES_FILE, CERTIFICATE_FILE, Files, KEY_FILE};

/// Mode of keys: only their owner reads them.
pub(crate) const SECRET: u32 = 0o600;
/// Mode of certificates: all users read them.
pub(crate) const PUBLIC: u32 = 0o644;
/// Mode of folders with keys.
const FOLDER: u32 = 0o700;

/// Creates a folder that only its owner may use; an existing one stays as it is.
pub(crate) fn create_folder(folder: &Path) -> io::Result<()> {
    if folder.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(folder)?;
    fs::set_permissions(folder, Permissions::from_mode(FOLDER))
}

/// Writes a file of a folder, replacing it in one step.
pub(crate) fn replace(folder: &Path, name: &str, mode: u32, content: &[u8]) -> io::Result<()> {
    let new = prepare(folder, name, mode, content)?;
    fs::rename(&new, folder.join(name))?;
    File::open(folder)?.sync_all()
}

/// Writes a file under another name; returns its path.
fn prepare(folder: &Path, name: &str, mode: u32, content: &[u8]) -> io::Result<PathBuf> {
    let new = folder.join(format!(".{name}.new"));
    match fs::remove_file(&new) {
        // Left behind by a process that was killed.
        Ok(()) => {}
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(&new)?;
    file.write_all(content)?;
    file.sync_all()?;
    Ok(new)
}

/// Writes the three files of a process.
pub(crate) fn replace_files(folder: &Path, files: &Files) -> io::Result<()> {
    let prepared = [
        // Before its certificate, so that the authorities always trust it.
        (AUTHORITIES_FILE, prepare(folder, AUTHORITIES_FILE, PUBLIC, &files.authorities)?),
        (KEY_FILE, prepare(folder, KEY_FILE, SECRET, &files.key)?),
        (CERTIFICATE_FILE, prepare(folder, CERTIFICATE_FILE, PUBLIC, &files.certificate)?),
    ];
    // One after another without a write in between: a reader rarely sees a mix of old and new files.
    for (name, new) in prepared {
        fs::rename(new, folder.join(name))?;
    }
    File::open(folder)?.sync_all()
}
