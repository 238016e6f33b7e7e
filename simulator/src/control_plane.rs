//! Members as servers: calls of agents, and updates for their followers.
//!
//! What a call changes is decided by production code, in `member.rs`. Here are the messages, the audits of every
//! answer, and the periodic tasks. Followers get the list of all nodes shortly after a change; the binary sends
//! each change. The periodic tasks follow `controlplane/src/server.rs`.

use std::time::Duration;

use reprise_agent_core::outbox::Batch;
use reprise_controlplane_core::NodeRecord;
use reprise_policy::{BlockKey, Epoch, NodeId};

use crate::membership::MemberStep;
use crate::messages::{CallId, Message, NodeReportBody, NodeReportReply, PlacementRequest, Reply, Request};
use crate::network::{Host, LineId};
use crate::setup::BEAT_EVERY;
use crate::simulation::Simulation;

/// Maximum delay in microseconds until a member's task runs.
const OWN_US_MAX: u64 = 500;
/// Delay between a change of the nodes and the update of followers.
const NOTIFY_NODES_AFTER: Duration = Duration::from_millis(5);

impl Simulation {
    pub(crate) fn serve_call(&mut self, member: usize, from: (LineId, CallId), request: Request) {
        let reply = match request {
            // The registration is written to the store first; the member's memory follows when the store has
            // answered.
            Request::Register { name, domain } => {
                return self.register_node(member, (name, domain), from);
            }
            Request::Beat { node, epoch } => self.handle_heartbeat(member, node, epoch),
            Request::Slots { node, epoch } => {
                Reply::SlotStatus(self.member(member).slot_status(node, epoch).map(Box::new))
            }
            Request::Update(batch) => self.handle_update(member, &batch),
            Request::Lookup { keys, requester } => self.find(member, &keys, requester),
            Request::Place(request) => self.answer_placement(member, &request),
            Request::Report(body) => self.handle_report(member, &body),
            Request::Members => self.members_now(member),
            Request::Watch => return self.follow(member, from),
        };
        self.reply_to(from, reply);
    }

    fn reply_to(&mut self, to: (LineId, CallId), reply: Reply) {
        self.env.send(to.0, 0, Message::Reply { call: to.1, reply });
    }

    fn handle_heartbeat(&mut self, member: usize, node: NodeId, epoch: Epoch) -> Reply {
        let now = self.env.time(Host::Member(member));
        let running = self.member(member);
        let (known, version) = (running.beat(now, node, epoch), running.directory.version());
        Reply::Heartbeat { known, version }
    }

    fn handle_update(&mut self, member: usize, batch: &Batch) -> Reply {
        let running = self.member(member);
        let (answer, version) = (running.update(batch), running.directory.version());
        self.audit_directory(member);
        Reply::Updated { answer, version }
    }

    fn find(&mut self, member: usize, keys: &[BlockKey], requester: Option<NodeId>) -> Reply {
        let now = self.env.time(Host::Member(member));
        let answered = self.member(member).lookup(now, keys, requester);
        self.audit_answer(member, keys, requester, &answered);
        if answered.partial > 0 {
            self.env.count("partial answers");
        }
        Reply::Found(answered)
    }

    fn answer_placement(&mut self, member: usize, request: &PlacementRequest) -> Reply {
        let now = self.env.time(Host::Member(member));
        let answer = self.member(member).place(now, request);
        if let Some(answer) = &answer {
            self.audit_places(member, request, answer);
        }
        Reply::Placed(answer.map(Box::new))
    }

    fn handle_report(&mut self, member: usize, body: &NodeReportBody) -> Reply {
        let now = self.env.time(Host::Member(member));
        let grants = self.member(member).report(now, body);
        self.audit_grants(member);
        let direct =
            |grants| NodeReportReply { grants, direction: self.member(member).direct(now, body.node) };
        Reply::Reported(grants.map(direct))
    }

    fn members_now(&mut self, member: usize) -> Reply {
        let now = self.env.time(Host::Member(member));
        Reply::Members(self.member(member).member_list(now).into())
    }

    // ---- followers ----------------------------------------------------------------------------------------

    fn follow(&mut self, member: usize, from: (LineId, CallId)) {
        let list = self.members_now(member);
        self.reply_to(from, list);
        let nodes = Reply::Nodes(self.member(member).node_list());
        self.reply_to(from, nodes);
        self.member(member).followers.push(from);
    }

    /// Handles a change of the member's place among the members, or of its knowledge of them.
    pub(crate) fn place_changed(&mut self, member: usize) {
        let followers = self.member(member).followers.clone();
        let list = self.members_now(member);
        followers.into_iter().for_each(|follower| self.reply_to(follower, list.clone()));
        let delay = self.env.rng.micros(1..OWN_US_MAX);
        self.member_later(member, delay, MemberStep::Own);
    }

    /// Runs the task that sets the directory's slots to those of the member's place.
    pub(crate) fn set_owned_slots(&mut self, member: usize) {
        let now = self.env.time(Host::Member(member));
        self.member(member).update_owned_slots(now);
        self.audit_directory(member);
    }

    pub(crate) fn notify_if_nodes_changed(&mut self, member: usize) {
        let running = self.member(member);
        if running.take_nodes_changed() && !std::mem::replace(&mut running.notifies_nodes, true) {
            self.member_later(member, NOTIFY_NODES_AFTER, MemberStep::NotifyNodes);
        }
    }

    pub(crate) fn notify_nodes(&mut self, member: usize) {
        let running = self.member(member);
        running.notifies_nodes = false;
        let (followers, nodes) = (running.followers.clone(), running.node_list());
        followers.into_iter().for_each(|follower| self.reply_to(follower, Reply::Nodes(nodes.clone())));
    }

    // ---- nodes --------------------------------------------------------------------------------------------

    /// Handles a registration that was written to the store.
    pub(crate) fn registered(&mut self, member: usize, record: NodeRecord, from: (LineId, CallId)) {
        let now = self.env.time(Host::Member(member));
        let reply = Reply::Registered { node: record.node, epoch: record.epoch };
        let newest = self.member(member).registered(now, record);
        self.audit_directory(member);
        self.notify_if_nodes_changed(member);
        self.reply_to(from, if newest { reply } else { Reply::Unavailable });
    }

    pub(crate) fn expire(&mut self, member: usize) {
        let now = self.env.time(Host::Member(member));
        let next = self.member(member).expire(now);
        self.member(member).sweep();
        self.audit_directory(member);
        // A node that registers meanwhile expires no sooner.
        let wait = next.map_or(BEAT_EVERY, |next| next.since(now)).max(Duration::from_millis(1));
        self.member_later(member, wait, MemberStep::Expire);
    }
}
