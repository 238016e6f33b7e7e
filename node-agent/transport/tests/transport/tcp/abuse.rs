//! Agents with valid certificates that use more than their share: connections, changes of keys, slow frames, age.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use reprise_identity::blocking::Channel;
use reprise_identity::{Expected, Security};
use reprise_transport::{TcpSettings, Transport};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, StreamOwned};
use time::{Duration as Span, OffsetDateTime};

use crate::harness::{
    Block, FillOutcome, PATIENCE, authority, by_hand, identity, key, security_of, serving, small_layout, tls,
    tls_with, wanted,
};
use crate::tcp::attacks::{Raw, greet};
use crate::tcp::wire::{REQUEST, VERSION, header, hello_of, request};
use crate::tcp::{Node, eventually, node, settings};

/// Frame that ends a request; it is valid without one.
const CANCEL: u8 = 3;

/// Settings of the node under attack.
fn secure() -> TcpSettings {
    TcpSettings {
        node_name: "target".to_owned(),
        stall_timeout: Duration::from_secs(2),
        security: security_of("target"),
        ..settings()
    }
}

/// A connection of the agent of node `name`.
struct Client(StreamOwned<ClientConnection, TcpStream>);

impl Client {
    fn connect(target: &Node, name: &str) -> Client {
        let config = tls(&format!("agent/{name}")).client_config(Expected::AnyAgent);
        let server = ServerName::try_from("reprise").expect("a valid name");
        let connection = ClientConnection::new(Arc::new(config), server).expect("a valid configuration");
        let stream = TcpStream::connect(target.transport.local_address()).expect("the kernel accepts it");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Client(StreamOwned::new(connection, stream))
    }

    /// Exchanges greetings; returns whether this side's is answered.
    fn greet(&mut self, name: &str) -> bool {
        let mut answer = [0; 128];
        let greeted = self.0.write_all(&hello_of(name, VERSION, 1 << 20, 2000));
        greeted.and_then(|()| self.0.read_exact(&mut answer)).is_ok()
    }

    fn greeted(target: &Node, name: &str) -> Client {
        let mut client = Client::connect(target, name);
        assert!(client.greet(name), "{name} is admitted");
        client
    }

    /// Sends bytes; returns whether the connection is open.
    fn send(&mut self, bytes: &[u8]) -> bool {
        self.0.write_all(bytes).and_then(|()| self.0.flush()).is_ok()
    }

    fn is_closed(&mut self) -> bool {
        let mut rest = Vec::new();
        // An alert and a reset are ends as well.
        let read = self.0.read_to_end(&mut rest);
        read.is_ok() || read.is_err_and(|error| error.kind() != std::io::ErrorKind::WouldBlock)
    }
}

/// Sends again and again at the attacker's pace, until the connection is closed; returns how long it was open.
fn repeat_until_closed(pace: Duration, mut send: impl FnMut() -> bool) -> Duration {
    let begun = Instant::now();
    while send() {
        assert!(begun.elapsed() < PATIENCE, "the client keeps its connection");
        std::thread::sleep(pace);
    }
    begun.elapsed()
}

/// A connection of the agent of node `other` after its handshake.
fn dial(target: &Node) -> (Raw, Channel) {
    let mut raw = Raw(TcpStream::connect(target.transport.local_address()).expect("the kernel accepts it"));
    raw.0.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    let channel = tls("agent/other").dial_blocking(&mut raw, Expected::AnyAgent).expect("accepted");
    (raw, channel)
}

/// The same connection, on which each record follows a change of the key.
fn changing((raw, channel): (Raw, Channel)) -> (Raw, Channel) {
    let sealer = channel.sealer.with_records_per_key(0);
    (raw, Channel { sealer, ..channel })
}

#[test]
fn one_agent_has_at_most_its_share_of_the_connections() {
    // A quarter, and at least four.
    let target = node(TcpSettings { connections_max: 8, ..secure() }, by_hand());
    let mut idle: Vec<Client> = (0..4).map(|_| Client::greeted(&target, "greedy")).collect();
    let mut friend = Client::greeted(&target, "friend");
    for number in 0..4 {
        let mut busy = Client::greeted(&target, "greedy");
        assert!(idle[number].is_closed(), "its own longest-idle connection makes room");
        assert!(busy.send(&request(1, small_layout(), &[key(0)])));
        target.serve_number();
        idle.push(busy);
    }
    assert!(!Client::connect(&target, "greedy").greet("greedy"), "all of its connections have requests");
    let stats = target.transport.stats();
    assert_eq!((stats.connections_evicted, stats.connections_refused), (4, 1));
    assert!(friend.send(&request(1, small_layout(), &[key(0)])), "another agent keeps its connection");
    target.serve_number();
    Client::greeted(&target, "third");
}

