//! Why a block is where it is, as the core says when it is asked: one way of coming at a time.

use reprise_agent_core::agent::{BlockDescription, BlockOrigin, DramCopy};
use reprise_agent_core::effect::DeviceId;
use reprise_agent_core::event::{Event, FillError, Grant, Priority, Request, Scope};
use reprise_policy::{BlockKey, Quota, SessionId, Tier};

use crate::engine::Asked;
use crate::scenarios_giving::{LATER, ONE, TENANT, save_durably, world};
use crate::world::{Setup, World, key, keys, large_layout};

fn described(world: &World, key: BlockKey) -> BlockDescription {
    world.core.describe(&key).expect("the block is here, or on its way")
}

fn origin(world: &World, key: BlockKey) -> BlockOrigin {
    described(world, key).origin
}

fn commit(world: &mut World, session: SessionId, key: BlockKey) {
    world.reserve(session, 1);
    world.commit(session, &[key], Priority::Normal);
}

/// A load of this node fetches a block that a peer has.
fn fetch(world: &mut World, session: SessionId, key: BlockKey) {
    world.give_peer(ONE, key, Tier::Dram);
    world.load(session, &[key], LATER, Scope::Cluster);
    world.finish_jobs_but_fills();
}

/// A peer offers a block that it has.
fn offer(world: &mut World, key: BlockKey) {
    world.give_peer(ONE, key, Tier::Nvme);
    assert_eq!(world.peer_offer(ONE, TENANT, large_layout(), &[key]).0, [0]);
}

/// Gives the tenant so many bytes of devices.
fn limit_devices(world: &mut World, version: u64, limit: u64) {
    let nvme = Quota::new(0, limit).expect("nothing is reserved");
    world.apply(Event::Budget(Grant { tenant: TENANT, version, dram: Quota::UNLIMITED, nvme }));
}

/// Everything under way ends, and what waits to be written is.
fn settle(world: &mut World) {
    world.finish_jobs();
    world.pass(LATER);
    world.finish_jobs();
}

fn release_all(world: &mut World, session: SessionId) {
    for load in world.engines[&session].loads.keys().copied().collect::<Vec<_>>() {
        world.release(session, load);
    }
}

#[test]
fn a_block_that_is_nowhere_is_not_described() {
    let (mut world, session) = world();
    assert_eq!(world.core.describe(&key(0)), None);
    world.reserve(session, 1);
    assert_eq!(world.core.describe(&key(0)), None, "a reserved slot has no key");
}

#[test]
fn what_an_engine_commits_is_saved_in_memory_first_and_then_on_a_device() {
    let (mut world, session) = world();
    world.reserve(session, 1);
    world.commit(session, &keys(0..1), Priority::High);
    let (origin, priority) = (BlockOrigin::Saved, Priority::High);
    let unsaved = BlockDescription { origin, dram: Some(DramCopy::Unsaved), nvme: None, priority, leases: 0 };
    assert_eq!(described(&world, key(0)), unsaved);
    settle(&mut world);
    let saved = BlockDescription { dram: Some(DramCopy::Clean), nvme: Some(DeviceId(0)), ..unsaved };
    assert_eq!(described(&world, key(0)), saved);
    world.request(session, Asked::Other, Request::Trim);
    assert_eq!(described(&world, key(0)), BlockDescription { dram: None, ..saved });
    world.load(session, &keys(0..1), LATER, Scope::Local);
    let read = BlockDescription { dram: Some(DramCopy::Filling), leases: 1, ..saved };
    assert_eq!(described(&world, key(0)), read, "it is being read from its device");
    settle(&mut world);
    assert_eq!(described(&world, key(0)), BlockDescription { leases: 1, ..saved });
}

#[test]
fn what_a_load_fetches_from_a_peer_is_loaded_and_leased_until_the_release() {
    let (mut world, session) = world();
    fetch(&mut world, session, key(5));
    let (origin, priority) = (BlockOrigin::Loaded, Priority::Normal);
    let coming = BlockDescription { origin, dram: Some(DramCopy::Filling), nvme: None, priority, leases: 1 };
    assert_eq!(described(&world, key(5)), coming);
    settle(&mut world);
    let held = BlockDescription { dram: Some(DramCopy::Clean), ..coming };
    assert_eq!(described(&world, key(5)), held);
    release_all(&mut world, session);
    assert_eq!(described(&world, key(5)), BlockDescription { leases: 0, ..held });
}

