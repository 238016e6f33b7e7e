//! The entry of a member in the store: one attempt after the other to create it under a lease, until it is there.
//!
//! ```text
//!               granted               created
//!   Granting ──────────► Creating ─────────────► Registered
//!    ▲  ▲ ▲ failed │       │ │ lost: the entry     │ the lease is lost
//!    │  │ └─ pause ┘       │ │ is gone as well     │
//!    │  └──────────────────┼─┴─────────────────────┘
//!    │                     │ refused, failed: the lease is revoked
//!    └──── Waiting ◄───────┘
//! ```
//!
//! If the name is taken, it may be that of a former process of this member, until its lease expires. So the member
//! waits until its name leaves the list, or until the former lease has certainly expired. The same time is waited
//! if the map is full, or if the store was replaced: then this member is about to end.
//!
//! Pure: the caller gets leases, writes the entry, keeps the lease alive
//! ([`LeaseSchedule`](reprise_policy::lease_schedule::LeaseSchedule)), and waits. `L` identifies a lease.

use std::time::Duration;

use reprise_policy::shards::MemberName;

use crate::member_list::MemberView;
use crate::record_watch::STORE_RETRY_AFTER;
use crate::store_writes::StoreIdentity;

/// Wait for a former process's lease, in lease durations: one, and one more because the store may expire it late.
const FORMER_LEASE_FACTOR: u32 = 2;

/// The registration of a member in the store; see the module.
#[derive(Debug)]
pub struct Joining<L> {
    state: State<L>,
    /// Counts the attempts and waits, so that the end of a former wait is recognized.
    attempt: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State<L> {
    Granting,
    Creating { lease: L, time_to_live: Duration, is_lost: bool },
    Registered { lease: L, incarnation: u64 },
    Waiting(WaitReason),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WaitReason {
    /// The name is taken: the wait ends when the name is free.
    NameTaken,
    Other,
}

/// Input of a registration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinInput<L> {
    /// The store has granted a lease with this time to live.
    Granted(L, Duration),
    /// The entry was created at this revision.
    Created(u64),
    /// The entry was not created.
    Refused(JoinRefusal),
    /// The store has not answered, or has ended the lease.
    Failed,
    /// A lease is no longer certain to live.
    LeaseLost(L),
    /// The list of members no longer contains the name.
    NameFree,
    /// The wait of this attempt has ended.
    WaitOver(u64),
}

/// Why an entry was not created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinRefusal {
    /// The name has an entry in the store; in the list of members it may be missing already.
    NameTaken(ListedName),
    /// The store has another identity than at the start.
    OtherStore,
    /// The map is full.
    Full,
}

/// Whether the followed list of members contains the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListedName {
    /// It does.
    Listed,
    /// It does not: the entry was just deleted.
    Free,
}

/// Instruction to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinOutput<L> {
    /// Get a lease. [`JoinInput::Granted`] or [`JoinInput::Failed`] follows.
    Grant,
    /// Create the entry under this lease. [`JoinInput::Created`], [`JoinInput::Refused`] or [`JoinInput::Failed`]
    /// follows.
    CreateEntry(L),
    /// Revoke a lease that is no longer needed.
    Revoke(L),
    /// The member's incarnation has changed; `None` while it has none.
    Incarnation(Option<u64>),
    /// Wait, then send [`JoinInput::WaitOver`] with the number.
    Wait(u64, Duration),
    /// As [`JoinOutput::Wait`], but send [`JoinInput::NameFree`] if the name becomes free earlier.
    WaitForName(u64, Duration),
}

impl JoinRefusal {
    /// The reason why the transaction of an entry has conflicted. It requires the store's identity and a free name.
    /// `store` is the identity of the store now. `name` reads whether the list of members contains the name: the list
    /// may have changed while the identity was read.
    pub fn after_conflict(store: StoreIdentity, name: impl FnOnce() -> ListedName) -> JoinRefusal {
        match store {
            StoreIdentity::Other => JoinRefusal::OtherStore,
            StoreIdentity::Same => JoinRefusal::NameTaken(name()),
        }
    }
}

