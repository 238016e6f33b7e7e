//! Engines that drive queue pairs of a controller behind VFIO: the agent owns the controller and its IOMMU, maps their
//! registered memory, and forwards their doorbells. Nothing is emulated but the machine. This runs inside the machine.
//!
//! Each engine compares every byte. It is killed while it saves and loads, and so is the agent, and its allocation ends.
//! Afterwards another engine gets queue pairs, and finds all blocks that were durable.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::time::Instant;

use rand::SeedableRng;
use rand::rngs::StdRng;
use reprise_client::CommitOptions;
use reprise_e2e::content::small;
use reprise_e2e::process::LaunchOptions;
use reprise_e2e::ring_blocks::{SLOTS, at, mismatches, prefill, save_and_load, settings};
use reprise_e2e::{Agent, AgentConfig, PATIENCE, TestEnv, wait_until};
use reprise_policy::{ByteSize, TenantName};
use reprise_testkit::engine::{Engine, EnginePath, EngineSettings};
use reprise_testkit::rings::{Backend, KvOrder, RingLoad, RingPath, RingPathSettings};
use reprise_testkit::trace::TraceRequest;
use serde_json::{Value, json};

use crate::agent::{GOOD, PROGRAM, SERIAL, serve, test};
use crate::cache_node::CacheNode;

/// Arguments that make this program an engine, and a command that runs another one as an ordinary user.
pub(crate) const ENGINE: &str = "engine";
pub(crate) const AS_USER: &str = "as-user";

/// Tests that a machine with an agent runs.
pub(crate) const TESTS: &[&str] = &[
    "queues-started",
    "queues-serve-trace",
    "queues-too-few",
    "queues-engine-killed",
    "queues-agent-killed",
    "queues-logs",
    "queues-revoked",
    "queues-revoked-logs",
    "queues-locked-memory",
    "queues-locked-memory-logs",
];

/// Queue pairs that the controller grants: one for the agent, and fewer than the configuration allows.
pub(crate) const CONTROLLER_PAIRS: u32 = 8;
const CONFIGURED_PAIRS: u32 = 12;
const SESSION_PAIRS: u32 = 4;
const DEPTH: u32 = 64;
/// Requests of the trace that are served.
pub(crate) const REQUESTS: usize = 8;
const ARENA: ByteSize = ByteSize(8 << 20);
/// Blocks that an engine saves before it is killed, and in all.
const BEFORE_KILL: usize = 60;
const BLOCKS: u64 = 200;
/// Blocks of KV memory that exceed the limit of locked memory of ordinary users.
const TOO_MANY_BLOCKS: usize = 512;
/// Limit of locked memory of ordinary users in KiB: the agent's own memory and small KV memory fit.
pub(crate) const LOCKED_KIB: u32 = 25_600;
/// An ordinary user, without CAP_IPC_LOCK.
const USER: u32 = 1000;
/// Name of the node.
const NODE: &str = "lender";

/// An agent that lends queue pairs.
fn config(controller: &str) -> AgentConfig {
    AgentConfig {
        arena: ARENA,
        pool: None,
        session: format!(
            "extents = true\nqueue_pairs = {CONFIGURED_PAIRS}\nqueue_pairs_per_session = {SESSION_PAIRS}\n\
             queue_depth = {DEPTH}"
        ),
        extra: format!(
            "[[pool.devices]]\npci = \"{controller}\"\nserial = \"{SERIAL}\"\nnamespace = {GOOD}\n"
        ),
        ..AgentConfig::named(NODE)
    }
}

/// A process that saves and loads blocks through rings until it is killed or loses its queue pairs.
struct EngineProcess {
    child: Child,
    lines: Receiver<String>,
    durable: BTreeSet<u64>,
}

impl EngineProcess {
    fn start(agent: &Agent, first: u64) -> EngineProcess {
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args([ENGINE, &first.to_string()])
            .arg(&agent.files().socket)
            .stdout(Stdio::piped())
            .spawn()
            .expect("an engine can be started");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            output.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        EngineProcess { child, lines, durable: BTreeSet::new() }
    }

    /// Waits until the engine has saved some blocks; it saves more then.
    fn await_durable(&mut self, blocks: usize) {
        while self.durable.len() < blocks {
            let line = self.lines.recv_timeout(PATIENCE).expect("the engine saves blocks");
            self.note(&line);
        }
    }

    fn note(&mut self, line: &str) {
        match line.strip_prefix("durable ").map(str::parse) {
            Some(Ok(number)) => drop(self.durable.insert(number)),
            _ => panic!("unexpected line of an engine: {line}"),
        }
    }

    /// Kills the process; returns the blocks that are durable.
    fn kill(mut self) -> BTreeSet<u64> {
        self.child.kill().expect("it runs");
        self.child.wait().expect("killed");
        while let Ok(line) = self.lines.recv() {
            self.note(&line);
        }
        self.durable
    }

