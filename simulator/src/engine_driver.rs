//! Random actions of engines: open sessions, reserve, commit, match, load, release, die.

use std::time::Duration;

use reprise_agent_core::effect::{LoadId, PlaceKind};
use reprise_agent_core::event::{
    CommitItem, CommitRequest, Event, LoadRequest, Priority, Ranks, Request, Scope, SessionOpened,
};
use reprise_policy::{BlockKey, Layout, NamespaceDigest, SessionId, TenantId};

use crate::engine::RequestKind;
use crate::engines::Engines;
use crate::environment::Environment;
use crate::memory::{Memory, checksums};
use crate::network::Host;
use crate::node::Node;
use crate::observation::Observation;
use crate::outcomes::Outcomes;
use crate::setup::{KEYS, Variant, key, large_layout, small_layout};
use crate::simulation::Action;

/// An engine releases slots and loads after this time, long before the agent reclaims them.
const HELD_MAX: Duration = Duration::from_secs(5);

impl Node {
    /// Runs one action of an engine and schedules the next one.
    pub(crate) fn drive_engine(&mut self, env: &mut Environment, seat: usize) {
        if env.calm {
            return;
        }
        let pace = env.setup.pace.as_micros() as u64;
        let delay = env.rng.micros(pace / 4..pace * 7 / 4);
        env.after(delay, Action::Engine { node: self.index, seat });
        let awake = env.is_awake(Host::Node(self.index));
        let Some(process) = &mut self.process else { return };
        match process.engines.seats[seat] {
            Some(session) => {
                act(&mut process.engines, env, session, &mut process.memory);
                self.drive_extents(env, session);
                if awake {
                    self.drive_layers(env, session);
                }
            }
            None if awake => self.open_session(env, seat),
            None => {}
        }
        self.check_readers(env);
    }

    pub(crate) fn open_session(&mut self, env: &mut Environment, seat: usize) {
        let layout = if env.rng.chance(300) { small_layout() } else { large_layout() };
        let tenant = TenantId(env.rng.below(usize::from(env.setup.tenants)) as u16);
        self.open_session_of(env, seat, tenant, layout);
    }

    /// Opens a session of a tenant, whose blocks have this layout.
    pub(crate) fn open_session_of(
        &mut self,
        env: &mut Environment,
        seat: usize,
        tenant: TenantId,
        layout: Layout,
    ) -> SessionId {
        let process = self.process();
        let session = process.engines.open(seat, tenant, layout);
        process.names.insert(tenant);
        let namespace = NamespaceDigest([tenant.0 as u8; 32]);
        let tenant = match env.setup.variant {
            Variant::TenantsMerged => TenantId::DEFAULT,
            _ => tenant,
        };
        let mut out = Outcomes::default();
        out.event(Event::SessionOpened(SessionOpened { session, tenant, namespace, layout, gpu: None }));
        self.run(env, out);
        session
    }

    /// Fills reserved slots with new contents and commits them under these keys, as far as there are slots.
    pub(crate) fn commit(&mut self, env: &mut Environment, session: SessionId, keys: &[BlockKey]) {
        let process = self.process.as_mut().expect("the agent runs");
        commit(&mut process.engines, env, (session, keys), &mut process.memory);
    }
}

fn act(engines: &mut Engines, env: &mut Environment, session: SessionId, memory: &mut Memory) {
    release_old(engines, env, session);
    let engine = engines.session(session);
    let (tenant, layout) = (engine.tenant, engine.layout);
    let keys = draw_keys(env, tenant, layout);
    match env.rng.below(100) {
        0..22 => {
            let count = 1 + env.rng.below(4) as u32;
            engines.ask(
                env,
                session,
                RequestKind::Reserve(count),
                Request::Reserve { count, kind: PlaceKind::Arena },
            );
        }
        22..45 => commit(engines, env, (session, &keys), memory),
        45..50 => abort(engines, env, session, 2),
        50..52 => request_other_tenant(engines, env, session, layout),
        52..60 => {
            let scope = scope(env);
            let body = Request::Match {
                keys: keys.clone(),
                ranks: Ranks::Own,
                position: Some(0),
                scope,
                public: None,
            };
            engines.ask(env, session, RequestKind::Match(keys, scope), body);
        }
        60..80 => load(engines, env, session, keys),
        80..97 => release(engines, env, session),
        97 => engines.ask(env, session, RequestKind::Other, Request::Trim),
        98 => engines.ask(env, session, RequestKind::Other, Request::Stats),
        _ => suspect_at_random(engines, env, session),
    }
}

/// Draws a run of a chain, sometimes with a duplicate key.
pub(crate) fn draw_keys(env: &mut Environment, tenant: TenantId, layout: Layout) -> Vec<BlockKey> {
    let start = env.rng.below(KEYS as usize / usize::from(env.setup.tenants)) as u64;
    let count = 1 + env.rng.below(6) as u64;
    let mut keys: Vec<BlockKey> = (start..start + count).map(|number| key(tenant, &layout, number)).collect();
    if env.rng.chance(50) {
        keys.push(keys[0]);
    }
    keys
}

