//! Decision core of a node agent.
//!
//! ```text
//!  engines ─ Request ─▶ ┌───────────────────────────────┐ ─ Reply, Durable, Progress ─▶ engines
//!  devices ─ DeviceDone, Fill ─▶   AgentCore::apply     │ ─ Device, ReadBlocks ───────▶ devices
//!  peers ── PeerRequest, Fill ─▶   index, arena, loads, │ ─ PeerFetch, Serve… ────────▶ peers
//!  directory ─ Lookup… ─▶ write-back, eviction, serves, │ ─ Lookup, Announce, Place ──▶ directory
//!  peers ─── PeerOffer ─▶  replication                  │ ─ Offer, AnswerOffer ───────▶ peers
//!                       └───────────────────────────────┘
//! ```
//!
//! The core processes one event at a time and needs no locks. Everything that takes time is an effect whose
//! result is an event. The `now` of each call is the current time; [`AgentCore::next_deadline`] returns when
//! to send `Event::Tick`.
//!
//! Invariants, checked by [`AgentCore::audit`]:
//!
//! * A slot of the arena is in one state at a time, and is freed only when no reader, engine, device or
//!   transport uses it.
//! * Bytes in use never exceed the regions.
//! * Every load is answered by its deadline.
//! * A block is in the index exactly if it is in DRAM, being filled, or on a device.
//!
//! Memory of a block, in bytes: index entry 28, hash table 5–11, NVMe eviction order 10, slot record of the
//! pool 32. In DRAM also a frame of 28, 4 in its region, DRAM eviction order 10, and 4 for the checksum of
//! each object.
//!
//! Out of scope: payloads, sockets, clocks, prefetching, a cold tier.

use std::collections::BTreeMap;

use reprise_policy::eviction::EntryIndex;
use reprise_policy::key::HASH_SLOTS;
use reprise_policy::{BlockKey, Layout, SessionId, SlotSet, TenantId, Tick, Tier};

use crate::effect::{Change, Effect, RegionId, ReplicaChange, Reply, ServeId};
use crate::event::{Event, Priority, Request, RequestId};
use crate::pool::{DevicePool, StoredBlock};

mod arena;
mod audit;
mod bandwidth;
mod block_sources;
mod checksums;
mod commits;
mod counters;
mod description;
mod devices;
mod dram_eviction;
mod fills;
mod frames;
mod hot_keys;
mod index;
mod integrity;
pub mod limits;
mod loads;
mod lookups;
mod peers;
mod progress;
mod recency;
mod replication;
mod serves;
mod sessions;
mod settings;
mod size_class;
mod slab;
mod tenants;
mod tickets;
mod timers;
mod usage;
mod writeback;

pub use counters::Counters;
pub use description::{BlockDescription, BlockOrigin, DramCopy};
pub use settings::Settings;
pub use tenants::{TenantBlocks, TenantCounts, TenantQuotas, TenantUsage};
pub use usage::NodeUsage;

use arena::Arena;
use bandwidth::Bandwidth;
use devices::Devices;
use fills::Fill;
use frames::{FrameIndex, Frames};
use hot_keys::HotKeys;
use index::{Dram, Index};
use loads::Load;
use lookups::Lookup;
use peers::Peers;
use replication::{Inbound, Outbound};
use serves::{Serve, ServeShare};
use sessions::{Reservation, ReservationGroup, Session};
use size_class::{SizeClassId, SizeClasses};
use slab::{Slab, SlabId};
use tenants::Tenants;
use tickets::TicketState;
use timers::{Timer, Timers};
use writeback::WriteBack;

