//! An agent's client of the control plane: links, lookups, placement requests, reports, and home.
//!
//! One member, called home, reports members and nodes. When home is silent, unsure of its place, or gone, the
//! next member becomes home. The production state machines decide ([`Home`], `Members`). Here are the calls,
//! the delays, and the keep-alives of connections.
//!
//! The outputs are carried out in the order of `node-agent/src/directory/members.rs` and `reporting.rs`.

use std::sync::Arc;

use reprise_agent_core::backoff::Pause;
use reprise_agent_core::directives::{Directives, NewDirectives, REBALANCER_SLOT, ReplyDirectives};
use reprise_agent_core::effect::{LookupId, PlaceId};
use reprise_agent_core::event::Event;
use reprise_agent_core::home::{Home, Input as HomeInput, Output as HomeOutput};
use reprise_agent_core::limits::LOOKUPS_MAX;
use reprise_agent_core::quota_grants::ReportNumber;
use reprise_agent_core::registrar::Input;
use reprise_policy::{Epoch, NodeId, NodeMode, Tick};

use crate::calls::{Call, Purpose};
use crate::environment::Environment;
use crate::link::{LinkCall, LinkId};
use crate::links::{Links, Progress, source};
use crate::lookups::Lookups;
use crate::messages::{CallId, Direction, MemberListReply, NodeInfo, NodeReportReply, Reply, Request};
use crate::network::{Host, LineId};
use crate::outcomes::{ClientFollow, Follow, Outcomes};
use crate::placement_requests::PlacementRequests;
use crate::reports::{Reports, owner};
use crate::setup::{CALL_TIMEOUT, CLOCK_GRAIN, KEEP_ALIVE_EVERY, Variant};
use crate::simulation::AgentStep;

/// The client of one agent; see the module.
#[derive(Debug)]
pub(crate) struct Client {
    node: usize,
    pub(crate) links: Links,
    home: CurrentHome,
    /// Latest list of nodes from home, by number.
    nodes: Option<Arc<[NodeInfo]>>,
    pub(crate) lookups: Lookups,
    pub(crate) placements: PlacementRequests,
    pub(crate) reports: Reports,
    directions: Directives,
}

/// The member that reports members and nodes.
#[derive(Debug)]
struct CurrentHome {
    choice: Home,
    /// Counts the attempts to follow: events of earlier attempts are ignored.
    attempt: u64,
    member: Option<usize>,
    line: Option<LineId>,
    /// The call on which home sends updates, once it has answered.
    stream: Option<CallId>,
    /// The last keep-alive found no process at the other end.
    quiet: bool,
}

impl Client {
    /// Creates the client of a node in this failure domain, with a different first home for each node.
    pub(crate) fn new(node: usize, failure_domain: String) -> Client {
        let choice = Home::new(node);
        Client {
            node,
            links: Links::new(node, failure_domain),
            home: CurrentHome { choice, attempt: 0, member: None, line: None, stream: None, quiet: false },
            nodes: None,
            lookups: Lookups::new(node),
            placements: PlacementRequests::new(node),
            reports: Reports::new(node),
            directions: Directives::default(),
        }
    }

    /// Returns the host of a node; `None` for a node that home has not reported.
    pub(crate) fn host_of(&self, node: NodeId) -> Option<usize> {
        host_of(self.nodes.as_deref(), node)
    }

    /// Returns the number of the agent on a host; `None` for an agent that home has not reported.
    pub(crate) fn node_at(&self, host: usize) -> Option<NodeId> {
        let nodes = self.nodes.as_ref()?;
        nodes.iter().find(|info| info.host == host).map(|info| info.node)
    }