    /// Waits until the process has ended by itself; returns the durable blocks, and why it has ended.
    fn finish(mut self) -> (BTreeSet<u64>, String) {
        let mut reason = String::new();
        while let Ok(line) = self.lines.recv_timeout(PATIENCE) {
            match line.strip_prefix("ended: ") {
                Some(text) => text.clone_into(&mut reason),
                None => self.note(&line),
            }
        }
        assert!(self.child.wait().expect("ended").success(), "the engine failed");
        (self.durable, reason)
    }
}

/// Acts as an engine: see [`EngineProcess`].
pub(crate) fn be_engine(first: &str, socket: &str) -> ExitCode {
    let first: u64 = first.parse().expect("a number");
    let engine = reprise_e2e::Engine::connect(socket.as_ref(), small()).expect("the agent runs");
    let mut output = std::io::stdout();
    let rng = StdRng::seed_from_u64(first);
    let Err(error) = save_and_load(engine.client(), (first, BLOCKS), rng, &mut output) else {
        return ExitCode::FAILURE;
    };
    // The reader may have ended.
    let _ = writeln!(output, "ended: {error:#}");
    ExitCode::SUCCESS
}

/// Executes a command as an ordinary user.
pub(crate) fn as_user(command: &[String]) -> ExitCode {
    let error = Command::new(&command[0]).args(&command[1..]).uid(USER).gid(USER).exec();
    println!("cannot run {command:?}: {error}");
    ExitCode::FAILURE
}

/// Prints the grants, and checks that they are queue pairs behind VFIO.
fn print_grants(agent: &Agent) {
    let status = agent.admin().json("/status");
    let (device, grants) = (&status["devices"][0], &status["queue_grants"]);
    println!("QUEUES granted of {} through VFIO: {grants}", device["path"]);
    assert_eq!(
        (&device["io_engine"], &device["controller"]["emulated"]),
        (&json!("user-nvme"), &json!(false))
    );
    for grant in grants.as_array().expect("a list") {
        assert_eq!(grant["doorbells"], "relayed", "{grant}");
        assert!(grant["queues"].as_array().is_some_and(|queues| !queues.is_empty()), "{grant}");
    }
}

fn wait_for_no_grants(agent: &Agent) {
    wait_until("the queue pairs to be deleted", PATIENCE, || {
        let left = ["queue_pairs_granted", "registered_memory_bytes", "extents_quarantined"]
            .map(|name| agent.admin().metric(&format!("reprise_agent_{name}"), "") as u64);
        (left == [0; 3]).then_some(())
    });
    assert_eq!(agent.admin().json("/status")["queue_grants"], json!([]));
}

fn open(engine: &reprise_e2e::Engine, (slots, pairs): (usize, u32)) -> anyhow::Result<RingPath> {
    let settings = RingPathSettings { pairs, depth: DEPTH, ..settings(KvOrder::LayerPartBlock) };
    RingPath::open(engine.client(), slots, settings)
}

/// Another engine gets queue pairs, saves, and loads blocks that were durable.
fn check(agent: &Agent, what: &str, durable: &BTreeSet<u64>) {
    let engine = agent.engine(small());
    let mut path = open(&engine, (SLOTS, 2)).expect("registered");
    let numbers: Vec<u64> = durable.iter().copied().collect();
    for some in numbers.chunks(SLOTS) {
        let placed = at(0, some);
        let loaded = path.load(&placed).expect("answered");
        assert!(loaded.iter().all(|one| *one == RingLoad::Verified), "{loaded:?}");
        assert_eq!(mismatches(&path, &placed), 0);
    }
    let next = at(0, &[1_000_000]);
    prefill(&path, &next);
    path.save(&next, CommitOptions::default(), PATIENCE).expect("saved");
    println!(
        "QUEUES {what}: another engine with {} got queue pairs {:?}, {} durable blocks are byte-exact",
        path.name(),
        path.queue_pairs(),
        numbers.len()
    );
    assert_eq!(path.name(), "gpu-queue-host");
    path.close().expect("returned");
    drop(engine);
    wait_for_no_grants(agent);
    assert_eq!(agent.admin().counter("corrupt_blocks"), 0);
}

