//! Writes of records: registrations of nodes, modes, and budgets of tenants.
//!
//! Production code decides what a transaction writes, and what follows a conflict
//! ([`reprise_controlplane_core::store_writes`]). The loops of attempts follow `controlplane/src/registry.rs`,
//! `controlplane/src/modes.rs` and `controlplane/src/tenants.rs`. Not reproduced: node numbers never run out, two keys are read by
//! one request, and budgets are set without the joint check of reservations, which grants concurrent changes.

use reprise_controlplane_core::store_writes::{
    self, NodeRegistration, NumberCounter, StoreIdentity, Unchanged, WriteAttempts, WriteRejection,
};
use reprise_controlplane_core::{Budget, ModeRecord, NodeDetails};
use reprise_policy::peer::PeerEndpoint;
use reprise_policy::{Epoch, NodeMode, TenantId};

use super::store_watch::{mode_record, node_record};
use super::{Purpose, number_of};
use crate::member::node_name;
use crate::messages::{CallId, Message, Reply, StoreRequest};
use crate::network::LineId;
use crate::simulation::Simulation;
use crate::store::{Condition, Entry, Key, Revision, TransactionError, Value, Write};

/// A registration in progress.
#[derive(Clone, Debug)]
pub(super) struct RegistrationAttempt {
    name: usize,
    /// Failure domain of the node.
    domain: String,
    line: LineId,
    call: CallId,
    attempts: WriteAttempts,
}

/// An operator's request to set a node's mode.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModeOrder {
    node: usize,
    mode: NodeMode,
    attempts: WriteAttempts,
}

fn condition(key: Key, unchanged: Unchanged) -> Condition {
    match unchanged {
        Unchanged::Absent => Condition::Absent(key),
        Unchanged::At(revision) => Condition::Modified(key, revision),
    }
}

impl Simulation {
    /// Returns the condition that the store still has the identity that a member knows.
    pub(super) fn same_store(&mut self, member: usize) -> Condition {
        let identity = self.identity(member);
        Condition::Modified(Key::IdentityOf(identity.number), identity.revision)
    }

    /// Reads the identity of the store after a conflict.
    pub(super) fn compare_store(&mut self, member: usize, of: Purpose) {
        let key = Key::IdentityOf(self.identity(member).number);
        self.ask_store(member, of, StoreRequest::Get(vec![key]));
    }

    pub(super) fn compared(&mut self, member: usize, identity: &Option<Entry>) -> StoreIdentity {
        let revision = identity.as_ref().map(|entry| entry.modified);
        let is_same = revision == Some(self.identity(member).revision);
        if is_same { StoreIdentity::Same } else { StoreIdentity::Other }
    }

    // ---- nodes --------------------------------------------------------------------------------------------

    pub(crate) fn register_node(
        &mut self,
        member: usize,
        (name, domain): (usize, String),
        (line, call): (LineId, CallId),
    ) {
        let attempts = WriteAttempts::default();
        self.read_record(member, RegistrationAttempt { name, domain, line, call, attempts });
    }

    pub(super) fn refuse(&mut self, of: &RegistrationAttempt) {
        self.env.send(of.line, 0, Message::Reply { call: of.call, reply: Reply::Unavailable });
    }

    fn read_record(&mut self, member: usize, of: RegistrationAttempt) {
        let keys = vec![Key::Node(of.name), Key::NextNode];
        self.ask_store(member, Purpose::Registered(of), StoreRequest::Get(keys));
    }

    pub(super) fn register_in_store(
        &mut self,
        member: usize,
        of: RegistrationAttempt,
        entries: &[Option<Entry>],
    ) {
        let identity = self.identity(member);
        let details = NodeDetails {
            peer_endpoints: vec![PeerEndpoint::tcp(format!("{}:1", node_name(of.name)))],
            failure_domain: of.domain.clone(),
            ..NodeDetails::default()
        };
        let registration = match &entries[0] {
            Some(known) => NodeRegistration::again(node_record(known), details),
            None => {
                let counter = entries[1].as_ref().and_then(|entry| {
                    Some(NumberCounter { next: number_of(&entries[1])?, revision: entry.modified })
                });
                // Epochs begin at a number of the store's identity.
                let base = Epoch(u64::from(identity.number) << 32);
                NodeRegistration::first(&node_name(of.name), details, counter, base).expect("few nodes")
            }
        };
        let key = Key::Node(of.name);
        let mut conditions = vec![self.same_store(member), condition(key, registration.unchanged)];
        let record = Value::Node(Box::new(registration.record.clone()));
        let mut writes = vec![Write { key, value: record, lease: None }];
        if let Some((unchanged, next)) = registration.counter {
            conditions.push(condition(Key::NextNode, unchanged));
            writes.push(Write { key: Key::NextNode, value: Value::Number(next), lease: None });
        }
        let purpose = Purpose::Register(of, Box::new(registration));
        self.ask_store(member, purpose, StoreRequest::Transact { conditions, writes });
    }

