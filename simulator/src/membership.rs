//! A member's process at the store: its start and end, and what follows each answer of the store.
//!
//! ```text
//!   start ── identity ──► nodes, modes ──► serving:  follow records │ hold a lease and an entry │ watch the identity
//!     └── the store does not answer: the process ends, and the next one begins
//! ```
//!
//! Production state machines decide about the identity (`identity.rs`), records (`store_watch.rs`), the entry
//! (`member_entry.rs`) and writes (`writes.rs`). A process that ends is restarted, as by Kubernetes.
//!
//! The outputs are carried out in the order of `controlplane/src/server.rs`.

mod identity;
mod member_entry;
mod store_connection;
mod store_watch;
mod values;
mod writes;

use std::time::Duration;

use reprise_controlplane_core::identity_search::{SearchInput, SearchStep};
use reprise_controlplane_core::joining::{JoinInput, Joining};
use reprise_controlplane_core::member_parts::EXPECTED_FOR;
use reprise_controlplane_core::record_watch::{IdentityAnswer, IdentityCall, RecordCall, WatchEnd};
use reprise_controlplane_core::store_writes::{ModeInput, RegistrationInput};
use reprise_controlplane_core::{ModeRecord, NodeRecord};
use reprise_policy::Tick;

use crate::control_plane::send_reply;
use crate::environment::Environment;
use crate::member::Member;
use crate::messages::{CallId, Reply, StoreReply, StoreRequest};
use crate::network::{Host, LineId};
use crate::observation::Observation;
use crate::random_faults::Repair;
use crate::simulation::Action;
use crate::store::{Entry, Key, LeaseId, Prefix, Revision};
use identity::Continuation;
pub(crate) use store_connection::StoreConnection;
use store_connection::{Purpose, StoreCall};
use store_watch::{RecordKind, Records};
use values::node_record;
use writes::Progress;
pub(crate) use writes::{ModeOrder, RegistrationAttempt};

/// Progress of a member's start and registration.
#[derive(Debug, Default)]
pub(crate) struct Membership {
    /// The member has read its initial state, and serves.
    pub(crate) serving: bool,
    /// The member's entry in the list of members; `None` before it serves.
    pub(crate) entry: Option<Joining<LeaseId>>,
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

impl Member {
    /// Starts a member's process.
    pub(crate) fn start(env: &mut Environment, name: usize) -> Member {
        env.begin_process(Host::Member(name));
        let begun = env.time(Host::Member(name));
        let mut member = Member::new(name, begun, env.setup.variant);
        member.talk.find_identity(env);
        member
    }

    /// Kills the process; its memory is lost with it.
    pub(crate) fn kill(&self, env: &mut Environment) {
        env.break_lines(Host::Member(self.name));
        env.end_process(Host::Member(self.name));
    }

    /// Ends a process that cannot continue; the next one starts after a while.
    fn end(&self, env: &mut Environment) {
        let name = self.name;
        env.trace.note(|| format!("member {name} ends"));
        self.kill(env);
        let delay = env.rng.millis(300..900);
        env.after(delay, Action::Repair(Repair::StartMember(name)));
    }

    fn end_unless(&self, env: &mut Environment, continuation: Continuation) {
        if continuation == Continuation::Ends {
            self.end(env);
        }
    }

    pub(crate) fn step(&mut self, env: &mut Environment, what: MemberStep) {
        match what {
            MemberStep::Timeout(call) => {
                let Some(StoreCall { of, line, .. }) = self.talk.end(call) else { return };
                self.store_failed(env, &of);
                // Keep-alives have detected by now that the other end is gone; watches end with the
                // connection.
                if env.runs(Host::Member(self.name)) && !env.far_lives(line) {
                    self.line_lost(env, line);
                }
            }
            MemberStep::Lease { id, check } => self.lease_due(env, id, check),
            MemberStep::Join { attempt } => self.join(env, JoinInput::WaitOver(attempt)),
            MemberStep::FollowRecords(of) => self.follow_records(env, of, RecordCall::first()),
            MemberStep::Rebalance => self.rebalance_due(env),
            MemberStep::Identity => self.follow_identity(env, IdentityCall::Read(Duration::ZERO)),
            MemberStep::DropAbsent => {
                self.drop_absent();
                env.observe(Observation::DirectoryChanged { member: self.name });
            }
            MemberStep::Expire => self.expiry_due(env),
            MemberStep::NotifyNodes => self.notify_nodes(env),
            MemberStep::Own => self.set_owned_slots(env),
        }
    }

    // ---- answers of the store -----------------------------------------------------------------------------

