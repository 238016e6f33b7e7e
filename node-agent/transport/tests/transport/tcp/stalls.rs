//! Peers that fall silent or disappear, seen by the requester.

use std::io::Write;
use std::time::{Duration, Instant};

use reprise_policy::peer::{FillUpdate, PeerEvent};
use reprise_transport::{Transport, TransportEvent};

use crate::harness::{Block, FillOutcome, arena, by_hand, bytes_of, is_untouched, small_layout};
use crate::tcp::wire::{ALIVE, FakeServer, block_header, data, header, send_block};
use crate::tcp::{Node, assert_lost, impatient, node, settings, tolerant};

/// Stall timeout of `impatient`.
const STALL: Duration = Duration::from_millis(300);

/// Fetches from a server that runs `misbehave` after the request; both blocks must be lost.
fn lost_after(node: &Node, misbehave: impl FnOnce(std::net::TcpStream, u64)) {
    let server = FakeServer::new();
    let (mut tracker, places) = node.fetch(&server.address(), 2);
    let (stream, number) = server.accept_request();
    // The socket stays open until the outcome is known, unless `misbehave` drops it.
    misbehave(stream, number);
    node.finish(&mut tracker);
    assert_lost(&tracker, 0);
    assert_lost(&tracker, 1);
    assert!(is_untouched(&places[1]));
}

#[test]
fn a_peer_that_accepts_and_never_greets_is_lost_after_the_stall_timeout() {
    let node = node(impatient(), by_hand());
    let server = FakeServer::new();
    let started = Instant::now();
    let (mut tracker, places) = node.fetch(&server.address(), 1);
    let _silent = server.accept();
    node.finish(&mut tracker);
    assert_lost(&tracker, 0);
    assert!(started.elapsed() >= STALL, "{:?}", started.elapsed());
    assert!(is_untouched(&places[0]));
    assert_eq!(node.transport.stats().stalls, 1);
}

#[test]
fn a_peer_that_greets_and_never_answers_is_lost_after_the_stall_timeout() {
    let node = node(impatient(), by_hand());
    let mut held = None;
    lost_after(&node, |stream, _| held = Some(stream));
    assert_eq!(node.transport.stats().stalls, 1);
}

#[test]
fn a_peer_that_sends_half_a_frame_header_is_lost_after_the_stall_timeout() {
    let node = node(impatient(), by_hand());
    let mut held = None;
    lost_after(&node, |mut stream, number| {
        stream.write_all(&header(ALIVE, number, 0, 0, 0)[..20]).expect("sent");
        held = Some(stream);
    });
    assert_eq!(node.transport.stats().stalls, 1);
}

#[test]
fn a_peer_that_sends_half_a_payload_is_lost_after_the_stall_timeout() {
    let node = node(impatient(), by_hand());
    let block = Block::new(0, small_layout());
    let mut held = None;
    lost_after(&node, |mut stream, number| {
        stream.write_all(&block_header(number, 0, &block.checksums)).expect("sent");
        let frame = data(number, 0, 0, &block.bytes);
        stream.write_all(&frame[..frame.len() / 2]).expect("sent");
        held = Some(stream);
    });
    assert_eq!(node.transport.stats().stalls, 1);
}

#[test]
fn a_peer_that_sends_alive_frames_may_exceed_the_stall_timeout() {
    let node = node(tolerant(), by_hand());
    let block = Block::new(0, small_layout());
    let server = FakeServer::new();
    let (mut tracker, places) = node.fetch(&server.address(), 1);
    let (mut stream, number) = server.accept_request();
    let started = Instant::now();
    while started.elapsed() < tolerant().stall_timeout * 3 / 2 {
        stream.write_all(&header(ALIVE, 0, 0, 0, 0)).expect("still connected");
        // The peer's pace, not a wait for an event.
        std::thread::sleep(Duration::from_millis(50));
    }
    send_block(&mut stream, number, &block);
    node.finish(&mut tracker);
    assert!(matches!(tracker.outcomes[&0], FillOutcome::Arrived { .. }));
    assert!(bytes_of(&places[0]) == block.bytes[..]);
}

