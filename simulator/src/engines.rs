//! The engines of one agent: their sessions, and what each of them reads.

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_agent_core::effect::{
    ArenaSlot, LoadId, PlaceKind, ProgressEntry, ProgressUpdate, Reply, Ticket,
};
use reprise_agent_core::event::{CommitItem, Request, RequestId, Scope};
use reprise_policy::{BlockKey, Layout, SessionId, TenantId, Tick, Tier};

use crate::engine::{Engine, ExtentAnswer, RequestKind};
use crate::environment::Environment;
use crate::memory::Memory;
use crate::network::Host;
use crate::observation::Observation;
use crate::replicas::AnnouncedReplicas;
use crate::setup::{CLOCK_GRAIN, LOOKUP_TIMEOUT, tenant_of};
use crate::simulation::{Action, AgentStep};

/// Requests for extents wait for operations on devices, which take any time during faults. The checks after the faults
/// find those without an answer.
const DEVICE_TIME: Duration = Duration::from_secs(3600);

fn is_extent(item: &CommitItem) -> bool {
    item.lease.kind() == PlaceKind::Extent
}

/// The engines of one agent; see the module.
#[derive(Debug)]
pub(crate) struct Engines {
    node: usize,
    pub(crate) sessions: BTreeMap<SessionId, Engine>,
    /// The session of each engine, by the engine's index.
    pub(crate) seats: Vec<Option<SessionId>>,
    begun: u64,
}

impl Engines {
    pub(crate) fn new(node: usize, seats: usize) -> Engines {
        Engines { node, sessions: BTreeMap::new(), seats: vec![None; seats], begun: 0 }
    }

    pub(crate) fn node(&self) -> usize {
        self.node
    }

    /// Opens a session of an engine.
    pub(crate) fn open(&mut self, seat: usize, tenant: TenantId, layout: Layout) -> SessionId {
        self.begun += 1;
        let session = SessionId(self.begun);
        self.sessions.insert(session, Engine::new(tenant, layout));
        self.seats[seat] = Some(session);
        session
    }

    /// Ends the process of an engine, which closes its socket.
    pub(crate) fn close(&mut self, env: &mut Environment, session: SessionId) {
        let Some(engine) = self.sessions.remove(&session) else { return };
        self.seats.iter_mut().for_each(|seat| *seat = seat.filter(|of| *of != session));
        let delay = env.rng.micros(1..200) + engine.last_sent.since(env.now);
        env.later(self.node, delay, AgentStep::Closed { session });
    }

    /// Returns an open session.
    pub(crate) fn session(&mut self, session: SessionId) -> &mut Engine {
        self.sessions.get_mut(&session).expect("an open session")
    }

    /// Sends a request; the socket preserves the order.
    pub(crate) fn ask(
        &mut self,
        env: &mut Environment,
        session: SessionId,
        asked: RequestKind,
        body: Request,
    ) {
        self.request(env, session, asked, body);
    }

    /// As [`Engines::ask`]; returns the id that the answer names.
    pub(crate) fn request(
        &mut self,
        env: &mut Environment,
        session: SessionId,
        asked: RequestKind,
        body: Request,
    ) -> RequestId {
        let at = env.now.after(env.rng.micros(1..100));
        let (node, life) = (self.node, env.host(Host::Node(self.node)).life);
        let engine = self.session(session);
        let request = engine.ask(asked);
        engine.last_sent = at.max(engine.last_sent);
        let (at, what) = (engine.last_sent, AgentStep::Request { session, request, body });
        env.queue.push(at, Action::Agent { node, life, what });
        request
    }

    /// Reports blocks as corrupt.
    pub(crate) fn suspect(
        &mut self,
        env: &mut Environment,
        session: SessionId,
        (load, blocks): (LoadId, Vec<u32>),
    ) {
        self.ask(env, session, RequestKind::Other, Request::Suspect { load, blocks });
    }

