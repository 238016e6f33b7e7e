//! An agent's links to the members that it knows, and the calls over them.
//!
//! The outputs are carried out in the order of `node-agent/src/directory/members.rs`.

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_agent_core::home::MemberListSource;
use reprise_agent_core::members::{LINK_GRACE, Members};
use reprise_agent_core::owner_query::{Next, NodeAnswer, OwnerQuery};
use reprise_agent_core::registrar::Input;
use reprise_policy::Epoch;
use reprise_policy::shards::MemberName;

use crate::calls::{Calls, Purpose};
use crate::environment::Environment;
use crate::link::{Link, LinkId};
use crate::messages::{MemberListReply, Request};
use crate::names::{member_name, number_of_member};
use crate::network::LineId;
use crate::outcomes::{ClientFollow, Outcomes};
use crate::setup::{CALL_TIMEOUT, Variant};
use crate::simulation::AgentStep;

/// A map of slots, and the link to each of its members.
pub(crate) type Routes = reprise_agent_core::members::Routes<LinkId>;

/// The links of one agent; see the module.
#[derive(Debug)]
pub(crate) struct Links {
    node: usize,
    pub(crate) links: BTreeMap<LinkId, Link>,
    begun: u64,
    pub(crate) members: Members<LinkId>,
    pub(crate) calls: Calls,
    /// Failure domain of the node, as far as the process knows.
    failure_domain: String,
}

/// What follows an input of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Waits,
    Ends,
}

/// Returns what the choice of lists needs to know of one.
pub(crate) fn source(list: &MemberListReply) -> MemberListSource {
    let MemberListReply { epoch, ref members, registered, .. } = *list;
    MemberListSource { epoch, members: members.len(), registered }
}

impl Links {
    pub(crate) fn new(node: usize, failure_domain: String) -> Links {
        let (links, members, calls) = (BTreeMap::new(), Members::default(), Calls::new(node));
        Links { node, links, begun: 0, members, calls, failure_domain }
    }

    /// Reports whether a member answers and knows this node.
    pub(crate) fn is_connected(&self) -> bool {
        self.links.values().any(Link::is_up)
    }

    pub(crate) fn routes(&self) -> Option<&Routes> {
        self.members.routes().map(|routes| &**routes)
    }

    pub(crate) fn link(&mut self, id: LinkId) -> Option<(&mut Link, &mut Calls)> {
        self.links.get_mut(&id).map(|link| (link, &mut self.calls))
    }

    /// Returns the members of the map, in its order.
    pub(crate) fn members_of_map(&self) -> impl Iterator<Item = usize> + Clone {
        let of_map = self.members.routes().into_iter().flat_map(|routes| routes.links());
        of_map.filter_map(|link| self.links.get(link)).map(|link| link.member)
    }

    /// Sends a call over a link.
    pub(crate) fn call(
        &mut self,
        env: &mut Environment,
        (id, of): (LinkId, Purpose),
        request: Request,
        time: Duration,
    ) {
        let Some(link) = self.links.get_mut(&id) else { return };
        let line = link.line(env);
        self.calls.send(env, (line, of), request, time);
    }

    /// Starts an attempt of a query with the current map.
    pub(crate) fn ask<A: Clone + NodeAnswer>(
        &self,
        query: &mut OwnerQuery<LinkId, A>,
        can_ask: impl Fn(&Link) -> bool,
    ) -> Next<LinkId> {
        let mut next = query.ask(self.routes(), |link| self.links.get(link).is_some_and(&can_ask));
        if let Next::Send(parts) = &mut next {
            // The calls run at the same time; here in the order in which the links were opened.
            parts.sort_by_key(|(link, _)| *link);
        }
        next
    }

    /// Requests the newer map of a member, within the time that a query has left.
    pub(crate) fn fetch_map(
        &mut self,
        env: &mut Environment,
        (link, of): (LinkId, Purpose),
        time: Duration,
    ) -> Progress {
        let time = time.min(CALL_TIMEOUT);
        if time.is_zero() || !self.links.contains_key(&link) {
            return Progress::Ends;
        }
        self.call(env, (link, of), Request::Members, time);
        Progress::Waits
    }

