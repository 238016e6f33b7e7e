//! Plots of a plan, each as SVG and PNG.
//!
//! Axes with a wide range have logarithms to the base 2 as coordinates, so that a step is a doubling.

mod draw;

use std::path::Path;

use anyhow::Context;
use reprise_policy::admission::AdmissionMode;
use reprise_policy::eviction::EvictionKind;
use reprise_simulator::plan::{BUSY_MAX, Configuration, Ssds, Timed};

use super::Report;
use draw::{Axis, Plot, Series};

/// Points of a distribution: more are not visible.
const POINTS_MAX: usize = 200;

/// Writes all plots to a folder, which is created; returns the names of the files.
pub(super) fn write(report: &Report<'_>, folder: &Path) -> anyhow::Result<Vec<String>> {
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot create the folder {} for plots", folder.display()))?;
    let mut names = Vec::new();
    for (name, plot) in [
        ("hit-rate", hit_rate(report)),
        ("ttft", ttft(report)),
        ("cost", cost(report)),
        ("bubbles", bubbles(report)),
    ] {
        let files = [("svg", draw::svg(&plot)?.into_bytes()), ("png", draw::png(&plot)?)];
        for (ending, bytes) in files {
            let path = folder.join(format!("{name}.{ending}"));
            std::fs::write(&path, bytes).with_context(|| format!("cannot write {}", path.display()))?;
            names.push(path.display().to_string());
        }
    }
    Ok(names)
}

fn hit_rate(report: &Report<'_>) -> Plot {
    let curves = report.estimator.curves;
    let gb = |blocks: u64| blocks as f64 * report.estimator.block_bytes / 1e9;
    let points = |ratios: Vec<f64>| {
        curves
            .capacities
            .iter()
            .zip(ratios)
            .map(|(blocks, ratio)| (gb(*blocks).log2(), ratio * 100.0))
            .collect()
    };
    // Traces have no priorities, so priority_lru equals lru.
    let kinds = EvictionKind::ALL.into_iter().filter(|kind| *kind != EvictionKind::PriorityLru);
    let mut series: Vec<Series> =
        kinds.map(|kind| Series::new(kind.name(), points(curves.ratios(kind)))).collect();
    series.push(Series::new("opt (knows the future)", points(curves.bound.clone())));
    let unlimited = vec![curves.unlimited_ratio(); curves.capacities.len()];
    series.push(Series::new("unlimited cache", points(unlimited)));
    Plot {
        title: format!("{}: hit rate by cache capacity", report.trace),
        x: Axis { label: "capacity of the cluster's cache", text: gigabytes },
        y: Axis { label: "hits, % of the prompts' blocks", text: number },
        series,
    }
}

fn ttft(report: &Report<'_>) -> Plot {
    let distribution = |timed: &Timed| {
        let all = &timed.ttft_seconds;
        let count = all.len().min(POINTS_MAX);
        let place = |at: usize| (at + 1) as f64 / count as f64;
        let value = |share: f64| timed.ttft(share).max(1e-4).log2();
        (0..count).map(|at| (value(place(at)), place(at) * 100.0)).collect::<Vec<_>>()
    };
    let mut series = vec![Series::new("the plan", distribution(&report.chosen))];
    for (step, timed) in report.plan.steps.iter().zip(&report.steps) {
        if matches!(step.name, "more DRAM" | "more SSDs" | "one more node") {
            series.push(Series::new(step.name, distribution(timed)));
        }
    }
    for ((name, _), timed) in report.plan.alternatives.iter().zip(&report.alternatives) {
        if matches!(*name, "no cache" | "DRAM") {
            series.push(Series::new(&format!("best with {name}"), distribution(timed)));
        }
    }
    Plot {
        title: format!("{}: time to the first token, replayed with time", report.trace),
        x: Axis { label: "time to the first token (TTFT)", text: seconds },
        y: Axis { label: "requests, %", text: number },
        series,
    }
}