    /// Runs a step of the client; returns other steps.
    pub(crate) fn step(
        &mut self,
        env: &mut Environment,
        what: AgentStep,
        out: &mut Outcomes,
    ) -> Option<AgentStep> {
        match what {
            AgentStep::Beat { link, epoch } => {
                if let Some((link, calls)) = self.links.link(link) {
                    link.beat(env, calls, epoch);
                }
            }
            AgentStep::Register { link, request } => self.links.register(env, link, request),
            AgentStep::ReplacementOverdue { link, awaited } => {
                let random = env.rng.next() as u32;
                if let Some((link, calls)) = self.links.link(link)
                    && link.awaits_replacement(awaited)
                {
                    link.on_registrar(env, calls, (Input::Overdue, random), out);
                }
            }
            AgentStep::Pump(link) => {
                // The end of a pause after a failure.
                if let Some((link, calls)) = self.links.link(link) {
                    link.announcer.resume();
                    link.pump(env, calls, out);
                }
            }
            AgentStep::CloseIfGone(link) => self.links.close_if_gone(env, link),
            AgentStep::Follow => self.follow_home(env),
            AgentStep::CheckHome { attempt } => self.check_home(env, attempt),
            AgentStep::HomeUnsure { attempt } => {
                if self.home.attempt == attempt {
                    self.on_home(env, HomeInput::Overdue);
                }
            }
            AgentStep::LookupOver(lookup) => self.end_lookup(lookup, out),
            AgentStep::PlaceOver(place) => self.end_placement(place, out),
            AgentStep::Report(link) => self.reports.due(env, &mut self.links, link),
            AgentStep::CallTimeout(call) => self.call_timeout(env, call, out),
            other => return Some(other),
        }
        None
    }

    /// Carries out what follows an earlier outcome.
    pub(crate) fn follow(&mut self, env: &mut Environment, follow: ClientFollow, out: &mut Outcomes) {
        match follow {
            ClientFollow::Pump(link) => {
                if let Some((link, calls)) = self.links.link(link) {
                    link.pump(env, calls, out);
                }
            }
            ClientFollow::Refresh(link) => {
                if let Some((link, calls)) = self.links.link(link) {
                    link.announcer.outbox_mut().invalidate_slots();
                    link.pump(env, calls, out);
                }
            }
            ClientFollow::ReportIfDue(link) => self.reports.send_if_due(env, &mut self.links, link),
            ClientFollow::ReportOver(link) => self.reports.over(env, &self.links, link),
            ClientFollow::CarryOut(link, outputs, random) => {
                if let Some((link, calls)) = self.links.link(link) {
                    link.carry_out(env, calls, (outputs, random), out);
                }
            }
            ClientFollow::CallFailed(of) => self.call_failed(env, of, out),
            ClientFollow::LineLost(line) => {
                if self.home.line == Some(line) {
                    self.on_home(env, HomeInput::Ended);
                }
            }
            ClientFollow::Learned(lookup) => {
                let progress = self.lookups.learned(env, &mut self.links, lookup);
                self.advance_lookup(lookup, progress, out);
            }
            ClientFollow::LearnedOfPlaces(place) => {
                let progress = self.placements.learned(env, &mut self.links, place);
                self.advance_placement(place, progress, out);
            }
        }
    }

    // ---- calls --------------------------------------------------------------------------------------------

    fn call_timeout(&mut self, env: &mut Environment, call: CallId, out: &mut Outcomes) {
        let Some(Call { of, line }) = self.links.calls.timed_out(env, call) else { return };
        // Keep-alives have detected by now that the other end is gone; heartbeats open a new connection after
        // each failure.
        if matches!(of, Purpose::Link(_, LinkCall::Beat { .. })) || !env.far_lives(line) {
            self.links.drop_line(line);
        }
        self.call_failed(env, of, out);
    }

    /// Handles the end of a connection.
    pub(crate) fn line_lost(&mut self, line: LineId, out: &mut Outcomes) {
        self.links.drop_line(line);
        self.links.calls.lost(line).into_iter().for_each(|of| out.client(ClientFollow::CallFailed(of)));
        out.client(ClientFollow::LineLost(line));
    }

