//! Certificates of a process: trusted authorities, its own certificate, and its key.
//!
//! They are the files `ca.crt`, `tls.crt` and `tls.key` of a folder, with the names of a Kubernetes Secret. All three are
//! checked when they are read: a half-written change is refused, and the credentials before stay in use.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use std::{fmt, fs, io};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, UnixTime};
use rustls::sign::CertifiedKey;
use rustls::{RootCertStore, crypto};
use webpki::{EndEntityCert, KeyUsage};

use crate::certificate::{self, CertificateFacts, Fingerprint};
use crate::name::{Identity, NameError};

/// File of the trusted authorities.
pub const AUTHORITIES_FILE: &str = "ca.crt";
/// File of the process's certificate.
pub const CERTIFICATE_FILE: &str = "tls.crt";
/// File of the process's key.
pub const KEY_FILE: &str = "tls.key";

/// Largest file: some authorities, or a chain.
const FILE_BYTES_MAX: u64 = 256 << 10;

/// Credentials of a process.
#[derive(Clone)]
pub struct Credentials {
    /// Identity of the process.
    pub identity: Identity,
    /// Authorities that it trusts.
    pub(crate) roots: Arc<RootCertStore>,
    /// Its certificate and key.
    pub(crate) key: Arc<CertifiedKey>,
    /// Begin of the certificate's validity.
    pub not_before: SystemTime,
    /// End of the certificate's validity.
    pub not_after: SystemTime,
    /// Fingerprint of the certificate.
    pub fingerprint: Fingerprint,
    /// Facts of the trusted authorities.
    pub authorities: Arc<[CertificateFacts]>,
}

/// Texts of the three files.
#[derive(Clone, PartialEq, Eq)]
pub struct Files {
    /// `ca.crt`.
    pub authorities: Vec<u8>,
    /// `tls.crt`.
    pub certificate: Vec<u8>,
    /// `tls.key`.
    pub key: Vec<u8>,
}

/// Reason why credentials cannot be used; the text names the file and the remedy.
#[derive(Debug, thiserror::Error)]
pub enum CredentialsError {
    /// A file cannot be read.
    #[error(
        "cannot read {0}: {1}; issue certificates with `reprise certs issue`, or mount the Secret that has them"
    )]
    Read(PathBuf, io::Error),
    /// A file is far larger than certificates are.
    #[error("invalid {0}: more than {FILE_BYTES_MAX} bytes; expected certificates")]
    Size(PathBuf),
    /// A file has no valid PEM of the expected kind.
    #[error("invalid {0}: {1}; expected PEM")]
    Pem(&'static str, String),
    /// Key and certificate do not belong together.
    #[error(
        "{KEY_FILE} is not the key of the certificate in {CERTIFICATE_FILE}: replace both together ({0})"
    )]
    Key(rustls::Error),
    /// The certificate names no process.
    #[error("the certificate in {CERTIFICATE_FILE} has {0} URI names: expected one, reprise://CLUSTER/ROLE")]
    Names(usize),
    /// The certificate was issued by an authority that the process does not trust.
    #[error(
        "no authority in {AUTHORITIES_FILE} has issued the certificate in {CERTIFICATE_FILE} ({0}): copy all three files of \
         one folder, or renew them with `reprise certs renew`"
    )]
    Untrusted(webpki::Error),
    /// The certificate names something else.
    #[error("the certificate in {CERTIFICATE_FILE} names no process: {0}")]
    Name(#[from] NameError),
}

impl Credentials {
    /// Reads the files of a folder.
    ///
    /// # Errors
    /// A file is absent or invalid, or they do not belong together.
    pub fn read(folder: &Path) -> Result<Credentials, CredentialsError> {
        Credentials::parse(&Files::read(folder)?)
    }

