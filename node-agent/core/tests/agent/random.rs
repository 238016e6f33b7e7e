//! Random runs: invariants hold for any sequence of events, every request is answered, and no resource
//! remains in use at the end.

use std::time::Duration;

use reprise_agent_core::effect::{DeviceId, Ticket};
use reprise_agent_core::event::{Event, Grant, Move, Priority, Request, Scope};
use reprise_agent_core::limits::PREFETCH_REQUESTED_MAX;
use reprise_agent_core::{Settings, TenantQuotas};
use reprise_policy::admission::AdmissionMode;
use reprise_policy::admission::budget::DailyBudget;
use reprise_policy::slack::{LayerSlack, Phase, WriteSlack};
use reprise_policy::{BlockKey, NodeId, NodeMode, Quota, SessionId, SlotSet, TenantId, Tier};

use crate::descriptions;
use crate::engine::RequestKind;
use crate::harness::{Faults, Harness, SMALL_KEYS_FROM, Setup, key, large_layout, layout_of, small_layout};
use crate::rng::{Rng, for_seeds, has_fixed_seeds};
use crate::scenarios_prefetch::random_hint;
use crate::scenarios_retention::random_command;

/// Number of keys of each tenant and layout.
pub(crate) const KEYS: u64 = 48;

/// The default tenant, and two tenants with quotas.
pub(crate) const TENANTS: u16 = 3;

/// Distance between the first keys of two tenants.
const TENANT_STRIDE: u64 = 100;

/// Faults of random runs, without lost devices.
pub(crate) const FAULTS: Faults = Faults {
    renewal: 50,
    write_media: 20,
    read: 15,
    refused: 15,
    fetch: 60,
    lookup: 80,
    place: 150,
    check: 500,
    directory_stale: 60,
    device_lost: 0,
    stranded: 0,
};

/// Harness with a size and delays that depend on the seed.
pub(crate) fn random_setup(seed: u64, faults: Faults) -> Setup {
    let mut rng = Rng::new(seed ^ 0xabcd);
    let slot = large_layout().slot_bytes();
    let disks = [vec![], vec![8 << 20], vec![8 << 20, 8 << 20]];
    Setup {
        seed,
        places: Vec::new(),
        regions: 2 + rng.below(4) as u16,
        region_bytes: 4 * slot,
        disks: disks[if seed.is_multiple_of(8) { 0 } else { 1 + rng.below(2) }].clone(),
        settings: Settings {
            writeback_bytes: slot * (1 + rng.below(6) as u64),
            slack_delay: Duration::from_millis([0, 20, 1000, 1000][rng.below(4)]),
            arena_unsaved_permille: [500, 1000][rng.below(2)],
            arena_serves_permille: [100, 1000][rng.below(2)],
            pool_free_permille: [30, 600][rng.below(2)],
            placement_bandwidth: [0, 1 << 20, 256 << 20, 256 << 20][rng.below(4)],
            hot_reads: 2,
            admission: AdmissionMode::ALL[[0, 0, 1, 2][rng.below(4)]],
            daily_write_budget: [None, None, Some(DailyBudget { bytes: 4 << 40, burst: 16 * slot })]
                [rng.below(3)],
            skip_dram: rng.below(2) == 1,
            tenants: (1..TENANTS).map(|tenant| random_quotas(&mut rng, TenantId(tenant))).collect(),
            ..Setup::default().settings
        },
        faults,
    }
}

/// Reservations up to a region and a dozen device blocks; limits from almost zero to more than the capacity.
fn random_quotas(rng: &mut Rng, tenant: TenantId) -> TenantQuotas {
    let slot = large_layout().slot_bytes();
    let mut quota = |reserved: u64, more: u64| {
        let reserved = slot * rng.below(reserved as usize) as u64;
        Quota::new(reserved, reserved + slot * (2 + rng.below(more as usize) as u64))
            .expect("the limit is higher")
    };
    TenantQuotas { tenant, dram: quota(4, 12), nvme: quota(12, 60) }
}

/// Keys of a tenant: a run of a chain, sometimes with a duplicate or a key of the other layout.
fn some_keys(rng: &mut Rng, tenant: TenantId, small: bool) -> Vec<BlockKey> {
    let of_tenant = u64::from(tenant.0) * TENANT_STRIDE;
    let base = of_tenant + if small { SMALL_KEYS_FROM } else { 0 };
    let start = rng.below(KEYS as usize) as u64;
    let mut keys: Vec<BlockKey> =
        (0..1 + rng.below(6) as u64).map(|offset| key(base + (start + offset) % KEYS)).collect();
    if rng.chance(100) {
        keys.push(keys[0]);
    }
    if rng.chance(20) {
        keys.push(key(SMALL_KEYS_FROM + 2 * of_tenant - base + start));
    }
    if rng.chance(20) {
        // Key of another tenant.
        keys.push(key((base + start + TENANT_STRIDE) % SMALL_KEYS_FROM));
    }
    keys
}

