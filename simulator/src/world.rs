//! The world: what happens next, and to whom.
//!
//! One action at a time, in the order of simulated time; every action of a process belongs to one life of it and dies with
//! that life.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use reprise_agent_core::effect::{FetchId, LookupId, OfferId, PlaceId, ServeId};
use reprise_agent_core::event::{Event, Grant, Request, RequestId};
use reprise_policy::shards::ShardMap;
use reprise_policy::{BlockKey, Epoch, SessionId, Tick};

use crate::answers::Answers;
use crate::budgets::{Books, FIRST_BUDGET_AFTER};
use crate::clock::Clock;
use crate::faults::Repair;
use crate::joining::MemberStep;
use crate::keeper::{Keeper, KeeperStep};
use crate::link::LinkId;
use crate::member::{Member, member_name};
use crate::memory::Tag;
use crate::messages::{CallId, Message};
use crate::network::{End, Host, LineId, Network};
use crate::node::Node;
use crate::places::Places;
use crate::queue::Queue;
use crate::rng::Rng;
use crate::setup::{Limits, Setup, Variant};
use crate::trace::{Recording, Trace};

/// Steps of one run at the most: more would mean that something goes round in circles.
const STEPS_MAX: u64 = 3_000_000;
const STEPS_PER_NODE_MAX: u64 = 100_000;

/// Something that happens at an instant.
#[derive(Debug)]
pub(crate) enum Action {
    /// A message arrives at an end of a connection.
    Deliver { line: LineId, to: usize, number: u64, message: Message },
    /// A process learns that a connection of its is gone.
    LineLost { line: LineId, end: End },
    /// Something within a process of a node.
    Local { node: usize, life: u64, what: Local },
    /// Something within a member's process.
    Member { member: usize, life: u64, what: MemberStep },
    /// Something within the store's process.
    Store { life: u64, what: KeeperStep },
    /// An engine does something.
    Engine { node: usize, seat: usize },
    /// The control plane grants a tenant something.
    Grant,
    /// An operator says what a node is for.
    Operate,
    /// An operator sets a tenant's budget.
    Budget,
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
    /// An order of a tenant's ledger, to the registration of an epoch.
    Order { epoch: Epoch, grant: Grant },
    /// Time for a beat of a registration.
    Beat { link: LinkId, epoch: Epoch },
    /// Time to try to register.
    Register(LinkId),
    /// Time to look for announcements to send.
    Pump(LinkId),
    /// A link's member may have left for good.
    CloseIfGone(LinkId),
    /// Time to follow members and nodes.
    Follow,
    /// Time to look whether home is there.
    LookAtHome { attempt: u64 },
    /// Home has not been sure of its place for long.
    HomeUnsure { attempt: u64 },
    /// A lookup has nobody to ask.
    LookupOver(LookupId),
    /// Time for a report to a link's member.
    Report(LinkId),
    /// The core says how it is.
    TellState,
    /// A call to the control plane has had its time.
    CallTimeout(CallId),
    /// A fetch has had its time.
    FetchDeadline(FetchId),
    /// A question of places has nobody to ask.
    PlaceOver(PlaceId),
    /// An offer has had its time.
    OfferDeadline(OfferId),
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
    pub(crate) places: Places,
    pub(crate) members: Vec<Option<Member>>,
    pub(crate) keeper: Keeper,
    /// Maps of slots, which everybody computes and gets the same.
    maps: BTreeMap<(Epoch, Vec<usize>), Arc<ShardMap>>,
    pub(crate) answers: Answers,
    /// Everything that was ever committed under a key, anywhere.
    pub(crate) truth: BTreeMap<BlockKey, BTreeSet<Tag>>,
    pub(crate) tags: Tag,
    pub(crate) grants: u64,
    /// What tenants may hold in the whole cluster.
    pub(crate) books: Books,
    pub(crate) calm: bool,
    /// How often what happened, by name.
    pub(crate) seen: BTreeMap<&'static str, u64>,
}

