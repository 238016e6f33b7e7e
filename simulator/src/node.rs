//! A node: a host with disks, and at times an agent's process, which runs the production core.
//!
//! A step of the process is routed to its part: the client of the control plane, fetches and serves, offers, jobs,
//! engines. What follows from it runs in the same step, in order. Every event of the core passes through
//! `Node::apply`: the core decides, its audit and the checks of the node run, and its effects are executed. A
//! process's memory dies with it; the disks survive.
//!
//! A step knows its own node and the environment. It notes an [`Observation`] for each check of the whole simulation.

use std::collections::{BTreeSet, VecDeque};
use std::time::Duration;

use reprise_agent_core::AgentCore;
use reprise_agent_core::effect::{
    ArenaSlot, Change, Diagnostic, Effect, FetchRequest, Offer, RegionId, ReplicaChange, Reply,
};
use reprise_agent_core::event::{Event, Grant, Request, RequestId, Scope};
use reprise_agent_core::extents::ExtentHolder;
use reprise_agent_core::limits::PLACE_KEYS_MAX;
use reprise_policy::{BlockKey, NodeId, SessionId, SlotSet, TenantId, Tick};

use crate::client::Client;
use crate::counted::count_all;
use crate::disk::{Disk, DiskWrite};
use crate::engine::ExtentAnswer;
use crate::engines::Engines;
use crate::environment::Environment;
use crate::extent_driver::is_of_flaw;
use crate::extents::{Extents, written_bytes};
use crate::jobs::{Job, Jobs};
use crate::memory::{Memory, overlap};
use crate::messages::{CallId, PeerMessage, Reply as MemberReply};
use crate::network::{Host, LineId};
use crate::observation::Observation;
use crate::offers::Offers;
use crate::outcomes::{Follow, Outcomes};
use crate::peers::{PeerLines, Peers};
use crate::placement_audit::{PlacementAudit, STALE_IN_CALM_MAX, STALE_MAX, grant_for_offer};
use crate::replicas::{AnnouncedReplicas, DurableBlocks};
use crate::setup::{Setup, Variant};
use crate::simulation::AgentStep;
use crate::tenants::TenantAudit;
use crate::timed;

/// A node; see the module.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) index: usize,
    /// Failure domain of the node; empty if unknown.
    pub(crate) failure_domain: String,
    pub(crate) process: Option<Process>,
    pub(crate) disks: Vec<Disk>,
    /// Processes that access the disks themselves: they outlive the agent.
    pub(crate) extents: Extents,
    pub(crate) durable: DurableBlocks,
}

/// State of a running agent.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) core: AgentCore,
    pub(crate) memory: Memory,
    pub(crate) replicas: AnnouncedReplicas,
    pub(crate) jobs: Jobs,
    pub(crate) engines: Engines,
    pub(crate) client: Client,
    lines: PeerLines,
    pub(crate) peers: Peers,
    pub(crate) offers: Offers,
    tenants: TenantAudit,
    /// Tenants whose names the agent knows.
    pub(crate) names: BTreeSet<TenantId>,
    pub(crate) placed: PlacementAudit,
    /// Holders whose I/O on extents must end.
    pub(crate) awaited: BTreeSet<ExtentHolder>,
    /// Time of the core's next tick.
    tick_at: Option<Tick>,
}

impl Node {
    pub(crate) fn new(index: usize, setup: &Setup) -> Node {
        let size = (setup.disk_bytes, setup.segment_bytes);
        let disk = |device: usize| Disk::format(size, device as u8, index as u64 * 1000 + device as u64);
        Node {
            index,
            failure_domain: String::new(),
            process: None,
            disks: (0..setup.disks).map(disk).collect(),
            extents: Extents::new(index),
            durable: DurableBlocks::default(),
        }
    }

