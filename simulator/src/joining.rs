//! A member and the store: how it starts, follows the members, holds its lease, notices another store, and registers nodes.
//!
//! ```text
//!   start ── identity ──► records, modes ──► serving:  follow members, modes │ hold a lease and an entry │ watch the identity
//!     └── the store does not answer: the process ends, and the next one begins
//! ```
//!
//! The order of questions is that of the binary: `controlplane/src/identity.rs` (start, watch), `registry.rs` (register),
//! `shards.rs` (follow, hold), `followed.rs`, `tenants.rs`, `modes.rs` (records), `server.rs` (start, end). A process that ends is
//! started again, as Kubernetes does.
//! Left out: concurrent reads of two keys are one question; node numbers never run out.

mod followed;
mod membership;
mod modes;
mod registry;

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_controlplane_core::NodeRecord;
use reprise_policy::Tick;

use crate::faults::Repair;
use crate::member::Member;
use crate::messages::{CallId, Message, Question, Told};
use crate::network::{Host, LineId};
use crate::setup::{BEAT_EVERY, EXPECTED_FOR, STORE_RETRY_AFTER, STORE_TIMEOUT, TIME_TO_LIVE, Variant};
use crate::store::{Condition, Entry, Key, LeaseId, Prefix, Revision, Value, Write};
use crate::world::{Action, World, take_where};
use followed::Followed;
use modes::ModeOrder;
use registry::Applicant;

/// Calls to the store, and the connection to it.
#[derive(Debug, Default)]
pub(crate) struct Talk {
    line: Option<LineId>,
    calls: BTreeMap<CallId, Asked>,
    /// Watches that stand.
    watches: BTreeMap<CallId, Asked>,
    begun: u64,
}

/// How far a member is.
#[derive(Debug, Default)]
pub(crate) struct Joining {
    /// It has read what it needs, and serves.
    pub(crate) serving: bool,
    identity: Option<Identity>,
    /// Revision of the store when its identity was last looked at.
    seen: Revision,
    /// Counts the attempts to join: what belongs to an older one is passed over.
    attempt: u64,
    /// Its name is taken: it waits until that is free, or its time is over.
    waits: bool,
    /// What the watch has told so far.
    listed: BTreeMap<usize, Revision>,
}

/// Which store it is.
#[derive(Clone, Copy, Debug)]
struct Identity {
    number: u32,
    revision: Revision,
}

/// A question without an answer.
#[derive(Debug)]
struct Asked {
    of: Purpose,
    line: LineId,
    /// By the member's clock.
    at: Tick,
}

#[derive(Clone, Debug)]
enum Purpose {
    Identity,
    IdentityOf(u32),
    CreateIdentity,
    Records,
    FollowRange,
    FollowWatch,
    Grant,
    Put(LeaseId),
    PutRefused(LeaseId),
    KeepAlive(LeaseId),
    Revoke,
    IdentityRange,
    IdentityWatch(Revision),
    Registered(Applicant),
    Register(Applicant, Box<NodeRecord>),
    IsOfStore(Applicant),
    ModesAtStart,
    ModeBefore(ModeOrder),
    ModePut(ModeOrder),
    Follow(Followed),
    Watch(Followed),
    SetBudget,
}

/// Something within a member's process.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MemberStep {
    /// A question to the store has had its time.
    Timeout(CallId),
    /// Time to look at the lease.
    Lease { id: LeaseId, look: u64 },
    /// Time to try to register.
    Join { attempt: u64 },
    /// Time to follow the members again.
    Follow,
    /// Time to follow records again.
    FollowRecords(Followed),
    /// Ledgers are brought in line, and bytes moved.
    Rebalance,
    /// Time to look at the store's identity again.
    Identity,
    /// Nodes that have not come are waited for no longer.
    GiveUpAbsent,
    /// Silent nodes are looked for.
    Expire,
    /// Followers are told of nodes.
    TellNodes,
    /// The directory's slots become those of its place.
    Own,
}

impl MemberStep {
    /// For the digest of the trace.
    pub(crate) fn code(&self) -> u64 {
        match self {
            MemberStep::Timeout(call) => 1 + (call.0 << 8),
            MemberStep::Lease { id, look } => 2 + (id.0 << 8) + (look << 32),
            MemberStep::Join { attempt } => 3 + (attempt << 8),
            MemberStep::Follow => 4,
            MemberStep::Identity => 5,
            MemberStep::GiveUpAbsent => 6,
            MemberStep::Expire => 7,
            MemberStep::TellNodes => 8,
            MemberStep::Own => 9,
            MemberStep::FollowRecords(of) => 10 + ((*of as u64) << 8),
            MemberStep::Rebalance => 11,
        }
    }
}

