//! Attacks on admin ports and on sockets of events, with certificates: each attempt is refused within a deadline and
//! logged, and changes nothing. Probes and sessions are answered meanwhile.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use reprise_e2e::content::small;
use reprise_e2e::control_plane;
use reprise_e2e::flood::idle;
use reprise_e2e::logs;
use reprise_e2e::process::{ChildProcess, StartingProcess, binary};
use reprise_e2e::{Admin, Agent, AgentConfig, LoadParams, TestEnv, fast_call};
use reprise_identity::{Expected, Role, Security};
use reprise_testkit::certificates::Certificates;
use reprise_testkit::http::Client;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Time limit for a refusal: that of a handshake (5 s) or of a request (10 s), and a busy machine.
const REFUSED_WITHIN: Duration = Duration::from_secs(20);

/// Timeout of a kubelet's probe.
const PROBE_WITHIN: Duration = Duration::from_secs(2);

/// Attempts of [`Secured::attack_admin_port`] that are refused with a status or in the handshake.
const REFUSED_ATTEMPTS: usize = 11;

/// Number of clients of [`Secured::assert_slow_clients_are_closed`].
const SLOW_CLIENTS: usize = 4;

/// Answer to a request of a client: the status, or 0 if the connection is refused or closed.
const CLOSED: u16 = 0;

/// A process with certificates, and the files of the cluster.
struct Secured<P> {
    process: P,
    admin: String,
    role: Role,
    log: PathBuf,
    certificates: Certificates,
    env: TestEnv,
}

/// A member and the addresses of its sockets of events.
struct Member {
    _running: ChildProcess,
    publish: String,
    replay: String,
}

fn environment() -> (TestEnv, Certificates) {
    let env = TestEnv::new();
    env.allow("refused a connection");
    env.allow("refused a request");
    env.allow("refused a reader of events");
    env.allow("refused the bearer token");
    let certificates = Certificates::create(&env.folder().join("certificates")).expect("an authority");
    (env, certificates)
}

fn agent() -> Secured<Agent> {
    let (env, certificates) = environment();
    let role = Role::Agent("node".to_owned());
    let tls = Some(certificates.issue(&role).expect("issued"));
    let config = AgentConfig { tls, ..AgentConfig::named("node") };
    let agent = env.agent(&config);
    let (admin, log) = (agent.admin().address().to_owned(), agent.files().log.clone());
    Secured { process: agent, admin, role, log, certificates, env }
}

fn free_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("bound").to_string()
}

fn member() -> Secured<Member> {
    let (env, certificates) = environment();
    let (config, log) = (env.folder().join("member.toml"), env.folder().join("member.log"));
    let (publish, replay) = (free_address(), free_address());
    let token = env.folder().join("token");
    fs::write(&token, TOKEN).expect("the folder is writable");
    let text = format!(
        "listen = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\nadmin_token_file = {token:?}\n[store]\nkind = \"memory\"\n\
         [events]\npublish = \"{publish}\"\nreplay = \"{replay}\"\n[tls]\nfolder = {:?}",
        certificates.issue(&Role::Member).expect("issued")
    );
    fs::write(&config, text).expect("the folder is writable");
    let started = StartingProcess::spawn(control_plane::command(&config), &log).ready();
    let (running, ready) = started.expect("the member starts");
    let admin = ready["admin"].as_str().expect("the ready line has the admin port").to_owned();
    let process = Member { _running: running, publish, replay };
    Secured { process, admin, role: Role::Member, log, certificates, env }
}

const TOKEN: &str = "0123456789abcdef0123456789abcdef";

fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime
        .block_on(async { tokio::time::timeout(REFUSED_WITHIN, future).await })
        .expect("the attempt ends within its deadline")
}

impl<P> Secured<P> {
    fn expected(&self) -> Expected {
        Expected::Role(self.role.clone())
    }

    /// Status of a page for a client; [`CLOSED`] if it is refused before it can ask.
    fn ask(&self, client: Security, path: &str) -> u16 {
        let answer = Client::new(client, self.expected()).ask(&self.admin, path, REFUSED_WITHIN);
        answer.map_or(CLOSED, |answer| answer.code)
    }