/// Executes one random step.
pub(crate) fn step(harness: &mut Harness) {
    match harness.rng.below(100) {
        0..30 => advance_some_job(harness),
        30..82 => engine_acts(harness),
        82..91 => peer_acts(harness),
        91..98 => {
            let time = Duration::from_micros(harness.rng.below(8000) as u64);
            harness.pass(time);
        }
        98 => harness.apply(Event::Tick),
        _ => environment_changes(harness),
    }
    harness.read_all();
}

fn advance_some_job(harness: &mut Harness) {
    for _ in 0..1 + harness.rng.below(6) {
        if !harness.jobs.is_empty() {
            let job = harness.rng.below(harness.jobs.len());
            harness.advance(job);
        }
    }
}

fn engine_acts(harness: &mut Harness) {
    let sessions: Vec<SessionId> = harness.engines.keys().copied().collect();
    if sessions.len() < 2 || (sessions.len() < 5 && harness.rng.chance(20)) {
        let layout = if harness.rng.chance(400) { small_layout() } else { large_layout() };
        let tenant = some_tenant(&mut harness.rng);
        harness.open_session(tenant, layout);
        return;
    }
    let session = sessions[harness.rng.below(sessions.len())];
    let (tenant, small) = {
        let engine = &harness.engines[&session];
        (engine.tenant, engine.layout == small_layout())
    };
    let keys = some_keys(&mut harness.rng, tenant, small);
    match harness.rng.below(114) {
        0..25 => {
            let count = harness.rng.below(5) as u32;
            harness.reserve(session, count);
        }
        25..45 => {
            let priority = [Priority::Low, Priority::Normal, Priority::High][harness.rng.below(3)];
            let layout = harness.engines[&session].layout;
            let keys: Vec<_> = keys.into_iter().filter(|key| layout_of(key) == layout).collect();
            harness.commit(session, &keys, priority);
        }
        45..50 => abort_some(harness, session),
        50..62 => {
            let scope = scope(&mut harness.rng);
            harness.match_keys(session, &keys, scope);
        }
        62..80 => {
            let scope = scope(&mut harness.rng);
            let deadline = Duration::from_micros(harness.rng.below(30_000) as u64);
            harness.load(session, &keys, deadline, scope);
        }
        80..91 => release_some(harness, session),
        91..93 => report_layer(harness, session),
        93 => await_durable(harness, session),
        94..97 => suspect_some(harness, session),
        97 => {
            harness.request(session, RequestKind::Other, Request::Trim);
        }
        98 => {
            harness.request(session, RequestKind::Other, Request::Stats);
        }
        99 => harness.close_session(session),
        100..106 => random_command(harness, session, &keys),
        _ => random_hint(harness, session, &keys),
    }
}

/// Reports a random computation, sometimes without a profile.
fn report_layer(harness: &mut Harness, session: SessionId) {
    let slot = large_layout().slot_bytes();
    let rng = &mut harness.rng;
    let layers = LayerSlack {
        phase: [Phase::Prefill, Phase::Decode][rng.below(2)],
        cycle_micros: 1_000 + rng.below(9_000) as u32,
        bytes: slot / 2 * rng.below(6) as u64,
        bytes_max: slot * rng.below(4) as u64,
    };
    let layers = LayerSlack { bytes: layers.bytes.min(layers.bytes_max), ..layers };
    let slack = match rng.below(10) {
        0 => None,
        1 => Some(WriteSlack::Idle),
        2 => Some(WriteSlack::Unrestricted),
        _ => Some(WriteSlack::Layers(layers)),
    };
    harness.apply(Event::LayerReported { session, slack });
}

/// Awaits a recent commit, whose notice may have been sent.
fn await_durable(harness: &mut Harness, session: SessionId) {
    let ticket = harness.engines[&session].tickets.keys().next_back().copied();
    let ticket = ticket.unwrap_or(Ticket(harness.rng.below(5) as u64));
    harness.request(session, RequestKind::Other, Request::AwaitDurable { ticket });
}

fn some_tenant(rng: &mut Rng) -> TenantId {
    TenantId(rng.below(usize::from(TENANTS)) as u16)
}

