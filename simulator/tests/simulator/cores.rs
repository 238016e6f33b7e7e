//! A trace that production cores serve, with the times of hardware.

use reprise_policy::admission::AdmissionMode;
use reprise_policy::eviction::{EvictionKind, EvictionPolicy};
use reprise_simulator::replay::{Cluster, NodeSettings, ReadOptions, Trace, TraceBuilder, read_lines};
use reprise_simulator::serving::channel::Totals;
use reprise_simulator::serving::costs::Costs;
use reprise_simulator::serving::profiles::{Hardware, Model};
use reprise_simulator::timed::{CoreReplay, CoreSettings, CoresError, Path, replay_cores};

/// First 400 requests of the conversation trace.
const SAMPLE: &str = include_str!("../../../testkit/data/conversation_sample.jsonl");
/// Bytes of a block of the sample: 512 tokens of Llama-3-8B.
const BLOCK_BYTES: u64 = 64 << 20;

fn parse(text: &str) -> Trace {
    let mut builder = TraceBuilder::new(ReadOptions::default());
    read_lines(text.as_bytes(), &mut builder).expect("lines of the format");
    builder.finish("text").expect("a trace")
}

fn settings() -> CoreSettings {
    CoreSettings {
        nodes: 4,
        members: 3,
        hardware: Hardware::named("h100").expect("valid"),
        model: Model::named("llama-3-8b").expect("valid"),
        dram_blocks: 400,
        nvme_blocks: 1_000,
        policy: EvictionPolicy::default(),
        admission: AdmissionMode::Always,
        placement_bandwidth: 256 << 20,
        seed: 7,
    }
}

fn totals(served: &CoreReplay, wanted: Path) -> Totals {
    served.channels.iter().find(|(path, _)| *path == wanted).expect("all channels are reported").1
}

#[test]
fn cores_serve_the_sample_as_the_replay_without_time_predicts() {
    let trace = parse(SAMPLE);
    for kind in [EvictionKind::Lru, EvictionKind::Lfu] {
        let settings = CoreSettings { policy: kind.into(), ..settings() };
        let served = replay_cores(&trace, &settings).expect("no invariant is violated");
        assert_eq!((served.requests, served.references), (400, trace.references()));
        assert_eq!((served.first_tokens.len(), served.capacity), (400, [400, 1_000]));
        assert_near_replay(&trace, &settings, &served);
    }
}

/// Checks that hits of all tiers are within a point of those of a replay without time.
fn assert_near_replay(trace: &Trace, settings: &CoreSettings, served: &CoreReplay) {
    let node = NodeSettings {
        policy: settings.policy,
        dram_blocks: 400,
        nvme_blocks: 1_000,
        admission: settings.admission,
        block_bytes: BLOCK_BYTES,
        block_tokens: trace.block_tokens(),
        tenants: 1,
    };
    let counts = Cluster::new(4, node).replay(trace).counts;
    let replayed = [counts.hits_dram, counts.hits_nvme, counts.hits_peer_dram, counts.hits_peer_nvme];
    for (cores, replay) in served.hits.iter().zip(replayed) {
        let points = 100.0 * cores.abs_diff(replay) as f64 / served.references as f64;
        assert!(points < 1.0 && *cores > 0, "{:?} instead of {replayed:?}", served.hits);
    }
}

#[test]
fn channels_carry_the_bytes_of_hits_and_saves_and_equal_seeds_are_equal() {
    let text: String = SAMPLE.lines().take(150).flat_map(|line| [line, "\n"]).collect();
    let (trace, settings) = (parse(&text), settings());
    let served = replay_cores(&trace, &settings).expect("no invariant is violated");
    let bytes = |path| totals(&served, path).bytes;
    let hits: u64 = served.hits.iter().sum();
    assert_eq!(bytes(Path::LinkIn), hits * BLOCK_BYTES, "each loaded block is copied once");
    let new = served.references - hits - served.unsaved;
    assert_eq!(bytes(Path::LinkOut), new * BLOCK_BYTES, "each other block is saved once");
    assert_eq!(bytes(Path::NetworkIn), bytes(Path::NetworkOut));
    let of_peers = (served.hits[2] + served.hits[3]) * BLOCK_BYTES;
    assert!(bytes(Path::NetworkIn) >= of_peers && of_peers > 0, "{served:?}");
    assert!(bytes(Path::NvmeWrite) >= served.seen["durable_items"] * BLOCK_BYTES);
    assert!(served.checks.lookups > 0 && served.checks.pieces_received > 0 && served.checks.replicas > 0);
    assert_eq!(served, replay_cores(&trace, &settings).expect("the same run"));
    let other = replay_cores(&trace, &CoreSettings { seed: 8, ..settings }).expect("another run");
    assert_ne!(served.digest, other.digest);
}

#[test]
fn repeated_prompt_takes_the_time_of_its_copy_and_one_token() {
    // 4 blocks; the second request comes when the first one has ended.
    let lines = [0, 60_000].map(|at| {
        format!("{{\"timestamp\":{at},\"input_length\":2048,\"output_length\":2,\"hash_ids\":[1,2,3,4]}}\n")
    });
    let settings = CoreSettings { nodes: 1, ..settings() };
    let served = replay_cores(&parse(&lines.concat()), &settings).expect("no invariant is violated");
    assert_eq!(served.hits, [4, 0, 0, 0]);
    let costs = Costs::new(&settings.hardware, &settings.model, 1);
    let micros = |seconds: f64| (seconds * 1e6) as u64;
    let whole = micros(costs.seconds(costs.weights() + costs.prefill(2048, 0)));
    let last = micros(costs.seconds(costs.weights() + costs.prefill(1, 2047)));
    let copied = settings.hardware.link.transfer_nanos(4 * BLOCK_BYTES) / 1000;
    // The calls of the engine take up to 100 µs each, and a lookup of the first request 1.2 ms.
    let [repeated, first] = served.first_tokens[..] else { panic!("{served:?}") };
    assert!((whole..whole + 1_500).contains(&first), "{first} µs instead of {whole}");
    let expected = copied + last;
    assert!((expected..expected + 400).contains(&repeated), "{repeated} µs instead of {expected}");
}

#[test]
fn model_that_does_not_fit_is_refused() {
    let model = Model::named("llama-3-70b").expect("valid");
    let refused = replay_cores(&parse(SAMPLE), &CoreSettings { model, ..settings() });
    assert!(refused.is_err_and(|error| error.to_string().contains("choose a smaller model")));
}

#[test]
fn prompt_or_tier_that_is_too_large_is_refused_before_the_run() {
    let prompt = |at_ms: u64, blocks: u64| {
        let hash_ids: Vec<u64> = (0..blocks).collect();
        let tokens = blocks * 512;
        format!(
            "{{\"timestamp\":{at_ms},\"input_length\":{tokens},\"output_length\":1,\"hash_ids\":{hash_ids:?}}}\n"
        )
    };
    let refused = |text: &str, dram_blocks| {
        let settings = CoreSettings { dram_blocks, ..settings() };
        match replay_cores(&parse(text), &settings) {
            Err(CoresError::Impossible(remedy)) => remedy,
            other => panic!("{other:?} instead of a remedy"),
        }
    };
    let long = refused(&(prompt(0, 4) + &prompt(1, 8_193)), 400);
    assert!(long.contains("request 2") && long.contains("8193 blocks"), "{long}");
    // Four blocks of 64 MiB are a region.
    let large = refused(&prompt(0, 4), 4 * 65_535 + 1);
    assert!(large.contains("use at most 262140 blocks"), "{large}");
}
