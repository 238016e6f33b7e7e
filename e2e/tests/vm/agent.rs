//! The agent on a controller through VFIO: its fourth engine serves the demo's trace, is killed, and reads from a medium
//! with bad sectors. This runs inside the machine, whose image contains this test program. Each test prints
//! `TEST NAME rc=N`, 0 for a pass.
//!
//! The engine of the tests is the demo's: it compares every loaded byte with the function that produced it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;
use std::time::Instant;

use reprise_e2e::control_plane::Store;
use reprise_e2e::{Agent, AgentConfig, ControlPlane, TestEnv};
use reprise_policy::{ByteSize, TenantName};
use reprise_testkit::engine::{Engine, EnginePath, EngineSettings, RequestOutcome};
use reprise_testkit::model::llama_3_8b_scaled;
use reprise_testkit::trace::{Trace, TraceRequest};

use crate::queues;

/// Name of this program in the machine, and the argument that selects these tests.
pub(crate) const PROGRAM: &str = "vm_agent";
pub(crate) const ARGUMENT: &str = "in-machine";

/// Programs that the tests start; they are next to this one.
pub(crate) const PROGRAMS: [&str; 2] = ["reprise-agent", "reprise-controlplane"];

/// Tests that a machine with an agent runs.
pub(crate) const TESTS: &[&str] = &[
    "agent-started",
    "agent-engine",
    "agent-serves-trace",
    "agent-killed-when-idle",
    "agent-killed-while-writing",
    "agent-logs",
    "agent-media-errors-started",
    "agent-media-errors",
    "agent-media-errors-logs",
];

/// Divisor of the bytes of Llama-3-8B's KV cache: 16 KiB per block.
const SCALE: u32 = 4096;
/// Requests of the trace that are saved: 540 distinct blocks, more than the arena holds.
const REQUESTS: usize = 20;
/// Requests that follow, and are written while the agent is killed.
const WRITTEN_WHEN_KILLED: usize = 4;
/// Requests that are served with the bad medium: 234 distinct blocks, 4.6 MiB.
const REQUESTS_ON_BAD: usize = 11;
/// Attempts to load all blocks before the deadline of a load, on a busy machine.
const ATTEMPTS: usize = 3;
const ARENA: ByteSize = ByteSize(8 << 20);

/// Words of warnings about leases and calls that were too slow, and about an agent that is back before its lease ends.
const BUSY: [&str; 4] = [
    "node is silent",
    "the control plane is unreachable",
    "registration of this member lost",
    "live node registered from another address",
];

/// Size of the controller's namespaces.
pub(crate) const NAMESPACE_BYTES: u64 = 64 << 20;
/// Serial number of the controller.
pub(crate) const SERIAL: &str = "agent";
/// Namespaces: a good one, and one with sectors that cannot be read.
pub(crate) const GOOD: u32 = 1;
const BAD: u32 = 2;

/// Sectors of namespace 2 that cannot be read. All of them are in the segments that the trace fills.
pub(crate) fn bad_sectors() -> impl Iterator<Item = u64> {
    (5..9).map(|mib| ((mib << 20) + 5000) / 512)
}

/// Lines of the machine's script that run the tests on a controller.
pub(crate) fn script(controller: &str) -> String {
    format!(
        "vm_guest bind {controller}\nifconfig lo 127.0.0.1 up\nexport REPRISE_CACHE=/tmp\nulimit -l {}\n\
         {PROGRAM} {ARGUMENT} {controller}\n",
        queues::LOCKED_KIB
    )
}

/// A control plane, an agent on a namespace, and an engine. The environment is dropped last.
struct Node {
    engine: Engine,
    agent: Agent,
    _control_plane: ControlPlane,
    env: TestEnv,
}

