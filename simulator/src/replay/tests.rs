//! Laws of replays, against simple models; and traces that are refused.

use std::collections::{BTreeSet, HashMap};

use reprise_policy::admission::AdmissionMode;
use reprise_policy::eviction::{Chains, EvictionKind, EvictionPolicy};

use super::*;
use crate::rng::Rng;

/// First 400 requests of the conversation trace.
const SAMPLE: &str = include_str!("../../../testkit/data/conversation_sample.jsonl");

fn parse(text: &str, options: ReadOptions) -> Result<Trace, TraceError> {
    let mut builder = TraceBuilder::new(options);
    read_lines(text.as_bytes(), &mut builder)?;
    builder.finish("file")
}

fn sample() -> Trace {
    parse(SAMPLE, ReadOptions::default()).expect("the sample is a trace")
}

fn settings(kind: EvictionKind, chains: Chains, dram_blocks: u64) -> NodeSettings {
    NodeSettings {
        policy: EvictionPolicy { kind, chains },
        dram_blocks,
        nvme_blocks: 0,
        admission: AdmissionMode::Always,
        block_bytes: 2 << 20,
        block_tokens: 16,
        tenants: 1,
    }
}

fn chained(kind: EvictionKind, dram_blocks: u64) -> NodeSettings {
    settings(kind, Chains::DescendantsFirst, dram_blocks)
}

fn hits(trace: &Trace, settings: NodeSettings) -> u64 {
    Cluster::new(1, settings).replay(trace).counts.hits()
}

fn chains_of(trace: &Trace) -> Vec<Vec<u32>> {
    let mut chain = Vec::new();
    let mut chains = Vec::new();
    for request in trace.requests() {
        trace.chain(request, &mut chain);
        chains.push(chain.clone());
    }
    chains
}

/// Trace of random conversations: each continues one before, or is new.
fn random(seed: u64, requests: usize) -> Trace {
    let mut rng = Rng::new(seed);
    let mut builder = TraceBuilder::new(ReadOptions::default());
    let mut prompts: Vec<Vec<u64>> = Vec::new();
    let mut next = 0;
    for at in 0..requests {
        let mut prompt = match prompts.is_empty() || rng.chance(200) {
            true => Vec::new(),
            false => {
                let mut old = prompts[rng.below(prompts.len())].clone();
                old.truncate(rng.below(old.len() + 1));
                old
            }
        };
        for _ in 0..=rng.below(5) {
            prompt.push(next);
            next += 1;
        }
        let request = TraceRequest {
            at_ms: at as u64 * 1000,
            input_tokens: 512 * prompt.len() as u64,
            hash_ids: &prompt,
            ..TraceRequest::default()
        };
        builder.add("request", &request).expect("a possible request");
        prompts.push(prompt);
    }
    builder.finish("random").expect("requests")
}

/// Hits of least recently used blocks in prompt order, by a list.
fn plain_lru(trace: &Trace, capacity: usize) -> u64 {
    let (mut uses, mut order) = (HashMap::new(), BTreeSet::new());
    let (mut clock, mut hits) = (0_u64, 0);
    for chain in chains_of(trace) {
        hits += chain.iter().take_while(|block| uses.contains_key(*block)).count() as u64;
        for block in chain {
            clock += 1;
            if let Some(before) = uses.insert(block, clock) {
                order.remove(&(before, block));
            } else if order.len() == capacity {
                let (_, victim) = order.pop_first().expect("a full cache");
                uses.remove(&victim);
            }
            order.insert((clock, block));
        }
    }
    hits
}

/// Hits of OPT, block by block: keeps those whose next use comes first.
fn plain_opt(trace: &Trace, capacity: usize) -> u64 {
    let chains = chains_of(trace);
    let (mut kept, mut hits): (Vec<u32>, u64) = (Vec::new(), 0);
    for (at, chain) in chains.iter().enumerate() {
        hits += chain.iter().take_while(|block| kept.contains(block)).count() as u64;
        let next_use = |block: u32| chains[at + 1..].iter().position(|chain| chain.contains(&block));
        let others = |block: &u32| !chain.contains(block);
        let mut by_next: Vec<(usize, usize, u32)> = kept
            .iter()
            .copied()
            .filter(others)
            .filter_map(|block| Some((next_use(block)?, depth(&chains, block), block)))
            .collect();
        by_next.sort_unstable();
        by_next.truncate(capacity.saturating_sub(chain.len()));
        let own = chain.iter().take(capacity);
        kept = by_next.into_iter().map(|(_, _, block)| block).chain(own.copied()).collect();
    }
    hits
}

fn depth(chains: &[Vec<u32>], block: u32) -> usize {
    chains
        .iter()
        .find_map(|chain| chain.iter().position(|other| *other == block))
        .expect("a block of a chain")
}