    /// Status of a page for a client with TLS and without a certificate.
    fn ask_anonymously(&self, path: &str, fields: &str) -> u16 {
        let request = format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{fields}\r\n");
        run(async {
            let connected = self.certificates.connect_anonymously(&self.admin, self.expected()).await;
            let mut stream = connected.expect("the port admits such clients");
            stream.write_all(request.as_bytes()).await.expect("connected");
            stream.flush().await.expect("connected");
            let mut answer = String::new();
            let _ = stream.read_to_string(&mut answer).await;
            status(&answer)
        })
    }

    fn assert_healthy(&self) {
        fast_call("a probe", PROBE_WITHIN, || {
            let (code, body) = Admin::at(&self.admin).get("/healthz").expect("the probe gets a response");
            assert_eq!((code, body.as_str()), (200, "ok\n"));
        });
    }

    /// Attempts on an admin port: the client, the page and the status.
    fn attack_admin_port(&self) {
        let console = self.certificates.client(&Role::Console);
        assert_eq!(self.ask(console.clone(), "/metrics"), 200, "a valid client");
        for (client, path, status, why) in [
            (Security::Plain, "/metrics", 403, "plain"),
            (Security::Plain, "/status", 403, "plain"),
            (Security::Plain, "/trace/1", 403, "plain"),
            (self.certificates.foreign_client(&Role::Admin), "/metrics", CLOSED, "another authority"),
            (self.certificates.expired_client(&Role::Admin), "/metrics", CLOSED, "expired"),
            (console, "/trace/1", 403, "another kind"),
        ] {
            assert_eq!(self.ask(client, path), status, "{why}: {path}");
            self.assert_healthy();
        }
        for path in ["/metrics", "/status", "/trace/1"] {
            assert_eq!(self.ask_anonymously(path, ""), 401, "no certificate: {path}");
        }
        assert_eq!(self.ask_anonymously("/healthz", ""), 200);
        let wrong = format!("authorization: Bearer {}\r\n", "f".repeat(32));
        assert_eq!(self.ask_anonymously("/metrics", &wrong), 403);
        let oversize = format!("x: {}\r\n", "y".repeat(64 << 10));
        let request = format!("GET /healthz HTTP/1.1\r\nhost: a\r\n{oversize}\r\n");
        assert_ne!(status(&sent(&self.admin, request.as_bytes())), 200, "an oversize header");
        let body = b"GET /healthz HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n";
        assert_eq!(status(&sent(&self.admin, body)), 413, "an announced body");
        let garbage = [0xff; 256];
        assert_ne!(status(&sent(&self.admin, &garbage)), 200);
        self.assert_slow_clients_are_closed();
        // The log has one line for each kind, and the metric has each attempt.
        let log = logs::read(&self.log);
        for words in ["refused a connection", "refused a request", "refused the bearer token"] {
            assert!(log.contains(words), "{words} is not in {log}");
        }
        assert_eq!(self.rejected("refused"), REFUSED_ATTEMPTS);
        // A small port closes the oldest of them earlier, to make room for probes from the same address.
        assert!(self.rejected("timeout") + self.rejected("idle") >= SLOW_CLIENTS);
    }

    /// Number of connections to the admin port that were closed without service for this reason.
    fn rejected(&self, reason: &str) -> usize {
        let client = Client::new(self.certificates.client(&Role::Console), self.expected());
        let page = client.get(&self.admin, "/metrics").expect("the metrics are served");
        let labels = format!("connections_rejected_total{{listener=\"admin\",reason=\"{reason}\"}} ");
        let sample = page.lines().find_map(|line| line.split_once(&labels));
        sample.and_then(|(_, count)| count.parse().ok()).expect("a sample")
    }

