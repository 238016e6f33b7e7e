//! Scenarios and random runs of clients that write and read extents themselves.

use std::time::Duration;

use reprise_agent_core::effect::{CommitStatus, DeviceId, LeaseId, Place, Reply, Source};
use reprise_agent_core::event::{CommitItem, CommitRequest, Event, Priority, Request, Scope};
use reprise_agent_core::extents::PinRefusal;
use reprise_agent_core::{Settings, TenantQuotas};
use reprise_policy::eviction::EvictionKind;
use reprise_policy::{BlockKey, Quota, SessionId, SlotSet, TenantId, Tier};

use crate::engine::RequestKind;
use crate::extent_client::{Content, position};
use crate::harness::{Faults, Harness, Setup, key, keys, large_layout, layout_of, small_layout};
use crate::jobs::Job;
use crate::memory::checksums;
use crate::random::{FAULTS, KEYS, TENANTS, finish_all, random_setup, step};
use crate::rng::{for_seeds, has_fixed_seeds};

fn start() -> (Harness, SessionId) {
    let mut harness = Harness::new(Setup::default());
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    (harness, session)
}

/// Leases extents, writes these blocks and commits them; returns when all operations have ended.
fn save(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.lease_extents(session, keys.len() as u32);
    harness.finish_jobs();
    harness.write_extents(session, keys);
    harness.finish_jobs();
    harness.commit_extents(session, Priority::Normal);
    harness.finish_jobs();
}

fn statuses(harness: &Harness, session: SessionId) -> Vec<CommitStatus> {
    harness.engines[&session].extents.statuses.iter().map(|(_, status)| *status).collect()
}

fn is_stored(harness: &Harness, number: u64) -> bool {
    harness.announced.contains(&(key(number), Tier::Nvme))
}

fn used_bytes(harness: &Harness) -> u64 {
    harness.core.counters().pool_used_bytes
}

#[test]
fn block_written_by_its_client_is_findable_only_when_it_is_durable() {
    let (mut harness, session) = start();
    harness.lease_extents(session, 2);
    assert!(harness.engines[&session].extents.leased.is_empty(), "the lend records are not durable yet");
    harness.finish_jobs();
    assert_eq!(harness.engines[&session].extents.leased.len(), 2);
    harness.write_extents(session, &keys(0..2));
    harness.finish_jobs();
    harness.commit_extents(session, Priority::Normal);
    assert!(harness.announced.is_empty() && statuses(&harness, session).is_empty());
    harness.finish_jobs();
    assert_eq!(statuses(&harness, session), [CommitStatus::Durable; 2]);
    assert!(keys(0..2).into_iter().all(|key| harness.announced.contains(&(key, Tier::Nvme))));
    harness.load(session, &keys(0..2), Duration::ZERO, Scope::Local);
    harness.finish_jobs();
    harness.read_all();
    let counters = harness.core.counters();
    assert_eq!(counters.hit_blocks_own_nvme, 2);
    assert_eq!((counters.extents_leased, counters.extent_commits), (0, 2));
    let mut harness = harness.crash();
    harness.apply(Event::InventoryWanted { slots: Box::new(SlotSet::ALL) });
    assert_eq!(harness.announced.len(), 2, "the blocks survive a power loss");
}

#[test]
fn returned_extents_are_free_and_charged_to_no_tenant() {
    let (mut harness, session) = start();
    harness.lease_extents(session, 4);
    harness.finish_jobs();
    let slot = large_layout().slot_bytes() + 4096;
    assert_eq!(used_bytes(&harness), 4 * slot);
    assert_eq!(harness.core.tenant_usage().next().expect("a tenant").nvme.used, 4 * slot);
    harness.abort_extents(session);
    harness.finish_jobs();
    assert_eq!(used_bytes(&harness), 0);
    assert_eq!(harness.core.tenant_usage().next().expect("a tenant").nvme.used, 0);
}

