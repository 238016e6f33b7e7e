//! An agent's link to one member of the control plane: registration, heartbeats, announcements.
//!
//! The production state machines decide ([`Registrar`], [`Heartbeats`], [`Announcer`]). Here are the calls and
//! the delays. Heartbeats have a separate connection.

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

use crate::client::Purpose;
use crate::messages::{Reply, Request};
use crate::network::{Host, LineId};
use crate::setup::{BEAT_EVERY, CALL_TIMEOUT, Variant};
use crate::simulation::{AgentStep, Simulation};

/// Identifies a link of an agent's process; a new link to the same member has a new id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LinkId(pub(crate) u64);

/// A link to one member; see the module.
#[derive(Debug)]
pub(crate) struct Link {
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
    pub(crate) fn new(member: usize, announcer: Announcer, domain: String) -> Link {
        Link {
            member,
            announcer,
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
}

impl Simulation {
    fn link(&mut self, node: usize, id: LinkId) -> Option<&mut Link> {
        self.client(node).links.get_mut(&id)
    }

    /// Returns the connection for everything except heartbeats.
    pub(crate) fn link_line(&mut self, node: usize, id: LinkId) -> LineId {
        let link = &self.client(node).links[&id];
        let (member, known) = (link.member, link.line);
        let line = known.unwrap_or_else(|| self.env.open_line(Host::Node(node), Host::Member(member)));
        if let Some(link) = self.link(node, id) {
            link.line = Some(line);
        }
        line
    }

    pub(crate) fn call_member(
        &mut self,
        node: usize,
        id: LinkId,
        of: LinkCall,
        (request, time): (Request, Duration),
    ) {
        let line = self.link_line(node, id);
        self.call(node, (line, Purpose::Link(id, of)), request, time);
    }

    pub(crate) fn link_call_failed(&mut self, node: usize, id: LinkId, of: &LinkCall) {
        let random = self.env.rng.next() as u32;
        let Some(link) = self.link(node, id) else { return };
        match *of {
            LinkCall::Register { request, .. } if request == link.requested => {
                self.on_registrar(node, id, Input::Refused, random);
            }
            LinkCall::Register { .. } => {}
            LinkCall::Beat { epoch } => {
                let member = link.member;
                let input = Input::Heartbeat { epoch, result: Heartbeat::Failed };
                self.on_registrar(node, id, input, random);
                self.home_is_silent(node, member);
                self.next_beat(node, id, epoch);
            }
            LinkCall::Slots { .. } | LinkCall::Update(_) => {
                let effect = link.announcer.fail();
                self.announced(node, id, (Epoch(0), effect));
            }
            LinkCall::Report { .. } => self.report_over(node, id),
        }
    }

    pub(crate) fn on_link_answer(&mut self, node: usize, of: (LinkId, LinkCall), reply: Reply) {
        let (id, of) = of;
        let Some(link) = self.link(node, id) else { return };
        match (of, reply) {
            (LinkCall::Register { request, domain }, Reply::Registered { node: number, epoch }) => {
                if request == link.requested {
                    let granted = Granted { node: number, epoch, heartbeat_every: BEAT_EVERY };
                    self.on_registrar(node, id, Input::Granted { granted, domain }, 0);
                }
            }
            (LinkCall::Beat { epoch }, Reply::Heartbeat { known, version }) => {
                link.announcer.outbox_mut().note_version(link.outlived.unwrap_or(epoch), version);
                self.on_heartbeat_answer(node, id, epoch, known);
            }
            (LinkCall::Slots { epoch }, Reply::SlotStatus(status)) => {
                let effect = link.announcer.slots(epoch, status.as_deref().map(slots_of));
                self.announced(node, id, (epoch, effect));
            }
            (LinkCall::Update(batch), Reply::Updated { answer, version }) => {
                let effect = link.announcer.answer(&batch, answer, version);
                match effect {
                    Effect::Fenced(_) => self.env.count("fenced"),
                    Effect::Gap => self.env.count("gaps"),
                    Effect::Continue | Effect::Applied(_) | Effect::Pause(_) => {}
                }
                self.announced(node, id, (batch.epoch, effect));
            }
            (LinkCall::Report { epoch, number }, Reply::Reported(answer)) => {
                self.reported(node, id, (epoch, number), answer);
            }
            (of, reply) => unreachable!("unexpected answer to {of:?}: {reply:?}"),
        }
    }

    // ---- registration -------------------------------------------------------------------------------------

    pub(crate) fn register(&mut self, node: usize, id: LinkId, request: u64) {
        if self.link(node, id).is_some_and(|link| link.requested == request) {
            let domain = self.client(node).failure_domain.clone();
            let body = Request::Register { name: node, domain: domain.clone() };
            self.call_member(node, id, LinkCall::Register { request, domain }, (body, CALL_TIMEOUT));
        }
    }

    /// Handles a change of the node's failure domain.
    pub(crate) fn domain_changed(&mut self, node: usize) {
        let random = self.env.rng.next() as u32;
        let domain = self.nodes[node].failure_domain.clone();
        self.client(node).failure_domain.clone_from(&domain);
        let links: Vec<LinkId> = self.client(node).links.keys().copied().collect();
        links.into_iter().for_each(|id| self.on_registrar(node, id, Input::Domain(domain.clone()), random));
    }

    /// Ends the wait for the replacement of a registration that has ended.
    pub(crate) fn replacement_overdue(&mut self, node: usize, id: LinkId, awaited: u64) {
        let random = self.env.rng.next() as u32;
        if self.link(node, id).is_some_and(|link| link.awaited == awaited) {
            self.on_registrar(node, id, Input::Overdue, random);
        }
    }

    /// Handles the end of a registration, which a member has reported.
    pub(crate) fn fence(&mut self, node: usize, id: LinkId, epoch: Epoch) {
        self.lose_registration(node, id, Input::Fenced(epoch));
    }

    fn lose_registration(&mut self, node: usize, id: LinkId, input: Input) {
        let random = self.env.rng.next() as u32;
        self.on_registrar(node, id, input, random);
    }

    /// Gives an input to the registrar, and carries out its outputs. `random` selects the length of a pause.
    fn on_registrar(&mut self, node: usize, id: LinkId, input: Input, random: u32) {
        let now = self.env.time(Host::Node(node));
        let Some(link) = self.link(node, id) else { return };
        for output in link.registrar.on(now, input) {
            let link = self.client(node).links.get_mut(&id).expect("only the client removes links");
            match output {
                Output::Register(pause) => {
                    link.requested += 1;
                    let (link, request) = (id, link.requested);
                    self.env.later(node, pause.draw(random), AgentStep::Register { link, request });
                }
                Output::Registered(granted) => self.registered_with(node, id, granted),
                Output::Lost(..) => {
                    link.heartbeats = None;
                    if link.outlived.is_none() {
                        link.announcer.outbox_mut().unregister();
                    }
                }
                // The state is read when it is needed.
                Output::UpChanged => {}
                Output::Replacing(_) => self.env.count("registrations replaced"),
                Output::AwaitReplacement => {
                    link.awaited += 1;
                    let step = AgentStep::ReplacementOverdue { link: id, awaited: link.awaited };
                    self.env.later(node, CALL_TIMEOUT, step);
                    self.env.count("replacements awaited");
                }
            }
        }
    }

    fn registered_with(&mut self, node: usize, id: LinkId, granted: Granted) {
        let keeps = self.env.setup.variant == Variant::OutboxOutlivesRegistration;
        let Some(link) = self.link(node, id) else { return };
        if link.outlived.is_none() {
            link.announcer.outbox_mut().register(granted.node, granted.epoch);
            link.outlived = keeps.then_some(granted.epoch);
        }
        link.heartbeats = Some(Heartbeats::new(granted));
        link.awaited += 1;
        self.env.count("registrations");
        self.beat(node, id, granted.epoch);
        self.pump(node, id);
        self.report_if_due(node, id);
    }

    // ---- heartbeats ---------------------------------------------------------------------------------------

    pub(crate) fn beat(&mut self, node: usize, id: LinkId, epoch: Epoch) {
        let now = self.env.time(Host::Node(node));
        let Some(link) = self.link(node, id) else { return };
        let (member, known) = (link.member, link.beat_line);
        let Some(heartbeats) = heartbeats_of(link, epoch) else { return };
        heartbeats.send(now);
        let (request, time) = (Request::Beat { node: heartbeats.of.node, epoch }, heartbeats.answer_within());
        let line = known.unwrap_or_else(|| self.env.open_line(Host::Node(node), Host::Member(member)));
        if let Some(link) = self.link(node, id) {
            link.beat_line = Some(line);
        }
        let of = Purpose::Link(id, LinkCall::Beat { epoch });
        self.call(node, (line, of), request, time);
    }

    fn on_heartbeat_answer(&mut self, node: usize, id: LinkId, epoch: Epoch, known: bool) {
        if !known {
            return self.lose_registration(node, id, Input::Heartbeat { epoch, result: Heartbeat::Unknown });
        }
        self.on_registrar(node, id, Input::Heartbeat { epoch, result: Heartbeat::Answered }, 0);
        self.next_beat(node, id, epoch);
        self.pump(node, id);
    }

    fn next_beat(&mut self, node: usize, id: LinkId, epoch: Epoch) {
        let now = self.env.time(Host::Node(node));
        let Some(heartbeats) = self.link(node, id).and_then(|link| heartbeats_of(link, epoch)) else {
            return;
        };
        let wait = heartbeats.wait(now);
        self.env.later(node, wait, AgentStep::Beat { link: id, epoch });
    }

    // ---- announcements ------------------------------------------------------------------------------------

    /// Carries out the next action of every announcer.
    pub(crate) fn pump_all(&mut self, node: usize) {
        let mut next = self.client(node).links.keys().next().copied();
        while let Some(id) = next {
            self.pump(node, id);
            next = self.client(node).links.range(LinkId(id.0 + 1)..).next().map(|(id, _)| *id);
        }
    }

    pub(crate) fn pump(&mut self, node: usize, id: LinkId) {
        let Some(link) = self.link(node, id) else { return };
        let (Some(granted), outlived) = (link.granted(), link.outlived) else { return };
        match link.announcer.next_action() {
            Action::Wait => {}
            Action::Inventory(slots) => {
                self.env.count("inventories");
                // The core answers through the outbox, which calls this function again.
                self.apply(node, Event::InventoryWanted { slots });
            }
            Action::QuerySlots(_, epoch) => {
                let request = Request::Slots { node: granted.node, epoch: granted.epoch };
                self.call_member(node, id, LinkCall::Slots { epoch }, (request, CALL_TIMEOUT));
            }
            Action::Send(batch) => {
                let sent = match outlived {
                    Some(_) => Arc::new(Batch { epoch: granted.epoch, ..Batch::clone(&batch) }),
                    None => batch.clone(),
                };
                self.call_member(node, id, LinkCall::Update(batch), (Request::Update(sent), CALL_TIMEOUT));
            }
        }
    }

    /// Carries out the effect of an answer under a registration, or of a failure.
    fn announced(&mut self, node: usize, id: LinkId, (epoch, effect): (Epoch, Effect)) {
        let pause = match effect {
            Effect::Continue | Effect::Applied(_) | Effect::Gap => return self.pump(node, id),
            Effect::Pause(pause) => pause,
            Effect::Fenced(pause) => {
                self.fence(node, id, epoch);
                pause
            }
        };
        let delay = pause.draw(self.env.rng.next() as u32);
        self.env.later(node, delay, AgentStep::Pump(id));
    }

    /// Ends a pause after a failure.
    pub(crate) fn pump_again(&mut self, node: usize, id: LinkId) {
        if let Some(link) = self.link(node, id) {
            link.announcer.resume();
        }
        self.pump(node, id);
    }
}

fn slots_of(status: &SlotStatus) -> MemberSlots<'_> {
    MemberSlots { version: status.version, owned: &status.owned, wanted: &status.wanted }
}

/// Returns the heartbeats of a registration, if it is the current one.
fn heartbeats_of(link: &mut Link, epoch: Epoch) -> Option<&mut Heartbeats> {
    link.heartbeats.as_mut().filter(|heartbeats| heartbeats.of.epoch == epoch)
}
