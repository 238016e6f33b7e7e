//! Settings of the etcd store: endpoints, prefix, user and TLS.
//!
//! Secrets are given as files, which are read when the store is opened and after they change. Neither the settings nor
//! the log contain them.

use std::path::{Path, PathBuf};
use std::time::Duration;

use etcd_client::ConnectOptions;

use super::tls::Tls;
use crate::error::InvalidSetting;

/// Maximum length of the prefix in bytes.
const PREFIX_BYTES_MAX: usize = 256;
/// Maximum size of a certificate, key or password file in bytes.
const FILE_BYTES_MAX: usize = 1 << 20;
/// Time limit for connecting to an endpoint.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Keep-alive of connections: a vanished peer is detected within the sum of both.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(5);
const KEEP_ALIVE_ANSWER: Duration = Duration::from_secs(2);

/// Settings of a connection to etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdSettings {
    /// One or more endpoints: `http://host:port`, or `https://host:port` with TLS.
    pub endpoints: Vec<String>,
    /// Prefix of all keys, for example `/reprise/`.
    pub prefix: String,
    /// User to authenticate as, if etcd requires authentication.
    pub user: Option<EtcdUser>,
    /// TLS settings, for `https://` endpoints.
    pub tls: Option<EtcdTls>,
}

/// A user of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdUser {
    /// Name of the user.
    pub name: String,
    /// File that contains the password; a trailing line break is ignored.
    pub password_file: PathBuf,
}

/// TLS settings for etcd; all files in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdTls {
    /// Certificates of the authorities that sign etcd's certificate.
    pub ca_file: PathBuf,
    /// Client certificate, if etcd requires one (`--client-cert-auth`).
    pub identity: Option<EtcdIdentity>,
    /// Name in etcd's certificate, if it differs from the host of the endpoints.
    pub server_name: Option<String>,
}

/// A client certificate with its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdIdentity {
    /// Certificate, followed by intermediate certificates.
    pub cert_file: PathBuf,
    /// Private key of the certificate.
    pub key_file: PathBuf,
}

/// Contents of the files of the settings; none for a file that cannot be read.
pub(super) type Files = Vec<Option<Vec<u8>>>;

impl EtcdSettings {
    /// Reads the files without checking them. Blocks.
    pub(super) fn files(&self) -> Files {
        let tls = self.tls.as_ref();
        let identity = tls.and_then(|tls| tls.identity.as_ref());
        let paths = [
            tls.map(|tls| &tls.ca_file),
            identity.map(|identity| &identity.cert_file),
            identity.map(|identity| &identity.key_file),
            self.user.as_ref().map(|user| &user.password_file),
        ];
        paths.into_iter().flatten().map(|path| read("", path).ok()).collect()
    }

    /// Checks the settings without reading any file.
    ///
    /// # Errors
    /// The invalid setting, with its valid values.
    pub fn check(&self) -> Result<(), InvalidSetting> {
        if self.endpoints.is_empty() {
            return invalid(
                "store.endpoints",
                "expected at least one endpoint, as http://host:port".to_owned(),
            );
        }
        let (scheme, remedy) = match self.tls {
            None => ("http://", "write it as http://host:port, or, for https, add [store.tls] with ca_file"),
            Some(_) => ("https://", "with [store.tls] write it as https://host:port"),
        };
        if let Some(other) = self.endpoints.iter().find(|endpoint| !endpoint.starts_with(scheme)) {
            return invalid("store.endpoints", format!("invalid endpoint '{other}': {remedy}"));
        }
        if !self.prefix.ends_with('/') {
            return invalid(
                "store.prefix",
                "must end with '/', so that it is not a prefix of another prefix".to_owned(),
            );
        }
        if self.prefix.len() > PREFIX_BYTES_MAX {
            return invalid(
                "store.prefix",
                format!("has {} bytes, expected at most {PREFIX_BYTES_MAX}", self.prefix.len()),
            );
        }
        if self.user.as_ref().is_some_and(|user| user.name.is_empty()) {
            return invalid("store.user.name", "must not be empty".to_owned());
        }
        Ok(())
    }

    /// Reads the files and builds the connection options. Blocks.
    pub(super) fn load(&self) -> Result<(ConnectOptions, Option<Tls>), InvalidSetting> {
        self.check()?;
        let mut options = ConnectOptions::new()
            .with_connect_timeout(CONNECT_TIMEOUT)
            .with_keep_alive(KEEP_ALIVE_EVERY, KEEP_ALIVE_ANSWER)
            .with_keep_alive_while_idle(true)
            .with_require_leader(true);
        if let Some(user) = &self.user {
            options = options.with_user(&user.name, user.password()?).with_auto_token_refresh(true);
        }
        let tls = self.tls.as_ref().map(Tls::load).transpose()?;
        if let Some(tls) = &tls {
            options = options.with_tls(tls.options());
        }
        Ok((options, tls))
    }
}

impl EtcdUser {
    fn password(&self) -> Result<String, InvalidSetting> {
        let field = "store.user.password_file";
        let text = String::from_utf8(read(field, &self.password_file)?)
            .or_else(|_| invalid(field, format!("{} is not text", self.password_file.display())))?;
        match text.trim_end_matches(['\n', '\r']) {
            "" => invalid(
                field,
                format!("{} is empty: write the password into it", self.password_file.display()),
            ),
            password => Ok(password.to_owned()),
        }
    }
}

pub(super) fn read(field: &'static str, path: &Path) -> Result<Vec<u8>, InvalidSetting> {
    let bytes = std::fs::read(path).or_else(|error| {
        invalid(
            field,
            format!("cannot read {} ({error}): check the path and its permissions", path.display()),
        )
    })?;
    match bytes.len() > FILE_BYTES_MAX {
        true => invalid(
            field,
            format!("{} has {} bytes, expected at most {FILE_BYTES_MAX}", path.display(), bytes.len()),
        ),
        false => Ok(bytes),
    }
}

pub(super) fn invalid<T>(field: &'static str, reason: String) -> Result<T, InvalidSetting> {
    Err(InvalidSetting { field, reason })
}
