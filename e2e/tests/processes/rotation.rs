//! All certificates of a running cluster are renewed several times under load by `reprise certs`, and its authority is
//! replaced: no request fails.
//!
//! The load: engines on both nodes save blocks and load those of the other node, in new sessions, so agents announce, look
//! up and fetch. `reprise status` opens new connections to the ports of all processes. Connections between agents stay
//! when certificates change, so a further node joins after each change, and connects to all others in both directions.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use reprise_client::{Scope, Source};
use reprise_e2e::cluster::{numbers, wait_for_sources};
use reprise_e2e::content::small;
use reprise_e2e::process::binary;
use reprise_e2e::seed::print_line;
use reprise_e2e::{Admin, Agent, AgentConfig, ControlPlane, LoadParams, PATIENCE, TestEnv, wait_until};
use reprise_identity::{Expected, Role};
use reprise_testkit::certificates::Certificates;
use serde_json::Value;

use crate::processes::certificates::wait_until_used;

/// Number of renewals with the same authority.
const RENEWALS: u64 = 3;

/// Blocks that an engine saves at once.
const BATCH: u64 = 8;

/// First block numbers of the writers: the nodes of the load, and those that join.
const WRITERS: [u64; 3] = [0, 1 << 32, 2 << 32];

const NODES: [&str; 2] = ["first", "second"];

/// A cluster whose processes have certificates.
struct Rotating {
    nodes: [Agent; 2],
    member: ControlPlane,
    certificates: Certificates,
    /// Folders of all certificates that were issued.
    folders: Mutex<Vec<PathBuf>>,
    /// Last: it checks the logs of the processes that have ended.
    env: TestEnv,
}

/// Requests of the load, and those that failed.
#[derive(Debug, Default)]
struct Requests {
    is_over: AtomicBool,
    loaded: AtomicU64,
    commands: AtomicU64,
    failures: Mutex<Vec<String>>,
}

/// Ends the load when it is dropped, also by a panic.
struct EndsLoad<'a>(&'a AtomicBool);

impl Drop for EndsLoad<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Rotating {
    fn start() -> Rotating {
        let env = TestEnv::new();
        let certificates = Certificates::create(&env.folder().join("certificates")).expect("an authority");
        let folders = [Role::Member, Role::Admin].map(|role| certificates.issue(&role).expect("issued"));
        let member = env.control_plane_with_tls(&folders[0]);
        let mut folders = folders.to_vec();
        let nodes = NODES.map(|node| {
            let tls = certificates.issue(&Role::Agent(node.to_owned())).expect("issued");
            folders.push(tls.clone());
            env.agent(&config(node, &member, tls))
        });
        // Nodes join and leave.
        for words in ["peer connection lost", "node is silent"] {
            env.allow(words);
        }
        Rotating { nodes, member, certificates, folders: Mutex::new(folders), env }
    }

    /// Runs `reprise certs`, which must succeed.
    fn certs(&self, arguments: &[&str], folders: &[PathBuf]) {
        let mut command = Command::new(binary("reprise"));
        command.arg("certs").args(arguments).args(folders);
        assert_success(&command.output().expect("reprise can be run"));
    }

    /// Renews all certificates, and waits until all processes use them.
    fn renew(&self, more: &[&str]) {
        let folders = self.folders.lock().expect("no panic").clone();
        let authority = self.certificates.authority_folder();
        let authority = authority.to_str().expect("folders of tests are UTF-8");
        self.certs(&[&["renew", "--authority", authority], more].concat(), &folders);
        let processes = self.processes();
        let used: Vec<(&Admin, PathBuf)> =
            processes.iter().map(|(admin, folder)| (admin, folder.clone())).collect();
        wait_until_used(&used);
    }

    /// Admin ports of the processes that run all the time, with the folders of their certificates.
    fn processes(&self) -> Vec<(Admin, PathBuf)> {
        let client = self.certificates.folder_of(&Role::Admin);
        let as_admin = |admin: &Admin, role: Role| {
            let folder = self.certificates.folder_of(&role);
            (admin.with_certificates(client.clone(), Expected::Role(role)), folder)
        };
        let agents = NODES.iter().zip(&self.nodes);
        let agents = agents.map(|(node, agent)| as_admin(agent.admin(), Role::Agent((*node).to_owned())));
        agents.chain([as_admin(self.member.admin(), Role::Member)]).collect()
    }

    /// Saves blocks on one node and loads them on the other one, until the load is over.
    fn exchange(&self, from: usize, requests: &Requests) {
        let (from, to, mut next) = (&self.nodes[from], &self.nodes[1 - from], WRITERS[from]);
        while !requests.is_over() {
            let blocks = numbers(next..next + BATCH);
            next += BATCH;
            from.engine(small()).save_durably(&blocks);
            requests.load_from_peer(to, &blocks);
        }
    }

    /// Asks the member and all agents over new connections, until the load is over.
    fn ask(&self, requests: &Requests) {
        let tls = self.certificates.folder_of(&Role::Admin);
        while !requests.is_over() {
            let answered = status(self.member.address(), &tls);
            requests.commands.fetch_add(1, Ordering::Relaxed);
            if let Err(failure) = answered {
                requests.fail(failure);
            }
        }
    }

