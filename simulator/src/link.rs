//! An agent's link to one member of the control plane: registration, heartbeats, announcements.
//!
//! The queue of announcements and the delays between attempts are production code. The order of calls follows
//! the loops of `node-agent/src/directory/{link,heartbeat}.rs`, which use futures and cannot run here. The
//! link registers until it succeeds, and sends heartbeats on a separate connection until the member no longer
//! knows the registration. One batch of announcements is in flight at a time.

use std::sync::Arc;
use std::time::Duration;

use reprise_agent_core::backoff::Backoff;
use reprise_agent_core::event::Event;
use reprise_agent_core::outbox::{Batch, Next, Outbox, Outcome};
use reprise_agent_core::quota_grants::ReportNumber;
use reprise_controlplane_core::SlotStatus;
use reprise_policy::{Epoch, NodeId, Tick};

use crate::client::Purpose;
use crate::messages::{Reply, Request};
use crate::network::{Host, LineId};
use crate::reports::ReportSchedule;
use crate::setup::{BEAT_ANSWER, BEAT_EVERY, CALL_TIMEOUT, STABLE_AFTER, Variant};
use crate::simulation::{AgentStep, Simulation};

/// Identifies a link of an agent's process; a new link to the same member has a new id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LinkId(pub(crate) u64);

/// A link to one member; see the module.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) member: usize,
    pub(crate) outbox: Outbox,
    pub(crate) granted: Option<Registration>,
    /// The member answers and knows this node.
    pub(crate) up: bool,
    /// Connection for everything except heartbeats.
    line: Option<LineId>,
    beat_line: Option<LineId>,
    /// A batch is in flight, or the next attempt is scheduled.
    announcing: bool,
    /// The registration that the outbox still uses although there is a newer one: an injected flaw.
    outlived: Option<Epoch>,
    registering: Backoff,
    quarrel: Backoff,
    announcements: Backoff,
    pub(crate) reporting: ReportSchedule,
}

/// The current registration of a link.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Registration {
    pub(crate) node: NodeId,
    pub(crate) epoch: Epoch,
    since: Tick,
    /// Time at which the last heartbeat was due.
    beat: Tick,
}

/// A call of a link.
#[derive(Clone, Debug)]
pub(crate) enum LinkCall {
    Register,
    Beat { epoch: Epoch },
    Slots { epoch: Epoch },
    Update(Arc<Batch>),
    Report { epoch: Epoch, number: ReportNumber },
}

impl Link {
    pub(crate) fn new(member: usize, outbox: Outbox) -> Link {
        Link {
            member,
            outbox,
            granted: None,
            up: false,
            line: None,
            beat_line: None,
            announcing: false,
            outlived: None,
            registering: Backoff::default(),
            quarrel: Backoff::default(),
            announcements: Backoff::default(),
            reporting: ReportSchedule::default(),
        }
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
        let line = known.unwrap_or_else(|| self.open_line(Host::Node(node), Host::Member(member)));
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
        let random = self.rng.next() as u32;
        let Some(link) = self.link(node, id) else { return };
        match *of {
            LinkCall::Register => {
                let delay = link.registering.next(random);
                self.later(node, delay, AgentStep::Register(id));
            }
            LinkCall::Beat { epoch } => {
                link.up = false;
                let member = link.member;
                self.home_is_silent(node, member);
                self.next_beat(node, id, epoch);
            }
            LinkCall::Slots { .. } | LinkCall::Update(_) => self.announce_again(node, id),
            LinkCall::Report { .. } => self.report_over(node, id),
        }
    }

    pub(crate) fn on_link_answer(&mut self, node: usize, of: (LinkId, LinkCall), reply: Reply) {
        let (id, of) = of;
        let Some(link) = self.link(node, id) else { return };
        match (of, reply) {
            (LinkCall::Register, Reply::Registered { node: number, epoch }) => {
                self.granted(node, id, (number, epoch));
            }
            (LinkCall::Beat { epoch }, Reply::Heartbeat { known, version }) => {
                link.outbox.note_version(link.outlived.unwrap_or(epoch), version);
                self.on_heartbeat_answer(node, id, epoch, known);
            }
            (LinkCall::Slots { epoch }, Reply::SlotStatus(None)) => {
                self.lose_registration(node, id, epoch);
                self.announce_again(node, id);
            }
            (LinkCall::Slots { epoch }, Reply::SlotStatus(Some(status))) => {
                let SlotStatus { version, owned, wanted } = *status;
                link.outbox.set_slots(epoch, version, &owned, &wanted);
                self.announced(node, id);
            }
            (LinkCall::Update(batch), Reply::Updated { answer, version }) => {
                link.outbox.note_version(batch.epoch, version);
                match link.outbox.process_answer(batch.epoch, batch.sequence, answer) {
                    Outcome::Fenced => {
                        self.count("fenced");
                        self.lose_registration(node, id, batch.epoch);
                        return self.announce_again(node, id);
                    }
                    Outcome::Gap => self.count("gaps"),
                    Outcome::Applied(_) | Outcome::Stale => {}
                }
                self.announced(node, id);
            }
            (LinkCall::Report { epoch, number }, Reply::Reported(answer)) => {
                self.reported(node, id, (epoch, number), answer);
            }
            (of, reply) => unreachable!("unexpected answer to {of:?}: {reply:?}"),
        }
    }

    // ---- registration -------------------------------------------------------------------------------------

