//! The outbox against its specification; the test plays the part of the member.

use std::ops::Range;

use super::*;
use crate::effect::Change;

const NODE: NodeId = NodeId(7);
const EPOCH: Epoch = Epoch(3);

/// Returns a key in a different slot for each number below 4096.
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

fn replicas(numbers: Range<u32>) -> Vec<(BlockKey, Tier)> {
    numbers.map(|number| (key(number), Tier::Dram)).collect()
}

/// Registered outbox whose member owns some slots and wants the inventory of all of them.
fn requested(limit: usize, owned: &SlotSet) -> Outbox {
    let mut outbox = Outbox::new(limit);
    outbox.register(NODE, EPOCH);
    assert_eq!(outbox.next_step(), Next::QuerySlots(NODE, EPOCH));
    outbox.set_slots(EPOCH, 1, owned, owned);
    outbox
}

/// Like `requested`, with an empty inventory announced.
fn outbox_after_inventory(limit: usize) -> Outbox {
    let mut outbox = requested(limit, &SlotSet::ALL);
    assert_eq!(outbox.next_step(), Next::Inventory(Box::new(SlotSet::ALL)));
    outbox.inventory(&SlotSet::ALL, &[]);
    acknowledge(&mut outbox);
    outbox
}

fn next_batch(outbox: &mut Outbox) -> Arc<Batch> {
    match outbox.next_step() {
        Next::Send(batch) => batch,
        other => panic!("{other:?} instead of a batch"),
    }
}

fn acknowledge(outbox: &mut Outbox) -> Arc<Batch> {
    let batch = next_batch(outbox);
    let answer = Answer::Expecting(batch.sequence + batch.numbers());
    assert_eq!(outbox.process_answer(batch.epoch, batch.sequence, answer), Outcome::Applied(batch.len()));
    batch
}

