//! Laws of traces with time.

use reprise_policy::admission::AdmissionMode;
use reprise_policy::eviction::{Chains, EvictionKind, EvictionPolicy};

use super::*;
use crate::replay::{ReadOptions, TraceBuilder, TraceRequest, read_lines};

/// First 400 requests of the conversation trace.
const SAMPLE: &str = include_str!("../../../../testkit/data/conversation_sample.jsonl");

fn sample() -> Trace {
    let mut builder = TraceBuilder::new(ReadOptions::default());
    read_lines(SAMPLE.as_bytes(), &mut builder).expect("the sample is a trace");
    builder.finish("sample").expect("requests")
}

/// The sample with a request every 1,000 s: each runs alone.
fn spread() -> Trace {
    let mut builder = TraceBuilder::new(ReadOptions::default());
    for (at, line) in SAMPLE.lines().enumerate() {
        let mut request: serde_json::Value = serde_json::from_str(line).expect("a request");
        request["timestamp"] = (at as u64 * 1_000_000).into();
        read_lines(request.to_string().as_bytes(), &mut builder).expect("a line of a trace");
    }
    builder.finish("spread").expect("requests")
}

fn setup(nodes: u16, dram_blocks: u64, nvme_blocks: u64) -> FleetSetup {
    let model = Model::named("llama-3-8b").expect("a model");
    let block_bytes = model.kv_bytes_per_token() * 512;
    FleetSetup {
        nodes,
        hardware: Hardware::named("h100").expect("a profile"),
        model,
        accelerators: 1,
        tiers: NodeSettings {
            policy: EvictionPolicy { kind: EvictionKind::Lru, chains: Chains::DescendantsFirst },
            dram_blocks,
            nvme_blocks,
            admission: AdmissionMode::Always,
            block_bytes,
            block_tokens: 512,
            tenants: 1,
        },
        load_policy: Some(WAIT_BOUND),
        reads_ahead: false,
        has_hbm_cache: false,
        has_cold_store: false,
        time_scale: 1.0,
        batch_max: BATCH_MAX,
        step_tokens_max: STEP_TOKENS_MAX,
    }
}

/// Trace of prompts and outputs in tokens, each at a time in milliseconds, all blocks different.
fn distinct(requests: &[(u64, u64, u64)]) -> Trace {
    let mut builder = TraceBuilder::new(ReadOptions::default());
    let mut next = 0;
    for (at_ms, input_tokens, output_tokens) in requests.iter().copied() {
        let blocks = input_tokens.div_ceil(512);
        let hash_ids: Vec<u64> = (next..next + blocks).collect();
        next += blocks;
        let request = TraceRequest {
            at_ms,
            input_tokens,
            output_tokens,
            hash_ids: &hash_ids,
            ..TraceRequest::default()
        };
        builder.add("request", &request).expect("a possible request");
    }
    builder.finish("distinct").expect("requests")
}

/// Seconds of a request that runs alone: its prompt in chunks, then a step for each further token.
fn alone(setup: &FleetSetup, prompt: u32, output: u32) -> (f64, f64) {
    let costs = Costs::new(&setup.hardware, &setup.model, setup.accelerators);
    let (mut first, mut computed) = (0.0, 0);
    while computed < prompt {
        let chunk = (prompt - computed).min(setup.step_tokens_max);
        first += costs.seconds(costs.weights() + costs.prefill(chunk, computed));
        computed += chunk;
    }
    let steps = (0..output - 1).map(|step| costs.seconds(costs.weights() + costs.decode(prompt + step)));
    (first, steps.sum())
}

