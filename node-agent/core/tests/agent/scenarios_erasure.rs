//! Scenarios: the encryption keys of a tenant are gone, and its blocks are removed.

use std::time::Duration;

use reprise_agent_core::effect::{Diagnostic, Reply};
use reprise_agent_core::event::{
    BlockAction, BlockCommand, BlockSelection, Event, FillError, FillUpdate, Priority, Ranks, Request, Scope,
};
use reprise_policy::{BlockKey, SessionId, TenantId, Tier};

use crate::engine::RequestKind;
use crate::harness::{Harness, Setup, keys, large_layout};
use crate::jobs::Job;

const A: TenantId = TenantId(1);
const B: TenantId = TenantId(2);

/// Longer than the time until blocks that were in use are looked for again.
const LONG: Duration = Duration::from_secs(3);

/// Sessions of both tenants, with 8 and 4 durable blocks.
fn with_blocks() -> (Harness, SessionId, SessionId) {
    let mut harness = Harness::new(Setup::default());
    let (a, b) = (harness.open_session(A, large_layout()), harness.open_session(B, large_layout()));
    save(&mut harness, a, &keys(0..4));
    save(&mut harness, a, &keys(4..8));
    save(&mut harness, b, &keys(100..104));
    (harness, a, b)
}

fn save(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.reserve(session, keys.len() as u32);
    harness.commit(session, keys, Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
}

fn announced(harness: &Harness, keys: &[BlockKey]) -> usize {
    harness.announced.iter().filter(|(key, _)| keys.contains(key)).count()
}

fn erased(harness: &Harness) -> Vec<u64> {
    let of_a = |report: &Diagnostic| match report {
        Diagnostic::TenantErased { tenant: A, blocks } => Some(*blocks),
        _ => None,
    };
    harness.reports.iter().filter_map(of_a).collect()
}

#[test]
fn blocks_of_an_erased_tenant_leave_memory_devices_and_directory_and_no_others() {
    let (mut harness, a, b) = with_blocks();
    assert_eq!((announced(&harness, &keys(0..8)), announced(&harness, &keys(100..104))), (16, 8));
    let pin = BlockCommand {
        action: BlockAction::Pin { ttl: Duration::from_secs(60) },
        selection: BlockSelection::Keys(keys(0..2)),
        ranks: Ranks::Own,
    };
    harness.request(a, RequestKind::Other, Request::Manage(pin));
    harness.close_session(a);
    harness.apply(Event::TenantErased { tenant: A });
    harness.pass(LONG);
    harness.finish_jobs();
    assert_eq!((announced(&harness, &keys(0..8)), announced(&harness, &keys(100..104))), (0, 8));
    assert_eq!((erased(&harness), harness.core.counters().erased_blocks), (vec![8], 8));
    assert_eq!(harness.core.next_deadline(), None, "nothing is left to do");
    harness.load(b, &keys(100..104), Duration::ZERO, Scope::Local);
    harness.read_all();
}

#[test]
fn blocks_in_use_are_removed_after_their_reads_and_writes() {
    let (mut harness, a, _) = with_blocks();
    harness.request(a, RequestKind::Other, Request::Trim);
    harness.load(a, &keys(0..2), Duration::from_secs(9), Scope::Local);
    harness.reserve(a, 2);
    harness.commit(a, &keys(20..22), Priority::Normal);
    harness.apply(Event::TenantErased { tenant: A });
    harness.pass(LONG);
    assert!(announced(&harness, &keys(0..8)) > 0, "a device reads into the slots");
    assert_eq!(erased(&harness), []);
    harness.finish_jobs();
    harness.close_session(a);
    harness.pass(LONG);
    harness.finish_jobs();
    assert_eq!(announced(&harness, &keys(0..30)), 0);
    assert_eq!(erased(&harness).len(), 1);
}

#[test]
fn erased_tenant_gets_no_slots_until_it_is_restored() {
    let (mut harness, a, _) = with_blocks();
    harness.apply(Event::TenantErased { tenant: A });
    harness.pass(LONG);
    let reserved = |harness: &mut Harness| {
        harness.reserve(a, 1);
        match &harness.engines[&a].replies.last().expect("answered").1 {
            Reply::Reserved { leases, .. } => leases.len(),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(reserved(&mut harness), 0);
    harness.apply(Event::TenantRestored { tenant: A });
    assert_eq!(reserved(&mut harness), 1);
    harness.commit(a, &keys(0..1), Priority::Normal);
    harness.pass(LONG);
    harness.finish_jobs();
    assert_eq!(announced(&harness, &keys(0..8)), 2, "the block is saved again");
}

#[test]
fn blocks_whose_key_is_gone_are_misses_and_cost_neither_slots_nor_the_device() {
    let (mut harness, a, _) = with_blocks();
    for round in 0..3 {
        harness.request(a, RequestKind::Other, Request::Trim);
        harness.load(a, &keys(0..8), Duration::from_secs(9), Scope::Local);
        let reads: Vec<_> = harness.jobs.drain(..).collect();
        assert_eq!(reads.len(), 8);
        for job in reads {
            let Job::Read { read, .. } = job else { panic!("not a read: {job:?}") };
            let update = FillUpdate::Failed(FillError::Absent);
            harness.apply(Event::Fill { fill: read.fill, update });
        }
        harness.finish_jobs();
        assert_eq!(announced(&harness, &keys(0..8)), 0);
        let counters = harness.core.counters();
        assert_eq!(counters.fill_absent, 8 * (round + 1));
        assert_eq!(
            (counters.corrupt_blocks, counters.devices_lost, counters.pool_quarantined_slots),
            (0, 0, 0)
        );
        for load in harness.engines[&a].loads.keys().copied().collect::<Vec<_>>() {
            harness.release(a, load);
        }
        save(&mut harness, a, &keys(0..4));
        save(&mut harness, a, &keys(4..8));
    }
    assert!(harness.announced.contains(&(keys(0..1)[0], Tier::Nvme)));
}
