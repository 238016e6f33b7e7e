//! The outbox against what the module says, with the member's part played by the test.

use std::ops::Range;

use super::*;
use crate::effect::Change;

const NODE: NodeId = NodeId(7);
const EPOCH: Epoch = Epoch(3);

/// Keys of one slot for each number.
fn key(number: u32) -> BlockKey {
    let mut key = [0; 16];
    key[..2].copy_from_slice(&((number % 4096) as u16).rotate_left(4).to_be_bytes());
    key[4..8].copy_from_slice(&number.to_be_bytes());
    BlockKey(key)
}

fn slots(numbers: Range<u32>) -> SlotSet {
    numbers.map(|number| key(number).hash_slot()).collect()
}

fn added(numbers: Range<u32>) -> Vec<ReplicaChange> {
    numbers
        .map(|number| ReplicaChange { key: key(number), tier: Tier::Nvme, change: Change::Added })
        .collect()
}

fn held(numbers: Range<u32>) -> Vec<(BlockKey, Tier)> {
    numbers.map(|number| (key(number), Tier::Dram)).collect()
}

/// Registered, and the member's slots followed: it owns some and wants them all.
fn asked(limit: usize, owned: &SlotSet) -> Outbox {
    let mut outbox = Outbox::new(limit);
    outbox.grant(NODE, EPOCH);
    assert_eq!(outbox.next_step(), Next::Standing(NODE, EPOCH));
    outbox.follow(EPOCH, 1, owned, owned);
    outbox
}

/// As `asked`, with an empty inventory announced.
fn flowing(limit: usize) -> Outbox {
    let mut outbox = asked(limit, &SlotSet::ALL);
    assert_eq!(outbox.next_step(), Next::Inventory(Box::new(SlotSet::ALL)));
    outbox.inventory(&SlotSet::ALL, &[]);
    acknowledge(&mut outbox);
    outbox
}

fn sent(outbox: &mut Outbox) -> Arc<Batch> {
    match outbox.next_step() {
        Next::Send(batch) => batch,
        other => panic!("{other:?} instead of a batch"),
    }
}

fn acknowledge(outbox: &mut Outbox) -> Arc<Batch> {
    let batch = sent(outbox);
    let answer = Answer::Expecting(batch.sequence + batch.numbers());
    assert_eq!(outbox.answered(batch.epoch, batch.sequence, answer), Outcome::Applied(batch.len()));
    batch
}

#[test]
fn an_inventory_goes_out_in_order_opened_by_its_first_batch_and_ended_by_its_last() {
    let mut outbox = asked(10, &SlotSet::ALL);
    assert_eq!(outbox.next_step(), Next::Inventory(Box::new(SlotSet::ALL)));
    assert_eq!(outbox.next_step(), Next::Wait, "asked once");
    outbox.inventory(&SlotSet::ALL, &held(0..20_000));
    outbox.announce(&added(1..3));
    let batches: Vec<_> = (0..3).map(|_| acknowledge(&mut outbox)).collect();
    assert_eq!(batches.iter().map(|batch| batch.sequence).collect::<Vec<_>>(), [0, 8193, 16385]);
    assert_eq!(batches[0].opening, Opening::Anew(SlotSet::ALL));
    assert!(batches[1..].iter().all(|batch| batch.opening == Opening::Nothing));
    let ends: Vec<_> = batches.iter().map(|batch| batch.ends.clone()).collect();
    assert_eq!(ends, [SlotSet::EMPTY, SlotSet::EMPTY, SlotSet::ALL]);
    let keys = batches.iter().flat_map(|batch| BlockKey::unpack(&batch.keys).expect("whole keys"));
    assert!(keys.eq((0..20_000).map(key)));
    let last = acknowledge(&mut outbox);
    assert_eq!((&last.opening, last.sequence), (&Opening::Nothing, 20_001));
    assert_eq!(last.operations, [2, 2]);
    assert_eq!(outbox.next_step(), Next::Wait);
}

