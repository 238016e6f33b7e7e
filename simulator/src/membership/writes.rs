//! Writes of records: registrations of nodes, modes, and budgets of tenants.
//!
//! Production state machines decide about registrations and modes, attempt by attempt
//! ([`RegistrationWrite`], [`ModeWrite`]). Here are the calls to the store. Not reproduced: node numbers never run out, two
//! keys are read by one request, and a budget is written by one transaction without a check of reservations, so
//! that concurrent changes do not conflict.
//!
//! The outputs are carried out in the order of `controlplane/src/registry.rs` and `modes.rs`.

use reprise_controlplane_core::store_writes::{
    ModeInput, ModeStep, ModeWrite, NodeRegistration, NumberCounter, RegistrationInput,
    RegistrationRejection, RegistrationStep, RegistrationWrite, Unchanged, WriteRejection,
};
use reprise_controlplane_core::{Budget, ModeRecord, NodeDetails, NodeRecord};
use reprise_policy::peer::PeerEndpoint;
use reprise_policy::{Epoch, NodeMode, TenantId};

use super::store_connection::{Purpose, StoreConnection};
use super::values::{mode_record, node_record, number_of};
use crate::environment::Environment;
use crate::member::node_name;
use crate::messages::{CallId, Message, Reply, StoreRequest};
use crate::network::LineId;
use crate::store::{Condition, Entry, Key, Value, Write};

/// A registration in progress.
#[derive(Clone, Debug)]
pub(crate) struct RegistrationAttempt {
    name: usize,
    line: LineId,
    call: CallId,
    write: RegistrationWrite,
}

/// An operator's request to set a node's mode.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModeOrder {
    pub(crate) node: usize,
    write: ModeWrite,
}

/// What follows a step of a write.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub(super) enum Progress<T> {
    /// A call to the store has no answer yet.
    Waits,
    /// The record was written, or is as it should be.
    Done(T),
    /// The write was given up.
    Rejected,
    /// The write was given up because the store was replaced.
    OtherStore,
}

fn condition(key: Key, unchanged: Unchanged) -> Condition {
    match unchanged {
        Unchanged::Absent => Condition::Absent(key),
        Unchanged::At(revision) => Condition::Modified(key, revision),
    }
}

impl RegistrationAttempt {
    /// Begins a registration of a node with a failure domain.
    pub(crate) fn begin(
        env: &mut Environment,
        talk: &mut StoreConnection,
        (name, domain): (usize, String),
        (line, call): (LineId, CallId),
    ) {
        let details = NodeDetails {
            peer_endpoints: vec![PeerEndpoint::tcp(format!("{}:1", node_name(name)))],
            failure_domain: domain,
            ..NodeDetails::default()
        };
        // Epochs begin at a number of the store's identity.
        let base = Epoch(u64::from(talk.identity_number()) << 32);
        let write = RegistrationWrite::new(&node_name(name), details, base);
        RegistrationAttempt { name, line, call, write }.read(env, talk);
    }

    /// Returns the receiver of the answer.
    pub(super) fn from(&self) -> (LineId, CallId) {
        (self.line, self.call)
    }

    pub(super) fn refuse(&self, env: &mut Environment) {
        env.send(self.line, 0, Message::Reply { call: self.call, reply: Reply::Unavailable });
    }

    /// Reads the record of the node, and the counter of numbers.
    fn read(self, env: &mut Environment, talk: &mut StoreConnection) {
        let keys = vec![Key::Node(self.name), Key::NextNode];
        talk.ask(env, Purpose::Registered(self), StoreRequest::Get(keys));
    }

    /// Handles the record of the node and the counter, which are read together.
    pub(super) fn on_read(
        mut self,
        env: &mut Environment,
        talk: &mut StoreConnection,
        entries: &[Option<Entry>],
    ) -> Progress<NodeRecord> {
        let mut step = self.write.on(RegistrationInput::Record(entries[0].as_ref().map(node_record)));
        if step == RegistrationStep::ReadCounter {
            let counter = entries[1].as_ref().and_then(|entry| {
                Some(NumberCounter { next: number_of(&entries[1])?, revision: entry.modified })
            });
            step = self.write.on(RegistrationInput::Counter(counter));
        }
        self.carry_out(env, talk, step)
    }