    pub(crate) fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("only a running agent gets events")
    }

    /// Starts an agent on the node's disks, with their current contents.
    pub(crate) fn start(&mut self, env: &mut Environment) {
        let node = self.index;
        env.begin_process(Host::Node(node));
        for disk in &mut self.disks {
            // As `device/open.rs` does before it reads.
            if env.setup.variant != Variant::DurableBeforeSync {
                disk.synced(disk.covered());
            }
        }
        let pools = self.disks.iter().map(|disk| {
            let (mut pool, stored, _) = disk.recover();
            if env.setup.extents {
                pool.allow_lending();
            }
            (pool, stored)
        });
        let pools: Vec<_> = pools.collect();
        let regions: Vec<_> =
            (0..env.setup.regions).map(|region| (RegionId(region), env.setup.region_bytes)).collect();
        let (core, effects) = AgentCore::new(env.setup.settings.clone(), pools, &regions);
        core.audit().unwrap_or_else(|broken| panic!("{broken}"));
        self.process = Some(Process {
            core,
            memory: Memory::default(),
            replicas: AnnouncedReplicas::default(),
            jobs: Jobs::new(node),
            engines: Engines::new(node, env.setup.engines),
            client: Client::new(node, self.failure_domain.clone()),
            lines: PeerLines::new(node),
            peers: Peers::new(node),
            offers: Offers::new(node),
            tenants: TenantAudit::default(),
            names: env.setup.names.clone(),
            placed: PlacementAudit::default(),
            awaited: BTreeSet::new(),
            tick_at: None,
        });
        effects.into_iter().for_each(|effect| self.execute(env, effect));
        // No link is registered yet, so nothing is sent: the simulation learns the core's blocks.
        let mut out = Outcomes::default();
        out.event(Event::InventoryWanted { slots: Box::new(SlotSet::ALL) });
        self.run(env, out);
        let process = self.process();
        process.client.reports.take_state(env, &process.core);
        env.later(node, Duration::ZERO, AgentStep::Follow);
    }

    /// Ends the process: `SIGKILL`, or power loss. Returns the writes to each disk that have not ended.
    pub(crate) fn end(&mut self, env: &mut Environment) -> Option<Vec<Vec<DiskWrite>>> {
        let process = self.process.take()?;
        count_all(&mut env.seen, &process.core);
        let devices = 0..self.disks.len();
        let running = devices.map(|device| process.jobs.writes(device, &process.memory).collect());
        env.end_process(Host::Node(self.index));
        Some(running.collect())
    }

    // ---- steps --------------------------------------------------------------------------------------------

    /// Runs a step of the process.
    pub(crate) fn step(&mut self, env: &mut Environment, what: AgentStep) {
        let mut out = Outcomes::default();
        if let Some(what) = self.process().client.step(env, what, &mut out) {
            self.step_of_agent(env, what, &mut out);
        }
        self.run(env, out);
    }

    fn step_of_agent(&mut self, env: &mut Environment, what: AgentStep, out: &mut Outcomes) {
        let process = self.process.as_mut().expect("only a running agent gets events");
        match what {
            AgentStep::Tick => {
                process.tick_at = None;
                out.event(Event::Tick);
            }
            AgentStep::Job(job) => {
                out.event(process.jobs.advance(env, job, &mut self.disks, &mut process.memory));
            }
            AgentStep::Request { session, request, body } => {
                let event = process.request_arrives(env, (session, request), body);
                out.event(event);
            }
            AgentStep::Closed { session } => out.event(Event::SessionClosed { session }),
            AgentStep::Event(Event::Budget(grant)) => process.grant_arrives(env, grant, out),
            AgentStep::Event(event) => out.event(event),
            AgentStep::Order { epoch, grant } => {
                let before = process.grant_of(grant.tenant);
                process.grant_arrives(env, grant, out);
                out.next.push(Follow::Granted { epoch, tenant: grant.tenant, before });
            }
            AgentStep::DomainChanged => {
                process.client.links.domain_changed(env, &self.failure_domain, out);
            }
            AgentStep::PollExtents => self.poll_extents(env, out),
            AgentStep::ReportState => process.client.reports.take_state(env, &process.core),
            AgentStep::FetchDeadline(fetch) => {
                process.peers.fetch_deadline(env, &mut process.lines, fetch, out);
            }
            AgentStep::OfferDeadline(offer) => {
                process.offers.deadline(env, &mut process.lines, offer, out);
            }
            AgentStep::Send { serve, block } => {
                process.peers.send_objects(env, &process.memory, (serve, block), out);
            }
            other => unreachable!("not a step of the client: {other:?}"),
        }
    }

    /// Handles a member's answer to a call.
    pub(crate) fn on_answer(&mut self, env: &mut Environment, call: CallId, reply: MemberReply) {
        let mut out = Outcomes::default();
        self.process().client.on_answer(env, (call, reply), &mut out);
        self.run(env, out);
    }

    /// Handles another agent's message.
    pub(crate) fn on_peer_message(&mut self, env: &mut Environment, line: LineId, message: PeerMessage) {
        let mut out = Outcomes::default();
        let process = self.process();
        match message {
            PeerMessage::Offer(offer) => process.offered(env, line, *offer, &mut out),
            PeerMessage::OfferAnswer { offer, taken, retry_after } => {
                let answer = (offer, taken, retry_after);
                process.offers.answered(env, &mut process.placed, answer, &mut out);
            }
            message => process.peers.on_message(env, &mut process.memory, (line, message), &mut out),
        }
        self.run(env, out);
    }

    /// Handles the end of a connection.
    pub(crate) fn line_lost(&mut self, env: &mut Environment, line: LineId) {
        let mut out = Outcomes::default();
        let process = self.process();
        process.client.line_lost(line, &mut out);
        process.lines.forget(line);
        process.peers.line_lost(line, &mut out);
        process.offers.line_lost(line, &mut out);
        self.run(env, out);
    }

    /// Runs what follows a step. The consequences of one outcome come before the next one.
    pub(crate) fn run(&mut self, env: &mut Environment, out: Outcomes) {
        let mut due = VecDeque::from(out.next);
        while let Some(next) = due.pop_front() {
            let mut out = Outcomes::default();
            self.follow(env, next, &mut out);
            out.next.into_iter().rev().for_each(|next| due.push_front(next));
        }
    }

    fn follow(&mut self, env: &mut Environment, next: Follow, out: &mut Outcomes) {
        let process = self.process.as_mut().expect("only a running agent gets events");
        match next {
            Follow::Event(event) => self.apply(env, event, out),
            Follow::Client(follow) => process.client.follow(env, follow, out),
            Follow::EndServe(serve) => process.peers.forget_serve(serve),
            Follow::Refused(words) => process.placed.note_refusal(env, words),
            Follow::Directed(epoch, direction) => process.placed.note_mode(epoch, &direction),
            Follow::MoveAnswered { to, enough, answer } => {
                let before: BTreeSet<BlockKey> =
                    self.durable.reported.intersection(&enough).copied().collect();
                process.placed.allow_drops(before.len());
                out.event(answer);
                out.next.push(Follow::MoveApplied { to, before });
            }
            Follow::MoveApplied { to, before } => {
                process.placed.allow_drops(0);
                let dropped = before.difference(&self.durable.reported).copied();
                let keys: Vec<BlockKey> = dropped.collect();
                if !keys.is_empty() {
                    env.count("moves with a drop");
                }
                if let Some(hosts) = process.placed.moves_to.get(&to).cloned() {
                    env.observe(Observation::BlocksMoved { node: self.index, hosts, keys });
                }
            }
            Follow::Granted { epoch, tenant, before } => {
                if before != process.grant_of(tenant) {
                    let node = self.index;
                    env.observe(Observation::GrantApplied { node, tenant, epoch, before });
                }
            }
        }
    }

    // ---- the core -----------------------------------------------------------------------------------------

    /// Applies an event to the core, runs the checks, and executes the effects.
    fn apply(&mut self, env: &mut Environment, event: Event, out: &mut Outcomes) {
        let node = self.index;
        let now = env.time(Host::Node(node));
        let mut effects = Vec::new();
        let process = self.process();
        process.peers.before_event(&event);
        process.placed.before_event(env, now, &process.core, &event);
        let offered = match &event {
            Event::PeerOffer(offer) => Some(offer.offer),
            _ => None,
        };
        process.core.apply(now, event, &mut effects);
        if env.is_audit_due() {
            process.core.audit().unwrap_or_else(|broken| panic!("node {node}: {broken}"));
        }
        let mut durable = Vec::new();
        for effect in effects {
            if let Effect::Durable { session, ticket, durable: count, lost } = &effect {
                let engines = &mut self.process().engines;
                durable.extend(engines.on_notice(*session, (*ticket, *count, lost)));
                env.count("durable notices");
            } else {
                self.execute(env, effect);
            }
        }
        durable.extend(self.extents.take_durable());
        self.process().replicas.assert_stored(&durable);
        if env.timed.is_none() {
            self.check_readers(env);
        }
        self.after_event(env);
        let process = self.process();
        if let Some(offer) = offered {
            process.offers.assert_answered(offer);
        }
        process.schedule_tick(env);
        process.client.links.pump_all(env, out);
    }

    /// Checks the consequences of an event.
    fn after_event(&mut self, env: &Environment) {
        let host = Host::Node(self.index);
        let now = env.time(host);
        let node = self.index;
        let process = self.process();
        process.placed.after_event(node, &process.core);
        process.offers.assert_bounded(env);
        if env.is_awake(host) && env.host(host).resumed < now {
            process.offers.assert_in_time(now);
            process.client.assert_placements_in_time(now);
        }
        process.tenants.check(env, node, &process.core);
        process.replicas.note_size();
        process.client.assert_queues(env, process.replicas.held_max);
    }

    fn execute(&mut self, env: &mut Environment, effect: Effect) {
        let node = self.index;
        let process = self.process.as_mut().expect("the agent runs");
        match effect {
            Effect::Reply { session, request, reply } => {
                if let Some(answer) = process.reply(env, (session, request), &reply) {
                    self.answer_extents(env, session, answer);
                }
            }
            Effect::Durable { .. } => unreachable!("handled after all effects"),
            Effect::Progress { session, entry, update } => {
                process.engines.on_progress(session, entry, &update);
                timed::note_progress(env, &process.engines, (session, entry), &update);
            }
            Effect::Device { device, op } => {
                let number = usize::from(device.0);
                if let Some(bytes) = written_bytes(&op.kind) {
                    self.extents.assert_writable(number, &bytes);
                }
                let covered = self.disks[number].covered();
                process.jobs.begin(env, &self.disks, Job::Device { device, op, covered });
            }
            Effect::ReadBlocks { device, batch } => {
                for read in batch.blocks {
                    process.assert_unused(env, read.slot);
                    let job = Job::Read { device, read, layout: batch.layout, layers: 0 };
                    process.jobs.begin(env, &self.disks, job);
                }
            }
            // Jobs of this simulation end in random order.
            Effect::PromoteReads { .. } => {}
            Effect::DeviceReleased { .. } => unreachable!("devices of this simulation stay until they fail"),
            Effect::AwaitExtents { holder } => process.await_extents(env, node, holder),
            Effect::CopyBlocks(_) => unreachable!("no tenant of this simulation is public"),
            Effect::RenewRegion { region } => process.jobs.begin(env, &self.disks, Job::Renew(region)),
            Effect::CheckBlock(check) => process.jobs.begin(env, &self.disks, Job::Check(check)),
            Effect::Lookup { lookup, keys, timeout } => {
                let client = &mut process.client;
                client.lookups.start(env, &mut client.links, (lookup, keys), timeout);
            }
            Effect::Announce { changes } => {
                process.replicas.change(&mut self.durable, env.now, &changes);
                process.announce(env, &changes);
            }
            Effect::Inventory { slots, replicas } => {
                process.replicas.inventory(&mut self.durable, env.now, (&slots, &replicas));
                let links = process.client.links.links.values_mut();
                links.for_each(|link| link.announcer.outbox_mut().inventory(&slots, &replicas));
            }
            Effect::PeerFetch { node: from, request } => process.fetch(env, from, request),
            Effect::ServeHeader { serve, block, tier, checksums } => {
                process.peers.serve_header(env, (serve, block), tier, checksums);
            }
            Effect::ServeObjects(objects) => process.peers.serve_objects(env, objects),
            Effect::ServeAbsent { serve, block } => {
                if process.peers.serve_absent(env, serve, block) {
                    process.placed.note_unreadable(env, &process.core);
                }
            }
            Effect::Place { place, keys, slot_bytes, reason, timeout } => {
                let client = &mut process.client;
                let request = (place, keys, slot_bytes, reason);
                client.placements.start(env, &mut client.links, request, timeout);
            }
            Effect::Offer { node: to, offer } => process.offer(env, to, offer),
            Effect::AnswerOffer { offer, taken, retry_after } => {
                process.offers.answer(env, &process.placed, (offer, taken, retry_after));
            }
            Effect::Diagnostic(report) => note_report(env, node, &report),
        }
    }

    // ---- checks -------------------------------------------------------------------------------------------

    /// Lets all readers on the node read their blocks; they report mismatches to the agent.
    pub(crate) fn check_readers(&mut self, env: &mut Environment) {
        let host = Host::Node(self.index);
        let now = env.time(host);
        let excused = !env.is_awake(host) || env.host(host).resumed >= now;
        let Some(process) = &mut self.process else { return };
        process.engines.read_all(env, &process.memory);
        if !excused {
            process.engines.assert_in_time(now);
            process.client.assert_lookups_in_time(now);
        }
    }

    /// Reports whether the node has a block durably, or the directory may not know yet that the block was
    /// removed.
    pub(crate) fn was_durable(&self, env: &Environment, key: &BlockKey) -> bool {
        let settling = env.calm && env.now.since(env.setup.faults_until) < STALE_MAX;
        let stale = if env.calm && !settling { STALE_IN_CALM_MAX } else { STALE_MAX };
        self.durable.reported.contains(key)
            || self.durable.withdrawn.get(key).is_some_and(|at| env.now.since(*at) < stale)
    }
}

