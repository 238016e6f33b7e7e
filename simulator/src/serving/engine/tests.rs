//! Tests of the engine: tokens, chunks, preemption, conservation, and a queue with a closed form.

use reprise_policy::eviction::{Chains, EvictionKind};
use reprise_policy::recompute::{BlockSize, WaitBound};

use super::super::workload::{CacheSource, Poisson, TraceProfile};
use super::*;

fn setup() -> Setup {
    let hardware = Hardware::named("h100").expect("valid");
    let model = Model::named("llama-3-8b").expect("valid");
    Setup {
        capacity: [Setup::hbm_blocks(&hardware, &model, 1, 16), 200_000, 0],
        hardware,
        model,
        accelerators: 1,
        tokens_per_block: 16,
        admitted_blocks_max: u64::MAX,
        batch_max: 32,
        step_tokens_max: 2_048,
        turn: None,
        eviction: EvictionPolicy { kind: EvictionKind::Lru, chains: Chains::Ignored },
        lookahead: None,
        transfers: Transfers::Timed,
        preemption: Preemption::Swap,
        load_policy: None,
        noise: 0.0,
        seed: 1,
    }
}

fn poisson(seed: u64, count: usize, rate: f64) -> Vec<Request> {
    let mut arrivals = Poisson::new(seed, TraceProfile::Mixed);
    (0..count).map(|_| arrivals.next(rate)).collect()
}

fn request(arrival: u64, prompt: u32, output: u32) -> Request {
    Request { arrival: Nanos(arrival), prompt, output, cached: 0, source: CacheSource::Hbm }
}

#[test]
fn every_request_ends_and_generates_its_tokens() {
    let requests = poisson(5, 400, 40.0);
    let results = Engine::new(setup(), &requests).run(u64::MAX, 0);
    assert_eq!(results.outcomes.len(), 400);
    assert_eq!(results.tokens, requests.iter().map(|request| u64::from(request.output)).sum::<u64>());
    let mut numbers: Vec<u32> = results.outcomes.iter().map(|outcome| outcome.number).collect();
    numbers.sort_unstable();
    assert!(numbers.into_iter().eq(0..400));
    for outcome in &results.outcomes {
        assert_eq!(outcome.decoded + 1, requests[outcome.number as usize].output);
    }
}

#[test]
fn equal_seeds_give_equal_results() {
    let run = |seed| {
        let setup = Setup { turn: Some(16), admitted_blocks_max: 60_000, noise: 0.02, seed, ..setup() };
        let mut engine =
            Engine::new(Setup { lookahead: Some((4, 8)), ..setup }, &poisson(seed, 3_000, 500.0));
        engine.populate();
        format!("{:?}", engine.run(300, 50))
    };
    assert_eq!(run(42), run(42));
    assert_ne!(run(42), run(43));
}

#[test]
fn prompt_longer_than_the_budget_of_a_step_is_computed_in_chunks() {
    // 5,000 tokens at 2,048 a step: three steps until the first token, and one for each other token.
    let results = Engine::new(setup(), &[request(0, 5_000, 3)]).run(u64::MAX, 0);
    assert_eq!(results.steps.len(), 3 + 2);
    let costs = Costs::new(&setup().hardware, &setup().model, 1);
    let chunks = [(2_048, 0), (2_048, 2_048), (904, 4_096)];
    let expected: f64 = chunks
        .iter()
        .map(|(tokens, prefix)| costs.seconds(costs.weights() + costs.prefill(*tokens, *prefix)))
        .sum();
    let measured = results.outcomes[0].service_ttft as f64 / 1e9;
    assert!((measured / expected - 1.0).abs() < 1e-6, "{measured} s instead of {expected} s");
}

#[test]
fn decoding_requests_keep_their_step_while_a_prompt_is_computed_in_chunks() {
    let requests = [request(0, 16, 200), request(100_000_000, 20_000, 2)];
    let results = Engine::new(setup(), &requests).run(u64::MAX, 0);
    // Each chunk leaves one token of 2,048 to the other request, so ten steps compute the prompt.
    let long = results.steps.iter().filter(|nanos| **nanos > 50_000_000).count();
    assert_eq!(long, 10);
    assert_eq!(results.outcomes[0].decoded, if results.outcomes[0].number == 1 { 1 } else { 199 });
}

