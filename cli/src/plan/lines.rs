//! Lines of `reprise plan --json`.

use reprise_policy::eviction::EvictionKind;
use reprise_simulator::plan::{
    Configuration, Estimate, Evaluated, HOURS_PER_MONTH, Reached, Refused, Timed, Utilisation,
};
use reprise_testkit::output::Audience;
use serde::Serialize;

use super::Report;
use super::text::is_gain;

/// Line of the output.
#[derive(Debug, Serialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Line<'a> {
    /// The question.
    Subject {
        trace: &'a str,
        requests: u64,
        sessions: u32,
        references: u64,
        distinct_blocks: u64,
        block_tokens: u64,
        /// Tokens and bytes of a block that is replayed: several of the trace's, if it is large.
        replayed_block_tokens: u64,
        replayed_block_bytes: u64,
        requests_per_second: f64,
        replayed_share: f64,
        /// Requests that engines refuse. The other figures are without them.
        refused_requests: u64,
        refused_beyond_context: u64,
        refused_beyond_memory: u64,
        refused_tokens: u64,
        refused_token_share: f64,
        seed: u64,
        model: &'a str,
        hardware: &'a str,
        accelerators: u32,
        budget_usd_per_month: f64,
        years: f64,
    },
    /// The plan.
    Recommendation(Choice<'a>),
    /// The mean TTFT that `--ttft` asks for; the fields of the larger budget are `null` if the goal is met or none is known.
    Goal {
        ttft_goal_seconds: f64,
        is_met: bool,
        ttft_mean_seconds: f64,
        sufficient_budget_usd_per_month: Option<f64>,
        sufficient_nodes: Option<u32>,
        sufficient_ttft_mean_seconds: Option<f64>,
    },
    /// The best configuration with other kinds of hardware.
    Alternative(Choice<'a>),
    /// A change of the plan.
    Step {
        #[serde(flatten)]
        choice: Choice<'a>,
        added_usd_per_month: f64,
        ttft_saved_seconds: f64,
        /// Half of the interval of 95 % around it.
        ttft_saved_half_width_seconds: Option<f64>,
        usd_per_month_per_ms: Option<f64>,
    },
    /// Numbers of configurations.
    Compared {
        configurations: usize,
        replayed: usize,
        worn_out: usize,
        slow_ssds: usize,
        slow_cold_store: usize,
    },
    /// Sequences of median length on a node.
    Sequences { tier: &'a str, tokens: u64, bytes: u64, sequences: u64 },
    /// Interval between uses within which a tier is cheaper.
    BreakEven { tier: &'a str, instead_of: &'a str, seconds: Option<f64>, of_reuse: f64 },
    /// Additional time of decode steps.
    Decode { tier: &'a str, share: f64, fetched_once: f64, fetched_always: f64, step_ms: f64, batch: u64 },
    /// Point of the curve of hits by capacity.
    HitRate { policy: &'a str, blocks: Option<u64>, bytes: Option<u64>, hit_ratio: f64 },
    /// Point of the bubble curve.
    Bubble { tier: &'a str, hit_percent: f64, compute_ms: f64, bubble_ms: f64 },
}

/// Configuration with its results.
#[derive(Debug, Serialize)]
struct Choice<'a> {
    name: &'a str,
    nodes: u32,
    dram_gb_per_node: u64,
    ssd_class: Option<&'a str>,
    ssds_per_node: u32,
    cold_store: bool,
    policy: &'static str,
    admission: &'static str,
    usd_per_month: f64,
    /// Load of the nodes by closed formulas, with the hits of the replays.
    served: f64,
    busy: f64,
    busy_peak: f64,
    usd_per_million_tokens: f64,
    estimated_ttft_mean_seconds: Option<f64>,
    estimated_hit_ratio: f64,
    timed: Times,
}

/// Results of a replay with time.
#[derive(Debug, Serialize)]
struct Times {
    hit_ratio: f64,
    hits_hbm: f64,
    hits_dram: f64,
    hits_ssd: f64,
    hits_cold: f64,
    ttft_mean_seconds: f64,
    /// Half of the interval of 95 % around the mean of the samples; `null` with one sample.
    ttft_mean_half_width_seconds: Option<f64>,
    samples: usize,
    ttft_p50_seconds: f64,
    ttft_p95_seconds: f64,
    ttft_p99_seconds: f64,
    tpot_p50_seconds: f64,
    ssd_written_bytes_per_day: Option<f64>,
    ssd_years: Option<f64>,
    /// Bytes of the cold store: held at the end of the trace, and moved a day; `null` without one.
    cold_stored_bytes: Option<f64>,
    cold_written_bytes_per_day: Option<f64>,
    cold_read_bytes_per_day: Option<f64>,
    /// Part of the trace that was replayed: nodes of the configuration, their sessions, and the first part of the time.
    nodes_replayed: u32,
    sessions_replayed: u32,
    requests_replayed: u64,
    references_replayed: u64,
    time_share_replayed: f64,
}

impl Times {
    fn new(timed: &Timed) -> Times {
        Times {
            hit_ratio: timed.hit_ratio,
            hits_hbm: timed.hbm_ratio,
            hits_dram: timed.dram_ratio,
            hits_ssd: timed.ssd_ratio,
            hits_cold: timed.cold_ratio,
            ttft_mean_seconds: timed.ttft_mean(),
            ttft_mean_half_width_seconds: Some(timed.ttft_interval().half_width)
                .filter(|width| width.is_finite()),
            samples: timed.ttft_means.len(),
            ttft_p50_seconds: timed.ttft(0.5),
            ttft_p95_seconds: timed.ttft(0.95),
            ttft_p99_seconds: timed.ttft(0.99),
            tpot_p50_seconds: timed.tpot_seconds,
            ssd_written_bytes_per_day: timed.ssd_bytes_per_day,
            ssd_years: timed.ssd_years,
            cold_stored_bytes: timed.cold.map(|cold| cold.stored_bytes),
            cold_written_bytes_per_day: timed.cold.map(|cold| cold.written_bytes_per_day),
            cold_read_bytes_per_day: timed.cold.map(|cold| cold.read_bytes_per_day),
            nodes_replayed: timed.part.nodes,
            sessions_replayed: timed.part.sessions,
            requests_replayed: timed.part.requests,
            references_replayed: timed.part.references,
            time_share_replayed: timed.part.of_time,
        }
    }
}

fn choice<'a>(report: &'a Report<'_>, name: &'a str, one: &Evaluated, timed: &Timed) -> Choice<'a> {
    let machine = report.estimator.machine;
    let Evaluated { configuration, estimate } = one;
    let Configuration { nodes, dram_gb, cold, policy, admission, .. } = *configuration;
    let Estimate { usd_per_hour, ttft_mean, hit_ratio, .. } = *estimate;
    let Utilisation { busy, busy_peak, served } = timed.utilisation;
    let drives = configuration.drives(machine);
    Choice {
        name,
        nodes,
        dram_gb_per_node: dram_gb,
        ssd_class: drives.map(|(class, _)| class.name.as_str()),
        ssds_per_node: drives.map_or(0, |(_, count)| count),
        cold_store: cold,
        policy: policy.name(),
        admission: admission.name(),
        usd_per_month: usd_per_hour * HOURS_PER_MONTH,
        served,
        busy,
        busy_peak,
        usd_per_million_tokens: timed.usd_per_million_tokens(report.estimator, configuration),
        estimated_ttft_mean_seconds: ttft_mean,
        estimated_hit_ratio: hit_ratio,
        timed: Times::new(timed),
    }
}

/// Prints all lines; nothing for people.
pub(super) fn emit(report: &Report<'_>, audience: Audience) {
    let plan = &report.plan;
    audience.emit(&subject(report));
    audience.emit(&Line::Recommendation(choice(report, "plan", &plan.chosen, &report.chosen)));
    if let Some(reached) = &plan.reached {
        audience.emit(&goal(reached));
    }
    for ((name, one), timed) in plan.alternatives.iter().zip(&report.alternatives) {
        audience.emit(&Line::Alternative(choice(report, name, one, timed)));
    }
    for (step, timed) in plan.steps.iter().zip(&report.steps) {
        let saved = report.chosen.difference(timed);
        audience.emit(&Line::Step {
            choice: choice(report, step.name, &step.changed, timed),
            added_usd_per_month: step.usd_per_month,
            ttft_saved_seconds: saved.mean,
            ttft_saved_half_width_seconds: Some(saved.half_width).filter(|width| width.is_finite()),
            usd_per_month_per_ms: is_gain(&saved).then(|| step.usd_per_month / (saved.mean * 1e3)),
        });
    }
    audience.emit(&Line::Compared {
        configurations: plan.compared,
        replayed: plan.replayed,
        worn_out: plan.rejected.wear,
        slow_ssds: plan.rejected.ssd_bandwidth,
        slow_cold_store: plan.rejected.cold_bandwidth,
    });
    emit_guidance(report, audience);
    emit_hit_rates(report, audience);
}

/// Line of the TTFT that was asked for.
pub(super) fn goal(reached: &Reached) -> impl Serialize + use<> {
    let beyond = reached.beyond_budget.as_ref();
    Line::Goal {
        ttft_goal_seconds: reached.goal_seconds,
        is_met: reached.is_met(),
        ttft_mean_seconds: reached.ttft_seconds,
        sufficient_budget_usd_per_month: beyond.map(|(one, _)| one.estimate.usd_per_hour * HOURS_PER_MONTH),
        sufficient_nodes: beyond.map(|(one, _)| one.configuration.nodes),
        sufficient_ttft_mean_seconds: beyond.map(|(_, ttft)| *ttft),
    }
}

fn subject<'a>(report: &'a Report<'_>) -> Line<'a> {
    let (machine, load) = (report.estimator.machine, report.estimator.load);
    let Refused { beyond_context, beyond_memory, tokens } = load.refused;
    Line::Subject {
        trace: &report.trace,
        requests: load.recorded.requests,
        sessions: load.sessions,
        references: load.recorded.references,
        distinct_blocks: load.recorded.distinct,
        block_tokens: load.recorded.block_tokens,
        replayed_block_tokens: load.block_tokens(),
        replayed_block_bytes: report.estimator.block_bytes as u64,
        requests_per_second: load.requests_per_second,
        replayed_share: load.share,
        refused_requests: beyond_context + beyond_memory,
        refused_beyond_context: beyond_context,
        refused_beyond_memory: beyond_memory,
        refused_tokens: tokens,
        refused_token_share: tokens as f64 / load.recorded.tokens.max(1) as f64,
        seed: report.seed,
        model: &machine.model.name,
        hardware: &machine.hardware.name,
        accelerators: machine.accelerators,
        budget_usd_per_month: report.budget.usd_per_month(),
        years: report.estimator.years,
    }
}

fn emit_guidance(report: &Report<'_>, audience: Audience) {
    let guidance = &report.guidance;
    for tier in &guidance.sequences {
        let (bytes, sequences) = (tier.bytes, tier.sequences);
        audience.emit(&Line::Sequences { tier: &tier.tier, tokens: guidance.tokens, bytes, sequences });
    }
    for one in &guidance.intervals {
        audience.emit(&Line::BreakEven {
            tier: &one.tier,
            instead_of: &one.instead_of,
            seconds: one.seconds.is_finite().then_some(one.seconds),
            of_reuse: one.of_reuse,
        });
    }
    for one in &guidance.decode {
        audience.emit(&Line::Decode {
            tier: &one.tier,
            share: one.share,
            fetched_once: one.fetched_once,
            fetched_always: one.fetched_always,
            step_ms: guidance.step_ms,
            batch: guidance.batch,
        });
    }
    for point in &guidance.bubbles {
        for (tier, bubble_ms) in guidance.bubble_tiers.iter().zip(&point.bubble_ms) {
            let (hit_percent, compute_ms) = (point.hit_percent, point.compute_ms);
            audience.emit(&Line::Bubble { tier, hit_percent, compute_ms, bubble_ms: *bubble_ms });
        }
    }
}

fn emit_hit_rates(report: &Report<'_>, audience: Audience) {
    let curves = report.estimator.curves;
    let block_bytes = report.estimator.block_bytes as u64;
    let emit = |policy: &str, ratios: &[f64]| {
        for (blocks, hit_ratio) in curves.capacities.iter().zip(ratios) {
            let bytes = Some(blocks * block_bytes);
            audience.emit(&Line::HitRate { policy, blocks: Some(*blocks), bytes, hit_ratio: *hit_ratio });
        }
    };
    for kind in EvictionKind::ALL {
        emit(kind.name(), &curves.ratios(kind));
    }
    emit("opt", &curves.bound);
    let hit_ratio = curves.unlimited_ratio();
    audience.emit(&Line::HitRate { policy: "unlimited", blocks: None, bytes: None, hit_ratio });
}
