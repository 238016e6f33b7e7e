//! Blocks that do not arrive, nodes that disappear, rejected calls.

use std::sync::Arc;
use std::time::Duration;

use reprise_policy::peer::{FetchBlock, FetchId, FetchRequest, FillError, FillId, PeerEvent, ServeId};
use reprise_policy::{ArenaSlot, RegionId};
use reprise_policy::{TenantName, Tier};
use reprise_transport::ErrorKind;
use reprise_transport::limits::BLOCKS_PER_REQUEST_MAX;

use crate::conformance::fixture::{Fixture, node, pair};
use crate::harness::{
    Block, DESTINATIONS, FillOutcome, LATER, REGION_BYTES, SOURCES, Tracker, arena, by_hand, bytes_of,
    is_untouched, key, place, serving, small_layout, wanted,
};

/// A deadline that passes during a test. The request must arrive before, also on a busy machine.
const SOON: Duration = Duration::from_secs(1);

pub(crate) fn an_absent_block_fails_alone(fixture: &dyn Fixture) {
    let blocks: Vec<Block> = (0..3).map(|number| Block::new(number, small_layout())).collect();
    let (server, requester) = pair(fixture, serving(&[blocks[0].clone(), blocks[2].clone()], 2));
    let keys: Vec<_> = blocks.iter().map(|block| block.key).collect();
    let wanted = wanted(small_layout(), &keys, 0, LATER);
    let (tracker, places) = requester.fetch_all(fixture, &server, wanted);
    assert_eq!(tracker.outcomes[&1], FillOutcome::Failed(FillError::Absent));
    assert!(is_untouched(&places[1]));
    for index in [0, 2] {
        assert!(matches!(tracker.outcomes[&(index as u64)], FillOutcome::Arrived { .. }));
        assert!(bytes_of(&places[index]) == blocks[index].bytes[..]);
    }
    assert_eq!(requester.transport.stats().blocks_absent, 1);
}

pub(crate) fn a_block_may_become_absent_after_its_first_objects(fixture: &dyn Fixture) {
    let block = Block::new(1, small_layout());
    let serving = block.clone();
    let (server, requester) = pair(
        fixture,
        Arc::new(move |transport, request| {
            transport.serve_header(request.serve, 0, Tier::Nvme, &serving.checksums);
            transport.serve_objects(&serving.objects(request.serve, 0, (0, 3 * 4096), false));
            transport.serve_absent(request.serve, 0);
        }),
    );
    let wanted = wanted(block.layout, &[block.key], 0, LATER);
    let (tracker, _) = requester.fetch_all(fixture, &server, wanted);
    assert_eq!(tracker.outcomes[&0], FillOutcome::Failed(FillError::Absent));
    let serve = server.request(fixture).serve;
    assert_eq!(fixture.next(&server.events), PeerEvent::ServeDone { serve, block: 0 }.into());
}

pub(crate) fn a_wrong_checksum_fails_that_block_alone(fixture: &dyn Fixture) {
    let good = Block::new(1, small_layout());
    let mut bad = Block::new(2, small_layout());
    bad.checksums[4] ^= 1;
    let (server, requester) = pair(fixture, serving(&[good.clone(), bad.clone()], 1));
    let wanted = wanted(small_layout(), &[bad.key, good.key], 0, LATER);
    let (tracker, places) = requester.fetch_all(fixture, &server, wanted);
    assert_eq!(tracker.outcomes[&0], FillOutcome::Failed(FillError::Corrupt));
    assert!(matches!(tracker.outcomes[&1], FillOutcome::Arrived { .. }));
    assert!(bytes_of(&places[1]) == good.bytes[..]);
    // Objects behind the bad one were read and discarded.
    let after = bytes_of(&places[0]);
    assert!(after[5 * 4096..].iter().all(|byte| *byte == 0xa5));
    let stats = requester.transport.stats();
    assert_eq!((stats.blocks_corrupt, stats.protocol_errors), (1, 0));
    assert_eq!(stats.discarded_bytes, 3 * 4096);
}

pub(crate) fn a_passed_deadline_fails_the_block_and_aborts_the_serve(fixture: &dyn Fixture) {
    let (server, requester) = pair(fixture, by_hand());
    let wanted = wanted(small_layout(), &[key(1)], 3, SOON);
    let (mut tracker, places) = requester.track(&server, wanted);
    let serve = server.request(fixture).serve;
    requester.finish(fixture, &mut tracker);
    assert_eq!(tracker.outcomes[&3], FillOutcome::Failed(FillError::PeerLost));
    assert_eq!(fixture.next(&server.events), PeerEvent::ServeAborted { serve }.into());
    assert!(is_untouched(&places[0]));
    let stats = requester.transport.stats();
    assert_eq!((stats.deadlines_passed, stats.stalls, stats.blocks_lost), (1, 0, 1));
}

