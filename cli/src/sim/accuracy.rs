//! `reprise sim accuracy`: workloads on the timed world and on a real vLLM engine.
//!
//! The profile comes from runs apart from the workloads ([`crate::engine_profile`]). The engine and an agent run on this
//! machine; each workload is repeated, and the medians are compared.

use std::path::PathBuf;

use anyhow::{Context, ensure};
use reprise_simulator::serving::accuracy::{
    EngineSettings, Served, Submission, Workload, simulate, tokens_per_second, ttft_ms, workloads,
};
use reprise_simulator::serving::profiles::NodeProfile;
use reprise_simulator::serving::reproduce::rounded;
use reprise_simulator::serving::statistics::median;
use reprise_testkit::output::{Audience, Table};
use serde::Serialize;

use crate::config::Config;
use crate::engine_profile::{self, LIMITS};
use crate::vllm_engine::{EngineRequest, VllmArgs};
use crate::vllm_node::{Loading, VllmNode};

/// Seeds of prompts: those of a prefix, and the first one of other tokens.
const PREFIX_SEED: u64 = 1 << 50;
const OWN_SEED: u64 = 1 << 51;

/// Requests of a workload with `--quick`.
const QUICK_REQUESTS: usize = 4;

/// Deviation that counts as equal, in percent.
const GOAL_PERCENT: f64 = 5.0;

#[derive(Clone, Debug, clap::Args)]
pub(super) struct AccuracyArgs {
    #[command(flatten)]
    vllm: VllmArgs,
    /// Repeat each workload; compare the medians.
    #[arg(long, default_value_t = 3)]
    repetitions: usize,
    /// Draw lengths and arrivals from this seed.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Use this profile instead of measuring one first.
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,
}

/// A figure of engine and simulator.
#[derive(Clone, Debug, PartialEq, Serialize)]
struct Compared {
    kind: &'static str,
    workload: &'static str,
    quantity: &'static str,
    unit: &'static str,
    /// Median of the repetitions, their least and their greatest value.
    real: f64,
    real_min: f64,
    real_max: f64,
    simulated: f64,
    deviation_percent: f64,
}

/// Last line of the output.
#[derive(Debug, Serialize)]
struct Summary {
    kind: &'static str,
    figures: usize,
    within_5_percent: usize,
    repetitions: usize,
    requests: usize,
    profile: PathBuf,
    load_average: f64,
}

pub(super) fn command(args: &AccuracyArgs, config: &Config, audience: Audience) -> anyhow::Result<()> {
    ensure!(args.repetitions > 0, "invalid --repetitions 0: expected at least 1");
    let load_average = load_average();
    let folder = config.bench.directory(None).join("accuracy");
    let mut node = VllmNode::start(&args.vllm, LIMITS, Loading::All, &folder)?;
    let (path, profile) = profile(args, &mut node, audience)?;
    let settings = EngineSettings {
        tokens_per_block: node.engine.description.block_tokens,
        blocks: node.engine.description.blocks,
        batch_max: LIMITS.sequences,
        step_tokens_max: LIMITS.step_tokens,
    };
    let mut workloads = workloads(args.seed);
    if args.vllm.quick {
        workloads.iter_mut().for_each(|workload| workload.requests.truncate(QUICK_REQUESTS));
    }
    let mut figures = Vec::new();
    for workload in &workloads {
        figures.extend(compare(args, &mut node, (&profile, settings), workload)?);
    }
    let mut table = Table::new(&["workload", "quantity", "real", "range", "simulated", "unit", "deviation"]);
    for figure in &figures {
        audience.emit(figure);
        table.row(cells(figure));
    }
    let within = figures.iter().filter(|figure| figure.deviation_percent.abs() <= GOAL_PERCENT).count();
    audience.print_line(format!(
        "{}\n{within} of {} figures are within {GOAL_PERCENT} %; medians of {} repetitions; profile {}",
        table.render(),
        figures.len(),
        args.repetitions,
        path.display()
    ));
    if load_average > 0.5 {
        audience.print_line(format!(
            "The load average was {load_average} before the start: on a busy machine, the figures mean nothing."
        ));
    }
    audience.emit(&Summary {
        kind: "summary",
        figures: figures.len(),
        within_5_percent: within,
        repetitions: args.repetitions,
        requests: workloads.iter().map(|workload| workload.requests.len()).sum(),
        profile: path,
        load_average,
    });
    Ok(())
}

/// Reads the profile, or measures and writes it.
fn profile(
    args: &AccuracyArgs,
    node: &mut VllmNode,
    audience: Audience,
) -> anyhow::Result<(PathBuf, NodeProfile)> {
    let (path, text) = match &args.profile {
        Some(path) => {
            let text =
                std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))?;
            (path.clone(), text)
        }
        None => {
            audience.print_line("Measuring the profile …");
            let measured = engine_profile::measure(node, args.vllm.quick)?;
            let path = node.folder().join("measured.toml");
            std::fs::write(&path, &measured.text).with_context(|| format!("writing {}", path.display()))?;
            audience.print_line(measured.words());
            (path, measured.text)
        }
    };
    let profile = NodeProfile::parse(&path.to_string_lossy(), &text)?;
    Ok((path, profile))
}

