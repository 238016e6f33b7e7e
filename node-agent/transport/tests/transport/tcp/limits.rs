//! Limits of connections, and their end.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use reprise_transport::{Congestion, ErrorKind, TcpSettings, TcpTransport, Transport};

use crate::harness::{
    Block, FillOutcome, LATER, arena, by_hand, key, recording_sink, serving, small_layout, wanted,
};
use crate::tcp::wire::{
    ABSENT, FakeServer, connect, good_hello, is_closed, read_frame, request, send_absent,
};
use crate::tcp::{eventually, node, settings, tolerant};

#[test]
fn a_full_listener_closes_its_longest_idle_connection_for_a_new_one() {
    let node = node(TcpSettings { connections_max: 2, ..settings() }, by_hand());
    let address = node.transport.local_address();
    let mut greeted = connect(address, &good_hello());
    let mut silent = TcpStream::connect(address).expect("the kernel accepts it");
    // A connection without greeting is closed before one with a greeting.
    let mut third = connect(address, &good_hello());
    assert!(is_closed(&mut silent));
    connect(address, &good_hello());
    assert!(is_closed(&mut greeted), "it was idle for longer than the third");
    third.write_all(&request(1, small_layout(), &[key(0)])).expect("it is open");
    node.serve_number();
    let stats = node.transport.stats();
    assert_eq!((stats.connections_evicted, stats.connections_refused), (2, 0));
}

#[test]
fn rejects_a_connection_while_all_others_have_requests() {
    let node = node(TcpSettings { connections_max: 1, ..settings() }, by_hand());
    let address = node.transport.local_address();
    let mut busy = connect(address, &good_hello());
    busy.write_all(&request(1, small_layout(), &[key(0)])).expect("it is open");
    let serve = node.serve_number();
    let mut refused = TcpStream::connect(address).expect("the kernel accepts it");
    assert!(is_closed(&mut refused));
    assert_eq!(node.transport.stats().connections_refused, 1);
    node.transport.serve_absent(serve, 0);
    assert_eq!(read_frame(&mut busy).expect("an answer").kind, ABSENT);
    // The thread that has sent the answer marks the connection as idle a moment later.
    eventually("room for another connection", || {
        let mut stream = TcpStream::connect(address).expect("the kernel accepts it");
        let sent = stream.write_all(&good_hello());
        sent.and_then(|()| stream.read_exact(&mut [0; 128])).is_ok()
    });
    assert!(is_closed(&mut busy));
    assert!(node.transport.stats().connections_evicted >= 1);
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
    send_absent(&mut stream, number);
    node.finish(&mut tracker);
    // The idle connection is closed to make room.
    node.transport.fetch(&second.address(), request()).expect("taken");
    second.accept_request();
    assert!(is_closed(&mut stream));
}

#[test]
fn an_idle_connection_is_closed_and_opened_again_on_demand() {
    let block = Block::new(0, small_layout());
    let server = node(settings(), serving(std::slice::from_ref(&block), 8));
    let address = server.address();
    let node = node(TcpSettings { idle_timeout: Duration::from_millis(50), ..tolerant() }, by_hand());
    let (mut tracker, _) = node.fetch(&address, 1);
    node.finish(&mut tracker);
    let fake = FakeServer::new();
    let (mut tracker, _) = node.fetch(&fake.address(), 1);
    let (mut stream, number) = fake.accept_request();
    send_absent(&mut stream, number);
    node.finish(&mut tracker);
    assert!(is_closed(&mut stream), "the idle connection is closed");
    let (mut tracker, _) = node.fetch(&fake.address(), 1);
    let (mut stream, number) = fake.accept_request();
    send_absent(&mut stream, number);
    node.finish(&mut tracker);
    let stats = node.transport.stats();
    assert_eq!((stats.connections_opened, stats.stalls, stats.protocol_errors), (3, 0, 0));
    assert_eq!(server.transport.stats().protocol_errors, 0);
}

#[test]
fn an_old_connection_takes_no_new_request_and_ends_when_idle() {
    let node = node(
        TcpSettings { age_max: Duration::ZERO, idle_timeout: Duration::from_millis(50), ..tolerant() },
        by_hand(),
    );
    let server = FakeServer::new();
    let (mut tracker, _) = node.fetch(&server.address(), 1);
    let (mut first, number) = server.accept_request();
    let wanted = wanted(small_layout(), &[key(1)], 50, LATER);
    tracker.expect(&wanted.request);
    node.transport.fetch(&server.address(), wanted.request).expect("taken");
    let (mut second, other) = server.accept_request();
    send_absent(&mut first, number);
    send_absent(&mut second, other);
    node.finish(&mut tracker);
    assert!(is_closed(&mut first) && is_closed(&mut second));
    assert_eq!(node.transport.stats().connections_opened, 2);
}

#[test]
fn a_server_closes_a_connection_that_is_far_too_old() {
    let node = node(TcpSettings { age_max: Duration::ZERO, ..settings() }, by_hand());
    let mut old = connect(node.transport.local_address(), &good_hello());
    old.write_all(&request(1, small_layout(), &[key(0)])).expect("it is open");
    assert!(is_closed(&mut old));
    let stats = node.transport.stats();
    assert_eq!((stats.requests, stats.protocol_errors), (0, 0));
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
fn resolves_a_host_name_and_loses_a_peer_with_an_unknown_one() {
    let block = Block::new(0, small_layout());
    let server = node(settings(), serving(std::slice::from_ref(&block), 8));
    let requester = node(settings(), by_hand());
    let port = server.transport.local_address().port();
    let (mut tracker, _) = requester.fetch(&format!("localhost:{port}"), 1);
    requester.finish(&mut tracker);
    assert!(matches!(tracker.outcomes[&0], FillOutcome::Arrived { .. }));
    let requester = node(settings(), by_hand());
    let (mut tracker, _) = requester.fetch("no port and no host", 1);
    requester.finish(&mut tracker);
    crate::tcp::assert_lost(&tracker, 0);
}

#[test]
fn rejects_invalid_settings_with_their_name() {
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
        let (sink, _events) = recording_sink(&crate::harness::TransportHandle::default(), by_hand());
        let error = TcpTransport::bind(settings, arena(), sink).err().expect(word);
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(word), "{error}");
    }
    let taken = FakeServer::new();
    let listen = taken.address().parse().expect("an address");
    let (sink, _events) = recording_sink(&crate::harness::TransportHandle::default(), by_hand());
    let error = TcpTransport::bind(TcpSettings { listen, ..base() }, arena(), sink).err().expect("taken");
    assert_eq!(error.kind(), ErrorKind::Os, "{error}");
}
