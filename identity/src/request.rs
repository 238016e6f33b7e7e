//! Requests for certificates (PKCS #10), for processes that create their own keys: the key stays in the process, and the
//! authority gets only its public half.
//!
//! The authority takes the public key and the identity from a request. Whether the requester may have that identity is
//! decided by the caller. Everything else in the certificate comes from the authority.

use rcgen::{CertificateParams, CertificateSigningRequestParams, DnType, KeyPair, PublicKey, SanType};
use time::Duration;

use crate::authority::{Authority, AuthorityError, check_validity};
use crate::name::{Identity, NameError};

/// Label of requests in PEM.
const LABEL: &str = "-----BEGIN CERTIFICATE REQUEST-----";

/// Key of a process, and the request for its certificate, in PEM.
pub struct NewRequest {
    /// Key, which the requester keeps.
    pub key: String,
    /// Request for the authority.
    pub request: String,
}

/// Request whose signature was verified: the requester has the key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SigningRequest {
    identity: Identity,
    public_key: PublicKey,
}

/// Reason to refuse a request.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// The text is not a request, or its signature is invalid.
    #[error("invalid certificate request: {0}; expected PKCS #10 in PEM, signed with its own key")]
    Invalid(String),
    /// The request names other things than one identity.
    #[error("the certificate request has {0} alternative names: expected one URI, reprise://CLUSTER/ROLE")]
    Names(usize),
    /// The request names something else.
    #[error("the certificate request names no process: {0}")]
    Name(#[from] NameError),
}

impl NewRequest {
    /// Creates a key and a request for an identity.
    ///
    /// # Errors
    /// The identity cannot be written into a request.
    pub fn create(identity: &Identity) -> Result<NewRequest, AuthorityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, identity.role.to_string());
        params.subject_alt_names = vec![SanType::URI(identity.to_string().try_into()?)];
        let request = params.serialize_request(&key)?.pem()?;
        Ok(NewRequest { key: key.serialize_pem(), request })
    }
}

impl std::fmt::Debug for NewRequest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("NewRequest")
    }
}

impl SigningRequest {
    /// Reads a request in PEM and verifies its signature.
    ///
    /// # Errors
    /// It is not a request for exactly one identity.
    pub fn parse(text: &str) -> Result<SigningRequest, RequestError> {
        if text.matches(LABEL).count() != 1 {
            return Err(RequestError::Invalid("not one block of PEM".to_owned()));
        }
        let parsed = CertificateSigningRequestParams::from_pem(text)
            .map_err(|error| RequestError::Invalid(error.to_string()))?;
        let names = &parsed.params.subject_alt_names;
        match names.as_slice() {
            [SanType::URI(uri)] => {
                Ok(SigningRequest { identity: uri.as_str().parse()?, public_key: parsed.public_key })
            }
            other => Err(RequestError::Names(other.len())),
        }
    }

    /// Identity that the requester asks for.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }
}

impl Authority {
    /// Signs the certificate of a request, whose identity the caller has authorised. Returns it in PEM. `hosts` are
    /// further host names in the certificate, which the caller chooses: requests have none.
    ///
    /// # Errors
    /// The validity is outside of its bounds.
    pub fn sign(
        &self,
        request: &SigningRequest,
        hosts: &[String],
        valid: Duration,
    ) -> Result<String, AuthorityError> {
        check_validity(valid)?;
        let now = time::OffsetDateTime::now_utc();
        let period = (now - crate::authority::SKEW, now + valid);
        self.certify(&request.identity, hosts, &request.public_key, period)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authority::CERTIFICATE_VALID;
    use crate::credentials::{Credentials, Files};
    use crate::name::Role;

    fn identity() -> Identity {
        Identity::new("c", Role::Agent("node-1".to_owned())).expect("valid names")
    }

    #[test]
    fn signed_request_and_its_key_are_credentials_of_the_requested_identity() {
        let authority = Authority::create("c").expect("a name");
        let new = NewRequest::create(&identity()).expect("a valid identity");
        assert!(!new.request.contains("PRIVATE"), "the key stays with the requester");
        let request = SigningRequest::parse(&new.request).expect("a valid request");
        assert_eq!(request.identity(), &identity());
        let certificate = authority.sign(&request, &[], CERTIFICATE_VALID).expect("a valid period");
        let files = Files {
            authorities: authority.certificate().as_bytes().to_vec(),
            certificate: certificate.into_bytes(),
            key: new.key.into_bytes(),
        };
        let credentials = Credentials::parse(&files).expect("they belong together");
        credentials.check_issuer().expect("the authority has signed it");
        assert_eq!(credentials.identity, identity());
        let error = authority.sign(&request, &[], Duration::minutes(1)).expect_err("too short");
        assert!(error.to_string().contains("invalid validity"), "{error}");
    }

    #[test]
    fn refuses_requests_that_are_changed_or_name_something_else() {
        let new = NewRequest::create(&identity()).expect("a valid identity");
        let named = |names: Vec<SanType>| {
            let mut params = CertificateParams::default();
            params.subject_alt_names = names;
            let request = params.serialize_request(&KeyPair::generate().expect("a key"));
            request.and_then(|request| request.pem()).expect("a request")
        };
        let uri = |text: &str| SanType::URI(text.try_into().expect("ASCII"));
        let other = uri("reprise://c/admin");
        let mut tampered: Vec<String> = new.request.lines().map(str::to_owned).collect();
        let line = tampered.len() - 2;
        tampered[line] = tampered[line].chars().rev().collect();
        for (text, words) in [
            (String::new(), "not one block"),
            (format!("{0}{0}", new.request), "not one block"),
            (tampered.join("\n"), "invalid certificate request"),
            (named(Vec::new()), "has 0 alternative names"),
            (named(vec![uri("reprise://c/member"), other]), "has 2 alternative names"),
            (named(vec![SanType::DnsName("c".try_into().expect("ASCII"))]), "has 1 alternative names"),
            (named(vec![uri("spiffe://c/member")]), "reprise://CLUSTER"),
        ] {
            let error = SigningRequest::parse(&text).expect_err(words).to_string();
            assert!(error.contains(words), "{words}: {error}");
        }
    }
}
