//! Laws of plans, and figures that follow from the profiles.

mod cold;
mod goals;
mod loads;

use super::*;
use crate::replay::{ReadOptions, Trace, TraceBuilder, TraceRequest};

/// Requests of some users that return with a longer prompt, within an hour.
fn trace(users: u64, turns: u64, gap_ms: u64) -> Trace {
    let mut builder = TraceBuilder::new(ReadOptions { block_tokens: Some(512), ..ReadOptions::default() });
    for turn in 0..turns {
        for user in 0..users {
            let hash_ids: Vec<u64> = (0..8 * (turn + 1)).map(|block| user * 10_000 + block).collect();
            let request = TraceRequest {
                at_ms: (turn * users + user) * gap_ms,
                input_tokens: hash_ids.len() as u64 * 512,
                output_tokens: 200,
                hash_ids: &hash_ids,
                ..TraceRequest::default()
            };
            builder.add("here", &request).expect("valid");
        }
    }
    builder.finish("trace").expect("valid")
}

const RANDOM: Randomness = Randomness { seed: 3, spread_ms: 600_000 };

const FASTEST: Goal = Goal { cold: ColdStore::Compared, ttft_seconds: None };

struct World {
    machine: Machine,
    load: Load,
    curves: Curves,
}

fn world(hardware: &str, trace: &Trace) -> World {
    let machine = Machine::new(hardware, "llama-3-8b").expect("valid");
    let load = Load::new(trace, &machine, Limits::default(), RANDOM).expect("valid");
    let block_bytes = machine.model.kv_bytes_per_token() * load.block_tokens();
    let curves = Curves::new(&load, block_bytes);
    World { machine, load, curves }
}

impl World {
    fn estimator(&self, years: f64) -> Estimator<'_> {
        Estimator::new(&self.machine, &self.load, &self.curves, years)
    }
}

fn budget(text: &str) -> Budget {
    text.parse().expect("valid")
}

#[test]
fn a_larger_budget_never_gives_a_worse_plan() {
    let world = world("h100", &trace(300, 6, 400));
    let estimator = world.estimator(3.0);
    let mut before: Option<Shortlist> = None;
    for usd in [4_000, 5_000, 6_000, 8_000, 11_000, 15_000, 20_000, 30_000, 50_000, 90_000] {
        let list = shortlist(&estimator, budget(&usd.to_string()), FASTEST).expect("affordable");
        let now = &list.best.estimate;
        assert!(now.usd_per_hour * HOURS_PER_MONTH <= f64::from(usd), "{now:?}");
        if let Some(before) = &before {
            let before = &before.best.estimate;
            assert!(now.served >= before.served, "{before:?} {now:?}");
            match (before.ttft_mean, now.ttft_mean) {
                (Some(before), Some(now)) => assert!(now <= before, "{now} after {before} at {usd}"),
                (before, now) => assert!(before.is_none(), "{now:?} after {before:?}"),
            }
        }
        before = Some(list);
    }
    let last = before.expect("plans");
    assert!(last.best.estimate.ttft_mean.is_some() && last.best.configuration.dram_gb > 0, "{last:?}");
}

#[test]
fn a_ttft_that_is_short_enough_is_not_bought_shorter() {
    let world = world("h100", &trace(300, 6, 400));
    let estimator = world.estimator(3.0);
    let fastest = shortlist(&estimator, budget("90000"), FASTEST).expect("affordable").best.estimate;
    let seconds = fastest.ttft_mean.expect("served") * 2.0;
    let goal = Goal { ttft_seconds: Some(seconds), ..FASTEST };
    let enough = shortlist(&estimator, budget("90000"), goal).expect("affordable").best.estimate;
    assert!(enough.usd_per_hour < fastest.usd_per_hour, "{enough:?} {fastest:?}");
    assert!(enough.ttft_mean.expect("served") <= seconds);
    // One node less would be cheaper, and too slow.
    let all = Configuration::all(&world.machine, enough.usd_per_hour * 0.999);
    let cheaper = all.iter().filter(|one| !one.cold);
    let estimates = cheaper.map(|one| estimator.estimate(one)).filter(|one| one.unusable.is_none());
    let shortest = estimates.filter_map(|one| one.ttft_mean).fold(f64::INFINITY, f64::min);
    assert!(shortest > seconds, "{shortest} of cheaper ones, although {seconds} is enough");
}

