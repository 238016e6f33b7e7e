//! Scenarios: retention pins, and commands that prefetch, demote and delete blocks.

use std::time::Duration;

use reprise_agent_core::effect::{BlockReport, LoadedBlock, Place, Reply, Source};
use reprise_agent_core::event::{
    BlockAction, BlockCommand, BlockSelection, Event, Grant, Lookahead, Priority, Ranks, Request, Scope,
    SessionOpened,
};
use reprise_agent_core::{Settings, TenantQuotas};
use reprise_policy::prefetch::{HINT_VERSION, LookaheadRequest};
use reprise_policy::quota::Quota;
use reprise_policy::{BlockKey, NamespaceDigest, SessionId, SlotSet, TenantId, Tier};

use crate::engine::{Engine, RequestKind};
use crate::harness::{Harness, SMALL_KEYS_FROM, Setup, keys, large_layout, small_layout};

const MINUTE: Duration = Duration::from_secs(60);
const PIN: BlockAction = BlockAction::Pin { ttl: MINUTE };

/// Bytes of a large block on a device.
const NVME_BLOCK: u64 = 64 << 10;

/// Large blocks on the device of the default setup.
const CAPACITY: u64 = 224;

/// Harness with `blocks` blocks in DRAM and on NVMe. The arena has 16 slots, the device [`CAPACITY`].
fn harness(blocks: u64, settings: Settings) -> (Harness, SessionId) {
    let mut harness = Harness::new(Setup { settings, ..Setup::default() });
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    save(&mut harness, session, &keys(0..blocks));
    (harness, session)
}

fn settings() -> Settings {
    Setup::default().settings
}

fn save(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    for keys in keys.chunks(8) {
        harness.reserve(session, keys.len() as u32);
        harness.commit(session, keys, Priority::Normal);
        harness.pass(Duration::from_millis(6));
        harness.finish_jobs();
    }
}

fn answer(harness: &mut Harness, session: SessionId, command: BlockCommand) -> Reply {
    harness.request(session, RequestKind::Other, Request::Manage(command));
    harness.engines[&session].replies.last().expect("a reply").1.clone()
}

fn run(
    harness: &mut Harness,
    session: SessionId,
    action: BlockAction,
    selection: BlockSelection,
) -> BlockReport {
    match answer(harness, session, BlockCommand { action, selection, ranks: Ranks::Own }) {
        Reply::Managed(report) => report,
        other => panic!("a command is answered with {other:?}"),
    }
}

fn run_keys(
    harness: &mut Harness,
    session: SessionId,
    action: BlockAction,
    keys: Vec<BlockKey>,
) -> BlockReport {
    run(harness, session, action, BlockSelection::Keys(keys))
}

fn refused(
    harness: &mut Harness,
    session: SessionId,
    action: BlockAction,
    selection: BlockSelection,
) -> String {
    match answer(harness, session, BlockCommand { action, selection, ranks: Ranks::Own }) {
        Reply::BadRequest(text) => text,
        other => panic!("a command is answered with {other:?}"),
    }
}

/// Blocks of these keys that are in a tier.
fn in_tier(harness: &Harness, keys: &[BlockKey], tier: Tier) -> usize {
    keys.iter().filter(|key| harness.announced.contains(&(**key, tier))).count()
}

fn load(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) -> Vec<Option<Source>> {
    harness.load(session, keys, Duration::from_millis(50), Scope::Local);
    match &harness.engines[&session].replies.last().expect("a reply").1 {
        Reply::Loaded { blocks, .. } => blocks
            .iter()
            .map(|block| match block {
                LoadedBlock::Ok { source, .. } => Some(*source),
                LoadedBlock::Lost(_) => None,
            })
            .collect(),
        _ => Vec::new(),
    }
}