#[test]
fn request_alone_takes_the_time_of_its_steps() {
    let (prompt, output) = (20_000, 300);
    let setup = setup(1, 1_000, 0);
    let results = replay_timed(&setup, &distinct(&[(0, prompt, output)]));
    let (first, rest) = alone(&setup, prompt as u32, output as u32);
    let (ttft, tpot) = (results.ttft_ns[0] as f64 / 1e9, results.tpot_ns[0] as f64 / 1e9);
    assert!((ttft / first - 1.0).abs() < 1e-6, "{ttft} instead of {first}");
    // The first decode also pays for the bytes of the save.
    let expected = rest / (output - 1) as f64;
    assert!((tpot / expected - 1.0).abs() < 2e-3 && tpot >= expected - 1e-9, "{tpot} instead of {expected}");
    assert_eq!((results.tokens_in, results.tokens_out), (prompt, output));
    assert_eq!(results.steps, 3 + output - 1);
    assert!(results.events < 20, "steps are jumped over: {} events", results.events);
}

#[test]
fn jumped_steps_take_the_time_of_single_ones() {
    let setup = setup(1, 1_000, 0);
    let costs = Costs::new(&setup.hardware, &setup.model, 1);
    // Contexts on both sides of the point from which computation is the bound, and the crossing itself.
    for (requests, context) in [(1, 100), (200, 300_000), (2_000, 3_000_000), (4_000, 10)] {
        let times = run::times_for_test(&costs, (requests, context), 500);
        let (mut sum, mut at) = (0.0, context);
        for (step, time) in times.iter().enumerate() {
            sum += costs.seconds(costs.weights() + costs.decodes(requests, at));
            at += requests;
            assert!((time / sum - 1.0).abs() < 1e-9, "step {step} of {requests}: {time} instead of {sum}");
        }
    }
}

#[test]
fn hits_are_those_without_time_if_requests_do_not_overlap() {
    let trace = spread();
    for (nodes, dram, nvme) in [(1, 500, 0), (1, 300, 2_000), (3, 200, 1_000)] {
        let setup = FleetSetup { load_policy: None, ..setup(nodes, dram, nvme) };
        let untimed = Cluster::new(nodes, setup.tiers).replay(&trace);
        let timed = replay_timed(&setup, &trace);
        assert!(untimed.counts.hits() > 0);
        assert_eq!((timed.counts, timed.nvme_written_max), (untimed.counts, untimed.nvme_written_max));
        assert_eq!(timed.ttft_ns.len() as u64, untimed.counts.requests);
    }
}

#[test]
fn bytes_on_channels_are_those_of_the_hits_and_saves() {
    let trace = sample();
    let setup = FleetSetup { load_policy: None, ..setup(3, 200, 1_000) };
    let results = replay_timed(&setup, &trace);
    let counts = &results.counts;
    let bytes = |blocks: u64| blocks * setup.tiers.block_bytes;
    let peers = counts.hits_peer_dram + counts.hits_peer_nvme;
    assert!(counts.hits_dram > 0 && counts.hits_nvme > 0 && peers > 0, "{counts:?}");
    assert_eq!(results.channel(ChannelKind::LinkIn).bytes, bytes(counts.hits()));
    assert_eq!(results.channel(ChannelKind::Network).bytes, bytes(peers));
    assert_eq!(results.channel(ChannelKind::NvmeRead).bytes, bytes(counts.hits_nvme + counts.hits_peer_nvme));
    assert_eq!(results.channel(ChannelKind::NvmeWrite).bytes, bytes(counts.nvme_written));
    for total in results.totals {
        assert_eq!(total.bytes, total.requested, "all transfers end");
        assert!(total.busy <= results.elapsed_ns * 3);
    }
}