#[test]
fn equal_inputs_give_equal_plans() {
    let make = || {
        let world = world("h100", &trace(40, 4, 500));
        let estimator = world.estimator(3.0);
        let list = shortlist(&estimator, budget("40000"), FASTEST).expect("affordable");
        let replayed = choose(&estimator, (budget("40000"), FASTEST), list, |runs| {
            runs.iter().map(|(one, sample)| Timed::new(&estimator, one, *sample)).collect()
        });
        let guidance = Guidance::new(&estimator, &replayed.plan.chosen.configuration);
        format!("{replayed:?} {guidance:?}")
    };
    assert_eq!(make(), make());
}

#[test]
fn a_budget_below_the_price_of_a_node_names_the_price() {
    let world = world("h100", &trace(10, 3, 1_000));
    let error = shortlist(&world.estimator(3.0), budget("10"), FASTEST).expect_err("too small").to_string();
    // 5 USD an hour for 730 hours.
    assert!(
        error.contains("buys nothing") && error.contains("3650.00") && error.contains("--budget 3650"),
        "{error}"
    );
}

#[test]
fn plans_do_not_wear_out_ssds_unless_the_life_is_short() {
    let world = world("h100", &trace(400, 8, 100));
    let list = |years: f64| shortlist(&world.estimator(years), budget("60000"), FASTEST).expect("affordable");
    let short = list(0.000_1);
    assert_eq!((short.rejected.wear, &short.rejected.worn), (0, &None));
    let life = short.candidates.iter().filter_map(|one| one.estimate.ssd_years).fold(f64::INFINITY, f64::min);
    assert!(life.is_finite(), "SSDs are not among the best: the trace does not test them");
    // The same SSDs must last longer than they do.
    let long = list(life * 1.01);
    assert!(long.rejected.wear > 0);
    let lives = long.candidates.iter().filter_map(|one| one.estimate.ssd_years);
    assert!(lives.clone().all(|years| years >= life * 1.01), "{:?} of {life}", lives.collect::<Vec<_>>());
}

#[test]
fn the_step_to_more_ssds_is_usable_if_a_class_and_an_admission_last() {
    let world = world("h100", &trace(400, 8, 100));
    let now = Configuration { dram_gb: 32, ..Configuration::without_cache(6) };
    let candidates = now.next_ssds(&world.machine);
    let estimator = world.estimator(3.0);
    let lives = candidates.iter().filter_map(|one| estimator.estimate(one).ssd_years);
    let (least, most) =
        lives.fold((f64::MAX, 0.0_f64), |(least, most), years| (least.min(years), most.max(years)));
    assert!(candidates.len() >= 4 && least < most, "{least} {most}");
    // Some of the SSDs last so long, others do not.
    let estimator = world.estimator((least * most).sqrt());
    let chosen = Evaluated { estimate: estimator.estimate(&now), configuration: now };
    let more = choice::more_ssds(&estimator, &chosen).expect("SSDs can be added");
    assert_eq!(estimator.estimate(&more).unusable, None, "{more:?}");
}

#[test]
fn the_price_at_full_load_is_of_configurations_that_bear_it() {
    // Requests that share no block: their times do not depend on the rate.
    let at_gap = |gap_ms: u64| world("h100", &trace(400, 1, gap_ms));
    let one = Configuration {
        dram_gb: 32,
        ssds: Some(Ssds { class: 1, count: 1 }),
        ..Configuration::without_cache(2)
    };
    let slow = at_gap(1_000);
    assert_eq!(slow.estimator(10.0).usd_per_million_tokens_max(&one), None);
    let estimator = slow.estimator(0.000_1);
    let price = estimator.usd_per_million_tokens_max(&one).expect("usable");
    let busy = estimator.estimate(&one).busy;
    assert!(busy < BUSY_MAX / 4.0, "{busy}");
    // The same requests at the rate that the nodes bear, in whole milliseconds.
    let gap_ms = (1_000.0 * busy / BUSY_MAX).ceil();
    let full = at_gap(gap_ms as u64);
    let estimate = full.estimator(0.000_1).estimate(&one);
    assert!((estimate.busy / BUSY_MAX - 1.0).abs() < 0.02 && estimate.served > 0.99, "{estimate:?}");
    assert!((price / estimate.usd_per_million_tokens - 1.0).abs() < 0.02, "{price} {estimate:?}");
}

fn limits(timed_references: u64) -> Limits {
    Limits { references: 1 << 40, timed_references, samples: 2 }
}

