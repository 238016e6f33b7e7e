//! Limits on open files: each program raises the soft one, the agent and members refuse a hard one that is too low, and idle
//! connections use up neither the descriptors nor the places of others.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use reprise_e2e::config::StartedWith;
use reprise_e2e::content::small;
use reprise_e2e::control_plane::{self, Store};
use reprise_e2e::flood::{idle, idle_at, raise_own_limit, under_limits};
use reprise_e2e::process::{Starting, binary};
use reprise_e2e::{Admin, Agent, AgentConfig, Loading, PATIENCE, World, wait_until};

/// Exit code for memory, sockets and ports.
const RESOURCE: i32 = 3;

/// A kubelet's probe gives up after a second or two.
const PROBE_WITHIN: Duration = Duration::from_secs(2);

/// Idle connections, of which each listener has room for far fewer under [`SMALL`].
const IDLE: usize = 300;

/// A hard limit with which an agent or member can just work.
const SMALL: u64 = 256;

fn assert_healthy(admin: &Admin) {
    let asked = Instant::now();
    let (code, body) = admin.get("/healthz").expect("the probe is answered");
    assert_eq!(code, 200, "{body}");
    assert!(asked.elapsed() < PROBE_WITHIN, "the probe took {:?}", asked.elapsed());
}

/// Opens a session, saves and loads.
fn use_agent(agent: &Agent, block: u64) {
    let engine = agent.engine(small());
    engine.save_durably(&[block]);
    engine.load_all(&[block], &Loading::LOCAL);
}

/// The soft limit of a running program.
fn soft_limit(process: u32) -> u64 {
    let limits = fs::read_to_string(format!("/proc/{process}/limits")).expect("it runs");
    let line = limits.lines().find(|line| line.starts_with("Max open files")).expect("proc_pid_limits(5)");
    let soft = line.split_whitespace().nth(3).expect("the soft limit");
    soft.parse().expect("a number")
}

#[test]
fn an_agent_raises_a_soft_limit_that_is_too_low_to_the_hard_one() {
    for soft in [64, 80] {
        let world = World::new();
        let mut agent = world.agent_with(&AgentConfig::named("node"), under_limits(soft, 4096));
        assert_eq!(soft_limit(agent.running().id()), 4096);
        use_agent(&agent, 1);
        agent.stop();
    }
}

#[test]
fn a_hard_limit_that_is_too_low_is_refused_with_the_number_needed() {
    let world = World::new();
    let mut files = world.configure(&AgentConfig::named("node"));
    files.start = under_limits(64, 100);
    // 2 regions × 2, 1 device × 4, 64 in reserve, 8 sessions × 6, 8 peers × 3, 8 admin connections.
    world.refusal_of(&files, reprise_e2e::agent::command(&files)).assert_says(
        RESOURCE,
        &[
            "2 regions",
            "1 devices",
            "is 100",
            "at least 152",
            "LimitNOFILE=",
            "ulimit -Hn",
            "arena.region_bytes",
        ],
    );
    files.start = under_limits(64, 152);
    let agent = world.launch(&files, reprise_e2e::agent::command(&files));
    use_agent(&agent.expect("the number that was named is enough"), 1);

    let (config, log) = (world.folder().join("member.toml"), world.folder().join("member.log"));
    let ports = "listen = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[store]\nkind = \"memory\"\n";
    fs::write(&config, ports).expect("a configuration can be written");
    let command = control_plane::command(&config);
    let mut limited = under_limits(64, 100).command(command.get_program().as_ref());
    limited.args(command.get_args());
    let refused = Starting::spawn(limited, &log).ready().expect_err("100 are too few");
    refused.assert_says(1, &["is 100", "at least", "LimitNOFILE="]);
}

