//! A member's process at the store: its start and end, its connection, its calls and their timeouts.
//!
//! ```text
//!   start ── identity ──► nodes, modes ──► serving:  follow records │ hold a lease and an entry │ watch the identity
//!     └── the store does not answer: the process ends, and the next one begins
//! ```
//!
//! Production state machines decide about records (`store_watch.rs`), the entry (`member_entry.rs`) and writes
//! (`writes.rs`). The calls at the start follow `controlplane/src/identity.rs` and
//! `controlplane/src/server.rs`. A process that ends is restarted, as by Kubernetes. Not reproduced: further attempts to
//! read the state at the start.

mod member_entry;
mod store_watch;
mod writes;

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_controlplane_core::joining::{JoinInput, Joining};
use reprise_controlplane_core::record_watch::{IdentityAnswer, IdentityCall, RecordCall, WatchEnd};
use reprise_controlplane_core::store_writes::NodeRegistration;
use reprise_policy::Tick;

use crate::member::Member;
use crate::messages::{CallId, Message, StoreReply, StoreRequest};
use crate::network::{Host, LineId};
use crate::random_faults::Repair;
use crate::setup::{BEAT_EVERY, EXPECTED_FOR, STORE_TIMEOUT, TIME_TO_LIVE};
use crate::simulation::{Action, Simulation, take_where};
use crate::store::{Condition, Entry, Key, LeaseId, Prefix, Revision, Value, Write};
use store_watch::{RecordKind, Records, node_record};
use writes::{ModeOrder, RegistrationAttempt};

/// Connection to the store, and the calls on it.
#[derive(Debug, Default)]
pub(crate) struct StoreConnection {
    line: Option<LineId>,
    calls: BTreeMap<CallId, StoreCall>,
    /// Watches that the store has confirmed.
    watches: BTreeMap<CallId, StoreCall>,
    begun: u64,
}

/// Progress of a member's start and registration.
#[derive(Debug, Default)]
pub(crate) struct Membership {
    /// The member has read its initial state, and serves.
    pub(crate) serving: bool,
    identity: Option<Identity>,
    /// Revision of the store at the last check of its identity.
    seen: Revision,
    /// The member's entry in the list of members; `None` before it serves.
    entry: Option<Joining<LeaseId>>,
}

impl Membership {
    /// Returns the incarnation of the member's entry.
    pub(crate) fn incarnation(&self) -> Option<u64> {
        self.entry.as_ref().and_then(Joining::incarnation)
    }
}

/// Identity of the store.
#[derive(Clone, Copy, Debug)]
struct Identity {
    number: u32,
    revision: Revision,
}

/// A call without an answer.
#[derive(Debug)]
struct StoreCall {
    of: Purpose,
    line: LineId,
    /// Time of the call, by the member's clock.
    at: Tick,
}

#[derive(Clone, Debug)]
enum Purpose {
    Identity,
    IdentityOf(u32),
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
    Register(RegistrationAttempt, Box<NodeRegistration>),
    IsOfStore(RegistrationAttempt),
    ModesAtStart,
    ModeBefore(ModeOrder),
    ModePut(ModeOrder),
    ModeOfStore(ModeOrder),
    Follow(RecordKind),
    Watch(RecordKind),
    SetBudget,
}

/// A step of a member's process.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MemberStep {
    /// Timeout of a call to the store.
    Timeout(CallId),
    /// Check of the lease.
    Lease {
        id: LeaseId,
        check: u64,
    },
    Join {
        attempt: u64,
    },
    /// Lists records again.
    FollowRecords(RecordKind),
    /// Update of the ledgers.
    Rebalance,
    /// Check of the store's identity.
    Identity,
    /// Stops expecting nodes that have not registered.
    DropAbsent,
    Expire,
    /// Updates the followers' list of nodes.
    NotifyNodes,
    /// Sets the directory's slots to those of the member's place.
    Own,
}

impl MemberStep {
    /// Returns a number for the digest of the trace.
    pub(crate) fn code(&self) -> u64 {
        match self {
            MemberStep::Timeout(call) => 1 + (call.0 << 8),
            MemberStep::Lease { id, check } => 2 + (id.0 << 8) + (check << 32),
            MemberStep::Join { attempt } => 3 + (attempt << 8),
            MemberStep::FollowRecords(RecordKind::Members) => 4,
            MemberStep::Identity => 5,
            MemberStep::DropAbsent => 6,
            MemberStep::Expire => 7,
            MemberStep::NotifyNodes => 8,
            MemberStep::Own => 9,
            MemberStep::FollowRecords(of) => 10 + ((*of as u64) << 8),
            MemberStep::Rebalance => 11,
        }
    }
}

