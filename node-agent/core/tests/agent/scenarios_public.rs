//! Scenarios: blocks of a public tenant that are copied for other tenants.

use std::time::Duration;

use reprise_agent_core::effect::{DeviceId, LoadId, LoadedBlock, LossReason, Reply, Source};
use reprise_agent_core::event::{Event, FillError, Priority, PublicKeys, Ranks, Request, Scope};
use reprise_agent_core::{Settings, TenantQuotas, TenantUsage};
use reprise_policy::{BlockKey, NodeId, Quota, SessionId, TenantId, Tier};

use crate::engine::{Engine, RequestKind};
use crate::harness::{Harness, Setup, key, keys, large_layout};
use crate::jobs::Job;
use crate::public::PUBLIC;
use crate::random::{FAULTS, finish_all, random_setup, step};
use crate::rng::{for_seeds, has_fixed_seeds};

const READER: TenantId = TenantId(2);
const OTHER: TenantId = TenantId(3);
const ONE: NodeId = NodeId(1);
const TWO: NodeId = NodeId(2);

/// Keys of the public tenant, and those of the same blocks of the reader.
const PROMPT: std::ops::Range<u64> = 500..503;
const OWN: std::ops::Range<u64> = 0..3;

/// Four regions of four blocks, with a prompt of the public tenant in DRAM and on NVMe, and a reader.
fn harness() -> (Harness, SessionId, SessionId) {
    with(Setup::default())
}

fn with(setup: Setup) -> (Harness, SessionId, SessionId) {
    let mut harness = Harness::new(setup);
    harness.declare_public(Some(PUBLIC));
    let owner = harness.open_session(PUBLIC, large_layout());
    let reader = harness.open_session(READER, large_layout());
    save_durably(&mut harness, owner, &keys(PROMPT));
    (harness, owner, reader)
}

fn save_durably(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    harness.reserve(session, keys.len() as u32);
    harness.commit(session, keys, Priority::Normal);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
}

fn trim(harness: &mut Harness, session: SessionId) {
    harness.request(session, RequestKind::Other, Request::Trim);
}

fn of(tenant: TenantId, keys: &[BlockKey]) -> PublicKeys {
    PublicKeys { tenant, keys: keys.into() }
}

fn prompt() -> PublicKeys {
    of(PUBLIC, &keys(PROMPT))
}

fn matched(
    harness: &mut Harness,
    session: SessionId,
    keys: &[BlockKey],
    public: PublicKeys,
    scope: Scope,
) -> Vec<Source> {
    let (keys, public) = (keys.to_vec(), Some(public));
    let kind = RequestKind::Match(keys.clone(), scope);
    let body = Request::Match { keys, ranks: Ranks::Own, position: Some(0), scope, public };
    harness.request(session, kind, body);
    harness.finish_jobs();
    match &harness.engines[&session].replies.last().expect("a reply").1 {
        Reply::Matched { sources } => sources.clone(),
        other => panic!("no match: {other:?}"),
    }
}

fn blocks(harness: &Harness, session: SessionId) -> Vec<Result<Source, LossReason>> {
    let Reply::Loaded { blocks, .. } = &harness.engines[&session].replies.last().expect("a reply").1 else {
        panic!("no load")
    };
    let result = |block: &LoadedBlock| match block {
        LoadedBlock::Ok { source, .. } => Ok(*source),
        LoadedBlock::Lost(reason) => Err(*reason),
    };
    blocks.iter().map(result).collect()
}

fn load(harness: &mut Harness, session: SessionId, scope: Scope) -> Vec<Result<Source, LossReason>> {
    harness.load_public(session, &keys(OWN), prompt(), scope);
    harness.finish_jobs();
    harness.read_all();
    blocks(harness, session)
}

fn usage(harness: &Harness, tenant: TenantId) -> TenantUsage {
    harness.core.tenant_usage().find(|usage| usage.tenant == tenant).expect("it had a session")
}

fn used(harness: &Harness, tenant: TenantId) -> u64 {
    usage(harness, tenant).dram.used
}

fn dram(blocks: u64) -> u64 {
    blocks * large_layout().slot_bytes()
}