impl ListedName {
    /// Whether the list of members contains the name.
    pub fn of(view: &MemberView, name: &MemberName) -> ListedName {
        if view.find(name).is_some() { ListedName::Listed } else { ListedName::Free }
    }
}

impl<L: Copy + PartialEq> Joining<L> {
    /// Creates the registration. Its first instruction is [`JoinOutput::Grant`].
    pub fn begin() -> (Joining<L>, JoinOutput<L>) {
        (Joining { state: State::Granting, attempt: 1 }, JoinOutput::Grant)
    }

    /// Returns the incarnation of the entry, if it is there and its lease is not known to be lost.
    pub fn incarnation(&self) -> Option<u64> {
        match self.state {
            State::Registered { incarnation, .. } => Some(incarnation),
            State::Granting | State::Creating { .. } | State::Waiting(_) => None,
        }
    }

    /// Processes an input; returns the instructions.
    pub fn on(&mut self, input: JoinInput<L>) -> Vec<JoinOutput<L>> {
        match (self.state, input) {
            (State::Granting, JoinInput::Granted(lease, time_to_live)) => {
                self.state = State::Creating { lease, time_to_live, is_lost: false };
                vec![JoinOutput::CreateEntry(lease)]
            }
            (State::Granting, JoinInput::Failed) => vec![self.wait(WaitReason::Other, STORE_RETRY_AFTER)],
            // The entry was deleted with its lease.
            (State::Creating { is_lost: true, .. }, JoinInput::Created(_)) => vec![self.grant()],
            (State::Creating { lease, .. }, JoinInput::Created(incarnation)) => {
                self.state = State::Registered { lease, incarnation };
                vec![JoinOutput::Incarnation(Some(incarnation))]
            }
            (State::Creating { lease, time_to_live, .. }, JoinInput::Refused(refusal)) => {
                let former = time_to_live * FORMER_LEASE_FACTOR;
                let (reason, time) = match refusal {
                    JoinRefusal::NameTaken(ListedName::Listed) => (WaitReason::NameTaken, former),
                    JoinRefusal::NameTaken(ListedName::Free) => (WaitReason::Other, Duration::ZERO),
                    JoinRefusal::OtherStore | JoinRefusal::Full => (WaitReason::Other, former),
                };
                vec![JoinOutput::Revoke(lease), self.wait(reason, time)]
            }
            (State::Creating { lease, .. }, JoinInput::Failed) => {
                vec![JoinOutput::Revoke(lease), self.wait(WaitReason::Other, STORE_RETRY_AFTER)]
            }
            (State::Creating { lease, time_to_live, .. }, JoinInput::LeaseLost(lost)) if lease == lost => {
                self.state = State::Creating { lease, time_to_live, is_lost: true };
                Vec::new()
            }
            (State::Registered { lease, .. }, JoinInput::LeaseLost(lost)) if lease == lost => {
                vec![JoinOutput::Incarnation(None), self.grant()]
            }
            (State::Waiting(WaitReason::NameTaken), JoinInput::NameFree) => vec![self.grant()],
            (State::Waiting(_), JoinInput::WaitOver(attempt)) if attempt == self.attempt => {
                vec![self.grant()]
            }
            _ => Vec::new(),
        }
    }

    fn grant(&mut self) -> JoinOutput<L> {
        (self.state, self.attempt) = (State::Granting, self.attempt + 1);
        JoinOutput::Grant
    }

