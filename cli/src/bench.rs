//! `reprise bench`: measures Reprise against the limits of the machine in the same run.
//!
//! Each benchmark alternates between its reference (a bare loop of the same operations) and Reprise. It
//! reports medians and the median of the ratios ([`report`]). Bytes, repetitions and time are bounded.
//! Comparisons with other systems are in `reprise-bench`, which is not shipped.

mod device;
mod directory;
mod engine;
mod flood;
#[cfg(feature = "gpu")]
mod gpu;
mod grpc_directory;
mod local;
mod loopback;
mod match_call;
mod nvme;
mod peer;
mod policy;
mod prefetch;
mod recompute;
mod recovery;
#[cfg(feature = "gpu")]
mod ring;
mod secure;
mod slack;
mod store;

use std::path::PathBuf;

use anyhow::{bail, ensure};
use clap::Subcommand;
use reprise_testkit::bench::directory_service::ENTRIES_MAX;
use reprise_testkit::bench::preflight::{self, CLUSTER_PROGRAMS, Requirements};
use reprise_testkit::bench::report::{self, Figure};
use reprise_testkit::bench::{Settings, reference_pool::REFERENCE_BYTES};
use reprise_testkit::output::Audience;

use crate::config::Config;

/// Arguments of `reprise bench`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    which: Benchmark,
    /// Repeat each measurement; report the median [default: 11].
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
    /// Compare writes in the slack of layers with writes at once.
    ///
    /// An emulated engine loads in layer order and saves in each step. Reports the reads' times and bandwidth.
    Slack,
    /// Compare loads from NVMe with and without prefetch.
    ///
    /// An emulated engine hints which requests run next. Also measures one pass of the planner.
    Prefetch,
    /// Count hits slower than computing their blocks by more than the bound.
    ///
    /// Emulated engines on one node load blocks of two nodes from DRAM and NVMe, or compute them, under load.
    Recompute {
        /// Serve this many hits.
        #[arg(long, default_value_t = 10_000)]
        hits: usize,
    },
    /// Measure hits of a real vLLM engine: behind a queue, at every tier.
    ///
    /// Compares times to first token from NVMe and DRAM, and counts hits slower than computing by more than the bound.
    /// `python/bench/engine.sh bench engine` installs missing packages and runs this command. Not part of `all`.
    Engine(engine::EngineBenchArgs),
    /// Compare DRAM hits, copied to scattered engine memory, with memcpy.
    Local,
    /// Compare loads from a peer over TCP with a plain TCP stream.
    Peer,
    /// Measure the cost of encryption: TLS, and blocks on devices.
    ///
    /// Paired with the same operations without it: loads over loopback in this process, look-ups at members, and loads
    /// from and saves to the device of an agent.
    Secure,
    /// Measure hits and load times of a tenant while another one floods.
    ///
    /// Two agents, next to the same flood on two other agents. The measured tenant has 16 times the bandwidth weight of
    /// the flooding one, which reads and writes NVMe. Not part of `all`.
    Flood,
    /// Measure one match call over 8,192 keys.
    Match,
    /// Measure memory, look-ups and rebuild of the replica directory.
    ///
    /// Look-ups run in this process and over gRPC.
    Directory {
        /// Use this many replica entries; over gRPC at most ten million.
        #[arg(long, default_value_t = 10_000_000)]
        entries: usize,
    },
    /// Measure evictions of every policy, and memory per block.
    Policy {
        /// Keep this many blocks in an order.
        #[arg(long, default_value_t = 10_000_000)]
        entries: usize,
    },
    /// Measure opening a pool with a long journal, and memory per block.
    Recovery {
        /// Write this many blocks into the journal.
        #[arg(long, default_value_t = 1_000_000)]
        entries: usize,
    },
    /// Measure the user-space NVMe driver: random and sequential reads.
    ///
    /// Without --pci, reports the device `none` and measures a controller that is emulated on a file, next to the
    /// kernel's io_uring on the same file.
    Nvme(nvme::NvmeArgs),
    /// Measure copies, checksums and staged loads of the first GPU.
    ///
    /// Without a GPU, reports the device `none` and measures the host build of the copies.
    #[cfg(feature = "gpu")]
    Gpu,
    /// Measure contexts per second of a ring with an emulated controller.
    ///
    /// The host build runs on one core. Without a GPU, reports the device `none` and the host build only.
    #[cfg(feature = "gpu")]
    Ring,
    /// Run all benchmarks that can run on this machine.
    ///
    /// The command first lists which ones will run, what the others lack, and how to provide it.
    All,
}

