//! Limits: credit, requests in flight, independence of requests.

use reprise_policy::Tier;
use reprise_transport::ErrorKind;
use reprise_transport::limits::REQUESTS_PER_CONNECTION_MAX;

use crate::conformance::fixture::{CREDIT_BYTES, Fixture, pair};
use crate::harness::{
    Block, FillOutcome, LATER, Tracker, by_hand, bytes_of, key, layout, serving, small_layout, wanted,
};

pub(crate) fn credit_limits_the_bytes_in_flight(fixture: &dyn Fixture) {
    // Objects of 16 KiB, blocks of 128 KiB: the credit is two blocks, and 64 are requested.
    let layout = layout(4, 512, 16);
    let blocks: Vec<Block> = (0..64).map(|number| Block::new(number, layout)).collect();
    let (server, requester) = pair(fixture, serving(&blocks, 8));
    let keys: Vec<_> = blocks.iter().map(|block| block.key).collect();
    let wanted = wanted(layout, &keys, 0, LATER);
    let (_, places) = requester.fetch_all(fixture, &server, wanted);
    for (block, span) in blocks.iter().zip(&places) {
        assert!(bytes_of(span) == block.bytes[..]);
    }
    let in_flight = server.transport.stats().in_flight_bytes_max;
    assert!(in_flight <= CREDIT_BYTES, "{in_flight} bytes in flight");
    // The credit is used.
    assert!(in_flight >= CREDIT_BYTES / 2, "{in_flight} bytes in flight");
}

pub(crate) fn rejects_requests_beyond_the_limit_as_busy(fixture: &dyn Fixture) {
    let (server, requester) = pair(fixture, by_hand());
    let mut tracker = Tracker::default();
    for fill in 0..REQUESTS_PER_CONNECTION_MAX as u64 {
        let wanted = wanted(small_layout(), &[key(0)], fill, LATER);
        tracker.expect(&wanted.request);
        requester.fetch(&server, wanted);
    }
    let request = wanted(small_layout(), &[key(0)], 9999, LATER).request;
    let error = requester.transport.fetch(&server.address, request).expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    // One request ends, and one more is accepted.
    let serve = server.request(fixture).serve;
    server.transport.serve_absent(serve, 0);
    tracker.take(&fixture.next(&requester.events));
    assert_eq!(tracker.outcomes.len(), 1);
    requester.fetch(&server, wanted(small_layout(), &[key(0)], 10_000, LATER));
}

pub(crate) fn a_silent_core_does_not_delay_other_requests_on_the_connection(fixture: &dyn Fixture) {
    let block = Block::new(1, small_layout());
    let (server, requester) = pair(fixture, by_hand());
    let silent = wanted(small_layout(), &[key(7)], 0, LATER);
    let served = wanted(small_layout(), &[block.key], 1, LATER);
    let mut tracker = Tracker::default();
    tracker.expect(&served.request);
    requester.fetch(&server, silent);
    let places = requester.fetch(&server, served);
    let (_, serve) = (server.request(fixture).serve, server.request(fixture).serve);
    server.transport.serve_header(serve, 0, Tier::Dram, &block.checksums);
    server.transport.serve_objects(&block.objects(serve, 0, (0, 8 * 4096), true));
    requester.finish(fixture, &mut tracker);
    assert!(matches!(tracker.outcomes[&1], FillOutcome::Arrived { .. }));
    assert!(bytes_of(&places[0]) == block.bytes[..]);
}
