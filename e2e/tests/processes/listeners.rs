//! Every listener and every attack: each attempt is refused within its deadline, logged once, and changes nothing.
//!
//! | attack | a client … |
//! |---|---|
//! | no certificate | with TLS and without a certificate |
//! | wrong authority | of an authority with the same names |
//! | expired | whose certificate ended yesterday |
//! | wrong kind | of a role without the right |
//! | another node | with the certificate of another node |
//! | plain | without TLS |
//! | half-open | that begins a handshake and stops |
//! | slow-loris | that sends one byte at a time, before and after its handshake |
//! | oversize | whose first frame or header is too long |

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use crc_fast::{CrcAlgorithm, checksum};
use reprise_e2e::process::{ChildProcess, StartingProcess};
use reprise_e2e::{Agent, AgentConfig, PATIENCE, TestEnv, control_plane, logs, wait_until};
use reprise_identity::{Expected, Role, Security};
use reprise_proto::controlplane::RegisterRequest;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::dial;
use reprise_testkit::certificates::Certificates;
use reprise_testkit::http::Client;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tonic::transport::Endpoint;

/// Time limit for a refusal: 5 s for a handshake or a greeting, 10 s for a request, and a busy machine.
const REFUSED_WITHIN: Duration = Duration::from_secs(20);

/// Number of times that each attack is made.
const TIMES: usize = 2;

/// Pace of clients that send one byte at a time.
const PACE: Duration = Duration::from_millis(300);

/// Most log lines about one listener: one for each cause, not for each attempt.
const LINES_MAX: usize = 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Grpc,
    Peers,
    Admin,
    Events,
    Replay,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Attack {
    NoCertificate,
    WrongAuthority,
    Expired,
    WrongKind,
    AnotherNode,
    Plain,
    HalfOpen,
    SlowHandshake,
    SlowGreeting,
    Oversize,
}

const ATTACKS: [Attack; 10] = [
    Attack::NoCertificate,
    Attack::WrongAuthority,
    Attack::Expired,
    Attack::WrongKind,
    Attack::AnotherNode,
    Attack::Plain,
    Attack::HalfOpen,
    Attack::SlowHandshake,
    Attack::SlowGreeting,
    Attack::Oversize,
];

/// A listener under attack.
struct Listener {
    kind: Kind,
    address: String,
    /// Role of the process.
    role: Role,
    log: PathBuf,
    /// Words of each log line about it.
    words: &'static str,
}

/// Attempts to start a member on free ports.
const STARTS_MAX: usize = 5;

/// A member and an agent with certificates.
struct Cluster {
    listeners: Vec<Listener>,
    certificates: Certificates,
    admin: String,
    agent: Agent,
    _member: ChildProcess,
    _env: TestEnv,
}

fn agent_of(node: &str) -> Role {
    Role::Agent(node.to_owned())
}

fn free_address() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("bound").to_string()
}

fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime
        .block_on(async { tokio::time::timeout(REFUSED_WITHIN, future).await })
        .expect("the attempt ends within its deadline")
}

