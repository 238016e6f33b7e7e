//! Members as servers: calls of agents, and updates for their followers.
//!
//! What a call changes is decided by production code, in `member.rs`. Here are the messages and the periodic tasks.
//! Observations of every answer go to the audits. Followers get the list of all nodes shortly after a change; the binary sends
//! each change. The intervals of tasks are production constants; sweeps run with the expiry of nodes.
//!
//! The outputs are carried out in the order of `controlplane/src/server.rs`.

use std::sync::Arc;
use std::time::Duration;

use reprise_agent_core::event::Move;
use reprise_agent_core::outbox::Batch;
use reprise_controlplane_core::agent_calls::{LEDGER_INTERVAL, ReportAnswer};
use reprise_controlplane_core::{NodeRecord, member_parts};
use reprise_policy::{BlockKey, Epoch, NodeId, NodeMode};

use crate::environment::Environment;
use crate::member::Member;
use crate::membership::{MemberStep, ModeOrder, RegistrationAttempt};
use crate::messages::{
    CallId, Direction, Message, NodeReportBody, NodeReportReply, PlacementRequest, Reply, Request,
};
use crate::network::{Host, LineId};
use crate::observation::Observation;
use crate::setup::DEAD_AFTER;

/// Maximum delay in microseconds until a member's task runs.
const OWN_US_MAX: u64 = 500;
/// Delay between a change of the nodes and the update of followers.
const NOTIFY_NODES_AFTER: Duration = Duration::from_millis(5);

impl Member {
    pub(crate) fn serve_call(&mut self, env: &mut Environment, from: (LineId, CallId), request: Request) {
        let reply = match request {
            // The registration is written to the store first; the member's memory follows when the store has
            // answered.
            Request::Register { name, domain } => {
                return RegistrationAttempt::begin(env, &mut self.talk, (name, domain), from);
            }
            Request::Beat { node, epoch } => self.handle_heartbeat(env, node, epoch),
            Request::Slots { node, epoch } => Reply::SlotStatus(self.slot_status(node, epoch).map(Box::new)),
            Request::Update(batch) => self.handle_update(env, &batch),
            Request::Lookup { keys, requester } => self.find(env, keys, requester),
            Request::Place(request) => self.answer_placement(env, request),
            Request::Report(body) => self.handle_report(env, *body),
            Request::Members => self.members_now(env),
            Request::Watch => return self.follow(env, from),
        };
        send_reply(env, from, reply);
    }

    fn handle_heartbeat(&mut self, env: &mut Environment, node: NodeId, epoch: Epoch) -> Reply {
        let now = env.time(Host::Member(self.name));
        let (known, version) = (self.beat(now, node, epoch), self.directory.version());
        Reply::Heartbeat { known, version }
    }

    fn handle_update(&mut self, env: &mut Environment, batch: &Batch) -> Reply {
        let (answer, version) = (self.update(batch), self.directory.version());
        env.observe(Observation::DirectoryChanged { member: self.name });
        Reply::Updated { answer, version }
    }

    fn find(&mut self, env: &mut Environment, keys: Vec<BlockKey>, requester: Option<NodeId>) -> Reply {
        let now = env.time(Host::Member(self.name));
        let answer = self.lookup(now, &keys, requester);
        if answer.partial > 0 {
            env.count("partial answers");
        }
        let (member, noted) = (self.name, answer.clone());
        env.observe(Observation::LookupAnswered { member, keys, requester, answer: noted });
        Reply::Found(answer)
    }

    fn answer_placement(&mut self, env: &mut Environment, request: Arc<PlacementRequest>) -> Reply {
        let now = env.time(Host::Member(self.name));
        let answer = self.place(now, &request).map(Box::new);
        if let Some(answer) = answer.clone() {
            env.observe(Observation::PlacementAnswered { member: self.name, request, answer });
        }
        Reply::Placed(answer)
    }