#[test]
fn lru_in_prompt_order_is_that_of_a_simple_model() {
    let trace = sample();
    for capacity in [1, 100, 1000, 5000] {
        let replayed = hits(&trace, settings(EvictionKind::Lru, Chains::Ignored, capacity));
        assert_eq!(replayed, plain_lru(&trace, capacity as usize), "{capacity} blocks");
    }
    for seed in 0..20 {
        let trace = random(seed, 200);
        let replayed = hits(&trace, settings(EvictionKind::Lru, Chains::Ignored, 40));
        assert_eq!(replayed, plain_lru(&trace, 40), "seed {seed}");
    }
}

#[test]
fn opt_is_that_of_a_simple_model_and_no_policy_hits_more() {
    for seed in 0..20 {
        let trace = random(seed, 120);
        for capacity in [3, 20, 60] {
            let opt = replay_opt(&trace, capacity).hits;
            assert_eq!(opt, plain_opt(&trace, capacity as usize), "seed {seed}, {capacity} blocks");
            for kind in EvictionKind::ALL {
                let replayed = hits(&trace, chained(kind, capacity));
                assert!(replayed <= opt, "seed {seed}, {capacity} blocks: {kind:?} {replayed} > {opt}");
            }
        }
    }
}

#[test]
fn lru_of_agents_is_that_of_a_model_by_chains_and_knowing_ends_is_between_it_and_opt() {
    let traces = (0..20).map(|seed| random(seed, 200)).chain([sample()]);
    let mut is_better = false;
    for (number, trace) in traces.enumerate() {
        for capacity in [3, 20, 60, 1000] {
            let of = |knowledge| replay_recency(&trace, capacity, knowledge).hits;
            let lru = hits(&trace, chained(EvictionKind::Lru, capacity));
            assert_eq!(of(Knowledge::Past), lru, "trace {number}, {capacity} blocks");
            let (ends, opt) = (of(Knowledge::Ends), replay_opt(&trace, capacity).hits);
            assert!(lru <= ends && ends <= opt, "trace {number}, {capacity} blocks: {lru} {ends} {opt}");
            is_better |= lru < ends && ends < opt;
        }
    }
    assert!(is_better, "the three differ on some trace");
}

#[test]
fn unlimited_cache_hits_every_block_that_occurred_before() {
    let trace = sample();
    let expected = trace.references() - trace.distinct();
    for kind in EvictionKind::ALL {
        assert_eq!(hits(&trace, chained(kind, u64::MAX)), expected, "{kind:?}");
    }
    assert_eq!(replay_opt(&trace, u64::MAX).hits, expected);
}

#[test]
fn every_policy_keeps_within_its_capacity_and_repeats_itself() {
    let trace = sample();
    for kind in EvictionKind::ALL {
        let replay = || Cluster::new(1, chained(kind, 500)).replay(&trace);
        let first = replay();
        assert_eq!(first, replay(), "{kind:?}");
        let counts = first.counts;
        let entered = counts.references - counts.hits() - counts.unkept;
        assert!(entered - counts.dram_evictions <= 500, "{kind:?}: {counts:?}");
        assert!(counts.hits() > 0 && counts.dram_evictions > 0, "{kind:?}: {counts:?}");
    }
}

#[test]
fn nvme_gets_the_blocks_that_dram_evicts_and_admission_reduces_writes() {
    let trace = sample();
    let tiered = |admission, nvme_blocks| {
        let settings = NodeSettings { nvme_blocks, admission, ..chained(EvictionKind::Lru, 300) };
        Cluster::new(1, settings).replay(&trace).counts
    };
    let all = tiered(AdmissionMode::Always, 1 << 20);
    assert_eq!(all.hits(), trace.references() - trace.distinct(), "nothing is lost");
    assert_eq!(all.nvme_written, trace.distinct(), "each block is written once");
    assert!(all.hits_nvme > 0 && all.hits_dram > 0, "{all:?}");
    let second = tiered(AdmissionMode::SecondUse, 1 << 20);
    assert!(second.nvme_written < all.nvme_written / 2 && second.nvme_written > 0, "{second:?}");
    let small = tiered(AdmissionMode::Always, 5000);
    assert!(small.nvme_evictions > 0 && small.hits() < all.hits(), "{small:?}");
    assert!(small.hits() > hits(&trace, chained(EvictionKind::Lru, 300)), "{small:?}");
}

#[test]
fn nodes_find_the_blocks_of_their_peers() {
    let trace = sample();
    let counts = Cluster::new(4, chained(EvictionKind::Lru, u64::MAX)).replay(&trace).counts;
    assert_eq!(counts.hits(), trace.references() - trace.distinct());
    assert!(counts.hits_peer_dram > 0 && counts.hits_dram > 0, "{counts:?}");
    let settings = NodeSettings { nvme_blocks: 1 << 20, ..chained(EvictionKind::Lru, 300) };
    let counts = Cluster::new(4, settings).replay(&trace).counts;
    assert_eq!(counts.hits(), trace.references() - trace.distinct(), "NVMe keeps all");
    assert!(counts.hits_peer_nvme > 0, "{counts:?}");
}

