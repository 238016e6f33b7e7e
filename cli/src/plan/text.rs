//! Text of a plan for people: the recommendation first, then the reasons.

use reprise_policy::admission::AdmissionMode;
use reprise_simulator::plan::{
    BUSY_MAX, Configuration, Evaluated, HOURS_PER_MONTH, HOURS_PER_YEAR, Interval, Machine, Mean, Refused,
    Step, Timed,
};
use reprise_testkit::output::Table;

use super::Report;

/// Percent of a whole.
const PERCENT: f64 = 100.0;

/// Seconds of the shortest window whose load is stated: shorter ones are bursts.
const PEAK_SECONDS_MIN: f64 = 60.0;

/// Seconds of a gain that counts.
const GAIN_MIN: f64 = 0.000_5;

/// Returns the text of a plan.
pub(super) fn render(report: &Report<'_>) -> String {
    let sections = [
        recommendation(report),
        reasons(report),
        next_dollar(report),
        tiers(report),
        endurance(report),
        assumptions(report),
    ];
    sections.join("\n")
}

/// Amount of USD with groups of three digits.
pub(super) fn usd(amount: f64) -> String {
    if amount.abs() < 100.0 {
        return format!("{amount:.2}");
    }
    let digits = format!("{:.0}", amount.abs());
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    if amount < 0.0 { format!("-{text}") } else { text }
}

/// Time with a unit that fits.
pub(super) fn time(seconds: f64) -> String {
    match seconds.abs() {
        _ if !seconds.is_finite() => "unlimited".to_owned(),
        below if below < 0.000_5 => format!("{:.0} µs", seconds * 1e6),
        below if below < 1.0 => format!("{:.0} ms", seconds * 1e3),
        below if below < 120.0 => format!("{seconds:.2} s"),
        below if below < 7_200.0 => format!("{:.0} minutes", seconds / 60.0),
        below if below < 172_800.0 => format!("{:.1} hours", seconds / 3_600.0),
        _ => format!("{:.1} days", seconds / 86_400.0),
    }
}

fn percent(ratio: f64) -> String {
    format!("{:.1} %", ratio * PERCENT)
}

/// Additional time as a part of a step, or as a multiple.
fn overhead(ratio: f64) -> String {
    if ratio < 2.0 { percent(ratio) } else { format!("{ratio:.0} steps") }
}

/// Hardware in the cell of a table.
fn short(configuration: &Configuration, machine: &Machine) -> String {
    let mut text = format!("{} nodes", configuration.nodes);
    if configuration.dram_gb > 0 {
        text += &format!(", {} GB", configuration.dram_gb);
    }
    if let Some((class, count)) = configuration.drives(machine) {
        text += &format!(", {count} × {}", class.name);
    }
    text
}

/// Years until SSDs wear out, if that is before the end of the plan.
fn worn_years(report: &Report<'_>, timed: &Timed) -> Option<f64> {
    timed.ssd_years.filter(|years| *years < report.estimator.years)
}

fn recommendation(report: &Report<'_>) -> String {
    let (machine, load) = (report.estimator.machine, report.estimator.load);
    let Evaluated { configuration, estimate } = &report.plan.chosen;
    let month = estimate.usd_per_hour * HOURS_PER_MONTH;
    let mut text = format!("RECOMMENDATION\n\n  {}\n", configuration.hardware_text(machine));
    if configuration.dram_gb > 0 {
        text += &format!("  eviction policy {}", configuration.policy.name());
        if configuration.ssds.is_some() {
            text += &format!(", NVMe admission {}", configuration.admission.name());
        }
        text += "\n";
    }
    text += &format!(
        "\n  costs     {} USD a month of {} ({} USD an hour; {} USD over {} years)\n",
        usd(month),
        usd(report.budget.usd_per_month()),
        usd(estimate.usd_per_hour),
        usd(estimate.usd_per_hour * HOURS_PER_YEAR * report.estimator.years),
        report.estimator.years
    );
    let load_of_nodes = report.chosen.utilisation;
    text += &format!(
        "  serves    {} of {:.2} requests a second; nodes are busy for {} of the time\n",
        if load_of_nodes.served >= 1.0 { "all".to_owned() } else { percent(load_of_nodes.served) },
        load.requests_per_second,
        percent(load_of_nodes.busy.min(1.0))
    );
    text += &peak(report);
    text += &refused(report);
    text += &goal(report);
    text += &results(report);
    text += &format!(
        "  price     {:.3} USD for a million tokens\n",
        report.chosen.usd_per_million_tokens(report.estimator, configuration)
    );
    if load_of_nodes.served < 1.0 {
        text += "\n  The budget does not serve the whole load: queues grow without bound, and the TTFT is that of this trace\n  only. WHAT THE NEXT DOLLAR BUYS has the price of one more node.\n";
    }
    text
}

