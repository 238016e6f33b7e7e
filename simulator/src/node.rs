//! A node: a host with disks, and at times an agent's process, which runs the production core.
//!
//! Every event passes through [`Simulation::apply`]: the core decides, its audit and the simulation's checks
//! run, and its effects are executed. A process's memory dies with it; the disks survive.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_agent_core::AgentCore;
use reprise_agent_core::effect::{
    ArenaSlot, Change, DeviceId, Diagnostic, Effect, FetchId, OfferId, PeerOfferId, RegionId, ReplicaChange,
    Reply, ServeId,
};
use reprise_agent_core::event::{Event, Request, RequestId, Scope};
use reprise_agent_core::pool::DeviceOpKind;
use reprise_agent_core::quota_grants::QuotaGrants;
use reprise_policy::{BlockKey, SessionId, SlotSet, TenantId, Tick, Tier};

use crate::client::Client;
use crate::disk::{Disk, DiskWrite};
use crate::engine::Engine;
use crate::jobs::Job;
use crate::memory::{Memory, overlap};
use crate::network::{Host, LineId};
use crate::offers::{OpenOffer, ReceivedOffer};
use crate::peers::{Fetch, Serve};
use crate::placement_audit::PlacementAudit;
use crate::reports::StateSnapshot;
use crate::setup::{LOOKUP_TIMEOUT, Setup, Variant, tenant_of};
use crate::simulation::{Action, AgentStep, Simulation};
use crate::tenants::TenantAudit;

/// Counters of the core that show which code paths the runs have reached.
const COUNTED: [&str; 31] = [
    "duplicate_items",
    "durable_items",
    "lost_items",
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
    "fill_corrupt",
    "fill_absent",
    "fill_peer_lost",
    "write_failures",
    "dram_corrupt_blocks",
    "dram_evictions",
    "nvme_evictions",
    "serve_blocks_dram",
    "serve_blocks_nvme",
    "serve_blocks_absent",
    "hot_blocks_given",
    "moved_blocks",
    "pulled_blocks",
    "pulls_dropped",
    "offer_keys_taken",
    "offer_failures",
    "place_failures",
];

/// A deadline is detected when the clock shows the next microsecond.
const CLOCK_GRAIN: Duration = Duration::from_micros(2);

/// A node; see the module.
#[derive(Debug)]
pub(crate) struct Node {
    /// Failure domain of the node; empty if unknown.
    pub(crate) failure_domain: String,
    pub(crate) process: Option<Process>,
    pub(crate) disks: Vec<Disk>,
    /// Blocks that were reported durable and not withdrawn.
    pub(crate) reported_durable: BTreeSet<BlockKey>,
    /// Blocks that were durable, and the time at which they were withdrawn.
    pub(crate) withdrawn: BTreeMap<BlockKey, Tick>,
}

/// State of a running agent.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) core: AgentCore,
    pub(crate) memory: Memory,
    /// Replicas that the core has announced.
    pub(crate) inventory: BTreeSet<(BlockKey, Tier)>,
    /// The core has announced its recovered blocks.
    recovered: bool,
    /// Blocks that were on NVMe at any time of this process.
    ever_stored: BTreeSet<BlockKey>,
    pub(crate) jobs: BTreeMap<u64, Job>,
    pub(crate) jobs_begun: u64,
    pub(crate) sessions: BTreeMap<SessionId, Engine>,
    /// The session of each engine, by the engine's index.
    pub(crate) seats: Vec<Option<SessionId>>,
    pub(crate) sessions_begun: u64,
    pub(crate) client: Client,
    pub(crate) fetches: BTreeMap<FetchId, Fetch>,
    pub(crate) serves: BTreeMap<ServeId, Serve>,
    pub(crate) serves_begun: u64,
    /// Serves whose connection has ended without the core's knowledge yet: data for them is dropped, as in a
    /// transport.
    pub(crate) serves_lost: BTreeSet<ServeId>,
    /// Connections that this agent has opened to others, by their index.
    pub(crate) peer_lines: BTreeMap<usize, LineId>,
    pub(crate) tenants: TenantAudit,
    /// Tenants whose names the agent knows.
    pub(crate) names: BTreeSet<TenantId>,
    pub(crate) offers: BTreeMap<OfferId, OpenOffer>,
    pub(crate) received_offers: BTreeMap<PeerOfferId, ReceivedOffer>,
    pub(crate) offers_received: u64,
    pub(crate) placed: PlacementAudit,
    /// Latest state that the core has reported.
    pub(crate) state: StateSnapshot,
    pub(crate) grants: QuotaGrants,
    /// Size of the largest inventory so far.
    pub(crate) inventory_max: usize,
    /// Time of the core's next tick.
    tick_at: Option<Tick>,
}