pub(crate) fn command(args: &BenchArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    let repetitions = args.repetitions.unwrap_or(config.bench.repetitions);
    if repetitions == 0 {
        bail!("invalid --repetitions 0: expected at least 1");
    }
    let directory = config.bench.directory(args.dir.as_deref());
    let settings = Settings { directory, repetitions, audience };
    if !matches!(args.which, Benchmark::All) {
        report::print(audience, &args.which.run(&settings)?);
        return Ok(());
    }
    let all = [
        Benchmark::Store,
        Benchmark::Slack,
        Benchmark::Prefetch,
        Benchmark::Recompute { hits: 10_000 },
        Benchmark::Local,
        Benchmark::Peer,
        Benchmark::Secure,
        Benchmark::Match,
        Benchmark::Directory { entries: 10_000_000 },
        Benchmark::Recovery { entries: 1_000_000 },
        // Ten million blocks take over a minute, for all policies.
        Benchmark::Policy { entries: 1_000_000 },
        Benchmark::Nvme(nvme::NvmeArgs::default()),
        #[cfg(feature = "gpu")]
        Benchmark::Gpu,
        #[cfg(feature = "gpu")]
        Benchmark::Ring,
    ];
    let requirements: Vec<_> = all.iter().map(|which| which.requirements(&settings)).collect();
    let checked = preflight::check(&requirements, &settings.directory);
    preflight::report(audience, &checked)?;
    let mut failed = Vec::new();
    for ((which, needs), _) in
        all.iter().zip(&requirements).zip(&checked).filter(|(_, readiness)| readiness.runs)
    {
        match which.run(&settings) {
            Ok(figures) => report::print(audience, &figures),
            // The others are measured nevertheless.
            Err(error) => failed.push(format!("{}: {error:#}", needs.name)),
        }
    }
    ensure!(failed.is_empty(), "benchmarks failed: {}", failed.join("; "));
    Ok(())
}

impl Benchmark {
    fn run(&self, settings: &Settings) -> anyhow::Result<Vec<Figure>> {
        match self {
            Benchmark::Store => store::run(settings),
            Benchmark::Slack => slack::run(settings),
            Benchmark::Prefetch => prefetch::run(settings),
            Benchmark::Recompute { hits } => recompute::run(*hits, settings),
            Benchmark::Engine(args) => engine::run(args, settings),
            Benchmark::Local => local::run(settings),
            Benchmark::Peer => peer::run(settings),
            Benchmark::Secure => secure::run(settings),
            Benchmark::Flood => flood::run(settings),
            Benchmark::Match => match_call::run(settings),
            Benchmark::Directory { entries } => {
                let mut figures = directory::run(*entries, settings)?;
                figures.extend(grpc_directory::run((*entries).min(ENTRIES_MAX), settings)?);
                Ok(figures)
            }
            Benchmark::Policy { entries } => policy::run(*entries, settings),
            Benchmark::Recovery { entries } => recovery::run(*entries, settings),
            Benchmark::Nvme(args) => nvme::run(args, settings),
            #[cfg(feature = "gpu")]
            Benchmark::Gpu => gpu::run(settings),
            #[cfg(feature = "gpu")]
            Benchmark::Ring => ring::run(settings),
            Benchmark::All => bail!("not one benchmark"),
        }
    }

