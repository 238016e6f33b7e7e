//! Files of encryption keys, as agents read them from the folder `encryption.keys`: a key of 64 digits in each line, the
//! one that encrypts first.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use reprise_client::learned_salt;
use reprise_policy::{TenantName, TenantSalt};

/// Maximum number of keys that agents read.
const KEYS_MAX: usize = 16;

/// What to do with the keys of a tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum KeyChange {
    /// Create the first key. Existing keys stay.
    Create,
    /// Put a new key before the existing ones.
    Rotate,
}

/// Creates a key of a tenant in a folder, and returns its file.
pub(crate) fn create(tenant: &TenantName, folder: &Path, change: KeyChange) -> anyhow::Result<PathBuf> {
    let exists = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    exists.with_context(|| format!("cannot create {}", folder.display()))?;
    let path = folder.join(tenant.as_str());
    let former = match (change, fs::read_to_string(&path)) {
        (KeyChange::Create, Ok(_)) => bail!(
            "{} exists: copy it to the other nodes, or add --rotate to put a new key before the existing one",
            path.display()
        ),
        (KeyChange::Rotate, Ok(text)) => text,
        (KeyChange::Create, Err(error)) if error.kind() == ErrorKind::NotFound => String::new(),
        (KeyChange::Rotate, Err(error)) if error.kind() == ErrorKind::NotFound => {
            bail!("{} does not exist: omit --rotate to create the first key", path.display())
        }
        (_, Err(error)) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let keys: Vec<&str> = former.split_whitespace().collect();
    ensure!(
        keys.iter().all(|key| TenantSalt::from_hex(key).is_some()),
        "{} is not a file of keys: expected 64 hexadecimal digits in each line",
        path.display()
    );
    ensure!(
        keys.len() < KEYS_MAX,
        "{} has {} keys, and agents read {KEYS_MAX}: remove the last line, whose blocks are lost",
        path.display(),
        keys.len()
    );
    let key = learned_salt::random().context("cannot read random bytes")?;
    let lines: String = [key.to_hex().as_str()].iter().chain(&keys).map(|key| format!("{key}\n")).collect();
    // Agents may read the file at any time.
    let fresh = folder.join(format!(".{tenant}.{}", std::process::id()));
    let written =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(&fresh).and_then(|mut file| {
            file.write_all(lines.as_bytes())?;
            file.sync_all()?;
            fs::rename(&fresh, &path)
        });
    written.with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn keys_are_readable_by_the_owner_only_and_a_rotation_keeps_former_ones() {
        let folder = tempfile::tempdir().expect("a folder");
        let tenant: TenantName = "team-a".parse().expect("a name");
        let keys = folder.path().join("keys");
        assert!(create(&tenant, &keys, KeyChange::Rotate).is_err(), "there is nothing to rotate");
        let path = create(&tenant, &keys, KeyChange::Create).expect("created");
        let first = fs::read_to_string(&path).expect("a file");
        let error = create(&tenant, &keys, KeyChange::Create).expect_err("it exists").to_string();
        assert!(error.contains("--rotate"), "{error}");
        create(&tenant, &keys, KeyChange::Rotate).expect("rotated");
        let both = fs::read_to_string(&path).expect("a file");
        assert!(both.ends_with(&first) && both.len() == 2 * first.len() && first.len() == 65, "{both}");
        assert_eq!(fs::metadata(&path).expect("exists").permissions().mode() & 0o777, 0o600);
        for _ in 2..KEYS_MAX {
            create(&tenant, &keys, KeyChange::Rotate).expect("rotated");
        }
        let error = create(&tenant, &keys, KeyChange::Rotate).expect_err("too many").to_string();
        assert!(error.contains("remove the last line"), "{error}");
    }
}
