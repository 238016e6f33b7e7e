//! A configuration file that another process replaces while the agent runs.
//!
//! The node's spec contains the digest of the desired file. A file with that digest is applied if it
//! differs only in settings that may change at run time. Otherwise the change is reported as waiting for a
//! restart. Reloadable settings: `cache.pool_free_permille`.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::{Config, PodEnvironment};
use crate::error::AgentError;

/// The active configuration and the file to reload it from.
#[derive(Debug)]
pub(crate) struct ReloadableConfig {
    path: PathBuf,
    pod: PodEnvironment,
    running: Config,
    digest: String,
    /// Digest of the rejected file, and why it was rejected.
    refused: Option<(String, String)>,
}

impl ReloadableConfig {
    /// Reads the file that the agent of a pod was started with.
    ///
    /// # Errors
    /// As [`Config::read`].
    pub(crate) fn read(path: PathBuf, pod: PodEnvironment) -> Result<ReloadableConfig, AgentError> {
        let (running, text) = Config::read_text(&path)?;
        Ok(ReloadableConfig { path, pod, running, digest: digest(text.as_bytes()), refused: None })
    }

    /// Returns the active configuration as written.
    pub(crate) fn running(&self) -> &Config {
        &self.running
    }

    /// Returns the directory of the file.
    pub(crate) fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// Returns the digest of the active configuration.
    pub(crate) fn digest(&self) -> &str {
        &self.digest
    }

    /// Returns why the desired configuration is not active; `None` if it is, or if none is desired.
    pub(crate) fn pending(&self, wanted: Option<&str>) -> Option<String> {
        let wanted = wanted.filter(|wanted| *wanted != self.digest)?;
        Some(match &self.refused {
            Some((refused, why)) if refused == wanted => why.clone(),
            _ => format!("the file at {} does not have the desired digest yet", self.path.display()),
        })
    }

    /// Applies the desired file, if it exists. Returns the new `pool_free_permille` if it changes.
    pub(crate) fn follow(&mut self, wanted: Option<&str>) -> Option<u16> {
        let wanted = wanted.filter(|wanted| *wanted != self.digest)?;
        let text = std::fs::read(&self.path).ok().filter(|text| digest(text) == wanted)?;
        let read = String::from_utf8(text).map_err(|error| error.to_string());
        let read = read.and_then(|text| Config::parse(&text).map_err(|error| error.to_string()));
        let read = read.and_then(|config| {
            let checked = config.clone().placed(&self.pod).and_then(|placed| placed.validate());
            checked.map(|_| config).map_err(|error| error.chain())
        });
        let config = match read {
            Ok(config) => config,
            Err(error) => return self.refuse(wanted, format!("cannot use the file: {error}")),
        };
        let mut same = config.clone();
        same.cache.pool_free_permille = self.running.cache.pool_free_permille;
        if same != self.running {
            return self.refuse(wanted, "the changes require a restart of the agent".to_owned());
        }
        let permille = config.cache.pool_free_permille;
        let news = (permille != self.running.cache.pool_free_permille).then_some(permille);
        (self.running, self.digest, self.refused) = (config, wanted.to_owned(), None);
        tracing::info!(digest = wanted, pool_free_permille = permille, "applied the changed configuration");
        news
    }

    fn refuse(&mut self, wanted: &str, why: String) -> Option<u16> {
        self.refused = Some((wanted.to_owned(), why));
        None
    }
}

/// Returns the SHA-256 digest in the hexadecimal form that resources use.
pub(crate) fn digest(text: &[u8]) -> String {
    let digest: String = Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNNING: &str = "[cache]\npool_free_permille = 30\n";

    /// Returns a configuration whose file now has this text.
    fn followed(now: &str) -> (tempfile::TempDir, ReloadableConfig, String) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("agent.toml");
        std::fs::write(&path, RUNNING).expect("written");
        let pod = PodEnvironment {
            node: "n".to_owned(),
            ip: std::net::Ipv4Addr::LOCALHOST.into(),
            pod: None,
            cluster: None,
            tenants_file: None,
        };
        let followed = ReloadableConfig::read(path.clone(), pod).expect("readable");
        std::fs::write(&path, now).expect("written");
        (folder, followed, digest(now.as_bytes()))
    }

    #[test]
    fn changed_free_share_is_applied() {
        let (_folder, mut followed, wanted) = followed("[cache]\npool_free_permille = 100\n");
        assert_eq!(followed.follow(Some(&wanted)), Some(100));
        assert_eq!((followed.digest(), followed.pending(Some(&wanted))), (wanted.as_str(), None));
        assert_eq!(followed.follow(Some(&wanted)), None, "it is already active");
    }

    #[test]
    fn equivalent_text_is_applied_immediately() {
        let (_folder, mut followed, wanted) = followed("# a comment\n[cache]\npool_free_permille = 30\n");
        assert_eq!(followed.follow(Some(&wanted)), None);
        assert_eq!(followed.pending(Some(&wanted)), None);
    }

    #[test]
    fn pending_reason_is_reported_for_restarts_errors_and_missing_files() {
        for (text, words) in [
            ("[limits]\nload_hold = \"20s\"\n", "restart"),
            ("[cache]\npool_free_permille = 9999\n", "9999"),
            ("[cash]\n", "cash"),
        ] {
            let (_folder, mut followed, wanted) = followed(text);
            assert_eq!(followed.follow(Some(&wanted)), None);
            let why = followed.pending(Some(&wanted)).expect("not active");
            assert!(why.contains(words), "{why}");
            assert_eq!(followed.digest(), digest(RUNNING.as_bytes()));
        }
        let (_folder, mut followed, _) = followed(RUNNING);
        let wanted = digest(b"another");
        assert_eq!(followed.follow(Some(&wanted)), None);
        assert!(
            followed
                .pending(Some(&wanted))
                .expect("pending")
                .contains("does not have the desired digest yet")
        );
        assert_eq!(followed.pending(None), None);
    }
}
