//! Scenarios of extents: limits, full devices, and blocks whose other copies end while a commit is in flight.

use std::time::Duration;

use reprise_agent_core::effect::{CommitStatus, DeviceId, FillId, LeaseId, LoadId, Reply};
use reprise_agent_core::event::{
    CommitItem, CommitRequest, Event, FillError, Grant, Priority, Request, Scope,
};
use reprise_agent_core::limits::EXTENT_COMMITS_MAX;
use reprise_policy::quota::Quota;
use reprise_policy::{BlockKey, NodeId, SessionId, SlotSet, TenantId, Tier};

use crate::engine::RequestKind;
use crate::extent_client::position;
use crate::harness::{Harness, SMALL_KEYS_FROM, Setup, key, keys, large_layout, small_layout};
use crate::jobs::Job;
use crate::memory::checksums;
use crate::scenarios_outbound::save_durably;

/// Leases extents, writes these blocks and commits them; returns when all operations have ended.
fn save(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    write(harness, session, keys);
    harness.commit_extents(session, Priority::Normal);
    harness.finish_jobs();
}

/// Leases extents and writes these blocks.
fn write(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.lease_extents(session, keys.len() as u32);
    harness.finish_jobs();
    harness.write_extents(session, keys);
    harness.finish_jobs();
}

fn last_status(harness: &Harness, session: SessionId) -> Option<CommitStatus> {
    harness.engines[&session].extents.statuses.last().map(|(_, status)| *status)
}

/// Commits all leases of a session, with keys from a number on.
fn commit_leases(harness: &mut Harness, session: SessionId, first_key: u64) {
    let layout = harness.engines[&session].layout;
    let engine = harness.engines.get_mut(&session).expect("open");
    let leases: Vec<LeaseId> = engine.extents.leased.drain(..).map(|extent| extent.lease).collect();
    let item =
        |(lease, number)| CommitItem { lease, key: Some(key(number)), checksums: checksums(number, &layout) };
    let items = leases.into_iter().zip(first_key..).map(item).collect();
    let commit = CommitRequest { items, priority: Priority::Normal, parent: None, position: Some(0) };
    harness.request(session, RequestKind::Other, Request::Commit(commit));
}

#[test]
fn commit_beyond_the_limit_in_flight_is_busy_and_keeps_its_leases() {
    let mut harness = Harness::new(Setup { disks: vec![1 << 30], ..Setup::default() });
    let half = EXTENT_COMMITS_MAX as u64 / 2;
    let sessions = [half, half, 1].map(|count| {
        let session = harness.open_session(TenantId::DEFAULT, small_layout());
        harness.lease_extents(session, count as u32);
        session
    });
    harness.finish_jobs();
    let leased = sessions.map(|session| harness.engines[&session].extents.leased.len() as u64);
    assert_eq!(leased, [half, half, 1]);
    for (session, first_key) in sessions.into_iter().zip([0, half, 2 * half]) {
        commit_leases(&mut harness, session, first_key);
    }
    let headers = harness.jobs.iter().filter(|job| matches!(job, Job::Device { .. })).count();
    assert_eq!(headers, EXTENT_COMMITS_MAX, "all of the first two commits are in flight");
    assert!(sessions[..2].iter().all(|session| harness.engines[session].replies.len() == 1));
    let is_busy = |(_, reply): &(_, Reply)| matches!(reply, Reply::Busy { .. });
    assert!(harness.engines[&sessions[2]].replies.last().is_some_and(is_busy));
    assert_eq!(harness.core.counters().extents_leased, 2 * half + 1, "the refused commit keeps its lease");
}

/// Session with a written extent of a block that only a peer has.
fn session_with_written_block() -> (Harness, SessionId) {
    let mut harness = Harness::new(Setup::default());
    harness.add_peer_replica(NodeId(1), key(0), Tier::Dram);
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    write(&mut harness, session, &keys(0..1));
    (harness, session)
}

