//! Scenarios: blocks that move to a node with more free capacity.

use std::time::Duration;

use reprise_agent_core::effect::PlacementReason;
use reprise_agent_core::event::{Event, Grant, Placement, Scope};
use reprise_policy::{BlockKey, Quota, Tier};

use crate::harness::{Harness, key, keys, large_layout};
use crate::jobs::Job;
use crate::scenarios_outbound::{
    LATER, LONG, ONE, TENANT, answer, harness, move_to, offered, queried, save_durably, take,
};

fn is_durable_here(harness: &Harness, key: BlockKey) -> bool {
    harness.announced.contains(&(key, Tier::Nvme))
}

#[test]
fn moved_block_is_dropped_only_after_it_is_durable_on_the_target() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..4));
    move_to(&mut harness, ONE, 2);
    let (reason, moved) = queried(&harness).remove(0);
    assert_eq!((reason, moved.len()), (PlacementReason::Move(ONE), 2));
    answer(&mut harness, &[Placement::To(ONE); 2]);
    let offer = offered(&mut harness);
    take(&mut harness, &offer, &[0, 1], Duration::ZERO);
    assert!(moved.iter().all(|key| is_durable_here(&harness, *key)), "accepted is not durable");
    for key in &moved {
        harness.add_peer_replica(ONE, *key, Tier::Nvme);
    }
    harness.pass(Duration::from_millis(1100));
    answer(&mut harness, &[Placement::Enough; 2]);
    assert!(!moved.iter().any(|key| is_durable_here(&harness, *key)));
    assert_eq!(harness.core.counters().moved_blocks, 2);
    harness.pass(LONG);
    assert!(
        harness.jobs.iter().all(|job| matches!(job, Job::Device { .. })),
        "the requested amount has moved"
    );
}

#[test]
fn moved_block_in_use_is_dropped_after_its_release() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..1));
    harness.load(session, &keys(0..1), LATER, Scope::Local);
    harness.add_peer_replica(ONE, key(0), Tier::Nvme);
    move_to(&mut harness, ONE, 1);
    answer(&mut harness, &[Placement::Enough]);
    assert!(is_durable_here(&harness, key(0)));
    let load = *harness.engines[&session].loads.keys().next().expect("held");
    harness.release(session, load);
    harness.pass(Duration::from_millis(1100));
    answer(&mut harness, &[Placement::Enough]);
    assert!(!is_durable_here(&harness, key(0)));
}

#[test]
fn recently_used_blocks_do_not_move() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..20));
    harness.load(session, &keys(0..2), LATER, Scope::Local);
    harness.finish_jobs();
    move_to(&mut harness, ONE, 10);
    let moved: Vec<BlockKey> = queried(&harness).into_iter().flat_map(|(_, keys)| keys).collect();
    assert_eq!(moved.len(), 10);
    assert!(!moved.contains(&key(0)) && !moved.contains(&key(1)), "they were read recently");
    let slot = large_layout().slot_bytes() + 4096;
    let nvme = Quota::new(0, 19 * slot).expect("a quota");
    harness.apply(Event::Budget(Grant { tenant: TENANT, version: 1, dram: Quota::UNLIMITED, nvme }));
    let evicted: Vec<BlockKey> =
        keys(0..20).into_iter().filter(|key| !is_durable_here(&harness, *key)).collect();
    assert!(evicted.len() == 1 && !moved.contains(&evicted[0]), "the next victim does not move");
}

#[test]
fn withdrawn_move_drops_no_further_blocks() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..2));
    harness.add_peer_replica(ONE, key(0), Tier::Nvme);
    move_to(&mut harness, ONE, 9);
    harness.apply(Event::Move(None));
    answer(&mut harness, &[Placement::Enough; 2]);
    assert!(is_durable_here(&harness, key(0)));
    assert_eq!(harness.core.next_deadline(), None);
}