#[test]
fn idle_connections_stop_neither_sessions_nor_probes_of_an_agent() {
    raise_own_limit();
    let world = World::new();
    let plane = world.control_plane(Store::Memory);
    let config =
        AgentConfig { control_plane: vec![plane.address().to_owned()], ..AgentConfig::named("node") };
    let agent = world.agent_with(&config, under_limits(64, SMALL));
    let peer_address = || {
        let nodes = plane.admin().json("/nodes");
        Some(nodes[0]["peer_address"].as_str()?.to_owned())
    };
    let peer_address = wait_until("a registered agent", PATIENCE, peer_address);
    let early = agent.engine(small());
    early.save_durably(&[1]);

    let _admin = idle(agent.admin().address(), IDLE);
    assert_healthy(agent.admin());
    use_agent(&agent, 2);
    let _sessions = idle_at(&agent.files().socket, IDLE);
    let _peers = idle(&peer_address, IDLE);
    assert_healthy(agent.admin());
    use_agent(&agent, 3);
    let _more = idle(agent.admin().address(), 2000);
    assert_healthy(agent.admin());
    use_agent(&agent, 4);

    early.load_all(&[1, 2, 3, 4], &Loading::LOCAL);
    let closed = |listener: &str| {
        let labels = format!("listener=\"{listener}\",reason=\"idle\"");
        agent.admin().metric("reprise_agent_connections_rejected_total", &labels)
    };
    assert!(closed("admin") >= 2200.0 && closed("sessions") >= 200.0);
    assert!(agent.admin().metric("reprise_agent_peer_connections_evicted_total", "") >= 200.0);
    // The oldest ones may have had the time for their greeting.
    world.allow("session refused");
    world.allow("it connected and does not greet");
}

#[test]
fn sessions_that_are_idle_stay_and_one_too_many_is_told_so() {
    let world = World::new();
    world.require("session refused");
    let agent = world.agent_with(&AgentConfig::named("node"), under_limits(64, 152));
    let sessions: Vec<_> = (0..8).map(|_| agent.engine(small())).collect();
    let refused = agent.connect(small()).expect_err("8 sessions have room");
    assert!(refused.to_string().contains("8 sessions are open already"), "{refused}");
    for (block, session) in (1..).zip(&sessions) {
        session.save_durably(&[block]);
    }
    drop(sessions);
    wait_until("room for another session", PATIENCE, || agent.connect(small()).ok());
}

#[test]
fn idle_connections_stop_neither_agents_nor_probes_of_a_member() {
    raise_own_limit();
    let world = World::new();
    let plane = world.control_plane_with(under_limits(64, SMALL), Store::Memory);
    let of = |name: &str| AgentConfig {
        control_plane: vec![plane.address().to_owned()],
        ..AgentConfig::named(name)
    };
    let early = world.agent(&of("early"));
    wait_until("a registered agent", PATIENCE, || plane.offers("early")?.then_some(()));
    let _grpc = idle(plane.address(), IDLE);
    let _admin = idle(plane.admin().address(), IDLE);
    assert_healthy(plane.admin());
    let _more = idle(plane.admin().address(), 2000);
    assert_healthy(plane.admin());
    let late = world.agent(&of("late"));
    wait_until("another registered agent", PATIENCE, || plane.offers("late")?.then_some(()));
    assert_eq!(plane.offers("early"), Some(true), "an agent keeps its connection");
    use_agent(&early, 1);
    use_agent(&late, 2);
    let closed = |listener: &str| {
        let labels = format!("listener=\"{listener}\",reason=\"idle\"");
        plane.admin().metric("reprise_controlplane_connections_rejected_total", &labels)
    };
    assert!(closed("admin") >= 2200.0 && closed("grpc") >= 100.0);
}

#[test]
fn idle_connections_do_not_stop_probes_of_an_operator() {
    raise_own_limit();
    let folder = World::new();
    let (kubeconfig, log) = (folder.folder().join("kubeconfig"), folder.folder().join("operator.log"));
    // Nothing listens there: an operator is healthy before its API server answers.
    let text = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
                clusters: [{ name: c, cluster: { server: 'http://127.0.0.1:9' } }]\n\
                contexts: [{ name: c, context: { cluster: c, user: u } }]\nusers: [{ name: u, user: {} }]\n";
    fs::write(&kubeconfig, text).expect("a file can be written");
    let StartedWith { launcher, .. } = under_limits(64, SMALL);
    let mut command = Command::new(&launcher[0]);
    command.args(&launcher[1..]).arg(binary("reprise-operator")).args([
        "run",
        "--admin-listen",
        "127.0.0.1:0",
    ]);
    command.env("KUBECONFIG", &kubeconfig).env("POD_NAME", "operator").env("POD_NAMESPACE", "default");
    let (running, ready) = Starting::spawn(command, &log).ready().expect("the operator starts");
    let admin = Admin::at(ready["admin"].as_str().expect("the ready line names its port"));
    assert_eq!(soft_limit(running.id()), SMALL);
    let _idle = idle(admin.address(), IDLE);
    assert_healthy(&admin);
    let _more = idle(admin.address(), 2000);
    assert_healthy(&admin);
    let labels = "listener=\"admin\",reason=\"idle\"";
    assert!(admin.metric("reprise_operator_connections_rejected_total", labels) >= 2200.0);
}