impl Cluster {
    fn start() -> Cluster {
        let env = TestEnv::new();
        for words in ["refused", "peer connection", "closed a connection without a valid certificate"] {
            env.allow(words);
        }
        let certificates = Certificates::create(&env.folder().join("certificates")).expect("an authority");
        let (config, log) = (env.folder().join("member.toml"), env.folder().join("member.log"));
        let tls = certificates.issue(&Role::Member).expect("issued");
        env.watch_log(log.clone());
        // A free port can be taken before the member listens.
        let (member, ready, publish, replay) = (0..STARTS_MAX)
            .find_map(|_| {
                let (publish, replay) = (free_address(), free_address());
                let text = format!(
                    "listen = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n[store]\nkind = \"memory\"\n[events]\n\
                     publish = \"{publish}\"\nreplay = \"{replay}\"\n[tls]\nfolder = {tls:?}\n"
                );
                fs::write(&config, text).expect("the folder is writable");
                let (member, ready) = StartingProcess::spawn(control_plane::command(&config), &log).ready().ok()?;
                Some((member, ready, publish, replay))
            })
            .expect("the member starts");
        let address = |name: &str| ready[name].as_str().expect("the ready line has it").to_owned();
        let (grpc, admin) = (address("grpc"), address("admin"));
        let node = agent_of("node");
        let config = AgentConfig {
            control_plane: vec![grpc.clone()],
            tls: Some(certificates.issue(&node).expect("issued")),
            ..AgentConfig::named("node")
        };
        let agent = env.agent(&config);
        let mut cluster = Cluster {
            listeners: Vec::new(),
            certificates,
            admin: admin.clone(),
            agent,
            _member: member,
            _env: env,
        };
        let peers = wait_until("a registered agent", PATIENCE, || {
            let nodes = cluster.nodes();
            Some(nodes[0]["peer_endpoints"][0]["address"].as_str()?.to_owned())
        });
        let agent_log = cluster.agent.files().log.clone();
        let agent_admin = cluster.agent.admin().address().to_owned();
        let of = |kind, address, role: &Role, log: &PathBuf, words| Listener {
            kind,
            address,
            role: role.clone(),
            log: log.clone(),
            words,
        };
        cluster.listeners = vec![
            of(Kind::Grpc, grpc, &Role::Member, &log, "without a valid certificate"),
            of(Kind::Events, publish, &Role::Member, &log, "listener=\"events\""),
            of(Kind::Replay, replay, &Role::Member, &log, "listener=\"replay\""),
            of(Kind::Admin, admin, &Role::Member, &log, "listener=\"admin\""),
            of(Kind::Admin, agent_admin, &node, &agent_log, "listener=\"admin\""),
            of(Kind::Peers, peers, &node, &agent_log, "direction=\"incoming\""),
        ];
        cluster
    }

    fn nodes(&self) -> serde_json::Value {
        let client = Client::new(self.certificates.client(&Role::Console), Expected::Role(Role::Member));
        serde_json::from_str(&client.get(&self.admin, "/nodes").expect("a page")).expect("JSON")
    }

    /// What attacks must not change: the names and epochs of nodes, and the blocks of the agent.
    fn state(&self) -> Vec<serde_json::Value> {
        let nodes = self.nodes();
        let nodes = nodes.as_array().expect("a list");
        let mut state: Vec<_> = nodes.iter().map(|node| node["name"].clone()).collect();
        let client = Client::new(self.certificates.client(&Role::Console), Expected::AnyAgent);
        let page = client.get(self.agent.admin().address(), "/status").expect("a page");
        let page: serde_json::Value = serde_json::from_str(&page).expect("JSON");
        state.push(page["counters"]["nvme_blocks"].clone());
        state.push(page["counters"]["requests"].clone());
        state
    }
}

/// Greeting of an agent, docs/PROTOCOL.md.
fn hello(node: &str) -> Vec<u8> {
    let mut out = vec![0; 128];
    out[..8].copy_from_slice(b"RPRSPEER");
    out[8] = 2;
    out[10] = u8::try_from(node.len()).expect("short");
    out[12..16].copy_from_slice(&2000_u32.to_le_bytes());
    out[16..24].copy_from_slice(&(1_u64 << 20).to_le_bytes());
    out[24..24 + node.len()].copy_from_slice(node.as_bytes());
    seal(&mut out);
    out
}

/// Puts the checksum of all bytes before into the last four.
fn seal(bytes: &mut [u8]) {
    let at = bytes.len() - 4;
    let crc = u32::try_from(checksum(CrcAlgorithm::Crc32Iscsi, &bytes[..at])).expect("32 bits");
    bytes[at..].copy_from_slice(&crc.to_le_bytes());
}

impl Kind {
    /// Role that the listener serves.
    fn valid(self) -> Role {
        match self {
            Kind::Grpc | Kind::Peers => agent_of("node-2"),
            Kind::Admin | Kind::Events | Kind::Replay => Role::Console,
        }
    }