    fn call_failed(&mut self, env: &mut Environment, of: Purpose, out: &mut Outcomes) {
        match of {
            Purpose::Link(link, of) => self.link_call_failed(env, link, &of, out),
            Purpose::Lookup { lookup, part, .. } => {
                let progress = self.lookups.part_failed(env, &mut self.links, (lookup, &part));
                self.advance_lookup(lookup, progress, out);
            }
            Purpose::Learn { lookup } => self.end_lookup(lookup, out),
            Purpose::Place { place, part, .. } => {
                let progress = self.placements.part_failed(env, &mut self.links, (place, &part));
                self.advance_placement(place, progress, out);
            }
            Purpose::LearnOfPlaces { place } => self.end_placement(place, out),
            Purpose::Follow => {
                self.on_home(env, HomeInput::Ended);
            }
        }
    }

    fn link_call_failed(&mut self, env: &mut Environment, id: LinkId, of: &LinkCall, out: &mut Outcomes) {
        let random = env.rng.next() as u32;
        let Some((link, calls)) = self.links.link(id) else { return };
        let member = link.member;
        link.call_failed(env, calls, (of, random), out);
        match *of {
            LinkCall::Beat { epoch } => {
                if self.home.member == Some(member) {
                    self.on_home(env, HomeInput::Silent);
                }
                if let Some((link, _)) = self.links.link(id) {
                    link.next_beat(env, epoch);
                }
            }
            LinkCall::Report { .. } => self.reports.over(env, &self.links, id),
            LinkCall::Register { .. } | LinkCall::Slots { .. } | LinkCall::Update(_) => {}
        }
    }

    /// Handles the answer to a call.
    pub(crate) fn on_answer(
        &mut self,
        env: &mut Environment,
        (call, reply): (CallId, Reply),
        out: &mut Outcomes,
    ) {
        if self.home.stream == Some(call) {
            return self.on_home_message(env, reply, out);
        }
        let Some(Call { of, .. }) = self.links.calls.answered(call) else { return };
        match (of, reply) {
            (of, Reply::Unavailable) => self.call_failed(env, of, out),
            (Purpose::Link(link, LinkCall::Report { epoch, number }), Reply::Reported(answer)) => {
                self.reported(env, (link, epoch, number), answer, out);
            }
            (Purpose::Link(link, of), reply) => {
                if let Some((link, calls)) = self.links.link(link) {
                    link.on_answer(env, calls, (of, reply), out);
                }
            }
            (Purpose::Lookup { lookup, link, part }, Reply::Found(answered)) => {
                let of = (lookup, link, &part);
                let progress = self.lookups.part_found(env, &mut self.links, of, answered);
                self.advance_lookup(lookup, progress, out);
            }
            (Purpose::Learn { lookup }, Reply::Members(list)) => {
                self.links.learn_list(env, &list, out);
                out.client(ClientFollow::Learned(lookup));
            }
            (Purpose::Place { place, link, epoch, part }, Reply::Placed(answer)) => {
                let (of, answer) = ((place, link, epoch, &part), answer.map(|answer| *answer));
                let progress = self.placements.part_placed(env, &mut self.links, of, (answer, &mut *out));
                self.advance_placement(place, progress, out);
            }
            (Purpose::LearnOfPlaces { place }, Reply::Members(list)) => {
                self.links.learn_list(env, &list, out);
                out.client(ClientFollow::LearnedOfPlaces(place));
            }
            (Purpose::Follow, reply) => {
                self.home.stream = Some(call);
                self.on_home(env, HomeInput::Opened);
                self.on_home_message(env, reply, out);
            }
            (of, reply) => unreachable!("unexpected answer to {of:?}: {reply:?}"),
        }
    }