impl World {
    /// A world that a seed decides in every respect.
    pub(crate) fn new(seed: u64, variant: Variant, recording: Recording) -> World {
        let mut rng = Rng::new(seed);
        let setup = Setup::draw(&mut rng, variant);
        let mut world = World::of(setup, rng, recording);
        world.begin();
        world.begin_trouble();
        world
    }

    /// A world of this make in which nothing happens by itself.
    pub(crate) fn with(setup: Setup, seed: u64, recording: Recording) -> World {
        let mut world = World::of(setup, Rng::new(seed), recording);
        (world.calm, world.network.calm) = (true, true);
        world.begin();
        world
    }

    fn of(setup: Setup, mut rng: Rng, recording: Recording) -> World {
        let clock = Clock::draw(Tick(0), &mut rng);
        let nodes = (0..setup.nodes).map(|node| Node::new(node, &setup)).collect();
        World {
            now: Tick(0),
            rng,
            queue: Queue::new(),
            trace: Trace::new(recording),
            network: Network::new(),
            places: Places::new(setup.nodes, setup.members, clock),
            nodes,
            members: (0..setup.members).map(|_| None).collect(),
            keeper: Keeper::default(),
            maps: BTreeMap::new(),
            answers: Answers::default(),
            truth: BTreeMap::new(),
            tags: 0,
            grants: 0,
            books: Books::default(),
            calm: false,
            seen: BTreeMap::new(),
            setup,
        }
    }

    fn begin(&mut self) {
        self.start_store();
        (0..self.members.len()).for_each(|member| self.start_member(member));
        (0..self.nodes.len()).for_each(|node| self.start_agent(node));
    }

    /// Engines come to work, and things begin to break.
    fn begin_trouble(&mut self) {
        for node in 0..self.nodes.len() {
            for seat in 0..self.setup.engines {
                self.after(std::time::Duration::from_millis(1), Action::Engine { node, seat });
            }
        }
        self.after(self.setup.operate_every, Action::Operate);
        self.after(self.setup.fault_every, Action::Fault);
        match self.setup.limits {
            Limits::Drawn => self.after(self.setup.fault_every, Action::Grant),
            Limits::Budgets => self.after(FIRST_BUDGET_AFTER, Action::Budget),
        }
    }

    /// Has something happen later.
    pub(crate) fn after(&mut self, delay: std::time::Duration, action: Action) {
        self.queue.push(self.now.after(delay), action);
    }

    /// Has something happen later in the running process of a node, by its clock.
    pub(crate) fn later(&mut self, node: usize, delay: std::time::Duration, what: Local) {
        let host = Host::Node(node);
        let (at, life) = (self.in_time(host, delay), self.place(host).life);
        self.queue.push(at, Action::Local { node, life, what });
    }

    /// Lets everything happen that is due by an instant.
    pub(crate) fn run_until(&mut self, until: Tick) {
        while let Some((at, action)) = self.queue.pop(until) {
            self.now = self.now.max(at);
            self.step(action);
            let steps_max = STEPS_MAX.max(STEPS_PER_NODE_MAX * self.nodes.len() as u64);
            assert!(self.trace.steps() < steps_max, "nothing comes to its end");
        }
        self.now = until;
    }

    /// The map of these members.
    pub(crate) fn map_of(&mut self, epoch: Epoch, members: impl Iterator<Item = usize>) -> Arc<ShardMap> {
        let members: Vec<usize> = members.collect();
        let make = |members: &[usize]| ShardMap::new(epoch, members.iter().copied().map(member_name));
        let known = self.maps.entry((epoch, members.clone()));
        known.or_insert_with(|| Arc::new(make(&members).expect("members have names of their own"))).clone()
    }

