//! A tenant that floods two agents at ten times its quotas costs another tenant no hits, and configured weights divide
//! the reads of a device.
//!
//! Times are measured by `reprise bench flood`, because they depend on the machine.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use reprise_client::{LoadRequest, Scope, Source};
use reprise_e2e::content::{device_slot_bytes, keys, large};
use reprise_e2e::control_plane::Store;
use reprise_e2e::{
    Agent, AgentConfig, ControlPlane, Engine, LoadParams, Outcome, PATIENCE, TestEnv, wait_until,
};
use reprise_policy::ByteSize;

/// Blocks of 1 MiB that the flooding tenant may have on each node's NVMe. It saves ten times as many on each.
const QUOTA: u64 = 16;
const FLOOD: u64 = 10 * QUOTA;

/// Sessions of the flood on each node.
const SESSIONS: u64 = 4;

/// Blocks that the other tenant has on each node, three times as many as in DRAM.
const BLOCKS: u64 = 24;

/// Least number of times that it replays them.
const REPLAYS: u64 = 4;

fn config(node: &str, plane: &ControlPlane) -> AgentConfig {
    let (dram, nvme) = (8 * large().slot_bytes(), device_slot_bytes(&large()));
    let tenants = format!(
        "[[tenants]]\nname = \"team-a\"\ndram = {{ limit = \"{dram}\" }}\nnvme = {{ limit = \"{}\" }}\n\
         [[tenants]]\nname = \"team-b\"\ndram = {{ limit = \"{dram}\" }}\nnvme = {{ limit = \"{}\" }}\n\
         bandwidth = {{ weight = 4 }}\n",
        QUOTA * nvme,
        2 * BLOCKS * nvme,
    );
    AgentConfig {
        arena: ByteSize(48 << 20),
        region: ByteSize(8 << 20),
        pool: Some(ByteSize(160 << 20)),
        control_plane: vec![plane.address().to_owned()],
        extra: tenants,
        ..AgentConfig::named(node)
    }
}

/// Loads of the tenant: requested blocks, hits and their sources.
#[derive(Default)]
struct Replay {
    blocks: u64,
    hits: u64,
    from_nvme: u64,
    from_peer: u64,
}

/// Loads all blocks of both nodes a number of times, and then until `is_over`.
fn replay(engine: &Engine, is_over: impl Fn() -> bool) -> Replay {
    let mut replay = Replay::default();
    let parts: Vec<Vec<u64>> = [0, 1000]
        .iter()
        .flat_map(|first| (0..BLOCKS / 4).map(move |part| (first + 4 * part..first + 4 * part + 4).collect()))
        .collect();
    for round in 0.. {
        if round >= REPLAYS && is_over() {
            break;
        }
        for part in &parts {
            let outcomes = engine.load(part, &LoadParams::CLUSTER).expect("the agent responds");
            replay.blocks += outcomes.len() as u64;
            for outcome in outcomes {
                let Outcome::Verified(source) = outcome else { continue };
                replay.hits += 1;
                match source {
                    Source::OwnNvme => replay.from_nvme += 1,
                    Source::PeerDram | Source::PeerNvme => replay.from_peer += 1,
                    Source::OwnDram => {}
                }
            }
        }
    }
    replay
}

/// Saves new blocks and loads them and older ones, from both nodes, until it is over.
fn flood(agent: &Agent, first: u64, is_over: &AtomicBool, saved: &AtomicU64) {
    let engine = agent.engine_of(large(), "team-a");
    for number in (first..).step_by(2) {
        if is_over.load(Ordering::Relaxed) {
            break;
        }
        engine.save(&[number, number + 1]).expect("the agent responds");
        saved.fetch_add(2, Ordering::Relaxed);
        let oldest = number.saturating_sub(6).max(first);
        let blocks: Vec<u64> = (oldest..number + 2).collect();
        engine.load(&blocks, &LoadParams::CLUSTER).expect("the agent responds");
    }
}