#[test]
fn an_empty_inventory_is_announced_too_and_takes_a_number() {
    let mut outbox = asked(10, &SlotSet::ALL);
    outbox.inventory(&SlotSet::ALL, &[]);
    let batch = acknowledge(&mut outbox);
    assert!(batch.is_empty() && batch.opening == Opening::Anew(SlotSet::ALL) && batch.ends == SlotSet::ALL);
    outbox.announce(&added(0..1));
    assert_eq!(sent(&mut outbox).sequence, 1);
}

#[test]
fn only_changes_in_slots_whose_inventory_has_begun_are_sent() {
    let mut outbox = asked(10, &slots(0..2));
    outbox.announce(&added(0..4));
    assert_eq!(outbox.superseded(), 2, "those that the inventory will contain");
    outbox.inventory(&slots(0..4), &held(0..4));
    outbox.announce(&added(0..4));
    assert_eq!(acknowledge(&mut outbox).len(), 2);
    assert_eq!(acknowledge(&mut outbox).len(), 2);
    assert_eq!(outbox.next_step(), Next::Wait);
}

#[test]
fn slots_that_are_gained_are_announced_alone_and_those_that_are_lost_no_more() {
    let mut outbox = asked(10, &slots(0..2));
    outbox.inventory(&slots(0..2), &held(0..2));
    acknowledge(&mut outbox);
    outbox.announce(&added(0..2));
    outbox.heard(EPOCH, 2);
    assert_eq!(outbox.next_step(), Next::Standing(NODE, EPOCH));
    outbox.follow(EPOCH, 2, &slots(1..4), &slots(2..4));
    assert_eq!(outbox.next_step(), Next::Inventory(Box::new(slots(2..4))));
    assert_eq!(acknowledge(&mut outbox).len(), 1, "the change in the slot that was kept");
    outbox.inventory(&slots(2..4), &held(2..4));
    let batch = acknowledge(&mut outbox);
    assert_eq!((&batch.opening, &batch.ends), (&Opening::Slots(slots(2..4)), &slots(2..4)));
    assert_eq!(outbox.next_step(), Next::Wait);
}

#[test]
fn a_slot_that_the_member_had_lost_meanwhile_begins_again_without_its_old_changes() {
    let mut outbox = asked(10, &slots(0..2));
    outbox.inventory(&slots(0..2), &held(0..2));
    acknowledge(&mut outbox);
    outbox.announce(&added(0..2));
    outbox.heard(EPOCH, 3);
    outbox.follow(EPOCH, 3, &slots(0..2), &slots(0..1));
    assert_eq!(outbox.next_step(), Next::Inventory(Box::new(slots(0..1))));
    outbox.inventory(&slots(0..1), &[]);
    assert_eq!(acknowledge(&mut outbox).opening, Opening::Slots(slots(0..1)));
    let rest = acknowledge(&mut outbox);
    assert_eq!(rest.keys, key(1).0, "what was queued for the slot is in its new inventory or gone");
}

#[test]
fn the_member_is_not_asked_while_an_inventory_is_on_its_way() {
    let mut outbox = asked(10, &slots(0..2));
    outbox.heard(EPOCH, 2);
    assert_eq!(outbox.next_step(), Next::Inventory(Box::new(slots(0..2))));
    assert_eq!(outbox.next_step(), Next::Wait);
    outbox.inventory(&slots(0..2), &held(0..2));
    let batch = sent(&mut outbox);
    outbox.follow(EPOCH, 2, &slots(0..4), &slots(0..4));
    assert_eq!(sent(&mut outbox), batch, "such an answer changes nothing");
    acknowledge(&mut outbox);
    assert_eq!(outbox.next_step(), Next::Standing(NODE, EPOCH));
}