#[test]
fn pinned_blocks_stay_in_both_tiers_until_they_expire() {
    let (mut harness, session) = harness(4, settings());
    let pinned = run_keys(&mut harness, session, PIN, keys(0..4));
    assert_eq!((pinned.counts.affected, pinned.counts.refused()), (4, 0));
    assert_eq!((pinned.retention.blocks, pinned.retention.nvme_bytes), (4, 4 * NVME_BLOCK));
    assert_eq!(pinned.retention.dram_bytes, 4 * large_layout().slot_bytes());
    save(&mut harness, session, &keys(100..100 + CAPACITY));
    assert_eq!(in_tier(&harness, &keys(0..4), Tier::Dram), 4);
    assert_eq!(in_tier(&harness, &keys(0..4), Tier::Nvme), 4);
    harness.pass(MINUTE);
    let counted = harness.core.counters();
    assert_eq!((counted.retention_expired_blocks, counted.retention_pinned_blocks), (4, 0));
    assert_eq!((counted.retention_dram_bytes, counted.retention_nvme_bytes, counted.read_leases), (0, 0, 0));
    // They are the most recently used when their pins end.
    save(&mut harness, session, &keys(400..400 + 2 * CAPACITY));
    assert_eq!(in_tier(&harness, &keys(0..4), Tier::Dram), 0);
    assert_eq!(in_tier(&harness, &keys(0..4), Tier::Nvme), 0);
}

#[test]
fn unpin_ends_pins_and_a_second_pin_sets_a_new_time() {
    let (mut harness, session) = harness(4, settings());
    run_keys(&mut harness, session, PIN, keys(0..4));
    let again = run_keys(&mut harness, session, BlockAction::Pin { ttl: 10 * MINUTE }, keys(0..2));
    assert_eq!((again.counts.affected, again.retention.blocks), (2, 4));
    harness.pass(2 * MINUTE);
    assert_eq!(harness.core.counters().retention_pinned_blocks, 2);
    let ended = run_keys(&mut harness, session, BlockAction::Unpin, keys(0..6));
    assert_eq!((ended.counts.affected, ended.counts.unchanged, ended.counts.absent), (2, 2, 2));
    assert_eq!(ended.retention.blocks, 0);
    assert_eq!(harness.core.counters().read_leases, 0);
}

#[test]
fn pins_outlive_their_session() {
    let (mut harness, session) = harness(2, settings());
    run_keys(&mut harness, session, PIN, keys(0..2));
    harness.close_session(session);
    assert_eq!(harness.core.counters().retention_pinned_blocks, 2);
    let other = harness.open_session(TenantId::DEFAULT, large_layout());
    assert_eq!(run_keys(&mut harness, other, BlockAction::Unpin, keys(0..2)).counts.affected, 2);
}

#[test]
fn pins_beyond_the_share_are_refused_and_saves_continue() {
    let (mut harness, session) = harness(12, settings());
    // A quarter of 16 slots in DRAM. On NVMe, all of them fit.
    let pinned = run_keys(&mut harness, session, PIN, keys(0..12));
    assert_eq!(pinned.retention.dram_bytes, 4 * large_layout().slot_bytes());
    assert_eq!((pinned.counts.affected, pinned.retention.nvme_bytes), (12, 12 * NVME_BLOCK));
    save(&mut harness, session, &keys(100..180));
    let more = run_keys(&mut harness, session, PIN, keys(100..180));
    assert_eq!(more.retention.nvme_bytes, CAPACITY / 4 * NVME_BLOCK);
    assert!(more.counts.over_limit > 0 && more.retention.nvme_bytes <= more.retention.nvme_bytes_max);
    assert_eq!(harness.core.counters().retention_refused_blocks, more.counts.over_limit);
    save(&mut harness, session, &keys(200..200 + 2 * CAPACITY));
    assert_eq!(
        load(&mut harness, session, &keys(199 + 2 * CAPACITY..200 + 2 * CAPACITY)),
        [Some(Source::OwnDram)]
    );
    assert_eq!(in_tier(&harness, &keys(0..12), Tier::Nvme), 12);
}

