//! `reprise bench`: measures Reprise against the limits of the machine in the same run.
//!
//! Each benchmark alternates between its reference (a bare loop of the same operations) and Reprise. It
//! reports medians and the median of the ratios ([`report`]). Bytes, repetitions and time are bounded.

mod directory;
mod etcd;
mod failover;
mod fixture;
mod grpc_directory;
mod helper_process;
mod local;
mod loopback;
mod match_call;
mod mooncake;
mod operator;
mod peer;
mod pool_file;
mod process_memory;
mod rebuild;
mod recovery;
mod report;
mod store;
mod vllm;

use std::path::PathBuf;

use anyhow::bail;
use clap::Subcommand;
use indicatif::ProgressFinish;
use reprise_policy::{Dtype, Layout, LayoutSpec, Parts};

use crate::config::Config;
use crate::output::Audience;

/// Arguments of `reprise bench`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    which: Benchmark,
    /// Repeat each measurement; report the median [default: 11; vllm: 5].
    #[arg(long, global = true)]
    repetitions: Option<usize>,
    /// Store files in this directory [default: ~/.cache/reprise/bench].
    ///
    /// `$REPRISE_CACHE` replaces `~/.cache/reprise`.
    #[arg(long, global = true, value_name = "DIR")]
    dir: Option<PathBuf>,
}

#[derive(Clone, Debug, Subcommand)]
enum Benchmark {
    /// Compare cold loads and durable saves with a bare io_uring loop.
    Store,
    /// Compare DRAM hits, copied to scattered engine memory, with memcpy.
    Local,
    /// Compare loads from a peer over TCP with a plain TCP stream.
    Peer,
    /// Measure one match call over 8,192 keys.
    Match,
    /// Measure memory, look-ups and rebuild of the replica directory.
    ///
    /// Look-ups run in this process and over gRPC.
    Directory {
        /// Use this many replica entries; over gRPC at most ten million.
        #[arg(long, default_value_t = 10_000_000)]
        entries: usize,
        /// Also measure this system's metadata server in the same run.
        #[arg(long)]
        peer: Option<Peer>,
    },
    /// Measure opening a pool with a long journal, and memory per block.
    Recovery {
        /// Write this many blocks into the journal.
        #[arg(long, default_value_t = 1_000_000)]
        entries: usize,
    },
    /// Measure etcd's database size for 1,000 and for ENTRIES blocks.
    ///
    /// The target is at most 2 MiB at both sizes.
    Etcd {
        /// Use this many blocks in the larger measurement.
        #[arg(long, default_value_t = 1_000_000)]
        entries: usize,
    },
    /// Measure misses after the loss of one control-plane member, or of all.
    ///
    /// Measures how long the keys of one killed member of three are not found, and, after all three are
    /// killed, how long the directory takes to be complete.
    Failover {
        /// Rebuild this many replica entries; at most ten million.
        #[arg(long, default_value_t = grpc_directory::ENTRIES_MAX)]
        entries: usize,
    },
    /// Measure the operator's reconciles, memory and writes at scale.
    ///
    /// Runs a real API server with simulated agents. Needs `make etcd kubernetes`.
    Operator {
        /// Create this many nodes, each with a simulated agent.
        #[arg(long, default_value_t = 1000)]
        nodes: usize,
        /// Create this many SSDPool objects, each with an equal share of nodes.
        #[arg(long, default_value_t = 20)]
        pools: usize,
    },
    /// Measure vLLM's time to first token with Reprise and other caches.
    ///
    /// Installs vLLM and the other caches into `~/.cache/reprise` (or `$REPRISE_CACHE`): 6.4 GB or more.
    Vllm(vllm::VllmArgs),
    /// Run all benchmarks except operator and vllm.
    ///
    /// `etcd` and `failover` need the etcd binary (`make etcd`).
    All,
}

/// Other systems that can be measured in the same run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Peer {
    /// Mooncake's master, installed into its own environment in the cache directory.
    Mooncake,
}

/// Settings of all benchmarks.
#[derive(Clone, Debug)]
struct Settings {
    directory: PathBuf,
    repetitions: usize,
    audience: Audience,
}

