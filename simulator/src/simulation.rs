//! The main loop of the simulation.
//!
//! One action runs at a time, in the order of simulated time. Every action of a process belongs to one
//! process number ("life") and is dropped when that process ends.

use std::collections::{BTreeMap, BTreeSet};

use reprise_agent_core::effect::{FetchId, LookupId, OfferId, PlaceId, ServeId};
use reprise_agent_core::event::{Event, Grant, Request, RequestId};
use reprise_policy::{BlockKey, Epoch, SessionId, TenantId, Tick};

use crate::answer_audit::AnswerAudit;
use crate::budgets::{self, BudgetAudit, FIRST_BUDGET_AFTER};
use crate::environment::Environment;
use crate::extents::HolderId;
use crate::layer_driver::begin_reports;
use crate::link::LinkId;
use crate::member::Member;
use crate::membership::MemberStep;
use crate::memory::Tag;
use crate::messages::{CallId, Message};
use crate::network::{End, Host, LineId};
use crate::node::{Node, Process};
use crate::observation;
use crate::operators::operate;
use crate::random_faults::{Repair, begin_domain_changes, change_domain, fault, has_extents, outage};
use crate::rng::Rng;
use crate::setup::{Limits, Setup, Variant};
use crate::store_process::{StoreProcess, StoreStep};
use crate::tenants::send_grant;
use crate::timed::{self, ServeStep, Serving, Timed};
use crate::trace::Recording;

/// Maximum number of steps of one run; more indicate an endless loop.
const STEPS_MAX: u64 = 3_000_000;
const STEPS_PER_NODE_MAX: u64 = 100_000;

/// An action of the simulation's schedule.
#[derive(Debug)]
pub(crate) enum Action {
    /// A message arrives at an end of a connection.
    Deliver {
        line: LineId,
        to: usize,
        number: u64,
        message: Message,
    },
    /// A process is notified that its connection has ended.
    LineLost {
        line: LineId,
        end: End,
    },
    /// A step of a node's agent process.
    Agent {
        node: usize,
        life: u64,
        what: AgentStep,
    },
    /// A step of a member's process.
    Member {
        member: usize,
        life: u64,
        what: MemberStep,
    },
    /// A step of the store's process.
    Store {
        life: u64,
        what: StoreStep,
    },
    Engine {
        node: usize,
        seat: usize,
    },
    /// The control plane sends a grant to a tenant.
    Grant,
    /// An operator sets the mode of a node.
    Operate,
    /// An operator sets a tenant's budget.
    Budget,
    Fault,
    /// The failure domain of a node changes.
    Domain,
    /// The write of an extent by a process of a node ends.
    ExtentWritten {
        node: usize,
        number: u64,
    },
    /// A step of a process that holds extents and has no session.
    Holder {
        node: usize,
        holder: HolderId,
    },
    /// The power of a node fails.
    Outage(usize),
    /// A channel may have ended transfers.
    Channel(usize),
    /// A step of the engine of a node that serves a trace.
    Serve {
        node: usize,
        what: ServeStep,
    },
    Repair(Repair),
}

/// A step of an agent's process.
#[derive(Debug)]
pub(crate) enum AgentStep {
    /// The deadline of the core.
    Tick,
    /// The next step of a device operation or check.
    Job(u64),
    /// A request of an engine arrives.
    Request { session: SessionId, request: RequestId, body: Request },
    /// An engine's socket is closed.
    Closed { session: SessionId },
    /// The event that results from an effect.
    Event(Event),
    /// A grant of a tenant's ledger, for the registration of an epoch.
    Order { epoch: Epoch, grant: Grant },
    /// Heartbeat of a registration.
    Beat { link: LinkId, epoch: Epoch },
    /// Registration of a link, unless another one was requested meanwhile.
    Register { link: LinkId, request: u64 },
    /// The node has another failure domain.
    DomainChanged,
    /// Limit of the wait for the replacement of a registration.
    ReplacementOverdue { link: LinkId, awaited: u64 },
    /// Attempt to send announcements.
    Pump(LinkId),
    /// Closes a link if its member has not returned.
    CloseIfGone(LinkId),
    /// Follows members and nodes.
    Follow,
    /// Check of the connection to home.
    CheckHome { attempt: u64 },
    /// Home has been unsure of its place for too long.
    HomeUnsure { attempt: u64 },
    /// Ends a lookup that has no member to ask.
    LookupOver(LookupId),
    /// Report to a link's member.
    Report(LinkId),
    /// The core reports its state.
    ReportState,
    /// Timeout of a call to the control plane.
    CallTimeout(CallId),
    /// Deadline of a fetch.
    FetchDeadline(FetchId),
    /// Ends a placement request that has no member to ask.
    PlaceOver(PlaceId),
    /// Deadline of an offer.
    OfferDeadline(OfferId),
    /// Polls whether awaited processes have ended their I/O on extents.
    PollExtents,
    /// The transport sends the next pieces of a block.
    Send { serve: ServeId, block: u32 },
}

