//! Several tenants on one node: one behaviour at a time.

use std::time::Duration;

use reprise_agent_core::agent::{Settings, TenantQuotas, TenantUsage};
use reprise_agent_core::effect::{DeviceId, Reply, Report, Room};
use reprise_agent_core::event::{Event, Grant, Priority, Request, Scope};
use reprise_agent_core::pool::header::read_header;
use reprise_agent_core::pool::{DeviceOp, DeviceOpKind};
use reprise_policy::{BlockKey, Quota, SessionId, TenantId, Tier};

use crate::engine::Asked;
use crate::jobs::Job;
use crate::world::{Setup, World, key, keys, large_layout};

const A: TenantId = TenantId(1);
const B: TenantId = TenantId(2);

/// Bytes of a block in DRAM, and on NVMe with its header page.
fn dram(blocks: u64) -> u64 {
    blocks * large_layout().slot_bytes()
}

fn nvme(blocks: u64) -> u64 {
    blocks * (large_layout().slot_bytes() + 4096)
}

fn quota(reserved: u64, limit: u64) -> Quota {
    Quota::new(reserved, limit).expect("reserved within the limit")
}

fn quotas(tenant: TenantId, dram: Quota, nvme: Quota) -> TenantQuotas {
    TenantQuotas { tenant, dram, nvme }
}

/// 4 regions of 4 blocks, a device of 3 segments of 32 blocks, sessions of A and B.
fn with(tenants: Vec<TenantQuotas>) -> (World, SessionId, SessionId) {
    let settings = Settings { tenants, pool_free_permille: 0, ..Setup::default().settings };
    let mut world = World::new(Setup { disks: vec![8 << 20], settings, ..Setup::default() });
    let a = world.open_session(A, large_layout());
    let b = world.open_session(B, large_layout());
    (world, a, b)
}

fn save_durably(world: &mut World, session: SessionId, keys: &[BlockKey]) {
    world.reserve(session, keys.len() as u32);
    world.commit(session, keys, Priority::Normal);
    world.pass(Duration::from_millis(6));
    world.finish_jobs();
}

fn usage(world: &World, tenant: TenantId) -> TenantUsage {
    world.core.tenant_usage().find(|usage| usage.tenant == tenant).expect("it had a session")
}

/// Names of tenants in the headers of blocks that are being written.
fn names_being_written(world: &World) -> Vec<Option<String>> {
    let headers = world.jobs.iter().filter_map(|job| match job {
        Job::Device { op: DeviceOp { kind: DeviceOpKind::WriteBlock { header, .. }, .. }, .. } => {
            Some(header)
        }
        _ => None,
    });
    let names = headers.map(|header| read_header(header).expect("intact").0.tenant);
    names.map(|name| name.map(String::from)).collect()
}

#[test]
fn blocks_carry_the_name_of_their_tenant_once_it_is_known() {
    let (mut world, a, b) = with(Vec::new());
    let written = |world: &mut World, session, number| {
        world.reserve(session, 1);
        world.commit(session, &[key(number)], Priority::Normal);
        world.pass(Duration::from_millis(6));
        let names = names_being_written(world);
        world.finish_jobs();
        names
    };
    assert_eq!(written(&mut world, a, 1), [None], "nobody has said it");
    world.apply(Event::TenantNamed { tenant: A, name: "team-a".parse().expect("a name") });
    assert_eq!(written(&mut world, a, 2), [Some("team-a".to_owned())]);
    assert_eq!(written(&mut world, b, 3), [None], "it is another tenant's");
}

fn reserved(world: &World, session: SessionId) -> usize {
    world.engines[&session].reserved.len()
}

fn on(world: &World, tier: Tier, keys: &[BlockKey]) -> usize {
    keys.iter().filter(|key| world.announced.contains(&(**key, tier))).count()
}

#[test]
fn a_tenant_at_its_limit_of_memory_evicts_its_own_and_nobody_elses() {
    let (mut world, a, b) = with(vec![quotas(A, quota(0, dram(3)), Quota::UNLIMITED)]);
    save_durably(&mut world, b, &keys(100..104));
    save_durably(&mut world, a, &keys(0..3));
    save_durably(&mut world, a, &keys(3..5));
    assert_eq!(on(&world, Tier::Dram, &keys(0..5)), 3);
    assert_eq!(on(&world, Tier::Dram, &keys(1..3)), 0, "the tail of the oldest chain went");
    assert_eq!(on(&world, Tier::Dram, &keys(100..104)), 4, "the other tenant's stay");
    assert_eq!((usage(&world, A).dram.used, usage(&world, B).dram.used), (dram(3), dram(4)));
    assert_eq!(usage(&world, A).counts.dram_evictions, 2);
    assert_eq!(usage(&world, A).counts.dram_limited_bytes, dram(2));
}

