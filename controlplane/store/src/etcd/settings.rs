//! Where etcd is, what is ours in it, and how each knows the other.
//!
//! Secrets are named by their files and read when the store is opened: neither the settings nor what is logged of them
//! hold one.

use std::path::{Path, PathBuf};
use std::time::Duration;

use etcd_client::ConnectOptions;

use super::tls::Tls;
use crate::error::InvalidSetting;

/// Bytes of the prefix at the most: what is left of etcd's request limit (1.5 MiB) is not its concern.
const PREFIX_BYTES_MAX: usize = 256;
/// Bytes of a file of certificates, a key or a password at the most.
const FILE_BYTES_MAX: usize = 1 << 20;
/// Finding out that an endpoint is silent.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// A connection whose other end is gone without a word is noticed within the sum.
const KEEP_ALIVE_EVERY: Duration = Duration::from_secs(5);
const KEEP_ALIVE_ANSWER: Duration = Duration::from_secs(2);

/// Where etcd is and what is ours in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdSettings {
    /// `http://host:port` of members, at least one; `https://` with TLS.
    pub endpoints: Vec<String>,
    /// What every key begins with, for example `/reprise/`.
    pub prefix: String,
    /// Who to be, where etcd asks for it.
    pub user: Option<EtcdUser>,
    /// How to trust it and be trusted.
    pub tls: Option<EtcdTls>,
}

/// A user of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdUser {
    /// Its name.
    pub name: String,
    /// A file whose content is the password; the end of its line is not part of it.
    pub password_file: PathBuf,
}

/// TLS to etcd; all files in PEM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdTls {
    /// The certificates of the authorities that sign etcd's.
    pub ca_file: PathBuf,
    /// Who we are, where etcd asks for it (`--client-cert-auth`).
    pub identity: Option<EtcdIdentity>,
    /// The name in etcd's certificate, where it is not the host of the endpoints.
    pub server_name: Option<String>,
}

/// A client certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdIdentity {
    /// The certificate, followed by those between it and the authority.
    pub cert_file: PathBuf,
    /// Its private key.
    pub key_file: PathBuf,
}

impl EtcdSettings {
    /// Refuses what cannot work; looks at no file.
    ///
    /// # Errors
    /// The setting, and what to write instead.
    pub fn check(&self) -> Result<(), InvalidSetting> {
        if self.endpoints.is_empty() {
            return refuse("store.endpoints", "name at least one member, as http://host:port".to_owned());
        }
        let (scheme, remedy) = match self.tls {
            None => ("http://", "write it as http://host:port, or, for https, add [store.tls] with ca_file"),
            Some(_) => ("https://", "with [store.tls] write it as https://host:port"),
        };
        if let Some(other) = self.endpoints.iter().find(|endpoint| !endpoint.starts_with(scheme)) {
            return refuse("store.endpoints", format!("'{other}': {remedy}"));
        }
        if !self.prefix.ends_with('/') {
            return refuse(
                "store.prefix",
                "end it with '/', so that no other prefix begins with it".to_owned(),
            );
        }
        if self.prefix.len() > PREFIX_BYTES_MAX {
            return refuse(
                "store.prefix",
                format!("{} bytes: at most {PREFIX_BYTES_MAX}", self.prefix.len()),
            );
        }
        if self.user.as_ref().is_some_and(|user| user.name.is_empty()) {
            return refuse("store.user.name", "name a user of etcd".to_owned());
        }
        Ok(())
    }

    /// How to connect. Reads the files: it blocks.
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
            .or_else(|_| refuse(field, format!("{} is no text", self.password_file.display())))?;
        match text.trim_end_matches(['\n', '\r']) {
            "" => refuse(
                field,
                format!("{} is empty: write the password into it", self.password_file.display()),
            ),
            password => Ok(password.to_owned()),
        }
    }
}

pub(super) fn read(field: &'static str, path: &Path) -> Result<Vec<u8>, InvalidSetting> {
    let bytes = std::fs::read(path).or_else(|error| {
        refuse(
            field,
            format!("cannot read {} ({error}): name a file that this user may read", path.display()),
        )
    })?;
    match bytes.len() > FILE_BYTES_MAX {
        true => {
            refuse(field, format!("{} has {} bytes: at most {FILE_BYTES_MAX}", path.display(), bytes.len()))
        }
        false => Ok(bytes),
    }
}

pub(super) fn refuse<T>(field: &'static str, reason: String) -> Result<T, InvalidSetting> {
    Err(InvalidSetting { field, reason })
}