#[test]
fn number_of_pinned_blocks_is_limited() {
    let (mut harness, session) = harness(4, Settings { retention_blocks_max: 3, ..settings() });
    let pinned = run_keys(&mut harness, session, PIN, keys(0..4));
    assert_eq!((pinned.counts.affected, pinned.counts.over_limit), (3, 1));
    // A pinned block is counted once.
    let again = run_keys(&mut harness, session, PIN, keys(0..4));
    assert_eq!((again.counts.affected, again.counts.over_limit, again.retention.blocks), (3, 1, 3));
}

#[test]
fn share_of_zero_refuses_all_pins() {
    let (mut harness, session) = harness(2, Settings { retention_permille: 0, ..settings() });
    let refused = run_keys(&mut harness, session, PIN, keys(0..2));
    assert_eq!((refused.counts.affected, refused.counts.over_limit), (0, 2));
}

#[test]
fn pins_do_not_take_what_other_tenants_have_reserved() {
    let (greedy, other) = (TenantId::DEFAULT, TenantId(7));
    let reserved = 200 * NVME_BLOCK;
    let quota = |reserved| Quota::new(reserved, u64::MAX).expect("valid");
    let tenants = vec![TenantQuotas {
        tenant: other,
        dram: quota(4 * large_layout().slot_bytes()),
        nvme: quota(reserved),
    }];
    let settings = Settings { tenants, retention_permille: 500, ..settings() };
    let mut harness = Harness::new(Setup { regions: 8, settings, ..Setup::default() });
    let session = harness.open_session(greedy, large_layout());
    save(&mut harness, session, &keys(0..32));
    harness.request(session, RequestKind::Other, Request::Trim);
    let pinned = run_keys(&mut harness, session, PIN, keys(0..32));
    let free = CAPACITY * NVME_BLOCK - reserved;
    assert!(pinned.counts.over_limit > 0, "{pinned:?}");
    assert!(pinned.retention.nvme_bytes == free / 2, "{pinned:?}");
    let owner = harness.open_session(other, small_layout());
    let small: Vec<BlockKey> = keys(SMALL_KEYS_FROM..SMALL_KEYS_FROM + 64);
    save(&mut harness, owner, &small);
    assert_eq!(in_tier(&harness, &small, Tier::Nvme), 64, "the other tenant saves as before");
}

#[test]
fn pins_in_every_segment_do_not_keep_other_sizes_out() {
    // Four segments of 32 large blocks are full; each has a pinned block.
    let setup = Setup { disks: vec![4 * 33 * NVME_BLOCK], regions: 8, ..Setup::default() };
    let mut harness = Harness::new(setup);
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    save(&mut harness, session, &keys(0..200));
    harness.request(session, RequestKind::Other, Request::Trim);
    let stored: Vec<BlockKey> =
        keys(0..200).into_iter().filter(|key| in_tier(&harness, &[*key], Tier::Nvme) == 1).collect();
    let every_fifth = stored.iter().copied().step_by(5).collect();
    let pinned = run_keys(&mut harness, session, PIN, every_fifth);
    assert!(pinned.counts.affected > 8, "{pinned:?}");
    let small_session = harness.open_session(TenantId::DEFAULT, small_layout());
    let small: Vec<BlockKey> = keys(SMALL_KEYS_FROM..SMALL_KEYS_FROM + 8);
    save(&mut harness, small_session, &small);
    assert_eq!(in_tier(&harness, &small, Tier::Nvme), 8, "the other size is saved");
    assert!(harness.core.counters().retention_broken_blocks > 0);
}

