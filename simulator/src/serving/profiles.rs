//! Profiles of hardware and models: data files with a source for each figure.
//!
//! A node consists of parts, each in one file of `simulator/profiles/`: an accelerator, a link from DRAM to it, a
//! memory (tier T1), an NVMe device (T2), a network and a cold store. An accelerator names its usual parts, and an
//! expression replaces some of them: `h100+cxl+ps1010` is an H100 with CXL memory as T1 and another SSD.
//!
//! Users add their files, which expressions name by their paths ([`ProfileFiles`]).
//!
//! All files are checked: a figure that is missing, unknown or impossible is an error that names file, line, field and
//! remedy. A figure has the unit that its name ends with; GB are 10⁹ bytes.

mod files;
mod model;
mod node;

use std::collections::BTreeMap;

use serde::Deserialize;
use toml::Spanned;

use super::events::nanos;
pub use files::ProfileFiles;
pub use model::Model;
pub use node::NodeProfile;

/// Bytes of a gigabyte, in the sense of data sheets.
pub const GB: f64 = 1e9;

macro_rules! files {
    ($folder:literal: $($name:literal),+) => {
        &[$(($name, concat!("simulator/profiles/", $folder, "/", $name, ".toml"),
            include_str!(concat!("../../profiles/", $folder, "/", $name, ".toml")))),+]
    };
}

type File = (&'static str, &'static str, &'static str);

/// Built-in files of each kind: name, path, text.
const ACCELERATORS: &[File] = files!("accelerators": "h100", "h200", "a100", "cpu");
const LINKS: &[File] = files!("links": "pcie5", "pcie4", "local");
const MEMORIES: &[File] = files!("memories": "ddr5", "cxl");
const DEVICES: &[File] = files!("devices": "gen4", "ps1010", "ps1010x2");
const NETWORKS: &[File] = files!("networks": "rdma400", "rdma200", "tcp");
const COLDS: &[File] = files!("colds": "object");
const MODELS: &[File] = files!("models": "llama-3-8b", "llama-3-70b", "llama-34b", "llama-2-13b", "opt-13b",
    "qwen3-32b", "glm-4-9b-1m", "deepseek-v2-lite");

/// Figures of a kind of part, each with the range of possible values.
type Fields = &'static [(&'static str, f64, f64)];

/// Kinds of parts. A value above the upper end exceeds every product of 2026 by a factor of several.
const KINDS: [(&str, &[File], Fields); 6] = [
    (
        "accelerator",
        ACCELERATORS,
        &[
            ("memory_gb", 1.0, 2_000.0),
            ("memory_gb_per_s", 1.0, 40_000.0),
            ("tflops", 0.01, 20_000.0),
            ("compute_efficiency", 0.01, 1.0),
            ("attention_efficiency", 0.001, 1.0),
            ("overlap", 0.0, 1.0),
            ("step_overhead_us", 0.0, 1_000_000.0),
            ("sequence_overhead_us", 0.0, 100_000.0),
            ("usd_per_hour", 0.0, 1_000.0),
        ],
    ),
    ("link", LINKS, &[("gb_per_s", 0.01, 1_000.0), ("latency_us", 0.0, 1_000_000.0)]),
    (
        "memory",
        MEMORIES,
        &[
            ("capacity_gb", 1.0, 100_000.0),
            ("gb_per_s", 0.1, 5_000.0),
            ("latency_us", 0.0, 1_000.0),
            ("usd_per_gb_hour", 0.0, 1.0),
        ],
    ),
    (
        "device",
        DEVICES,
        &[
            ("capacity_tb", 0.01, 10_000.0),
            ("read_gb_per_s", 0.01, 1_000.0),
            ("write_gb_per_s", 0.01, 1_000.0),
            ("latency_us", 1.0, 1_000_000.0),
            ("drive_writes_per_day", 0.01, 1_000.0),
            ("usd_per_gb_hour", 0.0, 1.0),
        ],
    ),
    ("network", NETWORKS, &[("gb_per_s", 0.01, 1_000.0), ("latency_us", 0.1, 1_000_000.0)]),
    (
        "cold store",
        COLDS,
        &[
            ("gb_per_s", 0.01, 1_000.0),
            ("latency_us", 1.0, 60_000_000.0),
            ("usd_per_gb_hour", 0.0, 1.0),
            ("usd_per_million_writes", 0.0, 1_000.0),
            ("usd_per_million_reads", 0.0, 1_000.0),
        ],
    ),
];

/// Invalid profile; the message names file, line, field and remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProfileError(String);

impl std::fmt::Display for ProfileError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ProfileError {}

