//! Speed of hot paths, to be read by developers; run in release mode: `cargo test --release -p
//! reprise-agent-core --test agent -- --ignored --nocapture speed`.

use std::time::{Duration, Instant};

use reprise_agent_core::effect::{Effect, FillId, LeaseId, PlaceKind, RegionId, Reply};
use reprise_agent_core::event::{
    CommitItem, CommitRequest, Event, FillUpdate, LoadRequest, Priority, Ranks, Request, RequestId, Scope,
    SessionOpened,
};
use reprise_agent_core::pool::{DevicePool, StoredBlock};
use reprise_agent_core::{AgentCore, Settings};
use reprise_policy::{
    BlockKey, Dtype, Layout, LayoutSpec, NamespaceDigest, Parts, SessionId, TenantId, Tick, Tier,
};

use crate::disk::Disk;
use crate::harness::{key, large_layout};
use crate::memory::checksums;

const SESSION: SessionId = SessionId(1);
const CHAIN: usize = 8192;

/// Number of other blocks in the index, so that the requested ones are not adjacent.
const BLOCKS: usize = 400_000;

struct Bench {
    core: AgentCore,
    effects: Vec<Effect>,
    keys: Vec<BlockKey>,
    layout: Layout,
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

#[expect(clippy::disallowed_methods, reason = "this test measures real time")]
fn now() -> Instant {
    Instant::now()
}

impl Bench {
    /// Agent with `blocks` blocks in DRAM.
    fn new(pools: Vec<(DevicePool, Vec<StoredBlock>)>, layout: Layout, blocks: usize) -> Bench {
        let regions: Vec<_> = (0..4096).map(|region| (RegionId(region), 256 << 20)).collect();
        let settings = Settings { load_deadline_default: Duration::from_secs(600), ..Settings::default() };
        let (core, effects) = AgentCore::new(settings, pools, &regions);
        let keys = (0..blocks as u64).map(key).collect();
        let mut bench = Bench { core, effects, keys, layout };
        let (tenant, namespace) = (TenantId::DEFAULT, NamespaceDigest([0; 32]));
        bench.apply(Event::SessionOpened(SessionOpened {
            session: SESSION,
            tenant,
            namespace,
            layout,
            gpu: None,
        }));
        bench
    }

    /// Spreads the blocks over the index.
    fn save_all(&mut self) {
        let blocks = self.keys.len();
        let order: Vec<usize> = (0..blocks).map(|at| at * 7919 % blocks).collect();
        for some in order.chunks(CHAIN) {
            self.save(&some.iter().map(|at| self.keys[*at]).collect::<Vec<_>>());
        }
    }

    fn save(&mut self, keys: &[BlockKey]) {
        let leases: Vec<LeaseId> =
            match self.request(Request::Reserve { count: keys.len() as u32, kind: PlaceKind::Arena }) {
                Reply::Reserved { leases, .. } => leases.iter().map(|(lease, _)| *lease).collect(),
                other => panic!("{other:?}"),
            };
        let sums = checksums(1, &self.layout);
        let item = |(lease, key): (LeaseId, &BlockKey)| CommitItem {
            lease,
            key: Some(*key),
            checksums: sums.clone(),
        };
        let items = leases.into_iter().zip(keys).map(item).collect();
        self.request(Request::Commit(CommitRequest {
            items,
            priority: Priority::Normal,
            parent: None,
            position: Some(0),
        }));
    }

    fn apply(&mut self, event: Event) {
        self.effects.clear();
        self.core.apply(Tick(1), event, &mut self.effects);
    }

    /// Completes all device operations at once.
    fn finish_device_ops(&mut self) {
        self.core.apply(Tick(1 << 20), Event::Tick, &mut self.effects);
        while let Some(effect) = self.effects.pop() {
            if let Effect::Device { device, op } = effect {
                let done = Event::DeviceDone { device, token: op.token, result: Ok(()) };
                self.core.apply(Tick(1 << 20), done, &mut self.effects);
            }
        }
    }