impl Node {
    fn start(controller: &str, namespace: u32) -> Node {
        let env = TestEnv::new();
        // The tests kill the agent, and an emulated processor is slow.
        for words in BUSY {
            env.allow(words);
        }
        let control_plane = env.control_plane(Store::Embedded);
        let device = format!(
            "[[pool.devices]]\npci = \"{controller}\"\nserial = \"{SERIAL}\"\nnamespace = {namespace}\n\
             [cache]\narena_session_permille = 1000"
        );
        let agent = env.agent(&AgentConfig {
            arena: ARENA,
            pool: None,
            control_plane: vec![control_plane.address().to_owned()],
            extra: device,
            ..AgentConfig::named("machine")
        });
        let engine = Engine::connect(&EngineSettings {
            socket: agent.files().socket.clone(),
            layout: llama_3_8b_scaled(SCALE).expect("a valid scale"),
            tenant: TenantName::default_tenant(),
            path: EnginePath::Arena,
        });
        let engine = engine.unwrap_or_else(|error| panic!("{error:#}"));
        Node { engine, agent, _control_plane: control_plane, env }
    }

    fn device(&self) -> serde_json::Value {
        self.agent.admin().json("/status")["devices"][0].clone()
    }

    fn counter(&self, name: &str) -> u64 {
        let status = self.agent.admin().json("/status");
        status["counters"][name].as_u64().unwrap_or_else(|| panic!("no counter {name}: {status}"))
    }

    fn replay(&mut self, what: &str, requests: &[TraceRequest]) -> RequestOutcome {
        serve(&mut self.engine, what, requests)
    }

    /// Serves requests whose blocks are all durable: none of them is computed and saved again.
    fn load(&mut self, what: &str, requests: &[TraceRequest]) {
        for _ in 0..ATTEMPTS {
            let loaded = self.replay(what, requests);
            assert_eq!(loaded.saved, 0, "durable blocks are absent: {loaded:?}");
            assert!(loaded.hits.own_nvme > loaded.blocks / 2, "{loaded:?}");
            if loaded.hits.total() == loaded.blocks {
                return;
            }
        }
        panic!("not all blocks are loaded before the deadline, in {ATTEMPTS} attempts");
    }

    /// Waits until all saved blocks are durable; returns their number.
    fn await_durable(&mut self) -> u64 {
        self.engine.await_durable().unwrap_or_else(|error| panic!("{error:#}"))
    }

    /// Kills the agent with SIGKILL, and starts it again on the same controller.
    fn kill(&mut self) {
        self.agent.kill();
        self.agent.start();
        self.engine.reconnect().unwrap_or_else(|error| panic!("{error:#}"));
    }
}

/// Serves requests, and prints and returns the sums.
pub(crate) fn serve(engine: &mut Engine, what: &str, requests: &[TraceRequest]) -> RequestOutcome {
    let (start, mut sum) = (Instant::now(), RequestOutcome::default());
    for request in requests {
        sum.merge(&engine.run(request.full_blocks()).unwrap_or_else(|error| panic!("{error:#}")));
    }
    println!(
        "AGENT {what}: {} requests, {} blocks, {} from DRAM, {} from NVMe, {} not readable, {} saved; {} bytes \
         verified, {} mismatches, {:.1} s",
        requests.len(),
        sum.blocks,
        sum.hits.own_dram,
        sum.hits.own_nvme,
        sum.lost,
        sum.saved,
        sum.bytes_verified,
        sum.mismatches,
        start.elapsed().as_secs_f64()
    );
    assert_eq!((sum.mismatches, sum.errors, sum.unsaved), (0, 0, 0), "{sum:?}");
    sum
}

/// Prints which engine the agent uses, and on which controller.
fn engine(node: &Node, namespace: u32) {
    let device = node.device();
    let controller = &device["controller"];
    println!("AGENT engine: {} on {} through VFIO: {controller}", device["io_engine"], device["path"]);
    assert_eq!(device["io_engine"], "user-nvme", "{device}");
    assert_eq!(controller["emulated"], false, "{device}");
    assert_eq!((&controller["serial"], &controller["namespace"]), (&SERIAL.into(), &namespace.into()));
}

