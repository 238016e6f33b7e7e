//! The control plane as a process: ready line, exit, configuration, and its store after `kill -9`.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use reprise_controlplane::config::Config;
use reprise_controlplane::server::ControlPlane;
use reprise_proto::controlplane::{ListNodesRequest, PeerEndpoint, RegisterReply, RegisterRequest};
use reprise_testkit::etcd::{Etcd, ServerTls, Setup, built_binary};
use reprise_testkit::process::{ChildProcess, Signal};
use tokio::runtime::Runtime;

use crate::authority;
use crate::process::{PATIENCE, Process, command, write_config};

fn registration(name: &str) -> RegisterRequest {
    RegisterRequest {
        name: name.to_owned(),
        peer_endpoints: vec![PeerEndpoint::tcp("127.0.0.1:1")],
        ..RegisterRequest::default()
    }
}

fn embedded(directory: &Path) -> std::path::PathBuf {
    let store = directory.join("store");
    write_config(directory, &format!("kind = 'embedded'\npath = '{}'", store.display()))
}

fn output(mut command: Command) -> (Output, String) {
    let output = command.output().expect("runs");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    (output, message)
}

/// Number of registrations in an epoch; the upper half identifies the store.
fn registrations(epoch: u64) -> u64 {
    epoch & u64::from(u32::MAX)
}

#[test]
fn sigterm_and_sigint_end_the_process_cleanly_with_one_line_of_output() {
    for signal in [Signal::TERM, Signal::INT] {
        let directory = tempfile::tempdir().expect("a directory");
        let mut command = command(&write_config(directory.path(), "kind = 'memory'"));
        command.stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = ChildProcess::spawn(command);
        let mut reader = BufReader::new(child.take_output().expect("piped"));
        let mut line = String::new();
        reader.read_line(&mut line).expect("a line");
        child.signal(signal);
        let mut rest = String::new();
        reader.read_to_string(&mut rest).expect("the end");
        assert!(child.wait(PATIENCE).expect("ended").success(), "{signal:?}");
        assert_eq!(rest, "", "only the ready line is printed");
    }
}

/// Registrations answered before `kill -9` survive it, even if a write was in progress.
#[test]
fn answered_registrations_survive_kill_9() {
    const ROUNDS: u32 = 10;
    const NAMES: u32 = 9;
    let directory = tempfile::tempdir().expect("a directory");
    let config = embedded(directory.path());
    let runtime = Runtime::new().expect("a runtime");
    // Name → number and highest answered epoch.
    let mut answered = BTreeMap::<String, (u32, u64)>::new();
    for round in 0..ROUNDS {
        let mut process = Process::start(&config);
        let (answers, received) = std::sync::mpsc::channel();
        let mut client = runtime.block_on(process.client());
        // Registers continuously until the process is killed, so that a registration is always in progress.
        let registering = runtime.spawn(async move {
            for number in round.. {
                let name = format!("n{}", number % NAMES);
                let Ok(granted) = client.register(registration(&name)).await else { return };
                answers.send((name, granted.into_inner())).expect("the receiver exists");
            }
        });
        let mut check = |name: String, granted: RegisterReply| {
            let (node, epoch) = answered.get(&name).copied().unwrap_or((granted.node, 0));
            assert_eq!(node, granted.node, "{name} keeps its number");
            assert!(granted.epoch > epoch, "{name}: epoch {} after {epoch}", granted.epoch);
            answered.insert(name, (node, granted.epoch));
        };
        for _ in 0..5 + round {
            let (name, granted) = received.recv_timeout(PATIENCE).expect("registrations continue");
            check(name, granted);
        }
        process.child.kill();
        runtime.block_on(registering).expect("no panic");
        received.into_iter().for_each(|(name, granted)| check(name, granted));
    }
    let numbers: BTreeSet<u32> = answered.values().map(|(node, _)| *node).collect();
    assert_eq!(numbers.len(), answered.len(), "numbers are unique");
}

#[test]
fn rejects_a_second_process_on_the_same_store() {
    let directory = tempfile::tempdir().expect("a directory");
    let config = embedded(directory.path());
    let _first = Process::start(&config);
    let (output, message) = output(command(&config));
    assert!(!output.status.success());
    assert!(message.contains("in use by another process"), "{message}");
    assert!(output.stdout.is_empty(), "no ready line");
}

#[test]
fn prints_a_valid_default_configuration() {
    let mut print = Command::new(env!("CARGO_BIN_EXE_reprise-controlplane"));
    print.arg("--print-default-config");
    let (printed, _) = output(print);
    assert!(printed.status.success());
    let text = String::from_utf8(printed.stdout).expect("text");
    assert!(text.contains("dead_after = \"1500ms\""), "{text}");
    Config::parse(&text).expect("the default is valid");
}

#[test]
fn rejects_invalid_configurations() {
    let directory = tempfile::tempdir().expect("a directory");
    for (store, words) in
        [("kind = 'memory'\nfile = 'x'", "file"), ("kind = 'memory'\n[log]\nlevel = '!!'", "log.level")]
    {
        let (output, message) = output(command(&write_config(directory.path(), store)));
        assert!(!output.status.success());
        assert!(message.contains(words), "{message}");
    }
    let (missing, message) = output(command(&directory.path().join("none.toml")));
    assert!(!missing.status.success());
    assert!(message.contains("none.toml"), "{message}");
}

