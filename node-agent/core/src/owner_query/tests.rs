//! Tests of queries over the owners of keys.

use std::sync::Arc;

use reprise_policy::Tier;
use reprise_policy::routing::LoadClass;
use reprise_policy::shards::{MemberName, ShardMap};

use super::*;
use crate::members::Members;

type Query = OwnerQuery<&'static str, u32>;

/// Answers that name no nodes.
impl NodeAnswer for u32 {
    fn remove_unreachable(&mut self, _: impl Fn(NodeId) -> bool) {}
}

fn routes(epoch: u64, members: &[&'static str]) -> Arc<Routes<&'static str>> {
    let name = |name: &&str| MemberName::new(name).expect("a valid name");
    let mut known = Members::default();
    let listed = members.iter().map(|member| (name(member), String::new()));
    let open = |name: &MemberName, _: &str| members.iter().find(|member| **member == name.as_str()).copied();
    let map = |names| ShardMap::new(Epoch(epoch), names).map(Arc::new);
    known.apply(listed, open, map).expect("a valid map");
    known.routes().expect("just applied").clone()
}

fn query(keys: u8) -> Query {
    OwnerQuery::new((0..keys).map(|key| BlockKey([key.wrapping_mul(37); 16])).collect(), 0)
}

/// Starts an attempt in which all members can be asked; returns its parts.
fn ask(query: &mut Query, routes: &Routes<&'static str>) -> Vec<(&'static str, Part)> {
    match query.ask(Some(routes), |_| true) {
        Next::Send(parts) => parts,
        other => panic!("no parts, but {other:?}"),
    }
}

fn finish(query: Query) -> Option<Vec<u32>> {
    query.finish(|_| true)
}

/// Answers every key of a part with its index, offset by 100.
fn all(part: &Part) -> PartAnswer<u32> {
    PartAnswer { answers: part.indices.iter().map(|index| index + 100).collect(), ..PartAnswer::default() }
}

#[test]
fn every_key_is_sent_to_its_owner_and_answered_in_order() {
    let (routes, mut query) = (routes(1, &["a", "b", "c"]), query(40));
    let parts = ask(&mut query, &routes);
    assert!(parts.len() > 1, "several members own the keys");
    let mut left = parts.len();
    for (member, part) in &parts {
        assert_eq!(routes.link(part.owner), member);
        assert!(query.keys_of(part).iter().all(|key| routes.map().owner_of(key) == Some(part.owner)));
        left -= 1;
        let next = if left == 0 { Next::Finish } else { Next::Wait };
        assert_eq!(query.answer(member, part, all(part)), next);
    }
    assert_eq!(finish(query), Some((100..140).collect()));
}

#[test]
fn keys_of_a_silent_member_are_missing_and_a_query_without_answers_fails() {
    let routes = routes(1, &["a", "b"]);
    let mut partial = query(20);
    let parts = ask(&mut partial, &routes);
    assert_eq!(partial.fail(&parts[0].1), Next::Wait);
    assert_eq!(partial.answer("b", &parts[1].1, all(&parts[1].1)), Next::Finish);
    let silent = parts[0].1.indices.len();
    assert_eq!(partial.counts().unanswered, silent);
    let answers = finish(partial).expect("one member has answered");
    assert_eq!(answers.iter().filter(|answer| **answer == 0).count(), silent);
    let mut silent = query(20);
    let next = ask(&mut silent, &routes).iter().map(|(_, part)| silent.fail(part)).last();
    assert_eq!((next, finish(silent)), (Some(Next::Finish), None));
}

#[test]
fn only_members_that_can_be_asked_get_parts() {
    let routes = routes(1, &["a", "b"]);
    let (mut some, mut none) = (query(20), query(20));
    let Next::Send(parts) = some.ask(Some(&routes), |member| *member == "b") else { panic!("b is asked") };
    assert_eq!(parts.iter().map(|(member, _)| *member).collect::<Vec<_>>(), ["b"]);
    assert_eq!(some.counts().unanswered + parts[0].1.indices.len(), 20);
    assert_eq!(some.answer("b", &parts[0].1, all(&parts[0].1)), Next::Finish);
    assert_eq!(none.ask(Some(&routes), |_| false), Next::Finish);
    assert_eq!((none.counts().unanswered, finish(none)), (20, None));
}

#[test]
fn keys_without_an_owner_are_unanswered() {
    let mut empty = query(3);
    assert_eq!(empty.ask(Some(&routes(1, &[])), |_| true), Next::Finish);
    assert_eq!(empty.counts().unanswered, 3);
    let mut without_map = query(3);
    assert_eq!(without_map.ask(None, |_| true), Next::Finish);
    assert_eq!(finish(without_map), None);
}

#[test]
fn moved_keys_are_asked_once_more_by_a_newer_map_only() {
    let (old, new) = (routes(4, &["a"]), routes(5, &["a", "b"]));
    let moved = |map_epoch, part: &Part| PartAnswer {
        elsewhere: vec![1, 3, 99],
        map_epoch: Epoch(map_epoch),
        ..all(part)
    };
    let mut query = query(6);
    let parts = ask(&mut query, &old);
    assert_eq!(query.answer("a", &parts[0].1, moved(5, &parts[0].1)), Next::FetchMap("a"));
    assert_eq!(query.counts().redirected, 2);
    let parts = ask(&mut query, &new);
    let mut indices: Vec<u32> = parts.iter().flat_map(|(_, part)| part.indices.clone()).collect();
    indices.sort_unstable();
    assert_eq!(indices, [1, 3], "only the moved keys");
    let next = parts.iter().map(|(_, part)| query.fail(part)).last();
    assert_eq!(next, Some(Next::Finish));
    assert_eq!(finish(query), Some(vec![100, 0, 102, 0, 104, 105]), "answers of former owners are void");

    let mut same_map = self::query(6);
    let parts = ask(&mut same_map, &old);
    let next = same_map.answer("a", &parts[0].1, moved(4, &parts[0].1));
    assert_eq!(next, Next::Finish, "the member's map is not newer");
}

#[test]
fn the_second_attempt_is_the_last() {
    let mut query = query(2);
    for epoch in 1..=2 {
        let parts = ask(&mut query, &routes(epoch, &["a"]));
        let part = &parts[0].1;
        let answer = PartAnswer { elsewhere: vec![0, 1], map_epoch: Epoch(9), ..all(part) };
        assert_eq!(query.answer("a", part, answer), Next::FetchMap("a"));
    }
    assert_eq!(query.ask(Some(&routes(9, &["a"])), |_| true), Next::Finish);
    assert_eq!(finish(query), Some(vec![0, 0]));
}

#[test]
fn nodes_that_cannot_be_reached_are_removed_from_answers() {
    let replica = |node| Replica { node: NodeId(node), tier: Tier::Dram, load: LoadClass(0) };
    let mut found = vec![replica(1), replica(2)];
    found.remove_unreachable(|node| node == NodeId(2));
    assert_eq!(found, [replica(2)]);
    let mut placements = [Placement::To(NodeId(1)), Placement::To(NodeId(2)), Placement::Enough];
    placements.iter_mut().for_each(|placement| placement.remove_unreachable(|node| node == NodeId(2)));
    assert_eq!(placements, [Placement::Unanswered, Placement::To(NodeId(2)), Placement::Enough]);
}
