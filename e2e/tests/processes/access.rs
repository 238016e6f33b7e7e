//! Members with certificates: attacks on their gRPC port, each refused in time, logged once and without effect; and
//! certificates that change under load.

use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use reprise_e2e::control_plane::Store;
use reprise_e2e::process::binary;
use reprise_e2e::{AgentConfig, ControlPlane, PATIENCE, TestEnv, wait_until};
use reprise_identity::authority::CERTIFICATE_VALID;
use reprise_identity::follow::{CHECK_EVERY, Follower};
use reprise_identity::tls::HANDSHAKE_WITHIN;
use reprise_identity::{Credentials, Expected, Role, Security, Tls};
use reprise_proto::connection::{Connection, LIST_NODES, LOOKUP};
use reprise_proto::controlplane::directory_client::DirectoryClient;
use reprise_proto::controlplane::membership_client::MembershipClient;
use reprise_proto::controlplane::placement_client::PlacementClient;
use reprise_proto::controlplane::{
    ForgetNodeRequest, HeartbeatRequest, ListNodesReply, ListNodesRequest, LookupReply, LookupRequest,
    PlaceRequest, RegisterRequest, ReportRequest, SetTenantRequest, SlotsRequest, Tenant, UpdateRequest,
};
use reprise_proto::dial;
use reprise_testkit::certificates::{self, Certificates};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};
use tokio::runtime::Runtime;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

/// Log line of a connection that is closed in its handshake.
const CLOSED: &str = "closed a connection without a valid certificate";
/// Log line of a refused call.
const REFUSED: &str = "refused a call";
/// Interval at which processes compare their files, with a margin.
const FOLLOWED_WITHIN: Duration = Duration::from_secs(5);

/// A member with certificates, and clients in this process.
struct Secured {
    certificates: Certificates,
    member: ControlPlane,
    runtime: Runtime,
    /// Last: it checks the logs of the processes that have ended.
    env: TestEnv,
}

impl Secured {
    fn start() -> Secured {
        let env = TestEnv::new();
        let certificates = Certificates::create(&env.folder().join("certificates")).expect("an authority");
        let member = env.control_plane_with_tls(&certificates.issue(&Role::Member).expect("issued"));
        let runtime = Runtime::new().expect("a runtime");
        Secured { certificates, member, runtime, env }
    }

    fn issue(&self, role: &Role) -> PathBuf {
        self.certificates.issue(role).expect("issued")
    }

    fn connection(&self, role: &Role) -> Connection {
        Connection::new(self.member.address(), &security(&self.issue(role))).expect("an address")
    }

    fn channel(&self, role: &Role) -> Channel {
        self.channel_with(&security(&self.issue(role)))
    }

    fn channel_with(&self, security: &Security) -> Channel {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.member.address()));
        let _entered = self.runtime.enter();
        dial::connect_lazy(&endpoint.expect("an address").timeout(PATIENCE), security)
    }

    /// Registers a node with the certificate of a role; returns its number and epoch.
    fn register(&self, channel: &Channel, name: &str) -> Result<(u32, u64), Status> {
        let request = RegisterRequest { name: name.to_owned(), ..RegisterRequest::default() };
        let mut membership = MembershipClient::new(channel.clone());
        let reply = self.runtime.block_on(membership.register(request))?.into_inner();
        Ok((reply.node, reply.epoch))
    }

    fn names(&self) -> Vec<String> {
        let list = self.connection(&Role::Admin);
        let listed = self.runtime.block_on(list.call::<ListNodesReply>(LIST_NODES, &ListNodesRequest {}));
        listed.expect("the member answers").nodes.into_iter().map(|node| node.name).collect()
    }

    /// Number of log lines of the member with these words.
    fn logged(&self, words: &str) -> usize {
        let log = fs::read_to_string(self.env.folder().join("controlplane.log")).expect("the member logs");
        log.lines().filter(|line| line.contains(words)).count()
    }
}