    /// Records that the agent has a request, and the keys that it must find: those of blocks that a local match
    /// sees, or that a local load has in DRAM.
    pub(crate) fn received(
        &mut self,
        env: &Environment,
        replicas: &AnnouncedReplicas,
        (session, request, body): (SessionId, RequestId, &Request),
    ) {
        let wait = match body {
            Request::Load(load) if load.deadline.is_zero() => env.setup.settings.load_deadline_default,
            Request::Load(load) => load.deadline,
            Request::Match { scope: Scope::Cluster, .. } => {
                LOOKUP_TIMEOUT + reprise_agent_core::limits::LOOKUP_GRACE
            }
            Request::Reserve { kind: PlaceKind::Extent, .. } => DEVICE_TIME,
            Request::Commit(commit) if commit.items.iter().any(is_extent) => DEVICE_TIME,
            _ => Duration::ZERO,
        };
        let Some(engine) = self.sessions.get_mut(&session) else { return };
        let tenant = engine.tenant;
        let places = |keys: &[BlockKey], held: &dyn Fn(&BlockKey) -> bool| -> Vec<usize> {
            let of_tenant = keys.iter().enumerate().filter(|(_, key)| tenant_of(key) == tenant && held(key));
            of_tenant.map(|(place, _)| place).collect()
        };
        let held = match body {
            Request::Match { keys, scope: Scope::Local, .. } => {
                places(keys, &|key| replicas.has(key, Tier::Dram) || replicas.has(key, Tier::Nvme))
            }
            Request::Load(load) if load.scope == Scope::Local => {
                places(&load.keys, &|key| replicas.has(key, Tier::Dram))
            }
            _ => Vec::new(),
        };
        let now = env.time(Host::Node(self.node));
        engine.received(request, now.after(wait).after(CLOCK_GRAIN), held);
    }

    /// Handles an answer; returns one about extents to an open session.
    pub(crate) fn on_reply(
        &mut self,
        env: &Environment,
        (session, request): (SessionId, RequestId),
        reply: &Reply,
    ) -> Option<ExtentAnswer> {
        let host = Host::Node(self.node);
        let engine = self.sessions.get_mut(&session)?;
        engine.on_reply(request, reply, env.time(host), env.host(host).resumed)
    }

    pub(crate) fn on_progress(&mut self, session: SessionId, entry: ProgressEntry, update: &ProgressUpdate) {
        if let Some(engine) = self.sessions.get_mut(&session) {
            engine.on_progress(entry, update);
        }
    }

    /// Returns the load of an entry of a session's progress page.
    pub(crate) fn load_at(&self, session: SessionId, entry: ProgressEntry) -> Option<LoadId> {
        self.sessions.get(&session)?.load_at(entry)
    }

    /// Handles the notice for a ticket; returns the keys that are durable.
    pub(crate) fn on_notice(
        &mut self,
        session: SessionId,
        (ticket, durable, lost): (Ticket, u32, &[BlockKey]),
    ) -> Vec<BlockKey> {
        let engine = self.sessions.get_mut(&session);
        engine.map_or_else(Vec::new, |engine| engine.on_notice(ticket, durable, lost))
    }

    /// Lets all engines read their blocks; they report mismatches to the agent.
    pub(crate) fn read_all(&mut self, env: &mut Environment, memory: &Memory) {
        let mut suspects = Vec::new();
        for (session, engine) in &mut self.sessions {
            let read = |key: &BlockKey, content| env.observe(Observation::BlockRead { key: *key, content });
            let damaged = engine.read_all(memory, read);
            suspects.extend(damaged.into_iter().map(|(load, block)| (*session, load, block)));
        }
        for (session, load, block) in suspects {
            env.count("suspects");
            self.suspect(env, session, (load, vec![block]));
        }
    }

    /// Checks that no request is late.
    pub(crate) fn assert_in_time(&self, now: Tick) {
        let late = self.sessions.values().find_map(|engine| engine.overdue(now));
        assert!(late.is_none(), "node {}: no answer in time to {}", self.node, late.unwrap_or_default());
    }

    /// Returns the slots that engines may write or read.
    pub(crate) fn slots(&self) -> impl Iterator<Item = ArenaSlot> {
        self.sessions.values().flat_map(Engine::slots)
    }
}
