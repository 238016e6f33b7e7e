//! The control plane's member among the hosts: calls that arrive, its death and its next life.

use std::time::Duration;

use reprise_controlplane_core::NodeRecord;
use reprise_policy::NodeId;

use crate::member::Member;
use crate::messages::{CallId, Message, Reply, Request};
use crate::network::{Host, LineId};
use crate::setup::{BEAT_EVERY, DEAD_AFTER};
use crate::world::{Action, World};

/// The store answers within this, in microseconds.
const STORE_US_MAX: u64 = 20_000;

impl World {
    pub(crate) fn serve_call(&mut self, line: LineId, call: CallId, request: Request) {
        let now = self.now;
        let member = self.member.as_mut().expect("only a running member is asked");
        let reply = match request {
            Request::Register { name } => {
                // Durable in the store first; the member's own memory follows when the store has answered.
                let (record, life) = (self.store.register(name), self.member_life);
                let delay = self.rng.micros(100..STORE_US_MAX);
                return self.after(delay, Action::Registered { life, record, line, call });
            }
            Request::Beat { node, epoch } => {
                let (known, version) = (member.beat(now, node, epoch), member.directory.version());
                self.heard(node);
                Reply::Beaten { known, version }
            }
            Request::Slots { node, epoch } => Reply::Standing(member.standing(node, epoch).map(Box::new)),
            Request::Update(batch) => {
                let (answer, version) = (member.update(&batch), member.directory.version());
                self.audit_directory();
                Reply::Updated { answer, version }
            }
            Request::Lookup { keys, asking } => {
                let found = member.lookup(now, &keys, asking);
                found.iter().flatten().for_each(|replica| self.assert_offered(replica.node, asking));
                Reply::Found(found)
            }
        };
        self.send(line, 0, Message::Reply { call, reply });
    }

    pub(crate) fn registered(&mut self, life: u64, record: NodeRecord, from: (LineId, CallId)) {
        let Some(member) = self.member.as_mut().filter(|_| life == self.member_life) else { return };
        let reply = Reply::Registered { node: record.node, epoch: record.epoch };
        let node = record.node;
        member.registered(self.now, record);
        self.heard(node);
        self.audit_directory();
        self.send(from.0, 0, Message::Reply { call: from.1, reply });
    }

    pub(crate) fn expire(&mut self, life: u64) {
        let Some(member) = self.member.as_mut().filter(|_| life == self.member_life) else { return };
        let next = member.expire(self.now);
        self.audit_directory();
        let wait = next.map_or(BEAT_EVERY, |next| next.since(self.now)).max(Duration::from_millis(1));
        self.after(wait, Action::Expire { life });
    }

    /// The member dies: its memory is gone.
    pub(crate) fn kill_member(&mut self) {
        self.member = None;
        self.break_lines(Host::Member);
    }

    pub(crate) fn start_member(&mut self) {
        self.member_life += 1;
        self.member = Some(Member::start(&self.store, self.setup.variant));
        self.after(BEAT_EVERY, Action::Expire { life: self.member_life });
    }

    /// The member has a sign of life, which may have been under way for long.
    fn heard(&mut self, node: NodeId) {
        let host = self.host_of(node);
        self.nodes[host].heard = self.now;
    }

    fn audit_directory(&self) {
        let member = self.member.as_ref().expect("it runs");
        member.directory.audit().unwrap_or_else(|broken| panic!("directory: {broken}"));
    }

    /// No lookup names the node that asks, nor one without a process that runs and from which nothing has come for
    /// too long.
    fn assert_offered(&self, node: NodeId, asking: Option<NodeId>) {
        assert!(asking != Some(node), "a lookup names the node that asks");
        let place = &self.nodes[self.host_of(node)];
        if place.is_silent() {
            let silence = self.now.since(place.heard);
            assert!(silence < DEAD_AFTER, "a lookup names node {node}, silent for {silence:?}");
        }
    }
}
