//! `reprise bench`: what Reprise does beside what the machine can do, measured in the same run.
//!
//! Each benchmark runs its reference (a bare loop of the same operations) and Reprise in turn and reports
//! medians and the median of the ratios ([`report`]). Everything is bounded: bytes, repetitions, time.

mod companion;
mod directory;
mod etcd;
mod failover;
mod fixture;
mod local;
mod loopback;
mod matching;
mod mooncake;
mod operator;
mod peer;
mod pool_file;
mod rebuild;
mod recovery;
mod report;
mod resident;
mod service;
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
    which: Which,
    /// Repetitions of each measurement; the median counts [default: 11; of vllm 5].
    #[arg(long, global = true)]
    repetitions: Option<usize>,
    /// Where pools are made [default: the cache folder's bench].
    #[arg(long, global = true, value_name = "DIR")]
    dir: Option<PathBuf>,
}

#[derive(Clone, Debug, Subcommand)]
enum Which {
    /// Cold loads from and durable saves to the device, beside a bare io_uring loop.
    Store,
    /// DRAM hits into an engine's scattered memory, beside memcpy.
    Local,
    /// Loads from a peer over TCP, beside a bare stream.
    Peer,
    /// One match call over 8,192 keys.
    Match,
    /// The replica directory: memory and look-ups, in this process and over gRPC; its rebuild.
    Directory {
        /// Replica entries in this process; as many over gRPC, ten million at the most.
        #[arg(long, default_value_t = 10_000_000)]
        entries: usize,
        /// Another system's master, measured in the same run.
        #[arg(long)]
        peer: Option<Peer>,
    },
    /// Opening a pool with a long journal; the agent's memory for each block.
    Recovery {
        /// Blocks in the journal.
        #[arg(long, default_value_t = 1_000_000)]
        entries: usize,
    },
    /// What etcd keeps for a thousand blocks and for many: it is to be the same.
    Etcd {
        /// Blocks of the larger measurement.
        #[arg(long, default_value_t = 1_000_000)]
        entries: usize,
    },
    /// One of three control-plane members is killed: how long its keys are missed. All are: how long until they know everything again.
    Failover {
        /// Replica entries that all members lose, ten million at the most.
        #[arg(long, default_value_t = service::ENTRIES_MAX)]
        entries: usize,
    },
    /// The operator with many nodes and pools on a real API server: reconciles, memory, writes. Needs `make etcd kubernetes`.
    Operator {
        /// Nodes of the Kubernetes cluster; agents on all of them are played.
        #[arg(long, default_value_t = 1000)]
        nodes: usize,
        /// Pools, each on as many nodes.
        #[arg(long, default_value_t = 20)]
        pools: usize,
    },
    /// vLLM's times to the first token with Reprise, without, and with other caches; installs what it needs (6.4 GB and more).
    Vllm(vllm::VllmArgs),
    /// All of them but operator and vllm; those with etcd need its binary (`make etcd`).
    All,
}

/// Systems that ours is measured beside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Peer {
    /// Mooncake's master; its wheel is installed into an environment of its own in the cache folder.
    Mooncake,
}

/// What every benchmark is told.
#[derive(Clone, Debug)]
struct Settings {
    directory: PathBuf,
    repetitions: usize,
    audience: Audience,
}

impl Settings {
    /// The repetitions of one measurement, with a progress bar for a person at a terminal.
    fn rounds(&self, what: &'static str) -> impl Iterator<Item = usize> + use<> {
        self.some_rounds(what, self.repetitions)
    }

    /// Another number of repetitions.
    fn some_rounds(&self, what: &'static str, count: usize) -> impl Iterator<Item = usize> + use<> {
        let bar = self.audience.progress(count as u64, what).with_finish(ProgressFinish::AndClear);
        // Seen before the first round has ended, too.
        bar.tick();
        bar.wrap_iter(0..count)
    }
}

/// `reprise bench`.
pub(crate) fn command(args: &BenchArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let repetitions = args.repetitions.unwrap_or(config.bench.repetitions);
    if repetitions == 0 {
        bail!("--repetitions must be at least 1");
    }
    let directory = config.bench.directory(args.dir.as_deref());
    let settings = Settings { directory, repetitions, audience };
    let all = [
        Which::Store,
        Which::Local,
        Which::Peer,
        Which::Match,
        Which::Directory { entries: 10_000_000, peer: None },
        Which::Recovery { entries: 1_000_000 },
        Which::Etcd { entries: 1_000_000 },
        Which::Failover { entries: service::ENTRIES_MAX },
    ];
    let chosen = match &args.which {
        Which::All => all.as_slice(),
        which => std::slice::from_ref(which),
    };
    for which in chosen {
        let figures = match which {
            Which::Store => store::run(&settings)?,
            Which::Local => local::run(&settings)?,
            Which::Peer => peer::run(&settings)?,
            Which::Match => matching::run(&settings)?,
            Which::Directory { entries, peer } => {
                let mut figures = directory::run(*entries, &settings)?;
                figures.extend(service::run((*entries).min(service::ENTRIES_MAX), *peer, &settings)?);
                figures
            }
            Which::Recovery { entries } => recovery::run(*entries, &settings)?,
            Which::Etcd { entries } => etcd::run(*entries, &settings)?,
            Which::Failover { entries } => {
                let mut figures = failover::run(&settings)?;
                figures.extend(rebuild::run((*entries).min(service::ENTRIES_MAX), &settings)?);
                figures
            }
            Which::Operator { nodes, pools } => {
                operator::run(operator::Scale { nodes: *nodes, pools: *pools }, &settings)?
            }
            Which::Vllm(arguments) => vllm::run(arguments, args.repetitions, &settings)?,
            Which::All => continue,
        };
        report::print(audience, &figures);
    }
    Ok(())
}

/// The layout of Llama-3-8B in blocks of 16 tokens: 64 objects of 32 KiB, 2 MiB a block.
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

/// A layout of one page a block, for benchmarks of metadata.
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
    fn a_measurement_is_repeated_as_often_as_asked_and_its_bar_is_hidden_from_programs() {
        let audience = Audience::Program;
        assert!(audience.progress(1, "x").is_hidden());
        let settings = Settings { directory: PathBuf::new(), repetitions: 3, audience };
        assert_eq!(settings.rounds("x").collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(settings.some_rounds("x", 1).count(), 1);
    }
}