impl Node {
    pub(crate) fn new(index: usize, setup: &Setup) -> Node {
        let disk =
            |device: usize| Disk::format(setup.disk_bytes, device as u8, index as u64 * 1000 + device as u64);
        Node {
            failure_domain: String::new(),
            process: None,
            disks: (0..setup.disks).map(disk).collect(),
            reported_durable: BTreeSet::new(),
            withdrawn: BTreeMap::new(),
        }
    }
}

impl Simulation {
    pub(crate) fn process(&mut self, node: usize) -> &mut Process {
        self.nodes[node].process.as_mut().expect("only a running agent gets events")
    }

    /// Starts an agent on the node's disks, with their current contents.
    pub(crate) fn start_agent(&mut self, node: usize) {
        self.env.begin_process(Host::Node(node));
        let place = &mut self.nodes[node];
        for disk in &mut place.disks {
            // As `device/open.rs` does before it reads.
            if self.env.setup.variant != Variant::DurableBeforeSync {
                disk.synced(disk.covered());
            }
        }
        let pools = place.disks.iter().map(|disk| {
            let (pool, stored, _) = disk.recover();
            (pool, stored)
        });
        let pools: Vec<_> = pools.collect();
        let regions: Vec<_> = (0..self.env.setup.regions)
            .map(|region| (RegionId(region), self.env.setup.region_bytes))
            .collect();
        let (core, effects) = AgentCore::new(self.env.setup.settings.clone(), pools, &regions);
        core.audit().unwrap_or_else(|broken| panic!("{broken}"));
        place.process = Some(Process {
            core,
            memory: Memory::default(),
            inventory: BTreeSet::new(),
            recovered: false,
            ever_stored: BTreeSet::new(),
            jobs: BTreeMap::new(),
            jobs_begun: 0,
            sessions: BTreeMap::new(),
            seats: vec![None; self.env.setup.engines],
            sessions_begun: 0,
            client: Client::default(),
            fetches: BTreeMap::new(),
            serves: BTreeMap::new(),
            serves_begun: 0,
            serves_lost: BTreeSet::new(),
            peer_lines: BTreeMap::new(),
            tenants: TenantAudit::default(),
            names: self.env.setup.names.clone(),
            offers: BTreeMap::new(),
            received_offers: BTreeMap::new(),
            offers_received: 0,
            placed: PlacementAudit::default(),
            state: StateSnapshot::default(),
            grants: QuotaGrants::default(),
            inventory_max: 0,
            tick_at: None,
        });
        effects.into_iter().for_each(|effect| self.execute(node, effect));
        // No link is registered yet, so nothing is sent: the simulation learns the core's blocks.
        self.apply(node, Event::InventoryWanted { slots: Box::new(SlotSet::ALL) });
        self.report_state(node);
        let domain = self.nodes[node].failure_domain.clone();
        self.client(node).begin(node, domain);
        self.env.later(node, Duration::ZERO, AgentStep::Follow);
    }

    /// Ends the process: `SIGKILL`, or power loss.
    pub(crate) fn end_agent(&mut self, node: usize) -> Option<(Process, Vec<Vec<DiskWrite>>)> {
        let place = &mut self.nodes[node];
        let process = place.process.take()?;
        count_all(&mut self.env.seen, &process);
        let running = (0..place.disks.len()).map(|device| {
            let of = |job: &Job| match job {
                Job::Device { device: of, op, .. } if usize::from(of.0) == device => {
                    DiskWrite::of(&op.kind, payload(&process.memory, &op.kind))
                }
                _ => None,
            };
            process.jobs.values().filter_map(of).collect()
        });
        let running = running.collect();
        self.budget_audit.remove_node(node);
        self.env.end_process(Host::Node(node));
        Some((process, running))
    }