    pub(crate) fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }

    fn step(&mut self, action: Action) {
        let Some(action) = self.defer(action) else { return };
        self.trace.step(self.now, code(&action), || format!("{action:?}"));
        match action {
            Action::Deliver { line, to, number, message } => self.arrive((line, to), number, message),
            Action::LineLost { line, end } => self.line_lost(line, end),
            Action::Local { node, life, what } => {
                if self.place(Host::Node(node)).life == life && self.nodes[node].process.is_some() {
                    self.local(node, what);
                }
            }
            Action::Member { member, life, what } => self.member_step(member, life, what),
            Action::Store { life, what } => self.keeper_step(life, what),
            Action::Engine { node, seat } => self.engine_turn(node, seat),
            Action::Grant => self.send_grant(),
            Action::Operate => self.operate(),
            Action::Budget => self.change_budget(),
            Action::Fault => self.fault(),
            Action::Outage(node) => self.outage(node),
            Action::Repair(repair) => self.repair(repair),
        }
    }

    fn local(&mut self, node: usize, what: Local) {
        match what {
            Local::Tick => self.tick(node),
            Local::Job(job) => self.advance_job(node, job),
            Local::Request { session, request, body } => self.request_arrives(node, (session, request), body),
            Local::Closed { session } => self.apply(node, Event::SessionClosed { session }),
            Local::Event(Event::Budget(grant)) => self.apply_grant(node, grant),
            Local::Event(event) => self.apply(node, event),
            Local::Order { epoch, grant } => self.apply_order(node, epoch, grant),
            Local::Beat { link, epoch } => self.beat(node, link, epoch),
            Local::Register(link) => self.register(node, link),
            Local::Pump(link) => self.pump_again(node, link),
            Local::CloseIfGone(link) => self.close_if_gone(node, link),
            Local::Follow => self.follow_home(node),
            Local::LookAtHome { attempt } => self.look_at_home(node, attempt),
            Local::HomeUnsure { attempt } => self.home_is_unsure(node, attempt),
            Local::LookupOver(lookup) => self.lookup_over(node, lookup),
            Local::Report(link) => self.report_due(node, link),
            Local::TellState => self.tell_state(node),
            Local::CallTimeout(call) => self.call_timeout(node, call),
            Local::FetchDeadline(fetch) => self.fetch_deadline(node, fetch),
            Local::PlaceOver(place) => self.place_over(node, place),
            Local::OfferDeadline(offer) => self.offer_deadline(node, offer),
            Local::Send { serve, block } => self.send_objects(node, serve, block),
        }
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
        Action::Deliver { line, to, message, .. } => [1 + (*to as u64) * 256, line.0, message.code()],
        Action::LineLost { line, end } => [2, line.0, end.life],
        Action::Local { node, life, what } => {
            let (kind, detail) = match what {
                Local::Tick => (1, 0),
                Local::Job(job) => (2, *job),
                Local::Request { session, request, .. } => (3, session.0 << 32 | request.0),
                Local::Closed { session } => (4, session.0),
                Local::Event(_) => (5, 0),
                Local::Order { epoch, grant } => (21, epoch.0 ^ grant.version),
                Local::Beat { epoch, .. } => (6, epoch.0),
                Local::Register(link) => (7, link.0),
                Local::Pump(link) => (8, link.0),
                Local::CloseIfGone(link) => (12, link.0),
                Local::Follow => (13, 0),
                Local::LookAtHome { attempt } => (14, *attempt),
                Local::HomeUnsure { attempt } => (15, *attempt),
                Local::LookupOver(lookup) => (16, lookup.0),
                Local::Report(link) => (17, link.0),
                Local::TellState => (18, 0),
                Local::CallTimeout(call) => (9, call.0),
                Local::FetchDeadline(fetch) => (10, fetch.0),
                Local::PlaceOver(place) => (19, place.0),
                Local::OfferDeadline(offer) => (20, offer.0),
                Local::Send { serve, block } => (11, serve.0 << 32 | u64::from(*block)),
            };
            [3 + kind * 256 + ((*node as u64) << 32), *life, detail]
        }
        Action::Member { member, life, what } => [4 + ((*member as u64) << 32), *life, what.code()],
        Action::Store { life, what } => [5, *life, what.code()],
        Action::Engine { node, seat } => [6, *node as u64, *seat as u64],
        Action::Grant => [10, 0, 0],
        Action::Operate => [11, 0, 0],
        Action::Budget => [12, 0, 0],
        Action::Fault => [7, 0, 0],
        Action::Repair(_) => [8, 0, 0],
        Action::Outage(node) => [9, *node as u64, 0],
    }
}
