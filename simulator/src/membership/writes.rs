//! Writes of records: registrations of nodes, modes, and budgets of tenants.
//!
//! Production code decides what a transaction writes, and what follows a conflict
//! ([`reprise_controlplane_core::store_writes`]). The loops of attempts follow `controlplane/src/registry.rs`,
//! `controlplane/src/modes.rs` and `controlplane/src/tenants.rs`. Not reproduced: node numbers never run out, two keys are read by
//! one request, and budgets are set without the joint check of reservations, which grants concurrent changes.

use reprise_controlplane_core::store_writes::{
    self, NodeRegistration, NumberCounter, Unchanged, WriteAttempts, WriteRejection,
};
use reprise_controlplane_core::{Budget, NodeDetails};
use reprise_policy::peer::PeerEndpoint;
use reprise_policy::{Epoch, NodeMode, TenantId};

use super::identity::{Continuation, number_of};
use super::store_connection::{Purpose, StoreConnection};
use super::store_watch::{mode_record, node_record};
use crate::environment::Environment;
use crate::member::node_name;
use crate::messages::{CallId, Message, Reply, StoreRequest};
use crate::network::LineId;
use crate::store::{Condition, Entry, Key, Value, Write};

/// A registration in progress.
#[derive(Clone, Debug)]
pub(crate) struct RegistrationAttempt {
    name: usize,
    /// Failure domain of the node.
    domain: String,
    line: LineId,
    call: CallId,
    attempts: WriteAttempts,
}

/// An operator's request to set a node's mode.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ModeOrder {
    pub(crate) node: usize,
    pub(crate) mode: NodeMode,
    attempts: WriteAttempts,
}

fn condition(key: Key, unchanged: Unchanged) -> Condition {
    match unchanged {
        Unchanged::Absent => Condition::Absent(key),
        Unchanged::At(revision) => Condition::Modified(key, revision),
    }
}

impl RegistrationAttempt {
    pub(crate) fn new(name: usize, domain: String, (line, call): (LineId, CallId)) -> RegistrationAttempt {
        RegistrationAttempt { name, domain, line, call, attempts: WriteAttempts::default() }
    }

    /// Returns where the answer is expected.
    pub(super) fn from(&self) -> (LineId, CallId) {
        (self.line, self.call)
    }

    pub(super) fn refuse(&self, env: &mut Environment) {
        env.send(self.line, 0, Message::Reply { call: self.call, reply: Reply::Unavailable });
    }

    /// Reads the record of the node, and the counter of numbers.
    pub(crate) fn read(self, env: &mut Environment, talk: &mut StoreConnection) {
        let keys = vec![Key::Node(self.name), Key::NextNode];
        talk.ask(env, Purpose::Registered(self), StoreRequest::Get(keys));
    }

    /// Writes the record, after it was read.
    pub(super) fn write(self, env: &mut Environment, talk: &mut StoreConnection, entries: &[Option<Entry>]) {
        let details = NodeDetails {
            peer_endpoints: vec![PeerEndpoint::tcp(format!("{}:1", node_name(self.name)))],
            failure_domain: self.domain.clone(),
            ..NodeDetails::default()
        };
        let registration = match &entries[0] {
            Some(known) => NodeRegistration::again(node_record(known), details),
            None => {
                let counter = entries[1].as_ref().and_then(|entry| {
                    Some(NumberCounter { next: number_of(&entries[1])?, revision: entry.modified })
                });
                // Epochs begin at a number of the store's identity.
                let base = Epoch(u64::from(talk.identity_number()) << 32);
                NodeRegistration::first(&node_name(self.name), details, counter, base).expect("few nodes")
            }
        };
        let key = Key::Node(self.name);
        let mut conditions = vec![talk.same_store(), condition(key, registration.unchanged)];
        let record = Value::Node(Box::new(registration.record.clone()));
        let mut writes = vec![Write { key, value: record, lease: None }];
        if let Some((unchanged, next)) = registration.counter {
            conditions.push(condition(Key::NextNode, unchanged));
            writes.push(Write { key: Key::NextNode, value: Value::Number(next), lease: None });
        }
        let purpose = Purpose::Register(self, Box::new(registration));
        talk.ask(env, purpose, StoreRequest::Transact { conditions, writes });
    }

    /// Handles the comparison of the store after a registration that was not written.
    pub(super) fn again(
        mut self,
        env: &mut Environment,
        talk: &mut StoreConnection,
        identity: &Option<Entry>,
    ) -> Continuation {
        match self.attempts.retry(talk.compared(identity)) {
            Ok(()) => self.read(env, talk),
            Err(WriteRejection::Busy) => self.refuse(env),
            Err(WriteRejection::OtherStore) => {
                self.refuse(env);
                return Continuation::Ends;
            }
        }
        Continuation::Continues
    }
}

impl ModeOrder {
    pub(crate) fn new(node: usize, mode: NodeMode) -> ModeOrder {
        ModeOrder { node, mode, attempts: WriteAttempts::default() }
    }

    pub(crate) fn read(self, env: &mut Environment, talk: &mut StoreConnection) {
        talk.ask(env, Purpose::ModeBefore(self), StoreRequest::Get(vec![Key::Mode(self.node)]));
    }

    /// Writes the mode, after the record was read.
    pub(super) fn write(self, env: &mut Environment, talk: &mut StoreConnection, entry: &Option<Entry>) {
        let known = entry.as_ref().map(mode_record);
        let Some(unchanged) = store_writes::set_mode(known, self.mode) else { return };
        let key = Key::Mode(self.node);
        let conditions = vec![condition(key, unchanged), talk.same_store()];
        let writes = vec![Write { key, value: Value::Mode(self.mode), lease: None }];
        talk.ask(env, Purpose::ModePut(self), StoreRequest::Transact { conditions, writes });
    }

    /// Handles the comparison of the store after a mode that was not written. The operator gets an error if it
    /// is another one.
    pub(super) fn again(
        mut self,
        env: &mut Environment,
        talk: &mut StoreConnection,
        identity: &Option<Entry>,
    ) {
        if self.attempts.retry(talk.compared(identity)).is_ok() {
            self.read(env, talk);
        }
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
