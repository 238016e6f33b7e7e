//! The world: what happens next, and to whom.
//!
//! One action at a time, in the order of simulated time; every action of a process belongs to one life of it and dies with
//! that life. A process that is paused does what came meanwhile when it goes on, in the order in which it came.

use std::collections::{BTreeMap, BTreeSet};

use reprise_agent_core::effect::FetchId;
use reprise_agent_core::effect::ServeId;
use reprise_agent_core::event::{Event, Request, RequestId};
use reprise_policy::{BlockKey, Epoch, NodeId, SessionId, Tick};

use crate::faults::Repair;
use crate::member::{Member, Store};
use crate::memory::Tag;
use crate::messages::{CallId, Message};
use crate::network::{End, Host, LineId, Network};
use crate::node::Node;
use crate::queue::Queue;
use crate::rng::Rng;
use crate::setup::{BEAT_EVERY, Setup, Variant};
use crate::trace::{Recording, Trace};

/// Steps of one run at the most: more would mean that something goes round in circles.
const STEPS_MAX: u64 = 3_000_000;

/// Something that happens at an instant.
#[derive(Debug)]
pub(crate) enum Action {
    /// A message arrives at an end of a connection.
    Deliver { line: LineId, to: usize, message: Message },
    /// A process learns that a connection of its is gone.
    LineLost { line: LineId, end: End },
    /// Something within a process of a node.
    Local { node: usize, life: u64, what: Local },
    /// The member writes a registration into its memory, and answers.
    Registered { life: u64, record: reprise_controlplane_core::NodeRecord, line: LineId, call: CallId },
    /// The member looks for silent nodes.
    Expire { life: u64 },
    /// An engine does something.
    Engine { node: usize, seat: usize },
    /// Something breaks.
    Fault,
    /// The power of a node fails.
    Outage(usize),
    /// Something is made whole.
    Repair(Repair),
}

/// Something within an agent's process.
#[derive(Debug)]
pub(crate) enum Local {
    /// The core's deadline.
    Tick,
    /// A job of a device or of the checker gets further.
    Job(u64),
    /// A request of an engine arrives.
    Request { session: SessionId, request: RequestId, body: Request },
    /// An engine's socket is closed.
    Closed { session: SessionId },
    /// Something that an effect has brought.
    Event(Event),
    /// Time for a beat of a registration.
    Beat { epoch: Epoch },
    /// Time to try to register.
    Register,
    /// Time to look for announcements to send.
    Pump,
    /// A call to the control plane has had its time.
    CallTimeout(CallId),
    /// A fetch has had its time.
    FetchDeadline(FetchId),
    /// The transport sends what is next of a block.
    Send { serve: ServeId, block: u32 },
}

/// See the module.
#[derive(Debug)]
pub(crate) struct World {
    pub(crate) setup: Setup,
    pub(crate) now: Tick,
    pub(crate) rng: Rng,
    pub(crate) queue: Queue<Action>,
    pub(crate) trace: Trace,
    pub(crate) network: Network<Message>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) store: Store,
    pub(crate) member: Option<Member>,
    pub(crate) member_life: u64,
    /// Everything that was ever committed under a key, anywhere.
    pub(crate) truth: BTreeMap<BlockKey, BTreeSet<Tag>>,
    pub(crate) tags: Tag,
    pub(crate) calm: bool,
    /// How often what happened, by name.
    pub(crate) seen: BTreeMap<&'static str, u64>,
}

impl World {
    pub(crate) fn new(seed: u64, variant: Variant, recording: Recording) -> World {
        let mut rng = Rng::new(seed);
        let setup = Setup::draw(&mut rng, variant);
        let store = Store::default();
        let member = Some(Member::start(&store, variant));
        let nodes = (0..setup.nodes).map(|node| Node::new(node, &setup)).collect();
        let mut world = World {
            setup,
            now: Tick(0),
            rng,
            queue: Queue::new(),
            trace: Trace::new(recording),
            network: Network::new(),
            nodes,
            store,
            member,
            member_life: 0,
            truth: BTreeMap::new(),
            tags: 0,
            calm: false,
            seen: BTreeMap::new(),
        };
        world.begin();
        world
    }