    /// Returns the requirements: arenas and pools, plus memory of the benchmark itself.
    fn requirements(&self, settings: &Settings) -> Requirements {
        let mib = |count: u64| count << 20;
        let cluster = Requirements { programs: CLUSTER_PROGRAMS, ..Requirements::default() };
        match self {
            Benchmark::Store => Requirements {
                name: "store",
                disk_bytes: store::disk_bytes(settings),
                memory_bytes: mib(store::ARENA_MIB) + 2 * REFERENCE_BYTES,
                bare_loop: true,
                optional: &["fio"],
                ..cluster
            },
            Benchmark::Slack => Requirements {
                name: "slack",
                disk_bytes: mib(slack::POOL_MIB),
                memory_bytes: mib(slack::ARENA_MIB),
                ..cluster
            },
            Benchmark::Prefetch => Requirements {
                name: "prefetch",
                disk_bytes: mib(prefetch::POOL_MIB),
                memory_bytes: mib(prefetch::ARENA_MIB),
                ..cluster
            },
            Benchmark::Recompute { .. } => Requirements {
                name: "recompute",
                disk_bytes: 2 * mib(recompute::POOL_MIB),
                memory_bytes: 2 * mib(recompute::ARENA_MIB),
                ..cluster
            },
            // The engine's memory and the source of the bare copy have 256 MiB each.
            Benchmark::Local => Requirements {
                name: "local",
                disk_bytes: mib(local::POOL_MIB),
                memory_bytes: mib(local::ARENA_MIB + 512),
                ..cluster
            },
            Benchmark::Peer => Requirements {
                name: "peer",
                disk_bytes: 2 * mib(peer::POOL_MIB),
                memory_bytes: 2 * mib(peer::ARENA_MIB),
                optional: &["iperf3"],
                ..cluster
            },
            Benchmark::Secure => Requirements {
                name: "secure",
                disk_bytes: mib(secure::pool_mib(settings)),
                memory_bytes: secure::MEMORY_BYTES.max(mib(secure::ARENA_MIB)),
                ..cluster
            },
            Benchmark::Flood => Requirements {
                name: "flood",
                disk_bytes: flood::AGENTS * mib(flood::POOL_MIB),
                memory_bytes: flood::AGENTS * mib(flood::ARENA_MIB),
                ..cluster
            },
            Benchmark::Match => Requirements {
                name: "match",
                disk_bytes: mib(match_call::POOL_MIB),
                memory_bytes: mib(match_call::ARENA_MIB),
                ..cluster
            },
            // 64 bytes for each entry, twice while the table grows; the keys of its look-ups or of the announcements.
            Benchmark::Directory { entries } => {
                Requirements { name: "directory", memory_bytes: *entries as u64 * 144, ..cluster }
            }
            Benchmark::Policy { entries } => Requirements {
                name: "policy",
                memory_bytes: *entries as u64 * policy::BYTES_PER_BLOCK,
                ..Requirements::default()
            },
            Benchmark::Recovery { .. } => Requirements {
                name: "recovery",
                disk_bytes: mib(recovery::DRAM_POOL_MIB),
                memory_bytes: mib(recovery::DRAM_ARENA_MIB + 512),
                ..cluster
            },
            // The file of the emulated controller, and the buffers.
            Benchmark::Nvme(_) => Requirements {
                name: "nvme",
                disk_bytes: nvme::FILE_BYTES,
                memory_bytes: nvme::BUFFER_BYTES,
                bare_loop: true,
                ..Requirements::default()
            },
            // The host build; a GPU's measurements use the free memory.
            #[cfg(feature = "gpu")]
            Benchmark::Gpu => Requirements { name: "gpu", memory_bytes: mib(64), ..Requirements::default() },
            // The namespace, data and the ring.
            #[cfg(feature = "gpu")]
            Benchmark::Ring => {
                Requirements { name: "ring", memory_bytes: mib(128), ..Requirements::default() }
            }
            Benchmark::Engine(_) | Benchmark::All => cluster,
        }
    }
}
