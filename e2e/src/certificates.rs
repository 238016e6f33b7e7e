//! Certificates of a test's cluster: for its processes, for clients, and for attackers.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use reprise_identity::authority::{CERTIFICATE_VALID, Issued};
use reprise_identity::credentials::Files;
use reprise_identity::{Authority, Credentials, Expected, Identity, Role, Security, Tls};
use rustls::SignatureScheme;
use rustls::client::ResolvesClientCert;
use rustls::pki_types::ServerName;
use rustls::sign::CertifiedKey;
use time::{Duration, OffsetDateTime};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

/// Name of the cluster in its certificates.
const CLUSTER: &str = "test";

/// The authority of a test's cluster.
#[derive(Debug)]
pub struct Certificates {
    authority: Authority,
    folder: PathBuf,
}

/// A client without a certificate.
#[derive(Debug)]
struct NoCertificate;

impl ResolvesClientCert for NoCertificate {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        None
    }

    fn has_certs(&self) -> bool {
        false
    }
}

impl Certificates {
    /// Creates an authority whose certificates are in folders of `folder`.
    ///
    /// # Panics
    /// If the system has no randomness.
    pub fn new(folder: &Path) -> Certificates {
        let authority = Authority::create(CLUSTER).expect("a valid name");
        Certificates { authority, folder: folder.join("certificates") }
    }

    /// Issues a certificate, and returns the section `[tls]` of the process' configuration.
    pub fn section(&self, role: &Role) -> String {
        format!("[tls]\nfolder = {:?}\n", self.issue(role))
    }

    /// Issues a certificate, and returns the folder of its files.
    ///
    /// # Panics
    /// If the folder is not writable.
    pub fn issue(&self, role: &Role) -> PathBuf {
        let folder = self.folder.join(role.to_string());
        fs::create_dir_all(&folder).expect("the folder is writable");
        let Files { authorities, certificate, key } = self.files(self.valid(role));
        for (name, text) in [("ca.crt", authorities), ("tls.crt", certificate), ("tls.key", key)] {
            fs::write(folder.join(name), text).expect("the folder is writable");
        }
        folder
    }

    /// Returns a client with a valid certificate.
    pub fn client(&self, role: &Role) -> Security {
        self.client_of(self.valid(role))
    }

    /// Returns a client whose certificate is of another authority with the same names.
    ///
    /// # Panics
    /// If the system has no randomness.
    pub fn foreign_client(&self, role: &Role) -> Security {
        let foreign = Authority::create(CLUSTER).expect("a valid name");
        self.client_of(foreign.issue(&identity(role), CERTIFICATE_VALID).expect("a valid period"))
    }

    /// Returns a client whose certificate ended yesterday.
    ///
    /// # Panics
    /// If the system has no randomness.
    pub fn expired_client(&self, role: &Role) -> Security {
        let (now, day) = (OffsetDateTime::now_utc(), Duration::DAY);
        let issued = self.authority.issue_between(&identity(role), now - 2 * day, now - day);
        self.client_of(issued.expect("a valid period"))
    }

    /// Connects with TLS to a server of the expected role, and shows no certificate.
    ///
    /// # Errors
    /// The server is unreachable, or refuses such clients during the handshake.
    pub async fn connect_anonymously(
        &self,
        address: &str,
        expected: Expected,
    ) -> std::io::Result<TlsStream<TcpStream>> {
        let Security::Tls(tls) = self.client(&Role::Console) else { unreachable!("a client with TLS") };
        let mut config = tls.client_config(expected);
        config.client_auth_cert_resolver = Arc::new(NoCertificate);
        let name = ServerName::try_from("reprise").expect("a valid name");
        TlsConnector::from(Arc::new(config)).connect(name, TcpStream::connect(address).await?).await
    }

    fn valid(&self, role: &Role) -> Issued {
        self.authority.issue(&identity(role), CERTIFICATE_VALID).expect("a valid period")
    }

    fn files(&self, issued: Issued) -> Files {
        Files {
            authorities: self.authority.certificate().as_bytes().to_vec(),
            certificate: issued.certificate.into_bytes(),
            key: issued.key.into_bytes(),
        }
    }

    fn client_of(&self, issued: Issued) -> Security {
        Security::Tls(Tls::new(Credentials::parse(&self.files(issued)).expect("valid files")))
    }
}

fn identity(role: &Role) -> Identity {
    Identity::new(CLUSTER, role.clone()).expect("valid names")
}