#[test]
fn sends_inventory_in_order_with_opening_in_first_batch_and_end_in_last() {
    let mut outbox = requested(10, &SlotSet::ALL);
    assert_eq!(outbox.next_step(), Next::Inventory(Box::new(SlotSet::ALL)));
    assert_eq!(outbox.next_step(), Next::Wait, "requested once");
    outbox.inventory(&SlotSet::ALL, &replicas(0..20_000));
    outbox.announce(&added(1..3));
    let batches: Vec<_> = (0..3).map(|_| acknowledge(&mut outbox)).collect();
    assert_eq!(batches.iter().map(|batch| batch.sequence).collect::<Vec<_>>(), [0, 8193, 16385]);
    assert_eq!(batches[0].opening, Opening::Reset(SlotSet::ALL));
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
fn announces_empty_inventory_with_its_own_sequence_number() {
    let mut outbox = requested(10, &SlotSet::ALL);
    outbox.inventory(&SlotSet::ALL, &[]);
    let batch = acknowledge(&mut outbox);
    assert!(batch.is_empty() && batch.opening == Opening::Reset(SlotSet::ALL) && batch.ends == SlotSet::ALL);
    outbox.announce(&added(0..1));
    assert_eq!(next_batch(&mut outbox).sequence, 1);
}

#[test]
fn sends_changes_only_in_slots_whose_inventory_has_arrived() {
    let mut outbox = requested(10, &slots(0..2));
    outbox.announce(&added(0..4));
    assert_eq!(outbox.superseded(), 2, "the inventory will contain them");
    outbox.inventory(&slots(0..4), &replicas(0..4));
    outbox.announce(&added(0..4));
    assert_eq!(acknowledge(&mut outbox).len(), 2);
    assert_eq!(acknowledge(&mut outbox).len(), 2);
    assert_eq!(outbox.next_step(), Next::Wait);
}

#[test]
fn announces_only_gained_slots_and_stops_announcing_lost_slots() {
    let mut outbox = requested(10, &slots(0..2));
    outbox.inventory(&slots(0..2), &replicas(0..2));
    acknowledge(&mut outbox);
    outbox.announce(&added(0..2));
    outbox.note_version(EPOCH, 2);
    assert_eq!(outbox.next_step(), Next::QuerySlots(NODE, EPOCH));
    outbox.set_slots(EPOCH, 2, &slots(1..4), &slots(2..4));
    assert_eq!(outbox.next_step(), Next::Inventory(Box::new(slots(2..4))));
    assert_eq!(acknowledge(&mut outbox).len(), 1, "the change in the retained slot");
    outbox.inventory(&slots(2..4), &replicas(2..4));
    let batch = acknowledge(&mut outbox);
    assert_eq!((&batch.opening, &batch.ends), (&Opening::Slots(slots(2..4)), &slots(2..4)));
    assert_eq!(outbox.next_step(), Next::Wait);
}

#[test]
fn restarts_slot_that_member_lost_without_its_old_changes() {
    let mut outbox = requested(10, &slots(0..2));
    outbox.inventory(&slots(0..2), &replicas(0..2));
    acknowledge(&mut outbox);
    outbox.announce(&added(0..2));
    outbox.note_version(EPOCH, 3);
    outbox.set_slots(EPOCH, 3, &slots(0..2), &slots(0..1));
    assert_eq!(outbox.next_step(), Next::Inventory(Box::new(slots(0..1))));
    outbox.inventory(&slots(0..1), &[]);
    assert_eq!(acknowledge(&mut outbox).opening, Opening::Slots(slots(0..1)));
    let rest = acknowledge(&mut outbox);
    assert_eq!(rest.keys, key(1).0, "the new inventory replaces the queued changes of the slot");
}

#[test]
fn does_not_query_slots_while_an_inventory_is_pending() {
    let mut outbox = requested(10, &slots(0..2));
    outbox.note_version(EPOCH, 2);
    assert_eq!(outbox.next_step(), Next::Inventory(Box::new(slots(0..2))));
    assert_eq!(outbox.next_step(), Next::Wait);
    outbox.inventory(&slots(0..2), &replicas(0..2));
    let batch = next_batch(&mut outbox);
    outbox.set_slots(EPOCH, 2, &slots(0..4), &slots(0..4));
    assert_eq!(next_batch(&mut outbox), batch, "such an answer changes nothing");
    acknowledge(&mut outbox);
    assert_eq!(outbox.next_step(), Next::QuerySlots(NODE, EPOCH));
}

#[test]
fn resends_batch_unchanged_until_answered() {
    let mut outbox = outbox_after_inventory(10);
    outbox.announce(&added(0..2));
    let first = next_batch(&mut outbox);
    outbox.announce(&added(2..3));
    assert_eq!(next_batch(&mut outbox), first);
    assert_eq!(acknowledge(&mut outbox).operations.len(), 2);
    assert_eq!(acknowledge(&mut outbox).operations.len(), 1);
}

#[test]
fn overflow_drops_queue_and_starts_again() {
    let mut outbox = outbox_after_inventory(10);
    outbox.announce(&added(0..4));
    let in_flight = next_batch(&mut outbox);
    outbox.announce(&added(4..16));
    outbox.announce(&added(16..20));
    assert_eq!((outbox.queued(), outbox.superseded()), (0, 16));
    let late = Answer::Expecting(in_flight.sequence + 4);
    assert_eq!(outbox.process_answer(EPOCH, in_flight.sequence, late), Outcome::Stale);
    assert_eq!(outbox.next_step(), Next::QuerySlots(NODE, EPOCH));
    // The member has missed nothing and wants nothing, but the outbox has dropped changes.
    outbox.set_slots(EPOCH, 1, &SlotSet::ALL, &SlotSet::EMPTY);
    assert_eq!(outbox.next_step(), Next::Inventory(Box::new(SlotSet::ALL)));
    outbox.inventory(&SlotSet::ALL, &replicas(1..2));
    let batch = acknowledge(&mut outbox);
    assert_eq!(batch.opening, Opening::Reset(SlotSet::ALL));
    assert_eq!(batch.sequence, 5, "the dropped batch may have been applied: its numbers stay used");
}

#[test]
fn gap_starts_again_at_the_number_the_directory_expects() {
    let mut outbox = outbox_after_inventory(10);
    outbox.announce(&added(0..2));
    let batch = next_batch(&mut outbox);
    assert_eq!(outbox.process_answer(EPOCH, batch.sequence, Answer::Expecting(9)), Outcome::Gap);
    assert_eq!(outbox.next_step(), Next::QuerySlots(NODE, EPOCH));
    outbox.set_slots(EPOCH, 1, &SlotSet::ALL, &SlotSet::EMPTY);
    outbox.inventory(&SlotSet::ALL, &[]);
    let reset = next_batch(&mut outbox);
    assert_eq!((&reset.opening, reset.sequence), (&Opening::Reset(SlotSet::ALL), 9));
}

#[test]
fn ignores_answers_to_an_older_registration() {
    let mut outbox = outbox_after_inventory(10);
    outbox.announce(&added(0..2));
    let batch = next_batch(&mut outbox);
    outbox.register(NODE, Epoch(4));
    outbox.set_slots(EPOCH, 9, &SlotSet::ALL, &SlotSet::ALL);
    outbox.note_version(EPOCH, 9);
    assert_eq!(outbox.next_step(), Next::QuerySlots(NODE, Epoch(4)));
    outbox.set_slots(Epoch(4), 1, &SlotSet::ALL, &SlotSet::ALL);
    outbox.inventory(&SlotSet::ALL, &replicas(0..1));
    assert_eq!(outbox.process_answer(EPOCH, batch.sequence, Answer::Fenced), Outcome::Stale);
    let batch = next_batch(&mut outbox);
    assert_eq!((batch.epoch, batch.sequence), (Epoch(4), 0));
    assert_eq!(outbox.process_answer(Epoch(4), 0, Answer::Fenced), Outcome::Fenced);
}

#[test]
fn does_not_resend_a_rejected_batch() {
    let mut outbox = outbox_after_inventory(10);
    outbox.announce(&added(0..2));
    next_batch(&mut outbox);
    outbox.process_rejection();
    assert_eq!(outbox.next_step(), Next::QuerySlots(NODE, EPOCH));
}

#[test]
fn queues_nothing_without_a_registration() {
    let mut outbox = outbox_after_inventory(10);
    outbox.unregister();
    outbox.announce(&added(0..2));
    outbox.inventory(&SlotSet::ALL, &replicas(0..1));
    assert_eq!((outbox.next_step(), outbox.queued()), (Next::Wait, 0));
}