    pub(crate) fn line_lost(&mut self, env: &mut Environment, line: LineId) {
        self.followers.retain(|(of, _)| *of != line);
        for of in self.talk.lose(line) {
            // The first of them may have ended the process.
            if env.runs(Host::Member(self.name)) {
                self.store_failed(env, &of);
            }
        }
    }

    fn store_failed(&mut self, env: &mut Environment, of: &Purpose) {
        match *of {
            Purpose::IdentityName | Purpose::IdentityMarker | Purpose::CreateIdentity => {
                let step = self.talk.search(env, SearchInput::Failed);
                self.search_advanced(env, step);
            }
            Purpose::Records | Purpose::ModesAtStart => self.end(env),
            Purpose::IdentityRange | Purpose::IdentityWatch(_) => {
                self.follow_identity(env, IdentityCall::after(IdentityAnswer::Failed));
            }
            Purpose::Grant | Purpose::Put | Purpose::PutRefused => self.join(env, JoinInput::Failed),
            Purpose::KeepAlive(id) => self.keep_alive_failed(env, id),
            Purpose::Follow(of) | Purpose::Watch(of) => {
                self.follow_records(env, of, RecordCall::after(WatchEnd::Failed));
            }
            // The operator gets an error, and may try again.
            Purpose::Revoke
            | Purpose::SetBudget
            | Purpose::ModeBefore(_)
            | Purpose::ModePut(_)
            | Purpose::ModeOfStore(_) => {}
            Purpose::Registered(ref of) | Purpose::Register(ref of) | Purpose::IsOfStore(ref of) => {
                of.refuse(env);
            }
        }
    }

    /// Handles an answer of the store, or an update of a watch.
    pub(crate) fn on_store_reply(&mut self, env: &mut Environment, call: CallId, reply: StoreReply) {
        match reply {
            StoreReply::Changes { revision, changes } => match self.talk.watched(call) {
                Some(Purpose::Watch(of)) => {
                    self.apply_records(env, of, revision, Records::Changes(&changes));
                }
                Some(Purpose::IdentityWatch(_)) => {
                    self.follow_identity(env, IdentityCall::after(IdentityAnswer::Changed));
                }
                Some(of) => unreachable!("unexpected watch: {of:?}"),
                None => {}
            },
            StoreReply::Watching => {
                if let Some(Purpose::IdentityWatch(revision)) = self.talk.establish(call) {
                    self.talk.saw_identity(revision);
                }
            }
            reply => {
                if let Some(StoreCall { of, at, .. }) = self.talk.end(call) {
                    self.apply_store_reply(env, of, at, reply);
                }
            }
        }
    }

    fn apply_store_reply(
        &mut self,
        env: &mut Environment,
        of: Purpose,
        requested_at: Tick,
        reply: StoreReply,
    ) {
        match (of, reply) {
            (Purpose::IdentityName, StoreReply::Entries(entries)) => {
                let step = self.talk.name_read(env, &entries[0]);
                self.search_advanced(env, step);
            }
            (Purpose::IdentityMarker, StoreReply::Entries(entries)) => {
                let step = self.talk.marker_read(env, &entries[0]);
                self.search_advanced(env, step);
            }
            (Purpose::CreateIdentity, StoreReply::Transacted(_)) => {
                let step = self.talk.search(env, SearchInput::Created);
                self.search_advanced(env, step);
            }
            (Purpose::Records, StoreReply::Range { revision, entries }) => {
                self.load_node_records(env, revision, &entries);
            }
            (Purpose::ModesAtStart, StoreReply::Range { entries, .. }) => {
                self.apply_records(env, RecordKind::Modes, 0, Records::All(&entries));
                self.begin_serving(env);
            }
            (Purpose::Grant, StoreReply::Granted(id)) => self.granted_lease(env, id, requested_at),
            (Purpose::Put, StoreReply::Transacted(result)) => self.put(env, result),
            (Purpose::PutRefused, StoreReply::Entries(entries)) => self.put_refused(env, &entries[0]),
            (Purpose::KeepAlive(id), StoreReply::Kept { lives }) => {
                self.kept_alive(env, id, requested_at, lives);
            }
            (Purpose::Revoke, StoreReply::Revoked) => {}
            (Purpose::IdentityRange, StoreReply::Range { revision, entries }) => {
                let continuation = self.talk.identity_read(env, revision, &entries);
                self.end_unless(env, continuation);
            }
            (Purpose::IdentityWatch(revision), StoreReply::Compacted { .. }) => {
                self.talk.saw_identity(revision);
                self.follow_identity(env, IdentityCall::after(IdentityAnswer::Failed));
            }
            (Purpose::Follow(of), StoreReply::Range { revision, entries }) => {
                self.apply_records(env, of, revision, Records::All(&entries));
                self.follow_records(env, of, RecordCall::after_list(revision));
            }
            (Purpose::Watch(of), StoreReply::Compacted { revision }) => {
                self.records_compacted(env, of, revision);
            }
            (of, reply) => self.apply_write_reply(env, of, reply),
        }
    }