#[test]
fn a_cold_store_has_every_block_that_leaves_the_nodes_and_moves_its_bytes() {
    let trace = sample();
    let setup = FleetSetup { load_policy: None, has_cold_store: true, ..setup(3, 300, 300) };
    let results = replay_timed(&setup, &trace);
    let counts = &results.counts;
    let unlimited = Cluster::new(1, NodeSettings { dram_blocks: u64::MAX, nvme_blocks: 0, ..setup.tiers });
    let unlimited = unlimited.replay(&trace).counts;
    let untimed = Cluster::new(3, setup.tiers).with_cold_store().replay(&trace).counts;
    assert_eq!(untimed.hits(), unlimited.hits(), "no block is lost");
    assert!(untimed.hits_cold > 0 && untimed.cold_written <= trace.distinct(), "{untimed:?}");
    assert!(counts.hits_cold > 0 && counts.hits() <= unlimited.hits(), "{counts:?}");
    let bytes = |blocks: u64| blocks * setup.tiers.block_bytes;
    let moved = bytes(counts.hits_cold + counts.cold_written);
    assert_eq!(results.channel(ChannelKind::Cold).bytes, moved);
    let peers = bytes(counts.hits_peer_dram + counts.hits_peer_nvme);
    assert_eq!(results.channel(ChannelKind::Network).bytes, moved + peers);
    let without = replay_timed(&FleetSetup { has_cold_store: false, ..setup }, &trace);
    assert_eq!((without.counts.hits_cold, without.channel(ChannelKind::Cold).bytes), (0, 0));
}

#[test]
fn every_request_ends_once_and_generates_its_tokens_under_preemption() {
    // 20 requests of 4,000 and 2,000 tokens need 120,000 tokens; a part of HBM that holds 20,000 preempts some.
    let mut setup = setup(1, 1_000, 0);
    let tokens = (setup.model.weight_bytes() + 20_000 * setup.model.kv_bytes_per_token()) * 10 / 9;
    setup.hardware.hbm_bytes = tokens;
    for has_hbm_cache in [false, true] {
        let setup = FleetSetup { has_hbm_cache, ..setup.clone() };
        let requests: Vec<(u64, u64, u64)> = (0..20).map(|at| (at * 10, 4_000, 2_000)).collect();
        let trace = distinct(&requests);
        let results = replay_timed(&setup, &trace);
        assert!(results.preemptions > 0);
        // Some are preempted before their first token: they are counted once, too.
        assert_eq!((results.counts.requests, results.counts.references), (20, trace.references()));
        assert_eq!((results.ttft_ns.len(), results.tpot_ns.len()), (20, 20));
        assert_eq!((results.tokens_in, results.tokens_out), (20 * 4_000, 20 * 2_000));
    }
}

#[test]
fn time_to_first_token_falls_with_more_memory_and_rises_with_the_rate() {
    let mean = |setup: &FleetSetup, trace: &Trace| {
        let results = replay_timed(setup, trace);
        results.ttft_ns.iter().sum::<u64>() / results.ttft_ns.len() as u64
    };
    let alone = spread();
    let sizes = [20, 6_000, 12_000].map(|dram| mean(&setup(1, dram, 0), &alone));
    assert!(sizes[0] > sizes[1] && sizes[1] >= sizes[2], "{sizes:?}");
    let sample = sample();
    let rates = [4.0, 1.0, 0.25].map(|time_scale| {
        let setup = FleetSetup { time_scale, ..setup(2, 1_000, 0) };
        mean(&setup, &sample)
    });
    assert!(rates[0] < rates[1] && rates[1] < rates[2], "{rates:?}");
}

#[test]
fn hit_of_a_request_alone_is_not_slower_than_computing_it_by_more_than_the_bound() {
    let trace = spread();
    let computed = replay_timed(&setup(1, 0, 0), &trace);
    assert_eq!(computed.counts.hits(), 0);
    // A link of 20 MB/s takes 3 s for a block that 30 ms compute. Old measurements do not count, so each load is tried.
    let mut slow = setup(1, 12_000, 0);
    slow.hardware.link.bytes_per_second = 20_000_000;
    for (setup, is_slow) in [(setup(1, 12_000, 0), false), (slow, true)] {
        let hits = replay_timed(&setup, &trace);
        assert!(hits.counts.hits() > 1_000);
        assert_eq!(is_slow, hits.stopped_loads > 0, "{} loads", hits.stopped_loads);
        let bound = WAIT_BOUND.cap.as_nanos() as u64;
        for (hit, computed) in hits.ttft_ns.iter().zip(&computed.ttft_ns) {
            assert!(*hit <= computed + bound, "{hit} with hits, {computed} without");
        }
        for total in hits.totals {
            assert_eq!(total.bytes, total.requested, "loads that stop leave no bytes");
        }
    }
}

