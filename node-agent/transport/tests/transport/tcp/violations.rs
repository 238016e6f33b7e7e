//! Peers that violate the protocol: the connection is closed, the error counted, other connections are
//! unaffected.

use std::io::Write;
use std::net::TcpStream;

use reprise_transport::Transport;

use crate::harness::{Block, FillOutcome, by_hand, bytes_of, is_untouched, serving, small_layout};
use crate::tcp::wire::{
    ABSENT, ALIVE, BLOCK_HEADER, CREDIT, DATA, FakeServer, REQUEST, VERSION, block_header, connect, data,
    good_hello, header, hello, is_closed, request, with_body,
};
use crate::tcp::{assert_lost, eventually, node, settings};

/// The frames of a server must end the connection as a protocol error and write nothing into the second
/// block.
fn requester_rejects(what: &str, bytes: impl FnOnce(u64, &Block) -> Vec<u8>) {
    let node = node(settings(), by_hand());
    let server = FakeServer::new();
    let (mut tracker, places) = node.fetch(&server.address(), 2);
    let (mut stream, number) = server.accept_request();
    let block = Block::new(0, small_layout());
    // The other side may close before it has read everything.
    let _ = stream.write_all(&bytes(number, &block));
    node.finish(&mut tracker);
    assert_lost(&tracker, 1);
    assert!(is_untouched(&places[1]), "{what}");
    assert!(is_closed(&mut stream), "{what}");
    assert_eq!(node.transport.stats().protocol_errors, 1, "{what}");
}

#[test]
fn a_requester_rejects_invalid_frames() {
    requester_rejects("wrong magic", |_, _| {
        let mut frame = header(ALIVE, 0, 0, 0, 0);
        frame[0] = b'X';
        frame.to_vec()
    });
    requester_rejects("wrong checksum", |_, _| {
        let mut frame = header(ALIVE, 0, 0, 0, 0);
        frame[20] ^= 4;
        frame.to_vec()
    });
    requester_rejects("unknown kind", |_, _| header(77, 0, 0, 0, 0).to_vec());
    requester_rejects("frame of a requester", |number, _| header(CREDIT, number, 0, 0, 0).to_vec());
    requester_rejects("wrong checksum of a body", |number, block| {
        let mut frame = block_header(number, 0, &block.checksums);
        *frame.last_mut().expect("it has bytes") ^= 1;
        frame
    });
}

#[test]
fn a_requester_rejects_too_long_frames() {
    requester_rejects("data", |number, _| header(DATA, number, 0, 0, (8 << 20) + 1).to_vec());
    requester_rejects("block header", |number, _| {
        header(BLOCK_HEADER, number, 0, 0, 4 + 960 * 4 + 1).to_vec()
    });
    requester_rejects("absent", |number, _| header(ABSENT, number, 0, 0, 1).to_vec());
    requester_rejects("all ones", |number, _| header(DATA, number, 0, u32::MAX, u32::MAX).to_vec());
}

#[test]
fn a_requester_rejects_data_that_does_not_fit_its_block() {
    let headed = |number: u64, block: &Block, then: Vec<u8>| {
        [block_header(number, 0, &block.checksums), then].concat()
    };
    requester_rejects("beyond the block", |number, block| {
        headed(number, block, data(number, 0, 7 * 4096, &block.bytes[..2 * 4096]))
    });
    requester_rejects("offset near the end of 32 bits", |number, block| {
        headed(number, block, data(number, 0, u32::MAX - 4095, &block.bytes[..4096]))
    });
    requester_rejects("inside an object", |number, block| {
        headed(number, block, data(number, 0, 100, &block.bytes[..4096]))
    });
    requester_rejects("empty", |number, block| headed(number, block, data(number, 0, 0, &[])));
    requester_rejects("twice", |number, block| {
        let once = data(number, 0, 0, &block.bytes[..4096]);
        headed(number, block, [once.clone(), once].concat())
    });
    requester_rejects("over a received object", |number, block| {
        let second = data(number, 0, 4096, &block.bytes[4096..8192]);
        headed(number, block, [second, data(number, 0, 0, &block.bytes[..8192])].concat())
    });
    requester_rejects("before the header", |number, block| data(number, 0, 0, &block.bytes));
    requester_rejects("unknown block", |number, block| data(number, 2, 0, &block.bytes));
    requester_rejects("header of an unknown block", |number, block| {
        block_header(number, 9, &block.checksums)
    });
    requester_rejects("second header", |number, block| {
        headed(number, block, block_header(number, 0, &block.checksums))
    });
    requester_rejects("too few checksums", |number, block| block_header(number, 0, &block.checksums[1..]));
    requester_rejects("unknown tier", |number, _| with_body(BLOCK_HEADER, number, 0, &[9, 0, 0, 0]));
}

