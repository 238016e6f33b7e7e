//! Random runs: whatever happens in whatever order, the invariants hold, everything asked for is answered, and when
//! everything has come to its end nothing is left over.

use std::time::Duration;

use reprise_agent_core::agent::{Settings, TenantQuotas};
use reprise_agent_core::effect::DeviceId;
use reprise_agent_core::event::{Event, Grant, Move, Priority, Request, Scope};
use reprise_policy::{BlockKey, NodeId, NodeMode, Quota, SessionId, SlotSet, TenantId, Tier};

use crate::described;
use crate::engine::Asked;
use crate::rng::{Rng, for_seeds, seed_wanted};
use crate::world::{Faults, SMALL_KEYS_FROM, Setup, World, key, large_layout, layout_of, small_layout};

/// Keys of each tenant and layout.
pub(crate) const KEYS: u64 = 48;

/// The default one, and two with quotas.
pub(crate) const TENANTS: u16 = 3;

/// Between the first keys of two tenants.
const TENANT_STRIDE: u64 = 100;

const FAULTS: Faults = Faults {
    write_media: 20,
    read: 15,
    refused: 15,
    fetch: 60,
    lookup: 80,
    place: 150,
    check: 500,
    directory_lies: 60,
    device_lost: 0,
    stranded: 0,
};

/// A world whose size and speed depend on the seed.
pub(crate) fn random_setup(seed: u64, faults: Faults) -> Setup {
    let mut rng = Rng::new(seed ^ 0xabcd);
    let slot = large_layout().slot_bytes();
    let disks = [vec![], vec![8 << 20], vec![8 << 20, 8 << 20]];
    Setup {
        seed,
        regions: 2 + rng.below(4) as u16,
        region_bytes: 4 * slot,
        disks: disks[if seed.is_multiple_of(8) { 0 } else { 1 + rng.below(2) }].clone(),
        settings: Settings {
            writeback_bytes: slot * (1 + rng.below(6) as u64),
            arena_unsaved_permille: [500, 1000][rng.below(2)],
            arena_serves_permille: [100, 1000][rng.below(2)],
            pool_free_permille: [30, 600][rng.below(2)],
            placement_bandwidth: [0, 1 << 20, 256 << 20, 256 << 20][rng.below(4)],
            hot_reads: 2,
            tenants: (1..TENANTS).map(|tenant| random_quotas(&mut rng, TenantId(tenant))).collect(),
            ..Setup::default().settings
        },
        faults,
    }
}

/// Up to a region and a dozen blocks of a device are reserved; limits from nearly nothing to more than there is.
fn random_quotas(rng: &mut Rng, tenant: TenantId) -> TenantQuotas {
    let slot = large_layout().slot_bytes();
    let mut quota = |reserved: u64, more: u64| {
        let reserved = slot * rng.below(reserved as usize) as u64;
        Quota::new(reserved, reserved + slot * (2 + rng.below(more as usize) as u64)).expect("more is more")
    };
    TenantQuotas { tenant, dram: quota(4, 12), nvme: quota(12, 60) }
}

/// Some keys of a tenant: a run of a chain, now and then one of them twice or one of the other layout.
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
        // Another tenant's.
        keys.push(key((base + start + TENANT_STRIDE) % SMALL_KEYS_FROM));
    }
    keys
}

/// One thing happens.
pub(crate) fn step(world: &mut World) {
    match world.rng.below(100) {
        0..30 => advance_some_job(world),
        30..82 => engine_acts(world),
        82..91 => peer_acts(world),
        91..98 => {
            let time = Duration::from_micros(world.rng.below(8000) as u64);
            world.pass(time);
        }
        98 => world.apply(Event::Tick),
        _ => world_changes(world),
    }
    world.read_all();
}

fn advance_some_job(world: &mut World) {
    for _ in 0..1 + world.rng.below(6) {
        if !world.jobs.is_empty() {
            let job = world.rng.below(world.jobs.len());
            world.advance(job);
        }
    }
}