    pub(crate) fn drop_line(&mut self, line: LineId) {
        self.links.values_mut().for_each(|link| link.drop_line(line));
    }

    /// Carries out the next action of every announcer, until the core gets an event: after it, all continue.
    pub(crate) fn pump_all(&mut self, env: &mut Environment, out: &mut Outcomes) {
        let before = out.next.len();
        for link in self.links.values_mut() {
            link.pump(env, &mut self.calls, out);
            if out.next.len() > before {
                return;
            }
        }
    }

    /// Handles a change of the node's failure domain.
    pub(crate) fn domain_changed(&mut self, env: &mut Environment, domain: &str, out: &mut Outcomes) {
        let random = env.rng.next() as u32;
        domain.clone_into(&mut self.failure_domain);
        for link in self.links.values_mut() {
            link.on_registrar(env, &mut self.calls, (Input::Domain(domain.to_owned()), random), out);
        }
    }

    /// Requests a registration over a link.
    pub(crate) fn register(&mut self, env: &mut Environment, id: LinkId, request: u64) {
        if let Some(link) = self.links.get_mut(&id) {
            link.register(env, &mut self.calls, request, &self.failure_domain);
        }
    }

    /// Handles the end of a registration, which a member has reported.
    pub(crate) fn fence(&mut self, env: &mut Environment, id: LinkId, epoch: Epoch, out: &mut Outcomes) {
        let random = env.rng.next() as u32;
        if let Some(link) = self.links.get_mut(&id) {
            link.fence(env, &mut self.calls, (epoch, random), out);
        }
    }

    // ---- the map ------------------------------------------------------------------------------------------

    /// Takes over the list of a member that has a newer map.
    pub(crate) fn learn_list(&mut self, env: &mut Environment, list: &MemberListReply, out: &mut Outcomes) {
        if source(list).applies_if_fetched(self.members.epoch()) {
            self.take_list(env, list, out);
        }
    }

    /// Takes over a list of members.
    pub(crate) fn take_list(&mut self, env: &mut Environment, list: &MemberListReply, out: &mut Outcomes) {
        let map = env.map_of(list.epoch, list.members.iter().map(|(name, _)| *name));
        // All members keep their addresses.
        let names = list.members.iter().map(|(name, _)| (member_name(*name), String::new()));
        let (begun, mut opened) = (&mut self.begun, Vec::new());
        let open = |name: &MemberName, _: &str| {
            let id = LinkId(*begun);
            *begun += 1;
            opened.push((id, number_of_member(name)));
            Some(id)
        };
        let Ok(applied) = self.members.apply(names, open, |_| Ok::<_, std::convert::Infallible>(map));
        opened.into_iter().for_each(|(id, member)| self.open_link(env, id, member));
        let Some(mut unused) = applied else { return };
        // In the order in which they were opened.
        unused.left.sort_unstable();
        for link in unused.left {
            env.later(self.node, LINK_GRACE, AgentStep::CloseIfGone(link));
        }
        // A member that has lost slots would report that with its next heartbeat; a request is sooner.
        let routes = self.members.routes().expect("just applied").clone();
        routes.links().iter().for_each(|id| out.client(ClientFollow::Refresh(*id)));
    }

    fn open_link(&mut self, env: &mut Environment, id: LinkId, member: usize) {
        let limit = match env.setup.variant {
            Variant::UnboundedQueue => usize::MAX,
            _ => env.setup.changes_queued_max,
        };
        let link = Link::new((self.node, id), member, limit, self.failure_domain.clone());
        self.links.insert(id, link);
        env.later(self.node, Duration::ZERO, AgentStep::Register { link: id, request: 0 });
        env.later(self.node, Duration::ZERO, AgentStep::Report(id));
    }

    /// Closes a link whose member has not returned.
    pub(crate) fn close_if_gone(&mut self, env: &mut Environment, id: LinkId) {
        if !self.members.end_grace(&id) {
            return;
        }
        let Some(link) = self.links.remove(&id) else { return };
        link.lines().for_each(|line| env.break_line(line));
        env.count("links closed");
    }
}