impl Process {
    /// Returns the core's last grant for a tenant.
    pub(crate) fn grant_of(&self, tenant: TenantId) -> Option<Grant> {
        self.core.tenant_usage().find(|usage| usage.tenant == tenant)?.grant
    }

    fn grant_arrives(&mut self, env: &mut Environment, grant: Grant, out: &mut Outcomes) {
        self.names.insert(grant.tenant);
        self.placed.note_grant();
        out.event(Event::Budget(self.tenants.grant_arrives(env, grant)));
    }

    fn schedule_tick(&mut self, env: &mut Environment) {
        let Some(due) = self.core.next_deadline() else { return };
        if self.tick_at.is_none_or(|at| due < at) {
            self.tick_at = Some(due);
            env.at(self.node(), due, AgentStep::Tick);
        }
    }

    fn node(&self) -> usize {
        self.engines.node()
    }

    fn request_arrives(
        &mut self,
        env: &mut Environment,
        (session, request): (SessionId, RequestId),
        mut body: Request,
    ) -> Event {
        let received = env.time(Host::Node(self.node()));
        self.engines.received(env, &self.replicas, (session, request, &body));
        if let Request::Match { keys, scope: Scope::Local, .. } = &mut body
            && !self.client.links.is_connected()
        {
            env.count("local matches alone");
            if env.setup.variant == Variant::LocalNeedsControlPlane {
                keys.clear();
            }
        }
        Event::Request { session, request, body, received }
    }

