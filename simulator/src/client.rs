//! An agent's client of the control plane: the known members, a link to each, and the calls in flight.
//!
//! One member, called home, reports members and nodes. When home is silent, unsure of its place, or gone, the
//! next member becomes home. The production state machines decide ([`Home`], [`Members`]). Here are the calls,
//! the delays, and the keep-alives of connections; they follow `node-agent/src/directory/members.rs`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use reprise_agent_core::announcer::Announcer;
use reprise_agent_core::directives::Directives;
use reprise_agent_core::effect::{LookupId, PlaceId};
use reprise_agent_core::home::{Home, MemberListSource};
use reprise_agent_core::members::{LINK_GRACE, Members};
use reprise_agent_core::owner_query::{OwnerQuery, Part};
use reprise_policy::shards::MemberName;
use reprise_policy::{Epoch, NodeId};

use crate::link::{Link, LinkCall, LinkId};
use crate::lookups::PendingLookup;
use crate::member::{member_name, number_of_member};
use crate::messages::{CallId, MemberListReply, Message, NodeInfo, Reply, Request};
use crate::network::{Host, LineId};
use crate::placement_requests::PendingPlacement;
use crate::setup::{CALL_TIMEOUT, KEEP_ALIVE_EVERY, Variant};
use crate::simulation::{AgentStep, Simulation, take_where};

/// The client of one agent; see the module.
#[derive(Debug, Default)]
pub(crate) struct Client {
    pub(crate) links: BTreeMap<LinkId, Link>,
    links_begun: u64,
    pub(crate) members: Members<LinkId>,
    /// Failure domain of the node, as far as the process knows.
    pub(crate) failure_domain: String,
    calls: BTreeMap<CallId, Call>,
    calls_begun: u64,
    home: CurrentHome,
    /// Latest list of nodes from home, by number.
    nodes: Option<Arc<[NodeInfo]>>,
    pub(crate) lookups: BTreeMap<LookupId, PendingLookup>,
    pub(crate) placements: BTreeMap<PlaceId, PendingPlacement>,
    pub(crate) directions: Directives,
}

/// A map of slots, and the link to each of its members.
pub(crate) type Routes = reprise_agent_core::members::Routes<LinkId>;

/// The member that reports members and nodes.
#[derive(Debug, Default)]
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

#[derive(Debug)]
struct Call {
    of: Purpose,
    line: LineId,
}

/// Purpose of a call.
#[derive(Clone, Debug)]
pub(crate) enum Purpose {
    Link(LinkId, LinkCall),
    /// A part of a lookup.
    Lookup {
        lookup: LookupId,
        link: LinkId,
        part: Part,
    },
    /// Requests the list of a member whose map is newer.
    Learn {
        lookup: LookupId,
    },
    /// A part of a placement request, under a registration.
    Place {
        place: PlaceId,
        link: LinkId,
        epoch: Epoch,
        part: Part,
    },
    /// As `Learn`, for a placement request.
    LearnOfPlaces {
        place: PlaceId,
    },
    Follow,
}

fn source(list: &MemberListReply) -> MemberListSource {
    let MemberListReply { epoch, ref members, registered, .. } = *list;
    MemberListSource { epoch, members: members.len(), registered }
}

/// Starts an attempt of a query: returns the parts to send. The owners of the others cannot be asked.
pub(crate) fn ask_owners<A: Clone>(
    routes: Option<&Routes>,
    query: &mut OwnerQuery<LinkId, A>,
    can_ask: impl Fn(LinkId) -> bool,
) -> Vec<(LinkId, Part)> {
    let parts = query.ask(routes.map(Routes::map));
    let link_of = |part: Part| (*routes.expect("only a map has owners").link(part.owner), part);
    let mut parts: Vec<(LinkId, Part)> = parts.into_iter().map(link_of).collect();
    parts.sort_by_key(|(link, _)| *link);
    parts.retain(|(link, part)| {
        let can_ask = can_ask(*link);
        if !can_ask {
            query.fail(part);
        }
        can_ask
    });
    parts
}

