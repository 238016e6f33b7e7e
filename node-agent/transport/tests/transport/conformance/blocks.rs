//! Blocks that arrive completely.

use std::sync::Arc;

use reprise_policy::peer::{FillId, FillUpdate, PeerEvent};
use reprise_policy::{Layout, Tier};
use reprise_transport::TransportEvent;

use crate::conformance::fixture::{Fixture, pair};
use crate::harness::{
    Block, FillOutcome, LATER, Tracker, by_hand, bytes_of, key, layout, serving, small_layout, wanted,
};

fn blocks(layout: Layout, count: u32) -> Vec<Block> {
    (0..count).map(|number| Block::new(number, layout)).collect()
}

fn arrives(fixture: &dyn Fixture, layout: Layout, count: u32, objects: u32) {
    let blocks = blocks(layout, count);
    let (server, requester) = pair(fixture, serving(&blocks, objects));
    let keys: Vec<_> = blocks.iter().map(|block| block.key).collect();
    let wanted = wanted(layout, &keys, 100, LATER);
    let (tracker, places) = requester.fetch_all(fixture, &server, wanted);
    for ((fill, block), span) in (100..).zip(&blocks).zip(&places) {
        let expected = FillOutcome::Arrived { checksums: block.checksums.clone(), tier: Tier::Nvme };
        assert_eq!(tracker.outcomes[&fill], expected);
        assert!(bytes_of(span)[..block.bytes.len()] == block.bytes[..], "block {fill} differs");
    }
    let stats = requester.transport.stats();
    assert_eq!(stats.blocks_received, u64::from(count));
    assert_eq!(stats.received_bytes, u64::from(count) * layout.block_bytes());
    assert_eq!(stats.discarded_bytes, 0);
}

pub(crate) fn whole_blocks_arrive_byte_exact(fixture: &dyn Fixture) {
    arrives(fixture, small_layout(), 40, small_layout().objects());
}

pub(crate) fn ranges_of_any_size_arrive_byte_exact(fixture: &dyn Fixture) {
    // Objects of 1,260 bytes: nothing is aligned.
    let odd = layout(9, 70, 9);
    assert_eq!(odd.object_bytes(), 1260);
    for objects in [1, 3, 18] {
        arrives(fixture, odd, 5, objects);
    }
}

pub(crate) fn ranges_may_come_in_any_order_of_offsets(fixture: &dyn Fixture) {
    let block = Block::new(1, small_layout());
    let serving = block.clone();
    let (server, requester) = pair(
        fixture,
        Arc::new(move |transport, request| {
            transport.serve_header(request.serve, 0, Tier::Dram, &serving.checksums);
            let ranges = serving.ranges(1);
            for index in [5, 1, 0, 7, 2, 3, 6] {
                transport.serve_objects(&serving.objects(request.serve, 0, ranges[index], false));
            }
            transport.serve_objects(&serving.objects(request.serve, 0, ranges[4], true));
        }),
    );
    let wanted = wanted(block.layout, &[block.key], 0, LATER);
    let (tracker, places) = requester.fetch_all(fixture, &server, wanted);
    assert!(matches!(tracker.outcomes[&0], FillOutcome::Arrived { tier: Tier::Dram, .. }));
    assert!(bytes_of(&places[0]) == block.bytes[..]);
}