#[test]
fn a_batch_is_sent_again_unchanged_until_it_is_answered() {
    let mut outbox = flowing(10);
    outbox.announce(&added(0..2));
    let first = sent(&mut outbox);
    outbox.announce(&added(2..3));
    assert_eq!(sent(&mut outbox), first);
    assert_eq!(acknowledge(&mut outbox).operations.len(), 2);
    assert_eq!(acknowledge(&mut outbox).operations.len(), 1);
}

#[test]
fn overflow_drops_all_and_everything_starts_over() {
    let mut outbox = flowing(10);
    outbox.announce(&added(0..4));
    let in_flight = sent(&mut outbox);
    outbox.announce(&added(4..16));
    outbox.announce(&added(16..20));
    assert_eq!((outbox.queued(), outbox.superseded()), (0, 16));
    let late = Answer::Expecting(in_flight.sequence + 4);
    assert_eq!(outbox.answered(EPOCH, in_flight.sequence, late), Outcome::Stale);
    assert_eq!(outbox.next_step(), Next::Standing(NODE, EPOCH));
    // The member has missed nothing and wants nothing; this side knows better.
    outbox.follow(EPOCH, 1, &SlotSet::ALL, &SlotSet::EMPTY);
    assert_eq!(outbox.next_step(), Next::Inventory(Box::new(SlotSet::ALL)));
    outbox.inventory(&SlotSet::ALL, &held(1..2));
    let batch = acknowledge(&mut outbox);
    assert_eq!(batch.opening, Opening::Anew(SlotSet::ALL));
    assert_eq!(batch.sequence, 5, "the dropped batch may have been applied: its numbers stay used");
}

#[test]
fn after_a_gap_everything_starts_over_where_the_directory_will_take_it() {
    let mut outbox = flowing(10);
    outbox.announce(&added(0..2));
    let batch = sent(&mut outbox);
    assert_eq!(outbox.answered(EPOCH, batch.sequence, Answer::Expecting(9)), Outcome::Gap);
    assert_eq!(outbox.next_step(), Next::Standing(NODE, EPOCH));
    outbox.follow(EPOCH, 1, &SlotSet::ALL, &SlotSet::EMPTY);
    outbox.inventory(&SlotSet::ALL, &[]);
    let anew = sent(&mut outbox);
    assert_eq!((&anew.opening, anew.sequence), (&Opening::Anew(SlotSet::ALL), 9));
}

#[test]
fn answers_of_an_older_registration_change_nothing() {
    let mut outbox = flowing(10);
    outbox.announce(&added(0..2));
    let batch = sent(&mut outbox);
    outbox.grant(NODE, Epoch(4));
    outbox.follow(EPOCH, 9, &SlotSet::ALL, &SlotSet::ALL);
    outbox.heard(EPOCH, 9);
    assert_eq!(outbox.next_step(), Next::Standing(NODE, Epoch(4)));
    outbox.follow(Epoch(4), 1, &SlotSet::ALL, &SlotSet::ALL);
    outbox.inventory(&SlotSet::ALL, &held(0..1));
    assert_eq!(outbox.answered(EPOCH, batch.sequence, Answer::Fenced), Outcome::Stale);
    let batch = sent(&mut outbox);
    assert_eq!((batch.epoch, batch.sequence), (Epoch(4), 0));
    assert_eq!(outbox.answered(Epoch(4), 0, Answer::Fenced), Outcome::Fenced);
}

#[test]
fn a_refused_batch_is_not_sent_for_ever() {
    let mut outbox = flowing(10);
    outbox.announce(&added(0..2));
    sent(&mut outbox);
    outbox.refused();
    assert_eq!(outbox.next_step(), Next::Standing(NODE, EPOCH));
}

#[test]
fn nothing_is_queued_without_a_registration() {
    let mut outbox = flowing(10);
    outbox.lose();
    outbox.announce(&added(0..2));
    outbox.inventory(&SlotSet::ALL, &held(0..1));
    assert_eq!((outbox.next_step(), outbox.queued()), (Next::Wait, 0));
}
