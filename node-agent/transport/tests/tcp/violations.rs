//! Peers that break the protocol: the connection is closed, the error counted, nothing else is harmed.

use std::io::Write;
use std::net::TcpStream;

use reprise_transport::Transport;

use crate::harness::{Block, Fate, by_hand, bytes_of, is_untouched, serving, small_layout};
use crate::wire::{
    ABSENT, ALIVE, BLOCK_HEADER, CREDIT, DATA, FakeServer, REQUEST, block_header, connect, data, good_hello,
    header, hello, is_closed, request, with_body,
};
use crate::{assert_lost, eventually, node, settings};

/// What a server sends must end the connection as a protocol error and write nothing into the second block.
fn requester_refuses(what: &str, bytes: impl FnOnce(u64, &Block) -> Vec<u8>) {
    let node = node(settings(), by_hand());
    let server = FakeServer::new();
    let (mut tracker, spans) = node.fetch(&server.address(), 2);
    let (mut stream, number) = server.accept_request();
    let block = Block::new(0, small_layout());
    // The other side may close before it has read everything.
    let _ = stream.write_all(&bytes(number, &block));
    node.finish(&mut tracker);
    assert_lost(&tracker, 1);
    assert!(is_untouched(&spans[1]), "{what}");
    assert!(is_closed(&mut stream), "{what}");
    assert_eq!(node.transport.stats().protocol_errors, 1, "{what}");
}

#[test]
fn a_requester_refuses_frames_that_are_none() {
    requester_refuses("wrong magic", |_, _| {
        let mut frame = header(ALIVE, 0, 0, 0, 0);
        frame[0] = b'X';
        frame.to_vec()
    });
    requester_refuses("wrong checksum", |_, _| {
        let mut frame = header(ALIVE, 0, 0, 0, 0);
        frame[20] ^= 4;
        frame.to_vec()
    });
    requester_refuses("unknown kind", |_, _| header(77, 0, 0, 0, 0).to_vec());
    requester_refuses("frame of a requester", |number, _| header(CREDIT, number, 0, 0, 0).to_vec());
    requester_refuses("wrong checksum of a body", |number, block| {
        let mut frame = block_header(number, 0, &block.checksums);
        *frame.last_mut().expect("it has bytes") ^= 1;
        frame
    });
}

#[test]
fn a_requester_refuses_frames_that_are_too_long() {
    requester_refuses("data", |number, _| header(DATA, number, 0, 0, (8 << 20) + 1).to_vec());
    requester_refuses("block header", |number, _| {
        header(BLOCK_HEADER, number, 0, 0, 4 + 960 * 4 + 1).to_vec()
    });
    requester_refuses("absent", |number, _| header(ABSENT, number, 0, 0, 1).to_vec());
    requester_refuses("all ones", |number, _| header(DATA, number, 0, u32::MAX, u32::MAX).to_vec());
}

#[test]
fn a_requester_refuses_data_that_does_not_fit_its_block() {
    let headed = |number: u64, block: &Block, then: Vec<u8>| {
        [block_header(number, 0, &block.checksums), then].concat()
    };
    requester_refuses("beyond the block", |number, block| {
        headed(number, block, data(number, 0, 7 * 4096, &block.bytes[..2 * 4096]))
    });
    requester_refuses("offset near the end of 32 bits", |number, block| {
        headed(number, block, data(number, 0, u32::MAX - 4095, &block.bytes[..4096]))
    });
    requester_refuses("inside of an object", |number, block| {
        headed(number, block, data(number, 0, 100, &block.bytes[..4096]))
    });
    requester_refuses("empty", |number, block| headed(number, block, data(number, 0, 0, &[])));
    requester_refuses("twice", |number, block| {
        let once = data(number, 0, 0, &block.bytes[..4096]);
        headed(number, block, [once.clone(), once].concat())
    });
    requester_refuses("over an object that has come", |number, block| {
        let second = data(number, 0, 4096, &block.bytes[4096..8192]);
        headed(number, block, [second, data(number, 0, 0, &block.bytes[..8192])].concat())
    });
    requester_refuses("before the header", |number, block| data(number, 0, 0, &block.bytes));
    requester_refuses("unknown block", |number, block| data(number, 2, 0, &block.bytes));
    requester_refuses("header of an unknown block", |number, block| {
        block_header(number, 9, &block.checksums)
    });
    requester_refuses("second header", |number, block| {
        headed(number, block, block_header(number, 0, &block.checksums))
    });
    requester_refuses("too few checksums", |number, block| block_header(number, 0, &block.checksums[1..]));
    requester_refuses("unknown tier", |number, _| with_body(BLOCK_HEADER, number, 0, &[9, 0, 0, 0]));
}

