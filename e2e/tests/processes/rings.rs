//! Engines whose rings move blocks between registered KV memory and extents, on an emulated controller of the agent, and
//! SIGKILL of engines and agent at random moments.
//!
//! An engine saves blocks with ring writes and loads them with ring reads. It compares every byte. After the kills:
//! * a block that was reported durable is loaded byte-exact;
//! * any other block is byte-exact or a miss, and no block is damaged;
//! * no queue pair, registered memory or extent is left of an engine that has ended.

use std::collections::BTreeSet;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rand::RngExt;
use rand::rngs::StdRng;
use reprise_client::{BlockStatus, ClientError, CommitOptions, ExtentStatus, Source};
use reprise_e2e::content::{device_slot_bytes, key, small};
use reprise_e2e::ring_blocks::{SLOTS, at, mismatches, prefill, save_and_load, settings};
use reprise_e2e::seed::{number, print_line, seeded};
use reprise_e2e::{Agent, AgentConfig, Engine, LoadParams, Outcome, PATIENCE, TestEnv, wait_until};
use reprise_testkit::kv_function;
use reprise_testkit::rings::{Backend, KvOrder, RingLoad, RingPath, RingPathSettings};

use crate::processes::client_process::{ClientProcess, ClientTest};

/// Set in a child process of this executable that acts as an engine: seed, first block and socket.
const CLIENT: ClientTest = ClientTest {
    name: "processes::rings::killed_engines_and_agents_damage_no_block",
    variable: "REPRISE_E2E_RING_CLIENT",
};

/// Environment variable with the number of kills.
const KILLS_VARIABLE: &str = "REPRISE_E2E_RING_KILLS";

/// Number of kills without the variable.
const KILLS: u64 = 8;

/// Blocks of each engine, far fewer than the slots of the pool.
const CLIENT_BLOCKS: u64 = 300;

const CLIENTS: u64 = 2;

/// Microseconds from the first leases to a kill.
const KILL_AFTER_US: std::ops::Range<u64> = 500..120_000;

/// Durable blocks that the kills must leave to check. A slow machine gets further kills, and more time before each.
const DURABLE_MIN: usize = 21;

/// Returns the configuration of an agent that lends queue pairs of an emulated controller, and the controller's file.
fn lender(env: &TestEnv) -> (AgentConfig, PathBuf) {
    let file = env.folder().join("lender.nvme");
    let config = AgentConfig {
        pool: None,
        session: "extents = true\nqueue_pairs = 12\nqueue_pairs_per_session = 4\nqueue_depth = 64".to_owned(),
        extra: format!("[[pool.devices]]\nemulated = \"{}\"\nbytes = \"64MiB\"", file.display()),
        ..AgentConfig::named("lender")
    };
    (config, file)
}

fn save(path: &mut RingPath, numbers: &[u64]) -> Vec<ExtentStatus> {
    let blocks = at(0, numbers);
    prefill(path, &blocks);
    path.save(&blocks, CommitOptions::default(), PATIENCE).expect("saved")
}

/// Waits until no engine has queue pairs, registered memory or extents.
fn wait_for_no_grants(agent: &Agent) {
    wait_until("the queue pairs to be deleted", PATIENCE, || {
        let left = ["queue_pairs_granted", "registered_memory_bytes", "extents_quarantined"]
            .map(|name| agent.admin().metric(&format!("reprise_agent_{name}"), "") as u64);
        (left == [0; 3]).then_some(())
    });
    assert_eq!(agent.admin().json("/status")["queue_grants"], serde_json::json!([]));
}

