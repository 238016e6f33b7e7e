//! Test harness around one agent core: runs effects in random order and with faults, and checks all results.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use reprise_agent_core::effect::{
    ArenaSlot, Change, DeviceId, Diagnostic, Effect, FetchBlock, FetchRequest, FillId, LoadId, PeerOfferId,
    PlaceKind, RegionId, ReplicaChange, Reply, ServeId,
};
use reprise_agent_core::event::{
    Event, LoadRequest, PeerEvent, PeerOffer, PeerRequest, Priority, Request, RequestId, Scope, SessionOpened,
};
use reprise_agent_core::pool::{DeviceOpKind, DevicePool, StoredBlock};
use reprise_agent_core::{AgentCore, Settings};
use reprise_policy::{
    BlockKey, DevicePlace, Dtype, Layout, LayoutSpec, NamespaceDigest, NodeId, Parts, SessionId, TenantId,
    Tick, Tier,
};

use crate::descriptions;
use crate::disk::{Disk, DiskWrite};
use crate::engine::{Engine, RequestKind};
use crate::jobs::Job;
use crate::memory::{Memory, Tag, overlap};
use crate::peers::{PeerServe, Peers, SendState, ServeIds};
use crate::public::PublicBlocks;
use crate::rng::Rng;

/// Probabilities of faults, in thousandths.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Faults {
    pub(crate) write_media: u64,
    pub(crate) read: u64,
    /// Rejections of block reads and writes.
    pub(crate) refused: u64,
    pub(crate) fetch: u64,
    pub(crate) lookup: u64,
    /// Failures of placement queries and offers.
    pub(crate) place: u64,
    /// Wrong or missing results of checks in DRAM.
    pub(crate) check: u64,
    pub(crate) directory_stale: u64,
    pub(crate) device_lost: u64,
    /// Failed replacements of a region's memory.
    pub(crate) renewal: u64,
    /// Reads of a lost device that strand their slot.
    pub(crate) stranded: u64,
}

/// Parameters of a harness.
#[derive(Clone, Debug)]
pub(crate) struct Setup {
    pub(crate) seed: u64,
    pub(crate) regions: u16,
    pub(crate) region_bytes: u64,
    pub(crate) disks: Vec<u64>,
    /// Places of the first disks; the others have none.
    pub(crate) places: Vec<DevicePlace>,
    pub(crate) settings: Settings,
    pub(crate) faults: Faults,
}

/// Agent core with simulated devices, engines, peers and directory.
pub(crate) struct Harness {
    pub(crate) core: AgentCore,
    pub(crate) now: Tick,
    pub(crate) rng: Rng,
    pub(crate) disks: Vec<Disk>,
    pub(crate) memory: Memory,
    pub(crate) engines: BTreeMap<SessionId, Engine>,
    pub(crate) peers: Peers,
    pub(crate) serves: BTreeMap<ServeId, PeerServe>,
    pub(crate) jobs: Vec<Job>,
    pub(crate) faults: Faults,
    /// Replicas announced to the directory.
    pub(crate) announced: BTreeSet<(BlockKey, Tier)>,
    /// Tenants whose encryption keys are gone.
    pub(crate) erased: BTreeSet<TenantId>,
    /// All contents ever committed under a key, on any node.
    pub(crate) committed_tags: BTreeMap<BlockKey, BTreeSet<Tag>>,
    pub(crate) public: PublicBlocks,
    /// Keys that engines of this node have committed since it started.
    pub(crate) committed: BTreeSet<BlockKey>,
    /// Keys found on devices when the node started.
    pub(crate) recovered: BTreeSet<BlockKey>,
    pub(crate) reports: Vec<Diagnostic>,
    pub(crate) promoted: Vec<FillId>,
    /// Tenant whose slots the memory of each region has had.
    pub(crate) region_tenants: BTreeMap<RegionId, TenantId>,
    /// Answers to offers of peers: accepted keys, and the delay for the others.
    pub(crate) offer_answers: BTreeMap<PeerOfferId, (Vec<u32>, Duration)>,
    pub(crate) lost_devices: BTreeSet<DeviceId>,
    /// Devices that reject writes.
    pub(crate) read_only_devices: BTreeSet<DeviceId>,
    /// Detached devices that may be attached again.
    pub(crate) released: BTreeSet<DeviceId>,
    pub(crate) setup: Setup,
    serve_ids: ServeIds,
    sessions: u64,
    tags: Tag,
}

