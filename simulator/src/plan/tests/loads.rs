//! The load that a plan serves: without refused requests, and with the hits of replays.

use super::*;

/// The trace of users, and requests of many tokens between theirs.
fn with_long_requests(blocks: u64) -> Trace {
    let mut builder = TraceBuilder::new(ReadOptions { block_tokens: Some(512), ..ReadOptions::default() });
    for number in 0..120_u64 {
        let is_long = number % 4 == 3;
        let count = if is_long { blocks } else { 8 };
        let hash_ids: Vec<u64> = (0..count).map(|block| number * 100_000 + block).collect();
        let request = TraceRequest {
            at_ms: number * 1_000,
            input_tokens: count * 512,
            output_tokens: 200,
            hash_ids: &hash_ids,
            ..TraceRequest::default()
        };
        if blocks > 0 || !is_long {
            builder.add("here", &request).expect("valid");
        }
    }
    builder.finish("trace").expect("valid")
}

fn load(machine: &Machine, trace: &Trace) -> Result<Load, PlanError> {
    Load::new(trace, machine, Limits::default(), RANDOM)
}

#[test]
fn refused_requests_are_not_part_of_load_and_price() {
    let machine = Machine::new("h100", "llama-3-8b").expect("valid");
    // 257 blocks of 512 tokens are more than the context of 131,072 tokens.
    let (all, served) = (with_long_requests(257), with_long_requests(0));
    let (with, without) = (load(&machine, &all).expect("valid"), load(&machine, &served).expect("valid"));
    let tokens = 30 * (257 * 512 + 200);
    assert_eq!(with.refused, Refused { beyond_context: 30, beyond_memory: 0, tokens });
    assert_eq!((with.recorded.requests, with.recorded.tokens), (120, tokens + 90 * (8 * 512 + 200)));
    assert_eq!((with.requests, with.references, with.distinct), (90, 720, 720));
    assert_eq!(without.refused, Refused::default());
    assert_eq!(with.tokens_mean, without.tokens_mean);
    assert!(with.requests_per_second > 0.0 && with.requests_per_second == without.requests_per_second);
    let price = |load: &Load| {
        let curves = Curves::new(load, machine.model.kv_bytes_per_token() * load.block_tokens());
        let estimator = Estimator::new(&machine, load, &curves, 3.0);
        let estimate = estimator.estimate(&Configuration::without_cache(1));
        (estimate.usd_per_million_tokens, estimate.busy, estimate.ttft_mean)
    };
    assert_eq!(price(&with), price(&without));
}

#[test]
fn requests_that_no_node_can_hold_are_counted_or_refused_with_the_remedy() {
    let mut machine = Machine::new("h100", "llama-3-8b").expect("valid");
    let trace = trace(10, 3, 1_000);
    let per_token = machine.model.kv_bytes_per_token();
    assert_eq!(load(&machine, &trace).expect("valid").refused, Refused::default());
    // Prompts of 8, 16 and 24 blocks, outputs of 200 tokens within a block, and a block in reserve.
    machine.kv_bytes = 20 * 512 * per_token;
    let refused = load(&machine, &trace).expect("some fit").refused;
    assert_eq!((refused.beyond_context, refused.beyond_memory), (0, 10));
    machine.kv_bytes = 8 * 512 * per_token;
    let error = load(&machine, &trace).expect_err("none fits").to_string();
    assert!(error.contains("shortest of 30") && error.contains("--hardware"), "{error}");
    machine.model.context = 100;
    let error = load(&machine, &trace).expect_err("none fits").to_string();
    assert!(error.contains("a context of 100") && error.contains("another --model"), "{error}");
}

#[test]
fn blocks_in_hbm_need_no_computation_and_no_load() {
    use super::super::estimate::Hits;
    let world = world("h100", &trace(100, 6, 400));
    let estimator = world.estimator(3.0);
    let one = Configuration { dram_gb: 64, ..Configuration::without_cache(2) };
    let busy = |hits: Hits| estimator.utilisation(&one, hits).busy;
    let none = estimator.estimate(&Configuration::without_cache(2)).busy;
    assert!((busy(Hits::default()) / none - 1.0).abs() < 1e-9, "{} {none}", busy(Hits::default()));
    let (hbm, dram) =
        (busy(Hits { hbm: 0.6, ..Hits::default() }), busy(Hits { dram: 0.6, ..Hits::default() }));
    assert!(hbm < dram && dram < none * 0.7, "{hbm} {dram} {none}");
}

#[test]
fn load_and_price_are_those_of_the_replayed_hits() {
    // 15 sessions fit into the memory of the accelerators, so they hit without any cache of the nodes.
    let machine = Machine::new("h100", "llama-3-8b").expect("valid");
    let load = load(&machine, &sessions(15)).expect("valid");
    let curves = Curves::new(&load, machine.model.kv_bytes_per_token() * load.block_tokens());
    let estimator = Estimator::new(&machine, &load, &curves, 3.0);
    let one = Configuration::without_cache(1);
    let (estimate, timed) = (estimator.estimate(&one), Timed::new(&estimator, &one, 0));
    // 80 of 120 blocks are repeated.
    assert!(timed.hbm_ratio > 0.6 && timed.hit_ratio == timed.hbm_ratio, "{timed:?}");
    assert!(timed.utilisation.busy < estimate.busy * 0.6, "{timed:?} {estimate:?}");
    // The price counts served tokens only, so it is equal where all are served.
    assert_eq!((timed.utilisation.served, estimate.served), (1.0, 1.0));
    let price = timed.usd_per_million_tokens(&estimator, &one);
    assert!((price / estimate.usd_per_million_tokens - 1.0).abs() < 1e-9, "{price} {estimate:?}");
}
