//! Scenarios: several tenants on one node.

use std::time::Duration;

use reprise_agent_core::effect::{DeviceId, Diagnostic, PlaceKind, QuotaResource, Reply};
use reprise_agent_core::event::{Event, Grant, Priority, Request, Scope};
use reprise_agent_core::pool::header::read_header;
use reprise_agent_core::pool::{DeviceOp, DeviceOpKind};
use reprise_agent_core::{Settings, TenantQuotas, TenantUsage};
use reprise_policy::{BlockKey, Quota, SessionId, TenantId, Tier};

use crate::engine::RequestKind;
use crate::harness::{Harness, Setup, key, keys, large_layout};
use crate::jobs::Job;

const A: TenantId = TenantId(1);
const B: TenantId = TenantId(2);

/// Bytes of blocks in DRAM.
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

/// Four regions of four blocks, a device of three segments of 32 blocks, and sessions of A and B.
fn with(tenants: Vec<TenantQuotas>) -> (Harness, SessionId, SessionId) {
    let settings = Settings { tenants, pool_free_permille: 0, ..Setup::default().settings };
    let mut harness = Harness::new(Setup { disks: vec![8 << 20], settings, ..Setup::default() });
    let a = harness.open_session(A, large_layout());
    let b = harness.open_session(B, large_layout());
    (harness, a, b)
}