impl World {
    pub(crate) fn serves(&self, member: usize) -> bool {
        self.members[member].as_ref().is_some_and(|member| member.joining.serving)
    }

    pub(crate) fn member(&mut self, member: usize) -> &mut Member {
        self.members[member].as_mut().expect("only a running member is asked")
    }

    pub(crate) fn start_member(&mut self, member: usize) {
        self.begin_process(Host::Member(member));
        let begun = self.time(Host::Member(member));
        self.members[member] = Some(Member::new(member, begun, self.setup.variant));
        self.ask_store(member, Purpose::Identity, Question::Get(vec![Key::Identity]));
    }

    /// The process ends: its memory is gone.
    pub(crate) fn kill_member(&mut self, member: usize) {
        self.break_lines(Host::Member(member));
        self.end_process(Host::Member(member));
        self.members[member] = None;
    }

    /// A member cannot go on; its next process begins after a while.
    fn end_member(&mut self, member: usize) {
        self.trace.note(|| format!("member {member} ends"));
        self.kill_member(member);
        let delay = self.rng.millis(300..900);
        self.after(delay, Action::Repair(Repair::StartMember(member)));
    }

    pub(crate) fn member_later(&mut self, member: usize, delay: Duration, what: MemberStep) {
        let host = Host::Member(member);
        let (at, life) = (self.in_time(host, delay), self.place(host).life);
        self.queue.push(at, Action::Member { member, life, what });
    }

    pub(crate) fn member_step(&mut self, member: usize, life: u64, what: MemberStep) {
        if !self.is_life(member, life) {
            return;
        }
        match what {
            MemberStep::Timeout(call) => {
                let Some(asked) = self.member(member).talk.calls.remove(&call) else { return };
                let line = asked.line;
                self.store_failed(member, &asked.of);
                // Keep-alives have found by now that nobody is there; watches end with the connection.
                if self.is_life(member, life) && !self.far_lives(line) {
                    self.member_line_lost(member, line);
                }
            }
            MemberStep::Lease { id, look } => {
                let lease = self.member(member).lease.as_ref();
                if lease.is_some_and(|lease| lease.id == id && lease.looks == look) {
                    self.look_at_lease(member, id);
                }
            }
            MemberStep::Join { attempt } if attempt == self.member(member).joining.attempt => {
                self.join(member);
            }
            MemberStep::Join { .. } => {}
            MemberStep::Follow => {
                self.ask_store(member, Purpose::FollowRange, Question::Range(Prefix::Members));
            }
            MemberStep::FollowRecords(of) => self.follow_records(member, of),
            MemberStep::Rebalance => self.rebalance(member),
            MemberStep::Identity => self.look_at_identity(member),
            MemberStep::GiveUpAbsent => {
                self.member(member).give_up_absent();
                self.audit_directory(member);
            }
            MemberStep::Expire => self.expire(member),
            MemberStep::TellNodes => self.tell_nodes(member),
            MemberStep::Own => self.own(member),
        }
    }

    // ---- questions ---------------------------------------------------------------------------------------------

    fn ask_store(&mut self, member: usize, of: Purpose, question: Question) {
        let host = Host::Member(member);
        let known = self.member(member).talk.line;
        let line = known.unwrap_or_else(|| self.open_line(host, Host::Store));
        let at = self.time(host);
        let talk = &mut self.member(member).talk;
        talk.line = Some(line);
        let call = CallId(talk.begun);
        talk.begun += 1;
        let time = match &of {
            // No later than the lease itself.
            Purpose::KeepAlive(_) => TIME_TO_LIVE,
            _ => STORE_TIMEOUT,
        };
        talk.calls.insert(call, Asked { of, line, at });
        self.send(line, 1, Message::Ask { call, question });
        self.member_later(member, time, MemberStep::Timeout(call));
    }

    /// Whether this process of a member still runs.
    fn is_life(&self, member: usize, life: u64) -> bool {
        let place = self.place(Host::Member(member));
        place.runs && place.life == life
    }

