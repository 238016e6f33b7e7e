//! A member's entry in the list of members, and the lease to which it is bound.
//!
//! The production state machines decide ([`Joining`], [`LeaseSchedule`]). Here are the calls to the store, and their
//! delays. Not reproduced: a list with the maximum number of members.
//!
//! The outputs are carried out in the order of `controlplane/src/shards.rs`.

use reprise_controlplane_core::joining::{JoinInput, JoinOutput, JoinRefusal, Joining, ListedName};
use reprise_controlplane_core::record_watch::STORE_RETRY_AFTER;
use reprise_policy::Tick;
use reprise_policy::lease_schedule::{LeaseEnd, LeaseInput, LeaseSchedule, LeaseStep};

use super::MemberStep;
use super::store_connection::Purpose;
use crate::environment::Environment;
use crate::member::{Member, MemberLease};
use crate::messages::StoreRequest;
use crate::names::member_name;
use crate::network::Host;
use crate::setup::{TIME_TO_LIVE, Variant};
use crate::store::{Condition, Entry, Key, LeaseId, Revision, TransactionError, Value, Write};

impl Member {
    // ---- entry --------------------------------------------------------------------------------------------

    pub(super) fn begin_joining(&mut self, env: &mut Environment) {
        let (joining, first) = Joining::begin();
        self.joining.entry = Some(joining);
        self.carry_out_join(env, first);
    }

    /// Gives an input to the registration of a member, and carries out its outputs.
    pub(super) fn join(&mut self, env: &mut Environment, input: JoinInput<LeaseId>) {
        let Some(joining) = &mut self.joining.entry else { return };
        joining.on(input).into_iter().for_each(|output| self.carry_out_join(env, output));
    }

    fn carry_out_join(&mut self, env: &mut Environment, output: JoinOutput<LeaseId>) {
        match output {
            JoinOutput::Grant => self.talk.ask(env, Purpose::Grant, StoreRequest::Grant(TIME_TO_LIVE)),
            JoinOutput::CreateEntry(id) => {
                let key = Key::Member(self.name);
                let conditions = vec![self.talk.same_store(), Condition::Absent(key)];
                let writes = vec![Write { key, value: Value::Nothing, lease: Some(id) }];
                self.talk.ask(env, Purpose::Put, StoreRequest::Transact { conditions, writes });
            }
            JoinOutput::Revoke(id) => {
                self.lease = self.lease.filter(|lease| lease.id != id);
                self.talk.ask(env, Purpose::Revoke, StoreRequest::Revoke(id));
            }
            JoinOutput::Incarnation(incarnation) => {
                if incarnation.is_some() {
                    env.count("members registered");
                }
                self.place_changed(env);
            }
            JoinOutput::Wait(attempt, time) | JoinOutput::WaitForName(attempt, time) => {
                env.member_later(self.name, time, MemberStep::Join { attempt });
            }
        }
    }

    pub(super) fn put(&mut self, env: &mut Environment, result: Result<Revision, TransactionError>) {
        match result {
            Ok(revision) => self.join(env, JoinInput::Created(revision)),
            Err(TransactionError::Conflict) => self.talk.compare_store(env, Purpose::PutRefused),
            Err(TransactionError::LeaseGone) => self.join(env, JoinInput::Failed),
        }
    }

    /// Handles a rejected entry: the name is taken, or the store was replaced.
    pub(super) fn put_refused(&mut self, env: &mut Environment, identity: &Option<Entry>) {
        let name = || ListedName::of(self.list.view(), &member_name(self.name));
        let refusal = JoinRefusal::after_conflict(self.talk.compared(identity), name);
        env.count(match refusal {
            JoinRefusal::NameTaken(_) => "member names taken",
            JoinRefusal::OtherStore | JoinRefusal::Full => "members of a store that was replaced",
        });
        self.join(env, JoinInput::Refused(refusal));
    }

    // ---- lease --------------------------------------------------------------------------------------------

    pub(super) fn granted_lease(&mut self, env: &mut Environment, id: LeaseId, requested_at: Tick) {
        let answered = env.time(Host::Member(self.name));
        let counted_from = match env.setup.variant {
            Variant::LeaseFromAnswer => answered,
            _ => requested_at,
        };
        self.lease =
            Some(MemberLease { id, schedule: LeaseSchedule::new(TIME_TO_LIVE, counted_from), checks: 0 });
        self.join(env, JoinInput::Granted(id, TIME_TO_LIVE));
        self.advance_lease(env, id, LeaseInput::Due);
    }

    /// Runs a scheduled check of the lease, unless a later one was scheduled.
    pub(super) fn lease_due(&mut self, env: &mut Environment, id: LeaseId, check: u64) {
        if self.lease.is_some_and(|lease| lease.id == id && lease.checks == check) {
            self.advance_lease(env, id, LeaseInput::Due);
        }
    }

    /// Gives an input to the schedule of the lease, and carries out its next action.
    fn advance_lease(&mut self, env: &mut Environment, id: LeaseId, input: LeaseInput) {
        let now = env.time(Host::Member(self.name));
        let Some(lease) = self.lease.as_mut().filter(|lease| lease.id == id) else { return };
        match lease.schedule.on(now, input) {
            LeaseStep::Wait(until) => {
                lease.checks += 1;
                let check = lease.checks;
                env.member_later(self.name, until.since(now), MemberStep::Lease { id, check });
            }
            LeaseStep::KeepAlive => {
                self.talk.ask(env, Purpose::KeepAlive(id), StoreRequest::KeepAlive(id));
                // Meanwhile the deadline may come.
                self.advance_lease(env, id, LeaseInput::Due);
            }
            LeaseStep::GiveUp(LeaseEnd::Unconfirmed) if env.setup.variant == Variant::AnswersAfterLease => {
                self.keep_alive_after_deadline(env, id, input);
            }
            LeaseStep::GiveUp(end) => {
                env.count(match end {
                    LeaseEnd::Unconfirmed => "leases unconfirmed",
                    LeaseEnd::Ended => "leases gone",
                });
                self.lose_lease(env, id);
            }
        }
    }

    /// An injected flaw: continues with keep-alives after the deadline.
    fn keep_alive_after_deadline(&mut self, env: &mut Environment, id: LeaseId, input: LeaseInput) {
        let Some(lease) = self.lease.as_mut() else { return };
        if input == LeaseInput::Failed {
            lease.checks += 1;
            let check = lease.checks;
            return env.member_later(self.name, STORE_RETRY_AFTER, MemberStep::Lease { id, check });
        }
        if !lease.schedule.is_asking() {
            self.talk.ask(env, Purpose::KeepAlive(id), StoreRequest::KeepAlive(id));
        }
    }

    pub(super) fn kept_alive(&mut self, env: &mut Environment, id: LeaseId, requested_at: Tick, lives: bool) {
        let from = match env.setup.variant {
            Variant::LeaseFromAnswer => env.time(Host::Member(self.name)),
            _ => requested_at,
        };
        let input = if lives { LeaseInput::Confirmed(from) } else { LeaseInput::Ended };
        self.advance_lease(env, id, input);
    }

    pub(super) fn keep_alive_failed(&mut self, env: &mut Environment, id: LeaseId) {
        self.advance_lease(env, id, LeaseInput::Failed);
    }

    fn lose_lease(&mut self, env: &mut Environment, id: LeaseId) {
        self.lease = None;
        self.join(env, JoinInput::LeaseLost(id));
    }
}
