//! Offers: blocks that a node proposes to its peer.

use std::time::Duration;

use reprise_policy::TenantName;
use reprise_policy::peer::{Offer, OfferId, PeerEvent, PeerOfferId};
use reprise_transport::limits::{KEYS_PER_OFFER_MAX, REQUESTS_PER_CONNECTION_MAX};
use reprise_transport::{ErrorKind, TransportEvent};

use crate::conformance::fixture::{Fixture, node, pair};
use crate::harness::{Block, FillOutcome, LATER, by_hand, key, serving, small_layout, wanted};

/// A deadline that passes during a test. The offer must arrive before, also on a busy machine.
const SOON: Duration = Duration::from_secs(1);

fn offer(number: u64, keys: u32, deadline: Duration) -> Offer<TenantName> {
    let tenant = "team-a".parse().expect("a name");
    Offer {
        offer: OfferId(number),
        layout: small_layout(),
        tenant,
        deadline,
        keys: (0..keys).map(key).collect(),
    }
}

fn answered(offer: u64, taken: &[u32], retry_after: Duration) -> TransportEvent {
    PeerEvent::OfferAnswered { offer: OfferId(offer), taken: taken.to_vec(), retry_after }.into()
}

pub(crate) fn an_offer_and_its_answer_arrive_unchanged(fixture: &dyn Fixture) {
    let (target, holder) = pair(fixture, by_hand());
    let made = offer(7, 20, LATER);
    holder.offer(&target, made.clone());
    let incoming = target.incoming_offer(fixture);
    assert_eq!(incoming.from, "requester");
    assert_eq!((incoming.tenant, incoming.layout, incoming.keys), (made.tenant, made.layout, made.keys));
    let wait = Duration::from_micros(1234);
    target.transport.answer_offer(incoming.offer, &[0, 9, 19], wait);
    assert_eq!(fixture.next(&holder.events), answered(7, &[0, 9, 19], wait));
    let stats = (holder.transport.stats(), target.transport.stats());
    assert_eq!((stats.0.offers, stats.0.offers_failed, stats.1.offers_received), (1, 0, 1));
}

pub(crate) fn an_offer_is_answered_only_once(fixture: &dyn Fixture) {
    let (target, holder) = pair(fixture, by_hand());
    holder.offer(&target, offer(1, 3, LATER));
    let first = target.incoming_offer(fixture).offer;
    // Indices beyond the offer are not keys.
    target.transport.answer_offer(first, &[2, 3, 99], Duration::ZERO);
    target.transport.answer_offer(first, &[0], Duration::ZERO);
    target.transport.answer_offer(PeerOfferId(first.0 + 1000), &[0], Duration::ZERO);
    assert_eq!(fixture.next(&holder.events), answered(1, &[2], Duration::ZERO));
    holder.offer(&target, offer(2, 3, LATER));
    let second = target.incoming_offer(fixture).offer;
    target.transport.answer_offer(second, &[], Duration::ZERO);
    assert_eq!(fixture.next(&holder.events), answered(2, &[], Duration::ZERO));
}

pub(crate) fn an_offer_without_an_answer_fails_at_its_deadline(fixture: &dyn Fixture) {
    let (target, holder) = pair(fixture, by_hand());
    holder.offer(&target, offer(1, 3, SOON));
    target.incoming_offer(fixture);
    assert_eq!(fixture.next(&holder.events), PeerEvent::OfferFailed { offer: OfferId(1) }.into());
    let stats = holder.transport.stats();
    assert_eq!((stats.offers_failed, stats.deadlines_passed, stats.stalls), (1, 1, 0));
}

pub(crate) fn an_answer_after_the_deadline_is_discarded(fixture: &dyn Fixture) {
    let (target, holder) = pair(fixture, by_hand());
    holder.offer(&target, offer(1, 3, SOON));
    let late = target.incoming_offer(fixture).offer;
    assert_eq!(fixture.next(&holder.events), PeerEvent::OfferFailed { offer: OfferId(1) }.into());
    target.transport.answer_offer(late, &[0], Duration::ZERO);
    holder.offer(&target, offer(2, 3, LATER));
    let next = target.incoming_offer(fixture).offer;
    target.transport.answer_offer(next, &[1], Duration::ZERO);
    assert_eq!(fixture.next(&holder.events), answered(2, &[1], Duration::ZERO));
}

pub(crate) fn a_peer_that_disappears_fails_its_offers(fixture: &dyn Fixture) {
    let (target, holder) = pair(fixture, by_hand());
    for number in 1..4 {
        holder.offer(&target, offer(number, 3, LATER));
        target.incoming_offer(fixture);
    }
    target.transport.shutdown();
    for number in 1..4 {
        assert_eq!(fixture.next(&holder.events), PeerEvent::OfferFailed { offer: OfferId(number) }.into());
    }
    target.transport.answer_offer(PeerOfferId(1), &[0], Duration::ZERO);
}

pub(crate) fn an_offer_to_an_absent_peer_fails(fixture: &dyn Fixture) {
    let holder = node(fixture, "holder", by_hand());
    holder.transport.offer(&fixture.nowhere(), offer(5, 1, LATER)).expect("the offer is accepted");
    assert_eq!(fixture.next(&holder.events), PeerEvent::OfferFailed { offer: OfferId(5) }.into());
}

pub(crate) fn offers_and_fetches_share_a_connection(fixture: &dyn Fixture) {
    let block = Block::new(1, small_layout());
    let (server, requester) = pair(fixture, serving(std::slice::from_ref(&block), 2));
    requester.offer(&server, offer(1, 5, LATER));
    let wanted = wanted(block.layout, &[block.key], 0, LATER);
    let (mut tracker, _) = requester.track(&server, wanted);
    let incoming = server.incoming_offer(fixture).offer;
    requester.finish(fixture, &mut tracker);
    assert!(matches!(tracker.outcomes[&0], FillOutcome::Arrived { .. }));
    server.transport.answer_offer(incoming, &[4], Duration::ZERO);
    assert_eq!(fixture.next(&requester.events), answered(1, &[4], Duration::ZERO));
    assert!(requester.transport.stats().connections_opened <= 1);
}

pub(crate) fn rejects_an_invalid_offer(fixture: &dyn Fixture) {
    let (target, holder) = pair(fixture, by_hand());
    for keys in [0, KEYS_PER_OFFER_MAX as u32 + 1] {
        let error = holder.transport.offer(&target.address, offer(1, keys, LATER)).expect_err("refused");
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
    }
    holder.transport.shutdown();
    let error = holder.transport.offer(&target.address, offer(1, 1, LATER)).expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}

pub(crate) fn rejects_offers_beyond_the_limit_as_busy(fixture: &dyn Fixture) {
    let (target, holder) = pair(fixture, by_hand());
    for number in 0..REQUESTS_PER_CONNECTION_MAX as u64 {
        holder.offer(&target, offer(number, 1, LATER));
    }
    let error = holder.transport.offer(&target.address, offer(9999, 1, LATER)).expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    let first = target.incoming_offer(fixture).offer;
    target.transport.answer_offer(first, &[0], Duration::ZERO);
    assert_eq!(fixture.next(&holder.events), answered(0, &[0], Duration::ZERO));
    holder.offer(&target, offer(9999, 1, LATER));
}