fn serves_trace(node: &mut Node, requests: &[TraceRequest]) {
    let saved = node.replay("saves the trace", requests);
    assert_eq!(saved.hits.total() + saved.saved, saved.blocks, "{saved:?}");
    assert!(saved.hits.own_dram > 0, "{saved:?}");
    let durable = node.await_durable();
    println!("AGENT announces {durable} blocks as durable");
    assert_eq!((durable, node.counter("nvme_evictions")), (saved.saved, 0));
    node.load("loads the trace", requests);
}

fn killed_when_idle(node: &mut Node, requests: &[TraceRequest]) {
    node.kill();
    node.load("loads the trace after a kill", requests);
}

/// Blocks that are written when the agent is killed may be lost. Those that were durable before may not.
fn killed_while_writing(node: &mut Node, durable: &[TraceRequest], written: &[TraceRequest]) {
    assert!(node.replay("saves more", written).saved > 0);
    node.kill();
    node.load("loads the trace after a kill while writing", durable);
}

/// A block with a bad sector is a miss, and is computed and saved again. Other blocks are not harmed.
fn media_errors(node: &mut Node, requests: &[TraceRequest]) {
    node.env.require("unrecovered read error");
    let saved = node.replay("saves on the bad medium", requests);
    node.await_durable();
    // The next agent has no block in DRAM.
    node.kill();
    let loaded = node.replay("loads from the bad medium", requests);
    let errors = node.counter("fill_device_errors");
    println!("AGENT media errors: loads of {errors} blocks have failed");
    assert!(errors > 0 && errors <= bad_sectors().count() as u64, "{errors} errors");
    assert!(loaded.lost >= errors && loaded.hits.own_nvme > loaded.blocks / 2, "{loaded:?}");
    assert_eq!(loaded.saved, errors, "exactly the unreadable blocks are saved again: {saved:?} {loaded:?}");
    assert_eq!(node.device()["lost"], serde_json::Value::Null, "the device stays in use");
}

/// Runs one test, and prints its result.
pub(crate) fn test(name: &str, body: impl FnOnce()) -> bool {
    let passed = catch_unwind(AssertUnwindSafe(body)).is_ok();
    println!("TEST {name} rc={}", u8::from(!passed));
    passed
}

/// Runs tests with a node; prints the ends of its logs if one has failed.
fn with_node(controller: &str, namespace: u32, name: &str, tests: impl FnOnce(&mut Node) -> bool) -> bool {
    let mut node = None;
    if !test(&format!("{name}-started"), || node = Some(Node::start(controller, namespace))) {
        return false;
    }
    let mut node = node.expect("started");
    let passed = tests(&mut node);
    if !passed {
        node.env.show_failure(name);
    }
    // Warnings and errors in the logs fail it.
    test(&format!("{name}-logs"), || drop(node)) && passed
}

/// Runs all tests on a controller that is bound to vfio-pci.
pub(crate) fn run(controller: &str) -> ExitCode {
    // The sample of the demo's trace, since the machine has no other files.
    let trace = Trace::open(None).expect("the sample is built in").requests;
    let (requests, rest) = trace.split_at(REQUESTS);
    let written = &rest[..WRITTEN_WHEN_KILLED];
    let good = with_node(controller, GOOD, "agent", |node| {
        test("agent-engine", || engine(node, GOOD))
            && test("agent-serves-trace", || serves_trace(node, requests))
            && test("agent-killed-when-idle", || killed_when_idle(node, requests))
            && test("agent-killed-while-writing", || killed_while_writing(node, requests, written))
    });
    let bad = with_node(controller, BAD, "agent-media-errors", |node| {
        test("agent-media-errors", || media_errors(node, &requests[..REQUESTS_ON_BAD]))
    });
    let queues = queues::run(controller, &requests[..queues::REQUESTS]);
    if good && bad && queues { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