fn save_durably(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.reserve(session, keys.len() as u32);
    harness.commit(session, keys, Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
}

fn usage(harness: &Harness, tenant: TenantId) -> TenantUsage {
    harness.core.tenant_usage().find(|usage| usage.tenant == tenant).expect("the tenant had a session")
}

/// Tenant names in the headers of blocks that are being written.
fn names_being_written(harness: &Harness) -> Vec<Option<String>> {
    let headers = harness.jobs.iter().filter_map(|job| match job {
        Job::Device { op: DeviceOp { kind: DeviceOpKind::WriteBlock { header, .. }, .. }, .. } => {
            Some(header)
        }
        _ => None,
    });
    let names = headers.map(|header| read_header(header).expect("intact").0.tenant);
    names.map(|name| name.map(String::from)).collect()
}

#[test]
fn headers_contain_the_name_of_the_tenant_once_it_is_known() {
    let (mut harness, a, b) = with(Vec::new());
    let written = |harness: &mut Harness, session, number| {
        harness.reserve(session, 1);
        harness.commit(session, &[key(number)], Priority::Normal);
        harness.pass(Duration::from_millis(6));
        let names = names_being_written(harness);
        harness.finish_jobs();
        names
    };
    assert_eq!(written(&mut harness, a, 1), [None], "the name is unknown");
    harness.apply(Event::TenantNamed { tenant: A, name: "team-a".parse().expect("a name") });
    assert_eq!(written(&mut harness, a, 2), [Some("team-a".to_owned())]);
    assert_eq!(written(&mut harness, b, 3), [None], "the name of another tenant");
}

fn reserved(harness: &Harness, session: SessionId) -> usize {
    harness.engines[&session].reserved.len()
}

fn on(harness: &Harness, tier: Tier, keys: &[BlockKey]) -> usize {
    keys.iter().filter(|key| harness.announced.contains(&(**key, tier))).count()
}

#[test]
fn tenant_at_its_dram_limit_evicts_only_its_own_blocks() {
    let (mut harness, a, b) = with(vec![quotas(A, quota(0, dram(3)), Quota::UNLIMITED)]);
    save_durably(&mut harness, b, &keys(100..104));
    save_durably(&mut harness, a, &keys(0..3));
    save_durably(&mut harness, a, &keys(3..5));
    assert_eq!(on(&harness, Tier::Dram, &keys(0..5)), 3);
    assert_eq!(on(&harness, Tier::Dram, &keys(1..3)), 0, "the tail of the oldest chain was evicted");
    assert_eq!(on(&harness, Tier::Dram, &keys(100..104)), 4, "the other tenant's blocks remain");
    assert_eq!((usage(&harness, A).dram.used, usage(&harness, B).dram.used), (dram(3), dram(4)));
    assert_eq!(usage(&harness, A).counts.dram_evictions, 2);
    assert_eq!(usage(&harness, A).counts.dram_limited_bytes, dram(2));
}

#[test]
fn tenant_with_all_slots_in_use_gets_a_retry_delay_and_then_slots() {
    let (mut harness, a, b) = with(vec![quotas(A, quota(0, dram(2)), Quota::UNLIMITED)]);
    save_durably(&mut harness, a, &keys(0..2));
    harness.load(a, &keys(0..2), Duration::ZERO, Scope::Local);
    harness.reserve(a, 1);
    let (_, reply) = harness.engines[&a].replies.last().expect("answered");
    let Reply::Reserved { leases, retry_after, .. } = reply else { panic!("not rejected: {reply:?}") };
    assert!(leases.is_empty() && !retry_after.is_zero());
    harness.reserve(b, 4);
    assert_eq!(reserved(&harness, b), 4, "other tenants are not affected");
    let load = *harness.engines[&a].loads.keys().next().expect("held");
    harness.release(a, load);
    harness.reserve(a, 1);
    assert_eq!(reserved(&harness, a), 1);
}

#[test]
fn rejects_block_larger_than_the_dram_limit_with_a_remedy() {
    let (mut harness, a, _) = with(vec![quotas(A, quota(0, dram(1) - 1), Quota::UNLIMITED)]);
    harness.request(a, RequestKind::Other, Request::Reserve { count: 1, kind: PlaceKind::Arena });
    let (_, reply) = harness.engines[&a].replies.last().expect("answered");
    assert!(matches!(reply, Reply::BadRequest(text) if text.contains("dram.limit")), "{reply:?}");
}

#[test]
fn reserved_memory_is_kept_for_its_tenant() {
    let (mut harness, a, b) = with(vec![quotas(B, quota(dram(5), dram(16)), Quota::UNLIMITED)]);
    harness.reserve(a, 16);
    assert_eq!(reserved(&harness, a), 8, "two of four regions are kept for B");
    harness.reserve(b, 16);
    assert_eq!(reserved(&harness, b), 8);
}

#[test]
fn tenant_at_its_nvme_limit_evicts_only_its_own_blocks() {
    let (mut harness, a, b) = with(vec![quotas(A, Quota::UNLIMITED, quota(0, nvme(3)))]);
    save_durably(&mut harness, b, &keys(100..104));
    for start in 0..6 {
        save_durably(&mut harness, a, &keys(start..start + 1));
    }
    assert_eq!((on(&harness, Tier::Nvme, &keys(0..3)), on(&harness, Tier::Nvme, &keys(3..6))), (0, 3));
    assert_eq!(on(&harness, Tier::Nvme, &keys(100..104)), 4);
    assert_eq!(usage(&harness, A).nvme.used, nvme(3));
    assert_eq!(usage(&harness, A).counts.nvme_evictions, 3);
    let durable: u32 = harness.engines[&a].notices.iter().map(|(_, durable, _)| *durable).sum();
    assert_eq!(durable, 6, "every block was saved in turn");
}

#[test]
fn evicts_from_tenant_over_its_nvme_reservation_first() {
    let of_b = quotas(B, quota(dram(8), dram(16)), quota(nvme(24), nvme(64)));
    let (mut harness, a, b) = with(vec![of_b]);
    let fill = |harness: &mut Harness, session, range: std::ops::Range<u64>| {
        for start in range.step_by(4) {
            save_durably(harness, session, &keys(start..start + 4));
        }
    };
    fill(&mut harness, a, 0..120);
    fill(&mut harness, b, 500..524);
    assert_eq!(on(&harness, Tier::Nvme, &keys(500..524)), 24, "B has its reservation");
    fill(&mut harness, a, 200..320);
    assert_eq!(on(&harness, Tier::Nvme, &keys(500..524)), 24, "B keeps its reservation while A writes");
    assert_eq!(usage(&harness, B).counts.nvme_evictions, 0);
    fill(&mut harness, b, 600..660);
    assert!(usage(&harness, B).nvme.used > nvme(30), "unreserved space is shared");
}

#[test]
fn tenant_without_nvme_quota_is_cached_in_dram_only() {
    let (mut harness, a, _) = with(vec![quotas(A, Quota::UNLIMITED, quota(0, 0))]);
    save_durably(&mut harness, a, &keys(0..2));
    assert_eq!((on(&harness, Tier::Dram, &keys(0..2)), on(&harness, Tier::Nvme, &keys(0..2))), (2, 0));
    assert_eq!(harness.engines[&a].notices.last().expect("a notice").2, keys(0..2));
    assert!(harness.reports.is_empty(), "the configuration is intended: {:?}", harness.reports);
}

#[test]
fn stored_blocks_keep_their_tenant_after_a_restart() {
    let tenants = vec![quotas(A, Quota::UNLIMITED, quota(0, nvme(8)))];
    let (mut harness, a, b) = with(tenants);
    save_durably(&mut harness, a, &keys(0..4));
    save_durably(&mut harness, b, &keys(100..103));
    let mut harness = harness.crash();
    assert_eq!((usage(&harness, A).nvme.used, usage(&harness, B).nvme.used), (nvme(4), nvme(3)));
    let (a, b) = (harness.open_session(A, large_layout()), harness.open_session(B, large_layout()));
    for (session, number, expected) in [(a, 0, 1), (a, 100, 0), (b, 100, 1), (b, 0, 0)] {
        harness.match_keys(session, &[key(number)], Scope::Local);
        let (_, reply) = harness.engines[&session].replies.last().expect("answered");
        assert!(
            matches!(reply, Reply::Matched { sources } if sources.len() == expected),
            "{number}: {reply:?}"
        );
    }
}

fn grant(harness: &mut Harness, version: u64, dram_bytes: u64, nvme_bytes: u64) {
    let limit = |bytes| Quota::new(0, bytes).expect("nothing is reserved");
    let (dram, nvme) = (limit(dram_bytes), limit(nvme_bytes));
    harness.apply(Event::Budget(Grant { tenant: A, version, dram, nvme }));
}

#[test]
fn lowered_grant_causes_evictions_and_raised_grant_allows_growth() {
    let (mut harness, a, b) = with(Vec::new());
    save_durably(&mut harness, a, &keys(0..8));
    save_durably(&mut harness, b, &keys(100..104));
    grant(&mut harness, 2, dram(3), nvme(5));
    assert_eq!((usage(&harness, A).dram.used, usage(&harness, A).nvme.used), (dram(3), nvme(5)));
    assert_eq!(usage(&harness, A).grant.map(|grant| grant.version), Some(2));
    grant(&mut harness, 1, 0, 0);
    assert_eq!(usage(&harness, A).dram.used, dram(3), "an older grant is ignored");
    save_durably(&mut harness, a, &keys(8..10));
    assert_eq!((usage(&harness, A).dram.used, usage(&harness, A).nvme.used), (dram(3), nvme(5)));
    grant(&mut harness, 3, dram(6), nvme(9));
    save_durably(&mut harness, a, &keys(10..13));
    assert_eq!((usage(&harness, A).dram.used, usage(&harness, A).nvme.used), (dram(6), nvme(8)));
    assert_eq!((usage(&harness, B).dram.used, usage(&harness, B).nvme.used), (dram(4), nvme(4)));
}

#[test]
fn leased_blocks_above_a_lowered_grant_are_evicted_after_release() {
    let (mut harness, a, _) = with(Vec::new());
    save_durably(&mut harness, a, &keys(0..4));
    harness.load(a, &keys(0..4), Duration::ZERO, Scope::Local);
    grant(&mut harness, 1, dram(1), nvme(4));
    assert_eq!(usage(&harness, A).dram.excess(), dram(3), "the blocks are leased");
    harness.reserve(a, 1);
    assert_eq!(reserved(&harness, a), 0, "no new slots meanwhile");
    let load = *harness.engines[&a].loads.keys().next().expect("held");
    harness.release(a, load);
    assert_eq!(usage(&harness, A).dram.used, dram(1));
}

#[test]
fn lowered_grant_flushes_unsaved_blocks_at_once() {
    let (mut harness, a, _) = with(Vec::new());
    harness.reserve(a, 1);
    harness.commit(a, &keys(0..1), Priority::Normal);
    assert!(harness.jobs.is_empty(), "the block waits for the delay");
    grant(&mut harness, 1, 0, nvme(4));
    assert!(!harness.jobs.is_empty(), "its memory is needed");
    harness.finish_jobs();
    assert_eq!((usage(&harness, A).dram.used, usage(&harness, A).nvme.used), (0, nvme(1)));
}

#[test]
fn blocks_not_saved_under_a_tiny_grant_count_as_limited() {
    let (mut harness, a, _) = with(Vec::new());
    harness.reserve(a, 3);
    harness.commit(a, &keys(0..1), Priority::Normal);
    grant(&mut harness, 1, dram(16), nvme(1) - 1);
    let limited = |harness: &Harness| usage(harness, A).counts.nvme_limited_bytes;
    harness.pass(Duration::from_secs(1));
    assert_eq!(limited(&harness), dram(1), "the block was queued");
    harness.commit(a, &keys(1..3), Priority::Normal);
    assert_eq!((limited(&harness), usage(&harness, A).nvme.used), (dram(3), 0));
    assert_eq!(on(&harness, Tier::Dram, &keys(0..3)), 3, "they are cached in DRAM");
}

#[test]
fn configured_limit_applies_regardless_of_grants() {
    let (mut harness, a, _) = with(vec![quotas(A, quota(0, dram(2)), Quota::UNLIMITED)]);
    grant(&mut harness, 1, dram(16), nvme(64));
    harness.reserve(a, 16);
    assert_eq!(reserved(&harness, a), 2);
}

#[test]
fn reservations_shrink_in_proportion_and_are_reported_after_a_device_loss() {
    let half = quota(nvme(60), u64::MAX);
    let tenants = vec![quotas(A, Quota::UNLIMITED, half), quotas(B, Quota::UNLIMITED, half)];
    let settings = Settings { tenants, pool_free_permille: 0, ..Setup::default().settings };
    let mut harness = Harness::new(Setup { disks: vec![8 << 20, 8 << 20], settings, ..Setup::default() });
    assert!(harness.reports.is_empty(), "{:?}", harness.reports);
    harness.apply(Event::DeviceLost { device: DeviceId(1), reason: "gone".to_owned() });
    let report = harness.reports.iter().find_map(|report| match report {
        Diagnostic::Overcommitted { resource: QuotaResource::Nvme, error } => Some(error.to_string()),
        _ => None,
    });
    assert!(report.expect("a report").contains("lower reservations"));
    let kept = usage(&harness, A).nvme.quota.reserved();
    assert!(kept < nvme(60) && kept > nvme(30), "{kept}");
}
