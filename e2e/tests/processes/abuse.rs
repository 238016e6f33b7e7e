//! Clients that use more than their share: connections, handshakes and waiting probes. Others are served meanwhile.
//!
//! Each address of loopback counts as another client.

use std::fs;
use std::io::Write;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use reprise_e2e::flood::{connect_from, idle, raise_own_limit, startup_probe, under_limits};
use reprise_e2e::process::{ChildProcess, LaunchOptions, StartingProcess};
use reprise_e2e::{Admin, AgentConfig, PATIENCE, TestEnv, control_plane, fast_call, wait_until};
use reprise_identity::{Expected, Role};
use reprise_proto::connection::{Connection, LIST_NODES};
use reprise_proto::controlplane::{ListNodesReply, ListNodesRequest};
use reprise_testkit::certificates::Certificates;
use reprise_testkit::http::Client;
use tokio::runtime::Runtime;

/// Timeout of a kubelet's probe.
const PROBE_WITHIN: Duration = Duration::from_secs(2);

/// Connections that each client of the test for probes opens: more than its share.
const PROBES: usize = 40;

/// Duration of a flood, and its bound on connections.
const FLOOD_FOR: Duration = Duration::from_secs(4);
const FLOOD_MAX: usize = 20_000;

/// A call of a valid client in a flood: some connections of the flood are accepted before its own one.
const CALL_WITHIN: Duration = Duration::from_secs(5);

/// A member with certificates under a small limit on open files.
struct Member {
    _running: ChildProcess,
    grpc: String,
    admin: String,
}

fn attackers() -> impl Iterator<Item = Ipv4Addr> {
    (2..6).map(|last| Ipv4Addr::new(127, 0, 0, last))
}

fn agent_of(node: &str) -> Role {
    Role::Agent(node.to_owned())
}

fn start_member(env: &TestEnv, certificates: &Certificates, launch: &LaunchOptions) -> Member {
    let (config, log) = (env.folder().join("member.toml"), env.folder().join("member.log"));
    let text = format!(
        "listen = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[store]\nkind = \"memory\"\n[tls]\nfolder = {:?}\n",
        certificates.issue(&Role::Member).expect("issued")
    );
    fs::write(&config, text).expect("the folder is writable");
    env.watch_log(log.clone());
    let command = control_plane::command(&config);
    let mut launched = launch.command(command.get_program().as_ref());
    launched.args(command.get_args());
    let started = StartingProcess::spawn(launched, &log).ready();
    let (running, ready) = started.expect("the member starts");
    let address = |name: &str| ready[name].as_str().expect("the ready line has it").to_owned();
    Member { _running: running, grpc: address("grpc"), admin: address("admin") }
}

/// A kubeconfig of an API server that accepts connections and never answers.
fn silent_api_server(env: &TestEnv) -> (TcpListener, PathBuf) {
    let server = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = server.local_addr().expect("bound");
    let kubeconfig = env.folder().join("kubeconfig");
    let text = format!(
        "apiVersion: v1\nkind: Config\ncurrent-context: c\n\
         clusters: [{{name: c, cluster: {{server: \"http://{address}\"}}}}]\n\
         users: [{{name: u, user: {{token: t}}}}]\n\
         contexts: [{{name: c, context: {{cluster: c, user: u}}}}]\n"
    );
    fs::write(&kubeconfig, text).expect("the folder is writable");
    (server, kubeconfig)
}

fn assert_healthy(admin: &str) {
    fast_call("a probe", PROBE_WITHIN, || {
        let (code, body) = Admin::at(admin).get("/healthz").expect("the probe gets a response");
        assert_eq!((code, body.as_str()), (200, "ok\n"));
    });
}