pub(crate) fn memory_of_an_aborted_serve_is_released(fixture: &dyn Fixture) {
    let (server, requester) = pair(fixture, by_hand());
    let block = Block::new(1, small_layout());
    requester.fetch(&server, wanted(block.layout, &[block.key], 0, SOON));
    let serve = server.request(fixture).serve;
    server.transport.serve_header(serve, 0, Tier::Dram, &block.checksums);
    // All objects except the last.
    for range in &block.ranges(1)[..7] {
        server.transport.serve_objects(&block.objects(serve, 0, *range, false));
    }
    // A part is in flight, and the deadline passes before the rest is sent.
    fixture.next(&requester.events);
    fixture.pass(SOON);
    assert_eq!(fixture.next(&server.events), PeerEvent::ServeAborted { serve }.into());
    assert!(
        !arena().regions()[usize::from(SOURCES.0)].is_lent(),
        "the transport still holds memory of an aborted serve"
    );
}

pub(crate) fn data_after_the_deadline_is_discarded(fixture: &dyn Fixture) {
    let blocks: Vec<Block> = (0..2).map(|number| Block::new(number, small_layout())).collect();
    let (server, requester) = pair(fixture, by_hand());
    let late = wanted(small_layout(), &[blocks[0].key], 0, SOON);
    let intime = wanted(small_layout(), &[blocks[1].key], 1, LATER);
    let mut tracker = Tracker::default();
    tracker.expect(&late.request);
    tracker.expect(&intime.request);
    let late_places = requester.fetch(&server, late);
    let places = requester.fetch(&server, intime);
    let (first, second) = (server.request(fixture).serve, server.request(fixture).serve);
    // Half of the late block before its deadline, the rest after it.
    server.transport.serve_header(first, 0, Tier::Dram, &blocks[0].checksums);
    server.transport.serve_objects(&blocks[0].objects(first, 0, (0, 4 * 4096), false));
    while !tracker.outcomes.contains_key(&0) {
        tracker.take(&fixture.next(&requester.events));
    }
    assert_eq!(tracker.outcomes[&0], FillOutcome::Failed(FillError::PeerLost));
    server.transport.serve_objects(&blocks[0].objects(first, 0, (4 * 4096, 4 * 4096), true));
    server.transport.serve_header(second, 0, Tier::Dram, &blocks[1].checksums);
    server.transport.serve_objects(&blocks[1].objects(second, 0, (0, 8 * 4096), true));
    requester.finish(fixture, &mut tracker);
    assert!(matches!(tracker.outcomes[&1], FillOutcome::Arrived { .. }));
    assert!(bytes_of(&places[0]) == blocks[1].bytes[..]);
    let after = bytes_of(&late_places[0]);
    assert!(after[4 * 4096..].iter().all(|byte| *byte == 0xa5), "written after its end");
}

pub(crate) fn a_server_that_disappears_fails_all_unfinished_blocks(fixture: &dyn Fixture) {
    let blocks: Vec<Block> = (0..3).map(|number| Block::new(number, small_layout())).collect();
    let (server, requester) = pair(fixture, by_hand());
    let keys: Vec<_> = blocks.iter().map(|block| block.key).collect();
    let wanted = wanted(small_layout(), &keys, 0, LATER);
    let (mut tracker, _) = requester.track(&server, wanted);
    let serve = server.request(fixture).serve;
    for block in [0, 1] {
        server.transport.serve_header(serve, block, Tier::Dram, &blocks[block as usize].checksums);
    }
    server.transport.serve_objects(&blocks[0].objects(serve, 0, (0, 8 * 4096), true));
    server.transport.serve_objects(&blocks[1].objects(serve, 1, (0, 4 * 4096), false));
    while !tracker.outcomes.contains_key(&0) {
        tracker.take(&fixture.next(&requester.events));
    }
    server.transport.shutdown();
    requester.finish(fixture, &mut tracker);
    assert!(matches!(tracker.outcomes[&0], FillOutcome::Arrived { .. }));
    assert_eq!(tracker.outcomes[&1], FillOutcome::Failed(FillError::PeerLost));
    assert_eq!(tracker.outcomes[&2], FillOutcome::Failed(FillError::PeerLost));
    assert_eq!(fixture.next(&server.events), PeerEvent::ServeDone { serve, block: 0 }.into());
    assert_eq!(fixture.next(&server.events), PeerEvent::ServeAborted { serve }.into());
}

pub(crate) fn a_requester_that_disappears_aborts_its_serves(fixture: &dyn Fixture) {
    let block = Block::new(1, small_layout());
    let (server, requester) = pair(fixture, by_hand());
    let (mut tracker, _) = requester.track(&server, wanted(small_layout(), &[block.key, key(2)], 0, LATER));
    let serve = server.request(fixture).serve;
    requester.transport.shutdown();
    requester.finish(fixture, &mut tracker);
    assert_eq!(tracker.outcomes[&0], FillOutcome::Failed(FillError::PeerLost));
    assert_eq!(fixture.next(&server.events), PeerEvent::ServeAborted { serve }.into());
    // The memory of an ended serve has no other owner.
    server.transport.serve_header(serve, 0, Tier::Dram, &block.checksums);
    server.transport.serve_objects(&block.objects(serve, 0, (0, 8 * 4096), true));
    assert_eq!(server.transport.stats().serves_aborted, 1);
}