    /// Applies an event to a core, runs the checks, and executes the effects.
    pub(crate) fn apply(&mut self, node: usize, event: Event) {
        let now = self.env.time(Host::Node(node));
        let mut effects = Vec::new();
        self.before_event(node, &event);
        let process = self.process(node);
        process.core.apply(now, event, &mut effects);
        process.core.audit().unwrap_or_else(|broken| panic!("node {node}: {broken}"));
        let mut durable = Vec::new();
        for effect in effects {
            if let Effect::Durable { session, ticket, durable: count, lost } = &effect {
                let engine = self.process(node).sessions.get_mut(session);
                durable.extend(engine.into_iter().flat_map(|engine| engine.on_notice(*ticket, *count, lost)));
                self.env.count("durable notices");
            } else {
                self.execute(node, effect);
            }
        }
        let process = self.process(node);
        for key in durable {
            assert!(
                process.ever_stored.contains(&key),
                "{key} was reported durable but never announced on NVMe"
            );
        }
        self.check_readers(node);
        self.after_event(node);
        self.audit_tenants(node);
        self.audit_queues(node);
        self.schedule_tick(node);
        self.pump_all(node);
    }

    fn schedule_tick(&mut self, node: usize) {
        let process = self.process(node);
        let Some(due) = process.core.next_deadline() else { return };
        if process.tick_at.is_none_or(|at| due < at) {
            process.tick_at = Some(due);
            let host = Host::Node(node);
            let (at, life) = (self.env.when(host, due), self.env.host(host).life);
            self.env.queue.push(at, Action::Agent { node, life, what: AgentStep::Tick });
        }
    }

    pub(crate) fn tick(&mut self, node: usize) {
        let process = self.process(node);
        process.tick_at = None;
        self.apply(node, Event::Tick);
    }

    pub(crate) fn request_arrives(&mut self, node: usize, of: (SessionId, RequestId), mut body: Request) {
        let (session, request) = of;
        let now = self.env.time(Host::Node(node));
        let wait = match &body {
            Request::Load(load) if load.deadline.is_zero() => self.env.setup.settings.load_deadline_default,
            Request::Load(load) => load.deadline,
            Request::Match { scope: Scope::Cluster, .. } => {
                LOOKUP_TIMEOUT + reprise_agent_core::limits::LOOKUP_GRACE
            }
            _ => Duration::ZERO,
        };
        let held = self.held_of(node, session, &body);
        if let Some(engine) = self.process(node).sessions.get_mut(&session) {
            engine.received(request, now.after(wait).after(CLOCK_GRAIN), held);
        }
        let alone = !self.client(node).is_connected();
        if let Request::Match { keys, scope: Scope::Local } = &mut body
            && alone
        {
            self.env.count("local matches alone");
            if self.env.setup.variant == Variant::LocalNeedsControlPlane {
                keys.clear();
            }
        }
        self.apply(node, Event::Request { session, request, body, received: now });
    }

    /// Returns the indices of keys that a request must find: those that a local match sees, or that a local
    /// load has in DRAM.
    fn held_of(&mut self, node: usize, session: SessionId, body: &Request) -> Vec<usize> {
        let process = self.process(node);
        let Some(tenant) = process.sessions.get(&session).map(|engine| engine.tenant) else {
            return Vec::new();
        };
        let has = |key: &BlockKey, tier: Tier| process.inventory.contains(&(*key, tier));
        let places = |keys: &[BlockKey], held: &dyn Fn(&BlockKey) -> bool| {
            let of_tenant = keys.iter().enumerate().filter(|(_, key)| tenant_of(key) == tenant && held(key));
            of_tenant.map(|(place, _)| place).collect()
        };
        match body {
            Request::Match { keys, scope: Scope::Local } => {
                places(keys, &|key| has(key, Tier::Dram) || has(key, Tier::Nvme))
            }
            Request::Load(load) if load.scope == Scope::Local => {
                places(&load.keys, &|key| has(key, Tier::Dram))
            }
            _ => Vec::new(),
        }
    }