#[test]
fn second_commit_of_a_key_frees_its_extent() {
    let (mut harness, session) = start();
    let other = harness.open_session(TenantId::DEFAULT, large_layout());
    for session in [session, other] {
        harness.lease_extents(session, 1);
        harness.finish_jobs();
        harness.write_extents(session, &keys(0..1));
        harness.finish_jobs();
    }
    // Both commits are in flight at the same time.
    harness.commit_extents(session, Priority::Normal);
    harness.commit_extents(other, Priority::Normal);
    harness.finish_jobs();
    let mut all = [statuses(&harness, session), statuses(&harness, other)].concat();
    all.sort_by_key(|status| *status == CommitStatus::Duplicate);
    assert_eq!(all, [CommitStatus::Durable, CommitStatus::Duplicate]);
    save(&mut harness, other, &keys(0..1));
    assert_eq!(statuses(&harness, other).last(), Some(&CommitStatus::Duplicate));
    assert_eq!(used_bytes(&harness), large_layout().slot_bytes() + 4096, "one slot is used");
}

#[test]
fn invalid_items_are_rejected_and_their_extents_freed() {
    let (mut harness, session) = start();
    harness.lease_extents(session, 1);
    harness.finish_jobs();
    let unknown = harness.engines[&session].extents.leased[0].lease;
    harness.abort_extents(session);
    harness.lease_extents(session, 2);
    harness.finish_jobs();
    let leases: Vec<LeaseId> =
        harness.engines[&session].extents.leased.iter().map(|extent| extent.lease).collect();
    let sums = checksums(1, &large_layout());
    let item = |lease, key, sums: &[u32]| CommitItem { lease, key, checksums: sums.into() };
    let items = vec![
        item(leases[0], None, &sums),
        item(leases[1], Some(key(1)), &sums[1..]),
        item(unknown, Some(key(2)), &sums),
        item(leases[0], Some(key(3)), &sums),
    ];
    let commit = CommitRequest { items, priority: Priority::Normal, parent: None, position: Some(0) };
    harness.request(session, RequestKind::Other, Request::Commit(commit));
    let (_, reply) = harness.engines[&session].replies.last().expect("answered at once");
    let Reply::Committed { ticket: None, statuses } = reply else { panic!("{reply:?}") };
    let (bad, none) = (CommitStatus::BadItem, CommitStatus::NoLease);
    assert_eq!(statuses, &[bad, bad, none, none]);
    harness.finish_jobs();
    assert_eq!(used_bytes(&harness), 0);
}

#[test]
fn commit_with_slots_of_both_kinds_is_rejected_and_keeps_its_leases() {
    let (mut harness, session) = start();
    harness.lease_extents(session, 1);
    harness.finish_jobs();
    harness.reserve(session, 1);
    let engine = &harness.engines[&session];
    let (of_arena, of_extent) = (engine.reserved[0].0, engine.extents.leased[0].lease);
    let checksums = checksums(1, &large_layout());
    let item = |(lease, number)| CommitItem { lease, key: Some(key(number)), checksums: checksums.clone() };
    let items = [(of_arena, 1), (of_extent, 2)].map(item).to_vec();
    let commit = CommitRequest { items, priority: Priority::Normal, parent: None, position: Some(0) };
    harness.request(session, RequestKind::Other, Request::Commit(commit));
    let (_, reply) = harness.engines[&session].replies.last().expect("answered at once");
    assert!(matches!(reply, Reply::BadRequest(text) if text.contains("one commit for each kind")));
    let counters = harness.core.counters();
    assert_eq!((counters.extents_leased, counters.reserved_bytes), (1, large_layout().slot_bytes()));
    // One message releases leases of both kinds.
    let leases = vec![of_arena, of_extent];
    harness.engines.get_mut(&session).expect("open").extents.leased.clear();
    harness.engines.get_mut(&session).expect("open").reserved.clear();
    harness.request(session, RequestKind::Other, Request::Abort { leases });
    harness.finish_jobs();
    let counters = harness.core.counters();
    assert_eq!((counters.extents_leased, counters.reserved_bytes, used_bytes(&harness)), (0, 0, 0));
}

