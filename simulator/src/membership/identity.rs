//! The identity of the store: how a member finds or creates it at its start, and notices another one.
//!
//! Production code decides which call is next ([`IdentityCall`]).

use reprise_controlplane_core::record_watch::{IdentityAnswer, IdentityCall};
use reprise_controlplane_core::store_writes::StoreIdentity;

use super::MemberStep;
use super::store_connection::{Purpose, StoreConnection};
use crate::environment::Environment;
use crate::messages::StoreRequest;
use crate::store::{Condition, Entry, Key, Prefix, Revision, Value, Write};

/// What a member knows of the store.
#[derive(Debug, Default)]
pub(crate) struct KnownStore {
    identity: Option<Identity>,
    /// Revision of the store at the last check of its identity.
    seen: Revision,
}

/// Identity of the store.
#[derive(Clone, Copy, Debug)]
struct Identity {
    number: u32,
    revision: Revision,
}

/// Whether a member continues after an answer about the store's identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub(super) enum Continuation {
    Continues,
    Ends,
}

impl StoreConnection {
    /// Reads the identity at the start.
    pub(crate) fn find_identity(&mut self, env: &mut Environment) {
        self.ask(env, Purpose::Identity, StoreRequest::Get(vec![Key::Identity]));
    }

    /// Handles the number of the store; creates one if it is missing.
    pub(super) fn number_read(&mut self, env: &mut Environment, entry: &Option<Entry>) {
        match number_of(entry) {
            Some(number) => {
                let key = Key::IdentityOf(number);
                self.ask(env, Purpose::IdentityOf(number), StoreRequest::Get(vec![key]));
            }
            None => self.create_identity(env),
        }
    }

    fn create_identity(&mut self, env: &mut Environment) {
        let number = (env.rng.next() >> 33) as u32;
        let write = |key, value| Write { key, value, lease: None };
        let writes =
            vec![write(Key::Identity, Value::Number(number)), write(Key::IdentityOf(number), Value::Nothing)];
        let conditions = vec![Condition::Absent(Key::Identity)];
        self.ask(env, Purpose::CreateIdentity, StoreRequest::Transact { conditions, writes });
    }

    /// Handles the key of the identity. Reports whether it exists.
    pub(super) fn identity_found(&mut self, number: u32, entry: &Option<Entry>) -> bool {
        let identity = entry.as_ref().map(|entry| Identity { number, revision: entry.modified });
        self.known = KnownStore { identity, seen: identity.map_or(0, |identity| identity.revision) };
        identity.is_some()
    }

    fn identity(&self) -> Identity {
        self.known.identity.expect("read before anything else")
    }

    /// Returns the number of the store that the member knows.
    pub(crate) fn identity_number(&self) -> u32 {
        self.identity().number
    }

    /// Returns the condition that the store still has the identity that the member knows.
    pub(super) fn same_store(&self) -> Condition {
        let identity = self.identity();
        Condition::Modified(Key::IdentityOf(identity.number), identity.revision)
    }

    /// Reads the identity of the store after a conflict.
    pub(super) fn compare_store(&mut self, env: &mut Environment, of: Purpose) {
        let key = Key::IdentityOf(self.identity().number);
        self.ask(env, of, StoreRequest::Get(vec![key]));
    }

    pub(super) fn compared(&self, identity: &Option<Entry>) -> StoreIdentity {
        let revision = identity.as_ref().map(|entry| entry.modified);
        let is_same = revision == Some(self.identity().revision);
        if is_same { StoreIdentity::Same } else { StoreIdentity::Other }
    }

    /// Makes the next call for the identity.
    pub(super) fn follow_identity(&mut self, env: &mut Environment, call: IdentityCall) -> Continuation {
        let prefix = Prefix::IdentityOf(self.identity().number);
        match call {
            IdentityCall::Read(pause) if pause.is_zero() => {
                self.ask(env, Purpose::IdentityRange, StoreRequest::Range(prefix));
            }
            IdentityCall::Read(pause) => env.member_later(self.member, pause, MemberStep::Identity),
            IdentityCall::Watch(from) => {
                let watch = StoreRequest::Watch { prefix, from };
                self.ask(env, Purpose::IdentityWatch(from - 1), watch);
            }
            // An emptied store has no identity to delete.
            IdentityCall::End | IdentityCall::DeleteAndEnd => return Continuation::Ends,
        }
        Continuation::Continues
    }

    /// Notes the revision of the store at a check of its identity.
    pub(super) fn saw_identity(&mut self, revision: Revision) {
        self.known.seen = revision;
    }

    pub(super) fn identity_read(
        &mut self,
        env: &mut Environment,
        revision: Revision,
        entries: &[(Key, Entry)],
    ) -> Continuation {
        let same = entries.first().is_some_and(|(_, entry)| entry.modified == self.identity().revision);
        let answer = if revision < self.known.seen {
            IdentityAnswer::Restored
        } else if same {
            IdentityAnswer::Unchanged(revision)
        } else {
            IdentityAnswer::Changed
        };
        if !matches!(answer, IdentityAnswer::Unchanged(_)) {
            env.count("stores found replaced");
        }
        self.follow_identity(env, IdentityCall::after(answer))
    }
}

/// Decodes the number of a store or the counter of nodes.
pub(super) fn number_of(entry: &Option<Entry>) -> Option<u32> {
    match entry.as_ref()?.value {
        Value::Number(number) => Some(number),
        _ => None,
    }
}