impl Simulation {
    pub(crate) fn serves(&self, member: usize) -> bool {
        self.members[member].as_ref().is_some_and(|member| member.joining.serving)
    }

    pub(crate) fn member(&mut self, member: usize) -> &mut Member {
        self.members[member].as_mut().expect("only a running member gets requests")
    }

    pub(crate) fn start_member(&mut self, member: usize) {
        self.env.begin_process(Host::Member(member));
        let begun = self.env.time(Host::Member(member));
        self.members[member] = Some(Member::new(member, begun, self.env.setup.variant));
        self.ask_store(member, Purpose::Identity, StoreRequest::Get(vec![Key::Identity]));
    }

    /// Ends the process, and with it the member's memory.
    pub(crate) fn kill_member(&mut self, member: usize) {
        self.env.break_lines(Host::Member(member));
        self.env.end_process(Host::Member(member));
        self.members[member] = None;
    }

    /// Ends a member that cannot continue; its next process starts after a while.
    fn end_member(&mut self, member: usize) {
        self.env.trace.note(|| format!("member {member} ends"));
        self.kill_member(member);
        let delay = self.env.rng.millis(300..900);
        self.env.after(delay, Action::Repair(Repair::StartMember(member)));
    }

    pub(crate) fn member_later(&mut self, member: usize, delay: Duration, what: MemberStep) {
        let host = Host::Member(member);
        let (at, life) = (self.env.in_time(host, delay), self.env.host(host).life);
        self.env.queue.push(at, Action::Member { member, life, what });
    }

    pub(crate) fn member_step(&mut self, member: usize, life: u64, what: MemberStep) {
        if !self.is_life(member, life) {
            return;
        }
        match what {
            MemberStep::Timeout(call) => {
                let Some(pending) = self.member(member).talk.calls.remove(&call) else { return };
                let line = pending.line;
                self.store_failed(member, &pending.of);
                // Keep-alives have detected by now that the other end is gone; watches end with the
                // connection.
                if self.is_life(member, life) && !self.env.far_lives(line) {
                    self.member_line_lost(member, line);
                }
            }
            MemberStep::Lease { id, check } => {
                let lease = self.member(member).lease.as_ref();
                if lease.is_some_and(|lease| lease.id == id && lease.checks == check) {
                    self.check_lease(member, id);
                }
            }
            MemberStep::Join { attempt } => self.join(member, JoinInput::WaitOver(attempt)),
            MemberStep::FollowRecords(of) => self.follow_records(member, of, RecordCall::first()),
            MemberStep::Rebalance => self.rebalance(member),
            MemberStep::Identity => self.follow_identity(member, IdentityCall::Read(Duration::ZERO)),
            MemberStep::DropAbsent => {
                self.member(member).drop_absent();
                self.audit_directory(member);
            }
            MemberStep::Expire => self.expire(member),
            MemberStep::NotifyNodes => self.notify_nodes(member),
            MemberStep::Own => self.set_owned_slots(member),
        }
    }

    // ---- calls to the store -------------------------------------------------------------------------------

    fn ask_store(&mut self, member: usize, of: Purpose, request: StoreRequest) {
        let host = Host::Member(member);
        let known = self.member(member).talk.line;
        let line = known.unwrap_or_else(|| self.env.open_line(host, Host::Store));
        let at = self.env.time(host);
        let talk = &mut self.member(member).talk;
        talk.line = Some(line);
        let call = CallId(talk.begun);
        talk.begun += 1;
        let time = match &of {
            // Not later than the end of the lease.
            Purpose::KeepAlive(_) => TIME_TO_LIVE,
            _ => STORE_TIMEOUT,
        };
        talk.calls.insert(call, StoreCall { of, line, at });
        self.env.send(line, 1, Message::StoreRequest { call, request });
        self.member_later(member, time, MemberStep::Timeout(call));
    }

    /// Reports whether this process of a member still runs.
    fn is_life(&self, member: usize, life: u64) -> bool {
        let place = self.env.host(Host::Member(member));
        place.runs && place.life == life
    }

