//! Certificates of a local cluster: an authority as `reprise certs` keeps it, a folder for each process, and clients that
//! attack.
//!
//! The folder of the authority is next to those of the processes, so `reprise certs renew` works on them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Context;
use reprise_identity::authority::{Authority, CERTIFICATE_VALID, Issued};
use reprise_identity::authority_folder::{AUTHORITY_KEY_FILE, AuthorityFolder};
use reprise_identity::credentials::AUTHORITIES_FILE;
use reprise_identity::{Expected, Identity, Role, Security, Tls};
use rustls::pki_types::ServerName;
use time::{Duration, OffsetDateTime};
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

/// Name of the cluster in the certificates.
pub const CLUSTER: &str = "local";

/// Issues the certificates of a cluster into folders.
#[derive(Debug)]
pub struct Certificates {
    authority: Authority,
    folder: PathBuf,
}

/// Connects with TLS to a server of the expected role in the cluster of `tls`, and shows no certificate.
///
/// # Errors
/// The server is unreachable, or refuses such clients during the handshake.
///
/// # Panics
/// Never: the name of the server is constant.
pub async fn connect_anonymously(
    tls: &Tls,
    address: &str,
    expected: Expected,
) -> std::io::Result<TlsStream<TcpStream>> {
    let config = tls.anonymous_client_config(expected);
    let name = ServerName::try_from("reprise").expect("a valid name");
    TlsConnector::from(Arc::new(config)).connect(name, TcpStream::connect(address).await?).await
}

impl Certificates {
    /// Creates an authority in `folder`, below which the folders of processes are. Former content is deleted.
    ///
    /// # Errors
    /// No key can be generated, or files cannot be written.
    pub fn create(folder: &Path) -> anyhow::Result<Certificates> {
        let created = || format!("cannot create certificates in {}", folder.display());
        match std::fs::remove_dir_all(folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(error).with_context(created);
            }
            _ => {}
        }
        let own = folder.join("authority");
        AuthorityFolder::create(&own, CLUSTER).with_context(created)?;
        let text = |name: &str| std::fs::read_to_string(own.join(name)).with_context(created);
        let authority = Authority::load(&text(AUTHORITIES_FILE)?, &text(AUTHORITY_KEY_FILE)?)?;
        Ok(Certificates { authority, folder: folder.to_owned() })
    }

    /// Returns the authority of the cluster.
    pub fn authority(&self) -> &Authority {
        &self.authority
    }

    /// Returns the folder of the authority, for `reprise certs`.
    pub fn authority_folder(&self) -> PathBuf {
        self.folder.join("authority")
    }

    /// Returns the folder of a role, which is named after it: `agent-node-1`, `member`.
    pub fn folder_of(&self, role: &Role) -> PathBuf {
        self.folder.join(role.to_string().replace('/', "-"))
    }

    /// Issues a certificate, and returns its folder.
    ///
    /// # Errors
    /// The name of a node is invalid, or the folder cannot be written.
    pub fn issue(&self, role: &Role) -> anyhow::Result<PathBuf> {
        let folder = self.folder_of(role);
        let valid = CERTIFICATE_VALID.unsigned_abs();
        AuthorityFolder::open(&self.authority_folder())?.issue(role.clone(), valid, &folder)?;
        Ok(folder)
    }

    /// Returns a client with a valid certificate.
    ///
    /// # Panics
    /// If the system has no randomness.
    pub fn client(&self, role: &Role) -> Security {
        self.client_of(self.valid(role))
    }

    /// Returns a client whose certificate is of another authority with the same names. It trusts the authority of the
    /// cluster.
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
    ///
    /// # Panics
    /// If the system has no randomness.
    pub async fn connect_anonymously(
        &self,
        address: &str,
        expected: Expected,
    ) -> std::io::Result<TlsStream<TcpStream>> {
        connect_anonymously(&self.tls_of(self.valid(&Role::Console)), address, expected).await
    }

    fn valid(&self, role: &Role) -> Issued {
        self.authority.issue(&identity(role), CERTIFICATE_VALID).expect("a valid period")
    }

    fn client_of(&self, issued: Issued) -> Security {
        Security::Tls(self.tls_of(issued))
    }

    fn tls_of(&self, issued: Issued) -> Tls {
        Tls::new(issued.into_credentials(self.authority.certificate()).expect("valid files"))
    }
}

/// Returns the identity of a role in a local cluster.
///
/// # Panics
/// If the name of the node is invalid.
pub fn identity(role: &Role) -> Identity {
    Identity::new(CLUSTER, role.clone()).expect("valid names")
}