#[test]
fn slot_of_a_dead_holder_is_not_reused_before_its_write_has_ended() {
    let (mut harness, session) = start();
    harness.lease_extents(session, 1);
    harness.finish_jobs();
    let place = harness.engines[&session].extents.leased[0].place;
    harness.write_extents(session, &keys(0..1));
    harness.close_session(session);
    assert_eq!(harness.core.counters().extents_quarantined, 1);
    let other = harness.open_session(TenantId::DEFAULT, large_layout());
    harness.lease_extents(other, 8);
    harness.finish_device_ops();
    let leased: Vec<_> =
        harness.engines[&other].extents.leased.iter().map(|extent| position(&extent.place)).collect();
    assert_eq!(leased.len(), 8);
    assert!(!leased.contains(&position(&place)));
    harness.finish_jobs();
    assert_eq!(harness.core.counters().extents_quarantined, 0);
    harness.lease_extents(other, 4);
    harness.finish_jobs();
    let mut again = harness.engines[&other].extents.leased.iter().map(|extent| position(&extent.place));
    assert!(again.any(|other| other == position(&place)), "the slot is reused afterwards");
}

#[test]
fn killed_agent_finds_extents_that_a_client_still_writes() {
    let (mut harness, session) = start();
    save(&mut harness, session, &keys(10..12));
    harness.lease_extents(session, 2);
    harness.finish_jobs();
    let place = harness.engines[&session].extents.leased[0].place;
    harness.write_extents(session, &keys(0..1));
    let mut harness = harness.kill();
    let slot = large_layout().slot_bytes() + 4096;
    assert_eq!(used_bytes(&harness), 4 * slot, "two blocks, and two slots that may be written");
    let other = harness.open_session(TenantId::DEFAULT, large_layout());
    harness.lease_extents(other, 8);
    harness.finish_device_ops();
    let leased: Vec<_> =
        harness.engines[&other].extents.leased.iter().map(|extent| position(&extent.place)).collect();
    assert!(leased.len() == 8 && !leased.contains(&position(&place)));
    harness.abort_extents(other);
    harness.finish_jobs();
    assert_eq!(used_bytes(&harness), 2 * slot, "only the blocks remain");
    harness.load(other, &keys(10..12), Duration::ZERO, Scope::Local);
    harness.finish_jobs();
    harness.read_all();
    assert_eq!(harness.core.counters().hit_blocks_own_nvme, 2);
}

#[test]
fn pinned_block_is_neither_evicted_nor_its_segment_emptied() {
    let settings = Settings { pool_free_permille: 500, ..Setup::default().settings };
    let mut harness = Harness::new(Setup { disks: vec![8 << 20], settings, ..Setup::default() });
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    save(&mut harness, session, &keys(0..4));
    harness.pin_extents(session, &keys(0..1));
    assert_eq!(harness.engines[&session].extents.pinned.len(), 1);
    for start in (100..200).step_by(4) {
        save(&mut harness, session, &keys(start..start + 4));
        harness.read_all();
    }
    assert!(is_stored(&harness, 0) && !is_stored(&harness, 1), "its neighbours were evicted");
    harness.unpin_extents(session);
    for start in (200..300).step_by(4) {
        save(&mut harness, session, &keys(start..start + 4));
    }
    assert!(!is_stored(&harness, 0), "without a pin it is evicted like others");
}

/// Saves unrelated blocks to extents, uses the first four, matches the others, and fills the device; returns whether
/// each of the eight is still stored. The policy counts uses.
fn stored_after_uses(use_four: impl Fn(&mut Harness, SessionId)) -> Vec<bool> {
    let nvme_eviction = EvictionKind::Lfu.into();
    let settings = Settings { pool_free_permille: 100, nvme_eviction, ..Setup::default().settings };
    let mut harness = Harness::new(Setup { disks: vec![8 << 20], settings, ..Setup::default() });
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    (0..8).for_each(|number| save(&mut harness, session, &keys(number..number + 1)));
    use_four(&mut harness, session);
    for number in 4..8 {
        harness.match_keys(session, &keys(number..number + 1), Scope::Local);
    }
    (100..220).for_each(|number| save(&mut harness, session, &keys(number..number + 1)));
    assert!(harness.core.counters().nvme_evictions > 8, "the device is full");
    (0..8).map(|number| is_stored(&harness, number)).collect()
}