fn engine_acts(world: &mut World) {
    let sessions: Vec<SessionId> = world.engines.keys().copied().collect();
    if sessions.len() < 2 || (sessions.len() < 5 && world.rng.chance(20)) {
        let layout = if world.rng.chance(400) { small_layout() } else { large_layout() };
        let tenant = some_tenant(&mut world.rng);
        world.open_session(tenant, layout);
        return;
    }
    let session = sessions[world.rng.below(sessions.len())];
    let (tenant, small) = {
        let engine = &world.engines[&session];
        (engine.tenant, engine.layout == small_layout())
    };
    let keys = some_keys(&mut world.rng, tenant, small);
    match world.rng.below(100) {
        0..25 => {
            let count = world.rng.below(5) as u32;
            world.reserve(session, count);
        }
        25..45 => {
            let priority = [Priority::Low, Priority::Normal, Priority::High][world.rng.below(3)];
            let layout = world.engines[&session].layout;
            let keys: Vec<_> = keys.into_iter().filter(|key| layout_of(key) == layout).collect();
            world.commit(session, &keys, priority);
        }
        45..50 => abort_some(world, session),
        50..62 => {
            let scope = scope(&mut world.rng);
            world.match_keys(session, &keys, scope);
        }
        62..80 => {
            let scope = scope(&mut world.rng);
            let deadline = Duration::from_micros(world.rng.below(30_000) as u64);
            world.load(session, &keys, deadline, scope);
        }
        80..94 => release_some(world, session),
        94..97 => suspect_some(world, session),
        97 => {
            world.request(session, Asked::Other, Request::Trim);
        }
        98 => {
            world.request(session, Asked::Other, Request::Stats);
        }
        _ => world.close_session(session),
    }
}

fn some_tenant(rng: &mut Rng) -> TenantId {
    TenantId(rng.below(usize::from(TENANTS)) as u16)
}

fn scope(rng: &mut Rng) -> Scope {
    if rng.chance(700) { Scope::Cluster } else { Scope::Local }
}

fn abort_some(world: &mut World, session: SessionId) {
    let engine = world.engines.get_mut(&session).expect("open");
    let count = engine.reserved.len().min(2);
    let leases = engine.reserved.drain(..count).map(|(lease, _)| lease).collect();
    world.request(session, Asked::Other, Request::Abort { leases });
}

fn release_some(world: &mut World, session: SessionId) {
    let loads: Vec<_> = world.engines[&session].loads.keys().copied().collect();
    for load in loads {
        if world.rng.chance(600) {
            world.release(session, load);
        }
    }
}

fn suspect_some(world: &mut World, session: SessionId) {
    let loads: Vec<_> =
        world.engines[&session].loads.iter().map(|(id, load)| (*id, load.keys.len())).collect();
    for (load, blocks) in loads {
        let block = world.rng.below(blocks + 1) as u32;
        world.suspect(session, load, vec![block, 0, block]);
    }
}

fn peer_acts(world: &mut World) {
    let serves: Vec<_> = world.serves.keys().copied().collect();
    if serves.len() < 3 && world.rng.chance(400) {
        let small = world.rng.chance(400);
        let tenant = some_tenant(&mut world.rng);
        let keys = some_keys(&mut world.rng, tenant, small);
        let layout = if small { small_layout() } else { large_layout() };
        let deadline = Duration::from_micros(world.rng.below(30_000) as u64);
        world.peer_request(&keys, layout, deadline);
        return;
    }
    for serve in serves {
        if world.rng.chance(30) {
            world.abort_serve(serve);
            continue;
        }
        for _ in 0..6 {
            let Some(state) = world.serves.get(&serve) else { break };
            let block = world.rng.below(state.blocks.len()) as u32;
            world.send(serve, block);
        }
    }
}

