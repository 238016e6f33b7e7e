//! An agent's link to one member of the control plane: registration, heartbeats, announcements.
//!
//! The production state machines decide ([`Registrar`], [`Heartbeats`], [`Announcer`]). Here are the calls and
//! the delays. Heartbeats have a separate connection.
//!
//! The outputs are carried out in the order of `node-agent/src/directory/link.rs` and `heartbeat.rs`.

use std::sync::Arc;
use std::time::Duration;

use reprise_agent_core::announcer::{Action, Announcer, Effect, MemberSlots};
use reprise_agent_core::event::Event;
use reprise_agent_core::heartbeats::Heartbeats;
use reprise_agent_core::outbox::Batch;
use reprise_agent_core::quota_grants::ReportNumber;
use reprise_agent_core::registrar::{Granted, Heartbeat, Input, Output, Registrar};
use reprise_agent_core::report_schedule::ReportSchedule;
use reprise_controlplane_core::SlotStatus;
use reprise_policy::Epoch;

use crate::calls::{Calls, Purpose};
use crate::environment::Environment;
use crate::messages::{Reply, Request};
use crate::network::{Host, LineId};
use crate::outcomes::{ClientFollow, Outcomes};
use crate::setup::{BEAT_EVERY, CALL_TIMEOUT, Variant};
use crate::simulation::AgentStep;

/// Identifies a link of an agent's process; a new link to the same member has a new id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LinkId(pub(crate) u64);

/// A link to one member; see the module.
#[derive(Debug)]
pub(crate) struct Link {
    node: usize,
    id: LinkId,
    pub(crate) member: usize,
    pub(crate) announcer: Announcer,
    registrar: Registrar,
    /// Counts the registrations that were requested: each replaces the one before.
    requested: u64,
    /// Counts the waits for a replacement, and their ends.
    awaited: u64,
    /// Heartbeats of the current registration.
    heartbeats: Option<Heartbeats>,
    /// Connection for everything except heartbeats.
    line: Option<LineId>,
    beat_line: Option<LineId>,
    /// The registration that the outbox still uses although there is a newer one: an injected flaw.
    outlived: Option<Epoch>,
    pub(crate) reporting: ReportSchedule,
}

/// A call of a link.
#[derive(Clone, Debug)]
pub(crate) enum LinkCall {
    Register { request: u64, domain: String },
    Beat { epoch: Epoch },
    Slots { epoch: Epoch },
    Update(Arc<Batch>),
    Report { epoch: Epoch, number: ReportNumber },
}

impl Link {
    /// Creates a link of a node in this failure domain, whose first registration is requested.
    pub(crate) fn new((node, id): (usize, LinkId), member: usize, limit: usize, domain: String) -> Link {
        Link {
            node,
            id,
            member,
            announcer: Announcer::new(limit),
            registrar: Registrar::new(domain),
            requested: 0,
            awaited: 0,
            heartbeats: None,
            line: None,
            beat_line: None,
            outlived: None,
            reporting: ReportSchedule::default(),
        }
    }

    /// Returns the current registration.
    pub(crate) fn granted(&self) -> Option<Granted> {
        self.registrar.granted()
    }

    /// Reports whether the member answers and knows this node.
    pub(crate) fn is_up(&self) -> bool {
        self.registrar.is_up()
    }

    pub(crate) fn lines(&self) -> impl Iterator<Item = LineId> {
        [self.line, self.beat_line].into_iter().flatten()
    }

    pub(crate) fn drop_line(&mut self, line: LineId) {
        self.line = self.line.filter(|known| *known != line);
        self.beat_line = self.beat_line.filter(|known| *known != line);
    }

    /// Returns the connection for everything except heartbeats.
    pub(crate) fn line(&mut self, env: &mut Environment) -> LineId {
        let (node, member) = (Host::Node(self.node), Host::Member(self.member));
        *self.line.get_or_insert_with(|| env.open_line(node, member))
    }

    pub(crate) fn call(
        &mut self,
        env: &mut Environment,
        calls: &mut Calls,
        of: LinkCall,
        (request, time): (Request, Duration),
    ) {
        let line = self.line(env);
        calls.send(env, (line, Purpose::Link(self.id, of)), request, time);
    }

    // ---- registration -------------------------------------------------------------------------------------