    pub(crate) fn member_line_lost(&mut self, member: usize, line: LineId) {
        let host = self.member(member);
        host.talk.line = host.talk.line.filter(|known| *known != line);
        host.followers.retain(|(of, _)| *of != line);
        let mut lost = take_where(&mut host.talk.calls, |asked| asked.line == line);
        lost.extend(take_where(&mut host.talk.watches, |asked| asked.line == line));
        let life = self.place(Host::Member(member)).life;
        for (_, asked) in lost {
            // The first of them may have ended the process.
            if self.is_life(member, life) {
                self.store_failed(member, &asked.of);
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
            Purpose::FollowRange | Purpose::FollowWatch => {
                self.member_later(member, STORE_RETRY_AFTER, MemberStep::Follow);
            }
            Purpose::IdentityRange | Purpose::IdentityWatch(_) => {
                self.member_later(member, STORE_RETRY_AFTER, MemberStep::Identity);
            }
            Purpose::Grant => self.join_later(member, STORE_RETRY_AFTER),
            Purpose::Put(lease) | Purpose::PutRefused(lease) => {
                self.give_back(member, lease);
                self.join_later(member, STORE_RETRY_AFTER);
            }
            Purpose::KeepAlive(id) => {
                let goes_on = self.setup.variant == Variant::AnswersAfterLease;
                let now = self.time(Host::Member(member));
                if let Some(lease) = self.member(member).lease.as_mut().filter(|lease| lease.id == id) {
                    lease.failed(now);
                    if now < lease.until || !goes_on {
                        return self.look_at_lease(member, id);
                    }
                    lease.looks += 1;
                    let look = lease.looks;
                    self.member_later(member, STORE_RETRY_AFTER, MemberStep::Lease { id, look });
                }
            }
            Purpose::Follow(of) | Purpose::Watch(of) => {
                self.member_later(member, STORE_RETRY_AFTER, MemberStep::FollowRecords(of));
            }
            // The operator is told, and asks again when that is still wanted.
            Purpose::Revoke | Purpose::SetBudget | Purpose::ModeBefore(_) | Purpose::ModePut(_) => {}
            Purpose::Registered(of) | Purpose::Register(of, _) | Purpose::IsOfStore(of) => {
                self.refuse(of);
            }
        }
    }

    /// The store has answered, or a watch says something.
    pub(crate) fn on_told(&mut self, member: usize, call: CallId, told: Told) {
        let talk = &mut self.member(member).talk;
        if let Told::Changes { revision, changes } = told {
            if let Some(asked) = talk.watches.get(&call) {
                let of = asked.of.clone();
                self.on_changes(member, &of, revision, &changes);
            }
            return;
        }
        if let Told::Watching = told {
            // It stands: from now on it has no time to run out of.
            let Some(asked) = talk.calls.remove(&call) else { return };
            let of = asked.of.clone();
            talk.watches.insert(call, asked);
            if let Purpose::IdentityWatch(revision) = of {
                self.member(member).joining.seen = revision;
            }
            return;
        }
        let Some(Asked { of, at, .. }) = talk.calls.remove(&call) else { return };
        self.on_store_answer(member, of, at, told);
    }

    fn on_store_answer(&mut self, member: usize, of: Purpose, asked: Tick, told: Told) {
        match (of, told) {
            (Purpose::Identity, Told::Entries(entries)) => match number_of(&entries[0]) {
                Some(number) => {
                    let key = Key::IdentityOf(number);
                    self.ask_store(member, Purpose::IdentityOf(number), Question::Get(vec![key]));
                }
                None => self.create_identity(member),
            },
            (Purpose::CreateIdentity, Told::Transacted(_)) => {
                self.ask_store(member, Purpose::Identity, Question::Get(vec![Key::Identity]));
            }
            (Purpose::IdentityOf(number), Told::Entries(entries)) => match &entries[0] {
                Some(entry) => {
                    let identity = Identity { number, revision: entry.modified };
                    let joining = &mut self.member(member).joining;
                    (joining.identity, joining.seen) = (Some(identity), entry.modified);
                    self.ask_store(member, Purpose::Records, Question::Range(Prefix::Nodes));
                }
                None => self.end_member(member),
            },
            (Purpose::Records, Told::Range { entries, .. }) => self.know_nodes(member, &entries),
            (Purpose::ModesAtStart, Told::Range { entries, .. }) => {
                entries.iter().for_each(|(key, entry)| self.record_put(member, *key, entry));
                self.begin_serving(member);
            }
            (Purpose::ModeBefore(order), Told::Entries(entries)) => {
                self.mode_read(member, order, &entries[0]);
            }
            (Purpose::ModePut(order), Told::Transacted(result)) => self.mode_put(member, order, result),
            (Purpose::FollowRange, Told::Range { revision, entries }) => {
                self.members_listed(member, revision, &entries);
            }
            // What has happened is not known any more: the range is read again, at once.
            (Purpose::FollowWatch, Told::Compacted) => self.follow_again(member),
            (Purpose::Grant, Told::Granted(id)) => self.granted_lease(member, id, asked),
            (Purpose::Put(id), Told::Transacted(result)) => self.put(member, id, result),
            (Purpose::PutRefused(id), Told::Entries(entries)) => self.put_refused(member, id, &entries[0]),
            (Purpose::KeepAlive(id), Told::Kept { lives }) => self.kept_alive(member, id, asked, lives),
            (Purpose::Revoke, Told::Revoked) => {}
            (Purpose::IdentityRange, Told::Range { revision, entries }) => {
                self.identity_read(member, revision, &entries);
            }
            (Purpose::IdentityWatch(revision), Told::Compacted) => {
                self.member(member).joining.seen = revision;
                self.member_later(member, STORE_RETRY_AFTER, MemberStep::Identity);
            }
            (Purpose::Registered(of), Told::Entries(entries)) => self.register_in_store(member, of, &entries),
            (Purpose::Register(of, record), Told::Transacted(result)) => match result {
                Ok(_) => self.registered(member, *record, of.from()),
                Err(_) => self.look_whether_same(member, of),
            },
            (Purpose::IsOfStore(of), Told::Entries(entries)) => self.register_again(member, of, &entries[0]),
            (Purpose::Follow(of), Told::Range { revision, entries }) => {
                self.records_listed(member, of, revision, &entries);
            }
            (Purpose::Watch(of), Told::Compacted) => self.follow_records(member, of),
            (Purpose::SetBudget, Told::Transacted(_)) => {}
            (of, told) => unreachable!("{told:?} is no answer to {of:?}"),
        }
    }

    // ---- start -------------------------------------------------------------------------------------------------

    fn create_identity(&mut self, member: usize) {
        let number = (self.rng.next() >> 33) as u32;
        let write = |key, value| Write { key, value, lease: None };
        let writes =
            vec![write(Key::Identity, Value::Number(number)), write(Key::IdentityOf(number), Value::Nothing)];
        let conditions = vec![Condition::Absent(Key::Identity)];
        self.ask_store(member, Purpose::CreateIdentity, Question::Transact { conditions, writes });
    }

    /// The number of the store that a member knows.
    pub(crate) fn identity_number(&self, member: usize) -> u32 {
        let member = self.members[member].as_ref().expect("it runs");
        member.joining.identity.expect("read before anything else").number
    }

    fn identity(&mut self, member: usize) -> Identity {
        self.member(member).joining.identity.expect("read before anything else")
    }

    fn know_nodes(&mut self, member: usize, records: &[(Key, Entry)]) {
        let record = |(_, entry): &(Key, Entry)| match &entry.value {
            Value::Node(record) => NodeRecord::clone(record),
            other => unreachable!("{other:?} is no record of a node"),
        };
        self.member(member).restore(records.iter().map(record).collect());
        self.ask_store(member, Purpose::ModesAtStart, Question::Range(Prefix::Modes));
    }

    /// It has read what it needs.
    fn begin_serving(&mut self, member: usize) {
        self.member(member).joining.serving = true;
        self.member_later(member, BEAT_EVERY, MemberStep::Expire);
        self.member_later(member, EXPECTED_FOR, MemberStep::GiveUpAbsent);
        self.ask_store(member, Purpose::FollowRange, Question::Range(Prefix::Members));
        self.follow_records(member, Followed::Nodes);
        self.follow_records(member, Followed::Tenants);
        self.follow_records(member, Followed::Modes);
        self.rebalance(member);
        self.join(member);
        self.look_at_identity(member);
    }

    // ---- the store is another ----------------------------------------------------------------------------------

    fn look_at_identity(&mut self, member: usize) {
        let prefix = Prefix::IdentityOf(self.identity(member).number);
        self.ask_store(member, Purpose::IdentityRange, Question::Range(prefix));
    }

    fn identity_read(&mut self, member: usize, revision: Revision, entries: &[(Key, Entry)]) {
        let identity = self.identity(member);
        let same = entries.first().is_some_and(|(_, entry)| entry.modified == identity.revision);
        if !same || revision < self.member(member).joining.seen {
            self.count("stores found replaced");
            return self.end_member(member);
        }
        let prefix = Prefix::IdentityOf(identity.number);
        let watch = Question::Watch { prefix, from: revision + 1 };
        self.ask_store(member, Purpose::IdentityWatch(revision), watch);
    }
}

fn number_of(entry: &Option<Entry>) -> Option<u32> {
    match entry.as_ref()?.value {
        Value::Number(number) => Some(number),
        _ => None,
    }
}