    fn execute(&mut self, node: usize, effect: Effect) {
        match effect {
            Effect::Reply { session, request, reply } => self.reply(node, (session, request), &reply),
            Effect::Durable { .. } => unreachable!("handled after all effects"),
            Effect::Progress { session, entry, update } => {
                if let Some(engine) = self.process(node).sessions.get_mut(&session) {
                    engine.on_progress(entry, &update);
                }
            }
            Effect::Device { device, op } => {
                let covered = self.nodes[node].disks[usize::from(device.0)].covered();
                self.begin_job(node, Job::Device { device, op, covered });
            }
            Effect::ReadBlocks { device, batch } => {
                for read in batch.blocks {
                    self.assert_unused(node, read.slot);
                    self.begin_job(node, Job::Read { device, read, layout: batch.layout, layers: 0 });
                }
            }
            Effect::DeviceReleased { .. } => unreachable!("devices of this simulation stay until they fail"),
            Effect::AwaitExtents { .. } => unreachable!("engines of this simulation use no extents"),
            Effect::CheckBlock(check) => self.begin_job(node, Job::Check(check)),
            Effect::Lookup { lookup, keys, timeout } => self.start_lookup(node, lookup, keys, timeout),
            Effect::Announce { changes } => self.announce(node, &changes),
            Effect::Inventory { slots, replicas } => self.inventory(node, &slots, &replicas),
            Effect::PeerFetch { node: from, request } => self.fetch(node, from, request),
            Effect::ServeHeader { serve, block, tier, checksums } => {
                self.serve_header(node, (serve, block), tier, checksums);
            }
            Effect::ServeObjects(objects) => self.serve_objects(node, objects),
            Effect::ServeAbsent { serve, block } => self.serve_absent(node, serve, block),
            Effect::Place { place, keys, slot_bytes, reason, timeout } => {
                self.start_placement(node, place, (keys, slot_bytes, reason), timeout);
            }
            Effect::Offer { node: to, offer } => self.offer(node, to, offer),
            Effect::AnswerOffer { offer, taken, retry_after } => {
                self.answer_offer(node, offer, (taken, retry_after));
            }
            Effect::Diagnostic(report) => self.report(node, &report),
        }
    }

    fn reply(&mut self, node: usize, of: (SessionId, RequestId), reply: &Reply) {
        if let Reply::Reserved { leases, .. } = reply {
            let slots = leases.iter().filter_map(|(_, place)| place.arena());
            slots.for_each(|slot| self.assert_unused(node, slot));
        }
        self.env.trace.note(|| format!("{} {} ← {reply:?}", of.0.0, of.1.0));
        let host = Host::Node(node);
        let (now, resumed) = (self.env.time(host), self.env.host(host).resumed);
        if let Some(engine) = self.process(node).sessions.get_mut(&of.0) {
            engine.on_reply(of.1, reply, now, resumed);
        }
    }

    fn announce(&mut self, node: usize, changes: &[ReplicaChange]) {
        let (variant, now) = (self.env.setup.variant, self.env.now);
        let place = &mut self.nodes[node];
        let process = place.process.as_mut().expect("only a running agent announces");
        for change in changes {
            let replica = (change.key, change.tier);
            let new = match change.change {
                Change::Added => process.inventory.insert(replica),
                Change::Removed => process.inventory.remove(&replica),
            };
            assert!(new, "{change:?} has no effect");
            match (change.tier, change.change) {
                (Tier::Nvme, Change::Added) => {
                    process.ever_stored.insert(change.key);
                    place.reported_durable.insert(change.key);
                    place.withdrawn.remove(&change.key);
                }
                (Tier::Nvme, Change::Removed) => {
                    place.reported_durable.remove(&change.key);
                    place.withdrawn.insert(change.key, now);
                }
                (Tier::Dram, _) => {}
            }
        }
        let announced = changes.iter().copied();
        let announced: Vec<_> = match variant {
            Variant::EvictionsNotAnnounced => {
                announced.filter(|change| change.change == Change::Added).collect()
            }
            _ => announced.collect(),
        };
        process.client.links.values_mut().for_each(|link| link.announcer.outbox_mut().announce(&announced));
    }

    /// Checks an inventory: the first one of a process announces the recovered blocks; later ones must equal
    /// the announced blocks.
    fn inventory(&mut self, node: usize, slots: &SlotSet, replicas: &[(BlockKey, Tier)]) {
        let process = self.process(node);
        let announced: BTreeSet<_> = replicas.iter().copied().collect();
        assert_eq!(announced.len(), replicas.len(), "a replica is announced once");
        if !std::mem::replace(&mut process.recovered, true) {
            process.inventory = announced;
            self.record_durable(node);
        } else {
            let known = process.inventory.iter().filter(|(key, _)| slots.has_key(key)).copied();
            assert!(known.eq(announced), "the inventory differs from the announced replicas");
        }
        let links = self.client(node).links.values_mut();
        links.for_each(|link| link.announcer.outbox_mut().inventory(slots, replicas));
    }