/// Requests blocks of another tenant, if there is one. Keys are secrets of their tenant: a process that
/// has a key may fetch the block from peers, but must not see blocks on the node.
fn request_other_tenant(engines: &mut Engines, env: &mut Environment, session: SessionId, layout: Layout) {
    let other = TenantId(env.rng.below(usize::from(env.setup.tenants)) as u16);
    let keys = draw_keys(env, other, layout);
    if env.rng.chance(500) {
        let body = Request::Match {
            keys: keys.clone(),
            ranks: Ranks::Own,
            position: Some(0),
            scope: Scope::Local,
            public: None,
        };
        return engines.ask(env, session, RequestKind::Match(keys, Scope::Local), body);
    }
    let load = LoadRequest {
        keys: keys.clone(),
        deadline: Duration::ZERO,
        read_bytes: 0,
        scope: Scope::Local,
        public: None,
    };
    engines.ask(env, session, RequestKind::Load(keys), Request::Load(load));
}

fn scope(env: &mut Environment) -> Scope {
    if env.rng.chance(700) { Scope::Cluster } else { Scope::Local }
}

fn commit(
    engines: &mut Engines,
    env: &mut Environment,
    (session, keys): (SessionId, &[BlockKey]),
    memory: &mut Memory,
) {
    let priority = env.rng.one_of(&[Priority::Low, Priority::Normal, Priority::High]);
    let engine = engines.session(session);
    let layout = engine.layout;
    let slots: Vec<_> = engine.reserved.drain(..keys.len().min(engine.reserved.len())).collect();
    let mut items = Vec::new();
    for ((lease, slot, _), key) in slots.into_iter().zip(keys) {
        let tag = env.new_content();
        env.observe(Observation::BlockCommitted { key: *key, content: tag });
        let tags = vec![tag; layout.layers() as usize];
        memory.write(slot, layout.layers(), 0..layout.layers(), &tags);
        items.push(CommitItem { lease, key: Some(*key), checksums: checksums(tag, &layout) });
    }
    let committed = RequestKind::Commit(keys[..items.len()].to_vec());
    let body = Request::Commit(CommitRequest { items, priority, parent: None, position: Some(0) });
    engines.ask(env, session, committed, body);
}

fn abort(engines: &mut Engines, env: &mut Environment, session: SessionId, count: usize) {
    let engine = engines.session(session);
    let count = engine.reserved.len().min(count);
    let leases = engine.reserved.drain(..count).map(|(lease, ..)| lease).collect();
    engines.ask(env, session, RequestKind::Other, Request::Abort { leases });
}

fn load(engines: &mut Engines, env: &mut Environment, session: SessionId, keys: Vec<BlockKey>) {
    let deadline = if env.rng.chance(300) { Duration::ZERO } else { env.rng.micros(500..200_000) };
    let scope = scope(env);
    let load = LoadRequest { keys: keys.clone(), deadline, read_bytes: 0, scope, public: None };
    engines.ask(env, session, RequestKind::Load(keys), Request::Load(load));
}

fn release(engines: &mut Engines, env: &mut Environment, session: SessionId) {
    let loads: Vec<LoadId> = engines.session(session).loads.keys().copied().collect();
    for load in loads {
        if env.rng.chance(600) {
            release_one(engines, env, session, load);
        }
    }
}

fn release_one(engines: &mut Engines, env: &mut Environment, session: SessionId, load: LoadId) {
    engines.session(session).loads.remove(&load);
    engines.ask(env, session, RequestKind::Release, Request::Release { load });
}

/// Reports a block as corrupt that may be intact.
fn suspect_at_random(engines: &mut Engines, env: &mut Environment, session: SessionId) {
    let first = engines.session(session).loads.iter().next();
    if let Some((load, blocks)) = first.map(|(load, held)| (*load, held.keys.len())) {
        let block = env.rng.below(blocks + 1) as u32;
        engines.suspect(env, session, (load, vec![block, 0, block]));
    }
}

/// Releases slots and loads that were held for too long.
fn release_old(engines: &mut Engines, env: &mut Environment, session: SessionId) {
    let now = env.time(Host::Node(engines.node()));
    let engine = engines.session(session);
    let old = engine.reserved.iter().take_while(|(.., since)| now.since(*since) > HELD_MAX).count();
    let loads =
        engine.loads.iter().filter(|(id, load)| now.since(load.since) > HELD_MAX && engine.is_done(**id));
    let loads: Vec<LoadId> = loads.map(|(id, _)| *id).collect();
    if old > 0 {
        abort(engines, env, session, old);
    }
    loads.into_iter().for_each(|load| release_one(engines, env, session, load));
}