fn scope(rng: &mut Rng) -> Scope {
    if rng.chance(700) { Scope::Cluster } else { Scope::Local }
}

fn abort_some(harness: &mut Harness, session: SessionId) {
    let engine = harness.engines.get_mut(&session).expect("open");
    let count = engine.reserved.len().min(2);
    let leases = engine.reserved.drain(..count).map(|(lease, _)| lease).collect();
    harness.request(session, RequestKind::Other, Request::Abort { leases });
}

fn release_some(harness: &mut Harness, session: SessionId) {
    let loads: Vec<_> = harness.engines[&session].loads.keys().copied().collect();
    for load in loads {
        if harness.rng.chance(600) {
            harness.release(session, load);
        }
    }
}

fn suspect_some(harness: &mut Harness, session: SessionId) {
    let loads: Vec<_> =
        harness.engines[&session].loads.iter().map(|(id, load)| (*id, load.keys.len())).collect();
    for (load, blocks) in loads {
        let block = harness.rng.below(blocks + 1) as u32;
        harness.suspect(session, load, vec![block, 0, block]);
    }
}

fn peer_acts(harness: &mut Harness) {
    let serves: Vec<_> = harness.serves.keys().copied().collect();
    if serves.len() < 3 && harness.rng.chance(400) {
        let small = harness.rng.chance(400);
        let tenant = some_tenant(&mut harness.rng);
        let keys = some_keys(&mut harness.rng, tenant, small);
        let layout = if small { small_layout() } else { large_layout() };
        let deadline = Duration::from_micros(harness.rng.below(30_000) as u64);
        harness.peer_request_of(tenant, &keys, layout, deadline);
        return;
    }
    for serve in serves {
        if harness.rng.chance(30) {
            harness.abort_serve(serve);
            continue;
        }
        for _ in 0..6 {
            let Some(state) = harness.serves.get(&serve) else { break };
            let block = harness.rng.below(state.blocks.len()) as u32;
            harness.send(serve, block);
        }
    }
}

/// Quota of fewer than `slots` slots, sometimes with a reservation.
fn some_quota(rng: &mut Rng, slot: u64, slots: usize) -> Quota {
    let limit = rng.below(slots);
    let reserved = if rng.below(4) == 0 { rng.below(limit + 1) } else { 0 };
    Quota::new(slot * reserved as u64, slot * limit as u64).expect("not above the limit")
}

fn environment_changes(harness: &mut Harness) {
    match harness.rng.below(13) {
        12 => {
            let tenant = TenantId(1 + harness.rng.below(usize::from(TENANTS) - 1) as u16);
            let event = match harness.erased.remove(&tenant) {
                true => Event::TenantRestored { tenant },
                false => {
                    harness.erased.insert(tenant);
                    Event::TenantErased { tenant }
                }
            };
            harness.apply(event);
        }
        6 | 7 => {
            let mode = [NodeMode::Active, NodeMode::Active, NodeMode::Cordoned, NodeMode::Draining];
            let (mode, revision) = (mode[harness.rng.below(4)], harness.rng.below(60) as u64);
            harness.apply(Event::Mode { mode, revision });
        }
        8 => {
            let to = NodeId(1 + harness.rng.below(3) as u16);
            let bytes = large_layout().slot_bytes() * harness.rng.below(30) as u64;
            let order = harness.rng.chance(800).then_some(Move { to, bytes });
            harness.apply(Event::Move(order));
        }
        9..12 => {
            let small = harness.rng.chance(400);
            let node = NodeId(1 + harness.rng.below(3) as u16);
            let tenant = some_tenant(&mut harness.rng);
            let keys = some_keys(&mut harness.rng, tenant, small);
            let layout = if small { small_layout() } else { large_layout() };
            for key in keys.iter().filter(|key| layout_of(key) == layout) {
                if harness.rng.chance(800) {
                    harness.add_peer_replica(node, *key, Tier::Nvme);
                }
            }
            harness.peer_offer(node, tenant, layout, &keys);
        }
        4 | 5 => {
            let slot = large_layout().slot_bytes();
            let (tenant, version) = (some_tenant(&mut harness.rng), harness.rng.below(40) as u64);
            let dram = some_quota(&mut harness.rng, slot, 20);
            let nvme = some_quota(&mut harness.rng, slot, 80);
            harness.apply(Event::Budget(Grant { tenant, version, dram, nvme }));
        }
        0 => {
            let before = harness.announced.clone();
            harness.apply(Event::InventoryWanted { slots: Box::new(SlotSet::ALL) });
            assert_eq!(harness.announced, before, "the inventory equals the sum of the changes");
        }
        1 | 2 => {
            let small = harness.rng.chance(400);
            let node = NodeId(1 + harness.rng.below(3) as u16);
            let tier = [Tier::Dram, Tier::Nvme][harness.rng.below(2)];
            let tenant = some_tenant(&mut harness.rng);
            for key in some_keys(&mut harness.rng, tenant, small) {
                harness.add_peer_replica(node, key, tier);
            }
        }
        _ => {
            let node = NodeId(1 + harness.rng.below(3) as u16);
            harness.peers.held.remove(&node);
        }
    }
}

