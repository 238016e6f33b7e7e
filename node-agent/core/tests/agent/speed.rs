//! How long hot paths take; for people, in release mode:
//! `cargo test --release -p reprise-agent-core --test agent -- --ignored --nocapture speed`.

use std::time::{Duration, Instant};

use reprise_agent_core::agent::{AgentCore, Settings};
use reprise_agent_core::effect::{Effect, LeaseId, RegionId, Reply};
use reprise_agent_core::event::{
    CommitItem, Event, LoadRequest, Priority, Request, RequestId, Scope, SessionOpened,
};
use reprise_policy::{
    BlockKey, Dtype, Layout, LayoutSpec, NamespaceDigest, Parts, SessionId, TenantId, Tick,
};

use crate::memory::checksums;
use crate::world::key;

const SESSION: SessionId = SessionId(1);
const CHAIN: usize = 8192;

/// Blocks in the index besides those that are asked for, so that they lie apart.
const BLOCKS: usize = 400_000;

struct Bench {
    core: AgentCore,
    effects: Vec<Effect>,
    keys: Vec<BlockKey>,
}

fn llama_3_8b() -> Layout {
    LayoutSpec {
        layers: 32,
        parts: Parts::KeyValue,
        kv_heads: 8,
        head_dim: 128,
        dtype: Dtype::Bf16,
        tokens_per_block: 16,
        tp_rank: 0,
        tp_size: 1,
    }
    .validate()
    .expect("valid")
}

#[expect(clippy::disallowed_methods, reason = "this is what is measured")]
fn now() -> Instant {
    Instant::now()
}

impl Bench {
    /// An agent without devices, with this many blocks in DRAM.
    fn new() -> Bench {
        let regions: Vec<_> = (0..4096).map(|region| (RegionId(region), 256 << 20)).collect();
        let (core, effects) = AgentCore::new(Settings::default(), Vec::new(), &regions);
        let mut bench = Bench { core, effects, keys: (0..BLOCKS as u64).map(key).collect() };
        let (tenant, namespace) = (TenantId::DEFAULT, NamespaceDigest([0; 32]));
        let layout = llama_3_8b();
        bench.apply(Event::SessionOpened(SessionOpened { session: SESSION, tenant, namespace, layout }));
        // Spread the chain over the index.
        let order: Vec<usize> = (0..BLOCKS).map(|at| at * 7919 % BLOCKS).collect();
        for some in order.chunks(CHAIN) {
            bench.save(&some.iter().map(|at| bench.keys[*at]).collect::<Vec<_>>());
        }
        bench
    }

    fn save(&mut self, keys: &[BlockKey]) {
        let leases: Vec<LeaseId> = match self.request(Request::Reserve { count: keys.len() as u32 }) {
            Reply::Reserved { leases, .. } => leases.into_iter().map(|(lease, _)| lease).collect(),
            other => panic!("{other:?}"),
        };
        let sums = checksums(1, &llama_3_8b());
        let item = |(lease, key): (LeaseId, &BlockKey)| CommitItem {
            lease,
            key: Some(*key),
            checksums: sums.clone(),
        };
        let items = leases.into_iter().zip(keys).map(item).collect();
        self.request(Request::Commit { items, priority: Priority::Normal });
    }

    fn apply(&mut self, event: Event) {
        self.effects.clear();
        self.core.apply(Tick(1), event, &mut self.effects);
    }

    fn request(&mut self, body: Request) -> Reply {
        self.apply(Event::Request { session: SESSION, request: RequestId(1), body });
        let reply = self.effects.iter().find_map(|effect| match effect {
            Effect::Reply { reply, .. } => Some(reply.clone()),
            _ => None,
        });
        reply.expect("answered at once")
    }
}

/// Median time of a call that is repeated.
fn median(mut call: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..21)
        .map(|_| {
            let start = now();
            call();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2]
}

#[test]
#[ignore = "timing: run in release mode with --ignored --nocapture"]
fn speed_of_match_load_and_commit() {
    let mut bench = Bench::new();
    let chain = bench.keys[1000..1000 + CHAIN].to_vec();
    let match_time = median(|| {
        let body = Request::Match { keys: chain.clone(), scope: Scope::Cluster };
        bench.apply(Event::Request { session: SESSION, request: RequestId(1), body });
    });
    let mut loads = Vec::new();
    let load_time = median(|| {
        let keys = chain.clone();
        let wanted = LoadRequest { keys, deadline: Duration::ZERO, read_bytes: 0, scope: Scope::Cluster };
        let Reply::Loaded { load, .. } = bench.request(Request::Load(wanted)) else { panic!("not loaded") };
        loads.push(load);
    });
    let mut loads = loads.into_iter();
    let release_time = median(|| {
        let load = loads.next().expect("as many releases as loads");
        bench.request(Request::Release { load });
    });
    let mut next = BLOCKS as u64;
    let save_time = median(|| {
        let keys: Vec<BlockKey> = (next..next + 1024).map(key).collect();
        next += 1024;
        bench.save(&keys);
    });
    println!(
        "match of {CHAIN}: {match_time:?}; load (all in DRAM): {load_time:?}; release: {release_time:?}"
    );
    println!("reserve and commit of 1024: {save_time:?}; {BLOCKS} blocks in the index");
    assert!(match_time < Duration::from_millis(1), "a match takes {match_time:?}");
    assert!(load_time < Duration::from_millis(10), "a load takes {load_time:?}");
}