    pub(crate) fn register(&mut self, node: usize, id: LinkId) {
        if self.link(node, id).is_some_and(|link| link.granted.is_none()) {
            let request = (Request::Register { name: node }, CALL_TIMEOUT);
            self.call_member(node, id, LinkCall::Register, request);
        }
    }

    fn granted(&mut self, node: usize, id: LinkId, to: (NodeId, Epoch)) {
        let now = self.time(Host::Node(node));
        let keeps = self.setup.variant == Variant::OutboxOutlivesRegistration;
        let Some(link) = self.link(node, id) else { return };
        link.registering.reset();
        if link.outlived.is_none() {
            link.outbox.register(to.0, to.1);
            link.outlived = keeps.then_some(to.1);
        }
        link.granted = Some(Registration { node: to.0, epoch: to.1, since: now, beat: now });
        link.up = true;
        self.count("registrations");
        self.beat(node, id, to.1);
        self.pump(node, id);
        self.report_if_due(node, id);
    }

    pub(crate) fn lose_registration(&mut self, node: usize, id: LinkId, epoch: Epoch) {
        let (now, random) = (self.time(Host::Node(node)), self.rng.next() as u32);
        let Some(link) = self.link(node, id) else { return };
        let Some(granted) = link.granted.take_if(|granted| granted.epoch == epoch) else { return };
        if link.outlived.is_none() {
            link.outbox.unregister();
        }
        link.up = false;
        let delay = if now.since(granted.since) >= STABLE_AFTER {
            link.quarrel.reset();
            Duration::ZERO
        } else {
            link.quarrel.next(random)
        };
        self.later(node, delay, AgentStep::Register(id));
    }

    // ---- heartbeats ---------------------------------------------------------------------------------------

    pub(crate) fn beat(&mut self, node: usize, id: LinkId, epoch: Epoch) {
        let now = self.time(Host::Node(node));
        let Some(link) = self.link(node, id) else { return };
        let Some(granted) = link.granted.as_mut().filter(|granted| granted.epoch == epoch) else { return };
        granted.beat = now;
        let request = Request::Beat { node: granted.node, epoch };
        let (member, known) = (link.member, link.beat_line);
        let line = known.unwrap_or_else(|| self.open_line(Host::Node(node), Host::Member(member)));
        if let Some(link) = self.link(node, id) {
            link.beat_line = Some(line);
        }
        let of = Purpose::Link(id, LinkCall::Beat { epoch });
        self.call(node, (line, of), request, BEAT_ANSWER);
    }

    fn on_heartbeat_answer(&mut self, node: usize, id: LinkId, epoch: Epoch, known: bool) {
        if !known {
            return self.lose_registration(node, id, epoch);
        }
        if let Some(link) = self.link(node, id)
            && link.granted.is_some_and(|granted| granted.epoch == epoch)
        {
            link.up = true;
        }
        self.next_beat(node, id, epoch);
        self.pump(node, id);
    }

    fn next_beat(&mut self, node: usize, id: LinkId, epoch: Epoch) {
        let now = self.time(Host::Node(node));
        let granted = self.link(node, id).and_then(|link| link.granted);
        let Some(granted) = granted.filter(|granted| granted.epoch == epoch) else { return };
        let wait = granted.beat.after(BEAT_EVERY).since(now);
        self.later(node, wait, AgentStep::Beat { link: id, epoch });
    }

    // ---- announcements ------------------------------------------------------------------------------------

    /// Sends the next batch of every link without one in flight.
    pub(crate) fn pump_all(&mut self, node: usize) {
        let mut next = self.client(node).links.keys().next().copied();
        while let Some(id) = next {
            self.pump(node, id);
            next = self.client(node).links.range(LinkId(id.0 + 1)..).next().map(|(id, _)| *id);
        }
    }

    pub(crate) fn pump(&mut self, node: usize, id: LinkId) {
        let Some(link) = self.link(node, id).filter(|link| !link.announcing) else { return };
        let Some(granted) = link.granted else { return };
        match link.outbox.next_step() {
            Next::Wait => {}
            Next::Inventory(slots) => {
                self.count("inventories");
                // The core answers through the outbox, which calls this function again.
                self.apply(node, Event::InventoryWanted { slots });
            }
            Next::QuerySlots(_, epoch) => {
                link.announcing = true;
                let request = Request::Slots { node: granted.node, epoch: granted.epoch };
                self.call_member(node, id, LinkCall::Slots { epoch }, (request, CALL_TIMEOUT));
            }
            Next::Send(batch) => {
                link.announcing = true;
                let sent = match link.outlived {
                    Some(_) => Arc::new(Batch { epoch: granted.epoch, ..Batch::clone(&batch) }),
                    None => batch.clone(),
                };
                self.call_member(node, id, LinkCall::Update(batch), (Request::Update(sent), CALL_TIMEOUT));
            }
        }
    }

    fn announced(&mut self, node: usize, id: LinkId) {
        if let Some(link) = self.link(node, id) {
            link.announcing = false;
            link.announcements.reset();
        }
        self.pump(node, id);
    }

    /// Runs the next attempt.
    pub(crate) fn pump_again(&mut self, node: usize, id: LinkId) {
        if let Some(link) = self.link(node, id) {
            link.announcing = false;
        }
        self.pump(node, id);
    }

    fn announce_again(&mut self, node: usize, id: LinkId) {
        let random = self.rng.next() as u32;
        if let Some(link) = self.link(node, id) {
            let delay = link.announcements.next(random);
            self.later(node, delay, AgentStep::Pump(id));
        }
    }
}