/// File of a profile, for errors.
#[derive(Clone, Copy, Debug)]
struct Place<'a> {
    path: &'a str,
    text: &'a str,
}

impl Place<'_> {
    /// Error at a byte of the file.
    fn error(self, at: usize, problem: &str) -> ProfileError {
        let before = self.text.get(..at).unwrap_or(self.text);
        let line = before.matches('\n').count() + 1;
        ProfileError(format!("{}: line {line}: {problem}", self.path))
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Figure {
    value: Spanned<f64>,
    source: String,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Part {
    name: Spanned<String>,
    title: String,
    #[serde(default)]
    parts: Vec<String>,
    figures: BTreeMap<String, Figure>,
}

/// Bandwidth and latency of a path.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rate {
    /// Bandwidth in bytes per second.
    pub bytes_per_second: u64,
    /// Nanoseconds until the first byte.
    pub latency_nanos: u64,
}

impl Rate {
    /// Nanoseconds of one transfer alone: T = ℓ + n·S/β.
    pub fn transfer_nanos(&self, bytes: u64) -> u64 {
        let moved = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(self.bytes_per_second.max(1)));
        self.latency_nanos + u64::try_from(moved).unwrap_or(u64::MAX)
    }
}

/// Hardware of one node.
#[derive(Clone, Debug, PartialEq)]
pub struct Hardware {
    /// Expression that selected the node.
    pub name: String,
    /// Titles of its parts.
    pub title: String,
    /// Bytes of accelerator memory.
    pub hbm_bytes: u64,
    /// Bandwidth of accelerator memory.
    pub hbm: Rate,
    /// Peak operations per second, dense, 16 bit.
    pub flops: f64,
    /// Share of the peak that prefill reaches.
    pub compute_efficiency: f64,
    /// Share of the peak that attention between tokens reaches.
    pub attention_efficiency: f64,
    /// Share of a step's computation and memory reads, of the shorter one, that runs during the longer one.
    pub overlap: f64,
    /// Constant time of a step in nanoseconds: scheduling, launches, output.
    pub step_overhead_nanos: u64,
    /// Constant time of each sequence of a step in nanoseconds.
    pub sequence_overhead_nanos: u64,
    /// Link between DRAM and accelerator, in each direction.
    pub link: Rate,
    /// Capacity of T1 in bytes.
    pub dram_bytes: u64,
    /// Path from and to T1.
    pub dram: Rate,
    /// Name of the profile of T2.
    pub nvme_name: String,
    /// Capacity of T2 in bytes.
    pub nvme_bytes: u64,
    /// Path of reads of T2.
    pub nvme_read: Rate,
    /// Path of writes of T2.
    pub nvme_write: Rate,
    /// Drive writes per day of T2.
    pub drive_writes_per_day: f64,
    /// Network to other nodes.
    pub network: Rate,
    /// Store behind all nodes.
    pub cold: Rate,
    /// Price of one accelerator.
    pub usd_per_hour: f64,
    /// Price of a gigabyte of T1.
    pub dram_usd_per_gb_hour: f64,
    /// Price of a gigabyte of T2.
    pub nvme_usd_per_gb_hour: f64,
    /// Price of a gigabyte of the cold store.
    pub cold_usd_per_gb_hour: f64,
    /// Price of a request that writes an object to the cold store.
    pub cold_usd_per_write: f64,
    /// Price of a request that reads from the cold store.
    pub cold_usd_per_read: f64,
}

impl Hardware {
    /// Names of all parts, by kind.
    pub fn names() -> Vec<(&'static str, Vec<&'static str>)> {
        KINDS.iter().map(|(kind, files, _)| (*kind, files.iter().map(|file| file.0).collect())).collect()
    }

    /// Returns the node of an expression such as `h100+cxl+ps1010`: an accelerator, then parts that replace its
    /// usual ones. All are built-in; [`ProfileFiles::hardware`] also takes files.
    pub fn named(expression: &str) -> Result<Hardware, ProfileError> {
        ProfileFiles::default().hardware(expression)
    }

    /// Node of one part of each kind, in the order of the kinds.
    fn of_kinds(expression: &str, path: &str, parts: Vec<Part>) -> Result<Hardware, ProfileError> {
        let parts: [Part; 6] = parts.try_into().map_err(|_| {
            ProfileError(format!(
                "{path}: 'parts' must name a link, a memory, a device, a network and a cold store"
            ))
        })?;
        Ok(Hardware::of_parts(expression, &parts))
    }