impl Client {
    /// Returns the host of a node; `None` for a node that home has not reported.
    pub(crate) fn host_of(&self, node: NodeId) -> Option<usize> {
        let nodes = self.nodes.as_ref()?;
        nodes.binary_search_by_key(&node, |info| info.node).ok().map(|at| nodes[at].host)
    }

    /// Returns the number of the agent on a host; `None` for an agent that home has not reported.
    pub(crate) fn node_at(&self, host: usize) -> Option<NodeId> {
        let nodes = self.nodes.as_ref()?;
        nodes.iter().find(|info| info.host == host).map(|info| info.node)
    }

    /// Starts the client; `turn` selects different homes for different agents.
    pub(crate) fn begin(&mut self, turn: usize, failure_domain: String) {
        self.failure_domain = failure_domain;
        self.home.choice = Home::new(turn);
    }

    /// Number of calls without an answer, except those that never end.
    pub(crate) fn waiting(&self) -> usize {
        let ends = |call: &&Call| {
            !matches!(
                call.of,
                Purpose::Follow
                    | Purpose::Link(
                        _,
                        LinkCall::Beat { .. } | LinkCall::Register { .. } | LinkCall::Report { .. }
                    )
            )
        };
        self.calls.values().filter(ends).count()
    }

    /// Reports whether a member answers and knows this node.
    pub(crate) fn is_connected(&self) -> bool {
        self.links.values().any(Link::is_up)
    }
}

impl Simulation {
    pub(crate) fn client(&mut self, node: usize) -> &mut Client {
        &mut self.process(node).client
    }

    // ---- calls --------------------------------------------------------------------------------------------

    /// Sends a call over a connection, with a timeout by the agent's clock.
    pub(crate) fn call(
        &mut self,
        node: usize,
        (line, of): (LineId, Purpose),
        request: Request,
        time: Duration,
    ) {
        let client = self.client(node);
        let call = CallId(client.calls_begun);
        client.calls_begun += 1;
        client.calls.insert(call, Call { of, line });
        self.env.send(line, 1, Message::Call { call, request });
        self.env.later(node, time, AgentStep::CallTimeout(call));
    }

    pub(crate) fn call_timeout(&mut self, node: usize, call: CallId) {
        let endless = self.env.setup.variant == Variant::LookupsWithoutDeadline;
        let calls = &mut self.client(node).calls;
        if endless && calls.get(&call).is_some_and(|call| matches!(call.of, Purpose::Lookup { .. })) {
            return;
        }
        let Some(Call { of, line }) = calls.remove(&call) else { return };
        // Keep-alives have detected by now that the other end is gone; heartbeats open a new connection after
        // each failure.
        if matches!(of, Purpose::Link(_, LinkCall::Beat { .. })) || !self.env.far_lives(line) {
            self.drop_line(node, line);
        }
        self.call_failed(node, of);
    }

    pub(crate) fn client_line_lost(&mut self, node: usize, line: LineId) {
        self.drop_line(node, line);
        let lost = take_where(&mut self.client(node).calls, |call| call.line == line);
        lost.into_iter().for_each(|(_, call)| self.call_failed(node, call.of));
        let home = &self.client(node).home;
        if home.line == Some(line) && home.stream.is_some() {
            self.drop_home(node);
        }
    }

    fn drop_line(&mut self, node: usize, line: LineId) {
        for link in self.client(node).links.values_mut() {
            link.drop_line(line);
        }
    }

    fn call_failed(&mut self, node: usize, of: Purpose) {
        match of {
            Purpose::Link(link, of) => self.link_call_failed(node, link, &of),
            Purpose::Lookup { lookup, part, .. } => self.part_failed(node, lookup, &part),
            Purpose::Learn { lookup } => self.lookup_over(node, lookup),
            Purpose::Place { place, part, .. } => self.place_part_over(node, place, &part),
            Purpose::LearnOfPlaces { place } => self.place_over(node, place),
            Purpose::Follow => self.drop_home(node),
        }
    }