/// State machine of a node agent.
#[derive(Debug)]
pub struct AgentCore {
    settings: Settings,
    now: Tick,
    /// Effects of the event that is being applied.
    out: Vec<Effect>,
    /// Replica changes of the event that is being applied.
    changes: Vec<ReplicaChange>,
    size_classes: SizeClasses,
    tenants: Tenants,
    arena: Arena,
    frames: Frames,
    index: Index,
    devices: Devices,
    writeback: WriteBack,
    sessions: BTreeMap<SessionId, Session>,
    reservations: Slab<Reservation>,
    groups: Slab<ReservationGroup>,
    reserved_bytes: u64,
    /// Number of blocks that are readable in DRAM.
    resident_blocks: u64,
    tickets: Slab<TicketState>,
    loads: Slab<Load>,
    lookups: Slab<Lookup>,
    fills: Slab<Fill>,
    /// Frames whose contents are being checked.
    checks: Slab<FrameIndex>,
    /// Number of fetches started.
    fetches: u64,
    peers: Peers,
    serves: BTreeMap<ServeId, Serve>,
    serve_share: ServeShare,
    hot: HotKeys,
    outbound: Outbound,
    inbound: Inbound,
    bandwidth: Bandwidth,
    timers: Timers,
    counters: Counters,
}

impl AgentCore {
    /// Creates a core with these devices, in the order of their ids, and these arena regions with their sizes
    /// in bytes. `pools` includes the blocks that recovery found. Returns effects to execute first, which
    /// make the results of recovery durable.
    ///
    /// Does not announce recovered blocks: the control plane requests the inventory when the node registers.
    pub fn new(
        settings: Settings,
        pools: Vec<(DevicePool, Vec<StoredBlock>)>,
        regions: &[(RegionId, u64)],
    ) -> (AgentCore, Vec<Effect>) {
        let (pools, stored): (Vec<_>, Vec<_>) = pools.into_iter().unzip();
        let mut core = AgentCore {
            now: Tick(0),
            out: Vec::new(),
            changes: Vec::new(),
            size_classes: SizeClasses::default(),
            tenants: Tenants::new(&settings.tenants),
            arena: Arena::new(regions, settings.eviction),
            frames: Frames::default(),
            index: Index::new(),
            devices: Devices::new(pools, settings.eviction),
            writeback: WriteBack::new(),
            sessions: BTreeMap::new(),
            reservations: Slab::new(),
            groups: Slab::new(),
            reserved_bytes: 0,
            resident_blocks: 0,
            tickets: Slab::new(),
            loads: Slab::new(),
            lookups: Slab::new(),
            fills: Slab::new(),
            checks: Slab::new(),
            fetches: 0,
            peers: Peers::default(),
            serves: BTreeMap::new(),
            serve_share: ServeShare::default(),
            hot: HotKeys::new(settings.hot_reads, settings.hot_window),
            outbound: Outbound::new(),
            inbound: Inbound::default(),
            bandwidth: Bandwidth::new(settings.placement_bandwidth),
            timers: Timers::default(),
            counters: Counters::default(),
            settings,
        };
        for (device, blocks) in core.devices.ids().zip(stored) {
            core.adopt_stored(device, blocks);
        }
        core.init_tenants();
        core.start_devices();
        core.keep_pool_free();
        // Replaced, not cleared: every recovered block has made the vector grow.
        core.changes = Vec::new();
        let effects = std::mem::take(&mut core.out);
        (core, effects)
    }

    /// Applies one event at a point in time and appends the resulting effects. Time must not go backwards; an
    /// earlier time counts as the latest one.
    pub fn apply(&mut self, now: Tick, event: Event, effects: &mut Vec<Effect>) {
        self.now = self.now.max(now);
        std::mem::swap(&mut self.out, effects);
        self.dispatch(event);
        self.fire_timers();
        self.begin_serves();
        self.begin_pulls();
        self.replicate();
        // Before the write-back, which shrinking may make urgent.
        self.shrink_tenants();
        self.write_back();
        self.keep_pool_free();
        self.release_devices();
        self.announce_changes();
        std::mem::swap(&mut self.out, effects);
    }

    /// Time at which to send `Event::Tick` if no other event arrives before; `None` if time alone changes
    /// nothing.
    pub fn next_deadline(&self) -> Option<Tick> {
        let placement = [self.outbound.wake(), self.inbound.wake()];
        let others = [self.timers.next(), self.writeback_deadline(), self.tenants.shrink_at()];
        placement.into_iter().chain(others).flatten().min()
    }