#[test]
fn a_change_of_the_key_before_the_greeting_ends_the_connection() {
    let target = node(secure(), by_hand());
    let (mut raw, mut channel) = changing(dial(&target));
    assert!(!greet(&mut raw, &mut channel, "other"));
    eventually("it is counted", || target.transport.stats().protocol_errors == 1);
}

#[test]
fn a_greeting_in_many_records_ends_the_connection() {
    let target = node(secure(), by_hand());
    let (mut raw, mut channel) = dial(&target);
    for byte in &hello_of("other", VERSION, 1 << 20, 2000)[..8] {
        raw.seal(&mut channel, &[*byte]);
    }
    eventually("it is counted", || target.transport.stats().protocol_errors == 1);
}

#[test]
fn changes_of_the_key_extend_no_deadline() {
    let idle_timeout = Duration::from_millis(400);
    let target = node(TcpSettings { idle_timeout, ..secure() }, by_hand());
    let (mut raw, mut channel) = dial(&target);
    assert!(greet(&mut raw, &mut channel, "other"));
    let (mut raw, mut channel) = changing((raw, channel));
    // A frame between two changes, as the protocol of records requires.
    let cancel = header(CANCEL, 7, 0, 0, 0);
    let lasted = repeat_until_closed(Duration::from_millis(100), || raw.seal(&mut channel, &cancel));
    assert!(lasted >= idle_timeout, "{lasted:?}");
    let stats = target.transport.stats();
    assert_eq!((stats.requests, stats.protocol_errors), (0, 0), "closed as idle");
}

#[test]
fn many_changes_of_the_key_end_the_connection() {
    let target = node(secure(), by_hand());
    let (mut raw, mut channel) = dial(&target);
    assert!(greet(&mut raw, &mut channel, "other"));
    let (mut raw, mut channel) = changing((raw, channel));
    let cancel = header(CANCEL, 7, 0, 0, 0);
    repeat_until_closed(Duration::from_millis(1), || raw.seal(&mut channel, &cancel));
    eventually("it is counted", || target.transport.stats().protocol_errors == 1);
}

#[test]
fn a_frame_that_arrives_byte_by_byte_ends_the_connection() {
    let target = node(TcpSettings { stall_timeout: Duration::from_secs(1), ..secure() }, by_hand());
    let mut client = Client::greeted(&target, "slow");
    assert!(client.send(&header(REQUEST, 1, 0, 0, 4096)));
    let lasted = repeat_until_closed(Duration::from_millis(100), || client.send(&[0]));
    assert!(lasted >= Duration::from_secs(2), "{lasted:?}");
    eventually("it is counted", || target.transport.stats().stalls == 1);
}

#[test]
fn connections_of_a_certificate_are_replaced_before_it_ends_and_no_fetch_fails() {
    let block = Block::new(0, small_layout());
    let target = node(secure(), serving(std::slice::from_ref(&block), 8));
    let now = OffsetDateTime::now_utc();
    // A quarter of the validity is 10 s.
    let issued = authority().issue_between(&identity("agent/friend"), now, now + Span::seconds(40));
    let security = Security::Tls(tls_with(issued.expect("a certificate")));
    let friend = node(TcpSettings { node_name: "friend".to_owned(), security, ..secure() }, by_hand());
    let address = format!("target@{}", target.address());
    let begun = Instant::now();
    for fill in 0.. {
        let wanted = wanted(small_layout(), &[block.key], fill, PATIENCE);
        let mut tracker = crate::harness::Tracker::default();
        tracker.expect(&wanted.request);
        friend.transport.fetch(&address, wanted.request).expect("taken");
        friend.finish(&mut tracker);
        assert!(matches!(tracker.outcomes[&fill], FillOutcome::Arrived { .. }), "fetch {fill}");
        if friend.transport.stats().connections_opened == 2 {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(30), "the connection is not replaced");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert!(begun.elapsed() >= Duration::from_secs(8), "{:?}", begun.elapsed());
}
