//! Overload: concurrent loads share one read, deadlines are kept, and budgets are never exceeded while far
//! more is saved than fits.

use std::process::Command;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rand::RngExt;
use reprise_client::{BlockStatus, ClientError, Scope, Source};
use reprise_e2e::admin::Counters;
use reprise_e2e::content::{device_slot_bytes, large, small};
use reprise_e2e::logs::{PLAIN, read};
use reprise_e2e::process::binary;
use reprise_e2e::seed::{print_line, seeded};
use reprise_e2e::{Admin, Agent, AgentConfig, LoadParams, Outcome, PATIENCE, TestEnv, fast_call};
use reprise_policy::ByteSize;
use rustix::process::{Pid, Resource, Rlimit, prlimit};

/// Returns the growth of a counter.
fn grown(after: &Counters, before: &Counters, name: &str) -> u64 {
    after.get(name) - before.get(name)
}

/// Returns an agent for blocks of 1 MiB. A segment of 2 MiB has room for one block with its header.
fn for_large_blocks() -> AgentConfig {
    AgentConfig {
        arena: ByteSize(64 << 20),
        region: ByteSize(32 << 20),
        pool: Some(ByteSize(160 << 20)),
        ..AgentConfig::named("node")
    }
}

#[test]
fn concurrent_loads_of_cold_blocks_read_each_block_once() {
    const ENGINES: usize = 8;
    let env = TestEnv::new();
    let agent = env.agent(&for_large_blocks());
    let blocks: Vec<u64> = (0..32).collect();
    agent.engine(large()).save_durably(&blocks);
    for _ in 0..5 {
        agent.admin().wait_quiet(PATIENCE);
        agent.engine(large()).trim();
        let before = agent.admin().counters();
        let barrier = Barrier::new(ENGINES);
        std::thread::scope(|scope| {
            for _ in 0..ENGINES {
                scope.spawn(|| {
                    let engine = agent.engine(large());
                    barrier.wait();
                    engine.load_all(&blocks, &LoadParams::LOCAL);
                });
            }
        });
        let after = agent.admin().counters();
        assert_eq!(grown(&after, &before, "device_fills"), 32);
        assert_eq!(grown(&after, &before, "device_fill_bytes"), 32 * large().block_bytes());
        let served = ["hit_blocks_own_dram", "hit_blocks_own_nvme"].map(|name| grown(&after, &before, name));
        assert_eq!(served.iter().sum::<u64>(), 32 * ENGINES as u64, "{served:?}");
    }
    assert!(agent.admin().counter("single_flight_joins") > 0, "some loads joined a read in flight");
}

#[test]
fn a_load_with_a_deadline_of_a_millisecond_ends_on_time_with_partial_results() {
    let env = TestEnv::new();
    let agent = env.agent(&for_large_blocks());
    let engine = agent.engine(large());
    let blocks: Vec<u64> = (0..40).collect();
    engine.save_durably(&blocks);
    let deadline = Duration::from_millis(1);
    let mut late = 0;
    for _ in 0..20 {
        agent.admin().wait_quiet(PATIENCE);
        engine.trim();
        let load = || engine.load(&blocks, &LoadParams::LOCAL.within(deadline)).expect("a load");
        let outcomes = fast_call("a load with a short deadline", deadline + Duration::from_millis(500), load);
        let is_expected = |outcome: &Outcome| {
            // A block whose read finished after the response has the status `Failed`.
            let late = Outcome::Missing(BlockStatus::Deadline);
            outcome.is_verified() || *outcome == late || *outcome == Outcome::Missing(BlockStatus::Failed)
        };
        assert!(outcomes.iter().all(is_expected), "{outcomes:?}");
        late += outcomes.iter().filter(|outcome| !outcome.is_verified()).count();
    }
    assert!(late > 0, "40 MiB do not come from a disk within a millisecond");
    print_line(&format!("{late} of 800 blocks missed the deadline of a millisecond"));
    // The blocks that were late can be loaded afterwards.
    agent.admin().wait_quiet(PATIENCE);
    engine.load_all(&blocks, &LoadParams::LOCAL);
    assert_eq!(agent.admin().counter("corrupt_blocks"), 0);
}