    /// Checks the texts of the files.
    ///
    /// # Errors
    /// A text is invalid, or they do not belong together.
    pub fn parse(files: &Files) -> Result<Credentials, CredentialsError> {
        let mut roots = RootCertStore::empty();
        let mut authorities = Vec::new();
        for certificate in certificates(AUTHORITIES_FILE, &files.authorities)? {
            authorities.push(facts(AUTHORITIES_FILE, &certificate)?);
            let added = roots.add(certificate);
            added.map_err(|error| CredentialsError::Pem(AUTHORITIES_FILE, error.to_string()))?;
        }
        let chain = certificates(CERTIFICATE_FILE, &files.certificate)?;
        let own = chain.first().expect("at least one certificate");
        let identity = identity_of(own)?;
        let CertificateFacts { not_before, not_after, fingerprint, .. } = facts(CERTIFICATE_FILE, own)?;
        let key = PrivateKeyDer::from_pem_slice(&files.key)
            .map_err(|error| CredentialsError::Pem(KEY_FILE, error.to_string()))?;
        let key = CertifiedKey::from_der(chain, key, &crypto::ring::default_provider())
            .map_err(CredentialsError::Key)?;
        let (roots, key) = (Arc::new(roots), Arc::new(key));
        Ok(Credentials {
            identity,
            roots,
            key,
            not_before,
            not_after,
            fingerprint,
            authorities: authorities.into(),
        })
    }

    /// Checks that a trusted authority has issued the certificate. Otherwise every other process that has the same
    /// authorities refuses it.
    ///
    /// # Errors
    /// No trusted authority has.
    pub fn check_issuer(&self) -> Result<(), CredentialsError> {
        let (own, others) = self.key.cert.split_first().expect("at least one certificate");
        let own = EndEntityCert::try_from(own)
            .map_err(|error| CredentialsError::Pem(CERTIFICATE_FILE, error.to_string()))?;
        // Whether the certificate is valid now is another question.
        let middle = self.not_before + self.valid_for() / 2;
        let time =
            UnixTime::since_unix_epoch(middle.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default());
        let algorithms = crypto::ring::default_provider().signature_verification_algorithms.all;
        let verified = own.verify_for_usage(
            algorithms,
            &self.roots.roots,
            others,
            time,
            KeyUsage::client_auth(),
            None,
            None,
        );
        verified.map(drop).map_err(CredentialsError::Untrusted)
    }

    /// Digest of the trusted authorities: equal on all processes that trust the same ones.
    pub fn authorities_digest(&self) -> Fingerprint {
        Fingerprint::of_set(self.authorities.iter().map(|one| one.fingerprint))
    }

    /// End of the first trusted authority that ends.
    pub fn authorities_not_after(&self) -> SystemTime {
        self.authorities.iter().map(|one| one.not_after).min().expect("at least one authority")
    }

    /// Whole validity of the certificate.
    pub fn valid_for(&self) -> Duration {
        self.not_after.duration_since(self.not_before).unwrap_or_default()
    }

    /// Time until the certificate ends; zero after its end.
    pub fn remaining(&self, now: SystemTime) -> Duration {
        self.not_after.duration_since(now).unwrap_or_default()
    }

    /// Whether it is time to renew the certificate: a third of its validity is left.
    pub fn is_renewal_due(&self, now: SystemTime) -> bool {
        self.remaining(now) <= self.valid_for() / 3
    }

    /// Whether the renewal is overdue: at most 0.3 of the validity is left. That is 3 of 90 days after a renewal was due,
    /// so regular renewals log no warning.
    pub fn is_renewal_overdue(&self, now: SystemTime) -> bool {
        self.remaining(now) <= self.valid_for() * 3 / 10
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials")
            .field("identity", &self.identity)
            .field("not_after", &self.not_after)
            .finish()
    }
}

impl fmt::Debug for Files {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Files")
    }
}

impl Files {
    /// Writes the files into a folder, which must exist. A reader never sees a part of a file, and refuses a mix of old
    /// and new files.
    ///
    /// # Errors
    /// The folder is not writable.
    pub fn write(&self, folder: &Path) -> io::Result<()> {
        crate::write::replace_files(folder, self)
    }

    /// Reads the files of a folder.
    ///
    /// # Errors
    /// A file is absent, unreadable or too large.
    pub fn read(folder: &Path) -> Result<Files, CredentialsError> {
        let read = |name: &str| {
            let path = folder.join(name);
            let size =
                fs::metadata(&path).map_err(|error| CredentialsError::Read(path.clone(), error))?.len();
            if size > FILE_BYTES_MAX {
                return Err(CredentialsError::Size(path));
            }
            fs::read(&path).map_err(|error| CredentialsError::Read(path, error))
        };
        Ok(Files {
            authorities: read(AUTHORITIES_FILE)?,
            certificate: read(CERTIFICATE_FILE)?,
            key: read(KEY_FILE)?,
        })
    }
}

