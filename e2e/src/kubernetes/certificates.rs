//! Keys and certificates of an API server: one authority for its own certificate and its users' certificates,
//! and the key that signs service account tokens.
//!
//! All are PEM files in one folder, since the server reads files. They are removed with their folder.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, SanType};

/// The group with all permissions.
const ADMINS: &str = "system:masters";

/// The certificate authority, and the folder of its files.
#[derive(Debug)]
pub(super) struct Authority {
    folder: PathBuf,
    issuer: CertifiedIssuer<'static, KeyPair>,
    /// Number of user certificates so far. Each has its own files, since two threads may request one for the
    /// same user.
    users: AtomicUsize,
}

/// Paths of a certificate and its key.
#[derive(Debug)]
pub(super) struct Issued {
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

/// A user that authenticates with a certificate.
#[derive(Clone, Copy, Debug)]
pub struct User<'a> {
    /// Name of the user in role bindings.
    pub name: &'a str,
    /// A group, in addition to `system:authenticated`.
    pub group: Option<&'a str>,
}

impl User<'static> {
    /// The user with all permissions.
    pub const ADMIN: User<'static> = User { name: "admin", group: Some(ADMINS) };
}

impl<'a> User<'a> {
    /// Returns a user with the permissions granted to this name.
    pub fn named(name: &'a str) -> User<'a> {
        User { name, group: None }
    }
}

impl Authority {
    /// Creates an authority, with its files in the folder `pki` below an existing folder.
    pub(super) fn new(folder: &Path) -> Authority {
        let folder = folder.join("pki");
        fs::create_dir_all(&folder).expect("a folder can be created");
        let mut params = params("reprise-e2e");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, key()).expect("signed");
        let authority = Authority { folder, issuer, users: AtomicUsize::new(0) };
        authority.write("ca.crt", &authority.issuer.pem());
        authority
    }

    /// Returns the path of a file in the authority's folder.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Returns the authority's own certificate.
    pub(super) fn der(&self) -> Vec<u8> {
        self.issuer.der().to_vec()
    }

    /// Issues a server certificate for these addresses and names, with a new key.
    pub(super) fn server(&self, name: &str, addresses: &[IpAddr], names: &[&str]) -> Issued {
        let mut params = params(name);
        let dns = |name: &&str| SanType::DnsName((*name).try_into().expect("names of tests are ASCII"));
        let addresses = addresses.iter().copied().map(SanType::IpAddress);
        params.subject_alt_names = addresses.chain(names.iter().map(dns)).collect();
        self.issue(name, &params)
    }

    /// Issues the certificate of a user, with a new key.
    pub(super) fn user(&self, user: &User<'_>) -> Issued {
        let mut params = params(user.name);
        if let Some(group) = user.group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        let number = self.users.fetch_add(1, Ordering::Relaxed);
        self.issue(&format!("user{number}"), &params)
    }

    /// Writes the key pair that signs and verifies service account tokens.
    pub(super) fn accounts_key(&self) {
        let key = key();
        self.write("accounts.key", &key.serialize_pem());
        self.write("accounts.pub", &key.public_key_pem());
    }

    fn issue(&self, name: &str, params: &CertificateParams) -> Issued {
        let own = key();
        let signed = params.signed_by(&own, &self.issuer).expect("signed");
        Issued {
            certificate: self.write(&format!("{name}.crt"), &signed.pem()),
            key: self.write(&format!("{name}.key"), &own.serialize_pem()),
        }
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.file(name);
        fs::write(&path, text).expect("the test's folder is writable");
        path
    }
}

fn params(name: &str) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    params
}

fn key() -> KeyPair {
    KeyPair::generate().expect("a key")
}