/// Checks the budgets at one moment.
fn assert_within_budget(counters: &Counters) {
    let get = |name| counters.get(name);
    assert!(get("arena_used_bytes") <= get("arena_bytes"), "{counters:?}");
    assert_eq!(get("arena_used_bytes") + get("arena_free_bytes"), get("arena_bytes"));
    assert!(get("reserved_bytes") + get("unsaved_bytes") <= get("arena_bytes") / 4 * 3, "{counters:?}");
    assert!(
        get("pool_used_bytes") + get("pool_pending_free_bytes") <= get("pool_capacity_bytes"),
        "{counters:?}"
    );
    assert!(get("journal_used_bytes") <= get("journal_capacity_bytes"), "{counters:?}");
    assert!(get("nvme_blocks") * device_slot_bytes(&small()) <= get("pool_capacity_bytes"), "{counters:?}");
}

/// Checks the budgets until `stop` is set. Returns the number of checks.
fn watch_budgets(admin: &Admin, stop: &AtomicBool) -> usize {
    let mut checks = 0;
    while !stop.load(Ordering::Relaxed) {
        assert_within_budget(&admin.counters());
        checks += 1;
    }
    checks
}

#[test]
fn saving_far_more_than_fits_keeps_every_budget_and_serves_only_right_blocks() {
    // Blocks of 32 KiB: 512 fit into the arena, and some 840 into the pool.
    const BLOCKS: u64 = 4 * 512;
    let env = TestEnv::new();
    let mut rng = seeded("pressure");
    let agent = env.agent(&AgentConfig { pool: Some(ByteSize(32 << 20)), ..AgentConfig::named("node") });
    assert!(BLOCKS * small().block_bytes() >= 2 * (32 << 20), "twice the pool");
    let stop = AtomicBool::new(false);
    let checks = std::thread::scope(|scope| {
        let watching = scope.spawn(|| watch_budgets(agent.admin(), &stop));
        let loading = scope.spawn(|| {
            let engine = agent.engine(small());
            let mut loaded = 0;
            while !stop.load(Ordering::Relaxed) {
                let from = rng.random_range(0..BLOCKS - 40);
                let outcomes =
                    engine.load(&(from..from + 40).collect::<Vec<_>>(), &LoadParams::LOCAL).expect("a load");
                let is_expected = |outcome: &Outcome| match outcome {
                    Outcome::Verified(_) => true,
                    Outcome::Missing(status) => matches!(status, BlockStatus::Miss | BlockStatus::NoSpace),
                    Outcome::Corrupt | Outcome::Wrong { .. } => false,
                };
                assert!(outcomes.iter().all(is_expected), "{outcomes:?}");
                loaded += outcomes.iter().filter(|outcome| outcome.is_verified()).count();
            }
            loaded
        });
        let engine = agent.engine(small());
        for batch in (0..BLOCKS).collect::<Vec<_>>().chunks(32) {
            engine.save_durably(batch);
        }
        stop.store(true, Ordering::Relaxed);
        let loaded = loading.join().expect("no corrupt block");
        assert!(loaded > 0, "some loads hit");
        watching.join().expect("within budget")
    });
    assert!(checks > 20, "the budgets were checked only {checks} times");
    let counters = agent.admin().wait_quiet(PATIENCE);
    assert_within_budget(&counters);
    assert!(counters.get("dram_evictions") > BLOCKS - 512 && counters.get("nvme_evictions") > BLOCKS / 2);
    // The least recently used blocks are evicted first: blocks that are saved now, without other load,
    // remain.
    let engine = agent.engine(small());
    let last: Vec<u64> = (BLOCKS..BLOCKS + 300).collect();
    last.chunks(30).for_each(|batch| engine.save_durably(batch));
    assert_eq!(engine.matches(&last, Scope::Local).len(), 300);
    engine.trim();
    assert_eq!(engine.load_all(&last, &LoadParams::LOCAL), vec![Source::OwnNvme; 300]);
    let stored = agent.admin().wait_quiet(PATIENCE).get("nvme_blocks");
    engine.trim();
    let is_found = |number: &u64| !engine.matches(&[*number], Scope::Local).is_empty();
    let found = (0..BLOCKS + 300).filter(is_found).count() as u64;
    assert_eq!(found, stored, "every block on the device is found, and no other one");
}

