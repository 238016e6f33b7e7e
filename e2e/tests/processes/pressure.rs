//! Too much at once: one read for many who want the same, deadlines that are kept, and budgets that are never exceeded
//! while far more is saved than fits.

use std::process::Command;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rand::RngExt;
use reprise_client::{BlockStatus, ClientError, Scope, Source};
use reprise_e2e::admin::Counters;
use reprise_e2e::content::{device_slot_bytes, large, small};
use reprise_e2e::logs::read;
use reprise_e2e::process::binary;
use reprise_e2e::seed::{say, seeded};
use reprise_e2e::{Admin, Agent, AgentConfig, Loading, Outcome, PATIENCE, World};
use reprise_policy::ByteSize;
use rustix::process::{Pid, Resource, Rlimit, prlimit};

/// What was counted in between.
fn grown(after: &Counters, before: &Counters, name: &str) -> u64 {
    after.get(name) - before.get(name)
}

/// An agent for blocks of 1 MiB. A segment of 2 MiB has room for one and its header.
fn for_large_blocks() -> AgentConfig {
    AgentConfig {
        arena: ByteSize(64 << 20),
        region: ByteSize(32 << 20),
        pool: Some(ByteSize(160 << 20)),
        ..AgentConfig::named("node")
    }
}

#[test]
fn many_engines_that_load_the_same_cold_blocks_cause_one_read_of_each() {
    const ENGINES: usize = 8;
    let world = World::new();
    let agent = world.agent(&for_large_blocks());
    let blocks: Vec<u64> = (0..32).collect();
    agent.engine(large()).save_durably(&blocks);
    for _ in 0..5 {
        agent.admin().wait_quiet(PATIENCE);
        agent.engine(large()).trim();
        let before = agent.admin().counters();
        let together = Barrier::new(ENGINES);
        std::thread::scope(|scope| {
            for _ in 0..ENGINES {
                scope.spawn(|| {
                    let engine = agent.engine(large());
                    together.wait();
                    engine.load_all(&blocks, &Loading::LOCAL);
                });
            }
        });
        let after = agent.admin().counters();
        assert_eq!(grown(&after, &before, "device_fills"), 32);
        assert_eq!(grown(&after, &before, "device_fill_bytes"), 32 * large().block_bytes());
        let served = ["hit_blocks_own_dram", "hit_blocks_own_nvme"].map(|name| grown(&after, &before, name));
        assert_eq!(served.iter().sum::<u64>(), 32 * ENGINES as u64, "{served:?}");
    }
    assert!(agent.admin().counter("single_flight_joins") > 0, "some loads met a read under way");
}

#[test]
fn a_load_with_a_deadline_of_a_millisecond_ends_on_time_with_what_is_there() {
    let world = World::new();
    let agent = world.agent(&for_large_blocks());
    let engine = agent.engine(large());
    let blocks: Vec<u64> = (0..40).collect();
    engine.save_durably(&blocks);
    let deadline = Duration::from_millis(1);
    let mut late = 0;
    for _ in 0..20 {
        agent.admin().wait_quiet(PATIENCE);
        engine.trim();
        let (outcomes, took) = engine.timed_load(&blocks, &Loading::LOCAL.within(deadline));
        assert!(
            took < deadline + Duration::from_millis(500),
            "a deadline of {deadline:?} passed after {took:?}"
        );
        let fine = |outcome: &Outcome| {
            // A block that failed after the answer was late, too.
            let late = Outcome::Missing(BlockStatus::Deadline);
            outcome.is_right() || *outcome == late || *outcome == Outcome::Missing(BlockStatus::Failed)
        };
        assert!(outcomes.iter().all(fine), "{outcomes:?}");
        late += outcomes.iter().filter(|outcome| !outcome.is_right()).count();
    }
    assert!(late > 0, "40 MiB do not come from a disk within a millisecond");
    say(&format!("{late} of 800 blocks were late for a deadline of a millisecond"));
    // Being late does no harm to what was asked for.
    agent.admin().wait_quiet(PATIENCE);
    engine.load_all(&blocks, &Loading::LOCAL);
    assert_eq!(agent.admin().counter("corrupt_blocks"), 0);
}

