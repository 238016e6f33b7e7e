//! TLS to etcd: loads and checks the files before connecting, and diagnoses failed handshakes.
//!
//! With TLS 1.3, a server rejects a client certificate only after the client has finished the handshake.
//! Depending on timing, the client then sees the rejection or just a broken connection. Therefore, if etcd is
//! unreachable, a separate probe connects and waits for the server's first bytes.

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

use super::settings::{EtcdIdentity, EtcdTls, invalid, read};
use crate::error::InvalidSetting;

/// Time limit for probing all endpoints: connection, handshake and first bytes.
const PROBE_TIMEOUT: Duration = Duration::from_secs(5);
/// ALPN protocol of etcd.
const PROTOCOL: &[u8] = b"h2";

const CA_FILE: &str = "store.tls.ca_file";
const CERT_FILE: &str = "store.tls.cert_file";
const KEY_FILE: &str = "store.tls.key_file";

/// Loaded and checked TLS files.
pub(super) struct Tls {
    authorities: Pem,
    identity: Option<(Pem, Vec<u8>)>,
    server_name: Option<String>,
    config: Arc<ClientConfig>,
}

/// Certificates as PEM text and in decoded form.
struct Pem {
    text: Vec<u8>,
    certificates: Vec<CertificateDer<'static>>,
}

impl Tls {
    /// Loads and checks the files. Blocks.
    pub(super) fn load(settings: &EtcdTls) -> Result<Tls, InvalidSetting> {
        let authorities = certificates(CA_FILE, &settings.ca_file)?;
        let mut roots = RootCertStore::empty();
        for certificate in &authorities.certificates {
            roots.add(certificate.clone()).or_else(|error| unusable(CA_FILE, &settings.ca_file, &error))?;
        }
        let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .expect("the provider supports the default versions")
            .with_root_certificates(roots);
        let (mut config, identity) = match &settings.identity {
            None => (config.with_no_client_auth(), None),
            Some(EtcdIdentity { cert_file, key_file }) => {
                let certificate = certificates(CERT_FILE, cert_file)?;
                let (text, key) = private_key(key_file)?;
                let config = config
                    .with_client_auth_cert(certificate.certificates.clone(), key)
                    .or_else(|error| mismatched_pair(cert_file, key_file, &error))?;
                (config, Some((certificate, text)))
            }
        };
        config.alpn_protocols = vec![PROTOCOL.to_vec()];
        let server_name = settings.server_name.clone();
        if let Some(name) = &server_name
            && ServerName::try_from(name.as_str()).is_err()
        {
            return invalid(
                "store.tls.server_name",
                format!("invalid name '{name}': expected the host name or address in etcd's certificate"),
            );
        }
        Ok(Tls { authorities, identity, server_name, config: Arc::new(config) })
    }

    /// Converts to the options of the etcd client.
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

    /// Reason why a TLS handshake with an endpoint fails; `None` if the handshakes succeed or do not start.
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
            // Errors of rustls, including alerts from the server.
            Err(error) if error.kind() == ErrorKind::InvalidData => Some(error.to_string()),
            Ok(()) | Err(_) => None,
        }
    }
}

/// Reads a file with one or more certificates.
fn certificates(field: &'static str, path: &Path) -> Result<Pem, InvalidSetting> {
    let text = read(field, path)?;
    let found: Result<Vec<_>, PemError> = CertificateDer::pem_slice_iter(&text).collect();
    match found {
        Ok(certificates) if !certificates.is_empty() => Ok(Pem { text, certificates }),
        Ok(_) => invalid(
            field,
            format!(
                "{} contains no PEM certificate (a section '-----BEGIN CERTIFICATE-----'): convert it or set another file",
                path.display()
            ),
        ),
        Err(error) => invalid(field, format!("{} is not valid PEM ({error}): re-create it", path.display())),
    }
}

fn private_key(path: &Path) -> Result<(Vec<u8>, PrivateKeyDer<'static>), InvalidSetting> {
    let text = read(KEY_FILE, path)?;
    match PrivateKeyDer::from_pem_slice(&text) {
        Ok(key) => Ok((text, key)),
        // Omit the error, because it might quote the key.
        Err(_) => invalid(
            KEY_FILE,
            format!(
                "{} contains no unencrypted PEM private key (a section '-----BEGIN PRIVATE KEY-----'): convert it or set another file",
                path.display()
            ),
        ),
    }
}

fn mismatched_pair<T>(cert_file: &Path, key_file: &Path, error: &TlsError) -> Result<T, InvalidSetting> {
    match error {
        TlsError::InconsistentKeys(_) => invalid(
            KEY_FILE,
            format!(
                "{} is not the key of store.tls.cert_file {}: set a matching pair",
                key_file.display(),
                cert_file.display()
            ),
        ),
        TlsError::InvalidCertificate(_) => unusable(CERT_FILE, cert_file, error),
        other => unusable(KEY_FILE, key_file, other),
    }
}

fn unusable<T>(field: &'static str, path: &Path, error: &TlsError) -> Result<T, InvalidSetting> {
    invalid(field, format!("{} is unusable ({error}): reissue it", path.display()))
}