    /// Handles a member's answer to a call.
    pub(crate) fn on_answer(
        &mut self,
        env: &mut Environment,
        calls: &mut Calls,
        (of, reply): (LinkCall, Reply),
        out: &mut Outcomes,
    ) {
        match (of, reply) {
            (LinkCall::Register { request, domain }, Reply::Registered { node, epoch }) => {
                if request == self.requested {
                    let granted = Granted { node, epoch, heartbeat_every: BEAT_EVERY };
                    self.on_registrar(env, calls, (Input::Granted { granted, domain }, 0), out);
                }
            }
            (LinkCall::Beat { epoch }, Reply::Heartbeat { known, version }) => {
                self.on_heartbeat_answer(env, calls, (epoch, known, version), out);
            }
            (LinkCall::Slots { epoch }, Reply::SlotStatus(status)) => {
                let effect = self.announcer.slots(epoch, status.as_deref().map(slots_of));
                self.announced(env, calls, (epoch, effect), out);
            }
            (LinkCall::Update(batch), Reply::Updated { answer, version }) => {
                let effect = self.announcer.answer(&batch, answer, version);
                match effect {
                    Effect::Fenced(_) => env.count("fenced"),
                    Effect::Gap => env.count("gaps"),
                    Effect::Continue | Effect::Applied(_) | Effect::Pause(_) => {}
                }
                self.announced(env, calls, (batch.epoch, effect), out);
            }
            (of, reply) => unreachable!("unexpected answer to {of:?}: {reply:?}"),
        }
    }

    /// Handles the failure of a call of the registrar or the announcer. `random` selects the length of a pause.
    pub(crate) fn call_failed(
        &mut self,
        env: &mut Environment,
        calls: &mut Calls,
        (of, random): (&LinkCall, u32),
        out: &mut Outcomes,
    ) {
        match *of {
            LinkCall::Register { request, .. } if request == self.requested => {
                self.on_registrar(env, calls, (Input::Refused, random), out);
            }
            LinkCall::Register { .. } | LinkCall::Report { .. } => {}
            LinkCall::Beat { epoch } => {
                let input = Input::Heartbeat { epoch, result: Heartbeat::Failed };
                self.on_registrar(env, calls, (input, random), out);
            }
            LinkCall::Slots { .. } | LinkCall::Update(_) => {
                let effect = self.announcer.fail();
                self.announced(env, calls, (Epoch(0), effect), out);
            }
        }
    }

    /// Requests a registration in a failure domain, unless another one was requested meanwhile.
    pub(crate) fn register(&mut self, env: &mut Environment, calls: &mut Calls, request: u64, domain: &str) {
        if self.requested == request {
            let body = Request::Register { name: self.node, domain: domain.to_owned() };
            let of = LinkCall::Register { request, domain: domain.to_owned() };
            self.call(env, calls, of, (body, CALL_TIMEOUT));
        }
    }

    /// Reports whether this wait for a replacement still lasts.
    pub(crate) fn awaits_replacement(&self, awaited: u64) -> bool {
        self.awaited == awaited
    }

    /// Gives an input to the registrar, and carries out its outputs. `random` selects the length of a pause.
    pub(crate) fn on_registrar(
        &mut self,
        env: &mut Environment,
        calls: &mut Calls,
        (input, random): (Input, u32),
        out: &mut Outcomes,
    ) {
        let outputs = self.registrar.on(env.time(Host::Node(self.node)), input);
        self.carry_out(env, calls, (outputs, random), out);
    }

    pub(crate) fn carry_out(
        &mut self,
        env: &mut Environment,
        calls: &mut Calls,
        (outputs, random): (Vec<Output>, u32),
        out: &mut Outcomes,
    ) {
        let mut outputs = outputs.into_iter();
        while let Some(output) = outputs.next() {
            match output {
                Output::Register(pause) => {
                    self.requested += 1;
                    let step = AgentStep::Register { link: self.id, request: self.requested };
                    env.later(self.node, pause.draw(random), step);
                }
                Output::Registered(granted) => {
                    self.registered_with(env, calls, granted);
                    out.client(ClientFollow::Pump(self.id));
                    out.client(ClientFollow::ReportIfDue(self.id));
                    return out.client(ClientFollow::CarryOut(self.id, outputs.collect(), random));
                }
                Output::Lost(..) => {
                    self.heartbeats = None;
                    if self.outlived.is_none() {
                        self.announcer.outbox_mut().unregister();
                    }
                }
                // The state is read when it is needed.
                Output::UpChanged => {}
                Output::Replacing(_) => env.count("registrations replaced"),
                Output::AwaitReplacement => {
                    self.awaited += 1;
                    let step = AgentStep::ReplacementOverdue { link: self.id, awaited: self.awaited };
                    env.later(self.node, CALL_TIMEOUT, step);
                    env.count("replacements awaited");
                }
            }
        }
    }

    fn registered_with(&mut self, env: &mut Environment, calls: &mut Calls, granted: Granted) {
        let keeps = env.setup.variant == Variant::OutboxOutlivesRegistration;
        if self.outlived.is_none() {
            self.announcer.outbox_mut().register(granted.node, granted.epoch);
            self.outlived = keeps.then_some(granted.epoch);
        }
        self.heartbeats = Some(Heartbeats::new(granted));
        self.awaited += 1;
        env.count("registrations");
        self.beat(env, calls, granted.epoch);
    }

