//! `[store]`: where node numbers and epochs are stored, selected by `kind`.

use std::path::PathBuf;

use reprise_controlplane_store::{EtcdIdentity, EtcdSettings, EtcdTls, EtcdUser};
use serde::Deserialize;

use super::ConfigError;

/// Settings of the table `[store]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum StoreConfig {
    /// One file; survives restarts of the process.
    Embedded {
        /// Path of the store file.
        path: PathBuf,
    },
    /// An etcd cluster; survives the loss of this machine.
    Etcd(EtcdConfig),
    /// Process memory: contents are lost on exit, and node numbers start over.
    Memory {},
}

/// The table `[store]` of kind `etcd`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdConfig {
    /// Endpoints: `http://host:port`, or `https://host:port` with TLS.
    pub endpoints: Vec<String>,
    /// Prefix of every key of this installation.
    #[serde(default = "etcd_prefix")]
    pub prefix: String,
    /// User to authenticate as, if etcd requires authentication.
    pub user: Option<EtcdUserConfig>,
    /// TLS settings; required for `https://` endpoints.
    pub tls: Option<EtcdTlsConfig>,
}

/// Settings of the table `[store.user]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdUserConfig {
    /// Name of the etcd user.
    pub name: String,
    /// File that contains the password; a trailing line break is ignored.
    pub password_file: PathBuf,
}

/// The table `[store.tls]`; all files in PEM.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EtcdTlsConfig {
    /// Certificates of the authorities that sign etcd's certificate.
    pub ca_file: PathBuf,
    /// Client certificate, if etcd requires one; set together with `key_file`.
    pub cert_file: Option<PathBuf>,
    /// Private key of the client certificate.
    pub key_file: Option<PathBuf>,
    /// Name in etcd's certificate, if it differs from the host of the endpoints.
    pub server_name: Option<String>,
}

/// Default prefix. Installations that share an etcd cluster need different prefixes.
fn etcd_prefix() -> String {
    "/reprise/".to_owned()
}

impl StoreConfig {
    /// Checks the settings without reading any file.
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
    /// Converts to the settings of the store.
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
                return missing(
                    "store.tls.cert_file",
                    "required by key_file: set the certificate of that key",
                );
            }
            (Some(_), None) => {
                return missing(
                    "store.tls.key_file",
                    "required by cert_file: set the key of that certificate",
                );
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
    fn passes_all_etcd_settings_to_the_store() {
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
    fn omitted_etcd_settings_take_their_defaults() {
        let text = "[store]\nkind = 'etcd'\nendpoints = ['http://etcd-0:2379']";
        let StoreConfig::Etcd(etcd) = Config::parse(text).expect("valid").store else { panic!("{text}") };
        let settings = etcd.settings().expect("valid");
        assert_eq!((settings.prefix.as_str(), settings.user, settings.tls), ("/reprise/", None, None));
    }
}