#[test]
fn a_server_whose_core_is_slow_keeps_its_connection() {
    let requester = node(tolerant(), by_hand());
    let server = node(settings(), by_hand());
    let block = Block::new(0, small_layout());
    let (mut tracker, _) = requester.fetch(&server.address(), 1);
    let serve = server.serve_number();
    // Longer than the requester's stall timeout; the server's core does not answer meanwhile.
    assert!(requester.events.recv_timeout(tolerant().stall_timeout * 3 / 2).is_err());
    server.serve_block(serve, 0, &block);
    requester.finish(&mut tracker);
    assert!(matches!(tracker.outcomes[&0], FillOutcome::Arrived { .. }));
}

#[test]
fn a_slow_core_is_not_a_stall_of_the_peer() {
    let block = Block::new(0, small_layout());
    let server = node(settings(), crate::harness::serving(std::slice::from_ref(&block), 2));
    let address = server.address();
    let (sender, events) = std::sync::mpsc::channel();
    let is_first = std::sync::atomic::AtomicBool::new(true);
    let sink: reprise_transport::EventSink = std::sync::Arc::new(move |event| {
        if is_first.swap(false, std::sync::atomic::Ordering::Relaxed) {
            // Longer than the stall timeout: the core is slow; this is not a wait for an event.
            std::thread::sleep(tolerant().stall_timeout * 3 / 2);
        }
        let _ = sender.send(event);
    });
    let transport = reprise_transport::TcpTransport::bind(tolerant(), arena(), sink).expect("loopback");
    let wanted = crate::harness::wanted(small_layout(), &[block.key], 0, crate::harness::LATER);
    let mut tracker = crate::harness::Tracker::default();
    tracker.expect(&wanted.request);
    transport.fetch(&address, wanted.request).expect("taken");
    while !tracker.is_over() {
        tracker.take(&events.recv_timeout(crate::harness::PATIENCE).expect("an event"));
    }
    assert!(matches!(tracker.outcomes[&0], FillOutcome::Arrived { .. }));
    assert_eq!(transport.stats().stalls, 0);
}

#[test]
fn a_peer_that_closes_or_resets_is_lost_at_once() {
    for reset in [false, true] {
        let node = node(settings(), by_hand());
        lost_after(&node, |stream, _| {
            if reset {
                reset_on_close(&stream);
            }
            drop(stream);
        });
        assert_eq!(node.transport.stats().stalls, 0);
    }
}

#[test]
fn a_peer_that_dies_inside_a_payload_is_lost_at_once_and_verified_layers_remain() {
    let node = node(settings(), by_hand());
    let block = Block::new(0, small_layout());
    let server = FakeServer::new();
    let (mut tracker, places) = node.fetch(&server.address(), 1);
    let (mut stream, number) = server.accept_request();
    stream.write_all(&block_header(number, 0, &block.checksums)).expect("sent");
    let frame = data(number, 0, 0, &block.bytes);
    stream.write_all(&frame[..32 + 5 * 4096]).expect("sent");
    drop(stream);
    // Five objects are two and a half layers.
    match node.next() {
        event @ TransportEvent::Peer(PeerEvent::Fill {
            update: FillUpdate::Layers { layers: 1..=2, .. },
            ..
        }) => {
            tracker.take(&event);
        }
        other => panic!("{other:?} instead of layers"),
    }
    node.finish(&mut tracker);
    assert_lost(&tracker, 0);
    assert!(bytes_of(&places[0])[..4 * 4096] == block.bytes[..4 * 4096]);
}

#[test]
fn after_a_loss_the_next_fetch_opens_a_new_connection() {
    let node = node(settings(), by_hand());
    let server = FakeServer::new();
    let (mut tracker, _) = node.fetch(&server.address(), 1);
    drop(server.accept_request());
    node.finish(&mut tracker);
    assert_lost(&tracker, 0);
    let block = Block::new(0, small_layout());
    let (mut tracker, places) = node.fetch(&server.address(), 1);
    let (mut stream, number) = server.accept_request();
    send_block(&mut stream, number, &block);
    node.finish(&mut tracker);
    assert!(bytes_of(&places[0]) == block.bytes[..]);
    assert_eq!(node.transport.stats().connections_opened, 2);
}

/// Makes closing the socket send RST.
fn reset_on_close(stream: &std::net::TcpStream) {
    rustix::net::sockopt::set_socket_linger(stream, Some(Duration::ZERO)).expect("a socket has this option");
}
