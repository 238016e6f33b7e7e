//! Blocks that move to a node with more room: one behaviour at a time.

use std::time::Duration;

use reprise_agent_core::effect::PlaceReason;
use reprise_agent_core::event::{Event, Grant, Placement, Scope};
use reprise_policy::{BlockKey, Quota, Tier};

use crate::jobs::Job;
use crate::scenarios_giving::{
    LATER, LONG, ONE, TENANT, answer, asked, move_to, offered, save_durably, take, world,
};
use crate::world::{World, key, keys, large_layout};

fn is_durable_here(world: &World, key: BlockKey) -> bool {
    world.announced.contains(&(key, Tier::Nvme))
}

#[test]
fn a_moved_block_is_dropped_here_when_it_is_durable_there_and_not_before() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..4));
    move_to(&mut world, ONE, 2);
    let (reason, moved) = asked(&world).remove(0);
    assert_eq!((reason, moved.len()), (PlaceReason::Move(ONE), 2));
    answer(&mut world, &[Placement::To(ONE); 2]);
    let offer = offered(&mut world);
    take(&mut world, &offer, &[0, 1], Duration::ZERO);
    assert!(moved.iter().all(|key| is_durable_here(&world, *key)), "taken is not durable");
    for key in &moved {
        world.give_peer(ONE, *key, Tier::Nvme);
    }
    world.pass(Duration::from_millis(1100));
    answer(&mut world, &[Placement::Enough; 2]);
    assert!(!moved.iter().any(|key| is_durable_here(&world, *key)));
    assert_eq!(world.core.counters().moved_blocks, 2);
    world.pass(LONG);
    assert!(world.jobs.iter().all(|job| matches!(job, Job::Device { .. })), "so much was to move");
}

#[test]
fn a_block_that_is_read_is_not_dropped_until_it_is_released() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..1));
    world.load(session, &keys(0..1), LATER, Scope::Local);
    world.give_peer(ONE, key(0), Tier::Nvme);
    move_to(&mut world, ONE, 1);
    answer(&mut world, &[Placement::Enough]);
    assert!(is_durable_here(&world, key(0)));
    let load = *world.engines[&session].loads.keys().next().expect("held");
    world.release(session, load);
    world.pass(Duration::from_millis(1100));
    answer(&mut world, &[Placement::Enough]);
    assert!(!is_durable_here(&world, key(0)));
}

#[test]
fn what_was_used_last_stays() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..20));
    world.load(session, &keys(0..2), LATER, Scope::Local);
    world.finish_jobs();
    move_to(&mut world, ONE, 10);
    let moved: Vec<BlockKey> = asked(&world).into_iter().flat_map(|(_, keys)| keys).collect();
    assert_eq!(moved.len(), 10);
    assert!(!moved.contains(&key(0)) && !moved.contains(&key(1)), "they were read just now");
    let slot = large_layout().slot_bytes() + 4096;
    let nvme = Quota::new(0, 19 * slot).expect("a quota");
    world.apply(Event::Budget(Grant { tenant: TENANT, version: 1, dram: Quota::UNLIMITED, nvme }));
    let evicted: Vec<BlockKey> =
        keys(0..20).into_iter().filter(|key| !is_durable_here(&world, *key)).collect();
    assert!(evicted.len() == 1 && !moved.contains(&evicted[0]), "what goes next is not worth the way");
}

#[test]
fn a_move_that_is_withdrawn_drops_nothing_any_more() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..2));
    world.give_peer(ONE, key(0), Tier::Nvme);
    move_to(&mut world, ONE, 9);
    world.apply(Event::Move(None));
    answer(&mut world, &[Placement::Enough; 2]);
    assert!(is_durable_here(&world, key(0)));
    assert_eq!(world.core.next_deadline(), None);
}