    /// Handles another answer of the store.
    pub(super) fn on(
        mut self,
        env: &mut Environment,
        talk: &mut StoreConnection,
        input: RegistrationInput,
    ) -> Progress<NodeRecord> {
        let step = self.write.on(input);
        self.carry_out(env, talk, step)
    }

    fn carry_out(
        self,
        env: &mut Environment,
        talk: &mut StoreConnection,
        step: RegistrationStep,
    ) -> Progress<NodeRecord> {
        match step {
            RegistrationStep::ReadRecord | RegistrationStep::ReadCounter => self.read(env, talk),
            RegistrationStep::Write(registration) => self.transact(env, talk, &registration),
            RegistrationStep::Compare => talk.compare_store(env, Purpose::IsOfStore(self)),
            RegistrationStep::Done(record) => return Progress::Done(record),
            RegistrationStep::Rejected(RegistrationRejection::Write(WriteRejection::OtherStore)) => {
                return Progress::OtherStore;
            }
            RegistrationStep::Rejected(_) => return Progress::Rejected,
        }
        Progress::Waits
    }

    fn transact(self, env: &mut Environment, talk: &mut StoreConnection, registration: &NodeRegistration) {
        let key = Key::Node(self.name);
        let mut conditions = vec![talk.same_store(), condition(key, registration.unchanged)];
        let record = Value::Node(Box::new(registration.record.clone()));
        let mut writes = vec![Write { key, value: record, lease: None }];
        if let Some((unchanged, next)) = registration.counter {
            conditions.push(condition(Key::NextNode, unchanged));
            writes.push(Write { key: Key::NextNode, value: Value::Number(next), lease: None });
        }
        talk.ask(env, Purpose::Register(self), StoreRequest::Transact { conditions, writes });
    }
}

impl ModeOrder {
    /// Begins to set the mode of a node.
    pub(crate) fn begin(env: &mut Environment, talk: &mut StoreConnection, node: usize, mode: NodeMode) {
        ModeOrder { node, write: ModeWrite::new(mode) }.read(env, talk);
    }

    fn read(self, env: &mut Environment, talk: &mut StoreConnection) {
        talk.ask(env, Purpose::ModeBefore(self), StoreRequest::Get(vec![Key::Mode(self.node)]));
    }

    /// Handles the record of the mode.
    pub(super) fn on_read(
        self,
        env: &mut Environment,
        talk: &mut StoreConnection,
        entry: &Option<Entry>,
    ) -> Progress<ModeRecord> {
        self.on(env, talk, ModeInput::Record(entry.as_ref().map(mode_record)))
    }

    /// Handles an answer of the store.
    pub(super) fn on(
        mut self,
        env: &mut Environment,
        talk: &mut StoreConnection,
        input: ModeInput,
    ) -> Progress<ModeRecord> {
        match self.write.on(input) {
            ModeStep::Read => self.read(env, talk),
            ModeStep::Write(unchanged) => {
                let key = Key::Mode(self.node);
                let conditions = vec![condition(key, unchanged), talk.same_store()];
                let writes = vec![Write { key, value: Value::Mode(self.write.mode()), lease: None }];
                talk.ask(env, Purpose::ModePut(self), StoreRequest::Transact { conditions, writes });
            }
            ModeStep::Compare => talk.compare_store(env, Purpose::ModeOfStore(self)),
            ModeStep::Done(_, set) => return Progress::Done(set),
            ModeStep::Rejected(WriteRejection::OtherStore) => return Progress::OtherStore,
            ModeStep::Rejected(WriteRejection::Busy) => return Progress::Rejected,
        }
        Progress::Waits
    }
}

impl StoreConnection {
    /// `SetTenant` or `RemoveTenant`, as in a member.
    pub(crate) fn set_budget(&mut self, env: &mut Environment, tenant: TenantId, budget: Option<Budget>) {
        let key = Key::Tenant(tenant);
        let conditions = vec![self.same_store()];
        let request = match budget {
            Some(budget) => {
                let writes = vec![Write { key, value: Value::Budget(budget), lease: None }];
                StoreRequest::Transact { conditions, writes }
            }
            None => StoreRequest::Delete { conditions, key },
        };
        self.ask(env, Purpose::SetBudget, request);
    }
}
