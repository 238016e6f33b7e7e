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
//! Twelve owners hold the state: cache, transfer, load, save, serve, extents, replicate, prefetch, begun, retention,
//! erasures and quota. The core passes each event to one of them, and the outcomes of an owner to other owners, until no outcome is left. Owners do not
//! know each other; all of them may use the cache.
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
//! Memory of a block, in bytes: index entry 28, hash table 5–11, NVMe eviction order 25, slot record of the
//! pool 32. In DRAM also a frame of 28, 4 in its region, DRAM eviction order 25, and 4 for the checksum of
//! each object.
//!
//! Out of scope: payloads, sockets, clocks, a cold tier.

use std::collections::BTreeMap;

use reprise_policy::{SessionId, SlotSet, Tick};

use crate::begun::Begun;
use crate::cache::{Cache, CacheOutcomes, DoneBatch, EvictionPosition, SizeClassId, TenantUsage};
use crate::context::Caller;
use crate::effect::{Effect, FillId, PlaceKind, RegionId, Reply};
use crate::erasures::Erasures;
use crate::event::{Event, FillUpdate, PeerEvent, Request, RequestId, SessionOpened};
use crate::extents::Extents;
use crate::limits::SESSIONS_MAX;
use crate::load::{LoadOutcome, Loads, MatchRequest};
use crate::namespaces::Namespaces;
use crate::pool::{DevicePool, StoredBlock};
use crate::prefetch::{Prefetch, PrefetchOutcome};
use crate::quota::Quotas;
use crate::replicate::{PullStep, Replicate, ReplicateOutcome};
use crate::retention::Retention;
use crate::save::Save;
use crate::serve::{ServeOutcome, Serves};
use crate::settings::Settings;
use crate::slab::SlabId;
use crate::transfer::{Transfer, TransferOutcome};
use crate::waiter::WaiterOwner;

/// Context of the current event of a core.
macro_rules! context {
    ($core:expr) => {
        &mut crate::context::Context { now: $core.now, settings: &$core.settings, effects: &mut $core.out }
    };
}

mod erase;
mod manage;
mod queries;

/// State machine of a node agent.
#[derive(Debug)]
pub struct AgentCore {
    settings: Settings,
    now: Tick,
    /// Effects of the event that is being applied.
    out: Vec<Effect>,
    /// Open sessions, with the size classes of their blocks.
    sessions: BTreeMap<SessionId, SizeClassId>,
    cache: Cache,
    quota: Quotas,
    transfer: Transfer,
    load: Loads,
    save: Save,
    serve: Serves,
    extents: Extents,
    replicate: Replicate,
    prefetch: Prefetch,
    begun: Begun,
    retention: Retention,
    erasures: Erasures,
    namespaces: Namespaces,
}