/// Sessions that share no blocks, with some turns a minute apart.
fn sessions(count: u32) -> Trace {
    let options = ReadOptions {
        scope: crate::replay::IdScope::Session,
        block_tokens: Some(512),
        sort: true,
        ..ReadOptions::default()
    };
    let mut builder = TraceBuilder::new(options);
    for session in 0..count {
        for turn in 0..5_u64 {
            let hash_ids: Vec<u64> = (0..8 * (turn + 1)).collect();
            let request = TraceRequest {
                at_ms: u64::from(session) * 1_000 + turn * 60_000,
                session: Some(session),
                input_tokens: hash_ids.len() as u64 * 512,
                output_tokens: 100,
                hash_ids: &hash_ids,
                ..TraceRequest::default()
            };
            builder.add("here", &request).expect("valid");
        }
    }
    builder.finish("trace").expect("valid")
}

#[test]
fn nodes_of_a_sample_have_their_part_of_the_sessions_and_their_real_size() {
    // 400 sessions of 120 references.
    let machine = Machine::new("h100", "llama-3-8b").expect("valid");
    let load = |timed_references| {
        Load::new(&sessions(400), &machine, limits(timed_references), RANDOM).expect("valid")
    };
    let (part, trace) = {
        let load = load(48_000);
        let (part, trace) = Part::new(&load, 10, 0);
        (part, trace.into_owned())
    };
    assert!(part.is_whole() && trace.references() == 48_000, "{part:?}");
    let large = load(12_000);
    let (part, _) = Part::new(&large, 10, 0);
    assert_eq!((part.nodes, part.sessions, part.references), (2, 80, 9_600));
    assert!(part.of_time >= 1.0 && !part.is_whole(), "{part:?}");
    // At least 32 sessions: one node of ten has 40, although the limit allows less than a node.
    let small = load(3_000);
    let (part, _) = Part::new(&small, 10, 0);
    assert_eq!((part.nodes, part.sessions, part.references, part.of_time), (1, 40, 4_800, 1.0));
    // One node has all sessions, so the replay ends after twice the limit.
    let (part, trace) = Part::new(&small, 1, 0);
    assert!(part.nodes == 1 && part.references <= 6_000 && part.references > 5_900, "{part:?}");
    assert!(part.of_time < 0.5 && trace.requests().len() as u64 == part.requests, "{part:?}");
}

#[test]
fn a_part_of_the_nodes_has_the_results_of_all() {
    let timed = |timed_references| {
        let machine = Machine::new("h100", "llama-3-8b").expect("valid");
        let load = Load::new(&sessions(400), &machine, limits(timed_references), RANDOM).expect("valid");
        let curves = Curves::new(&load, machine.model.kv_bytes_per_token() * load.block_tokens());
        let estimator = Estimator::new(&machine, &load, &curves, 3.0);
        let one = Configuration { dram_gb: 32, ..Configuration::without_cache(10) };
        Timed::new(&estimator, &one, 0)
    };
    let (all, part) = (timed(48_000), timed(16_000));
    assert_eq!((all.part.nodes, part.part.nodes), (10, 3));
    assert!((all.hit_ratio - part.hit_ratio).abs() < 0.05, "{} {}", all.hit_ratio, part.hit_ratio);
    assert!((all.hbm_ratio - part.hbm_ratio).abs() < 0.1, "{} {}", all.hbm_ratio, part.hbm_ratio);
    assert!((part.ttft(0.5) / all.ttft(0.5) - 1.0).abs() < 0.2, "{} {}", all.ttft(0.5), part.ttft(0.5));
}

#[test]
fn blocks_of_a_large_trace_are_joined_and_its_samples_have_other_starts() {
    let mut builder = TraceBuilder::new(ReadOptions::default());
    let hash_ids: Vec<u64> = (0..1_000).collect();
    let request = |t: u64| format!("{{\"t\": {t}, \"in\": 64000, \"out\": 9, \"hash_ids\": {hash_ids:?}}}");
    let session = format!(
        "{{\"block_size\": 64, \"hash_id_scope\": \"local\", \"requests\": [{}, {}]}}",
        request(0),
        request(5)
    );
    for number in 0..10 {
        let name = number.to_string();
        crate::replay::read_session(&name, session.as_bytes(), &mut builder).expect("valid");
    }
    let trace = builder.finish("trace").expect("valid");
    let machine = Machine::new("h100", "llama-3-8b").expect("valid");
    let load = Load::new(&trace, &machine, limits(6_000), RANDOM).expect("valid");
    // 20,000 references of 64 tokens: a quarter is within the limit.
    assert_eq!((load.recorded.references, load.recorded.block_tokens), (20_000, 64));
    assert_eq!((load.references, load.distinct, load.block_tokens()), (5_000, 2_500, 256));
    let numbers = |sample| load.sample(sample).requests().iter().map(|one| one.session).collect::<Vec<_>>();
    assert_ne!(numbers(0), numbers(1));
    assert_eq!(load.sample(0).references(), load.sample(1).references());
}

