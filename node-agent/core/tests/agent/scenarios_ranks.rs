//! Scenarios: blocks of a tensor-parallel engine, whose ranks save their parts in separate sessions.

use std::time::Duration;

use reprise_agent_core::effect::{Reply, Source};
use reprise_agent_core::event::{Priority, Ranks, Request, Scope};
use reprise_policy::{BlockKey, Layout, LayoutSpec, NodeId, SessionId, TenantId, Tier};

use crate::engine::RequestKind;
use crate::harness::{Harness, Setup, key, large_layout, small_layout};

const RANKS: u64 = 2;

/// Sessions of both ranks.
type Sessions = [SessionId; RANKS as usize];

fn layout_of(of: Layout, tp_rank: u16) -> Layout {
    LayoutSpec { tp_rank, tp_size: RANKS as u16, ..*of.spec() }.validate().expect("a valid layout")
}

fn open(harness: &mut Harness) -> Sessions {
    [0, 1].map(|rank| harness.open_session(TenantId::DEFAULT, layout_of(large_layout(), rank)))
}

fn harness() -> (Harness, Sessions) {
    let mut harness = Harness::new(Setup::default());
    let sessions = open(&mut harness);
    (harness, sessions)
}

/// Key of a rank's part of a block.
fn part(block: u64, rank: u64) -> BlockKey {
    key(RANKS * block + rank)
}

fn parts(blocks: std::ops::Range<u64>, rank: u64) -> Vec<BlockKey> {
    blocks.map(|block| part(block, rank)).collect()
}

fn save(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.reserve(session, keys.len() as u32);
    harness.commit(session, keys, Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
}

/// Matches blocks of all ranks and returns the answer.
fn answer(harness: &mut Harness, session: SessionId, keys: Vec<BlockKey>, scope: Scope) -> Reply {
    harness.request(
        session,
        RequestKind::Other,
        Request::Match { keys, ranks: Ranks::All, position: Some(0), scope, public: None },
    );
    harness.finish_jobs();
    harness.engines[&session].replies.last().expect("a reply").1.clone()
}

fn matched(
    harness: &mut Harness,
    session: SessionId,
    blocks: std::ops::Range<u64>,
    scope: Scope,
) -> Vec<Source> {
    let keys = blocks.flat_map(|block| [part(block, 0), part(block, 1)]).collect();
    match answer(harness, session, keys, scope) {
        Reply::Matched { sources } => sources,
        other => panic!("no match: {other:?}"),
    }
}

#[test]
fn block_is_available_once_the_last_rank_has_committed_its_part() {
    let (mut harness, [first, second]) = harness();
    save(&mut harness, first, &parts(0..4, 0));
    for scope in [Scope::Local, Scope::Cluster] {
        assert!(matched(&mut harness, first, 0..4, scope).is_empty(), "only one rank has committed");
    }
    save(&mut harness, second, &parts(0..2, 1));
    // The second rank has slots for its other parts when it dies.
    harness.reserve(second, 2);
    harness.close_session(second);
    for scope in [Scope::Local, Scope::Cluster] {
        assert_eq!(matched(&mut harness, first, 0..4, scope), [Source::OwnDram; 2]);
    }
    harness.match_keys(first, &parts(0..4, 0), Scope::Local);
    let own = &harness.engines[&first].replies.last().expect("a reply").1;
    assert!(matches!(own, Reply::Matched { sources } if sources.len() == 4), "its own rank has all parts");

    // The restarted engine saves what the match did not find, on both ranks.
    let restarted = open(&mut harness);
    for (session, rank) in restarted.into_iter().zip(0..) {
        save(&mut harness, session, &parts(2..4, rank));
    }
    assert_eq!(matched(&mut harness, restarted[1], 0..4, Scope::Local), [Source::OwnDram; 4]);
}

#[test]
fn block_with_an_evicted_part_is_missing() {
    let setup = Setup { regions: 4, disks: Vec::new(), ..Setup::default() };
    let mut harness = Harness::new(setup);
    let [first, second] = open(&mut harness);
    save(&mut harness, first, &parts(0..6, 0));
    save(&mut harness, second, &parts(0..6, 1));
    let mut incomplete = 0;
    for number in 100..140 {
        let has = |block, rank| harness.core.describe(&part(block, rank)).is_some();
        let whole = (0..6).take_while(|block| has(*block, 0) && has(*block, 1)).count();
        incomplete += (0..6).filter(|block| has(*block, 0) != has(*block, 1)).count();
        // A match marks the blocks as used, so it comes only once.
        if whole < 6 && incomplete > 0 {
            assert_eq!(matched(&mut harness, second, 0..6, Scope::Local).len(), whole);
            break;
        }
        save(&mut harness, first, &[key(number)]);
    }
    assert!(incomplete > 0, "no block lost one of its parts");
}

#[test]
fn source_is_that_of_the_slowest_part_and_parts_may_be_on_different_nodes() {
    let (mut harness, [first, second]) = harness();
    save(&mut harness, first, &parts(0..3, 0));
    save(&mut harness, second, &parts(0..1, 1));
    harness.request(first, RequestKind::Other, Request::Trim);
    harness.add_peer_replica(NodeId(1), part(1, 1), Tier::Dram);
    assert_eq!(matched(&mut harness, first, 0..3, Scope::Local), [Source::OwnNvme]);
    let anywhere = matched(&mut harness, first, 0..3, Scope::Cluster);
    assert_eq!(anywhere, [Source::OwnNvme, Source::PeerDram]);
}

#[test]
fn long_chain_is_looked_up_in_parts_of_whole_blocks() {
    let (mut harness, [first, _]) = harness();
    save(&mut harness, first, &parts(0..1, 0));
    // The first lookup covers 64 keys and so ends within a block: the first key is here.
    for block in 0..200 {
        for rank in 0..RANKS {
            harness.add_peer_replica(NodeId(1), part(block, rank), Tier::Nvme);
        }
    }
    let found = matched(&mut harness, first, 0..300, Scope::Cluster);
    assert_eq!(found, vec![Source::PeerNvme; 200]);
    assert_eq!(harness.core.counters().lookups, 2);
}

#[test]
fn parts_of_other_layouts_and_tenants_and_torn_blocks_do_not_count() {
    let (mut harness, [first, _]) = harness();
    save(&mut harness, first, &parts(0..2, 0));
    let alone = harness.open_session(TenantId::DEFAULT, large_layout());
    let smaller = harness.open_session(TenantId::DEFAULT, layout_of(small_layout(), 1));
    let tenant = harness.open_session(TenantId(7), layout_of(large_layout(), 1));
    save(&mut harness, alone, &[part(0, 1)]);
    assert!(matched(&mut harness, first, 0..2, Scope::Local).is_empty(), "a part of an engine with one rank");
    save(&mut harness, smaller, &[part(1, 1)]);
    save(&mut harness, tenant, &[part(2, 1)]);
    assert!(matched(&mut harness, first, 1..3, Scope::Local).is_empty());
    let torn = answer(&mut harness, first, vec![part(0, 0)], Scope::Local);
    assert!(
        matches!(&torn, Reply::BadRequest(text) if text.contains("send 2 keys for each block")),
        "{torn:?}"
    );
}