/// Starts to load the block from its peer, until it is being fetched.
fn start_fetch(harness: &mut Harness, session: SessionId) {
    harness.load(session, &keys(0..1), Duration::ZERO, Scope::Cluster);
    let lookup = harness.jobs.iter().position(|job| matches!(job, Job::Lookup { .. })).expect("a lookup");
    harness.advance(lookup);
    assert_eq!(fetches(harness).len(), 1);
}

fn fetches(harness: &Harness) -> Vec<FillId> {
    let fill = |job: &Job| match job {
        Job::Fetch { fill, .. } => Some(*fill),
        _ => None,
    };
    harness.jobs.iter().filter_map(fill).collect()
}

/// Loads held by a session.
fn loads(harness: &Harness, session: SessionId) -> Vec<LoadId> {
    harness.engines[&session].loads.keys().copied().collect()
}

/// Checks that the committed block is durable, and findable after a power loss.
fn assert_committed_block_survives(mut harness: Harness, session: SessionId) {
    harness.finish_jobs();
    assert_eq!(last_status(&harness, session), Some(CommitStatus::Durable));
    let mut harness = harness.crash();
    harness.apply(Event::InventoryWanted { slots: Box::new(SlotSet::ALL) });
    assert!(harness.announced.contains(&(key(0), Tier::Nvme)));
}

#[test]
fn commit_replaces_a_suspect_copy_that_was_the_only_one() {
    let (mut harness, session) = session_with_written_block();
    start_fetch(&mut harness, session);
    harness.finish_jobs();
    let load = loads(&harness, session)[0];
    harness.suspect(session, load, vec![0]);
    // The core's audit after each event finds entries without a copy.
    harness.commit_extents(session, Priority::Normal);
    assert!(!harness.announced.contains(&(key(0), Tier::Dram)), "the suspect copy is not findable");
    harness.match_keys(session, &keys(0..1), Scope::Local);
    let (_, reply) = harness.engines[&session].replies.last().expect("a reply");
    assert!(matches!(reply, Reply::Matched { sources } if sources.is_empty()), "{reply:?}");
    assert_committed_block_survives(harness, session);
}

#[test]
fn commit_of_a_block_whose_fetch_fails_meanwhile_makes_it_findable() {
    let (mut harness, session) = session_with_written_block();
    start_fetch(&mut harness, session);
    harness.commit_extents(session, Priority::Normal);
    let fetch = harness.fills()[0];
    harness.fail(fetch, FillError::PeerLost);
    assert_committed_block_survives(harness, session);
}

#[test]
fn commit_of_a_block_that_is_still_being_fetched_makes_it_findable() {
    let (mut harness, session) = session_with_written_block();
    start_fetch(&mut harness, session);
    harness.commit_extents(session, Priority::Normal);
    harness.finish_device_ops();
    assert_eq!(fetches(&harness).len(), 1, "the fetch is in flight");
    assert_committed_block_survives(harness, session);
}

#[test]
fn extents_are_leased_from_a_device_with_slots_when_an_emptier_one_has_none() {
    let [small, large] = [12 << 20, 8 << 20];
    let mut harness = Harness::new(Setup { disks: vec![small, large], ..Setup::default() });
    let [first, second] = [0, 1].map(DeviceId);
    harness.detach(second);
    harness.finish_jobs();
    // Every segment of the first device holds small blocks, 170 each; the last one has space for small ones only.
    let session = harness.open_session(TenantId::DEFAULT, small_layout());
    for start in (0..700).step_by(100) {
        save(&mut harness, session, &keys(SMALL_KEYS_FROM + start..SMALL_KEYS_FROM + start + 100));
    }
    assert_eq!(harness.core.counters().nvme_evictions, 0);
    harness.attach(second);
    let free = |harness: &Harness| {
        let counters = harness.core.counters();
        counters.pool_capacity_bytes - counters.pool_used_bytes
    };
    let before = free(&harness);
    let clients = [45, 45, 4].map(|count| {
        let session = harness.open_session(TenantId::DEFAULT, large_layout());
        harness.lease_extents(session, count);
        harness.finish_device_ops();
        session
    });
    let leased = |session: &SessionId| {
        let leased = harness.engines[session].extents.leased.iter();
        leased.map(|extent| position(&extent.place).0).collect::<Vec<_>>()
    };
    assert_eq!(clients.each_ref().map(|session| leased(session).len()), [45, 45, 4]);
    assert!(clients.iter().flat_map(leased).all(|device| device == second && device != first));
    let slot = large_layout().slot_bytes() + 4096;
    assert_eq!(before - free(&harness), 94 * slot);
}