/// State of a simulation; see the module.
#[derive(Debug)]
pub(crate) struct Simulation {
    pub(crate) env: Environment,
    pub(crate) nodes: Vec<Node>,
    pub(crate) members: Vec<Option<Member>>,
    pub(crate) store_process: StoreProcess,
    pub(crate) answers: AnswerAudit,
    /// Every content that was ever committed under a key, on any node.
    pub(crate) truth: BTreeMap<BlockKey, BTreeSet<Tag>>,
    pub(crate) grants: u64,
    /// Grants of tenants in the whole cluster.
    pub(crate) budget_audit: BudgetAudit,
    /// Engines that serve a trace, in a simulation with the times of hardware.
    pub(crate) serving: Option<Box<Serving>>,
}

impl Simulation {
    /// Creates a simulation that a seed determines completely.
    pub(crate) fn new(seed: u64, variant: Variant, recording: Recording) -> Simulation {
        let mut rng = Rng::new(seed);
        let mut setup = Setup::draw(&mut rng, variant);
        setup.extents = has_extents(seed);
        let mut simulation = Simulation::of(setup, rng, recording);
        simulation.begin();
        simulation.begin_faults();
        begin_domain_changes(&mut simulation.env, seed);
        simulation.env.layers = begin_reports(seed);
        simulation
    }

    /// Creates a simulation of this setup without random actions and faults.
    pub(crate) fn with(setup: Setup, seed: u64, recording: Recording) -> Simulation {
        let mut simulation = Simulation::of(setup, Rng::new(seed), recording);
        (simulation.env.calm, simulation.env.network.calm) = (true, true);
        simulation.begin();
        simulation
    }

    /// Creates a simulation without random actions and faults whose time has the rates of hardware.
    pub(crate) fn timed(setup: Setup, timed: Timed, seed: u64, recording: Recording) -> Simulation {
        let mut simulation = Simulation::of(setup, Rng::new(seed), recording);
        simulation.env.timed = Some(Box::new(timed));
        (simulation.env.calm, simulation.env.network.calm) = (true, true);
        simulation.begin();
        simulation
    }

    fn of(setup: Setup, rng: Rng, recording: Recording) -> Simulation {
        Simulation {
            nodes: (0..setup.nodes).map(|node| Node::new(node, &setup)).collect(),
            members: (0..setup.members).map(|_| None).collect(),
            store_process: StoreProcess::default(),
            answers: AnswerAudit::default(),
            truth: BTreeMap::new(),
            grants: 0,
            budget_audit: BudgetAudit::default(),
            serving: None,
            env: Environment::new(setup, rng, recording),
        }
    }

    fn begin(&mut self) {
        self.store_process.start(&mut self.env);
        (0..self.members.len()).for_each(|member| self.start_member(member));
        (0..self.nodes.len()).for_each(|node| self.nodes[node].start(&mut self.env));
    }

    /// Starts the engines and the faults.
    fn begin_faults(&mut self) {
        for node in 0..self.nodes.len() {
            for seat in 0..self.env.setup.engines {
                self.env.after(std::time::Duration::from_millis(1), Action::Engine { node, seat });
            }
        }
        self.env.after(self.env.setup.operate_every, Action::Operate);
        self.env.after(self.env.setup.fault_every, Action::Fault);
        match self.env.setup.limits {
            Limits::Drawn => self.env.after(self.env.setup.fault_every, Action::Grant),
            Limits::Budgets => self.env.after(FIRST_BUDGET_AFTER, Action::Budget),
        }
    }

    /// Runs all actions that are due by an instant.
    pub(crate) fn run_until(&mut self, until: Tick) {
        while let Some((at, action)) = self.env.queue.pop(until) {
            self.env.now = self.env.now.max(at);
            self.step(action);
            let steps_max = match self.env.timed {
                Some(_) => u64::MAX,
                None => STEPS_MAX.max(STEPS_PER_NODE_MAX * self.nodes.len() as u64),
            };
            assert!(self.env.trace.steps() < steps_max, "the simulation does not end");
        }
        self.env.now = until;
    }

