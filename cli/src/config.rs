//! Configuration of the command line: a TOML file whose sizes carry units. Unknown fields are errors, and
//! flags override the file.

use std::path::{Path, PathBuf};

use anyhow::Context;
use reprise_identity::Security;
use reprise_policy::ByteSize;
use serde::Deserialize;

use reprise_testkit::bench::REPETITIONS;
use reprise_testkit::cluster::{ClusterFile, cache_directory};
use reprise_testkit::model::SCALE_DEFAULT;

/// Output of `--print-default-config`, equal to [`Config::default`] by a test.
pub(crate) const DEFAULT_CONFIG: &str = include_str!("default.toml");

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    pub(crate) cluster: ClusterConfig,
    pub(crate) demo: DemoConfig,
    pub(crate) bench: BenchConfig,
    pub(crate) tls: TlsConfig,
}

/// Section `[cluster]`: the cluster that `demo` starts and that the other commands read.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ClusterConfig {
    /// Directory of the cluster; `~/.cache/reprise/demo` by default.
    pub(crate) directory: Option<PathBuf>,
}

/// Section `[tls]`: the certificate that commands show to members and agents.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct TlsConfig {
    /// Folder with `ca.crt`, `tls.crt` and `tls.key`; `--tls` and `REPRISE_TLS` override it.
    pub(crate) folder: Option<PathBuf>,
}

/// Section `[demo]`: sizes of the demo.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct DemoConfig {
    /// Number of requests that are replayed before the kill.
    pub(crate) requests: usize,
    /// Divisor of the bytes of Llama-3-8B's KV cache, a power of two.
    pub(crate) scale: u32,
    /// Size of each agent's DRAM arena.
    pub(crate) arena: ByteSize,
    /// Size of each agent's NVMe pool.
    pub(crate) pool: ByteSize,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct BenchConfig {
    /// Directory of the benchmarks' files; `~/.cache/reprise/bench` by default.
    pub(crate) directory: Option<PathBuf>,
    /// Number of repetitions of each measurement.
    pub(crate) repetitions: usize,
}

impl Config {
    /// Reads the file; returns the defaults without one.
    ///
    /// # Errors
    /// The file cannot be read, is not valid TOML, or has an unknown field or an invalid value.
    pub(crate) fn read(path: Option<&Path>) -> anyhow::Result<Config> {
        let Some(path) = path else { return Ok(Config::default()) };
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the configuration {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("invalid configuration {}", path.display()))
    }
}

impl ClusterConfig {
    /// Returns the directory; `flag` overrides the file.
    pub(crate) fn directory(&self, flag: Option<&Path>) -> PathBuf {
        let named = flag.map(Path::to_owned).or_else(|| self.directory.clone());
        named.unwrap_or_else(|| cache_directory().join("demo"))
    }
}

impl TlsConfig {
    /// Reads the certificates of the command; returns `default` without a folder.
    ///
    /// # Errors
    /// The files are unusable.
    pub(crate) fn security_or(&self, default: Security) -> anyhow::Result<Security> {
        let Some(folder) = &self.folder else { return Ok(default) };
        Security::read(folder).with_context(|| format!("cannot use the certificates in {}", folder.display()))
    }

    /// Reads the certificates of the command; without a folder, those of the administrator of a local cluster.
    ///
    /// # Errors
    /// The files are unusable.
    pub(crate) fn security_for(&self, cluster: &ClusterFile) -> anyhow::Result<Security> {
        match self.folder {
            Some(_) => self.security_or(Security::Plain),
            None => cluster.security(),
        }
    }
}

impl BenchConfig {
    /// Returns the directory; `flag` overrides the file.
    pub(crate) fn directory(&self, flag: Option<&Path>) -> PathBuf {
        let named = flag.map(Path::to_owned).or_else(|| self.directory.clone());
        named.unwrap_or_else(|| cache_directory().join("bench"))
    }
}

impl Default for DemoConfig {
    fn default() -> DemoConfig {
        // DRAM holds a tenth of the requests' blocks, so that the replay also reads NVMe.
        DemoConfig {
            requests: 1500,
            scale: SCALE_DEFAULT,
            arena: ByteSize(192 << 20),
            pool: ByteSize(3 << 30),
        }
    }
}

impl Default for BenchConfig {
    fn default() -> BenchConfig {
        BenchConfig { directory: None, repetitions: REPETITIONS }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_default_configuration_equals_the_defaults() {
        assert_eq!(toml::from_str::<Config>(DEFAULT_CONFIG).expect("valid"), Config::default());
        assert_eq!(Config::read(None).expect("no file"), Config::default());
    }

    #[test]
    fn rejects_unknown_fields_and_sizes_without_a_unit() {
        for (text, words) in
            [("[demo]\nrequest = 5", "request"), ("[demo]\narena = 5", "arena"), ("[x]", "x")]
        {
            let refused = toml::from_str::<Config>(text).expect_err(text).to_string();
            assert!(refused.contains(words), "{text}: {refused}");
        }
    }

    #[test]
    fn flag_overrides_the_file() {
        let config: Config = toml::from_str("[cluster]\ndirectory = '/file'").expect("valid");
        assert_eq!(config.cluster.directory(None), Path::new("/file"));
        assert_eq!(config.cluster.directory(Some(Path::new("/flag"))), Path::new("/flag"));
    }
}