/// A store whose write failed rejects writes until it is reopened, so the process must exit.
#[test]
fn a_full_disk_ends_the_process_and_loses_no_answered_registrations() {
    /// Slightly more than an empty store needs, in KiB.
    const FILE_KIB: u64 = 2560;
    let directory = tempfile::tempdir().expect("a directory");
    let config = embedded(directory.path());
    let message = directory.path().join("log");
    let mut limited = Command::new("bash");
    // With XFSZ ignored, writes beyond the limit fail with EFBIG instead of a signal.
    let script = format!("trap '' XFSZ; ulimit -f {FILE_KIB}; exec \"$0\" --config \"$1\" 2> \"$2\"");
    limited.args(["-c", &script, env!("CARGO_BIN_EXE_reprise-controlplane")]).arg(&config).arg(&message);
    let mut process = Process::start_command(limited);
    let runtime = Runtime::new().expect("a runtime");
    let mut client = runtime.block_on(process.client());
    let mut answered = Vec::new();
    for number in 0.. {
        assert!(number < 100_000, "the limit was not reached");
        let long = RegisterRequest { failure_domain: "x".repeat(500), ..registration(&format!("n{number}")) };
        match runtime.block_on(client.register(long)) {
            Ok(granted) => answered.push(granted.into_inner().node),
            Err(_) => break,
        }
    }
    let status = process.end();
    let message = std::fs::read_to_string(message).expect("a log");
    assert!(!status.success() && message.contains("rejects this process"), "{status}: {message}");
    assert!(!answered.is_empty(), "some registrations succeeded");

    let process = Process::start(&config);
    let mut client = runtime.block_on(process.client());
    let nodes = runtime.block_on(client.list_nodes(ListNodesRequest {})).expect("a list").into_inner().nodes;
    let known: BTreeSet<u32> = nodes.iter().map(|node| node.node).collect();
    assert!(answered.iter().all(|node| known.contains(node)), "{} of {}", known.len(), answered.len());
}

/// Node numbers in etcd survive the process.
#[test]
fn node_numbers_survive_in_etcd() {
    let directory = tempfile::tempdir().expect("a directory");
    let server = Etcd::start_in(directory.path());
    let endpoint = server.endpoint();
    let config = write_config(directory.path(), &format!("kind = 'etcd'\nendpoints = ['{endpoint}']"));
    let runtime = Runtime::new().expect("a runtime");
    let register = |process: &Process, name: &str| {
        let mut client = runtime.block_on(process.client());
        let granted = runtime.block_on(client.register(registration(name))).expect("granted").into_inner();
        (granted.node, registrations(granted.epoch))
    };
    let mut process = Process::start(&config);
    assert_eq!(register(&process, "a"), (1, 1));
    assert_eq!(register(&process, "b"), (2, 1));
    process.child.kill();
    drop(process);
    let process = Process::start(&config);
    assert_eq!(register(&process, "b"), (2, 2));
    assert_eq!(register(&process, "c"), (3, 1));
}

/// A member waits for etcd for some time, here on a paused clock.
#[tokio::test(start_paused = true)]
async fn a_start_without_etcd_fails_with_the_setting_to_check() {
    let directory = tempfile::tempdir().expect("a directory");
    // No process listens on port 1.
    let config = write_config(directory.path(), "kind = 'etcd'\nendpoints = ['http://127.0.0.1:1']");
    let text = std::fs::read_to_string(config).expect("just written");
    let config = Config::parse(&text).expect("valid");
    let refused = ControlPlane::start(config).await.expect_err("there is no etcd");
    assert!(format!("{refused:#}").contains("store.endpoints"), "{refused:#}");
}

/// TLS files of the configuration are used: registrations succeed with them, and a wrong file fails the
/// start.
#[test]
fn connects_to_etcd_with_the_configured_tls_files() {
    let directory = tempfile::tempdir().expect("a directory");
    let ours = authority::Authority::new("ours");
    let file = |name: &str, text: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, text).expect("written");
        path
    };
    let ca = file("ca.pem", &ours.certificate());
    file("other-ca.pem", &authority::Authority::new("a stranger").certificate());
    let (certificate, key) = ours.issue(&["127.0.0.1"]);
    let tls = ServerTls {
        certificate: file("server.pem", &certificate),
        key: file("server-key.pem", &key),
        client_authority: ca,
    };
    let (certificate, key) = ours.issue(&["client"]);
    file("client.pem", &certificate);
    file("client-key.pem", &key);
    let setup = Setup::on_loopback(built_binary(), directory.path());
    let server = Etcd::start(Setup { tls: Some(tls), ..setup });
    let endpoint = server.endpoint();
    let config = |ca: &str| {
        let path = |name: &str| directory.path().join(name).display().to_string();
        let (ca, certificate, key) = (path(ca), path("client.pem"), path("client-key.pem"));
        let tls = format!("ca_file = '{ca}'\ncert_file = '{certificate}'\nkey_file = '{key}'");
        let store = format!("kind = 'etcd'\nendpoints = ['{endpoint}']\n[store.tls]\n{tls}");
        write_config(directory.path(), &store)
    };
    let process = Process::start(&config("ca.pem"));
    let runtime = Runtime::new().expect("a runtime");
    let mut client = runtime.block_on(process.client());
    let granted = runtime.block_on(client.register(registration("a"))).expect("granted").into_inner();
    assert_eq!((granted.node, registrations(granted.epoch)), (1, 1));
    drop(process);
    let (refused, message) = output(command(&config("other-ca.pem")));
    assert!(!refused.status.success());
    assert!(message.contains("store.tls.ca_file"), "{message}");
}