    fn of_parts(expression: &str, parts: &[Part; 6]) -> Hardware {
        let figure = |part: usize, name: &str| *parts[part].figures[name].value.get_ref();
        let rate = |part: usize, bandwidth: &str| Rate {
            bytes_per_second: (figure(part, bandwidth) * GB) as u64,
            latency_nanos: parts[part]
                .figures
                .get("latency_us")
                .map_or(0, |latency| nanos(latency.value.get_ref() * 1e-6)),
        };
        let titles: Vec<&str> = parts.iter().map(|part| part.title.as_str()).collect();
        Hardware {
            name: expression.to_owned(),
            title: titles.join("; "),
            hbm_bytes: (figure(0, "memory_gb") * GB) as u64,
            hbm: rate(0, "memory_gb_per_s"),
            flops: figure(0, "tflops") * 1e12,
            compute_efficiency: figure(0, "compute_efficiency"),
            attention_efficiency: figure(0, "attention_efficiency"),
            overlap: figure(0, "overlap"),
            step_overhead_nanos: nanos(figure(0, "step_overhead_us") * 1e-6),
            sequence_overhead_nanos: nanos(figure(0, "sequence_overhead_us") * 1e-6),
            link: rate(1, "gb_per_s"),
            dram_bytes: (figure(2, "capacity_gb") * GB) as u64,
            dram: rate(2, "gb_per_s"),
            nvme_name: parts[3].name.get_ref().clone(),
            nvme_bytes: (figure(3, "capacity_tb") * 1e12) as u64,
            nvme_read: rate(3, "read_gb_per_s"),
            nvme_write: rate(3, "write_gb_per_s"),
            drive_writes_per_day: figure(3, "drive_writes_per_day"),
            network: rate(4, "gb_per_s"),
            cold: rate(5, "gb_per_s"),
            usd_per_hour: figure(0, "usd_per_hour"),
            dram_usd_per_gb_hour: figure(2, "usd_per_gb_hour"),
            nvme_usd_per_gb_hour: figure(3, "usd_per_gb_hour"),
            cold_usd_per_gb_hour: figure(5, "usd_per_gb_hour"),
            cold_usd_per_write: figure(5, "usd_per_million_writes") * 1e-6,
            cold_usd_per_read: figure(5, "usd_per_million_reads") * 1e-6,
        }
    }

    /// Number of this node's drives that hold some bytes.
    pub fn drives_for(&self, nvme_bytes: u64) -> u64 {
        nvme_bytes.div_ceil(self.nvme_bytes.max(1))
    }

    /// This node with several of its drives, at least one: their capacity and bandwidth together.
    #[must_use]
    pub fn with_drives(mut self, drives: u64) -> Hardware {
        let drives = drives.max(1);
        self.nvme_bytes = self.nvme_bytes.saturating_mul(drives);
        for rate in [&mut self.nvme_read, &mut self.nvme_write] {
            rate.bytes_per_second = rate.bytes_per_second.saturating_mul(drives);
        }
        self
    }

    /// Price of an hour of one node with some accelerators, bytes of DRAM and bytes of NVMe. The price of an
    /// accelerator includes its share of processors and network; the cold store is not included.
    pub fn usd_per_node_hour(&self, accelerators: u32, dram_bytes: u64, nvme_bytes: u64) -> f64 {
        f64::from(accelerators) * self.usd_per_hour
            + dram_bytes as f64 / GB * self.dram_usd_per_gb_hour
            + nvme_bytes as f64 / GB * self.nvme_usd_per_gb_hour
    }
}

fn find(kind: usize, name: &str) -> Option<&'static File> {
    KINDS[kind].1.iter().find(|file| file.0 == name)
}

fn list(kind: usize) -> String {
    KINDS[kind].1.iter().map(|file| file.0).collect::<Vec<_>>().join(", ")
}

fn unknown(what: &str, name: &str, kind: usize) -> ProfileError {
    let known = if kind < KINDS.len() {
        list(kind)
    } else {
        (1..KINDS.len()).map(list).collect::<Vec<_>>().join(", ")
    };
    ProfileError(format!("unknown {what} '{name}': use one of {known}, or the path of a file, as NODE.toml"))
}

/// Built-in part of a kind, which a list of parts names.
fn built_in(kind: usize, path: &str, name: &str) -> Result<Part, ProfileError> {
    let file = find(kind, name).ok_or_else(|| {
        ProfileError(format!("{path}: unknown {} '{name}' in parts: use {}", KINDS[kind].0, list(kind)))
    })?;
    parse(kind, file.1, file.2)
}

/// Parses and checks a part of a kind.
fn parse(kind: usize, path: &str, text: &str) -> Result<Part, ProfileError> {
    let title = KINDS[kind].0;
    let part: Part = toml::from_str(text).map_err(|error| {
        ProfileError(format!("{path}: invalid profile of a {title}: {}", error.to_string().trim()))
    })?;
    check(kind, Place { path, text }, &part)?;
    Ok(part)
}