    pub(crate) fn member_line_lost(&mut self, member: usize, line: LineId) {
        let host = self.member(member);
        host.talk.line = host.talk.line.filter(|known| *known != line);
        host.followers.retain(|(of, _)| *of != line);
        let mut lost = take_where(&mut host.talk.calls, |pending| pending.line == line);
        lost.extend(take_where(&mut host.talk.watches, |pending| pending.line == line));
        let life = self.env.host(Host::Member(member)).life;
        for (_, pending) in lost {
            // The first of them may have ended the process.
            if self.is_life(member, life) {
                self.store_failed(member, &pending.of);
            }
        }
    }

    fn store_failed(&mut self, member: usize, of: &Purpose) {
        match *of {
            Purpose::Identity
            | Purpose::IdentityOf(_)
            | Purpose::CreateIdentity
            | Purpose::Records
            | Purpose::ModesAtStart => self.end_member(member),
            Purpose::IdentityRange | Purpose::IdentityWatch(_) => {
                self.follow_identity(member, IdentityCall::after(IdentityAnswer::Failed));
            }
            Purpose::Grant | Purpose::Put | Purpose::PutRefused => self.join(member, JoinInput::Failed),
            Purpose::KeepAlive(id) => self.keep_alive_failed(member, id),
            Purpose::Follow(of) | Purpose::Watch(of) => {
                self.follow_records(member, of, RecordCall::after(WatchEnd::Failed));
            }
            // The operator gets an error, and may try again.
            Purpose::Revoke
            | Purpose::SetBudget
            | Purpose::ModeBefore(_)
            | Purpose::ModePut(_)
            | Purpose::ModeOfStore(_) => {}
            Purpose::Registered(ref of) | Purpose::Register(ref of, _) | Purpose::IsOfStore(ref of) => {
                self.refuse(of);
            }
        }
    }

    /// Handles an answer of the store, or an update of a watch.
    pub(crate) fn on_store_reply(&mut self, member: usize, call: CallId, reply: StoreReply) {
        let talk = &mut self.member(member).talk;
        if let StoreReply::Changes { revision, changes } = reply {
            if let Some(pending) = talk.watches.get(&call) {
                match pending.of {
                    Purpose::Watch(of) => {
                        self.apply_records(member, of, revision, Records::Changes(&changes));
                    }
                    Purpose::IdentityWatch(_) => {
                        self.follow_identity(member, IdentityCall::after(IdentityAnswer::Changed));
                    }
                    ref of => unreachable!("unexpected watch: {of:?}"),
                }
            }
            return;
        }
        if let StoreReply::Watching = reply {
            // An established watch has no timeout.
            let Some(pending) = talk.calls.remove(&call) else { return };
            let of = pending.of.clone();
            talk.watches.insert(call, pending);
            if let Purpose::IdentityWatch(revision) = of {
                self.member(member).joining.seen = revision;
            }
            return;
        }
        let Some(StoreCall { of, at, .. }) = talk.calls.remove(&call) else { return };
        self.apply_store_reply(member, of, at, reply);
    }