    /// First bytes of a client.
    fn greeting(self) -> Vec<u8> {
        match self {
            // Preface, and empty SETTINGS.
            Kind::Grpc => [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", &[0, 0, 0, 4, 0, 0, 0, 0, 0][..]].concat(),
            Kind::Peers => hello("node-2"),
            Kind::Admin => b"GET /status HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n".to_vec(),
            Kind::Events | Kind::Replay => {
                let mut bytes = vec![0; 64];
                (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
                bytes[12..16].copy_from_slice(b"NULL");
                bytes
            }
        }
    }

    /// Whether the listener has answered like to a valid client.
    fn is_answer(self, answer: &[u8]) -> bool {
        match self {
            Kind::Grpc => answer.get(3) == Some(&4),
            Kind::Peers => answer.starts_with(b"RPRSPEER"),
            Kind::Admin => answer.starts_with(b"HTTP/1.1 200"),
            Kind::Events | Kind::Replay => answer.first() == Some(&0xff),
        }
    }

    /// What a valid client sends that is too long.
    fn oversize(self) -> Vec<u8> {
        let mut bytes = self.greeting();
        match self {
            // A frame of 16 MiB.
            Kind::Grpc => bytes.extend([0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]),
            Kind::Peers => {
                let mut header = vec![0; 32];
                header[..4].copy_from_slice(b"RPRF");
                (header[4], header[5], header[8]) = (1, 1, 1);
                header[24..28].copy_from_slice(&u32::MAX.to_le_bytes());
                seal(&mut header);
                bytes.extend(header);
            }
            Kind::Admin => {
                bytes = format!("GET /status HTTP/1.1\r\nx: {}\r\n\r\n", "y".repeat(64 << 10)).into_bytes();
            }
            Kind::Events | Kind::Replay => {
                bytes.push(2);
                bytes.extend(u64::MAX.to_be_bytes());
            }
        }
        bytes
    }
}

/// Sends bytes, and reads until the answer is complete enough or the connection ends.
async fn exchange(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), bytes: &[u8]) -> Vec<u8> {
    let mut answer = vec![0; 16];
    if stream.write_all(bytes).await.is_err() || stream.flush().await.is_err() {
        return Vec::new();
    }
    match stream.read_exact(&mut answer).await {
        Ok(_) => answer,
        Err(_) => Vec::new(),
    }
}

impl Listener {
    fn expected(&self) -> Expected {
        Expected::Role(self.role.clone())
    }

    /// Whether a client is served.
    fn serves(&self, client: &Security) -> bool {
        run(async {
            let Ok(mut stream) = client.dial(&self.address, self.expected()).await else { return false };
            self.kind.is_answer(&exchange(&mut stream, &self.kind.greeting()).await)
        })
    }

    /// Whether a client is refused: it has the wrong role, or acts for another node.
    fn refuses(&self, certificates: &Certificates, role: &Role) -> bool {
        let client = certificates.client(role);
        match self.kind {
            Kind::Grpc => run(async {
                let endpoint = Endpoint::from_shared(format!("http://{}", self.address));
                let channel = dial::connect_lazy(&endpoint.expect("an address"), &client);
                let request = RegisterRequest { name: "node-2".to_owned(), ..RegisterRequest::default() };
                MembershipClient::new(channel).register(request).await.is_err()
            }),
            // Traces are for administrators, and the status of an agent not for another one.
            Kind::Admin => {
                let page = if matches!(role, Role::Agent(_)) { "/status" } else { "/trace/1" };
                let asked = Client::new(client, self.expected()).ask(&self.address, page, REFUSED_WITHIN);
                asked.is_ok_and(|answer| answer.code == 403)
            }
            Kind::Peers | Kind::Events | Kind::Replay => !self.serves(&client),
        }
    }

