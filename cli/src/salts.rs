//! Files of isolation salts, as agents read them from the folder `session.salts`.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context, bail, ensure};
use reprise_client::learned_salt;
use reprise_policy::{TenantName, TenantSalt};

/// Creates the salt of a tenant in a folder, and returns its file. An existing salt is never replaced, because all
/// blocks of the tenant would be lost.
pub(crate) fn create(tenant: &TenantName, folder: &Path) -> anyhow::Result<PathBuf> {
    ensure!(
        *tenant != TenantName::default_tenant(),
        "tenant 'default' is not isolated and has no salt: name another tenant"
    );
    let exists = DirBuilder::new().recursive(true).mode(0o700).create(folder);
    exists.with_context(|| format!("cannot create {}", folder.display()))?;
    let path = folder.join(tenant.as_str());
    let salt = learned_salt::random().context("cannot read random bytes")?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
    let mut file = match file {
        Ok(file) => file,
        Err(error) if error.kind() == ErrorKind::AlreadyExists => bail!(
            "{} exists: copy it to the other nodes. With another salt, all blocks of the tenant are lost; to get one, \
             remove the file on all nodes first",
            path.display()
        ),
        Err(error) => return Err(error).with_context(|| format!("cannot create {}", path.display())),
    };
    let written = file.write_all(format!("{}\n", salt.to_hex()).as_bytes()).and_then(|()| file.sync_all());
    written.with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// Reads a salt's file.
pub(crate) fn read(path: &Path) -> anyhow::Result<TenantSalt> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    TenantSalt::from_hex(&text)
        .with_context(|| format!("{} is not a salt: expected 64 hexadecimal digits", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn salts_are_random_readable_by_the_owner_only_and_never_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
        let [first, second] = ["a", "b"].map(|name| name.parse::<TenantName>().expect("a name"));
        let salts = folder.path().join("salts");
        let path = create(&first, &salts).expect("created");
        assert_eq!(fs::metadata(&path).expect("exists").permissions().mode() & 0o777, 0o600);
        let salt = read(&path).expect("a salt");
        let other = create(&second, &salts).expect("created");
        assert_ne!(salt, read(&other).expect("a salt"));
        let error = create(&first, &salts).expect_err("it exists").to_string();
        assert!(error.contains("copy it to the other nodes"), "{error}");
        assert_eq!(read(&path).expect("unchanged"), salt);
        assert!(create(&TenantName::default_tenant(), &salts).is_err());
    }
}