/// What the busiest window needs, if it has more work than the nodes can do.
fn peak(report: &Report<'_>) -> String {
    let busy_peak = report.chosen.utilisation.busy_peak;
    let is_burst = report.estimator.load.window_seconds < PEAK_SECONDS_MIN;
    if is_burst || busy_peak <= BUSY_MAX {
        return String::new();
    }
    format!(
        "            the busiest {} have {} of the work that the nodes can do: requests queue, and the\n            TTFT \
         is mostly wait; by estimate, about {:.0} such nodes have no queues\n",
        time(report.estimator.load.window_seconds),
        percent(busy_peak),
        (f64::from(report.plan.chosen.configuration.nodes) * busy_peak / BUSY_MAX).ceil()
    )
}

/// Requests that are not part of the load.
fn refused(report: &Report<'_>) -> String {
    let (machine, load) = (report.estimator.machine, report.estimator.load);
    let Refused { beyond_context, beyond_memory, tokens } = load.refused;
    let requests = beyond_context + beyond_memory;
    if requests == 0 {
        return String::new();
    }
    let part = |count: u64, all: u64| percent(count as f64 / all.max(1) as f64);
    let mut reasons = Vec::new();
    if beyond_context > 0 {
        let (context, model) = (machine.model.context, &machine.model.title);
        reasons.push(format!("{beyond_context} are longer than the context of {context} tokens of {model}"));
    }
    if beyond_memory > 0 {
        reasons.push(format!("{beyond_memory} exceed the memory of a node's accelerators"));
    }
    format!(
        "            without {requests} of {} requests ({}, with {} of the tokens), which engines refuse:\n            {}\n",
        load.recorded.requests,
        part(requests, load.recorded.requests),
        part(tokens, load.recorded.tokens),
        reasons.join(",\n            ")
    )
}

/// The TTFT that was asked for, and its price if the budget is too small.
fn goal(report: &Report<'_>) -> String {
    let Some(reached) = &report.plan.reached else { return String::new() };
    let asked = time(reached.goal_seconds);
    if reached.is_met() {
        return format!("  goal      met: a mean TTFT of at most {asked}\n");
    }
    let shortest = time(reached.ttft_seconds);
    let remedy = match &reached.beyond_budget {
        Some((one, ttft)) => format!(
            "{} has {} in replays: pass --budget {:.0}",
            one.configuration.hardware_text(report.estimator.machine),
            time(*ttft),
            (one.estimate.usd_per_hour * HOURS_PER_MONTH).ceil()
        ),
        None => "No larger budget is known to meet it: pass a longer --ttft, or other --hardware".to_owned(),
    };
    format!(
        "  goal      NOT MET: a mean TTFT of at most {asked}. The shortest one within the budget is {shortest}.\n            \
         {remedy}.\n"
    )
}

/// TTFT and hits of the plan.
fn results(report: &Report<'_>) -> String {
    let timed = &report.chosen;
    let cold = match timed.cold {
        Some(_) => format!(", {} in the cold store", percent(timed.cold_ratio)),
        None => String::new(),
    };
    format!(
        "  TTFT      {} mean{}, {} median, {} p95, {} p99; {} for an output token\n  hits      {} of the prompts' blocks: {} in \
         HBM, {} in DRAM, {} on SSDs{cold}\n",
        time(timed.ttft_mean()),
        interval(timed.ttft_interval()),
        time(timed.ttft(0.5)),
        time(timed.ttft(0.95)),
        time(timed.ttft(0.99)),
        time(timed.tpot_seconds),
        percent(timed.hit_ratio),
        percent(timed.hbm_ratio),
        percent(timed.dram_ratio),
        percent(timed.ssd_ratio)
    )
}

/// Half of an interval, in brackets.
fn interval(mean: Mean) -> String {
    if mean.half_width.is_finite() { format!(" (± {})", time(mean.half_width)) } else { String::new() }
}

