//! Limits on open files:
//!
//! * Each program raises its soft limit to the hard limit.
//! * The agent and members reject a hard limit that is too low.
//! * Idle connections use up neither the descriptors nor the connections of other clients.

use std::fs;
use std::net::Ipv4Addr;
use std::time::Duration;

use reprise_e2e::content::small;
use reprise_e2e::control_plane::{self, Store};
use reprise_e2e::flood::{idle, idle_at, raise_own_limit, startup_probe, under_limits};
use reprise_e2e::process::{StartingProcess, binary};
use reprise_e2e::{Admin, Agent, AgentConfig, LoadParams, PATIENCE, TestEnv, fast_call, wait_until};

/// Exit code for errors with memory, sockets and ports.
const RESOURCE: i32 = 3;

/// Timeout of a kubelet's probe.
const PROBE_WITHIN: Duration = Duration::from_secs(2);

/// Idle connections: far more than each listener accepts under [`SMALL`].
const IDLE: usize = 300;

/// A small hard limit, above the minimum of an agent and of a member.
const SMALL: u64 = 256;

fn assert_healthy(admin: &Admin) {
    fast_call("a probe", PROBE_WITHIN, || {
        let (code, body) = admin.get("/healthz").expect("the probe gets a response");
        assert_eq!(code, 200, "{body}");
    });
}

/// Opens a session, saves a block and loads it.
fn use_agent(agent: &Agent, block: u64) {
    let engine = agent.engine(small());
    engine.save_durably(&[block]);
    engine.load_all(&[block], &LoadParams::LOCAL);
}

/// Returns the soft limit of a running process.
fn soft_limit(process: u32) -> u64 {
    let limits = fs::read_to_string(format!("/proc/{process}/limits")).expect("the process runs");
    let line = limits
        .lines()
        .find(|line| line.starts_with("Max open files"))
        .expect("limits has the line Max open files");
    let soft = line.split_whitespace().nth(3).expect("the soft limit");
    soft.parse().expect("the soft limit is a number")
}

#[test]
fn agent_raises_soft_limit_to_hard_limit() {
    for soft in [64, 80] {
        let env = TestEnv::new();
        let mut agent = env.agent_with(&AgentConfig::named("node"), under_limits(soft, 4096));
        assert_eq!(soft_limit(agent.running().id()), 4096);
        use_agent(&agent, 1);
        agent.stop();
    }
}

#[test]
fn rejects_too_low_hard_limit_and_reports_required_limit() {
    let env = TestEnv::new();
    let mut files = env.configure(&AgentConfig::named("node"));
    files.start = under_limits(64, 100);
    // 2 regions × 2, 1 device × 5, 64 in reserve, 8 sessions × 6, 8 peers × 3, 8 admin connections.
    env.refusal_of(&files, reprise_e2e::agent::command(&files)).assert_reports(
        RESOURCE,
        &[
            "2 arena regions",
            "1 device",
            "is 100",
            "at least 153",
            "LimitNOFILE=",
            "ulimit -Hn",
            "arena.region_bytes",
        ],
    );
    files.start = under_limits(64, 153);
    let agent = env.launch(&files, reprise_e2e::agent::command(&files));
    use_agent(&agent.expect("the required limit is enough"), 1);

    let (config, log) = (env.folder().join("member.toml"), env.folder().join("member.log"));
    let ports =
        "listen = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\ntls.plain = true\n[store]\nkind = \"memory\"\n";
    fs::write(&config, ports).expect("the folder is writable");
    let command = control_plane::command(&config);
    let mut limited = under_limits(64, 100).command(command.get_program().as_ref());
    limited.args(command.get_args());
    let refused = StartingProcess::spawn(limited, &log).ready().expect_err("the limit is too low");
    refused.assert_reports(1, &["is 100", "at least", "LimitNOFILE="]);
}