/// Price of a million tokens at the largest load that the plan's nodes bear. Points whose SSDs do not bear it are absent.
fn cost(report: &Report<'_>) -> Plot {
    let estimator = report.estimator;
    let chosen = report.plan.chosen.configuration;
    let price = |configuration: &Configuration| estimator.usd_per_million_tokens_max(configuration);
    let tb = |gb: f64| (gb * f64::from(chosen.nodes)).log2();
    let dram = [32, 64, 128, 256, 512, 1_024, 2_048].into_iter().filter_map(|dram_gb| {
        let one = Configuration { dram_gb, ssds: None, cold: false, ..chosen };
        Some((tb(dram_gb as f64), price(&one)?))
    });
    let mut series = vec![Series::new("DRAM only", dram.collect())];
    let dram_gb = chosen.dram_gb.max(32);
    for (class, ssd) in estimator.machine.ssds.iter().enumerate() {
        let points = [1, 2, 4, 8].into_iter().filter_map(|count| {
            let ssds = Some(Ssds { class, count });
            let prices =
                [AdmissionMode::Always, AdmissionMode::SecondUse].into_iter().filter_map(|admission| {
                    price(&Configuration { dram_gb, ssds, cold: false, admission, ..chosen })
                });
            Some((tb(ssd.bytes as f64 / 1e9 * f64::from(count)), prices.min_by(f64::total_cmp)?))
        });
        let points: Vec<(f64, f64)> = points.collect();
        if !points.is_empty() {
            series.push(Series::new(&format!("{} SSDs behind {dram_gb} GB of DRAM", ssd.name), points));
        }
    }
    let (left, right) =
        (tb(32.0), series.iter().flat_map(|one| &one.points).map(|point| point.0).fold(0.0, f64::max));
    let without = price(&Configuration::without_cache(chosen.nodes));
    series.extend(without.map(|price| Series::new("no cache", vec![(left, price), (right, price)])));
    Plot {
        title: format!(
            "{}: cost by cache capacity, {} nodes that are busy for {:.0} % of the time",
            report.trace,
            chosen.nodes,
            BUSY_MAX * 100.0
        ),
        x: Axis { label: "capacity of the cluster's largest tier", text: gigabytes },
        y: Axis { label: "USD for a million tokens", text: small },
        series,
    }
}

fn bubbles(report: &Report<'_>) -> Plot {
    let guidance = &report.guidance;
    let milliseconds = |value: f64| value.max(0.01).log2();
    let compute = guidance.bubbles.iter().map(|point| (point.hit_percent, milliseconds(point.compute_ms)));
    let mut series = vec![Series::new("computation of the rest", compute.collect())];
    for (at, tier) in guidance.bubble_tiers.iter().enumerate() {
        let cached = guidance.bubbles.iter().filter(|point| point.hit_percent > 0.0);
        let points = cached.map(|point| (point.hit_percent, milliseconds(point.bubble_ms[at])));
        series.push(Series::new(&format!("bubble, {tier}"), points.collect()));
    }
    Plot {
        title: format!("Layer-wise loads of {} tokens: bubbles by hit rate", guidance.tokens),
        x: Axis { label: "cached part of the prompt, %", text: number },
        y: Axis { label: "time", text: from_milliseconds },
        series,
    }
}

fn number(value: f64) -> String {
    format!("{value:.0}")
}

fn small(value: f64) -> String {
    format!("{value:.3}")
}

/// Text of a logarithm of gigabytes.
fn gigabytes(log2: f64) -> String {
    let gb = log2.exp2();
    if gb < 1_000.0 { format!("{gb:.0} GB") } else { format!("{:.1} TB", gb / 1e3) }
}

/// Text of a logarithm of seconds.
fn seconds(log2: f64) -> String {
    let seconds = log2.exp2();
    match seconds {
        below if below < 0.001 => format!("{:.2} ms", below * 1e3),
        below if below < 0.01 => format!("{:.1} ms", below * 1e3),
        below if below < 1.0 => format!("{:.0} ms", below * 1e3),
        below if below < 10.0 => format!("{below:.1} s"),
        _ => format!("{seconds:.0} s"),
    }
}

/// Text of a logarithm of milliseconds.
fn from_milliseconds(log2: f64) -> String {
    seconds(log2 - 1_000_f64.log2())
}