/// Completes everything, and checks that no resource remains in use.
pub(crate) fn finish_all(harness: &mut Harness) {
    harness.apply(Event::Mode { mode: NodeMode::Active, revision: u64::MAX });
    harness.apply(Event::Move(None));
    harness.finish_jobs();
    for serve in harness.serves.keys().copied().collect::<Vec<_>>() {
        harness.abort_serve(serve);
    }
    for _ in 0..4 {
        harness.pass(Duration::from_secs(2));
        harness.finish_jobs();
    }
    for engine in harness.engines.values() {
        assert!(engine.requests_open.is_empty(), "unanswered: {:?}", engine.requests_open);
        assert!(engine.tickets.is_empty(), "without a notice: {:?}", engine.tickets);
        assert!(engine.loads.keys().all(|load| engine.progress(*load).done), "a load without an end");
    }
    for session in harness.engines.keys().copied().collect::<Vec<_>>() {
        harness.close_session(session);
    }
    // Blocks that commands read ahead stay staged for a while.
    harness.pass(PREFETCH_REQUESTED_MAX);
    // A pull may start with the room that the last session released; its block is written then.
    for _ in 0..2 {
        harness.pass(Duration::from_secs(2));
        harness.finish_jobs();
    }
    for tenant in std::mem::take(&mut harness.erased) {
        let usage = harness.core.tenant_usage().find(|usage| usage.tenant == tenant);
        assert_eq!(usage.map_or(0, |usage| usage.nvme.used), 0, "blocks of an erased tenant remain");
        harness.apply(Event::TenantRestored { tenant });
    }
    let counters = harness.core.counters();
    let left = [
        ("sessions", counters.sessions),
        ("reserved bytes", counters.reserved_bytes),
        ("read leases", counters.read_leases),
        ("loads", counters.loads_held),
        ("fills", counters.fills_in_flight),
        ("serves", counters.serves_in_flight),
        ("unsaved blocks", counters.unsaved_blocks),
        ("pulls", counters.pulls_waiting),
        ("bytes of pulls", counters.pulls_in_flight_bytes),
        ("pending frees", counters.pool_pending_free_bytes),
    ];
    for (what, count) in left {
        assert_eq!(count, 0, "{what} remain");
    }
    assert_eq!(harness.core.next_deadline(), None, "no deadline remains");
    check_space(harness);
    descriptions::check(harness, harness.announced.iter().map(|(key, _)| *key));
}

/// Checks that the bytes in use are those of announced blocks, on every tier, and of slots stranded by lost
/// devices.
fn check_space(harness: &Harness) {
    let slot_bytes = |key: &BlockKey| layout_of(key).slot_bytes();
    let bytes = |tier: Tier, header: u64| -> u64 {
        let of_tier = harness.announced.iter().filter(|(_, other)| *other == tier);
        of_tier.map(|(key, _)| slot_bytes(key) + header).sum()
    };
    let counters = harness.core.counters();
    let dram_bytes = bytes(Tier::Dram, 0) + counters.arena_lost_bytes;
    assert_eq!(counters.arena_used_bytes, dram_bytes, "slots of the arena leak");
    assert_eq!(counters.pool_used_bytes, bytes(Tier::Nvme, 4096), "slots of the pool leak");
}

/// Panics unless the runs have covered all listed counters.
struct Coverage {
    names: Vec<&'static str>,
    sums: std::cell::RefCell<Vec<u64>>,
}