    pub(crate) fn on_answer(&mut self, node: usize, call: CallId, reply: Reply) {
        if self.client(node).home.stream == Some(call) {
            return self.on_home_message(node, reply);
        }
        let Some(Call { of, .. }) = self.client(node).calls.remove(&call) else { return };
        match (of, reply) {
            (of, Reply::Unavailable) => self.call_failed(node, of),
            (Purpose::Link(link, of), reply) => self.on_link_answer(node, (link, of), reply),
            (Purpose::Lookup { lookup, link, part }, Reply::Found(answered)) => {
                self.part_found(node, (lookup, link), &part, answered);
            }
            (Purpose::Learn { lookup }, Reply::Members(list)) => {
                self.learn_list(node, &list);
                self.learned(node, lookup);
            }
            (Purpose::Place { place, link, epoch, part }, Reply::Placed(answer)) => {
                self.part_placed(node, (place, link, epoch), &part, answer.map(|answer| *answer));
            }
            (Purpose::LearnOfPlaces { place }, Reply::Members(list)) => {
                self.learn_list(node, &list);
                self.learned_of_places(node, place);
            }
            (Purpose::Follow, reply) => {
                let home = &mut self.client(node).home;
                home.stream = Some(call);
                home.choice.follow();
                self.on_home_message(node, reply);
            }
            (of, reply) => unreachable!("unexpected answer to {of:?}: {reply:?}"),
        }
    }

    // ---- following ----------------------------------------------------------------------------------------

    /// Follows members and nodes at the next home: first those of the map, then all configured ones.
    pub(crate) fn follow_home(&mut self, node: usize) {
        let configured = 0..self.members.len();
        let client = self.client(node);
        let of_map = client.members.routes().into_iter().flat_map(|routes| routes.links());
        let of_map = of_map.filter_map(|link| client.links.get(link)).map(|link| link.member);
        let home = &mut client.home;
        let member = home.choice.choose(of_map, configured).expect("members are configured");
        home.attempt += 1;
        (home.member, home.stream, home.quiet) = (Some(member), None, false);
        let attempt = home.attempt;
        let line = self.env.open_line(Host::Node(node), Host::Member(member));
        self.client(node).home.line = Some(line);
        self.call(node, (line, Purpose::Follow), Request::Watch, CALL_TIMEOUT);
        self.env.later(node, KEEP_ALIVE_EVERY, AgentStep::CheckHome { attempt });
    }

    fn drop_home(&mut self, node: usize) {
        let random = self.env.rng.next() as u32;
        let home = &mut self.client(node).home;
        (home.member, home.stream) = (None, None);
        let (delay, line) = (home.choice.drop_home().draw(random), home.line.take());
        if let Some(line) = line {
            self.env.break_line(line);
        }
        self.env.later(node, delay, AgentStep::Follow);
    }

    /// Checks the connection by keep-alives: home is dropped if the other end is missing twice in a row.
    pub(crate) fn check_home(&mut self, node: usize, attempt: u64) {
        let home = &self.client(node).home;
        let (Some(member), Some(line)) = (home.member, home.line) else { return };
        if home.attempt != attempt || home.stream.is_none() {
            return;
        }
        let cut = self.env.network.is_cut(Host::Node(node), Host::Member(member));
        let quiet = cut || !self.env.far_lives(line);
        if std::mem::replace(&mut self.client(node).home.quiet, quiet) && quiet {
            return self.drop_home(node);
        }
        self.env.later(node, KEEP_ALIVE_EVERY, AgentStep::CheckHome { attempt });
    }

    /// Drops home because heartbeats to it fail.
    pub(crate) fn home_is_silent(&mut self, node: usize, member: usize) {
        let home = &self.client(node).home;
        if home.member == Some(member) && home.stream.is_some() {
            self.drop_home(node);
        }
    }

