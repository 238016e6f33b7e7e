//! Nodes in the store: numbers and epochs, with one conditional transaction for each registration. As
//! `controlplane/src/registry.rs`.

use reprise_controlplane_core::{NodeDetails, NodeRecord};
use reprise_policy::peer::PeerEndpoint;
use reprise_policy::{Epoch, NodeId};

use super::{Purpose, number_of};
use crate::messages::{CallId, Message, Reply, StoreRequest};
use crate::network::LineId;
use crate::simulation::Simulation;
use crate::store::{Condition, Entry, Key, Value, Write};

/// Maximum number of attempts against concurrent registrations.
const ATTEMPTS_MAX: u32 = 64;

/// A registration in progress.
#[derive(Clone, Copy, Debug)]
pub(super) struct RegistrationAttempt {
    name: usize,
    line: LineId,
    call: CallId,
    attempts: u32,
}

impl RegistrationAttempt {
    /// Returns the call that requested the registration.
    pub(super) fn from(&self) -> (LineId, CallId) {
        (self.line, self.call)
    }
}

impl Simulation {
    pub(super) fn refuse(&mut self, of: RegistrationAttempt) {
        self.send(of.line, 0, Message::Reply { call: of.call, reply: Reply::Unavailable });
    }

    /// Handles a registration that was not written: another was faster, or the store was replaced.
    pub(super) fn check_same_store(&mut self, member: usize, of: RegistrationAttempt) {
        let key = Key::IdentityOf(self.identity(member).number);
        self.ask_store(member, Purpose::IsOfStore(of), StoreRequest::Get(vec![key]));
    }

    pub(super) fn register_again(
        &mut self,
        member: usize,
        of: RegistrationAttempt,
        identity: &Option<Entry>,
    ) {
        let revision = identity.as_ref().map(|entry| entry.modified);
        if revision != Some(self.identity(member).revision) {
            self.refuse(of);
            return self.end_member(member);
        }
        let of = RegistrationAttempt { attempts: of.attempts + 1, ..of };
        if of.attempts == ATTEMPTS_MAX {
            return self.refuse(of);
        }
        self.read_record(member, of);
    }

    pub(crate) fn register_node(&mut self, member: usize, name: usize, of: (LineId, CallId)) {
        let of = RegistrationAttempt { name, line: of.0, call: of.1, attempts: 0 };
        self.read_record(member, of);
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
        let (key, mut writes) = (Key::Node(of.name), Vec::new());
        let mut conditions = vec![Condition::Modified(Key::IdentityOf(identity.number), identity.revision)];
        let record = match &entries[0] {
            Some(Entry { value: Value::Node(known), modified, .. }) => {
                conditions.push(Condition::Modified(key, *modified));
                NodeRecord { epoch: Epoch(known.epoch.0 + 1), ..NodeRecord::clone(known) }
            }
            Some(other) => unreachable!("unexpected value of a node record: {other:?}"),
            None => {
                let counter = entries[1].as_ref().map(|entry| entry.modified);
                let unchanged = counter
                    .map_or(Condition::Absent(Key::NextNode), |at| Condition::Modified(Key::NextNode, at));
                conditions.extend([Condition::Absent(key), unchanged]);
                let number = number_of(&entries[1]).unwrap_or(1);
                let next = Value::Number(number + 1);
                writes.push(Write { key: Key::NextNode, value: next, lease: None });
                first_record(of.name, number, identity.number)
            }
        };
        let value = Value::Node(Box::new(record.clone()));
        writes.push(Write { key, value, lease: None });
        let purpose = Purpose::Register(of, Box::new(record));
        self.ask_store(member, purpose, StoreRequest::Transact { conditions, writes });
    }
}

/// Creates the record of a node that was never registered. Epochs begin at a number of the store's identity.
fn first_record(name: usize, number: u32, identity: u32) -> NodeRecord {
    let peer_endpoints = vec![PeerEndpoint::tcp(format!("n{name}:1"))];
    let details = NodeDetails { peer_endpoints, ..NodeDetails::default() };
    let node = NodeId(u16::try_from(number).expect("few nodes"));
    let epoch = Epoch((u64::from(identity) << 32) + 1);
    // The simulation forgets no nodes, so the revision of a record is not used.
    NodeRecord { node, name: format!("n{name}"), epoch, details, revision: 0 }
}
