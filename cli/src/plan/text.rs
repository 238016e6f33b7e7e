//! Text of a plan for people: the recommendation first, then the reasons.

use reprise_policy::admission::AdmissionMode;
use reprise_simulator::plan::{
    BUSY_MAX, Configuration, Evaluated, HOURS_PER_MONTH, HOURS_PER_YEAR, Interval, Machine, Mean, Step, Timed,
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
fn worn_years(report: &Report<'_>, step: &Step, timed: Option<&Timed>) -> Option<f64> {
    let years = timed.map_or(step.changed.estimate.ssd_years, |timed| timed.ssd_years);
    years.filter(|years| *years < report.estimator.years)
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
    text += &format!(
        "  serves    {} of {:.2} requests a second; nodes are busy for {} of the time\n",
        if estimate.served >= 1.0 { "all".to_owned() } else { percent(estimate.served) },
        load.requests_per_second,
        percent(estimate.busy.min(1.0))
    );
    text += &peak(report);
    let refused = report.plan.refused_requests;
    if refused > 0 {
        text += &format!(
            "            without {refused} of {} requests, which exceed the memory of a node's accelerators\n",
            load.requests
        );
    }
    text += &results(report);
    text += &format!("  price     {:.3} USD for a million tokens\n", estimate.usd_per_million_tokens);
    if estimate.ttft_mean.is_none() {
        text += "\n  The budget does not serve the whole load: queues grow without bound, and the TTFT is that of this trace\n  only. WHAT THE NEXT DOLLAR BUYS has the price of one more node.\n";
    }
    text
}

/// What the busiest window needs, if it has more work than the nodes can do.
fn peak(report: &Report<'_>) -> String {
    let Evaluated { configuration, estimate } = &report.plan.chosen;
    let is_burst = report.estimator.load.window_seconds < PEAK_SECONDS_MIN;
    if is_burst || estimate.busy_peak <= BUSY_MAX {
        return String::new();
    }
    format!(
        "            the busiest {} have {} of the work that the nodes can do: requests queue, and the\n            TTFT \
         is mostly wait; by estimate, about {:.0} such nodes have no queues\n",
        time(report.estimator.load.window_seconds),
        percent(estimate.busy_peak),
        (f64::from(configuration.nodes) * estimate.busy_peak / BUSY_MAX).ceil()
    )
}

/// TTFT and hits of the plan: with time, or estimates.
fn results(report: &Report<'_>) -> String {
    let estimate = &report.plan.chosen.estimate;
    let Some(timed) = &report.chosen else {
        let ratio = |ratio: f64| format!("~{}", percent(ratio));
        return format!(
            "  TTFT      {} mean; an estimate (~), because the replay with time has no cold store\n  hits      {} of the \
             prompts' blocks: {} in DRAM, {} on SSDs, {} in the cold store\n",
            mean_text(&report.plan.chosen, None),
            ratio(estimate.hit_ratio),
            ratio(estimate.dram_ratio),
            ratio(estimate.ssd_ratio),
            ratio(estimate.cold_ratio)
        );
    };
    format!(
        "  TTFT      {} mean{}, {} median, {} p95, {} p99; {} for an output token\n  hits      {} of the prompts' blocks: {} in \
         HBM, {} in DRAM, {} on SSDs\n",
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

fn hits_text(one: &Evaluated, timed: Option<&Timed>) -> String {
    timed.map_or_else(|| format!("~{}", percent(one.estimate.hit_ratio)), |timed| percent(timed.hit_ratio))
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
    let mut row = |name: &str, one: &Evaluated, timed: Option<&Timed>| {
        table.row(vec![
            format!("  {name}"),
            short(&one.configuration, machine),
            usd(one.estimate.usd_per_hour * HOURS_PER_MONTH),
            percent(one.estimate.served),
            hits_text(one, timed),
            mean_text(one, timed),
            timed.map_or("-".to_owned(), |timed| time(timed.ttft(0.95))),
            format!("{:.3}", one.estimate.usd_per_million_tokens),
        ]);
    };
    for ((name, one), timed) in plan.alternatives.iter().zip(&report.alternatives) {
        row(name, one, timed.as_ref());
    }
    row("the plan", &plan.chosen, report.chosen.as_ref());
    let mut text = format!(
        "WHY\n\n  {} configurations cost at most the budget, and {} candidates and changes were replayed. The plan is the\n  cheapest one \
         with a mean TTFT within 10 % of the shortest replayed one, or of at most --ttft.\n\n{}",
        plan.compared,
        plan.replayed,
        table.render()
    );
    text += "  DRAM and SSDs are those of each node. ~ is an estimate: the replay with time has no cold store, and agents use\n  none yet.\n";
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

fn mean_text(one: &Evaluated, timed: Option<&Timed>) -> String {
    match (timed, one.estimate.ttft_mean) {
        (Some(timed), _) => time(timed.ttft_mean()),
        (None, Some(mean)) => format!("~{}", time(mean)),
        (None, None) => "overloaded".to_owned(),
    }
}

/// Mean TTFT that a step saves, in seconds: with time if both were replayed, otherwise the estimate.
pub(super) fn saved(report: &Report<'_>, step: &Step, timed: Option<&Timed>) -> Option<Mean> {
    match (&report.chosen, timed) {
        (Some(chosen), Some(timed)) => Some(chosen.difference(timed)),
        _ => step.ttft_seconds.map(|seconds| Mean { mean: -seconds, half_width: 0.0 }),
    }
}

/// Whether a step saves time, and more than samples differ by chance.
pub(super) fn is_gain(saved: &Mean) -> bool {
    saved.mean >= GAIN_MIN && saved.is_clear()
}

/// Change of the mean TTFT by a step, with its interval.
fn change_text(report: &Report<'_>, timed: Option<&Timed>, saved: Option<Mean>) -> String {
    let is_replayed = report.chosen.is_some() && timed.is_some();
    saved.map_or("-".to_owned(), |saved| {
        let text = signed(-saved.mean, time(-saved.mean));
        match is_replayed && saved.half_width.is_finite() {
            true => format!("{text} ± {}", time(saved.half_width)),
            false => format!("~{text}"),
        }
    })
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
        let saved = saved(report, step, timed.as_ref());
        let per_ms = saved.filter(is_gain).map(|saved| step.usd_per_month / (saved.mean * 1e3));
        let worn = worn_years(report, step, timed.as_ref());
        let is_usable = worn.is_none() && step.name != "a cold store";
        let is_bought = is_usable && step.usd_per_month > 0.0;
        if let Some((per_ms, saved)) = per_ms.zip(saved).filter(|_| is_bought)
            && best.as_ref().is_none_or(|(least, _, _)| per_ms < *least)
        {
            best = Some((per_ms, step, saved.mean));
        }
        table.row(vec![
            format!("  {}", step.name),
            target(report, step),
            signed(step.usd_per_month, usd(step.usd_per_month)),
            hits_text(&step.changed, timed.as_ref()),
            mean_text(&step.changed, timed.as_ref()),
            change_text(report, timed.as_ref(), saved),
            per_ms.filter(|_| is_bought).map_or("-".to_owned(), usd),
            match worn {
                Some(years) => format!("SSDs wear out in {years:.1} years"),
                None if step.name == "a cold store" => "agents use none yet".to_owned(),
                None if saved.is_some_and(|saved| !saved.is_clear()) => "not above noise".to_owned(),
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

fn target(report: &Report<'_>, step: &Step) -> String {
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
        "a cold store" => format!("blocks of {}", time(report.estimator.load.cold_seconds())),
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
    let Evaluated { configuration, estimate } = &report.plan.chosen;
    let rejected = &report.plan.rejected;
    let mut text = "ENDURANCE\n\n".to_owned();
    let timed = report.chosen.as_ref();
    let bytes = timed.map_or(estimate.ssd_bytes_per_day, |timed| timed.ssd_bytes_per_day);
    let years = timed.map_or(estimate.ssd_years, |timed| timed.ssd_years);
    match (configuration.drives(report.estimator.machine), bytes) {
        (Some((class, count)), Some(bytes)) => {
            text += &format!(
                "  {count} × {} in each node, rated for {} drive writes a day over 5 years ({:.0} TB written).\n  {} \
                 writes {:.2} TB a day to each drive: {:.2} drive writes a day, {} years of life.\n",
                class.name,
                class.drive_writes_per_day,
                class.rated_bytes() / 1e12,
                if timed.is_some() { "The busiest node" } else { "By estimate, a node" },
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
    let machine = report.estimator.machine;
    let mut text = format!(
        "ASSUMPTIONS\n\n  {}: {} requests, {} references to {} blocks of {} tokens.\n  Prices are those of an hour in the \
         hardware profiles, with a month of 730 hours.\n  Steps of engines are a lower bound: no kernel launches, no collectives.\n",
        report.trace,
        load.requests,
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
    if load.tokens_max > u64::from(machine.model.context) {
        text += &format!(
            "  The longest request has {} tokens, more than the context of {} of {}: it is planned as if it were served.\n",
            load.tokens_max, machine.model.context, machine.model.title
        );
    }
    text += &replayed_part(report);
    let cold = |one: &Evaluated| one.configuration.cold;
    let plan = &report.plan;
    let compared =
        plan.alternatives.iter().map(|(_, one)| one).chain(plan.steps.iter().map(|step| &step.changed));
    if compared.chain([&plan.chosen]).any(cold) {
        text += &format!(
            "  A cold store keeps each block for {}: {:.1} TB at the rate of the trace's new blocks. Its price is that of\n  \
             storage: requests and transfers are not included.\n",
            time(load.cold_seconds()),
            load.cold_blocks() * report.estimator.block_bytes / 1e12
        );
    }
    text
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
    let samples = report.chosen.iter().chain(report.alternatives.iter().flatten());
    let samples = samples.map(|timed| timed.ttft_means.len()).max().unwrap_or(0);
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
    let all =
        report.chosen.iter().chain(report.steps.iter().flatten()).chain(report.alternatives.iter().flatten());
    let Some(part) = all.map(|timed| timed.part).find(|part| !part.is_whole()) else { return String::new() };
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
