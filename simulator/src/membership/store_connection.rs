//! A member's connection to the store: its calls, and their timeouts.

use std::collections::BTreeMap;

use reprise_policy::Tick;

use super::MemberStep;
use super::identity::KnownStore;
use super::store_watch::RecordKind;
use super::writes::{ModeOrder, RegistrationAttempt};
use crate::environment::Environment;
use crate::messages::{CallId, Message, StoreRequest};
use crate::network::{Host, LineId};
use crate::setup::{STORE_TIMEOUT, TIME_TO_LIVE};
use crate::simulation::take_where;
use crate::store::{LeaseId, Revision};

/// Connection to the store, and the calls on it.
#[derive(Debug)]
pub(crate) struct StoreConnection {
    pub(super) member: usize,
    line: Option<LineId>,
    calls: BTreeMap<CallId, StoreCall>,
    /// Watches that the store has confirmed.
    watches: BTreeMap<CallId, StoreCall>,
    begun: u64,
    pub(super) known: KnownStore,
}

/// A call without an answer.
#[derive(Clone, Debug)]
pub(super) struct StoreCall {
    pub(super) of: Purpose,
    pub(super) line: LineId,
    /// Time of the call, by the member's clock.
    pub(super) at: Tick,
}

#[derive(Clone, Debug)]
pub(super) enum Purpose {
    IdentityName,
    IdentityMarker,
    CreateIdentity,
    Records,
    Grant,
    Put,
    PutRefused,
    KeepAlive(LeaseId),
    Revoke,
    IdentityRange,
    IdentityWatch(Revision),
    Registered(RegistrationAttempt),
    Register(RegistrationAttempt),
    IsOfStore(RegistrationAttempt),
    ModesAtStart,
    ModeBefore(ModeOrder),
    ModePut(ModeOrder),
    ModeOfStore(ModeOrder),
    Follow(RecordKind),
    Watch(RecordKind),
    SetBudget,
}

impl StoreConnection {
    pub(crate) fn new(member: usize) -> StoreConnection {
        StoreConnection {
            member,
            line: None,
            calls: BTreeMap::new(),
            watches: BTreeMap::new(),
            begun: 0,
            known: KnownStore::default(),
        }
    }

    /// Sends a request, and schedules its timeout.
    pub(super) fn ask(&mut self, env: &mut Environment, of: Purpose, request: StoreRequest) {
        let host = Host::Member(self.member);
        let line = self.line.unwrap_or_else(|| env.open_line(host, Host::Store));
        let at = env.time(host);
        self.line = Some(line);
        let call = CallId(self.begun);
        self.begun += 1;
        let time = match &of {
            // Not later than the end of the lease.
            Purpose::KeepAlive(_) => TIME_TO_LIVE,
            _ => STORE_TIMEOUT,
        };
        self.calls.insert(call, StoreCall { of, line, at });
        env.send(line, 1, Message::StoreRequest { call, request });
        env.member_later(self.member, time, MemberStep::Timeout(call));
    }

    /// Ends a call that was answered, or not in time.
    pub(super) fn end(&mut self, call: CallId) -> Option<StoreCall> {
        self.calls.remove(&call)
    }

    /// Turns a call into an established watch, which has no timeout.
    pub(super) fn establish(&mut self, call: CallId) -> Option<Purpose> {
        let pending = self.calls.remove(&call)?;
        let of = pending.of.clone();
        self.watches.insert(call, pending);
        Some(of)
    }

    /// Returns what an established watch follows.
    pub(super) fn watched(&self, call: CallId) -> Option<Purpose> {
        self.watches.get(&call).map(|pending| pending.of.clone())
    }

    /// Ends the calls and watches of a connection that has ended.
    pub(super) fn lose(&mut self, line: LineId) -> Vec<Purpose> {
        self.line = self.line.filter(|known| *known != line);
        let mut lost = take_where(&mut self.calls, |pending| pending.line == line);
        lost.extend(take_where(&mut self.watches, |pending| pending.line == line));
        lost.into_iter().map(|(_, pending)| pending.of).collect()
    }
}