#[test]
fn a_requester_rejects_foreign_greetings() {
    let mut garbage = good_hello();
    garbage[..8].copy_from_slice(b"HTTP/1.1");
    let mut damaged = good_hello();
    damaged[40] ^= 1;
    for greeting in [
        garbage,
        damaged,
        hello(VERSION + 1, 1 << 20, 2000),
        hello(VERSION, 0, 2000),
        hello(VERSION, 1 << 20, 0),
    ] {
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
fn frames_of_unknown_requests_and_ended_blocks_are_discarded() {
    let node = node(settings(), by_hand());
    let server = FakeServer::new();
    let (mut tracker, places) = node.fetch(&server.address(), 2);
    let (mut stream, number) = server.accept_request();
    let block = Block::new(0, small_layout());
    let mut send = |bytes: Vec<u8>| stream.write_all(&bytes).expect("still connected");
    send(header(ABSENT, number, 1, 0, 0).to_vec());
    // For a request that never existed, and for the block that has ended.
    send(block_header(number + 5, 0, &block.checksums));
    send(data(number + 5, 0, 0, &block.bytes));
    send(header(ABSENT, number + 5, 7, 0, 0).to_vec());
    send(block_header(number, 1, &block.checksums));
    send(data(number, 1, 0, &block.bytes));
    send(block_header(number, 0, &block.checksums));
    send(data(number, 0, 0, &block.bytes));
    node.finish(&mut tracker);
    assert!(matches!(tracker.outcomes[&0], FillOutcome::Arrived { .. }));
    assert!(bytes_of(&places[0]) == block.bytes[..]);
    assert!(is_untouched(&places[1]));
    let stats = node.transport.stats();
    assert_eq!((stats.discarded_bytes, stats.protocol_errors), (2 * 8 * 4096, 0));
}

/// The frames of a requester must end the connection as a protocol error; the node continues to serve others.
fn server_rejects(what: &str, bytes: impl FnOnce(&mut TcpStream)) {
    let block = Block::new(0, small_layout());
    let node = node(settings(), serving(std::slice::from_ref(&block), 8));
    let mut stream = connect(node.transport.local_address(), &good_hello());
    bytes(&mut stream);
    assert!(is_closed(&mut stream), "{what}");
    let requester = crate::tcp::node(settings(), by_hand());
    let (mut tracker, _) = requester.fetch(&node.address(), 1);
    requester.finish(&mut tracker);
    assert!(matches!(tracker.outcomes[&0], FillOutcome::Arrived { .. }), "{what}");
    eventually(what, || node.transport.stats().protocol_errors == 1);
}

#[test]
fn a_server_rejects_invalid_requests() {
    let layout = small_layout();
    let keys = [crate::harness::key(0)];
    let send = |bytes: Vec<u8>| move |stream: &mut TcpStream| drop(stream.write_all(&bytes));
    server_rejects("garbage", send(vec![0x42; 500]));
    server_rejects("frame of a server", send(header(ALIVE, 0, 0, 0, 0).to_vec()));
    server_rejects("too long", send(header(REQUEST, 1, 0, 0, 96 + 16 * 8192 + 1).to_vec()));
    server_rejects("no keys", send(request(1, layout, &[])));
    server_rejects("more credit than the window", send(header(CREDIT, 1, 0, 0, 0).to_vec()));
    server_rejects(
        "number in use",
        send([request(1, layout, &keys), request(1, layout, &keys)].concat().repeat(40)),
    );
    let mut torn = request(1, layout, &keys)[32..].to_vec();
    torn.pop();
    server_rejects("incomplete key", send(with_body(REQUEST, 1, 0, &torn)));
    let mut zeroed = request(1, layout, &keys)[32..].to_vec();
    zeroed[..16].fill(0);
    server_rejects("no layout", send(with_body(REQUEST, 1, 0, &zeroed)));
}

#[test]
fn garbage_on_the_port_is_counted_and_has_no_other_effect() {
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
fn a_peer_of_another_version_gets_our_version_before_it_is_rejected() {
    let node = node(settings(), by_hand());
    // `connect` checks that the answer is a greeting of its version.
    let mut stream = connect(node.transport.local_address(), &hello(7, 1 << 20, 2000));
    assert!(is_closed(&mut stream));
    eventually("one protocol error", || node.transport.stats().protocol_errors == 1);
}