#[test]
fn pins_and_repeated_commits_of_extents_are_uses() {
    let used = [vec![true; 4], vec![false; 4]].concat();
    let pinned = stored_after_uses(|harness, session| {
        harness.pin_extents(session, &keys(0..4));
        harness.unpin_extents(session);
        harness.finish_jobs();
    });
    assert_eq!(pinned, used, "after pins");
    let committed = stored_after_uses(|harness, session| {
        (0..4).for_each(|number| save(harness, session, &keys(number..number + 1)));
    });
    assert_eq!(committed, used, "after commits");
}

#[test]
fn damaged_pinned_block_frees_its_slot_with_the_last_pin() {
    let (mut harness, session) = start();
    save(&mut harness, session, &keys(0..1));
    harness.pin_extents(session, &keys(0..1));
    let (device, page) = position(&harness.engines[&session].extents.pinned[0].2);
    harness.disks[usize::from(device.0)].rot(page);
    harness.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    harness.finish_jobs();
    assert!(!harness.announced.contains(&(key(0), Tier::Nvme)), "the block is dropped");
    assert!(used_bytes(&harness) > 0, "the client may still read its slot");
    harness.unpin_extents(session);
    harness.finish_jobs();
    assert_eq!(used_bytes(&harness), 0);
}

#[test]
fn only_durable_blocks_of_the_session_are_pinned() {
    let (mut harness, session) = start();
    harness.reserve(session, 1);
    harness.commit(session, &keys(0..1), Priority::Normal);
    harness.pin_extents(session, &keys(0..2));
    let refusals = &harness.engines[&session].extents.refusals;
    assert_eq!(refusals, &[PinRefusal::NotDurable, PinRefusal::Miss]);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
    harness.pin_extents(session, &keys(0..1));
    let Place::Extent { bytes, header_crc, .. } = harness.engines[&session].extents.pinned[0].2 else {
        panic!("a pin names an extent")
    };
    assert!(bytes == large_layout().slot_bytes() && header_crc != 0);
    let stranger = harness.open_session(TenantId(1), large_layout());
    harness.pin_extents(stranger, &keys(0..1));
    assert_eq!(harness.engines[&stranger].extents.refusals, [PinRefusal::Miss]);
}

#[test]
fn extents_are_limited_by_session_share_and_quota() {
    let slot = large_layout().slot_bytes() + 4096;
    let quota = Quota::new(0, 3 * slot).expect("valid");
    let limited = TenantQuotas { tenant: TenantId(1), dram: Quota::UNLIMITED, nvme: quota };
    let settings = Settings { tenants: vec![limited], ..Setup::default().settings };
    let mut harness = Harness::new(Setup { settings, ..Setup::default() });
    let session = harness.open_session(TenantId(1), large_layout());
    harness.lease_extents(session, 8);
    harness.finish_jobs();
    assert_eq!(harness.engines[&session].extents.leased.len(), 3, "the limit of the tenant");
    let other = harness.open_session(TenantId::DEFAULT, large_layout());
    for _ in 0..4 {
        harness.lease_extents(other, 8000);
    }
    harness.finish_jobs();
    let share = harness.core.counters().pool_capacity_bytes / 1000 * 250;
    let leased = harness.engines[&other].extents.leased.len() as u64;
    assert!(leased * slot <= share && (leased + 1) * slot > share, "a quarter of the devices");
    harness.lease_extents(other, 1);
    let refused =
        |(_, reply): &(_, Reply)| matches!(reply, Reply::Busy { message, .. } if message.contains("share"));
    assert!(harness.engines[&other].replies.last().is_some_and(refused));
}