/// 60 KiB per block, 64 KiB on a device with its header: 32 blocks per 2 MiB segment.
pub(crate) fn large_layout() -> Layout {
    layout(4, Parts::KeyValue, 240)
}

/// 6 KiB per block, padded to 8 KiB.
pub(crate) fn small_layout() -> Layout {
    layout(3, Parts::Latent, 64)
}

pub(crate) fn layout(layers: u16, parts: Parts, head_dim: u16) -> Layout {
    let (kv_heads, dtype, tokens_per_block, tp_rank, tp_size) = (1, Dtype::Bf16, 16, 0, 1);
    LayoutSpec { layers, parts, kv_heads, head_dim, dtype, tokens_per_block, tp_rank, tp_size }
        .validate()
        .expect("a valid layout")
}

pub(crate) fn key(number: u64) -> BlockKey {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&crate::rng::mix(number + 1).to_le_bytes());
    bytes[8..].copy_from_slice(&crate::rng::mix(number + 1_000_000).to_le_bytes());
    BlockKey(bytes)
}

/// First key of small blocks.
pub(crate) const SMALL_KEYS_FROM: u64 = 1000;

/// Layout of a key's block.
pub(crate) fn layout_of(of: &BlockKey) -> Layout {
    let small = (SMALL_KEYS_FROM..2 * SMALL_KEYS_FROM).any(|number| key(number) == *of);
    if small { small_layout() } else { large_layout() }
}

pub(crate) fn keys(numbers: std::ops::Range<u64>) -> Vec<BlockKey> {
    numbers.map(key).collect()
}

impl Default for Setup {
    /// Four regions of four large slots, one device of 64 large slots, short delays, no faults.
    fn default() -> Self {
        let slot = large_layout().slot_bytes();
        Setup {
            seed: 0,
            regions: 4,
            region_bytes: 4 * slot,
            disks: vec![16 << 20],
            places: Vec::new(),
            settings: Settings {
                writeback_delay: Duration::from_millis(5),
                writeback_bytes: 4 * slot,
                load_deadline_default: Duration::from_millis(100),
                lookup_timeout: Duration::from_millis(10),
                arena_unsaved_permille: 1000,
                arena_session_permille: 1000,
                arena_serves_permille: 1000,
                ..Settings::default()
            },
            faults: Faults::default(),
        }
    }
}

impl Harness {
    pub(crate) fn new(setup: Setup) -> Harness {
        let formatted = (0..).zip(&setup.disks).map(|(index, bytes)| Disk::format(*bytes, index));
        let (disks, pools): (Vec<_>, Vec<_>) = formatted.unzip();
        Harness::open(setup, disks, pools.into_iter().map(|pool| (pool, Vec::new())).collect())
    }

    fn open(setup: Setup, disks: Vec<Disk>, pools: Vec<(DevicePool, Vec<StoredBlock>)>) -> Harness {
        let mut pools = pools;
        pools.iter_mut().for_each(|(pool, _)| pool.allow_lending());
        for ((pool, _), place) in pools.iter_mut().zip(&setup.places) {
            pool.set_place(Some(place.clone()));
        }
        let regions: Vec<_> =
            (0..setup.regions).map(|region| (RegionId(region), setup.region_bytes)).collect();
        let stored = pools.iter().flat_map(|(_, stored)| stored);
        let recovered = stored.map(|block| block.key).collect();
        let (core, effects) = AgentCore::new(setup.settings.clone(), pools, &regions);
        let mut harness = Harness {
            core,
            now: Tick(0),
            rng: Rng::new(setup.seed),
            disks,
            memory: Memory::default(),
            engines: BTreeMap::new(),
            peers: Peers::default(),
            serves: BTreeMap::new(),
            jobs: Vec::new(),
            faults: setup.faults,
            announced: BTreeSet::new(),
            erased: BTreeSet::new(),
            committed_tags: BTreeMap::new(),
            public: PublicBlocks::default(),
            committed: BTreeSet::new(),
            recovered,
            reports: Vec::new(),
            promoted: Vec::new(),
            region_tenants: BTreeMap::new(),
            offer_answers: BTreeMap::new(),
            lost_devices: BTreeSet::new(),
            read_only_devices: BTreeSet::new(),
            released: BTreeSet::new(),
            setup,
            serve_ids: ServeIds::default(),
            sessions: 0,
            tags: 0,
        };
        harness.core.audit().expect("a new core is consistent");
        effects.into_iter().for_each(|effect| harness.execute(effect));
        harness
    }

