//! `[store]`: where node numbers and epochs are kept, by `kind`.

use std::path::PathBuf;

use reprise_controlplane_store::{EtcdIdentity, EtcdSettings, EtcdTls, EtcdUser};
use serde::Deserialize;

use super::ConfigError;

/// See the module.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum StoreConfig {
    /// One file; survives restarts.
    Embedded {
        /// The file.
        path: PathBuf,
    },
    /// An etcd cluster; survives the loss of this machine.
    Etcd(EtcdConfig),
    /// Forgotten with the process: node numbers start over.
    Memory {},
}

/// `[store]` of kind `etcd`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdConfig {
    /// `http://host:port` of its members; `https://` with TLS.
    pub endpoints: Vec<String>,
    /// What every key of this installation begins with.
    #[serde(default = "etcd_prefix")]
    pub prefix: String,
    /// Who to be there, where etcd asks for it; the password is in a file.
    pub user: Option<EtcdUserConfig>,
    /// How to trust it, and how to be trusted where it asks for a certificate.
    pub tls: Option<EtcdTlsConfig>,
}

/// `[store.user]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdUserConfig {
    /// Name.
    pub name: String,
    /// A file whose content is the password; the end of its line is not part of it.
    pub password_file: PathBuf,
}

/// `[store.tls]`; all files in PEM.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdTlsConfig {
    /// The certificates of the authorities that sign etcd's.
    pub ca_file: PathBuf,
    /// Our certificate, where etcd asks for one; together with `key_file`.
    pub cert_file: Option<PathBuf>,
    /// Its private key.
    pub key_file: Option<PathBuf>,
    /// The name in etcd's certificate, where it is not the host of the endpoints.
    pub server_name: Option<String>,
}

/// Several installations may share a cluster by other prefixes.
fn etcd_prefix() -> String {
    "/reprise/".to_owned()
}

impl StoreConfig {
    /// Refuses what cannot work, with words; looks at no file.
    pub(super) fn check(&self) -> Result<(), ConfigError> {
        match self {
            StoreConfig::Embedded { .. } | StoreConfig::Memory {} => Ok(()),
            StoreConfig::Etcd(etcd) => {
                let refuse = |refused: reprise_controlplane_store::InvalidSetting| ConfigError::Value {
                    field: refused.field,
                    reason: refused.reason,
                };
                etcd.settings()?.check().map_err(refuse)
            }
        }
    }
}

impl EtcdConfig {
    /// As the store takes it.
    pub fn settings(&self) -> Result<EtcdSettings, ConfigError> {
        let user =
            self.user.clone().map(|EtcdUserConfig { name, password_file }| EtcdUser { name, password_file });
        let tls = self.tls.as_ref().map(EtcdTlsConfig::settings).transpose()?;
        Ok(EtcdSettings { endpoints: self.endpoints.clone(), prefix: self.prefix.clone(), user, tls })
    }
}

impl EtcdTlsConfig {
    fn settings(&self) -> Result<EtcdTls, ConfigError> {
        let missing = |field, reason: &str| Err(ConfigError::Value { field, reason: reason.to_owned() });
        let identity = match (self.cert_file.clone(), self.key_file.clone()) {
            (None, None) => None,
            (Some(cert_file), Some(key_file)) => Some(EtcdIdentity { cert_file, key_file }),
            (None, Some(_)) => {
                return missing("store.tls.cert_file", "key_file needs it: name the certificate of that key");
            }
            (Some(_), None) => {
                return missing("store.tls.key_file", "cert_file needs it: name the key of that certificate");
            }
        };
        Ok(EtcdTls { ca_file: self.ca_file.clone(), identity, server_name: self.server_name.clone() })
    }
}

impl Default for StoreConfig {
    fn default() -> StoreConfig {
        StoreConfig::Embedded { path: PathBuf::from("reprise-controlplane.store") }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    #[test]
    fn everything_said_of_etcd_reaches_the_store() {
        let text = "[store]
            kind = 'etcd'
            endpoints = ['https://etcd-0:2379', 'https://etcd-1:2379']
            prefix = '/other/'
            user = { name = 'reprise', password_file = 'p' }
            tls = { ca_file = 'ca', cert_file = 'cert', key_file = 'key', server_name = 'etcd' }";
        let StoreConfig::Etcd(etcd) = Config::parse(text).expect("valid").store else { panic!("{text}") };
        let identity = EtcdIdentity { cert_file: "cert".into(), key_file: "key".into() };
        let expected = EtcdSettings {
            endpoints: vec!["https://etcd-0:2379".to_owned(), "https://etcd-1:2379".to_owned()],
            prefix: "/other/".to_owned(),
            user: Some(EtcdUser { name: "reprise".to_owned(), password_file: "p".into() }),
            tls: Some(EtcdTls {
                ca_file: "ca".into(),
                identity: Some(identity),
                server_name: Some("etcd".to_owned()),
            }),
        };
        assert_eq!(etcd.settings().expect("valid"), expected);
    }

    #[test]
    fn what_is_not_said_of_etcd_has_its_default() {
        let text = "[store]\nkind = 'etcd'\nendpoints = ['http://etcd-0:2379']";
        let StoreConfig::Etcd(etcd) = Config::parse(text).expect("valid").store else { panic!("{text}") };
        let settings = etcd.settings().expect("valid");
        assert_eq!((settings.prefix.as_str(), settings.user, settings.tls), ("/reprise/", None, None));
    }
}