#[test]
fn detached_device_is_released_after_its_extents() {
    let mut harness = Harness::new(Setup { disks: vec![8 << 20, 8 << 20], ..Setup::default() });
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    save(&mut harness, session, &keys(0..1));
    harness.pin_extents(session, &keys(0..1));
    let (device, _) = position(&harness.engines[&session].extents.pinned[0].2);
    harness.detach(device);
    harness.finish_jobs();
    assert!(harness.released.is_empty(), "a client reads the device");
    harness.unpin_extents(session);
    assert!(harness.released.contains(&device));
}

/// Probability of an action of a client with extents, in thousandths.
const EXTENT_STEPS: u64 = 350;

/// Harness in which no block on a device may have other contents than its checksums.
fn strict(setup: Setup) -> Harness {
    let mut harness = Harness::new(setup);
    harness.disks.iter_mut().for_each(|disk| disk.may_differ = false);
    harness
}

/// Executes one random step, of a client with extents or of another participant.
fn step_with_extents(harness: &mut Harness) {
    if !harness.rng.chance(EXTENT_STEPS) {
        return step(harness);
    }
    let sessions: Vec<SessionId> = harness.engines.keys().copied().collect();
    if sessions.is_empty() {
        return step(harness);
    }
    let session = sessions[harness.rng.below(sessions.len())];
    let some = some_keys_of(harness, session);
    match harness.rng.below(100) {
        0..25 => {
            let count = 1 + harness.rng.below(6) as u32;
            harness.lease_extents(session, count);
        }
        25..50 => harness.write_extents(session, &some),
        50..70 => harness.commit_extents(session, Priority::Normal),
        70..74 => harness.abort_extents(session),
        74..90 => harness.pin_extents(session, &some),
        90..99 => harness.unpin_extents(session),
        _ => harness.close_session(session),
    }
    harness.read_all();
}

fn some_keys_of(harness: &mut Harness, session: SessionId) -> Vec<BlockKey> {
    let engine = &harness.engines[&session];
    let small = engine.layout == small_layout();
    let base = u64::from(engine.tenant.0) * 100 + if small { 1000 } else { 0 };
    let layout = engine.layout;
    let start = harness.rng.below(KEYS as usize) as u64;
    let count = 1 + harness.rng.below(6) as u64;
    let some = (0..count).map(|offset| key(base + (start + offset) % KEYS));
    some.filter(|key| layout_of(key) == layout).collect()
}

fn finish(harness: &mut Harness) {
    // Leases and pins may never end: no save waits for them.
    harness.pass(Duration::from_secs(5));
    harness.finish_jobs();
    for (session, engine) in &harness.engines {
        assert!(engine.tickets.is_empty(), "{session:?}: no notice of {:?}", engine.tickets);
    }
    finish_all(harness);
    let counters = harness.core.counters();
    let left = [counters.extents_leased, counters.extents_quarantined, counters.extents_pinned];
    assert_eq!(left, [0; 3], "extents remain");
}

#[test]
fn random_runs_with_extents_neither_leak_nor_read_wrong_bytes() {
    let sums = std::cell::Cell::new([0; 3]);
    for_seeds(40, |seed| {
        let mut harness = strict(random_setup(seed, FAULTS));
        for _ in 0..1500 {
            step_with_extents(&mut harness);
        }
        finish(&mut harness);
        let counters = harness.core.counters();
        let new = [counters.extent_leases, counters.extent_commits, counters.extent_pins];
        sums.set(std::array::from_fn(|at| sums.get()[at] + new[at]));
    });
    if has_fixed_seeds() {
        assert!(sums.get().iter().all(|sum| *sum > 500), "leases, commits, pins: {:?}", sums.get());
    }
}