/// Owner of the timer that is due first; of equal times, in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum TimerOwner {
    Load,
    Serve,
    Save,
    Replicate,
    Prefetch,
    Begun,
    Retention,
    Erasure,
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
        let cache = Cache::new(&settings, pools, regions);
        let weights = cache.weights(&settings.bandwidth);
        let mut core = AgentCore {
            now: Tick(0),
            out: Vec::new(),
            sessions: BTreeMap::new(),
            cache,
            quota: Quotas::default(),
            transfer: Transfer::new(),
            load: Loads::new(),
            save: Save::new(weights),
            serve: Serves::new(&settings),
            extents: Extents::new(&settings),
            replicate: Replicate::new(&settings),
            prefetch: Prefetch::default(),
            begun: Begun::default(),
            retention: Retention::default(),
            erasures: Erasures::default(),
            namespaces: Namespaces::default(),
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
        self.cache.set_now(self.now);
        std::mem::swap(&mut self.out, effects);
        self.dispatch(event);
        self.route();
        self.fire_timers();
        while self.serve.begin_next(&mut self.cache, context!(self)) {
            self.route();
        }
        self.begin_pulls();
        self.replicate.advance(&self.cache, context!(self));
        // Before the regions are drained: blocks that are saved remain until they are durable.
        self.route();
        self.cache.drain_regions(context!(self));
        // Before the write-back, which shrinking may make urgent.
        self.quota.shrink(&mut self.cache, context!(self));
        self.route();
        self.save.write_back(&mut self.cache, context!(self), self.transfer.device_reads());
        self.cache.keep_pool_free(context!(self));
        self.cache.release_devices(context!(self));
        self.erasures.watch(&self.cache, self.now);
        self.cache.announce(context!(self));
        std::mem::swap(&mut self.out, effects);
    }

    /// Passes the outcomes of owners to other owners, until none is left. Loads try another source after all
    /// waiters of a failed fill have released its slot.
    fn route(&mut self) {
        loop {
            if let Some(outcomes) = self.cache.take_outcomes() {
                self.route_cache(outcomes);
            } else if self.transfer.has_outcomes() {
                self.route_transfer();
            } else if self.load.has_outcomes() {
                self.route_load();
            } else if self.load.retry_next(&mut self.cache, context!(self)) {
                // Its outcomes come next.
            } else if self.serve.has_outcomes() {
                self.route_serve();
            } else if self.prefetch.has_outcomes() {
                self.route_prefetch();
            } else if let Some(outcome) = self.replicate.take_outcome() {
                self.route_replicate(&outcome);
            } else {
                return;
            }
        }
    }

    fn route_cache(&mut self, outcomes: CacheOutcomes) {
        let CacheOutcomes {
            arena_full,
            capacity_changed,
            recovered,
            regions_retired,
            stored,
            batches,
            used_again,
            lost_retentions,
        } = outcomes;
        for lost in lost_retentions {
            self.retention.lost_dram(&mut self.cache, lost);
        }
        self.save.save_used_again(&mut self.cache, self.now, &used_again);
        if arena_full {
            self.save.expedite();
        }
        if regions_retired {
            self.save.save_leaving(&mut self.cache, self.now);
        }
        for DoneBatch { batch, stored } in batches {
            match Extents::owns(batch) {
                true => self.extents.batch_done(&mut self.cache, context!(self), batch, &stored),
                false => self.save.batch_done(&mut self.cache, context!(self), batch, &stored),
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
            self.retention.enforce(&mut self.cache, &self.settings);
        }
    }

    fn route_transfer(&mut self) {
        let mut outcomes = self.transfer.take_outcomes();
        for outcome in outcomes.drain(..) {
            match outcome {
                TransferOutcome::Attached(waiter, attached) => match waiter.owner {
                    WaiterOwner::Load => self.load.attached(&mut self.cache, waiter, attached),
                    WaiterOwner::Serve => {
                        self.serve.attached(&mut self.cache, context!(self), waiter, attached);
                    }
                    WaiterOwner::Prefetch => self.prefetch.attached(&mut self.cache, waiter, attached),
                },
                TransferOutcome::Refused(waiter, reason) => match waiter.owner {
                    WaiterOwner::Load => self.load.refused(context!(self), waiter, reason),
                    WaiterOwner::Serve => self.serve.refused(context!(self), waiter),
                    WaiterOwner::Prefetch => self.prefetch.refused(waiter),
                },
                TransferOutcome::Advanced(waiter, advanced) => match waiter.owner {
                    WaiterOwner::Load => {
                        self.load.advanced(&mut self.cache, context!(self), waiter, advanced);
                    }
                    WaiterOwner::Serve => {
                        self.serve.advanced(&self.cache, context!(self), waiter, advanced);
                    }
                    WaiterOwner::Prefetch => self.prefetch.advanced(waiter, advanced),
                },
                TransferOutcome::Failed(waiter, failed) => match waiter.owner {
                    WaiterOwner::Load => {
                        self.load.failed(&mut self.cache, context!(self), waiter, failed);
                    }
                    WaiterOwner::Serve => self.serve.failed(&mut self.cache, context!(self), waiter),
                    WaiterOwner::Prefetch => self.prefetch.failed(&mut self.cache, waiter),
                },
                TransferOutcome::Retained { frame, position } => {
                    self.save.save_replica(&mut self.cache, self.now, frame, position);
                }
                TransferOutcome::Started { owner: WaiterOwner::Load, object } => {
                    self.load.started(&mut self.cache, context!(self), object);
                }
                TransferOutcome::Started { owner: WaiterOwner::Serve, object } => {
                    self.serve.started(&mut self.cache, context!(self), object);
                }
                TransferOutcome::Started { owner: WaiterOwner::Prefetch, .. } => {}
            }
        }
        self.transfer.reuse(outcomes);
    }

    fn route_load(&mut self) {
        for outcome in self.load.take_outcomes() {
            match outcome {
                LoadOutcome::Fetch(request) => self.transfer.begin(&mut self.cache, context!(self), request),
                LoadOutcome::Detach { wait, waiter } => self.transfer.detach(wait, waiter),
            }
        }
    }

    fn route_serve(&mut self) {
        for outcome in self.serve.take_outcomes() {
            match outcome {
                ServeOutcome::Read { entries } => {
                    for entry in entries {
                        self.replicate.note_read(&self.cache, self.now, entry);
                    }
                }
                ServeOutcome::Fetch(request) => self.transfer.begin(&mut self.cache, context!(self), request),
                ServeOutcome::Detach { wait, waiter } => self.transfer.detach(wait, waiter),
            }
        }
    }

    fn route_prefetch(&mut self) {
        for outcome in self.prefetch.take_outcomes() {
            match outcome {
                PrefetchOutcome::Fetch(request) => {
                    self.transfer.begin(&mut self.cache, context!(self), request);
                }
                PrefetchOutcome::Detach { wait, waiter } => self.transfer.detach(wait, waiter),
            }
        }
    }

    fn route_replicate(&mut self, outcome: &ReplicateOutcome) {
        match *outcome {
            ReplicateOutcome::Retain { fill } => self.transfer.retain(&mut self.cache, fill),
            ReplicateOutcome::SaveReplica { frame } => {
                self.save.save_replica(&mut self.cache, self.now, frame, EvictionPosition::Last);
            }
        }
    }

    /// Starts the fetches of accepted blocks that there is room for.
    fn begin_pulls(&mut self) {
        let Some(mut round) = self.replicate.begin_pulls(self.now) else { return };
        loop {
            let in_flight = self.pulls_in_flight_bytes();
            match self.replicate.next_pull(&mut self.cache, self.now, &mut round, in_flight) {
                Some(PullStep::Fetch(pull)) => {
                    let block = (pull.key, pull.size_class);
                    let begun = self.transfer.pull(&mut self.cache, block, pull.from);
                    self.replicate.pull_ended(&mut self.cache, &mut round, &pull, begun);
                }
                Some(PullStep::Passed) => {}
                None => break,
            }
            self.route();
        }
        self.replicate.end_pulls(self.now, round);
        self.transfer.send_fetches(&self.cache, context!(self));
    }

    /// Slot bytes of replicas that are being fetched or written.
    fn pulls_in_flight_bytes(&self) -> u64 {
        self.transfer.retained_bytes() + self.save.replicated_bytes()
    }

    /// Time at which to send `Event::Tick` if no other event arrives before; `None` if time alone changes
    /// nothing.
    pub fn next_deadline(&self) -> Option<Tick> {
        let (load, serve) = (self.load.first_due(), self.serve.first_due());
        let (prefetch, retention) = (self.prefetch.first_due(), self.retention.first_due());
        let (save, replicate) = (self.save.next_deadline(&self.settings), self.replicate.next_deadline());
        let (begun, erasure) = (self.begun.first_due(), self.erasures.first_due());
        let quota = self.quota.next_deadline();
        let all = [load, serve, save, replicate, prefetch, begun, retention, erasure, quota];
        all.into_iter().flatten().min()
    }

    fn dispatch(&mut self, event: Event) {
        match event {
            Event::RegionRenewed { region, renewal } => self.cache.region_renewed(region, renewal),
            Event::TenantNamed { tenant, name } => self.cache.name_tenant(tenant, name),
            Event::TenantErased { tenant } => self.erase_tenant(tenant),
            Event::TenantRestored { tenant } => self.erasures.end(&mut self.cache, tenant),
            Event::PublicTenant(tenant) => self.load.set_public_tenant(tenant),
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
            Event::Fill { fill, update } => self.fill(fill, update),
            Event::LookupAnswered { lookup, found } => {
                self.load.lookup_answered(&mut self.cache, context!(self), SlabId(lookup.0), found);
            }
            Event::LookupFailed { lookup } => {
                self.load.lookup_failed(&mut self.cache, context!(self), SlabId(lookup.0));
            }
            Event::CheckDone { check, integrity } => {
                self.cache.checked(context!(self), SlabId(check.0), integrity);
            }
            Event::Peer(event) => self.peer_event(event),
            Event::InventoryWanted { slots } => self.announce_inventory(slots),
            Event::PlaceAnswered { place, answers } => {
                self.replicate.place_answered(&mut self.cache, context!(self), SlabId(place.0), &answers);
            }
            Event::PlaceFailed { place } => {
                self.replicate.place_failed(&mut self.cache, context!(self), SlabId(place.0));
            }
            Event::PeerRequest(request) => self.serve.begin(context!(self), request),
            Event::PeerOffer(offer) => self.replicate.peer_offer(&mut self.cache, context!(self), &offer),
            Event::Mode { mode, revision } => self.replicate.set_mode(self.now, mode, revision),
            Event::Move(directive) => self.replicate.set_move(&self.cache, self.now, directive),
            Event::Budget(grant) => {
                self.quota.apply(&mut self.cache, context!(self), grant);
                self.retention.enforce(&mut self.cache, &self.settings);
            }
            Event::LayerReported { session, slack } => self.save.report_layer(self.now, session, slack),
            Event::Flush => self.save.stop(),
            Event::Tick => {}
        }
    }

    fn peer_event(&mut self, event: PeerEvent) {
        match event {
            PeerEvent::Fill { fill, update } => self.fill(fill, update),
            PeerEvent::ServeDone { serve, block } => self.serve.done(&mut self.cache, serve, block),
            PeerEvent::ServeAborted { serve } => self.serve.aborted(&mut self.cache, serve),
            PeerEvent::OfferAnswered { offer, taken, retry_after } => {
                self.replicate.offer_answered(self.now, SlabId(offer.0), &taken, retry_after);
            }
            PeerEvent::OfferFailed { offer } => self.replicate.offer_failed(self.now, SlabId(offer.0)),
        }
    }

    fn fill(&mut self, FillId(fill): FillId, update: FillUpdate) {
        self.transfer.update(&mut self.cache, context!(self), SlabId(fill), update);
    }

    fn request(&mut self, (session, request): (SessionId, RequestId), body: Request, received: Tick) {
        let (cache, cx) = (&mut self.cache, context!(self));
        let Some(size_class) = self.sessions.get(&session).copied() else {
            let message =
                "no session: the agent has reached its maximum number of sessions, tenants or layouts";
            let retry_after = self.settings.load_deadline_default;
            let reply = Reply::Busy { message: message.to_owned(), retry_after };
            return cx.emit(Effect::Reply { session, request, reply });
        };
        let caller = Caller { session, request, size_class };
        match body {
            Request::Reserve { count, kind: PlaceKind::Arena } => self.save.reserve(cache, cx, caller, count),
            Request::Reserve { count, kind: PlaceKind::Extent } => {
                self.extents.lease(cache, cx, caller, count);
            }
            Request::Commit(commit) => {
                self.namespaces.used(session, cache.size_class(size_class));
                match commit.kind() {
                    Some(PlaceKind::Arena) => self.save.commit(cache, cx, caller, &commit),
                    Some(PlaceKind::Extent) => self.extents.commit(cache, cx, caller, &commit),
                    None => {
                        let text =
                            "a commit with slots of the arena and extents: send one commit for each kind";
                        cx.reply(caller, Reply::BadRequest(text.to_owned()));
                    }
                }
            }
            Request::Abort { leases } => {
                self.extents.abort(cache, session, &leases);
                self.save.abort(cache, cx, caller, &leases);
            }
            Request::AwaitDurable { ticket } => self.save.await_durable(cx, caller, ticket),
            Request::Match { keys, ranks, position, scope, public } => {
                let wanted = MatchRequest { keys, ranks, position, scope, public };
                self.load.match_keys(cache, cx, caller, wanted);
            }
            Request::Load(wanted) => {
                self.namespaces.used(session, cache.size_class(size_class));
                let load = self.load.begin(cache, cx, caller, (wanted, received));
                if let Some(load) = load
                    && self.prefetch.is_active()
                {
                    self.prefetch.loaded(cache, self.load.keys(load), size_class);
                }
            }
            Request::Lookahead(mut hint) => {
                if self.prefetch.admit(cache, cx, (caller, &hint)) {
                    let ignored = self.begun.hint(cache, cx.now, (caller, &mut hint));
                    self.prefetch.hint(cache, cx, (caller, ignored), (hint, self.transfer.reads()));
                }
            }
            Request::Manage(command) => self.manage(caller, command),
            Request::Release { load } => self.load.release(cache, cx, caller, load),
            Request::Suspect { load, blocks } => self.load.suspect(cache, cx, caller, (load, &blocks)),
            Request::Pin { keys } => {
                let pinned = self.extents.pin(cache, cx, caller, &keys);
                self.prefetch.loaded(cache, &pinned, size_class);
            }
            Request::Unpin { pins } => self.extents.unpin(cache, cx, caller, &pins),
            Request::Trim => cx.reply(caller, Reply::Trimmed { blocks: cache.trim() }),
            Request::Stats => {
                let tenant = self.cache.tenant_of(size_class);
                let retention = self.retention.usage(&self.cache, &self.settings, tenant);
                let own = TenantUsage { retention, ..self.cache.tenant_usage(tenant) };
                let stats = self.counters().fields().chain(own.fields()).collect();
                context!(self).reply(caller, Reply::Stats(stats));
            }
        }
    }

    /// Opens a session. Beyond the limits it is not opened, and its requests are answered with `Busy`.
    fn open_session(&mut self, opened: &SessionOpened) {
        let SessionOpened { session, tenant, layout, gpu, .. } = opened;
        if self.sessions.len() >= SESSIONS_MAX || self.sessions.contains_key(session) {
            return;
        }
        let Some(size_class) = self.cache.open(*tenant, *layout) else { return };
        self.namespaces.open(*session, opened.namespace);
        self.sessions.insert(*session, size_class);
        self.cache.session_opened(size_class);
        self.load.open(*session);
        self.save.open(*session);
        if let Some(gpu) = gpu {
            self.extents.open(*session, gpu);
        }
    }

    /// Closes a session and releases everything that it holds, in time proportional to that. Fills that it
    /// started continue, because their blocks may serve others.
    fn close_session(&mut self, session: SessionId) {
        let Some(size_class) = self.sessions.remove(&session) else { return };
        self.load.close(&mut self.cache, session);
        self.save.close(&mut self.cache, session);
        self.extents.close(context!(self), session);
        self.prefetch.close(&mut self.cache, session);
        self.begun.close(&mut self.cache, session);
        self.namespaces.close(session);
        self.cache.session_closed(size_class);
        self.cache.release_size_class(size_class);
    }

    /// Handles all deadlines that have passed: the earliest first, at the same time in the order of owners.
    fn fire_timers(&mut self) {
        loop {
            let due = [
                (self.load.first_due(), TimerOwner::Load),
                (self.serve.first_due(), TimerOwner::Serve),
                (self.save.first_due(), TimerOwner::Save),
                (self.replicate.first_due(), TimerOwner::Replicate),
                (self.prefetch.first_due(), TimerOwner::Prefetch),
                (self.begun.first_due(), TimerOwner::Begun),
                (self.retention.first_due(), TimerOwner::Retention),
                (self.erasures.first_due(), TimerOwner::Erasure),
            ];
            let due = due.into_iter().filter_map(|(at, owner)| Some((at?, owner)));
            let Some((_, owner)) = due.filter(|(at, _)| *at <= self.now).min() else { return };
            let (cache, cx) = (&mut self.cache, context!(self));
            match owner {
                TimerOwner::Load => self.load.fire_timer(cache, cx),
                TimerOwner::Serve => self.serve.fire_timer(cache, cx),
                TimerOwner::Save => self.save.fire_timer(cache, cx.now),
                TimerOwner::Replicate => self.replicate.fire_timer(cache, cx),
                TimerOwner::Prefetch => self.prefetch.fire_timer(cache, cx.now),
                TimerOwner::Begun => self.begun.fire_timer(cache, cx.now),
                TimerOwner::Retention => self.retention.fire_timer(cache, cx.now),
                TimerOwner::Erasure => self.erase_step(),
            }
            self.route();
        }
    }

    /// Announces the inventory of some hash slots.
    fn announce_inventory(&mut self, slots: Box<SlotSet>) {
        self.cache.announce(context!(self));
        let replicas = self.cache.inventory(&slots);
        context!(self).emit(Effect::Inventory { slots, replicas });
    }
}
