//! `reprise sim chaos`: simulates many seeds under faults, one seed per thread at a time.
//!
//! A run depends only on its seed, and results are printed in the order of the seeds.

use std::collections::BTreeMap;
use std::num::NonZero;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use reprise_simulator::{Recording, Run, Variant, run};
use reprise_testkit::output::{Audience, Table};
use serde::Serialize;

/// Largest number of violations that are printed; the others are only counted.
const PRINTED_MAX: usize = 20;

#[derive(Clone, Debug, clap::Args)]
pub(super) struct ChaosArgs {
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

pub(super) fn command(args: &ChaosArgs, audience: Audience) -> anyhow::Result<()> {
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