#[test]
fn what_was_taken_from_a_peer_is_placed_from_the_beginning_of_its_fetch() {
    let (mut world, session) = world();
    offer(&mut world, key(5));
    assert_eq!((origin(&world, key(5)), described(&world, key(5)).leases), (BlockOrigin::Placed, 0));
    world.load(session, &[key(5)], LATER, Scope::Cluster);
    assert_eq!(described(&world, key(5)).leases, 1, "a load joins the fetch");
    settle(&mut world);
    let said = described(&world, key(5));
    assert_eq!((said.origin, said.nvme), (BlockOrigin::Placed, Some(DeviceId(0))));
}

#[test]
fn what_a_load_has_fetched_is_placed_when_it_is_made_durable_for_an_offer() {
    let (mut world, session) = world();
    fetch(&mut world, session, key(5));
    fetch(&mut world, session, key(6));
    offer(&mut world, key(6));
    world.finish_jobs();
    assert_eq!((origin(&world, key(5)), origin(&world, key(6))), (BlockOrigin::Loaded, BlockOrigin::Placed));
    offer(&mut world, key(5));
    assert_eq!(origin(&world, key(5)), BlockOrigin::Placed);
    assert_eq!(described(&world, key(5)).dram, Some(DramCopy::Unsaved));
}

#[test]
fn what_an_engine_has_committed_is_saved_however_it_has_come() {
    let (mut world, session) = world();
    fetch(&mut world, session, key(5));
    offer(&mut world, key(6));
    settle(&mut world);
    assert_eq!((origin(&world, key(5)), origin(&world, key(6))), (BlockOrigin::Loaded, BlockOrigin::Placed));
    commit(&mut world, session, key(5));
    commit(&mut world, session, key(6));
    assert_eq!((origin(&world, key(5)), origin(&world, key(6))), (BlockOrigin::Saved, BlockOrigin::Saved));
}

#[test]
fn a_commit_that_overtakes_a_fetch_leaves_a_saved_block() {
    let (mut world, session) = world();
    offer(&mut world, key(5));
    commit(&mut world, session, key(5));
    assert_eq!(origin(&world, key(5)), BlockOrigin::Saved);
    settle(&mut world);
    assert_eq!(origin(&world, key(5)), BlockOrigin::Saved);
}

#[test]
fn what_an_engine_has_saved_stays_that_when_it_is_made_durable_for_an_offer() {
    let (mut world, session) = world();
    limit_devices(&mut world, 1, 4096);
    commit(&mut world, session, key(5));
    assert_eq!(described(&world, key(5)).dram, Some(DramCopy::Clean), "there is no room for it on a device");
    limit_devices(&mut world, 2, u64::MAX);
    offer(&mut world, key(5));
    let said = described(&world, key(5));
    assert_eq!((said.origin, said.dram), (BlockOrigin::Saved, Some(DramCopy::Unsaved)));
}

#[test]
fn a_load_that_looks_elsewhere_after_a_failed_pull_brings_a_loaded_block() {
    let (mut world, session) = world();
    world.peer_offer(ONE, TENANT, large_layout(), &[key(5)]);
    world.give_peer(ONE, key(5), Tier::Dram);
    world.load(session, &[key(5)], LATER, Scope::Cluster);
    let pull = world.fills()[0];
    world.fail(pull, FillError::Absent);
    settle(&mut world);
    assert_eq!(origin(&world, key(5)), BlockOrigin::Loaded);
}

#[test]
fn after_a_restart_what_is_on_devices_was_found_there_until_an_engine_saves_it_again() {
    let (mut world, session) = world();
    save_durably(&mut world, session, &keys(0..2));
    offer(&mut world, key(5));
    settle(&mut world);
    let mut world = world.crash();
    for number in [0, 1, 5] {
        let said = described(&world, key(number));
        assert_eq!(
            (said.origin, said.dram, said.nvme),
            (BlockOrigin::Recovered, None, Some(DeviceId(0))),
            "block {number}"
        );
    }
    let session = world.open_session(TENANT, large_layout());
    world.load(session, &keys(0..1), LATER, Scope::Local);
    settle(&mut world);
    commit(&mut world, session, key(1));
    assert_eq!(
        (origin(&world, key(0)), origin(&world, key(1))),
        (BlockOrigin::Recovered, BlockOrigin::Saved),
        "a load changes nothing"
    );
}

#[test]
fn a_block_that_was_gone_comes_back_with_the_reason_of_its_return() {
    let mut world = World::new(Setup { disks: vec![], ..Setup::default() });
    let session = world.open_session(TENANT, large_layout());
    commit(&mut world, session, key(5));
    assert_eq!(described(&world, key(5)).dram, Some(DramCopy::Clean), "nothing will ever save it");
    for number in 100..132 {
        commit(&mut world, session, key(number));
    }
    assert_eq!(world.core.describe(&key(5)), None, "it was evicted");
    fetch(&mut world, session, key(5));
    settle(&mut world);
    assert_eq!(origin(&world, key(5)), BlockOrigin::Loaded);
}