#[test]
fn rings_save_and_load_blocks_byte_exact_in_each_order_of_kv_memory() {
    let env = TestEnv::new();
    env.require("this NVMe controller is EMULATED");
    let (config, _) = lender(&env);
    let agent = env.agent(&config);
    let mut saved = 0;
    for (first, order) in
        [(0, KvOrder::LayerPartBlock), (100, KvOrder::LayerBlockPart), (200, KvOrder::BlockLayerPart)]
    {
        let engine = agent.engine(small());
        let mut path =
            RingPath::open(engine.client(), SLOTS, settings(order)).expect("queue pairs are granted");
        assert_eq!(path.name(), "gpu-queue-emulated");
        let numbers: Vec<u64> = (first..first + 20).collect();
        assert_eq!(save(&mut path, &numbers), [ExtentStatus::Durable; 20]);
        let grants = agent.admin().json("/status")["queue_grants"].clone();
        assert_eq!(
            (&grants[0]["depth"], grants[0]["queues"].as_array().map(Vec::len)),
            (&64.into(), Some(2)),
            "{grants}"
        );
        assert_eq!(
            path.generations().values().copied().map(serde_json::Value::from).collect::<Vec<_>>(),
            [grants[0]["generation"].clone()]
        );

        let loaded = at(SLOTS / 2, &numbers);
        assert_eq!(path.load(&loaded).expect("answered"), [RingLoad::Verified; 20]);
        assert_eq!(mismatches(&path, &loaded), 0);
        assert_eq!(path.load(&at(0, &[first + 50])).expect("answered"), [RingLoad::Miss]);
        // One planning call for each layer of each operation that moves blocks, for any number of them.
        assert_eq!(path.counters().calls, 2 * u64::from(small().layers()));
        // The agent reads the same blocks with its own queue pair.
        let found = engine.load(&numbers, &LoadParams::LOCAL).expect("answered");
        assert_eq!(found, [Outcome::Verified(Source::OwnNvme); 20]);
        assert_eq!(agent.admin().json("/status")["sessions"][0]["backend"], "gpu-queue-emulated");
        let sessions = "reprise_agent_sessions_by_backend";
        assert_eq!(agent.admin().metric(sessions, "backend=\"gpu-queue-emulated\"") as u64, 1);
        saved += 20;
        let block_bytes = small().block_bytes();
        for (backend, direction, blocks) in [
            ("gpu-queue-emulated", "save", saved),
            ("gpu-queue-emulated", "pin", saved),
            ("gpu-queue-emulated", "load", 0),
            ("arena", "save", 0),
            ("arena", "load", saved),
            ("unstated", "load", 0),
            ("gpu-queue", "load", 0),
        ] {
            let labels = format!("{{backend=\"{backend}\",direction=\"{direction}\"}}");
            let value =
                |unit| agent.admin().metric(&format!("reprise_agent_session_{unit}_total"), &labels) as u64;
            assert_eq!((value("blocks"), value("bytes")), (blocks, blocks * block_bytes), "{labels}");
        }
        path.close().expect("returned");
        drop(engine);
        wait_for_no_grants(&agent);
    }
    assert_eq!(agent.admin().counter("corrupt_blocks"), 0);
}

#[test]
fn ranks_of_one_process_have_queue_pairs_and_memory_of_their_own() {
    const RANKS: u64 = 2;
    let env = TestEnv::new();
    env.require("this NVMe controller is EMULATED");
    let (config, _) = lender(&env);
    let agent = env.agent(&config);
    let engines: Vec<Engine> = (0..RANKS).map(|_| agent.engine(small())).collect();
    let open = |engine: &Engine| RingPath::open(engine.client(), SLOTS, settings(KvOrder::LayerPartBlock));
    let mut paths: Vec<RingPath> = engines.iter().map(|engine| open(engine).expect("registered")).collect();
    let numbers = |rank: u64| -> Vec<u64> { (1000 * rank..1000 * rank + 20).collect() };
    // Both ranks use the controller at the same time.
    std::thread::scope(|scope| {
        for (rank, path) in (0..).zip(&mut paths) {
            scope.spawn(move || assert_eq!(save(path, &numbers(rank)), [ExtentStatus::Durable; 20]));
        }
    });
    let pairs: Vec<u16> = paths.iter().flat_map(|path| path.queue_pairs().into_values().flatten()).collect();
    assert_eq!(pairs.iter().collect::<BTreeSet<_>>().len(), 2 * RANKS as usize, "{pairs:?}");
    let generations: BTreeSet<u64> = paths.iter().flat_map(|path| path.generations().into_values()).collect();
    assert_eq!(generations.len(), RANKS as usize, "a grant for each rank");
    let registered = agent.admin().metric("reprise_agent_registered_memory_bytes", "") as u64;
    let of_rank = SLOTS as u64 * u64::from(small().objects()) * small().object_bytes();
    assert!(registered >= RANKS * of_rank, "{registered} bytes are registered");

    // Each rank reads what the other has written, into its own memory only.
    for (rank, path) in (0..).zip(&mut paths) {
        let (own, loaded) = (at(0, &numbers(rank)), at(SLOTS / 2, &numbers(1 - rank)));
        assert_eq!(path.load(&loaded).expect("answered"), [RingLoad::Verified; 20]);
        assert_eq!((mismatches(path, &own), mismatches(path, &loaded)), (0, 0));
    }
    let mut paths = paths.into_iter();
    paths.next().expect("rank 0").close().expect("returned");
    let mut other = paths.next().expect("rank 1");
    assert_eq!(agent.admin().json("/status")["queue_grants"].as_array().map(Vec::len), Some(1));
    assert_eq!(save(&mut other, &[5000]), [ExtentStatus::Durable]);
    assert_eq!(other.load(&at(SLOTS / 2, &[5000])).expect("answered"), [RingLoad::Verified]);
    other.close().expect("returned");
    drop(engines);
    wait_for_no_grants(&agent);
}

