//! Laws of plans, and figures that follow from the profiles.

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

const FASTEST: Goal = Goal { cold: ColdStore::Compared, ttft_seconds: 0.0 };

struct World {
    machine: Machine,
    load: Load,
    curves: Curves,
}

fn world(hardware: &str, trace: Trace) -> World {
    let machine = Machine::new(hardware, "llama-3-8b").expect("valid");
    let load = Load::new(trace, 0).expect("valid");
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
    let world = world("h100", trace(300, 6, 400));
    let estimator = world.estimator(3.0);
    let mut before: Option<Plan> = None;
    for usd in [4_000, 5_000, 6_000, 8_000, 11_000, 15_000, 20_000, 30_000, 50_000, 90_000] {
        let plan = plan(&estimator, budget(&usd.to_string()), FASTEST).expect("affordable");
        let now = &plan.chosen.estimate;
        assert!(now.usd_per_hour * HOURS_PER_MONTH <= f64::from(usd), "{now:?}");
        if let Some(before) = &before {
            let before = &before.chosen.estimate;
            assert!(now.served >= before.served, "{before:?} {now:?}");
            match (before.ttft_mean, now.ttft_mean) {
                (Some(before), Some(now)) => assert!(now <= before, "{now} after {before} at {usd}"),
                (before, now) => assert!(before.is_none(), "{now:?} after {before:?}"),
            }
        }
        before = Some(plan);
    }
    let last = before.expect("plans");
    assert!(last.chosen.estimate.ttft_mean.is_some() && last.chosen.configuration.dram_gb > 0, "{last:?}");
}

#[test]
fn a_ttft_that_is_short_enough_is_not_bought_shorter() {
    let world = world("h100", trace(300, 6, 400));
    let estimator = world.estimator(3.0);
    let fastest = plan(&estimator, budget("90000"), FASTEST).expect("affordable").chosen.estimate;
    let goal = Goal { ttft_seconds: fastest.ttft_mean.expect("served") * 2.0, ..FASTEST };
    let enough = plan(&estimator, budget("90000"), goal).expect("affordable").chosen.estimate;
    assert!(enough.usd_per_hour < fastest.usd_per_hour, "{enough:?} {fastest:?}");
    assert!(enough.ttft_mean.expect("served") <= goal.ttft_seconds);
}

#[test]
fn equal_inputs_give_equal_plans() {
    let make = || {
        let world = world("h100", trace(100, 5, 500));
        let estimator = world.estimator(3.0);
        let plan = plan(&estimator, budget("40000"), FASTEST).expect("affordable");
        let guidance = Guidance::new(&estimator, &plan.chosen.configuration);
        format!("{plan:?} {guidance:?} {:?}", estimator.ttfts(&plan.chosen.configuration))
    };
    assert_eq!(make(), make());
}

#[test]
fn a_budget_below_the_price_of_a_node_names_the_price() {
    let world = world("h100", trace(10, 3, 1_000));
    let error = plan(&world.estimator(3.0), budget("10"), FASTEST).expect_err("too small").to_string();
    // 5 USD an hour for 730 hours.
    assert!(
        error.contains("buys nothing") && error.contains("3650.00") && error.contains("--budget 3650"),
        "{error}"
    );
}

#[test]
fn plans_do_not_wear_out_ssds_unless_the_life_is_short() {
    let world = world("h100", trace(400, 8, 100));
    let long = plan(&world.estimator(5.0), budget("200000"), FASTEST).expect("affordable");
    let years = |plan: &Plan| plan.chosen.estimate.ssd_years;
    assert!(years(&long).is_none_or(|years| years >= 5.0), "{long:?}");
    assert!(long.rejected.wear > 0);
    let short = plan(&world.estimator(0.01), budget("200000"), FASTEST).expect("affordable");
    assert_eq!(short.rejected.wear, 0);
    assert!(short.ttft_best <= long.ttft_best, "{short:?} {long:?}");
}

#[test]
fn hits_grow_with_capacity_and_end_at_the_unlimited_cache() {
    let world = world("h100", trace(200, 5, 500));
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
    let world = world("h100", trace(100, 5, 500));
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
    let error = Load::new(trace(5, 1, 0), 0).expect_err("no duration").to_string();
    assert!(error.contains("all 5 requests arrive at 0 ms"), "{error}");
    let mut builder = TraceBuilder::new(ReadOptions { block_tokens: Some(512), ..ReadOptions::default() });
    builder.add("here", &TraceRequest { input_tokens: 9, ..TraceRequest::default() }).expect("valid");
    let error = Load::new(builder.finish("trace").expect("valid"), 0).expect_err("no blocks").to_string();
    assert!(error.contains("512 tokens"), "{error}");
}

#[test]
fn a_model_that_does_not_fit_names_memory_and_remedy() {
    let error = Machine::new("cpu", "llama-3-70b").map(|machine| machine.accelerators);
    assert_eq!(error, Ok(8));
    let error = Machine::new("h1000", "llama-3-8b").expect_err("unknown").to_string();
    assert!(error.contains("unknown accelerator 'h1000'") && error.contains("h100"), "{error}");
    let error = Machine::new("h100", "gpt-5").expect_err("unknown").to_string();
    assert!(error.contains("unknown model 'gpt-5'") && error.contains("layout"), "{error}");
    assert_eq!(Machine::new("h100", "llama-3-70b").expect("fits").accelerators, 4);
    let named = Machine::new("h100+ps1010x2", "llama-3-8b").expect("fits");
    assert_eq!(named.ssds.iter().map(|class| class.name.as_str()).collect::<Vec<_>>(), ["ps1010x2"]);
}
