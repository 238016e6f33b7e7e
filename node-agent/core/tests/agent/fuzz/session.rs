//! Sequences of valid and hostile requests of several sessions and tenants, to the real core.
//!
//! The harness checks after every event: the core is consistent, each request is answered once, no slot in use is assigned
//! again, and engines read committed bytes only. A session must not use or release anything of another one, so hostile
//! requests name leases, loads, pins and tickets of others, and numbers that do not exist. Of another tenant, a session never
//! reads a byte. At the end nothing remains in use.

use std::time::Duration;

use reprise_agent_core::effect::{LeaseId, LoadId, LoadedBlock, PlaceKind, Ticket};
use reprise_agent_core::event::{CommitItem, CommitRequest, Event, Priority, Request, Scope};
use reprise_agent_core::extents::PinId;
use reprise_fuzz::Unstructured;
use reprise_policy::{BlockKey, Layout, SessionId, TenantId};

use crate::engine::RequestKind;
use crate::harness::{Faults, Harness, SMALL_KEYS_FROM, Setup, key, large_layout, small_layout};
use crate::random::finish_all;
use crate::scenarios_prefetch::random_hint;
use crate::scenarios_retention::random_command;

/// Most operations of an input.
const STEPS_MAX: usize = 120;

/// Number of keys of each tenant and layout: few, so that requests meet.
const KEYS: u64 = 12;

/// Distance between the first keys of two tenants.
const TENANT_STRIDE: u64 = 100;

/// Number of tenants with sessions.
const TENANTS: u16 = 3;

/// Faults of devices and peers, in thousandths.
const FAULTS: Faults = Faults {
    write_media: 20,
    read: 20,
    refused: 20,
    fetch: 60,
    lookup: 80,
    place: 150,
    check: 300,
    directory_stale: 60,
    device_lost: 0,
    stranded: 0,
    renewal: 100,
};

pub(super) fn seeds() -> Vec<Vec<u8>> {
    (0..6_u8)
        .map(|seed| (0..160_u8).map(|at| at.wrapping_mul(53).wrapping_add(seed * 43)).collect())
        .collect()
}

pub(super) fn run(input: &[u8]) {
    let mut choices = Unstructured::new(input);
    let Ok(seed) = choices.arbitrary::<u16>() else { return };
    let setup =
        Setup { seed: u64::from(seed), regions: 3, disks: vec![8 << 20], faults: FAULTS, ..Setup::default() };
    let mut harness = Harness::new(setup);
    for _ in 0..STEPS_MAX {
        if choices.is_empty() || step(&mut harness, &mut choices).is_none() {
            break;
        }
        harness.read_all();
        assert_own_blocks_only(&harness);
    }
    finish_all(&mut harness);
}

/// Checks that every block that an engine got is one of its tenant.
fn assert_own_blocks_only(harness: &Harness) {
    for engine in harness.engines.values() {
        let own = keys_of(engine.tenant, engine.layout);
        for load in engine.loads.values() {
            let got = load
                .keys
                .iter()
                .zip(&load.blocks)
                .filter(|(_, block)| matches!(block, LoadedBlock::Ok { .. }));
            got.for_each(|(key, _)| assert!(own.contains(key), "a block of another tenant or layout"));
        }
    }
}

/// Keys that the sessions of a tenant know.
fn keys_of(tenant: TenantId, layout: Layout) -> Vec<BlockKey> {
    let base =
        u64::from(tenant.0) * TENANT_STRIDE + if layout == small_layout() { SMALL_KEYS_FROM } else { 0 };
    (base..base + KEYS).map(key).collect()
}

/// Runs an operation; `None` without further bytes.
fn step(harness: &mut Harness, choices: &mut Unstructured<'_>) -> Option<()> {
    let sessions: Vec<SessionId> = harness.engines.keys().copied().collect();
    let choice = choices.int_in_range(0..=31_u8).ok()?;
    if sessions.is_empty() || (choice == 0 && sessions.len() < 5) {
        let layout = *choices.choose(&[large_layout(), small_layout()]).ok()?;
        let tenant = TenantId(choices.int_in_range(0..=TENANTS - 1).ok()?);
        harness.open_session(tenant, layout);
        return Some(());
    }
    let session = *choices.choose(&sessions).ok()?;
    let keys = some_keys(harness, choices, session)?;
    match choice {
        0 | 1 => harness.close_session(session),
        2..=4 => harness.reserve(session, choices.int_in_range(0..=6).ok()?),
        5..=8 => {
            let priority = *choices.choose(&[Priority::Low, Priority::Normal, Priority::High]).ok()?;
            harness.commit(session, &keys, priority);
        }
        9 => _ = harness.match_keys(session, &keys, Scope::Cluster),
        10..=13 => {
            let deadline = Duration::from_micros(choices.int_in_range(0..=30_000).ok()?);
            let scope = *choices.choose(&[Scope::Local, Scope::Cluster]).ok()?;
            harness.load(session, &keys, deadline, scope);
        }
        14 | 15 => release_one(harness, session),
        16 => {
            let slots = &mut harness.engines.get_mut(&session)?.reserved;
            let count = slots.len().min(2);
            let leases = slots.drain(..count).map(|(lease, _)| lease).collect();
            harness.request(session, RequestKind::Other, Request::Abort { leases });
        }
        17..=22 => {
            for _ in 0..choices.int_in_range(1..=6_u8).ok()? {
                if !harness.jobs.is_empty() {
                    harness.advance(choices.choose_index(harness.jobs.len()).ok()?);
                }
            }
        }
        23 => harness.pass(Duration::from_micros(choices.int_in_range(0..=8_000).ok()?)),
        24 => harness.apply(Event::Tick),
        25 => random_command(harness, session, &keys),
        26 => random_hint(harness, session, &keys),
        _ => hostile(harness, choices, session, &keys)?,
    }
    Some(())
}

