//! The command line's configuration: a TOML file, parsed once into types with units; unknown fields are errors. What a
//! command is told by a flag goes before what the file says.

use std::path::{Path, PathBuf};

use anyhow::Context;
use reprise_policy::ByteSize;
use serde::Deserialize;

use crate::cluster::cache_directory;
use crate::model::SCALE_DEFAULT;

/// What `--print-default-config` prints. A test holds it equal to [`Config::default`].
pub(crate) const DEFAULT_CONFIG: &str = include_str!("default.toml");

/// The whole file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Config {
    /// The cluster that demo starts, and that replay and status ask.
    pub(crate) cluster: ClusterConfig,
    /// Sizes of the demo.
    pub(crate) demo: DemoConfig,
    /// Benchmarks.
    pub(crate) bench: BenchConfig,
}

/// `[cluster]`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct ClusterConfig {
    /// Its directory; none means the cache folder's `demo`.
    pub(crate) directory: Option<PathBuf>,
}

/// `[demo]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct DemoConfig {
    /// Requests replayed before the kill.
    pub(crate) requests: usize,
    /// Bytes of Llama-3-8B's KV cache are divided by this.
    pub(crate) scale: u32,
    /// DRAM of each agent.
    pub(crate) arena: ByteSize,
    /// NVMe of each agent.
    pub(crate) pool: ByteSize,
}

/// `[bench]`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct BenchConfig {
    /// Where pools are made; none means the cache folder's `bench`.
    pub(crate) directory: Option<PathBuf>,
    /// Repetitions of each measurement.
    pub(crate) repetitions: usize,
}

impl Config {
    /// The file, or the defaults without one.
    ///
    /// # Errors
    /// It cannot be read, or says something that is not known; in words.
    pub(crate) fn read(path: Option<&Path>) -> anyhow::Result<Config> {
        let Some(path) = path else { return Ok(Config::default()) };
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("cannot read the configuration {}", path.display()))?;
        toml::from_str(&text).with_context(|| format!("the configuration {} is wrong", path.display()))
    }
}

impl ClusterConfig {
    /// The directory, unless a flag names another.
    pub(crate) fn directory(&self, flag: Option<&Path>) -> PathBuf {
        let named = flag.map(Path::to_owned).or_else(|| self.directory.clone());
        named.unwrap_or_else(|| cache_directory().join("demo"))
    }
}

impl BenchConfig {
    /// The directory, unless a flag names another.
    pub(crate) fn directory(&self, flag: Option<&Path>) -> PathBuf {
        let named = flag.map(Path::to_owned).or_else(|| self.directory.clone());
        named.unwrap_or_else(|| cache_directory().join("bench"))
    }
}

impl Default for DemoConfig {
    fn default() -> DemoConfig {
        // DRAM is a tenth of what the requests keep, so that NVMe is read.
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
        // Medians of five still moved by several per cent on a shared machine.
        BenchConfig { directory: None, repetitions: 11 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_printed_default_is_the_default() {
        assert_eq!(toml::from_str::<Config>(DEFAULT_CONFIG).expect("valid"), Config::default());
        assert_eq!(Config::read(None).expect("no file"), Config::default());
    }

    #[test]
    fn unknown_fields_and_sizes_without_a_unit_are_refused() {
        for (text, words) in
            [("[demo]\nrequest = 5", "request"), ("[demo]\narena = 5", "arena"), ("[x]", "x")]
        {
            let refused = toml::from_str::<Config>(text).expect_err(text).to_string();
            assert!(refused.contains(words), "{text}: {refused}");
        }
    }

    #[test]
    fn a_flag_goes_before_the_file() {
        let config: Config = toml::from_str("[cluster]\ndirectory = '/file'").expect("valid");
        assert_eq!(config.cluster.directory(None), Path::new("/file"));
        assert_eq!(config.cluster.directory(Some(Path::new("/flag"))), Path::new("/flag"));
    }
}
