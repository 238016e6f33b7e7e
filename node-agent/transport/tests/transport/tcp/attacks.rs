//! Processes without the right certificate on the port of peers: each is refused in time and counted once, changes
//! nothing, and other peers are served meanwhile.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reprise_identity::authority::{Authority, CERTIFICATE_VALID};
use reprise_identity::blocking::{Channel, Wire};
use reprise_identity::records::{Opened, Opener, RECORD_HEADER_BYTES, SEALED_BYTES_MAX};
use reprise_identity::tls::TlsError;
use reprise_identity::{Expected, Identity, Tls};
use reprise_transport::{TcpSettings, Transport};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};
use time::{Duration as Span, OffsetDateTime};

use crate::harness::{
    Block, CLUSTER, FillOutcome, PATIENCE, Tracker, authority, by_hand, identity, key, security_of, serving,
    small_layout, tls, tls_with, wanted,
};
use crate::tcp::wire::{
    DATA, FakeServer, REQUEST, VERSION, good_hello, header, hello_of, is_closed, request,
};
use crate::tcp::{Node, assert_lost, eventually, node, settings};

/// A handshake is refused after this time; longer than those of the tests take on a busy machine.
const STALL: Duration = Duration::from_secs(2);

/// Settings of the agent of node `name` with TLS.
fn secure(name: &str) -> TcpSettings {
    let security = security_of(name);
    TcpSettings { node_name: name.to_owned(), stall_timeout: STALL, security, ..settings() }
}

/// A node under attack, with a peer that it continues to serve.
struct Target {
    block: Block,
    node: Node,
    friend: Node,
    fills: u64,
}

impl Target {
    fn new() -> Target {
        let block = Block::new(0, small_layout());
        let node = node(secure("target"), serving(std::slice::from_ref(&block), 8));
        let mut target =
            Target { block, node, friend: crate::tcp::node(secure("friend"), by_hand()), fills: 0 };
        target.serves_its_friend();
        target
    }

    fn connect(&self) -> Raw {
        let stream = TcpStream::connect(self.node.transport.local_address()).expect("the kernel accepts it");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Raw(stream)
    }

    fn serves_its_friend(&mut self) {
        let wanted = wanted(small_layout(), &[self.block.key], self.fills, PATIENCE);
        self.fills += 1;
        let mut tracker = Tracker::default();
        tracker.expect(&wanted.request);
        let address = format!("target@{}", self.node.address());
        self.friend.transport.fetch(&address, wanted.request).expect("taken");
        self.friend.finish(&mut tracker);
        assert!(tracker.outcomes.values().all(|outcome| matches!(outcome, FillOutcome::Arrived { .. })));
    }

    /// Checks that attacks so far were refused as these, and nothing else has changed.
    fn has_refused(&mut self, handshakes: u64, stalls: u64, protocol_errors: u64) {
        let before = self.fills;
        let expected = (handshakes, stalls, protocol_errors);
        eventually("all attacks are counted", || {
            let stats = self.node.transport.stats();
            (stats.handshakes_refused, stats.stalls, stats.protocol_errors) == expected
        });
        self.serves_its_friend();
        let (node, friend) = (self.node.transport.stats(), self.friend.transport.stats());
        assert_eq!((node.requests, friend.connections_opened), (before + 1, 1), "one connection for all");
        assert_eq!((node.handshakes_refused, node.stalls, node.protocol_errors), expected, "counted once");
    }
}

/// A socket below a handshake of the test.
pub(crate) struct Raw(pub(crate) TcpStream);

impl Wire for Raw {
    type Error = TlsError;