/// Checks the figures of a part of a kind.
fn check(kind: usize, place: Place<'_>, part: &Part) -> Result<(), ProfileError> {
    let (title, _, fields) = KINDS[kind];
    let name_at = part.name.span().start;
    for (name, figure) in &part.figures {
        if fields.iter().all(|field| field.0 != name.as_str()) {
            let known: Vec<&str> = fields.iter().map(|field| field.0).collect();
            let problem = format!("unknown figure '{name}': a {title} has {}", known.join(", "));
            return Err(place.error(figure.value.span().start, &problem));
        }
    }
    for (name, least, most) in fields {
        let Some(figure) = part.figures.get(*name) else {
            let problem = format!("missing figure '{name}': add [figures.{name}] with value and source");
            return Err(place.error(name_at, &problem));
        };
        let (value, at) = (*figure.value.get_ref(), figure.value.span().start);
        // Written so that NaN is outside.
        if !(*least..=*most).contains(&value) {
            let problem = format!("impossible {name} {value}: expected {least} to {most}, check the unit");
            return Err(place.error(at, &problem));
        }
        if figure.source.trim().is_empty() {
            let problem = format!("{name} has no source: name the document that states it");
            return Err(place.error(at, &problem));
        }
    }
    if part.name.get_ref().trim().is_empty() {
        return Err(place.error(name_at, "empty name: use the name of the file"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_built_in_profile_is_valid_and_named_after_its_file() {
        for (kind, (_, files, _)) in KINDS.iter().enumerate() {
            for (name, path, text) in *files {
                let part = parse(kind, path, text).expect("a built-in profile is valid");
                assert_eq!(part.name.get_ref(), name);
            }
        }
        for name in Model::names() {
            assert_eq!(Model::named(name).expect("a built-in model is valid").name, name);
        }
        for (name, _, _) in ACCELERATORS {
            assert!(Hardware::named(name).is_ok(), "{name}");
        }
    }

    #[test]
    fn parts_replace_the_usual_ones_of_an_accelerator() {
        let (usual, other) =
            (Hardware::named("h100").expect("valid"), Hardware::named("h100+cxl+ps1010").expect("valid"));
        assert_eq!((usual.link.bytes_per_second, usual.link.latency_nanos), (50_000_000_000, 5_000));
        assert_eq!(usual.nvme_read, Rate { bytes_per_second: 7_000_000_000, latency_nanos: 80_000 });
        assert_eq!(
            (other.dram.bytes_per_second, other.nvme_read.bytes_per_second),
            (31_500_000_000, 14_500_000_000)
        );
        let error = Hardware::named("h100+floppy").expect_err("no such part");
        assert!(error.to_string().contains("'floppy'") && error.to_string().contains("ps1010"), "{error}");
        assert!(Hardware::named("b1000").expect_err("no such accelerator").to_string().contains("h200"));
    }

    #[test]
    fn bytes_of_a_block_are_those_of_the_production_layout() {
        for (name, bytes) in [("llama-3-8b", 2 << 20), ("llama-2-13b", 13_107_200), ("llama-3-70b", 5 << 20)]
        {
            let model = Model::named(name).expect("valid");
            assert_eq!(model.layout(16).expect("valid").block_bytes(), bytes);
            assert_eq!(model.kv_bytes_per_token() * 16, bytes);
        }
        let latent = Model::named("deepseek-v2-lite").expect("valid");
        assert_eq!(latent.kv_bytes_per_token(), 27 * 576 * 2);
    }

    #[test]
    fn impossible_missing_and_unknown_figures_name_file_field_and_remedy() {
        let (_, path, text) = LINKS[0];
        for (from, to, expected) in [
            (
                "value = 50",
                "value = 50000",
                ["pcie5.toml: line 5: ", "impossible gb_per_s 50000", "check the unit"],
            ),
            ("value = 50", "value = -1", ["pcie5.toml", "impossible gb_per_s -1", "expected 0.01 to 1000"]),
            ("value = 50", "value = nan", ["pcie5.toml", "impossible gb_per_s NaN", "check the unit"]),
            (
                "figures.gb_per_s",
                "figures.gbps",
                ["pcie5.toml", "unknown figure 'gbps'", "gb_per_s, latency_us"],
            ),
            (
                "[figures.latency_us]\nvalue = 5",
                "[other]\nvalue = 5",
                ["pcie5.toml", "other", "unknown field"],
            ),
        ] {
            assert!(text.contains(from), "{from}");
            let error = parse(1, path, &text.replacen(from, to, 1)).expect_err("refused").to_string();
            assert!(expected.iter().all(|part| error.contains(part)), "{error}");
        }
    }
}
