//! TLS 1.3 with certificates on both sides.
//!
//! Both sides verify the chain of the other's certificate against their own authorities, then its identity. A server
//! admits every identity of its cluster and returns it; the caller decides which calls it may make. A client states which
//! identities it expects, so that an agent cannot pass for a member.
//!
//! Credentials are read at each handshake, so a change applies to new connections, and existing ones stay.

#[cfg(test)]
mod tests;

use std::fmt;
use std::sync::{Arc, OnceLock, PoisonError, RwLock};
use std::time::Duration;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{ResolvesClientCert, WantsClientCert, verify_server_cert_signed_by_trust_anchor};
use rustls::crypto::{CryptoProvider, ring, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{
    ClientHello, NoServerSessionStorage, ParsedCertificate, ResolvesServerCert, WebPkiClientVerifier,
};
use rustls::sign::CertifiedKey;
use rustls::version::TLS13;
use rustls::{
    CertificateError, CipherSuite, ClientConfig, ConfigBuilder, DigitallySignedStruct, DistinguishedName,
    Error, ServerConfig, SignatureScheme,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::{TlsAcceptor, TlsConnector, client, server};

use crate::credentials::{Credentials, CredentialsError, identity_of, verified_identity_of};
use crate::limits::VerifiedIdentity;
use crate::name::{Identity, Role};

/// Time limit of a handshake: a client that sends nothing is closed.
pub const HANDSHAKE_WITHIN: Duration = Duration::from_secs(5);

/// Time for a refused client to read the reason and to close the connection.
const REASON_READ_WITHIN: Duration = Duration::from_millis(500);
/// Bytes of a refused client that are read at most: its first call, which it sends without waiting for us.
const REFUSED_BYTES_MAX: u64 = 64 << 10;

/// Roles that a client expects of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Exactly this one.
    Role(Role),
    /// An agent of any node.
    AnyAgent,
}

/// TLS of a process, under all of its connections. Clones share the credentials.
#[derive(Clone)]
pub struct Tls {
    current: Arc<Current>,
    provider: Arc<CryptoProvider>,
}

/// Configuration of one accepted connection.
pub(crate) struct Accepting {
    pub(crate) config: ServerConfig,
    pub(crate) claim: Claim,
}

/// Identity in a certificate that a handshake has refused: not verified, so only for the log.
#[derive(Clone, Debug, Default)]
pub(crate) struct Claim(Arc<OnceLock<Identity>>);

/// Whether a client needs a certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ClientCertificate {
    Required,
    /// An invalid one is refused.
    Optional,
}

/// Reason why a connection was not established.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The other side did not finish its handshake in time.
    #[error("no handshake within {HANDSHAKE_WITHIN:?}")]
    Timeout,
    /// The other side does not speak TLS.
    #[error("the other side does not use TLS: set its tls.folder, or --tls FOLDER of a command")]
    NotTls,
    /// The other side refused the certificate of this process.
    #[error(
        "the other side refused our certificate ({0}): it has ended, or is of another authority or cluster"
    )]
    Refused(String),
    /// The handshake has failed.
    #[error("handshake failed: {0}")]
    Handshake(std::io::Error),
    /// The certificate of the other side states no identity.
    #[error("the other side has an invalid certificate: {0}")]
    Certificate(#[from] CredentialsError),
    /// The certificate of a client is refused.
    #[error("{error}; the refused certificate names {claimed}")]
    Client {
        /// Identity in the certificate, which is not verified.
        claimed: Identity,
        /// Reason of the refusal.
        error: Box<TlsError>,
    },
}

/// Credentials that are in use.
struct Current {
    credentials: RwLock<Arc<Credentials>>,
    provider: Arc<CryptoProvider>,
}

/// Error of rustls in an error of a stream.
fn inner(error: &std::io::Error) -> Option<&Error> {
    error.get_ref().and_then(|inner| inner.downcast_ref::<Error>())
}

fn kind_of_certificate(invalid: &CertificateError) -> &'static str {
    match invalid {
        CertificateError::Expired
        | CertificateError::ExpiredContext { .. }
        | CertificateError::NotValidYet
        | CertificateError::NotValidYetContext { .. } => "certificate_not_valid_now",
        CertificateError::UnknownIssuer | CertificateError::BadSignature => "certificate_untrusted",
        _ => "certificate_invalid",
    }
}

impl From<std::io::Error> for TlsError {
    fn from(error: std::io::Error) -> TlsError {
        match inner(&error) {
            Some(Error::InvalidMessage(_)) => TlsError::NotTls,
            Some(Error::AlertReceived(alert)) => TlsError::Refused(format!("{alert:?}")),
            _ => TlsError::Handshake(error),
        }
    }
}