    /// Counters, and gauges as of the last event.
    pub fn counters(&self) -> Counters {
        let mut counters = self.counters.clone();
        self.set_gauges(&mut counters);
        self.set_pool_gauges(&mut counters);
        counters
    }

    /// Number of blocks that are not durable yet.
    pub fn unsaved_blocks(&self) -> usize {
        self.writeback.unsaved.len()
    }

    fn dispatch(&mut self, event: Event) {
        match event {
            Event::TenantNamed { tenant, name } => self.name_tenant(tenant, name),
            Event::SessionOpened(opened) => self.open_session(&opened),
            Event::SessionClosed { session } => self.close_session(session),
            Event::Request { session, request, body, received } => {
                self.request((session, request), body, received);
            }
            Event::DeviceDone { device, token, result } => self.device_done(device, token, result),
            Event::DeviceLost { device, reason } => self.device_lost(device, reason),
            Event::DeviceAttached { device, pool } => self.attach_device(device, *pool),
            Event::Recovered { device, blocks } => self.recovered(device, blocks),
            Event::DeviceDetached { device } => self.detach_device(device),
            Event::PoolFree { permille } => self.set_pool_free(permille),
            Event::Fill { fill, update } => self.fill_update(SlabId(fill.0), update),
            Event::LookupAnswered { lookup, found } => self.lookup_answered(SlabId(lookup.0), found),
            Event::LookupFailed { lookup } => self.lookup_failed(SlabId(lookup.0)),
            Event::CheckDone { check, integrity } => self.checked(SlabId(check.0), integrity),
            Event::PeerRequest(request) => self.serve(request),
            Event::ServeDone { serve, block } => self.serve_done(serve, block),
            Event::ServeAborted { serve } => self.serve_aborted(serve),
            Event::InventoryWanted { slots } => self.announce_inventory(slots),
            Event::PlaceAnswered { place, answers } => self.place_answered(SlabId(place.0), &answers),
            Event::PlaceFailed { place } => self.place_failed(SlabId(place.0)),
            Event::OfferAnswered { offer, taken, retry_after } => {
                self.offer_answered(SlabId(offer.0), &taken, retry_after);
            }
            Event::OfferFailed { offer } => self.offer_failed(SlabId(offer.0)),
            Event::PeerOffer(offer) => self.peer_offer(&offer),
            Event::Mode { mode, revision } => self.set_mode(mode, revision),
            Event::Move(directive) => self.set_move(directive),
            Event::Budget(grant) => self.apply_grant(grant),
            Event::Flush => self.expedite_writeback(),
            Event::Tick => {}
        }
    }

    fn request(&mut self, (session, request): (SessionId, RequestId), body: Request, received: Tick) {
        if !self.sessions.contains_key(&session) {
            let message =
                "no session: the agent has reached its maximum number of sessions, tenants or layouts";
            let retry_after = self.settings.load_deadline_default;
            let reply = Reply::Busy { message: message.to_owned(), retry_after };
            return self.reply(session, request, reply);
        }
        match body {
            Request::Reserve { count } => self.reserve(session, request, count),
            Request::Commit(commit) => self.commit(session, request, &commit),
            Request::Abort { leases } => self.abort(session, request, &leases),
            Request::Match { keys, scope } => self.match_keys(session, request, keys, scope),
            Request::Load(wanted) => self.load(session, request, wanted, received),
            Request::Release { load } => self.release(session, request, load),
            Request::Suspect { load, blocks } => self.suspect(session, request, load, &blocks),
            Request::Trim => {
                let blocks = self.trim();
                self.reply(session, request, Reply::Trimmed { blocks });
            }
            Request::Stats => {
                let size_class = self.sessions.get(&session).map(|session| session.size_class);
                let own =
                    size_class.map(|size_class| self.tenants.usage(self.tenant_of(size_class)).fields());
                let stats = self.counters().fields().chain(own.into_iter().flatten()).collect();
                self.reply(session, request, Reply::Stats(stats));
            }
        }
    }