fn imported(harness: &Harness) -> (u64, u64) {
    let counters = harness.core.counters();
    (counters.imported_blocks, counters.imported_bytes)
}

#[test]
fn blocks_in_dram_are_copied_once_for_a_reader_and_charged_to_it() {
    let (mut harness, _, reader) = harness();
    assert_eq!(matched(&mut harness, reader, &keys(OWN), prompt(), Scope::Local), [Source::OwnDram; 3]);
    assert_eq!(imported(&harness), (0, 0), "a match copies nothing");
    assert_eq!(load(&mut harness, reader, Scope::Local), [Ok(Source::OwnDram); 3]);
    assert_eq!(imported(&harness), (3, 3 * large_layout().block_bytes()));
    assert_eq!((used(&harness, PUBLIC), used(&harness, READER)), (dram(3), dram(3)));
    // From now on, the reader has its own copy, also without the public keys.
    harness.match_keys(reader, &keys(OWN), Scope::Local);
    assert_eq!(load(&mut harness, reader, Scope::Local), [Ok(Source::OwnDram); 3]);
    assert_eq!(imported(&harness).0, 3);
    assert!(keys(OWN).iter().all(|key| harness.announced.contains(&(*key, Tier::Dram))));
}

#[test]
fn blocks_on_a_device_are_read_into_slots_of_the_reader() {
    let (mut harness, owner, reader) = harness();
    trim(&mut harness, owner);
    assert_eq!(matched(&mut harness, reader, &keys(OWN), prompt(), Scope::Local), [Source::OwnNvme; 3]);
    assert_eq!(load(&mut harness, reader, Scope::Local), [Ok(Source::OwnNvme); 3]);
    assert_eq!(imported(&harness).0, 3);
    assert_eq!((used(&harness, PUBLIC), used(&harness, READER)), (0, dram(3)));
    assert_eq!(harness.core.counters().device_fills, 3);
    let read = |tenant| usage(&harness, tenant).counts.nvme_read_bytes;
    assert_eq!((read(PUBLIC), read(READER)), (0, dram(3)), "the reads are charged to the reader");
}

#[test]
fn stored_block_stays_on_its_device_until_it_was_read() {
    let setup = Setup::default();
    let settings = Settings { load_deadline_default: Duration::from_secs(1), ..setup.settings };
    let (mut harness, owner, reader) = with(Setup { settings, ..setup });
    trim(&mut harness, owner);
    harness.load_public(reader, &keys(OWN), prompt(), Scope::Local);
    let reads = harness.fills();
    assert_eq!(reads.len(), 3);
    // The owner loads the same blocks meanwhile, and saves until everything else was evicted.
    harness.load(owner, &keys(PROMPT), Duration::ZERO, Scope::Local);
    for start in (600..760).step_by(4) {
        harness.reserve(owner, 4);
        harness.commit(owner, &keys(start..start + 4), Priority::Normal);
        harness.pass(Duration::from_millis(6));
        harness.finish_device_ops();
    }
    harness.finish_jobs();
    harness.read_all();
    assert_eq!(blocks(&harness, reader), [Ok(Source::OwnNvme); 3]);
}

#[test]
fn own_blocks_come_before_public_ones() {
    let (mut harness, _, reader) = harness();
    save_durably(&mut harness, reader, &[key(0)]);
    trim(&mut harness, reader);
    let sources = matched(&mut harness, reader, &keys(OWN), prompt(), Scope::Local);
    assert_eq!(sources, [Source::OwnNvme; 3]);
    assert_eq!(load(&mut harness, reader, Scope::Local), [Ok(Source::OwnNvme); 3]);
    assert_eq!(imported(&harness).0, 2, "the first block is its own");
}

#[test]
fn blocks_of_other_tenants_are_not_copied() {
    let (mut harness, _, reader) = harness();
    let other = harness.open_session(OTHER, large_layout());
    save_durably(&mut harness, other, &keys(700..703));
    for public in [of(PUBLIC, &keys(700..703)), of(OTHER, &keys(700..703)), of(OTHER, &keys(PROMPT))] {
        assert_eq!(matched(&mut harness, reader, &keys(OWN), public.clone(), Scope::Cluster), []);
        harness.load_public(reader, &keys(OWN), public, Scope::Cluster);
        harness.finish_jobs();
        assert_eq!(blocks(&harness, reader), [Err(LossReason::Miss); 3]);
    }
    assert_eq!((imported(&harness).0, harness.core.counters().peer_fills), (0, 0));
}