    /// Simulates a power loss and restarts the agent with the durable contents of its devices.
    pub(crate) fn crash(mut self) -> Harness {
        for (index, running) in self.running_writes() {
            self.disks[index].crash(running, &mut self.rng);
        }
        self.reopen()
    }

    /// Simulates a kill of the agent and restarts it. Clients continue to write their extents.
    pub(crate) fn kill(mut self) -> Harness {
        let clients = self.extent_writes_of_earlier_sessions();
        for (index, running) in self.running_writes() {
            self.disks[index].kill(running, &mut self.rng);
        }
        let mut harness = self.reopen();
        harness.jobs.extend(clients);
        harness
    }

    /// Writes in flight of each device.
    fn running_writes(&self) -> Vec<(usize, Vec<DiskWrite>)> {
        let of_device = |index: usize| {
            let running = self.jobs.iter().filter_map(|job| match job {
                Job::ExtentWrite(write) if usize::from(write.device.0) == index => Some(write.content()),
                Job::Device { device, op, .. } if usize::from(device.0) == index => match &op.kind {
                    DeviceOpKind::WriteBlock { slot, .. } => {
                        DiskWrite::of(&op.kind, self.memory.layers(*slot))
                    }
                    kind => DiskWrite::of(kind, &[]),
                },
                _ => None,
            });
            (index, running.collect())
        };
        (0..self.disks.len()).map(of_device).collect()
    }

    fn reopen(mut self) -> Harness {
        let pools = self.disks.iter().map(|disk| {
            let (pool, stored, _) = disk.recover();
            (pool, stored)
        });
        let pools = pools.collect();
        let setup = Setup { seed: self.rng.next(), ..self.setup };
        let mut harness = Harness::open(setup, self.disks, pools);
        (harness.committed_tags, harness.peers, harness.tags) = (self.committed_tags, self.peers, self.tags);
        harness.public = self.public;
        harness.public.tenant = None;
        harness
    }

    /// Applies an event and executes the effects.
    pub(crate) fn apply(&mut self, event: Event) {
        let mut effects = Vec::new();
        let moved_before = self.core.counters().moved_blocks;
        self.core.apply(self.now, event, &mut effects);
        self.core.audit().unwrap_or_else(|broken| panic!("{broken}"));
        self.assert_moved_blocks_are_durable_elsewhere(
            self.core.counters().moved_blocks - moved_before,
            &effects,
        );
        let changed: Vec<BlockKey> = announced(&effects).map(|change| change.key).collect();
        effects.into_iter().for_each(|effect| self.execute(effect));
        descriptions::check(self, changed);
    }

    /// Detaches a device: its operations in flight fail.
    pub(crate) fn detach(&mut self, device: DeviceId) {
        self.lost_devices.insert(device);
        self.apply(Event::DeviceDetached { device });
    }

    /// Attaches a detached device; its blocks are reported in batches.
    pub(crate) fn attach(&mut self, device: DeviceId) {
        const PIECE: usize = 3;
        assert!(self.released.remove(&device), "{device:?} was released");
        let disk = &mut self.disks[usize::from(device.0)];
        // Opening syncs the device before it reads: an agent must not see less than a later sync makes durable.
        disk.synced(disk.covered());
        let (mut pool, stored, _) = disk.recover();
        pool.allow_lending();
        self.recovered.extend(stored.iter().map(|block| block.key));
        self.apply(Event::DeviceAttached { device, pool: Box::new(pool) });
        for blocks in stored.chunks(PIECE) {
            self.apply(Event::Recovered { device, blocks: blocks.to_vec() });
        }
    }

    /// Advances the time, with the ticks that the core requests.
    pub(crate) fn pass(&mut self, time: Duration) {
        let until = self.now.after(time);
        let mut ticks = 0;
        while let Some(deadline) = self.core.next_deadline().filter(|deadline| *deadline <= until) {
            self.now = self.now.max(deadline);
            self.apply(Event::Tick);
            ticks += 1;
            assert!(ticks < 10_000, "time must pass between ticks");
        }
        self.now = until;
    }

