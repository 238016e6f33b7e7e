//! Features of the in-memory hub beyond the conformance suite: faults, virtual time, determinism.

use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::Duration;

use crate::harness::{
    Block, FillOutcome, LATER, Serve, Tracker, TransportHandle, arena, by_hand, bytes_of, is_untouched,
    recording_sink, serving, small_layout, wanted,
};
use reprise_policy::ArenaSlot;
use reprise_policy::peer::{FillError, FillUpdate, PeerEvent};
use reprise_transport::{Fault, Link, MemoryHub, MemorySettings, MemoryTransport, Transport, TransportEvent};

const STALL_TIMEOUT: Duration = Duration::from_secs(2);

struct Node {
    transport: Arc<MemoryTransport>,
    events: Receiver<TransportEvent>,
}

fn hub() -> MemoryHub {
    MemoryHub::new(MemorySettings { credit_bytes: 1 << 20, stall_timeout: STALL_TIMEOUT })
}

fn join(hub: &MemoryHub, name: &str, serve: Serve) -> Node {
    let own = TransportHandle::default();
    let (sink, events) = recording_sink(&own, serve);
    let transport = Arc::new(hub.join(name, arena(), sink));
    let shared: Arc<dyn Transport> = transport.clone();
    own.set(&shared);
    Node { transport, events }
}

fn link() -> Link {
    Link { requester: "requester".into(), server: "server".into() }
}

fn blocks(count: u32) -> Vec<Block> {
    (0..count).map(|number| Block::new(number, small_layout())).collect()
}

/// Fetches all blocks, with fills from `fill` on.
fn fetch(node: &Node, blocks: &[Block], fill: u64) -> (Tracker, Vec<ArenaSlot>) {
    let keys: Vec<_> = blocks.iter().map(|block| block.key).collect();
    let wanted = wanted(small_layout(), &keys, fill, LATER);
    let mut tracker = Tracker::default();
    tracker.expect(&wanted.request);
    node.transport.fetch("server", wanted.request).expect("accepted");
    (tracker, wanted.places)
}

fn all_lost(tracker: &Tracker) -> bool {
    tracker.outcomes.values().all(|outcome| *outcome == FillOutcome::Failed(FillError::PeerLost))
}

fn all_arrived(tracker: &Tracker) -> bool {
    tracker.outcomes.values().all(|outcome| matches!(outcome, FillOutcome::Arrived { .. }))
}

/// Runs the hub until nothing moves, and takes the events of a node.
fn run(hub: &MemoryHub, node: &Node, tracker: &mut Tracker) {
    hub.run();
    drain(node, tracker);
}

fn drain(node: &Node, tracker: &mut Tracker) {
    for event in node.events.try_iter() {
        tracker.take(&event);
    }
}

#[test]
fn a_cut_fails_transfers_in_flight_and_rejects_new_ones_until_it_is_cleared() {
    let (hub, blocks) = (hub(), blocks(3));
    let server = join(&hub, "server", serving(&blocks, 2));
    let requester = join(&hub, "requester", by_hand());
    let (mut tracker, _) = fetch(&requester, &blocks, 0);
    // The request, then the first frames of the answer.
    for _ in 0..6 {
        assert!(hub.step());
    }
    hub.set_fault(&link(), Some(Fault::Cut));
    drain(&requester, &mut tracker);
    assert!(tracker.is_over());
    assert!(tracker.outcomes.values().any(|outcome| *outcome == FillOutcome::Failed(FillError::PeerLost)));
    let last = server.events.try_iter().last().expect("the serve was aborted");
    assert!(matches!(last, TransportEvent::Peer(PeerEvent::ServeAborted { .. })), "{last:?}");

    let (mut tracker, places) = fetch(&requester, &blocks, 10);
    run(&hub, &requester, &mut tracker);
    assert!(all_lost(&tracker));
    assert!(places.iter().all(is_untouched));

    hub.set_fault(&link(), None);
    let (mut tracker, places) = fetch(&requester, &blocks, 20);
    run(&hub, &requester, &mut tracker);
    assert!(all_arrived(&tracker));
    assert!(places.iter().zip(&blocks).all(|(span, block)| bytes_of(span) == block.bytes[..]));
}

#[test]
fn a_stall_is_a_lost_peer_after_the_stall_timeout_of_virtual_time() {
    let (hub, blocks) = (hub(), blocks(2));
    let server = join(&hub, "server", serving(&blocks, 2));
    let requester = join(&hub, "requester", by_hand());
    let (mut tracker, _) = fetch(&requester, &blocks, 0);
    assert!(hub.step());
    hub.set_fault(&link(), Some(Fault::Stall));
    assert!(!hub.step(), "nothing moves on a stalled channel");
    assert_eq!(hub.next_deadline(), Some(STALL_TIMEOUT));
    hub.advance(STALL_TIMEOUT - Duration::from_millis(1));
    drain(&requester, &mut tracker);
    assert!(tracker.outcomes.is_empty());
    hub.advance(Duration::from_millis(1));
    drain(&requester, &mut tracker);
    assert!(tracker.is_over());
    assert!(all_lost(&tracker));
    assert!(matches!(
        server.events.try_iter().last(),
        Some(TransportEvent::Peer(PeerEvent::ServeAborted { .. }))
    ));
    assert_eq!(requester.transport.stats().stalls, 1);
}