    /// Half-open handshakes, and headers that come one byte at a time.
    fn assert_slow_clients_are_closed(&self) {
        let silent = idle(&self.admin, 2);
        let mut half_open = idle(&self.admin, 1);
        half_open[0].write_all(&[0x16, 3, 1]).expect("connected");
        let mut slow = TcpStream::connect(&self.admin).expect("the process listens");
        slow.write_all(b"GET /healthz HTTP/1.1\r\nx: ").expect("connected");
        let begun = Instant::now();
        // One byte at a time, until the process closes the connection.
        while slow.write_all(b"y").is_ok() {
            self.assert_healthy();
            assert!(begun.elapsed() < REFUSED_WITHIN, "a slow client is not closed");
            std::thread::sleep(Duration::from_millis(500));
        }
        for mut stream in silent.into_iter().chain(half_open) {
            stream.set_read_timeout(Some(REFUSED_WITHIN)).expect("a bound on reads");
            let read = stream.read(&mut [0; 64]);
            assert!(
                !matches!(&read, Err(error) if is_timeout(error)),
                "a silent client is not closed: {read:?}"
            );
        }
        assert!(begun.elapsed() < REFUSED_WITHIN, "{:?}", begun.elapsed());
    }
}

fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut)
}

/// Status of a response; [`CLOSED`] without one.
fn status(answer: &str) -> u16 {
    let status = answer.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3));
    status.and_then(|status| status.parse().ok()).unwrap_or(CLOSED)
}

/// Sends bytes on a plain connection, and returns what the process answers until it closes the connection.
fn sent(address: &str, bytes: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).expect("the process listens");
    stream.set_read_timeout(Some(REFUSED_WITHIN)).expect("a bound on reads");
    // Fails if the process closes the connection before it has read everything.
    let _ = stream.write_all(bytes);
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Err(error) if is_timeout(&error) => {
            panic!("the connection is not closed after {} bytes", bytes.len())
        }
        _ => String::from_utf8_lossy(&answer).into_owned(),
    }
}

#[test]
fn attacks_on_the_admin_port_of_an_agent_are_refused_and_change_nothing() {
    let secured = agent();
    let engine = secured.process.engine(small());
    engine.save_durably(&[1, 2]);
    let admin = secured.certificates.client(&Role::Admin);
    let saved = || {
        let page = Client::new(admin.clone(), secured.expected()).get(&secured.admin, "/status");
        let page: serde_json::Value = serde_json::from_str(&page.expect("a page")).expect("JSON");
        (page["counters"]["nvme_blocks"].clone(), page["node"].clone())
    };
    let before = saved();
    secured.attack_admin_port();
    assert_eq!(saved(), before);
    engine.load_all(&[1, 2], &LoadParams::LOCAL);
    assert_eq!(
        secured.ask_anonymously("/metrics", "authorization: Bearer x\r\n"),
        403,
        "it accepts no tokens"
    );
    secured.env.require("refused a request");
}

#[test]
fn attacks_on_the_admin_port_of_a_member_are_refused() {
    let secured = member();
    secured.attack_admin_port();
    let bearer = format!("authorization: Bearer {TOKEN}\r\n");
    assert_eq!(secured.ask_anonymously("/metrics", &bearer), 200);
    assert_eq!(secured.ask_anonymously("/nodes", &bearer), 401);
}

#[test]
fn idle_connections_block_neither_sessions_nor_probes_of_an_agent_with_certificates() {
    let secured = agent();
    let _silent = idle(&secured.admin, 300);
    let mut half_open = idle(&secured.admin, 300);
    for stream in &mut half_open {
        // The process has closed the first ones to make room.
        let _ = stream.write_all(&[0x16, 3, 1]);
    }
    secured.assert_healthy();
    let engine = secured.process.engine(small());
    engine.save_durably(&[1]);
    engine.load_all(&[1], &LoadParams::LOCAL);
    assert_eq!(secured.ask(secured.certificates.client(&Role::Console), "/status"), 200);
}

/// Greeting of a ZeroMQ client and its READY command.
fn greeting(socket_type: &str) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..16].copy_from_slice(b"NULL");
    let length = u32::try_from(socket_type.len()).expect("short").to_be_bytes();
    let body = [b"\x05READY\x0bSocket-Type", &length[..], socket_type.as_bytes()].concat();
    bytes.extend([4, u8::try_from(body.len()).expect("short")]);
    bytes.extend(body);
    bytes
}

/// Whether a client gets a greeting of ZeroMQ on a socket of events.
fn is_greeted<P>(secured: &Secured<P>, client: &Security, address: &str) -> bool {
    run(async {
        let Ok(mut stream) = client.dial(address, secured.expected()).await else { return false };
        let sent = async {
            stream.write_all(&greeting("SUB")).await?;
            stream.flush().await
        };
        let mut answer = [0; 64];
        sent.await.is_ok() && stream.read_exact(&mut answer).await.is_ok() && answer[0] == 0xff
    })
}