    /// Reads everything that engines and peers may read.
    pub(crate) fn read_all(&self) {
        for engine in self.engines.values() {
            engine.read_all(&self.memory, |key, tag| self.assert_committed(key, tag));
            self.read_pinned(engine);
        }
    }

    pub(crate) fn open_session(&mut self, tenant: TenantId, layout: Layout) -> SessionId {
        self.open_session_near(tenant, layout, None)
    }

    pub(crate) fn open_session_near(
        &mut self,
        tenant: TenantId,
        layout: Layout,
        gpu: Option<DevicePlace>,
    ) -> SessionId {
        self.sessions += 1;
        let session = SessionId(self.sessions);
        self.engines.insert(session, Engine::new(tenant, layout));
        let namespace = NamespaceDigest([0; 32]);
        self.apply(Event::SessionOpened(SessionOpened { session, tenant, namespace, layout, gpu }));
        session
    }

    pub(crate) fn close_session(&mut self, session: SessionId) {
        self.engines.remove(&session);
        self.apply(Event::SessionClosed { session });
    }

    pub(crate) fn request(&mut self, session: SessionId, kind: RequestKind, body: Request) -> RequestId {
        let request = self.engines.get_mut(&session).expect("an open session").add_request(kind);
        self.note_keys(session, &body);
        let received = self.now;
        self.apply(Event::Request { session, request, body, received });
        request
    }

    pub(crate) fn reserve(&mut self, session: SessionId, count: u32) {
        self.request(
            session,
            RequestKind::Reserve(count),
            Request::Reserve { count, kind: PlaceKind::Arena },
        );
    }

    /// Fills reserved slots with new contents and commits them under these keys, as far as slots are
    /// available.
    pub(crate) fn commit(&mut self, session: SessionId, keys: &[BlockKey], priority: Priority) -> RequestId {
        self.commit_after(session, keys, priority, None)
    }

    pub(crate) fn match_keys(&mut self, session: SessionId, keys: &[BlockKey], scope: Scope) -> RequestId {
        self.match_at(session, keys, Some(0), scope)
    }

    pub(crate) fn load(
        &mut self,
        session: SessionId,
        keys: &[BlockKey],
        deadline: Duration,
        scope: Scope,
    ) -> RequestId {
        let wait = if deadline.is_zero() { self.setup.settings.load_deadline_default } else { deadline };
        let kind = RequestKind::Load { keys: keys.to_vec(), answer_by: self.now.after(wait) };
        let body =
            Request::Load(LoadRequest { keys: keys.to_vec(), deadline, read_bytes: 0, scope, public: None });
        self.request(session, kind, body)
    }

    pub(crate) fn release(&mut self, session: SessionId, load: LoadId) {
        let engine = self.engines.get_mut(&session).expect("an open session");
        engine.loads.remove(&load).expect("a held load");
        self.request(session, RequestKind::Release, Request::Release { load });
    }

    /// Reports blocks of a held load as suspect.
    pub(crate) fn suspect(&mut self, session: SessionId, load: LoadId, blocks: Vec<u32>) {
        self.request(session, RequestKind::Other, Request::Suspect { load, blocks });
    }

    pub(crate) fn peer_request(&mut self, keys: &[BlockKey], layout: Layout, deadline: Duration) -> ServeId {
        self.peer_request_of(TenantId::DEFAULT, keys, layout, deadline)
    }

    pub(crate) fn peer_request_of(
        &mut self,
        tenant: TenantId,
        keys: &[BlockKey],
        layout: Layout,
        deadline: Duration,
    ) -> ServeId {
        let serve = self.serve_ids.next();
        self.serves.insert(serve, PeerServe::new(keys.to_vec(), layout));
        let request = PeerRequest { serve, tenant, layout, keys: keys.to_vec(), deadline };
        self.apply(Event::PeerRequest(request));
        self.remove_ended_serves();
        serve
    }