    /// Starts a node, which loads blocks from both others, and whose blocks both others load.
    fn join(&self, round: u64, requests: &Requests) {
        let name = format!("joined-{round}");
        let tls = self.certificates.issue(&Role::Agent(name.clone())).expect("issued");
        self.folders.lock().expect("no panic").push(tls.clone());
        let mut joined = self.env.agent(&config(&name, &self.member, tls));
        let first = WRITERS[2] + round * 3 * BATCH;
        for (at, node) in (1..).zip(&self.nodes) {
            let blocks = numbers(first + at * BATCH..first + (at + 1) * BATCH);
            node.engine(small()).save_durably(&blocks);
            requests.load_from_peer(&joined, &blocks);
        }
        let own = numbers(first..first + BATCH);
        joined.engine(small()).save_durably(&own);
        for node in &self.nodes {
            requests.load_from_peer(node, &own);
        }
        joined.stop();
    }
}

impl Requests {
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn fail(&self, failure: String) {
        self.failures.lock().expect("no panic").push(failure);
    }

    /// Looks blocks up and loads them, in a new session; each block that does not arrive is a failure.
    fn load_from_peer(&self, node: &Agent, blocks: &[u64]) {
        let engine = node.engine(small());
        // Blocks are announced within some milliseconds.
        wait_for_sources(&engine, blocks, PATIENCE);
        let is_own = |source: &Source| matches!(source, Source::OwnDram | Source::OwnNvme);
        assert!(!engine.matches(blocks, Scope::Cluster).iter().any(is_own), "blocks are on other nodes");
        match engine.load(blocks, &LoadParams::CLUSTER) {
            Ok(outcomes) => {
                for outcome in outcomes.iter().filter(|outcome| !outcome.is_verified()) {
                    self.fail(format!("a block from a peer: {outcome:?}"));
                }
            }
            Err(error) => self.fail(format!("a load: {error}")),
        }
        self.loaded.fetch_add(blocks.len() as u64, Ordering::Relaxed);
    }
}

fn config(node: &str, member: &ControlPlane, tls: PathBuf) -> AgentConfig {
    // Without placement, which would copy blocks before they are loaded.
    AgentConfig {
        control_plane: vec![member.address().to_owned()],
        tls: Some(tls),
        extra: "[placement]\nbandwidth = \"0\"\n".to_owned(),
        ..AgentConfig::named(node)
    }
}

fn assert_success(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Runs `reprise status`; the member and both nodes must answer.
fn status(member: &str, tls: &Path) -> Result<(), String> {
    let mut command = Command::new(binary("reprise"));
    command.args(["status", "--json", "--controlplane", member, "--tls"]).arg(tls);
    let output = command.output().expect("reprise can be run");
    if !output.status.success() {
        return Err(format!("status: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let status: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    let nodes = status["nodes"].as_array().expect("a list");
    for name in NODES {
        let Some(node) = nodes.iter().find(|node| node["name"] == name) else {
            return Err(format!("status: {name} is not registered"));
        };
        if node["alive"] != true || node["agent"]["Ok"].is_null() {
            return Err(format!("status of {name}: alive {}, {}", node["alive"], node["agent"]));
        }
    }
    Ok(())
}

#[test]
fn no_request_fails_while_all_certificates_are_renewed_and_the_authority_is_replaced() {
    let rotating = Rotating::start();
    let requests = Requests::default();
    let address = rotating.member.address();
    wait_until("both nodes are registered", PATIENCE, || {
        status(address, &rotating.certificates.folder_of(&Role::Admin)).ok()
    });
    let authority = [rotating.certificates.authority_folder()];
    std::thread::scope(|scope| {
        for from in [0, 1] {
            let (rotating, requests) = (&rotating, &requests);
            scope.spawn(move || rotating.exchange(from, requests));
        }
        scope.spawn(|| rotating.ask(&requests));
        let _ends = EndsLoad(&requests.is_over);
        for round in 0..RENEWALS {
            rotating.renew(&["--force"]);
            rotating.join(round, &requests);
        }
        for (round, step) in (RENEWALS..).zip(["add", "switch", "remove"]) {
            rotating.certs(&["authority", step], &authority);
            rotating.renew(&[]);
            rotating.join(round, &requests);
        }
    });
    let failures = requests.failures.into_inner().expect("no panic");
    let (loaded, commands) = (requests.loaded.into_inner(), requests.commands.into_inner());
    print_line(&format!("{loaded} blocks from peers and {commands} commands, {} failed", failures.len()));
    assert!(failures.is_empty(), "{failures:?}");
    assert!(loaded > 100 && commands > 10, "{loaded} blocks, {commands} commands");
    for (admin, _) in rotating.processes() {
        let program =
            if admin.address() == rotating.member.admin().address() { "controlplane" } else { "agent" };
        let metric = |name: &str| admin.metric(&format!("reprise_{program}_{name}"), "");
        assert!(metric("tls_reloads_total") >= 6.0, "each change was used");
        assert_eq!(metric("tls_reloads_refused_total"), 0.0);
        assert_eq!(metric("connections_rejected_total"), 0.0);
        assert_eq!(metric("peer_handshakes_refused_total"), 0.0);
    }
}