pub(crate) fn an_address_without_a_listener_is_a_lost_peer(fixture: &dyn Fixture) {
    let requester = node(fixture, "requester", by_hand());
    let wanted = wanted(small_layout(), &[key(1), key(2)], 0, LATER);
    let mut tracker = Tracker::default();
    tracker.expect(&wanted.request);
    requester.transport.fetch(&fixture.nowhere(), wanted.request).expect("the fetch is accepted");
    requester.finish(fixture, &mut tracker);
    assert!(tracker.outcomes.values().all(|outcome| *outcome == FillOutcome::Failed(FillError::PeerLost)));
}

pub(crate) fn rejects_an_invalid_call(fixture: &dyn Fixture) {
    let (server, requester) = pair(fixture, by_hand());
    let layout = small_layout();
    let block = |into: ArenaSlot| FetchBlock { fill: FillId(0), key: key(0), into };
    let one = block(place(DESTINATIONS, layout.block_bytes()));
    let sized = |bytes: u64| block(ArenaSlot { bytes, ..one.into });
    let many =
        (0..=BLOCKS_PER_REQUEST_MAX as u64).map(|fill| FetchBlock { fill: FillId(fill), ..one }).collect();
    for blocks in [
        Vec::new(),
        many,
        vec![sized(layout.block_bytes() - 1)],
        vec![sized(layout.slot_bytes() + 1)],
        vec![block(ArenaSlot { region: RegionId(2), ..one.into })],
        vec![block(ArenaSlot { offset: REGION_BYTES - 4096, ..one.into })],
        vec![block(ArenaSlot { offset: u64::MAX, ..one.into })],
    ] {
        let request = FetchRequest {
            fetch: FetchId(0),
            tenant: TenantName::default_tenant(),
            layout,
            deadline: LATER,
            blocks,
        };
        let error = requester.transport.fetch(&server.address, request).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
}

pub(crate) fn after_shutdown_calls_are_rejected_or_ignored(fixture: &dyn Fixture) {
    let (server, requester) = pair(fixture, by_hand());
    requester.transport.shutdown();
    requester.transport.shutdown();
    let request = wanted(small_layout(), &[key(1)], 0, LATER).request;
    let error = requester.transport.fetch(&server.address, request).expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
    requester.transport.serve_absent(ServeId(1), 0);
}

pub(crate) fn invalid_serve_calls_report_the_block_absent(fixture: &dyn Fixture) {
    let block = Block::new(1, small_layout());
    let serving = block.clone();
    let (server, requester) = pair(
        fixture,
        Arc::new(move |transport, request| {
            let serve = request.serve;
            // 0: too few checksums. 1: objects before the header. 2: half an object. 3: outside the block.
            transport.serve_header(serve, 0, Tier::Dram, &serving.checksums[1..]);
            transport.serve_objects(&serving.objects(serve, 1, (0, 8 * 4096), true));
            transport.serve_header(serve, 2, Tier::Dram, &serving.checksums);
            transport.serve_objects(&serving.objects(serve, 2, (0, 4000), true));
            transport.serve_header(serve, 3, Tier::Dram, &serving.checksums);
            transport.serve_objects(&serving.objects(serve, 3, (4096, 8 * 4096), true));
            // 4: beyond the request; 5: valid, then more objects after the last.
            transport.serve_header(serve, 99, Tier::Dram, &serving.checksums);
            transport.serve_header(serve, 4, Tier::Dram, &serving.checksums);
            for _ in 0..2 {
                transport.serve_objects(&serving.objects(serve, 4, (0, 8 * 4096), true));
            }
            transport.serve_absent(serve, 4);
        }),
    );
    let wanted = wanted(block.layout, &[block.key; 5], 0, LATER);
    let (tracker, _) = requester.fetch_all(fixture, &server, wanted);
    for fill in 0..4 {
        assert_eq!(tracker.outcomes[&fill], FillOutcome::Failed(FillError::Absent), "block {fill}");
    }
    assert!(matches!(tracker.outcomes[&4], FillOutcome::Arrived { .. }));
}

pub(crate) fn serve_calls_for_unknown_requests_are_ignored(fixture: &dyn Fixture) {
    let block = Block::new(1, small_layout());
    let server = node(fixture, "server", serving(std::slice::from_ref(&block), 8));
    server.transport.serve_header(ServeId(77), 0, Tier::Dram, &block.checksums);
    server.transport.serve_objects(&block.objects(ServeId(77), 0, (0, 4096), false));
    server.transport.serve_absent(ServeId(77), 0);
    let requester = node(fixture, "requester", by_hand());
    let wanted = wanted(block.layout, &[block.key], 0, LATER);
    let (tracker, _) = requester.fetch_all(fixture, &server, wanted);
    assert!(matches!(tracker.outcomes[&0], FillOutcome::Arrived { .. }));
}