    /// Sends part of a serve's block, or reports the end of the block.
    pub(crate) fn send(&mut self, serve: ServeId, block: u32) {
        let Some(mut state) = self.serves.remove(&serve) else { return };
        let sent = state.send(block, &self.memory, |key, tag| self.assert_committed(key, tag));
        let state = self.serves.entry(serve).or_insert(state);
        if !sent && state.is_sent(block) {
            state.blocks[block as usize].state = SendState::Ended;
            self.apply(Event::Peer(PeerEvent::ServeDone { serve, block }));
        }
        self.remove_ended_serves();
    }

    /// Offers blocks of a peer; returns the accepted indices and the delay.
    pub(crate) fn peer_offer(
        &mut self,
        from: NodeId,
        tenant: TenantId,
        layout: Layout,
        keys: &[BlockKey],
    ) -> (Vec<u32>, Duration) {
        let offer = PeerOfferId(self.offer_answers.len() as u64);
        self.apply(Event::PeerOffer(PeerOffer { offer, from, tenant, layout, keys: keys.to_vec() }));
        self.offer_answers.get(&offer).expect("an offer is answered at once").clone()
    }

    /// Checks that blocks that were moved away are durable on a peer.
    fn assert_moved_blocks_are_durable_elsewhere(&self, moved: u64, effects: &[Effect]) {
        let dropped = announced(effects)
            .filter(|change| (change.tier, change.change) == (Tier::Nvme, Change::Removed))
            .filter(|change| self.peers.is_durable(&change.key, None));
        assert!(dropped.count() as u64 >= moved, "a moved block without another copy was dropped");
    }

    /// Adds a replica on a peer. One that the peer holds keeps its content, which may be on its way.
    pub(crate) fn add_peer_replica(&mut self, node: NodeId, key: BlockKey, tier: Tier) {
        let held = self.peers.held.get(&node).and_then(|held| held.get(&key));
        let tag = match held {
            Some((tag, _)) => *tag,
            None => self.new_tag(key),
        };
        self.peers.held.entry(node).or_default().insert(key, (tag, tier));
    }

    fn execute(&mut self, effect: Effect) {
        match effect {
            Effect::Reply { session, request, reply } => {
                self.assert_leases_are_unused(&reply);
                if let Reply::Reserved { leases, .. } = &reply {
                    let slots = leases.iter().filter_map(|(_, place)| place.arena());
                    slots.for_each(|slot| self.assert_unused(slot));
                }
                self.assert_own_regions(session, &reply);
                let now = self.now;
                self.engine(session, |engine| engine.on_reply(request, reply, now));
            }
            Effect::Durable { session, ticket, durable, lost } => {
                self.engine(session, |engine| engine.on_notice(ticket, durable, lost));
            }
            Effect::Progress { session, entry, update } => {
                self.engine(session, |engine| engine.on_progress(entry, &update));
            }
            Effect::Device { device, op } => {
                let covered = self.disks[usize::from(device.0)].covered();
                self.jobs.push(Job::Device { device, op, covered });
            }
            Effect::ReadBlocks { device, batch } => {
                for read in batch.blocks {
                    self.assert_unused(read.slot);
                    self.jobs.push(Job::Read { device, read, layout: batch.layout, layers: 0 });
                }
            }
            Effect::PromoteReads { fills, .. } => self.promoted.extend(fills),
            Effect::RenewRegion { region } => {
                let mut slots = self.engines.values().flat_map(Engine::slots);
                assert!(!slots.any(|slot| slot.region == region), "{region:?} is in use");
                self.jobs.push(Job::Renew(region));
            }
            Effect::AwaitExtents { holder } => self.jobs.push(Job::AwaitExtents(holder)),
            Effect::DeviceReleased { device } => {
                self.assert_no_extents_on(device);
                let of_it = |job: &Job| matches!(job, Job::Device { device: on, .. } | Job::Read { device: on, .. } if *on == device);
                assert!(!self.jobs.iter().any(of_it), "{device:?} is released with operations in flight");
                self.lost_devices.remove(&device);
                assert!(self.released.insert(device), "a device is released once");
            }
            Effect::PeerFetch { node, request: FetchRequest { layout, blocks, tenant, .. } } => {
                for FetchBlock { fill, key, into: slot } in blocks {
                    self.assert_unused(slot);
                    self.jobs.push(Job::Fetch { node, tenant, fill, key, slot, layout, layers: 0 });
                }
            }
            Effect::CopyBlocks(batch) => self.begin_copies(batch),
            Effect::CheckBlock(check) => self.jobs.push(Job::Check(check)),
            Effect::Lookup { lookup, keys, .. } => self.jobs.push(Job::Lookup { lookup, keys }),
            Effect::Announce { changes } => {
                for change in changes {
                    let replica = (change.key, change.tier);
                    let new = match change.change {
                        Change::Added => self.announced.insert(replica),
                        Change::Removed => self.announced.remove(&replica),
                    };
                    assert!(new, "{change:?} changes nothing");
                }
            }
            Effect::Inventory { replicas, .. } => self.announced = replicas.into_iter().collect(),
            Effect::ServeHeader { serve, block, checksums, .. } => {
                self.serve(serve, |serve| serve.on_header(block, checksums));
            }
            Effect::ServeObjects(objects) => self.serve(objects.serve, |serve| serve.on_objects(objects)),
            Effect::ServeAbsent { serve, block } => self.serve(serve, |serve| serve.on_absent(block)),
            Effect::Place { place, keys, slot_bytes, reason, .. } => {
                self.jobs.push(Job::Place { place, keys, slot_bytes, reason });
            }
            Effect::Offer { node, offer } => self.jobs.push(Job::Offer { node, offer }),
            Effect::AnswerOffer { offer, taken, retry_after } => {
                let answered = self.offer_answers.insert(offer, (taken, retry_after));
                assert!(answered.is_none(), "an offer is answered at most once");
            }
            Effect::Diagnostic(report) => {
                if let Diagnostic::DeviceLost { device, .. } = &report {
                    self.lost_devices.insert(*device);
                }
                self.reports.push(report);
            }
        }
    }