#[test]
fn pins_in_every_region_do_not_keep_other_sizes_out_of_dram() {
    // Each of the four regions has four large blocks, and one of them is pinned.
    let (mut harness, session) = harness(16, settings());
    let pinned: Vec<BlockKey> = keys(0..16).into_iter().step_by(4).collect();
    let report = run_keys(&mut harness, session, PIN, pinned.clone());
    assert_eq!(report.retention.dram_bytes, 4 * large_layout().slot_bytes());
    assert_eq!(in_tier(&harness, &pinned, Tier::Dram), 4);
    let small_session = harness.open_session(TenantId::DEFAULT, small_layout());
    let small: Vec<BlockKey> = keys(SMALL_KEYS_FROM..SMALL_KEYS_FROM + 8);
    save(&mut harness, small_session, &small);
    assert_eq!(in_tier(&harness, &small, Tier::Dram), 8, "the other size gets a region");
    let all = harness.core.counters();
    assert_eq!((all.retention_broken_blocks, all.retention_pinned_blocks), (1, 4));
    assert_eq!(all.retention_dram_bytes, 3 * large_layout().slot_bytes(), "the other pins stay");
    assert_eq!((in_tier(&harness, &pinned, Tier::Dram), in_tier(&harness, &pinned, Tier::Nvme)), (3, 4));
}

#[test]
fn region_that_a_load_reads_is_not_taken_from_pins() {
    let (mut harness, session) = harness(16, settings());
    let pinned: Vec<BlockKey> = keys(0..16).into_iter().step_by(4).collect();
    run_keys(&mut harness, session, PIN, pinned.clone());
    harness.load(session, &keys(0..16), Duration::ZERO, Scope::Local);
    let small_session = harness.open_session(TenantId::DEFAULT, small_layout());
    harness.reserve(small_session, 1);
    assert_eq!(
        harness.core.counters().retention_broken_blocks,
        0,
        "all regions have slots that a load reads"
    );
    assert_eq!(in_tier(&harness, &pinned, Tier::Dram), 4);
}

#[test]
fn pins_shrink_with_a_lowered_quota() {
    let (mut harness, session) = harness(12, settings());
    run_keys(&mut harness, session, PIN, keys(0..12));
    let limit = |bytes| Quota::new(0, bytes).expect("valid");
    let grant = Grant {
        tenant: TenantId::DEFAULT,
        version: 1,
        dram: limit(8 * large_layout().slot_bytes()),
        nvme: limit(8 * NVME_BLOCK),
    };
    harness.apply(Event::Budget(grant));
    let usage = harness.core.tenant_usage().next().expect("the tenant").retention;
    assert!(usage.dram_bytes <= 2 * large_layout().slot_bytes(), "{usage:?}");
    assert_eq!(usage.nvme_bytes, 2 * NVME_BLOCK);
    assert!(harness.core.counters().retention_revoked_blocks >= 10);
}

#[test]
fn damaged_copy_leaves_its_pin() {
    let (mut harness, session) = harness(2, settings());
    harness.load(session, &keys(0..2), Duration::ZERO, Scope::Local);
    let reply = &harness.engines[&session].replies.last().expect("a reply").1;
    let Reply::Loaded { load, blocks, .. } = reply.clone() else { panic!("not a load: {reply:?}") };
    let LoadedBlock::Ok { place: Place::Arena(slot), .. } = &blocks[0] else { panic!("not in the arena") };
    run_keys(&mut harness, session, PIN, keys(0..2));
    harness.memory.write(*slot, &large_layout(), 0..1, u64::MAX >> 20);
    harness.engines.get_mut(&session).expect("open").ignore_block(load, 0);
    harness.suspect(session, load, vec![0]);
    harness.finish_jobs();
    harness.release(session, load);
    assert_eq!(in_tier(&harness, &keys(0..1), Tier::Dram), 0);
    assert_eq!(harness.core.counters().read_leases, 1, "only the intact copy is kept");
}

