//! The folder of an authority on bare metal: `reprise certs` takes the operator's role with it.
//!
//! | file | content |
//! |---|---|
//! | `ca.crt` | trusted authorities: one, or two during a replacement |
//! | `ca.key` | key of the authority that issues; its certificate is the one in `ca.crt` that it belongs to |
//! | `next.key` | key of the next authority, from `add` to `switch` |
//! | `issued.json` | certificates that were issued and have not ended, with their folders |
//! | `lock` | held while a command changes the folder |
//!
//! ```text
//!            add                      switch                       remove
//! Settled ────────▶ Added ──────────────────────▶ Switched ──────────────────▶ Settled
//!           two in ca.crt    next.key becomes ca.key         one in ca.crt
//! ```
//!
//! Each arrow is one rename, so a crash leaves the state before or after it. `switch` and `remove` first check by
//! `issued.json` that all certificates were renewed since the step before; whether their files arrived at other machines
//! they cannot know.

mod issued;
#[cfg(test)]
mod tests;

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rustls::pki_types::CertificateDer;

use self::issued::IssuedList;
pub use self::issued::IssuedRecord;
use crate::authority::{AUTHORITY_VALID, Authority, AuthorityError};
use crate::certificate::{CertificateFacts, Fingerprint, certificates, is_key_of, split};
use crate::credentials::{AUTHORITIES_FILE, CERTIFICATE_FILE, Credentials, CredentialsError, Files};
use crate::name::{Identity, NameError, Role};
use crate::write;

/// Key of the authority that issues.
pub const AUTHORITY_KEY_FILE: &str = "ca.key";
/// Key of the next authority.
const NEXT_KEY_FILE: &str = "next.key";
const LOCK_FILE: &str = "lock";
/// Start of the common name of an authority; the name of the cluster follows.
const SUBJECT: &str = "reprise ";

/// Folder of an authority, locked for this process.
#[derive(Debug)]
pub struct AuthorityFolder {
    folder: PathBuf,
    cluster: String,
    /// Text of `ca.crt`.
    trusted: String,
    issuer: Authority,
    facts: CertificateFacts,
    authorities: Vec<CertificateFacts>,
    step: Step,
    _lock: File,
}

/// State of the replacement of an authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Step {
    /// There is one authority.
    Settled,
    /// Two are trusted, and the former one issues.
    Added,
    /// Two are trusted, and the new one issues.
    Switched,
}

/// Whether a step is made although certificates were not renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unrenewed {
    /// The step is refused.
    Refuse,
    /// Processes with these certificates are refused by others from now on.
    Abandon,
}

/// Result of a renewal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// The files were replaced.
    Renewed {
        /// Reason for it.
        why: &'static str,
        /// Record of the new certificate.
        record: IssuedRecord,
    },
    /// Files stay: more than a third of the validity is left.
    NotDue {
        /// Identity of the certificate.
        identity: Identity,
        /// Time until a renewal is due.
        due_in: Duration,
    },
}