impl TlsError {
    /// Name of the kind of error, for the log: each kind is one condition.
    pub fn kind(&self) -> &'static str {
        match self {
            TlsError::Timeout => "handshake_timeout",
            TlsError::NotTls => "handshake_plain",
            TlsError::Refused(_) => "handshake_refused",
            TlsError::Certificate(_) => "certificate_unnamed",
            TlsError::Client { error, .. } => error.kind(),
            TlsError::Handshake(error) => match inner(error) {
                Some(Error::NoCertificatesPresented) => "certificate_absent",
                Some(Error::InvalidCertificate(invalid)) => kind_of_certificate(invalid),
                _ => "handshake_failed",
            },
        }
    }
}

impl Current {
    fn get(&self) -> Arc<Credentials> {
        Arc::clone(&self.credentials.read().unwrap_or_else(PoisonError::into_inner))
    }
}

impl fmt::Debug for Current {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tls").field(&self.current).finish()
    }
}

impl Expected {
    fn admits(&self, role: &Role) -> bool {
        match self {
            Expected::Role(expected) => expected == role,
            Expected::AnyAgent => matches!(role, Role::Agent(_)),
        }
    }
}

impl Tls {
    /// Uses credentials under all connections.
    pub fn new(credentials: Credentials) -> Tls {
        let provider = Arc::new(provider());
        let current = Arc::new(Current {
            credentials: RwLock::new(Arc::new(credentials)),
            provider: Arc::clone(&provider),
        });
        Tls { current, provider }
    }

    /// Configuration of a server for one connection.
    pub(crate) fn accepting(&self, certificate: ClientCertificate) -> Accepting {
        let claim = Claim::default();
        let clients =
            ClientVerifier { current: Arc::clone(&self.current), certificate, claim: claim.clone() };
        let mut config = ServerConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&TLS13])
            .expect("the provider has TLS 1.3")
            .with_client_cert_verifier(Arc::new(clients))
            .with_cert_resolver(Arc::clone(&self.current) as Arc<dyn ResolvesServerCert>);
        // A resumed session would skip the verification of the client's certificate, which may have ended.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(NoServerSessionStorage {});
        Accepting { config, claim }
    }

    /// Credentials that are in use.
    pub fn credentials(&self) -> Arc<Credentials> {
        self.current.get()
    }

    /// Replaces the credentials: new connections use them, existing ones stay.
    pub fn replace(&self, credentials: Credentials) {
        *self.current.credentials.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(credentials);
    }

    /// Accepts a connection: returns it with the identity of the client.
    ///
    /// # Errors
    /// The client has no valid certificate of this cluster, or is too slow.
    pub async fn accept(
        &self,
        stream: TcpStream,
    ) -> Result<(server::TlsStream<TcpStream>, VerifiedIdentity), TlsError> {
        let (stream, identity) = handshake(self.accepting(ClientCertificate::Required), stream).await?;
        Ok((stream, identity.expect("the verifier requires a certificate")))
    }

    /// Like [`accept`](Tls::accept), but a client may have no certificate: it can then only show a bearer token. An
    /// invalid certificate is refused.
    ///
    /// # Errors
    /// The client's certificate is invalid or of another cluster, or the client is too slow.
    pub async fn accept_optional(
        &self,
        stream: TcpStream,
    ) -> Result<(server::TlsStream<TcpStream>, Option<VerifiedIdentity>), TlsError> {
        handshake(self.accepting(ClientCertificate::Optional), stream).await
    }

    /// Connects over a stream to a server of the expected role.
    ///
    /// # Errors
    /// The server has another role, no valid certificate of this cluster, or is too slow.
    pub async fn connect(
        &self,
        stream: TcpStream,
        expected: Expected,
    ) -> Result<client::TlsStream<TcpStream>, TlsError> {
        let connector = TlsConnector::from(Arc::new(self.client_config(expected)));
        // The name is not verified: the identity is.
        let name = ServerName::try_from("reprise").expect("a valid name");
        let connecting = connector.connect(name, stream);
        Ok(timeout(HANDSHAKE_WITHIN, connecting).await.map_err(|_| TlsError::Timeout)??)
    }

    /// Configuration of a client that connects to servers of the expected role.
    pub fn client_config(&self, expected: Expected) -> ClientConfig {
        let resolver = Arc::clone(&self.current) as Arc<dyn ResolvesClientCert>;
        let mut config = self.client_builder(expected).with_client_cert_resolver(resolver);
        config.enable_sni = false;
        config
    }

    /// Configuration of a client that shows no certificate, as scrapers with a bearer token do.
    pub fn anonymous_client_config(&self, expected: Expected) -> ClientConfig {
        let mut config = self.client_builder(expected).with_no_client_auth();
        config.enable_sni = false;
        config
    }

    fn client_builder(&self, expected: Expected) -> ConfigBuilder<ClientConfig, WantsClientCert> {
        let verifier = ServerIdentity { current: Arc::clone(&self.current), expected };
        ClientConfig::builder_with_provider(Arc::clone(&self.provider))
            .with_protocol_versions(&[&TLS13])
            .expect("the provider has TLS 1.3")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier))
    }
}