    fn receive(&mut self, into: &mut [u8]) -> Result<usize, TlsError> {
        Ok(self.0.read(into)?)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<(), TlsError> {
        Ok(self.0.write_all(bytes)?)
    }
}

impl Raw {
    /// Sends bytes in one record; returns whether the connection is open.
    pub(crate) fn seal(&mut self, channel: &mut Channel, bytes: &[u8]) -> bool {
        let mut record = [0; SEALED_BYTES_MAX];
        let fill = |into: &mut [u8]| {
            into[..bytes.len()].copy_from_slice(bytes);
            bytes.len()
        };
        let written = channel.sealer.seal(&mut record, fill).expect("a valid size");
        self.0.write_all(&record[..written]).is_ok()
    }
}

/// Whether the client with these credentials, and the greeting of a node, is refused before its greeting is answered.
fn is_refused(target: &Target, client: &Tls, greeting: &[u8; 128]) -> bool {
    let mut raw = target.connect();
    // A client learns of the refusal after its own part of the handshake.
    if let Ok(mut channel) = client.dial_blocking(&mut raw, Expected::AnyAgent) {
        raw.seal(&mut channel, greeting);
        let mut received = channel.unopened;
        drop(raw.0.read_to_end(&mut received));
        let record =
            Opener::record_bytes(&received).expect("a record").filter(|bytes| *bytes <= received.len());
        return record
            .is_none_or(|bytes| !matches!(channel.opener.open(&mut received[..bytes]), Ok(Opened::Data(_))));
    }
    is_closed(&mut raw.0)
}

#[test]
fn certificates_of_others_are_refused_and_counted() {
    let mut target = Target::new();
    let foreign = Authority::create(CLUSTER).expect("a valid name");
    let by_foreign = foreign.issue(&identity("agent/friend"), CERTIFICATE_VALID).expect("a certificate");
    let (now, day) = (OffsetDateTime::now_utc(), Span::days(1));
    let ended = authority().issue_between(&identity("agent/friend"), now - 2 * day, now - day);
    let elsewhere = Identity::new("other", "agent/friend".parse().expect("a role")).expect("valid names");
    let elsewhere = authority().issue(&elsewhere, CERTIFICATE_VALID).expect("a certificate");
    let attacks = [
        ("another authority", tls_with(by_foreign), "friend"),
        ("a certificate that has ended", tls_with(ended.expect("a certificate")), "friend"),
        ("another cluster", tls_with(elsewhere), "friend"),
        ("a member", tls("member"), "friend"),
        ("an administrator", tls("admin"), "friend"),
        ("another node's name", tls("agent/other"), "friend"),
    ];
    for (count, (what, client, name)) in (1..).zip(attacks) {
        let started = Instant::now();
        assert!(is_refused(&target, &client, &hello_of(name, VERSION, 1 << 20, 2000)), "{what}");
        assert!(started.elapsed() < PATIENCE / 2, "{what}");
        target.has_refused(count, 0, 0);
    }
    let mut raw = target.connect();
    let mut channel = tls("agent/other").dial_blocking(&mut raw, Expected::AnyAgent).expect("accepted");
    assert!(greet(&mut raw, &mut channel, "other"), "the same client with its own name");
}

/// Connects with a plain client of rustls.
fn rustls_client(target: &Target, config: rustls::ClientConfig) -> StreamOwned<ClientConnection, TcpStream> {
    let name = ServerName::try_from("reprise").expect("a valid name");
    let connection = ClientConnection::new(Arc::new(config), name).expect("a valid configuration");
    StreamOwned::new(connection, target.connect().0)
}

#[test]
fn a_client_needs_a_certificate() {
    let mut target = Target::new();
    let other = tls("agent/other");
    let with = other.client_config(Expected::AnyAgent);
    let without = other.anonymous_client_config(Expected::AnyAgent);
    let greet = |mut stream: StreamOwned<ClientConnection, TcpStream>| {
        let mut answer = [0; 128];
        stream
            .write_all(&hello_of("other", VERSION, 1 << 20, 2000))
            .and_then(|()| stream.read_exact(&mut answer))
    };
    let error = greet(rustls_client(&target, without)).expect_err("no certificate").to_string();
    assert!(error.to_lowercase().contains("certificate"), "{error}");
    target.has_refused(1, 0, 0);
    // The same client with one.
    greet(rustls_client(&target, with)).expect("accepted");
    target.has_refused(1, 0, 0);
}

#[test]
fn plain_bytes_are_refused_at_once() {
    let mut target = Target::new();
    for (count, bytes) in (1..).zip([&good_hello()[..], b"GET / HTTP/1.1\r\n\r\n", &[0; 4096], &[0xff; 300]])
    {
        let mut raw = target.connect();
        drop(raw.0.write_all(bytes));
        assert!(is_closed(&mut raw.0));
        target.has_refused(count, 0, 0);
    }
    // A probe without a byte does not count as an attack.
    drop(target.connect());
    target.has_refused(4, 0, 0);
}

#[test]
fn slow_and_silent_clients_are_closed_in_time() {
    let mut target = Target::new();
    let mut silent = target.connect();
    let mut half = target.connect();
    half.send(&[22, 3, 1, 2, 0, 1]).expect("connected");
    let started = Instant::now();
    // One byte at a time of a message that is long enough for minutes.
    let mut slow = target.connect();
    slow.send(&[22, 3, 1, 0x40, 0, 1, 0, 0x3f, 0xfc]).expect("connected");
    while slow.0.write_all(&[0]).is_ok() {
        assert!(started.elapsed() < PATIENCE, "a slow client keeps its connection");
        // The attacker's pace, not a wait for an event.
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(started.elapsed() >= STALL / 2);
    assert!(is_closed(&mut silent.0) && is_closed(&mut half.0));
    target.has_refused(0, 3, 0);
}

/// Greets as the agent of this node; returns whether the greeting is answered.
pub(crate) fn greet(raw: &mut Raw, channel: &mut Channel, name: &str) -> bool {
    raw.seal(channel, &hello_of(name, VERSION, 1 << 20, 2000));
    let mut record = [0; RECORD_HEADER_BYTES + 128 + 17];
    raw.0.read_exact(&mut record).is_ok() && matches!(channel.opener.open(&mut record), Ok(Opened::Data(128)))
}

#[test]
fn records_and_frames_that_are_too_long_end_the_connection() {
    let mut target = Target::new();
    let attacker = tls("agent/other");
    let frames = [header(REQUEST, 1, 0, 0, u32::MAX), header(DATA, 1, 0, 0, 8 << 20)];
    let plain_request = request(1, small_layout(), &[key(0)]);
    let records: [&[u8]; 3] = [&[23, 3, 3, 0xff, 0xff], &[23, 3, 3, 0, 40], &plain_request];
    let attacks = frames.iter().map(|frame| (&frame[..], true)).chain(records.map(|record| (record, false)));
    for (count, (bytes, is_frame)) in (1..).zip(attacks) {
        let mut raw = target.connect();
        let mut channel = attacker.dial_blocking(&mut raw, Expected::AnyAgent).expect("accepted");
        assert!(greet(&mut raw, &mut channel, "other"));
        if is_frame {
            raw.seal(&mut channel, bytes);
        } else {
            drop(raw.0.write_all(&[bytes, &[0; 64]].concat()));
        }
        assert!(is_closed(&mut raw.0));
        target.has_refused(0, 0, count);
    }
}

/// Fetches from a server that must be refused.
fn is_refused_by_requester(address: &str, serve: impl FnOnce() + Send + 'static) {
    let requester = node(secure("friend"), by_hand());
    let serving = std::thread::spawn(serve);
    let (mut tracker, places) = requester.fetch(address, 1);
    requester.finish(&mut tracker);
    assert_lost(&tracker, 0);
    assert!(crate::harness::is_untouched(&places[0]));
    serving.join().expect("no panic");
    let stats = requester.transport.stats();
    assert_eq!((stats.connections_opened, stats.received_bytes), (0, 0));
    assert_eq!(stats.handshakes_refused, 1, "{stats:?}");
}

#[test]
fn a_requester_refuses_servers_that_are_not_the_agent_it_expects() {
    let foreign = Authority::create(CLUSTER).expect("a valid name");
    let by_foreign = foreign.issue(&identity("agent/target"), CERTIFICATE_VALID).expect("a certificate");
    for (server, expected) in
        [(tls("agent/other"), "target@"), (tls("member"), ""), (tls_with(by_foreign), "target@")]
    {
        let fake = FakeServer::new();
        let address = format!("{expected}{}", fake.address());
        is_refused_by_requester(&address, move || {
            let mut raw = Raw(fake.accept());
            assert!(server.accept_blocking(&mut raw).is_err());
        });
    }
    // A server without TLS, and one that greets with another name than that of its certificate.
    let fake = FakeServer::new();
    is_refused_by_requester(&fake.address(), move || {
        let mut stream = fake.accept();
        drop(stream.write_all(&good_hello()));
        is_closed(&mut stream);
    });
    let fake = FakeServer::new();
    is_refused_by_requester(&fake.address(), move || {
        let mut raw = Raw(fake.accept());
        let mut channel = tls("agent/other").accept_blocking(&mut raw).expect("an agent");
        raw.seal(&mut channel, &hello_of("target", VERSION, 1 << 20, 2000));
        is_closed(&mut raw.0);
    });
}

#[test]
fn a_requester_without_tls_gets_nothing_from_a_port_with_tls() {
    let mut target = Target::new();
    let plain = node(settings(), by_hand());
    let (mut tracker, _) = plain.fetch(&target.node.address(), 1);
    plain.finish(&mut tracker);
    assert_lost(&tracker, 0);
    target.has_refused(1, 0, 0);
}