#[test]
fn a_backlog_of_the_busiest_windows_is_in_the_estimate() {
    let of = |bursts: u64| {
        let mut builder =
            TraceBuilder::new(ReadOptions { block_tokens: Some(512), ..ReadOptions::default() });
        for number in 0..3_200_u64 {
            let hash_ids: Vec<u64> = (0..16).map(|block| number * 100 + block).collect();
            let second = if bursts > 1 { number / 200 * 200 + number % 200 / bursts } else { number };
            let request = TraceRequest {
                at_ms: second * 1_000,
                input_tokens: 16 * 512,
                output_tokens: 10,
                hash_ids: &hash_ids,
                ..TraceRequest::default()
            };
            builder.add("here", &request).expect("valid");
        }
        let world = world("h100", &builder.finish("trace").expect("valid"));
        let estimate = world.estimator(3.0).estimate(&Configuration::without_cache(1));
        (estimate.busy_peak, estimate.ttft_mean.expect("served"))
    };
    let (even, bursts) = (of(1), of(200));
    assert!(even.0 < 0.9 && bursts.1 > even.1, "{even:?} {bursts:?}");
}

#[test]
fn a_mean_is_clear_if_its_interval_has_one_sign() {
    let mean = Mean::new(&[1.0, 2.0, 3.0, 4.0]);
    // Deviation 1.29, and 3.182 for three degrees of freedom.
    assert!((mean.mean - 2.5).abs() < 1e-12 && (mean.half_width - 2.054).abs() < 1e-3, "{mean:?}");
    assert!(mean.is_clear() && !Mean::new(&[-1.0, 2.0, 3.0, 4.0]).is_clear());
    assert!(!Mean::new(&[1.0]).is_clear() && !Mean::new(&[0.0, 0.0]).is_clear());
}

/// Result of a replay with a TTFT.
fn timed(ttft: f64) -> Timed {
    Timed {
        hit_ratio: 0.0,
        hbm_ratio: 0.0,
        dram_ratio: 0.0,
        ssd_ratio: 0.0,
        cold_ratio: 0.0,
        utilisation: Utilisation { busy: 0.5, busy_peak: 0.5, served: 1.0 },
        cold: None,
        ttft_seconds: vec![ttft],
        ttft_means: vec![ttft],
        tpot_seconds: 0.0,
        ssd_bytes_per_day: None,
        ssd_years: None,
        part: Part { nodes: 1, of_nodes: 1, sessions: 1, requests: 1, references: 1, of_time: 1.0 },
    }
}

/// Plan whose replays have the TTFT of a function.
fn chosen_by(usd: &str, goal: Goal, ttft: impl Fn(&Configuration, usize) -> f64) -> Replayed {
    let world = world("h100", &trace(60, 4, 400));
    let estimator = world.estimator(3.0);
    let list = shortlist(&estimator, budget(usd), goal).expect("affordable");
    choose(&estimator, (budget(usd), goal), list, |runs| {
        runs.iter().map(|(one, sample)| timed(ttft(one, *sample))).collect()
    })
}

#[test]
fn replays_decide_and_no_affordable_change_is_better_than_the_plan() {
    // Nodes help, and DRAM makes it worse: estimates have the opposite.
    let ttft = |one: &Configuration| {
        100.0 / f64::from(one.nodes) + one.dram_gb as f64 / 10.0 + f64::from(one.ssds.is_some())
    };
    let replayed = chosen_by("60000", FASTEST, |one, sample| ttft(one) + sample as f64 / 100.0);
    let chosen = replayed.plan.chosen.configuration;
    assert!(chosen.dram_gb == 0 && chosen.nodes >= 12, "{chosen:?}");
    let plan = replayed.chosen;
    assert_eq!(plan.ttft_means.len(), 4);
    for (step, timed) in replayed.plan.steps.iter().zip(&replayed.steps) {
        let usd = step.changed.estimate.usd_per_hour * HOURS_PER_MONTH;
        assert!(usd > 60_000.0 || timed.ttft_mean() > plan.ttft_mean() / 1.11, "{step:?}");
    }
    // The cheapest one that is short enough.
    let goal = Goal { ttft_seconds: Some(26.0), ..FASTEST };
    let enough = chosen_by("60000", goal, |one, _| ttft(one)).plan.chosen.configuration;
    assert_eq!((enough.nodes, enough.dram_gb), (4, 0));
}

#[test]
fn differences_of_samples_are_in_pairs() {
    let offsets = [5.0, 50.0, 20.0, 90.0];
    let replayed = chosen_by("60000", FASTEST, |one, sample| offsets[sample] + 40.0 / f64::from(one.nodes));
    let plan = replayed.chosen;
    let place = replayed.plan.steps.iter().position(|step| step.name == "one node less").expect("a change");
    let less = &replayed.steps[place];
    assert!(plan.ttft_interval().half_width > 40.0 && less.difference(&plan).is_clear());
}