/// Of fewer than so many slots, with a reservation now and then.
fn some_quota(rng: &mut Rng, slot: u64, slots: usize) -> Quota {
    let limit = rng.below(slots);
    let reserved = if rng.below(4) == 0 { rng.below(limit + 1) } else { 0 };
    Quota::new(slot * reserved as u64, slot * limit as u64).expect("not above the limit")
}

fn world_changes(world: &mut World) {
    match world.rng.below(12) {
        6 | 7 => {
            let mode = [NodeMode::Active, NodeMode::Active, NodeMode::Cordoned, NodeMode::Draining];
            let (mode, revision) = (mode[world.rng.below(4)], world.rng.below(60) as u64);
            world.apply(Event::Mode { mode, revision });
        }
        8 => {
            let to = NodeId(1 + world.rng.below(3) as u16);
            let bytes = large_layout().slot_bytes() * world.rng.below(30) as u64;
            let order = world.rng.chance(800).then_some(Move { to, bytes });
            world.apply(Event::Move(order));
        }
        9..12 => {
            let small = world.rng.chance(400);
            let node = NodeId(1 + world.rng.below(3) as u16);
            let tenant = some_tenant(&mut world.rng);
            let keys = some_keys(&mut world.rng, tenant, small);
            let layout = if small { small_layout() } else { large_layout() };
            for key in keys.iter().filter(|key| layout_of(key) == layout) {
                if world.rng.chance(800) {
                    world.give_peer(node, *key, Tier::Nvme);
                }
            }
            world.peer_offer(node, tenant, layout, &keys);
        }
        4 | 5 => {
            let slot = large_layout().slot_bytes();
            let (tenant, version) = (some_tenant(&mut world.rng), world.rng.below(40) as u64);
            let dram = some_quota(&mut world.rng, slot, 20);
            let nvme = some_quota(&mut world.rng, slot, 80);
            world.apply(Event::Budget(Grant { tenant, version, dram, nvme }));
        }
        0 => {
            let before = world.announced.clone();
            world.apply(Event::InventoryWanted { slots: Box::new(SlotSet::ALL) });
            assert_eq!(world.announced, before, "the whole inventory is the sum of the changes");
        }
        1 | 2 => {
            let small = world.rng.chance(400);
            let node = NodeId(1 + world.rng.below(3) as u16);
            let tier = [Tier::Dram, Tier::Nvme][world.rng.below(2)];
            let tenant = some_tenant(&mut world.rng);
            for key in some_keys(&mut world.rng, tenant, small) {
                world.give_peer(node, key, tier);
            }
        }
        _ => {
            let node = NodeId(1 + world.rng.below(3) as u16);
            world.peers.held.remove(&node);
        }
    }
}

/// Everything comes to its end, and nothing is left.
pub(crate) fn settle(world: &mut World) {
    world.apply(Event::Mode { mode: NodeMode::Active, revision: u64::MAX });
    world.apply(Event::Move(None));
    world.finish_jobs();
    for serve in world.serves.keys().copied().collect::<Vec<_>>() {
        world.abort_serve(serve);
    }
    for _ in 0..4 {
        world.pass(Duration::from_secs(2));
        world.finish_jobs();
    }
    for engine in world.engines.values() {
        assert!(engine.asked.is_empty(), "unanswered: {:?}", engine.asked);
        assert!(engine.tickets.is_empty(), "without a notice: {:?}", engine.tickets);
        assert!(engine.loads.keys().all(|load| engine.progress(*load).done), "a load without an end");
    }
    for session in world.engines.keys().copied().collect::<Vec<_>>() {
        world.close_session(session);
    }
    // A pull may begin with the room that the last session has left; what it brings is written then.
    for _ in 0..2 {
        world.pass(Duration::from_secs(2));
        world.finish_jobs();
    }
    let counters = world.core.counters();
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
        assert_eq!(count, 0, "{what} are left");
    }
    assert_eq!(world.core.next_deadline(), None, "nothing is left to wait for");
    check_space(world);
    described::check(world, world.announced.iter().map(|(key, _)| *key));
}