#[test]
fn startup_probes_of_others_keep_out_neither_probes_nor_scrapers() {
    let env = TestEnv::new();
    // The agent reports that its API server does not answer.
    env.allow("API server");
    let certificates = Certificates::create(&env.folder().join("certificates")).expect("an authority");
    let (_server, kubeconfig) = silent_api_server(&env);
    let role = agent_of("node");
    let state = env.folder().join("state");
    let config = AgentConfig {
        pool: None,
        tls: Some(certificates.issue(&role).expect("issued")),
        extra: format!("[kubernetes]\nstate_directory = {state:?}\n"),
        ..AgentConfig::named("node")
    };
    let text = |path: &std::path::Path| path.to_str().expect("UTF-8").to_owned();
    let root = env.folder().join("root");
    fs::create_dir_all(root.join("dev/disk/by-id")).expect("a folder");
    let start = LaunchOptions {
        arguments: ["--in-cluster", "--kubeconfig", &text(&kubeconfig), "--node-root", &text(&root)]
            .map(str::to_owned)
            .to_vec(),
        environment: [("NODE_NAME", "node"), ("POD_IP", "127.0.0.1"), ("POD_NAME", "reprise-agent-x")]
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .to_vec(),
        ..LaunchOptions::default()
    };
    let agent = env.agent_with(&config, start);
    let admin = agent.admin().address();
    let scraper = Client::new(certificates.client(&Role::Console), Expected::Role(role));
    // The agent is not ready, so each probe waits. Four clients use all connections of their shares, and a fifth one, at
    // the address of the kubelet, as well.
    let clients = attackers().chain([Ipv4Addr::LOCALHOST]);
    let mut waiting: Vec<TcpStream> = clients
        .flat_map(|source| (0..PROBES).map(move |_| source))
        .filter_map(|source| startup_probe(source, admin))
        .collect();
    assert!(waiting.len() > 4 * PROBES, "{} probes", waiting.len());
    assert_healthy(admin);
    assert_eq!(scraper.ask(admin, "/status", PATIENCE).expect("an answer").code, 200);
    // The kubelet's own startup probe waits like the others: it is not refused.
    let startup = startup_probe(Ipv4Addr::LOCALHOST, admin).expect("the agent listens");
    startup.set_read_timeout(Some(PROBE_WITHIN)).expect("a bound on reads");
    let read = std::io::Read::read(&mut &startup, &mut [0; 64]);
    let error = read.expect_err("it waits");
    assert!(matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut), "{error}");
    let _silent = idle(admin, 300);
    assert_healthy(admin);
    assert_eq!(scraper.ask(admin, "/metrics", PATIENCE).expect("an answer").code, 200);
    waiting.clear();
}

fn list_nodes(runtime: &Runtime, connection: &Connection) -> Result<(), tonic::Status> {
    let listed = runtime.block_on(connection.call::<ListNodesReply>(LIST_NODES, &ListNodesRequest {}));
    listed.map(drop)
}

#[test]
fn one_identity_has_at_most_its_share_of_a_members_connections() {
    let env = TestEnv::new();
    env.require("this client uses its whole share");
    let certificates = Certificates::create(&env.folder().join("certificates")).expect("an authority");
    // About 128 connections of gRPC remain, and 32 for one client.
    let member = start_member(&env, &certificates, &under_limits(64, 256));
    let runtime = Runtime::new().expect("a runtime");
    let greedy = certificates.client(&Role::Console);
    let mut open = Vec::new();
    let refused = (0..200).find_map(|_| {
        let connection = Connection::new(&member.grpc, &greedy).expect("an address");
        let called = list_nodes(&runtime, &connection);
        open.push(connection);
        called.err()
    });
    assert!(refused.is_some(), "{} connections of one identity", open.len());
    assert!((8..=64).contains(&open.len()), "{} connections of one identity", open.len());
    for role in [Role::Admin, agent_of("node-1"), agent_of("node-2")] {
        let connection = Connection::new(&member.grpc, &certificates.client(&role)).expect("an address");
        list_nodes(&runtime, &connection).unwrap_or_else(|status| panic!("{role}: {status}"));
    }
    // A client that may make no call keeps no connection: its own ones replace each other.
    let nosy = certificates.client(&Role::Operator);
    for _ in 0..100 {
        let connection = Connection::new(&member.grpc, &nosy).expect("an address");
        let called = runtime.block_on(
            connection
                .call::<ListNodesReply>("/reprise.controlplane.v2.Directory/Lookup", &ListNodesRequest {}),
        );
        assert_eq!(called.expect_err("refused").code(), tonic::Code::PermissionDenied);
        open.push(connection);
    }
    env.require("refused a call");
    open.clear();
    wait_until("room for the first identity", PATIENCE, || {
        let connection = Connection::new(&member.grpc, &greedy).expect("an address");
        list_nodes(&runtime, &connection).ok()
    });
}