/// Checks budgets at one moment.
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

/// Looks at the budgets until told to stop; how often.
fn watch_budgets(admin: &Admin, stop: &AtomicBool) -> usize {
    let mut looks = 0;
    while !stop.load(Ordering::Relaxed) {
        assert_within_budget(&admin.counters());
        looks += 1;
    }
    looks
}

#[test]
fn saving_far_more_than_fits_keeps_every_budget_and_every_load_right_or_a_miss() {
    // Blocks of 32 KiB: 512 in the arena, some 840 in the pool.
    const BLOCKS: u64 = 4 * 512;
    let world = World::new();
    let mut rng = seeded("pressure");
    let agent = world.agent(&AgentConfig { pool: Some(ByteSize(32 << 20)), ..AgentConfig::named("node") });
    assert!(BLOCKS * small().block_bytes() >= 2 * (32 << 20), "twice the pool");
    let stop = AtomicBool::new(false);
    let looks = std::thread::scope(|scope| {
        let watching = scope.spawn(|| watch_budgets(agent.admin(), &stop));
        let loading = scope.spawn(|| {
            let engine = agent.engine(small());
            let mut came = 0;
            while !stop.load(Ordering::Relaxed) {
                let from = rng.random_range(0..BLOCKS - 40);
                let outcomes =
                    engine.load(&(from..from + 40).collect::<Vec<_>>(), &Loading::LOCAL).expect("a load");
                let fine = |outcome: &Outcome| match outcome {
                    Outcome::Right(_) => true,
                    Outcome::Missing(status) => matches!(status, BlockStatus::Miss | BlockStatus::NoSpace),
                    Outcome::Detected => false,
                };
                assert!(outcomes.iter().all(fine), "{outcomes:?}");
                came += outcomes.iter().filter(|outcome| outcome.is_right()).count();
            }
            came
        });
        let engine = agent.engine(small());
        for some in (0..BLOCKS).collect::<Vec<_>>().chunks(32) {
            engine.save_durably(some);
        }
        stop.store(true, Ordering::Relaxed);
        let came = loading.join().expect("right or missing");
        assert!(came > 0, "some loads meet what was saved");
        watching.join().expect("within budget")
    });
    assert!(looks > 20, "the budgets were looked at {looks} times only");
    let counters = agent.admin().wait_quiet(PATIENCE);
    assert_within_budget(&counters);
    assert!(counters.get("dram_evictions") > BLOCKS - 512 && counters.get("nvme_evictions") > BLOCKS / 2);
    // Evicted is what was used longest ago: what is saved now, with nobody else about, is there.
    let engine = agent.engine(small());
    let last: Vec<u64> = (BLOCKS..BLOCKS + 300).collect();
    last.chunks(30).for_each(|some| engine.save_durably(some));
    assert_eq!(engine.matches(&last, Scope::Local).len(), 300);
    engine.trim();
    assert_eq!(engine.load_all(&last, &Loading::LOCAL), vec![Source::OwnNvme; 300]);
    let held = agent.admin().wait_quiet(PATIENCE).get("nvme_blocks");
    engine.trim();
    let is_found = |number: &u64| !engine.matches(&[*number], Scope::Local).is_empty();
    let found = (0..BLOCKS + 300).filter(is_found).count() as u64;
    assert_eq!(found, held, "every block on the device is found, and no other one");
}