fn reasons(report: &Report<'_>) -> String {
    let machine = report.estimator.machine;
    let plan = &report.plan;
    let mut table = Table::new(&[
        "  best with",
        "nodes, DRAM, SSDs",
        "USD a month",
        "serves",
        "hits",
        "TTFT mean",
        "p95",
        "USD/1M",
    ]);
    let mut row = |name: &str, one: &Evaluated, timed: &Timed| {
        table.row(vec![
            format!("  {name}"),
            short(&one.configuration, machine),
            usd(one.estimate.usd_per_hour * HOURS_PER_MONTH),
            percent(timed.utilisation.served),
            percent(timed.hit_ratio),
            time(timed.ttft_mean()),
            time(timed.ttft(0.95)),
            format!("{:.3}", timed.usd_per_million_tokens(report.estimator, &one.configuration)),
        ]);
    };
    for ((name, one), timed) in plan.alternatives.iter().zip(&report.alternatives) {
        row(name, one, timed);
    }
    row("the plan", &plan.chosen, &report.chosen);
    let rule = match &plan.reached {
        None => "is the\n  cheapest one with a mean TTFT within 10 % of the shortest replayed one".to_owned(),
        Some(reached) if reached.is_met() => {
            format!(
                "is the\n  cheapest one with a replayed mean TTFT of at most {}",
                time(reached.goal_seconds)
            )
        }
        Some(reached) => format!(
            "has the\n  shortest replayed mean TTFT, because none within the budget has at most {}",
            time(reached.goal_seconds)
        ),
    };
    let mut text = format!(
        "WHY\n\n  {} configurations cost at most the budget, and {} candidates and changes were replayed. The plan {rule}.\n\n{}",
        plan.compared,
        plan.replayed,
        table.render()
    );
    text += "  DRAM and SSDs are those of each node. Agents use no cold store yet.\n";
    if let Some(worn) = &plan.rejected.worn {
        text += &format!(
            "\n  Faster by estimate but refused, because its SSDs wear out in {:.1} years:\n  {}, admission {}.\n",
            worn.estimate.ssd_years.unwrap_or(0.0),
            worn.configuration.hardware_text(machine),
            worn.configuration.admission.name()
        );
    }
    text
}

/// Whether a step saves time, and more than samples differ by chance.
pub(super) fn is_gain(saved: &Mean) -> bool {
    saved.mean >= GAIN_MIN && saved.is_clear()
}

/// Change of the mean TTFT by a step, with its interval.
fn change_text(saved: Mean) -> String {
    let text = signed(-saved.mean, time(-saved.mean));
    if saved.half_width.is_finite() { format!("{text} ± {}", time(saved.half_width)) } else { text }
}

fn signed(amount: f64, text: String) -> String {
    if amount > 0.0 { format!("+{text}") } else { text }
}

fn next_dollar(report: &Report<'_>) -> String {
    let mut table = Table::new(&[
        "  change",
        "to",
        "USD a month",
        "hits",
        "TTFT mean",
        "change",
        "USD a month per ms",
        "note",
    ]);
    let mut best: Option<(f64, &Step, f64)> = None;
    for (step, timed) in report.plan.steps.iter().zip(&report.steps) {
        let saved = report.chosen.difference(timed);
        let per_ms = is_gain(&saved).then(|| step.usd_per_month / (saved.mean * 1e3));
        let worn = worn_years(report, timed);
        let is_usable = worn.is_none() && step.name != "a cold store";
        let is_bought = is_usable && step.usd_per_month > 0.0;
        if let Some(per_ms) = per_ms.filter(|_| is_bought)
            && best.as_ref().is_none_or(|(least, _, _)| per_ms < *least)
        {
            best = Some((per_ms, step, saved.mean));
        }
        table.row(vec![
            format!("  {}", step.name),
            target(report, step, timed),
            signed(step.usd_per_month, usd(step.usd_per_month)),
            percent(timed.hit_ratio),
            time(timed.ttft_mean()),
            change_text(saved),
            per_ms.filter(|_| is_bought).map_or("-".to_owned(), usd),
            match worn {
                Some(years) => format!("SSDs wear out in {years:.1} years"),
                None if step.name == "a cold store" => "agents use none yet".to_owned(),
                None if !saved.is_clear() => "not above noise".to_owned(),
                None => String::new(),
            },
        ]);
    }
    let sentence = match best {
        Some((per_ms, step, saved)) => format!(
            "The next dollar buys most as {}: {} less TTFT for {} USD a month, {} USD for each millisecond.",
            step.name,
            time(saved),
            usd(step.usd_per_month),
            usd(per_ms)
        ),
        None => {
            "The next dollar buys nothing that is above the noise: no usable change to more hardware shortens the TTFT\n  by more \
             than the samples differ (±)."
                .to_owned()
        }
    };
    let spare = report.budget.usd_per_month() - report.plan.chosen.estimate.usd_per_hour * HOURS_PER_MONTH;
    format!(
        "WHAT THE NEXT DOLLAR BUYS\n\n  {sentence}\n  {} USD a month of the budget are left.\n\n{}",
        usd(spare),
        table.render()
    )
}