#[test]
fn a_tenant_all_of_whose_slots_are_in_use_is_told_to_come_again_and_then_gets_some() {
    let (mut world, a, b) = with(vec![quotas(A, quota(0, dram(2)), Quota::UNLIMITED)]);
    save_durably(&mut world, a, &keys(0..2));
    world.load(a, &keys(0..2), Duration::ZERO, Scope::Local);
    world.reserve(a, 1);
    let (_, reply) = world.engines[&a].replies.last().expect("answered");
    let Reply::Reserved { leases, retry_after, .. } = reply else { panic!("not refused: {reply:?}") };
    assert!(leases.is_empty() && !retry_after.is_zero());
    world.reserve(b, 4);
    assert_eq!(reserved(&world, b), 4, "others do not feel it");
    let load = *world.engines[&a].loads.keys().next().expect("held");
    world.release(a, load);
    world.reserve(a, 1);
    assert_eq!(reserved(&world, a), 1);
}

#[test]
fn a_block_larger_than_its_tenants_limit_of_memory_is_refused_with_what_to_do() {
    let (mut world, a, _) = with(vec![quotas(A, quota(0, dram(1) - 1), Quota::UNLIMITED)]);
    world.request(a, Asked::Other, Request::Reserve { count: 1 });
    let (_, reply) = world.engines[&a].replies.last().expect("answered");
    assert!(matches!(reply, Reply::BadRequest(text) if text.contains("dram.limit")), "{reply:?}");
}

#[test]
fn memory_is_kept_for_who_has_it_reserved() {
    let (mut world, a, b) = with(vec![quotas(B, quota(dram(5), dram(16)), Quota::UNLIMITED)]);
    world.reserve(a, 16);
    assert_eq!(reserved(&world, a), 8, "two of four regions are kept for B");
    world.reserve(b, 16);
    assert_eq!(reserved(&world, b), 8);
}

#[test]
fn a_tenant_at_its_limit_on_devices_evicts_its_own_and_nobody_elses() {
    let (mut world, a, b) = with(vec![quotas(A, Quota::UNLIMITED, quota(0, nvme(3)))]);
    save_durably(&mut world, b, &keys(100..104));
    for start in 0..6 {
        save_durably(&mut world, a, &keys(start..start + 1));
    }
    assert_eq!((on(&world, Tier::Nvme, &keys(0..3)), on(&world, Tier::Nvme, &keys(3..6))), (0, 3));
    assert_eq!(on(&world, Tier::Nvme, &keys(100..104)), 4);
    assert_eq!(usage(&world, A).nvme.used, nvme(3));
    assert_eq!(usage(&world, A).counts.nvme_evictions, 3);
    let durable: u32 = world.engines[&a].notices.iter().map(|(_, durable, _)| *durable).sum();
    assert_eq!(durable, 6, "every block was saved, each in its turn");
}

#[test]
fn who_is_over_its_reservation_gives_way_on_devices_before_who_is_not() {
    let of_b = quotas(B, quota(dram(8), dram(16)), quota(nvme(24), nvme(64)));
    let (mut world, a, b) = with(vec![of_b]);
    let fill = |world: &mut World, session, range: std::ops::Range<u64>| {
        for start in range.step_by(4) {
            save_durably(world, session, &keys(start..start + 4));
        }
    };
    fill(&mut world, a, 0..120);
    fill(&mut world, b, 500..524);
    assert_eq!(on(&world, Tier::Nvme, &keys(500..524)), 24, "B has what is reserved for it");
    fill(&mut world, a, 200..320);
    assert_eq!(on(&world, Tier::Nvme, &keys(500..524)), 24, "and keeps it, whatever A writes");
    assert_eq!(usage(&world, B).counts.nvme_evictions, 0);
    fill(&mut world, b, 600..660);
    assert!(usage(&world, B).nvme.used > nvme(30), "what nobody has reserved is shared");
}

#[test]
fn a_tenant_without_room_on_devices_is_cached_in_memory_only() {
    let (mut world, a, _) = with(vec![quotas(A, Quota::UNLIMITED, quota(0, 0))]);
    save_durably(&mut world, a, &keys(0..2));
    assert_eq!((on(&world, Tier::Dram, &keys(0..2)), on(&world, Tier::Nvme, &keys(0..2))), (2, 0));
    assert_eq!(world.engines[&a].notices.last().expect("a notice").2, keys(0..2));
    assert!(world.reports.is_empty(), "that is as it was configured: {:?}", world.reports);
}

#[test]
fn blocks_on_devices_stay_their_tenants_when_the_agent_restarts() {
    let tenants = vec![quotas(A, Quota::UNLIMITED, quota(0, nvme(8)))];
    let (mut world, a, b) = with(tenants);
    save_durably(&mut world, a, &keys(0..4));
    save_durably(&mut world, b, &keys(100..103));
    let mut world = world.crash();
    assert_eq!((usage(&world, A).nvme.used, usage(&world, B).nvme.used), (nvme(4), nvme(3)));
    let (a, b) = (world.open_session(A, large_layout()), world.open_session(B, large_layout()));
    for (session, number, expected) in [(a, 0, 1), (a, 100, 0), (b, 100, 1), (b, 0, 0)] {
        world.match_keys(session, &[key(number)], Scope::Local);
        let (_, reply) = world.engines[&session].replies.last().expect("answered");
        assert!(
            matches!(reply, Reply::Matched { sources } if sources.len() == expected),
            "{number}: {reply:?}"
        );
    }
}