#[test]
fn nothing_is_copied_without_a_public_tenant() {
    let (mut harness, owner, reader) = harness();
    trim(&mut harness, owner);
    harness.load_public(reader, &[key(0)], of(PUBLIC, &[key(500)]), Scope::Local);
    harness.declare_public(None);
    harness.finish_jobs();
    assert_eq!(blocks(&harness, reader), [Ok(Source::OwnNvme)], "the copy had begun");
    assert_eq!(matched(&mut harness, reader, &keys(OWN), prompt(), Scope::Cluster), [Source::OwnDram]);
    assert_eq!(
        load(&mut harness, reader, Scope::Cluster),
        [Ok(Source::OwnDram), Err(LossReason::Miss), Err(LossReason::Miss)]
    );
    assert_eq!(imported(&harness).0, 1);
}

#[test]
fn blocks_of_an_erased_public_tenant_are_not_copied() {
    let (mut harness, owner, reader) = harness();
    harness.load(owner, &keys(PROMPT), Duration::ZERO, Scope::Local);
    harness.finish_jobs();
    harness.apply(Event::TenantErased { tenant: PUBLIC });
    assert_eq!(used(&harness, PUBLIC), dram(3), "the owner's load keeps the blocks");
    assert_eq!(load(&mut harness, reader, Scope::Local), [Err(LossReason::Miss); 3]);
    assert_eq!(imported(&harness).0, 0);
}

#[test]
fn withdrawal_during_a_lookup_discards_the_answer_for_public_keys() {
    let (mut harness, _, reader) = harness();
    harness.add_public_replica(ONE, key(510), Tier::Dram);
    harness.load_public(reader, &[key(0)], of(PUBLIC, &[key(510)]), Scope::Cluster);
    let Job::Lookup { keys: asked, .. } = &harness.jobs[0] else { panic!("a lookup") };
    assert_eq!(*asked, [key(0), key(510)]);
    harness.declare_public(None);
    harness.finish_jobs();
    assert_eq!(blocks(&harness, reader), [Err(LossReason::Miss)]);
}

#[test]
fn blocks_of_peers_are_fetched_for_the_public_tenant_and_kept_for_the_reader() {
    let (mut harness, _, reader) = harness();
    harness.add_public_replica(ONE, key(510), Tier::Nvme);
    harness.add_public_replica(TWO, key(511), Tier::Dram);
    harness.add_peer_replica(TWO, key(2), Tier::Dram);
    let public = of(PUBLIC, &[key(510), key(511), key(512)]);
    let sources = matched(&mut harness, reader, &keys(OWN), public.clone(), Scope::Cluster);
    assert_eq!(sources, [Source::PeerNvme, Source::PeerDram, Source::PeerDram]);
    harness.load_public(reader, &keys(OWN), public, Scope::Cluster);
    harness.finish_jobs_but_fills();
    let mut fetched: Vec<(TenantId, BlockKey)> = Vec::new();
    for job in &harness.jobs {
        if let Job::Fetch { tenant, key, .. } = job {
            fetched.push((*tenant, *key));
        }
    }
    assert_eq!(fetched, [(PUBLIC, key(510)), (PUBLIC, key(511)), (READER, key(2))]);
    harness.finish_jobs();
    harness.read_all();
    assert_eq!(blocks(&harness, reader), sources.into_iter().map(Ok).collect::<Vec<_>>());
    assert_eq!((imported(&harness).0, harness.core.counters().peer_fills), (2, 3));
    harness.match_keys(reader, &keys(OWN), Scope::Local);
    let Reply::Matched { sources } = &harness.engines[&reader].replies.last().expect("a reply").1 else {
        panic!("no match")
    };
    assert_eq!(*sources, [Source::OwnDram; 3]);
}