/// The bytes in use are those of the blocks that were announced, on every tier, and of slots that lost devices kept.
fn check_space(world: &World) {
    let slot_bytes = |key: &BlockKey| layout_of(key).slot_bytes();
    let bytes = |tier: Tier, header: u64| -> u64 {
        let of_tier = world.announced.iter().filter(|(_, other)| *other == tier);
        of_tier.map(|(key, _)| slot_bytes(key) + header).sum()
    };
    let counters = world.core.counters();
    let dram_bytes = bytes(Tier::Dram, 0) + counters.arena_lost_bytes;
    assert_eq!(counters.arena_used_bytes, dram_bytes, "slots of the arena leak");
    assert_eq!(counters.pool_used_bytes, bytes(Tier::Nvme, 4096), "slots of the pool leak");
}

/// Panics unless the runs have reached what they are there to reach.
struct Coverage {
    names: Vec<&'static str>,
    sums: std::cell::RefCell<Vec<u64>>,
}

impl Coverage {
    fn of(names: &[&'static str]) -> Coverage {
        Coverage { names: names.to_vec(), sums: vec![0; names.len()].into() }
    }

    fn add(&self, world: &World) {
        let mut sums = self.sums.borrow_mut();
        for (name, value) in world.core.counters().fields() {
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
fn whatever_happens_nothing_leaks_nothing_hangs_and_nobody_reads_wrong_bytes() {
    let coverage = Coverage::of(&[
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
    ]);
    for_seeds(80, |seed| {
        let mut world = World::new(random_setup(seed, FAULTS));
        for _ in 0..1500 {
            step(&mut world);
        }
        settle(&mut world);
        coverage.add(&world);
    });
    if seed_wanted().is_none() {
        coverage.check();
    }
}

#[test]
fn the_same_seed_gives_the_same_run() {
    let run = || {
        let mut world = World::new(random_setup(3, FAULTS));
        for _ in 0..1000 {
            step(&mut world);
        }
        (world.core.counters().clone(), world.announced)
    };
    assert_eq!(run(), run());
}

#[test]
fn lost_devices_are_lost_capacity_and_nothing_else() {
    let coverage = Coverage::of(&["devices_lost", "durable_items", "lost_items", "arena_lost_bytes"]);
    for_seeds(24, |seed| {
        let faults = Faults { device_lost: 2, stranded: 1000, ..FAULTS };
        let mut world = World::new(random_setup(seed, faults));
        for _ in 0..1500 {
            step(&mut world);
        }
        world.faults.device_lost = 0;
        settle(&mut world);
        let lost = world.lost_devices.len() as u64;
        assert_eq!(world.core.counters().devices_lost, lost, "every lost device was noticed");
        coverage.add(&world);
    });
    if seed_wanted().is_none() {
        coverage.check();
    }
}

#[test]
fn devices_that_come_and_go_are_capacity_that_comes_and_goes() {
    let coverage = Coverage::of(&["durable_items", "lost_items", "device_fills", "fill_device_errors"]);
    for_seeds(24, |seed| {
        let mut setup = random_setup(seed, FAULTS);
        if setup.disks.is_empty() {
            setup.disks.push(16 << 20);
        }
        let devices = setup.disks.len();
        let mut world = World::new(setup);
        for _ in 0..1500 {
            step(&mut world);
            if world.rng.chance(20) {
                let device = DeviceId(world.rng.below(devices) as u8);
                match world.released.contains(&device) {
                    true => world.attach(device),
                    false => world.detach(device),
                }
            }
        }
        settle(&mut world);
        let gone = world.released.len();
        for device in world.released.clone() {
            world.attach(device);
        }
        settle(&mut world);
        assert!(world.released.is_empty(), "{gone} devices came back");
        assert_eq!(world.core.counters().devices_lost, 0, "closed is not lost");
        coverage.add(&world);
    });
    if seed_wanted().is_none() {
        coverage.check();
    }
}
