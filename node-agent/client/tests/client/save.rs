//! Saves: reserve, fill, commit, durable notices.

use std::sync::mpsc;
use std::time::Duration;

use crate::fake_agent::{FakeAgent, Grant, LONG, Peer, block_bytes, key, layout, place};
use bytes::Bytes;
use reprise_buffers::crc32c;
use reprise_client::{ClientError, CommitOptions, CommitStatus, DurableOutcome, Priority, Reservation};
use reprise_proto::local::{self, request, response};

fn expect_abort(peer: &mut Peer) -> (u64, Vec<u64>) {
    match peer.expect("abort") {
        (id, request::Body::Abort(abort)) => (id, abort.leases),
        (_, other) => panic!("expected abort, got {other:?}"),
    }
}

fn reply_committed(peer: &mut Peer, id: u64, ticket: u64, blocks: usize) {
    peer.reply_committed(id, ticket, &vec![local::CommitStatus::Committed; blocks]);
}

fn send_durable(peer: &mut Peer, ticket: u64, lost: &[u8]) {
    let notice = local::Durable { ticket, durable: 1, lost_keys: Bytes::copy_from_slice(lost) };
    peer.reply(0, response::Body::Durable(notice));
}

fn fill(reservation: &mut Reservation, number: u8) {
    let bytes = block_bytes(number);
    let objects: Vec<&[u8]> = bytes.chunks(layout().object_bytes() as usize).collect();
    reservation.fill_from(&objects).expect("a whole block");
}

#[test]
fn a_filled_block_reaches_the_arena_with_checksums_and_zero_padding() {
    let agent = FakeAgent::serve(|peer| {
        let slot = layout().slot_bytes();
        let dirty = peer.arena.span(0, 0, slot).expect("the first slot");
        dirty.copy_in(&vec![0xee; slot as usize]).expect("writable");
        let (id, count) = peer.expect_reserve();
        assert_eq!(count, 1);
        peer.reply_reserved(id, 1, Grant::First);
        let (id, commit) = peer.expect_commit();
        let mut found = vec![0; slot as usize];
        dirty.copy_out(&mut found);
        let expected = block_bytes(9);
        assert_eq!(found[..expected.len()], expected);
        assert!(found[expected.len()..].iter().all(|byte| *byte == 0), "padding is zero");
        assert_eq!(commit.priority, 1);
        let item = &commit.items[0];
        assert_eq!((item.lease, item.key.as_ref()), (1, [4; 16].as_slice()));
        let checksums: Vec<u8> = expected
            .chunks(layout().object_bytes() as usize)
            .flat_map(|object| crc32c(object).to_le_bytes())
            .collect();
        assert_eq!(item.checksums, checksums);
        reply_committed(peer, id, 11, 1);
        assert!(peer.receive().is_none(), "a committed reservation is not aborted");
    });
    let client = agent.connect();
    let mut reserved = client.reserve(1, LONG).expect("a slot");
    let mut reservation = reserved.remove(0);
    fill(&mut reservation, 9);
    let outcome = client
        .commit(
            vec![(reservation, key(4))],
            CommitOptions { priority: Priority::High, ..CommitOptions::default() },
        )
        .expect("committed");
    assert_eq!(outcome.statuses, [CommitStatus::Committed]);
    agent.end(client);
}

#[test]
fn a_block_written_through_the_span_gets_the_same_checksums() {
    let agent = FakeAgent::serve(|peer| {
        peer.give_slots(2, Grant::First);
        let (id, commit) = peer.expect_commit();
        assert_eq!(commit.items[0].checksums, commit.items[1].checksums);
        reply_committed(peer, id, 1, 2);
    });
    let client = agent.connect();
    let mut reserved = client.reserve(2, LONG).expect("slots");
    let mut second = reserved.pop().expect("two slots");
    let mut first = reserved.pop().expect("two slots");
    fill(&mut first, 3);
    second.span().copy_in(&block_bytes(3)).expect("writable");
    second.checksum_written().expect("readable");
    client.commit(vec![(first, key(1)), (second, key(2))], CommitOptions::default()).expect("committed");
    agent.join();
}