#[test]
fn tenants_share_a_node_and_one_cannot_displace_the_others() {
    // One tenant sends many new prompts, the other repeats one.
    let mut builder = TraceBuilder::new(ReadOptions::default());
    let mut next = 100;
    for at_ms in 0..240_u64 {
        let (session, ids): (u32, Vec<u64>) = match at_ms % 4 {
            0 => (0, vec![1, 2, 3, 4]),
            _ => (1, (next..next + 6).collect()),
        };
        next += 6;
        let request = TraceRequest {
            at_ms,
            session: Some(session),
            input_tokens: 512 * ids.len() as u64,
            hash_ids: &ids,
            ..TraceRequest::default()
        };
        builder.add("request", &request).expect("a possible request");
    }
    let trace = builder.finish("tenants").expect("requests");
    let with = |tenants| hits(&trace, NodeSettings { tenants, ..chained(EvictionKind::Lru, 12) });
    assert_eq!(with(1), 0, "the flood evicts the prompt");
    assert_eq!(with(2), 59 * 4, "the tenant furthest over its share is evicted from");
}

#[test]
fn request_longer_than_the_capacity_keeps_its_beginning() {
    let prompt: Vec<u64> = (0..10).collect();
    let mut builder = TraceBuilder::new(ReadOptions::default());
    for at_ms in 0..2 {
        let request =
            TraceRequest { at_ms, input_tokens: 5120, hash_ids: &prompt, ..TraceRequest::default() };
        builder.add("request", &request).expect("a possible request");
    }
    let trace = builder.finish("long").expect("requests");
    for kind in EvictionKind::ALL {
        let counts = Cluster::new(1, chained(kind, 4)).replay(&trace).counts;
        assert_eq!((counts.hits(), counts.unkept), (4, 12), "{kind:?}");
    }
    assert_eq!(replay_opt(&trace, 4).hits, 4);
}

#[test]
fn copies_have_blocks_of_their_own() {
    let trace = random(7, 50);
    let copied = trace.clone().copies(3, 10_000, 1).expect("small");
    assert_eq!(copied.references(), 3 * trace.references());
    assert_eq!(copied.distinct(), 3 * trace.distinct());
    assert!(copied.requests().is_sorted_by_key(|request| request.at_ms));
    assert_eq!(
        hits(&copied, chained(EvictionKind::Lru, u64::MAX)),
        3 * (trace.references() - trace.distinct())
    );
}

fn line(timestamp: u64, tokens: u64, ids: &[u64], more: &str) -> String {
    format!(
        "{{\"timestamp\":{timestamp},\"input_length\":{tokens},\"output_length\":1,\"hash_ids\":{ids:?}{more}}}\n"
    )
}

fn refusal(text: &str, options: ReadOptions) -> String {
    parse(text, options).expect_err("refused").to_string()
}

