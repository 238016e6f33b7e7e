//! Members among the hosts: calls of agents that arrive, and what their followers are told.
//!
//! As the services of the binary, `controlplane/src/{membership,directory,cluster}.rs` and `placement/reports.rs`. A follower is told of all nodes a
//! moment after something changed, where the binary tells each change.

use std::time::Duration;

use reprise_agent_core::outbox::Batch;
use reprise_controlplane_core::NodeRecord;
use reprise_policy::{BlockKey, Epoch, NodeId};

use crate::joining::MemberStep;
use crate::messages::{CallId, Message, NodeIsTold, NodeSays, PlaceQuestion, Reply, Request};
use crate::network::{Host, LineId};
use crate::setup::BEAT_EVERY;
use crate::world::World;

/// A task of a member wakes within this, in microseconds.
const OWN_US_MAX: u64 = 500;
/// Followers are told of nodes so long after a change.
const TELL_NODES_AFTER: Duration = Duration::from_millis(5);

impl World {
    pub(crate) fn serve_call(&mut self, member: usize, from: (LineId, CallId), request: Request) {
        let reply = match request {
            // Durable in the store first; the member's own memory follows when the store has answered.
            Request::Register { name } => return self.register_node(member, name, from),
            Request::Beat { node, epoch } => self.take_beat(member, node, epoch),
            Request::Slots { node, epoch } => {
                Reply::Standing(self.member(member).standing(node, epoch).map(Box::new))
            }
            Request::Update(batch) => self.take_update(member, &batch),
            Request::Lookup { keys, asking } => self.find(member, &keys, asking),
            Request::Place(question) => self.say_where(member, &question),
            Request::Report(says) => self.take_report(member, &says),
            Request::Members => self.members_now(member),
            Request::Watch => return self.follow(member, from),
        };
        self.reply_to(from, reply);
    }

    fn reply_to(&mut self, to: (LineId, CallId), reply: Reply) {
        self.send(to.0, 0, Message::Reply { call: to.1, reply });
    }

    fn take_beat(&mut self, member: usize, node: NodeId, epoch: Epoch) -> Reply {
        let now = self.time(Host::Member(member));
        let running = self.member(member);
        let (known, version) = (running.beat(now, node, epoch), running.directory.version());
        Reply::Beaten { known, version }
    }

    fn take_update(&mut self, member: usize, batch: &Batch) -> Reply {
        let running = self.member(member);
        let (answer, version) = (running.update(batch), running.directory.version());
        self.audit_directory(member);
        Reply::Updated { answer, version }
    }

    fn find(&mut self, member: usize, keys: &[BlockKey], asking: Option<NodeId>) -> Reply {
        let now = self.time(Host::Member(member));
        let answered = self.member(member).lookup(now, keys, asking);
        self.audit_answer(member, keys, asking, &answered);
        if answered.partial > 0 {
            self.count("partial answers");
        }
        Reply::Found(answered)
    }

    fn say_where(&mut self, member: usize, question: &PlaceQuestion) -> Reply {
        let now = self.time(Host::Member(member));
        let answer = self.member(member).place(now, question);
        if let Some(answer) = &answer {
            self.audit_places(member, question, answer);
        }
        Reply::Placed(answer.map(Box::new))
    }

    fn take_report(&mut self, member: usize, says: &NodeSays) -> Reply {
        let now = self.time(Host::Member(member));
        let orders = self.member(member).report(now, says);
        self.audit_orders(member);
        let direct = |orders| NodeIsTold { orders, direction: self.member(member).direct(now, says.node) };
        Reply::Reported(orders.map(direct))
    }

    fn members_now(&mut self, member: usize) -> Reply {
        let now = self.time(Host::Member(member));
        Reply::Members(self.member(member).list(now).into())
    }

    // ---- followers ---------------------------------------------------------------------------------------------

    fn follow(&mut self, member: usize, from: (LineId, CallId)) {
        let list = self.members_now(member);
        self.reply_to(from, list);
        let nodes = Reply::Nodes(self.member(member).nodes());
        self.reply_to(from, nodes);
        self.member(member).followers.push(from);
    }

    /// Its place among the members has changed, or what it knows of them.
    pub(crate) fn place_changed(&mut self, member: usize) {
        let followers = self.member(member).followers.clone();
        let list = self.members_now(member);
        followers.into_iter().for_each(|follower| self.reply_to(follower, list.clone()));
        let delay = self.rng.micros(1..OWN_US_MAX);
        self.member_later(member, delay, MemberStep::Own);
    }

    /// The task that keeps the directory's slots those of its place has woken.
    pub(crate) fn own(&mut self, member: usize) {
        let now = self.time(Host::Member(member));
        self.member(member).own_kept(now);
        self.audit_directory(member);
    }

    pub(crate) fn nodes_changed(&mut self, member: usize) {
        if !std::mem::replace(&mut self.member(member).tells_nodes, true) {
            self.member_later(member, TELL_NODES_AFTER, MemberStep::TellNodes);
        }
    }

    pub(crate) fn tell_nodes(&mut self, member: usize) {
        let running = self.member(member);
        running.tells_nodes = false;
        let (followers, nodes) = (running.followers.clone(), running.nodes());
        followers.into_iter().for_each(|follower| self.reply_to(follower, Reply::Nodes(nodes.clone())));
    }

    // ---- nodes -------------------------------------------------------------------------------------------------

    /// A registration is in the store.
    pub(crate) fn registered(&mut self, member: usize, record: NodeRecord, from: (LineId, CallId)) {
        let now = self.time(Host::Member(member));
        let reply = Reply::Registered { node: record.node, epoch: record.epoch };
        let newest = self.member(member).registered(now, record);
        self.audit_directory(member);
        self.nodes_changed(member);
        self.reply_to(from, if newest { reply } else { Reply::Unavailable });
    }

    pub(crate) fn expire(&mut self, member: usize) {
        let now = self.time(Host::Member(member));
        let next = self.member(member).expire(now);
        self.member(member).sweep();
        self.audit_directory(member);
        // A registration meanwhile dies no sooner.
        let wait = next.map_or(BEAT_EVERY, |next| next.since(now)).max(Duration::from_millis(1));
        self.member_later(member, wait, MemberStep::Expire);
    }
}
