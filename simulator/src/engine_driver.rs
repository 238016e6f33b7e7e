//! Random actions of engines: open sessions, reserve, commit, match, load, release, die.

use std::time::Duration;

use reprise_agent_core::effect::{LoadId, PlaceKind};
use reprise_agent_core::event::{
    CommitItem, CommitRequest, Event, LoadRequest, Priority, Request, Scope, SessionOpened,
};
use reprise_policy::{BlockKey, Layout, NamespaceDigest, SessionId, TenantId};

use crate::engine::{Engine, RequestKind};
use crate::memory::{Tag, checksums};
use crate::network::Host;
use crate::setup::{KEYS, Variant, key, large_layout, small_layout};
use crate::simulation::{Action, AgentStep, Simulation};

/// An engine releases slots and loads after this time, long before the agent reclaims them.
const HELD_MAX: Duration = Duration::from_secs(5);

impl Simulation {
    /// Runs one action of an engine and schedules the next one.
    pub(crate) fn drive_engine(&mut self, node: usize, seat: usize) {
        if self.env.calm {
            return;
        }
        let pace = self.env.setup.pace.as_micros() as u64;
        let delay = self.env.rng.micros(pace / 4..pace * 7 / 4);
        self.env.after(delay, Action::Engine { node, seat });
        let awake = self.env.is_awake(Host::Node(node));
        let Some(process) = &self.nodes[node].process else { return };
        match process.seats[seat] {
            Some(session) => self.act(node, session),
            None if awake => self.open_session(node, seat),
            None => {}
        }
        self.check_readers(node);
    }

    pub(crate) fn open_session(&mut self, node: usize, seat: usize) {
        let layout = if self.env.rng.chance(300) { small_layout() } else { large_layout() };
        let tenant = TenantId(self.env.rng.below(usize::from(self.env.setup.tenants)) as u16);
        let process = self.process(node);
        process.sessions_begun += 1;
        let session = SessionId(process.sessions_begun);
        process.sessions.insert(session, Engine::new(tenant, layout));
        process.seats[seat] = Some(session);
        process.names.insert(tenant);
        let namespace = NamespaceDigest([tenant.0 as u8; 32]);
        let tenant = match self.env.setup.variant {
            Variant::TenantsMerged => TenantId::DEFAULT,
            _ => tenant,
        };
        self.apply(node, Event::SessionOpened(SessionOpened { session, tenant, namespace, layout }));
    }

    /// Ends the process of an engine, which closes its socket.
    pub(crate) fn close_session(&mut self, node: usize, session: SessionId) {
        let process = self.process(node);
        let Some(engine) = process.sessions.remove(&session) else { return };
        process.seats.iter_mut().for_each(|seat| *seat = seat.filter(|of| *of != session));
        let delay = self.env.rng.micros(1..200) + engine.last_sent.since(self.env.now);
        self.env.later(node, delay, AgentStep::Closed { session });
    }

    fn act(&mut self, node: usize, session: SessionId) {
        self.release_old(node, session);
        let engine = self.engine(node, session);
        let (tenant, layout) = (engine.tenant, engine.layout);
        let keys = self.draw_keys(tenant, layout);
        match self.env.rng.below(100) {
            0..22 => {
                let count = 1 + self.env.rng.below(4) as u32;
                self.ask(
                    node,
                    session,
                    RequestKind::Reserve(count),
                    Request::Reserve { count, kind: PlaceKind::Arena },
                );
            }
            22..45 => self.commit(node, session, &keys),
            45..50 => self.abort(node, session, 2),
            50..52 => self.request_other_tenant(node, session, layout),
            52..60 => {
                let scope = self.scope();
                let body = Request::Match { keys: keys.clone(), scope };
                self.ask(node, session, RequestKind::Match(keys, scope), body);
            }
            60..80 => self.load(node, session, keys),
            80..97 => self.release(node, session),
            97 => self.ask(node, session, RequestKind::Other, Request::Trim),
            98 => self.ask(node, session, RequestKind::Other, Request::Stats),
            _ => self.suspect_at_random(node, session),
        }
    }

    pub(crate) fn engine(&self, node: usize, session: SessionId) -> &Engine {
        &self.nodes[node].process.as_ref().expect("the agent runs").sessions[&session]
    }

    /// Sends a request; the socket preserves the order.
    pub(crate) fn ask(&mut self, node: usize, session: SessionId, asked: RequestKind, body: Request) {
        let at = self.env.now.after(self.env.rng.micros(1..100));
        let life = self.env.host(Host::Node(node)).life;
        let engine = self.process(node).sessions.get_mut(&session).expect("an open session");
        let request = engine.ask(asked);
        engine.last_sent = at.max(engine.last_sent);
        let (at, what) = (engine.last_sent, AgentStep::Request { session, request, body });
        self.env.queue.push(at, Action::Agent { node, life, what });
    }

    /// Draws a run of a chain, sometimes with a duplicate key.
    pub(crate) fn draw_keys(&mut self, tenant: TenantId, layout: Layout) -> Vec<BlockKey> {
        let start = self.env.rng.below(KEYS as usize / usize::from(self.env.setup.tenants)) as u64;
        let count = 1 + self.env.rng.below(6) as u64;
        let mut keys: Vec<BlockKey> =
            (start..start + count).map(|number| key(tenant, &layout, number)).collect();
        if self.env.rng.chance(50) {
            keys.push(keys[0]);
        }
        keys
    }