    fn wait(&mut self, reason: WaitReason, time: Duration) -> JoinOutput<L> {
        (self.state, self.attempt) = (State::Waiting(reason), self.attempt + 1);
        match reason {
            WaitReason::NameTaken => JoinOutput::WaitForName(self.attempt, time),
            WaitReason::Other => JoinOutput::Wait(self.attempt, time),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIFE: Duration = Duration::from_secs(2);

    /// Passes inputs to a new registration; returns it and the outputs of the last input.
    fn after(inputs: &[JoinInput<u32>]) -> (Joining<u32>, Vec<JoinOutput<u32>>) {
        let (mut joining, first) = Joining::begin();
        let mut outputs = vec![first];
        inputs.iter().for_each(|input| outputs = joining.on(*input));
        (joining, outputs)
    }

    #[test]
    fn registers_under_a_lease_and_again_when_it_is_lost() {
        assert_eq!(after(&[]).1, [JoinOutput::Grant]);
        let granted = JoinInput::Granted(7, LIFE);
        assert_eq!(after(&[granted]).1, [JoinOutput::CreateEntry(7)]);
        let (mut joining, outputs) = after(&[granted, JoinInput::Created(5)]);
        assert_eq!(outputs, [JoinOutput::Incarnation(Some(5))]);
        assert_eq!(joining.on(JoinInput::LeaseLost(6)), [], "a former lease");
        assert_eq!(joining.incarnation(), Some(5));
        let again = [JoinOutput::Incarnation(None), JoinOutput::Grant];
        assert_eq!(joining.on(JoinInput::LeaseLost(7)), again);
        assert_eq!(joining.incarnation(), None);
    }

    #[test]
    fn entry_whose_lease_is_lost_before_its_creation_is_not_used() {
        let lost = [JoinInput::Granted(7, LIFE), JoinInput::LeaseLost(7)];
        assert_eq!(after(&lost).1, []);
        let (joining, outputs) = after(&[lost[0], lost[1], JoinInput::Created(5)]);
        assert_eq!((outputs, joining.incarnation()), (vec![JoinOutput::Grant], None));
    }

    #[test]
    fn list_of_members_is_read_once_the_store_is_known_to_be_the_same() {
        let refusal = JoinRefusal::after_conflict(StoreIdentity::Same, || ListedName::Free);
        assert_eq!(refusal, JoinRefusal::NameTaken(ListedName::Free));
        let unread = || panic!("the names of another store are not read");
        assert_eq!(JoinRefusal::after_conflict(StoreIdentity::Other, unread), JoinRefusal::OtherStore);
    }

    #[test]
    fn waits_for_a_taken_name_until_it_is_free_or_its_lease_has_expired() {
        let taken = JoinInput::Refused(JoinRefusal::NameTaken(ListedName::Listed));
        let (mut joining, outputs) = after(&[JoinInput::Granted(7, LIFE), taken]);
        assert_eq!(outputs, [JoinOutput::Revoke(7), JoinOutput::WaitForName(2, LIFE * 2)]);
        assert_eq!(joining.on(JoinInput::WaitOver(1)), [], "of a former attempt");
        assert_eq!(joining.on(JoinInput::NameFree), [JoinOutput::Grant]);
        assert_eq!(joining.on(JoinInput::NameFree), []);
        assert_eq!(joining.on(JoinInput::WaitOver(2)), [], "it is over");
        let free = JoinInput::Refused(JoinRefusal::NameTaken(ListedName::Free));
        let outputs = after(&[JoinInput::Granted(7, LIFE), free]).1;
        assert_eq!(outputs, [JoinOutput::Revoke(7), JoinOutput::Wait(2, Duration::ZERO)]);
    }

    #[test]
    fn another_reason_does_not_end_with_a_free_name() {
        for refusal in [JoinRefusal::OtherStore, JoinRefusal::Full] {
            let (mut joining, outputs) = after(&[JoinInput::Granted(7, LIFE), JoinInput::Refused(refusal)]);
            assert_eq!(outputs, [JoinOutput::Revoke(7), JoinOutput::Wait(2, LIFE * 2)]);
            assert_eq!(joining.on(JoinInput::NameFree), []);
            assert_eq!(joining.on(JoinInput::WaitOver(2)), [JoinOutput::Grant]);
        }
    }

    #[test]
    fn failed_calls_are_repeated_after_a_pause_without_the_lease() {
        assert_eq!(after(&[JoinInput::Failed]).1, [JoinOutput::Wait(2, STORE_RETRY_AFTER)]);
        let (mut joining, outputs) = after(&[JoinInput::Granted(7, LIFE), JoinInput::Failed]);
        assert_eq!(outputs, [JoinOutput::Revoke(7), JoinOutput::Wait(2, STORE_RETRY_AFTER)]);
        assert_eq!(joining.on(JoinInput::WaitOver(2)), [JoinOutput::Grant]);
    }
}