#[test]
fn lack_of_memory_preempts_the_youngest_request_and_all_requests_end() {
    for preemption in [Preemption::Swap, Preemption::Recompute] {
        // 100 blocks hold 1,600 tokens; four requests need 2,000 at their ends.
        let setup = Setup { capacity: [100, 1_000, 0], preemption, ..setup() };
        let requests: Vec<Request> = (0..4).map(|at| request(at * 1_000, 300, 200)).collect();
        let results = Engine::new(setup, &requests).run(u64::MAX, 0);
        assert!(results.preemptions > 0, "{preemption:?}");
        assert_eq!((results.outcomes.len(), results.tokens), (4, 800), "{preemption:?}");
        assert_eq!(results.outcomes.last().map(|outcome| outcome.number), Some(3));
        let loaded = results.channel(ChannelKind::LinkIn).bytes;
        assert_eq!(loaded > 0, preemption == Preemption::Swap);
    }
}

#[test]
fn bytes_of_each_channel_are_conserved() {
    let capacity = [8_000, 200_000, 0];
    let setup = Setup { turn: Some(16), capacity, admitted_blocks_max: 16_000, ..setup() };
    let mut engine = Engine::new(setup, &poisson(3, 2_000, 1e6));
    engine.populate();
    let results = engine.run(u64::MAX, 0);
    for (kind, totals) in ChannelKind::ALL.into_iter().zip(results.totals) {
        // The run ends with the last step; transfers down may then be on their way.
        let open = totals.requested - totals.bytes;
        assert!(
            open == 0 || matches!(kind, ChannelKind::LinkOut | ChannelKind::Dram | ChannelKind::Hbm),
            "{kind:?}"
        );
    }
    let [loaded, demoted] =
        [ChannelKind::LinkIn, ChannelKind::LinkOut].map(|kind| results.channel(kind).bytes);
    assert!(loaded > 0 && demoted > 0 && loaded % (2 << 20) == 0, "{loaded} {demoted}");
}

#[test]
fn wait_of_requests_with_one_token_agrees_with_the_queue_m_d_1() {
    // A batch of one request with one token: each takes the same step, so this is M/D/1.
    let setup = Setup { batch_max: 1, ..setup() };
    let service = Engine::new(setup.clone(), &[request(0, 512, 1)]).run(u64::MAX, 0).outcomes[0].ttft as f64;
    let (load, count) = (0.7, 20_000);
    let mut random = Random::new(9);
    let mut at = 0.0;
    let requests: Vec<Request> = (0..count)
        .map(|_| {
            at += random.exponential(service / load);
            request(at as u64, 512, 1)
        })
        .collect();
    let results = Engine::new(setup, &requests).run(u64::MAX, 0);
    let mean = results.outcomes.iter().map(|outcome| outcome.ttft as f64).sum::<f64>() / f64::from(count);
    // Pollaczek and Khinchine: W = s · ρ / (2 · (1 − ρ)).
    let expected = service * (1.0 + load / (2.0 * (1.0 - load)));
    assert!((mean / expected - 1.0).abs() < 0.05, "{mean} instead of {expected}");
    // First come, first served: no request starves.
    assert!(results.outcomes.windows(2).all(|pair| pair[0].number < pair[1].number));
}

#[test]
fn prefetch_of_the_production_policy_hides_loads_that_the_link_can_carry() {
    let run = |lookahead, transfers| {
        let setup = Setup { turn: Some(64), admitted_blocks_max: 60_000, lookahead, transfers, ..setup() };
        let mut engine = Engine::new(setup, &poisson(42, 6_000, 500.0));
        engine.populate();
        engine.run(2_000, 500)
    };
    let (reactive, ahead) = (run(None, Transfers::Timed), run(Some((4, 8)), Transfers::Timed));
    let oracle = run(Some((4, 8)), Transfers::Free);
    let [reactive_ms, ahead_ms, oracle_ms] =
        [&reactive, &ahead, &oracle].map(|results| super::super::statistics::median(&results.tpot_ms()));
    assert!(reactive_ms > ahead_ms && ahead_ms >= oracle_ms, "{reactive_ms} {ahead_ms} {oracle_ms}");
    assert!(ahead.prefetch_hit_rate() > 0.5, "{}", ahead.prefetch_hit_rate());
    assert_eq!(reactive.prefetch_hits, 0);
}

/// Requests with 1,600 cached tokens of 2,000, one every five seconds.
fn cached(count: u64, source: CacheSource) -> Vec<Request> {
    (0..count).map(|at| Request { cached: 1_600, source, ..request(at * 5 * SECOND, 2_000, 4) }).collect()
}

