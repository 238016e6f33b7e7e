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

use reprise_policy::{BlockKey, DrainProgress, NodeMode, SessionId, SlotSet, Tick};

use crate::agent::fills::Fill;
use crate::agent::inbound::Inbound;
use crate::agent::loads::Load;
use crate::agent::lookups::Lookup;
use crate::agent::peers::Peers;
use crate::agent::serves::{Serve, ServeShare};
use crate::agent::sessions::{Reservation, ReservationGroup, Session};
use crate::agent::tickets::TicketState;
use crate::agent::writeback::WriteBack;
use crate::cache::{Cache, CacheOutcomes, DoneBatch};
use crate::effect::{DeviceId, Effect, RegionId, Reply, ServeId};
use crate::event::{Event, Request, RequestId};
use crate::extents::{Extents, Requester};
use crate::pool::{DevicePool, PoolUsage, StoredBlock};
use crate::quota::Quotas;
use crate::replicate::Replicate;
use crate::slab::{Slab, SlabId};
use crate::timers::Timers;

/// Context of the current event of a core.
macro_rules! context {
    ($core:expr) => {
        &mut crate::context::Context { now: $core.now, effects: &mut $core.out }
    };
}

mod audit;
mod block_sources;
mod commits;
mod fills;
mod inbound;
mod loads;
mod lookups;
mod peers;
mod progress;
mod serves;
mod sessions;
mod tickets;
mod writeback;

pub use crate::cache::{
    BlockDescription, BlockOrigin, DramCopy, TenantBlocks, TenantCounts, TenantQuotas, TenantUsage,
};
pub use crate::counters::Counters;
pub use crate::limits;
pub use crate::settings::Settings;
pub use crate::usage::NodeUsage;

/// Object whose deadline has passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// A load reached its deadline or its maximum hold time.
    Load(SlabId),
    /// The directory did not answer a lookup.
    Lookup(SlabId),
    /// The peer has given up its request.
    Serve(ServeId),
    /// The slots of one `Reserve` call were not committed.
    Reservations(SlabId),
}