    /// Handles a member's answer to a report of a registration; `None`: it is not the member's current one.
    fn reported(
        &mut self,
        env: &mut Environment,
        (id, epoch, number): (LinkId, Epoch, ReportNumber),
        reply: Option<NodeReportReply>,
        out: &mut Outcomes,
    ) {
        let Some((link, _)) = self.links.link(id) else { return };
        let granted = link.granted();
        // After fencing, heartbeats or updates detect the same, and register again.
        if let Some(NodeReportReply { grants, direction }) = reply
            && granted.is_some_and(|granted| granted.epoch == epoch)
        {
            self.reports.take_grants(env, &self.links, (id, number), &grants);
            if let Some(direction) = direction {
                out.next.push(Follow::Directed(epoch, direction));
                self.directed(env, (id, epoch), direction, out);
            }
        }
        out.client(ClientFollow::ReportOver(id));
    }

    /// Handles a member's instructions in the answer to a report.
    fn directed(
        &mut self,
        env: &mut Environment,
        (link, epoch): (LinkId, Epoch),
        Direction { set, given }: Direction,
        out: &mut Outcomes,
    ) {
        let variant = env.setup.variant;
        let from = owner(self.links.routes(), link, REBALANCER_SLOT);
        let reply = ReplyDirectives { mode_revision: Some(set.revision), order: given, from };
        let NewDirectives { mode_number, order } = self.directions.receive(epoch, reply);
        let ignored = match variant {
            Variant::CordonsIgnored => set.mode == NodeMode::Cordoned,
            Variant::DrainsIgnored => set.mode == NodeMode::Draining,
            _ => false,
        };
        if let Some(revision) = mode_number.filter(|_| !ignored) {
            out.event(Event::Mode { mode: set.mode, revision });
        }
        if let Some(given) = order.filter(|order| order.is_some() || variant != Variant::MoveEndIgnored) {
            env.count(if given.is_some() { "moves started" } else { "moves ended" });
            out.event(Event::Move(given));
        }
    }

    // ---- lookups and placement requests -------------------------------------------------------------------

    fn advance_lookup(&mut self, lookup: LookupId, progress: Progress, out: &mut Outcomes) {
        if progress == Progress::Ends {
            self.end_lookup(lookup, out);
        }
    }

    fn end_lookup(&mut self, lookup: LookupId, out: &mut Outcomes) {
        let nodes = self.nodes.as_deref();
        self.lookups.end(lookup, |node| host_of(nodes, node).is_some(), out);
    }

    fn advance_placement(&mut self, place: PlaceId, progress: Progress, out: &mut Outcomes) {
        if progress == Progress::Ends {
            self.end_placement(place, out);
        }
    }

    fn end_placement(&mut self, place: PlaceId, out: &mut Outcomes) {
        let nodes = self.nodes.as_deref();
        self.placements.end(place, |node| host_of(nodes, node).is_some(), out);
    }

    // ---- following ----------------------------------------------------------------------------------------

    /// Follows members and nodes at the next home: first those of the map, then all configured ones.
    fn follow_home(&mut self, env: &mut Environment) {
        let configured = 0..env.setup.members;
        let home = &mut self.home;
        let member =
            home.choice.choose(self.links.members_of_map(), configured).expect("members are configured");
        home.attempt += 1;
        (home.member, home.stream, home.quiet) = (Some(member), None, false);
        let attempt = home.attempt;
        let line = env.open_line(Host::Node(self.node), Host::Member(member));
        home.line = Some(line);
        self.links.calls.send(env, (line, Purpose::Follow), Request::Watch, CALL_TIMEOUT);
        env.later(self.node, KEEP_ALIVE_EVERY, AgentStep::CheckHome { attempt });
    }

    /// Gives an input to the choice of homes. Returns whether to apply the list.
    fn on_home(&mut self, env: &mut Environment, input: HomeInput) -> bool {
        match self.home.choice.on(env.time(Host::Node(self.node)), input) {
            Some(HomeOutput::Apply) => return true,
            Some(HomeOutput::Close(pause, _)) => self.close_home(env, pause),
            None => {}
        }
        false
    }

