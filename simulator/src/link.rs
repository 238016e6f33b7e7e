//! An agent's client of the control plane: registration, beats, announcements, lookups.
//!
//! The queue of announcements and the delays between attempts are the production code. The order of calls follows the
//! loops of `node-agent/src/directory/{link,heartbeat}.rs`, which are futures of a runtime and cannot run here: register
//! until granted; beat on a connection of its own until unknown; one batch at a time; lookups only while connected.
//! The node list is left out: every agent knows where the others are.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use reprise_agent_core::backoff::Backoff;
use reprise_agent_core::effect::LookupId;
use reprise_agent_core::event::Event;
use reprise_agent_core::outbox::{Batch, Next, Outbox, Outcome};
use reprise_controlplane_core::Standing;
use reprise_policy::{BlockKey, Epoch, NodeId, Tick};

use crate::messages::{CallId, Message, Reply, Request};
use crate::network::{Host, LineId};
use crate::setup::{BEAT_ANSWER, BEAT_EVERY, CALL_TIMEOUT, SETTLED_AFTER};
use crate::world::{Local, World, take_where};

/// See the module.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) outbox: Outbox,
    pub(crate) granted: Option<Granted>,
    /// Beats are answered.
    connected: bool,
    calls: BTreeMap<CallId, Call>,
    calls_begun: u64,
    /// Connection for everything but beats.
    line: Option<LineId>,
    beat_line: Option<LineId>,
    /// A batch is under way, or the next attempt is awaited.
    announcing: bool,
    registering: Backoff,
    quarrel: Backoff,
    announcements: Backoff,
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

#[derive(Debug)]
struct Call {
    of: Purpose,
    line: LineId,
}

#[derive(Debug)]
enum Purpose {
    Register,
    Beat { epoch: Epoch },
    Slots { epoch: Epoch },
    Update(Arc<Batch>),
    Lookup { lookup: LookupId, keys: usize },
}

impl Link {
    pub(crate) fn new(changes_queued_max: usize) -> Link {
        Link {
            outbox: Outbox::new(changes_queued_max),
            granted: None,
            connected: false,
            calls: BTreeMap::new(),
            calls_begun: 0,
            line: None,
            beat_line: None,
            announcing: false,
            registering: Backoff::default(),
            quarrel: Backoff::default(),
            announcements: Backoff::default(),
        }
    }

    /// Calls without an answer other than beats.
    pub(crate) fn waiting(&self) -> usize {
        self.calls.values().filter(|call| !matches!(call.of, Purpose::Beat { .. })).count()
    }
}

impl World {
    fn link(&mut self, node: usize) -> &mut Link {
        &mut self.process(node).link
    }

    fn call(&mut self, node: usize, of: Purpose, request: Request, time: Duration) {
        let beats = matches!(of, Purpose::Beat { .. });
        let link = self.link(node);
        let known = if beats { link.beat_line } else { link.line };
        let line = known.unwrap_or_else(|| self.open_line(Host::Node(node), Host::Member));
        let link = self.link(node);
        *(if beats { &mut link.beat_line } else { &mut link.line }) = Some(line);
        let call = CallId(link.calls_begun);
        link.calls_begun += 1;
        link.calls.insert(call, Call { of, line });
        self.send(line, 1, Message::Call { call, request });
        self.later(node, time, Local::CallTimeout(call));
    }

    pub(crate) fn call_timeout(&mut self, node: usize, call: CallId) {
        let Some(Call { of, line }) = self.link(node).calls.remove(&call) else { return };
        let far = self.network.line(line).map(|line| line.ends[1]);
        // Keep-alives have found by now that nobody is there; beats take a new connection whenever one fails.
        if matches!(of, Purpose::Beat { .. }) || far.is_none_or(|end| !self.lives(end)) {
            self.drop_line(node, line);
        }
        self.call_failed(node, &of);
    }

    fn drop_line(&mut self, node: usize, line: LineId) {
        let link = self.link(node);
        link.line = link.line.filter(|known| *known != line);
        link.beat_line = link.beat_line.filter(|known| *known != line);
    }

    pub(crate) fn link_lost(&mut self, node: usize, line: LineId) {
        self.drop_line(node, line);
        let lost = take_where(&mut self.link(node).calls, |call| call.line == line);
        lost.iter().for_each(|(_, call)| self.call_failed(node, &call.of));
    }

    fn call_failed(&mut self, node: usize, of: &Purpose) {
        let random = self.rng.next() as u32;
        match *of {
            Purpose::Register => {
                let delay = self.link(node).registering.next(random);
                self.later(node, delay, Local::Register);
            }
            Purpose::Beat { epoch } => {
                self.link(node).connected = false;
                self.next_beat(node, epoch);
            }
            Purpose::Slots { .. } | Purpose::Update(_) => self.announce_again(node),
            Purpose::Lookup { lookup, .. } => self.apply(node, Event::LookupFailed { lookup }),
        }
    }

