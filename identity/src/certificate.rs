//! Facts that a certificate states, for people, metrics and checks.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use x509_parser::parse_x509_certificate;

/// SHA-256 of a certificate or of a set of them, written as 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Fingerprint([u8; 32]);

/// Facts of one certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertificateFacts {
    /// Common name of its subject; empty without one.
    pub subject: String,
    /// Begin of its validity.
    pub not_before: SystemTime,
    /// End of its validity.
    pub not_after: SystemTime,
    /// Fingerprint of its encoding.
    pub fingerprint: Fingerprint,
}

impl CertificateFacts {
    /// Reads a certificate.
    ///
    /// # Errors
    /// The bytes are not a certificate.
    pub fn of(certificate: &CertificateDer<'_>) -> Result<CertificateFacts, String> {
        let (_, parsed) = parse_x509_certificate(certificate).map_err(|error| error.to_string())?;
        let at = |seconds: i64| UNIX_EPOCH + Duration::from_secs(seconds.max(0).cast_unsigned());
        let name = parsed.subject().iter_common_name().next().and_then(|name| name.as_str().ok());
        Ok(CertificateFacts {
            subject: name.unwrap_or_default().to_owned(),
            not_before: at(parsed.validity().not_before.timestamp()),
            not_after: at(parsed.validity().not_after.timestamp()),
            fingerprint: Fingerprint::of(certificate),
        })
    }

    /// Time until the certificate ends; zero after its end.
    pub fn remaining(&self, now: SystemTime) -> Duration {
        self.not_after.duration_since(now).unwrap_or_default()
    }
}

impl Fingerprint {
    /// Computes the fingerprint of bytes.
    pub fn of(bytes: &[u8]) -> Fingerprint {
        Fingerprint(Sha256::digest(bytes).into())
    }

    /// Computes the digest of a set of certificates, whichever their order.
    pub fn of_set(fingerprints: impl Iterator<Item = Fingerprint>) -> Fingerprint {
        let mut sorted: Vec<Fingerprint> = fingerprints.collect();
        sorted.sort_unstable();
        let bytes: Vec<u8> = sorted.iter().flat_map(|one| one.0).collect();
        Fingerprint::of(&bytes)
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl From<Fingerprint> for String {
    fn from(fingerprint: Fingerprint) -> String {
        fingerprint.to_string()
    }
}

impl TryFrom<String> for Fingerprint {
    type Error = String;

    fn try_from(text: String) -> Result<Fingerprint, String> {
        let refused = || format!("invalid fingerprint {text:?}: expected 64 hexadecimal digits");
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(refused());
        }
        let mut bytes = [0; 32];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).map_err(|_| refused())?;
        }
        Ok(Fingerprint(bytes))
    }
}

/// Returns the certificates of a text in PEM.
pub(crate) fn certificates(text: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let all = CertificateDer::pem_slice_iter(text).collect::<Result<Vec<_>, _>>();
    all.map_err(|error| error.to_string())
}

/// Whether a key in PEM is that of a certificate.
pub(crate) fn is_key_of(key: &str, certificate: &CertificateDer<'static>) -> bool {
    let Ok(key) = PrivateKeyDer::from_pem_slice(key.as_bytes()) else { return false };
    let provider = rustls::crypto::ring::default_provider();
    rustls::sign::CertifiedKey::from_der(vec![certificate.clone()], key, &provider).is_ok()
}

/// Splits a text in PEM into its certificates, each still in PEM. Drops one without its last line.
pub fn split(text: &str) -> Vec<String> {
    const BEGIN: &str = "-----BEGIN CERTIFICATE-----";
    const END: &str = "-----END CERTIFICATE-----";
    let parts = text.split_inclusive(END).filter(|part| part.ends_with(END));
    let parts = parts.filter_map(|part| part.find(BEGIN).map(|at| &part[at..]));
    parts.map(|part| format!("{part}\n")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::authority::Authority;

    #[test]
    fn fingerprints_are_read_as_written_and_a_set_has_no_order() {
        let (one, two) = (Fingerprint::of(b"one"), Fingerprint::of(b"two"));
        assert_eq!(Fingerprint::try_from(one.to_string()), Ok(one));
        assert!(Fingerprint::try_from("12".to_owned()).is_err());
        assert_eq!(Fingerprint::of_set([one, two].into_iter()), Fingerprint::of_set([two, one].into_iter()));
        assert_ne!(Fingerprint::of_set([one].into_iter()), Fingerprint::of_set([one, two].into_iter()));
    }

    #[test]
    fn several_certificates_are_split_with_comments_between_them() {
        let (one, two) = (Authority::create("a").expect("a name"), Authority::create("b").expect("a name"));
        let text = format!("# first\n{}\n# second\n{}", one.certificate(), two.certificate());
        let parts = split(&text);
        assert_eq!(parts.len(), 2);
        for (part, subject) in parts.iter().zip(["reprise a", "reprise b"]) {
            let certificates = certificates(part.as_bytes()).expect("PEM");
            assert_eq!(CertificateFacts::of(&certificates[0]).expect("a certificate").subject, subject);
        }
        assert!(is_key_of(one.key(), &certificates(parts[0].as_bytes()).expect("PEM")[0]));
        assert!(!is_key_of(one.key(), &certificates(parts[1].as_bytes()).expect("PEM")[0]));
    }
}
