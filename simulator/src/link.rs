//! An agent's link to one member of the control plane: registration, beats, announcements.
//!
//! The queue of announcements and the delays between attempts are the production code. The order of calls follows the
//! loops of `node-agent/src/directory/{link,heartbeat}.rs`, which are futures of a runtime and cannot run here: register
//! until granted; beat on a connection of its own until unknown; one batch at a time.

use std::sync::Arc;
use std::time::Duration;

use reprise_agent_core::backoff::Backoff;
use reprise_agent_core::event::Event;
use reprise_agent_core::orders::ReportNumber;
use reprise_agent_core::outbox::{Batch, Next, Outbox, Outcome};
use reprise_controlplane_core::Standing;
use reprise_policy::{Epoch, NodeId, Tick};

use crate::client::Purpose;
use crate::messages::{Reply, Request};
use crate::network::{Host, LineId};
use crate::reporting::Reporting;
use crate::setup::{BEAT_ANSWER, BEAT_EVERY, CALL_TIMEOUT, SETTLED_AFTER, Variant};
use crate::world::{Local, World};

/// A link of an agent's process; the next one to the same member is another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LinkId(pub(crate) u64);

/// See the module.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) member: usize,
    pub(crate) outbox: Outbox,
    pub(crate) granted: Option<Granted>,
    /// The member answers and knows this node.
    pub(crate) up: bool,
    /// Connection for everything but beats.
    line: Option<LineId>,
    beat_line: Option<LineId>,
    /// A batch is under way, or the next attempt is awaited.
    announcing: bool,
    /// The registration under which the outbox goes on although there is a newer one: a flaw.
    outlived: Option<Epoch>,
    registering: Backoff,
    quarrel: Backoff,
    announcements: Backoff,
    pub(crate) reporting: Reporting,
}

/// A registration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Granted {
    pub(crate) node: NodeId,
    pub(crate) epoch: Epoch,
    since: Tick,
    /// When the last beat was due.
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
            reporting: Reporting::default(),
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

impl World {
    fn link(&mut self, node: usize, id: LinkId) -> Option<&mut Link> {
        self.client(node).links.get_mut(&id)
    }

    /// The connection for everything but beats.
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
                self.later(node, delay, Local::Register(id));
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
            (LinkCall::Beat { epoch }, Reply::Beaten { known, version }) => {
                link.outbox.heard(link.outlived.unwrap_or(epoch), version);
                self.beaten(node, id, epoch, known);
            }
            (LinkCall::Slots { epoch }, Reply::Standing(None)) => {
                self.lose_registration(node, id, epoch);
                self.announce_again(node, id);
            }
            (LinkCall::Slots { epoch }, Reply::Standing(Some(standing))) => {
                let Standing { version, owned, wanted } = *standing;
                link.outbox.follow(epoch, version, &owned, &wanted);
                self.announced(node, id);
            }
            (LinkCall::Update(batch), Reply::Updated { answer, version }) => {
                link.outbox.heard(batch.epoch, version);
                match link.outbox.answered(batch.epoch, batch.sequence, answer) {
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
            (of, reply) => unreachable!("{reply:?} is no answer to {of:?}"),
        }
    }

    // ---- registration ------------------------------------------------------------------------------------------

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
            link.outbox.grant(to.0, to.1);
            link.outlived = keeps.then_some(to.1);
        }
        link.granted = Some(Granted { node: to.0, epoch: to.1, since: now, beat: now });
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
            link.outbox.lose();
        }
        link.up = false;
        let delay = if now.since(granted.since) >= SETTLED_AFTER {
            link.quarrel.reset();
            Duration::ZERO
        } else {
            link.quarrel.next(random)
        };
        self.later(node, delay, Local::Register(id));
    }

    // ---- beats -------------------------------------------------------------------------------------------------

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

    fn beaten(&mut self, node: usize, id: LinkId, epoch: Epoch, known: bool) {
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
        self.later(node, wait, Local::Beat { link: id, epoch });
    }

    // ---- announcements -----------------------------------------------------------------------------------------

    /// Sends the next batch of every link, where none is under way.
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
                // The core's answer comes through the outbox, and this is called again.
                self.apply(node, Event::InventoryWanted { slots });
            }
            Next::Standing(_, epoch) => {
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

    /// The next attempt is due.
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
            self.later(node, delay, Local::Pump(id));
        }
    }
}