#[test]
fn flood_at_ten_times_its_quotas_costs_another_tenant_no_hits() {
    let env = TestEnv::new();
    let plane = env.control_plane(Store::Memory);
    let agents = ["first", "second"].map(|node| env.agent(&config(node, &plane)));
    let [b, on_peer] = [&agents[0], &agents[1]].map(|agent| agent.engine_of(large(), "team-b"));
    for (engine, first) in [(&b, 0), (&on_peer, 1000)] {
        for start in (first..first + BLOCKS).step_by(4) {
            engine.save_durably(&(start..start + 4).collect::<Vec<u64>>());
        }
    }
    let all: Vec<u64> = (0..BLOCKS).chain(1000..1000 + BLOCKS).collect();
    wait_until("the directory has all blocks", PATIENCE, || {
        (b.matches(&all, Scope::Cluster).len() == all.len()).then_some(())
    });
    let alone = replay(&b, || true);
    assert_eq!(alone.hits, alone.blocks, "the working set is within the quotas");

    let (is_over, saved) = (AtomicBool::new(false), [AtomicU64::new(0), AtomicU64::new(0)]);
    let during = thread::scope(|scope| {
        let mut sessions = Vec::new();
        for (node, agent) in (0..).zip(&agents) {
            for session in 0..SESSIONS {
                let (first, is_over) = (1_000_000 * (1 + node * SESSIONS + session), &is_over);
                let saved = &saved[node as usize];
                sessions.push(scope.spawn(move || flood(agent, first, is_over, saved)));
            }
        }
        let _over = Over(&is_over);
        let is_flooded = || saved.iter().all(|saved| saved.load(Ordering::Relaxed) >= FLOOD);
        // A session that ends early has panicked, which the scope reports.
        replay(&b, || is_flooded() || sessions.iter().any(|session| session.is_finished()))
    });
    let lost = 100.0 * (during.blocks - during.hits) as f64 / during.blocks as f64;
    assert!(lost <= 1.0, "{lost} % of {} blocks were lost", during.blocks);
    assert!(during.from_nvme > 0 && during.from_peer > 0, "loads reached both channels");
    for agent in &agents {
        assert_eq!(agent.admin().counter("corrupt_blocks"), 0);
    }
}

/// Sessions of each tenant that read from NVMe, the blocks of each load, and the loads that a session repeats. A
/// tenant has a third of its blocks in DRAM at most, so the blocks of a load have left DRAM when it is repeated.
const READERS: u64 = 6;
const READ_BLOCKS: u64 = 8;
const READ_LOADS: u64 = 4;

/// Bytes that both tenants read between two comparisons: 256 MiB.
const COMPARED_BYTES: f64 = 268_435_456.0;

/// Loads the blocks of one session in turn, without a copy of their data, until it is over.
fn read(agent: &Agent, tenant: &str, first: u64, is_over: &AtomicBool) {
    let (engine, last_layer) = (agent.engine_of(large(), tenant), large().layers() - 1);
    for number in (0..READ_LOADS).cycle() {
        if is_over.load(Ordering::Relaxed) {
            break;
        }
        let start = first + number * READ_BLOCKS;
        let blocks = keys(&(start..start + READ_BLOCKS).collect::<Vec<u64>>());
        let request = LoadRequest { deadline: PATIENCE, scope: Scope::Local, ..LoadRequest::new(blocks) };
        let load = engine.client().load(&request).expect("the agent responds");
        load.wait_layer(last_layer, PATIENCE).expect("all blocks are stored");
    }
}

/// Bytes of each tenant whose read from NVMe was started.
fn read_bytes(agent: &Agent) -> [f64; 2] {
    let name = "reprise_agent_tenant_nvme_read_bytes_total";
    ["team-a", "team-b"].map(|tenant| agent.admin().metric(name, tenant))
}

#[test]
fn tenant_with_four_times_the_weight_reads_more_than_twice_as_much_while_both_wait() {
    let env = TestEnv::new();
    let of_session = READ_LOADS * READ_BLOCKS;
    let blocks = READERS * of_session;
    let dram = READERS * READ_BLOCKS * large().slot_bytes() + (16 << 20);
    let limits = format!(
        "dram = {{ limit = \"{dram}\" }}\nnvme = {{ limit = \"{}\" }}\n",
        (blocks + 32) * device_slot_bytes(&large()),
    );
    let agent = env.agent(&AgentConfig {
        arena: ByteSize(2 * dram),
        region: ByteSize(8 << 20),
        pool: Some(ByteSize(640 << 20)),
        extra: format!(
            "[[tenants]]\nname = \"team-a\"\n{limits}[[tenants]]\nname = \"team-b\"\n{limits}\
             bandwidth = {{ weight = 4 }}\n"
        ),
        ..AgentConfig::named("first")
    });
    let tenants = [("team-a", 0), ("team-b", 100_000)];
    for (tenant, first) in tenants {
        let engine = agent.engine_of(large(), tenant);
        for start in (first..first + blocks).step_by(4) {
            engine.save_durably(&(start..start + 4).collect::<Vec<u64>>());
        }
    }
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let _over = Over(&is_over);
        for (tenant, first) in tenants {
            for session in 0..READERS {
                let (agent, is_over) = (&agent, &is_over);
                scope.spawn(move || read(agent, tenant, first + session * of_session, is_over));
            }
        }
        // A session of a busy machine may stop for a while, so that its tenant has no reads waiting: then the next
        // bytes decide. Without weights, no comparison succeeds.
        let mut before = read_bytes(&agent);
        wait_until("the tenant with the weight of 4 reads more than twice as much", PATIENCE, || {
            let now = read_bytes(&agent);
            let [a, b] = [now[0] - before[0], now[1] - before[1]];
            if a + b < COMPARED_BYTES {
                return None;
            }
            before = now;
            (a > 0.0 && b / a > 2.0).then_some(())
        });
    });
    assert_eq!(agent.admin().counter("corrupt_blocks"), 0);
}

/// Ends the sessions, also if the test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