/// A damaged block that a client has pinned keeps its slot, but only the copy that was saved afterwards is found
/// after a crash.
#[test]
fn damaged_pinned_block_that_is_saved_again_is_recovered_from_its_good_copy() {
    for power_loss in [false, true] {
        let mut harness = Harness::new(Setup::default());
        let session = harness.open_session(TenantId::DEFAULT, large_layout());
        save(&mut harness, session, &keys(0..1));
        harness.pin_extents(session, &keys(0..1));
        let (device, page) = position(&harness.engines[&session].extents.pinned[0].2);
        harness.disks[usize::from(device.0)].rot(page);
        harness.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
        harness.finish_jobs();
        save(&mut harness, session, &keys(0..1));
        assert_eq!(last_status(&harness, session), Some(CommitStatus::Durable));
        let mut harness = if power_loss { harness.crash() } else { harness.kill() };
        harness.finish_jobs();
        harness.apply(Event::InventoryWanted { slots: Box::new(SlotSet::ALL) });
        let session = harness.open_session(TenantId::DEFAULT, large_layout());
        harness.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
        harness.finish_jobs();
        let counters = harness.core.counters();
        assert_eq!((counters.hit_blocks_own_nvme, counters.corrupt_blocks), (1, 0));
        let slot = large_layout().slot_bytes() + 4096;
        assert_eq!(counters.pool_used_bytes, slot, "the damaged slot is free");
    }
}

#[test]
fn save_of_another_size_does_not_wait_for_pins_in_every_segment() {
    let mut harness = Harness::new(Setup { disks: vec![8 << 20], ..Setup::default() });
    let reader = harness.open_session(TenantId::DEFAULT, small_layout());
    // The device has three segments, which these blocks fill.
    let stored = keys(SMALL_KEYS_FROM..SMALL_KEYS_FROM + 600);
    save_durably(&mut harness, reader, &stored);
    let pinned: Vec<BlockKey> = stored.iter().skip(100).step_by(10).copied().collect();
    harness.pin_extents(reader, &pinned);
    assert!(harness.core.counters().extents_pinned > 30, "blocks of every segment are pinned");
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    harness.reserve(session, 1);
    harness.commit(session, &keys(0..1), Priority::Normal);
    harness.pass(Duration::from_secs(5));
    harness.finish_jobs();
    assert!(harness.engines[&session].tickets.is_empty(), "there is a notice while the pins are held");
}

#[test]
fn save_of_a_tenant_does_not_wait_for_leases_up_to_its_limit() {
    let mut harness = Harness::new(Setup { disks: vec![16 << 20], ..Setup::default() });
    let lessee = harness.open_session(TenantId::DEFAULT, large_layout());
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    let slot = large_layout().slot_bytes() + 4096;
    let quota = |limit| Quota::new(0, limit).expect("no reservation");
    let (dram, nvme) = (quota(1 << 30), quota(4 * slot));
    harness.apply(Event::Budget(Grant { tenant: TenantId::DEFAULT, version: 1, dram, nvme }));
    harness.lease_extents(lessee, 4);
    harness.finish_jobs();
    assert_eq!(harness.core.counters().extents_leased, 4, "the leases take the whole limit");
    harness.reserve(session, 1);
    harness.commit(session, &keys(0..1), Priority::Normal);
    harness.pass(Duration::from_secs(5));
    harness.finish_jobs();
    assert!(harness.engines[&session].tickets.is_empty(), "there is a notice while the leases are held");
}
