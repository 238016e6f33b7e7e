//! `reprise sim scale`: simulates one large cluster in which all members lose their memory.
//!
//! It reports the simulated time until all directories are complete again.

use std::time::{Duration, Instant};

use reprise_simulator::{Cluster, scale};
use reprise_testkit::output::Audience;
use serde::Serialize;

#[derive(Clone, Debug, clap::Args)]
pub(super) struct ScaleArgs {
    /// Simulate this many agents.
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u16).range(1..))]
    nodes: u16,
    /// Simulate this many control-plane members.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u16).range(1..=64))]
    members: u16,
    /// Derive all delays from this seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
}

/// Output of `reprise sim scale --json`; `*_ms` are milliseconds of simulated time, `seconds` is real time.
#[derive(Debug, Serialize)]
struct ScaleReport {
    nodes: u16,
    members: u16,
    seed: u64,
    first_start_ms: u64,
    rebuild_ms: u64,
    registrations: u64,
    inventories: u64,
    local_matches: u64,
    replicas: u64,
    steps: u64,
    digest: String,
    seconds: f64,
}

pub(super) fn command(args: &ScaleArgs, audience: Audience) -> anyhow::Result<()> {
    let ScaleArgs { nodes, members, seed } = *args;
    let began = Instant::now();
    let cluster = Cluster { nodes: usize::from(nodes), members: usize::from(members), seed };
    let measured = scale(cluster).map_err(anyhow::Error::msg)?;
    let millis = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let scaled = ScaleReport {
        nodes,
        members,
        seed,
        first_start_ms: millis(measured.first_start),
        rebuild_ms: millis(measured.rebuild),
        registrations: measured.registrations,
        inventories: measured.inventories,
        local_matches: measured.local_matches,
        replicas: measured.replicas,
        steps: measured.steps,
        digest: format!("{:016x}", measured.digest),
        seconds: (began.elapsed().as_secs_f64() * 10.0).round() / 10.0,
    };
    audience.print_line(format!(
        "{nodes} agents, {members} members: all directories complete {} ms after the first start, and {} ms after the \
         loss of all members (simulated time; {} registrations, {} replicas, {} steps in {} s)",
        scaled.first_start_ms,
        scaled.rebuild_ms,
        scaled.registrations,
        scaled.replicas,
        scaled.steps,
        scaled.seconds
    ));
    audience.emit(&scaled);
    Ok(())
}
