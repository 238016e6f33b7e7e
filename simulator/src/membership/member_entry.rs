//! A member follows the list of members in the store, and keeps its own entry there under a lease.
//!
//! ```text
//!   joining ──the name is free──► registered ──the lease is lost──► joining
//! ```
//!
//! As `controlplane/src/shards.rs`.

use std::time::Duration;

use reprise_policy::lease_schedule::{LeaseSchedule, LeaseStep};
use reprise_policy::{Epoch, Tick};

use super::{MemberStep, Purpose};
use crate::member::{MemberLease, View};
use crate::messages::StoreRequest;
use crate::network::Host;
use crate::setup::{TIME_TO_LIVE, Variant};
use crate::simulation::Simulation;
use crate::store::{
    Change, Condition, Entry, Key, LeaseId, Prefix, Revision, TransactionError, Value, Write,
};

/// Times to live for which the lease of a former process with this name may remain.
const FORMER_LIVES: u32 = 2;

impl Simulation {
    // ---- following the members ----------------------------------------------------------------------------

    /// Handles the list of members; later changes are watched.
    pub(super) fn members_listed(&mut self, member: usize, revision: Revision, entries: &[(Key, Entry)]) {
        let listed = entries.iter().filter_map(|(key, entry)| Some((name_of(*key)?, entry.created)));
        self.member(member).joining.listed = listed.collect();
        self.publish(member, revision);
        let watch = StoreRequest::Watch { prefix: Prefix::Members, from: revision + 1 };
        self.ask_store(member, Purpose::FollowWatch, watch);
    }

    pub(super) fn follow_again(&mut self, member: usize) {
        if self.setup.variant == Variant::CompactionLosesChanges {
            let from = self.store_process.store.revision() + 1;
            let watch = StoreRequest::Watch { prefix: Prefix::Members, from };
            return self.ask_store(member, Purpose::FollowWatch, watch);
        }
        self.ask_store(member, Purpose::FollowRange, StoreRequest::Range(Prefix::Members));
    }

    pub(super) fn on_changes(&mut self, member: usize, of: &Purpose, revision: Revision, changes: &[Change]) {
        match of {
            Purpose::FollowWatch => {
                let listed = &mut self.member(member).joining.listed;
                for change in changes {
                    let Some(name) = name_of(change.key) else { continue };
                    match &change.entry {
                        Some(entry) => listed.insert(name, entry.created),
                        None => listed.remove(&name),
                    };
                }
                self.publish(member, revision);
            }
            Purpose::Watch(_) => self.records_changed(member, changes),
            // Any change of the member's own entry ends its registration.
            Purpose::IdentityWatch(_) => self.end_member(member),
            of => unreachable!("unexpected watch: {of:?}"),
        }
    }

    /// Publishes a list of members, if it differs from the last one.
    fn publish(&mut self, member: usize, revision: Revision) {
        let listed = self.member(member).joining.listed.clone();
        if self.member(member).view.members == listed {
            return;
        }
        let map = self.map_of(Epoch(revision), listed.keys().copied());
        self.audit_list(revision, &listed);
        let view = View { members: listed, map };
        let now = self.time(Host::Member(member));
        let running = self.member(member);
        running.view = view;
        let free = !running.view.members.contains_key(&running.name);
        if free && running.joining.waits {
            self.join(member);
        }
        self.trace.note(|| format!("member {member} follows revision {revision} at {now:?}"));
        self.place_changed(member);
    }

    // ---- lease and entry ----------------------------------------------------------------------------------

    pub(super) fn join_later(&mut self, member: usize, delay: Duration) {
        let joining = &mut self.member(member).joining;
        joining.attempt += 1;
        let attempt = joining.attempt;
        self.member_later(member, delay, MemberStep::Join { attempt });
    }

    pub(super) fn join(&mut self, member: usize) {
        let joining = &mut self.member(member).joining;
        (joining.attempt, joining.waits) = (joining.attempt + 1, false);
        self.ask_store(member, Purpose::Grant, StoreRequest::Grant(TIME_TO_LIVE));
    }