    fn step(&mut self, action: Action) {
        let Some(action) = self.env.defer(action) else { return };
        self.env.trace.step(self.env.now, code(&action), || format!("{action:?}"));
        match action {
            Action::Deliver { line, to, number, message } => self.arrive((line, to), number, message),
            Action::LineLost { line, end } => self.line_lost(line, end),
            Action::Agent { node, life, what } => {
                if self.env.host(Host::Node(node)).life == life && self.nodes[node].process.is_some() {
                    self.nodes[node].step(&mut self.env, what);
                }
            }
            Action::Member { member, life, what } => {
                let host = self.env.host(Host::Member(member));
                if host.runs && host.life == life {
                    self.at_member(member, |running, env| running.step(env, what));
                }
            }
            Action::Store { life, what } => self.store_process.step(&mut self.env, life, what),
            Action::Engine { node, seat } => self.nodes[node].drive_engine(&mut self.env, seat),
            Action::Grant => send_grant(self),
            Action::Operate => operate(self),
            Action::Budget => budgets::change_budget(&mut self.env, &mut self.members),
            Action::Fault => fault(self),
            Action::Domain => change_domain(self),
            Action::ExtentWritten { node, number } => {
                let Node { extents, disks, .. } = &mut self.nodes[node];
                extents.written(&mut self.env, disks, number);
            }
            Action::Holder { node, holder } => {
                let Node { extents, disks, .. } = &mut self.nodes[node];
                extents.step(&mut self.env, disks, holder);
            }
            Action::Outage(node) => outage(self, node),
            Action::Channel(channel) => timed::look(&mut self.env, channel),
            Action::Serve { node, what } => timed::serve(self, node, what),
            Action::Repair(repair) => self.repair(repair),
        }
        observation::check(self);
    }

    /// Starts the process of a member.
    pub(crate) fn start_member(&mut self, member: usize) {
        self.members[member] = Some(Member::start(&mut self.env, member));
    }

    /// Runs a step of a member's running process. If it ends, its memory is lost.
    ///
    /// # Panics
    /// If no process runs: a message or step for it would be lost without a trace.
    pub(crate) fn at_member(&mut self, member: usize, step: impl FnOnce(&mut Member, &mut Environment)) {
        let running = self.members[member].as_mut();
        let running = running.unwrap_or_else(|| panic!("member {member} gets a step and does not run"));
        step(running, &mut self.env);
        if !self.env.runs(Host::Member(member)) {
            self.members[member] = None;
        }
    }

    // ---- messages -----------------------------------------------------------------------------------------

    fn arrive(&mut self, (line, to): (LineId, usize), number: u64, message: Message) {
        let Some(ends) = self.env.network.line(line).map(|line| line.ends) else { return };
        if self.env.network.is_cut(ends[0].host, ends[1].host) {
            return self.env.network.hold(line, to, number, message);
        }
        for message in self.env.network.in_order(line, to, number, message) {
            self.deliver(line, to, message);
        }
    }

    fn deliver(&mut self, line: LineId, to: usize, message: Message) {
        let Some(ends) = self.env.network.line(line).map(|line| line.ends) else { return };
        let (receiver, sender) = (ends[to], ends[1 - to]);
        if !self.env.lives(sender) {
            return;
        }
        if !self.env.lives(receiver) || !self.listens(receiver.host, to) {
            // A running machine rejects the connection; one that is off does not answer.
            if self.env.host(receiver.host).powered {
                self.env.lose_end(line, sender, 40..600);
            }
            return;
        }
        match (receiver.host, message) {
            (Host::Member(member), Message::Call { call, request }) => {
                self.at_member(member, |running, env| running.serve_call(env, (line, call), request));
            }
            (Host::Node(node), Message::Reply { call, reply }) => {
                self.nodes[node].on_answer(&mut self.env, call, reply);
            }
            (Host::Node(node), Message::Peer(message)) => {
                self.nodes[node].on_peer_message(&mut self.env, line, message);
            }
            (Host::Store, Message::StoreRequest { call, request }) => {
                self.store_process.serve(&mut self.env, (line, call), request);
            }
            (Host::Member(member), Message::StoreReply { call, reply }) => {
                self.at_member(member, |running, env| running.on_store_reply(env, call, reply));
            }
            (host, message) => unreachable!("unexpected message for {host:?}: {message:?}"),
        }
        observation::check(self);
    }