    /// Handles the answer to a call of a write.
    fn apply_write_reply(&mut self, env: &mut Environment, of: Purpose, reply: StoreReply) {
        match (of, reply) {
            (Purpose::Registered(of), StoreReply::Entries(entries)) => {
                let (from, talk) = (of.from(), &mut self.talk);
                let progress = of.on_read(env, talk, &entries);
                self.registration_advanced(env, from, progress);
            }
            (Purpose::Register(of), StoreReply::Transacted(result)) => {
                let input = result.map_or(RegistrationInput::Conflict, RegistrationInput::Committed);
                let from = of.from();
                let progress = of.on(env, &mut self.talk, input);
                self.registration_advanced(env, from, progress);
            }
            (Purpose::IsOfStore(of), StoreReply::Entries(entries)) => {
                let (from, input) = (of.from(), RegistrationInput::Compared(self.talk.compared(&entries[0])));
                let progress = of.on(env, &mut self.talk, input);
                self.registration_advanced(env, from, progress);
            }
            (Purpose::ModeBefore(order), StoreReply::Entries(entries)) => {
                let progress = order.on_read(env, &mut self.talk, &entries[0]);
                self.mode_advanced(order.node, progress);
            }
            (Purpose::ModePut(order), StoreReply::Transacted(result)) => {
                if result.is_ok() {
                    env.count("modes set");
                }
                let input = result.map_or(ModeInput::Conflict, ModeInput::Committed);
                let progress = order.on(env, &mut self.talk, input);
                self.mode_advanced(order.node, progress);
            }
            (Purpose::ModeOfStore(order), StoreReply::Entries(entries)) => {
                let input = ModeInput::Compared(self.talk.compared(&entries[0]));
                let progress = order.on(env, &mut self.talk, input);
                self.mode_advanced(order.node, progress);
            }
            (Purpose::SetBudget, StoreReply::Transacted(_)) => {}
            (of, reply) => unreachable!("unexpected answer to {of:?}: {reply:?}"),
        }
    }

    fn registration_advanced(
        &mut self,
        env: &mut Environment,
        from: (LineId, CallId),
        progress: Progress<NodeRecord>,
    ) {
        match progress {
            Progress::Waits => {}
            Progress::Done(record) => self.node_written(env, record, from),
            Progress::Rejected => send_reply(env, from, Reply::Unavailable),
            Progress::OtherStore => {
                send_reply(env, from, Reply::Unavailable);
                self.end(env);
            }
        }
    }

    /// The operator gets an error if the mode was not set.
    fn mode_advanced(&mut self, node: usize, progress: Progress<ModeRecord>) {
        if let Progress::Done(set) = progress {
            self.learn_mode(node, set);
        }
    }

    fn follow_identity(&mut self, env: &mut Environment, call: IdentityCall) {
        let continuation = self.talk.follow_identity(env, call);
        self.end_unless(env, continuation);
    }

    // ---- start --------------------------------------------------------------------------------------------

    fn search_advanced(&mut self, env: &mut Environment, step: SearchStep) {
        match step {
            SearchStep::ReadName | SearchStep::ReadMarker | SearchStep::Create => {}
            SearchStep::Found => self.talk.ask(env, Purpose::Records, StoreRequest::Range(Prefix::Nodes)),
            SearchStep::GiveUp => self.end(env),
        }
    }

    fn load_node_records(&mut self, env: &mut Environment, revision: Revision, records: &[(Key, Entry)]) {
        self.restore(records.iter().map(|(_, entry)| node_record(entry)).collect(), revision);
        self.talk.ask(env, Purpose::ModesAtStart, StoreRequest::Range(Prefix::Modes));
    }

    /// Starts serving after the initial state was read.
    fn begin_serving(&mut self, env: &mut Environment) {
        self.joining.serving = true;
        self.expiry_due(env);
        env.member_later(self.name, EXPECTED_FOR, MemberStep::DropAbsent);
        for of in [RecordKind::Members, RecordKind::Nodes, RecordKind::Tenants, RecordKind::Modes] {
            self.follow_records(env, of, RecordCall::first());
        }
        self.rebalance_due(env);
        self.begin_joining(env);
        self.follow_identity(env, IdentityCall::Read(Duration::ZERO));
    }
}
