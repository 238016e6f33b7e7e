//! Scenarios: the origin of a block in its description.

use reprise_agent_core::effect::DeviceId;
use reprise_agent_core::event::{Event, FillError, Grant, Priority, Request, Scope};
use reprise_agent_core::{BlockDescription, BlockOrigin, DramCopy};
use reprise_policy::eviction::Class;
use reprise_policy::{BlockKey, Quota, SessionId, Tier};

use crate::engine::RequestKind;
use crate::harness::{Harness, Setup, key, keys, large_layout};
use crate::scenarios_outbound::{LATER, ONE, TENANT, harness, save_durably};

fn described(harness: &Harness, key: BlockKey) -> BlockDescription {
    harness.core.describe(&key).expect("the block is here or being filled")
}

fn origin(harness: &Harness, key: BlockKey) -> BlockOrigin {
    described(harness, key).origin
}

fn commit(harness: &mut Harness, session: SessionId, key: BlockKey) {
    harness.reserve(session, 1);
    harness.commit(session, &[key], Priority::Normal);
}

/// Loads a block that a peer has.
fn fetch(harness: &mut Harness, session: SessionId, key: BlockKey) {
    harness.add_peer_replica(ONE, key, Tier::Dram);
    harness.load(session, &[key], LATER, Scope::Cluster);
    harness.finish_jobs_but_fills();
}

/// Offers a block of a peer.
fn offer(harness: &mut Harness, key: BlockKey) {
    harness.add_peer_replica(ONE, key, Tier::Nvme);
    assert_eq!(harness.peer_offer(ONE, TENANT, large_layout(), &[key]).0, [0]);
}

/// Limits the tenant's bytes on devices.
fn limit_devices(harness: &mut Harness, version: u64, limit: u64) {
    let nvme = Quota::new(0, limit).expect("nothing is reserved");
    harness.apply(Event::Budget(Grant { tenant: TENANT, version, dram: Quota::UNLIMITED, nvme }));
}

/// Completes all jobs and the writes that result.
fn finish_all(harness: &mut Harness) {
    harness.finish_jobs();
    harness.pass(LATER);
    harness.finish_jobs();
}

fn release_all(harness: &mut Harness, session: SessionId) {
    for load in harness.engines[&session].loads.keys().copied().collect::<Vec<_>>() {
        harness.release(session, load);
    }
}

#[test]
fn missing_block_has_no_description() {
    let (mut harness, session) = harness();
    assert_eq!(harness.core.describe(&key(0)), None);
    harness.reserve(session, 1);
    assert_eq!(harness.core.describe(&key(0)), None, "a reserved slot has no key");
}

#[test]
fn committed_block_has_origin_saved_in_dram_and_on_nvme() {
    let (mut harness, session) = harness();
    harness.reserve(session, 1);
    harness.commit(session, &keys(0..1), Priority::High);
    let (origin, priority, class) = (BlockOrigin::Saved, Priority::High, Class::Active);
    let (dram, nvme) = (Some(DramCopy::Unsaved), None);
    let unsaved = BlockDescription { origin, dram, nvme, priority, class, leases: 0 };
    assert_eq!(described(&harness, key(0)), unsaved);
    finish_all(&mut harness);
    let saved = BlockDescription { dram: Some(DramCopy::Clean), nvme: Some(DeviceId(0)), ..unsaved };
    assert_eq!(described(&harness, key(0)), saved);
    harness.request(session, RequestKind::Other, Request::Trim);
    assert_eq!(described(&harness, key(0)), BlockDescription { dram: None, ..saved });
    harness.load(session, &keys(0..1), LATER, Scope::Local);
    let read = BlockDescription { dram: Some(DramCopy::Filling), leases: 1, ..saved };
    assert_eq!(described(&harness, key(0)), read, "it is being read from its device");
    finish_all(&mut harness);
    assert_eq!(described(&harness, key(0)), BlockDescription { leases: 1, ..saved });
}

#[test]
fn block_fetched_for_a_load_has_origin_loaded_and_is_leased_until_release() {
    let (mut harness, session) = harness();
    fetch(&mut harness, session, key(5));
    let (origin, priority, class) = (BlockOrigin::Loaded, Priority::Normal, Class::Recent);
    let (dram, nvme) = (Some(DramCopy::Filling), None);
    let coming = BlockDescription { origin, dram, nvme, priority, class, leases: 1 };
    assert_eq!(described(&harness, key(5)), coming);
    finish_all(&mut harness);
    let held = BlockDescription { dram: Some(DramCopy::Clean), ..coming };
    assert_eq!(described(&harness, key(5)), held);
    release_all(&mut harness, session);
    assert_eq!(described(&harness, key(5)), BlockDescription { leases: 0, ..held });
}