    pub(crate) fn on_answer(&mut self, node: usize, call: CallId, reply: Reply) {
        let Some(Call { of, .. }) = self.link(node).calls.remove(&call) else { return };
        match (of, reply) {
            (Purpose::Register, Reply::Registered { node: number, epoch }) => {
                self.granted(node, number, epoch);
            }
            (Purpose::Beat { epoch }, Reply::Beaten { known, version }) => {
                self.link(node).outbox.heard(epoch, version);
                self.beaten(node, epoch, known);
            }
            (Purpose::Slots { epoch }, Reply::Standing(None)) => {
                self.lose_registration(node, epoch);
                self.announce_again(node);
            }
            (Purpose::Slots { epoch }, Reply::Standing(Some(standing))) => {
                let Standing { version, owned, wanted } = *standing;
                let link = self.link(node);
                link.outbox.follow(epoch, version, &owned, &wanted);
                link.announcing = false;
                link.announcements.reset();
                self.pump(node);
            }
            (Purpose::Update(batch), Reply::Updated { answer, version }) => {
                let outbox = &mut self.link(node).outbox;
                outbox.heard(batch.epoch, version);
                let outcome = outbox.answered(batch.epoch, batch.sequence, answer);
                if outcome == Outcome::Fenced {
                    self.count("fenced");
                    self.lose_registration(node, batch.epoch);
                    return self.announce_again(node);
                }
                if outcome == Outcome::Gap {
                    self.count("gaps");
                }
                let link = self.link(node);
                link.announcing = false;
                link.announcements.reset();
                self.pump(node);
            }
            (Purpose::Lookup { lookup, keys }, Reply::Found(found)) => {
                assert_eq!(found.len(), keys, "an answer for each key");
                self.apply(node, Event::Found { lookup, found });
            }
            (of, reply) => panic!("{reply:?} is no answer to {of:?}"),
        }
    }

    // ---- registration ------------------------------------------------------------------------------------------

    pub(crate) fn register(&mut self, node: usize) {
        self.call(node, Purpose::Register, Request::Register { name: node }, CALL_TIMEOUT);
    }

    fn granted(&mut self, node: usize, number: NodeId, epoch: Epoch) {
        let now = self.now;
        let link = self.link(node);
        link.registering.reset();
        link.outbox.grant(number, epoch);
        link.granted = Some(Granted { node: number, epoch, since: now, beat: now });
        link.connected = true;
        self.count("registrations");
        self.beat(node, epoch);
        self.pump(node);
    }

    fn lose_registration(&mut self, node: usize, epoch: Epoch) {
        let (now, random) = (self.now, self.rng.next() as u32);
        let link = self.link(node);
        let Some(granted) = link.granted.take_if(|granted| granted.epoch == epoch) else { return };
        link.outbox.lose();
        link.connected = false;
        let delay = if now.since(granted.since) >= SETTLED_AFTER {
            link.quarrel.reset();
            Duration::ZERO
        } else {
            link.quarrel.next(random)
        };
        self.later(node, delay, Local::Register);
    }

    // ---- beats -------------------------------------------------------------------------------------------------

    pub(crate) fn beat(&mut self, node: usize, epoch: Epoch) {
        let now = self.now;
        let Some(granted) = self.link(node).granted.as_mut().filter(|granted| granted.epoch == epoch) else {
            return;
        };
        granted.beat = now;
        let request = Request::Beat { node: granted.node, epoch };
        self.call(node, Purpose::Beat { epoch }, request, BEAT_ANSWER);
    }

    fn beaten(&mut self, node: usize, epoch: Epoch, known: bool) {
        if !known {
            return self.lose_registration(node, epoch);
        }
        let link = self.link(node);
        if link.granted.is_some_and(|granted| granted.epoch == epoch) {
            link.connected = true;
        }
        self.next_beat(node, epoch);
        self.pump(node);
    }

    fn next_beat(&mut self, node: usize, epoch: Epoch) {
        let now = self.now;
        let Some(granted) = self.link(node).granted.filter(|granted| granted.epoch == epoch) else { return };
        let wait = granted.beat.after(BEAT_EVERY).since(now);
        self.later(node, wait, Local::Beat { epoch });
    }

    // ---- announcements -----------------------------------------------------------------------------------------

    /// Sends the next batch, unless one is under way.
    pub(crate) fn pump(&mut self, node: usize) {
        if self.link(node).announcing {
            return;
        }
        match self.link(node).outbox.next_step() {
            Next::Wait => {}
            Next::Inventory(slots) => {
                self.count("inventories");
                // The core's answer comes through the outbox, and this is called again.
                self.apply(node, Event::InventoryWanted { slots });
            }
            Next::Standing(number, epoch) => {
                self.link(node).announcing = true;
                let request = Request::Slots { node: number, epoch };
                self.call(node, Purpose::Slots { epoch }, request, CALL_TIMEOUT);
            }
            Next::Send(batch) => {
                self.link(node).announcing = true;
                self.call(node, Purpose::Update(batch.clone()), Request::Update(batch), CALL_TIMEOUT);
            }
        }
    }

    /// The next attempt is due.
    pub(crate) fn pump_again(&mut self, node: usize) {
        self.link(node).announcing = false;
        self.pump(node);
    }

    fn announce_again(&mut self, node: usize) {
        let random = self.rng.next() as u32;
        let delay = self.link(node).announcements.next(random);
        self.later(node, delay, Local::Pump);
    }

    // ---- lookups -----------------------------------------------------------------------------------------------

    pub(crate) fn look_up(&mut self, node: usize, lookup: LookupId, keys: Vec<BlockKey>, time: Duration) {
        let link = self.link(node);
        if !link.connected {
            return self.later(node, Duration::ZERO, Local::Event(Event::LookupFailed { lookup }));
        }
        let asking = link.granted.map(|granted| granted.node);
        let count = keys.len();
        self.count("lookups");
        self.call(node, Purpose::Lookup { lookup, keys: count }, Request::Lookup { keys, asking }, time);
    }
}
