//! `reprise sim`: simulates clusters.
//!
//! * `chaos` simulates many seeds under faults, one seed per thread at a time. A run depends only on its
//!   seed, and results are printed in the order of the seeds.
//! * `scale` simulates one large cluster in which all members lose their memory. It reports the simulated
//!   time until all directories are complete again.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use reprise_simulator::{Cluster, Recording, Run, Variant, run, scale};
use serde::Serialize;

use reprise_testkit::output::{Audience, Table};

/// Largest number of violations that are printed; the others are only counted.
const PRINTED_MAX: usize = 20;

/// Arguments of `reprise sim`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct SimArgs {
    #[command(subcommand)]
    simulation: Simulation,
}

#[derive(Clone, Debug, clap::Subcommand)]
enum Simulation {
    /// Simulate random faults, one run per seed; check all invariants.
    ///
    /// Each run checks the invariants at each step.
    Chaos(ChaosArgs),
    /// Simulate many agents that register at once, twice.
    ///
    /// All agents register at the first start, and again after all members have lost their memory.
    Scale(ScaleArgs),
}

#[derive(Clone, Debug, clap::Args)]
struct ScaleArgs {
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

#[derive(Clone, Debug, clap::Args)]
struct ChaosArgs {
    /// Run this many seeds.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Start at this seed.
    #[arg(long, default_value_t = 0)]
    start: u64,
    /// Run this many seeds at once [default: the number of cores].
    #[arg(long)]
    threads: Option<NonZero<usize>>,
    /// Print every step, to debug a seed.
    #[arg(long)]
    print_steps: bool,
}

/// A seed that violated an invariant.
#[derive(Clone, Debug, Serialize)]
struct Violation {
    seed: u64,
    violation: String,
    replay: String,
}

/// Last line of `reprise sim chaos --json`.
#[derive(Debug, Serialize)]
struct Summary {
    seeds: u64,
    start: u64,
    violations: u64,
    seeds_per_second: f64,
    steps: u64,
    threads: usize,
    /// Digest over all runs; equal for equal seeds.
    digest: String,
    /// Number of occurrences by kind of event.
    seen: BTreeMap<&'static str, u64>,
}

/// Sums over all runs.
#[derive(Debug, Default)]
struct Totals {
    violations: BTreeMap<u64, String>,
    digest: u64,
    steps: u64,
    seen: BTreeMap<&'static str, u64>,
}

pub(crate) fn command(args: &SimArgs, audience: Audience) -> anyhow::Result<()> {
    match &args.simulation {
        Simulation::Chaos(args) => chaos(args, audience),
        Simulation::Scale(args) => simulate_scale(args, audience),
    }
}

fn simulate_scale(args: &ScaleArgs, audience: Audience) -> anyhow::Result<()> {
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

fn chaos(args: &ChaosArgs, audience: Audience) -> anyhow::Result<()> {
    let cores = std::thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
    let threads = args.threads.unwrap_or(cores).get();
    let began = Instant::now();
    let totals = play_all(args, threads, audience);
    let seconds = began.elapsed().as_secs_f64();
    for (seed, violation) in totals.violations.iter().take(PRINTED_MAX) {
        let replay = format!("reprise sim chaos --seeds 1 --start {seed} --print-steps");
        audience.print_line(format!("seed {seed}: {violation}\n  replay with: {replay}"));
        audience.emit(&Violation { seed: *seed, violation: violation.clone(), replay });
    }
    let summary = Summary {
        seeds: args.seeds,
        start: args.start,
        violations: totals.violations.len() as u64,
        seeds_per_second: (args.seeds as f64 / seconds * 10.0).round() / 10.0,
        steps: totals.steps,
        threads,
        digest: format!("{:016x}", totals.digest),
        seen: totals.seen,
    };
    audience.print_line(text(&summary));
    audience.emit(&summary);
    anyhow::ensure!(
        summary.violations == 0,
        "{} of {} seeds violated an invariant",
        summary.violations,
        args.seeds
    );
    Ok(())
}

/// Runs all seeds; each thread takes the next seed until none is left.
fn play_all(args: &ChaosArgs, threads: usize, audience: Audience) -> Totals {
    let recording = if args.print_steps { Recording::Lines } else { Recording::Digest };
    let progress = audience.progress(args.seeds, "seeds");
    let (next, totals) = (AtomicU64::new(0), Mutex::new(Totals::default()));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= args.seeds {
                        return;
                    }
                    let run = run(args.start.wrapping_add(number), Variant::Production, recording);
                    totals.lock().unwrap_or_else(PoisonError::into_inner).add(run, audience);
                    progress.inc(1);
                }
            });
        }
    });
    progress.finish_and_clear();
    totals.into_inner().unwrap_or_else(PoisonError::into_inner)
}

impl Totals {
    fn add(&mut self, run: Run, audience: Audience) {
        run.lines.iter().for_each(|line| audience.print_line(line));
        self.steps += run.steps;
        // A sum is independent of the order in which threads finish.
        self.digest = self.digest.wrapping_add(run.digest.rotate_left((run.seed % 64) as u32));
        for (what, count) in run.seen {
            *self.seen.entry(what).or_default() += count;
        }
        if let Some(violation) = run.violation {
            // Logged at once: a run over many seeds may take hours.
            tracing::error!(seed = run.seed, violation, "invariant violated");
            self.violations.insert(run.seed, violation);
        }
    }
}

fn text(summary: &Summary) -> String {
    let mut table = Table::new(&["event", "count"]);
    for (what, count) in &summary.seen {
        table.row(vec![(*what).to_owned(), count.to_string()]);
    }
    format!(
        "{}\n{} seeds from {}, {} violations, {:.1} seeds/s on {} threads, {} steps, digest {}",
        table.render(),
        summary.seeds,
        summary.start,
        summary.violations,
        summary.seeds_per_second,
        summary.threads,
        summary.steps,
        summary.digest
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(threads: usize) -> Totals {
        let args = ChaosArgs { seeds: 6, start: 3, threads: None, print_steps: false };
        play_all(&args, threads, Audience::Program)
    }

    #[test]
    fn results_do_not_depend_on_the_number_of_threads() {
        let (one, three) = (totals(1), totals(3));
        assert_eq!((one.digest, one.steps, one.seen), (three.digest, three.steps, three.seen));
        assert_eq!(one.violations, three.violations);
    }
}