#[test]
fn attacks_on_sockets_of_events_are_refused() {
    let secured = member();
    let certificates = &secured.certificates;
    for address in [&secured.process.publish, &secured.process.replay] {
        assert!(is_greeted(&secured, &certificates.client(&Role::Console), address), "a valid reader");
        let agent = Role::Agent("node".to_owned());
        for (client, why) in [
            (Security::Plain, "plain"),
            (certificates.foreign_client(&Role::Console), "another authority"),
            (certificates.expired_client(&Role::Console), "expired"),
            (certificates.client(&agent), "another kind"),
        ] {
            assert!(!is_greeted(&secured, &client, address), "{why}");
        }
        run(async {
            // The server refuses the client after its own part of the handshake.
            if let Ok(mut stream) = certificates.connect_anonymously(address, secured.expected()).await {
                assert!(stream.read_u8().await.is_err(), "no certificate");
            }
        });
        let oversize = run(async {
            let dialled = certificates.client(&Role::Console).dial(address, secured.expected()).await;
            let mut stream = dialled.expect("a valid reader");
            let frame = [&[2][..], &u64::MAX.to_be_bytes()].concat();
            stream.write_all(&[greeting("SUB"), frame].concat()).await.expect("connected");
            stream.flush().await.expect("connected");
            let mut answer = Vec::new();
            stream.read_to_end(&mut answer).await.map(|_| answer.len())
        });
        assert!(oversize.is_err() || oversize.is_ok_and(|length| length < 256), "an oversize frame");
        let mut half_open = idle(address, 3);
        half_open[0].write_all(&[0x16, 3, 1]).expect("connected");
        for stream in &mut half_open {
            stream.set_read_timeout(Some(REFUSED_WITHIN)).expect("a bound on reads");
            let read = stream.read(&mut [0; 64]);
            assert!(!matches!(&read, Err(error) if is_timeout(error)), "half-open: {read:?}");
        }
        secured.assert_healthy();
        assert!(is_greeted(&secured, &certificates.client(&Role::Console), address), "a valid reader");
    }
    let log = logs::read(&secured.log);
    assert!(log.contains("refused a reader of events") && log.contains("refused a connection"), "{log}");
}

#[test]
fn proxy_gives_routers_a_plain_socket_of_a_member_with_certificates() {
    let secured = member();
    let folder = secured.certificates.issue(&Role::Console).expect("issued");
    let forward = format!("127.0.0.1:0={}", secured.process.replay);
    let mut command = std::process::Command::new(binary("reprise"));
    command.arg("--json").arg("--tls").arg(&folder).args(["events", "proxy", "--forward", &forward]);
    let log = secured.env.folder().join("proxy.log");
    let (_running, ready) = StartingProcess::spawn(command, &log).ready().expect("the proxy starts");
    let address = ready["listening"][0].as_str().expect("an address");
    let mut router = TcpStream::connect(address).expect("the proxy listens");
    router.set_read_timeout(Some(REFUSED_WITHIN)).expect("a bound on reads");
    // A replay from batch 0: an empty frame, then the number.
    let request = [&[1, 0, 0, 8][..], &[0; 8]].concat();
    router.write_all(&[greeting("DEALER"), request].concat()).expect("connected");
    let mut answer = vec![0; 64 + 2];
    router.read_exact(&mut answer).expect("a greeting");
    assert_eq!((answer[0], answer[64]), (0xff, 4));
    let mut ready = vec![0; usize::from(answer[65])];
    router.read_exact(&mut ready).expect("a command");
    assert!(ready.starts_with(b"\x05READY"));
    let mut batch = [0; 2];
    router.read_exact(&mut batch).expect("a replay");
    assert_eq!(batch, [1, 0], "replays begin with an empty frame");

    let mut command = std::process::Command::new(binary("reprise"));
    command.args(["events", "proxy", "--forward", &forward]).env_remove("REPRISE_TLS");
    let refused = StartingProcess::spawn(command, &log).ready().expect_err("it has no certificate");
    refused.assert_reports(1, &["--tls"]);
}