    fn begin(&mut self) {
        for node in 0..self.nodes.len() {
            self.start_agent(node);
            for seat in 0..self.setup.engines {
                self.after(std::time::Duration::from_millis(1), Action::Engine { node, seat });
            }
        }
        self.after(BEAT_EVERY, Action::Expire { life: 0 });
        self.after(self.setup.fault_every, Action::Fault);
    }

    /// Has something happen later.
    pub(crate) fn after(&mut self, delay: std::time::Duration, action: Action) {
        self.queue.push(self.now.after(delay), action);
    }

    /// Has something happen later in the running process of a node.
    pub(crate) fn later(&mut self, node: usize, delay: std::time::Duration, what: Local) {
        let life = self.nodes[node].life;
        self.after(delay, Action::Local { node, life, what });
    }

    /// Lets everything happen that is due by an instant.
    pub(crate) fn run_until(&mut self, until: Tick) {
        while let Some((at, action)) = self.queue.pop(until) {
            self.now = self.now.max(at);
            self.step(action);
            assert!(self.trace.steps() < STEPS_MAX, "nothing comes to its end");
        }
        self.now = until;
    }

    pub(crate) fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    fn step(&mut self, action: Action) {
        let Some(action) = self.defer(action) else { return };
        self.trace.step(self.now, code(&action), || format!("{action:?}"));
        match action {
            Action::Deliver { line, to, message } => self.deliver(line, to, message),
            Action::LineLost { line, end } => self.line_lost(line, end),
            Action::Local { node, life, what } => {
                if self.nodes[node].life == life && self.nodes[node].process.is_some() {
                    self.local(node, what);
                }
            }
            Action::Registered { life, record, line, call } => self.registered(life, record, (line, call)),
            Action::Expire { life } => self.expire(life),
            Action::Engine { node, seat } => self.engine_turn(node, seat),
            Action::Fault => self.fault(),
            Action::Outage(node) => self.outage(node),
            Action::Repair(repair) => self.repair(repair),
        }
    }

    /// Keeps what is for a paused process until it goes on.
    fn defer(&mut self, action: Action) -> Option<Action> {
        let host = match &action {
            Action::Deliver { line, to, .. } => self.network.line(*line)?.ends[*to].host,
            Action::LineLost { end, .. } => end.host,
            Action::Local { node, .. } => Host::Node(*node),
            _ => return Some(action),
        };
        let Host::Node(node) = host else { return Some(action) };
        let node = &mut self.nodes[node];
        if node.paused {
            node.deferred.push(action);
            return None;
        }
        Some(action)
    }

    fn local(&mut self, node: usize, what: Local) {
        match what {
            Local::Tick => self.tick(node),
            Local::Job(job) => self.advance_job(node, job),
            Local::Request { session, request, body } => self.request_arrives(node, (session, request), body),
            Local::Closed { session } => self.apply(node, Event::SessionClosed { session }),
            Local::Event(event) => self.apply(node, event),
            Local::Beat { epoch } => self.beat(node, epoch),
            Local::Register => self.register(node),
            Local::Pump => self.pump_again(node),
            Local::CallTimeout(call) => self.call_timeout(node, call),
            Local::FetchDeadline(fetch) => self.fetch_deadline(node, fetch),
            Local::Send { serve, block } => self.send_objects(node, serve, block),
        }
    }

    // ---- connections -------------------------------------------------------------------------------------------

    /// The process that runs on a host now; a host without one has a life that no process ever had.
    pub(crate) fn end(&self, host: Host) -> End {
        let life = match host {
            Host::Node(node) if self.nodes[node].process.is_some() => self.nodes[node].life,
            Host::Member if self.member.is_some() => self.member_life,
            Host::Node(_) | Host::Member => u64::MAX,
        };
        End { host, life }
    }

    pub(crate) fn lives(&self, end: End) -> bool {
        end.life != u64::MAX && self.end(end.host) == end
    }

    pub(crate) fn open_line(&mut self, from: Host, to: Host) -> LineId {
        self.network.open(self.end(from), self.end(to))
    }

    /// Sends a message over a connection, to its end with this index.
    pub(crate) fn send(&mut self, line: LineId, to: usize, message: Message) {
        if let Some(at) = self.network.arrival(line, to, self.now, &mut self.rng) {
            self.queue.push(at, Action::Deliver { line, to, message });
        }
    }