#[test]
fn reserve_retries_until_a_full_arena_has_room() {
    let agent = FakeAgent::serve(|peer| {
        peer.give_slots(0, Grant::Known);
        let (id, _) = peer.expect_reserve();
        let busy = local::Failure { kind: local::FailureKind::Busy as i32, message: "queue".into() };
        peer.reply(id, response::Body::Failure(busy));
        peer.give_slots(2, Grant::First);
    });
    let reserved = agent.connect().reserve(8, LONG).expect("slots after a while");
    assert_eq!(reserved.len(), 2, "as many as are free");
    agent.join();
}

#[test]
fn reserve_is_empty_when_the_arena_stays_full() {
    let agent = FakeAgent::serve(|peer| {
        while let Some((id, _)) = peer.receive() {
            peer.reply_reserved(id, 0, Grant::Known);
        }
    });
    let client = agent.connect();
    assert!(client.reserve(1, Duration::from_millis(15)).expect("an answer").is_empty());
    agent.end(client);
}

#[test]
fn a_dropped_reservation_is_aborted() {
    let agent = FakeAgent::serve(|peer| {
        peer.give_slots(1, Grant::First);
        assert_eq!(expect_abort(peer).1, [1]);
    });
    let client = agent.connect();
    drop(client.reserve(1, LONG).expect("a slot"));
    agent.join();
}

#[test]
fn reservations_dropped_one_by_one_are_aborted_with_few_messages() {
    const SLOTS: u32 = 300;
    let (dropped, all_dropped) = mpsc::channel::<()>();
    let (all_seen, seen_by_agent) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        peer.give_slots(SLOTS, Grant::First);
        let (id, first) = expect_abort(peer);
        assert_eq!(first, [1], "the first is sent at once");
        all_dropped.recv().expect("the test sends the signal");
        peer.reply(id, response::Body::Aborted(local::Aborted {}));
        let (_, others) = expect_abort(peer);
        assert_eq!(others, (2..=u64::from(SLOTS)).collect::<Vec<_>>(), "all others with one message");
        all_seen.send(()).expect("the test waits");
        assert!(peer.receive().is_none(), "nothing else is sent");
    });
    let client = agent.connect();
    let reserved = client.reserve(SLOTS, LONG).expect("slots");
    assert_eq!(reserved.len(), SLOTS as usize);
    reserved.into_iter().for_each(drop);
    dropped.send(()).expect("the agent lives");
    seen_by_agent.recv().expect("the agent lives");
    agent.end(client);
}

#[test]
fn a_dropped_slot_is_released_before_the_next_reserve() {
    let agent = FakeAgent::serve(|peer| {
        peer.give_slots(3, Grant::First);
        assert_eq!(expect_abort(peer).1, [1]);
        assert_eq!(expect_abort(peer).1, [2, 3], "although the first is unanswered");
        peer.give_slots(1, Grant::Known);
    });
    let client = agent.connect();
    client.reserve(3, LONG).expect("slots").into_iter().for_each(drop);
    assert_eq!(client.reserve(1, LONG).expect("a slot").len(), 1);
    agent.join();
}

#[test]
fn an_unfilled_reservation_cannot_be_committed_and_is_released() {
    let agent = FakeAgent::serve(|peer| {
        peer.give_slots(1, Grant::First);
        assert!(matches!(peer.expect("abort"), (_, request::Body::Abort(_))));
    });
    let client = agent.connect();
    let mut reservation = client.reserve(1, LONG).expect("a slot").remove(0);
    let object = vec![1; layout().object_bytes() as usize];
    reservation.fill_object(0, &object).expect("an object");
    assert!(matches!(reservation.fill_object(4, &object), Err(ClientError::BadRequest(_))));
    assert!(matches!(reservation.fill_object(1, &object[1..]), Err(ClientError::BadRequest(_))));
    let error = client.commit(vec![(reservation, key(1))], CommitOptions::default()).expect_err("not filled");
    assert!(matches!(&error, ClientError::BadRequest(text) if text.contains("object 1")), "{error}");
    agent.join();
}

