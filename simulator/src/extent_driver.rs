//! Random actions of engines on extents: lease, write, commit, return, pin, unpin, read.

use reprise_agent_core::effect::PlaceKind;
use reprise_agent_core::event::{CommitRequest, Event, Priority, Request, RequestId};
use reprise_agent_core::extents::ExtentHolder;
use reprise_policy::{SessionId, TenantId};

use crate::engine::{ExtentAnswer, RequestKind};
use crate::engine_driver::draw_keys;
use crate::environment::Environment;
use crate::extents::{HolderId, POLL_EVERY};
use crate::network::Host;
use crate::node::{Node, Process};
use crate::outcomes::Outcomes;
use crate::setup::Variant;
use crate::simulation::AgentStep;

/// Of 1000 actions of an engine: those that are followed by one on extents.
const EXTENTS_PERMILLE: u64 = 600;
/// Of 1000 actions on extents: those after which the session ends.
const DEATHS_PERMILLE: u64 = 10;
/// Of 1000 pins: those that name keys of any tenant.
const OTHER_TENANT_PERMILLE: u64 = 50;
/// Of 1000 ends of a session: those with the end of its process.
const PROCESS_ENDS_PERMILLE: u64 = 600;
/// Number of requests that injected flaws send in the name of a session.
const FLAW_REQUEST: RequestId = RequestId(u64::MAX);

/// Whether an injected flaw sent a request.
pub(crate) fn is_of_flaw(request: RequestId) -> bool {
    request == FLAW_REQUEST
}

impl Node {
    /// Runs an action of an engine on extents, in the simulations with extents.
    pub(crate) fn drive_extents(&mut self, env: &mut Environment, session: SessionId) {
        if !env.setup.extents || !env.rng.chance(EXTENTS_PERMILLE) {
            return;
        }
        let id = self.holder_id(env, session);
        self.extents.read_all(env, &self.disks);
        if env.rng.chance(DEATHS_PERMILLE) {
            env.count("engine deaths");
            return self.close_session(env, session);
        }
        match env.rng.below(100) {
            0..20 => {
                let count = 1 + env.rng.below(4) as u32;
                let body = Request::Reserve { count, kind: PlaceKind::Extent };
                self.process().engines.ask(env, session, RequestKind::LeaseExtents(count), body);
            }
            20..45 => self.extents.begin_writes(env, &self.disks, id),
            45..65 => self.commit_extents(env, id),
            65..70 => {
                let leases = self.extents.take_idle(id, 2);
                self.process().engines.ask(env, session, RequestKind::Other, Request::Abort { leases });
            }
            70..88 => self.pin(env, session),
            _ => {
                let pins = self.extents.take_pins(env, id, 600);
                self.process().engines.ask(env, session, RequestKind::Other, Request::Unpin { pins });
            }
        }
    }

    fn holder_id(&self, env: &Environment, session: SessionId) -> HolderId {
        HolderId { life: env.host(Host::Node(self.index)).life, session }
    }

    fn commit_extents(&mut self, env: &mut Environment, id: HolderId) {
        let Node { process, extents, disks, .. } = self;
        let engines = &mut process.as_mut().expect("the agent runs").engines;
        let engine = engines.session(id.session);
        let keys = draw_keys(env, engine.tenant, engine.layout);
        let priority = env.rng.one_of(&[Priority::Low, Priority::Normal, Priority::High]);
        let items = extents.take_written(env, (id, disks), &keys);
        if items.is_empty() {
            return;
        }
        let committed = RequestKind::CommitExtents(keys[..items.len()].to_vec());
        let body = Request::Commit(CommitRequest { items, priority, parent: None, position: Some(0) });
        engines.ask(env, id.session, committed, body);
    }

    fn pin(&mut self, env: &mut Environment, session: SessionId) {
        let engines = &mut self.process().engines;
        let engine = engines.session(session);
        let (own, layout) = (engine.tenant, engine.layout);
        let other = TenantId(env.rng.below(usize::from(env.setup.tenants)) as u16);
        let tenant = if env.rng.chance(OTHER_TENANT_PERMILLE) { other } else { own };
        let keys = draw_keys(env, tenant, layout);
        engines.ask(env, session, RequestKind::Pin(keys.clone()), Request::Pin { keys });
    }

    /// Hands the agent's answer to a request about extents to their holder.
    pub(crate) fn answer_extents(&mut self, env: &mut Environment, session: SessionId, answer: ExtentAnswer) {
        self.inject_extent_flaw(env, session, &answer);
        let id = self.holder_id(env, session);
        let layout = self.process().engines.session(session).layout;
        self.extents.on_answer(env, (id, layout), answer);
    }

    /// Makes the agent believe that a lease or a pin has ended, if that flaw is injected.
    fn inject_extent_flaw(&self, env: &mut Environment, session: SessionId, answer: &ExtentAnswer) {
        let body = match (env.setup.variant, answer) {
            (Variant::LeasesIgnored, ExtentAnswer::Leased(leases)) => {
                Request::Abort { leases: leases.iter().map(|(lease, _)| *lease).collect() }
            }
            (Variant::PinsIgnored, ExtentAnswer::Pinned(blocks)) => {
                Request::Unpin { pins: blocks.iter().filter_map(|(_, block)| block.pin()).collect() }
            }
            _ => return,
        };
        let received = env.time(Host::Node(self.index));
        let event = Event::Request { session, request: FLAW_REQUEST, body, received };
        env.later(self.index, std::time::Duration::ZERO, AgentStep::Event(event));
    }

    /// Closes the session of an engine. Its process ends too, or continues its I/O for some time.
    pub(crate) fn close_session(&mut self, env: &mut Environment, session: SessionId) {
        let id = self.holder_id(env, session);
        self.process().engines.close(env, session);
        if env.setup.extents {
            let process_ends = env.calm || env.rng.chance(PROCESS_ENDS_PERMILLE);
            self.extents.session_ended(env, id, process_ends);
        }
    }

    /// Passes on the proofs that processes have ended their I/O, and polls the others again later.
    pub(crate) fn poll_extents(&mut self, env: &mut Environment, out: &mut Outcomes) {
        let (node, life) = (self.index, env.host(Host::Node(self.index)).life);
        let Node { process, extents, .. } = self;
        let awaited = &mut process.as_mut().expect("the agent runs").awaited;
        let variant = env.setup.variant;
        let is_ended = |holder: &ExtentHolder| match holder {
            ExtentHolder::Session(_) if variant == Variant::QuarantineIgnored => true,
            ExtentHolder::Earlier(_) if variant == Variant::EarlierLeasesIgnored => true,
            holder => !extents.is_held(life, *holder),
        };
        let ended: Vec<ExtentHolder> = awaited.iter().copied().filter(is_ended).collect();
        for holder in ended {
            awaited.remove(&holder);
            out.event(Event::ExtentsReleased { holder });
        }
        if !awaited.is_empty() {
            env.count("extents awaited");
            env.later(node, POLL_EVERY, AgentStep::PollExtents);
        }
    }
}

impl Process {
    /// Starts to await the end of a holder's I/O.
    pub(crate) fn await_extents(&mut self, env: &mut Environment, node: usize, holder: ExtentHolder) {
        env.count(match holder {
            ExtentHolder::Session(_) => "extents in quarantine",
            ExtentHolder::Earlier(_) => "extents of an earlier agent",
        });
        if self.awaited.is_empty() {
            env.later(node, std::time::Duration::ZERO, AgentStep::PollExtents);
        }
        self.awaited.insert(holder);
    }
}