    pub(super) fn node_written(
        &mut self,
        member: usize,
        (of, registration): (RegistrationAttempt, NodeRegistration),
        result: Result<Revision, TransactionError>,
    ) {
        match result {
            Ok(revision) => self.registered(member, registration.committed(revision), (of.line, of.call)),
            Err(_) => self.compare_store(member, Purpose::IsOfStore(of)),
        }
    }

    /// Handles the comparison of the store after a registration that was not written.
    pub(super) fn register_again(
        &mut self,
        member: usize,
        mut of: RegistrationAttempt,
        identity: &Option<Entry>,
    ) {
        let store = self.compared(member, identity);
        match of.attempts.retry(store) {
            Ok(()) => self.read_record(member, of),
            Err(WriteRejection::Busy) => self.refuse(&of),
            Err(WriteRejection::OtherStore) => {
                self.refuse(&of);
                self.end_member(member);
            }
        }
    }

    // ---- modes --------------------------------------------------------------------------------------------

    /// `SetNode`, as in a member. A node that has never registered cannot be set.
    pub(crate) fn set_mode(&mut self, member: usize, node: usize, mode: NodeMode) {
        if self.member(member).knows_host(node) {
            self.read_mode(member, ModeOrder { node, mode, attempts: WriteAttempts::default() });
        }
    }

    fn read_mode(&mut self, member: usize, order: ModeOrder) {
        self.ask_store(member, Purpose::ModeBefore(order), StoreRequest::Get(vec![Key::Mode(order.node)]));
    }

    pub(super) fn mode_read(&mut self, member: usize, order: ModeOrder, entry: &Option<Entry>) {
        let known = entry.as_ref().map(mode_record);
        let Some(unchanged) = store_writes::set_mode(known, order.mode) else { return };
        let key = Key::Mode(order.node);
        let conditions = vec![condition(key, unchanged), self.same_store(member)];
        let writes = vec![Write { key, value: Value::Mode(order.mode), lease: None }];
        self.ask_store(member, Purpose::ModePut(order), StoreRequest::Transact { conditions, writes });
    }

    pub(super) fn mode_put(
        &mut self,
        member: usize,
        order: ModeOrder,
        result: Result<Revision, TransactionError>,
    ) {
        match result {
            Ok(revision) => {
                self.env.count("modes set");
                self.member(member).learn_mode(order.node, ModeRecord { mode: order.mode, revision });
            }
            Err(_) => self.compare_store(member, Purpose::ModeOfStore(order)),
        }
    }

    /// Handles the comparison of the store after a mode that was not written. The operator gets an error if it
    /// is another one.
    pub(super) fn set_mode_again(&mut self, member: usize, mut order: ModeOrder, identity: &Option<Entry>) {
        let store = self.compared(member, identity);
        if order.attempts.retry(store).is_ok() {
            self.read_mode(member, order);
        }
    }

    // ---- budgets ------------------------------------------------------------------------------------------

    /// `SetTenant` or `RemoveTenant`, as in a member.
    pub(crate) fn set_budget(&mut self, member: usize, tenant: TenantId, budget: Option<Budget>) {
        let key = Key::Tenant(tenant);
        let conditions = vec![self.same_store(member)];
        let request = match budget {
            Some(budget) => {
                let writes = vec![Write { key, value: Value::Budget(budget), lease: None }];
                StoreRequest::Transact { conditions, writes }
            }
            None => StoreRequest::Delete { conditions, key },
        };
        self.ask_store(member, Purpose::SetBudget, request);
    }
}