    /// Drops a home that has been unsure of its own place for too long.
    pub(crate) fn home_is_unsure(&mut self, node: usize, attempt: u64) {
        let now = self.env.time(Host::Node(node));
        let home = &self.client(node).home;
        if home.attempt == attempt && home.choice.doubt(now) == Some(Duration::ZERO) {
            self.drop_home(node);
        }
    }

    fn on_home_message(&mut self, node: usize, reply: Reply) {
        match reply {
            Reply::Members(list) => self.home_lists(node, &list),
            Reply::Nodes(nodes) => self.client(node).nodes = Some(nodes),
            other => unreachable!("unexpected message of a home: {other:?}"),
        }
    }

    fn home_lists(&mut self, node: usize, list: &MemberListReply) {
        let now = self.env.time(Host::Node(node));
        let client = self.client(node);
        let home = &mut client.home;
        let (attempt, doubted) = (home.attempt, home.choice.doubt(now).is_some());
        home.choice.receive(now, source(list));
        if let Some(time) = home.choice.doubt(now).filter(|_| !doubted) {
            self.env.later(node, time, AgentStep::HomeUnsure { attempt });
        }
        let known = self.client(node).members.epoch();
        if source(list).applies_from_home(known) {
            self.take_list(node, list);
        }
    }

    // ---- the map ------------------------------------------------------------------------------------------

    /// Takes over the list of a member that has a newer map.
    fn learn_list(&mut self, node: usize, list: &MemberListReply) {
        let known = self.client(node).members.epoch();
        if source(list).applies_if_fetched(known) {
            self.take_list(node, list);
        }
    }

    /// Takes over a list of members.
    fn take_list(&mut self, node: usize, list: &MemberListReply) {
        let map = self.env.map_of(list.epoch, list.members.iter().map(|(name, _)| *name));
        // All members keep their addresses.
        let names = list.members.iter().map(|(name, _)| (member_name(*name), String::new()));
        let client = self.client(node);
        let (begun, mut opened) = (&mut client.links_begun, Vec::new());
        let open = |name: &MemberName, _: &str| {
            let id = LinkId(*begun);
            *begun += 1;
            opened.push((id, number_of_member(name)));
            Some(id)
        };
        let Ok(applied) = client.members.apply(names, open, |_| Ok::<_, std::convert::Infallible>(map));
        opened.into_iter().for_each(|(id, member)| self.open_link(node, id, member));
        let Some(mut unused) = applied else { return };
        // In the order in which they were opened.
        unused.left.sort_unstable();
        for link in unused.left {
            self.env.later(node, LINK_GRACE, AgentStep::CloseIfGone(link));
        }
        // A member that has lost slots would report that with its next heartbeat; a request is sooner.
        let routes = self.client(node).members.routes().expect("just applied").clone();
        for id in routes.links() {
            if let Some(link) = self.client(node).links.get_mut(id) {
                link.announcer.outbox_mut().invalidate_slots();
                self.pump(node, *id);
            }
        }
    }

    fn open_link(&mut self, node: usize, id: LinkId, member: usize) {
        let limit = match self.env.setup.variant {
            Variant::UnboundedQueue => usize::MAX,
            _ => self.env.setup.changes_queued_max,
        };
        let domain = self.client(node).failure_domain.clone();
        self.client(node).links.insert(id, Link::new(member, Announcer::new(limit), domain));
        self.env.later(node, Duration::ZERO, AgentStep::Register { link: id, request: 0 });
        self.env.later(node, Duration::ZERO, AgentStep::Report(id));
    }

    /// Closes a link whose member has not returned.
    pub(crate) fn close_if_gone(&mut self, node: usize, id: LinkId) {
        let client = self.client(node);
        if !client.members.end_grace(&id) {
            return;
        }
        let Some(link) = client.links.remove(&id) else { return };
        for line in link.lines() {
            self.env.break_line(line);
        }
        self.env.count("links closed");
    }
}