#[test]
fn replaced_copy_leaves_its_pin_although_it_was_intact() {
    let (mut harness, session) = harness(2, settings());
    harness.load(session, &keys(0..1), Duration::ZERO, Scope::Local);
    let reply = &harness.engines[&session].replies.last().expect("a reply").1;
    let Reply::Loaded { load, .. } = *reply else { panic!("not a load: {reply:?}") };
    run_keys(&mut harness, session, PIN, keys(0..2));
    harness.suspect(session, load, vec![0]);
    // The engine has computed the block again before the check has found it intact.
    harness.reserve(session, 1);
    harness.commit(session, &keys(0..1), Priority::Normal);
    harness.finish_jobs();
    harness.release(session, load);
    harness.pass(Duration::from_millis(6));
    harness.finish_jobs();
    let all = harness.core.counters();
    assert_eq!(all.retention_dram_bytes, large_layout().slot_bytes());
    assert_eq!(all.read_leases, 1, "the replaced copy is freed at once");
}

#[test]
fn prefetch_reads_blocks_behind_loads_and_they_stay_in_dram() {
    let mut harness = Harness::new(Setup { regions: 8, ..Setup::default() });
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    save(&mut harness, session, &keys(0..8));
    harness.request(session, RequestKind::Other, Request::Trim);
    // An eighth of the 32 slots.
    let begun = run_keys(&mut harness, session, BlockAction::Prefetch, keys(0..9));
    assert_eq!((begun.counts.affected, begun.counts.over_limit, begun.counts.absent), (4, 4, 1));
    assert_eq!(harness.fills().len(), 4);
    harness.close_session(session);
    harness.finish_jobs();
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    let again = run_keys(&mut harness, session, BlockAction::Prefetch, keys(0..4));
    assert_eq!((again.counts.unchanged, again.counts.affected), (4, 0));
    assert_eq!(load(&mut harness, session, &keys(0..4)), [Some(Source::OwnDram); 4]);
    let rest = run_keys(&mut harness, session, BlockAction::Prefetch, keys(4..8));
    assert_eq!(rest.counts.affected, 4, "loads have used the first blocks");
    harness.finish_jobs();
    harness.pass(MINUTE);
    let counted = harness.core.counters();
    assert_eq!((counted.prefetch_requested_blocks, counted.prefetch_staged_bytes), (8, 0));
    assert_eq!(in_tier(&harness, &keys(4..8), Tier::Dram), 4, "still cached after their time");
}

#[test]
fn demote_drops_only_unused_copies_of_durable_blocks() {
    let (mut harness, session) = harness(4, settings());
    harness.reserve(session, 1);
    harness.commit(session, &keys(50..51), Priority::Normal);
    load(&mut harness, session, &keys(0..1));
    run_keys(&mut harness, session, PIN, keys(1..2));
    let mut selected = keys(0..5);
    selected.extend(keys(50..51));
    let report = run_keys(&mut harness, session, BlockAction::Demote, selected.clone()).counts;
    assert_eq!((report.affected, report.in_use, report.pinned, report.absent), (2, 2, 1, 1));
    assert_eq!(report.bytes, 2 * large_layout().slot_bytes());
    let again = run_keys(&mut harness, session, BlockAction::Demote, keys(2..4)).counts;
    assert_eq!((again.affected, again.unchanged), (0, 2));
    assert_eq!(in_tier(&harness, &keys(2..4), Tier::Nvme), 2);
    assert_eq!(harness.core.counters().demoted_on_request_blocks, 2);
}

#[test]
fn delete_withdraws_all_copies_and_loads_keep_theirs() {
    let (mut harness, session) = harness(4, settings());
    load(&mut harness, session, &keys(0..1));
    run_keys(&mut harness, session, PIN, keys(1..2));
    let report = run_keys(&mut harness, session, BlockAction::Delete, keys(0..5)).counts;
    assert_eq!((report.affected, report.pinned, report.absent), (3, 1, 1));
    for tier in [Tier::Dram, Tier::Nvme] {
        assert_eq!(in_tier(&harness, &keys(0..4), tier), 1, "only the pinned block remains in {tier:?}");
    }
    harness.read_all();
    assert_eq!(load(&mut harness, session, &keys(0..1)), [None]);
    save(&mut harness, session, &keys(0..1));
    assert_eq!(in_tier(&harness, &keys(0..1), Tier::Nvme), 1, "the block can be saved again");
}

