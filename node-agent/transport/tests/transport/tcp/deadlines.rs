//! Deadlines hold regardless of the other side and the sockets: for the requester, and for the memory of the
//! server.

use std::io::Write;
use std::time::{Duration, Instant};

use reprise_buffers::crc32c;
use reprise_policy::peer::{FetchBlock, FetchId, FetchRequest, FillId, PeerEvent, ServeId};
use reprise_policy::{TenantName, Tier};
use reprise_transport::{TcpSettings, Transport, TransportEvent, limits::BLOCKS_PER_REQUEST_MAX};

use crate::harness::{
    Block, FillOutcome, LATER, PATIENCE, Tracker, arena, by_hand, key, layout, marked_place, renew_arena,
    small_layout, wanted,
};
use crate::tcp::wire::{
    CREDIT, DATA, FakeServer, VERSION, block_header, connect, data, header, hello, read_frame, request_within,
};
use crate::tcp::{Node, assert_lost, large_block, node, settings, tolerant};

/// Deadline of the requests in these tests.
const DEADLINE: Duration = Duration::from_millis(300);

/// Deadline, stall timeout of `tolerant`, and the delay of a busy machine; below the time of the transfers.
const IN_TIME: Duration = PATIENCE;

/// Serves 128 blocks of 1 MiB.
fn serve_much(node: &Node, serve: ServeId, block: &Block) {
    for index in 0..128 {
        node.serve_block(serve, index, block);
    }
}

fn assert_aborted(node: &Node, serve: ServeId, started: Instant) {
    loop {
        match node.events.recv_timeout(PATIENCE).expect("an event") {
            TransportEvent::Peer(PeerEvent::ServeDone { .. }) => {}
            event => {
                assert_eq!(event, PeerEvent::ServeAborted { serve }.into());
                assert!(started.elapsed() < IN_TIME, "{:?}", started.elapsed());
                return;
            }
        }
    }
}

#[test]
fn a_requester_that_returns_credit_slowly_loses_its_request_and_keeps_its_connection() {
    let node = node(tolerant(), by_hand());
    let block = large_block();
    let window: u64 = 256 << 10;
    let mut stream = connect(node.transport.local_address(), &hello(VERSION, window, 5000));
    let started = Instant::now();
    let first = request_within(1, block.layout, &vec![key(0); 128], DEADLINE);
    stream.write_all(&first).expect("sent");
    let serve = node.serve_number();
    serve_much(&node, serve, &block);
    let mut answering = stream.try_clone().expect("a clone");
    let requester = std::thread::spawn(move || {
        loop {
            let frame = read_frame(&mut stream).expect("the connection stays");
            if frame.kind == DATA && frame.stream == 2 {
                return;
            }
            if frame.kind == DATA {
                // The requester's pace: it never stalls, but would need minutes for the whole transfer.
                std::thread::sleep(Duration::from_millis(100));
                stream.write_all(&header(CREDIT, frame.body.len() as u64, 0, 0, 0)).expect("sent");
            }
        }
    });
    assert_aborted(&node, serve, started);
    answering.write_all(&request_within(2, block.layout, &[key(0)], LATER)).expect("sent");
    let second = node.serve_number();
    node.transport.serve_header(second, 0, Tier::Dram, &block.checksums);
    node.transport.serve_objects(&block.objects(second, 0, (0, 64 << 10), false));
    requester.join().expect("the second request is served");
}

