//! A configuration file that somebody else writes while the agent runs by it.
//!
//! The node's spec names the digest of the file that the agent should run by. A file with that digest that differs from the running
//! one only in what can be changed while the agent runs is taken over; any other waits for a restart, and why is said.
//! What can be changed: `cache.pool_free_permille`.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::{Config, PodPlace};
use crate::error::AgentError;

/// See the module.
#[derive(Debug)]
pub(crate) struct FollowedConfig {
    path: PathBuf,
    pod: PodPlace,
    running: Config,
    digest: String,
    /// What is to be said of the wanted file, and which that is.
    refused: Option<(String, String)>,
}

impl FollowedConfig {
    /// The file that the agent of a pod was started with.
    ///
    /// # Errors
    /// As [`Config::read`].
    pub(crate) fn read(path: PathBuf, pod: PodPlace) -> Result<FollowedConfig, AgentError> {
        let (running, text) = Config::read_text(&path)?;
        Ok(FollowedConfig { path, pod, running, digest: digest(text.as_bytes()), refused: None })
    }

    /// The configuration that is in effect, as it was written.
    pub(crate) fn running(&self) -> &Config {
        &self.running
    }

    /// The folder of the file.
    pub(crate) fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// Digest of the configuration that is in effect.
    pub(crate) fn digest(&self) -> &str {
        &self.digest
    }

    /// Why the wanted configuration is not in effect; `None`: it is, or none is wanted.
    pub(crate) fn pending(&self, wanted: Option<&str>) -> Option<String> {
        let wanted = wanted.filter(|wanted| *wanted != self.digest)?;
        Some(match &self.refused {
            Some((refused, why)) if refused == wanted => why.clone(),
            _ => format!("the file at {} is not the wanted one yet", self.path.display()),
        })
    }

    /// Takes over the wanted file, if it is there; the share of the pool to be kept free, if that changes.
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
            Err(error) => return self.refuse(wanted, format!("the file cannot be used: {error}")),
        };
        let mut same = config.clone();
        same.cache.pool_free_permille = self.running.cache.pool_free_permille;
        if same != self.running {
            return self.refuse(
                wanted,
                "what differs from the running configuration needs a restart of the agent".to_owned(),
            );
        }
        let permille = config.cache.pool_free_permille;
        let news = (permille != self.running.cache.pool_free_permille).then_some(permille);
        (self.running, self.digest, self.refused) = (config, wanted.to_owned(), None);
        tracing::info!(digest = wanted, pool_free_permille = permille, "the configuration is taken over");
        news
    }

    fn refuse(&mut self, wanted: &str, why: String) -> Option<u16> {
        self.refused = Some((wanted.to_owned(), why));
        None
    }
}

/// SHA-256 in hexadecimal, as resources write it.
pub(crate) fn digest(text: &[u8]) -> String {
    let digest: String = Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect();
    format!("sha256:{digest}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUNNING: &str = "[cache]\npool_free_permille = 30\n";

    /// A followed file with this text in it by now.
    fn followed(now: &str) -> (tempfile::TempDir, FollowedConfig, String) {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("agent.toml");
        std::fs::write(&path, RUNNING).expect("written");
        let pod = PodPlace {
            node: "n".to_owned(),
            ip: std::net::Ipv4Addr::LOCALHOST.into(),
            pod: None,
            cluster: None,
            tenants_file: None,
        };
        let followed = FollowedConfig::read(path.clone(), pod).expect("readable");
        std::fs::write(&path, now).expect("written");
        (folder, followed, digest(now.as_bytes()))
    }

    #[test]
    fn a_share_to_keep_free_is_taken_over_with_its_file() {
        let (_folder, mut followed, wanted) = followed("[cache]\npool_free_permille = 100\n");
        assert_eq!(followed.follow(Some(&wanted)), Some(100));
        assert_eq!((followed.digest(), followed.pending(Some(&wanted))), (wanted.as_str(), None));
        assert_eq!(followed.follow(Some(&wanted)), None, "it is in effect");
    }

    #[test]
    fn other_words_for_the_same_are_in_effect_at_once() {
        let (_folder, mut followed, wanted) = followed("# a comment\n[cache]\npool_free_permille = 30\n");
        assert_eq!(followed.follow(Some(&wanted)), None);
        assert_eq!(followed.pending(Some(&wanted)), None);
    }

    #[test]
    fn what_needs_a_restart_or_is_wrong_or_has_not_come_is_said() {
        for (text, words) in [
            ("[limits]\nload_hold = \"20s\"\n", "restart"),
            ("[cache]\npool_free_permille = 9999\n", "9999"),
            ("[cash]\n", "cash"),
        ] {
            let (_folder, mut followed, wanted) = followed(text);
            assert_eq!(followed.follow(Some(&wanted)), None);
            let why = followed.pending(Some(&wanted)).expect("not in effect");
            assert!(why.contains(words), "{why}");
            assert_eq!(followed.digest(), digest(RUNNING.as_bytes()));
        }
        let (_folder, mut followed, _) = followed(RUNNING);
        let wanted = digest(b"another");
        assert_eq!(followed.follow(Some(&wanted)), None);
        assert!(followed.pending(Some(&wanted)).expect("not there").contains("not the wanted one yet"));
        assert_eq!(followed.pending(None), None);
    }
}
