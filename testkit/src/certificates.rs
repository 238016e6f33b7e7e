//! Certificates of a cluster under test: an authority in memory, and a folder for each process.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::Context;
use reprise_identity::authority::{Authority, CERTIFICATE_VALID, Issued};
use reprise_identity::credentials::{AUTHORITIES_FILE, CERTIFICATE_FILE, KEY_FILE};
use reprise_identity::{Identity, Role};
use time::{Duration, OffsetDateTime};

/// Name of the cluster in the certificates.
pub const CLUSTER: &str = "test";

/// Issues the certificates of a cluster into folders.
#[derive(Debug)]
pub struct Certificates {
    authority: Authority,
    folder: PathBuf,
}

impl Certificates {
    /// Creates an authority whose certificates are written below `folder`.
    ///
    /// # Errors
    /// No key can be generated.
    pub fn create(folder: &Path) -> anyhow::Result<Certificates> {
        let authority = Authority::create(CLUSTER).context("cannot create an authority")?;
        Ok(Certificates { authority, folder: folder.to_owned() })
    }

    /// Returns the authority of the cluster.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Issues a certificate, and returns its folder, which is named after the role: `agent-node-1`, `member`.
    ///
    /// # Errors
    /// The folder cannot be written.
    pub fn issue(&self, role: &Role) -> anyhow::Result<PathBuf> {
        let folder = self.folder_of(role);
        let issued = self.authority.issue(&identity(role)?, CERTIFICATE_VALID)?;
        write(&folder, self.authority.certificate(), &issued)?;
        Ok(folder)
    }

    /// Issues a certificate that has ended a day ago.
    ///
    /// # Errors
    /// As [`issue`](Certificates::issue).
    pub fn issue_ended(&self, role: &Role) -> anyhow::Result<PathBuf> {
        let folder = self.folder.join("ended").join(role.to_string().replace('/', "-"));
        let now = OffsetDateTime::now_utc();
        let (from, until) = (now - Duration::days(3), now - Duration::days(1));
        let issued = self.authority.issue_between(&identity(role)?, from, until)?;
        write(&folder, self.authority.certificate(), &issued)?;
        Ok(folder)
    }

    /// Returns the folder of a role.
    pub fn folder_of(&self, role: &Role) -> PathBuf {
        self.folder.join(role.to_string().replace('/', "-"))
    }

    /// Issues a certificate for an agent.
    ///
    /// # Errors
    /// As [`issue`](Certificates::issue).
    pub fn agent(&self, node: &str) -> anyhow::Result<PathBuf> {
        self.issue(&Role::Agent(node.to_owned()))
    }
}

/// Returns the identity of a role in the cluster under test.
///
/// # Errors
/// The name of the node is invalid.
pub fn identity(role: &Role) -> anyhow::Result<Identity> {
    Ok(Identity::new(CLUSTER, role.clone())?)
}

/// Writes the three files of a process; `authorities` may have several certificates. Each file is replaced at once.
///
/// # Errors
/// A file cannot be written.
pub fn write(folder: &Path, authorities: &str, issued: &Issued) -> anyhow::Result<()> {
    let cannot = || format!("cannot write certificates into {}", folder.display());
    fs::create_dir_all(folder).with_context(cannot)?;
    let files =
        [(AUTHORITIES_FILE, authorities), (CERTIFICATE_FILE, &issued.certificate), (KEY_FILE, &issued.key)];
    for (name, text) in files {
        let new = folder.join(format!("{name}.new"));
        fs::write(&new, text).with_context(cannot)?;
        fs::set_permissions(&new, fs::Permissions::from_mode(0o600)).with_context(cannot)?;
        fs::rename(&new, folder.join(name)).with_context(cannot)?;
    }
    Ok(())
}

/// Returns the setting of an agent or a member that uses these certificates; `None`: plain connections.
pub fn settings(folder: Option<&Path>) -> String {
    match folder {
        Some(folder) => {
            format!("tls.folder = {}\n", toml::Value::from(folder.to_string_lossy().into_owned()))
        }
        None => "tls.plain = true\n".to_owned(),
    }
}