    fn reply(
        &mut self,
        env: &mut Environment,
        of: (SessionId, RequestId),
        reply: &Reply,
    ) -> Option<ExtentAnswer> {
        if is_of_flaw(of.1) {
            return None;
        }
        if let Reply::Reserved { leases, .. } = reply {
            let slots = leases.iter().filter_map(|(_, place)| place.arena());
            slots.for_each(|slot| self.assert_unused(env, slot));
        }
        env.trace.note(|| format!("{} {} ← {reply:?}", of.0.0, of.1.0));
        timed::note_reply(env, self.node(), of.1, reply);
        self.engines.on_reply(env, of, reply)
    }

    fn announce(&mut self, env: &Environment, changes: &[ReplicaChange]) {
        let announced = changes.iter().copied();
        let announced: Vec<_> = match env.setup.variant {
            Variant::EvictionsNotAnnounced => {
                announced.filter(|change| change.change == Change::Added).collect()
            }
            _ => announced.collect(),
        };
        let links = self.client.links.links.values_mut();
        links.for_each(|link| link.announcer.outbox_mut().announce(&announced));
    }

    fn fetch(&mut self, env: &mut Environment, from: NodeId, request: FetchRequest) {
        let Some(host) = self.client.host_of(from) else {
            return self.peers.fail_unroutable_fetch(env, &request.blocks);
        };
        request.blocks.iter().for_each(|block| self.assert_unused(env, block.into));
        let line = self.lines.to(env, host);
        self.peers.fetch(env, line, request);
    }