/// State machine of a node agent.
#[derive(Debug)]
pub struct AgentCore {
    settings: Settings,
    now: Tick,
    /// Effects of the event that is being applied.
    out: Vec<Effect>,
    cache: Cache,
    quota: Quotas,
    writeback: WriteBack,
    sessions: BTreeMap<SessionId, Session>,
    reservations: Slab<Reservation>,
    groups: Slab<ReservationGroup>,
    reserved_bytes: u64,
    tickets: Slab<TicketState>,
    loads: Slab<Load>,
    lookups: Slab<Lookup>,
    fills: Slab<Fill>,
    /// Number of fetches started.
    fetches: u64,
    peers: Peers,
    serves: BTreeMap<ServeId, Serve>,
    serve_share: ServeShare,
    replicate: Replicate,
    inbound: Inbound,
    extents: Extents,
    timers: Timers<Timer>,
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
            cache: Cache::new(&settings, pools, regions),
            quota: Quotas::default(),
            writeback: WriteBack::new(),
            sessions: BTreeMap::new(),
            reservations: Slab::new(),
            groups: Slab::new(),
            reserved_bytes: 0,
            tickets: Slab::new(),
            loads: Slab::new(),
            lookups: Slab::new(),
            fills: Slab::new(),
            fetches: 0,
            peers: Peers::default(),
            serves: BTreeMap::new(),
            serve_share: ServeShare::default(),
            replicate: Replicate::new(&settings),
            inbound: Inbound::default(),
            extents: Extents::new(&settings),
            timers: Timers::default(),
            counters: Counters::default(),
            settings,
        };
        for (device, blocks) in core.cache.device_ids().zip(stored) {
            core.cache.adopt_stored(device, blocks);
        }
        core.quota.start(&mut core.cache, context!(core));
        core.cache.start_devices(context!(core));
        core.cache.keep_pool_free(context!(core));
        core.cache.forget_recovery();
        let effects = std::mem::take(&mut core.out);
        (core, effects)
    }

    /// Applies one event at a point in time and appends the resulting effects. Time must not go backwards; an
    /// earlier time counts as the latest one.
    pub fn apply(&mut self, now: Tick, event: Event, effects: &mut Vec<Effect>) {
        self.now = self.now.max(now);
        std::mem::swap(&mut self.out, effects);
        self.dispatch(event);
        self.route();
        self.fire_timers();
        self.begin_serves();
        self.begin_pulls();
        self.replicate.advance(&self.cache, context!(self));
        // Before the write-back, which shrinking may make urgent.
        self.quota.shrink(&mut self.cache, context!(self));
        self.route();
        self.write_back();
        self.cache.keep_pool_free(context!(self));
        self.cache.release_devices(context!(self));
        self.cache.announce(context!(self));
        std::mem::swap(&mut self.out, effects);
    }

    /// Passes the consequences of the cache to their receivers.
    fn route(&mut self) {
        while let Some(outcomes) = self.cache.take_outcomes() {
            let CacheOutcomes { arena_full, capacity_changed, recovered, stored, batches } = outcomes;
            if arena_full {
                self.expedite_writeback();
            }
            for DoneBatch { batch, stored } in batches {
                match Extents::owns(batch) {
                    true => self.extents.batch_done(&mut self.cache, context!(self), batch, &stored),
                    false => self.batch_done(batch, &stored),
                }
            }
            if stored > 0 {
                self.replicate.note_saved(self.now, stored);
            }
            if recovered {
                self.quota.recheck(&self.cache);
            }
            if capacity_changed {
                self.quota.update(&mut self.cache, context!(self));
            }
        }
    }

    /// Time at which to send `Event::Tick` if no other event arrives before; `None` if time alone changes
    /// nothing.
    pub fn next_deadline(&self) -> Option<Tick> {
        let placement = [self.replicate.next_deadline(), self.inbound.wake()];
        let others = [self.timers.next(), self.writeback_deadline(), self.quota.next_deadline()];
        placement.into_iter().chain(others).flatten().min()
    }

    /// Counters, and gauges as of the last event.
    pub fn counters(&self) -> Counters {
        let mut counters = self.counters.clone();
        self.set_gauges(&mut counters);
        self.cache.set_counters(&mut counters);
        self.replicate.set_counters(&mut counters);
        self.extents.set_counters(&self.cache, &mut counters);
        counters
    }

    /// Number of blocks that are not durable yet.
    pub fn unsaved_blocks(&self) -> usize {
        self.writeback.unsaved.len()
    }

    fn dispatch(&mut self, event: Event) {
        match event {
            Event::TenantNamed { tenant, name } => self.cache.name_tenant(tenant, name),
            Event::SessionOpened(opened) => self.open_session(&opened),
            Event::SessionClosed { session } => self.close_session(session),
            Event::Request { session, request, body, received } => {
                self.request((session, request), body, received);
            }
            Event::DeviceDone { device, token, result } => {
                self.cache.device_done(context!(self), device, token, result);
            }
            Event::DeviceLost { device, reason } => self.cache.device_lost(context!(self), device, reason),
            Event::DeviceAttached { device, pool } => self.cache.attach_device(context!(self), device, *pool),
            Event::Recovered { device, blocks } => self.cache.recovered(device, blocks),
            Event::DeviceDetached { device } => self.cache.detach_device(device),
            Event::ExtentsReleased { holder } => self.extents.released(&mut self.cache, holder),
            Event::PoolFree { permille } => self.cache.set_pool_free(permille),
            Event::Fill { fill, update } => self.fill_update(SlabId(fill.0), update),
            Event::LookupAnswered { lookup, found } => self.lookup_answered(SlabId(lookup.0), found),
            Event::LookupFailed { lookup } => self.lookup_failed(SlabId(lookup.0)),
            Event::CheckDone { check, integrity } => {
                self.cache.checked(context!(self), SlabId(check.0), integrity);
            }
            Event::PeerRequest(request) => self.serve(request),
            Event::ServeDone { serve, block } => self.serve_done(serve, block),
            Event::ServeAborted { serve } => self.serve_aborted(serve),
            Event::InventoryWanted { slots } => self.announce_inventory(slots),
            Event::PlaceAnswered { place, answers } => {
                self.replicate.place_answered(&mut self.cache, context!(self), SlabId(place.0), &answers);
            }
            Event::PlaceFailed { place } => {
                self.replicate.place_failed(&mut self.cache, context!(self), SlabId(place.0));
            }
            Event::OfferAnswered { offer, taken, retry_after } => {
                self.replicate.offer_answered(self.now, SlabId(offer.0), &taken, retry_after);
            }
            Event::OfferFailed { offer } => self.replicate.offer_failed(self.now, SlabId(offer.0)),
            Event::PeerOffer(offer) => self.peer_offer(&offer),
            Event::Mode { mode, revision } => self.replicate.set_mode(self.now, mode, revision),
            Event::Move(directive) => self.replicate.set_move(&self.cache, self.now, directive),
            Event::Budget(grant) => self.quota.apply(&mut self.cache, context!(self), grant),
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
            Request::Extents(body) => {
                let size_class = self.sessions[&session].size_class;
                let from = Requester { session, request, size_class };
                self.extents.request(&mut self.cache, context!(self), from, body);
            }
            Request::Trim => {
                let blocks = self.cache.trim();
                self.reply(session, request, Reply::Trimmed { blocks });
            }
            Request::Stats => {
                let size_class = self.sessions.get(&session).map(|session| session.size_class);
                let own = size_class
                    .map(|size_class| self.cache.tenant_usage(self.cache.tenant_of(size_class)).fields());
                let stats = self.counters().fields().chain(own.into_iter().flatten()).collect();
                self.reply(session, request, Reply::Stats(stats));
            }
        }
    }

    fn fire_timers(&mut self) {
        loop {
            let due = |at: Option<Tick>| at.filter(|at| *at <= self.now);
            let (own, of_replicate) = (due(self.timers.next()), due(self.replicate.first_due()));
            let Some(first) = own.into_iter().chain(of_replicate).min() else { return };
            if own != Some(first) {
                self.replicate.fire_timer(&mut self.cache, context!(self));
                self.route();
                continue;
            }
            let Some(timer) = self.timers.pop_due(self.now) else { return };
            match timer {
                Timer::Load(load) => self.expire_load(load),
                Timer::Lookup(lookup) => self.lookup_failed(lookup),
                Timer::Serve(serve) => self.expire_serve(serve),
                Timer::Reservations(group) => self.expire_reservations(group),
            }
            self.route();
        }
    }

    fn emit(&mut self, effect: Effect) {
        self.out.push(effect);
    }

    /// Announces the inventory of some hash slots.
    fn announce_inventory(&mut self, slots: Box<SlotSet>) {
        self.cache.announce(context!(self));
        let replicas = self.cache.inventory(&slots);
        self.emit(Effect::Inventory { slots, replicas });
    }

    /// Usage of each usable device.
    pub fn device_usage(&self) -> impl Iterator<Item = (DeviceId, PoolUsage)> {
        self.cache.device_usage()
    }

    /// Usage and quotas of each tenant as of the last event: configured tenants first, then others in order
    /// of appearance.
    pub fn tenant_usage(&self) -> impl Iterator<Item = TenantUsage> {
        self.quota.usage(&self.cache)
    }

    /// Progress of draining this node; otherwise, the bytes that other nodes have accepted.
    pub fn drain_progress(&self) -> DrainProgress {
        let progress = self.replicate.progress();
        let drained = progress.drained && self.writeback.unsaved.len() == 0;
        DrainProgress { drained, durable_blocks: self.cache.index.stored_blocks(), ..progress }
    }

    /// Mode of this node.
    pub fn mode(&self) -> NodeMode {
        self.replicate.mode()
    }

    /// Describes a block; `None` if it is neither on this node nor being filled.
    pub fn describe(&self, key: &BlockKey) -> Option<BlockDescription> {
        self.cache.describe(key)
    }

    /// Capacity and load of this node.
    pub fn node_usage(&self) -> NodeUsage {
        let (dram_capacity, dram_used, pools) = self.cache.usage();
        NodeUsage {
            dram_capacity,
            dram_used,
            nvme_capacity: pools.capacity_bytes,
            nvme_used: pools.slot_bytes_used,
            queued_bytes: self.serves.values().map(Serve::open_bytes).sum(),
        }
    }

    fn set_gauges(&self, counters: &mut Counters) {
        counters.sessions = self.sessions.len() as u64;
        counters.loads_held = self.loads.len() as u64;
        counters.fills_in_flight = self.fills.len() as u64;
        counters.serves_in_flight = self.serves.len() as u64;
        let drain = self.replicate.progress();
        counters.drained = u64::from(drain.drained && self.writeback.unsaved.len() == 0);
        counters.pulls_waiting = self.inbound.waiting() as u64;
        counters.pulls_in_flight_bytes = self.inbound.in_flight_bytes();
        counters.reserved_bytes = self.reserved_bytes;
        counters.unsaved_bytes = self.writeback.unsaved_bytes();
        counters.unsaved_blocks = self.writeback.unsaved.len() as u64;
    }
}