#[test]
fn damage_by_a_write_outside_of_leases_is_found_by_checksums() {
    let env = TestEnv::new();
    env.require("this NVMe controller is EMULATED");
    env.allow("dropped a stored block that failed verification");
    let (config, file) = lender(&env);
    let agent = env.agent(&config);
    let engine = agent.engine(small());
    let mut path =
        RingPath::open(engine.client(), SLOTS, settings(KvOrder::LayerPartBlock)).expect("granted");
    assert_eq!(save(&mut path, &[1, 2, 3]), [ExtentStatus::Durable; 3]);
    // What a queue pair with a wrong offset would do.
    let disk = std::fs::File::options().read(true).write(true).open(&file).expect("the controller's file");
    let object = |number: u64| {
        let mut bytes = vec![0; small().object_bytes() as usize];
        kv_function::fill(&key(number).0, 5, &mut bytes);
        bytes
    };
    let content = std::fs::read(&file).expect("readable");
    let place = |bytes: &[u8]| {
        content.chunks_exact(4096).position(|page| page == &bytes[..4096]).expect("on the disk")
    };
    disk.write_all_at(&[0xee; 512], place(&object(2)) as u64 * 4096).expect("written");
    let loaded = at(SLOTS / 2, &[1, 2, 3]);
    let results = path.load(&loaded).expect("answered");
    assert_eq!(results, [RingLoad::Verified, RingLoad::Corrupt, RingLoad::Verified]);
    // The agent finds the damage too, and drops the block.
    let found = engine.load(&[2], &LoadParams::LOCAL).expect("answered");
    assert_eq!(found, [Outcome::Missing(BlockStatus::Failed)]);
    assert_eq!(path.load(&at(0, &[2])).expect("answered"), [RingLoad::Miss]);
}

#[test]
fn queue_pairs_are_limited_and_refused_with_the_remedy() {
    let env = TestEnv::new();
    env.require("this NVMe controller is EMULATED");
    let (config, _) = lender(&env);
    let agent = env.agent(&config);
    let engine = agent.engine(small());
    let open = |pairs, depth| {
        let settings = RingPathSettings { pairs, depth, ..RingPathSettings::default() };
        let mut path = RingPath::open(engine.client(), 4, settings).expect("registered");
        prefill(&path, &at(0, &[1]));
        path.save(&at(0, &[1]), CommitOptions::default(), PATIENCE)
            .map(|_| ())
            .map_err(|error| format!("{error:#}"))
    };
    assert!(open(5, 64).expect_err("too many").contains("expected 1 to 4"));
    assert!(open(1, 128).expect_err("too deep").contains("session.queue_depth"));
    open(4, 64).expect("within the limits");

    let without = AgentConfig { session: "extents = true".to_owned(), ..AgentConfig::named("file") };
    let agent = env.agent(&without);
    let error =
        RingPath::open(agent.engine(small()).client(), 4, RingPathSettings::default()).expect_err("refused");
    assert!(format!("{error:#}").contains("session.queue_pairs"), "{error:#}");
    let queues =
        AgentConfig { session: "extents = true\nqueue_pairs = 4".to_owned(), ..AgentConfig::named("queues") };
    let agent = env.agent(&queues);
    let engine = agent.engine(small());
    let mut path = RingPath::open(engine.client(), 4, RingPathSettings::default()).expect("registered");
    prefill(&path, &at(0, &[1]));
    let error =
        path.save(&at(0, &[1]), CommitOptions::default(), PATIENCE).expect_err("a file has no queues");
    assert!(format!("{error:#}").contains("lends no queue pairs"), "{error:#}");
}