/// Reason why an authority refuses a command; the text has the remedy.
#[derive(Debug, thiserror::Error)]
pub enum FolderError {
    /// There is an authority already.
    #[error(
        "{0} has an authority already: choose another folder, or replace the authority with `reprise certs authority add`"
    )]
    Exists(PathBuf),
    /// There is no authority.
    #[error(
        "{0} is not the folder of an authority ({1}): create one with `reprise certs init`, or restore its files"
    )]
    NotAuthority(PathBuf, String),
    /// The key of the authority is readable by other users.
    #[error(
        "{path} has mode {mode:03o}, so other users may read it: run `chmod 600 {path}`; if it may have been read, replace the authority"
    )]
    KeyMode {
        /// Path of the key.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// A file cannot be read or written.
    #[error("cannot {0} {1}: {2}")]
    Io(&'static str, PathBuf, io::Error),
    /// The list of issued certificates cannot be read.
    #[error(
        "{0} is not a list of certificates ({1}): restore it, or delete it and renew all folders with `reprise certs renew --force`"
    )]
    List(PathBuf, serde_json::Error),
    /// The authority cannot issue.
    #[error(transparent)]
    Authority(#[from] AuthorityError),
    /// The certificate would outlive its authority.
    #[error(
        "a validity of {asked} days exceeds that of the authority, which ends in {left} days: choose a shorter one, or \
         replace the authority with `reprise certs authority add`"
    )]
    Outlives {
        /// Validity asked for.
        asked: u64,
        /// Time left.
        left: u64,
    },
    /// The name of the cluster or node is invalid.
    #[error(transparent)]
    Name(#[from] NameError),
    /// Files of a process are invalid.
    #[error("{0}: {1}")]
    Credentials(PathBuf, CredentialsError),
    /// The folder belongs to another process.
    #[error(
        "{folder} has the certificate of {found}, not of {asked}: choose another folder, or delete this one"
    )]
    Other {
        /// Folder of the process.
        folder: PathBuf,
        /// Identity in it.
        found: Identity,
        /// Identity asked for.
        asked: Identity,
    },
    /// The folder belongs to another cluster.
    #[error(
        "{folder} has the certificate of {found}, and this authority is of cluster {cluster}: use that cluster's authority"
    )]
    Cluster {
        /// Folder of the process.
        folder: PathBuf,
        /// Identity in it.
        found: Identity,
        /// Cluster of the authority.
        cluster: String,
    },
    /// The step is not the next one.
    #[error("{0}")]
    Step(&'static str),
    /// Certificates were not renewed since the step before.
    #[error(
        "not renewed since the step before: {0}; run `reprise certs renew` for these folders and copy them to their \
         machines, or abandon the processes with --force"
    )]
    Unrenewed(String),
}

impl AuthorityFolder {
    /// Creates an authority for a cluster.
    ///
    /// # Errors
    /// The folder has one already, the name is invalid, or files cannot be written.
    pub fn create(folder: &Path, cluster: &str) -> Result<AuthorityFolder, FolderError> {
        Identity::new(cluster, Role::Member)?;
        write::create_folder(folder).map_err(io_error("create", folder))?;
        let lock = lock(folder)?;
        for name in [AUTHORITIES_FILE, AUTHORITY_KEY_FILE, CERTIFICATE_FILE] {
            if folder.join(name).exists() {
                return Err(FolderError::Exists(folder.to_owned()));
            }
        }
        let authority = Authority::create(cluster)?;
        // The certificate first: without the key the folder is not an authority.
        replace(folder, AUTHORITIES_FILE, write::PUBLIC, authority.certificate().as_bytes())?;
        replace(folder, AUTHORITY_KEY_FILE, write::SECRET, authority.key().as_bytes())?;
        AuthorityFolder::read(folder, lock)
    }

    /// Opens the folder of an authority, and locks it until the result is dropped.
    ///
    /// # Errors
    /// Files are absent or invalid, or the key is readable by others.
    pub fn open(folder: &Path) -> Result<AuthorityFolder, FolderError> {
        if !folder.join(AUTHORITY_KEY_FILE).exists() {
            let why = format!("it has no {AUTHORITY_KEY_FILE}");
            return Err(FolderError::NotAuthority(folder.to_owned(), why));
        }
        let lock = lock(folder)?;
        AuthorityFolder::read(folder, lock)
    }