#[test]
fn hits_grow_with_capacity_and_end_at_the_unlimited_cache() {
    let world = world("h100", &trace(200, 5, 500));
    let ratios = world.curves.ratios(reprise_policy::eviction::EvictionKind::Lru);
    assert!(ratios.windows(2).all(|pair| pair[0] <= pair[1]), "{ratios:?}");
    let unlimited = world.curves.unlimited_ratio();
    assert!((ratios[ratios.len() - 1] - unlimited).abs() < 1e-12);
    // 8 + 16 + 24 + 32 of the 8 + 16 + 24 + 32 + 40 blocks of a user were there before.
    assert!((unlimited - 80.0 / 120.0).abs() < 1e-12, "{unlimited}");
    assert!(
        world.curves.bound.iter().zip(&ratios).all(|(bound, lru)| bound >= lru),
        "{:?}",
        world.curves.bound
    );
}

#[test]
fn break_even_intervals_follow_the_prices() {
    let world = world("h100", &trace(100, 5, 500));
    let estimator = world.estimator(3.0);
    let chosen = Configuration { dram_gb: 256, ..Configuration::without_cache(1) };
    let guidance = Guidance::new(&estimator, &chosen);
    let find = |tier: &str, instead_of: &str| {
        let is_pair = |one: &&Interval| one.tier.contains(tier) && one.instead_of.contains(instead_of);
        guidance.intervals.iter().find(is_pair).expect("a pair").seconds
    };
    // A block of 64 MiB: 9.6 ms from an SSD of 7 GB/s, 1.3 ms over the link of 50 GB/s; 5.31 USD against 0.0088 and
    // 0.000082 USD an hour and GB.
    let seconds = (9.587e-3 * 5.3149 - 1.342e-3 * 5.0) / (0.067_109 * (0.0088 - 0.000_082));
    assert!((find("DRAM", "SSD") / seconds - 1.0).abs() < 0.02, "{} {seconds}", find("DRAM", "SSD"));
    assert!(find("SSD", "computing") > find("DRAM", "computing"));
    assert!(guidance.bubbles.windows(2).all(|pair| pair[0].compute_ms >= pair[1].compute_ms));
}

#[test]
fn traces_without_duration_or_blocks_are_refused() {
    let machine = Machine::new("h100", "llama-3-8b").expect("valid");
    let refused = |trace: &Trace| {
        Load::new(trace, &machine, Limits::default(), RANDOM).expect_err("refused").to_string()
    };
    let error = refused(&trace(5, 1, 0));
    assert!(error.contains("all 5 requests arrive at 0 ms"), "{error}");
    let mut builder = TraceBuilder::new(ReadOptions { block_tokens: Some(512), ..ReadOptions::default() });
    builder.add("here", &TraceRequest { input_tokens: 9, ..TraceRequest::default() }).expect("valid");
    let error = refused(&builder.finish("trace").expect("valid"));
    assert!(error.contains("512 tokens"), "{error}");
}

#[test]
fn a_model_that_does_not_fit_names_memory_and_remedy() {
    // 8 accelerators of 24 GB.
    let large = include_str!("../../profiles/models/llama-3-70b.toml").replace("= 70.6", "= 170.6");
    let mut files = crate::serving::profiles::ProfileFiles::default();
    files.add("large.toml", large);
    let error = Machine::with_files("cpu", "large.toml", &files).expect_err("too large").to_string();
    assert!(error.contains("341 GB of weights") && error.contains("192 GB of 8 × cpu"), "{error}");
    assert!(error.contains("--hardware with more memory"), "{error}");
    assert_eq!(Machine::new("cpu", "llama-3-70b").expect("fits").accelerators, 8);
    let error = Machine::new("h1000", "llama-3-8b").expect_err("unknown").to_string();
    assert!(error.contains("unknown accelerator 'h1000'") && error.contains("h100"), "{error}");
    let error = Machine::new("h100", "gpt-5").expect_err("unknown").to_string();
    assert!(error.contains("unknown model 'gpt-5'") && error.contains("layout"), "{error}");
    assert_eq!(Machine::new("h100", "llama-3-70b").expect("fits").accelerators, 4);
    let named = Machine::new("h100+ps1010x2", "llama-3-8b").expect("fits");
    assert_eq!(named.ssds.iter().map(|class| class.name.as_str()).collect::<Vec<_>>(), ["ps1010x2"]);
}