#[test]
fn a_requester_that_reads_slowly_loses_its_connection() {
    let node = node(TcpSettings { socket_buffer_bytes: Some(32 << 10), ..tolerant() }, by_hand());
    let block = large_block();
    let mut stream = connect(node.transport.local_address(), &hello(VERSION, 1 << 30, 5000));
    let started = Instant::now();
    let request = request_within(1, block.layout, &vec![key(0); 128], DEADLINE);
    stream.write_all(&request).expect("sent");
    let serve = node.serve_number();
    serve_much(&node, serve, &block);
    std::thread::spawn(move || {
        let mut buffer = vec![0; 32 << 10];
        while matches!(std::io::Read::read(&mut stream, &mut buffer), Ok(bytes) if bytes > 0) {
            // The requester's pace: the server's socket accepts some bytes in every stall timeout.
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    assert_aborted(&node, serve, started);
    assert!(started.elapsed() > DEADLINE, "{:?}: ended for another reason", started.elapsed());
}

#[test]
fn a_fetch_behind_a_long_one_on_the_same_connection_ends_at_its_deadline() {
    // 32 objects of 1 MiB, all zero. The sink is slow, so there is always more to read.
    let layout = layout(16, 4096, 128);
    renew_arena(2 * layout.slot_bytes());
    let zeroes = vec![0; layout.object_bytes() as usize];
    let checksums = vec![crc32c(&zeroes); layout.objects() as usize];
    let (sender, events) = std::sync::mpsc::channel();
    let sink: reprise_transport::EventSink = std::sync::Arc::new(move |event| {
        std::thread::sleep(DEADLINE / 2);
        let _ = sender.send(event);
    });
    let transport = reprise_transport::TcpTransport::bind(settings(), arena(), sink).expect("loopback");
    let server = FakeServer::new();
    let mut tracker = Tracker::default();
    for (fill, deadline) in [(0, LATER), (1, DEADLINE)] {
        let wanted = wanted(layout, &[key(0)], fill, deadline);
        tracker.expect(&wanted.request);
        transport.fetch(&server.address(), wanted.request).expect("taken");
    }
    let (mut stream, number) = server.accept_request();
    let sending = std::thread::spawn(move || {
        stream.write_all(&block_header(number, 0, &checksums)).expect("sent");
        for object in 0..layout.objects() {
            let offset = object * layout.object_bytes() as u32;
            stream.write_all(&data(number, 0, offset, &zeroes)).expect("sent");
        }
        stream
    });
    while !tracker.outcomes.contains_key(&1) {
        assert!(!tracker.outcomes.contains_key(&0), "the long fetch ended first");
        tracker.take(&events.recv_timeout(PATIENCE).expect("an event"));
    }
    assert_lost(&tracker, 1);
    while !tracker.is_over() {
        tracker.take(&events.recv_timeout(PATIENCE).expect("an event"));
    }
    assert!(matches!(tracker.outcomes[&0], FillOutcome::Arrived { .. }));
    drop(sending.join().expect("everything was sent"));
}

#[test]
fn a_fetch_ends_at_its_deadline_while_requests_cannot_be_sent() {
    let node = node(TcpSettings { socket_buffer_bytes: Some(16 << 10), ..settings() }, by_hand());
    let server = FakeServer::new();
    let started = Instant::now();
    // It greets and reads one request only: the others, of 128 KiB each, do not fit the sockets.
    let (mut tracker, _) = node.fetch(&server.address(), 1);
    let (_stream, _) = server.accept_request();
    let into = marked_place(small_layout().slot_bytes());
    for fetch in 1..4 {
        let fills = (0..BLOCKS_PER_REQUEST_MAX as u64 - 1).map(|index| fetch * 10_000 + index);
        let blocks = fills.map(|fill| FetchBlock { fill: FillId(fill), key: key(0), into }).collect();
        let request = FetchRequest {
            fetch: FetchId(fetch),
            tenant: TenantName::default_tenant(),
            layout: small_layout(),
            deadline: DEADLINE,
            blocks,
        };
        tracker.expect(&request);
        node.transport.fetch(&server.address(), request).expect("taken");
    }
    while tracker.outcomes.len() < 3 * (BLOCKS_PER_REQUEST_MAX - 1) {
        tracker.take(&node.next());
    }
    assert!(started.elapsed() < IN_TIME, "{:?}: a stall timeout late", started.elapsed());
    assert!(!tracker.outcomes.contains_key(&0));
}