#[test]
fn idle_connections_block_neither_sessions_nor_probes_of_an_agent() {
    raise_own_limit();
    let env = TestEnv::new();
    let control_plane = env.control_plane(Store::Memory);
    let config =
        AgentConfig { control_plane: vec![control_plane.address().to_owned()], ..AgentConfig::named("node") };
    let agent = env.agent_with(&config, under_limits(64, SMALL));
    let peer_address = || {
        let nodes = control_plane.admin().json("/nodes");
        Some(nodes[0]["peer_endpoints"][0]["address"].as_str()?.to_owned())
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

    early.load_all(&[1, 2, 3, 4], &LoadParams::LOCAL);
    let rejected = |listener: &str| {
        let labels = format!("listener=\"{listener}\",reason=\"idle\"");
        agent.admin().metric("reprise_agent_connections_rejected_total", &labels)
    };
    assert!(rejected("admin") >= 2200.0 && rejected("sessions") >= 200.0);
    assert!(agent.admin().metric("reprise_agent_peer_connections_evicted_total", "") >= 200.0);
    // The oldest connections may have reached the timeout of the handshake.
    env.allow("session rejected");
    env.allow("the peer sent no handshake within the stall timeout");
}

#[test]
fn idle_sessions_stay_open_and_a_session_beyond_the_limit_is_rejected() {
    let env = TestEnv::new();
    env.require("session rejected");
    let agent = env.agent_with(&AgentConfig::named("node"), under_limits(64, 153));
    let sessions: Vec<_> = (0..8).map(|_| agent.engine(small())).collect();
    let refused = agent.connect(small()).expect_err("the limit is 8 sessions");
    assert!(refused.to_string().contains("the limit of 8 sessions is reached"), "{refused}");
    for (block, session) in (1..).zip(&sessions) {
        session.save_durably(&[block]);
    }
    drop(sessions);
    wait_until("room for another session", PATIENCE, || agent.connect(small()).ok());
}

#[test]
fn idle_connections_block_neither_agents_nor_probes_of_a_member() {
    raise_own_limit();
    let env = TestEnv::new();
    // A busy machine may delay a heartbeat; the registration below must survive it.
    env.allow("the control plane is unreachable");
    let control_plane = env.control_plane_with(under_limits(64, SMALL), Store::Memory);
    let of = |name: &str| AgentConfig {
        control_plane: vec![control_plane.address().to_owned()],
        ..AgentConfig::named(name)
    };
    let early = env.agent(&of("early"));
    wait_until("a registered agent", PATIENCE, || control_plane.offers("early")?.then_some(()));
    let epoch = |agent: &Agent| agent.admin().json("/status")["controlplane"]["epoch"].as_u64();
    // The agent learns of its registration after the member.
    let registered = wait_until("the epoch of the registration", PATIENCE, || epoch(&early));
    let _grpc = idle(control_plane.address(), IDLE);
    let _admin = idle(control_plane.admin().address(), IDLE);
    assert_healthy(control_plane.admin());
    let _more = idle(control_plane.admin().address(), 2000);
    assert_healthy(control_plane.admin());
    let late = env.agent(&of("late"));
    wait_until("another registered agent", PATIENCE, || control_plane.offers("late")?.then_some(()));
    wait_until("the early agent to be offered", PATIENCE, || control_plane.offers("early")?.then_some(()));
    assert_eq!(epoch(&early), Some(registered), "the agent keeps its registration");
    use_agent(&early, 1);
    use_agent(&late, 2);
    let rejected = |listener: &str| {
        let labels = format!("listener=\"{listener}\",reason=\"idle\"");
        control_plane.admin().metric("reprise_controlplane_connections_rejected_total", &labels)
    };
    assert!(rejected("admin") >= 2200.0 && rejected("grpc") >= 100.0);
}

#[test]
fn idle_connections_do_not_block_probes_of_an_operator() {
    raise_own_limit();
    let folder = TestEnv::new();
    let (kubeconfig, log) = (folder.folder().join("kubeconfig"), folder.folder().join("operator.log"));
    // Nothing listens at this address: an operator is healthy before its API server responds.
    let text = "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
                clusters: [{ name: c, cluster: { server: 'http://127.0.0.1:9' } }]\n\
                contexts: [{ name: c, context: { cluster: c, user: u } }]\nusers: [{ name: u, user: {} }]\n";
    fs::write(&kubeconfig, text).expect("the folder is writable");
    let mut command = under_limits(64, SMALL).command(&binary("reprise-operator"));
    command.args(["run", "--admin-listen", "127.0.0.1:0", "--admin-plain"]);
    command.env("KUBECONFIG", &kubeconfig).env("POD_NAME", "operator").env("POD_NAMESPACE", "default");
    let (running, ready) = StartingProcess::spawn(command, &log).ready().expect("the operator starts");
    let admin = Admin::at(ready["admin"].as_str().expect("the ready line contains the admin address"));
    assert_eq!(soft_limit(running.id()), SMALL);
    let _idle = idle(admin.address(), IDLE);
    assert_healthy(&admin);
    let _more = idle(admin.address(), 2000);
    assert_healthy(&admin);
    // The operator is not ready, so startup probes wait: more of them than it has connections keep out no other probe.
    let waiting = (0..100).filter_map(|_| startup_probe(Ipv4Addr::LOCALHOST, admin.address()));
    let _waiting: Vec<_> = waiting.collect();
    assert_healthy(&admin);
    let labels = "listener=\"admin\",reason=\"idle\"";
    assert!(admin.metric("reprise_operator_connections_rejected_total", labels) >= 2200.0);
}
