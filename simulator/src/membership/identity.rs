//! The identity of the store: how a member finds or creates it at its start, and notices another one.
//!
//! Production code decides which call is next ([`IdentitySearch`], [`IdentityCall`]).
//!
//! The outputs are carried out in the order of `controlplane/src/identity.rs`.

use reprise_controlplane_core::identity_search::{IdentitySearch, SearchInput, SearchStep};
use reprise_controlplane_core::record_watch::{IdentityAnswer, IdentityCall};
use reprise_controlplane_core::store_writes::StoreIdentity;

use super::MemberStep;
use super::store_connection::{Purpose, StoreConnection};
use super::values::number_of;
use crate::environment::Environment;
use crate::messages::StoreRequest;
use crate::store::{Condition, Entry, Key, Prefix, Revision, Value, Write};

/// What a member knows of the store.
#[derive(Debug, Default)]
pub(crate) struct KnownStore {
    search: IdentitySearch,
    /// Name of the identity, as read by the search.
    name: Option<u32>,
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
    /// Begins the search for the identity at the start.
    pub(crate) fn find_identity(&mut self, env: &mut Environment) {
        self.carry_out_search(env, SearchStep::ReadName);
    }

    /// Handles the name of the identity, which is a number.
    pub(super) fn name_read(&mut self, env: &mut Environment, entry: &Option<Entry>) -> SearchStep {
        self.known.name = number_of(entry);
        self.search(env, presence(self.known.name.is_some()))
    }

    /// Handles the marker of a name.
    pub(super) fn marker_read(&mut self, env: &mut Environment, entry: &Option<Entry>) -> SearchStep {
        let revision = entry.as_ref().map(|entry| entry.modified);
        let identity = self.known.name.zip(revision);
        self.known.identity = identity.map(|(number, revision)| Identity { number, revision });
        self.known.seen = revision.unwrap_or_default();
        self.search(env, presence(revision.is_some()))
    }

    /// Gives an input to the search, and carries out its next step.
    pub(super) fn search(&mut self, env: &mut Environment, input: SearchInput) -> SearchStep {
        let step = self.known.search.on(input);
        self.carry_out_search(env, step);
        step
    }

    fn carry_out_search(&mut self, env: &mut Environment, step: SearchStep) {
        match step {
            SearchStep::ReadName => {
                self.ask(env, Purpose::IdentityName, StoreRequest::Get(vec![Key::Identity]));
            }
            SearchStep::ReadMarker => {
                let key = Key::IdentityOf(self.known.name.expect("the name was read"));
                self.ask(env, Purpose::IdentityMarker, StoreRequest::Get(vec![key]));
            }
            SearchStep::Create => self.create_identity(env),
            SearchStep::Found | SearchStep::GiveUp => {}
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

fn presence(is_present: bool) -> SearchInput {
    if is_present { SearchInput::Present } else { SearchInput::Absent }
}