fn grant(world: &mut World, version: u64, dram_bytes: u64, nvme_bytes: u64) {
    let limit = |bytes| Quota::new(0, bytes).expect("nothing is reserved");
    let (dram, nvme) = (limit(dram_bytes), limit(nvme_bytes));
    world.apply(Event::Budget(Grant { tenant: A, version, dram, nvme }));
}

#[test]
fn a_lowered_grant_is_met_by_evictions_and_a_raised_one_gives_room_again() {
    let (mut world, a, b) = with(Vec::new());
    save_durably(&mut world, a, &keys(0..8));
    save_durably(&mut world, b, &keys(100..104));
    grant(&mut world, 2, dram(3), nvme(5));
    assert_eq!((usage(&world, A).dram.used, usage(&world, A).nvme.used), (dram(3), nvme(5)));
    assert_eq!(usage(&world, A).grant.map(|grant| grant.version), Some(2));
    grant(&mut world, 1, 0, 0);
    assert_eq!(usage(&world, A).dram.used, dram(3), "a grant from before is passed over");
    save_durably(&mut world, a, &keys(8..10));
    assert_eq!((usage(&world, A).dram.used, usage(&world, A).nvme.used), (dram(3), nvme(5)));
    grant(&mut world, 3, dram(6), nvme(9));
    save_durably(&mut world, a, &keys(10..13));
    assert_eq!((usage(&world, A).dram.used, usage(&world, A).nvme.used), (dram(6), nvme(8)));
    assert_eq!((usage(&world, B).dram.used, usage(&world, B).nvme.used), (dram(4), nvme(4)));
}

#[test]
fn what_is_read_while_a_grant_is_lowered_goes_when_it_is_released() {
    let (mut world, a, _) = with(Vec::new());
    save_durably(&mut world, a, &keys(0..4));
    world.load(a, &keys(0..4), Duration::ZERO, Scope::Local);
    grant(&mut world, 1, dram(1), nvme(4));
    assert_eq!(usage(&world, A).dram.excess(), dram(3), "it is leased");
    world.reserve(a, 1);
    assert_eq!(reserved(&world, a), 0, "nothing new meanwhile");
    let load = *world.engines[&a].loads.keys().next().expect("held");
    world.release(a, load);
    assert_eq!(usage(&world, A).dram.used, dram(1));
}

#[test]
fn what_is_not_saved_yet_is_saved_at_once_when_a_grant_is_lowered() {
    let (mut world, a, _) = with(Vec::new());
    world.reserve(a, 1);
    world.commit(a, &keys(0..1), Priority::Normal);
    assert!(world.jobs.is_empty(), "it waits for company");
    grant(&mut world, 1, 0, nvme(4));
    assert!(!world.jobs.is_empty(), "its memory is wanted");
    world.finish_jobs();
    assert_eq!((usage(&world, A).dram.used, usage(&world, A).nvme.used), (0, nvme(1)));
}

#[test]
fn what_is_not_saved_for_a_grant_of_less_than_a_block_counts_as_wanted() {
    let (mut world, a, _) = with(Vec::new());
    world.reserve(a, 3);
    world.commit(a, &keys(0..1), Priority::Normal);
    grant(&mut world, 1, dram(16), nvme(1) - 1);
    let limited = |world: &World| usage(world, A).counts.nvme_limited_bytes;
    world.pass(Duration::from_secs(1));
    assert_eq!(limited(&world), dram(1), "it had waited for company");
    world.commit(a, &keys(1..3), Priority::Normal);
    assert_eq!((limited(&world), usage(&world, A).nvme.used), (dram(3), 0));
    assert_eq!(on(&world, Tier::Dram, &keys(0..3)), 3, "they are cached in memory");
}

#[test]
fn the_limit_of_the_configuration_holds_whatever_is_granted() {
    let (mut world, a, _) = with(vec![quotas(A, quota(0, dram(2)), Quota::UNLIMITED)]);
    grant(&mut world, 1, dram(16), nvme(64));
    world.reserve(a, 16);
    assert_eq!(reserved(&world, a), 2);
}

#[test]
fn reservations_that_a_lost_device_could_keep_are_reported_and_shrink_in_proportion() {
    let half = quota(nvme(60), u64::MAX);
    let tenants = vec![quotas(A, Quota::UNLIMITED, half), quotas(B, Quota::UNLIMITED, half)];
    let settings = Settings { tenants, pool_free_permille: 0, ..Setup::default().settings };
    let mut world = World::new(Setup { disks: vec![8 << 20, 8 << 20], settings, ..Setup::default() });
    assert!(world.reports.is_empty(), "{:?}", world.reports);
    world.apply(Event::DeviceLost { device: DeviceId(1), reason: "gone".to_owned() });
    let report = world.reports.iter().find_map(|report| match report {
        Report::Overcommitted { room: Room::Nvme, error } => Some(error.to_string()),
        _ => None,
    });
    assert!(report.expect("said").contains("lower reservations"));
    let kept = usage(&world, A).nvme.quota.reserved();
    assert!(kept < nvme(60) && kept > nvme(30), "{kept}");
}