    fn fire_timers(&mut self) {
        while let Some(timer) = self.timers.pop_due(self.now) {
            match timer {
                Timer::Load(load) => self.expire_load(load),
                Timer::Lookup(lookup) => self.lookup_failed(lookup),
                Timer::Serve(serve) => self.expire_serve(serve),
                Timer::Reservations(group) => self.expire_reservations(group),
                Timer::Place(ask) => self.place_failed(ask),
                Timer::Offer(offer) => self.offer_failed(offer),
            }
        }
    }

    fn emit(&mut self, effect: Effect) {
        self.out.push(effect);
    }

    /// Returns the number of a tenant's layout, or `None` if a table is full.
    fn intern(&mut self, tenant: TenantId, layout: Layout) -> Option<SizeClassId> {
        let index = self.tenants.register(tenant)?;
        self.size_classes.intern((tenant, index), layout, &mut self.arena)
    }

    /// Adds a block to the index; the caller sets its location.
    fn insert_entry(
        &mut self,
        key: BlockKey,
        size_class: SizeClassId,
        priority: Priority,
        origin: BlockOrigin,
    ) -> EntryIndex {
        self.size_classes.hold(size_class);
        self.index.insert(key, size_class, priority, origin)
    }

    /// Records a change of a replica for the directory.
    fn replica_changed(&mut self, entry: EntryIndex, tier: Tier, change: Change) {
        let key = self.index.entry(entry).key();
        self.changes.push(ReplicaChange { key, tier, change });
    }

    fn announce_changes(&mut self) {
        if !self.changes.is_empty() {
            self.counters.announced_changes += self.changes.len() as u64;
            let changes = std::mem::take(&mut self.changes);
            self.emit(Effect::Announce { changes });
        }
    }

    /// Announces the inventory of some hash slots.
    fn announce_inventory(&mut self, slots: Box<SlotSet>) {
        self.announce_changes();
        let blocks = (self.resident_blocks + self.index.stored_blocks()) as usize;
        let mut replicas = Vec::with_capacity(blocks * slots.len() / usize::from(HASH_SLOTS));
        for (_, entry) in self.index.iter().filter(|(_, entry)| slots.has_key(&entry.key())) {
            if matches!(entry.dram(), Dram::Resident(_)) {
                replicas.push((entry.key(), Tier::Dram));
            }
            if entry.stored().is_some() {
                replicas.push((entry.key(), Tier::Nvme));
            }
        }
        self.emit(Effect::Inventory { slots, replicas });
    }

    fn set_gauges(&self, counters: &mut Counters) {
        counters.sessions = self.sessions.len() as u64;
        counters.loads_held = self.loads.len() as u64;
        counters.fills_in_flight = self.fills.len() as u64;
        counters.serves_in_flight = self.serves.len() as u64;
        let drain = self.outbound.progress();
        counters.node_mode = self.outbound.mode() as u64;
        counters.drain_walked_blocks = drain.walked_blocks;
        counters.drain_nowhere_blocks = drain.nowhere_blocks;
        counters.given_bytes = drain.moved_bytes;
        counters.drained = u64::from(drain.drained && self.writeback.unsaved.len() == 0);
        counters.pulls_waiting = self.inbound.waiting() as u64;
        counters.pulls_in_flight_bytes = self.inbound.in_flight_bytes();
        counters.arena_bytes = self.arena.bytes();
        counters.arena_used_bytes = self.arena.used_bytes();
        counters.arena_free_bytes = self.arena.bytes() - self.arena.used_bytes();
        counters.reserved_bytes = self.reserved_bytes;
        counters.unsaved_bytes = self.writeback.unsaved_bytes();
        counters.unsaved_blocks = self.writeback.unsaved.len() as u64;
        counters.read_leases = self.frames.read_leases();
        counters.dram_blocks = self.resident_blocks;
        counters.nvme_blocks = self.index.stored_blocks();
    }
}

/// Priority of an eviction class that was read from a journal.
fn priority_of_class(class: u8) -> Priority {
    match class {
        0 => Priority::Low,
        1 => Priority::Normal,
        _ => Priority::High,
    }
}