#[test]
fn failed_fetch_of_a_public_block_tries_its_next_replica() {
    let (mut harness, _, reader) = harness();
    harness.add_public_replica(ONE, key(510), Tier::Dram);
    harness.add_public_replica(TWO, key(510), Tier::Nvme);
    harness.load_public(reader, &[key(0)], of(PUBLIC, &[key(510)]), Scope::Cluster);
    harness.finish_jobs_but_fills();
    harness.fail(harness.fills()[0], FillError::PeerLost);
    harness.finish_jobs();
    assert_eq!(blocks(&harness, reader), [Ok(Source::PeerNvme)]);
}

#[test]
fn failed_copy_is_a_miss_and_a_damaged_source_is_checked() {
    let (mut harness, owner, reader) = harness();
    harness.load_public(reader, &[key(0)], of(PUBLIC, &[key(500)]), Scope::Local);
    harness.fail(harness.fills()[0], FillError::Corrupt);
    assert_eq!(blocks(&harness, reader), [Err(LossReason::Failed)]);
    assert!(harness.jobs.iter().any(|job| matches!(job, Job::Check(_))), "the source is compared");
    harness.finish_jobs();
    harness.match_keys(owner, &keys(PROMPT), Scope::Local);
    let Reply::Matched { sources } = &harness.engines[&owner].replies.last().expect("a reply").1 else {
        panic!("no match")
    };
    assert_eq!(*sources, [Source::OwnDram; 3], "it is intact");
}

#[test]
fn failed_verification_of_a_read_does_not_remove_the_public_block() {
    let (mut harness, owner, reader) = harness();
    trim(&mut harness, owner);
    for (error, left) in [(FillError::Corrupt, 3), (FillError::Device, 0)] {
        harness.load_public(reader, &[key(0)], of(PUBLIC, &[key(500)]), Scope::Local);
        harness.fail(harness.fills()[0], error);
        assert_eq!(blocks(&harness, reader), [Err(LossReason::Failed)]);
        // The prompt begins with this block.
        let sources = matched(&mut harness, reader, &keys(OWN), prompt(), Scope::Local);
        assert_eq!(sources.len(), left, "{error}");
    }
}

#[test]
fn reader_without_room_keeps_to_its_limit() {
    let quota = Quota::new(0, dram(2)).expect("reserved within the limit");
    let tenants = vec![TenantQuotas { tenant: READER, dram: quota, nvme: Quota::UNLIMITED }];
    let settings = Settings { tenants, ..Setup::default().settings };
    let (mut harness, owner, reader) = with(Setup { settings, ..Setup::default() });
    let no_space = Err(LossReason::NoSpace);
    let expected = [Ok(Source::OwnDram), Ok(Source::OwnDram), no_space];
    assert_eq!(load(&mut harness, reader, Scope::Local), expected);
    harness.match_keys(owner, &keys(PROMPT), Scope::Local);
    assert_eq!((used(&harness, PUBLIC), used(&harness, READER)), (dram(3), dram(2)));
}

#[test]
fn two_loads_of_a_block_share_one_copy() {
    let (mut harness, _, reader) = harness();
    let second = harness.open_session(READER, large_layout());
    harness.load_public(reader, &[key(0), key(0)], of(PUBLIC, &[key(500), key(500)]), Scope::Local);
    harness.load_public(second, &[key(0)], of(PUBLIC, &[key(500)]), Scope::Local);
    harness.finish_jobs();
    assert_eq!(blocks(&harness, reader), [Ok(Source::OwnDram); 2]);
    assert_eq!(blocks(&harness, second), [Ok(Source::OwnDram)]);
    assert_eq!(imported(&harness).0, 1);
}

#[test]
fn device_that_fails_during_an_import_ends_it() {
    let (mut harness, owner, reader) = harness();
    trim(&mut harness, owner);
    harness.load_public(reader, &keys(OWN), prompt(), Scope::Local);
    harness.detach(DeviceId(0));
    harness.finish_jobs();
    assert_eq!(blocks(&harness, reader), [Err(LossReason::Failed); 3]);
    assert!(harness.released.contains(&DeviceId(0)), "nothing keeps the device");
}

