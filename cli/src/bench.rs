//! `reprise bench`: what Reprise does beside what the machine can do, measured in the same run.
//!
//! Each benchmark runs its reference (a bare loop of the same operations) and Reprise in turn and reports
//! medians and the median of the ratios ([`report`]). Everything is bounded: bytes, repetitions, time.

mod directory;
mod fixture;
mod local;
mod matching;
mod peer;
mod pool_file;
mod recovery;
mod report;
mod resident;
mod store;

use std::path::PathBuf;

use anyhow::bail;
use clap::Subcommand;
use reprise_policy::{Dtype, Layout, LayoutSpec, Parts};

use crate::config::Config;
use crate::output::Audience;

/// Arguments of `reprise bench`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    which: Which,
    /// Repetitions of each measurement; the median counts [default: 11].
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
    /// The replica directory: memory and look-ups.
    Directory {
        /// Replica entries.
        #[arg(long, default_value_t = 10_000_000)]
        entries: usize,
    },
    /// Opening a pool with a long journal; the agent's memory for each block.
    Recovery {
        /// Blocks in the journal.
        #[arg(long, default_value_t = 1_000_000)]
        entries: usize,
    },
    /// All of them.
    All,
}

/// What every benchmark is told.
#[derive(Clone, Debug)]
struct Settings {
    directory: PathBuf,
    repetitions: usize,
}

/// `reprise bench`.
pub(crate) fn command(args: &BenchArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let repetitions = args.repetitions.unwrap_or(config.bench.repetitions);
    if repetitions == 0 {
        bail!("--repetitions must be at least 1");
    }
    let directory = config.bench.directory(args.dir.as_deref());
    let settings = Settings { directory, repetitions };
    let all = [
        Which::Store,
        Which::Local,
        Which::Peer,
        Which::Match,
        Which::Directory { entries: 10_000_000 },
        Which::Recovery { entries: 1_000_000 },
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
            Which::Directory { entries } => directory::run(*entries, &settings)?,
            Which::Recovery { entries } => recovery::run(*entries, &settings)?,
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