/// Returns the identity that a certificate states.
///
/// # Errors
/// It states none, several, or an invalid one.
pub(crate) fn identity_of(certificate: &CertificateDer<'_>) -> Result<Identity, CredentialsError> {
    let parsed = EndEntityCert::try_from(certificate)
        .map_err(|error| CredentialsError::Pem(CERTIFICATE_FILE, error.to_string()))?;
    let mut names = parsed.valid_uri_names();
    match (names.next(), names.count()) {
        (Some(name), 0) => Ok(name.parse()?),
        (first, more) => Err(CredentialsError::Names(usize::from(first.is_some()) + more)),
    }
}

fn certificates(file: &'static str, text: &[u8]) -> Result<Vec<CertificateDer<'static>>, CredentialsError> {
    let all = certificate::certificates(text).map_err(|error| CredentialsError::Pem(file, error))?;
    if all.is_empty() {
        return Err(CredentialsError::Pem(file, "no certificate".to_owned()));
    }
    Ok(all)
}

fn facts(file: &'static str, certificate: &CertificateDer<'_>) -> Result<CertificateFacts, CredentialsError> {
    CertificateFacts::of(certificate).map_err(|error| CredentialsError::Pem(file, error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authority::{Authority, CERTIFICATE_VALID};
    use crate::name::Role;

    fn files() -> Files {
        let authority = Authority::create("c").expect("an authority");
        let identity = Identity::new("c", Role::Agent("node-1".to_owned())).expect("valid names");
        let issued = authority.issue(&identity, CERTIFICATE_VALID).expect("a certificate");
        Files {
            authorities: authority.certificate().as_bytes().to_vec(),
            certificate: issued.certificate.into_bytes(),
            key: issued.key.into_bytes(),
        }
    }

    #[test]
    fn credentials_know_their_identity_and_when_to_renew() {
        let credentials = Credentials::parse(&files()).expect("valid files");
        assert_eq!(credentials.identity.to_string(), "reprise://c/agent/node-1");
        let now = SystemTime::now();
        assert!(!credentials.is_renewal_due(now));
        let day = Duration::from_secs(86_400);
        assert!(credentials.not_before < now - Duration::from_secs(3_600), "a late clock accepts it");
        assert!(!credentials.is_renewal_due(now + 59 * day) && credentials.is_renewal_due(now + 61 * day));
        assert_eq!(credentials.remaining(now + 91 * day), Duration::ZERO);
    }

    #[test]
    fn files_that_do_not_belong_together_are_refused_with_the_remedy() {
        let (whole, other) = (files(), files());
        for (mixed, words) in [
            (Files { key: other.key.clone(), ..whole.clone() }, "replace both together"),
            (Files { certificate: Vec::new(), ..whole.clone() }, "no certificate"),
            (Files { authorities: b"text".to_vec(), ..whole.clone() }, "ca.crt"),
            (Files { key: whole.certificate.clone(), ..whole.clone() }, "tls.key"),
            (Files { certificate: whole.authorities.clone(), ..whole.clone() }, "has 0 URI names"),
        ] {
            let error = Credentials::parse(&mixed).expect_err(words).to_string();
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn certificate_of_another_authority_is_reported_also_after_its_end() {
        let whole = Credentials::parse(&files()).expect("valid files");
        whole.check_issuer().expect("issued by its authority");
        let mixed = Files { authorities: files().authorities, ..files() };
        let error =
            Credentials::parse(&mixed).expect("valid files").check_issuer().expect_err("another authority");
        assert!(error.to_string().contains("reprise certs renew"), "{error}");
    }

    #[test]
    fn renewal_is_overdue_only_after_it_was_due() {
        let credentials = Credentials::parse(&files()).expect("valid files");
        let day = Duration::from_secs(86_400);
        let at = |left: u32| credentials.not_after - left * day;
        assert!(!credentials.is_renewal_due(at(31)) && credentials.is_renewal_due(at(29)));
        assert!(!credentials.is_renewal_overdue(at(29)) && credentials.is_renewal_overdue(at(26)));
        assert_eq!(credentials.authorities.len(), 1);
        assert!(credentials.authorities_not_after() > credentials.not_after);
    }

    #[test]
    fn absent_files_are_named_with_the_command_that_creates_them() {
        let folder = tempfile::tempdir().expect("a folder");
        let error = Credentials::read(folder.path()).expect_err("no files").to_string();
        assert!(error.contains("ca.crt") && error.contains("reprise certs issue"), "{error}");
    }
}