#[test]
fn an_agent_without_a_pool_keeps_what_fits_and_reports_no_block_as_durable() {
    let env = TestEnv::new();
    let agent = env.agent(&AgentConfig { pool: None, ..AgentConfig::named("node") });
    let engine = agent.engine(small());
    for from in (0..1000).step_by(100) {
        let batch: Vec<u64> = (from..from + 100).collect();
        let committed = engine.save(&batch).expect("committed");
        let outcome = engine.client().wait_durable(committed.ticket, PATIENCE).expect("a durability notice");
        assert_eq!((outcome.durable, outcome.lost_keys.len()), (0, 100));
        engine.load_all(&batch, &LoadParams::LOCAL);
        assert_within_arena(&agent.admin().counters());
    }
    assert!(engine.matches(&[0], Scope::Local).is_empty(), "evicted");
    assert_eq!(engine.matches(&[999], Scope::Local), [Source::OwnDram]);
}

fn assert_within_arena(counters: &Counters) {
    assert!(counters.get("arena_used_bytes") <= counters.get("arena_bytes"));
}

#[test]
fn a_stopping_agent_makes_committed_blocks_durable() {
    let env = TestEnv::new();
    let slow = Duration::from_secs(10);
    let mut agent = env.agent(&AgentConfig { writeback_delay: slow, ..AgentConfig::named("node") });
    let engine = agent.engine(small());
    let blocks: Vec<u64> = (0..100).collect();
    let committed = engine.save(&blocks).expect("committed");
    assert_eq!(
        agent.admin().counter("nvme_blocks"),
        0,
        "only the flush at the stop makes the blocks durable"
    );
    agent.stop();
    let outcome = engine
        .client()
        .wait_durable(committed.ticket, Duration::ZERO)
        .expect("a durability notice before the end");
    assert_eq!(outcome.durable, 100);
    assert!(!agent.files().socket.exists(), "the socket is removed");
    let error = engine.client().stats().expect_err("the session has ended");
    assert!(matches!(error, ClientError::AgentLost { .. } | ClientError::Busy(_)), "{error}");
    agent.start();
    assert_eq!(agent.admin().json("/status")["devices"][0]["recovered_blocks"], 100);
    assert_eq!(agent.engine(small()).load_all(&blocks, &LoadParams::LOCAL), vec![Source::OwnNvme; 100]);
}

/// Limits the agent's files to their first MiB from now on, like a full disk.
fn fill_disk(agent: &mut Agent) {
    let process = i32::try_from(agent.running().id()).ok().and_then(Pid::from_raw);
    let limit = Rlimit { current: Some(1 << 20), maximum: None };
    prlimit(process, Resource::Fsize, limit).expect("a child's limits can be set");
}

#[test]
fn a_disk_that_fills_up_ends_writing_but_costs_no_block() {
    let env = TestEnv::new();
    env.require("rejects writes");
    let files = env.configure(&AgentConfig::named("node"));
    let mut command = Command::new(binary("reprise-agent"));
    command.arg("--config").arg(&files.config);
    let mut agent = env.launch(&files, command).expect("there is room to start");
    let engine = agent.engine(small());
    let (before, after): (Vec<u64>, Vec<u64>) = ((0..20).collect(), (100..140).collect());
    engine.save_durably(&before);
    fill_disk(&mut agent);
    for batch in after.chunks(20) {
        let committed = engine.save(batch).expect("there is room in memory");
        let outcome = engine.client().wait_durable(committed.ticket, PATIENCE).expect("a durability notice");
        assert_eq!((outcome.durable, outcome.lost_keys.len()), (0, 20), "no block is durable");
    }
    let everything = [before.clone(), after.clone()].concat();
    assert_eq!(engine.load_all(&everything, &LoadParams::LOCAL), vec![Source::OwnDram; 60]);
    assert_eq!(agent.admin().counter("devices_lost"), 0);
    engine.trim();
    assert_eq!(engine.load_all(&before, &LoadParams::LOCAL), vec![Source::OwnNvme; 20], "it is still read");
    let log = read(&files.log);
    let is_problem = |line: &&str| line.contains("ERROR") || line.contains("WARN") && !line.contains(PLAIN);
    let problems: Vec<&str> = log.lines().filter(is_problem).collect();
    assert!(
        problems.len() == 1 && problems[0].contains("no space") && problems[0].contains("free space"),
        "{problems:?}"
    );
    drop(engine);
    agent.stop();
    // When the disk has room again, the durable blocks are found.
    agent.start();
    let engine = agent.engine(small());
    assert_eq!(engine.load_all(&before, &LoadParams::LOCAL), vec![Source::OwnNvme; 20]);
    assert_eq!(engine.matches(&after, Scope::Local), []);
    engine.save_durably(&after);
}