fn target(report: &Report<'_>, step: &Step, timed: &Timed) -> String {
    let machine = report.estimator.machine;
    let changed = &step.changed.configuration;
    let has_other_admission = changed.admission != report.plan.chosen.configuration.admission;
    let admission =
        if has_other_admission { format!(", {}", changed.admission.name()) } else { String::new() };
    match step.name {
        "more DRAM" | "less DRAM" => format!("{} GB a node", changed.dram_gb),
        "more SSDs" | "fewer SSDs" => changed.drives(machine).map_or("none".to_owned(), |(class, count)| {
            format!("{count} × {} a node{admission}", class.name)
        }),
        "one more node" | "one node less" => format!("{} nodes", changed.nodes),
        "another policy" => changed.policy.name().to_owned(),
        "a cold store" => {
            format!("{:.1} TB stored", timed.cold.unwrap_or_default().stored_bytes / 1e12)
        }
        name => name.to_owned(),
    }
}

fn tiers(report: &Report<'_>) -> String {
    let guidance = &report.guidance;
    let mut text = format!(
        "WHICH TIER FOR WHAT\n\n  A sequence of median length has {} tokens. A node holds:\n\n",
        guidance.tokens
    );
    let mut table = Table::new(&["  tier", "for KV cache", "sequences"]);
    for tier in &guidance.sequences {
        let gb = tier.bytes as f64 / 1e9;
        table.row(vec![format!("  {}", tier.tier), format!("{gb:.0} GB"), tier.sequences.to_string()]);
    }
    text += &table.render();
    text += "\n  A block pays for its place if it is used again within (break-even interval):\n\n";
    let mut table = Table::new(&["  keep on", "instead of", "within", "of the trace's repeated uses"]);
    for Interval { tier, instead_of, seconds, of_reuse } in &guidance.intervals {
        let within = if *seconds <= 0.0 { "never".to_owned() } else { time(*seconds) };
        table.row(vec![format!("  {tier}"), instead_of.clone(), within, percent(*of_reuse)]);
    }
    text += &table.render();
    text += &format!(
        "\n  Decoding {} such sequences takes {:.1} ms a token. With a share of their KV cache outside HBM it takes longer by:\n\n",
        guidance.batch, guidance.step_ms
    );
    let mut table = Table::new(&["  tier", "share", "fetched once in 16 steps", "fetched for each step"]);
    for row in &guidance.decode {
        let cells = [percent(row.share), overhead(row.fetched_once), overhead(row.fetched_always)];
        table.row(std::iter::once(format!("  {}", row.tier)).chain(cells).collect());
    }
    text + &table.render()
}

fn endurance(report: &Report<'_>) -> String {
    let configuration = &report.plan.chosen.configuration;
    let rejected = &report.plan.rejected;
    let mut text = "ENDURANCE\n\n".to_owned();
    let (bytes, years) = (report.chosen.ssd_bytes_per_day, report.chosen.ssd_years);
    match (configuration.drives(report.estimator.machine), bytes) {
        (Some((class, count)), Some(bytes)) => {
            text += &format!(
                "  {count} × {} in each node, rated for {} drive writes a day over 5 years ({:.0} TB written).\n  The busiest \
                 node writes {:.2} TB a day to each drive: {:.2} drive writes a day, {} years of life.\n",
                class.name,
                class.drive_writes_per_day,
                class.rated_bytes() / 1e12,
                bytes / 1e12,
                bytes / class.bytes as f64,
                years_text(years)
            );
            if configuration.admission == AdmissionMode::SecondUse {
                text += "  Admission second_use writes a block only when it is used a second time.\n";
            }
        }
        _ => text += "  The plan has no SSDs.\n",
    }
    text += &format!(
        "  Refused: {} configurations whose SSDs wear out within {} years, {} with too slow SSDs, {} with a too slow cold\n  store.\n",
        rejected.wear, report.estimator.years, rejected.ssd_bandwidth, rejected.cold_bandwidth
    );
    text
}