#[test]
fn cached_prefix_is_loaded_over_the_channel_of_its_source() {
    for (source, kind) in [
        (CacheSource::Dram, ChannelKind::Dram),
        (CacheSource::Nvme, ChannelKind::NvmeRead),
        (CacheSource::Peer, ChannelKind::Network),
        (CacheSource::Cold, ChannelKind::Cold),
    ] {
        let results = Engine::new(setup(), &cached(3, source)).run(u64::MAX, 0);
        assert_eq!(results.outcomes.len(), 3);
        // 100 blocks of 2 MiB for each request, and the same over the link.
        assert_eq!(results.channel(kind).bytes, 3 * 100 * (2 << 20), "{source:?}");
        assert_eq!(results.channel(ChannelKind::LinkIn).bytes, 3 * 100 * (2 << 20), "{source:?}");
    }
}

#[test]
fn production_policy_computes_a_prefix_whose_load_is_slower() {
    // A block of Llama 2 13B has 13 MB: 3.2 ms over TCP, and 1.1 ms to compute.
    let hardware = Hardware::named("h100+tcp").expect("valid");
    let model = Model::named("llama-2-13b").expect("valid");
    let capacity = [Setup::hbm_blocks(&hardware, &model, 1, 16), 0, 0];
    let millis = std::time::Duration::from_millis;
    let bound = WaitBound { cap: millis(500), base: millis(50), per_token: millis(0) };
    let policy = LoadPolicy::new(bound, BlockSize { tokens: 16, bytes: 13_107_200 });
    let loaded = |load_policy| {
        let setup =
            Setup { hardware: hardware.clone(), model: model.clone(), capacity, load_policy, ..setup() };
        let results = Engine::new(setup, &cached(20, CacheSource::Peer)).run(u64::MAX, 0);
        assert_eq!(results.outcomes.len(), 20);
        results.channel(ChannelKind::Network).bytes
    };
    assert_eq!(loaded(None), 20 * 100 * 13_107_200);
    // The first loads measure the rates; later prefixes are computed, except for one measurement in 30 s.
    let chosen = loaded(Some(policy));
    assert!(chosen > 0 && chosen < 10 * 100 * 13_107_200, "{chosen}");
}

#[test]
fn blocking_load_delays_the_step_and_a_layer_wise_one_runs_with_it() {
    // 64,000 of 72,000 tokens are cached on an SSD: the load and the computation are of the same order.
    let spec = Request { cached: 64_000, source: CacheSource::Nvme, ..request(0, 72_000, 2) };
    let ttft = |loading| {
        let setup = Setup { step_tokens_max: 16_384, ..setup() };
        let results = Engine::new(setup, &[spec]).with_prefix_loading(loading).run(u64::MAX, 0);
        results.outcomes[0].ttft as f64 / 1e9
    };
    let (hardware, model) = (setup().hardware, setup().model);
    let load = 64_000.0 * model.kv_bytes_per_token() as f64 / hardware.nvme_read.bytes_per_second as f64;
    let costs = Costs::new(&hardware, &model, 1);
    let compute = costs.seconds(costs.weights() + costs.prefill(8_000, 64_000));
    assert!(load > 0.5 && compute > 0.5, "{load} s and {compute} s");
    for (loading, expected) in [
        (PrefixLoading::Ahead, load + compute),
        (PrefixLoading::Blocking, load + compute),
        (PrefixLoading::LayerWise, load.max(compute)),
    ] {
        let measured = ttft(loading);
        assert!(
            (measured / expected - 1.0).abs() < 0.01,
            "{loading:?}: {measured} s instead of {expected} s"
        );
    }
}

#[test]
fn decodes_wait_for_a_blocking_load_but_not_for_one_ahead() {
    let cached = Request { cached: 64_000, source: CacheSource::Nvme, ..request(50_000_000, 64_016, 2) };
    let longest = |loading| {
        let engine = Engine::new(setup(), &[request(0, 16, 400), cached]).with_prefix_loading(loading);
        engine.run(u64::MAX, 0).steps.into_iter().max().expect("steps")
    };
    // The load takes 1.2 s.
    assert!(longest(PrefixLoading::Blocking) > 1_000_000_000);
    assert!(longest(PrefixLoading::Ahead) < 100_000_000);
}