    fn read(folder: &Path, lock: File) -> Result<AuthorityFolder, FolderError> {
        let invalid = |why: &str| FolderError::NotAuthority(folder.to_owned(), why.to_owned());
        let text = |name: &str| {
            let path = folder.join(name);
            fs::read_to_string(&path).map_err(io_error("read", &path))
        };
        let key_path = folder.join(AUTHORITY_KEY_FILE);
        let mode = fs::metadata(&key_path).map_err(io_error("read", &key_path))?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(FolderError::KeyMode { path: key_path, mode });
        }
        let (trusted, key) = (text(AUTHORITIES_FILE)?, text(AUTHORITY_KEY_FILE)?);
        let mut authorities = Vec::new();
        let mut issuer = None;
        for part in split(&trusted) {
            let certificate = first(&part).map_err(|error| invalid(&error))?;
            let facts = CertificateFacts::of(&certificate).map_err(|error| invalid(&error))?;
            if is_key_of(&key, &certificate) {
                issuer = Some((Authority::load(&part, &key)?, facts.clone()));
            }
            authorities.push(facts);
        }
        let (issuer, facts) =
            issuer.ok_or_else(|| invalid("ca.key is not the key of a certificate in ca.crt"))?;
        let cluster = facts.subject.strip_prefix(SUBJECT).unwrap_or_default().to_owned();
        Identity::new(&cluster, Role::Member)
            .map_err(|_| invalid("the subject of its certificate is not \"reprise CLUSTER\""))?;
        let step = match (authorities.len(), folder.join(NEXT_KEY_FILE).exists()) {
            // A key without its certificate is that of a step that was interrupted.
            (1, _) => Step::Settled,
            (_, true) => Step::Added,
            (_, false) => Step::Switched,
        };
        let folder = folder.to_owned();
        Ok(AuthorityFolder { folder, cluster, trusted, issuer, facts, authorities, step, _lock: lock })
    }

    /// Name of the cluster.
    pub fn cluster(&self) -> &str {
        &self.cluster
    }

    /// State of a replacement.
    pub fn step(&self) -> Step {
        self.step
    }

    /// Facts of the trusted authorities.
    pub fn authorities(&self) -> &[CertificateFacts] {
        &self.authorities
    }

    /// Fingerprint of the authority that issues.
    pub fn issuer(&self) -> Fingerprint {
        self.facts.fingerprint
    }

    /// Digest of the trusted authorities, which processes report.
    pub fn authorities_digest(&self) -> Fingerprint {
        Fingerprint::of_set(self.authorities.iter().map(|one| one.fingerprint))
    }

    /// Certificates that were issued and have not ended.
    ///
    /// # Errors
    /// The list cannot be read.
    pub fn issued(&self) -> Result<Vec<IssuedRecord>, FolderError> {
        let list = IssuedList::read(&self.folder)?;
        Ok(list.valid_at(SystemTime::now()).cloned().collect())
    }

    /// Issues a certificate with a new key into a folder, which may have one of the same identity already.
    ///
    /// # Errors
    /// The validity is out of bounds, the folder belongs to another process, or files cannot be written.
    pub fn issue(&self, role: Role, valid: Duration, into: &Path) -> Result<IssuedRecord, FolderError> {
        let identity = Identity::new(&self.cluster, role)?;
        if into.join(CERTIFICATE_FILE).exists() {
            let found = read_credentials(into)?.identity;
            if found != identity {
                return Err(FolderError::Other { folder: into.to_owned(), found, asked: identity });
            }
        } else if into.join(AUTHORITY_KEY_FILE).exists() {
            return Err(FolderError::Exists(into.to_owned()));
        }
        self.issue_into(&identity, valid, into)
    }

    /// Renews the certificate of a folder with the same identity if a renewal is due, or if `force` has a reason.
    ///
    /// # Errors
    /// The folder has no usable certificate of this cluster, or files cannot be written.
    pub fn renew(
        &self,
        folder: &Path,
        valid: Duration,
        force: Option<&'static str>,
    ) -> Result<Renewal, FolderError> {
        let (identity, due_in, because) = match read_credentials(folder) {
            Ok(credentials) => {
                let (due_in, because) = self.reason(folder, &credentials);
                (credentials.identity, due_in, because)
            }
            // An interrupted renewal may have left files that do not belong together.
            Err(error) => match identity_in(folder) {
                Some(identity) => (identity, Duration::ZERO, Some("its files did not belong together")),
                None => return Err(error),
            },
        };
        if identity.cluster != self.cluster {
            let (folder, cluster) = (folder.to_owned(), self.cluster.clone());
            return Err(FolderError::Cluster { folder, found: identity, cluster });
        }
        match because.or(force) {
            Some(why) => {
                let record = self.issue_into(&identity, valid, folder)?;
                Ok(Renewal::Renewed { why, record })
            }
            None => Ok(Renewal::NotDue { identity, due_in }),
        }
    }

    /// Time until a renewal of credentials is due, and the reason to renew them now.
    fn reason(&self, folder: &Path, credentials: &Credentials) -> (Duration, Option<&'static str>) {
        let now = SystemTime::now();
        let due_in = credentials.remaining(now).saturating_sub(credentials.valid_for() / 3);
        let why = if credentials.is_renewal_due(now) {
            Some("at most a third of its validity was left")
        } else if credentials.authorities_digest() != self.authorities_digest() {
            Some("the trusted authorities have changed")
        } else if !self.has_issued(folder) {
            Some("another authority issues now")
        } else {
            None
        };
        (due_in, why)
    }

    /// Whether the authority that issues now has issued the certificate of a folder.
    fn has_issued(&self, folder: &Path) -> bool {
        let Ok(files) = Files::read(folder) else { return false };
        let files = Files { authorities: self.issuer.certificate().as_bytes().to_vec(), ..files };
        Credentials::parse(&files).is_ok_and(|credentials| credentials.check_issuer().is_ok())
    }

    fn issue_into(
        &self,
        identity: &Identity,
        valid: Duration,
        into: &Path,
    ) -> Result<IssuedRecord, FolderError> {
        let days = |duration: Duration| duration.as_secs() / 86_400;
        let left = self.facts.remaining(SystemTime::now());
        let bounded = time::Duration::try_from(valid).unwrap_or(time::Duration::MAX);
        if bounded <= AUTHORITY_VALID && valid > left {
            return Err(FolderError::Outlives { asked: days(valid), left: days(left) });
        }
        let files = self.issuer.issue(identity, bounded)?.into_files(&self.trusted);
        let invalid = |error| FolderError::Credentials(into.to_owned(), error);
        let credentials = Credentials::parse(&files).map_err(invalid)?;
        credentials.check_issuer().map_err(invalid)?;
        write::create_folder(into).map_err(io_error("create", into))?;
        let into = into.canonicalize().map_err(io_error("read", into))?;
        let record = IssuedRecord {
            identity: identity.clone(),
            folder: into.clone(),
            fingerprint: credentials.fingerprint,
            issuer: self.facts.fingerprint,
            authorities: credentials.authorities_digest(),
            not_after: credentials.not_after,
        };
        let former = read_credentials(&into).ok().map(|credentials| credentials.fingerprint);
        write::replace_files(&into, &files).map_err(io_error("write files into", &into))?;
        let mut list = IssuedList::read(&self.folder)?;
        list.replace(former, record.clone(), SystemTime::now());
        list.write(&self.folder)?;
        Ok(record)
    }

    /// First step of a replacement: creates the next authority, and trusts both.
    ///
    /// # Errors
    /// A replacement is under way, or files cannot be written.
    pub fn add(self) -> Result<AuthorityFolder, FolderError> {
        match self.step {
            Step::Settled => {}
            Step::Added => {
                return Err(FolderError::Step(
                    "the next authority is added already: renew all folders, then run `reprise certs authority switch`",
                ));
            }
            Step::Switched => {
                return Err(FolderError::Step(
                    "a replacement is under way: finish it with `reprise certs authority remove`",
                ));
            }
        }
        let next = Authority::create(&self.cluster)?;
        // The key first: a certificate without it could never issue.
        replace(&self.folder, NEXT_KEY_FILE, write::SECRET, next.key().as_bytes())?;
        let both = format!("{}{}", self.trusted, next.certificate());
        replace(&self.folder, AUTHORITIES_FILE, write::PUBLIC, both.as_bytes())?;
        self.reread()
    }

    /// Second step: the next authority issues from now on, and the key of the former one is deleted.
    ///
    /// # Errors
    /// No authority was added, or certificates were not renewed since then.
    pub fn switch(self, unrenewed: Unrenewed) -> Result<AuthorityFolder, FolderError> {
        match self.step {
            Step::Added => {}
            Step::Settled => {
                return Err(FolderError::Step(
                    "there is no other authority to switch to: run `reprise certs authority add` first",
                ));
            }
            Step::Switched => {
                return Err(FolderError::Step(
                    "the next authority issues already: renew all folders, then run `reprise certs authority remove`",
                ));
            }
        }
        let digest = self.authorities_digest();
        self.check_renewed(unrenewed, |record| record.authorities == digest)?;
        let (from, to) = (self.folder.join(NEXT_KEY_FILE), self.folder.join(AUTHORITY_KEY_FILE));
        fs::rename(&from, &to).map_err(io_error("rename", &from))?;
        self.reread()
    }

    /// Third step: the former authority is no longer trusted.
    ///
    /// # Errors
    /// The next authority does not issue yet, or certificates were not renewed since it does.
    pub fn remove(self, unrenewed: Unrenewed) -> Result<AuthorityFolder, FolderError> {
        match self.step {
            Step::Switched => {}
            Step::Settled => {
                return Err(FolderError::Step("there is only one authority: there is nothing to remove"));
            }
            Step::Added => {
                return Err(FolderError::Step(
                    "the former authority still issues: run `reprise certs authority switch` first",
                ));
            }
        }
        self.check_renewed(unrenewed, |record| record.issuer == self.facts.fingerprint)?;
        replace(&self.folder, AUTHORITIES_FILE, write::PUBLIC, self.issuer.certificate().as_bytes())?;
        self.reread()
    }

    fn check_renewed(
        &self,
        unrenewed: Unrenewed,
        is_renewed: impl Fn(&IssuedRecord) -> bool,
    ) -> Result<(), FolderError> {
        if unrenewed == Unrenewed::Abandon {
            return Ok(());
        }
        let issued = self.issued()?;
        let left = issued.iter().filter(|record| !is_renewed(record));
        let left: Vec<String> =
            left.map(|record| format!("{} ({})", record.identity.role, record.folder.display())).collect();
        if left.is_empty() { Ok(()) } else { Err(FolderError::Unrenewed(left.join(", "))) }
    }

    fn reread(self) -> Result<AuthorityFolder, FolderError> {
        AuthorityFolder::read(&self.folder, self._lock)
    }
}

