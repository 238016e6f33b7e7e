//! Tests of queries over the owners of keys.

use reprise_policy::shards::MemberName;

use super::*;

fn map(epoch: u64, members: &[&str]) -> ShardMap {
    let names = members.iter().map(|name| MemberName::new(name).expect("a valid name"));
    ShardMap::new(Epoch(epoch), names).expect("a valid map")
}

fn query(keys: u8) -> OwnerQuery<&'static str, u32> {
    OwnerQuery::new((0..keys).map(|key| BlockKey([key.wrapping_mul(37); 16])).collect(), 0)
}

/// Answers every key of a part with its index, offset by 100.
fn all(part: &Part) -> PartAnswer<u32> {
    PartAnswer { answers: part.indices.iter().map(|index| index + 100).collect(), ..PartAnswer::default() }
}

#[test]
fn every_key_is_sent_to_its_owner_and_answered_in_order() {
    let (map, mut query) = (map(1, &["a", "b", "c"]), query(40));
    let parts = query.ask(Some(&map));
    assert!(parts.len() > 1, "several members own the keys");
    for part in &parts {
        assert!(query.keys_of(part).iter().all(|key| map.owner_of(key) == Some(part.owner)));
        assert_eq!(query.next(), Next::Wait);
        query.answer("x", part, all(part));
    }
    assert_eq!(query.next(), Next::Finish);
    assert_eq!(query.finish(), Some((100..140).collect()));
}

#[test]
fn keys_of_a_silent_member_are_missing_and_a_query_without_answers_fails() {
    let map = map(1, &["a", "b"]);
    let mut partial = query(20);
    let parts = partial.ask(Some(&map));
    partial.fail(&parts[0]);
    partial.answer("b", &parts[1], all(&parts[1]));
    assert_eq!((partial.next(), partial.counts().unanswered), (Next::Finish, parts[0].indices.len()));
    let answers = partial.finish().expect("one member has answered");
    assert_eq!(answers.iter().filter(|answer| **answer == 0).count(), parts[0].indices.len());
    let mut silent = query(20);
    silent.ask(Some(&map)).iter().for_each(|part| silent.fail(part));
    assert_eq!((silent.next(), silent.finish()), (Next::Finish, None));
}

#[test]
fn keys_without_an_owner_are_unanswered() {
    let mut empty = query(3);
    assert!(empty.ask(Some(&map(1, &[]))).is_empty());
    assert_eq!((empty.next(), empty.counts().unanswered), (Next::Finish, 3));
    let mut without_map = query(3);
    assert!(without_map.ask(None).is_empty());
    assert_eq!((without_map.next(), without_map.finish()), (Next::Finish, None));
}

#[test]
fn moved_keys_are_asked_once_more_by_a_newer_map_only() {
    let (old, new) = (map(4, &["a"]), map(5, &["a", "b"]));
    let moved = |map_epoch, part: &Part| PartAnswer {
        elsewhere: vec![1, 3, 99],
        map_epoch: Epoch(map_epoch),
        ..all(part)
    };
    let mut query = query(6);
    let parts = query.ask(Some(&old));
    query.answer("a", &parts[0], moved(5, &parts[0]));
    assert_eq!((query.next(), query.counts().redirected), (Next::FetchMap("a"), 2));
    let parts = query.ask(Some(&new));
    let mut indices: Vec<u32> = parts.iter().flat_map(|part| part.indices.clone()).collect();
    indices.sort_unstable();
    assert_eq!(indices, [1, 3], "only the moved keys");
    parts.iter().for_each(|part| query.fail(part));
    assert_eq!(query.next(), Next::Finish);
    assert_eq!(query.finish(), Some(vec![100, 0, 102, 0, 104, 105]), "answers of former owners are void");

    let mut same_map = self::query(6);
    let parts = same_map.ask(Some(&old));
    same_map.answer("a", &parts[0], moved(4, &parts[0]));
    assert_eq!(same_map.next(), Next::Finish, "the member's map is not newer");
}

#[test]
fn the_second_attempt_is_the_last() {
    let mut query = query(2);
    for epoch in 1..=2 {
        let parts = query.ask(Some(&map(epoch, &["a"])));
        let elsewhere = vec![0, 1];
        query.answer("a", &parts[0], PartAnswer { elsewhere, map_epoch: Epoch(9), ..all(&parts[0]) });
        assert_eq!(query.next(), Next::FetchMap("a"));
    }
    assert!(query.ask(Some(&map(9, &["a"]))).is_empty());
    assert_eq!((query.next(), query.finish()), (Next::Finish, Some(vec![0, 0])));
}
