//! The authority of a cluster: a key whose certificate all processes trust.
//!
//! Certificates begin [`SKEW`] before now, so that a clock that is late accepts them, and are renewed long before their
//! end, so that a clock that is early does as well.

use std::fmt;

use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData, SanType,
};
use time::{Duration, OffsetDateTime};

use crate::certificate::{self, CertificateFacts};
use crate::credentials::{Credentials, CredentialsError, Files};
use crate::name::{Identity, Role};

/// Difference of clocks that certificates tolerate: twice the promised hour, for an authority that is early and a
/// process that is late.
pub const SKEW: Duration = Duration::hours(2);

/// Validity of an authority.
pub const AUTHORITY_VALID: Duration = Duration::days(10 * 365);

/// Validity of a certificate, unless another one is requested.
pub const CERTIFICATE_VALID: Duration = Duration::days(90);

/// Shortest validity: renewal at two thirds leaves 8 hours, more than a difference of clocks.
pub const CERTIFICATE_VALID_MIN: Duration = Duration::days(1);

/// Authority that issues certificates.
pub struct Authority {
    certificate: String,
    facts: CertificateFacts,
    key: String,
    issuer: Issuer<'static, KeyPair>,
}

/// Certificate and key of a process, in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Issued {
    /// Certificate.
    pub certificate: String,
    /// Its key.
    pub key: String,
}

impl Issued {
    /// Returns the files of the process, which trusts these authorities.
    pub fn into_files(self, authorities: &str) -> Files {
        Files {
            authorities: authorities.as_bytes().to_vec(),
            certificate: self.certificate.into_bytes(),
            key: self.key.into_bytes(),
        }
    }

    /// Returns the credentials of the process, which trusts these authorities.
    ///
    /// # Errors
    /// The text of the authorities has none.
    pub fn into_credentials(self, authorities: &str) -> Result<Credentials, CredentialsError> {
        Credentials::parse(&self.into_files(authorities))
    }
}

/// Reason why an authority cannot be used or cannot issue.
#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    /// The validity is too short or too long.
    #[error("invalid validity of {0}: expected {CERTIFICATE_VALID_MIN} to {AUTHORITY_VALID}")]
    Validity(Duration),
    /// Certificate or key cannot be read, or do not belong together.
    #[error(
        "cannot use the authority's certificate and key: {0}; create another authority or restore its files"
    )]
    Invalid(#[from] rcgen::Error),
}

/// Name for programs that verify host names only, like scrapers and etcd: `agent.reprise`, `member.reprise`. Our own
/// clients verify the identity.
pub fn server_name(role: &Role) -> String {
    let kind = match role {
        Role::Agent(_) => "agent",
        Role::Member => "member",
        Role::Etcd => "etcd",
        Role::Operator => "operator",
        Role::Admin => "admin",
        Role::Console => "console",
    };
    format!("{kind}.reprise")
}

impl fmt::Debug for Authority {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the key.
        f.debug_struct("Authority").field("facts", &self.facts).finish_non_exhaustive()
    }
}

impl Authority {
    /// Creates an authority for a cluster.
    ///
    /// # Errors
    /// The name of the cluster cannot be written into a certificate.
    pub fn create(cluster: &str) -> Result<Authority, AuthorityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, format!("reprise {cluster}"));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let now = OffsetDateTime::now_utc();
        (params.not_before, params.not_after) = (now - SKEW, now + AUTHORITY_VALID);
        let certificate = params.self_signed(&key)?.pem();
        Authority::load(&certificate, &key.serialize_pem())
    }

    /// Uses an authority whose certificate and key are given in PEM.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn load(certificate: &str, key: &str) -> Result<Authority, AuthorityError> {
        let issuer = Issuer::from_ca_cert_pem(certificate, KeyPair::from_pem(key)?)?;
        let parsed = certificate::certificates(certificate.as_bytes()).ok().and_then(|mut all| all.pop());
        let facts = parsed.and_then(|one| CertificateFacts::of(&one).ok());
        let facts = facts.ok_or(rcgen::Error::CouldNotParseCertificate)?;
        Ok(Authority { certificate: certificate.to_owned(), facts, key: key.to_owned(), issuer })
    }

    /// Certificate that processes trust, in PEM.
    pub fn certificate(&self) -> &str {
        &self.certificate
    }

    /// Facts of its certificate.
    pub fn facts(&self) -> &CertificateFacts {
        &self.facts
    }

    /// Key of the authority, in PEM. Its holder can take every identity of the cluster.
    pub fn key(&self) -> &str {
        &self.key
    }

    /// Issues a certificate for an identity, with a new key.
    ///
    /// # Errors
    /// The validity is outside of its bounds.
    pub fn issue(&self, identity: &Identity, valid: Duration) -> Result<Issued, AuthorityError> {
        check_validity(valid)?;
        let now = OffsetDateTime::now_utc();
        self.issue_between(identity, now - SKEW, now + valid)
    }

    /// Issues a certificate for a period, which may be in the past.
    ///
    /// # Errors
    /// The identity cannot be written into a certificate.
    pub fn issue_between(
        &self,
        identity: &Identity,
        from: OffsetDateTime,
        until: OffsetDateTime,
    ) -> Result<Issued, AuthorityError> {
        let key = KeyPair::generate()?;
        let certificate = self.certify(identity, &[], &key, (from, until))?;
        Ok(Issued { certificate, key: key.serialize_pem() })
    }

    /// Certifies that a public key is that of an identity, which is also reached by these host names.
    pub(crate) fn certify(
        &self,
        identity: &Identity,
        hosts: &[String],
        key: &impl PublicKeyData,
        (from, until): (OffsetDateTime, OffsetDateTime),
    ) -> Result<String, AuthorityError> {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, identity.role.to_string());
        params.subject_alt_names = vec![SanType::URI(Ia5String::try_from(identity.to_string())?)];
        // etcd resolves the names of a peer in this order until one has the peer's address.
        for name in hosts.iter().cloned().chain([server_name(&identity.role)]) {
            params.subject_alt_names.push(SanType::DnsName(Ia5String::try_from(name)?));
        }
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        (params.not_before, params.not_after) = (from, until);
        Ok(params.signed_by(key, &self.issuer)?.pem())
    }
}

/// Checks the validity of a new certificate.
pub(crate) fn check_validity(valid: Duration) -> Result<(), AuthorityError> {
    if (CERTIFICATE_VALID_MIN..=AUTHORITY_VALID).contains(&valid) {
        Ok(())
    } else {
        Err(AuthorityError::Validity(valid))
    }
}