    fn offer(&mut self, env: &mut Environment, to: NodeId, offer: Offer) {
        let count = offer.keys.len();
        assert!((1..=PLACE_KEYS_MAX).contains(&count), "an offer has {count} blocks");
        let host = self.client.host_of(to).filter(|_| self.names.contains(&offer.tenant));
        let line = host.map(|host| self.lines.to(env, host));
        if line.is_none() {
            self.placed.note_refusal(env, "refused in calm: no name");
        }
        self.offers.offer(env, line, offer);
    }

    fn offered(&mut self, env: &mut Environment, line: LineId, offer: Offer, out: &mut Outcomes) {
        let from: Option<NodeId> = match env.network.line(line).map(|line| line.ends[0].host) {
            Some(Host::Node(host)) => self.client.node_at(host),
            _ => None,
        };
        let (tenant, bytes) = (offer.tenant, offer.layout.slot_bytes() * offer.keys.len() as u64);
        let Some((own, event)) = self.offers.receive(env, (line, from), offer) else { return };
        self.names.insert(own);
        if let Some(grant) = grant_for_offer(env, &self.core, tenant, bytes) {
            out.event(Event::Budget(grant));
        }
        out.event(event);
    }

    /// Checks that an assigned slot is not being written or read.
    fn assert_unused(&self, env: &Environment, slot: ArenaSlot) {
        let jobs = self.jobs.running.values().filter_map(Job::slot);
        let mut used = jobs.chain(self.peers.slots()).chain(self.engines.slots());
        assert!(!used.any(|other| overlap(slot, other)), "{slot:?} was assigned while in use");
        assert!(slot.offset + slot.bytes <= env.setup.region_bytes, "{slot:?} lies outside its region");
    }
}

fn note_report(env: &mut Environment, node: usize, report: &Diagnostic) {
    env.trace.note(|| format!("node {node} reports {report:?}"));
    match report {
        Diagnostic::CorruptBlock { .. } => env.count("corrupt blocks"),
        Diagnostic::CorruptMemory { .. } => env.count("corrupt memory"),
        Diagnostic::DeviceLost { .. } => env.count("devices lost"),
        Diagnostic::WritesStopped { .. } => env.count("devices read-only"),
        Diagnostic::TenantErased { .. } => env.count("tenants erased"),
        Diagnostic::Unstorable { .. }
        | Diagnostic::Overcommitted { .. }
        | Diagnostic::OffersRefused { .. } => {}
    }
}
