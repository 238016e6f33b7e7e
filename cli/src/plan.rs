//! `reprise plan`: which hardware and policy to buy for a trace, why, and what the next dollar buys.
//!
//! Every line of the output depends on the trace, the arguments and the seed alone.

mod lines;
mod plots;
#[cfg(test)]
mod tests;
mod text;

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use anyhow::Context;
use reprise_policy::Interval;
use reprise_simulator::plan::{
    Budget, ColdStore, Curves, Estimator, Goal, Guidance, Limits, Load, Machine, Plan, Randomness, Replayed,
    Run, Shortlist, Timed, choose, shortlist,
};
use reprise_simulator::replay::{IdScope, ReadOptions};
use reprise_testkit::output::Audience;

use crate::profile_files;
use crate::sim::replay::reading::{self, Source};

/// Arguments of `reprise plan`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PlanArgs {
    /// Plan for the load of this trace.
    ///
    /// JSON lines in Mooncake's format, a recording of `reprise trace record`, a session of an agentic trace (.json), or
    /// an archive of sessions (.tar, .tar.xz).
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// Serve this model: a name, or the path of a file. The error of an unknown name lists the known ones.
    #[arg(long)]
    model: String,
    /// Use nodes of this hardware: h100, h200, a100 or cpu, and parts, as `h100+cxl`.
    ///
    /// All classes of SSDs are compared, unless the expression names one. A path names a file, as `./node.toml` or
    /// `h100+./ssd.toml`; `reprise profile --vllm` writes such a file.
    #[arg(long)]
    hardware: String,
    /// Spend at most this much: USD a month, or with /hour, /month, /year.
    ///
    /// `150000/3years` spreads a purchase over three years. Prices are those of the profiles for an hour, as clouds
    /// charge them.
    #[arg(long, value_name = "USD")]
    budget: Budget,
    /// Plan for this many years: SSDs must last, and the total price is stated.
    #[arg(long, default_value_t = 3.0, value_parser = parse_years)]
    years: f64,
    /// Let the plan include a cold store, which agents do not use yet.
    #[arg(long)]
    cold: bool,
    /// Choose the cheapest plan with at most this mean TTFT in replays [default: nearly the shortest].
    ///
    /// If no configuration within the budget reaches it, the output states the shortest one and a budget that is enough.
    #[arg(long, value_name = "TIME")]
    ttft: Option<Interval>,
    /// Write plots to this folder, each as SVG and PNG.
    #[arg(long, value_name = "DIR")]
    plots: Option<PathBuf>,
    /// Start the sessions of an archive at random within this time.
    #[arg(long, value_name = "TIME", default_value = "4h")]
    spread: Interval,
    /// Derive random times and samples from this seed.
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Tokens of a block, if the trace does not state them [default: 512 in JSON lines].
    #[arg(long, value_name = "TOKENS")]
    block_tokens: Option<u64>,
    /// Treat hash ids of JSON lines as those of their `session`, not of the trace.
    #[arg(long)]
    local_ids: bool,
    /// Sort requests by time instead of refusing unsorted ones.
    #[arg(long)]
    sort: bool,
    /// Plan for traces with gaps: missing blocks of prompts, and calls that a recording lost.
    #[arg(long)]
    allow_gaps: bool,
}

/// Everything that the output shows.
#[derive(Debug)]
struct Report<'a> {
    trace: String,
    seed: u64,
    budget: Budget,
    estimator: &'a Estimator<'a>,
    plan: Plan,
    guidance: Guidance,
    /// Results with time of the plan, in this order of its steps, and of its alternatives.
    chosen: Timed,
    steps: Vec<Timed>,
    alternatives: Vec<Timed>,
}