/// A run of the keys of the session's tenant.
fn some_keys(harness: &Harness, choices: &mut Unstructured<'_>, session: SessionId) -> Option<Vec<BlockKey>> {
    let engine = &harness.engines[&session];
    let all = keys_of(engine.tenant, engine.layout);
    let first = choices.choose_index(all.len()).ok()?;
    let count = choices.int_in_range(1..=4).ok()?;
    Some(all.iter().cycle().skip(first).take(count).copied().collect())
}

fn release_one(harness: &mut Harness, session: SessionId) {
    if let Some(load) = harness.engines[&session].loads.keys().next().copied() {
        harness.release(session, load);
    }
}

/// A request that names things of others, or that do not exist, or that contradicts itself.
fn hostile(
    harness: &mut Harness,
    choices: &mut Unstructured<'_>,
    session: SessionId,
    keys: &[BlockKey],
) -> Option<()> {
    let request = match choices.int_in_range(0..=9_u8).ok()? {
        0 => Request::Abort { leases: vec![foreign_lease(harness, choices, session)?; 2] },
        1 => Request::Release { load: foreign_load(harness, choices, session)? },
        2 => {
            let load = foreign_load(harness, choices, session)?;
            Request::Suspect { load, blocks: vec![0, choices.arbitrary().ok()?, 0] }
        }
        3 => Request::AwaitDurable { ticket: Ticket(choices.int_in_range(0..=300).ok()?) },
        4 => Request::Unpin {
            pins: vec![PinId(choices.int_in_range(0..=64).ok()?), PinId(choices.arbitrary().ok()?)],
        },
        5 => Request::Trim,
        6 => Request::Stats,
        7 => return hostile_commit(harness, choices, session, keys),
        8 => {
            // Without pins the session does not wait for the end of its I/O.
            Request::Match {
                keys: keys.repeat(3),
                ranks: Default::default(),
                position: choices.arbitrary().ok()?,
                scope: Scope::Local,
                public: None,
            }
        }
        _ => {
            let keys = keys.repeat(2);
            let deadline = Duration::from_millis(1);
            harness.load(session, &keys, deadline, Scope::Local);
            return Some(());
        }
    };
    harness.request(session, RequestKind::Other, request);
    Some(())
}

/// A lease of another session, or a number.
fn foreign_lease(harness: &Harness, choices: &mut Unstructured<'_>, session: SessionId) -> Option<LeaseId> {
    let others = harness.engines.iter().filter(|(id, _)| **id != session);
    let leases: Vec<LeaseId> =
        others.flat_map(|(_, engine)| engine.reserved.iter().map(|(lease, _)| *lease)).collect();
    let own: Vec<LeaseId> = harness.engines[&session].reserved.iter().map(|(lease, _)| *lease).collect();
    let any = LeaseId(if choices.arbitrary().ok()? {
        choices.int_in_range(0..=200).ok()?
    } else {
        choices.arbitrary().ok()?
    });
    let lease = choices.choose(&leases).copied().unwrap_or(any);
    (!own.contains(&lease)).then_some(lease)
}

/// A load of another session, or a number.
fn foreign_load(harness: &Harness, choices: &mut Unstructured<'_>, session: SessionId) -> Option<LoadId> {
    let others = harness.engines.iter().filter(|(id, _)| **id != session);
    let loads: Vec<LoadId> = others.flat_map(|(_, engine)| engine.loads.keys().copied()).collect();
    let any = LoadId(choices.int_in_range(0..=200).ok()?);
    let load = choices.choose(&loads).copied().unwrap_or(any);
    (!harness.engines[&session].loads.contains_key(&load)).then_some(load)
}

/// A commit of leases of others, of slots without valid checksums or keys, and of one slot twice.
fn hostile_commit(
    harness: &mut Harness,
    choices: &mut Unstructured<'_>,
    session: SessionId,
    keys: &[BlockKey],
) -> Option<()> {
    let objects = harness.engines[&session].layout.objects() as usize;
    let mut items = Vec::new();
    for key in keys {
        let own = harness.engines.get_mut(&session)?.reserved.pop();
        let lease = match own {
            Some((lease, _)) if choices.arbitrary().ok()? => lease,
            own => {
                harness.engines.get_mut(&session)?.reserved.extend(own);
                foreign_lease(harness, choices, session)?
            }
        };
        let count = choices.int_in_range(0..=objects + 1).ok()?;
        let count = if count == objects { objects + 1 } else { count };
        let key = choices.arbitrary::<bool>().ok()?.then_some(*key);
        items.push(CommitItem { lease, key, checksums: vec![7; count].into() });
    }
    if let (Some(first), true) = (items.first().cloned(), choices.arbitrary().ok()?) {
        items.push(first);
    }
    let is_of_arena = items.iter().all(|item| item.lease.kind() == PlaceKind::Arena);
    let kind = if is_of_arena { RequestKind::Commit(vec![keys[0]; items.len()]) } else { RequestKind::Other };
    let commit = CommitRequest { items, priority: Priority::Normal, parent: None, position: Some(u32::MAX) };
    harness.request(session, kind, Request::Commit(commit));
    Some(())
}