impl Settings {
    /// Iterates over the configured repetitions and shows a progress bar on a terminal.
    fn rounds(&self, label: &'static str) -> impl Iterator<Item = usize> + use<> {
        self.some_rounds(label, self.repetitions)
    }

    /// Like [`Settings::rounds`], with another number of repetitions.
    fn some_rounds(&self, label: &'static str, count: usize) -> impl Iterator<Item = usize> + use<> {
        let bar = self.audience.progress(count as u64, label).with_finish(ProgressFinish::AndClear);
        // Draw the bar before the first round ends.
        bar.tick();
        bar.wrap_iter(0..count)
    }
}

pub(crate) fn command(args: &BenchArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let repetitions = args.repetitions.unwrap_or(config.bench.repetitions);
    if repetitions == 0 {
        bail!("invalid --repetitions 0: expected at least 1");
    }
    let directory = config.bench.directory(args.dir.as_deref());
    let settings = Settings { directory, repetitions, audience };
    let all = [
        Benchmark::Store,
        Benchmark::Local,
        Benchmark::Peer,
        Benchmark::Match,
        Benchmark::Directory { entries: 10_000_000, peer: None },
        Benchmark::Recovery { entries: 1_000_000 },
        Benchmark::Etcd { entries: 1_000_000 },
        Benchmark::Failover { entries: grpc_directory::ENTRIES_MAX },
    ];
    let chosen = match &args.which {
        Benchmark::All => all.as_slice(),
        which => std::slice::from_ref(which),
    };
    for which in chosen {
        let figures = match which {
            Benchmark::Store => store::run(&settings)?,
            Benchmark::Local => local::run(&settings)?,
            Benchmark::Peer => peer::run(&settings)?,
            Benchmark::Match => match_call::run(&settings)?,
            Benchmark::Directory { entries, peer } => {
                let mut figures = directory::run(*entries, &settings)?;
                figures.extend(grpc_directory::run(
                    (*entries).min(grpc_directory::ENTRIES_MAX),
                    *peer,
                    &settings,
                )?);
                figures
            }
            Benchmark::Recovery { entries } => recovery::run(*entries, &settings)?,
            Benchmark::Etcd { entries } => etcd::run(*entries, &settings)?,
            Benchmark::Failover { entries } => {
                let mut figures = failover::run(&settings)?;
                figures.extend(rebuild::run((*entries).min(grpc_directory::ENTRIES_MAX), &settings)?);
                figures
            }
            Benchmark::Operator { nodes, pools } => {
                operator::run(operator::Scale { nodes: *nodes, pools: *pools }, &settings)?
            }
            Benchmark::Vllm(arguments) => vllm::run(arguments, args.repetitions, &settings)?,
            Benchmark::All => continue,
        };
        report::print(audience, &figures);
    }
    Ok(())
}

/// Returns the layout of Llama-3-8B in blocks of 16 tokens: 64 objects of 32 KiB, 2 MiB per block.
fn llama_3_8b() -> Layout {
    let spec = LayoutSpec {
        layers: 32,
        parts: Parts::KeyValue,
        kv_heads: 8,
        head_dim: 128,
        dtype: Dtype::Bf16,
        tokens_per_block: 16,
        tp_rank: 0,
        tp_size: 1,
    };
    spec.validate().expect("the layout of a real model is valid")
}

/// Returns a layout with one page per block, for benchmarks of metadata.
fn one_page() -> Layout {
    let spec = LayoutSpec {
        layers: 2,
        parts: Parts::KeyValue,
        kv_heads: 1,
        head_dim: 64,
        dtype: Dtype::Bf16,
        tokens_per_block: 8,
        tp_rank: 0,
        tp_size: 1,
    };
    spec.validate().expect("a small layout is valid")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_repeat_as_configured_without_a_bar_in_json_mode() {
        let audience = Audience::Program;
        assert!(audience.progress(1, "x").is_hidden());
        let settings = Settings { directory: PathBuf::new(), repetitions: 3, audience };
        assert_eq!(settings.rounds("x").collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(settings.some_rounds("x", 1).count(), 1);
    }
}
