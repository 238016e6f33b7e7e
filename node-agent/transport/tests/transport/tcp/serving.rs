//! Requesters that stall or disappear, seen by the server.

use std::io::Write;

use reprise_policy::peer::PeerEvent;
use reprise_transport::{Transport, TransportEvent};

use crate::harness::{Block, FillOutcome, by_hand, key, serving, small_layout};
use crate::tcp::wire::{CREDIT, DATA, VERSION, connect, header, hello, read_frame, request};
use crate::tcp::{eventually, impatient, large_block, node, settings};

#[test]
fn a_requester_that_returns_no_credit_gets_only_its_window() {
    let node = node(impatient(), by_hand());
    let block = large_block();
    let window: u64 = 256 << 10;
    let mut stream = connect(node.transport.local_address(), &hello(VERSION, window, 5000));
    stream.write_all(&request(1, block.layout, &[key(0)])).expect("sent");
    let serve = node.serve_number();
    node.serve_block(serve, 0, &block);
    let mut payload = 0;
    let mut received = Vec::new();
    while let Ok(frame) = read_frame(&mut stream) {
        if frame.kind == DATA {
            assert_eq!(u64::from(frame.argument), payload, "ranges are in order");
            payload += frame.body.len() as u64;
            received.extend(frame.body);
        }
    }
    // The server has closed the connection by now: no credit was returned for its stall timeout.
    assert_eq!(payload, window);
    assert!(received == block.bytes[..window as usize]);
    assert_eq!(node.next(), PeerEvent::ServeAborted { serve }.into());
    let stats = node.transport.stats();
    assert_eq!((stats.in_flight_bytes_max, stats.stalls), (window, 1));
}

#[test]
fn returned_credit_releases_the_rest() {
    let node = node(settings(), by_hand());
    let block = large_block();
    let window: u64 = 256 << 10;
    let mut stream = connect(node.transport.local_address(), &hello(VERSION, window, 5000));
    stream.write_all(&request(1, block.layout, &[key(0)])).expect("sent");
    let serve = node.serve_number();
    node.serve_block(serve, 0, &block);
    let mut received = Vec::new();
    while received.len() < block.bytes.len() {
        let frame = read_frame(&mut stream).expect("another frame");
        if frame.kind == DATA {
            let credit = header(CREDIT, frame.body.len() as u64, 0, 0, 0);
            stream.write_all(&credit).expect("sent");
            received.extend(frame.body);
        }
    }
    assert!(received == block.bytes[..]);
    assert_eq!(node.next(), PeerEvent::ServeDone { serve, block: 0 }.into());
    assert!(node.transport.stats().in_flight_bytes_max <= window);
}

#[test]
fn a_requester_that_reads_nothing_is_closed_without_delaying_others() {
    let node = node(impatient(), by_hand());
    let block = large_block();
    // The window is larger than all socket buffers, so the server fills them and then waits for the socket.
    let mut stalled = connect(node.transport.local_address(), &hello(VERSION, 1 << 30, 5000));
    stalled.write_all(&request(1, block.layout, &vec![key(0); 128])).expect("sent");
    let stalled_serve = node.serve_number();
    // No call waits for the peer: it reads nothing, so the calls would not end.
    for index in 0..128 {
        node.serve_block(stalled_serve, index, &block);
    }
    // Another requester is served meanwhile, and its node sees no delay.
    let requester = crate::tcp::node(settings(), by_hand());
    let (mut tracker, _) = requester.fetch(&node.address(), 1);
    let small = Block::new(0, small_layout());
    let mut aborted = false;
    loop {
        match node.next() {
            TransportEvent::Request { request, .. } => {
                node.serve_block(request.serve, 0, &small);
                requester.finish(&mut tracker);
            }
            TransportEvent::Peer(PeerEvent::ServeAborted { serve }) if serve == stalled_serve => {
                aborted = true;
            }
            TransportEvent::Peer(PeerEvent::ServeDone { .. }) => {}
            other => panic!("{other:?}"),
        }
        if aborted && tracker.is_over() {
            break;
        }
    }
    assert!(matches!(tracker.outcomes[&0], FillOutcome::Arrived { .. }));
    assert_eq!(node.transport.stats().stalls, 1);
}

#[test]
fn a_requester_that_dies_in_the_middle_aborts_its_serves() {
    let node = node(settings(), by_hand());
    let block = large_block();
    let mut stream = connect(node.transport.local_address(), &hello(VERSION, 256 << 10, 5000));
    stream.write_all(&request(1, block.layout, &[key(0)])).expect("sent");
    stream.write_all(&request(2, block.layout, &[key(0)])).expect("sent");
    let (first, second) = (node.serve_number(), node.serve_number());
    node.serve_block(first, 0, &block);
    read_frame(&mut stream).expect("the block's header");
    drop(stream);
    assert_eq!(node.next(), PeerEvent::ServeAborted { serve: first }.into());
    assert_eq!(node.next(), PeerEvent::ServeAborted { serve: second }.into());
}

#[test]
fn closes_a_requester_that_sends_half_a_request() {
    let node = node(impatient(), by_hand());
    let mut stream = connect(node.transport.local_address(), &hello(VERSION, 1 << 20, 5000));
    let bytes = request(1, small_layout(), &[key(0)]);
    stream.write_all(&bytes[..40]).expect("sent");
    assert!(crate::tcp::wire::is_closed(&mut stream));
    eventually("one stall", || node.transport.stats().stalls == 1);
}

#[test]
fn closes_a_connection_that_never_greets() {
    let node = node(impatient(), by_hand());
    let mut stream = std::net::TcpStream::connect(node.transport.local_address()).expect("connected");
    assert!(crate::tcp::wire::is_closed(&mut stream));
    eventually("one stall", || node.transport.stats().stalls == 1);
}

#[test]
fn a_cancelled_request_keeps_the_connection_open() {
    let block = Block::new(0, small_layout());
    let node = node(settings(), by_hand());
    let mut stream = connect(node.transport.local_address(), &hello(VERSION, 1 << 20, 5000));
    let keys = [key(0)];
    let send = [
        request(1, small_layout(), &keys),
        request(2, small_layout(), &keys),
        header(3, 1, 0, 0, 0).to_vec(),
        header(3, 99, 0, 0, 0).to_vec(),
    ];
    stream.write_all(&send.concat()).expect("sent");
    let (first, second) = (node.serve_number(), node.serve_number());
    assert_eq!(node.next(), PeerEvent::ServeAborted { serve: first }.into());
    node.serve_block(first, 0, &block);
    node.serve_block(second, 0, &block);
    let frame = read_frame(&mut stream).expect("the second request's header");
    assert_eq!(frame.stream, 2);
    assert_eq!(node.next(), PeerEvent::ServeDone { serve: second, block: 0 }.into());
}

#[test]
fn served_memory_is_released_when_the_block_is_done() {
    let block = Block::new(0, small_layout());
    let node = node(settings(), serving(std::slice::from_ref(&block), 2));
    let requester = crate::tcp::node(settings(), by_hand());
    let (mut tracker, _) = requester.fetch(&node.address(), 1);
    requester.finish(&mut tracker);
    let serve = node.serve_number();
    assert_eq!(node.next(), PeerEvent::ServeDone { serve, block: 0 }.into());
    assert_eq!(node.transport.stats().sent_bytes, block.layout.block_bytes());
}
