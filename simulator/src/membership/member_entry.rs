//! A member's entry in the list of members, and the lease to which it is bound.
//!
//! The production state machines decide ([`Joining`], [`LeaseSchedule`]). Here are the calls to the store, and the
//! delays; they follow `controlplane/src/shards.rs` and `controlplane/store/src/lease_guard.rs`. Not reproduced: a list with the maximum number of members.

use reprise_controlplane_core::joining::{JoinInput, JoinOutput, JoinRefusal, Joining, ListedName};
use reprise_controlplane_core::record_watch::STORE_RETRY_AFTER;
use reprise_controlplane_core::store_writes::StoreIdentity;
use reprise_policy::Tick;
use reprise_policy::lease_schedule::{LeaseSchedule, LeaseStep};

use super::{MemberStep, Purpose};
use crate::member::{MemberLease, member_name};
use crate::messages::StoreRequest;
use crate::network::Host;
use crate::setup::{TIME_TO_LIVE, Variant};
use crate::simulation::Simulation;
use crate::store::{Condition, Entry, Key, LeaseId, Revision, TransactionError, Value, Write};

impl Simulation {
    // ---- entry --------------------------------------------------------------------------------------------

    pub(super) fn begin_joining(&mut self, member: usize) {
        let (joining, first) = Joining::begin();
        self.member(member).joining.entry = Some(joining);
        self.carry_out_join(member, first);
    }

    /// Gives an input to the registration of a member, and carries out its outputs.
    pub(super) fn join(&mut self, member: usize, input: JoinInput<LeaseId>) {
        let Some(joining) = &mut self.member(member).joining.entry else { return };
        joining.on(input).into_iter().for_each(|output| self.carry_out_join(member, output));
    }

    fn carry_out_join(&mut self, member: usize, output: JoinOutput<LeaseId>) {
        match output {
            JoinOutput::Grant => self.ask_store(member, Purpose::Grant, StoreRequest::Grant(TIME_TO_LIVE)),
            JoinOutput::CreateEntry(id) => {
                let key = Key::Member(self.member(member).name);
                let conditions = vec![self.same_store(member), Condition::Absent(key)];
                let writes = vec![Write { key, value: Value::Nothing, lease: Some(id) }];
                self.ask_store(member, Purpose::Put, StoreRequest::Transact { conditions, writes });
            }
            JoinOutput::Revoke(id) => {
                let running = self.member(member);
                running.lease = running.lease.filter(|lease| lease.id != id);
                self.ask_store(member, Purpose::Revoke, StoreRequest::Revoke(id));
            }
            JoinOutput::Incarnation(incarnation) => {
                if incarnation.is_some() {
                    self.env.count("members registered");
                }
                self.place_changed(member);
            }
            JoinOutput::Wait(attempt, time) | JoinOutput::WaitForName(attempt, time) => {
                self.member_later(member, time, MemberStep::Join { attempt });
            }
        }
    }

    pub(super) fn put(&mut self, member: usize, result: Result<Revision, TransactionError>) {
        match result {
            Ok(revision) => self.join(member, JoinInput::Created(revision)),
            Err(TransactionError::Conflict) => self.compare_store(member, Purpose::PutRefused),
            Err(TransactionError::LeaseGone) => self.join(member, JoinInput::Failed),
        }
    }

    /// Handles a rejected entry: the name is taken, or the store was replaced.
    pub(super) fn put_refused(&mut self, member: usize, identity: &Option<Entry>) {
        let running = self.member(member);
        let is_listed = running.list.view().find(&member_name(running.name)).is_some();
        let refusal = match self.compared(member, identity) {
            StoreIdentity::Other => JoinRefusal::OtherStore,
            StoreIdentity::Same if is_listed => JoinRefusal::NameTaken(ListedName::Listed),
            StoreIdentity::Same => JoinRefusal::NameTaken(ListedName::Free),
        };
        self.env.count(match refusal {
            JoinRefusal::NameTaken(_) => "member names taken",
            JoinRefusal::OtherStore | JoinRefusal::Full => "members of a store that was replaced",
        });
        self.join(member, JoinInput::Refused(refusal));
    }

    // ---- lease --------------------------------------------------------------------------------------------

    pub(super) fn granted_lease(&mut self, member: usize, id: LeaseId, requested_at: Tick) {
        let answered = self.env.time(Host::Member(member));
        let counted_from = match self.env.setup.variant {
            Variant::LeaseFromAnswer => answered,
            _ => requested_at,
        };
        self.member(member).lease =
            Some(MemberLease { id, schedule: LeaseSchedule::new(TIME_TO_LIVE, counted_from), checks: 0 });
        self.join(member, JoinInput::Granted(id, TIME_TO_LIVE));
        self.check_lease(member, id);
    }

    pub(super) fn check_lease(&mut self, member: usize, id: LeaseId) {
        let goes_on = self.env.setup.variant == Variant::AnswersAfterLease;
        let now = self.env.time(Host::Member(member));
        let Some(lease) = self.member(member).lease.as_mut().filter(|lease| lease.id == id) else { return };
        match lease.schedule.step(now) {
            LeaseStep::Wait(until) => {
                lease.checks += 1;
                let check = lease.checks;
                self.member_later(member, until.since(now), MemberStep::Lease { id, check });
            }
            LeaseStep::KeepAlive => {
                lease.schedule.ask();
                self.ask_store(member, Purpose::KeepAlive(id), StoreRequest::KeepAlive(id));
                self.check_lease(member, id);
            }
            LeaseStep::GiveUp if goes_on => {
                if !lease.schedule.is_asking() {
                    lease.schedule.ask();
                    self.ask_store(member, Purpose::KeepAlive(id), StoreRequest::KeepAlive(id));
                }
            }
            LeaseStep::GiveUp => {
                self.env.count("leases unconfirmed");
                self.lose_lease(member, id);
            }
        }
    }

    pub(super) fn kept_alive(&mut self, member: usize, id: LeaseId, requested_at: Tick, lives: bool) {
        let now = self.env.time(Host::Member(member));
        let from = if self.env.setup.variant == Variant::LeaseFromAnswer { now } else { requested_at };
        let Some(lease) = self.member(member).lease.as_mut().filter(|lease| lease.id == id) else { return };
        if !lives {
            self.env.count("leases gone");
            return self.lose_lease(member, id);
        }
        lease.schedule.confirm(now, from);
        self.check_lease(member, id);
    }

    pub(super) fn keep_alive_failed(&mut self, member: usize, id: LeaseId) {
        let goes_on = self.env.setup.variant == Variant::AnswersAfterLease;
        let now = self.env.time(Host::Member(member));
        let Some(lease) = self.member(member).lease.as_mut().filter(|lease| lease.id == id) else { return };
        lease.schedule.fail(now);
        if now < lease.schedule.deadline() || !goes_on {
            return self.check_lease(member, id);
        }
        lease.checks += 1;
        let check = lease.checks;
        self.member_later(member, STORE_RETRY_AFTER, MemberStep::Lease { id, check });
    }

    fn lose_lease(&mut self, member: usize, id: LeaseId) {
        self.member(member).lease = None;
        self.join(member, JoinInput::LeaseLost(id));
    }
}