    pub(super) fn granted_lease(&mut self, member: usize, id: LeaseId, requested_at: Tick) {
        let answered = self.time(Host::Member(member));
        let counted_from = match self.setup.variant {
            Variant::LeaseFromAnswer => answered,
            _ => requested_at,
        };
        let name = self.member(member).name;
        self.member(member).lease =
            Some(MemberLease { id, schedule: LeaseSchedule::new(TIME_TO_LIVE, counted_from), checks: 0 });
        let write = Write { key: Key::Member(name), value: Value::Nothing, lease: Some(id) };
        let identity = self.identity(member);
        let same_store = Condition::Modified(Key::IdentityOf(identity.number), identity.revision);
        let (conditions, writes) = (vec![same_store, Condition::Absent(Key::Member(name))], vec![write]);
        self.ask_store(member, Purpose::Put(id), StoreRequest::Transact { conditions, writes });
        self.check_lease(member, id);
    }

    pub(super) fn put(&mut self, member: usize, id: LeaseId, result: Result<Revision, TransactionError>) {
        match result {
            Ok(revision) => {
                self.count("members registered");
                let running = self.member(member);
                if running.lease.is_some_and(|lease| lease.id == id) {
                    running.registration = Some(revision);
                    self.place_changed(member);
                } else {
                    // The lease was lost meanwhile.
                    self.join(member);
                }
            }
            Err(TransactionError::Conflict) => {
                let key = Key::IdentityOf(self.identity(member).number);
                self.ask_store(member, Purpose::PutRefused(id), StoreRequest::Get(vec![key]));
            }
            Err(TransactionError::LeaseGone) => self.store_failed(member, &Purpose::Put(id)),
        }
    }

    /// Handles a rejected entry: the name is taken, or the store was replaced.
    pub(super) fn put_refused(&mut self, member: usize, id: LeaseId, identity: &Option<Entry>) {
        self.revoke_lease(member, id);
        let revision = identity.as_ref().map(|entry| entry.modified);
        if revision != Some(self.identity(member).revision) {
            self.count("members of a store that was replaced");
            return self.join_later(member, TIME_TO_LIVE * FORMER_LIVES);
        }
        self.count("member names taken");
        let running = self.member(member);
        let free = !running.view.members.contains_key(&running.name);
        running.joining.waits = !free;
        self.join_later(member, if free { Duration::ZERO } else { TIME_TO_LIVE * FORMER_LIVES });
    }

    /// Revokes a lease that is no longer needed.
    pub(super) fn revoke_lease(&mut self, member: usize, id: LeaseId) {
        let running = self.member(member);
        running.lease = running.lease.filter(|lease| lease.id != id);
        self.ask_store(member, Purpose::Revoke, StoreRequest::Revoke(id));
    }

    pub(super) fn check_lease(&mut self, member: usize, id: LeaseId) {
        let goes_on = self.setup.variant == Variant::AnswersAfterLease;
        let now = self.time(Host::Member(member));
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
                self.count("leases unconfirmed");
                self.lose_lease(member);
            }
        }
    }

    pub(super) fn kept_alive(&mut self, member: usize, id: LeaseId, requested_at: Tick, lives: bool) {
        let now = self.time(Host::Member(member));
        let from = if self.setup.variant == Variant::LeaseFromAnswer { now } else { requested_at };
        let Some(lease) = self.member(member).lease.as_mut().filter(|lease| lease.id == id) else { return };
        if !lives {
            self.count("leases gone");
            return self.lose_lease(member);
        }
        lease.schedule.confirm(now, from);
        self.check_lease(member, id);
    }

    fn lose_lease(&mut self, member: usize) {
        let running = self.member(member);
        running.lease = None;
        // A lease that is lost before its entry was written is handled by the answer to the write.
        if running.registration.take().is_some() {
            self.place_changed(member);
            self.join(member);
        }
    }
}

fn name_of(key: Key) -> Option<usize> {
    match key {
        Key::Member(name) => Some(name),
        _ => None,
    }
}