#[test]
fn a_durable_notice_may_arrive_before_or_after_the_wait() {
    let agent = FakeAgent::serve(|peer| {
        peer.give_slots(2, Grant::First);
        let (id, _) = peer.expect_commit();
        send_durable(peer, 1, &[]);
        reply_committed(peer, id, 1, 1);
        let (id, _) = peer.expect_commit();
        reply_committed(peer, id, 2, 1);
        // Only a call that waits, for an unknown outcome, reports that to the agent.
        let (id, body) = peer.expect("a wait");
        assert!(matches!(body, request::Body::AwaitDurable(local::AwaitDurable { ticket: 2 })), "{body:?}");
        peer.reply(id, response::Body::DurableAwaited(local::DurableAwaited {}));
        send_durable(peer, 2, &[6; 16]);
    });
    let client = agent.connect();
    let mut reserved = client.reserve(2, LONG).expect("slots");
    reserved.iter_mut().for_each(|reservation| fill(reservation, 1));
    let mut commit = |number| {
        let item = (reserved.remove(0), key(number));
        client.commit(vec![item], CommitOptions::default()).expect("committed").ticket
    };
    let early = commit(5);
    assert_eq!(client.wait_durable(early, LONG).expect("the notice arrived before").durable, 1);
    let late = commit(6);
    let none_yet = client.wait_durable(late, Duration::ZERO).expect_err("no notice yet");
    assert!(matches!(none_yet, ClientError::Timeout { .. }), "{none_yet}");
    let outcome = client.wait_durable(late, LONG).expect("the notice arrives");
    assert_eq!(outcome, DurableOutcome { durable: 1, lost_keys: vec![key(6)] });
    agent.join();
}

#[test]
fn the_death_of_the_agent_ends_a_wait_for_a_durable_notice() {
    let agent = FakeAgent::serve(|_| ());
    let client = agent.connect();
    let error = client.wait_durable(reprise_client::Ticket(1), LONG).expect_err("the agent has died");
    assert!(matches!(error, ClientError::AgentLost { .. }), "{error}");
    agent.join();
}

#[test]
fn a_lease_outside_the_region_ends_the_session() {
    let agent = FakeAgent::serve(|peer| {
        let (id, _) = peer.expect_reserve();
        let end = peer.arena.regions()[0].bytes();
        let reserved = local::Reserved {
            regions: vec![peer.grant(true)],
            leases: vec![local::Lease { lease: 1, place: Some(place(end)) }],
            ..local::Reserved::default()
        };
        let region = &peer.arena.regions()[0];
        let fds = [region.writable_fd()];
        peer.reply_with(id, response::Body::Reserved(reserved), &fds);
        assert!(peer.receive().is_none(), "the client closes");
    });
    let error = agent.connect().reserve(1, LONG).expect_err("a wild place");
    assert!(matches!(error, ClientError::Protocol(_)), "{error}");
    agent.join();
}

#[test]
fn a_lease_of_an_extent_in_place_of_a_slot_ends_the_session() {
    let agent = FakeAgent::serve(|peer| {
        let (id, _) = peer.expect_reserve();
        let extent = local::Extent { bytes: peer.arena.regions()[0].bytes(), ..local::Extent::default() };
        let place = local::Place { extent: Some(extent), ..place(0) };
        let reserved = local::Reserved {
            regions: vec![peer.grant(true)],
            leases: vec![local::Lease { lease: 1, place: Some(place) }],
            ..local::Reserved::default()
        };
        let region = &peer.arena.regions()[0];
        let fds = [region.writable_fd()];
        peer.reply_with(id, response::Body::Reserved(reserved), &fds);
        assert!(peer.receive().is_none(), "the client closes");
    });
    let error = agent.connect().reserve(1, LONG).expect_err("a place of the wrong kind");
    assert!(matches!(error, ClientError::Protocol(_)), "{error}");
    agent.join();
}