/// Runs the command `reprise plan`.
pub(crate) fn command(args: &PlanArgs, audience: Audience) -> anyhow::Result<()> {
    let began = Instant::now();
    let files = profile_files::read(&[&args.hardware, &args.model])?;
    let machine = Machine::with_files(&args.hardware, &args.model, &files)?;
    let load = read(args, &machine, Limits::default(), audience)?;
    let read_seconds = began.elapsed().as_secs_f64();
    let block_bytes = machine.model.kv_bytes_per_token() * load.block_tokens();
    let capacities = Curves::capacities(&load, block_bytes);
    let points = Curves::points(&capacities);
    let progress = audience.progress(points.len() as u64, "replays");
    let measured = in_parallel(&points, |point| {
        let measured = Curves::measure(&load, &capacities, block_bytes, *point);
        progress.inc(1);
        measured
    });
    progress.finish_and_clear();
    let curves = Curves::collect(capacities, measured);
    let replay_seconds = began.elapsed().as_secs_f64();
    let estimator = Estimator::new(&machine, &load, &curves, args.years);
    let shortlist = shortlist(&estimator, args.budget, args.goal())?;
    let estimate_seconds = began.elapsed().as_secs_f64();
    let report = Report::new(args, &estimator, shortlist, audience);
    tracing::debug!(
        read_seconds,
        replay_seconds,
        estimate_seconds,
        seconds = began.elapsed().as_secs_f64(),
        "planned"
    );
    lines::emit(&report, audience);
    audience.print_line(text::render(&report));
    if let Some(folder) = &args.plots {
        let written = plots::write(&report, folder)?;
        audience.print_line(format!("Plots: {}", written.join(", ")));
    }
    Ok(())
}

impl PlanArgs {
    fn goal(&self) -> Goal {
        let cold = if self.cold { ColdStore::Allowed } else { ColdStore::Compared };
        let ttft_seconds = self.ttft.map(|interval| interval.0.as_secs_f64());
        Goal { cold, ttft_seconds }
    }
}

impl<'a> Report<'a> {
    /// Chooses a plan by replays with time.
    fn new(
        args: &PlanArgs,
        estimator: &'a Estimator<'a>,
        shortlist: Shortlist,
        audience: Audience,
    ) -> Report<'a> {
        let progress = audience.progress(0, "replays with time");
        let replay = |runs: &[Run]| {
            progress.inc_length(runs.len() as u64);
            in_parallel(runs, |(configuration, sample)| {
                let timed = Timed::new(estimator, configuration, *sample);
                progress.inc(1);
                timed
            })
        };
        let replayed = choose(estimator, (args.budget, args.goal()), shortlist, replay);
        progress.finish_and_clear();
        let Replayed { plan, chosen, steps, alternatives } = replayed;
        let name = args.trace.file_name().unwrap_or(args.trace.as_os_str());
        Report {
            trace: name.to_string_lossy().into_owned(),
            seed: args.seed,
            budget: args.budget,
            guidance: Guidance::new(estimator, &plan.chosen.configuration),
            chosen,
            estimator,
            plan,
            steps,
            alternatives,
        }
    }
}

/// Reads the trace and measures its load.
fn read(args: &PlanArgs, machine: &Machine, limits: Limits, audience: Audience) -> anyhow::Result<Load> {
    let options = ReadOptions {
        scope: if args.local_ids { IdScope::Session } else { IdScope::Trace },
        block_tokens: args.block_tokens,
        allow_gaps: args.allow_gaps,
        sort: args.sort,
    };
    let trace = reading::read(&Source { path: &args.trace, options, sessions: None }, audience)?;
    let spread_ms = u64::try_from(args.spread.0.as_millis()).context("--spread is too long")?;
    let random = Randomness { seed: args.seed, spread_ms };
    Load::new(&trace, machine, limits, random).with_context(|| args.trace.display().to_string())
}

/// Applies a function to all items on all processors; results are in the order of the items.
fn in_parallel<T: Sync, R: Send>(items: &[T], apply: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(items.len().max(1));
    let next = AtomicUsize::new(0);
    let results: Mutex<Vec<Option<R>>> = Mutex::new(items.iter().map(|_| None).collect());
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((at, item)) = {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    items.get(at).map(|item| (at, item))
                } {
                    let result = apply(item);
                    results.lock().expect("no thread panics while it has the lock")[at] = Some(result);
                }
            });
        }
    });
    let results = results.into_inner().expect("all threads have ended");
    results.into_iter().map(|result| result.expect("each item has a result")).collect()
}

fn parse_years(text: &str) -> Result<f64, String> {
    let years: f64 = text.parse().map_err(|_| "expected a number of years".to_owned())?;
    if (0.1..=10.0).contains(&years) { Ok(years) } else { Err("expected 0.1 to 10 years".to_owned()) }
}
