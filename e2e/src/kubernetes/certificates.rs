//! Keys and certificates of an API server: one authority for its own certificate and those of its users, and the key
//! that signs the tokens of service accounts.
//!
//! All lie as PEM files in one folder, since the server reads files. They are as old as their folder and end with it.

use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, SanType};

/// The group that may do everything.
const ADMINS: &str = "system:masters";

/// Who signs, and where the files are.
#[derive(Debug)]
pub(super) struct Authority {
    folder: PathBuf,
    issuer: CertifiedIssuer<'static, KeyPair>,
    /// Certificates of users so far: each has files of its own, since two threads may ask for the same user's.
    users: AtomicUsize,
}

/// Files of a certificate and its key.
#[derive(Debug)]
pub(super) struct Issued {
    pub(super) certificate: PathBuf,
    pub(super) key: PathBuf,
}

/// Somebody who shows a certificate.
#[derive(Clone, Copy, Debug)]
pub struct User<'a> {
    /// As rights are granted to it.
    pub name: &'a str,
    /// Beside `system:authenticated`.
    pub group: Option<&'a str>,
}

impl User<'static> {
    /// Who may do everything.
    pub const ADMIN: User<'static> = User { name: "admin", group: Some(ADMINS) };
}

impl<'a> User<'a> {
    /// Who may do what has been granted to this name.
    pub fn named(name: &'a str) -> User<'a> {
        User { name, group: None }
    }
}

impl Authority {
    /// A new one, with its files in a folder `pki` of this one, which must be there.
    pub(super) fn new(folder: &Path) -> Authority {
        let folder = folder.join("pki");
        fs::create_dir_all(&folder).expect("a folder can be made");
        let mut params = params("reprise-e2e");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let issuer = CertifiedIssuer::self_signed(params, key()).expect("signed");
        let authority = Authority { folder, issuer, users: AtomicUsize::new(0) };
        authority.write("ca.crt", &authority.issuer.pem());
        authority
    }

    /// A file of it.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// Its own certificate.
    pub(super) fn der(&self) -> Vec<u8> {
        self.issuer.der().to_vec()
    }

    /// Makes the certificate of a server that is reached at these addresses and under these names, and its key.
    pub(super) fn server(&self, name: &str, addresses: &[IpAddr], names: &[&str]) -> Issued {
        let mut params = params(name);
        let dns = |name: &&str| SanType::DnsName((*name).try_into().expect("names of tests are ASCII"));
        let addresses = addresses.iter().copied().map(SanType::IpAddress);
        params.subject_alt_names = addresses.chain(names.iter().map(dns)).collect();
        self.issue(name, &params)
    }

    /// Makes the certificate of a user, and its key.
    pub(super) fn user(&self, user: &User<'_>) -> Issued {
        let mut params = params(user.name);
        if let Some(group) = user.group {
            params.distinguished_name.push(DnType::OrganizationName, group);
        }
        let number = self.users.fetch_add(1, Ordering::Relaxed);
        self.issue(&format!("user{number}"), &params)
    }

    /// Makes what signs the tokens of service accounts, and what they are verified with.
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
        fs::write(&path, text).expect("one's own folder takes files");
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