#[test]
fn blocks_behind_a_slow_link_are_computed_once_it_was_measured() {
    let mut slow = setup(2, 12_000, 0);
    slow.hardware.link.bytes_per_second = 20_000_000;
    let results = replay_timed(&slow, &sample());
    assert!(results.computed_hits > 100, "{} blocks", results.computed_hits);
    assert_eq!(replay_timed(&FleetSetup { load_policy: None, ..slow }, &sample()).computed_hits, 0);
}

#[test]
fn blocks_in_the_memory_of_accelerators_are_hits_that_are_not_loaded() {
    let trace = sample();
    let without = replay_timed(&setup(1, 12_000, 0), &trace);
    let with = replay_timed(&FleetSetup { has_hbm_cache: true, ..setup(1, 12_000, 0) }, &trace);
    assert!(with.counts.hits_hbm > 0 && without.counts.hits_hbm == 0);
    assert!(with.channel(ChannelKind::LinkIn).bytes < without.channel(ChannelKind::LinkIn).bytes);
}

#[test]
fn waiting_requests_are_read_ahead_without_a_delay_of_others() {
    // Few requests fit at the same time, so others wait; most of the found blocks are on NVMe.
    let mut few = setup(1, 300, 20_000);
    few.batch_max = 4;
    let run =
        |reads_ahead| replay_timed(&FleetSetup { reads_ahead, load_policy: None, ..few.clone() }, &sample());
    let (without, with) = (run(false), run(true));
    assert!(with.read_ahead > 0 && without.read_ahead == 0);
    assert!(with.counts.hits_dram > without.counts.hits_dram);
    assert!(with.counts.hits_nvme < without.counts.hits_nvme);
    let mean = |results: &FleetResults| results.ttft_ns.iter().sum::<u64>() / results.ttft_ns.len() as u64;
    // The node computes all the time, so the order of the requests changes a little.
    let (with, without) = (mean(&with), mean(&without));
    assert!(with <= without + without / 1_000, "{with} and {without}");
}

#[test]
fn several_drives_share_the_writes_and_cost_their_whole_capacity() {
    let one = Hardware::named("h100").expect("a profile");
    // 3.84 TB each.
    let drives = [0, 1, 3_840_000_000_000, 3_840_000_000_001, 16 << 40].map(|bytes| one.drives_for(bytes));
    assert_eq!(drives, [0, 1, 1, 2, 5]);
    let with = |drives: u64, nvme_blocks| {
        let mut setup = setup(1, 300, nvme_blocks);
        setup.hardware = setup.hardware.with_drives(drives);
        (replay_timed(&setup, &sample()), setup)
    };
    let ((alone, single), (shared, five), (_, none)) = (with(1, 20_000), with(5, 20_000), with(0, 0));
    let busy = |results: &FleetResults| results.channel(ChannelKind::NvmeWrite).busy as f64;
    assert!(busy(&alone) > 0.0 && busy(&shared) < 0.5 * busy(&alone), "five drives write faster than one");
    let nvme_usd = |setup: &FleetSetup| setup.usd_per_hour() - none.usd_per_hour();
    assert!((nvme_usd(&single) - 3_840.0 * one.nvme_usd_per_gb_hour).abs() < 1e-9);
    assert!((nvme_usd(&five) - 5.0 * nvme_usd(&single)).abs() < 1e-9);
}

#[test]
fn larger_requests_than_the_memory_are_refused_and_counted() {
    let results = replay_timed(&setup(1, 1_000, 0), &distinct(&[(0, 1_000_000, 5), (1, 100, 5)]));
    assert_eq!((results.refused, results.ttft_ns.len()), (1, 1));
}

#[test]
fn equal_inputs_give_equal_results() {
    let trace = sample();
    let setup = FleetSetup { has_hbm_cache: true, time_scale: 0.1, ..setup(4, 200, 1_000) };
    assert_eq!(replay_timed(&setup, &trace), replay_timed(&setup, &trace));
}