/// Opens connections from several addresses, each with the begin of a handshake, until `stop`. Returns their number.
fn flood(address: &str, stop: &AtomicBool) -> usize {
    let opened = AtomicUsize::new(0);
    thread::scope(|scope| {
        for source in attackers() {
            let opened = &opened;
            scope.spawn(move || {
                let mut streams = Vec::new();
                while !stop.load(Ordering::Relaxed) && opened.load(Ordering::Relaxed) < FLOOD_MAX {
                    let Ok(mut stream) = connect_from(source, address) else { continue };
                    let _ = stream.write_all(&[22, 3, 1]);
                    opened.fetch_add(1, Ordering::Relaxed);
                    streams.push(stream);
                    if streams.len() >= 200 {
                        streams.clear();
                    }
                }
            });
        }
    });
    opened.into_inner()
}

#[test]
fn known_clients_complete_their_handshakes_in_a_flood_of_others() {
    raise_own_limit();
    let env = TestEnv::new();
    for words in ["without a valid certificate", "refused", "peer connection"] {
        env.allow(words);
    }
    let certificates = Certificates::create(&env.folder().join("certificates")).expect("an authority");
    let member = start_member(&env, &certificates, &under_limits(64, 256));
    let role = agent_of("node");
    let config = AgentConfig {
        control_plane: vec![member.grpc.clone()],
        tls: Some(certificates.issue(&role).expect("issued")),
        ..AgentConfig::named("node")
    };
    let agent = env.agent_with(&config, under_limits(64, 256));
    let console = Client::new(certificates.client(&Role::Console), Expected::Role(Role::Member));
    let peers = wait_until("a registered agent", PATIENCE, || {
        let nodes: serde_json::Value =
            serde_json::from_str(&console.get(&member.admin, "/nodes").ok()?).ok()?;
        Some(nodes[0]["peer_endpoints"][0]["address"].as_str()?.to_owned())
    });
    let (caller, peer) = (certificates.client(&agent_of("node-2")), certificates.client(&agent_of("node-2")));
    let runtime = Runtime::new().expect("a runtime");
    let call = || {
        let connection = Connection::new(&member.grpc, &caller).expect("an address");
        list_nodes(&runtime, &connection).map_err(|status| status.to_string())
    };
    let dial_peer = || {
        let dialled = runtime.block_on(peer.dial(&peers, Expected::Role(role.clone())));
        dialled.map(drop).map_err(|error| error.to_string())
    };
    let scrape = |address: &str, expected: Expected| {
        let client = Client::new(certificates.client(&Role::Console), expected);
        client.ask(address, "/metrics", CALL_WITHIN).map(drop).map_err(|error| format!("{error:#}"))
    };
    // The flood is of other addresses, and these clients are known from now on.
    call().expect("a valid client");
    dial_peer().expect("a valid peer");
    let stop = AtomicBool::new(false);
    let mut slowest = Duration::ZERO;
    let (opened, calls) = thread::scope(|scope| {
        let floods: Vec<_> = [&member.grpc, &peers, &member.admin]
            .map(|address| scope.spawn(|| flood(address, &stop)))
            .into_iter()
            .collect();
        let begun = Instant::now();
        let mut calls = 0;
        while begun.elapsed() < FLOOD_FOR {
            let outcomes = [
                ("call", timed(&mut slowest, call)),
                ("peer", timed(&mut slowest, dial_peer)),
                ("scrape", timed(&mut slowest, || scrape(&member.admin, Expected::Role(Role::Member)))),
            ];
            for (what, outcome) in outcomes {
                if let Err(error) = outcome {
                    stop.store(true, Ordering::Relaxed);
                    panic!("{what} {calls} fails in the flood: {error}");
                }
            }
            calls += 1;
        }
        stop.store(true, Ordering::Relaxed);
        (floods.into_iter().map(|flood| flood.join().expect("no panic")).sum::<usize>(), calls)
    });
    println!("{calls} rounds of new connections in a flood of {opened}, the slowest took {slowest:?}");
    assert!(opened > 1_000, "the flood has {opened} connections only");
    assert!(calls > 0 && slowest < CALL_WITHIN, "{calls} rounds, {slowest:?}");
    assert_healthy(agent.admin().address());
}

fn timed(slowest: &mut Duration, call: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
    let begun = Instant::now();
    let outcome = call();
    *slowest = (*slowest).max(begun.elapsed());
    outcome
}