/// Compares one workload: paced arrivals, then all requests at once.
fn compare(
    args: &AccuracyArgs,
    node: &mut VllmNode,
    (profile, settings): (&NodeProfile, EngineSettings),
    workload: &Workload,
) -> anyhow::Result<Vec<Compared>> {
    let paced = workload.paced(workload.rate(profile, settings));
    let at_once = workload.at_once();
    let saved: Vec<EngineRequest> =
        requests(&paced, 0).into_iter().filter(|request| request.prefix > 0).collect();
    if !saved.is_empty() {
        node.save(&saved)?;
    }
    let (mut p50, mut p90, mut throughput) = (Vec::new(), Vec::new(), Vec::new());
    for repetition in 0..args.repetitions as u64 {
        let served = serve(node, &requests(&paced, 2 * repetition))?;
        p50.push(ttft_ms(&served, 0.5));
        p90.push(ttft_ms(&served, 0.9));
        let served = serve(node, &requests(&at_once, 2 * repetition + 1))?;
        throughput.push(tokens_per_second(&at_once, &served));
    }
    let simulated = simulate(profile, settings, &paced);
    let simulated_at_once = simulate(profile, settings, &at_once);
    let name = workload.name;
    Ok(vec![
        compared(name, "TTFT p50", "ms", &p50, ttft_ms(&simulated, 0.5)),
        compared(name, "TTFT p90", "ms", &p90, ttft_ms(&simulated, 0.9)),
        compared(
            name,
            "throughput",
            "tokens/s",
            &throughput,
            tokens_per_second(&at_once, &simulated_at_once),
        ),
    ])
}

/// Requests to the engine. Each run has its own tokens behind the prefixes.
fn requests(submissions: &[Submission], run: u64) -> Vec<EngineRequest> {
    let count = submissions.len() as u64;
    let request = |(number, submission): (u64, &Submission)| EngineRequest {
        at: submission.at,
        prefix_seed: PREFIX_SEED + number,
        prefix: submission.cached,
        seed: OWN_SEED + run * count + number,
        own: submission.own,
        output: submission.output,
        is_stored: false,
    };
    (0..).zip(submissions).map(request).collect()
}

fn serve(node: &mut VllmNode, requests: &[EngineRequest]) -> anyhow::Result<Vec<Served>> {
    let answers = node.engine.serve(requests)?;
    for (request, answer) in requests.iter().zip(&answers) {
        ensure!(
            answer.cached == request.prefix,
            "{} instead of {} tokens of a prompt were cached: the comparison needs exactly the saved prefixes",
            answer.cached,
            request.prefix
        );
    }
    Ok(answers.iter().map(|answer| Served { ttft: answer.ttft, end: answer.end }).collect())
}

fn compared(
    workload: &'static str,
    quantity: &'static str,
    unit: &'static str,
    real: &[f64],
    simulated: f64,
) -> Compared {
    let middle = median(real);
    Compared {
        kind: "accuracy",
        workload,
        quantity,
        unit,
        real: rounded(middle),
        real_min: rounded(real.iter().copied().fold(f64::INFINITY, f64::min)),
        real_max: rounded(real.iter().copied().fold(0.0, f64::max)),
        simulated: rounded(simulated),
        deviation_percent: rounded((simulated / middle - 1.0) * 100.0),
    }
}

fn cells(figure: &Compared) -> Vec<String> {
    vec![
        figure.workload.to_owned(),
        figure.quantity.to_owned(),
        figure.real.to_string(),
        format!("{} to {}", figure.real_min, figure.real_max),
        figure.simulated.to_string(),
        figure.unit.to_owned(),
        format!("{:+.1} %", figure.deviation_percent),
    ]
}

/// Load average of the last minute; zero if it is unknown.
fn load_average() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace().next().and_then(|value| value.parse().ok()).unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_share_prefixes_and_nothing_else() {
        let reuse = workloads(1).remove(2);
        let (one, other) = (requests(&reuse.paced(1.0), 0), requests(&reuse.at_once(), 1));
        assert_eq!(one.len(), other.len());
        for (one, other) in one.iter().zip(&other) {
            assert_eq!((one.prefix_seed, one.prefix), (other.prefix_seed, other.prefix));
            assert!(one.at > other.at && !one.is_stored);
        }
        let mut seeds: Vec<u64> = one.iter().chain(&other).map(|request| request.seed).collect();
        seeds.sort_unstable();
        seeds.dedup();
        assert_eq!(seeds.len(), 2 * one.len());
    }

    #[test]
    fn deviation_is_relative_to_the_median_of_the_engine() {
        let figure = compared("chat", "TTFT p50", "ms", &[90.0, 100.0, 400.0], 105.0);
        assert_eq!((figure.real, figure.real_min, figure.real_max), (100.0, 90.0, 400.0));
        assert_eq!(figure.deviation_percent, 5.0);
        assert_eq!(cells(&figure)[6], "+5.0 %");
    }
}