    fn apply_store_reply(&mut self, member: usize, of: Purpose, requested_at: Tick, reply: StoreReply) {
        match (of, reply) {
            (Purpose::Identity, StoreReply::Entries(entries)) => match number_of(&entries[0]) {
                Some(number) => {
                    let key = Key::IdentityOf(number);
                    self.ask_store(member, Purpose::IdentityOf(number), StoreRequest::Get(vec![key]));
                }
                None => self.create_identity(member),
            },
            (Purpose::CreateIdentity, StoreReply::Transacted(_)) => {
                self.ask_store(member, Purpose::Identity, StoreRequest::Get(vec![Key::Identity]));
            }
            (Purpose::IdentityOf(number), StoreReply::Entries(entries)) => match &entries[0] {
                Some(entry) => {
                    let identity = Identity { number, revision: entry.modified };
                    let joining = &mut self.member(member).joining;
                    (joining.identity, joining.seen) = (Some(identity), entry.modified);
                    self.ask_store(member, Purpose::Records, StoreRequest::Range(Prefix::Nodes));
                }
                None => self.end_member(member),
            },
            (Purpose::Records, StoreReply::Range { revision, entries }) => {
                self.load_node_records(member, revision, &entries);
            }
            (Purpose::ModesAtStart, StoreReply::Range { entries, .. }) => {
                self.apply_records(member, RecordKind::Modes, 0, Records::All(&entries));
                self.begin_serving(member);
            }
            (Purpose::ModeBefore(order), StoreReply::Entries(entries)) => {
                self.mode_read(member, order, &entries[0]);
            }
            (Purpose::ModePut(order), StoreReply::Transacted(result)) => self.mode_put(member, order, result),
            (Purpose::ModeOfStore(order), StoreReply::Entries(entries)) => {
                self.set_mode_again(member, order, &entries[0]);
            }
            (Purpose::Grant, StoreReply::Granted(id)) => self.granted_lease(member, id, requested_at),
            (Purpose::Put, StoreReply::Transacted(result)) => self.put(member, result),
            (Purpose::PutRefused, StoreReply::Entries(entries)) => {
                self.put_refused(member, &entries[0]);
            }
            (Purpose::KeepAlive(id), StoreReply::Kept { lives }) => {
                self.kept_alive(member, id, requested_at, lives);
            }
            (Purpose::Revoke, StoreReply::Revoked) => {}
            (Purpose::IdentityRange, StoreReply::Range { revision, entries }) => {
                self.identity_read(member, revision, &entries);
            }
            (Purpose::IdentityWatch(revision), StoreReply::Compacted) => {
                self.member(member).joining.seen = revision;
                self.follow_identity(member, IdentityCall::after(IdentityAnswer::Failed));
            }
            (Purpose::Registered(of), StoreReply::Entries(entries)) => {
                self.register_in_store(member, of, &entries);
            }
            (Purpose::Register(of, registration), StoreReply::Transacted(result)) => {
                self.node_written(member, (of, *registration), result);
            }
            (Purpose::IsOfStore(of), StoreReply::Entries(entries)) => {
                self.register_again(member, of, &entries[0]);
            }
            (Purpose::Follow(of), StoreReply::Range { revision, entries }) => {
                self.apply_records(member, of, revision, Records::All(&entries));
                self.follow_records(member, of, RecordCall::after_list(revision));
            }
            (Purpose::Watch(of), StoreReply::Compacted) => self.records_compacted(member, of),
            (Purpose::SetBudget, StoreReply::Transacted(_)) => {}
            (of, reply) => unreachable!("unexpected answer to {of:?}: {reply:?}"),
        }
    }

    // ---- start --------------------------------------------------------------------------------------------

    fn create_identity(&mut self, member: usize) {
        let number = (self.env.rng.next() >> 33) as u32;
        let write = |key, value| Write { key, value, lease: None };
        let writes =
            vec![write(Key::Identity, Value::Number(number)), write(Key::IdentityOf(number), Value::Nothing)];
        let conditions = vec![Condition::Absent(Key::Identity)];
        self.ask_store(member, Purpose::CreateIdentity, StoreRequest::Transact { conditions, writes });
    }

    /// Returns the number of the store that a member knows.
    pub(crate) fn identity_number(&self, member: usize) -> u32 {
        let member = self.members[member].as_ref().expect("the member runs");
        member.joining.identity.expect("read before anything else").number
    }

    fn identity(&mut self, member: usize) -> Identity {
        self.member(member).joining.identity.expect("read before anything else")
    }

    fn load_node_records(&mut self, member: usize, revision: Revision, records: &[(Key, Entry)]) {
        let records = records.iter().map(|(_, entry)| node_record(entry)).collect();
        self.member(member).restore(records, revision);
        self.ask_store(member, Purpose::ModesAtStart, StoreRequest::Range(Prefix::Modes));
    }

    /// Starts serving after the initial state was read.
    fn begin_serving(&mut self, member: usize) {
        self.member(member).joining.serving = true;
        self.member_later(member, BEAT_EVERY, MemberStep::Expire);
        self.member_later(member, EXPECTED_FOR, MemberStep::DropAbsent);
        for of in [RecordKind::Members, RecordKind::Nodes, RecordKind::Tenants, RecordKind::Modes] {
            self.follow_records(member, of, RecordCall::first());
        }
        self.rebalance(member);
        self.begin_joining(member);
        self.follow_identity(member, IdentityCall::Read(Duration::ZERO));
    }
}

fn number_of(entry: &Option<Entry>) -> Option<u32> {
    match entry.as_ref()?.value {
        Value::Number(number) => Some(number),
        _ => None,
    }
}