#[test]
fn an_agent_without_a_pool_keeps_what_fits_and_says_that_nothing_is_durable() {
    let world = World::new();
    let agent = world.agent(&AgentConfig { pool: None, ..AgentConfig::named("node") });
    let engine = agent.engine(small());
    for from in (0..1000).step_by(100) {
        let some: Vec<u64> = (from..from + 100).collect();
        let committed = engine.save(&some).expect("committed");
        let outcome = engine.client().wait_durable(committed.ticket, PATIENCE).expect("a notice");
        assert_eq!((outcome.durable, outcome.lost_keys.len()), (0, 100));
        engine.load_all(&some, &Loading::LOCAL);
        assert_within_arena(&agent.admin().counters());
    }
    assert!(engine.matches(&[0], Scope::Local).is_empty(), "evicted");
    assert_eq!(engine.matches(&[999], Scope::Local), [Source::OwnDram]);
}

fn assert_within_arena(counters: &Counters) {
    assert!(counters.get("arena_used_bytes") <= counters.get("arena_bytes"));
}

#[test]
fn an_agent_that_is_asked_to_stop_makes_durable_what_was_committed() {
    let world = World::new();
    let slow = Duration::from_secs(10);
    let mut agent = world.agent(&AgentConfig { writeback_delay: slow, ..AgentConfig::named("node") });
    let engine = agent.engine(small());
    let blocks: Vec<u64> = (0..100).collect();
    let committed = engine.save(&blocks).expect("committed");
    assert_eq!(agent.admin().counter("nvme_blocks"), 0, "only the flush at the end can make them durable");
    agent.stop();
    let outcome =
        engine.client().wait_durable(committed.ticket, Duration::ZERO).expect("a notice before the end");
    assert_eq!(outcome.durable, 100);
    assert!(!agent.files().socket.exists(), "the socket is removed");
    let error = engine.client().stats().expect_err("the session is over");
    assert!(matches!(error, ClientError::AgentLost { .. } | ClientError::Busy(_)), "{error}");
    agent.start();
    assert_eq!(agent.admin().json("/status")["devices"][0]["recovered_blocks"], 100);
    assert_eq!(agent.engine(small()).load_all(&blocks, &Loading::LOCAL), vec![Source::OwnNvme; 100]);
}

/// From now on the disk takes no more of the agent's files than their first MiB.
fn fill_disk(agent: &mut Agent) {
    let process = i32::try_from(agent.running().id()).ok().and_then(Pid::from_raw);
    let limit = Rlimit { current: Some(1 << 20), maximum: None };
    prlimit(process, Resource::Fsize, limit).expect("one's own child takes limits");
}

#[test]
fn a_disk_that_fills_up_while_the_agent_runs_costs_the_device_and_no_block_in_memory() {
    let world = World::new();
    world.require("device lost");
    let files = world.configure(&AgentConfig::named("node"));
    let mut command = Command::new(binary("reprise-agent"));
    command.arg("--config").arg(&files.config);
    let mut agent = world.launch(&files, command).expect("there is room to start");
    let engine = agent.engine(small());
    let (before, after): (Vec<u64>, Vec<u64>) = ((0..20).collect(), (100..140).collect());
    engine.save_durably(&before);
    fill_disk(&mut agent);
    for some in after.chunks(20) {
        let committed = engine.save(some).expect("there is room in memory");
        let outcome = engine.client().wait_durable(committed.ticket, PATIENCE).expect("a notice");
        assert_eq!((outcome.durable, outcome.lost_keys.len()), (0, 20), "not announced as durable");
    }
    let everything = [before.clone(), after.clone()].concat();
    assert_eq!(engine.load_all(&everything, &Loading::LOCAL), vec![Source::OwnDram; 60]);
    assert_eq!(agent.admin().counter("devices_lost"), 1);
    let log = read(&files.log);
    let said: Vec<&str> =
        log.lines().filter(|line| line.contains("ERROR") || line.contains("WARN")).collect();
    assert!(said.len() == 1 && said[0].contains("no space") && said[0].contains("free space"), "{said:?}");
    drop(engine);
    agent.stop();
    // With room on the disk, what was announced is there.
    agent.start();
    let engine = agent.engine(small());
    assert_eq!(engine.load_all(&before, &Loading::LOCAL), vec![Source::OwnNvme; 20]);
    assert_eq!(engine.matches(&after, Scope::Local), []);
    engine.save_durably(&after);
}