#[test]
fn a_serve_whose_requester_cannot_cancel_ends_a_stall_timeout_after_its_deadline() {
    let (hub, blocks) = (hub(), blocks(1));
    let server = join(&hub, "server", by_hand());
    let requester = join(&hub, "requester", by_hand());
    let deadline = STALL_TIMEOUT / 2;
    let wanted = wanted(small_layout(), &[blocks[0].key], 0, deadline);
    requester.transport.fetch("server", wanted.request).expect("accepted");
    hub.run();
    assert!(matches!(server.events.try_recv(), Ok(TransportEvent::Request { .. })));
    hub.set_fault(&link(), Some(Fault::Stall));
    hub.advance(deadline + STALL_TIMEOUT - Duration::from_millis(1));
    assert!(matches!(
        requester.events.try_recv(),
        Ok(TransportEvent::Peer(PeerEvent::Fill { update: FillUpdate::Failed(_), .. }))
    ));
    assert!(server.events.try_recv().is_err(), "it may still cancel");
    hub.advance(Duration::from_millis(1));
    assert!(matches!(server.events.try_recv(), Ok(TransportEvent::Peer(PeerEvent::ServeAborted { .. }))));
    assert_eq!(server.transport.stats().serves_aborted, 1);
    hub.set_fault(&link(), None);
    hub.run();
    assert!(server.events.try_recv().is_err(), "aborted once");
}

#[test]
fn a_stall_that_ends_in_time_has_no_effect() {
    let (hub, blocks) = (hub(), blocks(2));
    let _server = join(&hub, "server", serving(&blocks, 2));
    let requester = join(&hub, "requester", by_hand());
    hub.set_fault(&link(), Some(Fault::Stall));
    hub.advance(STALL_TIMEOUT * 3);
    // The clock of a stall starts with the first fetch that waits.
    let (mut tracker, _) = fetch(&requester, &blocks, 0);
    hub.advance(STALL_TIMEOUT / 2);
    hub.set_fault(&link(), None);
    run(&hub, &requester, &mut tracker);
    assert!(all_arrived(&tracker));
    assert_eq!(tracker.outcomes.len(), 2);
}

#[test]
fn a_corrupting_channel_delivers_no_block_until_it_is_repaired() {
    let (hub, blocks) = (hub(), blocks(2));
    let _server = join(&hub, "server", serving(&blocks, 8));
    let requester = join(&hub, "requester", by_hand());
    hub.set_fault(&link(), Some(Fault::Corrupt));
    let (mut tracker, _) = fetch(&requester, &blocks, 0);
    run(&hub, &requester, &mut tracker);
    assert!(tracker.outcomes.values().all(|outcome| *outcome == FillOutcome::Failed(FillError::Corrupt)));
    assert_eq!(requester.transport.stats().blocks_corrupt, 2);
    hub.set_fault(&link(), None);
    let (mut tracker, places) = fetch(&requester, &blocks, 10);
    run(&hub, &requester, &mut tracker);
    assert!(tracker.is_over());
    assert!(places.iter().zip(&blocks).all(|(span, block)| bytes_of(span) == block.bytes[..]));
}

#[test]
fn a_node_that_joins_again_has_lost_its_connections() {
    let (hub, blocks) = (hub(), blocks(2));
    let first = join(&hub, "server", by_hand());
    let requester = join(&hub, "requester", by_hand());
    let (mut tracker, _) = fetch(&requester, &blocks, 0);
    hub.run();
    let _second = join(&hub, "server", serving(&blocks, 8));
    drain(&requester, &mut tracker);
    assert!(all_lost(&tracker));
    // The old transport, still referenced, is no longer connected.
    first.transport.shutdown();
    let (mut tracker, _) = fetch(&requester, &blocks, 10);
    run(&hub, &requester, &mut tracker);
    assert!(all_arrived(&tracker));
}

#[test]
fn the_same_calls_produce_the_same_events() {
    let play = || {
        let (hub, blocks) = (hub(), blocks(6));
        let serve = serving(&blocks, 3);
        let names = ["a", "b", "server"];
        let nodes: Vec<Node> = names.iter().map(|name| join(&hub, name, serve.clone())).collect();
        for (index, node) in nodes[..2].iter().enumerate() {
            let keys: Vec<_> = blocks[index..].iter().map(|block| block.key).collect();
            let wanted = wanted(small_layout(), &keys, 100 * index as u64, Duration::from_secs(1));
            node.transport.fetch("server", wanted.request).expect("accepted");
        }
        for step in 0..40 {
            hub.step();
            if step == 20 {
                hub.advance(Duration::from_secs(2));
            }
        }
        hub.run();
        nodes.iter().map(|node| node.events.try_iter().collect::<Vec<_>>()).collect::<Vec<_>>()
    };
    let first = play();
    assert!(first[0].len() > 3, "{first:?}");
    assert_eq!(first, play());
}