    /// Reports whether a process accepts messages at this end of a connection: it has opened the connection,
    /// or serves.
    fn listens(&self, host: Host, end: usize) -> bool {
        match host {
            Host::Member(member) => {
                end == 0 || self.members[member].as_ref().is_some_and(|running| running.joining.serving)
            }
            Host::Node(_) | Host::Store => true,
        }
    }

    fn line_lost(&mut self, line: LineId, end: End) {
        if !self.env.lives(end) {
            return;
        }
        self.env.network.close(line);
        match end.host {
            Host::Node(node) => self.nodes[node].line_lost(&mut self.env, line),
            Host::Member(member) => {
                self.at_member(member, |running, env| running.line_lost(env, line));
            }
            Host::Store => self.store_process.line_lost(line),
        }
    }

    // ---- agents -------------------------------------------------------------------------------------------

    pub(crate) fn process(&mut self, node: usize) -> &mut Process {
        self.nodes[node].process()
    }

    /// Returns the last grant of a node's core for a tenant.
    pub(crate) fn grant_of(&self, node: usize, tenant: TenantId) -> Option<Grant> {
        self.nodes[node].process.as_ref()?.grant_of(tenant)
    }

    /// Reports whether a node has a block durably, or the directory may not know yet that the block was removed.
    pub(crate) fn was_durable(&self, node: usize, key: &BlockKey) -> bool {
        self.nodes[node].was_durable(&self.env, key)
    }
}

/// Removes the entries of a map that satisfy a condition.
pub(crate) fn take_where<K: Copy + Ord, V>(
    map: &mut BTreeMap<K, V>,
    holds: impl Fn(&V) -> bool,
) -> Vec<(K, V)> {
    let keys: Vec<K> = map.iter().filter(|(_, value)| holds(value)).map(|(key, _)| *key).collect();
    keys.into_iter().map(|key| (key, map.remove(&key).expect("it was just found"))).collect()
}

/// Encodes an action as numbers, for the digest.
fn code(action: &Action) -> [u64; 3] {
    match action {
        Action::Deliver { line, to, message, .. } => [1 + (*to as u64) * 256, line.0, message.code()],
        Action::LineLost { line, end } => [2, line.0, end.life],
        Action::Agent { node, life, what } => {
            let (kind, detail) = match what {
                AgentStep::Tick => (1, 0),
                AgentStep::Job(job) => (2, *job),
                AgentStep::Request { session, request, .. } => (3, session.0 << 32 | request.0),
                AgentStep::Closed { session } => (4, session.0),
                AgentStep::Event(_) => (5, 0),
                AgentStep::Order { epoch, grant } => (21, epoch.0 ^ grant.version),
                AgentStep::Beat { epoch, .. } => (6, epoch.0),
                AgentStep::Register { link, .. } => (7, link.0),
                AgentStep::DomainChanged => (23, 0),
                AgentStep::ReplacementOverdue { link, awaited } => (22, link.0 << 32 | awaited),
                AgentStep::Pump(link) => (8, link.0),
                AgentStep::CloseIfGone(link) => (12, link.0),
                AgentStep::Follow => (13, 0),
                AgentStep::CheckHome { attempt } => (14, *attempt),
                AgentStep::HomeUnsure { attempt } => (15, *attempt),
                AgentStep::LookupOver(lookup) => (16, lookup.0),
                AgentStep::Report(link) => (17, link.0),
                AgentStep::ReportState => (18, 0),
                AgentStep::CallTimeout(call) => (9, call.0),
                AgentStep::FetchDeadline(fetch) => (10, fetch.0),
                AgentStep::PlaceOver(place) => (19, place.0),
                AgentStep::OfferDeadline(offer) => (20, offer.0),
                AgentStep::PollExtents => (24, 0),
                AgentStep::Send { serve, block } => (11, serve.0 << 32 | u64::from(*block)),
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
        Action::Domain => [13, 0, 0],
        Action::Repair(_) => [8, 0, 0],
        Action::Outage(node) => [9, *node as u64, 0],
        Action::Channel(channel) => [16, *channel as u64, 0],
        Action::Serve { node, what } => [17 + ((*node as u64) << 32), what.code(), 0],
        Action::ExtentWritten { node, number } => [14, *node as u64, *number],
        Action::Holder { node, holder } => [15 + ((*node as u64) << 32), holder.life, holder.session.0],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "member 0 gets a step and does not run")]
    fn no_step_of_a_stopped_member_is_dropped_silently() {
        let mut simulation = Simulation::with(Setup::large(1, 1), 1, Recording::Digest);
        simulation.at_member(0, |running, env| running.kill(env));
        simulation.at_member(0, |_, _| ());
    }
}