    /// Requests blocks of another tenant, if there is one. Keys are secrets of their tenant: a process that
    /// has a key may fetch the block from peers, but must not see blocks on the node.
    fn request_other_tenant(&mut self, node: usize, session: SessionId, layout: Layout) {
        let other = TenantId(self.env.rng.below(usize::from(self.env.setup.tenants)) as u16);
        let keys = self.draw_keys(other, layout);
        if self.env.rng.chance(500) {
            let body = Request::Match { keys: keys.clone(), scope: Scope::Local };
            return self.ask(node, session, RequestKind::Match(keys, Scope::Local), body);
        }
        let load =
            LoadRequest { keys: keys.clone(), deadline: Duration::ZERO, read_bytes: 0, scope: Scope::Local };
        self.ask(node, session, RequestKind::Load(keys), Request::Load(load));
    }

    fn scope(&mut self) -> Scope {
        if self.env.rng.chance(700) { Scope::Cluster } else { Scope::Local }
    }

    /// Fills reserved slots with new contents and commits them under these keys, as far as there are slots.
    pub(crate) fn commit(&mut self, node: usize, session: SessionId, keys: &[BlockKey]) {
        let priority = self.env.rng.one_of(&[Priority::Low, Priority::Normal, Priority::High]);
        let first: Tag = self.tags + 1;
        let process = self.nodes[node].process.as_mut().expect("the agent runs");
        let engine = process.sessions.get_mut(&session).expect("an open session");
        let layout = engine.layout;
        let slots: Vec<_> = engine.reserved.drain(..keys.len().min(engine.reserved.len())).collect();
        let mut items = Vec::new();
        for (((lease, slot, _), key), tag) in slots.into_iter().zip(keys).zip(first..) {
            self.truth.entry(*key).or_default().insert(tag);
            let tags = vec![tag; layout.layers() as usize];
            process.memory.write(slot, layout.layers(), 0..layout.layers(), &tags);
            items.push(CommitItem { lease, key: Some(*key), checksums: checksums(tag, &layout) });
        }
        self.tags += items.len() as u64;
        let committed = keys[..items.len()].to_vec();
        self.ask(
            node,
            session,
            RequestKind::Commit(committed),
            Request::Commit(CommitRequest { items, priority, parent: None }),
        );
    }

    fn abort(&mut self, node: usize, session: SessionId, count: usize) {
        let engine = self.process(node).sessions.get_mut(&session).expect("an open session");
        let count = engine.reserved.len().min(count);
        let leases = engine.reserved.drain(..count).map(|(lease, ..)| lease).collect();
        self.ask(node, session, RequestKind::Other, Request::Abort { leases });
    }

    fn load(&mut self, node: usize, session: SessionId, keys: Vec<BlockKey>) {
        let deadline =
            if self.env.rng.chance(300) { Duration::ZERO } else { self.env.rng.micros(500..200_000) };
        let scope = self.scope();
        let load = LoadRequest { keys: keys.clone(), deadline, read_bytes: 0, scope };
        self.ask(node, session, RequestKind::Load(keys), Request::Load(load));
    }

    fn release(&mut self, node: usize, session: SessionId) {
        let loads: Vec<LoadId> = self.engine(node, session).loads.keys().copied().collect();
        for load in loads {
            if self.env.rng.chance(600) {
                self.release_one(node, session, load);
            }
        }
    }

    fn release_one(&mut self, node: usize, session: SessionId, load: LoadId) {
        self.process(node).sessions.get_mut(&session).expect("open").loads.remove(&load);
        self.ask(node, session, RequestKind::Release, Request::Release { load });
    }

    pub(crate) fn suspect(&mut self, node: usize, session: SessionId, of: (LoadId, Vec<u32>)) {
        let (load, blocks) = of;
        self.ask(node, session, RequestKind::Other, Request::Suspect { load, blocks });
    }

    /// Reports a block as corrupt that may be intact.
    fn suspect_at_random(&mut self, node: usize, session: SessionId) {
        let first = self.engine(node, session).loads.iter().next();
        if let Some((load, blocks)) = first.map(|(load, held)| (*load, held.keys.len())) {
            let block = self.env.rng.below(blocks + 1) as u32;
            self.suspect(node, session, (load, vec![block, 0, block]));
        }
    }

    /// Releases slots and loads that were held for too long.
    fn release_old(&mut self, node: usize, session: SessionId) {
        let now = self.env.time(Host::Node(node));
        let engine = self.engine(node, session);
        let old = engine.reserved.iter().take_while(|(.., since)| now.since(*since) > HELD_MAX).count();
        let loads =
            engine.loads.iter().filter(|(id, load)| now.since(load.since) > HELD_MAX && engine.is_done(**id));
        let loads: Vec<LoadId> = loads.map(|(id, _)| *id).collect();
        if old > 0 {
            self.abort(node, session, old);
        }
        loads.into_iter().for_each(|load| self.release_one(node, session, load));
    }
}