#[test]
fn refused_lines_have_their_number_and_the_remedy() {
    let good = line(5, 1024, &[1, 2], "");
    for (second, words) in [
        (line(4, 512, &[1], ""), vec!["line 2", "4 ms is before 5 ms", "--sort"]),
        (line(6, 512, &[1], ",\"user\":3"), vec!["line 2", "unknown field `user`", "remove the field"]),
        (line(6, 5120, &[1, 2, 3], ""), vec!["line 2", "gap in the prompt", "expected 10", "--allow-gaps"]),
        (line(6, 1024, &[2, 1], ""), vec!["line 2", "hash id 2", "line 1", "--local-ids"]),
        (line(6, 16, &[7], ",\"block_tokens\":0"), vec!["line 2", "0 tokens", "1 to 65535"]),
        ("{}\n".to_owned(), vec!["line 2", "missing field", "an object with timestamp"]),
        ("nonsense\n".to_owned(), vec!["line 2", "expected"]),
    ] {
        let error = refusal(&(good.clone() + &second), ReadOptions::default());
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    let sizes = line(4, 12, &[1], "") + &line(5, 320, &(0..20).collect::<Vec<u64>>(), "");
    let error = refusal(&sizes, ReadOptions::default());
    assert!(error.contains("line 2") && error.contains("no block size"), "{error}");
    assert!(error.contains("--block-tokens 16"), "{error}");
    let empty = refusal("\n", ReadOptions::default());
    assert!(empty.contains("file") && empty.contains("no requests"), "{empty}");
}

#[test]
fn one_trace_has_one_block_size() {
    let text = line(1, 32, &[1, 2], ",\"block_tokens\":16") + &line(2, 64, &[3], ",\"block_tokens\":64");
    let error = refusal(&text, ReadOptions::default());
    assert!(error.contains("line 2") && error.contains("after blocks of 16"), "{error}");
    let stated =
        parse(&line(1, 32, &[1, 2], ""), ReadOptions { block_tokens: Some(16), ..Default::default() });
    assert_eq!(stated.expect("the argument states the size").block_tokens(), 16);
}

#[test]
fn options_accept_gaps_unsorted_times_and_local_ids() {
    let unsorted = line(5, 512, &[1], "") + &line(4, 512, &[2], "");
    let trace = parse(&unsorted, ReadOptions { sort: true, ..Default::default() }).expect("sorted");
    assert_eq!(trace.requests()[0].at_ms, 4);
    let gap = line(5, 5120, &[1, 2, 3], "");
    let trace = parse(&gap, ReadOptions { allow_gaps: true, ..Default::default() }).expect("accepted");
    assert_eq!(trace.references(), 3);
    let local = ReadOptions { scope: IdScope::Session, ..Default::default() };
    let sessions = line(5, 1024, &[1, 2], ",\"session\":0") + &line(6, 1024, &[2, 1], ",\"session\":1");
    assert_eq!(parse(&sessions, local).expect("ids of sessions").distinct(), 4);
    let error = refusal(&line(5, 512, &[1], ""), local);
    assert!(error.contains("line 1") && error.contains("no `session`"), "{error}");
}

fn session(text: &str, options: ReadOptions) -> Result<Trace, TraceError> {
    let mut builder = TraceBuilder::new(options);
    for name in ["a.json", "b.json"] {
        read_session(name, text.as_bytes(), &mut builder)?;
    }
    builder.finish("archive")
}

const SESSION: &str = r#"{"id":"a","block_size":64,"hash_id_scope":"local","requests":[
    {"t":0.0,"in":130,"out":5,"hash_ids":[1,2],"type":"n","think_time":0.0},
    {"t":2.5,"type":"subagent","requests":[{"t":1.0,"in":64,"out":1,"hash_ids":[9]}]},
    {"t":3.0,"in":200,"out":5,"hash_ids":[1,2,3]}]}"#;

#[test]
fn sessions_have_their_own_ids_and_sub_agents_their_start() {
    let trace = session(SESSION, ReadOptions::default()).expect("sessions");
    assert_eq!((trace.sessions(), trace.requests().len(), trace.references()), (2, 6, 12));
    assert_eq!(trace.distinct(), 8, "ids of the two sessions are different blocks");
    assert_eq!(trace.requests().last().map(|request| request.at_ms), Some(3500));
    assert_eq!(hits(&trace, chained(EvictionKind::Lru, u64::MAX)), 4);
    let global = SESSION.replace("local", "global");
    let trace = session(&global, ReadOptions::default()).expect("sessions");
    assert_eq!(trace.distinct(), 4);
    let mut builder = TraceBuilder::new(ReadOptions::default());
    for (name, text) in [("a.json", SESSION), ("b.json", &global), ("c.json", SESSION), ("d.json", &global)] {
        read_session(name, text.as_bytes(), &mut builder).expect("a session");
    }
    let trace = builder.finish("mixed").expect("sessions");
    assert_eq!(trace.distinct(), 3 * 4, "two sessions share ids, the others have their own");
    let times = |seed| {
        let trace =
            session(SESSION, ReadOptions::default()).expect("sessions").started_at_random(60_000, seed);
        trace.requests().to_vec()
    };
    assert_eq!(times(1), times(1));
    assert_ne!(times(1), times(2));
}

#[test]
fn refused_sessions_have_their_request_and_the_remedy() {
    for (from, to, words) in [
        ("\"block_size\":64,", "", vec!["a.json", "no block size", "--block-tokens"]),
        ("\"t\":3.0", "\"t\":2.0", vec!["a.json: request 3", "2000 ms is before 2500 ms"]),
        ("\"t\":1.0", "\"t\":-1.0", vec!["a.json: sub-agent 2, request 1", "invalid time"]),
        ("\"think_time\"", "\"thoughts\"", vec!["a.json", "line 2", "unknown field `thoughts`"]),
        ("[1,2,3]", "[1,3]", vec!["a.json: request 3", "gap in the prompt", "expected 4"]),
        ("[1,2,3]", "[2,1,3]", vec!["a.json: request 3", "hash id 2", "a.json: request 1"]),
        (",\"hash_ids\":[9]", "", vec!["sub-agent 2, request 1", "either hash_ids or requests"]),
    ] {
        let error = session(&SESSION.replace(from, to), ReadOptions::default()).expect_err(to).to_string();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
    let stated = ReadOptions { block_tokens: Some(64), ..Default::default() };
    assert!(session(&SESSION.replace("\"block_size\":64,", ""), stated).is_ok());
}
