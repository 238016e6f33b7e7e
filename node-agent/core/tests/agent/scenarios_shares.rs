//! Scenarios: tenants that compete for writes and for requests of peers get shares by their weights.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_agent_core::Settings;
use reprise_agent_core::event::{Priority, Request};
use reprise_agent_core::limits::SERVES_MAX;
use reprise_agent_core::pool::{DeviceOp, DeviceOpKind};
use reprise_policy::{BlockKey, SessionId, TenantId};

use crate::engine::RequestKind;
use crate::harness::{Harness, Setup, keys, large_layout};
use crate::jobs::Job;

const A: TenantId = TenantId(1);
const B: TenantId = TenantId(2);

/// B has three times the weight of A. A batch of writes is one block, and serves may use a quarter of 16 slots.
fn harness() -> (Harness, SessionId, SessionId) {
    let settings = Settings {
        bandwidth: [(B, 3)].into_iter().collect(),
        writeback_bytes: large_layout().slot_bytes(),
        arena_serves_permille: 250,
        ..Setup::default().settings
    };
    let mut harness = Harness::new(Setup { settings, ..Setup::default() });
    let (a, b) = (harness.open_session(A, large_layout()), harness.open_session(B, large_layout()));
    (harness, a, b)
}

fn commit(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.reserve(session, keys.len() as u32);
    harness.commit(session, keys, Priority::Normal);
}

/// Tenants and places of the blocks that are being written, in the order of the core.
fn writes(harness: &Harness) -> Vec<(TenantId, u64)> {
    let write = |job: &Job| match job {
        Job::Device {
            op: DeviceOp { kind: DeviceOpKind::WriteBlock { tenant, offset, .. }, .. }, ..
        } => Some((*tenant, *offset)),
        _ => None,
    };
    harness.jobs.iter().filter_map(write).collect()
}

#[test]
fn later_blocks_of_a_tenant_precede_the_backlog_of_another_one_by_weight() {
    let (mut harness, a, b) = harness();
    commit(&mut harness, a, &keys(0..12));
    let begun = writes(&harness);
    assert!(begun.len() < 12 && begun.iter().all(|(tenant, _)| *tenant == A), "the rest waits: {begun:?}");
    commit(&mut harness, b, &keys(100..104));
    let mut seen: BTreeSet<u64> = begun.iter().map(|(_, offset)| *offset).collect();
    let mut order = Vec::new();
    while let Some(job) = harness.jobs.iter().position(|job| matches!(job, Job::Device { .. })) {
        harness.advance(job);
        order.extend(writes(&harness).into_iter().filter(|(_, offset)| seen.insert(*offset)));
    }
    assert_eq!(begun.len() + order.len(), 16);
    let of_b = order.iter().take(5).filter(|(tenant, _)| *tenant == B).count();
    assert!(of_b >= 3, "three of four blocks are of the tenant with the weight of three: {order:?}");
    let counts = harness.core.tenant_usage().map(|usage| usage.counts.nvme_written_bytes);
    let slot = large_layout().slot_bytes();
    assert_eq!(counts.filter(|bytes| *bytes > 0).collect::<Vec<_>>(), [12 * slot, 4 * slot]);
}

/// Keys of the blocks that are being read, in the order of the core.
fn reads(harness: &Harness) -> Vec<BlockKey> {
    let read = |job: &Job| match job {
        Job::Read { read, .. } => Some(read.key),
        _ => None,
    };
    harness.jobs.iter().filter_map(read).collect()
}

/// Sends all blocks that were read.
fn send_all(harness: &mut Harness) {
    for serve in harness.serves.keys().copied().collect::<Vec<_>>() {
        let blocks = harness.serves.get(&serve).map_or(0, |serve| serve.blocks.len() as u32);
        for block in (0..blocks).flat_map(|block| [block; 16]) {
            harness.send(serve, block);
        }
    }
}

#[test]
fn request_of_a_peer_does_not_wait_for_another_tenants_request() {
    let (mut harness, a, b) = harness();
    commit(&mut harness, a, &keys(0..12));
    commit(&mut harness, b, &keys(100..102));
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
    for session in [a, b] {
        harness.request(session, RequestKind::Other, Request::Trim);
    }
    let later = Duration::from_secs(10);
    harness.peer_request_of(A, &keys(0..12), large_layout(), later);
    assert_eq!(reads(&harness), keys(0..4), "a quarter of 16 slots");
    harness.peer_request_of(B, &keys(100..102), large_layout(), later);
    assert_eq!(reads(&harness)[4..], keys(100..102), "within the part of the tenant");
    let mut order = reads(&harness);
    for _ in 0..8 {
        harness.finish_jobs();
        send_all(&mut harness);
        order.extend(reads(&harness));
    }
    assert_eq!(order.len(), 14, "all blocks are served");
    let served = harness.core.tenant_usage().map(|usage| usage.counts.served_bytes);
    let slot = large_layout().slot_bytes();
    assert_eq!(served.filter(|bytes| *bytes > 0).collect::<Vec<_>>(), [12 * slot, 2 * slot]);
}

#[test]
fn requests_for_one_tenant_do_not_use_up_the_requests_of_another_one() {
    let (mut harness, a, b) = harness();
    commit(&mut harness, a, &keys(0..1));
    commit(&mut harness, b, &keys(100..101));
    let later = Duration::from_secs(10);
    for _ in 0..=SERVES_MAX {
        harness.peer_request_of(A, &keys(0..1), large_layout(), later);
    }
    let counts = |harness: &Harness| {
        let counters = harness.core.counters();
        (counters.serves_in_flight, counters.serve_blocks_absent)
    };
    assert_eq!(counts(&harness), (SERVES_MAX as u64, 1));
    harness.peer_request_of(B, &keys(100..101), large_layout(), later);
    assert_eq!(counts(&harness), (SERVES_MAX as u64 + 1, 1), "the other tenant has room");
}
