//! Offers over real sockets: peers that are silent, slow, or send invalid data.

use std::io::Write;
use std::net::TcpStream;
use std::time::Duration;

use reprise_policy::TenantName;
use reprise_policy::peer::{Offer, OfferId, PeerEvent};
use reprise_transport::{Transport, TransportEvent};

use crate::harness::{LATER, by_hand, key, small_layout};
use crate::tcp::wire::{
    FakeServer, OFFER, OFFER_ANSWER, connect, good_hello, is_closed, read_frame, with_body,
};
use crate::tcp::{Node, eventually, impatient, node, settings, tolerant};

fn offer(keys: u32) -> Offer<TenantName> {
    let keys = (0..keys).map(key).collect();
    let tenant = "team-a".parse().expect("a name");
    Offer { offer: OfferId(3), layout: small_layout(), tenant, deadline: LATER, keys }
}

fn failed() -> TransportEvent {
    PeerEvent::OfferFailed { offer: OfferId(3) }.into()
}

/// The body of an answer to an offer of `keys` keys.
fn answer(keys: u32) -> Vec<u8> {
    let mut body = vec![0; 16 + keys.div_ceil(8) as usize];
    body[8..12].copy_from_slice(&keys.to_le_bytes());
    body
}

/// An offer of four keys to a server that the test simulates.
fn offered(node: &Node) -> (TcpStream, u64) {
    let server = FakeServer::new();
    node.transport.offer(&server.address(), offer(4)).expect("taken");
    let mut stream = server.accept_greeted();
    let frame = read_frame(&mut stream).expect("an offer");
    assert_eq!((frame.kind, frame.body.len()), (OFFER, 96 + 4 * 16));
    (stream, frame.stream)
}

#[test]
fn an_offer_to_a_peer_that_falls_silent_fails_after_the_stall_timeout() {
    let node = node(impatient(), by_hand());
    let (_silent, _) = offered(&node);
    assert_eq!(node.next(), failed());
    assert_eq!((node.transport.stats().stalls, node.transport.stats().offers_failed), (1, 1));
}

#[test]
fn an_offer_to_a_peer_that_disappears_fails_at_once() {
    let node = node(settings(), by_hand());
    let (stream, _) = offered(&node);
    drop(stream);
    assert_eq!(node.next(), failed());
    assert_eq!(node.transport.stats().stalls, 0);
}

#[test]
fn a_slow_answer_to_an_offer_is_not_a_stall() {
    let (holder, target) = (node(tolerant(), by_hand()), node(settings(), by_hand()));
    let address = target.address();
    holder.transport.offer(&address, offer(4)).expect("taken");
    let TransportEvent::Offer(incoming) = target.next() else { panic!("an offer") };
    // Longer than the stall timeout of the holder.
    let silence = tolerant().stall_timeout * 3 / 2;
    assert!(holder.events.recv_timeout(silence).is_err(), "nothing happens meanwhile");
    target.transport.answer_offer(incoming.offer, &[1], Duration::ZERO);
    let answered =
        PeerEvent::OfferAnswered { offer: OfferId(3), taken: vec![1], retry_after: Duration::ZERO }.into();
    assert_eq!(holder.next(), answered);
}

#[test]
fn an_answer_that_does_not_fit_the_offer_ends_the_connection() {
    for keys in [3, 0, 1025] {
        let node = node(settings(), by_hand());
        let (mut stream, number) = offered(&node);
        let _ = stream.write_all(&with_body(OFFER_ANSWER, number, 0, &answer(keys)));
        assert_eq!(node.next(), failed());
        assert!(is_closed(&mut stream), "{keys} keys");
        assert_eq!(node.transport.stats().protocol_errors, 1, "{keys} keys");
    }
}

#[test]
fn an_answer_without_an_offer_is_ignored() {
    let node = node(settings(), by_hand());
    let (mut stream, number) = offered(&node);
    stream.write_all(&with_body(OFFER_ANSWER, number + 7, 0, &answer(4))).expect("sent");
    stream.write_all(&with_body(OFFER_ANSWER, number, 0, &answer(4))).expect("sent");
    let none =
        PeerEvent::OfferAnswered { offer: OfferId(3), taken: vec![], retry_after: Duration::ZERO }.into();
    assert_eq!(node.next(), none);
}

#[test]
fn an_invalid_offer_ends_the_connection() {
    for (what, body) in [("too short", vec![0; 95]), ("no layout", vec![0; 112])] {
        let node = node(settings(), by_hand());
        let mut stream = connect(node.transport.local_address(), &good_hello());
        let _ = stream.write_all(&with_body(OFFER, 1, 0, &body));
        eventually(what, || node.transport.stats().protocol_errors == 1);
        assert!(is_closed(&mut stream), "{what}");
    }
}