    /// Checks that an allocated slot is not in use.
    pub(crate) fn assert_unused(&self, slot: ArenaSlot) {
        let of_jobs = self.jobs.iter().filter_map(|job| match job {
            Job::Device { op, .. } => match &op.kind {
                DeviceOpKind::WriteBlock { slot, .. } => Some(*slot),
                _ => None,
            },
            Job::Read { read, .. } => Some(read.slot),
            Job::Fetch { slot, .. } => Some(*slot),
            Job::Check(check) => Some(check.slot),
            Job::Copy { copy, .. } => Some(copy.into),
            Job::Lookup { .. } | Job::Place { .. } | Job::Offer { .. } => None,
            Job::ExtentWrite(_) | Job::AwaitExtents(_) | Job::Renew(_) => None,
        });
        let mut used =
            of_jobs.chain(self.copy_sources()).chain(self.engines.values().flat_map(Engine::slots));
        assert!(!used.any(|other| overlap(slot, other)), "{slot:?} was allocated while in use");
        assert!(!self.serves.values().any(|serve| serve.uses(slot)), "{slot:?} is still being sent");
        assert!(slot.offset + slot.bytes <= self.setup.region_bytes, "{slot:?} lies outside its region");
    }

    pub(crate) fn assert_committed(&self, key: &BlockKey, tag: Tag) {
        let is_own = self.committed_tags.get(key).is_some_and(|tags| tags.contains(&tag));
        assert!(is_own || self.may_be_copy(key, tag), "{key}: content {tag} was never committed");
    }

    pub(crate) fn new_tag(&mut self, key: BlockKey) -> Tag {
        self.tags += 1;
        self.committed_tags.entry(key).or_default().insert(self.tags);
        self.tags
    }

    fn engine(&mut self, session: SessionId, act: impl FnOnce(&mut Engine)) {
        act(self.engines.get_mut(&session).expect("effects refer to open sessions"));
    }

    fn serve(&mut self, serve: ServeId, act: impl FnOnce(&mut PeerServe)) {
        act(self.serves.get_mut(&serve).expect("effects refer to open serves"));
    }

    fn remove_ended_serves(&mut self) {
        self.serves.retain(|_, serve| !serve.is_over());
    }
}

/// Replica changes announced by effects.
fn announced(effects: &[Effect]) -> impl Iterator<Item = &ReplicaChange> {
    let changes = effects.iter().filter_map(|effect| match effect {
        Effect::Announce { changes } => Some(changes),
        _ => None,
    });
    changes.flatten()
}