#[test]
fn deleted_block_that_was_read_ahead_leaves_the_reserve() {
    let (mut harness, session) = harness(2, settings());
    harness.request(session, RequestKind::Other, Request::Trim);
    run_keys(&mut harness, session, BlockAction::Prefetch, keys(0..2));
    let in_flight = run_keys(&mut harness, session, BlockAction::Delete, keys(0..1)).counts;
    assert_eq!(in_flight.in_use, 1, "a device fills its slot");
    harness.finish_jobs();
    assert_eq!(run_keys(&mut harness, session, BlockAction::Delete, keys(0..2)).counts.affected, 2);
    let counted = harness.core.counters();
    assert_eq!((counted.prefetch_staged_bytes, counted.read_leases, counted.arena_used_bytes), (0, 0, 0));
}

#[test]
fn session_selects_the_blocks_that_its_hints_list() {
    let (mut harness, engine) = harness(6, settings());
    harness.request(engine, RequestKind::Other, Request::Trim);
    let waits = |request, keys| LookaheadRequest { request, iterations: 4, confidence: 1000, keys };
    let requests = vec![waits(1, keys(0..2)), waits(2, keys(1..4))];
    let iteration = Duration::from_millis(20);
    let hint = Lookahead { version: HINT_VERSION, iteration, requests, ..Lookahead::default() };
    harness.request(engine, RequestKind::Other, Request::Lookahead(hint));
    harness.finish_jobs();
    let admin = harness.open_session(TenantId::DEFAULT, small_layout());
    let pinned = run(&mut harness, admin, PIN, BlockSelection::Listed(engine)).counts;
    assert_eq!((pinned.affected, pinned.absent), (4, 0), "each block once");
    let stranger = harness.open_session(TenantId(9), large_layout());
    for (session, listed) in [(stranger, engine), (admin, SessionId(999))] {
        let text = refused(&mut harness, session, PIN, BlockSelection::Listed(listed));
        assert!(text.contains("does not exist"), "{text}");
    }
}

#[test]
fn namespace_selects_all_blocks_in_steps_unless_it_is_ambiguous() {
    let (mut harness, session) = harness(10, settings());
    let small = harness.open_session(TenantId::DEFAULT, small_layout());
    save(&mut harness, small, &keys(SMALL_KEYS_FROM..SMALL_KEYS_FROM + 4));
    let all = BlockSelection::Namespace { from: 0 };
    let demoted = run(&mut harness, session, BlockAction::Demote, all.clone());
    assert_eq!((demoted.counts.affected, demoted.next), (10, None));
    let behind = BlockSelection::Namespace { from: u64::MAX };
    assert_eq!(run(&mut harness, session, BlockAction::Delete, behind).counts.found(), 0);
    let deleted = run(&mut harness, session, BlockAction::Delete, all.clone());
    assert_eq!(deleted.counts.affected, 10);
    assert_eq!(in_tier(&harness, &keys(SMALL_KEYS_FROM..SMALL_KEYS_FROM + 4), Tier::Nvme), 4);
    let other = open_other_namespace(&mut harness);
    // A session that saves nothing changes nothing.
    assert_eq!(run(&mut harness, session, BlockAction::Delete, all.clone()).counts.found(), 0);
    let text = refused(&mut harness, other, BlockAction::Delete, all.clone());
    assert!(text.contains("another namespace"), "{text}");
    harness.reserve(other, 1);
    harness.commit(other, &keys(20..21), Priority::Normal);
    let text = refused(&mut harness, session, BlockAction::Delete, all);
    assert!(text.contains("several namespaces") && text.contains("tokens, keys or session"), "{text}");
}