/// Identity that the certificate of a folder states, even if its other files are invalid.
fn identity_in(folder: &Path) -> Option<Identity> {
    let text = fs::read(folder.join(CERTIFICATE_FILE)).ok()?;
    crate::credentials::identity_of(certificates(&text).ok()?.first()?).ok()
}

fn first(part: &str) -> Result<CertificateDer<'static>, String> {
    certificates(part.as_bytes())?.into_iter().next().ok_or_else(|| "no certificate".to_owned())
}

fn read_credentials(folder: &Path) -> Result<Credentials, FolderError> {
    Credentials::read(folder).map_err(|error| FolderError::Credentials(folder.to_owned(), error))
}

fn replace(folder: &Path, name: &str, mode: u32, content: &[u8]) -> Result<(), FolderError> {
    write::replace(folder, name, mode, content).map_err(io_error("write", &folder.join(name)))
}

fn lock(folder: &Path) -> Result<File, FolderError> {
    let path = folder.join(LOCK_FILE);
    let options = || File::options().create(true).truncate(false).write(true).open(&path);
    let file = options().map_err(io_error("open", &path))?;
    file.lock().map_err(io_error("lock", &path))?;
    Ok(file)
}

fn io_error(what: &'static str, path: &Path) -> impl Fn(io::Error) -> FolderError {
    let path = path.to_owned();
    move |error| FolderError::Io(what, path.clone(), error)
}