    fn handle_report(&mut self, env: &mut Environment, body: NodeReportBody) -> Reply {
        let now = env.time(Host::Member(self.name));
        let answer = self.report(now, body);
        env.observe(Observation::ReportAnswered { member: self.name });
        Reply::Reported(answer.map(|ReportAnswer { grants, mode, planned }| {
            let given = planned.map(|planned| Move { to: planned.to, bytes: planned.bytes });
            NodeReportReply { grants, direction: mode.map(|set| Direction { set, given }) }
        }))
    }

    fn members_now(&self, env: &Environment) -> Reply {
        let now = env.time(Host::Member(self.name));
        Reply::Members(self.member_list(now).into())
    }

    // ---- followers ----------------------------------------------------------------------------------------

    fn follow(&mut self, env: &mut Environment, from: (LineId, CallId)) {
        let list = self.members_now(env);
        send_reply(env, from, list);
        let nodes = Reply::Nodes(self.node_list());
        send_reply(env, from, nodes);
        self.followers.push(from);
    }

    /// Handles a change of the member's place among the members, or of its knowledge of them.
    pub(crate) fn place_changed(&mut self, env: &mut Environment) {
        let followers = self.followers.clone();
        let list = self.members_now(env);
        followers.into_iter().for_each(|follower| send_reply(env, follower, list.clone()));
        let delay = env.rng.micros(1..OWN_US_MAX);
        env.member_later(self.name, delay, MemberStep::Own);
    }

    /// Runs the task that sets the directory's slots to those of the member's place.
    pub(crate) fn set_owned_slots(&mut self, env: &mut Environment) {
        let now = env.time(Host::Member(self.name));
        self.update_owned_slots(now);
        env.observe(Observation::DirectoryChanged { member: self.name });
    }

    pub(crate) fn notify_if_nodes_changed(&mut self, env: &mut Environment) {
        if self.take_nodes_changed() && !std::mem::replace(&mut self.notifies_nodes, true) {
            env.member_later(self.name, NOTIFY_NODES_AFTER, MemberStep::NotifyNodes);
        }
    }

    pub(crate) fn notify_nodes(&mut self, env: &mut Environment) {
        self.notifies_nodes = false;
        let (followers, nodes) = (self.followers.clone(), self.node_list());
        followers.into_iter().for_each(|follower| send_reply(env, follower, Reply::Nodes(nodes.clone())));
    }

    // ---- nodes --------------------------------------------------------------------------------------------

    /// Handles a registration that was written to the store.
    pub(crate) fn node_written(&mut self, env: &mut Environment, record: NodeRecord, from: (LineId, CallId)) {
        let now = env.time(Host::Member(self.name));
        let reply = Reply::Registered { node: record.node, epoch: record.epoch };
        let newest = self.registered(now, record);
        env.observe(Observation::DirectoryChanged { member: self.name });
        self.notify_if_nodes_changed(env);
        send_reply(env, from, if newest { reply } else { Reply::Unavailable });
    }

    pub(crate) fn expiry_due(&mut self, env: &mut Environment) {
        let now = env.time(Host::Member(self.name));
        let next = self.expire(now);
        self.sweep();
        env.observe(Observation::DirectoryChanged { member: self.name });
        let wait = member_parts::expiry_wait(next.map(|next| next.since(now)), DEAD_AFTER);
        env.member_later(self.name, wait, MemberStep::Expire);
    }

    /// Updates the ledgers, and schedules the next update.
    pub(crate) fn rebalance_due(&mut self, env: &mut Environment) {
        self.rebalance(env.time(Host::Member(self.name)));
        env.member_later(self.name, LEDGER_INTERVAL, MemberStep::Rebalance);
        env.observe(Observation::LedgersUpdated { member: self.name });
    }

    /// `SetNode`, as in a member. A node that has never registered cannot be set.
    pub(crate) fn set_mode(&mut self, env: &mut Environment, node: usize, mode: NodeMode) {
        if self.knows_host(node) {
            ModeOrder::begin(env, &mut self.talk, node, mode);
        }
    }
}

/// Sends an answer to a call of an agent.
pub(crate) fn send_reply(env: &mut Environment, to: (LineId, CallId), reply: Reply) {
    env.send(to.0, 0, Message::Reply { call: to.1, reply });
}