impl Coverage {
    fn of(names: &[&'static str]) -> Coverage {
        Coverage { names: names.to_vec(), sums: vec![0; names.len()].into() }
    }

    fn add(&self, harness: &Harness) {
        let mut sums = self.sums.borrow_mut();
        for (name, value) in harness.core.counters().fields() {
            if let Some(at) = self.names.iter().position(|other| *other == name) {
                sums[at] += value;
            }
        }
    }

    fn check(&self) {
        for (name, sum) in self.names.iter().zip(self.sums.borrow().iter()) {
            assert!(*sum > 0, "the runs never reached '{name}'");
        }
    }
}

#[test]
fn random_runs_neither_leak_nor_hang_nor_read_wrong_bytes() {
    let coverage = Coverage::of(&[
        "erased_blocks",
        "duplicate_items",
        "durable_items",
        "lost_items",
        "match_peer_dram",
        "hit_blocks_own_dram",
        "hit_blocks_own_nvme",
        "hit_blocks_peer_dram",
        "hit_blocks_peer_nvme",
        "miss_blocks",
        "failed_blocks",
        "no_space_blocks",
        "deadline_blocks",
        "single_flight_joins",
        "prefetch_used_blocks",
        "prefetch_joined_blocks",
        "prefetch_wasted_bytes",
        "prefetch_failed_blocks",
        "prefetch_missed_windows",
        "prefetch_cancelled_requests",
        "lookup_failures",
        "fill_device_errors",
        "fill_refused",
        "fill_corrupt",
        "fill_absent",
        "fill_peer_lost",
        "write_failures",
        "suspect_blocks",
        "dram_corrupt_blocks",
        "dram_evictions",
        "nvme_evictions",
        "serve_blocks_dram",
        "serve_blocks_nvme",
        "serve_blocks_absent",
        "hot_blocks",
        "hot_blocks_given",
        "place_failures",
        "place_keys_nowhere",
        "offer_keys_taken",
        "offer_failures",
        "moved_blocks",
        "incoming_offer_keys_taken",
        "pulled_blocks",
        "pulls_dropped",
        "taken_blocks_stored",
        "writeback_slack_blocks",
        "writeback_decode_blocks",
        "writeback_carried_over_blocks",
        "writeback_no_report_blocks",
        "writeback_fallback_blocks",
        "writeback_idle_blocks",
        "writeback_nothing_fits_blocks",
        "writeback_overdue_blocks",
        "writeback_awaited_blocks",
        "writeback_memory_blocks",
    ]);
    for_seeds(160, |seed| {
        let mut harness = Harness::new(random_setup(seed, FAULTS));
        for _ in 0..1500 {
            step(&mut harness);
        }
        finish_all(&mut harness);
        coverage.add(&harness);
    });
    if has_fixed_seeds() {
        coverage.check();
    }
}

#[test]
fn equal_seeds_produce_equal_runs() {
    let run = || {
        let mut harness = Harness::new(random_setup(3, FAULTS));
        for _ in 0..1000 {
            step(&mut harness);
        }
        (harness.core.counters(), harness.announced)
    };
    assert_eq!(run(), run());
}

#[test]
fn lost_devices_cost_capacity_only() {
    let coverage = Coverage::of(&["devices_lost", "durable_items", "lost_items", "arena_lost_bytes"]);
    for_seeds(80, |seed| {
        let faults = Faults { device_lost: 2, stranded: 1000, ..FAULTS };
        let mut harness = Harness::new(random_setup(seed, faults));
        for _ in 0..1500 {
            step(&mut harness);
        }
        harness.faults.device_lost = 0;
        finish_all(&mut harness);
        let lost = harness.lost_devices.len() as u64;
        assert_eq!(harness.core.counters().devices_lost, lost, "every lost device was noticed");
        coverage.add(&harness);
    });
    if has_fixed_seeds() {
        coverage.check();
    }
}

#[test]
fn detached_and_attached_devices_change_capacity_only() {
    let coverage = Coverage::of(&["durable_items", "lost_items", "device_fills", "fill_device_errors"]);
    for_seeds(24, |seed| {
        let mut setup = random_setup(seed, FAULTS);
        if setup.disks.is_empty() {
            setup.disks.push(16 << 20);
        }
        let devices = setup.disks.len();
        let mut harness = Harness::new(setup);
        for _ in 0..1500 {
            step(&mut harness);
            if harness.rng.chance(20) {
                let device = DeviceId(harness.rng.below(devices) as u8);
                match harness.released.contains(&device) {
                    true => harness.attach(device),
                    false => harness.detach(device),
                }
            }
        }
        finish_all(&mut harness);
        let gone = harness.released.len();
        for device in harness.released.clone() {
            harness.attach(device);
        }
        finish_all(&mut harness);
        assert!(harness.released.is_empty(), "{gone} reattached devices were released again");
        assert_eq!(harness.core.counters().devices_lost, 0, "a detached device is not a lost one");
        coverage.add(&harness);
    });
    if has_fixed_seeds() {
        coverage.check();
    }
}