/// The reference engine saves and loads the trace through rings; then the agent reads the same blocks by itself.
fn serves_trace(agent: &Agent, requests: &[TraceRequest]) {
    let start = |path| {
        let settings = EngineSettings {
            socket: agent.files().socket.clone(),
            layout: small(),
            tenant: TenantName::default_tenant(),
            path,
        };
        Engine::connect(&settings).unwrap_or_else(|error| panic!("{error:#}"))
    };
    let mut engine = start(EnginePath::Rings);
    let saved = serve(&mut engine, "saves through rings", requests);
    print_grants(agent);
    let backend = engine.backend().expect("rings");
    assert!(saved.rings.blocks_saved > 0 && saved.rings.saves_by_arena == 0, "{saved:?}");
    assert_eq!(saved.rings.blocks_saved, saved.saved, "{saved:?}");
    let loaded = serve(&mut engine, "loads through rings", requests);
    assert_eq!(
        (loaded.rings.blocks_loaded, loaded.hits.own_nvme),
        (loaded.blocks, loaded.blocks),
        "{loaded:?}"
    );
    assert_eq!(loaded.rings.loads_by_arena, 0, "{loaded:?}");
    let sum = [saved.rings, loaded.rings];
    println!(
        "QUEUES backend {backend}: {} blocks saved and {} loaded by rings, {} contexts in {} batches, {} bytes read, \
         {} written; 0 by the arena",
        sum[0].blocks_saved,
        sum[1].blocks_loaded,
        sum[0].contexts + sum[1].contexts,
        sum[0].batches + sum[1].batches,
        sum[0].bytes_read + sum[1].bytes_read,
        sum[0].bytes_written + sum[1].bytes_written
    );
    assert_eq!(backend, "gpu-queue-host");
    drop(engine);
    wait_for_no_grants(agent);
    let read = serve(&mut start(EnginePath::Arena), "loads through the agent's queue pair", &requests[..2]);
    assert_eq!(read.hits.total(), read.blocks, "{read:?}");
}

/// A request that exceeds a limit names it, and gets no queue pair.
fn too_few(agent: &Agent) {
    let engines = [agent.engine(small()), agent.engine(small())];
    let request = |engine, pairs| {
        let mut path = open(engine, (4, pairs))?;
        prefill(&path, &at(0, &[1]));
        path.save(&at(0, &[1]), CommitOptions::default(), PATIENCE)?;
        anyhow::Ok(path)
    };
    let refused = |engine, pairs| format!("{:#}", request(engine, pairs).expect_err("refused"));
    let text = refused(&engines[0], SESSION_PAIRS + 1);
    println!("QUEUES refused: {text}");
    assert!(text.contains("expected 1 to 4"), "{text}");
    let first = request(&engines[0], SESSION_PAIRS).expect("within all limits");
    print_grants(agent);
    // The controller has 3 left, which a failed request does not keep.
    let text = refused(&engines[1], SESSION_PAIRS);
    println!("QUEUES refused: {text}");
    assert!(text.contains("the controller has granted 8") && text.contains("request fewer"), "{text}");
    request(&engines[1], 3).expect("the last ones").close().expect("returned");
    first.close().expect("returned");
    drop(engines);
    wait_for_no_grants(agent);
}

fn engine_killed(agent: &Agent) {
    let mut victim = EngineProcess::start(agent, 10_000);
    victim.await_durable(BEFORE_KILL);
    let durable = victim.kill();
    wait_for_no_grants(agent);
    check(agent, "engine killed", &durable);
}

fn agent_killed(agent: &mut Agent) {
    let mut engine = EngineProcess::start(agent, 20_000);
    engine.await_durable(BEFORE_KILL);
    agent.kill();
    // The kernel has reset the controller: no other process has a descriptor of it.
    agent.start();
    let (durable, reason) = engine.finish();
    println!("QUEUES the agent was killed, its engine ended: {reason}");
    check(agent, "agent killed", &durable);
}

/// The spec of the node: a claim of the controller, and an allocation of queue pairs.
fn spec(controller: &str, allocation: Option<&str>) -> Value {
    let queues = allocation.map(|uid| {
        json!({
            "uid": uid, "allocation": format!("chat/{uid}"), "isolation": "TrustedShared", "depth": DEPTH,
            "controllers": [{ "serial": SERIAL, "queuePairs": SESSION_PAIRS }],
        })
    });
    json!({
        "nodeName": NODE,
        "claims": [{
            "pool": "p", "uid": "p", "generation": 1, "engine": "UserNvme", "fallbackEngine": "None",
            "globs": [format!("/sys/bus/pci/devices/{controller}")], "serials": [SERIAL], "namespaceId": GOOD,
        }],
        "queues": queues.into_iter().collect::<Vec<_>>(),
    })
}