#[test]
fn a_requester_refuses_greetings_of_others() {
    let mut garbage = good_hello();
    garbage[..8].copy_from_slice(b"HTTP/1.1");
    let mut damaged = good_hello();
    damaged[40] ^= 1;
    for greeting in [garbage, damaged, hello(2, 1 << 20, 2000), hello(1, 0, 2000), hello(1, 1 << 20, 0)] {
        let node = node(settings(), by_hand());
        let server = FakeServer::new();
        let (mut tracker, _) = node.fetch(&server.address(), 1);
        let mut stream = server.accept();
        stream.write_all(&greeting).expect("sent");
        node.finish(&mut tracker);
        assert_lost(&tracker, 0);
        assert!(is_closed(&mut stream));
        assert_eq!(node.transport.stats().protocol_errors, 1);
    }
}

#[test]
fn frames_of_unknown_requests_and_ended_blocks_are_thrown_away() {
    let node = node(settings(), by_hand());
    let server = FakeServer::new();
    let (mut tracker, spans) = node.fetch(&server.address(), 2);
    let (mut stream, number) = server.accept_request();
    let block = Block::new(0, small_layout());
    let mut send = |bytes: Vec<u8>| stream.write_all(&bytes).expect("still connected");
    send(header(ABSENT, number, 1, 0, 0).to_vec());
    // Of a request that never was, and of the block that has ended.
    send(block_header(number + 5, 0, &block.checksums));
    send(data(number + 5, 0, 0, &block.bytes));
    send(header(ABSENT, number + 5, 7, 0, 0).to_vec());
    send(block_header(number, 1, &block.checksums));
    send(data(number, 1, 0, &block.bytes));
    send(block_header(number, 0, &block.checksums));
    send(data(number, 0, 0, &block.bytes));
    node.finish(&mut tracker);
    assert!(matches!(tracker.fates[&0], Fate::Arrived { .. }));
    assert!(bytes_of(&spans[0]) == block.bytes[..]);
    assert!(is_untouched(&spans[1]));
    let stats = node.transport.stats();
    assert_eq!((stats.discarded_bytes, stats.protocol_errors), (2 * 8 * 4096, 0));
}

/// What a requester sends must end the connection as a protocol error; the node goes on serving others.
fn server_refuses(what: &str, bytes: impl FnOnce(&mut TcpStream)) {
    let block = Block::new(0, small_layout());
    let node = node(settings(), serving(std::slice::from_ref(&block), 8));
    let mut stream = connect(node.transport.local_address(), &good_hello());
    bytes(&mut stream);
    assert!(is_closed(&mut stream), "{what}");
    let requester = crate::node(settings(), by_hand());
    let (mut tracker, _) = requester.fetch(&node.transport.local_address().to_string(), 1);
    requester.finish(&mut tracker);
    assert!(matches!(tracker.fates[&0], Fate::Arrived { .. }), "{what}");
    eventually(what, || node.transport.stats().protocol_errors == 1);
}

#[test]
fn a_server_refuses_requests_that_are_none() {
    let layout = small_layout();
    let keys = [crate::harness::key(0)];
    let send = |bytes: Vec<u8>| move |stream: &mut TcpStream| drop(stream.write_all(&bytes));
    server_refuses("garbage", send(vec![0x42; 500]));
    server_refuses("frame of a server", send(header(ALIVE, 0, 0, 0, 0).to_vec()));
    server_refuses("too long", send(header(REQUEST, 1, 0, 0, 32 + 16 * 8192 + 1).to_vec()));
    server_refuses("no keys", send(request(1, layout, &[])));
    server_refuses("more credit than the window", send(header(CREDIT, 1, 0, 0, 0).to_vec()));
    server_refuses(
        "number in use",
        send([request(1, layout, &keys), request(1, layout, &keys)].concat().repeat(40)),
    );
    let mut torn = request(1, layout, &keys)[32..].to_vec();
    torn.pop();
    server_refuses("torn key", send(with_body(REQUEST, 1, 0, &torn)));
    let mut zeroed = request(1, layout, &keys)[32..].to_vec();
    zeroed[..16].fill(0);
    server_refuses("no layout", send(with_body(REQUEST, 1, 0, &zeroed)));
}

#[test]
fn garbage_on_the_port_is_counted_and_harms_nobody() {
    let node = node(settings(), by_hand());
    let address = node.transport.local_address();
    for garbage in [vec![0u8; 128], b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n".repeat(5), vec![0xff; 4096]]
    {
        let mut stream = TcpStream::connect(address).expect("connected");
        stream.write_all(&garbage).expect("sent");
        stream.set_read_timeout(Some(crate::harness::PATIENCE)).expect("a timeout");
        assert!(is_closed(&mut stream));
    }
    eventually("three protocol errors", || node.transport.stats().protocol_errors == 3);
    assert_eq!(node.transport.stats().connections_accepted, 0);
    connect(address, &good_hello());
}

#[test]
fn a_peer_of_another_version_is_told_ours_before_it_is_refused() {
    let node = node(settings(), by_hand());
    // `connect` checks that the answer is a greeting of version 1.
    let mut stream = connect(node.transport.local_address(), &hello(7, 1 << 20, 2000));
    assert!(is_closed(&mut stream));
    eventually("one protocol error", || node.transport.stats().protocol_errors == 1);
}