#[test]
fn lost_and_detached_devices_with_extents_cost_capacity_only() {
    for_seeds(24, |seed| {
        let faults = Faults { device_lost: if seed % 2 == 0 { 2 } else { 0 }, ..FAULTS };
        let mut setup = random_setup(seed, faults);
        if setup.disks.is_empty() {
            setup.disks.push(16 << 20);
        }
        let devices = setup.disks.len();
        let mut harness = strict(setup);
        for _ in 0..1200 {
            step_with_extents(&mut harness);
            if seed % 2 == 1 && harness.rng.chance(20) {
                let device = DeviceId(harness.rng.below(devices) as u8);
                match harness.released.contains(&device) {
                    true => harness.attach(device),
                    false => harness.detach(device),
                }
            }
        }
        harness.faults.device_lost = 0;
        finish(&mut harness);
    });
}

#[test]
fn kills_and_power_losses_lose_no_durable_block_and_no_slot() {
    let (kills, late) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    for_seeds(60, |seed| {
        let quiet = Faults { write_media: 0, read: 0, refused: 0, ..FAULTS };
        let setup = random_setup(seed, quiet);
        let disks = if setup.disks.is_empty() { vec![8 << 20] } else { setup.disks.clone() };
        let mut harness = strict(Setup { disks, ..setup });
        for _ in 0..5 {
            for _ in 0..150 + harness.rng.below(300) {
                step_with_extents(&mut harness);
            }
            let promised: Vec<BlockKey> = harness
                .announced
                .iter()
                .filter(|(_, tier)| *tier == Tier::Nvme)
                .map(|(key, _)| *key)
                .collect();
            let writes = harness.jobs.iter().filter(|job| matches!(job, Job::ExtentWrite(_))).count();
            harness = match harness.rng.chance(700) {
                true => {
                    kills.set(kills.get() + 1);
                    late.set(late.get() + writes);
                    harness.kill()
                }
                false => harness.crash(),
            };
            harness.apply(Event::InventoryWanted { slots: Box::new(SlotSet::ALL) });
            let evicted = harness.core.counters().nvme_evictions as usize;
            let gone =
                promised.iter().filter(|key| !harness.announced.contains(&(**key, Tier::Nvme))).count();
            assert!(gone <= evicted, "{gone} durable blocks are missing, {evicted} were evicted");
        }
        finish(&mut harness);
        load_all(&mut harness);
    });
    if has_fixed_seeds() {
        assert!(kills.get() > 100 && late.get() > 50, "{} kills, {} late writes", kills.get(), late.get());
    }
}

/// Loads every block on the devices, whose content the harness checks.
fn load_all(harness: &mut Harness) {
    let all: Vec<BlockKey> = harness.announced.iter().map(|(key, _)| *key).collect();
    for tenant in (0..TENANTS).map(TenantId) {
        for layout in [large_layout(), small_layout()] {
            let session = harness.open_session(tenant, layout);
            let fitting: Vec<BlockKey> = all.iter().copied().filter(|key| layout_of(key) == layout).collect();
            for some in fitting.chunks(2) {
                harness.load(session, some, Duration::from_secs(1), Scope::Local);
                harness.finish_jobs();
                harness.read_all();
                for load in harness.engines[&session].loads.keys().copied().collect::<Vec<_>>() {
                    harness.release(session, load);
                }
            }
            harness.close_session(session);
        }
    }
}

#[test]
fn extent_that_is_being_written_is_not_committed() {
    let (mut harness, session) = start();
    harness.lease_extents(session, 1);
    harness.finish_jobs();
    harness.write_extents(session, &keys(0..1));
    harness.commit_extents(session, Priority::Normal);
    let leased = &harness.engines[&session].extents.leased;
    assert!(matches!(leased[0].content, Content::Writing(..)), "the client waits for its own write");
    harness.match_keys(session, &keys(0..1), Scope::Local);
    let (_, reply) = harness.engines[&session].replies.last().expect("a reply");
    assert!(matches!(reply, Reply::Matched { sources } if !sources.contains(&Source::OwnNvme)));
}