    /// Handles the end of a registration, which a member has reported.
    pub(crate) fn fence(
        &mut self,
        env: &mut Environment,
        calls: &mut Calls,
        (epoch, random): (Epoch, u32),
        out: &mut Outcomes,
    ) {
        self.on_registrar(env, calls, (Input::Fenced(epoch), random), out);
    }

    // ---- heartbeats ---------------------------------------------------------------------------------------

    pub(crate) fn beat(&mut self, env: &mut Environment, calls: &mut Calls, epoch: Epoch) {
        let now = env.time(Host::Node(self.node));
        let Some(heartbeats) = self.heartbeats_of(epoch) else { return };
        heartbeats.send(now);
        let (request, time) = (Request::Beat { node: heartbeats.of.node, epoch }, heartbeats.answer_within());
        let (node, member) = (Host::Node(self.node), Host::Member(self.member));
        let line = *self.beat_line.get_or_insert_with(|| env.open_line(node, member));
        calls.send(env, (line, Purpose::Link(self.id, LinkCall::Beat { epoch })), request, time);
    }

    /// Handles a member's answer to a heartbeat of a registration, with the version of its slots.
    fn on_heartbeat_answer(
        &mut self,
        env: &mut Environment,
        calls: &mut Calls,
        (epoch, known, version): (Epoch, bool, u64),
        out: &mut Outcomes,
    ) {
        self.announcer.outbox_mut().note_version(self.outlived.unwrap_or(epoch), version);
        if !known {
            let random = env.rng.next() as u32;
            let input = Input::Heartbeat { epoch, result: Heartbeat::Unknown };
            return self.on_registrar(env, calls, (input, random), out);
        }
        let input = Input::Heartbeat { epoch, result: Heartbeat::Answered };
        self.on_registrar(env, calls, (input, 0), out);
        self.next_beat(env, epoch);
        self.pump(env, calls, out);
    }

    pub(crate) fn next_beat(&mut self, env: &mut Environment, epoch: Epoch) {
        let now = env.time(Host::Node(self.node));
        let Some(heartbeats) = self.heartbeats_of(epoch) else { return };
        let wait = heartbeats.wait(now);
        env.later(self.node, wait, AgentStep::Beat { link: self.id, epoch });
    }

    /// Returns the heartbeats of a registration, if it is the current one.
    fn heartbeats_of(&mut self, epoch: Epoch) -> Option<&mut Heartbeats> {
        self.heartbeats.as_mut().filter(|heartbeats| heartbeats.of.epoch == epoch)
    }

    // ---- announcements ------------------------------------------------------------------------------------

    /// Carries out the next action of the announcer.
    pub(crate) fn pump(&mut self, env: &mut Environment, calls: &mut Calls, out: &mut Outcomes) {
        let Some(granted) = self.granted() else { return };
        match self.announcer.next_action() {
            Action::Wait => {}
            Action::Inventory(slots) => {
                env.count("inventories");
                // The core answers through the outbox; then all announcers continue.
                out.event(Event::InventoryWanted { slots });
            }
            Action::QuerySlots(_, epoch) => {
                let request = Request::Slots { node: granted.node, epoch: granted.epoch };
                self.call(env, calls, LinkCall::Slots { epoch }, (request, CALL_TIMEOUT));
            }
            Action::Send(batch) => {
                let sent = match self.outlived {
                    Some(_) => Arc::new(Batch { epoch: granted.epoch, ..Batch::clone(&batch) }),
                    None => batch.clone(),
                };
                self.call(env, calls, LinkCall::Update(batch), (Request::Update(sent), CALL_TIMEOUT));
            }
        }
    }

    /// Carries out the effect of an answer under a registration, or of a failure.
    fn announced(
        &mut self,
        env: &mut Environment,
        calls: &mut Calls,
        (epoch, effect): (Epoch, Effect),
        out: &mut Outcomes,
    ) {
        let pause = match effect {
            Effect::Continue | Effect::Applied(_) | Effect::Gap => return self.pump(env, calls, out),
            Effect::Pause(pause) => pause,
            Effect::Fenced(pause) => {
                let random = env.rng.next() as u32;
                self.fence(env, calls, (epoch, random), out);
                pause
            }
        };
        let delay = pause.draw(env.rng.next() as u32);
        env.later(self.node, delay, AgentStep::Pump(self.id));
    }
}

fn slots_of(status: &SlotStatus) -> MemberSlots<'_> {
    MemberSlots { version: status.version, owned: &status.owned, wanted: &status.wanted }
}