    fn request(&mut self, body: Request) -> &Reply {
        self.apply(Event::Request { session: SESSION, request: RequestId(1), body, received: Tick(1) });
        let reply = self.effects.iter().find_map(|effect| match effect {
            Effect::Reply { reply, .. } => Some(reply),
            _ => None,
        });
        reply.expect("answered at once")
    }
}

/// Best time of a repeated call: other load on the machine can only add time.
fn best(mut call: impl FnMut()) -> Duration {
    let time = |_| {
        let start = now();
        call();
        start.elapsed()
    };
    (0..21).map(time).min().expect("21 of them")
}

#[test]
#[ignore = "timing: run in release mode with --ignored --nocapture"]
fn speed_of_match_load_and_commit() {
    let mut bench = Bench::new(Vec::new(), llama_3_8b(), BLOCKS);
    bench.save_all();
    let chain = bench.keys[1000..1000 + CHAIN].to_vec();
    let match_time = best(|| {
        let body = Request::Match {
            keys: chain.clone(),
            ranks: Ranks::Own,
            position: Some(0),
            scope: Scope::Cluster,
            public: None,
        };
        bench.apply(Event::Request { session: SESSION, request: RequestId(1), body, received: Tick(1) });
    });
    let mut loads = Vec::new();
    let load_time = best(|| {
        let keys = chain.clone();
        let wanted = LoadRequest {
            keys,
            deadline: Duration::ZERO,
            read_bytes: 0,
            scope: Scope::Cluster,
            public: None,
        };
        let Reply::Loaded { load, .. } = bench.request(Request::Load(wanted)) else { panic!("not loaded") };
        loads.push(*load);
    });
    let mut loads = loads.into_iter();
    let release_time = best(|| {
        let load = loads.next().expect("as many releases as loads");
        bench.request(Request::Release { load });
    });
    let mut next = BLOCKS as u64;
    let save_time = best(|| {
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

#[test]
#[ignore = "timing: run in release mode with --ignored --nocapture"]
fn speed_of_a_cold_load_and_of_its_progress() {
    let (_, pool) = Disk::format(1 << 30, 0);
    let layout = large_layout();
    let mut bench = Bench::new(vec![(pool, Vec::new())], layout, CHAIN);
    bench.save_all();
    bench.finish_device_ops();
    bench.request(Request::Trim);
    assert_eq!(bench.core.counters().nvme_blocks as usize, CHAIN);
    let wanted = LoadRequest {
        keys: bench.keys.clone(),
        deadline: Duration::ZERO,
        read_bytes: 0,
        scope: Scope::Cluster,
        public: None,
    };
    let body = Request::Load(wanted);
    let start = now();
    bench.apply(Event::Request { session: SESSION, request: RequestId(1), body, received: Tick(1) });
    let load_time = start.elapsed();
    let fills: Vec<FillId> = bench
        .effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::ReadBlocks { batch, .. } => Some(batch.blocks.iter().map(|read| read.fill)),
            _ => None,
        })
        .flatten()
        .collect();
    assert_eq!(fills.len(), CHAIN);
    let sums = checksums(1, &layout);
    let start = now();
    for layers in 1..=layout.layers() {
        for fill in &fills {
            let checksums = (layers == 1).then(|| sums.clone());
            let update = FillUpdate::Layers { layers, checksums, tier: Tier::Nvme };
            bench.apply(Event::Fill { fill: *fill, update });
        }
    }
    let updates = CHAIN as u32 * layout.layers();
    let update_time = start.elapsed() / updates;
    assert_eq!(bench.core.counters().hit_blocks_own_nvme as usize, CHAIN);
    println!("cold load of {CHAIN}: {load_time:?}; each of {updates} updates: {update_time:?}");
    assert!(load_time < Duration::from_millis(50), "a cold load takes {load_time:?}");
    assert!(update_time < Duration::from_micros(5), "an update takes {update_time:?}");
}
