//! Bounds of connections, and their end.

use std::time::Duration;

use reprise_transport::{Congestion, ErrorKind, TcpSettings, TcpTransport, Transport};

use crate::harness::{Block, Fate, LATER, by_hand, key, recording_sink, serving, small_layout, wanted};
use crate::wire::{FakeServer, connect, good_hello, is_closed};
use crate::{impatient, node, settings};

#[test]
fn connections_beyond_the_limit_are_refused() {
    let node = node(TcpSettings { connections_max: 2, ..settings() }, by_hand());
    let address = node.transport.local_address();
    let _first = connect(address, &good_hello());
    let second = connect(address, &good_hello());
    let mut third = std::net::TcpStream::connect(address).expect("the kernel accepts it");
    assert!(is_closed(&mut third));
    assert_eq!(node.transport.stats().connections_refused, 1);
    // A place that is given up is free for the next.
    drop(second);
    for _ in 0..1000 {
        let mut stream = std::net::TcpStream::connect(address).expect("the kernel accepts it");
        std::io::Write::write_all(&mut stream, &good_hello()).expect("sent");
        if std::io::Read::read_exact(&mut stream, &mut [0; 128]).is_ok() {
            return;
        }
        std::thread::yield_now();
    }
    panic!("the place of a closed connection is never free again");
}

#[test]
fn opening_more_connections_than_allowed_is_busy_until_one_is_idle() {
    let node = node(TcpSettings { connections_max: 1, ..settings() }, by_hand());
    let (first, second) = (FakeServer::new(), FakeServer::new());
    let (mut tracker, _) = node.fetch(&first.address(), 1);
    let request = || wanted(small_layout(), &[key(0)], 50, LATER).request;
    let error = node.transport.fetch(&second.address(), request()).expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    let (mut stream, number) = first.accept_request();
    let absent = crate::wire::header(crate::wire::ABSENT, number, 0, 0, 0);
    std::io::Write::write_all(&mut stream, &absent).expect("sent");
    node.finish(&mut tracker);
    // The idle connection makes room.
    node.transport.fetch(&second.address(), request()).expect("taken");
    second.accept_request();
    assert!(is_closed(&mut stream));
}

#[test]
fn an_idle_connection_is_closed_and_opened_again_on_demand() {
    let block = Block::new(0, small_layout());
    let server = node(settings(), serving(std::slice::from_ref(&block), 8));
    let address = server.transport.local_address().to_string();
    let node = node(TcpSettings { idle_timeout: Duration::from_millis(50), ..impatient() }, by_hand());
    let (mut tracker, _) = node.fetch(&address, 1);
    node.finish(&mut tracker);
    let fake = FakeServer::new();
    let (mut tracker, _) = node.fetch(&fake.address(), 1);
    let (mut stream, number) = fake.accept_request();
    let absent = crate::wire::header(crate::wire::ABSENT, number, 0, 0, 0);
    std::io::Write::write_all(&mut stream, &absent).expect("sent");
    node.finish(&mut tracker);
    assert!(is_closed(&mut stream), "the idle connection is closed");
    let (mut tracker, _) = node.fetch(&fake.address(), 1);
    let (mut stream, number) = fake.accept_request();
    let absent = crate::wire::header(crate::wire::ABSENT, number, 0, 0, 0);
    std::io::Write::write_all(&mut stream, &absent).expect("sent");
    node.finish(&mut tracker);
    let stats = node.transport.stats();
    assert_eq!((stats.connections_opened, stats.stalls, stats.protocol_errors), (3, 0, 0));
    assert_eq!(server.transport.stats().protocol_errors, 0);
}

#[test]
fn a_busy_peer_gets_a_second_connection_where_that_is_allowed() {
    let node = node(TcpSettings { connections_per_peer: 2, ..settings() }, by_hand());
    let server = FakeServer::new();
    for fill in 0..4 {
        let request = wanted(small_layout(), &[key(0)], fill, LATER).request;
        node.transport.fetch(&server.address(), request).expect("taken");
    }
    let _first = server.accept_request();
    let _second = server.accept_request();
    node.transport.shutdown();
    assert_eq!(node.transport.stats().connections_opened, 2);
}

#[test]
fn a_host_name_is_looked_up_and_an_unknown_one_is_a_lost_peer() {
    let block = Block::new(0, small_layout());
    let server = node(settings(), serving(std::slice::from_ref(&block), 8));
    let requester = node(settings(), by_hand());
    let port = server.transport.local_address().port();
    let (mut tracker, _) = requester.fetch(&format!("localhost:{port}"), 1);
    requester.finish(&mut tracker);
    assert!(matches!(tracker.fates[&0], Fate::Arrived { .. }));
    let requester = node(settings(), by_hand());
    let (mut tracker, _) = requester.fetch("no port and no host", 1);
    requester.finish(&mut tracker);
    crate::assert_lost(&tracker, 0);
}

#[test]
fn settings_that_cannot_work_are_refused_with_words() {
    let base = settings;
    let cases = [
        (TcpSettings { node_name: String::new(), ..base() }, "node name"),
        (TcpSettings { node_name: "n".repeat(65), ..base() }, "node name"),
        (TcpSettings { credit_bytes: 1000, ..base() }, "credit"),
        (TcpSettings { stall_timeout: Duration::ZERO, ..base() }, "stall timeout"),
        (TcpSettings { idle_timeout: Duration::ZERO, ..base() }, "idle timeout"),
        (TcpSettings { idle_timeout: Duration::MAX, ..base() }, "idle timeout"),
        (TcpSettings { connections_max: 0, ..base() }, "connection"),
        (TcpSettings { connections_per_peer: 0, ..base() }, "connection"),
        (TcpSettings { congestion: Congestion::Named("no such".into()), ..base() }, "congestion"),
    ];
    for (settings, word) in cases {
        let (sink, _events) = recording_sink(&crate::harness::Own::default(), by_hand());
        let error = TcpTransport::bind(settings, sink).err().expect(word);
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
    let taken = FakeServer::new();
    let listen = taken.address().parse().expect("an address");
    let (sink, _events) = recording_sink(&crate::harness::Own::default(), by_hand());
    let error = TcpTransport::bind(TcpSettings { listen, ..base() }, sink).err().expect("taken");
    assert_eq!(error.kind(), ErrorKind::Os, "{error}");
}