    /// Records the NVMe blocks of a complete inventory as durable.
    fn record_durable(&mut self, node: usize) {
        let process = self.process(node);
        let stored = process.inventory.iter().filter(|(_, tier)| *tier == Tier::Nvme).map(|(key, _)| *key);
        let stored: BTreeSet<_> = stored.collect();
        process.ever_stored.extend(&stored);
        let now = self.env.now;
        let place = &mut self.nodes[node];
        let gone = place.reported_durable.difference(&stored).map(|key| (*key, now));
        place.withdrawn.extend(gone);
        place.withdrawn.retain(|key, _| !stored.contains(key));
        place.reported_durable = stored;
    }

    fn report(&mut self, node: usize, report: &Diagnostic) {
        self.env.trace.note(|| format!("node {node} reports {report:?}"));
        match report {
            Diagnostic::CorruptBlock { .. } => self.env.count("corrupt blocks"),
            Diagnostic::CorruptMemory { .. } => self.env.count("corrupt memory"),
            Diagnostic::DeviceLost { .. } => self.env.count("devices lost"),
            Diagnostic::WritesStopped { .. } => self.env.count("devices read-only"),
            Diagnostic::Unstorable { .. }
            | Diagnostic::Overcommitted { .. }
            | Diagnostic::OffersRefused { .. } => {}
        }
    }

    /// Lets all readers on a node read their blocks; reports mismatches to the agent.
    pub(crate) fn check_readers(&mut self, node: usize) {
        let host = Host::Node(node);
        let (now, truth) = (self.env.time(host), &self.truth);
        let excused = !self.env.is_awake(host) || self.env.host(host).resumed >= now;
        let place = &mut self.nodes[node];
        let Some(process) = &mut place.process else { return };
        let mut suspects = Vec::new();
        for (session, engine) in &mut process.sessions {
            let damaged = engine.read_all(&process.memory, |key, tag| {
                let committed = truth.get(key).is_some_and(|tags| tags.contains(&tag));
                assert!(committed, "{key}: content {tag} was never committed");
            });
            suspects.extend(damaged.into_iter().map(|(load, block)| (*session, load, block)));
            let late = engine.overdue(now).filter(|_| !excused);
            assert!(late.is_none(), "node {node}: no answer in time to {}", late.unwrap_or_default());
        }
        let late =
            process.client.lookups.iter().find(|(_, pending)| pending.deadline.after(CLOCK_GRAIN) < now);
        assert!(late.is_none() || excused, "node {node}: a lookup exceeds its deadline: {late:?}");
        for (session, load, block) in suspects {
            self.env.count("suspects");
            self.suspect(node, session, (load, vec![block]));
        }
    }

    /// Checks that an assigned slot is not being written or read.
    pub(crate) fn assert_unused(&self, node: usize, slot: ArenaSlot) {
        let process = self.nodes[node].process.as_ref().expect("the agent runs");
        let jobs = process.jobs.values().filter_map(Job::slot);
        let fetches = process.fetches.values().flat_map(Fetch::slots);
        let engines = process.sessions.values().flat_map(Engine::slots);
        let serves = process.serves.values().flat_map(Serve::slots);
        let mut used = jobs.chain(fetches).chain(engines).chain(serves);
        assert!(!used.any(|other| overlap(slot, other)), "{slot:?} was assigned while in use");
        assert!(slot.offset + slot.bytes <= self.env.setup.region_bytes, "{slot:?} lies outside its region");
    }

    pub(crate) fn disk(&mut self, node: usize, device: DeviceId) -> &mut Disk {
        &mut self.nodes[node].disks[usize::from(device.0)]
    }
}

/// Adds the counters of a core to `seen`, by their names.
pub(crate) fn count_all(seen: &mut BTreeMap<&'static str, u64>, process: &Process) {
    let counters = process.core.counters();
    for name in COUNTED {
        let fields = counters.fields();
        let counted = fields.filter(|(other, _)| *other == name).map(|(_, value)| value).sum::<u64>();
        *seen.entry(name).or_default() += counted;
    }
}

/// Returns the content in memory of a block that is being written.
pub(crate) fn payload<'a>(memory: &'a Memory, kind: &DeviceOpKind) -> &'a [u64] {
    match kind {
        DeviceOpKind::WriteBlock { slot, .. } => memory.layers(*slot),
        DeviceOpKind::WritePages { .. } | DeviceOpKind::WriteHeader { .. } | DeviceOpKind::Sync => &[],
    }
}