/// Starts an agent as in a cluster, on the spec of a node.
fn agent_in_cluster(env: &TestEnv, node: &CacheNode) -> Agent {
    let [kubeconfig, state] = ["kubeconfig", "state"].map(|name| env.folder().join(name));
    node.write_kubeconfig(&kubeconfig).expect("written");
    let arguments = ["--in-cluster", "--node-root", "/", "--kubeconfig"].map(str::to_owned).into_iter();
    let start = LaunchOptions {
        arguments: arguments.chain([kubeconfig.display().to_string()]).collect(),
        environment: [("NODE_NAME", NODE), ("POD_IP", "127.0.0.1"), ("POD_NAME", "agent")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec(),
        ..LaunchOptions::default()
    };
    let extra = format!("[kubernetes]\nstate_directory = \"{}\"\nstatus_every = \"1s\"\n", state.display());
    let config = AgentConfig { arena: ARENA, pool: None, extra, ..AgentConfig::named(NODE) };
    env.agent_with(&config, start)
}

/// An allocation ends while its engine saves and loads; the next one serves another engine.
fn revoked(env: &TestEnv, controller: &str) {
    env.require("queue pairs revoked");
    let node = CacheNode::serve(NODE, &spec(controller, None)).expect("a server");
    let agent = agent_in_cluster(env, &node);
    wait_until("the controller to be open", PATIENCE, || {
        let devices = node.status()["devices"].clone();
        devices.as_array()?.iter().any(|device| device["state"] == "Open").then_some(())
    });
    node.replace_spec(spec(controller, Some("a")));
    let reserved = |uid: &str| {
        let reserved = |queues: &Value| queues["uid"] == uid && queues["kept"] == SESSION_PAIRS;
        wait_until("the queue pairs to be reserved", PATIENCE, || {
            node.status()["applied"]["queues"].as_array()?.iter().any(reserved).then_some(())
        });
    };
    reserved("a");
    let mut engine = EngineProcess::start(&agent, 30_000);
    engine.await_durable(BEFORE_KILL);
    print_grants(&agent);
    let start = Instant::now();
    node.replace_spec(spec(controller, None));
    let (durable, reason) = engine.finish();
    println!("QUEUES revoked under I/O, after {} ms the engine ended: {reason}", start.elapsed().as_millis());
    assert!(reason.contains("GPUQueueAllocation"), "{reason}");
    wait_for_no_grants(&agent);
    let refused = open(&agent.engine(small()), (4, 1)).err().map(|error| format!("{error:#}"));
    let refused = refused.expect("nothing is allocated");
    assert!(refused.contains("create a GPUQueueAllocation"), "{refused}");
    node.replace_spec(spec(controller, Some("b")));
    reserved("b");
    check(&agent, "allocation ended", &durable);
}

/// An agent of an ordinary user, whose limit of locked memory the KV memory of an engine exceeds.
fn locked_memory(env: &TestEnv, controller: &str) {
    let group = std::fs::read_link(format!("/sys/bus/pci/devices/{controller}/iommu_group"));
    let group = group.expect("an IOMMU group").file_name().expect("a number").to_owned();
    for path in ["/dev/vfio/vfio".to_owned(), format!("/dev/vfio/{}", group.display())] {
        chown(path, Some(USER), None).expect("changed");
    }
    chown(env.folder(), Some(USER), None).expect("changed");
    let start = LaunchOptions {
        launcher: [format!("/bin/{PROGRAM}"), AS_USER.to_owned()].to_vec(),
        ..LaunchOptions::default()
    };
    let agent = env.agent_with(&config(controller), start);
    let engine = agent.engine(small());
    let mut path = open(&engine, (TOO_MANY_BLOCKS, 1)).expect("memory of the engine");
    prefill(&path, &at(0, &[2]));
    let refused =
        path.save(&at(0, &[2]), CommitOptions::default(), PATIENCE).expect_err("more than the limit");
    let refused = format!("{refused:#}");
    println!("QUEUES refused: {refused}");
    assert!(refused.contains("limit of locked memory") && refused.contains("ulimit -l"), "{refused}");
    drop((path, engine));
    check(&agent, "limit of locked memory", &BTreeSet::new());
}

/// Runs all tests on a controller that is bound to vfio-pci.
pub(crate) fn run(controller: &str, requests: &[TraceRequest]) -> bool {
    let on = |name: &str, env: TestEnv, body: &mut dyn FnMut(&TestEnv) -> bool| {
        let passed = body(&env);
        if !passed {
            env.show_failure(name);
        }
        // Warnings and errors in the logs fail it.
        test(&format!("{name}-logs"), || drop(env)) && passed
    };
    let passed = on("queues", TestEnv::new(), &mut |env| {
        let mut agent = None;
        test("queues-started", || agent = Some(env.agent(&config(controller))))
            && agent.as_mut().is_some_and(|agent| {
                test("queues-serve-trace", || serves_trace(agent, requests))
                    && test("queues-too-few", || too_few(agent))
                    && test("queues-engine-killed", || engine_killed(agent))
                    && test("queues-agent-killed", || agent_killed(agent))
            })
    });
    let revoked =
        on("queues-revoked", TestEnv::new(), &mut |env| test("queues-revoked", || revoked(env, controller)));
    let limited = on("queues-locked-memory", TestEnv::for_every_user(), &mut |env| {
        test("queues-locked-memory", || locked_memory(env, controller))
    });
    passed && revoked && limited
}