pub(crate) fn layers_are_reported_as_a_leading_run(fixture: &dyn Fixture) {
    let layers = |layers, checksums| {
        let update = FillUpdate::Layers { layers, checksums, tier: Tier::Dram };
        PeerEvent::Fill { fill: FillId(7), update }.into()
    };
    let block = Block::new(1, small_layout());
    let (server, requester) = pair(fixture, by_hand());
    let wanted = wanted(block.layout, &[block.key], 7, LATER);
    let places = requester.fetch(&server, wanted);
    let serve = server.request(fixture).serve;
    let ranges = block.ranges(1);
    let send = |index: usize, last| {
        server.transport.serve_objects(&block.objects(serve, 0, ranges[index], last));
    };
    server.transport.serve_header(serve, 0, Tier::Dram, &block.checksums);
    // Layer 1 whole and half of layer 0: no leading layer. Then the other half: two layers at once.
    send(2, false);
    send(3, false);
    send(1, false);
    send(0, false);
    let first = fixture.next(&requester.events);
    let checksums = Some(block.checksums.clone().into_boxed_slice());
    assert_eq!(first, layers(2, checksums));
    let verified = bytes_of(&places[0]);
    assert!(verified[..4 * 4096] == block.bytes[..4 * 4096]);
    // Layer 2, then layer 3.
    send(4, false);
    send(5, false);
    let second = fixture.next(&requester.events);
    assert_eq!(second, layers(3, None));
    send(7, false);
    send(6, true);
    let third = fixture.next(&requester.events);
    assert_eq!(third, layers(4, None));
    assert!(bytes_of(&places[0]) == block.bytes[..]);
}

pub(crate) fn the_padding_of_a_slot_is_zeroed(fixture: &dyn Fixture) {
    let odd = layout(3, 50, 7);
    let block = Block::new(1, odd);
    assert!(odd.slot_bytes() > odd.block_bytes());
    let (server, requester) = pair(fixture, serving(std::slice::from_ref(&block), 2));
    let wanted = wanted(odd, &[block.key], 0, LATER);
    let (_, places) = requester.fetch_all(fixture, &server, wanted);
    let bytes = bytes_of(&places[0]);
    assert!(bytes[..block.bytes.len()] == block.bytes[..]);
    assert!(bytes[block.bytes.len()..].iter().all(|byte| *byte == 0));
}

pub(crate) fn a_block_of_one_large_object_is_larger_than_the_credit(fixture: &dyn Fixture) {
    // One layer, two objects of 512 KiB, a credit of 256 KiB: frames of 64 KiB end inside objects.
    arrives(fixture, layout(1, 1024, 256), 3, 2);
}

pub(crate) fn every_block_of_a_request_is_reported_as_served_once(fixture: &dyn Fixture) {
    let blocks = blocks(small_layout(), 6);
    let (server, requester) = pair(fixture, serving(&blocks[..5], 3));
    let keys: Vec<_> = blocks.iter().map(|block| block.key).collect();
    let wanted = wanted(small_layout(), &keys, 0, LATER);
    let (mut tracker, _) = requester.track(&server, wanted);
    let request = server.request(fixture);
    assert_eq!((request.keys, request.layout), (keys, small_layout()));
    assert!(request.deadline <= LATER && request.deadline > LATER / 2);
    let mut done: Vec<u32> = (0..6)
        .map(|_| match fixture.next(&server.events) {
            TransportEvent::Peer(PeerEvent::ServeDone { serve, block }) if serve == request.serve => block,
            other => panic!("{other:?} instead of a served block"),
        })
        .collect();
    done.sort_unstable();
    assert_eq!(done, [0, 1, 2, 3, 4, 5]);
    requester.finish(fixture, &mut tracker);
    // No further event for the block: the next event belongs to another request.
    requester.fetch(&server, crate::harness::wanted(small_layout(), &[key(99)], 50, LATER));
    assert_ne!(server.request(fixture).serve, request.serve);
    assert_eq!(server.transport.stats().blocks_served, 5);
}

pub(crate) fn many_fetches_share_a_connection(fixture: &dyn Fixture) {
    let blocks = blocks(small_layout(), 16);
    let (server, requester) = pair(fixture, serving(&blocks, 1));
    let mut tracker = Tracker::default();
    let mut places = Vec::new();
    for fetch in 0..60u64 {
        let block = &blocks[fetch as usize % blocks.len()];
        let wanted = wanted(small_layout(), &[block.key], fetch, LATER);
        tracker.expect(&wanted.request);
        places.push((block, requester.fetch(&server, wanted)));
    }
    requester.finish(fixture, &mut tracker);
    for (block, places) in places {
        assert!(bytes_of(&places[0]) == block.bytes[..]);
    }
    assert!(requester.transport.stats().connections_opened <= 1);
}
