//! A certificate authority for tests.

use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};

/// An authority and its key.
pub(crate) struct Authority {
    params: CertificateParams,
    key: KeyPair,
}

impl Authority {
    /// Creates an authority with this name.
    pub(crate) fn new(name: &str) -> Authority {
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        Authority { params, key: KeyPair::generate().expect("a key") }
    }

    /// Self-signed certificate of the authority.
    pub(crate) fn certificate(&self) -> String {
        self.params.clone().self_signed(&self.key).expect("signed").pem()
    }

    /// Issues a certificate for these names; returns it with its key.
    pub(crate) fn issue(&self, names: &[&str]) -> (String, String) {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names.clone()).expect("names");
        params.distinguished_name.push(DnType::CommonName, names[0].clone());
        let key = KeyPair::generate().expect("a key");
        let issuer = Issuer::from_params(&self.params, &self.key);
        let certificate = params.signed_by(&key, &issuer).expect("signed");
        (certificate.pem(), key.serialize_pem())
    }
}