fn security(folder: &Path) -> Security {
    Security::read(folder).expect("valid files")
}

fn agent(node: &str) -> Role {
    Role::Agent(node.to_owned())
}

/// Runs a command against a member; returns whether it succeeds, and its standard error.
fn reprise(address: &str, tls: Option<&Path>, arguments: &[&str]) -> (bool, String) {
    let mut command = Command::new(binary("reprise"));
    command.args(arguments).args(["--controlplane", address]);
    if let Some(tls) = tls {
        command.arg("--tls").arg(tls);
    }
    let output = command.output().expect("reprise can be run");
    (output.status.success(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn refuses_callers_without_a_valid_certificate() {
    let secured = Secured::start();
    secured.env.require(CLOSED);
    // Both clients trust the member's authority.
    let foreign = secured.certificates.foreign_client(&agent("node-1"));
    let ended = secured.certificates.expired_client(&agent("node-1"));
    let attacks = [
        ("another authority", foreign, "refused our certificate"),
        ("an ended certificate", ended, "refused our certificate"),
        ("no TLS", Security::Plain, "the server requires TLS"),
    ];
    for (attack, client, reason) in attacks {
        let began = Instant::now();
        let refused = secured.register(&secured.channel_with(&client), "node-1").expect_err(attack);
        assert!(began.elapsed() < HANDSHAKE_WITHIN, "{attack}: {:?}", began.elapsed());
        let cause = dial::cause(&refused);
        // The reason, unless the client notices the end of the connection first.
        let is_refused = [reason, "connection closed"].iter().any(|end| cause.contains(end));
        assert!(is_refused, "{attack}: {cause}");
    }
    refuses_no_certificate(&secured);
    let (succeeds, error) = reprise(secured.member.address(), None, &["cordon", "node-1"]);
    assert!(!succeeds && error.contains("--tls FOLDER"), "{error}");
    assert_eq!(secured.names(), [""; 0]);
    // Once for each kind of failure, although each was tried several times from one address.
    assert!((1..=4).contains(&secured.logged(CLOSED)), "{} lines", secured.logged(CLOSED));
}

/// A client that speaks TLS and has no certificate is closed before its first call is read.
fn refuses_no_certificate(secured: &Secured) {
    let credentials = Credentials::read(&secured.issue(&Role::Admin)).expect("valid files");
    let config = Tls::new(credentials).anonymous_client_config(Expected::Role(Role::Member));
    let name = ServerName::try_from("reprise").expect("a name");
    let client = ClientConnection::new(Arc::new(config), name).expect("a valid configuration");
    let socket = TcpStream::connect(secured.member.address()).expect("the member listens");
    socket.set_read_timeout(Some(HANDSHAKE_WITHIN)).expect("a valid time");
    let mut stream = StreamOwned::new(client, socket);
    // The client may finish its part of the handshake before the server refuses.
    let _ = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    let error = stream.read(&mut [0; 64]).expect_err("the connection is refused");
    assert!(error.to_string().contains("CertificateRequired"), "{error}");
}

#[test]
fn certificate_of_one_node_cannot_act_for_another() {
    let secured = Secured::start();
    secured.env.require(REFUSED);
    let (first, second) = (secured.channel(&agent("node-1")), secured.channel(&agent("node-2")));
    let (node, epoch) = secured.register(&second, "node-2").expect("its own name");
    secured.register(&first, "node-1").expect("its own name");
    let thief = secured.channel(&agent("node-1"));
    let refused = secured.register(&thief, "node-2").expect_err("another node's name");
    assert_eq!(refused.code(), Code::PermissionDenied);
    assert!(refused.message().contains("use the certificate of agent/node-2"), "{refused}");
    let update = UpdateRequest {
        node,
        epoch,
        keys: vec![7; 16].into(),
        operations: vec![0].into(),
        ..Default::default()
    };
    secured.runtime.block_on(async {
        let mut membership = MembershipClient::new(thief.clone());
        let mut directory = DirectoryClient::new(thief.clone());
        let mut placement = PlacementClient::new(thief.clone());
        let denied = [
            membership.heartbeat(HeartbeatRequest { node, epoch }).await.map(drop),
            directory.slots(SlotsRequest { node, epoch }).await.map(drop),
            directory.update(update.clone()).await.map(drop),
            directory.update(UpdateRequest { reset: true, ..update }).await.map(drop),
            placement.report(ReportRequest { node, epoch, ..Default::default() }).await.map(drop),
            placement.place(PlaceRequest { holder: node, epoch, ..Default::default() }).await.map(drop),
            membership.forget_node(ForgetNodeRequest { name: "node-2".to_owned() }).await.map(drop),
            placement.set_tenant(SetTenantRequest { tenant: Some(Tenant::default()) }).await.map(drop),
        ];
        for (call, outcome) in denied.into_iter().enumerate() {
            assert_eq!(outcome.expect_err("refused").code(), Code::PermissionDenied, "call {call}");
        }
        // The registration of the second node is as it was.
        let beat = MembershipClient::new(second).heartbeat(HeartbeatRequest { node, epoch }).await;
        assert!(beat.expect("its own node").into_inner().known);
    });
    assert_eq!(secured.logged(REFUSED), 1, "once for the connection");
}

#[test]
fn kinds_of_callers_have_the_calls_of_the_table() {
    let secured = Secured::start();
    secured.env.allow(REFUSED);
    let address = secured.member.address();
    let set = ["tenant", "set", "a", "--nvme", "1GiB"];
    for role in [Role::Console, agent("node-1"), Role::Member] {
        let (succeeds, error) = reprise(address, Some(&secured.issue(&role)), &set);
        assert!(!succeeds && error.contains("use a certificate of operator or admin"), "{role}: {error}");
        let refused = secured.register(&secured.channel(&role), "node-9").expect_err("refused");
        assert_eq!(refused.code(), Code::PermissionDenied, "{role}");
    }
    for role in [Role::Operator, Role::Admin] {
        let (succeeds, error) = reprise(address, Some(&secured.issue(&role)), &set);
        assert!(succeeds, "{role}: {error}");
    }
    assert_eq!(secured.names(), [""; 0]);
    // The reverse of a plain client at a TLS port: the command has certificates, and the member has none.
    secured.env.allow("connections are plain");
    let plain_folder = secured.env.folder().join("plain");
    fs::create_dir(&plain_folder).expect("a folder");
    let plain = ControlPlane::start_in(&plain_folder, Default::default(), Store::Memory);
    let (succeeds, error) = reprise(plain.address(), Some(&secured.issue(&Role::Admin)), &set);
    assert!(!succeeds && error.contains("the other side does not use TLS"), "{error}");
}

#[test]
fn silent_and_slow_handshakes_end_in_time_and_delay_no_caller() {
    let secured = Secured::start();
    secured.env.require(CLOSED);
    let began = Instant::now();
    let connect = || TcpStream::connect(secured.member.address()).expect("the member listens");
    let mut silent: Vec<TcpStream> = (0..200).map(|_| connect()).collect();
    let mut slow = connect();
    let connection = secured.connection(&Role::Admin);
    // The header of a record of 512 bytes, one byte at a time.
    for byte in [22, 3, 1, 2, 0, 1] {
        slow.write_all(&[byte]).expect("the handshake has time left");
        let call = Instant::now();
        let listed = secured
            .runtime
            .block_on(async { connection.call::<ListNodesReply>(LIST_NODES, &ListNodesRequest {}).await });
        listed.expect("the member answers valid callers");
        assert!(call.elapsed() < Duration::from_secs(1), "a call took {:?}", call.elapsed());
        std::thread::sleep(Duration::from_millis(200));
    }
    silent.push(slow);
    for mut stream in silent {
        stream.set_read_timeout(Some(HANDSHAKE_WITHIN + PATIENCE)).expect("a valid time");
        // The member closes the connection, with an alert or without one.
        let mut received = Vec::new();
        let _ = stream.read_to_end(&mut received);
    }
    assert!(began.elapsed() < 2 * HANDSHAKE_WITHIN, "{:?}", began.elapsed());
    assert_eq!(secured.logged(CLOSED), 1, "once for the address");
}

#[test]
fn agent_registers_with_its_certificate_and_not_with_a_plain_connection() {
    let secured = Secured::start();
    let control_plane = vec![secured.member.address().to_owned()];
    let configure = |node: &str, tls: Option<&Path>| AgentConfig {
        control_plane: control_plane.clone(),
        tls: tls.map(Path::to_owned),
        pool: None,
        ..AgentConfig::named(node)
    };
    let folder = secured.issue(&agent("node-1"));
    let _agent = secured.env.agent(&configure("node-1", Some(&folder)));
    wait_until("the node is registered", PATIENCE, || (secured.names() == ["node-1"]).then_some(()));
    for words in ["connections are plain", "cannot register", "control plane is unreachable", CLOSED] {
        secured.env.allow(words);
    }
    let _plain = secured.env.agent(&configure("node-2", None));
    wait_until("the member refuses the plain agent", PATIENCE, || (secured.logged(CLOSED) > 0).then_some(()));
    assert_eq!(secured.names(), ["node-1"]);
}

#[test]
fn replaced_certificates_fail_no_look_up() {
    let mut secured = Secured::start();
    let (own, member) = (secured.issue(&Role::Console), secured.issue(&Role::Member));
    let next = Certificates::create(&secured.env.folder().join("next")).expect("an authority");
    let both = [secured.certificates.authority().certificate(), next.authority().certificate()].concat();
    let write = |folder: &Path, role: &Role, authorities: &str, from: &Certificates| {
        let issued = from.authority().issue(&certificates::identity(role), CERTIFICATE_VALID);
        issued.expect("issued").into_files(authorities).write(folder).expect("written");
    };
    // All processes trust both authorities before the next one issues.
    write(&member, &Role::Member, &both, &secured.certificates);
    write(&own, &Role::Console, &both, &secured.certificates);
    secured.member.kill();
    secured.member.restart();
    let tls = security(&own);
    let Security::Tls(followed) = tls.clone() else { panic!("certificates") };
    let mut follower = Follower::new(followed, own.clone());
    // Ends with the process of the tests.
    std::thread::spawn(move || {
        loop {
            follower.check(SystemTime::now());
            std::thread::sleep(CHECK_EVERY);
        }
    });
    let steps = [both.as_str(), next.authority().certificate()];
    let (mut calls, mut reconnected) = (0, 0);
    for authorities in steps {
        write(&member, &Role::Member, authorities, &next);
        write(&own, &Role::Console, authorities, &next);
        let until = Instant::now() + FOLLOWED_WITHIN;
        while Instant::now() < until {
            // Each connection makes a new handshake, with the certificates of that moment.
            let connection = Connection::new(secured.member.address(), &tls).expect("an address");
            reconnected += 1;
            for _ in 0..20 {
                let request = LookupRequest { keys: vec![7; 16].into(), asking_node: 0 };
                let found = secured.runtime.block_on(connection.call::<LookupReply>(LOOKUP, &request));
                found.unwrap_or_else(|status| panic!("look-up {calls} failed: {status}"));
                calls += 1;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
    println!("{calls} look-ups over {reconnected} connections, none failed");
    // The first authority is no longer trusted.
    secured.env.require(CLOSED);
    let refused = secured.register(&secured.channel(&agent("node-1")), "node-1").expect_err("replaced");
    assert!(dial::cause(&refused).contains("certificate"), "{refused}");
    let log = secured.env.folder().join("controlplane.log");
    wait_until("the refusal is logged", PATIENCE, || {
        reprise_e2e::logs::read(&log).contains(CLOSED).then_some(())
    });
}