/// Opens a session of another namespace, with the tenant and layout of the others.
fn open_other_namespace(harness: &mut Harness) -> SessionId {
    let session = SessionId(99);
    let opened = SessionOpened {
        session,
        tenant: TenantId::DEFAULT,
        namespace: NamespaceDigest([2; 32]),
        layout: large_layout(),
        gpu: None,
    };
    harness.engines.insert(session, Engine::new(opened.tenant, opened.layout));
    harness.apply(Event::SessionOpened(opened));
    session
}

#[test]
fn blocks_that_recovery_found_are_not_removed_by_namespace() {
    let (harness, _) = harness(6, settings());
    let mut harness = harness.kill();
    harness.apply(Event::InventoryWanted { slots: Box::new(SlotSet::ALL) });
    let other = open_other_namespace(&mut harness);
    for action in [BlockAction::Delete, BlockAction::Demote] {
        let text = refused(&mut harness, other, action, BlockSelection::Namespace { from: 0 });
        assert!(text.contains("any namespace") && text.contains("tokens, keys or session"), "{text}");
    }
    assert_eq!(in_tier(&harness, &keys(0..6), Tier::Nvme), 6);
    // Also for the session whose blocks they are, because the agent cannot know that.
    let session = harness.open_session(TenantId::DEFAULT, large_layout());
    refused(&mut harness, session, BlockAction::Delete, BlockSelection::Namespace { from: 0 });
    assert_eq!(run_keys(&mut harness, session, BlockAction::Delete, keys(0..6)).counts.affected, 6);
}

#[test]
fn namespace_of_a_session_that_loads_counts_like_that_of_one_that_saves() {
    let (mut harness, session) = harness(2, settings());
    let other = open_other_namespace(&mut harness);
    let all = BlockSelection::Namespace { from: 0 };
    assert_eq!(run(&mut harness, session, BlockAction::Demote, all.clone()).counts.affected, 2);
    harness.load(other, &keys(50..51), Duration::ZERO, Scope::Local);
    let text = refused(&mut harness, session, BlockAction::Delete, all);
    assert!(text.contains("several namespaces"), "{text}");
}

#[test]
fn tenants_cannot_change_each_others_blocks() {
    let (mut harness, session) = harness(2, settings());
    run_keys(&mut harness, session, PIN, keys(0..1));
    let stranger = harness.open_session(TenantId(9), large_layout());
    for action in [PIN, BlockAction::Unpin, BlockAction::Prefetch, BlockAction::Demote, BlockAction::Delete] {
        let report = run_keys(&mut harness, stranger, action, keys(0..2));
        assert_eq!((report.counts.absent, report.counts.found()), (2, 0), "{action:?}");
    }
    assert_eq!(harness.core.counters().retention_pinned_blocks, 1);
}

#[test]
fn impossible_times_are_refused_with_the_allowed_range() {
    let (mut harness, session) = harness(1, settings());
    for ttl in [Duration::ZERO, Duration::from_secs(1_000_000)] {
        let keys = BlockSelection::Keys(keys(0..1));
        let text = refused(&mut harness, session, BlockAction::Pin { ttl }, keys);
        assert!(text.contains("retention.ttl_max"), "{text}");
    }
}

/// Executes a random command.
pub(crate) fn random_command(harness: &mut Harness, session: SessionId, keys: &[BlockKey]) {
    let rng = &mut harness.rng;
    let ttl = Duration::from_micros(1000 + rng.below(30_000) as u64);
    let pin = BlockAction::Pin { ttl };
    let actions =
        [pin, pin, pin, BlockAction::Unpin, BlockAction::Prefetch, BlockAction::Demote, BlockAction::Delete];
    let action = actions[rng.below(actions.len())];
    let selection = match rng.below(8) {
        0 => BlockSelection::Listed(session),
        1 => BlockSelection::Namespace { from: rng.below(50) as u64 },
        _ => BlockSelection::Keys(keys.to_vec()),
    };
    let command = BlockCommand { action, selection, ranks: Ranks::Own };
    harness.request(session, RequestKind::Other, Request::Manage(command));
}