#[test]
fn killed_engines_and_agents_damage_no_block() {
    if let Some(parameters) = CLIENT.parameters() {
        return be_engine(&parameters.socket, parameters.first, parameters.rng);
    }
    let env = TestEnv::new();
    env.require("this NVMe controller is EMULATED");
    let mut rng = seeded("kill with rings");
    let (config, _) = lender(&env);
    let mut agent = env.agent(&config);
    let (mut durable, mut agents) = (BTreeSet::new(), 0);
    let kills = number(KILLS_VARIABLE, KILLS);
    let (mut kill, mut start) = (0, Instant::now());
    while kill < kills || (durable.len() < DURABLE_MIN && start.elapsed() < PATIENCE) {
        let before = agent.admin().counter("extent_leases");
        let engines: Vec<ClientProcess> =
            (0..CLIENTS).map(|engine| CLIENT.start(&agent, rng.random(), engine * CLIENT_BLOCKS)).collect();
        agent.admin().wait_for("extent_leases", PATIENCE, |leases| leases > before);
        // Not a synchronisation: the sleep selects the random moment of the kill.
        let slower = 1u32 << kill.saturating_sub(kills.saturating_sub(1)).min(5);
        let kill_after = Duration::from_micros(rng.random_range(KILL_AFTER_US));
        std::thread::sleep(kill_after * slower);
        let mut engines = engines.into_iter();
        if kill % 2 == 0 {
            agents += 1;
            agent.kill();
            agent.start();
            durable.extend(engines.flat_map(ClientProcess::finish));
        } else {
            let mut victims: Vec<ClientProcess> = engines.by_ref().collect();
            victims.iter_mut().for_each(|victim| victim.kill());
            durable.extend(victims.into_iter().flat_map(ClientProcess::finish));
        }
        wait_for_no_grants(&agent);
        check(&agent, &durable);
        kill += 1;
        if kill == kills {
            start = Instant::now();
        }
    }
    print_line(&format!("{kill} kills, {agents} of the agent; {} durable blocks", durable.len()));
    assert!(durable.len() >= DURABLE_MIN, "only {} blocks became durable", durable.len());
}

/// Compares all blocks with the ledger, and the used bytes of the pool with the blocks.
fn check(agent: &Agent, durable: &BTreeSet<u64>) {
    let engine = agent.engine(small());
    let all: Vec<u64> = (0..CLIENTS * CLIENT_BLOCKS).collect();
    let mut found = 0;
    for numbers in all.chunks(128) {
        let outcomes = engine.load(numbers, &LoadParams::LOCAL).expect("the agent is running");
        for (number, outcome) in numbers.iter().zip(outcomes) {
            match outcome {
                Outcome::Verified(_) => found += 1,
                Outcome::Missing(BlockStatus::Miss) => {
                    assert!(!durable.contains(number), "block {number} was durable and is missing");
                }
                other => panic!("block {number} is neither right nor a miss: {other:?}"),
            }
        }
    }
    drop(engine);
    let counters = wait_until("extents to be returned", PATIENCE, || {
        let counters = agent.admin().wait_quiet(PATIENCE);
        (counters.get("extents_leased") + counters.get("extents_pinned") == 0).then_some(counters)
    });
    assert_eq!(counters.get("nvme_blocks"), found, "blocks on the device");
    assert_eq!(counters.get("pool_used_bytes"), found * device_slot_bytes(&small()), "bytes of their slots");
    assert_eq!(counters.get("corrupt_blocks"), 0, "a kill corrupts no block");
}

/// Saves and loads blocks through rings until the agent is lost or this process is killed.
fn be_engine(socket: &Path, first: u64, rng: StdRng) {
    let engine = match Engine::connect(socket, small()) {
        Ok(engine) => engine,
        Err(error) => {
            let is_lost = matches!(error, ClientError::AgentLost { .. } | ClientError::AgentAbsent { .. });
            return assert!(is_lost, "unexpected error after a kill: {error}");
        }
    };
    let mut output = std::io::stdout();
    // Ends the line that the test harness has begun.
    writeln!(output).expect("the parent reads the output");
    if let Err(error) = save_and_load(engine.client(), (first, CLIENT_BLOCKS), rng, &mut output) {
        let start = Instant::now();
        while engine.client().is_alive() {
            assert!(start.elapsed() < PATIENCE, "an error while the agent runs: {error:#}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
