//! TLS to etcd: its files, checked before etcd is asked, and why a handshake fails.
//!
//! With TLS 1.3 a server refuses a client's certificate after the client has finished its part of the handshake: whether
//! the client's first words or the server's refusal come first is chance, and the connection may just seem to break. So
//! when etcd cannot be reached, a handshake of our own waits for the server's first words.

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use etcd_client::{Certificate, Identity, TlsOptions};
use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::{Error as PemError, PemObject};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, Error as TlsError, RootCertStore};

use super::settings::{EtcdIdentity, EtcdTls, read, refuse};
use crate::error::InvalidSetting;

/// A connection, its handshake and the first words of etcd; of all endpoints together.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// What etcd speaks.
const PROTOCOL: &[u8] = b"h2";

const CA_FILE: &str = "store.tls.ca_file";
const CERT_FILE: &str = "store.tls.cert_file";
const KEY_FILE: &str = "store.tls.key_file";

/// The files of the settings, read and checked.
pub(super) struct Tls {
    authorities: Pem,
    identity: Option<(Pem, Vec<u8>)>,
    server_name: Option<String>,
    config: Arc<ClientConfig>,
}

/// Certificates, as they are in a file and as they are.
struct Pem {
    text: Vec<u8>,
    certificates: Vec<CertificateDer<'static>>,
}

impl Tls {
    /// Reads the files: it blocks.
    pub(super) fn load(settings: &EtcdTls) -> Result<Tls, InvalidSetting> {
        let authorities = certificates(CA_FILE, &settings.ca_file)?;
        let mut roots = RootCertStore::empty();
        for certificate in &authorities.certificates {
            roots.add(certificate.clone()).or_else(|error| unusable(CA_FILE, &settings.ca_file, &error))?;
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("the provider knows the protocol's versions")
            .with_root_certificates(roots);
        let (mut config, identity) = match &settings.identity {
            None => (config.with_no_client_auth(), None),
            Some(EtcdIdentity { cert_file, key_file }) => {
                let certificate = certificates(CERT_FILE, cert_file)?;
                let (text, key) = private_key(key_file)?;
                let config = config
                    .with_client_auth_cert(certificate.certificates.clone(), key)
                    .or_else(|error| no_pair(cert_file, key_file, &error))?;
                (config, Some((certificate, text)))
            }
        };
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        let server_name = settings.server_name.clone();
        if let Some(name) = &server_name
            && ServerName::try_from(name.as_str()).is_err()
        {
            return refuse(
                "store.tls.server_name",
                format!(
                    "'{name}' is neither a host name nor an address: write the name in etcd's certificate"
                ),
            );
        }
        Ok(Tls { authorities, identity, server_name, config: Arc::new(config) })
    }

    /// As the client takes it.
    pub(super) fn options(&self) -> TlsOptions {
        let mut options = TlsOptions::new().ca_certificate(Certificate::from_pem(&self.authorities.text));
        if let Some((certificate, key)) = &self.identity {
            options = options.identity(Identity::from_pem(&certificate.text, key));
        }
        match &self.server_name {
            Some(name) => options.domain_name(name),
            None => options,
        }
    }

    /// Why a handshake with one of the endpoints fails; `None` when that is not what is wrong.
    pub(super) async fn diagnose(&self, endpoints: &[String]) -> Option<String> {
        let all = async {
            for endpoint in endpoints {
                if let Some(reason) = self.probe(endpoint).await {
                    return Some(format!("{endpoint}: {reason}"));
                }
            }
            None
        };
        timeout(PROBE_TIMEOUT, all).await.unwrap_or(None)
    }

    async fn probe(&self, endpoint: &str) -> Option<String> {
        let address = endpoint.trim_start_matches("https://").trim_end_matches('/');
        let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
        let name = self.server_name.as_deref().unwrap_or(host).to_owned();
        let name = ServerName::try_from(name).ok()?;
        let stream = TcpStream::connect(address).await.ok()?;
        let shaken = TlsConnector::from(self.config.clone()).connect(name, stream).await;
        let heard = match shaken {
            Ok(mut stream) => stream.read_u8().await.map(drop),
            Err(error) => Err(error),
        };
        match heard {
            // rustls' own errors, its peer's alerts among them.
            Err(error) if error.kind() == ErrorKind::InvalidData => Some(error.to_string()),
            Ok(()) | Err(_) => None,
        }
    }
}

/// A file with certificates, at least one.
fn certificates(field: &'static str, path: &Path) -> Result<Pem, InvalidSetting> {
    let text = read(field, path)?;
    let found: Result<Vec<_>, PemError> = CertificateDer::pem_slice_iter(&text).collect();
    match found {
        Ok(certificates) if !certificates.is_empty() => Ok(Pem { text, certificates }),
        Ok(_) => refuse(
            field,
            format!(
                "{} holds no certificate in PEM (a section '-----BEGIN CERTIFICATE-----'): convert it, or name another file",
                path.display()
            ),
        ),
        Err(error) => refuse(field, format!("{} is no PEM ({error}): write it again", path.display())),
    }
}

fn private_key(path: &Path) -> Result<(Vec<u8>, PrivateKeyDer<'static>), InvalidSetting> {
    let text = read(KEY_FILE, path)?;
    match PrivateKeyDer::from_pem_slice(&text) {
        Ok(key) => Ok((text, key)),
        // What the error says might quote the key.
        Err(_) => refuse(
            KEY_FILE,
            format!(
                "{} holds no private key in PEM (a section '-----BEGIN PRIVATE KEY-----', not encrypted): convert it, or name another file",
                path.display()
            ),
        ),
    }
}

fn no_pair<T>(cert_file: &Path, key_file: &Path, error: &TlsError) -> Result<T, InvalidSetting> {
    match error {
        TlsError::InconsistentKeys(_) => refuse(
            KEY_FILE,
            format!(
                "{} is not the key of store.tls.cert_file {}: name the files of one pair",
                key_file.display(),
                cert_file.display()
            ),
        ),
        TlsError::InvalidCertificate(_) => unusable(CERT_FILE, cert_file, error),
        other => unusable(KEY_FILE, key_file, other),
    }
}

fn unusable<T>(field: &'static str, path: &Path, error: &TlsError) -> Result<T, InvalidSetting> {
    refuse(field, format!("{} cannot be used ({error}): have it issued again", path.display()))
}