    /// Makes an attack; panics unless the listener refuses it in time.
    fn refuses_attack(&self, attack: Attack, certificates: &Certificates) {
        let valid = self.kind.valid();
        let begun = Instant::now();
        let is_refused = match attack {
            Attack::NoCertificate => run(async {
                match certificates.connect_anonymously(&self.address, self.expected()).await {
                    Ok(mut stream) => {
                        !self.kind.is_answer(&exchange(&mut stream, &self.kind.greeting()).await)
                    }
                    Err(_) => true,
                }
            }),
            Attack::WrongAuthority => !self.serves(&certificates.foreign_client(&valid)),
            Attack::Expired => !self.serves(&certificates.expired_client(&valid)),
            Attack::WrongKind => {
                let other = match self.kind {
                    Kind::Grpc | Kind::Admin => Role::Console,
                    Kind::Peers => Role::Member,
                    Kind::Events | Kind::Replay => Role::Operator,
                };
                self.refuses(certificates, &other)
            }
            Attack::AnotherNode => self.refuses(certificates, &agent_of("node-3")),
            Attack::Plain => !self.serves(&Security::Plain),
            Attack::HalfOpen => {
                let mut stream = self.connect();
                stream.write_all(&[22, 3, 1]).expect("connected");
                is_closed(&mut stream)
            }
            Attack::SlowHandshake => {
                let mut stream = self.connect();
                // A message that is long enough for minutes.
                stream.write_all(&[22, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc]).expect("connected");
                while stream.write_all(&[0]).is_ok() && begun.elapsed() < REFUSED_WITHIN {
                    thread::sleep(PACE);
                }
                true
            }
            Attack::SlowGreeting => run(self.greets_slowly(&certificates.client(&valid))),
            Attack::Oversize => run(async {
                let dialled = certificates.client(&valid).dial(&self.address, self.expected()).await;
                let mut stream = dialled.expect("a valid client");
                let _ = stream.write_all(&self.kind.oversize()).await;
                let _ = stream.flush().await;
                let mut answer = Vec::new();
                let _ = stream.read_to_end(&mut answer).await;
                self.kind != Kind::Admin || !self.kind.is_answer(&answer)
            }),
        };
        assert!(is_refused, "{attack:?} on {:?} at {}", self.kind, self.address);
        assert!(begun.elapsed() < REFUSED_WITHIN, "{attack:?} on {:?}: {:?}", self.kind, begun.elapsed());
    }

    /// A valid client that sends its greeting one byte at a time, and never all of it.
    async fn greets_slowly(&self, client: &Security) -> bool {
        if self.kind == Kind::Admin {
            // A client with a certificate has 65 s for a request. Others cannot wait for a page.
            return true;
        }
        let mut stream = client.dial(&self.address, self.expected()).await.expect("a valid client");
        let greeting = self.kind.greeting();
        let mut bytes = greeting.iter().take(greeting.len() - 1).cycle();
        let mut answer = [0; 1];
        loop {
            let byte = [*bytes.next().expect("without an end")];
            let sent = async {
                stream.write_all(&byte).await?;
                stream.flush().await
            };
            if sent.await.is_err() {
                return true;
            }
            // Ends when the listener closes the connection; events greet at once.
            let closed = async { while stream.read(&mut answer).await.is_ok_and(|read| read > 0) {} };
            if tokio::time::timeout(PACE, closed).await.is_ok() {
                return true;
            }
        }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("the process listens");
        stream.set_read_timeout(Some(REFUSED_WITHIN)).expect("a bound on reads");
        stream
    }

    /// Number of log lines about attacks on this listener.
    fn lines(&self) -> usize {
        let log = logs::read(&self.log);
        log.lines().filter(|line| line.contains(" WARN ") && line.contains(self.words)).count()
    }
}

fn is_closed(stream: &mut TcpStream) -> bool {
    let mut answer = Vec::new();
    match stream.read_to_end(&mut answer) {
        Ok(_) => true,
        Err(error) => !matches!(error.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut),
    }
}

#[test]
fn every_listener_refuses_every_attack_in_time_logs_it_once_and_changes_nothing() {
    let cluster = Cluster::start();
    let before = cluster.state();
    for listener in &cluster.listeners {
        let valid = cluster.certificates.client(&listener.kind.valid());
        let is_served = wait_until("a valid client", PATIENCE, || listener.serves(&valid).then_some(true));
        assert!(is_served, "{:?}", listener.kind);
    }
    for attack in ATTACKS {
        // All listeners at once: the slow attacks last for the deadline of each.
        thread::scope(|scope| {
            for listener in &cluster.listeners {
                for _ in 0..TIMES {
                    scope.spawn(|| listener.refuses_attack(attack, &cluster.certificates));
                }
            }
        });
    }
    for listener in &cluster.listeners {
        let lines = listener.lines();
        assert!((1..=LINES_MAX).contains(&lines), "{lines} lines about {:?}", listener.kind);
        let valid = cluster.certificates.client(&listener.kind.valid());
        assert!(listener.serves(&valid), "{:?} serves valid clients afterwards", listener.kind);
    }
    // The client names itself, and by its address where it has shown no identity.
    let log = logs::read(&cluster.listeners[0].log);
    assert!(log.contains("client=127.0.0.1") && log.contains("client=reprise://local/operator"), "{log}");
    assert!(log.contains("names reprise://local/agent/node-2"), "{log}");
    assert_eq!(cluster.state(), before);
}