#[test]
fn readers_cannot_change_public_blocks() {
    let (mut harness, owner, reader) = harness();
    save_durably(&mut harness, reader, &keys(PROMPT));
    assert_eq!(harness.core.counters().refused_items, 3, "the keys are those of blocks of another tenant");
    harness.match_keys(owner, &keys(PROMPT), Scope::Local);
    harness.load(owner, &keys(PROMPT), Duration::ZERO, Scope::Local);
    harness.read_all();
    assert_eq!(blocks(&harness, owner), [Ok(Source::OwnDram); 3]);
}

#[test]
fn random_runs_show_no_reader_a_block_of_a_tenant_that_is_not_public() {
    let imported = std::cell::Cell::new(0);
    for_seeds(60, |seed| {
        let mut harness = Harness::new(random_setup(seed, FAULTS));
        for _ in 0..400 {
            match harness.rng.below(100) {
                0..12 => owner_saves(&mut harness),
                12..30 => reader_loads(&mut harness),
                30 => {
                    let tenant = harness.rng.chance(800).then_some(PUBLIC);
                    harness.declare_public(tenant);
                }
                _ => step(&mut harness),
            }
            harness.read_all();
        }
        imported.set(imported.get() + harness.core.counters().imported_blocks);
        finish_all(&mut harness);
    });
    assert!(!has_fixed_seeds() || imported.get() > 0, "no run has imported a block");
}

/// Keys that only the public tenant saves.
fn some_public_keys(harness: &mut Harness) -> Vec<BlockKey> {
    let start = harness.rng.below(24) as u64;
    keys(900 + start..901 + start + harness.rng.below(6) as u64)
}

/// The public tenant saves or loads blocks, or a peer gets some of its blocks.
fn owner_saves(harness: &mut Harness) {
    let wanted = some_public_keys(harness);
    let owner =
        harness.engines.iter().find(|(_, engine)| engine.tenant == PUBLIC).map(|(session, _)| *session);
    let Some(owner) = owner else {
        harness.open_session(PUBLIC, large_layout());
        return;
    };
    match harness.rng.below(5) {
        0 => {
            let node = NodeId(1 + harness.rng.below(3) as u16);
            let tier = [Tier::Dram, Tier::Nvme][harness.rng.below(2)];
            wanted.into_iter().for_each(|key| harness.add_public_replica(node, key, tier));
        }
        1 => drop(harness.load(owner, &wanted, Duration::ZERO, Scope::Local)),
        _ => {
            harness.reserve(owner, wanted.len() as u32);
            harness.commit(owner, &wanted, Priority::Normal);
        }
    }
}

/// Another tenant loads or matches blocks, with keys of the public tenant and of others.
fn reader_loads(harness: &mut Harness) {
    let is_reader = |engine: &Engine| engine.tenant != PUBLIC && engine.layout == large_layout();
    let readers: Vec<SessionId> =
        harness.engines.iter().filter(|(_, engine)| is_reader(engine)).map(|(session, _)| *session).collect();
    let Some(reader) = readers.get(harness.rng.below(readers.len().max(1))).copied() else { return };
    let base = u64::from(harness.engines[&reader].tenant.0) * 100 + harness.rng.below(40) as u64;
    let mut public = some_public_keys(harness);
    let own = keys(base..base + public.len() as u64 + harness.rng.below(2) as u64);
    for key_of_public in &mut public {
        if harness.rng.chance(200) {
            // Of any tenant.
            *key_of_public = key(harness.rng.below(300) as u64);
        }
    }
    let tenant = if harness.rng.chance(900) { PUBLIC } else { TenantId(harness.rng.below(3) as u16) };
    let scope = if harness.rng.chance(500) { Scope::Cluster } else { Scope::Local };
    let public = of(tenant, &public);
    if harness.rng.chance(300) {
        let (keys, public) = (own, Some(public));
        let kind = RequestKind::Match(keys.clone(), scope);
        let body = Request::Match { keys, ranks: Ranks::Own, position: Some(0), scope, public };
        harness.request(reader, kind, body);
        return;
    }
    let load = harness.load_public(reader, &own, public, scope);
    if harness.rng.chance(500) {
        harness.finish_jobs_but_fills();
        let held: Vec<LoadId> = harness.engines[&reader].loads.keys().copied().collect();
        let answered = harness.engines[&reader].replies.iter().any(|(request, _)| *request == load);
        if answered && let Some(held) = held.last() {
            harness.release(reader, *held);
        }
    }
}