/// Completes the server's side of a handshake; returns the identity of the client if it has a certificate.
async fn handshake(
    Accepting { config, claim }: Accepting,
    stream: TcpStream,
) -> Result<(server::TlsStream<TcpStream>, Option<VerifiedIdentity>), TlsError> {
    let accepting = TlsAcceptor::from(Arc::new(config)).accept(stream).into_fallible();
    let accepted = timeout(HANDSHAKE_WITHIN, accepting).await.map_err(|_| TlsError::Timeout)?;
    let stream = match accepted {
        Ok(stream) => stream,
        Err((error, stream)) => {
            // The result is irrelevant: the connection is closed in any case.
            let _ = timeout(REASON_READ_WITHIN, let_client_read(stream)).await;
            return Err(claim.explain(error.into()));
        }
    };
    let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let identity = certificate.map(verified_identity_of).transpose()?;
    Ok((stream, identity))
}

impl Claim {
    /// Adds the identity in a refused certificate to the error.
    pub(crate) fn explain(&self, error: TlsError) -> TlsError {
        match self.0.get() {
            Some(claimed) => TlsError::Client { claimed: claimed.clone(), error: Box::new(error) },
            None => error,
        }
    }
}

/// Ends our side, and reads what the client sends meanwhile: closing with unread bytes would discard the alert that
/// states the reason.
async fn let_client_read(mut stream: TcpStream) -> std::io::Result<u64> {
    stream.shutdown().await?;
    tokio::io::copy(&mut stream.take(REFUSED_BYTES_MAX), &mut tokio::io::sink()).await
}

/// Ciphers in the order of their speed on processors with AES instructions.
fn provider() -> CryptoProvider {
    let mut provider = ring::default_provider();
    let rank = |suite: &rustls::SupportedCipherSuite| match suite.suite() {
        CipherSuite::TLS13_AES_128_GCM_SHA256 => 0,
        CipherSuite::TLS13_AES_256_GCM_SHA384 => 1,
        _ => 2,
    };
    provider.cipher_suites.sort_by_key(rank);
    provider
}

/// Refuses an identity of another cluster.
fn check_cluster(own: &Credentials, certificate: &CertificateDer<'_>) -> Result<Identity, Error> {
    let refused = |_| Error::InvalidCertificate(CertificateError::ApplicationVerificationFailure);
    let identity = identity_of(certificate).map_err(refused)?;
    if identity.cluster == own.identity.cluster {
        Ok(identity)
    } else {
        Err(Error::InvalidCertificate(CertificateError::NotValidForName))
    }
}

impl ResolvesServerCert for Current {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.get().key))
    }
}

impl ResolvesClientCert for Current {
    fn resolve(&self, _hints: &[&[u8]], _schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(Arc::clone(&self.get().key))
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for Current {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let own = self.get();
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::clone(&own.roots), Arc::clone(&self.provider));
        let verifier = verifier.build().map_err(|error| Error::General(error.to_string()))?;
        let verified = verifier.verify_client_cert(certificate, intermediates, now)?;
        check_cluster(&own, certificate)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _certificate: &CertificateDer<'_>,
        _signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Err(Error::General("TLS 1.2 is not offered".to_owned()))
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Verifies the client of one connection.
#[derive(Debug)]
struct ClientVerifier {
    current: Arc<Current>,
    certificate: ClientCertificate,
    claim: Claim,
}

impl ClientCertVerifier for ClientVerifier {
    fn client_auth_mandatory(&self) -> bool {
        self.certificate == ClientCertificate::Required
    }

    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.current.verify_client_cert(certificate, intermediates, now).inspect_err(|_| {
            if let Ok(claimed) = identity_of(certificate) {
                // A client shows one certificate.
                let _ = self.claim.0.set(claimed);
            }
        })
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        ClientCertVerifier::verify_tls12_signature(&*self.current, message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        ClientCertVerifier::verify_tls13_signature(&*self.current, message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ClientCertVerifier::supported_verify_schemes(&*self.current)
    }
}

/// Verifies a server: chain, cluster and role.
#[derive(Debug)]
struct ServerIdentity {
    current: Arc<Current>,
    expected: Expected,
}

impl ServerCertVerifier for ServerIdentity {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let own = self.current.get();
        let algorithms = self.current.provider.signature_verification_algorithms.all;
        let parsed = ParsedCertificate::try_from(certificate)?;
        verify_server_cert_signed_by_trust_anchor(&parsed, &own.roots, intermediates, now, algorithms)?;
        let identity = check_cluster(&own, certificate)?;
        if self.expected.admits(&identity.role) {
            return Ok(ServerCertVerified::assertion());
        }
        Err(Error::InvalidCertificate(CertificateError::NotValidForName))
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        ClientCertVerifier::verify_tls12_signature(&*self.current, message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        ClientCertVerifier::verify_tls13_signature(&*self.current, message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ClientCertVerifier::supported_verify_schemes(&*self.current)
    }
}