#[test]
fn accepted_block_has_origin_placed_from_the_start_of_its_fetch() {
    let (mut harness, session) = harness();
    offer(&mut harness, key(5));
    assert_eq!((origin(&harness, key(5)), described(&harness, key(5)).leases), (BlockOrigin::Placed, 0));
    harness.load(session, &[key(5)], LATER, Scope::Cluster);
    assert_eq!(described(&harness, key(5)).leases, 1, "a load joins the fetch");
    finish_all(&mut harness);
    let description = described(&harness, key(5));
    assert_eq!((description.origin, description.nvme), (BlockOrigin::Placed, Some(DeviceId(0))));
}

#[test]
fn loaded_block_gets_origin_placed_when_made_durable_for_an_offer() {
    let (mut harness, session) = harness();
    fetch(&mut harness, session, key(5));
    fetch(&mut harness, session, key(6));
    offer(&mut harness, key(6));
    harness.finish_jobs();
    assert_eq!(
        (origin(&harness, key(5)), origin(&harness, key(6))),
        (BlockOrigin::Loaded, BlockOrigin::Placed)
    );
    offer(&mut harness, key(5));
    assert_eq!(origin(&harness, key(5)), BlockOrigin::Placed);
    assert_eq!(described(&harness, key(5)).dram, Some(DramCopy::Unsaved));
}

#[test]
fn commit_sets_origin_saved() {
    let (mut harness, session) = harness();
    fetch(&mut harness, session, key(5));
    offer(&mut harness, key(6));
    finish_all(&mut harness);
    assert_eq!(
        (origin(&harness, key(5)), origin(&harness, key(6))),
        (BlockOrigin::Loaded, BlockOrigin::Placed)
    );
    commit(&mut harness, session, key(5));
    commit(&mut harness, session, key(6));
    assert_eq!(
        (origin(&harness, key(5)), origin(&harness, key(6))),
        (BlockOrigin::Saved, BlockOrigin::Saved)
    );
}

#[test]
fn commit_during_a_fetch_sets_origin_saved() {
    let (mut harness, session) = harness();
    offer(&mut harness, key(5));
    commit(&mut harness, session, key(5));
    assert_eq!(origin(&harness, key(5)), BlockOrigin::Saved);
    finish_all(&mut harness);
    assert_eq!(origin(&harness, key(5)), BlockOrigin::Saved);
}

#[test]
fn saved_block_keeps_its_origin_when_made_durable_for_an_offer() {
    let (mut harness, session) = harness();
    limit_devices(&mut harness, 1, 4096);
    commit(&mut harness, session, key(5));
    assert_eq!(described(&harness, key(5)).dram, Some(DramCopy::Clean), "no device has room for the block");
    limit_devices(&mut harness, 2, u64::MAX);
    offer(&mut harness, key(5));
    let description = described(&harness, key(5));
    assert_eq!((description.origin, description.dram), (BlockOrigin::Saved, Some(DramCopy::Unsaved)));
}

#[test]
fn load_after_a_failed_pull_sets_origin_loaded() {
    let (mut harness, session) = harness();
    harness.peer_offer(ONE, TENANT, large_layout(), &[key(5)]);
    harness.add_peer_replica(ONE, key(5), Tier::Dram);
    harness.load(session, &[key(5)], LATER, Scope::Cluster);
    let pull = harness.fills()[0];
    harness.fail(pull, FillError::Absent);
    finish_all(&mut harness);
    assert_eq!(origin(&harness, key(5)), BlockOrigin::Loaded);
}

#[test]
fn blocks_have_origin_recovered_after_a_restart_until_committed_again() {
    let (mut harness, session) = harness();
    save_durably(&mut harness, session, &keys(0..2));
    offer(&mut harness, key(5));
    finish_all(&mut harness);
    let mut harness = harness.crash();
    for number in [0, 1, 5] {
        let description = described(&harness, key(number));
        assert_eq!(
            (description.origin, description.dram, description.nvme),
            (BlockOrigin::Recovered, None, Some(DeviceId(0))),
            "block {number}"
        );
    }
    let session = harness.open_session(TENANT, large_layout());
    harness.load(session, &keys(0..1), LATER, Scope::Local);
    finish_all(&mut harness);
    commit(&mut harness, session, key(1));
    assert_eq!(
        (origin(&harness, key(0)), origin(&harness, key(1))),
        (BlockOrigin::Recovered, BlockOrigin::Saved),
        "a load changes nothing"
    );
}

#[test]
fn removed_block_gets_a_new_origin() {
    let mut harness = Harness::new(Setup { disks: vec![], ..Setup::default() });
    let session = harness.open_session(TENANT, large_layout());
    commit(&mut harness, session, key(5));
    assert_eq!(described(&harness, key(5)).dram, Some(DramCopy::Clean), "the block can never be saved");
    for number in 100..132 {
        commit(&mut harness, session, key(number));
    }
    assert_eq!(harness.core.describe(&key(5)), None, "the block was evicted");
    fetch(&mut harness, session, key(5));
    finish_all(&mut harness);
    assert_eq!(origin(&harness, key(5)), BlockOrigin::Loaded);
}