    fn deliver(&mut self, line: LineId, to: usize, message: Message) {
        let Some(ends) = self.network.line(line).map(|line| line.ends) else { return };
        let (receiver, sender) = (ends[to], ends[1 - to]);
        if self.network.is_cut(receiver.host, sender.host) {
            return self.network.hold(line, to, message);
        }
        if !self.lives(sender) {
            return;
        }
        if !self.lives(receiver) {
            // A machine that is up refuses; one that is down says nothing.
            if self.is_up(receiver.host) {
                let delay = self.rng.micros(40..600);
                self.after(delay, Action::LineLost { line, end: sender });
            }
            return;
        }
        match message {
            Message::Call { call, request } => self.serve_call(line, call, request),
            Message::Reply { call, reply } => self.on_answer(node_of(receiver.host), call, reply),
            Message::Peer(message) => self.on_peer_message(node_of(receiver.host), line, message),
        }
    }

    fn is_up(&self, host: Host) -> bool {
        match host {
            Host::Node(node) => self.nodes[node].powered,
            Host::Member => true,
        }
    }

    fn line_lost(&mut self, line: LineId, end: End) {
        if !self.lives(end) {
            return;
        }
        self.network.close(line);
        if let Host::Node(node) = end.host {
            self.link_lost(node, line);
            self.peer_line_lost(node, line);
        }
    }

    /// The other ends of a host's connections learn that they are gone, where the kernel can still tell them.
    pub(crate) fn break_lines(&mut self, host: Host) {
        for id in self.network.lines_of(host) {
            let ends = self.network.line(id).expect("listed").ends;
            if !self.network.is_cut(ends[0].host, ends[1].host) {
                self.break_line(id);
            }
        }
    }

    /// Both ends of a connection learn that it is gone.
    pub(crate) fn break_line(&mut self, id: LineId) {
        let Some(line) = self.network.line(id) else { return };
        for end in line.ends {
            let delay = self.rng.micros(10..2000);
            self.after(delay, Action::LineLost { line: id, end });
        }
    }

    /// Node numbers in answers mean machines.
    pub(crate) fn host_of(&self, node: NodeId) -> usize {
        self.store.name_of(node).expect("the directory names registered nodes only")
    }
}

fn node_of(host: Host) -> usize {
    match host {
        Host::Node(node) => node,
        Host::Member => unreachable!("agents do not call each other's control plane"),
    }
}

/// Takes the entries out of a map for which something holds.
pub(crate) fn take_where<K: Copy + Ord, V>(
    map: &mut BTreeMap<K, V>,
    holds: impl Fn(&V) -> bool,
) -> Vec<(K, V)> {
    let keys: Vec<K> = map.iter().filter(|(_, value)| holds(value)).map(|(key, _)| *key).collect();
    keys.into_iter().map(|key| (key, map.remove(&key).expect("it was just found"))).collect()
}

/// An action in numbers, for the digest.
fn code(action: &Action) -> [u64; 3] {
    match action {
        Action::Deliver { line, to, message } => [1 + (*to as u64) * 256, line.0, message.code()],
        Action::LineLost { line, end } => [2, line.0, end.life],
        Action::Local { node, life, what } => {
            let (kind, detail) = match what {
                Local::Tick => (1, 0),
                Local::Job(job) => (2, *job),
                Local::Request { session, request, .. } => (3, session.0 << 32 | request.0),
                Local::Closed { session } => (4, session.0),
                Local::Event(_) => (5, 0),
                Local::Beat { epoch } => (6, epoch.0),
                Local::Register => (7, 0),
                Local::Pump => (8, 0),
                Local::CallTimeout(call) => (9, call.0),
                Local::FetchDeadline(fetch) => (10, fetch.0),
                Local::Send { serve, block } => (11, serve.0 << 32 | u64::from(*block)),
            };
            [3 + kind * 256 + ((*node as u64) << 32), *life, detail]
        }
        Action::Registered { record, .. } => [4, u64::from(record.node.0), record.epoch.0],
        Action::Expire { life } => [5, *life, 0],
        Action::Engine { node, seat } => [6, *node as u64, *seat as u64],
        Action::Fault => [7, 0, 0],
        Action::Repair(_) => [8, 0, 0],
        Action::Outage(node) => [9, *node as u64, 0],
    }
}