fn years_text(years: Option<f64>) -> String {
    match years {
        Some(years) if years > 50.0 => "more than 50".to_owned(),
        Some(years) => format!("{years:.1}"),
        None => "-".to_owned(),
    }
}

fn assumptions(report: &Report<'_>) -> String {
    let load = report.estimator.load;
    let mut text = format!(
        "ASSUMPTIONS\n\n  {}: {} requests, {} references to {} blocks of {} tokens.\n  Prices are those of an hour in the \
         hardware profiles, with a month of 730 hours.\n  Steps of engines are a lower bound: no kernel launches, no collectives.\n  Load and price of tokens are closed formulas with the hits of the replays. \
         Blocks in HBM need no computation\n  and no load.\n",
        report.trace,
        load.recorded.requests,
        load.recorded.references,
        load.recorded.distinct,
        load.recorded.block_tokens
    );
    text += &samples(report);
    if load.share < 1.0 {
        text += &format!(
            "  Hits by capacity are from {} of {} sessions, {} of the references (seed {}), with caches scaled alike.\n",
            load.sessions_replayed,
            load.sessions,
            percent(load.share),
            report.seed
        );
    }
    text += &replayed_part(report);
    text += &cold_store(report);
    text
}

/// Bytes and price of the cold store in the plan, or in an alternative.
fn cold_store(report: &Report<'_>) -> String {
    let shown = [&report.chosen].into_iter().chain(&report.alternatives).chain(&report.steps);
    let Some(cold) = shown.filter_map(|timed| timed.cold).next() else { return String::new() };
    let (machine, load) = (report.estimator.machine, report.estimator.load);
    let month = cold.usd_per_hour(machine, load) * HOURS_PER_MONTH;
    format!(
        "  The cold store holds {:.1} TB at the end of the replays, and moves {:.1} TB (written) and {:.1} TB (read) a day: {} \
         USD\n  a month for storage, bundles written and blocks read. Agents use none yet, so its bandwidth, its latency \
         and the\n  choice between load and computation are estimates.\n",
        cold.stored_bytes / 1e12,
        cold.written_bytes_per_day / 1e12,
        cold.read_bytes_per_day / 1e12,
        usd(month)
    )
}

/// Blocks and samples of the replays.
fn samples(report: &Report<'_>) -> String {
    let load = report.estimator.load;
    let mut text = String::new();
    let joined = load.block_tokens() / load.recorded.block_tokens;
    if joined > 1 {
        text += &format!(
            "  Replays join {joined} blocks of the trace to one of {} tokens; the rest of a prompt is computed.\n",
            load.block_tokens()
        );
    }
    let samples = report.chosen.ttft_means.len();
    if samples > 1 {
        text += &format!(
            "  ± is the interval of 95 % of a mean, from {samples} replays with the same sessions {}on other nodes.\n",
            if load.has_random_starts { "at other times " } else { "" }
        );
    }
    text
}

/// Which part of the trace was replayed with time, unless it is the whole one.
fn replayed_part(report: &Report<'_>) -> String {
    let load = report.estimator.load;
    let mut all = [&report.chosen].into_iter().chain(&report.steps).chain(&report.alternatives);
    let Some(part) = all.find_map(|timed| Some(timed.part).filter(|part| !part.is_whole())) else {
        return String::new();
    };
    let time_text = if part.of_time < 1.0 {
        let span = load.span_ms as f64 / 1e3;
        format!(", in the first {} of {}: caches begin empty", time(span * part.of_time), time(span))
    } else {
        String::new()
    };
    format!(
        "  Replays with time have a part of the nodes with their part of the sessions, unscaled. Of the first one:\n  {} of {} \
         nodes, {} of {} sessions, {} of the references (seed {}){time_text}.\n",
        part.nodes,
        part.of_nodes,
        part.sessions,
        load.sessions,
        percent(part.references as f64 / load.references as f64),
        report.seed
    )
}