    fn close_home(&mut self, env: &mut Environment, pause: Pause) {
        let delay = pause.draw(env.rng.next() as u32);
        (self.home.member, self.home.stream) = (None, None);
        if let Some(line) = self.home.line.take() {
            env.break_line(line);
        }
        env.later(self.node, delay, AgentStep::Follow);
    }

    /// Checks the connection by keep-alives: home is dropped if the other end is missing twice in a row.
    fn check_home(&mut self, env: &mut Environment, attempt: u64) {
        let home = &mut self.home;
        let (Some(member), Some(line)) = (home.member, home.line) else { return };
        if home.attempt != attempt || !home.choice.is_followed() {
            return;
        }
        let cut = env.network.is_cut(Host::Node(self.node), Host::Member(member));
        let quiet = cut || !env.far_lives(line);
        if std::mem::replace(&mut home.quiet, quiet) && quiet {
            self.on_home(env, HomeInput::Ended);
            return;
        }
        env.later(self.node, KEEP_ALIVE_EVERY, AgentStep::CheckHome { attempt });
    }

    fn on_home_message(&mut self, env: &mut Environment, reply: Reply, out: &mut Outcomes) {
        match reply {
            Reply::Members(list) => self.home_lists(env, &list, out),
            Reply::Nodes(nodes) => self.nodes = Some(nodes),
            other => unreachable!("unexpected message of a home: {other:?}"),
        }
    }

    fn home_lists(&mut self, env: &mut Environment, list: &MemberListReply, out: &mut Outcomes) {
        let now = env.time(Host::Node(self.node));
        let (attempt, doubted) = (self.home.attempt, self.home.choice.doubt(now).is_some());
        let known = self.links.members.epoch();
        let applies = self.on_home(env, HomeInput::List { list: source(list), known });
        if let Some(time) = self.home.choice.doubt(now).filter(|_| !doubted) {
            env.later(self.node, time, AgentStep::HomeUnsure { attempt });
        }
        if applies {
            self.links.take_list(env, list, out);
        }
    }

    // ---- checks -------------------------------------------------------------------------------------------

    /// Checks that no lookup is late.
    pub(crate) fn assert_lookups_in_time(&self, now: Tick) {
        let late = self.lookups.pending.iter().find(|(_, pending)| pending.deadline.after(CLOCK_GRAIN) < now);
        assert!(late.is_none(), "node {}: a lookup exceeds its deadline: {late:?}", self.node);
    }

    /// Checks that no placement request is late.
    pub(crate) fn assert_placements_in_time(&self, now: Tick) {
        let mut placing = self.placements.pending.values();
        let late = placing.find(|placing| placing.deadline.after(CLOCK_GRAIN) < now);
        assert!(late.is_none(), "node {}: a placement request exceeds its deadline: {late:?}", self.node);
    }

    /// Checks the bounds of the queues of changes for members, and of the concurrent lookups.
    pub(crate) fn assert_queues(&self, env: &Environment, inventory_max: usize) {
        // At most `limit` changes are in a batch in flight while the queue fills again to `limit`.
        // Inventories of different slots are taken at different times, so their sum may exceed the largest
        // inventory: two are allowed. The constant is a margin.
        let limit = env.setup.changes_queued_max;
        let bound = limit.saturating_mul(2).saturating_add(2 * inventory_max).saturating_add(8);
        for link in self.links.links.values() {
            let queued = link.announcer.outbox().queued();
            let node = self.node;
            assert!(queued <= bound, "node {node}: {queued} queued changes exceed the bound of {bound}");
        }
        let lookups = self.lookups.pending.len();
        assert!(lookups <= LOOKUPS_MAX, "node {}: {lookups} concurrent lookups", self.node);
    }
}

/// Returns the host of a node in a list by number.
fn host_of(nodes: Option<&[NodeInfo]>, node: NodeId) -> Option<usize> {
    let nodes = nodes?;
    nodes.binary_search_by_key(&node, |info| info.node).ok().map(|at| nodes[at].host)
}
